"""``python -m jax_batched.check``: this library on this machine, against NumPy and stock JAX.

On each platform that JAX sees, factorizations, solves, inverses, determinants and decompositions
are held to test ratios like LAPACK's, in every dtype at some sizes. In float32 the time of each is
then compared with that of stock JAX, and with that of a copy of its matrices. The exit status is 1
if a result is wrong. The table belongs into a report of a fault.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_batched as jb
from jax_batched import _ffi
from jax_batched._info import columns, versions
from jax_batched._matrices import (
    MAX_RATIO,
    adjoint,
    eigenvalues_ratio,
    general,
    graded_spd,
    norm,
    normal,
    product_ratio,
    solve_ratio,
    spd,
    wide,
)
from jax_batched._tuning.calls import RECIPES, Recipe
from jax_batched._tuning.measuring import measure
from jax_batched._tuning.progress import progress

Array = Any  # NumPy's: their arithmetic has no narrower type

DTYPES = ("float32", "float64", "complex64", "complex128")
SIZES = (3, 8, 32)
CHECKED = 65  # matrices: more than the lanes of any vector, and an odd number
MEBIBYTES = 2


def _determinant_ratio(eps: float, a: Array, det: Array) -> Array:
    """The relative error over that which n eps ||A|| in A may cause."""
    expected = np.linalg.det(a)
    error = np.abs(det - expected) / np.abs(expected)
    return error / (a.shape[-1] * eps * norm(a) * norm(np.linalg.inv(a)))


def _spectrum_ratio(eps: float, a: Array, results: Any) -> Array:
    """`product_ratio` of V W V^H, or of V^H V, whichever is larger."""
    w, v = results
    product = product_ratio(eps, (a + adjoint(a)) / 2, v * w[..., None, :] @ adjoint(v))
    return np.maximum(product, product_ratio(eps, np.eye(a.shape[-1]), adjoint(v) @ v))


def _singular_ratio(eps: float, a: Array, results: Any) -> Array:
    u, s, vh = results
    return np.maximum(
        product_ratio(eps, a, u * s[..., None, :] @ vh),
        product_ratio(eps, np.eye(a.shape[-1]), vh @ adjoint(vh)),
    )


def _logarithm_ratio(eps: float, a: Array, results: Any) -> Array:
    sign, logarithm = np.linalg.slogdet(a)
    error = np.abs(results[0] - sign) + np.abs(results[1] - logarithm)
    condition = norm(a) * norm(np.linalg.inv(a))
    return error / (a.shape[-1] * eps * np.maximum(condition, np.abs(logarithm)))


def _inverse_values_ratio(eps: float, a: Array, x: Array) -> Array:
    expected = np.linalg.pinv(a)
    return norm(x - expected) / (a.shape[-1] * eps * norm(a) * norm(expected) ** 2)


class Check(NamedTuple):
    """One row of the report.

    Attributes:
      name: as a user calls it.
      operation: the kernels'; "" if there are several.
      recipe: how it is called and what its results must be.
      stock: the same by JAX's own functions.
      dtypes: in which it is checked.
    """

    name: str
    operation: str
    recipe: Recipe
    stock: Callable[..., Any]
    dtypes: Sequence[str] = DTYPES


def _recipe(make: Any, call: Callable[..., Any], ratio: Callable[..., Array]) -> Recipe:
    return Recipe(make, False, lambda accuracy: call, ratio)


def _stock_solve_pos(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.scipy.linalg.solve(a, b, assume_a="pos", lower=True)


CHECKS = (
    Check(
        "cholesky",
        "cholesky",
        RECIPES["cholesky"],
        lambda a: jnp.linalg.cholesky(a, symmetrize_input=False),
    ),
    Check("solve_pos", "solve_pos", RECIPES["solve_pos"], jax.vmap(_stock_solve_pos)),
    Check(
        "cho_solve",
        "cho_solve",
        RECIPES["cho_solve"],
        lambda c, b: jax.scipy.linalg.cho_solve((c, True), b),
    ),
    Check(
        "triangular_solve",
        "triangular_solve",
        RECIPES["triangular_solve"],
        lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
    ),
    Check("lu", "lu", RECIPES["lu"], lambda a: jax.lax.linalg.lu(a)[0]),
    Check("solve", "solve_gen", RECIPES["solve_gen"], jnp.linalg.solve),
    Check("inv", "inv", RECIPES["inv"], jnp.linalg.inv),
    Check(
        "det",
        "det",
        _recipe(general, jb.det, _determinant_ratio),
        jnp.linalg.det,
    ),
    Check("slogdet", "slogdet", _recipe(general, jb.slogdet, _logarithm_ratio), jnp.linalg.slogdet),
    Check("qr", "qr", RECIPES["qr"], lambda a: jnp.linalg.qr(a)[0]),
    Check(
        "lstsq",
        "",
        Recipe(general, True, lambda accuracy: lambda a, b: jb.lstsq(a, b)[0], solve_ratio),
        jax.vmap(lambda a, b: jnp.linalg.lstsq(a, b)[0]),
    ),
    Check("eigh", "eigh", _recipe(spd, jb.eigh, _spectrum_ratio), jnp.linalg.eigh),
    Check(
        "eigvalsh",
        "eigh",
        _recipe(spd, jb.eigvalsh, eigenvalues_ratio),
        jnp.linalg.eigvalsh,
    ),
    Check("svd", "svd", _recipe(general, jb.svd, _singular_ratio), jnp.linalg.svd),
    Check("pinv", "", _recipe(general, jb.pinv, _inverse_values_ratio), jnp.linalg.pinv),
    Check(
        "refined_solve",
        "",
        Recipe(
            graded_spd,
            True,
            lambda accuracy: lambda a, b: jb.refined_solve(a, b, assume_a="pos")[0],
            solve_ratio,
        ),
        jax.vmap(_stock_solve_pos),
        ("float64",),
    ),
)


class Measured(NamedTuple):
    """The largest ratio of a row, why calls failed, its times over a copy's and stock JAX's."""

    check: Check
    ratio: float
    faults: list[str]
    over_copy: list[float]
    over_stock: list[float]


def _operands(check: Check, dtype: str, batch: int, n: int) -> list[Array]:
    rng = np.random.default_rng(n)
    distinct = min(batch, CHECKED)
    made = [check.recipe.make(rng, dtype, (distinct, n, n))]
    if check.recipe.solves:
        made.append(normal(rng, dtype, (distinct, n, 1)))
    repeats = -(-batch // distinct)
    return [np.tile(x.astype(dtype), (repeats, 1, 1))[:batch] for x in made]


def _ratio(check: Check, dtype: str, n: int) -> float:
    """`_worst` of the matrices of one call."""
    operands = _operands(check, dtype, CHECKED, n)
    results = jax.jit(check.recipe.call("ieee"))(*operands)
    return _worst(check, dtype, operands, results)


def _worst(check: Check, dtype: str, operands: Sequence[Array], results: Any) -> float:
    """The largest ratio; infinite where a result is not finite."""
    known = [wide(x) for x in operands]
    found = jax.tree.map(lambda x: wide(np.asarray(x)), results)
    ratio = check.recipe.ratio(float(np.finfo(dtype).eps), *known, found)
    return float(np.max(np.where(np.isfinite(ratio), ratio, np.inf)))


def _times(check: Check, n: int, mebibytes: float) -> tuple[float, float, float]:
    """Of a call in the check's first dtype: its time over a copy's, stock JAX's time over it, and
    the largest ratio of its last matrices."""
    dtype = check.dtypes[0]
    batch = max(1, int(mebibytes * 2**20) // (n * n * np.dtype(dtype).itemsize))
    known = _operands(check, dtype, batch, n)
    operands = [jnp.asarray(x) for x in known]
    ours = jax.jit(check.recipe.call("ieee"))
    last = slice(-CHECKED, None)
    results = jax.tree.map(lambda x: x[last], ours(*operands))
    ratio = _worst(check, dtype, [x[last] for x in known], results)
    copy, stock = jax.jit(jnp.copy), jax.jit(check.stock)
    programs = {"ours": lambda: ours(*operands), "copy": lambda: copy(operands[0])}
    try:
        jax.block_until_ready(stock(*operands))
        programs["stock"] = lambda: stock(*operands)
    except jax.errors.JaxRuntimeError:  # it fails at some sizes on some GPUs
        pass
    seconds = measure(programs)
    over_stock = seconds.get("stock", float("nan")) / seconds["ours"]
    return seconds["ours"] / seconds["copy"], over_stock, ratio


def measured(
    check: Check, sizes: Sequence[int], mebibytes: float, step: Callable[[str], None]
) -> Measured:
    """Checks and times a row on the default device."""
    ratios, over_copy, over_stock = [0.0], [], []
    faults: list[str] = []

    @contextlib.contextmanager
    def named(dtype: str, n: int) -> Iterator[None]:
        name, before = f"{check.name}, {dtype}, n = {n}", len(ratios)
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            faults.append(f"{name}: {str(error).splitlines()[0]}")
        faults.extend(f"{name}: its ratio is {x:.3g}" for x in ratios[before:] if x > MAX_RATIO)

    for dtype in check.dtypes:
        for n in sizes:
            with named(dtype, n):
                ratios.append(_ratio(check, dtype, n))
        step(f"{check.name} {dtype}")
    for n in sizes:
        times = [float("nan"), float("nan")]
        with named(check.dtypes[0], n):
            *times, ratio = _times(check, n, mebibytes)
            ratios.append(ratio)
        over_copy.append(times[0])
        over_stock.append(times[1])
    step(f"{check.name} times")
    return Measured(check, max(ratios), faults, over_copy, over_stock)


def _kernels(check: Check, device: jax.Device, sizes: Sequence[int]) -> str:
    """What serves a row: kernels by name, or that of the processor's instructions."""
    platform: _ffi.Platform = "cuda" if device.platform == "gpu" else "cpu"
    module = _ffi.native_module(platform)
    if module is None:
        return "lax"
    if not check.operation:
        return "composed"
    dtype = check.dtypes[0]

    def kernel(n: int) -> str:
        if n > _ffi.max_n(platform, check.operation, dtype):
            return "lax"
        if platform == "cpu":
            return f"cpu {module.isa()}"
        major, minor = str(device.compute_capability).split(".")
        capability = 10 * int(major) + int(minor)
        return _ffi.chosen_cuda_kernel(check.operation, dtype, n, 1, False, capability)

    return " ".join(dict.fromkeys(map(kernel, sizes)))


