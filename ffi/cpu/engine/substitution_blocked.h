// Forward substitution M Y = C on one matrix, M seen through strides. Every kernel here and in
// substitution_lanes.h takes the terms of y_i = (c_i - sum_{j<i} m_ij y_j) / m_ii in the order of
// j, so they all give the same bits.
#pragma once

#include "ffi/cpu/engine/factor_blocked.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

// M(i, j) at re[i * row + j * col], strides in numbers; the imaginary part lies `im` numbers
// behind: 1 in a matrix in memory, a row's width in scratch.
template <class T>
struct StridedLower {
  using R = Real<T>;
  const R* re;
  int64_t row, col, im;
  bool conjugate;

  JAX_BATCHED_INLINE T operator()(int64_t i, int64_t j) const {
    const R* entry = re + i * row + j * col;
    if constexpr (kIsComplex<T>) {
      return T(entry[0], conjugate ? -entry[im] : entry[im]);
    } else {
      return *entry;
    }
  }
};

template <class T>
StridedLower<T> in_memory(const LowerSystem& s, const T* a) {
  constexpr int64_t parts = kParts<T>;
  return {reinterpret_cast<const Real<T>*>(a + s.a_start), s.a_row * parts, s.a_col * parts, 1,
          s.conjugate};
}

// U^H (forward) or U, with its rows and columns reversed, of a factor in scratch.
template <class T>
StridedLower<T> in_scratch(const SplitRows<T>& u, int64_t n, bool forward) {
  const int64_t pitch = u.pitch();
  if (forward) return {u.numbers, 1, pitch, u.width, true};
  return {u.numbers + (n - 1) * (pitch + 1), -pitch, -1, u.width, false};
}

// Several right-hand sides: lanes along a row of Y. A tile of rows stays in registers while row j
// passes by: tile(r) -= m(i + r, j) y(j).
template <int kRows, int kVectors, class T>
JAX_BATCHED_INLINE void substitute_rows(const StridedLower<T>& m, const SplitRows<T>& y, bool unit,
                                        int64_t i, int64_t column) {
  constexpr int size = kLanes<T>;
  Lanes<T> tile[kRows][kVectors];
  unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
    unrolled<kVectors>(
        [&](auto v) JAX_BATCHED_INLINED { tile[r][v] = y.load(y.row(i + r), column + v * size); });
  });
  const int64_t pitch = y.pitch();
  const Real<T>* row = y.numbers + column;
  for (int64_t j = 0; j < i; ++j, row += pitch) {
    Lanes<T> known[kVectors];
    unrolled<kVectors>([&](auto v) JAX_BATCHED_INLINED { known[v] = y.load(row, v * size); });
    unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
      const Lanes<T> m_ij = broadcast(m(i + r, j));
      unrolled<kVectors>(
          [&](auto v) JAX_BATCHED_INLINED { tile[r][v] = sub_mul(tile[r][v], m_ij, known[v]); });
    });
  }
  unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
    unrolled<r>([&](auto j) JAX_BATCHED_INLINED {
      const Lanes<T> m_ij = broadcast(m(i + r, i + j));
      unrolled<kVectors>(
          [&](auto v) JAX_BATCHED_INLINED { tile[r][v] = sub_mul(tile[r][v], m_ij, tile[j][v]); });
    });
    const Lanes<T> pivot = broadcast(unit ? T(1) : m(i + r, i + r));
    unrolled<kVectors>([&](auto v) JAX_BATCHED_INLINED {
      if (!unit) tile[r][v] = divide(tile[r][v], pivot);
      y.store(y.row(i + r), column + v * size, tile[r][v]);
    });
  });
}

template <int kVectors, class T>
void substitute_columns(const StridedLower<T>& m, const SplitRows<T>& y, int64_t n, bool unit,
                        int64_t column) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) substitute_rows<4, kVectors>(m, y, unit, i, column);
  for (; i < n; ++i) substitute_rows<1, kVectors>(m, y, unit, i, column);
}

template <class T>
void substitute_many(const StridedLower<T>& m, const SplitRows<T>& y, int64_t n, bool unit) {
  constexpr int kVectors = kTileVectors<T>;
  int64_t column = 0;
  for (; column + kVectors * kLanes<T> <= y.width; column += kVectors * kLanes<T>) {
    substitute_columns<kVectors>(m, y, n, unit, column);
  }
  for (; column < y.width; column += kLanes<T>) substitute_columns<1>(m, y, n, unit, column);
}

// Indices of a shuffle: the even or odd lanes of two registers, and the lanes of one from the last.
template <int kFirst>
struct EveryOther {
  static constexpr int of(int lane) { return 2 * lane + kFirst; }
};
template <int kSize>
struct Backwards {
  static constexpr int of(int lane) { return kSize - 1 - lane; }
};

// How the entries of M lie, in the kernels for one right-hand side: kAlongRow, neighbours share a
// row, else a column; kReversed, the next one lies before; kSplit, the parts of complex ones are
// apart.

