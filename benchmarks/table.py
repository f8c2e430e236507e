"""Print a results file as Markdown: `python -m benchmarks.table benchmarks/results/X.jsonl`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from benchmarks.plot import DTYPES, add_selection
from benchmarks.results import Row, load, select

OURS, THEIRS = "jax_batched", "jax"


def figure(value: float) -> str:
    """Two significant digits: 0.97, 1.0, 9.2, 53."""
    return f"{value:.2f}" if value < 0.995 else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the table: x_floor of jax_batched and of stock JAX, and the speed-up."""
    sizes = sorted({row["n"] for row in rows})
    yield "| operation | dtype | | " + " | ".join(f"n = {n}" for n in sizes) + " |"
    yield "|---|---|---|" + "---:|" * len(sizes)
    found = {(row["op"], row["dtype"], row["impl"], row["n"]): row for row in rows}
    for op in sorted({row["op"] for row in rows}):
        for dtype in DTYPES:
            ours = [found.get((op, dtype, OURS, n)) for n in sizes]
            theirs = [found.get((op, dtype, THEIRS, n)) for n in sizes]
            if not any(ours) and not any(theirs):
                continue
            speed_up = [
                f"**{figure(b['ms'] / a['ms'])}x**" if a and b else "-"
                for a, b in zip(ours, theirs, strict=True)
            ]
            yield _line(op, dtype, OURS, [figure(r["x_floor"]) if r else "-" for r in ours])
            if not any(theirs):
                continue
            yield _line("", "", "stock JAX", [figure(r["x_floor"]) if r else "-" for r in theirs])
            yield _line("", "", "speed-up", speed_up)


def _line(*cells: str | list[str]) -> str:
    """One line of a Markdown table."""
    flat = [c for cell in cells for c in ([cell] if isinstance(cell, str) else cell)]
    return "| " + " | ".join(flat) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    add_selection(parser)
    options = parser.parse_args(arguments)
    rows = select(load(options.file), options.nrhs, options.batch, options.mebibytes)
    rows = [row for row in rows if not options.op or row["op"] in options.op]
    print("\n".join(markdown(rows)))


if __name__ == "__main__":
    main()
