// Picks and launches a substitution kernel.
#pragma once

#include <algorithm>
#include <iterator>
#include <string_view>
#include <type_traits>

#include "ffi/cuda/runtime/launch.cuh"
#include "ffi/cuda/substitution/block_columns.cuh"
#include "ffi/cuda/substitution/block_rows.cuh"
#include "ffi/cuda/substitution/block_tensor.cuh"
#include "ffi/cuda/substitution/lanes_shared.cuh"
#include "ffi/cuda/substitution/policy.h"
#include "ffi/cuda/substitution/thread.cuh"
#include "ffi/cuda/substitution/warp_streamed.cuh"

namespace jax_batched::cuda {

template <class T, int kSweeps, int kN = thread_substitution_max_n(kDTypeOf<T>)>
cudaError_t launch_thread_substitution(cudaStream_t stream, const Substitution<T>& s) {
  if constexpr (kN == 0) {
    return kDoesNotFit;
  } else {
    if (s.n != kN) return launch_thread_substitution<T, kSweeps, kN - 1>(stream, s);
    using Shape = ThreadSubstitutionShape<T, kN>;
    return launch_kernel<&thread_substitution<T, kN, kSweeps>>(
        stream, s.batch, 32 * Shape::kWarps, 32 * Shape::kWarps, Shape::kWarps * Shape::kWarpBytes,
        s);
  }
}

// True if rows are whole 16-byte vectors at 16-byte addresses.
template <class T>
bool aligned_rows(const Substitution<T>& s) {
  return s.n % kVector<T> == 0 && reinterpret_cast<uintptr_t>(s.a.data) % 16 == 0;
}

template <class T, int kLanes, int kRows, int kColumns, bool kAligned>
cudaError_t launch_lanes_shared_shape(cudaStream_t stream, const Substitution<T>& s, int sweeps,
                                      size_t limit) {
  using Shape = LanesSharedSubstitutionShape<T, kLanes, kRows, kColumns, kAligned>;
  const FoldedTriangle<T> folded{s.n, kAligned};
  const size_t bytes = sizeof(T) * Shape::kWarps * Shape::warp_elements(folded);
  if (bytes > limit) return kDoesNotFit;
  return launch_kernel<&lanes_shared_substitution<T, kLanes, kRows, kColumns, kAligned>>(
      stream, s.batch, Shape::kWarps * Shape::kMatrices, 32 * Shape::kWarps, bytes, s, sweeps,
      folded);
}

template <class T, int kColumns, size_t kTier = 0>
cudaError_t launch_lanes_shared_tier(cudaStream_t stream, const Substitution<T>& s, int sweeps,
                                     size_t limit) {
  if constexpr (kTier == std::size(kLanesSharedSubstitutionTiers)) {
    return kDoesNotFit;
  } else {
    constexpr LanesSharedSubstitutionTier kShape = kLanesSharedSubstitutionTiers[kTier];
    constexpr bool kServes = kColumns == 1 ? kShape.one_column : kShape.several_columns;
    if constexpr (kServes &&
                  kShape.lanes * kShape.rows <= lanes_shared_substitution_max_n(kDTypeOf<T>)) {
      if (s.n <= kShape.lanes * kShape.rows) {
        // With several columns the arithmetic counts: of the large complex kernels one serves all.
        constexpr bool kOne = kVector<T> == 1 || (kIsComplex<T> && kColumns > 1);
        if constexpr (!kOne) {
          if (!aligned_rows(s)) {
            return launch_lanes_shared_shape<T, kShape.lanes, kShape.rows, kColumns, false>(
                stream, s, sweeps, limit);
          }
        }
        constexpr bool kAligned = !kOne || kVector<T> == 1;
        return launch_lanes_shared_shape<T, kShape.lanes, kShape.rows, kColumns, kAligned>(
            stream, s, sweeps, limit);
      }
    }
    return launch_lanes_shared_tier<T, kColumns, kTier + 1>(stream, s, sweeps, limit);
  }
}

template <class T>
cudaError_t launch_lanes_shared_substitution(cudaStream_t stream, const Substitution<T>& s,
                                             int sweeps, size_t limit) {
  const int columns = substitution_columns(s.nrhs, kIsComplex<T>);
  if (columns == 1) return launch_lanes_shared_tier<T, 1>(stream, s, sweeps, limit);
  if constexpr (!kIsComplex<T>) {
    if (columns == 2) return launch_lanes_shared_tier<T, 2>(stream, s, sweeps, limit);
  }
  return launch_lanes_shared_tier<T, 4>(stream, s, sweeps, limit);
}

template <class T, int kColumns, int kStages, bool kAligned>
cudaError_t launch_warp_streamed_shape(cudaStream_t stream, const Substitution<T>& s, int sweeps,
                                       size_t limit) {
  const size_t bytes =
      WarpStreamedSubstitutionShape<T, kColumns, kStages, kAligned>::shared_bytes(s.n);
  if (bytes > limit) return kDoesNotFit;
  const int64_t column_groups = (s.nrhs + kColumns - 1) / kColumns;
  const auto launch_for = [&](auto usual) {
    return launch_kernel<
        &warp_streamed_substitution<T, kColumns, kStages, kAligned, decltype(usual)::value>>(
        stream, s.batch * column_groups, 1, 32, bytes, s, sweeps, column_groups);
  };
  if constexpr (kColumns == 1) {
    if (s.a.contiguous() && s.b.contiguous() && !upper_stored(s.first)) {
      return launch_for(std::true_type{});
    }
  }
  return launch_for(std::false_type{});
}

template <class T, size_t kTier = 0>
cudaError_t launch_warp_streamed_tier(cudaStream_t stream, const Substitution<T>& s, int sweeps,
                                      size_t limit) {
  if constexpr (kTier == std::size(kWarpStreamedSubstitutionTiers)) {
    return kDoesNotFit;
  } else {
    constexpr WarpStreamedSubstitutionTier kShape = kWarpStreamedSubstitutionTiers[kTier];
    if constexpr (kShape.dtype == kDTypeOf<T>) {
      if (kShape.columns == substitution_columns(s.nrhs, kIsComplex<T>) &&
          (kShape.sweeps == 0 || kShape.sweeps == sweeps) && s.n <= kShape.max_n) {
        if (aligned_rows(s)) {
          return launch_warp_streamed_shape<T, kShape.columns, kShape.stages, true>(stream, s,
                                                                                    sweeps, limit);
        }
        if constexpr (kVector<T> > 1) {
          return launch_warp_streamed_shape<T, kShape.columns, kShape.stages, false>(stream, s,
                                                                                     sweeps, limit);
        }
      }
    }
    return launch_warp_streamed_tier<T, kTier + 1>(stream, s, sweeps, limit);
  }
}

template <class T, int kRows, int kColumns>
cudaError_t launch_block_rows_shape(cudaStream_t stream, const Substitution<T>& s, int sweeps,
                                    int lanes, size_t limit) {
  while (lanes < 32 && s.batch <= 16 / lanes) lanes *= 2;  // fewer matrices than a block takes
  const BlockRowsSubstitutionShape<T, kRows, kColumns> shape{ceil_div(s.n, kRows), lanes};
  const size_t bytes = shape.shared_bytes();
  if (bytes > limit) return kDoesNotFit;
  const int64_t groups = (s.batch + shape.matrices() - 1) / shape.matrices();
  const int64_t column_groups = (s.nrhs + lanes * kColumns - 1) / (lanes * kColumns);
  const auto launch_for = [&](auto transposed) {
    return launch_kernel<&block_rows_substitution<T, kRows, kColumns, decltype(transposed)::value>>(
        stream, groups * column_groups, 1, 32 * shape.warps, bytes, s, sweeps, shape,
        column_groups);
  };
  return s.first.x_col == 1 ? launch_for(std::false_type{}) : launch_for(std::true_type{});
}

template <class T, size_t kTier = 0>
cudaError_t launch_block_rows_tier(cudaStream_t stream, const Substitution<T>& s, int sweeps,
                                   size_t limit) {
  if constexpr (kTier == std::size(kBlockRowsSubstitutionTiers)) {
    return kDoesNotFit;
  } else {
    constexpr BlockRowsSubstitutionTier kShape = kBlockRowsSubstitutionTiers[kTier];
    if constexpr (kShape.dtype == kDTypeOf<T>) {
      static_assert(kShape.max_n <=
                    kShape.rows *
                        BlockRowsSubstitutionShape<T, kShape.rows, kShape.columns>::kMaxWarps);
      if (s.nrhs <= kShape.max_nrhs && s.n <= kShape.max_n) {
        const cudaError_t error = launch_block_rows_shape<T, kShape.rows, kShape.columns>(
            stream, s, sweeps, kShape.lanes, limit);
        if (error != kDoesNotFit) return error;
      }
    }
    return launch_block_rows_tier<T, kTier + 1>(stream, s, sweeps, limit);
  }
}

template <size_t kTier = 0>
cudaError_t launch_block_tensor_tier(cudaStream_t stream, const Substitution<double>& s,
                                     int sweeps) {
  if constexpr (kTier == std::size(kBlockTensorSubstitutionTiers)) {
    return kDoesNotFit;
  } else {
    constexpr BlockTensorSubstitutionTier kShape = kBlockTensorSubstitutionTiers[kTier];
    if (s.nrhs > kShape.max_nrhs || s.n > 8 * kShape.tiles) {
      return launch_block_tensor_tier<kTier + 1>(stream, s, sweeps);
    }
    using Shape = BlockTensorSubstitutionShape<kShape.tiles, kShape.parts>;
    const int64_t all_warps = (s.nrhs + Shape::kColumns - 1) / Shape::kColumns;
    const int64_t column_groups = (all_warps + Shape::kMaxWarps - 1) / Shape::kMaxWarps;
    const int warps = static_cast<int>((all_warps + column_groups - 1) / column_groups);
    return launch_kernel<&block_tensor_substitution<kShape.tiles, kShape.parts, kShape.min_blocks>>(
        stream, s.batch * column_groups, 1, 32 * warps, Shape::shared_bytes(warps), s, sweeps,
        column_groups);
  }
}

template <class T>
cudaError_t launch_block_tensor_substitution(cudaStream_t stream, const Substitution<T>& s,
                                             int sweeps) {
  if constexpr (block_tensor_substitution_max_n(kDTypeOf<T>) > 0) {
    int capability = 0;
    const cudaError_t error = compute_capability(&capability);
    if (error != cudaSuccess) return error;
    if (capability >= substitution_capability("block_tensor")) {
      return launch_block_tensor_tier(stream, s, sweeps);
    }
  }
  return kDoesNotFit;
}

template <class T, int kSweeps, int kBlock>
cudaError_t launch_block_columns_shape(cudaStream_t stream, const Substitution<T>& s) {
  using Shape = BlockColumnsSubstitutionShape<T, kBlock>;
  const int warps = static_cast<int>(std::min<int64_t>((s.nrhs + 31) / 32, Shape::kMaxWarps));
  const int64_t column_groups = (s.nrhs + 32 * warps - 1) / (32 * warps);
  return launch_kernel<&block_columns_substitution<T, kBlock, kSweeps>>(
      stream, s.batch * column_groups, 1, 32 * warps, Shape::shared_bytes(warps), s, column_groups);
}

template <class T, int kSweeps>
cudaError_t launch_block_columns_substitution(cudaStream_t stream, const Substitution<T>& s) {
  if constexpr (!kIsComplex<T>) {
    if (s.n > 16) return launch_block_columns_shape<T, kSweeps, 32>(stream, s);
  }
  return launch_block_columns_shape<T, kSweeps, 16>(stream, s);
}

// Launches one of the kernels that take either number of sweeps, for which they are compiled once.
template <class T>
cudaError_t launch_sweeps_substitution(cudaStream_t stream, const Substitution<T>& s, int sweeps,
                                       std::string_view kernel) {
  size_t limit = 0;
  const cudaError_t error = shared_memory_limit(&limit);
  if (error != cudaSuccess) return error;
  if (kernel == "lanes_shared")
    return launch_lanes_shared_substitution<T>(stream, s, sweeps, limit);
  if (kernel == "warp_streamed") return launch_warp_streamed_tier<T>(stream, s, sweeps, limit);
  if (kernel == "block_rows") return launch_block_rows_tier<T>(stream, s, sweeps, limit);
  if (kernel == "block_tensor") return launch_block_tensor_substitution(stream, s, sweeps);
  return cudaErrorInvalidValue;
}

// Launches the kernel of this name. kDoesNotFit if it does not serve this n, or needs more shared
// memory or other tensor cores than this GPU has.
template <class T, int kSweeps>
cudaError_t launch_named_substitution(cudaStream_t stream, const Substitution<T>& s,
                                      std::string_view kernel) {
  if (kernel == "thread") return launch_thread_substitution<T, kSweeps>(stream, s);
  if (kernel == "block_columns") return launch_block_columns_substitution<T, kSweeps>(stream, s);
  return launch_sweeps_substitution<T>(stream, s, kSweeps, kernel);
}

// The kernel that the problem names, or the one that the tables choose. The kernels give the same
// bits, so one that needs more shared memory than this GPU has is replaced by the next that serves.
template <class T, class P>
cudaError_t launch_substitution(cudaStream_t stream, const P& problem) {
  if (problem.n > kSubstitutionMaxN) return cudaErrorInvalidValue;
  constexpr int kSweeps = P::kSweeps;
  const Substitution<T> s{problem};
  if (!problem.kernel.empty()) {
    return launch_named_substitution<T, kSweeps>(stream, s, problem.kernel);
  }
  Call call{.operation = P::kName, .dtype = kDTypeOf<T>, .n = s.n, .nrhs = s.nrhs};
  call.transposed = s.nrhs > 1 && s.first.x_col != 1;
  cudaError_t error = compute_capability(&call.capability);
  if (error != cudaSuccess) return error;
  error = launch_named_substitution<T, kSweeps>(stream, s, substitution_kernel(call, kSweeps));
  for (const SubstitutionTier& tier : kSubstitutionTiers) {
    if (error != kDoesNotFit) break;
    if (tier.serves(call, kSweeps)) {
      error = launch_named_substitution<T, kSweeps>(stream, s, tier.kernel);
    }
  }
  return error;
}

}  // namespace jax_batched::cuda
