// Triangular substitution: what its kernels share.
//
// Every problem is M Y = C with M lower triangular (LowerSystem), one sweep
//   y_i = (c_i - sum_{j < i} M(i, j) y_j) / M(i, i),   i = 0, 1, ..., n - 1,
// and a solve with a Cholesky factor is two: M, then M^H, which is a sweep from the last row up.
//
// All kernels do these operations one by one in this order, j ascending, each an FMA on the running
// right-hand side. So the bits of a column do not depend on the kernel, nor on the other columns
// (save those of a NaN), and the choice of a kernel is a matter of speed alone:
//   thread         a thread per column, 32 matrices in shared memory     n <= 8 or 15
//   lanes_shared   8 to 32 lanes per matrix; the triangle in shared memory  few columns
//   warp_streamed  a warp per matrix; the triangle streamed through it      few columns
//   block_rows     a warp per 8 or 16 rows, in its registers                many columns
//   block_tensor   a warp per 16 or 32 columns, as fragments; float64       many columns
//   block_columns  a thread per column; a part of the triangle at a time    many columns
//
// A conjugated M is never formed: conj(M) y = c if and only if M conj(y) = conj(c), with the same
// roundings, so right-hand sides are conjugated as they are loaded and stored.
#pragma once

#include <cstdint>

#include "ffi/cuda/device/math.cuh"
#include "ffi/problems/substitution.h"

namespace jax_batched::cuda {

// A problem with elements of type T.
template <class T>
struct Substitution : SubstitutionProblem {
  __device__ __forceinline__ const T* a_of(int64_t entry) const {
    return a.template at<const T>(entry, n, n);
  }
  __device__ __forceinline__ const T* b_of(int64_t entry) const {
    return b.template at<const T>(entry, n, nrhs);
  }
  __device__ __forceinline__ T* x_of(int64_t entry) const {
    return x.template at<T>(entry, n, nrhs);
  }
};

// True if neighbouring columns of a row of M are neighbours in memory, else neighbouring rows are.
__host__ __device__ __forceinline__ bool rows_contiguous(const LowerSystem& system) {
  return system.a_col == 1 || system.a_col == -1;
}

// True if the upper triangle is stored.
__host__ __device__ __forceinline__ bool upper_stored(const LowerSystem& system) {
  return rows_contiguous(system) == (system.a_start != 0);
}

// M(i, j) as an offset from a_start.
__device__ __forceinline__ int a_offset(const LowerSystem& system, int i, int j) {
  return i * static_cast<int>(system.a_row) + j * static_cast<int>(system.a_col);
}

// Y(i, r), or C(i, r), as an offset from the matrix.
__device__ __forceinline__ int64_t x_offset(const LowerSystem& system, int64_t i, int64_t r) {
  return system.x_start + i * system.x_row + r * system.x_col;
}

// Calls visit(row, column) for the tiles first, first + step, ... of a triangle of tiles, counted
// row by row.
template <class Visit>
__device__ __forceinline__ void for_each_tile(int rows, int first, int step, const Visit& visit) {
  int row = 0, column = first;
  while (true) {
    for (; column > row; ++row) column -= row + 1;
    if (row >= rows) break;
    visit(row, column);
    column += step;
  }
}

}  // namespace jax_batched::cuda
