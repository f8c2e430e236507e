#pragma once

#include "ffi/common/problem.h"

namespace jax_batched {

// A X = B with A Hermitian positive definite; reads one triangle of A, never writes the factor.
// A matrix that is not positive definite gets X = NaN and its info as in CholeskyProblem.
struct SolvePosProblem : Problem {
  static constexpr std::string_view kName = "solve_pos";
  static constexpr bool kTakesStored = true;
  static constexpr int64_t kMaxN = 512;

  MatrixView<Mapped> a;
  MatrixView<Mapped> b;
  MatrixView<Packed> x;
  int32_t* info;
  int n;
  int64_t nrhs;
  bool upper;  // which triangle of A is read
  bool fast;

  template <class Call>
  static SolvePosProblem read(Call& call) {
    SolvePosProblem p{};
    p.x = call.result("x", p.n, p.nrhs);
    p.info = call.info();
    p.a = call.square("a", p.n);
    p.b = call.matrix("b", p.n, p.nrhs);
    p.upper = !call.flag("lower");
    p.fast = call.choice("accuracy", {"ieee", "fast"}) == 1;
    return p;
  }
  Work work() const {
    return {factor_operations(n) + 2 * int64_t{n} * n * (2 * nrhs), (n + 2 * nrhs) * n};
  }
  void resize(int size) { n = size; }
  template <class F>
  void for_each_array(F&& f) {
    f.matrix(a, n);
    f.operand(b, n, nrhs);
    f.result(x, n, nrhs);
    f.integers(info, 1);
  }
};

}  // namespace jax_batched
