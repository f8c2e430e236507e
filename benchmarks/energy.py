"""Joules per matrix of steady runs: `python -m benchmarks.energy --help`.

The GPU's total energy counter is read through NVML, the processor packages' through RAPL (Linux's
powercap files, which usually only root may read).
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from benchmarks import results
from benchmarks.inputs import Inputs, filling
from benchmarks.operations import OPERATIONS

QUEUE_S = 0.2  # calls are queued for this long, then waited for
WARM_UP_S = 1.0  # clocks and temperature settle
POWERCAP = Path("/sys/class/powercap")


class NoCounterError(Exception):
    """There is no energy counter, or it may not be read."""


@dataclass(frozen=True)
class Meter:
    """A device's energy counters.

    Attributes:
      name: of the kind of counter.
      device: what is measured, as the results name it.
      read: the raw counts.
      unit: joules of one count.
      periods: after which the counts start again at zero; 0: never.
    """

    name: str
    device: str
    read: Callable[[], list[int]]
    unit: float
    periods: list[int]

    def joules(self, start: Sequence[int], end: Sequence[int]) -> float:
        """The energy between two readings."""
        counts = [
            (b - a) % period if period else b - a
            for a, b, period in zip(start, end, self.periods, strict=True)
        ]
        return self.unit * sum(counts)


def nvml_meter() -> Meter:
    """The counter of the GPU that JAX uses first."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        raise NoCounterError("nvidia-ml-py is not installed") from None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    try:
        nvml.nvmlInit()
        if visible and not visible.isdigit():
            handle = nvml.nvmlDeviceGetHandleByUUID(visible)
        else:
            handle = nvml.nvmlDeviceGetHandleByIndex(int(visible or 0))
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        raise NoCounterError(f"NVML's energy counter is not readable: {error}") from error
    device = str(jax.devices()[0].device_kind)
    return Meter(
        "nvml", device, lambda: [nvml.nvmlDeviceGetTotalEnergyConsumption(handle)], 1e-3, [0]
    )


def rapl_meter(root: Path = POWERCAP) -> Meter:
    """The counters of the processor packages."""
    zones = [
        zone
        for zone in sorted(root.glob("intel-rapl:*"))
        if (zone / "name").exists() and (zone / "name").read_text().startswith("package")
    ]
    if not zones:
        raise NoCounterError(f"RAPL is not readable: no package counters in {root}")

    def number(zone: Path, name: str) -> int:
        return int((zone / name).read_text())

    try:
        periods = [number(zone, "max_energy_range_uj") + 1 for zone in zones]
        meter = Meter(
            "rapl",
            results.processor_name(),
            lambda: [number(zone, "energy_uj") for zone in zones],
            1e-6,
            periods,
        )
        meter.read()
    except OSError as error:
        raise NoCounterError(f"RAPL is not readable: {error}") from error
    return meter


def steady(run: Callable[[], Any], seconds: float) -> tuple[int, float]:
    """Keeps a device busy for at least so long: the number of calls, and the seconds."""
    calls = 0
    start = perf_counter()
    while perf_counter() - start < seconds:
        queued = perf_counter()
        outputs = [run()]
        calls += 1
        jax.block_until_ready(outputs)
        each = perf_counter() - queued
        for _ in range(int(QUEUE_S / each)):
            outputs[0] = run()
            calls += 1
        jax.block_until_ready(outputs)
    return calls, perf_counter() - start


def measure(
    meter: Meter, options: argparse.Namespace, device: jax.Device
) -> Iterator[results.EnergyRow]:
    """Every case on one device."""
    for dtype in options.dtype:
        for n in options.n:
            target = int(results.usual_mebibytes(n, cpu=device.platform == "cpu") * 2**20)
            batch = filling(dtype, n, target)
            inputs = Inputs(dtype, n, batch, target)
            for op in options.op:
                nrhs = OPERATIONS[op].nrhs(1)
                (operands,) = inputs.sets(OPERATIONS[op].operands, nrhs)
                for impl in options.impl:
                    function = jax.jit(OPERATIONS[op].calls[impl])

                    def run(function: Any = function, operands: Any = operands) -> Any:
                        return function(*operands)

                    steady(run, WARM_UP_S)
                    before = meter.read()
                    calls, seconds = steady(run, options.seconds)
                    joules = meter.joules(before, meter.read())
                    yield {
                        "op": op,
                        "impl": impl,
                        "dtype": dtype,
                        "m": n,
                        "n": n,
                        "nrhs": nrhs,
                        "batch": batch,
                        "joules": float(f"{joules / (calls * batch):.4g}"),
                        "watts": float(f"{joules / seconds:.4g}"),
                        "ms": float(f"{1e3 * seconds / calls:.5g}"),
                        "counter": meter.name,
                        "device": meter.device,
                        **results.versions(),
                    }


def markdown(rows: Sequence[results.EnergyRow]) -> Iterator[str]:
    """The lines of a table: microjoules per matrix, watts, and stock JAX's over ours."""
    yield "| operation | dtype | n | jax_batched | stock JAX | ratio |"
    yield "|---|---|---:|---:|---:|---:|"
    found = {(r["op"], r["dtype"], r["n"], r["impl"]): r for r in rows}
    for op, dtype, n in dict.fromkeys((r["op"], r["dtype"], r["n"]) for r in rows):
        ours, theirs = (found.get((op, dtype, n, impl)) for impl in ("jax_batched", "jax"))
        ratio = f"{theirs['joules'] / ours['joules']:.3g}" if ours and theirs else "-"
        yield f"| {op} | {dtype} | {n} | {_cell(ours)} | {_cell(theirs)} | {ratio} |"


def _cell(row: results.EnergyRow | None) -> str:
    return f"{1e6 * row['joules']:.3g} µJ ({row['watts']:.0f} W)" if row else "-"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.energy", description=__doc__)
    add = parser.add_argument
    add("--op", nargs="+", choices=OPERATIONS, default=["cholesky", "solve_pos"])
    add("--dtype", nargs="+", default=["float32", "float64"])
    add("--n", nargs="+", type=int, default=[32, 128, 512])
    add("--impl", nargs="+", choices=["jax_batched", "jax"], default=["jax_batched", "jax"])
    add("--seconds", type=float, default=5, help="of each steady run (default: 5)")
    add("--output-dir", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the GPU, if there is one, and the CPU; say which counters cannot be read."""
    options = parse(arguments)
    jax.config.update("jax_enable_x64", True)
    meters: dict[str, Callable[[], Meter]] = {"cpu": rapl_meter}
    if jax.default_backend() == "gpu":
        meters = {"gpu": nvml_meter, **meters}
    for platform, make in meters.items():
        try:
            meter = make()
        except NoCounterError as error:
            print(f"{platform}: {error}")
            continue
        device = jax.devices(platform)[0]
        file = options.output_dir / f"{results.file_stem(meter.device)}_energy.jsonl"
        rows = []
        with jax.default_device(device):
            for row in measure(meter, options, device):
                rows.append(row)
                results.record(file, [row])
        print(f"{meter.device}, counter {meter.name}; rows in {file}")
        print("\n".join(markdown(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
