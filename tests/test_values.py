"""Plain calls, eager and compiled: every operation, option, dtype, size and kernel."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import ops
import pytest

import jax_batched as jb
from jax_batched import _matrices as matrices

# Around the edges of the kernels' tiers and blocks.
SHORT = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33, 47, 64, 65)
SMALL = (*range(1, 10), 12, 13, *range(15, 18), 24, 25, *range(31, 34), 40, 41, *range(47, 50))
MEDIUM = (56, 57, *range(63, 66), 80, 81, 96, 97, 100, 104, 105, 112, 113)
MEDIUM += (*range(127, 131), 160, 161)
LARGE = (192, 200, 255, 256, 257, 511, 512, 513)
FORCED_LARGE = (193, 257, 512)
NRHS = (1, 2, 3, 8, 17, 33, None)
BATCHES = (1, 31, 33)


def calls(op, dtype, sizes, kernel=""):
    """Operands for each size: ragged batches of small ones, right-hand sides of each number."""
    sizes = [n for n in sizes if ops.serves(op, kernel, dtype, n)]
    rows = zip(sizes, itertools.cycle(BATCHES), itertools.cycle(NRHS), strict=False)
    return [
        op.operands(
            dtype, batch=(batch if n <= 64 else 3 if n < 256 else 1,), n=n, nrhs=nrhs or n, seed=n
        )
        for n, batch, nrhs in rows
        if ops.serves(op, kernel, dtype, n, nrhs or n)
    ]


def check_sizes(op, dtype, sizes, kernel):
    cases = calls(op, dtype, sizes, kernel)
    assert cases
    for operands, result in zip(cases, ops.on_each(op, cases, kernel), strict=True):
        op.check(operands, result)


@pytest.mark.every_row
@pytest.mark.parametrize(
    ("op", "kernel", "dtype"), ops.by_kernel(ops.TABLE, paths=ops.PATHS), ids=ops.ids
)
def test_every_option(op, dtype, kernel):
    # What is made of other operations is slow to compile.
    check_sizes(op, dtype, SHORT if op.kernels else (1, 3, 9, 33), kernel)


@pytest.mark.parametrize(
    ("op", "kernel", "dtype"),
    ops.by_kernel(ops.WITH_KERNELS, SMALL + MEDIUM, paths=ops.PATHS),
    ids=ops.ids,
)
def test_sizes_around_every_edge(op, dtype, kernel):
    check_sizes(op, dtype, SMALL + MEDIUM, kernel)


@pytest.mark.parametrize(
    ("op", "kernel", "dtype"),
    ops.by_kernel(ops.ONE_EACH, FORCED_LARGE, paths=ops.PATHS),
    ids=ops.ids,
)
def test_large_sizes(op, dtype, kernel):
    check_sizes(op, dtype, LARGE if kernel == "" else FORCED_LARGE, kernel)


@pytest.mark.parametrize("dtype", ("float32", "complex64"))
@pytest.mark.parametrize("op", ops.CAN_FAIL[::2], ids=ops.ids)
def test_beyond_the_kernels_unread_entries_may_be_nan(op, dtype):
    operands = op.operands(dtype, batch=(2,), n=520, nrhs=2)
    op.check(operands, op(*operands))


@pytest.mark.parametrize(
    ("op", "kernel", "dtype"),
    ops.by_kernel(ops.SUBSTITUTING, (5, 33), paths=ops.PATHS),
    ids=ops.ids,
)
def test_every_number_of_right_hand_sides(op, dtype, kernel):
    cases = [
        op.operands(dtype, batch=(3,), n=n, nrhs=nrhs, seed=nrhs)
        for n, counts in ((5, (*range(1, 10), 16, 17, 31, 33, 64, 65)), (33, (1, 4, 9, 32, 129)))
        for nrhs in counts
        if ops.serves(op, kernel, dtype, n, nrhs)
    ]
    assert cases
    for operands, result in zip(cases, ops.on_each(op, cases, kernel), strict=True):
        op.check(operands, result)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", ops.of("triangular_solve") + ops.of("cho_solve"), ids=ops.ids)
def test_every_kernel_of_a_substitution_gives_the_same_bits(op, dtype, needs_gpu):
    """One may replace another that needs more shared memory than the device has."""
    sizes = (3, 8, 17, 31, 33, 50, 65, 96, 100, 128, 161, 192)
    known = {}
    for kernel in ("block_columns", *ops.KERNELS):
        shapes = [
            (n, nrhs)
            for n, nrhs in (*itertools.product(sizes, (1, 5, 16, 33)), (33, 23))
            if ops.serves(op, kernel, dtype, n, nrhs)
        ]
        cases = [op.operands(dtype, batch=(3,), n=n, nrhs=k, seed=n) for n, k in shapes]
        for shape, result in zip(shapes, ops.on_each(op, cases, kernel), strict=True):
            assert ops.same_bits(result, known.setdefault(shape, result))


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_close_to_the_reference_kernel_and_to_numpy(op, dtype):
    cases = calls(op, dtype, (1, 2, 3, 7, 8, 13, 16, 17, 32, 33, 50, 64, 65, 100))
    for operands, result, plain in zip(
        cases, ops.on_each(op, cases), ops.by_reference_kernel(op, cases), strict=True
    ):
        # The inputs are well conditioned, so a backward error is a forward error.
        scale = operands[0].shape[-1] * np.finfo(dtype).eps * np.abs(matrices.wide(plain)).max()
        assert np.abs(matrices.wide(result) - matrices.wide(plain)).max() <= 30 * scale
        assert np.abs(matrices.wide(result) - op.reference(*operands)).max() <= 30 * scale


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_eager_is_compiled_bit_for_bit(op, dtype):
    operands = op.operands(dtype, batch=(2, 3), n=11, nrhs=2)
    result = op(*operands)
    assert isinstance(result, jax.Array)
    op.check(operands, result)
    assert ops.same_bits(result, jax.jit(op)(*operands))


@pytest.mark.parametrize(
    ("op", "kernel", "stored"),
    ops.by_kernel(ops.WITH_KERNELS, dtypes=ops.STORED, paths=ops.PATHS),
    ids=ops.ids,
)
def test_half_precision_is_float32_rounded_once(op, kernel, stored):
    """Bit for bit. (A kernel of 16-bit elements without one of float32: against the default.)

    Where there is no kernel of 16-bit elements, it is that of float32 between casts.
    """
    own = op.stored_max_n and jax.default_backend() == "gpu"
    sizes = (*SHORT, 40, 48, 49, 56) if own else (1, 9, 33, 65)
    served = [
        (n, nrhs)
        for n in (*sizes, 64, 96, 97)
        for nrhs in (1, 3)
        if ops.serves(op, kernel, stored, n, nrhs)
    ]
    assert served
    cases = [
        tuple(x.astype(stored) for x in op.operands("float32", batch=(33,), n=n, nrhs=k, seed=n))
        for n, k in served
    ]
    wide = [tuple(x.astype(np.float32) for x in operands) for operands in cases]
    same = all(ops.serves(op, kernel, "float32", n, nrhs) for n, nrhs in served)
    exact = ops.on_each(op, wide, kernel if same else "")
    for operands, result, full in zip(cases, ops.on_each(op, cases, kernel), exact, strict=True):
        op.check(operands, result)
        assert ops.same_bits(result, full.astype(stored))


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", ops.CAN_FAIL, ids=ops.ids)
def test_fast_accuracy_is_within_three_times_ieee(op, dtype):
    cases = [
        op.operands(dtype, batch=(64 if n <= 32 else 8 if n <= 200 else 2,), n=n, nrhs=2, seed=n)
        for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 65, 128, 129, 192, 200, 257, 384)
    ]
    for operands, exact, fast in zip(
        cases, ops.on_each(op, cases), ops.on_each(op.fast, cases), strict=True
    ):
        op.check(operands, fast)
        n = operands[0].shape[-1]
        limit = 3 * op.ratios(operands, exact).max() + 2 / n  # 2 / n: 2 eps ||A||
        assert op.ratios(operands, fast).max() <= limit


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_cho_factor_and_cho_solve_go_together(dtype):
    for lower in (False, True):
        op = ops.of("solve_pos")[lower]
        a, b = op.operands(dtype, batch=(4,), n=9, nrhs=2)
        factor, flag = jb.cho_factor(a, lower=lower)
        assert flag is lower
        assert ops.same_bits(factor, jb.cholesky(a, upper=not lower, symmetrize_input=False))
        op.check((a, b), jb.cho_solve((factor, flag), b))


@pytest.mark.parametrize("op", ops.SOLVING, ids=ops.ids)
def test_a_vector_is_one_right_hand_side(op):
    a, b = op.operands("float64", batch=(3,), n=6, nrhs=1)
    vector = b[0].reshape(6)
    x = op(a, vector)
    assert x.shape == (3, 6)
    column = (vector[:, None] if op.left_side else vector[None, :]) + np.zeros((3, 1, 1))
    op.check((a, column), np.asarray(x).reshape(column.shape))
    single = op(a[0], vector)
    assert single.shape == (6,)
    assert ops.same_bits(single, x[0])


def test_two_right_hand_sides_of_a_small_positive_definite_system():
    a = jnp.array([[[4.0, 1], [1, 3]]] * 2)
    b = jnp.array([[[1.0, 2], [3, 4]]] * 2)
    x = jb.solve(a, b, assume_a="pos")
    expected = np.array([[[0, 2 / 11], [1, 14 / 11]]] * 2)
    np.testing.assert_allclose(x, expected, rtol=1e-15, atol=1e-16)


@pytest.mark.parametrize("dtype", ("complex64", "complex128"))
def test_every_transpose_and_conjugate_of_a_complex_matrix(dtype):
    """All of N, T, C and the conjugate without a transpose, against the matrix written out."""
    rng = np.random.default_rng(3)
    z = matrices.normal(rng, dtype, (2, 3, 3))
    a = np.linalg.cholesky(z @ matrices.adjoint(z) + 3 * np.eye(3)).astype(dtype)
    b = matrices.normal(rng, dtype, (2, 3, 2)).astype(dtype)
    forms = {
        (False, False): a,
        (True, False): np.swapaxes(a, -1, -2),
        (True, True): matrices.adjoint(a),
        (False, True): np.conj(a),
    }
    for (transpose, conjugate), m in forms.items():
        flags = {"lower": True, "transpose_a": transpose, "conjugate_a": conjugate}
        x = np.asarray(jb.triangular_solve(a, b, left_side=True, **flags))
        np.testing.assert_allclose(m @ x, b, atol=1e-5 if dtype == "complex64" else 1e-13)
    for trans, m in (("N", a), ("T", forms[True, False]), ("C", matrices.adjoint(a))):
        x = np.asarray(jb.solve_triangular(a, b, trans=trans, lower=True))
        np.testing.assert_allclose(m @ x, b, atol=1e-5 if dtype == "complex64" else 1e-13)
