// LU factorization with partial pivoting of a group of matrices, one per lane: left-looking by
// blocks of columns.
//
// Each lane exchanges other rows, so none moves: row i of A keeps its place in scratch, and becomes
// row i of the multipliers. What is final is gathered, lane by lane, into F, where the rows are in
// the order of the exchanges. Rows of A that were pivots are updated on with the others; nothing
// reads them again.
#pragma once

#include <array>

#include "ffi/cpu/engine/substitution_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

// Columns of a block; rows of a tile of them, which stays in registers.
template <class T>
inline constexpr int kLuColumns = kIsComplex<T> ? 2 : 4;
template <class T>
inline constexpr int kLuRows =
    kIsComplex<T> ? (kVectorRegisters == 32 ? 4 : 2) : (kVectorRegisters == 32 ? 6 : 3);

template <class T>
struct LuGroup {
  using R = Real<T>;
  using Indices = typename VectorOf<R>::Mask;  // an integer per lane

  int64_t m, n;
  int64_t pitch;    // of F, that of GroupMatrix
  Lanes<T>* a;      // m x n
  Lanes<T>* f;      // m x n
  Indices* row_at;  // the row of A at each place
  Indices* place;   // the place of each row of A
  Indices* pivots;  // of each step the place of the pivot

  static int64_t bytes(int64_t m, int64_t n) {
    const int64_t entries = m * (n + GroupMatrix<T>::pitch(n)), indices = 2 * m + std::min(m, n);
    return entries * sizeof(Lanes<T>) + indices * sizeof(Indices) + alignof(Lanes<T>);
  }
  static LuGroup in(void* scratch, int64_t m, int64_t n) {
    LuGroup g;
    g.m = m;
    g.n = n;
    g.pitch = GroupMatrix<T>::pitch(n);
    g.f = static_cast<Lanes<T>*>(scratch);
    g.a = g.f + m * g.pitch;
    g.row_at = reinterpret_cast<Indices*>(g.a + m * n);
    g.place = g.row_at + m;
    g.pivots = g.place + m;
    return g;
  }
  // Behind all of it, where more entries may lie.
  Lanes<T>* end() const {
    const auto behind = reinterpret_cast<uintptr_t>(pivots + std::min(m, n));
    constexpr uintptr_t kAlignment = alignof(Lanes<T>);
    return reinterpret_cast<Lanes<T>*>((behind + kAlignment - 1) / kAlignment * kAlignment);
  }

  // Entry (row[l], j) of A in lane l.
  template <class Rows>
  JAX_BATCHED_INLINE Lanes<T> gather(const Rows& row, int64_t j) const {
    constexpr int64_t size = kParts<T> * kLanes<T>;  // numbers of an entry
    const R* first = reinterpret_cast<const R*>(a + j);
    const auto part = [&](int64_t of) JAX_BATCHED_INLINED {
      Simd<R> values;
      for (int l = 0; l < kLanes<T>; ++l) {
        values.v[l] = first[row[l] * n * size + of * kLanes<T> + l];
      }
      return values;
    };
    if constexpr (kIsComplex<T>) {
      return {part(0), part(1)};
    } else {
      return part(0);
    }
  }
};

// |re| + |im|, by which a pivot is chosen.
template <class R>
JAX_BATCHED_INLINE Simd<R> magnitude(Simd<R> a) {
  return absolute(a);
}
template <class R>
JAX_BATCHED_INLINE Simd<R> magnitude(Complex<Simd<R>> a) {
  return absolute(a.re) + absolute(a.im);
}

// info of each lane after one more pivot, that of the 1-based column `column`.
template <class P, class R>
JAX_BATCHED_INLINE Simd<R> first_bad_pivot(Simd<R> info, P pivot, int64_t column) {
  const auto bad = is_zero(pivot) | ~is_finite(pivot);
  return select(bad & is_zero(info), Simd<R>(R(column)), info);
}

// a / pivot; zeros below a pivot that is zero.
template <class P>
JAX_BATCHED_INLINE P multiplier(P a, P pivot) {
  return select(is_zero(pivot), a, divide(a, pivot));
}

// The largest entry of a column so far, and its place.
template <class R>
struct Largest {
  using Indices = typename VectorOf<R>::Mask;
  Simd<R> value = Simd<R>(R(-1));
  Indices place;

  // Places before `step` are those of former pivots. Nothing is larger than NaN, or less.
  explicit Largest(int64_t step)
      : place(Indices{} + static_cast<typename VectorOf<R>::Bits>(step)) {}
  JAX_BATCHED_INLINE void take(Simd<R> candidate, Indices at, Indices step) {
    const Indices better =
        (at >= step) & ((candidate.v > value.v) | ((candidate.v == value.v) & (at < place)));
    value = select(better, candidate, value);
    place = (better & at) | (~better & place);
  }
};

// a(i + r, j + c) -= sum_{t<j} a(i + r, t) f(t, j + c) for kRows rows and kCols columns.
template <int kRows, int kCols, class T>
JAX_BATCHED_INLINE void update_rows(const LuGroup<T>& g, int64_t i, int64_t j) {
  using P = Lanes<T>;
  P tile[kRows][kCols];
  P* rows = g.a + i * g.n;
  unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
    unrolled<kCols>([&](auto c) JAX_BATCHED_INLINED { tile[r][c] = rows[r * g.n + j + c]; });
  });
  const P* top = g.f + j;
  for (int64_t t = 0; t < j; ++t, top += g.pitch) {
    P u[kCols];
    unrolled<kCols>([&](auto c) JAX_BATCHED_INLINED { u[c] = top[c]; });
    unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
      const P l = rows[r * g.n + t];
      unrolled<kCols>([&](auto c)
                          JAX_BATCHED_INLINED { tile[r][c] = sub_mul(tile[r][c], l, u[c]); });
    });
  }
  unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
    unrolled<kCols>([&](auto c) JAX_BATCHED_INLINED { rows[r * g.n + j + c] = tile[r][c]; });
  });
}

