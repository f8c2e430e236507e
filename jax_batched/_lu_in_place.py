"""LU factorization without exchanges of rows, whose small pivots are replaced.

A few columns are eliminated one after the other, and the rest of the matrix with all of them. The
arithmetic is that of the kernels of `triangular_solve` and of residuals, whose sums have one order
in every batch.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_batched._core import Operation, Params, Rules, lax
from jax_batched._matrix import matmul, real_dtype
from jax_batched.residual import residual_op
from jax_batched.triangular_solve import triangular_solve_op

Array = jax.Array
_WIDTH = 8  # columns that are eliminated one after the other


class _ByKernels:
    """Arithmetic of kernels."""

    @staticmethod
    def update(b: Array, left: Array, right: Array) -> Array:
        """b - left right."""
        ones = jnp.ones(b.shape[:-2], real_dtype(b.dtype))
        (x,) = residual_op(left, ones, right, b, triangle="", absolute=False)
        return x

    @staticmethod
    def divide(column: Array, pivot: Array) -> Array:
        """A column, m x 1, over a pivot, 1 x 1."""
        (x,) = triangular_solve_op(pivot, column, left_side=False, unit_diagonal=False, **_LOWER)
        return x


class _ByXla:
    """The same, with derivatives."""

    @staticmethod
    def update(b: Array, left: Array, right: Array) -> Array:
        return b - matmul(left, right)

    @staticmethod
    def divide(column: Array, pivot: Array) -> Array:
        return column / pivot


_LOWER: dict[str, Any] = {"lower": True, "transpose_a": False, "conjugate_a": False}


def _factored(a: Array, tiny: Array, by: type[_ByKernels] | type[_ByXla]) -> tuple[Array, Array]:
    """L and U in one matrix, and how many pivots were replaced: the left columns, then the rest."""
    m, n = a.shape[-2:]
    if n <= _WIDTH:
        return _by_steps(a, tiny, by)
    width = min(m, -(-n // (2 * _WIDTH)) * _WIDTH)
    left, replaced = _factored(a[..., :, :width], tiny, by)
    top = left[..., :width, :], a[..., :width, width:]
    (upper,) = triangular_solve_op(*top, left_side=True, unit_diagonal=True, **_LOWER)
    if m > width:
        rest = by.update(a[..., width:, width:], left[..., width:, :], upper)
        rest, of_rest = _factored(rest, tiny, by)
        upper, replaced = jnp.concatenate([upper, rest], axis=-2), replaced + of_rest
    return jnp.concatenate([left, upper], axis=-1), replaced


def _by_steps(a: Array, tiny: Array, by: type[_ByKernels] | type[_ByXla]) -> tuple[Array, Array]:
    """The same of a few columns, one after the other."""
    rows = jax.lax.broadcasted_iota(jnp.int32, (*a.shape[:-1], 1), a.ndim - 2)
    columns = jax.lax.broadcasted_iota(jnp.int32, (*a.shape[:-2], 1, a.shape[-1]), a.ndim - 1)

    def step(k: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        a, replaced = state
        column = jax.lax.dynamic_index_in_dim(a, k, -1)
        pivot = jax.lax.dynamic_index_in_dim(column, k, -2)
        small = jnp.abs(pivot) < tiny[..., None, None]
        pivot = jnp.where(small, tiny[..., None, None].astype(a.dtype) * _phase(pivot), pivot)
        column = jnp.where(rows > k, by.divide(column, pivot), column)
        column = jnp.where(rows == k, pivot, column)
        rest = by.update(a, column, jax.lax.dynamic_index_in_dim(a, k, -2))
        a = jnp.where((rows > k) & (columns > k), rest, a)
        a = jax.lax.dynamic_update_slice_in_dim(a, column, k, -1)
        return a, replaced + small[..., 0, 0].astype(jnp.int32)

    start = (a, jnp.zeros_like(a[..., 0, 0], jnp.int32))
    factored: tuple[Array, Array] = jax.lax.fori_loop(0, min(a.shape[-2:]), step, start)
    return factored


def _phase(x: Array) -> Array:
    """x / |x|; 1 of zero."""
    if not jnp.iscomplexobj(x):
        return jnp.where(x < 0, -jnp.ones_like(x), jnp.ones_like(x))
    other = jnp.where(x == 0, jnp.ones_like(x), x)
    return other / jnp.abs(other).astype(x.dtype)


def _lax(a: Array, tiny: Array) -> Sequence[Array]:
    return _factored(a, tiny, _ByKernels)


def _jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Those of the steps: what a replaced pivot was before counts by its phase alone."""
    del params
    given = [jnp.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True)]
    steps = functools.partial(_factored, by=_ByXla)
    _, (derivative, _) = jax.jvp(steps, primals, tuple(given))
    return lu_in_place_op(*primals), (derivative, None)


# a, the threshold -> L and U, the number of pivots that were replaced.
lu_in_place_op: Operation = Operation(
    "lu_in_place",
    Rules(
        signature=lambda params: "(m,n),()->(m,n),()",
        paths=(lax(_lax),),
        jvp=_jvp,
        result_dtypes=(None, jnp.int32),
    ),
)
