"""Train an autoencoder with an optimizer that preconditions blocks of each layer: Shampoo.

The data are 1,797 images of handwritten digits (E. Alpaydin and C. Kaynak, UCI 1998), which ship
with the package `scikit-learn`. A network of six layers leads each image through eight numbers and
back. Its weights are divided into blocks of 32 x 32, those of all layers in one batch. Each block
has two statistics of its gradients, L and R, and its step is L^-1/4 G R^-1/4. So every step takes
the inverse fourth roots of 208 matrices by `jb.eigh_function`: one batched eigendecomposition.

The method is that of V. Gupta, T. Koren and Y. Singer, "Shampoo: preconditioned stochastic tensor
optimization" (2018), with blocks as in R. Anil et al., "Scalable second order optimization for deep
learning" (2020). It is an optax `GradientTransformation`, so it chains with others.

    pip install "jax_batched[examples]"
    python examples/optimizer.py

What to look at: the loss after as many steps as Adam, what a step costs, and how much of that are
the roots. Each optimizer has the best of five learning rates, by its loss in training; `vmap` runs
all five at once.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import matmul, median_time, print_table
from jax import Array
from matplotlib.figure import Figure

import jax_batched as jb

BLOCK = 32  # rows and columns of a block
WIDTHS = 64, 256, 128, 8, 128, 256, 64  # of the layers
BATCH = 128  # images of a step
DECAY = 0.95  # of the statistics, a step, chosen by hand; Adam has the same
EPSILON = 1e-6
HELD_OUT_FROM = 1437
BLUE, VERMILION = "#0072B2", "#D55E00"
RATES = 0.0003, 0.001, 0.003, 0.01, 0.03

Roots = Callable[[Array], Array]  # A -> A^-1/4 of each matrix of a batch


def inverse_fourth_root(a: Array) -> Array:
    """(A + epsilon I)^-1/4 of each matrix of a batch, none of which has negative eigenvalues."""
    return jb.eigh_function(a, lambda w: (jnp.maximum(w, 0) + EPSILON) ** -0.25)


def stock_roots(a: Array) -> Array:
    """The same with JAX's own functions."""
    w, v = jnp.linalg.eigh(a)
    roots = (jnp.maximum(w, 0) + EPSILON) ** -0.25
    return matmul(v * roots[..., None, :], v.mT)


