"""Measure a flow field from a real pair of particle images, ten thousand windows at a time.

The image pair ships with the package `openpiv`. Every overlapping window of the first image is
registered to the second one by an inverse-compositional Gauss-Newton iteration with an affine
warp. Its 6x6 normal matrix is that of the window alone, so it is factored once and solved at every
iteration. `register_window` is written for one window; `vmap` makes one batched Cholesky
factorisation and one batched solve per iteration of it, inside a single jitted program.

The parts of the method, in the order in which they act:

* integer start: FFT cross-correlation of the window with a search area of twice its size;
* registration: B. D. Lucas and T. Kanade (1981), in the inverse-compositional form of S. Baker and
  I. Matthews, "Lucas-Kanade 20 years on", Int. J. Comput. Vis. 56 (2004), with the zero-mean
  normalised residual that digital image correlation uses (B. Pan et al., Exp. Mech. 53 (2013));
* interpolation: cubic B-splines (M. Unser, IEEE Signal Process. Mag. 16 (1999));
* quality: the zero-normalised cross-correlation (ZNCC) of the window and its warped counterpart.

Positions, displacements and gradients are in (row, column) order and in pixels.

    pip install "jax_batched[examples]"
    python examples/image_velocimetry.py
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
from _common import matmul, median_time, print_table, timed
from jax import Array

import jax_batched as jb

AGREEMENT = 0.25  # pixels: the largest accepted median difference to openpiv


class ImagePair(NamedTuple):
    """Two images, and what every window needs of them."""

    reference: Array  # the first image (rows, columns)
    gradient: Array  # its derivatives along rows and columns (rows, columns, 2)
    target: Array  # the second image (rows, columns)
    spline: Array  # cubic B-spline coefficients of the second image


class Warp(NamedTuple):
    """An affine map of a window: x -> centre + displacement + deformation (x - centre)."""

    displacement: Array  # (2,)
    deformation: Array  # (2, 2)


class State(NamedTuple):
    """What the Gauss-Newton iteration of one window carries."""

    warp: Warp
    iterations: Array
    converged: Array
    inside: Array


class Registration(NamedTuple):
    """The result for one window; after `vmap`, for every window."""

    displacement: Array  # of the window's centre (2,); NaN where the factor failed
    gradient: Array  # displacement gradient (2, 2); NaN where the factor failed
    zncc: Array  # zero-normalised cross-correlation, at most 1; NaN where the factor failed
    iterations: Array  # Gauss-Newton steps taken
    converged: Array  # the last step was below the tolerance, within the image
    inside: Array  # False: the warped window reaches beyond the second image
    info: Array  # 0, or the pivot at which the factorisation of a flat window failed


def spline_coefficients(image: Array) -> Array:
    """Return the coefficients whose cubic B-spline interpolates the image.

    The inverse of the sampled B-spline (1, 4, 1)/6 is a decaying exponential on both sides; 12
    taps of it reach float32's precision.
    """
    reach, pole = 12, 3**0.5 - 2
    decay = pole ** np.abs(np.arange(-reach, reach + 1))
    taps = jnp.asarray(decay / decay.sum(), image.dtype)
    filter_row = partial(jnp.convolve, v=taps, mode="valid", precision=jax.lax.Precision.HIGHEST)
    padded = jnp.pad(image, reach, mode="reflect")
    return jax.vmap(filter_row, 1, 1)(jax.vmap(filter_row)(padded))


def spline_weights(t: Array) -> list[Array]:
    """Return the four cubic B-spline weights at the fraction t between two samples."""
    return [
        (1 - t) ** 3 / 6,
        (3 * t**3 - 6 * t**2 + 4) / 6,
        (-3 * t**3 + 3 * t**2 + 3 * t + 1) / 6,
        t**3 / 6,
    ]


def interpolate(spline: Array, points: Array) -> Array:
    """Evaluate the spline at points (..., 2)."""
    corner = jnp.floor(points).astype(jnp.int32)
    fraction = points - corner
    row_weights, column_weights = spline_weights(fraction[..., 0]), spline_weights(fraction[..., 1])
    value = jnp.zeros(points.shape[:-1], spline.dtype)
    for i, row_weight in enumerate(row_weights, start=-1):
        for j, column_weight in enumerate(column_weights, start=-1):
            sample = spline.at[corner[..., 0] + i, corner[..., 1] + j].get(mode="clip")
            value += row_weight * column_weight * sample
    # without the barrier, XLA takes the sum apart to fuse it with the mean of it that follows,
    # and stores each of the sixteen reads: on a CPU, several times slower and larger
    whole: Array = jax.lax.optimization_barrier(value)
    return whole


def prepare(reference: Array, target: Array) -> ImagePair:
    """Differentiate the first image and find the spline of the second."""
    gradient = jnp.stack(jnp.gradient(reference), axis=-1)
    return ImagePair(reference, gradient, target, spline_coefficients(target))


def cut(image: Array, corner: Array, window: int) -> Array:
    """Return the square window of an image whose first pixel is `corner`."""
    start = (*corner, *(0 for _ in image.shape[2:]))
    return jax.lax.dynamic_slice(image, start, (window, window, *image.shape[2:]))


def local_coordinates(window: int, dtype: Any) -> Array:
    """Return the pixels' positions relative to the window's centre, (window**2, 2)."""
    offset = jnp.arange(window, dtype=dtype) - (window - 1) / 2
    return jnp.stack(jnp.meshgrid(offset, offset, indexing="ij"), axis=-1).reshape(-1, 2)


def zero_mean(values: Array) -> tuple[Array, Array]:
    """Return the values less their mean, and their norm then."""
    centred = values - values.mean()
    return centred, jnp.linalg.norm(centred)


def integer_displacement(pair: ImagePair, corner: Array, window: int) -> Array:
    """Return the peak of the FFT cross-correlation with the search area around the window."""
    reach = window // 2
    size = (window + 2 * reach,) * 2
    padded = jnp.pad(pair.target, reach, mode="reflect")
    search_area, _ = zero_mean(cut(padded, corner, size[0]))
    template, _ = zero_mean(cut(pair.reference, corner, window))
    spectrum = jnp.conj(jnp.fft.rfft2(template, size)) * jnp.fft.rfft2(search_area)
    correlation = jnp.fft.irfft2(spectrum, size)[: 2 * reach + 1, : 2 * reach + 1]
    peak = jnp.unravel_index(jnp.argmax(correlation), correlation.shape)
    return jnp.stack(peak) - reach


def steepest_descent(pair: ImagePair, corner: Array, window: int) -> Array:
    """Return the derivatives of the window's pixels by the six warp parameters, (window**2, 6).

    The parameters are, for rows then columns, a displacement and two gradients times half the
    window's width. All six are pixels, which makes the normal matrix well scaled.
    """
    gradient = cut(pair.gradient, corner, window).reshape(-1, 2)
    local = local_coordinates(window, gradient.dtype) / ((window - 1) / 2)
    basis = jnp.concatenate([jnp.ones_like(local[:, :1]), local], axis=1)
    return (gradient[:, :, None] * basis[:, None, :]).reshape(-1, 6)


def warped_points(warp: Warp, corner: Array, window: int) -> Array:
    """Return where the warp takes the window's pixels, (window**2, 2)."""
    dtype = warp.displacement.dtype
    local = local_coordinates(window, dtype)
    centre = corner.astype(dtype) + (window - 1) / 2
    return centre + warp.displacement + matmul(local, warp.deformation.T)


