"""Precondition conjugate gradients with the diagonal blocks of a finite-element matrix.

The matrix is that of an elastic bar, which ships with the package `pyamg`. Its unknowns are grouped
as they hang together (aggregates, of different sizes), and the block of each group is factored:
block Jacobi. Factorization, and the solves with all factors in each step, are one compiled program.

    pip install "jax_batched[examples]"
    python examples/sparse_blocks.py

It prints the number of steps with and without the blocks and the time of the factorizations, with
padding and by buckets of sizes, and draws the residual after each step in `sparse_blocks.png`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import median_time
from matplotlib.figure import Figure

import jax_batched as jb

TOLERANCE = 1e-10  # of the residual, relative to the right-hand side
COPIES = 50  # of the blocks, for the times


def problem(name: str) -> tuple[Any, list[np.ndarray[Any, Any]]]:
    """A symmetric positive definite sparse matrix, and the unknowns of each of its aggregates."""
    matrix = importlib.import_module("pyamg.gallery").load_example(name)["A"].tocsr()
    strength = importlib.import_module("pyamg.strength").symmetric_strength_of_connection(matrix, 0)
    aggregation = importlib.import_module("pyamg.aggregation")
    columns = aggregation.standard_aggregation(strength)[0].tocsc()
    groups = np.split(columns.indices, columns.indptr[1:-1])
    alone = np.setdiff1d(np.arange(matrix.shape[0]), columns.indices)
    return matrix, [np.sort(group) for group in (*groups, *alone[:, None]) if len(group)]


def padded_indices(groups: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The unknowns of each group, and zeros beyond them."""
    indices = np.zeros((len(groups), max(map(len, groups))), np.int32)
    for row, group in zip(indices, groups, strict=True):
        row[: len(group)] = group
    return indices


def conjugate_gradients(
    product: Callable[[jax.Array], jax.Array],
    precondition: Callable[[jax.Array], jax.Array],
    b: jax.Array,
    steps: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, the relative residual after 0, 1, ... steps (NaN after the last), how many there were."""
    size = jnp.linalg.norm(b)

    def step(state: Any) -> Any:
        x, r, p, rz, history, k = state
        q = product(p)
        alpha = rz / (p @ q)
        x, r = x + alpha * p, r - alpha * q
        z = precondition(r)
        former, rz = rz, r @ z
        history = history.at[k + 1].set(jnp.linalg.norm(r) / size)
        return x, r, z + rz / former * p, rz, history, k + 1

    def goes_on(state: Any) -> jax.Array:
        history, k = state[-2:]
        more: jax.Array = (history[k] > TOLERANCE) & (k < steps)
        return more

    z = precondition(b)
    history = jnp.full(steps + 1, jnp.nan).at[0].set(1)
    start = jnp.zeros_like(b), b, z, b @ z, history, jnp.int32(0)
    x, _, _, _, history, k = jax.lax.while_loop(goes_on, step, start)
    return x, history, k


@partial(jax.jit, static_argnames=("steps", "with_blocks"))
def solve(
    entries: tuple[jax.Array, jax.Array, jax.Array],
    blocks: jb.RaggedBatch,
    indices: jax.Array,
    b: jax.Array,
    *,
    steps: int,
    with_blocks: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Conjugate gradients, with the blocks factored once and applied in each step, or without."""
    rows, columns, values = entries
    sizes = jnp.asarray(blocks.sizes)[:, 0]
    factors = jb.cho_factor(blocks.unpack(), lower=True, sizes=sizes)

    def product(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values * x[columns], rows, b.size)

    def precondition(r: jax.Array) -> jax.Array:
        z = jb.cho_solve(factors, r[indices][..., None], sizes=sizes)[..., 0]
        return jnp.zeros_like(r).at[indices].add(z)

    return conjugate_gradients(product, precondition if with_blocks else lambda r: r, b, steps)


def draw(histories: dict[str, np.ndarray[Any, Any]], path: Path) -> None:
    """Relative residuals over steps."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for (label, history), colour in zip(histories.items(), ("#D55E00", "#0072B2"), strict=True):
        axes.semilogy(history, color=colour, label=label)
    axes.set_xlabel("step of conjugate gradients")
    axes.set_ylabel("residual, relative")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Solve, print and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--matrix", default="bar", help="the name of an example of pyamg")
    parser.add_argument("--output", type=Path, default=Path("sparse_blocks.png"), help="picture")
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)

    matrix, groups = problem(options.matrix)
    blocks = jb.RaggedBatch.from_list([matrix[group][:, group].toarray() for group in groups])
    sizes = [len(group) for group in groups]
    entries = matrix.tocoo()
    system = tuple(map(jnp.asarray, (entries.row, entries.col, entries.data)))
    b = np.random.default_rng(0).standard_normal(matrix.shape[0])
    print(f"{matrix.shape[0]} unknowns, {len(groups)} blocks of {min(sizes)} to {max(sizes)}")
    histories = {}
    for label, with_blocks in (("without", False), ("with blocks", True)):
        x, history, steps = solve(
            system, blocks, padded_indices(groups), b, steps=10 * b.size, with_blocks=with_blocks
        )
        error = np.linalg.norm(b - matrix @ np.asarray(x)) / np.linalg.norm(b)
        print(f"{label:12} {int(steps):5} steps, residual {error:.0e}")
        histories[label] = np.asarray(history)[: int(steps) + 1]

    many = jb.RaggedBatch.from_list(blocks.to_list() * COPIES)

    def factor(values: jax.Array, by: str) -> jax.Array:
        batch = jb.RaggedBatch(values, many.sizes, many.offsets, many.shape)
        factors: jb.RaggedBatch = getattr(batch, by)(jb.cholesky)
        return factors.values

    padded, buckets = (
        median_time(jax.jit(partial(factor, by=by)), many.values) for by in ("map", "map_buckets")
    )
    print(f"{COPIES} times all blocks, padded: {padded * 1e3:.1f} ms; buckets: {buckets * 1e3:.1f}")
    draw(histories, options.output)
    print(f"picture {options.output}")


if __name__ == "__main__":
    main()
