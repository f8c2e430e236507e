// Solves with a triangle: one sweep of substitution, or with a Cholesky factor two.
#pragma once

#include "ffi/common/problem.h"

namespace jax_batched {

// Every triangular solve is M Y = C with M lower triangular, seen through strides:
//   M(i, j) = a[a_start + i * a_row + j * a_col]   (conjugated if `conjugate`), j <= i
//   Y(i, r) = x[x_start + i * x_row + r * x_col],  C likewise in b.
// An upper triangle is a lower one with both indices reversed (negative strides); a transpose swaps
// a's strides; X op(A) = B is op(A)^T X^T = B^T, which swaps the strides of both. Strides are in
// elements.
struct LowerSystem {
  int64_t a_start, a_row, a_col;
  int64_t x_start, x_row, x_col;
  bool conjugate;
};

inline LowerSystem lower_system(int64_t n, int64_t nrhs, bool left_side, bool lower, bool transpose,
                                bool conjugate) {
  LowerSystem s{0, n, 1, 0, nrhs, 1, conjugate};
  if (!left_side) {
    s.x_row = 1;
    s.x_col = n;
  }
  const bool swapped = transpose == left_side;  // left: op is A^T; right: op(A)^T is A^T if no op
  if (swapped) {
    s.a_row = 1;
    s.a_col = n;
  }
  if (lower == swapped) {
    s.a_start = (n - 1) * (s.a_row + s.a_col);
    s.a_row = -s.a_row;
    s.a_col = -s.a_col;
    s.x_start = (n - 1) * s.x_row;
    s.x_row = -s.x_row;
  }
  return s;
}

// M Y = C; of two sweeps M^H X = Y then.
struct SubstitutionProblem : Problem {
  static constexpr bool kTakesStored = false;
  static constexpr int64_t kMaxN = 512;

  MatrixView<Mapped> a;
  MatrixView<Mapped> b;
  MatrixView<Packed> x;
  int64_t nrhs;
  int n;
  bool unit_diagonal;
  bool lower;       // which triangle of A is read
  bool left_side;   // else X op(A) = B
  bool transposed;  // op is the transpose, or the adjoint
  LowerSystem first;
  LowerSystem second;  // of two sweeps
};

// op(A) X = B, or with left_side=False X op(A) = B; X and B are (n, nrhs) or (nrhs, n).
struct TriangularSolveProblem : SubstitutionProblem {
  static constexpr std::string_view kName = "triangular_solve";
  static constexpr int kSweeps = 1;

  template <class Call>
  static TriangularSolveProblem read(Call& call) {
    TriangularSolveProblem p{};
    p.left_side = call.flag("left_side");
    p.x = p.left_side ? call.result("x", p.n, p.nrhs) : call.result("x", p.nrhs, p.n);
    p.a = call.square("a", p.n);
    p.b = p.left_side ? call.matrix("b", p.n, p.nrhs) : call.matrix("b", p.nrhs, p.n);
    p.unit_diagonal = call.flag("unit_diagonal");
    p.lower = call.flag("lower");
    p.transposed = call.flag("transpose_a");
    p.first.conjugate = call.flag("conjugate_a");
    p.resize(p.n);
    return p;
  }
  Work work() const { return {2 * int64_t{n} * n * nrhs, (n + nrhs) * n}; }
  void resize(int size) {
    n = size;
    first = lower_system(n, nrhs, left_side, lower, transposed, first.conjugate);
  }
  template <class F>
  void for_each_array(F&& f) {
    f.matrix(a, n);
    if (left_side) {
      f.operand(b, n, nrhs);
      f.result(x, n, nrhs);
    } else {
      f.operand(b, nrhs, n);
      f.result(x, nrhs, n);
    }
  }
};

// A X = B given the factor C of A = C C^H (lower) or C^H C: with M = C or C^H, lower triangular in
// either case, M Y = B and M^H X = Y.
struct ChoSolveProblem : SubstitutionProblem {
  static constexpr std::string_view kName = "cho_solve";
  static constexpr int kSweeps = 2;

  template <class Call>
  static ChoSolveProblem read(Call& call) {
    ChoSolveProblem p{};
    p.x = call.result("x", p.n, p.nrhs);
    p.a = call.square("c", p.n);
    p.b = call.matrix("b", p.n, p.nrhs);
    p.lower = call.flag("lower");
    p.left_side = true;
    p.resize(p.n);
    return p;
  }
  Work work() const { return {2 * int64_t{n} * n * (2 * nrhs), (n + 2 * nrhs) * n}; }
  void resize(int size) {
    n = size;
    const bool adjoint = !lower;
    first = lower_system(n, nrhs, left_side, lower, adjoint, adjoint);
    second = lower_system(n, nrhs, left_side, lower, !adjoint, !adjoint);
  }
  template <class F>
  void for_each_array(F&& f) {
    f.matrix(a, n);
    f.operand(b, n, nrhs);
    f.result(x, n, nrhs);
  }
};

}  // namespace jax_batched
