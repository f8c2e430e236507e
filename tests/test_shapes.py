"""Empty arrays, launch sizes, accepted inputs, and the messages for all others."""

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest

import jax_batched as jb
from jax_batched import _matrices as matrices

SOLVE_POS = ops.of("solve_pos")

EMPTY_SQUARES = ((0, 0), (3, 0, 0), (0, 3, 3), (2, 0, 3, 3), (0, 0, 0))
NO_KERNEL = "jax_batched."


def empty_operands(op, square, nrhs=2):
    a = np.zeros(square)
    if not op.takes_b:
        return (a,)
    *batch, n, _ = square
    return a, np.zeros((*batch, n, nrhs) if op.left_side else (*batch, nrhs, n))


def differentiated(f, operands):
    """f, its gradients and its derivative along the operands."""
    total = jax.grad(lambda *xs: jnp.sum(f(*xs)), tuple(range(len(operands))))

    @jax.jit
    def everything(*xs):
        return f(*xs), total(*xs), jax.jvp(f, xs, xs)[1]

    return everything(*operands)


@pytest.mark.parametrize("square", EMPTY_SQUARES)
@pytest.mark.parametrize("op", [*ops.REDUCED, *ops.COMPOSITE], ids=ops.ids)
def test_empty_matrices_and_batches(op, square):
    operands = empty_operands(op, square)
    x, gradients, dx = differentiated(op, operands)
    assert op(*operands).shape == x.shape == dx.shape == operands[-1].shape
    assert [g.shape for g in gradients] == [y.shape for y in operands]
    if op.can_fail:
        info = op.with_info(*operands)[1]
        assert info.shape == square[:-2]
        assert not info.any()


@pytest.mark.parametrize("op", ops.SOLVING, ids=ops.ids)
def test_no_right_hand_sides(op):
    a, b = op.operands("float64", batch=(2,), n=3, nrhs=0)
    x, (da, db), dx = differentiated(op, (a, b))
    assert x.shape == db.shape == dx.shape == b.shape
    assert da.shape == a.shape
    assert not da.any()


def test_info_without_right_hand_sides_is_still_the_matrices():
    """No launch: nothing was factored, so nothing failed."""
    _, info = jb.solve(np.eye(3), np.zeros((4, 3, 0)), assume_a="pos", return_info=True)
    assert info.shape == (4,)


@pytest.mark.parametrize("batches", (((0,), ()), ((), (0,)), ((0, 1), (1, 5)), ((2, 0), (1,))))
@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_empty_batches_broadcast(op, batches):
    rng = np.random.default_rng(0)
    a = op.make(rng, "float64", (*batches[0], 3, 3))
    b = op.right_hand_side(rng, "float64", batches[1], 3, 2)
    x, gradients, _ = differentiated(op, (a, b))
    assert x.shape == (*np.broadcast_shapes(*batches), *b.shape[-2:])
    assert [g.shape for g in gradients] == [a.shape, b.shape]
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_empty_matrices_make_no_call(op):
    for square in ((0, 0), (3, 0, 0)):
        text = jax.jit(op).lower(*empty_operands(op, square)).as_text()
        assert NO_KERNEL not in text
    if op.takes_b:
        assert NO_KERNEL not in jax.jit(op).lower(*empty_operands(op, (3, 3), 0)).as_text()


def test_vmap_over_an_empty_axis():
    a, _ = SOLVE_POS[1].operands("float64", n=3)
    solve = jax.vmap(lambda b: jb.solve(a, b, assume_a="pos", lower=True))
    assert solve(np.zeros((0, 3, 1))).shape == (0, 3, 1)
    assert jax.vmap(jb.cholesky)(np.zeros((0, 3, 3))).shape == (0, 3, 3)


@pytest.mark.parametrize("batch", (65535, 65536, 65537))
@pytest.mark.parametrize("op", ops.ONE_EACH, ids=ops.ids)
def test_batches_around_the_limit_of_a_launch(op, batch):
    """On both sides of 2^16, and once more after the first call."""
    operands = op.operands("float32", batch=(batch,), n=3, nrhs=1)
    first, second = op(*operands), op(*operands)
    op.check(operands, first)
    assert ops.same_bits(first, second)


@pytest.mark.parametrize("op", [ops.of("cholesky")[0], SOLVE_POS[0]], ids=ops.ids)
@pytest.mark.parametrize("batch", (65535, 65536, 65537))
def test_batches_of_12_around_the_limit_of_a_launch(op, batch):
    few = op.operands("float32", batch=(7,), n=12, nrhs=1)
    index = np.arange(batch) % 7
    x = np.asarray(op(*(y[index] for y in few)))
    op.check(few, x[:7])
    assert ops.same_bits(x, x[index])


@pytest.mark.only_exhaustive  # CUDA's limit
@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_distinct_systems_beyond_the_limit_of_a_launch(op):
    operands = op.operands("float32", batch=(65536 + 7,), n=16, nrhs=1)
    op.check(operands, op(*operands))


