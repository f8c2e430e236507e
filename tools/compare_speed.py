"""Times two builds of the package in turn: ``python tools/compare_speed.py --old DIR --new DIR``.

Each build is a folder to import it from, such as an unzipped wheel, and has a process of its own.
The cases are rows of result files. Both processes prepare the cases of one dtype, size and batch;
then they take turns, repetition by repetition, timed as everything in ``benchmarks`` is. Rows whose
ratio is beyond the limit are measured again at the end, by new processes; a row counts only if it
is beyond the limit both times.

The harness is that of this checkout. A build that it does not suit can bring its own: a folder
``benchmarks`` beside the package comes first.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ROWS = {"gpu": "nvidia-h200.jsonl", "cpu": "amd-epyc-2-cores.jsonl"}

MEBIBYTES = {"gpu": 512, "cpu": 64}  # of a case's matrices, where the batch is not given
LARGE_N, LARGE_MEBIBYTES = 185, 1024  # on a GPU
FILLS = (64, 512, 4096)  # that rows of the files were measured with
MAX_N = 512  # beyond it there are no kernels
DTYPES = ("float32", "float64", "complex64", "complex128", "float16", "bfloat16")  # the first first

FIRST_PASS = 0.8  # of the time


class Case(NamedTuple):
    """What is measured; a batch of 0 fills the memory, "" is no variant."""

    dtype: str
    n: int
    batch: int
    op: str
    impl: str
    nrhs: int
    variant: str

    @property
    def group(self) -> tuple[str, int, int]:
        """What cases with the same inputs share."""
        return self[:3]


# The process of one build.


class Bench:
    """The cases of one group, ready to be timed."""

    def __init__(self) -> None:
        import jax

        import jax_batched
        from benchmarks import timing

        jax.config.update("jax_enable_x64", True)
        # Of a version that has no such function, the harness has one.
        keep = getattr(jax_batched, "keep_freed_memory", None) or timing.recycle_memory
        keep()
        self.about = {
            "file": jax_batched.__file__,
            "platform": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
        }
        self.programs: list[Any] = []

    def prepare(self, cases: list[list[Any]], mebibytes: float) -> list[str]:
        """Makes the inputs and the programs of a group; an error text, or "", for each case."""
        from benchmarks.implementations import IMPLEMENTATIONS
        from benchmarks.inputs import Inputs, filling

        self.programs = []  # frees the memory of the former group first
        errors = []
        size = int(mebibytes * 2**20)
        dtype, n, batch = Case(*cases[0]).group
        inputs = Inputs(dtype, n, batch or filling(dtype, n, size), size)
        for case in (Case(*case) for case in cases):
            try:
                call, sets = self.bind(case, inputs)
                program = IMPLEMENTATIONS[case.impl].program(call, sets)
                program.wait(program.run())
                self.programs.append(program)
                errors.append("")
            except Exception as error:  # of one case; the others go on
                self.programs.append(None)
                errors.append(f"{type(error).__name__}: {error}".splitlines()[0])
        return errors

    def bind(self, case: Case, inputs: Any) -> tuple[Any, Any]:
        """A case's function and its operands."""
        import jax
        import jax.numpy as jnp

        import jax_batched
        from benchmarks.operations import OPERATIONS

        op = OPERATIONS[case.op]
        sets = inputs.sets(op.operands, case.nrhs)
        if not case.variant:
            return op.calls[case.impl], sets
        side, triangle, trans = case.variant.split()
        flip = jax.jit(lambda x: jnp.swapaxes(x, 1, 2).copy())
        sets = [
            (a if triangle == "lower" else flip(a), b if side == "left" else flip(b))
            for a, b in sets
        ]
        options = {
            "left_side": side == "left",
            "lower": triangle == "lower",
            "transpose_a": trans == "T",
        }
        return lambda a, b: jax_batched.triangular_solve(a, b, **options), sets

    def calibrate(self, index: int) -> int:
        """The calls of a repetition."""
        from benchmarks import timing

        return int(timing.calibrate(self.programs[index]))

    def time(self, index: int, calls: int) -> float:
        """Milliseconds per operation, of one repetition after a call that does not count."""
        from benchmarks import timing

        program = self.programs[index]
        timing.repetition(program, 1)
        return float(1e3 * timing.repetition(program, calls) / (calls * program.operations))


