"""Calls that the partitioner splits along batch dimensions and along columns.

The attributes of `sharding.batch_attributes` let XLA split a call along the leading
dimensions that all operands share in full, no others. Where right-hand sides are spread over
devices and the factor is not, or where they are spread along their columns, that would gather them.
Such a call is wrapped in `jax.experimental.custom_partitioning`: Shardy learns which dimensions of
operands and results go together, and the wrapped call is made on each device's part.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_batched._core._jax import custom_partitioning

Array = jax.Array
# What each dimension of an operand or result is: ("batch", d), ("column",) or None, never split.
Roles = tuple[Any, ...]


def roles(
    batch: Sequence[int], shape: Sequence[int], core: Sequence[str], column: str | None
) -> Roles:
    """The roles of an array's dimensions, given the batch shape of the call."""
    leading = [
        ("batch", d) if size == whole else None
        for d, (size, whole) in enumerate(zip(shape, batch, strict=False))
    ]
    return (*leading, *(("column",) if name == column else None for name in core))


def partitioned(
    call: Callable[..., Sequence[Array]],
    operand_roles: Sequence[Roles],
    result_roles: Sequence[Roles],
) -> Callable[..., Sequence[Array]]:
    """The call, as one that the partitioner may split where roles agree."""

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        arrays = [*operands, *results]
        if not _agree(arrays, [*operand_roles, *result_roles]):
            flat = jax.sharding.Mesh(np.array(list(arrays[0].sharding.device_set)), ("devices",))
            whole = jax.sharding.NamedSharding(flat, jax.sharding.PartitionSpec())
            return mesh, call_in_tuple, (whole,) * len(results), (whole,) * len(operands)
        shardings = [x.sharding for x in arrays]
        return (
            mesh,
            call_in_tuple,
            tuple(shardings[len(operands) :]),
            tuple(shardings[: len(operands)]),
        )

    def call_in_tuple(*operands: Array) -> tuple[Array, ...]:
        return tuple(call(*operands))

    names, fixed = _factors([*operand_roles, *result_roles])
    split = len(operand_roles)
    wrapped = custom_partitioning(call_in_tuple)
    wrapped.def_partition(
        partition,
        decode_shardings=False,
        sharding_rule=f"{', '.join(names[:split])} -> {', '.join(names[split:])}",
        need_replication_factors=fixed,
    )
    return wrapped


def _factors(arrays: Sequence[Roles]) -> tuple[list[str], tuple[str, ...]]:
    """Shardy's factors of each array, and those that must not be split."""
    fixed: list[str] = []
    texts = []
    for dims in arrays:
        factors = []
        for role in dims:
            if role is None:
                fixed.append(f"n{len(fixed)}")
                factors.append(fixed[-1])
            else:
                factors.append("k" if role == ("column",) else f"b{role[1]}")
        texts.append(" ".join(factors))
    return texts, tuple(fixed)


def _agree(arrays: Sequence[Any], all_roles: Sequence[Roles]) -> bool:
    """Whether every device has the same part of dimensions with one role, and all of the others.

    A batch that the devices do not divide has no such parts.
    """
    parts: dict[Any, Any] = {}
    for x, dims in zip(arrays, all_roles, strict=True):
        try:
            indices = x.sharding.devices_indices_map(x.shape)
        except ValueError:
            return False
        for device, index in indices.items():
            for size, part, role in zip(x.shape, index, dims, strict=True):
                own = part.indices(size)
                if role is None:
                    if own != (0, size, 1):
                        return False
                elif parts.setdefault((device, role), own) != own:
                    return False
    return True
