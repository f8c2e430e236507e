"""What is solved: a system near 1, its residuals and its backward errors."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_batched._matrix import real_diagonal, times
from jax_batched._refinement.scaling import largest, scale_of, to_one
from jax_batched.residual import residual_op

Array = jax.Array


def scaled_residual(
    a: Array, scale: Array, x: Array, b: Array, *, triangle: str = "", absolute: bool = False
) -> Array:
    """b - scale a x, with |a| if absolute."""
    (r,) = residual_op(a, scale, x, b, triangle=triangle, absolute=absolute)
    return r


class System(NamedTuple):
    """``s a y = t b`` for ``a x = b``: scales s and t bring both sides near 1, and ``x = s y / t``.

    Attributes:
      a: the matrices, not scaled.
      a_scale: s, one for each matrix.
      b: t b.
      b_scale: t, one for each right-hand side.
      a_norm: largest sum of the moduli of a row of s a.
      b_norm: largest modulus of each t b.
      triangle: which triangle of Hermitian matrices is read, or "" for any matrices.
    """

    a: Array
    a_scale: Array
    b: Array
    b_scale: Array
    a_norm: Array
    b_norm: Array
    triangle: str

    def residual(self, y: Array, b: Array) -> Array:
        """b - s a y, with any b."""
        return scaled_residual(self.a, self.a_scale, y, b, triangle=self.triangle)

    def backward_error(self, y: Array, residual: Array) -> Array:
        """Of each right-hand side; see `RefinementInfo`."""
        left = largest(residual, -2)[..., 0, :]
        return left / (self.a_norm * largest(y, -2)[..., 0, :] + self.b_norm)

    def scaled(self) -> Array:
        """s a. A Hermitian matrix has a real diagonal."""
        a = real_diagonal(self.a) if self.triangle else self.a
        return times(a, self.a_scale[..., None, None])

    def solution(self, y: Array, error: Array) -> tuple[Array, Array]:
        """x, and its backward error from that of y.

        Exact, but for what leaves the range of the dtype: that counts as error.
        """
        of_all = self.a_scale[..., None, None]
        x = times(times(y, of_all), 1 / self.b_scale)
        again = times(times(x, self.b_scale), 1 / of_all)
        lost = largest(again - y, -2) / largest(y, -2)
        return x, error + jnp.where((y == 0).all(-2), 0, lost[..., 0, :])


def scaled_system(a: Array, b: Array, triangle: str) -> System:
    """The system of a and b."""
    a_scale = scale_of(a, triangle)
    b_scale = to_one(largest(b, -2))
    b = times(b, b_scale)
    ones = jnp.ones_like(b[..., :1])
    zeros = jnp.zeros_like(ones)
    negative = scaled_residual(a, a_scale, ones, zeros, triangle=triangle, absolute=True)
    a_norm = (-jnp.real(negative)).max(-2)
    return System(a, a_scale, b, b_scale, a_norm, largest(b, -2)[..., 0, :], triangle)
