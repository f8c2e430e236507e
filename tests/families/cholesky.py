"""Cholesky factorizations, and positive definite solves, which factor and substitute at once."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np
from rows import STORED, Kind, Op, Solve, hermitian_from, strict_triangle

import jax_batched as jb
from jax_batched._matrices import adjoint, cholesky_ratio, spd, wide

_BOTH = (False, True)

# What CUDA kernels serve, in numbers of its own: where the library has others, test_limits says so,
# and no test takes a wrong number for the range to test. Up to which n, with how many right-hand
# sides (None: any number), a positive definite solve is one kernel.
FUSED: dict[str, tuple[tuple[int, int | None], ...]] = {
    "float32": ((96, None), (128, 1)),
    "float64": ((64, None), (144, 16)),
    "complex64": ((64, None), (96, 1)),
    "complex128": ((48, None), (64, 1)),
}
STORED_MAX_N = {"cholesky": 96, "solve_pos": 48}
# Up to which n the derivative's pullback is one kernel.
PULLBACK_MAX_N = {
    "cpu": {"float32": 96, "float64": 128, "complex64": 128, "complex128": 128},
    "cuda": {"float32": 192, "float64": 128, "complex64": 128, "complex128": 80},
}


@dataclasses.dataclass(frozen=True)
class Factor(Kind):
    """L with M = L L^H, or U with M = U^H U."""

    upper: bool

    def reference(self, m: np.ndarray, *b: np.ndarray) -> np.ndarray:
        factor = np.linalg.cholesky(m)
        return adjoint(factor) if self.upper else factor

    def ratios(self, eps: float, m: np.ndarray, x: np.ndarray, *b: np.ndarray) -> np.ndarray:
        return cholesky_ratio(eps, m, adjoint(x) if self.upper else x)

    def check_structure(self, x: np.ndarray) -> None:
        other = np.tril(x, -1) if self.upper else np.triu(x, 1)
        assert not other.any(), "the other triangle of a factor must be zero"
        diagonal = np.diagonal(x, axis1=-2, axis2=-1)
        assert not np.imag(diagonal).any(), "the diagonal of a factor must be real"
        assert (wide(np.real(diagonal)) > 0).all()

    def failed(self, shape: Sequence[int]) -> np.ndarray:
        ones = np.ones(shape, bool)
        return np.triu(ones) if self.upper else np.tril(ones)

    def scale(self, m: float, b: float) -> float:
        return m**0.5

    def unscaled(self, x: np.ndarray, d: np.ndarray) -> np.ndarray:
        return x / (d if self.upper else d[:, None])


def hermitian_mean(a: np.ndarray) -> np.ndarray:
    """(a + a^H) / 2 without the imaginary part of a's diagonal."""
    a = np.where(np.eye(a.shape[-1], dtype=bool), np.real(a), a)
    return (a + adjoint(a)) / 2


def _cholesky(upper: bool, symmetrize: bool) -> Op:
    read = {} if symmetrize else {"unread": strict_triangle(upper=not upper)}
    return Op(
        name=f"cholesky-{'upper' if upper else 'lower'}-{'mean' if symmetrize else 'triangle'}",
        operation="cholesky",
        function=jb.cholesky,
        options={"upper": upper, "symmetrize_input": symmetrize},
        kind=Factor(upper),
        matrix=hermitian_mean if symmetrize else functools.partial(hermitian_from, upper=upper),
        make=spd,
        real_diagonal=True,
        can_fail=True,
        has_info=True,
        stored_max_n=STORED_MAX_N["cholesky"],
        reduced=True,
        usual=upper != symmetrize,
        **read,
    )


def is_fused(dtype: str, n: int, nrhs: int) -> bool:
    """Whether a positive definite solve is one kernel on CUDA."""
    if dtype in STORED:
        return n <= STORED_MAX_N["solve_pos"] and nrhs == 1
    return any(n <= largest and (most is None or nrhs <= most) for largest, most in FUSED[dtype])


def _solve_pos(lower: bool) -> Op:
    def calls(dtype: str, n: int, nrhs: int) -> set[str]:
        return {"solve_pos"} if is_fused(dtype, n, nrhs) else {"cholesky", "cho_solve"}

    return Op(
        name=f"solve_pos-{'lower' if lower else 'upper'}",
        operation="solve_pos",
        function=jb.solve,
        options={"assume_a": "pos", "lower": lower},
        kind=Solve(),
        matrix=functools.partial(hermitian_from, upper=not lower),
        make=spd,
        unread=strict_triangle(upper=lower),
        real_diagonal=True,
        can_fail=True,
        has_info=True,
        stored_max_n=STORED_MAX_N["solve_pos"],
        calls=calls,
        paths=("lax", "composed"),
        reduced=True,
        usual=lower,
    )


ROWS = [
    *(_cholesky(*flags) for flags in itertools.product(_BOTH, _BOTH)),
    *(_solve_pos(lower) for lower in _BOTH),
]
SQUARE = {"cholesky": jb.cholesky, "cho_factor": jb.cho_factor}
