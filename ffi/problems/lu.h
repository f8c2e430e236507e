// General matrices by LU factorization with partial pivoting, P A = L U.
//
// The pivot of a column is LAPACK's: the largest |re| + |im|, of equal ones the first in the order
// that the exchanges so far have brought the rows into. A pivot that is zero or not finite has
// failed: info is the first one's number, from 1.
#pragma once

#include <algorithm>

#include "ffi/common/problem.h"

namespace jax_batched {

constexpr int64_t lu_operations(int64_t m, int64_t n) {
  const int64_t k = std::min(m, n);
  return k * k * (3 * std::max(m, n) - k) / 6;
}

struct GeneralProblem : MaskedProblem {
  static constexpr bool kTakesStored = false;
  static constexpr int64_t kMaxN = 512;

  MatrixView<Mapped> a;
  int n;

  Work work() const { return work(lu_operations(n, n), int64_t{n} * n); }
  void resize(int size) { n = size; }

 protected:
  // The smallest real matrices are unrolled.
  Work work(int64_t operations, int64_t elements) const {
    const bool is_real = dtype == DType::kFloat32 || dtype == DType::kFloat64;
    return {operations, elements, /*times=*/1, /*overhead=*/is_real ? 2 : 15};
  }
};

// L and U in one matrix, of any shape, as LAPACK's getrf leaves them.
struct LuProblem : GeneralProblem {
  static constexpr std::string_view kName = "lu";

  MatrixView<Packed> lu;
  int32_t* pivots;       // of step k: the row, from 0, that row k was exchanged with
  int32_t* permutation;  // of row i of L U: the row of A
  int32_t* info;
  int m;

  template <class Call>
  static LuProblem read(Call& call) {
    LuProblem p{};
    p.lu = call.result("lu", p.m, p.n);
    p.pivots = call.integers("pivots", std::min(p.m, p.n));
    p.permutation = call.integers("permutation", p.m);
    p.info = call.info();
    p.a = call.matrix("a", p.m, p.n);
    return p;
  }
  Work work() const { return GeneralProblem::work(lu_operations(m, n), int64_t{m} * n); }
  void resize(int size) { m = n = size; }
  template <class F>
  void for_each_array(F&& f) {
    f.matrix(a, n);
    f.result(lu, n, n);
    f.integers(pivots, n);
    f.integers(permutation, n);
    f.integers(info, 1);
  }
};

// A X = B; the factors are never written. X of a matrix that failed is NaN.
struct SolveGenProblem : GeneralProblem {
  static constexpr std::string_view kName = "solve_gen";

  MatrixView<Mapped> b;
  MatrixView<Packed> x;
  int32_t* info;
  int64_t nrhs;

  template <class Call>
  static SolveGenProblem read(Call& call) {
    SolveGenProblem p{};
    p.x = call.result("x", p.n, p.nrhs);
    p.info = call.info();
    p.a = call.square("a", p.n);
    p.b = call.matrix("b", p.n, p.nrhs);
    return p;
  }
  Work work() const {
    return GeneralProblem::work(lu_operations(n, n) + 2 * int64_t{n} * n * nrhs,
                                (n + 2 * nrhs) * n);
  }
  template <class F>
  void for_each_array(F&& f) {
    f.matrix(a, n);
    f.operand(b, n, nrhs);
    f.result(x, n, nrhs);
    f.integers(info, 1);
  }
};

// X from L U X = P B, or with `transposed` U^T L^T P X = B, given what LuProblem left; with
// `conjugated` the conjugate of L and U. The CPU makes it of other operations.
struct LuSubstitutionProblem : GeneralProblem {
  static constexpr std::string_view kName = "lu_substitution";
  static constexpr bool kOnCpu = false;

  MatrixView<Mapped> permutation;
  MatrixView<Mapped> b;
  MatrixView<Packed> x;
  int64_t nrhs;
  bool transposed;
  bool conjugated;

  template <class Call>
  static LuSubstitutionProblem read(Call& call) {
    LuSubstitutionProblem p{};
    p.x = call.result("x", p.n, p.nrhs);
    p.a = call.square("lu", p.n);
    p.permutation = call.integer_vector("permutation", p.n);
    p.b = call.matrix("b", p.n, p.nrhs);
    p.transposed = call.flag("transpose");
    p.conjugated = call.flag("conjugate");
    return p;
  }
  Work work() const { return {int64_t{n} * n * nrhs, (n + 2 * nrhs) * n}; }
};

// The inverse, NaN of a matrix that failed.
struct InvProblem : GeneralProblem {
  static constexpr std::string_view kName = "inv";

  MatrixView<Packed> x;
  int32_t* info;

  template <class Call>
  static InvProblem read(Call& call) {
    InvProblem p{};
    p.x = call.result("x", p.n, p.n);
    p.info = call.info();
    p.a = call.square("a", p.n);
    return p;
  }
  Work work() const {
    return GeneralProblem::work(lu_operations(n, n) + 2 * int64_t{n} * n * n, 2 * int64_t{n} * n);
  }
  template <class F>
  void for_each_array(F&& f) {
    f.matrix(a, n);
    f.result(x, n, n);
    f.integers(info, 1);
  }
};

struct DetProblem : GeneralProblem {
  static constexpr std::string_view kName = "det";

  MatrixView<Packed> det;

  template <class Call>
  static DetProblem read(Call& call) {
    DetProblem p{};
    p.det = call.scalar("det");
    p.a = call.square("a", p.n);
    return p;
  }
  template <class F>
  void for_each_array(F&& f) {
    f.matrix(a, n);
    f.result(det, 1, 1);
  }
};

// The determinant as sign * exp(logabsdet), |sign| = 1; of a singular matrix 0 and -inf.
struct SlogdetProblem : GeneralProblem {
  static constexpr std::string_view kName = "slogdet";

  MatrixView<Packed> sign;
  MatrixView<Packed> logabsdet;  // real

  template <class Call>
  static SlogdetProblem read(Call& call) {
    SlogdetProblem p{};
    p.sign = call.scalar("sign");
    p.logabsdet = call.real_scalar_result("logabsdet");
    p.a = call.square("a", p.n);
    return p;
  }
  template <class F>
  void for_each_array(F&& f) {
    f.matrix(a, n);
    f.result(sign, 1, 1);
    f.real_result(logabsdet, 1);
  }
};

}  // namespace jax_batched
