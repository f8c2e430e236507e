"""jit, loops, branches, rematerialisation, donation, NaN checking, ahead-of-time compilation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest

import jax_batched as jb

SOLVE_POS = ops.of("solve_pos")

N = 5


def step(op, a, x):
    """The operation as the body of a loop over x of one shape: a factor or a solution."""
    if not op.takes_b:
        return op(x) + 2 * jnp.eye(x.shape[-1], dtype=x.dtype)
    return op(a, x)


def loop_operands(op, dtype="float64"):
    operands = op.operands(dtype, batch=(3,), n=N, nrhs=2)
    return operands[0], operands[-1]


def unrolled(op, a, x, count):
    for _ in range(count):
        x = step(op, a, x)
    return x


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_loops_are_unrolled_calls(op):
    a, x = loop_operands(op)
    expected = unrolled(op, a, x, 4)

    def scan(a, x):
        return jax.lax.scan(lambda x, _: (step(op, a, x), None), x, None, length=4)[0]

    def fori(a, x):
        return jax.lax.fori_loop(0, 4, lambda _, x: step(op, a, x), x)

    def while_loop(a, x):
        def body(state):
            return state[0] + 1, step(op, a, state[1])

        return jax.lax.while_loop(lambda state: state[0] < 4, body, (0, x))[1]

    for loop in (scan, fori, while_loop):
        np.testing.assert_allclose(jax.jit(loop)(a, x), expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("op", [*ops.WITH_KERNELS, *ops.ONE_COMPOSITE], ids=ops.ids)
def test_scan_over_a_batch_and_map(op):
    operands = op.operands("float64", batch=(4, 3), n=N, nrhs=2)
    expected = op(*operands)
    _, scanned = jax.lax.scan(lambda _, xs: (None, op(*xs)), None, operands)
    assert ops.same_bits(scanned, expected)
    assert ops.same_bits(jax.lax.map(lambda xs: op(*xs), operands), expected)


@pytest.mark.parametrize("op", [*ops.REDUCED, *ops.ONE_COMPOSITE], ids=ops.ids)
def test_branches(op):
    operands = op.operands("float64", batch=(3,), n=N, nrhs=2)

    @jax.jit
    def choose(flag, *operands):
        return jax.lax.cond(flag, op, lambda *xs: jnp.zeros_like(xs[-1]), *operands)

    op.check(operands, choose(True, *operands))
    assert not choose(False, *operands).any()

    def per_matrix(flag, *xs):
        return jax.lax.cond(flag, op, lambda *ys: jnp.zeros_like(ys[-1]), *xs)

    flags = np.array([True, False, True])
    mapped = jax.vmap(per_matrix)(flags, *operands)
    op.check([x[flags] for x in operands], mapped[flags])
    assert not mapped[1].any()


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_derivatives_through_a_scan_and_rematerialisation(op):
    a, x = loop_operands(op)

    def loss(call, a, x):
        x, _ = jax.lax.scan(lambda x, _: (call(a, x), None), x, None, length=3)
        return jnp.sum(jnp.sin(x))

    def gradient(call):
        return jax.jit(jax.grad(functools.partial(loss, call), (0, 1)))(a, x)

    plain = functools.partial(step, op)
    expected = jax.grad(lambda a, x: jnp.sum(jnp.sin(unrolled(op, a, x, 3))), (0, 1))(a, x)
    for call in (plain, jax.checkpoint(plain)):
        for ours, theirs in zip(gradient(call), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13)


def test_rematerialisation_factors_again():
    """A checkpointed solve is computed in the forward and in the backward pass."""
    a, b = SOLVE_POS[0].operands("float64", batch=(3,), n=N)

    def f(a):
        return jnp.sum(jnp.sin(jax.checkpoint(SOLVE_POS[0])(a, b)))

    np.testing.assert_allclose(
        jax.grad(f)(a),
        jax.grad(lambda a: jnp.sum(jnp.sin(SOLVE_POS[0](a, b))))(a),
        rtol=1e-12,
    )


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_donated_operands(op):
    """The last operand has the shape of the result, whose buffer it may become."""
    operands = op.operands("float32", batch=(33,), n=9, nrhs=2)
    arrays = [jnp.array(x) for x in operands]
    result = jax.jit(op, donate_argnums=len(operands) - 1)(*arrays)
    op.check(operands, result)
    assert arrays[-1].is_deleted()


@pytest.mark.parametrize("op", [*ops.WITH_KERNELS, *ops.ONE_COMPOSITE], ids=ops.ids)
def test_nan_checking_passes_healthy_calls(op):
    """Even where NaN stands in what is not read: eager, compiled and differentiated."""
    operands = op.operands("float32", batch=(3,), n=N, nrhs=2)
    arrays = [jnp.asarray(x) for x in operands]
    with jax.debug_nans(True):
        op.check(operands, op(*arrays))
        op.check(operands, jax.jit(op)(*arrays))
        gradient = jax.jit(jax.grad(lambda *xs: jnp.sum(jnp.abs(op(*xs)))))(*arrays)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("op", ops.CAN_FAIL, ids=ops.ids)
def test_nan_checking_raises_for_a_failed_matrix(op):
    a, *b = op.operands("float32", batch=(3,), n=N, nrhs=2)
    a = np.where(op.unread(N), 0, a)
    a[1, 2, 2] = -1
    operands = [jnp.asarray(x) for x in (a, *b)]
    for call in (op, jax.jit(op)):
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            jax.block_until_ready(call(*operands))


def test_calls_with_and_without_a_loop_and_a_constant_agree():
    """Several handlers in one program, one of them in a loop, with a constant of the closure."""
    op = SOLVE_POS[1]
    a, b = op.operands("float64", batch=(2,), n=4, nrhs=2)
    constant = jnp.linspace(1.0, 2.0, 4)[:, None]

    @jax.jit
    def f(a, b):
        first = op(a, b)

        def body(x, _):
            return op(a, x + constant), None

        return first, jax.lax.scan(body, first, None, length=10)[0]

    first, last = f(a, b)
    x = expected = op.reference(a, b)
    for _ in range(10):
        x = op.reference(a, x + np.asarray(constant))
    np.testing.assert_allclose(first, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(last, x, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("op", [*ops.REDUCED, *ops.ONE_COMPOSITE], ids=ops.ids)
def test_ahead_of_time_compilation(op):
    operands = op.operands("float32", batch=(3,), n=N, nrhs=2)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    compiled = jax.jit(op).lower(*shapes).compile()
    op.check(operands, compiled(*operands))


def test_options_are_static_arguments():
    f = jax.jit(jb.cholesky, static_argnames=("upper", "symmetrize_input", "accuracy"))
    for op in ops.of("cholesky"):
        (a,) = op.operands("float32", batch=(2,), n=N)
        op.check((a,), f(a, **op.options, accuracy="ieee"))


def test_a_factor_passes_through_jit_boundaries():
    a, b = SOLVE_POS[1].operands("float64", batch=(3,), n=N)
    factor = jax.jit(functools.partial(jb.cho_factor, lower=True))(a)[0]
    x = jax.jit(lambda c, b: jb.cho_solve((c, True), b))(factor, b)
    SOLVE_POS[1].check((a, b), x)
