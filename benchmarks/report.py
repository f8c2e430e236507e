"""Fill the tables and pictures of documents from a results file.

`python -m benchmarks.report DOCUMENT... benchmarks/results/DEVICE.jsonl` writes what a section is
between the lines `<!-- begin NAME -->` and `<!-- end NAME -->`, for each NAME of SECTIONS below,
and draws the pictures beside the results file. Rows are also taken from DEVICE_sizes.jsonl,
DEVICE_variants.jsonl, DEVICE_energy.jsonl, DEVICE_scaling.jsonl, DEVICE_counters.jsonl and, for the
sections `cores` and `cores_fresh`, from those of all CPUs. benchmarks/README.md says which document
is of which file.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import counters, documents, energy, sizes, variants
from benchmarks.operations import OPERATIONS, USUAL_OPERATIONS
from benchmarks.plot import (
    DTYPES,
    PRECISIONS,
    TITLES,
    draw_precisions,
    write_pictures,
    write_speed_up,
)
from benchmarks.results import Row, load, select, stamp
from benchmarks.run import time_text
from benchmarks.table import OURS, THEIRS, figure, markdown

HEADLINE = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
SHORT = (8, 16, 32, 64, 96, 128, 256, 512)
ON_CPU = (4, 8, 16, 32, 64, 128, 256)
REAL = DTYPES[:2]
ONE_TRIANGLE = tuple(op for op in USUAL_OPERATIONS if op != "cholesky_symmetrize")
GENERAL = ("lu", "solve_gen", "inv")
FROM_LU = ("det", "slogdet", "grad_solve_gen", "grad_inv", "grad_slogdet")
REFLECTIONS = ("qr", "qr_r")
SPECTRAL = ("eigh", "eigvalsh", "svd")
OF_SIZES = ("gemm_sizes", "cholesky_sizes")
BY_REFLECTIONS = {
    "qr_tall": "`qr` of 8 n rows",
    "lstsq": "`lstsq` of 2 n rows, one right-hand side",
    "kalman": "square-root Kalman filter, 16 steps",
}
GENERAL_MEBIBYTES = 256
EQUAL_MEBIBYTES = 512  # of the rows with PyTorch and `refined_solve`, which have none of 4 GiB
BATCH = 10_000  # of the published measurements
FEW = 16  # right-hand sides; more are as many as rows
# What a copy reaches of the theoretical bandwidth: 2.96 of 3.35 TB/s on an H100.
COPY_SHARE = 0.88
NAMES = {OURS: "jax_batched", f"{OURS}:fast": 'jax_batched, "fast"', THEIRS: "stock JAX"}
# Calls that are spelled otherwise than their operation.
CALLS = {
    "cholesky_symmetrize": "cholesky(symmetrize_input=True)",
    "solve_pos": 'solve(assume_a="pos")',
    "solve_gen": "solve",
}


def beside(file: Path, suffix: str) -> Path:
    """The results file of another program on the same device."""
    return file.with_name(f"{file.stem}_{suffix}.jsonl")


def usual(file: Path) -> list[Row]:
    """The rows of large batches and one right-hand side."""
    return select(load(file), 1, None, None)


@dataclass(frozen=True)
class Published:
    """A rate from the literature; bandwidth is the card's theoretical one."""

    source: str
    op: str
    dtype: str
    n: int
    batch: int
    card: str
    gigabytes: float
    gigaflops: float

    def multiple(self) -> float:
        """The time over that of a copy at the theoretical bandwidth, as x_floor."""
        n = self.n
        flops = n**3 / 3 + n**2 / 2 + n / 6 + (2 * n * n if self.op == "solve_pos" else 0)
        moved = OPERATIONS[self.op].floor(n, 1) * np.dtype(self.dtype).itemsize
        return (flops / self.gigaflops) / (moved / self.gigabytes)


