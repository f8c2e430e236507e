"""Batches of matrices of different sizes, packed without padding."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_batched import _checks
from jax_batched._matrix import spoilt

Array = jax.Array
_BUCKETS = (8, 16, 32, 64, 128, 256, 512)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RaggedBatch:
    """Matrices of different sizes, the elements of one after those of another in one vector.

    A pytree, in which sizes may be traced; the length of ``values`` and ``shape`` are static.
    `jax.vmap` maps over it as over its arrays.

    Attributes:
      values: elements, of shape ``(total,)``; those of a matrix by rows, without gaps.
      sizes: rows and columns of each matrix, int32 of shape ``(..., 2)`` with any batch dimensions.
      offsets: where in values each matrix begins, integers of shape ``(...)``.
      shape: rows and columns of the matrices that `unpack` returns.

    A matrix with a size that is negative or larger than ``shape``, or that does not lie in values,
    is NaN when it is unpacked; no other is affected.
    """

    values: Array
    sizes: Any
    offsets: Any
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @classmethod
    def from_list(cls, matrices: Sequence[ArrayLike]) -> "RaggedBatch":
        """Matrices of any sizes, in their common dtype; their sizes are NumPy's.

        Raises:
          TypeError: one of them is no array.
          ValueError: one of them is no matrix, or there is none.
        """
        if len(matrices) == 0:
            raise ValueError("RaggedBatch.from_list: there is no matrix")
        named: dict[str, Any] = {f"matrix {i}": x for i, x in enumerate(matrices)}
        arrays, _ = _checks.operands("RaggedBatch.from_list", keep_stored=True, **named)
        for name, x in zip(named, arrays, strict=True):
            if x.ndim != 2:
                raise ValueError(
                    f"RaggedBatch.from_list: {name} must have shape (m, n), got {x.shape}"
                )
        sizes = np.array([x.shape for x in arrays], np.int32)
        values = jnp.concatenate([x.reshape(-1) for x in arrays])
        shape = int(sizes[:, 0].max()), int(sizes[:, 1].max())
        return cls(values, sizes, _offsets(sizes, shape, values.size), shape)

    @classmethod
    def pack(
        cls, padded: ArrayLike, sizes: Sequence[ArrayLike], *, total: int | None = None
    ) -> "RaggedBatch":
        """The leading parts of matrices.

        Args:
          padded: matrices of shape ``(..., m, n)``. What is beyond their sizes counts for nothing.
          sizes: a pair ``(m, n)`` of integers, of shapes that broadcast to the batch dimensions.
          total: length of ``values``; by default what the sizes need, if these are traced what
            padded has. What is left is zero; matrices beyond it are lost.

        Raises:
          TypeError: padded is no array or has another dtype; sizes are no pair of integers.
          ValueError: padded is not a batch of matrices, or sizes have another shape.
        """
        (whole,), _ = _checks.operands("RaggedBatch.pack", keep_stored=True, padded=padded)
        _checks.matrix("RaggedBatch.pack", "padded", whole)
        if not isinstance(sizes, tuple | list) or len(sizes) != 2:
            raise TypeError(
                f"RaggedBatch.pack: sizes must be a tuple (m, n), got {_checks.described(sizes)}"
            )
        batch, shape = whole.shape[:-2], (whole.shape[-2], whole.shape[-1])

        def each(xp: Any) -> Any:
            pair = [_checks.sizes("RaggedBatch.pack", x, batch) for x in sizes]
            return xp.stack([xp.broadcast_to(x, batch) for x in pair], -1)

        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(sizes)):
            both, needed = each(jnp), whole.size
        else:
            with jax.ensure_compile_time_eval():
                both = each(np)
            needed = int(_counts(both, shape).clip(0).sum())
        offsets = _offsets(both, shape, whole.size)
        values = jnp.zeros(needed if total is None else total, whole.dtype)
        return cls(values, both, offsets, shape)._with(whole)

    def unpack(self) -> Array:
        """Matrices of shape ``(..., *shape)``, zero beyond their sizes."""
        places, wrong = self._places()
        x = self.values.at[places].get(mode="fill", fill_value=0, unique_indices=True)
        return spoilt(x, wrong)

    def to_list(self) -> list[Array]:
        """The matrices, in the order of the batch. Sizes must be known, and in range."""
        sizes, offsets = (_known("RaggedBatch.to_list", x) for x in (self.sizes, self.offsets))
        pairs = zip(sizes.reshape(-1, 2).tolist(), offsets.reshape(-1).tolist(), strict=True)
        return [self.values[at : at + m * n].reshape(m, n) for (m, n), at in pairs]

    def map(self, f: Callable[..., Any], *others: "RaggedBatch") -> Any:
        """f of the padded matrices of this batch and others, and of their sizes.

        It is called as the functions of this library are, ``f(a, *others, sizes=sizes)``: with the
        number of rows of each matrix; if ``shape`` is not square, with a pair of rows and columns.
        A matrix that is not square has the size -1 in a square ``shape``. Results of the shape of
        the last operand become batches with its sizes; others, as ``info``, stay arrays.

        The padded matrices are in memory while f is computed.
        """
        operands = (self, *others)
        in_pairs = self.shape[0] != self.shape[1]
        results = f(*(x.unpack() for x in operands), sizes=self._sizes_of_call(in_pairs))
        last = operands[-1]
        whole = (*jnp.shape(last.offsets), *last.shape)
        return jax.tree.map(lambda x: last._with(x) if x.shape == whole else x, results)

    def map_buckets(self, f: Callable[..., Any], *others: "RaggedBatch") -> Any:
        """As `map`, with matrices of similar sizes at a time.

        f is called with all matrices of up to 8 rows and columns, then with those of up to 16, and
        so on, padded to that size. So sizes must be known when the program is traced: values alone
        may be traced. Results that are no such matrices must have one element for each of them.
        """
        operands = (self, *others)
        sizes = [_known("RaggedBatch.map_buckets", x.sizes).reshape(-1, 2) for x in operands]
        batch, last = np.shape(self.offsets), operands[-1]
        bucket = np.array([_bucket(x) for x in sizes[0].max(-1, initial=0)], int)
        if bucket.size == 0:
            return self.map(f, *others)
        values: dict[int, Array] = {}
        numbers: dict[int, Array] = {}
        for size in np.unique(bucket):
            group = np.flatnonzero(bucket == size)
            first = self._part(group, size, size)
            parts = [first]
            for x, own in zip(others, sizes[1:], strict=True):
                rows, columns = (_bucket(y) for y in own[group].max(0, initial=0))
                parts.append(x._part(group, max(rows, first.shape[0]), columns))
            sizes_of_call = first._sizes_of_call(in_pairs=self.shape[0] != self.shape[1])
            results = f(*(x.unpack() for x in parts), sizes=sizes_of_call)
            leaves, tree = jax.tree.flatten(results)
            for i, x in enumerate(leaves):
                if x.shape == (group.size, *parts[-1].shape):
                    values[i] = parts[-1]._with(x, values.get(i)).values
                elif x.shape == group.shape:
                    former = numbers.get(i, jnp.zeros(bucket.size, x.dtype))
                    numbers[i] = former.at[group].set(x)
                else:
                    raise ValueError(
                        f"RaggedBatch.map_buckets: a result of shape {x.shape} is neither like the "
                        "last operand nor one number for each matrix"
                    )
        whole = [
            dataclasses.replace(last, values=values[i])
            if i in values
            else numbers[i].reshape(batch)
            for i in range(len(leaves))
        ]
        return jax.tree.unflatten(tree, whole)

    def _part(self, group: Any, rows: int, columns: int) -> "RaggedBatch":
        """Some of the matrices, to be unpacked to no more rows and columns than these."""
        m, n = self.shape
        sizes = jnp.asarray(self.sizes).reshape(-1, 2)[group]
        offsets = jnp.asarray(self.offsets).reshape(-1)[group]
        return RaggedBatch(self.values, sizes, offsets, (min(m, int(rows)), min(n, int(columns))))

    def _with(self, padded: Array, values: Array | None = None) -> "RaggedBatch":
        """The same batch with the elements of other matrices; what is in no matrix stays."""
        if values is None:
            values = jnp.zeros(self.values.shape, padded.dtype)
        places, _ = self._places()
        filled = values.at[places].set(padded, mode="drop", unique_indices=True)
        return dataclasses.replace(self, values=filled)

    def _places(self) -> tuple[Array, Array]:
        """Of each element of the padded matrices its place in values, a number beyond if it has
        none; and, to go with these, which matrices are wrong."""
        sizes, offsets = jnp.asarray(self.sizes), jnp.asarray(self.offsets)
        total, (m, n) = self.values.shape[-1], self.shape
        counts = _counts(sizes, self.shape)
        wrong = (counts < 0) | (offsets < 0) | (offsets > total - counts)
        i, j = jnp.arange(m, dtype=offsets.dtype)[:, None], jnp.arange(n, dtype=offsets.dtype)[None]
        i, j = (x.reshape(*[1] * offsets.ndim, *x.shape) for x in (i, j))
        rows, columns = (sizes[..., k, None, None].astype(offsets.dtype) for k in (0, 1))
        inside = (i < rows) & (j < columns) & ~wrong[..., None, None]
        shape = (*offsets.shape, m, n)
        beyond = jnp.arange(offsets.size * m * n, dtype=offsets.dtype).reshape(shape) + total
        places = offsets[..., None, None] + i * columns + j
        return jnp.where(inside, places, beyond), wrong[..., None, None]

    def _sizes_of_call(self, in_pairs: bool) -> Any:
        rows, columns = self.sizes[..., 0], self.sizes[..., 1]
        if in_pairs:
            return rows, columns
        return jnp.where(rows == columns, rows, -1)


def _bucket(size: int) -> int:
    """The size that matrices of this size are padded to."""
    return next((x for x in _BUCKETS if x >= size), int(size))


def _known(what: str, x: Any) -> Any:
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{what}: sizes must be known when the program is traced")
    return np.asarray(x)


def _counts(sizes: Any, shape: tuple[int, int]) -> Any:
    """How many elements each matrix has; -1 where a size is out of range."""
    rows, columns = sizes[..., 0], sizes[..., 1]
    wrong = (rows < 0) | (columns < 0) | (rows > shape[0]) | (columns > shape[1])
    return (np if isinstance(sizes, np.ndarray) else jnp).where(wrong, -1, rows * columns)


def _offsets(sizes: Any, shape: tuple[int, int], most: int) -> Any:
    """Where matrices begin that follow each other; those with a size out of range have no place."""
    wide = 2 * most >= 2**31  # places beyond all elements are numbered too
    if wide and not jax.config.jax_enable_x64:
        raise ValueError("RaggedBatch: so many elements need jax_enable_x64")
    counts = _counts(sizes, shape).clip(0).astype(np.int64 if wide else np.int32)
    ends = counts.reshape(-1).cumsum(dtype=counts.dtype)
    return (ends - counts.reshape(-1)).reshape(counts.shape)
