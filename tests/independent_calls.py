"""Independent calls of one operation and their gradients in one program, on two threads.

Run by test_independent_calls.py in a process of its own: `python independent_calls.py ROW...`.
"""

import os
import sys

if hasattr(os, "sched_setaffinity"):  # XLA's pool has a thread for each processor it may use
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])

import jax
import jax.numpy as jnp
import ops

jax.config.update("jax_enable_x64", True)

CALLS = 4
SIZES = ((10_000, 5), (8, 100), (2, 600))


def main(row: str) -> None:
    op = ops.BY_NAME[row]
    for batch, n in SIZES:
        calls = [op.operands("float64", batch=(batch,), n=n, seed=i) for i in range(CALLS)]

        def loss(calls):
            results = [op(*x) for x in calls]
            return sum(jnp.sum(jnp.sin(x)) for x in results), results

        program = jax.jit(jax.grad(loss, has_aux=True))
        for _ in range(6):
            _, results = jax.block_until_ready(program(calls))
        for x, result in zip(calls, results, strict=True):
            op.check(x, result)
        print(row, batch, n, "done", flush=True)


if __name__ == "__main__":
    for row in sys.argv[1:]:
        main(row)