_KURZAK = "Kurzak, Anzt, Gates, Dongarra 2016"
_HAIDAR = "Haidar, Dong, Luszczek, Tomov, Dongarra 2015"
_K40C = ("Tesla K40c", 288)
PUBLISHED = (
    Published(f"{_KURZAK}, fast-math", "cholesky", "float32", 96, 10_000, *_K40C, 257),
    Published(f"{_KURZAK}, IEEE", "cholesky", "float32", 96, 10_000, *_K40C, 200),
    Published(f"{_KURZAK}, IEEE", "cholesky", "float32", 95, 10_000, *_K40C, 185),
    Published(f"{_KURZAK}, peak", "solve_pos", "float32", 96, 10_000, *_K40C, 120),
    Published(_HAIDAR, "cholesky", "float64", 512, 2_000, *_K40C, 200),
)


def published(file: Path, document: Path) -> Iterator[str]:
    """Rates from the literature as multiples of their card's copy, ours beside them."""
    ours = {(r["op"], r["dtype"], r["n"]): r for r in usual(file) if r["impl"] == OURS}
    yield (
        "| source | operation | n | batch | card, GB/s | Gflop/s | multiple "
        f"| at {COPY_SHARE:.0%} of GB/s | x_floor here |"
    )
    yield "|---|---|---:|---:|---|---:|---:|---:|---:|"
    for p in PUBLISHED:
        row = ours.get((p.op, p.dtype, p.n))
        yield (
            f"| {p.source} | {p.op} {p.dtype} | {p.n} | {p.batch:,} | {p.card}, {p.gigabytes:g} "
            f"| {p.gigaflops:g} | {p.multiple():.1f} | {COPY_SHARE * p.multiple():.1f} "
            f"| {figure(row['x_floor']) if row else '-'} |"
        )


def measured(file: Path, document: Path) -> Iterator[str]:
    """What was measured on what and when."""
    rows = load(file)

    def values(key: str) -> str:
        return ", ".join(sorted({str(row[key]) for row in rows}))

    yield stamp(
        values("device"),
        {
            "jax": values("jax"),
            "jax_batched": values("jax_batched"),
            "date": values("date"),
        },
    )


def pictures(file: Path, document: Path) -> Iterator[str]:
    """The picture of each operation, and that of the speed-up."""

    def link(title: str, path: Path) -> str:
        return f"![{title}]({os.path.relpath(path, document.parent)})\n"

    for path in write_pictures(file, USUAL_OPERATIONS, 1, None, None, file.parent):
        op = path.stem.removeprefix(f"{file.stem}_")
        yield link(f"{TITLES[op]}: time over that of a copy", path)
    yield link("Speed-up over stock JAX", write_speed_up(file, file.parent))


def x_floor(file: Path, document: Path) -> Iterator[str]:
    """x_floor of the headline sizes, ours and stock JAX's."""
    yield from markdown(
        [row for row in usual(file) if row["n"] in HEADLINE and row["op"] in USUAL_OPERATIONS]
    )


def faster(
    found: Mapping[tuple[str, str, int, str], float],
    op: str,
    dtype: str,
    sizes: Sequence[int],
    than: str,
) -> list[str]:
    """How many times faster ours is than another implementation, for each size; - where unknown."""
    pairs = [[found.get((op, dtype, n, impl)) for impl in (than, OURS)] for n in sizes]
    return [figure(theirs / ours) if theirs and ours else "-" for theirs, ours in pairs]


def speed_ups(
    rows: Sequence[Row],
    ops: Sequence[str],
    dtypes: Sequence[str],
    sizes: Sequence[int],
    than: str = THEIRS,
) -> Iterator[str]:
    """A table of how many times faster ours is, by operation, dtype and n."""
    found = {(r["op"], r["dtype"], r["n"], r["impl"]): r["ms"] for r in rows}
    yield f"| operation | dtype | n = {' | '.join(map(str, sizes))} |"
    yield "|---|---|" + "---:|" * len(sizes)
    for op in ops:
        head = f"`{CALLS.get(op, op)}`"
        for dtype in dtypes:
            yield f"| {head} | {dtype} | {' | '.join(faster(found, op, dtype, sizes, than))} |"
            head = ""


def speed_up(file: Path, document: Path) -> Iterator[str]:
    """Speed-up over stock JAX in short."""
    yield from speed_ups(usual(file), ONE_TRIANGLE, REAL, SHORT)


