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

from jax_batched import _tuned

Platform = Literal["cpu", "cuda"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda")

# The platform as `jax.ffi` spells it, and the native module that holds its handlers.
_FFI_PLATFORM = {"cpu": "cpu", "cuda": "CUDA"}
_MODULE = {"cpu": "jax_batched._cpu", "cuda": "jax_batched._cuda"}

# Builds the CUDA module on a machine without a CUDA toolkit, too.
CUDA_BUILD_COMMAND = "JAX_BATCHED_CUDA=PYPI pip install ."


def target_name(operation: str) -> str:
    """Name of the FFI target of an operation, the same on every platform."""
    return f"jax_batched.{operation}.v1"


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
        if platform == "cpu":
            if "JAX_BATCHED_ISA" in os.environ:
                raise  # it names an instruction set that cannot be had
            raise ImportError(f"{name} does not load: {error}") from error
        return None, f"{name} does not load: {error}"


_loaded: dict[str, tuple[ModuleType | None, str]] = {
    platform: _load(platform) for platform in PLATFORMS
}
_native: Any = _loaded["cpu"][0]  # always there: it raises if not

# What the kernels of this version serve, on every GPU and not on the machine at hand, so that a
# program can be lowered for CUDA where there is no GPU. Per operation: the largest n beyond which
# it is plain `lax`, and its dtypes.
_MAX_N: dict[str, dict[str, int]] = {
    operation: dict.fromkeys(dtypes, largest) for operation, largest, dtypes in _native.operations()
}
TARGETS = tuple(_MAX_N)
# Without those whose matrices differ in size, which are the same operations (`_sized.py`).
SIZED_SUFFIX: str = _native.SIZED_SUFFIX
OPERATIONS = tuple(name for name in TARGETS if not name.endswith(SIZED_SUFFIX))

# Per platform, operation and dtype: up to which n and how many right-hand sides (None: any number)
# it is one kernel. 16-bit elements have kernels that take them as they are, or none.
_LIMITS: dict[tuple[str, str, str], list[tuple[int, int | None]]] = {}
for _platform, _operation, _dtype, _largest, _most in _native.limits():
    _LIMITS.setdefault((_platform, _operation, _dtype), []).append((_largest, _most))


def max_n(platform: Platform, operation: str, dtype: Any) -> int:
    """Largest matrix size that the operation's kernels serve there; 0 where there are none.

    Beyond it the operation is `lax`, or divided into blocks (`jax_batched.blocked`).
    """
    name = np.dtype(dtype).name
    kernels = any(key[:2] == (platform, operation) for key in _LIMITS)
    return _MAX_N.get(operation, {}).get(name, 0) if kernels else 0


def is_one_kernel(platform: Platform, operation: str, dtype: Any, n: int, nrhs: Any = 1) -> bool:
    """Whether an operation on matrices (n, n) and right-hand sides (n, nrhs) is one kernel there.

    Any number of right-hand sides, also a symbolic one, has an answer.
    """
    return any(
        n <= largest and (most is None or (isinstance(nrhs, int) and nrhs <= most))
        for largest, most in _LIMITS.get((platform, operation, np.dtype(dtype).name), ())
    )


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
    """The CUDA kernels among which there is a choice, whether or not the module was built."""
    return tuple(Tier(*row) for row in _native.cuda_tiers())


def chosen_cuda_kernel(
    operation: str, dtype: str, n: int, nrhs: int, fast: bool, capability: int
) -> str:
    """Name of the kernel that serves a call on a GPU of this compute capability."""
    return str(_native.cuda_chosen_kernel(operation, dtype, n, nrhs, fast, capability))


def _served_from(kind: _tuned.Kind, n: int, kernel: str) -> int:
    return max(
        (
            tier.max_n
            for tier in cuda_tiers()
            if (tier.operation, tier.dtype, tier.kernel) == (kind.operation, kind.dtype, kernel)
            and tier.min_n <= n <= tier.max_n
            and tier.capability <= kind.capability
            and (kind.fast or not tier.fast)
        ),
        default=0,
    )


def set_tuned(table: _tuned.Table) -> None:
    """What was measured decides from now on; calls that are under way keep their kernels."""
    rows = list(_tuned.rows(table))
    for platform in PLATFORMS:
        module = native_module(platform)
        if module is not None:
            module.set_tuned(rows)


set_tuned(_tuned.load(_served_from))


_forced_kernel = ""


@contextlib.contextmanager
def force_kernel(name: str) -> Iterator[None]:
    """Uses the named kernel instead of the one in the tier table, in what is traced inside.

    For tests and the tuner. The CPU has "lanes", "blocked" and the plain "reference"; `cuda_tiers`
    lists CUDA's. A kernel that cannot serve a call fails it. "lax" is the operation without
    kernels, as on platforms that have none; "beyond" divides matrices into blocks.
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
