"""20 small solves with and without CUDA graphs: `python -m benchmarks.cuda_graphs`. Needs a GPU.

Each way runs in a process of its own, so that the first call is the first one in a capture, too:
kernels are loaded lazily. "full" is with graphs and 95 % of the memory preallocated, which leaves
little to the driver for kernels and graphs; no other process may be using the GPU then.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_batched as jb
from benchmarks import results

# XLA's flags and the environment of each way.
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "on": ("", {}),
    "off": ("--xla_gpu_enable_command_buffer=", {}),
    "full": (
        "",
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"},
    ),
}
PROGRAMS = ("unrolled", "loop")
STEPS = 20
CALLS = 20
REPETITIONS = 7


class Run(NamedTuple):
    """What one way gave."""

    captured: bool  # the programs that XLA dumped hold a command buffer
    solutions: dict[str, np.ndarray]
    seconds: dict[str, float]  # median of one call


def measure(file: Path) -> None:
    """Run both programs in this process; results and times into a file."""
    rng = np.random.default_rng(0)
    square = rng.normal(size=(1000, 8, 8)).astype("float32")
    a = jnp.asarray(square @ np.swapaxes(square, 1, 2) + 8 * np.eye(8, dtype="float32"))
    b = jnp.asarray(rng.normal(size=(1000, 8, 1)).astype("float32"))

    def step(x: jax.Array) -> jax.Array:
        factor = jb.cholesky(a, symmetrize_input=False)
        return jb.cho_solve((factor, True), x) + jb.solve(a, x, assume_a="pos", lower=True)

    def unrolled(x: jax.Array) -> jax.Array:
        for _ in range(STEPS):
            x = step(x)
        return x

    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (step(x), None), x, None, length=STEPS)[0]

    measured: dict[str, Any] = {}
    for f in (unrolled, loop):
        program = jax.jit(f).lower(b).compile()
        measured[f.__name__] = np.asarray(program(b))
        times = []
        for _ in range(REPETITIONS):
            start = time.perf_counter()
            outputs = [program(b) for _ in range(CALLS)]
            jax.block_until_ready(outputs)
            times.append((time.perf_counter() - start) / CALLS)
        measured[f"{f.__name__}-seconds"] = np.median(times)
    np.savez(file, **measured)


def run(way: str, folder: Path) -> Run:
    """Run one way in a fresh process."""
    flag, environment = WAYS[way]
    dump = folder / way
    file = folder / f"{way}.npz"
    source = Path(jb.__file__).parents[1]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.cuda_graphs", "--measure", str(file)],
        check=True,
        cwd=Path(__file__).parents[1],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]),
            "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text {flag}",
            **environment,
        },
    )
    # The place of a command buffer is the schedule of thunks or, in older versions, the program.
    dumped = [*dump.glob("*thunk_sequence*"), *dump.glob("*after_optimizations.txt")]
    if not dumped:
        raise FileNotFoundError(f"XLA dumped no program to {dump}")
    buffer = re.compile(r"kCommandBuffer|^%?command_buffer", re.MULTILINE)
    with np.load(file) as measured:
        return Run(
            any(buffer.search(path.read_text()) for path in dumped),
            {name: measured[name] for name in PROGRAMS},
            {name: float(measured[f"{name}-seconds"]) for name in PROGRAMS},
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the ways and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda_graphs", description=__doc__)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        measure(options.measure)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        runs = {way: run(way, Path(folder)) for way in WAYS}
    print(f"{results.device_name()}; {STEPS} steps of batch 1,000, n = 8, float32")
    print("| graphs | captured | " + " | ".join(f"{name}, us" for name in PROGRAMS) + " | bits |")
    print("|---|---|" + "---:|" * len(PROGRAMS) + "---|")
    wrong = False
    for way, ran in runs.items():
        equal = all(
            np.isfinite(ran.solutions[name]).all()
            and np.array_equal(ran.solutions[name], runs["off"].solutions[name])
            for name in PROGRAMS
        )
        wrong |= not equal or ran.captured != (way != "off")
        times = " | ".join(f"{ran.seconds[name] * 1e6:.1f}" for name in PROGRAMS)
        print(f"| {way} | {ran.captured} | {times} | {'equal' if equal else 'DIFFER'} |")
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
