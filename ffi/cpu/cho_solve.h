#pragma once

#include "ffi/cpu/substitution.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class T>
void cho_solve(const ChoSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
  for (int64_t m = begin; m < end; ++m) {
    solve_with_factor(static_cast<const T*>(p.c) + p.c_map(m) * p.n * p.n, p.lower, p.n, p.nrhs,
                      static_cast<const T*>(p.b) + p.b_map(m) * p.n * p.nrhs,
                      static_cast<T*>(p.x) + m * p.n * p.nrhs, static_cast<T*>(scratch));
  }
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
