// Substitution, "panels": a warp per kRows rows of the right-hand sides; many columns.
//
// A block takes 32 / lanes matrices, and of each lanes * kColumns columns. The triangle lies in
// shared memory for both sweeps. Warp I holds the panel c_I, kRows rows of all these columns, in
// registers from b to x, a lane kRows x kColumns of it, so that an entry of L that is read serves
// kColumns columns and one of y kRows rows:
//   c_I <- c_I - M(I, J) y_J  for the panels J < I, in turn,  then  y_I = M(I, I)^-1 c_I,
// which goes through shared memory to the warps after I. While one of them solves, the others still
// subtract. Both of a lane's parts are of its own columns: lanes of a warp meet only where panels
// are transposed on their way in and out (x a = b).
#pragma once

#include "ffi/cuda/tile/async_copy.cuh"
#include "ffi/cuda/tile/quotient.cuh"
#include "ffi/cuda/tile/substitution.cuh"

namespace jax_batched::cuda {

// kCount neighbouring elements, moved by vectors as wide as can be.
template <class T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Pack {
  T v[kCount];
};

// Shared memory: the triangle of each matrix as a triangle of tiles of L (substitution_warp.cuh)
// in the order of rows, each tile row by row; the divisors; y.
template <class T, int kRows, int kColumns>
struct PanelsShape {
  static constexpr int kMaxPanels = sizeof(T) == 4 && kRows == 16 ? 12 : 16;
  // Blocks that the register cap is for: while some of their warps wait, those of others work.
  // Uncapped (0), the compiler takes few registers for the other shapes, and many for a cap of 1.
  static constexpr int kMinBlocks = sizeof(T) == 4 && kColumns == 2 ? 2 : 0;
  static constexpr int kTile = kRows * kRows;
  static constexpr int kPitch = 33 * kColumns;  // of a row of y; by an odd number of packs
  int panels;
  int lanes;  // of a warp, per matrix: a power of two

  __host__ __device__ int matrices() const { return 32 / lanes; }
  static __host__ __device__ int tile(int row, int column) {
    return (row * (row + 1) / 2 + column) * kTile;
  }
  // A vector more than the tiles: lanes of up to 8 matrices read different banks.
  __host__ __device__ int matrix_pitch() const { return tile(panels, 0) + kVector<T>; }
  __host__ __device__ int y_offset() const { return matrices() * matrix_pitch(); }
  __host__ __device__ int elements() const { return y_offset() + panels * kRows * kPitch; }
  __host__ __device__ size_t shared_bytes() const {
    return elements() * sizeof(T) + matrices() * panels * kRows * sizeof(Divisor<T>);
  }
};

// What a lane does with its part c of a panel.
template <class T, int kRows, int kColumns>
struct LanePanel {
  static constexpr int kPitch = PanelsShape<T, kRows, kColumns>::kPitch;
  static constexpr int kStep = 4;
  using Columns = Pack<T, kColumns>;
  using Entries = Pack<T, kStep>;
  T c[kRows][kColumns];

  // c_i <- c_i - L(i, k) y_k, k ascending, with the rows of a tile.
  __device__ __forceinline__ void subtract_rows(const T* tile, const T* y) {
#pragma unroll 1
    for (int k = 0; k < kRows; k += kStep) {
      Columns y_k[kStep];
#pragma unroll
      for (int z = 0; z < kStep; ++z) {
        y_k[z] = *reinterpret_cast<const Columns*>(y + (k + z) * kPitch);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const Entries m = *reinterpret_cast<const Entries*>(tile + i * kRows + k);
#pragma unroll
        for (int z = 0; z < kStep; ++z) subtract(i, m.v[z], y_k[z]);
      }
    }
  }

  // c_i <- c_i - L(k, i) y_k, k descending, with the columns of a tile.
  __device__ __forceinline__ void subtract_columns(const T* tile, const T* y) {
#pragma unroll 4
    for (int k = kRows - 1; k >= 0; --k) {
      const Columns y_k = *reinterpret_cast<const Columns*>(y + k * kPitch);
#pragma unroll
      for (int i = 0; i < kRows; i += kStep) {
        const Entries m = *reinterpret_cast<const Entries*>(tile + k * kRows + i);
#pragma unroll
        for (int z = 0; z < kStep; ++z) subtract(i + z, m.v[z], y_k);
      }
    }
  }

  // c <- y, the solution with a diagonal tile, which goes to `own` as well. The quick quotients are
  // taken unless one of the warp's was not valid; then all is done again, in shared memory.
  __device__ __forceinline__ void solve(const T* tile, const Divisor<T>* divisors, T* own,
                                        bool ascending) {
    put(own);
    const bool valid = ascending ? ascend(tile, divisors) : descend(tile, divisors);
    if (__all_sync(kFullWarp, valid)) {
      put(own);
    } else {
      solve_unquick(tile, divisors, own, ascending);
      get(own);
    }
  }

