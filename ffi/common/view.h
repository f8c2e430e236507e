// Where the matrices of a batch lie in memory. All offsets are 64-bit and in elements.
#pragma once

#include <cstdint>

#include "ffi/common/scalar.h"

namespace jax_batched {

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

  JAX_BATCHED_HD constexpr int64_t operator()(int64_t index) const {
    if (count == 1) return index * stride[0];
    int64_t matrix = 0;
    for (int d = 0; d < count; ++d) {
      matrix += index % size[d] * stride[d];
      index /= size[d];
    }
    return matrix;
  }
  // True if entry i uses matrix i, so that neighbouring entries are neighbours in memory.
  JAX_BATCHED_HD constexpr bool contiguous() const { return count == 1 && stride[0] == 1; }
};

// How matrices, which are row-major, follow one another:
//   begin(entry, rows, columns)   where the matrix of a batch entry begins (one column: of a size)
//   contiguous()                  whether entry i is matrix i of whole ones
// What a layout's type says of it costs nothing at run time.

// Whole matrices, one after the other.
struct Packed {
  JAX_BATCHED_HD constexpr bool contiguous() const { return true; }
  template <class Rows, class Columns>
  JAX_BATCHED_HD constexpr int64_t begin(int64_t entry, const Rows& rows,
                                         const Columns& columns) const {
    return entry * rows * columns;
  }
};

// Whole matrices, one after the other, of which an entry uses the one that the map says.
struct Mapped {
  BatchMap map;

  JAX_BATCHED_HD constexpr bool contiguous() const { return map.contiguous(); }
  template <class Rows, class Columns>
  JAX_BATCHED_HD constexpr int64_t begin(int64_t entry, const Rows& rows,
                                         const Columns& columns) const {
    return map(entry) * rows * columns;
  }
};

// The matrices of an operand or a result. A kernel says the sizes, which it often knows as
// constants, and the element type.
template <class Layout>
struct MatrixView {
  void* data;
  Layout layout;

  JAX_BATCHED_HD constexpr bool contiguous() const { return layout.contiguous(); }
  template <class T>
  JAX_BATCHED_HD T* as() const {
    return static_cast<T*>(data);
  }
  template <class T, class Rows, class Columns = int>
  JAX_BATCHED_HD T* at(int64_t entry, const Rows& rows, const Columns& columns = 1) const {
    return static_cast<T*>(data) + layout.begin(entry, rows, columns);
  }
};

}  // namespace jax_batched
