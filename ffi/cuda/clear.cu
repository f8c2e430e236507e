// Zeros in the results of matrices that are not computed, and -1 for info.
#include <algorithm>

#include "ffi/cuda/launch.h"
#include "ffi/cuda/layout/view.cuh"
#include "ffi/cuda/runtime/launch.cuh"

namespace jax_batched::cuda {
namespace {

constexpr int kClearWarps = 8;
constexpr int kClearWords = 1024;  // of each matrix

// A warp clears the same part of one result of 32 neighbouring matrices, where it has to.
template <class Word>
__global__ void __launch_bounds__(32 * kClearWarps)
    clear_kernel(const MatrixView<Mapped> where, const Results::Result result, const int64_t batch,
                 const int64_t words, const int64_t parts) {
  const int64_t item = int64_t{blockIdx.x} * kClearWarps + threadIdx.x / 32;
  const int64_t first = item / parts * 32;
  if (first >= batch) return;
  const int lane = threadIdx.x % 32;
  const int64_t own = first + lane;
  const bool unwanted = own < batch && !where.as<const bool>()[matrix_index(where.layout.map, own)];
  const Word value = result.is_info ? static_cast<Word>(-1) : Word{0};
  const int64_t begin = item % parts * kClearWords, end = min(begin + kClearWords, words);
  for (unsigned left = __ballot_sync(kFullWarp, unwanted); left != 0; left &= left - 1) {
    Word* out = static_cast<Word*>(result.data) + (first + __ffs(left) - 1) * words;
    for (int64_t w = begin + lane; w < end; w += 32) out[w] = value;
  }
}

template <class Word>
cudaError_t launch_clear_of(cudaStream_t stream, const Problem& problem,
                            const Results::Result& result) {
  const int64_t words = result.bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t parts = (words + kClearWords - 1) / kClearWords;
  return launch_kernel<&clear_kernel<Word>>(stream, (problem.batch + 31) / 32 * parts, kClearWarps,
                                            32 * kClearWarps, 0, problem.where, result,
                                            problem.batch, words, parts);
}

}  // namespace

cudaError_t launch_clear(cudaStream_t stream, const Problem& problem, const Results& results) {
  for (int i = 0; i < results.count; ++i) {
    const Results::Result& result = results.result[i];
    const cudaError_t error = result.bytes % 4 == 0
                                  ? launch_clear_of<uint32_t>(stream, problem, result)
                                  : launch_clear_of<uint16_t>(stream, problem, result);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jax_batched::cuda
