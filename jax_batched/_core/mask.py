"""Which entries of a batch are computed: the `where` of a call.

Whatever the rules of an operation call to compute a derivative, or a path to compute the operation,
is under the call's own mask, without a word in the rule: `only` holds it while they are traced.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

_current: contextvars.ContextVar[Array | None] = contextvars.ContextVar("where", default=None)


@contextlib.contextmanager
def only(mask: Array | None) -> Iterator[None]:
    """Under this mask (None: under none) is what is traced inside."""
    token = _current.set(mask)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Array | None:
    return _current.get()


def of_batch(mask: Array, batch: Sequence[Any]) -> Array:
    """The mask for a batch with its dimensions first, and maybe others after them.

    Where the batch has size 1 an entry is computed if any of those is that it serves.
    """
    shared = tuple(d for d in range(mask.ndim) if batch[d] == 1)
    reduced = jnp.any(mask, axis=shared, keepdims=True)
    return reduced.reshape(*reduced.shape, *[1] * (len(batch) - mask.ndim))


def kept(x: Array, mask: Array, core_rank: int) -> Array:
    """x, an array with that many dimensions beside the batch's, with zeros in the other entries."""
    own = of_batch(mask, x.shape[: x.ndim - core_rank])
    return jnp.where(own.reshape(*own.shape, *[1] * core_rank), x, jnp.zeros_like(x))
