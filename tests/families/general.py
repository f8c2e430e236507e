"""Solves of general systems and inverses, and refined solves, made of other operations."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rows import Kind, Op, Solve, hermitian_from, strict_triangle

import jax_batched as jb
from jax_batched._matrices import Array, general, normal, solve_ratio, spd

# Up to which n a solve is one kernel on CUDA, with 16 right-hand sides or with any number, and so
# is an inverse.
ONE_KERNEL = {
    "float32": (128, 32), "float64": (96, 32), "complex64": (96, 32), "complex128": (64, 16),
}  # fmt: skip


def is_one_kernel(dtype: str, n: int, nrhs: int = 1) -> bool:
    """Whether a general solve, or an inverse, is one kernel on CUDA."""
    if dtype not in ONE_KERNEL:  # 16 bits are computed in float32
        return False
    few, many = ONE_KERNEL[dtype]
    return n <= (few if nrhs <= 16 else many)


def _calls(operation: str) -> Callable[[str, int, int], set[str]]:
    def calls(dtype: str, n: int, nrhs: int) -> set[str]:
        return {operation} if is_one_kernel(dtype, n, nrhs) else {"lu", "triangular_solve"}

    return calls


class Inverse(Kind):
    """X with M X = I."""

    def reference(self, m: np.ndarray, *b: np.ndarray) -> np.ndarray:
        return np.linalg.inv(m)

    def ratios(self, eps: float, m: np.ndarray, x: np.ndarray, *b: np.ndarray) -> np.ndarray:
        return solve_ratio(eps, m, np.broadcast_to(np.eye(m.shape[-1]), m.shape), x)

    def scale(self, m: float, b: float) -> float:
        return 1 / m

    def unscaled(self, x: np.ndarray, d: np.ndarray) -> np.ndarray:
        return x * d[:, None] * d


def symmetric(rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> Array:
    """Well conditioned symmetric matrices with pivots beside the diagonal."""
    return _indefinite(rng, dtype, shape, lambda a: a)


def hermitian(rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> Array:
    """Well conditioned Hermitian matrices that are not definite, pivots beside the diagonal."""
    return _indefinite(rng, dtype, shape, np.conj)


def _indefinite(
    rng: np.random.Generator, dtype: Any, shape: Sequence[int], star: Callable[[Array], Array]
) -> Array:
    n = shape[-1]
    g = normal(rng, dtype, shape) / (4 * np.sqrt(max(n, 1)))
    swapped = 2 * np.eye(n)[np.minimum(np.arange(n) ^ 1, n - 1)]
    return g + star(np.swapaxes(g, -1, -2)) + swapped


# Matrices of the kinds that `solve` tells apart.
MAKE = {"gen": general, "sym": symmetric, "her": hermitian, "pos": spd}


def symmetric_from(a: Array, *, upper: bool) -> Array:
    """The symmetric matrix whose upper or lower triangle is a's."""
    half = np.triu(a) if upper else np.tril(a)
    return half + np.swapaxes(half, -1, -2) * (1 - np.eye(a.shape[-1]))


def _solve_indefinite(kind: str, lower: bool) -> Op:
    mirror = hermitian_from if kind == "her" else symmetric_from
    return Op(
        name=f"solve_{kind}-{'lower' if lower else 'upper'}",
        operation="solve_gen",
        function=jb.solve,
        options={"assume_a": kind, "lower": lower},
        kind=Solve(),
        matrix=functools.partial(mirror, upper=not lower),
        make=MAKE[kind],
        unread=strict_triangle(upper=lower),
        real_diagonal=kind == "her",
        has_info=True,
        kernels=False,
    )


def _refined_solve(name: str, method: str, *, usual: bool = False, **options: Any) -> Op:
    lower = bool(options.get("lower"))
    if options.get("assume_a") == "gen":
        system = {"matrix": lambda a: a, "make": general}
    else:
        system = {
            "matrix": functools.partial(hermitian_from, upper=not lower),
            "make": spd,
            "unread": strict_triangle(upper=lower),
            "real_diagonal": True,
        }
    return Op(
        name=f"refined_solve-{name}",
        operation="refined_solve",
        function=lambda a, b, **options: jb.refined_solve(a, b, **options)[0],
        options={"method": method, **options},
        kind=Solve(),
        kernels=False,
        composite=True,
        usual=usual,
        **system,
    )


ROWS = [
    Op(
        name="solve_gen",
        operation="solve_gen",
        function=jb.solve,
        options={"assume_a": "gen"},
        kind=Solve(),
        matrix=lambda a: a,
        make=general,
        has_info=True,
        calls=_calls("solve_gen"),
        max_nrhs={"block_shared": 16},
        paths=("lax", "composed"),
        reduced=True,
        usual=True,
    ),
    Op(
        name="inv",
        operation="inv",
        function=jb.inv,
        options={},
        kind=Inverse(),
        matrix=lambda a: a,
        make=general,
        has_info=True,
        calls=_calls("inv"),
        paths=("lax", "composed"),
        reduced=True,
        usual=True,
    ),
    _solve_indefinite("sym", False),
    _solve_indefinite("her", True),
    _refined_solve("lower", "ir", lower=True, usual=True),
    _refined_solve("upper-gmres", "gmres"),
    _refined_solve("gen", "ir", assume_a="gen"),
]
SOLVERS = {"solve": jb.solve, "refined_solve": lambda a, b: jb.refined_solve(a, b)[0]}
# Of a general square matrix, without a row.
PROGRAMS = {
    "factors": lambda a: (jb.lu(a), jb.det(a), jb.slogdet(a)),
    "gradient_of_solve": jax.grad(lambda a: jnp.real(jb.solve(a, a + 1)).sum()),
    "products": lambda a: jb.blas.gemm(a, a, trans_b=2, sizes=(2, 3, None)),
}
SQUARE = {"inv": jb.inv, "solve": lambda a: jb.solve(a, np.ones(a.shape[-1]))}
