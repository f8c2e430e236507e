// Cholesky kernels: one thread, one warp or one block per matrix.
//
// All of them write the whole n x n result (zeros in the triangle without data, NaN in the other if
// the matrix is not positive definite) and info, in the same pass over memory as the factorization.
//
// Kernels of one warp take `threadIdx.x % 32` for its lane: nvcc does not take from the launch
// bounds that it is less than 32, which decides how far loops over lanes unroll (cholesky
// "warp_shared" of 128 rows: 12 % of the time).
#pragma once

#include <cstdint>
#include <type_traits>

#include "ffi/cuda/cholesky/averages.cuh"
#include "ffi/cuda/cholesky/block.cuh"
#include "ffi/cuda/cholesky/block_shared.cuh"
#include "ffi/cuda/cholesky/panel.cuh"
#include "ffi/cuda/cholesky/stored_lanes.cuh"
#include "ffi/cuda/cholesky/thread.cuh"
#include "ffi/cuda/cholesky/warp_shared.cuh"
#include "ffi/cuda/device/storage.cuh"
#include "ffi/cuda/device/with_constant.cuh"
#include "ffi/cuda/layout/fragment.cuh"
#include "ffi/cuda/layout/staging.cuh"
#include "ffi/problems/cholesky.h"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

// S is the type that elements are stored in (storage.cuh).

// One thread per matrix of exactly kN rows, in registers; a warp moves its 32 matrices together.
template <class S, int kN>
__global__ void __launch_bounds__(32, 1) cholesky_thread_kernel(const CholeskyProblem args) {
  using Stage = MatrixStage<S, kN>;
  using T = Computed<S>;
  S* stage = reinterpret_cast<S*>(dynamic_shared);
  const int lane = threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 32;
  const int records = static_cast<int>(min(int64_t{32}, args.batch - first));
  Stage::load(stage, args.a.at<const S>(first, kN * kN), records, lane);
  __syncwarp();
  if (lane < records) {
    S* own = stage + lane * Stage::kStride;
    Triangle<T, kN> l;
    Real<T> inverse[kN];
    Stage::take(l, own, {args.upper, args.symmetrize});
    const int info = factor_triangle<T, kN>(l, inverse);
    if (info != 0) {
      for_each_entry<kN>([&](int i, int j) { l[i][j] = quiet_nan<T>(); });
    }
    Stage::put(own, l, args.upper);
    args.info[first + lane] = info;
  }
  __syncwarp();
  Stage::store(args.l.at<S>(first, kN * kN), stage, records, lane);
}

template <class S, int kN>
constexpr size_t cholesky_thread_bytes() {
  return MatrixStage<S, kN>::kElements * sizeof(S);
}

// Shared memory of one matrix of the warp kernel: the panel, then rows on their way in or out.
template <class S, int kTiles, int kGroup, bool kExact>
struct CholeskyWarpShared {
  static constexpr int kPanelBytes =
      Panel<Computed<S>, kTiles, kGroup>::kElements * static_cast<int>(sizeof(Computed<S>));
  static constexpr int kBytes =
      kPanelBytes + RowStage<S, kTiles, kExact>::kElements * static_cast<int>(sizeof(S));
};

