// Partial pivoting: the order in which rows are chosen, and what a pivot does to a row.
//
// No row is exchanged in memory before it is stored. A row knows its place, where the exchanges so
// far would have brought it. Once it was step k's pivot, its place is k, written as ~k.
#pragma once

#include <cstdint>

#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/quotient.cuh"

namespace jax_batched::cuda {

// Sizes in the order of integers; NaN is as small as zero. -1 stands for no candidate.
__device__ __forceinline__ int32_t pivot_key(float size) {
  return __float_as_int(fmaxf(size, 0.0f));
}
__device__ __forceinline__ int64_t pivot_key(double size) {
  return __double_as_longlong(fmax(size, 0.0));
}
template <class T>
using PivotKey = decltype(pivot_key(Real<T>()));

// The largest of a number of each lane, over segments of kLanes lanes.
template <int kLanes, class Int>
__device__ __forceinline__ Int largest_of(Int value, int lane) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (kLanes == 32) {
    return __reduce_max_sync(kFullWarp, value);
  } else if constexpr (kLanes == 16) {  // of each half, where the other one has the least number
    constexpr Int kLeast = Int(-1) < Int(0) ? Int(INT32_MIN) : Int(0);
    const bool is_upper = lane >= 16;
    const Int lower = __reduce_max_sync(kFullWarp, is_upper ? kLeast : value);
    const Int upper = __reduce_max_sync(kFullWarp, is_upper ? value : kLeast);
    return is_upper ? upper : lower;
  } else
#endif
  {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) value = max(value, shuffle_xor(value, mask));
    return value;
  }
}

// The first place of the lanes that tie, negated; out of line, as it is hardly ever needed.
template <int kLanes>
__device__ __noinline__ int first_of_ties(int negated_place, int lane) {
  return largest_of<kLanes>(negated_place, lane);
}

// Which lane of a segment has the pivot: the largest key and, of equal ones, the first place.
// kAlways: some lane has a candidate.
template <int kLanes, bool kAlways>
struct PivotSearch {
  int lane;

  // Whether it is this lane, whose key is the largest then; a negative key says that none is.
  __device__ __forceinline__ bool operator()(int32_t& key, int place) const {
    const int32_t own = key;
    key = largest_of<kLanes>(own, lane);
    const bool is_first = own == key && (kAlways || own >= 0);
    return has_ties(is_first) ? is_first & is_first_of_ties(is_first, place) : is_first;
  }
  // Upper halves first; lower ones only where these tie.
  __device__ __forceinline__ bool operator()(int64_t& key, int place) const {
    const auto own = static_cast<int32_t>(key >> 32);
    const auto low = static_cast<uint32_t>(key);
    const int32_t largest = largest_of<kLanes>(own, lane);
    bool is_first = own == largest && (kAlways || own >= 0);
    uint32_t largest_low = low;
    if (has_ties(is_first)) {
      largest_low = largest_of<kLanes>(is_first ? low : 0, lane);
      const bool ties = is_first && low == largest_low;
      is_first = ties & is_first_of_ties(ties, place);
    }
    key = static_cast<int64_t>(largest) << 32 | largest_low;
    return is_first;
  }

 private:
  __device__ __forceinline__ bool is_first_of_ties(bool ties, int place) const {
    return first_of_ties<kLanes>(ties ? -place : INT32_MIN, lane) == -place;
  }
  __device__ __forceinline__ bool has_ties(bool is_first) const {
    unsigned segment = __ballot_sync(kFullWarp, is_first);
    if constexpr (kLanes == 32) return (segment & (segment - 1)) != 0;
    segment = segment >> lane / kLanes * kLanes & ((1u << (kLanes % 32)) - 1);
    return __any_sync(kFullWarp, (segment & (segment - 1)) != 0);
  }
};

// The best of a thread's rows; key -1: none.
template <class T>
struct Best {
  PivotKey<T> key;
  int place, slot;
  T value;
};
// Of those that were no pivot yet; entry(s) is the one of row s.
template <class T, int kRows, class Entry>
__device__ __forceinline__ Best<T> best_of(const int (&place)[kRows], const Entry& entry) {
  Best<T> best;
#pragma unroll
  for (int s = 0; s < kRows; ++s) {
    const T value = entry(s);
    const PivotKey<T> key = place[s] < 0 ? -1 : pivot_key(magnitude(value));
    // Selects, not branches.
    const bool better = s == 0 || (key > best.key) | ((key == best.key) & (place[s] < best.place));
    best.key = better ? key : best.key;
    best.place = better ? place[s] : best.place;
    best.slot = better ? s : best.slot;
    best.value = better ? value : best.value;
  }
  return best;
}

// A row's place once the one at `chosen` is the pivot of step k, and this row if `is_pivot`.
__device__ __forceinline__ int next_place(int place, bool is_pivot, int chosen, int k) {
  return is_pivot ? ~k : place == k ? chosen : place;
}
// At last: of a pivot's row and of one that never was.
__device__ __forceinline__ int last_place(int place) { return place < 0 ? ~place : place; }
// No row; that of no step.
inline constexpr int kNoPlace = INT32_MIN;

