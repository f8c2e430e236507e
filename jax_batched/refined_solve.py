"""Solving in mixed precision: a cheap factor, refined to the accuracy of the data's dtype.

The way of a call: `low_factor_op` scales and factors each matrix in the low precision;
`refine_op` solves with that factor, refines, and measures what it returns. Both are primitives of
the library's factory, so that a batch made by `vmap` is the same program as one given as an array.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_batched import _checks
from jax_batched._core import Operation, Params, Rules, lax
from jax_batched._core.rules import hermitian_transpose, minus
from jax_batched._matrix import hermitian_from_triangle, matmul, real_diagonal, times
from jax_batched.cho_solve import cho_solve_op
from jax_batched.cholesky import cholesky_op
from jax_batched.lu import bad_pivot, lu_op, substitute
from jax_batched.residual import residual_op
from jax_batched.solve import solve_gen_op, solve_pos_op

Array = jax.Array

_finfo: Callable[[Any], Any] = jnp.finfo

# Data's dtype -> accepted dtypes of the factor, the default first.
_FACTOR_DTYPES: dict[str, tuple[str, ...]] = {
    "float32": ("float32", "float16", "bfloat16"),
    "float64": ("float32", "float64", "float16", "bfloat16"),
    "complex64": ("complex64",),
    "complex128": ("complex64", "complex128"),
}
_METHODS = ("ir", "gmres")
_MAX_STEPS = 30

# Corrections of one step of method "gmres".
_GMRES_STEPS = 16

# Scaled matrices have a diagonal near this: 1, and in float16 as much as leaves a factor of 8 to
# its largest number, so that as little as possible falls below its smallest.
_TOP = {"float16": 2.0**12}

# Shifts of the diagonal, relative, in units of the low precision's roundoff: a matrix takes the
# first with which it has a factor. The norm of n x n rounding errors is some 2 sqrt(n) of them.
_SHIFTS = (0.0, 2.0, 8.0, 32.0)


class RefinementInfo(NamedTuple):
    """What became of each system; every field has the batch shape.

    Attributes:
      converged: whether the backward error of the x that is returned, measured, is at most tol, for
        every right-hand side.
      steps: refinement steps taken after the first solve; of several right-hand sides, the most.
      backward_error: ``max|b - a x| / (max_i sum_j |a_ij| max|x| + max|b|)`` of the x that is
        returned; of several right-hand sides, the largest. NaN or inf where there is no x.
      info: 0, or the number k (from 1) of the pivot that failed, as in `solve`: that of the last
        factorization of the matrix, in the full precision if it was tried, else the low one.
      rescued: whether x, or a column of it, comes from a factor in the data's precision.
    """

    converged: Array
    steps: Array
    backward_error: Array
    info: Array
    rescued: Array


def refined_solve(
    a: ArrayLike,
    b: ArrayLike,
    *,
    assume_a: str = "pos",
    lower: bool = False,
    factor_dtype: Any = None,
    method: str = "ir",
    max_steps: int | None = None,
    tol: float | None = None,
    fallback: bool = True,
) -> tuple[Array, RefinementInfo]:
    """Solves ``a x = b`` for each matrix of a batch with a low-precision factor and refinement.

    Each matrix is scaled by powers of two and factored once, in the low precision. From
    ``x = 0``, corrections are solved for with that factor; residuals ``b - a x`` and sums
    are in the data's dtype. A right-hand side leaves when its backward error (see `RefinementInfo`)
    is at most tol, when two steps in a row do not halve it or one does not lower it, or after
    max_steps; what then happens to the others does not change it.

    Args:
      a: matrices of shape ``(..., n, n)``; float32, float64, complex64 or complex128.
      b: right-hand sides of shape ``(..., n, k)``, or one vector ``(n,)``. Batch dimensions
        broadcast.
      assume_a: ``"pos"``: a is Hermitian positive definite. ``"gen"``: any matrix, by LU with
        partial pivoting (JAX's own).
      lower: with ``"pos"``, read a's lower triangle; otherwise its upper one. The other triangle
        may hold anything.
      factor_dtype: precision of the factor: for float64 data float32 (the default), float16,
        bfloat16 or float64; for float32 data float32 (the default), float16 or bfloat16; for
        complex128 data complex64 (the default) or complex128; for complex64 data complex64.
        16-bit factors are computed in float32 from matrices rounded to 16 bits, and rounded.
      method: ``"ir"``: iterative refinement, one correction a step. ``"gmres"``: a step is up to 16
        corrections combined by flexible GMRES; it converges where the factor is too poor
        for ``"ir"``.
      max_steps: most refinement steps after the first solve (default 30).
      tol: largest backward error that counts as converged; default ``max(n, 8) u`` with the unit
        roundoff u of the data's dtype (2^-53 for float64). With the default, refinement goes on
        below it, to 2 u or until a step does not halve the error: an ill-conditioned
        solution gains digits by that.
      fallback: solve what did not converge again, with a factor in the data's dtype. Where all
        converge, nothing is computed for it.

    Returns:
      ``(x, info)``: x of b's shape with the broadcast batch dimensions, and a `RefinementInfo`. x
      is the iterate with the smallest backward error. It is NaN for a matrix that has no factor:
      not positive definite in the last precision that was tried. No other is affected. A matrix
      that is indefinite by less than the low precision's roundoff can pass for positive definite;
      a converged x then still solves ``a x = b``.

    Raises:
      TypeError: an operand is no array or has another dtype, or factor_dtype does not go with it; a
        flag is not True or False.
      ValueError: shapes do not fit, or an option is not one of those accepted.

    Derivatives are those of the solution, ``a dx = db - da x``, forward and reverse, each by a
    refined solve with the same factor and options; they do not pass through the loop. With
    ``"pos"`` they are zero in the triangle that is not read. A failed matrix has NaN derivatives,
    alone.

    Algorithm: Wilkinson's iterative refinement with a factor of lower precision, after Langou,
    Langou, Luszczek, Kurzak, Buttari and Dongarra, "Exploiting the performance of 32 bit floating
    point arithmetic in obtaining 64 bit accuracy" (2006); flexible GMRES after Arioli and Duff,
    "Using FGMRES to obtain backward stability in mixed precision" (2009), for which Carson and
    Higham, "Accelerating the solution of linear systems by iterative refinement in three
    precisions" (2018), prove convergence; scaling and shift after Higham and Pranesh, "Exploiting
    lower precision arithmetic in solving symmetric positive definite linear systems and least
    squares problems" (2021).
    """
    _checks.option("refined_solve", "assume_a", assume_a, ("pos", "gen"))
    _checks.option("refined_solve", "method", method, _METHODS)
    lower = _checks.flag("refined_solve", "lower", lower)
    (matrix, rhs), _ = _checks.operands("refined_solve", accepted=tuple(_FACTOR_DTYPES), a=a, b=b)
    _checks.square("refined_solve", "a", matrix)
    columns = _checks.right_hand_side("refined_solve", matrix, rhs)
    n = matrix.shape[-1]
    unit = float(_finfo(matrix.dtype).eps) / 2
    options = {
        "triangle": ("lower" if lower else "upper") if assume_a == "pos" else "",
        "transpose": False,
        "method": method,
        "max_steps": _max_steps(max_steps),
        "tol": max(n, 8) * unit if tol is None else _tolerance(tol),
        "goal": 2 * unit if tol is None else _tolerance(tol),
        "fallback": _checks.flag("refined_solve", "fallback", fallback),
    }
    low = _factor_dtype(factor_dtype, matrix.dtype)
    factors = low_factor_op(matrix, triangle=options["triangle"], dtype=low)
    x, *of_columns, info = refine_op(matrix, *factors, columns, **options)
    return _checks.drop_column(x, rhs), _per_matrix(*of_columns, info, empty=n == 0)


@functools.partial(jax.jit, static_argnames="empty")
def _per_matrix(
    converged: Array, steps: Array, error: Array, rescued: Array, info: Array, *, empty: bool
) -> RefinementInfo:
    """What became of all right-hand sides of a matrix, of which there may be none."""
    return RefinementInfo(
        converged=jnp.ones_like(info, dtype=bool) if empty else converged.all(-1),
        steps=steps.max(-1, initial=0),
        backward_error=error.max(-1, initial=0),
        info=info,
        rescued=rescued.any(-1),
    )


def _factor_dtype(given: Any, data: Any) -> str:
    """Name of the factor's dtype."""
    accepted = _FACTOR_DTYPES[data.name]
    if given is None:
        return accepted[0]
    try:
        name = str(jnp.dtype(given).name)
    except TypeError:
        name = str(given)
    if name not in accepted:
        raise TypeError(
            f"refined_solve: factor_dtype {name} does not go with data of dtype {data.name}; "
            f"accepted are {', '.join(accepted)}"
        )
    return name


def _max_steps(given: int | None) -> int:
    if given is None:
        return _MAX_STEPS
    if not _is_finite_and_not_negative(given) or int(given) != given:
        raise ValueError(
            f"refined_solve: max_steps must be a count, got {_checks.described(given)}"
        )
    return int(given)


def _tolerance(given: float) -> float:
    if not _is_finite_and_not_negative(given):
        raise ValueError(
            f"refined_solve: tol must be finite and not negative, got {_checks.described(given)}"
        )
    return float(given)


def _is_finite_and_not_negative(given: Any) -> bool:
    known = _checks.python_value(given)
    return isinstance(known, int | float) and 0 <= known < math.inf


# Scaling. All by powers of two, which is exact.


def _near_one(size: Array) -> Array:
    """The power of two that brings a size near 1; 1 where that is not finite and positive.

    Its inverse is an ordinary number too: sizes at the ends of the range stay some way off.
    """
    form = _finfo(size.dtype)
    usable = (size > 0) & (size < jnp.inf)
    limit = 2.0 ** (form.maxexp - 4)
    inside = jnp.clip(jnp.where(usable, size, 1), 1 / limit, limit)
    return 1 / jax.lax.reduce_precision(inside, form.nexp, 0)


def _largest(x: Array, axis: int | tuple[int, ...]) -> Array:
    return jnp.max(jnp.abs(x), axis=axis, keepdims=True)


# The factor in the low precision.


def _round(x: Array, dtype: str) -> Array:
    """x rounded to the low precision, in the dtype that is computed in.

    16-bit formats are computed in float32. `reduce_precision` because a compiler may drop a pair
    of conversions.
    """
    if dtype not in ("float16", "bfloat16"):
        return x.astype(dtype)
    form = _finfo(dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), form.nexp, form.nmant)


