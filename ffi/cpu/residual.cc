// R = B - s A X, a column of X after the other.
#include "ffi/cpu/engine/kernels.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {
namespace {

// A cache line of entries.
template <class T>
inline constexpr int64_t kSums = 64 / sizeof(T);

// Sums that run side by side in a product of rows, so that it becomes vector instructions.
template <class T>
struct PartialSums {
  T sum[kSums<T>] = {};

  T total() const {
    T all = sum[0];
    for (int64_t c = 1; c < kSums<T>; ++c) all = all + sum[c];
    return all;
  }
};

// sum_j f(a_j) x_j over `count` entries.
template <class T, class F>
T product(const T* a, const T* x, int64_t count, const F& f) {
  PartialSums<T> parts;
  int64_t j = 0;
  for (; j + kSums<T> <= count; j += kSums<T>) {
    for (int64_t c = 0; c < kSums<T>; ++c) {
      parts.sum[c] = sub_mul(parts.sum[c], -f(a[j + c]), x[j + c]);
    }
  }
  for (int64_t c = 0; j < count; ++j, ++c) parts.sum[c] = sub_mul(parts.sum[c], -f(a[j]), x[j]);
  return parts.total();
}

// y_i += sum over the read triangle of a_ij x_j, and y_j += conj(a_ij) x_i of its strict part:
// every entry is loaded once. f is applied to entries.
template <class T, class F>
void hermitian_product(const T* a, int64_t n, bool upper, const T* x, T* y, const F& f) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t begin = upper ? i + 1 : 0, end = upper ? n : i;
    const T* row = a + i * n;
    const T own = product(row + begin, x + begin, end - begin, f);
    y[i] = sub_mul(y[i] + own, -f(T(real(row[i]))), x[i]);
    for (int64_t j = begin; j < end; ++j) y[j] = sub_mul(y[j], -conj(f(row[j])), x[i]);
  }
}

template <class T, class F>
void residual_of(const ResidualProblem& p, const T* a, const T* x, const T* b, T* r, T* scratch,
                 const F& f) {
  T* column = scratch;
  T* y = scratch + p.n;
  for (int64_t c = 0; c < p.nrhs; ++c) {
    for (int64_t j = 0; j < p.n; ++j) column[j] = x[j * p.nrhs + c];
    if (!p.hermitian) {
      for (int64_t i = 0; i < p.m; ++i) y[i] = product(a + i * p.n, column, p.n, f);
    } else {
      for (int64_t i = 0; i < p.m; ++i) y[i] = T(0);
      hermitian_product(a, p.n, p.upper, column, y, f);
    }
    for (int64_t i = 0; i < p.m; ++i) r[i * p.nrhs + c] = b[i * p.nrhs + c] - y[i];
  }
}

template <class T>
void residual(const ResidualProblem& p, int64_t begin, int64_t end, void* scratch) {
  for (int64_t index = begin; index < end; ++index) {
    const T* a = p.a.at<const T>(index, p.m, p.n);
    const T* x = p.x.at<const T>(index, p.n, p.nrhs);
    const T* b = p.b.at<const T>(index, p.m, p.nrhs);
    const Real<T> s = *p.scale.at<const Real<T>>(index, 1, 1);
    T* r = p.r.at<T>(index, p.m, p.nrhs);
    T* space = static_cast<T*>(scratch);
    if (p.absolute) {
      residual_of(p, a, x, b, r, space, [s](T v) { return T(absolute(scale(v, s))); });
    } else {
      residual_of(p, a, x, b, r, space, [s](T v) { return scale(v, s); });
    }
  }
}

}  // namespace

template <>
Kernel<ResidualProblem> kernel() {
  const auto run = [](const ResidualProblem& p, int64_t begin, int64_t end, void* scratch) {
    with_element_type(p.dtype, [&](auto t) { residual<decltype(t)>(p, begin, end, scratch); });
  };
  const auto scratch_bytes = [](const ResidualProblem& p) {
    return with_element_type(p.dtype, [&](auto t) -> size_t {  // a column of X and one of A X
      return (int64_t{p.m} + p.n) * sizeof(t);
    });
  };
  return {run, scratch_bytes};
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
