"""Solving linear systems in one call."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_batched import _checks, blocked
from jax_batched._core import Operation, Params, Rules, composed, kernel, lax
from jax_batched._core.rules import hermitian_transpose, minus
from jax_batched._matrix import hermitian_from_triangle, matmul, symmetric_from_triangle
from jax_batched._sized import sized
from jax_batched._sizes import Sizes
from jax_batched.cho_solve import cho_solve_op
from jax_batched.cholesky import cholesky_op
from jax_batched.lu import lu_op, solve_with_factors

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
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
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
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
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
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
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
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
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
      overwrite_b: as in `triangular_solve`.
      overwrite_a, debug, check_finite: without effect, as in `jax.scipy.linalg`.
      assume_a: ``"pos"``: a is Hermitian positive definite; one kernel factors and substitutes, and
        never writes the factor. ``"gen"``: any matrix, by LU with partial pivoting; where it is a
        kernel, the factors are not written either.
        ``"her"``, ``"sym"``: a is Hermitian, or symmetric (of complex numbers too); the matrix that
        its triangle stands for, by the same LU.
      accuracy: of ``"pos"``, as in `cholesky`.
      where: as in `triangular_solve`; ``info`` is -1 where it is False.
      sizes: as in `triangular_solve`; ``info`` is -3 where a size is negative or too large.
      return_info: also return ``info``.

    Returns:
      x, of b's shape with the broadcast batch dimensions. With return_info, a pair of it and
      ``info``, int32 with the broadcast batch dimensions: 0, or with ``"pos"`` the number k (from
      1) of the first column whose pivot is not positive, otherwise that of the first pivot that
      is zero, or not finite because U leaves the range of the dtype. x of such a matrix is NaN; no
      other is affected.

    Raises:
      TypeError: an operand is no array or has another dtype; a flag is not True or False; where is
        not bool, sizes are no integers.
      ValueError: shapes do not fit, or an option is another word.

    The derivative reuses the factor: value and gradient cost one factorization. Derivatives are
    zero in a triangle that is not read.

    Algorithm: see `cholesky`.
    """
    del debug, check_finite
    _checks.flag("solve", "overwrite_a", overwrite_a)
    _checks.option("solve", "assume_a", assume_a, ("gen", "pos", "her", "sym"))
    _checks.option("solve", "accuracy", accuracy, _checks.ACCURACIES)
    lower = _checks.flag("solve", "lower", lower)
    (matrix, rhs), dtype = _checks.operands("solve", keep_stored=assume_a == "pos", a=a, b=b)
    _checks.square("solve", "a", matrix)
    columns = _checks.right_hand_side("solve", matrix, rhs)
    batch = _checks.batch_of(matrix, columns)
    wanted = _checks.mask("solve", where, batch)
    parts = Sizes("solve", sizes, matrix.shape[-1], batch, where=wanted)
    accuracy = accuracy if sizes is None else "ieee"  # as in cholesky()
    which: dict[str, Any] = {
        "where": wanted,
        "overwrite": _checks.flag("solve", "overwrite_b", overwrite_b),
    }
    if assume_a == "pos":
        x, info = _solution(parts, matrix, columns, lower=lower, accuracy=accuracy, **which)
    else:
        if assume_a == "her":
            matrix = hermitian_from_triangle(parts.continued(matrix), upper=not lower)
        elif assume_a == "sym":
            matrix = symmetric_from_triangle(parts.continued(matrix), upper=not lower)
        x, info = _general_solution(parts, matrix, columns, **which)
    info = parts.info(info, 3)
    x = _checks.drop_column(x, rhs).astype(dtype)
    return (x, info) if _checks.flag("solve", "return_info", return_info) else x


def _factor_and_solve(
    a: Array, b: Array, *, lower: bool, accuracy: str
) -> tuple[Array, Array, Array]:
    factor, info = cholesky_op(a, upper=not lower, symmetrize=False, accuracy=accuracy)
    (x,) = cho_solve_op(factor, b, lower=lower)
    return factor, x, info


def _composed(a: Array, b: Array, *, lower: bool, accuracy: str) -> Sequence[Array]:
    _, x, info = _factor_and_solve(a, b, lower=lower, accuracy=accuracy)
    return x, jnp.broadcast_to(info, x.shape[:-2])


def _jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """a dx = db - da x, with the factor that gave x: one factorization for both."""
    (a, b), (da, db) = primals, tangents
    factor, x, info = _factor_and_solve(a, b, **params)
    rhs = db
    if da is not None:
        rhs = minus(db, matmul(hermitian_from_triangle(da, upper=not params["lower"]), x))
    (dx,) = cho_solve_op(factor, rhs, lower=params["lower"])
    return (x, jnp.broadcast_to(info, x.shape[:-2])), (dx, None)


def _lax(a: Array, b: Array, *, lower: bool, accuracy: str) -> Sequence[Array]:
    factor, info = cholesky_op.rules.lax(a, upper=not lower, symmetrize=False, accuracy=accuracy)
    (x,) = cho_solve_op.rules.lax(factor, b, lower=lower)
    return x, info


solve_pos_op: Operation = Operation(
    "solve_pos",
    Rules(
        signature=lambda params: "(n,n),(n,k)->(n,k),()",
        paths=(
            kernel(),
            composed(_composed),
            *blocked.composed_paths("cholesky", _composed),
            lax(_lax),
        ),
        jvp=_jvp,
        transpose=hermitian_transpose(lambda: solve_pos_op),
        result_dtypes=(None, jnp.int32),
        stored=True,
    ),
)


def _factor_and_solve_general(a: Array, b: Array) -> tuple[Sequence[Array], Array, Array]:
    results = lu_op(jax.lax.stop_gradient(a))
    x = solve_with_factors(a, results, b)
    return results, x, jnp.broadcast_to(results[-1], x.shape[:-2])


def _general_by_lu(a: Array, b: Array) -> Sequence[Array]:
    """One factorization for all right-hand sides of a matrix."""
    return _factor_and_solve_general(a, b)[1:]


def _general_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """a dx = db - da x, with the factors that gave x."""
    del params
    (a, b), (da, db) = primals, tangents
    results, x, info = _factor_and_solve_general(a, b)
    rhs = db if da is None else minus(db, matmul(da, x))
    return (x, info), (solve_with_factors(a, results, rhs), None)


def _general_transpose(
    params: Params, primals: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> Sequence[Any]:
    a, ct = primals[0], cotangents[0]
    return (None if ct is None else solve_gen_op(jnp.swapaxes(a, -1, -2), ct, **params)[0],)


solve_gen_op: Operation = Operation(
    "solve_gen",
    Rules(
        signature=lambda params: "(n,n),(n,k)->(n,k),()",
        paths=(kernel(), composed(_general_by_lu), lax(_general_by_lu, broadcasts=True)),
        jvp=_general_jvp,
        transpose=_general_transpose,
        result_dtypes=(None, jnp.int32),
    ),
)
_solution, _general_solution = sized(solve_pos_op), sized(solve_gen_op)