def is_inside(warp: Warp, corner: Array, pair: ImagePair, window: int) -> Array:
    """Tell whether the whole warped window lies within the second image."""
    points = warped_points(warp, corner, window)
    return jnp.all((points >= 0) & (points <= jnp.array(pair.target.shape) - 1))


def compare(pair: ImagePair, warp: Warp, corner: Array, window: int) -> tuple[Array, Array]:
    """Return the normalised residual of the warped window, and the ZNCC."""
    template, contrast = zero_mean(cut(pair.reference, corner, window).ravel())
    sampled = interpolate(pair.spline, warped_points(warp, corner, window))
    warped, warped_contrast = zero_mean(sampled)
    residual = warped * (contrast / warped_contrast) - template
    return residual, jnp.vdot(template, warped) / (contrast * warped_contrast)


def compose_with_inverse(warp: Warp, step: Array, window: int) -> Warp:
    """Return the warp after the inverse of the step: the inverse-compositional update."""
    parameters = step.reshape(2, 3)
    displacement = parameters[:, 0]
    (a, b), (c, d) = jnp.eye(2, dtype=step.dtype) + parameters[:, 1:] / ((window - 1) / 2)
    inverse = jnp.array([[d, -b], [-c, a]]) / (a * d - b * c)
    deformation = matmul(warp.deformation, inverse)
    return Warp(warp.displacement - matmul(deformation, displacement), deformation)


