// Singular value decompositions of a group of square matrices, one per lane.
//
// A = U B V^H with a real upper bidiagonal B by Householder reflections from both sides, then
// implicit QR on B (Golub and Kahan), whose rotations are applied to the columns of U and V. All
// lanes make the same sweeps, as in eigh_lanes.h.
#pragma once

#include "ffi/cpu/engine/eigh_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class T>
struct SvdGroup {
  using R = Real<T>;
  using P = Lanes<T>;
  using S = Simd<R>;
  using Mask = typename S::Mask;

  int64_t n;
  int64_t pitch;  // of A
  // n x n: below the diagonal, and right of what is beside it, the vectors of reflections.
  P* a;
  P* left;   // n: the factors of these
  P* right;  // n
  P* v;      // n
  S* d;      // n: the diagonal of B
  S* e;      // n: e_i is right of d_i
  TurningRows<T> rows_u, rows_v;
  PairOfSweeps<T> of_u, of_v;

  static int64_t bytes(int64_t n) {
    return static_cast<int64_t>(sizeof(P)) * n * (GroupMatrix<T>::pitch(n) + 3) +
           static_cast<int64_t>(sizeof(S)) * 10 * n + 2 * TurningRows<T>::bytes(n);
  }
  static SvdGroup in(void* scratch, int64_t n) {
    SvdGroup group;
    group.n = n;
    group.pitch = GroupMatrix<T>::pitch(n);
    group.a = static_cast<P*>(scratch);
    group.left = group.a + n * group.pitch;
    group.right = group.left + n;
    group.v = group.right + n;
    group.d = numbers(group.v + n);
    group.e = group.d + n;
    auto* turns = reinterpret_cast<Turn<R>*>(group.e + n);
    for (int i : {0, 1}) {
      group.of_u.turns[i] = turns + 2 * i * n;
      group.of_v.turns[i] = turns + (2 * i + 1) * n;
    }
    group.rows_u = {reinterpret_cast<S*>(turns + 4 * n), n};
    group.rows_v = {group.rows_u.at + group.rows_u.rows() * group.rows_u.pitch(), n};
    return group;
  }

  JAX_BATCHED_INLINE P& at(int64_t i, int64_t j) const { return a[i * pitch + j]; }

