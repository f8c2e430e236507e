#include "ffi/cpu/triangular_solve.h"

#include "ffi/cpu/choice.h"
#include "ffi/cpu/table.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

void triangular_solve(const TriangularSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    run<T>(triangular_solve_lanes<T>, triangular_solve_blocked<T>, p, begin, end, scratch);
  });
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
