// Fused solve of A X = B, A Hermitian positive definite: factor, forward and backward substitution
// in one kernel; the factor never leaves registers and shared memory.
//
// An upper triangle is handled as in view.cuh: its factor is that of conj(A), so B is
// conjugated on the way in and X on the way out.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ffi/cuda/cholesky/block_shared.cuh"
#include "ffi/cuda/cholesky/lanes.cuh"
#include "ffi/cuda/cholesky/lanes_shared.cuh"
#include "ffi/cuda/cholesky/panel.cuh"
#include "ffi/cuda/cholesky/stored_lanes.cuh"
#include "ffi/cuda/cholesky/thread.cuh"
#include "ffi/cuda/cholesky/warp_shared.cuh"
#include "ffi/cuda/cholesky/warp_tensor.cuh"
#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/storage.cuh"
#include "ffi/cuda/device/with_constant.cuh"
#include "ffi/cuda/layout/fragment.cuh"
#include "ffi/cuda/layout/staging.cuh"
#include "ffi/problems/solve_pos.h"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

// S is the type that elements are stored in (storage.cuh).

// Which system a warp solves that has one right-hand side: all kernels that take one solve several
// as so many systems.
template <class T>
struct SingleSystem {
  int64_t index;  // in the batch
  int64_t column;

  __device__ __forceinline__ SingleSystem(const SolvePosProblem& args, int64_t warp)
      : index(warp), column(0) {
    if (args.nrhs == 1) return;
    index = warp / args.nrhs;
    column = warp - index * args.nrhs;
  }
};

// One thread per matrix of exactly kN rows, in registers; a warp moves its 32 matrices together.
template <class S, int kN>
__global__ void __launch_bounds__(32) solve_pos_thread_kernel(const SolvePosProblem args) {
  using T = Computed<S>;
  using Matrices = MatrixStage<S, kN>;
  using Vectors = RecordStage<S, kN>;
  S* stage = reinterpret_cast<S*>(dynamic_shared);
  const int lane = threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 32;
  const int records = static_cast<int>(min(int64_t{32}, args.batch - first));
  if (args.a.contiguous()) {
    Matrices::load(stage, args.a.as<const S>() + first * (kN * kN), records, lane);
  } else {
    for (int record = 0; record < records; ++record) {
      const S* a = matrix_at<const S>(args.a, first + record, kN * kN);
      for (int e = lane; e < kN * kN; e += 32) stage[record * Matrices::kStride + e] = a[e];
    }
  }
  __syncwarp();
  Triangle<T, kN> l;
  Real<T> inverse[kN];
  int info = 0;
  if (lane < records) {
    Matrices::take(l, stage + lane * Matrices::kStride, {args.upper, false});
    info = factor_triangle<T, kN>(l, inverse);
    args.info[first + lane] = info;
  }
  const auto solve = [&](S* own, int stride) {
    T x[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) x[i] = conj_if(args.upper, widen(own[i * stride]));
    solve_triangle<T, kN>(l, inverse, x);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      own[i * stride] = narrow<S>(info ? quiet_nan<T>() : conj_if(args.upper, x[i]));
    }
  };
  __syncwarp();
  if (args.nrhs == 1 && args.b.contiguous()) {
    Vectors::load(stage, args.b.as<const S>() + first * kN, records, lane);
    __syncwarp();
    if (lane < records) solve(stage + lane * Vectors::kStride, 1);
    __syncwarp();
    Vectors::store(args.x.at<S>(first, kN), stage, records, lane);
    return;
  }
  // Up to kN right-hand sides at a time: they fit where the matrices were.
  for (int64_t column = 0; column < args.nrhs; column += kN) {
    const int width = static_cast<int>(min(int64_t{kN}, args.nrhs - column));
    const int stride = make_odd(kN * width);
    const auto for_each_element = [&](auto&& move) {
      for (int e = lane; e < records * kN * width; e += 32) {
        const int record = e / (kN * width), rest = e % (kN * width);
        move(first + record, rest / width * args.nrhs + column + rest % width,
             stage[record * stride + rest]);
      }
    };
    for_each_element([&](int64_t entry, int64_t at, S& staged) {
      staged = matrix_at<const S>(args.b, entry, kN, args.nrhs)[at];
    });
    __syncwarp();
    if (lane < records) {
#pragma unroll 1
      for (int c = 0; c < width; ++c) solve(stage + lane * stride + c, width);
    }
    __syncwarp();
    for_each_element([&](int64_t entry, int64_t at, S& staged) {
      args.x.at<S>(entry, kN, args.nrhs)[at] = staged;
    });
    __syncwarp();
  }
}

