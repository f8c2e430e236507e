"""``op(a) op(b)`` of matrices that differ in size: the product that the routines of BLAS share."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_batched._core import Operation, Params, Rules, kernel, lax
from jax_batched._matrix import adjoint, matmul, triangle
from jax_batched._sizes import Sizes

Array = jax.Array


def _signature(params: Params) -> str:
    a = "(m,l)" if params["trans_a"] == "n" else "(l,m)"
    b = "(l,n)" if params["trans_b"] == "n" else "(n,l)"
    return f"{a},{b},(s)->(m,n)"


def _op(a: Array, trans: str) -> Array:
    if trans == "c":
        return adjoint(a)
    return a if trans == "n" else a.mT


def _lax(
    a: Array, b: Array, sizes: Array, *, trans_a: str, trans_b: str, triangle: str
) -> Sequence[Array]:
    left, right = _op(a, trans_a), _op(b, trans_b)
    limits = left.shape[-2], right.shape[-1], left.shape[-1]
    m, n, k = (
        Sizes("gemm", sizes[..., i], limit, sizes.shape[:-1]) for i, limit in enumerate(limits)
    )
    product = matmul(k.within(m.within(left, -2), -1), n.within(k.within(right, -2), -1))
    return (k.spoilt(n.spoilt(m.spoilt(_wanted(product, triangle)))),)


def _wanted(x: Array, part: str) -> Array:
    return triangle(x, upper=part == "upper") if part else x


def _jvp(
    params: Params, primals: tuple[Array, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Array], Sequence[Any]]:
    a, b, sizes = primals
    da, db, _ = tangents
    terms = []
    if da is not None:
        terms += gemm_op(da, b, sizes, **params)
    if db is not None:
        terms += gemm_op(a, db, sizes, **params)
    return gemm_op(*primals, **params), [sum(terms[1:], terms[0]) if terms else None]


def _transpose(
    params: Params, primals: tuple[Any, ...], cotangents: tuple[Any, ...]
) -> Sequence[Any]:
    """With C the cotangent of X: that of op(A) is C op(B)^T, that of op(B) is op(A)^T C."""
    a, b, sizes = primals
    (ct,) = cotangents
    if ct is None:
        return [None]
    ct = _wanted(ct, params["triangle"])
    trans_a, trans_b = params["trans_a"], params["trans_b"]
    m, n, k = range(3)

    def product(
        left: Array, right: Array, ways: tuple[str, str], order: tuple[int, int, int]
    ) -> Array:
        own = sizes[..., jnp.array(order)]
        (x,) = gemm_op(left, right, own, trans_a=ways[0], trans_b=ways[1], triangle="")
        return x

    # conj(B)^T of an adjoint is no letter: the conjugate of the product with conj(C) is taken.
    untransposed = {"n": "t", "t": "n", "c": "n"}
    if a is None and trans_a == "n":
        other = jnp.conj(ct) if trans_b == "c" else ct
        found = product(other, b, ("n", untransposed[trans_b]), (m, k, n))
        found = jnp.conj(found) if trans_b == "c" else found
    elif a is None:
        found = product(b, ct, (trans_b, "t"), (k, m, n))
        found = jnp.conj(found) if trans_a == "c" else found
    elif trans_b == "n":
        other = jnp.conj(ct) if trans_a == "c" else ct
        found = product(a, other, (untransposed[trans_a], "n"), (k, n, m))
        found = jnp.conj(found) if trans_a == "c" else found
    else:
        found = product(ct, a, ("t", trans_a), (n, k, m))
        found = jnp.conj(found) if trans_b == "c" else found
    return [found]


# Parameters: trans_a and trans_b, letters as BLAS' ("n", "t", "c"), and triangle: the one of X that
# is computed, "lower" or "upper", or "" for all. Operands: a, b, and (m, n, k) of each matrix.
gemm_op = Operation(
    "gemm",
    Rules(
        signature=_signature,
        paths=(kernel(), lax(_lax)),
        jvp=_jvp,
        transpose=_transpose,
        linear=(0, 1),
        columns=False,
    ),
)
