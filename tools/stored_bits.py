"""Stores a hash of every result's bits, and checks that a later version gives the same ones.

    python tools/stored_bits.py store FILE [--platform cuda]
    python tools/stored_bits.py check FILE

The package is the one that Python imports. A result has a key such as
``cho_solve/float32/n=33/lower=1,nrhs=5/kernel=block_rows``. Without a name (``kernel=``) the call
goes through the public function, with all its choices. A named kernel is called by its FFI target,
whose name and attributes never change. `check` fails where a key that both sides have differs, and
where a call that names no kernel is missing. A difference that is another kernel's stored result is
listed as such: so a deleted kernel's calls show who took them over.

Operands are made by integer arithmetic and single correctly rounded operations: they are the same
on every machine and with every version of NumPy.
"""

import argparse
import collections
import gzip
import hashlib
import importlib
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from platform import machine
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

COMPUTED = ("float32", "float64", "complex64", "complex128")
STORED = ("float16", "bfloat16")

# Around the edges of the kernels' tables.
SIZES = (
    *range(1, 18), 24, 31, 32, 33, 40, 47, 48, 49, 56, 57, 63, 64, 65, 72, 80, 88, 95, 96, 97, 104,
    105, 112, 120, 127, 128, 129, 144, 145, 160, 161, 192, 224, 225, 256, 257, 320, 321, 384, 511,
    512,
)  # fmt: skip
# Those with every number of right-hand sides and with shared operands; the others have two numbers.
FULL = (1, 2, 3, 5, 8, 9, 13, 16, 17, 24, 31, 33, 47, 48, 64, 65, 96, 104, 128, 145, 257)
NRHS = (1, 2, 3, 5, 8, 17)

CPU_KERNELS = {"blocked": 512, "lanes": 321, "reference": 129}  # and up to which n they are run
# Up to which n, and for how many right-hand sides, solve_pos and cholesky_pullback have kernels.
CUDA_SOLVE_POS = {
    "float32": ((96, 512), (128, 1)),
    "float64": ((64, 512), (144, 16)),
    "complex64": ((64, 512), (96, 1)),
    "complex128": ((48, 512), (64, 1)),
    "float16": ((48, 1),),
    "bfloat16": ((48, 1),),
}
PULLBACK = {
    "cpu": dict.fromkeys(COMPUTED, 129),
    "cuda": {"float32": 192, "float64": 128, "complex64": 128, "complex128": 80},
}

FAILS = "fails"  # in place of a hash

PROGRAM_CALLS = 60  # of one compiled program, about
# What XLA compiles itself must not depend on the machine more than it has to.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
)
XLA_CPU_FLAGS = "--xla_cpu_max_isa=AVX2" if machine() == "x86_64" else ""
ISAS = ("baseline", "avx2", "avx512")

Array = np.ndarray[Any, Any]


# Of the package, what is not public.


def cuda_tiers() -> list[tuple[Any, ...]]:
    """(operation, dtype, kernel, min_n, max_n, capability, fast) of the CUDA kernels."""
    importlib.import_module("jax_batched")
    for name, module in sorted(sys.modules.items()):
        if name.startswith("jax_batched.") and hasattr(module, "cuda_tiers"):
            return [tuple(row) for row in module.cuda_tiers()]
    raise RuntimeError("no module of jax_batched has cuda_tiers(), the list of the CUDA kernels")


def cpu_isa() -> str:
    """The instruction set in use."""
    return str(importlib.import_module("jax_batched._cpu").isa())


# Operands.


