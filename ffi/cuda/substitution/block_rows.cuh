// Substitution, "block_rows": a warp per kRows rows of the right-hand sides; many columns.
//
// A block takes 32 / lanes matrices, and of each lanes * kColumns columns. The triangle lies in
// shared memory for both sweeps. Warp I holds c_I, kRows rows of all these columns, in
// registers from b to x, a lane kRows x kColumns of it, so that an entry of L that is read serves
// kColumns columns and one of y kRows rows:
//   c_I <- c_I - M(I, J) y_J  for the warps J < I, in turn,  then  y_I = M(I, I)^-1 c_I,
// which goes through shared memory to the warps after I. While one of them solves, the others still
// subtract. The y that a lane reads was written by the same lane of another warp.
#pragma once

#include <climits>

#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/quotient.cuh"
#include "ffi/cuda/substitution/substitution.cuh"

namespace jax_batched::cuda {

// kCount neighbouring elements, moved by vectors as wide as can be.
template <class T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Pack {
  T v[kCount];
};

// Shared memory: the triangle of each matrix as a triangle of tiles of L (lanes_shared.cuh),
// in the order of rows, each tile row by row; y; the divisors.
template <class T, int kRows, int kColumns>
struct BlockRowsSubstitutionShape {
  static constexpr int kMaxWarps = kRows == 16 ? 12 : 16;
  // Blocks that the register cap is for: while some of their warps wait, those of others work.
  // Uncapped (0), the compiler takes few registers for the other shapes, and many for a cap of 1.
  static constexpr int kMinBlocks = kColumns == 2 ? 2 : 0;
  static constexpr int kTile = kRows * kRows;
  static constexpr int kPitch = 33 * kColumns;  // of a row of y; by an odd number of packs
  int warps;
  int lanes;  // of a warp, per matrix: a power of two

  __host__ __device__ int matrices() const { return 32 / lanes; }
  static __host__ __device__ int tile(int row, int column) {
    return (row * (row + 1) / 2 + column) * kTile;
  }
  // A vector more than the tiles: lanes of up to 8 matrices read different banks.
  __host__ __device__ int matrix_pitch() const { return tile(warps, 0) + kVector<T>; }
  __host__ __device__ int y_offset() const { return matrices() * matrix_pitch(); }
  __host__ __device__ int elements() const { return y_offset() + warps * kRows * kPitch; }
  __host__ __device__ size_t shared_bytes() const {
    return elements() * sizeof(T) + matrices() * warps * kRows * sizeof(Divisor<T>);
  }
};

// What a lane does with its part c of the rows.
template <class T, int kRows, int kColumns>
struct LaneRows {
  static constexpr int kPitch = BlockRowsSubstitutionShape<T, kRows, kColumns>::kPitch;
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
// rows from n on. Vectors whose order is the reverse arrive as they are: call reverse() after that.
// Lanes copy the matrix that they work on, so that each looks up one. For the smallest shape that
// takes registers which more blocks need: there the whole warp goes through the matrices.
template <class T, int kRows, int kColumns>
struct TileLoader {
  using Shape = BlockRowsSubstitutionShape<T, kRows, kColumns>;
  static constexpr int kV = kVector<T>;
  static constexpr int kVectors = kRows * kRows / kV;
  static constexpr bool kOwnMatrix = sizeof(T) * kRows * kColumns > 32;
  T* tiles;
  const Substitution<T>& s;
  const Shape& shape;
  int64_t first;
  bool upper;
  int warp, lane;

  __device__ __forceinline__ bool aligned() const {
    return s.n % kV == 0 && reinterpret_cast<uintptr_t>(s.a.data) % 16 == 0;
  }
  __device__ __forceinline__ const T* matrix(int m) const {
    return s.a_of(min(first + m, s.batch - 1));
  }

  // Calls visit(m, where, i, k) for each vector of this thread, which begins at row i and column k
  // of matrix m.
  template <class Visit>
  __device__ __forceinline__ void for_each_vector(const Visit& visit) const {
    for_each_tile(shape.warps, warp, shape.warps, [&](int row, int column) {
      const int tile = shape.tile(row, column);
      const auto at = [&](int m, int v) {
        const int position = v * kV;
        visit(m, tiles + m * shape.matrix_pitch() + tile + position, row * kRows + position / kRows,
              column * kRows + position % kRows);
      };
      if constexpr (kOwnMatrix) {
#pragma unroll 4
        for (int v = lane % shape.lanes; v < kVectors; v += shape.lanes) at(lane / shape.lanes, v);
      } else {
#pragma unroll 4
        for (int e = lane; e < shape.matrices() * kVectors; e += 32) at(e / kVectors, e % kVectors);
      }
    });
  }

