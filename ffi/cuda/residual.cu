// The CUDA launcher of residual for one element type, JAX_BATCHED_SCALAR.
#include "ffi/cuda/residual.cuh"

namespace jax_batched::cuda {
namespace {

template <class T, int kLanes>
cudaError_t launch_rows(cudaStream_t stream, const Residual<T>& p) {
  return launch<residual_rows<T, kLanes>>(stream, p.batch * p.m, kResidualThreads / kLanes,
                                          kResidualThreads, 0, p);
}

template <class T, int kLanes, int kChunks, int kWarps>
cudaError_t launch_hermitian(cudaStream_t stream, const Residual<T>& p) {
  using Kernel = HermitianResidual<T, kLanes, kChunks, kWarps>;
  return launch<residual_hermitian<T, kLanes, kChunks, kWarps>>(
      stream, p.batch, Kernel::kMatrices, Kernel::kThreads, Kernel::kSharedBytes, p);
}

// The smallest number of chunks, a power of two, that covers n. Enough warps for each matrix that
// 512 MiB of matrices fill a large GPU.
template <class T, int kChunks = 1>
cudaError_t launch_hermitian_warps(cudaStream_t stream, const Residual<T>& p) {
  constexpr int kCovered = 32 * kVector<T> * kChunks;
  constexpr int kWarps = kChunks == 1 ? 1 : kChunks == 2 ? 4 : 8;
  if constexpr (kCovered < kResidualMaxN) {
    if (p.n > kCovered) return launch_hermitian_warps<T, 2 * kChunks>(stream, p);
  }
  return launch_hermitian<T, 32, kChunks, kWarps>(stream, p);
}

}  // namespace

template <class T>
cudaError_t residual(cudaStream_t stream, const ResidualProblem& problem) {
  if (!problem.kernel.empty() || problem.n > kResidualMaxN) return cudaErrorInvalidValue;
  Residual<T> p{};
  p.a = static_cast<const T*>(problem.a);
  p.scale = static_cast<const Real<T>*>(problem.scale);
  p.x = static_cast<const T*>(problem.x);
  p.b = static_cast<const T*>(problem.b);
  p.r = static_cast<T*>(problem.r);
  p.batch = problem.batch;
  p.nrhs = problem.nrhs;
  p.m = static_cast<int>(problem.m);
  p.n = static_cast<int>(problem.n);
  p.upper = problem.triangle == ResidualProblem::Triangle::kUpper;
  p.absolute = problem.absolute;
  p.a_map = problem.a_map;
  p.scale_map = problem.scale_map;
  p.x_map = problem.x_map;
  p.b_map = problem.b_map;
  const bool few = p.n <= 8 * kVector<T>;
  if (problem.triangle == ResidualProblem::Triangle::kNone) {
    return few ? launch_rows<T, 8>(stream, p) : launch_rows<T, 32>(stream, p);
  }
  return few ? launch_hermitian<T, 8, 1, 1>(stream, p) : launch_hermitian_warps<T>(stream, p);
}

template cudaError_t residual<JAX_BATCHED_SCALAR>(cudaStream_t, const ResidualProblem&);

}  // namespace jax_batched::cuda