// kLanes entries of one row or column of M, in the order of memory.
template <bool kSplit, class T>
JAX_BATCHED_INLINE Lanes<T> load_neighbours(const StridedLower<T>& m, const Real<T>* at) {
  using R = Real<T>;
  if constexpr (!kIsComplex<T>) {
    return Simd<R>::load(at);
  } else {
    Complex<Simd<R>> entries;
    if constexpr (kSplit) {
      entries = {Simd<R>::load(at), Simd<R>::load(at + m.im)};
    } else {
      constexpr int size = Simd<R>::kSize;
      const Simd<R> low = Simd<R>::load(at), high = Simd<R>::load(at + size);
      using Lane = std::make_index_sequence<size>;
      entries = {shuffle<R, EveryOther<0>>(low, high, Lane{}),
                 shuffle<R, EveryOther<1>>(low, high, Lane{})};
    }
    if (m.conjugate) entries.im = -entries.im;
    return entries;
  }
}

template <class R>
JAX_BATCHED_INLINE Simd<R> reversed(Simd<R> a) {
  return shuffle<R, Backwards<Simd<R>::kSize>>(a, a, std::make_index_sequence<Simd<R>::kSize>{});
}
template <class R>
JAX_BATCHED_INLINE Complex<Simd<R>> reversed(Complex<Simd<R>> a) {
  return {reversed(a.re), reversed(a.im)};
}

template <class R>
JAX_BATCHED_INLINE void transpose_entries(Simd<R>* entries) {
  Square<R> square;
  unrolled<Simd<R>::kSize>([&](auto l) JAX_BATCHED_INLINED { square.row[l] = entries[l].v; });
  square.transpose();
  unrolled<Simd<R>::kSize>([&](auto l) JAX_BATCHED_INLINED { entries[l].v = square.row[l]; });
}
template <class R>
JAX_BATCHED_INLINE void transpose_entries(Complex<Simd<R>>* entries) {
  constexpr int size = Simd<R>::kSize;
  Square<R> re, im;
  unrolled<size>([&](auto l) JAX_BATCHED_INLINED {
    re.row[l] = entries[l].re.v, im.row[l] = entries[l].im.v;
  });
  re.transpose();
  im.transpose();
  unrolled<size>(
      [&](auto l) JAX_BATCHED_INLINED { entries[l] = {Simd<R>(re.row[l]), Simd<R>(im.row[l])}; });
}

// One right-hand side: lanes along the rows i, ..., i + kLanes - 1 of Y, and square by square
// y -= m(., j) y_j. Where the rows of M lie in memory, the square is transposed in registers.
template <bool kAlongRow, bool kReversed, bool kSplit, class T>
JAX_BATCHED_INLINE void subtract_square(const StridedLower<T>& m, int64_t i, int64_t j,
                                        const SplitRows<T>& y, Lanes<T>& sum) {
  constexpr int size = kLanes<T>;
  constexpr int kLast = size - 1;
  const Real<T>* at = m.re + i * m.row + j * m.col;
  const Real<T>* values = y.numbers + j;
  Lanes<T> square[size];
  unrolled<size>([&](auto l) JAX_BATCHED_INLINED {
    const Real<T>* line = at + l * (kAlongRow ? m.row : m.col);
    if (kReversed) line += kLast * (kAlongRow ? m.col : m.row);
    square[l] = load_neighbours<kSplit>(m, line);
  });
  if constexpr (kAlongRow) transpose_entries(square);
  unrolled<size>([&](auto c) JAX_BATCHED_INLINED {
    constexpr int column = kAlongRow && kReversed ? kLast - c : c;
    sum = sub_mul(sum, square[column], broadcast(y.get(values, c)));
  });
}

// The rows i, ..., i + kLanes - 1 against themselves, one by one.
template <class T>
void substitute_triangle(const StridedLower<T>& m, int64_t i, int64_t end, bool unit,
                         const SplitRows<T>& y) {
  for (int64_t j = i; j < end; ++j) {
    T y_j = y.get(y.numbers, j);
    if (!unit) y_j = divide(y_j, m(j, j));
    y.set(y.numbers, j, y_j);
    for (int64_t r = j + 1; r < end; ++r) {
      y.set(y.numbers, r, sub_mul(y.get(y.numbers, r), m(r, j), y_j));
    }
  }
}

// Rows i, ... of Y, kVectors registers of them, less the columns begin <= j < end of M times y_j.
template <int kVectors, bool kAlongRow, bool kReversed, bool kSplit, class T>
JAX_BATCHED_CALLED void subtract_columns(const StridedLower<T>& m, int64_t i, int64_t begin,
                                         int64_t end, const SplitRows<T>& y) {
  constexpr int size = kLanes<T>;
  constexpr bool kBackwards = !kAlongRow && kReversed;  // of the lanes
  Lanes<T> rows[kVectors];
  unrolled<kVectors>([&](auto v) JAX_BATCHED_INLINED {
    rows[v] = y.load(y.numbers, i + v * size);
    if constexpr (kBackwards) rows[v] = reversed(rows[v]);
  });
  for (int64_t j = begin; j < end; j += size) {
    unrolled<kVectors>([&](auto v) JAX_BATCHED_INLINED {
      subtract_square<kAlongRow, kReversed, kSplit>(m, i + v * size, j, y, rows[v]);
    });
  }
  unrolled<kVectors>([&](auto v) JAX_BATCHED_INLINED {
    if constexpr (kBackwards) rows[v] = reversed(rows[v]);
    y.store(y.numbers, i + v * size, rows[v]);
  });
}

