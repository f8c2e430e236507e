"""`sizes=`: batches whose matrices are the leading parts of what holds them."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import ops
import pytest
import test_lu
from jax.sharding import PartitionSpec
from test_qr import check_derivatives

import jax_batched as jb
from jax_batched._ffi import force_kernel
from jax_batched._matrices import MAX_RATIO, general, normal, spd, wide

ROWS = [op for op in (*ops.REDUCED, *ops.COMPOSITE) if op.takes_sizes]
ONE_EACH = [op for op in ops.ONE_EACH if op.takes_sizes]
N = 13
SIZES = np.array([0, 1, N, 5, 12, 3, 13, 8, 2, 7, 13], np.int32)
WRONG = np.array([-1, N + 1, np.iinfo(np.int32).max, np.iinfo(np.int32).min], np.int32)


def with_sizes(op):
    """The row's function of operands and sizes, with info if it has some."""
    options = {**op.options, **({"return_info": True} if op.has_info else {})}
    return lambda *xs: op.function(*xs[:-1], **options, sizes=xs[-1])


def operands_of(op, dtype, n=N, sizes=SIZES, seed=0):
    """Operands with NaN in the padding: of some matrices all of it, of others single entries."""
    a, *b = op.operands(dtype, batch=(len(sizes),), n=n, nrhs=2, seed=seed)
    for i, size in enumerate(np.clip(sizes, 0, n)):
        a[i, size:, :] = a[i, :, size:] = np.nan if i % 2 else 7
        for x in b:
            (x if op.left_side else np.swapaxes(x, -1, -2))[i, size:] = np.nan
    return (a, *b)


def leading(op, operands, i, size):
    """The operands of matrix i, without padding."""
    a, *b = (x[i] for x in operands)
    return (a[:size, :size], *(x[:size] if op.left_side else x[:, :size] for x in b))


def check_each(op, operands, result, sizes):
    """Each matrix by LAPACK's ratio, and zeros in its padding."""
    x, *info = jax.tree.leaves(result)
    x = np.asarray(x)
    for i, size in enumerate(sizes):
        if not op.takes_b:
            own = x[i, :size, :size]
        else:
            own = x[i, :size] if op.left_side else x[i, :, :size]
        assert np.count_nonzero(x[i]) == np.count_nonzero(own)
        if size:
            ratio = op.ratios([y[None] for y in leading(op, operands, i, size)], own[None])
            assert (ratio <= MAX_RATIO).all()
    for y in info:
        assert not np.asarray(y).any()


@pytest.mark.parametrize(("op", "dtype"), [(op, d) for op in ROWS for d in ops.DTYPES], ids=ops.ids)
def test_each_matrix_has_its_own_size(op, dtype):
    operands = operands_of(op, dtype)
    check_each(op, operands, jax.jit(with_sizes(op))(*operands, SIZES), SIZES)


@pytest.mark.parametrize(("op", "path"), ops.by_path(ONE_EACH), ids=ops.ids)
def test_sizes_out_of_range(op, path):
    """They fail alone; the others keep their bits."""
    sizes = np.where(np.arange(len(SIZES)) % 3 == 1, np.resize(WRONG, len(SIZES)), SIZES)
    wrong = (sizes < 0) | (sizes > N)
    operands = operands_of(op, "float64", sizes=sizes)
    f = with_sizes(op)
    x, *info = jax.tree.leaves(ops.compiled(f, *operands, sizes, kernel=path))
    y, *_ = jax.tree.leaves(ops.compiled(f, *operands, np.where(wrong, 0, sizes), kernel=path))
    x, y = np.asarray(x), np.asarray(y)
    assert ops.same_bits(x[~wrong], y[~wrong])
    failed = np.broadcast_to(op.kind.failed(x.shape[-2:]), x.shape)
    assert np.isnan(x[wrong][failed[wrong]]).all()
    assert not x[wrong][~failed[wrong]].any()
    for of_each in info:
        assert (np.asarray(of_each) == np.where(wrong, -len(operands) - 1, 0)).all()


