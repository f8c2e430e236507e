// From a row of a table to the kernel of an operation on LU.
#pragma once

#include <algorithm>

#include "ffi/cuda/launch.h"
#include "ffi/cuda/lu/block.cuh"
#include "ffi/cuda/lu/lanes.cuh"
#include "ffi/cuda/lu/policy.h"
#include "ffi/cuda/lu/thread.cuh"
#include "ffi/cuda/runtime/dispatch.cuh"
#include "ffi/cuda/runtime/launch.cuh"

namespace jax_batched::cuda {

template <class P, class T>
struct LuThreadLauncher {
  cudaStream_t stream;
  const P& p;

  template <int kN>
  cudaError_t run() const {
    return launch_kernel<lu_thread_kernel<P, T, kN>>(stream, p.batch, 32, 32,
                                                     lu_thread_bytes<T, kN>(), p);
  }
};

inline int rows_of(const LuProblem& p) { return p.m; }
template <class P>
int rows_of(const P& p) {
  return p.n;
}
inline int64_t rhs_of(const SolveGenProblem& p) { return p.nrhs; }
template <class P>
int64_t rhs_of(const P&) {
  return 0;
}

template <class P>
inline constexpr LuUse kLuUse = std::is_same_v<P, LuProblem>         ? LuUse::kFactors
                                : std::is_same_v<P, SolveGenProblem> ? LuUse::kSolve
                                : std::is_same_v<P, InvProblem>      ? LuUse::kInverse
                                                                     : LuUse::kDeterminant;

template <class P, class T, const auto& kRows>
struct LuLauncher {
  static constexpr const auto& kTable = kRows;
  cudaStream_t stream;
  const P& p;

  template <size_t kRow>
  cudaError_t row() const {
    constexpr auto kShape = kShapeOf<kTable, kRow>;
    return launch_shape<kTable[kRow].max_n, kShape>(kShape);
  }

 private:
  static constexpr LuUse kUse = kLuUse<P>;

  template <int kMaxN, LuThreadShape kShape>
  cudaError_t launch_shape(LuThreadShape) const {
    if (rows_of(p) != p.n) return kDoesNotFit;
    return with_size<kMaxN>(p.n, LuThreadLauncher<P, T>{stream, p});
  }

  template <int kMaxN, LuLanesShape kShape>
  cudaError_t launch_shape(LuLanesShape) const {
    constexpr int kLanes = kShape.lanes, kEach = kShape.rows, kColumns = kShape.columns;
    constexpr int kCap = kShape.min_blocks, kRoll = kShape.roll;
    const auto launch = [&](auto kernel) {
      return launch_kernel<decltype(kernel)::value>(stream, p.batch, 32 / kLanes, 32, 0, p);
    };
    if constexpr (kUse == LuUse::kFactors) {
      return launch(Kernel<lu_lanes_kernel<T, kLanes, kEach, kColumns, kRoll, kCap>>{});
    } else if constexpr (kUse == LuUse::kInverse) {
      return launch(Kernel<inv_lanes_kernel<T, kLanes, kEach, kColumns, kRoll, kCap>>{});
    } else if constexpr (kUse == LuUse::kDeterminant) {
      return launch(Kernel<determinant_lanes_kernel<P, T, kLanes, kEach, kColumns, kRoll, kCap>>{});
    } else {
      return p.nrhs == 1
                 ? launch(
                       Kernel<solve_gen_lanes_kernel<T, kLanes, kEach, kColumns, kRoll, 1, kCap>>{})
                 : launch(Kernel<
                          solve_gen_lanes_kernel<T, kLanes, kEach, kColumns, kRoll, 4, kCap>>{});
    }
  }

  template <int kMaxN, LuBlockSharedShape kShape>
  cudaError_t launch_shape(LuBlockSharedShape) const {
    constexpr int kThreads = kShape.threads, kWarps = kShape.panel_warps;
    constexpr int kCap = kShape.min_blocks;
    constexpr int kSlots = ceil_div(kMaxN, 32 * kWarps), kWidth = kShape.width;
    using Lu = BlockLu<T, kThreads, kWarps, kSlots, kWidth, kUse, LuPlace::kShared>;
    const auto launch = [&](auto kernel) {
      return launch_kernel<decltype(kernel)::value>(
          stream, p.batch, 1, kThreads, Lu::bytes(rows_of(p), p.n, static_cast<int>(rhs_of(p))), p);
    };
    if constexpr (kUse == LuUse::kFactors) {
      return launch(
          Kernel<lu_block_kernel<T, kThreads, kWarps, kSlots, kWidth, kCap, LuPlace::kShared>>{});
    } else if constexpr (kUse == LuUse::kInverse) {
      return launch(Kernel<inv_block_kernel<T, kThreads, kWarps, kSlots, kWidth, kCap>>{});
    } else if constexpr (kUse == LuUse::kDeterminant) {
      return launch(
          Kernel<determinant_block_kernel<P, T, kThreads, kWarps, kSlots, kWidth, kCap>>{});
    } else {
      if (p.nrhs > kMaxFusedRhs) return cudaErrorInvalidValue;
      return launch(Kernel<solve_gen_block_kernel<T, kThreads, kWarps, kSlots, kWidth, kCap>>{});
    }
  }

  template <int kMaxN, LuBlockShape kShape>
  cudaError_t launch_shape(LuBlockShape) const {
    return launch_far<kMaxN, kShape, LuPlace::kFar>();
  }
  template <int kMaxN, LuTallShape kShape>
  cudaError_t launch_shape(LuTallShape) const {
    if (p.n % kVector<T> != 0 || p.n > kMaxTallColumns) return kDoesNotFit;
    return launch_far<kMaxN, kShape, LuPlace::kTall>();
  }

  template <int kMaxN, auto kShape, LuPlace kPlace>
  cudaError_t launch_far() const {
    if constexpr (kUse == LuUse::kFactors) {
      constexpr int kThreads = kShape.threads;
      constexpr int kWarps = kShape.panel_warps, kSlots = ceil_div(kMaxN, 32 * kWarps);
      constexpr int kWidth = kShape.width, kCap = kShape.min_blocks;
      using Lu = BlockLu<T, kThreads, kWarps, kSlots, kWidth, kUse, kPlace>;
      return launch_kernel<lu_block_kernel<T, kThreads, kWarps, kSlots, kWidth, kCap, kPlace>>(
          stream, p.batch, 1, kThreads, Lu::bytes(p.m, p.n, 0), p);
    } else {
      return cudaErrorInvalidValue;
    }
  }

  template <auto kKernel>
  struct Kernel {
    static constexpr auto value = kKernel;
  };
};

template <class T, const auto& kTable, class P>
cudaError_t launch_lu(cudaStream_t stream, const P& p) {
  const Call call{.operation = P::kName,
                  .dtype = kDTypeOf<T>,
                  .n = std::max(rows_of(p), p.n),
                  .nrhs = std::max<int64_t>(rhs_of(p), 1)};
  return launch_row<T>(call, p.kernel, LuLauncher<P, T, kTable>{stream, p});
}

}  // namespace jax_batched::cuda