template <class S, int kN>
constexpr size_t solve_pos_thread_bytes() {
  constexpr int kMatrices = MatrixStage<S, kN>::kElements, kVectors = 32 * make_odd(kN * kN);
  return sizeof(S) * (kMatrices > kVectors ? kMatrices : kVectors);
}

// 8 lanes of a warp for one matrix, rows dealt out to them (lanes.cuh). A kernel of its own for
// several right-hand sides: they need registers that one does not.
template <class T, int kSlots, bool kMany, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks)
    solve_pos_lanes_kernel(const SolvePosProblem args) {
  using Matrix = LanesFactor<T, kSlots>;
  constexpr int kLanes = Matrix::kLanes;
  // Right-hand sides at a time, where there are several. The code for 4 would overflow the
  // instruction cache beyond 5 slots.
  constexpr int kTogether = kSlots > 5 ? 1 : 4;
  const int lane = threadIdx.x % 32, q = lane / kLanes, g = lane % kLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Matrix::kMatrices;
  // A warp that is not full computes the last matrix again.
  const int64_t entry = min(first + q, args.batch - 1);
  const bool stored = first + q < args.batch;
  const int n = args.n;
  const int64_t nrhs = args.nrhs;
  T* shared = reinterpret_cast<T*>(dynamic_shared) + q * Matrix::kElements;
  const auto a = View<T>::square(matrix_at<const T>(args.a, entry, n, n), n);
  Matrix::start_copy(shared, a, {args.upper, false}, g);
  commit_copies();

  const T* b = matrix_at<const T>(args.b, entry, n, nrhs);
  T* x = args.x.at<T>(entry, n, nrhs);
  const auto load_rhs = [&](T(&y)[kSlots], int64_t column) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int i = kLanes * s + g;
      y[s] = i < n ? conj_if(args.upper, b[i * nrhs + column]) : T(0);
    }
  };
  T y[kSlots];
  load_rhs(y, 0);
  wait_for_copies<0>();
  __syncwarp();
  Matrix m;
  m.load(shared, n, g);
  __syncwarp();
  m.template factor<true>(shared, y, g);
  const bool mine = m.needs_repair(lane);
  if (__any_sync(kFullWarp, mine)) {
    __syncwarp();  // every lane has read the last column
    Matrix::start_copy(shared, a, {args.upper, false}, g);
    commit_copies();
    wait_for_copies<0>();
    __syncwarp();
    m.template repair<true>(shared, mine, n, g);
    if constexpr (!kMany) {
      T again[1][kSlots];
      load_rhs(again[0], 0);
      m.solve_forward(again, g);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) y[s] = mine ? again[0][s] : y[s];
    }
  }
  const int info = m.info(lane);
  if (g == 0 && stored) args.info[entry] = info;
  const auto store_solution = [&](const T(&v)[kSlots], int64_t column) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int i = kLanes * s + g;
      if (i < n && stored) {
        x[i * nrhs + column] = info ? quiet_nan<T>() : conj_if(args.upper, v[s]);
      }
    }
  };
  if constexpr (!kMany) {
    T v[1][kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) v[0][s] = y[s];
    m.solve_backward(v, g);
    store_solution(v[0], 0);
  } else {
#pragma unroll 1
    for (int64_t column = 0; column < nrhs; column += kTogether) {
      T v[kTogether][kSlots];
#pragma unroll
      for (int c = 0; c < kTogether; ++c) load_rhs(v[c], min(column + c, nrhs - 1));
      m.solve_forward(v, g);
      m.solve_backward(v, g);
#pragma unroll
      for (int c = 0; c < kTogether; ++c) {
        if (column + c < nrhs) store_solution(v[c], column + c);
      }
    }
  }
}

template <class T, int kSlots>
constexpr size_t solve_pos_lanes_bytes() {
  return LanesFactor<T, kSlots>::kMatrices * LanesFactor<T, kSlots>::kElements * sizeof(T);
}