// Whether the factorization failed at this pivot.
template <class T>
__device__ __forceinline__ bool is_bad(T pivot) {
  return is_zero(pivot) || !is_finite(pivot);
}

// Quotients by a pivot, in straight-line code: a branch would cost registers and instructions in
// each of the steps. They are the nearest numbers, save for the last bit in rare cases, and exact
// where a quotient is a number: equal entries give 1. By zero all are zero: below such a pivot
// there is nothing else.
template <class T>
struct PivotDivisor {
  T scaled;      // the pivot times `scale`
  T scale;       // a power of two, by which the reciprocal is a normal number
  T reciprocal;  // of the scaled pivot

  static __device__ __forceinline__ PivotDivisor of(T d) {
    constexpr bool kFloat = sizeof(T) == 4;
    const T size = absolute(d);
    const T scale = size < T(kFloat ? 0x1p-100 : 0x1p-900)  ? T(kFloat ? 0x1p64 : 0x1p512)
                    : size > T(kFloat ? 0x1p126 : 0x1p1022) ? T(kFloat ? 0x1p-64 : 0x1p-512)
                                                            : T(1);
    const T scaled = d * scale;
    // r ~ 1/d; r += r (1 - d r), after an estimate of the same kind in double.
    T r = reciprocal_estimate(scaled);
    if constexpr (sizeof(T) == 8) {
      const T e = multiply_add(-scaled, r, T(1));
      r = multiply_add(r, multiply_add(e, e, e), r);
    }
    r = multiply_add(r, multiply_add(-scaled, r, T(1)), r);
    return {scaled, scale, size == T(0) ? T(0) : r};
  }
  // Of an entry that is not larger: q ~ a r; q += r (a - d q).
  __device__ __forceinline__ T of_smaller(T a) const {
    const T as = a * scale, q = as * reciprocal;
    return multiply_add(multiply_add(-q, scaled, as), reciprocal, q);
  }
  __device__ __forceinline__ T operator()(T a) const {
    const T q = a * scale * reciprocal;
    return is_infinite(q) ? q : of_smaller(a);
  }
};
template <class R>
struct PivotDivisor<Complex<R>> {
  Complex<R> pivot;
  Divisor<Complex<R>> by;

  static __device__ __forceinline__ PivotDivisor of(Complex<R> d) {
    return {d, Divisor<Complex<R>>::of(d)};
  }
  __device__ __forceinline__ Complex<R> of_smaller(Complex<R> a) const {
    return is_zero(pivot) ? a : by(a);
  }
  __device__ __forceinline__ Complex<R> operator()(Complex<R> a) const { return by(a); }
};

// Calls f(row, unit) for the units of all rows, dealt out to `threads`.
template <class F>
__device__ __forceinline__ void for_each_unit(int rows, int units, int thread, int threads,
                                              const F& f) {
  const int row_step = threads / units, unit_step = threads - row_step * units;
  int row = thread / units, unit = thread - row * units;
  while (row < rows) {
    f(row, unit);
    row += row_step;
    unit += unit_step;
    if (unit >= units) {
      unit -= units;
      ++row;
    }
  }
}

// Calls f(unit) with the widest of a vector, a pair or an element of which rows of n are made.
template <class T, class F>
__device__ __forceinline__ void with_unit_of(int n, const F& f) {
  if (n % kVector<T> == 0) {
    f(Vector<T>{});
  } else if (kVector<T> == 4 && n % 2 == 0) {
    f(Pair<T>{});
  } else {
    f(T{});
  }
}

// Starts copies of an m x n matrix to rows `ld` elements apart, on a vector's boundary.
template <class T>
__device__ __forceinline__ void copy_rows(T* to, int ld, const T* from, int m, int n, int thread,
                                          int threads) {
  with_unit_of<T>(n, [&](auto unit) {
    using Unit = decltype(unit);
    constexpr int kLength = sizeof(Unit) / sizeof(T);
    for_each_unit(m, n / kLength, thread, threads, [&](int i, int u) {
      copy_async(reinterpret_cast<Unit*>(to + i * ld) + u,
                 reinterpret_cast<const Unit*>(from + i * n) + u);
    });
  });
}
// And back: row i is row_of(i) there.
template <class T, class RowOf>
__device__ __forceinline__ void store_rows(T* to, const T* from, int ld, int m, int n, int thread,
                                           int threads, const RowOf& row_of) {
  with_unit_of<T>(n, [&](auto unit) {
    using Unit = decltype(unit);
    constexpr int kLength = sizeof(Unit) / sizeof(T);
    for_each_unit(m, n / kLength, thread, threads, [&](int i, int u) {
      reinterpret_cast<Unit*>(to + i * n)[u] =
          reinterpret_cast<const Unit*>(from + row_of(i) * ld)[u];
    });
  });
}

}  // namespace jax_batched::cuda