@pytest.mark.parametrize("op", [*ONE_EACH, *ops.ONE_COMPOSITE], ids=ops.ids)
def test_derivatives(op):
    """Those of the leading parts; zero in the padding; NaN where a size is out of range."""
    sizes = np.where(np.arange(len(SIZES)) == 4, N + 1, SIZES)
    operands = tuple(np.where(np.isnan(x), 0, x) for x in operands_of(op, "float64"))
    weights = np.cos(np.arange(operands[-1][0].size)).reshape(operands[-1].shape[1:])

    def loss(f, *xs):
        x = jax.tree.leaves(f(*xs))[0]
        return jnp.sum(x * weights[: x.shape[-2], : x.shape[-1]])

    where = tuple(range(len(operands)))
    given = jax.jit(jax.grad(lambda *xs: loss(with_sizes(op), *xs, sizes), where))(*operands)
    for i, size in enumerate(SIZES):
        own = leading(op, given, i, size)
        if i == 4:
            assert np.isnan(own[0]).any()
            continue
        expected = jax.grad(lambda *xs: loss(op, *xs), where)(*leading(op, operands, i, size))
        for x, y, whole in zip(own, expected, given, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-10)
            assert np.count_nonzero(whole[i]) == np.count_nonzero(x)


def test_factors_determinants_and_pivots():
    a = general(np.random.default_rng(0), "float64", (len(SIZES), N, N))
    lu, pivots, permutation, info = jb.lu(a, sizes=SIZES, return_info=True)
    det, (sign, log) = jb.det(a, sizes=SIZES), jb.slogdet(a, sizes=SIZES)
    assert not np.asarray(info).any()
    for i, size in enumerate(SIZES):
        own = a[i, :size, :size]
        if size:
            expected = jb.lu(own)
            np.testing.assert_allclose(lu[i, :size, :size], expected[0], atol=1e-13)
            assert (pivots[i, :size] == expected[1]).all()
            assert (permutation[i, :size] == expected[2]).all()
        assert (pivots[i, size:] == np.arange(size, N)).all()
        assert (permutation[i, size:] == np.arange(size, N)).all()
        assert np.count_nonzero(lu[i]) == np.count_nonzero(lu[i, :size, :size])
        np.testing.assert_allclose(det[i], np.linalg.det(own), rtol=1e-12)
        np.testing.assert_allclose(sign[i] * np.exp(log[i]), np.linalg.det(own), rtol=1e-12)
    *_, info = jb.lu(a, sizes=WRONG[0], return_info=True)
    assert (info == -2).all()
    assert np.isnan(jb.det(a, sizes=WRONG[1])).all()
    assert all(np.isnan(x).all() for x in jb.slogdet(a, sizes=WRONG[2]))


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("scale", (1, 0, "largest"))
def test_eigenvalues(dtype, scale):
    """Of matrices whose largest eigenvalues are negative: what continues them comes last."""
    sizes = np.append(SIZES, N + 1)
    a = normal(np.random.default_rng(0), dtype, (len(sizes), N, N)).astype(dtype)
    a = a + a.conj().mT - 8 * np.eye(N, dtype=dtype)
    a *= np.finfo(dtype).max / (4 * N**2) if scale == "largest" else scale
    lead = np.arange(N) < sizes[:, None]
    poisoned = np.where(np.tril(lead[:, :, None] & lead[:, None, :]), a, np.nan)
    f = jax.jit(lambda a, s: jb.eigh(a, symmetrize_input=False, sizes=s, return_info=True))
    w, v, info = map(np.asarray, f(poisoned, sizes))
    assert (info[:-1] == 0).all() and info[-1] == -2
    assert np.isnan(w[-1]).all() and np.isnan(v[-1]).all()
    alone = jb.eigvalsh(poisoned, symmetrize_input=False, sizes=sizes)
    eps = np.finfo(dtype).eps
    for i, size in enumerate(SIZES):
        own, expected = v[i, :size, :size], np.linalg.eigvalsh(wide(a[i, :size, :size]))
        atol = 10 * N * eps * np.max(np.abs(expected), initial=0)
        np.testing.assert_allclose(w[i, :size], expected, atol=atol)
        np.testing.assert_allclose(alone[i, :size], expected, atol=atol)
        np.testing.assert_allclose(own.conj().T @ own, np.eye(size), atol=10 * N * eps)
        product = wide(a[i, :size, :size]) @ own - own * wide(w[i, :size])
        assert np.max(np.abs(product), initial=0) <= atol
        for x, y in ((w[i], w[i, :size]), (alone[i], alone[i, :size]), (v[i], own)):
            assert np.count_nonzero(x) == np.count_nonzero(y)