  __device__ __forceinline__ void put(T* own) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Columns columns;
#pragma unroll
      for (int r = 0; r < kColumns; ++r) columns.v[r] = c[i][r];
      *reinterpret_cast<Columns*>(own + i * kPitch) = columns;
    }
  }
  __device__ __forceinline__ void get(const T* own) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Columns columns = *reinterpret_cast<const Columns*>(own + i * kPitch);
#pragma unroll
      for (int r = 0; r < kColumns; ++r) c[i][r] = columns.v[r];
    }
  }

 private:
  __device__ __forceinline__ void subtract(int i, T m, const Columns& y) {
#pragma unroll
    for (int r = 0; r < kColumns; ++r) c[i][r] = sub_mul(c[i][r], m, y.v[r]);
  }

  __device__ __forceinline__ bool divide(int k, const Divisor<T>& divisor, Columns& y) {
    bool valid = true;
#pragma unroll
    for (int r = 0; r < kColumns; ++r) {
      valid = valid && divisor.covers(c[k][r]);
      y.v[r] = c[k][r] = divisor.quick(c[k][r]);
    }
    return valid;
  }

  __device__ __forceinline__ bool ascend(const T* tile, const Divisor<T>* divisors) {
    bool valid = true;
#pragma unroll
    for (int first = 0; first < kRows; first += kStep) {
      Columns y[kStep];
#pragma unroll
      for (int i = first; i < kRows; ++i) {
        const Entries m = *reinterpret_cast<const Entries*>(tile + i * kRows + first);
#pragma unroll
        for (int z = 0; z < kStep; ++z) {
          if (first + z < i) subtract(i, m.v[z], y[z]);
        }
        if (i < first + kStep) valid = divide(i, divisors[i], y[i - first]) && valid;
      }
    }
    return valid;
  }

  __device__ __forceinline__ bool descend(const T* tile, const Divisor<T>* divisors) {
    bool valid = true;
#pragma unroll
    for (int k = kRows - 1; k >= 0; --k) {
      Columns y;
      valid = divide(k, divisors[k], y) && valid;
#pragma unroll
      for (int i = 0; i < k; i += kStep) {
        const Entries m = *reinterpret_cast<const Entries*>(tile + k * kRows + i);
#pragma unroll
        for (int z = 0; z < kStep; ++z) {
          if (i + z < k) subtract(i + z, m.v[z], y);
        }
      }
    }
    return valid;
  }

  static __device__ __forceinline__ void solve_unquick(const T* tile, const Divisor<T>* divisors,
                                                       T* own, bool ascending) {
#pragma unroll 1
    for (int step = 0; step < kRows; ++step) {
      const int k = ascending ? step : kRows - 1 - step;
#pragma unroll 1
      for (int r = 0; r < kColumns; ++r) {
        const T y_k = divisors[k](own[k * kPitch + r]);
        own[k * kPitch + r] = y_k;
#pragma unroll 1
        for (int i = ascending ? k + 1 : 0; i < (ascending ? kRows : k); ++i) {
          const T m = ascending ? tile[i * kRows + k] : tile[k * kRows + i];
          own[i * kPitch + r] = sub_mul(own[i * kPitch + r], m, y_k);
        }
      }
    }
  }
};

