// QR factorizations by Householder reflections, A = Q R with Q = H_0 H_1 ... H_(k-1), k = min(m,
// n).
//
// H_l = I - tau_l v_l v_l^H as in LAPACK's geqrf: v_l is zero above entry l, which is one, and its
// rest lies below the diagonal of column l; tau_l is 0 where nothing is to be eliminated. A matrix
// whose Householder vectors are not finite has NaN in all results.
#pragma once

#include <algorithm>

#include "ffi/common/problem.h"

namespace jax_batched {

constexpr int64_t qr_operations(int64_t m, int64_t n) {
  const int64_t k = std::min(m, n);
  return k * k * (3 * std::max(m, n) - k) / 3;
}

struct HouseholderProblem : MaskedProblem {
  static constexpr bool kTakesStored = false;
  static constexpr int64_t kMaxN = 512;

  MatrixView<Mapped> a;
  int m;
  int n;
};

struct QrProblem : HouseholderProblem {
  static constexpr std::string_view kName = "qr";
  enum Mode { kReduced, kComplete, kR, kRaw };

  MatrixView<Packed> q;     // m x q_columns(); not of kR and kRaw
  MatrixView<Packed> r;     // r_rows() x n; of kRaw m x n, with the v_l below the diagonal
  MatrixView<Packed> taus;  // k, of kRaw alone
  Mode mode;

  template <class Call>
  static QrProblem read(Call& call) {
    QrProblem p{};
    p.mode = static_cast<Mode>(call.choice("mode", {"reduced", "complete", "r", "raw"}));
    int q_columns = 0;
    if (p.has_q()) p.q = call.result("q", p.m, q_columns);
    int r_rows = q_columns;
    p.r = call.result("r", r_rows, p.n);
    if (p.mode == kRaw) p.taus = call.vector_result("taus", std::min(r_rows, p.n));
    p.a = call.matrix("a", p.m, p.n);
    call.require(r_rows == p.r_rows(), "r: another number of rows than the mode says");
    return p;
  }
  JAX_BATCHED_HD bool has_q() const { return mode == kReduced || mode == kComplete; }
  JAX_BATCHED_HD int reflections() const { return m < n ? m : n; }
  JAX_BATCHED_HD int q_columns() const {
    return mode == kComplete ? m : mode == kReduced ? reflections() : 0;
  }
  JAX_BATCHED_HD int r_rows() const { return mode == kReduced || mode == kR ? reflections() : m; }
  Work work() const {
    const int64_t formed = has_q() ? qr_operations(m, q_columns()) : 0;
    return {qr_operations(m, n) + formed, int64_t{m} * (n + q_columns())};
  }
};

// The first n columns of H_0 H_1 ... H_(k-1), n <= m, from what geqrf leaves.
struct HouseholderProductProblem : HouseholderProblem {
  static constexpr std::string_view kName = "householder_product";

  MatrixView<Mapped> taus;
  MatrixView<Packed> q;
  int64_t k;

  template <class Call>
  static HouseholderProductProblem read(Call& call) {
    HouseholderProductProblem p{};
    p.q = call.result("q", p.m, p.n);
    p.a = call.matrix("a", p.m, p.n);
    p.taus = call.vector("taus", p.k);
    call.require(p.k <= p.n && p.n <= p.m, "more reflections than columns, or columns than rows");
    return p;
  }
  Work work() const { return {qr_operations(m, n), 2 * int64_t{m} * n}; }
};

// Q C, or with `adjoint` Q^H C; Q, m x m, is never formed.
struct QrMultiplyProblem : HouseholderProblem {
  static constexpr std::string_view kName = "qr_multiply";

  MatrixView<Mapped> taus;
  MatrixView<Mapped> c;
  MatrixView<Packed> x;
  int64_t k;
  int64_t nrhs;
  bool adjoint;

  template <class Call>
  static QrMultiplyProblem read(Call& call) {
    QrMultiplyProblem p{};
    p.x = call.result("x", p.m, p.nrhs);
    p.a = call.matrix("a", p.m, p.n);
    p.taus = call.vector("taus", p.k);
    p.c = call.matrix("c", p.m, p.nrhs);
    p.adjoint = call.flag("adjoint");
    call.require(p.k <= std::min(p.m, p.n), "more reflections than columns or rows");
    return p;
  }
  Work work() const { return {k * m * (2 * nrhs + k), int64_t{m} * (n + 2 * nrhs)}; }
};

}  // namespace jax_batched
