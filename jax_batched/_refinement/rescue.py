"""The direct solve, in the data's precision, of what did not converge."""

import jax
import jax.numpy as jnp

from jax_batched._refinement.system import System
from jax_batched.solve import solve_gen_op, solve_pos_op

Array = jax.Array


def rescue(
    system: System, x: Array, error: Array, info: Array, tol: float
) -> tuple[Array, Array, Array, Array]:
    """The better of x and the direct solution, its error, whether it is that one, and info.

    Where all right-hand sides converged, nothing is computed.
    """

    def direct(x: Array, error: Array, info: Array) -> tuple[Array, Array, Array, Array]:
        full, full_info = _full_solve(system.scaled(), system.b, system.triangle)
        full_error = system.backward_error(full, system.residual(full, system.b))
        failed = ~(error <= tol)
        no_factor = (full_info > 0)[..., None]
        take = failed & (no_factor | (full_error < error) | jnp.isnan(error))
        return (
            jnp.where(take[..., None, :], full, x),
            jnp.where(take, full_error, error),
            take & ~no_factor,
            jnp.where(failed.any(-1), full_info, info),
        )

    none = jnp.zeros_like(error, dtype=bool)
    better: tuple[Array, Array, Array, Array] = jax.lax.cond(
        (~(error <= tol)).any(),
        direct,
        lambda x, error, info: (x, error, none, info),
        x,
        error,
        info,
    )
    return better


def _full_solve(a: Array, b: Array, triangle: str) -> tuple[Array, Array]:
    """x and info of a direct solve."""
    if not triangle:
        x, info = solve_gen_op(a, b)
        return x, info
    x, info = solve_pos_op(a, b, lower=triangle == "lower", accuracy="ieee")
    return x, info