def start_warp(pair: ImagePair, corner: Array, window: int) -> Warp:
    """Return the translation by the integer displacement."""
    dtype = pair.reference.dtype
    shift = integer_displacement(pair, corner, window)
    return Warp(shift.astype(dtype), jnp.eye(2, dtype=dtype))


def register_window(
    pair: ImagePair, corner: Array, window: int, max_iterations: int, tolerance: float
) -> Registration:
    """Find the affine warp that takes one window of the first image into the second."""
    jacobian = steepest_descent(pair, corner, window)
    hessian = matmul(jacobian.T, jacobian)
    factor, info = jb.cholesky(hessian, symmetrize_input=False, return_info=True)

    def is_active(state: State) -> Array:
        left = state.iterations < max_iterations
        return (info == 0) & state.inside & ~state.converged & left

    def gauss_newton_step(state: State) -> State:
        residual, _ = compare(pair, state.warp, corner, window)
        step = jb.cho_solve((factor, True), matmul(jacobian.T, residual))
        warp = compose_with_inverse(state.warp, step, window)
        inside = is_inside(warp, corner, pair, window)
        converged = inside & (jnp.linalg.norm(step) < tolerance)
        return State(warp, state.iterations + 1, converged, inside)

    warp = start_warp(pair, corner, window)
    inside = is_inside(warp, corner, pair, window)
    state = State(warp, jnp.int32(0), jnp.bool_(False), inside)
    state = jax.lax.while_loop(is_active, gauss_newton_step, state)

    displacement, deformation = state.warp
    _, zncc = compare(pair, state.warp, corner, window)
    failed = info != 0
    return Registration(
        displacement=jnp.where(failed, jnp.nan, displacement),
        gradient=jnp.where(failed, jnp.nan, deformation - jnp.eye(2, dtype=deformation.dtype)),
        zncc=jnp.where(failed, jnp.nan, zncc),
        iterations=state.iterations,
        converged=state.converged,
        inside=state.inside,
        info=info,
    )


@partial(jax.jit, static_argnames="window")
def register(
    reference: Array,
    target: Array,
    corners: Array,
    *,
    window: int = 32,
    max_iterations: int = 20,
    tolerance: float = 1e-3,
) -> Registration:
    """Register the windows at `corners` (count, 2); everything happens in one jitted program."""
    register_one = partial(
        register_window, window=window, max_iterations=max_iterations, tolerance=tolerance
    )
    return jax.vmap(register_one, in_axes=(None, 0))(prepare(reference, target), corners)


def window_corners(shape: tuple[int, ...], window: int, spacing: int) -> np.ndarray:
    """Return the first pixels of a grid of overlapping windows, (rows, columns, 2).

    The grid is aligned with openpiv's, whose first window lies half a window within the image.
    """
    first = (window // 2) % spacing
    rows, columns = (np.arange(first, size - window + 1, spacing) for size in shape)
    return np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1)


