"""Ridge regressions of many stations, spread over the devices of several hosts.

Every process makes (a real program: reads) the observations of its own stations, and no other's.
The arrays are global: they are sharded over all devices of all processes, and one jitted program
builds and solves the normal equations of every station where its data are. Only the last line, a
mean over all stations, needs communication; the solves do not.

`jax.distributed` is the runtime: it connects the processes, and nothing here sends a message. On a
cluster that it knows (SLURM, Open MPI, Kubernetes, cloud TPUs), start the program once per process
without options. Elsewhere say where process 0 listens:

    python examples/multihost.py --coordinator 10.0.0.1:1234 --processes 2 --process 0   # on host 0
    python examples/multihost.py --coordinator 10.0.0.1:1234 --processes 2 --process 1   # on host 1

Both on one machine, without a GPU:

    python examples/multihost.py --coordinator 127.0.0.1:1234 --processes 2 --process 0 &
    python examples/multihost.py --coordinator 127.0.0.1:1234 --processes 2 --process 1

Alone, it is a program of one process: `python examples/multihost.py --processes 1`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_batched as jb

DAYS = 365
PENALTY = 1e-2


def connect(options: argparse.Namespace) -> None:
    """Joins the other processes; before anything else of JAX is used."""
    if options.processes == 1:
        return
    # How CPU devices of several hosts communicate; accelerators have their own ways.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if options.coordinator is None:
        jax.distributed.initialize()
    else:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)


def observations(station: int) -> tuple[np.ndarray, np.ndarray]:
    """A year of one station: the regressors of each day, and what was measured.

    A trend, two harmonics of the year and a constant, with noise; the station is the seed.
    """
    rng = np.random.default_rng(station)
    t = np.linspace(0, 1, DAYS)
    waves = [wave(2 * np.pi * k * t) for k in (1, 2) for wave in (np.sin, np.cos)]
    x = np.stack([np.ones_like(t), t, *waves], axis=-1)
    y = x @ rng.normal(size=x.shape[1]) + 0.1 * rng.normal(size=DAYS)
    return x.astype(np.float32), y.astype(np.float32)


def distribute(mesh: jax.sharding.Mesh, stations: int) -> tuple[Array, Array]:
    """The observations of all stations, of which each process makes its own."""
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("stations"))
    own = sharding.addressable_devices_indices_map((stations,)).values()
    parts = sorted({index[0].indices(stations)[:2] for index in own if index is not None})
    local = [observations(station) for start, stop in parts for station in range(start, stop)]
    x, y = (np.stack(arrays) for arrays in zip(*local, strict=True))
    return (
        jax.make_array_from_process_local_data(sharding, x, (stations, *x.shape[1:])),
        jax.make_array_from_process_local_data(sharding, y, (stations, *y.shape[1:])),
    )


def fit(x: Array, y: Array) -> tuple[Array, Array]:
    """Coefficients and root-mean-square residual of one station."""
    normal = jnp.matmul(x.T, x, precision="highest") + PENALTY * jnp.eye(x.shape[1])
    moments = jnp.matmul(x.T, y, precision="highest")
    coefficients = jb.solve(normal, moments, assume_a="pos")
    residual = y - jnp.matmul(x, coefficients, precision="highest")
    return coefficients, jnp.sqrt(jnp.mean(residual**2))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coordinator", help="address and port of process 0")
    parser.add_argument("--processes", type=int, help="how many there are")
    parser.add_argument("--process", type=int, help="which one this is, from 0")
    parser.add_argument("--stations", type=int, default=4096, help="(default: 4096)")
    parser.add_argument("--output", type=Path, help="where to write this process's coefficients")
    options = parser.parse_args(arguments)
    if options.coordinator and (options.processes is None or options.process is None):
        parser.error("--coordinator needs --processes and --process")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Fits all stations and says how well."""
    options = parse(arguments)
    connect(options)
    devices = jax.devices()
    stations = -(-options.stations // len(devices)) * len(devices)
    mesh = jax.make_mesh((len(devices),), ("stations",), axis_types=(jax.sharding.AxisType.Auto,))
    x, y = distribute(mesh, stations)
    coefficients, residual = jax.jit(jax.vmap(fit))(x, y)
    own = [shard.data.shape[0] for shard in coefficients.addressable_shards]
    print(
        f"process {jax.process_index()} of {jax.process_count()}: {sum(own)} of {stations} "
        f"stations on {len(own)} of {len(devices)} devices"
    )
    mean = jax.jit(jnp.mean)(residual)
    print(f"mean residual of all stations: {float(mean):.6f}")
    if options.output is not None:
        shards = sorted(
            coefficients.addressable_shards, key=lambda shard: shard.index[0].start or 0
        )
        first = shards[0].index[0].start or 0
        local = np.concatenate([np.asarray(shard.data) for shard in shards])
        np.savez(options.output, coefficients=local, first=first, mean=np.asarray(mean))


if __name__ == "__main__":
    main()
