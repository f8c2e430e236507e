// The CPU kernels as the handlers see them: one table per instruction set.
#pragma once

#include "ffi/common/problem.h"

namespace jax_batched::cpu {

// Works on the matrices begin <= i < end of a problem. `scratch` is 64-byte aligned memory of
// scratch_elements(problem) elements that no other task uses.
template <class Problem>
using Kernel = void (*)(const Problem& problem, int64_t begin, int64_t end, void* scratch);

struct Kernels {
  Kernel<CholeskyProblem> cholesky;
  Kernel<TriangularSolveProblem> triangular_solve;
  Kernel<ChoSolveProblem> cho_solve;
  Kernel<SolvePosProblem> solve_pos;
  Kernel<ResidualProblem> residual;
};

// The best table that this processor runs, chosen once; JAX_BATCHED_ISA names another.
const Kernels& kernels();
// The plain kernels of reference.h.
const Kernels& reference_kernels();
// Name of the instruction set behind kernels().
const char* isa_name();

// Right-hand sides are packed with rows of a multiple of this many elements (a cache line), so that
// the inner loops have a fixed length.
template <class T>
inline constexpr int64_t kColumns = 64 / sizeof(T);

template <class T>
int64_t packed_columns(int64_t nrhs) {
  return nrhs == 1 ? 1 : (nrhs + kColumns<T> - 1) / kColumns<T> * kColumns<T>;
}

// Scratch of one task, counted for the narrowest element, whose rows have the most padding.
inline int64_t scratch_elements(const CholeskyProblem& p) { return p.n * p.n; }
inline int64_t scratch_elements(const TriangularSolveProblem& p) {
  return p.n * packed_columns<float>(p.nrhs);
}
inline int64_t scratch_elements(const ChoSolveProblem& p) {
  return p.n * packed_columns<float>(p.nrhs);
}
inline int64_t scratch_elements(const SolvePosProblem& p) {
  return p.n * p.n + p.n * packed_columns<float>(p.nrhs);
}
inline int64_t scratch_elements(const ResidualProblem& p) { return p.m + 2 * p.n; }

}  // namespace jax_batched::cpu