def speed_up_all(file: Path, document: Path) -> Iterator[str]:
    """Speed-up over stock JAX, all operations and dtypes."""
    yield from speed_ups(usual(file), USUAL_OPERATIONS, DTYPES, (4, *SHORT))


def family(
    ops: Sequence[str], file: Path, document: Path, *, mebibytes: float = GENERAL_MEBIBYTES
) -> Iterator[str]:
    """Time over that of a copy, and speed-up over stock JAX: some operations."""
    rows = select(load(file), 1, None, mebibytes)
    yield from markdown([row for row in rows if row["op"] in ops])


def by_reflections(file: Path, document: Path) -> Iterator[str]:
    """Times of what is made of QR factorizations."""
    yield "| call | dtype | n | batch | ms | stock JAX, ms | speed-up |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    found = {(r["op"], r["dtype"], r["n"], r["batch"], r["impl"]): r["ms"] for r in load(file)}
    for op, call in BY_REFLECTIONS.items():
        for (name, dtype, n, batch, impl), ms in found.items():
            if name == op and impl == OURS:
                theirs = found.get((op, dtype, n, batch, THEIRS))
                last = f"{figure(theirs)} | **{figure(theirs / ms)}x**" if theirs else "- | -"
                yield f"| {call} | {dtype} | {n} | {batch:,} | {figure(ms)} | {last} |"


def pytorch(file: Path, document: Path) -> Iterator[str]:
    """Speed-up over PyTorch, on batches of equal size."""
    rows = select(load(file), 1, None, EQUAL_MEBIBYTES)
    yield from speed_ups(rows, ONE_TRIANGLE, REAL, SHORT, "torch")


def cores(file: Path, document: Path) -> Iterator[str]:
    """Speed-up over stock JAX on every CPU, in processes that keep the memory that they free."""
    return on_cpus(sorted(file.parent.glob("*-cores.jsonl")), ONE_TRIANGLE)


def cores_fresh(file: Path, document: Path) -> Iterator[str]:
    """The same in default processes, and of more operations."""
    files = sorted(file.parent.glob("*-cores_fresh-memory.jsonl"))
    return on_cpus(files, ("cholesky", "solve_pos", *GENERAL, "qr"))


def on_cpus(paths: Sequence[Path], ops: Sequence[str]) -> Iterator[str]:
    """Speed-up over stock JAX on the CPUs of these files."""
    known = {}
    for path in paths:
        rows = usual(path)
        known[rows[0]["device"]] = {(r["op"], r["dtype"], r["n"], r["impl"]): r["ms"] for r in rows}
    yield f"| operation | dtype | processor | n = {' | '.join(map(str, ON_CPU))} |"
    yield "|---|---|---|" + "---:|" * len(ON_CPU)
    for op, dtype in itertools.product(ops, REAL):
        head = f"`{CALLS.get(op, op)}` | {dtype}"
        for device, found in known.items():
            cells = " | ".join(faster(found, op, dtype, ON_CPU, THEIRS))
            yield f"| {head} | {device} | {cells} |"
            head = " | "


def batch_10000(file: Path, document: Path) -> Iterator[str]:
    """Time per call at batch 10,000."""
    rows = [row for row in load(file) if row["batch"] == BATCH and row["nrhs"] in (0, 1)]
    yield from times(rows, "n", sorted({row["n"] for row in rows}))


def small_batches(file: Path, document: Path) -> Iterator[str]:
    """How many times faster than stock JAX, of what was also measured with one matrix."""
    rows = [
        row
        for row in load(file)
        if (row["batch"] <= 132 or row["batch"] == BATCH)
        and row["nrhs"] in (0, 1)
        and row["n"] <= max(HEADLINE)
    ]
    batches = sorted({row["batch"] for row in rows})
    found = {(r["op"], r["dtype"], r["n"], r["batch"], r["impl"]): r["ms"] for r in rows}
    yield "| operation | dtype | n | " + " | ".join(f"batch {b}" for b in batches) + " |"
    yield "|---|---|---:|" + "---:|" * len(batches)
    for op, dtype, n in dict.fromkeys(key[:3] for key in sorted(found) if key[3] == 1):
        pairs = [[found.get((op, dtype, n, b, impl)) for impl in (THEIRS, OURS)] for b in batches]
        cells = [f"{theirs / ours:.2f}x" if theirs and ours else "-" for theirs, ours in pairs]
        yield f"| {op} | {dtype} | {n} | {' | '.join(cells)} |"