def words(name: str, count: int) -> Array:
    """Pseudo-random 64-bit words: SplitMix64, seeded by a name."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(zlib.crc32(name.encode()) * 0xD1B54A32D192ED03 % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(name: str, dtype: str, shape: tuple[int, ...]) -> Array:
    """Numbers in [-1, 1), exact in float64 and rounded once; complex with both parts there."""
    if np.dtype(dtype).kind == "c":
        real = uniform(f"{name}.real", "float64", shape)
        return (real + 1j * uniform(f"{name}.imag", "float64", shape)).astype(dtype)
    bits = (words(name, math.prod(shape)) >> np.uint64(11)).astype(np.float64)
    return np.asarray((bits * 2.0**-52 - 1).reshape(shape).astype(dtype))


def spoil(a: Array, *, upper: bool, strict: bool = True) -> Array:
    """A copy with NaN in one triangle."""
    a = a.copy()
    mask = np.tri(a.shape[-1], k=-1 if strict else 0, dtype=bool)
    a[..., mask.T if upper else mask] = np.nan
    return a


def definite(dtype: str, n: int, batch: int, *, read: str) -> Array:
    """Matrices of which one triangle or ("mean") their Hermitian part is positive definite.

    The spectrum of the off-diagonal part is within 1.64 sqrt(n) of zero. Matrices are scaled by
    powers of two; the middle one of a batch is not definite. What is not read is NaN.
    """
    wide = "complex128" if np.dtype(dtype).kind == "c" else "float64"
    a = uniform(f"definite {n}", wide, (batch, n, n))
    i = np.arange(n)
    a[:, i, i] = a[:, i, i].real + (2 * math.isqrt(n) + 3)
    a[batch // 2, n // 2, n // 2] = -1
    if dtype not in STORED:
        a *= (2.0 ** (7 * (np.arange(batch) % 3 - 1)))[:, None, None]
    if wide == "complex128":
        a.imag[:, i, i] = np.nan
    if read != "mean":
        a = spoil(a, upper=read == "lower")
    return a.astype(dtype)


def triangular(dtype: str, n: int, batch: int, *, real_diagonal: bool = False) -> Array:
    """Matrices both of whose triangles are well conditioned, unit diagonal or not."""
    a = uniform(f"triangular {n}", dtype, (batch, n, n))
    a *= np.asarray(2.0 ** -((n.bit_length() + 1) // 2), dtype)
    i = np.arange(n)
    diagonal = uniform(f"diagonal {n}", "float64", (batch, n)) / 4 + 1.5
    a[:, i, i] = diagonal if real_diagonal else a[:, i, i] + diagonal.astype(dtype)
    return a


# Calls.


class Call(NamedTuple):
    """A call of an operation.

    Attributes:
      variant: what tells it apart from others of its operation, dtype and n.
      operands: NumPy arrays.
      public: the call through the public functions; None if there is none.
      attributes, results: of the FFI target.
      nrhs: right-hand sides; fast: it asks for accuracy="fast".
    """

    variant: str
    operands: tuple[Array, ...]
    public: Callable[..., Any] | None
    attributes: Mapping[str, Any]
    results: tuple[jax.ShapeDtypeStruct, ...]
    nrhs: int = 1
    fast: bool = False


def like(x: Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def infos(batch: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Those of `info`."""
    return jax.ShapeDtypeStruct(batch, jnp.int32)


def batch_size(n: int) -> int:
    """Matrices of a batch: for small ones more than two groups of whatever works side by side."""
    return 37 if n <= 32 else 19 if n <= 129 else 5 if n <= 257 else 3


def several(n: int) -> tuple[int, ...]:
    """Numbers of right-hand sides for a size."""
    return NRHS if n in FULL else (1, NRHS[1 + n % 5])


def side(upper: bool) -> str:
    """The triangle's name."""
    return "upper" if upper else "lower"


def cholesky(jb: Any, dtype: str, n: int) -> Iterator[Call]:
    """Both triangles, one read or their mean."""
    for upper, mean in itertools.product((False, True), repeat=2):
        a = definite(dtype, n, batch_size(n), read="mean" if mean else side(upper))
        for accuracy in ("ieee", "fast") if upper == mean else ("ieee",):
            options = {"upper": upper, "symmetrize_input": mean, "accuracy": accuracy}
            yield Call(
                f"upper={upper:d},mean={mean:d},{accuracy}",
                (a,),
                lambda a, options=options: jb.cholesky(a, **options, return_info=True),
                {"upper": upper, "symmetrize": mean, "accuracy": accuracy},
                (like(a), infos(a.shape[:1])),
                fast=accuracy == "fast",
            )


