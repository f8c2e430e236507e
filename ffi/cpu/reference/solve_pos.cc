#include <algorithm>
#include <vector>

#include "ffi/cpu/reference/loops.h"

namespace jax_batched::cpu::reference {
namespace {

template <class T>
void solve_pos(const SolvePosProblem& p, int64_t index) {
  const T* a = p.a.at<const T>(index, p.n, p.n);
  const T* b = p.b.at<const T>(index, p.n, p.nrhs);
  T* x = p.x.at<T>(index, p.n, p.nrhs);
  const std::vector<T> m = lower_triangle(a, p.n, p.upper, false);
  std::vector<T> l(p.n * p.n, T(0));
  p.info[index] = factor(m.data(), l.data(), p.n);
  if (p.info[index]) {
    std::fill(x, x + p.n * p.nrhs, quiet_nan<T>());
  } else {
    solve_with_factor<T>(l.data(), true, p.n, p.nrhs, b, x);
  }
}

}  // namespace

template <>
Kernel<SolvePosProblem> kernel() {
  return each<SolvePosProblem>(
      [](auto t, const SolvePosProblem& p, int64_t index) { solve_pos<decltype(t)>(p, index); });
}

}  // namespace jax_batched::cpu::reference
