"""Singular value decompositions of any shape, what is made of them, and their derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest
import scipy.linalg
import test_eigh
from families.eigen import MAX_N, separated_singular
from test_eigh import MAX_RATIO, check_neighbours, scaled
from test_qr import check_derivatives

import jax_batched as jb
from jax_batched._ffi import cuda_tiers, target_name
from jax_batched._matrices import adjoint, normal, wide

ON_CPU = jax.default_backend() == "cpu"
OF_CUDA = sorted({tier.kernel for tier in cuda_tiers() if tier.operation == "svd"})
FAST = ("", *(("lanes",) if ON_CPU else OF_CUDA))
KERNELS = (*FAST, *(("reference",) if ON_CPU else ()), "lax")
SIZES = tuple(range(1, 67))
FEW = (1, 2, 3, 5, 8, 17, 33)
MAX_RATIO_OF_JAX = 30.0  # LAPACK's gate; 70 x 66 on a GPU reaches 21
SHAPES = [(1, 4), (4, 1), (3, 7), (7, 3), (40, 8), (8, 40), (70, 64), (64, 100), (600, 5), (70, 66)]


def every_class(dtype, n, seed=0):
    """A matrix of each class, by name, in the dtype."""
    rng = np.random.default_rng([seed, n])
    large = 1e200 if np.finfo(dtype).bits == 64 else 1e30
    g = normal(rng, dtype, (n, n))
    u, v = (np.linalg.qr(normal(rng, dtype, (n, n)))[0] for _ in range(2))
    steps = np.arange(n) / max(n - 1, 1)
    missing = g.copy()
    missing[:, n // 2] = missing[n // 3] = 0
    matrices = {
        "random": g,
        "graded": (u * 10.0 ** (-14 * steps)) @ v,
        "graded columns": g * 10.0 ** (-12 * steps),
        "graded rows": 10.0 ** (-12 * steps)[:, None] * g,
        "repeated": (u * np.array([2.0, 1.0])[np.arange(n) % 2]) @ v,
        "unitary": u,
        "rank two": g[:, :2] @ g[:2],
        "zero": np.zeros((n, n)),
        "zero row and column": missing,
        "diagonal": np.diag(rng.standard_normal(n)),
        "zeros on the diagonal": np.triu(g, 1),
        "shifted": np.eye(n, k=1),
        "large": g * large,
        "small": g / large,
        "triangular": np.triu(np.ones((n, n))),
    }
    return {name: m.astype(dtype) for name, m in matrices.items()}


def check(a, u, s, vh, kernel=""):
    """Every matrix: residual, orthogonality, order, and the singular values of LAPACK."""
    m, n = a.shape[-2:]
    k, eps = min(m, n), float(np.finfo(a.dtype).eps)
    most = MAX_RATIO_OF_JAX if k > MAX_N or kernel == "lax" else MAX_RATIO
    assert s.dtype == a.real.dtype
    assert (s >= 0).all()
    assert (np.diff(s) <= 0).all()
    a, scale = scaled(wide(a))
    s = wide(s) / scale[..., 0]
    expected = np.linalg.svd(a, compute_uv=False)
    limit = max(m, n) * eps
    assert (np.abs(s - expected).max(-1) <= most * limit * expected[..., 0]).all()
    u, vh = wide(u), wide(vh)
    residual = a - (u[..., :k] * s[..., None, :]) @ vh[..., :k, :]
    size = np.linalg.norm(residual, axis=(-2, -1))
    assert (size <= most * limit * expected[..., 0]).all()
    for q in (u, adjoint(vh)):
        difference = np.linalg.norm(np.eye(q.shape[-1]) - adjoint(q) @ q, axis=(-2, -1))
        assert (difference <= most * limit).all()


serves = functools.partial(test_eigh.serves, operation="svd")


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_class_and_size(kernel, dtype):
    """One batch holds all classes, so that neighbours need different numbers of sweeps."""
    few = FEW[:5] if kernel == "lax" else FEW
    sizes = [
        n for n in (few if kernel in ("reference", "lax") else SIZES) if serves(kernel, dtype, n)
    ]
    if kernel == "":
        sizes = sizes[::3]
    batches = [np.stack(list(every_class(dtype, n).values())) for n in sizes]
    if kernel == "lax":  # JAX's own overflows on some platforms
        batches = [np.delete(a, [12, 13], 0) for a in batches]

    def both(a):
        return jb.svd(a, return_info=True), jb.svd(a, compute_uv=False)

    results = ops.on_each(both, [(a,) for a in batches], kernel)
    for a, ((u, s, vh, info), alone) in zip(batches, results, strict=True):
        assert u.dtype == vh.dtype == a.dtype
        check(a, u, s, vh, kernel)
        check(a, u, alone, vh, kernel)
        np.testing.assert_array_equal(info, 0)


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_every_shape(dtype):
    cases = [
        normal(np.random.default_rng([m, n]), dtype, (5, m, n)).astype(dtype) for m, n in SHAPES
    ]
    results = ops.on_each(
        lambda a: (jb.svd(a), jb.svd(a, full_matrices=False), jb.svd(a, compute_uv=False)),
        [(a,) for a in cases],
    )
    for a, (full, thin, alone) in zip(cases, results, strict=True):
        m, n = a.shape[-2:]
        assert full.U.shape == (5, m, m)
        assert full.Vh.shape == (5, n, n)
        assert thin.U.shape == (5, m, min(m, n))
        assert thin.Vh.shape == (5, min(m, n), n)
        check(a, *full)
        check(a, *thin)
        check(a, thin.U, alone, thin.Vh)


def test_tall_and_wide_matrices_come_to_our_kernels():
    for shape in ((5, 70, 9), (5, 9, 70)):
        text = jax.jit(lambda a: jb.svd(a)).lower(jnp.zeros(shape)).as_text()
        assert target_name("svd") in text
        assert target_name("qr") in text


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", FAST)
def test_bits_do_not_depend_on_neighbours(kernel, dtype):
    """Signs of zeros included."""
    for n in (2, 3, 4, 7, 12, 33):
        if not serves(kernel, dtype, n):
            continue
        check_neighbours(jb.svd, np.stack(list(every_class(dtype, n).values())), kernel)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_and_inf_concern_their_own_matrix_alone(kernel, dtype):
    for m, n in (
        ((1, 1), (3, 3), (6, 6), (20, 20), (5, 3)) if kernel in ("", "lanes") else ((3, 3),)
    ):
        if not serves(kernel, dtype, n):
            continue
        good = normal(np.random.default_rng(n), dtype, (19, m, n)).astype(dtype)
        a = good.copy()
        a[3, m - 1, 0], a[7, m // 2, n // 2] = np.nan, -np.inf
        bad = np.isin(np.arange(19), (3, 7))
        result, clean = ops.on_each(
            lambda a: jb.svd(a, full_matrices=False, return_info=True), [(a,), (good,)], kernel
        )
        np.testing.assert_array_equal(result[-1], np.where(bad, n, 0))
        for x, y in zip(result[:3], clean[:3], strict=True):
            assert ops.same_bits(x[~bad], y[~bad])
            assert np.isnan(x[bad]).all()


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_pseudoinverses_ranks_and_least_squares(dtype):
    """As NumPy's, of matrices with and without full rank."""
    rng = np.random.default_rng(5)
    eps = float(np.finfo(dtype).eps)
    for m, n in ((4, 4), (7, 3), (3, 7), (70, 66)):
        a = normal(rng, dtype, (4, m, n))
        a[1] = a[1][:, :2] @ a[1][:2]
        a[2] = 0
        a, b = a.astype(dtype), normal(rng, dtype, (4, m, 2)).astype(dtype)
        x, rank, (solution, residuals, of_system, info) = ops.compiled(
            lambda a, b: (jb.pinv(a), jb.matrix_rank(a), jb.lstsq(a, b, method="svd")), a, b
        )
        expected = np.linalg.pinv(wide(a), rcond=max(m, n) * eps)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(x, expected, atol=1e4 * eps * scale**2)
        np.testing.assert_array_equal(rank, [min(m, n), 2, 0, min(m, n)])
        np.testing.assert_array_equal(of_system, rank)
        np.testing.assert_array_equal(info, 0)
        np.testing.assert_allclose(solution, expected @ b, atol=1e4 * eps * scale**2)
        squares = (np.abs(b - a @ (expected @ b)) ** 2).sum(-2)
        np.testing.assert_allclose(residuals, squares, atol=1e5 * eps * scale**2)


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_polar_decompositions(dtype):
    rng = np.random.default_rng(6)
    tolerance = 1000 * float(np.finfo(dtype).eps)
    for m, n in ((4, 4), (7, 3), (3, 7)):
        a = normal(rng, dtype, (3, m, n)).astype(dtype)
        for side in ("right", "left"):
            u, p = ops.compiled(lambda a, side=side: jb.polar(a, side), a)
            for i, x in enumerate(wide(a)):
                expected_u, expected_p = scipy.linalg.polar(x, side)
                np.testing.assert_allclose(u[i], expected_u, atol=tolerance)
                np.testing.assert_allclose(p[i], expected_p, atol=tolerance)
    if np.dtype(dtype).kind == "c":
        return
    a = normal(rng, dtype, (5, 3, 3)).astype(dtype)
    u, p = (np.asarray(x) for x in jb.polar(a, rotation=True))
    np.testing.assert_allclose(np.linalg.det(u), 1, atol=tolerance)
    np.testing.assert_allclose(u @ p, a, atol=tolerance)
    best = np.trace(adjoint(u) @ a, axis1=-2, axis2=-1)
    for _ in range(20):
        other = np.linalg.qr(rng.standard_normal((3, 3)))[0]
        other = other * np.sign(np.linalg.det(other))
        assert (np.trace(adjoint(other) @ a, axis1=-2, axis2=-1) <= best + tolerance).all()


