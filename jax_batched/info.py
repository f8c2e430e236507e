"""``python -m jax_batched.info``: versions, devices and the path of each operation."""

import jax

import jax_batched as jb
from jax_batched import _ffi


def main() -> None:
    """Prints what `backend_info` says, as a table."""
    print(f"jax_batched {jb.__version__}, jax {jax.__version__}")
    print(f"devices: {', '.join(f'{d.platform} {d.device_kind}' for d in jax.devices())}")
    rows = [("operation", "platform", "path", "n up to", "why")]
    rows += [
        (r.operation, r.platform, r.path, str(r.max_n or "-"), r.reason) for r in jb.backend_info()
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    if _ffi.native_module("cuda") is None:
        print(f"`{_ffi.CUDA_BUILD_COMMAND}` in the source folder builds the kernels for CUDA.")


if __name__ == "__main__":
    main()