@partial(jax.jit, static_argnames="window")
def first_systems(
    reference: Array, target: Array, corners: Array, *, window: int
) -> tuple[Array, Array]:
    """Return every window's normal matrix, and its right-hand side at the integer start."""
    pair = prepare(reference, target)

    def first_system(corner: Array) -> tuple[Array, Array]:
        jacobian = steepest_descent(pair, corner, window)
        residual, _ = compare(pair, start_warp(pair, corner, window), corner, window)
        return matmul(jacobian.T, jacobian), matmul(jacobian.T, residual)

    return jax.vmap(first_system)(corners)


def time_linear_algebra(linalg: Any, hessians: Array, rhs: Array, solves: int) -> float:
    """Return the median seconds to factor every matrix once and solve it `solves` times.

    `linalg` is a module with `cho_factor` and `cho_solve`: jax_batched, or jax.scipy.linalg.
    """

    def factor_and_solve(hessian: Array, rhs: Array) -> Array:
        factor = linalg.cho_factor(hessian, lower=True)
        solutions: Array = jax.lax.map(partial(linalg.cho_solve, factor), rhs)
        return solutions

    batched = jax.jit(jax.vmap(factor_and_solve, in_axes=(0, 1), out_axes=1))
    repeated = jnp.tile(rhs, (solves, 1, 1))
    return median_time(batched, hessians, repeated, repeats=9)


