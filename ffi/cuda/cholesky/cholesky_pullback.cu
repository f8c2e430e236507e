// The CUDA launcher of cholesky_pullback for one element type, JAX_BATCHED_SCALAR.
#include "ffi/cuda/cholesky/cholesky_pullback.cuh"
#include "ffi/cuda/launch.h"

namespace jax_batched::cuda {
namespace {

template <class T, int kLanes, bool kWide = false>
cudaError_t launch_pullback(cudaStream_t stream, const CholeskyPullbackProblem& p) {
  using Kernel = PullbackKernel<T, kLanes, kWide>;
  return launch_kernel<cholesky_pullback_kernel<T, kLanes, kWide>>(
      stream, p.batch, Kernel::kMatrices, Kernel::threads(p.n), Kernel::shared_bytes(p.n), p);
}

}  // namespace

template <>
cudaError_t launch<JAX_BATCHED_SCALAR>(cudaStream_t stream, const CholeskyPullbackProblem& p) {
  using T = JAX_BATCHED_SCALAR;
  if (!p.kernel.empty() || p.n > pullback_max_n(kDTypeOf<T>)) return cudaErrorInvalidValue;
  if (p.n <= 8) return launch_pullback<T, 8>(stream, p);
  if (p.n <= 16) return launch_pullback<T, 16>(stream, p);
  if (p.n <= 32) return launch_pullback<T, 32>(stream, p);
  return launch_pullback<T, 32, true>(stream, p);
}

}  // namespace jax_batched::cuda
