// Substitution, "block": a block per matrix and group of kColumns columns; any n whose right-hand
// sides fit in shared memory.
//
// The triangle streams through shared memory, each element read once per sweep, in tiles of kHeight
// rows and kWidth columns, panel by panel: first the tile with a panel's diagonal block, then those
// below it. A ring of kStages tiles keeps the memory busy while the diagonal blocks, which only one
// warp works on, are solved.
#pragma once

#include "ffi/cuda/tile/async_copy.cuh"
#include "ffi/cuda/tile/quotient.cuh"
#include "ffi/cuda/tile/substitution.cuh"

namespace jax_batched::cuda {

// kHeight is 64 or 128: short tiles leave room for more blocks, whose diagonal blocks then overlap;
// tall ones leave more of the factors in flight in L2 for the second sweep (substitution_tiers.h).
template <class T, int kRowsOfTile>
struct BlockSubstitutionShape {
  static constexpr int kHeight = kRowsOfTile;     // rows of a tile: one per thread
  static constexpr int kWidth = 128 / sizeof(T);  // columns: a cache line of a row
  static constexpr int kStages = 3;
  // Padded by 16 bytes, so that vectors stay aligned and a lane per row meets no bank conflict.
  static constexpr int kRowPitch = kWidth + kVector<T>;
  static constexpr int kColumnPitch = kHeight + kVector<T>;
  static constexpr int kTile = kHeight * kRowPitch;  // the larger of the two layouts
  static constexpr size_t kTilesBytes = kStages * kTile * sizeof(T);
  static_assert(kWidth * kColumnPitch <= kTile);
};

// Where a tile's entry (i, k) lies in shared memory: at origin + i * row_step + k * column_step.
// The dimension that is contiguous in global memory is contiguous here, and runs in the same
// direction, so that whole vectors are copied.
struct TileLayout {
  int origin;
  int row_step;
  int column_step;

  template <class Shape>
  static __device__ __forceinline__ TileLayout of(const LowerSystem& system) {
    if (rows_contiguous(system)) {
      const int step = static_cast<int>(system.a_col);
      return {step < 0 ? Shape::kWidth - 1 : 0, Shape::kRowPitch, step};
    }
    const int step = static_cast<int>(system.a_row);
    return {step < 0 ? Shape::kHeight - 1 : 0, step, Shape::kColumnPitch};
  }
};

template <class Shape>
struct TileCursor {
  int panel = 0;  // first column
  int row = 0;    // first row

