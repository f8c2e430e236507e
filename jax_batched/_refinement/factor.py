"""A factor of each matrix in the low precision, and solves with it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_batched._matrix import real_diagonal, times
from jax_batched._refinement.scaling import diagonal, finfo, largest, rounded, scale_of, to_one
from jax_batched.cho_solve import cho_solve_op
from jax_batched.cholesky import cholesky_op
from jax_batched.lu import bad_pivot, lu_op, substitute

Array = jax.Array

# Scaled matrices have a diagonal near this: 1, and in float16 as much as leaves a factor of 8 to
# its largest number, so that as little as possible falls below its smallest.
_TOP = {"float16": 2.0**12}

# Shifts of the diagonal, relative, in units of the low precision's roundoff: a matrix takes the
# first with which it has a factor. The norm of n x n rounding errors is some 2 sqrt(n) of them.
_SHIFTS = (0.0, 2.0, 8.0, 32.0)


def low_factor(a: Array, *, triangle: str, dtype: str) -> Sequence[Array]:
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
    near_one = scale_of(a, triangle)[..., None]
    scale = to_one(jnp.sqrt(diagonal(a) * near_one)) * _TOP.get(dtype, 1) ** 0.5
    eye = jnp.eye(a.shape[-1], dtype=bool)

    def factor(shift: Any) -> Sequence[Array]:
        # From a each time: a scaled copy for the retries would be written always.
        scaled = times(a, near_one[..., None])
        scaled = times(times(scaled, scale[..., :, None]), scale[..., None, :])
        shifted = jnp.where(eye, times(scaled, jnp.asarray(1 + shift, scale.dtype)), scaled)
        factor, info = cholesky_op(
            rounded(shifted, dtype), upper=triangle == "upper", symmetrize=False, accuracy="ieee"
        )
        return rounded(factor, dtype), info

    def factor_the_rest(state: Any) -> Any:
        low, info, attempt = state
        shift = jnp.asarray(_SHIFTS, scale.dtype)[attempt] * float(finfo(dtype).eps) / 2
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
    a = times(a, scale_of(a, "")[..., None, None])
    row = to_one(largest(a, -1))
    column = to_one(largest(times(a, row), -2))
    row = row * _TOP.get(dtype, 1)
    lu, _, rows, _ = lu_op(rounded(times(times(a, row), column), dtype))
    lu = rounded(lu, dtype)
    return lu, row[..., 0], column[..., 0, :], rows, bad_pivot(lu)


def low_solve(factors: Sequence[Array], r: Array, *, triangle: str, transpose: bool) -> Array:
    """The solution of M z = r, where M is the matrix that the factor stands for.

    Each right-hand side is brought near 1 before it is rounded.
    """
    factor, row, column, rows = factors
    left, right = (column, row) if transpose else (row, column)
    scaled = times(r, left[..., None])
    near_one = to_one(largest(scaled, -2))
    low = times(scaled, near_one).astype(factor.dtype)
    if triangle:
        (z,) = cho_solve_op(factor, low, lower=triangle == "lower")
    else:
        z = substitute(factor, rows, low, transpose=transpose)
    return times(times(z.astype(r.dtype), 1 / near_one), right[..., None])