// What a warp factors. One triangle is read as fragments, whole sectors of it and no others. Both
// triangles, or the short rows of 16-bit elements, go through shared memory, `kArea` elements for
// each matrix.
template <int kArea, class S, class T, int kTiles, bool kExact, int kGroup>
__device__ __forceinline__ void load_matrices(Fragment<T, kTiles> (&m)[kGroup],
                                              const CholeskyProblem& args,
                                              const RowStage<S, kTiles, kExact>& rows, S* shared,
                                              const MatrixRun<S> (&a)[kGroup], int64_t first,
                                              int lane) {
  const auto load_both = [&](bool mean, bool checked = false) {
    load_staged<kGroup, kArea>(m, rows, shared, a, {args.upper, mean, checked}, lane);
  };
  if constexpr (std::is_same_v<S, T>) {
    const int n = rows.n;
    const auto load_triangle = [&](int q, const T* from) {
      load_fragment<kExact ? kTiles : kTiles - 1>(m[q], View<T>::square(from, n),
                                                  {args.upper, false}, 0, 0, lane);
    };
    constexpr bool kAveragesAreMany = kTiles * (kTiles + 1) > (kIsComplex<T> ? 40 : 80);
    if (!args.symmetrize) {
#pragma unroll
      for (int q = 0; q < kGroup; ++q) load_triangle(q, a[q].data);
    } else if constexpr (kAveragesAreMany) {
      static_assert(kGroup == 1);
      const Diagonal<T, 32, 8 * kTiles> diagonal(a[0].data, n);
      load_both(true, true);
      if (!__any_sync(kFullWarp, diagonal.is_large())) return;
      T* averages = args.l.at<T>(first, n, n);
      store_averages<32>(a[0].data, averages, n);
      __syncwarp();
      load_triangle(0, averages);
    } else {
      load_both(true);
    }
  } else {
    load_both(args.symmetrize);
  }
}

// One warp for kGroup matrices of 8 * kTiles - 7 .. 8 * kTiles rows (kExact: of 8 * kTiles), held
// in registers as tiles (fragment.cuh); panel by panel (panel.cuh), flushing 8 rows after each.
template <class S, int kTiles, int kGroup, bool kExact, int kWarps, int kMinBlocks>
__global__ void __launch_bounds__(32 * kWarps, kMinBlocks)
    cholesky_warp_kernel(const CholeskyProblem args) {
  using T = Computed<S>;
  using Step = Panel<T, kTiles, kGroup>;
  using Shared = CholeskyWarpShared<S, kTiles, kGroup, kExact>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kGroup;
  if (first >= args.batch) return;  // a whole warp; there are no block-wide barriers
  const RowStage<S, kTiles, kExact> rows(args.n);
  const int n = rows.n;
  unsigned char* shared = dynamic_shared + warp * (kGroup * Shared::kBytes);
  const auto panel = [=](int q) { return reinterpret_cast<T*>(shared + q * Shared::kBytes); };
  const auto stage = [=](int q) {
    return reinterpret_cast<S*>(shared + q * Shared::kBytes + Shared::kPanelBytes);
  };

  Fragment<T, kTiles> m[kGroup];
  MatrixRun<S> a[kGroup];
#pragma unroll
  for (int q = 0; q < kGroup; ++q) {
    a[q] = rows.matrix(args.a.as<const S>(), min(first + q, args.batch - 1), args.batch);
  }
  load_matrices<Shared::kBytes / sizeof(S)>(m, args, rows, reinterpret_cast<S*>(shared), a, first,
                                            lane);
#pragma unroll
  for (int q = 0; q < kGroup; ++q) rows.clear(stage(q), lane);
  // In the panel phase this lane works on row r of matrix `mine`.
  const int mine = lane / Step::kLanes, r = lane % Step::kLanes;
  T* own = panel(mine);
  int info = 0;
#pragma unroll
  for (int p = 0; p < kTiles; ++p) {
#pragma unroll
    for (int q = 0; q < kGroup; ++q) Step::publish(panel(q), m[q], p, lane);
    __syncwarp();
    T x[Step::kSlots][8], none[Step::kSlots];
    Step::load_rows(x, own, p, r);
    const int steps = kExact || p < kTiles - 1 ? 8 : n - 8 * p;
    Real<T> inverse;
    const Real<T> root = Step::template factor<false>(x, none, p, steps, r, inverse);
    Step::template repair<false>(x, none, own, nullptr, p, steps, lane, root, inverse, info);
    Step::store_columns(own, x, p, r);
    __syncwarp();
#pragma unroll
    for (int q = 0; q < kGroup; ++q) {
      Step::read_back(m[q], panel(q), p, p, lane);
      if (first + q < args.batch) {
        rows.flush(stage(q), m[q], p, args.l.at<S>(first + q, n, n), a[q].shift, args.upper, lane);
      }
      Step::update(m[q], panel(q), p, lane);
    }
    __syncwarp();
  }
#pragma unroll
  for (int q = 0; q < kGroup; ++q) {
    if (first + q >= args.batch) continue;
    const int failed = __shfl_sync(kFullWarp, info, q * Step::kLanes);
    if (lane == 0) args.info[first + q] = failed;
    if (failed) fill_failed(args.l.at<S>(first + q, n, n), n, args.upper, lane, 32);
  }
}

