"""Rebuild a real terrain, with error bars, from one in twenty of its heights.

The terrain is the elevation model of the Jacksboro fault (Tennessee, 344 x 403 points) that ships
with `matplotlib`. Ordinary kriging estimates the height of each point, and the standard deviation
of that estimate, from the 32 nearest samples. Each of the 138,632 points is a 32 x 32 system of its
own. The covariance's three parameters come first. They maximise the likelihood of 2,048
neighbourhoods of samples; its gradient runs through as many Cholesky factorizations at each step.

The method is that of N. Cressie, "Statistics for Spatial Data" (1993), chapter 3. The likelihood is
the composite one of F. C. Curriero and S. Lele, J. Agric. Biol. Environ. Stat. 4 (1999).

    pip install "jax_batched[kriging]"
    python examples/kriging.py

What to look at: the picture's last row. The true error is about as large as the computed standard
deviation says, and smaller than that of linear interpolation.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # type: ignore[import-untyped]
from _common import matmul, median_time, print_table
from jax import Array
from matplotlib import colormaps
from matplotlib.cbook import get_sample_data
from matplotlib.figure import Figure
from PIL import Image

import jax_batched as jb

SHARE = 0.05  # of the points are samples
NEIGHBOURS = 32  # of each point
BATCH = 2048  # neighbourhoods in the likelihood, and points that are estimated at a time

NumPyArray = np.ndarray[Any, Any]


class LinearAlgebra(NamedTuple):
    """The functions that factor and solve."""

    cholesky: Callable[[Array], Array]
    solve_triangular: Callable[[Array, Array], Array]
    solve: Callable[[Array, Array], Array]


OURS = LinearAlgebra(
    jb.cholesky,
    partial(jb.solve_triangular, lower=True),
    partial(jb.solve, assume_a="pos"),
)
STOCK = LinearAlgebra(
    jnp.linalg.cholesky,
    partial(jax.scipy.linalg.solve_triangular, lower=True),
    partial(jax.scipy.linalg.solve, assume_a="pos"),
)


class Model(NamedTuple):
    """What the covariance of two heights depends on."""

    length: Array  # km
    variance: Array  # of the terrain around its local mean, m^2
    nugget: Array  # variance of what is not continuous: noise, and the rounding to metres


class Samples(NamedTuple):
    """Where the terrain is known."""

    points: Array  # (count, 2), km
    heights: Array  # (count,), m


class Terrain(NamedTuple):
    """The estimate at every point, and the model behind it."""

    mean: Array
    variance: Array
    model: Model
    evaluations: int  # of the likelihood


def covariance(model: Model, a: Array, b: Array) -> Array:
    """Matern covariances of smoothness 3/2 between the points a (m, 2) and b (n, 2)."""
    north, east = jnp.moveaxis(a[:, None] - b, -1, 0)
    r = jnp.sqrt(3 * (north**2 + east**2)) / model.length
    return model.variance * (1 + r) * jnp.exp(-r)


def system(model: Model, near: Array) -> Array:
    """The covariance matrix of the heights of one neighbourhood."""
    return covariance(model, near, near) + model.nugget * jnp.eye(len(near))


def log_likelihood(matrix: Array, heights: Array, linalg: LinearAlgebra) -> Array:
    """The log likelihood of all differences between the heights, which no mean changes.

    With y = L^-1 z, e = L^-1 1: log det L + (y.y - (y.e)^2 / e.e + log e.e) / 2, negative.
    """
    factor = linalg.cholesky(matrix)
    white = linalg.solve_triangular(factor, jnp.stack([heights, jnp.ones_like(heights)], -1))
    (yy, ye), (_, ee) = matmul(white.T, white)
    return -jnp.log(jnp.diagonal(factor)).sum() - (yy - ye**2 / ee + jnp.log(ee)) / 2


def krige(
    model: Model, samples: Samples, point: Array, near: Array, linalg: LinearAlgebra
) -> tuple[Array, Array]:
    """The height of one point from the samples near it: its mean and variance.

    Of all weights w that sum to one, C w = c + m 1 makes the error's variance smallest.
    """
    near_points, heights = samples.points[near], samples.heights[near]
    c = covariance(model, near_points, point[None])[:, 0]
    right_sides = jnp.stack([c, jnp.ones_like(c)], -1)
    simple, ones = linalg.solve(system(model, near_points), right_sides).T
    multiplier = (1 - simple.sum()) / ones.sum()
    weights = simple + multiplier * ones
    variance = model.variance + model.nugget - matmul(weights, c) + multiplier
    return matmul(weights, heights), variance


def neighbours(samples: Samples, points: Array) -> Array:
    """The indices of the samples nearest to each point, (points, NEIGHBOURS)."""
    tree = scipy.spatial.cKDTree(samples.points)
    return jnp.asarray(tree.query(points, NEIGHBOURS, workers=-1)[1], np.int32)


def model_of(parameters: Array) -> Model:
    """The model of any three numbers: its nugget may be zero, the others may not."""
    log_length, log_variance, noise = parameters
    return Model(jnp.exp(log_length), jnp.exp(log_variance), noise**2)


@partial(jax.jit, static_argnames="linalg")
@jax.value_and_grad
def misfit(parameters: Array, points: Array, heights: Array, linalg: LinearAlgebra) -> Array:
    """Minus the mean log likelihood of many neighbourhoods."""
    model = model_of(parameters)

    def of_one(points: Array, heights: Array) -> Array:
        return log_likelihood(system(model, points), heights, linalg)

    return -jax.vmap(of_one)(points, heights).mean()


def fit(samples: Samples, linalg: LinearAlgebra) -> tuple[Model, int]:
    """The most likely model, and how often the likelihood was evaluated."""
    near = neighbours(samples, samples.points[:BATCH])
    found = scipy.optimize.minimize(
        lambda x: misfit(x, samples.points[near], samples.heights[near], linalg=linalg),
        [np.log(1.0), np.log(np.var(samples.heights)), 10.0],  # 1 km, 10 m of noise
        jac=True,
        method="L-BFGS-B",
        tol=1e-6,  # of the value, relative: what float32 resolves
    )
    return model_of(jnp.asarray(found.x, jnp.float32)), found.nfev


@partial(jax.jit, static_argnames="linalg")
def estimate(
    model: Model, samples: Samples, points: Array, near: Array, linalg: LinearAlgebra
) -> tuple[Array, Array]:
    """Mean and variance at all points, one batch after another."""
    krige_one = partial(krige, model, samples, linalg=linalg)
    height: tuple[Array, Array] = jax.lax.map(
        lambda point: krige_one(*point), (points, near), batch_size=BATCH
    )
    return height


def rebuild(samples: Samples, points: Array, linalg: LinearAlgebra) -> Terrain:
    """From the samples to the terrain: model, neighbours, estimate."""
    model, evaluations = fit(samples, linalg)
    near = neighbours(samples, points)
    mean, variance = estimate(model, samples, points, near, linalg=linalg)
    return Terrain(mean, variance, model, evaluations)


def linear_algebra_seconds(samples: Samples, terrain: Terrain, linalg: LinearAlgebra) -> float:
    """The time of the likelihood's factors, solves and gradients and of the estimate's solves.

    It is measured on one batch of systems, and multiplied by the number of batches.
    """
    near = neighbours(samples, samples.points[:BATCH])
    systems = jax.vmap(partial(system, terrain.model))(samples.points[near])
    heights = samples.heights[near]
    gradient = jax.jit(jax.vmap(jax.value_and_grad(partial(log_likelihood, linalg=linalg))))
    fit_batch = median_time(gradient, systems, heights)
    right_sides = jnp.stack([heights, jnp.ones_like(heights)], -1)
    estimate_batch = median_time(jax.jit(jax.vmap(linalg.solve)), systems, right_sides)
    return terrain.evaluations * fit_batch + terrain.mean.size / len(near) * estimate_batch


def interpolate_linearly(samples: Samples, points: Array) -> Array:
    """Linear interpolation on the Delaunay triangles, and the nearest sample outside of them."""
    linear = scipy.interpolate.LinearNDInterpolator(*samples)(points)
    nearest = scipy.interpolate.NearestNDInterpolator(*samples)(points)
    return jnp.where(np.isnan(linear), nearest, linear)


def pykrige(model: Model, samples: Samples) -> Callable[..., tuple[NumPyArray, NumPyArray]]:
    """PyKrige's mean and variance of points, with the same model and as many neighbours."""

    def variogram(_: Any, distance: NumPyArray) -> NumPyArray:
        r = 3**0.5 * distance / model.length
        return np.asarray(model.nugget + model.variance * (1 - (1 + r) * np.exp(-r)))

    kriging = importlib.import_module("pykrige.ok").OrdinaryKriging(
        *np.asarray(samples.points, float).T,
        np.asarray(samples.heights),
        variogram_model="custom",
        variogram_parameters=[],
        variogram_function=variogram,
    )
    return partial(kriging.execute, "points", backend="loop", n_closest_points=NEIGHBOURS)


