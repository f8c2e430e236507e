"""Matrices beyond the kernels' range: the ways to divide them, and the operations that do."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
from ops import same_bits
from test_failure import failing_at
from test_lu import checked_ratios

import jax_batched as jb
from jax_batched import _matrices as matrices
from jax_batched import blocked
from jax_batched._ffi import force_kernel
from jax_batched._matrices import MAX_RATIO, wide
from jax_batched.blocked import VARIANTS, Hermitian, Plan
from jax_batched.cholesky import cholesky_op
from jax_batched.lu import lu_panel_op
from jax_batched.triangular_solve import triangular_solve_op

PLANS = [
    *(Plan(blocks, variant) for blocks in ((8,), (16, 8)) for variant in VARIANTS),
    Plan((20, 16, 8), "left"),
    *(Plan((8,), variant, batched=False) for variant in VARIANTS),
]
BATCH = 2 if jax.default_backend() == "cpu" else 4  # from which on blocks serve
SIZES = (
    513,
    1024,
    1025,
    *(pytest.param(n, marks=pytest.mark.only_exhaustive) for n in (640, 1000, 2049)),
)


def cholesky(a, plan, upper=False):
    factor = functools.partial(cholesky_op, upper=False, symmetrize=False, accuracy="ieee")
    return blocked.cholesky(Hermitian(a, upper), plan, factor, triangular_solve_op)


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_variant_of_cholesky(plan, dtype):
    """Of a triangle, as the other one holds NaN, and of the mean; a failure in the last block."""
    rng = np.random.default_rng(0)
    a = matrices.spd(rng, dtype, (3, 24, 24))
    a[1] = failing_at(rng, dtype, 24, [23], -1.0)[0]
    a = a.astype(dtype)
    other = np.triu(np.ones((24, 24), bool), 1)
    lower = np.where(other, np.nan, a)
    upper = np.where(other.T, np.nan, a)
    skewed = np.where(other, 2 * a, 0) + np.where(np.eye(24, dtype=bool), a, 0)
    f = jax.jit(cholesky, static_argnums=(1, 2))
    for given, triangle in ((lower, False), (upper, True), (skewed, None)):
        factor, info = f(given.astype(dtype), plan, triangle)
        np.testing.assert_array_equal(info, [0, 23, 0])
        good = wide(np.tril(factor))[::2]
        assert matrices.cholesky_ratio(eps(dtype), wide(a)[::2], good).max() <= MAX_RATIO
        assert np.isnan(np.asarray(factor)[1, -1, -1])


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_variant_of_lu(plan, dtype):
    """Of a square matrix and a tall one."""
    rng = np.random.default_rng(0)
    f = jax.jit(lambda a: blocked.lu(a, plan, lu_panel_op, triangular_solve_op))
    for shape in ((3, 24, 24), (2, 24, 17)) if plan.batched else ((3, 24, 24),):
        a = matrices.normal(rng, dtype, shape).astype(dtype)
        assert checked_ratios(a, *map(np.asarray, f(a))).max() <= MAX_RATIO


def test_a_wide_matrix():
    a = matrices.normal(np.random.default_rng(0), "float64", (2, 17, 24))
    plan = Plan((8,), "bordered")
    f = jax.jit(lambda a: blocked.lu(a, plan, lu_panel_op, triangular_solve_op))
    assert checked_ratios(a, *map(np.asarray, f(a))).max() <= MAX_RATIO


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("plan", (Plan((16,)), Plan((24, 16))), ids=str)
@pytest.mark.parametrize("flags", list(itertools.product((True, False), repeat=4)), ids=str)
def test_every_substitution(flags, plan, dtype):
    """A factor that all right-hand sides share, and one for each."""
    left, lower, transpose, unit = flags
    rng = np.random.default_rng(0)
    options = {
        "left_side": left,
        "lower": lower,
        "transpose_a": transpose,
        "conjugate_a": transpose and np.dtype(dtype).kind == "c",
        "unit_diagonal": unit,
    }
    solve = jax.jit(
        lambda a, b: blocked.triangular_solve(a, b, plan, triangular_solve_op, **options)
    )
    for batch in (1, 2):
        a = matrices.triangular(rng, dtype, (batch, 40, 40)).astype(dtype)
        b = matrices.normal(rng, dtype, (2, 40, 5) if left else (2, 5, 40)).astype(dtype)
        op = np.tril(wide(a)) if lower else np.triu(wide(a))
        if unit:
            op = np.where(np.eye(40, dtype=bool), 1, op)
        op = matrices.adjoint(op) if transpose else op
        x = wide(solve(a, b))
        system = (op, b, x) if left else [np.swapaxes(y, -1, -2) for y in (op, b, x)]
        assert matrices.solve_ratio(eps(dtype), *system).max() <= MAX_RATIO


@pytest.mark.parametrize("dtype", ("float32", "float64"))
@pytest.mark.parametrize("m", (516, 1100, 2100, 4096))
def test_panels_of_many_rows(m, dtype):
    """Kernels of their own on CUDA: also of a matrix that has no pivot, and one with NaN."""
    a = matrices.normal(np.random.default_rng(m), dtype, (4, m, 20)).astype(dtype)
    a[1] = 0
    a[2, m // 2, 3] = np.nan
    f = jax.jit(lu_panel_op)
    assert calls(f, a) == (True, False)
    factors, pivots, rows, info = map(np.asarray, f(a))
    assert checked_ratios(a[::3], factors[::3], pivots[::3], rows[::3]).max() <= MAX_RATIO
    np.testing.assert_array_equal(info[[0, 1, 3]], [0, 1, 0])
    assert np.isnan(factors[2]).any()
    np.testing.assert_array_equal(rows[1], np.arange(m))


def definite(dtype, n, batch=2, seed=0):
    return matrices.spd(np.random.default_rng([seed, n]), dtype, (batch, n, n)).astype(dtype)


def general(dtype, n, batch=2, seed=0):
    return matrices.normal(np.random.default_rng([seed, n]), dtype, (batch, n, n)).astype(dtype)


@pytest.mark.parametrize("dtype", ("float32", "float64"))
@pytest.mark.parametrize("n", SIZES)
def test_definite_matrices(n, dtype):
    a = definite(dtype, n, BATCH)
    b = matrices.normal(np.random.default_rng(1), dtype, (BATCH, n, 3)).astype(dtype)
    factor, info = jb.cholesky(a, return_info=True)
    assert not info.any()
    assert not np.triu(factor, 1).any()
    assert matrices.cholesky_ratio(eps(dtype), wide(a), wide(factor)).max() <= MAX_RATIO
    for x in (jb.cho_solve((factor, True), b), jb.solve(a, b, assume_a="pos")):
        assert matrices.solve_ratio(eps(dtype), wide(a), b, wide(x)).max() <= MAX_RATIO


@pytest.mark.parametrize("dtype", ("float32", "float64"))
@pytest.mark.parametrize("n", SIZES)
def test_general_matrices(n, dtype):
    a = general(dtype, n, BATCH)
    b = matrices.normal(np.random.default_rng(1), dtype, (BATCH, n, 3)).astype(dtype)
    *results, info = jb.lu(a, return_info=True)
    assert not info.any()
    assert checked_ratios(a, *map(np.asarray, results)).max() <= MAX_RATIO
    x = jb.solve(a, b)
    assert matrices.solve_ratio(eps(dtype), wide(a), b, wide(x)).max() <= MAX_RATIO


@pytest.mark.parametrize("n", (1024, 1100))
@pytest.mark.parametrize("upper", (False, True))
def test_a_failure_in_the_last_block_concerns_one_matrix(n, upper):
    healthy = definite("float32", n, batch=4)
    a = healthy.copy()
    a[1] = failing_at(np.random.default_rng(0), "float32", n, [n - 1], -1.0)[0]
    f = jax.jit(lambda a: jb.cholesky(a, upper=upper, symmetrize_input=False, return_info=True))
    factor, info = map(np.asarray, f(a))
    np.testing.assert_array_equal(info, [0, n - 1, 0, 0])
    failed = factor[1].T if upper else factor[1]
    assert np.isnan(failed[np.tril_indices(n)]).all()
    assert not np.triu(failed, 1).any()
    others = [0, 2, 3]
    assert same_bits(factor[others], np.asarray(f(healthy)[0])[others])


@pytest.mark.parametrize("f", (jb.cholesky, lambda a: jb.lu(a)[0]), ids=("cholesky", "lu"))
def test_bits_of_a_kernel_do_not_depend_on_the_batch(f):
    """To 1,024 it is a kernel on the CPU, for two matrices as for three."""
    a = definite("float32", 1024, batch=3)
    three, two = jax.jit(f)(a), jax.jit(f)(a[1:])
    assert same_bits(np.asarray(three)[1:], np.asarray(two))


@pytest.mark.parametrize("n", (640, 1100))
def test_masks(n):
    """What is left out may hold anything."""
    a = definite("float32", n, batch=4)
    a[1] = np.nan
    where = np.array([True, False, True, True])
    factor, info = jb.cholesky(a, where=where, return_info=True)
    np.testing.assert_array_equal(info, [0, -1, 0, 0])
    assert not np.asarray(factor)[1].any()
    ratio = matrices.cholesky_ratio(eps("float32"), wide(a)[::2], wide(factor)[::2])
    assert ratio.max() <= MAX_RATIO
    factors, pivots, rows, info = jb.lu(a, where=where, return_info=True)
    np.testing.assert_array_equal(info, [0, -1, 0, 0])
    for x in (factors, pivots, rows):
        assert not np.asarray(x)[1].any()


@pytest.mark.parametrize(("assume_a", "n"), (("pos", 1536), ("gen", 640)))
def test_derivatives(assume_a, n):
    """Of a solve by differences: one factorization, and no array beyond the matrices' size."""
    a, b = definite("float64", n, BATCH), np.ones((BATCH, n, 1))
    da = definite("float64", n, BATCH, seed=1)

    @jax.jit
    def f(a):
        return jnp.sum(jnp.sin(jb.solve(a, b, assume_a=assume_a)))

    gradient = jax.jit(jax.grad(f))
    slope = np.sum(np.asarray(gradient(a)) * da)
    h = 1e-5
    np.testing.assert_allclose(slope, (f(a + h * da) - f(a - h * da)) / (2 * h), rtol=1e-5)
    text = gradient.lower(a).as_text()
    assert f"{n}x{n}x{n}" not in text
    once = jax.jit(lambda a: jb.solve(a, b, assume_a=assume_a)).lower(a).as_text()
    calls = ("jax_batched.cholesky.v1", "jax_batched.lu.v1", "potrf", "getrf")
    assert [text.count(call) for call in calls] == [once.count(call) for call in calls]
    assert any(call in once for call in calls)


