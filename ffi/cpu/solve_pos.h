#pragma once

#include "ffi/cpu/cholesky.h"
#include "ffi/cpu/substitution.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

// Factor in scratch, then both substitutions; the factor never leaves the cache.
template <class T>
void solve_pos(const SolvePosProblem& p, int64_t begin, int64_t end, void* scratch) {
  T* u = static_cast<T*>(scratch);
  T* y = u + p.n * p.n;
  for (int64_t m = begin; m < end; ++m) {
    T* x = static_cast<T*>(p.x) + m * p.n * p.nrhs;
    load_upper(static_cast<const T*>(p.a) + p.a_map(m) * p.n * p.n, p.n, !p.lower, false, u);
    p.info[m] = factor_upper(u, p.n);
    if (p.info[m] != 0) {
      for (int64_t i = 0; i < p.n * p.nrhs; ++i) x[i] = quiet_nan<T>();
    } else {
      const T* b = static_cast<const T*>(p.b) + p.b_map(m) * p.n * p.nrhs;
      solve_with_factor<T>(u, false, p.n, p.nrhs, b, x, y);
    }
  }
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