template <class S, int kTiles, int kGroup, bool kExact, int kWarps>
constexpr size_t cholesky_warp_bytes() {
  return size_t{kWarps} * kGroup * CholeskyWarpShared<S, kTiles, kGroup, kExact>::kBytes;
}

// The same for one large matrix a warp, whose panels, unrolled, would overflow the instruction
// cache: only what touches the tiles is compiled once per panel.
template <class S, int kTiles, bool kExact, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks)
    cholesky_warp_rolled_kernel(const CholeskyProblem args) {
  using T = Computed<S>;
  using Step = Panel<T, kTiles, 1>;
  using Shared = CholeskyWarpShared<S, kTiles, 1, kExact>;
  const int lane = threadIdx.x % 32;
  const int64_t index = blockIdx.x;
  const RowStage<S, kTiles, kExact> rows(args.n);
  const int n = rows.n;
  T* panel = reinterpret_cast<T*>(dynamic_shared);
  S* stage = reinterpret_cast<S*>(dynamic_shared + Shared::kPanelBytes);
  S* l = args.l.at<S>(index, n, n);

  Fragment<T, kTiles> m[1];
  const MatrixRun<S> a[1] = {rows.matrix(args.a.as<const S>(), index, args.batch)};
  load_matrices<Shared::kBytes / sizeof(S)>(m, args, rows, reinterpret_cast<S*>(dynamic_shared), a,
                                            index, lane);
  rows.clear(stage, lane);
  int info = 0;
  Step::publish(panel, m[0], 0, lane);
  __syncwarp();
#pragma unroll 1
  for (int p = 0; p < kTiles; ++p) {
    T x[Step::kSlots][8], none[Step::kSlots];
    Step::load_rows(x, panel, p, lane);
    Real<T> inverse;
    const Real<T> root = Step::template factor_any<false>(x, none, p, lane, inverse);
    Step::template repair<false>(x, none, panel, nullptr, p, 8, lane, root, inverse, info);
    Step::store_columns(panel, x, p, lane);
    __syncwarp();
    with_constant<0, kTiles - 1>(p, [&](auto constant) {
      constexpr int kPanel = decltype(constant)::value;
      Step::read_back(m[0], panel, kPanel, kPanel, lane);
      rows.put(stage, m[0], kPanel, a[0].shift, args.upper, lane);
      Step::update(m[0], panel, kPanel, lane);
      if constexpr (kPanel + 1 < kTiles) Step::publish(panel, m[0], kPanel + 1, lane);
    });
    __syncwarp();
    rows.store(stage, p, l, a[0].shift, lane);
    __syncwarp();
  }
  if (lane == 0) args.info[index] = info;
  if (info) fill_failed(l, n, args.upper, lane, 32);
}

