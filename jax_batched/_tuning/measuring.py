"""One call with each of its kernels, checked and timed."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np

from jax_batched import _ffi
from jax_batched._matrices import MAX_RATIO, normal
from jax_batched._tuned import Kind
from jax_batched._tuning.calls import RECIPES

DISTINCT = 64  # matrices with values of their own; the batch repeats them
ROUNDS = 5
ROUND_S = 0.01
HOPELESS = 3  # times the time of the fastest: not worth rounds


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
