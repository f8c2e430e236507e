"""What `jax.export` must know of this library."""

import jax.export

from jax_batched import _ffi


def export_disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The `disabled_checks` with which `jax.export` exports programs that call this library.

    `jax.export` refuses calls of targets that JAX itself does not promise to keep: "Cannot
    serialize code with custom calls whose targets have no compatibility guarantees". Those of this
    library are kept (docs/compatibility.md says for how long), and listed here:

        exported = jax.export.export(
            jax.jit(f), platforms=("cpu", "cuda"), disabled_checks=jb.export_disabled_checks()
        )(*shapes)

    A program for CUDA can be exported on a machine without a GPU and without the CUDA module. It
    calls the kernels of the process that runs it, which must import jax_batched first. Programs
    exported inside `override_jax_linalg` need these checks too.
    """
    return [
        jax.export.DisabledSafetyCheck.custom_call(_ffi.target_name(operation))
        for operation in _ffi.TARGETS
    ]
