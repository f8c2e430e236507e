// Eigenvalues and eigenvectors of a group of Hermitian matrices, one per lane.
//
// A = Q T Q^H with a real tridiagonal T by Householder reflections, then implicit QR on T with
// Wilkinson's shifts, whose rotations are applied to the rows of Q.
//
// All lanes make the same sweeps, from the top of T to the last row that any of them still needs.
// Where an off-diagonal element is zero the rotation is the identity, exactly, and the next block
// begins anew below it. So converged lanes, splits and diagonal matrices need no branch, and a
// matrix's bits do not depend on its neighbours. Only -0 could become 0 by a sweep more: so 0 is
// added in the end.
#pragma once

#include "ffi/cpu/engine/qr_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class R>
struct PowersOfTwo {
  Simd<R> by, back;  // by * back = 1
};

// With which the numbers whose largest is given come to lie in [1, 2), or next to it at the ends of
// the range.
template <class R>
JAX_BATCHED_INLINE PowersOfTwo<R> normalising(Simd<R> largest) {
  using Bits = typename VectorOf<R>::Bits;
  using Mask = typename Simd<R>::Mask;
  using Vector = typename Simd<R>::Vector;
  constexpr int kDigits = std::numeric_limits<R>::digits - 1;
  constexpr Bits kOne = Bits(1) << kDigits;  // in the place of the exponent
  constexpr Bits kSum = kOne * (2 * (std::numeric_limits<R>::max_exponent - 1));
  const Mask exponent = Mask(largest.v) & (Mask{} + (kSum + kOne));
  Mask by = (Mask{} + kSum) - exponent;
  const Mask low = by < kOne, high = by > kSum - kOne;
  by = (low & (Mask{} + kOne)) | (high & (Mask{} + (kSum - kOne))) | (~(low | high) & by);
  return {Vector(by), Vector((Mask{} + kSum) - by)};
}

template <class R>
JAX_BATCHED_INLINE Simd<R> larger(Simd<R> a, Simd<R> b) {
  return select(b.v > a.v, b, a);
}
template <class R>
JAX_BATCHED_INLINE Simd<R> largest_part(Simd<R> a) {
  return absolute(a);
}
template <class R>
JAX_BATCHED_INLINE Simd<R> largest_part(Complex<Simd<R>> a) {
  return larger(absolute(a.re), absolute(a.im));
}
// |a| with the sign of b.
template <class R>
JAX_BATCHED_INLINE Simd<R> copy_sign(Simd<R> a, Simd<R> b) {
  using Mask = typename Simd<R>::Mask;
  constexpr auto kMagnitude = std::numeric_limits<typename VectorOf<R>::Bits>::max();
  return typename Simd<R>::Vector((Mask(a.v) & (Mask{} + kMagnitude)) |
                                  (Mask(b.v) & ~(Mask{} + kMagnitude)));
}

// What is less than this is nothing beside numbers near 1, and its square is a number.
template <class R>
inline constexpr R kNothing = sizeof(R) == sizeof(float) ? R(1e-18) : R(1e-150);

// Rotations of a sweep: (c -s; s c) on rows i and i + 1.
template <class R>
struct Turn {
  Simd<R> c, s;
};

template <class T>
struct EighGroup {
  using R = Real<T>;
  using P = Lanes<T>;
  using S = Simd<R>;
  using Mask = typename S::Mask;

  static constexpr int64_t kMaxSweeps = 30;  // for each row

  int64_t n;
  int64_t pitch;    // of A
  int64_t pitch_q;  // of Q
  P* a;             // n x n: below the subdiagonal the vectors of reflections
  P* taus;
  P* v;
  P* w;
  S* d;  // n: the diagonal of T
  S* e;  // n: e_i is right of and below d_i
  // Q: row i of it is row i, or of a complex one row 2 i its real parts and 2 i + 1 the others.
  S* q;
  Turn<R>* turns[2];  // of two sweeps

