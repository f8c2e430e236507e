"""Scaling, all by powers of two, which is exact; and rounding to the low precision."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

finfo: Callable[[Any], Any] = jnp.finfo


def to_one(size: Array) -> Array:
    """The power of two that brings a size near 1; 1 where that is not finite and positive.

    Its inverse is an ordinary number too: sizes at the ends of the range stay some way off.
    """
    form = finfo(size.dtype)
    usable = (size > 0) & (size < jnp.inf)
    limit = 2.0 ** (form.maxexp - 4)
    inside = jnp.clip(jnp.where(usable, size, 1), 1 / limit, limit)
    return 1 / jax.lax.reduce_precision(inside, form.nexp, 0)


def largest(x: Array, axis: int | tuple[int, ...]) -> Array:
    """The largest modulus along an axis, which stays with size 1."""
    return jnp.max(jnp.abs(x), axis=axis, keepdims=True)


def scale_of(a: Array, triangle: str) -> Array:
    """The power of two, one per matrix, that brings its largest entry near 1.

    The largest entry of a definite matrix is on its diagonal.
    """
    size = largest(diagonal(a), -1) if triangle else largest(a, (-2, -1))[..., 0]
    return to_one(size)[..., 0]


def diagonal(a: Array) -> Array:
    """The real part of the diagonal."""
    return jnp.real(jnp.diagonal(a, axis1=-2, axis2=-1))


def rounded(x: Array, dtype: str) -> Array:
    """x rounded to the low precision, in the dtype that is computed in.

    16-bit formats are computed in float32. `reduce_precision` because a compiler may drop a pair
    of conversions.
    """
    if dtype not in ("float16", "bfloat16"):
        return x.astype(dtype)
    form = finfo(dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), form.nexp, form.nmant)


def computed_in(dtype: str) -> Any:
    """The dtype that computes in a low precision."""
    return jnp.dtype("float32" if dtype in ("float16", "bfloat16") else dtype)