def invariant(u, s, vh):
    """What does not depend on the phases of vectors, nor on a basis of what is left over."""
    k = s.shape[-1]
    thin_u, thin_vh = u[..., :k], vh[..., :k, :]
    others = [
        x @ jnp.conj(jnp.swapaxes(x, -1, -2))
        for x in (u[..., k:], jnp.swapaxes(vh[..., k:, :], -1, -2))
    ]
    return [
        s,
        jnp.abs(thin_u) ** 2,
        jnp.abs(thin_vh) ** 2,
        (thin_u * s[..., None, :] ** 2) @ thin_vh,
        *others,
    ]


CALLS = {
    "svd": lambda a: invariant(*jb.svd(a)),
    "svd-thin": lambda a: invariant(*jb.svd(a, full_matrices=False)),
    "values": lambda a: [jb.svd(a, compute_uv=False)],
    "pinv": lambda a: [jb.pinv(a)],
    "pinv-of-rank-two": lambda a: [jb.pinv(a[..., :, :2] @ a[..., :2, :])],
    "polar": lambda a: list(jb.polar(a)),
    "lstsq": lambda a: [jb.lstsq(a, a[..., :, :2] + 1, method="svd").x],
}


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
@pytest.mark.parametrize(("name", "shape"), [
    ("svd", (3, 3)), ("svd", (5, 3)), ("svd", (2, 4)), ("svd-thin", (5, 3)), ("svd-thin", (2, 4)),
    ("values", (4, 3)), ("pinv", (4, 3)), ("pinv", (3, 3)), ("pinv-of-rank-two", (4, 3)),
    ("polar", (3, 3)), ("polar", (4, 3)), ("polar", (2, 4)), ("lstsq", (3, 3)), ("lstsq", (4, 3)),
])  # fmt: skip
def test_derivatives(name, shape, dtype):
    """Forward, reverse and nested, against differences of the function itself."""
    a = normal(np.random.default_rng(1), dtype, (2, *shape)).astype(dtype)
    check_derivatives(CALLS[name], jnp.asarray(a))


