// Matrices side by side: a group of them, one per lane, so that a kernel written for one matrix
// computes a whole register's worth of matrices.
//
// A group lives in scratch as an array of Lanes<T>, entry e holding entry e of every matrix.
// Between that and memory, where each matrix is contiguous, squares of kLanes numbers of kLanes
// matrices are transposed in registers. A complex entry is two numbers, so it arrives split into
// its parts.
//
// A batch that ends inside a group repeats its last matrix in the lanes that are left over. They
// compute the same bits and store them to the same place: no second path, no access out of bounds.
#pragma once

#include <algorithm>

#include "ffi/cpu/engine/kernels.h"
#include "ffi/cpu/engine/simd.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class T>
inline constexpr int kParts = kIsComplex<T> ? 2 : 1;  // numbers of an entry

// One pointer per lane, to the numbers of its matrix, and how far ahead the next group lies if it
// is worth fetching: small matrices are read and written in leaps that no hardware prefetcher
// follows, large ones would push what is at work out of the second cache.
template <class Number>
struct GroupPointers {
  Number* lane[kVectorBytes / sizeof(Number)];
  int64_t ahead;
};
inline constexpr int64_t kMinPrefetchedBytes = 1024;
inline constexpr int64_t kMaxPrefetchedBytes = 192 << 10;

template <class T>
constexpr int64_t prefetch_distance(int64_t size) {
  const int64_t group = size * kParts<T> * kLanes<T>;
  const int64_t bytes = group * static_cast<int64_t>(sizeof(Real<T>));
  return kMinPrefetchedBytes <= bytes && bytes <= kMaxPrefetchedBytes ? group : 0;
}

// Batch entries begin, begin + 1, ... < end of an array of matrices with `size` entries each.
template <class T>
GroupPointers<const Real<T>> group_of(const void* array, const BatchMap& map, int64_t size,
                                      int64_t begin, int64_t end) {
  GroupPointers<const Real<T>> group;
  group.ahead = map.contiguous() ? prefetch_distance<T>(size) : 0;
  if (map.contiguous() && begin + kLanes<T> <= end) {
    const Real<T>* first = static_cast<const Real<T>*>(array) + begin * size * kParts<T>;
    for (int l = 0; l < kLanes<T>; ++l) group.lane[l] = first + l * size * kParts<T>;
    return group;
  }
  for (int l = 0; l < kLanes<T>; ++l) {
    const int64_t matrix = map(std::min(begin + l, end - 1));
    group.lane[l] = static_cast<const Real<T>*>(array) + matrix * size * kParts<T>;
  }
  return group;
}
template <class T>
GroupPointers<const Real<T>> group_of(const MatrixView<Mapped>& view, int64_t size, int64_t begin,
                                      int64_t end) {
  return group_of<T>(view.data, view.layout.map, size, begin, end);
}
template <class T>
GroupPointers<Real<T>> group_of(const MatrixView<Packed>& view, int64_t size, int64_t begin,
                                int64_t end) {
  GroupPointers<Real<T>> group;
  group.ahead = prefetch_distance<T>(size);
  for (int l = 0; l < kLanes<T>; ++l) {
    const int64_t matrix = std::min(begin + l, end - 1);
    group.lane[l] = static_cast<Real<T>*>(view.data) + matrix * size * kParts<T>;
  }
  return group;
}

// Asks the second cache for a line that is read or written later. The first one has room for few
// requests, and then everything else that misses it waits for them.
JAX_BATCHED_INLINE void fetch_line(const void* line) { __builtin_prefetch(line, 0, 2); }
// The lines at begin <= p < end.
JAX_BATCHED_INLINE void fetch_lines(const char* begin, const char* end) {
  for (; begin < end; begin += kLineBytes) fetch_line(begin);
}

// What is fetched little by little while a group is computed, when memory would be idle: the next
// group, and the lines that a small group's result is stored to; those of a large one are no longer
// there when it is. pack_square and unpack_square ask for what lies a group further; with both a
// factorization is faster than with either alone (n = 24, float32: 7.2 instead of 8.9 ms).
class BackgroundFetch {
 public:
  BackgroundFetch() = default;
  // The matrices m, m + 1, ... < end are computed, a group of them now, in about `steps` steps:
  // those of `in`, to those of `out` unless it is null. Both are contiguous.
  template <class T>
  static BackgroundFetch beside_group(const void* in, const void* out, int64_t size, int64_t m,
                                      int64_t end, int64_t steps) {
    BackgroundFetch fetch;
    constexpr int64_t lanes = kLanes<T>;
    const int64_t bytes = size * static_cast<int64_t>(sizeof(T));
    if (lanes * bytes > kMaxReadAheadBytes) return fetch;
    fetch.in_ = Span(in, std::min(m + lanes, end) * bytes, std::min(m + 2 * lanes, end) * bytes);
    if (out != nullptr && lanes * bytes <= kMaxPrefetchedBytes) {
      fetch.out_ = Span(out, m * bytes, std::min(m + lanes, end) * bytes);
    }
    fetch.step_ = (lanes * bytes / steps / kLineBytes + 1) * kLineBytes;
    return fetch;
  }
  JAX_BATCHED_INLINE void step() {
    in_.fetch(step_);
    out_.fetch(step_);
  }

