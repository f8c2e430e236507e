// The CUDA launcher of cho_solve for one element type, JAX_BATCHED_SCALAR.
#include "ffi/cuda/cho_solve.h"

#include "ffi/cuda/cho_solve.cuh"

namespace jax_batched::cuda {

// Compiled with triangular_solve: their kernels take the number of sweeps as an argument.
extern template cudaError_t launch_sweeps_substitution<JAX_BATCHED_SCALAR>(
    cudaStream_t, const Substitution<JAX_BATCHED_SCALAR>&, int, std::string_view);

template <class T>
cudaError_t cho_solve(cudaStream_t stream, const ChoSolveProblem& problem) {
  if (problem.n > kSubstitutionMaxN) return cudaErrorInvalidValue;
  return launch_substitution<T, /*kSweeps=*/2>(stream, cho_solve_substitution<T>(problem),
                                               problem.kernel);
}

template cudaError_t cho_solve<JAX_BATCHED_SCALAR>(cudaStream_t, const ChoSolveProblem&);

}  // namespace jax_batched::cuda
