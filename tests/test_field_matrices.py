"""The test matrices of the field for general systems: ill conditioned, growing, scaled, singular.

A batch holds one of each, so a singular one has all the others beside it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
import scipy.linalg
from test_lu import checked_ratios

import jax_batched as jb
from jax_batched import _ffi
from jax_batched._matrices import MAX_RATIO, general, inverse_ratio, wide

PLATFORM = "cpu" if jax.default_backend() == "cpu" else "cuda"
SIZES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
RECTANGLES = ((5, 3), (3, 5), (33, 20), (20, 33), (70, 64), (64, 70), (130, 40), (40, 130))
RATIONAL = 9  # up to this n determinants are compared with rational arithmetic


@dataclasses.dataclass(frozen=True)
class Matrix:
    """How a test matrix is made, and what is known of it.

    Attributes:
      make: in float64, from (rng, n, finfo of the dtype).
      exact: its factors are not rounded, up to the first pivot that is zero.
      grows: U is much larger than the matrix, and residuals are with it.
      determinant: in closed form, from n.
      largest: n beyond which it grows too much, or its inverse overflows.
    """

    make: Callable[..., np.ndarray]
    exact: bool = False
    grows: bool = False
    determinant: Callable[[int], float] | None = None
    largest: int = 130


def kahan(n, angle=1.2):
    """Upper triangular, much worse conditioned than its diagonal shows."""
    sine, cosine = np.sin(angle), np.cos(angle)
    return sine ** np.arange(n)[:, None] * (np.eye(n) - cosine * np.triu(np.ones((n, n)), 1))


def frank(n):
    """Upper Hessenberg and ill conditioned; its determinant is 1."""
    i = np.arange(n)
    return np.triu(n - np.maximum(i[:, None], i), -1)


def wilkinson(n):
    """Its last column doubles in every step of the elimination."""
    a = np.eye(n) - np.tri(n, k=-1)
    a[:, -1] = 1
    return a


def foster(n):
    """A Volterra equation by the trapezoidal rule: its last column grows by 5/3 in every step."""
    a = 0.75 * np.eye(n) - 0.5 * np.tri(n, k=-1)
    a[:, 0] = -0.25
    a[0, 0] = 1
    a[:, -1] -= 0.5
    return a


def blocks(rng, n):
    """Diagonal blocks of 1, 2, 3, ... rows."""
    rows = []
    while sum(rows) < n:
        rows.append(min(len(rows) + 1, n - sum(rows)))
    return scipy.linalg.block_diag(*(rng.standard_normal((k, k)) for k in rows))


def scaled(rng, scales):
    """A well-conditioned matrix whose rows are scaled."""
    return general(rng, "float64", (len(scales), len(scales))) * scales[:, None]


def integers(rng, n, last=1):
    """L U of small integers, with permuted rows: exchanges and ties without rounding.

    The last entry of U is multiplied by `last`.
    """
    lower = np.eye(n) + np.diag(rng.choice([-1, 1], n - 1), -1)
    upper = np.triu(rng.integers(-2, 3, (n, n)), 1) + np.diag(rng.choice([-2, -1, 1, 2], n))
    upper[-1, -1] *= last
    return rng.permutation(lower @ upper)


def without(a, *index):
    """a with zeros there."""
    a[index] = 0
    return a


def large_and_small_rows(rng, n, form):
    power = 30 if form.bits == 64 else 15
    return scaled(rng, 10.0 ** (power * rng.choice([-1, 1], n)))


def subnormal_row(rng, n, form):
    return scaled(rng, np.where(np.arange(n) == n // 2, float(form.tiny), 1))


MATRICES = {
    "hilbert": Matrix(lambda rng, n, form: scipy.linalg.hilbert(n)),
    "vandermonde": Matrix(lambda rng, n, form: np.vander(np.linspace(-1, 1, n)), largest=65),
    "toeplitz": Matrix(lambda rng, n, form: scipy.linalg.toeplitz(*rng.standard_normal((2, n)))),
    "kahan": Matrix(
        lambda rng, n, form: kahan(n),
        determinant=lambda n: np.sin(1.2) ** (n * (n - 1) // 2),
    ),
    "frank": Matrix(lambda rng, n, form: frank(n), determinant=lambda n: 1),
    "wilkinson": Matrix(
        lambda rng, n, form: wilkinson(n),
        exact=True,
        grows=True,
        determinant=lambda n: 2.0 ** (n - 1),
        largest=33,
    ),
    "foster": Matrix(lambda rng, n, form: foster(n), grows=True, largest=33),
    "blocks": Matrix(lambda rng, n, form: blocks(rng, n)),
    "large and small rows": Matrix(large_and_small_rows),
    "subnormal row": Matrix(subnormal_row),
    "permutation": Matrix(lambda rng, n, form: rng.permutation(np.eye(n)), exact=True),
    "reversal": Matrix(
        lambda rng, n, form: np.eye(n)[::-1],
        exact=True,
        determinant=lambda n: (-1) ** (n * (n - 1) // 2),
    ),
    "cycle": Matrix(
        lambda rng, n, form: np.roll(np.eye(n), 1, axis=0),
        exact=True,
        determinant=lambda n: (-1) ** (n - 1),
    ),
    "integers": Matrix(lambda rng, n, form: integers(rng, n), exact=True),
    "all equal": Matrix(lambda rng, n, form: np.ones((n, n)), exact=True),
    "rank n - 1": Matrix(lambda rng, n, form: integers(rng, n, last=0), exact=True),
    "zero row": Matrix(lambda rng, n, form: without(integers(rng, n), n // 2), exact=True),
    "zero column": Matrix(
        lambda rng, n, form: without(integers(rng, n), slice(None), n // 2), exact=True
    ),
}


class Batch:
    """One of each matrix, m x n; rectangular ones are cut from square ones.

    Complex ones are multiplied by unitary diagonal matrices from both sides: exact ones by powers
    of i.
    """

    def __init__(self, dtype, m, n):
        rng = np.random.default_rng([m, n])
        size = max(m, n)
        self.matrices = {
            name: matrix for name, matrix in MATRICES.items() if size <= matrix.largest
        }
        self.exact = np.array([matrix.exact for matrix in self.matrices.values()])
        self.eps = float(jnp.finfo(dtype).eps)
        a = np.stack(
            [matrix.make(rng, size, jnp.finfo(dtype)) for matrix in self.matrices.values()]
        )
        self.phases = np.ones(len(a))  # of the determinants
        if np.dtype(dtype).kind == "c":
            quarters = np.array([1, 1j, -1, -1j])[rng.integers(0, 4, (2, len(a), size))]
            others = np.exp(2j * np.pi * rng.random(quarters.shape))
            left, right = np.where(self.exact[:, None], quarters, others)
            a = left[..., None] * a * right[..., None, :]
            self.phases = (left * right).prod(-1)
        self.a = a[:, :m, :n].astype(dtype)

    @functools.cached_property
    def limits(self):
        """LAPACK's threshold, times max |U| / max |A| where U grows."""
        limits = np.full(len(self.a), MAX_RATIO)
        for i, matrix in enumerate(self.matrices.values()):
            if matrix.grows:
                a = wide(self.a[i])
                upper = scipy.linalg.lu(a, permute_l=True)[1]
                limits[i] *= max(1, np.abs(upper).max() / np.abs(a).max())
        return limits

    @functools.cached_property
    def condition(self):
        """Of each matrix with its rows scaled to 1, since scaling by powers of two is exact."""
        a = wide(self.a)
        rows = np.abs(a).max(-1, keepdims=True)
        return np.linalg.cond(a / np.where(rows == 0, 1, rows), 1)

    @functools.cached_property
    def lapack(self):
        """Factors, pivots and info of the exact ones by SciPy."""
        (getrf,) = scipy.linalg.lapack.get_lapack_funcs(("getrf",), (self.a,))
        return {i: getrf(self.a[i]) for i in np.flatnonzero(self.exact)}

    @functools.cached_property
    def determinants(self):
        """Signs and logarithms: in closed form, by rational arithmetic or by NumPy."""
        n = self.a.shape[-1]
        signs, logs = np.linalg.slogdet(wide(self.a))
        for i, matrix in enumerate(self.matrices.values()):
            if matrix.determinant is not None:
                value = matrix.determinant(n)
                signs[i], logs[i] = np.sign(value) * self.phases[i], np.log(np.abs(value))
            elif n <= RATIONAL and not np.iscomplexobj(self.a):
                signs[i], logs[i] = rational_slogdet(self.a[i])
        return signs, logs

    def check_ratios(self, ratios, of=slice(None)):
        names = np.array(list(self.matrices))[of]
        for name, ratio, limit in zip(names, ratios, self.limits[of], strict=True):
            assert ratio <= limit, f"{name}, {self.a.shape}: ratio {ratio:.3g}"

    def check_info(self, info):
        """SciPy's where it is exact; others fail only if they are singular to working precision."""
        for i, (name, failed) in enumerate(zip(self.matrices, info, strict=True)):
            if self.exact[i]:
                assert failed == self.lapack[i][2], f"{name}, {self.a.shape}"
            else:
                assert failed == 0 or self.condition[i] > 0.1 / self.eps, f"{name}, {self.a.shape}"


