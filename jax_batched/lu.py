"""LU factorization of general matrices, and solves with it."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_batched import _checks, _ffi, _lapack, blocked
from jax_batched._core import (
    Call,
    Operation,
    Params,
    Rules,
    beyond,
    kernel,
    lax,
    mask,
    takes_rows,
)
from jax_batched._core.rules import minus
from jax_batched._core.signature import smaller
from jax_batched._lu_in_place import lu_in_place_op
from jax_batched._matrix import (
    inverse_permutation,
    matmul,
    real_dtype,
    spoilt,
    take_rows,
    triangle,
)
from jax_batched._sized import sized
from jax_batched._sizes import Sizes
from jax_batched.triangular_solve import triangular_solve_op

Array = jax.Array


@overload
def lu(
    a: ArrayLike,
    *,
    pivot: bool = ...,
    tiny: ArrayLike = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: Literal[False] = ...,
) -> tuple[Array, Array, Array]: ...


@overload
def lu(
    a: ArrayLike,
    *,
    pivot: bool = ...,
    tiny: ArrayLike = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: Literal[True],
) -> tuple[Array, Array, Array, Array]: ...


@overload
def lu(
    a: ArrayLike,
    *,
    pivot: bool = ...,
    tiny: ArrayLike = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: bool,
) -> tuple[Array, Array, Array] | tuple[Array, Array, Array, Array]: ...


def lu(
    a: ArrayLike,
    *,
    pivot: bool = True,
    tiny: ArrayLike = 0,
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
    return_info: bool = False,
) -> tuple[Array, Array, Array] | tuple[Array, Array, Array, Array]:
    """LU factorization, with partial pivoting or with none, of each matrix of a batch.

    The signature of `jax.lax.linalg.lu`, and more.

    Args:
      a: matrices of shape ``(..., m, n)``; float32, float64, complex64 or complex128.
      pivot: exchange rows. Otherwise they stay, and ``L U`` is a but for the pivots replaced.
      tiny: without exchanges, real, of a shape that broadcasts to the batch dimensions: a pivot of
        a smaller modulus is replaced by tiny with the pivot's sign, of complex numbers its phase.
        In place of a column's search for a pivot, this is what sparse direct solvers do.
      where: as in `cholesky`; pivots and permutation are zero, too.
      sizes: as in `cholesky`, of square matrices. Beyond a size pivots and permutation leave rows
        in their places.
      return_info: also return ``info``.

    Returns:
      ``(lu, pivots, permutation)``, L (its unit diagonal is not stored) and U in one matrix of a's
      shape and dtype; int32 of shape ``(..., min(m, n))``, the row, from 0, that each row was
      exchanged with in its turn; int32 of shape ``(..., m)`` with ``a[permutation] = L U``. With
      return_info also ``info``, int32 of shape ``(...)``: 0, or the number k (from 1) of the first
      pivot that is zero or not finite; without exchanges the number of pivots that were replaced.

    Raises:
      TypeError: a is no array or has another dtype; a flag is not True or False; tiny is not real,
        where not bool, sizes are no integers.
      ValueError: a is not a batch of matrices, tiny, where or sizes have another shape, there are
        sizes of matrices that are not square, or tiny goes with exchanges.

    The pivot is LAPACK's: the largest ``|re| + |im|`` of its column, of equal ones the first. A
    zero pivot leaves its column of L as it is, zero. Derivatives are those of L and U for the
    permutation found; without exchanges, those of the steps, in which a pivot that was replaced
    counts by its phase alone. A matrix without an inverse of U (or of its square part) has NaN
    derivatives, alone.

    Algorithm: implicit pivoting as in Abdelfattah, Haidar, Tomov and Dongarra, "Factorization and
    inversion of a million matrices using GPUs" (2017); derivative after de Hoog, Anderssen and
    Lukas, "Differentiation of matrix functionals using triangular factorization" (2011).
    """
    (matrix,), dtype = _checks.operands("lu", a=a)
    _checks.matrix("lu", "a", matrix)
    wanted = _checks.mask("lu", where, matrix.shape[:-2])
    parts = _parts("lu", sizes, matrix, wanted)
    if _checks.flag("lu", "pivot", pivot):
        known = _checks.python_value(tiny)
        if not isinstance(known, int | float) or known != 0:
            raise ValueError("lu: tiny goes with pivot=False")
        factors, pivots, permutation, info = _factorization(parts, matrix, where=wanted)
    else:
        factors, pivots, permutation, info = _in_place(matrix, tiny, parts, wanted)
    info = parts.info(info, 2)
    if 0 in matrix.shape[-2:]:
        rank = permutation.ndim
        permutation = jax.lax.broadcasted_iota(jnp.int32, permutation.shape, rank - 1)
        if wanted is not None:
            permutation = mask.kept(permutation, jnp.broadcast_to(wanted, info.shape), 1)
    results = (factors.astype(dtype), pivots, permutation)
    return (*results, info) if _checks.flag("lu", "return_info", return_info) else results


def _in_place(
    a: Array, tiny: ArrayLike, parts: Sizes, where: Array | None
) -> tuple[Array, Array, Array, Array]:
    """The results without exchanges of rows."""
    batch, (m, n) = a.shape[:-2], a.shape[-2:]
    if jnp.iscomplexobj(tiny):
        raise TypeError("lu: tiny must be real")
    given = jnp.asarray(tiny).astype(real_dtype(a.dtype))
    threshold = _checks.per_matrix("lu", "tiny", given, batch)
    continued = parts.continued(a, jnp.maximum(threshold, jnp.ones_like(threshold))[..., None])
    factors, info = lu_in_place_op(continued, threshold, where=where)
    pivots, permutation = (
        jax.lax.broadcasted_iota(jnp.int32, (*batch, size), len(batch)) for size in (min(m, n), m)
    )
    if where is not None:
        all_entries = jnp.broadcast_to(where, info.shape)
        pivots, permutation = (mask.kept(x, all_entries, 1) for x in (pivots, permutation))
    return parts.within(factors, -2, -1), pivots, permutation, info


def _parts(operation: str, sizes: ArrayLike | None, a: Array, where: Array | None) -> Sizes:
    """The sizes of matrices, which are square if there are some."""
    if sizes is not None:
        _checks.square(operation, "a, with sizes,", a)
    return Sizes(operation, sizes, a.shape[-1], a.shape[:-2], where=where)


def lu_factor(
    a: ArrayLike,
    overwrite_a: bool = False,
    check_finite: bool = True,
    *,
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """LU factorization of each matrix of a batch, for use by `lu_solve`.

    The signature and defaults of `jax.scipy.linalg.lu_factor`.

    Args:
      a: matrices of shape ``(..., m, n)``, dtypes as in `lu`.
      overwrite_a: as in `cholesky`.
      check_finite: without effect, as in `jax.scipy.linalg`.
      where, sizes: as in `lu`.

    Returns:
      ``(lu, pivots)`` as in `lu`.

    Raises:
      TypeError: a is no array or has another dtype; overwrite_a is not True or False; where is not
        bool, sizes are no integers.
      ValueError: as in `lu`.
    """
    del check_finite
    (matrix,), dtype = _checks.operands("lu_factor", a=a)
    _checks.matrix("lu_factor", "a", matrix)
    overwrite = _checks.flag("lu_factor", "overwrite_a", overwrite_a)
    wanted = _checks.mask("lu_factor", where, matrix.shape[:-2])
    parts = _parts("lu_factor", sizes, matrix, wanted)
    factors, pivots, *_ = _factorization(parts, matrix, where=wanted, overwrite=overwrite)
    return factors.astype(dtype), pivots


def lu_solve(
    lu_and_piv: tuple[ArrayLike, ArrayLike],
    b: ArrayLike,
    trans: int = 0,
    overwrite_b: bool = False,
    check_finite: bool = True,
    *,
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
) -> Array:
    """Solves ``op(a) x = b`` given the LU factorization of each matrix of a batch.

    The signature and defaults of `jax.scipy.linalg.lu_solve`.

    Args:
      lu_and_piv: ``(lu, pivots)`` as `lu_factor` returns it, of square matrices.
      b: right-hand sides of shape ``(..., n, k)``, or one vector ``(n,)``. Batch dimensions
        broadcast.
      trans: op is 0: a; 1: its transpose; 2: its conjugate transpose.
      overwrite_b, check_finite: without effect, as in `jax.scipy.linalg`.
      where, sizes: as in `triangular_solve`. Beyond a size pivots count for nothing.

    Returns:
      x, of b's shape with the broadcast batch dimensions. A zero on the diagonal of U gives inf or
      NaN in its own system only.

    Raises:
      TypeError: lu_and_piv is no pair; an operand is no array or has another dtype.
      ValueError: shapes do not fit, or trans is something else.
    """
    del check_finite
    _checks.flag("lu_solve", "overwrite_b", overwrite_b)
    _checks.option("lu_solve", "trans", trans, (0, 1, 2))
    if not isinstance(lu_and_piv, tuple | list) or len(lu_and_piv) != 2:
        raise TypeError(
            "lu_solve: lu_and_piv must be a pair (lu, pivots) as lu_factor returns it, got "
            f"{_checks.described(lu_and_piv)}"
        )
    factors, pivots = lu_and_piv
    (matrix, rhs), dtype = _checks.operands("lu_solve", lu=factors, b=b)
    _checks.square("lu_solve", "lu", matrix)
    exchanged = jnp.asarray(pivots)
    if not jnp.issubdtype(exchanged.dtype, jnp.integer) or exchanged.shape != matrix.shape[:-1]:
        raise ValueError(
            f"lu_solve: pivots must be integers of shape {matrix.shape[:-1]}, as lu_factor returns "
            f"them, got {_checks.described(exchanged)}"
        )
    columns = _checks.right_hand_side("lu_solve", matrix, rhs, names=("lu", "b"))
    n = matrix.shape[-1]
    batch = _checks.batch_of(matrix, columns)
    wanted = _checks.mask("lu_solve", where, batch)
    parts = Sizes("lu_solve", sizes, n, batch, where=wanted)
    exchanged = parts.pivots(exchanged.astype(jnp.int32))
    matrix, columns = parts.continued(matrix), parts.within(columns, -2)
    rows = jax.lax.linalg.lu_pivots_to_permutation(exchanged, n)
    with mask.only(wanted):
        x = substitute(matrix, rows, columns, transpose=trans != 0, conjugate=trans == 2)
    x = parts.within(x, -2)
    return _checks.drop_column(x, rhs).astype(dtype)


def substitute(
    factors: Array, rows: Array, b: Array, *, transpose: bool, conjugate: bool = False
) -> Array:
    """Solves with a[rows] = L U, its transpose, or its conjugate transpose."""
    conjugate = conjugate and jnp.iscomplexobj(factors)
    (x,) = lu_substitution_op(factors, rows, b, transpose=transpose, conjugate=conjugate)
    return x


def _substitutions(
    factors: Array, rows: Array, b: Array, *, transpose: bool, conjugate: bool
) -> Sequence[Array]:
    def triangle_solve(b: Array, lower: bool) -> Array:
        (x,) = triangular_solve_op(
            factors,
            b,
            left_side=True,
            lower=lower,
            transpose_a=transpose,
            conjugate_a=conjugate,
            unit_diagonal=lower,
        )
        return x

    if transpose:
        x = triangle_solve(triangle_solve(b, lower=False), lower=True)
        return (take_rows(x, inverse_permutation(rows)),)
    return (triangle_solve(triangle_solve(take_rows(b, rows), lower=True), lower=False),)


def _substitution_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Of the right-hand side the same solve; of the factors by way of the two substitutions."""
    factors, rows, b = primals
    dfactors, _, db = tangents
    if dfactors is None:
        dx = None if db is None else lu_substitution_op(factors, rows, db, **params)[0]
        return lu_substitution_op(*primals, **params), (dx,)
    db = jnp.zeros_like(b) if db is None else db
    (x,), (dx,) = jax.jvp(
        lambda factors, b: _substitutions(factors, rows, b, **params), (factors, b), (dfactors, db)
    )
    return (x,), (dx,)


