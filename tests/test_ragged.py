"""Batches that are packed without padding."""

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
from test_qr import check_derivatives

import jax_batched as jb
from jax_batched._matrices import general, normal, spd

SIZES = np.array([(3, 2), (0, 4), (5, 5), (1, 1), (2, 0), (4, 5)])
M, N = SIZES.T


def matrices(dtype, sizes=SIZES):
    rng = np.random.default_rng(0)
    return [normal(rng, dtype, tuple(shape)).astype(dtype) for shape in sizes]


def padded(parts, m=5, n=5, other=np.nan):
    """Arrays that hold the matrices, and something else beside them."""
    whole = np.full((len(parts), m, n), other, parts[0].dtype)
    for x, part in zip(whole, parts, strict=True):
        x[: part.shape[0], : part.shape[1]] = part
    return whole


def same(ragged, parts):
    """Whether a batch is these matrices, bit for bit."""
    listed = ragged.to_list()
    return len(listed) == len(parts) and all(map(ops.same_bits, listed, parts))


@pytest.mark.parametrize("dtype", (*ops.DTYPES, "float16"))
def test_there_and_back(dtype):
    parts = matrices(dtype)
    ragged = jb.RaggedBatch.from_list(parts)
    assert same(ragged, parts)
    assert ragged.shape == (5, 5) and ragged.values.shape == ((M * N).sum(),)
    assert ops.same_bits(ragged.unpack(), padded(parts, other=0))
    packed = jb.RaggedBatch.pack(padded(parts), (M, N))
    assert ops.same_bits(packed.values, ragged.values)
    assert same(packed, parts)
    mixed = jb.RaggedBatch.from_list([np.ones((1, 2), np.float32), np.ones((2, 2))])
    assert mixed.values.dtype == np.float64


def test_sizes_may_be_traced():
    """Within a total: what does not lie in it is lost, and NaN for itself alone."""
    parts = matrices("float32")
    total = (M * N).sum()

    def there(whole, m, n):
        return [jb.RaggedBatch.pack(whole, (m, n), total=t) for t in (total, total + 7, total - 1)]

    exact, more, less = jax.jit(there)(padded(parts), M, N)
    assert same(exact, parts) and same(more, parts)
    assert more.values.size == total + 7 and not np.asarray(more.values[total:]).any()
    unpacked = jax.jit(lambda x: x.unpack())(less)
    assert ops.same_bits(unpacked[:-1], padded(parts, other=0)[:-1])
    assert np.isnan(unpacked[-1]).all()
    assert jax.jit(lambda *x: jb.RaggedBatch.pack(*x))(padded(parts), (M, N)).values.size == 150


def test_sizes_out_of_range():
    """No access out of bounds; the others are right."""
    parts = matrices("float64")
    m, n = M.copy(), N.copy()
    m[0], n[3], m[4] = -1, 6, np.iinfo(np.int32).max
    wrong = np.isin(np.arange(6), (0, 3, 4))
    for ragged in (
        jb.RaggedBatch.pack(padded(parts), (m, n)),
        jax.jit(lambda *x: jb.RaggedBatch.pack(*x))(padded(parts), (m, n)),
    ):
        x = np.asarray(ragged.unpack())
        np.testing.assert_array_equal(np.isnan(x).all((-2, -1)), wrong)
        assert ops.same_bits(x[~wrong], padded(parts, other=0)[~wrong])


def test_batch_dimensions_and_vmap():
    whole, m = padded(matrices("float64"), other=0).reshape(2, 3, 5, 5), M.reshape(2, 3)
    ragged = jb.RaggedBatch.pack(whole, (m, N.reshape(2, 3)))
    assert ragged.sizes.shape == (2, 3, 2) and ragged.offsets.shape == (2, 3)
    assert ops.same_bits(ragged.unpack(), whole)
    assert ops.same_bits(ragged.map_buckets(lambda x, sizes: 2 * x).unpack(), 2 * whole)

    def there_and_back(x, m, n):
        return jb.RaggedBatch.pack(x, (m, n), total=75).unpack()

    assert ops.same_bits(jax.vmap(there_and_back)(whole, m, N.reshape(2, 3)), whole)
    rows = jax.vmap(lambda x, m: jb.RaggedBatch.pack(x, (m, 5)))(whole, m)
    assert rows.values.shape == (2, 75)
    full = jax.vmap(lambda x: x.unpack())(rows)
    assert ops.same_bits(full, np.where(np.arange(5)[:, None] < m[..., None, None], whole, 0))


def test_derivatives():
    whole = padded(matrices("complex128"), other=0)
    ragged = jb.RaggedBatch.pack(whole, (M, N))
    check_derivatives(lambda x: [jb.RaggedBatch.pack(x, (M, N)).values ** 2], whole)
    unpacked = jax.jit(lambda v: [jb.RaggedBatch(v, ragged.sizes, ragged.offsets, (5, 5)).unpack()])
    check_derivatives(unpacked, ragged.values)