def rational_slogdet(a):
    """Sign and logarithm of the determinant of a real matrix."""
    rows = [[Fraction(x) for x in row] for row in a.tolist()]
    det = Fraction(1)
    while rows:
        place = next((i for i, row in enumerate(rows) if row[0] != 0), None)
        if place is None:
            return 0, -math.inf
        pivot, *top = rows.pop(place)
        det *= pivot * (-1) ** place
        rows = [
            [x - first / pivot * y for x, y in zip(row, top, strict=True)] for first, *row in rows
        ]
    return np.sign(det.numerator), math.log(abs(det.numerator)) - math.log(det.denominator)


SOLVE, INV = ops.BY_NAME["solve_gen"], ops.BY_NAME["inv"]
LU = dataclasses.replace(INV, name="lu", operation="lu", function=jb.lu, calls=None)
DETERMINANTS = dataclasses.replace(
    INV,
    name="det",
    operation="det",
    function=lambda a: (jb.det(a), *jb.slogdet(a), *jb.lu(a, return_info=True)),
    calls=lambda dtype, n, nrhs: {"det", "slogdet", "lu"},
)


def sizes(op, kernel, dtype, candidates=SIZES):
    """Those that kernels of this library serve."""
    largest = _ffi.max_n(PLATFORM, "lu", dtype)
    return [n for n in candidates if n <= largest and ops.serves(op, kernel, dtype, n, 2)]


