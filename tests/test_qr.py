"""QR factorizations of any shape, products with Q, and their derivatives."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
import scipy.linalg
from families.qr import taus_of

import jax_batched as jb
from jax_batched._ffi import cuda_tiers, target_name
from jax_batched._matrices import MAX_RATIO, adjoint, norm, normal, wide

ON_CPU = jax.default_backend() == "cpu"
OF_CUDA = sorted({tier.kernel for tier in cuda_tiers() if tier.operation == "qr"})
KERNELS = ("", *(("reference", "lanes", "blocked") if ON_CPU else OF_CUDA), "lax")
OF_PRODUCTS = KERNELS if ON_CPU else ("", "lanes", "block", "lax")
SQUARES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100)
SHAPES = [(n, n) for n in SQUARES]
SHAPES += [(1, 4), (4, 1), (3, 7), (7, 3), (8, 40), (40, 8), (33, 31), (31, 70), (70, 33), (40, 70)]
SHAPES += [(200, 40), (40, 200), (300, 20)]
FEW = [(3, 3), (9, 9), (7, 3), (3, 7)]  # of what is slow to compile
BATCH = 19


def serves(kernel, dtype, m, n, operations=("qr",)):
    return ops.serves_shape(operations, kernel, dtype, m, n)


def matrices(dtype, m, n, batch=BATCH, seed=0):
    return normal(np.random.default_rng([seed, m, n]), dtype, (batch, m, n)).astype(dtype)


def run(f, *operands, kernel=""):
    return [np.asarray(x) for x in jax.tree.leaves(ops.compiled(f, *operands, kernel=kernel))]


def check(a, q, r):
    """LAPACK's ratios of every matrix, and what must hold exactly."""
    m, n = a.shape[-2:]
    eps = float(jnp.finfo(a.dtype).eps)
    assert q.dtype == r.dtype == a.dtype
    assert not np.tril(r, -1).any()
    assert not np.diagonal(r, axis1=-2, axis2=-1).imag.any()
    a, q, r = wide(a), wide(q), wide(r)
    largest = np.abs(a).max((-2, -1), keepdims=True)
    scale = np.where(largest == 0, 1, largest)  # of graded matrices norms may overflow
    difference = norm(a / scale - q @ (r / scale))
    assert (difference <= MAX_RATIO * max(m, n) * eps * norm(a / scale)).all()
    assert (norm(np.eye(q.shape[-1]) - adjoint(q) @ q) <= MAX_RATIO * m * eps).all()


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_factors(kernel, dtype):
    shapes = FEW if kernel == "lax" else SHAPES
    cases = [matrices(dtype, m, n) for m, n in shapes if serves(kernel, dtype, m, n)]
    forms = serves(kernel, dtype, 9, 9, ("householder_product",))

    def every_mode(a):
        return *jb.qr(a), *jb.qr(a, "complete"), jb.qr(a, "r"), *jb.qr(a, "raw")

    def form(a, h, taus):
        return jb.householder_product(h.mT[..., : min(a.shape[-2:])], taus)

    results = ops.on_each(every_mode, [(a,) for a in cases], kernel)
    calls = [(a, *result[-2:]) for a, result in zip(cases, results, strict=True)]
    products = ops.on_each(form, calls, kernel if forms else "")
    for a, (q, r, *complete, alone, h, taus), formed in zip(cases, results, products, strict=True):
        m, n = a.shape[-2:]
        k = min(m, n)
        assert q.shape == (BATCH, m, k)
        assert r.shape == (BATCH, k, n)
        check(a, q, r)
        assert complete[0].shape == (BATCH, m, m)
        assert complete[1].shape == (BATCH, m, n)
        check(a, *complete)
        tolerance = 50 * max(m, n) * float(jnp.finfo(dtype).eps)
        for own, other in ((r, alone), (q, formed), (q, complete[0][..., :k])):
            np.testing.assert_allclose(other, own, rtol=0, atol=tolerance * np.abs(own).max())
        np.testing.assert_array_equal(np.triu(h.swapaxes(1, 2)[:, :k]), r)
        assert taus.shape == (BATCH, k)
        expected_q, expected_r = np.linalg.qr(wide(a))  # LAPACK's signs
        np.testing.assert_allclose(q, expected_q, rtol=0, atol=100 * tolerance)
        np.testing.assert_allclose(r, expected_r, rtol=0, atol=100 * tolerance * np.abs(r).max())
        reflections, factors = np.linalg.qr(wide(a), mode="raw")
        bound = 100 * tolerance * np.abs(r).max()
        np.testing.assert_allclose(h, reflections, rtol=0, atol=bound)
        np.testing.assert_allclose(taus, factors, rtol=0, atol=bound)


