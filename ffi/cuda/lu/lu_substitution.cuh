// Solves with the factors of general matrices: both substitutions and the exchanges of rows in one
// pass over L and U, which lie in shared memory. 8, 16 or 32 lanes of a warp work on a matrix, with
// a right-hand side's entries each.
#pragma once

#include "ffi/cuda/lu/lanes.cuh"

namespace jax_batched::cuda {

// y = T^-1 y with T = U^T (kFirst) or L^T, from the rows of L and U at `lu`, `ld` apart:
//   y_k /= u_kk;  y_i -= u_ki y_k for i > k, or of L y_i -= l_ki y_k for i < k.
// Entries of a row are neighbours, one in each lane.
template <bool kFirst, class T, int kLanes, int kRows, int kCount>
__device__ __forceinline__ void substitute_transposed(T (&y)[kRows][kCount],
                                                      const PivotDivisor<T> (&by)[kRows],
                                                      const T* lu, int ld, int n, bool conjugate) {
  const int first = threadIdx.x % kLanes;
#pragma unroll
  for (int slot = 0; slot < kRows; ++slot) {
    const int own = kFirst ? slot : kRows - 1 - slot;
#pragma unroll 4
    for (int step = 0; step < kLanes; ++step) {
      const int at = kFirst ? step : kLanes - 1 - step, k = own * kLanes + at;
      if (k >= n) continue;
      T u[kRows];
#pragma unroll
      for (int s = 0; s < kRows; ++s) {
        const int i = first + kLanes * s;
        const bool counts = i < n && (kFirst ? i > k : i < k);
        u[s] = counts ? conj_if(conjugate, lu[k * ld + i]) : T(Real<T>(0));
      }
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        const T mine = kFirst ? by[own](y[own][c]) : y[own][c];
        const T x = shuffle(mine, at, kLanes);
        if (kFirst && first == at) y[own][c] = mine;
#pragma unroll
        for (int s = 0; s < kRows; ++s) {
          const int i = first + kLanes * s;
          if (kFirst ? s >= own && i > k : s <= own && i < k) y[s][c] = sub_mul(y[s][c], u[s], x);
        }
      }
    }
  }
}

template <class T, int kLanes, int kRows, int kColumns, int kCount, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks)
    lu_substitution_lanes_kernel(const LuSubstitutionProblem p) {
  using Lu = LanesLu<T, kLanes, kRows, kColumns, 1>;
  __shared__ typename Lu::Shared shared;
  const LanesMatrix matrix(p, kLanes);
  if (matrix.skipped) return;
  Lu f(shared, p.n, p.n);
  const int32_t* permutation = matrix_at<const int32_t>(p.permutation, matrix.index, p.n);
  const T* b = matrix_at<const T>(p.b, matrix.index, p.n, p.nrhs);
  T* x = p.x.at<T>(matrix.index, p.n, p.nrhs);
  int row_of_a[kRows] = {};
  f.for_rows([&](int s) {
    row_of_a[s] = min(max(permutation[f.row(s)], 0), p.n - 1);  // a caller's may be any
    f.mine.order[f.row(s)] = f.row(s);
  });
  f.load_factors(matrix_at<const T>(p.a, matrix.index, p.n, p.n), p.conjugated && !p.transposed);
  PivotDivisor<T> by[kRows];
#pragma unroll
  for (int s = 0; s < kRows; ++s) {
    const T pivot = f.row(s) < p.n ? f.diagonal(s) : T(Real<T>(1));
    by[s] = PivotDivisor<T>::of(conj_if(p.conjugated && p.transposed, pivot));
    if constexpr (!kIsComplex<T>) {  // a zero divides, and gives inf or NaN
      if (pivot == T(0)) by[s].reciprocal = T(1) / pivot;
    }
  }
  for (int64_t c = 0; c < p.nrhs; c += kCount) {
    T y[kRows][kCount] = {};
    f.for_rows([&](int s) {
      const T* from = b + (p.transposed ? f.row(s) : row_of_a[s]) * p.nrhs;
#pragma unroll
      for (int q = 0; q < kCount; ++q) {
        if (c + q < p.nrhs) y[s][q] = from[c + q];
      }
    });
    if (p.transposed) {
      const T* lu = f.staged(0);
      substitute_transposed<true, T, kLanes>(y, by, lu, Lu::kStride, p.n, p.conjugated);
      substitute_transposed<false, T, kLanes>(y, by, lu, Lu::kStride, p.n, p.conjugated);
    } else {
      f.template substitute<true>(y, by);
      f.template substitute<false>(y, by);
    }
    if (!matrix.inside) continue;
    f.for_rows([&](int s) {
      T* to = x + (p.transposed ? row_of_a[s] : f.row(s)) * p.nrhs;
#pragma unroll
      for (int q = 0; q < kCount; ++q) {
        if (c + q < p.nrhs) to[c + q] = y[s][q];
      }
    });
  }
}

}  // namespace jax_batched::cuda