  __device__ __forceinline__ void start_copy() const {
    const int n = s.n;
    const bool whole = aligned();
    const T* const own = matrix(lane / shape.lanes);
    for_each_vector([&](int m, T* to, int i, int k) {
      const T* const a = kOwnMatrix ? own : matrix(m);
      if (i >= n) {
        *reinterpret_cast<Vector<T>*>(to) = Vector<T>{};
      } else if (!whole) {
        for (int z = 0; z < kV; ++z) {
          const int at = i * n + k + z;
          if (k + z <= i) copy_async(to + z, a + (upper ? n * n - 1 - at : at));
        }
      } else if (k <= i) {
        const int at = i * n + k;
        copy_async(reinterpret_cast<Vector<T>*>(to),
                   reinterpret_cast<const Vector<T>*>(a + (upper ? n * n - kV - at : at)));
      }
    });
  }

  // After this thread's copies have arrived.
  __device__ __forceinline__ void reverse() const {
    if (!upper || !aligned()) return;
    for_each_vector([&](int, T* tile, int i, int k) {
      if (k > i) return;
      const auto stored = *reinterpret_cast<const Vector<T>*>(tile);
      Vector<T> reversed;
#pragma unroll
      for (int z = 0; z < kV; ++z) reversed.v[z] = stored.v[kV - 1 - z];
      *reinterpret_cast<Vector<T>*>(tile) = reversed;
    });
  }
};

// A lane's part of a warp's rows in global memory. Neighbouring columns of a row are neighbours
// there, or, kTransposed (x a = b), neighbouring rows of a column, forwards or backwards; they move
// as vectors where these are aligned. Those of rows are of 16 bytes, where a line of memory is
// looked up for each lane, so two lanes move two of the one's column, then two of the other's.
template <class T, int kRows, int kColumns, bool kTransposed>
struct GlobalRows {
  using Rows = LaneRows<T, kRows, kColumns>;
  using Columns = typename Rows::Columns;
  static constexpr int kV = kVector<T>;
  static_assert(kRows % (2 * kV) == 0);
  int64_t start, row_step, column_step;  // entry (i, z) of the part, from the matrix
  int rows;                              // of the part that are real; may be more, or none
  int columns;                           // so, of this part and those right of it
  bool aligned;                          // the vectors, where the matrices themselves are

  __device__ __forceinline__ int64_t at(int i, int z) const {
    return start + i * row_step + (kTransposed ? z * column_step : z);
  }
  __device__ __forceinline__ bool by_vectors(const T* matrices) const {
    constexpr int kBytes = kTransposed ? sizeof(Vector<T>) : alignof(Columns);
    return aligned && reinterpret_cast<uintptr_t>(matrices) % kBytes == 0;
  }

  // Calls move(v, offset) for the two vectors, of rows i and i + kV on in column z, of which this
  // lane moves v for its neighbour's column or for its own: first z of the even lane, then of the
  // odd one.
  template <class Move>
  __device__ __forceinline__ void move_pair(int i, int z, const Move& move) const {
    const bool odd = threadIdx.x % 2 != 0;
    const int row = odd ? i + kV : i;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int column = (odd ? v - 1 : v) * kColumns + z;
      if (row < rows && column < columns) {
        move(v, start + column * column_step + (row_step > 0 ? row : 1 - kV - row));
      }
    }
  }
  // (v[0], v[1]) of an even lane and its neighbour's as a 2x2 matrix, transposed.
  static __device__ __forceinline__ void transpose(Vector<T> (&v)[2]) {
    const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
    for (int q = 0; q < kV; ++q) {
      const T other = shuffle_xor(odd ? v[0].v[q] : v[1].v[q], 1);
      v[0].v[q] = odd ? other : v[0].v[q];
      v[1].v[q] = odd ? v[1].v[q] : other;
    }
  }

  __device__ __forceinline__ void load(Rows& mine, const T* matrices, const T* b) const {
    if (!by_vectors(matrices)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int z = 0; z < kColumns; ++z) {
          mine.c[i][z] = i < rows && z < columns ? b[at(i, z)] : T(0);
        }
      }
    } else if constexpr (kTransposed) {
#pragma unroll
      for (int z = 0; z < kColumns; ++z) {
#pragma unroll
        for (int i = 0; i < kRows; i += 2 * kV) {
          Vector<T> v[2] = {};
          move_pair(i, z, [&](int of, int64_t offset) {
            v[of] = *reinterpret_cast<const Vector<T>*>(b + offset);
          });
          transpose(v);
#pragma unroll
          for (int q = 0; q < 2 * kV; ++q) {
            const T(&entries)[kV] = v[q / kV].v;
            mine.c[i + q][z] = row_step > 0 ? entries[q % kV] : entries[kV - 1 - q % kV];
          }
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        Columns row{};
        if (i < rows && columns > 0) row = *reinterpret_cast<const Columns*>(b + at(i, 0));
#pragma unroll
        for (int z = 0; z < kColumns; ++z) mine.c[i][z] = row.v[z];
      }
    }
  }

