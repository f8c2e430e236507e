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
  const Mask low = by<kOne, high = by> kSum - kOne;
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

// Rotations of a sweep: columns i and i + 1 become c x + s y and c y - s x.
template <class R>
struct Turn {
  Simd<R> c, s;
};

// A square matrix whose columns are turned. Row i of it is a row here, or if it is complex two, of
// real parts and of the others: what is real treats both alike.
template <class T>
struct TurningRows {
  using R = Real<T>;
  using P = Lanes<T>;
  using S = Simd<R>;

  S* at;
  int64_t n;
  int64_t pitch() const { return n | 1; }
  int64_t rows() const { return n * kParts<T>; }
  static int64_t bytes(int64_t n) {
    return static_cast<int64_t>(sizeof(S)) * n * kParts<T> * (n | 1);
  }

  JAX_BATCHED_INLINE P get(int64_t i, int64_t j) const {
    if constexpr (kIsComplex<T>) {
      return {at[2 * i * pitch() + j], at[(2 * i + 1) * pitch() + j]};
    } else {
      return at[i * pitch() + j];
    }
  }
  JAX_BATCHED_INLINE void set(int64_t i, int64_t j, P x) const {
    if constexpr (kIsComplex<T>) {
      at[2 * i * pitch() + j] = x.re;
      at[(2 * i + 1) * pitch() + j] = x.im;
    } else {
      at[i * pitch() + j] = x;
    }
  }

  // H_0 ... H_(n-1-first), from the last one on: H_k = I - tau_k v v^H, where v_i is 1 for
  // i = first + k and vector(i, k) below.
  template <class F>
  void form(int64_t first, const P* taus, F vector) const {
    std::fill(at, at + rows() * pitch(), S(R(0)));
    for (int64_t i = 0; i < n; ++i) set(i, i, broadcast(T(R(1))));
    for (int64_t k = n - 1 - first; k >= 0; --k) {
      const int64_t top = first + k;
      const auto tile = [&](auto size, int64_t j) JAX_BATCHED_INLINED {
        P sum[size];
        unrolled<size>([&](auto t) JAX_BATCHED_INLINED { sum[t] = get(top, j + t); });
        for (int64_t i = top + 1; i < n; ++i) {
          const P factor = -conj(vector(i, k));
          unrolled<size>(
              [&](auto t) JAX_BATCHED_INLINED { sum[t] = sub_mul(sum[t], factor, get(i, j + t)); });
        }
        unrolled<size>([&](auto t) JAX_BATCHED_INLINED {
          sum[t] = product(taus[k], sum[t]);
          set(top, j + t, get(top, j + t) - sum[t]);
        });
        for (int64_t i = top + 1; i < n; ++i) {
          const P factor = vector(i, k);
          unrolled<size>([&](auto t) JAX_BATCHED_INLINED {
            set(i, j + t, sub_mul(get(i, j + t), factor, sum[t]));
          });
        }
      };
      constexpr int kColumns = kIsComplex<T> ? 4 : 8;
      int64_t j = top;
      for (; j + kColumns <= n; j += kColumns) tile(std::integral_constant<int, kColumns>{}, j);
      for (; j < n; ++j) tile(std::integral_constant<int, 1>{}, j);
    }
  }

  // Times the rotations of two sweeps, both over the columns 0, ..., end.
  void turn(const Turn<R>* first, const Turn<R>* second, int64_t end) const {
    constexpr int kRows = 4;
    int64_t i = 0;
    for (; i + kRows <= rows(); i += kRows) turn_some<kRows>(at + i * pitch(), first, second, end);
    for (; i < rows(); ++i) turn_some<1>(at + i * pitch(), first, second, end);
  }

 private:
  static JAX_BATCHED_INLINE void turned(const Turn<R>& by, S& x, S& y) {
    const S sum = sub_mul(by.c * x, -by.s, y);
    y = sub_mul(by.c * y, by.s, x);
    x = sum;
  }
  // The second sweep follows the first one by one column: column i passes from one to the other in
  // a register.
  template <int kRows>
  JAX_BATCHED_INLINE void turn_some(S* row, const Turn<R>* first, const Turn<R>* second,
                                    int64_t end) const {
    S one[kRows], other[kRows];  // the columns that the sweeps take along
    unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
      other[r] = row[r * pitch()];
      one[r] = row[r * pitch() + 1];
      turned(first[0], other[r], one[r]);
    });
    for (int64_t i = 1; i < end; ++i) {
      const Turn<R> leading = first[i], trailing = second[i - 1];
      unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
        S next = row[r * pitch() + i + 1];
        turned(leading, one[r], next);
        turned(trailing, other[r], one[r]);
        row[r * pitch() + i - 1] = other[r];
        other[r] = one[r];
        one[r] = next;
      });
    }
    unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
      turned(second[end - 1], other[r], one[r]);
      row[r * pitch() + end - 1] = other[r];
      row[r * pitch() + end] = one[r];
    });
  }
};

