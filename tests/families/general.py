"""Solves of general systems by JAX's own LU, and refined solves, made of other operations."""

import functools
from typing import Any

import numpy as np
from rows import Op, Solve, hermitian_from, strict_triangle

import jax_batched as jb
from jax_batched._matrices import general, spd


def _refined_solve(name: str, method: str, *, usual: bool = False, **options: Any) -> Op:
    lower = bool(options.get("lower"))
    if options.get("assume_a") == "gen":
        system = {"matrix": lambda a: a, "make": general}
    else:
        system = {
            "matrix": functools.partial(hermitian_from, upper=not lower),
            "make": spd,
            "unread": strict_triangle(upper=lower),
            "real_diagonal": True,
        }
    return Op(
        name=f"refined_solve-{name}",
        operation="refined_solve",
        function=lambda a, b, **options: jb.refined_solve(a, b, **options)[0],
        options={"method": method, **options},
        kind=Solve(),
        kernels=False,
        composite=True,
        usual=usual,
        **system,
    )


ROWS = [
    Op(
        name="solve_gen",
        operation="solve_gen",
        function=jb.solve,
        options={"assume_a": "gen"},
        kind=Solve(),
        matrix=lambda a: a,
        make=general,
        has_info=True,
        kernels=False,
        reduced=True,
    ),
    _refined_solve("lower", "ir", lower=True, usual=True),
    _refined_solve("upper-gmres", "gmres"),
    _refined_solve("gen", "ir", assume_a="gen"),
]
SOLVERS = {"solve": jb.solve, "refined_solve": lambda a, b: jb.refined_solve(a, b)[0]}
SQUARE = {"solve": lambda a: jb.solve(a, np.ones(a.shape[-1]))}
