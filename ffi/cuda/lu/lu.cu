#include "ffi/cuda/lu/launch.cuh"

namespace jax_batched::cuda {

template <>
cudaError_t launch<JAX_BATCHED_SCALAR>(cudaStream_t stream, const LuProblem& p) {
  return launch_lu<JAX_BATCHED_SCALAR, kLuTable>(stream, p);
}

}  // namespace jax_batched::cuda
