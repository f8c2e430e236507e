"""Batches whose matrices differ in size: the `sizes` of a call."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_batched import _checks
from jax_batched._core import _jax

Array = jax.Array


class Sizes:
    """How many rows and columns each matrix of a batch has: the leading part of what holds it.

    Outside of that a matrix is continued by the identity, and a right-hand side by zeros. Factors,
    inverses and solutions of what was continued are those of the matrices, continued likewise, and
    pivots never come from there. A matrix with a size out of range is all NaN, and fails as others
    do. Without sizes (None) everything stays as it is.
    """

    def __init__(
        self,
        operation: str,
        sizes: ArrayLike | None,
        n: int,
        batch: tuple[Any, ...],
        name: str = "sizes",
    ):
        given = _checks.sizes(operation, sizes, batch, name)
        self._sizes = self._wrong = None
        if given is not None:
            self._wrong = (given < 0) | (given > n)
            self._sizes = jnp.where(self._wrong, n, given).astype(jnp.int32)

    def continued(self, a: Array) -> Array:
        """Matrices, each continued by the identity."""
        if self._sizes is None:
            return a
        a = self.spoilt(a)
        own = self._places(a, -1)
        n = a.shape[-1]
        diagonal = jnp.eye(n, dtype=bool).reshape(*[1] * (a.ndim - 2), n, n)
        inside = own[..., :, None] & own[..., None, :]
        other = jnp.where(diagonal & ~inside, jnp.ones_like(a), jnp.zeros_like(a))
        return jnp.where(inside, a, other)

    def within(self, x: Array, *axes: int, other: Array | None = None) -> Array:
        """Matrices with zeros, or what `other` has, beyond the size along each of these axes."""
        if self._sizes is None:
            return x
        x = _with_batch(x, self._sizes)
        for axis in axes:
            own = self._places(x, axis)
            own = own[..., :, None] if axis == -2 else own[..., None, :]
            x = jnp.where(own, x, jnp.zeros_like(x) if other is None else other)
        return x

    def spoilt(self, x: Array) -> Array:
        """Matrices, all NaN where the size is out of range."""
        if self._sizes is None:
            return x
        x = _with_batch(x, self._sizes)
        return _spoilt(x, jnp.broadcast_to(_like(self._wrong, x)[..., None, None], x.shape))

    def info(self, info: Array, number: int) -> Array:
        """info, where a size is out of range minus the number of the argument `sizes`."""
        if self._sizes is None:
            return info
        return jnp.where(_like(self._wrong, info, 0) & (info >= 0), -number, info).astype(jnp.int32)

    def _places(self, x: Array, axis: int) -> Array:
        """Of each matrix, which places along an axis it has."""
        places = jnp.arange(x.shape[axis], dtype=jnp.int32)
        return places.reshape(*[1] * (x.ndim - 2), -1) < _like(self._sizes, x)[..., None]


def _with_batch(x: Array, sizes: Array) -> Array:
    """x with all batch dimensions that the sizes have."""
    batch = jnp.broadcast_shapes(sizes.shape, x.shape[:-2])
    return jnp.broadcast_to(x, (*batch, *x.shape[-2:]))


def _like(of_batch: Array | None, x: Array, core_rank: int = 2) -> Array:
    """An array with one element for each matrix of x."""
    assert of_batch is not None
    full = jnp.broadcast_to(of_batch, x.shape[: x.ndim - core_rank])
    return _jax.sharded_like(full, x)


@jax.custom_jvp
def _spoilt(x: Array, wrong: Array) -> Array:
    """x with NaN where it is wrong, in derivatives as well."""
    return jnp.where(wrong, jnp.full_like(x, jnp.nan), x)


@_spoilt.defjvp
def _spoilt_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    (x, wrong), (dx, _) = primals, tangents
    factor = jnp.where(wrong, jnp.full_like(x, jnp.nan), jnp.ones_like(x))
    return _spoilt(x, wrong), dx * factor
