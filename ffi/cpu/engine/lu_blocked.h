// LU factorization with partial pivoting of one matrix, right-looking by panels of columns.
//
// A panel is factored in a copy that holds its columns as rows, so that the search for a pivot, the
// division by it and the elimination run along memory. Its exchanges are then carried out in the
// whole rows; the rows of U to its right are a substitution, and the rest takes one product.
#pragma once

#include "ffi/cpu/engine/lu_lanes.h"
#include "ffi/cpu/engine/substitution_blocked.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

inline constexpr int64_t kPanel = 16;

template <class T>
struct LuMatrix {
  int64_t m, n;
  SplitRows<T> a;      // m rows
  SplitRows<T> panel;  // up to kPanel rows: the columns of a panel
  int32_t* row_at;     // the row of A at each place
  int32_t* pivots;     // of each step the place of the pivot

  static SplitRows<T> rows(void* scratch, int64_t columns) {
    // Vectors may begin at any entry and end behind the last one.
    return {static_cast<Real<T>*>(scratch), round_up(columns, kLanes<T>) + kLanes<T>};
  }
  static int64_t panel_columns(int64_t m, int64_t n) { return std::min({m, n, kPanel}); }
  static int64_t bytes(int64_t m, int64_t n) {
    const int64_t numbers =
        m * rows(nullptr, n).pitch() + panel_columns(m, n) * rows(nullptr, m).pitch();
    return numbers * sizeof(Real<T>) + round_up((m + std::min(m, n)) * sizeof(int32_t), 64);
  }
  static LuMatrix in(void* scratch, int64_t m, int64_t n) {
    LuMatrix matrix;
    matrix.m = m;
    matrix.n = n;
    matrix.a = rows(scratch, n);
    matrix.panel = rows(matrix.a.row(m), m);
    matrix.row_at = reinterpret_cast<int32_t*>(matrix.panel.row(panel_columns(m, n)));
    matrix.pivots = matrix.row_at + m;
    return matrix;
  }
  void* end() const {
    return reinterpret_cast<char*>(row_at) + round_up((m + std::min(m, n)) * sizeof(int32_t), 64);
  }

  void load(const T* from) const {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) a.set(a.row(i), j, from[i * n + j]);
    }
  }
  void store(T* to) const {
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) to[i * n + j] = a.get(a.row(i), j);
    }
  }
};