@pytest.mark.parametrize("path", ("", "composed"))
@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_eigenvalues_at_the_ends_of_the_range(dtype, path):
    """Of subnormal matrices the digits are kept; one with an eigenvalue out of range is as without
    sizes, or NaN where that eigenvalue may be lost."""
    limits = np.finfo(dtype)
    a = np.array([[2, 1], [1, 2]], dtype) * 1000 * limits.smallest_subnormal
    with force_kernel(path):
        w = jb.eigvalsh(a, symmetrize_input=False, sizes=2)
        np.testing.assert_array_equal(np.asarray(w) / limits.smallest_subnormal, [1000, 3000])
        large = np.zeros((4, 4), dtype)
        large[:2, :2] = 0.6 * limits.max
        w, v, info = jb.eigh(np.stack([large, np.eye(4, dtype=dtype)]), sizes=2, return_info=True)
    assert w[1].tolist() == [1, 1, 0, 0] and info[1] == 0
    if info[0]:
        assert info[0] == 2 and np.isnan(w[0, :2]).all() and np.isnan(v[0, :2, :2]).all()
    else:
        expected = jb.eigh(large[:2, :2])
        np.testing.assert_array_equal(w[0, :2], expected[0])
        np.testing.assert_array_equal(v[0, :2, :2], expected[1])


def test_derivatives_of_eigenvectors_by_jaxs_rule():
    """What continues a matrix has no equal eigenvalues."""
    a = np.diag([1.0, 2, 3]) + 0.1

    def loss(a, **sizes):
        w, v = jb.eigh(a, cluster_tol=0, **sizes)
        return jnp.sum(v[:3, :3] ** 2 * np.arange(9).reshape(3, 3)) + w[0] ** 2

    given = jax.grad(loss)(np.pad(a, (0, 3)), sizes=3)
    np.testing.assert_allclose(given, np.pad(jax.grad(loss)(a), (0, 3)), atol=1e-13)


def test_functions_of_matrices():
    """Also one that is not finite beyond the eigenvalues, and its derivative."""
    sizes = np.array([1, 0, 5, N], np.int32)
    a = spd(np.random.default_rng(0), "float64", (len(sizes), N, N))
    a[2] *= -1

    def f(w):
        return 1 / w

    def loss(a, **options):
        x = jb.eigh_function(a, f, **options)
        return jnp.sum(x * jnp.cos(jnp.arange(x.shape[-1]))), x

    both = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, x), gradient = both(a, sizes=sizes)
    for i, size in enumerate(sizes):
        (_, expected), slope = both(a[i, :size, :size])
        np.testing.assert_allclose(x[i, :size, :size], expected, atol=1e-13)
        np.testing.assert_allclose(gradient[i, :size, :size], slope, atol=1e-12)
        for y in (x[i], gradient[i]):
            assert np.count_nonzero(y) == np.count_nonzero(y[:size, :size])


def test_a_failing_matrix_says_where():
    a = np.broadcast_to(np.eye(N), (3, N, N)).copy()
    a[:, 4, 4] = 0
    sizes = np.array([4, 5, 13])
    for f in (jb.cholesky, jb.inv):
        x, info = f(a, sizes=sizes, return_info=True)
        assert (info == np.array([0, 5, 5])).all()
        assert np.isnan(x[1:, :5, :5]).any((-2, -1)).all()
        assert not np.isnan(x[0]).any()
        assert not np.asarray(x[1, 5:]).any()
    for assume_a in ("gen", "pos"):
        x, info = jb.solve(a, a, sizes=sizes, assume_a=assume_a, return_info=True)
        assert (info == np.array([0, 5, 5])).all()


def test_16_bit_elements():
    op = ops.of("cholesky")[0]
    operands = operands_of(op, jnp.bfloat16)
    check_each(op, operands, with_sizes(op)(*operands, SIZES), SIZES)


def test_mapped_and_broadcast():
    """Over sizes, over matrices, over both; shared operands; a vector."""
    rng = np.random.default_rng(0)
    a, b = general(rng, "float64", (3, N, N)), rng.normal(size=(N,))
    sizes = np.array([3, 13, 7])
    expected = np.stack([jb.solve(a, b, sizes=s) for s in sizes])
    assert expected.shape == (3, 3, N)
    over_sizes = jax.vmap(lambda s: jb.solve(a, b, sizes=s))(sizes)
    assert ops.same_bits(over_sizes, expected)
    over_both = jax.vmap(lambda x, s: jb.solve(x, b, sizes=s))(a, sizes)
    assert ops.same_bits(over_both, expected[np.arange(3), np.arange(3)])
    assert ops.same_bits(jb.solve(a, b, sizes=sizes), over_both)
    over_a = jax.vmap(lambda x: jb.solve(x, b, sizes=sizes[1]))(a)
    assert ops.same_bits(over_a, expected[1])
    rhs = rng.normal(size=(3, N, 2))
    shared = jb.triangular_solve(a[0], rhs, left_side=True, lower=True, sizes=sizes)
    for i, size in enumerate(sizes):
        own = jb.triangular_solve(a[0, :size, :size], rhs[i, :size], left_side=True, lower=True)
        np.testing.assert_allclose(shared[i, :size], own, rtol=1e-12)