def test_the_derivative_of_a_factor():
    n = 640
    a, da = definite("float64", n), definite("float64", n, seed=1)

    @jax.jit
    def f(a):
        return jnp.sum(jnp.cos(jb.cholesky(a)))

    slope = np.sum(np.asarray(jax.jit(jax.grad(f))(a)) * da)
    h = 1e-5
    np.testing.assert_allclose(slope, (f(a + h * da) - f(a - h * da)) / (2 * h), rtol=1e-5)


def calls(f, *operands, **options):
    """The kernels that a program calls, and those of JAX."""
    lowered = jax.jit(f).trace(*operands).lower(**options).as_text()
    ours = "jax_batched." in lowered
    return ours, any(name in lowered for name in ("potrf", "getrf", "trsm"))


@pytest.mark.parametrize("choice", blocked.CHOICES, ids=lambda x: "-".join(map(str, x[:4])))
def test_choices(choice):
    """They serve a batch that is large enough, on their platform."""
    f = {
        "cholesky": jb.cholesky,
        "lu": jb.lu,
        "triangular_solve": lambda a: jb.solve_triangular(a, a[..., :1]),
    }[choice.operation]
    n, dtype = choice.sizes[0], choice.dtypes[0]
    for batch in (choice.batch, choice.batch - 1):
        a = jax.ShapeDtypeStruct((batch, n, n), dtype)
        served = batch == choice.batch
        assert calls(f, a, lowering_platforms=(choice.platform,)) == (served, not served)


