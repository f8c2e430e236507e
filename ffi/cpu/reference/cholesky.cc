#include <vector>

#include "ffi/cpu/reference/loops.h"

namespace jax_batched::cpu::reference {
namespace {

template <class T>
void cholesky(const CholeskyProblem& p, int64_t index) {
  const int64_t n = p.n;
  const T* a = p.a.at<const T>(index, n, n);
  T* out = p.l.at<T>(index, n, n);
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

// S = L^-H (P + P^H) / 2 L^-1 with P = Phi(L^H G), the lower triangle with its diagonal real and
// halved; G is the conjugate of the cotangent, and the result that of S. An upper factor is the
// transpose of a lower one of conj(A). Where one triangle was read, it has both entries' shares.
template <class T>
void cholesky_pullback(const CholeskyPullbackProblem& p, int64_t index) {
  const int64_t n = p.n;
  const T* factor = p.factor.at<const T>(index, n, n);
  const T* cotangent = p.cotangent.at<const T>(index, n, n);
  T* out = p.result.at<T>(index, n, n);
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

}  // namespace

template <>
Kernel<CholeskyProblem> kernel() {
  return each<CholeskyProblem>(
      [](auto t, const CholeskyProblem& p, int64_t index) { cholesky<decltype(t)>(p, index); });
}

template <>
Kernel<CholeskyPullbackProblem> kernel() {
  return each<CholeskyPullbackProblem>([](auto t, const CholeskyPullbackProblem& p, int64_t index) {
    cholesky_pullback<decltype(t)>(p, index);
  });
}

}  // namespace jax_batched::cpu::reference
