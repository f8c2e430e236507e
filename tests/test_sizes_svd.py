"""`sizes=` of singular value decompositions, and of what is made of them."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import ops
import pytest
import scipy.linalg
from jax.sharding import PartitionSpec
from test_svd import ON_CPU, check, every_class, invariant

import jax_batched as jb
from jax_batched._matrices import adjoint, general, normal, wide

SHAPES = ((6, 5), (4, 6), (5, 5))
# Of rows and columns: none, one, all, wide, tall, square; cut to the shape of an array.
M = np.array([0, 4, 1, 9, 3, 2, 6, 4, 2, 0, 5], np.int32)
N = np.array([3, 0, 1, 9, 2, 4, 1, 4, 5, 0, 3], np.int32)
WRONG = np.array([-1, 99, np.iinfo(np.int32).max, np.iinfo(np.int32).min], np.int32)


def numbers(a):
    """Right-hand sides, spread as a is, whose rows are the same for any number of rows."""
    rows = jnp.cos(jnp.arange(2 * a.shape[-2], dtype=a.real.dtype)).reshape(-1, 2)
    zeros = jnp.zeros_like(a[..., :1])
    return zeros + rows.astype(a.dtype).reshape(*[1] * (a.ndim - 2), *rows.shape)


SVD = {
    "full": lambda a, **options: jb.svd(a, **options),
    "thin": lambda a, **options: jb.svd(a, full_matrices=False, **options),
}
OTHERS = {
    "values": lambda a, **options: (jb.svd(a, compute_uv=False, **options),),
    "pinv": lambda a, **options: (jb.pinv(a, **options),),
    "polar": lambda a, **options: jb.polar(a, **options),
    "polar-left": lambda a, **options: jb.polar(a, "left", **options),
    "lstsq": lambda a, **options: jb.lstsq(a, numbers(a), method="svd", **options)[:2],
}
EVERY = SVD | OTHERS


def sizes_in(m, n):
    return np.minimum(M, m), np.minimum(N, n)


def poisoned(a, m, n):
    """With numbers, NaN or inf where nothing counts."""
    a = a.copy()
    for i, (x, rows, columns) in enumerate(zip(a, m, n, strict=True)):
        x[rows:] = x[:, columns:] = (7, np.nan, -np.inf)[i % 3]
    return a


def shaped(dtype, m, n, seed=0):
    a = normal(np.random.default_rng(seed), dtype, (len(M), m, n)).astype(dtype)
    return a, *sizes_in(m, n)


def own_shapes(name, m, n):
    """Of the results for one matrix, by the function's name."""
    k = min(m, n)
    return {
        "full": ((m, m), (k,), (n, n)),
        "thin": ((m, k), (k,), (k, n)),
        "values": ((k,),),
        "pinv": ((n, m),),
        "polar": ((m, n), (n, n)),
        "polar-left": ((m, n), (m, m)),
        "lstsq": ((n, 2), (2,)),
    }[name]


def parts(name, results, m, n):
    """Of every matrix its own part of each result."""
    return [
        [
            x[(i, *map(slice, shape))]
            for x, shape in zip(results, own_shapes(name, *own), strict=True)
        ]
        for i, own in enumerate(zip(m, n, strict=True))
    ]


def checked_parts(name, results, m, n):
    """The same of NumPy arrays, which are zero beyond."""
    found = parts(name, [np.asarray(x) for x in results], m, n)
    for i, own in enumerate(found):
        for x, whole in zip(own, results, strict=True):
            assert np.count_nonzero(whole[i]) == np.count_nonzero(x), i
    return found


