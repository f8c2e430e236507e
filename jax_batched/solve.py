"""Solving linear systems in one call."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_batched import _checks, _ffi
from jax_batched._matrix import hermitian_from_triangle, matmul, symmetric_from_triangle
from jax_batched._primitive import Operation, Params, Rules
from jax_batched.cho_solve import cho_solve_op
from jax_batched.cholesky import cholesky_op

Array = jax.Array


@overload
def solve(
    a: ArrayLike,
    b: ArrayLike,
    lower: bool = ...,
    overwrite_a: bool = ...,
    overwrite_b: bool = ...,
    debug: bool = ...,
    check_finite: bool = ...,
    assume_a: str = ...,
    *,
    accuracy: str = ...,
    return_info: Literal[False] = ...,
) -> Array: ...


@overload
def solve(
    a: ArrayLike,
    b: ArrayLike,
    lower: bool = ...,
    overwrite_a: bool = ...,
    overwrite_b: bool = ...,
    debug: bool = ...,
    check_finite: bool = ...,
    assume_a: str = ...,
    *,
    accuracy: str = ...,
    return_info: Literal[True],
) -> tuple[Array, Array]: ...


@overload
def solve(
    a: ArrayLike,
    b: ArrayLike,
    lower: bool = ...,
    overwrite_a: bool = ...,
    overwrite_b: bool = ...,
    debug: bool = ...,
    check_finite: bool = ...,
    assume_a: str = ...,
    *,
    accuracy: str = ...,
    return_info: bool,
) -> Array | tuple[Array, Array]: ...


def solve(
    a: ArrayLike,
    b: ArrayLike,
    lower: bool = False,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    debug: bool = False,
    check_finite: bool = True,
    assume_a: str = "gen",
    *,
    accuracy: str = "ieee",
    return_info: bool = False,
) -> Array | tuple[Array, Array]:
    """Solves ``a x = b`` for each matrix of a batch.

    The signature and defaults of `jax.scipy.linalg.solve`, and more options.

    Args:
      a: matrices of shape ``(..., n, n)``; float32, float64, complex64 or complex128, or
        float16 and bfloat16, which are computed in float32.
      b: right-hand sides of shape ``(..., n, k)``, or one vector ``(n,)``. Batch dimensions
        broadcast.
      lower: of a Hermitian or symmetric a, read the lower triangle; otherwise the upper one. The
        other triangle may hold anything.
      overwrite_a, overwrite_b, debug, check_finite: without effect, as in `jax.scipy.linalg`.
      assume_a: ``"pos"``: a is Hermitian positive definite; one kernel factors and substitutes, and
        never writes the factor. ``"gen"``: any matrix, by LU with partial pivoting (JAX's own).
        ``"her"``, ``"sym"``: a is Hermitian, or symmetric (of complex numbers too); the matrix that
        its triangle stands for, by the same LU.
      accuracy: of ``"pos"``, as in `cholesky`.
      return_info: also return ``info``.

    Returns:
      x, of b's shape with the broadcast batch dimensions. With return_info, a pair of it and
      ``info``, int32 with the broadcast batch dimensions: 0, or with ``"pos"`` the number k (from
      1) of the first column whose pivot is not positive, otherwise that of the first pivot that
      is zero. x of a matrix that is not positive definite is NaN; no other is affected.

    Raises:
      TypeError: an operand is no array or has another dtype; a flag is not True or False.
      ValueError: shapes do not fit, or an option is another word.

    With ``"pos"`` the derivative reuses the factor: value and gradient cost one factorization.
    Derivatives are zero in a triangle that is not read.

    Algorithm: see `cholesky`.
    """
    del overwrite_a, overwrite_b, debug, check_finite
    _checks.option("solve", "assume_a", assume_a, ("gen", "pos", "her", "sym"))
    _checks.option("solve", "accuracy", accuracy, _checks.ACCURACIES)
    lower = _checks.flag("solve", "lower", lower)
    (matrix, rhs), dtype = _checks.operands("solve", keep_stored=assume_a == "pos", a=a, b=b)
    _checks.square("solve", "a", matrix)
    columns = _checks.right_hand_side("solve", matrix, rhs)
    if assume_a == "pos":
        x, info = solve_pos_op(matrix, columns, lower=lower, accuracy=accuracy)
    else:
        if assume_a == "her":
            matrix = hermitian_from_triangle(matrix, upper=not lower)
        elif assume_a == "sym":
            matrix = symmetric_from_triangle(matrix, upper=not lower)
        x, info = solve_general(matrix, columns)
    x = _checks.drop_column(x, rhs).astype(dtype)
    return (x, info) if _checks.flag("solve", "return_info", return_info) else x


def solve_general(a: Array, b: Array) -> tuple[Array, Array]:
    """JAX's LU, one factorization for all right-hand sides of a matrix."""
    lu, _, permutation = jax.lax.linalg.lu(a)
    pivots = jnp.diagonal(lu, axis1=-2, axis2=-1)
    singular = pivots == 0
    info = jnp.where(singular.any(-1), jnp.argmax(singular, -1) + 1, 0) if a.shape[-1] else 0
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    n, nrhs = b.shape[-2:]
    full = jnp.broadcast_to(b, (*batch, n, nrhs))
    order = jnp.broadcast_to(permutation, (*batch, n))[..., None]
    permuted = jnp.take_along_axis(full, order, axis=-2)
    factors = jnp.broadcast_to(lu, (*batch, n, n))
    y = jax.lax.linalg.triangular_solve(
        factors, permuted, left_side=True, lower=True, unit_diagonal=True
    )
    x = jax.lax.linalg.triangular_solve(factors, y, left_side=True, lower=False)
    return x, jnp.broadcast_to(jnp.asarray(info, jnp.int32), batch)


def _in_float32(*operands: Any) -> tuple[Any, ...]:
    """float16 and bfloat16, or None, as they are computed with."""
    return tuple(None if x is None else x.astype(jnp.float32) for x in operands)


def _factor_and_solve(
    a: Array, b: Array, *, lower: bool, accuracy: str
) -> tuple[Array, Array, Array]:
    factor, info = cholesky_op(a, upper=not lower, symmetrize=False, accuracy=accuracy)
    (x,) = cho_solve_op(factor, b, lower=lower)
    return factor, x, info


def _composed(a: Array, b: Array, *, lower: bool, accuracy: str) -> Sequence[Array]:
    if _checks.is_stored(a.dtype):
        wide = solve_pos_op(*_in_float32(a, b), lower=lower, accuracy=accuracy)
        return wide[0].astype(b.dtype), wide[1]
    _, x, info = _factor_and_solve(a, b, lower=lower, accuracy=accuracy)
    return x, jnp.broadcast_to(info, x.shape[:-2])


def _jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """a dx = db - da x, with the factor that gave x: one factorization for both."""
    (a, b), (da, db) = primals, tangents
    if _checks.is_stored(a.dtype):
        (x, info), (dx, _) = _jvp(params, _in_float32(a, b), _in_float32(da, db))
        return (x.astype(b.dtype), info), (dx.astype(b.dtype), None)
    factor, x, info = _factor_and_solve(a, b, **params)
    rhs = db
    if da is not None:
        product = matmul(hermitian_from_triangle(da, upper=not params["lower"]), x)
        rhs = -product if db is None else db - product
    (dx,) = cho_solve_op(factor, rhs, lower=params["lower"])
    return (x, jnp.broadcast_to(info, x.shape[:-2])), (dx, None)


def _transpose(params: Params, primals: tuple[Any, ...], cotangents: tuple[Any, ...]) -> Any:
    """a is Hermitian: the transpose of b -> a^-1 b is conj(a)^-1."""
    (a, _), (ct, _) = primals, cotangents
    if ct is None:
        return None
    x, _ = solve_pos_op(a, jnp.conj(ct), **params)
    return jnp.conj(x)


def _lax(a: Array, b: Array, *, lower: bool, accuracy: str) -> Sequence[Array]:
    if _checks.is_stored(a.dtype):
        wide, info = _lax(*_in_float32(a, b), lower=lower, accuracy=accuracy)
        return wide.astype(b.dtype), info
    factor, info = cholesky_op.rules.lax(a, upper=not lower, symmetrize=False, accuracy=accuracy)
    (x,) = cho_solve_op.rules.lax(factor, b, lower=lower)
    return x, info


solve_pos_op = Operation(
    "solve_pos",
    Rules(
        signature=lambda params: "(n,n),(n,k)->(n,k),()",
        lax=_lax,
        jvp=_jvp,
        transpose=_transpose,
        fused=lambda platform, a, b: _ffi.is_fused(platform, a.shape[-1], b.shape[-1], a.dtype),
        composed=_composed,
        result_dtypes=(None, jnp.int32),
    ),
)
