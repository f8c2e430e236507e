"""Make the pictures of a results file: `python -m benchmarks.plot benchmarks/results/X.jsonl`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.results import Row, load, select

DTYPES = ("float32", "float64", "complex64", "complex128")
# The colours of Okabe and Ito, which colour-blind readers tell apart; the markers help too.
STYLES = {
    "jax_batched": ("#0072B2", "o"),
    "jax_batched:fast": ("#56B4E9", "D"),
    "jax": ("#D55E00", "s"),
    "torch": ("#009E73", "^"),
}
OTHER_STYLES = (("#CC79A7", "v"), ("#E69F00", "P"), ("#000000", "X"))
DTYPE_STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#56B4E9", "D"), ("#E69F00", "^"))
LABELS = {"jax": "stock JAX", "torch": "PyTorch"}
TITLES = {
    "cholesky": "Cholesky factorization",
    "cholesky_symmetrize": "Cholesky factorization, input symmetrized",
    "cho_solve": "Solve from a Cholesky factor",
    "triangular_solve": "Triangular solve",
    "solve_pos": "Solve, positive definite",
    "refined_solve": "Refined solve, positive definite",
    "grad_logdet": "Gradient of a log-determinant",
    "grad_solve": "Gradient of a solution",
    "lu": "LU factorization",
    "lu_tall": "LU factorization, twice as many rows as columns",
    "solve_gen": "Solve, general",
    "inv": "Inverse",
    "qr": "QR factorization, reduced",
    "eigh": "Eigenvalues and eigenvectors",
    "eigvalsh": "Eigenvalues",
    "svd": "Singular value decomposition",
    "grad_eigh": "Gradient of a function of eigenvalues and eigenvectors",
    "det": "Determinant",
    "slogdet": "Logarithm of a determinant",
    "grad_solve_gen": "Gradient of a general solution",
    "grad_inv": "Gradient of an inverse",
    "cholesky_sizes": "Cholesky factorization of matrices that differ in size",
    "gemm_sizes": "Products of matrices that differ in size",
    "grad_slogdet": "Gradient of the logarithm of a determinant",
}


def styles(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each implementation, in the order of the legend."""
    names = {row["impl"] for row in rows}
    known = [name for name in STYLES if name in names]
    others = sorted(names - set(known))
    chosen = {name: STYLES[name] for name in known}
    for position, name in enumerate(others):
        chosen[name] = OTHER_STYLES[position % len(OTHER_STYLES)]
    return chosen