 private:
  static constexpr int64_t kMaxReadAheadBytes = 16384 * kVectorBytes;  // 256 KiB to 1 MiB
  struct Span {
    const char* at = nullptr;
    const char* end = nullptr;
    Span() = default;
    Span(const void* array, int64_t first, int64_t last)
        : at(static_cast<const char*>(array) + first),
          end(static_cast<const char*>(array) + last) {}
    JAX_BATCHED_INLINE void fetch(int64_t bytes) {
      const char* from = at;
      at += std::min(bytes, end - at);
      fetch_lines(from, at);
    }
  };
  Span in_, out_;
  int64_t step_ = 0;
};

// A register's worth of neighbouring numbers of each matrix.
template <class R>
JAX_BATCHED_CALLED void pack_square(const GroupPointers<const R>& from, int64_t at, Simd<R>* to) {
  Square<R> square;
  if (from.ahead != 0) {
    for (const R* lane : from.lane) fetch_line(lane + at + from.ahead);
  }
  square.load_transposed([&](int l) JAX_BATCHED_INLINED { return from.lane[l] + at; });
  unrolled<Simd<R>::kSize>([&](auto l) JAX_BATCHED_INLINED { to[l].v = square.row[l]; });
}
template <class R>
JAX_BATCHED_CALLED void unpack_square(const Simd<R>* from, const GroupPointers<R>& to, int64_t at) {
  Square<R> square;
  unrolled<Simd<R>::kSize>([&](auto l) JAX_BATCHED_INLINED { square.row[l] = from[l].v; });
  square.store_transposed([&](int l) JAX_BATCHED_INLINED { return to.lane[l] + at; });
  if (to.ahead != 0) {
    for (const R* lane : to.lane) fetch_line(lane + at + to.ahead);
  }
}

// Calls f(at) so that the squares at, ..., at + kSize - 1 cover begin <= number < end. All lie
// inside 0 <= number < limit: the last one is moved back if it must be, and repeats some numbers.
template <class R, class F>
JAX_BATCHED_INLINE void for_each_square(int64_t begin, int64_t end, int64_t limit, F f) {
  constexpr int64_t size = Simd<R>::kSize;
  for (int64_t at = begin / size * size; at < end; at += size) f(std::min(at, limit - size));
}

// All `count` numbers of each matrix.
template <class R>
void pack(const GroupPointers<const R>& from, int64_t count, Simd<R>* to) {
  if (count < Simd<R>::kSize) {
    for (int64_t e = 0; e < count; ++e) {
      for (int l = 0; l < Simd<R>::kSize; ++l) to[e].v[l] = from.lane[l][e];
    }
  } else {
    for_each_square<R>(0, count, count, [&](int64_t at) { pack_square(from, at, to + at); });
  }
}
template <class R>
void unpack(const Simd<R>* from, int64_t count, const GroupPointers<R>& to) {
  if (count < Simd<R>::kSize) {
    for (int64_t e = 0; e < count; ++e) {
      for (int l = 0; l < Simd<R>::kSize; ++l) to.lane[l][e] = from[e].v[l];
    }
  } else {
    for_each_square<R>(0, count, count, [&](int64_t at) { unpack_square(from + at, to, at); });
  }
}

// The numbers that the entries of Lanes<T> are made of.
template <class R>
Simd<R>* numbers(Simd<R>* entries) {
  return entries;
}
template <class R>
Simd<R>* numbers(Complex<Simd<R>>* entries) {
  return &entries->re;
}

// A group of n x n matrices in scratch, row-major, rows `pitch` entries apart: where rows fill
// whole registers an odd number, so that the entries of a column spread over the sets of the
// cache; elsewhere they follow one another, and a square may cover the end of one and the
// beginning of the next.
template <class T>
struct GroupMatrix {
  Lanes<T>* entries;
  int64_t n;

  static int64_t pitch(int64_t n) { return n * kParts<T> % kLanes<T> == 0 ? n | 1 : n; }
  int64_t pitch() const { return pitch(n); }
  Simd<Real<T>>* row(int64_t i) const { return numbers(entries + i * pitch()); }
};

