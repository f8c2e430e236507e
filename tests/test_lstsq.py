"""Least squares."""

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
from test_qr import check_derivatives, matrices

import jax_batched as jb
from jax_batched._ffi import target_name
from jax_batched._matrices import adjoint, wide

METHODS = ("qr", "cholesky")  # "svd": tests/test_svd.py


def expected(a, b):
    pairs = zip(wide(a), wide(b), strict=True)
    return np.stack([np.linalg.lstsq(x, y, rcond=None)[0] for x, y in pairs])


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("method", METHODS)
def test_solutions(method, dtype):
    for m, n in ((4, 4), (9, 3), (40, 12), (70, 40), (3, 5), (12, 40), (600, 7), (7, 600)):
        if method == "cholesky" and m < n:
            continue
        a, b = matrices(dtype, m, n, 5), matrices(dtype, m, 3, 5, seed=1)
        x, residuals, rank, info = jax.jit(lambda a, b: jb.lstsq(a, b, method=method))(a, b)
        best = expected(a, b)
        condition = np.linalg.cond(wide(a)).max()
        tolerance = 100 * condition**2 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(x, best, rtol=0, atol=tolerance * np.abs(best).max())
        squares = (np.abs(b - a @ best) ** 2).sum(-2)
        np.testing.assert_allclose(residuals, squares, rtol=tolerance, atol=tolerance)
        assert residuals.dtype == a.real.dtype
        np.testing.assert_array_equal(rank, min(m, n))
        np.testing.assert_array_equal(info, 0)
        assert rank.dtype == info.dtype == np.int32


def test_vectors_and_batches():
    a, b = matrices("float64", 6, 3, 4), matrices("float64", 6, 1, 4, seed=1)
    x, residuals, rank, info = jb.lstsq(a, b[0, :, 0])
    assert x.shape == (4, 3)
    assert residuals.shape == rank.shape == info.shape == (4,)
    mapped = jax.vmap(jb.lstsq)(a, b[..., 0])
    for own, other in zip(mapped, jb.lstsq(a, b), strict=True):
        np.testing.assert_allclose(own, other[..., 0] if other.ndim > own.ndim else other)
    one = jax.jit(jax.vmap(jb.lstsq, in_axes=(None, 0)))
    assert one.lower(a[0], b[..., 0]).as_text().count(target_name("qr")) <= 2
    np.testing.assert_allclose(
        one(a[0], b[..., 0]).x, expected(np.stack([a[0]] * 4), b)[..., 0], rtol=1e-10
    )


@pytest.mark.parametrize("method", METHODS)
def test_matrices_without_full_rank(method):
    """Their rank or their info tells, and no other matrix is affected."""
    a, b = matrices("float64", 9, 4, 6), matrices("float64", 9, 2, 6, seed=1)
    good = a.copy()
    a[1, :, 3] = 0
    a[2, :, 3] = a[2, :, 0] + a[2, :, 1]
    a[4, 5, 1] = np.nan
    clean = jb.lstsq(good, b, method=method)
    x, _, rank, info = jb.lstsq(a, b, method=method)
    np.testing.assert_array_equal(info, [0, 4, 0, 0, 1, 0])
    np.testing.assert_array_equal(rank, [4, 3, 3, 4, 0, 4])
    assert np.isnan(np.asarray(x)[[1, 4]]).all()
    others = np.array([0, 3, 5])
    assert ops.same_bits(np.asarray(x)[others], np.asarray(clean.x)[others])
    gradient = jax.grad(lambda a: jb.lstsq(a, b, method=method).x.sum())(a)
    finite = np.isfinite(gradient).all((-2, -1))
    np.testing.assert_array_equal(finite[[0, 1, 3, 4, 5]], [True, False, True, False, True])


@pytest.mark.parametrize("dtype", ("float32", "float64"))
@pytest.mark.parametrize("power", (0, 1, 2, 3, 5, 7, 12))
def test_normal_equations_are_as_good_as_qr(power, dtype):
    """At every condition: where they are not, the matrix is solved by QR."""
    rng = np.random.default_rng(power)
    u, _, vh = np.linalg.svd(rng.standard_normal((8, 50, 6)), full_matrices=False)
    a = (u * np.logspace(0, -power, 6) @ vh).astype(dtype)
    a[4:] *= np.logspace(-9, 9, 6, dtype=dtype)
    b = (a @ rng.standard_normal((8, 6, 2)) + 1e-3 * rng.standard_normal((8, 50, 2))).astype(dtype)
    errors = {}
    for method in METHODS:
        x, _, _, info = jb.lstsq(a, b, method=method)
        assert not info.any()
        residual = wide(b) - wide(a) @ wide(x)
        sizes = (
            np.linalg.norm(wide(a), axis=-2)[..., None] * np.linalg.norm(residual, axis=-2)[:, None]
        )
        errors[method] = (np.abs(adjoint(wide(a)) @ residual) / sizes).max((-2, -1))
    limit = 30 * np.maximum(errors["qr"], 10 * float(jnp.finfo(dtype).eps))
    assert (errors["cholesky"] <= limit).all()


@pytest.mark.parametrize("dtype", ("float64", "complex128"))
@pytest.mark.parametrize(
    ("method", "shape"),
    [
        *(("qr", shape) for shape in ((4, 4), (6, 3), (3, 5), (520, 2), (2, 520))),
        *(("cholesky", shape) for shape in ((4, 4), (6, 3))),
    ],
)
def test_derivatives(method, shape, dtype):
    a, b = matrices(dtype, *shape, 3), matrices(dtype, shape[0], 2, 3, seed=1)
    check_derivatives(lambda a, b: list(jb.lstsq(a, b, method=method)[:2]), a, b)


def test_the_derivative_reuses_the_factors():
    a, b = matrices("float64", 6, 3, 4), matrices("float64", 6, 1, 4, seed=1)
    text = jax.jit(jax.value_and_grad(lambda a: jb.lstsq(a, b).x.sum())).lower(a).as_text()
    assert text.count(f"@{target_name('qr')}(") == 1


def test_empty_shapes_and_what_is_refused():
    for m, n, k in ((0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 1)):
        x, residuals, rank, _ = jb.lstsq(jnp.zeros((2, m, n)), jnp.ones((2, m, k)))
        assert x.shape == (2, n, k)
        np.testing.assert_array_equal(residuals, np.full((2, k), m if n == 0 else residuals))
        assert rank.shape == (2,)
    with pytest.raises(ValueError, match="lstsq: method must be one of 'qr', 'cholesky', 'svd'"):
        jb.lstsq(np.eye(3), np.ones(3), method="lu")
    with pytest.raises(ValueError, match="lstsq: b must have shape"):
        jb.lstsq(np.eye(3), np.ones(2))
    with pytest.raises(ValueError, match='method="cholesky" takes at least as many rows'):
        jb.lstsq(np.ones((2, 3)), np.ones(2), method="cholesky")
