"""Flexible GMRES: corrections from the low precision, combined in that of the data."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_batched._matrix import times
from jax_batched._refinement.system import scaled_residual

Array = jax.Array

# Corrections of one step of method "gmres".
STEPS = 16


def gmres(
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
    size = min(n, STEPS)

    def each(x: Array) -> Array:
        """(..., n, k) -> (..., k, n, 1)."""
        return jnp.swapaxes(x, -1, -2)[..., None]

    def together(x: Array) -> Array:
        return jnp.swapaxes(x[..., 0], -1, -2)

    one = jnp.ones_like(jnp.real(residual[..., 0, :]))

    def minus(basis: Array, x: Array, y: Array) -> Array:
        """y - basis x."""
        return scaled_residual(basis, one, x, y)

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