def square(make, sizes):
    rng = np.random.default_rng(0)
    return [make(rng, "float64", (n, n)) for n in sizes]


@pytest.mark.parametrize("name", ("map", "map_buckets"))
def test_operations(name):
    """Factors, solutions, numbers: each as of the matrix alone, in the order of the batch."""
    sizes = (3, 17, 9, 2, 8, 12, 1, 20)
    a, definite = square(general, sizes), square(spd, sizes)
    b = [normal(np.random.default_rng(n), "float64", (n, 3)) for n in sizes]
    ragged, hermitian, rhs = map(jb.RaggedBatch.from_list, (a, definite, b))

    def run(first, f, *others):
        def call(*values):
            batches = zip((first, *others), values, strict=True)
            head, *rest = (jb.RaggedBatch(v, x.sizes, x.offsets, x.shape) for x, v in batches)
            return getattr(head, name)(f, *rest)

        return jax.jit(call)(first.values, *(x.values for x in others))

    factors, info = run(hermitian, lambda a, sizes: jb.cholesky(a, sizes=sizes, return_info=True))
    x = run(ragged, jb.solve, rhs)
    dets = run(ragged, jb.det)
    assert not np.asarray(info).any()
    for i in range(len(sizes)):
        np.testing.assert_allclose(
            factors.to_list()[i], np.linalg.cholesky(definite[i]), atol=1e-12
        )
        np.testing.assert_allclose(x.to_list()[i], np.linalg.solve(a[i], b[i]), atol=1e-12)
        np.testing.assert_allclose(dets[i], np.linalg.det(a[i]), rtol=1e-11)
    gradient = jax.grad(
        lambda v: run(jb.RaggedBatch(v, ragged.sizes, ragged.offsets, ragged.shape), jb.det).sum()
    )(ragged.values)
    own = jb.RaggedBatch(gradient, ragged.sizes, ragged.offsets, ragged.shape).to_list()
    for x, y, det in zip(own, a, dets, strict=True):
        np.testing.assert_allclose(x, det * np.linalg.inv(y).T, rtol=1e-9, atol=1e-9 * abs(det))


def test_what_is_not_square_fails_alone():
    ragged = jb.RaggedBatch.from_list([np.eye(3), np.ones((2, 3)), 2 * np.eye(2)])
    for f in (ragged.map, ragged.map_buckets):
        np.testing.assert_array_equal(f(jb.det), [1, np.nan, 4])
    wide = jb.RaggedBatch.from_list([np.ones((1, 3)), np.eye(2)])
    r = wide.map(lambda a, sizes: jb.qr(a, "r", sizes=sizes)).to_list()
    np.testing.assert_allclose(np.abs(r[0]), np.ones((1, 3)), rtol=1e-12)


def test_what_is_refused():
    ragged = jb.RaggedBatch.from_list([np.eye(3)])
    with pytest.raises(TypeError, match="map_buckets: sizes must be known"):
        jax.jit(lambda x: x.map_buckets(jb.det))(ragged)
    with pytest.raises(TypeError, match="to_list: sizes must be known"):
        jax.jit(lambda x: x.to_list())(ragged)
    with pytest.raises(ValueError, match="a result of shape"):
        ragged.map_buckets(lambda x, sizes: x[..., 0])
    with pytest.raises(ValueError, match="there is no matrix"):
        jb.RaggedBatch.from_list([])
    with pytest.raises(ValueError, match=r"matrix 1 must have shape \(m, n\)"):
        jb.RaggedBatch.from_list([np.eye(2), np.ones(2)])
    with pytest.raises(TypeError, match=r"sizes must be a tuple \(m, n\)"):
        jb.RaggedBatch.pack(np.eye(2), np.array([1, 2]))
    assert jb.RaggedBatch.pack(jnp.zeros((0, 2, 2)), ([], [])).map_buckets(jb.inv).to_list() == []


def test_sizes_come_in_one_form():
    """Buckets are square, but pairs of rows and columns stay pairs."""
    rng = np.random.default_rng(0)
    r = jb.RaggedBatch.from_list([rng.normal(size=(3, 2)), rng.normal(size=(20, 17))])

    def triangle(x, sizes):
        return jb.qr(x, "raw", sizes=sizes)[0].mT

    for x, y in zip(r.map(triangle).to_list(), r.map_buckets(triangle).to_list(), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


def test_nothing_is_nan_on_the_way():
    with jax.debug_nans(True):
        jb.RaggedBatch.from_list([np.eye(2), np.eye(3)]).unpack()
