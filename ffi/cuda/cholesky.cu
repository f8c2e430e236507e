#include "ffi/cuda/cholesky.h"

#include "ffi/cuda/cholesky.cuh"
#include "ffi/cuda/tiers.h"
#include "ffi/cuda/tile/dispatch.cuh"
#include "ffi/cuda/tile/launch.cuh"

namespace jax_batched::cuda {
namespace {

// What the thread tier and the warp tier need to launch one of their kernels.
template <class S>
struct ThreadLauncher {
  cudaStream_t stream;
  const CholeskyArguments<S>& args;

  template <int kN>
  cudaError_t run() const {
    return launch<cholesky_thread_kernel<S, kN>>(stream, args.batch, 32, 32,
                                                 cholesky_thread_shared_bytes<S, kN>(), args);
  }
};

// Whether the loop over panels stays a loop. Unrolled, the panels of many tiles overflow the
// instruction cache: of 9 tiles where rows need their bounds checked, of 13 also where they do not.
template <class S, int kTiles, bool kExact>
inline constexpr bool kRolled =
    std::is_same_v<S, float> && (kTiles > 12 || (kTiles > 8 && !kExact));

template <class S, int kTiles, int kGroup, bool kExact, int kWarps, int kMinBlocks>
cudaError_t launch_warp(cudaStream_t stream, const CholeskyArguments<S>& args) {
  if constexpr (kRolled<S, kTiles, kExact>) {
    static_assert(kGroup == 1 && kWarps == 1);
    return launch<cholesky_warp_rolled_kernel<S, kTiles, kExact, kMinBlocks>>(
        stream, args.batch, 1, 32, cholesky_warp_shared_bytes<S, kTiles, 1, kExact, 1>(), args);
  } else {
    // The cap of a row of more than 8 tiles is for rolled kernels: unrolled ones would spill.
    constexpr int kCap = kTiles > 8 ? 1 : kMinBlocks;
    return launch<cholesky_warp_kernel<S, kTiles, kGroup, kExact, kWarps, kCap>>(
        stream, args.batch, kWarps * kGroup, 32 * kWarps,
        cholesky_warp_shared_bytes<S, kTiles, kGroup, kExact, kWarps>(), args);
  }
}

template <class S, int kSlots, bool kExact, int kMinBlocks>
cudaError_t launch_rows(cudaStream_t stream, const CholeskyArguments<S>& args) {
  using Stage = StoredRows<S, kSlots, kExact>;
  return launch<cholesky_rows_kernel<S, kSlots, kExact, kMinBlocks>>(
      stream, args.batch, Stage::kMatrices, 32, Stage::kBytes, args);
}

template <class S>
struct TierLauncher {
  static constexpr const auto& kTable = kCholeskyTiers;
  cudaStream_t stream;
  const CholeskyArguments<S>& args;

  template <size_t kRow>
  cudaError_t tier() const {
    constexpr Tier kTier = kTable[kRow];
    constexpr int kMinBlocks = kTier.min_blocks > 0 ? kTier.min_blocks : 1;
    if constexpr (kTier.kernel == "thread") {
      return with_size<kTier.max_n>(args.n, ThreadLauncher<S>{stream, args});
    } else if constexpr (kTier.kernel == "rows") {
      constexpr int kSlots = ceil_div(kTier.max_n, 8);
      static_assert(kTier.min_n > 8 * (kSlots - 1), "only the last slot may be ragged");
      return args.n == 8 * kSlots ? launch_rows<S, kSlots, true, kMinBlocks>(stream, args)
                                  : launch_rows<S, kSlots, false, kMinBlocks>(stream, args);
    } else if constexpr (kTier.kernel == "warp") {
      constexpr int kTiles = ceil_div(kTier.max_n, 8);
      static_assert(kTier.min_n > 8 * (kTiles - 1), "only the last row of tiles may be ragged");
      const auto launch_tiles = [&](auto exact) {
        return launch_warp<S, kTiles, kTier.group, decltype(exact)::value, kTier.warps, kMinBlocks>(
            stream, args);
      };
      if constexpr (kTier.min_n == 8 * kTiles) {
        return launch_tiles(std::true_type{});
      } else {
        // Large kernels of 16-bit elements are not limited by loads and stores: one for all sizes
        // of a tier.
        if constexpr (!is_storage_only(kDTypeOf<S>) || kTiles <= 8) {
          if (args.n == 8 * kTiles) return launch_tiles(std::true_type{});
        }
        return launch_tiles(std::false_type{});
      }
    } else if constexpr (kTier.kernel == "halves") {
      constexpr int kTiles = ceil_div(kTier.max_n, 16);
      static_assert(kTier.min_n > 8 * kTiles, "both halves have rows");
      return launch<cholesky_halves_kernel<S, kTiles, kMinBlocks>>(
          stream, args.batch, 1, 32, Halves<S, kTiles>::kElements * sizeof(S), args);
    } else if constexpr (kTier.kernel == "left") {
      using Factor = LeftFactor<kTier.warps - 1, RhsPlace::kNone>;
      static_assert(kTier.max_n <= Factor::kMaxN);
      return launch<cholesky_left_kernel<kTier.warps - 1, kMinBlocks>>(
          stream, args.batch, 1, Factor::kThreads, Factor::shared_bytes(args.n), args);
    } else {
      return with_access(args.upper, args.n % kVector<S> == 0, [&](auto access) {
        constexpr Access kAccess = decltype(access)::value;
        constexpr int kRowTiles =
            kTier.row_tiles > 0 ? kTier.row_tiles : kUsualRowTiles<S, kTier.fast>;
        constexpr int kBlocks = kAccess == Access::kElements && kTier.ragged_blocks > 0
                                    ? kTier.ragged_blocks
                                    : kMinBlocks;
        using Factor = BlockFactor<S, kTier.depth, kAccess, kTier.prefetch, kTier.fast, kRowTiles>;
        return launch<cholesky_block_kernel<S, kTier.depth, kAccess, kTier.prefetch, kTier.fast,
                                            kRowTiles, kBlocks>>(
            stream, args.batch, 1, Factor::kThreads, Factor::kSharedBytes, args);
      });
    }
  }
};

}  // namespace

// Where no row of the table serves problem.fast alone it changes nothing: correctly rounded roots
// take no longer.
template <class S>
cudaError_t cholesky(cudaStream_t stream, const CholeskyProblem& problem) {
  const CholeskyArguments<S> args{static_cast<const S*>(problem.a),
                                  static_cast<S*>(problem.l),
                                  problem.info,
                                  problem.batch,
                                  static_cast<int>(problem.n),
                                  problem.upper,
                                  problem.symmetrize};
  const Call call{"cholesky",      table_dtype(kDTypeOf<S>), problem.n, 1, problem.fast,
                  /*capability=*/0};
  return launch_tier<S>(call, problem.kernel, TierLauncher<S>{stream, args});
}

template cudaError_t cholesky<JAX_BATCHED_SCALAR>(cudaStream_t, const CholeskyProblem&);

}  // namespace jax_batched::cuda
