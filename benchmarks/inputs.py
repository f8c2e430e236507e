"""Random, well-conditioned operands, made on the device from a seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

MAX_SETS = 32


def uniform(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Entries of absolute value at most 1, in the real or the complex plane."""
    if np.issubdtype(np.dtype(dtype), np.complexfloating):
        real = np.dtype(dtype).type(0).real.dtype
        parts = jax.random.uniform(key, (2, *shape), real, -(0.5**0.5), 0.5**0.5)
        return jax.lax.complex(parts[0], parts[1])
    return jax.random.uniform(key, shape, dtype, -1.0, 1.0)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def spd(key: jax.Array, dtype: str, n: int, nrhs: int, batch: int) -> jax.Array:
    """Hermitian matrices; the diagonal exceeds the sum of its row, so they are definite."""
    a = uniform(key, (batch, n, n), dtype)
    return (a + a.mT.conj()) / 2 + (n + 1) * jnp.eye(n, dtype=dtype)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def general(key: jax.Array, dtype: str, n: int, nrhs: int, batch: int) -> jax.Array:
    """Matrices whose pivots are known: those of row k come from row k + 1, the last from the first.

    The cost of LU does not depend on where the pivots are.
    """
    a = uniform(key, (batch, n, n), dtype) / (n + 1) + 2 * jnp.eye(n, dtype=dtype)
    return jnp.roll(a, 1, axis=-2)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def dense(key: jax.Array, dtype: str, n: int, nrhs: int, batch: int) -> jax.Array:
    """Matrices of independent entries."""
    return uniform(key, (batch, n, n), dtype)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def rhs(key: jax.Array, dtype: str, n: int, nrhs: int, batch: int) -> jax.Array:
    """Right-hand sides, a matrix of nrhs columns for each system."""
    return uniform(jax.random.fold_in(key, 1), (batch, n, nrhs), dtype)


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def sizes(key: jax.Array, dtype: str, n: int, nrhs: int, batch: int) -> jax.Array:
    """m, n and k of each product, uniform from 1 to n."""
    return jax.random.randint(jax.random.fold_in(key, 2), (batch, 3), 1, n + 1, jnp.int32)


def _sized(fold: int, axes: tuple[int, int]) -> Callable[..., jax.Array]:
    """Matrices with zeros beyond two of their product's sizes."""

    @partial(jax.jit, static_argnums=(1, 2, 3, 4))
    def make(key: jax.Array, dtype: str, n: int, nrhs: int, batch: int) -> jax.Array:
        rows, columns = (sizes(key, dtype, n, nrhs, batch)[:, axis, None] for axis in axes)
        own = (jnp.arange(n) < rows)[..., None] & (jnp.arange(n) < columns)[:, None]
        return jnp.where(own, uniform(jax.random.fold_in(key, fold), (batch, n, n), dtype), 0)

    return make


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def continued_spd(key: jax.Array, dtype: str, n: int, nrhs: int, batch: int) -> jax.Array:
    """Definite matrices of `sizes`, k of each, continued by the identity as stock JAX needs it."""
    own = jnp.arange(n) < sizes(key, dtype, n, nrhs, batch)[:, 2, None]
    inside = own[..., None] & own[:, None]
    return jnp.where(inside, spd(key, dtype, n, nrhs, batch), jnp.eye(n, dtype=dtype))


@jax.jit
def lower_factor(a: jax.Array) -> jax.Array:
    """Lower Cholesky factors, with zeros above the diagonal."""
    wide = a.astype(jnp.promote_types(a.dtype, jnp.float32))
    return jax.lax.linalg.cholesky(wide, symmetrize_input=False).astype(a.dtype)


@jax.jit
def hermitian(a: jax.Array) -> jax.Array:
    """Hermitian matrices with eigenvalues of both signs."""
    return (a + a.mT.conj()) / 2


@jax.jit
def tall(a: jax.Array) -> jax.Array:
    """A half and its opposite below: twice as many rows, and the same pivots."""
    return jnp.concatenate([a, -a / 2], axis=-2)


@jax.jit
def very_tall(a: jax.Array) -> jax.Array:
    """Eight times as many rows."""
    return jnp.concatenate([jnp.roll(a, i, axis=-1) / (i + 1) for i in range(8)], axis=-2)


MAKERS: dict[str, Callable[[jax.Array, str, int, int, int], jax.Array]] = {
    "spd": spd,
    "general": general,
    "dense": dense,
    "rhs": rhs,
    "sizes": sizes,
    "continued_spd": continued_spd,
    "left": _sized(3, (0, 2)),
    "right": _sized(4, (2, 1)),
}
DERIVED: dict[str, tuple[str, Callable[[jax.Array], jax.Array]]] = {
    "factor": ("spd", lower_factor),
    "hermitian": ("dense", hermitian),
    "tall": ("general", tall),
    "tall_rhs": ("rhs", tall),
    "very_tall": ("general", very_tall),
}


def is_rhs(role: str) -> bool:
    """Whether an operand is made of right-hand sides."""
    return "rhs" in (role, DERIVED.get(role, ("",))[0])


def matrix_bytes(dtype: str, m: int, n: int, batch: int) -> int:
    """The size of a batch of m x n matrices."""
    return batch * m * n * np.dtype(dtype).itemsize


def filling(dtype: str, n: int, target_bytes: int) -> int:
    """How many n x n matrices fill so much memory, at least one."""
    return max(1, target_bytes // matrix_bytes(dtype, n, n, 1))


class Inputs:
    """The operands of one (dtype, n, batch), each made once and shared by all operations.

    A batch that is small beside `target_bytes` comes in several sets with distinct values, to be
    used in turn, so that no call finds its operands in a cache where the last one left them.
    """

    def __init__(self, dtype: str, n: int, batch: int, target_bytes: int, seed: int = 0):
        self.dtype, self.n, self.batch = dtype, n, batch
        sets = target_bytes // max(1, matrix_bytes(dtype, n, n, batch))
        self._keys = jax.random.split(jax.random.key(seed), min(max(1, sets), MAX_SETS))
        self._made: dict[tuple[str, int], list[jax.Array]] = {}

    def sets(self, roles: tuple[str, ...], nrhs: int) -> list[tuple[jax.Array, ...]]:
        """The operands named by `roles`: a list of sets, each a tuple in that order."""
        return list(zip(*(self._operand(role, nrhs) for role in roles), strict=True))

    def _operand(self, role: str, nrhs: int) -> list[jax.Array]:
        """One operand, for every set."""
        nrhs = nrhs if is_rhs(role) else 0
        name = (role, nrhs)
        if name not in self._made:
            if role in DERIVED:
                source, derive = DERIVED[role]
                arrays = [derive(array) for array in self._operand(source, nrhs)]
            else:
                make = MAKERS[role]
                arrays = [make(key, self.dtype, self.n, nrhs, self.batch) for key in self._keys]
            self._made[name] = jax.block_until_ready(arrays)
        return self._made[name]
