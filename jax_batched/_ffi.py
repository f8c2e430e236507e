"""The native modules as JAX sees them: targets, attributes and the sizes that kernels serve.

A target name and its attributes are stored in exported programs: they are only ever added to.
"""

import contextlib
import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

Platform = Literal["cpu", "cuda"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda")

# The platform as `jax.ffi` spells it, and the native module that holds its handlers.
_FFI_PLATFORM = {"cpu": "cpu", "cuda": "CUDA"}
_MODULE = {"cpu": "jax_batched._cpu", "cuda": "jax_batched._cuda"}

# Builds the CUDA module on a machine without a CUDA toolkit, too.
CUDA_BUILD_COMMAND = "JAX_BATCHED_CUDA=PYPI pip install ."

# Largest n that a kernel serves, per operation; beyond it the operation is plain `lax`. These are
# properties of the kernels of this version on every GPU, not of the machine at hand, so that a
# program can be lowered for CUDA where there is no GPU.
_COMPUTED = ("float32", "float64", "complex64", "complex128")
_STORED = ("float16", "bfloat16")
_MAX_N: dict[str, dict[str, int]] = {
    "cholesky": dict.fromkeys((*_COMPUTED, *_STORED), 512),
    "triangular_solve": dict.fromkeys(_COMPUTED, 512),
    "cho_solve": dict.fromkeys(_COMPUTED, 512),
    "solve_pos": dict.fromkeys((*_COMPUTED, *_STORED), 512),
    "cholesky_pullback": dict.fromkeys(_COMPUTED, 512),
    "residual": dict.fromkeys(_COMPUTED, 512),
}

# Largest n for which CUDA's kernels read and write float16 and bfloat16 themselves, with one
# right-hand side if any (the rows of kFloat16 of ffi/cuda/tiers.h); elsewhere the operands are cast
# to float32 and the results back.
_CUDA_STORED_MAX_N = {"cholesky": 96, "solve_pos": 48}

OPERATIONS = tuple(_MAX_N)

# Up to which n and how many right-hand sides (None: any number) solve_pos is one kernel on CUDA,
# where factor and solve are not faster: what the rows of ffi/cuda/tiers.h that need no particular
# GPU cover, for a program may be lowered for another one. (float32 beyond 96, complex64 beyond 64
# and complex128 beyond 48: more right-hand sides are so many factorizations. float64 beyond 64: the
# factor is in shared memory, of which 144 rows fill the 99 KB that every GPU since sm_80 has.)
_CUDA_FUSED: dict[str, tuple[tuple[int, int | None], ...]] = {
    "float32": ((96, None), (128, 1)),
    "float64": ((64, None), (144, 16)),
    "complex64": ((64, None), (96, 1)),
    "complex128": ((48, None), (64, 1)),
}

# Largest n for which cholesky_pullback is one kernel rather than a product and two solves: on CUDA
# what 99 KB of shared memory hold, the least since sm_80; on the CPU where it is faster in batches.
_MAX_PULLBACK_N = {
    "cpu": {"float32": 96, "float64": 128, "complex64": 128, "complex128": 128},
    "cuda": {"float32": 192, "float64": 128, "complex64": 128, "complex128": 80},
}


def target_name(operation: str) -> str:
    """Name of the FFI target of an operation, the same on every platform."""
    return f"jax_batched.{operation}.v1"


def max_n(operation: str, dtype: Any) -> int:
    """Largest matrix size that the operation's kernels serve; 0 where there are none.

    Beyond it the operation is `lax`.
    """
    return _MAX_N.get(operation, {}).get(np.dtype(dtype).name, 0)


def max_fused_n(platform: Platform, dtype: Any) -> int:
    """Largest n for which solve_pos is one kernel rather than factor and solve."""
    if platform == "cpu":
        return max_n("solve_pos", dtype)
    return _CUDA_FUSED[np.dtype(dtype).name][-1][0]


def is_fused(platform: Platform, n: int, nrhs: Any, dtype: Any) -> bool:
    """Whether solve_pos is one kernel for matrices (n, n) and right-hand sides (n, nrhs).

    Any number of right-hand sides, also a symbolic one, has an answer.
    """
    if np.dtype(dtype).name in _STORED:
        return serves_stored(platform, "solve_pos", n, nrhs)
    if n > max_fused_n(platform, dtype):
        return False
    return platform == "cpu" or any(
        n <= largest and (most is None or (isinstance(nrhs, int) and nrhs <= most))
        for largest, most in _CUDA_FUSED[np.dtype(dtype).name]
    )


def max_pullback_n(platform: Platform, dtype: Any) -> int:
    """Largest n for which cholesky_pullback is one kernel."""
    return _MAX_PULLBACK_N[platform][np.dtype(dtype).name]


def serves_stored(platform: Platform, operation: str, n: int, nrhs: Any = 1) -> bool:
    """Whether an operation's kernel takes float16 and bfloat16 as they are.

    Any number of right-hand sides, also a symbolic one, has an answer.
    """
    one = isinstance(nrhs, int) and nrhs == 1
    return platform == "cuda" and one and n <= _CUDA_STORED_MAX_N.get(operation, 0)


def _load(platform: Platform) -> tuple[ModuleType | None, str]:
    """The native module of a platform, or None and the reason why it is not there."""
    name = _MODULE[platform]
    try:
        return importlib.import_module(name), "built in"
    except ModuleNotFoundError as error:
        if platform == "cpu":
            raise ImportError(
                f"{name} is missing: this is a source tree that was not built. Install it with "
                "`pip install .`, or `pip install -e .` to run from the source tree"
            ) from error
        return None, f"this installation was built without {name}"
    except ImportError as error:
        if platform == "cpu" and "JAX_BATCHED_ISA" in os.environ:
            raise  # it names an instruction set that cannot be had
        return None, f"{name} does not load: {error}"


_loaded: dict[str, tuple[ModuleType | None, str]] = {
    platform: _load(platform) for platform in PLATFORMS
}


def native_module(platform: Platform) -> ModuleType | None:
    """The module that holds a platform's kernels, if it was built."""
    return _loaded[platform][0]


def native_module_status(platform: Platform) -> str:
    """Why a platform's kernels are there or not."""
    return _loaded[platform][1]


def has_kernels(platform: Platform, *, for_export: bool) -> bool:
    """Whether calls on this platform that a kernel can serve are lowered to it.

    A process without the CUDA module that has no CUDA device either can only lower programs for
    CUDA in order to export them: they call the kernels of the process that will run them. With a
    device but without the module, the program may well run here, and is `lax`: a warning says so,
    once, unless the program is lowered for export.
    """
    if native_module(platform) is not None or not devices(platform):
        return True
    if not for_export:
        _warn_of_missing_cuda_module()
    return False


@functools.cache
def _warn_of_missing_cuda_module() -> None:
    warnings.warn(
        f"jax_batched: there is a CUDA device, but {native_module_status('cuda')}. Operations run "
        f"there as plain `lax`, which is slower. `{CUDA_BUILD_COMMAND}` in the source folder "
        "builds the kernels.",
        RuntimeWarning,
        stacklevel=2,
    )


def devices(platform: Platform) -> tuple[jax.Device, ...]:
    """The devices of a platform that this process sees, those of other hosts included."""
    try:
        return tuple(jax.devices(platform))
    except RuntimeError:
        return ()


def register_targets() -> None:
    """Registers every handler of the modules that were built."""
    for platform in PLATFORMS:
        module = native_module(platform)
        if module is None:
            continue
        for operation, capsule in module.handlers().items():
            name = target_name(operation)
            jax.ffi.register_ffi_target(name, capsule, platform=_FFI_PLATFORM[platform])
            jax.ffi.register_ffi_target_as_batch_partitionable(name)


class Tier(NamedTuple):
    """A compiled CUDA kernel and the calls that it can serve.

    Attributes:
      operation, dtype: of those calls; "float16" stands for bfloat16, too.
      kernel: the name that `force_kernel` takes.
      min_n, max_n: the sizes.
      capability: compute capability that it needs (90 for sm_90); 0: any.
      fast: serves accuracy="fast" alone.
    """

    operation: str
    dtype: str
    kernel: str
    min_n: int
    max_n: int
    capability: int
    fast: bool


@functools.cache
def cuda_tiers() -> tuple[Tier, ...]:
    """The compiled CUDA kernels; none without the CUDA module."""
    module = native_module("cuda")
    return () if module is None else tuple(Tier(*row) for row in module.tiers())


_forced_kernel = ""


@contextlib.contextmanager
def force_kernel(name: str) -> Iterator[None]:
    """Uses the named kernel instead of the one in the tier table, in what is traced inside.

    For tests and the tuner. The CPU has "lanes", "blocked" and the plain "reference"; `cuda_tiers`
    lists CUDA's. A kernel that cannot serve a call fails it. "lax" is the operation without
    kernels, as on platforms that have none.
    """
    global _forced_kernel
    before, _forced_kernel = _forced_kernel, name
    try:
        yield
    finally:
        _forced_kernel = before


def forced_kernel() -> str:
    """Name of the kernel to use, or "" for the tier table's."""
    return _forced_kernel
