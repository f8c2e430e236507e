"""Every CUDA kernel on every operation and dtype, small enough to run under a memory checker.

    export XLA_PYTHON_CLIENT_ALLOCATOR=platform   # one allocation per array: exact bounds
    compute-sanitizer --tool memcheck python tests/memory_check.py
    compute-sanitizer --tool racecheck python tests/memory_check.py

The batches are ragged and the sizes odd, so that a read or write past the end leaves its array.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)

import ops  # noqa: E402
import test_cholesky_pullback as test_pullback  # noqa: E402
import test_lu  # noqa: E402
import test_qr  # noqa: E402
import test_residual  # noqa: E402

import jax_batched as jb  # noqa: E402
from jax_batched._matrices import MAX_RATIO  # noqa: E402
from jax_batched.cholesky_pullback import cholesky_pullback_op  # noqa: E402
from jax_batched.lu import lu_panel_op  # noqa: E402
from jax_batched.residual import residual_op  # noqa: E402

SIZES = {
    "thread": (1, 2, 3, 5, 8, 11),
    "lanes": (9, 16, 17, 23, 30, 32, 33, 48),
    "warp": (3, 9, 16, 17, 23, 32, 33, 48, 50, 64, 81, 100, 128),
    "lanes_shared": (3, 9, 16, 17, 23, 32, 33, 48, 49, 50, 57, 64, 81, 100, 128),
    "warp_tensor": (33, 47, 48, 49, 56, 63, 64, 65, 72),
    "warp_shared": (25, 31, 41, 48, 49, 63, 64, 65, 80, 81, 96, 105, 107, 112, 113, 121, 127, 128),
    "block_shared": (
        3,
        17,
        33,
        47,
        50,
        63,
        64,
        65,
        81,
        89,
        93,
        96,
        97,
        121,
        127,
        128,
        129,
        144,
        159,
        160,
    ),
    "block": (7, 33, 64, 65, 97, 129, 145, 193, 200, 224, 225),
    "warp_streamed": (7, 32, 33, 65, 97, 130, 200, 256, 330, 490),
    "block_rows": (3, 8, 16, 17, 33, 48, 70, 96, 128, 161, 192),
    "block_tensor": (3, 17, 24, 31, 33, 47, 48, 49, 56, 63, 64, 65, 72, 81, 96, 107, 112, 121, 128),
    "block_columns": (3, 17, 33, 70),
    "": (8, 13, 31, 65, 96, 100, 130, 200, 300),
}

# Numbers of right-hand sides, where not 1 and 5: shapes of these kernels serve different ones.
NRHS = {
    "block_rows": (5, 15, 16, 31, 32, 40, 41),
    "block_tensor": (1, 5, 16, 23, 70),
    "warp_tensor": (1, 5, 16, 23, 70),
}

# With accuracy="fast", of float32.
FAST_SIZES = (130, 200)

PULLBACK_SIZES = (1, 3, 8, 13, 16, 31, 32, 33, 50, 64, 77)
LU_SHAPES = (
    *((n, n) for n in (1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 97, 130)),
    *((3, 7), (7, 3), (5, 40), (40, 5), (33, 31), (70, 33), (31, 70), (130, 40), (150, 270)),
)
RESIDUAL_SIZES = (1, 7, 8, 17, 31, 33, 65, 130, 257)


def check_residual(dtype: str, batch: int) -> int:
    """Every kernel of the residual; the number of calls."""
    calls = 0
    for triangle in test_residual.TRIANGLES:
        for n in RESIDUAL_SIZES:
            for nrhs in (1, 5):
                arrays = test_residual.operands(dtype, n, n, nrhs, (batch if n <= 100 else 3,))
                (r,) = residual_op(*arrays, triangle=triangle, absolute=False)
                test_residual.check(r, *arrays, triangle)
                calls += 1
    return calls


def operands(op: ops.Op, dtype: str, batch: int, n: int, nrhs: int) -> tuple[np.ndarray, ...]:
    """Operands of a dtype, also of one of 16 bits."""
    made = op.operands("float32" if dtype in ops.STORED else dtype, batch=(batch,), n=n, nrhs=nrhs)
    return tuple(x.astype(dtype) for x in made)


def check_pullback(dtype: str, batch: int) -> int:
    """Every kernel of the pullback; the number of calls."""
    for flags in test_pullback.FLAGS:
        for n in PULLBACK_SIZES:
            arrays = test_pullback.operands(dtype, n, (batch,), **flags)
            (result,) = cholesky_pullback_op(*arrays, **flags)
            test_pullback.check(result, *arrays, flags)
    return len(test_pullback.FLAGS) * len(PULLBACK_SIZES)


def check_lu(dtype: str, batch: int) -> int:
    """Every kernel of LU and of determinants; the number of calls."""
    calls = 0
    for kernel in test_lu.KERNELS[:-1]:
        for m, n in LU_SHAPES:
            a = test_lu.matrices(dtype, m, n, batch if max(m, n) <= 100 else 3)
            if test_lu.serves(kernel, dtype, m, n):
                ratios = test_lu.checked_ratios(a, *test_lu.run(jb.lu, a, kernel=kernel))
                assert ratios.max() <= MAX_RATIO
                calls += 1
            if m == n and test_lu.serves(kernel, dtype, n, n, ("det", "slogdet")):
                (det,) = test_lu.run(jb.det, a, kernel=kernel)
                sign, log = test_lu.run(jb.slogdet, a, kernel=kernel)
                np.testing.assert_allclose(det, sign * np.exp(log), rtol=0.01)
                calls += 2
    for m, n in ((513, 4), (1100, 20), (2100, 36), (4096, 8)):
        a = test_lu.matrices(dtype, m, n, 2)
        ratios = test_lu.checked_ratios(a, *test_lu.run(lambda a: lu_panel_op(a)[:3], a))
        assert ratios.max() <= MAX_RATIO
        calls += 1
    return calls


def check_qr(dtype: str, batch: int) -> int:
    """Every kernel of QR and of products with Q; the number of calls."""
    calls = 0
    for kernel in test_qr.KERNELS[:-1]:
        for m, n in (*LU_SHAPES, (512, 9), (64, 16)):
            if not test_qr.serves(kernel, dtype, m, n):
                continue
            a = test_qr.matrices(dtype, m, n, batch if max(m, n) <= 100 else 3)
            for mode in ("reduced", "complete"):
                test_qr.check(a, *test_qr.run(lambda a, m=mode: jb.qr(a, m), a, kernel=kernel))
            test_qr.run(lambda a: jb.qr(a, "r"), a, kernel=kernel)
            calls += 4
            h, taus = test_qr.run(lambda a: jb.qr(a, "raw"), a, kernel=kernel)
            if test_qr.serves(kernel, dtype, m, n, ("qr_multiply",)):
                for turned in (False, True):
                    jb.qr_multiply(h.swapaxes(1, 2), taus, a, adjoint=turned).block_until_ready()
                    calls += 1
    return calls


# Operations that have tests of their own, not a row of the table.
OTHERS = {
    "lu": check_lu,
    "qr": check_qr,
    "residual": check_residual,
    "cholesky_pullback": check_pullback,
}


def check(op: ops.Op, run: Callable[..., Any], cases: list[Any], kernel: str = "") -> int:
    """Runs one kernel on some operands of an operation; the number of calls."""
    for case, result in zip(cases, ops.on_each(run, cases, kernel), strict=True):
        op.check(case, result)
    return len(cases)


def check_masked(op: ops.Op, cases: list[Any], kernel: str) -> int:
    """Runs one kernel on some entries of the batches; the number of calls."""

    def run(*case: Any) -> Any:
        where = np.arange(case[0].shape[0]) % 9 < 4
        return op.function(*case, **op.options, where=where)

    for case, result in zip(cases, ops.on_each(run, cases, kernel), strict=True):
        where = np.arange(case[0].shape[0]) % 9 < 4
        op.check(tuple(x[where] for x in case), result[where])
        assert not result[~where].any()
    return len(cases)


def main() -> None:
    """Runs the kernels and checks every matrix of every result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=37)
    parser.add_argument("--dtype", nargs="+", default=[*ops.DTYPES, *ops.STORED])
    names = [*(op.name for op in ops.ONE_EACH), *OTHERS]
    parser.add_argument("--op", nargs="+", default=names, choices=[*ops.BY_NAME, *OTHERS])
    parser.add_argument("--large", action="store_true", help="also 262,144 matrices 16x16 and 2x2")
    arguments = parser.parse_args()
    for name in filter(OTHERS.get, arguments.op):
        for dtype in filter(ops.DTYPES.__contains__, arguments.dtype):
            print(name, dtype, OTHERS[name](dtype, arguments.batch), "calls", flush=True)
    for op in (ops.BY_NAME[name] for name in arguments.op if name not in OTHERS):
        for dtype in arguments.dtype:
            calls = 0
            for kernel, sizes in SIZES.items():
                cases = [
                    operands(op, dtype, arguments.batch if n <= 100 else 3, n, nrhs)
                    for n in sizes
                    for nrhs in (NRHS.get(kernel, (1, 5)) if op.takes_b else (1,))
                    if ops.serves(op, kernel, dtype, n, nrhs)
                ]
                calls += check(op, op, cases, kernel) + check_masked(op, cases[::4], kernel)
            if dtype == "float32" and op.can_fail:
                fast = [operands(op, dtype, 3, n, 1) for n in FAST_SIZES]
                calls += check(op, op.fast, fast)
            print(op.name, dtype, calls, "calls", flush=True)
    if arguments.large:
        for n in (16, 2):
            eye = np.broadcast_to(np.eye(n, dtype=np.float32), (262144, n, n))
            factor = ops.compiled(ops.BY_NAME["cholesky-lower-mean"], eye)
            assert np.array_equal(factor, eye)


if __name__ == "__main__":
    main()
