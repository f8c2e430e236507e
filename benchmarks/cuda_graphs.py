"""20 small solves with and without CUDA graphs. Needs a GPU.

`python -m benchmarks.cuda_graphs docs/compatibility.md` fills the section `graphs` of the document.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_batched as jb
from benchmarks import documents, results


class Way(NamedTuple):
    """How a process runs."""

    name: str
    flag: str  # of XLA
    environment: dict[str, str]


WAYS = {
    "on": Way("on", "", {}),
    "off": Way("off", "--xla_gpu_enable_command_buffer=", {}),
    "full": Way(
        "on, 95 % of the memory preallocated",
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
        # Two at a time: XLA records sequences of at least five launches.
        return jax.lax.scan(lambda x, _: (step(step(x)), None), x, None, length=STEPS // 2)[0]

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
            "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text {WAYS[way].flag}",
            **WAYS[way].environment,
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


def table() -> Iterator[str]:
    """A row for each way; ends the program where one is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {way: run(way, Path(folder)) for way in WAYS}
    yield results.stamp(results.device_name(), results.versions())
    yield ""
    yield "| graphs | captured | " + " | ".join(PROGRAMS) + " |"
    yield "|---|---|" + "---:|" * len(PROGRAMS)
    for way, ran in runs.items():
        if ran.captured != (way != "off"):
            raise SystemExit(f"graphs {way}: captured is {ran.captured}")
        for name in PROGRAMS:
            expected = runs["off"].solutions[name]
            if not (np.isfinite(expected).all() and np.array_equal(ran.solutions[name], expected)):
                raise SystemExit(f"graphs {way}: {name} has other bits than without")
        times = " | ".join(f"{ran.seconds[name] * 1e6:.0f} us" for name in PROGRAMS)
        yield f"| {WAYS[way].name} | {'yes' if ran.captured else 'no'} | {times} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the ways and fill one document."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_graphs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("document", type=Path, nargs="?", help="a Markdown file")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        measure(options.measure)
    elif options.document:
        documents.fill(options.document, {"graphs": table})
    else:
        parser.error("which document?")


if __name__ == "__main__":
    main()
