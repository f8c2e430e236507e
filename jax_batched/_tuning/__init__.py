"""The parts of `jax_batched.tune`, one subject a module.

- ``calls``: which calls are measured: operations, sizes, right-hand sides, bytes.
- ``measuring``: one call with each of its kernels, checked and timed.
- ``choice``: from times to the kernel of each size.
- ``file``: the file that measurements go into.
- ``progress``: what is shown meanwhile.
"""
