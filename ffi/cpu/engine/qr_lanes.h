// QR factorization by Householder reflections of a group of matrices, one per lane, and products
// with Q. At most kQrPanel reflections: what has more goes to qr_blocked.h, which does the same to
// panels of as many columns, with the same bits.
//
// Products with Q = H_0 ... H_(k-1) are Q C = C - V Y, where the rows of Y follow from W = V^H C
// and G = V^H V by substitution: the reflections one after the other give, from the last one to the
// first, y_l = tau_l (w_l - sum_{p>l} G_lp y_p), and for Q^H, from the first one to the last,
// y_l = conj(tau_l) (w_l - sum_{p<l} G_lp y_p). (So Y = T W with the T of the compact WY form,
// which need not be there.) Forming Q, C is the identity: W is V^H itself, and Y a triangle.
#pragma once

#include <algorithm>

#include "ffi/cpu/engine/substitution_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

inline constexpr int64_t kQrPanel = 32;

// Columns of a tile, which stays in registers.
template <class T>
inline constexpr int kQrColumns = kIsComplex<T> ? 4 : 8;

template <class R>
JAX_BATCHED_INLINE R minus_squares(R sum, R x) {
  return sub_mul(sum, x, x);
}
template <class R>
JAX_BATCHED_INLINE R minus_squares(R sum, Complex<R> x) {
  return sub_mul(sub_mul(sum, x.re, x.re), x.im, x.im);
}

// Where sums of squares neither overflow nor lose what they need of small terms; and the powers of
// two that bring a column there.
template <class R>
struct SquareRange {
  static constexpr bool kIsFloat = sizeof(R) == sizeof(float);
  static constexpr R kSmallest = kIsFloat ? R(0x1p-100) : R(0x1p-950);
  static constexpr R kLargest = kIsFloat ? R(0x1p+120) : R(0x1p+1000);
  static constexpr R kUp = kIsFloat ? R(0x1p+100) : R(0x1p+800);
  static constexpr R kDown = kIsFloat ? R(0x1p-80) : R(0x1p-600);
};

// What is below the pivot of a column.
template <class R>
struct Tail {
  Simd<R> squares;                 // of the numbers times the scale
  typename Simd<R>::Mask nonzero;  // any of them
};

// H with H^H (alpha, x) = (beta, 0): v = (1, scale x factor).
template <class T>
struct Reflection {
  using R = Real<T>;
  Lanes<T> beta;
  Lanes<T> tau;
  Lanes<T> factor;
  Simd<R> scale;
};

// As LAPACK's larfg: beta = -sign(re alpha) ||(alpha, x)||, tau = (beta - alpha) / beta, and v =
// x / (alpha - beta); H is I if x and the imaginary part of alpha are zero. tail(scale) is the Tail
// of x.
template <class T, class F>
JAX_BATCHED_INLINE Reflection<T> reflection(Lanes<T> alpha, F tail) {
  using R = Real<T>;
  using Range = SquareRange<R>;
  using Mask = typename Simd<R>::Mask;
  using Vector = typename Simd<R>::Vector;
  const Simd<R> zero(R(0)), one(R(1));
  Reflection<T> h;
  h.scale = one;
  Tail<R> x = tail(h.scale);
  Simd<R> squares = -minus_squares(-x.squares, alpha);
  Lanes<T> scaled = alpha;
  const Mask small = squares.v<Range::kSmallest, large = squares.v> Range::kLargest;
  if (any(small | large)) {
    h.scale = select(small, Simd<R>(Range::kUp), select(large, Simd<R>(Range::kDown), one));
    x = tail(h.scale);
    scaled = scale(alpha, h.scale);
    squares = -minus_squares(-x.squares, scaled);
  }
  constexpr auto kMagnitude = std::numeric_limits<typename VectorOf<R>::Bits>::max();
  const Simd<R> norm = sqrt(squares);
  const Mask other_sign = ~Mask(real(alpha).v) & (Mask{} + ~kMagnitude);
  const Simd<R> beta = Vector(Mask(norm.v) | other_sign);
  Mask identity = ~x.nonzero;
  if constexpr (kIsComplex<T>) {
    identity &= is_zero(alpha.im);
    const Lanes<T> pivot{scaled.re - beta, scaled.im};
    h.tau = {select(identity, zero, (beta - scaled.re) / beta),
             select(identity, zero, -scaled.im / beta)};
    h.factor = select(identity, Lanes<T>{one, zero}, divide(Lanes<T>{one, zero}, pivot));
    h.beta = select(identity, alpha, Lanes<T>{beta / h.scale, zero});
  } else {
    h.tau = select(identity, zero, (beta - scaled) / beta);
    h.factor = select(identity, one, one / (scaled - beta));
    h.beta = select(identity, alpha, beta / h.scale);
  }
  return h;
}