def test_derivatives_of_rotations():
    a = normal(np.random.default_rng(3), "float64", (4, 3, 3))
    assert {*np.sign(np.linalg.det(a))} == {-1, 1}
    check_derivatives(lambda a: list(jb.polar(a, rotation=True)), jnp.asarray(a))


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
def test_derivatives_at_equal_and_zero_singular_values(dtype):
    """Finite, and exact for what does not depend on the basis of equal ones."""
    rng = np.random.default_rng(4)
    q = np.linalg.qr(normal(rng, dtype, (4, 4)))[0]
    da = jnp.asarray(normal(rng, dtype, (4, 4)).astype(dtype))

    def functions(a):
        return [jb.polar(a).unitary, jnp.sum(jb.svd(a, compute_uv=False) ** 3), jb.pinv(a)]

    a, step = jnp.asarray(q.astype(dtype)), 1e-6
    derivatives = jax.jvp(functions, (a,), (da,))[1]
    pairs = zip(functions(a + step * da), functions(a - step * da), strict=True)
    for dx, (x, y) in zip(derivatives, pairs, strict=True):
        np.testing.assert_allclose(dx, (x - y) / (2 * step), atol=1e-7)
    gradient = jax.jit(jax.grad(lambda x: sum(jnp.sum(jnp.abs(y + 1)) for y in jb.svd(x))))
    for matrix in (a, a * jnp.array([1, 1, 0, 0]), jnp.zeros_like(a)):
        assert np.isfinite(gradient(matrix)).all()
    rule = jax.grad(lambda x: jb.svd(x, cluster_tol=0).U.real.sum())
    assert not np.isfinite(rule(jnp.eye(3, dtype=dtype))).all()


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 70)])
def test_jaxs_own_functions_inside_the_override(shape):
    a = normal(np.random.default_rng(8), "float64", (3, *shape))

    def decompositions(a):
        thin = jnp.linalg.svd(a, full_matrices=False)
        return jnp.linalg.svd(a), thin, jnp.linalg.svd(a, compute_uv=False), jnp.linalg.pinv(a)

    with jb.override_jax_linalg():
        lowered = jax.jit(decompositions).lower(a)
        full, thin, alone, inverse = jax.tree.map(np.asarray, lowered.compile()(a))
    assert target_name("svd") in lowered.as_text()
    check(a, *full)
    check(a, *thin)
    np.testing.assert_allclose(alone, full[1], rtol=1e-13)
    np.testing.assert_allclose(inverse, np.linalg.pinv(a), atol=1e-12)
    with jb.override_jax_linalg():
        large = jax.jit(lambda a: jnp.linalg.svd(a)).lower(np.ones((MAX_N + 1, MAX_N + 2)))
    assert target_name("svd") not in large.as_text()