def openpiv_displacement(
    reference: np.ndarray, target: np.ndarray, window: int, spacing: int, least_ratio: float = 1.2
) -> np.ndarray:
    """Return openpiv's displacements, (rows, columns, 2); NaN where its peak is ambiguous.

    As in openpiv's tutorial on this pair, a window is sought in an area of twice its size. The
    grid is that of `window_corners` without the windows whose search area leaves the image
    (openpiv's `get_coordinates` shifts the grid to the image's middle, but the windows that it
    correlates begin at pixel 0). openpiv's u is along columns and v along rows, downwards.
    """
    from openpiv.pyprocess import extended_search_area_piv  # type: ignore[import-untyped]

    search_area = window + 2 * (window // 2)
    u, v, peak_ratio = extended_search_area_piv(
        reference,
        target,
        window_size=window,
        overlap=search_area - spacing,
        search_area_size=search_area,
        normalized_correlation=True,
        subpixel_method="gaussian",
        sig2noise_method="peak2peak",
    )
    displacement: np.ndarray = np.stack([v, u], axis=-1)
    displacement[peak_ratio < least_ratio] = np.nan
    return displacement


def difference_to_openpiv(
    result: Registration, corners: np.ndarray, peers: np.ndarray, window: int
) -> np.ndarray:
    """Return |difference| of the displacements at the windows that are valid in both."""
    offset = np.argmax(corners[:, 0, 0] >= window // 2)
    rows, columns, _ = peers.shape
    common = (slice(offset, offset + rows), slice(offset, offset + columns))
    grid = corners.shape[:2]
    displacement = np.asarray(result.displacement).reshape(*grid, 2)[common]
    converged = np.asarray(result.converged).reshape(grid)[common]
    difference: np.ndarray = np.linalg.norm(displacement - peers, axis=-1)
    return difference[converged & np.isfinite(difference)]


def load_pair() -> tuple[np.ndarray, np.ndarray]:
    """Return the experimental image pair that openpiv ships, with grey levels from 0 to 1."""
    from openpiv.tools import imread  # type: ignore[import-untyped]

    folder = files("openpiv") / "data" / "test1"
    images = []
    for name in ("exp1_001_a.bmp", "exp1_001_b.bmp"):
        with as_file(folder / name) as path:
            images.append(imread(path).astype(np.float32) / 255)
    return images[0], images[1]


def draw(
    path: Path, image: np.ndarray, corners: np.ndarray, result: Registration, window: int
) -> None:
    """Write the image with the vector field over it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    rows, columns = np.moveaxis(corners + (window - 1) / 2, -1, 0)
    grid = corners.shape[:2]
    displacement = np.asarray(result.displacement).reshape(*grid, 2)
    converged, inside, info = (
        np.asarray(field).reshape(grid) for field in (result.converged, result.inside, result.info)
    )
    spacing = corners[1, 0, 0] - corners[0, 0, 0]
    stride = max(1, round(window / 2 / spacing))
    shown = np.zeros(grid, bool)
    shown[::stride, ::stride] = True
    shown &= converged
    down, right = displacement[shown].T

    magnitude = np.hypot(right, down)
    bright_plasma = ListedColormap(plt.get_cmap("plasma")(np.linspace(0.3, 1, 256)))

    figure, axes = plt.subplots(figsize=(11, 8), layout="constrained")
    axes.imshow(image, cmap="gray", vmax=1.3 * np.percentile(image, 99.8))
    arrows = axes.quiver(
        columns[shown],
        rows[shown],
        right,
        down,
        magnitude,
        cmap=bright_plasma,
        clim=np.percentile(magnitude, (1, 99)),
        angles="xy",
        scale_units="xy",
        scale=0.38,
        width=0.0026,
    )
    marks = {
        "flat window, factor failed": (info != 0, "s", "cyan"),
        "window leaves the image": ((info == 0) & ~inside, ".", "deepskyblue"),
        "not converged": ((info == 0) & inside & ~converged, "x", "lime"),
    }
    for label, (where, marker, colour) in marks.items():
        if where.any():
            axes.plot(
                columns[where],
                rows[where],
                marker,
                color=colour,
                markersize=4,
                label=f"{label} ({where.sum()})",
            )
    figure.colorbar(arrows, ax=axes, label="displacement (pixels)", extend="both", shrink=0.8)
    axes.set(
        title=f"Displacement field from {converged.sum()} of {converged.size} windows",
        xlabel="column (pixels)",
        ylabel="row (pixels)",
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("velocity.png"), help="picture")
    parser.add_argument("--window", type=int, default=32, help="width of a window in pixels")
    parser.add_argument("--spacing", type=int, default=4, help="distance of neighbouring windows")
    return parser.parse_args()


def main() -> int:
    """Measure, draw and compare; return 0 if the result agrees with openpiv's."""
    options = parse_arguments()
    window = options.window
    reference, target = load_pair()
    corners = window_corners(reference.shape, window, options.spacing)
    operands = jnp.asarray(reference), jnp.asarray(target), jnp.asarray(corners.reshape(-1, 2))

    program = register.lower(*operands, window=window).compile()
    result, seconds = timed(program, *operands)

    iterations = int(result.iterations.max())
    hessians, rhs = first_systems(*operands, window=window)
    ours = time_linear_algebra(jb, hessians, rhs, iterations)
    stock = time_linear_algebra(jax.scipy.linalg, hessians, rhs, iterations)
    peers = openpiv_displacement(reference, target, window, options.spacing)
    difference = difference_to_openpiv(result, corners, peers, window)
    median = float(np.median(difference))

    draw(options.output, reference, corners, result, window)
    print_table(
        "Image velocimetry",
        {
            "windows": f"{result.converged.size}",
            "iterations, median and most": f"{np.median(result.iterations):.0f}, {iterations}",
            "converged": f"{np.mean(result.converged):.1%}",
            "left the image": f"{np.mean(~result.inside):.1%}",
            "factor failed": f"{np.mean(result.info != 0):.1%}",
            "median ZNCC": f"{np.median(result.zncc[result.converged]):.3f}",
            "registration, without compilation": f"{seconds:.2f} s",
            "its linear algebra with jax_batched": f"{1e3 * ours:.2f} ms",
            "its linear algebra with stock JAX": f"{1e3 * stock:.2f} ms",
            f"median difference to openpiv, {difference.size} windows": f"{median:.3f} pixels",
        },
    )
    if not median < AGREEMENT:
        print(f"the median difference to openpiv is not below {AGREEMENT} pixels", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
