"""Eigenvalues and eigenvectors of Hermitian matrices, and functions of these matrices."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_batched import _checks, _lapack
from jax_batched._core import Operation, Params, Rules, kernel, lax, mask
from jax_batched._matrix import (
    adjoint,
    hermitian_from_triangle,
    hermitian_input,
    matmul,
    normalised,
    not_finite,
    real_diagonal,
    real_dtype,
    reciprocals,
    spoilt,
    triangle,
)
from jax_batched._sized import sized
from jax_batched._sizes import Sizes, like

Array = jax.Array


class EighResult(NamedTuple):
    """The `eigenvalues` in ascending order, and the `eigenvectors` as columns."""

    eigenvalues: Array
    eigenvectors: Array


jax.export.register_namedtuple_serialization(EighResult, serialized_name="jax_batched.EighResult")

# Relative gaps below this many n eps count as none in derivatives.
CLUSTER_TOL = 10.0


@overload
def eigh(
    a: ArrayLike,
    UPLO: str | None = ...,
    symmetrize_input: bool = ...,
    *,
    lower: bool = ...,
    cluster_tol: float = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: Literal[False] = ...,
) -> EighResult: ...


@overload
def eigh(
    a: ArrayLike,
    UPLO: str | None = ...,
    symmetrize_input: bool = ...,
    *,
    lower: bool = ...,
    cluster_tol: float = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: Literal[True],
) -> tuple[Array, Array, Array]: ...


@overload
def eigh(
    a: ArrayLike,
    UPLO: str | None = ...,
    symmetrize_input: bool = ...,
    *,
    lower: bool = ...,
    cluster_tol: float = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: bool,
) -> EighResult | tuple[Array, Array, Array]: ...


def eigh(
    a: ArrayLike,
    UPLO: str | None = None,
    symmetrize_input: bool = True,
    *,
    lower: bool = True,
    cluster_tol: float = CLUSTER_TOL,
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
    return_info: bool = False,
) -> EighResult | tuple[Array, Array, Array]:
    """Eigenvalues and eigenvectors of each Hermitian matrix of a batch.

    The signature of `jax.numpy.linalg.eigh`, and more options.

    Args:
      a: matrices of shape ``(..., n, n)``; float32, float64, complex64 or complex128. The imaginary
        part of the diagonal is not read.
      UPLO: ``"L"`` or ``"U"``: the same as lower, which it overrides.
      symmetrize_input: take ``(a + a^H) / 2``. Otherwise only one triangle is read; the other may
        hold anything, NaN included.
      lower: read the lower triangle, otherwise the upper one.
      cluster_tol: of derivatives. Eigenvalues that differ by no more than
        ``cluster_tol n eps max|w|`` count as equal: see below. 0: only the same one does.
      where: bool, of a shape that broadcasts to the batch dimensions. Where it is False the results
        are zero, ``info`` is -1 and a counts for nothing.
      sizes: as in `cholesky`. Eigenvalues beyond a matrix's own are zero, too. A matrix with an
        eigenvalue out of range has NaN for a result, and its size for ``info``.
      return_info: also return ``info``.

    Returns:
      ``(w, v)``, the eigenvalues, real, ascending, of shape ``(..., n)``, and the eigenvectors, the
      columns of v of a's shape and dtype, ``a v = v diag(w)``. With return_info, ``(w, v, info)``:
      int32 of shape ``(...)``, 0, or the number of off-diagonal elements that did not converge. A
      matrix with NaN or inf has NaN for a result and ``info = n``; no other is affected.

    Raises:
      TypeError: a is no array or has another dtype; a flag is not True or False; where is not bool,
        sizes are no integers.
      ValueError: a is not a batch of square matrices, UPLO is another word, cluster_tol is not a
        number from 0 on, or where or sizes have another shape.

    The sign (phase) of an eigenvector is any; it depends on its matrix alone. Errors are small
    beside the largest eigenvalue: small ones of a graded matrix have few digits.

    The derivative of the eigenvectors has 1 / (w_j - w_i). Where two eigenvalues count as equal it
    is replaced by 0. So derivatives are finite, and right for what depends on equal eigenvalues by
    symmetric functions of them and by the space of their eigenvectors. V f(W) V^H depends on more:
    `eigh_function` has its derivative. With ``cluster_tol=0`` the rule is JAX's, with inf and NaN
    at equal eigenvalues. With sizes, n is that of the padding, and max|w| up to 8 times as large as
    the largest sum of the entries of a row.

    Algorithm: tridiagonalisation and implicit QR with Wilkinson's shifts (Golub and Van Loan,
    "Matrix computations", section 8.3); on CUDA first for the eigenvalues, which are the shifts
    for the eigenvectors; for the smallest matrices Jacobi's method.
    """
    matrix, dtype, options, wanted, parts = _call(
        "eigh", a, UPLO, symmetrize_input, lower, where, sizes
    )
    options["cluster_tol"] = tolerance("eigh", cluster_tol)
    v, w, info = _decomposition(parts, matrix, **options, vectors=True, where=wanted)
    info = parts.info(info, 2)
    w, v = w.astype(real_dtype(dtype)), v.astype(dtype)
    return (w, v, info) if _checks.flag("eigh", "return_info", return_info) else EighResult(w, v)


@overload
def eigvalsh(
    a: ArrayLike,
    UPLO: str | None = ...,
    *,
    symmetrize_input: bool = ...,
    lower: bool = ...,
    cluster_tol: float = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: Literal[False] = ...,
) -> Array: ...


@overload
def eigvalsh(
    a: ArrayLike,
    UPLO: str | None = ...,
    *,
    symmetrize_input: bool = ...,
    lower: bool = ...,
    cluster_tol: float = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: Literal[True],
) -> tuple[Array, Array]: ...


@overload
def eigvalsh(
    a: ArrayLike,
    UPLO: str | None = ...,
    *,
    symmetrize_input: bool = ...,
    lower: bool = ...,
    cluster_tol: float = ...,
    where: ArrayLike | None = ...,
    sizes: ArrayLike | None = ...,
    return_info: bool,
) -> Array | tuple[Array, Array]: ...


def eigvalsh(
    a: ArrayLike,
    UPLO: str | None = None,
    *,
    symmetrize_input: bool = True,
    lower: bool = True,
    cluster_tol: float = CLUSTER_TOL,
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
    return_info: bool = False,
) -> Array | tuple[Array, Array]:
    """Eigenvalues of each Hermitian matrix of a batch, ascending, of shape ``(..., n)``.

    The signature of `jax.numpy.linalg.eigvalsh`, and more options. Arguments, errors and the
    algorithm are those of `eigh`; cluster_tol matters to second derivatives. With return_info, a
    pair of the eigenvalues and ``info``.
    """
    matrix, dtype, options, wanted, parts = _call(
        "eigvalsh", a, UPLO, symmetrize_input, lower, where, sizes
    )
    options["cluster_tol"] = tolerance("eigvalsh", cluster_tol)
    w, info = _decomposition(parts, matrix, **options, vectors=False, where=wanted)
    w, info = w.astype(real_dtype(dtype)), parts.info(info, 2)
    return (w, info) if _checks.flag("eigvalsh", "return_info", return_info) else w


def eigh_function(
    a: ArrayLike,
    f: Callable[[Array], Array],
    df: Callable[[Array], Array] | None = None,
    *,
    symmetrize_input: bool = True,
    lower: bool = True,
    where: ArrayLike | None = None,
    sizes: ArrayLike | None = None,
) -> Array:
    """``V diag(f(w)) V^H`` of each Hermitian matrix ``V diag(w) V^H`` of a batch.

    With ``jnp.sqrt`` the square root, with ``jax.lax.rsqrt``, ``jnp.log``, ``jnp.exp`` the inverse
    square root, logarithm and exponential.

    Args:
      a, symmetrize_input, lower, where, sizes: as in `eigh`.
      f: a function of an array of real numbers, number by number, to real or complex ones. It may
        use traced values, and derivatives go to them. It is called with 1 for a matrix of size 0 or
        one that where leaves out, so it should be finite there.
      df: its derivative, a function of the same kind; by JAX if None.

    Returns:
      The matrices, of a's shape; of a's dtype, or a complex one if f's values are complex.

    Raises:
      TypeError, ValueError: as `eigh`.

    The derivative is by divided differences, ``V (G * (V^H da V)) V^H`` with
    ``G_ij = (f(w_i) - f(w_j)) / (w_i - w_j)``. Where w_i and w_j are so close that this quotient
    has lost more digits, G_ij is the mean of f' between them by Simpson's rule. So equal
    eigenvalues are as good as others. The same formula is differentiated for second derivatives:
    where eigenvalues count as equal (see `eigh`), these are finite, but not exact.

    Algorithm: Daleckii and Krein (1965); see Higham, "Functions of matrices" (2008), section 3.2.
    """
    matrix, dtype, options, wanted, parts = _call(
        "eigh_function", a, None, symmetrize_input, lower, where, sizes
    )
    matrix = parts.spoilt(parts.within(matrix, -2, -1))
    hermitian = hermitian_input(
        matrix, upper=not options["lower"], symmetrize=options["symmetrize"]
    )
    # f and df see a row of numbers for each matrix, made of the data: they vary as these do.
    pairs = (*hermitian.shape[:-2], hermitian.shape[-1] ** 2)
    pure, constants = jax.closure_convert(f, jnp.real(jnp.diagonal(hermitian, 0, -2, -1)))
    slope = df if df is not None else lambda w: jax.jvp(f, (w,), (jnp.ones_like(w),))[1]
    slope, others = jax.closure_convert(slope, jnp.real(hermitian).reshape(pairs))

    def decompose(h: Array) -> tuple[Array, Array]:
        options = {"lower": True, "symmetrize": False, "cluster_tol": CLUSTER_TOL}
        v, w, _ = _decomposition(parts, h, **options, vectors=True, where=wanted)
        # No f is asked for zeros of matrices that are left out, nor for anything beyond a size.
        w = w if wanted is None else mask.kept(w, wanted, 1, 1)
        if parts:
            some = jnp.where(like(parts.each, w, 1)[..., None] == 0, 1, w[..., :1])
            w = parts.within(w[..., None, :], -1, other=some[..., None, :])[..., 0, :]
        return v, w

    def product(v: Array, x: Array) -> Array:
        v = v.astype(np.result_type(v.dtype, x.dtype))
        return matmul(v * x.astype(v.dtype)[..., None, :], adjoint(v))

    @jax.custom_jvp
    def function(h: Array, constants: Sequence[Any], others: Sequence[Any]) -> Array:
        v, w = decompose(h)
        return product(v, pure(w, *constants))

    @function.defjvp
    def function_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
        (h, constants, others), (dh, dconstants, _) = primals, tangents
        v, w = decompose(h)
        values, dvalues = jax.jvp(lambda *c: pure(w, *c), tuple(constants), tuple(dconstants))
        quotients = _divided_differences(
            w, values, lambda x: slope(x.reshape(pairs), *others).reshape(x.shape)
        )
        inner = matmul(adjoint(v), matmul(dh, v))
        kind = np.result_type(inner.dtype, quotients.dtype)
        inner, wide = quotients.astype(kind) * inner.astype(kind), v.astype(kind)
        return product(v, values), matmul(matmul(wide, inner), adjoint(wide)) + product(v, dvalues)

    result = function(hermitian, constants, others)
    if wanted is not None:
        result = mask.kept(result, wanted, 2)
    result = parts.within(result, -2, -1)
    is_rounded = _checks.is_stored(dtype) and not jnp.iscomplexobj(result)
    return result.astype(dtype) if is_rounded else result


def _divided_differences(w: Array, values: Array, slope: Callable[[Array], Array]) -> Array:
    """(f(w_i) - f(w_j)) / (w_i - w_j), or the mean of f' between them.

    With d the gap beside the size of w, the quotient loses eps / d, and Simpson's rule errs by
    about d^4 / 100: they are as good as each other where d^5 = 100 eps.
    """
    one, other = w[..., :, None], w[..., None, :]
    gap = one - other
    limit = (100 * np.finfo(w.dtype).eps) ** 0.2
    close = jnp.abs(gap) <= limit * jnp.maximum(jnp.abs(one), jnp.abs(other))
    divisor = jnp.where(close, 1, gap).astype(values.dtype)
    quotient = (values[..., :, None] - values[..., None, :]) / divisor
    ends = slope(jnp.broadcast_to(one, gap.shape))
    middle = slope(jnp.where(close, (one + other) / 2, one))
    mean = (ends + 4 * middle + jnp.swapaxes(ends, -1, -2)) / 6
    return jnp.where(close, mean.astype(quotient.dtype), quotient)


def _call(
    operation: str,
    a: ArrayLike,
    uplo: str | None,
    symmetrize_input: bool,
    lower: bool,
    where: ArrayLike | None,
    sizes: ArrayLike | None,
) -> tuple[Array, Any, dict[str, Any], Array | None, Sizes]:
    """The matrices, the dtype of the results, the triangle's options, the mask and the sizes."""
    matrices, dtype = _checks.operands(operation, a=a)
    _checks.square(operation, "a", matrices[0])
    symmetrize = _checks.flag(operation, "symmetrize_input", symmetrize_input)
    lower = _checks.flag(operation, "lower", lower)
    if uplo is not None:
        lower = _checks.option(operation, "UPLO", uplo, ("L", "U")) == "L"
    (matrix,) = matrices
    wanted = _checks.mask(operation, where, matrix.shape[:-2])
    parts = Sizes(operation, sizes, matrix.shape[-1], matrix.shape[:-2], where=wanted)
    return matrix, dtype, {"lower": lower, "symmetrize": symmetrize}, wanted, parts