// Two sweeps of rotations, which are applied together.
template <class T>
struct PairOfSweeps {
  using R = Real<T>;

  Turn<R>* turns[2];
  int64_t ends[2] = {0, 0};
  int count = 0;

  JAX_BATCHED_INLINE Turn<R>* next() const { return turns[count]; }
  // The next sweep is there, down to row `end`.
  void take(const TurningRows<T>& rows, int64_t end) {
    ends[count++] = end;
    if (count == 2) apply(rows);
  }
  // What is there: a sweep that is shorter, or missing, is continued by identities.
  void apply(const TurningRows<T>& rows) {
    if (count == 0) return;
    const int64_t end = std::max(ends[0], ends[1]);
    const Turn<R> identity{Simd<R>(R(1)), Simd<R>(R(0))};
    for (int i : {0, 1}) std::fill(turns[i] + ends[i], turns[i] + end, identity);
    rows.turn(turns[0], turns[1], end);
    ends[0] = ends[1] = 0;
    count = 0;
  }
};

// The rotation c, s = t c with which (c s; -s c) as J makes J^T (p y; y q) J diagonal, p - t y and
// q + t y; the identity where it is not needed.
template <class R>
struct JacobiRotation {
  Simd<R> c, s, t;

  JAX_BATCHED_INLINE JacobiRotation(typename Simd<R>::Mask needed, Simd<R> difference, Simd<R> y) {
    const Simd<R> one(R(1)), twice = y + y;
    const Simd<R> root = sqrt(-sub_mul(-(difference * difference), twice, twice));
    const Simd<R> tangent = twice / (difference + copy_sign(root, difference));
    t = unless(~needed, tangent);
    c = one / sqrt(-sub_mul(-one, t, t));
    s = t * c;
  }
  JAX_BATCHED_INLINE void apply(Simd<R>& x, Simd<R>& y) const {
    const Simd<R> former = x;
    x = sub_mul(c * x, s, y);
    y = sub_mul(c * y, -s, former);
  }
};

// Sweeps of Jacobi's method, at most.
inline constexpr int kMaxJacobiSweeps = 30;

// Sweeps for each row, at most.
inline constexpr int64_t kMaxSweeps = 30;

// x, 0 where the mask says.
template <class R>
JAX_BATCHED_INLINE Simd<R> unless(typename Simd<R>::Mask mask, Simd<R> x) {
  return typename Simd<R>::Vector(~mask & typename Simd<R>::Mask(x.v));
}

// The rotation that takes (x, y) to (r, 0), which is returned; the identity where y is nothing.
template <class R>
JAX_BATCHED_INLINE Simd<R> rotation(Simd<R> x, Simd<R> y, Turn<R>* by) {
  using Mask = typename Simd<R>::Mask;
  const Mask identity = ~Mask(absolute(y).v >= Simd<R>(kNothing<R>).v);
  const Simd<R> one(R(1));
  const Simd<R> r = sqrt(-sub_mul(-(x * x), y, y));
  const Simd<R> inverse = one / r;
  by->c = select(identity, one, x * inverse);
  by->s = unless(identity, y * inverse);
  return select(identity, x, r);
}

// Of each lane, the row below its last number that is not zero, and the last one of all lanes.
template <class R>
struct LastRows {
  int64_t row[Simd<R>::kSize];
  int64_t end = 0;

  explicit LastRows(int64_t n) { std::fill(row, row + Simd<R>::kSize, n - 1); }
  void update(const Simd<R>* e) {
    end = 0;
    for (int lane = 0; lane < Simd<R>::kSize; ++lane) {
      while (row[lane] > 0 && e[row[lane] - 1].v[lane] == R(0)) --row[lane];
      end = std::max(end, row[lane]);
    }
  }
  // What a lane has `before` rows before its last one, 0 beyond the first.
  Simd<R> of(const Simd<R>* numbers, int64_t before) const {
    Simd<R> found(R(0));
    for (int lane = 0; lane < Simd<R>::kSize; ++lane) {
      if (row[lane] >= before) found.v[lane] = numbers[row[lane] - before].v[lane];
    }
    return found;
  }
};

