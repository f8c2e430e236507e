// A Hermitian matrix held by one warp in 8x8 tiles: lane (g = lane / 4, t = lane % 4) holds row g,
// columns 2t and 2t+1 of each tile of the lower triangle. It is the layout of a tensor-core
// accumulator, and a global load or store of a tile covers whole 32-byte sectors in either
// direction: 8 rows of 8 elements, or 8 columns of 8.
//
// An upper factorization A = U^H U is the lower one of conj(A), transposed: with M = U^T,
// M M^H = conj(A). Entry (r, c) of conj(A) below the diagonal is entry (c, r) of A, so `upper` only
// swaps indices on the way in and out, and nothing is conjugated.
#pragma once

#include <cstdint>

#include "ffi/cuda/tile/math.cuh"
#include "ffi/cuda/tile/staging.cuh"

namespace jax_batched::cuda {

// Lower tiles of a matrix of up to 8 * kTiles rows; tile (i, j) is m[i][j], j <= i.
template <class T, int kTiles>
using Fragment = T[kTiles][kTiles][2];

// Calls f(i, j, r, c) for this lane's pair of entries (r, c), (r, c + 1) of each lower tile.
template <int kTiles, class F>
__device__ __forceinline__ void for_each_pair(int lane, F&& f) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j <= i; ++j) f(i, j, 8 * i + lane / 4, 8 * j + 2 * (lane % 4));
  }
}

// Loads what the factorization reads of a row-major matrix; rows from n on are those of the
// identity. kExact: n == 8 * kTiles; otherwise 8 * (kTiles - 1) < n.
template <bool kExact, class T, int kTiles>
__device__ __forceinline__ void load_fragment(Fragment<T, kTiles>& m, const T* __restrict__ a,
                                              int n, bool upper, bool symmetrize, int lane) {
  if (kExact) n = 8 * kTiles;
  // Only the last row of tiles is ragged, and only diagonal tiles hold entries above the diagonal.
  const auto in_matrix = [=](int i, int r) { return kExact || i < kTiles - 1 || r < n; };
  const auto in_triangle = [](int i, int j, int r, int c) { return j < i || c <= r; };
  if (!upper || symmetrize) {
    if (kExact || n % 2 == 0) {
      for_each_pair<kTiles>(lane, [&](int i, int j, int r, int c) {
        Pair<T> v{T(r == c), T(r == c + 1)};
        if (in_matrix(i, r) && in_triangle(i, j, r, c)) {
          v = *reinterpret_cast<const Pair<T>*>(a + r * n + c);
        }
        m[i][j][0] = v.a;
        m[i][j][1] = v.b;
      });
    } else {
      for_each_pair<kTiles>(lane, [&](int i, int j, int r, int c) {
        Pair<T> v{T(r == c), T(r == c + 1)};
        if (in_matrix(i, r) && in_triangle(i, j, r, c)) v.a = a[r * n + c];
        if (in_matrix(i, r) && in_triangle(i, j, r, c + 1)) v.b = a[r * n + c + 1];
        m[i][j][0] = v.a;
        m[i][j][1] = v.b;
      });
    }
  } else {
    for_each_pair<kTiles>(lane, [&](int i, int j, int r, int c) {
      Pair<T> v{T(r == c), T(r == c + 1)};
      if (in_matrix(i, r) && in_triangle(i, j, r, c)) v.a = a[c * n + r];
      if (in_matrix(i, r) && in_triangle(i, j, r, c + 1)) v.b = a[(c + 1) * n + r];
      m[i][j][0] = v.a;
      m[i][j][1] = v.b;
    });
  }
  if (symmetrize) {
    // (a_rc + conj(a_cr)) / 2, conjugated for an upper factor.
    for_each_pair<kTiles>(lane, [&](int i, int j, int r, int c) {
      const auto mean = [&](T below, T above) {
        return upper ? hermitian_mean(above, below) : hermitian_mean(below, above);
      };
      if (in_matrix(i, r) && in_triangle(i, j, r, c)) m[i][j][0] = mean(m[i][j][0], a[c * n + r]);
      if (in_matrix(i, r) && in_triangle(i, j, r, c + 1)) {
        m[i][j][1] = mean(m[i][j][1], a[(c + 1) * n + r]);
      }
    });
  }
}