// One warp per matrix of 8 * kTiles + 1 .. 16 * kTiles rows, as 2x2 blocks (warp_shared.cuh).
template <class T, int kTiles, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks)
    cholesky_warp_shared_kernel(const CholeskyProblem args) {
  using Matrix = WarpSharedFactor<T, kTiles>;
  constexpr int kHalf = Matrix::kHalf;
  const int lane = threadIdx.x % 32, n = args.n;
  const int64_t index = blockIdx.x;
  const bool upper = args.upper;
  T* l = args.l.at<T>(index, n, n);
  bool averaged = false;  // the averages are in the memory of L
  const auto source = [&] {
    const MatrixView<Packed>& from = averaged ? args.l : args.a;
    return View<T>::square(from.at<const T>(index, n, n), n);
  };
  const auto part = [&] { return Part{upper, args.symmetrize && !averaged, true}; };
  const Matrix matrix{reinterpret_cast<T*>(dynamic_shared), n, lane};
  int info = 0;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int first = half * kHalf, columns = half ? n - kHalf : kHalf;
    typename Matrix::Block m;
    const Diagonal<T, 32, 2 * kHalf> diagonal(source().data, part().mean && !half ? n : 0);
    load_fragment<0>(m, source(), part(), first, first, lane);
    if (__any_sync(kFullWarp, diagonal.is_large())) {
      store_averages<32>(source().data, l, n);
      __syncwarp();
      averaged = true;
      half = -1;  // begins again
      continue;
    }
    if (half) matrix.subtract_square(m);
    T* stage = matrix.slot(half * kTiles);  // free beside L11, and beside L22
    const int failed = matrix.template factor<false>(
        m, 1 - half, 1, matrix.inverses(), nullptr,
        [&](auto constant) {
          constexpr int kPanel = decltype(constant)::value;
          if (!upper) matrix.put_tiles(stage, m, kPanel, kPanel);
        },
        [&](int p) {
          const int row = first + 8 * p;
          if (row >= n) return;
          if (!upper) {
            matrix.store_tiles(l, row, first, columns, stage, p);
          } else {
            matrix.store_panel(l, row, first, columns, matrix.slot(1 - half + p), p);
            if (half) matrix.store_zeros(l, row, 0, kHalf);
          }
        });
    if (info == 0 && failed) info = first + failed;
    if (half) break;
    __syncwarp();
    typename Matrix::Block x;
    load_fragment<0, true>(x, source(), part(), kHalf, 0, lane);
    if (!upper) {  // now that the mirror image has been read, where L may be
      __syncwarp();
#pragma unroll 1
      for (int row = 0; row < kHalf; row += 8) matrix.store_zeros(l, row, kHalf, n - kHalf);
    }
    matrix.template solve_below<false>(x);
    stage = matrix.slot(kTiles);
#pragma unroll 1
    for (int p = 0; p < kTiles; ++p) {
      const int row = kHalf + 8 * p;
      if (upper) {
        matrix.store_panel(l, 8 * p, kHalf, n - kHalf, matrix.slot(p), 0);
      } else if (row < n) {
        with_constant<0, kTiles - 1>(p, [&](auto constant) {
          matrix.put_tiles(stage, x, decltype(constant)::value, kTiles - 1);
        });
        __syncwarp();
        matrix.store_tiles(l, row, 0, kHalf, stage, kTiles - 1);
        __syncwarp();
      }
    }
  }
  __syncwarp();
  if (lane == 0) args.info[index] = info;
  if (info) fill_failed(l, n, upper, lane, 32);
}

