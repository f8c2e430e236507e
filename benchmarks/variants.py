"""What the variants of a triangular solve cost beside each other: `python -m benchmarks.variants`.

Left or right, lower or upper, with or without a transpose. The rows go to DEVICE_variants.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_batched as jb
from benchmarks import results, timing
from benchmarks.implementations import IMPLEMENTATIONS, on_cpu, release_memory
from benchmarks.inputs import Inputs, matrix_bytes
from benchmarks.operations import OPERATIONS
from benchmarks.results import VariantRow
from benchmarks.run import WrongResultError, verify
from jax_batched.tune import sizes_of

OP = "triangular_solve"
OURS = IMPLEMENTATIONS["jax_batched"]
MAX_SPREAD = 1.3  # times the fastest variant


@dataclass(frozen=True)
class Variant:
    """One way to call a triangular solve; every one solves the same systems here.

    With L the lower triangle: L X = B, or its transpose where a is read as U = L^T, or both sides
    transposed.
    """

    left: bool
    lower: bool
    transpose: bool

    def __str__(self) -> str:
        side, triangle = "left" if self.left else "right", "lower" if self.lower else "upper"
        return f"{side} {triangle} {'T' if self.transpose else 'N'}"

    def call(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The solve."""
        return jb.triangular_solve(
            a, b, left_side=self.left, lower=self.lower, transpose_a=self.transpose
        )

    def residual_ratio(self, eps: float, a: Any, b: Any, x: Any) -> Any:
        """LAPACK's ratio of each system."""
        matrix = a.mT if self.transpose else a
        matrix, b, x = (matrix, b, x) if self.left else (matrix.mT, b.mT, x.mT)
        return OPERATIONS[OP].ratio(eps, matrix, b, x)


VARIANTS = [Variant(*flags) for flags in itertools.product((True, False), repeat=3)]


def measure(dtype: str, n: int, nrhs: int, batch: int, repetitions: int) -> dict[str, float]:
    """Milliseconds of every variant, each tested first."""
    ((factor, b),) = Inputs(dtype, n, batch, 1).sets(OPERATIONS[OP].operands, nrhs)
    transposed: Callable[[jax.Array], jax.Array] = jax.jit(lambda x: jnp.swapaxes(x, 1, 2).copy())
    matrices = {True: factor, False: transposed(factor)}
    sides = {True: b, False: transposed(b)}
    programs = {}
    for variant in VARIANTS:
        sets = [(matrices[variant.lower], sides[variant.left])]
        program = OURS.program(variant.call, sets)
        try:
            verify(replace(OPERATIONS[OP], ratio=variant.residual_ratio), OURS, sets, program)
        except WrongResultError as error:
            raise RuntimeError(f"{variant}, {dtype}, n={n}: {error}") from error
        programs[str(variant)] = program, timing.calibrate(program)
    return timing.measure(programs, repetitions)


def markdown(rows: Sequence[VariantRow]) -> Iterator[str]:
    """The lines of a table: how much longer than the fastest variant the slowest takes."""
    sizes = sorted({row["n"] for row in rows})
    yield "| dtype | right-hand sides | " + " | ".join(f"n = {n}" for n in sizes) + " |"
    yield "|---|---:|" + "---:|" * len(sizes)
    for dtype, nrhs in sorted({(row["dtype"], row["nrhs"]) for row in rows}):
        cells = []
        for n in sizes:
            same = [r for r in rows if (r["dtype"], r["nrhs"], r["n"]) == (dtype, nrhs, n)]
            if not same:
                cells.append("-")
                continue
            largest = max(row["batch"] for row in same)
            same = [row for row in same if row["batch"] == largest]
            best, worst = (f(same, key=lambda row: row["ms"]) for f in (min, max))
            spread = worst["ms"] / best["ms"]
            name = f" ({worst['variant']})" if spread > MAX_SPREAD else ""
            cells.append(f"{spread:.2f}{name}")
        yield f"| {dtype} | {nrhs} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", description=__doc__)
    add = parser.add_argument
    dtypes = ["float32", "float64"]
    add("--dtype", nargs="+", choices=dtypes, default=dtypes)
    add("--n", nargs="+", type=sizes_of, default=[[8, 16, 32, 64, 96, 128, 256]])
    add("--nrhs", nargs="+", type=int, default=[1, 16])
    add("--mebibytes", type=float, default=64 if on_cpu() else 512)
    add("--repetitions", type=int, default=timing.MIN_REPETITIONS)
    add("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    jax.config.update("jax_enable_x64", True)
    jb.keep_freed_memory()
    device = results.device_name()
    file = options.output_dir / f"{results.file_stem(device)}_variants.jsonl"
    sizes = sorted({n for part in options.n for n in part})
    for dtype, n, nrhs in itertools.product(options.dtype, sizes, options.nrhs):
        system = matrix_bytes(dtype, n, max(n, nrhs), 1)
        batch = max(1, int(options.mebibytes * 2**20) // system)
        times = measure(dtype, n, nrhs, batch, options.repetitions)
        rows: list[VariantRow] = [
            {
                "op": OP,
                "impl": "jax_batched",
                "dtype": dtype,
                "m": n,
                "n": n,
                "nrhs": nrhs,
                "batch": batch,
                "variant": variant,
                "ms": float(f"{ms:.5g}"),
                "device": device,
                **results.versions(),
            }
            for variant, ms in times.items()
        ]
        results.record(file, rows)
        release_memory()
    print("\n".join(markdown(results.load(file))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