template <bool kAlongRow, bool kReversed, bool kSplit, class T>
void substitute_one(const StridedLower<T>& m, int64_t n, bool unit, const SplitRows<T>& y) {
  constexpr int size = kLanes<T>;
  int64_t i = 0;
  for (; i + 2 * size <= n; i += 2 * size) {  // two at a time: two chains of FMAs, a cache line
    subtract_columns<2, kAlongRow, kReversed, kSplit>(m, i, 0, i, y);
    substitute_triangle(m, i, i + size, unit, y);
    subtract_columns<1, kAlongRow, kReversed, kSplit>(m, i + size, i, i + size, y);
    substitute_triangle(m, i + size, i + 2 * size, unit, y);
  }
  for (; i + size <= n; i += size) {
    subtract_columns<1, kAlongRow, kReversed, kSplit>(m, i, 0, i, y);
    substitute_triangle(m, i, i + size, unit, y);
  }
  for (int64_t j = 0; j < i; ++j) {
    const T y_j = y.get(y.numbers, j);
    for (int64_t r = i; r < n; ++r) {
      y.set(y.numbers, r, sub_mul(y.get(y.numbers, r), m(r, j), y_j));
    }
  }
  substitute_triangle(m, i, n, unit, y);
}

template <bool kAlongRow, bool kReversed, class T>
void substitute_one(const StridedLower<T>& m, int64_t n, bool unit, const SplitRows<T>& y) {
  if (kIsComplex<T> && m.im == 1) {
    substitute_one<kAlongRow, kReversed, !kIsComplex<T>>(m, n, unit, y);
  } else {
    substitute_one<kAlongRow, kReversed, true>(m, n, unit, y);
  }
}

// Rows of Y: one if there is one right-hand side, which then lies along it.
template <class T>
SplitRows<T> right_hand_sides_in(void* scratch, int64_t n, int64_t nrhs) {
  return {static_cast<Real<T>*>(scratch), round_up(nrhs == 1 ? n : nrhs, kLanes<T>)};
}

template <class T>
void substitute(const StridedLower<T>& m, int64_t n, int64_t nrhs, bool unit,
                const SplitRows<T>& y) {
  const int64_t step = kIsComplex<T> && m.im == 1 ? 2 : 1;  // between neighbours
  if (nrhs > 1) {
    substitute_many(m, y, n, unit);
  } else if (m.col == step) {
    substitute_one<true, false>(m, n, unit, y);
  } else if (m.col == -step) {
    substitute_one<true, true>(m, n, unit, y);
  } else if (m.row == step) {
    substitute_one<false, false>(m, n, unit, y);
  } else {
    substitute_one<false, true>(m, n, unit, y);
  }
}

// Between the right-hand sides in memory and Y; padding columns are zero.
template <class T>
void pack(const LowerSystem& s, int64_t n, int64_t nrhs, const T* b, const SplitRows<T>& y) {
  for (int64_t i = 0; i < n; ++i) {
    const T* row = b + s.x_start + i * s.x_row;
    if (nrhs == 1) {
      y.set(y.numbers, i, *row);
      continue;
    }
    for (int64_t r = 0; r < nrhs; ++r) y.set(y.row(i), r, row[r * s.x_col]);
    for (int64_t r = nrhs; r < y.width; ++r) y.set(y.row(i), r, T(0));
  }
}
template <class T>
void unpack(const LowerSystem& s, int64_t n, int64_t nrhs, const SplitRows<T>& y, T* x) {
  for (int64_t i = 0; i < n; ++i) {
    T* row = x + s.x_start + i * s.x_row;
    if (nrhs == 1) {
      *row = y.get(y.numbers, i);
      continue;
    }
    for (int64_t r = 0; r < nrhs; ++r) row[r * s.x_col] = y.get(y.row(i), r);
  }
}

// The second of two substitutions runs in the opposite direction: turns Y around.
template <class T>
void reverse(int64_t n, int64_t nrhs, const SplitRows<T>& y) {
  using R = Real<T>;
  if (nrhs == 1) {
    for (int part = 0; part < kParts<T>; ++part) {
      std::reverse(y.numbers + part * y.width, y.numbers + part * y.width + n);
    }
  } else {
    for (int64_t i = 0, k = n - 1; i < k; ++i, --k) {
      R* row = y.row(i);
      std::swap_ranges(row, row + y.width * kParts<T>, y.row(k));
    }
  }
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
