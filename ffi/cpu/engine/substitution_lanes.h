// Forward substitution on a group of matrices, one per lane: M Y = C, all in scratch.
#pragma once

#include "ffi/cpu/engine/factor_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

// An entry of M, which with kConj is the conjugate of what is stored. Part by part: the compiler
// would take a copy of both through memory.
template <bool kConj, class R>
JAX_BATCHED_INLINE Simd<R> fetch(const Simd<R>& stored) {
  return stored;
}
template <bool kConj, class R>
JAX_BATCHED_INLINE Complex<Simd<R>> fetch(const Complex<Simd<R>>& stored) {
  const Simd<R> re = stored.re, im = stored.im;
  return {re, kConj ? -im : im};
}

// y(i, r) = (c(i, r) - sum_{j<i} m(i, j) y(j, r)) / m(i, i) for kRows rows and kCols right-hand
// sides, which stay in registers.
template <int kRows, int kCols, bool kConj, class P>
JAX_BATCHED_INLINE void substitute_tile(const StridedGroup<P>& m, const StridedGroup<P>& y,
                                        bool unit, int64_t i, int64_t r) {
  P tile[kRows][kCols];
  unrolled<kRows>([&](auto a) JAX_BATCHED_INLINED {
    unrolled<kCols>([&](auto c)
                        JAX_BATCHED_INLINED { tile[a][c] = fetch<false>(y(i + a, r + c)); });
  });
  const P* column = &m(i, 0);
  const P* known = &y(0, r);
  for (int64_t j = 0; j < i; ++j, column += m.col, known += y.row) {
    P row[kCols];
    unrolled<kCols>([&](auto c) JAX_BATCHED_INLINED { row[c] = fetch<false>(known[c * y.col]); });
    unrolled<kRows>([&](auto a) JAX_BATCHED_INLINED {
      const P m_ij = fetch<kConj>(column[a * m.row]);
      unrolled<kCols>([&](auto c)
                          JAX_BATCHED_INLINED { tile[a][c] = sub_mul(tile[a][c], m_ij, row[c]); });
    });
  }
  unrolled<kRows>([&](auto a) JAX_BATCHED_INLINED {
    unrolled<a>([&](auto j) JAX_BATCHED_INLINED {
      const P m_ij = fetch<kConj>(m(i + a, i + j));
      unrolled<kCols>(
          [&](auto c) JAX_BATCHED_INLINED { tile[a][c] = sub_mul(tile[a][c], m_ij, tile[j][c]); });
    });
    if (!unit) {
      const P pivot = fetch<kConj>(m(i + a, i + a));
      unrolled<kCols>([&](auto c) JAX_BATCHED_INLINED { tile[a][c] = divide(tile[a][c], pivot); });
    }
    unrolled<kCols>([&](auto c) JAX_BATCHED_INLINED { y(i + a, r + c) = tile[a][c]; });
  });
}

// Tiles of kRows rows, then of half as many for the rows that are left.
template <int kRows, int kCols, bool kConj, class P>
JAX_BATCHED_INLINE void substitute_columns(const StridedGroup<P>& m, const StridedGroup<P>& y,
                                           int64_t n, bool unit, int64_t i, int64_t r) {
  for (; i + kRows <= n; i += kRows) substitute_tile<kRows, kCols, kConj>(m, y, unit, i, r);
  if constexpr (kRows > 1) substitute_columns<kRows / 2, kCols, kConj>(m, y, n, unit, i, r);
}

template <bool kConj, class P>
void substitute_group(const StridedGroup<P>& m, const StridedGroup<P>& y, int64_t n, int64_t nrhs,
                      bool unit) {
  constexpr int kTall = kIsComplex<P> ? 4 : 8;
  int64_t r = 0;
  for (; r + 2 <= nrhs; r += 2) substitute_columns<kTall / 2, 2, kConj>(m, y, n, unit, 0, r);
  if (r < nrhs) substitute_columns<kTall, 1, kConj>(m, y, n, unit, 0, r);
}

// The system that `s` describes in memory, on the copies of both operands in scratch.
template <class T>
void substitute_group(const LowerSystem& s, const GroupMatrix<T>& a, Lanes<T>* y, int64_t nrhs,
                      bool unit) {
  const auto pitched = [&](int64_t stride) {  // rows are pitch() entries apart instead of n
    return stride == a.n ? a.pitch() : stride == -a.n ? -a.pitch() : stride;
  };
  // With n = 1 both strides are 1 in size, and multiply nothing but 0.
  const int64_t row = pitched(s.a_row), col = pitched(s.a_col);
  const int64_t start = s.a_start == 0 ? 0 : -(a.n - 1) * (row + col);
  const StridedGroup<Lanes<T>> m{a.entries + start, row, col};
  const StridedGroup<Lanes<T>> rhs{y + s.x_start, s.x_row, s.x_col};
  if (kIsComplex<T> && s.conjugate) {
    substitute_group<kIsComplex<T>>(m, rhs, a.n, nrhs, unit);
  } else {
    substitute_group<false>(m, rhs, a.n, nrhs, unit);
  }
}

// C C^H X = B (lower) or C^H C X = B.
template <class T>
void solve_group_with_factor(const GroupMatrix<T>& c, bool lower, Lanes<T>* y, int64_t nrhs) {
  const LowerSystem first = lower_system(c.n, nrhs, true, lower, !lower, !lower);
  const LowerSystem second = lower_system(c.n, nrhs, true, lower, lower, lower);
  substitute_group(first, c, y, nrhs, false);
  substitute_group(second, c, y, nrhs, false);
}

template <class T>
Lanes<T>* right_hand_sides_after(const GroupMatrix<T>& a) {
  return a.entries + a.n * a.pitch();
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
