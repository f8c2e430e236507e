"""Singular value decompositions, and what follows from them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_batched import _checks, _lapack
from jax_batched._core import Call, Operation, Params, Rules, composed, kernel, lax, mask
from jax_batched._core.signature import smaller
from jax_batched._matrix import (
    adjoint,
    matmul,
    normalised,
    not_finite,
    real_dtype,
    reciprocals,
    resized,
    spoilt,
    take_rows,
    triangle,
)
from jax_batched._sizes import Sizes, leading, like, rounding
from jax_batched.eigh import CLUSTER_TOL, tolerance
from jax_batched.qr import has_many_rows, qr_multiply_op, qr_op

Array = jax.Array


class SVDResult(NamedTuple):
    """Singular vectors and values, ``a = U diag(S) Vh``."""

    U: Array
    S: Array
    Vh: Array


jax.export.register_namedtuple_serialization(SVDResult, serialized_name="jax_batched.SVDResult")


@overload
def svd(
    a: ArrayLike,
    full_matrices: bool = ...,
    compute_uv: Literal[True] = ...,
    *,
    cluster_tol: float = ...,
    where: ArrayLike | None = ...,
    sizes: Sequence[ArrayLike | None] | None = ...,
    return_info: Literal[False] = ...,
) -> SVDResult: ...


@overload
def svd(
    a: ArrayLike,
    full_matrices: bool,
    compute_uv: Literal[False],
    *,
    cluster_tol: float = ...,
    where: ArrayLike | None = ...,
    sizes: Sequence[ArrayLike | None] | None = ...,
    return_info: Literal[False] = ...,
) -> Array: ...


@overload
def svd(
    a: ArrayLike,
    full_matrices: bool = ...,
    *,
    compute_uv: Literal[False],
    cluster_tol: float = ...,
    where: ArrayLike | None = ...,
    sizes: Sequence[ArrayLike | None] | None = ...,
    return_info: Literal[False] = ...,
) -> Array: ...


@overload
def svd(
    a: ArrayLike,
    full_matrices: bool = ...,
    compute_uv: bool = ...,
    *,
    cluster_tol: float = ...,
    where: ArrayLike | None = ...,
    sizes: Sequence[ArrayLike | None] | None = ...,
    return_info: bool,
) -> SVDResult | Array | tuple[Array, ...]: ...


def svd(
    a: ArrayLike,
    full_matrices: bool = True,
    compute_uv: bool = True,
    *,
    cluster_tol: float = CLUSTER_TOL,
    where: ArrayLike | None = None,
    sizes: Sequence[ArrayLike | None] | None = None,
    return_info: bool = False,
) -> SVDResult | Array | tuple[Array, ...]:
    """Singular value decomposition of each matrix of a batch, ``a = u diag(s) vh``.

    The signature of `jax.numpy.linalg.svd` without its last two arguments, and more options.

    Args:
      a: matrices of shape ``(..., m, n)``; float32, float64, complex64 or complex128.
      full_matrices: u of shape ``(..., m, m)`` and vh ``(..., n, n)``; otherwise ``(..., m, k)``
        and ``(..., k, n)``, k = min(m, n).
      compute_uv: otherwise the singular values alone are returned.
      cluster_tol: of derivatives. Singular values that differ by no more than
        ``cluster_tol max(m, n) eps max(s)`` count as equal, and those that are no larger as zero.
        0: only the same ones do.
      where: bool, of a shape that broadcasts to the batch dimensions. Where it is False the results
        are zero, ``info`` is -1 and a counts for nothing.
      sizes: a pair ``(m, n)`` as in `qr`: how many rows and columns each matrix has. Beyond
        those of the matrix alone the results are zero. Where a size is negative or too large they
        are NaN, and ``info`` is -2.
      return_info: also return ``info``.

    Returns:
      ``(u, s, vh)``; s is real, descending, of shape ``(..., k)``. Where it is zero, u and vh are
      completed to orthonormal columns and rows. With return_info ``(u, s, vh, info)``, or
      ``(s, info)``: info is int32 of shape ``(...)``, 0, or a positive number if the
      iteration did not converge. A matrix with NaN or inf has NaN for a result, and ``info`` is
      k; no other is affected.

    Raises:
      TypeError: a is no array or has another dtype; a flag is not True or False; where is not bool,
        sizes are no pair of integers.
      ValueError: a is not a batch of matrices, cluster_tol is not a number from 0 on, or where or
        sizes have another shape.

    The derivatives of the vectors have 1 / (s_j - s_i), 1 / (s_j + s_i) and 1 / s_i. Where singular
    values count as equal, or both as zero, these are replaced by 0: see `eigh`. Columns of a full u
    or vh beyond k move with the others, by the smallest step.

    Algorithm: of a square matrix, on the CPU implicit QR of a bidiagonal matrix (Golub and Reinsch,
    1970), on CUDA and for 2 x 2 and 3 x 3 one-sided Jacobi (Hestenes, 1958). Of another matrix that
    of R of the QR factorization of a or its conjugate transpose (Chan, 1982). With sizes that of R
    always, continued by twice a bound of its singular values.
    """
    (matrix,), dtype = _checks.operands("svd", a=a)
    _checks.matrix("svd", "a", matrix)
    options: dict[str, Any] = {
        "full_matrices": _checks.flag("svd", "full_matrices", full_matrices),
        "vectors": _checks.flag("svd", "compute_uv", compute_uv),
        "cluster_tol": tolerance("svd", cluster_tol),
    }
    vectors = options["vectors"]
    batch, shape = matrix.shape[:-2], matrix.shape[-2:]
    wanted = _checks.mask("svd", where, batch)
    parts = rows, columns, _ = Sizes.of_shapes("svd", sizes, shape, batch, where=wanted)
    matrix = leading(matrix, rows, columns)
    if 0 in shape:
        s, *others, info = _empty(matrix, **options)
        if vectors:
            full = options["full_matrices"]
            others = list(_cleared(others[0], others[1], *parts, full=full))
        if wanted is not None:
            others = [mask.kept(x, wanted, 2) for x in others]
            info = mask.kept(info, wanted, 0, -1)
    else:
        s, *others, info = svd_of(matrix, rows, columns, **options, where=wanted)
    info = rows.info(info, 2)
    s = s.astype(real_dtype(dtype))
    results: tuple[Array, ...] = (s,)
    if vectors:
        u, vh = (x.astype(dtype) for x in others)
        results = SVDResult(u, s, vh)
    if _checks.flag("svd", "return_info", return_info):
        return (*results, info)
    return results if vectors else s


def svd_of(
    a: Array,
    rows: Sizes,
    columns: Sizes,
    *,
    full_matrices: bool = False,
    vectors: bool = True,
    cluster_tol: float = CLUSTER_TOL,
    where: Array | None = None,
) -> list[Array]:
    """The results of `svd_op`: of matrices, or of leading parts with zeros beyond them."""
    options: dict[str, Any] = {"full_matrices": full_matrices, "vectors": vectors}
    options |= {"cluster_tol": cluster_tol, "where": where}
    if not rows:
        return svd_op(a, **options)
    return svd_within_op(a, like(rows.each, a), like(columns.each, a), **options)


def _derivative(
    u: Array,
    s: Array,
    vh: Array,
    da: Array,
    rows: Sizes,
    columns: Sizes,
    ranks: Sizes,
    *,
    cluster_tol: float,
) -> tuple[Array, Array, Array]:
    """With P = U^H da V, X = U^H dU and Y = V^H dV: ds = diag(P) and, of both skew matrices,
    (X + Y)_ij = (P + P^H)_ij / (s_j - s_i) and (X - Y)_ij = (P - P^H)_ij / (s_j + s_i).

    What of dU is beyond the columns of U is da V / s, of dV da^H U / s.
    """
    k = s.shape[-1]
    v = adjoint(vh)
    thin_u, thin_v = (ranks.within(x[..., :, :k], -1) for x in (u, v))
    moved, turned = matmul(da, thin_v), matmul(adjoint(da), thin_u)
    p = matmul(adjoint(thin_u), moved)
    p_adjoint = adjoint(p)
    shape = u.shape[-2], vh.shape[-1]
    least = cluster_tol * rounding(s, shape, rows, columns) * jnp.max(s, -1, initial=0)[..., None]
    differences, sums = (s[..., None, :] - s[..., :, None], s[..., None, :] + s[..., :, None])
    own = ranks.within(jnp.ones(differences.shape, bool), -2, -1)
    other = own & ~jnp.broadcast_to(jnp.eye(k, dtype=bool), own.shape)
    if cluster_tol != 0:
        other = other & (jnp.abs(differences) > least[..., None])
    both = (p + p_adjoint) * reciprocals(differences, other).astype(p.dtype)
    apart = (p - p_adjoint) * reciprocals(sums, own & (sums > 2 * least[..., None])).astype(p.dtype)
    inverse = reciprocals(s, s > least).astype(p.dtype)[..., None, :]
    ds = jnp.real(jnp.diagonal(p, axis1=-2, axis2=-1))
    du, dv = (
        _moved(q, skew, moved, inverse, mine, ranks)
        for q, skew, moved, mine in (
            (u, (both + apart) / 2, moved, rows),
            (v, (both - apart) / 2, turned, columns),
        )
    )
    return ds, du, adjoint(dv)


def _moved(
    q: Array, skew: Array, moved: Array, inverse: Array, rows_of_q: Sizes, ranks: Sizes
) -> Array:
    """dQ of Q = (Q_1 Q_2): dQ_1 is Q_1 X and, outside of the range of Q_1, moved / s.

    With Z = Q_2^H moved / s, dQ_1 = Q_1 X + Q_2 Z and dQ_2 = -Q_1 Z^H.
    """
    k = skew.shape[-1]
    rows, columns = q.shape[-2:]
    first, second = q[..., :, :k], q[..., :, k:]
    if ranks:
        first = ranks.within(first, -1)
        outside = (moved - matmul(first, matmul(adjoint(first), moved))) * inverse
        more = like(rows_of_q.each > ranks.each, q)[..., None, None]
        outside = jnp.where(more, outside, jnp.zeros_like(outside))  # of a square: of rounding
        dq_1 = matmul(first, skew) + outside
        return resized(dq_1, rows, columns) - matmul(first, matmul(adjoint(outside), q))
    dq = matmul(first, skew)
    if rows == k:
        return dq
    if columns == k:
        outside = moved - matmul(first, matmul(adjoint(first), moved))
        return dq + outside * inverse
    z = matmul(adjoint(second), moved) * inverse
    return jnp.concatenate([dq + matmul(second, z), -matmul(first, adjoint(z))], axis=-1)


def _jvp(
    op: Callable[[], Operation],
    params: Params,
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> tuple[Sequence[Any], Sequence[Any]]:
    (a, *own), (da, *_) = primals, tangents
    if da is None:
        results = op()(a, *own, **params)
        return results, [None] * len(results)
    full = params["full_matrices"] and params["vectors"]
    s, u, vh, info = op()(a, *own, **{**params, "full_matrices": full, "vectors": True})
    if not params["vectors"]:
        p = jnp.sum(jnp.conj(u) * matmul(da, adjoint(vh)), axis=-2)
        return (s, info), (jnp.real(p), None)
    parts = Sizes.of_parts(*own)
    ds, du, dvh = _derivative(u, s, vh, da, *parts, cluster_tol=params["cluster_tol"])
    return (s, u, vh, info), (ds, du, dvh, None)


def _turned(call: Call) -> Call:
    """The call for the transposes of wide matrices."""
    m, n = call.sizes["m"], call.sizes["n"]
    wide = isinstance(m, int) and isinstance(n, int) and m < n
    return call._replace(sizes={**call.sizes, "m": n, "n": m}) if wide else call


def _has_known_sizes(call: Call) -> bool:
    return all(isinstance(size, int) for size in call.sizes.values())


def _is_square(call: Call) -> bool:
    return bool(call.sizes["m"] == call.sizes["n"])


def _by_qr(a: Array, **params: Any) -> Sequence[Array]:
    """Of R of a or, if it is wide, of its conjugate transpose."""
    m, n = a.shape[-2:]
    if m < n:
        s, *others, info = _by_qr(adjoint(a), **params)
        return (s, *(adjoint(x) for x in reversed(others)), info)
    if m == n:
        return svd_op(a, **params)
    return _of_tall(a, lambda r: svd_op(r, **params), **params)


def _of_tall(
    a: Array,
    of_r: Callable[[Array], Sequence[Array]],
    *,
    full_matrices: bool,
    vectors: bool,
    cluster_tol: float,
) -> Sequence[Array]:
    """Those of R, with Q times its u."""
    del cluster_tol
    m, n = a.shape[-2:]
    if not vectors:
        (r,) = qr_op(a, mode="r")
        return of_r(r)
    if has_many_rows(m, n) and not full_matrices:
        q, r = qr_op(a, mode="reduced")
        s, u, vh, info = of_r(r)
        return s, matmul(q, u), vh, info
    reflections, taus = qr_op(a, mode="raw")
    s, inner, vh, info = of_r(triangle(reflections[..., :n, :], upper=True))
    below = jnp.zeros((*inner.shape[:-2], m - n, n), inner.dtype)
    columns = jnp.concatenate([inner, below], axis=-2)
    if full_matrices:
        rest = jnp.eye(m, m - n, -n, dtype=a.dtype)
        rest = jnp.broadcast_to(rest, (*inner.shape[:-2], m, m - n))
        columns = jnp.concatenate([columns, rest], axis=-1)
    (u,) = qr_multiply_op(reflections, taus, columns, adjoint=False)
    return s, u, vh, info


def _lax(a: Array, *, full_matrices: bool, vectors: bool, cluster_tol: float) -> Sequence[Array]:
    del cluster_tol
    k = smaller(*a.shape[-2:])
    bad = not_finite(a)
    scaled, back = normalised(jnp.where(bad[..., None, None], 0, a))
    s, *vectors_of_a = _lapack.svd(scaled, full_matrices=full_matrices, compute_uv=vectors)
    results = (s * back[..., 0], *vectors_of_a)
    failed = bad | jnp.isnan(results[0]).any(-1)
    info = jnp.where(failed, k, 0).astype(jnp.int32)
    finished = [
        spoilt(x, failed.reshape(*failed.shape, *[1] * (x.ndim - failed.ndim))) for x in results
    ]
    return (*finished, info)


def _empty(a: Array, *, full_matrices: bool, vectors: bool, cluster_tol: float) -> Sequence[Array]:
    """No singular values, and what completes no vectors to a basis."""
    del cluster_tol
    batch, (m, n) = a.shape[:-2], a.shape[-2:]
    s, info = jnp.zeros((*batch, 0), real_dtype(a.dtype)), jnp.zeros(batch, jnp.int32)
    if not vectors:
        return s, info
    u, vh = (jnp.broadcast_to(jnp.eye(x, dtype=a.dtype), (*batch, x, x)) for x in (m, n))
    return (s, u, vh, info) if full_matrices else (s, u[..., :, :0], vh[..., :0, :], info)


def _signature(params: Params) -> str:
    if not params["vectors"]:
        return "(m,n)->(k),()"
    return "(m,n)->(k),(m,m),(n,n),()" if params["full_matrices"] else "(m,n)->(k),(m,k),(k,n),()"


svd_op: Operation = Operation(
    "svd",
    Rules(
        signature=_signature,
        paths=(
            kernel(_is_square),
            composed(_by_qr, _has_known_sizes, like=_turned, automatic_sharding=True),
            lax(_lax),
        ),
        sizes=lambda params, sizes: {"k": smaller(sizes["m"], sizes["n"])},
        jvp=functools.partial(_jvp, lambda: svd_op),
        result_dtypes=lambda params, data: (
            (real_dtype(data), data, data, jnp.int32)
            if params["vectors"]
            else (real_dtype(data), jnp.int32)
        ),
    ),
)


# Of leading parts, with zeros beyond them: a, their numbers of rows and of columns -> the results
# of `svd_op`.


def _within(
    a: Array, m: Array, n: Array, *, full_matrices: bool, vectors: bool, cluster_tol: float
) -> Sequence[Array]:
    """By R of the part or, if that is wide, of its conjugate transpose."""
    rows, columns, ranks = parts = Sizes.of_parts(m, n)
    options: dict[str, Any] = {"full_matrices": full_matrices, "vectors": vectors}
    options["cluster_tol"] = cluster_tol
    most, least = max(a.shape[-2:]), min(a.shape[-2:])
    is_wide = (rows.each < columns.each)[..., None, None]

    def chosen(tall: Array, wide: Array, *shape: int) -> Array:
        return jnp.where(is_wide, resized(adjoint(wide), *shape), resized(tall, *shape))

    small, back = _without_large_numbers(a)
    system = chosen(small, small, most, least)
    s, *others, info = _of_tall(system, functools.partial(_of_square, ranks, options), **options)
    s, info = jnp.where(back == 1, s, s * back), jnp.minimum(info, ranks.each)
    if not vectors:
        return s, info
    u, vh = others
    width, height = a.shape[-2:] if full_matrices else (least, least)
    u, vh = chosen(u, vh, a.shape[-2], width), chosen(vh, u, height, a.shape[-1])
    return s, *_cleared(u, vh, *parts, full=full_matrices), info


def _without_large_numbers(a: Array) -> tuple[Array, Array]:
    """Matrices whose norm does not overflow, and what of shape (..., 1) their singular values are
    to be multiplied by. Small ones stay as they are: subnormal numbers keep their digits."""
    parts = (jnp.real(a), jnp.imag(a))
    largest = jnp.max(jnp.maximum(*map(jnp.abs, parts)), axis=(-2, -1))
    is_large = largest > 1
    power = 2.0 ** (np.finfo(a.dtype).maxexp // 2)
    small = jnp.where(is_large[..., None, None], a * (1 / power), a)
    return small, jnp.where(is_large, power, 1).astype(largest.dtype)[..., None]


def _of_square(ranks: Sizes, options: Params, r: Array) -> Sequence[Array]:
    """Those of square parts: u is continued by the identity, vh by anything.

    The parts are continued by a number beyond their singular values, which come first without it.
    """
    size, k = jnp.abs(r), r.shape[-1]
    bound = jnp.maximum(jnp.max(jnp.sum(size, -1), -1), jnp.max(jnp.sum(size, -2), -1))
    bound = bound + k * np.finfo(r.dtype).tiny  # where subnormal numbers are taken for zero
    beyond = jnp.broadcast_to(2 * bound[..., None], r.shape[:-1])
    s, *vectors, info = svd_op(ranks.continued(r, beyond), **options)
    places = jnp.arange(k, dtype=jnp.int32).reshape(*[1] * (r.ndim - 2), k)
    order = (places - like(ranks.each, r)[..., None]) % k
    s = ranks.within(take_rows(s[..., None], order), -2)[..., 0]
    if not vectors:
        return s, info
    u, vh = vectors
    u = jnp.swapaxes(take_rows(jnp.swapaxes(u, -1, -2), order), -1, -2)
    return s, ranks.continued(u), take_rows(vh, order), info


def _cleared(
    u: Array, vh: Array, rows: Sizes, columns: Sizes, ranks: Sizes, *, full: bool
) -> tuple[Array, Array]:
    """u and vh with zeros beyond those of the parts."""
    width, height = (rows, columns) if full else (ranks, ranks)
    return leading(u, rows, width), leading(vh, height, columns)


svd_within_op: Operation = Operation(
    "svd_within",
    Rules(
        signature=lambda params: _signature(params).replace("->", ",(),()->"),
        paths=(lax(_within),),
        sizes=svd_op.rules.sizes,
        jvp=functools.partial(_jvp, lambda: svd_within_op),
        result_dtypes=svd_op.rules.result_dtypes,
    ),
)
