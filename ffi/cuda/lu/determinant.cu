#include "ffi/cuda/lu/launch.cuh"

namespace jax_batched::cuda {

template <>
cudaError_t launch<JAX_BATCHED_SCALAR>(cudaStream_t stream, const DetProblem& p) {
  return launch_lu<JAX_BATCHED_SCALAR, kDeterminantTable>(stream, p);
}
template <>
cudaError_t launch<JAX_BATCHED_SCALAR>(cudaStream_t stream, const SlogdetProblem& p) {
  return launch_lu<JAX_BATCHED_SCALAR, kDeterminantTable>(stream, p);
}

}  // namespace jax_batched::cuda