template <class T>
JAX_BATCHED_INLINE typename Simd<Real<T>>::Mask is_finite(const Reflection<T>& h) {
  return is_finite(h.beta) & is_finite(h.tau);
}

// Partial sums of a column's squares, so that they do not wait for one another.
inline constexpr int kSquareSums = 4;

// A group in scratch. Rows are as far apart as those of GroupMatrix.
template <class T>
struct QrGroup {
  using R = Real<T>;
  using P = Lanes<T>;
  using Mask = typename Simd<R>::Mask;

  int64_t m, n, k;
  int64_t columns;  // of C, or of Q
  int64_t pitch;    // of A
  int64_t pitch_c;  // of C and Y
  P* a;             // m x n: R and the v_l
  P* taus;          // k
  P* c;             // m x columns
  P* g;             // k x k: the strict lower triangle of V^H V
  P* y;             // k x columns

  static int64_t bytes(int64_t m, int64_t n, int64_t k, int64_t columns) {
    const int64_t in_c = GroupMatrix<T>::pitch(columns), in_a = GroupMatrix<T>::pitch(n);
    return (m * in_a + k + m * in_c + k * k + k * in_c) * sizeof(P);
  }
  static QrGroup in(void* scratch, int64_t m, int64_t n, int64_t k, int64_t columns) {
    QrGroup group;
    group.m = m;
    group.n = n;
    group.k = k;
    group.columns = columns;
    group.pitch = GroupMatrix<T>::pitch(n);
    group.pitch_c = GroupMatrix<T>::pitch(columns);
    group.a = static_cast<P*>(scratch);
    group.taus = group.a + m * group.pitch;
    group.c = group.taus + k;
    group.g = group.c + m * group.pitch_c;
    group.y = group.g + k * k;
    return group;
  }

  JAX_BATCHED_INLINE P& v(int64_t i, int64_t l) const { return a[i * pitch + l]; }

  // A becomes R and the v_l. Returns where all of these are finite.
  Mask factor() const {
    Mask finite = ~Mask{};
    for (int64_t step = 0; step < k; ++step) {
      const auto h = reflection<T>(v(step, step), [&](Simd<R> by) { return tail(step, by); });
      finite &= is_finite(h);
      taus[step] = h.tau;
      v(step, step) = h.beta;
      for (int64_t i = step + 1; i < m; ++i) {
        v(i, step) = product(scale(v(i, step), h.scale), h.factor);
      }
      each_tile<kQrColumns<T>>(
          step + 1, n, [&](auto size, int64_t j) JAX_BATCHED_INLINED { reflect<size>(step, j); });
    }
    return finite;
  }

