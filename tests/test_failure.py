"""Matrices that are not positive definite, entries that are not finite, and extreme scales."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest

import jax_batched as jb
from jax_batched import _matrices as matrices
from jax_batched.cholesky import cholesky_op

CHOLESKY = ops.of("cholesky")

SIZES = (1, 2, 3, 7, 8, 9, 12, 13, 16, 17, 24, 31, 32, 33, 40, 48, 57, 63, 64, 65, 96, 100)


def with_pivots(rng, dtype, pivots):
    """Matrices of small integers, L D L^H with D given: the pivots are D without rounding.

    L is I + N with N^2 = 0, so that solutions stay small: N has rows of a random half, columns of
    the other.
    """
    shape = (*pivots.shape, pivots.shape[-1])
    parts = rng.integers(-1, 2, (2, *shape))
    half = rng.integers(0, 2, pivots.shape).astype(bool)
    entries = parts[0] + 1j * parts[1] if np.dtype(dtype).kind == "c" else parts[0]
    strict = np.tril(entries * (half[..., :, None] & ~half[..., None, :]), -1)
    lower = strict + np.eye(shape[-1])
    return (lower * pivots[..., None, :]) @ matrices.adjoint(lower)


def failing_at(rng, dtype, n, columns, pivot):
    """One matrix for each 1-based column; the pivot there is as given. 0: a matrix that is fine."""
    pivots = np.where(np.arange(1, n + 1) == np.asarray(columns)[:, None], pivot, 1.0)
    return with_pivots(rng, dtype, pivots)


def right_hand_sides(op, dtype, batch, n, nrhs=2):
    """The operands after the matrix."""
    return (np.ones((batch, n, nrhs), dtype),) if op.takes_b else ()


def calls(op, dtype, n, matrices, nrhs=2):
    a = op.spoil(matrices).astype(dtype)
    return (a, *right_hand_sides(op, dtype, a.shape[0], n, nrhs))


def one_or_two(n):
    """Right-hand sides: one and several can be other kernels."""
    return 1 + n % 2


def check_pattern(op, result, info, expected_info):
    """Asserts info, and NaN in whatever a failed matrix's result holds."""
    result = np.asarray(result)
    assert info.dtype == np.int32
    np.testing.assert_array_equal(info, expected_info)
    nan = op.kind.failed(result.shape[-2:])
    failed = np.asarray(expected_info) > 0
    patterns = np.broadcast_to(nan, (failed.sum(), *nan.shape))
    np.testing.assert_array_equal(np.isnan(result[failed]), patterns)
    assert not result[failed][:, ~nan].any()
    if np.iscomplexobj(result):
        assert np.isnan(result[failed].imag[:, nan]).all()
    assert np.isfinite(result[~failed]).all()


@pytest.mark.parametrize(
    ("op", "kernel", "dtype"), ops.by_kernel(ops.CAN_FAIL, paths=ops.PATHS), ids=ops.ids
)
def test_info_is_the_first_column_that_fails(op, kernel, dtype):
    """A negative pivot or one that is exactly zero, in every column."""
    sizes = [n for n in SIZES if ops.serves(op, kernel, dtype, n, one_or_two(n))]
    rng = np.random.default_rng(0)
    cases = [
        calls(
            op,
            dtype,
            n,
            np.concatenate([failing_at(rng, dtype, n, np.arange(n + 1), p) for p in (-1.0, 0.0)]),
            one_or_two(n),
        )
        for n in sizes
    ]
    for (result, info), n in zip(ops.on_each(op.with_info, cases, kernel), sizes, strict=True):
        check_pattern(op, result, info, np.tile(np.arange(n + 1), 2))


