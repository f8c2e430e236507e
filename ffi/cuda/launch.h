#pragma once

#include <cuda_runtime_api.h>

#include "ffi/common/problem.h"

namespace jax_batched::cuda {

// Launches the kernel of a problem, all of whose counts are at least 1, for elements of type T.
// Returns what cudaGetLastError says; cudaErrorInvalidValue if problem.kernel names none or no
// kernel serves this n. Each operation's .cu file has the specialisation for its problem.
template <class T, class P>
cudaError_t launch(cudaStream_t stream, const P& problem);

// Clears the results of the matrices of a batch that are not asked for.
cudaError_t launch_clear(cudaStream_t stream, int64_t batch, const MatrixView<Mapped>& where,
                         const Results& results);

}  // namespace jax_batched::cuda