  // C becomes the first columns of Q.
  void form() const {
    gram();
    for (int64_t l = k - 1; l >= 0; --l) {
      P* row = y + l * pitch_c;
      std::fill(row, row + l, broadcast(T(R(0))));
      each_tile<kQrColumns<T>>(l, columns, [&](auto size, int64_t j) JAX_BATCHED_INLINED {
        P sum[size];
        unrolled<size>([&](auto t) JAX_BATCHED_INLINED {
          sum[t] = j + t == l ? broadcast(T(R(1))) : conj(v(j + t, l));
        });
        for (int64_t p = l + 1; p < std::min<int64_t>(j + size, k); ++p) {
          const P factor = conj(g[p * k + l]);
          const P* other = y + p * pitch_c + j;
          unrolled<size>([&](auto t)
                             JAX_BATCHED_INLINED { sum[t] = sub_mul(sum[t], factor, other[t]); });
        }
        unrolled<size>([&](auto t) JAX_BATCHED_INLINED { row[j + t] = product(taus[l], sum[t]); });
      });
    }
    for (int64_t i = 0; i < m; ++i) {
      P* row = c + i * pitch_c;
      std::fill(row, row + columns, broadcast(T(R(0))));
      if (i < columns) row[i] = broadcast(T(R(1)));
    }
    subtract_product(/*triangle=*/true);
  }

  // C becomes Q C or Q^H C.
  void multiply(bool adjoint) const {
    gram();
    const auto tile = [&](auto size, int64_t j) JAX_BATCHED_INLINED {
      for (int64_t l = 0; l < k; ++l) {
        P sum[size];
        minus_products<size>(l, c + j, pitch_c, sum);
        unrolled<size>([&](auto t) JAX_BATCHED_INLINED { y[l * pitch_c + j + t] = -sum[t]; });
      }
      for (int64_t step = 0; step < k; ++step) {
        const int64_t l = adjoint ? step : k - 1 - step;
        P* row = y + l * pitch_c + j;
        const P tau = adjoint ? conj(taus[l]) : taus[l];
        for (int64_t p = adjoint ? 0 : l + 1; p < (adjoint ? l : k); ++p) {
          const P factor = adjoint ? g[l * k + p] : conj(g[p * k + l]);
          unrolled<size>([&](auto t) JAX_BATCHED_INLINED {
            row[t] = sub_mul(row[t], factor, y[p * pitch_c + j + t]);
          });
        }
        unrolled<size>([&](auto t) JAX_BATCHED_INLINED { row[t] = product(tau, row[t]); });
      }
    };
    each_tile<kQrColumns<T>>(0, columns, tile);
    subtract_product(/*triangle=*/false);
  }

 private:
  Tail<R> tail(int64_t step, Simd<R> by) const {
    Simd<R> sums[kSquareSums];
    for (Simd<R>& sum : sums) sum = Simd<R>(R(0));
    Mask nonzero = {};
    const auto take = [&](Simd<R>& sum, int64_t i) JAX_BATCHED_INLINED {
      const P x = scale(v(i, step), by);
      nonzero |= ~is_zero(v(i, step));
      sum = minus_squares(sum, x);
    };
    int64_t i = step + 1;
    for (; i + kSquareSums <= m; i += kSquareSums) {
      unrolled<kSquareSums>([&](auto s) JAX_BATCHED_INLINED { take(sums[s], i + s); });
    }
    for (int s = 0; i < m; ++i, ++s) take(sums[s], i);
    return {-((sums[0] + sums[1]) + (sums[2] + sums[3])), nonzero};
  }

  // Calls f(size, j) for columns j, ..., j + size - 1 until all of begin <= j < end are done.
  template <int kSize, class F>
  static JAX_BATCHED_INLINE void each_tile(int64_t begin, int64_t end, F f) {
    for (; begin + kSize <= end; begin += kSize) f(std::integral_constant<int, kSize>{}, begin);
    if constexpr (kSize > 1) each_tile<kSize / 2>(begin, end, f);
  }

  // sum[t] = -(v_l^H C)_t of kSize columns of some C.
  template <int kSize>
  JAX_BATCHED_INLINE void minus_products(int64_t l, const P* from, int64_t distance, P* sum) const {
    const P* row = from + l * distance;
    unrolled<kSize>([&](auto t) JAX_BATCHED_INLINED { sum[t] = -row[t]; });
    for (int64_t i = l + 1; i < m; ++i) {
      row += distance;
      const P factor = conj(v(i, l));
      unrolled<kSize>([&](auto t)
                          JAX_BATCHED_INLINED { sum[t] = sub_mul(sum[t], factor, row[t]); });
    }
  }

