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

from jax_batched._core import _jax

Array = jax.Array

_current: contextvars.ContextVar[Array | None] = contextvars.ContextVar("where", default=None)


@contextlib.contextmanager
def only(mask: Array | None) -> Iterator[None]:
    """Under this mask (None: under none) is what is traced inside. It has all batch dimensions."""
    token = _current.set(mask)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Array | None:
    return _current.get()


def applied(x: Array, core_rank: int) -> Array:
    """x, with zeros (False) in the entries that the present mask leaves out."""
    mask = current()
    return x if mask is None else kept(x, mask, core_rank)


def of_batch(mask: Array, batch: Sequence[Any]) -> Array:
    """The mask for arrays whose batch has size 1 in some dimensions, and maybe more of them at the
    end. What serves several entries is computed if one of them is."""
    assert mask.ndim <= len(batch)
    shared = tuple(d for d in range(mask.ndim) if batch[d] == 1)
    reduced = jnp.any(mask, axis=shared, keepdims=True) if shared else mask
    return reduced.reshape(*reduced.shape, *[1] * (len(batch) - mask.ndim))


def kept(x: Array, mask: Array, core_rank: int, other: int = 0) -> Array:
    """x, an array with that many dimensions beside the batch, and `other` where False."""
    batch = x.shape[: x.ndim - core_rank]
    own = _jax.sharded_like(of_batch(mask, batch), x)
    own = own.reshape(*own.shape, *[1] * core_rank)
    return jnp.where(own, x, jnp.full_like(x, other))
