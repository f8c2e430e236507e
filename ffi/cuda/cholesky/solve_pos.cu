#include "ffi/cuda/cholesky/policy.h"
#include "ffi/cuda/cholesky/solve_pos.cuh"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/runtime/dispatch.cuh"
#include "ffi/cuda/runtime/launch.cuh"

namespace jax_batched::cuda {
namespace {

template <class S>
struct ThreadLauncher {
  cudaStream_t stream;
  const SolvePosProblem& args;

  template <int kN>
  cudaError_t run() const {
    return launch_kernel<solve_pos_thread_kernel<S, kN>>(stream, args.batch, 32, 32,
                                                         solve_pos_thread_bytes<S, kN>(), args);
  }
};

template <class T, int kTiles, int kMinBlocks>
cudaError_t launch_warp(cudaStream_t stream, const SolvePosProblem& args) {
  return launch_kernel<solve_pos_warp_kernel<T, kTiles, kMinBlocks>>(
      stream, args.batch, 1, 32, solve_pos_warp_bytes<T, kTiles>(), args);
}

template <class T, int kSlots, bool kMany, int kMinBlocks>
cudaError_t launch_lanes(cudaStream_t stream, const SolvePosProblem& args) {
  return launch_kernel<solve_pos_lanes_kernel<T, kSlots, kMany, kMinBlocks>>(
      stream, args.batch, LanesFactor<T, kSlots>::kMatrices, 32, solve_pos_lanes_bytes<T, kSlots>(),
      args);
}

template <class T, int kTiles, bool kExact, int kMinBlocks>
cudaError_t launch_rolled(cudaStream_t stream, const SolvePosProblem& args) {
  return launch_kernel<solve_pos_warp_rolled_kernel<T, kTiles, kExact, kMinBlocks>>(
      stream, args.batch * args.nrhs, 1, 32, solve_pos_warp_bytes<T, kTiles>(), args);
}

template <class S, int kSlots, bool kExact, int kMinBlocks>
cudaError_t launch_stored_lanes(cudaStream_t stream, const SolvePosProblem& args) {
  using Stage = StoredLanes<S, kSlots, kExact>;
  return launch_kernel<solve_pos_stored_lanes_kernel<S, kSlots, kExact, kMinBlocks>>(
      stream, args.batch, Stage::kMatrices, 32, Stage::kBytes, args);
}

template <int kWorkers, RhsPlace kRhsPlace, bool kProducts, int kMinBlocks>
cudaError_t launch_block_shared(cudaStream_t stream, const SolvePosProblem& args) {
  using Factor = BlockSharedFactor<kWorkers, kRhsPlace>;
  return launch_kernel<solve_pos_block_shared_kernel<kWorkers, kRhsPlace, kProducts, kMinBlocks>>(
      stream, args.batch, 1, Factor::kThreads, Factor::shared_bytes(args.n), args);
}

template <class S>
struct Launcher {
  static constexpr const auto& kTable = kSolvePosTable;
  cudaStream_t stream;
  const SolvePosProblem& args;

  template <size_t kRow>
  cudaError_t row() const {
    constexpr auto kShape = kShapeOf<kTable, kRow>;
    return launch_shape<kTable[kRow].min_n, kTable[kRow].max_n, kShape>(kShape);
  }

 private:
  static constexpr int cap(int min_blocks) { return min_blocks > 0 ? min_blocks : 1; }

  template <int kMinN, int kMaxN, ThreadShape kShape>
  cudaError_t launch_shape(ThreadShape) const {
    return with_size<kMaxN>(args.n, ThreadLauncher<S>{stream, args});
  }

  template <int kMinN, int kMaxN, LanesShape kShape>
  cudaError_t launch_shape(LanesShape) const {
    constexpr int kSlots = ceil_div(kMaxN, 8);
    static_assert(kMinN > 8 * (kSlots - 1), "only the last slot may be ragged");
    if constexpr (is_storage_only(kDTypeOf<S>)) {
      constexpr int kCap = cap(kShape.min_blocks);
      return args.n == 8 * kSlots ? launch_stored_lanes<S, kSlots, true, kCap>(stream, args)
                                  : launch_stored_lanes<S, kSlots, false, kCap>(stream, args);
    } else if (args.nrhs == 1) {
      return launch_lanes<S, kSlots, false, kShape.min_blocks>(stream, args);
    } else if constexpr (kShape.several) {
      return launch_lanes<S, kSlots, true, kShape.min_blocks>(stream, args);
    } else {
      return launch_warp<S, kSlots, 1>(stream, args);
    }
  }

