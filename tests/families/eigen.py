"""Eigenvalues and singular values, in forms that do not depend on the sign of a vector."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from rows import STORED, Kind, Op, hermitian_from, strict_triangle

import jax_batched as jb
from families.cholesky import hermitian_mean
from families.qr import of_square
from jax_batched._matrices import Array, adjoint, norm, normal

MAX_N = 64


def separated(rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> Array:
    """Hermitian matrices with eigenvalues from -1 to 1.3 that are far from each other."""
    n = shape[-1]
    q = np.linalg.qr(normal(rng, dtype, shape))[0]
    return (q * np.linspace(-1, 1.3, n)) @ adjoint(q)


def separated_singular(rng: np.random.Generator, dtype: Any, shape: Sequence[int]) -> Array:
    """Matrices with singular values from 0.7 to 2 that are far from each other."""
    n = shape[-1]
    u, v = (np.linalg.qr(normal(rng, dtype, shape))[0] for _ in range(2))
    return (u * np.linspace(0.7, 2, n)) @ v


class Squares(Kind):
    """|v_ij|^2 of eigenvectors, or of left singular vectors, in a's dtype."""

    def __init__(self, singular: bool):
        self.singular = singular

    def reference(self, m: np.ndarray, *b: np.ndarray) -> np.ndarray:
        vectors = np.linalg.svd(m)[0] if self.singular else np.linalg.eigh(m)[1]
        return (np.abs(vectors) ** 2).astype(m.dtype)

    def ratios(self, eps: float, m: np.ndarray, x: np.ndarray, *b: np.ndarray) -> np.ndarray:
        n = m.shape[-1]  # vectors change by eps beside the gap, which is about 1 / n
        return norm(self.reference(m) - x) / (n * n * eps)

    def scale(self, m: float, b: float) -> float:
        return 1.0


class Values(Kind):
    """The eigenvalues, ascending, in every row."""

    def reference(self, m: np.ndarray, *b: np.ndarray) -> np.ndarray:
        values = np.linalg.eigvalsh(m)[..., None, :]
        return np.broadcast_to(values, m.shape).astype(m.dtype)

    def ratios(self, eps: float, m: np.ndarray, x: np.ndarray, *b: np.ndarray) -> np.ndarray:
        difference = np.abs(self.reference(m) - x).max((-2, -1))
        return difference / (m.shape[-1] * eps * norm(m))

    def scale(self, m: float, b: float) -> float:
        return m


def _made_of(a: Any, function: Callable[[Any], Any]) -> Any:
    """What a function makes of a, in its dtype; 16 bits are rounded once, in the end."""
    a = jnp.asarray(a)
    return function(a.astype(jnp.float32) if a.dtype in STORED else a).astype(a.dtype)


def _vectors(a: Any, **options: Any) -> Any:
    return _made_of(a, lambda a: jnp.abs(jb.eigh(a, **options).eigenvectors) ** 2)


def _left_vectors(a: Any, **options: Any) -> Any:
    return _made_of(a, lambda a: jnp.abs(jb.svd(a, **options).U) ** 2)


def _values(a: Any, **options: Any) -> Any:
    def rows(a: Any) -> Any:
        return jnp.broadcast_to(jb.eigvalsh(a, **options)[..., None, :], a.shape)

    return _made_of(a, rows)


def _row(name: str, operation: str, function: Any, kind: Kind, **others: Any) -> Op:
    usual = {"options": {}, "max_n": MAX_N, "in_place": False, "takes_sizes": False}
    usual |= {"reduced": True, **others}
    return Op(name=name, operation=operation, function=function, kind=kind, **usual)


ROWS = [
    _row(
        "eigh-mean",
        "eigh",
        _vectors,
        Squares(singular=False),
        matrix=hermitian_mean,
        make=separated,
        real_diagonal=True,
        usual=True,
        takes_sizes=True,
    ),
    _row(
        "eigvalsh-lower",
        "eigh",
        functools.partial(_values, symmetrize_input=False),
        Values(),
        matrix=functools.partial(hermitian_from, upper=False),
        make=separated,
        unread=strict_triangle(upper=True),
        real_diagonal=True,
    ),
    _row(
        "svd",
        "svd",
        of_square(_left_vectors),
        Squares(singular=True),
        matrix=lambda a: a,
        make=separated_singular,
        paths=("lax", "composed"),
        usual=True,
        takes_sizes=True,
    ),
]
# Of a square matrix, without a row.
PROGRAMS = {
    "spectral": lambda a: (
        jb.eigh(a),
        jb.eigh_function(a, jnp.exp),
        jb.svd(a[..., :-1], full_matrices=False),
        jb.polar(a),
        jb.pinv(a),
        jb.lstsq(a, a, method="svd"),
    )
}
