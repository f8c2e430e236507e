"""The derivative of cholesky as two linear maps, each the other's transpose, one with a kernel."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
from families.cholesky import PULLBACK_MAX_N

import jax_batched as jb
from jax_batched import _matrices as matrices
from jax_batched.cholesky_pullback import cholesky_pullback_op, cholesky_pushforward_op

CHOLESKY = ops.of("cholesky")

PLATFORM = "cpu" if jax.default_backend() == "cpu" else "cuda"
# Around the sizes where kernels change how they work, and where there is none.
SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 81, 97, 129)
FLAGS = [
    {"upper": upper, "symmetrize": symmetrize}
    for upper, symmetrize in itertools.product((False, True), repeat=2)
]
flags_ids = [
    f"{'upper' if f['upper'] else 'lower'}-{'mean' if f['symmetrize'] else 'triangle'}"
    for f in FLAGS
]
every_flag = pytest.mark.parametrize("flags", FLAGS, ids=flags_ids)


def operands(dtype, n, batch, *, upper, symmetrize, seed=0):
    """A factor and a cotangent, with NaN in the triangle that is not read."""
    rng = np.random.default_rng(seed)
    below = matrices.normal(rng, dtype, (*batch, n, n)) / (2 * np.sqrt(n))
    diagonal = rng.uniform(1, 2, (*batch, n))
    lower = np.tril(np.where(np.eye(n, dtype=bool), diagonal[..., None], below))
    factor = matrices.adjoint(lower) if upper else lower
    cotangent = matrices.normal(rng, dtype, (*batch, n, n))
    unread = np.tril(np.ones((n, n), bool), -1)
    cotangent[..., unread if upper else unread.T] = np.nan
    return factor.astype(dtype), cotangent.astype(dtype)


def expected(factor, cotangent, *, upper, symmetrize):
    """conj(S), S = L^-H (P + P^H) / 2 L^-1, P = Phi(L^H G), G = conj(cotangent); in float64."""
    n = factor.shape[-1]
    read = np.triu if upper else np.tril
    factor, cotangent = matrices.wide(factor), read(np.nan_to_num(matrices.wide(cotangent)))
    lower = matrices.adjoint(factor) if upper else factor
    gradient = np.conj(matrices.adjoint(cotangent) if upper else cotangent)
    p = np.tril(matrices.adjoint(lower) @ gradient)
    p = np.where(np.eye(n, dtype=bool), np.real(p) / 2, p)
    inverse = np.linalg.inv(lower)
    s = np.conj(matrices.adjoint(inverse) @ ((p + matrices.adjoint(p)) / 2) @ inverse)
    return s if symmetrize else read(s) + read(s, 1 if upper else -1)


def check(result, factor, cotangent, flags):
    want = expected(factor, cotangent, **flags)
    assert result.dtype == factor.dtype
    n = factor.shape[-1]
    scale = np.abs(want).max((-2, -1), keepdims=True)
    unit = np.finfo(result.dtype).eps
    assert (np.abs(matrices.wide(result) - want) <= 4 * (n + 4) * unit * scale).all()
    zero = np.zeros((n, n), bool)
    if not flags["symmetrize"]:
        zero = np.tril(~zero, -1) if flags["upper"] else np.triu(~zero, 1)
    assert not np.asarray(result)[..., zero].any()


@pytest.mark.parametrize("kernel", ("", "reference", "composed", "lax"))
@pytest.mark.parametrize("dtype", ops.DTYPES)
@every_flag
def test_values(flags, dtype, kernel):
    if kernel == "reference" and PLATFORM != "cpu":
        pytest.skip("a kernel of the CPU")
    cases = [
        operands(dtype, n, (5,), **flags, seed=n) for n in (SIZES if not kernel else (1, 5, 16))
    ]
    pullback = functools.partial(cholesky_pullback_op, **flags)
    for case, (result,) in zip(cases, ops.on_each(pullback, cases, kernel), strict=True):
        check(result, *case, flags)


def next_to_overflow(dtype, n, **flags):
    """Factors of about half the identity, and cotangents whose result is just finite."""
    factor, cotangent = operands(dtype, n, (5,), **flags, seed=n)
    eye = np.eye(n, dtype=factor.real.dtype)
    factor = (np.nan_to_num(factor) / 16 * (1 - eye) + eye / 2).astype(dtype)
    ones = np.nan_to_num(cotangent) / 16 * (1 - eye) + eye
    size = np.abs(expected(factor, ones, **flags)).max((-2, -1), keepdims=True)
    size = 0.96 * float(np.finfo(dtype).max) / size
    return factor, (ones * size).astype(dtype)


@pytest.mark.parametrize("kernel", ("", "reference", "lax"))
@pytest.mark.parametrize("dtype", ops.DTYPES)
@every_flag
def test_a_finite_result_does_not_overflow_on_the_way(flags, dtype, kernel):
    """Twice the result would overflow. A 256th of the cotangent gives a 256th, to the bit."""
    if kernel == "reference" and PLATFORM != "cpu":
        pytest.skip("a kernel of the CPU")
    cases = [next_to_overflow(dtype, n, **flags) for n in SIZES if not kernel or n < 18]
    less = [(factor, ops.times(ct, 2.0**-8).astype(dtype)) for factor, ct in cases]
    pullback = functools.partial(cholesky_pullback_op, **flags)
    if kernel == "lax":
        pullback, kernel = functools.partial(cholesky_pullback_op.rules.lax, **flags), ""
    results = [x for (x,) in ops.on_each(pullback, cases + less, kernel)]
    for (factor, ct), large, small in zip(
        less, results[: len(cases)], results[len(cases) :], strict=True
    ):
        check(small, factor, ct, flags)
        assert np.abs(matrices.wide(large)).max() > float(np.finfo(dtype).max) / 2
        assert ops.same_bits(large, ops.times(small, 2.0**8).astype(dtype))


@pytest.mark.parametrize("dtype", ("float32", "complex128"))
@every_flag
def test_neighbours_of_an_overflow_keep_their_bits(flags, dtype):
    for n in (3, 9, 20, 40):
        factor, ct = operands(dtype, n, (37,), **flags)
        large_factor, large = next_to_overflow(dtype, n, **flags)
        mixed_factor, mixed = factor.copy(), ct.copy()
        mixed_factor[::8], mixed[::8] = large_factor, large
        (alone,), (whole,) = ops.on_each(
            functools.partial(cholesky_pullback_op, **flags),
            [(factor, ct), (mixed_factor, mixed)],
        )
        others = np.arange(37) % 8 != 0
        assert np.isfinite(whole).all()
        assert ops.same_bits(whole[others], alone[others])


def test_gradients_next_to_overflow():
    """d sqrt(a) = da / (2 sqrt(a)); and means of tangents."""
    a = np.full((1, 1), 0.25, np.float32)
    large = np.full((1, 1), 3e38, np.float32)
    _, vjp = jax.vjp(jb.cholesky, a)
    np.testing.assert_array_equal(vjp(large)[0], large)
    _, tangent = jax.jvp(lambda x: jb.cholesky(x), (4 * a,), (large,))
    np.testing.assert_allclose(tangent, large / 2, rtol=1e-7)


@pytest.mark.parametrize("dtype", ("float32", "complex128"))
@every_flag
def test_a_matrix_does_not_see_its_neighbours(flags, dtype):
    """Its bits are the same alone, in any batch, under vmap and where operands are shared."""

    def pullback(factor, cotangent):
        return cholesky_pullback_op(factor, cotangent, **flags)[0]

    for n in (3, 8, 16, 23, 50):
        factor, cotangent = map(jnp.asarray, operands(dtype, n, (37,), **flags))
        whole = jax.jit(pullback)(factor, cotangent)
        for i in (0, 5, 36):
            assert ops.same_bits(jax.jit(pullback)(factor[i], cotangent[i]), whole[i])
        assert ops.same_bits(jax.jit(jax.vmap(pullback))(factor, cotangent), whole)
        shared_factor = jax.jit(jax.vmap(pullback, (None, 0)))(factor[5], cotangent)
        assert ops.same_bits(shared_factor[5], whole[5])
        shared_cotangent = jax.jit(jax.vmap(pullback, (0, None)))(factor, cotangent[5])
        assert ops.same_bits(shared_cotangent[5], whole[5])


@pytest.mark.parametrize("n", (4, 20, 40, 70))
@every_flag
def test_a_failed_factor_is_nan_alone(flags, n):
    factor, cotangent = operands("float32", n, (9,), **flags)
    failed = factor.copy()
    read = np.triu(np.ones((n, n), bool)) if flags["upper"] else np.tril(np.ones((n, n), bool))
    failed[::4, read] = np.nan
    pullback = jax.jit(functools.partial(cholesky_pullback_op, **flags))
    (good,), (bad,) = pullback(factor, cotangent), pullback(failed, cotangent)
    assert np.isnan(bad[::4][:, read]).all()
    others = np.arange(9) % 4 != 0
    assert ops.same_bits(bad[others], good[others])


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
@pytest.mark.parametrize("n", (4, 70))
@every_flag
def test_each_map_is_the_transpose_of_the_other(flags, n, dtype):
    """With the pairing of JAX: the real part of a product, nothing conjugated."""
    factor, cotangent = operands(dtype, n, (3,), **flags)
    factor, cotangent = jnp.asarray(factor), jnp.nan_to_num(cotangent)
    tangent = jnp.asarray(matrices.normal(np.random.default_rng(1), dtype, (3, n, n)))

    def pairing(x, y):
        return np.real(np.sum(np.asarray(x) * np.asarray(y)))

    for f, x, ct in (
        (cholesky_pushforward_op, tangent, cotangent),
        (cholesky_pullback_op, cotangent, tangent),
    ):
        linear = functools.partial(f, factor, **flags)
        (y,) = jax.jit(linear)(x)
        (back,) = jax.jit(jax.linear_transpose(linear, x))([ct])
        np.testing.assert_allclose(pairing(ct, y), pairing(back, x), rtol=1e-10)


def targets(f, *arguments):
    text = jax.jit(f).lower(*arguments).as_text()
    return sorted(re.findall(r"@jax_batched\.(\w+)\.v1", text))


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_a_gradient_is_one_factorization_and_one_pullback(dtype):
    def log_determinant(a):
        return 2 * jnp.sum(jnp.log(jnp.real(jnp.diagonal(jb.cholesky(a), axis1=-2, axis2=-1))))

    limit = PULLBACK_MAX_N[PLATFORM][dtype]
    for n in (1, 8, 33, limit):
        a = CHOLESKY[0].operands(dtype, batch=(4,), n=n)[0]
        assert targets(jax.grad(log_determinant), a) == ["cholesky", "cholesky_pullback"]
    a = CHOLESKY[0].operands(dtype, batch=(4,), n=limit + 1)[0]
    assert targets(jax.grad(log_determinant), a) == ["cholesky", *["triangular_solve"] * 2]


@pytest.mark.parametrize("shape", ((0, 4, 4), (3, 0, 0)))
@every_flag
def test_empty(flags, shape):
    a = jnp.zeros(shape)
    for f in (cholesky_pullback_op, cholesky_pushforward_op):
        (result,) = jax.jit(functools.partial(f, **flags))(a, a)
        assert result.shape == shape
