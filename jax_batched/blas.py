"""The routines of BLAS for batches of matrices: their words, their options, sizes for each matrix.

Without `sizes` a routine is XLA's batched product of the same operands, in the full precision of
the dtype. With `sizes`, a tuple of integers (or None: all) for each of the numbers that BLAS calls
m, n and k, a matrix is the leading part of what holds it. What lies beyond counts for nothing and
may hold NaN. The result is zero there or, where BLAS leaves c alone, what c has. A size that is
negative or too large makes that result NaN. Sizes have shapes that broadcast to the batch
dimensions, and may be traced. Products with sizes are one kernel, which takes no time for what lies
beyond; but those of vectors and of 16-bit elements are XLA's, of the whole arrays.

Everywhere:

- leading dimensions are batch dimensions and broadcast;
- dtypes are float32, float64, complex64 and complex128 (`gemm`: float16 and bfloat16 too, summed in
  float32);
- trans is 0: as it is, 1: transposed, 2: conjugate transposed; side is 0: left, 1: right;
- alpha and beta are numbers, or arrays that broadcast to the batch dimensions; with beta = 0, c is
  not read;
- derivatives are those of the function computed: zero in triangles that are not read and beyond
  the sizes;
- wrong shapes and options raise ValueError, other dtypes TypeError.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_batched import _checks
from jax_batched._matrix import (
    adjoint,
    hermitian_from_triangle,
    inverse_permutation,
    matmul,
    real_diagonal,
    symmetric_from_triangle,
    take_rows,
    triangle,
)
from jax_batched._sizes import Sizes
from jax_batched.gemm import gemm_op
from jax_batched.triangular_solve import triangular_solve

Array = jax.Array
SizesLike = Sequence[ArrayLike | None] | None


def gemm(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    alpha: ArrayLike = 1,
    beta: ArrayLike = 0,
    trans_a: int = 0,
    trans_b: int = 0,
    sizes: SizesLike = None,
) -> Array:
    """``alpha op(a) op(b) + beta c``, where op(a) is m x k and op(b) is k x n; sizes: (m, n, k)."""
    call = _Call("gemm", stored=True, a=a, b=b, c=c)
    left, right = call.option("trans_a", trans_a), call.option("trans_b", trans_b)
    a, b = call.matrices("a", "b")
    (m, k), (other, n) = _shape(a, left), _shape(b, right)
    call.same("the inner dimensions of op(a) and op(b)", k, other)
    rows, columns, inner = call.extents(sizes, m=m, n=n, k=k)
    product = call.product(a, b, rows, columns, inner, left, right)
    return call.result(product, alpha, beta, rows, columns, inner)


def syrk(
    a: ArrayLike,
    c: ArrayLike | None = None,
    *,
    alpha: ArrayLike = 1,
    beta: ArrayLike = 0,
    trans: int = 0,
    lower: bool = False,
    sizes: SizesLike = None,
) -> Array:
    """One triangle of ``alpha a a^T + beta c`` (trans = 1: ``a^T a``); sizes: (n, k).

    The other triangle is c's, or zero.
    """
    return _rank_k("syrk", a, c, alpha, beta, trans, lower, sizes, star=1)


def herk(
    a: ArrayLike,
    c: ArrayLike | None = None,
    *,
    alpha: ArrayLike = 1,
    beta: ArrayLike = 0,
    trans: int = 0,
    lower: bool = False,
    sizes: SizesLike = None,
) -> Array:
    """One triangle of ``alpha a a^H + beta c`` (trans = 2: ``a^H a``); sizes: (n, k).

    alpha and beta are real, and so is the diagonal, of which c's imaginary part is not read. The
    other triangle is c's, or zero.
    """
    return _rank_k("herk", a, c, alpha, beta, trans, lower, sizes, star=2)


def syr2k(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    alpha: ArrayLike = 1,
    beta: ArrayLike = 0,
    trans: int = 0,
    lower: bool = False,
    sizes: SizesLike = None,
) -> Array:
    """One triangle of ``alpha (a b^T + b a^T) + beta c`` (trans = 1: ``a^T b``); sizes: (n, k).

    The other triangle is c's, or zero.
    """
    return _rank_k("syr2k", a, c, alpha, beta, trans, lower, sizes, star=1, b=b)


def her2k(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    alpha: ArrayLike = 1,
    beta: ArrayLike = 0,
    trans: int = 0,
    lower: bool = False,
    sizes: SizesLike = None,
) -> Array:
    """One triangle of ``alpha a b^H + conj(alpha) b a^H + beta c`` (trans = 2: ``a^H b``).

    sizes: (n, k). beta is real, and so is the diagonal; the other triangle is c's, or zero.
    """
    return _rank_k("her2k", a, c, alpha, beta, trans, lower, sizes, star=2, b=b)


def symm(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    alpha: ArrayLike = 1,
    beta: ArrayLike = 0,
    side: int = 0,
    lower: bool = False,
    sizes: SizesLike = None,
) -> Array:
    """``alpha a b + beta c`` (side = 1: ``b a``) with a symmetric a; sizes: (m, n) of b.

    Of a one triangle is read.
    """
    return _mirrored("symm", symmetric_from_triangle, a, b, c, alpha, beta, side, lower, sizes)


def hemm(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    alpha: ArrayLike = 1,
    beta: ArrayLike = 0,
    side: int = 0,
    lower: bool = False,
    sizes: SizesLike = None,
) -> Array:
    """``alpha a b + beta c`` (side = 1: ``b a``) with a Hermitian a; sizes: (m, n) of b.

    Of a one triangle is read, and the real part of the diagonal.
    """
    return _mirrored("hemm", hermitian_from_triangle, a, b, c, alpha, beta, side, lower, sizes)


def trmm(
    a: ArrayLike,
    b: ArrayLike,
    *,
    alpha: ArrayLike = 1,
    side: int = 0,
    lower: bool = False,
    trans_a: int = 0,
    unit_diagonal: bool = False,
    sizes: SizesLike = None,
) -> Array:
    """``alpha op(a) b`` (side = 1: ``alpha b op(a)``) with a triangular a; sizes: (m, n) of b."""
    call = _Call("trmm", a=a, b=b)
    right, trans = call.option("side", side, (0, 1)), call.option("trans_a", trans_a)
    lower = _checks.flag("trmm", "lower", lower)
    unit = _checks.flag("trmm", "unit_diagonal", unit_diagonal)
    a, b, rows, columns = call.one_sided(sizes, right)
    a = _op(triangle(a, upper=not lower, strict=unit), trans)
    left, other = (b, a) if right else (a, b)
    x = call.product(left, other, rows, columns, columns if right else rows)
    if unit:
        x = x + call.whole(_part(b, 0, rows, columns))
    return call.scaled(x, "alpha", alpha)


def trsm(
    a: ArrayLike,
    b: ArrayLike,
    *,
    alpha: ArrayLike = 1,
    side: int = 0,
    lower: bool = False,
    trans_a: int = 0,
    unit_diagonal: bool = False,
    sizes: SizesLike = None,
) -> Array:
    """Solves ``op(a) x = alpha b`` (side = 1: ``x op(a) = alpha b``); sizes: (m, n) of b.

    a is triangular; the solve is `triangular_solve`.
    """
    call = _Call("trsm", a=a, b=b)
    right, trans = call.option("side", side, (0, 1)), call.option("trans_a", trans_a)
    a, b, rows, columns = call.one_sided(sizes, right)
    x = triangular_solve(
        (columns if right else rows).continued(a),
        call.scaled(call.whole(_part(b, 0, rows, columns)), "alpha", alpha),
        left_side=not right,
        lower=lower,
        transpose_a=trans != 0,
        conjugate_a=trans == 2,
        unit_diagonal=unit_diagonal,
    )
    return columns.spoilt(rows.spoilt(_part(x, 0, rows, columns)))


def gemv(
    a: ArrayLike,
    x: ArrayLike,
    y: ArrayLike | None = None,
    *,
    alpha: ArrayLike = 1,
    beta: ArrayLike = 0,
    trans: int = 0,
    sizes: SizesLike = None,
) -> Array:
    """``alpha op(a) x + beta y`` for vectors of shape ``(..., n)``; sizes: (m, n) of a."""
    call = _Call("gemv", a=a, x=x, y=y)
    how = call.option("trans", trans)
    (a,) = call.matrices("a")
    rows, columns = call.extents(sizes, m=a.shape[-2], n=a.shape[-1], vectors=("x", "y"))
    column, call.arrays["c"] = call.vector("x"), call.vector("y")
    inner, outer = (columns, rows) if how == 0 else (rows, columns)
    call.same("the inner dimensions of op(a) and x", _shape(a, how)[1], column.shape[-2])
    one = Sizes("gemv", None, 1, call.batch)
    product = call.masked_product(a, column, outer, one, inner, how)
    return call.result(product, alpha, beta, outer, one, inner)[..., 0]


def trsv(
    a: ArrayLike,
    x: ArrayLike,
    *,
    lower: bool = False,
    trans: int = 0,
    unit_diagonal: bool = False,
    sizes: ArrayLike | None = None,
) -> Array:
    """Solves ``op(a) y = x`` with a triangular a, for vectors of shape ``(..., n)``; sizes: n."""
    call = _Call("trsv", a=a, x=x)
    how, a = call.option("trans", trans), call.square("a")
    y = triangular_solve(
        a,
        call.vector("x"),
        left_side=True,
        lower=lower,
        transpose_a=how != 0,
        conjugate_a=how == 2,
        unit_diagonal=unit_diagonal,
        sizes=sizes,
    )
    return y[..., 0]


def laswp(a: ArrayLike, pivots: ArrayLike, *, inverse: bool = False) -> Array:
    """Exchanges row i of each matrix with row pivots[i], for i = 0, 1, ... (inverse: backwards).

    pivots are as `lu` returns them, int32 of shape ``(..., k)``. Of matrices with sizes they leave
    the other rows in their places.
    """
    call = _Call("laswp", a=a)
    (a,) = call.matrices("a")
    exchanged = jnp.asarray(pivots)
    if not jnp.issubdtype(exchanged.dtype, jnp.integer) or exchanged.ndim < 1:
        raise ValueError(
            f"laswp: pivots must be integers of shape (..., k), got {_checks.described(pivots)}"
        )
    inverse = _checks.flag("laswp", "inverse", inverse)
    rows = jax.lax.linalg.lu_pivots_to_permutation(exchanged.astype(jnp.int32), a.shape[-2])
    return take_rows(a, inverse_permutation(rows) if inverse else rows)


class _Call:
    """One call: its operands in their common dtype, its checks, and how a result is made."""

    def __init__(self, operation: str, *, stored: bool = False, **named: ArrayLike | None):
        given = {name: x for name, x in named.items() if x is not None}
        accepted = _checks.COMPUTED + (_checks.STORED if stored else ())
        arrays, self.dtype = _checks.operands(
            operation, keep_stored=True, accepted=accepted, **given
        )
        self.operation = operation
        self.arrays: dict[str, Any] = dict.fromkeys(named) | dict(zip(given, arrays, strict=True))

    def option(self, name: str, value: Any, accepted: Sequence[int] = (0, 1, 2)) -> int:
        return int(_checks.option(self.operation, name, value, accepted))

    def matrices(self, *names: str) -> list[Array]:
        for name in names:
            _checks.matrix(self.operation, name, self.arrays[name])
        return [self.arrays[name] for name in names]

    def square(self, name: str) -> Array:
        _checks.square(self.operation, name, self.arrays[name])
        a: Array = self.arrays[name]
        return a

    def vector(self, name: str) -> Any:
        """Vectors as columns."""
        x = self.arrays[name]
        if x is not None and x.ndim < 1:
            raise ValueError(f"{self.operation}: {name} must have shape (..., n), got {x.shape}")
        return None if x is None else x[..., None]

    def same(self, what: str, one: Any, other: Any) -> None:
        if one != other:
            raise ValueError(f"{self.operation}: {what} are {one} and {other}")

    def extents(
        self, sizes: SizesLike, *, vectors: Sequence[str] = (), **limits: int
    ) -> list[Sizes]:
        """The sizes of each of BLAS' numbers, with the batch dimensions of all operands."""
        names = ", ".join(limits)
        if sizes is not None and (not isinstance(sizes, tuple | list) or len(sizes) != len(limits)):
            raise TypeError(
                f"{self.operation}: sizes must be a tuple ({names}), got {_checks.described(sizes)}"
            )
        core = {name: 1 if name in vectors else 2 for name in self.arrays}
        present = [(name, x, core[name]) for name, x in self.arrays.items() if x is not None]
        _checks.batches(self.operation, present)
        self.batch = jnp.broadcast_shapes(*(x.shape[: x.ndim - rank] for _, x, rank in present))
        return [
            Sizes(self.operation, size, n, self.batch, name=f"{name} of sizes")
            for (name, n), size in zip(limits.items(), sizes or [None] * len(limits), strict=True)
        ]

    def one_sided(self, sizes: SizesLike, right: int) -> tuple[Array, Array, Sizes, Sizes]:
        """The square a, b, and the sizes of b: a is beside b, on its right or left."""
        a, b = self.square("a"), self.matrices("b")[0]
        rows, columns = self.extents(sizes, m=b.shape[-2], n=b.shape[-1])
        self.same("the dimensions of a and b that meet", a.shape[-1], b.shape[-1 if right else -2])
        return a, b, rows, columns

    def whole(self, x: Array) -> Array:
        """x with the batch dimensions of the call."""
        return jnp.broadcast_to(x, (*self.batch, *x.shape[-2:]))

    def real(self, name: str, value: ArrayLike) -> None:
        if jnp.iscomplexobj(value):
            raise TypeError(f"{self.operation}: {name} must be real")

    def factor(self, x: Array, name: str, value: ArrayLike) -> Array:
        """alpha or beta, to go with whole matrices x."""
        if not jnp.iscomplexobj(x):
            self.real(f"{name} of real operands", value)
        given = _checks.per_matrix(self.operation, name, jnp.asarray(value), self.batch)
        return given[..., None, None].astype(x.dtype)

    def scaled(self, x: Array, name: str, value: ArrayLike) -> Array:
        return x if _is(value, 1) else x * self.factor(x, name, value)

    def plus(
        self, product: Array, beta: ArrayLike, rows: Sizes, columns: Sizes | None = None
    ) -> Array:
        """product + beta c, c within its rows and columns; where beta is zero, it is not read."""
        c = self.arrays.get("c")
        if c is None:
            return product
        self.same("the shapes of the product and of c", product.shape[-2:], c.shape[-2:])
        if _is(beta, 0):
            return product
        factor = self.factor(product, "beta", beta)
        c = _part(
            self.whole(c).astype(product.dtype), 0, rows, rows if columns is None else columns
        )
        return product + factor * jnp.where(factor == 0, jnp.zeros_like(c), c)

    def product(
        self,
        a: Array,
        b: Array,
        rows: Sizes,
        columns: Sizes,
        inner: Sizes,
        trans_a: int = 0,
        trans_b: int = 0,
        part: str = "",
    ) -> Array:
        """op(a) op(b), or a triangle; zero beyond the sizes, NaN where one is out of range."""
        three = (rows, columns, inner)
        if all(of.given is None for of in three) or _checks.is_stored(self.dtype):
            x = self.masked_product(a, b, rows, columns, inner, trans_a, trans_b)
            return triangle(x, upper=part == "upper") if part else x
        given = [jnp.int32(of.n) if of.given is None else of.given for of in three]
        sizes = jnp.stack(jnp.broadcast_arrays(*given), -1).astype(jnp.int32)
        (x,) = gemm_op(a, b, sizes, trans_a=_WAY[trans_a], trans_b=_WAY[trans_b], triangle=part)
        return self.whole(x)

    def masked_product(
        self,
        a: Array,
        b: Array,
        rows: Sizes,
        columns: Sizes,
        inner: Sizes,
        trans_a: int = 0,
        trans_b: int = 0,
    ) -> Array:
        """The product by XLA, of operands with zeros beyond their sizes."""
        left = _op(_part(a, trans_a, rows, inner), trans_a)
        right = _op(_part(b, trans_b, inner, columns), trans_b)
        if _checks.is_stored(self.dtype):
            x = jnp.matmul(left, right, preferred_element_type=jnp.float32)
        else:
            x = matmul(left, right)
        return inner.spoilt(columns.spoilt(rows.spoilt(self.whole(x))))

    def result(self, product: Array, alpha: ArrayLike, beta: ArrayLike, *sizes: Sizes) -> Array:
        """alpha product + beta c; c beyond the first two sizes, its rows and columns.

        NaN where any size is out of range.
        """
        x = self.plus(self.scaled(product, "alpha", alpha), beta, *sizes[:2]).astype(self.dtype)
        c = self.arrays.get("c")
        if c is None:
            return x
        for of, axis in zip(sizes, (-2, -1), strict=False):
            x = of.within(x, axis, other=self.whole(c))
        for of in sizes:
            x = of.spoilt(x)
        return x