EXPORTED = {
    "svd": lambda a: jb.svd(a, full_matrices=False, return_info=True),
    "values": lambda a: jb.svd(a, compute_uv=False),
    "pinv": jb.pinv,
    "matrix_rank": jb.matrix_rank,
    "polar": jb.polar,
    "lstsq": lambda a: jb.lstsq(a, a[..., :2], method="svd"),
    "pinv'": jax.grad(lambda a: jb.pinv(a)[..., 0, 0].sum()),
    "svd'": jax.grad(lambda a: (jb.svd(a).U[..., 0, 0] ** 2).sum()),
    "polar'": jax.grad(lambda a: jb.polar(a).unitary[..., 0, 0].sum()),
}


@pytest.mark.parametrize("shape", ("b, 4, 3", "b - 1, 2, 3", "b - 1, m, n", "b, m, 3", "b, 3, n"))
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_for_any_batch_and_any_shape(name, shape):
    """Also with the tolerance that depends on the shape."""
    if not ON_CPU and ("m" in shape or "n" in shape):
        pytest.skip("for GPUs JAX's own SVD compares m with n")
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), "float64")
    program = jax.jit(EXPORTED[name])
    exported = jax.export.export(program, disabled_checks=jb.export_disabled_checks())(symbolic)
    known = [int(x) if x.strip().isdigit() else None for x in shape.split(",")]
    for batch, *others in ((0, 2, 3), (1, 4, 3), (5, 2, 3), (5, 3, 3), (5, 3, 4)):
        if known[1:] != [x and y for x, y in zip(known[1:], others, strict=True)]:
            continue
        if batch == 0 and shape.startswith("b,"):
            continue
        a = normal(np.random.default_rng(9), "float64", (batch, *others))
        if name in ("pinv", "matrix_rank", "lstsq"):
            a[2:3, 1:] = a[2:3, :1]
        results, expected = (jax.tree.leaves(f(a)) for f in (exported.call, program))
        for x, y in zip(results, expected, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(*(np.abs(z) for z in (x, y)), atol=1e-10)


def test_masks():
    """What is left out is zero. Others have the bits that they have without a mask, products all
    but the last ones."""
    a = separated_singular(np.random.default_rng(7), "float64", (9, 4, 4))
    where = np.arange(9) % 3 != 1
    a[~where] = np.nan
    for f in (jb.pinv, jb.matrix_rank, jb.polar, lambda a, **kw: jb.svd(a[..., :3], **kw)):
        for x, y in zip(jax.tree.leaves(f(a, where=where)), jax.tree.leaves(f(a)), strict=True):
            if f in (jb.pinv, jb.polar):
                atol = 1e-14 * np.abs(y[where]).max()
                np.testing.assert_allclose(x[where], y[where], rtol=0, atol=atol)
            else:
                assert ops.same_bits(x[where], y[where])
            assert not np.asarray(x[~where]).any()


def test_empty_shapes_and_what_is_refused():
    for shape in ((0, 3, 3), (2, 0, 0), (2, 0, 3), (2, 3, 0), (0, 0)):
        m, n = shape[-2:]
        u, s, vh = jb.svd(jnp.zeros(shape))
        assert (u.shape, s.shape) == ((*shape[:-1], m), (*shape[:-2], min(m, n)))
        np.testing.assert_array_equal(vh, np.broadcast_to(np.eye(n), vh.shape))
        assert jb.pinv(jnp.zeros(shape)).shape == (*shape[:-2], n, m)
        assert jb.matrix_rank(jnp.zeros(shape)).shape == shape[:-2]
        assert jb.polar(jnp.zeros(shape)).posdef.shape == (*shape[:-2], n, n)
    with pytest.raises(ValueError, match="svd: a must have shape"):
        jb.svd(np.ones(3))
    with pytest.raises(ValueError, match="svd: cluster_tol must be a number from 0 on"):
        jb.svd(np.eye(3), cluster_tol=None)
    with pytest.raises(ValueError, match="pinv: rtol must be a number from 0 on"):
        jb.pinv(np.eye(3), -1.0)
    with pytest.raises(ValueError, match="polar: side must be one of 'right', 'left'"):
        jb.polar(np.eye(3), "both")
    with pytest.raises(ValueError, match="polar: a must have shape"):
        jb.polar(np.ones((2, 3)), rotation=True)
    with pytest.raises(TypeError, match="polar: rotation=True takes real matrices"):
        jb.polar(np.eye(3, dtype=complex), rotation=True)


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_zeros_with_a_sign_beside_others(dtype):
    """A neighbour's sweeps turn -0 into 0, but not the sign of a vector."""
    signed = np.diag(np.array([1, -0.0, 1, 1], dtype))
    random = normal(np.random.default_rng(0), dtype, (3, 4, 4)).astype(dtype)
    alone = jb.svd(signed)
    beside = jb.svd(np.concatenate([signed[None], random]))
    for one, all_of_them in zip(alone, beside, strict=True):
        assert ops.same_bits(one, all_of_them[0])


@pytest.mark.parametrize("kernel", ops.KERNELS if jax.default_backend() == "cpu" else ("",))
def test_nan_in_one_part(kernel):
    a = np.eye(4, dtype="complex64")
    a[2, 1] = a[1, 2] = complex(0.5, np.nan)
    s, info = ops.compiled(
        lambda a: jb.svd(a, compute_uv=False, return_info=True), a, kernel=kernel
    )
    assert np.isnan(s).all() and info == 4
    w, info = ops.compiled(lambda a: jb.eigvalsh(a, return_info=True), a, kernel=kernel)
    assert np.isnan(w).all() and info == 4


@pytest.mark.parametrize("shape", ((5, 2), (2, 5)))
@pytest.mark.parametrize("full", (False, True))
def test_rectangles_on_an_explicit_mesh(shape, full):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec("d", None, None)
    a = normal(np.random.default_rng(0), "float64", (2, *shape))
    with jax.set_mesh(mesh):
        spread = jax.device_put(a, jax.sharding.NamedSharding(mesh, spec))
        u, s, vh = jax.jit(lambda a: jb.svd(a, full_matrices=full))(spread)
    for one, other in zip((u, s, vh), jb.svd(a, full_matrices=full), strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=1e-10, atol=1e-12)