def serve() -> None:
    """Answers requests, one JSON line each: [method, arguments...]."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    bench = Bench()
    print(json.dumps(bench.about), file=replies, flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            reply = {"result": getattr(bench, method)(*arguments)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(reply), file=replies, flush=True)


# The process that compares.


class FailedError(Exception):
    """A request failed in one of the builds."""


class Side:
    """One build's process."""

    def __init__(self, name: str, site: Path):
        self.name = name
        site = site.resolve()
        environment = {
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4",
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.site = site

    def hello(self) -> dict[str, str]:
        """What the process says of itself; it imports the package from its folder or not at all."""
        about = dict(json.loads(self.line()))
        if not Path(about["file"]).is_relative_to(self.site):
            raise SystemExit(f"{self.name}: {about['file']} is not in {self.site}")
        return about

    def line(self) -> str:
        """The next line from the process."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.name} ended")
        return line

    def send(self, *request: Any) -> None:
        """Sends a request."""
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def receive(self) -> Any:
        """The result of the request before."""
        reply = json.loads(self.line())
        if "error" in reply:
            raise FailedError(f"{self.name}: {reply['error']}")
        return reply["result"]

    def call(self, *request: Any) -> Any:
        """Sends a request and waits for its result."""
        self.send(*request)
        return self.receive()

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def batch_of(row: Mapping[str, Any]) -> int:
    """A row's batch; 0 where it filled the memory."""
    from benchmarks.inputs import filling

    fills = {filling(row["dtype"], row["n"], size * 2**20) for size in FILLS}
    return 0 if row["batch"] in fills else int(row["batch"])


def cases_of(files: Iterable[Path], options: argparse.Namespace) -> list[Case]:
    """The cases of result files, without duplicates, those of a group together."""
    found = set()
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if not row["impl"].startswith("jax_batched") or row["n"] > MAX_N:
                continue
            if any(
                wanted is not None and row[name] not in wanted
                for name, wanted in (("op", options.op), ("dtype", options.dtype))
            ):
                continue
            found.add(
                Case(
                    row["dtype"],
                    row["n"],
                    batch_of(row),
                    row["op"],
                    row["impl"],
                    row["nrhs"],
                    row.get("variant", ""),
                )
            )
    cases = sorted(found, key=lambda case: (DTYPES.index(case.dtype), case))
    groups = [list(group) for _, group in groupby(cases, key=lambda case: case.group)]
    index, count = options.part
    return [case for group in groups[index - 1 :: count] for case in group]


def rounds(sides: Sequence[Side], index: int, count: int) -> list[tuple[float, float]]:
    """Milliseconds of (old, new) in every round; who goes first changes."""
    calls = sides[0].call("calibrate", index)
    sides[1].call("time", index, calls)  # warms up, as that did
    found = []
    for turn in range(count):
        times = {
            side.name: side.call("time", index, calls) for side in sides[:: 1 - 2 * (turn % 2)]
        }
        found.append((times["old"], times["new"]))
    return found


def measure(
    sides: Sequence[Side], cases: Sequence[Case], platform: str, count: int, deadline: float
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """A row for each case that there is time for."""
    for (_, n, _), members in groupby(cases, key=lambda case: case.group):
        if perf_counter() > deadline:
            return
        group = list(members)
        large = platform == "gpu" and n >= LARGE_N
        for side in sides:
            side.send("prepare", group, LARGE_MEBIBYTES if large else MEBIBYTES[platform])
        prepared = [side.receive() for side in sides]
        for index, case in enumerate(group):
            row = case._asdict()
            faults = [
                f"{side.name}: {errors[index]}"
                for side, errors in zip(sides, prepared, strict=True)
                if errors[index]
            ]
            try:
                if faults:
                    raise FailedError("; ".join(faults))
                times = rounds(sides, index, count)
            except FailedError as error:
                yield case, {**row, "error": str(error)}
                continue
            yield (
                case,
                {
                    **row,
                    "old_ms": float(f"{median(old for old, _ in times):.5g}"),
                    "new_ms": float(f"{median(new for _, new in times):.5g}"),
                    "ratio": float(f"{median(new / old for old, new in times):.4f}"),
                },
            )


def limit(row: Mapping[str, Any], platform: str) -> float:
    """How far a ratio may be from 1."""
    return 0.04 if platform == "cpu" or row["batch"] else 0.02


def beyond(row: Mapping[str, Any], platform: str) -> int:
    """1 if the new build is slower beyond the limit each time, -1 if it is faster; else 0."""
    excesses = [row[name] - 1 for name in ("ratio", "again") if name in row]
    if min(excesses) > limit(row, platform):
        return 1
    return -1 if max(excesses) < -limit(row, platform) else 0


def text_of(row: Mapping[str, Any]) -> str:
    """A row of the printed table."""
    name = f"{row['op']} {row['variant']}".strip() + row["impl"].removeprefix("jax_batched")
    again = f"  again {row['again']:.3f}" if "again" in row else ""
    return (
        f"{row['ratio']:.3f}  {name:32} {row['dtype']:10} n={row['n']:<4} nrhs={row['nrhs']:<3} "
        f"batch={row['batch'] or 'fill':<6} {row['old_ms']:.4g} -> {row['new_ms']:.4g} ms{again}"
    )


def report(rows: Sequence[Mapping[str, Any]], platform: str) -> bool:
    """Prints what is beyond the limits; whether nothing is slower."""
    timed = [row for row in rows if "ratio" in row]
    slower = False
    for sign, word in ((1, "slower"), (-1, "faster")):
        found = [row for row in timed if beyond(row, platform) == sign]
        slower |= sign == 1 and bool(found)
        print(f"{len(found)} of {len(timed)} rows are {word} beyond the limit")
        for row in sorted(found, key=lambda row: -sign * row["ratio"]):
            print(f"  {text_of(row)}")
    failed = [row for row in rows if "error" in row]
    for row in failed:
        print(f"failed: {json.dumps(row)}")
    ratios = sorted(row["ratio"] for row in timed)
    if ratios:
        print(
            f"new time over old: geometric mean {geometric_mean(ratios):.4f}, from {ratios[0]:.3f} "
            f"to {ratios[-1]:.3f}; 5 % below {ratios[len(ratios) // 20]:.3f}, 5 % above "
            f"{ratios[-1 - len(ratios) // 20]:.3f}"
        )
    return not slower and not failed


def part(text: str) -> tuple[int, int]:
    """(1, 3) from "1/3"."""
    index, count = text.split("/")
    return int(index), int(count)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    add = parser.add_argument
    add("--old", type=Path, required=True, metavar="DIR", help="the former build")
    add("--new", type=Path, required=True, metavar="DIR", help="the present build")
    add("--output", type=Path, metavar="FILE", help="a JSONL file for all rows")
    add("--rows", type=Path, nargs="+", help="result files (default: those of this platform)")
    add("--op", nargs="+", help="operations (default: all)")
    add("--dtype", nargs="+", help="dtypes (default: all)")
    add("--part", type=part, default=(1, 1), metavar="I/K", help="every K-th group of cases")
    add("--rounds", type=int, default=5, help="repetitions of each build (default: 5)")
    add("--minutes", type=float, default=6, help="time for everything (default: 6)")
    return parser.parse_args(arguments)


def start(options: argparse.Namespace, order: Sequence[str]) -> tuple[list[Side], dict[str, str]]:
    """Both processes, started in this order; old comes first. And what they run on."""
    sides = {name: Side(name, getattr(options, name)) for name in order}
    about = {name: side.hello() for name, side in sides.items()}
    return [sides["old"], sides["new"]], about["new"]


def write(file: Path | None, rows: Iterable[Mapping[str, Any]], about: Mapping[str, str]) -> None:
    """Writes the rows measured so far."""
    if file is not None:
        common = {
            "device": about["device"],
            "jax": about["jax"],
            "date": str(datetime.now(UTC).date()),
        }
        file.write_text("".join(json.dumps({**row, **common}) + "\n" for row in rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs; the exit status is 1 if a row is slower beyond its limit, failed or had no time."""
    begin = perf_counter()
    options = parse(arguments)
    sys.path.insert(0, str(ROOT))
    sides, about = start(options, ("old", "new"))
    platform = about["platform"]
    cases = cases_of(options.rows or [RESULTS / ROWS[platform]], options)
    print(f"{about['device']}, jax {about['jax']}: {len(cases)} cases", flush=True)
    seconds = 60 * options.minutes
    rows: dict[Case, dict[str, Any]] = {}
    for case, row in measure(sides, cases, platform, options.rounds, begin + FIRST_PASS * seconds):
        rows[case] = row
        if len(rows) % 20 == 0:
            print(f"{len(rows)} after {perf_counter() - begin:.0f} s", flush=True)
            write(options.output, rows.values(), about)
    for side in sides:
        side.close()
    suspects = [case for case, row in rows.items() if "ratio" in row and beyond(row, platform)]
    if suspects:
        print(f"again: {len(suspects)} rows", flush=True)
        sides, _ = start(options, ("new", "old"))
        for case, row in measure(sides, suspects, platform, 2 * options.rounds, begin + seconds):
            if "ratio" in row:
                rows[case]["again"] = row["ratio"]
        for side in sides:
            side.close()
    write(options.output, rows.values(), about)
    good = report(list(rows.values()), platform)
    if len(rows) < len(cases):
        good = False
        print(f"no time for {len(cases) - len(rows)} rows, from {cases[len(rows)].group} on")
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        raise SystemExit(main())