def _scale(a: Array, triangle: str) -> Array:
    """The power of two, one per matrix, that brings its largest entry near 1.

    The largest entry of a definite matrix is on its diagonal.
    """
    size = _largest(_diagonal(a), -1) if triangle else _largest(a, (-2, -1))[..., 0]
    return _near_one(size)[..., 0]


def _diagonal(a: Array) -> Array:
    return jnp.real(jnp.diagonal(a, axis1=-2, axis2=-1))


def _low_factor(a: Array, *, triangle: str, dtype: str) -> Sequence[Array]:
    """Scaled matrices and their factors in the low precision.

    Args:
      triangle: "lower" or "upper", the triangle that is read of Hermitian matrices and holds their
        Cholesky factor; or "" for any matrices and LU.

    Returns:
      Factor, scaling of the rows, scaling of the columns, permutation of the rows, info. With
      scalings R and C and a brought near 1 as a whole, R a C is what was factored.
    """
    return _low_cholesky(a, triangle, dtype) if triangle else _low_lu(a, dtype)


def _low_cholesky(a: Array, triangle: str, dtype: str) -> Sequence[Array]:
    a = real_diagonal(a)
    near_one = _scale(a, triangle)[..., None]
    scale = _near_one(jnp.sqrt(_diagonal(a) * near_one)) * _TOP.get(dtype, 1) ** 0.5
    eye = jnp.eye(a.shape[-1], dtype=bool)

    def factor(shift: Any) -> Sequence[Array]:
        # From a each time: a scaled copy for the retries would be written always.
        scaled = times(a, near_one[..., None])
        scaled = times(times(scaled, scale[..., :, None]), scale[..., None, :])
        shifted = jnp.where(eye, times(scaled, jnp.asarray(1 + shift, scale.dtype)), scaled)
        factor, info = cholesky_op(
            _round(shifted, dtype), upper=triangle == "upper", symmetrize=False, accuracy="ieee"
        )
        return _round(factor, dtype), info

    def factor_the_rest(state: Any) -> Any:
        low, info, attempt = state
        shift = jnp.asarray(_SHIFTS, scale.dtype)[attempt] * float(_finfo(dtype).eps) / 2
        again, again_info = factor(shift)
        return (
            jnp.where((info > 0)[..., None, None], again, low),
            jnp.where(info > 0, again_info, info),
            attempt + 1,
        )

    low, info, _ = jax.lax.while_loop(
        lambda state: (state[1] > 0).any() & (state[2] < len(_SHIFTS)),
        factor_the_rest,
        (*factor(_SHIFTS[0]), jnp.int32(1)),
    )
    rows = jnp.broadcast_to(jnp.arange(a.shape[-1], dtype=jnp.int32), scale.shape)
    return low, scale, scale, rows, info


