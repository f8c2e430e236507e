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

template <class T, int kTiles, int kMinBlocks>
cudaError_t launch_warp(cudaStream_t stream, const SolvePosArguments<T>& args) {
  return launch<solve_pos_warp_kernel<T, kTiles, kMinBlocks>>(
      stream, args.batch, 1, 32, solve_pos_warp_shared_bytes<T, kTiles>(), args);
}

template <class T, int kSlots, bool kMany, int kMinBlocks>
cudaError_t launch_rows(cudaStream_t stream, const SolvePosArguments<T>& args) {
  return launch<solve_pos_rows_kernel<T, kSlots, kMany, kMinBlocks>>(
      stream, args.batch, Rows<T, kSlots>::kMatrices, 32, solve_pos_rows_shared_bytes<T, kSlots>(),
      args);
}

template <class T, int kTiles, bool kExact, int kMinBlocks>
cudaError_t launch_rolled(cudaStream_t stream, const SolvePosArguments<T>& args) {
  return launch<solve_pos_warp_rolled_kernel<T, kTiles, kExact, kMinBlocks>>(
      stream, args.batch * args.nrhs, 1, 32, solve_pos_warp_shared_bytes<T, kTiles>(), args);
}

template <class S, int kSlots, bool kExact, int kMinBlocks>
cudaError_t launch_stored_rows(cudaStream_t stream, const SolvePosArguments<S>& args) {
  using Stage = StoredRows<S, kSlots, kExact>;
  return launch<solve_pos_stored_rows_kernel<S, kSlots, kExact, kMinBlocks>>(
      stream, args.batch, Stage::kMatrices, 32, Stage::kBytes, args);
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
    static_assert(kTier.warps == 1 || kTier.kernel == "left", "a warp a block");
    if constexpr (kTier.kernel == "thread") {
      return with_size<kTier.max_n>(args.n, ThreadLauncher<S>{stream, args});
    } else if constexpr (kTier.kernel == "rows") {
      constexpr int kSlots = ceil_div(kTier.max_n, 8);
      static_assert(kTier.min_n > 8 * (kSlots - 1), "only the last slot may be ragged");
      if constexpr (is_storage_only(kDTypeOf<S>)) {
        return args.n == 8 * kSlots
                   ? launch_stored_rows<S, kSlots, true, kMinBlocks>(stream, args)
                   : launch_stored_rows<S, kSlots, false, kMinBlocks>(stream, args);
      } else if (args.nrhs == 1) {
        return launch_rows<S, kSlots, false, kTier.min_blocks>(stream, args);
      } else if constexpr (kManyByRows<S, kSlots>) {
        return launch_rows<S, kSlots, true, kTier.min_blocks>(stream, args);
      } else {
        return launch_warp<S, kSlots, 1>(stream, args);
      }
    } else if constexpr (kTier.kernel == "left") {
      constexpr RhsPlace kPlace = kTier.rhs_warp ? RhsPlace::kWarp : RhsPlace::kRowTile;
      constexpr int kWorkers = kTier.warps - (kTier.rhs_warp ? 2 : 1);
      static_assert(kTier.max_n <= LeftFactor<kWorkers, kPlace>::kMaxN);
      if constexpr (kPlace == RhsPlace::kRowTile && kTier.max_n > kMaxLeftProductsN) {
        if (args.nrhs == 1) return launch_left<kWorkers, kPlace, false, kMinBlocks>(stream, args);
      }
      return launch_left<kWorkers, kPlace, true, kMinBlocks>(stream, args);
    } else if constexpr (kTier.kernel == "halves") {
      constexpr int kTiles = ceil_div(kTier.max_n, 16);
      static_assert(kTier.min_n > 8 * kTiles, "both halves have rows");
      if constexpr (kIsComplex<S> && kTier.max_n <= kMaxComplexWarpN<S>) {
        static_assert(kTier.min_n > kTier.max_n - 8);
        if (args.nrhs > 1) return launch_warp<S, kTier.max_n / 8, 1>(stream, args);
      }
      return launch<solve_pos_halves_kernel<S, kTiles, kMinBlocks>>(
          stream, args.batch * args.nrhs, 1, 32, Halves<S, kTiles>::kSolveElements * sizeof(S),
          args);
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
        return one_by_one<kMinBlocks, kTiles>();
      } else {
        // With several right-hand sides the substitutions count; beyond 12 tiles solve_pos is
        // factor and solve then.
        if constexpr (kTiles > 8) {
          if (args.nrhs == 1) return one_by_one<kMinBlocks, kTiles>();
        }
        // The cap of such a row is for the rolled kernel: the unrolled one would spill.
        return launch_warp<S, kTiles, (kTiles > 8 ? 1 : kMinBlocks)>(stream, args);
      }
    }
  }

 private:
  // One right-hand side at a time, by the kernel that keeps the loop over its panels: unrolled,
  // they overflow the instruction cache.
  template <int kMinBlocks, int kTiles>
  cudaError_t one_by_one() const {
    return args.n == 8 * kTiles ? launch_rolled<S, kTiles, true, kMinBlocks>(stream, args)
                                : launch_rolled<S, kTiles, false, kMinBlocks>(stream, args);
  }
};

}  // namespace

// problem.fast changes nothing: correctly rounded roots take no longer.
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
