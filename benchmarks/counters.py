"""What limits the kernels: counters of NVIDIA's profiler, `python -m benchmarks.counters`.

Runs every case below once under Nsight Compute (`ncu`, which must be installed and allowed to read
counters). The rows go to DEVICE_counters.jsonl.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from benchmarks import results
from benchmarks.inputs import Inputs, filling
from benchmarks.operations import OPERATIONS
from benchmarks.results import CounterRow

KERNELS = r"regex:^(cholesky|solve_pos)_\w+_kernel$|_substitution$"
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# What a warp that issues nothing waits for, by the profiler's name.
STALLS = {
    "barrier": "other warps",
    "branch_resolving": "branches",
    "dispatch_stall": "dispatch",
    "drain": "stores at the end",
    "imc_miss": "constants",
    "lg_throttle": "the queue of global memory",
    "long_scoreboard": "global memory",
    "math_pipe_throttle": "an arithmetic pipe",
    "mio_throttle": "the queue of shared memory",
    "no_instruction": "instructions",
    "not_selected": "its turn",
    "short_scoreboard": "shared memory, shuffles",
    "wait": "fixed latency",
}
# What is recorded, and the counter that holds it.
COUNTERS = {
    "us": "gpu__time_duration.sum",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "shared": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "fma": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "fp64": "sm__pipe_fp64_cycles_active.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.per_cycle_active",
    "registers": "launch__registers_per_thread",
}


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel."""

    op: str
    dtype: str
    n: int
    nrhs: int = 1
    impl: str = "jax_batched"

    def batch(self) -> int:
        """The usual size of a batch."""
        target = int(results.usual_mebibytes(self.n, cpu=False) * 2**20)
        return filling(self.dtype, self.n, target)

    def run(self) -> None:
        """The operation, once."""
        operation = OPERATIONS[self.op]
        inputs = Inputs(self.dtype, self.n, self.batch(), 1)
        (operands,) = inputs.sets(operation.operands, operation.nrhs(self.nrhs))
        jax.block_until_ready(jax.jit(operation.calls[self.impl])(*operands))


CASES = (
    *(Launch("cholesky", "float32", n) for n in (32, 64, 96, 128, 192, 255, 256, 512)),
    Launch("cholesky", "float32", 256, impl="jax_batched:fast"),
    *(Launch("cholesky", "float64", n) for n in (64, 128, 256)),
    *(Launch("cholesky", "float16", n) for n in (32, 48, 64)),
    *(Launch("solve_pos", "float32", n) for n in (64, 96, 128)),
    *(Launch("solve_pos", "float64", n) for n in (64, 96, 128)),
    *(Launch("cho_solve", "float32", n) for n in (16, 64, 128)),
    *(Launch("cho_solve", "float64", n) for n in (64, 128)),
    *(Launch("cho_solve", dtype, 64, nrhs=64) for dtype in ("float32", "float64")),
    *(Launch("triangular_solve", "float32", n) for n in (8, 16, 64)),
    *(Launch("triangular_solve", "float64", n) for n in (8, 64)),
)


def profile(profiler: str) -> list[dict[str, str]]:
    """One line of counters for each launch of one of our kernels, in order."""
    metrics = [*COUNTERS.values(), *map(STALLED.format, STALLS)]
    command = [profiler, "--clock-control", "none", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "--kernel-name", KERNELS, "--metrics", ",".join(metrics)]
    command += [sys.executable, "-m", "benchmarks.counters", "--run"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or start is None:
        raise SystemExit(f"ncu failed, status {done.returncode}:\n{done.stdout[-2000:]}")
    return list(csv.DictReader([lines[start], *lines[start + 2 :]]))  # the next line holds units


def number(text: str) -> float:
    """A counter's value."""
    return float(text.replace(",", ""))


def row(case: Launch, line: dict[str, str], device: str) -> CounterRow:
    """One measurement."""
    values = {key: number(line[metric]) for key, metric in COUNTERS.items()}
    values["us"] /= 1000
    waiting = {name: number(line[STALLED.format(name)]) for name in STALLS}
    total = sum(waiting.values()) + 1  # and the warp that issues
    largest = sorted(waiting, key=lambda name: -waiting[name])[:3]
    return {
        "op": case.op,
        "impl": case.impl,
        "dtype": case.dtype,
        "m": case.n,
        "n": case.n,
        "nrhs": OPERATIONS[case.op].nrhs(case.nrhs),
        "batch": case.batch(),
        "kernel": re.sub(r"<.*|\(.*", "", line["Kernel Name"]).split("::")[-1].split()[-1],
        "counters": {key: float(f"{value:.4g}") for key, value in values.items()},
        "waiting": {name: round(100 * waiting[name] / total) for name in largest},
        "device": device,
        **results.versions(),
    }


def markdown(rows: Sequence[CounterRow]) -> Iterator[str]:
    """The lines of a table; all but the time and the warps in percent."""
    yield (
        "| operation | dtype | n | rhs | kernel | µs | issue | shared | FMA | FP64 | tensor "
        "| memory | warps | registers | warps wait for |"
    )
    yield "|---|---|---:|---:|---|" + "---:|" * 9 + "---|"
    for r in rows:
        name = r["op"] + (', "fast"' if r["impl"].endswith("fast") else "")
        c = {key: f"{value:.0f}" for key, value in r["counters"].items()}
        waits = ", ".join(f"{STALLS[name]} {share} %" for name, share in r["waiting"].items())
        yield (
            f"| {name} | {r['dtype']} | {r['n']} | {r['nrhs'] or ''} | `{r['kernel']}` | {c['us']} "
            f"| {c['issue']} | {c['shared']} | {c['fma']} | {c['fp64']} | {c['tensor']} "
            f"| {c['memory']} | {c['warps']} | {c['registers']} | {waits} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counters", description=__doc__)
    parser.add_argument("--run", action="store_true", help="only run the cases, to be profiled")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)
    # Memory for the profiler and for the process that it runs.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.run:
        for case in CASES:
            case.run()
        return 0
    profiler = shutil.which("ncu")
    if profiler is None or jax.default_backend() != "gpu":
        parser.error("needs a GPU, and ncu on the path")
    lines = profile(profiler)
    if len(lines) != len(CASES):
        raise SystemExit(f"{len(lines)} launches of {len(CASES)} cases: not one kernel each")
    device = results.device_name()
    rows = [row(case, line, device) for case, line in zip(CASES, lines, strict=True)]
    results.record(options.output_dir / f"{results.file_stem(device)}_counters.jsonl", rows)
    print("\n".join(markdown(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
