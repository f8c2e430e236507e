"""Solvers for lineax on the kernels of this library; needs the package lineax.

Imported on demand alone:

    pip install "jax_batched[lineax]"

    import jax_batched.lineax
    lineax.linear_solve(operator, vector, solver=jax_batched.lineax.Cholesky())
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jax import Array
from jax.flatten_util import ravel_pytree

from jax_batched import _checks
from jax_batched.cho_solve import cho_solve
from jax_batched.cholesky import cholesky
from jax_batched.lstsq import apply_pseudoinverse, factors_of
from jax_batched.lu import lu_factor, lu_solve

__all__ = ["LU", "QR", "Cholesky"]


class _State(eqx.Module):  # type: ignore[misc, unused-ignore]
    """U with ``± a = U^H U``, and the sign."""

    factor: Array
    negative: bool = eqx.field(static=True)


class Cholesky(lx.AbstractLinearSolver[_State]):  # type: ignore[misc, unused-ignore]
    """Cholesky solver of lineax for definite operators.

    Takes the place of `lineax.Cholesky`: the operator must be square and tagged positive or
    negative semidefinite, and be definite in fact. Under `vmap` the systems are one batched
    factorization and one batched solve, in one kernel each; right-hand sides mapped over one
    operator are columns of one solve.

    Attributes:
      accuracy: as in `jax_batched.cholesky`.

    Raises:
      ValueError: the operator is not tagged as semidefinite, or not square.
      TypeError: it has a dtype that `jax_batched.cholesky` does not take.

    A system whose matrix is not definite has a solution of NaN, which lineax reports; no other one
    of the batch is affected.
    """

    accuracy: str = "ieee"

    def init(self, operator: lx.AbstractLinearOperator, options: dict[str, Any]) -> _State:
        """The factor of the operator's matrix, of which the upper triangle is read."""
        del options
        negative = lx.is_negative_semidefinite(operator)
        if not (negative or lx.is_positive_semidefinite(operator)):
            raise ValueError(
                "jax_batched.lineax.Cholesky: the operator must be tagged positive or negative "
                "semidefinite"
            )
        matrix = operator.as_matrix()
        if matrix.shape[0] != matrix.shape[1]:
            raise ValueError(
                "jax_batched.lineax.Cholesky: the operator must be square, got shape "
                f"{matrix.shape}"
            )
        factor = cholesky(
            -matrix if negative else matrix,
            upper=True,
            symmetrize_input=False,
            accuracy=self.accuracy,
        )
        return _State(factor, negative)

    def compute(
        self, state: _State, vector: Any, options: dict[str, Any]
    ) -> tuple[Any, lx.RESULTS, dict[str, Any]]:
        """The solution, in the structure of the vector."""
        del options
        flat, unravel = ravel_pytree(vector)
        solution = cho_solve((state.factor, False), flat)
        return unravel(-solution if state.negative else solution), lx.RESULTS.successful, {}

    def transpose(self, state: _State, options: dict[str, Any]) -> tuple[_State, dict[str, Any]]:
        """The matrix is Hermitian: its transpose is its conjugate."""
        return self.conj(state, options)

    def conj(self, state: _State, options: dict[str, Any]) -> tuple[_State, dict[str, Any]]:
        """The factor of the conjugate is the conjugate of the factor."""
        return _State(state.factor.conj(), state.negative), options

    def assume_full_rank(self) -> bool:
        """A definite matrix has full rank."""
        return True


class _Factors(eqx.Module):  # type: ignore[misc, unused-ignore]
    """The factorization of a matrix, and how it is applied: as `trans` of `jax_batched.lu_solve`,
    and conjugated."""

    lu: Array
    pivots: Array
    trans: int = eqx.field(static=True)
    conjugate: bool = eqx.field(static=True)


class LU(lx.AbstractLinearSolver[_Factors]):  # type: ignore[misc, unused-ignore]
    """LU solver of lineax for square nonsingular operators.

    Takes the place of `lineax.LU`. Under `vmap` the systems are one batched factorization and one
    batched solve; right-hand sides mapped over one operator are columns of one solve.

    Raises:
      ValueError: the operator is not square.
      TypeError: it has a dtype that `jax_batched.lu` does not take.
    """

    def init(self, operator: lx.AbstractLinearOperator, options: dict[str, Any]) -> _Factors:
        """The factorization of the operator's matrix."""
        del options
        matrix = operator.as_matrix()
        if matrix.shape[0] != matrix.shape[1]:
            raise ValueError(
                f"jax_batched.lineax.LU: the operator must be square, got shape {matrix.shape}"
            )
        return _Factors(*lu_factor(matrix), trans=0, conjugate=False)

    def compute(
        self, state: _Factors, vector: Any, options: dict[str, Any]
    ) -> tuple[Any, lx.RESULTS, dict[str, Any]]:
        """The solution, in the structure of the vector."""
        del options
        flat, unravel = ravel_pytree(vector)
        rhs = flat.conj() if state.conjugate else flat
        x = lu_solve((state.lu, state.pivots), rhs, state.trans)
        return unravel(x.conj() if state.conjugate else x), lx.RESULTS.successful, {}

    def transpose(
        self, state: _Factors, options: dict[str, Any]
    ) -> tuple[_Factors, dict[str, Any]]:
        """The same factors, applied transposed."""
        return _Factors(state.lu, state.pivots, 1 - state.trans, state.conjugate), options

    def conj(self, state: _Factors, options: dict[str, Any]) -> tuple[_Factors, dict[str, Any]]:
        """The same factors, applied to conjugates."""
        return _Factors(state.lu, state.pivots, state.trans, not state.conjugate), options

    def assume_full_rank(self) -> bool:
        """A matrix that has a factorization with nonzero pivots has full rank."""
        return True


