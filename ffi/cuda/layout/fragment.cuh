// A Hermitian matrix held by one warp in 8x8 tiles: lane (g = lane / 4, t = lane % 4) holds row g,
// columns 2t and 2t+1 of each tile of the lower triangle. It is the layout of a tensor-core
// accumulator, and a global load or store of a tile covers whole 32-byte sectors in either
// direction: 8 rows of 8 elements, or 8 columns of 8.
#pragma once

#include <cstdint>

#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/storage.cuh"
#include "ffi/cuda/layout/staging.cuh"
#include "ffi/cuda/layout/view.cuh"

namespace jax_batched::cuda {

// Lower tiles of a matrix of up to 8 * kTiles rows; tile (i, j) is m[i][j], j <= i.
template <class T, int kTiles>
using Fragment = T[kTiles][kTiles][2];

// Tiles of `a` from entry (row, column) on, from global memory. kWhole: so many rows of tiles end
// before its last row. With kSquare all tiles, as they are, rows past the last one zero; else those
// of the lower triangle `part`, rows past the last one those of the identity.
template <int kWhole, bool kSquare, bool kPairs, bool kMean, class T, int kTiles>
__device__ __forceinline__ void load_tiles(Fragment<T, kTiles>& m, const View<T>& a, Part part,
                                           int row, int column, int lane) {
  const int g = lane / 4, h = 2 * (lane % 4), n = a.rows;
  // From entry (r, c) of the triangle to (r + 1, c) and (r, c + 1), and so of its mirror image.
  const bool swapped = !kMean && part.upper;
  const int down = swapped ? 1 : a.ld, right = swapped ? a.ld : 1;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int r = row + 8 * i + g;
    const bool inside = i < kWhole || r < n;
    // Of a square, rows past the last one read it, for nothing: a branch around every load would
    // wait for each.
    const int from = kSquare && i >= kWhole ? min(r, n - 1) : r;
    const T* below = a.data + from * down + (column + h) * right;
    const T* above = a.at(column + h, from);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (!kSquare && j > i) continue;
      const int c = column + 8 * j + h;
      const bool first = kSquare || (inside && (j < i || c <= r));
      const bool second = kSquare || (inside && (j < i || c < r));
      Pair<T> v{T(!kSquare && r == c), T(!kSquare && r == c + 1)};
      if (kPairs) {
        if (first) v = *reinterpret_cast<const Pair<T>*>(below);
      } else {
        if (first) v.a = below[0];
        if (second) v.b = below[right];
      }
      if (kMean) {  // of entries of the identity the mean is what they are
        Pair<T> mirrored = v;
        if (first) mirrored.a = above[0];
        if (second) mirrored.b = above[a.ld];
        v = {part.mean_of<T>(v.a, mirrored.a), part.mean_of<T>(v.b, mirrored.b)};
      }
      if (kSquare && !inside) v = {T(0), T(0)};
      m[i][j][0] = v.a;
      m[i][j][1] = v.b;
      below += 8 * right;
      above += 8 * a.ld;
    }
  }
}
template <int kWhole, bool kSquare = false, class T, int kTiles>
__device__ __forceinline__ void load_fragment(Fragment<T, kTiles>& m, const View<T>& a, Part part,
                                              int row, int column, int lane) {
  const bool pairs = kVector<T> > 1 && a.ld % 2 == 0;
  if (part.mean && pairs) {
    load_tiles<kWhole, kSquare, true, true>(m, a, part, row, column, lane);
  } else if (part.mean) {
    load_tiles<kWhole, kSquare, false, true>(m, a, part, row, column, lane);
  } else if (part.upper) {
    load_tiles<kWhole, kSquare, false, false>(m, a, {true, false}, row, column, lane);
  } else if (pairs) {
    load_tiles<kWhole, kSquare, true, false>(m, a, {false, false}, row, column, lane);
  } else {
    load_tiles<kWhole, kSquare, false, false>(m, a, {false, false}, row, column, lane);
  }
}

// A matrix in global memory: how many elements past a 16-byte boundary it begins, and how many
// elements from its first one on may be read (its own, and some of what follows).
template <class S>
struct MatrixRun {
  const S* data;
  int shift;
  int available;
};

// Eight rows of a matrix in one warp's shared memory, on their way in (fetch, take) or out (flush).
// In global memory they are one run, moved as 16-byte vectors. On the way out that saves the
// partial sectors which fragment stores would write where a row is not a multiple of 32 bytes (a
// factor 2 in time). On the way in it saves registers: asynchronous copies wait for memory without
// them.
//
// Element (r, c) of the 8 rows lies at shift + r * stride + c. Exact sizes use padded rows, against
// bank conflicts; others lie as in global memory, `shift` elements past a 16-byte boundary.
template <class S, int kTiles, bool kExact>
struct RowStage {
  using T = Computed<S>;
  // The pairs of neighbouring rows in different banks; of 8-byte elements, also a tile's columns.
  static constexpr int kPaddedRow =
      8 * kTiles + (sizeof(S) <= 4 ? (kTiles % 2 == 0 ? 8 : 0) : kVector<S>);
  static constexpr int kElements = 8 * (kExact ? kPaddedRow : 8 * kTiles);

