"""Factorizations and solves of matrices beyond the kernels' range, made of smaller ones.

A matrix is divided into blocks. The diagonal blocks of a Cholesky factor, the panels of an LU
factorization (all rows of a block's columns) and substitutions with one block are this library's
kernels. The rest is XLA's matrix products, in the full precision of the dtype. A `Plan` says how;
the public operations have theirs from a table, `CHOICES`.

The three variants of a factorization differ in when the products are taken:
- "right": a step subtracts its own product from all that is to come;
- "left": a step subtracts all products so far from its block of columns;
- "bordered": the same from its block of rows; an LU, whose pivots need all rows of a column, takes
  a block of columns and one of rows, as Crout did.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_batched._core import Call, Path, beyond
from jax_batched._matrix import adjoint, matmul, mean_with, take_rows

Array = jax.Array

VARIANTS = ("right", "left", "bordered")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a matrix is divided.

    Attributes:
      blocks: the size of a block, of the blocks that it is divided into in turn, and so on.
      variant: one of `VARIANTS`.
      batched: a product is one call for the batch, otherwise one for each matrix.
    """

    blocks: tuple[int, ...]
    variant: str = "left"
    batched: bool = True

    def __str__(self) -> str:
        words = [self.variant, ",".join(map(str, self.blocks))]
        words += ["each"] * (not self.batched)
        return " ".join(words)

    @property
    def within(self) -> "Plan | None":
        """How a block is divided; None: it is not."""
        return dataclasses.replace(self, blocks=self.blocks[1:]) if self.blocks[1:] else None

    def ranges(self, n: int) -> list[tuple[int, int]]:
        """Where each block begins and ends: of nearly one size, in whole vectors."""
        count = -(-n // self.blocks[0])
        size = -(-n // (8 * count)) * 8
        return [(j, min(j + size, n)) for j in range(0, n, size)]

    def product(self, a: Array, b: Array) -> Array:
        """The products of two blocks of each matrix."""
        if self.batched or a.ndim == 2:
            return matmul(a, b)
        batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        pairs = [jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b)]
        each = [x.reshape(-1, *x.shape[-2:]) for x in pairs]
        products = jnp.stack([matmul(x, y) for x, y in zip(*each, strict=True)])
        return products.reshape(*batch, *products.shape[-2:])


# Substitution.


def triangular_solve(
    a: Array,
    b: Array,
    plan: Plan,
    solve: Callable[..., Sequence[Array]],
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    conjugate_a: bool,
    unit_diagonal: bool,
) -> Array:
    """``op(a) x = b`` or ``x op(a) = b``: each block less the products with those before it.

    Args:
      a, b, flags: as in `jax_batched.triangular_solve`.
      plan: how a is divided; of one variant, "left".
      solve: the same with one block.
    """
    flags: dict[str, Any] = {
        "left_side": left_side,
        "lower": lower,
        "transpose_a": transpose_a,
        "conjugate_a": conjugate_a,
        "unit_diagonal": unit_diagonal,
    }
    n = a.shape[-1]
    if n <= plan.blocks[0]:
        if plan.within is not None:
            return triangular_solve(a, b, plan.within, solve, **flags)
        return solve(a, b, **flags)[0]

    def op(rows: slice, columns: slice) -> Array:
        part = a[..., columns, rows] if transpose_a else a[..., rows, columns]
        part = jnp.conj(part) if conjugate_a else part
        return jnp.swapaxes(part, -1, -2) if transpose_a else part

    forward = (lower != transpose_a) == left_side
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    x = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    for j, k in plan.ranges(n) if forward else reversed(plan.ranges(n)):
        own, done = slice(j, k), slice(0, j) if forward else slice(k, n)
        place = (..., own, slice(None)) if left_side else (..., slice(None), own)
        part = x[place]
        if done.start < done.stop:
            if left_side:
                part = part - plan.product(op(own, done), x[..., done, :])
            else:
                part = part - plan.product(x[..., done], op(done, own))
        block = dataclasses.replace(plan, blocks=(plan.blocks[1:] or (k - j,)))
        x = x.at[place].set(triangular_solve(a[..., own, own], part, block, solve, **flags))
    return x


# Cholesky.


@dataclasses.dataclass(frozen=True)
class Hermitian:
    """A Hermitian matrix of which one triangle is read, or the mean of both (upper=None)."""

    a: Array
    upper: bool | None

    def part(self, rows: slice, columns: slice) -> Array:
        """Rows and columns of the lower triangle."""
        if self.upper is False:
            return self.a[..., rows, columns]
        turned = jnp.swapaxes(self.a[..., columns, rows], -1, -2)
        if self.upper:
            return jnp.conj(turned)
        return mean_with(self.a[..., rows, columns], turned)


def cholesky(
    a: Hermitian,
    plan: Plan,
    factor: Callable[[Array], Sequence[Array]],
    solve: Callable[..., Sequence[Array]],
) -> tuple[Array, Array]:
    """The lower factors, and the number of the first pivot that is not positive.

    From that one's block on, the factor of such a matrix is NaN.

    Args:
      a: the matrices.
      plan: how they are divided.
      factor: the same of one block, of which the lower triangle is read.
      solve: a triangular solve with one block.
    """
    n = a.a.shape[-1]
    whole = slice(0, n)
    if n <= plan.blocks[0]:
        if plan.within is not None:
            return cholesky(a, plan.within, factor, solve)
        lower, info = factor(a.part(whole, whole))
        return lower, info

    inner = dataclasses.replace(plan, blocks=plan.blocks[1:] or plan.blocks)

    def solved(block: Array, b: Array, plan: Plan) -> Array:  # b L^-H
        flags = {"transpose_a": True, "conjugate_a": jnp.iscomplexobj(block)}
        return triangular_solve(
            block, b, plan, solve, left_side=False, lower=True, unit_diagonal=False, **flags
        )

    right = plan.variant == "right"
    result = a.part(whole, whole) if right else jnp.zeros_like(a.a)
    info = jnp.zeros(a.a.shape[:-2], jnp.int32)
    for j, k in plan.ranges(n):
        own, before, below, rest = slice(j, k), slice(0, j), slice(k, n), slice(j, n)
        if right:
            column = result[..., rest, own]
        elif plan.variant == "left":
            column = a.part(rest, own)
            if j > 0:
                done = result[..., rest, before]
                column = column - plan.product(done, adjoint(done[..., : k - j, :]))
        else:
            column = a.part(own, own)
            if j > 0:
                row = solved(result[..., before, before], a.part(own, before), plan)
                result = result.at[..., own, before].set(row)
                column = column - plan.product(row, adjoint(row))
        block, failed = cholesky(Hermitian(column[..., : k - j, :], False), inner, factor, solve)
        result = result.at[..., own, own].set(block)
        info = jnp.where((info == 0) & (failed > 0), failed + j, info)
        if k == n or plan.variant == "bordered":
            continue
        panel = solved(block, column[..., k - j :, :], inner)
        result = result.at[..., below, own].set(panel)
        if right:
            for c, d in plan.ranges(n - k):
                update = plan.product(panel[..., c:, :], adjoint(panel[..., c:d, :]))
                result = result.at[..., k + c :, k + c : k + d].add(-update)
    return result, info


# LU.


def lu(
    a: Array,
    plan: Plan,
    panel: Callable[[Array], Sequence[Array]],
    solve: Callable[..., Sequence[Array]],
) -> tuple[Array, Array, Array]:
    """L and U in one matrix, the exchanges and the permutation of the rows.

    Args:
      a: matrices of any shape.
      plan: how they are divided.
      panel: the same of all rows of a block's columns.
      solve: a triangular solve with one block.
    """
    m, n = a.shape[-2:]

    def solved(block: Array, b: Array, plan: Plan) -> Array:  # L^-1 b
        flags = {"transpose_a": False, "conjugate_a": False}
        return triangular_solve(
            block, b, plan, solve, left_side=True, lower=True, unit_diagonal=True, **flags
        )

    if n > m:
        factors, pivots, order = lu(a[..., :m], plan, panel, solve)
        further = solved(factors, take_rows(a[..., m:], order), plan)
        return jnp.concatenate([factors, further], -1), pivots, order
    if n <= plan.blocks[0]:
        if plan.within is not None:
            return lu(a, plan.within, panel, solve)
        factors, pivots, order, *_ = panel(a)
        return factors, pivots, order

    inner = dataclasses.replace(plan, blocks=plan.blocks[1:] or plan.blocks)
    right = plan.variant == "right"
    result = a if right else jnp.zeros_like(a)
    order = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32), a.shape[:-1])
    exchanges: list[Array] = []
    for j, k in plan.ranges(n):
        own, before, below, rest = slice(j, k), slice(0, j), slice(k, n), slice(j, m)
        w = k - j
        if right:
            column = result[..., rest, own]
        else:
            column = take_rows(a[..., own], order)
            if j > 0 and plan.variant == "left":
                top = solved(result[..., before, before], column[..., before, :], plan)
                result = result.at[..., before, own].set(top)
            column = column[..., rest, :]
            if j > 0:
                top = result[..., before, own]
                column = column - plan.product(result[..., rest, before], top)
        factors, exchanged, moved = lu(column, inner, panel, solve)
        exchanges.append(exchanged + j)
        order = order.at[..., rest].set(jnp.take_along_axis(order[..., rest], moved, -1))
        for others in (before, below) if right else (before,):
            if others.start < others.stop:
                turned = take_rows(result[..., rest, others], moved)
                result = result.at[..., rest, others].set(turned)
        result = result.at[..., rest, own].set(factors)
        if k == n or plan.variant == "left":
            continue
        block = factors[..., :w, :]
        if right:
            row = solved(block, result[..., own, below], inner)
            result = result.at[..., own, below].set(row)
            update = plan.product(factors[..., w:, :], row)
            result = result.at[..., k:, below].add(-update)
        else:
            row = take_rows(a[..., below], order[..., own])
            if j > 0:
                row = row - plan.product(result[..., own, before], result[..., before, below])
            result = result.at[..., own, below].set(solved(block, row, inner))
    return result, jnp.concatenate(exchanges, -1), order