def _low_lu(a: Array, dtype: str) -> Sequence[Array]:
    a = times(a, _scale(a, "")[..., None, None])
    row = _near_one(_largest(a, -1))
    column = _near_one(_largest(times(a, row), -2))
    row = row * _TOP.get(dtype, 1)
    lu, _, rows, _ = lu_op(_round(times(times(a, row), column), dtype))
    lu = _round(lu, dtype)
    return lu, row[..., 0], column[..., 0, :], rows, bad_pivot(lu)


def _low_solve(factors: Sequence[Array], r: Array, *, triangle: str, transpose: bool) -> Array:
    """The solution of M z = r, where M is the matrix that the factor stands for.

    Each right-hand side is brought near 1 before it is rounded.
    """
    factor, row, column, rows = factors
    left, right = (column, row) if transpose else (row, column)
    scaled = times(r, left[..., None])
    near_one = _near_one(_largest(scaled, -2))
    low = times(scaled, near_one).astype(factor.dtype)
    if triangle:
        (z,) = cho_solve_op(factor, low, lower=triangle == "lower")
    else:
        z = substitute(factor, rows, low, transpose=transpose)
    return times(times(z.astype(r.dtype), 1 / near_one), right[..., None])


# Refinement.


class _State(NamedTuple):
    """Of each right-hand side: the best x so far, its residual and backward error, the steps taken,
    whether the last one did not halve the error, and whether it is refined further. And the number
    of the step to come, 0 for the first solve."""

    x: Array
    residual: Array
    error: Array
    steps: Array
    slow: Array
    active: Array
    number: Array


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
    if transpose:
        a = jnp.swapaxes(a, -1, -2)
    a_scale = _scale(a, triangle)
    b_scale = _near_one(_largest(b, -2))
    b = times(b, b_scale)
    residual_of = functools.partial(_residual, a, a_scale, triangle=triangle)
    ones = jnp.ones_like(b[..., :1])
    row_sums = -jnp.real(residual_of(ones, jnp.zeros_like(ones), absolute=True))
    a_norm = row_sums.max(-2)
    b_norm = _largest(b, -2)[..., 0, :]

    def backward_error(x: Array, residual: Array) -> Array:
        return _largest(residual, -2)[..., 0, :] / (a_norm * _largest(x, -2)[..., 0, :] + b_norm)

    low_solve = functools.partial(_low_solve, factors, triangle=triangle, transpose=transpose)

    def correction(state: _State) -> Array:
        if method == "ir":
            return low_solve(state.residual)

        def good_enough(d: Array, residual: Array) -> Array:
            return backward_error(state.x + d, residual) <= goal / 4

        count = jnp.where(state.number == 0, 1, _GMRES_STEPS)
        return _gmres(residual_of, low_solve, state.residual, good_enough, state.active, count)

    def step(state: _State) -> _State:
        x = state.x + correction(state)
        residual = residual_of(x, b)
        error = backward_error(x, residual)
        first = state.number == 0
        better = state.active & (first | (error < state.error))
        slow = error > state.error / 2
        return _State(
            x=jnp.where(better[..., None, :], x, state.x),
            residual=jnp.where(better[..., None, :], residual, state.residual),
            error=jnp.where(better, error, state.error),
            steps=jnp.where(state.active, state.number, state.steps),
            slow=slow,
            active=state.active
            & (error > goal)
            & (error < state.error)
            & ~(slow & (state.slow | (error <= tol)))
            & (state.number < max_steps),
            number=state.number + 1,
        )

    # A right-hand side of zeros has the solution zero, unless there is no factor.
    active = (b_norm != 0) | (info > 0)[..., None]
    start = _State(
        x=jnp.zeros_like(b),
        residual=b,
        error=jnp.where(active, jnp.inf, jnp.zeros_like(b_norm)),
        steps=jnp.zeros_like(b_norm, dtype=jnp.int32),
        slow=jnp.zeros_like(active),
        active=active,
        number=jnp.int32(0),
    )
    end = jax.lax.while_loop(lambda state: state.active.any(), step, start)
    x, error, rescued = end.x, end.error, jnp.zeros_like(active)

    if fallback:

        def rescue(x: Array, error: Array, info: Array) -> tuple[Array, Array, Array, Array]:
            scaled = times(real_diagonal(a) if triangle else a, a_scale[..., None, None])
            full, full_info = _full_solve(scaled, b, triangle)
            full_error = backward_error(full, residual_of(full, b))
            failed = ~(error <= tol)
            no_factor = (full_info > 0)[..., None]
            take = failed & (no_factor | (full_error < error) | jnp.isnan(error))
            return (
                jnp.where(take[..., None, :], full, x),
                jnp.where(take, full_error, error),
                take & ~no_factor,
                jnp.where(failed.any(-1), full_info, info),
            )

        x, error, rescued, info = jax.lax.cond(
            (~(error <= tol)).any(),
            rescue,
            lambda x, error, info: (x, error, rescued, info),
            x,
            error,
            info,
        )

    # Exact, but for what leaves the range of the dtype: that counts as error.
    of_all = a_scale[..., None, None]
    result = times(times(x, of_all), 1 / b_scale)
    again = times(times(result, b_scale), 1 / of_all)
    lost = _largest(again - x, -2) / _largest(x, -2)
    error = error + jnp.where((x == 0).all(-2), 0, lost[..., 0, :])
    return result, error <= tol, end.steps, error, rescued, info


