// Cholesky factorization of one matrix in scratch, right-looking with panels of rows.
//
// Scratch holds U = L^H, dense n x n, row-major: then every inner loop runs along a contiguous row.
#pragma once

#include <cmath>

#include "ffi/cpu/kernels.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

// u_kj for j >= k, from the triangle that is read or the mean of both.
template <class T>
void load_upper(const T* a, int64_t n, bool upper, bool symmetrize, T* u) {
  for (int64_t k = 0; k < n; ++k) {
    if (symmetrize) {
      for (int64_t j = k; j < n; ++j) u[k * n + j] = hermitian_mean(a[k * n + j], a[j * n + k]);
    } else if (upper) {
      for (int64_t j = k; j < n; ++j) u[k * n + j] = a[k * n + j];
    } else {
      for (int64_t j = k; j < n; ++j) u[k * n + j] = conj(a[j * n + k]);
    }
  }
}

template <class T>
void store_factor(const T* u, int64_t n, bool upper, bool failed, T* out) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t begin = upper ? i : 0;
    const int64_t end = upper ? n : i + 1;
    T* row = out + i * n;
    for (int64_t j = 0; j < begin; ++j) row[j] = T(0);
    if (failed) {
      for (int64_t j = begin; j < end; ++j) row[j] = quiet_nan<T>();
    } else if (upper) {
      for (int64_t j = begin; j < end; ++j) row[j] = u[i * n + j];
    } else {
      for (int64_t j = begin; j < end; ++j) row[j] = conj(u[j * n + i]);
    }
    for (int64_t j = end; j < n; ++j) row[j] = T(0);
  }
}

// u_kk = sqrt(a_kk), u_kj = a_kj / u_kk; then u_ij -= conj(u_ki) u_kj for the rows i below: at once
// inside a panel of kPanel rows, and for all rows of the panel together below it, so that each u_ij
// is loaded and stored once per panel. Returns info.
template <class T>
int32_t factor_upper(T* u, int64_t n) {
  constexpr int64_t kPanel = 8;
  for (int64_t k0 = 0; k0 < n; k0 += kPanel) {
    const int64_t k1 = n - k0 < kPanel ? n : k0 + kPanel;
    for (int64_t k = k0; k < k1; ++k) {
      T* row_k = u + k * n;
      const Real<T> pivot = real(row_k[k]);
      if (!(pivot > Real<T>(0))) return static_cast<int32_t>(k + 1);
      const Real<T> root = std::sqrt(pivot);
      const Real<T> inverse = Real<T>(1) / root;
      row_k[k] = T(root);
      for (int64_t j = k + 1; j < n; ++j) row_k[j] = scale(row_k[j], inverse);
      for (int64_t i = k + 1; i < k1; ++i) {
        const T factor = conj(row_k[i]);
        T* row_i = u + i * n;
        for (int64_t j = i; j < n; ++j) row_i[j] = sub_mul(row_i[j], factor, row_k[j]);
      }
    }
    for (int64_t i = k1; i < n; ++i) {  // only after full panels: the last one ends at n
      T factor[kPanel];
      for (int64_t k = 0; k < kPanel; ++k) factor[k] = conj(u[(k0 + k) * n + i]);
      T* row_i = u + i * n;
      const T* panel = u + k0 * n;
      int64_t j = i;
      for (; j + kColumns<T> <= n; j += kColumns<T>) {  // a cache line of the row in registers
        T sum[kColumns<T>];
        for (int64_t c = 0; c < kColumns<T>; ++c) sum[c] = row_i[j + c];
        for (int64_t k = 0; k < kPanel; ++k) {
          const T* row_k = panel + k * n + j;
          for (int64_t c = 0; c < kColumns<T>; ++c) sum[c] = sub_mul(sum[c], factor[k], row_k[c]);
        }
        for (int64_t c = 0; c < kColumns<T>; ++c) row_i[j + c] = sum[c];
      }
      for (; j < n; ++j) {
        for (int64_t k = 0; k < kPanel; ++k) {
          row_i[j] = sub_mul(row_i[j], factor[k], panel[k * n + j]);
        }
      }
    }
  }
  return 0;
}

template <class T>
void cholesky(const CholeskyProblem& p, int64_t begin, int64_t end, void* scratch) {
  T* u = static_cast<T*>(scratch);
  for (int64_t m = begin; m < end; ++m) {
    load_upper(static_cast<const T*>(p.a) + m * p.n * p.n, p.n, p.upper, p.symmetrize, u);
    p.info[m] = factor_upper(u, p.n);
    store_factor(u, p.n, p.upper, p.info[m] != 0, static_cast<T*>(p.l) + m * p.n * p.n);
  }
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
