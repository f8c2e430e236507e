"""How an operation's operands and results may be spread over devices."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax_batched import _ffi
from jax_batched._core import _jax
from jax_batched._core.signature import Signature


def result_spec(
    name: str, avals: Sequence[Any], signature: Signature, batch: tuple[Any, ...]
) -> tuple[list[Any], dict[str, Any]]:
    """Explicit sharding of the batch dimensions of the results, and of their columns by name."""
    column = None if signature.columns is None else signature.columns[1]
    spec: list[Any] = [None] * len(batch)
    core_spec: dict[str, Any] = {}
    for aval, core in zip(avals, signature.operands, strict=True):
        own = _jax.spec_of(aval)
        for dim, axis in zip(core, own[aval.ndim - len(core) :], strict=True):
            if axis is None:
                continue
            if dim != column:
                but = "" if column not in core else ", but for its columns,"
                raise ValueError(
                    f"{name}: an operand of shape {aval.shape} is sharded as {aval.sharding.spec}; "
                    f"its last {len(core)} dimensions{but} must not be sharded "
                    "(use jax.sharding.reshard)"
                )
            core_spec[dim] = axis
        for d, axis in enumerate(own[: len(batch)]):
            if axis is None:
                continue
            if spec[d] is not None and spec[d] != axis:
                raise ValueError(
                    f"{name}: batch dimension {d} is sharded over {spec[d]} in one operand and "
                    f"over {axis} in another"
                )
            spec[d] = axis
    used = [axis for axes in (*spec, *core_spec.values()) for axis in _mesh_axes(axes)]
    twice = sorted({str(axis) for axis in used if used.count(axis) > 1})
    if twice:
        raise ValueError(
            f"{name}: operands sharded as {[aval.sharding.spec for aval in avals]} would shard two "
            f"dimensions of the result over {', '.join(twice)}"
        )
    return spec, core_spec


def _mesh_axes(axes: Any) -> tuple[Any, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    if axes is None:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)


def partitioning_context(platform: _ffi.Platform, ctx: Any) -> Any:
    """The context in which a call is lowered as one that the partitioner splits; else None."""
    if _jax.devices_of_program(ctx) == 1:
        return None
    return _jax.with_devices(ctx, _ffi.devices(platform))


def batch_attributes(ctx: Any, signature: Signature) -> dict[str, Any]:
    """Attributes that keep a batch-sharded call local to each device.

    Only the leading dimensions that all operands share in full can be sharded without a gather.
    """
    avals = [*ctx.avals_in, *ctx.avals_out]
    cores = [*signature.operands, *signature.results]
    batch_rank = avals[-1].ndim - len(cores[-1])
    batch = avals[-1].shape[:batch_rank]
    if not all(isinstance(size, int) for aval in avals for size in aval.shape):
        return {}
    shared = 0
    while shared < batch_rank and all(a.shape[shared] == batch[shared] for a in avals):
        shared += 1
    if shared == 0:
        return {}
    names = iter(_factor_names())
    sizes: dict[str, int] = {}

    def new_factor(size: int) -> str:
        name = next(names)
        sizes[name] = size
        return name

    leading = [new_factor(size) for size in batch[:shared]]
    tensors = [
        f"[{', '.join([*leading, *(new_factor(size) for size in aval.shape[shared:])])}]"
        for aval in avals
    ]
    split = len(ctx.avals_in)
    rule = (
        f"#sdy.op_sharding_rule<({', '.join(tensors[:split])})->({', '.join(tensors[split:])}) "
        f"{{{', '.join(f'{name}={size}' for name, size in sizes.items())}}}, custom>"
    )
    return {
        "mhlo.frontend_attributes": _jax.mlir.ir_attribute({"num_batch_dims": str(shared)}),
        "sdy.sharding_rule": _jax.mlir.ir.Attribute.parse(rule),
    }


def _factor_names() -> Iterator[str]:
    """Factor names as Shardy spells them: i to z, then z_1, z_2, ..."""
    yield from "ijklmnopqrstuvwxyz"
    count = 1
    while True:
        yield f"z_{count}"
        count += 1
