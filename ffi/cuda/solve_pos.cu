#include "ffi/cuda/solve_pos.h"

#include "ffi/cuda/solve_pos.cuh"
#include "ffi/cuda/tiers.h"
#include "ffi/cuda/tile/dispatch.cuh"
#include "ffi/cuda/tile/launch.cuh"

namespace jax_batched::cuda {
namespace {

template <class S>
struct ThreadLauncher {
  cudaStream_t stream;
  const SolvePosArguments<S>& args;

  template <int kN>
  cudaError_t run() const {
    return launch<solve_pos_thread_kernel<S, kN>>(stream, args.batch, 32, 32,
                                                  solve_pos_thread_shared_bytes<S, kN>(), args);
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

template <class T, int kTiles, bool kExact, int kWarps, int kMinBlocks>
cudaError_t launch_rolled(cudaStream_t stream, const SolvePosArguments<T>& args) {
  return launch<solve_pos_warp_rolled_kernel<T, kTiles, kExact, kWarps, kMinBlocks>>(
      stream, args.batch * args.nrhs, kWarps, 32 * kWarps,
      solve_pos_warp_shared_bytes<T, kTiles, 1, kWarps>(), args);
}

template <class S, int kSlots, int kLanes, bool kExact, int kWarps, int kMinBlocks>
cudaError_t launch_stored_rows(cudaStream_t stream, const SolvePosArguments<S>& args) {
  return launch<solve_pos_stored_rows_kernel<S, kSlots, kLanes, kExact, kWarps, kMinBlocks>>(
      stream, args.batch, kWarps * (32 / kLanes), 32 * kWarps,
      solve_pos_stored_rows_shared_bytes<S, kSlots, kLanes, kExact, kWarps>(), args);
}

template <int kWorkers, RhsPlace kRhsPlace, bool kProducts, int kMinBlocks>
cudaError_t launch_left(cudaStream_t stream, const SolvePosArguments<double>& args) {
  using Factor = LeftFactor<kWorkers, kRhsPlace>;
  return launch<solve_pos_left_kernel<kWorkers, kRhsPlace, kProducts, kMinBlocks>>(
      stream, args.batch, 1, Factor::kThreads, Factor::shared_bytes(args.n), args);
}

// Whether "rows" takes several right-hand sides: beside larger complex matrices a lane has no
// registers for them.
template <class S, int kSlots>
inline constexpr bool kManyByRows = !kIsComplex<S> || kSlots * (kSlots + 1) / 2 * sizeof(S) <= 48;

// Complex factors up to this n fit the registers of a warp, which solves several right-hand sides.
template <class S>
inline constexpr int kMaxComplexWarpN = sizeof(Real<S>) == 4 ? 64 : 48;

// Up to this n the way back of one right-hand side in "left" is faster as products.
inline constexpr int kMaxLeftProductsN = 88;

template <class S>
struct TierLauncher {
  static constexpr const auto& kTable = kSolvePosTiers;
  cudaStream_t stream;
  const SolvePosArguments<S>& args;

  template <size_t kRow>
  cudaError_t tier() const {
    constexpr Tier kTier = kTable[kRow];
    constexpr int kMinBlocks = kTier.min_blocks > 0 ? kTier.min_blocks : 1;
    if constexpr (kTier.kernel == "thread") {
      return with_size<kTier.max_n>(args.n, ThreadLauncher<S>{stream, args});
    } else if constexpr (kTier.kernel == "rows") {
      constexpr int kLanes = 32 / kTier.group;
      constexpr int kSlots = ceil_div(kTier.max_n, kLanes);
      static_assert(kTier.min_n > kLanes * (kSlots - 1), "only the last slot may be ragged");
      if constexpr (is_storage_only(kDTypeOf<S>)) {
        return args.n == kLanes * kSlots
                   ? launch_stored_rows<S, kSlots, kLanes, true, kTier.warps, kMinBlocks>(stream,
                                                                                          args)
                   : launch_stored_rows<S, kSlots, kLanes, false, kTier.warps, kMinBlocks>(stream,
                                                                                           args);
      } else if (args.nrhs == 1) {
        return launch_rows<S, kSlots, kLanes, false, kTier.warps, kTier.min_blocks>(stream, args);
      } else if constexpr (kManyByRows<S, kSlots>) {
        return launch_rows<S, kSlots, kLanes, true, kTier.warps, kTier.min_blocks>(stream, args);
      } else {
        static_assert(kLanes == 8, "slots are the tiles of the warp kernel");
        return launch_warp<S, kSlots, 1, false, false, 1, 1>(stream, args);
      }
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
    } else if constexpr (kTier.kernel == "halves") {
      constexpr int kTiles = ceil_div(kTier.max_n, 16);
      static_assert(kTier.min_n > 8 * kTiles, "both halves have rows");
      if constexpr (kIsComplex<S> && kTier.max_n <= kMaxComplexWarpN<S>) {
        static_assert(kTier.min_n > kTier.max_n - 8);
        if (args.nrhs > 1) {
          return launch_warp<S, kTier.max_n / 8, 1, false, false, kTier.warps, 1>(stream, args);
        }
      }
      return launch<solve_pos_halves_kernel<S, kTiles, kTier.warps, kMinBlocks>>(
          stream, args.batch * args.nrhs, kTier.warps, 32 * kTier.warps,
          solve_pos_halves_shared_bytes<S, kTiles, kTier.warps>(), args);
    } else {
      constexpr int kTiles = ceil_div(kTier.max_n, 8);
      static_assert(kTier.min_n > 8 * (kTiles - 1), "only the last row of tiles may be ragged");
      if constexpr (kTier.kernel == "tiles") {
        if (args.nrhs == 1) {
          return launch<solve_pos_tiles_kernel<S, kTiles>>(
              stream, args.batch, TileColumns<S, kTiles>::kMatrices, 32,
              solve_pos_tiles_shared_bytes<S, kTiles>(), args);
        }
      }
      if constexpr (std::is_same_v<S, double>) {
        return launch<solve_pos_resident_kernel<kTiles>>(
            stream, args.batch, 1, 32, ResidentFactor<kTiles>::kSharedBytes, args);
      } else if constexpr (kTiles > 12) {
        return one_by_one<kTier.warps, kMinBlocks, kTiles>();
      } else {
        // With several right-hand sides the substitutions count; beyond 12 tiles solve_pos is
        // factor and solve then.
        if constexpr (kTiles > 8) {
          if (args.nrhs == 1) return one_by_one<kTier.warps, kMinBlocks, kTiles>();
        }
        // The cap of such a row is for the rolled kernel: the unrolled one would spill.
        constexpr int kCap = kTiles > 8 ? 1 : kMinBlocks;
        // Complex kernels are larger and slower to compile, and so are those of several right-hand
        // sides: one for all sizes of a tier.
        if constexpr (!kIsComplex<S> && kTiles <= 8 && kTier.kernel == "warp") {
          if (args.n == 8 * kTiles) {
            return launch_warp<S, kTiles, kTier.group, kTier.redundant, true, kTier.warps, kCap>(
                stream, args);
          }
        }
        return launch_warp<S, kTiles, kTier.group, kTier.redundant, false, kTier.warps, kCap>(
            stream, args);
      }
    }
  }

 private:
  // One right-hand side at a time, by the kernel that keeps the loop over its panels: unrolled,
  // they overflow the instruction cache.
  template <int kWarps, int kMinBlocks, int kTiles>
  cudaError_t one_by_one() const {
    return args.n == 8 * kTiles ? launch_rolled<S, kTiles, true, kWarps, kMinBlocks>(stream, args)
                                : launch_rolled<S, kTiles, false, kWarps, kMinBlocks>(stream, args);
  }
};

}  // namespace

// problem.fast changes nothing: the correctly rounded roots cost nothing that was measurable.
template <class S>
cudaError_t solve_pos(cudaStream_t stream, const SolvePosProblem& problem) {
  if (is_storage_only(kDTypeOf<S>) && problem.nrhs != 1) return cudaErrorInvalidValue;
  const SolvePosArguments<S> args{static_cast<const S*>(problem.a),
                                  static_cast<const S*>(problem.b),
                                  static_cast<S*>(problem.x),
                                  problem.info,
                                  problem.batch,
                                  problem.nrhs,
                                  static_cast<int>(problem.n),
                                  !problem.lower,
                                  problem.a_map,
                                  problem.b_map};
  const Call call{"solve_pos",  table_dtype(kDTypeOf<S>), problem.n, problem.nrhs,
                  problem.fast, /*capability=*/0};
  return launch_tier<S>(call, problem.kernel, TierLauncher<S>{stream, args});
}

template cudaError_t solve_pos<JAX_BATCHED_SCALAR>(cudaStream_t, const SolvePosProblem&);

}  // namespace jax_batched::cuda
