// Factors of 8x8 diagonal blocks of doubles by one warp, each with its inverse, and how tiles lie
// in shared memory.
#pragma once

#include <cstdint>

#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/tensor.cuh"

namespace jax_batched::cuda {

struct PivotBlock {
  // Of a tile, lane (g = lane / 4, t = lane % 4) holds columns 2t and 2t + 1 of row g.
  using Values = double[2];
  static constexpr int kTile = 64;
  static constexpr int kRhs = 8;  // right-hand sides, the rows of tiles, that are solved at a time

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  // Where entry (r, c) of a tile lies: even columns first, so that a lane's two values, as the
  // registers of an operand want them, are at lane and lane + 32. No access here has bank
  // conflicts.
  static __device__ __forceinline__ int at(int r, int c) { return c % 2 * 32 + r * 4 + c / 2; }

  static __device__ __forceinline__ void load(Values& v, const double* tile) {
    v[0] = tile[lane()];
    v[1] = tile[lane() + 32];
  }
  static __device__ __forceinline__ void load_transposed(Values& v, const double* tile) {
    const double* from = tile + at(lane() % 4 * 2, lane() / 4);
    v[0] = from[0];
    v[1] = from[at(1, 0)];
  }
  static __device__ __forceinline__ void store(double* tile, const Values& v) {
    tile[lane()] = v[0];
    tile[lane() + 32] = v[1];
  }

  static __device__ __forceinline__ void assign(Values& to, const Values& from) {
    to[0] = from[0];
    to[1] = from[1];
  }

  // c += a b^T, for a pair of tiles and for one.
  static __device__ __forceinline__ void multiply_add(Values (&c)[2], const Values& a0,
                                                      const Values& a1, const Values& b) {
    add_product(c, {{a0[0], a0[1]}, {a1[0], a1[1]}}, {b[0], b[1]});
  }
  static __device__ __forceinline__ void multiply_add(Values& c, const Values& a, const Values& b) {
    add_product(c, {a[0], a[1]}, {b[0], b[1]});
  }

  // Tiles of -B^T for columns c .. c + 7 of B.
  template <int kTiles>
  static __device__ __forceinline__ void load_rhs(Values (&y)[kTiles], const double* b, int n,
                                                  int64_t nrhs, int64_t c) {
    const int first = lane() % 4 * 2;
    const bool valid = c + lane() / 4 < nrhs;
    const double* from = b + (first * nrhs + c + lane() / 4);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      y[i][0] = valid && 8 * i + first < n ? -from[0] : 0;
      y[i][1] = valid && 8 * i + first + 1 < n ? -from[nrhs] : 0;
      from += 8 * nrhs;
    }
  }

