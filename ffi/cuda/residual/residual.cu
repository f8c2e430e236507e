// The CUDA launcher of residual for one element type, JAX_BATCHED_SCALAR.
#include "ffi/cuda/launch.h"
#include "ffi/cuda/residual/residual.cuh"

namespace jax_batched::cuda {
namespace {

template <class T, int kLanes>
cudaError_t launch_rows(cudaStream_t stream, const ResidualProblem& p) {
  return launch_kernel<residual_rows<T, kLanes>>(stream, p.batch * p.m, kResidualThreads / kLanes,
                                                 kResidualThreads, 0, p);
}

template <class T, int kLanes, int kChunks, int kWarps>
cudaError_t launch_hermitian(cudaStream_t stream, const ResidualProblem& p) {
  using Kernel = HermitianResidual<T, kLanes, kChunks, kWarps>;
  return launch_kernel<residual_hermitian<T, kLanes, kChunks, kWarps>>(
      stream, p.batch, Kernel::kMatrices, Kernel::kThreads, Kernel::kSharedBytes, p);
}

// The smallest number of chunks, a power of two, that covers n. Enough warps for each matrix that
// 512 MiB of matrices fill a large GPU.
template <class T, int kChunks = 1>
cudaError_t launch_hermitian_warps(cudaStream_t stream, const ResidualProblem& p) {
  constexpr int kCovered = 32 * kVector<T> * kChunks;
  constexpr int kWarps = kChunks == 1 ? 1 : kChunks == 2 ? 4 : 8;
  if constexpr (kCovered < kResidualMaxN) {
    if (p.n > kCovered) return launch_hermitian_warps<T, 2 * kChunks>(stream, p);
  }
  return launch_hermitian<T, 32, kChunks, kWarps>(stream, p);
}

}  // namespace

template <>
cudaError_t launch<JAX_BATCHED_SCALAR>(cudaStream_t stream, const ResidualProblem& p) {
  using T = JAX_BATCHED_SCALAR;
  if (!p.kernel.empty() || p.n > kResidualMaxN) return cudaErrorInvalidValue;
  const bool few = p.n <= 8 * kVector<T>;
  if (!p.hermitian) return few ? launch_rows<T, 8>(stream, p) : launch_rows<T, 32>(stream, p);
  return few ? launch_hermitian<T, 8, 1, 1>(stream, p) : launch_hermitian_warps<T>(stream, p);
}

}  // namespace jax_batched::cuda
