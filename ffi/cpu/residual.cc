#include "ffi/cpu/residual.h"

#include "ffi/cpu/table.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

void residual(const ResidualProblem& p, int64_t begin, int64_t end, void* scratch) {
  with_element_type(p.dtype,
                    [&](auto t) { residual_columns<decltype(t)>(p, begin, end, scratch); });
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
