"""What refined solves reach: `python -m benchmarks.refinement docs/refinement.md`.

Fills the sections `sweep`, `errors` and `real` of the document, between the lines
`<!-- begin NAME -->` and `<!-- end NAME -->`, and draws `refinement.png` beside it. Needs mpmath
and statsmodels. Every certificate is compared with the backward error in extended precision; one
that is false ends the program.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

import jax_batched as jb
from benchmarks import documents, results

SIZES = (8, 32, 100)
SEEDS = 8
CONDITIONS = [10.0**k for k in range(15)]
VARIANTS = [(m, d) for d in ("float32", "float16", "bfloat16") for m in ("ir", "gmres")]
# The colours of Okabe and Ito; a dtype has a colour, a method a line.
COLOURS = {"float32": "#0072B2", "float16": "#D55E00", "bfloat16": "#009E73"}
LINES = {"ir": "-", "gmres": (0, (4, 2))}

Array = Any  # NumPy's


def with_condition(condition: float, n: int, seed: int) -> Array:
    """A symmetric matrix with a spectrum evenly spaced on a logarithmic scale."""
    q = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]
    a = q * np.logspace(0, -np.log10(condition), n) @ q.T
    return (a + a.T) / 2


@cache
def systems(n: int) -> tuple[Array, Array, Array]:
    """Matrices [condition, seed], right-hand sides, and the solutions."""
    a = np.array([[with_condition(c, n, s) for s in range(SEEDS)] for c in CONDITIONS])
    b = np.random.default_rng(n).standard_normal((*a.shape[:2], n, 1))
    return a, b, extended_solve(a, b)


def product(a: Array, x: Array) -> Array:
    """a @ x in extended precision."""
    wide = a.astype(np.longdouble)
    return (wide * x[..., None, :, 0].astype(np.longdouble)).sum(-1)[..., None]


def extended_solve(a: Array, b: Array) -> Array:
    """The solution by refinement in extended precision."""
    inverse = np.linalg.inv(a)
    x = np.zeros(b.shape, np.longdouble)
    for _ in range(60):
        x = x + inverse @ (b - product(a, x)).astype(float)
    return x


def backward_error(a: Array, b: Array, x: Array) -> Array:
    """Normwise, of each matrix, the residual in extended precision."""
    residual = np.abs(b - product(a, x)).max((-2, -1))
    norm = np.abs(a).sum(-1).max(-1)
    return (residual / (norm * np.abs(x).max((-2, -1)) + np.abs(b).max((-2, -1)))).astype(float)


def forward_error(x: Array, solution: Array) -> Array:
    """Relative, of each matrix; 1 where there is no x."""
    error = np.abs(x - solution).max((-2, -1)) / np.abs(solution).max((-2, -1))
    return np.where(np.isfinite(error), error, 1).astype(float)


def refined(a: Array, b: Array, **options: Any) -> tuple[Array, jb.RefinementInfo]:
    """A refined solve whose certificates have been compared with the truth."""
    x, info = jax.jit(partial(jb.refined_solve, **options))(a, b)
    x, info = jax.tree.map(np.asarray, (x, info))
    # What rounding in the residual, in float64, can hide or add.
    n = a.shape[-1]
    slack = n * np.finfo(float).eps
    tol = max(n, 8) * np.finfo(float).eps / 2
    error = backward_error(a, b, x)
    false = (info.converged & ~(error <= tol + slack)) | (~info.converged & (error < tol - slack))
    false |= ~(np.abs(info.backward_error - error) <= slack) & np.isfinite(error)
    if false.any():
        raise SystemExit(f"false certificate of matrix {np.argwhere(false)[0]}, {options}")
    return x, info


@cache
def sweep() -> dict[tuple[str, str], tuple[Array, Array]]:
    """Of each variant without fallback: whether it converged and its steps, [condition, matrix]."""
    found = {}
    for method, dtype in VARIANTS:
        parts = [
            refined(a, b, method=method, factor_dtype=dtype, fallback=False)[1]
            for a, b, _ in map(systems, SIZES)
        ]
        found[method, dtype] = (
            np.concatenate([info.converged for info in parts], 1),
            np.concatenate([info.steps for info in parts], 1),
        )
    return found


@cache
def errors() -> dict[str, Array]:
    """Forward errors of each solver, [condition, matrix]."""
    solvers: dict[str, Callable[[Array, Array], Array]] = {
        "float32": lambda a, b: jb.solve(a.astype("f4"), b.astype("f4"), assume_a="pos"),
        "float64": lambda a, b: jb.solve(a, b, assume_a="pos"),
        "refined": lambda a, b: refined(a, b)[0],
        "refined, GMRES": lambda a, b: refined(a, b, method="gmres")[0],
    }
    return {
        name: np.concatenate(
            [forward_error(np.asarray(solve(a, b)), x) for a, b, x in map(systems, SIZES)], 1
        )
        for name, solve in solvers.items()
    }


def sweep_table() -> Iterator[str]:
    """Steps, or how many converged."""
    yield "| condition | " + " | ".join(f"{d}, `{m}`" for m, d in VARIANTS) + " |"
    yield "|---|" + "---:|" * len(VARIANTS)
    for i, condition in enumerate(CONDITIONS):
        cells = []
        for variant in VARIANTS:
            converged, steps = (y[i] for y in sweep()[variant])
            share = 100 * converged.mean()
            text = f"{np.median(steps[converged]):g}" if converged.any() else ""
            cells.append(text if share == 100 else f"{text} ({share:.0f} %)" if text else "-")
        yield f"| 1e{np.log10(condition):.0f} | " + " | ".join(cells) + " |"


def error_table() -> Iterator[str]:
    """Median and largest forward error of each solver."""
    yield "| condition | " + " | ".join(errors()) + " | rescued |"
    yield "|---|" + "---:|" * (len(errors()) + 1)
    rescued = np.concatenate([refined(a, b)[1].rescued for a, b, _ in map(systems, SIZES)], 1)
    for i, condition in enumerate(CONDITIONS):
        cells = [f"{np.median(e[i]):.0e} ({e[i].max():.0e})" for e in errors().values()]
        cells.append(f"{100 * rescued[i].mean():.0f} %")
        yield f"| 1e{np.log10(condition):.0f} | " + " | ".join(cells) + " |"


def series(name: str) -> Array:
    """A real time series that statsmodels ships: values at even spacing, some of them missing."""
    data = importlib.import_module(f"statsmodels.datasets.{name}").load_pandas().data
    return data.iloc[:, -1].to_numpy(float)


def real_systems() -> Iterator[tuple[str, Array, Array]]:
    """Kernel matrices and normal equations of real series."""
    interpolate = importlib.import_module("scipy.interpolate")
    co2 = series("co2")
    t = np.flatnonzero(np.isfinite(co2))[:100]
    y = co2[t] - co2[t].mean()
    for length, noise in ((4, 1e-2), (8, 1e-4), (8, 1e-6), (16, 1e-8)):
        kernel = np.exp(-(((t[:, None] - t) / length) ** 2) / 2) + noise * np.eye(len(t))
        yield f"CO2, Gaussian kernel, {length} weeks, noise {noise:g}", kernel, y
    sunspots = series("sunspots")
    u = np.linspace(0, 1, len(sunspots))
    for degree in (3, 6, 9):
        powers = np.vander(u, degree + 1, increasing=True)
        yield f"sunspots, polynomial of degree {degree}", powers.T @ powers, powers.T @ sunspots
    nile = series("nile")
    u = np.linspace(0, 1, len(nile))
    for count in (12, 60):
        inner = np.quantile(u, np.linspace(0, 1, count - 2)) ** 2
        knots = np.concatenate([[0.0] * 3, inner, [1.0] * 3])
        basis = interpolate.BSpline.design_matrix(u, knots, 3).toarray()
        bend = np.diff(np.eye(count), 2, axis=0)
        matrix = basis.T @ basis + 1e-6 * bend.T @ bend
        yield f"Nile, {count} B-splines, second differences x 1e-6", matrix, basis.T @ nile


def mp_solve(a: Array, b: Array) -> Array:
    """The solution with 60 digits, rounded to extended precision."""
    mp = importlib.import_module("mpmath").mp
    mp.dps = 60
    x = mp.lu_solve(mp.matrix(a.tolist()), mp.matrix(b.tolist()))
    return np.array([np.longdouble(str(v)) for v in x])[:, None]


def real_table() -> Iterator[str]:
    """Forward errors on real systems."""
    yield ("| system | n | condition | float32 | float64 | refined | steps | GMRES | steps |")
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for name, a, b in real_systems():
        a = (a + a.T) / 2
        solution, b = mp_solve(a, b), b[:, None]
        low = jb.solve(a.astype("f4"), b.astype("f4"), assume_a="pos")
        cells = [forward_error(np.asarray(low), solution)]
        cells.append(forward_error(np.asarray(jb.solve(a, b, assume_a="pos")), solution))
        texts = [f"{float(e):.0e}" if e < 1 else "none" for e in cells]
        for method in ("ir", "gmres"):
            x, info = refined(a, b, method=method)
            texts.append(f"{float(forward_error(x, solution)):.0e}")
            texts.append(f"{int(info.steps)}" + (", rescued" if info.rescued else ""))
        condition = np.linalg.cond(a)
        yield f"| {name} | {len(a)} | {condition:.0e} | " + " | ".join(texts) + " |"


def draw(path: Path) -> None:
    """Forward errors, and how many converge without fallback, over the condition."""
    figure = Figure(figsize=(9.4, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    looks = {
        "float32": ("#D55E00", "s"),
        "float64": ("0.35", "^"),
        "refined": ("#0072B2", "o"),
    }
    for name, (colour, marker) in looks.items():
        error = np.maximum(np.median(errors()[name], 1), 1e-17)
        left.plot(CONDITIONS, error, color=colour, marker=marker, markersize=5, label=name)
    left.set_yscale("log")
    left.set_title("median forward error", fontsize=11)
    left.legend(frameon=False)
    for method, dtype in VARIANTS:
        share = sweep()[method, dtype][0].mean(1)
        right.plot(
            CONDITIONS,
            share,
            color=COLOURS[dtype],
            linestyle=LINES[method],
            label=f"{dtype}, {method}",
        )
    right.yaxis.set_major_formatter(PercentFormatter(1))
    right.set_title("converged without fallback", fontsize=11)
    figure.legend(
        *right.get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False
    )
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("condition number")
        axes.grid(True, color="0.9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


SECTIONS = {"sweep": sweep_table, "errors": error_table, "real": real_table}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill one document."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.refinement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("document", type=Path, help="a Markdown file")
    document = parser.parse_args(arguments).document
    jax.config.update("jax_enable_x64", True)

    documents.fill(document, SECTIONS)
    draw(document.with_suffix(".png"))
    print(f"{results.device_name()}: {document}, {document.with_suffix('.png')}")


if __name__ == "__main__":
    main()