@pytest.mark.parametrize("op", ONE_EACH, ids=ops.ids)
def test_strict_promotion(op):
    operands = operands_of(op, "float32")
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        result = with_sizes(op)(*operands, SIZES)
        shared = with_sizes(op)(operands[0][:1], *operands[1:], SIZES[:1])
    check_each(op, operands, result, SIZES)
    own = (operands[0][:1], *(x[:1] for x in operands[1:]))
    expected = with_sizes(op)(*own, SIZES[:1])
    for x, y in zip(jax.tree.leaves(shared), jax.tree.leaves(expected), strict=True):
        assert ops.same_bits(x[:1], y)


def test_with_a_mask():
    a = general(np.random.default_rng(0), "float64", (4, N, N))
    sizes, where = np.array([3, -1, 5, 99]), np.array([True, True, False, False])
    x, info = jb.inv(a, sizes=sizes, where=where, return_info=True)
    assert (info == np.array([0, -2, -1, -1])).all()
    assert not np.asarray(x[2:]).any()
    for f in (jb.inv, jb.det, lambda a, **options: jb.cholesky(a @ a.mT, **options)):
        gradient = jax.grad(lambda a, f=f: jnp.sum(f(a, sizes=sizes, where=where)))(jnp.array(a))
        assert np.isfinite(gradient[0]).all()
        assert not np.asarray(gradient[2:]).any()


@pytest.mark.parametrize("bad", (np.nan, np.inf))
@pytest.mark.parametrize("kernel", test_lu.KERNELS)
def test_lu_of_what_is_not_finite(kernel, bad):
    """NaN loses every comparison of pivots, but no row of the padding takes its place."""
    n = 40
    if not test_lu.serves(kernel, "float64", n, n):
        pytest.skip(f"{kernel} does not serve LU of {n} x {n}")
    a = general(np.random.default_rng(0), "float64", (4, n, n))
    a[1:, 3, 0] = a[1:, 5, 0] = bad
    sizes = np.array([20, 20, 7, 40])
    f = lambda a: jb.lu(a, sizes=sizes, return_info=True)  # noqa: E731
    lu, pivots, permutation, info = map(np.asarray, ops.compiled(f, a, kernel=kernel))
    for i, size in enumerate(sizes):
        assert np.isfinite(lu[i, :size, :size]).all() == (i == 0)
        assert not lu[i, size:].any() and not lu[i, :, size:].any()
        assert (pivots[i, :size] < size).all() and (permutation[i, :size] < size).all()
        assert (info[i] > 0) == (i > 0)


def test_nothing_is_nan_on_the_way():
    """Outside jit every step would be seen."""
    a = general(np.random.default_rng(0), "float64", (4, N, N))
    with jax.debug_nans(True):
        for f in (jb.inv, jb.det, jb.lu):
            f(a, sizes=[1, 2, 3, 13])


def test_empty():
    empty = np.zeros((2, 0, 0))
    np.testing.assert_array_equal(jb.det(empty, sizes=[0, 1]), [1, np.nan])
    np.testing.assert_array_equal(jb.slogdet(empty, sizes=[0, -1]).logabsdet, [0, np.nan])
    assert jb.inv(np.zeros((0, 3, 3)), sizes=[]).shape == (0, 3, 3)


