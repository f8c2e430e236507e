"""JAX's own routines, as the `lax` paths call them.

jaxlib 0.10's LAPACK calls on a batch block a thread of XLA's pool until other tasks of the same
pool are done: two of them at a time can wait for each other for ever. A call on one matrix runs
where it is. So with that jaxlib the CPU takes the matrices of a batch one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.version import __version__ as _jaxlib_version

Array = jax.Array

_BATCHES_BLOCK = tuple(map(int, _jaxlib_version.split(".")[:2])) < (0, 11)


def cholesky(a: Array) -> Array:
    """The lower factor of Hermitian matrices, of which the lower triangle is read."""
    (factor,) = _call(lambda a: (jax.lax.linalg.cholesky(a, symmetrize_input=False),), a)
    return factor


def triangular_solve(a: Array, b: Array, **options: bool) -> Array:
    """`jax.lax.linalg.triangular_solve` of operands with equal batch dimensions."""
    (x,) = _call(lambda a, b: (jax.lax.linalg.triangular_solve(a, b, **options),), a, b)
    return x


def lu(a: Array) -> tuple[Array, Array]:
    """L and U in one matrix, and the permutation of the rows."""

    def routine(a: Array) -> Sequence[Array]:
        factors, _, rows = jax.lax.linalg.lu(a)
        return factors, rows

    factors, rows = _call(routine, a)
    return factors, rows


def _call(routine: Callable[..., Sequence[Array]], *operands: Array) -> Sequence[Array]:
    """The results of a routine on matrices with equal batch dimensions."""
    if not _BATCHES_BLOCK:
        return routine(*operands)
    results: Sequence[Array] = jax.lax.platform_dependent(
        *operands, cpu=lambda *xs: _one_at_a_time(routine, *xs), default=routine
    )
    return results


def _one_at_a_time(routine: Callable[..., Sequence[Array]], *operands: Array) -> Sequence[Array]:
    batch = operands[0].shape[:-2]
    matrices = [x.reshape(-1, *x.shape[-2:]) for x in operands]

    def step(i: Any, results: Sequence[Array]) -> Sequence[Array]:
        one = [jax.lax.dynamic_slice_in_dim(x, i, 1) for x in matrices]
        return [
            jax.lax.dynamic_update_slice_in_dim(x, part, i, axis=0)
            for x, part in zip(results, routine(*one), strict=True)
        ]

    shapes = jax.eval_shape(routine, *matrices)
    start = [jnp.zeros(x.shape, x.dtype) for x in shapes]
    results = jax.lax.fori_loop(0, matrices[0].shape[0], step, start)
    return tuple(x.reshape(*batch, *x.shape[1:]) for x in results)