// Rows 8p .. 8p+7 of the factor on their way out, as one run of global memory: fragment stores
// would write partial sectors where a row is not a multiple of 32 bytes, which costs a factor 2.
// Exact sizes use padded rows (no bank conflicts), others rows that lie as in global memory.
template <class T, int kTiles, bool kExact>
struct RowStage {
  static constexpr int kPaddedRow = 8 * kTiles + static_cast<int>(32 / sizeof(T));
  static constexpr int kElements = kExact ? 8 * kPaddedRow : 64 * kTiles + 8;

  static __device__ __forceinline__ void clear(T* stage, int lane) {
    for (int e = lane; e < kElements; e += 32) stage[e] = T(0);
  }

  // Writes rows 8p..8p+7 of L (or of U: columns 8p.. of L, transposed) to l, a factor whose first
  // element lies `shift` elements past a 16-byte boundary. Needs the stage cleared before p = 0:
  // what lies right of the diagonal tile is never written; for U the tile left of it is cleared.
  static __device__ __forceinline__ void flush(T* stage, const Fragment<T, kTiles>& m, int p, T* l,
                                               int n, int shift, bool upper, int lane) {
    const int g = lane / 4, c = 2 * (lane % 4);
    const int row = kExact ? kPaddedRow : n;
    if (kExact) n = 8 * kTiles;
    T* s = kExact ? stage : stage + shift;
    if (!upper) {
      const auto in_rows = kExact || p < kTiles - 1 || 8 * p + g < n;
      const auto in_matrix = [&](int j, int column) {
        return in_rows && (kExact || j < kTiles - 1 || column < n);
      };
      T* to = s + g * row + c;
      if (kExact || n % 2 == 0) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          if (j > p || !in_matrix(j, 8 * j + c)) continue;
          *reinterpret_cast<Pair<T>*>(to + 8 * j) = {m[p][j][0], m[p][j][1]};
        }
      } else {
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          if (j > p) continue;
          if (in_matrix(j, 8 * j + c)) to[8 * j] = m[p][j][0];
          if (in_matrix(j, 8 * j + c + 1)) to[8 * j + 1] = m[p][j][1];
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (i < p - 1) continue;
        const bool zero = i == p - 1;
        T* to = s + c * row + 8 * i + g;
        const bool in_columns = kExact || i < kTiles - 1 || 8 * i + g < n;
        const bool all_rows = kExact || p < kTiles - 1;
        if (in_columns && (all_rows || 8 * p + c < n)) to[0] = zero ? T(0) : m[i][p][0];
        if (in_columns && (all_rows || 8 * p + c + 1 < n)) to[row] = zero ? T(0) : m[i][p][1];
      }
    }
    __syncwarp();
    T* dst = l + 8 * p * n;
    if constexpr (kExact) {
      constexpr int kRowVectors = 8 * kTiles / kVector<T>;
#pragma unroll
      for (int first = 0; first < 8 * kRowVectors; first += 32) {
        const int v = first + lane;
        if (8 * kRowVectors % 32 == 0 || v < 8 * kRowVectors) {
          reinterpret_cast<Vector<T>*>(dst)[v] = *reinterpret_cast<const Vector<T>*>(
              stage + v / kRowVectors * kPaddedRow + v % kRowVectors * kVector<T>);
        }
      }
    } else {
      store_run<kElements>(dst, shift, min(8, n - 8 * p) * n, stage, lane);
    }
    __syncwarp();
  }
};

}  // namespace jax_batched::cuda