def right_hand_sides(
    dtype: str, n: int, a: Array
) -> Iterator[tuple[int, int, str, Array, Array, Array]]:
    """(index, nrhs, a word for it, a, b, b's values where x has them) for a size."""
    for index, nrhs in enumerate(several(n)):
        b = uniform(f"rhs {n} {nrhs}", dtype, (a.shape[0], n, nrhs))
        yield index, nrhs, f"nrhs={nrhs}", a, b, b
    if n in FULL:
        b = uniform(f"rhs {n} shared", dtype, (1, 5, n, 2))
        yield 1, 2, "nrhs=2,shared", a[:3, None], b, np.broadcast_to(b, (3, 5, n, 2))


def triangular_solve(jb: Any, dtype: str, n: int) -> Iterator[Call]:
    """Flags drawn for each number of right-hand sides, and all of them the other way round."""
    names = ("left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal")
    whole = triangular(dtype, n, batch_size(n))
    for _, nrhs, word, a, b, full in right_hand_sides(dtype, n, whole):
        drawn = int(words(f"flags {n} {word}", 1)[0] >> np.uint64(59))
        for bits in (drawn, drawn ^ 31):
            flags = {name: bool(bits >> i & 1) for i, name in enumerate(names)}
            x, y = (b, full) if flags["left_side"] else (b.swapaxes(-1, -2), full.swapaxes(-1, -2))
            text = ",".join(f"{name.split('_')[0]}={on:d}" for name, on in flags.items())
            yield Call(
                f"{text},{word}",
                (spoil(a, upper=flags["lower"], strict=not flags["unit_diagonal"]), x),
                lambda a, b, flags=flags: jb.triangular_solve(a, b, **flags),
                {**flags, "conjugate_a": flags["conjugate_a"] and np.dtype(dtype).kind == "c"},
                (like(y),),
                nrhs,
            )


def cho_solve(jb: Any, dtype: str, n: int) -> Iterator[Call]:
    """Both triangles for one right-hand side, one of them for each other number."""
    whole = triangular(dtype, n, batch_size(n))
    for index, nrhs, word, a, b, full in right_hand_sides(dtype, n, whole):
        for lower in (False, True) if index == 0 else (bool((n + index) % 2),):
            yield Call(
                f"lower={lower:d},{word}",
                (spoil(a, upper=lower), b),
                lambda a, b, lower=lower: jb.cho_solve((a, lower), b),
                {"lower": lower},
                (like(full),),
                nrhs,
            )


def solve_pos(jb: Any, dtype: str, n: int) -> Iterator[Call]:
    """As cho_solve; "fast" with one right-hand side at some sizes."""
    for turned in (False, True):
        whole = definite(dtype, n, batch_size(n), read=side(turned))
        for index, nrhs, word, a, b, full in right_hand_sides(dtype, n, whole):
            if index and turned != bool((n + index) % 2):
                continue
            lower = not turned
            for accuracy in ("ieee", "fast") if index == 0 and n in FULL else ("ieee",):
                options = {"lower": lower, "accuracy": accuracy}
                yield Call(
                    f"lower={lower:d},{word},{accuracy}",
                    (a, b),
                    lambda a, b, options=options: jb.solve(
                        a, b, assume_a="pos", return_info=True, **options
                    ),
                    options,
                    (like(full), infos(full.shape[:-2])),
                    nrhs,
                    accuracy == "fast",
                )