def test_on_a_mesh():
    """Nothing is gathered; the sizes may be spread as the matrices are, or not."""
    devices = jax.devices()
    a = general(np.random.default_rng(0), "float64", (16, N, N))
    sizes = np.arange(16, dtype=np.int32) % (N + 1)
    functions = jb.inv, jb.det, lambda a, **sizes: jb.lu(a, **sizes)[0]
    programs = [lambda a, s, f=f: f(a, sizes=s) for f in functions]
    gradients = [jax.grad(lambda *x, f=f: jnp.sum(f(*x) ** 2)) for f in programs]
    expected = [
        (jax.jit(f)(a, sizes), jax.jit(g)(a, sizes))
        for f, g in zip(programs, gradients, strict=True)
    ]
    for axis_type in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((len(devices),), ("i",), axis_types=(axis_type,))
        spread = jax.sharding.NamedSharding(mesh, PartitionSpec("i"))
        with jax.set_mesh(mesh):
            for f, g, (value, gradient) in zip(programs, gradients, expected, strict=True):
                for given in (sizes, jax.device_put(sizes, spread)):
                    operands = jax.device_put(a, spread), given
                    program = jax.jit(f).lower(*operands).compile()
                    assert "all-gather" not in program.as_text()
                    np.testing.assert_allclose(program(*operands), value, rtol=1e-9)
                    np.testing.assert_allclose(
                        jax.jit(g)(*operands), gradient, rtol=1e-7, atol=1e-9
                    )
            # One matrix for all of them.
            b, given = jax.device_put(a, spread), jax.device_put(sizes, spread)
            x = jax.jit(lambda a, b, s: jb.solve(a, b, sizes=s))(a[0], b, given)
            np.testing.assert_allclose(x, jb.solve(a[0], a, sizes=sizes), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("op", ONE_EACH, ids=ops.ids)
def test_exported_for_any_batch(op):
    operands = (*operands_of(op, "float32"), SIZES)
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in operands]
    exported = jax.export.export(
        jax.jit(with_sizes(op)), disabled_checks=jb.export_disabled_checks()
    )(*shapes)
    result = exported.call(*operands)
    check_each(op, operands[:-1], result, SIZES)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    (
        (np.ones(4), TypeError, "sizes has dtype float64; accepted are integers"),
        ([True] * 4, TypeError, "sizes has dtype bool; accepted are integers"),
        ("three", TypeError, "sizes has dtype"),
        (np.ones((4, 1), int), ValueError, "sizes of shape .* does not broadcast to the batch"),
        ([1, 2], ValueError, "sizes of shape .* does not broadcast to the batch"),
    ),
)
@pytest.mark.parametrize("op", ONE_EACH, ids=ops.ids)
def test_errors(op, sizes, error, message):
    operands = op.operands("float32", batch=(4,), n=3)
    with pytest.raises(error, match=message):
        with_sizes(op)(*operands, sizes)


def test_sizes_are_of_square_matrices():
    for f in (jb.lu, jb.lu_factor):
        with pytest.raises(ValueError, match=f"{f.__name__}: a, with sizes, must have shape"):
            f(np.ones((2, 3, 4)), sizes=[1, 2])


@pytest.mark.parametrize("sizes", (np.array([1, 2]), np.ones((2, 2), int), (1, 2, 3), 3))
def test_sizes_are_of_rows_and_columns(sizes):
    for f in (jb.qr, lambda a, sizes: jb.lstsq(a, np.ones(3), sizes=sizes)):
        with pytest.raises(TypeError, match=r"(qr|lstsq): sizes must be a tuple \(m, n\)"):
            f(np.ones((2, 3, 4)), sizes=sizes)


# Of rows and columns: none, one, all, wide, tall, square.
M = np.array([0, 4, 1, 6, 3, 2, 6, 4, 2])
N_OF = np.array([3, 0, 1, 5, 2, 4, 1, 4, 2])


def shaped(dtype, m, n, seed=0):
    """Matrices of which leading parts count, poisoned, and these sizes."""
    a = normal(np.random.default_rng(seed), dtype, (len(M), m, n)).astype(dtype)
    sizes = np.minimum(M, m), np.minimum(N_OF, n)
    for x, rows, columns in zip(a, *sizes, strict=True):
        x[rows:] = x[:, columns:] = np.nan
    return a, sizes


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("shape", ((6, 5), (4, 6), (520, 5)))
def test_factors_of_any_shape(shape, dtype):
    """LAPACK's of the part alone, with the same signs, and zeros beyond them."""
    a, sizes = shaped(dtype, *shape)
    modes = ("reduced", "complete", "r", "raw") if shape[0] < 100 else ("reduced", "r")
    factor = jax.jit(lambda a, sizes: [jb.qr(a, mode, sizes=sizes) for mode in modes])
    tolerance = 100 * float(jnp.finfo(dtype).eps)
    for mode, results in zip(modes, factor(a, sizes), strict=True):
        for i, (m, n) in enumerate(zip(*sizes, strict=True)):
            expected = np.linalg.qr(a[i, :m, :n], mode)
            for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
                own = x[(i, *map(slice, y.shape))]
                np.testing.assert_allclose(own, y, rtol=0, atol=tolerance)
                assert np.count_nonzero(x[i]) == np.count_nonzero(own)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("shape", ((6, 5), (4, 6), (520, 5)))
