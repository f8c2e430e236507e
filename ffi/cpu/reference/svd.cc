#include "ffi/cpu/reference/rotations.h"

namespace jax_batched::cpu::reference {
namespace {

template <class T>
T inner_product(const T* x, const T* y, int64_t n) {
  T sum = T(Real<T>(0));
  for (int64_t k = 0; k < n * n; k += n) sum = sum + product(conj(x[k]), y[k]);
  return sum;
}

// Column j of an orthonormal U: of the unit vectors the farthest from the columns before it, less
// its share of these, twice.
template <class T>
void complete(T* u, int64_t n, int64_t j) {
  using R = Real<T>;
  int64_t farthest = 0;
  R least = kInfinity<R>;
  for (int64_t i = 0; i < n; ++i) {
    R squares = 0;
    for (int64_t k = 0; k < j; ++k) squares += real(product(conj(u[i * n + k]), u[i * n + k]));
    if (squares < least) {
      least = squares;
      farthest = i;
    }
  }
  for (int64_t i = 0; i < n; ++i) u[i * n + j] = T(R(i == farthest));
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t k = 0; k < j; ++k) {
      const T share = inner_product(u + k, u + j, n);
      for (int64_t i = 0; i < n * n; i += n) u[i + j] = u[i + j] - product(u[i + k], share);
    }
    const R norm = std::sqrt(real(inner_product(u + j, u + j, n)));
    for (int64_t i = 0; i < n * n; i += n) u[i + j] = jax_batched::scale(u[i + j], 1 / norm);
  }
}

// One-sided Jacobi (Hestenes): A V = U diag(s), where V makes two columns after the other
// orthogonal.
template <class T>
void svd(const SvdProblem& p, int64_t index) {
  using R = Real<T>;
  const int64_t n = p.n;
  R* s = p.s.at<R>(index, n);
  T* u = p.vectors ? p.u.at<T>(index, n, n) : nullptr;
  T* vh = p.vectors ? p.vh.at<T>(index, n, n) : nullptr;
  const T* from = p.a.at<const T>(index, n, n);
  std::vector<T> a(from, from + n * n), v(n * n, T(R(0)));
  int exponent;
  if (!exponent_of(a, &exponent)) {
    std::fill(s, s + n, kNaN<R>);
    if (p.vectors) {
      std::fill(u, u + n * n, quiet_nan<T>());
      std::fill(vh, vh + n * n, quiet_nan<T>());
    }
    p.info[index] = static_cast<int32_t>(n);
    return;
  }
  for (T& entry : a) entry = scaled(entry, -exponent);
  for (int64_t i = 0; i < n; ++i) v[i * n + i] = T(R(1));
  const R tolerance = 4 * std::numeric_limits<R>::epsilon();
  const R zero = sizeof(R) == sizeof(float) ? R(1e-15) : R(1e-125);  // its square is a number
  const auto norm = [&](int64_t j) { return std::sqrt(real(inner_product(&a[j], &a[j], n))); };
  p.info[index] = 1;
  for (int sweep = 0; sweep < kMaxSweeps && p.info[index] != 0; ++sweep) {
    p.info[index] = 0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = i + 1; j < n; ++j) {
        const R x = norm(i), y = norm(j);
        const T g = inner_product(&a[i], &a[j], n);
        if (!(x > zero && y > zero && absolute(g) > tolerance * x * y)) continue;
        ++p.info[index];
        const Rotation<T> rotation(x * x, y * y, g);
        rotation.apply(&a[i], &a[j], n, n);
        rotation.apply(&v[i], &v[j], n, n);
      }
    }
  }
  std::vector<R> minus(n);
  for (int64_t j = 0; j < n; ++j) minus[j] = norm(j) > zero ? -norm(j) : R(0);
  const std::vector<int64_t> order = order_of(minus);
  for (int64_t j = 0; j < n; ++j) {
    const R value = -minus[order[j]];
    s[j] = std::scalbn(value, exponent) + R(0);
    if (!p.vectors) continue;
    for (int64_t i = 0; i < n; ++i) {
      vh[j * n + i] = conj(v[i * n + order[j]]);
      u[i * n + j] = jax_batched::scale(a[i * n + order[j]], 1 / (value > R(0) ? value : R(1)));
    }
    if (value == R(0)) complete(u, n, j);
  }
}

}  // namespace

template <>
Kernel<SvdProblem> kernel() {
  return each<SvdProblem>(
      [](auto t, const SvdProblem& p, int64_t index) { svd<decltype(t)>(p, index); });
}

}  // namespace jax_batched::cpu::reference