enum class Part { kLower, kUpper, kAll };

// First and last number (exclusive) of row i in a part of an n x n matrix.
template <class T>
struct RowRange {
  int64_t begin, end;
  RowRange(Part part, int64_t i, int64_t n)
      : begin(part == Part::kUpper ? i * kParts<T> : 0),
        end((part == Part::kLower ? i + 1 : n) * kParts<T>) {}
};

template <class R>
JAX_BATCHED_INLINE void clear(Simd<R>* numbers, int64_t begin, int64_t end) {
  for (int64_t e = begin; e < end; ++e) numbers[e] = Simd<R>(R(0));
}

// Reads whole squares that touch the part: entries of the other triangle may come along into places
// that nothing reads.
template <class T>
void pack(const GroupPointers<const Real<T>>& from, Part part, const GroupMatrix<T>& to) {
  const int64_t row_numbers = to.n * kParts<T>;
  if (row_numbers < kLanes<T>) {
    pack(from, to.n * row_numbers, to.row(0));
    return;
  }
  for (int64_t i = 0; i < to.n; ++i) {
    const RowRange<T> range(part, i, to.n);
    Simd<Real<T>>* row = to.row(i);
    for_each_square<Real<T>>(range.begin, range.end, row_numbers, [&](int64_t at) {
      pack_square(from, i * row_numbers + at, row + at);
    });
  }
}

// Writes the part, and zeros elsewhere.
template <class T>
void unpack(const GroupMatrix<T>& from, Part part, const GroupPointers<Real<T>>& to) {
  using R = Real<T>;
  constexpr int64_t size = kLanes<T>;
  const int64_t row_numbers = from.n * kParts<T>;
  const int64_t all_numbers = from.n * row_numbers;
  struct Zeros {
    int64_t begin, end;
  };
  const auto zeros_of = [&](int64_t i) {  // those of row i, counted from the matrix's first number
    const RowRange<T> range(part, i, from.n);
    const int64_t row = i * row_numbers;
    return part == Part::kUpper ? Zeros{row, row + range.begin}
                                : Zeros{row + range.end, row + row_numbers};
  };
  const auto unpack_at = [&](const Simd<R>* square, const Zeros& zeros, int64_t at) {
    if (zeros.begin <= at && at + size <= zeros.end) {
      for (int l = 0; l < size; ++l) Simd<R>(R(0)).store(to.lane[l] + at);
    } else {
      unpack_square(square, to, at);
    }
  };
  // Zeros in scratch, where they share a square with anything else: at the ends of a row's range.
  for (int64_t i = 0; i < from.n; ++i) {
    const Zeros zeros = zeros_of(i);
    Simd<R>* first = from.row(i) - i * row_numbers;
    clear(first, zeros.begin, std::min(zeros.begin + size, zeros.end));
    clear(first, std::max(zeros.end - size, zeros.begin), zeros.end);
  }
  if (all_numbers < size) {
    unpack(from.row(0), all_numbers, to);
  } else if (from.pitch() == from.n) {
    int64_t i = 0;
    Zeros zeros = zeros_of(0);
    for_each_square<R>(0, all_numbers, all_numbers, [&](int64_t at) {
      while ((i + 1) * row_numbers <= at) zeros = zeros_of(++i);
      unpack_at(from.row(0) + at, zeros, at);
    });
  } else {
    for (int64_t i = 0; i < from.n; ++i) {
      const Simd<R>* row = from.row(i);
      const Zeros zeros = zeros_of(i);
      for_each_square<R>(0, row_numbers, row_numbers,
                         [&](int64_t at) { unpack_at(row + at, zeros, i * row_numbers + at); });
    }
  }
}

// Entries of a group through strides, a lower triangle or right-hand sides: entry (i, j) at
// at[i * row + j * col].
template <class P>
struct StridedGroup {
  P* at;
  int64_t row, col;
  JAX_BATCHED_INLINE P& operator()(int64_t i, int64_t j) const { return at[i * row + j * col]; }
};

// Calls f with a flag as a compile-time constant.
template <class F>
JAX_BATCHED_INLINE void with_flag(bool flag, F f) {
  flag ? f(std::true_type{}) : f(std::false_type{});
}

// Calls f with n as a compile-time constant, 1 <= n <= kMax.
template <int kMax, class F>
JAX_BATCHED_INLINE void with_constant(int64_t n, F f) {
  if constexpr (kMax > 1) {
    if (n < kMax) return with_constant<kMax - 1>(n, f);
  }
  f(std::integral_constant<int, kMax>{});
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
