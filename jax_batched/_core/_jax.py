"""What this library needs of JAX beyond its documented interface: all of it, and nothing else.

A new release of JAX is checked here. Every name below is there, and means the same, in jax 0.10.2,
0.11.2 and 0.12.0.1.

| name | what for |
|---|---|
| `jax.extend.core.Primitive`, `jax.interpreters.{ad, batching, mlir, xla}` | rules |
| `aval.update`, `sharding.update`, `aval.sharding.spec` | types of results on explicit meshes |
| `jax.typeof(x).manual_axis_type.varying`, `jax.lax.pcast` | varying axes in `shard_map` |
| `mesh.explicit_axes`, `jax.sharding.auto_axes` | JAX's own routines on explicit meshes |
| `mlir.ShardingContext`, fields of the lowering context | calls that are split along columns |
| `jax.experimental.custom_partitioning` | the same |
| `mhlo.frontend_attributes`, `sdy.sharding_rule` | calls that are split along the batch |
| `mlir._lowerings`, `mlir._platform_specific_lowerings` | lowerings before an override |
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jaxlib.version import __version__ as _jaxlib_version

__all__ = ["Primitive", "ad", "batching", "custom_partitioning", "mlir", "xla"]

Array = jax.Array

# Whether a LAPACK call on a batch blocks a thread of XLA's pool until other tasks of the same pool
# are done: two of them at a time can wait for each other for ever.
LAPACK_BATCHES_BLOCK = tuple(map(int, _jaxlib_version.split(".")[:2])) < (0, 11)


def spec_of(aval: Any) -> tuple[Any, ...]:
    """Explicit sharding of each dimension of a type; None where there is none."""
    spec = getattr(getattr(aval, "sharding", None), "spec", ())
    return (*spec, *[None] * (aval.ndim - len(spec)))


def with_spec(sharding: Any, spec: tuple[Any, ...]) -> Any:
    """A sharding on the same mesh with another specification."""
    return sharding.update(spec=jax.sharding.PartitionSpec(*spec))


def sharded_like(mask: Array, x: Array) -> Array:
    """A mask of a batch, spread over an explicit mesh as the batch dimensions of x are."""
    spec = [
        axis if size != 1 else None
        for axis, size in zip(spec_of(jax.typeof(x)), mask.shape, strict=False)
    ]
    if all(axis is None for axis in spec):
        return mask
    spread: Array = jax.sharding.reshard(mask, jax.sharding.PartitionSpec(*spec))
    return spread


def align_varying_axes(operands: Sequence[Array]) -> list[Array]:
    """Inside shard_map: makes all operands vary over the union of their manual axes."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(operands, varying, strict=True)
    ]


def with_automatic_sharding(
    f: Callable[..., Sequence[Array]], avals_out: Sequence[Any]
) -> Callable[..., Sequence[Array]]:
    """f with explicit mesh axes made automatic: JAX's own routines refuse some of them."""
    shardings = tuple(aval.sharding for aval in avals_out)
    if not shardings[0].mesh.explicit_axes:
        return f
    wrapped = jax.sharding.auto_axes(lambda *xs: tuple(f(*xs)), out_sharding=shardings)
    return wrapped  # type: ignore[no-any-return, unused-ignore]


def is_for_export(ctx: Any) -> bool:
    """Whether the program of a lowering context is lowered to be exported."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def devices_of_program(ctx: Any) -> int:
    """How many devices share a program that the partitioner may split; 1 if it may not.

    Inside shard_map each device has its own program. An exported program cannot hold a split, which
    is a function of this process.
    """
    module = ctx.module_context
    if (
        not isinstance(module.axis_context, mlir.ShardingContext)
        or is_for_export(ctx)
        or not getattr(jax.config, "jax_use_shardy_partitioner", True)
    ):
        return 1
    return int(module.axis_context.num_devices)


def with_devices(ctx: Any, devices: Sequence[jax.Device]) -> Any:
    """The context of a program for several devices, with devices where it has none assigned.

    custom_partitioning asks for them to number the parts by; any will do. None if they are too few.
    """
    module = ctx.module_context
    axes = module.axis_context
    assigned = axes.device_assignment or tuple(devices)[: axes.num_devices]
    if len(assigned) != axes.num_devices:
        return None
    axes = dataclasses.replace(axes, device_assignment=assigned)
    return ctx.replace(module_context=module.replace(axis_context=axes))


def lowerings(platform: str | None) -> dict[Any, Any]:
    """JAX's table of lowering rules of a platform; None: those of every other platform."""
    if platform is None:
        return mlir._lowerings  # type: ignore[no-any-return, unused-ignore]
    return mlir._platform_specific_lowerings[platform]  # type: ignore[no-any-return, unused-ignore]
