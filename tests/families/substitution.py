"""Triangular solves, and solves with a Cholesky factor."""

import itertools
from collections.abc import Callable

import numpy as np
from rows import Op, Solve, strict_triangle

import jax_batched as jb
from jax_batched._matrices import adjoint, triangular

_BOTH = (False, True)
# Of the 32 variants: every flag on and off.
_REDUCED = ("lower", "T-conj-unit", "left-lower-unit", "left-lower-T-conj", "left-conj")
_USUAL = ("left-lower", "conj")


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
    flags_on = "-".join(flag for flag, on in flags if on)
    return Op(
        name="-".join(filter(None, ("triangular_solve", flags_on))),
        operation="triangular_solve",
        function=jb.triangular_solve,
        options={
            "left_side": left,
            "lower": lower,
            "transpose_a": trans,
            "conjugate_a": conj,
            "unit_diagonal": unit,
        },
        kind=Solve(left),
        matrix=_triangle_matrix(lower, unit, trans, conj),
        make=triangular,
        degree=0 if unit else 1,
        unread=strict_triangle(upper=lower, diagonal=unit),
        reduced=flags_on in _REDUCED,
        usual=flags_on in _USUAL,
    )


def _solve_triangular(trans: int | str, lower: bool, unit: bool) -> Op:
    return Op(
        name=f"solve_triangular-{trans}-{'lower' if lower else 'upper'}{'-unit' if unit else ''}",
        operation="triangular_solve",
        function=jb.solve_triangular,
        options={"trans": trans, "lower": lower, "unit_diagonal": unit},
        kind=Solve(),
        matrix=_triangle_matrix(lower, unit, trans not in (0, "N"), trans in (2, "C")),
        make=triangular,
        degree=0 if unit else 1,
        unread=strict_triangle(upper=lower, diagonal=unit),
    )


def _cho_solve(lower: bool) -> Op:
    def matrix(c: np.ndarray) -> np.ndarray:
        factor = np.tril(c) if lower else adjoint(np.triu(c))
        return factor @ adjoint(factor)

    return Op(
        name=f"cho_solve-{'lower' if lower else 'upper'}",
        operation="cho_solve",
        function=lambda c, b, lower, **options: jb.cho_solve((c, lower), b, **options),
        options={"lower": lower},
        kind=Solve(),
        matrix=matrix,
        make=triangular,
        degree=2,
        unread=strict_triangle(upper=lower),
        reduced=True,
        usual=lower,
    )


ROWS = [
    *(_triangular_solve(*flags) for flags in itertools.product(_BOTH, repeat=5)),
    _solve_triangular(0, lower=True, unit=False),
    _solve_triangular("T", lower=False, unit=False),
    _solve_triangular(2, lower=True, unit=True),
    _solve_triangular("N", lower=False, unit=True),
    *(_cho_solve(lower) for lower in _BOTH),
]
SOLVERS = {
    "triangular_solve": lambda a, b: jb.triangular_solve(a, b, left_side=True),
    "solve_triangular": jb.solve_triangular,
    "cho_solve": lambda a, b: jb.cho_solve((a, True), b),
}
SQUARE = {
    "triangular_solve": lambda a: jb.triangular_solve(a, np.ones(a.shape[-1])),
    "solve_triangular": lambda a: jb.solve_triangular(a, np.ones(a.shape[-1])),
    "cho_solve": lambda a: jb.cho_solve((a, True), np.ones(a.shape[-1])),
}
