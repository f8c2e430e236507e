"""LU factorizations without exchanges of rows, whose small pivots are replaced."""

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
from test_qr import check_derivatives

import jax_batched as jb
from jax_batched._matrices import MAX_RATIO, norm, normal, wide

SHAPES = ((1, 1), (3, 3), (5, 9), (70, 40), (40, 70))


def dominant(dtype, m, n, batch=3):
    """Matrices that need no exchanges."""
    a = normal(np.random.default_rng([m, n]), dtype, (batch, m, n))
    return (a + 2 * max(m, n) * np.eye(m, n)).astype(dtype)


def expected(a, tiny):
    """The factors in float64 or complex128, step by step, and the number of pivots replaced."""
    a, replaced = wide(a).copy(), 0
    for k in range(min(a.shape)):
        pivot = a[k, k]
        if abs(pivot) < tiny:
            a[k, k] = tiny * (pivot / abs(pivot) if pivot else 1)
            replaced += 1
        a[k + 1 :, k] /= a[k, k]
        a[k + 1 :, k + 1 :] -= np.outer(a[k + 1 :, k], a[k, k + 1 :])
    return a, replaced


def product(factors):
    """L U, in float64 or complex128."""
    factors = wide(factors)
    m, n = factors.shape[-2:]
    k = min(m, n)
    lower = np.tril(factors[..., :, :k], -1) + np.eye(m, k)
    return lower @ np.triu(factors[..., :k, :])


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_factors(dtype):
    factor = jax.jit(lambda xs: [jb.lu(x, pivot=False, return_info=True) for x in xs])
    for shape, results in zip(SHAPES, factor([dominant(dtype, *s) for s in SHAPES]), strict=True):
        a = dominant(dtype, *shape)
        factors, pivots, permutation, info = results
        assert factors.dtype == dtype
        ratio = norm(wide(a) - product(factors)) / norm(wide(a))
        assert (ratio <= MAX_RATIO * max(shape) * float(jnp.finfo(dtype).eps)).all()
        assert (pivots == np.arange(min(shape))).all() and pivots.dtype == jnp.int32
        assert (permutation == np.arange(shape[0])).all() and permutation.dtype == jnp.int32
        assert not np.asarray(info).any()


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("n", (4, 40))
def test_small_pivots_are_replaced(n, dtype):
    """By the threshold with their sign, or phase; by itself where there is nothing."""
    a = dominant(dtype, n, n, 5)
    phase = np.exp(2j) if np.dtype(dtype).kind == "c" else -1
    a[0, 1, 1] = a[0, 1, 0] * a[0, 0, 1] / a[0, 0, 0] + 1e-3 * phase
    a[1, 0, 0], a[2, :] = 0, 0
    a[3, 2, 1] = np.nan
    tiny = np.array([0.1, 0.1, 0.1, 0.1, 1e3])
    factors, _, _, info = jb.lu(a, pivot=False, tiny=tiny, return_info=True)
    for i in (0, 1, 2, 4):
        own, replaced = expected(a[i], tiny[i])
        assert info[i] == replaced > 0
        tolerance = 1e4 * float(jnp.finfo(dtype).eps) * np.abs(own).max()
        np.testing.assert_allclose(factors[i], own, rtol=0, atol=tolerance)
    np.testing.assert_allclose(factors[0, 1, 1], 0.1 * phase, rtol=1e-2)
    np.testing.assert_array_equal(factors[2], 0.1 * np.eye(n, dtype=dtype))
    assert np.isnan(factors[3, 2, 2])
    unchanged, _, _ = jb.lu(dominant(dtype, n, n, 5), pivot=False)
    assert np.isfinite(unchanged).all()


@pytest.mark.parametrize("dtype", ("float32", "complex128"))
def test_bits_do_not_depend_on_the_batch(dtype):
    a = dominant(dtype, 45, 45, 19)
    factor = jax.jit(lambda a: jb.lu(a, pivot=False, tiny=1e-3)[0])
    whole = factor(a)
    for part in (slice(0, 1), slice(3, 8), slice(18, 19)):
        assert ops.same_bits(factor(a[part]), whole[part])
    assert ops.same_bits(jax.vmap(factor)(a), whole)


@pytest.mark.parametrize("dtype", ("float64", "complex128"))
@pytest.mark.parametrize("shape", ((4, 6), (11, 10)))
def test_derivatives(shape, dtype):
    """Of matrices with a pivot that is replaced, and without; by the threshold as well."""
    a = dominant(dtype, *shape, 2) / max(shape)
    a[1, 1, 1] = a[1, 1, 0] * a[1, 0, 1] / a[1, 0, 0] + 0.05
    tiny = np.full(2, 0.2)
    check_derivatives(jax.jit(lambda a, t: [jb.lu(a, pivot=False, tiny=t)[0]]), a, tiny)


def test_sizes_and_masks():
    """What continues a matrix counts neither as a pivot nor as one replaced."""
    n, sizes = 6, np.array([0, 3, 6, -1, 4])
    a = dominant("float64", n, n, 5)
    for x, size in zip(a, sizes, strict=True):
        x[max(size, 0) :] = x[:, max(size, 0) :] = np.nan
    where = np.arange(5) != 4
    options = {"pivot": False, "tiny": 8.0, "return_info": True}
    results = jax.jit(lambda a, s: jb.lu(a, sizes=s, where=where, **options))(a, sizes)
    factors, pivots, permutation, info = results
    for i in (0, 1, 2):
        own, replaced = expected(a[i, : sizes[i], : sizes[i]], 8.0)
        assert info[i] == replaced
        np.testing.assert_allclose(factors[i, : sizes[i], : sizes[i]], own, rtol=1e-12)
        assert np.count_nonzero(factors[i]) == np.count_nonzero(own)
    assert info[3] == -2 and np.isnan(factors[3]).all()
    assert info[4] == -1 and not np.asarray(factors[4]).any()
    assert not np.asarray(pivots[4]).any() and not np.asarray(permutation[4]).any()
    b = np.ones((5, n))[..., None]
    x = jb.lu_solve((factors[:3], pivots[:3]), b[:3], sizes=sizes[:3])
    np.testing.assert_allclose(product(factors[2]) @ x[2], b[2], rtol=1e-12)


def test_what_is_refused():
    a = np.eye(3)
    with pytest.raises(ValueError, match="lu: tiny goes with pivot=False"):
        jb.lu(a, tiny=1e-3)
    with pytest.raises(TypeError, match="lu: tiny must be real"):
        jb.lu(a, pivot=False, tiny=1j)
    with pytest.raises(TypeError, match="lu: pivot must be True or False"):
        jb.lu(a, pivot=None)
    with pytest.raises(ValueError, match=r"lu: tiny of shape .* does not broadcast"):
        jb.lu(a, pivot=False, tiny=np.ones(2))
    assert jb.lu(np.zeros((2, 0, 3)), pivot=False)[0].shape == (2, 0, 3)


def test_inside_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    a = jnp.broadcast_to(jnp.eye(3) + 0.1, (2, 3, 3))
    f = lambda a: jb.lu(a, pivot=False)[0]  # noqa: E731
    inside = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))(a)
    assert ops.same_bits(inside, f(a))
