// The textbook algorithms, one entry at a time, as plain as they can be written. Every other
// kernel, on either platform, is tested against these (kernel="reference"). Here is what several
// operations share.
#pragma once

#include <cmath>
#include <vector>

#include "ffi/cpu/engine/kernels.h"

namespace jax_batched::cpu::reference {

// Entry (i, j), j <= i, of the Hermitian matrix whose lower or upper triangle is stored in a.
template <class T>
T hermitian_entry(const T* a, int64_t n, int64_t i, int64_t j, bool upper) {
  return upper ? conj(a[j * n + i]) : a[i * n + j];
}

// Cholesky-Banachiewicz, row by row: l_ij = (a_ij - sum_{k<j} l_ik conj(l_jk)) / l_jj,
// l_ii = sqrt(a_ii - sum_{k<i} |l_ik|^2). a and l are dense n x n, lower; returns info.
template <class T>
int32_t factor(const T* a, T* l, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      T sum = a[i * n + j];
      for (int64_t k = 0; k < j; ++k) sum = sub_mul_conj(sum, l[i * n + k], l[j * n + k]);
      if (j < i) {
        l[i * n + j] = scale(sum, Real<T>(1) / real(l[j * n + j]));
      } else if (real(sum) > Real<T>(0)) {
        l[i * n + i] = T(std::sqrt(real(sum)));
      } else {
        return static_cast<int32_t>(i + 1);
      }
    }
  }
  return 0;
}

// Lower or upper triangle of a matrix, or the mean of both, as a dense lower triangle.
template <class T>
std::vector<T> lower_triangle(const T* a, int64_t n, bool upper, bool symmetrize) {
  std::vector<T> m(n * n, T(0));
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      m[i * n + j] = symmetrize ? hermitian_mean(a[i * n + j], a[j * n + i])
                                : hermitian_entry(a, n, i, j, upper);
    }
  }
  return m;
}

// M Y = C by forward substitution: y_i = (c_i - sum_{j<i} m_ij y_j) / m_ii.
template <class T>
void substitute(const LowerSystem& s, int64_t n, int64_t nrhs, bool unit, const T* a, const T* b,
                T* x) {
  const auto entry = [&](int64_t i, int64_t j) {
    const T m = a[s.a_start + i * s.a_row + j * s.a_col];
    return s.conjugate ? conj(m) : m;
  };
  for (int64_t r = 0; r < nrhs; ++r) {
    for (int64_t i = 0; i < n; ++i) {
      const auto at = [&](int64_t row) { return s.x_start + row * s.x_row + r * s.x_col; };
      T sum = b[at(i)];
      for (int64_t j = 0; j < i; ++j) sum = sub_mul(sum, entry(i, j), x[at(j)]);
      x[at(i)] = unit ? sum : divide(sum, entry(i, i));
    }
  }
}

// C C^H X = B: C Y = B, then C^H X = Y; with an upper factor C^H Y = B, then C X = Y.
template <class T>
void solve_with_factor(const T* c, bool lower, int64_t n, int64_t nrhs, const T* b, T* x) {
  const LowerSystem first = lower_system(n, nrhs, true, lower, !lower, !lower);
  const LowerSystem second = lower_system(n, nrhs, true, lower, lower, lower);
  substitute(first, n, nrhs, false, c, b, x);
  substitute(second, n, nrhs, false, c, static_cast<const T*>(x), x);
}

// The kernel that is f(T{}, p, entry), entry by entry.
template <class P, class F>
Kernel<P> each(F) {
  const auto run = [](const P& p, int64_t begin, int64_t end, void*) {
    with_element_type(p.dtype, [&](auto t) {
      for (int64_t entry = begin; entry < end; ++entry) F{}(t, p, entry);
    });
  };
  return {run, [](const P&) { return size_t{0}; }};
}

}  // namespace jax_batched::cpu::reference