def cholesky_pullback(jb: Any, dtype: str, n: int) -> Iterator[Call]:
    """Both triangles, one of a or both; with one factor for several cotangents."""
    lower_factor = np.tril(triangular(dtype, n, batch_size(n), real_diagonal=True))
    for upper, mean in itertools.product((False, True), repeat=2):
        factor = lower_factor.swapaxes(-1, -2).conj() if upper else lower_factor
        cotangent = spoil(uniform(f"cotangent {n}", dtype, factor.shape), upper=not upper)
        flags = {"upper": upper, "symmetrize": mean}
        name = f"upper={upper:d},mean={mean:d}"
        yield Call(name, (factor, cotangent), None, flags, (like(cotangent),))
        if n in FULL and not mean:
            operands = (factor[:1], cotangent[:5])
            yield Call(f"{name},shared", operands, None, flags, (like(cotangent[:5]),))


def residual(jb: Any, dtype: str, n: int) -> Iterator[Call]:
    """A general matrix, of another height at some sizes, and each triangle of a Hermitian one."""
    count = batch_size(n)
    for index, nrhs in enumerate(several(n)):
        for kind, triangle in enumerate(("", "lower", "upper")):
            absolute = bool((n + index + kind) % 2)
            m = n + 3 if n in FULL and not triangle else n
            a = uniform(f"residual {n}", dtype, (count, m, n))
            if triangle:
                a = spoil(a, upper=triangle == "lower")
            real = np.zeros(0, dtype).real.dtype
            scale = (2.0 ** (np.arange(count) % 7 - 3)).astype(real)
            x = uniform(f"x {n} {nrhs}", dtype, (count, n, nrhs))
            b = uniform(f"b {n} {nrhs}", dtype, (count, m, nrhs))
            yield Call(
                f"triangle={triangle},absolute={absolute:d},nrhs={nrhs}",
                (a, scale, x, b),
                None,
                {"triangle": triangle, "absolute": absolute},
                (like(b),),
                nrhs,
            )


def cholesky_gradient(jb: Any, dtype: str, n: int) -> Iterator[Call]:
    """The gradient of cholesky."""
    for upper, mean in itertools.product((False, True), repeat=2):
        a = definite(dtype, n, batch_size(n), read="mean" if mean else side(upper))
        options = {"upper": upper, "symmetrize_input": mean}

        def gradient(a: Any, ct: Any, options: Any = options) -> Any:
            factor, pullback = jax.vjp(lambda a: jb.cholesky(a, **options), a)
            return factor, pullback(ct)

        ct = uniform(f"cotangent {n}", dtype, a.shape)
        yield Call(f"upper={upper:d},mean={mean:d}", (a, ct), gradient, {}, ())


def refined_solve(jb: Any, dtype: str, n: int) -> Iterator[Call]:
    """Both methods."""
    a = definite(dtype, n, 5, read="lower")
    b = uniform(f"rhs {n} 2", dtype, (5, n, 2))
    for method in ("ir", "gmres"):
        yield Call(
            f"{method},nrhs=2",
            (a, b),
            lambda a, b, method=method: jb.refined_solve(a, b, method=method, lower=True),
            {},
            (),
            2,
        )


class Operation(NamedTuple):
    """What is called: the calls of a size, the dtypes and the sizes; and whether by a kernel."""

    calls: Callable[[Any, str, int], Iterator[Call]]
    dtypes: Sequence[str] = COMPUTED
    sizes: Sequence[int] = SIZES
    kernels: bool = True


OPERATIONS = {
    "cholesky": Operation(cholesky, (*COMPUTED, *STORED)),
    "triangular_solve": Operation(triangular_solve),
    "cho_solve": Operation(cho_solve),
    "solve_pos": Operation(solve_pos, (*COMPUTED, *STORED)),
    "cholesky_pullback": Operation(cholesky_pullback),
    "residual": Operation(residual),
    # Only where all is kernels: XLA's own products depend on the number of threads.
    "cholesky_gradient": Operation(
        cholesky_gradient, sizes=(1, 4, 9, 17, 32, 33, 65, 80), kernels=False
    ),
    "refined_solve": Operation(refined_solve, sizes=(7, 64), kernels=False),
}


