#include <algorithm>
#include <cmath>
#include <vector>

#include "ffi/cpu/reference/loops.h"

namespace jax_batched::cpu::reference {
namespace {

template <class R>
R largest_part(R a) {
  return absolute(a);
}
template <class R>
R largest_part(Complex<R> a) {
  return std::max(absolute(a.re), absolute(a.im));
}
template <class R>
R imaginary(R) {
  return 0;
}
template <class R>
R imaginary(Complex<R> a) {
  return a.im;
}
template <class R>
R product(R a, R b) {
  return a * b;
}
template <class R>
Complex<R> product(Complex<R> a, Complex<R> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

// An m x n matrix with vectors of reflections below its diagonal; larfg, geqr2, orm2r of LAPACK.
template <class T>
struct Reflections {
  using R = Real<T>;
  int64_t m, n, k;
  std::vector<T> a, taus = {};

  T& at(int64_t i, int64_t j) { return a[i * n + j]; }

  // The reflection of column l onto its entry l.
  void eliminate(int64_t l) {
    R largest = 0;
    for (int64_t i = l + 1; i < m; ++i) {
      const R part = largest_part(at(i, l));
      if (!(part <= largest)) largest = part;  // NaN stays
    }
    const T alpha = at(l, l);
    if (largest == R(0) && imaginary(alpha) == R(0)) return;
    if (!(largest >= largest_part(alpha))) largest = largest_part(alpha);
    int exponent = 0;
    if (std::isfinite(largest)) std::frexp(largest, &exponent);
    const auto scaled = [&](T x) {
      if constexpr (kIsComplex<T>) {
        return T(std::scalbn(x.re, -exponent), std::scalbn(x.im, -exponent));
      } else {
        return std::scalbn(x, -exponent);
      }
    };
    R squares = 0;
    for (int64_t i = l; i < m; ++i) {
      const T x = scaled(at(i, l));
      squares += real(x) * real(x) + imaginary(x) * imaginary(x);
    }
    const R beta = -std::copysign(std::sqrt(squares), real(alpha));
    const T difference = T(beta) - scaled(alpha);
    taus[l] = jax_batched::scale(difference, R(1) / beta);
    for (int64_t i = l + 1; i < m; ++i) at(i, l) = divide(scaled(at(i, l)), -difference);
    at(l, l) = T(std::scalbn(beta, exponent));
  }

  // C -= tau v v^H C with v of reflection l, on columns begin <= j < end of a matrix.
  void reflect(int64_t l, T tau, T* c, int64_t columns, int64_t begin) {
    for (int64_t j = begin; j < columns; ++j) {
      T sum = c[l * columns + j];
      for (int64_t i = l + 1; i < m; ++i) {
        sum = sum + product(conj(at(i, l)), c[i * columns + j]);
      }
      sum = product(tau, sum);
      c[l * columns + j] = c[l * columns + j] - sum;
      for (int64_t i = l + 1; i < m; ++i) {
        c[i * columns + j] = c[i * columns + j] - product(at(i, l), sum);
      }
    }
  }

  void factor() {
    taus.assign(k, T(R(0)));
    for (int64_t l = 0; l < k; ++l) {
      eliminate(l);
      reflect(l, conj(taus[l]), a.data(), n, l + 1);
    }
    bool finite = true;
    const auto check = [&](T x) { finite &= std::isfinite(largest_part(x)); };
    for (int64_t l = 0; l < k; ++l) {
      check(at(l, l));
      check(taus[l]);
      if constexpr (kIsComplex<T>) finite &= !std::isnan(at(l, l).im) && !std::isnan(taus[l].im);
    }
    if (finite) return;
    std::fill(a.begin(), a.end(), quiet_nan<T>());
    std::fill(taus.begin(), taus.end(), quiet_nan<T>());
  }

  // Q C, or Q^H C.
  void multiply(T* c, int64_t columns, bool adjoint) {
    for (int64_t step = 0; step < k; ++step) {
      const int64_t l = adjoint ? step : k - 1 - step;
      reflect(l, adjoint ? conj(taus[l]) : taus[l], c, columns, 0);
    }
  }
  void form(T* q, int64_t columns) {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < columns; ++j) q[i * columns + j] = T(R(i == j ? 1 : 0));
    }
    multiply(q, columns, false);
  }
};

template <class T>
void qr(const QrProblem& p, int64_t index) {
  const T* a = p.a.at<const T>(index, p.m, p.n);
  Reflections<T> f{p.m, p.n, std::min(p.m, p.n), std::vector<T>(a, a + int64_t{p.m} * p.n)};
  f.factor();
  if (p.has_q()) f.form(p.q.at<T>(index, p.m, p.q_columns()), p.q_columns());
  T* r = p.r.at<T>(index, p.r_rows(), p.n);
  for (int64_t i = 0; i < p.r_rows(); ++i) {
    for (int64_t j = 0; j < p.n; ++j) {
      r[i * p.n + j] = i <= j || p.mode == QrProblem::kRaw ? f.at(i, j) : T(Real<T>(0));
    }
  }
  if (p.mode == QrProblem::kRaw) std::copy(f.taus.begin(), f.taus.end(), p.taus.at<T>(index, f.k));
}

template <class T, class P>
Reflections<T> given(const P& p, int64_t index) {
  const T* a = p.a.template at<const T>(index, p.m, p.n);
  const T* taus = p.taus.template at<const T>(index, p.k);
  return {p.m, p.n, p.k, std::vector<T>(a, a + int64_t{p.m} * p.n),
          std::vector<T>(taus, taus + p.k)};
}

template <class T>
void qr_multiply(const QrMultiplyProblem& p, int64_t index) {
  const T* c = p.c.at<const T>(index, p.m, p.nrhs);
  std::vector<T> x(c, c + p.m * p.nrhs);  // X may be where C is
  given<T>(p, index).multiply(x.data(), p.nrhs, p.adjoint);
  std::copy(x.begin(), x.end(), p.x.at<T>(index, p.m, p.nrhs));
}

}  // namespace

template <>
Kernel<QrProblem> kernel() {
  return each<QrProblem>(
      [](auto t, const QrProblem& p, int64_t index) { qr<decltype(t)>(p, index); });
}
template <>
Kernel<HouseholderProductProblem> kernel() {
  return each<HouseholderProductProblem>(
      [](auto t, const HouseholderProductProblem& p, int64_t index) {
        using T = decltype(t);
        given<T>(p, index).form(p.q.at<T>(index, p.m, p.n), p.n);
      });
}
template <>
Kernel<QrMultiplyProblem> kernel() {
  return each<QrMultiplyProblem>([](auto t, const QrMultiplyProblem& p, int64_t index) {
    qr_multiply<decltype(t)>(p, index);
  });
}

}  // namespace jax_batched::cpu::reference
