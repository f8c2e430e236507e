"""What every public function checks at trace time, and the messages it raises."""

import reprlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Array = jax.Array

COMPUTED = ("float32", "float64", "complex64", "complex128")
STORED = ("float16", "bfloat16")
ACCURACIES = ("ieee", "fast")


def is_stored(dtype: Any) -> bool:
    """Whether a dtype is a storage format: computed in float32, rounded once at the end."""
    return jnp.dtype(dtype).name in STORED


def operands(
    operation: str,
    *,
    keep_stored: bool = False,
    accepted: Sequence[str] = (*COMPUTED, *STORED),
    **named: ArrayLike,
) -> tuple[list[Array], Any]:
    """The operands in the dtype that the operation takes, and the dtype of the results.

    Operands are promoted to a common dtype; float16 and bfloat16 become float32, which is what they
    are computed in, save for an operation that takes them as they are (keep_stored).
    """
    arrays = [_array(operation, name, x, accepted) for name, x in named.items()]
    result = jnp.result_type(*arrays)
    taken = jnp.float32 if is_stored(result) and not keep_stored else result
    return [x.astype(taken) for x in arrays], result


def _array(operation: str, name: str, x: ArrayLike, accepted: Sequence[str]) -> Array:
    dtypes = ", ".join(accepted)
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        if isinstance(x, jax.Array):  # a tracer that has leaked, say
            raise
        raise TypeError(
            f"{operation}: {name} must be an array, or a list that makes one, of dtype {dtypes}, "
            f"got {described(x)}"
        ) from error
    if array.dtype.name not in accepted:
        raise TypeError(f"{operation}: {name} has dtype {array.dtype.name}; accepted are {dtypes}")
    return array


def square(operation: str, name: str, a: Array) -> None:
    """Raises unless a is a batch of square matrices."""
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(
            f"{operation}: {name} must have shape (..., n, n) with equal last two dimensions, "
            f"got {a.shape}"
        )


def matrix(operation: str, name: str, a: Array) -> None:
    """Raises unless a is a batch of matrices."""
    if a.ndim < 2:
        raise ValueError(f"{operation}: {name} must have shape (..., m, n), got {a.shape}")


def batches(operation: str, named: Sequence[tuple[str, Array, int]]) -> None:
    """Raises unless the dimensions before the last `core` ones broadcast."""
    try:
        jnp.broadcast_shapes(*(x.shape[: x.ndim - core] for _, x, core in named))
    except ValueError:
        shapes = ", ".join(f"{name} {x.shape}" for name, x, _ in named)
        raise ValueError(
            f"{operation}: the batch dimensions of {shapes} do not broadcast"
        ) from None


def right_hand_side(
    operation: str,
    a: Array,
    b: Array,
    *,
    left_side: bool = True,
    size: Any = None,
    names: tuple[str, str] = ("a", "b"),
) -> Array:
    """b as a batch of matrices: (..., n, k) or, for systems X A = B, (..., k, n).

    n is a's number of columns, if no size is given. b is a vector only if it has one dimension (as
    in NumPy 2). The message calls a and b by their names.
    """
    n = a.shape[-1] if size is None else size
    if b.ndim == 1:
        matrix = b[:, None] if left_side else b[None, :]
    else:
        matrix = b
    axis = -2 if left_side else -1
    if matrix.ndim < 2 or matrix.shape[axis] != n:
        wanted = f"({n},) or (..., {n}, k)" if left_side else f"({n},) or (..., k, {n})"
        raise ValueError(
            f"{operation}: {names[1]} must have shape {wanted} to go with {names[0]} of shape "
            f"{a.shape}, got {b.shape}"
        )
    batches(operation, [(names[0], a, 2), (names[1], matrix, 2)])
    return matrix


def mask(operation: str, where: ArrayLike | None, batch: Sequence[Any]) -> Array | None:
    """Which entries of a batch are computed, with as many dimensions; None: all."""
    if where is None:
        return None
    try:
        given = jnp.asarray(where)
    except (TypeError, ValueError) as error:
        if isinstance(where, jax.Array):
            raise
        raise TypeError(
            f"{operation}: where must be an array of dtype bool, got {described(where)}"
        ) from error
    if given.dtype != bool:
        raise TypeError(f"{operation}: where has dtype {given.dtype.name}; accepted is bool")
    return per_matrix(operation, "where", given, batch)


def sizes(
    operation: str, given: ArrayLike | None, batch: Sequence[Any], name: str = "sizes"
) -> Array | None:
    """The sizes of the matrices of a batch, int32 with as many dimensions; None: all are whole."""
    if given is None:
        return None
    try:
        traced = any(isinstance(x, jax.Array) for x in jax.tree.leaves(given))
        array = jnp.asarray(given) if traced else np.asarray(given)  # of which none wraps around
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{operation}: {name} must be an array of integers, got {described(given)}"
        ) from error
    array = array.astype(np.int32) if array.size == 0 and isinstance(given, list) else array
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{operation}: {name} has dtype {array.dtype.name}; accepted are integers")
    limits: Any = jnp.iinfo(array.dtype)  # type: ignore[no-untyped-call]
    low, high = max(int(limits.min), -1), min(int(limits.max), np.iinfo(np.int32).max)
    clip = jnp.clip if isinstance(array, jax.Array) else np.clip
    return per_matrix(operation, name, jnp.asarray(clip(array, low, high), jnp.int32), batch)


def per_matrix(operation: str, name: str, given: Array, batch: Sequence[Any]) -> Array:
    """An array with an element for each matrix of a batch, with as many dimensions."""
    try:
        fits = jnp.broadcast_shapes(given.shape, tuple(batch)) == tuple(batch)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{operation}: {name} of shape {given.shape} does not broadcast to the batch "
            f"dimensions {tuple(batch)}"
        )
    return given.reshape((*[1] * (len(batch) - given.ndim), *given.shape))


def batch_of(*arrays: Array) -> tuple[Any, ...]:
    """The common batch dimensions of matrices."""
    return jnp.broadcast_shapes(*(x.shape[:-2] for x in arrays))


def drop_column(x: Array, b: Array, *, left_side: bool = True) -> Array:
    """Inverse of `right_hand_side` on the solution."""
    if jnp.ndim(b) != 1:
        return x
    return x[..., 0] if left_side else x[..., 0, :]


def option(operation: str, name: str, value: Any, accepted: Sequence[Any]) -> Any:
    """The option, which must be one of the accepted words or numbers."""
    known = python_value(value)
    if not isinstance(known, str | int | float) or known not in accepted:
        allowed = ", ".join(repr(v) for v in accepted)
        raise ValueError(f"{operation}: {name} must be one of {allowed}, got {described(value)}")
    return known


def flag(operation: str, name: str, value: Any) -> bool:
    """The option as a bool; not by Python's truth, to which any word is True."""
    known = python_value(value)
    if not isinstance(known, int) or known not in (0, 1):
        raise TypeError(
            f"{operation}: {name} must be True or False, known when the program is traced, "
            f"got {described(value)}"
        )
    return bool(known)


def python_value(value: Any) -> Any:
    """An option that comes as an array of one known number as that number."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)) and not isinstance(
        value, jax.core.Tracer
    ):
        return value.item() if value.size == 1 else value
    return value


def described(value: Any) -> str:
    """What a message calls a value: an array by its shape and dtype, the rest cut short."""
    if isinstance(value, (jax.Array, np.ndarray)):
        kind = "a traced array" if isinstance(value, jax.core.Tracer) else "an array"
        return f"{kind} of shape {value.shape} and dtype {value.dtype.name}"
    return reprlib.repr(value)
