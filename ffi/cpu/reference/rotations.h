// What the Jacobi methods of reference/ share.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "ffi/cpu/reference/loops.h"

namespace jax_batched::cpu::reference {

template <class R>
R larger_part(R a) {
  return absolute(a);
}
template <class R>
R larger_part(Complex<R> a) {
  return std::max(absolute(a.re), absolute(a.im));
}

template <class R>
bool is_finite(R a) {
  return std::isfinite(a);
}
template <class R>
bool is_finite(Complex<R> a) {
  return std::isfinite(a.re) && std::isfinite(a.im);
}

// The exponent of the largest part of all entries; an infinite or NaN one is no number: false.
template <class T>
bool exponent_of(const std::vector<T>& a, int* exponent) {
  Real<T> largest = 0;
  for (const T& entry : a) {
    if (!is_finite(entry)) return false;
    largest = std::max(largest, larger_part(entry));
  }
  *exponent = 0;
  std::frexp(largest, exponent);
  return true;
}

template <class T>
T scaled(T x, int exponent) {
  if constexpr (kIsComplex<T>) {
    return T(std::scalbn(x.re, exponent), std::scalbn(x.im, exponent));
  } else {
    return std::scalbn(x, exponent);
  }
}

template <class R>
R product(R a, R b) {
  return a * b;
}
template <class R>
Complex<R> product(Complex<R> a, Complex<R> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

// J = (c s; -conj(s) c), with which J^H (p g; conj(g) q) J is diagonal: p - t and q + t. c is
// 1 - s conj(r): so a small s keeps its digits, where c would be rounded to 1 (Rutishauser).
template <class T>
struct Rotation {
  using R = Real<T>;
  R t;
  T s, r;

  Rotation(R p, R q, T g) {
    const R size = absolute(g);
    const R tangent =
        std::copysign(2 * size, q - p) / (absolute(q - p) + std::hypot(q - p, 2 * size));
    const R c = 1 / std::sqrt(1 + tangent * tangent);
    s = jax_batched::scale(g, tangent * c / size);
    r = jax_batched::scale(s, 1 / (1 + c));
    t = tangent * size;
  }
  // Columns p and q, of `rows` entries n apart, times J.
  void apply(T* p, T* q, int64_t rows, int64_t n) const {
    for (int64_t i = 0; i < rows * n; i += n) {
      const T x = p[i], y = q[i];
      p[i] = x - product(conj(s), y + product(r, x));
      q[i] = y + product(s, x - product(conj(r), y));
    }
  }
};

inline constexpr int kMaxSweeps = 60;

// Where each of the keys is in ascending order.
template <class R>
std::vector<int64_t> order_of(const std::vector<R>& keys) {
  std::vector<int64_t> order(keys.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t i, int64_t j) { return keys[i] < keys[j]; });
  return order;
}

}  // namespace jax_batched::cpu::reference
