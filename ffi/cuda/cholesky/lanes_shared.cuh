// A Hermitian matrix in shared memory as 8x8 tiles of its lower triangle, factored from left to
// right by 8 lanes of a warp, four matrices side by side.
//
// A block of 8 columns comes into registers, a lane holding rows g, g + 8, ...; it subtracts the
// products with the columns to its left, whose entries in the block's own rows are broadcast loads
// that serve four matrices at once; then it is factored (panel.cuh) and goes back. For sizes whose
// rows do not fit the registers as a whole (lanes.cuh).
#pragma once

#include <cstdint>

#include "ffi/cuda/cholesky/careful.cuh"
#include "ffi/cuda/cholesky/lanes.cuh"
#include "ffi/cuda/cholesky/panel.cuh"
#include "ffi/cuda/device/async_copy.cuh"

namespace jax_batched::cuda {

// For one right-hand side; several are solved from fragments in registers (fragment.cuh).
template <class T, int kTiles>
struct LanesSharedFactor {
  using Step = Panel<T, kTiles, 4>;
  static constexpr int kLanes = 8;
  static constexpr int kMatrices = 4;
  static constexpr int kRows = 8 * kTiles;
  static constexpr int kElements = 32 * kTiles * (kTiles + 1) + 8;  // per matrix

  Real<T> inverse[kTiles];  // 1 / l_ii of row 8 j + g

  // Where tile (i, j) begins: block columns one after the other.
  static __host__ __device__ constexpr int tile(int i, int j) {
    return 64 * (j * kTiles - j * (j - 1) / 2 + i - j);
  }
  // Where an entry of a line lies in its tile: lines are rows of A, columns of L. Its 16-byte units
  // are permuted so that 8 lanes reading the same unit of 8 lines meet no bank conflict.
  static __device__ __forceinline__ int place(int line, int entry) {
    return 8 * line + (entry ^ (line & (8 - kVector<T>)));
  }
  static __device__ __forceinline__ T* at(T* store, int i, int j) {
    return store + tile(i / 8, j / 8) + place(j % 8, i % 8);
  }
  // Where solve_backward() keeps entries 8 i .. 8 i + 7 of the solution: in the place of the
  // diagonal tile, which is not needed any more.
  static __device__ __forceinline__ T* solution(T* store, int i) { return store + tile(i, i); }
  static __device__ __forceinline__ void load_line(T (&to)[8], const T* tile, int line) {
#pragma unroll
    for (int k = 0; k < 8; k += kVector<T>) {
      const auto v = *reinterpret_cast<const Vector<T>*>(tile + place(line, k));
#pragma unroll
      for (int z = 0; z < kVector<T>; ++z) to[k + z] = v.v[z];
    }
  }

  // Starts the copy of the triangle `part`, which is no mean, a row after the other as they lie in
  // memory.
  static __device__ __forceinline__ void start_copy(T* store, const View<T>& a, Part part, int g) {
    constexpr int kUnits = 8 / kVector<T>;
    const int n = a.rows;
    if (!part.upper && a.ld % kVector<T> == 0) {
#pragma unroll 1
      for (int i = 0; i < kTiles; ++i) {
        const int units = min(kUnits * (i + 1), n / kVector<T>);
#pragma unroll 1
        for (int u = g; u < units; u += kLanes) {
          T* to = store + tile(i, u / kUnits);
          const T* from = a.at(8 * i, u * kVector<T>);
#pragma unroll
          for (int r = 0; r < 8; ++r) {
            if (i < kTiles - 1 || 8 * i + r < n) {
              copy_async(reinterpret_cast<Vector<T>*>(to + place(r, u % kUnits * kVector<T>)),
                         reinterpret_cast<const Vector<T>*>(from + r * a.ld));
            }
          }
        }
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll 1
        for (int j = 0; j <= i; ++j) {
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            const int r = part.upper ? g : k, c = part.upper ? k : g;
            const int row = 8 * i + r, column = 8 * j + c;
            if (row < n && column <= row) {
              copy_async(store + tile(i, j) + place(r, c),
                         part.upper ? a.at(column, row) : a.at(row, column));
            }
          }
        }
      }
    }
  }

  // Rows of the tiles of block column j -> registers; rows from n on are those of the identity.
  static __device__ __forceinline__ void load_rows(T (&x)[kTiles][8], const T* store, int j, int n,
                                                   int g) {
#pragma unroll
    for (int s = 0; s < kTiles; ++s) {
      if (j + s < kTiles) load_line(x[s], store + tile(j + s, j), g);
    }
    if (n < kRows && kRows - 8 + g >= n) {
#pragma unroll
      for (int k = 0; k < 8; ++k) x[kTiles - 1 - j][k] = T(j == kTiles - 1 && k == g);
    }
  }

