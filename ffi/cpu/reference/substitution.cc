#include "ffi/cpu/reference/loops.h"

namespace jax_batched::cpu::reference {
namespace {

template <class T>
void triangular_solve(const TriangularSolveProblem& p, int64_t index) {
  substitute(p.first, p.n, p.nrhs, p.unit_diagonal, p.a.at<const T>(index, p.n, p.n),
             p.b.at<const T>(index, p.n, p.nrhs), p.x.at<T>(index, p.n, p.nrhs));
}

template <class T>
void cho_solve(const ChoSolveProblem& p, int64_t index) {
  solve_with_factor(p.a.at<const T>(index, p.n, p.n), p.lower, p.n, p.nrhs,
                    p.b.at<const T>(index, p.n, p.nrhs), p.x.at<T>(index, p.n, p.nrhs));
}

}  // namespace

template <>
Kernel<TriangularSolveProblem> kernel() {
  return each<TriangularSolveProblem>([](auto t, const TriangularSolveProblem& p, int64_t index) {
    triangular_solve<decltype(t)>(p, index);
  });
}

template <>
Kernel<ChoSolveProblem> kernel() {
  return each<ChoSolveProblem>(
      [](auto t, const ChoSolveProblem& p, int64_t index) { cho_solve<decltype(t)>(p, index); });
}

}  // namespace jax_batched::cpu::reference
