// A matrix in memory as kernels see it, and which part of a Hermitian one is read.
#pragma once

#include "ffi/common/view.h"
#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/storage.cuh"

namespace jax_batched::cuda {

// map(index), in little code: nested broadcasts are rare.
__device__ __forceinline__ int64_t matrix_index(const BatchMap& map, int64_t index) {
  if (map.count == 1) return index * map.stride[0];
  int64_t matrix = 0;
#pragma unroll 1
  for (int d = 0; d < map.count; ++d) {
    const int64_t quotient = index / map.size[d];
    matrix += (index - quotient * map.size[d]) * map.stride[d];
    index = quotient;
  }
  return matrix;
}

// view.at(entry, rows, columns) by it.
template <class T, class Rows, class Columns = int>
__device__ __forceinline__ T* matrix_at(const MatrixView<Mapped>& view, int64_t entry,
                                        const Rows& rows, const Columns& columns = 1) {
  return view.as<T>() + matrix_index(view.layout.map, entry) * rows * columns;
}

// Whether an entry is to be computed.
template <class P>
__device__ __forceinline__ bool is_wanted(const P& problem, int64_t entry) {
  const bool* where = problem.where.template as<const bool>();
  return where == nullptr || where[matrix_index(problem.where.layout.map, entry)];
}

// Whether none of `count` <= 32 entries from `first` is to be computed: then a kernel may leave
// them. All lanes of a warp ask for the same ones.
template <class P>
__device__ __forceinline__ bool skips(const P& problem, int64_t first, int count = 1) {
  if (problem.where.data == nullptr) return false;
  const int lane = threadIdx.x % 32;
  const bool inside = lane < count && first + lane < problem.batch;
  return !__any_sync(kFullWarp, inside && is_wanted(problem, first + lane));
}

// Row-major: entry (i, j) at data[i * ld + j]; offsets are of 32 bits. Where ld is a multiple of a
// vector's length, data is on such a boundary. Of matrices one after the other ld is n: square()
// has one number for all three, so that the compiler sees that they are the same.
template <class S>
struct View {
  const S* data;
  int ld;
  int rows, columns;

  static __device__ __forceinline__ View square(const S* data, int n) { return {data, n, n, n}; }

  __device__ __forceinline__ const S* at(int i, int j) const { return data + i * ld + j; }
};

// What is factored is a lower triangle. Its entry (i, j) is entry (i, j) of the matrix, with
// `upper` entry (j, i), with `mean` the mean of both.
//
// An upper factorization A = U^H U is the lower one of conj(A), transposed: with M = U^T,
// M M^H = conj(A). Entry (i, j) of conj(A) below the diagonal is entry (j, i) of A, so `upper` only
// swaps indices on the way in and out, and nothing is conjugated but a mean.
struct Part {
  bool upper;
  bool mean;
  bool checked = false;  // no sum overflows: a mean takes two instructions, not six

  // The mean of entries (i, j) and (j, i) of the matrix, whose elements are stored as S.
  template <class S, class T>
  __device__ __forceinline__ T mean_of(T below, T above) const {
    const bool swapped = kIsComplex<T> && upper;
    if (checked) return scale(swapped ? above + conj(below) : below + conj(above), Real<T>(0.5));
    return swapped ? stored_mean<S>(above, below) : stored_mean<S>(below, above);
  }
};

// Calls f(entry), entry(i, j) being that of the triangle: one branch, then code for each case.
template <class S, class F>
__device__ __forceinline__ void with_entries(const View<S>& a, Part part, F&& f) {
  const auto below = [=](int i, int j) { return widen(*a.at(i, j)); };
  const auto above = [=](int i, int j) { return widen(*a.at(j, i)); };
  if (part.mean) {
    f([=](int i, int j) { return part.mean_of<S>(below(i, j), above(i, j)); });
  } else if (part.upper) {
    f(above);
  } else {
    f(below);
  }
}

}  // namespace jax_batched::cuda
