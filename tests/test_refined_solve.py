"""Refined solves: certificates checked against the truth, masks, rescue, scaling, derivatives."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_batched as jb
from jax_batched import _matrices as matrices

METHODS = ("ir", "gmres")
CONDITIONS = (1e0, 1e2, 1e4, 1e6, 1e7, 1e8, 1e10, 1e12, 1e14)


def with_condition(condition, n, seed, dtype="float64"):
    """Q diag(logspace) Q^H."""
    q = np.linalg.qr(matrices.normal(np.random.default_rng(seed), dtype, (n, n)))[0]
    a = q * np.logspace(0, -np.log10(condition), n) @ matrices.adjoint(q)
    return (a + matrices.adjoint(a)) / 2


def graded(n, dtype="float64", seed=0):
    """A batch of matrices of all the conditions, and a right-hand side for each."""
    a = np.stack([with_condition(c, n, seed, dtype) for c in CONDITIONS])
    return a, matrices.normal(np.random.default_rng(seed + 1), dtype, (len(CONDITIONS), n, 1))


def hilbert(n):
    i = np.arange(n)
    return 1.0 / (1 + i[:, None] + i)


def true_error(a, b, x):
    """Normwise backward error of each matrix, with residuals in extended precision."""
    wide = np.clongdouble if np.iscomplexobj(a) else np.longdouble
    a, b, x = (np.asarray(y).astype(wide) for y in (a, b, x))
    residual = np.abs(b - (a[..., :, :, None] * x[..., None, :, :]).sum(-2)).max(-2)
    bound = np.abs(a).sum(-1).max(-1)[..., None] * np.abs(x).max(-2) + np.abs(b).max(-2)
    return (residual / bound).max(-1).astype(float)


def default_tol(n, dtype):
    return max(n, 8) * float(jnp.finfo(dtype).eps) / 2


def check_certificates(a, b, x, info, tol=None):
    """converged is the truth, and the error is the error, up to rounding in the residual."""
    error = true_error(a, b, x)
    tol = default_tol(a.shape[-1], a.dtype) if tol is None else tol
    rounding = 2 * a.shape[-1] * float(jnp.finfo(a.dtype).eps)
    reported = np.asarray(info.backward_error)
    np.testing.assert_array_equal(info.converged, reported <= tol)
    known = np.isfinite(error)
    np.testing.assert_array_equal(known, np.isfinite(reported))
    assert (np.abs(reported - error)[known] <= rounding + 1e-3 * error[known]).all()
    assert not np.asarray(info.converged)[~known].any()


def solver(**options):
    return jax.jit(functools.partial(jb.refined_solve, **options))


def one_by_one(f, a, b):
    return jax.tree.map(lambda *x: np.stack(x), *(f(*ab) for ab in zip(a, b, strict=True)))


def assert_same_bits(ours, theirs):
    for u, v in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert ops.same_bits(u, v)


@pytest.mark.parametrize("fallback", (False, True))
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("method", METHODS)
def test_certificates_are_true_for_every_condition(method, dtype, fallback):
    f = solver(method=method, factor_dtype=dtype, fallback=fallback)
    for seed in (0, 1):
        a, b = graded(24, seed=seed)
        x, info = f(a, b)
        check_certificates(a, b, x, info)
        assert info.converged[:2].all()
        if fallback:
            assert info.converged.all()
            assert info.rescued[-1]
        else:
            assert not info.rescued.any()
            assert not info.converged[-1]


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("assume_a", ("pos", "gen"))
def test_every_dtype(assume_a, dtype):
    a, b = graded(9, "complex128")
    if np.dtype(dtype).kind != "c":
        a, b = graded(9)
    a, b = a.astype(dtype), b.astype(dtype)
    for method in METHODS:
        x, info = solver(assume_a=assume_a, method=method)(a, b)
        assert x.dtype == dtype
        assert info.backward_error.dtype == np.dtype(dtype).type(0).real.dtype
        check_certificates(a, b, x, info)
        assert info.converged[:5].all()


def test_steps_of_refinement_grow_with_the_condition():
    """A float32 factor: each step gains 1 / (condition u) or so."""
    conditions = (1e2, 1e4, 1e6, 1e7)
    f = solver(fallback=False)
    for seed in range(4):
        a = np.stack([with_condition(c, 32, seed) for c in conditions])
        b = np.random.default_rng(seed).standard_normal((4, 32, 1))
        x, info = f(a, b)
        assert info.converged.all()
        assert (np.asarray(info.steps) >= 1).all()
        assert (np.asarray(info.steps) <= (2, 3, 4, 7)).all()
        np.testing.assert_array_less(true_error(a, b, x), default_tol(32, "float64"))


def test_a_factor_too_poor_is_not_called_converged():
    a, b = hilbert(8), np.ones((8, 1))
    x, info = solver(fallback=False)(a, b)
    assert not info.converged
    assert not info.rescued
    assert info.backward_error > 1e-13
    x, info = solver()(a, b)
    assert info.converged
    assert info.rescued
    assert true_error(a, b, x) < default_tol(8, "float64")


def test_gmres_converges_where_refinement_does_not():
    a = np.stack([with_condition(c, 32, seed) for c in (1e9, 1e10) for seed in range(2)])
    b = np.random.default_rng(3).standard_normal((4, 32, 2))
    assert not solver(fallback=False)(a, b)[1].converged.any()
    x, info = solver(method="gmres", fallback=False)(a, b)
    assert info.converged.all()
    check_certificates(a, b, x, info)


def test_gmres_forward_error_is_that_of_a_solve_in_full_precision():
    a = with_condition(1e9, 20, 0)
    truth = np.random.default_rng(0).standard_normal((20, 1))
    b = a @ truth
    x, _ = solver(method="gmres", fallback=False)(a, b)
    direct = np.abs(np.linalg.solve(a, b) - truth).max()
    assert np.abs(x - truth).max() < 30 * direct


# Masks.


@pytest.mark.parametrize("assume_a", ("pos", "gen"))
@pytest.mark.parametrize("method", METHODS)
def test_a_matrix_does_not_see_its_neighbours(method, assume_a):
    """Alone, in a batch, in another order, under vmap: the same bits, steps and certificate."""
    for n, nrhs in ((8, 1), (19, 3))[assume_a == "gen" or method == "gmres" :]:
        a, b = graded(n)
        b = np.random.default_rng(0).standard_normal((len(a), n, nrhs))
        f = solver(method=method, assume_a=assume_a)
        whole = f(a, b)
        assert n == 8 or len(set(np.asarray(whole[1].steps).tolist())) > 1
        assert_same_bits(whole, one_by_one(f, a, b))
        assert_same_bits(whole, jax.jit(jax.vmap(f))(a, b))
        order = np.roll(np.arange(len(a))[::-1], 2)
        assert_same_bits(jax.tree.map(lambda x, o=order: x[o], whole), f(a[order], b[order]))


def test_a_fast_matrix_beside_a_slow_one():
    a, b = np.stack([np.eye(8), hilbert(8)]), np.ones((2, 8, 1))
    f = solver()
    alone = f(a[0], b[0])
    for x, info in (f(a, b), jax.vmap(f)(a, b)):
        assert_same_bits(alone, jax.tree.map(lambda y: y[0], (x, info)))
        assert info.steps[0] == 0
        assert info.steps[1] > 0
        np.testing.assert_array_equal(info.rescued, [False, True])


def test_nested_vmap_shares_the_factor():
    """Right-hand sides under vmap are columns of one solve, each with its own certificate."""
    a = graded(6)[0][:4]
    b = np.random.default_rng(0).standard_normal((5, 6))
    inner = jax.vmap(jb.refined_solve, (0, None))
    f = jax.jit(jax.vmap(inner, (None, 0)))
    x, info = f(a, b)
    assert x.shape == (5, 4, 6)
    assert info.steps.shape == info.info.shape == (5, 4)
    for i, j in itertools.product(range(5), range(4)):
        assert true_error(a[j], b[i][:, None], x[i, j][:, None]) <= default_tol(6, "float64")
    assert str(jax.make_jaxpr(f)(a, b)).count("jax_batched_low_factor") == 1


def test_right_hand_sides_do_not_see_each_other():
    """A column that does not converge at once neither delays nor changes another."""
    a = np.zeros((12, 12))
    a[:4, :4], a[4:, 4:] = np.eye(4), hilbert(8)
    f = jax.jit(jax.vmap(lambda b: jb.refined_solve(a, b), -1, (-1, 0)))
    easy, hard = np.eye(12)[0], np.append(np.zeros(4), np.ones(8))
    x, info = f(np.stack([easy, hard], -1))
    np.testing.assert_array_equal(info.steps > 0, [False, True])
    np.testing.assert_array_equal(info.rescued, [False, True])
    again, _ = f(np.stack([easy, np.zeros(12)], -1))
    assert ops.same_bits(x[:, 0], again[:, 0])
    assert not again[:, 1].any()


def test_inside_a_while_loop_under_vmap():
    """Each element leaves the loop at its own time, with the bits that it has alone."""

    def solve_until_small(a, b):
        def body(state):
            count, x, steps = state
            x, info = jb.refined_solve(a, x)
            return count + 1, x, steps + info.steps

        def unfinished(state):
            return (state[0] < 5) & (jnp.abs(state[1]).max() > 1e-2)

        return jax.lax.while_loop(unfinished, body, (0, b, 0))

    a = np.stack([scale * with_condition(2, 6, 0) for scale in (4, 20, 1000)])
    b = np.linspace(1.0, 2.0, 6)
    f = jax.jit(jax.vmap(solve_until_small, (0, None)))
    counts, x, steps = f(a, b)
    assert len(set(np.asarray(counts).tolist())) > 1
    for i in range(3):
        alone = f(a[i : i + 1], b)
        assert_same_bits(alone, (counts[i : i + 1], x[i : i + 1], steps[i : i + 1]))


# Rescue.


def test_a_rescue_is_a_branch_also_under_vmap():
    """A healthy batch does not pay for it: the full factor is inside a conditional."""
    a, b = (y[:4].reshape(2, 2, *y.shape[1:]) for y in graded(6))
    for fallback in (True, False):
        f = functools.partial(jb.refined_solve, fallback=fallback)
        for g in (f, jax.vmap(f), jax.vmap(jax.vmap(f))):
            text = jax.jit(g).lower(a, b).as_text()
            assert text.count("stablehlo.case") == fallback
            assert text.count("jax_batched.solve_pos.v1") == fallback


def test_a_rescue_that_is_no_better_changes_nothing():
    """With a tolerance below what rounding allows nothing converges, and the best x stays."""
    a, b = (y[:4] for y in graded(10))
    x, info = solver(tol=0)(a, b)
    assert not info.converged.any() or (info.backward_error == 0).any()
    before, without = solver(tol=0, fallback=False)(a, b)
    assert (info.backward_error <= without.backward_error).all()
    kept = ~np.asarray(info.rescued)
    assert ops.same_bits(np.asarray(x)[kept], np.asarray(before)[kept])
    check_certificates(a, b, x, info, tol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fallback", (False, True))
def test_failed_matrices_are_flagged_alone(fallback, method):
    healthy = with_condition(1e3, 5, 0)
    indefinite = np.diag([1.0, 2, -1, 1, 1])
    nan = np.full((5, 5), np.nan)
    a = np.stack([healthy, indefinite, nan, np.zeros((5, 5)), healthy])
    b = np.ones((5, 5, 2))
    b[4, :, 1] = 0
    f = solver(fallback=fallback, method=method)
    x, info = f(a, b)
    np.testing.assert_array_equal(info.converged, [True, False, False, False, True])
    np.testing.assert_array_equal(info.info, [0, 3, 1, 1, 0])
    assert not info.rescued.any()
    assert np.isnan(x[1:4]).all()
    assert np.isnan(info.backward_error[1:4]).all()
    assert_same_bits(f(a[0], b[0]), jax.tree.map(lambda y: y[0], (x, info)))
    assert not x[4, :, 1].any()


def test_a_failed_matrix_with_a_zero_right_hand_side_has_no_solution():
    x, info = solver()(-np.eye(3), np.zeros(3))
    assert np.isnan(x).all()
    assert info.info == 1
    assert not info.converged


def test_a_singular_general_matrix_is_flagged():
    a = np.stack([np.diag([1.0, 0, 2]), np.eye(3)])
    x, info = solver(assume_a="gen")(a, np.ones((2, 3, 1)))
    np.testing.assert_array_equal(info.info, [2, 0])
    np.testing.assert_array_equal(info.converged, [False, True])
    np.testing.assert_array_equal(x[1], np.ones((3, 1)))


def test_a_nan_in_a_right_hand_side_is_its_own():
    a, b = with_condition(1e3, 6, 0), np.ones((6, 3))
    clean, _ = solver()(a, b)
    b[2, 1] = np.nan
    x, info = solver()(a, b)
    assert np.isnan(x[:, 1]).all()
    assert not info.converged
    assert ops.same_bits(x[:, [0, 2]], clean[:, [0, 2]])


def test_one_triangle_is_read():
    a, b = with_condition(1e4, 7, 0), np.ones((7, 1))
    for lower in (False, True):
        half = np.where(np.tril(np.ones((7, 7))) if lower else np.triu(np.ones((7, 7))), a, np.nan)
        x, info = solver(lower=lower)(half, b)
        assert info.converged
        assert true_error(a, b, x) <= default_tol(7, "float64")


def test_slightly_indefinite_matrices_are_never_certified_wrongly():
    """The low precision cannot see such a sign; what is called converged solves the system."""
    q = np.linalg.qr(np.random.default_rng(0).standard_normal((9, 9)))[0]
    for smallest, method in itertools.product((-1e-9, -1e-12), METHODS):
        spectrum = np.append(np.logspace(0, -3, 8), smallest)
        a = q * spectrum @ q.T
        a = (a + a.T) / 2
        x, info = solver(method=method)(a, np.ones((9, 1)))
        if info.converged:
            assert true_error(a, np.ones((9, 1)), x) <= default_tol(9, "float64")
        else:
            assert info.info > 0
            assert np.isnan(x).all()


# Scaling.


@pytest.mark.parametrize(
    ("dtype", "factor_dtype", "assume_a", "method"),
    [
        *itertools.product(("float32",), ("float16", "bfloat16", "float32"), ("pos",), ("ir",)),
        ("float64", "bfloat16", "pos", "ir"),
        *itertools.product(("float64",), ("float16", "float32"), ("pos", "gen"), METHODS),
    ],
)
def test_scale_does_not_matter(dtype, factor_dtype, assume_a, method):
    """Beyond the range of the low precision, powers of two change nothing but exponents."""
    a = with_condition(30, 6, 0).astype(dtype)
    b = np.linspace(1, 2, 6).astype(dtype)
    f = solver(assume_a=assume_a, method=method, factor_dtype=factor_dtype)
    plain, plain_info = f(a, b)
    assert plain_info.converged
    assert not plain_info.rescued
    for k, j in ((100, 0), (-100, 0), (0, 100), (60, -60), (-90, -90)):
        x, info = f(np.ldexp(a, k), np.ldexp(b, j))
        assert ops.same_bits(x, np.ldexp(np.asarray(plain), j - k))
        assert_same_bits(info, plain_info)


@pytest.mark.parametrize("dtype", ("float32", "float64"))
@pytest.mark.parametrize("scale", (1e6, 1e-30))
def test_multiples_of_the_identity_in_half_precision(scale, dtype):
    a = (scale * np.eye(4)).astype(dtype)
    x, info = solver(factor_dtype="float16")(a, np.ones(4, dtype))
    assert info.converged
    assert not info.rescued
    np.testing.assert_allclose(x, 1 / scale, rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("assume_a", ("pos", "gen"))
@pytest.mark.parametrize("factor_dtype", ("float16", "float32"))
def test_badly_scaled_rows_and_columns(factor_dtype, assume_a):
    """A diagonal over 60 powers of ten: only the scaling makes a low factor possible."""
    scale = np.logspace(-15, 15, 8)
    a = with_condition(20, 8, 0) * scale[:, None] * scale
    b = a @ (1 / scale)
    x, info = solver(factor_dtype=factor_dtype, assume_a=assume_a)(a, b)
    assert info.converged
    assert not info.rescued
    assert true_error(a, b[:, None], x[:, None]) <= default_tol(8, "float64")


def test_the_ends_of_the_range():
    """A solution beyond the range is not certified; one within it is."""
    f = solver()
    x, info = f(1e-300 * np.eye(2), np.ones(2))
    assert info.converged
    np.testing.assert_allclose(x, 1e300, rtol=4e-15)
    x, info = f(1e-200 * np.eye(2), 1e200 * np.ones(2))
    assert not info.converged
    x, info = f(1e200 * np.eye(2), 1e-200 * np.ones(2))
    assert not info.converged
    x, info = f(1e300 * np.eye(2), 1e300 * np.ones(2))
    assert info.converged
    np.testing.assert_array_equal(x, np.ones(2))


def test_a_shift_makes_a_low_factor_of_a_nearly_singular_matrix():
    """Ones plus little: its half-precision rounding is singular, and GMRES needs some factor."""
    a = np.ones((12, 12)) + 1e-4 * np.diag(np.arange(1.0, 13))
    x, info = solver(factor_dtype="float16", method="gmres", fallback=False)(a, np.arange(12.0))
    assert info.converged
    assert true_error(a, np.arange(12.0)[:, None], x[:, None]) <= default_tol(12, "float64")


# Derivatives beyond those of the table of operations.


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_as_accurate_as_those_of_a_solve_in_full_precision(method):
    """Where the low factor is far off, so that nothing but refinement can have made them right."""
    a, b = with_condition(1e5, 10, 0), np.linspace(1, 2, 10)

    def gradients(solve):
        def value(a, b):
            return jnp.sum(solve(a, b) ** 2)

        return jax.jit(jax.grad(value, (0, 1)))(a, b)

    def refined(a, b):
        return jb.refined_solve(a, b, method=method, fallback=False)[0]

    ours = gradients(refined)
    theirs = gradients(functools.partial(jb.solve, assume_a="pos"))
    for u, v in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(u, v, atol=1e-9 * np.abs(v).max())
    assert not np.tril(ours[0], -1).any()  # the triangle that is not read


def test_derivatives_do_not_factor_again():
    a, b = with_condition(1e3, 5, 0), np.ones(5)
    text = str(jax.make_jaxpr(jax.grad(lambda a: jb.refined_solve(a, b)[0].sum()))(a))
    assert text.count("jax_batched_low_factor") == 1
    assert text.count("jax_batched_refine") == 2


def test_derivatives_of_a_rescued_matrix_and_of_a_failed_one():
    a = np.stack([hilbert(8), -np.eye(8), np.eye(8)])
    b = np.ones((3, 8))[..., None]
    gradient = jax.jit(jax.grad(lambda b: jb.refined_solve(a, b)[0].sum()))(b)
    np.testing.assert_allclose(gradient[0], np.linalg.solve(a[0], np.ones((8, 1))), rtol=1e-4)
    assert np.isnan(gradient[1]).all()
    np.testing.assert_array_equal(gradient[2], np.ones((8, 1)))


def test_steps_and_flags_have_no_derivatives():
    a, b = with_condition(1e3, 5, 0), np.ones(5)

    def error(a):
        x, info = jb.refined_solve(a, b)
        return x.sum() + 1e6 * info.backward_error, info

    (_, info), gradient = jax.value_and_grad(error, has_aux=True)(a)
    assert info.converged
    expected = jax.grad(lambda a: jb.refined_solve(a, b)[0].sum())(a)
    assert ops.same_bits(gradient, expected)


# Sharding.


@pytest.mark.parametrize("kind", ("Auto", "Explicit"))
def test_a_sharded_batch_exchanges_nothing_but_whether_it_is_done(kind):
    a, b = (np.concatenate([y[:4]] * 2) for y in graded(4))
    with jax.default_device(jax.devices("cpu")[0]):
        expected = solver()(a, b)
    kinds = (getattr(jax.sharding.AxisType, kind),)
    where = jax.make_mesh((8,), ("x",), axis_types=kinds, devices=jax.devices("cpu"))
    with jax.set_mesh(where):
        operands = [jax.device_put(y, NamedSharding(where, P("x"))) for y in (a, b)]
        compiled = solver().lower(*operands).compile()
        results = compiled(*operands)
    moved = re.findall(
        r"= (\S+) (?:all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)",
        compiled.as_text(),
    )
    assert set(moved) <= {"pred[]"}
    assert all(y.sharding.spec[0] == "x" for y in jax.tree.leaves(results))
    assert_same_bits(results, expected)


def test_shard_map_runs_a_loop_on_each_device():
    a, b = (np.concatenate([y[:4]] * 2) for y in graded(4))
    where = jax.make_mesh(
        (8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")
    )
    f = jax.shard_map(jb.refined_solve, mesh=where, in_specs=(P("x"), P("x")), out_specs=P("x"))
    with jax.default_device(jax.devices("cpu")[0]):
        expected = solver()(a, b)
    assert_same_bits(jax.jit(f)(a, b), expected)
    assert "all-reduce" not in jax.jit(f).lower(a, b).compile().as_text()


def test_export_with_a_symbolic_batch():
    shape = jax.export.symbolic_shape("b, 5, 5")
    shapes = [
        jax.ShapeDtypeStruct(shape, np.float64),
        jax.ShapeDtypeStruct((*shape[:2], 1), np.float64),
    ]
    exported = jax.export.export(
        jax.jit(lambda a, b: tuple(jax.tree.leaves(jb.refined_solve(a, b)))),
        disabled_checks=jb.export_disabled_checks(),
    )(*shapes)
    a, b = graded(5)
    for batch in (1, 3):
        x, converged, *_ = exported.call(a[:batch], b[:batch])
        assert x.shape == (batch, 5, 1)
        assert converged.all()


# Options.


def test_max_steps():
    a, b = with_condition(1e6, 10, 0), np.ones(10)
    for method, steps in itertools.product(METHODS, (0, 1)):
        _, info = solver(max_steps=steps, fallback=False, method=method)(a, b)
        assert info.steps <= steps
        if method == "ir":
            assert not info.converged
    assert solver(max_steps=0)(a, b)[1].rescued


def test_tol():
    a, b = with_condition(1e6, 10, 0), np.ones(10)
    steps = [int(solver(tol=tol)(a, b)[1].steps) for tol in (1e-3, 1e-10, 1e-15)]
    assert steps[0] == 0
    assert steps == sorted(steps)
    assert steps[-1] > 1


def test_empty_systems_are_converged():
    for shape in ((0, 0), (3, 0, 0), (0, 3, 3)):
        x, info = jb.refined_solve(np.zeros(shape), np.zeros((*shape[:-1], 2)))
        assert x.shape == (*shape[:-1], 2)
        assert all(y.shape == shape[:-2] for y in info)
        assert info.converged.all()
    _, info = jb.refined_solve(np.eye(3), np.zeros((4, 3, 0)))
    assert info.converged.shape == (4,)
    assert info.converged.all()


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (ValueError, {"method": "cg"}, ("method", "'ir'", "'gmres'", "'cg'")),
        (ValueError, {"assume_a": "sym"}, ("assume_a", "'pos'", "'gen'", "'sym'")),
        (ValueError, {"tol": -1.0}, ("tol", "-1.0")),
        (ValueError, {"tol": float("nan")}, ("tol", "nan")),
        (ValueError, {"max_steps": -1}, ("max_steps", "-1")),
        (ValueError, {"max_steps": 1.5}, ("max_steps", "1.5")),
        (TypeError, {"factor_dtype": "float128x"}, ("float128x", "float64", "bfloat16")),
        (TypeError, {"factor_dtype": "complex64"}, ("complex64", "float64", "float32")),
        (TypeError, {"factor_dtype": jnp.int32}, ("int32", "float16")),
    ],
)
def test_other_options_are_refused(error, options, words):
    with pytest.raises(error) as raised:
        jb.refined_solve(np.eye(2), np.ones(2), **options)
    for word in ("refined_solve", *words):
        assert word in str(raised.value)


def test_a_factor_wider_than_the_data_is_refused():
    with pytest.raises(TypeError, match=r"factor_dtype float64 .* dtype float32; .*float16"):
        jb.refined_solve(np.eye(2, dtype=np.float32), np.ones(2, np.float32), factor_dtype=float)


@pytest.mark.parametrize("dtype", ("int32", "bool", "float16", "bfloat16"))
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=f"refined_solve: a has dtype {dtype}; .*complex128"):
        jb.refined_solve(jnp.eye(2).astype(dtype), jnp.ones(2))


@pytest.mark.parametrize("shape", ((2, 3), (3,)))
def test_matrices_that_are_not_square_are_refused(shape):
    with pytest.raises(ValueError, match="refined_solve: a must have shape"):
        jb.refined_solve(np.ones(shape), np.ones(3))
