"""Derivatives: every mode and nesting, against finite differences of our own primal in float64."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest

import jax_batched as jb
from jax_batched import _matrices as matrices

CHOLESKY = ops.of("cholesky")
SOLVE_POS = ops.of("solve_pos")

STEP = 1e-6
TOLERANCE = 2e-4  # of a gradient in float32
LAX = ("lax",)  # derivatives are made of other operations, which have no path "composed"


def like(rng, x, dtype=None):
    """Random numbers of the shape of x."""
    x = np.asarray(x)
    return matrices.normal(rng, x.dtype, x.shape).astype(dtype or x.dtype)


def directions(rng, operands):
    """Random tangents."""
    return tuple(jnp.asarray(like(rng, x)) for x in operands)


def inner(x, y):
    """JAX's pairing of cotangents with tangents: the real part, nothing conjugated."""
    return sum(
        np.real(np.sum(np.asarray(u) * np.asarray(v)))
        for u, v in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    )


def leaves(*trees):
    """The leaves of several trees of one structure, side by side."""
    return zip(*(jax.tree.leaves(tree) for tree in trees), strict=True)


def finite_difference(f, operands, tangents):
    """Central difference of f, of second order in the step."""
    moved = [
        f(*(x + sign * STEP * t for x, t in zip(operands, tangents, strict=True)))
        for sign in (1, -1)
    ]
    return jax.tree.map(lambda u, v: (u - v) / (2 * STEP), *moved)


def check_derivatives(f, operands, seed=0):
    """jvp, linearize and vjp of f against differences of f, and against each other."""
    rng = np.random.default_rng(seed)
    operands = tuple(jnp.asarray(x) for x in operands)
    tangents = directions(rng, operands)
    result = jax.eval_shape(f, *operands)
    cotangent = jax.tree.map(lambda x: like(rng, np.empty(x.shape, x.dtype)), result)

    @jax.jit
    def every_mode(operands, tangents, cotangent):
        y, dy = jax.jvp(f, operands, tangents)
        _, linear = jax.linearize(f, *operands)
        primal, pullback = jax.vjp(f, *operands)
        difference = finite_difference(f, operands, tangents)
        return (y, primal), (dy, linear(*tangents), difference), pullback(cotangent)

    (y, primal), (dy, linear, difference), gradient = every_mode(operands, tangents, cotangent)
    scale = 1 + max(np.abs(e).max() for e in jax.tree.leaves(difference))
    for u, v, du, dv, expected in leaves(y, primal, dy, linear, difference):
        np.testing.assert_allclose(du, expected, atol=3e-8 * scale)
        np.testing.assert_allclose(dv, du, atol=1e-12 * scale)
        np.testing.assert_allclose(v, u, atol=1e-12 * scale)
    for g, x in zip(gradient, operands, strict=True):
        assert g.shape == x.shape
        assert g.dtype == x.dtype
        assert np.isfinite(g).all()
    np.testing.assert_allclose(
        inner(cotangent, dy), inner(gradient, tangents), rtol=1e-9, atol=1e-9 * scale
    )


def scalar(op, weights):
    """A real function of the operands that is curved in all of the result."""

    def f(*operands):
        x = op(*operands)
        return jnp.sum(jnp.real(x * weights) ** 2 + jnp.sin(jnp.imag(x * weights)))

    return f


def scalar_and_operands(op, dtype, *, batch=(2,), n=4, nrhs=2):
    operands = op.operands(dtype, batch=batch, n=n, nrhs=nrhs)
    weights = like(np.random.default_rng(7), op(*operands))
    return scalar(op, weights), operands


@pytest.mark.every_row
@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
@pytest.mark.parametrize(
    ("op", "path"), ops.by_path([*ops.TABLE, *ops.COMPOSITE], LAX), ids=ops.ids
)
def test_first_derivatives(op, path, dtype):
    with ops.force_kernel(path):
        check_derivatives(op, op.operands(dtype, batch=(2,), n=4, nrhs=3))


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, "complex128") for op in ops.WITH_KERNELS]
    + [(op, "float64") for op in (*ops.ONE_EACH, *ops.of("solve_gen"), *ops.ONE_COMPOSITE)],
    ids=ops.ids,
)
def test_second_derivatives_in_every_order(op, dtype):
    """Forward over reverse, reverse over reverse; reverse over forward and forward over forward."""
    f, operands = scalar_and_operands(op, dtype, batch=(), n=3, nrhs=1)
    everything = tuple(range(len(operands)))
    check_derivatives(jax.grad(f, everything), operands)
    tangents = directions(np.random.default_rng(3), operands)
    check_derivatives(lambda *x: jax.jvp(f, x, tangents)[1], operands)


