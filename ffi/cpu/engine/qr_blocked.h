// QR factorization by Householder reflections of one matrix, spread over the lanes along its rows,
// by panels of kQrPanel columns: a panel's reflections are applied one by one inside of it (to all
// of A where one panel is all there is), and then together to what is to its right. See qr_lanes.h
// for the formulas of the latter.
#pragma once

#include "ffi/cpu/engine/blocked.h"
#include "ffi/cpu/engine/qr_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

// Scratch, handed out piece by piece; from null it counts the bytes.
class Pieces {
 public:
  explicit Pieces(void* scratch) : at_(reinterpret_cast<uintptr_t>(scratch)) {}
  template <class T>
  SplitRows<T> rows(int64_t count, int64_t columns) {
    // Vectors may begin at any entry and end behind the last one.
    SplitRows<T> rows{reinterpret_cast<Real<T>*>(at_), round_up(columns, kLanes<T>) + kLanes<T>};
    at_ += count * rows.pitch() * sizeof(Real<T>);
    return rows;
  }
  int64_t bytes() const { return static_cast<int64_t>(at_); }

 private:
  uintptr_t at_;
};

// The part of a matrix from entry (i, j) on.
template <class T>
SplitRows<T> part(const SplitRows<T>& a, int64_t i, int64_t j) {
  return {a.row(i) + j, a.width};
}

template <class T>
void load(const T* from, int64_t rows, int64_t columns, const SplitRows<T>& to) {
  for (int64_t i = 0; i < rows; ++i) {
    Real<T>* row = to.row(i);
    for (int64_t j = 0; j < columns; ++j) to.set(row, j, from[i * columns + j]);
  }
}
template <class T>
void store(const SplitRows<T>& from, int64_t rows, int64_t columns, T* to) {
  for (int64_t i = 0; i < rows; ++i) {
    const Real<T>* row = from.row(i);
    for (int64_t j = 0; j < columns; ++j) to[i * columns + j] = from.get(row, j);
  }
}

// Calls f(vectors, j) for up to kMost vectors of columns from j on, about equally many at a time,
// until all of begin <= j < end are done.
template <class T, int kMost, class F>
JAX_BATCHED_INLINE void each_vectors(int64_t begin, int64_t end, F f) {
  constexpr int64_t size = kLanes<T>;
  int64_t left = (end - begin + size - 1) / size;
  for (int64_t tiles = (left + kMost - 1) / kMost; tiles > 0; --tiles) {
    const int64_t count = (left + tiles - 1) / tiles;
    with_constant<kMost>(count, [&](auto vectors) JAX_BATCHED_INLINED { f(vectors, begin); });
    begin += count * size;
    left -= count;
  }
}

template <class T>
struct QrMatrix {
  using R = Real<T>;
  using P = Lanes<T>;
  static constexpr int64_t size = kLanes<T>;
  // Vectors of a row whose sums are under way at the same time.
  static constexpr int kRowVectors = kIsComplex<T> ? 4 : 8;

  int64_t m, n, k;
  int64_t columns;  // of C, or of Q
  SplitRows<T> a;   // m x n: R and the v_l
  SplitRows<T> c;   // m x columns
  SplitRows<T> v;   // the v_l of a panel, with their zeros and ones
  SplitRows<T> g;   // the strict lower triangle of V^H V of a panel
  SplitRows<T> y;   // of a panel, as long as the longest row
  SplitRows<T> taus;

  static QrMatrix in(void* scratch, int64_t m, int64_t n, int64_t k, int64_t columns) {
    Pieces pieces(scratch);
    return of(pieces, m, n, k, columns);
  }
  static int64_t bytes(int64_t m, int64_t n, int64_t k, int64_t columns) {
    Pieces pieces(nullptr);
    of(pieces, m, n, k, columns);
    return pieces.bytes();
  }

  // A becomes R and the v_l. Returns whether all of these are finite. A panel is factored in a
  // copy, as vectors may reach beyond its columns.
  bool factor() const {
    if (k <= kQrPanel) return factor_panel(a, 0, m, k, n);
    bool finite = true;
    for (int64_t j = 0; j < k; j += kQrPanel) {
      const int64_t count = std::min(kQrPanel, k - j);
      copy(part(a, j, j), m - j, count, v);
      finite &= factor_panel(v, j, m - j, count, count);
      copy(v, m - j, count, part(a, j, j));
      if (j + count == n) continue;
      load_panel(j, count);
      multiply(part(a, j, j + count), m - j, n - j - count, count, 0, j, true);
    }
    return finite;
  }

