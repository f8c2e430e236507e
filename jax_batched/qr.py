"""QR factorization by Householder reflections, and products with Q."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_batched import _checks, _ffi, _lapack
from jax_batched._core import (
    Call,
    Operation,
    Params,
    Rules,
    composed,
    kernel,
    lax,
    mask,
    takes_rows,
)
from jax_batched._core.rules import hermitian_transpose
from jax_batched._core.signature import at_least, smaller
from jax_batched._matrix import adjoint, matmul, spoilt, triangle
from jax_batched._sizes import Sizes, leading
from jax_batched.solve import solve_gen_op
from jax_batched.triangular_solve import triangular_solve_op

Array = jax.Array
MODES = ("reduced", "complete", "r", "raw")


class QRResult(NamedTuple):
    """Q and R; with ``mode="raw"`` the reflections, transposed, and their factors."""

    Q: Array
    R: Array


jax.export.register_namedtuple_serialization(QRResult, serialized_name="jax_batched.QRResult")


@overload
def qr(
    a: ArrayLike,
    mode: Literal["reduced", "complete", "raw"] = ...,
    *,
    where: ArrayLike | None = ...,
    sizes: Sequence[ArrayLike | None] | None = ...,
) -> QRResult: ...


@overload
def qr(
    a: ArrayLike,
    mode: Literal["r"],
    *,
    where: ArrayLike | None = ...,
    sizes: Sequence[ArrayLike | None] | None = ...,
) -> Array: ...


@overload
def qr(
    a: ArrayLike,
    mode: str,
    *,
    where: ArrayLike | None = ...,
    sizes: Sequence[ArrayLike | None] | None = ...,
) -> QRResult | Array: ...


def qr(
    a: ArrayLike,
    mode: str = "reduced",
    *,
    where: ArrayLike | None = None,
    sizes: Sequence[ArrayLike | None] | None = None,
) -> QRResult | Array:
    """QR factorization of each matrix of a batch by Householder reflections.

    The signature of `jax.numpy.linalg.qr`.

    Args:
      a: matrices of shape ``(..., m, n)``; float32, float64, complex64 or complex128.
      mode: ``"reduced"``: Q of shape ``(..., m, k)`` and R ``(..., k, n)``, k = min(m, n);
        ``"complete"``: ``(..., m, m)`` and ``(..., m, n)``; ``"r"``: R of ``"reduced"`` alone, Q is
        never formed; ``"raw"``: the reflections.
      where: bool, of a shape that broadcasts to the batch dimensions. Where it is False the results
        are zero, and a counts for nothing.
      sizes: a pair ``(m, n)`` of integers, of shapes that broadcast to the batch dimensions: how
        many rows and columns each matrix has; None: all of them. It is the leading part of what a
        holds, the rest of which counts for nothing. The results are zero beyond those of the matrix
        alone. Where a size is negative or too large they are NaN.

    Returns:
      ``(Q, R)`` of a's dtype; with ``"r"`` R; with ``"raw"`` a pair ``(h, taus)`` as
      `jax.numpy.linalg.qr` returns it: h is the transpose, of shape ``(..., n, m)``, of what
      LAPACK's geqrf leaves, taus has shape ``(..., k)``. `householder_product` and `qr_multiply`
      take ``h.mT``. A matrix with NaN or inf has NaN for a result, alone; a NaN that is right of
      the first m columns concerns its own column of R alone.

    Raises:
      TypeError: a is no array or has another dtype; where is not bool, sizes are no pair of
        integers.
      ValueError: a is not a batch of matrices, mode is another word, or where or sizes have another
        shape.

    Signs are LAPACK's: a diagonal entry of R is real, and of the sign opposite to the entry that it
    replaced, which stays where there is nothing to eliminate. Sums of squares neither overflow nor
    underflow. Derivatives of a matrix whose R is singular are NaN, alone. ``"raw"`` has none.

    Algorithm: Householder reflections, applied by panels (Schreiber and Van Loan, "A
    storage-efficient WY representation", 1989) with a substitution in place of T (Puglisi, 1992);
    ``"reduced"`` and ``"r"`` of more than 512 rows and up to 64 columns by blocks of rows (Demmel,
    Grigori, Hoemmen and Langou, 2012), with LAPACK's signs where its reflections are not I;
    derivative after Walter and Lehmann, "Algorithmic differentiation of linear algebra functions"
    (2010), of complete Q after arXiv:2409.13374.
    """
    _checks.option("qr", "mode", mode, MODES)
    (matrix,), dtype = _checks.operands("qr", a=a)
    _checks.matrix("qr", "a", matrix)
    shape, batch = matrix.shape[-2:], matrix.shape[:-2]
    wanted = _checks.mask("qr", where, batch)
    parts = Sizes.of_shapes("qr", sizes, shape, batch, where=wanted)
    if sizes is None:
        results = qr_op(matrix, mode=mode, where=wanted)
    else:
        results = _qr_of_parts(matrix, *parts, mode=mode, where=wanted)
    results = [x.astype(dtype) for x in results]
    if mode == "r":
        return results[0]
    if mode == "raw":
        return QRResult(jnp.swapaxes(results[0], -1, -2), results[1])
    return QRResult(*results)


def householder_product(a: ArrayLike, taus: ArrayLike, *, where: ArrayLike | None = None) -> Array:
    """The first columns of Q, from the reflections of each matrix of a batch.

    The signature of `jax.lax.linalg.householder_product`.

    Args:
      a: matrices of shape ``(..., m, n)``, n <= m, with vectors of reflections below the diagonal
        as LAPACK's geqrf leaves them: ``h.mT`` of ``h, taus = qr(x, mode="raw")``. Dtypes as in
        `qr`.
      taus: their factors, of shape ``(..., k)`` with k <= n. Batch dimensions broadcast.
      where: as in `qr`.

    Returns:
      The first n columns of the product of the k reflections, of shape ``(..., m, n)``.

    Raises:
      TypeError: an operand is no array or has another dtype.
      ValueError: shapes do not fit.
    """
    (matrix, factors), dtype = _checks.operands("householder_product", a=a, taus=taus)
    _checks.matrix("householder_product", "a", matrix)
    m, n = matrix.shape[-2:]
    if not at_least(n, m):
        raise ValueError(
            f"householder_product: a must have at least as many rows as columns, got {matrix.shape}"
        )
    _check_taus("householder_product", matrix, factors, n)
    batch = jnp.broadcast_shapes(matrix.shape[:-2], factors.shape[:-1])
    wanted = _checks.mask("householder_product", where, batch)
    (q,) = householder_product_op(matrix, factors, where=wanted)
    return q.astype(dtype)


def qr_multiply(
    a: ArrayLike,
    taus: ArrayLike,
    c: ArrayLike,
    *,
    left: bool = True,
    adjoint: bool = False,
    where: ArrayLike | None = None,
) -> Array:
    """Products with the square Q of each matrix of a batch, without forming it.

    Args:
      a: reflections of shape ``(..., m, n)`` as in `householder_product`, of any m and n.
      taus: their factors, of shape ``(..., k)`` with k <= min(m, n).
      c: matrices of shape ``(..., m, p)`` if left, else ``(..., p, m)``, or one vector ``(m,)``.
        Batch dimensions broadcast.
      left: ``Q c``; otherwise ``c Q``.
      adjoint: the conjugate transpose of Q in place of Q.
      where: as in `qr`.

    Returns:
      The product, of c's shape with the broadcast batch dimensions.

    Raises:
      TypeError: an operand is no array or has another dtype; a flag is not True or False.
      ValueError: shapes do not fit.
    """
    left = _checks.flag("qr_multiply", "left", left)
    conjugate = _checks.flag("qr_multiply", "adjoint", adjoint)
    (matrix, factors, other), dtype = _checks.operands("qr_multiply", a=a, taus=taus, c=c)
    _checks.matrix("qr_multiply", "a", matrix)
    m, n = matrix.shape[-2:]
    _check_taus("qr_multiply", matrix, factors, min(m, n))
    columns = _checks.right_hand_side(
        "qr_multiply", matrix, other, left_side=left, size=m, names=("a", "c")
    )
    _checks.batches("qr_multiply", [("a", matrix, 2), ("taus", factors, 1), ("c", columns, 2)])
    shapes = (matrix.shape[:-2], factors.shape[:-1], columns.shape[:-2])
    wanted = _checks.mask("qr_multiply", where, jnp.broadcast_shapes(*shapes))
    c = columns if left else _adjoint(columns)
    (x,) = qr_multiply_op(matrix, factors, c, adjoint=conjugate == left, where=wanted)
    x = x if left else _adjoint(x)
    return _checks.drop_column(x, other, left_side=left).astype(dtype)


_adjoint = adjoint  # where an argument has its name


def _qr_of_parts(
    a: Array, rows: Sizes, columns: Sizes, ranks: Sizes, *, mode: str, where: Array | None
) -> list[Array]:
    """The results for leading parts, zero beyond theirs."""
    a = leading(a, rows, columns)
    results = qr_within_op(a, ranks.each, mode=mode, where=where)
    if mode == "raw":
        h, taus = results
        taus = ranks.within(taus[..., None], -2)[..., 0]
        return [columns.within(rows.within(h, -2), -1), taus]
    inner = rows if mode == "complete" else ranks
    r = columns.within(inner.within(results[-1], -2), -1)
    return [r] if mode == "r" else [inner.within(rows.within(results[0], -2), -1), r]


def _check_taus(operation: str, a: Array, taus: Array, most: Any) -> None:
    if taus.ndim < 1 or not at_least(taus.shape[-1], most):
        raise ValueError(
            f"{operation}: taus must have shape (..., k) with k at most {most} to go with a of "
            f"shape {a.shape}, got {taus.shape}"
        )
    _checks.batches(operation, [("a", a, 2), ("taus", taus, 1)])


_SIGNATURES = {
    "reduced": "(m,n)->(m,k),(k,n)",
    "complete": "(m,n)->(m,m),(m,n)",
    "r": "(m,n)->(k,n)",
    "raw": "(m,n)->(m,n),(k)",
}


def _thin_derivative(q: Array, r: Array, da: Array) -> tuple[Array, Array]:
    """dQ = Q (W - X) + da R^-1 and dR = (X - W) R with X = Q^H da R^-1.

    W is the skew part: X's strict lower triangle less its adjoint, and X's imaginary diagonal.
    """
    (y,) = triangular_solve_op(
        r,
        da,
        left_side=False,
        lower=False,
        transpose_a=False,
        conjugate_a=False,
        unit_diagonal=False,
    )
    x = matmul(adjoint(q), y)
    lower = triangle(x, upper=False, strict=True)
    skew = lower - adjoint(lower)
    if jnp.iscomplexobj(x):
        on_diagonal = jnp.eye(x.shape[-1], dtype=bool)
        skew = jnp.where(on_diagonal, jax.lax.complex(jnp.zeros_like(x.real), x.imag), skew)
    return matmul(q, skew - x) + y, triangle(matmul(x - skew, r), upper=True)


def _derivative(mode: str, a: Array, q: Array, r: Array, da: Array) -> tuple[Array, Array]:
    """dQ and dR; Q is complete if the mode is."""
    m, n = a.shape[-2:]
    if at_least(m, n):
        # Of a = (a_1 a_2) the square part has Q, and R_2 = Q^H a_2.
        dq, square = _thin_derivative(q, r[..., :, :m], da[..., :, :m])
        rest = matmul(adjoint(dq), a[..., :, m:]) + matmul(adjoint(q), da[..., :, m:])
        return dq, jnp.concatenate([square, rest], axis=-1)
    if mode != "complete":
        return _thin_derivative(q, r, da)
    dq, dr = _thin_derivative(q[..., :, :n], r[..., :n, :], da)
    # With Q = (Q_1 Q_2), n columns and the rest, and rows likewise: Z = Q_21 (Q_11 - I)^-1.
    top, bottom, rest = q[..., :n, :n], q[..., n:, :n], q[..., :, n:]
    less_one = jnp.where(jnp.eye(n, dtype=bool), top - jnp.ones_like(top), top)
    z_adjoint, _ = solve_gen_op(adjoint(less_one), adjoint(bottom))
    z = adjoint(z_adjoint)
    change = adjoint(dq[..., n:, :] - matmul(z, dq[..., :n, :]))
    d_rest = matmul(dq, z_adjoint) - matmul(q[..., :, :n] + matmul(rest, z), change)
    zeros = jnp.zeros((*dr.shape[:-2], m - n, n), dr.dtype)
    return jnp.concatenate([dq, d_rest], -1), jnp.concatenate([dr, zeros], -2)


def _jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    (a,), (da,) = primals, tangents
    mode = params["mode"]
    if da is None:
        results = qr_op(a, **params)
        return results, [None] * len(results)
    if mode == "raw":
        raise NotImplementedError(
            'qr: mode="raw" has no derivative, as its reflections are a means and no function that '
            'is smooth; differentiate "reduced", "complete" or "r"'
        )
    q, r = qr_op(a, mode="reduced" if mode == "r" else mode)
    dq, dr = _derivative(mode, a, q, r, da)
    return ((r,), (dr,)) if mode == "r" else ((q, r), (dq, dr))


def _is_r_alone(call: Call) -> bool:
    """Whether the kernels need a place for the reflections, which R alone does not give them."""
    m, n = call.sizes["m"], call.sizes["n"]
    if call.platform != "cuda" or call.params["mode"] != "r" or m <= n or n <= _FEW_COLUMNS:
        return False
    in_registers = [
        tier.max_n
        for tier in _ffi.cuda_tiers()
        if (tier.operation, tier.dtype) == ("qr", np.dtype(call.dtype).name)
        and tier.kernel.startswith("lanes")
    ]
    return bool(m > max(in_registers, default=0))


_FEW_COLUMNS = 8  # whose reflections shared memory holds on every GPU


def _without_reflections(a: Array, *, mode: str) -> Sequence[Array]:
    reflections, _ = qr_op(a, mode="raw")
    return (triangle(reflections[..., : a.shape[-1], :], upper=True),)


def _is_tall(call: Call) -> bool:
    """Whether rows are many enough, and columns few enough, to factor blocks of rows first."""
    mode, m, n = call.params["mode"], call.sizes["m"], call.sizes["n"]
    if mode not in ("reduced", "r") or not has_many_rows(m, n):
        return False
    # On the CPU LAPACK is faster for few columns.
    return call.platform == "cuda" or bool(n > (8 if mode == "reduced" else 16))


def has_many_rows(m: Any, n: Any) -> bool:
    """More than kernels serve, of so few columns that blocks of rows are tall as well."""
    return isinstance(m, int) and isinstance(n, int) and m > _MOST_ROWS >= 8 * n


_MOST_ROWS = 512  # of a block


def _by_blocks(a: Array, *, mode: str) -> Sequence[Array]:
    """Q and R from those of blocks of rows, and of the triangles of these on top of each other.

    Demmel, Grigori, Hoemmen and Langou, "Communication-optimal parallel and sequential QR and LU
    factorizations" (2012).
    """
    *batch, m, n = a.shape
    rows = 64 if n <= 16 else 8 * n
    blocks = -(-m // rows)
    padded = jnp.pad(a, [*[(0, 0)] * len(batch), (0, blocks * rows - m), (0, 0)])
    parts = padded.reshape(*batch, blocks, rows, n)
    if mode == "r":  # of Q nothing but its first rows
        of_parts, first = qr_op(parts[..., :1, :, :], mode="reduced")
        (others,) = qr_op(parts[..., 1:, :, :], mode="r")
        triangles = jnp.concatenate([first, others], axis=-3)
    else:
        of_parts, triangles = qr_op(parts, mode="reduced")
    q, r = qr_op(triangles.reshape(*batch, blocks * n, n), mode="reduced")
    # The signs are those that reflections of all rows at once would give.
    top = matmul(of_parts[..., 0, :n, :], q[..., :n, :])
    diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
    signs = _signs_of_reflections(top, a[..., 0, :1], diagonal, _are_identities(a))
    r = r * signs[..., :, None]
    if mode == "r":
        return (r,)
    q = (q * signs[..., None, :]).reshape(*batch, blocks, n, n)
    return matmul(of_parts, q).reshape(*batch, blocks * rows, n)[..., :m, :], r


def _are_identities(a: Array) -> Array:
    """Which reflections, (..., n), have nothing to eliminate, as columns are zero from there on."""
    places = jax.lax.broadcasted_iota(jnp.int32, a.shape, a.ndim - 2)
    ends = jnp.max(jnp.where(a != 0, places, -1), -2)
    ends = jax.lax.cummax(ends, axis=ends.ndim - 1)  # what the reflections so far have reached
    steps = jax.lax.broadcasted_iota(jnp.int32, ends.shape, ends.ndim - 1)
    nothing_below = ends <= steps
    if not jnp.iscomplexobj(a):
        return nothing_below
    # A number that is not real is turned. It is the matrix's own where none has reached it.
    is_own = jnp.pad(ends[..., :-1], [(0, 0)] * (ends.ndim - 1) + [(1, 0)]) < jnp.maximum(steps, 1)
    return nothing_below & is_own & (jnp.imag(jnp.diagonal(a, axis1=-2, axis2=-1)) == 0)


def _signs_of_reflections(top: Array, first: Array, diagonal: Array, identities: Array) -> Array:
    """D, of 1 and -1, with which Q D comes from reflections, by the first rows of Q.

    I - Q D has the factors V and T V^H of the reflections, and tau_k = 1 - d_k s_k, |tau_k| >= 1,
    is pivot k of its elimination: Ballard, Demmel, Grigori, Jacquelin, Nguyen and Solomonik,
    "Reconstructing Householder vectors from tall-skinny QR" (2014). s_k is what was the pivot over
    the norm of its column, but for rounding. Where it is zero, R's diagonal becomes negative. The
    first pivot is known. Where a reflection is the identity, tau_k = 0.
    """
    negligible = 8 * top.shape[-1] * np.finfo(top.dtype).eps
    n = top.shape[-1]
    places = jax.lax.broadcasted_iota(jnp.int32, top.shape[:-1], top.ndim - 2)

    def step(k: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, signs = state
        column = jax.lax.dynamic_index_in_dim(rest, k, -1, keepdims=False)
        row = jax.lax.dynamic_index_in_dim(rest, k, -2, keepdims=False)
        s = jax.lax.dynamic_index_in_dim(column, k, -1)
        of_r = jax.lax.dynamic_index_in_dim(diagonal, k, -1).real
        positive = jnp.where(jnp.abs(s.real) > negligible, s.real > 0, of_r > 0)
        positive = jnp.where(k == 0, (of_r > 0) == (first.real >= 0), positive)
        kept = jax.lax.dynamic_index_in_dim(identities, k, -1) & (jnp.abs(s.real) > 0.5)
        sign = jnp.where(positive == kept, jnp.ones_like(s), -jnp.ones_like(s))
        below = column * sign / jnp.where(kept, jnp.ones_like(s), sign * s - 1)
        below = jnp.where((places > k) & ~kept, below, jnp.zeros_like(column))
        rest = rest - below[..., :, None] * row[..., None, :]
        return rest, jnp.where(places == k, sign, signs)

    found: tuple[Array, Array] = jax.lax.fori_loop(0, n, step, (top, jnp.ones_like(diagonal)))
    return found[1]


def _lax(a: Array, *, mode: str) -> Sequence[Array]:
    """JAX's own routine; NaN in all of a matrix of which some of the factors is not finite."""
    if 0 in a.shape[-2:]:  # a complete Q of no columns
        m = a.shape[-2]
        return jnp.broadcast_to(jnp.eye(m, dtype=a.dtype), (*a.shape[:-1], m)), a
    if mode in ("reduced", "complete"):
        results: Sequence[Array] = _lapack.qr(a, full_matrices=mode == "complete")
        r = results[1]
    else:
        r, taus = _lapack.geqrf(a)
        upper = triangle(r[..., : min(a.shape[-2:]), :], upper=True) if mode == "r" else r
        results = (upper,) if mode == "r" else (upper, taus)
    diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
    bad = ~jnp.isfinite(diagonal).all(-1)
    finished = []
    for i, x in enumerate(results):
        failed = jnp.expand_dims(bad, range(bad.ndim, x.ndim))
        if mode != "raw" and i == len(results) - 1:  # R keeps its zeros
            upper = jnp.triu(jnp.ones(x.shape[-2:], bool))
            failed = jnp.where(upper, failed, jnp.zeros_like(failed))
        finished.append(spoilt(x, failed))
    return finished


qr_op = Operation(
    "qr",
    Rules(
        signature=lambda params: _SIGNATURES[params["mode"]],
        paths=(
            kernel(lambda call: takes_rows(call) and not _is_r_alone(call)),
            composed(_without_reflections, lambda call: takes_rows(call) and _is_r_alone(call)),
            composed(_by_blocks, _is_tall, automatic_sharding=True),
            lax(_lax),
        ),
        sizes=lambda params, sizes: {"k": smaller(sizes["m"], sizes["n"])},
        jvp=_jvp,
        result_dtypes=lambda params, data: (data,) * (1 if params["mode"] == "r" else 2),
    ),
)


# Of leading parts, with zeros beyond them: a, the smaller of their numbers of rows and columns ->
# the results of `qr_op`. The reflections beyond a part are I, so Q is I there, and R is zero.


def _within(a: Array, ranks: Array, *, mode: str) -> Sequence[Array]:
    del ranks
    return qr_op(a, mode=mode)


def _within_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Those of `qr`, of R with ones on the rest of its diagonal: no part depends on these."""
    (a, ranks), (da, _) = primals, tangents
    mode = params["mode"]
    if da is None or mode == "raw":
        return _jvp(params, (a,), (da,))
    q, r = qr_within_op(a, ranks, mode="reduced" if mode == "r" else mode)
    own, k = Sizes.of(ranks), min(a.shape[-2:])
    square = r[..., :k, :k]
    square = square + own.continued(jnp.zeros_like(square))
    regular = jnp.concatenate([square, r[..., :k, k:]], axis=-1)
    dq, dr = _derivative("reduced", a, q[..., :, :k], regular, da)
    if mode == "r":
        return (r,), (dr,)
    if mode == "complete":
        dq = _complete_derivative(q, own.within(dq, -1), own)
        dr = jnp.pad(dr, [*[(0, 0)] * (dr.ndim - 2), (0, a.shape[-2] - k), (0, 0)])
    return (q, r), (dq, dr)


def _complete_derivative(q: Array, dq: Array, own: Sizes) -> Array:
    """dQ of a complete Q, from its first columns, as many as the parts have."""
    m, k = dq.shape[-2:]
    first = own.within(q[..., :, :k], -1)
    bottom, of_bottom = (x - own.within(x, -2) for x in (first, dq))
    top = q[..., :k, :k]
    eye = jnp.where(jnp.eye(k, dtype=bool), jnp.ones_like(top), jnp.zeros_like(top))
    # Of a part that is not tall Q may have an eigenvalue 1, but nothing is below.
    is_tall = jnp.any(bottom != 0, (-2, -1), keepdims=True)
    less_one = jnp.where(is_tall, own.continued(top - eye), eye)
    z_adjoint, _ = solve_gen_op(adjoint(less_one), adjoint(bottom))
    z = adjoint(z_adjoint)
    change = adjoint(of_bottom - matmul(z, dq[..., :k, :]))
    rest = q - own.within(q, -1)
    d_rest = matmul(dq, z_adjoint) - matmul(first + matmul(rest, z), change)
    return d_rest + jnp.pad(dq, [*[(0, 0)] * (dq.ndim - 2), (0, 0), (0, m - k)])


qr_within_op: Operation = Operation(
    "qr_within",
    Rules(
        signature=lambda params: _SIGNATURES[params["mode"]].replace("->", ",()->"),
        paths=(lax(_within, broadcasts=True),),
        sizes=qr_op.rules.sizes,
        jvp=_within_jvp,
        result_dtypes=qr_op.rules.result_dtypes,
    ),
)


def _multiplied(a: Array, taus: Array, c: Array, *, adjoint: bool) -> Sequence[Array]:
    """Q c = c - V y, with (I + D striu(V^H V)) y = D V^H c and D = diag(taus).

    Q^H has stril for striu and the conjugates of taus: both are the reflections one by one.
    """
    m, k = a.shape[-2], taus.shape[-1]
    v = triangle(a[..., :, :k], upper=False, strict=True)
    v = jnp.where(jnp.eye(m, k, dtype=bool), jnp.ones_like(v), v)
    d = (jnp.conj(taus) if adjoint else taus)[..., :, None]
    v_adjoint = _adjoint(v)
    (y,) = triangular_solve_op(
        d * matmul(v_adjoint, v),
        d * matmul(v_adjoint, c),
        left_side=True,
        lower=adjoint,
        transpose_a=False,
        conjugate_a=False,
        unit_diagonal=True,
    )
    return (c - matmul(v, y),)


def _multiply_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    (a, taus, c), (da, dtaus, dc) = primals, tangents
    (x,) = qr_multiply_op(a, taus, c, **params)
    c = mask.applied(c, 2)  # of a sum over entries that share a, what counts
    dx = None if dc is None else qr_multiply_op(a, taus, dc, **params)[0]
    if da is not None or dtaus is not None:
        _, (of_q,) = jax.jvp(
            lambda a, taus: _multiplied(a, taus, c, **params),
            (a, taus),
            (_or_zeros(da, a), _or_zeros(dtaus, taus)),
        )
        dx = of_q if dx is None else dx + of_q
    return (x,), (dx,)


def _or_zeros(tangent: Any, primal: Array) -> Any:
    return jnp.zeros_like(primal) if tangent is None else tangent


qr_multiply_op: Operation = Operation(
    "qr_multiply",
    Rules(
        signature=lambda params: "(m,n),(k),(m,p)->(m,p)",
        paths=(kernel(takes_rows), lax(_multiplied, broadcasts=True)),
        jvp=_multiply_jvp,
        transpose=hermitian_transpose(lambda: qr_multiply_op, flag="adjoint"),
    ),
)


def _formed(a: Array, taus: Array) -> Sequence[Array]:
    m, n = a.shape[-2:]
    eye = jnp.where(jnp.eye(m, n, dtype=bool), jnp.ones_like(a), jnp.zeros_like(a))
    return _multiplied(a, taus, eye, adjoint=False)


def _formed_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    given = [_or_zeros(t, x) for x, t in zip(primals, tangents, strict=True)]
    _, derivatives = jax.jvp(_formed, primals, tuple(given))
    return householder_product_op(*primals, **params), derivatives


householder_product_op = Operation(
    "householder_product",
    Rules(
        signature=lambda params: "(m,n),(k)->(m,n)",
        paths=(kernel(takes_rows), lax(_formed, broadcasts=True)),
        columns=False,
        jvp=_formed_jvp,
    ),
)
