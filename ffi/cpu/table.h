// The fast kernels, compiled once per instruction set with JAX_BATCHED_ISA naming it. All templates
// live in a namespace of that name, so that the linker cannot mix code of two instruction sets.
#pragma once

#include "ffi/cpu/kernels.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

void cholesky(const CholeskyProblem& p, int64_t begin, int64_t end, void* scratch);
void triangular_solve(const TriangularSolveProblem& p, int64_t begin, int64_t end, void* scratch);
void cho_solve(const ChoSolveProblem& p, int64_t begin, int64_t end, void* scratch);
void solve_pos(const SolvePosProblem& p, int64_t begin, int64_t end, void* scratch);
void residual(const ResidualProblem& p, int64_t begin, int64_t end, void* scratch);

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
