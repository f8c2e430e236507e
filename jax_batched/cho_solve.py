"""Solving with a Cholesky factor."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike

from jax_batched import _checks, blocked
from jax_batched._core import Operation, Params, Rules, kernel, lax
from jax_batched._core.rules import hermitian_transpose, minus
from jax_batched._matrix import adjoint, matmul, triangle
from jax_batched._sized import sized
from jax_batched._sizes import Sizes
from jax_batched.cholesky import factorization
from jax_batched.triangular_solve import triangular_solve_op

Array = jax.Array


def cho_factor(
    a: ArrayLike,
    lower: bool = False,
    overwrite_a: bool = False,
    check_finite: bool = True,
    *,
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
) -> tuple[Array, bool]:
    """Cholesky factor of each matrix of a batch, for use by `cho_solve`.

    The signature and defaults of `jax.scipy.linalg.cho_factor`.

    Args:
      a: Hermitian positive definite matrices of shape ``(..., n, n)``, dtypes as in `cholesky`.
        Only one triangle is read.
      lower: read a's lower triangle and return L with ``a = L L^H``; otherwise the upper one and U
        with ``a = U^H U``.
      overwrite_a: as in `cholesky`.
      check_finite: without effect, as in `jax.scipy.linalg`.
      where, sizes: as in `cholesky`.

    Returns:
      ``(c, lower)``, the factor, with zeros in the other triangle, and `lower`. The factor of a
      matrix that is not positive definite is NaN (see `cholesky` for `info`).

    Raises:
      TypeError: a is no array or has another dtype; lower is not True or False.
      ValueError: a is not a batch of square matrices.
    """
    del check_finite
    lower = _checks.flag("cho_factor", "lower", lower)
    (matrix,), dtype = _checks.operands("cho_factor", a=a)
    _checks.square("cho_factor", "a", matrix)
    wanted = _checks.mask("cho_factor", where, matrix.shape[:-2])
    parts = Sizes("cho_factor", sizes, matrix.shape[-1], matrix.shape[:-2], where=wanted)
    factor, _ = factorization(
        parts,
        matrix,
        upper=not lower,
        symmetrize=False,
        accuracy="ieee",
        where=wanted,
        overwrite=_checks.flag("cho_factor", "overwrite_a", overwrite_a),
    )
    return factor.astype(dtype), lower


def cho_solve(
    c_and_lower: tuple[ArrayLike, bool],
    b: ArrayLike,
    overwrite_b: bool = False,
    check_finite: bool = True,
    *,
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
) -> Array:
    """Solves ``a x = b`` given the Cholesky factor of each matrix of a batch.

    The signature and defaults of `jax.scipy.linalg.cho_solve`. Both substitutions are one kernel
    that reads the factor once.

    Args:
      c_and_lower: ``(c, lower)`` as `cho_factor` returns it: factors of shape ``(..., n, n)``; only
        the triangle that `lower` names is read.
      b: right-hand sides of shape ``(..., n, k)``, or one vector ``(n,)``. Batch dimensions
        broadcast; a shared factor is never copied.
      overwrite_b: as in `triangular_solve`.
      check_finite: without effect, as in `jax.scipy.linalg`.
      where, sizes: as in `triangular_solve`.

    Returns:
      x, of b's shape with the broadcast batch dimensions.

    Raises:
      TypeError: c_and_lower is no pair; an operand is no array or has another dtype; lower is not
        True or False.
      ValueError: shapes do not fit.
    """
    del check_finite
    if not isinstance(c_and_lower, tuple | list) or len(c_and_lower) != 2:
        raise TypeError(
            "cho_solve: c_and_lower must be a pair (c, lower) as cho_factor returns it, got "
            f"{_checks.described(c_and_lower)}"
        )
    c, lower = c_and_lower
    lower = _checks.flag("cho_solve", "lower in the pair (c, lower)", lower)
    (factor, rhs), dtype = _checks.operands("cho_solve", c=c, b=b)
    _checks.square("cho_solve", "c", factor)
    columns = _checks.right_hand_side("cho_solve", factor, rhs, names=("c", "b"))
    overwrite = _checks.flag("cho_solve", "overwrite_b", overwrite_b)
    batch = _checks.batch_of(factor, columns)
    wanted = _checks.mask("cho_solve", where, batch)
    parts = Sizes("cho_solve", sizes, factor.shape[-1], batch, where=wanted)
    (x,) = _solution(parts, factor, columns, lower=lower, where=wanted, overwrite=overwrite)
    return _checks.drop_column(x, rhs).astype(dtype)


def _jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """a dx = db - da x, with da = dL L^H + L dL^H (or dU^H U + U^H dU)."""
    (c, b), (dc, db) = primals, tangents
    (x,) = cho_solve_op(c, b, **params)
    rhs = db
    if dc is not None:
        upper = not params["lower"]
        factor, dfactor = triangle(c, upper=upper), triangle(dc, upper=upper)
        if upper:
            factor, dfactor = adjoint(factor), adjoint(dfactor)
        product = matmul(dfactor, matmul(adjoint(factor), x)) + matmul(
            factor, matmul(adjoint(dfactor), x)
        )
        rhs = minus(db, product)
    (dx,) = cho_solve_op(c, rhs, **params)
    return (x,), (dx,)


def _both(
    solve: Callable[..., Sequence[Array]], c: Array, b: Array, *, lower: bool
) -> Sequence[Array]:
    flags = {"left_side": True, "lower": lower, "unit_diagonal": False}
    first = {"transpose_a": not lower, "conjugate_a": not lower}
    second = {"transpose_a": lower, "conjugate_a": lower}
    (y,) = solve(c, b, **flags, **first)
    return solve(c, y, **flags, **second)


_substitutions = functools.partial(_both, triangular_solve_op)
_lax = functools.partial(_both, triangular_solve_op.rules.lax)


cho_solve_op: Operation = Operation(
    "cho_solve",
    Rules(
        signature=lambda params: "(n,n),(n,k)->(n,k)",
        paths=(
            kernel(),
            *blocked.composed_paths("triangular_solve", _substitutions),
            lax(_lax),
        ),
        jvp=_jvp,
        transpose=hermitian_transpose(lambda: cho_solve_op),
    ),
)
_solution = sized(cho_solve_op)
