"""The example of alternating least squares, against its formulas on some of the ratings."""

import als
import jax.scipy.linalg
import numpy as np
import pytest

RANK, SWEEPS = 5, 3


@pytest.fixture
def few():
    """The ratings of 60 users and 80 films, numbered anew, to learn from and held out."""
    ratings = als.load_ratings(None)
    assert [len(column) for column in ratings] == [100_004] * 3
    assert [len(np.unique(column)) for column in ratings] == [671, 9066, 10]
    often = np.argsort(-np.bincount(ratings.item))[:80]
    ratings = ratings.part((ratings.user < 60) & np.isin(ratings.item, often))
    user, item = (np.unique(column, return_inverse=True)[1] for column in ratings[:2])
    sizes = int(user.max()) + 1, int(item.max()) + 1
    return *als.split(als.Ratings(user, item, ratings.value)), sizes


def factors(problem, sizes, implicit, linalg):
    x, y = als.start(sizes, RANK)
    for _ in range(SWEEPS):
        x, y = als.sweep(problem.by_user, problem.by_item, x, y, implicit=implicit, linalg=linalg)
    return x, y


def dense(train, sizes):
    """The matrix of ratings, and which of its entries are known."""
    matrix, known = np.zeros(sizes), np.zeros(sizes, bool)
    matrix[train.user, train.item], known[train.user, train.item] = train.value, True
    return matrix, known


def reference(weights, targets, ridges, sizes):
    """x_u = (Y^T W_u Y + ridge_u I)^-1 Y^T W_u t_u, one by one, from the same start."""
    x, y = (np.array(side, float) for side in als.start(sizes, RANK))
    for _ in range(SWEEPS):
        for own, other, w, t, ridge in (
            (x, y, weights, targets, ridges[0]),
            (y, x, weights.T, targets.T, ridges[1]),
        ):
            for i in range(len(own)):
                matrix = (other.T * w[i]) @ other + ridge[i] * np.eye(RANK)
                own[i] = np.linalg.solve(matrix, other.T @ (w[i] * t[i]))
    return x, y


@pytest.mark.parametrize("linalg", ["jax_batched", "stock"])
def test_explicit_feedback_is_the_formula(few, linalg):
    train, test, sizes = few
    problem = als.explicit_problem(train, test, sizes)
    x, y = factors(problem, sizes, False, als.jb if linalg == "jax_batched" else jax.scipy.linalg)

    matrix, known = dense(train, sizes)
    mean = train.value.mean()
    of_item = (known * (matrix - mean)).sum(0) / (known.sum(0) + als.SHRINKAGE)
    of_user = (known * (matrix - mean - of_item)).sum(1) / (known.sum(1) + als.SHRINKAGE)
    means = mean + of_user[:, None] + of_item
    ridges = [als.EXPLICIT_RIDGE * known.sum(axis) for axis in (1, 0)]
    expected = reference(known * 1.0, matrix - means, ridges, sizes)
    np.testing.assert_allclose(x @ y.T, expected[0] @ expected[1].T, atol=1e-4)

    held_out = test.user, test.item
    left = test.value - means[held_out]
    assert problem.baseline == pytest.approx(np.sqrt(np.mean(left**2)), rel=1e-5)
    rmse = np.sqrt(np.mean((left - (expected[0] @ expected[1].T)[held_out]) ** 2))
    assert float(problem.error(x, y)) == pytest.approx(rmse, rel=1e-4)
    assert rmse < problem.baseline


def test_implicit_feedback_is_the_formula(few):
    train, test, sizes = few
    problem = als.implicit_problem(train, test, sizes)
    x, y = factors(problem, sizes, True, als.jb)

    matrix, known = dense(train, sizes)
    ridges = [np.full(size, als.IMPLICIT_RIDGE) for size in sizes]
    expected = reference(1 + als.CONFIDENCE * matrix, known * 1.0, ridges, sizes)
    np.testing.assert_allclose(x @ y.T, expected[0] @ expected[1].T, atol=1e-4)

    scores = np.asarray(x @ y.T)
    ranks = [np.mean(scores[u] > scores[u, i]) for u, i in zip(*test[:2], strict=True)]
    average = np.average(ranks, weights=test.value)
    assert float(problem.error(x, y)) == pytest.approx(average, abs=2e-3)
    popular = np.bincount(train.item, minlength=sizes[1])
    ranks = [np.mean(popular > popular[i]) for i in test.item]
    assert problem.baseline == pytest.approx(np.average(ranks, weights=test.value), rel=1e-5)


def test_both_layouts_of_movielens_are_read(tmp_path):
    rows = [(7, 31, 2.5, 12), (7, 10, 4.0, 13), (9, 31, 0.5, 14)]
    commas, colons = tmp_path / "ratings.csv", tmp_path / "ratings.dat"
    lines = [",".join(map(str, row)) for row in rows]
    commas.write_text("\n".join(["userId,movieId,rating,timestamp", *lines]) + "\n")
    colons.write_text("\n".join(lines).replace(",", "::") + "\n")
    for path in (commas, colons):
        ratings = als.load_ratings(path)
        assert [list(x) for x in ratings] == [[0, 0, 1], [1, 0, 1], [2.5, 4.0, 0.5]]


def test_the_program_prints_and_draws(tmp_path, capsys):
    ratings = tmp_path / "ratings.csv"
    rng = np.random.default_rng(0)
    lines = (f"{u},{i},{r},0" for u in range(30) for i, r in enumerate(rng.integers(1, 6, 9)))
    ratings.write_text("\n".join(lines) + "\n")
    picture = tmp_path / "als.png"
    options = ["--ratings", str(ratings), "--ranks", "4", "--sweeps", "2"]
    als.main([*options, "--feedback", "implicit", "--output", str(picture)])
    assert picture.stat().st_size > 10_000
    assert "270, 30, 9" in capsys.readouterr().out
