// A whole small matrix in the registers of one thread: sizes are template arguments.
#pragma once

#include "ffi/cuda/tile/math.cuh"

namespace jax_batched::cuda {

// Lower triangle of an n x n matrix, l[i][j] with j <= i.
template <class T, int kN>
using Triangle = T[kN][kN];

// Calls f(i, j) for each entry of the lower triangle.
template <int kN, class F>
__device__ __forceinline__ void for_each_entry(F&& f) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
#pragma unroll
    for (int j = 0; j <= i; ++j) f(i, j);
  }
}

// Loads what a factorization reads of the row-major matrix a. An upper factor is the lower one of
// conj(A), transposed (see fragment.cuh).
template <class T, int kN>
__device__ __forceinline__ void load_triangle(Triangle<T, kN>& l, const T* a, bool upper,
                                              bool symmetrize) {
  if (symmetrize) {
    for_each_entry<kN>([&](int i, int j) {
      const T below = a[i * kN + j], above = a[j * kN + i];
      l[i][j] = upper ? hermitian_mean(above, below) : hermitian_mean(below, above);
    });
  } else if (upper) {
    for_each_entry<kN>([&](int i, int j) { l[i][j] = a[j * kN + i]; });
  } else {
    for_each_entry<kN>([&](int i, int j) { l[i][j] = a[i * kN + j]; });
  }
}

template <class T, int kN>
__device__ __forceinline__ void store_triangle(T* a, const Triangle<T, kN>& l, bool upper) {
  if (upper) {
    for_each_entry<kN>([&](int i, int j) {
      if (j < i) a[i * kN + j] = T(0);
      a[j * kN + i] = l[i][j];
    });
  } else {
    for_each_entry<kN>([&](int i, int j) {
      if (j < i) a[j * kN + i] = T(0);
      a[i * kN + j] = l[i][j];
    });
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
