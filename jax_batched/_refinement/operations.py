"""The primitives of `refined_solve`, and their derivatives.

Those are the derivatives of the solution. Factors are a means, and have none.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_batched._core import Operation, Params, Rules, lax, mask
from jax_batched._core.rules import hermitian_transpose, minus
from jax_batched._matrix import hermitian_from_triangle, matmul
from jax_batched._refinement.factor import low_factor, low_solve
from jax_batched._refinement.loop import refined
from jax_batched._refinement.rescue import rescue
from jax_batched._refinement.scaling import computed_in, finfo
from jax_batched._refinement.system import scaled_system

Array = jax.Array


def _refine(
    a: Array,
    *operands: Array,
    triangle: str,
    transpose: bool,
    method: str,
    max_steps: int,
    tol: float,
    goal: float,
    fallback: bool,
) -> Sequence[Array]:
    """x, converged, steps, backward error and rescued of each right-hand side, and info."""
    *factors, info, b = operands
    b = mask.applied(b, 2)  # a right-hand side of zeros takes no step
    if transpose:
        a = jnp.swapaxes(a, -1, -2)
    system = scaled_system(a, b, triangle)
    solve = functools.partial(low_solve, factors, triangle=triangle, transpose=transpose)
    x, error, steps = refined(
        system, solve, info, method=method, max_steps=max_steps, tol=tol, goal=goal
    )
    if fallback:
        x, error, rescued, info = rescue(system, x, error, info, tol)
    else:
        rescued = jnp.zeros_like(error, dtype=bool)
    x, error = system.solution(x, error)
    return x, error <= tol, steps, error, rescued, info


def _low_factor_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    return low_factor_op(*primals, **params), [None] * 5


def _refine_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """a dx = db - da x."""
    da, db = tangents[0], tangents[-1]
    results = refine_op(*primals, **params)
    rhs = db
    if da is not None:
        if params["triangle"]:
            da = hermitian_from_triangle(da, upper=params["triangle"] == "upper")
        turned = jnp.swapaxes(da, -1, -2) if params["transpose"] else da
        rhs = minus(db, matmul(turned, results[0]))
    dx = None if rhs is None else refine_op(*primals[:-1], rhs, **params)[0]
    return results, [dx, *[None] * 5]


def _refine_transpose(
    params: Params, primals: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> Sequence[Any]:
    """A Hermitian matrix has the transpose conj(a); an LU factorization serves both."""
    if params["triangle"]:
        return hermitian_transpose(lambda: refine_op)(params, primals, cotangents)
    ct = cotangents[0]
    if ct is None:
        return (None,)
    turned = {**params, "transpose": not params["transpose"]}
    return refine_op(*primals[:-1], ct, **turned)[:1]


def _real(dtype: Any) -> Any:
    return finfo(dtype).dtype


low_factor_op = Operation(
    "low_factor",
    Rules(
        signature=lambda params: "(n,n)->(n,n),(n),(n),(n),()",
        paths=(lax(low_factor),),
        jvp=_low_factor_jvp,
        result_dtypes=lambda params, data: (
            computed_in(params["dtype"]),
            _real(data),
            _real(data),
            jnp.int32,
            jnp.int32,
        ),
    ),
)

refine_op: Operation = Operation(
    "refine",
    Rules(
        signature=lambda params: "(n,n),(n,n),(n),(n),(n),(),(n,k)->(n,k),(k),(k),(k),(k),()",
        paths=(lax(_refine),),
        jvp=_refine_jvp,
        transpose=_refine_transpose,
        result_dtypes=lambda params, data: (
            None,
            jnp.bool_,
            jnp.int32,
            _real(data),
            jnp.bool_,
            jnp.int32,
        ),
    ),
)
