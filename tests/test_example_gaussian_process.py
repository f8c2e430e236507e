"""The example of Gaussian processes: one storm against SciPy, and a small run of all of it."""

import gaussian_process as example
import jax
import numpy as np
import pytest
import scipy.stats

import jax_batched as jb

FEWEST = 46


def one_track():
    """The known fixes of a storm, with padding."""
    track = next(iter(example.load_tracks(FEWEST).values()))
    known = ~example.is_held_out(len(track.days))
    longer = example.Track(*(np.concatenate([x, x[:3]]) for x in track))
    part = example.Track(*(x[known] for x in track))
    return part, example.Track(*(x[0] for x in example.batch([part, longer])))


def reference(parameters, track):
    """The likelihood of a track by SciPy, with the covariance written out."""
    amplitude, length, noise = np.exp(parameters)
    d = np.sqrt(5) * np.abs(np.subtract.outer(track.days, track.days)) / length
    matrix = amplitude**2 * (1 + d + d**2 / 3) * np.exp(-d) + noise**2 * np.eye(len(d))
    columns = (track.position - track.position.mean(0)).T
    return scipy.stats.multivariate_normal(np.zeros(len(d)), matrix).logpdf(columns).sum()


def test_likelihood_and_its_gradient():
    track, padded = one_track()
    assert len(padded.days) > len(track.days)
    parameters = np.add(example.START, [0.3, -0.2, 0.1])
    value, gradient = jax.value_and_grad(example.log_likelihood, argnums=1)(jb, parameters, padded)
    assert value == pytest.approx(reference(parameters, track), rel=1e-9)
    step = 1e-5
    differences = [
        reference(parameters + step * e, track) - reference(parameters - step * e, track)
        for e in np.eye(3)
    ]
    np.testing.assert_allclose(gradient, np.array(differences) / (2 * step), rtol=1e-5)


def test_prediction():
    track, padded = one_track()
    parameters = np.array(example.START)
    days = track.days[:5] + 0.1
    batched = example.Track(*(x[None] for x in padded))
    mean, deviation = example.predict(jb, parameters[None], batched, days[None])
    amplitude, length, noise = np.exp(parameters)

    def covariance(s, t):
        d = np.sqrt(5) * np.abs(np.subtract.outer(s, t)) / length
        return amplitude**2 * (1 + d + d**2 / 3) * np.exp(-d)

    inverse = np.linalg.inv(covariance(track.days, track.days) + noise**2 * np.eye(len(track.days)))
    cross = covariance(days, track.days)
    centre = track.position.mean(0)
    expected = centre + cross @ inverse @ (track.position - centre)
    np.testing.assert_allclose(mean[0], expected, rtol=1e-9)
    variance = amplitude**2 + noise**2 - np.sum((cross @ inverse) * cross, axis=1)
    np.testing.assert_allclose(deviation[0] ** 2, variance, rtol=1e-6)


def test_small_run(tmp_path, capsys):
    picture = tmp_path / "tracks.png"
    example.main(["--fewest", str(FEWEST), "--steps", "30", "--output", str(picture)])
    assert picture.stat().st_size > 10_000
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    table = {row[1].strip(): row[2].strip() for row in rows}
    process, lines = (
        float(table[f"error, {name}"].split()[0]) for name in ("process", "straight lines")
    )
    assert 10 < process < 0.9 * lines
    assert 85 < float(table["within two standard deviations"].rstrip("%")) < 99