class _Structure(eqx.Module):  # type: ignore[misc, unused-ignore]
    """Of what an operator takes or gives, flattened: its leaves are data that can be hashed."""

    tree: Any = eqx.field(static=True)
    leaves: tuple[Any, ...] = eqx.field(static=True)

    @classmethod
    def of(cls, structure: Any) -> "_Structure":
        leaves, tree = jax.tree.flatten(structure)
        return cls(tree, tuple(leaves))

    def unravel(self, flat: Array) -> Any:
        zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.leaves]
        return ravel_pytree(jax.tree.unflatten(self.tree, zeros))[1](flat)


class _Orthogonal(eqx.Module):  # type: ignore[misc, unused-ignore]
    """The QR factorization of a matrix with at least as many rows as columns, or if `wide` of the
    transpose, as `jax_batched.lstsq` has it; and the structures of solutions and right-hand sides.
    """

    factors: tuple[Array, Array]
    solution: _Structure
    vector: _Structure
    wide: bool = eqx.field(static=True)


class QR(lx.AbstractLinearSolver[_Orthogonal]):  # type: ignore[misc, unused-ignore]
    """QR solver of lineax for operators of full rank, square or not.

    Takes the place of `lineax.QR`: least squares where there are more rows than columns, the
    solution of the smallest norm where there are fewer. Q is formed only of more than 512 rows.
    Under `vmap` the systems are one batched factorization, and right-hand sides mapped over one
    operator are columns.

    Raises:
      TypeError: the operator has a dtype that `jax_batched.qr` does not take.
    """

    def init(self, operator: lx.AbstractLinearOperator, options: dict[str, Any]) -> _Orthogonal:
        """The factorization of the operator's matrix, or of its transpose."""
        del options
        matrix = operator.as_matrix()
        wide = matrix.shape[0] < matrix.shape[1]
        (tall,), dtype = _checks.operands("lineax.QR", matrix=matrix.T if wide else matrix)
        left, right = factors_of(tall)
        solution = _Structure.of(operator.in_structure())
        vector = _Structure.of(operator.out_structure())
        return _Orthogonal((left.astype(dtype), right.astype(dtype)), solution, vector, wide)

    def compute(
        self, state: _Orthogonal, vector: Any, options: dict[str, Any]
    ) -> tuple[Any, lx.RESULTS, dict[str, Any]]:
        """The solution: R^-1 Q^H b, or conj(Q) R^-T b of the transpose's factors."""
        del options
        flat, _ = ravel_pytree(vector)
        left, right = state.factors
        (left, right, b), dtype = _checks.operands("lineax.QR", left=left, right=right, vector=flat)
        # Of the transpose's P, conj(P^H conj(b)). The matrix itself is for derivatives alone, which
        # are lineax' own: anything of its shape stands for it.
        rhs = (b.conj() if state.wide else b)[:, None]
        x = apply_pseudoinverse(left, (left, right), rhs, adjoint=state.wide)[:, 0]
        x = (x.conj() if state.wide else x).astype(dtype)
        return state.solution.unravel(x), lx.RESULTS.successful, {}

    def transpose(
        self, state: _Orthogonal, options: dict[str, Any]
    ) -> tuple[_Orthogonal, dict[str, Any]]:
        """The same factors, of a matrix that is the transpose."""
        return _Orthogonal(state.factors, state.vector, state.solution, not state.wide), options

    def conj(
        self, state: _Orthogonal, options: dict[str, Any]
    ) -> tuple[_Orthogonal, dict[str, Any]]:
        """The conjugate's factors are the conjugates."""
        left, right = state.factors
        return _Orthogonal(
            (left.conj(), right.conj()), state.solution, state.vector, state.wide
        ), options

    def assume_full_rank(self) -> bool:
        """It is for matrices of full rank."""
        return True