  int n, stride;

  explicit __device__ __forceinline__ RowStage(int size)
      : n(kExact ? 8 * kTiles : size), stride(kExact ? kPaddedRow : size) {}

  // Matrix `index` of `batch`, from an array on a 16-byte boundary.
  __device__ __forceinline__ MatrixRun<S> matrix(const S* array, int64_t index,
                                                 int64_t batch) const {
    const int64_t offset = index * n * n, left = (batch - index) * n * n;
    return {array + offset, kExact ? 0 : static_cast<int>(offset % kVector<S>),
            static_cast<int>(min(left, int64_t{1} << 20))};
  }

  // Starts the copy of rows 8p .. of a matrix. Vectors at the ends reach into the matrices around.
  __device__ __forceinline__ void fetch(S* stage, const MatrixRun<S>& a, int p, int lane) const {
    const int begin = 8 * p * n - a.shift, end = min(n, 8 * p + 8) * n;
    for_each_vector(lane, [&](int vector, int position) {
      const int first = begin + vector * kVector<S>;
      if (kExact || (first < end && first + kVector<S> <= a.available)) {
        copy_async(reinterpret_cast<Vector<S>*>(stage + position),
                   reinterpret_cast<const Vector<S>*>(a.data + first));
      } else if (first < end) {  // the last of the last matrix
        for (int e = first; e < a.available; ++e) stage[position + e - first] = a.data[e];
      }
    });
  }

  // What a factorization reads of rows 8p .. -> fragments, for p from 0 on: of two mirrored entries
  // the upper one, read first, waits in the fragment of the lower one.
  __device__ __forceinline__ void take(Fragment<T, kTiles>& m, const S* stage, int shift, int p,
                                       Part part, int lane) const {
    if (kExact || n % 2 == 0) {
      take_rows<true>(m, stage + shift, p, part, lane);
    } else {
      take_rows<false>(m, stage + shift, p, part, lane);
    }
  }

  static __device__ __forceinline__ void clear(S* stage, int lane) {
    for (int v = lane; v < kElements / kVector<S>; v += 32) {
      reinterpret_cast<uint4*>(stage)[v] = uint4{0, 0, 0, 0};
    }
  }

