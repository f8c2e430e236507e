#include "ffi/cpu/reference/loops.h"

namespace jax_batched::cpu::reference {
namespace {

// x_ij = sum_l op(a)_il op(b)_lj.
template <class T>
void gemm(const GemmProblem& p, int64_t index) {
  const GemmProblem::Sizes own = p.sizes_of(p.sizes.at<const int32_t>(index, 3));
  const T* a = p.a.view.at<const T>(index, p.m, p.k);
  const T* b = p.b.view.at<const T>(index, p.k, p.n);
  T* x = p.x.at<T>(index, p.m, p.n);
  const auto entry = [](const GemmProblem::Operand& of, const T* data, int64_t rows,
                        int64_t columns, int64_t i, int64_t j) {
    const T value = of.transposed ? data[j * rows + i] : data[i * columns + j];
    return of.conjugated ? conj(value) : value;
  };
  for (int i = 0; i < p.m; ++i) {
    for (int j = 0; j < p.n; ++j) {
      T sum = own.valid ? T(0) : quiet_nan<T>();
      if (own.valid && i < own.m && j < own.n && !p.is_outside(i, j)) {
        for (int l = 0; l < own.k; ++l) {
          sum = sub_mul(sum, -entry(p.a, a, p.m, p.k, i, l), entry(p.b, b, p.k, p.n, l, j));
        }
      }
      x[int64_t{i} * p.n + j] = sum;
    }
  }
}

}  // namespace

template <>
Kernel<GemmProblem> kernel() {
  return each<GemmProblem>(
      [](auto t, const GemmProblem& p, int64_t index) { gemm<decltype(t)>(p, index); });
}

}  // namespace jax_batched::cpu::reference
