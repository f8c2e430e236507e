"""General systems: JAX's LU, and solves with its factors whose derivatives reuse them.

The way of a call: `general_factor_op` factors each matrix once; `general_solve_op` solves with the
factors, has the matrix itself as an operand, and takes its derivatives with respect to that one.
The factors are a means, and have none.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_batched import _lapack
from jax_batched._core import Operation, Params, Rules, lax
from jax_batched._core.rules import minus
from jax_batched._matrix import matmul
from jax_batched.triangular_solve import triangular_solve_op

Array = jax.Array


def solve_general(a: Array, b: Array) -> tuple[Array, Array]:
    """x and info of ``a x = b``: one factorization for all right-hand sides of a matrix."""
    lu, rows, info = general_factor_op(jax.lax.stop_gradient(a))
    (x,) = general_solve_op(a, lu, rows, info, b, transpose=False)
    return x, jnp.broadcast_to(info, x.shape[:-2])


def bad_pivot(lu: Array) -> Array:
    """0, or the number k (from 1) of the first pivot that is zero or, out of range, not finite."""
    pivots = jnp.diagonal(lu, axis1=-2, axis2=-1)
    failed = (pivots == 0) | ~jnp.isfinite(pivots)
    return jnp.where(failed.any(-1), jnp.argmax(failed, -1) + 1, 0).astype(jnp.int32)


def lu_solve(lu: Array, rows: Array, b: Array, *, transpose: bool) -> Array:
    """Solves with a[rows] = L U, or with the transpose of a."""

    def substitute(b: Array, lower: bool) -> Array:
        (x,) = triangular_solve_op(
            lu,
            b,
            left_side=True,
            lower=lower,
            transpose_a=transpose,
            conjugate_a=False,
            unit_diagonal=lower,
        )
        return x

    if transpose:
        x = substitute(substitute(b, lower=False), lower=True)
        return jnp.take_along_axis(x, jnp.argsort(rows, -1)[..., None], axis=-2)
    permuted = jnp.take_along_axis(b, rows[..., None], axis=-2)
    return substitute(substitute(permuted, lower=True), lower=False)


def _solve(
    a: Array, lu: Array, rows: Array, info: Array, b: Array, *, transpose: bool
) -> Sequence[Array]:
    del a
    x = lu_solve(lu, rows, b, transpose=transpose)
    nan = complex(jnp.nan, jnp.nan) if jnp.iscomplexobj(x) else jnp.nan
    return (jnp.where((info > 0)[..., None, None], jnp.asarray(nan, x.dtype), x),)


def _factor(a: Array) -> Sequence[Array]:
    """L and U in one matrix, the permutation of the rows, and info."""
    lu, rows = _lapack.lu(a)
    return lu, rows, bad_pivot(lu)


def _factor_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    return general_factor_op(*primals, **params), [None] * 3


def _jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """a dx = db - da x."""
    da, db = tangents[0], tangents[-1]
    (x,) = general_solve_op(*primals, **params)
    rhs = db
    if da is not None:
        rhs = minus(db, matmul(jnp.swapaxes(da, -1, -2) if params["transpose"] else da, x))
    dx = None if rhs is None else general_solve_op(*primals[:-1], rhs, **params)[0]
    return (x,), (dx,)


def _transpose(
    params: Params, primals: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> Sequence[Any]:
    """The transpose of b -> a^-1 b is a^-T, with the same factors."""
    (ct,) = cotangents
    if ct is None:
        return (None,)
    turned = {**params, "transpose": not params["transpose"]}
    return general_solve_op(*primals[:-1], ct, **turned)


general_factor_op = Operation(
    "general_factor",
    Rules(
        signature=lambda params: "(n,n)->(n,n),(n),()",
        paths=(lax(_factor),),
        jvp=_factor_jvp,
        result_dtypes=(None, jnp.int32, jnp.int32),
    ),
)

# a, its factors, permutation and info, b -> x. With `transpose`, of the transpose of a.
general_solve_op = Operation(
    "general_solve",
    Rules(
        signature=lambda params: "(n,n),(n,n),(n),(),(n,k)->(n,k)",
        paths=(lax(_solve),),
        jvp=_jvp,
        transpose=_transpose,
    ),
)
