// Factorizations of Hermitian positive definite matrices.
#pragma once

#include "ffi/common/problem.h"

namespace jax_batched {

struct CholeskyProblem : Problem {
  static constexpr std::string_view kName = "cholesky";
  static constexpr bool kTakesStored = true;
  static constexpr int64_t kMaxN = 512;

  MatrixView<Packed> a;
  MatrixView<Packed> l;
  int32_t* info;  // 0, or the 1-based column of the first pivot that is not > 0
  int n;
  bool upper;       // reads and writes the upper triangle: A = U^H U; else A = L L^H
  bool symmetrize;  // averages both triangles of A; else reads one
  bool fast;        // accuracy="fast"

  template <class Call>
  static CholeskyProblem read(Call& call) {
    CholeskyProblem p{};
    p.l = call.result("l", p.n, p.n);
    p.info = call.info();
    p.a = call.packed(call.square("a", p.n));
    p.upper = call.flag("upper");
    p.symmetrize = call.flag("symmetrize");
    p.fast = call.choice("accuracy", {"ieee", "fast"}) == 1;
    return p;
  }
  Work work() const { return {factor_operations(n), int64_t{n} * n}; }
  void resize(int size) { n = size; }
  template <class F>
  void for_each_array(F&& f) {
    f.matrix(a, n);
    f.result(l, n, n);
    f.integers(info, 1);
  }
};

// The cotangent of A, given that of its Cholesky factor C (A = C C^H, or with `upper` C^H C), of
// which one triangle is read: the transpose of the derivative of cholesky.
struct CholeskyPullbackProblem : MaskedProblem {
  static constexpr std::string_view kName = "cholesky_pullback";
  static constexpr bool kTakesStored = false;
  static constexpr int64_t kMaxN = 512;
  // The kernels compute twice the result. Where that overflows, or a sum on the way to it, they
  // start again from a cotangent multiplied with this.
  static constexpr double kSmallCotangent = 0x1p-32;
  // Beyond, a product and two solves are faster in batches.
  static constexpr int64_t cpu_max_n(DType dtype) { return dtype == DType::kFloat32 ? 96 : 128; }

  MatrixView<Mapped> factor;
  MatrixView<Mapped> cotangent;
  MatrixView<Packed> result;
  int n;
  bool upper;
  bool symmetrize;  // both triangles of A were averaged; else one was read: zeros in the other

  template <class Call>
  static CholeskyPullbackProblem read(Call& call) {
    CholeskyPullbackProblem p{};
    p.result = call.result("result", p.n, p.n);
    p.factor = call.square("factor", p.n);
    p.cotangent = call.square("cotangent", p.n);
    p.upper = call.flag("upper");
    p.symmetrize = call.flag("symmetrize");
    return p;
  }
  Work work() const { return {factor_operations(n), int64_t{n} * n, /*times=*/2}; }
};

}  // namespace jax_batched