  __device__ __forceinline__ bool inside(int n) const { return panel < n; }
  __device__ __forceinline__ bool has_diagonal() const { return row == panel; }
  __device__ __forceinline__ void advance(int n) {
    row += Shape::kHeight;
    if (row >= n) {
      panel += Shape::kWidth;
      row = panel;
    }
  }
};

// Starts the copy of one tile of M in runs of kRun elements, 1 or a vector (n a multiple of it, `a`
// aligned): all runs that meet the lower triangle, no others.
template <int kRun, class T, class Shape>
__device__ __forceinline__ void load_tile(T* tile, const T* a, const LowerSystem& system, int n,
                                          const TileLayout& layout, const TileCursor<Shape>& at) {
  struct alignas(kRun * sizeof(T)) Run {
    T v[kRun];
  };
  const bool by_rows = rows_contiguous(system);
  const int run_length = by_rows ? Shape::kWidth : Shape::kHeight;
  const int runs = run_length / kRun;  // of a row, or column; divides the threads, or is divided
  const int first = static_cast<int>(threadIdx.x) % runs * kRun;
  const int line = threadIdx.x / runs;
  const int line_step = Shape::kHeight / runs;
  const bool backwards = layout.origin != 0;
  // Entries first .. first + kRun - 1 of a line, in the order of memory `low` first.
  const int low = backwards ? first + kRun - 1 : first;
  int i = at.row + (by_rows ? line : low);
  int k = at.panel + (by_rows ? low : line);
  // The run meets the triangle if k_min <= i_max.
  const int last = kRun - 1;
  const int slack = by_rows ? (backwards ? last : 0) : (backwards ? 0 : last);
  const int step_i = by_rows ? line_step : 0;
  const int step_k = by_rows ? 0 : line_step;
  const T* source = a + system.a_start + a_offset(system, i, k);
  const int source_step = a_offset(system, step_i, step_k);
  T* destination =
      tile + layout.origin + (i - at.row) * layout.row_step + (k - at.panel) * layout.column_step;
  const int destination_step = step_i * layout.row_step + step_k * layout.column_step;
#pragma unroll 4
  for (int step = 0; step < Shape::kWidth / kRun; ++step) {
    if (i < n && k <= i + slack) {
      copy_async(reinterpret_cast<Run*>(destination), reinterpret_cast<const Run*>(source));
    }
    source += source_step;
    destination += destination_step;
    i += step_i;
    k += step_k;
  }
}

// c <- c - M(i, k) y_k for the panel's columns k, in order; `y` at the panel, `row` at row i.
// A lane per row: scalars of a column are neighbours, rows are read in vectors.
template <class Shape, int kColumns, class T>
__device__ __forceinline__ void subtract_column_tile(T (&c)[kColumns], const T* row,
                                                     int column_step, const T* y) {
#pragma unroll 8
  for (int k = 0; k < Shape::kWidth; ++k) {
    const T m = row[k * column_step];
#pragma unroll
    for (int r = 0; r < kColumns; ++r) c[r] = sub_mul(c[r], m, y[k * kColumns + r]);
  }
}
template <class Shape, bool kBackwards, int kColumns, class T>
__device__ __forceinline__ void subtract_row_tile(T (&c)[kColumns], const T* row, const T* y) {
  constexpr int kV = kVector<T>;
#pragma unroll 4
  for (int k = 0; k < Shape::kWidth; k += kV) {
    const int position = kBackwards ? Shape::kWidth - kV - k : k;
    const Vector<T> m = *reinterpret_cast<const Vector<T>*>(row + position);
#pragma unroll
    for (int z = 0; z < kV; ++z) {
#pragma unroll
      for (int r = 0; r < kColumns; ++r) {
        c[r] = sub_mul(c[r], m.v[kBackwards ? kV - 1 - z : z], y[(k + z) * kColumns + r]);
      }
    }
  }
}

// One warp solves a diagonal block: lane i holds row i; in turn each quotient y_k goes to all
// lanes:
//   c_i <- c_i - M(i, k) y_k.
// Returns whether all quotients were valid; c then holds them.
template <bool kQuick, int kColumns, class T>
__device__ __forceinline__ bool solve_diagonal_block(T (&c)[kColumns], const Divisor<T>& divisor,
                                                     const T* row, int column_step, int steps) {
  const int lane = threadIdx.x;
#pragma unroll(kQuick ? 4 : 1)
  for (int k = 0; k < steps; ++k) {
    const T m = row[k * column_step];
#pragma unroll
    for (int r = 0; r < kColumns; ++r) {
      const T y_k = shuffle(kQuick ? divisor.quick(c[r]) : divisor(c[r]), k);
      if (lane > k) c[r] = sub_mul(c[r], m, y_k);
    }
  }
  bool valid = true;
#pragma unroll
  for (int r = 0; r < kColumns; ++r) {
    valid = valid && (lane >= steps || divisor.covers(c[r]));
    c[r] = kQuick ? divisor.quick(c[r]) : divisor(c[r]);
  }
  return __all_sync(kFullWarp, valid);
}

// One sweep. y(i, c) at y[i * kColumns + c] holds C on entry and Y on return.
template <class Shape, int kColumns, class T>
__device__ __forceinline__ void block_sweep(T* tiles, T* y, const T* a, const LowerSystem& system,
                                            int n, bool unit_diagonal, bool vectors) {
  const int thread = threadIdx.x;
  const TileLayout layout = TileLayout::of<Shape>(system);
  TileCursor<Shape> loading, at;
  int load_stage = 0, stage = 0;
  const auto load_next = [&] {
    if (loading.inside(n)) {
      T* const tile = tiles + load_stage * Shape::kTile;
      if (vectors) {
        load_tile<kVector<T>>(tile, a, system, n, layout, loading);
      } else {
        load_tile<1>(tile, a, system, n, layout, loading);
      }
      loading.advance(n);
    }
    commit_copies();
    load_stage = load_stage + 1 == Shape::kStages ? 0 : load_stage + 1;
  };
  for (int ahead = 0; ahead < Shape::kStages - 1; ++ahead) load_next();
  for (; at.inside(n); at.advance(n)) {
    wait_for_copies<Shape::kStages - 2>();
    __syncthreads();  // the tile is there, and the one before it is done with
    load_next();

    const T* const tile = tiles + stage * Shape::kTile;
    const T* const row = tile + layout.origin + thread * layout.row_step;
    const int i = at.row + thread;
    T* const own = y + i * kColumns;
    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
    if (at.has_diagonal()) {
      if (thread < 32) {
        const int steps = min(Shape::kWidth, n - at.panel);
        const bool inside = thread < steps;
        T c[kColumns];
#pragma unroll
        for (int r = 0; r < kColumns; ++r) c[r] = inside ? own[r] : T(0);
        const Divisor<T> divisor =
            Divisor<T>::of(inside && !unit_diagonal ? row[thread * layout.column_step] : T(1));
        if (!solve_diagonal_block<true>(c, divisor, row, layout.column_step, steps)) {
#pragma unroll
          for (int r = 0; r < kColumns; ++r) c[r] = inside ? own[r] : T(0);
          solve_diagonal_block<false>(c, divisor, row, layout.column_step, steps);
        }
#pragma unroll
        for (int r = 0; r < kColumns; ++r) {
          if (inside) own[r] = c[r];
        }
      }
      __syncthreads();
    }
    if (i < n && i >= at.panel + Shape::kWidth) {
      T c[kColumns];
#pragma unroll
      for (int r = 0; r < kColumns; ++r) c[r] = own[r];
      const T* const y_panel = y + at.panel * kColumns;
      if (!rows_contiguous(system)) {
        subtract_column_tile<Shape>(c, row, layout.column_step, y_panel);
      } else if (layout.column_step < 0) {
        subtract_row_tile<Shape, true>(c, tile + thread * Shape::kRowPitch, y_panel);
      } else {
        subtract_row_tile<Shape, false>(c, tile + thread * Shape::kRowPitch, y_panel);
      }
#pragma unroll
      for (int r = 0; r < kColumns; ++r) own[r] = c[r];
    }
  }
  __syncthreads();
}

// Work item: (matrix, group of kColumns columns), the group running fastest.
template <class T, int kHeight, int kColumns, int kSweeps>
__global__ void __launch_bounds__(kHeight)
    block_substitution(const Substitution<T> s, const int64_t column_groups) {
  using Shape = BlockSubstitutionShape<T, kHeight>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const tiles = reinterpret_cast<T*>(shared);
  T* const y = tiles + Shape::kStages * Shape::kTile;
  const int n = s.n;
  const LowerSystem& system = s.first;
  const bool columns_fastest = system.x_col == 1;
  const bool vectors = n % kVector<T> == 0 && reinterpret_cast<uintptr_t>(s.a) % 16 == 0;

  for (int64_t item = blockIdx.x; item < s.batch * column_groups; item += gridDim.x) {
    const int64_t entry = item / column_groups;
    const int64_t column = (item - entry * column_groups) * kColumns;
    const T* const a = s.a_of(entry);
    const T* const b = s.b_of(entry);
    T* const x = s.x_of(entry);
    for (int e = threadIdx.x; e < n * kColumns; e += Shape::kHeight) {
      const int i = columns_fastest ? e / kColumns : e % n;
      const int c = columns_fastest ? e % kColumns : e / n;
      const bool inside = column + c < s.nrhs;
      const T value = inside ? b[x_offset(system, i, column + c)] : T(0);
      y[i * kColumns + c] = conj_if(system.conjugate, value);
    }
    block_sweep<Shape, kColumns>(tiles, y, a, system, n, s.unit_diagonal, vectors);
    if constexpr (kSweeps == 2) {
      // The second sweep starts from the last row: turn y upside down.
      for (int e = threadIdx.x; e < (n + 1) / 2 * kColumns; e += Shape::kHeight) {
        const int mirror = (n - 1 - e / kColumns) * kColumns + e % kColumns;
        const T upper = y[e];
        const T lower = y[mirror];
        y[e] = conj(lower);
        y[mirror] = conj(upper);
      }
      block_sweep<Shape, kColumns>(tiles, y, a, s.second, n, false, vectors);
    }
    for (int e = threadIdx.x; e < n * kColumns; e += Shape::kHeight) {
      const int i = columns_fastest ? e / kColumns : e % n;
      const int c = columns_fastest ? e % kColumns : e / n;
      if (column + c < s.nrhs) {
        const LowerSystem& last = kSweeps == 2 ? s.second : s.first;
        x[x_offset(last, i, column + c)] = conj_if(last.conjugate, y[i * kColumns + c]);
      }
    }
    __syncthreads();  // y is overwritten next
  }
}

}  // namespace jax_batched::cuda
