#pragma once

#include <cuda_runtime_api.h>

#include "ffi/common/problem.h"

namespace jax_batched::cuda {

// Launches the kernel that the tier table names for this problem (batch, n and nrhs at least 1). S
// is the type of its elements; of 16 bits, nrhs must be 1.
// Returns what cudaGetLastError says; cudaErrorInvalidValue if problem.kernel names none.
template <class S>
cudaError_t solve_pos(cudaStream_t stream, const SolvePosProblem& problem);

}  // namespace jax_batched::cuda