def gradients(file: Path, document: Path) -> Iterator[str]:
    """Time of gradients, and the speed-up."""
    rows = [row for row in usual(file) if row["op"].startswith("grad_")]
    yield from times(rows, "n", sorted({row["n"] for row in rows}))


def right_hand_sides(file: Path, document: Path) -> Iterator[str]:
    """Time of several right-hand sides, and what stock JAX takes over ours for as many as rows."""
    found: dict[tuple[str, str, int, int], dict[tuple[str, int], float]] = {}
    for row in load(file):
        if row["op"] in ("cho_solve", "triangular_solve") and row["dtype"] in DTYPES[:2]:
            case = row["op"], row["dtype"], row["n"], row["batch"]
            found.setdefault(case, {})[row["impl"], row["nrhs"]] = row["ms"]
    known = {case: times for case, times in found.items() if (OURS, 2) in times}
    columns = sorted(
        {k for times in known.values() for impl, k in times if impl == OURS and k <= FEW}
    )
    yield "| operation | dtype | n | " + " | ".join(f"k = {k}" for k in columns) + " | k = n | |"
    yield "|---|---|---:|" + "---:|" * (len(columns) + 2)
    for (op, dtype, n, _), times in known.items():
        cells = [times.get((OURS, k)) for k in (*columns, n)]
        texts = [time_text(ms) if ms else "-" for ms in cells]
        theirs = times.get((THEIRS, n))
        texts.append(f"**{figure(theirs / cells[-1])}x**" if theirs and cells[-1] else "-")
        yield f"| {op} | {dtype} | {n} | {' | '.join(texts)} |"


def refined(file: Path, document: Path) -> Iterator[str]:
    """Time of a solve in single, double and mixed precision: batches, and single large systems."""
    known = [row for row in load(file) if row["nrhs"] == 1]
    large = [row for row in known if row["batch"] == 1 and row["n"] > max(HEADLINE)]
    equal = select(known, 1, None, EQUAL_MEBIBYTES)
    batched = [row for row in equal if row["n"] <= max(HEADLINE)]
    found = {(r["op"], r["dtype"], r["impl"], r["n"]): r["ms"] for r in (*large, *batched)}
    sizes = sorted({row["n"] for row in (*large, *batched) if row["op"] == "refined_solve"})
    yield "| | " + " | ".join(f"n = {n}" for n in sizes) + " |"
    yield "|---|" + "---:|" * len(sizes)
    if not sizes:
        return
    times = {
        name: [found.get((*kind, n)) for n in sizes] for name, (*kind, _, _) in PRECISIONS.items()
    }
    for name, line in times.items():
        yield f"| {name} | {' | '.join(time_text(ms) if ms else '-' for ms in line)} |"
    for name in ("double", "double, stock JAX"):
        pairs = zip(times[name], times["mixed"], strict=True)
        texts = [f"**{figure(a / b)}x**" if a and b else "-" for a, b in pairs]
        yield f"| mixed, times faster than {name} | {' | '.join(texts)} |"
    path = file.with_name(f"{file.stem}_precisions.png")
    draw_precisions(batched, large).savefig(path, dpi=130)
    link = os.path.relpath(path, document.parent)
    yield f"\n![Rates in single, double and mixed precision]({link})"