def on_every_kernel(*rows):
    kernels = ("lanes", "blocked") if PLATFORM == "cpu" else ()
    cases = [case for case in ops.by_kernel(rows, SIZES, paths=kernels) if sizes(*case)]
    return pytest.mark.parametrize(("op", "kernel", "dtype"), cases, ids=ops.ids)


@functools.cache
def batch_of(dtype, m, n):
    return Batch(dtype, m, n)


def batches(op, kernel, dtype):
    return [batch_of(dtype, n, n) for n in sizes(op, kernel, dtype)]


def right_hand_sides(batch):
    """A x for integers x, and random numbers of the size of A's rows."""
    a = wide(batch.a)
    rng = np.random.default_rng(a.shape[-1])
    x = rng.integers(-3, 4, (*a.shape[:-1], 1))
    b = np.abs(a).max(-1, keepdims=True) * rng.standard_normal(x.shape)
    return np.concatenate([a @ x, b], axis=-1).astype(batch.a.dtype)


@on_every_kernel(LU)
def test_factors(op, kernel, dtype):
    """Exact ones are LAPACK's, and so are pivots, also where entries tie."""
    square = batches(op, kernel, dtype)
    served = sizes(op, kernel, dtype, [max(shape) for shape in RECTANGLES])
    if kernel == "thread":  # of square matrices alone
        served = []
    cut = [batch_of(dtype, m, n) for m, n in RECTANGLES if max(m, n) in served]
    results = ops.on_each(op.with_info, [(batch.a,) for batch in square + cut], kernel)
    for batch, (factors, pivots, permutation, info) in zip(square + cut, results, strict=True):
        batch.check_ratios(checked_ratios(batch.a, factors, pivots, permutation))
        if batch in square:
            batch.check_info(info)
        for i, (expected, places, failed) in batch.lapack.items():
            steps = failed or len(places)
            np.testing.assert_array_equal(pivots[i, :steps], places[:steps])
            assert info[i] == failed
            if not failed:
                np.testing.assert_array_equal(factors[i], expected)


@on_every_kernel(SOLVE)
def test_solutions(op, kernel, dtype):
    square = batches(op, kernel, dtype)
    operands = [(batch.a, right_hand_sides(batch)) for batch in square]
    results = ops.on_each(op.with_info, operands, kernel)
    for batch, (a, b), (x, info) in zip(square, operands, results, strict=True):
        batch.check_info(info)
        good = info == 0
        assert np.isnan(x[~good]).all()
        batch.check_ratios(op.ratios((a[good], b[good]), x[good]), good)


