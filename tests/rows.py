"""What a row of the table of operations says: `Op`, and `Kind`, what the operation's result is.

A row says how to call one operation with one set of options, what its operands look like (NaN in
whatever the contract says is not read), and which matrix M its operand a stands for, in float64 or
complex128. Its kind says what follows: the result by NumPy, LAPACK's ratios, zeros, failures.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_batched._matrices import MAX_RATIO, adjoint, normal, solve_ratio, wide

# float16 and bfloat16 are storage; the operations are computed in these.
DTYPES = ("float32", "float64", "complex64", "complex128")
STORED = ("float16", "bfloat16")


class Kind:
    """What an operation's result is. One subclass for each answer."""

    takes_b = False  # the right-hand sides of a solve
    left_side = True  # M X = B, not X M = B
    is_unitary = False  # so that the sum of its squares has no derivative

    def reference(self, m: np.ndarray, *b: np.ndarray) -> np.ndarray:
        """The result by NumPy."""
        raise NotImplementedError

    def ratios(self, eps: float, m: np.ndarray, x: np.ndarray, *b: np.ndarray) -> np.ndarray:
        """LAPACK's test ratio of each matrix: of each right-hand side, the largest."""
        raise NotImplementedError

    def check_structure(self, x: np.ndarray) -> None:
        """Asserts what must hold exactly, zeros for instance."""

    def failed(self, shape: Sequence[int]) -> np.ndarray:
        """Which entries of a failed matrix's result, of this shape, are NaN; the rest is zero."""
        return np.ones(shape, bool)

    def scale(self, m: float, b: float) -> float:
        """What the result is multiplied by where M and b are, all by powers of two."""
        raise NotImplementedError

    def unscaled(self, x: np.ndarray, d: np.ndarray) -> np.ndarray:
        """The result for M and b from that for D M D and D b."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Solve(Kind):
    """X with M X = B, or X M = B."""

    left_side: bool = True
    takes_b = True

    def reference(self, m: np.ndarray, *b: np.ndarray) -> np.ndarray:
        (rhs,) = b
        if self.left_side:
            return np.linalg.solve(m, rhs)
        return _transposed(np.linalg.solve(_transposed(m), _transposed(rhs)))

    def ratios(self, eps: float, m: np.ndarray, x: np.ndarray, *b: np.ndarray) -> np.ndarray:
        system = (m, *b, x)
        return solve_ratio(eps, *(system if self.left_side else map(_transposed, system)))

    def scale(self, m: float, b: float) -> float:
        return b / m

    def unscaled(self, x: np.ndarray, d: np.ndarray) -> np.ndarray:
        return x * (d[:, None] if self.left_side else d)


def _transposed(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Op:
    """One row: an operation with one set of options.

    Attributes:
      name: of the row.
      operation: of which it is a row; the name of its kernels, if it has some.
      function: the public function; options: its keyword arguments.
      kind: what the result is.
      matrix: the matrix M that operand a stands for.
      degree: M is a homogeneous polynomial of this degree in a; 0: a cannot be scaled.
      make: operand a in float64 or complex128, from (rng, dtype, shape).
      unread: mask, from n, of the entries of a that are not read.
      real_diagonal: the imaginary part of a's diagonal is not read.
      can_fail: M must be positive definite; info is the first column whose pivot is not positive.
      has_info: the function takes return_info.
      in_place: the function takes overwrite_a, or overwrite_b.
      takes_sizes: the function takes sizes.
      kernels: the operation has kernels of its own; else it is made of JAX's or of other ones.
      on_cuda: there are kernels for CUDA too.
      composite: made of other operations of this library, and slow to compile.
      max_n: the largest size that its kernels serve.
      stored_max_n: the largest for which kernels on CUDA take 16-bit elements, with one
        right-hand side if any.
      calls: the operations whose kernels a call on CUDA comes to, from (dtype, n, nrhs).
      max_nrhs: the most right-hand sides that a kernel of CUDA takes, where it does not take any.
      paths: ways without a kernel that can be forced, see `force_kernel`.
      reduced: stands for others where every row would take too long.
      usual: stands for its kernel where even that would.
    """

    name: str
    operation: str
    function: Callable[..., Any]
    options: dict[str, Any]
    kind: Kind
    matrix: Callable[[np.ndarray], np.ndarray]
    make: Callable[..., np.ndarray]
    degree: int = 1
    unread: Callable[[int], np.ndarray] = lambda n: np.zeros((n, n), bool)
    real_diagonal: bool = False
    can_fail: bool = False
    has_info: bool = False
    in_place: bool = True
    takes_sizes: bool = True
    kernels: bool = True
    on_cuda: bool = True
    composite: bool = False
    max_n: int = 512
    stored_max_n: int = 0
    calls: Callable[[str, int, int], set[str]] | None = None
    max_nrhs: Mapping[str, int] = dataclasses.field(default_factory=dict)
    paths: tuple[str, ...] = ("lax",)
    reduced: bool = False
    usual: bool = False

    def __call__(self, *operands: Any) -> Any:
        return self.function(*operands, **self.options)

    def with_info(self, *operands: Any) -> Any:
        """The result and info."""
        return self.function(*operands, **self.options, return_info=True)

    def fast(self, *operands: Any) -> Any:
        """The result with accuracy="fast"."""
        return self.function(*operands, **self.options, accuracy="fast")

    @property
    def takes_b(self) -> bool:
        """There is an operand b."""
        return self.kind.takes_b

    @property
    def left_side(self) -> bool:
        """The right-hand sides are columns."""
        return self.kind.left_side

    def kernels_called(self, dtype: str, n: int, nrhs: int) -> set[str]:
        """The operations whose kernels a call on CUDA comes to."""
        return {self.operation} if self.calls is None else self.calls(dtype, n, nrhs)

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
        return (a, self.right_hand_side(rng, dtype, batch, n, nrhs)) if self.takes_b else (a,)

    def reference(self, a: np.ndarray, *b: np.ndarray) -> np.ndarray:
        """The result by NumPy, in float64 or complex128."""
        return self.kind.reference(self.matrix(wide(a)), *map(wide, b))

    def ratios(self, operands: Sequence[np.ndarray], result: Any) -> np.ndarray:
        """LAPACK's test ratio of each matrix."""
        a, *b = map(wide, operands)
        eps = float(jnp.finfo(result.dtype).eps)
        return self.kind.ratios(eps, self.matrix(a), wide(result), *b)

    def check(
        self, operands: Sequence[np.ndarray], result: Any, largest: float = MAX_RATIO
    ) -> None:
        """Asserts dtype, shape, structure and the test ratio of every matrix of a result."""
        batch = np.broadcast_shapes(*(x.shape[:-2] for x in operands))
        assert result.dtype == operands[0].dtype
        assert result.shape == (*batch, *operands[-1].shape[-2:])
        self.kind.check_structure(np.asarray(result))
        ratios = self.ratios(operands, result)
        assert np.isfinite(ratios).all()
        assert ratios.max() <= largest, (
            f"matrix {np.argmax(ratios)} of {ratios.shape}: ratio {ratios.max():.3g}"
        )


def strict_triangle(*, upper: bool, diagonal: bool = False) -> Callable[[int], np.ndarray]:
    """The mask of one triangle, with or without the diagonal."""

    def mask(n: int) -> np.ndarray:
        ones = np.ones((n, n), bool)
        k = 0 if diagonal else 1
        return np.triu(ones, k) if upper else np.tril(ones, -k)

    return mask


def hermitian_from(a: np.ndarray, *, upper: bool) -> np.ndarray:
    """The Hermitian matrix whose upper or lower triangle is a's."""
    strict = np.triu(a, 1) if upper else np.tril(a, -1)
    diagonal = np.where(np.eye(a.shape[-1], dtype=bool), np.real(a), 0)
    return strict + adjoint(strict) + diagonal