// One warp for four matrices of 8 * kSlots - 7 .. 8 * kSlots rows of 16-bit elements, rows dealt
// out to 8 lanes each (lanes.cuh). The warp kernel takes as long as with 32-bit elements, for
// shared memory and shuffles limit it; here a load of a column serves all matrices of the warp.
template <class S, int kSlots, bool kExact, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks)
    cholesky_lanes_kernel(const CholeskyProblem args) {
  using Stage = StoredLanes<S, kSlots, kExact>;
  using Matrix = typename Stage::Matrix;
  using T = Computed<S>;
  constexpr int kLanes = Matrix::kLanes;
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Stage::kMatrices;
  const int n = kExact ? Stage::kRows : args.n;
  const int count = static_cast<int>(min(int64_t{Stage::kMatrices}, args.batch - first));
  const S* a = args.a.at<const S>(first, n, n);
  const Part part{args.upper, args.symmetrize};
  const Stage stage(reinterpret_cast<S*>(dynamic_shared), n, lane);
  stage.start_copy(a, count, part);
  commit_copies();
  wait_for_copies<0>();
  __syncwarp();
  // A warp that is not full computes its last matrix again.
  const int q = lane / kLanes, g = lane % kLanes;
  const auto index = [&](int of) { return min(of, count - 1); };
  Matrix m;
  stage.load(m, index(q), part);
  __syncwarp();
  T none[kSlots];
  m.template factor<false>(reinterpret_cast<T*>(dynamic_shared) + q * Matrix::kColumns, none, g);
  __syncwarp();  // every lane has read the last column
  const bool mine = m.needs_repair(lane);
  if (__any_sync(kFullWarp, mine)) {
    stage.template repair<false>(m, mine, [&](int of) { return a + index(of) * n * n; }, part);
  }
  const int info = m.info(lane);
  if (g == 0 && q < count) args.info[first + q] = info;
  stage.put(m, q, info != 0, args.upper);
  __syncwarp();
  stage.store(args.l.at<S>(first, n, n), count);
}

// One block per matrix of up to BlockSharedFactor::kMaxN rows, L in shared memory
// (block_shared.cuh).
template <int kWorkers, int kMinBlocks>
__global__ void __launch_bounds__((BlockSharedFactor<kWorkers, RhsPlace::kNone>::kThreads),
                                  kMinBlocks)
    cholesky_block_shared_kernel(const CholeskyProblem args) {
  using Factor = BlockSharedFactor<kWorkers, RhsPlace::kNone>;
  const int n = args.n;
  const Factor matrix(dynamic_shared, n);
  double* l = args.l.at<double>(blockIdx.x, n, n);
  typename Factor::RightHandSides none;
  const int info = matrix.factor(View<double>::square(args.a.at<const double>(blockIdx.x, n, n), n),
                                 {args.upper, args.symmetrize}, nullptr, 0, none,
                                 [&](int p) { matrix.store_rows(l, args.upper, p); });
  if (threadIdx.x == 0) args.info[blockIdx.x] = info;
  if (info) {
    __syncthreads();
    fill_failed(l, n, args.upper, threadIdx.x, Factor::kThreads);
  }
}

// One block per matrix of any size.
template <class T, int kDepth, Access kAccess, bool kPrefetch, bool kCompensated, int kRowTiles,
          int kMinBlocks>
__global__ void __launch_bounds__(
    (BlockFactor<T, kDepth, kAccess, kPrefetch, kCompensated, kRowTiles>::kThreads), kMinBlocks)
    cholesky_block_kernel(const CholeskyProblem args) {
  using Factor = BlockFactor<T, kDepth, kAccess, kPrefetch, kCompensated, kRowTiles>;
  const int n = args.n;
  const T* a = args.a.at<const T>(blockIdx.x, n, n);
  T* l = args.l.at<T>(blockIdx.x, n, n);
  T* shared = reinterpret_cast<T*>(dynamic_shared);
  bool mean = args.symmetrize;
  if (mean) {
    const Diagonal<T, Factor::kThreads, 512> diagonal(a, n);
    if (__syncthreads_or(diagonal.is_large())) {
      store_averages<Factor::kThreads>(a, l, n);
      a = l;
      mean = false;
    }
  }
  if (threadIdx.x == 0) Factor::source(shared) = {a, mean, 0};
  __syncthreads();
  const int info = Factor::factor(n, l, shared);
  if (threadIdx.x == 0) args.info[blockIdx.x] = info;
  if (info) fill_failed(l, n, args.upper, threadIdx.x, Factor::kThreads);
}

}  // namespace jax_batched::cuda
