"""``b - s a x``: what refined solves measure and correct, an operation of the library's own.

JAX's batched products may add in another order for another batch. This one does not, and reads one
triangle of a Hermitian matrix.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_batched._core import Operation, Rules, kernel, lax
from jax_batched._matrix import hermitian_from_triangle, matmul, times

Array = jax.Array


def _lax(
    a: Array, scale: Array, x: Array, b: Array, *, triangle: str, absolute: bool
) -> Sequence[Array]:
    if triangle:
        a = hermitian_from_triangle(a, upper=triangle == "upper")
    a = times(a, scale[..., None, None])
    return (b - matmul(jnp.abs(a).astype(a.dtype) if absolute else a, x),)


# Parameters: triangle, "lower" or "upper" of a Hermitian a of which that one is read, or ""; and
# absolute: |a| in place of a. Without derivatives: the operations made of it have their own.
residual_op = Operation(
    "residual",
    Rules(signature=lambda params: "(m,n),(),(n,k),(m,k)->(m,k)", paths=(kernel(), lax(_lax))),
)
