// The careful path of a Cholesky factorization, for any pivots.
//
// Kernels take roots that hold for pivots of normal magnitude (pivot_root_in_range). Where one is
// tiny, infinite or not positive, what was computed is of no use: the matrix, or the part of it
// that is at hand, is factored again here. Rare, so compact rather than fast: loops over entries in
// shared memory, in the same order and thus with the same bits as a kernel's own.
#pragma once

#include "ffi/cuda/device/math.cuh"

namespace jax_batched::cuda {

// Factors the first `columns` columns of a matrix of `rows` rows, in place: for each column k
//   l_kk = sqrt(x_kk),   l_ik = x_ik / l_kk,   x_ij -= l_ik conj(l_jk)   for i > k, k < j <= i.
// entry(i, j) is a reference to x_ij. With `rhs` it is one more column: y_k = b_k / l_kk,
// b_i -= l_ik y_k. Rows are dealt out to `lanes` lanes, of which this is number `lane`; lanes
// without `mine` have another matrix and only take part in the barriers. keep(k, root) is called
// for each pivot. Returns the number of the first failed one, from 1; 0 if there is none.
template <class T, class Entry, class Keep>
__device__ __forceinline__ int factor_carefully(bool mine, int columns, int rows, int lane,
                                                int lanes, Entry&& entry, T* rhs, Keep&& keep) {
  int failed = 0;
#pragma unroll 1
  for (int k = 0; k < columns; ++k) {
    const PivotRoot<Real<T>> pivot = pivot_root(mine ? real(entry(k, k)) : Real<T>(1));
    __syncwarp();
    if (mine) {
      if (failed == 0 && is_nan(pivot.root)) failed = k + 1;
      keep(k, pivot);
#pragma unroll 1
      for (int i = k + lane; i < rows; i += lanes) {
        entry(i, k) = i == k ? T(pivot.root) : scale(entry(i, k), pivot.inverse);
      }
      if (rhs != nullptr && lane == 0) rhs[k] = scale(rhs[k], pivot.inverse);
    }
    __syncwarp();
    if (mine) {
#pragma unroll 1
      for (int i = k + 1 + lane; i < rows; i += lanes) {
        const T l = entry(i, k);
#pragma unroll 1
        for (int j = k + 1; j < min(i + 1, columns); ++j) {
          entry(i, j) = sub_mul_conj(entry(i, j), l, entry(j, k));
        }
        if (rhs != nullptr) rhs[i] = sub_mul(rhs[i], l, rhs[k]);
      }
    }
    __syncwarp();
  }
  return failed;
}

}  // namespace jax_batched::cuda