@pytest.mark.skipif(not ON_CPU, reason="kernels of the CPU")
@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_kernels_give_the_same_bits(dtype):
    """Groups with matrices that fail, too."""
    shapes = [*SHAPES, (130, 130), (64, 8), (8, 64)]
    cases = [matrices(dtype, m, n) for m, n in shapes]
    for a in cases:
        a[::5, :, 0] = 0
        a[1::5, -1, -1] = np.nan
        a[2::5, 0, 0] = np.inf
        a[3::5] *= np.float32(1e15)
        a[4] *= np.float32(1e-30)

    def everything(a):
        h, taus = jb.qr(a, "raw")
        c = jnp.ones((*a.shape[:-1], 11), a.dtype) * jnp.arange(11)
        return (
            jb.qr(a), jb.qr(a, "complete"), jb.qr(a, "r"), h, taus,
            jb.householder_product(h.mT[..., : min(a.shape[-2:])], taus),
            [jb.qr_multiply(h.mT, taus, c, adjoint=adjoint) for adjoint in (False, True)],
        )  # fmt: skip

    ops.check_same_bits(everything, cases)


def difficult(dtype, m, n):
    """Conditions to 1e14, graded, columns of zeros, equal ones, rank one, next to overflow."""
    rng = np.random.default_rng([m, n])
    a = normal(rng, dtype, (13, m, n))
    power = 150 if np.finfo(dtype).bits == 64 else 18
    rows, columns = np.linspace(-1, 1, m)[:, None], np.linspace(1, -1, n)
    u, _, vh = np.linalg.svd(a[0], full_matrices=False)
    a[0] = u * np.logspace(0, -14, min(m, n)) @ vh
    a[1] *= 10.0 ** (power * rows)
    a[2] *= 10.0 ** (-power * rows)
    a[3] *= 10.0 ** (power * columns)
    a[4] *= 10.0 ** (-power * columns)
    a[5] = 0
    a[6, :, ::2] = 0
    a[7] = a[7, :, :1] @ a[7, :1, :]
    a[8, :, 1:] = a[8, :, :1]
    a[9] *= float(np.finfo(dtype).max) / (4 * m * np.abs(a[9]).max())
    a[10] *= float(np.finfo(dtype).tiny) * 64
    a[11] = np.tril(a[11])
    if m > 1 and n > 1:  # what is far below the largest entry of its column counts
        a[12] = np.eye(m, n)
        a[12, :2, 0] = 10.0 ** (1.6 * power), 10.0**-power
    return a.astype(dtype)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_difficult_matrices(kernel, dtype):
    shapes = (
        FEW[:3] if kernel == "lax" else [(3, 3), (9, 9), (40, 12), (12, 40), (33, 33), (70, 64)]
    )
    for m, n in shapes:
        if not serves(kernel, dtype, m, n):
            continue
        a = difficult(dtype, m, n)
        # LAPACK's complex routines overflow, the CPU's flush subnormal numbers, cuSOLVER overflows,
        # and has NaN for equal columns of complex64.
        if kernel == "lax":
            a = np.delete(a, [9, 10] if ON_CPU else [8, 9, 10, 12], 0)
        q, r = run(jb.qr, a, kernel=kernel)
        check(a, q, r)
        if len(a) > 12 or ON_CPU:
            assert r[-1, 0, 0].real < 0
        (alone,) = run(lambda a: jb.qr(a, "r"), a, kernel=kernel)
        scale = np.maximum(np.abs(r).max((-2, -1), keepdims=True), np.finfo(dtype).tiny)
        np.testing.assert_allclose(alone / scale, r / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_graded_columns_keep_their_digits(kernel, dtype):
    """Column by column: R D is the R of A D, for any powers of two that fit."""
    for m, n in ((5, 5), (9, 9), (40, 33)) if kernel != "lax" else ((9, 9),):
        if not serves(kernel, dtype, m, n):
            continue
        a = matrices(dtype, m, n, 3)
        power = 400 if np.finfo(dtype).bits == 64 else 50
        d = np.ldexp(1.0, np.linspace(-power, power, n).astype(int)).astype(a.real.dtype)
        (plain,) = run(lambda a: jb.qr(a, "r"), a, kernel=kernel)
        (graded,) = run(lambda a: jb.qr(a, "r"), a * d, kernel=kernel)
        tolerance = 100 * m * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(graded / d, plain, rtol=0, atol=tolerance * np.abs(plain).max())


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_and_inf_concern_their_own_matrix_alone(kernel, dtype):
    for m, n in ((3, 3), (9, 5), (40, 36)) if kernel != "lax" else ((3, 3), (9, 5)):
        if not serves(kernel, dtype, m, n):
            continue
        a = matrices(dtype, m, n)
        good = a.copy()
        a[3, m - 1, n - 1] = np.nan
        a[7, 0, 0] = np.inf
        bad = np.isin(np.arange(BATCH), (3, 7))
        for mode in ("reduced", "complete", "r"):
            *q, r = run(lambda a, mode=mode: jb.qr(a, mode), a, kernel=kernel)
            *clean_q, clean_r = run(lambda a, mode=mode: jb.qr(a, mode), good, kernel=kernel)
            for x, y in zip((*q, r), (*clean_q, clean_r), strict=True):
                assert ops.same_bits(x[~bad], y[~bad])
            for x in q:
                assert np.isnan(x[bad]).all()
            upper = np.broadcast_to(np.triu(np.ones(r.shape[-2:], bool)), r[bad].shape)
            np.testing.assert_array_equal(np.isnan(r[bad]), upper)
            assert not np.tril(r, -1).any()


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", OF_PRODUCTS)
def test_products_with_q(kernel, dtype):
    shapes = [(5, 3, 6), (3, 5, 6)]
    if kernel != "lax":
        shapes += [(40, 33, 6), (64, 8, 33), (40, 9, 9)]
        shapes += [(300, 40, 9)] if kernel != "lanes" or ON_CPU else []
    for m, n, columns in shapes:
        a, c = matrices(dtype, m, n, 5), matrices(dtype, m, columns, 5, seed=1)
        q = np.linalg.qr(wide(a), mode="complete")[0]

        h, taus = jb.qr(a, "raw")

        def products(c, m=m, h=h, taus=taus):
            return [
                jb.qr_multiply(h.mT, taus, x, left=left, adjoint=adjoint)
                for adjoint in (False, True)
                for x, left in ((c, True), (jnp.swapaxes(c, -1, -2), False), (jnp.ones(m), True))
            ]

        results = run(products, c, kernel=kernel)
        turned = c.swapaxes(-1, -2)
        ones = np.ones(m)
        expected = [q @ c, turned @ q, q @ ones]
        q = adjoint(q)
        expected += [q @ c, turned @ q, q @ ones]
        for x, y in zip(results, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1000 * m * float(jnp.finfo(dtype).eps))


def test_more_columns_than_reflections():
    a = matrices("float64", 7, 5, 3)
    taus = np.asarray(taus_of(a))[:, :2]
    expected = np.stack(
        [
            scipy.linalg.lapack.dorgqr(np.asfortranarray(x), t)[0]
            for x, t in zip(a, taus, strict=True)
        ]
    )
    for kernel in OF_PRODUCTS:
        (q,) = run(jb.householder_product, a, taus, kernel=kernel)
        np.testing.assert_allclose(q, expected, atol=1e-13)


def test_operands_broadcast():
    """One set of reflections for many matrices, and many factors for one."""
    a, c = matrices("float64", 6, 4, 3), matrices("float64", 6, 2, 3, seed=1)
    taus = np.asarray(taus_of(a))
    shared = jax.vmap(jb.qr_multiply, in_axes=(None, None, 0))(a[0], taus[0], c)
    np.testing.assert_allclose(shared, [jb.qr_multiply(a[0], taus[0], x) for x in c], atol=1e-14)
    factors = jax.vmap(jb.householder_product, in_axes=(None, 0))(a[0], taus)
    np.testing.assert_allclose(factors, [jb.householder_product(a[0], t) for t in taus], atol=1e-14)


def test_empty_shapes():
    for shape in ((0, 3, 3), (2, 0, 0), (2, 0, 3), (2, 3, 0), (0, 0)):
        m, n = shape[-2:]
        k = min(m, n)
        a = jnp.zeros(shape)
        for mode, columns in (("reduced", k), ("complete", m)):
            q, r = jb.qr(a, mode)
            assert q.shape == (*shape[:-1], columns)
            assert r.shape == (*shape[:-2], columns, n)
            np.testing.assert_array_equal(q, np.broadcast_to(np.eye(m, columns), q.shape))
        assert jb.qr(a, "r").shape == (*shape[:-2], k, n)
        h, taus = jb.qr(a, "raw")
        assert h.shape == (*shape[:-2], n, m)
        assert taus.shape == (*shape[:-2], k)
        assert jb.qr_multiply(h.mT, taus, jnp.ones(m)).shape == shape[:-1]


def test_what_is_refused():
    with pytest.raises(
        ValueError, match="qr: mode must be one of 'reduced', 'complete', 'r', 'raw'"
    ):
        jb.qr(np.eye(3), mode="full")
    with pytest.raises(ValueError, match="qr: a must have shape"):
        jb.qr(np.ones(3))
    with pytest.raises(ValueError, match="householder_product: a must have at least as many rows"):
        jb.householder_product(np.ones((2, 3)), np.ones(2))
    with pytest.raises(ValueError, match="householder_product: taus must have shape"):
        jb.householder_product(np.ones((3, 2)), np.ones(3))
    with pytest.raises(ValueError, match="qr_multiply: c must have shape"):
        jb.qr_multiply(np.ones((3, 2)), np.ones(2), np.ones(2))
    with pytest.raises(NotImplementedError, match='mode="raw" has no derivative'):
        jax.grad(lambda a: jb.qr(a, "raw")[1].sum())(np.eye(3))


DERIVATIVES = [
    ("reduced", (4, 4)),
    ("reduced", (6, 3)),
    ("reduced", (3, 5)),
    ("complete", (4, 4)),
    ("complete", (3, 5)),
    ("complete", (6, 3)),
    ("r", (4, 4)),
    ("r", (6, 3)),
    ("r", (3, 5)),
]


@pytest.mark.parametrize("dtype", ("float64", "complex128"))
@pytest.mark.parametrize(("mode", "shape"), DERIVATIVES)
def test_derivatives(mode, shape, dtype):
    """Forward and reverse, once and twice, against differences of the function itself."""
    check_derivatives(lambda a: jax.tree.leaves(jb.qr(a, mode)), matrices(dtype, *shape, 3))


def inner(x, y):
    return sum(np.real(np.sum(a * b)) for a, b in zip(x, y, strict=True))


def check_derivatives(f, *operands, step=1e-6):
    rng = np.random.default_rng(2)

    def like(x):
        return jnp.asarray(normal(rng, x.dtype, x.shape).astype(x.dtype))

    tangents = tuple(like(x) for x in operands)

    def moved(by):
        return tuple(x + by * t for x, t in zip(operands, tangents, strict=True))

    def difference(f):
        pairs = zip(f(*moved(step)), f(*moved(-step)), strict=True)
        return [(x - y) / (2 * step) for x, y in pairs]

    results, derivatives = jax.jvp(f, operands, tangents)
    for dx, expected in zip(derivatives, difference(f), strict=True):
        np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-6)
    cotangents = [like(x) for x in results]
    pulled = jax.vjp(f, *operands)[1](cotangents)
    np.testing.assert_allclose(inner(pulled, tangents), inner(cotangents, derivatives), rtol=1e-8)

    def directional(*operands):
        return jax.jvp(f, operands, tangents)[1]

    second = jax.jvp(directional, operands, tangents)[1]
    for dx, expected in zip(second, difference(directional), strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-5 * max(scale, 1))


