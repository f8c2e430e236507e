#include "ffi/cuda/eigh/launch.cuh"

namespace jax_batched::cuda {

template <>
cudaError_t launch<JAX_BATCHED_SCALAR>(cudaStream_t stream, const EighProblem& p) {
  const Call call{.operation = EighProblem::kName, .dtype = kDTypeOf<JAX_BATCHED_SCALAR>, .n = p.n};
  return launch_row<JAX_BATCHED_SCALAR>(call, p.kernel,
                                        EighLauncher<JAX_BATCHED_SCALAR>{stream, p});
}

}  // namespace jax_batched::cuda
