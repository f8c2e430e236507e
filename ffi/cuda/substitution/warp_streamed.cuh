// Substitution, "warp_streamed": a warp per matrix and group of kColumns columns; any n whose
// right-hand sides fit in shared memory.
//
// The triangle streams through shared memory in tiles of 32 x 32 of L (lanes_shared.cuh), row
// of tiles by row of tiles, as it lies in memory: from the first to the last ascending, backwards
// descending. kStages tiles are in shared memory or on their way. A tile that has been worked on is
// replaced by the one kStages further on; at the turn from the first sweep to the second that is
// none, so the second starts with the last kStages tiles of the first still there, and finds those
// before them in L2 if not too many matrices are in flight. What it copies is marked as the first
// to leave L2: there it would only take the places of tiles that another matrix's second sweep
// wants.
#pragma once

#include "ffi/cuda/substitution/lanes_shared.cuh"

namespace jax_batched::cuda {

// Where the rows of a tile lie in shared memory: an odd number of vectors apart, for lanes that
// read vectors of neighbouring rows.
template <class T, bool kAligned>
struct TileLayout {
  static constexpr int kPitch = 32 + kVector<T>;
  static constexpr int kTile = 32 * kPitch + skipped_before<T, !kAligned>(32);

  static __device__ __forceinline__ int row(int r) {
    return r * kPitch + skipped_before<T, !kAligned>(r);
  }
};

template <class T, int kColumns, int kStages, bool kAligned>
struct WarpStreamedSubstitutionShape {
  static constexpr int kTile = TileLayout<T, kAligned>::kTile;
  static size_t shared_bytes(int64_t n) {
    return (kStages * kTile + static_cast<size_t>(n + 31) / 32 * 32 * kColumns) * sizeof(T);
  }
};

// A tile of the lower triangle of tiles, in the order of memory.
struct TriangleCursor {
  int row, column;

  static __device__ __forceinline__ TriangleCursor start(bool ascending, int tiles) {
    return ascending ? TriangleCursor{0, 0} : TriangleCursor{tiles - 1, tiles - 1};
  }
  __device__ __forceinline__ bool inside(int tiles) const { return row >= 0 && row < tiles; }
  __device__ __forceinline__ bool diagonal() const { return row == column; }
  __device__ __forceinline__ void advance(bool ascending) {
    if (ascending) {
      if (++column > row) {
        ++row;
        column = 0;
      }
    } else if (--column < 0) {
      column = --row;
    }
  }
};

// The stored triangle of one matrix, seen as L. kAligned: rows are whole vectors at 16-byte
// addresses.
template <class T, bool kAligned>
struct StoredTriangle {
  static constexpr int kV = kVector<T>;
  using Layout = TileLayout<T, kAligned>;
  const T* a;
  int n;
  bool upper;
  int shift;       // elements that a lies past a 16-byte boundary
  bool outermost;  // vectors beyond its ends may not be memory of other matrices

  // The lowest address among L(s, c), ..., L(s, c + 31), from a.
  __device__ __forceinline__ int run(int s, int c) const {
    return upper ? n * n - s * n - c - 32 : s * n + c;
  }
  // Where L(s, c) of a tile with first column c lies in the tile's row s.
  __device__ __forceinline__ int origin(int s) const { return past_boundary(s) + (upper ? 31 : 0); }

  // Elements between a vector boundary and the first element of the run in row s.
  __device__ __forceinline__ int past_boundary(int s) const {
    return kAligned ? 0 : (shift + run(s, 0)) & (kV - 1);
  }

  // Starts the copy of a tile: all vectors that hold some of the triangle, no others. A pass takes
  // kV rows, so a lane's rows all start at the same place within a vector. kLast: it will not be
  // read again.
  template <bool kLast>
  __device__ __forceinline__ void copy(T* tile, const TriangleCursor& at, int lane) const {
    if (!kAligned && outermost && (at.row == 0 || 32 * at.row + 32 >= n)) {
      copy_vectors<true, false>(tile, at, lane);
    } else {
      copy_vectors<false, kLast>(tile, at, lane);
    }
  }