@pytest.mark.parametrize(
    ("op", "kernel", "stored"),
    ops.by_kernel(ops.CAN_FAIL, dtypes=ops.STORED, paths=ops.PATHS),
    ids=ops.ids,
)
def test_info_in_half_precision(op, kernel, stored):
    """Small integers are exact in 16 bits. Odd matrices of the batch fail, even ones do not.

    A CPU has no kernels of 16-bit elements: a few sizes of the casts suffice there.
    """
    some = SIZES if jax.default_backend() == "gpu" else SIZES[::5]
    sizes = [n for n in some if ops.serves(op, kernel, stored, n)]
    rng = np.random.default_rng(0)
    columns = [np.arange(1, 2 * n + 1) // 2 * (np.arange(2 * n) % 2) for n in sizes]
    cases = [
        calls(op, stored, n, failing_at(rng, "float32", n, k, -1.0), nrhs=1)
        for n, k in zip(sizes, columns, strict=True)
    ]
    for (result, info), k in zip(ops.on_each(op.with_info, cases, kernel), columns, strict=True):
        assert result.dtype == stored
        check_pattern(op, result.astype(np.float32), info, k)


@pytest.mark.parametrize("dtype", ("float32", "complex128"))
@pytest.mark.parametrize("op", [op for op in ops.ONE_EACH if op.can_fail], ids=ops.ids)
def test_info_across_the_panels_of_large_matrices(op, dtype):
    rng = np.random.default_rng(0)
    cases, expected = [], []
    for n in (72, 97, 105, 128, 130, 257, 512):
        columns = [0, 1, 8, 9, 16, 17, 32, 33, 55, 56, 64, 65, 127, 128, n - 1, n]
        columns = [k for k in columns if k <= n]
        cases.append(calls(op, dtype, n, failing_at(rng, dtype, n, columns, -1.0)))
        expected.append(columns)
    for (result, info), columns in zip(ops.on_each(op.with_info, cases), expected, strict=True):
        check_pattern(op, result, info, columns)


@pytest.mark.parametrize("dtype", ("float32", "complex128"))
@pytest.mark.parametrize("op", ops.CAN_FAIL[1::2], ids=ops.ids)
def test_beyond_the_kernels_the_contract_is_the_same(op, dtype):
    n, columns = 513, [0, 1, 300, 513]
    a = failing_at(np.random.default_rng(0), dtype, n, columns, -1.0)
    check_pattern(op, *op.with_info(*calls(op, dtype, n, a)), columns)


@pytest.mark.parametrize("where", ("diagonal", "off_diagonal"))
@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize(
    ("op", "kernel", "dtype"),
    ops.by_kernel(ops.CAN_FAIL, dtypes=("float64",), paths=ops.PATHS),
    ids=ops.ids,
)
def test_entries_that_are_not_finite(op, kernel, dtype, value, where):
    """NaN and infinities in every column, in a group with healthy matrices; as the plain kernel."""
    rng = np.random.default_rng(1)
    cases, healthy = [], []
    for n in (2, 3, 8, 9, 17, 33, 64, 65):
        if not ops.serves(op, kernel, dtype, n):
            continue
        a = matrices.spd(rng, dtype, (2 * n, n, n))
        for k in range(n):
            column = k if where == "diagonal" else max(k - 1, 0)
            a[2 * k, k, column] = a[2 * k, column, k] = value
        cases.append(calls(op, dtype, n, a))
        healthy.append(a[1::2])
    results = ops.on_each(op.with_info, cases, kernel)
    plain = ops.by_reference_kernel(op.with_info, cases)
    for operands, (x, info), (expected, expected_info) in zip(cases, results, plain, strict=True):
        np.testing.assert_array_equal(info, expected_info)
        np.testing.assert_array_equal(np.isnan(x), np.isnan(expected))
        op.check([y[1::2] for y in operands], x[1::2])
        n = operands[0].shape[-1]
        if not (where == "diagonal" and value == np.inf):
            columns = np.arange(1, n + 1)
            if where == "off_diagonal":  # the pivot below the entry; entry (0, 0) if there is none
                columns[0] = 1 if not value > 0 else 0
            np.testing.assert_array_equal(info[2::2], columns[1:])


@pytest.mark.parametrize(
    ("op", "kernel", "dtype"), ops.by_kernel(ops.CAN_FAIL, paths=ops.PATHS), ids=ops.ids
)
def test_neighbours_of_a_failed_matrix_keep_their_bits(op, kernel, dtype):
    """First, last, alternate, all but one of a group of 32 fail; the others do not notice."""
    batch = 70
    everyone = np.arange(batch)
    patterns = [
        everyone % 32 == 0,
        everyone % 32 == 31,
        everyone % 2 == 0,
        everyone != 40,
        everyone == batch - 1,
    ]
    for n in (3, 8, 16, 31, 33, 49, 57):
        if not ops.serves(op, kernel, dtype, n, nrhs=2):
            continue
        healthy = op.operands(dtype, batch=(batch,), n=n, nrhs=2, seed=n)
        cases = [healthy]
        for failed in patterns:
            a = healthy[0].copy()
            a[failed, n // 2, n // 2] = -1
            cases.append((a, *healthy[1:]))
        (good, no_info), *rest = ops.on_each(op.with_info, cases, kernel)
        assert not no_info.any()
        for failed, (x, info) in zip(patterns, rest, strict=True):
            np.testing.assert_array_equal(info, np.where(failed, n // 2 + 1, 0))
            assert ops.same_bits(x[~failed], good[~failed])
            assert np.isnan(x[failed]).any(axis=(-2, -1)).all()


@pytest.mark.parametrize("dtype", ops.STORED)
def test_failure_of_half_precision(dtype):
    a = jnp.stack([jnp.eye(3), -jnp.eye(3)]).astype(dtype)
    factor, info = jb.cholesky(a, return_info=True)
    assert factor.dtype == a.dtype
    check_pattern(CHOLESKY[0], matrices.wide(factor), info, [0, 1])


@pytest.mark.parametrize("op", ops.CAN_FAIL, ids=ops.ids)
def test_small_matrices_that_are_not_positive_definite(op):
    """Not symmetric and indefinite; singular; NaN; negative definite."""
    lower = np.arange(9.0).reshape(3, 3)
    negative = -np.array([[4.0, 12, -16], [12, 37, -43], [-16, -43, 98]])
    a = np.stack([lower, np.ones((3, 3)), np.eye(3), np.full((3, 3), np.nan), negative])
    operands = (a, *right_hand_sides(op, "float64", 5, 3))
    x, info = op.with_info(*operands)
    check_pattern(op, x, info, [1, 2, 0, 1, 1])
    np.testing.assert_array_equal(x[2], op.reference(*(y[2] for y in operands)))


def test_failure_under_vmap_and_in_a_shared_factor():
    a = jnp.stack([jnp.ones((2, 2)), 4 * jnp.eye(2)])
    b = jnp.ones((5, 2))

    def solve(matrix, rhs):
        return jb.solve(matrix, rhs, assume_a="pos", return_info=True)

    x, info = jax.vmap(jax.vmap(solve, (0, None)), (None, 0))(a, b)
    np.testing.assert_array_equal(info, np.broadcast_to([2, 0], (5, 2)))
    assert np.isnan(x[:, 0]).all()
    np.testing.assert_array_equal(x[:, 1], np.full((5, 2), 0.25))


def test_info_of_a_general_solve():
    singular = np.array([[1.0, 2, 3], [2, 4, 6], [0, 0, 1]])
    zero = np.zeros((3, 3))
    a = np.stack([np.eye(3), singular, zero, np.eye(3)[::-1]])
    x, info = jb.solve(a, np.ones((4, 3, 1)), return_info=True)
    np.testing.assert_array_equal(info, [0, 2, 1, 0])
    np.testing.assert_array_equal(x[::3], np.ones((2, 3, 1)))


@pytest.mark.parametrize(
    ("op", "kernel", "dtype"),
    ops.by_kernel(ops.SUBSTITUTING, (4, 9, 33), dtypes=("float32", "float64"), paths=ops.PATHS),
    ids=ops.ids,
)
def test_a_bad_factor_spoils_its_own_system_only(op, kernel, dtype):
    unit = op.degree == 0
    triangular = op.unread(4).any()
    bad = -1.0 if op.can_fail else 0.0 if triangular and not unit else np.nan
    for n, nrhs in itertools.product((4, 9, 33), (2, 5)):
        if not ops.serves(op, kernel, dtype, n, nrhs):
            continue
        operands = op.operands(dtype, batch=(66,), n=n, nrhs=nrhs, seed=n)
        failed = np.arange(66) % 3 == 0
        a = operands[0].copy()
        row, column = (n - 1, 0) if not op.unread(n)[n - 1, 0] else (0, n - 1)
        if unit:
            a[failed, row, column] = bad
        else:
            a[failed, n // 2, n // 2] = bad
        clean, x = ops.on_each(op, [operands, (a, operands[1])], kernel)
        assert ops.same_bits(x[~failed], clean[~failed])
        assert not np.isfinite(x[failed]).all(axis=(-2, -1)).any()


@pytest.mark.parametrize(
    ("op", "kernel", "dtype"),
    ops.by_kernel(ops.CAN_FAIL, dtypes=("complex64", "complex128"), paths=ops.PATHS),
    ids=ops.ids,
)
def test_the_imaginary_part_of_the_diagonal_is_not_read(op, kernel, dtype):
    for n in (1, 5, 9, 31, 33, 49, 65):
        if not ops.serves(op, kernel, dtype, n, nrhs=2):
            continue
        spoiled = op.operands(dtype, batch=(3,), n=n, nrhs=2, seed=n)
        real = spoiled[0].copy()
        real.imag[..., np.arange(n), np.arange(n)] = 0
        ours, theirs = ops.on_each(op, [spoiled, (real, *spoiled[1:])], kernel)
        assert np.isfinite(ours).all()
        assert ops.same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("upper", (False, True))
def test_symmetrizing_averages_both_triangles(upper, dtype):
    """Integers: the mean is exact, so the factor is that of the Hermitian part bit for bit."""
    rng = np.random.default_rng(5)
    for n in (2, 5, 9, 20, 40, 70):
        mean = with_pivots(rng, dtype, np.ones((3, n)))
        skew = 2 * np.tril(rng.integers(-9, 9, (3, n, n)), -1)
        a = (mean + skew - np.swapaxes(skew, -1, -2)).astype(dtype)
        factor = jb.cholesky(a, upper=upper)
        assert ops.same_bits(factor, jb.cholesky(mean.astype(dtype), upper=upper))
        plain = jb.cholesky(a, upper=upper, symmetrize_input=False)
        assert not ops.same_bits(factor, plain)


def test_symmetrizing_reads_both_triangles():
    for at in ((0, 2), (2, 0)):
        a = np.eye(3)
        a[at] = np.nan
        for upper in (False, True):
            _, info = jb.cholesky(a, upper=upper, return_info=True)
            assert info == 3


@pytest.mark.parametrize(
    ("op", "kernel", "dtype"), ops.by_kernel(ops.WITH_KERNELS, paths=ops.PATHS), ids=ops.ids
)
def test_powers_of_two_pass_through(op, kernel, dtype):
    """Scaling by a power of two is exact, so huge and tiny matrices have the same digits."""
    power = 24 if np.finfo(dtype).bits == 32 else 250
    every = (1, 4, 8, 9, 16, 33, 57, 65, 121)
    sizes = [n for n in every if ops.serves(op, kernel, dtype, n, nrhs=2)]
    cases = [op.operands(dtype, batch=(3,), n=n, nrhs=2, seed=n) for n in sizes]
    expected = ops.on_each(op, cases, kernel)
    for sign in (-1, 1):
        b_scale = 2.0 ** (sign * power)
        # What is factored has a root; a unit triangle cannot be scaled, so only its b is.
        a_scale = b_scale**2 if op.can_fail else b_scale if op.degree else 1.0
        x_scale = op.kind.scale(a_scale**op.degree, b_scale)
        scaled = [(ops.times(a, a_scale), *(y * b_scale for y in b)) for a, *b in cases]
        for x, unscaled in zip(ops.on_each(op, scaled, kernel), expected, strict=True):
            assert ops.same_bits(x, unscaled * x_scale)


MEANS = [op for op in CHOLESKY if op.options["symmetrize_input"]]
MEAN_SIZES = (*range(1, 10), 16, 17, 33, 64, 65)


def smaller(a):
    """a * 2^-20, exactly."""
    return ops.times(a, np.array(2.0**-20, a.real.dtype))


@pytest.mark.parametrize(
    ("op", "kernel", "dtype"), ops.by_kernel(MEANS, dtypes=ops.DTYPES + ops.STORED), ids=ops.ids
)
def test_the_mean_of_finite_numbers_is_finite(op, kernel, dtype):
    """Where sums overflow: scaled by a power of two, the factor is one of a smaller matrix."""
    sizes = [n for n in MEAN_SIZES if ops.serves(op, kernel, dtype, n)]
    cases = [(ops.next_to_overflow(np.random.default_rng(n), dtype, (19, n, n)),) for n in sizes]
    less = [(smaller(a),) for (a,) in cases]
    for operands, (x, info) in zip(less, ops.on_each(op.with_info, cases, kernel), strict=True):
        np.testing.assert_array_equal(info, 0)
        op.check(operands, ops.times(x, np.array(2.0**-10, x.real.dtype)))


@pytest.mark.parametrize(("op", "kernel", "dtype"), ops.by_kernel(ops.CAN_FAIL), ids=ops.ids)
def test_indefinite_next_to_overflow(op, kernel, dtype):
    """The last pivot is that of [[1, z], [conj(z), 2 |z|]] with a large z; every third matrix."""
    cases = []
    for n in MEAN_SIZES[1:]:
        if not ops.serves(op, kernel, dtype, n):
            continue
        size = 0.45 * float(np.finfo(dtype).max)
        a = np.tile(np.eye(n, dtype=dtype), (19, 1, 1))
        a[::3, n - 1, n - 2] = a[::3, n - 2, n - 1] = size
        if np.iscomplexobj(a):
            a.imag[::3, n - 1, n - 2], a.imag[::3, n - 2, n - 1] = -size, size
        a[::3, n - 1, n - 1] = 2 * size
        cases.append(calls(op, dtype, n, a, nrhs=1))
    for (a, *_), (x, info) in zip(cases, ops.on_each(op.with_info, cases, kernel), strict=True):
        n = a.shape[-1]
        check_pattern(op, x, info, np.where(np.arange(19) % 3 == 0, n, 0))
        np.testing.assert_array_equal(x[1], np.ones((n, 1)) if op.takes_b else np.eye(n))


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("upper", (False, True))
def test_an_average_that_overflows_beside_a_small_diagonal(upper, dtype):
    """Such a matrix is indefinite, in the row of the average or before."""
    large = 0.9 * float(np.finfo(dtype).max)
    cases = []
    for n in (3, 8, 13, 40, 64, 96, 120, 130, 200):
        a = np.tile(np.eye(n, dtype=dtype), (4, 1, 1))
        a[1, n - 1, 0] = a[1, 0, n - 1] = large  # in the last row
        a[2, n // 2, 1] = a[2, 1, n // 2] = -large  # in the middle, and another one later
        a[2, n - 1, 2] = a[2, 2, n - 1] = large
        a[3] = a[1]
        a[3, 0, 0] = -1  # fails before
        cases.append((a,))
    f = lambda a: jb.cholesky(a, upper=upper, return_info=True)  # noqa: E731
    for (a,), (x, info) in zip(cases, ops.on_each(f, cases), strict=True):
        n = a.shape[-1]
        np.testing.assert_array_equal(info, [0, n, n // 2 + 1, 1])
        np.testing.assert_array_equal(x[0], np.eye(n))
        assert np.isnan(np.asarray(x[1:])[:, 0, 0]).all()


def test_values_next_to_overflow():
    single, info = jb.cholesky(np.float32([[2e38]]), return_info=True)
    np.testing.assert_allclose(single, np.sqrt(np.float32([[2e38]])), rtol=1e-7)
    assert info == 0
    indefinite = np.float32([[1, 1.5e38], [1.5e38, 3e38]])
    factor, info = jb.cholesky(indefinite, return_info=True)
    np.testing.assert_array_equal(factor, [[np.nan, 0], [np.nan, np.nan]])
    assert info == 2


def columns_of_means(rng, dtype, n):
    """Matrices whose column k of the factor, one k each, holds the means of column k and row k.

    Numbers of every size, zero and subnormal ones too, whose sums do not overflow. And what they
    are when symmetrized by NumPy.
    """
    form = np.finfo(dtype)
    power = rng.integers(form.minexp - form.nmant, form.maxexp // 4, (2, n, n, n))
    parts = np.ldexp(rng.integers(-9, 10, power.shape), power).astype(form.dtype)
    a = (parts[0] + 1j * parts[1] if np.dtype(dtype).kind == "c" else parts[0]).astype(dtype)
    k = np.arange(n)
    others = (k[:, None, None] != k[:, None]) & (k[:, None, None] != k)
    a[others] = 0
    a[:, k, k] = form.max / 4
    a[k, k, k] = 1
    mean = np.empty_like(a)
    half = form.dtype.type(0.5)
    mean.real = half * (a.real + np.swapaxes(a.real, -1, -2))
    if np.iscomplexobj(a):
        mean.imag = half * (a.imag - np.swapaxes(a.imag, -1, -2))
    return a, mean


@pytest.mark.parametrize(("op", "kernel", "dtype"), ops.by_kernel(MEANS), ids=ops.ids)
def test_means_are_halves_of_sums(op, kernel, dtype):
    """To the bit where sums do not overflow: halves of subnormal numbers would be rounded."""
    sizes = [n for n in MEAN_SIZES if ops.serves(op, kernel, dtype, n)]
    pairs = [columns_of_means(np.random.default_rng(n), dtype, n) for n in sizes]

    def plain(mean):
        return jb.cholesky(mean, upper=op.options["upper"], symmetrize_input=False)

    factors = ops.on_each(op, [(a,) for a, _ in pairs], kernel)
    for x, expected in zip(
        factors, ops.on_each(plain, [(m,) for _, m in pairs], kernel), strict=True
    ):
        assert np.isfinite(x).all()
        assert ops.same_bits(x, expected)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", MEANS, ids=ops.ids)
def test_the_lax_path_next_to_overflow(op, dtype):
    @jax.jit
    def factor(a):
        return cholesky_op.rules.lax(a, upper=op.options["upper"], symmetrize=True, accuracy="ieee")

    for n in (2, 9):
        a = ops.next_to_overflow(np.random.default_rng(n), dtype, (3, n, n))
        x, info = factor(a)
        np.testing.assert_array_equal(info, 0)
        expected, _ = factor(smaller(a))
        op.check((smaller(a),), expected)
        np.testing.assert_allclose(x, 2**10 * expected, rtol=4 * np.finfo(dtype).eps)
    size = 0.45 * np.finfo(dtype).max
    _, info = factor(np.array([[[1, size], [size, 2 * size]]] * 3, dtype))
    np.testing.assert_array_equal(info, 2)


@pytest.mark.parametrize(
    ("op", "kernel", "dtype"), ops.by_kernel(ops.CAN_FAIL, paths=ops.PATHS), ids=ops.ids
)
def test_badly_scaled_rows_keep_their_digits(op, kernel, dtype):
    """D A D with powers of two in D, from tiny to huge: each row of the result is as accurate."""
    for n in (4, 9, 17, 33, 65, 99, 121):
        if not ops.serves(op, kernel, dtype, n):
            continue
        operands = op.operands(dtype, batch=(4,), n=n, nrhs=1, seed=n)
        power = 12 if np.finfo(dtype).bits == 32 else 120
        d = np.ldexp(1.0, np.random.default_rng(n).integers(-power, power, n))
        d = d.astype(np.finfo(dtype).dtype)
        a = ops.times(operands[0], d[:, None] * d)
        b = [y * d[:, None] for y in operands[1:]]
        (x,) = ops.on_each(op, [(a, *b)], kernel)
        op.check(operands, op.kind.unscaled(x, d))


@pytest.mark.parametrize("op", ops.CAN_FAIL, ids=ops.ids)
def test_fast_accuracy_at_every_scale(op):
    """Where numbers are split in two for the tensor cores, the small half may not be lost."""
    cases = []
    for n in (130, 192):
        operands = op.operands("float32", batch=(4,), n=n, nrhs=1, seed=n)
        for power in (-120, -100, -60, 60, 100):
            scale = np.float32(2.0**power)
            cases.append(tuple(ops.times(y, scale) for y in operands))
    for operands, exact, fast in zip(
        cases, ops.on_each(op, cases), ops.on_each(op.fast, cases), strict=True
    ):
        op.check(operands, fast)
        limit = 3 * op.ratios(operands, exact).max() + 2 / operands[0].shape[-1]
        assert op.ratios(operands, fast).max() <= limit


@pytest.mark.parametrize(
    "op", [op for op in ops.CAN_FAIL if not op.options.get("symmetrize_input")], ids=ops.ids
)
def test_fast_accuracy_next_to_overflow(op):
    """Entries from 2^127 on, whose quarter is factored."""
    operands = op.operands("float32", batch=(4,), n=130, nrhs=1, seed=5)
    _, exponent = np.frexp(np.nanmax(np.abs(operands[0])))
    operands = tuple(ops.times(y, np.float32(2.0 ** (128 - exponent))) for y in operands)
    assert 2.0**127 <= np.nanmax(np.abs(operands[0])) < np.inf
    (result,) = ops.on_each(op.fast, [operands])
    op.check(operands, result)


@pytest.mark.parametrize("op", CHOLESKY, ids=ops.ids)
def test_fast_accuracy_of_badly_scaled_rows(op):
    """D A D with powers of two in D: each row of the factor is as accurate."""
    for n in (130, 192, 257):
        (a,) = op.operands("float32", batch=(4,), n=n, seed=n)
        d = np.ldexp(1.0, np.random.default_rng(n).integers(-30, 30, n)).astype(np.float32)
        ((x, info),) = ops.on_each(
            lambda y: op.function(y, **op.options, accuracy="fast", return_info=True),
            [(ops.times(a, d[:, None] * d),)],
        )
        np.testing.assert_array_equal(info, 0)
        op.check((a,), op.kind.unscaled(x, d))


@pytest.mark.parametrize("op", ops.CAN_FAIL, ids=ops.ids)
def test_fast_accuracy_fails_where_ieee_does(op):
    """Pivots that are negative, zero or NaN, and infinities, in a batch with healthy matrices."""

    def both(*operands):
        return [
            op.function(*operands, **op.options, accuracy=accuracy, return_info=True)
            for accuracy in ("ieee", "fast")
        ]

    for n in (130, 192, 257):
        columns = np.array([0, 7, 8, 63, 64, 100, 128, n - 1])
        values = np.array([-1.0, 0.0, np.nan, np.inf])
        a = matrices.spd(np.random.default_rng(n), "float32", (2, len(values), len(columns), n, n))
        for at, value in enumerate(values):
            column = columns if value != np.inf else np.maximum(columns - 3, 0)
            index = np.arange(len(columns))
            a[0, at, index, columns, column] = a[0, at, index, column, columns] = value
        ((exact, fast),) = ops.on_each(both, [calls(op, "float32", n, a.reshape(-1, n, n))])
        np.testing.assert_array_equal(fast[1], exact[1])
        np.testing.assert_array_equal(np.isnan(fast[0]), np.isnan(exact[0]))
        assert exact[1][:24].all()
        assert not exact[1][32:].any()


@pytest.mark.parametrize("n", (1, 4, 8, 9, 17, 33, 65, 121, 130))
def test_subnormal_numbers_are_kept(n):
    """XLA's own CPU threads flush them to zero."""
    tiny = np.float32(1e-40)
    eye = np.eye(n, dtype=np.float32)
    a = np.stack([tiny * eye, np.float32(3e-42) * eye])
    roots = np.sqrt(np.diagonal(a, axis1=-2, axis2=-1))
    for accuracy in ("fast", "ieee"):
        factor, info = jb.cholesky(a, accuracy=accuracy, return_info=True)
        np.testing.assert_array_equal(info, 0)
        np.testing.assert_array_equal(np.diagonal(factor, axis1=-2, axis2=-1), roots)
    b = np.full((2, n, 1), 3 * tiny, np.float32)
    quotient = b / np.diagonal(a, axis1=-2, axis2=-1)[..., None]
    for left in (False, True):
        rhs = b if left else np.swapaxes(b, -1, -2)
        x = np.asarray(jb.triangular_solve(a, rhs, left_side=left, lower=True))
        np.testing.assert_array_equal(x if left else np.swapaxes(x, -1, -2), quotient)
    small = jb.triangular_solve(eye, b[0], left_side=True)
    np.testing.assert_array_equal(small, b[0])
    for solution in (
        jb.solve(a, b, assume_a="pos"),
        jb.cho_solve((factor, True), b),
    ):
        np.testing.assert_allclose(solution, quotient, rtol=1e-6)


def spectrum(rng, dtype, n, condition):
    """Hermitian positive definite matrices Q diag(geometric) Q^H."""
    q, _ = np.linalg.qr(matrices.normal(rng, dtype, (4, n, n)))
    values = np.geomspace(1, 1 / condition, n)
    return (q * values) @ matrices.adjoint(q)


@pytest.mark.parametrize(
    ("op", "kernel", "dtype"), ops.by_kernel(ops.CAN_FAIL, paths=ops.PATHS), ids=ops.ids
)
def test_ill_conditioned_matrices_keep_a_small_residual(op, kernel, dtype):
    eps = np.finfo(dtype).eps
    sizes = [
        n
        for n in (2, 3, 8, 17, 31, 33, 57, 64, 80, 130)
        if ops.serves(op, kernel, dtype, n, one_or_two(n)) and (n <= 64 or kernel != "reference")
    ]
    conditions = np.geomspace(10, 1 / eps, 6)
    cases = []
    for n in sizes:
        rng = np.random.default_rng(n)
        matrices = np.concatenate([spectrum(rng, dtype, n, c) for c in conditions])
        cases.append(calls(op, dtype, n, matrices, one_or_two(n)))
    each = np.repeat(conditions, 4)  # the matrices of a spectrum
    results = ops.on_each(op.with_info, cases, kernel)
    for operands, (x, info), n in zip(cases, results, sizes, strict=True):
        assert not info[each * eps * n < 0.05].any()
        good = info == 0
        op.check([y[good] for y in operands], x[good])


def nearly_singular(n):
    """Positive definite n x n matrices, ones plus a few units of the last place."""
    ones = np.ones((n, n))
    return np.stack([ones + np.diag(np.arange(n) * 2.0**-power) for power in range(6, 20)])


@pytest.mark.parametrize("n", (2, 3))
@pytest.mark.parametrize("op", [*ops.CAN_FAIL, *ops.of("solve_gen")], ids=ops.ids)
def test_nearly_singular_tiny_matrices(op, n):
    """Formulas with cofactors lose all digits here; factorizations keep a small residual."""
    operands = calls(op, "float32", n, nearly_singular(n))
    x, info = op.with_info(*operands)
    assert not info.any()
    op.check(operands, x, largest=5)


def test_the_same_patterns_on_both_kernels_of_a_mixed_batch():
    """Failures of every kind in one batch, in every row: all kernels agree on what fails."""
    rng = np.random.default_rng(9)
    for op, n in itertools.product(ops.CAN_FAIL, (5, 12, 40)):
        a = matrices.spd(rng, "float32", (64, n, n))
        k = rng.integers(0, n, 64)
        values = rng.choice([1.0, -1.0, 0.0, np.nan], 64)
        a[np.arange(64), k, k] *= values
        cases = [calls(op, "float32", n, a)]
        ((plain, plain_info),) = ops.by_reference_kernel(op.with_info, cases)
        np.testing.assert_array_equal(plain_info, np.where(values == 1, 0, k + 1))
        for kernel in ops.KERNELS:
            if ops.serves(op, kernel, "float32", n):
                ((x, info),) = ops.on_each(op.with_info, cases, kernel)
                np.testing.assert_array_equal(info, plain_info)
                np.testing.assert_array_equal(np.isnan(x), np.isnan(plain))


@pytest.mark.parametrize(
    ("change", "shape", "message"),
    (
        ({"accuracy": "exact"}, (3, 3), "accuracy='exact', allowed are 'ieee', 'fast'"),
        ({"upper": 1}, (3, 3), "attribute 'upper' is missing or of another type"),
        ({}, (3, 2), "a: 3 x 2 in place of 3 x 3"),
    ),
)
def test_a_wrong_call_of_the_native_handler_names_what_is_wrong(change, shape, message):
    """What comes from an exported program or another caller passes no check in Python."""
    attributes = {"upper": False, "symmetrize": True, "accuracy": "ieee", "kernel": ""} | change
    results = (jax.ShapeDtypeStruct((3, 3), np.float32), jax.ShapeDtypeStruct((), np.int32))
    call = jax.ffi.ffi_call("jax_batched.cholesky.v1", results)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(np.ones(shape, np.float32), **attributes))