def load_terrain() -> tuple[Array, Array]:
    """Points (rows, columns, 2) to the north and east, in km, and their heights in metres."""
    data: Any = get_sample_data("jacksboro_fault_dem.npz")
    heights = jnp.asarray(data["elevation"], jnp.float32)
    rows, columns = jnp.indices(heights.shape)
    degree = 111.2  # km
    north = degree * data["dy"] * (len(heights) - 1 - rows)
    east = degree * np.cos(np.radians(data["ymin"])) * data["dx"] * columns
    return jnp.stack([north, east], -1), heights


def draw(path: Path, points: Array, samples: Samples, maps: dict[str, Array]) -> None:
    """Three maps of heights, two of errors, and one of the standard deviation."""
    figure = Figure(figsize=(9.6, 7.8), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey=True)
    north, east = jnp.moveaxis(points, -1, 0)
    extent = (east.min(), east.max(), north.min(), north.max())
    # steps of colour and a palette make a small file
    height = {"cmap": colormaps["cividis"].resampled(18), "vmin": 200, "vmax": 1100}
    error = {"cmap": colormaps["RdBu_r"].resampled(11), "vmin": -82.5, "vmax": 82.5}
    deviation = {"cmap": colormaps["magma"].resampled(10), "vmin": 0, "vmax": 50}
    scales = (height, height, error, error, deviation)
    where = axes.flat[[0, 2, 3, 4, 5]]
    for axis, (title, values), scale in zip(where, maps.items(), scales, strict=True):
        axis.imshow(values, extent=extent, interpolation="nearest", **scale)
        axis.set_title(title)
    dots = samples.points[:, 1], samples.points[:, 0]
    axes[0, 1].scatter(*dots, s=2, c=samples.heights, linewidths=0, **height)
    axes[0, 1].set_title("samples")
    axes[0, 1].set_aspect("equal")
    for row, label in (
        (axes[0], "height (m)"),
        (axes[1, :2], "error (m)"),
        (axes[1, 2:], "standard deviation (m)"),
    ):
        image = row[0].images[0]
        figure.colorbar(image, ax=row, location="bottom", aspect=40, fraction=0.05, label=label)
    for axis in axes[1]:
        axis.set_xlabel("east (km)")
    for axis in axes[:, 0]:
        axis.set_ylabel("north (km)")
    figure.savefig(path, dpi=130)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Rebuild the terrain, compare, print and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=344, help="of the terrain to use, from 8 on")
    parser.add_argument("--output", type=Path, default=Path("terrain.png"), help="picture")
    options = parser.parse_args(arguments)

    grid, heights = (array[: max(8, options.rows)] for array in load_terrain())
    points, truth = grid.reshape(-1, 2), heights.ravel()
    # the first samples, whose neighbourhoods the fit takes, are as random as all
    order = np.random.default_rng(0).permutation(len(points))
    known, unknown = np.split(order, [round(SHARE * len(points))])
    samples = Samples(points[known], truth[known])

    terrain = rebuild(samples, points, OURS)
    deviation = jnp.sqrt(terrain.variance)
    error = terrain.mean - truth
    linear_error = interpolate_linearly(samples, points) - truth
    within = jnp.abs(error) < 2 * deviation

    def rms(error: Array) -> Array:
        return jnp.sqrt(jnp.mean(error[unknown] ** 2))

    def seconds(linalg: LinearAlgebra) -> tuple[float, float]:
        whole = median_time(partial(rebuild, samples, points, linalg), repeats=1)
        return whole, linear_algebra_seconds(samples, terrain, linalg)

    (whole, algebra), (stock_whole, stock_algebra) = map(seconds, (OURS, STOCK))
    model = terrain.model
    rows = {
        "terrain": f"{len(points)} points, standard deviation {truth.std():.0f} m",
        "samples": f"{len(known)}",
        "model": f"length {model.length * 1e3:.0f} m, spread {model.variance**0.5:.0f} m, "
        f"nugget {model.nugget**0.5:.1f} m",
        "error, root mean square": f"{rms(error):.1f} m",
        "  linear interpolation": f"{rms(linear_error):.1f} m",
        "within 2 standard deviations": f"{within[unknown].mean():.1%}",
        "systems of the estimate": f"{len(points)} of {NEIGHBOURS} x {NEIGHBOURS}",
        "systems of the fit": f"{terrain.evaluations} times {min(BATCH, len(known))}",
        "whole computation": f"{whole:.2f} s (stock JAX: {stock_whole:.2f} s)",
        "  its linear algebra": f"{algebra:.2f} s (stock JAX: {stock_algebra:.2f} s)",
    }
    if importlib.util.find_spec("pykrige"):
        some = unknown[:500]
        peer = pykrige(model, samples)
        begin = time.perf_counter()
        mean, variance = peer(*np.asarray(points[some], float).T)
        rows["PyKrige, 500 points"] = f"{time.perf_counter() - begin:.2f} s"
        differences = mean - terrain.mean[some], variance**0.5 - deviation[some]
        rows["  largest difference"] = " and ".join(f"{abs(x).max():.4f} m" for x in differences)
    print_table("Terrain from one height in twenty", rows)
    maps = {
        "terrain": truth,
        "kriging": terrain.mean,
        "error of linear interpolation": linear_error,
        "error of kriging": error,
        "computed standard deviation": deviation,
    }
    draw(options.output, grid, samples, {k: x.reshape(heights.shape) for k, x in maps.items()})
    print(f"picture {options.output}")


if __name__ == "__main__":
    jb.keep_freed_memory()
    main()
