// Zeros in the results of matrices that are not computed, and -1 for info.
#include <algorithm>

#include "ffi/cuda/launch.h"
#include "ffi/cuda/layout/view.cuh"
#include "ffi/cuda/runtime/launch.cuh"

namespace jax_batched::cuda {
namespace {

constexpr int kClearWarps = 8;
constexpr int kClearWords = 32;  // of each lane

// A warp clears a part of one result of 32 neighbouring matrices, if it has to at all: of the words
// of these matrices one after the other, word w is of matrix w / words.
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
  const unsigned mask = __ballot_sync(kFullWarp, unwanted);
  if (mask == 0) return;
  Word* out = static_cast<Word*>(result.data) + first * words;
  const Word value = result.is_info ? static_cast<Word>(-1) : Word{0};
  const bool is_short = words <= UINT32_MAX / 32;  // then quotients take few instructions
  const int64_t begin = item % parts * (32 * kClearWords);
  const int64_t end = min(begin + 32 * kClearWords, min(batch - first, int64_t{32}) * words);
  for (int64_t w = begin + lane; w < end; w += 32) {
    const auto matrix = is_short ? static_cast<uint32_t>(w) / static_cast<uint32_t>(words)
                                 : static_cast<uint32_t>(w / words);
    if (mask >> matrix & 1) out[w] = value;
  }
}

template <class Word>
cudaError_t launch_clear_of(cudaStream_t stream, int64_t batch, const MatrixView<Mapped>& where,
                            const Results::Result& result) {
  const int64_t words = result.bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t parts = (words + kClearWords - 1) / kClearWords;
  return launch_kernel<&clear_kernel<Word>>(stream, (batch + 31) / 32 * parts, kClearWarps,
                                            32 * kClearWarps, 0, where, result, batch, words,
                                            parts);
}

}  // namespace

cudaError_t launch_clear(cudaStream_t stream, int64_t batch, const MatrixView<Mapped>& where,
                         const Results& results) {
  for (int i = 0; i < results.count; ++i) {
    const Results::Result& result = results.result[i];
    const cudaError_t error = result.bytes % 4 == 0
                                  ? launch_clear_of<uint32_t>(stream, batch, where, result)
                                  : launch_clear_of<uint16_t>(stream, batch, where, result);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace jax_batched::cuda
