#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "ffi/cpu/reference/loops.h"

namespace jax_batched::cpu::reference {
namespace {

template <class T>
struct Lu {
  std::vector<T> lu;                 // m x n
  std::vector<int32_t> pivots = {};  // the row exchanged with in each step
  std::vector<int32_t> rows = {};    // the row of A at each place
  int32_t info = 0;
};

template <class R>
R magnitude(R a) {
  return absolute(a);
}
template <class R>
R magnitude(Complex<R> a) {
  return absolute(a.re) + absolute(a.im);
}
template <class T>
bool is_zero(T a) {
  return magnitude(a) == Real<T>(0);
}
template <class T>
bool is_finite(T a) {
  const T none = a - a;
  return is_zero(none);
}

// Column by column: the largest entry on or below the diagonal comes to it, l_ik = a_ik / u_kk, and
// a_ij -= l_ik u_kj.
template <class T>
Lu<T> factor(const T* a, int64_t m, int64_t n) {
  Lu<T> f{std::vector<T>(a, a + m * n)};
  for (int64_t i = 0; i < m; ++i) f.rows.push_back(static_cast<int32_t>(i));
  const auto at = [&](int64_t i, int64_t j) -> T& { return f.lu[i * n + j]; };
  for (int64_t k = 0; k < std::min(m, n); ++k) {
    int64_t place = k;
    Real<T> largest(-1);
    for (int64_t i = k; i < m; ++i) {
      if (magnitude(at(i, k)) > largest) {
        largest = magnitude(at(i, k));
        place = i;
      }
    }
    f.pivots.push_back(static_cast<int32_t>(place));
    std::swap(f.rows[k], f.rows[place]);
    for (int64_t j = 0; j < n; ++j) std::swap(at(k, j), at(place, j));
    const T pivot = at(k, k);
    if (f.info == 0 && (is_zero(pivot) || !is_finite(pivot))) f.info = static_cast<int32_t>(k + 1);
    for (int64_t i = k + 1; i < m; ++i) {
      if (!is_zero(pivot)) at(i, k) = divide(at(i, k), pivot);
      for (int64_t j = k + 1; j < n; ++j) at(i, j) = sub_mul(at(i, j), at(i, k), at(k, j));
    }
  }
  return f;
}

// L Y = P B, U X = Y; b(i, r) are the right-hand sides.
template <class T, class B>
void solve(const Lu<T>& f, int64_t n, int64_t nrhs, const B& b, T* x) {
  if (f.info != 0) {
    std::fill(x, x + n * nrhs, quiet_nan<T>());
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t r = 0; r < nrhs; ++r) x[i * nrhs + r] = b(f.rows[i], r);
  }
  const LowerSystem lower = lower_system(n, nrhs, true, true, false, false);
  const LowerSystem upper = lower_system(n, nrhs, true, false, false, false);
  substitute(lower, n, nrhs, true, f.lu.data(), static_cast<const T*>(x), x);
  substitute(upper, n, nrhs, false, f.lu.data(), static_cast<const T*>(x), x);
}

template <class T>
void lu(const LuProblem& p, int64_t index) {
  const Lu<T> f = factor(p.a.at<const T>(index, p.m, p.n), p.m, p.n);
  std::copy(f.lu.begin(), f.lu.end(), p.lu.at<T>(index, p.m, p.n));
  std::copy(f.pivots.begin(), f.pivots.end(), p.pivots + index * std::min(p.m, p.n));
  std::copy(f.rows.begin(), f.rows.end(), p.permutation + index * p.m);
  p.info[index] = f.info;
}

template <class T>
void solve_gen(const SolveGenProblem& p, int64_t index) {
  const Lu<T> f = factor(p.a.at<const T>(index, p.n, p.n), p.n, p.n);
  const T* b = p.b.at<const T>(index, p.n, p.nrhs);
  const auto entry = [&](int64_t i, int64_t r) { return b[i * p.nrhs + r]; };
  // In its own memory: X may be where B is.
  std::vector<T> x(p.n * p.nrhs);
  solve(f, p.n, p.nrhs, entry, x.data());
  std::copy(x.begin(), x.end(), p.x.at<T>(index, p.n, p.nrhs));
  p.info[index] = f.info;
}

template <class T>
void inv(const InvProblem& p, int64_t index) {
  const Lu<T> f = factor(p.a.at<const T>(index, p.n, p.n), p.n, p.n);
  const auto identity = [](int64_t i, int64_t r) { return T(Real<T>(i == r ? 1 : 0)); };
  solve(f, p.n, p.n, identity, p.x.at<T>(index, p.n, p.n));
  p.info[index] = f.info;
}

// A product as a mantissa, of parts below 2, times 2^exponent; NaN if a factor is not finite.
template <class T>
struct Product {
  T mantissa = T(Real<T>(1));
  int64_t exponent = 0;