  // Factors the matrix and takes the right-hand side b (entries of this lane's rows) along, which
  // becomes y = L^-1 b. False in a lane that met a pivot that was tiny, infinite or not positive:
  // that matrix must go through repair().
  __device__ __forceinline__ bool factor(T* store, T (&b)[kTiles], int n, int g) {
    bool plain = true;
    for_constants<kTiles>([&](auto constant) {
      constexpr int j = decltype(constant)::value;
      T x[kTiles][8], rest[kTiles];
      load_rows(x, store, j, n, g);
      // x_ic -= sum over k to the left of l_ik conj(l_ck).
#pragma unroll 1
      for (int left = 0; left < j; ++left) {
        const T* column = store + tile(j, left);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          T across[8];
          load_line(across, column, k);
#pragma unroll
          for (int s = 0; s < kTiles - j; ++s) {
            const T own = column[64 * s + place(k, g)];
#pragma unroll
            for (int c = 0; c < 8; ++c) x[s][c] = sub_mul_conj(x[s][c], own, across[c]);
          }
        }
      }
#pragma unroll
      for (int s = 0; s < kTiles - j; ++s) rest[s] = b[j + s];
      inverse[j] = 1;  // of rows from n on
      const Real<T> root = Step::template factor<true>(
          x, rest, j, j < kTiles - 1 ? 8 : min(8, n - 8 * j), g, inverse[j]);
      plain = plain && plain_root(root);
#pragma unroll
      for (int s = 0; s < kTiles - j; ++s) b[j + s] = rest[s];
      __syncwarp();  // every lane has read its rows
#pragma unroll
      for (int s = 0; s < kTiles - j; ++s) {
#pragma unroll
        for (int k = 0; k < 8; ++k) store[tile(j + s, j) + place(k, g)] = x[s][k];
      }
      __syncwarp();
    });
    return plain;
  }

  // Factors the matrix again if `mine`, from its fresh copy, whatever its pivots are; returns info.
  // Rare, so compact rather than fast; other matrices of the warp keep what they have.
  __device__ __forceinline__ int repair(T* store, const View<T>& a, Part part, bool mine, int g) {
    const int n = a.rows;
    __syncwarp();
    if (mine) start_copy(store, a, part, g);
    commit_copies();
    wait_for_copies<0>();
    __syncwarp();
    // Rows of A -> columns of L.
#pragma unroll 1
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll 1
      for (int i = j; i < kTiles; ++i) {
        T row[8];
        load_line(row, store + tile(i, j), g);
        __syncwarp();
        if (mine) {
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            const bool inside = 8 * i + g < n && (i > j || k <= g);
            store[tile(i, j) + place(k, g)] = inside ? row[k] : T(i == j && k == g);
          }
        }
        __syncwarp();
      }
    }
    return factor_carefully<T>(
        mine, n, n, g, kLanes, [=](int i, int j) -> T& { return *at(store, i, j); }, nullptr,
        [&](int k, const PivotRoot<Real<T>>& pivot) {
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            if (k == 8 * j + g) inverse[j] = pivot.inverse;
          }
        });
  }

  // y = L^-1 b, in place of b: y_k = b_k / l_kk; b_i -= l_ik y_k.
  __device__ __forceinline__ void solve_forward(const T* store, T (&b)[kTiles], int g) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      T y[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const T own = scale(b[j], inverse[j]);
        y[k] = shuffle(own, k, kLanes);
        if (g == k) b[j] = own;
        if (g > k) b[j] = sub_mul(b[j], store[tile(j, j) + place(k, g)], y[k]);
      }
#pragma unroll
      for (int i = j + 1; i < kTiles; ++i) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          b[i] = sub_mul(b[i], store[tile(i, j) + place(k, g)], y[k]);
        }
      }
    }
  }

  // x = L^-H y, in place of y, a lane per column of L; what is known of x is broadcast
  // through shared memory.
  __device__ __forceinline__ void solve_backward(T* store, T (&y)[kTiles], int g) const {
#pragma unroll
    for (int j = kTiles - 1; j >= 0; --j) {
      T l[8];
#pragma unroll 1
      for (int i = kTiles - 1; i > j; --i) {
        load_line(l, store + tile(i, j), g);
        T x[8];
        load_vectors(x, solution(store, i), 8);
#pragma unroll
        for (int k = 0; k < 8; ++k) y[j] = sub_mul_conj(y[j], x[k], l[k]);
      }
      load_line(l, store + tile(j, j), g);
      __syncwarp();
#pragma unroll
      for (int k = 7; k >= 0; --k) {
        const T own = scale(y[j], inverse[j]);
        const T x = shuffle(own, k, kLanes);
        if (g == k) y[j] = own;
        if (g < k) y[j] = sub_mul_conj(y[j], x, l[k]);
      }
      solution(store, j)[g] = y[j];
      __syncwarp();
    }
  }
};

}  // namespace jax_batched::cuda
