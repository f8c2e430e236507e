// X = op(A) op(B) for matrices that differ in size, op being nothing, the transpose or the adjoint:
// the product that the routines of BLAS share.
//
// Matrix i is the leading m_i x n_i part of m x n; what A and B hold beyond m_i, n_i and k_i is not
// read. X is zero beyond its size and outside of the triangle, if only one is wanted. Where a size
// is negative or too large, all of that X is NaN.
#pragma once

#include "ffi/common/problem.h"

namespace jax_batched {

struct GemmProblem : MaskedProblem {
  static constexpr std::string_view kName = "gemm";
  static constexpr bool kTakesStored = false;
  static constexpr int64_t kMaxN = 1 << 16;

  struct Operand {
    MatrixView<Mapped> view;
    bool transposed;
    bool conjugated;
  };
  enum Triangle { kFull, kLower, kUpper };

  // The sizes of one matrix.
  struct Sizes {
    int m, n, k;
    bool valid;
  };

  Operand a;
  Operand b;
  MatrixView<Mapped> sizes;  // m, n, k of each matrix
  MatrixView<Packed> x;
  int m;
  int n;
  int k;
  Triangle triangle;

  template <class Call>
  static GemmProblem read(Call& call) {
    GemmProblem p{};
    p.x = call.result("x", p.m, p.n);
    p.a = operand(call, "a", "trans_a", p.m, p.k);
    p.b = operand(call, "b", "trans_b", p.k, p.n);
    p.sizes = call.integer_vector("sizes", 3);
    p.triangle = static_cast<Triangle>(call.choice("triangle", {"", "lower", "upper"}));
    return p;
  }
  JAX_BATCHED_HD Sizes sizes_of(const int32_t* given) const {
    const auto fits = [](int size, int limit) { return 0 <= size && size <= limit; };
    const bool valid = fits(given[0], m) && fits(given[1], n) && fits(given[2], k);
    return {given[0], given[1], given[2], valid};
  }
  // Whether an entry of X is not wanted, and whether none of a part of X is.
  JAX_BATCHED_HD bool is_outside(int i, int j) const {
    return (triangle == kLower && j > i) || (triangle == kUpper && i > j);
  }
  JAX_BATCHED_HD bool is_outside(int first_row, int end_row, int first_column,
                                 int end_column) const {
    return (triangle == kLower && first_column >= end_row) ||
           (triangle == kUpper && first_row >= end_column);
  }
  // Of matrices of the mean size, if all sizes are as likely.
  Work work() const {
    return {int64_t{m} * n * k / 8, (int64_t{m} * k + int64_t{k} * n) / 4 + int64_t{m} * n};
  }

 private:
  template <class Call>
  static Operand operand(Call& call, const char* name, const char* how, int& rows, int& columns) {
    const int trans = call.choice(how, {"n", "t", "c"});
    const bool transposed = trans != 0;
    return {transposed ? call.matrix(name, columns, rows) : call.matrix(name, rows, columns),
            transposed, trans == 2};
  }
};

}  // namespace jax_batched