  // Columns c .. c + 7 of X from tiles of -X^T; NaN if `failed`.
  template <int kTiles>
  static __device__ __forceinline__ void store_solution(const Values (&y)[kTiles], double* x, int n,
                                                        int64_t nrhs, int64_t c, bool failed) {
    const int first = lane() % 4 * 2;
    const bool valid = c + lane() / 4 < nrhs;
    double* to = x + (first * nrhs + c + lane() / 4);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (valid && 8 * i + first < n) to[0] = failed ? quiet_nan<double>() : -y[i][0];
      if (valid && 8 * i + first + 1 < n) to[nrhs] = failed ? quiet_nan<double>() : -y[i][1];
      to += 8 * nrhs;
    }
  }

  // L and -L^-1 of the block `a` (its lower triangle): first
  //   a_ij -= a_ik (a_jk / d_k),   w_i -= (a_ik / d_k) w_k   for i, j > k,
  // with d_k the pivots and w_i the rows of the inverse, then the scaling of columns and rows by
  // 1 / sqrt(d_k): one root instead of eight, and only reciprocals in the chain. Every lane
  // computes the next pivot itself. Returns whether all pivots are of normal magnitude; else the
  // result is of no use.
  static __device__ __forceinline__ bool factor_plain(Values& a, Values& w) {
    const int r = lane() / 4, q = lane() % 4;
    w[0] = r == 2 * q;
    w[1] = r == 2 * q + 1;
    double d = shuffle(a[0], 0);
#pragma unroll
    for (int k = 0; k < 7; ++k) {
      const double column = a[k % 2];  // lane 4i + k / 2 holds a_ik
      const double own = shuffle(column, 4 * r + k / 2);
      const double below = shuffle(column, 4 * (k + 1) + k / 2);
      const double corner = shuffle(a[(k + 1) % 2], 4 * (k + 1) + (k + 1) / 2);
      const double w0 = shuffle(w[0], 4 * k + q), w1 = shuffle(w[1], 4 * k + q);
      const double across1 = shuffle(column, 8 * q + 4 + k / 2);
      const double inverse = reciprocal(d);
      d = fma(-below, below * inverse, corner);
      if (k < 6) {
        const double across0 = shuffle(column, 8 * q + k / 2);
        a[0] = 2 * q > k ? fma(-own, across0 * inverse, a[0]) : a[0];
      }
      a[1] = 2 * q + 1 > k ? fma(-own, across1 * inverse, a[1]) : a[1];
      const double factor = r > k ? own * inverse : 0;
      w[0] = fma(-factor, w0, w[0]);
      w[1] = fma(-factor, w1, w[1]);
    }
    // The pivot of row r, its root, and the reciprocal roots of this lane's columns.
    const double even = shuffle(a[0], 4 * r + r / 2), odd = shuffle(a[1], 4 * r + r / 2);
    const double pivot = r % 2 == 0 ? even : odd;
    const auto root = pivot_root_in_range(pivot);
    const double scale0 = shuffle(root.inverse, 8 * q), scale1 = shuffle(root.inverse, 8 * q + 4);
    a[0] = r > 2 * q ? a[0] * scale0 : r == 2 * q ? root.root : 0;
    a[1] = r > 2 * q + 1 ? a[1] * scale1 : r == 2 * q + 1 ? root.root : 0;
    w[0] *= -root.inverse;
    w[1] *= -root.inverse;
    return __all_sync(kFullWarp, pivot >= 0x1p-500 && pivot <= 0x1p1000);
  }

  // The same for any pivots, in tiles in shared memory; a loop of its own beside careful.cuh, as
  // kernels that hold a matrix in registers have one at every panel. Lanes 0..7 turn the rows of
  // the block `a` into those of L, lanes 8..15 those of -I into those of -L^-T. Returns the number
  // of the first failed pivot, 1..8, or 0.
  static __device__ __forceinline__ int factor_careful(double* a, double* minus_inverse) {
    const int r = lane();
    double* own = r < 8 ? a + at(r, 0) : minus_inverse + at(0, r % 8);
    // Entry k of this lane's row is own[place(k)].
    const auto place = [=](int k) { return r < 8 ? at(0, k) : at(k, 0); };
    int failed = 0;
    if (r >= 8 && r < 16) {
#pragma unroll 1
      for (int k = 0; k < 8; ++k) own[place(k)] = r - 8 == k ? -1 : 0;
    }
#pragma unroll 1
    for (int k = 0; k < 8; ++k) {
      __syncwarp();
      const PivotRoot<double> pivot = pivot_root(a[at(k, k)]);
      if (failed == 0 && is_nan(pivot.root)) failed = k + 1;
      __syncwarp();
      double x = 0;
      if (r < 16) {
        if (r >= k) x = r == k ? pivot.root : own[place(k)] * pivot.inverse;
        own[place(k)] = x;
      }
      __syncwarp();
      if (r < 16) {
#pragma unroll 1
        for (int j = k + 1; j < 8; ++j) own[place(j)] = fma(-x, a[at(j, k)], own[place(j)]);
      }
    }
    __syncwarp();
    return failed;
  }

  // 1 / d for d of normal magnitude, to about an ulp.
  static __device__ __forceinline__ double reciprocal(double d) {
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(d));
    const double e = fma(-d, y, 1.0);
    return fma(y, fma(e, e, e), y);
  }
};

}  // namespace jax_batched::cuda
