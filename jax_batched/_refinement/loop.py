"""Refinement: corrections of each right-hand side, until they gain no more."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_batched._refinement.gmres import STEPS, gmres
from jax_batched._refinement.system import System

Array = jax.Array


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


def refined(
    system: System,
    low_solve: Callable[[Array], Array],
    info: Array,
    *,
    method: str,
    max_steps: int,
    tol: float,
    goal: float,
) -> tuple[Array, Array, Array]:
    """x, backward error and steps of each right-hand side.

    Args:
      system: what is solved.
      low_solve: solves with the factor in the low precision.
      info: of each matrix, whether it has none.
      method: "ir" or "gmres".
      max_steps: most steps after the first solve.
      tol: a right-hand side with this error leaves when a step does not halve it.
      goal: a right-hand side with this error leaves.
    """

    def correction(state: _State) -> Array:
        if method == "ir":
            return low_solve(state.residual)

        def good_enough(d: Array, residual: Array) -> Array:
            return system.backward_error(state.x + d, residual) <= goal / 4

        count = jnp.where(state.number == 0, 1, STEPS)
        return gmres(system.residual, low_solve, state.residual, good_enough, state.active, count)

    def step(state: _State) -> _State:
        x = state.x + correction(state)
        residual = system.residual(x, system.b)
        error = system.backward_error(x, residual)
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
    active = (system.b_norm != 0) | (info > 0)[..., None]
    start = _State(
        x=jnp.zeros_like(system.b),
        residual=system.b,
        error=jnp.where(active, jnp.inf, jnp.zeros_like(system.b_norm)),
        steps=jnp.zeros_like(system.b_norm, dtype=jnp.int32),
        slow=jnp.zeros_like(active),
        active=active,
        number=jnp.int32(0),
    )
    end = jax.lax.while_loop(lambda state: state.active.any(), step, start)
    return end.x, end.error, end.steps
