"""Smooth a real time series with ill-conditioned kernel matrices, in three precisions.

The weekly concentration of CO2 at Mauna Loa (it ships with the package `statsmodels`) is cut into
windows of 64 weeks. A Gaussian process with a smooth kernel needs, for each window and each of
several levels of noise, the solution of a system whose condition number grows from a hundred to a
hundred million as the noise falls. All of them are one batch: solved in float32, in float64, and
by a float32 factor that is refined and measured.

    pip install "jax_batched[examples]"
    python examples/refinement.py

It prints a line for each level of noise and draws the backward error after each step, a line per
matrix, in `refinement.png`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import jax_batched as jb

WINDOW = 64
WINDOWS = 30
LENGTH = 8.0  # weeks
NOISES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)  # variance, of a signal of variance 1
STEPS = 7


def windows() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Times in weeks and concentrations without their mean, of shape (windows, weeks)."""
    frame = importlib.import_module("statsmodels.datasets.co2").load_pandas().data
    co2 = frame["co2"].to_numpy(float)
    week = np.flatnonzero(np.isfinite(co2))[: WINDOW * WINDOWS].reshape(WINDOWS, WINDOW)
    value = co2[week]
    return week.astype(float), value - value.mean(1, keepdims=True)


def kernel(week: jax.Array, noise: jax.Array) -> jax.Array:
    """The covariance of the observations of one window."""
    distance = (week[:, None] - week) / LENGTH
    return jnp.exp(-(distance**2) / 2) + noise * jnp.eye(len(week))


def extended_solve(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The solutions, by refinement in NumPy's extended precision."""
    inverse, wide = np.linalg.inv(a), a.astype(np.longdouble)
    x = np.zeros(b.shape, np.longdouble)
    for _ in range(10):
        residual = b - (wide * x[..., None, :, 0]).sum(-1)[..., None]
        x = x + inverse @ residual.astype(float)
    return x


def trace(a: jax.Array, b: jax.Array) -> np.ndarray[Any, Any]:
    """The backward error of each system after 0, 1, ... steps, without a rescue."""
    solve = partial(jb.refined_solve, fallback=False)
    return np.stack(
        [np.asarray(solve(a, b, max_steps=steps)[1].backward_error) for steps in range(STEPS + 1)]
    )


def draw(errors: np.ndarray[Any, Any], path: Path) -> None:
    """Backward error over steps: a colour for each level of noise, a line for each window."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    colours = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7")
    for i, (noise, colour) in enumerate(zip(NOISES, colours, strict=True)):
        lines = axes.plot(np.maximum(errors[:, i], 1e-18), color=colour, linewidth=0.8, alpha=0.6)
        lines[0].set_label(f"{noise:g}")
    axes.axhline(np.finfo(float).eps / 2, color="0.35", linestyle=(0, (5, 3)), linewidth=1.2)
    axes.set_yscale("log")
    axes.set_xlabel("refinement step")
    axes.set_ylabel("backward error (dashed: unit roundoff)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="noise")
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Solve, print and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("refinement.png"), help="the picture")
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)

    week, value = map(jnp.asarray, windows())
    per_window = jax.vmap(kernel, (0, None))
    a = jax.vmap(per_window, (None, 0))(week, jnp.asarray(NOISES))
    b = jnp.broadcast_to(value, (len(NOISES), *value.shape))[..., None]

    x, info = jax.jit(jb.refined_solve)(a, b)
    double = jb.solve(a, b, assume_a="pos")
    single = jb.solve(a.astype(jnp.float32), b.astype(jnp.float32), assume_a="pos")
    truth = extended_solve(np.asarray(a), np.asarray(b))

    def error(y: jax.Array) -> np.ndarray[Any, Any]:
        """The largest relative error of each level of noise; inf where a solve failed."""
        size = np.abs(np.asarray(y) - truth).max((-2, -1)) / np.abs(truth).max((-2, -1))
        return np.where(np.isfinite(size), size, np.inf).astype(float).max(1)

    columns = [np.median(np.linalg.cond(np.asarray(a)), 1), error(single), error(double), error(x)]
    print(f"{a.shape[0] * a.shape[1]} systems of {WINDOW} unknowns; errors: the largest")
    print(" noise   condition    float32    float64    refined   steps   converged   rescued")
    for i, noise in enumerate(NOISES):
        numbers = "".join(f"{column[i]:11.0e}" for column in columns)
        steps = np.asarray(info.steps[i])
        print(
            f"{noise:6g} {numbers}   {steps.min():>2}-{steps.max():<2}"
            f"{int(info.converged[i].sum()):9}/{WINDOWS}{int(info.rescued[i].sum()):7}/{WINDOWS}"
        )
    draw(trace(a, b), options.output)
    print(f"picture {options.output}")


if __name__ == "__main__":
    main()