// The same for 16-bit elements and one right-hand side.
template <class S, int kSlots, bool kExact, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks)
    solve_pos_stored_lanes_kernel(const SolvePosProblem args) {
  using Stage = StoredLanes<S, kSlots, kExact>;
  using Matrix = typename Stage::Matrix;
  using T = Computed<S>;
  constexpr int kLanes = Matrix::kLanes;
  const int lane = threadIdx.x % 32, q = lane / kLanes, g = lane % kLanes;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Stage::kMatrices;
  const int n = kExact ? Stage::kRows : args.n;
  const int count = static_cast<int>(min(int64_t{Stage::kMatrices}, args.batch - first));
  const Part part{args.upper, false};
  // A warp that is not full computes its last matrix again.
  const auto entry = [&](int of) { return first + min(of, count - 1); };
  const auto matrix = [&](int of) { return matrix_at<const S>(args.a, entry(of), n, n); };
  const Stage stage(reinterpret_cast<S*>(dynamic_shared), n, lane);
  if (args.a.contiguous()) {
    stage.start_copy(matrix(0), count, part);
    commit_copies();
  } else {
#pragma unroll 1
    for (int of = 0; of < count; ++of) stage.copy_matrix(matrix(of), of);
  }
  const S* b = matrix_at<const S>(args.b, entry(q), n);
  const auto load_rhs = [&](T(&y)[kSlots]) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int i = kLanes * s + g;
      y[s] = i < n ? widen(b[i]) : T(0);
    }
  };
  T y[1][kSlots];
  load_rhs(y[0]);
  wait_for_copies<0>();
  __syncwarp();
  Matrix m;
  stage.load(m, min(q, count - 1), part);
  __syncwarp();
  m.template factor<true>(reinterpret_cast<T*>(dynamic_shared) + q * Matrix::kColumns, y[0], g);
  const bool mine = m.needs_repair(lane);
  if (__any_sync(kFullWarp, mine)) {
    __syncwarp();  // every lane has read the last column
    stage.template repair<true>(m, mine, matrix, part);
    T again[1][kSlots];
    load_rhs(again[0]);
    m.solve_forward(again, g);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) y[0][s] = mine ? again[0][s] : y[0][s];
  }
  const int info = m.info(lane);
  m.solve_backward(y, g);
  if (q >= count) return;
  if (g == 0) args.info[first + q] = info;
  S* x = args.x.at<S>(first + q, n);
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int i = kLanes * s + g;
    if (i < n) x[i] = narrow<S>(info ? quiet_nan<T>() : y[0][s]);
  }
}

// 8 lanes of a warp for one matrix and one right-hand side, in shared memory (lanes_shared.cuh).
template <class T, int kTiles>
__global__ void __launch_bounds__(32) solve_pos_lanes_shared_kernel(const SolvePosProblem args) {
  using Matrix = LanesSharedFactor<T, kTiles>;
  const int q = threadIdx.x / 8, g = threadIdx.x % 8;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Matrix::kMatrices;
  // A warp that is not full computes the last matrix again.
  const int64_t entry = min(first + q, args.batch - 1);
  const bool stored = first + q < args.batch;
  const int n = args.n;
  T* shared = reinterpret_cast<T*>(dynamic_shared) + q * Matrix::kElements;
  const auto a = View<T>::square(matrix_at<const T>(args.a, entry, n, n), n);
  Matrix::start_copy(shared, a, {args.upper, false}, g);
  commit_copies();

  const T* b = matrix_at<const T>(args.b, entry, n);
  const auto load_rhs = [&](T(&y)[kTiles]) {
#pragma unroll
    for (int s = 0; s < kTiles; ++s) {
      const int i = 8 * s + g;
      y[s] = i < n ? conj_if(args.upper, b[i]) : T(0);
    }
  };
  T y[kTiles];
  load_rhs(y);
  wait_for_copies<0>();
  __syncwarp();
  Matrix m;
  const bool plain = m.factor(shared, y, n, g);
  int info = 0;
  const bool mine = (__ballot_sync(kFullWarp, !plain) >> (8 * q) & 0xff) != 0;
  if (__any_sync(kFullWarp, mine)) {
    const int failed = m.repair(shared, a, {args.upper, false}, mine, g);
    if (mine) info = failed;
    T again[kTiles];
    load_rhs(again);
    m.solve_forward(shared, again, g);
#pragma unroll
    for (int s = 0; s < kTiles; ++s) y[s] = mine ? again[s] : y[s];
  }
  if (g == 0 && stored) args.info[entry] = info;
  m.solve_backward(shared, y, g);
  T* x = args.x.at<T>(entry, n);
#pragma unroll
  for (int s = 0; s < kTiles; ++s) {
    const int i = 8 * s + g;
    if (i < n && stored) x[i] = info ? quiet_nan<T>() : conj_if(args.upper, y[s]);
  }
}