// How many of the n numbers are not zero.
template <class R>
Simd<R> count_nonzero(const Simd<R>* numbers, int64_t n) {
  Simd<R> count(R(0));
  for (int64_t i = 0; i < n; ++i) count = count + unless(is_zero(numbers[i]), Simd<R>(R(1)));
  return count;
}

template <class T>
struct EighGroup {
  using R = Real<T>;
  using P = Lanes<T>;
  using S = Simd<R>;
  using Mask = typename S::Mask;

  int64_t n;
  int64_t pitch;  // of A
  P* a;           // n x n: below the subdiagonal the vectors of reflections
  P* taus;
  P* v;
  P* w;
  S* d;  // n: the diagonal of T
  S* e;  // n: e_i is right of and below d_i
  TurningRows<T> q;
  PairOfSweeps<T> sweeps;

  static int64_t bytes(int64_t n) {
    return static_cast<int64_t>(sizeof(P)) * n * (GroupMatrix<T>::pitch(n) + 3) +
           static_cast<int64_t>(sizeof(S)) * 6 * n + TurningRows<T>::bytes(n);
  }
  static EighGroup in(void* scratch, int64_t n) {
    EighGroup group;
    group.n = n;
    group.pitch = GroupMatrix<T>::pitch(n);
    group.a = static_cast<P*>(scratch);
    group.taus = group.a + n * group.pitch;
    group.v = group.taus + n;
    group.w = group.v + n;
    group.d = numbers(group.w + n);
    group.e = group.d + n;
    group.sweeps.turns[0] = reinterpret_cast<Turn<R>*>(group.e + n);
    group.sweeps.turns[1] = group.sweeps.turns[0] + n;
    group.q = {reinterpret_cast<S*>(group.sweeps.turns[1] + n), n};
    return group;
  }

  JAX_BATCHED_INLINE P& at(int64_t i, int64_t j) const { return a[i * pitch + j]; }

  // A, prepared, becomes d and with kVectors Q. Returns how many off-diagonal elements did not
  // converge.
  template <bool kVectors>
  S decompose() {
    if constexpr (!kIsComplex<T>) {
      if (n == 2) return rotate<2, kVectors>();
      if (n == 3) return rotate<3, kVectors>();
    }
    tridiagonalise();
    if constexpr (kVectors) form();
    return diagonalise<kVectors>();
  }

  // A becomes both triangles of the Hermitian matrix, scaled, from what is read of it. Returns
  // where that is finite; elsewhere A becomes zero.
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
          unrolled<rows>(
              [&](auto r) JAX_BATCHED_INLINED { sum[r] = sub_mul(sum[r], at(i + r, j), factor); });
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

  // Jacobi's method for the smallest real matrices, in registers, in place of what follows.
  template <int kSize, bool kVectors>
  S rotate() const {
    S x[kSize][kSize], rows[kSize][kSize];  // the lower triangle; Q
    unrolled<kSize>([&](auto i) JAX_BATCHED_INLINED {
      unrolled<kSize>([&](auto j) JAX_BATCHED_INLINED {
        x[i][j] = at(i, j);
        rows[i][j] = S(R(i == j ? 1 : 0));
      });
    });
    const S negligible(std::numeric_limits<R>::epsilon() / 8);
    S count;
    for (int sweep = 0;; ++sweep) {
      count = S(R(0));
      unrolled<kSize>([&](auto i) JAX_BATCHED_INLINED {
        unrolled<i>([&](auto j) JAX_BATCHED_INLINED {
          count = count + unless(absolute(x[i][j]).v <= negligible.v, S(R(1)));
        });
      });
      if (sweep == kMaxJacobiSweeps || !any(~is_zero(count))) break;
      unrolled<kSize>([&](auto i) JAX_BATCHED_INLINED {
        unrolled<i>([&](auto j) JAX_BATCHED_INLINED {
          const S y = x[i][j];
          const Mask needed = absolute(y).v > negligible.v;
          const JacobiRotation<R> by(needed, x[i][i] - x[j][j], y);
          x[j][j] = sub_mul(x[j][j], by.t, y);
          x[i][i] = sub_mul(x[i][i], -by.t, y);
          x[i][j] = unless(needed, y);
          unrolled<kSize>([&](auto k) JAX_BATCHED_INLINED {
            if constexpr (k != i && k != j) {
              by.apply(k > j ? x[k][j] : x[j][k], k > i ? x[k][i] : x[i][k]);
            }
            if constexpr (kVectors) by.apply(rows[k][j], rows[k][i]);
          });
        });
      });
    }
    unrolled<kSize>([&](auto i) JAX_BATCHED_INLINED {
      d[i] = x[i][i];
      if constexpr (kVectors) {
        unrolled<kSize>([&](auto j) JAX_BATCHED_INLINED { q.at[i * q.pitch() + j] = rows[i][j]; });
      }
    });
    return count;
  }