  void multiply(T factor) {
    if constexpr (kIsComplex<T>) {
      const T a = mantissa, b = normalized(factor);
      mantissa = normalized(T(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re));
    } else {
      mantissa = normalized(mantissa * normalized(factor));
    }
  }
  T normalized(T x) {
    int e = 0;
    if constexpr (kIsComplex<T>) {
      std::frexp(std::max(absolute(x.re), absolute(x.im)), &e);
      exponent += e;
      return {std::scalbn(x.re, -e), std::scalbn(x.im, -e)};
    } else {
      x = std::frexp(x, &e);
      exponent += e;
      return x;
    }
  }
};

template <class T>
Product<T> determinant(const T* a, int64_t n) {
  const Lu<T> f = factor(a, n, n);
  Product<T> det;
  for (int64_t i = 0; i < n; ++i) {
    const T pivot = f.lu[i * n + i];
    det.multiply(is_finite(pivot) ? pivot : quiet_nan<T>());
    if (f.pivots[i] != i) det.mantissa = -det.mantissa;
  }
  return det;
}

template <class T>
void det(const DetProblem& p, int64_t index) {
  const Product<T> det = determinant(p.a.at<const T>(index, p.n, p.n), p.n);
  const auto scaled = [&](Real<T> part) {
    return static_cast<Real<T>>(std::scalbln(part, static_cast<long>(det.exponent)));
  };
  if constexpr (kIsComplex<T>) {
    *p.det.at<T>(index, 1) = T(scaled(det.mantissa.re), scaled(det.mantissa.im));
  } else {
    *p.det.at<T>(index, 1) = scaled(det.mantissa);
  }
}

template <class T>
void slogdet(const SlogdetProblem& p, int64_t index) {
  const Product<T> det = determinant(p.a.at<const T>(index, p.n, p.n), p.n);
  const Real<T> size = absolute(det.mantissa);
  *p.sign.at<T>(index, 1) = size == Real<T>(0) ? T(Real<T>(0)) : scale(det.mantissa, 1 / size);
  *p.logabsdet.at<Real<T>>(index, 1) = static_cast<Real<T>>(
      std::log(double(size)) + static_cast<double>(det.exponent) * std::log(2.0));
}

}  // namespace

template <>
Kernel<LuProblem> kernel() {
  return each<LuProblem>(
      [](auto t, const LuProblem& p, int64_t index) { lu<decltype(t)>(p, index); });
}
template <>
Kernel<SolveGenProblem> kernel() {
  return each<SolveGenProblem>(
      [](auto t, const SolveGenProblem& p, int64_t index) { solve_gen<decltype(t)>(p, index); });
}
template <>
Kernel<InvProblem> kernel() {
  return each<InvProblem>(
      [](auto t, const InvProblem& p, int64_t index) { inv<decltype(t)>(p, index); });
}
template <>
Kernel<DetProblem> kernel() {
  return each<DetProblem>(
      [](auto t, const DetProblem& p, int64_t index) { det<decltype(t)>(p, index); });
}
template <>
Kernel<SlogdetProblem> kernel() {
  return each<SlogdetProblem>(
      [](auto t, const SlogdetProblem& p, int64_t index) { slogdet<decltype(t)>(p, index); });
}

}  // namespace jax_batched::cpu::reference
