"""What sizes that are not multiples of 8 cost: `python -m benchmarks.sizes`.

Measures jax_batched at every n to 128 and every 7th beyond, and at the multiples of 8 above those;
takes the options of `benchmarks.run`. The rows go to DEVICE_sizes.jsonl.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks import run
from benchmarks.results import Row, load

MAX_EXCESS = 1.25  # times the next multiple of 8, in time per matrix


class Excess(NamedTuple):
    """A size, and its time per matrix over that of the next multiple of 8."""

    n: int
    ratio: float


def next_multiple(n: int) -> int:
    """The multiple of 8 that is n or follows it."""
    return -(-n // 8) * 8


def all_sizes() -> list[int]:
    """The sizes to measure."""
    swept = [*range(1, 129), *range(135, 513, 7)]
    return sorted({*swept, *map(next_multiple, swept)})


def excesses(rows: Sequence[Row]) -> dict[tuple[str, str], list[Excess]]:
    """For each operation and dtype, every size that is not a multiple of 8."""
    times = {
        (row["op"], row["dtype"], row["n"]): row["ms"] / row["batch"]
        for row in rows
        if row["impl"] == "jax_batched"
    }
    found: dict[tuple[str, str], list[Excess]] = {}
    for (op, dtype, n), time in sorted(times.items()):
        above = times.get((op, dtype, next_multiple(n)))
        if n % 8 and above:
            found.setdefault((op, dtype), []).append(Excess(n, time / above))
    return found


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of a table: the worst size, and all that are beyond the limit."""
    yield f"| operation | dtype | sizes | worst | beyond {MAX_EXCESS} |"
    yield "|---|---|---:|---|---|"
    for (op, dtype), sizes in excesses(rows).items():
        worst = max(sizes, key=lambda excess: excess.ratio)
        beyond = [f"{e.n} ({e.ratio:.2f})" for e in sizes if e.ratio > MAX_EXCESS]
        yield (
            f"| {op} | {dtype} | {len(sizes)} | {worst.ratio:.2f} at n = {worst.n} "
            f"| {', '.join(beyond) or 'none'} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; the exit status is 1 if any measurement failed."""
    given = sys.argv[1:] if arguments is None else arguments
    swept = ",".join(map(str, all_sizes()))
    complete = ["--n", swept, "--impl", "jax_batched", "--suffix", "sizes", "--no-plots", *given]
    status = run.main(complete)
    print("\n".join(markdown(load(run.results_file(run.parse(complete))))))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