@on_every_kernel(INV)
def test_inverses(op, kernel, dtype):
    """Each column as a solution; ||I - X A||, too, unless A is singular to working precision."""
    square = batches(op, kernel, dtype)
    results = ops.on_each(op.with_info, [(batch.a,) for batch in square], kernel)
    for batch, (x, info) in zip(square, results, strict=True):
        batch.check_info(info)
        good = info == 0
        assert np.isnan(x[~good]).all()
        regular = good & (batch.condition <= 0.1 / batch.eps)
        # On CUDA elimination goes on above the pivots (docs/numerics.md).
        good = good if PLATFORM == "cpu" else regular
        batch.check_ratios(op.ratios((batch.a[good],), x[good]), good)
        good = regular
        batch.check_ratios(inverse_ratio(batch.eps, wide(batch.a[good]), wide(x[good])), good)


def check_determinants(results, signs, logs, tolerance):
    """det and slogdet with relative errors up to the tolerance; det where it is in range."""
    form = jnp.finfo(results[0].dtype)
    det, own_signs, own_logs = map(wide, results)
    zero = signs == 0
    assert not det[zero].any()
    assert not own_signs[zero].any()
    assert np.isneginf(own_logs[zero]).all()
    det, own_signs, own_logs, signs, logs, tolerance = (
        x[~zero] for x in (det, own_signs, own_logs, signs, logs, tolerance)
    )
    assert (np.abs(own_signs - signs) <= tolerance).all()
    assert (np.abs(own_logs - logs) <= tolerance).all()
    smallest, tiny, largest = np.log([form.smallest_subnormal, form.tiny, form.max])
    assert np.isinf(det[logs > largest + tolerance]).all()
    assert not det[logs < smallest - 1 - tolerance].any()
    inside = (logs > tiny + tolerance) & (logs < largest - 1)
    errors = np.abs(det[inside] * np.exp(-logs[inside]) - signs[inside])
    assert (errors <= tolerance[inside]).all()


def product_of_pivots(factors, pivots):
    """Sign and logarithm of the determinant of L U with its rows exchanged back."""
    diagonal = np.diagonal(wide(factors), axis1=-2, axis2=-1)
    size = np.abs(diagonal)
    exchanges = (pivots != np.arange(pivots.shape[-1])).sum(-1)
    signs = (diagonal / np.where(size == 0, 1, size)).prod(-1) * (-1.0) ** exchanges
    with np.errstate(divide="ignore"):
        return signs, np.log(size).sum(-1)


@on_every_kernel(DETERMINANTS)
def test_determinants(op, kernel, dtype):
    """Exact where the factors are, zeros too; others are as good as their condition."""
    square = batches(op, kernel, dtype)
    results = ops.on_each(op, [(batch.a,) for batch in square], kernel)
    for batch, (*dets, factors, pivots, _, _) in zip(square, results, strict=True):
        n = batch.a.shape[-1]
        expected = [
            0 if failed else wide(np.diagonal(f)).prod() * (-1.0) ** np.sum(places != np.arange(n))
            for f, places, failed in batch.lapack.values()
        ]
        np.testing.assert_allclose(dets[0][batch.exact], expected, rtol=4 * batch.eps, atol=0)
        if PLATFORM == "cpu":  # where all operations have the same factors
            signs, logs = product_of_pivots(factors, pivots)
            check_determinants(dets, signs, logs, MAX_RATIO * batch.eps * (n + np.abs(logs)))
        signs, logs = batch.determinants
        errors = np.where(signs == 0, 0, n * batch.condition + np.abs(logs))
        tolerance = batch.limits * batch.eps * errors
        good = tolerance < 0.1
        check_determinants([x[good] for x in dets], signs[good], logs[good], tolerance[good])


@on_every_kernel(LU, SOLVE, INV, DETERMINANTS)
def test_a_singular_matrix_concerns_no_other(op, kernel, dtype):
    """The others' results are those beside identities."""
    for n in sizes(op, kernel, dtype, (3, 9, 17, 33, 65)):
        batch = batch_of(dtype, n, n)
        singular = [i for i, (_, _, info) in batch.lapack.items() if info]
        regular = np.delete(np.arange(len(batch.a)), singular)
        replaced = batch.a.copy()
        replaced[singular] = np.eye(n)
        b = (right_hand_sides(batch),) if op.takes_b else ()
        results = ops.on_each(op, [(batch.a, *b), (replaced, *b)], kernel)
        for x, y in zip(*map(jax.tree.leaves, results), strict=True):
            assert ops.same_bits(x[regular], y[regular]), n