def test_least_squares_of_any_shape(shape, dtype):
    a, sizes = shaped(dtype, *shape)
    b = normal(np.random.default_rng(1), dtype, (len(M), shape[0], 2)).astype(dtype)
    for x, rows in zip(b, sizes[0], strict=True):
        x[rows:] = np.nan
    results = jax.jit(lambda a, b, sizes: jb.lstsq(a, b, sizes=sizes))(a, b, sizes)
    tolerance = 3e4 * float(jnp.finfo(dtype).eps)
    for i, (m, n) in enumerate(zip(*sizes, strict=True)):
        own, rhs = a[i, :m, :n], b[i, :m]
        best = np.linalg.pinv(own) @ rhs
        np.testing.assert_allclose(results.x[i, :n], best, rtol=tolerance, atol=tolerance)
        assert not np.asarray(results.x[i, n:]).any()
        squares = (np.abs(rhs - own @ best) ** 2).sum(0)
        np.testing.assert_allclose(results.residuals[i], squares, rtol=tolerance, atol=tolerance)
        assert results.rank[i] == min(m, n)
    assert not np.asarray(results.info).any()


@pytest.mark.parametrize("dtype", ("float64", "complex128"))
@pytest.mark.parametrize("shape", ((5, 4), (4, 5)))
def test_derivatives_of_any_shape(shape, dtype):
    """Up to the second; a complete Q whose part is not tall has no columns that are free."""
    (a, sizes), keep = shaped(dtype, *shape), [3, 4, 5, 7]
    a, sizes = np.nan_to_num(a[keep]), [x[keep] for x in sizes]
    b = normal(np.random.default_rng(1), dtype, (len(keep), shape[0], 2)).astype(dtype)
    check_derivatives(jax.jit(lambda a: list(jb.qr(a, "complete", sizes=sizes))), a)
    check_derivatives(jax.jit(lambda a, b: list(jb.lstsq(a, b, sizes=sizes)[:2])), a, b)


def test_shapes_out_of_range():
    """One number is enough; such a matrix fails alone, in derivatives as well."""
    a, (m, n) = shaped("float64", 6, 5)
    a, b = np.nan_to_num(a), np.ones((len(M), 6, 1))
    m, n = m.copy(), n.copy()
    m[4], n[5] = -1, 6
    wrong = np.isin(np.arange(len(M)), (4, 5))
    q, r = jb.qr(a, sizes=(m, n))
    np.testing.assert_array_equal(np.isnan(q).all((-2, -1)), wrong)
    np.testing.assert_array_equal(np.isnan(np.asarray(r)[:, *np.triu_indices(5)]).all(-1), wrong)
    result = jb.lstsq(a, b, sizes=(m, n))
    np.testing.assert_array_equal(result.info, np.where(wrong, -3, 0))
    np.testing.assert_array_equal(np.isnan(result.x).all((-2, -1)), wrong)
    for f in (lambda a: jb.lstsq(a, b, sizes=(m, n)).x, lambda a: jb.qr(a, "r", sizes=(m, n))):
        gradient = jax.jit(jax.grad(lambda a, f=f: jnp.sum(f(a))))(a)
        np.testing.assert_array_equal(np.isnan(gradient).any((-2, -1)), wrong)
    masked = jb.lstsq(a, b, sizes=(m, n), where=~wrong)
    np.testing.assert_array_equal(masked.info, np.where(wrong, -1, 0))
    assert np.isfinite(masked.x).all()


