"""Random matrices of known conditioning, and LAPACK's test ratios, in NumPy.

Tests, benchmarks and the tuner judge kernels by the same ratios. Matrices are made in float64 or
complex128, complex where the dtype is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MAX_RATIO = 30.0  # LAPACK's threshold for its test ratios


def normal(rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> Array:
    """Standard normal numbers, complex where the dtype is."""
    x = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        x = (x + 1j * rng.standard_normal(shape)) / np.sqrt(2)
    return np.asarray(x)


def spd(rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> Array:
    """Hermitian positive definite matrices with a condition number below about 6."""
    g = normal(rng, dtype, shape)
    n = shape[-1]
    return g @ adjoint(g) / max(n, 1) + np.eye(n)


def graded_spd(rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> Array:
    """Definite matrices, every second one of the first dimension graded: rows fall to 10^-3."""
    n = shape[-1]
    scale = np.where(np.arange(shape[0]) % 2, 1e-3, 1.0)[:, None] ** np.linspace(0, 1, n)
    return spd(rng, dtype, shape) * scale[:, :, None] * scale[:, None, :]


def triangular(rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> Array:
    """Matrices both of whose triangles are well conditioned, with or without their diagonal."""
    n = shape[-1]
    a = normal(rng, dtype, shape) / (2 * np.sqrt(max(n, 1)))
    diagonal = normal(rng, dtype, shape[:-1])
    diagonal = diagonal / np.abs(diagonal) * rng.uniform(1, 2, shape[:-1])
    return np.where(np.eye(n, dtype=bool), diagonal[..., None], a)


def general(rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> Array:
    """Well conditioned matrices whose pivots are not on the diagonal."""
    n = shape[-1]
    return np.roll(normal(rng, dtype, shape) / (2 * np.sqrt(max(n, 1))) + 2 * np.eye(n), 1, -2)


def wide(x: Any) -> Array:
    """x as float64 or complex128."""
    x = np.asarray(x)
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def adjoint(a: Array) -> Array:
    """Conjugate transpose."""
    return np.asarray(np.conj(np.swapaxes(a, -1, -2)))


def norm(a: Array) -> Array:
    """The 1-norm of each matrix."""
    return np.asarray(np.abs(a).sum(-2).max(-1))


def product_ratio(eps: float, m: Array, product: Array) -> Array:
    """||M - product of its factors|| / (n eps ||M||) of each matrix."""
    return _quotient(norm(m - product), m.shape[-1] * eps * norm(m))


def cholesky_ratio(eps: float, m: Array, lower: Array) -> Array:
    """`product_ratio` of a lower Cholesky factor."""
    return product_ratio(eps, m, lower @ adjoint(lower))


def solve_ratio(eps: float, m: Array, b: Array, x: Array) -> Array:
    """||b - M x|| / (n eps ||M|| ||x||) of each matrix, for the worst of its right-hand sides."""
    residual = np.abs(b - m @ x).sum(-2)
    bound = m.shape[-1] * eps * norm(m)[..., None] * np.abs(x).sum(-2)
    return np.asarray(_quotient(residual, bound).max(-1))


def inverse_ratio(eps: float, m: Array, x: Array) -> Array:
    """||I - X M|| / (n eps ||M|| ||X||) of each matrix."""
    n = m.shape[-1]
    return _quotient(norm(np.eye(n) - x @ m), n * eps * norm(m) * norm(x))


def lu_ratio(eps: float, m: Array, lu: Array) -> Array:
    """`product_ratio` of the factors of a matrix of `general`, or of such above other rows."""
    n = m.shape[-1]
    lower = np.tril(lu, -1) + np.eye(*m.shape[-2:])
    rolled = np.concatenate([np.roll(m[..., :n, :], -1, axis=-2), m[..., n:, :]], axis=-2)
    return product_ratio(eps, rolled, lower @ np.triu(lu[..., :n, :]))


def q_ratio(eps: float, m: Array, q: Array) -> Array:
    """`product_ratio` of Q R with a triangular R, or of Q^H Q, whichever is larger."""
    gram = adjoint(q) @ q
    unitary = product_ratio(eps, np.broadcast_to(np.eye(m.shape[-1]), gram.shape), gram)
    return np.maximum(unitary, product_ratio(eps, m, q @ np.triu(adjoint(q) @ m)))


def eigenvalues_ratio(eps: float, m: Array, w: Array) -> Array:
    """max |w - those of M| / (n eps max |w|) of each Hermitian matrix."""
    expected = np.linalg.eigvalsh(m)
    size = m.shape[-1] * eps * np.abs(expected).max(-1)
    return np.asarray(np.abs(w - expected).max(-1) / size)


def cho_solve_ratio(eps: float, lower: Array, b: Array, x: Array) -> Array:
    """`solve_ratio` of M = L L^H."""
    return solve_ratio(eps, lower @ adjoint(lower), b, x)


def _quotient(residual: Array, bound: Array) -> Array:
    """residual / bound; 0 where the residual is zero."""
    return np.where(residual == 0, 0, residual / np.where(bound == 0, np.finfo(float).tiny, bound))