// Copies the triangles of a block's matrices, first and the next ones, to shared memory; zeros in
// rows from n on. Asynchronous but where the order of a vector is reversed. Lanes copy the matrix
// that they work on, so that each looks up one. For the smallest shape that takes registers which
// more blocks need: there the warp copies one matrix after the other.
template <class T, int kRows, int kColumns>
__device__ __forceinline__ void load_tiles(T* tiles, const Substitution<T>& s,
                                           const PanelsShape<T, kRows, kColumns>& shape,
                                           int64_t first, bool upper, int warp, int lane) {
  constexpr int kV = kVector<T>;
  constexpr int kVectors = kRows * kRows / kV;
  constexpr bool kOwnMatrix = sizeof(T) * kRows * kColumns > 32;
  const int n = s.n;
  const bool aligned = n % kV == 0 && reinterpret_cast<uintptr_t>(s.a) % 16 == 0;
  const auto matrix = [&](int m) { return s.a_of(min(first + m, s.batch - 1)); };
  // Vector v of a tile at (row, column) of the triangle of tiles.
  const auto copy = [&](T* tile, const T* a, int row, int column, int v) {
    const int position = v * kV;
    const int i = row * kRows + position / kRows;
    const int k = column * kRows + position % kRows;
    T* const to = tile + position;
    if (i >= n) {
      *reinterpret_cast<Vector<T>*>(to) = Vector<T>{};
    } else if (!aligned) {
      for (int z = 0; z < kV; ++z) {
        const int at = i * n + k + z;
        if (k + z <= i) copy_async(to + z, a + (upper ? n * n - 1 - at : at));
      }
    } else if (k <= i && upper) {
      const auto stored = *reinterpret_cast<const Vector<T>*>(a + (n * n - kV - i * n - k));
      Vector<T> reversed;
#pragma unroll
      for (int z = 0; z < kV; ++z) reversed.v[z] = stored.v[kV - 1 - z];
      *reinterpret_cast<Vector<T>*>(to) = reversed;
    } else if (k <= i) {
      copy_async(reinterpret_cast<Vector<T>*>(to),
                 reinterpret_cast<const Vector<T>*>(a + i * n + k));
    }
  };
  const T* const own_a = matrix(lane / shape.lanes);
  T* const own = tiles + lane / shape.lanes * shape.matrix_pitch();
  int row = 0, column = warp;
  while (true) {
    for (; column > row; ++row) column -= row + 1;
    if (row >= shape.panels) break;
    const int tile = shape.tile(row, column);
    if constexpr (kOwnMatrix) {
#pragma unroll 4
      for (int v = lane % shape.lanes; v < kVectors; v += shape.lanes) {
        copy(own + tile, own_a, row, column, v);
      }
    } else {
#pragma unroll 4
      for (int e = lane; e < shape.matrices() * kVectors; e += 32) {
        const int m = e / kVectors;
        copy(tiles + m * shape.matrix_pitch() + tile, matrix(m), row, column, e % kVectors);
      }
    }
    column += shape.panels;
  }
}

// A warp's panel in global memory. Rows of x are contiguous (column_step is 1) or (x a = b) its
// columns (row_step is 1 or -1), which are transposed in shared memory.
template <class T, int kRows, int kColumns>
struct GlobalPanel {
  using Panel = LanePanel<T, kRows, kColumns>;
  using Columns = typename Panel::Columns;
  int64_t start, row_step, column_step;  // entry (i, r) of this panel's rows, all columns
  int64_t column, nrhs;                  // the block's first column
  int64_t first, batch;                  // its first matrix
  int rows;                              // of the panel that are real
  int lanes, lane;

  __device__ __forceinline__ bool vectors(const T* matrices) const {
    return column_step == 1 && nrhs % kColumns == 0 &&
           reinterpret_cast<uintptr_t>(matrices) % alignof(Columns) == 0;
  }
  // Calls move(offset from the matrix, matrix, position in y) for each entry.
  template <class Move>
  __device__ __forceinline__ void each(const Move& move) const {
    const bool columns_fastest = column_step == 1;
    const int width = lanes * kColumns;
#pragma unroll 4
    for (int e = lane; e < kRows * 32 * kColumns; e += 32) {
      const int i = columns_fastest ? e / (32 * kColumns) : e % kRows;
      const int position = columns_fastest ? e % (32 * kColumns) : e / kRows;
      const int64_t r = column + position % width;
      const int64_t entry = first + position / width;
      if (i < rows && r < nrhs && entry < batch) {
        move(start + i * row_step + r * column_step, entry, i * Panel::kPitch + position);
      }
    }
  }

  __device__ __forceinline__ void load(Panel& panel, const Substitution<T>& s, T* own, T* y) const {
    if (vectors(s.b)) {
      const int64_t entry = min(first + lane / lanes, batch - 1);
      const int64_t r = column + lane % lanes * kColumns;
      const T* const b = s.b_of(entry) + start + r;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        Columns columns{};
        if (i < rows && r < nrhs) {
          columns = *reinterpret_cast<const Columns*>(b + i * row_step);
        }
#pragma unroll
        for (int z = 0; z < kColumns; ++z) panel.c[i][z] = columns.v[z];
      }
      return;
    }
    if (kColumns > 1 && column_step == 1) {
      const int64_t entry = min(first + lane / lanes, batch - 1);
      const int64_t r = column + lane % lanes * kColumns;
      const T* const b = s.b_of(entry) + start + r;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int z = 0; z < kColumns; ++z) {
          panel.c[i][z] = i < rows && r + z < nrhs ? b[i * row_step + z] : T(0);
        }
      }
      return;
    }
    for (int e = lane; e < kRows * Panel::kPitch; e += 32) y[e] = T(0);
    __syncwarp();
    each([&](int64_t offset, int64_t entry, int position) { y[position] = s.b_of(entry)[offset]; });
    __syncwarp();
    panel.get(own);
  }

  __device__ __forceinline__ void store(const Panel& panel, const Substitution<T>& s, T* own,
                                        T* y) const {
    const int64_t entry = first + lane / lanes;
    const int64_t r = column + lane % lanes * kColumns;
    if (vectors(s.x)) {
      T* const x = s.x_of(entry) + start + r;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        Columns columns;
#pragma unroll
        for (int z = 0; z < kColumns; ++z) columns.v[z] = panel.c[i][z];
        if (i < rows && r < nrhs && entry < batch) {
          *reinterpret_cast<Columns*>(x + i * row_step) = columns;
        }
      }
      return;
    }
    if (kColumns > 1 && column_step == 1) {
      T* const x = s.x_of(entry) + start + r;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int z = 0; z < kColumns; ++z) {
          if (i < rows && r + z < nrhs && entry < batch) x[i * row_step + z] = panel.c[i][z];
        }
      }
      return;
    }
    __syncthreads();  // no warp reads y any more
    panel.put(own);
    __syncwarp();
    each([&](int64_t offset, int64_t entry, int position) { s.x_of(entry)[offset] = y[position]; });
  }
};

