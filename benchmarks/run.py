"""Measure operations and record the results: `python -m benchmarks.run --help`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import jax_batched as jb
from benchmarks import results, timing
from benchmarks.implementations import (
    IMPLEMENTATIONS,
    USUAL_IMPLEMENTATIONS,
    Implementation,
    Program,
    on_cpu,
    release_memory,
    torch_installed,
)
from benchmarks.inputs import Inputs, filling
from benchmarks.operations import OPERATIONS, USUAL_OPERATIONS, Operation
from benchmarks.plot import write_pictures
from benchmarks.table import OURS
from jax_batched._matrices import MAX_RATIO
from jax_batched._tuning import calls
from jax_batched.tune import sizes_of

SAMPLE = 100  # systems of a batch whose results are tested
STORED = ("float16", "bfloat16")  # no peer takes them


class WrongResultError(Exception):
    """An implementation's result fails LAPACK's test."""


@dataclass(frozen=True)
class Case:
    """What one line of the printed table measures."""

    op: str
    dtype: str
    n: int
    nrhs: int
    batch: int

    def __str__(self) -> str:
        rhs = f" nrhs={self.nrhs}" if self.nrhs else ""
        return f"{self.op} {self.dtype} n={self.n}{rhs} batch={self.batch}"


def right_hand_sides(text: str) -> int | str:
    """A number of right-hand sides, or "n" for as many as the matrix has rows."""
    return text if text == "n" else int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Time batched operations and their peers."
    )
    add = parser.add_argument
    dtypes = ["float32", "float64", "complex64", "complex128", *STORED]
    add(
        "--op",
        nargs="+",
        choices=OPERATIONS,
        default=USUAL_OPERATIONS,
        metavar="OP",
        help=f"operations of {', '.join(OPERATIONS)} (default: {', '.join(USUAL_OPERATIONS)})",
    )
    add(
        "--dtype",
        nargs="+",
        choices=dtypes,
        default=["float32", "float64"],
        metavar="DTYPE",
        help="data types (default: float32 float64)",
    )
    add(
        "--n",
        nargs="+",
        type=sizes_of,
        default=[[4, 8, 16, 32, 64, 128]],
        help="sizes: 4,8,16 or ranges as Python's, 1:65 or 8:513:8 (default: 4,8,16,32,64,128)",
    )
    add(
        "--nrhs",
        nargs="+",
        type=right_hand_sides,
        default=[1],
        help='numbers of right-hand sides, or "n" (default: 1)',
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--batch", nargs="+", type=int, help="numbers of systems, whatever their size"
    )
    size.add_argument(
        "--mebibytes",
        type=float,
        help="the size of all matrices together, and of "
        f"the copy (default: 512 on a GPU, from n = {calls.LARGE_N} on "
        f"{calls.LARGE_MEBIBYTES}; 64 on a CPU)",
    )
    add(
        "--impl",
        nargs="+",
        choices=IMPLEMENTATIONS,
        metavar="IMPL",
        help=f"implementations of {', '.join(IMPLEMENTATIONS)} (default: those installed of "
        f"{', '.join(USUAL_IMPLEMENTATIONS)})",
    )
    add("--repetitions", type=int, default=7, help="timed repetitions, at least 7 (default: 7)")
    add(
        "--output-dir",
        type=Path,
        default=Path(__file__).parent / "results",
        help="where the results file and the pictures go (default: benchmarks/results)",
    )
    add("--no-plots", action="store_true", help="write no pictures")
    add(
        "--fresh-memory",
        action="store_true",
        help="on a CPU: as in a default process, in which every large array is fresh memory; the "
        "results go to DEVICE_fresh-memory.jsonl (default: the process keeps what it frees)",
    )
    add("--suffix", help="of the results file: DEVICE_SUFFIX.jsonl (default: none)")
    add("--label", help="the device's name in the results (default: what the system says)")
    options = parser.parse_args(arguments)
    if options.fresh_memory and not options.suffix:
        options.suffix = "fresh-memory"
    if options.repetitions < timing.MIN_REPETITIONS:
        parser.error(f"--repetitions must be at least {timing.MIN_REPETITIONS}")
    options.n = sorted({n for part in options.n for n in part})
    if not options.n or options.n[0] < 1 or min(options.batch or [1]) < 1:
        parser.error("--n and --batch must be at least 1")
    return options


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """All cases, those that share their inputs one after the other."""
    for dtype in options.dtype:
        for n in options.n:
            for batch in options.batch or [filling(dtype, n, target_bytes(options, n))]:
                for op in options.op:
                    wanted = [OPERATIONS[op].nrhs(n if k == "n" else k) for k in options.nrhs]
                    for nrhs in dict.fromkeys(wanted):
                        yield Case(op, dtype, n, nrhs, batch)


def target_bytes(options: argparse.Namespace, n: int) -> int:
    """The memory to fill with matrices, or with sets of them where the batch is given."""
    usual = results.usual_mebibytes(1 if options.batch else n, cpu=on_cpu())
    return int((options.mebibytes or usual) * 2**20)


def results_file(options: argparse.Namespace) -> Path:
    """Where the measurements go."""
    stem = results.file_stem(options.label or results.device_name())
    suffix = f"_{options.suffix}" if options.suffix else ""
    return Path(options.output_dir) / f"{stem}{suffix}.jsonl"


def time_text(ms: float) -> str:
    """A time in the unit that suits it."""
    return f"{ms:.4g} ms" if ms >= 1 else f"{1e3 * ms:.4g} µs"


def verify(
    op: Operation, impl: Implementation, sets: Sequence[tuple[jax.Array, ...]], program: Program
) -> None:
    """Test the results for systems spread over the batch, with the first and the last."""
    outputs = program.run()
    program.wait(outputs)
    batch, dtype = sets[0][0].shape[0], sets[0][0].dtype
    index = np.unique(np.linspace(0, batch - 1, SAMPLE).astype(np.int64))
    for operands, output in zip(sets, outputs, strict=True):
        known = [np.asarray(operand[index]) for operand in operands]
        wide = [
            np.asarray(x, np.result_type(x, np.float64))
            for x in (*known, impl.sample(output, index))
        ]
        ratio = op.ratio(float(jnp.finfo(dtype).eps), *wide)  # type: ignore[no-untyped-call]
        if not np.all(ratio <= MAX_RATIO):
            bad = int(np.argmin(ratio <= MAX_RATIO))
            raise WrongResultError(
                f"wrong result: ratio {ratio[bad]:.3g} for matrix {index[bad]} of {batch}"
            )


class Session:
    """A run on one device: what it measures with, and what it has measured."""

    def __init__(self, options: argparse.Namespace, console: Console):
        self.options, self.console = options, console
        self.device = options.label or results.device_name()
        self.file = results_file(options)
        wanted = options.impl or USUAL_IMPLEMENTATIONS
        self.names = [name for name in wanted if IMPLEMENTATIONS[name].available()]
        if options.impl and self.names != wanted:
            raise SystemExit(f"only {self.names} of {wanted} are installed for this device")
        self.bandwidths = {
            size: timing.copy_bandwidth(size, options.repetitions)
            for size in dict.fromkeys(target_bytes(options, n) for n in options.n)
        }
        self.table = Table(
            "op", "dtype", box=SIMPLE_HEAD, title="time (x floor)", title_justify="left"
        )
        for name in ("n", "nrhs", "batch", "floor", *self.names):
            self.table.add_column(name, justify="right")
        self.errors = 0

    def introduce(self) -> None:
        """Print what is about to be measured, and the path that jax_batched takes here."""
        copies = ", ".join(
            f"{bandwidth / 1e9:.1f} GB/s at {size / 2**20:g} MiB"
            for size, bandwidth in self.bandwidths.items()
        )
        self.print(f"{self.device}: copy {copies}, jax {jax.__version__}")
        self.print(f"jax_batched {jb.__version__} from {Path(jb.__file__).parent}")
        platform = "cpu" if on_cpu() else "cuda"
        for info in jb.backend_info():
            if info.platform == platform:
                self.print(f"  {info.operation}: {info.path}, {info.reason}")

    def run(self) -> None:
        """Measure all cases; each is recorded as soon as it is there."""
        plan = list(cases(self.options))
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        inputs: Inputs | None = None
        shape: tuple[str, int, int] | None = None
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("", total=len(plan))
            for case in plan:
                progress.update(task, description=str(case))
                if inputs is None or shape != (case.dtype, case.n, case.batch):
                    inputs = None  # frees the old ones before the new ones are made
                    shape = case.dtype, case.n, case.batch
                    inputs = Inputs(*shape, target_bytes(self.options, case.n))
                results.record(self.file, self.measure(case, inputs))
                release_memory()
                progress.advance(task)
        self.console.print(self.table)
        self.print(f"results in {self.file}")

    def measure(self, case: Case, inputs: Inputs) -> list[results.Row]:
        """Test and time every implementation of a case."""
        op = OPERATIONS[case.op]
        sets = inputs.sets(op.operands, case.nrhs)
        programs: dict[str, tuple[Program, int]] = {}
        cells = dict.fromkeys(self.names, "-")
        for name in self.names:
            if name not in op.calls or (case.dtype in STORED and not name.startswith(OURS)):
                continue
            try:
                program = IMPLEMENTATIONS[name].program(op.calls[name], sets)
                verify(op, IMPLEMENTATIONS[name], sets, program)
                programs[name] = program, timing.calibrate(program)
            except Exception as error:  # a peer that fails must not end the run
                self.errors += 1
                cells[name] = "[red]error[/]"
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                self.print(f"error: {name}, {case}: {text}", style="red")
        rows = []
        item_bytes = case.batch * np.dtype(case.dtype).itemsize
        floor_ms = (
            1e3
            * op.floor(case.n, case.nrhs)
            * item_bytes
            / self.bandwidths[target_bytes(self.options, case.n)]
        )
        for name, ms in timing.measure(programs, self.options.repetitions).items():
            cells[name] = f"{time_text(ms)} ({ms / floor_ms:.3g})"
            rows.append(self.row(case, name, ms, floor_ms))
        self.table.add_row(
            case.op,
            case.dtype,
            str(case.n),
            str(case.nrhs or "-"),
            str(case.batch),
            time_text(floor_ms),
            *cells.values(),
        )
        return rows

    def draw(self) -> None:
        """Make the pictures of what was measured."""
        options = self.options
        for nrhs in options.nrhs:
            repeated = nrhs != options.nrhs[0]
            ops = [op for op in options.op if OPERATIONS[op].nrhs(1) or not repeated]
            for batch in options.batch or [None]:
                for path in write_pictures(
                    self.file, ops, nrhs, batch, options.mebibytes, options.output_dir
                ):
                    self.print(f"picture {path}")

    def print(self, text: str, style: str | None = None) -> None:
        """Print a line as it is, without markup."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def row(self, case: Case, name: str, ms: float, floor_ms: float) -> results.Row:
        """A line of the results file."""
        return {
            "op": case.op,
            "impl": name,
            "dtype": case.dtype,
            "m": OPERATIONS[case.op].rows(case.n),
            "n": case.n,
            "nrhs": case.nrhs,
            "batch": case.batch,
            "ms": float(f"{ms:.5g}"),
            "floor_ms": float(f"{floor_ms:.5g}"),
            "x_floor": float(f"{ms / floor_ms:.4g}"),
            "device": self.device,
            **results.versions(),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit status is 1 if any implementation failed."""
    options = parse(arguments)
    if torch_installed() and "torch" in (options.impl or IMPLEMENTATIONS):
        # Else JAX takes most of the GPU's memory for itself.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_enable_x64", True)
    if not options.fresh_memory:
        jb.keep_freed_memory()
    session = Session(options, Console(width=None if sys.stdout.isatty() else 120))
    session.introduce()
    session.run()
    if not options.no_plots:
        session.draw()
    return 1 if session.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
