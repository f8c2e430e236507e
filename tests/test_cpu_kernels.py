"""The CPU's kernels: "lanes" and "blocked" give the same bits, on every instruction set."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import ops
import pytest

from jax_batched._ffi import native_module

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 50, 64, 65, 100, 130)
NRHS = (1, 2, 3, 5, 8, 9, 17, 33)
BATCH = 19
CHOLESKY = ops.of("cholesky")
ISAS = native_module("cpu").isas_here()


@pytest.fixture(autouse=True)
def on_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def cases_of(op, dtype, sizes=SIZES, batch=BATCH, nrhs=NRHS):
    """Each size with another number of right-hand sides; every third factorization fails."""
    cases = []
    for i, n in enumerate(sizes):
        a, *b = op.operands(dtype, batch=(batch,), n=n, nrhs=nrhs[i % len(nrhs)], seed=n)
        if op.can_fail:
            a[::3, n // 2, n // 2] = -1
        cases.append((a, *b))
    return cases


def call_of(op):
    return op.with_info if op.can_fail else op


def same(results, others):
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(others), strict=True)
    return all(ops.same_bits(x, y) for x, y in pairs)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_all_kernels_give_the_same_bits(op, dtype):
    cases = cases_of(op, dtype)
    lanes, blocked, chosen = (
        ops.on_each(call_of(op), cases, kernel) for kernel in ("lanes", "blocked", "")
    )
    assert same(lanes, blocked)
    assert same(lanes, chosen)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_unrolled_kernels_give_the_same_bits(op, dtype):
    """Sizes known at compile time, one right-hand side; groups with failures and without."""
    cases = cases_of(op, dtype, range(1, 10), 67, nrhs=(1,))
    cases += [tuple(np.delete(x, slice(None, None, 3), axis=0) for x in case) for case in cases]
    lanes, blocked = (ops.on_each(call_of(op), cases, kernel) for kernel in ("lanes", "blocked"))
    assert same(lanes, blocked)


MEANS = [op for op in ops.of("cholesky") if op.options["symmetrize_input"]]


def overflowing(dtype, sizes=SIZES, batch=BATCH):
    """Sums of both triangles overflow; every third factorization fails."""
    cases = [(ops.next_to_overflow(np.random.default_rng(n), dtype, (batch, n, n)),) for n in sizes]
    for n, (a,) in zip(sizes, cases, strict=True):
        a[::3, n // 2, n // 2] = -1
    return cases


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", MEANS, ids=ops.ids)
def test_all_kernels_give_the_same_bits_next_to_overflow(op, dtype):
    cases = overflowing(dtype)
    lanes, blocked, chosen = (
        ops.on_each(op.with_info, cases, kernel) for kernel in ("lanes", "blocked", "")
    )
    assert same(lanes, blocked)
    assert same(lanes, chosen)
    for (_, info), n in zip(lanes, SIZES, strict=True):
        np.testing.assert_array_equal(info, np.where(np.arange(BATCH) % 3 == 0, n // 2 + 1, 0))


@pytest.mark.parametrize("dtype", ("complex64", "complex128"))
@pytest.mark.parametrize("op", CHOLESKY, ids=ops.ids)
def test_the_diagonal_of_a_factor_has_no_negative_zeros(op, dtype):
    """Equality does not see them."""
    a, *_ = op.operands(dtype, batch=(3,), n=9, seed=0)
    for kernel in ("reference", "lanes", "blocked"):
        (factor,) = ops.on_each(op, [(a,)], kernel)
        diagonal = np.diagonal(factor, axis1=-2, axis2=-1)
        assert not np.signbit(diagonal.imag).any(), kernel


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("kernel", ("lanes", "blocked"))
@pytest.mark.parametrize("op", ops.ONE_EACH, ids=ops.ids)
def test_every_rest_of_a_batch(op, kernel, dtype):
    """Batches from one matrix to more than two groups: the first matrices of the largest."""
    batches = range(1, 36)
    wholes = cases_of(op, dtype, (5, 12), batches[-1])
    cases = [tuple(x[:batch] for x in case) for batch in batches for case in wholes]
    results = ops.on_each(op, cases, kernel)
    for part, whole in zip(results, results[-2:] * len(batches), strict=True):
        assert ops.same_bits(part, whole[: len(part)])


@pytest.mark.parametrize("op", [op for op in ops.ONE_EACH if op.takes_b], ids=ops.ids)
def test_a_column_does_not_depend_on_the_number_of_columns(op):
    for n in (4, 9, 33):
        a, b = op.operands("float32", batch=(5,), n=n, nrhs=20, seed=n)
        (whole,) = ops.on_each(op, [(a, b)])
        for count in (1, 2, 8, 9):
            part = b[..., :count] if op.left_side else b[..., :count, :]
            (x,) = ops.on_each(op, [(a, part)])
            assert ops.same_bits(x, whole[..., :count] if op.left_side else whole[..., :count, :])


def test_an_unknown_kernel_is_an_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match="lanes"):
        ops.on_each(CHOLESKY[0], [(np.eye(3),)], "warp")


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa):
    """In a process of its own: the choice is made when the module loads."""
    program = """
import jax
jax.config.update("jax_enable_x64", True)
import ops, test_cpu_kernels as t
assert t.native_module("cpu").isa() == {isa!r}
for op in ops.WITH_KERNELS:
    for dtype in ops.DTYPES:
        cases = t.cases_of(op, dtype, (1, 3, 8, 13, 17, 33, 65), 5)
        good = [tuple(x[1:3] for x in case) for case in cases]
        results = [ops.on_each(op, good, kernel) for kernel in ("lanes", "blocked", "")]
        assert t.same(results[0], results[1]) and t.same(results[0], results[2]), (op.name, dtype)
        for operands, result in zip(good, results[0], strict=True):
            op.check(operands, result)
        if op.options.get("symmetrize_input"):
            cases = t.overflowing(dtype, (1, 3, 8, 13, 33), 5)
            lanes, blocked = (ops.on_each(op.with_info, cases, k) for k in ("lanes", "blocked"))
            assert t.same(lanes, blocked), (op.name, dtype)
            assert all(info.tolist() == [n // 2 + 1, 0, 0, n // 2 + 1, 0]
                       for (_, info), n in zip(lanes, (1, 3, 8, 13, 33)))
"""
    run_with(isa, program.format(isa=isa))


def test_an_instruction_set_that_is_not_there():
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_with("avx1024", "import jax_batched")
    assert "JAX_BATCHED_ISA=avx1024" in error.value.stderr
    assert "baseline" in error.value.stderr


def run_with(isa, program):
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_BATCHED_ISA": isa, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parent,
        check=True,
        capture_output=True,
        text=True,
    )