@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_jacobians_and_hessians_agree(op):
    f, operands = scalar_and_operands(op, "float64", batch=(), n=3, nrhs=1)
    modes = (jax.jacfwd, jax.jacrev)
    for argument in range(len(operands)):
        jacobians = [mode(op, argument) for mode in modes]
        hessians = [g(h(f, argument), argument) for g, h in itertools.product(modes, modes)]
        every_way = jax.jit(lambda *x, fs=(*jacobians, *hessians): [g(*x) for g in fs])
        forward, reverse, *ways = every_way(*operands)
        np.testing.assert_allclose(forward, reverse, atol=1e-12)
        size = operands[argument].size
        for way in ways:
            np.testing.assert_allclose(way, ways[0], atol=1e-10)
            square = np.reshape(way, (size, size))
            np.testing.assert_allclose(square, square.T, atol=1e-10)


@pytest.mark.parametrize("dtype", ("float32", "complex64"))
@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_gradients_in_every_tier(op, dtype):
    """In single against double precision, and that against differences."""
    cases = [op.operands(dtype, batch=(2,), n=n, nrhs=2) for n in (2, 9, 33)]
    wide = [tuple(jnp.asarray(matrices.wide(x)) for x in operands) for operands in cases]
    rng = np.random.default_rng(7)
    weights = [like(rng, operands[-1]) for operands in cases]
    tangents = [directions(rng, operands) for operands in wide]

    @jax.jit
    def gradients(cases):
        return [
            jax.grad(scalar(op, w), tuple(range(len(operands))))(*operands)
            for w, operands in zip(weights, cases, strict=True)
        ]

    @jax.jit
    def differences():
        return [
            finite_difference(scalar(op, w), operands, t)
            for w, operands, t in zip(weights, wide, tangents, strict=True)
        ]

    exact = gradients(wide)
    for g, t, difference in zip(exact, tangents, differences(), strict=True):
        np.testing.assert_allclose(inner(g, t), difference, rtol=1e-6, atol=1e-6)
    for g, e in zip(jax.tree.leaves(gradients(cases)), jax.tree.leaves(exact), strict=True):
        assert g.dtype == dtype
        np.testing.assert_allclose(g, e, atol=TOLERANCE * np.abs(e).max())


@pytest.mark.parametrize("stored", ops.STORED)
@pytest.mark.parametrize(
    ("op", "path"),
    ops.by_path([op for op in ops.WITH_KERNELS if not op.kind.is_unitary], LAX),
    ids=ops.ids,
)
def test_gradients_in_half_precision(op, path, stored):
    operands = [x.astype(stored) for x in op.operands("float32", batch=(2,), n=4, nrhs=2)]

    @jax.jit
    def gradients(*xs):
        arguments = tuple(range(len(xs)))
        return jax.grad(lambda *xs: jnp.sum(op(*xs).astype(jnp.float32) ** 2), arguments)(*xs)

    exact = gradients(*(x.astype(np.float64) for x in operands))
    with ops.force_kernel(path):
        ours = gradients(*operands)
    for g, e in zip(ours, exact, strict=True):
        assert g.dtype == stored
        np.testing.assert_allclose(matrices.wide(g), e, atol=0.1 * np.abs(e).max())


@pytest.mark.parametrize(("op", "path"), ops.by_path(ops.TABLE, LAX), ids=ops.ids)
def test_what_is_not_read_has_no_derivative(op, path):
    """Zero gradients, and tangents that are ignored even where they are NaN."""
    with ops.force_kernel(path):
        check_unread(op)


def check_unread(op):
    f, operands = scalar_and_operands(op, "float64")
    unread = np.broadcast_to(op.unread(4), operands[0].shape)
    gradient = np.asarray(jax.jit(jax.grad(f))(*operands))
    assert not gradient[unread].any()
    assert np.isfinite(gradient).all()
    tangents = directions(np.random.default_rng(0), operands)
    spoiled = (np.where(unread, np.nan, tangents[0]), *tangents[1:])
    clean = (np.where(unread, 0, tangents[0]), *tangents[1:])
    jvp = jax.jit(lambda x, t: jax.jvp(op, x, t)[1])
    assert ops.same_bits(jvp(operands, spoiled), jvp(operands, clean))


@pytest.mark.parametrize("op", CHOLESKY + SOLVE_POS, ids=ops.ids)
def test_the_imaginary_part_of_the_diagonal_has_no_derivative(op):
    f, operands = scalar_and_operands(op, "complex128")
    gradient = np.asarray(jax.grad(f)(*operands))
    assert np.isfinite(gradient).all()
    assert not np.diagonal(gradient, axis1=-2, axis2=-1).imag.any()


