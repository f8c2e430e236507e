// X = op(A) op(B) of matrices that differ in size: a tile of one X per block, that of a warp in its
// registers. Blocks beyond a matrix's own size only write zeros.
//
// The tiles of op(A) and op(B) come to shared memory kDepth inner indices at a time, as they lie in
// memory, by asynchronous copies that fill up with zeros: padding is never read. Three steps are
// under way. The terms of every sum are added in one order, whatever the tile.
#pragma once

#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/tensor.cuh"
#include "ffi/cuda/layout/view.cuh"
#include "ffi/cuda/runtime/launch.cuh"
#include "ffi/problems/gemm.h"

namespace jax_batched::cuda {

inline constexpr int kGemmStages = 3;

// Inner indices of a step: a line of memory, where those of a row are neighbours.
template <class T>
inline constexpr int kDepth = 128 / sizeof(T);

// A tile of op(A) or op(B)^T in shared memory: kOuter rows with kDepth entries each (kInner), or as
// many columns. The pitch keeps reads of a warp apart: in units of 16 bytes it is odd, but where
// fragments of doubles are read.
template <class T, int kOuter, bool kInner>
struct OperandTile {
  static constexpr bool kFragments = std::is_same_v<T, double>;
  static constexpr int kLines = kInner ? kOuter : kDepth<T>;
  static constexpr int kLength = kInner ? kDepth<T> : kOuter;
  static constexpr int kPad = kFragments ? (kInner ? 8 : 2) : kInner ? kVector<T> : 0;
  static constexpr int kPitch = kLength + kPad;
  static constexpr int kElements = kLines * kPitch;
};

// Copies one tile after the other along the inner index. A thread has one column, or vector of
// columns, in every (kThreads / kPieces)-th line of a tile.
template <class T, class Tile, bool kInner, int kThreads>
struct OperandCopy {
  const T* from;  // this thread's first entry of the next tile
  int64_t lead;
  int lines;  // from that entry's line, and column, to the operand's end
  int columns;
  bool vectors;

  // The entries from `outer` on of an operand of which outer_end x inner_end count.
  __device__ __forceinline__ OperandCopy(const T* operand, int64_t lead, bool vectors, int outer,
                                         int outer_end, int inner_end)
      : lead(lead), vectors(vectors) {
    const int pieces = vectors ? Tile::kLength / kVector<T> : Tile::kLength;
    const int line = threadIdx.x / pieces;
    const int column = threadIdx.x % pieces * (vectors ? kVector<T> : 1);
    from = operand + (kInner ? outer + line : line) * lead + (kInner ? column : outer + column);
    lines = (kInner ? outer_end - outer : inner_end) - line;
    columns = (kInner ? inner_end : outer_end - outer) - column;
  }
  // Starts the copy of the next tile.
  __device__ __forceinline__ void next(T* tile) {
    if (vectors) {
      start<kVector<T>>(tile);
    } else {
      start<1>(tile);
    }
    from += kInner ? kDepth<T> : kDepth<T> * lead;
    (kInner ? columns : lines) -= kDepth<T>;
  }

 private:
  template <int kWidth>
  __device__ __forceinline__ void start(T* tile) const {
    constexpr int kPieces = Tile::kLength / kWidth, kStride = kThreads / kPieces;
    static_assert(kThreads % kPieces == 0 && Tile::kLines % kStride == 0);
    const int bytes = min(max(columns, 0), kWidth) * static_cast<int>(sizeof(T));
    T* to = tile + threadIdx.x / kPieces * Tile::kPitch + threadIdx.x % kPieces * kWidth;
#pragma unroll(kWidth == 1 ? 2 : 8)
    for (int line = 0; line < Tile::kLines; line += kStride) {
      copy_async_or_zero<kWidth * sizeof(T)>(to + line * Tile::kPitch, from + line * lead,
                                             line < lines ? bytes : 0);
    }
  }
};

// What a warp computes of a tile of X: 4 x 8 lanes, each with kRows x kColumns entries in vectors
// of those that lie side by side in shared memory.
template <class T>
struct LaneProduct {
  static constexpr int V = kVector<T>;
  static constexpr int kRows = sizeof(T) == 4 ? 8 : 4, kColumns = 4;
  static constexpr int kWarpRows = 4 * kRows, kWarpColumns = 8 * kColumns;

