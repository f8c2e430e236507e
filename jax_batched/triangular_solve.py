"""Batched triangular solves."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_batched import _checks, _lapack, blocked
from jax_batched._core import Operation, Params, Rules, kernel, lax
from jax_batched._core.rules import minus
from jax_batched._matrix import matmul, triangle
from jax_batched._sized import sized
from jax_batched._sizes import Sizes

Array = jax.Array


def triangular_solve(
    a: ArrayLike,
    b: ArrayLike,
    *,
    left_side: bool = False,
    lower: bool = False,
    transpose_a: bool = False,
    conjugate_a: bool = False,
    unit_diagonal: bool = False,
    overwrite_b: bool = False,
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
) -> Array:
    """Solves ``op(a) x = b`` or ``x op(a) = b`` for each triangular matrix of a batch.

    The signature and defaults of `jax.lax.linalg.triangular_solve`.

    Args:
      a: matrices of shape ``(..., n, n)``; float32, float64, complex64 or complex128, or
        float16 and bfloat16, which are computed in float32. Only one triangle is read.
      b: right-hand sides of shape ``(..., n, k)`` if left_side, else ``(..., k, n)``, or one vector
        ``(n,)``. Batch dimensions broadcast; a shared a is never copied.
      left_side: solve ``op(a) x = b``; otherwise ``x op(a) = b``.
      lower: a's lower triangle is used; otherwise its upper one.
      transpose_a: op transposes a.
      conjugate_a: op conjugates a (with or without transpose_a).
      unit_diagonal: a's diagonal is taken as ones and not read.
      overwrite_b: x may take b's memory. Inside `jax.jit`, with a donated b or one that
        nothing else needs, no fresh memory is touched; otherwise XLA copies b first.
      where: bool, of a shape that broadcasts to the batch dimensions of x. Where it is False x is
        zero, and a and b count for nothing.
      sizes: as in `cholesky`, with the batch dimensions of x; what b has beyond a size counts for
        nothing. Where a size is negative or too large, x is NaN.

    Returns:
      x, of b's shape with the broadcast batch dimensions. A zero on the diagonal gives inf or NaN
      in its own system only.

    Raises:
      TypeError: an operand is no array or has another dtype; a flag is not True or False;
        where is not bool, sizes are no integers.
      ValueError: shapes do not fit.

    Derivatives are zero in the triangle that is not read, and on a unit diagonal.
    """
    left_side = _checks.flag("triangular_solve", "left_side", left_side)
    conjugate_a = _checks.flag("triangular_solve", "conjugate_a", conjugate_a)
    (matrix, rhs), dtype = _checks.operands("triangular_solve", a=a, b=b)
    _checks.square("triangular_solve", "a", matrix)
    columns = _checks.right_hand_side("triangular_solve", matrix, rhs, left_side=left_side)
    batch = _checks.batch_of(matrix, columns)
    wanted = _checks.mask("triangular_solve", where, batch)
    parts = Sizes("triangular_solve", sizes, matrix.shape[-1], batch, where=wanted)
    (x,) = substitution(
        parts,
        matrix,
        columns,
        left_side=left_side,
        lower=_checks.flag("triangular_solve", "lower", lower),
        transpose_a=_checks.flag("triangular_solve", "transpose_a", transpose_a),
        conjugate_a=conjugate_a and jnp.iscomplexobj(matrix),
        unit_diagonal=_checks.flag("triangular_solve", "unit_diagonal", unit_diagonal),
        where=wanted,
        overwrite=_checks.flag("triangular_solve", "overwrite_b", overwrite_b),
    )
    return _checks.drop_column(x, rhs, left_side=left_side).astype(dtype)


def solve_triangular(
    a: ArrayLike,
    b: ArrayLike,
    trans: int | str = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    overwrite_b: bool = False,
    debug: Any = None,
    check_finite: bool = True,
    *,
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
) -> Array:
    """Solves ``op(a) x = b`` for each triangular matrix of a batch.

    The signature and defaults of `jax.scipy.linalg.solve_triangular`.

    Args:
      a: matrices of shape ``(..., n, n)``, dtypes as in `triangular_solve`.
      b: right-hand sides of shape ``(..., n, k)``, or one vector ``(n,)``.
      trans: op is 0 or ``"N"``: a; 1 or ``"T"``: its transpose; 2 or ``"C"``: its conjugate
        transpose.
      lower: a's lower triangle is used; otherwise its upper one.
      unit_diagonal: a's diagonal is taken as ones and not read.
      overwrite_b: as in `triangular_solve`.
      debug, check_finite: without effect, as in `jax.scipy.linalg`.
      where, sizes: as in `triangular_solve`.

    Returns:
      x, of b's shape with the broadcast batch dimensions.

    Raises:
      TypeError: an operand is no array or has another dtype; a flag is not True or False;
        where is not bool, sizes are no integers.
      ValueError: shapes do not fit, or trans is something else.
    """
    del debug, check_finite
    trans = _checks.option("solve_triangular", "trans", trans, (0, 1, 2, "N", "T", "C"))
    (matrix, rhs), dtype = _checks.operands("solve_triangular", a=a, b=b)
    _checks.square("solve_triangular", "a", matrix)
    columns = _checks.right_hand_side("solve_triangular", matrix, rhs)
    batch = _checks.batch_of(matrix, columns)
    wanted = _checks.mask("solve_triangular", where, batch)
    parts = Sizes("solve_triangular", sizes, matrix.shape[-1], batch, where=wanted)
    (x,) = substitution(
        parts,
        matrix,
        columns,
        left_side=True,
        lower=_checks.flag("solve_triangular", "lower", lower),
        transpose_a=trans not in (0, "N"),
        conjugate_a=trans in (2, "C") and jnp.iscomplexobj(matrix),
        unit_diagonal=_checks.flag("solve_triangular", "unit_diagonal", unit_diagonal),
        where=wanted,
        overwrite=_checks.flag("solve_triangular", "overwrite_b", overwrite_b),
    )
    return _checks.drop_column(x, rhs).astype(dtype)


def _signature(params: Params) -> str:
    return "(n,n),(n,k)->(n,k)" if params["left_side"] else "(n,n),(k,n)->(k,n)"


def _jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """op(a) dx = db - op(da) x, with da masked to what is read."""
    (a, b), (da, db) = primals, tangents
    (x,) = triangular_solve_op(a, b, **params)
    rhs = db
    if da is not None:
        read = triangle(da, upper=not params["lower"], strict=params["unit_diagonal"])
        if params["transpose_a"]:
            read = jnp.swapaxes(read, -1, -2)
        if params["conjugate_a"]:
            read = jnp.conj(read)
        rhs = minus(db, matmul(read, x) if params["left_side"] else matmul(x, read))
    (dx,) = triangular_solve_op(a, rhs, **params)
    return (x,), (dx,)


def _transpose(
    params: Params, primals: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> Sequence[Any]:
    """The transpose of b -> op(a)^-1 b is op(a)^-T."""
    (a, _), (ct,) = primals, cotangents
    if ct is None:
        return (None,)
    return triangular_solve_op(a, ct, **{**params, "transpose_a": not params["transpose_a"]})


def in_blocks(a: Array, b: Array, *, plan: blocked.Plan, **params: Any) -> Sequence[Array]:
    """The solution with matrices that are divided as a plan says."""
    return (blocked.triangular_solve(a, b, plan, triangular_solve_op, **params),)


def _lax(a: Array, b: Array, **params: Any) -> Sequence[Array]:
    return (_lapack.triangular_solve(a, b, **params),)


triangular_solve_op: Operation = Operation(
    "triangular_solve",
    Rules(
        signature=_signature,
        paths=(kernel(), *blocked.paths("triangular_solve", in_blocks), lax(_lax)),
        jvp=_jvp,
        transpose=_transpose,
    ),
)
substitution = sized(triangular_solve_op)
