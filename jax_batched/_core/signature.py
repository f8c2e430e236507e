"""Core dimensions of an operation, and the moves between batch dimensions and columns."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
CoreDims = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Signature:
    """Core dimensions of operands and results, and whether some of them are columns."""

    operands: tuple[CoreDims, ...]
    results: tuple[CoreDims, ...]
    has_columns: bool = True

    @classmethod
    @functools.cache
    def parse(cls, text: str, has_columns: bool = True) -> "Signature":
        """Reads ``"(n,n),(n,k)->(n,k),()"``."""

        def side(part: str) -> tuple[CoreDims, ...]:
            groups = part.strip()[1:-1].split("),(")
            return tuple(tuple(d for d in group.split(",") if d) for group in groups)

        operands, results = text.split("->")
        return cls(side(operands), side(results), has_columns)

    @property
    def columns(self) -> tuple[int, str] | None:
        """The last operand with a core dimension of its own, and that dimension's name."""
        if not self.has_columns:
            return None
        for i, dims in reversed(list(enumerate(self.operands))):
            others = {d for j, o in enumerate(self.operands) if j != i for d in o}
            own = [d for d in dims if d not in others]
            if own and sum(len(o) > 0 for o in self.operands) > 1:
                return i, own[0]
        return None


def at_least(least: int, size: Any) -> bool:
    """Whether a size, which may be symbolic in an exported program, is known to be as large."""
    try:
        return bool(size >= least)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def smaller(m: Any, n: Any) -> Any:
    """min(m, n) of sizes, which may be symbolic."""
    return jax.core.min_dim(m, n)


def fold(x: Array, dims: Sequence[int], column: int) -> Array:
    """Moves batch dimensions into the core dimension `column` (counted from the end)."""
    target = x.ndim + column
    moved = jnp.moveaxis(x, dims, range(target - len(dims), target))
    first = target - len(dims)
    shape = (*moved.shape[:first], math.prod(moved.shape[first : target + 1]))
    return moved.reshape(*shape, *moved.shape[target + 1 :])


def unfold(x: Array, dims: Sequence[int], sizes: Sequence[int], column: int) -> Array:
    """Inverse of `fold`."""
    position = x.ndim + column
    rest = x.shape[position] // math.prod(sizes)
    split = x.reshape(*x.shape[:position], *sizes, rest, *x.shape[position + 1 :])
    return jnp.moveaxis(split, range(position, position + len(dims)), dims)


def insert_broadcast(x: Array, dims: Sequence[int], sizes: Sequence[int]) -> Array:
    expanded = jax.lax.expand_dims(x, dims)
    shape = list(expanded.shape)
    for d, size in zip(dims, sizes, strict=True):
        shape[d] = size
    return jnp.broadcast_to(expanded, shape)


def broadcast_batch(name: str, batches: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    batch = list(batches[0])
    for other in batches[1:]:
        for d, size in enumerate(other):
            if batch[d] == 1:
                batch[d] = size
            elif size != 1 and size != batch[d]:
                raise ValueError(f"{name}: batch shapes {list(batches)} do not broadcast")
    return tuple(batch)