@pytest.mark.parametrize("dtype", ("float64", "complex128"))
def test_derivatives_of_products_with_q(dtype):
    """By the reflections, their factors and what is multiplied."""
    a, c = matrices(dtype, 5, 3, 2), matrices(dtype, 5, 2, 2, seed=1)
    taus = matrices(dtype, 3, 1, 2, seed=2)[..., 0]
    for turned in (False, True):
        check_derivatives(
            lambda a, taus, c, turned=turned: [jb.qr_multiply(a, taus, c, adjoint=turned)],
            a, taus, c,
        )  # fmt: skip
    check_derivatives(lambda a, taus: [jb.householder_product(a, taus)], a, taus)


def test_derivatives_of_singular_matrices_are_nan_alone():
    a = matrices("float64", 5, 3, 4)
    a[1, :, 2] = 0
    for mode in ("reduced", "r"):
        gradient = jax.grad(lambda a, mode=mode: jax.tree.leaves(jb.qr(a, mode))[-1].sum())(a)
        bad = np.isnan(gradient).any((-2, -1))
        np.testing.assert_array_equal(bad, np.arange(4) == 1)


def test_jaxs_own_functions_under_the_override():
    a, c = matrices("complex128", 6, 4, 7), matrices("complex128", 6, 2, 7, seed=1)
    h, taus = jnp.linalg.qr(a, mode="raw")
    functions = {
        "qr": [
            lambda: jnp.linalg.qr(a),
            lambda: jnp.linalg.qr(a, "complete"),
            lambda: jnp.linalg.qr(a, "r"),
            lambda: jax.scipy.linalg.qr(a[0]),
        ],
        "householder_product": [lambda: jax.lax.linalg.householder_product(h.mT, taus)],
        "qr_multiply": [
            lambda: jax.lax.linalg.ormqr(h.mT, taus, c),
            lambda: jax.lax.linalg.ormqr(h.mT, taus, c, transpose=True),
        ],
        "svd": [lambda: jnp.linalg.lstsq(a[0], c[0])[0]],
        "": [  # these stay JAX's
            lambda: jax.lax.linalg.ormqr(h.mT, taus, c.mT, left=False),
            lambda: jax.lax.linalg.qr(a, pivoting=True),
            lambda: jnp.linalg.qr(a, "raw"),
        ],
    }
    for name, calls in functions.items():
        for f in calls:
            expected = f()
            with jb.override_jax_linalg():
                lowered = jax.jit(lambda f=f: f()).lower()
                text = lowered.as_text()
                assert (target_name(name or "qr") in text) == bool(name)
                results = lowered.compile()()
            for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", (1, 4, 7))
