// One matrix at a time, spread over the lanes along its rows: what the kernels for larger matrices
// and for many right-hand sides share.
//
// Complex numbers are split here too: a row holds its real parts, then its imaginary ones.
#pragma once

#include <algorithm>

#include "ffi/cpu/engine/kernels.h"
#include "ffi/cpu/engine/lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Rows of a tile that stays in registers, and its columns in vectors.
inline constexpr int kTileRows = kVectorRegisters == 32 ? 8 : 4;
template <class T>
inline constexpr int kTileVectors = kIsComplex<T> ? 1 : 3;

// Rows in scratch, `width` entries long: whole vectors.
template <class T>
struct SplitRows {
  using R = Real<T>;
  R* numbers;
  int64_t width;

  // Not a multiple of 1 KiB, so that the entries of a column spread over the sets of the cache.
  int64_t pitch() const {
    const int64_t row = width * kParts<T>;
    return row * sizeof(R) % 1024 == 0 ? row + 64 / sizeof(R) : row;
  }
  JAX_BATCHED_INLINE R* row(int64_t i) const { return numbers + i * pitch(); }
  JAX_BATCHED_INLINE T get(const R* row, int64_t j) const {
    if constexpr (kIsComplex<T>) {
      return T(row[j], row[width + j]);
    } else {
      return row[j];
    }
  }
  JAX_BATCHED_INLINE void set(R* row, int64_t j, T value) const {
    if constexpr (kIsComplex<T>) {
      row[j] = value.re;
      row[width + j] = value.im;
    } else {
      row[j] = value;
    }
  }
  // Entries j, ..., j + kLanes - 1 of a row.
  JAX_BATCHED_INLINE Lanes<T> load(const R* row, int64_t j) const {
    if constexpr (kIsComplex<T>) {
      return {Simd<R>::load(row + j), Simd<R>::load(row + width + j)};
    } else {
      return Simd<R>::load(row + j);
    }
  }
  JAX_BATCHED_INLINE void store(R* row, int64_t j, Lanes<T> value) const {
    if constexpr (kIsComplex<T>) {
      value.re.store(row + j);
      value.im.store(row + width + j);
    } else {
      value.store(row + j);
    }
  }
};

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
