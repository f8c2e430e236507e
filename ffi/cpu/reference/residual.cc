#include <algorithm>

#include "ffi/cpu/reference/loops.h"

namespace jax_batched::cpu::reference {
namespace {

// r_ic = b_ic - sum_j s a_ij x_jc.
template <class T>
void residual(const ResidualProblem& p, int64_t index) {
  const T* a = p.a.at<const T>(index, p.m, p.n);
  const T* x = p.x.at<const T>(index, p.n, p.nrhs);
  const T* b = p.b.at<const T>(index, p.m, p.nrhs);
  const Real<T> s = *p.scale.at<const Real<T>>(index, 1, 1);
  T* r = p.r.at<T>(index, p.m, p.nrhs);
  const auto entry = [&](int64_t i, int64_t j) {
    if (!p.hermitian) return a[i * p.n + j];
    if (i == j) return T(real(a[i * p.n + i]));
    const T stored = hermitian_entry(a, p.n, std::max(i, j), std::min(i, j), p.upper);
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

}  // namespace

template <>
Kernel<ResidualProblem> kernel() {
  return each<ResidualProblem>(
      [](auto t, const ResidualProblem& p, int64_t index) { residual<decltype(t)>(p, index); });
}

}  // namespace jax_batched::cpu::reference