def _substitution_transpose(
    params: Params, primals: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> Sequence[Any]:
    """The transpose of b -> a^-1 b is a^-T; of b -> a^-H b it is conj(a)^-1."""
    factors, rows, _ = primals
    (ct,) = cotangents
    if ct is None:
        return (None,)
    return lu_substitution_op(factors, rows, ct, **{**params, "transpose": not params["transpose"]})


# Factors, permutation, b -> x. Parameters: transpose, conjugate: of L and U.
lu_substitution_op = Operation(
    "lu_substitution",
    Rules(
        signature=lambda params: "(n,n),(n),(n,k)->(n,k)",
        paths=(kernel(), lax(_substitutions, broadcasts=True)),
        jvp=_substitution_jvp,
        transpose=_substitution_transpose,
    ),
)


def _jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """dL = L tril(X, -1) and dU = triu(X) U with X = L^-1 P da U^-1, L and U made square."""
    (a,), (da,) = primals, tangents
    results = lu_op(a, **params)
    factors, _, permutation, _ = results
    if da is None:
        return results, [None] * 4
    m, n = a.shape[-2:]
    k = min(m, n)
    batch = [(0, 0)] * (a.ndim - 2)
    lower = triangle(factors[..., :, :k], upper=False, strict=True)
    lower = jnp.pad(lower, [*batch, (0, 0), (0, m - k)])
    lower = jnp.where(jnp.eye(m, dtype=bool), jnp.ones_like(lower), lower)
    upper = jnp.pad(triangle(factors[..., :k, :], upper=True), [*batch, (0, n - k), (0, 0)])
    beyond = jnp.diag(jnp.arange(n) >= k)
    upper = jnp.where(beyond, jnp.ones_like(upper), upper)
    flags: dict[str, Any] = {"transpose_a": False, "conjugate_a": False}
    x = take_rows(da, permutation)
    (x,) = triangular_solve_op(lower, x, left_side=True, lower=True, unit_diagonal=True, **flags)
    (x,) = triangular_solve_op(upper, x, left_side=False, lower=False, unit_diagonal=False, **flags)
    dfactors = matmul(lower, triangle(x, upper=False, strict=True))
    dfactors = dfactors + matmul(triangle(x, upper=True), upper)
    return results, [dfactors, None, None, None]


def bad_pivot(factors: Array) -> Array:
    """0, or the number k (from 1) of the first pivot that is zero or not finite."""
    pivots = jnp.diagonal(factors, axis1=-2, axis2=-1)
    failed = (pivots == 0) | ~jnp.isfinite(pivots)
    return jnp.where(failed.any(-1), jnp.argmax(failed, -1) + 1, 0).astype(jnp.int32)


def _lax(a: Array) -> Sequence[Array]:
    factors, pivots, permutation = _lapack.lu(a)
    return factors, pivots, permutation, bad_pivot(factors)


def _is_panel(call: Call) -> bool:
    """Whether kernels take all rows of a few columns: on the CPU as many as there are."""
    m, n = call.sizes["m"], call.sizes["n"]
    if n > _ffi.max_n(call.platform, "lu", call.dtype):
        return False
    tiers = [tier for tier in _ffi.cuda_tiers() if tier.kernel.startswith("tall")]
    own = [tier.max_n for tier in tiers if tier.dtype == call.dtype.name]
    return call.platform == "cpu" or (n % 4 == 0 and m <= max(own, default=0))


def in_blocks(a: Array, *, plan: blocked.Plan) -> Sequence[Array]:
    """The results of `lu_op` for matrices that are divided as a plan says."""
    panel = functools.partial(lu_panel_op, overwrite=True)
    factors, pivots, permutation = blocked.lu(a, plan, panel, triangular_solve_op)
    return factors, pivots, permutation, bad_pivot(factors)


lu_op = Operation(
    "lu",
    Rules(
        signature=lambda params: "(m,n)->(m,n),(k),(m),()",
        paths=(kernel(takes_rows), *blocked.paths("lu", in_blocks), lax(_lax)),
        sizes=lambda params, sizes: {"k": smaller(sizes["m"], sizes["n"])},
        jvp=_jvp,
        result_dtypes=(None, jnp.int32, jnp.int32, jnp.int32),
    ),
)

_factorization = sized(
    lu_op,
    "(n,n)->(n,n),(n),(n),()",
    finish=lambda sizes, results: (*sizes.with_own_pivots(*results[:3]), results[3]),
)

# The panels of a larger matrix: the same, by kernels where `lu` of so many rows is JAX's own,
# which has all of a GPU for each of the matrices.
lu_panel_op = Operation(
    "lu",
    dataclasses.replace(
        lu_op.rules, paths=(kernel(takes_rows), beyond(None, _is_panel), lax(_lax)), jvp=None
    ),
)


# Solves whose derivative reuses the factors. They are a means, and have no derivative here: the
# matrix itself is an operand, and has one.


def solve_with_factors(
    a: Array, results: Sequence[Array], b: Array, *, transpose: bool = False
) -> Array:
    """a^-1 b, or with `transpose` a^-T b, given the results of `lu_op`."""
    factors, _, rows, info = results
    (x,) = lu_solve_op(a, factors, rows, info, b, transpose=transpose)
    return x


def _solve(
    a: Array, factors: Array, rows: Array, info: Array, b: Array, *, transpose: bool
) -> Sequence[Array]:
    del a
    x = substitute(factors, rows, b, transpose=transpose)
    return (spoilt(x, (info > 0)[..., None, None]),)


def _solve_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """a dx = db - da x."""
    da, db = tangents[0], tangents[-1]
    (x,) = lu_solve_op(*primals, **params)
    rhs = db
    if da is not None:
        rhs = minus(db, matmul(jnp.swapaxes(da, -1, -2) if params["transpose"] else da, x))
    dx = None if rhs is None else lu_solve_op(*primals[:-1], rhs, **params)[0]
    return (x,), (dx,)


def _solve_transpose(
    params: Params, primals: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> Sequence[Any]:
    """The transpose of b -> a^-1 b is a^-T, with the same factors."""
    (ct,) = cotangents
    if ct is None:
        return (None,)
    turned = {**params, "transpose": not params["transpose"]}
    return lu_solve_op(*primals[:-1], ct, **turned)


# a, its factors, permutation and info, b -> x. With `transpose`, of the transpose of a.
lu_solve_op = Operation(
    "lu_solve",
    Rules(
        signature=lambda params: "(n,n),(n,n),(n),(),(n,k)->(n,k)",
        paths=(lax(_solve),),
        jvp=_solve_jvp,
        transpose=_solve_transpose,
    ),
)