  // C becomes the first columns of Q, panel by panel from the last one.
  void form() const {
    for (int64_t i = 0; i < m; ++i) {
      R* row = c.row(i);
      std::fill(row, row + c.width * kParts<T>, R(0));
      if (i < columns) c.set(row, i, T(R(1)));
    }
    const int64_t last = (k - 1) / kQrPanel * kQrPanel;
    for (int64_t j = last; j >= 0; j -= kQrPanel) {
      const int64_t count = std::min(kQrPanel, k - j);
      const int64_t identity = j == last ? columns - j : count;  // columns of C that still are
      load_panel(j, count);
      const SplitRows<T> own = part(c, j, j);
      for (int64_t l = 0; l < count; ++l) {
        for (int64_t t = 0; t < identity; ++t) y.set(y.row(l), t, conj(v.get(v.row(t), l)));
      }
      substitute(own, m - j, identity, count, j, false);
      // Of the others the panel's own rows are zero.
      const int64_t rest = columns - j - identity;
      multiply(part(own, 0, identity), m - j, rest, count, count, j, false);
    }
  }

  // C becomes Q C or Q^H C.
  void multiply(bool adjoint) const {
    const int64_t last = (k - 1) / kQrPanel * kQrPanel;
    for (int64_t at = 0; at <= last; at += kQrPanel) {
      const int64_t j = adjoint ? at : last - at;
      const int64_t count = std::min(kQrPanel, k - j);
      load_panel(j, count);
      multiply(part(c, j, 0), m - j, columns, count, 0, j, adjoint);
    }
  }

 private:
  static QrMatrix of(Pieces& pieces, int64_t m, int64_t n, int64_t k, int64_t columns) {
    const int64_t panel = std::min(k, kQrPanel);
    QrMatrix matrix;
    matrix.m = m;
    matrix.n = n;
    matrix.k = k;
    matrix.columns = columns;
    matrix.a = pieces.rows<T>(m, n);
    matrix.c = pieces.rows<T>(m, columns);
    matrix.v = pieces.rows<T>(m, panel);
    matrix.g = pieces.rows<T>(panel, panel);
    matrix.y = pieces.rows<T>(panel, std::max(n, columns));
    matrix.taus = pieces.rows<T>(1, k);
    return matrix;
  }

  T tau(int64_t l) const { return taus.get(taus.numbers, l); }

  Tail<R> tail(const SplitRows<T>& p, int64_t step, int64_t rows, R by) const {
    R sums[kSquareSums] = {};
    bool nonzero = false;
    const auto take = [&](R& sum, int64_t i) JAX_BATCHED_INLINED {
      const T x = p.get(p.row(i), step);
      if constexpr (kIsComplex<T>) {
        nonzero |= x.re != R(0) || x.im != R(0);
      } else {
        nonzero |= x != R(0);
      }
      sum = minus_squares(sum, jax_batched::scale(x, by));
    };
    int64_t i = step + 1;
    for (; i + kSquareSums <= rows; i += kSquareSums) {
      unrolled<kSquareSums>([&](auto s) JAX_BATCHED_INLINED { take(sums[s], i + s); });
    }
    for (int s = 0; i < rows; ++i, ++s) take(sums[s], i);
    using Mask = typename Simd<R>::Mask;
    const Simd<R> squares(-((sums[0] + sums[1]) + (sums[2] + sums[3])));
    return {squares, nonzero ? ~Mask{} : Mask{}};
  }

