"""The results file: one JSON object per line, one file per device."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

import jax

import jax_batched as jb
from benchmarks.inputs import matrix_bytes
from jax_batched._tuning import calls


class Versions(TypedDict):
    """With what it was measured, and when."""

    jax: str
    jax_batched: str
    date: str


class Case(Versions):
    """What was measured, and on what."""

    op: str
    impl: str
    dtype: str
    m: int
    n: int
    nrhs: int
    batch: int
    device: str


class Row(Case):
    """One measurement. In a file it may have a `note`, added by hand."""

    ms: float
    floor_ms: float
    x_floor: float


class EnergyRow(Case):
    """One measurement of energy, in joules of one system of the batch."""

    joules: float
    watts: float
    ms: float
    counter: str


class ScalingRow(Case):
    """One measurement on several devices."""

    devices: int
    scaling: str
    ms: float
    efficiency: float


class VariantRow(Case):
    """One measurement of a variant of an operation."""

    variant: str
    ms: float


class CounterRow(Case):
    """Counters of one launch: percent, but for `us`, `registers` and `warps` (resident)."""

    kernel: str
    counters: dict[str, float]
    waiting: dict[str, int]


AnyRow = Row | CounterRow | EnergyRow | ScalingRow | VariantRow
Key = tuple[Any, ...]


def usual_mebibytes(n: int, *, cpu: bool) -> float:
    """The memory that the matrices of a case fill by default."""
    return 64 if cpu else calls.usual_mebibytes(n)


def key(row: AnyRow) -> Key:
    """What identifies a measurement, in the order of the file. A new one replaces the old."""
    return (
        row["op"],
        row["dtype"],
        row["m"],
        row["n"],
        row["nrhs"],
        row["batch"],
        row["impl"],
        row.get("variant", ""),
        row.get("scaling", ""),
        row.get("devices", 1),
    )


def load(path: Path) -> list[Any]:
    """The rows of a file, of one of the kinds above; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def record(path: Path, rows: Iterable[AnyRow]) -> None:
    """Add rows to a file; one that was measured again takes the place of the earlier one."""
    merged = {key(row): row for row in [*load(path), *rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(merged[k]) + "\n" for k in sorted(merged)))
    os.replace(partial, path)


def versions() -> Versions:
    """Those of this process, today."""
    return {
        "jax": jax.__version__,
        "jax_batched": jb.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def stamp(device: str, versions: Versions) -> str:
    """The line above a table: on what it was measured, with what, and when."""
    jax, jax_batched, date = versions["jax"], versions["jax_batched"], versions["date"]
    return f"{device}; jax {jax}; jax_batched {jax_batched}; {date}."


def device_name() -> str:
    """The GPU's name, or the processor's with the number of cores that may be used."""
    device = jax.devices()[0]
    return processor_name() if device.platform == "cpu" else str(device.device_kind)


def processor_name() -> str:
    """The processor's name with the number of cores that may be used."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    return f"{found.group(1).strip() if found else 'CPU'} ({cores} cores)"


def file_stem(device: str) -> str:
    """A device's name as that of a file."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def select(
    rows: Iterable[Row], nrhs: int | str, batch: int | None, mebibytes: float | None
) -> list[Row]:
    """One row per (op, impl, dtype, n): a series to be drawn or tabulated.

    `nrhs` is a number or "n"; operations without right-hand sides are always taken. With `batch`,
    the rows of that batch; else those whose matrices fill about so many mebibytes, by default as
    many as most rows of the file, or more where n is large and that was measured.
    """
    rows = [r for r in rows if r["nrhs"] in (0, r["n"] if nrhs == "n" else nrhs)]
    if batch is not None:
        return [row for row in rows if row["batch"] == batch]
    usual = math.log2(mebibytes) if mebibytes else _usual_size(rows)
    best: dict[tuple[str, str, str, int], Row] = {}
    for target in [usual] if mebibytes else [usual, math.log2(calls.LARGE_MEBIBYTES)]:
        for row in sorted(rows, key=lambda row: -abs(_size(row) - target)):
            if abs(_size(row) - target) < 1 and (target == usual or row["n"] >= calls.LARGE_N):
                best[row["op"], row["impl"], row["dtype"], row["n"]] = row
    return list(best.values())


def _size(row: Row) -> float:
    """The size of a row's matrices: log2 of mebibytes."""
    return math.log2(matrix_bytes(row["dtype"], row["m"], row["n"], row["batch"]) / 2**20)


def _usual_size(rows: Sequence[Row]) -> float:
    """The most frequent size among the rows, as a power of two of mebibytes."""
    sizes = [round(_size(row)) for row in rows]
    return max(set(sizes), key=lambda size: (sizes.count(size), size), default=0)
