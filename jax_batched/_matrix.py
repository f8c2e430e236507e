"""Small matrix helpers of the derivative rules and the `lax` paths."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_batched import _checks
from jax_batched._core import Call, Operation, Params, Path, Rules, _jax, lax, mask
from jax_batched._core.signature import at_least

Array = jax.Array


def matmul(a: Array, b: Array) -> Array:
    """a @ b in the full precision of the dtype (no TF32)."""
    sizes = (*a.shape[-2:], b.shape[-1])
    is_small = all(isinstance(size, int) and 0 < size <= _MOST_SMALL for size in sizes)
    is_spread = any(axis for x in (a, b) for axis in _jax.spec_of(jax.typeof(x))[-2:])
    if not is_small or is_spread or a.dtype != b.dtype or a.dtype not in _PRODUCT_DTYPES:
        return _by_xla(a, b)[0]
    with mask.only(None):
        (x,) = product_op(a, b)
    return x


_MOST_SMALL = 16  # rows and columns of matrices that are multiplied here
_PRODUCT_DTYPES = tuple(map(np.dtype, _checks.COMPUTED))


def _sum_of_products(a: Array, b: Array) -> Sequence[Array]:
    """Columns of a by rows of b, written out: one loop over the entries of the result."""
    a, b = jax.lax.optimization_barrier((a, b))  # or the bits would depend on what is around it
    products = [a[..., :, i, None] * b[..., None, i, :] for i in range(a.shape[-1])]
    return (jax.lax.optimization_barrier(functools.reduce(jnp.add, products)),)


def _reduced_products(a: Array, b: Array) -> Sequence[Array]:
    """The same as a reduction."""
    a, b = jax.lax.optimization_barrier((a, b))
    return (jax.lax.optimization_barrier(jnp.sum(a[..., :, :, None] * b[..., None, :, :], -2)),)


def _by_xla(a: Array, b: Array) -> Sequence[Array]:
    return (jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST),)


def _is_written_out(call: Call) -> bool:
    if call.platform == "cpu":  # arrays that are spread over devices are left to the partitioner
        return call.devices == 1
    return call.sizes["l"] <= 4 and _is_reduced(call)


def _is_reduced(call: Call) -> bool:
    most = {"float32": 16, "float64": 12}.get(np.dtype(call.dtype).name, 0)  # as measured
    return call.platform == "cuda" and call.devices == 1 and max(call.sizes.values()) <= most


def _product_jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    (a, b), (da, db) = primals, tangents
    terms = [matmul(da, b)] if da is not None else []
    terms += [matmul(a, db)] if db is not None else []
    return product_op(a, b, **params), [functools.reduce(jnp.add, terms) if terms else None]


def _product_transpose(
    params: Params, primals: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> Sequence[Any]:
    del params
    (a, b), (ct,) = primals, cotangents
    if ct is None:
        return [None]
    return [matmul(ct, b.mT) if a is None else matmul(a.mT, ct)]


# The product of small matrices. XLA calls a library for those of a batch: that takes up to 100
# times as long on the CPU (n = 4), on a GPU up to 20 times (n = 2).
product_op = Operation(
    "product",
    Rules(
        signature=lambda params: "(m,l),(l,n)->(m,n)",
        paths=(
            Path("composed", _sum_of_products, _is_written_out, True, True),
            Path("composed", _reduced_products, _is_reduced, True, True),
            Path("composed", _by_xla, lambda call: True, True, True),
            lax(_by_xla, broadcasts=True),
        ),
        jvp=_product_jvp,
        transpose=_product_transpose,
        linear=(0, 1),
        columns=False,
    ),
)


def times(a: Array, scale: Array) -> Array:
    """a times a real scale, in a's dtype."""
    return a * scale.astype(a.dtype)


def real_dtype(dtype: Any) -> Any:
    """The dtype of the real part."""
    return np.zeros(0, dtype).real.dtype


def adjoint(a: Array) -> Array:
    """Conjugate transpose of the last two dimensions."""
    return jnp.conj(jnp.swapaxes(a, -1, -2))


def real_diagonal(a: Array) -> Array:
    """a with the imaginary part of its diagonal set to zero."""
    if not jnp.iscomplexobj(a):
        return a
    n = a.shape[-1]
    on_diagonal = jnp.eye(n, dtype=bool).reshape(*[1] * (a.ndim - 2), n, n)
    return jnp.where(on_diagonal, jnp.real(a).astype(a.dtype), a)


def symmetric_from_triangle(a: Array, *, upper: bool) -> Array:
    """The symmetric matrix, of complex numbers too, whose upper or lower triangle is a's."""
    strict = triangle(a, upper=upper, strict=True)
    return triangle(a, upper=upper) + jnp.swapaxes(strict, -1, -2)


def hermitian_from_triangle(a: Array, *, upper: bool) -> Array:
    """The Hermitian matrix whose upper or lower triangle is a's; the other one is not read."""
    real = symmetric_from_triangle(jnp.real(a), upper=upper)
    if not jnp.iscomplexobj(a):
        return real
    imag = triangle(jnp.imag(a), upper=upper, strict=True)
    return jax.lax.complex(real, imag - jnp.swapaxes(imag, -1, -2))


