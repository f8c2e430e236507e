// Singular value decompositions of a group of square matrices, one per lane, by one-sided Jacobi.
//
// Rotations of two rows after the other, U^H A, make the rows orthogonal: U^H A = diag(s) V^H. The
// rows of U^H, the identity at first, lie behind those of A and turn with them. Rows that are
// orthogonal in a lane stay as they are there, to the bit.
#pragma once

#include "ffi/cpu/engine/eigh_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class T>
struct SvdGroup {
  using R = Real<T>;
  using P = Lanes<T>;
  using S = Simd<R>;
  using Mask = typename S::Mask;

  static constexpr bool kIsFloat = sizeof(R) == sizeof(float);
  static constexpr int kMaxSweeps = 40;
  static constexpr R kZeroSquares = kIsFloat ? R(1e-30) : R(1e-250);  // of a row that is zero
  // Sums of squares below kSmall are multiplied with kUp where their squares are needed.
  static constexpr R kSmall = kIsFloat ? R(0x1p-30) : R(0x1p-300);
  static constexpr R kUp = kIsFloat ? R(0x1p60) : R(0x1p500);

  int64_t n;
  int64_t pitch;  // of rows of A and U^H
  P* a;
  S* minus;  // n: -s

  static int64_t row_pitch(int64_t n) { return 2 * n | 1; }
  static int64_t bytes(int64_t n) {
    return static_cast<int64_t>(sizeof(P)) * n * row_pitch(n) +
           static_cast<int64_t>(sizeof(S)) * n;
  }
  static SvdGroup in(void* scratch, int64_t n) {
    SvdGroup group;
    group.n = n;
    group.pitch = row_pitch(n);
    group.a = static_cast<P*>(scratch);
    group.minus = numbers(group.a + n * group.pitch);
    return group;
  }

  JAX_BATCHED_INLINE P* row(int64_t i) const { return a + i * pitch; }

