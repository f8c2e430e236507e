"""The parts of `refined_solve`, one subject a module.

- ``scaling``: powers of two that bring sizes near 1, and rounding to the low precision.
- ``factor``: a factor of each matrix in the low precision, and solves with it.
- ``system``: what is solved, its residual and its backward error.
- ``loop``: refinement, one correction of each right-hand side a step.
- ``gmres``: the correction of method "gmres".
- ``rescue``: the direct solve of what did not converge.
- ``operations``: the two primitives made of these, and their derivatives.
"""
