"""The kernels of products of matrices that differ in size."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest

from jax_batched._ffi import cuda_tiers
from jax_batched._matrices import adjoint, normal
from jax_batched.gemm import gemm_op

ON_CPU = jax.default_backend() == "cpu"
OF_CUDA = sorted({tier.kernel for tier in cuda_tiers() if tier.operation == "gemm"})
KERNELS = ("", *(("reference",) if ON_CPU else OF_CUDA), "lax")
WAYS = list(itertools.product("ntc", "ntc"))
# m, n, k around the edges of tiles and of steps; rows of whole 16-byte vectors, and not.
SHAPES = ((1, 1, 1), (31, 33, 7), (32, 32, 32), (33, 64, 20), (65, 31, 66), (64, 96, 40))
BATCH = 7


def serves(kernel, dtype, n):
    return ON_CPU or ops.serves_shape(("gemm",), kernel, dtype, n, n)


def stored(x, trans):
    return x if trans == "n" else np.swapaxes(x, -1, -2)


def op(x, trans):
    return adjoint(x) if trans == "c" else stored(x, trans)


def sizes_of(shape, rng):
    """Of each matrix: none, all, and others."""
    sizes = rng.integers(0, np.array(shape) + 1, (BATCH, 3))
    sizes[0], sizes[1] = shape, np.minimum(shape, 1)
    sizes[2, 2] = sizes[3, 0] = 0
    return sizes.astype(np.int32)


def product(a, b, sizes, ways, triangle="", kernel=""):
    def f(a, b, sizes):
        return gemm_op(a, b, sizes, trans_a=ways[0], trans_b=ways[1], triangle=triangle)

    return np.asarray(ops.compiled(f, a, b, sizes, kernel=kernel)[0])


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(kernel, dtype):
    """Every entry within k eps of its sum of magnitudes; what lies in the padding is not read."""
    for i in range(0, 18, 3 if kernel == "lax" else 1):  # each shape in three ways, or in one
        shape, ways = SHAPES[i % len(SHAPES)], WAYS[i % len(WAYS)]
        m, n, k = shape
        if not serves(kernel, dtype, n):
            continue
        rng = np.random.default_rng(i)
        a, b = (
            normal(rng, dtype, (BATCH, *stored(np.empty(s), trans).shape)).astype(dtype)
            for s, trans in zip(((m, k), (k, n)), ways, strict=True)
        )
        sizes, triangle = sizes_of(shape, rng), ("", "lower", "upper")[i // 2 % 3]
        left, right = op(a, ways[0]).astype(complex), op(b, ways[1]).astype(complex)
        expected = np.zeros((BATCH, m, n), complex)
        bound = np.zeros((BATCH, m, n))
        for j, (rows, columns, inner) in enumerate(sizes):
            x, y = left[j, :rows, :inner], right[j, :inner, :columns]
            expected[j, :rows, :columns] = x @ y
            bound[j, :rows, :columns] = abs(x) @ abs(y)
            a_rows, b_rows = (rows, inner), (inner, columns)
            for given, trans, own in ((a, ways[0], a_rows), (b, ways[1], b_rows)):
                mine = stored(given[j], trans)
                mine[own[0] :] = np.nan
                mine[:, own[1] :] = np.nan
        keep = {"": np.ones((m, n)), "lower": np.tri(m, n), "upper": np.tri(n, m).T}[triangle]
        found = product(a, b, sizes, ways, triangle, kernel)
        error = abs(found - expected * keep)
        assert (error <= 2 * (k + 2) * np.finfo(dtype).eps * bound * keep).all(), (shape, ways)


@pytest.mark.parametrize("kernel", KERNELS)
def test_sizes_out_of_range(kernel):
    """NaN for themselves alone, and the others as if these were not there."""
    m, n, k = shape = (40, 24, 33)
    rng = np.random.default_rng(0)
    a, b = (normal(rng, "float32", (BATCH, *s)).astype("float32") for s in ((m, k), (k, n)))
    good = sizes_of(shape, rng)
    bad = good.copy()
    bad[[0, 2, 4, 6], [0, 1, 2, 0]] = -1, n + 1, 2**31 - 1, -(2**31)
    right, wrong = (product(a, b, s, ("n", "n"), kernel=kernel) for s in (good, bad))
    assert np.isnan(wrong[::2]).all()
    assert ops.same_bits(wrong[1::2], right[1::2])


@pytest.mark.parametrize("dtype", ("float32", "complex128"))
@pytest.mark.parametrize("kernel", KERNELS[:-1])
def test_bits_do_not_depend_on_the_batch(kernel, dtype):
    m, n, k = shape = (70, 31, 50)
    rng = np.random.default_rng(0)
    a, b = (normal(rng, dtype, (BATCH, *s)).astype(dtype) for s in ((m, k), (k, n)))
    sizes = sizes_of(shape, rng)
    together = product(a, b, sizes, ("n", "n"), kernel=kernel)
    for i in range(BATCH):
        alone = product(a[i], b[i], sizes[i], ("n", "n"), kernel=kernel)
        assert ops.same_bits(alone, together[i])
    turned = product(a[::-1], b[::-1], sizes[::-1], ("n", "n"), kernel=kernel)
    assert ops.same_bits(turned[::-1], together)


@pytest.mark.parametrize("ways", WAYS)
def test_derivatives(ways):
    """Of complex products, in every form, against finite differences."""
    shape = (4, 5, 3)
    rng = np.random.default_rng(0)
    a, b, da, db = (
        normal(rng, "complex128", (BATCH, *stored(np.empty(s), trans).shape))
        for _ in range(2)
        for s, trans in zip(((4, 3), (3, 5)), ways, strict=True)
    )
    sizes = jnp.asarray(sizes_of(shape, rng))

    @jax.jit
    def loss(a, b):
        x = gemm_op(a, b, sizes, trans_a=ways[0], trans_b=ways[1], triangle="lower")[0]
        return jnp.sum(jnp.sin(jnp.real(x)) + jnp.imag(x) ** 2)

    h = 1e-6
    numeric = (loss(a + h * da, b + h * db) - loss(a - h * da, b - h * db)) / (2 * h)
    _, forward = jax.jvp(loss, (a, b), (da, db))
    reverse = jax.grad(loss, (0, 1))(a, b)
    np.testing.assert_allclose(forward, numeric, rtol=1e-6)
    total = sum(np.sum(np.real(g * d)) for g, d in zip(reverse, (da, db), strict=True))
    np.testing.assert_allclose(total, numeric, rtol=1e-6)


def test_masked():
    """Under a mask, of a mapped derivative say, the others keep their bits."""
    rng = np.random.default_rng(0)
    a = normal(rng, "float64", (BATCH, 9, 9))
    sizes = jnp.asarray(sizes_of((9, 9, 9), rng))
    where = jnp.arange(BATCH) % 3 == 0
    how = {"trans_a": "n", "trans_b": "t", "triangle": ""}
    (whole,), (part,) = gemm_op(a, a, sizes, **how), gemm_op(a, a, sizes, **how, where=where)
    assert ops.same_bits(part[where], whole[where])
    assert not np.asarray(part[~where]).any()