  static int64_t bytes(int64_t n) {
    const int64_t matrices = n * GroupMatrix<T>::pitch(n) + n * kParts<T> * (n | 1);
    return static_cast<int64_t>(sizeof(P)) * (matrices + 3 * n) +
           static_cast<int64_t>(sizeof(S)) * 6 * (n + 1);
  }
  static EighGroup in(void* scratch, int64_t n) {
    EighGroup group;
    group.n = n;
    group.pitch = GroupMatrix<T>::pitch(n);
    group.pitch_q = n | 1;
    group.a = static_cast<P*>(scratch);
    group.taus = group.a + n * group.pitch;
    group.v = group.taus + n;
    group.w = group.v + n;
    group.d = numbers(group.w + n);
    group.e = group.d + n + 1;
    group.turns[0] = reinterpret_cast<Turn<R>*>(group.e + n + 1);
    group.turns[1] = group.turns[0] + n + 1;
    group.q = reinterpret_cast<S*>(group.turns[1] + n + 1);
    return group;
  }

  JAX_BATCHED_INLINE P& at(int64_t i, int64_t j) const { return a[i * pitch + j]; }

  // A becomes both triangles of the Hermitian matrix, scaled, from what is read of it. Returns where
  // that is finite; elsewhere A becomes zero.
  Mask prepare(bool upper, bool symmetrize, PowersOfTwo<R>* scales) const {
    S largest(R(0));
    Mask finite = ~Mask{};
    const auto look = [&](P x) JAX_BATCHED_INLINED {
      finite &= is_finite(x);
      largest = larger(largest, largest_part(x));
    };
    for (int64_t i = 0; i < n; ++i) {
      finite &= is_finite(real(at(i, i)));
      largest = larger(largest, absolute(real(at(i, i))));
      for (int64_t j = 0; j < i; ++j) {
        if (symmetrize || !upper) look(at(i, j));
        if (symmetrize || upper) look(at(j, i));
      }
    }
    *scales = normalising(select(finite, largest, S(R(1))));
    const P zero = broadcast(T(R(0)));
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        P x;
        if (symmetrize) {
          x = half_sum(scale(at(i, j), scales->by), scale(at(j, i), scales->by));
        } else {
          x = scale(upper ? conj(at(j, i)) : at(i, j), scales->by);
        }
        x = select(finite, x, zero);
        at(i, j) = x;
        at(j, i) = conj(x);
      }
      P x = zero;
      set_real(x, select(finite, real(at(i, i)) * scales->by, S(R(0))));
      at(i, i) = x;
    }
    return finite;
  }

  // H_k^H ... H_0^H A H_0 ... H_k becomes T, where H_k = I - tau_k v v^H, v_k+1 = 1, and v below
  // that is left in column k of A.
  //   x = tau A v, w = x - tau (x^H v) / 2 v, A -= v w^H + w v^H.
  void tridiagonalise() const {
    for (int64_t k = 0; k + 1 < n; ++k) {
      const auto h = reflection<T>(at(k + 1, k), [&](S by) { return tail(k, by); });
      d[k] = real(at(k, k));
      e[k] = real(h.beta);
      taus[k] = h.tau;
      v[k + 1] = broadcast(T(R(1)));
      for (int64_t i = k + 2; i < n; ++i) {
        v[i] = product(scale(at(i, k), h.scale), h.factor);
        at(i, k) = v[i];
      }
      P dot = broadcast(T(R(0)));
      each_row<2>(k + 1, [&](auto rows, int64_t i) JAX_BATCHED_INLINED {
        P sum[rows];
        unrolled<rows>([&](auto r) JAX_BATCHED_INLINED { sum[r] = broadcast(T(R(0))); });
        for (int64_t j = k + 1; j < n; ++j) {
          const P factor = -v[j];
          unrolled<rows>([&](auto r)
                             JAX_BATCHED_INLINED { sum[r] = sub_mul(sum[r], at(i + r, j), factor); });
        }
        unrolled<rows>([&](auto r) JAX_BATCHED_INLINED {
          w[i + r] = product(h.tau, sum[r]);
          dot = sub_mul(dot, conj(w[i + r]), v[i + r]);  // -x^H v
        });
      });
      const P half = scale(product(h.tau, dot), S(R(0.5)));
      for (int64_t i = k + 1; i < n; ++i) w[i] = sub_mul(w[i], -half, v[i]);
      each_row<2>(k + 1, [&](auto rows, int64_t i) JAX_BATCHED_INLINED {
        P one[rows], other[rows];
        unrolled<rows>([&](auto r) JAX_BATCHED_INLINED {
          one[r] = v[i + r];
          other[r] = w[i + r];
        });
        for (int64_t j = k + 1; j < n; ++j) {
          const P w_j = conj(w[j]), v_j = conj(v[j]);
          unrolled<rows>([&](auto r) JAX_BATCHED_INLINED {
            at(i + r, j) = sub_mul(sub_mul(at(i + r, j), one[r], w_j), other[r], v_j);
          });
        }
      });
    }
    d[n - 1] = real(at(n - 1, n - 1));
    e[n - 1] = S(R(0));
  }

  // Q = H_0 ... H_(n-2), from the last one on.
  void form() const {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) set_q(i, j, broadcast(T(R(i == j ? 1 : 0))));
    }
    constexpr int kColumns = kIsComplex<T> ? 4 : 8;
    for (int64_t k = n - 2; k >= 0; --k) {
      const P tau = taus[k];
      const auto tile = [&](auto size, int64_t j) JAX_BATCHED_INLINED {
        P sum[size];
        unrolled<size>([&](auto t) JAX_BATCHED_INLINED { sum[t] = get_q(k + 1, j + t); });
        for (int64_t i = k + 2; i < n; ++i) {
          const P factor = -conj(at(i, k));
          unrolled<size>([&](auto t)
                             JAX_BATCHED_INLINED { sum[t] = sub_mul(sum[t], factor, get_q(i, j + t)); });
        }
        unrolled<size>([&](auto t) JAX_BATCHED_INLINED {
          sum[t] = product(tau, sum[t]);
          set_q(k + 1, j + t, get_q(k + 1, j + t) - sum[t]);
        });
        for (int64_t i = k + 2; i < n; ++i) {
          const P factor = at(i, k);
          unrolled<size>([&](auto t) JAX_BATCHED_INLINED {
            set_q(i, j + t, sub_mul(get_q(i, j + t), factor, sum[t]));
          });
        }
      };
      int64_t j = k + 1;
      for (; j + kColumns <= n; j += kColumns) tile(std::integral_constant<int, kColumns>{}, j);
      for (; j < n; ++j) tile(std::integral_constant<int, 1>{}, j);
    }
  }

  // T becomes diagonal, and with kVectors Q takes its rotations. Returns how many off-diagonal
  // elements did not converge.
  template <bool kVectors>
  S diagonalise() const {
    const S zero(R(0));
    S negligible = zero;
    for (int64_t i = 0; i < n; ++i) negligible = larger(negligible, absolute(d[i]) + absolute(e[i]));
    negligible = negligible * S(std::numeric_limits<R>::epsilon());
    for (int64_t i = 0; i < n; ++i) e[i] = unless(absolute(e[i]).v <= negligible.v, e[i]);
    int64_t last[kLanes<T>];  // the row below a lane's last element that is not zero
    std::fill(last, last + kLanes<T>, n - 1);
    int64_t pending = 0, rows[2] = {0, 0};
    for (int64_t sweep = 0; sweep < kMaxSweeps * n; ++sweep) {
      S below = zero, above = zero, between = zero;
      int64_t end = 0;
      for (int lane = 0; lane < kLanes<T>; ++lane) {
        int64_t& row = last[lane];
        while (row > 0 && e[row - 1].v[lane] == R(0)) --row;
        end = std::max(end, row);
        const int64_t before = std::max<int64_t>(row - 1, 0);
        below.v[lane] = d[row].v[lane];
        above.v[lane] = d[before].v[lane];
        between.v[lane] = row > 0 ? e[before].v[lane] : R(0);
      }
      if (end == 0) break;
      sweep_down(shift(above, below, between), negligible, end, turns[pending]);
      if constexpr (kVectors) {
        rows[pending++] = end;
        if (pending == 2) {
          turn_rows(rows[0], rows[1]);
          pending = 0;
        }
      }
    }
    if constexpr (kVectors) {
      if (pending == 1) turn_rows(rows[0], 0);
    }
    S count = zero;
    for (int64_t i = 0; i < n; ++i) count = count + select(is_zero(e[i]), zero, S(R(1)));
    return count;
  }

 private:
  static JAX_BATCHED_INLINE void set_real(S& x, S value) { x = value; }
  static JAX_BATCHED_INLINE void set_real(Complex<S>& x, S value) { x.re = value; }

  // x, 0 where the mask says.
  static JAX_BATCHED_INLINE S unless(Mask mask, S x) {
    return typename S::Vector(~mask & Mask(x.v));
  }

  JAX_BATCHED_INLINE P get_q(int64_t i, int64_t j) const {
    if constexpr (kIsComplex<T>) {
      return {q[2 * i * pitch_q + j], q[(2 * i + 1) * pitch_q + j]};
    } else {
      return q[i * pitch_q + j];
    }
  }
  JAX_BATCHED_INLINE void set_q(int64_t i, int64_t j, P x) const {
    if constexpr (kIsComplex<T>) {
      q[2 * i * pitch_q + j] = x.re;
      q[(2 * i + 1) * pitch_q + j] = x.im;
    } else {
      q[i * pitch_q + j] = x;
    }
  }

  Tail<R> tail(int64_t k, S by) const {
    S sums[kSquareSums];
    for (S& sum : sums) sum = S(R(0));
    Mask nonzero = {};
    int64_t i = k + 2;
    const auto take = [&](S& sum, int64_t i) JAX_BATCHED_INLINED {
      nonzero |= ~is_zero(at(i, k));
      sum = minus_squares(sum, scale(at(i, k), by));
    };
    for (; i + kSquareSums <= n; i += kSquareSums) {
      unrolled<kSquareSums>([&](auto s) JAX_BATCHED_INLINED { take(sums[s], i + s); });
    }
    for (int s = 0; i < n; ++i, ++s) take(sums[s], i);
    return {-((sums[0] + sums[1]) + (sums[2] + sums[3])), nonzero};
  }

  // Calls f(count, i) for rows i, ..., i + count - 1 until all from `begin` on are done.
  template <int kRows, class F>
  JAX_BATCHED_INLINE void each_row(int64_t begin, F f) const {
    for (; begin + kRows <= n; begin += kRows) f(std::integral_constant<int, kRows>{}, begin);
    for (; begin < n; ++begin) f(std::integral_constant<int, 1>{}, begin);
  }

  // The eigenvalue of (above between; between below) that is nearer to `below`.
  static S shift(S above, S below, S between) {
    const S half = S(R(0.5)) * (above - below);
    const S squares = between * between;
    const S distance = absolute(half) + sqrt(half * half + squares);
    const S moved = copy_sign(squares / distance, half);
    return below - select(distance.v > S(kNothing<R>).v, moved, S(R(0)));
  }

  // One sweep of implicit QR over rows 0, ..., end.
  void sweep_down(S shift, S negligible, int64_t end, Turn<R>* turn) const {
    const S zero(R(0)), one(R(1)), two(R(2)), nothing(kNothing<R>);
    S c = one, s = one, p = zero;
    S d_i = d[0], e_i = e[0];
    S g = d_i - shift;
    Mask begins = ~Mask{};  // whether row i is the first of its block
    for (int64_t i = 0; i < end; ++i) {
      const S d_next = d[i + 1];
      const S f = s * e_i, b = c * e_i;
      const Mask identity = ~Mask(absolute(f).v >= nothing.v);
      const S r = sqrt(-sub_mul(-(g * g), f, f));
      const S inverse = one / r;
      c = select(identity, one, g * inverse);
      s = unless(identity, f * inverse);
      turn[i] = {c, s};
      if (i > 0) {
        const S above = select(identity, g, r);
        e[i - 1] = unless(begins | Mask(absolute(above).v <= negligible.v), above);
      }
      g = d_i - p;
      const S twice = -sub_mul(-((d_next - g) * s), two * c, b);
      p = s * twice;
      d[i] = g + p;
      g = sub_mul(-b, -c, twice);
      begins = is_zero(e_i);
      d_i = d_next;
      e_i = e[i + 1];
      if (i + 1 < end) {
        s = select(begins, one, s);
        g = select(begins, d_next - shift, g);
      }
    }
    d[end] = d_i - p;
    e[end - 1] = unless(begins | Mask(absolute(g).v <= negligible.v), g);
  }

  // Rows of Q times the rotations of two sweeps, over the columns 0, ..., ends.
  void turn_rows(int64_t first_end, int64_t second_end) const {
    // A sweep that is shorter ends with identities.
    const int64_t end = std::max(first_end, second_end);
    const Turn<R> identity{S(R(1)), S(R(0))};
    std::fill(turns[0] + first_end, turns[0] + end, identity);
    std::fill(turns[1] + second_end, turns[1] + end, identity);
    constexpr int kRows = 4;
    const int64_t rows = n * kParts<T>;
    int64_t i = 0;
    for (; i + kRows <= rows; i += kRows) turn_some<kRows>(q + i * pitch_q, end);
    for (; i < rows; ++i) turn_some<1>(q + i * pitch_q, end);
  }
  static JAX_BATCHED_INLINE void turned(const Turn<R>& by, S& x, S& y) {
    const S sum = sub_mul(by.c * x, -by.s, y);
    y = sub_mul(by.c * y, by.s, x);
    x = sum;
  }
  // The second sweep follows the first one by one column: q_i passes from one to the other in a
  // register.
  template <int kRows>
  JAX_BATCHED_INLINE void turn_some(S* row, int64_t end) const {
    S one[kRows], other[kRows];  // the column that a sweep takes along
    unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
      other[r] = row[r * pitch_q];
      one[r] = row[r * pitch_q + 1];
      turned(turns[0][0], other[r], one[r]);
    });
    for (int64_t i = 1; i < end; ++i) {
      const Turn<R> first = turns[0][i], second = turns[1][i - 1];
      unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
        S next = row[r * pitch_q + i + 1];
        turned(first, one[r], next);
        turned(second, other[r], one[r]);
        row[r * pitch_q + i - 1] = other[r];
        other[r] = one[r];
        one[r] = next;
      });
    }
    unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
      turned(turns[1][end - 1], other[r], one[r]);
      row[r * pitch_q + end - 1] = other[r];
      row[r * pitch_q + end] = one[r];
    });
  }
};

// Of each lane, where each of its n keys is in ascending order; of equal ones the first comes first.
template <class R>
void find_places(const Simd<R>* keys, int64_t n, int32_t* places) {
  using Mask = typename Simd<R>::Mask;
  constexpr int lanes = Simd<R>::kSize;
  for (int64_t i = 0; i < n; ++i) {
    Mask before{};
    for (int64_t j = 0; j < i; ++j) before -= Mask(keys[j].v <= keys[i].v);
    for (int64_t j = i + 1; j < n; ++j) before -= Mask(keys[j].v < keys[i].v);
    for (int lane = 0; lane < lanes; ++lane) {
      places[i * lanes + lane] = static_cast<int32_t>(before[lane]);
    }
  }
}

// Number i of each lane, of `count`, to the place that `places` says, `distance` numbers apart.
template <class R>
JAX_BATCHED_INLINE void scatter(Simd<R> x, const int32_t* places, int64_t distance,
                                R* const* to, int64_t offset) {
  for (int lane = 0; lane < Simd<R>::kSize; ++lane) {
    to[lane][offset + places[lane] * distance] = x.v[lane];
  }
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
