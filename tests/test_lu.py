"""LU factorizations, solves with them, and determinants."""

import itertools

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import ops
import pytest
import scipy.linalg

import jax_batched as jb
from jax_batched._ffi import cuda_tiers, force_kernel, target_name
from jax_batched._matrices import (
    MAX_RATIO,
    adjoint,
    general,
    normal,
    product_ratio,
    solve_ratio,
    wide,
)

ON_CPU = jax.default_backend() == "cpu"
OF_CUDA = sorted({tier.kernel for tier in cuda_tiers() if tier.operation == "lu"})
KERNELS = ("", *(("reference", "lanes", "blocked") if ON_CPU else OF_CUDA), "lax")
SQUARES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100)
SHAPES = [(n, n) for n in SQUARES]
SHAPES += [(1, 4), (4, 1), (3, 7), (7, 3), (8, 40), (40, 8), (33, 31), (31, 70), (70, 33)]
BATCH = 19


def matrices(dtype, m, n, batch=BATCH, seed=0):
    return normal(np.random.default_rng([seed, m, n]), dtype, (batch, m, n)).astype(dtype)


def run(f, *operands, kernel=""):
    return [np.asarray(x) for x in jax.tree.leaves(ops.compiled(f, *operands, kernel=kernel))]


def serves(kernel, dtype, m, n, operations=("lu",)):
    return ops.serves_shape(operations, kernel, dtype, m, n)


def factors_of(lu):
    m, n = lu.shape[-2:]
    k = min(m, n)
    lower = np.tril(lu[..., :, :k], -1) + np.eye(m, k)
    return lower, np.triu(lu[..., :k, :])


def checked_ratios(a, lu, pivots, permutation):
    """LAPACK's ratios; asserts the size of L, and that both ways to tell the exchanges agree."""
    m, n = a.shape[-2:]
    assert lu.shape == a.shape
    assert lu.dtype == a.dtype
    assert pivots.shape == (*a.shape[:-2], min(m, n))
    assert permutation.shape == a.shape[:-1]
    lower, upper = factors_of(wide(lu))
    permuted = np.take_along_axis(wide(a), permutation[..., None], axis=-2)
    eps = float(jnp.finfo(a.dtype).eps)
    largest = np.sqrt(2) * (1 + eps) if np.iscomplexobj(a) else 1
    assert np.abs(lower).max() <= largest
    for own, rows in zip(pivots, permutation, strict=True):
        order = np.arange(m)
        for i, place in enumerate(own):
            order[[i, place]] = order[[place, i]]
        np.testing.assert_array_equal(order, rows)
    return product_ratio(eps, permuted, lower @ upper)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_factors(kernel, dtype):
    shapes = SHAPES if kernel != "lax" else [(3, 3), (9, 9), (7, 3), (3, 7)]  # slow to compile
    shapes = [shape for shape in shapes if serves(kernel, dtype, *shape)]
    cases = [matrices(dtype, m, n) for m, n in shapes]
    results = ops.on_each(lambda a: jb.lu(a, return_info=True), [(a,) for a in cases], kernel)
    for a, (*factors, info) in zip(cases, results, strict=True):
        assert not info.any()
        assert checked_ratios(a, *factors).max() <= MAX_RATIO


@pytest.mark.skipif(not ON_CPU, reason="kernels of the CPU")
@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_kernels_give_the_same_bits(dtype):
    """Groups with matrices that fail, and determinants that do not fit the dtype."""
    shapes = [*SHAPES, (130, 130)]
    cases = [matrices(dtype, m, n) for m, n in shapes]
    for a in cases:
        a[::5, :, 0] = 0
        a[1::5, -1, -1] = np.nan
        a[2::5, 0, 0] = np.inf
        a[3::5] *= np.float32(1e15)

    def everything(a):
        results = [jb.lu(a, return_info=True)]
        if a.shape[-1] == a.shape[-2]:
            results += [jb.det(a), jb.slogdet(a), jb.inv(a, return_info=True)]
        return results

    ops.check_same_bits(everything, cases)


