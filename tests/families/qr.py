"""QR factorizations, and products with their Q."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rows import Kind, Op, Solve, strict_triangle

import jax_batched as jb
from jax_batched._core._jax import spec_of
from jax_batched._matrices import adjoint, general, norm, normal


def taus_of(a: Any) -> Any:
    """Factors for the vectors below a's diagonal: 2, made of entries that are read, so that they
    are spread over devices as a is."""
    return _taus_of(jnp.asarray(a))


@jax.jit
def _taus_of(a: jax.Array) -> jax.Array:
    m, k = a.shape[-2], min(a.shape[-2:])
    if m <= 1 or any(spec_of(jax.typeof(a))[-2:]):  # a sharded axis is not sliced; it is refused
        return jnp.full((*a.shape[:-2], k), 2, a.dtype)
    row = a[..., -1, :k]
    read = jnp.concatenate([row[..., : m - 1], row[..., :1]], axis=-1)
    return 2 + 0 * read[..., :k]


def product_of_reflections(a: np.ndarray) -> np.ndarray:
    """The product of I - 2 v v^H, one after the other: unitary where the vectors are short."""
    m, n = a.shape[-2:]
    q = np.broadcast_to(np.eye(m, dtype=a.dtype), (*a.shape[:-2], m, m))
    for column in range(min(m, n)):
        v = np.where(np.arange(m) < column, 0, a[..., :, column])
        v = np.where(np.arange(m) == column, 1, v)[..., :, None]
        q = q - 2 * (q @ v) @ adjoint(v)
    return q


def solved_by_reflections(a: np.ndarray) -> np.ndarray:
    """M with M X = B for X the product of the adjoint with B."""
    return np.linalg.inv(adjoint(product_of_reflections(a)))


class Orthogonal(Kind):
    """Q of M = Q R."""

    is_unitary = True

    def reference(self, m: np.ndarray, *b: np.ndarray) -> np.ndarray:
        return np.linalg.qr(m)[0]

    def ratios(self, eps: float, m: np.ndarray, x: np.ndarray, *b: np.ndarray) -> np.ndarray:
        n = m.shape[-1]
        triangle = np.triu(adjoint(x) @ m)
        return np.maximum(
            norm(m - x @ triangle) / (n * eps * norm(m)),
            norm(np.eye(n) - adjoint(x) @ x) / (n * eps),
        )

    def scale(self, m: float, b: float) -> float:
        return 1.0


class Triangle(Kind):
    """R of M = Q R."""

    def reference(self, m: np.ndarray, *b: np.ndarray) -> np.ndarray:
        return np.linalg.qr(m)[1]

    def ratios(self, eps: float, m: np.ndarray, x: np.ndarray, *b: np.ndarray) -> np.ndarray:
        n = m.shape[-1]
        return norm(self.reference(m) - x) / (n * eps * norm(m))

    def check_structure(self, x: np.ndarray) -> None:
        assert not np.tril(x, -1).any(), "the lower triangle of R must be zero"

    def failed(self, shape: Any) -> np.ndarray:
        return np.triu(np.ones(shape, bool))

    def scale(self, m: float, b: float) -> float:
        return m


class Product(Orthogonal):
    """M itself, which is nearly unitary."""

    def reference(self, m: np.ndarray, *b: np.ndarray) -> np.ndarray:
        return m

    def ratios(self, eps: float, m: np.ndarray, x: np.ndarray, *b: np.ndarray) -> np.ndarray:
        return norm(m - x) / (m.shape[-1] * eps)


def _reflections(rng: Any, dtype: Any, shape: Any) -> np.ndarray:
    return normal(rng, dtype, shape) / max(shape[-1], 1)


def of_square(f: Any) -> Any:
    """f of square matrices, with their sizes for both of its own."""
    return lambda *operands, sizes=None, **options: f(
        *operands, **options, sizes=None if sizes is None else (sizes, sizes)
    )


def _row(name: str, operation: str, function: Any, kind: Kind, **others: Any) -> Op:
    usual = {"matrix": lambda a: a, "make": general}
    usual |= {"in_place": False, "takes_sizes": False}
    row = {"options": {}, "reduced": True, "usual": True, **usual, **others}
    return Op(name=name, operation=operation, function=function, kind=kind, **row)


ROWS = [
    _row(
        "qr-reduced",
        "qr",
        of_square(lambda a, **options: jb.qr(a, **options)[0]),
        Orthogonal(),
        takes_sizes=True,
    ),
    _row(
        "qr-r",
        "qr",
        of_square(jb.qr),
        Triangle(),
        options={"mode": "r"},
        usual=False,
        takes_sizes=True,
    ),
    _row(
        "householder_product",
        "householder_product",
        lambda a, **options: jb.householder_product(a, taus_of(a), **options),
        Product(),
        matrix=product_of_reflections,
        make=_reflections,
        unread=strict_triangle(upper=True, diagonal=True),
        degree=0,
    ),
    _row(
        "qr_multiply",
        "qr_multiply",
        lambda a, b, **options: jb.qr_multiply(a, taus_of(a), b, **options),
        Solve(),
        options={"adjoint": True},
        matrix=solved_by_reflections,
        make=_reflections,
        unread=strict_triangle(upper=True, diagonal=True),
        degree=0,
    ),
    _row(
        "lstsq",
        "lstsq",
        of_square(lambda a, b, **options: jb.lstsq(a, b, **options).x),
        Solve(),
        takes_sizes=True,
        kernels=False,
        composite=True,
        reduced=False,
        usual=False,
    ),
]
# Of a square matrix, without a row.
PROGRAMS = {"least_squares": lambda a: (jb.qr(a, "complete"), jb.qr(a, "raw"), jb.lstsq(a, a))}