  // Writes rows 8p .. of L (or of U: columns 8p.. of L, transposed) to l, a factor. Needs the stage
  // cleared before p = 0: what lies right of the diagonal tile is never written; for U the tile
  // left of it is cleared.
  __device__ __forceinline__ void flush(S* stage, const Fragment<T, kTiles>& m, int p, S* l,
                                        int shift, bool upper, int lane) const {
    put(stage, m, p, shift, upper, lane);
    __syncwarp();
    store(stage, p, l, shift, lane);
    __syncwarp();
  }
  // The two halves of it: m -> stage, and stage -> l.
  __device__ __forceinline__ void put(S* stage, const Fragment<T, kTiles>& m, int p, int shift,
                                      bool upper, int lane) const {
    const int g = lane / 4, c = 2 * (lane % 4);
    S* s = stage + shift;
    if (!upper) {
      const auto in_rows = kExact || p < kTiles - 1 || 8 * p + g < n;
      const auto in_matrix = [&](int j, int column) {
        return in_rows && (kExact || j < kTiles - 1 || column < n);
      };
      S* to = s + g * stride + c;
      if (kExact || n % 2 == 0) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          if (j > p || !in_matrix(j, 8 * j + c)) continue;
          *reinterpret_cast<Pair<S>*>(to + 8 * j) = {narrow<S>(m[p][j][0]), narrow<S>(m[p][j][1])};
        }
      } else {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          if (j > p) continue;
          if (in_matrix(j, 8 * j + c)) to[8 * j] = narrow<S>(m[p][j][0]);
          if (in_matrix(j, 8 * j + c + 1)) to[8 * j + 1] = narrow<S>(m[p][j][1]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (i < p - 1) continue;
        const bool zero = i == p - 1;
        S* to = s + c * stride + 8 * i + g;
        const bool in_columns = kExact || i < kTiles - 1 || 8 * i + g < n;
        const bool all_rows = kExact || p < kTiles - 1;
        if (in_columns && (all_rows || 8 * p + c < n)) to[0] = narrow<S>(zero ? T(0) : m[i][p][0]);
        if (in_columns && (all_rows || 8 * p + c + 1 < n))
          to[stride] = narrow<S>(zero ? T(0) : m[i][p][1]);
      }
    }
  }
  __device__ __forceinline__ void store(const S* stage, int p, S* l, int shift, int lane) const {
    S* run = l + 8 * p * n;
    if constexpr (kExact) {
      for_each_vector(lane, [&](int vector, int position) {
        reinterpret_cast<Vector<S>*>(run)[vector] =
            *reinterpret_cast<const Vector<S>*>(stage + position);
      });
    } else {
      store_run<kElements>(run, shift, min(8, n - 8 * p) * n, stage, lane);
    }
  }

 private:
  // Calls f(vector, position) for this lane's vectors of the run: which one it is, and where it
  // lies in the stage.
  template <class F>
  static __device__ __forceinline__ void for_each_vector(int lane, F&& f) {
    constexpr int kVectors = 64 * kTiles / kVector<S>, kRowVectors = 8 * kTiles / kVector<S>;
    constexpr int kUnroll = kExact ? ceil_div(kVectors, 32) : kVectorUnroll<kVectors>;
#pragma unroll kUnroll
    for (int first = 0; first < kVectors; first += 32) {
      const int v = first + lane;
      if (kVectors % 32 != 0 && v >= kVectors) continue;
      const int padding =
          kElements == 64 * kTiles ? 0 : v / kRowVectors * (kPaddedRow - 8 * kTiles);
      f(v, v * kVector<S> + padding);
    }
  }

  template <bool kPairs>
  __device__ __forceinline__ void take_rows(Fragment<T, kTiles>& m, const S* rows, int p, Part part,
                                            int lane) const {
    const int g = lane / 4, h = 2 * (lane % 4);
    // This lane's pair of tile (p, j), and of the transposed tile (p, j).
    const auto across = [&](int j) {
      const S* s = rows + g * stride + 8 * j + h;
      if (!kPairs) return Pair<T>{widen(s[0]), widen(s[1])};
      const auto v = *reinterpret_cast<const Pair<S>*>(s);
      return Pair<T>{widen(v.a), widen(v.b)};
    };
    const auto down = [&](int j) {
      const S* s = rows + h * stride + 8 * j + g;
      return Pair<T>{widen(s[0]), widen(s[stride])};
    };
    // Tile (i, j) = v, of the identity above the diagonal and from row n on.
    const auto set = [&](int i, int j, Pair<T> v) {
      const int r = 8 * i + g, c = 8 * j + h;
      const bool in_matrix = kExact || i < kTiles - 1 || r < n;
      m[i][j][0] = in_matrix && (j < i || c <= r) ? v.a : T(r == c);
      m[i][j][1] = in_matrix && (j < i || c < r) ? v.b : T(r == c + 1);
    };
    if (part.mean) {
      const auto mean = [&](Pair<T> below, Pair<T> above) {
        return Pair<T>{part.mean_of<S>(below.a, above.a), part.mean_of<S>(below.b, above.b)};
      };
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (j < p) {
          set(p, j, mean(across(j), {m[p][j][0], m[p][j][1]}));
        } else if (j == p) {
          set(p, p, mean(across(p), down(p)));
        } else {
          const Pair<T> above = down(j);
          m[j][p][0] = above.a;
          m[j][p][1] = above.b;
        }
      }
    } else if (part.upper) {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (j >= p) set(j, p, down(j));
      }
    } else {
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (j <= p) set(p, j, across(j));
      }
    }
  }
};

// Loads kGroup matrices through shared memory, `kArea` elements of S for each: as many rows of
// tiles as fit are on their way at once.
template <int kGroup, int kArea, class S, class T, int kTiles, bool kExact>
__device__ __forceinline__ void load_staged(Fragment<T, kTiles> (&m)[kGroup],
                                            const RowStage<S, kTiles, kExact>& rows, S* shared,
                                            const MatrixRun<S> (&a)[kGroup], Part part, int lane) {
  using Rows = RowStage<S, kTiles, kExact>;
  constexpr int kFlight = kArea / Rows::kElements < kTiles ? kArea / Rows::kElements : kTiles;
  static_assert(kFlight > 0 && kArea % kVector<S> == 0);
  const auto stage = [&](int q, int p) {
    return shared + q * kArea + p % kFlight * Rows::kElements;
  };
  // One group of copies, an empty one past the last row of tiles.
  const auto fetch = [&](int p) {
#pragma unroll
    for (int q = 0; q < kGroup; ++q) {
      if (p < kTiles) rows.fetch(stage(q, p), a[q], p, lane);
    }
    commit_copies();
  };
#pragma unroll
  for (int p = 0; p < kFlight; ++p) fetch(p);
#pragma unroll
  for (int p = 0; p < kTiles; ++p) {
    wait_for_copies<kFlight - 1>();
    __syncwarp();
#pragma unroll
    for (int q = 0; q < kGroup; ++q) {
      rows.take(m[q], stage(q, p), a[q].shift, p, part, lane);
    }
    __syncwarp();
    fetch(p + kFlight);
  }
}

// sums[column] over the 8 rows of a tile, of which lanes hold terms as fragments: s0 and s1 those
// of a pair of columns. Lanes with bit 4 set reduce the second column of their pair, the others the
// first.
template <class T>
__device__ __forceinline__ void store_column_sums(T* sums, T s0, T s1, int lane) {
  const bool second = lane & 16;
  T sum = (second ? s1 : s0) + shuffle_xor(second ? s0 : s1, 16);
  sum = sum + shuffle_xor(sum, 8);
  sum = sum + shuffle_xor(sum, 4);
  if (lane % 16 < 4) sums[2 * lane - 31 * second] = sum;
}

}  // namespace jax_batched::cuda
