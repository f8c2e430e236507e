// A X = B given C with A = C C^H (lower) or C^H C: with M = C or C^H, lower triangular in either
// case, two sweeps of substitution, M Y = B and M^H X = Y.
#pragma once

#include "ffi/cuda/tile/substitution_launch.cuh"

namespace jax_batched::cuda {

template <class T>
Substitution<T> cho_solve_substitution(const ChoSolveProblem& p) {
  Substitution<T> s{};
  s.a = static_cast<const T*>(p.c);
  s.b = static_cast<const T*>(p.b);
  s.x = static_cast<T*>(p.x);
  s.batch = p.batch;
  s.nrhs = p.nrhs;
  s.n = static_cast<int>(p.n);
  s.unit_diagonal = false;
  s.a_map = p.c_map;
  s.b_map = p.b_map;
  const bool adjoint = !p.lower;
  s.first = lower_system(p.n, p.nrhs, /*left_side=*/true, p.lower, adjoint, adjoint);
  s.second = lower_system(p.n, p.nrhs, /*left_side=*/true, p.lower, !adjoint, !adjoint);
  return s;
}

}  // namespace jax_batched::cuda