// Work item: (matrices of a block, group of columns), the group running fastest.
template <class T, int kRows, int kColumns>
__global__ void __launch_bounds__(32 * PanelsShape<T, kRows, kColumns>::kMaxPanels,
                                  PanelsShape<T, kRows, kColumns>::kMinBlocks)
    panels_substitution(const Substitution<T> s, const int sweeps,
                        const PanelsShape<T, kRows, kColumns> shape, const int64_t column_groups) {
  static_assert(!kIsComplex<T>, "nothing is conjugated here");
  using Shape = PanelsShape<T, kRows, kColumns>;
  using Panel = LanePanel<T, kRows, kColumns>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const tiles = reinterpret_cast<T*>(shared);
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  const int matrix = lane / shape.lanes;
  const LowerSystem& system = s.first;
  const bool by_rows = rows_contiguous(system);
  const bool upper = by_rows == (system.a_start != 0);
  T* const y = tiles + shape.y_offset();
  T* const panel_y = y + warp * kRows * Shape::kPitch;
  T* const own = panel_y + lane * kColumns;
  Divisor<T>* const divisors =
      reinterpret_cast<Divisor<T>*>(tiles + shape.elements()) + warp * shape.matrices() * kRows;
  const T* const l = tiles + matrix * shape.matrix_pitch();

  const int64_t item = blockIdx.x;
  const int64_t group = item / column_groups;
  const int64_t first = group * shape.matrices();
  load_tiles(tiles, s, shape, first, upper, warp, lane);
  commit_copies();

  GlobalPanel<T, kRows, kColumns> global;
  global.row_step = by_rows ? system.x_row : -system.x_row;
  global.column_step = system.x_col;
  global.start =
      system.x_start + (by_rows ? 0 : (s.n - 1) * system.x_row) + warp * kRows * global.row_step;
  global.column = (item - group * column_groups) * shape.lanes * kColumns;
  global.nrhs = s.nrhs;
  global.first = first;
  global.batch = s.batch;
  global.rows = s.n - warp * kRows;
  global.lanes = shape.lanes;
  global.lane = lane;
  Panel panel;
  global.load(panel, s, own, panel_y);
  wait_for_copies<0>();
  __syncthreads();

  for (int e = lane; e < shape.matrices() * kRows; e += 32) {
    const int i = e % kRows;
    const bool one = s.unit_diagonal || i >= global.rows;
    const T* const diagonal = tiles + e / kRows * shape.matrix_pitch() + shape.tile(warp, warp);
    divisors[e] = Divisor<T>::of(one ? T(1) : diagonal[i * kRows + i]);
  }
  __syncwarp();

#pragma unroll 1
  for (int pass = 0; pass < sweeps; ++pass) {
    const bool ascending = by_rows == (pass == 0);
    // Rows from n on start from zero again: they may have become NaN.
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int r = 0; r < kColumns; ++r) {
        if (i >= global.rows) panel.c[i][r] = T(0);
      }
    }
#pragma unroll 1
    for (int step = 0; step < shape.panels; ++step) {
      const int j = ascending ? step : shape.panels - 1 - step;
      if (warp == j) {
        panel.solve(l + shape.tile(j, j), divisors + matrix * kRows, own, ascending);
      }
      __syncthreads();
      const T* const y_j = y + j * kRows * Shape::kPitch + lane * kColumns;
      if (ascending && warp > j) panel.subtract_rows(l + shape.tile(warp, j), y_j);
      if (!ascending && warp < j) panel.subtract_columns(l + shape.tile(j, warp), y_j);
    }
  }
  global.store(panel, s, own, panel_y);
}

}  // namespace jax_batched::cuda