# Which operations are blocked.


class Choice(NamedTuple):
    """Calls that one plan serves.

    Attributes:
      platform, operation: of the calls.
      dtypes: of the data.
      sizes: smallest and largest n.
      batch: the fewest matrices, of which JAX's own routine takes one after the other.
      plan: None: the operation's kernel, which has no limit on the CPU.
      columns: the most right-hand sides; None: any number.
    """

    platform: str
    operation: str
    dtypes: tuple[str, ...]
    sizes: tuple[int, int]
    batch: int
    plan: Plan | None
    columns: int | None = None

    def serves(self, call: Call) -> bool:
        """Whether a call is one of these."""
        return (
            call.platform == self.platform
            and call.dtype.name in self.dtypes
            and self.sizes[0] <= call.sizes["n"] <= self.sizes[1]
            and call.sizes.get("m", call.sizes["n"]) == call.sizes["n"]
            and (self.columns is None or call.sizes["k"] <= self.columns)
            and isinstance(call.batch, int)
            and call.batch >= self.batch
        )


_SINGLE, _DOUBLE = ("float32",), ("float64",)
_REAL = _SINGLE + _DOUBLE

# As measured: docs/performance.md, docs/internals/measurements.md.
CHOICES: tuple[Choice, ...] = (
    Choice("cpu", "cholesky", _REAL, (513, 1024), 2, None),
    Choice("cpu", "cholesky", _SINGLE, (1025, 1535), 4, Plan((512,))),
    Choice("cpu", "cholesky", _DOUBLE, (1400, 1535), 4, Plan((512,))),
    Choice("cpu", "cholesky", _REAL, (1536, 2048), 2, Plan((512,))),
    Choice("cpu", "lu", _REAL, (513, 768), 2, None),
    Choice("cpu", "lu", _SINGLE, (769, 1024), 2, None),
    Choice("cpu", "lu", _SINGLE, (1025, 2048), 2, Plan((256,), "bordered")),
    Choice("cpu", "lu", _DOUBLE, (1400, 2048), 2, Plan((256,), "bordered")),
    Choice("cpu", "triangular_solve", _REAL, (513, 999), 2, Plan((256,)), columns=16),
    Choice("cpu", "triangular_solve", _REAL, (1000, 2048), 2, Plan((256,)), columns=64),
    Choice("cuda", "cholesky", _REAL, (1000, 2048), 4, Plan((128,))),
    Choice("cuda", "cholesky", _REAL, (2049, 4096), 4, Plan((256,))),
    Choice("cuda", "lu", _REAL, (1000, 2048), 4, Plan((128,), "bordered")),
    Choice("cuda", "lu", _SINGLE, (2049, 4096), 8, Plan((128,), "bordered")),
    Choice("cuda", "lu", _DOUBLE, (2049, 4096), 16, Plan((128,), "bordered")),
)


def paths(operation: str, compute: Callable[..., Sequence[Array]]) -> tuple[Path, ...]:
    """The paths of an operation beyond the range of its kernels; `compute` takes a plan."""
    return tuple(
        beyond(
            None if choice.plan is None else functools.partial(compute, plan=choice.plan),
            choice.serves,
        )
        for choice in CHOICES
        if choice.operation == operation
    )


def composed_paths(operation: str, compute: Callable[..., Sequence[Array]]) -> tuple[Path, ...]:
    """Those of an operation made of others, where the named one of these has such paths."""
    return tuple(beyond(compute, x.serves) for x in CHOICES if x.operation == operation)
