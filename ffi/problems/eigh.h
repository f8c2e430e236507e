// Eigenvalues and eigenvectors of Hermitian matrices, A V = V diag(w).
//
// w ascends; column j of V, of norm 1, belongs to w_j. info is 0, or the number of off-diagonal
// elements that did not become negligible. A matrix with NaN or inf in what is read of it has NaN
// in all results, and info = n.
#pragma once

#include "ffi/common/problem.h"

namespace jax_batched {

struct EighProblem : MaskedProblem {
  static constexpr std::string_view kName = "eigh";
  static constexpr bool kTakesStored = false;
  static constexpr int64_t kMaxN = 64;

  MatrixView<Mapped> a;
  MatrixView<Packed> v;  // n x n, if `vectors`
  MatrixView<Packed> w;  // n real numbers
  int32_t* info;
  MatrixView<Packed> workspace;  // n real numbers, of values alone
  int n;
  bool vectors;
  bool upper;       // reads the upper triangle of A; else the lower one
  bool symmetrize;  // averages both triangles of A; else reads one

  template <class Call>
  static EighProblem read(Call& call) {
    EighProblem p{};
    p.vectors = call.flag("vectors");
    p.upper = !call.flag("lower");
    p.symmetrize = call.flag("symmetrize");
    if (p.vectors) p.v = call.result("v", p.n, p.n);
    p.w = call.real_vector_result("w", p.n);
    p.info = call.info();
    if (!p.vectors) p.workspace = call.real_vector_result("workspace", p.n);
    p.a = call.square("a", p.n);
    return p;
  }
  // Tridiagonalisation 4/3 n^3; with vectors Q of it 4/3 n^3, and two sweeps of rotations of all
  // rows per eigenvalue.
  Work work() const {
    const int64_t cubes = int64_t{n} * n * n;
    return {vectors ? 6 * cubes + 60 * int64_t{n} * n : cubes + 60 * int64_t{n} * n,
            (vectors ? 2 : 1) * int64_t{n} * n};
  }
  void resize(int size) { n = size; }
  template <class F>
  void for_each_array(F&& f) {
    f.matrix(a, n);
    if (vectors) f.result(v, n, n);
    f.real_result(w, n);
    f.integers(info, 1);
    if (!vectors) f.real_result(workspace, n);
  }
};

}  // namespace jax_batched
