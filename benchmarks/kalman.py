"""A square-root Kalman filter of many series, whose time is QR factorizations of R alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STEPS = 16

Array = Any  # of JAX or NumPy


def series(transition: Array) -> Array:
    """Something to observe, of shape (steps, ..., n): the rows of the transitions in turn."""
    n = transition.shape[-1]
    return jnp.stack([transition[..., t % n, :] for t in range(STEPS)])


def square_root_filter(
    triangle: Callable[[Array], Array], solve: Callable[[Array, Array], Array], transition: Array
) -> Array:
    """The logarithm of the likelihood of x' = F x + w, y = x + v with unit noise, for each series.

    The covariance is S^T S. Both steps are triangles of what is stacked:
      (S F^T; I) -> S,    (I 0; S S) -> (X Y; 0 S),    mean += Y^T X^-T (y - mean).

    Args:
      triangle: R of each matrix of a batch.
      solve: X, y -> X^-T y.
      transition: F, of shape (..., n, n).
    """
    n = transition.shape[-1]
    eye = jnp.broadcast_to(jnp.eye(n, dtype=transition.dtype), transition.shape)
    zeros = jnp.zeros_like(eye)

    def step(
        state: tuple[Array, Array, Array], y: Array
    ) -> tuple[tuple[Array, Array, Array], None]:
        mean, s, likelihood = state
        mean = (transition @ mean[..., None])[..., 0]
        s = triangle(jnp.concatenate([s @ transition.mT, eye], axis=-2))
        stacked = jnp.concatenate(
            [jnp.concatenate([eye, zeros], axis=-1), jnp.concatenate([s, s], axis=-1)], axis=-2
        )
        r = triangle(stacked)
        x, gain = r[..., :n, :n], r[..., :n, n:]
        u = solve(x, (y - mean)[..., None])
        mean = mean + (gain.mT @ u)[..., 0]
        spread = jnp.log(jnp.abs(jnp.diagonal(x, axis1=-2, axis2=-1))).sum(-1)
        likelihood = likelihood - spread - 0.5 * jnp.sum(u * u, axis=(-2, -1))
        return (mean, r[..., n:, n:], likelihood), None

    start = (zeros[..., 0], eye, zeros[..., 0, 0])
    (_, _, likelihood), _ = jax.lax.scan(step, start, series(transition))
    return likelihood


def plain_filter(transition: np.ndarray) -> np.ndarray:
    """The same with covariances, in NumPy."""
    n = transition.shape[-1]
    eye = np.eye(n)
    mean, p = np.zeros(transition.shape[:-1]), np.broadcast_to(eye, transition.shape)
    likelihood = np.zeros(transition.shape[:-2])
    for t in range(STEPS):
        mean = (transition @ mean[..., None])[..., 0]
        p = transition @ p @ transition.mT + eye
        innovation = p + eye
        e = (transition[..., t % n, :] - mean)[..., None]
        weighted = np.linalg.solve(innovation, e)
        likelihood = likelihood - 0.5 * (
            np.linalg.slogdet(innovation)[1] + (e.mT @ weighted)[..., 0, 0]
        )
        mean = mean + (p @ weighted)[..., 0]
        p = p - p @ np.linalg.solve(innovation, p)
    return likelihood
