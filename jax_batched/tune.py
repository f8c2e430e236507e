"""``python -m jax_batched.tune``: measures the compiled CUDA kernels on this machine's GPU.

For each operation, dtype, size and number of right-hand sides that more than one kernel can serve,
all of them are checked and then timed beside one another. With ``--write``, what is fastest goes
into a file that the library reads at import: without a name the user's own, see
``jax_batched/_tuned.py``.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import jax

from jax_batched import _ffi, _tuned
from jax_batched._tuned import Block, Kind, Table
from jax_batched._tuning.calls import (
    DTYPES,
    LARGE_MEBIBYTES,
    LARGE_N,
    NRHS_CLASSES,
    RECIPES,
    SUBSTITUTIONS,
    candidates,
    default_sizes,
    measured_sizes,
    nrhs_classes,
    usual_mebibytes,
)
from jax_batched._tuning.choice import changes, pick, spread
from jax_batched._tuning.file import write
from jax_batched._tuning.measuring import measure_point
from jax_batched._tuning.progress import progress


def compute_capability() -> int:
    """That of JAX's default GPU: 90 for sm_90."""
    major, minor = str(jax.devices()[0].compute_capability).split(".")
    return 10 * int(major) + int(minor)


def tune(
    kind: Kind,
    sizes: Sequence[int],
    classes: Mapping[int, int | None],
    mebibytes: float | None,
    step: Callable[[str], None],
) -> tuple[Block, list[str], list[str]]:
    """Measures one kind of call: its block of the table, what changed, and what went wrong."""
    tiers = _ffi.cuda_tiers()
    kernels: dict[int | None, dict[int, str]] = {}
    changed: list[str] = []
    faults: list[str] = []
    for nrhs, limit in classes.items():

        def in_use(n: int, nrhs: int = nrhs) -> str:
            return _ffi.chosen_cuda_kernel(
                kind.operation, kind.dtype, n, nrhs, kind.fast, kind.capability
            )

        winners: dict[int, str] = {}
        times: dict[int, dict[str, float]] = {}
        last = ""
        for n in sizes:
            step(f"{kind} n={n} nrhs={nrhs}")
            memory = mebibytes or usual_mebibytes(n)
            seconds, wrong = measure_point(kind, n, nrhs, memory, candidates(kind, n, tiers))
            faults += wrong
            if seconds:
                times[n] = seconds
                winners[n] = last = pick(seconds, (in_use(n), last))
        kernels[limit] = spread(kind, winners, tiers)
        old = {n: in_use(n) for n in kernels[limit]}
        prefix = f"{kind}, " + (
            f"{nrhs} right-hand sides, " if kind.operation in SUBSTITUTIONS else ""
        )
        changed += [prefix + line for line in changes(kernels[limit], old, times)]
    note = (
        f"{jax.devices()[0].device_kind}, {datetime.now(UTC).date()}, "
        + (f"{mebibytes:g}" if mebibytes else f"512 (n >= {LARGE_N}: {LARGE_MEBIBYTES})")
        + " MiB"
    )
    return Block(note, kernels), changed, faults


def sizes_of(text: str) -> list[int]:
    """Sizes from "4,8,16", "1:65" or "8:513:8" (Python's ranges), or a mix of them."""
    found: list[int] = []
    for part in text.split(","):
        bounds = [int(bound) for bound in part.split(":")]
        found += range(*bounds) if len(bounds) > 1 else bounds
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jax_batched.tune", description=__doc__)
    add = parser.add_argument
    add("--op", nargs="+", choices=RECIPES, default=list(RECIPES), help="operations (default: all)")
    add("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes (default: all)")
    add("--n", nargs="+", type=sizes_of, help="sizes: 4,8,16 or ranges as Python's, 8:513:8")
    add(
        "--nrhs",
        nargs="+",
        type=int,
        choices=NRHS_CLASSES,
        default=list(NRHS_CLASSES),
        help="numbers of right-hand sides of triangular_solve and cho_solve, each of which stands "
        "for a range (default: all)",
    )
    add(
        "--mebibytes",
        type=float,
        help="memory of all matrices of a call (default: 512, "
        f"from n = {LARGE_N} on {LARGE_MEBIBYTES})",
    )
    add(
        "--write",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="write what is fastest into FILE, beside what it holds of other calls (default: the "
        f"user's file, {_tuned.user_file()}, which the library reads at import)",
    )
    options = parser.parse_args(arguments)
    if options.n is not None:
        options.n = sorted({n for part in options.n for n in part})
        if not options.n or options.n[0] < 1:
            parser.error("--n must be at least 1")
    if options.write == Path():
        options.write = _tuned.user_file()
        if options.write is None:
            parser.error(f"--write: {_tuned.VARIABLE} is empty; name a file")
    return options


def require_gpu() -> None:
    """Ends the program with the reason if there is nothing to tune here."""
    if jax.default_backend() != "gpu":
        raise SystemExit(
            f"jax_batched.tune needs a GPU, and JAX's default device here is a "
            f"{jax.default_backend().upper()}"
        )
    if _ffi.native_module("cuda") is None:
        raise SystemExit(f"jax_batched.tune: {_ffi.native_module_status('cuda')}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs; the exit status is 1 if a kernel was left out."""
    options = _parse(arguments)
    require_gpu()
    jax.config.update("jax_enable_x64", True)
    capability, tiers = compute_capability(), _ffi.cuda_tiers()
    work: dict[Kind, tuple[list[int], dict[int, int | None]]] = {}
    for operation, dtype in itertools.product(options.op, options.dtype):
        mine = [t for t in tiers if (t.operation, t.dtype) == (operation, dtype)]
        for fast in sorted({tier.fast for tier in mine} | {False}):
            kind = Kind(capability, operation, fast, dtype)
            sizes = (
                default_sizes(kind, tiers)
                if options.n is None
                else measured_sizes(kind, options.n, tiers)
            )
            work[kind] = sizes, nrhs_classes(operation, options.nrhs)
    total = sum(len(sizes) * len(classes) for sizes, classes in work.values())
    print(f"{jax.devices()[0].device_kind}, sm_{capability}: {total} measurements", flush=True)

    found: Table = {}
    changed: list[str] = []
    faults: list[str] = []
    with progress(total) as step:
        for kind, (sizes, classes) in work.items():
            block, lines, wrong = tune(kind, sizes, classes, options.mebibytes, step)
            if any(block.kernels.values()):
                found[kind] = block
            changed += lines
            faults += wrong
    print("\n".join(changed) if changed else "nothing changes")
    for fault in faults:
        print(fault, file=sys.stderr)
    if options.write is not None:
        write(options.write, found)
        print(f"wrote {options.write}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
