#pragma once

#include "ffi/common/problem.h"

namespace jax_batched {

// R = B - s A X with A m x n, X n x nrhs and a real factor s for each matrix.
struct ResidualProblem : MaskedProblem {
  static constexpr std::string_view kName = "residual";
  static constexpr bool kTakesStored = false;
  static constexpr int64_t kMaxN = 512;

  MatrixView<Mapped> a;
  MatrixView<Mapped> scale;
  MatrixView<Mapped> x;
  MatrixView<Mapped> b;
  MatrixView<Packed> r;
  int64_t nrhs;
  int m;
  int n;
  bool upper;      // which triangle of A is read, if one is
  bool absolute;   // |A| in place of A
  bool hermitian;  // one triangle of A is read

  template <class Call>
  static ResidualProblem read(Call& call) {
    ResidualProblem p{};
    p.r = call.result("r", p.m, p.nrhs);
    p.a = call.matrix("a", p.m, p.n);
    p.scale = call.real_scalar("scale");
    p.x = call.matrix("x", p.n, p.nrhs);
    p.b = call.matrix("b", p.m, p.nrhs);
    const int triangle = call.choice("triangle", {"", "lower", "upper"});
    p.hermitian = triangle != 0;
    p.upper = triangle == 2;
    p.absolute = call.flag("absolute");
    call.require(!p.hermitian || p.m == p.n, "a: Hermitian but not square");
    return p;
  }
  Work work() const {
    const int64_t size = (int64_t{m} + n) / 2;
    return {2 * size * size * nrhs, (size + nrhs) * size};
  }
};

}  // namespace jax_batched
