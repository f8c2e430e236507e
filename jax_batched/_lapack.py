"""JAX's own routines, as the `lax` paths call them.

Where LAPACK calls on a batch block (jaxlib 0.10), the CPU takes its matrices one after the other: a
call on one matrix runs where it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_batched._core._jax import LAPACK_BATCHES_BLOCK, align_varying_axes
from jax_batched._core.signature import at_least

Array = jax.Array


def cholesky(a: Array) -> Array:
    """The lower factor of Hermitian matrices, of which the lower triangle is read."""
    (factor,) = _call(lambda a: (jax.lax.linalg.cholesky(a, symmetrize_input=False),), a)
    return factor


def triangular_solve(a: Array, b: Array, **options: bool) -> Array:
    """`jax.lax.linalg.triangular_solve` of operands with equal batch dimensions."""
    (x,) = _call(lambda a, b: (jax.lax.linalg.triangular_solve(a, b, **options),), a, b)
    return x


def lu(a: Array) -> tuple[Array, Array, Array]:
    """L and U in one matrix, the exchanges and the permutation of the rows."""
    factors, pivots, rows = _call(lambda a: tuple(jax.lax.linalg.lu(a)), a)
    return factors, pivots, rows


def qr(a: Array, *, full_matrices: bool) -> tuple[Array, Array]:
    """Q and R."""
    q, r = _call(lambda a: tuple(jax.lax.linalg.qr(a, full_matrices=full_matrices)), a)
    return q, r


def geqrf(a: Array) -> tuple[Array, Array]:
    """R with the vectors of the reflections below its diagonal, and their factors."""
    turned, taus = _call(lambda a: tuple(jnp.linalg.qr(a, mode="raw")), a)
    return jnp.swapaxes(turned, -1, -2), taus


def eigh(a: Array) -> tuple[Array, Array]:
    """Eigenvectors and eigenvalues of Hermitian matrices, of which the lower triangle is read."""
    v, w = _call(lambda a: tuple(jax.lax.linalg.eigh(a, symmetrize_input=False)), a)
    return v, w


def svd(a: Array, *, full_matrices: bool, compute_uv: bool) -> Sequence[Array]:
    """s, U and V^H; s alone without compute_uv."""

    def routine(a: Array) -> Sequence[Array]:
        if not compute_uv:
            return (jax.lax.linalg.svd(a, full_matrices=full_matrices, compute_uv=False),)
        u, s, vh = jax.lax.linalg.svd(a, full_matrices=full_matrices, compute_uv=True)
        return s, u, vh

    return _call(routine, a)


def _call(routine: Callable[..., Sequence[Array]], *operands: Array) -> Sequence[Array]:
    """The results of a routine on matrices with equal batch dimensions."""
    if not LAPACK_BATCHES_BLOCK:
        return routine(*operands)
    results: Sequence[Array] = jax.lax.platform_dependent(
        *operands, cpu=lambda *xs: _one_at_a_time(routine, *xs), default=routine
    )
    return results


def _one_at_a_time(routine: Callable[..., Sequence[Array]], *operands: Array) -> Sequence[Array]:
    batch = operands[0].shape[:-2]
    matrices = [x.reshape(-1, *x.shape[-2:]) for x in operands]
    count = matrices[0].shape[0]
    if not at_least(1, count):  # an exported program for any batch: a slice must fit an empty one
        matrices = [jnp.concatenate([x, jnp.zeros((1, *x.shape[1:]), x.dtype)]) for x in matrices]

    def step(i: Any, results: Sequence[Array]) -> Sequence[Array]:
        one = [jax.lax.dynamic_slice_in_dim(x, i, 1) for x in matrices]
        return [
            jax.lax.dynamic_update_slice_in_dim(x, part, i, axis=0)
            for x, part in zip(results, routine(*one), strict=True)
        ]

    shapes = jax.eval_shape(routine, *matrices)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in shapes]
    start = align_varying_axes([*zeros, *matrices])[: len(zeros)]
    results = jax.lax.fori_loop(0, count, step, start)
    return tuple(x[:count].reshape(*batch, *x.shape[1:]) for x in results)
