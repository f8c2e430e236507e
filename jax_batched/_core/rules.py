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
    operation: "Callable[[], Operation]", flag: str | None = None
) -> "Callable[[Params, tuple[Any, ...], tuple[Any, ...]], Sequence[Any]]":
    """The rule of b -> M b with Hermitian M, whose transpose is conj(M): of a solve M is a^-1.

    With a flag, M need not be Hermitian: the parameter of that name says which of M and M^H it is.
    The operation has b as its last operand and the product as its first result.
    """

    def transpose(
        params: "Params", primals: tuple[Any, ...], cotangents: tuple[Any, ...]
    ) -> Sequence[Any]:
        ct = cotangents[0]
        if ct is None:
            return (None,)
        turned = params if flag is None else {**params, flag: not params[flag]}
        return (jnp.conj(operation()(*primals[:-1], jnp.conj(ct), **turned)[0]),)

    return transpose
