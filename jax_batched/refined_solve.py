"""Solving in mixed precision: a cheap factor, refined to the accuracy of the data's dtype.

The way of a call: `low_factor_op` scales and factors each matrix in the low precision;
`refine_op` solves with that factor, refines, and measures what it returns. Both are primitives of
the library's factory, so that a batch made by `vmap` is the same program as one given as an array.
Their parts are in ``_refinement/``.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_batched import _checks
from jax_batched._refinement.operations import low_factor_op, refine_op
from jax_batched._refinement.scaling import diagonal, finfo, largest
from jax_batched._sizes import Sizes

Array = jax.Array

# Data's dtype -> accepted dtypes of the factor, the default first.
_FACTOR_DTYPES: dict[str, tuple[str, ...]] = {
    "float32": ("float32", "float16", "bfloat16"),
    "float64": ("float32", "float64", "float16", "bfloat16"),
    "complex64": ("complex64",),
    "complex128": ("complex64", "complex128"),
}
_METHODS = ("ir", "gmres")
_MAX_STEPS = 30


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
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
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
        partial pivoting.
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
      where: as in `triangular_solve`. Where it is False the information is zero too, but ``info``
        is -1.
      sizes: as in `triangular_solve`; ``info`` is -3 where a size is negative or too large. The
        default of tol goes by the n of the array.

    Returns:
      ``(x, info)``, x of b's shape with the broadcast batch dimensions, and a `RefinementInfo`. x
      is the iterate with the smallest backward error. It is NaN for a matrix that has no factor:
      not positive definite in the last precision that was tried. No other is affected. A matrix
      that is indefinite by less than the low precision's roundoff can pass for positive definite;
      a converged x then still solves ``a x = b``.

    Raises:
      TypeError: an operand is no array or has another dtype, or factor_dtype does not go with it; a
        flag is not True or False; where is not bool, sizes are no integers.
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
    unit = float(finfo(matrix.dtype).eps) / 2
    options: dict[str, Any] = {
        "triangle": ("lower" if lower else "upper") if assume_a == "pos" else "",
        "transpose": False,
        "method": method,
        "max_steps": _max_steps(max_steps),
        "tol": max(n, 8) * unit if tol is None else _tolerance(tol),
        "goal": 2 * unit if tol is None else _tolerance(tol),
        "fallback": _checks.flag("refined_solve", "fallback", fallback),
    }
    low = _factor_dtype(factor_dtype, matrix.dtype)
    batch = _checks.batch_of(matrix, columns)
    wanted = _checks.mask("refined_solve", where, batch)
    parts = Sizes("refined_solve", sizes, n, batch, where=wanted)
    if parts:
        matrix = _continued(parts, matrix, definite=assume_a == "pos")
        columns = parts.within(columns, -2)
    factors = low_factor_op(matrix, triangle=options["triangle"], dtype=low, where=wanted)
    x, *of_columns, info = refine_op(matrix, *factors, columns, where=wanted, **options)
    x, info = parts.within(x, -2), parts.info(info, 3)
    return _checks.drop_column(x, rhs), _per_matrix(*of_columns, info, empty=n == 0)


def _continued(parts: Sizes, a: Array, *, definite: bool) -> Array:
    """Matrices continued by a multiple of the identity, which changes neither their largest entry
    nor their norm: that of the backward error is the matrix's own."""
    own = parts.within(jax.lax.stop_gradient(a), -2, -1)
    size = largest(diagonal(own), -1)[..., 0] if definite else largest(own, (-2, -1))[..., 0, 0]
    usable = (size > 0) & (size < jnp.inf)
    return parts.continued(a, jnp.where(usable, size, jnp.ones_like(size))[..., None])


@functools.partial(jax.jit, static_argnames="empty")
def _per_matrix(
    converged: Array, steps: Array, error: Array, rescued: Array, info: Array, *, empty: bool
) -> RefinementInfo:
    """What became of all right-hand sides of a matrix, of which there may be none."""
    return RefinementInfo(
        converged=(info >= 0) & (True if empty else converged.all(-1)),
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
