"""Stores programs of this version, for the tests of later ones: ``python tests/exported/make.py``.

Run it with the oldest supported jax, whose format every later one reads, once per release.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_enable_x64", True)
# Of source locations, which folder they were in is nobody's business.
jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
sys.path.insert(0, str(Path(__file__).parents[1]))

import ops  # noqa: E402

import jax_batched as jb  # noqa: E402

LISTED = [
    *ops.of("cholesky"),
    ops.BY_NAME["triangular_solve-left-lower"],
    ops.BY_NAME["triangular_solve-T-conj-unit"],
    *ops.of("cho_solve"),
    *ops.of("solve_pos"),
    ops.COMPOSITE[0],
]
# Of every other operation a row.
ROWS = [*LISTED, *(op for op in ops.ONE_EACH if op.operation not in {x.operation for x in LISTED})]
GRADIENTS = [ops.BY_NAME["cholesky-lower-mean"], ops.BY_NAME["cholesky-upper-triangle"]]
DTYPES = ("float32", "complex128")


def programs() -> Iterator[tuple[str, ops.Op, Callable[..., Any]]]:
    """Name of each program, the row of its operands, and what it computes."""
    for op in ROWS:
        yield op.name, op, op.with_info if op.can_fail else op
    for op in GRADIENTS:
        yield f"gradient-{op.name}", op, ops.gradient(op)
    for name, program in ops.PROGRAMS.items():
        yield name, ops.BY_NAME["inv"], program


def main() -> None:
    """Writes one file per operation and dtype into a folder named after the version."""
    folder = Path(__file__).parent / jb.__version__
    folder.mkdir(exist_ok=True)
    for name, op, call in programs():
        for dtype in DTYPES:
            scope = jax.export.SymbolicScope()
            shapes = [
                jax.ShapeDtypeStruct(
                    jax.export.symbolic_shape(f"b - 1, {x.shape[0]}, {x.shape[1]}", scope=scope),
                    dtype,
                )
                for x in op.operands(dtype, n=6, nrhs=3)
            ]
            exported = jax.export.export(
                jax.jit(call),
                platforms=("cpu", "cuda"),
                disabled_checks=jb.export_disabled_checks(),
            )(*shapes)
            (folder / f"{name}-{dtype}.jaxexport").write_bytes(exported.serialize())


if __name__ == "__main__":
    main()