def _full_solve(a: Array, b: Array, triangle: str) -> tuple[Array, Array]:
    """The direct solve in the data's precision."""
    if not triangle:
        return solve_gen_op(a, b)
    x, info = solve_pos_op(a, b, lower=triangle == "lower", accuracy="ieee")
    return x, info


def _residual(
    a: Array, scale: Array, x: Array, b: Array, *, triangle: str = "", absolute: bool = False
) -> Array:
    """b - scale a x, with |a| if absolute."""
    (r,) = residual_op(a, scale, x, b, triangle=triangle, absolute=absolute)
    return r


def _gmres(
    residual_of: Callable[[Array, Array], Array],
    precondition: Callable[[Array], Array],
    residual: Array,
    good_enough: Callable[[Array, Array], Array],
    active: Array,
    count: Array,
) -> Array:
    """The combination d of up to count preconditioned directions with the smallest residual.

    Flexible GMRES in the form of generalised conjugate residuals: directions z with a z
    orthonormal, each from the preconditioned residual so far. That a direction is inexact (it comes
    from the low precision) does not matter, since a z is computed in the data's precision. Each
    right-hand side has its own directions, the columns of arrays of shape ``(..., k, n, steps)``.
    """
    n = residual.shape[-2]
    size = min(n, _GMRES_STEPS)

    def each(x: Array) -> Array:
        """(..., n, k) -> (..., k, n, 1)."""
        return jnp.swapaxes(x, -1, -2)[..., None]

    def together(x: Array) -> Array:
        return jnp.swapaxes(x[..., 0], -1, -2)

    one = jnp.ones_like(jnp.real(residual[..., 0, :]))

    def minus(basis: Array, x: Array, y: Array) -> Array:
        """y - basis x."""
        return _residual(basis, one, x, y)

    def inner(basis: Array, x: Array) -> Array:
        """basis^H x."""
        rows = jnp.conj(jnp.swapaxes(basis, -1, -2))
        return -minus(rows, x, jnp.zeros_like(x[..., : basis.shape[-1], :]))

    def step(state: Any) -> Any:
        j, d, residual, directions, images, active = state
        z = precondition(residual)
        direction, image = each(z), each(-residual_of(z, jnp.zeros_like(z)))
        for _ in range(2):  # once leaves what rounding put there
            along = inner(images, image)
            direction, image = minus(directions, along, direction), minus(images, along, image)
        length = jnp.sqrt(jnp.real(inner(image, image)))
        inverse = jnp.where(length > 0, 1 / length, 0)
        direction, image = times(direction, inverse), times(image, inverse)
        along = inner(image, each(residual))
        use = active[..., None, :]
        d = jnp.where(use, together(minus(direction, -along, each(d))), d)
        residual = jnp.where(use, together(minus(image, along, each(residual))), residual)
        return (
            j + 1,
            d,
            residual,
            jax.lax.dynamic_update_slice_in_dim(directions, direction, j, axis=-1),
            jax.lax.dynamic_update_slice_in_dim(images, image, j, axis=-1),
            active & ~good_enough(d, residual),
        )

    def unfinished(state: Any) -> Any:
        return (state[0] < jnp.minimum(count, size)) & state[-1].any()

    none = jnp.zeros_like(each(residual))
    none = jnp.broadcast_to(none, (*none.shape[:-1], size))
    start = (jnp.int32(0), jnp.zeros_like(residual), residual, none, none, active)
    d: Array = jax.lax.while_loop(unfinished, step, start)[1]
    return d


# Derivatives: those of the solution. Factors are a means, and have none.


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


def _computed_in(dtype: str) -> Any:
    return jnp.dtype("float32" if dtype in ("float16", "bfloat16") else dtype)


def _real(dtype: Any) -> Any:
    return _finfo(dtype).dtype


low_factor_op = Operation(
    "low_factor",
    Rules(
        signature=lambda params: "(n,n)->(n,n),(n),(n),(n),()",
        paths=(lax(_low_factor),),
        jvp=_low_factor_jvp,
        result_dtypes=lambda params, data: (
            _computed_in(params["dtype"]),
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