// to(k + c, l + r) = from(i + r, j + c) for 0 <= r < rows, 0 <= c < columns.
template <class T>
void transpose_part(const SplitRows<T>& from, int64_t i, int64_t j, int64_t rows, int64_t columns,
                    const SplitRows<T>& to, int64_t k, int64_t l) {
  constexpr int64_t size = kLanes<T>;
  const int64_t whole_rows = rows / size * size, whole_columns = columns / size * size;
  for (int64_t r = 0; r < whole_rows; r += size) {
    for (int64_t c = 0; c < whole_columns; c += size) {
      for (int64_t part = 0; part < kParts<T>; ++part) {
        transpose(from.row(i + r) + part * from.width + j + c, from.pitch(),
                  to.row(k + c) + part * to.width + l + r, to.pitch());
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) {
      to.set(to.row(k + c), l + r, from.get(from.row(i + r), j + c));
    }
  }
}

// 0, 1, 2, ...
template <class R>
typename VectorOf<R>::Mask lane_numbers() {
  typename VectorOf<R>::Mask numbers = {};
  for (int lane = 0; lane < kLanes<R>; ++lane) numbers[lane] = lane;
  return numbers;
}

// The first of the largest numbers of a row from `begin` on; `begin` where none is a number.
template <class T>
int64_t largest_entry(const SplitRows<T>& a, const Real<T>* row, int64_t begin, int64_t end) {
  using R = Real<T>;
  using Indices = typename VectorOf<R>::Mask;
  using Bits = typename VectorOf<R>::Bits;
  constexpr int size = kLanes<T>;
  Indices at = lane_numbers<R>() + static_cast<Bits>(begin);
  Indices places = Indices{} + static_cast<Bits>(begin);
  Simd<R> values(R(-1));
  for (int64_t i = begin; i < end; i += size, at += size) {
    const Simd<R> candidate = magnitude(a.load(row, i));
    const Indices better = (candidate.v > values.v) & (at < static_cast<Bits>(end));
    values = select(better, candidate, values);
    places = (better & at) | (~better & places);
  }
  // Of all lanes: the largest value in each, then the first place that has it.
  Simd<R> largest = values;
  for (int distance = size / 2; distance > 0; distance /= 2) {
    Simd<R> turned;
    for (int lane = 0; lane < size; ++lane) turned.v[lane] = largest.v[(lane + distance) % size];
    largest = select(turned.v > largest.v, turned, largest);
  }
  const Indices others = largest.v != values.v;
  const Indices candidates = places | (others & std::numeric_limits<Bits>::max());
  Bits place = candidates[0];
  for (int lane = 1; lane < size; ++lane) place = std::min<Bits>(place, candidates[lane]);
  return place;
}

// Columns k, ..., k + kColumns - 1 of a panel, below row c, less their entries in that row times
// the multipliers of column c.
template <int kColumns, class T>
JAX_BATCHED_INLINE void eliminate(const SplitRows<T>& p, int64_t c, int64_t k, int64_t rows) {
  Lanes<T> u[kColumns];
  unrolled<kColumns>([&](auto l) JAX_BATCHED_INLINED { u[l] = broadcast(p.get(p.row(k + l), c)); });
  for (int64_t i = c + 1; i < rows; i += kLanes<T>) {
    const Lanes<T> multipliers = p.load(p.row(c), i);
    unrolled<kColumns>([&](auto l) JAX_BATCHED_INLINED {
      Real<T>* column = p.row(k + l);
      p.store(column, i, sub_mul(p.load(column, i), multipliers, u[l]));
    });
  }
}

// The panel's columns j, ..., j + columns - 1, of the rows from j on. Returns info.
template <class T>
int32_t factor_panel(const LuMatrix<T>& g, int64_t j, int64_t columns) {
  using R = Real<T>;
  const SplitRows<T>& p = g.panel;
  const int64_t rows = g.m - j;
  int32_t info = 0;
  transpose_part(g.a, j, j, rows, columns, p, 0, 0);
  for (int64_t c = 0; c < columns; ++c) {
    R* column = p.row(c);
    const int64_t place = largest_entry(p, column, c, rows);
    g.pivots[j + c] = static_cast<int32_t>(j + place);
    if (place != c) {
      for (int64_t k = 0; k < columns; ++k) {
        const T former = p.get(p.row(k), c);
        p.set(p.row(k), c, p.get(p.row(k), place));
        p.set(p.row(k), place, former);
      }
    }
    const Lanes<T> pivot = broadcast(p.get(column, c));
    if (info == 0) {
      info = static_cast<int32_t>(first_bad_pivot(Simd<R>(R(0)), pivot, j + c + 1).v[0]);
    }
    for (int64_t i = c + 1; i < rows; i += kLanes<T>) {
      p.store(column, i, multiplier(p.load(column, i), pivot));
    }
    int64_t k = c + 1;
    for (; k + 4 <= columns; k += 4) eliminate<4>(p, c, k, rows);
    for (; k < columns; ++k) eliminate<1>(p, c, k, rows);
  }
  return info;
}

// Rows i, ..., kVectors vectors from column k on, less the product of the panel's columns j, ... of
// these rows with its rows of U.
template <int kRows, int kVectors, class T>
JAX_BATCHED_INLINE void subtract_product(const SplitRows<T>& a, int64_t i, int64_t k, int64_t j,
                                         int64_t columns) {
  using R = Real<T>;
  constexpr int size = kLanes<T>;
  Lanes<T> tile[kRows][kVectors];
  unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
    unrolled<kVectors>(
        [&](auto v) JAX_BATCHED_INLINED { tile[r][v] = a.load(a.row(i + r), k + v * size); });
  });
  const int64_t pitch = a.pitch();
  const R* row = a.row(j);
  const R* left = a.row(i);
  for (int64_t t = j; t < j + columns; ++t, row += pitch) {
    Lanes<T> u[kVectors];
    unrolled<kVectors>([&](auto v) JAX_BATCHED_INLINED { u[v] = a.load(row, k + v * size); });
    unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
      const Lanes<T> l = broadcast(a.get(left + r * pitch, t));
      unrolled<kVectors>([&](auto v)
                             JAX_BATCHED_INLINED { tile[r][v] = sub_mul(tile[r][v], l, u[v]); });
    });
  }
  unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
    unrolled<kVectors>(
        [&](auto v) JAX_BATCHED_INLINED { a.store(a.row(i + r), k + v * size, tile[r][v]); });
  });
}

template <int kVectors, class T>
void subtract_products(const LuMatrix<T>& g, int64_t k, int64_t j, int64_t columns) {
  int64_t i = j + columns;
  for (; i + kTileRows <= g.m; i += kTileRows) {
    subtract_product<kTileRows, kVectors>(g.a, i, k, j, columns);
  }
  for (; i < g.m; ++i) subtract_product<1, kVectors>(g.a, i, k, j, columns);
}

// A is in scratch, and becomes L and U. Returns info.
template <class T>
int32_t factor_lu(const LuMatrix<T>& g) {
  constexpr int size = kLanes<T>;
  constexpr int kVectors = kTileVectors<T>;
  const int64_t steps = std::min(g.m, g.n);
  const SplitRows<T>& a = g.a;
  for (int64_t i = 0; i < g.m; ++i) g.row_at[i] = static_cast<int32_t>(i);
  int32_t info = 0;
  for (int64_t j = 0; j < steps; j += kPanel) {
    const int64_t columns = std::min(kPanel, steps - j);
    const int32_t failed = factor_panel(g, j, columns);
    if (info == 0) info = failed;
    for (int64_t i = j; i < j + columns; ++i) {
      const int64_t place = g.pivots[i];
      if (place == i) continue;
      std::swap_ranges(a.row(i), a.row(i) + a.width * kParts<T>, a.row(place));
      std::swap(g.row_at[i], g.row_at[place]);
    }
    transpose_part(g.panel, 0, 0, columns, g.m - j, a, j, j);
    const StridedLower<T> l{a.row(j) + j, a.pitch(), 1, a.width, false};
    const SplitRows<T> u{a.row(j), a.width};
    int64_t k = j + columns;
    for (; k + kVectors * size <= g.n; k += kVectors * size) {
      substitute_columns<kVectors>(l, u, columns, true, k);
      subtract_products<kVectors>(g, k, j, columns);
    }
    for (; k < g.n; k += size) {
      substitute_columns<1>(l, u, columns, true, k);
      subtract_products<1>(g, k, j, columns);
    }
  }
  return info;
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
