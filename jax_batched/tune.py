"""``python -m jax_batched.tune``: measures the compiled CUDA kernels on this machine's GPU.

For each operation, dtype, size and number of right-hand sides that more than one kernel can serve,
all of them are checked and then timed beside one another. With ``--write``, what is fastest goes
into a file that the library reads at import: without a name the user's own, see
``jax_batched/_tuned.py``.
"""

import argparse
import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_batched as jb
from jax_batched import _ffi, _tuned
from jax_batched._matrices import (
    MAX_RATIO,
    Array,
    cho_solve_ratio,
    cholesky_ratio,
    graded_spd,
    normal,
    solve_ratio,
    triangular,
)
from jax_batched._tuned import Block, Kind, Table, ranges, read_table, write_table

DTYPES = ("float32", "float64", "complex64", "complex128")
# Of these operations: a number of right-hand sides that is measured, and the largest that it stands
# for.
SUBSTITUTIONS = ("triangular_solve", "cho_solve")
NRHS_CLASSES: dict[int, int | None] = {1: 1, 4: 8, 16: 32, 64: None}
SIZES = sorted({*range(1, 17), *range(20, 65, 4), *range(72, 129, 8), *range(160, 513, 32)})
LARGE_N = 185  # from here on (what rounds up to 192) 512 MiB are few waves of blocks on a large GPU
LARGE_MEBIBYTES = 4096

DISTINCT = 64  # matrices with values of their own; the batch repeats them
ROUNDS = 5
ROUND_S = 0.01
HOPELESS = 3  # times the time of the fastest: not worth rounds
NOISE = 1.02  # a kernel replaces another if it is faster than this many times


# The table.


def merge(table: Table, kind: Kind, block: Block) -> None:
    """Puts new measurements into a table; sizes that were not measured again stay."""
    before = table.get(kind, block).kernels
    limits = {**before, **block.kernels}
    kernels = {limit: {**before.get(limit, {}), **block.kernels.get(limit, {})} for limit in limits}
    table[kind] = Block(block.note, kernels)


def write(file: Path, found: Table) -> None:
    """Puts new measurements into a file, which need not be there."""
    table = read_table(file.read_text(), str(file)) if file.exists() else {}
    for kind, block in found.items():
        merge(table, kind, block)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(write_table(table))


# The choice.


def pick(times: Mapping[str, float], preferred: Sequence[str]) -> str:
    """The fastest kernel, or the first of the preferred ones that is as fast within the noise."""
    best = min(times.values())
    for kernel in preferred:
        if times.get(kernel, float("inf")) <= NOISE * best:
            return kernel
    return min(times, key=lambda kernel: times[kernel])


def candidates(kind: Kind, n: int, tiers: Sequence[_ffi.Tier]) -> list[str]:
    """The kernels that can serve a call."""
    return [
        tier.kernel
        for tier in tiers
        if (tier.operation, tier.dtype) == (kind.operation, kind.dtype)
        and tier.min_n <= n <= tier.max_n
        and tier.capability <= kind.capability
        and (kind.fast or not tier.fast)
    ]


def measured_sizes(kind: Kind, wanted: Sequence[int], tiers: Sequence[_ffi.Tier]) -> list[int]:
    """The wanted sizes for which there is a choice; with accuracy="fast", one of its own."""

    def chooses(n: int) -> bool:
        names = candidates(kind, n, tiers)
        own = not kind.fast or names != candidates(kind._replace(fast=False), n, tiers)
        return len(names) > 1 and own

    largest = _ffi.max_n(kind.operation, kind.dtype)
    return [n for n in wanted if n <= largest and chooses(n)]


def default_sizes(kind: Kind, tiers: Sequence[_ffi.Tier]) -> list[int]:
    """Sizes with a choice such that between two neighbours the same kernels can serve."""
    mine = [t for t in tiers if (t.operation, t.dtype) == (kind.operation, kind.dtype)]
    borders = {n for tier in mine for n in (tier.min_n - 1, tier.max_n)} - {0}
    return measured_sizes(kind, sorted({*SIZES, *borders}), tiers)


