"""Which calls are measured: operations, sizes, right-hand sides, bytes."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

import jax_batched as jb
from jax_batched import _ffi
from jax_batched._matrices import (
    Array,
    cho_solve_ratio,
    cholesky_ratio,
    general,
    graded_spd,
    inverse_ratio,
    lu_ratio,
    q_ratio,
    solve_ratio,
    triangular,
)
from jax_batched._tuned import Kind

DTYPES = ("float32", "float64", "complex64", "complex128")
# Of these operations: a number of right-hand sides that is measured, and the largest that it stands
# for.
SUBSTITUTIONS = ("triangular_solve", "cho_solve")
NRHS_CLASSES: dict[int, int | None] = {1: 1, 4: 8, 16: 32, 64: None}
SIZES = sorted({*range(1, 17), *range(20, 65, 4), *range(72, 129, 8), *range(160, 513, 32)})
LARGE_N = 185  # from here on (what rounds up to 192) 512 MiB are few waves of blocks on a large GPU
LARGE_MEBIBYTES = 4096


def _lower(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Array:
    return np.tril(triangular(rng, dtype, shape))


class Recipe(NamedTuple):
    """How an operation is called and checked.

    Attributes:
      make: the matrices of operand a.
      solves: there is an operand b.
      call: the operation, given its accuracy.
      ratio: LAPACK's test ratio of each matrix, from eps, the operands and the result.
    """

    make: Callable[[np.random.Generator, str, tuple[int, ...]], Array]
    solves: bool
    call: Callable[[str], Callable[..., jax.Array]]
    ratio: Callable[..., Array]


RECIPES = {
    "cholesky": Recipe(
        graded_spd,
        False,
        lambda accuracy: lambda a: jb.cholesky(a, symmetrize_input=False, accuracy=accuracy),
        cholesky_ratio,
    ),
    "solve_pos": Recipe(
        graded_spd,
        True,
        lambda accuracy: lambda a, b: jb.solve(a, b, assume_a="pos", lower=True, accuracy=accuracy),
        solve_ratio,
    ),
    "triangular_solve": Recipe(
        _lower,
        True,
        lambda accuracy: lambda a, b: jb.triangular_solve(a, b, left_side=True, lower=True),
        solve_ratio,
    ),
    "cho_solve": Recipe(
        _lower,
        True,
        lambda accuracy: lambda c, b: jb.cho_solve((c, True), b),
        cho_solve_ratio,
    ),
    "lu": Recipe(general, False, lambda accuracy: lambda a: jb.lu(a)[0], lu_ratio),
    "solve_gen": Recipe(general, True, lambda accuracy: jb.solve, solve_ratio),
    "inv": Recipe(general, False, lambda accuracy: jb.inv, inverse_ratio),
    "qr": Recipe(general, False, lambda accuracy: lambda a: jb.qr(a)[0], q_ratio),
}


def usual_mebibytes(n: int) -> float:
    """The memory that the matrices of a call fill by default."""
    return LARGE_MEBIBYTES if n >= LARGE_N else 512


def nrhs_classes(operation: str, wanted: Sequence[int]) -> dict[int, int | None]:
    """Numbers of right-hand sides to measure; the choice for solve_pos depends on n alone."""
    if operation not in SUBSTITUTIONS:
        return {1: None}
    return {nrhs: limit for nrhs, limit in NRHS_CLASSES.items() if nrhs in wanted}


def candidates(kind: Kind, n: int, tiers: Sequence[_ffi.Tier]) -> list[str]:
    """The kernels that can serve a call, each once; of one name that for fewer rows does."""
    names = [
        tier.kernel
        for tier in tiers
        if (tier.operation, tier.dtype) == (kind.operation, kind.dtype)
        and tier.min_n <= n <= tier.max_n
        and tier.capability <= kind.capability
        and (kind.fast or not tier.fast)
    ]
    return list(dict.fromkeys(names))


def measured_sizes(kind: Kind, wanted: Sequence[int], tiers: Sequence[_ffi.Tier]) -> list[int]:
    """The wanted sizes for which there is a choice; with accuracy="fast", one of its own."""

    def chooses(n: int) -> bool:
        names = candidates(kind, n, tiers)
        own = not kind.fast or names != candidates(kind._replace(fast=False), n, tiers)
        return len(names) > 1 and own

    largest = _ffi.max_n("cuda", kind.operation, kind.dtype)
    return [n for n in wanted if n <= largest and chooses(n)]


def default_sizes(kind: Kind, tiers: Sequence[_ffi.Tier]) -> list[int]:
    """Sizes with a choice such that between two neighbours the same kernels can serve."""
    mine = [t for t in tiers if (t.operation, t.dtype) == (kind.operation, kind.dtype)]
    borders = {n for tier in mine for n in (tier.min_n - 1, tier.max_n)} - {0}
    return measured_sizes(kind, sorted({*SIZES, *borders}), tiers)