@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_more_right_hand_sides_than_threads_of_a_block(op):
    operands = op.operands("float64", batch=(2,), n=3, nrhs=1025)
    op.check(operands, op(*operands))


@pytest.mark.parametrize("left_side", (False, True))
def test_identity_with_more_right_hand_sides_than_threads_of_a_block(left_side):
    b = np.random.default_rng(0).standard_normal((1, 1109, 1109))
    x = jb.triangular_solve(np.eye(1109)[None], b, left_side=left_side)
    np.testing.assert_array_equal(x, b)
    x = jb.triangular_solve(np.eye(500)[None], b[:, :500], left_side=True)
    np.testing.assert_array_equal(x, b[:, :500])


@pytest.mark.parametrize("n", (*range(127, 131), 150, 200))
def test_identity_at_the_edges_of_blocks(n):
    for lower, left in ((False, False), (False, True), (True, False), (True, True)):
        a = np.broadcast_to(2 * np.eye(n), (2, n, n))
        x = jb.triangular_solve(a, np.broadcast_to(np.eye(n), a.shape), left_side=left, lower=lower)
        np.testing.assert_array_equal(x, np.broadcast_to(0.5 * np.eye(n), a.shape))


@pytest.mark.parametrize("op", ops.REDUCED, ids=ops.ids)
def test_lists_are_arrays(op):
    operands = op.operands("float64", batch=(2,), n=3, nrhs=2)
    assert ops.same_bits(op(*(x.tolist() for x in operands)), op(*operands))


def test_python_numbers_in_a_list_are_weak():
    assert jb.cholesky([[4.0]]).dtype == np.float64
    x = jb.solve(np.eye(2, dtype=np.float32), jnp.ones(2, jnp.float32), assume_a="pos")
    assert x.dtype == np.float32


def test_half_precision_is_accepted():
    for dtype in ops.STORED:
        factor = jb.cholesky(jnp.eye(4, dtype=dtype))
        assert factor.dtype == dtype
        np.testing.assert_array_equal(matrices.wide(factor), np.eye(4))


@pytest.mark.parametrize("dtype", ("int32", "int8", "bool", "float8_e4m3fn"))
@pytest.mark.parametrize("name", ops.SQUARE)
def test_other_dtypes_are_refused_by_name(name, dtype):
    with pytest.raises(TypeError) as error:
        ops.SQUARE[name](jnp.eye(3).astype(dtype))
    for word in (name, dtype, "float32", "complex128", "bfloat16"):
        assert word in str(error.value)


@pytest.mark.parametrize("shape", ((2, 3), (3,), (4, 3, 2)))
@pytest.mark.parametrize("name", ops.SQUARE)
def test_matrices_that_are_not_square_are_refused(name, shape):
    with pytest.raises(ValueError, match=f"{name}: .*n, n.*got .*{shape[-1]}"):
        ops.SQUARE[name](np.ones(shape))


@pytest.mark.parametrize("shape", ((4,), (4, 2), (2, 4, 1)))
@pytest.mark.parametrize("name", ops.SOLVERS)
def test_right_hand_sides_of_another_size_are_refused(name, shape):
    with pytest.raises(ValueError) as error:
        ops.SOLVERS[name](np.eye(3), np.ones(shape))
    for word in (name, "(3,)", "(3, 3)", str(shape)):
        assert word in str(error.value)


def test_scalar_right_hand_side_is_refused():
    for name, solver in ops.SOLVERS.items():
        with pytest.raises(ValueError, match=f"{name}: b must have shape"):
            solver(np.eye(1), np.float64(1))


@pytest.mark.parametrize("name", ops.SOLVERS)
def test_batches_that_do_not_broadcast_are_refused(name):
    with pytest.raises(ValueError) as error:
        ops.SOLVERS[name](np.ones((2, 3, 3)), np.ones((5, 3, 1)))
    for word in (name, "(2, 3, 3)", "(5, 3, 1)", "broadcast"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jb.cholesky(np.eye(2), accuracy="best"), ("cholesky", "accuracy", "best", "fast")),
        (
            lambda: jb.solve(np.eye(2), np.ones(2), assume_a="banded"),
            ("solve", "assume_a", "banded", "gen", "pos", "her", "sym"),
        ),
        (
            lambda: jb.solve(np.eye(2), np.ones(2), assume_a="pos", accuracy="x"),
            ("solve", "accuracy", "'x'", "ieee"),
        ),
        (
            lambda: jb.solve_triangular(np.eye(2), np.ones(2), trans=3),
            ("solve_triangular", "trans", "3", "'N'"),
        ),
    ],
)
def test_other_options_are_refused_by_name(call, words):
    with pytest.raises(ValueError) as error:
        call()
    for word in words:
        assert word in str(error.value)


def test_an_unknown_kernel_fails_the_call():
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(ops.compiled(jb.cholesky, np.eye(3), kernel="none_such"))
