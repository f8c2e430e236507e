"""The library's limits are those that the rows of the table state on their own."""

import ops
import pytest
from families.cholesky import PULLBACK_MAX_N, is_fused
from families.general import is_one_kernel

from jax_batched import _ffi

SIZES = range(1, 600)
each_dtype = pytest.mark.parametrize("dtype", (*ops.DTYPES, *ops.STORED))


@each_dtype
@pytest.mark.parametrize("op", ops.ONE_EACH, ids=ops.ids)
def test_sizes_with_kernels(op, dtype):
    served = op.max_n if dtype in ops.DTYPES or op.stored_max_n else 0
    assert _ffi.max_n("cpu", op.operation, dtype) == served
    assert _ffi.max_n("cuda", op.operation, dtype) == (served if op.on_cuda else 0)


@pytest.mark.parametrize("op", ops.ONE_EACH, ids=ops.ids)
def test_kernels_of_16_bit_elements(op):
    for n in SIZES:
        for stored in ops.STORED:
            served = _ffi.is_one_kernel("cuda", op.operation, stored, n)
            assert served == (n <= op.stored_max_n)
            assert not (op.takes_b and _ffi.is_one_kernel("cuda", op.operation, stored, n, 2))
            assert not _ffi.is_one_kernel("cpu", op.operation, stored, n)


@each_dtype
def test_sizes_of_a_fused_solve(dtype):
    for nrhs in (1, 2, 16, 17, 1000):
        for n in SIZES:
            served = _ffi.is_one_kernel("cuda", "solve_pos", dtype, n, nrhs)
            assert served == is_fused(dtype, n, nrhs)


@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_sizes_of_general_systems(dtype):
    for n in SIZES:
        assert _ffi.is_one_kernel("cuda", "inv", dtype, n) == is_one_kernel(dtype, n)
        for nrhs in (1, 16, 17, 1000):
            served = _ffi.is_one_kernel("cuda", "solve_gen", dtype, n, nrhs)
            assert served == is_one_kernel(dtype, n, nrhs)


@pytest.mark.parametrize("platform", PULLBACK_MAX_N)
@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_sizes_of_the_pullback(platform, dtype):
    for n in SIZES:
        served = _ffi.is_one_kernel(platform, "cholesky_pullback", dtype, n)
        assert served == (n <= PULLBACK_MAX_N[platform][dtype])


@pytest.mark.parametrize("dtype", ops.DTYPES)
@pytest.mark.parametrize("op", [op for op in ops.ONE_EACH if op.on_cuda], ids=ops.ids)
def test_compiled_kernels_serve_every_size(op, dtype):
    """On any GPU: some row of the table that needs none in particular."""
    tiers = _ffi.cuda_tiers()
    if not tiers:
        pytest.skip("built without CUDA")
    for n in range(1, op.max_n + 1):
        for operation in op.kernels_called(dtype, n, 1):
            assert any(
                (tier.operation, tier.dtype) == (operation, dtype)
                and tier.min_n <= n <= tier.max_n
                and tier.capability <= 80
                and not tier.fast
                for tier in tiers
            ), (operation, n)