@pytest.mark.parametrize("upper", (False, True))
@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
def test_symmetrized_gradients_are_hermitian(upper, dtype):
    op = ops.BY_NAME[f"cholesky-{'upper' if upper else 'lower'}-mean"]
    f, operands = scalar_and_operands(op, dtype)
    gradient = np.asarray(jax.jit(jax.grad(f))(*operands))
    np.testing.assert_allclose(gradient, matrices.adjoint(gradient), atol=1e-13)


@pytest.mark.parametrize("op", ops.SOLVING, ids=ops.ids)
@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
def test_linear_transpose(op, dtype):
    a, b = op.operands(dtype, batch=(2,), n=4, nrhs=3)
    solve = functools.partial(op, a)
    (result,) = jax.linear_transpose(solve, b)(b)
    np.testing.assert_allclose(inner(result, b), inner(b, solve(b)), rtol=1e-12)
    m = op.matrix(a)
    transpose = np.swapaxes(m, -1, -2)
    product = transpose @ result if op.left_side else result @ transpose
    np.testing.assert_allclose(product, b, atol=1e-12)


@pytest.mark.parametrize("op", ops.SOLVING, ids=ops.ids)
def test_gradients_through_broadcast_and_shared_operands(op):
    """vmap of grad, grad of vmap, and broadcasting: a shared operand's gradient is the sum."""
    a, b = op.operands("float64", batch=(3,), n=4, nrhs=2)

    def loss(x):
        return jnp.sum(jnp.sin(x))

    def gradients(f, *operands):
        return jax.jit(jax.grad(lambda a, b: loss(f(a, b)), (0, 1)))(*operands)

    batched = gradients(op, a, b)
    per_matrix = jax.jit(jax.vmap(jax.grad(lambda a, b: loss(op(a, b)), (0, 1))))(a, b)
    for x, y in zip(per_matrix, batched, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-13)

    da, db = gradients(op, np.broadcast_to(a[0], a.shape), b)
    for f in (jax.vmap(op, (None, 0)), op):
        shared_da, shared_db = gradients(f, a[0], b)
        np.testing.assert_allclose(shared_da, da.sum(0), atol=1e-12)
        np.testing.assert_allclose(shared_db, db, atol=1e-12)

    da, db = gradients(op, a, np.broadcast_to(b[0], b.shape))
    for f in (jax.vmap(op, (0, None)), op):
        shared_da, shared_db = gradients(f, a, b[0])
        np.testing.assert_allclose(shared_da, da, atol=1e-12)
        np.testing.assert_allclose(shared_db, db.sum(0), atol=1e-12)


@pytest.mark.parametrize("batches", (((4, 1), (1, 5)), ((1, 3), (2, 1)), ((2, 1, 3), (1, 4, 1))))
@pytest.mark.parametrize("op", ops.SUBSTITUTING, ids=ops.ids)
def test_derivatives_of_crossed_batch_dimensions(op, batches):
    rng = np.random.default_rng(0)
    a = op.spoil(op.make(rng, "float64", (*batches[0], 3, 3)))
    b = op.right_hand_side(rng, "float64", batches[1], 3, 2)
    check_derivatives(op, (a, b))


@pytest.mark.parametrize("op", ops.SOLVING, ids=ops.ids)
def test_derivatives_of_a_vector_right_hand_side(op):
    a, _ = op.operands("float64", batch=(2,), n=3)
    check_derivatives(op, (a, np.random.default_rng(0).standard_normal(3)))


@pytest.mark.parametrize("lower", (False, True))
def test_derivatives_through_cho_factor_and_cho_solve(lower):
    op = SOLVE_POS[lower]

    def f(a, b):
        return jb.cho_solve(jb.cho_factor(a, lower=lower), b)

    operands = op.operands("complex128", batch=(2,), n=4, nrhs=2)
    check_derivatives(f, operands)
    np.testing.assert_allclose(f(*operands), op(*operands), atol=1e-13)


def test_info_carries_no_derivative():
    a, b = SOLVE_POS[0].operands("float64", batch=(2,), n=3)
    for op, operands in ((CHOLESKY[0], (a,)), (SOLVE_POS[0], (a, b))):
        y, dy = jax.jvp(op.with_info, operands, directions(np.random.default_rng(0), operands))
        assert dy[1].dtype == jax.dtypes.float0
        assert dy[1].shape == y[1].shape == (2,)


