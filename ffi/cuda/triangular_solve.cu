// The CUDA launcher of triangular_solve for one element type, JAX_BATCHED_SCALAR.
#include "ffi/cuda/triangular_solve.h"

#include "ffi/cuda/triangular_solve.cuh"

namespace jax_batched::cuda {

template cudaError_t launch_sweeps_substitution<JAX_BATCHED_SCALAR>(
    cudaStream_t, const Substitution<JAX_BATCHED_SCALAR>&, int, std::string_view);

template <class T>
cudaError_t triangular_solve(cudaStream_t stream, const TriangularSolveProblem& problem) {
  if (problem.n > kSubstitutionMaxN) return cudaErrorInvalidValue;
  return launch_substitution<T, /*kSweeps=*/1>(stream, triangular_solve_substitution<T>(problem),
                                               problem.kernel);
}

template cudaError_t triangular_solve<JAX_BATCHED_SCALAR>(cudaStream_t,
                                                          const TriangularSolveProblem&);

}  // namespace jax_batched::cuda