  // Q = H_0 ... H_(n-2).
  void form() const {
    q.form(1, taus, [this](int64_t i, int64_t k) JAX_BATCHED_INLINED { return at(i, k); });
  }

  // T becomes diagonal, and with kVectors Q takes its rotations. Returns how many off-diagonal
  // elements did not converge.
  template <bool kVectors>
  S diagonalise() {
    S negligible(R(0));
    for (int64_t i = 0; i < n; ++i)
      negligible = larger(negligible, absolute(d[i]) + absolute(e[i]));
    negligible = negligible * S(std::numeric_limits<R>::epsilon());
    for (int64_t i = 0; i < n; ++i) e[i] = unless(absolute(e[i]).v <= negligible.v, e[i]);
    LastRows<R> last(n);
    for (int64_t sweep = 0; sweep < kMaxSweeps * n; ++sweep) {
      last.update(e);
      if (last.end == 0) break;
      sweep_down(shift(last.of(d, 1), last.of(d, 0), last.of(e, 1)), negligible, last.end,
                 sweeps.next());
      if constexpr (kVectors) sweeps.take(q, last.end);
    }
    if constexpr (kVectors) sweeps.apply(q);
    return count_nonzero(e, n);
  }

 private:
  static JAX_BATCHED_INLINE void set_real(S& x, S value) { x = value; }
  static JAX_BATCHED_INLINE void set_real(Complex<S>& x, S value) { x.re = value; }

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
  void sweep_down(S shift, S negligible, int64_t end, Turn<R>* turns) const {
    const S one(R(1)), two(R(2));
    S c = one, s = one, p(R(0));
    S d_i = d[0], e_i = e[0];
    S g = d_i - shift;
    Mask begins = ~Mask{};  // whether row i is the first of its block
    for (int64_t i = 0; i < end; ++i) {
      const S d_next = d[i + 1], b = c * e_i;
      const S above = rotation(g, s * e_i, &turns[i]);
      c = turns[i].c;
      s = turns[i].s;
      if (i > 0) e[i - 1] = unless(begins | Mask(absolute(above).v <= negligible.v), above);
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
};

// Of each lane, where each of its n keys is in ascending order; of equal ones the first comes
// first.
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
JAX_BATCHED_INLINE void scatter(Simd<R> x, const int32_t* places, int64_t distance, R* const* to,
                                int64_t offset) {
  for (int lane = 0; lane < Simd<R>::kSize; ++lane) {
    to[lane][offset + places[lane] * distance] = x.v[lane];
  }
}

// The kernel of an operation that has groups alone, of any number of matrices: Of<T> in scratch,
// and f(p, group, places, m, end), which computes the matrices m, ... of a group.
template <class P, template <class> class Of, class F>
Kernel<P> kernel_of_groups(F) {
  const auto run = [](const P& p, int64_t begin, int64_t end, void* scratch) {
    with_element_type(p.dtype, [&](auto t) {
      using T = decltype(t);
      auto group = Of<T>::in(scratch, p.n);
      auto* places = reinterpret_cast<int32_t*>(static_cast<char*>(scratch) + group.bytes(p.n));
      for (int64_t m = begin; m < end; m += kLanes<T>) F{}(p, group, places, m, end);
    });
  };
  const auto scratch_bytes = [](const P& p) {
    return with_element_type(p.dtype, [&](auto t) -> size_t {
      using T = decltype(t);
      return Of<T>::bytes(p.n) + p.n * kLanes<T> * static_cast<int64_t>(sizeof(int32_t));
    });
  };
  const auto group = [](const P& p) {
    return with_element_type(p.dtype, [](auto t) { return Group{kLanes<decltype(t)>, 1}; });
  };
  return {run, scratch_bytes, group};
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