def kernels(platform: str, capability: int, operation: str, dtype: str, n: int) -> dict[str, bool]:
    """The names of kernels that serve a size, and whether for accuracy="fast" alone."""
    if not OPERATIONS[operation].kernels or (platform == "cpu" and dtype in STORED):
        return {}
    if platform == "cpu":
        names = (
            CPU_KERNELS if operation not in ("cholesky_pullback", "residual") else ("reference",)
        )
        return {name: False for name in names if n <= CPU_KERNELS[name]}
    table_dtype = "float16" if dtype in STORED else dtype
    return {
        kernel: bool(fast)
        for of, of_dtype, kernel, low, high, needs, fast in cuda_tiers()
        if (of, of_dtype) == (operation, table_dtype) and low <= n <= high and needs <= capability
    }


def serves(platform: str, operation: str, dtype: str, n: int, call: Call) -> bool:
    """Whether a named kernel takes such a call."""
    if platform == "cuda" and operation == "solve_pos":
        return any(n <= largest and call.nrhs <= k for largest, k in CUDA_SOLVE_POS[dtype])
    return True


# The results.


class Task(NamedTuple):
    """The calls of some sizes, which are one program; "" is no kernel's name."""

    platform: str
    operation: str
    dtype: str
    kernel: str
    fast: bool
    sizes: tuple[int, ...]


def tasks(platform: str, capability: int, only: str) -> list[Task]:
    """All of them; those that take long first."""
    found = []
    for operation, row in OPERATIONS.items():
        for dtype in row.dtypes:
            if not f"{operation}/{dtype}/".startswith(only[: len(operation) + len(dtype) + 2]):
                continue
            sizes = row.sizes
            if operation == "cholesky_pullback":
                sizes = [n for n in sizes if n <= PULLBACK[platform][dtype]]
            served: dict[tuple[str, bool], list[int]] = {("", False): list(sizes)}
            for n in sizes:
                for name, fast in kernels(platform, capability, operation, dtype, n).items():
                    served.setdefault((name, fast), []).append(n)
            for (name, fast), of_kernel in served.items():
                chunk: list[int] = []
                count = 0
                for n in of_kernel:
                    chunk.append(n)
                    count += (20 if n in FULL else 5) + n // 16
                    if count >= PROGRAM_CALLS or n == of_kernel[-1] or not row.kernels:
                        found.append(Task(platform, operation, dtype, name, fast, tuple(chunk)))
                        chunk, count = [], 0
    return sorted(found, key=lambda task: (OPERATIONS[task.operation].kernels, -max(task.sizes)))


def function(operation: str, kernel: str, call: Call) -> Callable[..., Any]:
    """What is traced for a call."""
    if call.public is not None and not kernel:
        return call.public
    target = jax.ffi.ffi_call(f"jax_batched.{operation}.v1", call.results)
    return lambda *operands: target(*operands, **call.attributes, kernel=kernel)


def digest(results: Any) -> str:
    """The hash of arrays' bits; all NaNs are one."""
    state = hashlib.sha256()
    for x in jax.tree.leaves(results):
        x = np.ascontiguousarray(x)
        parts = x.view(x.real.dtype) if x.dtype.kind == "c" else x
        if parts.dtype.kind not in "iub":
            nan = np.isnan(parts)
            if nan.any():
                parts = np.where(nan, parts.dtype.type(np.nan), parts)
        state.update(parts.tobytes())
    return state.hexdigest()[:16]


