#pragma once

#include "ffi/cpu/substitution.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class T>
void triangular_solve(const TriangularSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
  T* y = static_cast<T*>(scratch);
  const int64_t width = packed_columns<T>(p.nrhs);
  const LowerSystem s = lower_system(p.n, p.nrhs, p.left_side, p.lower, p.transpose, p.conjugate);
  for (int64_t m = begin; m < end; ++m) {
    pack(s, p.n, p.nrhs, static_cast<const T*>(p.b) + p.b_map(m) * p.n * p.nrhs, width, y);
    substitute(s, static_cast<const T*>(p.a) + p.a_map(m) * p.n * p.n, p.n, p.unit_diagonal, width,
               y);
    unpack(s, p.n, p.nrhs, y, width, static_cast<T*>(p.x) + m * p.n * p.nrhs);
  }
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
