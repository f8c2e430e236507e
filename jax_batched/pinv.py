"""What singular value decompositions give: pseudoinverses, ranks and polar decompositions."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_batched import _checks
from jax_batched._core import Operation, Params, Rules, lax, mask
from jax_batched._core.rules import hermitian_transpose, minus
from jax_batched._core.signature import at_least
from jax_batched._matrix import adjoint, hermitian_mean, matmul, reciprocals
from jax_batched._sizes import Sizes, leading, like, rounding
from jax_batched.eigh import CLUSTER_TOL
from jax_batched.inv import det_op
from jax_batched.svd import svd_of

Array = jax.Array


def pinv(
    a: ArrayLike,
    rtol: float | None = None,
    *,
    where: ArrayLike | None = None,
    sizes: Sequence[ArrayLike | None] | None = None,
) -> Array:
    """Moore-Penrose pseudoinverse of each matrix of a batch.

    Args:
      a: matrices of shape ``(..., m, n)``; float32, float64, complex64 or complex128.
      rtol: singular values up to rtol times the largest one count as zero; max(m, n) eps if None.
      where: bool, of a shape that broadcasts to the batch dimensions. Where it is False the result
        is zero and a counts for nothing.
      sizes: a pair ``(m, n)`` as in `qr`: how many rows and columns each matrix has, of which rtol
        depends by default. The result is zero beyond its n rows and m columns, and NaN where a size
        is negative or too large.

    Returns:
      The pseudoinverses, of shape ``(..., n, m)`` and a's dtype; NaN of a matrix with NaN or inf,
      alone.

    Raises:
      TypeError: a is no array or has another dtype; where is not bool, sizes are no pair of
        integers.
      ValueError: a is not a batch of matrices, rtol is no number from 0 on, or where or sizes have
        another shape.

    The derivative is that of matrices of constant rank: Golub and Pereyra, "The differentiation of
    pseudo-inverses and nonlinear least squares problems whose variables separate" (1973).
    """
    (matrix,), dtype = _checks.operands("pinv", a=a)
    _checks.matrix("pinv", "a", matrix)
    batch, m = matrix.shape[:-2], matrix.shape[-2]
    wanted = _checks.mask("pinv", where, batch)
    rows, columns, _ = Sizes.of_shapes("pinv", sizes, matrix.shape[-2:], batch, where=wanted)
    matrix = leading(matrix, rows, columns)
    with mask.only(wanted):
        eye = jnp.broadcast_to(jnp.eye(m, dtype=matrix.dtype), (*matrix.shape[:-1], m))
        x = apply_by_svd(matrix, svd_factors_of("pinv", matrix, rtol, rows, columns), eye)
    return leading(x, columns, rows).astype(dtype)


def matrix_rank(
    a: ArrayLike,
    rtol: float | None = None,
    *,
    where: ArrayLike | None = None,
    sizes: Sequence[ArrayLike | None] | None = None,
) -> Array:
    """Number of singular values above rtol times the largest one, of each matrix of a batch.

    Args:
      a, rtol, where, sizes: as in `pinv`. Where where is False the rank is 0.

    Returns:
      int32 of shape ``(...)``; 0 of a matrix with NaN or inf, or with a size out of range.

    Raises:
      TypeError, ValueError: as `pinv`.
    """
    (matrix,), _ = _checks.operands("matrix_rank", a=a)
    _checks.matrix("matrix_rank", "a", matrix)
    batch, shape = matrix.shape[:-2], matrix.shape[-2:]
    wanted = _checks.mask("matrix_rank", where, batch)
    rows, columns, _ = Sizes.of_shapes("matrix_rank", sizes, shape, batch, where=wanted)
    matrix = leading(matrix, rows, columns)
    s, _ = svd_of(jax.lax.stop_gradient(matrix), rows, columns, vectors=False, where=wanted)
    return rank_of(_significant("matrix_rank", s, rtol, shape, rows, columns))


class PolarResult(NamedTuple):
    """The factor `unitary`, and `posdef`, which is positive semidefinite."""

    unitary: Array
    posdef: Array


jax.export.register_namedtuple_serialization(PolarResult, serialized_name="jax_batched.PolarResult")


def polar(
    a: ArrayLike,
    side: str = "right",
    *,
    rotation: bool = False,
    where: ArrayLike | None = None,
    sizes: Sequence[ArrayLike | None] | None = None,
) -> PolarResult:
    """Polar decomposition ``a = u p`` of each matrix of a batch: u is the unitary nearest to it.

    The signature of `jax.scipy.linalg.polar` without its choice of an iteration.

    Args:
      a: matrices of shape ``(..., m, n)``; float32, float64, complex64 or complex128.
      side: ``"right"``: ``a = u p`` with p of shape ``(..., n, n)``; ``"left"``: ``a = p u`` with
        ``(..., m, m)``.
      rotation: of square real matrices, u is the nearest matrix with determinant 1 (Kabsch); p is
        then symmetric, but may have one negative eigenvalue.
      where: as in `pinv`.
      sizes: a pair ``(m, n)`` as in `qr`: how many rows and columns each matrix has. Beyond
        those of the matrix alone the results are zero. Where a size is negative or too large, or
        with rotation m is not n, they are NaN.

    Returns:
      ``(u, p)``; u, of a's shape, has orthonormal columns or, if it is wide, rows; p is Hermitian,
      positive semidefinite.

    Raises:
      TypeError: a is no array or has another dtype, or rotation is asked for of complex ones;
        rotation is not True or False; where is not bool, sizes are no pair of integers.
      ValueError: a is not a batch of matrices, or rotation is asked for of matrices that are not
        square; side is another word; where or sizes have another shape.

    The derivative of u has 1 / (s_i + s_j), and of matrices that are not square 1 / s_i: 0 takes
    the place of what would not be finite. So it is exact at equal singular values.
    """
    (matrix,), dtype = _checks.operands("polar", a=a)
    _checks.matrix("polar", "a", matrix)
    side = _checks.option("polar", "side", side, ("right", "left"))
    if _checks.flag("polar", "rotation", rotation):
        _checks.square("polar", "a", matrix)
        if jnp.iscomplexobj(matrix):
            raise TypeError(f"polar: rotation=True takes real matrices, got {matrix.dtype.name}")
    batch, shape = matrix.shape[:-2], matrix.shape[-2:]
    wanted = _checks.mask("polar", where, batch)
    rows, columns, _ = Sizes.of_shapes(
        "polar", sizes, shape, batch, where=wanted, square=bool(rotation)
    )
    matrix = leading(matrix, rows, columns)
    own = [like(size.each, matrix) for size in (rows, columns) if size]
    (u,) = polar_op(matrix, *own, rotation=bool(rotation), of_parts=bool(rows), where=wanted)
    u = leading(u, rows, columns)
    if wanted is not None:
        matrix = mask.kept(matrix, wanted, 2)
    p = matmul(adjoint(u), matrix) if side == "right" else matmul(matrix, adjoint(u))
    size = columns if side == "right" else rows
    p = leading(hermitian_mean(p), size, size)
    return PolarResult(u.astype(dtype), p.astype(dtype))


def rank_of(significant: Array) -> Array:
    """How many singular values count: the others are zeros."""
    return jnp.sum(significant > 0, axis=-1, dtype=jnp.int32)


def svd_factors_of(
    operation: str, a: Array, rtol: float | None, rows: Sizes, columns: Sizes
) -> tuple[Array, Array, Array]:
    """u, s with zeros for what counts as zero, and vh: a means, without derivatives."""
    s, u, vh, _ = svd_of(jax.lax.stop_gradient(a), rows, columns)
    return u, _significant(operation, s, rtol, a.shape[-2:], rows, columns), vh


def _significant(
    operation: str,
    s: Array,
    rtol: float | None,
    shape: Sequence[Any],
    rows: Sizes,
    columns: Sizes,
) -> Array:
    """Singular values with zeros for those up to rtol times the largest one; NaN stays."""
    if rtol is None:
        relative = rounding(s, shape, rows, columns)
    else:
        relative = _checks.python_value(rtol)
        is_number = isinstance(relative, int | float) and not isinstance(relative, bool)
        if not is_number or not relative >= 0:
            raise ValueError(
                f"{operation}: rtol must be a number from 0 on, known when the program is traced, "
                f"got {_checks.described(rtol)}"
            )
    largest = jnp.max(s, axis=-1, keepdims=True, initial=0)
    return jnp.where(s <= relative * largest, jnp.zeros_like(s), s)


def apply_by_svd(a: Array, factors: tuple[Array, Array, Array], b: Array) -> Array:
    """P b, P being the pseudoinverse of a matrix of which the factors are known."""
    (x,) = pseudoinverse_by_svd_op(a, *factors, b, adjoint=False)
    return x


_adjoint = adjoint  # where an argument has its name


def _apply(a: Array, u: Array, s: Array, vh: Array, b: Array, *, adjoint: bool) -> Sequence[Array]:
    """V (1 / s) U^H b or, of its conjugate transpose, U (1 / s) V^H b; 0 for 1 / 0, NaN stays."""
    del a
    inverse = reciprocals(s, s != 0).astype(b.dtype)[..., :, None]
    if adjoint:
        return (matmul(u, inverse * matmul(vh, b)),)
    return (matmul(_adjoint(vh), inverse * matmul(_adjoint(u), b)),)


def _apply_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """x = P b: dx = P (db - da x) + P P^H da^H (b - a x) + (I - P a) da^H P^H x.

    P^H is the pseudoinverse of a^H: with it in place of P the same holds.
    """
    (a, u, s, vh, b), (da, _, _, _, db) = primals, tangents
    turned = params["adjoint"]

    def apply(b: Array, adjoint: bool) -> Array:
        (x,) = pseudoinverse_by_svd_op(a, u, s, vh, b, **{**params, "adjoint": adjoint})
        return x

    x = apply(b, turned)
    if da is None:
        return (x,), (None if db is None else apply(db, turned),)
    matrix, change = (adjoint(a), adjoint(da)) if turned else (a, da)
    rest = apply(matmul(adjoint(change), minus(b, matmul(matrix, x))), not turned)
    moved = matmul(adjoint(change), apply(x, not turned))
    dx = apply(minus(db, matmul(change, x)) + rest - matmul(matrix, moved), turned) + moved
    return (x,), (dx,)


# a, m x n, its factors u, s and vh, b -> P b, or with `adjoint` P^H b, P the pseudoinverse. The
# factors are a means, and have no derivative here: the matrix itself has one.
pseudoinverse_by_svd_op: Operation = Operation(
    "pseudoinverse_by_svd",
    Rules(
        signature=lambda params: (
            "(m,n),(m,q),(q),(q,n),(n,k)->(m,k)"
            if params["adjoint"]
            else "(m,n),(m,q),(q),(q,n),(m,k)->(n,k)"
        ),
        paths=(lax(_apply, broadcasts=True),),
        jvp=_apply_jvp,
        transpose=hermitian_transpose(lambda: pseudoinverse_by_svd_op, flag="adjoint"),
    ),
)


def _signed_factors(
    a: Array, rows: Sizes, columns: Sizes, rotation: bool
) -> tuple[Array, Array, Array]:
    """u, s and vh with a unitary u vh and, for a rotation, the last s of either sign."""
    s, u, vh, _ = svd_of(a, rows, columns)
    if not rotation:
        return u, s, vh
    (of_u,), (of_vh,) = (det_op(rows.continued(x)) for x in (u, vh))
    size = like(rows.each, s, 1)[..., None] if rows else s.shape[-1]
    last = jnp.broadcast_to(jnp.arange(s.shape[-1]) == size - 1, s.shape)
    sign = jnp.where(last, jax.lax.stop_gradient(jnp.round(of_u * of_vh))[..., None], 1)
    return u * sign[..., None, :], s * sign, vh


def _polar(a: Array, *own: Array, rotation: bool, of_parts: bool) -> Sequence[Array]:
    del of_parts
    rows, columns, _ = Sizes.of_parts(*own)
    u, _, vh = _signed_factors(a, rows, columns, rotation)
    return (matmul(u, vh),)


def _polar_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """With P = U^H da V: U Z V^H with Z_ij = (P - P^H)_ij / (s_i + s_j), and what da has outside of
    the range of U or V, over s."""
    (a, *own), (da, *_) = primals, tangents
    rows, columns, ranks = Sizes.of_parts(*own)
    u, s, vh = _signed_factors(a, rows, columns, params["rotation"])
    x = matmul(u, vh)
    if da is None:
        return (x,), (None,)
    moved, turned = matmul(da, adjoint(vh)), matmul(adjoint(u), da)
    p = matmul(adjoint(u), moved)
    least = CLUSTER_TOL * rounding(s, a.shape[-2:], rows, columns)
    least = least * jnp.max(jnp.abs(s), axis=-1, initial=0)[..., None]
    sums = s[..., :, None] + s[..., None, :]
    inverses = reciprocals(sums, jnp.abs(sums) > least[..., None]).astype(p.dtype)
    dx = matmul(u, matmul((p - adjoint(p)) * inverses, vh))

    def inverse(size: Sizes) -> Array:
        """1 / s of matrices that have more rows, or columns, than singular values."""
        counts = jnp.abs(s) > least
        if ranks:
            counts = counts & like(size.each > ranks.each, s, 1)[..., None]
        return reciprocals(s, counts).astype(p.dtype)

    m, n = a.shape[-2:]
    if ranks or not at_least(m, n):
        dx = dx + matmul((moved - matmul(u, p)) * inverse(rows)[..., None, :], vh)
    if ranks or not at_least(n, m):
        dx = dx + matmul(u, (turned - matmul(p, vh)) * inverse(columns)[..., :, None])
    return (x,), (dx,)


polar_op: Operation = Operation(
    "polar",
    Rules(
        signature=lambda params: "(m,n),(),()->(m,n)" if params["of_parts"] else "(m,n)->(m,n)",
        paths=(lax(_polar),),
        jvp=_polar_jvp,
    ),
)