  // Scales A. Returns where it is finite; elsewhere it becomes zero.
  Mask prepare(PowersOfTwo<R>* scales) const {
    S largest(R(0));
    Mask finite = ~Mask{};
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        finite &= is_finite(at(i, j));
        largest = larger(largest, largest_part(at(i, j)));
      }
    }
    *scales = normalising(select(finite, largest, S(R(1))));
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        at(i, j) = select(finite, scale(at(i, j), scales->by), broadcast(T(R(0))));
      }
    }
    return finite;
  }

  // A, prepared, becomes d, singular values with a sign, and with kVectors U and V. Returns how
  // many elements did not converge.
  template <bool kVectors>
  S decompose() {
    if constexpr (!kIsComplex<T>) {
      if (n == 2) return rotate<2, kVectors>();
      if (n == 3) return rotate<3, kVectors>();
    }
    return by_reflections<kVectors>();
  }

 private:
  template <bool kVectors>
  S by_reflections() {
    bidiagonalise();
    if constexpr (kVectors) form();
    return diagonalise<kVectors>();
  }

  // One-sided Jacobi (Hestenes) for the smallest real matrices, in registers: rotations of two rows
  // after the other make the rows of U^T A orthogonal, diag(s) V^T. Lanes with a row that becomes
  // zero, which has no direction, take what the reflections give.
  template <int kSize, bool kVectors>
  S rotate() {
    constexpr R kZero = sizeof(R) == sizeof(float) ? R(1e-30) : R(1e-250);  // squares of such a row
    constexpr R kSmall = sizeof(R) == sizeof(float) ? R(0x1p-30) : R(0x1p-300);
    constexpr R kUp = sizeof(R) == sizeof(float) ? R(0x1p60) : R(0x1p500);
    const S zero(kZero), one(R(1));
    S x[kSize][kSize], u[kSize][kSize];
    unrolled<kSize>([&](auto i) JAX_BATCHED_INLINED {
      unrolled<kSize>([&](auto j) JAX_BATCHED_INLINED {
        x[i][j] = at(i, j);
        u[i][j] = S(R(i == j ? 1 : 0));
      });
    });
    const auto minus_product = [&](int i, int j) JAX_BATCHED_INLINED {
      S sum(R(0));
      unrolled<kSize>([&](auto k) JAX_BATCHED_INLINED { sum = sub_mul(sum, x[i][k], x[j][k]); });
      return sum;
    };
    const S tolerance(4 * std::numeric_limits<R>::epsilon());
    S count;
    for (int sweep = 0; sweep < kMaxJacobiSweeps; ++sweep) {
      count = S(R(0));
      unrolled<kSize>([&](auto i) JAX_BATCHED_INLINED {
        unrolled<i>([&](auto j) JAX_BATCHED_INLINED {
          const S i_i = -minus_product(i, i), j_j = -minus_product(j, j), y = -minus_product(i, j);
          const Mask needed = Mask(absolute(y).v > (tolerance * sqrt(i_i) * sqrt(j_j)).v) &
                              Mask(i_i.v > zero.v) & Mask(j_j.v > zero.v);
          count = count + unless(~needed, one);
          // So that squares of what is compared are numbers.
          const S up = select(larger(i_i, j_j).v < S(kSmall).v, S(kUp), one);
          const JacobiRotation<R> by(needed, (i_i - j_j) * up, y * up);
          unrolled<kSize>([&](auto k) JAX_BATCHED_INLINED {
            by.apply(x[j][k], x[i][k]);
            if constexpr (kVectors) by.apply(u[j][k], u[i][k]);
          });
        });
      });
      if (!any(~is_zero(count))) break;
    }
    Mask missing = {};
    S values[kSize];
    unrolled<kSize>([&](auto i) JAX_BATCHED_INLINED {
      const S squares = -minus_product(i, i);
      missing |= ~Mask(squares.v > zero.v);
      values[i] = sqrt(squares);
    });
    if (any(missing)) count = select(missing, by_reflections<kVectors>(), count);
    unrolled<kSize>([&](auto i) JAX_BATCHED_INLINED {
      const S inverse = one / values[i];
      d[i] = select(missing, d[i], values[i]);
      if constexpr (kVectors) {
        unrolled<kSize>([&](auto j) JAX_BATCHED_INLINED {
          S& of_u = rows_u.at[j * rows_u.pitch() + i];
          S& of_v = rows_v.at[j * rows_v.pitch() + i];
          of_u = select(missing, of_u, u[i][j]);
          of_v = select(missing, of_v, x[i][j] * inverse);
        });
      }
    });
    return count;
  }

  // H_(n-1)^H ... H_0^H A G_0 ... G_(n-2) = B. H_k = I - tau v v^H with v_k = 1 eliminates column
  // k, and G_k, of the same form with v_(k+1) = 1, the rest of row k.
  void bidiagonalise() const {
    for (int64_t k = 0; k < n; ++k) {
      const auto h = reflection<T>(at(k, k), [&](S by) {
        return tail(k + 1, by, [&](int64_t i) JAX_BATCHED_INLINED { return at(i, k); });
      });
      d[k] = real(h.beta);
      left[k] = h.tau;
      for (int64_t i = k + 1; i < n; ++i) {
        at(i, k) = product(scale(at(i, k), h.scale), h.factor);
      }
      reflect_columns(k);
      e[k] = S(R(0));
      right[k] = broadcast(T(R(0)));
      if (k + 1 == n) break;
      const auto g = reflection<T>(conj(at(k, k + 1)), [&](S by) {
        return tail(k + 2, by, [&](int64_t j) JAX_BATCHED_INLINED { return at(k, j); });
      });
      e[k] = real(g.beta);
      right[k] = g.tau;
      v[k + 1] = broadcast(T(R(1)));
      for (int64_t j = k + 2; j < n; ++j) {
        v[j] = product(scale(conj(at(k, j)), g.scale), g.factor);
        at(k, j) = v[j];
      }
      reflect_rows(k);
    }
  }

  void form() const {
    rows_u.form(0, left, [this](int64_t i, int64_t k) JAX_BATCHED_INLINED { return at(i, k); });
    rows_v.form(1, right, [this](int64_t i, int64_t k) JAX_BATCHED_INLINED { return at(k, i); });
  }

  // B becomes diagonal, and with kVectors U and V take its rotations. Returns how many off-diagonal
  // elements did not converge.
  template <bool kVectors>
  S diagonalise() {
    S largest(R(0));
    for (int64_t i = 0; i < n; ++i) largest = larger(largest, absolute(d[i]) + absolute(e[i]));
    // A step leaves about as much of an element beside equal values.
    const S negligible = largest * S(4 * std::numeric_limits<R>::epsilon());
    for (int64_t i = 0; i < n; ++i) {
      e[i] = unless(absolute(e[i]).v <= negligible.v, e[i]);
      // A zero on the diagonal beside what is not would split B^H B, but not B.
      const S least = copy_sign(S(R(0.03125)) * negligible, d[i]);
      d[i] = select(~is_zero(e[i]) & Mask(absolute(d[i]).v < absolute(least).v), least, d[i]);
    }
    LastRows<R> last(n);
    for (int64_t sweep = 0; sweep < kMaxSweeps * n; ++sweep) {
      last.update(e);
      if (last.end == 0) break;
      const S shift = smaller_value(last.of(d, 1), last.of(e, 1), last.of(d, 0));
      sweep_down(shift, negligible, last.end, of_u.next(), of_v.next());
      if constexpr (kVectors) {
        of_u.take(rows_u, last.end);
        of_v.take(rows_v, last.end);
      }
    }
    if constexpr (kVectors) {
      of_u.apply(rows_u);
      of_v.apply(rows_v);
    }
    return count_nonzero(e, n);
  }

  // Of the numbers x(begin), ...
  template <class F>
  Tail<R> tail(int64_t begin, S by, F x) const {
    S sums[kSquareSums];
    for (S& sum : sums) sum = S(R(0));
    Mask nonzero = {};
    const auto take = [&](S& sum, int64_t i) JAX_BATCHED_INLINED {
      nonzero |= ~is_zero(x(i));
      sum = minus_squares(sum, scale(x(i), by));
    };
    for (; begin + kSquareSums <= n; begin += kSquareSums) {
      unrolled<kSquareSums>([&](auto s) JAX_BATCHED_INLINED { take(sums[s], begin + s); });
    }
    for (int s = 0; begin < n; ++begin, ++s) take(sums[s], begin);
    return {-((sums[0] + sums[1]) + (sums[2] + sums[3])), nonzero};
  }

  // Columns right of k less conj(tau) v v^H A, with v of H_k.
  void reflect_columns(int64_t k) const {
    const P tau = conj(left[k]);
    const auto tile = [&](auto size, int64_t j) JAX_BATCHED_INLINED {
      P sum[size];
      unrolled<size>([&](auto t) JAX_BATCHED_INLINED { sum[t] = at(k, j + t); });
      for (int64_t i = k + 1; i < n; ++i) {
        const P factor = -conj(at(i, k));
        unrolled<size>([&](auto t)
                           JAX_BATCHED_INLINED { sum[t] = sub_mul(sum[t], factor, at(i, j + t)); });
      }
      unrolled<size>([&](auto t) JAX_BATCHED_INLINED {
        sum[t] = product(tau, sum[t]);
        at(k, j + t) = at(k, j + t) - sum[t];
      });
      for (int64_t i = k + 1; i < n; ++i) {
        const P factor = at(i, k);
        unrolled<size>([&](auto t) JAX_BATCHED_INLINED {
          at(i, j + t) = sub_mul(at(i, j + t), factor, sum[t]);
        });
      }
    };
    constexpr int kColumns = kQrColumns<T>;
    int64_t j = k + 1;
    for (; j + kColumns <= n; j += kColumns) tile(std::integral_constant<int, kColumns>{}, j);
    for (; j < n; ++j) tile(std::integral_constant<int, 1>{}, j);
  }
  // Rows below k less tau A v v^H, with v of G_k.
  void reflect_rows(int64_t k) const {
    const auto tile = [&](auto size, int64_t i) JAX_BATCHED_INLINED {
      P sum[size];
      unrolled<size>([&](auto t) JAX_BATCHED_INLINED { sum[t] = broadcast(T(R(0))); });
      for (int64_t j = k + 1; j < n; ++j) {
        const P factor = -v[j];
        unrolled<size>([&](auto t)
                           JAX_BATCHED_INLINED { sum[t] = sub_mul(sum[t], at(i + t, j), factor); });
      }
      unrolled<size>([&](auto t) JAX_BATCHED_INLINED { sum[t] = product(right[k], sum[t]); });
      for (int64_t j = k + 1; j < n; ++j) {
        const P factor = conj(v[j]);
        unrolled<size>([&](auto t) JAX_BATCHED_INLINED {
          at(i + t, j) = sub_mul(at(i + t, j), sum[t], factor);
        });
      }
    };
    int64_t i = k + 1;
    for (; i + 4 <= n; i += 4) tile(std::integral_constant<int, 4>{}, i);
    for (; i < n; ++i) tile(std::integral_constant<int, 1>{}, i);
  }

  // The smaller singular value of (f g; 0 h).
  static S smaller_value(S f, S g, S h) {
    f = absolute(f);
    g = absolute(g);
    h = absolute(h);
    const S high = larger(f, h), low = select(h.v < f.v, h, f);
    const S scale = S(R(1)) / larger(larger(high, g), S(kNothing<R>));
    const S sum = (high + low) * scale, difference = (high - low) * scale, beside = g * scale;
    const S squares = beside * beside;
    const S roots = sqrt(sum * sum + squares) + sqrt(difference * difference + squares);
    return S(R(2)) * low * (high * scale) / larger(roots, S(kNothing<R>));
  }

  // (|d| - shift) (sign(d) + shift / d): what d - shift^2 / d is, without loss of digits.
  static S shifted(S d, S shift) {
    const S sum = copy_sign(S(R(1)), d) + shift / d;
    return unless(is_zero(d), (absolute(d) - shift) * sum);
  }

  // One sweep of implicit QR over rows 0, ..., end.
  void sweep_down(S shift, S negligible, int64_t end, Turn<R>* of_u, Turn<R>* of_v) const {
    S d_i = d[0], e_i = e[0];
    S y = shifted(d_i, shift), z = e_i;
    Mask begins = ~Mask{};  // whether row i is the first of its block
    for (int64_t i = 0; i < end; ++i) {
      const S above = rotation(y, z, &of_v[i]);
      if (i > 0) e[i - 1] = unless(begins | Mask(absolute(above).v <= negligible.v), above);
      begins = is_zero(e[i]);
      const S c = of_v[i].c, s = of_v[i].s;
      S d_next = d[i + 1];
      y = sub_mul(c * d_i, -s, e_i);
      e_i = sub_mul(c * e_i, s, d_i);
      z = s * d_next;
      d_next = c * d_next;
      d[i] = rotation(y, z, &of_u[i]);
      const S c_u = of_u[i].c, s_u = of_u[i].s;
      y = sub_mul(c_u * e_i, -s_u, d_next);
      d_i = sub_mul(c_u * d_next, s_u, e_i);
      const S e_next = e[i + 1];
      z = s_u * e_next;
      e_i = c_u * e_next;
      if (i + 1 < end) {
        e[i] = y;
        if (any(begins)) {
          y = select(begins, shifted(d_i, shift), y);
          z = select(begins, e_next, z);
        }
      }
    }
    d[end] = d_i;
    e[end - 1] = unless(begins | Mask(absolute(y).v <= negligible.v), y);
  }
};

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
