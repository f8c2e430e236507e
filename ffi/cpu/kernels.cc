// The fast kernels, compiled once per instruction set with JAX_BATCHED_ISA naming it. All templates
// live in a namespace of that name, so that the linker cannot mix code of two instruction sets.
#include "ffi/cpu/cho_solve.h"
#include "ffi/cpu/cholesky.h"
#include "ffi/cpu/residual.h"
#include "ffi/cpu/solve_pos.h"
#include "ffi/cpu/triangular_solve.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

extern const Kernels table;
const Kernels table = {
    [](const CholeskyProblem& p, int64_t begin, int64_t end, void* scratch) {
      with_element_type(p.dtype, [&](auto t) { cholesky<decltype(t)>(p, begin, end, scratch); });
    },
    [](const TriangularSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
      with_element_type(p.dtype,
                        [&](auto t) { triangular_solve<decltype(t)>(p, begin, end, scratch); });
    },
    [](const ChoSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
      with_element_type(p.dtype, [&](auto t) { cho_solve<decltype(t)>(p, begin, end, scratch); });
    },
    [](const SolvePosProblem& p, int64_t begin, int64_t end, void* scratch) {
      with_element_type(p.dtype, [&](auto t) { solve_pos<decltype(t)>(p, begin, end, scratch); });
    },
    [](const ResidualProblem& p, int64_t begin, int64_t end, void* scratch) {
      with_element_type(p.dtype, [&](auto t) { residual<decltype(t)>(p, begin, end, scratch); });
    },
};

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