def spread(kind: Kind, winners: Mapping[int, str], tiers: Sequence[_ffi.Tier]) -> dict[int, str]:
    """The kernel of each n: a size that was not measured takes that of the next one above.

    Kernels work in tiles, so a size costs about what the next full tile does.
    """
    kernels = {}
    below = None
    for n, kernel in sorted(winners.items()):
        for size in range(n if below is None else below + 1, n + 1):
            if kernel in candidates(kind, size, tiers):
                kernels[size] = kernel
        below = n
    return kernels


# The measurement.


def compute_capability() -> int:
    """That of JAX's default GPU: 90 for sm_90."""
    major, minor = str(jax.devices()[0].compute_capability).split(".")
    return 10 * int(major) + int(minor)


def _lower(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Array:
    return np.tril(triangular(rng, dtype, shape))


class Recipe(NamedTuple):
    """How an operation is called and checked.

    Attributes:
      make: the matrices of operand a.
      solves: there is an operand b.
      call: the operation, given its accuracy.
      ratio: LAPACK's test ratio of each matrix, from eps, the operands and the result.
    """

    make: Callable[[np.random.Generator, str, tuple[int, ...]], Array]
    solves: bool
    call: Callable[[str], Callable[..., jax.Array]]
    ratio: Callable[..., Array]


RECIPES = {
    "cholesky": Recipe(
        graded_spd,
        False,
        lambda accuracy: lambda a: jb.cholesky(a, symmetrize_input=False, accuracy=accuracy),
        cholesky_ratio,
    ),
    "solve_pos": Recipe(
        graded_spd,
        True,
        lambda accuracy: lambda a, b: jb.solve(a, b, assume_a="pos", lower=True, accuracy=accuracy),
        solve_ratio,
    ),
    "triangular_solve": Recipe(
        _lower,
        True,
        lambda accuracy: lambda a, b: jb.triangular_solve(a, b, left_side=True, lower=True),
        solve_ratio,
    ),
    "cho_solve": Recipe(
        _lower,
        True,
        lambda accuracy: lambda c, b: jb.cho_solve((c, True), b),
        cho_solve_ratio,
    ),
}


def usual_mebibytes(n: int) -> float:
    """The memory that the matrices of a call fill by default."""
    return LARGE_MEBIBYTES if n >= LARGE_N else 512


def nrhs_classes(operation: str, wanted: Sequence[int]) -> dict[int, int | None]:
    """Numbers of right-hand sides to measure; the choice for solve_pos depends on n alone."""
    if operation not in SUBSTITUTIONS:
        return {1: None}
    return {nrhs: limit for nrhs, limit in NRHS_CLASSES.items() if nrhs in wanted}


@jax.jit
def _repeats(x: jax.Array) -> jax.Array:
    """Whether each group of DISTINCT results is the first one, bit for bit."""
    return (x.reshape(-1, min(DISTINCT, x.shape[0]), *x.shape[1:]) == x[:DISTINCT]).all()


class WrongResultError(Exception):
    """A kernel's result fails its check."""


class Point:
    """One call with its operands on the device."""

    def __init__(self, kind: Kind, n: int, nrhs: int, mebibytes: float):
        self.kind, self.n, self.recipe = kind, n, RECIPES[kind.operation]
        entries = n * max(n, nrhs) * np.dtype(kind.dtype).itemsize
        batch = max(1, int(mebibytes * 2**20) // entries)
        distinct = min(DISTINCT, batch)
        rng = np.random.default_rng(n)
        operands = [self.recipe.make(rng, kind.dtype, (distinct, n, n))]
        if self.recipe.solves:
            operands.append(normal(rng, kind.dtype, (distinct, n, nrhs)))
        self.known = [x.astype(kind.dtype) for x in operands]
        repeat = jax.jit(lambda x: jnp.tile(x, (batch // distinct, 1, 1)))
        self.operands = [repeat(x) for x in self.known]

    def program(self, kernel: str) -> Callable[[], jax.Array]:
        """The call with a kernel, compiled and checked."""
        call = self.recipe.call("fast" if self.kind.fast else "ieee")
        with _ffi.force_kernel(kernel):
            compiled = jax.jit(lambda *x: call(*x)).lower(*self.operands).compile()
        result = jax.block_until_ready(compiled(*self.operands))
        wide = np.promote_types(self.kind.dtype, np.float64)
        known = [x.astype(wide) for x in (*self.known, np.asarray(result[:DISTINCT]))]
        ratio = self.recipe.ratio(float(np.finfo(self.kind.dtype).eps), *known)
        if not np.all(ratio <= MAX_RATIO):
            raise WrongResultError(f"LAPACK's ratio is {np.max(ratio):.3g}")
        if not _repeats(result):
            raise WrongResultError("equal matrices have different results")
        return lambda: compiled(*self.operands)


def measure(programs: Mapping[str, Callable[[], jax.Array]]) -> dict[str, float]:
    """Seconds per call of each program: they take turns, the median of several rounds.

    A program that takes much longer than another one is run twice, no more.
    """

    def seconds(run: Callable[[], jax.Array], calls: int) -> float:
        start = perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        return perf_counter() - start

    once = {name: min(seconds(run, 1) for _ in range(2)) for name, run in programs.items()}
    slowest = HOPELESS * min(once.values(), default=0.0)
    close = {name: run for name, run in programs.items() if once[name] <= slowest}
    calls = {name: 2 + int(ROUND_S / max(once[name], 1e-6)) for name in close}
    rounds = [
        {name: seconds(run, calls[name]) / calls[name] for name, run in close.items()}
        for _ in range(ROUNDS)
    ]
    return once | {name: median(times[name] for times in rounds) for name in close}


def measure_point(
    kind: Kind, n: int, nrhs: int, mebibytes: float, names: Sequence[str]
) -> tuple[dict[str, float], list[str]]:
    """Seconds of each of the named kernels that gives right results, and why others do not count.

    A kernel may fail to run: it may need more shared memory than this GPU has.
    """
    point = Point(kind, n, nrhs, mebibytes)
    programs, faults = {}, []
    for name in names:
        try:
            programs[name] = point.program(name)
        except (WrongResultError, jax.errors.JaxRuntimeError) as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            faults.append(f"{kind} n={n} nrhs={nrhs}, {name} left out: {text}")
    return measure(programs), faults


# The program.


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function that shows one more step done: a bar with rich, else a line each 5 %."""
    if importlib.util.find_spec("rich") is not None:
        bars = importlib.import_module("rich.progress")
        columns = (
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.description}"),
        )
        with bars.Progress(*columns) as bar:
            task = bar.add_task("", total=total)
            yield lambda text: bar.update(task, advance=1, description=text)
        return
    done = 0

    def step(text: str) -> None:
        nonlocal done
        done += 1
        if done * 20 // total != (done - 1) * 20 // total:
            print(f"{done}/{total}  {text}", flush=True)

    yield step


def changes(
    new: Mapping[int, str], old: Mapping[int, str], times: Mapping[int, Mapping[str, float]]
) -> Iterator[str]:
    """A line for each range of sizes that gets another kernel, with the gain where measured."""
    pairs = {n: f"{old[n] or 'none'} -> {new[n]}" for n in new if new[n] != old[n]}
    for low, high, pair in ranges(pairs):
        gains = [
            times[n][old[n]] / times[n][new[n]]
            for n in range(low, high + 1)
            if n in times and old[n] in times[n]
        ]
        sizes = f"n = {low}" if low == high else f"n = {low}..{high}"
        gain = f", {min(gains):.2f} to {max(gains):.2f} times as fast" if gains else ""
        yield f"{sizes}: {pair}{gain}"


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
