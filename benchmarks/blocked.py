"""Ways to divide matrices beyond the kernels' range, beside JAX: `python -m benchmarks.blocked`.

The rows go to DEVICE_blocked.jsonl; the variant is the plan, or "jax".
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import jax_batched as jb
from benchmarks import results, timing
from benchmarks.implementations import IMPLEMENTATIONS
from benchmarks.inputs import Inputs
from benchmarks.operations import OPERATIONS
from benchmarks.results import VariantRow
from benchmarks.run import verify
from jax_batched.blocked import Plan
from jax_batched.cholesky import in_blocks as cholesky_in_blocks
from jax_batched.lu import in_blocks as lu_in_blocks
from jax_batched.tune import sizes_of

JAX = "jax"
OURS = IMPLEMENTATIONS["jax_batched"]
PLANS = {
    "cholesky": [
        *(Plan((size,)) for size in (128, 256, 512)),
        Plan((512, 128)),
        Plan((512, 128, 32)),
        Plan((128,), batched=False),
        Plan((128,), "right"),
        Plan((128,), "bordered"),
    ],
    "lu": [
        *(Plan((size,), "bordered") for size in (64, 128, 256)),
        Plan((256, 64), "bordered"),
        Plan((128,), "bordered", batched=False),
        Plan((128,), "right"),
        Plan((128,), "left"),
    ],
}


def call_of(op: str, plan: Plan) -> Callable[[Any], Any]:
    """The operation, divided so."""
    if op == "lu":
        return lambda a: lu_in_blocks(a, plan=plan)[0]
    return lambda a: cholesky_in_blocks(
        a, upper=False, symmetrize=False, accuracy="ieee", plan=plan
    )[0]


def measure(op: str, dtype: str, n: int, batch: int, repetitions: int) -> dict[str, float]:
    """Milliseconds of every plan and of JAX, each tested first."""
    sets = Inputs(dtype, n, batch, 1).sets(OPERATIONS[op].operands, 0)
    calls = {str(plan): call_of(op, plan) for plan in PLANS[op]}
    programs = {}
    for name, call in {**calls, JAX: OPERATIONS[op].calls[JAX]}.items():
        program = OURS.program(call, sets)
        verify(OPERATIONS[op], OURS, sets, program)
        try:
            programs[name] = program, timing.calibrate(program)
        except timing.TooSlowError as error:
            print(f"{op}, {dtype}, n={n}, batch={batch}: {name}: {error}")
    return timing.measure(programs, repetitions)


def markdown(rows: Sequence[VariantRow]) -> Iterator[str]:
    """The lines of a table: the fastest plan of each case, and JAX's time over its."""
    yield "| op | dtype | n | batch | jax, ms | fastest plan | ms | times faster |"
    yield "|---|---|---:|---:|---:|---|---:|---:|"
    cases = sorted({(row["op"], row["dtype"], row["n"], row["batch"]) for row in rows})
    for case in cases:
        op, dtype, n, batch = case
        times = {
            row["variant"]: row["ms"]
            for row in rows
            if (row["op"], row["dtype"], row["n"], row["batch"]) == case
        }
        jaxs = times.pop(JAX, None)
        best = min(times, key=lambda name: times[name])
        ms = times[best]
        compared, ratio = (f"{jaxs:.4g}", f"{jaxs / ms:.2f}") if jaxs else ("-", "-")
        yield f"| {op} | {dtype} | {n} | {batch} | {compared} | {best} | {ms:.4g} | {ratio} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocked", description=__doc__)
    add = parser.add_argument
    dtypes = ["float32", "float64"]
    add("--op", nargs="+", choices=list(PLANS), default=list(PLANS))
    add("--dtype", nargs="+", choices=dtypes, default=dtypes)
    add("--n", nargs="+", type=sizes_of, default=[[1024, 2048, 4096]])
    add("--batch", nargs="+", type=int, default=[1, 4, 16, 64])
    add("--repetitions", type=int, default=timing.MIN_REPETITIONS)
    add("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)
    jb.keep_freed_memory()
    device = results.device_name()
    file = options.output_dir / f"{results.file_stem(device)}_blocked.jsonl"
    sizes = sorted({n for part in options.n for n in part})
    for op, dtype, n, batch in itertools.product(options.op, options.dtype, sizes, options.batch):
        rows: list[VariantRow] = [
            {
                "op": op,
                "impl": JAX if variant == JAX else "jax_batched",
                "dtype": dtype,
                "m": n,
                "n": n,
                "nrhs": 0,
                "batch": batch,
                "variant": variant,
                "ms": float(f"{ms:.5g}"),
                "device": device,
                **results.versions(),
            }
            for variant, ms in measure(op, dtype, n, batch, options.repetitions).items()
        ]
        results.record(file, rows)
    print("\n".join(markdown(results.load(file))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