def test_a_square_root_filter(n):
    """As one with covariances, and its gradient against differences."""
    path = Path(__file__).parents[1] / "benchmarks" / "kalman.py"
    spec = importlib.util.spec_from_file_location("kalman", path)
    kalman = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kalman)
    a = matrices("float64", n, n, 6) / (2 * n)

    def likelihood(a):
        return kalman.square_root_filter(
            lambda x: jb.qr(x, "r"), lambda x, y: jb.solve_triangular(x, y, trans=1), a
        )

    np.testing.assert_allclose(likelihood(jnp.asarray(a)), kalman.plain_filter(a), rtol=1e-12)
    change, step = matrices("float64", n, n, 6, seed=1), 1e-6
    difference = kalman.plain_filter(a + step * change) - kalman.plain_filter(a - step * change)
    _, derivative = jax.jvp(likelihood, (a,), (change,))
    np.testing.assert_allclose(derivative, difference / (2 * step), rtol=1e-6)


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_many_rows(dtype):
    """By blocks of rows: LAPACK's signs, also where the first rows are zero."""
    for m, n in ((513, 1), (700, 3), (1300, 20), (600, 64)):
        a = matrices(dtype, m, n, 4)
        a[1, : m // 2] = 0
        a[2] *= 1e-30
        lowered = jax.jit(jb.qr).lower(a)
        assert (target_name("qr") in lowered.as_text()) == (n > 8 or not ON_CPU)
        q, r = map(np.asarray, lowered.compile()(a))
        check(a, q, r)
        expected_q, expected_r = np.linalg.qr(wide(a))
        tolerance = 100 * m * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(q, expected_q, rtol=0, atol=tolerance)
        np.testing.assert_allclose(jb.qr(a, "r"), r, rtol=0, atol=tolerance * np.abs(r).max())
        bound = tolerance * np.abs(expected_r).max((1, 2), keepdims=True)
        assert (np.abs(r - expected_r) <= bound).all()
        a[3, -1, 0] = np.nan
        spoilt_q, spoilt_r = run(jb.qr, a)
        assert ops.same_bits(spoilt_q[:3], q[:3])
        assert np.isnan(spoilt_q[3]).all()
        np.testing.assert_array_equal(np.isnan(spoilt_r[3]), np.triu(np.ones((n, n), bool)))


def test_derivatives_of_many_rows():
    a = matrices("float64", 530, 3, 1)
    check_derivatives(lambda a: list(jb.qr(a)), a)


def test_beyond_the_kernels():
    for shape in ((1, 520, 130), (1, 5, 520)):
        a = np.random.default_rng(0).standard_normal(shape)
        lowered = jax.jit(jb.qr).lower(a)
        assert target_name("qr") not in lowered.as_text()
        check(a, *map(np.asarray, lowered.compile()(a)))


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_signs_of_tall_matrices_with_nothing_to_eliminate(dtype):
    """Blocks of rows have LAPACK's signs also where its reflections are identities."""
    n, m = 20, 600
    tops = [np.triu(x) for x in matrices(dtype, n, n, 4)]  # one whole; others in part
    tops[1] = np.triu(matrices(dtype, n, n, 1)[0], -1)
    tops[2][5, 2] = 1
    a = np.zeros((4, m, n), dtype)
    a[:, :n] = tops
    a[3, 30:, 7:] = 1
    a[3, 31:, 9:] += np.arange(m - 31)[:, None]
    if np.iscomplexobj(a):
        a[:, np.arange(n), np.arange(n)] = a[:, np.arange(n), np.arange(n)].real
        a[0, 3, 3] += 1j
    q, r = run(jb.qr, a, kernel="composed")
    (alone,) = run(lambda a: jb.qr(a, "r"), a, kernel="composed")
    expected = np.stack([np.linalg.qr(x)[1] for x in a])
    some = np.s_[:, :9]  # beyond, nothing is left of the last matrix's columns but rounding
    tolerance = 1000 * float(jnp.finfo(dtype).eps) * np.abs(a).max()
    for x in (r, alone):
        np.testing.assert_allclose(x[some], expected[some], rtol=0, atol=tolerance)
    for i in (0, 2):
        np.testing.assert_allclose(r[i], expected[i], rtol=0, atol=tolerance)
        np.testing.assert_allclose(q[i] @ r[i], a[i], rtol=0, atol=tolerance)