template <class T, int kTiles>
constexpr size_t solve_pos_lanes_shared_bytes() {
  return LanesSharedFactor<T, kTiles>::kMatrices * LanesSharedFactor<T, kTiles>::kElements *
         sizeof(T);
}

// What one warp keeps in shared memory per matrix, besides the panel: the factor's diagonal blocks,
// the reciprocals of its diagonal, and right-hand sides that turn into y and then into x.
template <class T, int kTiles>
struct SolveWorkspace {
  using Step = Panel<T, kTiles, 1>;
  static constexpr int kColumns = 4;  // right-hand sides at a time, 8 lanes each
  static constexpr int kBlocksAt = Step::kElements;
  static constexpr int kInversesAt = kBlocksAt + 64 * kTiles;  // elements of T, used as Real<T>
  static constexpr int kVectorsAt = kInversesAt + 8 * kTiles;
  static constexpr int kSumsAt = kVectorsAt + kColumns * 8 * kTiles;
  static constexpr int kElements = kSumsAt + kColumns * 8;

  T* base;
  __device__ __forceinline__ T* panel() const { return base; }
  __device__ __forceinline__ T* block(int p) const { return base + kBlocksAt + 64 * p; }
  __device__ __forceinline__ Real<T>* inverse(int p) const {
    return reinterpret_cast<Real<T>*>(base + kInversesAt) + 8 * p;
  }
  __device__ __forceinline__ T* vector(int column) const {
    return base + kVectorsAt + 8 * kTiles * column;
  }
  __device__ __forceinline__ T* sums(int column) const { return base + kSumsAt + 8 * column; }

  // Keeps the diagonal block of panel p for the way back, of which lane r < 8 has row r.
  __device__ __forceinline__ void keep_block(int p, int r, const T (&row)[8],
                                             Real<T> reciprocal) const {
    inverse(p)[r] = reciprocal;
#pragma unroll
    for (int k = 0; k < 8; k += kVector<T>) {
      Vector<T> v;
#pragma unroll
      for (int z = 0; z < kVector<T>; ++z) v.v[z] = row[k + z];
      *reinterpret_cast<Vector<T>*>(block(p) + 8 * r + k) = v;
    }
  }

  // sums = (sum over j < p of L_pj y_j), rows of tile p.
  __device__ __forceinline__ void sum_left(const Fragment<T, kTiles>& m, int p, int first,
                                           int columns, int lane) const {
#pragma unroll 1
    for (int column = first; column < columns; ++column) {
      T sum = T(0);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (j >= p) continue;
        const auto y = *reinterpret_cast<const Pair<T>*>(vector(column) + 8 * j + 2 * (lane % 4));
        sum = add_mul(add_mul(sum, m[p][j][0], y.a), m[p][j][1], y.b);
      }
      sum = sum + shuffle_xor(sum, 1);
      sum = sum + shuffle_xor(sum, 2);
      if (lane % 4 == 0) sums(column)[lane / 4] = sum;
    }
  }

  // sums = (sum over i > p of L_ip^H x_i), columns of tile p. Lanes with bit 4 set reduce the
  // second column of their pair, the others the first.
  __device__ __forceinline__ void sum_below(const Fragment<T, kTiles>& m, int p, int columns,
                                            int lane) const {
#pragma unroll 1
    for (int column = 0; column < columns; ++column) {
      T s0 = T(0), s1 = T(0);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (i <= p) continue;
        const T x = vector(column)[8 * i + lane / 4];
        s0 = add_conj_mul(s0, m[i][p][0], x);
        s1 = add_conj_mul(s1, m[i][p][1], x);
      }
      store_column_sums(sums(column), s0, s1, lane);
    }
  }

  // y_p = L_pp^-1 (b_p - sums), or x_p = L_pp^-H (y_p - sums) if kBackward: 8 lanes per right-hand
  // side; columns before `first` stay as they are. Each of the 8 lanes solves the whole block for
  // itself: more instructions, but no shuffle in the chain.
  template <bool kBackward>
  __device__ __forceinline__ void solve_block(int p, bool subtract, int first, int columns,
                                              int lane) const {
    const int column = lane / 8, r = lane % 8;
    const int from = min(column, columns - 1);
    T z[8], row[8];
    Real<T> inverses[8];
    load_vectors(z, vector(from) + 8 * p, 8);
    if (subtract) {
      load_vectors(row, sums(from), 8);
#pragma unroll
      for (int k = 0; k < 8; ++k) z[k] = z[k] - row[k];
    }
    load_vectors(inverses, inverse(p), 8);
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const int k = kBackward ? 7 - step : step;
      load_vectors(row, block(p) + 8 * k, k);
      if constexpr (kBackward) {
        z[k] = scale(z[k], inverses[k]);
#pragma unroll
        for (int c = 0; c < k; ++c) z[c] = sub_mul_conj(z[c], z[k], row[c]);
      } else {
#pragma unroll
        for (int c = 0; c < k; ++c) z[k] = sub_mul(z[k], row[c], z[c]);
        z[k] = scale(z[k], inverses[k]);
      }
    }
    T own = z[0];