@on_every_kernel(DETERMINANTS)
def test_wilkinsons_matrix_has_exact_factors(op, kernel, dtype):
    """Also where its last pivot, 2^(n - 1), is beyond the range."""
    orders = sizes(op, kernel, dtype)
    cases = [np.stack([wilkinson(n), np.eye(n)]).astype(dtype) for n in orders]
    results = ops.on_each(op, [(a,) for a in cases], kernel)
    for n, factors, (det, sign, log, own, pivots, _, info) in zip(
        orders, cases, results, strict=True
    ):
        powers = 2.0 ** np.arange(n)
        fits = powers[-1] <= float(jnp.finfo(dtype).max)
        factors[0, :, -1] = powers if fits else [*powers[:-1], np.inf]
        np.testing.assert_array_equal(own, factors)
        np.testing.assert_array_equal(pivots[0], np.arange(n))
        np.testing.assert_array_equal(info, [0 if fits else n, 0])
        np.testing.assert_array_equal(det, [powers[-1] if fits else np.nan, 1])
        np.testing.assert_array_equal(sign, [1 if fits else np.nan, 1])
        np.testing.assert_allclose(log, [np.log(powers[-1]) if fits else np.nan, 0], rtol=1e-6)


@on_every_kernel(SOLVE, INV)
def test_growth_beyond_the_range_fails_alone(op, kernel, dtype):
    orders = sizes(op, kernel, dtype, (8, 9, 33, 65))
    large = 2.0 ** (jnp.finfo(dtype).maxexp - 4)
    cases = [np.stack([np.eye(n), large * wilkinson(n), np.eye(n)]).astype(dtype) for n in orders]
    operands = [(a, np.ones_like(a[..., :1])) if op.takes_b else (a,) for a in cases]
    results = ops.on_each(op.with_info, operands, kernel)
    for n, (*_, right), (x, info) in zip(orders, operands, results, strict=True):
        np.testing.assert_array_equal(info, [0, n, 0])
        assert np.isnan(x[1]).all()
        np.testing.assert_array_equal(x[::2], right[::2])


def subnormal_integers(op, kernel, dtype):
    """Matrices of integers, SciPy's factors and pivots, and the same times the smallest number."""
    systems = []
    for batch in batches(op, kernel, dtype):
        i = list(batch.matrices).index("integers")
        a = batch.a[i]
        systems.append((a, *batch.lapack[i][:2], a * jnp.finfo(dtype).smallest_subnormal))
    return systems


@on_every_kernel(DETERMINANTS)
def test_subnormal_factors(op, kernel, dtype):
    smallest = jnp.finfo(dtype).smallest_subnormal
    systems = subnormal_integers(op, kernel, dtype)
    results = ops.on_each(op, [(tiny[None],) for *_, tiny in systems], kernel)
    for system, result in zip(systems, results, strict=True):
        a, factors, places, _ = system
        *dets, own, pivots, _, info = result
        upper = np.triu(np.ones(a.shape, bool))
        np.testing.assert_array_equal(own[0], np.where(upper, factors * smallest, factors))
        np.testing.assert_array_equal(pivots[0], places)
        assert not info.any()
        sign, log = product_of_pivots(factors[None], places[None])
        log += len(a) * np.log(float(smallest))
        check_determinants(dets, sign, log, MAX_RATIO * float(jnp.finfo(dtype).eps) * np.abs(log))


@on_every_kernel(SOLVE)
def test_subnormal_solutions(op, kernel, dtype):
    smallest = jnp.finfo(dtype).smallest_subnormal
    systems = subnormal_integers(op, kernel, dtype)
    solutions = [np.arange(len(a))[:, None] % 7 - [3, 2] for a, *_ in systems]
    operands = [
        (tiny[None], (a @ x).astype(dtype)[None] * smallest)
        for (a, *_, tiny), x in zip(systems, solutions, strict=True)
    ]
    for x, expected in zip(ops.on_each(op, operands, kernel), solutions, strict=True):
        np.testing.assert_array_equal(x[0], expected)


@on_every_kernel(INV)
def test_subnormal_inverses(op, kernel, dtype):
    """Of bidiagonal matrices, rows reversed, times the smallest power of two with an inverse."""
    power = float(jnp.finfo(dtype).tiny) / 2 * (1j if np.dtype(dtype).kind == "c" else 1)
    orders = sizes(op, kernel, dtype)
    cases = [(power * (np.eye(n) - np.eye(n, k=-1)))[None, ::-1].astype(dtype) for n in orders]
    results = ops.on_each(op.with_info, [(a,) for a in cases], kernel)
    for n, (x, info) in zip(orders, results, strict=True):
        assert not info.any()
        np.testing.assert_array_equal(x[0], np.tri(n)[:, ::-1] / power)