  T sum[kRows][kColumns];

  // Which row (of kLanes lanes) or column entry i of a lane is.
  template <bool kInner, int kLanes>
  static __device__ __forceinline__ int place(int lane, int i) {
    return kInner ? lane + kLanes * i : (i / V) * (kLanes * V) + lane * V + i % V;
  }
  // Entries of a lane at `inner`, ..., inner + V - 1.
  template <class Tile, bool kInner, int kLanes, int kCount>
  static __device__ __forceinline__ void load(T (&to)[kCount][V], const T* tile, int begin,
                                              int lane, int inner, bool conjugate) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kInner) {
        const T* line = tile + (begin + place<true, kLanes>(lane, i)) * Tile::kPitch + inner;
        const auto v = *reinterpret_cast<const Vector<T>*>(line);
#pragma unroll
        for (int z = 0; z < V; ++z) to[i][z] = conj_if(conjugate, v.v[z]);
      } else {
        // Vector i of the V lines: its V columns are entries of one line each.
        const int group = i / V, line = i % V;
        const T* column = tile + (inner + line) * Tile::kPitch + begin;
        const auto v =
            *reinterpret_cast<const Vector<T>*>(column + place<false, kLanes>(lane, group * V));
#pragma unroll
        for (int z = 0; z < V; ++z) to[group * V + z][line] = conj_if(conjugate, v.v[z]);
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sum[i][j] = T(0);
    }
  }
  // The products of a step, of whose inner indices the first `depth` count.
  template <class TileA, class TileB, bool kInnerA, bool kInnerB>
  __device__ __forceinline__ void step(const T* a, const T* b, int row, int column, int depth,
                                       bool conj_a, bool conj_b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int inner = 0; inner < kDepth<T>; inner += V) {
      if (inner >= depth) break;
      T left[kRows][V], right[kColumns][V];
      load<TileA, kInnerA, 4>(left, a, row, lane / 8, inner, conj_a);
      load<TileB, kInnerB, 8>(right, b, column, lane % 8, inner, conj_b);
#pragma unroll
      for (int z = 0; z < V; ++z) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            sum[i][j] = add_mul(sum[i][j], left[i][z], right[j][z]);
          }
        }
      }
    }
  }
  // f(row, column, values): values of neighbouring columns.
  template <bool kInnerA, bool kInnerB, class F>
  __device__ __forceinline__ void for_each_run(F&& f) const {
    constexpr int kRun = kInnerB ? 1 : V;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; j += kRun) {
        T values[kRun];
#pragma unroll
        for (int z = 0; z < kRun; ++z) values[z] = sum[i][j + z];
        f(place<kInnerA, 4>(lane / 8, i), place<kInnerB, 8>(lane % 8, j), values);
      }
    }
  }
};

// The same for doubles, 32 x 32 by the tensor cores: sum[i][j] is a fragment of 16 x 8.
struct FragmentProduct {
  static constexpr int kRows = 2, kColumns = 4;
  static constexpr int kWarpRows = 16 * kRows, kWarpColumns = 8 * kColumns;

  double sum[kRows][kColumns][2][2];

