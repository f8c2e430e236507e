"""Same bits for a matrix whatever the batch, its position, its neighbours and the run."""

import jax
import numpy as np
import ops
import pytest

BATCH = 67
SIZES = (3, 8, 9, 16, 17, 33, 64, 65)
FORCED = (3, 16, 31, 57, 64)


def operands_of(op, dtype, n, batch=BATCH, nrhs=2):
    return op.operands(dtype, batch=(batch,), n=n, nrhs=nrhs, seed=n)


def taken(operands, index):
    return tuple(x[index] for x in operands)


@pytest.mark.parametrize(("op", "kernel", "dtype"), ops.by_kernel(ops.WITH_KERNELS), ids=ops.ids)
def test_alone_or_at_any_position_of_a_batch(op, kernel, dtype):
    """Alone, reversed, rolled, and in batches cut at both ends."""
    orders = [np.arange(BATCH)[::-1], np.roll(np.arange(BATCH), 5), np.arange(7, 40)]
    alone = [np.array([i]) for i in (0, 1, 31, 32, 33, BATCH - 1)]
    for n in SIZES if kernel == "" else FORCED:
        if not ops.serves(op, kernel, dtype, n, nrhs=2):
            continue
        operands = operands_of(op, dtype, n)
        cases = [taken(operands, index) for index in (*orders, *alone)]
        whole, *parts = ops.on_each(op, [operands, *cases], kernel)
        for index, part in zip((*orders, *alone), parts, strict=True):
            assert ops.same_bits(part, whole[index])


@pytest.mark.parametrize("op", ops.ONE_EACH, ids=ops.ids)
def test_every_batch_size(op):
    for n in (4, 9, 33):
        operands = operands_of(op, "float32", n, nrhs=1)
        cases = [taken(operands, slice(size)) for size in range(1, BATCH + 1)]
        *parts, whole = ops.on_each(op, cases)
        for part in parts:
            assert ops.same_bits(part, whole[: len(part)])


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", ops.ONE_EACH, ids=ops.ids)
def test_batches_spread_over_all_threads(op, dtype):
    """Large enough that the CPU splits the batch into tasks; each entry repeats one of 67."""
    for n, repeats in ((3, 300), (16, 30), (40, 9)):
        operands = operands_of(op, dtype, n)
        index = np.random.default_rng(n).integers(0, BATCH, BATCH * repeats)
        whole, many = ops.on_each(op, [operands, taken(operands, index)])
        assert ops.same_bits(many, whole[index])


@pytest.mark.parametrize("op", ops.ONE_EACH, ids=ops.ids)
def test_beyond_the_fused_sizes(op):
    for n in (129, 200, 512):
        operands = operands_of(op, "float32", n, batch=3)
        whole, alone, last = ops.on_each(
            op, [operands, taken(operands, slice(1)), taken(operands, [2])]
        )
        assert ops.same_bits(alone, whole[:1])
        assert ops.same_bits(last, whole[2:])


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_repeated_runs(op, dtype):
    operands = operands_of(op, dtype, 24, batch=1000)
    run = jax.jit(op)
    first = run(*operands)
    for _ in range(5):
        assert ops.same_bits(run(*operands), first)


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", ops.WITH_KERNELS, ids=ops.ids)
def test_vmap_is_the_batch(op, dtype):
    for n in (5, 16, 33):
        operands = operands_of(op, dtype, n, batch=6)
        mapped = jax.jit(jax.vmap(op))(*operands)
        assert ops.same_bits(mapped, jax.jit(op)(*operands))


@pytest.mark.parametrize("op", ops.CAN_FAIL, ids=ops.ids)
def test_results_do_not_depend_on_asking_for_info(op):
    operands = operands_of(op, "float32", 20)
    assert ops.same_bits(op(*operands), op.with_info(*operands)[0])


@pytest.mark.parametrize("op", ops.CAN_FAIL, ids=ops.ids)
def test_fast_accuracy_is_deterministic_too(op):
    for n in (4, 9, 33, 64, 100, 130, 192):
        operands = operands_of(op, "float32", n)
        index = np.array([66, 0, 31, 32, 5])
        whole, part = ops.on_each(op.fast, [operands, taken(operands, index)])
        assert ops.same_bits(part, whole[index])
