"""The example of local RX anomaly detection, on a corner of the satellite image."""

import anomaly
import jax.numpy as jnp
import numpy as np

PIXELS = 60


def square(pixel, reach, shape):
    """Which pixels are at most `reach` rows and columns away."""
    rows, columns = np.indices(shape)
    return np.maximum(abs(rows - pixel[0]), abs(columns - pixel[1])) <= reach


def reference_features(image):
    details = []
    for reach in anomaly.SMOOTHING:
        means = [
            image[square(p, reach, image.shape[:2])].mean(0) for p in np.ndindex(PIXELS, PIXELS)
        ]
        details.append(image - np.reshape(means, image.shape))
    z = np.concatenate([image, *details], axis=-1)
    return (z - z.mean((0, 1))) / z.std((0, 1))


def reference_score(z, pixel):
    """The least of the distances to the rings, written as they are defined."""
    scores = []
    for reach in anomaly.REACHES:
        inside = square(pixel, reach, z.shape[:2]) & ~square(pixel, anomaly.GUARD, z.shape[:2])
        covariance = np.cov(z[inside], rowvar=False, bias=True)
        target = np.trace(covariance) / len(covariance) * np.eye(len(covariance))
        shrunk = (1 - anomaly.SHRINKAGE) * covariance + anomaly.SHRINKAGE * target
        difference = z[pixel] - z[inside].mean(0)
        scores.append(difference @ np.linalg.solve(shrunk, difference))
    return min(scores)


def test_scores_are_numpys_and_stock_jaxs():
    image = anomaly.load_image()[:PIXELS, :PIXELS]
    z = reference_features(image)
    np.testing.assert_allclose(anomaly.features(jnp.asarray(image)), z, atol=1e-9)
    scores = anomaly.local_scores(jnp.asarray(image))
    for pixel in ((0, 0), (3, 57), (30, 30), (41, 7), (59, 59)):
        expected = reference_score(z, pixel)
        np.testing.assert_allclose(scores[pixel], expected, rtol=1e-8)
    stock = anomaly.local_scores(jnp.asarray(image), linalg=anomaly.STOCK)
    np.testing.assert_allclose(scores, stock, rtol=1e-8)


def test_a_planted_pixel_scores_most():
    image = anomaly.load_image()[:PIXELS, :PIXELS]
    planted, pixels = anomaly.plant(image, 1, 0.3)
    assert len(np.argwhere((planted != image).any(-1))) == 1
    before, after = (np.asarray(anomaly.local_scores(jnp.asarray(x))) for x in (image, planted))
    pixel = tuple(pixels[0])
    assert np.unravel_index(after.argmax(), after.shape) == pixel
    assert after[pixel] > 3 * before[pixel]


def test_the_program_prints_and_draws(tmp_path, capsys):
    picture = tmp_path / "anomaly.png"
    anomaly.main(["--pixels", str(PIXELS), "--planted", "3", "--output", str(picture)])
    assert picture.stat().st_size > 10_000
    assert f"{4 * PIXELS**2} of size 12" in capsys.readouterr().out