  // This lane's pair of an 8 x 8 part.
  template <class Tile, bool kInner>
  static __device__ __forceinline__ Pair<double> pair(const double* tile, int outer, int inner) {
    const int row = outer + threadIdx.x % 32 / 4, column = inner + 2 * (threadIdx.x % 4);
    if constexpr (kInner) {
      return *reinterpret_cast<const Pair<double>*>(tile + row * Tile::kPitch + column);
    } else {
      return {tile[column * Tile::kPitch + row], tile[(column + 1) * Tile::kPitch + row]};
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][j][e / 2][e % 2] = 0;
      }
    }
  }
  template <class TileA, class TileB, bool kInnerA, bool kInnerB>
  __device__ __forceinline__ void step(const double* a, const double* b, int row, int column,
                                       int depth, bool, bool) {
#pragma unroll
    for (int inner = 0; inner < kDepth<double>; inner += 8) {
      if (inner >= depth) break;
      Pair<double> right[kColumns];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) right[j] = pair<TileB, kInnerB>(b, column + 8 * j, inner);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const Pair<double> left[2] = {pair<TileA, kInnerA>(a, row + 16 * i, inner),
                                      pair<TileA, kInnerA>(a, row + 16 * i + 8, inner)};
#pragma unroll
        for (int j = 0; j < kColumns; ++j) add_product(sum[i][j], left, right[j]);
      }
    }
  }
  template <bool kInnerA, bool kInnerB, class F>
  __device__ __forceinline__ void for_each_run(F&& f) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          f(16 * i + 8 * half + g, 8 * j + 2 * t, sum[i][j][half]);
        }
      }
    }
  }
};

template <class T>
struct WarpProduct : LaneProduct<T> {};
template <>
struct WarpProduct<double> : FragmentProduct {};

// kSide x kSide warps.
template <class T, int kSide, bool kTransposedA, bool kTransposedB>
struct Gemm {
  using Product = WarpProduct<T>;
  static constexpr int kThreads = 32 * kSide * kSide;
  static constexpr int kTileRows = kSide * Product::kWarpRows;
  static constexpr int kTileColumns = kSide * Product::kWarpColumns;
  static constexpr bool kInnerA = !kTransposedA, kInnerB = kTransposedB;
  using TileA = OperandTile<T, kTileRows, kInnerA>;
  using TileB = OperandTile<T, kTileColumns, kInnerB>;
  static constexpr int kStage = TileA::kElements + TileB::kElements;
  static constexpr size_t kSharedBytes = kGemmStages * kStage * sizeof(T);

  const GemmProblem& p;
  const T* a;
  const T* b;
  T* x;
  T* shared;
  GemmProblem::Sizes own;
  int row, column;  // where the tile begins
  bool vectors_a, vectors_b, vectors_x;

  static __host__ __device__ int64_t tiles(const GemmProblem& p) {
    return int64_t{ceil_div(p.m, kTileRows)} * ceil_div(p.n, kTileColumns);
  }

  __device__ __forceinline__ void fill(T value) const {
    const int rows = min(kTileRows, p.m - row), columns = min(kTileColumns, p.n - column);
    if (vectors_x && columns % kVector<T> == 0) {
      Vector<T> v;
#pragma unroll
      for (int z = 0; z < kVector<T>; ++z) v.v[z] = value;
      const int pieces = columns / kVector<T>;
      for (int at = threadIdx.x; at < rows * pieces; at += kThreads) {
        const int i = at / pieces, j = at % pieces * kVector<T>;
        *reinterpret_cast<Vector<T>*>(x + int64_t{row + i} * p.n + column + j) = v;
      }
    } else {
      for (int at = threadIdx.x; at < rows * columns; at += kThreads) {
        x[int64_t{row + at / columns} * p.n + column + at % columns] = value;
      }
    }
  }

