"""Eigenvalues and eigenvectors of every kind of Hermitian matrix, and their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
from families.cholesky import hermitian_mean
from families.eigen import MAX_N, separated
from test_qr import check_derivatives

import jax_batched as jb
from jax_batched._ffi import cuda_tiers, target_name
from jax_batched._matrices import adjoint, normal, wide

ON_CPU = jax.default_backend() == "cpu"
OF_CUDA = sorted({tier.kernel for tier in cuda_tiers() if tier.operation == "eigh"})
FAST = ("", *(("lanes",) if ON_CPU else OF_CUDA))
KERNELS = (*FAST, *(("reference",) if ON_CPU else ()), "lax")
SIZES = tuple(range(1, 67))
FEW = (1, 2, 3, 4, 5, 8, 9, 16, 17, 33)
MAX_RATIO = 10.0


def unitary(rng, dtype, shape):
    return np.linalg.qr(normal(rng, dtype, shape))[0]


def with_values(rng, dtype, values):
    q = unitary(rng, dtype, (values.shape[-1],) * 2)
    return (q * values) @ adjoint(q)


def every_class(dtype, n, seed=0):
    """A matrix of each class, by name, in the dtype."""
    rng = np.random.default_rng([seed, n])
    eps = float(np.finfo(dtype).eps)
    large = 1e200 if np.finfo(dtype).bits == 64 else 1e30
    g = normal(rng, dtype, (n, n))
    steps, signs = np.arange(n) / max(n - 1, 1), np.where(np.arange(n) % 2, 1.0, -2.0)
    indefinite = hermitian_mean(g)
    graded = 10.0 ** (-6 * steps)
    column = g[:, :1]
    off = np.arange(n - 1)
    toeplitz = 2 * np.eye(n)
    toeplitz[off, off + 1] = toeplitz[off + 1, off] = -1
    split = np.where(np.add.outer(np.arange(n) < n // 2, np.arange(n) < n // 2) == 1, 0, indefinite)
    matrices = {
        "indefinite": indefinite,
        "definite": g @ adjoint(g),
        "clusters": with_values(rng, dtype, signs + 4 * eps * rng.standard_normal(n)),
        "repeated": with_values(rng, dtype, np.array([1.0, 2.0, -1.0])[np.arange(n) % 3]),
        "graded": with_values(rng, dtype, 10.0 ** (-14 * steps)),
        "zero": np.zeros((n, n)),
        "identity": np.eye(n),
        "diagonal": np.diag(rng.standard_normal(n)),
        "blocks": split,
        "graded rows": graded[:, None] * indefinite * graded,
        "large": indefinite * large,
        "small": indefinite / large,
        "rank one": column @ adjoint(column),
        "hilbert": 1 / (1 + np.add.outer(np.arange(n), np.arange(n))),
        "toeplitz": toeplitz,
    }
    complex_too = {
        name: (m + 0j if np.dtype(dtype).kind == "c" else m) for name, m in matrices.items()
    }
    return {name: m.astype(dtype) for name, m in complex_too.items()}


def scaled(a):
    """The matrices with largest entry about 1, and by how much they were larger."""
    largest = np.abs(a).max((-2, -1), keepdims=True)
    scale = np.where(largest == 0, 1, 2.0 ** np.round(np.log2(np.where(largest == 0, 1, largest))))
    return a / scale, scale


def check(a, w, v=None):
    """Every matrix: residual, orthogonality, order, and the eigenvalues of LAPACK."""
    n = a.shape[-1]
    eps = float(np.finfo(a.dtype).eps)
    assert w.dtype == a.real.dtype
    assert (np.diff(w) >= 0).all()
    a, scale = scaled(wide(a))
    w = wide(w) / scale[..., 0]
    expected = np.linalg.eigvalsh(a)
    size = np.abs(expected).max(-1)
    assert (np.abs(w - expected).max(-1) <= MAX_RATIO / 2 * n * eps * size).all()
    if v is None:
        return
    v = wide(v)
    residual = np.linalg.norm(a @ v - v * w[..., None, :], axis=(-2, -1))
    assert (residual <= MAX_RATIO * n * eps * size).all()
    assert (np.linalg.norm(np.eye(n) - adjoint(v) @ v, axis=(-2, -1)) <= MAX_RATIO * n * eps).all()


def serves(kernel, dtype, n, operation="eigh"):
    """Whether a kernel can be forced for n x n matrices."""
    if kernel == "":
        return True
    if n > MAX_N and kernel != "lax":
        return False
    return (
        kernel in ("lax", "reference")
        or ON_CPU
        or any(
            (tier.operation, tier.kernel, tier.dtype) == (operation, kernel, dtype)
            and tier.min_n <= n <= tier.max_n
            for tier in cuda_tiers()
        )
    )


def first_served(kernel, dtype, sizes):
    """The first of some sizes for which a kernel can be forced."""
    for n in sizes:
        if serves(kernel, dtype, n):
            return n
    pytest.skip(f"no kernel of this name for {dtype}")


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_class_and_size(kernel, dtype):
    """One batch holds all classes, so that neighbours need different numbers of sweeps."""
    first_served(kernel, dtype, SIZES)
    sizes = [
        n for n in (FEW if kernel in ("reference", "lax") else SIZES) if serves(kernel, dtype, n)
    ]
    if kernel == "":
        sizes = sizes[::3]
    batches = [np.stack(list(every_class(dtype, n).values())) for n in sizes]
    if kernel == "lax" and not ON_CPU:
        batches = [np.delete(a, [10, 11], 0) for a in batches]

    def both(a):
        return jb.eigh(a, return_info=True), jb.eigvalsh(a, return_info=True)

    results = ops.on_each(both, [(a,) for a in batches], kernel)
    for a, ((w, v, info), (alone, info_alone)) in zip(batches, results, strict=True):
        assert v.dtype == a.dtype
        check(a, w, v)
        check(a, alone)
        np.testing.assert_array_equal([info, info_alone], 0)


def check_neighbours(f, a, kernel):
    """Each matrix alone, and the whole batch moved by some places, have the same bits."""
    calls = [(a,), (np.roll(a, 4, axis=0),), *((x[None],) for x in a)]
    whole, rolled, *single = ops.on_each(lambda a: f(a), calls, kernel)
    for i, x in enumerate(whole):
        for y in (np.roll(rolled[i], -4, axis=0), np.concatenate([s[i] for s in single])):
            assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", FAST)
def test_bits_do_not_depend_on_neighbours(kernel, dtype):
    """Signs of zeros included."""
    for n in (2, 3, 4, 7, 12, 33, *(() if ON_CPU else (20, 30, 45, 64))):
        if not serves(kernel, dtype, n):
            continue
        check_neighbours(jb.eigh, np.stack(list(every_class(dtype, n).values())), kernel)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_and_inf_concern_their_own_matrix_alone(kernel, dtype):
    for n in (1, 3, 6, 20, 50) if kernel != "lax" else (3,):
        if not serves(kernel, dtype, n):
            continue
        good = separated(np.random.default_rng(n), dtype, (19, n, n)).astype(dtype)
        a = good.copy()
        a[3, n - 1, 0], a[7, n // 2, n // 2] = np.nan, -np.inf
        bad = np.isin(np.arange(19), (3, 7))
        (w, v, info), (clean_w, clean_v, _) = ops.on_each(
            lambda a: jb.eigh(a, return_info=True), [(a,), (good,)], kernel
        )
        np.testing.assert_array_equal(info, np.where(bad, n, 0))
        for x, y in ((w, clean_w), (v, clean_v)):
            assert ops.same_bits(x[~bad], y[~bad])
            assert np.isnan(x[bad]).all()


@pytest.mark.parametrize("dtype", ("float32", "complex128"))
@pytest.mark.parametrize("kernel", KERNELS)
def test_triangles(kernel, dtype):
    """The one that is read stands for the matrix; UPLO is the same as lower."""
    n = first_served(kernel, dtype, (6, 3, 11, 50))
    a = normal(np.random.default_rng(0), dtype, (5, n, n)).astype(dtype)
    for lower in (True, False):
        half = np.tril(a) if lower else np.triu(a)
        strict = np.tril(a, -1) if lower else np.triu(a, 1)
        meant = hermitian_mean(half + adjoint(strict))
        unread = np.triu(np.ones((n, n), bool), 1)
        spoilt = np.where(unread if lower else unread.T, np.nan, a).astype(dtype)
        for options in ({"lower": lower}, {"UPLO": "L" if lower else "U", "lower": not lower}):
            w, v = ops.compiled(
                lambda a, options=options: jb.eigh(a, symmetrize_input=False, **options),
                spoilt,
                kernel=kernel,
            )
            check(meant.astype(dtype), np.asarray(w), np.asarray(v))
    w, v = ops.compiled(lambda a: jb.eigh(a), a, kernel=kernel)
    check(hermitian_mean(a).astype(dtype), np.asarray(w), np.asarray(v))


def invariant(w, v):
    return [w, jnp.abs(v) ** 2]


CALLS = {
    "eigh": lambda a: invariant(*jb.eigh(a)),
    "eigh-upper": lambda a: invariant(*jb.eigh(a, "U", symmetrize_input=False)),
    "eigvalsh": lambda a: [jb.eigvalsh(a, symmetrize_input=False)],
    "eigh_function": lambda a: [jb.eigh_function(a, jnp.exp)],
    "eigh_function-complex": lambda a: [jb.eigh_function(a, lambda w: jnp.exp(1j * w))],
}


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_derivatives(name, dtype):
    """Forward, reverse and nested, against differences of the function itself."""
    a = separated(np.random.default_rng(1), dtype, (2, 4, 4)).astype(dtype)
    check_derivatives(CALLS[name], jnp.asarray(a))


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
def test_derivatives_at_equal_eigenvalues(dtype):
    """Of what depends on them by their sum and their space alone."""
    rng = np.random.default_rng(2)
    values = np.array([-1.0, 2.0, 2.0, 2.0 + 1e-15, 3.0])
    a = jnp.asarray(with_values(rng, dtype, values).astype(dtype))
    da = jnp.asarray(hermitian_mean(normal(rng, dtype, (5, 5))).astype(dtype))

    def symmetric_function(a):
        w, v = jb.eigh(a)
        return [jnp.sum(jnp.exp(w)), v[:, 1:4] @ jnp.conj(v[:, 1:4].T)]

    def one_sided(f, step):
        return [
            (x - y) / (2 * step) for x, y in zip(f(a + step * da), f(a - step * da), strict=True)
        ]

    _, derivatives = jax.jvp(symmetric_function, (a,), (da,))
    for dx, expected in zip(derivatives, one_sided(symmetric_function, 1e-6), strict=True):
        np.testing.assert_allclose(dx, expected, atol=1e-7)
    everything = jax.grad(lambda a: sum(jnp.sum(jnp.abs(x) ** 2) for x in jb.eigh(a)))(a)
    assert np.isfinite(everything).all()
    jax_rule = jax.grad(lambda a: jb.eigh(a, cluster_tol=0).eigenvectors.real.sum())
    assert not np.isfinite(jax_rule(jnp.eye(3, dtype=dtype))).all()


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
def test_functions_at_equal_eigenvalues(dtype):
    """Divided differences: equal values, close ones and far ones are equally good."""
    rng = np.random.default_rng(3)
    for gap in (0, 1e-13, 1e-9, 1e-5, 1e-4, 1e-3, 1e-2):
        values = np.array([0.5, 0.5 + gap, 0.5, 2.0, 2.0 + gap])
        a = with_values(rng, dtype, values).astype(dtype)
        da = hermitian_mean(normal(rng, dtype, (5, 5))).astype(dtype)
        for f, inverse in ((jnp.sqrt, lambda x: x @ x), (jnp.log, jax.scipy.linalg.expm)):
            x, dx = jax.jvp(lambda a, f=f: jb.eigh_function(a, f), (a,), (da,))
            y, dy = jax.jvp(inverse, (x,), (dx,))
            np.testing.assert_allclose(y, a, atol=1e-13)
            np.testing.assert_allclose(dy, da, atol=1e-11 * np.abs(da).max())


def test_functions_with_parameters():
    a = separated(np.random.default_rng(4), "float64", (3, 4, 4))

    def power(p):
        return jb.eigh_function(a @ a, lambda w: w**p, lambda w: p * w ** (p - 1)).sum()

    difference = (power(0.5 + 1e-6) - power(0.5 - 1e-6)) / 2e-6
    np.testing.assert_allclose(jax.grad(power)(0.5), difference, rtol=1e-7)
    np.testing.assert_allclose(jax.jit(power)(1.0), (a @ a).sum(), rtol=1e-12)
    where = np.array([True, False, True])
    result = jb.eigh_function(a, jnp.cos, where=where)
    assert not result[1].any()
    np.testing.assert_allclose(result[::2], jb.eigh_function(a[::2], jnp.cos), atol=1e-14)


def test_jaxs_own_functions_inside_the_override():
    a = separated(np.random.default_rng(6), "float64", (3, 6, 6))
    spoilt = np.where(np.triu(np.ones((6, 6), bool), 1), np.nan, a)
    calls = (
        (lambda a: jnp.linalg.eigh(a), a),
        (lambda a: jnp.linalg.eigh(a, symmetrize_input=False), spoilt),
        (lambda a: (jnp.linalg.eigvalsh(a), jnp.linalg.eigh(a)[1]), a),
    )
    for f, given in calls:
        with jb.override_jax_linalg():
            lowered = jax.jit(f).lower(given)
            w, v = lowered.compile()(given)
        assert target_name("eigh") in lowered.as_text()
        check(a, np.asarray(w), np.asarray(v))
        assert target_name("eigh") not in jax.jit(lambda a, f=f: f(a)).lower(given).as_text()
    with jb.override_jax_linalg():
        large = jax.jit(lambda a: jnp.linalg.eigh(a)).lower(np.eye(MAX_N + 1))
    assert target_name("eigh") not in large.as_text()


def test_half_precision_is_computed_in_float32():
    a = hermitian_mean(np.random.default_rng(7).standard_normal((3, 5, 5))).astype(np.float16)
    w, v = jb.eigh(a)
    assert w.dtype == v.dtype == np.float16
    for x, y in zip((w, v), jb.eigh(a.astype(np.float32)), strict=True):
        np.testing.assert_array_equal(x, np.asarray(y).astype(np.float16))


def test_what_is_refused():
    with pytest.raises(ValueError, match="eigh: a must have shape"):
        jb.eigh(np.ones((2, 3)))
    with pytest.raises(ValueError, match="eigh: UPLO must be one of 'L', 'U'"):
        jb.eigh(np.eye(3), "lower")
    with pytest.raises(ValueError, match="eigvalsh: cluster_tol must be a number from 0 on"):
        jb.eigvalsh(np.eye(3), cluster_tol=-1.0)
    with pytest.raises(TypeError, match="eigh: a has dtype int"):
        jb.eigh(np.eye(3, dtype=int))
    for shape in ((0, 3, 3), (2, 0, 0), (0, 0)):
        w, v, info = jb.eigh(jnp.zeros(shape), return_info=True)
        assert (w.shape, v.shape, info.shape) == (shape[:-1], shape, shape[:-2])
        assert jb.eigvalsh(jnp.zeros(shape)).shape == shape[:-1]


def test_workspace_is_no_nan():
    """Outside jit jax.debug_nans looks at it, wherever memory held NaN before."""
    a = jnp.broadcast_to(jnp.eye(6), (64, 6, 6))
    for _ in range(5):
        freed = [jnp.full((64, 6), jnp.nan).block_until_ready() for _ in range(4)]
        del freed
        with jax.debug_nans(True):
            np.testing.assert_array_equal(jb.eigvalsh(a), np.ones((64, 6)))


def test_function_of_some():
    """Neither f nor df is asked for what is left out, in derivatives either."""
    a = jnp.stack([2 * jnp.eye(3), jnp.full((3, 3), jnp.nan)])
    where = jnp.array([True, False])
    gradient = jax.grad(lambda a: jb.eigh_function(a, jnp.log, where=where).sum())(a)
    np.testing.assert_allclose(gradient, jnp.stack([jnp.ones((3, 3)) / 2, jnp.zeros((3, 3))]))

    def scaled_log(q):
        return jb.eigh_function(a, lambda x: q * jnp.log(x), where=where).sum()

    np.testing.assert_allclose(jax.grad(scaled_log)(0.5), 3 * np.log(2.0))


def test_function_with_a_parameter_for_each_matrix():
    a = jnp.stack([jnp.diag(jnp.array([1.0, 2, 3])) + 0.1 * i for i in range(3)])
    p = jnp.array([[0.5], [1.5], [2.0]])
    da = jnp.asarray(np.random.default_rng(0).normal(size=a.shape))
    f = lambda a: jb.eigh_function(a, lambda w: w**p)  # noqa: E731
    _, moved = jax.jvp(f, (a,), (da,))
    np.testing.assert_allclose(
        moved, (f(a + 1e-6 * da) - f(a - 1e-6 * da)) / 2e-6, rtol=1e-6, atol=1e-8
    )


def test_function_of_16_bits():
    x = jb.eigh_function(jnp.eye(3, dtype="float16"), jnp.exp)
    assert x.dtype == "float16"


def test_function_inside_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    a = jnp.broadcast_to(jnp.eye(3), (2, 3, 3))
    f = lambda a: jax.grad(lambda a: jb.eigh_function(a, lambda w: w * 2.0 + w**2).sum())(a)  # noqa: E731
    inside = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))(a)
    np.testing.assert_allclose(inside, f(a))