  // Columns j, ... of A, reflected: less v w^T with w = conj(tau) v^H A.
  template <int kSize>
  JAX_BATCHED_INLINE void reflect(int64_t step, int64_t j) const {
    P w[kSize];
    minus_products<kSize>(step, a + j, pitch, w);
    const P tau = conj(taus[step]);
    unrolled<kSize>([&](auto t) JAX_BATCHED_INLINED { w[t] = -product(tau, w[t]); });
    P* row = a + step * pitch + j;
    unrolled<kSize>([&](auto t) JAX_BATCHED_INLINED { row[t] = row[t] - w[t]; });
    for (int64_t i = step + 1; i < m; ++i) {
      row += pitch;
      const P factor = v(i, step);
      unrolled<kSize>([&](auto t) JAX_BATCHED_INLINED { row[t] = sub_mul(row[t], factor, w[t]); });
    }
  }

  void gram() const {
    for (int64_t l = 1; l < k; ++l) {
      each_tile<kQrColumns<T>>(0, l, [&](auto size, int64_t p) JAX_BATCHED_INLINED {
        P sum[size];
        minus_products<size>(l, a + p, pitch, sum);
        unrolled<size>([&](auto t) JAX_BATCHED_INLINED { g[l * k + p + t] = -sum[t]; });
      });
    }
  }

  // C -= V Y; a triangle's Y is zero below the diagonal.
  void subtract_product(bool triangle) const {
    constexpr int kRows = kIsComplex<T> ? 1 : 2;
    const auto tile = [&](auto rows, auto size, int64_t i, int64_t j) JAX_BATCHED_INLINED {
      P sum[rows][size];
      unrolled<rows>([&](auto r) JAX_BATCHED_INLINED {
        unrolled<size>([&](auto t)
                           JAX_BATCHED_INLINED { sum[r][t] = c[(i + r) * pitch_c + j + t]; });
      });
      const int64_t end = triangle ? std::min<int64_t>(k, j + size) : k;
      int64_t l = 0;
      for (; l < std::min(i, end); ++l) {
        const P* row = y + l * pitch_c + j;
        unrolled<rows>([&](auto r) JAX_BATCHED_INLINED {
          const P factor = v(i + r, l);
          unrolled<size>(
              [&](auto t) JAX_BATCHED_INLINED { sum[r][t] = sub_mul(sum[r][t], factor, row[t]); });
        });
      }
      unrolled<rows>([&](auto r) JAX_BATCHED_INLINED {  // the corner of V, with ones in it
        for (int64_t p = l; p < std::min<int64_t>(i + r + 1, end); ++p) {
          const P factor = p == i + r ? broadcast(T(R(1))) : v(i + r, p);
          unrolled<size>([&](auto t) JAX_BATCHED_INLINED {
            sum[r][t] = sub_mul(sum[r][t], factor, y[p * pitch_c + j + t]);
          });
        }
      });
      unrolled<rows>([&](auto r) JAX_BATCHED_INLINED {
        unrolled<size>([&](auto t)
                           JAX_BATCHED_INLINED { c[(i + r) * pitch_c + j + t] = sum[r][t]; });
      });
    };
    each_tile<4>(0, columns, [&](auto size, int64_t j) JAX_BATCHED_INLINED {
      int64_t i = 0;
      for (; i + kRows <= m; i += kRows) tile(std::integral_constant<int, kRows>{}, size, i, j);
      for (; i < m; ++i) tile(std::integral_constant<int, 1>{}, size, i, j);
    });
  }
};

// NaN in the lanes that are not finite.
template <class T>
void spoil(typename Simd<Real<T>>::Mask finite, Lanes<T>* entries, int64_t count) {
  for (int64_t e = 0; e < count; ++e) {
    entries[e] = select(finite, entries[e], broadcast(quiet_nan<T>()));
  }
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
