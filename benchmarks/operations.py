"""The table of operations. To benchmark another one, add a row to OPERATIONS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_batched as jb
from benchmarks.implementations import torch
from benchmarks.inputs import is_rhs
from benchmarks.kalman import STEPS, plain_filter, square_root_filter
from jax_batched._matrices import (
    adjoint,
    cho_solve_ratio,
    cholesky_ratio,
    eigenvalues_ratio,
    lu_ratio,
    product_ratio,
    q_ratio,
    solve_ratio,
)

Array = Any  # NumPy's: their arithmetic has no narrower type


@dataclass(frozen=True)
class Operation:
    """An operation: its operands, its bytes, its test, and how each implementation calls it."""

    operands: tuple[str, ...]  # names in inputs.MAKERS or inputs.DERIVED
    floor: Callable[[int, int], float]  # (n, nrhs) -> elements moved per system
    ratio: Callable[..., Array]  # (eps, *operands, output) -> LAPACK's ratio per system
    calls: Mapping[str, Callable[..., Any]]  # implementation -> function of the operands
    rows: Callable[[int], int] = lambda n: n  # of a matrix with n columns

    def nrhs(self, wanted: int) -> int:
        """The number of right-hand sides, 0 where the operation has none."""
        return wanted if any(map(is_rhs, self.operands)) else 0


# The floors are those of the results file's definition. For one right-hand side, or as many as
# n where a figure is given for it, the definition counts the matrices that are read. For every
# other nrhs it gives none: the matrix, and each right-hand side beyond the first read and written.
def _other_rhs(n: int, nrhs: int) -> int:
    return 2 * n * (nrhs - 1)


def _factor_floor(n: int, nrhs: int) -> float:
    return 2 * n * n


def _solve_floor(n: int, nrhs: int) -> float:
    return 2 * n * n if nrhs == n > 1 else n * n + _other_rhs(n, nrhs)


def _triangular_floor(n: int, nrhs: int) -> float:
    return n * n / 2 + _other_rhs(n, nrhs)


# Gradients, of real matrices. A solution's is -(x y^T + y x^T) / 2 with y = A^-1 x; who reads one
# triangle puts both halves there, which the sum with the transpose does not see.
def _log_determinant(cholesky: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def value(a: Any) -> Any:
        return 2 * jnp.sum(jnp.log(jnp.diagonal(cholesky(a), axis1=-2, axis2=-1)))

    return jax.grad(value)


def _squared_solution(solve: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return jax.grad(lambda a, b: jnp.sum(solve(a, b) ** 2) / 2)


def _inverse_ratio(eps: float, a: Array, gradient: Array) -> Array:
    return solve_ratio(eps, a, np.eye(a.shape[-1]), gradient)


def _squared_solution_ratio(eps: float, a: Array, b: Array, gradient: Array) -> Array:
    x = np.linalg.solve(a, b)
    outer = x @ np.linalg.solve(a, x).mT
    return product_ratio(eps, -outer - outer.mT, gradient + gradient.mT)


def _r_ratio(eps: float, a: Array, r: Array) -> Array:
    return product_ratio(eps, adjoint(a) @ a, adjoint(r) @ r)


def _least_squares_ratio(eps: float, a: Array, b: Array, x: Array) -> Array:
    return product_ratio(eps, np.linalg.pinv(a) @ b, x)


def _likelihood_ratio(eps: float, a: Array, likelihood: Array) -> Array:
    expected = plain_filter(a)
    return np.abs(likelihood - expected) / (STEPS * a.shape[-1] * eps * np.abs(expected))


def _determinant_ratio(eps: float, a: Array, det: Array) -> Array:
    expected = np.linalg.det(a)
    return np.abs(det - expected) / (a.shape[-1] * eps * np.abs(expected))


def _logarithm_ratio(eps: float, a: Array, log: Array) -> Array:
    expected = np.linalg.slogdet(a)[1]
    return np.abs(log - expected) / (a.shape[-1] * eps * np.maximum(1, np.abs(expected)))


# Of sum(x^2) / 2 with a x = b: -y x^T, a^T y = x.
def _general_solution_ratio(eps: float, a: Array, b: Array, gradient: Array) -> Array:
    x = np.linalg.solve(a, b)
    return product_ratio(eps, -np.linalg.solve(a.mT, x) @ x.mT, gradient)


# Of sum(x^2) / 2 with x the inverse: -x^T x x^T.
def _squared_inverse_ratio(eps: float, a: Array, gradient: Array) -> Array:
    x = np.linalg.inv(a)
    return product_ratio(eps, -x.mT @ x @ x.mT, gradient)


def _transposed_inverse_ratio(eps: float, a: Array, gradient: Array) -> Array:
    return _inverse_ratio(eps, a.mT, gradient)


def _each(sizes: Any) -> tuple[Any, ...]:
    return tuple(sizes[..., i] for i in range(3))


def _product_of_sizes_ratio(eps: float, a: Array, b: Array, sizes: Array, x: Array) -> Array:
    """|x - a b| over k eps |a| |b|, entry by entry."""
    bound = np.abs(a) @ np.abs(b) * eps * np.maximum(1, np.real(sizes[..., 2]))[..., None, None]
    return np.max(np.abs(x - a @ b) / np.where(bound == 0, np.finfo(float).tiny, bound), (-2, -1))


def _factor_of_sizes_ratio(eps: float, a: Array, sizes: Array, lower: Array) -> Array:
    continued = lower + np.where(np.eye(a.shape[-1]) * (lower == 0), 1, 0)
    return cholesky_ratio(eps, a, continued)


def _eigenvectors_ratio(eps: float, a: Array, v: Array) -> Array:
    """Of V^H A V, which is to be diagonal, and of V^H V, whichever is larger."""
    inner = adjoint(v) @ a @ v
    diagonal = np.eye(a.shape[-1]) * inner
    return np.maximum(_unitary_ratio(eps, v), product_ratio(eps, inner, diagonal))


def _unitary_ratio(eps: float, q: Array) -> Array:
    return product_ratio(eps, np.broadcast_to(np.eye(q.shape[-1]), q.shape), adjoint(q) @ q)


def _left_vectors_ratio(eps: float, a: Array, u: Array) -> Array:
    return _eigenvectors_ratio(eps, a @ adjoint(a), u)


# Of the sum of all entries of exp(A) = V exp(w) V^H, of real matrices.
def _exponential(eigh: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def value(a: Any) -> Any:
        w, v = eigh(a)
        return jnp.sum(jnp.exp(w) * jnp.sum(v, axis=-2) ** 2)

    return jax.grad(value)


def _exponential_ratio(eps: float, a: Array, gradient: Array) -> Array:
    w, v = np.linalg.eigh(a)
    one, other = w[..., :, None], w[..., None, :]
    gap = np.where(one == other, 1, one - other)
    quotients = np.where(one == other, np.exp(one), (np.exp(one) - np.exp(other)) / gap)
    sums = v.sum(-2)
    expected = v @ (quotients * sums[..., :, None] * sums[..., None, :]) @ adjoint(v)
    return product_ratio(eps, expected, gradient)


def _solve_pos(a: Any, b: Any) -> Any:
    return jb.solve(a, b, assume_a="pos", lower=True)


def _jax_solve_pos(a: Any, b: Any) -> Any:
    return jax.scipy.linalg.solve(a, b, assume_a="pos", lower=True)


OPERATIONS: dict[str, Operation] = {
    "cholesky": Operation(
        operands=("spd",),
        floor=_factor_floor,
        ratio=cholesky_ratio,
        calls={
            "jax_batched": lambda a: jb.cholesky(a, symmetrize_input=False),
            "jax_batched:fast": lambda a: jb.cholesky(a, symmetrize_input=False, accuracy="fast"),
            "jax": lambda a: jax.lax.linalg.cholesky(a, symmetrize_input=False),
            "torch": lambda a: torch().linalg.cholesky_ex(a).L,
        },
    ),
    "cholesky_symmetrize": Operation(
        operands=("spd",),
        floor=_factor_floor,
        ratio=cholesky_ratio,
        calls={
            "jax_batched": lambda a: jb.cholesky(a),
            "jax": lambda a: jax.lax.linalg.cholesky(a),
        },
    ),
    "cho_solve": Operation(
        operands=("factor", "rhs"),
        floor=_solve_floor,
        ratio=cho_solve_ratio,
        calls={
            "jax_batched": lambda c, b: jb.cho_solve((c, True), b),
            "jax": lambda c, b: jax.scipy.linalg.cho_solve((c, True), b),
            "torch": lambda c, b: torch().cholesky_solve(b, c),
        },
    ),
    "triangular_solve": Operation(
        operands=("factor", "rhs"),
        floor=_triangular_floor,
        ratio=solve_ratio,
        calls={
            "jax_batched": lambda c, b: jb.triangular_solve(c, b, left_side=True, lower=True),
            "jax": lambda c, b: jax.lax.linalg.triangular_solve(c, b, left_side=True, lower=True),
            "torch": lambda c, b: torch().linalg.solve_triangular(c, b, upper=False),
        },
    ),
    "solve_pos": Operation(
        operands=("spd", "rhs"),
        floor=_solve_floor,
        ratio=solve_ratio,
        calls={
            "jax_batched": _solve_pos,
            "jax_batched:fast": lambda a, b: jb.solve(
                a, b, assume_a="pos", lower=True, accuracy="fast"
            ),
            "jax": _jax_solve_pos,
            "torch": lambda a, b: torch().cholesky_solve(b, torch().linalg.cholesky_ex(a).L),
        },
    ),
    # solve_pos's systems: a run of both, in float32 and float64, compares single, double, mixed.
    "refined_solve": Operation(
        operands=("spd", "rhs"),
        floor=_solve_floor,
        ratio=solve_ratio,
        calls={
            "jax_batched": lambda a, b: jb.refined_solve(a, b, lower=True)[0],
            "jax": _jax_solve_pos,
        },
    ),
    "lu": Operation(
        operands=("general",),
        floor=_factor_floor,
        ratio=lu_ratio,
        calls={
            "jax_batched": lambda a: jb.lu(a)[0],
            "jax": lambda a: jax.lax.linalg.lu(a)[0],
            "torch": lambda a: torch().linalg.lu_factor_ex(a).LU,
        },
    ),
    "solve_gen": Operation(
        operands=("general", "rhs"),
        floor=_solve_floor,
        ratio=solve_ratio,
        calls={
            "jax_batched": lambda a, b: jb.solve(a, b),
            "jax": lambda a, b: jnp.linalg.solve(a, b),
            "torch": lambda a, b: torch().linalg.solve_ex(a, b).result,
        },
    ),
    "inv": Operation(
        operands=("general",),
        floor=_factor_floor,
        ratio=_inverse_ratio,
        calls={
            "jax_batched": lambda a: jb.inv(a),
            "jax": lambda a: jnp.linalg.inv(a),
            "torch": lambda a: torch().linalg.inv_ex(a).inverse,
        },
    ),
    "lu_tall": Operation(
        operands=("tall",),
        floor=lambda n, nrhs: 4 * n * n,
        ratio=lu_ratio,
        calls={
            "jax_batched": lambda a: jb.lu(a)[0],
            "jax": lambda a: jax.lax.linalg.lu(a)[0],
            "torch": lambda a: torch().linalg.lu_factor_ex(a).LU,
        },
        rows=lambda n: 2 * n,
    ),
    "det": Operation(
        operands=("general",),
        floor=lambda n, nrhs: n * n,
        ratio=_determinant_ratio,
        calls={
            "jax_batched": lambda a: jb.det(a),
            "jax": lambda a: jnp.linalg.det(a),
            "torch": lambda a: torch().linalg.det(a),
        },
    ),
    "slogdet": Operation(
        operands=("general",),
        floor=lambda n, nrhs: n * n,
        ratio=_logarithm_ratio,
        calls={
            "jax_batched": lambda a: jb.slogdet(a)[1],
            "jax": lambda a: jnp.linalg.slogdet(a)[1],
            "torch": lambda a: torch().linalg.slogdet(a)[1],
        },
    ),
    "qr": Operation(
        operands=("general",),
        floor=lambda n, nrhs: 3 * n * n,
        ratio=q_ratio,
        calls={
            "jax_batched": lambda a: jb.qr(a)[0],
            "jax": lambda a: jnp.linalg.qr(a)[0],
            "torch": lambda a: torch().linalg.qr(a).Q,
        },
    ),
    "qr_r": Operation(
        operands=("general",),
        floor=lambda n, nrhs: 1.5 * n * n,
        ratio=_r_ratio,
        calls={
            "jax_batched": lambda a: jb.qr(a, "r"),
            "jax": lambda a: jnp.linalg.qr(a, "r"),
            "torch": lambda a: torch().linalg.qr(a, "r").R,
        },
    ),
    "qr_tall": Operation(
        operands=("very_tall",),
        floor=lambda n, nrhs: 17 * n * n,
        ratio=q_ratio,
        calls={
            "jax_batched": lambda a: jb.qr(a)[0],
            "jax": lambda a: jnp.linalg.qr(a)[0],
            "torch": lambda a: torch().linalg.qr(a).Q,
        },
        rows=lambda n: 8 * n,
    ),
    "lstsq": Operation(
        operands=("tall", "tall_rhs"),
        floor=lambda n, nrhs: 2 * n * n + _other_rhs(n, nrhs),
        ratio=_least_squares_ratio,
        calls={
            "jax_batched": lambda a, b: jb.lstsq(a, b).x,
            "jax": lambda a, b: jax.vmap(lambda a, b: jnp.linalg.lstsq(a, b)[0])(a, b),
            "torch": lambda a, b: torch().linalg.lstsq(a, b).solution,
        },
        rows=lambda n: 2 * n,
    ),
    "eigh": Operation(
        operands=("hermitian",),
        floor=lambda n, nrhs: 2 * n * n + n,
        ratio=_eigenvectors_ratio,
        calls={
            "jax_batched": lambda a: jb.eigh(a).eigenvectors,
            "jax": lambda a: jnp.linalg.eigh(a)[1],
            "torch": lambda a: torch().linalg.eigh(a).eigenvectors,
        },
    ),
    "eigvalsh": Operation(
        operands=("hermitian",),
        floor=lambda n, nrhs: n * n,
        ratio=eigenvalues_ratio,
        calls={
            "jax_batched": lambda a: jb.eigvalsh(a),
            "jax": lambda a: jnp.linalg.eigvalsh(a),
            "torch": lambda a: torch().linalg.eigvalsh(a),
        },
    ),
    "svd": Operation(
        operands=("dense",),
        floor=lambda n, nrhs: 3 * n * n,
        ratio=_left_vectors_ratio,
        calls={
            "jax_batched": lambda a: jb.svd(a).U,
            "jax": lambda a: jnp.linalg.svd(a)[0],
            "torch": lambda a: torch().linalg.svd(a).U,
        },
    ),
    "grad_eigh": Operation(
        operands=("hermitian",),
        floor=lambda n, nrhs: 2 * n * n,
        ratio=_exponential_ratio,
        calls={
            "jax_batched": _exponential(jb.eigh),
            "jax": _exponential(jnp.linalg.eigh),
        },
    ),
    "kalman": Operation(  # a whole filter; its state is read and written in each step
        operands=("general",),
        floor=lambda n, nrhs: STEPS * 2 * n * n,
        ratio=_likelihood_ratio,
        calls={
            "jax_batched": lambda a: square_root_filter(
                lambda x: jb.qr(x, "r"), lambda x, y: jb.solve_triangular(x, y, trans=1), a
            ),
            "jax": lambda a: square_root_filter(
                lambda x: jnp.linalg.qr(x, "r"),
                lambda x, y: jax.scipy.linalg.solve_triangular(x, y, trans=1),
                a,
            ),
        },
    ),
    "gemm_sizes": Operation(  # the operands' padding is zero, as stock JAX needs it
        operands=("left", "right", "sizes"),
        floor=lambda n, nrhs: 3 * n * n,
        ratio=_product_of_sizes_ratio,
        calls={
            "jax_batched": lambda a, b, sizes: jb.blas.gemm(a, b, sizes=_each(sizes)),
            "jax": lambda a, b, sizes: jnp.matmul(a, b, precision="highest"),
            "torch": lambda a, b, sizes: torch().matmul(a, b),
        },
    ),
    "cholesky_sizes": Operation(
        operands=("continued_spd", "sizes"),
        floor=_factor_floor,
        ratio=_factor_of_sizes_ratio,
        calls={
            "jax_batched": lambda a, sizes: jb.cholesky(
                a, symmetrize_input=False, sizes=_each(sizes)[2]
            ),
            "jax": lambda a, sizes: jax.lax.linalg.cholesky(a, symmetrize_input=False),
            "torch": lambda a, sizes: torch().linalg.cholesky_ex(a).L,
        },
    ),
    "grad_logdet": Operation(
        operands=("spd",),
        floor=_factor_floor,
        ratio=_inverse_ratio,
        calls={
            "jax_batched": _log_determinant(jb.cholesky),
            "jax": _log_determinant(jax.lax.linalg.cholesky),
        },
    ),
    "grad_solve": Operation(
        operands=("spd", "rhs"),
        floor=lambda n, nrhs: 2 * n * n + _other_rhs(n, nrhs),
        ratio=_squared_solution_ratio,
        calls={
            "jax_batched": _squared_solution(_solve_pos),
            "jax": _squared_solution(_jax_solve_pos),
        },
    ),
    "grad_solve_gen": Operation(
        operands=("general", "rhs"),
        floor=lambda n, nrhs: 2 * n * n + _other_rhs(n, nrhs),
        ratio=_general_solution_ratio,
        calls={
            "jax_batched": _squared_solution(jb.solve),
            "jax": _squared_solution(jnp.linalg.solve),
        },
    ),
    "grad_inv": Operation(
        operands=("general",),
        floor=_factor_floor,
        ratio=_squared_inverse_ratio,
        calls={
            "jax_batched": jax.grad(lambda a: jnp.sum(jb.inv(a) ** 2) / 2),
            "jax": jax.grad(lambda a: jnp.sum(jnp.linalg.inv(a) ** 2) / 2),
        },
    ),
    "grad_slogdet": Operation(
        operands=("general",),
        floor=_factor_floor,
        ratio=_transposed_inverse_ratio,
        calls={
            "jax_batched": jax.grad(lambda a: jnp.sum(jb.slogdet(a)[1])),
            "jax": jax.grad(lambda a: jnp.sum(jnp.linalg.slogdet(a)[1])),
        },
    ),
}
# Of the report's tables, and of a run that names none.
USUAL_OPERATIONS = [
    "cholesky",
    "cholesky_symmetrize",
    "cho_solve",
    "triangular_solve",
    "solve_pos",
]
