"""The table of implementations: how each makes a program that can be timed."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Any

import jax
import numpy as np

Sets = Sequence[tuple[jax.Array, ...]]

PROGRAM_S = 0.005  # a program over several sets of small batches lasts about this long


@dataclass(frozen=True)
class Program:
    """An operation bound to its input sets."""

    run: Callable[[], list[Any]]  # start one pass over the sets; the outputs may be pending
    wait: Callable[[list[Any]], object]  # return when those outputs are there
    operations: int  # how many operations one pass holds


@dataclass(frozen=True)
class Implementation:
    """Someone's library."""

    available: Callable[[], bool]
    program: Callable[[Callable[..., Any], Sets], Program]
    sample: Callable[[Any, np.ndarray[Any, Any]], np.ndarray[Any, Any]]


@cache
def on_cpu() -> bool:
    """Whether JAX's default device is the CPU."""
    return jax.default_backend() == "cpu"


@cache
def torch() -> Any:
    """The module torch, imported at its first use."""
    return importlib.import_module("torch")


def torch_installed() -> bool:
    """Whether torch is installed at all; asking wakes no device."""
    return importlib.util.find_spec("torch") is not None


def has_torch() -> bool:
    """Whether torch is installed for the device in use."""
    return torch_installed() and (on_cpu() or bool(torch().cuda.is_available()))


def release_memory() -> None:
    """Give torch's cached device memory back, so that JAX can have it."""
    if "torch" in sys.modules and not on_cpu():
        torch().cuda.empty_cache()


def jax_program(call: Callable[..., Any], sets: Sets) -> Program:
    """A jitted function over all sets.

    On a GPU it is one program, which the host queues ahead of the device: what is measured is the
    device's time. Its operands are parameters, all distinct, and it returns every output, so the
    compiler can neither share, hoist nor drop a call. On a CPU calls are not queued, since
    they would run concurrently.
    """
    if on_cpu():
        function = jax.jit(call)

        def one_by_one() -> list[Any]:
            return [jax.block_until_ready(function(*operands)) for operands in sets]

        return Program(one_by_one, jax.block_until_ready, len(sets))

    def one_pass(sets: Sets) -> list[jax.Array]:
        return [call(*operands) for operands in sets]

    unrolled = jax.jit(one_pass)
    if len(sets) > 1:
        passes = math.ceil(PROGRAM_S / _seconds(lambda: unrolled(sets)))
        if passes > 1:
            looped = jax.jit(lambda sets: _repeat(one_pass, sets, passes))
            return Program(lambda: list(looped(sets)), jax.block_until_ready, passes * len(sets))
    return Program(lambda: list(unrolled(sets)), jax.block_until_ready, len(sets))


def _seconds(run: Callable[[], object]) -> float:
    """Of the third run, the first that finds the caches of compiled code and memory filled."""
    for _ in range(3):
        start = perf_counter()
        jax.block_until_ready(run())
        seconds = perf_counter() - start
    return seconds


def _repeat(one_pass: Callable[[Sets], list[jax.Array]], sets: Sets, passes: int) -> Any:
    """The outputs of the last of several passes over the same sets, in a loop on the device.

    Every pass reads and writes the same memory, so its launches are one CUDA graph that is
    recorded once. The barrier ties the operands to the loop's counter: without it the
    compiler would take the calls, which are the same in every pass, out of the loop.
    """

    def body(i: Any, _: Any) -> list[jax.Array]:
        operands, _ = jax.lax.optimization_barrier((sets, i))
        return one_pass(operands)

    outputs = [jax.numpy.zeros(x.shape, x.dtype) for x in jax.eval_shape(one_pass, sets)]
    return jax.lax.fori_loop(0, passes, body, outputs)


def torch_program(call: Callable[..., Any], sets: Sets) -> Program:
    """Eager calls on tensors that share the memory of JAX's arrays, queued by torch itself."""
    tensors = [tuple(torch().from_dlpack(array) for array in operands) for operands in sets]

    def run() -> list[Any]:
        return [call(*operands) for operands in tensors]

    def wait(outputs: list[Any]) -> None:
        if not on_cpu():
            torch().cuda.synchronize()

    return Program(run, wait, len(sets))


def jax_sample(output: jax.Array, index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Some systems of a batch, on the host."""
    return np.asarray(output[index])


def torch_sample(output: Any, index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Some systems of a batch, on the host."""
    chosen = output[torch().from_numpy(index).to(output.device)]
    return np.asarray(chosen.resolve_conj().cpu().numpy())


IMPLEMENTATIONS: dict[str, Implementation] = {
    "jax_batched": Implementation(lambda: True, jax_program, jax_sample),
    "jax_batched:fast": Implementation(lambda: True, jax_program, jax_sample),
    "jax": Implementation(lambda: True, jax_program, jax_sample),
    "torch": Implementation(has_torch, torch_program, torch_sample),
}
USUAL_IMPLEMENTATIONS = [name for name in IMPLEMENTATIONS if name != "jax_batched:fast"]
