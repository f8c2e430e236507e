"""Find what does not belong in a satellite image: a covariance and its Cholesky factor per pixel.

The image is Sentinel-2's: 300 x 300 pixels of 10 m in four bands (blue, green, red and near
infrared), which the package `spyndex` ships (modified Copernicus Sentinel data). Each band gives
three features: its value, and its differences to a 3 x 3 and a 7 x 7 mean. Twelve features are
thus twelve "bands" here, of which eight are filter responses.

A pixel is compared to the ring around it, by its Mahalanobis distance under the ring's mean and
covariance: local RX (I. S. Reed and X. Yu, "Adaptive multiple-band CFAR detection of an optical
pattern with unknown spectral distribution", IEEE Trans. Acoust. Speech Signal Process. 38 (1990)).
Four rings of different widths (after W.-M. Liu and C.-I Chang, "Multiple-window anomaly detection
for hyperspectral imagery", IEEE J. Sel. Top. Appl. Earth Obs. 6 (2013)) make 360,000 systems of
size 12, factored by `cholesky` and substituted by `solve_triangular`. A pixel's score is the least
of its four distances: it stands out from each ring.

Some pixels get a part of a foreign material's spectrum, so that it is known what is to be found.

    pip install "jax_batched[examples]"
    python examples/anomaly.py

What to look at: how much of what was planted is found as it covers less of its pixel. In brackets
stands what one covariance of the whole image (global RX) finds with as many detections. The other
detections are small things unlike their surroundings, many of them in the settlements.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
from _common import median_time, print_table
from jax import Array
from matplotlib.figure import Figure

import jax_batched as jb

GUARD = 2  # pixels on each side that are no part of a ring
REACHES = (8, 10, 12, 14)  # pixels on each side that the rings end at
SHRINKAGE = 0.01  # of a covariance towards its mean variance
RATE = 1e-3  # of the pixels are detections
FOREIGN = np.array([0.24, 0.20, 0.16, 0.12])  # reflectances of the planted material
PARTS = (0.1, 0.15, 0.2)  # of a planted pixel that it covers
SMOOTHING = (1, 3)  # pixels on each side that the means of the features reach
FEATURES = 4 * (1 + len(SMOOTHING))


class LinearAlgebra(NamedTuple):
    """The two functions that the scores need."""

    cholesky: Callable[..., Any]
    solve_triangular: Callable[..., Any]


OURS = LinearAlgebra(jb.cholesky, jb.solve_triangular)
STOCK = LinearAlgebra(jnp.linalg.cholesky, jax.scipy.linalg.solve_triangular)


def load_image() -> np.ndarray[Any, Any]:
    """Reflectances (rows, columns, bands)."""
    text = (files("spyndex") / "data" / "S2_10m.json").read_text()
    return np.moveaxis(np.array(json.loads(text)), 0, -1) / 1e4


def plant(
    image: np.ndarray[Any, Any], count: int, part: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """An image in which some pixels are in part of a foreign material, and which (count, 2)."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(REACHES[-1], np.array(image.shape[:2]) - REACHES[-1], (count, 2))
    planted = image.copy()
    planted[*pixels.T] = (1 - part) * planted[*pixels.T] + part * FOREIGN
    return planted, pixels


def integral_image(x: Array) -> Array:
    """The sums of all rows and columns up to each, zeros around the image included."""
    padding = (max(REACHES) + 1, max(REACHES))

    def running_sum(x: Array) -> Array:  # faster than jnp.cumsum on CPUs
        sums: Array = jax.lax.scan(lambda total, row: (total + row,) * 2, jnp.zeros_like(x[0]), x)[
            1
        ]
        return sums

    of_rows = running_sum(jnp.pad(x, [padding, padding, (0, 0)]))
    return running_sum(of_rows.swapaxes(0, 1)).swapaxes(0, 1)


def box_sum(sums: Array, reach: int | Array) -> Array:
    """The sum of the pixels at most `reach` rows and columns away, from an integral image."""
    most = max(REACHES)
    for axis in (0, 1):
        part = partial(jax.lax.dynamic_slice_in_dim, slice_size=sums.shape[axis] - 2 * most - 1)
        sums = part(sums, most + 1 + reach, axis=axis) - part(sums, most - reach, axis=axis)
    return sums


def features(image: Array) -> Array:
    """Each band, and its differences to two means around the pixel (rows, columns, features)."""
    sums, counts = integral_image(image), integral_image(jnp.ones_like(image[..., :1]))
    details = [image - box_sum(sums, reach) / box_sum(counts, reach) for reach in SMOOTHING]
    stacked = jnp.concatenate([image, *details], axis=-1)
    return (stacked - stacked.mean((0, 1))) / stacked.std((0, 1))


def ring_statistics(sums: Array, reach: Array) -> tuple[Array, Array]:
    """Mean and covariance of the ring around each pixel, from sums of 1, z and z z^T."""
    # without the barrier, XLA computes a sum again for each entry that it is a part of
    ring = jax.lax.optimization_barrier(box_sum(sums, reach) - box_sum(sums, GUARD))
    moments = ring[..., 1:] / ring[..., :1]
    size = FEATURES
    mean, second = moments[..., :size], moments[..., size:].reshape(*ring.shape[:2], size, size)
    return mean, second - mean[..., :, None] * mean[..., None, :]


def shrink(covariance: Array) -> Array:
    """A covariance, moved towards its mean variance times the identity."""
    size = covariance.shape[-1]
    variance = jnp.trace(covariance, axis1=-2, axis2=-1)[..., None, None] / size
    return (1 - SHRINKAGE) * covariance + SHRINKAGE * variance * jnp.eye(size)