 private:
  // kInside: copies nothing outside the matrix.
  template <bool kInside, bool kLast>
  __device__ __forceinline__ void copy_vectors(T* tile, const TriangleCursor& at, int lane) const {
    constexpr int kRun = 32 / kV;  // vectors of a row; one more if it is not aligned
    const int row = lane / kRun, position = lane % kRun * kV;
    const int s = 32 * at.row + row;
    const int past = past_boundary(s);
    // Of the entries in a vector, the one with the least column.
    const int c = 32 * at.column + (upper ? 32 - kV - position + past : position - past);
    unsigned passes = ~0u;  // bit u: c <= s + u * kV < n
    if (at.diagonal() || 32 * at.row + 32 > n) passes = passes_below(n - s) & ~passes_below(c - s);
    const T* from = a + run(s, 32 * at.column) - past + position;
    T* const to = tile + Layout::row(row) + position;
    const int step = upper ? -kV * n : kV * n;
#pragma unroll kInside ? 1 : kRun
    for (int u = 0; u < kRun; ++u) {
      if (passes >> u & 1) copy_vector<kInside, kLast>(to + Layout::row(u * kV), from);
      from += step;
    }
    if constexpr (!kAligned) {
      const int last = 32 * at.row + lane;  // the row whose vector beyond kRun this lane copies
      const int before = past_boundary(last);
      const bool some = upper || 32 * at.column + 32 - before <= last;
      if (before != 0 && last < n && some) {
        copy_vector<kInside, kLast>(tile + Layout::row(lane) + 32,
                                    a + run(last, 32 * at.column) - before + 32);
      }
    }
  }

  // Bits 0, 1, ... of the passes u with u * kV < rows.
  static __device__ __forceinline__ unsigned passes_below(int rows) {
    constexpr int kRun = 32 / kV;
    const int passes = min(max((rows + kV - 1) / kV, 0), kRun);
    return static_cast<unsigned>((uint64_t{1} << passes) - 1);
  }

  template <bool kInside, bool kLast>
  __device__ __forceinline__ void copy_vector(T* to, const T* from) const {
    if constexpr (kInside) {
      copy_vector_inside(to, a, static_cast<int>(from - a), n * n);
    } else if constexpr (kLast) {
      copy_async_last(reinterpret_cast<Vector<T>*>(to), reinterpret_cast<const Vector<T>*>(from));
    } else {
      copy_async(reinterpret_cast<Vector<T>*>(to), reinterpret_cast<const Vector<T>*>(from));
    }
  }
};

// `kCount` neighbouring elements at a 16-byte aligned address in shared memory.
template <int kCount, class T>
__device__ __forceinline__ void load_shared(T (&to)[kCount], const T* from) {
  constexpr int kV = kVector<T>;
  static_assert(kCount % kV == 0);
#pragma unroll
  for (int k = 0; k < kCount; k += kV) {
    const Vector<T> v = *reinterpret_cast<const Vector<T>*>(from + k);
#pragma unroll
    for (int z = 0; z < kV; ++z) to[k + z] = v.v[z];
  }
}

// What one warp does with a tile. y(v, c) at y[v * kColumns + c] holds the right-hand sides, entry
// v the one of row v of L, and in their place the solutions.
template <class T, int kColumns, bool kAligned>
struct StreamedTile {
  using Sweep = LanesSweep<T, 32, 1, kColumns, kAligned>;
  static constexpr int kSteps = Sweep::kGroup;
  using Layout = TileLayout<T, kAligned>;

  // y(i) of the diagonal block from c_i, by its substitution.
  static __device__ __forceinline__ void solve_diagonal(Sweep& sweep, T (&c)[kColumns], bool unit,
                                                        bool ascending) {
    const int lane = sweep.lane;
    const T* const own = sweep.folded + sweep.origin[0];
    const bool one = unit || lane >= sweep.n;
    sweep.divisor[0] = Divisor<T>::of(one ? T(1) : own[sweep.direction * lane]);
    T y[1][kColumns];
#pragma unroll
    for (int r = 0; r < kColumns; ++r) y[0][r] = c[r];
    if (!__all_sync(kFullWarp, sweep.template solve<true>(y, 1, ascending))) {
#pragma unroll
      for (int r = 0; r < kColumns; ++r) y[0][r] = c[r];
      sweep.template solve<false>(y, 1, ascending);
    }
#pragma unroll
    for (int r = 0; r < kColumns; ++r) c[r] = y[0][r];
  }

