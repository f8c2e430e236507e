#include "ffi/cpu/simd.h"
#include "ffi/cpu/table.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

extern const Kernels table;
const Kernels table = {kVectorBytes, cholesky, triangular_solve, cho_solve, solve_pos, residual};

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