def draw_panel(axes: Axes, rows: Sequence[Row], look: dict[str, tuple[str, str]]) -> None:
    """The lines of one dtype."""
    axes.axhline(1.0, color="0.35", linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
    sizes = sorted({row["n"] for row in rows})
    for name, (colour, marker) in look.items():
        line = sorted((row["n"], row["x_floor"]) for row in rows if row["impl"] == name)
        ours = name.startswith("jax_batched")
        axes.plot(
            [n for n, _ in line],
            [x for _, x in line],
            color=colour,
            marker=marker,
            markersize=5.5 if len(sizes) <= 12 else 3.0,
            linewidth=2.2 if ours else 1.6,
            zorder=4 if ours else 3,
            label=LABELS.get(name, name),
        )
    size_axis(axes, sizes)
    axes.set_xlabel("matrix size n")


def size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Logarithmic axes with ticks at the sizes."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    powers = [n for n in sizes if n & (n - 1) == 0]
    ticks = sizes if len(sizes) <= 10 else powers if len(powers) > 2 else sizes[:: len(sizes) // 5]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="major", color="0.9", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def caption(rows: Sequence[Row], nrhs: int | str, batch: int | None) -> str:
    """What was measured, where and when."""
    last = max(rows, key=lambda row: row["date"])
    parts = [last["device"], f"jax {last['jax']}", f"jax_batched {last['jax_batched']}"]
    if any(row["nrhs"] for row in rows):
        parts.append("1 right-hand side" if nrhs == 1 else f"{nrhs} right-hand sides")
    if batch is not None:
        parts.append(f"batch {batch:,}")
    return ", ".join([*parts, last["date"]])


def draw(rows: Sequence[Row], nrhs: int | str, batch: int | None) -> Figure:
    """The picture of one operation: a panel for each dtype."""
    dtypes = [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)]
    lines = (len(dtypes) + 1) // 2
    height = 0.8 + 3.8 * lines
    figure = Figure(figsize=(9.4, height), layout="constrained")
    panels = [figure.add_subplot(lines, min(2, len(dtypes)), 1)]
    for position in range(1, len(dtypes)):
        panels.append(figure.add_subplot(lines, 2, position + 1, sharey=panels[0]))
    look = styles(rows)
    for axes, dtype in zip(panels, dtypes, strict=True):
        draw_panel(axes, [row for row in rows if row["dtype"] == dtype], look)
        axes.set_title(dtype, fontsize=11)
    low = min(0.6, 0.8 * min(row["x_floor"] for row in rows))
    high = max(2.0, 1.3 * max(row["x_floor"] for row in rows))
    panels[0].set_ylim(low, high)
    for axes in panels[::2]:
        axes.set_ylabel("time / time of a memory copy")
    for axes in panels[1::2]:
        axes.tick_params(labelleft=False)
    panels[0].annotate(
        "speed of memory",
        (1.0, 1.0),
        xycoords=("axes fraction", "data"),
        xytext=(-2, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9,
        color="0.35",
    )
    op = rows[0]["op"]
    figure.suptitle(f"{TITLES.get(op, op)}\n", fontsize=13, fontweight="bold", x=0.01, ha="left")
    figure.text(
        0.01, 1 - 0.345 / height, caption(rows, nrhs, batch), fontsize=9, color="0.35", va="top"
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def write_pictures(
    file: Path,
    ops: Sequence[str] | None,
    nrhs: int | str,
    batch: int | None,
    mebibytes: float | None,
    folder: Path,
) -> Iterator[Path]:
    """One PNG for each operation of a results file that has rows of this kind."""
    matplotlib.rcParams["font.size"] = 10
    rows = select(load(file), nrhs, batch, mebibytes)
    for op in sorted({row["op"] for row in rows} & set(ops or [row["op"] for row in rows])):
        chosen = [row for row in rows if row["op"] == op and row["dtype"] in DTYPES]
        if not chosen:
            continue
        suffix = f"_nrhs{nrhs}" if nrhs != 1 and any(row["nrhs"] for row in chosen) else ""
        suffix += f"_batch{batch}" if batch is not None else ""
        path = folder / f"{file.stem}_{op}{suffix}.png"
        draw(chosen, nrhs, batch).savefig(path, dpi=150)
        yield path


def draw_speed_up(rows: Sequence[Row]) -> Figure:
    """The picture of stock JAX's time over ours: a panel for each operation, a line each dtype."""
    ops = [op for op in TITLES if any(row["op"] == op for row in rows)]
    lines = (len(ops) + 1) // 2
    height = 0.8 + 3.2 * lines
    figure = Figure(figsize=(9.4, height), layout="constrained")
    found = {(row["op"], row["dtype"], row["n"], row["impl"]): row["ms"] for row in rows}
    first: Axes | None = None
    for position, op in enumerate(ops):
        axes = figure.add_subplot(lines, min(2, len(ops)), position + 1, sharey=first)
        first = first or axes
        axes.axhline(1.0, color="0.35", linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
        for dtype, (colour, marker) in zip(DTYPES, DTYPE_STYLES, strict=True):
            line = [
                (n, found[op, dtype, n, "jax"] / found[op, dtype, n, "jax_batched"])
                for n in sorted({row["n"] for row in rows if row["op"] == op})
                if {(op, dtype, n, "jax"), (op, dtype, n, "jax_batched")} <= found.keys()
            ]
            if line:
                axes.plot(*zip(*line, strict=True), color=colour, marker=marker, label=dtype)
        size_axis(axes, sorted({row["n"] for row in rows}))
        axes.set_title(TITLES[op], fontsize=11)
        axes.set_xlabel("matrix size n")
        axes.set_ylabel("times as fast as stock JAX" if position % 2 == 0 else "")
    last = max(rows, key=lambda row: row["date"])
    figure.suptitle(
        f"{last['device']}, jax {last['jax']}, jax_batched {last['jax_batched']}, {last['date']}",
        fontsize=9,
        color="0.35",
        x=0.01,
        ha="left",
    )
    assert first is not None
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def write_speed_up(file: Path, folder: Path) -> Path:
    """The picture of the speed-up over stock JAX, one right-hand side, of a results file."""
    path = folder / f"{file.stem}_speed_up.png"
    rows = [row for row in select(load(file), 1, None, None) if row["op"] != "cholesky_symmetrize"]
    draw_speed_up(rows).savefig(path, dpi=150)
    return path


# Of a solve with one right-hand side: operation, dtype, implementation, colour and marker.
PRECISIONS = {
    "single": ("solve_pos", "float32", "jax_batched", "#D55E00", "s"),
    "double": ("solve_pos", "float64", "jax_batched", "0.35", "^"),
    "double, stock JAX": ("solve_pos", "float64", "jax", "#009E73", "v"),
    "mixed": ("refined_solve", "float64", "jax_batched", "#0072B2", "o"),
}


def draw_precisions(batched: Sequence[Row], single: Sequence[Row]) -> Figure:
    """The rate of a solve in single, double and mixed precision: batches, and one large system.

    All are counted as the n^3 / 3 + 2 n^2 operations of one direct solve.
    """
    figure = Figure(figsize=(9.4, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    titles = ("batches", "one system")
    for axes, rows, title in zip(panels, (batched, single), titles, strict=True):
        for name, (*kind, colour, marker) in PRECISIONS.items():
            line = [
                (row["n"], row["batch"] * (row["n"] ** 3 / 3 + 2 * row["n"] ** 2) / row["ms"] / 1e9)
                for row in sorted(rows, key=lambda row: row["n"])
                if [row["op"], row["dtype"], row["impl"]] == kind
            ]
            if line:
                axes.plot(*zip(*line, strict=True), color=colour, marker=marker, label=name)
        size_axis(axes, sorted({row["n"] for row in rows}))
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("matrix size n")
    panels[0].set_ylabel("Tflop/s")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    return figure


def add_selection(parser: argparse.ArgumentParser) -> None:
    """The options that say which rows of a file are meant."""
    add = parser.add_argument
    add("file", type=Path, help="a results file")
    add("--op", nargs="+", help="operations (default: all)")
    add(
        "--nrhs",
        type=lambda text: text if text == "n" else int(text),
        default=1,
        help='the number of right-hand sides, or "n" (default: 1)',
    )
    add("--batch", type=int, help="rows of this batch (default: rows that fill the memory wanted)")
    add(
        "--mebibytes",
        type=float,
        help="rows whose matrices are about this large (default: the file's usual size)",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pictures beside the results file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    add_selection(parser)
    parser.add_argument("--output-dir", type=Path, help="default: the folder of the file")
    options = parser.parse_args(arguments)
    folder = options.output_dir or options.file.parent
    for path in write_pictures(
        options.file, options.op, options.nrhs, options.batch, options.mebibytes, folder
    ):
        print(path)


if __name__ == "__main__":
    main()
