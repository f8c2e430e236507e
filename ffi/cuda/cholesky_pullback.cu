// The CUDA launcher of cholesky_pullback for one element type, JAX_BATCHED_SCALAR.
#include "ffi/cuda/cholesky_pullback.cuh"

namespace jax_batched::cuda {
namespace {

template <class T, int kLanes, bool kWide = false>
cudaError_t launch_pullback(cudaStream_t stream, const CholeskyPullback<T>& p) {
  using Kernel = PullbackKernel<T, kLanes, kWide>;
  return launch<cholesky_pullback_kernel<T, kLanes, kWide>>(
      stream, p.batch, Kernel::kMatrices, Kernel::threads(p.n), Kernel::shared_bytes(p.n), p);
}

}  // namespace

template <class T>
cudaError_t cholesky_pullback(cudaStream_t stream, const CholeskyPullbackProblem& problem) {
  if (!problem.kernel.empty() || problem.n > kPullbackMaxN<T>) return cudaErrorInvalidValue;
  CholeskyPullback<T> p{};
  p.factor = static_cast<const T*>(problem.factor);
  p.cotangent = static_cast<const T*>(problem.cotangent);
  p.result = static_cast<T*>(problem.result);
  p.batch = problem.batch;
  p.n = static_cast<int>(problem.n);
  p.upper = problem.upper;
  p.symmetrize = problem.symmetrize;
  p.factor_map = problem.factor_map;
  p.cotangent_map = problem.cotangent_map;
  if (p.n <= 8) return launch_pullback<T, 8>(stream, p);
  if (p.n <= 16) return launch_pullback<T, 16>(stream, p);
  if (p.n <= 32) return launch_pullback<T, 32>(stream, p);
  return launch_pullback<T, 32, true>(stream, p);
}

template cudaError_t cholesky_pullback<JAX_BATCHED_SCALAR>(cudaStream_t,
                                                           const CholeskyPullbackProblem&);

}  // namespace jax_batched::cuda
