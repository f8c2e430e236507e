"""JAX's own settings: promotion of ranks and dtypes refused, transfers refused, the rows of the
table on kernels and on the `lax` path."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest

import jax_batched as jb

ROWS = [*dict.fromkeys((*ops.REDUCED, *ops.of("solve_gen"), *ops.COMPOSITE))]


@contextlib.contextmanager
def _setting(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _program(op, calls, kernel):
    """The text of a program with values, info, gradients and a vmap of several calls."""

    def f(calls):
        results = []
        for x in calls:
            results += [op(*x), ops.gradient(op)(*x), jax.vmap(op)(*x)]
            if op.can_fail:
                results.append(op.with_info(*x))
        return results

    with ops.force_kernel(kernel):
        return jax.jit(f).lower(calls).as_text()


@pytest.mark.parametrize(
    ("setting", "value"),
    (("jax_numpy_rank_promotion", "raise"), ("jax_numpy_dtype_promotion", "strict")),
    ids=("ranks", "dtypes"),
)
@pytest.mark.parametrize("kernel", ("", "lax"), ids=("kernel", "lax"))
@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", ROWS, ids=ops.ids)
def test_strict_promotion(op, dtype, kernel, setting, value):
    """The program is the one without the setting, which only refuses what is implicit."""
    calls = [op.operands(dtype, batch=(2,), n=3, nrhs=2)]
    expected = _program(op, calls, kernel)
    with _setting(setting, value):
        assert _program(op, calls, kernel) == expected


@pytest.mark.parametrize(
    ("setting", "value"),
    (("jax_numpy_rank_promotion", "raise"), ("jax_numpy_dtype_promotion", "strict")),
    ids=("ranks", "dtypes"),
)
@pytest.mark.parametrize("kernel", ("", "lax"), ids=("kernel", "lax"))
@pytest.mark.parametrize("program", ops.PROGRAMS.values(), ids=ops.PROGRAMS)
def test_strict_promotion_in_programs(program, kernel, setting, value):
    """The same of what has no row, and of both with a mask."""

    def values(a):
        leaves = jax.tree.leaves(program(a))
        return sum(jnp.sum(jnp.real(x)) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))

    for dtype in ops.DTYPES:
        (a,) = ops.BY_NAME["inv"].operands(dtype, batch=(2,), n=3)
        with ops.force_kernel(kernel), _setting(setting, value):
            jax.jit(values).lower(a)
            if program is ops.PROGRAMS["factors"]:  # of others not all results have derivatives
                jax.jit(jax.grad(values)).lower(a)
            jax.jit(lambda a: jb.inv(a, where=jnp.array([True, False]))).lower(a)
            jax.jit(lambda a: jb.det(a, where=jnp.array([True, False]))).lower(a)


def test_strict_promotion_beyond_the_kernels():
    with _setting("jax_numpy_rank_promotion", "raise"):
        factor, info = jb.cholesky(np.eye(513, dtype=np.float32)[None], return_info=True)
    np.testing.assert_array_equal(factor[0], np.eye(513))
    assert info.tolist() == [0]


@pytest.mark.parametrize("op", ROWS, ids=ops.ids)
def test_no_implicit_transfer(op):
    """Outside jit, nothing but the operands is moved to the device."""
    x = jax.device_put(op.operands("complex64", batch=(2,), n=4, nrhs=2))
    some = jax.device_put(np.array([True, False]))
    with jax.transfer_guard("disallow"):
        op(*x)
        if op.has_info:
            op.with_info(*x)
        op.function(*x, **op.options, where=some)
