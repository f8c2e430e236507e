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

template <class T>
struct BlockSubstitutionShape {
  static constexpr int kHeight = 128;             // rows of a tile: one per thread
  static constexpr int kWidth = 128 / sizeof(T);  // columns: a cache line of a row
  static constexpr int kPitch = kWidth + 1;       // odd: lanes on a column meet no bank conflict
  static constexpr int kStages = 3;
  static constexpr int kTile = kHeight * kPitch;
  static constexpr size_t kTilesBytes = kStages * kTile * sizeof(T);
};

template <class T>
struct TileCursor {
  using Shape = BlockSubstitutionShape<T>;
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

// Starts the copy of one tile of M: its entries in the lower triangle, no others.
template <class T>
__device__ __forceinline__ void load_tile(T* tile, const T* a, const LowerSystem& system, int n,
                                          bool unit_diagonal, const TileCursor<T>& at) {
  using Shape = BlockSubstitutionShape<T>;
  const int thread = threadIdx.x;
  const bool by_rows = rows_contiguous(system);
  // By rows: kWidth threads per row. By columns: all threads per column.
  const int first_i = by_rows ? thread / Shape::kWidth : thread;
  const int first_k = by_rows ? thread % Shape::kWidth : 0;
  const int step_i = by_rows ? Shape::kHeight / Shape::kWidth : 0;
  const int step_k = by_rows ? 0 : 1;
  const T* source = a + system.a_start + a_offset(system, at.row + first_i, at.panel + first_k);
  const int source_step = a_offset(system, step_i, step_k);
  T* destination = tile + first_i * Shape::kPitch + first_k;
  const int destination_step = step_i * Shape::kPitch + step_k;
  int i = at.row + first_i;
  int k = at.panel + first_k + (unit_diagonal ? 1 : 0);  // copied if k <= i
#pragma unroll 4
  for (int step = 0; step < Shape::kWidth; ++step) {
    if (i < n && k <= i) copy_async(destination, source);
    source += source_step;
    destination += destination_step;
    i += step_i;
    k += step_k;
  }
}

// One sweep. y(i, c) at y[i * y_step + c] holds C on entry and Y on return; y_step may be negative.
template <int kColumns, class T>
__device__ __forceinline__ void block_sweep(T* tiles, T* y, int y_step, const T* a,
                                            const LowerSystem& system, int n, bool unit_diagonal) {
  using Shape = BlockSubstitutionShape<T>;
  const int thread = threadIdx.x;
  TileCursor<T> loading, at;
  int load_stage = 0, stage = 0;
#pragma unroll
  for (int ahead = 0; ahead < Shape::kStages - 1; ++ahead) {
    if (loading.inside(n)) {
      load_tile(tiles + load_stage * Shape::kTile, a, system, n, unit_diagonal, loading);
      loading.advance(n);
    }
    commit_copies();
    load_stage = (load_stage + 1) % Shape::kStages;
  }
  for (; at.inside(n); at.advance(n)) {
    wait_for_copies<Shape::kStages - 2>();
    __syncthreads();  // the tile is there, and the one before it is done with
    if (loading.inside(n)) {
      load_tile(tiles + load_stage * Shape::kTile, a, system, n, unit_diagonal, loading);
      loading.advance(n);
    }
    commit_copies();
    load_stage = (load_stage + 1) % Shape::kStages;

    const T* const row = tiles + stage * Shape::kTile + thread * Shape::kPitch;
    const int i = at.row + thread;
    T* const own = y + i * y_step;
    stage = (stage + 1) % Shape::kStages;
    if (at.has_diagonal()) {
      // The diagonal block: lane i holds row i; in turn each quotient y_k goes to all lanes, and
      //   c_i <- c_i - M(i, k) y_k.
      if (thread < 32) {
        const int steps = min(Shape::kWidth, n - at.panel);
        const bool inside = thread < steps;
        T c[kColumns];
#pragma unroll
        for (int r = 0; r < kColumns; ++r) c[r] = inside ? own[r] : T(0);
        const Divisor<T> divisor =
            Divisor<T>::of(inside && !unit_diagonal ? row[thread % Shape::kWidth] : T(1));
#pragma unroll 4
        for (int k = 0; k < steps; ++k) {
          const T m = row[k];
#pragma unroll
          for (int r = 0; r < kColumns; ++r) {
            const T quotient = divisor(c[r]);
            const T y_k = shuffle(quotient, k);
            const T updated = sub_mul(c[r], m, y_k);
            if (thread > k) c[r] = updated;
            if (thread == k) c[r] = quotient;
          }
        }
#pragma unroll
        for (int r = 0; r < kColumns; ++r) {
          if (inside) own[r] = c[r];
        }
      }
      __syncthreads();
    }
    // The rows below: a thread per row, c_i <- c_i - M(i, k) y_k for the panel's columns k.
    if (i < n && i >= at.panel + Shape::kWidth) {
      T c[kColumns];
#pragma unroll
      for (int r = 0; r < kColumns; ++r) c[r] = own[r];
      const T* y_k = y + at.panel * y_step;
#pragma unroll 8
      for (int k = 0; k < Shape::kWidth; ++k) {
        const T m = row[k];
#pragma unroll
        for (int r = 0; r < kColumns; ++r) c[r] = sub_mul(c[r], m, y_k[r]);
        y_k += y_step;
      }
#pragma unroll
      for (int r = 0; r < kColumns; ++r) own[r] = c[r];
    }
  }
  __syncthreads();
}

// Work item: (matrix, group of kColumns columns), the group running fastest.
template <class T, int kColumns, int kSweeps>
__global__ void __launch_bounds__(BlockSubstitutionShape<T>::kHeight)
    block_substitution(const Substitution<T> s, const int64_t column_groups) {
  using Shape = BlockSubstitutionShape<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const tiles = reinterpret_cast<T*>(shared);
  T* const y = tiles + Shape::kStages * Shape::kTile;
  const int n = s.n;
  const LowerSystem& system = s.first;
  const bool columns_fastest = system.x_col == 1;

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
    block_sweep<kColumns>(tiles, y, kColumns, a, system, n, s.unit_diagonal);
    if constexpr (kSweeps == 2) {
      if constexpr (kIsComplex<T>) {
        for (int e = threadIdx.x; e < n * kColumns; e += Shape::kHeight) y[e] = conj(y[e]);
      }
      block_sweep<kColumns>(tiles, y + (n - 1) * kColumns, -kColumns, a, s.second, n, false);
    }
    for (int e = threadIdx.x; e < n * kColumns; e += Shape::kHeight) {
      const int i = columns_fastest ? e / kColumns : e % n;
      const int c = columns_fastest ? e % kColumns : e / n;
      if (column + c < s.nrhs) {
        x[x_offset(system, i, column + c)] =
            conj_if(system.conjugate != (kSweeps == 2), y[i * kColumns + c]);
      }
    }
    __syncthreads();  // y is overwritten next
  }
}

}  // namespace jax_batched::cuda
