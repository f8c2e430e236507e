// The CUDA launcher of cho_solve for one element type, JAX_BATCHED_SCALAR.
#include "ffi/cuda/launch.h"
#include "ffi/cuda/substitution/launch.cuh"

namespace jax_batched::cuda {

// Compiled with triangular_solve: their kernels take the number of sweeps as an argument.
extern template cudaError_t launch_sweeps_substitution(cudaStream_t,
                                                       const Substitution<JAX_BATCHED_SCALAR>&, int,
                                                       std::string_view);

template <>
cudaError_t launch<JAX_BATCHED_SCALAR>(cudaStream_t stream, const ChoSolveProblem& problem) {
  return launch_substitution<JAX_BATCHED_SCALAR>(stream, problem);
}

}  // namespace jax_batched::cuda
