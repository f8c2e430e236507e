// Singular value decompositions of square matrices, A = U diag(s) V^H.
//
// s descends. Where it is zero, U and V are completed to bases all the same. info is 0, or a
// positive number if the iteration did not converge. A matrix
// with NaN or inf has NaN in all results, and info = n. (Of other shapes a QR factorization comes
// first.)
#pragma once

#include "ffi/common/problem.h"

namespace jax_batched {

struct SvdProblem : MaskedProblem {
  static constexpr std::string_view kName = "svd";
  static constexpr bool kTakesStored = false;
  static constexpr int64_t kMaxN = 64;

  MatrixView<Mapped> a;
  MatrixView<Packed> s;   // n real numbers
  MatrixView<Packed> u;   // n x n, if `vectors`
  MatrixView<Packed> vh;  // n x n, if `vectors`: V^H
  int32_t* info;
  int n;
  bool vectors;

  template <class Call>
  static SvdProblem read(Call& call) {
    SvdProblem p{};
    p.vectors = call.flag("vectors");
    p.s = call.real_vector_result("s", p.n);
    if (p.vectors) {
      p.u = call.result("u", p.n, p.n);
      p.vh = call.result("vh", p.n, p.n);
    }
    p.info = call.info();
    p.a = call.square("a", p.n);
    return p;
  }
  Work work() const {
    const int64_t cubes = int64_t{n} * n * n;
    return {(vectors ? 11 : 4) * cubes + 60 * int64_t{n} * n, (vectors ? 3 : 1) * int64_t{n} * n};
  }
};

}  // namespace jax_batched
