"""Batched Cholesky factorization."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_batched import _checks, _lapack, blocked
from jax_batched._core import Operation, Params, Rules, kernel, lax, mask
from jax_batched._matrix import adjoint, hermitian_input, matmul, spoilt, triangle
from jax_batched._sized import sized
from jax_batched._sizes import Sizes
from jax_batched.cholesky_pullback import cholesky_pushforward_op
from jax_batched.triangular_solve import triangular_solve_op

Array = jax.Array


@overload
def cholesky(
    a: ArrayLike,
    *,
    upper: bool = ...,
    symmetrize_input: bool = ...,
    accuracy: str = ...,
    overwrite_a: bool = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: Literal[False] = ...,
) -> Array: ...


@overload
def cholesky(
    a: ArrayLike,
    *,
    upper: bool = ...,
    symmetrize_input: bool = ...,
    accuracy: str = ...,
    overwrite_a: bool = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: Literal[True],
) -> tuple[Array, Array]: ...


@overload
def cholesky(
    a: ArrayLike,
    *,
    upper: bool = ...,
    symmetrize_input: bool = ...,
    accuracy: str = ...,
    overwrite_a: bool = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: bool,
) -> Array | tuple[Array, Array]: ...


def cholesky(
    a: ArrayLike,
    *,
    upper: bool = False,
    symmetrize_input: bool = True,
    accuracy: str = "ieee",
    overwrite_a: bool = False,
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
    return_info: bool = False,
) -> Array | tuple[Array, Array]:
    """Cholesky factor of each Hermitian positive definite matrix of a batch.

    The signature and defaults of `jax.numpy.linalg.cholesky`, and more options.

    Args:
      a: matrices of shape ``(..., n, n)``; float32, float64, complex64 or complex128, or
        float16 and bfloat16, which are computed in float32. The imaginary part of the diagonal is
        not read.
      upper: return U with ``a = U^H U`` rather than L with ``a = L L^H``.
      symmetrize_input: factor ``(a + a^H) / 2``. Otherwise only the triangle that is returned is
        read; the other may hold anything, NaN included.
      accuracy: ``"ieee"``: every operation is a correctly rounded one of the dtype, subnormal
        numbers are kept. ``"fast"``: approximate reciprocals and square roots may be used, and for
        float32 products on tensor cores in compensated form (n = 129 to 512 on GPUs from sm_80
        on); the residual stays within three times that of ``"ieee"``.
      overwrite_a: the factor may take a's memory. Inside `jax.jit`, with a donated a or one that
        nothing else needs, no fresh memory is touched; otherwise XLA copies a first.
      where: bool, of a shape that broadcasts to the batch dimensions. Where it is False the factor
        is zero, ``info`` is -1 and a counts for nothing.
      sizes: int, of a shape that broadcasts to the batch dimensions: how many rows and columns each
        matrix has. It is the leading part of what a holds, the rest of which counts for nothing and
        is zero in the factor. Where a size is negative or too large, the factor is NaN and ``info``
        is -2.
      return_info: also return ``info``.

    Returns:
      The factor, of a's shape and dtype, with zeros in the other triangle. With return_info, a pair
      of it and ``info``, int32 of shape ``(...)``: 0, or the number k (from 1) of the first column
      whose pivot is not positive. The triangle of such a matrix is NaN; no other is affected.

    Raises:
      TypeError: a is no array or has another dtype; a flag is not True or False; where is not bool,
        sizes are no integers.
      ValueError: a is not a batch of square matrices, accuracy is another word, or where or sizes
        have another shape.

    The derivative is that of the function computed: symmetric with symmetrize_input, otherwise zero
    in the triangle that is not read. A failed matrix has NaN derivatives, alone.

    Algorithm: in-register batched Cholesky after Kurzak, Anzt, Gates and Dongarra, "Implementation
    and tuning of batched Cholesky factorization and solve for NVIDIA GPUs" (2016); derivative after
    Murray, "Differentiation of the Cholesky decomposition" (2016).
    """
    (matrix,), _ = _checks.operands("cholesky", keep_stored=True, a=a)
    _checks.square("cholesky", "a", matrix)
    wanted = _checks.mask("cholesky", where, matrix.shape[:-2])
    parts = Sizes("cholesky", sizes, matrix.shape[-1], matrix.shape[:-2], where=wanted)
    accuracy = _checks.option("cholesky", "accuracy", accuracy, _checks.ACCURACIES)
    factor, info = factorization(
        parts,
        matrix,
        upper=_checks.flag("cholesky", "upper", upper),
        symmetrize=_checks.flag("cholesky", "symmetrize_input", symmetrize_input),
        # Its tensor cores need all of a matrix to be of one scale, the identity as well.
        accuracy=accuracy if sizes is None else "ieee",
        where=wanted,
        overwrite=_checks.flag("cholesky", "overwrite_a", overwrite_a),
    )
    info = parts.info(info, 2)
    return (factor, info) if _checks.flag("cholesky", "return_info", return_info) else factor


def _jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """A linear map of da, whose transpose has a kernel."""
    (a,), (da,) = primals, tangents
    factor, info = cholesky_op(a, **params)
    which = {"upper": params["upper"], "symmetrize": params["symmetrize"]}
    (tangent,) = cholesky_pushforward_op(factor, da, **which)
    return (factor, info), (tangent, None)


def _lax(a: Array, *, upper: bool, symmetrize: bool, accuracy: str) -> Sequence[Array]:
    del accuracy
    hermitian = hermitian_input(a, upper=upper, symmetrize=symmetrize)
    lower_factor = _lapack.cholesky(hermitian)
    diagonal = jnp.real(jnp.diagonal(lower_factor, axis1=-2, axis2=-1))
    failed = mask.applied(jnp.isnan(diagonal).any(-1), 0)
    info = jax.lax.cond(
        failed.any(),
        lambda: jnp.where(failed, _first_bad_pivot(hermitian), 0),
        lambda: jnp.zeros_like(failed, jnp.int32),
    )
    factor = triangle(spoilt(lower_factor, failed[..., None, None]), upper=False)
    return adjoint(factor) if upper else factor, info


def in_blocks(
    a: Array, *, upper: bool, symmetrize: bool, accuracy: str, plan: blocked.Plan
) -> Sequence[Array]:
    """Factor and info of matrices that are divided as a plan says."""
    lower_factor, info = blocked.cholesky(
        blocked.Hermitian(a, None if symmetrize else upper),
        plan,
        lambda block: cholesky_op(block, upper=False, symmetrize=False, accuracy=accuracy),
        triangular_solve_op,
    )
    factor = triangle(spoilt(lower_factor, (info > 0)[..., None, None]), upper=False)
    return adjoint(factor) if upper else factor, info


def _first_bad_pivot(a: Array) -> Array:
    """1-based column of the first pivot that is not positive; n if rounding hides it.

    An unblocked left-looking factorization, one column a step: only run when a matrix failed.
    """
    n = a.shape[-1]
    rows = jax.lax.broadcasted_iota(jnp.int32, a.shape[:-1], a.ndim - 2)

    def step(k: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        factor, info = state
        row = jax.lax.dynamic_index_in_dim(factor, k, axis=-2, keepdims=False)
        column = jax.lax.dynamic_index_in_dim(a, k, axis=-1, keepdims=False)
        column = column - matmul(factor, jnp.conj(row)[..., None])[..., 0]
        pivot = jnp.real(jax.lax.dynamic_index_in_dim(column, k, axis=-1))
        good = pivot > 0
        info = jnp.where((info == 0) & ~good[..., 0], k + 1, info).astype(jnp.int32)
        column = column / jnp.sqrt(jnp.where(good, pivot, 1)).astype(column.dtype)
        column = jnp.where((rows >= k) & good, column, 0)
        return jax.lax.dynamic_update_index_in_dim(factor, column, k, axis=-1), info

    start = (jnp.zeros_like(a), jnp.zeros_like(a[..., 0, 0], jnp.int32))
    _, info = jax.lax.fori_loop(0, n, step, start)
    return jnp.where(info == 0, n, info)


cholesky_op: Operation = Operation(
    "cholesky",
    Rules(
        signature=lambda params: "(n,n)->(n,n),()",
        paths=(kernel(), *blocked.paths("cholesky", in_blocks), lax(_lax)),
        jvp=_jvp,
        result_dtypes=(None, jnp.int32),
        stored=True,
    ),
)
factorization = sized(cholesky_op)
