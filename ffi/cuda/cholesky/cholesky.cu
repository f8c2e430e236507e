#include "ffi/cuda/cholesky/cholesky.cuh"
#include "ffi/cuda/cholesky/policy.h"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/runtime/dispatch.cuh"
#include "ffi/cuda/runtime/launch.cuh"

namespace jax_batched::cuda {
namespace {

// Launches one of the kernels of "thread".
template <class S>
struct ThreadLauncher {
  cudaStream_t stream;
  const CholeskyProblem& args;

  template <int kN>
  cudaError_t run() const {
    return launch_kernel<cholesky_thread_kernel<S, kN>>(stream, args.batch, 32, 32,
                                                        cholesky_thread_bytes<S, kN>(), args);
  }
};

template <class S, int kTiles, int kGroup, bool kExact, int kWarps, int kMinBlocks>
cudaError_t launch_warp(cudaStream_t stream, const CholeskyProblem& args) {
  if constexpr (is_rolled(kDTypeOf<S>, kTiles, kExact)) {
    static_assert(kGroup == 1 && kWarps == 1);
    return launch_kernel<cholesky_warp_rolled_kernel<S, kTiles, kExact, kMinBlocks>>(
        stream, args.batch, 1, 32, cholesky_warp_bytes<S, kTiles, 1, kExact, 1>(), args);
  } else {
    // The cap of a row of more than 8 tiles is for rolled kernels: unrolled ones would spill.
    constexpr int kCap = kTiles > 8 ? 1 : kMinBlocks;
    return launch_kernel<cholesky_warp_kernel<S, kTiles, kGroup, kExact, kWarps, kCap>>(
        stream, args.batch, kWarps * kGroup, 32 * kWarps,
        cholesky_warp_bytes<S, kTiles, kGroup, kExact, kWarps>(), args);
  }
}

template <class S, int kSlots, bool kExact, int kMinBlocks>
cudaError_t launch_lanes(cudaStream_t stream, const CholeskyProblem& args) {
  using Stage = StoredLanes<S, kSlots, kExact>;
  return launch_kernel<cholesky_lanes_kernel<S, kSlots, kExact, kMinBlocks>>(
      stream, args.batch, Stage::kMatrices, 32, Stage::kBytes, args);
}

template <class S>
struct Launcher {
  static constexpr const auto& kTable = kCholeskyTable;
  cudaStream_t stream;
  const CholeskyProblem& args;

  template <size_t kRow>
  cudaError_t row() const {
    constexpr auto kShape = kShapeOf<kTable, kRow>;
    return launch_shape<kTable[kRow].min_n, kTable[kRow].max_n, kTable[kRow].only.fast, kShape>(
        kShape);
  }

 private:
  static constexpr int cap(int min_blocks) { return min_blocks > 0 ? min_blocks : 1; }

  template <int kMinN, int kMaxN, bool kFast, ThreadShape kShape>
  cudaError_t launch_shape(ThreadShape) const {
    return with_size<kMaxN>(args.n, ThreadLauncher<S>{stream, args});
  }

  template <int kMinN, int kMaxN, bool kFast, LanesShape kShape>
  cudaError_t launch_shape(LanesShape) const {
    constexpr int kSlots = ceil_div(kMaxN, 8);
    static_assert(kMinN > 8 * (kSlots - 1), "only the last slot may be ragged");
    return args.n == 8 * kSlots
               ? launch_lanes<S, kSlots, true, cap(kShape.min_blocks)>(stream, args)
               : launch_lanes<S, kSlots, false, cap(kShape.min_blocks)>(stream, args);
  }

  template <int kMinN, int kMaxN, bool kFast, WarpShape kShape>
  cudaError_t launch_shape(WarpShape) const {
    constexpr int kTiles = ceil_div(kMaxN, 8);
    static_assert(kMinN > 8 * (kTiles - 1), "only the last row of tiles may be ragged");
    const auto launch_tiles = [&](auto exact) {
      return launch_warp<S, kTiles, kShape.group, decltype(exact)::value, kShape.warps,
                         cap(kShape.min_blocks)>(stream, args);
    };
    if constexpr (kMinN == 8 * kTiles) {
      return launch_tiles(std::true_type{});
    } else {
      if constexpr (has_exact_kernel(kDTypeOf<S>, kTiles)) {
        if (args.n == 8 * kTiles) return launch_tiles(std::true_type{});
      }
      return launch_tiles(std::false_type{});
    }
  }

  template <int kMinN, int kMaxN, bool kFast, WarpSharedShape kShape>
  cudaError_t launch_shape(WarpSharedShape) const {
    constexpr int kTiles = ceil_div(kMaxN, 16);
    static_assert(kMinN > 8 * kTiles, "both halves have rows");
    return launch_kernel<cholesky_warp_shared_kernel<S, kTiles, cap(kShape.min_blocks)>>(
        stream, args.batch, 1, 32, WarpSharedFactor<S, kTiles>::kElements * sizeof(S), args);
  }

  template <int kMinN, int kMaxN, bool kFast, BlockSharedShape kShape>
  cudaError_t launch_shape(BlockSharedShape) const {
    using Factor = BlockSharedFactor<kShape.warps - 1, RhsPlace::kNone>;
    static_assert(kMaxN <= Factor::kMaxN);
    return launch_kernel<cholesky_block_shared_kernel<kShape.warps - 1, cap(kShape.min_blocks)>>(
        stream, args.batch, 1, Factor::kThreads, Factor::shared_bytes(args.n), args);
  }

  template <int kMinN, int kMaxN, bool kFast, BlockShape kShape>
  cudaError_t launch_shape(BlockShape) const {
    return with_access(args.upper, args.n % kVector<S> == 0, [&](auto access) {
      constexpr Access kAccess = decltype(access)::value;
      constexpr int kRowTiles = kShape.row_tiles > 0 ? kShape.row_tiles : kUsualRowTiles<S, kFast>;
      constexpr bool kRagged = kAccess == Access::kElements && kShape.ragged_blocks > 0;
      constexpr int kBlocks = kRagged ? kShape.ragged_blocks : cap(kShape.min_blocks);
      using Factor = BlockFactor<S, kShape.depth, kAccess, kShape.prefetch, kFast, kRowTiles>;
      return launch_kernel<cholesky_block_kernel<S, kShape.depth, kAccess, kShape.prefetch, kFast,
                                                 kRowTiles, kBlocks>>(
          stream, args.batch, 1, Factor::kThreads, Factor::kSharedBytes, args);
    });
  }
};

}  // namespace

// Where no row of the table serves problem.fast alone it changes nothing: correctly rounded roots
// take no longer.
template <>
cudaError_t launch<JAX_BATCHED_SCALAR>(cudaStream_t stream, const CholeskyProblem& problem) {
  using S = JAX_BATCHED_SCALAR;
  const Call call{.operation = CholeskyProblem::kName,
                  .dtype = table_dtype(kDTypeOf<S>),
                  .n = problem.n,
                  .fast = problem.fast};
  return launch_row<S>(call, problem.kernel, Launcher<S>{stream, problem});
}

}  // namespace jax_batched::cuda
