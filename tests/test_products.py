"""Products of small matrices, which are written out."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import ops
import pytest

import jax_batched as jb
from jax_batched._ffi import force_kernel
from jax_batched._matrices import normal
from jax_batched._matrix import matmul

SHAPES = [(n, n, n) for n in (1, 2, 3, 4, 5, 8, 12, 13, 16, 17)]
SHAPES += [(3, 7, 1), (1, 16, 5), (16, 1, 16), (2, 17, 3), (20, 3, 4), (3, 4, 40)]
BATCHES = [((), ()), ((5,), (5,)), ((5,), ()), ((1, 4), (3, 1)), ((0,), (0,)), ((4,), (2, 1))]


def operands(dtype, shape, batches, seed=0):
    rng, (m, k, n) = np.random.default_rng(seed), shape
    a, b = normal(rng, dtype, (*batches[0], m, k)), normal(rng, dtype, (*batches[1], k, n))
    return a.astype(dtype), b.astype(dtype)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("path", ("", "lax"))
def test_values(dtype, path):
    """Every size around those that are written out, and every way to broadcast."""
    cases = [operands(dtype, shape, batches) for shape in SHAPES for batches in BATCHES[:5]]
    cases += [operands(dtype, (3, 4, 2), BATCHES[5])]
    with force_kernel(path):
        results = jax.jit(lambda cases: [matmul(a, b) for a, b in cases])(cases)
    for (a, b), x in zip(cases, results, strict=True):
        assert x.dtype == dtype
        tolerance = 20 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(x, np.matmul(a, b), rtol=0, atol=tolerance * a.shape[-1])


@pytest.mark.parametrize("dtype", ("float64", "complex128"))
def test_derivatives_and_vmap(dtype):
    """As those of JAX's product; a shared matrix is not repeated."""
    a, b = operands(dtype, (3, 4, 2), ((5,), (5,)))

    def both(f):
        def loss(a, b):
            return jnp.sum(jnp.abs(f(a, b)) ** 2)

        gradient = jax.grad(loss, (0, 1))
        hessian = jax.jvp(lambda a: gradient(a, b), (a,), (a + 1,))[1]
        mapped = jax.vmap(jax.grad(loss, (0, 1)), (None, 0))(a[0], b)
        crossed = jax.vmap(f, (0, 1), 2)(a, np.swapaxes(b, 0, 1))
        return gradient(a, b), hessian, mapped, crossed

    ours, theirs = (jax.tree.leaves(jax.jit(lambda f=f: both(f))()) for f in (matmul, jnp.matmul))
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("platform", ("cpu", "tpu"))
def test_what_is_written_out(platform):
    """On the CPU products to n = 16, on platforms without kernels none."""
    for n in (4, 16, 17):
        a = jax.ShapeDtypeStruct((100, n, n), "float32")
        text = jax.jit(matmul).trace(a, a).lower(lowering_platforms=(platform,)).as_text()
        assert ("dot_general" in text) == (n > 16 or platform == "tpu")


def test_symbolic_batches():
    (batch,) = jax.export.symbolic_shape("b")
    a = jax.ShapeDtypeStruct((batch, 3, 3), "float32")
    exported = jax.export.export(jax.jit(jax.grad(lambda a: jnp.sum(matmul(a, a) ** 2))))(a)
    x = np.arange(18, dtype="float32").reshape(2, 3, 3) / 18
    expected = jax.grad(lambda a: jnp.sum((a @ a) ** 2))(x)
    np.testing.assert_allclose(exported.call(x), expected, rtol=1e-5)


def test_gemm_of_small_matrices():
    a, b = operands("float32", (4, 4, 4), ((7,), (7,)))
    np.testing.assert_allclose(jb.blas.gemm(a, b), a @ b, atol=1e-5)
