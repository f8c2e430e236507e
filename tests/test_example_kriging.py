"""The example that rebuilds a terrain: its parts against dense formulas, and a small run."""

import jax
import jax.numpy as jnp
import kriging
import numpy as np
import pytest
from scipy.stats import multivariate_normal

MODEL = (0.7, 9000.0, 4.0)


def neighbourhood(seed, count=32):
    rng = np.random.default_rng(seed)
    return rng.uniform(0, 2, (count, 2)), rng.normal(500, 100, count)


def covariances(a, b):
    length, variance, _ = MODEL
    r = 3**0.5 * np.linalg.norm(a[:, None] - b, axis=-1) / length
    return variance * (1 + r) * np.exp(-r)


@pytest.mark.parametrize("linalg", ["OURS", "STOCK"])
def test_estimate_is_the_solution_of_the_bordered_system(linalg):
    points, heights = neighbourhood(0)
    targets = np.random.default_rng(1).uniform(0, 2, (5, 2))
    near = np.tile(np.arange(32), (5, 1))
    mean, variance = kriging.estimate(
        kriging.Model(*map(jnp.float64, MODEL)),
        kriging.Samples(jnp.asarray(points), jnp.asarray(heights)),
        targets,
        near,
        linalg=getattr(kriging, linalg),
    )
    # C w + m 1 = c, 1.w = 1; the error's variance is C(0) - w.c - m
    ones = np.ones((32, 1))
    matrix = covariances(points, points) + MODEL[2] * np.eye(32)
    bordered = np.block([[matrix, ones], [ones.T, np.zeros((1, 1))]])
    right = np.vstack([covariances(points, targets), np.ones((1, 5))])
    solution = np.linalg.solve(bordered, right)
    np.testing.assert_allclose(mean, heights @ solution[:-1], rtol=1e-10)
    expected = MODEL[1] + MODEL[2] - (solution * right).sum(0)
    np.testing.assert_allclose(variance, expected, rtol=1e-9)


def test_likelihood_is_that_of_contrasts():
    points, heights = neighbourhood(2)
    matrix = covariances(points, points) + MODEL[2] * np.eye(32)
    value = kriging.log_likelihood(jnp.asarray(matrix), jnp.asarray(heights), kriging.OURS)
    contrasts = np.linalg.svd(np.ones((1, 32)))[2][1:]  # orthonormal, orthogonal to 1
    density = multivariate_normal(cov=contrasts @ matrix @ contrasts.T)
    constant = (31 * np.log(2 * np.pi) - np.log(32)) / 2
    np.testing.assert_allclose(value, density.logpdf(contrasts @ heights) + constant, rtol=1e-10)


def test_gradient_of_the_misfit():
    points, heights = (np.stack(x) for x in zip(*map(neighbourhood, range(3, 6)), strict=True))
    start = np.array([np.log(MODEL[0]), np.log(MODEL[1]), 2.0])
    np.testing.assert_allclose(kriging.model_of(start), MODEL)

    def misfit(x):
        return kriging.misfit(jnp.asarray(x), points, heights, linalg=kriging.OURS)

    for step in 1e-5 * np.eye(3):
        slope = (misfit(start + step)[0] - misfit(start - step)[0]) / 2e-5
        np.testing.assert_allclose(misfit(start)[1] @ step / 1e-5, slope, rtol=1e-5)


def test_part_of_the_terrain(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kriging, "BATCH", 256)
    picture = tmp_path / "terrain.png"
    with jax.enable_x64(False):
        kriging.main(["--rows", "20", "--output", str(picture)])
    assert 10_000 < picture.stat().st_size < 400_000
    rows = {}
    for line in capsys.readouterr().out.splitlines():
        cells = [cell.strip() for cell in line.split("│")]
        if len(cells) == 4:
            rows[cells[1]] = cells[2]
    error, linear_error = (
        float(rows[name].split()[0]) for name in ("error, root mean square", "linear interpolation")
    )
    assert error < 0.9 * linear_error < 40
    assert 90 < float(rows["within 2 standard deviations"].rstrip("%")) < 98
    assert rows["systems of the estimate"] == "8060 of 32 x 32"
