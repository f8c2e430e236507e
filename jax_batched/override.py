"""JAX's own linear algebra on the kernels of this library."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import jax

from jax_batched._core import Operation, Params
from jax_batched._core.overriding import override_lowering
from jax_batched.cholesky import cholesky_op
from jax_batched.eigh import CLUSTER_TOL, eigh_op
from jax_batched.lu import lu_op
from jax_batched.qr import householder_product_op, qr_multiply_op, qr_op
from jax_batched.svd import svd_op
from jax_batched.triangular_solve import triangular_solve_op


class _Row(NamedTuple):
    """One of JAX's primitives, the operation that it becomes, and that one's parameters.

    None for parameters: the call stays JAX's.
    """

    primitive: Any
    operation: Operation
    adapt: Callable[[Params], Params | None]


def _qr(params: Params) -> Params | None:
    if params["pivoting"]:
        return None
    return {"mode": "complete" if params["full_matrices"] else "reduced"}


def _eigh(params: Params) -> Params | None:
    if params.get("subset_by_index") is not None or _names_another(params):
        return None
    return {
        "lower": params["lower"], "symmetrize": False, "vectors": True, "cluster_tol": CLUSTER_TOL,
    }  # fmt: skip


def _svd(params: Params) -> Params | None:
    if params.get("subset_by_index") is not None or _names_another(params):
        return None
    full, vectors = params["full_matrices"], params["compute_uv"]
    return {"full_matrices": full, "vectors": vectors, "cluster_tol": CLUSTER_TOL}


def _names_another(params: Params) -> bool:
    """Whether the caller chose one of JAX's algorithms."""
    return params.get("algorithm") is not None or params.get("implementation") is not None


# `cholesky_p` reads the lower triangle; JAX symmetrises before it and clears the upper one after.
_TABLE = (
    _Row(
        jax.lax.linalg.cholesky_p,
        cholesky_op,
        lambda params: {"upper": False, "symmetrize": False, "accuracy": "ieee"},
    ),
    _Row(jax.lax.linalg.triangular_solve_p, triangular_solve_op, lambda params: params),
    _Row(jax.lax.linalg.lu_p, lu_op, lambda params: {}),
    _Row(jax.lax.linalg.qr_p, qr_op, _qr),
    _Row(jax.lax.linalg.householder_product_p, householder_product_op, lambda params: {}),
    _Row(
        jax.lax.linalg.ormqr_p,
        qr_multiply_op,
        lambda params: {"adjoint": params["transpose"]} if params["left"] else None,
    ),
    _Row(jax.lax.linalg.eigh_p, eigh_op, _eigh),
    _Row(jax.lax.linalg.svd_p, svd_op, _svd),
)

_lock = threading.Lock()
_active = 0
_undo: list[Callable[[], None]] = []


class LinalgOverride:
    """An override in force, until it is left as a context or its `undo` is called."""

    def __init__(self) -> None:
        global _active
        self._ended = False
        with _lock:
            if _active == 0:
                _undo.extend(override_lowering(*row) for row in _TABLE)
            _active += 1

    def undo(self) -> None:
        """Ends this override, once; the last of several restores the former lowerings."""
        global _active
        with _lock:
            if self._ended:
                return
            self._ended = True
            _active -= 1
            if _active == 0:
                while _undo:
                    _undo.pop()()

    def __enter__(self) -> "LinalgOverride":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


def override_jax_linalg() -> LinalgOverride:
    """Makes JAX's own `cholesky`, `triangular_solve`, `lu`, `qr`, `eigh` and `svd` use our kernels.

    These primitives of `jax.lax.linalg`, `householder_product` and `ormqr` are lowered to our
    kernels on CPU and CUDA, so that `jnp.linalg.{cholesky, solve, inv, det, slogdet, qr, eigh,
    eigvalsh, svd, pinv, matrix_rank, lstsq}`, their namesakes in `jax.scipy.linalg`, its
    `cho_factor`, `cho_solve`, `lu_factor`, `lu_solve`, `solve_triangular` and every library and
    program that calls them run on them without a change of theirs:

        jax_batched.override_jax_linalg()  # from here on, for the whole process

        with jax_batched.override_jax_linalg():  # or for what is compiled in here
            ...

    Everything but the kernel stays JAX's: the signatures, checks, symmetrising, gradients, batching
    and the NaN of a factorization that fails. What has no kernel (float16 and bfloat16, n = 0,
    symbolic n, other platforms, most calls beyond n = 512) keeps JAX's lowering. So do `qr` with
    pivoting or with ``mode="raw"``, `ormqr` from the right, `eigh` and `svd` of more than 64 rows
    and columns, of some values only or by an algorithm that the caller names. Results round
    differently; subnormal numbers are kept where JAX's CPU routines flush them to zero; and a NaN
    in a matrix makes its whole factor NaN, where some LAPACKs leave the columns before it.

    The override acts when a program is lowered, in all threads. What JAX already compiled or
    lowered keeps what it has, on both sides: a function that ran before is not sped up, and one
    that was compiled inside the context keeps the kernels after it. That includes single calls
    outside `jit`, which JAX compiles and remembers by shape and dtype. `jax.clear_caches()` makes
    JAX forget all of them.

    To export a program inside the override, tell `jax.export` that it may hold our kernels:

        with jax_batched.override_jax_linalg():
            exported = jax.export.export(
                jax.jit(f), disabled_checks=jax_batched.export_disabled_checks()
            )(*shapes)

    Otherwise it says "Cannot serialize code with custom calls whose targets have no compatibility
    guarantees". A process that runs the program must import jax_batched, and needs no override.

    Returns:
      A `LinalgOverride`. Leaving it as a context, or calling its `undo()`, ends the override.
      Several may be active, and end in any order; when the last one does, the former lowerings are
      back.
    """
    return LinalgOverride()
