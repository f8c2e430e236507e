// A whole small matrix in the registers of one thread: sizes are template arguments.
#pragma once

#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/layout/matrix_stage.cuh"

namespace jax_batched::cuda {

// Calls f(i, j) for each entry of the lower triangle.
template <int kN, class F>
__device__ __forceinline__ void for_each_entry(F&& f) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
#pragma unroll
    for (int j = 0; j <= i; ++j) f(i, j);
  }
}

// Right-looking Cholesky: l_kk = sqrt(d); l_ik *= 1 / l_kk; l_ij -= l_ik conj(l_jk). Returns info;
// inverse[k] = 1 / l_kk.
template <class T, int kN>
__device__ __forceinline__ int factor_triangle(Triangle<T, kN>& l, Real<T> (&inverse)[kN]) {
  int info = 0;
#pragma unroll
  for (int k = 0; k < kN; ++k) {
    const PivotRoot<Real<T>> pivot = pivot_root(real(l[k][k]));
    if (info == 0 && is_nan(pivot.root)) info = k + 1;
    l[k][k] = T(pivot.root);
    inverse[k] = pivot.inverse;
#pragma unroll
    for (int i = k + 1; i < kN; ++i) l[i][k] = scale(l[i][k], pivot.inverse);
#pragma unroll
    for (int j = k + 1; j < kN; ++j) {
#pragma unroll
      for (int i = j; i < kN; ++i) l[i][j] = sub_mul_conj(l[i][j], l[i][k], l[j][k]);
    }
  }
  return info;
}

// b = (L L^H)^-1 b.
template <class T, int kN>
__device__ __forceinline__ void solve_triangle(const Triangle<T, kN>& l,
                                               const Real<T> (&inverse)[kN], T (&b)[kN]) {
#pragma unroll
  for (int k = 0; k < kN; ++k) {
    b[k] = scale(b[k], inverse[k]);
#pragma unroll
    for (int i = k + 1; i < kN; ++i) b[i] = sub_mul(b[i], l[i][k], b[k]);
  }
#pragma unroll
  for (int k = kN - 1; k >= 0; --k) {
    b[k] = scale(b[k], inverse[k]);
#pragma unroll
    for (int i = 0; i < k; ++i) b[i] = sub_mul_conj(b[i], b[k], l[k][i]);
  }
}

}  // namespace jax_batched::cuda