def check_svd(a, results, values, name, m, n):
    """Every part: residuals, orthogonality and values, as without sizes; zeros beyond."""
    alone = checked_parts("values", (values,), m, n)
    for i, (u, s, vh) in enumerate(checked_parts(name, results, m, n)):
        if 0 in (m[i], n[i]):
            for q in (u, vh):
                np.testing.assert_array_equal(np.abs(q), np.eye(*q.shape))
        else:
            own = a[i, : m[i], : n[i]]
            check(own[None], u[None], s[None], vh[None])
            check(own[None], u[None], alone[i][0][None], vh[None])


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", ("", "lax"))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_class_of_every_shape(shape, kernel, dtype):
    """Graded, repeated, without full rank, zero, large and small; all in one program."""
    if kernel == "lax" and not ON_CPU:
        pytest.skip("cuSOLVER's small values of graded matrices are wrong, and some are NaN")
    classes = every_class(dtype, max(shape))
    if kernel == "lax":  # JAX's own overflows on some platforms
        classes = {k: x for k, x in classes.items() if k not in ("large", "small")}
    whole = np.stack([x[: shape[0], : shape[1]] for x in classes.values()])
    m, n = (np.tile(x, len(whole)) for x in sizes_in(*shape))
    a = np.repeat(whole, len(M), axis=0)

    def all_three(a, m, n):
        return [f(a, sizes=(m, n)) for f in (*SVD.values(), OTHERS["values"])]

    *results, (values,) = ops.compiled(all_three, poisoned(a, m, n), m, n, kernel=kernel)
    for name, result in zip(SVD, results, strict=True):
        check_svd(a, result, values, name, m, n)


