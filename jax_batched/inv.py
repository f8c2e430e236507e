"""Inverses and determinants of general matrices."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_batched import _checks
from jax_batched._core import Operation, Params, Rules, _jax, composed, kernel, lax, mask
from jax_batched._matrix import matmul, real_dtype
from jax_batched._sized import sized
from jax_batched._sizes import Sizes
from jax_batched.lu import lu_op, solve_with_factors

Array = jax.Array


@overload
def inv(
    a: ArrayLike,
    *,
    overwrite_a: bool = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: Literal[False] = ...,
) -> Array: ...


@overload
def inv(
    a: ArrayLike,
    *,
    overwrite_a: bool = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: Literal[True],
) -> tuple[Array, Array]: ...


@overload
def inv(
    a: ArrayLike,
    *,
    overwrite_a: bool = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: bool,
) -> Array | tuple[Array, Array]: ...


def inv(
    a: ArrayLike,
    *,
    overwrite_a: bool = False,
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
    return_info: bool = False,
) -> Array | tuple[Array, Array]:
    """Inverse of each matrix of a batch.

    The signature of `jax.numpy.linalg.inv`, and more.

    Args:
      a: matrices of shape ``(..., n, n)``; float32, float64, complex64 or complex128.
      overwrite_a, where, sizes: as in `cholesky`.
      return_info: also return ``info``.

    Returns:
      The inverse, of a's shape and dtype. With return_info, a pair of it and ``info`` as in `lu`;
      the inverse of a matrix whose info is not 0 is NaN; no other is affected.

    Raises:
      TypeError: a is no array or has another dtype; a flag is not True or False; where is not bool,
        sizes are no integers.
      ValueError: a is not a batch of square matrices, or where or sizes have another shape.

    The derivative reuses the inverse. Algorithm: see `lu`.
    """
    (matrix,), dtype = _checks.operands("inv", a=a)
    _checks.square("inv", "a", matrix)
    wanted = _checks.mask("inv", where, matrix.shape[:-2])
    parts = Sizes("inv", sizes, matrix.shape[-1], matrix.shape[:-2], where=wanted)
    inverse, info = _inversion(
        parts,
        matrix,
        where=wanted,
        overwrite=_checks.flag("inv", "overwrite_a", overwrite_a),
    )
    inverse, info = inverse.astype(dtype), parts.info(info, 2)
    return (inverse, info) if _checks.flag("inv", "return_info", return_info) else inverse


class SlogdetResult(NamedTuple):
    """The determinant as ``sign * exp(logabsdet)``."""

    sign: Array
    logabsdet: Array


jax.export.register_namedtuple_serialization(
    SlogdetResult, serialized_name="jax_batched.SlogdetResult"
)


def slogdet(
    a: ArrayLike, *, where: ArrayLike | None = None, sizes: ArrayLike | None = None
) -> SlogdetResult:
    """Sign and logarithm of the absolute value of the determinant of each matrix of a batch.

    The signature of `jax.numpy.linalg.slogdet`, without its `method`.

    Args:
      a: matrices of shape ``(..., n, n)``; float32, float64, complex64 or complex128.
      where: bool, of a shape that broadcasts to the batch dimensions. Where it is False the results
        are zero, and a counts for nothing.
      sizes: as in `cholesky`. Where a size is negative or too large, the results are NaN.

    Returns:
      ``(sign, logabsdet)`` of shape ``(...)``; the sign, of a's dtype, is 1 or -1, for complex
      matrices a number of magnitude 1; the logarithm is real. A matrix with a zero pivot has 0
      and ``-inf``.

    Raises:
      TypeError: a is no array or has another dtype; where is not bool, sizes are no integers.
      ValueError: a is not a batch of square matrices, or where or sizes have another shape.

    The derivative costs one factorization and the solve with its factors. That of a matrix with a
    zero pivot is NaN, alone. Algorithm: see `lu`.
    """
    (matrix,), dtype = _checks.operands("slogdet", a=a)
    _checks.square("slogdet", "a", matrix)
    wanted = _checks.mask("slogdet", where, matrix.shape[:-2])
    parts = Sizes("slogdet", sizes, matrix.shape[-1], matrix.shape[:-2], where=wanted)
    sign, log = _sign_and_logarithm(parts, matrix, where=wanted)
    return SlogdetResult(sign.astype(dtype), log.astype(real_dtype(dtype)))


def det(a: ArrayLike, *, where: ArrayLike | None = None, sizes: ArrayLike | None = None) -> Array:
    """Determinant of each matrix of a batch.

    The signature of `jax.numpy.linalg.det`.

    Args:
      a: matrices of shape ``(..., n, n)``; float32, float64, complex64 or complex128.
      where: bool, of a shape that broadcasts to the batch dimensions. Where it is False the results
        are zero, and a counts for nothing.
      sizes: as in `cholesky`. Where a size is negative or too large, the results are NaN.

    Returns:
      The determinant, of shape ``(...)`` and a's dtype. It is exactly 0 where a pivot is, and
      overflows or underflows only where it does not fit the dtype itself.

    Raises:
      TypeError: a is no array or has another dtype; where is not bool, sizes are no integers.
      ValueError: a is not a batch of square matrices, or where or sizes have another shape.

    The derivative costs one factorization and the solve with its factors; that of a matrix with a
    zero pivot is `jax.numpy.linalg.det`'s. Algorithm: see `lu`.
    """
    (matrix,), dtype = _checks.operands("det", a=a)
    _checks.square("det", "a", matrix)
    wanted = _checks.mask("det", where, matrix.shape[:-2])
    parts = Sizes("det", sizes, matrix.shape[-1], matrix.shape[:-2], where=wanted)
    (determinant,) = _determinant(parts, matrix, where=wanted)
    return determinant.astype(dtype)


def _identity(a: Array) -> Array:
    return jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)


def _inv_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """dx = -x da x."""
    (a,), (da,) = primals, tangents
    x, info = inv_op(a, **params)
    return (x, info), (None if da is None else -matmul(x, matmul(da, x)), None)


def _inv_by_lu(a: Array) -> Sequence[Array]:
    results = lu_op(a)
    return solve_with_factors(a, results, _identity(a)), results[-1]


def _inverse(a: Array) -> Array:
    return solve_with_factors(a, lu_op(jax.lax.stop_gradient(a)), _identity(a))


def _trace_of_product(x: Array, y: Array) -> Array:
    return jnp.sum(jnp.swapaxes(x, -1, -2) * y, axis=(-2, -1))


def _slogdet_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """d log|det| = Re tr(a^-1 da), d sign = i sign Im tr(a^-1 da)."""
    (a,), (da,) = primals, tangents
    sign, log = slogdet_op(a, **params)
    if da is None:
        return (sign, log), (None, None)
    trace = _trace_of_product(_inverse(a), da)
    if not jnp.iscomplexobj(a):
        return (sign, log), (None, trace)
    turn = jnp.imag(trace)
    return (sign, log), (sign * jax.lax.complex(jnp.zeros_like(turn), turn), jnp.real(trace))


def _det_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """d det = det tr(a^-1 da)."""
    (a,), (da,) = primals, tangents
    (determinant,) = det_op(a, **params)
    if da is None or a.shape[-1] == 0:
        return (determinant,), (None,)
    singular = mask.applied(determinant == 0, 0)
    inverse = jnp.where(singular[..., None, None], jnp.zeros_like(a), _inverse(a))
    regular = determinant * _trace_of_product(inverse, da)

    def cofactors(a: Array, da: Array, singular: Array) -> tuple[Array]:
        _, derivative = jax.jvp(jnp.linalg.det, (a,), (da,))
        return (jnp.where(singular, derivative, jnp.zeros_like(derivative)),)

    (by_cofactors,) = jax.lax.cond(
        singular.any(),
        _jax.with_automatic_sharding(cofactors, [jax.typeof(regular)]),
        lambda a, da, singular: (jnp.zeros_like(regular),),
        a,
        da,
        singular,
    )
    return (determinant,), (regular + by_cofactors,)


def _signed_product(factors: Array, pivots: Array, diagonal: Array) -> Array:
    """The product of numbers on the diagonal, negated for an odd number of exchanges."""
    places = jax.lax.broadcasted_iota(pivots.dtype, pivots.shape, pivots.ndim - 1)
    odd = jnp.sum(pivots != places, axis=-1) % 2 == 1
    product = jnp.prod(diagonal, axis=-1)
    return jnp.where(odd, -product, product)


def _finite(pivots: Array) -> Array:
    """Pivots that are not finite as NaN."""
    return jnp.where(jnp.isfinite(pivots), pivots, jnp.nan)


def _slogdet_by_lu(a: Array) -> Sequence[Array]:
    factors, pivots, _, _ = lu_op(a)
    diagonal = _finite(jnp.diagonal(factors, axis1=-2, axis2=-1))
    size = jnp.abs(diagonal)
    signs = diagonal / jnp.where(size == 0, 1, size).astype(diagonal.dtype)
    return _signed_product(factors, pivots, signs), jnp.sum(jnp.log(size), axis=-1)


def _times_power_of_two(x: Array, exponent: Array) -> Array:
    """x * 2**exponent by factors that are normal numbers: two halves."""
    if jnp.iscomplexobj(x):
        parts = [_times_power_of_two(part, exponent) for part in (jnp.real(x), jnp.imag(x))]
        return jax.lax.complex(*parts)
    form = np.finfo(x.dtype)
    bits = np.dtype(f"int{form.bits}")
    half = exponent // 2
    for part in (half, exponent - half):
        biased = jnp.clip(part, form.minexp, form.maxexp - 1).astype(bits) + (form.maxexp - 1)
        power = jax.lax.bitcast_convert_type(biased << form.nmant, x.dtype)
        x = jnp.where(x == 0, x, x * power)
    return x


def _normalized(x: Array, exponent: Array) -> tuple[Array, Array]:
    """x 2**exponent with parts of x below 1; zero, inf and NaN stay."""
    size = jnp.maximum(jnp.abs(jnp.real(x)), jnp.abs(jnp.imag(x)))
    shift = jnp.where((size > 0) & jnp.isfinite(size), jnp.frexp(size)[1], 0)
    return _times_power_of_two(x, -shift), exponent + shift


def _det_by_lu(a: Array) -> Sequence[Array]:
    """The product of the pivots in pairs, with exponents of its own: no overflow on the way."""
    factors, pivots, _, _ = lu_op(a)
    x = _finite(jnp.diagonal(factors, axis1=-2, axis2=-1))
    x, exponent = _normalized(x, jnp.zeros(x.shape, jnp.int32))
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)
            exponent = jnp.concatenate([exponent, jnp.zeros_like(exponent[..., :1])], axis=-1)
        pairs = exponent[..., ::2] + exponent[..., 1::2]
        x, exponent = _normalized(x[..., ::2] * x[..., 1::2], pairs)
    return (_signed_product(factors, pivots, _times_power_of_two(x, exponent)),)


inv_op = Operation(
    "inv",
    Rules(
        signature=lambda params: "(n,n)->(n,n),()",
        paths=(kernel(), composed(_inv_by_lu), lax(_inv_by_lu)),
        jvp=_inv_jvp,
        result_dtypes=(None, jnp.int32),
    ),
)

det_op = Operation(
    "det",
    Rules(
        signature=lambda params: "(n,n)->()",
        paths=(kernel(), composed(_det_by_lu), lax(_det_by_lu)),
        jvp=_det_jvp,
    ),
)

slogdet_op = Operation(
    "slogdet",
    Rules(
        signature=lambda params: "(n,n)->(),()",
        paths=(kernel(), composed(_slogdet_by_lu), lax(_slogdet_by_lu)),
        jvp=_slogdet_jvp,
        result_dtypes=lambda params, data: (data, real_dtype(data)),
    ),
)
_inversion, _determinant, _sign_and_logarithm = sized(inv_op), sized(det_op), sized(slogdet_op)