def _beyond_spectrum(read: Array) -> Array:
    """Distinct numbers (..., n) beyond the eigenvalues of matrices of which this part is read."""
    size = jax.lax.stop_gradient(jnp.abs(read))
    sums = jnp.sum(size, -1) + jnp.sum(size, -2)  # at least those of the Hermitian matrix's rows
    limits = np.finfo(size.dtype)
    bound = 2 * jnp.max(sums, -1, keepdims=True, initial=0)
    bound = jnp.where(bound > limits.tiny, bound, limits.tiny)
    n = read.shape[-1]
    steps = 1 + jnp.arange(n, dtype=size.dtype) / jnp.maximum(n, 1)
    return jnp.minimum(bound * jnp.broadcast_to(steps, sums.shape), limits.max)


def _continued(sizes: Sizes, a: Array, params: Params) -> Array:
    """Matrices, each continued by numbers beyond its eigenvalues."""
    read = a if params["symmetrize"] else triangle(a, upper=not params["lower"])
    return sizes.continued(a, _beyond_spectrum(real_diagonal(sizes.within(read, -2, -1))))


def _own(sizes: Sizes, results: Sequence[Array]) -> Sequence[Array]:
    """The results of the matrices themselves.

    An eigenvalue that is out of range may change places with those that continue its matrix: it
    is lost, and all of that matrix are NaN.
    """
    *vectors, w, info = results
    lost = jnp.isinf(w).any(-1)
    own = like(sizes.each, info, 0)
    info = jnp.where(lost, own, jnp.minimum(info, own))
    return (*(spoilt(v, lost[..., None, None]) for v in vectors), spoilt(w, lost[..., None]), info)