#pragma unroll
    for (int k = 1; k < 8; ++k) {
      if (r == k) own = z[k];
    }
    __syncwarp();  // every lane has read the right-hand side
    if (column >= first && column < columns) vector(column)[8 * p + r] = own;
  }
};

// Calls f(i, c) for rows i < rows <= kMaxRows and right-hand sides c < columns, spread over a warp.
template <int kMaxRows, class F>
__device__ __forceinline__ void for_each_rhs_entry(int rows, int columns, int lane, F&& f) {
  if (columns == 1) {
#pragma unroll
    for (int first = 0; first < kMaxRows; first += 32) {
      if (first + lane < rows) f(first + lane, 0);
    }
  } else {
#pragma unroll 1
    for (int e = lane; e < rows * columns; e += 32) f(e / columns, e % columns);
  }
}

// One warp for a matrix, held in registers as tiles. The first right-hand side rides along as one
// more column of the panels; the others are substituted on the fragments.
template <class T, int kTiles, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks)
    solve_pos_warp_kernel(const SolvePosProblem args) {
  using Workspace = SolveWorkspace<T, kTiles>;
  using Step = Panel<T, kTiles, 1>;
  const int lane = threadIdx.x % 32, n = args.n;
  const int64_t index = blockIdx.x, nrhs = args.nrhs;
  const Workspace own{reinterpret_cast<T*>(dynamic_shared)};
  T* vector = own.vector(0);

  const T* rhs = matrix_at<const T>(args.b, index, n, nrhs);
  const auto load_rhs = [&](int64_t column, int columns) {
    const T* b = rhs + column;
    for_each_rhs_entry<8 * kTiles>(8 * kTiles, columns, lane, [&](int i, int c) {
      vector[8 * kTiles * c + i] = i < n ? conj_if(args.upper, b[i * nrhs + c]) : T(0);
    });
  };

  int columns = static_cast<int>(min(int64_t{Workspace::kColumns}, nrhs));
  Fragment<T, kTiles> m;
  const T* a = matrix_at<const T>(args.a, index, n, n);
  load_fragment<kTiles - 1>(m, View<T>::square(a, n), {args.upper, false}, 0, 0, lane);
  load_rhs(0, columns);
  int info = 0;
#pragma unroll
  for (int p = 0; p < kTiles; ++p) {
    Step::publish(own.panel(), m, p, lane);
    __syncwarp();
    T x[Step::kSlots][8], b[Step::kSlots];
    Step::load_rows(x, own.panel(), p, lane);
#pragma unroll
    for (int s = 0; s < Step::kSlots; ++s) {
      if (Step::in_use(p, s)) b[s] = vector[Step::row(p, s, lane)];
    }
    const int steps = p < kTiles - 1 ? 8 : n - 8 * p;
    Real<T> inverse = 1;
    const Real<T> root = Step::template factor<true>(x, b, p, steps, lane, inverse);
    __syncwarp();  // every lane has read the right-hand side
    Step::template repair<true>(x, b, own.panel(), vector, p, steps, lane, root, inverse, info);
    Step::store_columns(own.panel(), x, p, lane);
#pragma unroll
    for (int s = 0; s < Step::kSlots; ++s) {
      const int i = 8 * p + lane + 32 * s;
      if (Step::in_use(p, s) && i < 8 * kTiles) vector[i] = b[s];
    }
    if (lane < 8) own.keep_block(p, lane, x[0], inverse);
    __syncwarp();
    if (p + 1 < kTiles) Step::read_back(m, own.panel(), p, p + 1, lane);
    Step::update(m, own.panel(), p, lane);
    __syncwarp();
  }
  if (lane == 0) args.info[index] = info;

  int done = 1;  // columns that the panels have taken forward
#pragma unroll 1
  for (int64_t column = 0; column < nrhs; column += Workspace::kColumns) {
    columns = static_cast<int>(min(int64_t{Workspace::kColumns}, nrhs - column));
    if (column > 0) {
      load_rhs(column, columns);
      __syncwarp();
    }
    if (done < columns) {
#pragma unroll
      for (int p = 0; p < kTiles; ++p) {
        if (p > 0) {
          own.sum_left(m, p, done, columns, lane);
          __syncwarp();
        }
        own.template solve_block<false>(p, p > 0, done, columns, lane);
        __syncwarp();
      }
    }
    done = 0;
#pragma unroll
    for (int p = kTiles - 1; p >= 0; --p) {
      if (p < kTiles - 1) {
        own.sum_below(m, p, columns, lane);
        __syncwarp();
      }
      own.template solve_block<true>(p, p < kTiles - 1, 0, columns, lane);
      __syncwarp();
    }
    T* to = args.x.at<T>(index, n, nrhs) + column;
    for_each_rhs_entry<8 * kTiles>(n, columns, lane, [&](int i, int c) {
      to[i * nrhs + c] = info ? quiet_nan<T>() : conj_if(args.upper, vector[8 * kTiles * c + i]);
    });
    __syncwarp();
  }
}

