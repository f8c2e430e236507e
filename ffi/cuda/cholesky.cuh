// Cholesky kernels: one thread, one warp or one block per matrix.
//
// All of them write the whole n x n result (zeros in the triangle without data, NaN in the other if
// the matrix is not positive definite) and info, in the same pass over memory as the factorization.
#pragma once

#include <cstdint>

#include "ffi/cuda/tile/block.cuh"
#include "ffi/cuda/tile/fragment.cuh"
#include "ffi/cuda/tile/panel.cuh"
#include "ffi/cuda/tile/staging.cuh"
#include "ffi/cuda/tile/thread.cuh"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

template <class T>
struct CholeskyArguments {
  const T* a;
  T* l;
  int32_t* info;
  int64_t batch;
  int n;
  bool upper;
  bool symmetrize;
};

// One thread per matrix of exactly kN rows, in registers; a warp moves its 32 matrices together.
template <class T, int kN>
__global__ void __launch_bounds__(32) cholesky_thread_kernel(const CholeskyArguments<T> args) {
  using Stage = RecordStage<T, kN * kN>;
  T* stage = reinterpret_cast<T*>(dynamic_shared);
  const int lane = threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 32;
  const int records = static_cast<int>(min(int64_t{32}, args.batch - first));
  Stage::load(stage, args.a + first * (kN * kN), records, lane);
  __syncwarp();
  if (lane < records) {
    T* own = stage + lane * Stage::kStride;
    Triangle<T, kN> l;
    Real<T> inverse[kN];
    load_triangle<T, kN>(l, own, args.upper, args.symmetrize);
    const int info = factor_triangle<T, kN>(l, inverse);
    if (info != 0) {
      for_each_entry<kN>([&](int i, int j) { l[i][j] = quiet_nan<T>(); });
    }
    store_triangle<T, kN>(own, l, args.upper);
    args.info[first + lane] = info;
  }
  __syncwarp();
  Stage::store(args.l + first * (kN * kN), stage, records, lane);
}

template <class T, int kN>
constexpr size_t cholesky_thread_shared_bytes() {
  return RecordStage<T, kN * kN>::kElements * sizeof(T);
}

// One warp for kGroup matrices of 8 * kTiles - 7 .. 8 * kTiles rows (kExact: of 8 * kTiles), held
// in registers as tiles (fragment.cuh); panel by panel (panel.cuh), flushing 8 rows after each.
template <class T, int kTiles, int kGroup, bool kRedundant, bool kExact, int kWarps, int kMinBlocks>
__global__ void __launch_bounds__(32 * kWarps, kMinBlocks)
    cholesky_warp_kernel(const CholeskyArguments<T> args) {
  using Step = Panel<T, kTiles, kGroup>;
  using Rows = RowStage<T, kTiles, kExact>;
  constexpr int kElements = Step::kElements + Rows::kElements;  // shared, per matrix
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kGroup;
  if (first >= args.batch) return;  // a whole warp; there are no block-wide barriers
  const int n = kExact ? 8 * kTiles : args.n;
  T* shared = reinterpret_cast<T*>(dynamic_shared) + warp * (kGroup * kElements);
  T* stage = shared + Step::kElements;  // of matrix 0; that of matrix q lies q * kElements further

  Fragment<T, kTiles> m[kGroup];
#pragma unroll
  for (int q = 0; q < kGroup; ++q) {
    const int64_t index = min(first + q, args.batch - 1);
    load_fragment<kExact, T, kTiles>(m[q], args.a + index * n * n, n, args.upper, args.symmetrize,
                                     lane);
    Rows::clear(stage + q * kElements, lane);
  }
  // In the panel phase this lane works on row r of matrix `mine`.
  const int mine = lane / Step::kLanes, r = lane % Step::kLanes;
  T* own = shared + mine * kElements;
  int info = 0;
#pragma unroll
  for (int p = 0; p < kTiles; ++p) {
#pragma unroll
    for (int q = 0; q < kGroup; ++q) Step::publish(shared + q * kElements, m[q], p, lane);
    __syncwarp();
    T x[Step::kSlots][8], none[Step::kSlots];
    Step::load_rows(x, own, p, r);
    const int steps = kExact || p < kTiles - 1 ? 8 : n - 8 * p;
    Real<T> inverse, root;
    if constexpr (kRedundant) {
      root = Step::template factor_redundant<false>(x, none, own, nullptr, p, steps, r, inverse);
    } else {
      root = Step::template factor<false>(x, none, p, steps, r, inverse);
    }
    Step::template repair<false>(x, none, own, nullptr, p, steps, lane, root, inverse, info);
    Step::store_columns(own, x, p, r);
    __syncwarp();
#pragma unroll
    for (int q = 0; q < kGroup; ++q) {
      Step::read_back(m[q], shared + q * kElements, p, p, lane);
      if (first + q < args.batch) {
        const int64_t offset = (first + q) * n * n;
        Rows::flush(stage + q * kElements, m[q], p, args.l + offset, n,
                    kExact ? 0 : static_cast<int>(offset % kVector<T>), args.upper, lane);
      }
      Step::update(m[q], shared + q * kElements, p, lane);
    }
    __syncwarp();
  }
#pragma unroll
  for (int q = 0; q < kGroup; ++q) {
    if (first + q >= args.batch) continue;
    const int failed = __shfl_sync(kFullWarp, info, q * Step::kLanes);
    if (lane == 0) args.info[first + q] = failed;
    if (failed) fill_failed(args.l + (first + q) * n * n, n, args.upper, lane, 32);
  }
}

template <class T, int kTiles, int kGroup, bool kExact, int kWarps>
constexpr size_t cholesky_warp_shared_bytes() {
  return size_t{kWarps} * kGroup * sizeof(T) *
         (Panel<T, kTiles, kGroup>::kElements + RowStage<T, kTiles, kExact>::kElements);
}

// One block per matrix of any size.
template <class T, int kDepth, Access kAccess, bool kPrefetch, int kMinBlocks>
__global__ void __launch_bounds__((BlockFactor<T, kDepth, kAccess, kPrefetch>::kThreads),
                                  kMinBlocks)
    cholesky_block_kernel(const CholeskyArguments<T> args) {
  using Factor = BlockFactor<T, kDepth, kAccess, kPrefetch>;
  const int n = args.n;
  const int64_t offset = static_cast<int64_t>(blockIdx.x) * n * n;
  T* l = args.l + offset;
  const int info =
      Factor::factor(args.a + offset, l, reinterpret_cast<T*>(dynamic_shared), n, args.symmetrize);
  if (threadIdx.x == 0) args.info[blockIdx.x] = info;
  if (info) fill_failed(l, n, args.upper, threadIdx.x, Factor::kThreads);
}

}  // namespace jax_batched::cuda
