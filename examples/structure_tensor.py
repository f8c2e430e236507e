"""Directions in a real image of a brain: two eigenproblems of a 3x3 matrix for each of its voxels.

The image, a magnetic resonance volume of 128 x 96 x 24 voxels, ships with the package `nibabel`.
The structure tensor of a voxel sums the products of the image's slopes around it. Its eigenvector
with the largest eigenvalue points across an edge; the eigenvalues say whether the image there looks
like a plane, a line or noise. Tensors are averaged by their logarithms (Log-Euclidean), which keeps
them definite and does not swell them as the mean of tensors does. That takes an eigenproblem for
the logarithm of each tensor and one for each mean: 589,824 for the library.

Structure tensors: J. Bigun and G. H. Granlund, "Optimal orientation detection of linear symmetry",
ICCV (1987). Their means: V. Arsigny, P. Fillard, X. Pennec and N. Ayache, "Log-Euclidean metrics
for fast and simple calculus on diffusion tensors", Magn. Reson. Med. 56 (2006). Tensors of
diffusion have the same size and are treated alike.

    pip install "jax_batched[examples]"
    python examples/structure_tensor.py

What to look at: in `structure_tensor.png` the colour is the direction across edges, so opposite
sides of a structure have the same colour. In the table it is the time of the eigenproblems.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import einsum, median_time, print_table
from jax import Array
from matplotlib.figure import Figure

import jax_batched as jb

Eigh = Callable[[Array], Any]
SLOPE_WIDTH = 1.0  # voxels: standard deviation of the Gaussian before differences
TENSOR_WIDTH = 1.0  # of the one that sums products of slopes, and of the one that averages tensors


def load_volume() -> np.ndarray[Any, Any]:
    """The first volume of nibabel's series, scaled to a largest value of 1."""
    nibabel = importlib.import_module("nibabel")
    with as_file(files("nibabel") / "tests" / "data" / "example4d.nii.gz") as path:
        volume = np.asarray(nibabel.load(path).dataobj[..., 0], np.float32)
    scaled: np.ndarray[Any, Any] = volume / np.max(volume)
    return scaled


def smooth(x: Array, width: float) -> Array:
    """A Gaussian of this standard deviation along the first three axes; borders are repeated."""
    reach = int(3 * width + 0.5)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    for axis in range(3):
        size = x.shape[axis]
        padded = jnp.pad(
            x, [(reach, reach) if i == axis else (0, 0) for i in range(x.ndim)], "edge"
        )
        x = sum(
            weight * jax.lax.slice_in_dim(padded, i, i + size, axis=axis)
            for i, weight in enumerate(weights / weights.sum())
        )
    return x


def structure_tensors(volume: Array) -> Array:
    """Sums of products of slopes around each voxel (..., 3, 3), with a floor for flat regions."""
    slopes = jnp.stack(jnp.gradient(smooth(volume, SLOPE_WIDTH)), axis=-1)
    tensors = smooth(slopes[..., :, None] * slopes[..., None, :], TENSOR_WIDTH)
    trace = jnp.trace(tensors, axis1=-2, axis2=-1)
    return tensors + 1e-3 * jnp.mean(trace) * jnp.eye(3, dtype=tensors.dtype)


def logarithms(tensors: Array, eigh: Eigh) -> Array:
    """V log(W) V^T of each tensor V W V^T."""
    w, v = eigh(tensors)
    return einsum("...ik,...k,...jk->...ij", v, jnp.log(w), v)


@partial(jax.jit, static_argnames="eigh")
def directions(volume: Array, *, eigh: Eigh) -> tuple[Array, Array]:
    """Eigenvalues (..., 3) and eigenvectors of the averaged tensor of each voxel."""
    means = smooth(logarithms(structure_tensors(volume), eigh), TENSOR_WIDTH)
    w, v = eigh(means)
    return jnp.exp(w), v


def anisotropy(w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """0 where all eigenvalues are equal, 1 where only one is not zero (fractional anisotropy)."""
    spread = w - w.mean(-1, keepdims=True)
    ratio: np.ndarray[Any, Any] = np.sqrt(1.5 * (spread**2).sum(-1) / (w**2).sum(-1))
    return ratio


def draw(
    path: Path, volume: np.ndarray[Any, Any], w: np.ndarray[Any, Any], v: np.ndarray[Any, Any]
) -> None:
    """The middle slice: the image, its anisotropy, the direction across edges as a colour."""
    middle = volume.shape[2] // 2
    strength = anisotropy(w)
    brightness = np.minimum(w[..., -1] / np.quantile(w[..., -1], 0.95), 1) ** 0.25 * strength
    colours = np.abs(v[..., -1]) * brightness[..., None]
    panels = (
        ("image", volume, "gray"),
        ("anisotropy of its structure", strength, "viridis"),
        ("across edges: red x, green y, blue z", colours, None),
    )
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, (title, values, colour_map) in zip(figure.subplots(1, 3), panels, strict=True):
        picture = axes.imshow(
            np.swapaxes(values[:, :, middle], 0, 1), cmap=colour_map, origin="lower"
        )
        axes.set_title(title)
        axes.set_xlabel("x, voxels")
        if colour_map == "viridis":
            figure.colorbar(picture, ax=axes, shrink=0.6)
    figure.axes[0].set_ylabel("y, voxels")
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute, time and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slices", type=int, default=24, help="of the volume, from the middle")
    parser.add_argument("--output", type=Path, default=Path("structure_tensor.png"), help="picture")
    options = parser.parse_args(arguments)

    volume = load_volume()
    first = (volume.shape[2] - options.slices) // 2
    volume = volume[:, :, first : first + options.slices]
    operand = jnp.asarray(volume)
    libraries: dict[str, Eigh] = {"jax_batched": jb.eigh, "stock JAX": jnp.linalg.eigh}
    results = {name: directions(operand, eigh=eigh) for name, eigh in libraries.items()}
    w, v = (np.asarray(x) for x in results["jax_batched"])
    difference = np.max(np.abs(np.log(w / np.asarray(results["stock JAX"][0]))))

    tensors = structure_tensors(operand)
    rows = {
        "voxels": f"{volume.size:,}",
        "eigenproblems of 3 x 3": f"{2 * volume.size:,}",
        "median anisotropy": f"{np.median(anisotropy(w)):.3f}",
        "largest difference of log eigenvalues to stock JAX's": f"{difference:.1e}",
    }
    for name, eigh in libraries.items():
        whole = median_time(partial(directions, eigh=eigh), operand, repeats=3)
        algebra = 2 * median_time(jax.jit(eigh), tensors, repeats=3)
        rows[f"whole computation, {name}"] = f"{1e3 * whole:.0f} ms"
        rows[f"its eigenproblems, {name}"] = f"{1e3 * algebra:.0f} ms"
    print_table("Directions in a brain", rows)
    draw(options.output, volume, w, v)
    print(f"picture {options.output}")


if __name__ == "__main__":
    jb.keep_freed_memory()
    main()
