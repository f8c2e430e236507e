"""The solver for lineax, under what lineax promises of its own: vmap, jvp, transpose, states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest

lx = pytest.importorskip("lineax")

from jax_batched import _matrices as matrices  # noqa: E402
from jax_batched.lineax import QR, Cholesky  # noqa: E402

SOLVERS = (Cholesky(), Cholesky(accuracy="fast"))
BATCH, N = 4, 5


def system(dtype="float64", batch=(), seed=0):
    rng = np.random.default_rng(seed)
    a = matrices.spd(rng, dtype, (*batch, N, N)).astype(dtype)
    return jnp.asarray(a), jnp.asarray(matrices.normal(rng, dtype, (*batch, N)).astype(dtype))


def operator(a, negative=False):
    tag = lx.negative_semidefinite_tag if negative else lx.positive_semidefinite_tag
    return lx.MatrixLinearOperator(-a if negative else a, tag)


def solve(a, b, solver=SOLVERS[0], negative=False, **options):
    return lx.linear_solve(operator(a, negative), b, solver=solver, **options).value


def close(x, y, dtype="float64"):
    x, y = jax.tree.leaves(x), jax.tree.leaves(y)
    for ours, theirs in zip(x, y, strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, atol=1e4 * np.finfo(dtype).eps * scale)


theirs = functools.partial(solve, solver=lx.Cholesky())


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: s.accuracy)
@pytest.mark.parametrize("negative", (False, True))
@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_values(dtype, negative, solver):
    a, b = system(dtype)
    x = solve(a, b, solver, negative)
    assert x.dtype == b.dtype
    close(x, np.linalg.solve(-a if negative else a, b), dtype)


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
@pytest.mark.parametrize("jit", (False, True))
def test_vmap(dtype, jit):
    a, b = system(dtype, (BATCH,))
    for axes, xs in (((0, 0), (a, b)), ((0, None), (a, b[0])), ((None, 0), (a[0], b))):
        f = jax.vmap(solve, axes)
        close((jax.jit(f) if jit else f)(*xs), jax.vmap(theirs, axes)(*xs))


def test_a_batch_is_one_kernel_each_and_one_factor_is_not_copied():
    a, b = system("float64", (BATCH,))
    text = jax.jit(jax.vmap(solve)).lower(a, b).as_text()
    for target in ("cholesky", "cho_solve"):
        assert text.count(f"@jax_batched.{target}.v1") == 1
    text = jax.jit(jax.vmap(solve, (None, 0))).lower(a[0], b).as_text()
    assert f"(tensor<{N}x{N}xf64>, tensor<{N}x{BATCH}xf64>)" in text


def derivatives(f, xs, along, negative):
    """Along both operands, along each alone, and along both twice."""
    call = functools.partial(f, negative=negative)

    def both(a, b):
        return jax.jvp(call, (a, b), along)[1]

    return [
        jax.jvp(call, xs, along),
        jax.jvp(lambda a: call(a, xs[1]), xs[:1], along[:1])[1],
        jax.jvp(lambda b: call(xs[0], b), xs[1:], along[1:])[1],
        jax.jvp(both, xs, along)[1],
    ]


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
@pytest.mark.parametrize("negative", (False, True))
def test_forward_derivatives(dtype, negative):
    xs, along = system(dtype), system(dtype, seed=1)
    close(derivatives(solve, xs, along, negative), derivatives(theirs, xs, along, negative))
    xs, along = system(dtype, (BATCH,)), system(dtype, (BATCH,), seed=1)
    ours, expected = (
        jax.vmap(functools.partial(derivatives, f, negative=negative)) for f in (solve, theirs)
    )
    close(ours(xs, along), expected(xs, along))


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
def test_gradients(dtype):
    a, b = system(dtype, (BATCH,))

    def loss(f, a, b):
        return jnp.sum(jnp.abs(jax.vmap(f)(a, b)) ** 2)

    ours, expected = (functools.partial(loss, f) for f in (solve, theirs))
    close(jax.jit(jax.grad(ours, (0, 1)))(a, b), jax.grad(expected, (0, 1))(a, b))
    if dtype == "float64":
        close(jax.hessian(ours, 1)(a, b), jax.hessian(expected, 1)(a, b))


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
def test_transpose(dtype):
    a, b = system(dtype)
    (x,) = jax.linear_transpose(lambda b: solve(a, b), b)(b)
    close(x, np.linalg.solve(a.T, b))
    batched_a, batched_b = system(dtype, (BATCH,))
    (x,) = jax.linear_transpose(lambda b: jax.vmap(solve)(batched_a, b), batched_b)(batched_b)
    close(x, np.linalg.solve(np.swapaxes(batched_a, 1, 2), batched_b[..., None])[..., 0])


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
@pytest.mark.parametrize("negative", (False, True))
def test_states(dtype, negative):
    """One factorization for several solves, and for those of the transpose and the conjugate."""
    a, b = system(dtype)
    solver, op = SOLVERS[0], operator(a, negative)
    signed = np.asarray(-a if negative else a)
    state = solver.init(op, {})
    x = lx.linear_solve(op, b, solver=solver, state=state).value
    close(x, np.linalg.solve(signed, b))
    for change, matrix in ((solver.transpose, signed.T), (solver.conj, signed.conj())):
        changed, options = change(state, {})
        x, result, _ = solver.compute(changed, b, options)
        assert bool(result == lx.RESULTS.successful)
        close(x, np.linalg.solve(matrix, b))
    assert solver.assume_full_rank()


def test_operators_and_vectors_that_are_trees():
    a, b = system()
    vector = {"left": b[:2], "right": b[2:].reshape(3, 1)}
    flat, unravel = jax.flatten_util.ravel_pytree(vector)

    def product(v):
        return unravel(a @ jax.flatten_util.ravel_pytree(v)[0])

    structure = jax.eval_shape(lambda: vector)
    op = lx.FunctionLinearOperator(product, structure, lx.positive_semidefinite_tag)
    x = lx.linear_solve(op, vector, solver=SOLVERS[0]).value
    close(x, unravel(jnp.asarray(np.linalg.solve(a, flat))))


def test_a_matrix_that_is_not_definite_is_reported_alone():
    a, b = system("float64", (BATCH,))
    a = a.at[1].set(-jnp.eye(N))

    def f(a, b):
        solution = lx.linear_solve(operator(a), b, solver=SOLVERS[0], throw=False)
        return solution.value, solution.result == lx.RESULTS.successful

    x, successful = jax.vmap(f)(a, b)
    np.testing.assert_array_equal(successful, [True, False, True, True])
    assert not np.isfinite(x[1]).any()
    healthy = [0, 2, 3]
    close(x[jnp.array(healthy)], np.linalg.solve(a, b[..., None])[healthy, :, 0])


def test_messages():
    a, b = system()
    with pytest.raises(ValueError, match="tagged positive or negative semidefinite"):
        lx.linear_solve(lx.MatrixLinearOperator(a), b, solver=SOLVERS[0])
    with pytest.raises(ValueError, match="accuracy"):
        solve(a, b, Cholesky(accuracy="exact"))


SHAPES = ((5, 5), (7, 4), (4, 7), (520, 3), (3, 520))


def rectangles(dtype, m, n, batch=(), seed=0):
    rng = np.random.default_rng(seed)
    a = matrices.normal(rng, dtype, (*batch, m, n)).astype(dtype)
    return jnp.asarray(a), jnp.asarray(matrices.normal(rng, dtype, (*batch, m)).astype(dtype))


def least_squares(a, b, solver=None):
    return lx.linear_solve(lx.MatrixLinearOperator(a), b, solver=solver or QR()).value


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_qr_values_and_states(m, n, dtype):
    a, b = rectangles(dtype, m, n)
    close(least_squares(a, b), np.linalg.pinv(a) @ b, dtype)
    solver, op = QR(), lx.MatrixLinearOperator(a)
    state = solver.init(op, {})
    wide = np.asarray(a)
    turned, _ = solver.transpose(state, {})
    for changed, matrix in (
        (turned, wide.T), (solver.conj(state, {})[0], wide.conj()),
        (solver.conj(turned, {})[0], wide.conj().T),
    ):  # fmt: skip
        rhs = b if matrix.shape == a.shape else jnp.arange(n) + b[:1]
        x, result, _ = solver.compute(changed, rhs, {})
        assert bool(result == lx.RESULTS.successful)
        close(x, np.linalg.pinv(matrix) @ rhs, dtype)
    assert solver.assume_full_rank()


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_qr_derivatives(m, n, dtype):
    """As those of lineax' own solver."""
    a, b = rectangles(dtype, m, n, (BATCH,))
    along = rectangles(dtype, m, n, (BATCH,), seed=1)
    theirs = functools.partial(least_squares, solver=lx.QR())
    results = [jax.jvp(jax.vmap(f), (a, b), along) for f in (least_squares, theirs)]
    close(*results)

    def loss(f, a, b):
        return jnp.sum(jnp.abs(jax.vmap(f)(a, b)) ** 2)

    close(*(jax.grad(functools.partial(loss, f), (0, 1))(a, b) for f in (least_squares, theirs)))


def test_qr_of_a_batch_is_one_kernel_each():
    a, b = rectangles("float64", 6, 4, (BATCH,))
    text = jax.jit(jax.vmap(least_squares)).lower(a, b).as_text()
    for target in ("qr", "qr_multiply", "triangular_solve"):
        assert text.count(f"@jax_batched.{target}.v1(") == 1


def test_qr_of_operators_and_vectors_that_are_trees():
    a, b = rectangles("float64", 5, 3)
    vector = {"left": b[:2], "right": b[2:].reshape(3, 1)}
    _, unravel = jax.flatten_util.ravel_pytree(vector)
    structure = [jax.ShapeDtypeStruct((3, 1), b.dtype)]
    op = lx.FunctionLinearOperator(lambda v: unravel(a @ v[0][:, 0]), structure)
    (x,) = lx.linear_solve(op, vector, solver=QR()).value
    close(x[:, 0], np.linalg.pinv(a) @ b)
