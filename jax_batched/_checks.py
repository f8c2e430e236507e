"""What every public function checks at trace time, and the messages it raises."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Array = jax.Array

_COMPUTED = ("float32", "float64", "complex64", "complex128")
_STORED = ("float16", "bfloat16")
ACCURACIES = ("ieee", "fast")


def is_stored(dtype: Any) -> bool:
    """Whether a dtype is a storage format: computed in float32, rounded once at the end."""
    return jnp.dtype(dtype).name in _STORED


def operands(
    operation: str, *, keep_stored: bool = False, **named: ArrayLike
) -> tuple[list[Array], Any]:
    """The operands in the dtype that the operation takes, and the dtype of the results.

    Operands are promoted to a common dtype; float16 and bfloat16 become float32, which is what they
    are computed in, save for an operation that takes them as they are (keep_stored).
    """
    arrays = {name: jnp.asarray(x) for name, x in named.items()}
    for name, x in arrays.items():
        if x.dtype.name not in (*_COMPUTED, *_STORED):
            raise TypeError(
                f"{operation}: {name} has dtype {x.dtype.name}; accepted are "
                f"{', '.join((*_COMPUTED, *_STORED))}"
            )
    result = jnp.result_type(*arrays.values())
    taken = jnp.float32 if is_stored(result) and not keep_stored else result
    return [x.astype(taken) for x in arrays.values()], result


def square(operation: str, name: str, a: Array) -> None:
    """Raises unless a is a batch of square matrices."""
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(
            f"{operation}: {name} must have shape (..., n, n) with equal last two dimensions, "
            f"got {a.shape}"
        )


def batches(operation: str, named: Sequence[tuple[str, Array, int]]) -> None:
    """Raises unless the dimensions before the last `core` ones broadcast."""
    try:
        jnp.broadcast_shapes(*(x.shape[: x.ndim - core] for _, x, core in named))
    except ValueError:
        shapes = ", ".join(f"{name} {x.shape}" for name, x, _ in named)
        raise ValueError(
            f"{operation}: the batch dimensions of {shapes} do not broadcast"
        ) from None


def right_hand_side(operation: str, a: Array, b: Array, *, left_side: bool = True) -> Array:
    """b as a batch of matrices: (..., n, k) or, for systems X A = B, (..., k, n).

    b is a vector only if it has one dimension (as in NumPy 2).
    """
    n = a.shape[-1]
    if b.ndim == 1:
        matrix = b[:, None] if left_side else b[None, :]
    else:
        matrix = b
    axis = -2 if left_side else -1
    if matrix.ndim < 2 or matrix.shape[axis] != n:
        wanted = f"({n},) or (..., {n}, k)" if left_side else f"({n},) or (..., k, {n})"
        raise ValueError(
            f"{operation}: b must have shape {wanted} to go with a of shape {a.shape}, "
            f"got {b.shape}"
        )
    batches(operation, [("a", a, 2), ("b", matrix, 2)])
    return matrix


def drop_column(x: Array, b: Array, *, left_side: bool = True) -> Array:
    """Inverse of `right_hand_side` on the solution."""
    if jnp.ndim(b) != 1:
        return x
    return x[..., 0] if left_side else x[..., 0, :]


def option(operation: str, name: str, value: Any, accepted: Sequence[Any]) -> Any:
    """Raises unless value is one of the accepted ones."""
    if value not in accepted:
        allowed = ", ".join(repr(v) for v in accepted)
        raise ValueError(f"{operation}: {name} must be one of {allowed}, got {value!r}")
    return value