def test_one_matrix_and_a_batch_of_any_size_stay_jaxs():
    (batch,) = jax.export.symbolic_shape("batch")
    assert calls(jb.cholesky, jax.ShapeDtypeStruct((1, 1024, 1024), "float32")) == (False, True)
    a = jax.ShapeDtypeStruct((batch, 1024, 1024), "float32")
    exported = jax.export.export(jax.jit(jb.cholesky))(a)
    given = definite("float32", 1024)
    np.testing.assert_allclose(exported.call(given), jb.cholesky(given), rtol=1e-3, atol=1e-5)


def test_forced_on_one_matrix():
    a = definite("float64", 1025, batch=1)
    with force_kernel("beyond"):
        factor = jax.jit(jb.cholesky)(a)
    assert matrices.cholesky_ratio(eps("float64"), a, np.asarray(factor)).max() <= MAX_RATIO


def test_vmap():
    n = 1056
    a = definite("float32", n, batch=4)
    mapped = np.asarray(jax.jit(jax.vmap(jax.vmap(jb.cholesky)))(a.reshape(2, 2, n, n)))
    plain = np.asarray(jax.jit(jb.cholesky)(a))
    np.testing.assert_allclose(mapped.reshape(plain.shape), plain, atol=1e-5)
    if jax.default_backend() == "cpu":  # on a GPU the order of sums in products is XLA's choice
        assert same_bits(mapped.reshape(plain.shape), plain)


@pytest.mark.parametrize("way", ("jit", "shard_map", "explicit"))
@pytest.mark.parametrize("n", (640, 1056))
def test_a_spread_batch_stays_where_it_is(n, way):
    """What counts is the number of matrices of a device."""
    if len(jax.devices()) < 2:
        pytest.skip("one device")
    kind = jax.sharding.AxisType.Explicit if way == "explicit" else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("d")

    def solve(a):
        return jb.solve(a, a[..., :2], assume_a="pos")

    f = solve
    if way == "shard_map":
        f = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
    with jax.set_mesh(mesh):
        for batch in (2, 8):
            a = jax.device_put(
                definite("float32", n, batch), jax.sharding.NamedSharding(mesh, spec)
            )
            compiled = jax.jit(f).lower(a).compile()
            assert "all-gather" not in compiled.as_text()
            assert calls(f, a)[0] == (batch == 8)
            np.testing.assert_allclose(
                compiled(a), np.broadcast_to(np.eye(n, 2), (batch, n, 2)), atol=1e-4
            )


def test_refined_solves_use_it():
    a = definite("float64", 640 if jax.default_backend() == "cpu" else 1024, BATCH)
    b = a[..., :1]
    for assume_a in ("pos", "gen"):
        solve = functools.partial(jb.refined_solve, assume_a=assume_a)
        assert calls(solve, a, b) == (True, False)
