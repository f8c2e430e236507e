"""The factory of JAX primitives: what every operation of this library is made by."""

from jax_batched._core import mask
from jax_batched._core.operation import (
    Call,
    Operation,
    Params,
    Path,
    Rules,
    beyond,
    composed,
    kernel,
    lax,
    takes_rows,
)

__all__ = [
    "Call",
    "Operation",
    "Params",
    "Path",
    "Rules",
    "beyond",
    "composed",
    "kernel",
    "lax",
    "mask",
    "takes_rows",
]
