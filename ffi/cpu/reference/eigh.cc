#include "ffi/cpu/reference/rotations.h"

namespace jax_batched::cpu::reference {
namespace {

// Jacobi's method: rotations that make one off-diagonal entry after another zero.
template <class T>
void eigh(const EighProblem& p, int64_t index) {
  using R = Real<T>;
  const int64_t n = p.n;
  T* v = p.vectors ? p.v.at<T>(index, n, n) : nullptr;
  R* w = p.w.at<R>(index, n);
  if (!p.vectors) std::fill_n(p.workspace.at<R>(index, n), n, R(0));
  std::vector<T> a = lower_triangle(p.a.at<const T>(index, n, n), n, p.upper, p.symmetrize);
  for (int64_t i = 0; i < n; ++i) a[i * n + i] = T(real(a[i * n + i]));
  int exponent;
  if (!exponent_of(a, &exponent)) {
    std::fill(w, w + n, kNaN<R>);
    if (p.vectors) std::fill(v, v + n * n, quiet_nan<T>());
    p.info[index] = static_cast<int32_t>(n);
    return;
  }
  std::vector<T> q(n * n, T(R(0)));
  for (int64_t i = 0; i < n; ++i) {
    q[i * n + i] = T(R(1));
    for (int64_t j = 0; j <= i; ++j) {
      a[i * n + j] = scaled(a[i * n + j], -exponent);
      a[j * n + i] = conj(a[i * n + j]);
    }
  }
  const R negligible = std::numeric_limits<R>::epsilon() / static_cast<R>(8 * n);
  p.info[index] = 1;
  for (int sweep = 0; sweep < kMaxSweeps && p.info[index] != 0; ++sweep) {
    p.info[index] = 0;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = i + 1; j < n; ++j) {
        const T g = a[i * n + j];
        if (!(absolute(g) > negligible)) continue;
        ++p.info[index];
        const Rotation<T> rotation(real(a[i * n + i]), real(a[j * n + j]), g);
        const R d_i = real(a[i * n + i]) - rotation.t, d_j = real(a[j * n + j]) + rotation.t;
        rotation.apply(&a[i], &a[j], n, n);
        for (int64_t k = 0; k < n; ++k) {  // A is Hermitian
          a[i * n + k] = conj(a[k * n + i]);
          a[j * n + k] = conj(a[k * n + j]);
        }
        a[i * n + i] = T(d_i);
        a[j * n + j] = T(d_j);
        a[i * n + j] = a[j * n + i] = T(R(0));
        rotation.apply(&q[i], &q[j], n, n);
      }
    }
  }
  std::vector<R> d(n);
  for (int64_t i = 0; i < n; ++i) d[i] = real(a[i * n + i]);
  const std::vector<int64_t> order = order_of(d);
  for (int64_t j = 0; j < n; ++j) {
    w[j] = std::scalbn(d[order[j]], exponent);
    for (int64_t i = 0; i < n && p.vectors; ++i) v[i * n + j] = q[i * n + order[j]];
  }
}

}  // namespace

template <>
Kernel<EighProblem> kernel() {
  return each<EighProblem>(
      [](auto t, const EighProblem& p, int64_t index) { eigh<decltype(t)>(p, index); });
}

}  // namespace jax_batched::cpu::reference