def run(calls: Mapping[str, tuple[Callable[..., Any], tuple[Array, ...]]]) -> dict[str, str]:
    """The hash of each call, all in one program; FAILS for those that the library refuses."""
    operands = {key: operands for key, (_, operands) in calls.items()}
    program = jax.jit(lambda xs: {key: calls[key][0](*x) for key, x in xs.items()})
    try:
        results = jax.device_get(program(operands))
    except jax.errors.JaxRuntimeError as error:
        if len(calls) == 1:
            print(f"{next(iter(calls))}: {str(error).splitlines()[0]}", file=sys.stderr)
            return dict.fromkeys(calls, FAILS)
        half = len(calls) // 2
        parts = (dict(list(calls.items())[:half]), dict(list(calls.items())[half:]))
        return run(parts[0]) | run(parts[1])
    return {key: digest(result) for key, result in results.items()}


def perform(task: Task, only: str) -> dict[str, str]:
    """The hashes of a task, by key."""
    jax.config.update("jax_enable_x64", True)
    jb = importlib.import_module("jax_batched")
    platform, operation, dtype, kernel, fast, sizes = task
    calls = {}
    for n in sizes:
        for call in OPERATIONS[operation].calls(jb, dtype, n):
            key = f"{operation}/{dtype}/n={n}/{call.variant}/kernel={kernel}"
            if kernel and (call.fast != fast or not serves(platform, operation, dtype, n, call)):
                continue
            if key.startswith(only):
                calls[key] = function(operation, kernel, call), call.operands
    return run(calls) if calls else {}


def compute(platform: str, only: str, workers: int) -> dict[str, str]:
    """The hashes of all keys that start with `only`."""
    capability = 0
    if platform == "cuda":
        major, minor = str(jax.devices()[0].compute_capability).split(".")
        capability = 10 * int(major) + int(minor)
    todo = tasks(platform, capability, only)
    bits: dict[str, str] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(perform, task, only) for task in todo]
        for done, future in enumerate(as_completed(futures), 1):
            bits |= future.result()
            if done * 10 // len(todo) != (done - 1) * 10 // len(todo):
                print(f"{done}/{len(todo)}: {len(bits)} results", file=sys.stderr, flush=True)
    return bits


# Files.


def header(platform: str, commit: str) -> dict[str, Any]:
    """What the results were computed with."""
    return {
        "platform": platform,
        "machine": machine(),
        "device": jax.devices()[0].device_kind if platform == "cuda" else cpu_isa(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "jax_batched": importlib.metadata.version("jax_batched"),
        "commit": commit or commit_here(),
    }


def commit_here() -> str:
    """The commit of the checkout that the package is imported from; "" if it is installed."""
    folder = Path(str(importlib.import_module("jax_batched").__file__)).parent
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def load(path: Path) -> dict[str, Any]:
    """Header and bits of a file, compressed if its name says so."""
    data = path.read_bytes()
    return dict(json.loads(gzip.decompress(data) if path.suffix == ".gz" else data))


def save(path: Path, head: Mapping[str, Any], bits: Mapping[str, str]) -> None:
    """Writes a file. Keys that differ in the kernel alone are neighbours."""
    text = json.dumps({"header": head, "bits": dict(sorted(bits.items()))}, indent=0) + "\n"
    data = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, 9, mtime=0) if path.suffix == ".gz" else data)


def renamed(key: str, renames: Sequence[tuple[str, str, str]]) -> str:
    """A stored key under the present name of its kernel."""
    stem, kernel = key.rsplit("kernel=", 1)
    for prefix, old, new in renames:
        if kernel == old and key.startswith(prefix):
            return f"{stem}kernel={new}"
    return key


def rename_of(text: str) -> tuple[str, str, str]:
    """(prefix of the key, former name, present name) from ``[PREFIX:]OLD=NEW``."""
    prefix, _, pair = text.rpartition(":")
    old, _, new = pair.partition("=")
    return prefix, old, new


def stem_of(key: str) -> str:
    """A key without its kernel."""
    return key.rsplit("/", 1)[0]


