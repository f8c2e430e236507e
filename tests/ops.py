"""The table of operations. Every transformation's tests run over its rows.

A row says how to call one operation with one set of options, what its operands look like (NaN in
whatever the contract says is not read), and which matrix M the operation works on, in float64 or
complex128: a factor has M = F F^H or F^H F, a solution M X = B or X M = B.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_batched as jb
from jax_batched._ffi import (
    cuda_tiers,
    force_kernel,
    is_fused,
    serves_stored,
    target_name,
)
from jax_batched.tune import compute_capability

DTYPES = ("float32", "float64", "complex64", "complex128")
WIDE_DTYPES = ("float64", "complex128")
STORED = ("float16", "bfloat16")

# LAPACK's threshold for its test ratios.
GATE = 30.0

_ON_CPU = jax.default_backend() == "cpu"

# Kernels that can be forced on this platform; "" is the one that the library picks.
KERNELS = ("", "reference") if _ON_CPU else ("", *sorted({tier.kernel for tier in cuda_tiers()}))


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """One row: an operation with one set of options.

    Attributes:
      name: of the row.
      operation: name of the operation's kernels, "" if it has none.
      function: the public function; options: its keyword arguments.
      matrix: the matrix M that operand a stands for.
      make: operand a in float64 or complex128, from (rng, dtype, shape).
      unread: mask, from n, of the entries of a that are not read.
      real_diagonal: the imaginary part of a's diagonal is not read.
      left_side: M X = B, else X M = B. factors: the result is a factor of M, upper or lower.
    """

    name: str
    operation: str
    function: Callable[..., Any]
    options: dict[str, Any]
    matrix: Callable[[np.ndarray], np.ndarray]
    make: Callable[..., np.ndarray]
    unread: Callable[[int], np.ndarray]
    real_diagonal: bool = False
    left_side: bool = True
    factors: bool = False
    upper: bool = False

    def __call__(self, *operands: Any) -> Any:
        return self.function(*operands, **self.options)

    def with_info(self, *operands: Any) -> Any:
        """The result and info."""
        return self.function(*operands, **self.options, return_info=True)

    def fast(self, *operands: Any) -> Any:
        """The result with accuracy="fast"."""
        return self.function(*operands, **self.options, accuracy="fast")

    def spoil(self, a: np.ndarray) -> np.ndarray:
        """A copy of a with NaN in whatever is not read."""
        n = a.shape[-1]
        a = a.copy()
        a[..., self.unread(n)] = np.nan
        if self.real_diagonal and np.iscomplexobj(a):
            diagonal = np.arange(n)
            a.imag[..., diagonal, diagonal] = np.nan
        return a

    def right_hand_side(self, rng: Any, dtype: Any, batch: Sequence[int], n: int, nrhs: int) -> Any:
        """Operand b."""
        shape = (*batch, n, nrhs) if self.left_side else (*batch, nrhs, n)
        return normal(rng, dtype, shape).astype(dtype)

    def operands(
        self, dtype: Any, *, batch: Sequence[int] = (), n: int, nrhs: int = 1, seed: int = 0
    ) -> tuple[np.ndarray, ...]:
        """Operands for a call, NumPy arrays of the dtype."""
        rng = np.random.default_rng(seed)
        a = self.spoil(self.make(rng, dtype, (*batch, n, n))).astype(dtype)
        return (a,) if self.factors else (a, self.right_hand_side(rng, dtype, batch, n, nrhs))

    def reference(self, a: np.ndarray, *b: np.ndarray) -> np.ndarray:
        """The result by NumPy, in float64 or complex128."""
        m = self.matrix(wide(a))
        if self.factors:
            factor = np.linalg.cholesky(m)
            return adjoint(factor) if self.upper else factor
        (rhs,) = b
        if self.left_side:
            return np.linalg.solve(m, wide(rhs))
        return np.swapaxes(
            np.linalg.solve(np.swapaxes(m, -1, -2), np.swapaxes(wide(rhs), -1, -2)), -1, -2
        )

    def ratios(self, operands: Sequence[np.ndarray], result: Any) -> np.ndarray:
        """LAPACK's test ratio of each matrix: of each right-hand side, the largest."""
        eps = float(jnp.finfo(result.dtype).eps)
        m, x = self.matrix(wide(operands[0])), wide(result)
        n = max(m.shape[-1], 1)
        if self.factors:
            product = adjoint(x) @ x if self.upper else x @ adjoint(x)
            return _safe_ratio(norm(m - product), n * eps * norm(m))
        b = wide(operands[1])
        if not self.left_side:
            m, x, b = (np.swapaxes(y, -1, -2) for y in (m, x, b))
        residual = np.abs(b - m @ x).sum(-2)
        bound = n * eps * norm(m)[..., None] * np.abs(x).sum(-2)
        return _safe_ratio(residual, bound).max(-1)

    def check(self, operands: Sequence[np.ndarray], result: Any, gate: float = GATE) -> None:
        """Asserts dtype, shape, zeros and the test ratio of every matrix of a result."""
        batch = np.broadcast_shapes(*(x.shape[:-2] for x in operands))
        assert result.dtype == operands[0].dtype
        assert result.shape == (*batch, *operands[-1].shape[-2:])
        if self.factors:
            x = np.asarray(result)
            other = np.tril(x, -1) if self.upper else np.triu(x, 1)
            assert not other.any(), "the other triangle of a factor must be zero"
            diagonal = np.diagonal(x, axis1=-2, axis2=-1)
            assert not np.imag(diagonal).any(), "the diagonal of a factor must be real"
            assert (wide(np.real(diagonal)) > 0).all()
        ratios = self.ratios(operands, result)
        assert np.isfinite(ratios).all()
        assert ratios.max() <= gate, (
            f"matrix {np.argmax(ratios)} of {ratios.shape}: ratio {ratios.max():.3g}"
        )


