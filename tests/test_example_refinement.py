"""The example of refined solves, on the real series."""

import jax
import numpy as np
import refinement as example


def test_every_system_is_solved_and_the_picture_drawn(tmp_path, capsys):
    picture = tmp_path / "refinement.png"
    example.main(["--output", str(picture)])
    assert picture.stat().st_size > 10_000
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in lines if line[-1] in ("0/30", "30/30")]
    assert len(rows) == len(example.NOISES)
    for row in rows:
        single, double, refined = (float(x) for x in row[2:5])
        assert row[6] == "30/30"
        assert refined <= 10 * double < single
    assert [row[7] for row in rows][:4] == ["0/30"] * 4
    assert rows[-1][7] == "30/30"


def test_extended_solve_is_more_than_double():
    a = np.eye(5) * 4 + np.ones((5, 5))
    x = np.arange(5.0)[:, None]
    error = example.extended_solve(a[None], (a @ x)[None])[0] - x
    assert np.abs(error).max() < 1e-18
    weeks = jax.numpy.arange(4.0)
    np.testing.assert_allclose(np.diagonal(example.kernel(weeks, 0.5)), 1.5)