// The same for one right-hand side and large matrices, whose panels, unrolled, would overflow the
// instruction cache: only what touches the tiles is compiled once per panel.
template <class T, int kTiles, bool kExact, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks)
    solve_pos_warp_rolled_kernel(const SolvePosProblem args) {
  using Workspace = SolveWorkspace<T, kTiles>;
  using Step = Panel<T, kTiles, 1>;
  constexpr int kLast = kTiles - 1;
  const int lane = threadIdx.x % 32, n = kExact ? 8 * kTiles : args.n;
  const SingleSystem<T> system(args, blockIdx.x);
  const int64_t index = system.index, nrhs = args.nrhs;
  const Workspace own{reinterpret_cast<T*>(dynamic_shared)};
  T* panel = own.panel();
  T* vector = own.vector(0);

  Fragment<T, kTiles> m;
  const T* a = matrix_at<const T>(args.a, index, n, n);
  load_fragment<kExact ? kTiles : kTiles - 1>(m, View<T>::square(a, n), {args.upper, false}, 0, 0,
                                              lane);
  const T* rhs = matrix_at<const T>(args.b, index, n, nrhs) + system.column;
  for_each_rhs_entry<8 * kTiles>(8 * kTiles, 1, lane, [&](int i, int) {
    vector[i] = i < n ? conj_if(args.upper, rhs[i * nrhs]) : T(0);
  });
  int info = 0;
  Step::publish(panel, m, 0, lane);
  __syncwarp();
#pragma unroll 1
  for (int p = 0; p < kTiles; ++p) {
    T x[Step::kSlots][8], b[Step::kSlots];
    Step::load_rows(x, panel, p, lane);
#pragma unroll
    for (int s = 0; s < Step::kSlots; ++s) {
      if (Step::in_use(p, s)) b[s] = vector[Step::row(p, s, lane)];
    }
    Real<T> inverse = 1;
    const Real<T> root = Step::template factor_any<true>(x, b, p, lane, inverse);
    __syncwarp();  // every lane has read the right-hand side
    Step::template repair<true>(x, b, panel, vector, p, 8, lane, root, inverse, info);
    Step::store_columns(panel, x, p, lane);
#pragma unroll
    for (int s = 0; s < Step::kSlots; ++s) {
      const int i = 8 * p + lane + 32 * s;
      if (Step::in_use(p, s) && i < 8 * kTiles) vector[i] = b[s];
    }
    if (lane < 8) own.keep_block(p, lane, x[0], inverse);
    __syncwarp();
    with_constant<0, kLast>(p, [&](auto constant) {
      constexpr int kPanel = decltype(constant)::value;
      if constexpr (kPanel < kLast) {
        Step::read_back(m, panel, kPanel, kPanel + 1, lane);
        Step::update(m, panel, kPanel, lane);
        Step::publish(panel, m, kPanel + 1, lane);
      }
    });
    __syncwarp();
  }
#pragma unroll 1
  for (int p = kLast; p >= 0; --p) {
    with_constant<0, kLast>(p, [&](auto constant) {
      constexpr int kPanel = decltype(constant)::value;
      if constexpr (kPanel < kLast) own.sum_below(m, kPanel, 1, lane);
    });
    __syncwarp();
    own.template solve_block<true>(p, p < kLast, 0, 1, lane);
    __syncwarp();
  }
  if (lane == 0 && system.column == 0) args.info[index] = info;
  T* x = args.x.at<T>(index, n, nrhs) + system.column;
  for_each_rhs_entry<8 * kTiles>(n, 1, lane, [&](int i, int) {
    x[i * nrhs] = info ? quiet_nan<T>() : conj_if(args.upper, vector[i]);
  });
}

