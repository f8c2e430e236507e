"""The example of a square-root Kalman filter: against statsmodels, and a small run of all of it."""

import kalman as example
import numpy as np
import pytest
import statsmodels.api as sm

PARAMETERS = np.log([0.06, 0.03, 0.002, 0.01])


def known_results(y):
    """Filter and smoother of statsmodels, with the same model and the same start."""
    model = sm.tsa.UnobservedComponents(
        y, "local linear trend", seasonal=example.SEASON, stochastic_seasonal=True
    )
    state = example.prior(y)
    covariance = np.array(example.F @ state.root.T @ state.root @ example.F.T)
    covariance[:3, :3] += np.diag(np.exp(2 * PARAMETERS[1:]))
    model.ssm.initialize_known(np.array(example.F @ state.mean), covariance)
    model.ssm.loglikelihood_burn = 0
    model.loglikelihood_burn = 0
    assert model.param_names == [
        "sigma2.irregular",
        "sigma2.level",
        "sigma2.trend",
        "sigma2.seasonal",
    ]
    return model.smooth(np.exp(2 * PARAMETERS))


def test_filter_and_smoother_against_statsmodels():
    names, all_series = example.load_series()
    y = all_series[names.index("inventory, Brazoria County")]
    assert np.isnan(y).sum() > 10
    expected = known_results(y)
    states, likelihood = example.run_filter(example.OURS, PARAMETERS, y)
    assert float(likelihood) == pytest.approx(expected.llf, rel=1e-8)
    np.testing.assert_allclose(states.mean, expected.filtered_state.T, atol=1e-8)

    smoothed = example.smooth(example.OURS, PARAMETERS[None], y[None])
    np.testing.assert_allclose(smoothed.mean[0], expected.smoothed_state.T, atol=1e-8)
    covariances = np.einsum("tki,tkj->tij", smoothed.root[0], smoothed.root[0])
    expected_covariances = np.moveaxis(expected.smoothed_state_cov, -1, 0)
    np.testing.assert_allclose(covariances, expected_covariances, atol=1e-8)


def test_gradient():
    y = example.load_series()[1][:2, :30]
    parameters = np.stack([PARAMETERS, PARAMETERS + 0.2])
    _, gradient = example.value_and_gradient(example.OURS, parameters, y)
    direction = np.random.default_rng(0).standard_normal(parameters.shape)
    step = 1e-5
    more, less = (
        example.value_and_gradient(example.OURS, parameters + side * step * direction, y)[0]
        for side in (1, -1)
    )
    expected = float(more - less) / (2 * step)
    assert float(np.sum(gradient * direction)) == pytest.approx(expected, rel=1e-6)


def test_small_run(tmp_path, capsys):
    picture = tmp_path / "kalman.png"
    example.main(["--series", "4", "--steps", "15", "--output", str(picture)])
    assert picture.stat().st_size > 10_000
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    table = {row[1].strip(): row[2].strip() for row in rows}
    first, last = map(float, table["log likelihood, first and last"].split(","))
    assert last > first + 100
    forecast = float(table["error of forecasts"].split()[0])
    assert 0.03 < forecast < float(table["error, a year before"].split()[0])
    assert float(table["within two standard deviations"].rstrip("%")) > 80