def report(old: Mapping[str, str], new: Mapping[str, str], show: int) -> bool:
    """Prints how two sets of hashes differ; whether all is well."""
    both = old.keys() & new.keys()
    kinds = {
        "differ": {key for key in both if old[key] != new[key]},
        "are missing": old.keys() - new.keys(),
        "are new": new.keys() - old.keys(),
    }
    print(f"{len(both) - len(kinds['differ'])} results are the same")
    givers = {(stem_of(key), value): key.rsplit("/", 1)[1] for key, value in old.items()}
    for kind, keys in kinds.items():
        print(f"{len(keys)} {kind}")
        groups: dict[str, list[str]] = collections.defaultdict(list)
        for key in sorted(keys, key=lambda key: (int(key.split("/")[2][2:]), key)):
            operation, dtype, *_, kernel = key.split("/")
            giver = givers.get((stem_of(key), new[key])) if kind == "differ" else None
            now = f", now as {giver} was" if giver else ""
            groups[f"{operation}/{dtype}/{kernel}{now}"].append(key)
        for group, members in sorted(groups.items()):
            print(f"  {group}: {len(members)}")
            for key in members[:show]:
                print(f"    {key}")
    unnamed = [key for key in kinds["are missing"] if key.endswith("kernel=")]
    return not kinds["differ"] and not unnamed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cores = len(os.sched_getaffinity(0))
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("store", "compute all results and write FILE"),
        ("check", "compute all results and compare them with FILE, on FILE's platform"),
        ("compare", "compare FILE with another one"),
    ):
        add = commands.add_parser(name, help=text).add_argument
        add("file", type=Path, metavar="FILE", help="*.json or *.json.gz")
        if name == "compare":
            add("other", type=Path, metavar="OTHER", help="the later results")
        else:
            add(
                "--only",
                default="",
                metavar="PREFIX",
                help="of the keys, such as cholesky/float32/",
            )
            add("--isa", choices=ISAS, help="of the CPU (default: the best, or that of FILE)")
            add(
                "--workers",
                type=int,
                default=min(12, cores),
                help="processes (default: %(default)s)",
            )
        if name == "store":
            add("--platform", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
            add("--commit", default="", help="of the package, for the header")
        else:
            add(
                "--rename",
                nargs="+",
                default=[],
                metavar="[PREFIX:]OLD=NEW",
                help="kernels that have another name since FILE was written",
            )
            add("--show", type=int, default=3, help="keys of each group to print (default: 3)")
    return parser.parse_args(arguments)


def choose(platform: str, isa: str) -> None:
    """Sets up this process and its children, before the package and a backend load."""
    if platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
        if isa:
            os.environ["JAX_BATCHED_ISA"] = isa
    flags = (os.environ.get("XLA_FLAGS", ""), XLA_FLAGS, XLA_CPU_FLAGS)
    os.environ["XLA_FLAGS"] = " ".join(flags)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs; the exit status is 1 if results differ."""
    options = parse(arguments)
    if options.command == "store":
        choose(options.platform, options.isa or "")
        bits = compute(options.platform, options.only, options.workers)
        save(options.file, header(options.platform, options.commit), bits)
        fails = sum(value == FAILS for value in bits.values())
        print(f"{len(bits)} results in {options.file}, {fails} of them that a call fails")
        return 0
    stored = load(options.file)
    if options.command == "compare":
        computed = load(options.other)
        only = ""
    else:
        platform, only = stored["header"]["platform"], options.only
        choose(platform, options.isa or stored["header"]["device"])
        bits = compute(platform, only, options.workers)
        computed = {"header": header(platform, ""), "bits": bits}
    for name, value in stored["header"].items():
        if computed["header"][name] != value:
            print(f"{name}: {value}, now {computed['header'][name]}")
    renames = [rename_of(text) for text in options.rename]
    old = {renamed(key, renames): value for key, value in stored["bits"].items()}
    old = {key: value for key, value in old.items() if key.startswith(only)}
    return 0 if report(old, computed["bits"], options.show) else 1


if __name__ == "__main__":
    raise SystemExit(main())