def distances(linalg: LinearAlgebra, difference: Array, covariance: Array) -> Array:
    """The squared Mahalanobis distance d^T C^-1 d = |L^-1 d|^2 with C = L L^T."""
    factor = linalg.cholesky(covariance)
    whitened = linalg.solve_triangular(factor, difference[..., None], lower=True)
    return jnp.sum(whitened[..., 0] ** 2, axis=-1)


def for_each_ring(f: Callable[[Array, Array], Any], image: Array) -> Any:
    """A function of the differences to the means of one ring, and of its covariances."""
    z = features(image)
    products = (z[..., :, None] * z[..., None, :]).reshape(*z.shape[:2], -1)
    sums = integral_image(jnp.concatenate([jnp.ones_like(z[..., :1]), z, products], axis=-1))

    def of_ring(reach: Array) -> Any:
        mean, covariance = ring_statistics(sums, reach)
        return f(z - mean, shrink(covariance))

    return jax.lax.map(of_ring, jnp.array(REACHES))


@jax.jit
def systems(image: Array) -> tuple[Array, Array]:
    """What `local_scores` computes distances of, to time these alone."""
    both: tuple[Array, Array] = for_each_ring(lambda *system: system, image)
    return both


@partial(jax.jit, static_argnames="linalg")
def local_scores(image: Array, *, linalg: LinearAlgebra = OURS) -> Array:
    """The least distance of each pixel to the rings around it (rows, columns)."""
    return jnp.min(for_each_ring(partial(distances, linalg), image), axis=0)


@jax.jit
def global_scores(image: Array) -> Array:
    """The distance of each pixel to the whole image's mean, under one covariance."""
    z = features(image)
    covariance = jnp.cov(z.reshape(-1, z.shape[-1]), rowvar=False)
    return distances(OURS, z, jnp.broadcast_to(covariance, (*z.shape, z.shape[-1])))


def detections(scores: Array) -> np.ndarray[Any, Any]:
    """The pixels of the largest scores."""
    values = np.asarray(scores)
    found: np.ndarray[Any, Any] = values > np.quantile(values, 1 - RATE)
    return found


def draw(
    image: np.ndarray[Any, Any],
    scores: np.ndarray[Any, Any],
    found: np.ndarray[Any, Any],
    pixels: np.ndarray[Any, Any],
    path: Path,
) -> None:
    """The image in false colours, the scores, and the detections."""
    figure = Figure(figsize=(13, 4.7), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharex=True, sharey=True)
    colours = np.clip(image[..., [3, 2, 1]] / np.array([0.45, 0.25, 0.2]), 0, 1) ** 0.7
    left.imshow(colours)
    left.set_title("near infrared, red, green")
    shown = middle.imshow(np.sqrt(scores), cmap="cividis", vmax=np.quantile(scores, 0.9995) ** 0.5)
    figure.colorbar(shown, ax=middle, label="least distance to a ring", shrink=0.8)
    middle.set_title("local RX")
    right.imshow(colours.mean(-1), cmap="gray", alpha=0.6)
    rows, columns = np.nonzero(found)
    right.plot(columns, rows, "s", color="#D55E00", markersize=2.5, label=f"{len(rows)} detections")
    circle = dict(markersize=9, markerfacecolor="none", markeredgecolor="#0072B2")
    right.plot(pixels[:, 1], pixels[:, 0], "o", **circle, label=f"{len(pixels)} planted")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    right.set_title("detections")
    for axes in (left, middle, right):
        axes.set_xlabel("column (pixels of 10 m)")
    left.set_ylabel("row (pixels of 10 m)")
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main(arguments: Sequence[str] | None = None) -> None:
    """Score, time, print and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pixels", type=int, default=300, help="rows and columns of the image")
    parser.add_argument("--planted", type=int, default=40, help="pixels with a foreign material")
    parser.add_argument("--output", type=Path, default=Path("anomaly.png"), help="picture")
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)

    image = load_image()[: options.pixels, : options.pixels]
    table = {}
    for part in PARTS:
        planted, pixels = plant(image, options.planted, part)
        local, one = (detections(f(jnp.asarray(planted))) for f in (local_scores, global_scores))
        counts = f"{local[*pixels.T].sum()} of {len(pixels)} ({one[*pixels.T].sum()})"
        table[f"found with {part:.0%} planted (by one covariance)"] = counts

    planted, pixels = plant(image, options.planted, PARTS[1])
    operand = jnp.asarray(planted)
    scores = local_scores(operand)
    found = detections(scores)
    difference, covariance = systems(operand)
    table |= {
        "detections": f"{found.sum()} of {found.size} pixels",
        "systems": f"{difference[..., 0].size} of size {difference.shape[-1]}",
    }
    for name, linalg in (("jax_batched", OURS), ("stock JAX", STOCK)):
        whole = median_time(partial(local_scores, linalg=linalg), operand, repeats=5)
        of_rings = jax.jit(partial(jax.lax.map, lambda s, f=linalg: distances(f, *s)))
        alone = median_time(of_rings, (difference, covariance), repeats=5)
        table[f"all scores, {name}"] = f"{whole:.2f} s"
        table[f"their linear algebra, {name}"] = f"{alone:.3f} s ({alone / whole:.0%})"
    print_table("Anomaly detection", table)
    draw(planted, np.asarray(scores), found, pixels, options.output)
    print(f"picture {options.output}")


if __name__ == "__main__":
    jb.keep_freed_memory()
    main()
