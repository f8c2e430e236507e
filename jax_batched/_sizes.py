"""Batches whose matrices differ in size: the `sizes` of a call."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_batched import _checks
from jax_batched._core import _jax
from jax_batched._matrix import spoilt

Array = jax.Array


class Sizes:
    """How many rows and columns each matrix of a batch has: the leading part of what holds it.

    Outside of that a matrix is continued by the identity, or another diagonal, and a right-hand
    side by zeros. Factors, inverses, solutions and eigenvectors of what was continued are those of
    the matrices, continued likewise. A matrix with a size out of range is all NaN, and fails as
    others do, but where a mask leaves it out. Without sizes (None) everything stays as it is.
    """

    def __init__(
        self,
        operation: str,
        sizes: ArrayLike | None,
        n: int,
        batch: tuple[Any, ...],
        *,
        name: str = "sizes",
        where: Array | None = None,
    ):
        given = _checks.sizes(operation, sizes, batch, name)
        self.n = n
        self.given: Any = given  # unchecked; None: all have n
        self._sizes: Array | None = None
        self._wrong: Array | None = None
        if given is not None:
            wrong = (given < 0) | (given > n)
            self._sizes = jnp.where(wrong, n, given).astype(jnp.int32)
            self._wrong = wrong if where is None else wrong & where

    @classmethod
    def of(cls, sizes: Array | None, wrong: Array | None = None) -> Self:
        """Sizes that are known to be in range, but where they are wrong."""
        self = cls.__new__(cls)
        self._sizes, self._wrong = sizes, wrong
        return self

    @classmethod
    def of_shapes(
        cls,
        operation: str,
        sizes: Sequence[ArrayLike | None] | None,
        shape: tuple[int, ...],
        batch: tuple[Any, ...],
        *,
        where: Array | None = None,
        square: bool = False,
    ) -> tuple[Self, Self, Self]:
        """Of matrices that need not be square: rows, columns, and the smaller of both.

        Where one is out of range, all are, and such a matrix is as large as what holds it. So are
        those that are not square, if they must be.
        """
        if sizes is None:
            return cls.of_parts()
        if not isinstance(sizes, tuple | list) or len(sizes) != 2:
            raise TypeError(
                f"{operation}: sizes must be a tuple (m, n), got {_checks.described(sizes)}"
            )
        rows, columns = (
            cls(operation, limit if given is None else given, limit, batch, name=name, where=where)
            for given, limit, name in zip(sizes, shape, ("m of sizes", "n of sizes"), strict=True)
        )
        wrong = _joined(jnp.logical_or, rows._wrong, columns._wrong)
        if square:
            other = _joined(jnp.not_equal, rows.each, columns.each)
            wrong = wrong | (other if where is None else other & where)

        def of_right(limit: int, own: Array) -> Array:
            return _joined(lambda wrong, own: jnp.where(wrong, limit, own), wrong, own)

        m, n = of_right(shape[0], rows.each), of_right(shape[1], columns.each)
        return cls.of_parts(m, n, wrong)

    @classmethod
    def of_parts(
        cls, m: Array | None = None, n: Array | None = None, wrong: Array | None = None
    ) -> tuple[Self, Self, Self]:
        """Rows, columns, and the smaller of both, which are known to be in range."""
        if m is None or n is None:
            return cls.of(None), cls.of(None), cls.of(None)
        return cls.of(m, wrong), cls.of(n, wrong), cls.of(jnp.minimum(m, n), wrong)

    @property
    def each(self) -> Array:
        """The sizes, if there are some."""
        assert self._sizes is not None
        return self._sizes

    def __bool__(self) -> bool:
        """Whether there are sizes."""
        return self._sizes is not None

    def continued(self, a: Array, diagonal: Array | None = None) -> Array:
        """Matrices, each continued by the identity, or by what `diagonal` (..., n) has."""
        if self._sizes is None:
            return a
        a = self.spoilt(a)
        own, n = self._places(a, -1), a.shape[-1]
        on_diagonal = jnp.eye(n, dtype=bool).reshape(*[1] * (a.ndim - 2), n, n)
        inside = own[..., :, None] & own[..., None, :]
        ones = jnp.ones_like(a)
        if diagonal is not None:
            ones = ones * like(diagonal, a, 1)[..., None].astype(a.dtype)
        other = jnp.where(on_diagonal & ~inside, ones, jnp.zeros_like(a))
        return jnp.where(inside, a, other)

    def within(self, x: Array, *axes: int, other: Array | None = None) -> Array:
        """Matrices with zeros, or what `other` has, beyond the size along each of these axes."""
        if self._sizes is None:
            return x
        x = _with_batch(x, self._sizes, 2)
        for axis in axes:
            own = self._places(x, axis)
            own = own[..., :, None] if axis == -2 else own[..., None, :]
            x = jnp.where(own, x, jnp.zeros_like(x) if other is None else other)
        return x

    def spoilt(self, x: Array, core_rank: int = 2) -> Array:
        """Results or operands, all NaN where the size is out of range."""
        if self._wrong is None:
            return x
        x = _with_batch(x, self._wrong, core_rank)
        wrong = like(self._wrong, x, core_rank)
        wrong = wrong.reshape(*wrong.shape, *[1] * core_rank)
        return _spoilt(x, jnp.broadcast_to(wrong, x.shape))

    def info(self, info: Array, number: int) -> Array:
        """info, where a size is out of range minus the number of the argument `sizes`."""
        if self._wrong is None:
            return info
        return jnp.where(like(self._wrong, info, 0), -number, info).astype(jnp.int32)

    def with_own_pivots(
        self, factors: Array, pivots: Array, permutation: Array
    ) -> tuple[Array, Array, Array]:
        """The results of an LU factorization of what was continued.

        NaN loses every comparison: then a pivot may come from beyond the size. Such a matrix is all
        NaN, and its rows are in their places.
        """
        if self._sizes is None:
            return factors, pivots, permutation
        own, sizes = self._places(factors, -1), like(self._sizes, factors)[..., None]
        strayed = jnp.any(own & (pivots >= sizes), -1, keepdims=True)
        factors = _spoilt(factors, jnp.broadcast_to(strayed[..., None], factors.shape))
        in_place = _in_place(pivots)
        pivots = jnp.where(strayed, in_place, pivots)
        return self.within(factors, -2, -1), pivots, jnp.where(strayed, in_place, permutation)

    def pivots(self, pivots: Array) -> Array:
        """Those of the matrices; rows beyond a size stay in their places."""
        if self._sizes is None:
            return pivots
        x = _with_batch(pivots, self._sizes, 1)[..., None]
        return jnp.where(self._places(x, -2), x[..., 0], _in_place(x[..., 0]))

    def _places(self, x: Array, axis: int) -> Array:
        """Of each matrix, which places along an axis it has."""
        places = jnp.arange(x.shape[axis], dtype=jnp.int32)
        return places.reshape(*[1] * (x.ndim - 2), -1) < like(self._sizes, x)[..., None]


def leading(a: Array, rows: Sizes, columns: Sizes) -> Array:
    """Matrices with zeros beyond their rows and columns, NaN where a size is out of range."""
    return columns.within(rows.within(rows.spoilt(a), -2), -1)


def rounding(s: Array, shape: Sequence[Any], rows: Sizes, columns: Sizes) -> Any:
    """max(m, n) eps of each matrix: a number, or an array that broadcasts with its s."""
    eps = np.finfo(s.dtype).eps
    if rows:
        size = jnp.maximum(rows.each, columns.each)
    elif all(isinstance(size, int) for size in shape):
        return float(max(shape) * eps)
    else:  # symbolic
        size = jnp.maximum(*map(jnp.asarray, shape))
    return like(size.astype(s.dtype), s, 1)[..., None] * eps


def _in_place(pivots: Array) -> Array:
    """Pivots that exchange no rows."""
    places = jnp.arange(pivots.shape[-1], dtype=pivots.dtype)
    return places.reshape(*[1] * (pivots.ndim - 1), -1)


def _with_batch(x: Array, of_batch: Array, core_rank: int) -> Array:
    """x with all batch dimensions of an array with one element for each matrix, spread like it
    over an explicit mesh where x is not."""
    own = x.shape[: x.ndim - core_rank]
    x = jnp.broadcast_to(
        x, (*jnp.broadcast_shapes(of_batch.shape, own), *x.shape[x.ndim - core_rank :])
    )
    spec, others = _jax.spec_of(jax.typeof(x)), _jax.spec_of(jax.typeof(of_batch))
    joined = [
        other if axis is None and size != 1 else axis
        for axis, other, size in zip(spec, others, of_batch.shape, strict=False)
    ]
    joined += spec[len(joined) :]
    if joined == list(spec):
        return x
    spread: Array = jax.sharding.reshard(x, jax.sharding.PartitionSpec(*joined))
    return spread


def _joined(f: Callable[[Array, Array], Array], x: Array | None, y: Array | None) -> Array:
    """f of two arrays with an element for each matrix, which broadcast."""
    assert x is not None and y is not None
    return f(_with_batch(x, y, 0), _with_batch(y, x, 0))


def like(of_batch: Array | None, x: Array, core_rank: int = 2) -> Array:
    """An array with one element for each matrix of x."""
    assert of_batch is not None
    full = jnp.broadcast_to(of_batch, x.shape[: x.ndim - core_rank])
    return _jax.sharded_like(full, x)


@jax.custom_jvp
def _spoilt(x: Array, wrong: Array) -> Array:
    """x with NaN where it is wrong, in derivatives as well."""
    return spoilt(x, wrong)


@_spoilt.defjvp
def _spoilt_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    (x, wrong), (dx, _) = primals, tangents
    return _spoilt(x, wrong), dx * spoilt(jnp.ones_like(x), wrong)
