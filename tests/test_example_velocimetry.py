"""The example that measures a displacement field: its core on known fields and on the real pair."""

import image_velocimetry as example
import jax.numpy as jnp
import numpy as np
import pytest

WINDOW = 32
SPACING = 8


SIZE = 128
CENTRE = (SIZE - 1) / 2
TRANSLATION = np.array([3.37, -2.61])
ROTATION = 0.02 * np.array([[0.0, -1.0], [1.0, 0.0]])
STRAIN = np.array([[0.012, 0.004], [0.004, -0.009]])
GRADIENT = ROTATION + STRAIN


def particles(points: np.ndarray, seed: int = 3, count: int = 900) -> np.ndarray:
    """The brightness of random Gaussian particles at points (..., 2), exactly."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(-20, SIZE + 20, (count, 2))
    radii = rng.uniform(1.4, 2.2, count)
    heights = rng.uniform(0.2, 1.0, count)
    brightness = np.zeros(points.shape[:-1])
    for centre, radius, height in zip(centres, radii, heights, strict=True):
        squared = np.sum((points - centre) ** 2, axis=-1)
        brightness += height * np.exp(-squared / (2 * radius**2))
    return brightness


@pytest.fixture(scope="module")
def synthetic_pair() -> tuple[np.ndarray, np.ndarray]:
    """A pair in which x moves to x + TRANSLATION + GRADIENT (x - CENTRE)."""
    points = np.stack(np.meshgrid(*2 * [np.arange(SIZE)], indexing="ij"), axis=-1)
    inverse = np.linalg.inv(np.eye(2) + GRADIENT)
    origins = CENTRE + (points - CENTRE - TRANSLATION) @ inverse.T
    return particles(points).astype(np.float32), particles(origins).astype(np.float32)


def register(reference: np.ndarray, target: np.ndarray, corners: np.ndarray):
    flat_corners = jnp.asarray(corners.reshape(-1, 2))
    result = example.register(
        jnp.asarray(reference), jnp.asarray(target), flat_corners, window=WINDOW
    )
    return type(result)(*map(np.asarray, result))


def test_known_affine_field(synthetic_pair):
    corners = example.window_corners((SIZE, SIZE), WINDOW, SPACING).reshape(-1, 2)
    result = register(*synthetic_pair, corners)
    interior = np.all((corners >= 8) & (corners + WINDOW <= SIZE - 8), axis=-1)
    assert interior.sum() > 100
    assert result.converged[interior].all()
    assert (result.info == 0).all()

    centres = corners + (WINDOW - 1) / 2
    expected = TRANSLATION + (centres - CENTRE) @ GRADIENT.T
    error = np.linalg.norm(result.displacement - expected, axis=-1)[interior]
    assert error.max() < 0.02
    assert np.abs(result.gradient[interior] - GRADIENT).max() < 0.002
    assert result.zncc[interior].min() > 0.999


def test_window_that_leaves_the_image_is_flagged(synthetic_pair):
    reference, _ = synthetic_pair
    target = np.roll(reference, 5, axis=0)
    corners = example.window_corners((SIZE, SIZE), WINDOW, SPACING).reshape(-1, 2)
    result = register(reference, target, corners)
    leaves = corners[:, 0] + WINDOW + 5 > SIZE
    assert leaves.any()
    assert not result.inside[leaves].any()
    assert not result.converged[leaves].any()
    stays = np.all((corners >= SPACING) & (corners + WINDOW + SPACING <= SIZE), axis=-1)
    assert result.converged[stays].all()
    error = result.displacement[stays] - np.array([5, 0])
    np.testing.assert_allclose(error, 0, atol=1e-3)


def test_flat_window_fails_alone(synthetic_pair):
    reference, target = synthetic_pair
    first, last = 30, 74
    with_flat = reference.copy()
    with_flat[first:last, first:last] = 0.5
    corners = example.window_corners((SIZE, SIZE), WINDOW, SPACING).reshape(-1, 2)
    before = register(reference, target, corners)
    after = register(with_flat, target, corners)

    flat = np.all((corners > first) & (corners + WINDOW < last), axis=-1)
    assert flat.any()
    assert (after.info[flat] != 0).all()
    assert not after.converged[flat].any()
    assert np.isnan(after.displacement[flat]).all()
    # the derivative of the first image reaches one pixel beyond a window
    untouched = np.any((corners > last) | (corners + WINDOW < first), axis=-1)
    assert untouched.any()
    for name, was, now in zip(before._fields, before, after, strict=True):
        np.testing.assert_array_equal(now[untouched], was[untouched], err_msg=name)


def test_crop_of_the_real_pair_agrees_with_openpiv(tmp_path):
    reference, target = (image[80:240, 160:352] for image in example.load_pair())
    corners = example.window_corners(reference.shape, WINDOW, SPACING)
    result = register(reference, target, corners)
    assert result.converged[result.inside].mean() > 0.9
    assert result.inside.mean() > 0.8
    assert (result.info == 0).all()

    peers = example.openpiv_displacement(reference, target, WINDOW, SPACING)
    difference = example.difference_to_openpiv(result, corners, peers, WINDOW)
    assert difference.size > 0.8 * peers[..., 0].size
    assert np.median(difference) < example.AGREEMENT

    picture = tmp_path / "velocity.png"
    example.draw(picture, reference, corners, result, WINDOW)
    assert picture.stat().st_size > 10_000