  template <int kMinN, int kMaxN, BlockSharedShape kShape>
  cudaError_t launch_shape(BlockSharedShape) const {
    constexpr RhsPlace kPlace = kShape.rhs_warp ? RhsPlace::kWarp : RhsPlace::kRowTile;
    constexpr int kWorkers = kShape.warps - (kShape.rhs_warp ? 2 : 1);
    constexpr int kCap = cap(kShape.min_blocks);
    static_assert(kMaxN <= BlockSharedFactor<kWorkers, kPlace>::kMaxN);
    if constexpr (!kShape.products) {
      if (args.nrhs == 1) return launch_block_shared<kWorkers, kPlace, false, kCap>(stream, args);
    }
    return launch_block_shared<kWorkers, kPlace, true, kCap>(stream, args);
  }

  template <int kMinN, int kMaxN, WarpSharedShape kShape>
  cudaError_t launch_shape(WarpSharedShape) const {
    constexpr int kTiles = ceil_div(kMaxN, 16);
    static_assert(kMinN > 8 * kTiles, "both halves have rows");
    if constexpr (!kShape.several) {
      static_assert(kMinN > kMaxN - 8);
      if (args.nrhs > 1) return launch_warp<S, kMaxN / 8, 1>(stream, args);
    }
    return launch_kernel<solve_pos_warp_shared_kernel<S, kTiles, cap(kShape.min_blocks)>>(
        stream, args.batch * args.nrhs, 1, 32,
        WarpSharedFactor<S, kTiles>::kSolveElements * sizeof(S), args);
  }

  template <int kMinN, int kMaxN, LanesSharedShape kShape>
  cudaError_t launch_shape(LanesSharedShape) const {
    constexpr int kTiles = tiles<kMinN, kMaxN>();
    if (args.nrhs == 1) {
      return launch_kernel<solve_pos_lanes_shared_kernel<S, kTiles>>(
          stream, args.batch, LanesSharedFactor<S, kTiles>::kMatrices, 32,
          solve_pos_lanes_shared_bytes<S, kTiles>(), args);
    }
    return launch_warp<S, kTiles, cap(kShape.min_blocks)>(stream, args);
  }

  template <int kMinN, int kMaxN, WarpTensorShape kShape>
  cudaError_t launch_shape(WarpTensorShape) const {
    constexpr int kTiles = tiles<kMinN, kMaxN>();
    return launch_kernel<solve_pos_warp_tensor_kernel<kTiles>>(
        stream, args.batch, 1, 32, WarpTensorFactor<kTiles>::kSharedBytes, args);
  }

  template <int kMinN, int kMaxN, WarpShape kShape>
  cudaError_t launch_shape(WarpShape) const {
    static_assert(kShape.warps == 1 && kShape.group == 1);
    constexpr int kTiles = tiles<kMinN, kMaxN>(), kCap = cap(kShape.min_blocks);
    if constexpr (kTiles > kMaxSeveralTiles) {
      return one_by_one<kCap, kTiles>();
    } else if constexpr (kTiles > kMaxUnrolledTiles) {
      // The cap of such a row is for the rolled kernel: the unrolled one would spill.
      return args.nrhs == 1 ? one_by_one<kCap, kTiles>() : launch_warp<S, kTiles, 1>(stream, args);
    } else {
      return launch_warp<S, kTiles, kCap>(stream, args);
    }
  }

  template <int kMinN, int kMaxN>
  static constexpr int tiles() {
    static_assert(kMinN > 8 * (ceil_div(kMaxN, 8) - 1), "only the last row of tiles may be ragged");
    return ceil_div(kMaxN, 8);
  }

  template <int kCap, int kTiles>
  cudaError_t one_by_one() const {
    return args.n == 8 * kTiles ? launch_rolled<S, kTiles, true, kCap>(stream, args)
                                : launch_rolled<S, kTiles, false, kCap>(stream, args);
  }
};

}  // namespace

// problem.fast changes nothing: correctly rounded roots take no longer.
template <>
cudaError_t launch<JAX_BATCHED_SCALAR>(cudaStream_t stream, const SolvePosProblem& problem) {
  using S = JAX_BATCHED_SCALAR;
  if (is_storage_only(kDTypeOf<S>) && problem.nrhs != 1) return cudaErrorInvalidValue;
  const Call call{.operation = SolvePosProblem::kName,
                  .dtype = table_dtype(kDTypeOf<S>),
                  .n = problem.n,
                  .nrhs = problem.nrhs,
                  .fast = problem.fast};
  return launch_row<S>(call, problem.kernel, Launcher<S>{stream, problem});
}

}  // namespace jax_batched::cuda
