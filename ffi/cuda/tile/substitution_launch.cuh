// Picks and launches a substitution kernel.
#pragma once

#include <algorithm>
#include <string_view>

#include "ffi/cuda/substitution_tiers.h"
#include "ffi/cuda/tile/launch.cuh"
#include "ffi/cuda/tile/substitution_block.cuh"
#include "ffi/cuda/tile/substitution_columns.cuh"
#include "ffi/cuda/tile/substitution_thread.cuh"
#include "ffi/cuda/tile/substitution_warp.cuh"

namespace jax_batched::cuda {

template <class T, int kSweeps, int kN = kThreadSubstitutionMaxN>
cudaError_t launch_thread_substitution(cudaStream_t stream, const Substitution<T>& s) {
  if constexpr (kN == 0) {
    return cudaErrorInvalidValue;
  } else {
    if (s.n != kN) return launch_thread_substitution<T, kSweeps, kN - 1>(stream, s);
    using Shape = ThreadSubstitutionShape<T, kN>;
    return launch<&thread_substitution<T, kN, kSweeps>>(stream, s.batch, 32 * Shape::kWarps,
                                                        32 * Shape::kWarps,
                                                        Shape::kWarps * Shape::kWarpBytes, s);
  }
}

// Shared memory of the packed triangle of one matrix.
template <class T>
size_t packed_bytes(int64_t n) {
  return static_cast<size_t>(n * (n + 1) / 2) * sizeof(T);
}

template <class T, int kSweeps, int kColumns, int kRows = kWarpSubstitutionMaxN<T> / 32>
cudaError_t launch_warp_rows(cudaStream_t stream, const Substitution<T>& s) {
  if constexpr (kRows == 0) {
    return cudaErrorInvalidValue;
  } else {
    if (s.n <= 16) {
      constexpr int kGroups = 2 * WarpSubstitutionShape<T, 1, kColumns>::kWarps;
      return launch<&warp_substitution<T, 16, 1, kColumns, kSweeps>>(
          stream, s.batch, kGroups, 16 * kGroups, kGroups * packed_bytes<T>(s.n), s);
    }
    if (s.n <= 32 * (kRows - 1)) {
      return launch_warp_rows<T, kSweeps, kColumns, kRows - 1>(stream, s);
    }
    constexpr int kWarps = WarpSubstitutionShape<T, kRows, kColumns>::kWarps;
    return launch<&warp_substitution<T, 32, kRows, kColumns, kSweeps>>(
        stream, s.batch, kWarps, 32 * kWarps, kWarps * packed_bytes<T>(s.n), s);
  }
}

template <class T, int kSweeps>
cudaError_t launch_warp_substitution(cudaStream_t stream, const Substitution<T>& s) {
  if (s.n > kWarpSubstitutionMaxN<T>) return cudaErrorInvalidValue;
  return s.nrhs == 1 ? launch_warp_rows<T, kSweeps, 1>(stream, s)
                     : launch_warp_rows<T, kSweeps, kSubstitutionColumns>(stream, s);
}

template <class T, int kHeight>
size_t block_substitution_bytes(int64_t n, int columns) {
  return BlockSubstitutionShape<T, kHeight>::kTilesBytes +
         static_cast<size_t>(n) * columns * sizeof(T);
}

template <class T, int kSweeps, int kHeight, int kColumns>
cudaError_t launch_block_tiles(cudaStream_t stream, const Substitution<T>& s) {
  const int64_t column_groups = (s.nrhs + kColumns - 1) / kColumns;
  return launch<&block_substitution<T, kHeight, kColumns, kSweeps>>(
      stream, s.batch * column_groups, 1, kHeight,
      block_substitution_bytes<T, kHeight>(s.n, kColumns), s, column_groups);
}

template <class T, int kSweeps, int kColumns>
cudaError_t launch_block_columns(cudaStream_t stream, const Substitution<T>& s, size_t limit) {
  // A height is compiled if some n takes it.
  constexpr int64_t kTallMinN = substitution_tall_tile_min_n(kDTypeOf<T>, kColumns);
  if constexpr (kTallMinN < kAny) {
    if (s.n >= kTallMinN && block_substitution_bytes<T, 128>(s.n, kColumns) <= limit) {
      return launch_block_tiles<T, kSweeps, 128, kColumns>(stream, s);
    }
  }
  return launch_block_tiles<T, kSweeps, 64, kColumns>(stream, s);
}

template <class T, int kSweeps>
cudaError_t launch_block_substitution(cudaStream_t stream, const Substitution<T>& s) {
  size_t limit = 0;
  const cudaError_t error = shared_memory_limit(&limit);
  if (error != cudaSuccess) return error;
  if (s.nrhs > 1 && block_substitution_bytes<T, 64>(s.n, kSubstitutionColumns) <= limit) {
    return launch_block_columns<T, kSweeps, kSubstitutionColumns>(stream, s, limit);
  }
  return launch_block_columns<T, kSweeps, 1>(stream, s, limit);
}

template <class T, int kSweeps, int kBlock>
cudaError_t launch_columns_blocks(cudaStream_t stream, const Substitution<T>& s) {
  using Shape = ColumnsSubstitutionShape<T, kBlock>;
  const int warps = static_cast<int>(std::min<int64_t>((s.nrhs + 31) / 32, Shape::kMaxWarps));
  const int64_t column_groups = (s.nrhs + 32 * warps - 1) / (32 * warps);
  return launch<&columns_substitution<T, kBlock, kSweeps>>(
      stream, s.batch * column_groups, 1, 32 * warps, Shape::shared_bytes(warps), s, column_groups);
}

template <class T, int kSweeps>
cudaError_t launch_columns_substitution(cudaStream_t stream, const Substitution<T>& s) {
  if constexpr (!kIsComplex<T>) {
    if (s.n > 16) return launch_columns_blocks<T, kSweeps, 32>(stream, s);
  }
  return launch_columns_blocks<T, kSweeps, 16>(stream, s);
}

// Launches the kernel of this name, or with an empty name the one that the tiers name. The kernels
// give the same bits, so one that needs more shared memory than this GPU has is replaced.
template <class T, int kSweeps>
cudaError_t launch_substitution(cudaStream_t stream, const Substitution<T>& s,
                                std::string_view kernel) {
  if (kernel.empty()) {
    int capability = 0;
    cudaError_t error = compute_capability(&capability);
    if (error != cudaSuccess) return error;
    kernel = substitution_kernel(kDTypeOf<T>, s.n, s.nrhs, kSweeps, capability);
    size_t limit = 0;
    error = shared_memory_limit(&limit);
    if (error != cudaSuccess) return error;
    if (kernel == "warp" && packed_bytes<T>(s.n) > limit) kernel = "block";
    if (kernel == "block" && block_substitution_bytes<T, 64>(s.n, 1) > limit) kernel = "columns";
  }
  if (kernel == "thread") return launch_thread_substitution<T, kSweeps>(stream, s);
  if (kernel == "warp") return launch_warp_substitution<T, kSweeps>(stream, s);
  if (kernel == "block") return launch_block_substitution<T, kSweeps>(stream, s);
  if (kernel == "columns") return launch_columns_substitution<T, kSweeps>(stream, s);
  return cudaErrorInvalidValue;
}

}  // namespace jax_batched::cuda