  static void copy(const SplitRows<T>& from, int64_t rows, int64_t columns,
                   const SplitRows<T>& to) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) to.set(to.row(i), j, from.get(from.row(i), j));
    }
  }

  // The reflections j, ..., j + count - 1 from the columns of a part of A, applied to all of it.
  bool factor_panel(const SplitRows<T>& p, int64_t j, int64_t rows, int64_t count,
                    int64_t columns_of_p) const {
    bool finite = true;
    for (int64_t step = 0; step < count; ++step) {
      const T alpha = p.get(p.row(step), step);
      const auto h =
          reflection<T>(broadcast(alpha), [&](Simd<R> by) { return tail(p, step, rows, by.v[0]); });
      finite &= is_finite(h)[0] != 0;
      taus.set(taus.numbers, j + step, first(h.tau));
      p.set(p.row(step), step, first(h.beta));
      const T factor = first(h.factor);
      for (int64_t i = step + 1; i < rows; ++i) {
        R* row = p.row(i);
        p.set(row, step, product(jax_batched::scale(p.get(row, step), h.scale.v[0]), factor));
      }
      const P turned = conj(h.tau);
      each_vectors<T, kRowVectors>(step + 1, columns_of_p,
                                   [&](auto vectors, int64_t t) JAX_BATCHED_INLINED {
                                     reflect<vectors>(p, step, rows, turned, t);
                                   });
    }
    return finite;
  }

  static T first(P x) {
    if constexpr (kIsComplex<T>) {
      return {x.re.v[0], x.im.v[0]};
    } else {
      return x.v[0];
    }
  }
  // Vectors of columns from t on less v w^T with w = conj(tau) v^H A.
  template <int kVectors>
  static JAX_BATCHED_INLINE void reflect(const SplitRows<T>& p, int64_t step, int64_t rows, P tau,
                                         int64_t t) {
    P w[kVectors];
    R* top = p.row(step);
    unrolled<kVectors>([&](auto x) JAX_BATCHED_INLINED { w[x] = -p.load(top, t + x * size); });
    for (int64_t i = step + 1; i < rows; ++i) {
      const R* row = p.row(i);
      const P factor = broadcast(conj(p.get(row, step)));
      unrolled<kVectors>([&](auto x) JAX_BATCHED_INLINED {
        w[x] = sub_mul(w[x], factor, p.load(row, t + x * size));
      });
    }
    unrolled<kVectors>([&](auto x) JAX_BATCHED_INLINED {
      w[x] = -product(tau, w[x]);
      p.store(top, t + x * size, p.load(top, t + x * size) - w[x]);
    });
    for (int64_t i = step + 1; i < rows; ++i) {
      R* row = p.row(i);
      const P factor = broadcast(p.get(row, step));
      unrolled<kVectors>([&](auto x) JAX_BATCHED_INLINED {
        p.store(row, t + x * size, sub_mul(p.load(row, t + x * size), factor, w[x]));
      });
    }
  }

  // V and V^H V of the panel at j.
  void load_panel(int64_t j, int64_t count) const {
    const int64_t rows = m - j;
    for (int64_t i = 0; i < rows; ++i) {
      const R* from = a.row(j + i);
      R* to = v.row(i);
      for (int64_t l = 0; l < count; ++l) {
        v.set(to, l, l < i ? a.get(from, j + l) : T(R(l == i ? 1 : 0)));
      }
    }
    products(v, g, 0, rows, count, count, /*triangle=*/true);
  }

  // to = V^H C from row `begin` of both on; of a triangle what lies below the diagonal.
  void products(const SplitRows<T>& from, const SplitRows<T>& to, int64_t begin, int64_t rows,
                int64_t columns_of_c, int64_t count, bool triangle) const {
    constexpr int kRows = kTileRows;
    const auto tile = [&](auto tile_rows, auto vectors, int64_t l, int64_t t) JAX_BATCHED_INLINED {
      P sum[tile_rows][vectors];
      unrolled<tile_rows>([&](auto r) JAX_BATCHED_INLINED {
        unrolled<vectors>([&](auto x) JAX_BATCHED_INLINED { sum[r][x] = broadcast(T(R(0))); });
      });
      for (int64_t i = std::max(begin, l); i < rows; ++i) {
        P entry[vectors];
        const R* row = from.row(i);
        const R* factors = v.row(i);
        unrolled<vectors>([&](auto x)
                              JAX_BATCHED_INLINED { entry[x] = from.load(row, t + x * size); });
        unrolled<tile_rows>([&](auto r) JAX_BATCHED_INLINED {
          const P factor = broadcast(conj(v.get(factors, l + r)));
          unrolled<vectors>([&](auto x) JAX_BATCHED_INLINED {
            sum[r][x] = sub_mul(sum[r][x], factor, entry[x]);
          });
        });
      }
      unrolled<tile_rows>([&](auto r) JAX_BATCHED_INLINED {
        unrolled<vectors>(
            [&](auto x) JAX_BATCHED_INLINED { to.store(to.row(l + r), t + x * size, -sum[r][x]); });
      });
    };
    int64_t l = 0;
    const auto rows_of = [&](auto tile_rows) JAX_BATCHED_INLINED {
      const int64_t end = triangle ? std::min<int64_t>(l + tile_rows, columns_of_c) : columns_of_c;
      each_vectors<T, kTileVectors<T>>(0, end, [&](auto vectors, int64_t t) JAX_BATCHED_INLINED {
        tile(tile_rows, vectors, l, t);
      });
    };
    for (; l + kRows <= count; l += kRows) rows_of(std::integral_constant<int, kRows>{});
    for (; l < count; ++l) rows_of(std::integral_constant<int, 1>{});
  }

  // The panel's reflections, whose first one is j, of a part of a matrix. What is before row
  // `begin` of it is zero.
  void multiply(const SplitRows<T>& x, int64_t rows, int64_t columns_of_x, int64_t count,
                int64_t begin, int64_t j, bool adjoint) const {
    if (columns_of_x == 0) return;
    products(x, y, begin, rows, columns_of_x, count, /*triangle=*/false);
    substitute(x, rows, columns_of_x, count, j, adjoint);
  }

  // Y from V^H X, and X less V Y.
  void substitute(const SplitRows<T>& x, int64_t rows, int64_t columns_of_x, int64_t count,
                  int64_t j, bool adjoint) const {
    each_vectors<T, kRowVectors>(0, columns_of_x, [&](auto vectors, int64_t t) JAX_BATCHED_INLINED {
      for (int64_t step = 0; step < count; ++step) {
        const int64_t l = adjoint ? step : count - 1 - step;
        P sum[vectors];
        R* row = y.row(l);
        unrolled<vectors>([&](auto s) JAX_BATCHED_INLINED { sum[s] = y.load(row, t + s * size); });
        for (int64_t p = adjoint ? 0 : l + 1; p < (adjoint ? l : count); ++p) {
          const R* other = y.row(p);
          const P factor = broadcast(adjoint ? g.get(g.row(l), p) : conj(g.get(g.row(p), l)));
          unrolled<vectors>([&](auto s) JAX_BATCHED_INLINED {
            sum[s] = sub_mul(sum[s], factor, y.load(other, t + s * size));
          });
        }
        const P factor = broadcast(adjoint ? conj(tau(j + l)) : tau(j + l));
        unrolled<vectors>([&](auto s) JAX_BATCHED_INLINED {
          y.store(row, t + s * size, product(factor, sum[s]));
        });
      }
    });
    each_vectors<T, kTileVectors<T>>(0, columns_of_x,
                                     [&](auto vectors, int64_t t) JAX_BATCHED_INLINED {
                                       int64_t i = 0;
                                       for (; i + kTileRows <= rows; i += kTileRows) {
                                         subtract_product<kTileRows, vectors>(x, i, t, count);
                                       }
                                       for (; i < rows; ++i)
                                         subtract_product<1, vectors>(x, i, t, count);
                                     });
  }

  template <int kRows, int kVectors>
  JAX_BATCHED_INLINE void subtract_product(const SplitRows<T>& x, int64_t i, int64_t t,
                                           int64_t count) const {
    P sum[kRows][kVectors];
    unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
      unrolled<kVectors>(
          [&](auto s) JAX_BATCHED_INLINED { sum[r][s] = x.load(x.row(i + r), t + s * size); });
    });
    const int64_t end = std::min(count, i + kRows);  // beyond it V has zeros
    for (int64_t l = 0; l < end; ++l) {
      P entry[kVectors];
      const R* row = y.row(l);
      unrolled<kVectors>([&](auto s) JAX_BATCHED_INLINED { entry[s] = y.load(row, t + s * size); });
      unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
        const P factor = broadcast(v.get(v.row(i + r), l));
        unrolled<kVectors>(
            [&](auto s) JAX_BATCHED_INLINED { sum[r][s] = sub_mul(sum[r][s], factor, entry[s]); });
      });
    }
    unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
      unrolled<kVectors>(
          [&](auto s) JAX_BATCHED_INLINED { x.store(x.row(i + r), t + s * size, sum[r][s]); });
    });
  }
};

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
