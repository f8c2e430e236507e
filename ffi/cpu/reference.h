// The textbook algorithms, one entry at a time, as plain as they can be written. Every other
// kernel, on either platform, is tested against these (kernel="reference").
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "ffi/common/problem.h"

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

template <class T>
void cholesky(const CholeskyProblem& p, int64_t index) {
  const int64_t n = p.n;
  const T* a = static_cast<const T*>(p.a) + index * n * n;
  T* out = static_cast<T*>(p.l) + index * n * n;
  const std::vector<T> m = lower_triangle(a, n, p.upper, p.symmetrize);
  std::vector<T> l(n * n, T(0));
  p.info[index] = factor(m.data(), l.data(), n);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const bool in_triangle = p.upper ? j >= i : j <= i;
      // The diagonal is real: its conjugate would be -0 i.
      out[i * n + j] = !in_triangle       ? T(0)
                       : p.info[index]    ? quiet_nan<T>()
                       : p.upper && i < j ? conj(l[j * n + i])
                                          : l[i * n + j];
    }
  }
}

template <class T>
void triangular_solve(const TriangularSolveProblem& p, int64_t index) {
  const LowerSystem s = lower_system(p.n, p.nrhs, p.left_side, p.lower, p.transpose, p.conjugate);
  substitute(s, p.n, p.nrhs, p.unit_diagonal,
             static_cast<const T*>(p.a) + p.a_map(index) * p.n * p.n,
             static_cast<const T*>(p.b) + p.b_map(index) * p.n * p.nrhs,
             static_cast<T*>(p.x) + index * p.n * p.nrhs);
}

// C C^H X = B: C Y = B, then C^H X = Y; with an upper factor C^H Y = B, then C X = Y.
template <class T>
void solve_with_factor(const T* c, bool lower, int64_t n, int64_t nrhs, const T* b, T* x) {
  const LowerSystem first = lower_system(n, nrhs, true, lower, !lower, !lower);
  const LowerSystem second = lower_system(n, nrhs, true, lower, lower, lower);
  substitute(first, n, nrhs, false, c, b, x);
  substitute(second, n, nrhs, false, c, static_cast<const T*>(x), x);
}

template <class T>
void cho_solve(const ChoSolveProblem& p, int64_t index) {
  solve_with_factor(static_cast<const T*>(p.c) + p.c_map(index) * p.n * p.n, p.lower, p.n, p.nrhs,
                    static_cast<const T*>(p.b) + p.b_map(index) * p.n * p.nrhs,
                    static_cast<T*>(p.x) + index * p.n * p.nrhs);
}

template <class T>
void solve_pos(const SolvePosProblem& p, int64_t index) {
  const T* a = static_cast<const T*>(p.a) + p.a_map(index) * p.n * p.n;
  const T* b = static_cast<const T*>(p.b) + p.b_map(index) * p.n * p.nrhs;
  T* x = static_cast<T*>(p.x) + index * p.n * p.nrhs;
  const std::vector<T> m = lower_triangle(a, p.n, !p.lower, false);
  std::vector<T> l(p.n * p.n, T(0));
  p.info[index] = factor(m.data(), l.data(), p.n);
  if (p.info[index]) {
    std::fill(x, x + p.n * p.nrhs, quiet_nan<T>());
  } else {
    solve_with_factor<T>(l.data(), true, p.n, p.nrhs, b, x);
  }
}

// S = L^-H (P + P^H) / 2 L^-1 with P = Phi(L^H G), the lower triangle with its diagonal real and
// halved; G is the conjugate of the cotangent, and the result that of S. An upper factor is the
// transpose of a lower one of conj(A). Where one triangle was read, it has both entries' shares.
template <class T>
void cholesky_pullback(const CholeskyPullbackProblem& p, int64_t index) {
  const int64_t n = p.n;
  const T* factor = static_cast<const T*>(p.factor) + p.factor_map(index) * n * n;
  const T* cotangent = static_cast<const T*>(p.cotangent) + p.cotangent_map(index) * n * n;
  T* out = static_cast<T*>(p.result) + index * n * n;
  const auto place = [&](int64_t i, int64_t j) { return p.upper ? j * n + i : i * n + j; };
  std::vector<T> s(n * n, T(0));
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      T sum(0);
      for (int64_t k = i; k < n; ++k) {
        sum = sub_mul_conj(sum, -conj(cotangent[place(k, j)]), factor[place(k, i)]);
      }
      s[i * n + j] = scale(i == j ? T(real(sum)) : sum, Real<T>(0.5));
      s[j * n + i] = conj(s[i * n + j]);
    }
  }
  // L^H Y = S, then X L = Y.
  const LowerSystem left = lower_system(n, n, true, !p.upper, !p.upper, true);
  const LowerSystem right = lower_system(n, n, false, !p.upper, p.upper, false);
  substitute<T>(left, n, n, false, factor, s.data(), s.data());
  substitute<T>(right, n, n, false, factor, s.data(), s.data());
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      const T value = conj(hermitian_mean(s[i * n + j], s[j * n + i]));
      out[place(j, i)] = p.symmetrize ? conj(value) : T(0);
      out[place(i, j)] = i == j ? T(real(value)) : p.symmetrize ? value : value + value;
    }
  }
}

// r_ic = b_ic - sum_j s a_ij x_jc.
template <class T>
void residual(const ResidualProblem& p, int64_t index) {
  const T* a = static_cast<const T*>(p.a) + p.a_map(index) * p.m * p.n;
  const T* x = static_cast<const T*>(p.x) + p.x_map(index) * p.n * p.nrhs;
  const T* b = static_cast<const T*>(p.b) + p.b_map(index) * p.m * p.nrhs;
  const Real<T> s = static_cast<const Real<T>*>(p.scale)[p.scale_map(index)];
  T* r = static_cast<T*>(p.r) + index * p.m * p.nrhs;
  const bool upper = p.triangle == ResidualProblem::Triangle::kUpper;
  const auto entry = [&](int64_t i, int64_t j) {
    if (p.triangle == ResidualProblem::Triangle::kNone) return a[i * p.n + j];
    if (i == j) return T(real(a[i * p.n + i]));
    const T stored = hermitian_entry(a, p.n, std::max(i, j), std::min(i, j), upper);
    return i > j ? stored : conj(stored);
  };
  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t c = 0; c < p.nrhs; ++c) {
      T sum(0);
      for (int64_t j = 0; j < p.n; ++j) {
        const T v = scale(entry(i, j), s);
        sum = sub_mul(sum, p.absolute ? T(-absolute(v)) : -v, x[j * p.nrhs + c]);
      }
      r[i * p.nrhs + c] = b[i * p.nrhs + c] - sum;
    }
  }
}

}  // namespace jax_batched::cpu::reference
