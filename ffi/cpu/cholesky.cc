#include "ffi/cpu/cholesky.h"

#include "ffi/cpu/choice.h"
#include "ffi/cpu/table.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

void cholesky(const CholeskyProblem& p, int64_t begin, int64_t end, void* scratch) {
  with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    run<T>(cholesky_lanes<T>, cholesky_blocked<T>, p, begin, end, scratch);
  });
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
