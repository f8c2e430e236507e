#pragma once

#include <cuda_runtime_api.h>

#include "ffi/common/problem.h"

namespace jax_batched::cuda {

// What 99 KB of shared memory hold, the least since sm_80 (_MAX_PULLBACK_N of jax_batched/_ffi.py).
template <class T>
inline constexpr int kPullbackMaxN = sizeof(T) == 4   ? 192
                                     : sizeof(T) == 8 ? 128
                                                      : 80;

// Launches the kernel for this problem (all counts at least 1). Returns what cudaGetLastError says;
// cudaErrorInvalidValue if problem.kernel is not empty or n is above kPullbackMaxN<T>.
template <class T>
cudaError_t cholesky_pullback(cudaStream_t stream, const CholeskyPullbackProblem& problem);

}  // namespace jax_batched::cuda