// The rows of A that are pivots of one step, a number for each lane.
template <class T>
using PivotRows = std::array<int64_t, kLanes<T>>;

// Exchanges the rows at two places, of each lane its own second one, in row_at.
template <class T>
JAX_BATCHED_INLINE PivotRows<T> exchange(const LuGroup<T>& g, int64_t step,
                                         const typename LuGroup<T>::Indices& place) {
  PivotRows<T> rows;
  g.pivots[step] = place;
  for (int l = 0; l < kLanes<T>; ++l) {
    const int64_t other = place[l];
    rows[l] = g.row_at[other][l];
    g.row_at[other][l] = g.row_at[step][l];
    g.row_at[step][l] = rows[l];
  }
  return rows;
}

// Finds the pivots of columns j, ..., j + count - 1, eliminates with each in those after it up to
// column j + kCols - 1, and returns info. One pass over the rows eliminates with a pivot, carries
// the exchange out in `place` and looks for the next pivot.
template <int kCols, class T>
JAX_BATCHED_CALLED Simd<Real<T>> eliminate(const LuGroup<T>& g, int64_t j, int64_t count,
                                           Simd<Real<T>> info) {
  using R = Real<T>;
  using P = Lanes<T>;
  using Indices = typename LuGroup<T>::Indices;
  const auto all = [](int64_t i) JAX_BATCHED_INLINED {
    return Indices{} + static_cast<typename VectorOf<R>::Bits>(i);
  };
  Largest<R> largest(j);
  for (int64_t i = 0; i < g.m; ++i) {
    largest.take(magnitude(g.a[i * g.n + j]), g.place[i], all(j));
  }
  unrolled<kCols>([&](auto c) JAX_BATCHED_INLINED {
    if (c >= count) return;
    constexpr int kRight = kCols - 1 - c;
    const int64_t step = j + c;
    const Indices here = all(step), there = largest.place;
    const PivotRows<T> rows = exchange(g, step, there);
    P* f = g.f + step * g.pitch;
    for (int64_t k = 0; k < j + kCols; ++k) f[k] = g.gather(rows, k);
    const P pivot = f[step];
    info = first_bad_pivot(info, pivot, step + 1);
    P u[kRight + 1];
    unrolled<kRight>([&](auto k) JAX_BATCHED_INLINED { u[k] = f[step + 1 + k]; });
    largest = Largest<R>(step + 1);
    for (int64_t i = 0; i < g.m; ++i) {
      P* a = g.a + i * g.n + step;
      const P l = multiplier(a[0], pivot);
      a[0] = l;
      const Indices former = g.place[i];
      const Indices moved = former == here, chosen = former == there;
      const Indices place = (chosen & here) | (~chosen & ((moved & there) | (~moved & former)));
      g.place[i] = place;
      unrolled<kRight>([&](auto k) JAX_BATCHED_INLINED {
        a[1 + k] = sub_mul(a[1 + k], l, u[k]);
        if constexpr (k == 0) largest.take(magnitude(a[1]), place, all(step + 1));
      });
    }
  });
  return info;
}

// Columns j, ..., j + kCols - 1; see the head of this file. Returns info.
template <int kCols, class T>
Simd<Real<T>> factor_columns(const LuGroup<T>& g, int64_t j, Simd<Real<T>> info) {
  using P = Lanes<T>;
  const int64_t steps = std::min(g.m, g.n);
  const int64_t above = std::min(j, steps);
  for (int64_t t = 0; t < above; ++t) {
    unrolled<kCols>([&](auto c) JAX_BATCHED_INLINED {
      g.f[t * g.pitch + j + c] = g.gather(g.row_at[t], j + c);
    });
  }
  substitute_group<false>(StridedGroup<P>{g.f, g.pitch, 1}, StridedGroup<P>{g.f + j, g.pitch, 1},
                          above, kCols, true);
  if (j >= steps) return info;
  constexpr int kRows = kLuRows<T>;
  int64_t i = 0;
  for (; i + kRows <= g.m; i += kRows) update_rows<kRows, kCols>(g, i, j);
  for (; i < g.m; ++i) update_rows<1, kCols>(g, i, j);
  return eliminate<kCols>(g, j, std::min<int64_t>(kCols, steps - j), info);
}

// A is in scratch. Leaves L and U in F, and what the rows were exchanged with.
template <class T>
Simd<Real<T>> factor_lu_group(const LuGroup<T>& g) {
  using R = Real<T>;
  constexpr int kCols = kLuColumns<T>;
  for (int64_t i = 0; i < g.m; ++i) {
    g.row_at[i] = typename LuGroup<T>::Indices{} + static_cast<typename VectorOf<R>::Bits>(i);
    g.place[i] = g.row_at[i];
  }
  Simd<R> info(R(0));
  int64_t j = 0;
  for (; j + kCols <= g.n; j += kCols) info = factor_columns<kCols>(g, j, info);
  for (; j < g.n; ++j) info = factor_columns<1>(g, j, info);
  for (int64_t i = g.n; i < g.m; ++i) {  // rows that were never a pivot
    for (int64_t t = 0; t < g.n; ++t) g.f[i * g.pitch + t] = g.gather(g.row_at[i], t);
  }
  return info;
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