  __device__ __forceinline__ void multiply() const {
    const int warp = threadIdx.x / 32;
    const int warp_row = warp / kSide * Product::kWarpRows;
    const int warp_column = warp % kSide * Product::kWarpColumns;
    const bool works = row + warp_row < own.m && column + warp_column < own.n;
    const int steps = ceil_div(own.k, kDepth<T>);
    OperandCopy<T, TileA, kInnerA, kThreads> copy_a(a, kInnerA ? p.k : p.m, vectors_a, row, own.m,
                                                    own.k);
    OperandCopy<T, TileB, kInnerB, kThreads> copy_b(b, kInnerB ? p.k : p.n, vectors_b, column,
                                                    own.n, own.k);
    const auto copy = [&](int step) {
      if (step < steps) {
        T* to = shared + step % kGemmStages * kStage;
        copy_a.next(to);
        copy_b.next(to + TileA::kElements);
      }
      commit_copies();
    };
    Product product;
    product.clear();
#pragma unroll
    for (int step = 0; step < kGemmStages - 1; ++step) copy(step);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_for_copies<kGemmStages - 2>();
      __syncthreads();
      copy(step + kGemmStages - 1);
      const T* tile_a = shared + step % kGemmStages * kStage;
      if (works) {
        product.template step<TileA, TileB, kInnerA, kInnerB>(
            tile_a, tile_a + TileA::kElements, warp_row, warp_column, own.k - step * kDepth<T>,
            p.a.conjugated, p.b.conjugated);
      }
    }
    __syncthreads();  // before the next tile's copies
    product.template for_each_run<kInnerA, kInnerB>([&](int i, int j, const auto& values) {
      store(row + warp_row + i, column + warp_column + j, values);
    });
  }

  template <int kRun>
  __device__ __forceinline__ void store(int i, int j, const T (&values)[kRun]) const {
    if (i >= p.m) return;
    T* to = x + int64_t{i} * p.n + j;
    T kept[kRun];
#pragma unroll
    for (int z = 0; z < kRun; ++z) {
      kept[z] = i < own.m && j + z < own.n && !p.is_outside(i, j + z) ? values[z] : T(0);
    }
    if (kRun == kVector<T> && vectors_x) {
      Vector<T> v;
#pragma unroll
      for (int z = 0; z < kRun; ++z) v.v[z] = kept[z];
      if (j < p.n) *reinterpret_cast<Vector<T>*>(to) = v;
    } else {
#pragma unroll
      for (int z = 0; z < kRun; ++z) {
        if (j + z < p.n) to[z] = kept[z];
      }
    }
  }
};

template <class T, int kSide, bool kTransposedA, bool kTransposedB>
__global__ void __launch_bounds__((Gemm<T, kSide, kTransposedA, kTransposedB>::kThreads),
                                  (sizeof(Real<T>) == 4 ? 16 : 12) / (kSide * kSide))
    gemm(const GemmProblem p) {
  using Tile = Gemm<T, kSide, kTransposedA, kTransposedB>;
  extern __shared__ __align__(16) unsigned char shared[];
  const auto whole_vectors = [](const void* data, int lead) {
    return lead % kVector<T> == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  };
  const bool vectors_a = whole_vectors(p.a.view.data, kTransposedA ? p.m : p.k);
  const bool vectors_b = whole_vectors(p.b.view.data, kTransposedB ? p.k : p.n);
  const bool vectors_x = whole_vectors(p.x.data, p.n);
  const int across = ceil_div(p.n, Tile::kTileColumns);
  const int64_t tiles = Tile::tiles(p), items = tiles * p.batch;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t matrix = item / tiles;
    const int tile = static_cast<int>(item - matrix * tiles);
    if (skips(p, matrix)) continue;
    const int row = tile / across * Tile::kTileRows, column = tile % across * Tile::kTileColumns;
    const auto own = p.sizes_of(matrix_at<const int32_t>(p.sizes, matrix, 3));
    const Tile work{p,
                    matrix_at<const T>(p.a.view, matrix, p.m, p.k),
                    matrix_at<const T>(p.b.view, matrix, p.k, p.n),
                    p.x.at<T>(matrix, p.m, p.n),
                    reinterpret_cast<T*>(shared),
                    own,
                    row,
                    column,
                    vectors_a,
                    vectors_b,
                    vectors_x};
    const bool outside =
        row >= own.m || column >= own.n ||
        p.is_outside(row, row + Tile::kTileRows, column, column + Tile::kTileColumns);
    if (!own.valid || outside) {
      work.fill(own.valid ? T(0) : quiet_nan<T>());
    } else {
      work.multiply();
    }
  }
}

}  // namespace jax_batched::cuda
