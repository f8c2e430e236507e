"""Derivative rules that several operations share."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax_batched._core.operation import Operation, Params

Array = jax.Array


def minus(b: Array | None, product: Array) -> Array:
    """b - product, with None for zero: the right-hand side of ``a dx = db - da x``."""
    return -product if b is None else b - product


def hermitian_transpose(
    operation: "Callable[[], Operation]",
) -> "Callable[[Params, tuple[Any, ...], tuple[Any, ...]], Sequence[Any]]":
    """The rule of b -> a^-1 b with Hermitian a, whose transpose is conj(a)^-1.

    The operation has b as its last operand and the solution as its first result.
    """

    def transpose(
        params: "Params", primals: tuple[Any, ...], cotangents: tuple[Any, ...]
    ) -> Sequence[Any]:
        ct = cotangents[0]
        if ct is None:
            return (None,)
        return (jnp.conj(operation()(*primals[:-1], jnp.conj(ct), **params)[0]),)

    return transpose
