"""JAX's own primitives, lowered to operations of this library."""

import functools
from collections.abc import Callable
from typing import Any

from jax_batched import _ffi
from jax_batched._core import _jax, mask
from jax_batched._core.operation import Operation, Params


def override_lowering(
    primitive: Any, operation: Operation, adapt: Callable[[Params], Params | None]
) -> Callable[[], None]:
    """Lowers one of JAX's primitives to an operation wherever that has a kernel.

    Args:
      primitive: JAX's; its operands are the operation's and its results the operation's first ones.
      operation: what it becomes.
      adapt: the operation's parameters, given the primitive's; None where it serves no such call.

    Returns:
      A function that restores the former lowering.
    """
    former = {platform: _jax.lowerings(platform).get(primitive) for platform in _ffi.PLATFORMS}

    def lower(platform: _ffi.Platform, ctx: Any, *operands: Any, **params: Any) -> Any:
        ours = adapt(params)
        choices = {"kernel": "", "masked": False}
        if ours is None or operation.path(platform, ctx, {**ours, **choices}).name == "lax":
            rule = (former[platform] or _jax.lowerings(None)[primitive]).rule
            return rule(ctx, *operands, **params)

        def call(*xs: Any) -> Any:
            with mask.only(None):
                return operation(*xs, **ours)[: len(ctx.avals_out)]

        return _jax.mlir.lower_fun(call)(ctx, *operands)

    def undo() -> None:
        for platform, entry in former.items():
            if entry is None:
                del _jax.lowerings(platform)[primitive]
            else:
                _jax.lowerings(platform)[primitive] = entry

    for platform in _ffi.PLATFORMS:
        _jax.mlir.register_lowering(
            primitive, functools.partial(lower, platform), platform=platform
        )
    return undo
