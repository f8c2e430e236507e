#include "ffi/cuda/qr/launch.cuh"

namespace jax_batched::cuda {

template <>
cudaError_t launch<JAX_BATCHED_SCALAR>(cudaStream_t stream, const HouseholderProductProblem& p) {
  return launch_qr<JAX_BATCHED_SCALAR, kQrProductTable>(stream, p);
}

}  // namespace jax_batched::cuda
