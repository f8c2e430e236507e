"""The routines of BLAS, in every option, with and without sizes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
import scipy.linalg.blas

import jax_batched as jb
from jax_batched import blas
from jax_batched._matrices import adjoint, normal

BATCH, M, N, K = 6, 7, 5, 4
# 0, 1, all, one huge, and others, for each of m, n and k.
SIZES = tuple(np.array(s) for s in ([0, 1, M, 3, 7, 2], [5, 1, N, 2, 0, 4], [3, 1, K, 0, 4, 2]))
DTYPES = ("float64", "complex128")


def every(*options):
    return list(itertools.product(*options))


def array(name, dtype, *shape):
    rng = np.random.default_rng(list(name.encode()))
    return normal(rng, dtype, (BATCH, *shape)).astype(dtype)


def op(a, trans):
    return (a, np.swapaxes(a, -1, -2), adjoint(a))[trans]


def shape(trans, rows, columns):
    return (columns, rows) if trans else (rows, columns)


def number(dtype, x):
    return x if dtype.startswith("float") else x * (1 - 0.5j)


def poisoned(x, trans, rows, columns):
    """x, with NaN beyond the rows and columns of op(x)."""
    x, mine = x.copy(), shape(trans, rows, columns)
    for i in range(BATCH):
        x[i, mine[0][i] :] = x[i, :, mine[1][i] :] = np.nan
    return x


def pieces(x, trans, rows, columns):
    mine = shape(trans, rows, columns)
    return [x[i, : mine[0][i], : mine[1][i]] for i in range(BATCH)]


def check(result, expected, rows, columns, other=0, rtol=1e-12):
    """The leading parts are as expected, the rest is `other`."""
    result = np.asarray(result)
    full = np.broadcast_to(other, result.shape).astype(result.dtype)
    for i in range(BATCH):
        full[i, : rows[i], : columns[i]] = expected[i]
    np.testing.assert_allclose(result, full, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize(("dtype", "trans_a", "trans_b"), every(DTYPES, range(3), range(3)))
def test_gemm(dtype, trans_a, trans_b):
    a, b = array("a", dtype, *shape(trans_a, M, K)), array("b", dtype, *shape(trans_b, K, N))
    c, alpha, beta = array("c", dtype, M, N), number(dtype, 2.0), number(dtype, -0.5)
    how = {"trans_a": trans_a, "trans_b": trans_b}
    whole = alpha * op(a, trans_a) @ op(b, trans_b)
    np.testing.assert_allclose(blas.gemm(a, b, alpha=alpha, **how), whole, rtol=1e-12, atol=1e-13)
    both = blas.gemm(a, b, c, alpha=alpha, beta=beta, **how)
    np.testing.assert_allclose(both, whole + beta * c, rtol=1e-12, atol=1e-13)
    m, n, k = SIZES
    a, b = poisoned(a, trans_a, m, k), poisoned(b, trans_b, k, n)
    lefts, rights = pieces(a, trans_a, m, k), pieces(b, trans_b, k, n)
    products = [op(x, trans_a) @ op(y, trans_b) for x, y in zip(lefts, rights, strict=True)]
    sized = jax.jit(lambda a, b, c, s: blas.gemm(a, b, c, beta=beta, sizes=s, **how))(
        a, b, c, SIZES
    )
    own = [x + beta * y for x, y in zip(products, pieces(c, 0, m, n), strict=True)]
    check(sized, own, m, n, c)
    check(blas.gemm(a, b, sizes=SIZES, **how), products, m, n)
    rest = [M] * BATCH
    check(
        blas.gemm(np.nan_to_num(a), b, sizes=(None, n, k), **how),
        [x @ y for x, y in zip(
            [op(np.nan_to_num(a[i]), trans_a)[:, : k[i]] for i in range(BATCH)],
            [op(y, trans_b) for y in rights], strict=True)],
        rest, n,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "name", "lower", "trans"),
    every(DTYPES, ("syrk", "herk", "syr2k", "her2k"), (False, True), (False, True)),
)
def test_rank_k(dtype, name, lower, trans):
    hermitian, two = name[:2] == "he", name.endswith("2k")
    how = (2 if hermitian else 1) if trans else 0
    a, b = (array(x, dtype, *shape(how, N, K)) for x in "ab")
    c = array("c", dtype, N, N)
    alpha = number(dtype, 2.0) if two or not hermitian else 2.0
    beta = -0.5 if hermitian else number(dtype, -0.5)
    star = adjoint if hermitian else (lambda x: np.swapaxes(x, -1, -2))
    own = np.tril(np.ones((N, N), bool)) if lower else np.triu(np.ones((N, N), bool))

    def update(a, b, c):
        a, b = op(a, how), op(b, how)
        if two:
            other = np.conj(alpha) if hermitian else alpha
            x = alpha * a @ star(b) + other * b @ star(a)
        else:
            x = alpha * a @ star(a)
        n = x.shape[-1]
        c = c - 1j * np.eye(n) * c.imag if hermitian and np.iscomplexobj(c) else c
        return x + beta * c

    options = {"lower": lower, "trans": how, "alpha": alpha}
    operands = (a, b) if two else (a,)
    f = getattr(blas, name)
    result = f(*operands, c, beta=beta, **options)
    np.testing.assert_allclose(result, np.where(own, update(a, b, c), c), rtol=1e-12, atol=1e-12)
    alone = f(*operands, **options)
    np.testing.assert_allclose(alone, np.where(own, update(a, b, 0 * c), 0), rtol=1e-12, atol=1e-12)
    _, n, k = SIZES
    sized = f(*(poisoned(x, how, n, k) for x in operands), c, beta=beta, sizes=(n, k), **options)
    parts = [
        update(*xs)
        for xs in zip(*(pieces(x, how, n, k) for x in (a, b)), pieces(c, 0, n, n), strict=True)
    ]
    expected = [
        np.where(own[: len(x), : len(x)], x, c[i, : len(x), : len(x)]) for i, x in enumerate(parts)
    ]
    check(sized, expected, n, n, c)


@pytest.mark.parametrize(
    ("dtype", "name", "side", "lower"),
    every(DTYPES, ("symm", "hemm"), (0, 1), (False, True)),
)
def test_symmetric(dtype, name, side, lower):
    order = N if side else M
    a, b, c = array("a", dtype, order, order), array("b", dtype, M, N), array("c", dtype, M, N)
    m, n, _ = SIZES
    mine = n if side else m

    def mirrored(a):
        half = np.tril(a, -1) if lower else np.triu(a, 1)
        if name == "symm":
            return half + np.swapaxes(half, -1, -2) + a * np.eye(a.shape[-1])
        return half + adjoint(half) + np.real(a) * np.eye(a.shape[-1])

    unread = np.triu(np.ones((order, order), bool), 1)
    spoiled = np.where(unread if lower else unread.T, np.nan, a)
    f, options = getattr(blas, name), {"side": side, "lower": lower}
    whole = b @ mirrored(a) if side else mirrored(a) @ b
    np.testing.assert_allclose(
        f(spoiled, b, c, alpha=2, beta=3, **options), 2 * whole + 3 * c, rtol=1e-12, atol=1e-12
    )
    sized = f(poisoned(spoiled, 0, mine, mine), poisoned(b, 0, m, n), sizes=(m, n), **options)
    own = [
        y @ mirrored(x) if side else mirrored(x) @ y
        for x, y in zip(pieces(a, 0, mine, mine), pieces(b, 0, m, n), strict=True)
    ]
    check(sized, own, m, n)


@pytest.mark.parametrize(
    ("dtype", "side", "lower", "trans", "unit"),
    every(DTYPES, (0, 1), (False, True), range(3), (False, True)),
)
def test_triangular(dtype, side, lower, trans, unit):
    """trmm, and trsm as its inverse."""
    order = N if side else M
    a, b = array("a", dtype, order, order) / 4, array("b", dtype, M, N)
    a = a + 2 * np.eye(order)
    m, n, _ = SIZES
    mine = n if side else m
    unread = np.triu(np.ones((order, order), bool), 0 if unit else 1)
    unread = unread if lower else unread.T
    spoiled = np.where(unread, np.nan, a)
    options = {"side": side, "lower": lower, "trans_a": trans, "unit_diagonal": unit, "alpha": 2}

    def product(a, b):
        half = np.tril(a, -1) if lower else np.triu(a, 1)
        x = op(half + (1 if unit else a) * np.eye(len(a)), trans)
        return 2 * (b @ x if side else x @ b)

    whole = np.stack([product(x, y) for x, y in zip(a, b, strict=True)])
    np.testing.assert_allclose(blas.trmm(spoiled, b, **options), whole, rtol=1e-12, atol=1e-12)
    options["alpha"] = 0.5
    np.testing.assert_allclose(blas.trsm(spoiled, whole, **options), b, rtol=1e-11, atol=1e-11)
    parts = zip(pieces(a, 0, mine, mine), pieces(b, 0, m, n), strict=True)
    own = [product(x, y) for x, y in parts]
    operands = poisoned(spoiled, 0, mine, mine), poisoned(b, 0, m, n)
    sized = blas.trmm(*operands, sizes=(m, n), **options | {"alpha": 2})
    check(sized, own, m, n)
    back = blas.trsm(operands[0], poisoned(np.asarray(sized), 0, m, n), sizes=(m, n), **options)
    check(back, pieces(b, 0, m, n), m, n, rtol=1e-10)


@pytest.mark.parametrize(("dtype", "trans"), every(DTYPES, range(3)))
def test_vectors(dtype, trans):
    a = array("a", dtype, M, N)
    inner, outer = (M, N) if trans else (N, M)
    x, y = array("x", dtype, inner), array("y", dtype, outer)
    whole = np.einsum("bij,bj->bi", op(a, trans), x)
    np.testing.assert_allclose(
        blas.gemv(a, x, y, alpha=2, beta=3, trans=trans), 2 * whole + 3 * y, rtol=1e-12
    )
    m, n, _ = SIZES
    mine, others = (m, n) if trans else (n, m)
    spoiled = x.copy()
    for i in range(BATCH):
        spoiled[i, mine[i] :] = np.nan
    sized = blas.gemv(poisoned(a, 0, m, n), spoiled, trans=trans, sizes=(m, n))
    for i in range(BATCH):
        own = op(a[i, : m[i], : n[i]], trans) @ x[i, : mine[i]]
        np.testing.assert_allclose(sized[i, : others[i]], own, rtol=1e-12, atol=1e-13)
        assert not np.asarray(sized[i, others[i] :]).any()
    t = array("t", dtype, N, N) / 4 + 2 * np.eye(N)
    v = array("v", dtype, N)
    solved = blas.trsv(t, v, lower=True, trans=trans, sizes=SIZES[1])
    for i, size in enumerate(SIZES[1]):
        if size:
            own = np.linalg.solve(op(np.tril(t[i, :size, :size]), trans), v[i, :size])
            np.testing.assert_allclose(solved[i, :size], own, rtol=1e-11)


def test_as_scipys():
    """The words are those of BLAS."""
    a, b, c = (array(x, "complex128", N, N)[0] for x in "abc")
    of_scipy = scipy.linalg.blas
    for ours, theirs in (
        (blas.gemm(a, b, c, alpha=2j, beta=3, trans_a=2, trans_b=1),
         of_scipy.zgemm(2j, a, b, 3, c, 2, 1)),
        (blas.herk(a, c, alpha=2, beta=3, trans=2, lower=True),
         of_scipy.zherk(2, a, 3, c, 2, 1)),
        (blas.syr2k(a, b, c, alpha=2j, beta=3, trans=1),
         of_scipy.zsyr2k(2j, a, b, 3, c, 1, 0)),
        (blas.her2k(a, b, c, alpha=2j, beta=3),
         of_scipy.zher2k(2j, a, b, 3, c, 0, 0)),
        (blas.hemm(a, b, c, alpha=2j, beta=3, side=1, lower=True),
         of_scipy.zhemm(2j, a, b, 3, c, 1, 1)),
        (blas.trmm(a, b, alpha=2j, side=1, lower=True, trans_a=2, unit_diagonal=True),
         of_scipy.ztrmm(2j, a, b, 1, 1, 2, 1)),
        (blas.trsm(a, b, alpha=2j, side=1, lower=True, trans_a=2),
         of_scipy.ztrsm(2j, a, b, 1, 1, 2, 0)),
    ):  # fmt: skip
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_laswp():
    a = array("a", "float64", M, N)
    _, pivots, permutation = jb.lu(a)
    moved = blas.laswp(a, pivots)
    assert ops.same_bits(moved, np.take_along_axis(a, np.asarray(permutation)[..., None], -2))
    assert ops.same_bits(blas.laswp(moved, pivots, inverse=True), a)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_16_bit_elements_are_summed_in_float32(dtype):
    a = np.full((1, 1, 4096), 1, dtype) + np.zeros((1, 1, 4096))
    x = blas.gemm(jnp.asarray(a, dtype), jnp.asarray(a, dtype), trans_b=1)
    assert x.dtype == dtype and float(x[0, 0, 0]) == 4096
    with pytest.raises(TypeError, match="syrk: a has dtype"):
        blas.syrk(jnp.asarray(a, dtype))


def test_sizes_out_of_range():
    """NaN for themselves alone."""
    a, b = array("a", "float64", M, K), array("b", "float64", K, N)
    wrong = np.array([-1, K + 1, 2**31 - 1, 2, 3, 4])
    x = np.asarray(blas.gemm(a, b, sizes=(None, None, wrong)))
    assert np.isnan(x[:3]).all() and not np.isnan(x[3:]).any()
    y = np.asarray(blas.trsm(a @ np.swapaxes(a, -1, -2), a, sizes=(wrong, None)))
    assert np.isnan(y[1]).all() == (K + 1 > M)
    assert np.isnan(y[[0, 2]]).all() and not np.isnan(y[3:]).any()
    z = np.asarray(blas.herk(a, sizes=(None, wrong)))
    assert np.isnan(z[:3]).all() and not np.isnan(z[3:]).any()


def test_c_is_not_read_where_beta_is_zero():
    a, b = array("a", "float64", M, K), array("b", "float64", K, N)
    c = np.full((BATCH, M, N), np.nan)
    expected = a @ b
    np.testing.assert_allclose(blas.gemm(a, b, c), expected, rtol=1e-12)
    beta = np.array([0.0, 1, 0, 1, 0, 1])
    x = np.asarray(jax.jit(lambda beta: blas.gemm(a, b, c, beta=beta))(beta))
    np.testing.assert_allclose(x[::2], expected[::2], rtol=1e-12)
    assert np.isnan(x[1::2]).all()


@pytest.mark.parametrize("name", ("gemm", "her2k", "hemm", "trmm", "trsm"))
def test_derivatives(name):
    """Against finite differences; zero in the padding."""
    rng = np.random.default_rng(0)
    a, b = (array(x, "float64", N, N) / 4 + 2 * np.eye(N) for x in "ab")
    n = SIZES[1]
    sizes = {"gemm": (n, n, n)}.get(name, (n, n))
    f = getattr(blas, name)

    @jax.jit
    def loss(a, b):
        return jnp.sum(jnp.sin(f(a, b, alpha=1.5, sizes=sizes)))

    for i, gradient in enumerate(jax.jit(jax.grad(loss, (0, 1)))(a, b)):
        direction = rng.normal(size=a.shape)
        step = 1e-6 * direction

        def along(sign, i=i, step=step):
            return loss(a + sign * step, b) if i == 0 else loss(a, b + sign * step)

        numeric = (along(1) - along(-1)) / 2e-6
        np.testing.assert_allclose(np.sum(gradient * direction), numeric, rtol=1e-6)
        for j, size in enumerate(n):
            assert not np.asarray(gradient)[j, size:].any()
            assert not np.asarray(gradient)[j, :, size:].any()


def test_padding_has_no_part_in_the_derivative_of_beta():
    a, c = np.eye(2)[None], np.full((1, 2, 2), np.nan)
    c[0, 0, 0] = 3
    f = lambda beta: blas.gemm(a, a, c, beta=beta, sizes=(1, 1, 1))[0, 0, 0]  # noqa: E731
    assert jax.grad(f)(1.0) == 3


def test_mapped():
    """Sizes and matrices have their batch dimensions independently."""
    a, b = array("a", "float64", M, K), array("b", "float64", K, N)
    m, n, k = SIZES
    expected = blas.gemm(a, b, sizes=(m, n, k))
    mapped = jax.vmap(lambda a, m, n: blas.gemm(a, b, sizes=(m, n, k)), (0, 0, 0))(a, m, n)
    assert mapped.shape == (BATCH, BATCH, M, N)
    for i in range(BATCH):
        np.testing.assert_allclose(mapped[i, i], expected[i], rtol=1e-12, atol=1e-13)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        shared = blas.gemm(a, b[0], a[0] @ b[0], beta=1, sizes=(m, None, k))
    assert shared.shape == (BATCH, M, N)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    (
        (lambda a: blas.gemm(a, a), ValueError, "gemm: the inner dimensions of op"),
        (lambda a: blas.gemm(a, a, trans_b=3), ValueError, "gemm: trans_b must be"),
        (lambda a: blas.gemm(a, a, a, trans_b=1), ValueError, "gemm: the shapes of the product"),
        (lambda a: blas.gemm(a, a, trans_b=1, sizes=3), TypeError, "gemm: sizes must be a tuple"),
        (lambda a: blas.gemm(a, a, trans_b=1, sizes=(1.0, 2, 3)), TypeError, "m of sizes"),
        (lambda a: blas.gemm(a, a, trans_b=1, alpha=1j), TypeError, "alpha of real operands"),
        (lambda a: blas.gemm(a, a, trans_b=1, alpha=np.ones(3)), ValueError, "alpha of shape"),
        (lambda a: blas.herk(1j * a, alpha=1j), TypeError, "herk: alpha must be real"),
        (lambda a: blas.trmm(a, a), ValueError, "trmm: a must have shape"),
        (lambda a: blas.symm(a @ a.mT, a, side=2), ValueError, "symm: side must be"),
        (lambda a: blas.gemv(a, a[0, 0, :1]), ValueError, "gemv: the inner dimensions of op"),
        (lambda a: blas.laswp(a, np.ones(2)), ValueError, "laswp: pivots must be integers"),
    ),
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(array("a", "float64", M, K))