@pytest.mark.parametrize("shape", ((70, 66), (600, 5), (5, 600)))
@pytest.mark.parametrize("name", SVD)
def test_larger_arrays(shape, name):
    """Beyond the kernels, and of many rows; in one of them small matrices."""
    m = np.array([shape[0], 3, 69, 4, 550, 2]).clip(0, shape[0])
    n = np.array([shape[1], 4, 66, 4, 3, 570]).clip(0, shape[1])
    if min(shape) > 64 and not ON_CPU:
        pytest.skip("cuSOLVER's values do not meet the gate")
    a = normal(np.random.default_rng(0), "float64", (len(m), *shape))
    a[3, :, 1] = a[3, :, 0]

    def both(a, m, n):
        return SVD[name](a, sizes=(m, n)), jb.svd(a, compute_uv=False, sizes=(m, n))

    check_svd(a, *jax.jit(both)(poisoned(a, m, n), m, n), name, m, n)


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_ends_of_the_range(dtype):
    """Subnormal numbers keep their digits; one value out of range is inf, and spoils no other."""
    limits = np.finfo(dtype)
    a = np.zeros((3, 5, 4), dtype)
    a[0, :2, :2] = np.array([[2, 1], [1, 2]]) * np.array(1000 * limits.smallest_subnormal, dtype)
    a[1, :2, :2] = limits.max * np.array([[0.5, 0], [0, 0.25]])
    a[2, :2, :2] = 0.9 * limits.max
    u, s, vh, info = map(np.asarray, jb.svd(a, sizes=(2, 2), return_info=True))
    np.testing.assert_array_equal(s[0, :2] / limits.smallest_subnormal, [3000, 1000])
    np.testing.assert_allclose(s[1, :2] / limits.max, [0.5, 0.25], rtol=4 * limits.eps)
    assert s[2, 0] == np.inf and s[2, 1] <= 4 * limits.eps * limits.max
    np.testing.assert_array_equal(info, 0)
    for q in (u[:, :2, :2], vh[:, :2, :2]):
        np.testing.assert_allclose(
            q @ adjoint(q), np.broadcast_to(np.eye(2), q.shape), atol=10 * limits.eps
        )


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_pseudoinverses_ranks_and_least_squares(shape, dtype):
    """With and without full rank, each with the tolerance of its own size."""
    a, m, n = shaped(dtype, *shape)
    a[3, 1:] = a[3, :1]
    a[7, :, 1:] = a[7, :, :1]
    a[10] = 0
    b = normal(np.random.default_rng(1), dtype, (len(M), shape[0], 2)).astype(dtype)
    padded_b = np.where(np.arange(shape[0])[:, None] < m[:, None, None], b, np.nan).astype(dtype)

    def functions(a, b, m, n):
        sizes = (m, n)
        least_squares = jb.lstsq(a, b, method="svd", sizes=sizes)
        return jb.pinv(a, sizes=sizes), jb.matrix_rank(a, sizes=sizes), least_squares

    x, rank, (solution, residuals, of_system, info) = jax.jit(functions)(
        poisoned(a, m, n), padded_b, m, n
    )
    np.testing.assert_array_equal(info, 0)
    np.testing.assert_array_equal(of_system, rank)
    tolerance = 3e4 * float(np.finfo(dtype).eps)
    found = zip(
        checked_parts("pinv", (x,), m, n),
        checked_parts("lstsq", (solution, residuals), m, n),
        strict=True,
    )
    for i, ((inverse,), (y, squares)) in enumerate(found):
        own, rhs = wide(a[i, : m[i], : n[i]]), wide(b[i, : m[i]])
        limit = max(m[i], n[i]) * float(np.finfo(dtype).eps)
        expected = np.linalg.pinv(own, rcond=limit)
        np.testing.assert_allclose(inverse, expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(y, expected @ rhs, rtol=tolerance, atol=tolerance)
        rest = (np.abs(rhs - own @ expected @ rhs) ** 2).sum(0)
        np.testing.assert_allclose(squares, rest, rtol=tolerance, atol=tolerance)
        values = np.linalg.svd(own, compute_uv=False)
        assert rank[i] == (values > limit * values.max(initial=0)).sum()


def test_the_tolerance_is_that_of_the_matrix_and_not_of_its_padding():
    eps = float(np.finfo("float64").eps)
    a, b = np.full((40, 40), np.nan), np.ones(40)
    a[:2, :2] = np.diag([1, 4 * eps])
    assert jb.matrix_rank(a, sizes=(2, 2)) == 2
    np.testing.assert_allclose(jb.pinv(a, sizes=(2, 2))[1, 1], 1 / (4 * eps))
    x, _, rank, _ = jb.lstsq(a, b, method="svd", sizes=(2, 2))
    assert rank == 2 and x[1] == 1 / (4 * eps)
    wide_one = np.zeros((40, 40))
    wide_one[:2, :2] = a[:2, :2]
    assert jb.matrix_rank(wide_one, sizes=(2, 40)) == 1  # the larger side decides
    x, _, rank, _ = jb.lstsq(wide_one, b, method="svd", rcond=0.0, sizes=(2, 2))
    assert rank == 2 and not np.asarray(x[2:]).any()


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_polar_decompositions(shape, dtype):
    a, m, n = shaped(dtype, *shape)
    tolerance = 1000 * float(np.finfo(dtype).eps)
    for name, side in (("polar", "right"), ("polar-left", "left")):
        f = jax.jit(lambda a, m, n, side=side: jb.polar(a, side, sizes=(m, n)))
        for i, (u, p) in enumerate(checked_parts(name, f(poisoned(a, m, n), m, n), m, n)):
            if 0 in (m[i], n[i]):
                assert not u.any() and not p.any()
            else:
                expected = scipy.linalg.polar(wide(a[i, : m[i], : n[i]]), side)
                np.testing.assert_allclose(u, expected[0], atol=tolerance)
                np.testing.assert_allclose(p, expected[1], atol=tolerance)


def test_rotations():
    """Of determinant 1, as without sizes; NaN of a part that is not square."""
    a, sizes = general(np.random.default_rng(0), "float64", (8, 4, 4)), np.array([0, 1, 2, 3] * 2)
    given = poisoned(a, sizes, sizes)
    f = jax.jit(lambda a, m, n: jb.polar(a, rotation=True, sizes=(m, n)))
    for i, own in enumerate(checked_parts("polar", f(given, sizes, sizes), sizes, sizes)):
        matrix = a[i, : sizes[i], : sizes[i]]
        assert not i % 4 or np.isclose(np.linalg.det(own[0]), 1)
        for x, y in zip(own, jb.polar(matrix, rotation=True), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-12)
    assert {*np.sign([np.linalg.det(a[i, :s, :s]) for i, s in enumerate(sizes)])} == {-1, 1}
    u, p = f(given, sizes, np.where(np.arange(8) == 6, 1, sizes))
    np.testing.assert_array_equal(np.isnan(u).all((-2, -1)), np.arange(8) == 6)
    np.testing.assert_array_equal(np.isnan(p).all((-2, -1)), np.arange(8) == 6)
    where = np.arange(8) != 6
    masked = jb.polar(given, rotation=True, sizes=(sizes, 5 * ~where + sizes), where=where)
    assert np.isfinite(masked.posdef).all() and not np.asarray(masked.unitary[6]).any()


def losses(name, found, m, n):
    """What is smooth, of each matrix that is not empty."""
    weigh = lambda x: jnp.real(x) * jnp.cos(jnp.arange(x.size)).reshape(x.shape)  # noqa: E731
    return [
        sum(jnp.sum(weigh(x) + jnp.imag(x) ** 2) for x in (invariant(*own) if name in SVD else own))
        for own, rows, columns in zip(found, m, n, strict=True)
        if rows and columns
    ]


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
@pytest.mark.parametrize("shape", ((4, 3), (3, 4), (4, 4)))
@pytest.mark.parametrize("name", EVERY)
def test_derivatives(name, shape, dtype):
    """First and second: those of each part alone, and zeros beyond them."""
    a, m, n = shaped(dtype, *shape)
    da, shift = (normal(np.random.default_rng(i), dtype, a.shape).astype(dtype) for i in (1, 2))
    inside = np.arange(shape[0])[:, None] < m[:, None, None]
    inside = inside & (np.arange(shape[1]) < n[:, None, None])

    def of_parts(a):
        return sum(losses(name, parts(name, EVERY[name](a, sizes=(m, n)), m, n), m, n))

    def alone(a):
        each = [(i, *own) for i, own in enumerate(zip(m, n, strict=True)) if all(own)]
        found = [EVERY[name](a[i, :rows, :columns]) for i, rows, columns in each]
        return sum(losses(name, found, m[[i for i, *_ in each]], n[[i for i, *_ in each]]))

    def second(f):
        along = lambda a: jax.jvp(f, (a,), (jnp.asarray(da * inside),))[1]  # noqa: E731
        return jax.jit(lambda a: (jax.grad(f)(a), jax.grad(along)(a)))

    given, expected = second(of_parts)(np.where(inside, a, shift)), second(alone)(a)
    for x, y in zip(given, expected, strict=True):
        scale = np.abs(y).max((-2, -1), keepdims=True)
        np.testing.assert_allclose(x, y, atol=1e-10 * max(scale.max(), 1))
        assert not np.asarray(x)[~inside].any()


@pytest.mark.parametrize("dtype", ops.WIDE_DTYPES)
@pytest.mark.parametrize("name", EVERY)
def test_derivatives_of_special_matrices(name, dtype):
    """Finite at equal and zero singular values, in any padding, and for any tolerance."""
    q = np.linalg.qr(normal(np.random.default_rng(4), dtype, (4, 4)))[0].astype(dtype)
    cases = np.stack([q, q * [1, 1, 0, 0], np.zeros_like(q), q[:, :1] * q[:1], q * 1e-300])
    a = np.full((len(cases), 6, 5), np.nan, dtype)
    a[:, :4, :4] = cases

    def loss(a, **options):
        return sum(jnp.sum(jnp.abs(x + 1) ** 2) for x in EVERY[name](a, **options))

    for m, n in ((4, 4), (4, 3), (3, 4), (2, 2)):
        with_sizes = jax.grad(lambda a, m=m, n=n: loss(a, sizes=(m, n)))(a)
        finite = np.isfinite(jax.grad(loss)(cases[:, :m, :n])).all((-2, -1))
        np.testing.assert_array_equal(np.isfinite(with_sizes).all((-2, -1)) | ~finite, True)
        assert finite[:4].all()
        assert not np.delete(with_sizes, np.s_[:m], 1).any()


@pytest.mark.parametrize("name", ("full", "thin", "polar"))
def test_derivatives_of_nearly_singular_squares(name):
    """Rounding is not taken for what leaves the range of all vectors."""
    u, v = np.linalg.qr(np.random.default_rng(0).standard_normal((2, 3, 3)))[0]
    a, da = (u * [1, 0.5, 1e-12]) @ v, np.random.default_rng(1).standard_normal((3, 3))
    padding = (0, 2), (0, 3)

    def moved(a, da, **options):
        _, tangents = jax.jvp(lambda a: tuple(EVERY[name](a, **options)), (a,), (da,))
        return tangents

    given = moved(np.pad(a, padding), np.pad(da, padding), sizes=(3, 3))
    (own,) = parts(name, [x[None] for x in given], [3], [3])
    for x, y in zip(own, moved(a, da), strict=True):
        np.testing.assert_allclose(np.abs(x), np.abs(y), atol=1e-9)


def test_derivatives_by_jaxs_rule():
    """Without a tolerance, padding has no singular values that equal others."""
    a = np.diag([1.0, 2, 3])[:, :2] + 0.1

    def loss(a, **sizes):
        u, s, vh = jb.svd(a, cluster_tol=0, full_matrices=False, **sizes)
        return jnp.sum(u[:3, :2] ** 2 * np.arange(6).reshape(3, 2)) + s[0] ** 2 + vh[0, 0] ** 2

    given = jax.grad(loss)(np.pad(a, ((0, 3), (0, 2)), constant_values=np.nan), sizes=(3, 2))
    np.testing.assert_allclose(given, np.pad(jax.grad(loss)(a), ((0, 3), (0, 2))), atol=1e-13)
    zero = jax.grad(lambda a: jb.svd(a, compute_uv=False, cluster_tol=0, sizes=(0, 0)).sum())(a)
    assert not np.asarray(zero).any()


@pytest.mark.parametrize("kernel", ("", "lax"))
def test_failures_concern_their_own_matrix_alone(kernel):
    """A size out of range, NaN or inf within; and with a mask, which comes first."""
    a, m, n = shaped("float64", 6, 5)
    broken = a.copy()
    broken[6, 5, 0], broken[7, 2, 1] = np.nan, np.inf
    wrong, bad = np.isin(np.arange(len(M)), (1, 4, 5, 8)), np.isin(np.arange(len(M)), (6, 7))
    of_m, of_n = m.copy(), n.copy()
    of_m[[1, 4]], of_n[[4, 5, 8]] = WRONG[:2], WRONG[1:]
    where = ~np.isin(np.arange(len(M)), (4, 6, 10))
    rest = ~(wrong | bad)

    def three(name, *operands):
        """A whole batch, one of which some fail, and this with a mask."""

        def call(a, m, n, **options):
            return tuple(EVERY[name](a, sizes=(m, n), **options))

        failing = call(*operands[3:]), call(*operands[3:], where=where)
        weigh = lambda a: sum(jnp.sum(x) for x in call(a, *operands[4:]))  # noqa: E731
        return call(*operands[:3]), *failing, jax.grad(weigh)(operands[0])

    for name in EVERY:
        operands = poisoned(a, m, n), m, n, poisoned(broken, m, n), of_m, of_n
        good, given, masked, gradient = ops.compiled(
            functools.partial(three, name), *operands, kernel=kernel
        )
        np.testing.assert_array_equal(np.isnan(gradient).any((-2, -1)), wrong, name)
        of_each = parts(name, [np.asarray(x) for x in given], m, n)
        for number, (x, y, z) in enumerate(zip(given, good, masked, strict=True)):
            assert ops.same_bits(x[rest], y[rest]), name
            assert ops.same_bits(z[where & rest], y[where & rest]), name
            assert not np.asarray(z[~where]).any(), name
            assert np.isnan(x[bad]).any(tuple(range(1, x.ndim))).all(), name
            for i in np.flatnonzero(bad):
                assert np.count_nonzero(x[i]) == np.count_nonzero(of_each[i][number]), name
            if (name, number) != ("lstsq", 1):  # residuals may be anything
                assert np.isnan(x[wrong]).all(), name
    *_, info = jb.svd(broken, sizes=(of_m, of_n), return_info=True)
    np.testing.assert_array_equal(info, np.where(wrong, -2, np.where(bad, np.minimum(m, n), 0)))
    *_, info = jb.svd(broken, sizes=(of_m, of_n), where=where, return_info=True)
    expected = np.where(wrong, -2, np.where(bad, np.minimum(m, n), 0))
    np.testing.assert_array_equal(info, np.where(where, expected, -1))
    info = jb.lstsq(broken, a[..., :1], method="svd", sizes=(of_m, of_n)).info
    np.testing.assert_array_equal(info, np.where(wrong, -3, np.where(bad, np.minimum(m, n), 0)))
    rank = jb.matrix_rank(broken, sizes=(of_m, of_n), where=where)
    full = np.where(wrong | bad | ~where, 0, np.minimum(m, n))
    np.testing.assert_array_equal(rank, full)


def test_mapped_and_broadcast():
    """Over sizes, over matrices, over both; one size for all; None for all of them."""
    a, m, n = shaped("float64", 5, 4)
    a = jnp.asarray(a)
    spread = jnp.broadcast_to(a[7], a.shape)

    def each(f):
        pairs = (
            (jax.vmap(lambda a, m, n: f(a, sizes=(m, n)))(a, m, n), f(a, sizes=(m, n))),
            (jax.vmap(lambda m: f(a[7], sizes=(m, None)))(m), f(spread, sizes=(m, [4]))),
            (jax.vmap(lambda a: f(a, sizes=(3, 2)))(a), f(a, sizes=([3], 2))),
        )
        return [tuple(map(jax.tree.leaves, pair)) for pair in pairs]

    for f in (*EVERY.values(), jb.matrix_rank):
        for given, expected in jax.jit(lambda f=f: each(f))():
            for x, y in zip(given, expected, strict=True):
                np.testing.assert_allclose(x, y, atol=1e-12)


@pytest.mark.parametrize("name", EVERY)
def test_strict_promotion(name):
    a, m, n = shaped("float32", 5, 4)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for x in EVERY[name](a, sizes=(m, n)):
            assert x.dtype == "float32"
        jax.grad(lambda a: jnp.sum(EVERY[name](a, sizes=(m, n))[0]))(a)


def test_16_bit_elements():
    a, m, n = shaped("float32", 5, 4)
    for f in EVERY.values():
        for x in f(jnp.asarray(a, "bfloat16"), sizes=(m, n)):
            assert np.isfinite(np.asarray(x, "float32")).all()


def test_nothing_is_nan_on_the_way():
    a, m, n = shaped("float64", 5, 4)
    with jax.debug_nans(True):
        for f in EVERY.values():
            f(a, sizes=(m, n))


def test_on_a_mesh():
    """Nothing is gathered, save where that is so without sizes, and derivatives are the same."""
    devices = jax.devices()
    a = normal(np.random.default_rng(0), "float64", (16, 6, 5))
    sizes = np.arange(16, dtype=np.int32) % 7, np.arange(16, dtype=np.int32) % 6
    for name, f in EVERY.items():
        program = lambda a, m, n, f=f: f(a, sizes=(m, n))  # noqa: E731

        def loss(*xs, name=name, program=program):
            found = program(*xs)
            return sum(jnp.sum(x**2) for x in (invariant(*found) if name in SVD else found))

        expected, slope = jax.jit(program)(a, *sizes), jax.jit(jax.grad(loss))(a, *sizes)
        for axis_type in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
            mesh = jax.make_mesh((len(devices),), ("i",), axis_types=(axis_type,))
            spread = jax.sharding.NamedSharding(mesh, PartitionSpec("i"))
            with jax.set_mesh(mesh):
                for given in (sizes, [jax.device_put(x, spread) for x in sizes]):
                    operands = jax.device_put(a, spread), *given
                    compiled = jax.jit(program).lower(*operands).compile()
                    if name not in ("pinv", "lstsq") or axis_type == jax.sharding.AxisType.Auto:
                        assert "all-gather" not in compiled.as_text(), name
                    for x, y in zip(compiled(*operands), expected, strict=True):
                        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)
                gradient = jax.jit(jax.grad(loss))(*operands)
                np.testing.assert_allclose(gradient, slope, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("batch", ("b", "b - 1"))
@pytest.mark.parametrize("name", EVERY)
def test_exported_for_any_batch(name, batch):
    a, m, n = shaped("float64", 5, 4)
    (of_batch,) = jax.export.symbolic_shape(batch)
    shapes = [jax.ShapeDtypeStruct((of_batch, *x.shape[1:]), x.dtype) for x in (a, m, n)]
    program = jax.jit(lambda a, m, n: tuple(EVERY[name](a, sizes=(m, n))))
    exporting = jax.export.export(program, disabled_checks=jb.export_disabled_checks())
    exported = exporting(*shapes)
    for count in (1, len(M)) if batch == "b" else (0, 1, len(M)):
        given = [x[:count] for x in (a, m, n)]
        for x, y in zip(exported.call(*given), program(*given), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-12)


def test_empty():
    """Vectors of nothing complete a basis of the matrix's own size."""
    for shape in ((3, 0, 4), (3, 4, 0), (3, 0, 0)):
        sizes = tuple(np.minimum(limit, np.array([0, 2, 9])) for limit in shape[1:])
        sizes = (*sizes[:1], np.where(np.arange(3) == 2, -1, sizes[1]))
        for full in (True, False):
            u, s, vh, info = jb.svd(np.zeros(shape), full, sizes=sizes, return_info=True)
            np.testing.assert_array_equal(info, [0, 0, -2])
            assert s.shape == (3, 0)
            for q, size in ((u, sizes[0]), (vh, sizes[1])):
                assert np.isnan(q[2]).all()
                expected = np.eye(*q.shape[1:]) * (np.arange(q.shape[-1]) < size[1])
                np.testing.assert_array_equal(q[1], expected)
        where = np.array([True, False, False])
        masked = jb.svd(np.zeros(shape), sizes=sizes, where=where, return_info=True)
        np.testing.assert_array_equal(masked[-1], [0, -1, -1])
        assert not any(np.asarray(x[1:]).any() for x in masked[:3])
        np.testing.assert_array_equal(jb.matrix_rank(np.zeros(shape), sizes=sizes), 0)
        for x in (jb.pinv(np.zeros(shape), sizes=sizes), *jb.polar(np.zeros(shape), sizes=sizes)):
            assert not np.asarray(x[:2]).any() and np.isnan(x[2]).all()
    for f in EVERY.values():
        for x in f(np.zeros((0, 3, 2)), sizes=([], 1)):
            assert x.shape[0] == 0
        assert not any(np.isnan(x).any() for x in f(np.ones((2, 3, 2)), sizes=(0, [0, 2])))


@pytest.mark.parametrize("sizes", (np.array([1, 2]), np.ones((2, 2), int), (1, 2, 3), 3))
def test_sizes_are_of_rows_and_columns(sizes):
    for f in (jb.svd, jb.pinv, jb.matrix_rank, jb.polar):
        with pytest.raises(TypeError, match=rf"{f.__name__}: sizes must be a tuple \(m, n\)"):
            f(np.ones((2, 3, 4)), sizes=sizes)
        with pytest.raises(ValueError, match=f"{f.__name__}: n of sizes of shape .* does not"):
            f(np.ones((2, 3, 4)), sizes=(1, [1, 2, 3]))
        with pytest.raises(TypeError, match=f"{f.__name__}: m of sizes has dtype float64"):
            f(np.ones((2, 3, 4)), sizes=(1.0, 1))
