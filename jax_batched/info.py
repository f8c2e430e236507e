"""``python -m jax_batched.info``: versions, devices and the path of each operation."""

import jax_batched as jb
from jax_batched import _ffi
from jax_batched._info import columns, versions


def main() -> None:
    """Prints what `backend_info` says, as a table."""
    print(versions())
    rows = [("operation", "platform", "path", "n up to", "why")]
    rows += [
        (r.operation, r.platform, r.path, str(r.max_n or "-"), r.reason) for r in jb.backend_info()
    ]
    print("\n".join(columns(rows)))
    if _ffi.native_module("cuda") is None:
        print(f"`{_ffi.CUDA_BUILD_COMMAND}` in the source folder builds the kernels for CUDA.")


if __name__ == "__main__":
    main()
