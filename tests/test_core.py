"""The factory: operations that no family has yet, made here of plain `lax`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest

from jax_batched._core import Operation, Rules, kernel, lax

RNG = np.random.default_rng(0)


def _product(a, b, *c, alpha):
    product = alpha * jnp.matmul(a, b)
    return (product + c[0] if c else product,)


def _product_transpose(params, primals, cotangents):
    """Of alpha a b + c, in a and c or in b and c together."""
    a, b, c = primals
    (ct,) = cotangents
    results = []
    if a is None:
        results.append(params["alpha"] * jnp.matmul(ct, jnp.swapaxes(b, -1, -2)))
    if b is None:
        results.append(params["alpha"] * jnp.matmul(jnp.swapaxes(a, -1, -2), ct))
    return [*results, ct] if c is None else results


def _product_jvp(params, primals, tangents):
    (a, b, c), (da, db, dc) = primals, tangents
    zero = jnp.zeros_like(c)
    parts = [
        product_op(a if da is None else da, b if db is None else db, zero, **params)[0]
        for da, db in ((da, None), (None, db))
        if da is not None or db is not None
    ]
    parts += [] if dc is None else [dc]
    return product_op(a, b, c, **params), [sum(parts[1:], parts[0])]


product_op = Operation(
    "test_product",
    Rules(
        signature=lambda params: "(m,k),(k,n),(m,n)->(m,n)",
        paths=(lax(_product),),
        jvp=_product_jvp,
        transpose=_product_transpose,
        linear=(0, 1, 2),
    ),
)


def _qr(a):
    q, r = jnp.linalg.qr(a)
    return q, r, jnp.zeros((*a.shape[:-2], 5), a.dtype)


qr_op = Operation(
    "test_qr",
    Rules(
        signature=lambda params: "(m,n)->(m,k),(k,n),(w)",
        paths=(lax(_qr),),
        sizes=lambda params, sizes: {"k": min(sizes["m"], sizes["n"]), "w": 5},
        jvp=lambda params, primals, tangents: jax.jvp(lambda a: _qr(a)[:2], primals, tangents),
        result_dtypes=(None, None, None),
        hidden=lambda params: 1,
    ),
)


def _leading(sizes, a):
    inside = jnp.arange(a.shape[-1]) < sizes[..., None]
    return (jnp.where(inside, a, 0).sum(-1),)


# The integer operand comes first: the dtype is that of the second one.
leading_op = Operation(
    "test_leading",
    Rules(signature=lambda params: "(),(n)->()", paths=(lax(_leading),), data=1),
)


def test_sizes_that_no_operand_has_and_workspace_that_no_caller_sees():
    for m, n in ((5, 3), (3, 5), (4, 4)):
        a = RNG.standard_normal((2, m, n))
        q, r = qr_op(a)
        assert q.shape == (2, m, min(m, n)) and r.shape == (2, min(m, n), n)
        np.testing.assert_allclose(q @ r, a, atol=1e-12)
        for got, own in zip(jax.jit(jax.vmap(qr_op))(a), (q, r), strict=True):
            np.testing.assert_allclose(got, own, atol=1e-12)
    a = RNG.standard_normal((2, 5, 3))
    gradient = jax.grad(lambda a: jnp.sum(jnp.sin(qr_op(a)[1])))(a)
    expected = jax.grad(lambda a: jnp.sum(jnp.sin(jnp.linalg.qr(a)[1])))(a)
    np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_linear_in_several_operands():
    """The gradient of every operand of a product, alone and together with what is added."""
    a, b, c = (RNG.standard_normal(shape) for shape in ((3, 4, 2), (3, 2, 5), (3, 4, 5)))

    def value(f):
        return lambda *xs: jnp.sum(jnp.sin(f(*xs)))

    ours = value(lambda a, b, c: product_op(a, b, c, alpha=2.0)[0])
    plain = value(lambda a, b, c: 2 * a @ b + c)
    for count in (1, 2, 3):
        for places in itertools.combinations(range(3), count):
            got, expected = (jax.grad(f, places)(a, b, c) for f in (ours, plain))
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-12), got, expected)
    transposed = jax.linear_transpose(lambda b, c: product_op(a, b, c, alpha=2.0)[0], b, c)
    for x, y in zip(transposed(c), (2 * np.swapaxes(a, -1, -2) @ c, c), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


def test_what_is_not_linear_has_no_transpose():
    bilinear = Operation(
        "test_one_linear",
        Rules(
            signature=lambda params: "(m,k),(k,n)->(m,n)",
            paths=(lax(lambda a, b: (a @ b,)),),
            transpose=lambda params, primals, cotangents: [None],
        ),
    )
    a = np.ones((2, 2))
    with pytest.raises(NotImplementedError, match=r"test_one_linear is linear only .*\[1\].*\[0\]"):
        jax.linear_transpose(lambda x: bilinear(x, a)[0], a)(a)


def test_integer_operands_beside_the_data():
    sizes, a = np.array([0, 2, 5], np.int32), RNG.standard_normal((3, 5)).astype(np.float32)
    expected = [a[i, :size].sum() for i, size in enumerate(sizes)]
    (result,) = leading_op(sizes, a)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    (result,) = jax.vmap(leading_op)(sizes, a)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_columns_fold_into_the_last_operand():
    """vmap over b alone is one product with more columns."""
    a, b = np.ones((4, 2)), RNG.standard_normal((7, 2, 3))
    two = Operation(
        "test_columns",
        Rules(signature=lambda params: "(m,k),(k,n)->(m,n)", paths=(lax(lambda a, b: (a @ b,)),)),
    )
    text = str(jax.make_jaxpr(jax.vmap(lambda b: two(a, b)[0]))(b))
    assert "f64[4,21]" in text
    np.testing.assert_allclose(jax.vmap(lambda b: two(a, b)[0])(b), a @ b, atol=1e-12)


def test_the_first_path_that_serves_is_taken():
    """And one that is forced by name, whatever else would serve."""
    a = np.eye(3)[None]
    for forced, expected in (("", "cholesky"), ("lax", None), ("reference", "cholesky")):
        if forced == "reference" and jax.default_backend() != "cpu":
            continue
        with ops.force_kernel(forced):
            text = jax.jit(lambda a: ops.of("cholesky")[0](a)).lower(a).as_text()
        assert (f"jax_batched.{expected}.v1" in text) == (expected is not None)
    none = Operation(
        "test_no_kernels",
        Rules(signature=lambda params: "(n)->(n)", paths=(kernel(), lax(lambda a: (a + 1,)))),
    )
    assert none(jnp.zeros(2))[0].tolist() == [1, 1]