def calls(text, operation):
    return len(re.findall(rf'custom_call_target="jax_batched\.{operation}\.v1"', text))


@pytest.mark.parametrize("arguments", (0, 1, (0, 1)))
@pytest.mark.parametrize("op", SOLVE_POS, ids=ops.ids)
def test_value_and_gradient_of_a_solve_are_one_factorization(op, arguments):
    f, operands = scalar_and_operands(op, "float32", n=8)
    program = jax.jit(jax.value_and_grad(f, arguments)).lower(*operands).compile().as_text()
    assert calls(program, "cholesky") + calls(program, "solve_pos") == 1


def test_value_and_gradient_of_a_factor_are_one_factorization():
    f, operands = scalar_and_operands(CHOLESKY[0], "float32", n=8)
    program = jax.jit(jax.value_and_grad(f)).lower(*operands).compile().as_text()
    assert calls(program, "cholesky") == 1


def test_failed_matrix_has_nan_gradients_alone():
    a = jnp.stack([jnp.ones((2, 2)), 2 * jnp.eye(2)])

    @jax.jit
    def f(a):
        factor, info = jb.cholesky(a, return_info=True)
        log_det = jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)), -1)
        return jnp.sum(jnp.where(info == 0, log_det, 0))

    gradient = jax.grad(f)(a)
    assert np.isnan(gradient[0]).all()
    np.testing.assert_allclose(gradient[1], 0.25 * np.eye(2), rtol=1e-15)


@pytest.mark.parametrize("op", ops.CAN_FAIL, ids=ops.ids)
def test_gradients_of_neighbours_of_a_failed_matrix(op):
    f, healthy = scalar_and_operands(op, "float64", batch=(5,))
    broken = healthy[0].copy()
    broken[::2, 1, 1] = -1
    gradient = jax.jit(jax.grad(f))
    good, bad = gradient(*healthy), gradient(broken, *healthy[1:])
    assert ops.same_bits(good[1::2], bad[1::2])
    assert np.isnan(bad[::2]).any(axis=(-2, -1)).all()


X = np.array([[4.0, 1], [1, 3]])
A = np.array([[2.0, 0.5], [0.5, 1]])


@pytest.mark.parametrize(
    ("symmetrize", "expected"),
    [
        (False, [[0.2063438, 0.3492443], [0, 0.3015113]]),
        (True, [[0.2063438, 0.1746221], [0.1746221, 0.3015113]]),
    ],
)
def test_gradient_of_the_sum_of_an_upper_factor(symmetrize, expected):
    def f(x):
        return jnp.sum(jb.cholesky(x, upper=True, symmetrize_input=symmetrize))

    np.testing.assert_allclose(jax.grad(f)(X), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("symmetrize", "expected"),
    [
        (True, [[4 / 7, -2 / 7], [-2 / 7, 8 / 7]]),
        (False, [[4 / 7, 0], [-4 / 7, 8 / 7]]),
    ],
)
def test_gradient_of_the_log_determinant(symmetrize, expected):
    def log_det(a):
        factor = jb.cholesky(a, symmetrize_input=symmetrize)
        return 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))

    np.testing.assert_allclose(jax.grad(log_det)(A), expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("diagonal", ((5.0, 7.0), (np.nan, np.nan)))
def test_a_unit_diagonal_is_ignored(diagonal):
    a = np.array([[diagonal[0], 0], [2, diagonal[1]]])
    solve = functools.partial(jb.solve_triangular, lower=True, unit_diagonal=True)
    b = np.ones(2)
    x, dx = jax.jvp(lambda a: solve(a, b), (a,), (np.eye(2),))
    np.testing.assert_array_equal(x, [1, -1])
    np.testing.assert_array_equal(dx, [0, 0])
    gradient = jax.grad(lambda a: jnp.sum(solve(a, b)))(a)
    np.testing.assert_array_equal(gradient, [[0, 0], [-1, 0]])


@pytest.mark.parametrize("n", (100, 513))
@pytest.mark.parametrize("op", [CHOLESKY[0], SOLVE_POS[1]], ids=ops.ids)
def test_derivatives_of_large_matrices(op, n):
    """The fused kernel's limit and the kernels' range do not change what is differentiated."""
    operands = op.operands("float64", n=n, nrhs=1)
    tangents = directions(np.random.default_rng(0), operands)
    _, dy = jax.jit(lambda x, t: jax.jvp(op, x, t))(operands, tangents)
    expected = finite_difference(jax.jit(op), operands, tangents)
    np.testing.assert_allclose(dy, expected, atol=1e-7 * (1 + np.abs(expected).max()))
