// One struct per operation: everything a kernel launcher needs, on either platform.
//
// Matrices are row-major and contiguous, one after the other. All counts and offsets are 64-bit.
#pragma once

#include <cstdint>
#include <string_view>

#include "ffi/common/scalar.h"

namespace jax_batched {

// The last two are storage formats, of matrices that are computed in float32.
enum class DType { kFloat32, kFloat64, kComplex64, kComplex128, kFloat16, kBFloat16 };

constexpr bool is_storage_only(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

template <class S>
inline constexpr DType kDTypeOf = DType::kFloat32;
template <>
inline constexpr DType kDTypeOf<double> = DType::kFloat64;
template <>
inline constexpr DType kDTypeOf<Complex<float>> = DType::kComplex64;
template <>
inline constexpr DType kDTypeOf<Complex<double>> = DType::kComplex128;
template <>
inline constexpr DType kDTypeOf<Float16> = DType::kFloat16;
template <>
inline constexpr DType kDTypeOf<BFloat16> = DType::kBFloat16;

// Calls f(T{}) with the element type of a dtype: the one switch of every operation.
template <class F>
decltype(auto) with_element_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat64:
      return f(double{});
    case DType::kComplex64:
      return f(Complex<float>{});
    default:
      return f(Complex<double>{});
  }
}

// The same with the storage formats, for the operations that have kernels for them.
template <class F>
decltype(auto) with_stored_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(Float16{});
    case DType::kBFloat16:
      return f(BFloat16{});
    default:
      return with_element_type(dtype, f);
  }
}

// Index of the matrix of an operand that serves batch entry `index` of the result.
//
// The batch dimensions of an operand equal those of the result or are 1 (broadcast). Neighbouring
// dimensions of one kind are merged, so `count` is 1 in all but nested broadcasts; dimension 0 is
// the innermost. stride is in matrices; 0 for a broadcast dimension.
struct BatchMap {
  static constexpr int kMaxDims = 8;
  int count = 1;
  int64_t size[kMaxDims] = {1};
  int64_t stride[kMaxDims] = {1};

  JAX_BATCHED_HD int64_t operator()(int64_t index) const {
    if (count == 1) return index * stride[0];
    int64_t matrix = 0;
    for (int d = 0; d < count; ++d) {
      matrix += index % size[d] * stride[d];
      index /= size[d];
    }
    return matrix;
  }
  // True if entry i uses matrix i, so that neighbouring entries are neighbours in memory.
  JAX_BATCHED_HD bool contiguous() const { return count == 1 && stride[0] == 1; }
};

// `kernel` names the kernel to use (a name of the tier table); empty: as the table says.
struct CholeskyProblem {
  DType dtype;
  int64_t batch;
  int64_t n;
  bool upper;       // reads and writes the upper triangle: A = U^H U; else A = L L^H
  bool symmetrize;  // averages both triangles of A; else reads one
  bool fast;        // accuracy="fast"
  std::string_view kernel;
  const void* a;
  void* l;
  int32_t* info;  // 0, or the 1-based column of the first pivot that is not > 0
};

// op(A) X = B (left_side) or X op(A) = B; X and B are (n, nrhs) or (nrhs, n).
struct TriangularSolveProblem {
  DType dtype;
  int64_t batch;
  int64_t n;
  int64_t nrhs;
  bool left_side;
  bool lower;
  bool transpose;
  bool conjugate;
  bool unit_diagonal;
  std::string_view kernel;
  const void* a;
  const void* b;
  void* x;
  BatchMap a_map;
  BatchMap b_map;
};

// A X = B given its factor C: A = C C^H (lower) or C^H C.
struct ChoSolveProblem {
  DType dtype;
  int64_t batch;
  int64_t n;
  int64_t nrhs;
  bool lower;
  std::string_view kernel;
  const void* c;
  const void* b;
  void* x;
  BatchMap c_map;
  BatchMap b_map;
};

// A X = B with A Hermitian positive definite; reads one triangle of A, never writes the factor.
// A matrix that is not positive definite gets X = NaN and its info as in CholeskyProblem.
struct SolvePosProblem {
  DType dtype;
  int64_t batch;
  int64_t n;
  int64_t nrhs;
  bool lower;  // which triangle of A is read
  bool fast;
  std::string_view kernel;
  const void* a;
  const void* b;
  void* x;
  int32_t* info;
  BatchMap a_map;
  BatchMap b_map;
};

// R = B - s A X with A m x n, X n x nrhs and a real factor s for each matrix.
struct ResidualProblem {
  enum class Triangle { kNone, kLower, kUpper };
  DType dtype;
  int64_t batch;
  int64_t m;
  int64_t n;
  int64_t nrhs;
  Triangle triangle;  // A is Hermitian, and this triangle of it is read; kNone: any A
  bool absolute;      // |A| in place of A
  std::string_view kernel;
  const void* a;
  const void* scale;
  const void* x;
  const void* b;
  void* r;
  BatchMap a_map;
  BatchMap scale_map;
  BatchMap x_map;
  BatchMap b_map;
};

// The cotangent of A, given that of its Cholesky factor C (A = C C^H, or with `upper` C^H C), of
// which one triangle is read: the transpose of the derivative of cholesky.
struct CholeskyPullbackProblem {
  DType dtype;
  int64_t batch;
  int64_t n;
  bool upper;
  bool symmetrize;  // both triangles of A were averaged; else one was read: zeros in the other
  std::string_view kernel;
  const void* factor;
  const void* cotangent;
  void* result;
  BatchMap factor_map;
  BatchMap cotangent_map;
};

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

}  // namespace jax_batched