def test_factors_for_solves():
    """`cho_factor` for `cho_solve`, `lu_factor` for `lu_solve`; nothing beyond a size counts."""
    rng = np.random.default_rng(0)
    b = rng.normal(size=(len(SIZES), N, 2))
    a, definite = (f(rng, "float64", (len(SIZES), N, N)) for f in (general, spd))
    c, lower = jb.cho_factor(definite, sizes=SIZES)
    factors, pivots = jb.lu_factor(a, sizes=SIZES)
    assert (pivots == jb.lu(a, sizes=SIZES)[1]).all()
    beyond = np.arange(N) >= SIZES[:, None]
    poisoned, spoilt = factors.at[beyond].set(np.nan), jnp.where(beyond, -7, pivots)
    for trans in (0, 1):
        x = jb.lu_solve((poisoned, spoilt), b, trans, sizes=SIZES)
        y = jb.solve(np.swapaxes(a, -1, -2) if trans else a, b, sizes=SIZES)
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
    x = jb.cho_solve((c, lower), b, sizes=SIZES)
    np.testing.assert_allclose(x, jb.solve(definite, b, sizes=SIZES), rtol=1e-9, atol=1e-12)
    assert not np.asarray(c)[beyond].any() and not np.asarray(factors)[beyond].any()
    assert np.isnan(jb.cho_factor(definite, sizes=N + 1)[0][:, 0, 0]).all()
    assert np.isnan(jb.lu_factor(a, sizes=-1)[0]).all()
    assert np.isnan(jb.lu_solve((factors, pivots), b, sizes=-1)).all()


@pytest.mark.parametrize("assume_a", ("pos", "gen"))
def test_refinement_measures_the_matrix_itself(assume_a):
    """Whatever its size in numbers: the errors are those of the leading part alone."""
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.integers(-30, 30, (len(SIZES), 1, 1))
    a = (spd if assume_a == "pos" else general)(rng, "float64", (len(SIZES), N, N)) * scale
    b = rng.normal(size=(len(SIZES), N, 1))
    sizes = np.where(np.arange(len(SIZES)) == 3, -1, SIZES)
    x, info = jb.refined_solve(a, b, assume_a=assume_a, sizes=sizes)
    wrong = sizes < 0
    np.testing.assert_array_equal(info.info, np.where(wrong, -3, 0))
    np.testing.assert_array_equal(info.converged, ~wrong)
    assert np.isnan(x[wrong]).all()
    for i, size in enumerate(sizes):
        own, rhs, y = a[i, :size, :size], b[i, :size], x[i, :size]
        if size > 0:
            size_of_terms = np.abs(own).sum(1).max() * np.abs(y).max() + np.abs(rhs).max()
            error = np.abs(rhs - own @ y).max() / size_of_terms
            assert abs(info.backward_error[i] - error) <= 3e-16
            assert not np.asarray(x[i, size:]).any()


def test_wide_integers_do_not_wrap_around():
    a = np.broadcast_to(np.eye(3), (3, 3, 3))
    listed = jax.jit(lambda x, y: jb.det(2 * a, sizes=[x, y, 3]))(1, 2)
    np.testing.assert_array_equal(listed, [2, 4, 8])
    _, info = jb.inv(a, sizes=np.array([2**32 + 1, -(2**40), 3]), return_info=True)
    assert (info == np.array([-2, -2, 0])).all()
    _, info = jb.inv(a, sizes=np.array([2**32 - 1, 2, 1], np.uint32), return_info=True)
    assert (info == np.array([-2, 0, 0])).all()


SQUARE = {
    "cholesky": lambda a, b, **options: jb.cholesky(a, return_info=True, **options),
    "triangular_solve": lambda a, b, **options: jb.triangular_solve(
        a, b, left_side=True, lower=True, **options
    ),
    "right": lambda a, b, **options: jb.triangular_solve(
        a, b.mT, left_side=False, transpose_a=True, **options
    ),
    "cho_solve": lambda a, b, **options: jb.cho_solve((a, True), b, **options),
    "solve_pos": lambda a, b, **options: jb.solve(
        a, b, assume_a="pos", return_info=True, **options
    ),
    "solve_gen": lambda a, b, **options: jb.solve(a, b, return_info=True, **options),
    "lu": lambda a, b, **options: jb.lu(a, return_info=True, **options),
    "inv": lambda a, b, **options: jb.inv(a, return_info=True, **options),
    "det": lambda a, b, **options: jb.det(a, **options),
    "slogdet": lambda a, b, **options: jb.slogdet(a, **options),
    "eigh": lambda a, b, **options: jb.eigh(a, return_info=True, **options),
    "eigvalsh": lambda a, b, **options: jb.eigvalsh(a, return_info=True, **options),
}

WITH_B = ("triangular_solve", "right", "cho_solve", "solve_pos", "solve_gen")


