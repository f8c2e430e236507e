"""The residual that refined solves are made of: b - s a x."""

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest

from jax_batched import _ffi
from jax_batched.residual import residual_op

TRIANGLES = ("", "lower", "upper")
# Around the sizes where the CUDA kernel takes more lanes, more vectors of a row and more warps.
SIZES = (
    1,
    2,
    3,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    32,
    33,
    50,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    257,
    512,
)


def operands(dtype, m, n, nrhs, batch, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        x = rng.normal(size=shape)
        if np.issubdtype(dtype, np.complexfloating):
            x = x + 1j * rng.normal(size=shape)
        return x.astype(dtype)

    scale = 2.0 ** rng.integers(-3, 4, size=batch)
    a, x, b = normal(*batch, m, n), normal(*batch, n, nrhs), normal(*batch, m, nrhs)
    return a, scale.astype(a.real.dtype), x, b


def hermitian(a, triangle):
    """The matrix that a triangle stands for."""
    strict = np.tril(a, -1) if triangle == "lower" else np.triu(a, 1)
    diagonal = np.einsum("...ii->...i", a).real[..., None] * np.eye(a.shape[-1])
    return strict + np.conj(np.swapaxes(strict, -1, -2)) + diagonal


def check(result, a, scale, x, b, triangle, absolute=False):
    """Entry by entry, against extended precision and the bound of a sum of products."""
    wide = [np.asarray(y, np.result_type(y.dtype, np.longdouble)) for y in (a, scale, x, b)]
    a, scale, x, b = wide
    if triangle:
        a = hermitian(a, triangle)
    a = a * scale[..., None, None]
    expected = b - (np.abs(a) if absolute else a) @ x
    bound = np.abs(b) + np.abs(a) @ np.abs(x)
    unit = np.finfo(result.dtype).eps / 2
    error = np.abs(np.asarray(result) - expected)
    assert (error <= (2 * a.shape[-1] + 8) * unit * bound).all()


@pytest.mark.parametrize("kernel", ("", "reference", "lax"))
@pytest.mark.parametrize("triangle", TRIANGLES)
@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_values(dtype, triangle, kernel):
    if kernel == "reference" and jax.default_backend() != "cpu":
        pytest.skip("a kernel of the CPU")
    for n in SIZES if not kernel else (1, 5, 16):
        a, scale, x, b = operands(dtype, n, n, 1, (3,))
        if triangle:
            unread = np.triu(np.ones((n, n), bool), 1)
            a[:, unread if triangle == "lower" else unread.T] = np.nan
        with _ffi.force_kernel(kernel):
            (r,) = residual_op(
                *map(jnp.asarray, (a, scale, x, b)), triangle=triangle, absolute=False
            )
        check(r, np.nan_to_num(a), scale, x, b, triangle)


@pytest.mark.parametrize("triangle", TRIANGLES)
@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_absolute_values_and_several_columns(dtype, triangle):
    for n, nrhs in ((5, 2), (16, 3), (40, 7), (130, 4)):
        arrays = operands(dtype, n, n, nrhs, (2, 3))
        (r,) = residual_op(*map(jnp.asarray, arrays), triangle=triangle, absolute=True)
        check(r, *arrays, triangle, absolute=True)


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_matrices_that_are_not_square(dtype):
    for m, n in ((1, 1), (1, 100), (100, 1), (16, 65), (65, 16), (600, 33)):
        arrays = operands(dtype, m, n, 2, (5,))
        (r,) = residual_op(*map(jnp.asarray, arrays), triangle="", absolute=False)
        check(r, *arrays, "")


@pytest.mark.parametrize("triangle", TRIANGLES)
@pytest.mark.parametrize("n", (3, 16, 50, 128, 300))
def test_a_matrix_does_not_see_its_neighbours(n, triangle):
    """Its bits are the same alone, in any batch, under vmap and where operands are shared."""

    def residual(a, scale, x, b):
        return residual_op(a, scale, x, b, triangle=triangle, absolute=False)[0]

    a, scale, x, b = map(jnp.asarray, operands("float64", n, n, 1, (37,)))
    whole = np.asarray(residual(a, scale, x, b))
    for i in (0, 5, 36):
        alone = residual(a[i], scale[i], x[i], b[i])
        np.testing.assert_array_equal(whole[i], alone)
    np.testing.assert_array_equal(whole, jax.vmap(residual)(a, scale, x, b))
    np.testing.assert_array_equal(
        jax.vmap(residual, (None, None, 0, 0))(a[5], scale[5], x, b)[5], whole[5]
    )


@pytest.mark.parametrize(
    "shape", ((0, 4, 4, 1), (3, 0, 0, 1), (3, 4, 4, 0), (3, 0, 4, 1), (3, 4, 0, 1))
)
def test_empty(shape):
    batch, m, n, nrhs = shape
    arrays = operands("float32", m, n, nrhs, (batch,))
    (r,) = residual_op(*map(jnp.asarray, arrays), triangle="", absolute=False)
    np.testing.assert_array_equal(r, arrays[-1])