  // c_i <- c_i - L(i, k) y_k for the tile's columns k, ascending; a lane per row, `y` at the tile's
  // columns.
  static __device__ __forceinline__ void subtract_rows(const Sweep& sweep, T (&c)[kColumns],
                                                       const T* y) {
#pragma unroll
    for (int k = 0; k < 32; k += kSteps) {
      T m[kSteps], y_k[kSteps * kColumns];
      sweep.row_entries(0, k, m);
      load_shared(y_k, y + k * kColumns);
#pragma unroll
      for (int z = 0; z < kSteps; ++z) {
#pragma unroll
        for (int r = 0; r < kColumns; ++r) c[r] = sub_mul(c[r], m[z], y_k[z * kColumns + r]);
      }
    }
  }

  // c_i <- c_i - L(k, i) y_k for the tile's rows k, descending; a lane per column, `y` at the
  // tile's rows.
  static __device__ __forceinline__ void subtract_columns(
      const StoredTriangle<T, kAligned>& triangle, const Sweep& sweep, T (&c)[kColumns], const T* y,
      int row) {
    const T* const own = sweep.folded + sweep.direction * sweep.lane;
    constexpr int kV = kVector<T>;
    const T* first[kV];  // of row k at first[k % kV] + Layout::row(k)
#pragma unroll
    for (int k = 0; k < kV; ++k) first[k] = own + triangle.origin(row + k);
    // Rows k, ..., k + kSteps - 1 of which `rows` are real.
    const auto steps = [&](int k, int rows) {
      T y_k[kSteps * kColumns];
      load_shared(y_k, y + k * kColumns);
#pragma unroll
      for (int z = kSteps - 1; z >= 0; --z) {
        const T m = first[z % kV][Layout::row(k) + z * Layout::kPitch];
#pragma unroll
        for (int r = 0; r < kColumns; ++r) {
          if (z < rows) c[r] = sub_mul(c[r], m, y_k[z * kColumns + r]);
        }
      }
    };
    if (sweep.n == 32) {
#pragma unroll
      for (int k = 32 - kSteps; k >= 0; k -= kSteps) steps(k, kSteps);
    } else {
#pragma unroll 1
      for (int k = (sweep.n - 1) / kSteps * kSteps; k >= 0; k -= kSteps) steps(k, sweep.n - k);
    }
  }
};

// Work item: (matrix, group of kColumns columns), the group running fastest. kUsual: one right-hand
// side, a lower triangle, and operands as many as results: constants, which save a step's
// instructions.
template <class T, int kColumns, int kStages, bool kAligned, bool kUsual>
__global__ void __launch_bounds__(32)
    warp_streamed_substitution(const Substitution<T> s, const int sweeps,
                               const int64_t column_groups) {
  using Shape = WarpStreamedSubstitutionShape<T, kColumns, kStages, kAligned>;
  using Tile = StreamedTile<T, kColumns, kAligned>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const tiles = reinterpret_cast<T*>(shared);
  T* const y = tiles + kStages * Shape::kTile;
  const int lane = threadIdx.x;
  const int n = s.n;
  const int side = ceil_div(n, 32);  // of the triangle, in tiles
  const LowerSystem& system = s.first;
  const bool by_rows = rows_contiguous(system);
  const bool upper = !kUsual && upper_stored(system);
  const int64_t start = system.x_start + (by_rows ? 0 : (n - 1) * system.x_row);
  const int64_t x_start = kUsual ? 0 : start;
  const int64_t x_row = kUsual ? 1 : by_rows ? system.x_row : -system.x_row;
  const bool columns_fastest = kUsual || system.x_col == 1;
  const bool plain = kUsual || s.a.contiguous();
  const bool one_reader = kUsual || (column_groups == 1 && plain);  // of each matrix

  for (int64_t item = blockIdx.x; item < s.batch * column_groups; item += gridDim.x) {
    const int64_t entry = kUsual ? item : item / column_groups;
    const int64_t column = kUsual ? 0 : (item - entry * column_groups) * kColumns;
    const int columns = kUsual ? 1 : static_cast<int>(min(int64_t{kColumns}, s.nrhs - column));
    StoredTriangle<T, kAligned> triangle;
    triangle.a = kUsual ? s.a.template as<const T>() + entry * n * n : s.a_of(entry);
    triangle.n = n;
    triangle.upper = upper;
    triangle.shift = past_vector(triangle.a);
    // A vector may be longer than a matrix of one row.
    triangle.outermost = !plain || entry == 0 || entry == s.batch - 1 || n == 1;

    typename Tile::Sweep sweep;
    sweep.lane = lane;
    sweep.direction = upper ? -1 : 1;

    TriangleCursor loading = TriangleCursor::start(by_rows, side);
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      if (loading.inside(side)) {
        triangle.template copy<false>(tiles + stage * Shape::kTile, loading, lane);
      }
      commit_copies();
      loading.advance(by_rows);
    }
    const T* const b = kUsual ? s.b.template as<const T>() + entry * n
                              : s.b_of(entry) + x_start + column * system.x_col;
#pragma unroll 8
    for (int e = lane; e < 32 * side * kColumns; e += 32) {
      const int v = columns_fastest ? e / kColumns : e % (32 * side);
      const int c = columns_fastest ? e % kColumns : e / (32 * side);
      const bool inside = v < n && c < columns;
      const T value = inside ? b[v * x_row + c * system.x_col] : T(0);
      y[v * kColumns + c] = conj_if(system.conjugate, value);
    }
    __syncwarp();

    int stage = 0;
    T c[kColumns];
#pragma unroll 1
    for (int pass = 0; pass < sweeps; ++pass) {
      const bool ascending = by_rows == (pass == 0);
      TriangleCursor at = TriangleCursor::start(ascending, side);
      if (pass > 0) {
        for (int e = lane; e < n * kColumns; e += 32) y[e] = conj(y[e]);
        __syncwarp();
        loading = at;
        for (int k = 0; k < kStages; ++k) loading.advance(ascending);
      }
#pragma unroll 1
      while (true) {
        wait_for_copies<kStages - 1>();
        __syncwarp();
        T* const tile = tiles + stage * Shape::kTile;
        sweep.folded = tile;
        sweep.n = min(32, n - 32 * at.row);
        sweep.origin[0] = Tile::Layout::row(lane) + triangle.origin(32 * at.row + lane);
        T* const own = y + (32 * (ascending ? at.row : at.column) + lane) * kColumns;
        if (at.column == 0 || !ascending) {
#pragma unroll
          for (int r = 0; r < kColumns; ++r) c[r] = own[r];
        }
        if (at.diagonal()) {
          Tile::solve_diagonal(sweep, c, s.unit_diagonal, ascending);
        } else if (ascending) {
          Tile::subtract_rows(sweep, c, y + 32 * at.column * kColumns);
        } else {
          Tile::subtract_columns(triangle, sweep, c, y + 32 * at.row * kColumns, 32 * at.row);
        }
        if (at.diagonal() || !ascending) {
#pragma unroll
          for (int r = 0; r < kColumns; ++r) own[r] = c[r];
        }
        __syncwarp();
        if (loading.inside(side)) {
          if (pass > 0 && one_reader) {
            triangle.template copy<true>(tile, loading, lane);
          } else {
            triangle.template copy<false>(tile, loading, lane);
          }
        }
        commit_copies();
        loading.advance(ascending);
        at.advance(ascending);
        if (!at.inside(side)) break;
        stage += pass == 0 ? 1 : -1;
        if (stage == kStages) stage = 0;
        if (stage < 0) stage = kStages - 1;
      }
    }

    T* const x =
        kUsual ? s.x.template as<T>() + entry * n : s.x_of(entry) + x_start + column * system.x_col;
    const bool conjugate = system.conjugate != (sweeps == 2);
    for (int e = lane; e < n * kColumns; e += 32) {
      const int v = columns_fastest ? e / kColumns : e % n;
      const int r = columns_fastest ? e % kColumns : e / n;
      if (r < columns) x[v * x_row + r * system.x_col] = conj_if(conjugate, y[v * kColumns + r]);
    }
    __syncwarp();  // y is overwritten next
  }
}

}  // namespace jax_batched::cuda