template <class T, int kTiles>
constexpr size_t solve_pos_warp_bytes() {
  return SolveWorkspace<T, kTiles>::kElements * sizeof(T);
}

// One warp per matrix of 8 * kTiles + 1 .. 16 * kTiles rows, as 2x2 blocks (warp_shared.cuh), and
// one right-hand side. L11 and L22 stay in registers, X in shared memory.
template <class T, int kTiles, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks)
    solve_pos_warp_shared_kernel(const SolvePosProblem args) {
  using Matrix = WarpSharedFactor<T, kTiles>;
  constexpr int kHalf = Matrix::kHalf;
  const int lane = threadIdx.x % 32, n = args.n;
  const SingleSystem<T> system(args, blockIdx.x);
  const int64_t index = system.index, nrhs = args.nrhs;
  const Matrix matrix{reinterpret_cast<T*>(dynamic_shared), n, lane};
  const auto a = View<T>::square(matrix_at<const T>(args.a, index, n, n), n);
  const Part part{args.upper, false};
  const T* b = matrix_at<const T>(args.b, index, n, nrhs) + system.column;
  T* vector = matrix.vector();
#pragma unroll
  for (int i = lane; i < 2 * kHalf; i += 32)
    vector[i] = i < n ? conj_if(args.upper, b[i * nrhs]) : T(0);
  int info = 0;
  typename Matrix::Block m, first_block;
#pragma unroll 1
  for (int half = 0;; ++half) {
    const int first = half * kHalf;
    load_fragment<0>(m, a, part, first, first, lane);
    if (half) matrix.subtract_square(m);
    // The panels of L22 are needed one at a time, those of X once more.
    const int failed = matrix.template factor<true>(
        m, half ? kTiles : 1, 1 - half, matrix.inverses() + first, vector + first, [](auto) {},
        [](int) {});
    if (info == 0 && failed) info = first + failed;
    if (half) break;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        first_block[i][j][0] = m[i][j][0];
        first_block[i][j][1] = m[i][j][1];
      }
    }
    typename Matrix::Block x;
    load_fragment<0, true>(x, a, part, kHalf, 0, lane);
    matrix.template solve_below<true>(x);
  }
#pragma unroll 1
  for (int half = 1;; --half) {
    matrix.substitute_back(m, matrix.inverses() + half * kHalf, vector + half * kHalf);
    if (!half) break;
    matrix.subtract_transposed();
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        m[i][j][0] = first_block[i][j][0];
        m[i][j][1] = first_block[i][j][1];
      }
    }
  }
  if (lane == 0 && system.column == 0) args.info[index] = info;
  T* x = args.x.at<T>(index, n, nrhs) + system.column;
