// op(A) X = B or X op(A) = B: one sweep of substitution on the lower triangular view of A.
#pragma once

#include "ffi/cuda/tile/substitution_launch.cuh"

namespace jax_batched::cuda {

template <class T>
Substitution<T> triangular_solve_substitution(const TriangularSolveProblem& p) {
  Substitution<T> s{};
  s.a = static_cast<const T*>(p.a);
  s.b = static_cast<const T*>(p.b);
  s.x = static_cast<T*>(p.x);
  s.batch = p.batch;
  s.nrhs = p.nrhs;
  s.n = static_cast<int>(p.n);
  s.unit_diagonal = p.unit_diagonal;
  s.a_map = p.a_map;
  s.b_map = p.b_map;
  s.first = lower_system(p.n, p.nrhs, p.left_side, p.lower, p.transpose, p.conjugate);
  return s;
}

}  // namespace jax_batched::cuda