def tolerance(operation: str, given: float) -> float:
    """cluster_tol as a number from 0 on."""
    known = _checks.python_value(given)
    if not isinstance(known, int | float) or isinstance(known, bool) or not known >= 0:
        raise ValueError(
            f"{operation}: cluster_tol must be a number from 0 on, known when the program is "
            f"traced, got {_checks.described(given)}"
        )
    return float(known)


def _jvp(
    params: Params, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """dw = diag(M) and dV = V (F * M) with M = V^H dA V, F_ij = 1 / (w_j - w_i), 0 if i = j."""
    (a,), (da,) = primals, tangents
    if da is None:
        results = eigh_op(a, **params)
        return results, [None] * len(results)
    v, w, info = eigh_op(a, **{**params, "vectors": True})
    if params["symmetrize"]:
        change = real_diagonal((da + adjoint(da)) / 2)
    else:
        change = hermitian_from_triangle(da, upper=not params["lower"])
    inner = matmul(adjoint(v), matmul(change, v))
    dw = jnp.real(jnp.diagonal(inner, axis1=-2, axis2=-1))
    if not params["vectors"]:
        return (w, info), (dw, None)
    gaps = w[..., None, :] - w[..., :, None]
    least = params["cluster_tol"] * w.shape[-1] * np.finfo(w.dtype).eps
    largest = jnp.max(jnp.abs(w), axis=-1, initial=0)[..., None, None]
    same = jnp.broadcast_to(jnp.eye(w.shape[-1], dtype=bool), gaps.shape)
    if params["cluster_tol"] != 0:
        same = same | (jnp.abs(gaps) <= least * largest)
    dv = matmul(v, inner * reciprocals(gaps, ~same).astype(v.dtype))
    return (v, w, info), (dv, dw, None)


def _lax(
    a: Array, *, lower: bool, symmetrize: bool, vectors: bool, cluster_tol: float
) -> Sequence[Array]:
    del cluster_tol
    hermitian = hermitian_input(a, upper=not lower, symmetrize=symmetrize)
    bad = not_finite(hermitian)
    scaled, back = normalised(jnp.where(bad[..., None, None], 0, hermitian))
    v, w = _lapack.eigh(scaled)
    w = w * back[..., 0]
    failed = bad | jnp.isnan(w).any(-1)
    info = jnp.where(failed, a.shape[-1], 0).astype(jnp.int32)
    w = spoilt(w, failed[..., None])
    return (spoilt(v, failed[..., None, None]), w, info) if vectors else (w, info)


eigh_op = Operation(
    "eigh",
    Rules(
        # The last result of values alone is workspace.
        signature=lambda params: (
            "(n,n)->(n,n),(n),()" if params["vectors"] else "(n,n)->(n),(),(n)"
        ),
        paths=(kernel(), lax(_lax)),
        jvp=_jvp,
        hidden=lambda params: 0 if params["vectors"] else 1,
        result_dtypes=lambda params, data: (
            (data, real_dtype(data), jnp.int32)
            if params["vectors"]
            else (real_dtype(data), jnp.int32, real_dtype(data))
        ),
    ),
)
_decomposition = sized(eigh_op, continued=_continued, finish=_own)