#pragma unroll
  for (int i = lane; i < 2 * kHalf; i += 32) {
    if (i < n) x[i * nrhs] = info ? quiet_nan<T>() : conj_if(args.upper, vector[i]);
  }
}

// One block per matrix of up to BlockSharedFactor::kMaxN rows, L in shared memory
// (block_shared.cuh). Eight right-hand sides go forward with the factorization and back in one
// warp; of more, each eight are a warp's afterwards. kProducts: on the tensor cores; if not, there
// is one right-hand side.
template <int kWorkers, RhsPlace kRhsPlace, bool kProducts, int kMinBlocks>
__global__ void __launch_bounds__((BlockSharedFactor<kWorkers, kRhsPlace>::kThreads), kMinBlocks)
    solve_pos_block_shared_kernel(const SolvePosProblem args) {
  using Factor = BlockSharedFactor<kWorkers, kRhsPlace>;
  static_assert(kProducts || Factor::kRowTile);
  const Factor matrix(dynamic_shared, args.n);
  const int64_t entry = blockIdx.x;
  const int n = args.n;
  const int64_t nrhs = args.nrhs;
  const double* b = matrix_at<const double>(args.b, entry, n, nrhs);
  double* x = args.x.at<double>(entry, n, nrhs);
  typename Factor::RightHandSides y;
  const auto a = View<double>::square(matrix_at<const double>(args.a, entry, n, n), n);
  const int info = matrix.factor(a, {args.upper, false}, b, nrhs, y, [](int) {});
  if (threadIdx.x == 0) args.info[entry] = info;
  if constexpr (!kProducts) {
    if (matrix.worker > 0) return;
    const int lane = threadIdx.x % 32;
    double z[Factor::kSlots];
#pragma unroll
    for (int s = 0; s < Factor::kSlots; ++s) {
      const int i = 32 * s + lane;
      z[s] = i < n ? matrix.tile(matrix.tiles, i / 8)[Factor::at(0, i % 8)] : 0;
    }
    matrix.substitute_back(z);
#pragma unroll
    for (int s = 0; s < Factor::kSlots; ++s) {
      const int i = 32 * s + lane;
      if (i < n) x[i] = info ? quiet_nan<double>() : z[s];
    }
    return;
  }
  // The last warp has the first eight.
  int64_t c = Factor::kRhs * int64_t{(matrix.worker + 1) % Factor::kWarps};
  bool forward = c == 0;
#pragma unroll 1
  for (; c < nrhs; c += Factor::kRhs * Factor::kWarps) {
    if (!forward) {
      Factor::load_rhs(y, b, n, nrhs, c);
      matrix.solve_forward(y, [] {});
    }
    matrix.solve_backward(y);
    Factor::store_solution(y, x, n, nrhs, c, info != 0);
    forward = false;
  }
}

// One warp per matrix, in its registers (warp_tensor.cuh).
template <int kTiles>
__global__ void __launch_bounds__(32) solve_pos_warp_tensor_kernel(const SolvePosProblem args) {
  using Factor = WarpTensorFactor<kTiles>;
  const int64_t entry = blockIdx.x;
  const int n = args.n;
  const int64_t nrhs = args.nrhs;
  const double* b = matrix_at<const double>(args.b, entry, n, nrhs);
  double* x = args.x.at<double>(entry, n, nrhs);
  Factor matrix(dynamic_shared);
  const double* a = matrix_at<const double>(args.a, entry, n, n);
  matrix.load_matrix(View<double>::square(a, n), {args.upper, false});
  Factor::load_rhs(matrix.y, b, n, nrhs, 0);
  matrix.factor();
  if (threadIdx.x == 0) args.info[entry] = matrix.failed;
  matrix.transpose();
  matrix.solve_backward();
  Factor::store_solution(matrix.y, x, n, nrhs, 0, matrix.failed != 0);
#pragma unroll 1
  for (int64_t c = Factor::kRhs; c < nrhs; c += Factor::kRhs) {
    Factor::load_rhs(matrix.y, b, n, nrhs, c);
    matrix.transpose();
    matrix.solve_forward();
    matrix.transpose();
    matrix.solve_backward();
    Factor::store_solution(matrix.y, x, n, nrhs, c, matrix.failed != 0);
  }
}

}  // namespace jax_batched::cuda
