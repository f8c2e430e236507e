"""The derivative of a Cholesky factor: a linear map of tangents, and its transpose, of cotangents.

Both are primitives, so that `grad` of whatever uses a factor is one pass over memory, and
derivatives of derivatives are still made of the library's operations.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_batched._core import Operation, Params, Rules, composed, kernel, lax
from jax_batched._matrix import (
    adjoint,
    hermitian_input,
    hermitian_mean,
    matmul,
    real_diagonal,
    triangle,
)
from jax_batched.triangular_solve import triangular_solve_op

Array = jax.Array

_LOWER: dict[str, Any] = {"lower": True, "unit_diagonal": False}

# What a cotangent next to overflow is multiplied with, as in the kernels.
_SMALL = 2.0**-32


def _half_triangle(a: Array) -> Array:
    """Phi: the lower triangle with its diagonal real and halved."""
    half = jnp.where(jnp.eye(a.shape[-1], dtype=bool), a / 2, a)
    return real_diagonal(triangle(half, upper=False))


def _pushforward(factor: Array, da: Array, *, upper: bool, symmetrize: bool) -> Sequence[Array]:
    """dL = L Phi(L^-1 dA L^-H)."""
    lower_factor = adjoint(factor) if upper else factor
    hermitian = hermitian_input(da, upper=upper, symmetrize=symmetrize)
    (right,) = triangular_solve_op(
        lower_factor, hermitian, left_side=False, transpose_a=True, conjugate_a=True, **_LOWER
    )
    (inner,) = triangular_solve_op(
        lower_factor, right, left_side=True, transpose_a=False, conjugate_a=False, **_LOWER
    )
    tangent = triangle(matmul(lower_factor, _half_triangle(inner)), upper=False)
    return (adjoint(tangent) if upper else tangent,)


def _pullback(factor: Array, ct: Array, *, upper: bool, symmetrize: bool) -> Sequence[Array]:
    """S = L^-H (P + P^H) / 2 L^-1 with P = Phi(L^H G), and what an entry of a has in it.

    JAX's cotangents are conjugates of gradients: G = conj(ct), and the result is conj(S).
    """
    lower_factor = adjoint(factor) if upper else factor
    gradient = triangle(jnp.swapaxes(ct, -1, -2) if upper else jnp.conj(ct), upper=False)
    # Products with numbers next to overflow would overflow.
    largest = jnp.max(jnp.abs(gradient), axis=(-2, -1), keepdims=True, initial=0)
    is_large = jnp.isinf(largest / _SMALL)
    gradient = jnp.where(is_large, gradient * _SMALL, gradient)
    half = _half_triangle(matmul(adjoint(lower_factor), gradient))
    (left,) = triangular_solve_op(
        lower_factor,
        hermitian_mean(half),
        left_side=True,
        transpose_a=True,
        conjugate_a=True,
        **_LOWER,
    )
    (both,) = triangular_solve_op(
        lower_factor, left, left_side=False, transpose_a=False, conjugate_a=False, **_LOWER
    )
    result = jnp.conj(hermitian_mean(both))
    result = jnp.where(is_large, result / _SMALL, result)
    if symmetrize:
        return (result,)
    return (triangle(result, upper=upper) + triangle(result, upper=upper, strict=True),)


def _jvp_of(operation: Callable[[], Operation], formula: Callable[..., Sequence[Array]]) -> Any:
    """The rule of a map that is linear in its second operand; the first one's part by `formula`."""

    def jvp(
        params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        (factor, x), (dfactor, dx) = primals, tangents
        results = operation()(factor, x, **params)
        parts = [] if dx is None else [operation()(factor, dx, **params)[0]]
        if dfactor is not None:
            _, (part,) = jax.jvp(lambda f: formula(f, x, **params), (factor,), (dfactor,))
            parts.append(part)
        return results, [sum(parts[1:], parts[0])]

    return jvp


def _transpose_to(operation: Callable[[], Operation]) -> Any:
    """The rule of a map whose transpose is that operation with the same factor."""

    def transpose(
        params: Params, primals: tuple[Any, ...], cotangents: tuple[Any, ...]
    ) -> Sequence[Any]:
        (factor, _), (ct,) = primals, cotangents
        return (None,) if ct is None else operation()(factor, ct, **params)

    return transpose


# Parameters: upper and symmetrize, as of `cholesky_op`, whose factor is the first operand.

# Tangent of a -> tangent of the factor. Without a kernel.
cholesky_pushforward_op: Operation = Operation(
    "cholesky_pushforward",
    Rules(
        signature=lambda params: "(n,n),(n,n)->(n,n)",
        paths=(lax(_pushforward, broadcasts=True),),
        jvp=_jvp_of(lambda: cholesky_pushforward_op, _pushforward),
        transpose=_transpose_to(lambda: cholesky_pullback_op),
    ),
)

# Cotangent of the factor, of which one triangle is read -> cotangent of a.
cholesky_pullback_op: Operation = Operation(
    "cholesky_pullback",
    Rules(
        signature=lambda params: "(n,n),(n,n)->(n,n)",
        paths=(kernel(), composed(_pullback), lax(_pullback, broadcasts=True)),
        jvp=_jvp_of(lambda: cholesky_pullback_op, _pullback),
        transpose=_transpose_to(lambda: cholesky_pushforward_op),
    ),
)