def scaling(file: Path, document: Path) -> Iterator[str]:
    """Efficiency on several devices: that of one is 1."""
    rows = load(beside(file, "scaling"))
    found = {(r["op"], r["dtype"], r["n"], r["scaling"], r["devices"]): r for r in rows}
    columns = [
        (kind, devices)
        for kind in ("weak", "strong")
        for devices in sorted({row["devices"] for row in rows})
        if devices > 1
    ]
    yield "| operation | dtype | n | " + " | ".join(f"{k}, {d}" for k, d in columns) + " |"
    yield "|---|---|---:|" + "---:|" * len(columns)
    for case in dict.fromkeys((row["op"], row["dtype"], row["n"]) for row in rows):
        cells = [found.get((*case, *column)) for column in columns]
        texts = [f"{cell['efficiency']:.3f}" if cell else "-" for cell in cells]
        yield f"| {case[0]} | {case[1]} | {case[2]} | {' | '.join(texts)} |"


def odd_sizes(file: Path, document: Path) -> Iterator[str]:
    """Sizes that are not multiples of 8 beside the next multiple."""
    yield from sizes.markdown(load(beside(file, "sizes")))


def variants_table(file: Path, document: Path) -> Iterator[str]:
    """Variants of the triangular solve beside each other."""
    yield from variants.markdown(load(beside(file, "variants")))


def joules(file: Path, document: Path) -> Iterator[str]:
    """Energy per matrix."""
    yield from energy.markdown(load(beside(file, "energy")))


def counters_table(file: Path, document: Path) -> Iterator[str]:
    """What the profiler counts."""
    yield from counters.markdown(load(beside(file, "counters")))


def times(rows: Sequence[Row], label: str, columns: Sequence[int]) -> Iterator[str]:
    """A table of times, and of stock JAX's over ours."""
    yield "| operation | dtype | | " + " | ".join(f"{label} = {c}" for c in columns) + " |"
    yield "|---|---|---|" + "---:|" * len(columns)
    found = {(row["op"], row["dtype"], row["n"], row["impl"]): row["ms"] for row in rows}
    for op in dict.fromkeys(row["op"] for row in rows):
        for dtype in DTYPES:
            lines = {
                name: [found.get((op, dtype, c, impl)) for c in columns]
                for impl, name in NAMES.items()
            }
            head = f"| {op} | {dtype} |"
            for name, cells in lines.items():
                if any(cells):
                    texts = [time_text(ms) if ms else "-" for ms in cells]
                    yield f"{head} {name} | {' | '.join(texts)} |"
                    head = "| | |"
            pairs = list(zip(lines[NAMES[OURS]], lines[NAMES[THEIRS]], strict=True))
            if any(a and b for a, b in pairs):
                texts = [f"**{figure(b / a)}x**" if a and b else "-" for a, b in pairs]
                yield f"{head} speed-up | {' | '.join(texts)} |"


SECTIONS: dict[str, Callable[[Path, Path], Iterator[str]]] = {
    "measured": measured,
    "pictures": pictures,
    "speed_up": speed_up,
    "speed_up_all": speed_up_all,
    "general": partial(family, GENERAL),
    "general_more": partial(family, (*GENERAL, *FROM_LU), mebibytes=64),
    "reflections": partial(family, REFLECTIONS),
    "spectral": partial(family, SPECTRAL),
    "of_sizes": partial(family, OF_SIZES, mebibytes=512),
    "by_reflections": by_reflections,
    "pytorch": pytorch,
    "cores": cores,
    "cores_fresh": cores_fresh,
    "x_floor": x_floor,
    "batch_10000": batch_10000,
    "small_batches": small_batches,
    "gradients": gradients,
    "right_hand_sides": right_hand_sides,
    "refined": refined,
    "scaling": scaling,
    "odd_sizes": odd_sizes,
    "variants": variants_table,
    "energy": joules,
    "counters": counters_table,
    "published": published,
}


def fill(document: Path, file: Path) -> None:
    """Rewrite the sections of a document."""
    documents.fill(
        document, {name: partial(made, file, document) for name, made in SECTIONS.items()}
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill documents from one device's results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("document", type=Path, nargs="+", help="a Markdown file")
    parser.add_argument("file", type=Path, help="a results file")
    options = parser.parse_args(arguments)
    if not options.file.exists():
        parser.error(f"{options.file} does not exist")
    for document in options.document:
        fill(document, options.file)


if __name__ == "__main__":
    main()
