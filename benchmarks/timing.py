"""The one way in which everything here is timed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from time import perf_counter

import jax
import jax.numpy as jnp

from benchmarks.implementations import Program, jax_program

REPETITION_S = 0.02  # a timed repetition lasts at least this long
MIN_OPERATIONS = 3  # and holds at least so many operations
MIN_REPETITIONS = 7
LIMIT_S = 2.0  # a program that takes longer than this is not timed


class TooSlowError(Exception):
    """A program is so slow that timing it would hold up the whole run."""


def repetition(program: Program, calls: int) -> float:
    """Seconds for so many calls, from an idle device to an idle device.

    Calls are queued and the host waits once. Of the outputs only the last is kept: the memory of
    the others goes to the calls that follow.
    """
    start = perf_counter()
    for _ in range(calls):
        outputs = program.run()
    program.wait(outputs)
    return perf_counter() - start


def calibrate(program: Program) -> int:
    """The calls of one repetition; finding out also warms up, at least one repetition long."""
    first = repetition(program, 1)
    if first > LIMIT_S:
        raise TooSlowError(f"{first:.1f} s per call")
    calls = math.ceil(MIN_OPERATIONS / program.operations)
    while (seconds := repetition(program, calls)) < REPETITION_S:
        calls = math.ceil(calls * min(10.0, 1.2 * REPETITION_S / seconds))
    return calls


def measure(programs: Mapping[str, tuple[Program, int]], repetitions: int) -> dict[str, float]:
    """Milliseconds per operation of several programs, each with its calls per repetition.

    They take turns, repetition by repetition, so that a drift of the machine meets all alike. A
    call that does not count precedes each repetition: it finds the caches, the memory pools and
    the other library's threads as that one left them. The result is the median.
    """
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repetitions):
        for name, (program, calls) in programs.items():
            repetition(program, 1)
            seconds[name].append(repetition(program, calls) / (calls * program.operations))
    return {name: 1e3 * median(values) for name, values in seconds.items()}


def copy_bandwidth(size: int, repetitions: int) -> float:
    """Bytes per second, read and written, of the fastest pass over `size` bytes.

    Two passes are tried: a copy, which may be the driver's own, and an elementwise kernel that the
    compiler cannot leave out. On an H100 the second alone is 15 % slower than the card can copy.
    """
    x = jax.block_until_ready(jnp.arange(size // 4, dtype=jnp.float32))
    passes = {"copy": jnp.copy, "negate": jnp.negative}
    programs = {name: jax_program(f, [(x,)]) for name, f in passes.items()}
    timed = {name: (program, calibrate(program)) for name, program in programs.items()}
    return 2e3 * float(x.nbytes) / min(measure(timed, repetitions).values())