@pytest.mark.parametrize("dtype", ("float64", "complex128"))
@pytest.mark.parametrize("kernel", KERNELS)
def test_pivots_are_lapacks(kernel, dtype):
    """Where entries tie, too: of equal ones the first."""
    rng = np.random.default_rng(3)
    if kernel == "lax" and not ON_CPU and dtype == "complex128":
        pytest.skip("cuSOLVER's pivots of complex matrices are others")
    for m, n in ((3, 3), (17, 17), (40, 40), (9, 20), (20, 9)):
        integers = rng.integers(-2, 3, (6, m, n)).astype(dtype)  # the same ones for each kernel
        if not serves(kernel, dtype, m, n):
            continue
        random = matrices(dtype, m, n, 6)
        equal = np.ones((2, m, n), dtype)
        for a in (random, integers, equal):
            _, pivots, _ = run(jb.lu, a, kernel=kernel)
            for own, matrix in zip(pivots, a, strict=True):
                factors, *_ = scipy.linalg.lapack.get_lapack_funcs(("getrf",), (matrix,))
                _, expected, info = factors(matrix)
                steps = info if info > 0 else min(m, n)
                np.testing.assert_array_equal(own[:steps], expected[:steps])


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_failures(kernel, dtype):
    """A zero pivot, NaN or inf concern their own matrix alone."""
    for n in (2, 3, 9, 33) if kernel != "lax" else (3,):
        if not serves(kernel, dtype, n, n, ("lu", "inv", "solve_gen", "det", "slogdet")):
            continue
        a = matrices(dtype, n, n)
        good = a.copy()
        a[3, :, n - 1] = a[3, :, 0]
        a[3] = np.round(a[3].real * 4)  # exactly singular
        a[3, :, n - 1] = a[3, :, 0]
        a[5] = 0
        a[7, 0, 0] = np.nan
        bad = np.isin(np.arange(BATCH), (5, 7))
        factors, _, _, info = run(lambda x: jb.lu(x, return_info=True), a, kernel=kernel)
        assert np.array_equal(info[bad] > 0, [True, True])
        assert info[5] == 1
        assert not factors[5].any()
        rest = ~np.isin(np.arange(BATCH), (3, 5, 7))
        assert not info[rest].any()
        inverse, inverse_info = run(lambda x: jb.inv(x, return_info=True), a, kernel=kernel)
        x, x_info = run(lambda x: jb.solve(x, x[..., :1], return_info=True), a, kernel=kernel)
        assert np.isnan(inverse[bad]).all()
        assert np.isnan(x[bad]).all()
        np.testing.assert_array_equal(inverse_info, info)
        np.testing.assert_array_equal(x_info, info)
        for f, result in ((jb.lu, factors), (jb.inv, inverse)):
            expected = run(f, good, kernel=kernel)[0]
            assert ops.same_bits(result[rest], expected[rest])
        (det,) = run(jb.det, a, kernel=kernel)
        sign, log = run(jb.slogdet, a, kernel=kernel)
        assert det[5] == 0
        assert sign[5] == 0
        assert log[5] == -np.inf
        for result in (det, sign, log):
            assert np.isnan(result[7])
            assert np.isfinite(result[rest]).all()


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_determinants(kernel, dtype):
    tolerance = 3000 * float(jnp.finfo(dtype).eps)
    for n in (1, 2, 3, 4, 7, 16, 33, 65) if kernel != "lax" else (1, 4):
        if not serves(kernel, dtype, n, n, ("det", "slogdet")):
            continue
        a = general(np.random.default_rng(n), dtype, (BATCH, n, n)).astype(dtype)
        sign, log = np.linalg.slogdet(wide(a))
        ours, our_log = run(jb.slogdet, a, kernel=kernel)
        np.testing.assert_allclose(ours, sign, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(our_log, log, rtol=tolerance, atol=tolerance)
        (det,) = run(jb.det, a, kernel=kernel)
        np.testing.assert_allclose(det, np.linalg.det(wide(a)), rtol=tolerance)
        assert our_log.dtype == np.real(a).dtype
        assert det.dtype == ours.dtype == a.dtype


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_determinant_does_not_depend_on_its_neighbours(kernel, dtype):
    """Of which some are zero, or have products that do not fit the dtype on the way."""

    def determinants(a):
        return jb.det(a), jb.slogdet(a)

    for n in (1, 2, 3, 4, 7, 20) if kernel != "lax" else (3,):
        if not serves(kernel, dtype, n, n, ("det", "slogdet")):
            continue
        a = matrices(dtype, n, n, 67)
        among = a.copy()
        others = 5 + 9 * np.arange(7)
        largest, least = jnp.finfo(dtype).max, jnp.finfo(dtype).smallest_subnormal
        among[others] = np.eye(n)
        among[others, 0, 0] = (0, np.nan, np.inf, largest, least, -largest, -least)
        rest = np.delete(np.arange(len(a)), others)
        alone = run(determinants, a, kernel=kernel)
        for own, result in zip(alone, run(determinants, among, kernel=kernel), strict=True):
            assert ops.same_bits(own[rest], result[rest]), n


@pytest.mark.skipif(not ON_CPU, reason="kernels of the CPU")
@pytest.mark.parametrize("dtype", ("float32", "float64"))
@pytest.mark.parametrize("kernel", ("lanes", "blocked"))
def test_logarithms_of_determinants(kernel, dtype):
    """Within two units in the last place, of matrices whose determinant is known exactly."""
    form = jnp.finfo(dtype)
    near_one = 1 + np.arange(-40, 41) * float(form.eps)
    powers = 2.0 ** np.arange(form.minexp - form.nmant, form.maxexp)
    spread = np.exp(np.random.default_rng(0).uniform(-80, 80, 1000))
    x = np.concatenate([near_one, powers, spread, [form.max, form.tiny, np.sqrt(2)]])
    x = x.astype(dtype)
    sign, log = run(jb.slogdet, (x * (-1) ** np.arange(len(x)))[:, None, None], kernel=kernel)
    np.testing.assert_array_equal(sign, (-1) ** np.arange(len(x)))
    expected = np.log(x.astype(np.longdouble))
    assert (np.abs(log - expected) <= 2 * np.spacing(np.abs(expected).astype(dtype))).all()
    many = np.broadcast_to(x[:, None, None] * np.eye(5, dtype=dtype), (len(x), 5, 5))
    (_, log) = run(jb.slogdet, many, kernel=kernel)
    np.testing.assert_allclose(log, 5 * expected, rtol=4 * form.eps, atol=20 * form.eps)


@pytest.mark.skipif(ON_CPU, reason="kernels of CUDA")
@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_kernels_of_cuda_give_the_same_factors(dtype):
    for m, n in [*SHAPES, (130, 130)]:
        a = matrices(dtype, m, n)
        a[::5, :, 0] = 0
        a[1::5, -1, -1] = np.nan
        a[3::5] *= np.float32(1e15)
        kernels = [kernel for kernel in KERNELS[:-1] if serves(kernel, dtype, m, n)]
        chosen, *others = (
            run(lambda x: jb.lu(x, return_info=True), a, kernel=kernel) for kernel in kernels
        )
        for other in others:
            assert all(map(ops.same_bits, other, chosen)), (m, n)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_determinant_does_not_overflow_on_the_way(kernel, dtype):
    if not serves(kernel, dtype, 4, 4, ("det", "slogdet")):
        pytest.skip("serves no determinants")
    form = jnp.finfo(dtype)
    big, small = float(form.max) / 4, 4 * float(form.tiny)
    a = np.stack([np.diag([big, big, small, small]), np.diag([small, small, big, big])])
    a = np.concatenate([a, np.diag([big, big, big, big])[None]]).astype(dtype)
    (det,) = run(jb.det, a, kernel=kernel)
    np.testing.assert_allclose(det[:2], (big * small) ** 2, rtol=1e-5)
    assert np.isinf(np.real(det[2:])).all()
    sign, log = run(jb.slogdet, a, kernel=kernel)
    np.testing.assert_array_equal(sign, 1)
    np.testing.assert_allclose(log[2:], 4 * np.log(big), rtol=1e-5)
    if kernel == "lax":  # the CPU's flushes subnormal numbers
        return
    tiny = np.full((1, 1, 1), form.smallest_subnormal, dtype)
    assert run(jb.det, tiny, kernel=kernel)[0] == tiny[0, 0, 0]
    np.testing.assert_allclose(
        run(jb.slogdet, tiny, kernel=kernel)[1], np.log(float(form.smallest_subnormal)), rtol=1e-5
    )


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_lu_solve(dtype):
    for n, trans in itertools.product((1, 9), (0, 1, 2)):
        a = matrices(dtype, n, n, 5) + 2 * np.eye(n, dtype=dtype)
        for b in (matrices(dtype, n, 3, 5, seed=1), matrices(dtype, n, 1, 1)[0, :, 0]):
            pair = jb.lu_factor(a)
            x = jax.jit(lambda pair, b, trans=trans: jb.lu_solve(pair, b, trans))(pair, b)
            expected = np.stack(
                [
                    scipy.linalg.lu_solve(scipy.linalg.lu_factor(m), rhs, trans)
                    for m, rhs in zip(a, b if b.ndim == 3 else [b] * 5, strict=True)
                ]
            )
            tolerance = 1e4 * float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(x, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("trans", range(3))
def test_substitution_with_factors(trans, dtype):
    """Around the sizes of its kernels, of one column and several; a matrix's bits are its own."""
    for n in (1, 8, 9, 16, 17, 33, 48, 64, 65):
        for columns in (1, 5) if n in (9, 33) else (1 + n % 2 * 4,):
            a = matrices(dtype, n, n)
            b = normal(np.random.default_rng(n), dtype, (BATCH, n, columns)).astype(dtype)
            factors = jb.lu_factor(a)
            x = ops.compiled(lambda f, b: jb.lu_solve(f, b, trans), factors, b)
            op = (wide(a), wide(a).mT, adjoint(wide(a)))[trans]
            # Pivots bound the residual by those of L and U, not of a.
            growth = np.abs(np.asarray(factors[0])).max((1, 2)) / np.abs(a).max((1, 2))
            ratio = solve_ratio(np.finfo(dtype).eps, op, wide(b), wide(x)) / np.maximum(growth, 1)
            assert ratio.max() <= MAX_RATIO, (n, columns)
            if n in (9, 33):
                last = tuple(y[-1] for y in factors)
                alone = ops.compiled(lambda f, b: jb.lu_solve(f, b, trans), last, b[-1])
                assert ops.same_bits(alone, np.asarray(x)[-1]), (n, columns)


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_a_zero_on_the_diagonal_divides(dtype):
    """Of U: inf or NaN in its own system, as from any division."""
    factors = np.array([[[1, 1], [0, 0]], [[2, 1], [0, 4]]], dtype)
    pivots, b = np.array([[0, 1]] * 2, np.int32), np.array([[1], [2]], dtype)
    for trans in range(3):
        x = np.asarray(jax.jit(lambda b, t=trans: jb.lu_solve((factors, pivots), b, t))(b))
        assert not np.isfinite(x[0]).all()
        assert np.isfinite(x[1]).all()


def test_what_lu_solve_refuses():
    factors, pivots = jb.lu_factor(np.eye(3))
    with pytest.raises(TypeError, match="lu_solve: lu_and_piv must be a pair"):
        jb.lu_solve(factors, np.ones(3))
    with pytest.raises(ValueError, match="lu_solve: pivots must be integers of shape"):
        jb.lu_solve((factors, pivots[:2]), np.ones(3))
    with pytest.raises(ValueError, match="lu_solve: trans must be one of 0, 1, 2"):
        jb.lu_solve((factors, pivots), np.ones(3), 3)
    with pytest.raises(ValueError, match="lu: a must have shape"):
        jb.lu(np.ones(3))


DERIVATIVES = {
    "lu": lambda a: jb.lu(a)[0],
    "det": jb.det,
    "slogdet": lambda a: jb.slogdet(a)[1],
    "sign": lambda a: jb.slogdet(a)[0],
    "inv": jb.inv,
}


@pytest.mark.parametrize("dtype", ("float64", "complex128"))
@pytest.mark.parametrize(
    ("name", "shape"),
    [("lu", (3, 3)), ("lu", (5, 3)), ("lu", (3, 5))]
    + [(name, (4, 4)) for name in DERIVATIVES if name != "lu"],
)
def test_derivatives(name, shape, dtype):
    """Forward and reverse, once and twice, against differences of the function itself."""
    f = DERIVATIVES[name]
    a, da = matrices(dtype, *shape, 3), matrices(dtype, *shape, 3, seed=1)
    a = a + 3 * np.eye(*shape)[[2, 0, 1, *range(3, shape[0])]]
    step = 1e-6
    x, dx = jax.jvp(f, (a,), (da,))
    difference = (f(a + step * da) - f(a - step * da)) / (2 * step)
    np.testing.assert_allclose(dx, difference, rtol=1e-6, atol=1e-6)
    ct = normal(np.random.default_rng(2), x.dtype, x.shape)
    (pulled,) = jax.vjp(f, a)[1](jnp.asarray(ct))
    # Real parts: a sign is no analytic function.
    back, forth = np.real(np.sum(pulled * da)), np.real(np.sum(ct * dx))
    np.testing.assert_allclose(back, forth, rtol=1e-9, atol=1e-9)

    def directional(a):
        return jax.jvp(f, (a,), (da,))[1]

    _, second = jax.jvp(directional, (a,), (da,))
    difference = (directional(a + step * da) - directional(a - step * da)) / (2 * step)
    np.testing.assert_allclose(second, difference, rtol=1e-5, atol=1e-5)


def test_derivatives_of_singular_matrices():
    """NaN for themselves alone; the determinant's are its cofactors, as JAX's own."""
    a = matrices("float64", 3, 3, 4)
    a[1] = [[1, 2, 3], [2, 4, 6], [1, 0, 1]]
    gradient = jax.grad(lambda a: jb.det(a).sum())(a)
    cofactors = np.stack([np.linalg.det(m) * np.linalg.inv(m).T for m in a[[0, 2, 3]]])
    np.testing.assert_allclose(gradient[jnp.array([0, 2, 3])], cofactors, rtol=1e-10)
    theirs = jax.grad(lambda a: jnp.linalg.det(a).sum())(a)
    np.testing.assert_allclose(gradient, theirs, rtol=1e-9, atol=1e-9)
    for f in (lambda a: jb.inv(a).sum(), lambda a: jb.slogdet(a)[1].sum()):
        bad = np.isnan(jax.grad(f)(a)).any((-2, -1))
        np.testing.assert_array_equal(bad, np.arange(4) == 1)


def test_batching_and_empty_shapes():
    a = matrices("float32", 4, 6, 6).reshape(2, 3, 4, 6)
    for x, y in zip(jax.vmap(jax.vmap(jb.lu))(a), jb.lu(a), strict=True):
        assert ops.same_bits(x, y)
    swapped = jax.vmap(jb.slogdet, in_axes=2)(np.moveaxis(a[..., :4], 0, 2))
    for x, y in zip(swapped, jb.slogdet(a[..., :4]), strict=True):
        assert ops.same_bits(x, y)
    for shape in ((0, 3, 3), (2, 0, 0), (2, 0, 3), (2, 3, 0), (0, 0)):
        empty = jnp.zeros(shape)
        factors, pivots, permutation = jb.lu(empty)
        assert factors.shape == shape
        assert pivots.shape == (*shape[:-2], min(shape[-2:]))
        np.testing.assert_array_equal(
            permutation, np.broadcast_to(np.arange(shape[-2]), shape[:-1])
        )
        if shape[-1] == shape[-2]:
            np.testing.assert_array_equal(jb.det(empty), np.ones(shape[:-2]))
            np.testing.assert_array_equal(jb.slogdet(empty)[1], np.zeros(shape[:-2]))
            assert jb.inv(empty).shape == shape


def test_jaxs_own_functions_under_the_override():
    a, b = matrices("float64", 5, 5, 7), matrices("float64", 5, 2, 7, seed=1)
    functions = {
        "solve": lambda: jnp.linalg.solve(a, b),
        "inv": lambda: jnp.linalg.inv(a),
        "det": lambda: jnp.linalg.det(a),
        "slogdet": lambda: jnp.linalg.slogdet(a)[1],
        "lu": lambda: jax.vmap(lambda x: jsl.lu(x)[2])(a),
        "lu_factor": lambda: jsl.lu_factor(a)[0],
    }
    for name, f in functions.items():
        expected = f()
        with jb.override_jax_linalg():
            lowered = jax.jit(lambda f=f: f()).lower()
            assert target_name("lu") in lowered.as_text(), name
            np.testing.assert_allclose(lowered.compile()(), expected, rtol=1e-9, atol=1e-12)


def test_lineax():
    lx = pytest.importorskip("lineax")
    from jax_batched.lineax import LU

    a = matrices("float64", 4, 4, 3) + 2 * np.eye(4)
    b = matrices("float64", 4, 1, 3, seed=1)[..., 0]

    def solve(a, b, turn=lambda operator: operator):
        return lx.linear_solve(turn(lx.MatrixLinearOperator(a)), b, LU()).value

    np.testing.assert_allclose(jax.vmap(solve)(a, b), np.linalg.solve(a, b[..., None])[..., 0])
    turned = jax.vmap(lambda a, b: solve(a, b, lambda operator: operator.T))(a, b)
    np.testing.assert_allclose(turned, np.linalg.solve(np.swapaxes(a, 1, 2), b[..., None])[..., 0])
    gradient = jax.grad(lambda a: jax.vmap(solve)(a, b).sum())(a)
    expected = jax.grad(lambda a: jnp.linalg.solve(a, b[..., None]).sum())(a)
    np.testing.assert_allclose(gradient, expected, rtol=1e-9)


def test_forced_kernels_are_named():
    with force_kernel("warp"), pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(jb.inv(np.eye(3, dtype=np.float32)))