  __device__ __forceinline__ void store(const Rows& mine, const T* matrices, T* x) const {
    if (!by_vectors(matrices)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int z = 0; z < kColumns; ++z) {
          if (i < rows && z < columns) x[at(i, z)] = mine.c[i][z];
        }
      }
    } else if constexpr (kTransposed) {
#pragma unroll
      for (int z = 0; z < kColumns; ++z) {
#pragma unroll
        for (int i = 0; i < kRows; i += 2 * kV) {
          Vector<T> v[2];
#pragma unroll
          for (int q = 0; q < kV; ++q) {
            v[0].v[q] = row_step > 0 ? mine.c[i + q][z] : mine.c[i + kV - 1 - q][z];
            v[1].v[q] = row_step > 0 ? mine.c[i + kV + q][z] : mine.c[i + 2 * kV - 1 - q][z];
          }
          transpose(v);
          move_pair(i, z, [&](int of, int64_t offset) {
            *reinterpret_cast<Vector<T>*>(x + offset) = v[of];
          });
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        Columns row;
#pragma unroll
        for (int z = 0; z < kColumns; ++z) row.v[z] = mine.c[i][z];
        if (i < rows && columns > 0) *reinterpret_cast<Columns*>(x + at(i, 0)) = row;
      }
    }
  }
};

// Work item: (matrices of a block, group of columns), the group running fastest.
template <class T, int kRows, int kColumns, bool kTransposed>
__global__ void __launch_bounds__(32 * BlockRowsSubstitutionShape<T, kRows, kColumns>::kMaxWarps,
                                  BlockRowsSubstitutionShape<T, kRows, kColumns>::kMinBlocks)
    block_rows_substitution(const Substitution<T> s, const int sweeps,
                            const BlockRowsSubstitutionShape<T, kRows, kColumns> shape,
                            const int64_t column_groups) {
  static_assert(!kIsComplex<T>, "nothing is conjugated here");
  using Shape = BlockRowsSubstitutionShape<T, kRows, kColumns>;
  using Rows = LaneRows<T, kRows, kColumns>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const tiles = reinterpret_cast<T*>(shared);
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  const int matrix = lane / shape.lanes;
  const LowerSystem& system = s.first;
  const bool by_rows = rows_contiguous(system);
  const bool upper = by_rows == (system.a_start != 0);
  T* const y = tiles + shape.y_offset();
  T* const own = y + warp * kRows * Shape::kPitch + lane * kColumns;
  Divisor<T>* const divisors =
      reinterpret_cast<Divisor<T>*>(tiles + shape.elements()) + warp * shape.matrices() * kRows;
  const T* const l = tiles + matrix * shape.matrix_pitch();

  const int64_t item = blockIdx.x;
  const int64_t group = item / column_groups;
  const int64_t first = group * shape.matrices();
  const TileLoader<T, kRows, kColumns> loader{tiles, s, shape, first, upper, warp, lane};
  loader.start_copy();
  commit_copies();

  const int64_t entry = first + matrix;
  const int64_t column =
      ((item - group * column_groups) * shape.lanes + lane % shape.lanes) * kColumns;
  GlobalRows<T, kRows, kColumns, kTransposed> global;
  global.row_step = by_rows ? system.x_row : -system.x_row;
  global.column_step = system.x_col;
  global.start = system.x_start + (by_rows ? 0 : (s.n - 1) * system.x_row) +
                 warp * kRows * global.row_step + column * global.column_step;
  global.rows = s.n - warp * kRows;
  // As far as move_pair looks; a lane without a matrix has none.
  global.columns =
      entry < s.batch ? static_cast<int>(min(s.nrhs - column, int64_t{2 * kColumns})) : INT_MIN;
  global.aligned = kTransposed ? s.n % kVector<T> == 0 : s.nrhs % kColumns == 0;
  Rows mine;
  global.load(mine, s.b.template as<const T>(), s.b_of(entry));
  wait_for_copies<0>();
  loader.reverse();
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
        if (i >= global.rows) mine.c[i][r] = T(0);
      }
    }
#pragma unroll 1
    for (int step = 0; step < shape.warps; ++step) {
      const int j = ascending ? step : shape.warps - 1 - step;
      if (warp == j) {
        mine.solve(l + shape.tile(j, j), divisors + matrix * kRows, own, ascending);
      }
      __syncthreads();
      const T* const y_j = y + j * kRows * Shape::kPitch + lane * kColumns;
      if (ascending && warp > j) mine.subtract_rows(l + shape.tile(warp, j), y_j);
      if (!ascending && warp < j) mine.subtract_columns(l + shape.tile(j, warp), y_j);
    }
  }
  global.store(mine, s.x.template as<T>(), s.x_of(entry));
}

}  // namespace jax_batched::cuda