def hermitian_mean(a: Array) -> Array:
    """(a + a^H) / 2 without the imaginary part of a's diagonal; finite where a is."""
    return real_diagonal(mean_with(a, jnp.swapaxes(a, -1, -2)))


def mean_with(a: Array, other: Array) -> Array:
    """(a + conj(other)) / 2; finite where both are."""
    if not jnp.iscomplexobj(a):
        return _mean(a, other)
    real = _mean(jnp.real(a), jnp.real(other))
    return jax.lax.complex(real, _mean(jnp.imag(a), -jnp.imag(other)))


def _mean(x: Array, y: Array) -> Array:
    """(x + y) / 2; where the sum overflows, x / 2 + y / 2.

    A factor that is no constant, as XLA takes x / 2 + y / 2 for (x + y) / 2. Never halves first
    what does not overflow: subnormal numbers would be rounded.
    """
    overflows = jnp.isinf(x + y)
    before = jnp.where(overflows, 0.5, 1).astype(x.dtype)
    after = jnp.where(overflows, 1, 0.5).astype(x.dtype)
    return (x * before + y * before) * after


def hermitian_input(a: Array, *, upper: bool, symmetrize: bool) -> Array:
    """The Hermitian matrix that `cholesky` factors; linear in a (over the reals)."""
    if symmetrize:
        return hermitian_mean(a)
    return hermitian_from_triangle(a, upper=upper)


def triangle(a: Array, *, upper: bool, strict: bool = False) -> Array:
    """Upper or lower triangle of a, without the diagonal if strict; zeros elsewhere."""
    k = 1 if strict else 0
    return jnp.triu(a, k) if upper else jnp.tril(a, -k)


def spoilt(x: Array, failed: Array) -> Array:
    """x with NaN, in both parts of complex numbers, where it failed."""
    nan = complex(np.nan, np.nan) if jnp.iscomplexobj(x) else np.nan
    return jnp.where(failed, np.array(nan, x.dtype), x)  # NumPy's: jax.debug_nans looks at JAX's


def resized(x: Array, rows: int, columns: int | None = None) -> Array:
    """Matrices with so many rows and columns: zeros more, or less of what they have."""
    wanted = (rows, x.shape[-1] if columns is None else columns)
    x = x[..., : wanted[0], : wanted[1]]
    missing = [(0, size - own) for size, own in zip(wanted, x.shape[-2:], strict=True)]
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), *missing])


def take_rows(x: Array, rows: Array) -> Array:
    """The rows of each matrix in another order."""
    batch = jnp.broadcast_shapes(x.shape[:-2], rows.shape[:-1])
    x = jnp.broadcast_to(x, (*batch, *x.shape[-2:]))
    rows = jnp.broadcast_to(rows, (*batch, rows.shape[-1]))
    if all(at_least(1, size) for size in batch):
        return jnp.take_along_axis(x, rows[..., None], axis=-2)
    # An exported program for any batch: a gather takes none that may be empty.
    count = math.prod(batch)

    def one_more(array: Array, core: int) -> Array:
        flat = array.reshape(count, *array.shape[array.ndim - core :])
        return jnp.concatenate([flat, jnp.zeros((1, *flat.shape[1:]), flat.dtype)])

    taken = jnp.take_along_axis(one_more(x, 2), one_more(rows, 1)[..., None], axis=-2)
    return taken[:count].reshape(x.shape)


def inverse_permutation(rows: Array) -> Array:
    """The order that undoes another one."""
    n = rows.shape[-1]
    if n > 128:
        return jnp.argsort(rows, -1).astype(rows.dtype)
    # Of a large batch of short rows a sort takes longer than the solves around it.
    places = jnp.arange(n, dtype=rows.dtype).reshape(*[1] * (rows.ndim - 1), n)
    found = rows[..., None, :] == places[..., :, None]
    return jnp.where(found, places[..., None, :], 0).max(-1, initial=0)


def normalised(a: Array) -> tuple[Array, Array]:
    """Matrices times powers of two, so that the largest part of an entry is near 1; and what, times
    that, is what was: of shape (..., 1, 1)."""
    parts = [jnp.abs(x) for x in ((a.real, a.imag) if jnp.iscomplexobj(a) else (a,))]
    largest = jnp.max(functools.reduce(jnp.maximum, parts), axis=(-2, -1), keepdims=True, initial=0)
    form = np.finfo(largest.dtype)
    exponent = jnp.clip(jnp.frexp(largest)[1], form.minexp + 2, form.maxexp - 2)
    one = jnp.ones_like(largest)
    return times(a, jnp.ldexp(one, -exponent)), jnp.ldexp(one, exponent)


def not_finite(a: Array) -> Array:
    """Of each matrix, whether it has NaN or inf."""
    return ~jnp.isfinite(a).all((-2, -1))


@jax.custom_jvp
def reciprocals(x: Array, where: Array) -> Array:
    """1 / x where asked for, else 0, in derivatives as well."""
    return jnp.where(where, 1 / jnp.where(where, x, 1), 0)


@reciprocals.defjvp
def _reciprocals_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    (x, where), (dx, _) = primals, tangents
    inverse = reciprocals(x, where)
    return inverse, -inverse * inverse * dx