  // Scales A and sets U^H to the identity. Returns where A is finite; elsewhere it becomes zero.
  Mask prepare(bool vectors, PowersOfTwo<R>* scales) const {
    S largest(R(0));
    Mask finite = ~Mask{};
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        finite &= is_finite(row(i)[j]);
        largest = larger(largest, largest_part(row(i)[j]));
      }
    }
    *scales = normalising(select(finite, largest, S(R(1))));
    const P zero = broadcast(T(R(0)));
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        row(i)[j] = select(finite, scale(row(i)[j], scales->by), zero);
        if (vectors) row(i)[n + j] = broadcast(T(R(i == j ? 1 : 0)));
      }
    }
    return finite;
  }

  // Returns how many pairs of rows the last sweep turned: 0 where they are orthogonal.
  S orthogonalise(bool vectors) const {
    S turns(R(0));
    for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
      turns = S(R(0));
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = i + 1; j < n; ++j) {
          const Mask needed = turn(row(i), row(j), vectors ? 2 * n : n);
          turns = turns + select(needed, S(R(1)), S(R(0)));
        }
      }
      if (!any(~is_zero(turns))) break;
    }
    return turns;
  }

  // The rows of A become those of V^H. Returns how many are zero.
  S normalise(bool vectors) const {
    S zeros(R(0));
    for (int64_t i = 0; i < n; ++i) {
      S squares(R(0));
      for (int64_t k = 0; k < n; ++k) squares = minus_squares(squares, row(i)[k]);
      squares = -squares;
      const Mask is_nothing = ~Mask(squares.v > S(kZeroSquares).v);
      const S norm = sqrt(squares);
      zeros = zeros + select(is_nothing, S(R(1)), S(R(0)));
      minus[i] = select(is_nothing, S(R(0)), -norm);
      if (!vectors) continue;
      const S inverse = select(is_nothing, S(R(0)), S(R(1)) / norm);
      for (int64_t k = 0; k < n; ++k) row(i)[k] = scale(row(i)[k], inverse);
    }
    return zeros;
  }

 private:
  // Turns rows x and y, of `count` numbers, where the first n of them are not orthogonal, which is
  // returned: with g = y^H x and tan(2 t) = 2 |g| / (y^H y - x^H x), x' = c x - s y and
  // y' = conj(s) x + c y, where c = cos(t) and s = sin(t) g / |g|. With r = s / (1 + c), so that
  // c = 1 - s conj(r), x' = x - s (y + conj(r) x) and y' = y + conj(s) (x - r y): a small s keeps
  // all of its digits, where c would be 1.
  JAX_BATCHED_INLINE Mask turn(P* x, P* y, int64_t count) const {
    const S zero(R(0)), one(R(1)), two(R(2));
    S x_x = zero, y_y = zero;
    P g = broadcast(T(R(0)));
    for (int64_t k = 0; k < n; ++k) {
      x_x = minus_squares(x_x, x[k]);
      y_y = minus_squares(y_y, y[k]);
      g = sub_mul(g, x[k], conj(y[k]));
    }
    x_x = -x_x;
    y_y = -y_y;
    g = -g;
    S size = magnitude(g);
    const S least = S(4 * std::numeric_limits<R>::epsilon()) * sqrt(x_x) * sqrt(y_y);
    const S nothing(kZeroSquares);
    const Mask needed = Mask(size.v > least.v) & Mask(x_x.v > nothing.v) & Mask(y_y.v > nothing.v);
    if (!any(needed)) return needed;
    S difference = y_y - x_x;
    const S up = select(larger(x_x, y_y).v < S(kSmall).v, S(kUp), one);
    const S twice = two * size * up;
    difference = difference * up;
    const S root = sqrt(-sub_mul(-(difference * difference), twice, twice));
    const S tangent = copy_sign(twice / (absolute(difference) + root), difference);
    const S cosine = one / sqrt(-sub_mul(-one, tangent, tangent));
    const P s = select(needed, scale(direction(g, size), tangent * cosine), broadcast(T(R(0))));
    const P r = scale(s, one / (one + select(needed, cosine, one)));
    const P minus_s = -conj(s), minus_r = -conj(r);
    for (int64_t k = 0; k < count; ++k) {
      const P x_k = x[k], y_k = y[k];
      x[k] = sub_mul(x_k, s, sub_mul(y_k, minus_r, x_k));
      y[k] = sub_mul(y_k, minus_s, sub_mul(x_k, r, y_k));
    }
    return needed;
  }
  static JAX_BATCHED_INLINE S magnitude(S g) { return absolute(g); }
  static JAX_BATCHED_INLINE S magnitude(Complex<S> g) {
    const S large = larger(absolute(g.re), absolute(g.im));
    const S up = select(large.v < S(kSmall).v, S(kUp), S(R(1)));
    const S re = g.re * up, im = g.im * up;
    return sqrt(-sub_mul(-(re * re), im, im)) / up;
  }
  static JAX_BATCHED_INLINE S direction(S g, S) { return copy_sign(S(R(1)), g); }
  static JAX_BATCHED_INLINE Complex<S> direction(Complex<S> g, S size) {
    return {g.re / size, g.im / size};
  }
};

// Rows `first`, ... of an n x n matrix whose rows before are orthonormal: of the unit vectors the
// farthest from these, less its share of them, twice.
template <class T>
void complete(T* rows, int64_t n, int64_t first) {
  using R = Real<T>;
  const auto dot = [n](const T* x, const T* y) {
    T sum = T(R(0));
    for (int64_t k = 0; k < n; ++k) sum = sub_mul_conj(sum, -y[k], x[k]);
    return sum;
  };
  for (int64_t i = first; i < n; ++i) {
    int64_t farthest = 0;
    R least = kInfinity<R>;
    for (int64_t k = 0; k < n; ++k) {
      R squares = 0;
      for (int64_t j = 0; j < i; ++j) squares -= minus_squares(R(0), rows[j * n + k]);
      if (squares < least) {
        least = squares;
        farthest = k;
      }
    }
    T* row = rows + i * n;
    for (int64_t k = 0; k < n; ++k) row[k] = T(R(k == farthest));
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t j = 0; j < i; ++j) {
        const T share = dot(rows + j * n, row);
        for (int64_t k = 0; k < n; ++k) row[k] = sub_mul(row[k], share, rows[j * n + k]);
      }
      const R norm = std::sqrt(real(dot(row, row)));
      for (int64_t k = 0; k < n; ++k) row[k] = jax_batched::scale(row[k], R(1) / norm);
    }
  }
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
