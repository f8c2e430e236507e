#include "ffi/cuda/solve_pos.h"

#include "ffi/cuda/solve_pos.cuh"
#include "ffi/cuda/tiers.h"
#include "ffi/cuda/tile/dispatch.cuh"
#include "ffi/cuda/tile/launch.cuh"

namespace jax_batched::cuda {
namespace {

template <class T>
struct ThreadLauncher {
  cudaStream_t stream;
  const SolvePosArguments<T>& args;

  template <int kN>
  cudaError_t run() const {
    return launch<solve_pos_thread_kernel<T, kN>>(stream, args.batch, 32, 32,
                                                  solve_pos_thread_shared_bytes<T, kN>(), args);
  }
};

template <class T, int kTiles, int kGroup, bool kRedundant, bool kExact, int kWarps, int kMinBlocks>
cudaError_t launch_warp(cudaStream_t stream, const SolvePosArguments<T>& args) {
  return launch<solve_pos_warp_kernel<T, kTiles, kGroup, kRedundant, kExact, kWarps, kMinBlocks>>(
      stream, args.batch, kWarps * kGroup, 32 * kWarps,
      solve_pos_warp_shared_bytes<T, kTiles, kGroup, kWarps>(), args);
}

template <class T, int kSlots, int kLanes, bool kMany, int kWarps, int kMinBlocks>
cudaError_t launch_rows(cudaStream_t stream, const SolvePosArguments<T>& args) {
  return launch<solve_pos_rows_kernel<T, kSlots, kLanes, kMany, kWarps, kMinBlocks>>(
      stream, args.batch, kWarps * (32 / kLanes), 32 * kWarps,
      solve_pos_rows_shared_bytes<T, kSlots, kLanes, kWarps>(), args);
}

template <int kWorkers, RhsPlace kRhsPlace, bool kProducts, int kMinBlocks>
cudaError_t launch_left(cudaStream_t stream, const SolvePosArguments<double>& args) {
  using Factor = LeftFactor<kWorkers, kRhsPlace>;
  return launch<solve_pos_left_kernel<kWorkers, kRhsPlace, kProducts, kMinBlocks>>(
      stream, args.batch, 1, Factor::kThreads, Factor::shared_bytes(args.n), args);
}

// Up to this n the way back of one right-hand side in "left" is faster as products.
inline constexpr int kMaxLeftProductsN = 88;

template <class T>
struct TierLauncher {
  static constexpr const auto& kTable = kSolvePosTiers;
  cudaStream_t stream;
  const SolvePosArguments<T>& args;

  template <size_t kRow>
  cudaError_t tier() const {
    constexpr Tier kTier = kTable[kRow];
    constexpr int kMinBlocks = kTier.min_blocks > 0 ? kTier.min_blocks : 1;
    if constexpr (kTier.kernel == "thread") {
      return with_size<kTier.max_n>(args.n, ThreadLauncher<T>{stream, args});
    } else if constexpr (kTier.kernel == "rows") {
      constexpr int kLanes = 32 / kTier.group;
      constexpr int kSlots = ceil_div(kTier.max_n, kLanes);
      static_assert(kTier.min_n > kLanes * (kSlots - 1), "only the last slot may be ragged");
      if (args.nrhs == 1) {
        return launch_rows<T, kSlots, kLanes, false, kTier.warps, kTier.min_blocks>(stream, args);
      }
      return launch_rows<T, kSlots, kLanes, true, kTier.warps, kTier.min_blocks>(stream, args);
    } else if constexpr (kTier.kernel == "beside") {
      constexpr int kWorkers = kTier.warps - 2;
      static_assert(kTier.max_n <= LeftFactor<kWorkers, RhsPlace::kWarp>::kMaxN);
      return launch_left<kWorkers, RhsPlace::kWarp, true, kMinBlocks>(stream, args);
    } else if constexpr (kTier.kernel == "left") {
      constexpr int kWorkers = kTier.warps - 1;
      static_assert(kTier.max_n <= LeftFactor<kWorkers, RhsPlace::kRowTile>::kMaxN);
      if constexpr (kTier.max_n > kMaxLeftProductsN) {
        if (args.nrhs == 1) {
          return launch_left<kWorkers, RhsPlace::kRowTile, false, kMinBlocks>(stream, args);
        }
      }
      return launch_left<kWorkers, RhsPlace::kRowTile, true, kMinBlocks>(stream, args);
    } else {
      constexpr int kTiles = ceil_div(kTier.max_n, 8);
      static_assert(kTier.min_n > 8 * (kTiles - 1), "only the last row of tiles may be ragged");
      if constexpr (kTier.kernel == "tiles") {
        if (args.nrhs == 1) {
          return launch<solve_pos_tiles_kernel<T, kTiles>>(
              stream, args.batch, TileColumns<T, kTiles>::kMatrices, 32,
              solve_pos_tiles_shared_bytes<T, kTiles>(), args);
        }
      }
      if constexpr (std::is_same_v<T, double>) {
        return launch<solve_pos_resident_kernel<kTiles>>(
            stream, args.batch, 1, 32, ResidentFactor<kTiles>::kSharedBytes, args);
      } else {
        // Complex kernels are larger and slower to compile: one for all sizes of a tier.
        if constexpr (!kIsComplex<T>) {
          if (args.n == 8 * kTiles) {
            return launch_warp<T, kTiles, kTier.group, kTier.redundant, true, kTier.warps,
                               kMinBlocks>(stream, args);
          }
        }
        return launch_warp<T, kTiles, kTier.group, kTier.redundant, false, kTier.warps, kMinBlocks>(
            stream, args);
      }
    }
  }
};

}  // namespace

// problem.fast changes nothing: the correctly rounded roots cost nothing that was measurable.
template <class T>
cudaError_t solve_pos(cudaStream_t stream, const SolvePosProblem& problem) {
  const SolvePosArguments<T> args{static_cast<const T*>(problem.a),
                                  static_cast<const T*>(problem.b),
                                  static_cast<T*>(problem.x),
                                  problem.info,
                                  problem.batch,
                                  problem.nrhs,
                                  static_cast<int>(problem.n),
                                  !problem.lower,
                                  problem.a_map,
                                  problem.b_map};
  const Call call{"solve_pos",  kDTypeOf<T>,  problem.n,
                  problem.nrhs, problem.fast, /*capability=*/0};
  return launch_tier<T>(call, problem.kernel, TierLauncher<T>{stream, args});
}

template cudaError_t solve_pos<JAX_BATCHED_SCALAR>(cudaStream_t, const SolvePosProblem&);

}  // namespace jax_batched::cuda