def wide(x: Any) -> np.ndarray:
    """x as float64 or complex128."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def adjoint(a: np.ndarray) -> np.ndarray:
    """Conjugate transpose."""
    return np.conj(np.swapaxes(a, -1, -2))


def times(a: np.ndarray, scale: Any) -> np.ndarray:
    """a * scale with a real scale; a NaN imaginary part does not spoil the real one."""
    if not np.iscomplexobj(a):
        return a * scale
    product = np.empty_like(a)
    product.real, product.imag = a.real * scale, a.imag * scale
    return product


def norm(a: np.ndarray) -> np.ndarray:
    """The 1-norm of each matrix."""
    return np.abs(a).sum(-2).max(-1)


def _safe_ratio(residual: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """residual / bound; 0 where the residual is zero."""
    return np.where(residual == 0, 0, residual / np.where(bound == 0, np.finfo(float).tiny, bound))


def normal(rng: Any, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Standard normal numbers, complex where the dtype is."""
    x = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        x = (x + 1j * rng.standard_normal(shape)) / np.sqrt(2)
    return x


def spd(rng: Any, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Hermitian positive definite matrices with a condition number below about 6."""
    g = normal(rng, dtype, shape)
    n = shape[-1]
    return g @ adjoint(g) / max(n, 1) + np.eye(n)


def next_to_overflow(rng: Any, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Positive definite matrices that are not Hermitian, of the dtype: the sums of an entry's and
    its mirror image's real parts, imaginary parts or both overflow."""
    n = shape[-1]
    form = jnp.finfo(dtype)
    phase = rng.choice([1, -1], (*shape[:-2], n, 1))
    if np.dtype(dtype).kind == "c":
        phase = np.exp(np.pi / 4j * rng.integers(0, 8, phase.shape))
    skew = np.tril(rng.uniform(-0.05, 0.05, shape), -1)
    a = (0.92 * phase @ adjoint(phase) + 0.07 * np.eye(n)) * (1 + skew - np.swapaxes(skew, -1, -2))
    quarter = (a * (float(form.max) / 4)).astype(dtype)
    return quarter * np.array(4, quarter.real.dtype)


def triangular(rng: Any, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Matrices both of whose triangles are well conditioned, with or without their diagonal."""
    n = shape[-1]
    a = normal(rng, dtype, shape) / (2 * np.sqrt(max(n, 1)))
    diagonal = normal(rng, dtype, shape[:-1])
    diagonal = diagonal / np.abs(diagonal) * rng.uniform(1, 2, shape[:-1])
    return np.where(np.eye(n, dtype=bool), diagonal[..., None], a)


def general(rng: Any, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Well conditioned matrices whose pivots are not on the diagonal."""
    n = shape[-1]
    return np.roll(normal(rng, dtype, shape) / (2 * np.sqrt(max(n, 1))) + 2 * np.eye(n), 1, -2)


def symmetric(rng: Any, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Well conditioned symmetric matrices with pivots beside the diagonal."""
    return _indefinite(rng, dtype, shape, lambda a: a)


def hermitian(rng: Any, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Well conditioned Hermitian matrices that are not definite, pivots beside the diagonal."""
    return _indefinite(rng, dtype, shape, np.conj)


def _indefinite(rng: Any, dtype: Any, shape: Sequence[int], star: Callable) -> np.ndarray:
    n = shape[-1]
    g = normal(rng, dtype, shape) / (4 * np.sqrt(max(n, 1)))
    swapped = 2 * np.eye(n)[np.minimum(np.arange(n) ^ 1, n - 1)]
    return g + star(np.swapaxes(g, -1, -2)) + swapped


# Matrices of the kinds that `solve` tells apart.
MAKE = {"gen": general, "sym": symmetric, "her": hermitian, "pos": spd}


def symmetric_from(a: np.ndarray, *, upper: bool) -> np.ndarray:
    """The symmetric matrix whose upper or lower triangle is a's."""
    half = np.triu(a) if upper else np.tril(a)
    return half + np.swapaxes(half, -1, -2) * (1 - np.eye(a.shape[-1]))


def hermitian_from(a: np.ndarray, *, upper: bool) -> np.ndarray:
    """The Hermitian matrix whose upper or lower triangle is a's."""
    strict = np.triu(a, 1) if upper else np.tril(a, -1)
    diagonal = np.where(np.eye(a.shape[-1], dtype=bool), np.real(a), 0)
    return strict + adjoint(strict) + diagonal


def hermitian_mean(a: np.ndarray) -> np.ndarray:
    """(a + a^H) / 2 without the imaginary part of a's diagonal."""
    a = np.where(np.eye(a.shape[-1], dtype=bool), np.real(a), a)
    return (a + adjoint(a)) / 2


def _nothing(n: int) -> np.ndarray:
    return np.zeros((n, n), bool)


def _strict_triangle(*, upper: bool, diagonal: bool = False) -> Callable[[int], np.ndarray]:
    """The mask of one triangle, with or without the diagonal."""

    def mask(n: int) -> np.ndarray:
        ones = np.ones((n, n), bool)
        k = 0 if diagonal else 1
        return np.triu(ones, k) if upper else np.tril(ones, -k)

    return mask


def _cholesky(upper: bool, symmetrize: bool) -> Op:
    if symmetrize:
        matrix, unread = hermitian_mean, _nothing
    else:
        matrix = functools.partial(hermitian_from, upper=upper)
        unread = _strict_triangle(upper=not upper)
    return Op(
        f"cholesky-{'upper' if upper else 'lower'}-{'mean' if symmetrize else 'triangle'}",
        "cholesky",
        jb.cholesky,
        {"upper": upper, "symmetrize_input": symmetrize},
        matrix,
        spd,
        unread,
        real_diagonal=True,
        factors=True,
        upper=upper,
    )


def _triangle_matrix(lower: bool, unit: bool, transpose: bool, conjugate: bool) -> Callable:
    def matrix(a: np.ndarray) -> np.ndarray:
        m = np.tril(a) if lower else np.triu(a)
        if unit:
            m = np.where(np.eye(a.shape[-1], dtype=bool), 1, m)
        m = np.swapaxes(m, -1, -2) if transpose else m
        return np.conj(m) if conjugate else m

    return matrix


def _triangular_solve(left: bool, lower: bool, trans: bool, conj: bool, unit: bool) -> Op:
    flags = [("left", left), ("lower", lower), ("T", trans), ("conj", conj), ("unit", unit)]
    return Op(
        "-".join(["triangular_solve", *(flag for flag, on in flags if on)]),
        "triangular_solve",
        jb.triangular_solve,
        {
            "left_side": left,
            "lower": lower,
            "transpose_a": trans,
            "conjugate_a": conj,
            "unit_diagonal": unit,
        },
        _triangle_matrix(lower, unit, trans, conj),
        triangular,
        _strict_triangle(upper=lower, diagonal=unit),
        left_side=left,
    )


def _solve_triangular(trans: int | str, lower: bool, unit: bool) -> Op:
    return Op(
        f"solve_triangular-{trans}-{'lower' if lower else 'upper'}{'-unit' if unit else ''}",
        "triangular_solve",
        jb.solve_triangular,
        {"trans": trans, "lower": lower, "unit_diagonal": unit},
        _triangle_matrix(lower, unit, trans not in (0, "N"), trans in (2, "C")),
        triangular,
        _strict_triangle(upper=lower, diagonal=unit),
    )


def _cho_solve(lower: bool) -> Op:
    def matrix(c: np.ndarray) -> np.ndarray:
        factor = np.tril(c) if lower else adjoint(np.triu(c))
        return factor @ adjoint(factor)

    return Op(
        f"cho_solve-{'lower' if lower else 'upper'}",
        "cho_solve",
        lambda c, b, lower: jb.cho_solve((c, lower), b),
        {"lower": lower},
        matrix,
        triangular,
        _strict_triangle(upper=lower),
    )


def _solve_pos(lower: bool) -> Op:
    return Op(
        f"solve_pos-{'lower' if lower else 'upper'}",
        "solve_pos",
        jb.solve,
        {"assume_a": "pos", "lower": lower},
        functools.partial(hermitian_from, upper=not lower),
        spd,
        _strict_triangle(upper=lower),
        real_diagonal=True,
    )


def _solve_indefinite(kind: str, lower: bool) -> Op:
    mirror = hermitian_from if kind == "her" else symmetric_from
    return Op(
        f"solve_{kind}-{'lower' if lower else 'upper'}",
        "",
        jb.solve,
        {"assume_a": kind, "lower": lower},
        functools.partial(mirror, upper=not lower),
        MAKE[kind],
        _strict_triangle(upper=lower),
        real_diagonal=kind == "her",
    )


def _refined_solve(name: str, method: str, **options: Any) -> Op:
    pos = options.get("assume_a") != "gen"
    return Op(
        f"refined_solve-{name}",
        "",
        lambda a, b, **options: jb.refined_solve(a, b, **options)[0],
        {"method": method, **options},
        functools.partial(hermitian_from, upper=not options.get("lower")) if pos else lambda a: a,
        spd if pos else general,
        _strict_triangle(upper=bool(options.get("lower"))) if pos else _nothing,
        real_diagonal=pos,
    )


_BOTH = (False, True)

CHOLESKY = [_cholesky(*flags) for flags in itertools.product(_BOTH, _BOTH)]
TRIANGULAR = [_triangular_solve(*flags) for flags in itertools.product(_BOTH, repeat=5)]
SOLVE_TRIANGULAR = [
    _solve_triangular(*row)
    for row in [(0, True, False), ("T", False, False), (2, True, True), ("N", False, True)]
]
CHO_SOLVE = [_cho_solve(lower) for lower in _BOTH]
SOLVE_POS = [_solve_pos(lower) for lower in _BOTH]
SOLVE_GEN = [Op("solve_gen", "", jb.solve, {"assume_a": "gen"}, lambda a: a, general, _nothing)]
SOLVE_INDEFINITE = [_solve_indefinite("sym", False), _solve_indefinite("her", True)]
REFINED = [
    _refined_solve("lower", "ir", lower=True),
    _refined_solve("upper-gmres", "gmres"),
    _refined_solve("gen", "ir", assume_a="gen"),
]
# Slow to compile; the others differ in what is inside the primitives.
ONE_REFINED = REFINED[:1]

TABLE = [*CHOLESKY, *TRIANGULAR, *SOLVE_TRIANGULAR, *CHO_SOLVE, *SOLVE_POS]
TABLE += [*SOLVE_GEN, *SOLVE_INDEFINITE]
BY_NAME = {op.name: op for op in (*TABLE, *REFINED)}

# For transformations that are slow to compile: every operation, every flag on and off.
REDUCED = [
    *CHOLESKY,
    BY_NAME["triangular_solve-lower"],
    BY_NAME["triangular_solve-T-conj-unit"],
    BY_NAME["triangular_solve-left-lower-unit"],
    BY_NAME["triangular_solve-left-lower-T-conj"],
    BY_NAME["triangular_solve-left-conj"],
    *CHO_SOLVE,
    *SOLVE_POS,
    *SOLVE_GEN,
]
# One row of each kernel, its two directions in turn.
ONE_EACH = [
    BY_NAME["cholesky-lower-mean"],
    BY_NAME["cholesky-upper-triangle"],
    BY_NAME["triangular_solve-left-lower"],
    BY_NAME["triangular_solve-conj"],
    BY_NAME["cho_solve-lower"],
    BY_NAME["solve_pos-lower"],
]
# Operations that factor, hence can fail and return info.
FACTORING = [*CHOLESKY, *SOLVE_POS]
SOLVING = [*(op for op in REDUCED if not op.factors), REFINED[0], REFINED[-1]]
WITH_KERNELS = [op for op in REDUCED if op.operation]
SUBSTITUTING = [op for op in WITH_KERNELS if not op.factors]


def serves(op: Op, kernel: str, dtype: Any, n: int, nrhs: int = 1) -> bool:
    """Whether a kernel can be forced for this call on the present platform."""
    if kernel == "":
        return True
    if not op.operation or n > 512:
        return False
    if _ON_CPU:
        return True
    nrhs = 1 if op.factors else nrhs
    name = np.dtype(dtype).name
    if name in STORED:  # elsewhere they are cast to float32 and back
        name = "float16" if serves_stored("cuda", op.operation, n, nrhs) else "float32"
    called = {op.operation}
    if op.operation == "solve_pos" and not is_fused("cuda", n, nrhs, name):
        called = {"cholesky", "cho_solve"}
    return called <= {
        tier.operation
        for tier in cuda_tiers()
        if (tier.kernel, tier.dtype) == (kernel, name)
        and tier.min_n <= n <= tier.max_n
        and tier.capability <= compute_capability()
        and not tier.fast
    }


def by_kernel(
    rows: Sequence[Op], sizes: Sequence[int] = range(1, 65), dtypes: Sequence[str] = DTYPES
) -> list[tuple[Op, str, str]]:
    """Each row with each kernel and dtype that can be forced for some of the sizes."""
    return [
        (op, kernel, dtype)
        for op in rows
        for kernel in KERNELS
        for dtype in dtypes
        if any(serves(op, kernel, dtype, n) for n in sizes)
    ]


def gradient(op: Op) -> Callable[..., Any]:
    """The gradient of a real function that is curved in all of an operation's result."""

    def f(*operands: Any) -> Any:
        x = op(*operands)
        return jnp.sum(jnp.real(x) ** 2 + jnp.sin(jnp.imag(x)))

    return jax.grad(f)


def compiled(f: Callable[..., Any], *args: Any, kernel: str = "") -> Any:
    """f(*args) as one compiled program, with the named kernel."""
    with force_kernel(kernel):
        return jax.jit(lambda *x: f(*x))(*args)


def on_each(op: Callable[..., Any], calls: Sequence[Any], kernel: str = "") -> list[Any]:
    """The result of op for each of several tuples of operands, in one compiled program."""
    results = compiled(lambda xs: [op(*x) for x in xs], list(calls), kernel=kernel)
    return [jax.tree.map(np.asarray, result) for result in results]


def by_reference_kernel(op: Callable[..., Any], calls: Sequence[Any]) -> list[Any]:
    """`on_each` with the plain CPU kernel, on whatever machine."""
    with jax.default_device(jax.devices("cpu")[0]):
        return on_each(op, calls, "reference")


def factorizations(text: str) -> int:
    """How many factorizations a program's text calls."""
    return sum(text.count(target_name(op)) for op in ("cholesky", "solve_pos"))


def ids(op: Any) -> str | None:
    """Name of a row, or of a kernel, in a test's id."""
    if isinstance(op, Op):
        return op.name
    return "default" if op == "" else None


def same_bits(x: Any, y: Any) -> bool:
    """Whether two arrays are equal bit for bit, apart from the payloads of NaNs."""
    x, y = np.asarray(x), np.asarray(y)
    return x.shape == y.shape and x.dtype == y.dtype and np.array_equal(x, y, equal_nan=True)