def to_blocks(weights: Any) -> Array:
    """The blocks (blocks, BLOCK, BLOCK) of all matrices of a tree, with zeros at their ends."""
    blocks = []
    for matrix in jax.tree.leaves(weights):
        rows, columns = (-(-size // BLOCK) for size in matrix.shape)
        ends = [(0, -size % BLOCK) for size in matrix.shape]
        tiles = jnp.pad(matrix, ends).reshape(rows, BLOCK, columns, BLOCK)
        blocks.append(tiles.swapaxes(1, 2).reshape(-1, BLOCK, BLOCK))
    return jnp.concatenate(blocks)


def from_blocks(blocks: Array, like: Any) -> Any:
    """The tree of matrices whose blocks these are."""
    leaves, tree = jax.tree.flatten(like)
    matrices, begin = [], 0
    for leaf in leaves:
        rows, columns = (-(-size // BLOCK) for size in leaf.shape)
        tiles = blocks[begin : begin + rows * columns].reshape(rows, columns, BLOCK, BLOCK)
        matrix = tiles.swapaxes(1, 2).reshape(rows * BLOCK, columns * BLOCK)
        matrices.append(matrix[: leaf.shape[0], : leaf.shape[1]])
        begin += rows * columns
    return jax.tree.unflatten(tree, matrices)


class ShampooState(NamedTuple):
    """L and R of each block, one batch on top of the other: (2, blocks, BLOCK, BLOCK)."""

    statistics: Array


def scale_by_shampoo(roots: Roots) -> optax.GradientTransformation:
    """L^-1/4 G R^-1/4 of each block, with L and R the running means of G G^T and G^T G."""

    def init(params: Any) -> ShampooState:
        blocks = to_blocks(params)
        return ShampooState(jnp.zeros((2, *blocks.shape), blocks.dtype))

    def update(updates: Any, state: ShampooState, params: Any = None) -> tuple[Any, ShampooState]:
        del params
        g = to_blocks(updates)
        squares = jnp.stack([matmul(g, g.mT), matmul(g.mT, g)])
        statistics = DECAY * state.statistics + (1 - DECAY) * squares
        left, right = roots(statistics)
        return from_blocks(matmul(matmul(left, g), right), updates), ShampooState(statistics)

    return optax.GradientTransformation(init, update)


def adam(rate: Any) -> Any:
    """Adam, which forgets as fast as Shampoo."""
    return optax.adam(rate, b2=DECAY)


def shampoo(roots: Roots, rate: Any) -> Any:
    """Shampoo with momentum."""
    return optax.chain(scale_by_shampoo(roots), optax.trace(0.9), optax.scale(-rate))


def load_digits() -> tuple[Array, Array, Any]:
    """Images less their mean, for training and held out (images, 64), and the mean."""
    images = importlib.import_module("sklearn.datasets").load_digits().data / 16
    images = np.random.default_rng(0).permutation(images).astype(np.float32)
    training, held_out = images[:HELD_OUT_FROM], images[HELD_OUT_FROM:]
    mean = training.mean(axis=0)
    return jnp.asarray(training - mean), jnp.asarray(held_out - mean), mean


def first_weights() -> list[Array]:
    """Weights of each layer, such that signals keep their size."""
    shapes = list(itertools.pairwise(WIDTHS))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes, strict=True)
    return [jax.random.normal(key, shape, jnp.float32) * shape[0] ** -0.5 for key, shape in pairs]


def decode(weights: Sequence[Array], images: Array) -> Array:
    """Images that went through the network, and so through its narrowest layer."""
    x = images
    for layer in weights[:-1]:
        x = jnp.tanh(x @ layer)
    return x @ weights[-1]


def loss(weights: Sequence[Array], images: Array) -> Array:
    """The squared error of an image that went through the network, in the mean."""
    return jnp.mean(jnp.sum((decode(weights, images) - images) ** 2, axis=-1))


def step(
    optimizer: optax.GradientTransformation, images: Array, carry: Any, chosen: Array
) -> tuple[Any, Array]:
    """Weights and state after a step on some of the images, and the loss of these before it."""
    weights, state = carry
    value, gradient = jax.value_and_grad(loss)(weights, images[chosen])
    updates, state = optimizer.update(gradient, state, weights)
    return (optax.apply_updates(weights, updates), state), value


class Training(NamedTuple):
    """What came of a training."""

    rate: Any  # of learning
    weights: Any
    state: Any  # of the optimizer
    losses: Any  # of the images of each step
    final: Any  # loss of all images for training


@partial(jax.jit, static_argnums=(0, 3))
@partial(jax.vmap, in_axes=(None, 0, None, None))
def train(optimizer: Callable[[Any], Any], rate: Any, images: Array, steps: int) -> Training:
    """Train with each rate from the same weights with the same images in each step."""
    weights = first_weights()
    chosen = jax.random.randint(jax.random.key(1), (steps, BATCH), 0, len(images))
    start = weights, optimizer(rate).init(weights)
    (weights, state), losses = jax.lax.scan(partial(step, optimizer(rate), images), start, chosen)
    return Training(rate, weights, state, losses, loss(weights, images))


def best(trainings: Training) -> Training:
    """The training that ends with the smallest loss."""
    place = jnp.argmin(jnp.nan_to_num(trainings.final, nan=jnp.inf))
    return Training(*jax.tree.map(lambda x: x[place], tuple(trainings)))


def step_time(optimizer: Callable[[Any], Any], result: Training, images: Array) -> float:
    """The seconds of one step after a training."""
    one_step = jax.jit(partial(step, optimizer(result.rate), images))
    return median_time(one_step, (result.weights, result.state), jnp.arange(BATCH))


def draw(path: Path, results: dict[str, Training], images: Array, mean: Any) -> None:
    """Losses over steps, and some images before and after the networks."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    parts: Any = figure.subfigures(1, 2, width_ratios=[1.2, 1])
    left, right = parts
    axes = left.add_subplot()
    shown = {"image": images}
    for (name, result), colour in zip(results.items(), (VERMILION, BLUE), strict=True):
        losses = np.asarray(result.losses)
        axes.plot(losses, color=colour, alpha=0.25, linewidth=0.8)
        window = min(25, len(losses))
        smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        label = f"{name}, rate {float(result.rate):g}"
        axes.plot(np.arange(len(smooth)) + window / 2, smooth, color=colour, label=label)
        shown[name] = decode(result.weights, images)
    axes.set(xlabel="step", ylabel="squared error of an image of a step", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    panels = right.subplots(len(shown), len(images))
    for row, (name, pictures) in zip(panels, shown.items(), strict=True):
        for panel, picture in zip(row, pictures, strict=True):
            panel.imshow((picture + mean).reshape(8, 8), cmap="Greys", vmin=0, vmax=1)
            panel.set(xticks=[], yticks=[])
        row[0].set_ylabel(name)
    right.suptitle("held-out images, and what came out of the networks")
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, compare and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of each training")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="to choose from")
    parser.add_argument("--output", type=Path, default=Path("optimizer.png"), help="picture")
    options = parser.parse_args(arguments)

    images, held_out, mean = load_digits()
    optimizers = {"Adam": adam, "Shampoo": partial(shampoo, inverse_fourth_root)}
    rates = jnp.array(options.rates)
    begin = time.perf_counter()
    results = {
        name: best(train(optimizer, rates, images, options.steps))
        for name, optimizer in optimizers.items()
    }
    seconds = time.perf_counter() - begin

    statistics = results["Shampoo"].state[0].statistics
    times = {"a step, Adam": step_time(adam, results["Adam"], images)}
    for name, roots in (("jax_batched", inverse_fourth_root), ("stock JAX", stock_roots)):
        optimizer = partial(shampoo, roots)
        times[f"a step, Shampoo, {name}"] = step_time(optimizer, results["Shampoo"], images)
        times[f"its roots, {name}"] = median_time(jax.jit(roots), statistics)
    draw(options.output, results, held_out[:6], mean)
    print_table(
        "Digits from eight numbers",
        {
            "matrices whose roots are taken": f"{statistics[..., 0, 0].size} of {BLOCK} x {BLOCK}",
            "steps of each training": f"{options.steps}",
            **{
                f"{what}, {name}, rate {float(x.rate):g}": f"{float(value):.3f}"
                for name, x in results.items()
                for what, value in (("loss", x.final), ("held out", loss(x.weights, held_out)))
            },
            "all trainings, with compilation": f"{seconds:.1f} s",
            **{name: f"{1e3 * value:.2f} ms" for name, value in times.items()},
            "picture": str(options.output),
        },
    )


if __name__ == "__main__":
    main()