@pytest.mark.skipif(not test_lu.ON_CPU, reason="kernels of the CPU")
@pytest.mark.parametrize("dtype", ("float32", "complex128"))
@pytest.mark.parametrize("n", (1, 2, 7, 19, 64))
@pytest.mark.parametrize(
    ("operation", "nrhs"), [(x, k) for x in SQUARE for k in ((1, 3) if x in WITH_B else (1,))]
)
def test_bits_are_those_of_calls_without_sizes(operation, n, nrhs, dtype):
    """Of every size, in any order, beside masked and wrong ones."""
    rng = np.random.default_rng(n)
    count = 3 * n + 70
    sizes = rng.integers(0, n + 1, count).astype(np.int32)
    sizes[::17] = np.resize(WRONG[:1], len(sizes[::17]))
    where = rng.random(count) < 0.8
    a, b = spd(rng, dtype, (count, n, n)), normal(rng, dtype, (count, n, nrhs))
    f = SQUARE[operation]
    results = [np.asarray(x) for x in jax.tree.leaves(jax.jit(f)(a, b, sizes=sizes, where=where))]
    wrong = where & (sizes < 0)
    for size in np.unique(sizes[where & (sizes > 0)]):
        chosen = where & (sizes == size)
        own = jax.tree.leaves(jax.jit(f)(a[chosen, :size, :size], b[chosen, :size]))
        for x, y in zip(results, own, strict=True):
            expected = np.zeros((y.shape[0], *x.shape[1:]), x.dtype)
            if x.dtype == np.int32 and x.ndim == 2:
                expected[:] = np.arange(n)
            expected[tuple(map(slice, y.shape))] = y
            assert ops.same_bits(x[chosen], expected)
    for x in results:
        if x.dtype == np.int32:
            assert (x[~where] == (-1 if x.ndim == 1 else 0)).all()
            assert x.ndim > 1 or (x[wrong] < 0).all()
        else:
            assert not x[~where].any()
            assert np.isnan(x[wrong]).reshape(wrong.sum(), -1).any(-1).all()


@pytest.mark.parametrize("operation", SQUARE)
def test_sizes_of_shared_operands(operation):
    """Sizes alone mapped, over another axis than the matrices, and in full, give the same."""
    rng = np.random.default_rng(0)
    a, b = spd(rng, "float64", (3, 5, 5)), normal(rng, "float64", (3, 5, 2))
    sizes = np.array([0, 3, 5, 1, 6], np.int32)
    f = SQUARE[operation]

    def each(a, b, sizes):
        return f(a, b, sizes=sizes)

    def all_three(a, b, sizes):
        over_sizes = jax.vmap(each, (None, None, 0))
        shared = over_sizes(a[0], b[0], sizes)
        crossed = jax.vmap(over_sizes, (0, 0, None), 0)(a, b, sizes)
        full = [jnp.repeat(x, len(sizes), 0) for x in (a, b)]
        return shared, crossed, each(*full, jnp.tile(sizes, len(a)))

    shared, crossed, full = map(jax.tree.leaves, jax.jit(all_three)(a, b, sizes))
    for x, y, z in zip(shared, crossed, full, strict=True):
        assert ops.same_bits(y.reshape(z.shape), z)
        assert ops.same_bits(x, z[: len(sizes)])


@pytest.mark.parametrize("kind", ("auto", "explicit"))
@pytest.mark.parametrize("operation", ("cholesky", "solve_gen", "lu", "eigh", "det"))
def test_a_spread_batch_is_not_gathered(operation, kind):
    """Whether its sizes are one number, spread like it, or whole on every device."""
    axis_type = getattr(jax.sharding.AxisType, kind.title())
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,), devices=jax.devices()[:4])
    rng = np.random.default_rng(0)
    a, b = spd(rng, "float64", (8, 5, 5)), normal(rng, "float64", (8, 5, 2))
    sizes = np.array([0, 3, 5, 1, 2, 4, 5, 2], np.int32)

    def f(a, b, sizes):
        return jax.tree.leaves(SQUARE[operation](a, b, sizes=sizes))[0]

    with jax.set_mesh(mesh):
        spread = [jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec("x"))) for x in (a, b)]
        whole = jax.device_put(sizes, jax.NamedSharding(mesh, PartitionSpec()))
        for given in (3, sizes):
            known = jax.jit(lambda a, b, given=given: f(a, b, given))
            assert "all-gather" not in known.lower(*spread).compile().as_text()
            np.testing.assert_array_equal(known(*spread), jax.jit(f)(a, b, given))
        assert "all-gather" not in jax.jit(f).lower(*spread, whole).compile().as_text()
