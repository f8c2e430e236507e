#pragma once

#include <cuda_runtime_api.h>

#include "ffi/common/problem.h"

namespace jax_batched::cuda {

inline constexpr int kResidualMaxN = 512;

// Launches the kernel for this problem (all counts at least 1). Returns what cudaGetLastError says;
// cudaErrorInvalidValue if problem.kernel is not empty or n is above kResidualMaxN.
template <class T>
cudaError_t residual(cudaStream_t stream, const ResidualProblem& problem);

}  // namespace jax_batched::cuda
