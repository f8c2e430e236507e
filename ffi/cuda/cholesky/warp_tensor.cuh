// Cholesky solves of doubles by one warp with the matrix in its registers, as fragments:
// right-looking over 8-wide panels, every product on the tensor cores.
//
// With S = sum L L^T - A, where the sum runs over the panels before p:
//   L_pp = cholesky(-S_pp), V = -L_pp^-1 in its place,   L_ip = S_ip V^T,   S_ij += L_ip L_jp^T.
// A fragment of L_ip is both operands of these products as it is (tensor.cuh), so no entry of the
// matrix moves. Up to 8 right-hand sides are one more row of tiles of A, which gives
//   Y_p = S_p V^T,   S_i += Y_p L_ip^T   for Y = (L^-1 B)^T.
// The way back, X_p = -Z_p V and Z_j -= X_p L_pj with Z = Y at first, sums over rows of L, not over
// columns: the tiles are transposed through shared memory first. Rows of a product do not mix, so
// a right-hand side has the same result whatever is beside it.
#pragma once

#include <cstdint>

#include "ffi/cuda/cholesky/pivot_block.cuh"
#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/tensor.cuh"
#include "ffi/cuda/layout/fragment.cuh"

namespace jax_batched::cuda {

template <int kTiles>
struct WarpTensorFactor : PivotBlock {
  // Shared memory, in doubles: two buffers to transpose in.
  static constexpr int kBatch = 4;        // tiles transposed at a time
  static constexpr int kTransposed = 10;  // stride of a row: no bank conflicts down a column
  static constexpr int kBuffer = kBatch * 8 * kTransposed;
  static constexpr size_t kSharedBytes = 2 * kBuffer * sizeof(double);

  double* shared;
  int failed = 0;              // number of the first failed pivot, 1-based
  Fragment<double, kTiles> m;  // S, then L and V
  Values y[kTiles];            // S of the right-hand sides, then Y, then -X

  explicit __device__ __forceinline__ WarpTensorFactor(void* memory)
      : shared(static_cast<double*>(memory)) {}

  // S = -A, of which one triangle is read; rows from n on are those of the identity.
  __device__ __forceinline__ void load_matrix(const View<double>& a, Part part) {
    load_fragment<kTiles - 1>(m, a, part, 0, 0, lane());
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        m[i][j][0] = -m[i][j][0];
        m[i][j][1] = -m[i][j][1];
      }
    }
  }

  // Factors the matrix and takes the right-hand sides forward.
  __device__ __forceinline__ void factor() {
    factor_block(0);
#pragma unroll
    for (int p = 0; p + 1 < kTiles; ++p) {
      finish_column(p);
      forward_step(p);
      update_column(p, p + 1);
      factor_block(p + 1);
#pragma unroll
      for (int j = p + 2; j < kTiles; ++j) update_column(p, j);
    }
  }

  // Takes right-hand sides forward alone.
  __device__ __forceinline__ void solve_forward() {
#pragma unroll
    for (int p = 0; p < kTiles; ++p) {
      solve_block(p);
      forward_step(p);
    }
  }

  // Turns Y into -X. The tiles must be transposed.
  __device__ __forceinline__ void solve_backward() {
#pragma unroll
    for (int p = kTiles - 1; p >= 0; --p) {
      solve_block(p);
#pragma unroll
      for (int j = p - 1; j >= 0; --j) multiply_add(y[j], y[p], m[p][j]);
    }
  }

  // Transposes every tile in place.
  __device__ __forceinline__ void transpose() {
    const int g = lane() / 4, t = lane() % 4;
    int turn = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int first = 0; first <= i; first += kBatch, turn ^= 1) {
        double* buffer = shared + turn * kBuffer;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (first + k > i) continue;
          *reinterpret_cast<Pair<double>*>(buffer + (8 * k + g) * kTransposed + 2 * t) = {
              m[i][first + k][0], m[i][first + k][1]};
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if (first + k > i) continue;
          m[i][first + k][0] = buffer[(8 * k + 2 * t) * kTransposed + g];
          m[i][first + k][1] = buffer[(8 * k + 2 * t + 1) * kTransposed + g];
        }
      }
    }
  }

 private:
  // Y_p = S_p V^T; of transposed tiles -X_p = Z_p V.
  __device__ __forceinline__ void solve_block(int p) {
    Values own = {0, 0};
    multiply_add(own, y[p], m[p][p]);
    assign(y[p], own);
  }

  // V of block p, and Y_p.
  __device__ __forceinline__ void factor_block(int p) {
    const Values d = {-m[p][p][0], -m[p][p][1]};
    Values l = {d[0], d[1]};
    if (!factor_plain(l, m[p][p])) {
      __syncwarp();
      store(shared, d);
      __syncwarp();
      const int pivot = factor_careful(shared, shared + kTile);
      if (pivot != 0 && failed == 0) failed = 8 * p + pivot;
      load(m[p][p], shared + kTile);
    }
    solve_block(p);
  }

  // L_ip for i > p.
  __device__ __forceinline__ void finish_column(int p) {
#pragma unroll
    for (int i = (p + 1) / 2 * 2; i < kTiles; i += 2) {
      Values l[2] = {{0, 0}, {0, 0}};
      if (i > p && i + 1 < kTiles) {
        multiply_add(l, m[i][p], m[i + 1][p], m[p][p]);
        assign(m[i][p], l[0]);
        assign(m[i + 1][p], l[1]);
      } else {
        const int single = i > p ? i : i + 1;
        multiply_add(l[0], m[single][p], m[p][p]);
        assign(m[single][p], l[0]);
      }
    }
  }

  // S_i += Y_p L_ip^T for i > p.
  __device__ __forceinline__ void forward_step(int p) {
#pragma unroll
    for (int i = p + 1; i < kTiles; ++i) multiply_add(y[i], y[p], m[i][p]);
  }

  // S_ij += L_ip L_jp^T for i >= j. Tiles go in the same pairs for every p: operands and
  // accumulators lie in neighbouring registers.
  __device__ __forceinline__ void update_column(int p, int j) {
    if (j % 2 == 1) multiply_add(m[j][j], m[j][p], m[j][p]);
#pragma unroll
    for (int i = (j + 1) / 2 * 2; i < kTiles; i += 2) {
      if (i + 1 < kTiles) {
        Values c[2] = {{m[i][j][0], m[i][j][1]}, {m[i + 1][j][0], m[i + 1][j][1]}};
        multiply_add(c, m[i][p], m[i + 1][p], m[j][p]);
        assign(m[i][j], c[0]);
        assign(m[i + 1][j], c[1]);
      } else {
        multiply_add(m[i][j], m[i][p], m[j][p]);
      }
    }
  }
};

}  // namespace jax_batched::cuda
