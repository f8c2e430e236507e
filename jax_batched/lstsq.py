"""Linear least squares."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_batched import _checks
from jax_batched._core import Operation, Params, Rules, lax, mask
from jax_batched._core.rules import hermitian_transpose, minus
from jax_batched._core.signature import at_least
from jax_batched._matrix import adjoint, matmul, real_dtype, resized, spoilt
from jax_batched._sizes import Sizes, leading, like
from jax_batched.cho_solve import cho_solve_op
from jax_batched.cholesky import cholesky_op
from jax_batched.lu import bad_pivot
from jax_batched.pinv import apply_by_svd, rank_of, svd_factors_of
from jax_batched.qr import has_many_rows, qr_multiply_op, qr_op
from jax_batched.triangular_solve import triangular_solve_op

Array = jax.Array


class LstsqResult(NamedTuple):
    """A solution `x`, its `residuals`, the `rank` and `info`, as `lstsq` says."""

    x: Array
    residuals: Array
    rank: Array
    info: Array


jax.export.register_namedtuple_serialization(LstsqResult, serialized_name="jax_batched.LstsqResult")


def lstsq(
    a: ArrayLike,
    b: ArrayLike,
    *,
    method: str = "qr",
    rcond: float | None = None,
    where: ArrayLike | None = None,
    sizes: Sequence[ArrayLike | None] | None = None,
) -> LstsqResult:
    """Least squares solution of ``a x = b`` for each matrix of a batch.

    Args:
      a: matrices of shape ``(..., m, n)``; float32, float64, complex64 or complex128. With m >= n
        the x with the smallest ``||b - a x||``; otherwise the smallest x with ``a x = b``.
      b: right-hand sides of shape ``(..., m, k)``, or one vector ``(m,)``. Batch dimensions
        broadcast.
      method: ``"qr"``: Householder QR of a, or of its conjugate transpose; Q is formed of more
        than 512 rows alone.
        ``"cholesky"``, for m >= n: the normal equations and one step of refinement, products with a
        for the most part. Where their condition is too large for as good a solution, that matrix is
        solved by QR. On the CPU ``"qr"`` was faster at all sizes measured, up to 256 x 16.
        ``"svd"``: for matrices without full rank, too, of which x is the smallest of all solutions.
      rcond: of ``"svd"``: singular values up to rcond times the largest one count as zero;
        max(m, n) eps if None.
      where: bool, of a shape that broadcasts to the batch dimensions. Where it is False the results
        are zero but for ``info``, -1, and a and b count for nothing.
      sizes: a pair ``(m, n)`` as in `qr`: of each matrix its own m and n, wide or tall, and m rows
        of its right-hand sides. Beyond n, x is zero. Where a size is negative or too large,
        ``info`` is -3. ``"cholesky"`` is served as ``"qr"``.

    Returns:
      ``(x, residuals, rank, info)``; x has shape ``(..., n, k)`` (``(..., n)`` if b is a vector);
      the residuals ``||b - a x||^2`` are real, of shape ``(..., k)`` (``(...)``); rank and info,
      int32 of shape ``(...)``, are the number of diagonal entries of R above max(m, n) eps times
      the largest one, and 0 or the number k (from 1) of the first one that is zero or not finite.
      x of a matrix whose info is not 0 is NaN; no other is affected. Where info is 0 and the rank
      is below min(m, n), x has no correct digits. With ``"svd"`` the rank is the number of singular
      values that count, and info is 0, or min(m, n) where a has NaN or inf.

    Raises:
      TypeError: an operand is no array or has another dtype; where is not bool, sizes are no pair
        of integers.
      ValueError: shapes do not fit, or method is another word.

    The derivative reuses R, or the singular value decomposition, and is NaN where x is. With
    ``"svd"`` it is that of matrices of constant rank.

    Algorithm: Golub, "Numerical methods for solving linear least squares problems" (1965);
    derivative after Golub and Pereyra, "The differentiation of pseudo-inverses and nonlinear least
    squares problems whose variables separate" (1973).
    """
    _checks.option("lstsq", "method", method, ("qr", "cholesky", "svd"))
    (matrix, rhs), dtype = _checks.operands("lstsq", a=a, b=b)
    _checks.matrix("lstsq", "a", matrix)
    m, n = matrix.shape[-2:]
    columns = _checks.right_hand_side("lstsq", matrix, rhs, size=m)
    tall = at_least(n, m)
    if method == "cholesky" and not tall:
        raise ValueError(
            f'lstsq: method="cholesky" takes at least as many rows as columns, got {matrix.shape}'
        )
    batch = _checks.batch_of(matrix, columns)
    wanted = _checks.mask("lstsq", where, batch)
    if wanted is not None:
        wanted = jnp.broadcast_to(wanted, batch)
        columns = _kept(jnp.broadcast_to(columns, (*batch, *columns.shape[-2:])), wanted, 2)
        matrix = matrix.reshape(*[1] * (columns.ndim - matrix.ndim), *matrix.shape)
    parts = Sizes.of_shapes("lstsq", sizes, (m, n), batch, where=wanted)
    rows, _, ranks = parts
    matrix = leading(matrix, *parts[:2])
    columns = rows.within(columns, -2)
    with mask.only(wanted):
        if 0 in (m, n):
            x = jnp.zeros((*batch, n, columns.shape[-1]), matrix.dtype)
            rank = info = jnp.zeros(batch, jnp.int32)
        elif method == "svd":
            x, rank, info = _by_svd(matrix, columns, rcond, *parts)
        elif sizes is not None:
            x, rank, info = _by_qr_of_parts(matrix, columns, *parts)
        elif method == "cholesky":
            x, rank, info = normal_equations_op(matrix, columns)
        else:
            x, rank, info = _by_qr(matrix, columns)
    x = parts[1].within(x, -2)
    x, squares, rank, info = _described(matrix, columns, x, rank, info, wanted)
    info = ranks.info(info, 3)
    return LstsqResult(
        _checks.drop_column(x, rhs).astype(dtype),
        (squares[..., 0] if rhs.ndim == 1 else squares).astype(real_dtype(dtype)),
        rank,
        info,
    )


# What is none of this library's operations is compiled, so that no constant is moved to the device.
_kept = jax.jit(mask.kept, static_argnums=2)
_bad_pivot = jax.jit(bad_pivot)
_spoilt = jax.jit(lambda x, info: spoilt(x, (info > 0)[..., None, None]))


@jax.jit
def _described(
    a: Array, b: Array, x: Array, rank: Array, info: Array, wanted: Array | None
) -> tuple[Array, Array, Array, Array]:
    """x, the squares of residuals, rank and info of each entry of the batch."""
    residual = b - matmul(a, x)
    rank, info = (jnp.broadcast_to(y, x.shape[:-2]) for y in (rank, info))
    if wanted is not None:
        x, residual = mask.kept(x, wanted, 2), mask.kept(residual, wanted, 2)
        rank, info = mask.kept(rank, wanted, 0), mask.kept(info, wanted, 0, -1)
    return x, jnp.sum(jnp.real(residual * jnp.conj(residual)), axis=-2), rank, info


def _rank(r: Array, size: Array | int) -> Array:
    """The rank, from the diagonal of R and the larger number of rows or columns."""
    diagonal = jnp.abs(jnp.diagonal(r, axis1=-2, axis2=-1))
    relative = jnp.asarray(size, diagonal.dtype) * np.finfo(r.dtype).eps
    largest = jnp.max(diagonal, axis=-1)
    tolerance = (jnp.broadcast_to(relative, largest.shape) * largest)[..., None]
    return jnp.sum(diagonal > tolerance, axis=-1, dtype=jnp.int32)


_rank_of_one_size = jax.jit(_rank, static_argnums=1)


def _by_qr(a: Array, b: Array) -> tuple[Array, Array, Array]:
    m, n = a.shape[-2:]
    tall = at_least(n, m)
    system = a if tall else adjoint(a)
    factors = factors_of(jax.lax.stop_gradient(system))
    x = apply_pseudoinverse(system, factors, b, adjoint=not tall)
    r = factors[_where_r_is(*system.shape[-2:])]
    info = _bad_pivot(r)
    return _spoilt(x, info), _rank_of_one_size(r, max(m, n)), info


def _by_qr_of_parts(
    a: Array, b: Array, rows: Sizes, columns: Sizes, ranks: Sizes
) -> tuple[Array, Array, Array]:
    """Of leading parts, with zeros beyond them: R is continued by the identity.

    A wide part is transposed. Which ones are is not known, so both solutions are computed.
    """
    m, n = a.shape[-2:]
    most, least = max(m, n), min(m, n)
    is_tall = rows.each >= columns.each
    turn = ~like(is_tall, a)[..., None, None]
    system = jnp.where(turn, resized(adjoint(a), most, least), resized(a, most, least))
    factors = list(factors_of(jax.lax.stop_gradient(system)))
    place = _where_r_is(most, least)
    rank = _rank(factors[place], jnp.maximum(rows.each, columns.each))
    beyond = ranks.continued(jnp.zeros_like(factors[place][..., :least, :]))
    factors[place] = factors[place] + resized(beyond, *factors[place].shape[-2:])
    info = _bad_pivot(factors[place])
    solutions = (
        apply_pseudoinverse(system, (factors[0], factors[1]), resized(b, size), adjoint=wide)
        for wide, size in ((False, most), (True, least))
    )
    tall, wide = (resized(x, n) for x in solutions)
    x = jnp.where(like(is_tall, tall)[..., None, None], tall, wide)
    return _spoilt(x, info), rank, info


def _by_svd(
    a: Array, b: Array, rcond: float | None, rows: Sizes, columns: Sizes, ranks: Sizes
) -> tuple[Array, Array, Array]:
    factors = svd_factors_of("lstsq", a, rcond, rows, columns)
    x = apply_by_svd(a, factors, b)
    s = factors[1]
    failed = jnp.isnan(s).any(-1)
    info = jnp.where(failed, like(ranks.each, failed, 0) if ranks else s.shape[-1], 0)
    info = info.astype(jnp.int32)
    return _spoilt(x, info), rank_of(s), info


def factors_of(a: Array) -> tuple[Array, Array]:
    """The reflections of a tall matrix and their factors; Q and R where it has many rows."""
    left, right = qr_op(a, mode="reduced" if has_many_rows(*a.shape[-2:]) else "raw")
    return left, right


def _where_r_is(m: int, n: int) -> int:
    return 1 if has_many_rows(m, n) else 0


def apply_pseudoinverse(
    a: Array, factors: tuple[Array, Array], b: Array, *, adjoint: bool
) -> Array:
    """P b or P^H b, P being the pseudoinverse of a matrix of which the factors are known."""
    op = pseudoinverse_by_q_op if has_many_rows(*a.shape[-2:]) else pseudoinverse_op
    (x,) = op(a, *factors, b, adjoint=adjoint)
    return x


def _solve_triangle(r: Array, b: Array, *, adjoint: bool) -> Array:
    n = r.shape[-1]
    (x,) = triangular_solve_op(
        r[..., :n, :],
        b,
        left_side=True,
        lower=False,
        transpose_a=adjoint,
        conjugate_a=adjoint and jnp.iscomplexobj(b),
        unit_diagonal=False,
    )
    return x


def _apply(
    a: Array, reflections: Array, taus: Array, b: Array, *, adjoint: bool
) -> Sequence[Array]:
    """R^-1 (Q^H b) without its last rows; or Q (R^-H b) with zeros below."""
    m, n = a.shape[-2:]
    if not adjoint:
        (product,) = qr_multiply_op(reflections, taus, b, adjoint=True)
        return (_solve_triangle(reflections, product[..., :n, :], adjoint=False),)
    x = _solve_triangle(reflections, b, adjoint=True)
    x = jnp.concatenate([x, jnp.zeros((*x.shape[:-2], m - n, x.shape[-1]), x.dtype)], axis=-2)
    return qr_multiply_op(reflections, taus, x, adjoint=False)


_adjoint = adjoint  # where an argument has its name


def _apply_by_q(a: Array, q: Array, r: Array, b: Array, *, adjoint: bool) -> Sequence[Array]:
    """R^-1 (Q^H b), or Q (R^-H b)."""
    if adjoint:
        return (matmul(q, _solve_triangle(r, b, adjoint=True)),)
    return (_solve_triangle(r, matmul(_adjoint(q), b), adjoint=False),)


def _apply_jvp(
    op: Callable[[], Operation],
    params: Params,
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> tuple[Sequence[Any], Sequence[Any]]:
    """With P the pseudoinverse of a, P P^H = (a^H a)^-1:

    x = P b: dx = P (db - da x) + P P^H da^H (b - a x);
    x = P^H b: dx = P^H (db - da^H x) + (I - a P) da P x.
    """
    (a, *factors, b), (da, *_, db) = primals, tangents
    (x,) = op()(a, *factors, b, **params)

    def apply(b: Array, adjoint: bool) -> Array:
        (x,) = op()(a, *factors, b, adjoint=adjoint)
        return x

    if da is None:
        return (x,), (None if db is None else apply(db, params["adjoint"]),)
    if not params["adjoint"]:
        rest = matmul(adjoint(da), b - matmul(a, x))
        dx = apply(minus(db, matmul(da, x)), False) + apply(apply(rest, True), False)
        return (x,), (dx,)
    moved = matmul(da, apply(x, False))
    dx = apply(minus(db, matmul(adjoint(da), x)), True)
    return (x,), (dx + moved - matmul(a, apply(moved, False)),)


# a, m x n with m >= n, its reflections and their factors, b -> P b, or with `adjoint` P^H b, P the
# pseudoinverse. The factors are a means, and have no derivative here: the matrix itself has one.
pseudoinverse_op: Operation = Operation(
    "pseudoinverse",
    Rules(
        signature=lambda params: (
            "(m,n),(m,n),(n),(n,k)->(m,k)" if params["adjoint"] else "(m,n),(m,n),(n),(m,k)->(n,k)"
        ),
        paths=(lax(_apply, broadcasts=True),),
        jvp=functools.partial(_apply_jvp, lambda: pseudoinverse_op),
        transpose=hermitian_transpose(lambda: pseudoinverse_op, flag="adjoint"),
    ),
)
# The same by Q and R.
pseudoinverse_by_q_op: Operation = Operation(
    "pseudoinverse_by_q",
    Rules(
        signature=lambda params: (
            "(m,n),(m,n),(n,n),(n,k)->(m,k)"
            if params["adjoint"]
            else "(m,n),(m,n),(n,n),(m,k)->(n,k)"
        ),
        paths=(lax(_apply_by_q, broadcasts=True),),
        jvp=functools.partial(_apply_jvp, lambda: pseudoinverse_by_q_op),
        transpose=hermitian_transpose(lambda: pseudoinverse_by_q_op, flag="adjoint"),
    ),
)


def _normal_equations(a: Array, b: Array) -> Sequence[Array]:
    """x from a^H a, refined once; by QR where that does not converge fast enough.

    With a condition c an error is multiplied by r = c^2 eps in a step, which leaves r^2 of x. QR
    leaves c eps, which is more if r < eps^(1/3).
    """
    n = a.shape[-1]
    form = np.finfo(a.dtype)
    # Powers of two that bring the columns to the same size: they change no digit of x.
    exponent = jnp.frexp(jnp.max(jnp.abs(a), axis=-2, keepdims=True))[1]
    d = jnp.exp2(-jnp.clip(exponent, form.minexp + 2, form.maxexp - 2).astype(form.dtype))
    scaled = a * d.astype(a.dtype)
    factor, failed = cholesky_op(
        matmul(adjoint(scaled), scaled), upper=False, symmetrize=False, accuracy="ieee"
    )

    def solve(b: Array) -> Array:
        (x,) = cho_solve_op(factor, matmul(adjoint(scaled), b), lower=True)
        return x

    x = solve(b)
    step = solve(b - matmul(scaled, x))
    limit = 0.5 * float(form.eps) ** (1 / 3)
    converges = jnp.linalg.norm(step, axis=-2) <= limit * jnp.linalg.norm(x, axis=-2)
    diagonal = jnp.real(jnp.diagonal(factor, axis1=-2, axis2=-1))
    well = jnp.min(diagonal, axis=-1) > limit * jnp.max(diagonal, axis=-1)
    good = (failed == 0) & well & converges.all(-1)
    x = (x + step) * jnp.swapaxes(d, -1, -2).astype(a.dtype)
    rank, info = jnp.full(good.shape, n, jnp.int32), jnp.zeros(good.shape, jnp.int32)

    def rescued() -> tuple[Array, Array, Array]:
        others = _by_qr(a, b)
        return (
            jnp.where(good[..., None, None], x, others[0]),
            jnp.where(good, rank, others[1]),
            jnp.where(good, info, others[2]),
        )

    results: Sequence[Array] = jax.lax.cond(good.all(), lambda: (x, rank, info), rescued)
    return results


def _normal_equations_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """That of the same function by QR."""
    del params
    if all(t is None for t in tangents):
        return normal_equations_op(*primals), (None, None, None)
    given = [jnp.zeros_like(x) if t is None else t for x, t in zip(primals, tangents, strict=True)]
    _, (dx,) = jax.jvp(lambda a, b: _by_qr(a, b)[:1], primals, tuple(given))
    return normal_equations_op(*primals), (dx, None, None)


normal_equations_op = Operation(
    "normal_equations",
    Rules(
        signature=lambda params: "(m,n),(m,k)->(n,k),(),()",
        paths=(lax(_normal_equations),),
        jvp=_normal_equations_jvp,
        result_dtypes=(None, jnp.int32, jnp.int32),
    ),
)