def _report(device: jax.Device, sizes: Sequence[int], rows: Sequence[Measured]) -> list[str]:
    """The lines of a device's table."""

    def factors(values: Sequence[float]) -> str:
        return "  ".join("-" if np.isnan(x) else f"{x:.{1 if x < 10 else 0}f}" for x in values)

    at = " ".join(str(n) for n in sizes)
    head = ("operation", "kernel", "ratio", f"time / copy, n = {at}", "stock JAX / time")
    table = [head]
    for row in rows:
        name = row.check.name + ("" if not row.faults else " WRONG")
        table.append(
            (
                name,
                _kernels(row.check, device, sizes),
                f"{row.ratio:.2g}",
                factors(row.over_copy),
                factors(row.over_stock),
            )
        )
    return columns(table)


def _positive(text: str) -> float:
    """A number above 0."""
    if not 0 < float(text) < float("inf"):
        raise ValueError(text)
    return float(text)


def _size(text: str) -> int:
    """An integer from 1 on."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, times and prints; returns 1 if a result was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_batched.check",
        description=(__doc__ or "").split("\n\n")[0].replace("``", ""),
    )
    parser.add_argument("--n", type=_size, nargs="+", default=SIZES, help="sizes of the matrices")
    parser.add_argument(
        "--mebibytes",
        type=_positive,
        default=MEBIBYTES,
        help="memory of the matrices that are timed",
    )
    names = [check.name for check in CHECKS]
    parser.add_argument("--op", nargs="+", choices=names, default=names, help="operations")
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)
    # Stock JAX on CPUs calls OpenBLAS for one matrix at a time, whose threads wait for each other.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    checks = [check for check in CHECKS if check.name in options.op]
    devices = [seen[0] for platform in _ffi.PLATFORMS if (seen := _ffi.devices(platform))]
    steps = len(devices) * sum(len(check.dtypes) + 1 for check in checks)
    found = {}
    with progress(steps) as step:
        for device in devices:
            with jax.default_device(device):
                found[device] = [
                    measured(check, options.n, options.mebibytes, step) for check in checks
                ]

    print(versions())
    faults = []
    for device, rows in found.items():
        print(f"\n{device.platform}, {device.device_kind}: times of {options.mebibytes:g} MiB")
        print("\n".join(_report(device, options.n, rows)))
        faults += [f"{device.platform}: {fault}" for row in rows for fault in row.faults]
    print()
    print("\n".join(faults) or f"all right: each ratio is at most {MAX_RATIO:g}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