_WAY = ("n", "t", "c")  # the letters of trans


def _is(value: ArrayLike, number: int) -> bool:
    """Whether a number that is known when the program is traced is this one."""
    known = _checks.python_value(value)
    return isinstance(known, int | float | complex) and known == number


def _shape(a: Array, trans: int) -> tuple[int, int]:
    """Of op(a)."""
    m, n = a.shape[-2:]
    return (n, m) if trans else (m, n)


def _op(a: Array, trans: int) -> Array:
    if trans == 2:
        return adjoint(a)
    return jnp.swapaxes(a, -1, -2) if trans else a


def _part(a: Array, trans: int, rows: Sizes, columns: Sizes) -> Array:
    """a within the rows and columns of op(a)."""
    return columns.within(rows.within(a, -1 if trans else -2), -2 if trans else -1)


def _rank_k(
    operation: str,
    a: ArrayLike,
    c: ArrayLike | None,
    alpha: ArrayLike,
    beta: ArrayLike,
    trans: int,
    lower: bool,
    sizes: SizesLike,
    *,
    star: int,
    b: ArrayLike | None = None,
) -> Array:
    """syrk and syr2k (star = 1: transposes), herk and her2k (star = 2: adjoints)."""
    call = _Call(operation, a=a, b=b, c=c)
    how = call.option("trans", trans, (0, star))
    lower = _checks.flag(operation, "lower", lower)
    first = call.matrices("a")[0]
    second = first if b is None else call.matrices("b")[0]
    n, k = _shape(first, how)
    call.same("the shapes of a and b", first.shape[-2:], second.shape[-2:])
    rows, inner = call.extents(sizes, n=n, k=k)
    ways = (how, 0) if how else (0, star)
    part = "lower" if lower else "upper"
    if star == 2:
        call.real("beta", beta)
        if b is None:
            call.real("alpha", alpha)
    x = call.product(first, second, rows, rows, inner, *ways, part)
    x = call.scaled(x, "alpha", alpha)
    if b is not None:
        swapped = jnp.conj(jnp.asarray(alpha)) if star == 2 else alpha
        y = call.product(second, first, rows, rows, inner, *ways, part)
        x = x + call.scaled(y, "alpha", swapped)
    given, hermitian = call.arrays["c"], star == 2 and jnp.iscomplexobj(x)
    if given is None:
        return inner.spoilt(rows.spoilt(real_diagonal(x))) if hermitian else x
    if hermitian:
        call.arrays["c"] = real_diagonal(given)
    x = call.plus(x, beta, rows)
    x = real_diagonal(x) if hermitian else x
    other = call.whole(given)
    ones = jnp.ones((n, n), bool)
    own = (jnp.tril(ones) if lower else jnp.triu(ones)).reshape(*[1] * (x.ndim - 2), n, n)
    x = rows.within(jnp.where(own, x, other), -2, -1, other=other)
    return inner.spoilt(rows.spoilt(x))


def _mirrored(
    operation: str,
    whole: Any,
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None,
    alpha: ArrayLike,
    beta: ArrayLike,
    side: int,
    lower: bool,
    sizes: SizesLike,
) -> Array:
    """symm and hemm."""
    call = _Call(operation, a=a, b=b, c=c)
    right = call.option("side", side, (0, 1))
    lower = _checks.flag(operation, "lower", lower)
    a, b, rows, columns = call.one_sided(sizes, right)
    full: Array = whole(a, upper=not lower)
    left, other = (b, full) if right else (full, b)
    product = call.product(left, other, rows, columns, columns if right else rows)
    return call.result(product, alpha, beta, rows, columns)
