"""Time on 1, 2, 4, ... devices of one machine: `python -m benchmarks.scaling --help`.

Batches are spread over the devices along their first dimension. Weak scaling gives every device the
same number of matrices, strong scaling divides one device's among all. Efficiency is the time of
one device over that of several, for strong scaling also over their number; 1 is perfect. Results
must be those of one device, bit for bit, and the compiled program must not communicate.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import results, timing
from benchmarks.implementations import Program, on_cpu
from benchmarks.inputs import DERIVED, MAKERS, filling
from benchmarks.operations import OPERATIONS

WAKE_S = 2.0
COLLECTIVE = re.compile(r"\b(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)")


class WrongScalingError(Exception):
    """Several devices communicate, or give another result than one."""


class Case(NamedTuple):
    """One operation on one kind of operands."""

    op: str
    dtype: str
    n: int
    nrhs: int
    batch: int  # of one device

    def total(self, scaling: str, devices: int) -> int:
        """The batch of so many devices."""
        return self.batch * devices if scaling == "weak" else self.batch


def sharding(devices: int) -> jax.sharding.NamedSharding:
    """The first dimension over the first devices."""
    mesh = jax.make_mesh(
        (devices,),
        ("batch",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:devices],
    )
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))


def operands(case: Case, batch: int, devices: int) -> tuple[jax.Array, ...]:
    """The operands, made where they are used; their values do not depend on the devices."""

    def make(role: str) -> Any:
        source, derive = DERIVED.get(role, (role, lambda x: x))
        return derive(MAKERS[source](jax.random.key(0), case.dtype, case.n, case.nrhs, batch))

    def all_of_them() -> tuple[Any, ...]:
        return tuple(make(role) for role in OPERATIONS[case.op].operands)

    made: tuple[jax.Array, ...] = jax.jit(all_of_them, out_shardings=sharding(devices))()
    jax.block_until_ready(made)
    return made


def program(case: Case, arrays: Sequence[jax.Array]) -> tuple[Program, Any]:
    """What is timed, and what was compiled."""
    compiled = jax.jit(OPERATIONS[case.op].calls["jax_batched"]).lower(*arrays).compile()

    def run() -> list[Any]:
        outputs = [compiled(*arrays)]
        # A CPU's calls would run beside each other.
        return jax.block_until_ready(outputs) if on_cpu() else outputs

    return Program(run, jax.block_until_ready, 1), compiled


def verify(compiled: Any, case: Case, arrays: Sequence[jax.Array]) -> None:
    """Raises unless the devices work alone and give the bits that one device gives."""
    found = COLLECTIVE.search(compiled.as_text())
    if found:
        raise WrongScalingError(f"{case}: the program holds {found[0]}")
    first = jax.devices()[0]
    alone = jax.jit(OPERATIONS[case.op].calls["jax_batched"])
    expected = alone(*(jax.device_put(x, first) for x in arrays))
    result = jax.device_put(compiled(*arrays), first)
    equal = jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), result, expected)
    if not all(jax.tree.leaves(equal)):
        raise WrongScalingError(f"{case}: several devices differ from one")


def measure(case: Case, scaling: str, options: argparse.Namespace) -> Iterator[results.ScalingRow]:
    """One case on every number of devices, in turn."""
    programs = {}
    for devices in options.devices:
        arrays = operands(case, case.total(scaling, devices), devices)
        timed, compiled = program(case, arrays)
        if devices > 1:
            verify(compiled, case, arrays)
        timed.wait(timed.run())
        programs[str(devices)] = timed, timing.calibrate(timed)
    times = timing.measure(programs, options.repetitions)
    one = times[str(options.devices[0])] * (1 if scaling == "weak" else options.devices[0])
    for devices in options.devices:
        ms = times[str(devices)]
        yield {
            "op": case.op,
            "impl": "jax_batched",
            "dtype": case.dtype,
            "m": case.n,
            "n": case.n,
            "nrhs": case.nrhs,
            "batch": case.total(scaling, devices),
            "devices": devices,
            "scaling": scaling,
            "ms": float(f"{ms:.5g}"),
            "efficiency": float(f"{one / ms / (1 if scaling == 'weak' else devices):.4g}"),
            "device": results.device_name(),
            **results.versions(),
        }


def wake(case: Case, devices: int) -> None:
    """Keep all devices busy for WAKE_S: idle ones take a while to reach their clocks."""
    timed, _ = program(case, operands(case, case.total("weak", devices), devices))
    end = perf_counter() + WAKE_S
    while perf_counter() < end:
        timed.wait(timed.run())


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """All cases; a batch is divisible by every number of devices."""
    step = int(np.lcm.reduce(options.devices))
    for dtype in options.dtype:
        for n in options.n:
            size = options.mebibytes or results.usual_mebibytes(n, cpu=on_cpu())
            batch = filling(dtype, n, int(size * 2**20))
            for op in options.op:
                yield Case(op, dtype, n, OPERATIONS[op].nrhs(1), max(1, batch // step) * step)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to a limit."""
    return [2**k for k in range(limit.bit_length())]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    add = parser.add_argument
    add("--devices", nargs="+", type=int, help="how many (default: 1, 2, 4, ... of those here)")
    add("--op", nargs="+", choices=OPERATIONS, default=["cholesky", "solve_pos", "cho_solve"])
    add("--dtype", nargs="+", default=["float32", "float64"])
    add("--n", nargs="+", type=int, default=[8, 32, 128])
    add("--mebibytes", type=float, help="the size of one device's matrices (default: as run's)")
    add("--repetitions", type=int, default=timing.MIN_REPETITIONS)
    add("--output-dir", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    options.devices = sorted(set(options.devices or powers_of_two(len(jax.devices()))))
    if options.devices[0] < 1 or options.devices[-1] > len(jax.devices()):
        parser.error(f"--devices: there are {len(jax.devices())}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, record and print a table."""
    jax.config.update("jax_enable_x64", True)
    options = parse(arguments)
    file = options.output_dir / f"{results.file_stem(results.device_name())}_scaling.jsonl"
    print("| scaling | operation | dtype | n | batch | devices | ms | efficiency |")
    print("|---|---|---|---:|---:|---:|---:|---:|")
    wake(next(cases(options)), options.devices[-1])
    for case in cases(options):
        for scaling in ("weak", "strong"):
            for row in measure(case, scaling, options):
                results.record(file, [row])
                print(
                    f"| {scaling} | {row['op']} | {row['dtype']} | {row['n']} | {row['batch']} | "
                    f"{row['devices']} | {row['ms']:.4g} | {row['efficiency']:.3f} |"
                )
    print(f"rows in {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
