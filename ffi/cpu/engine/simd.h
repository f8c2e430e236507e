// One vector register of numbers, in the arithmetic of scalar.h: a kernel written over T works on
// Simd<float> as on float, and Complex<Simd<R>> is a register of real and one of imaginary parts.
//
// Everything is the compiler's own vector types, as wide as the instruction set that this object is
// compiled for, but for two instructions that they lack.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "ffi/common/scalar.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// For the lambdas of a kernel's unrolled loops: one that stayed a call would keep the tile it works
// on in memory.
#define JAX_BATCHED_INLINED __attribute__((always_inline))
#define JAX_BATCHED_INLINE inline JAX_BATCHED_INLINED
// For what is long when unrolled and called once per square of numbers: one copy of the code.
#define JAX_BATCHED_CALLED __attribute__((noinline))

namespace jax_batched::cpu::JAX_BATCHED_ISA {

// The names below are overloads of these.
using jax_batched::absolute;
using jax_batched::conj;
using jax_batched::divide;
using jax_batched::real;
using jax_batched::scale;
using jax_batched::sub_mul;

// f(0), f(1), ..., f(kCount - 1) with compile-time constants: what they index stays in registers.
template <class F, int... kIndex>
JAX_BATCHED_INLINE void unrolled_over(F& f, std::integer_sequence<int, kIndex...>) {
  (f(std::integral_constant<int, kIndex>{}), ...);
}
template <int kCount, class F>
JAX_BATCHED_INLINE void unrolled(F f) {
  unrolled_over(f, std::make_integer_sequence<int, kCount>{});
}

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX__) && defined(__FMA__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;  // SSE2, NEON
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kVectorRegisters = 32;
#else
inline constexpr int kVectorRegisters = 16;
#endif

// Of the cache. Where lines are longer, some of the fetches ask for what is on its way already.
inline constexpr int kLineBytes = 64;

template <class T>
inline constexpr int kLanes = kVectorBytes / sizeof(Real<T>);

// The compiler's vectors, of integers of the same size what comparing them yields (all ones for
// true), and as many counts as a vector has lanes, at any address. Spelt out for both: GCC does not
// take the attribute with a template's parameter.
template <class R>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef float Unaligned
      __attribute__((vector_size(kVectorBytes), aligned(sizeof(float)), may_alias));
  using Bits = int32_t;
  typedef int32_t Mask __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Counts __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef double Unaligned
      __attribute__((vector_size(kVectorBytes), aligned(sizeof(double)), may_alias));
  using Bits = int64_t;
  typedef int64_t Mask __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Counts __attribute__((vector_size(kVectorBytes / 2), aligned(4), may_alias));
};

template <class R>
struct Simd {
  using Vector = typename VectorOf<R>::type;
  using Unaligned = typename VectorOf<R>::Unaligned;
  using Mask = typename VectorOf<R>::Mask;
  static constexpr int kSize = kVectorBytes / sizeof(R);

  Vector v;

  Simd() = default;
  JAX_BATCHED_INLINE Simd(Vector vector) : v(vector) {}
  JAX_BATCHED_INLINE explicit Simd(R value) : v(value - Vector{}) {}  // -0.0 - 0.0 is -0.0

  // From and to any address.
  static JAX_BATCHED_INLINE Simd load(const R* p) {
    return Vector(*reinterpret_cast<const Unaligned*>(p));
  }
  JAX_BATCHED_INLINE void store(R* p) const { *reinterpret_cast<Unaligned*>(p) = v; }
};

template <class R>
JAX_BATCHED_INLINE Simd<R> operator+(Simd<R> a, Simd<R> b) {
  return a.v + b.v;
}
template <class R>
JAX_BATCHED_INLINE Simd<R> operator-(Simd<R> a, Simd<R> b) {
  return a.v - b.v;
}
template <class R>
JAX_BATCHED_INLINE Simd<R> operator*(Simd<R> a, Simd<R> b) {
  return a.v * b.v;
}
template <class R>
JAX_BATCHED_INLINE Simd<R> operator/(Simd<R> a, Simd<R> b) {
  return a.v / b.v;
}
template <class R>
JAX_BATCHED_INLINE Simd<R> operator-(Simd<R> a) {
  return -a.v;
}

template <class R>
JAX_BATCHED_INLINE Simd<R> real(Simd<R> a) {
  return a;
}
template <class R>
JAX_BATCHED_INLINE Simd<R> conj(Simd<R> a) {
  return a;
}
template <class R>
JAX_BATCHED_INLINE Simd<R> scale(Simd<R> a, Simd<R> s) {
  return a.v * s.v;
}

// c - a * b with one rounding (two where the processor has no FMA), and the square root: what the
// compilers' vectors have no operator for. Loops over the lanes are not reliably turned into these
// instructions inside a large kernel.
namespace instruction {
#if defined(__AVX512F__)
JAX_BATCHED_INLINE __m512 sub_mul(__m512 c, __m512 a, __m512 b) {
  return _mm512_fnmadd_ps(a, b, c);
}
JAX_BATCHED_INLINE __m512d sub_mul(__m512d c, __m512d a, __m512d b) {
  return _mm512_fnmadd_pd(a, b, c);
}
// With a mask of all lanes: GCC 12 warns of the plain ones.
JAX_BATCHED_INLINE __m512 sqrt(__m512 a) { return _mm512_maskz_sqrt_ps(0xFFFF, a); }
JAX_BATCHED_INLINE __m512d sqrt(__m512d a) { return _mm512_maskz_sqrt_pd(0xFF, a); }
#elif defined(__AVX__) && defined(__FMA__)
JAX_BATCHED_INLINE __m256 sub_mul(__m256 c, __m256 a, __m256 b) {
  return _mm256_fnmadd_ps(a, b, c);
}
JAX_BATCHED_INLINE __m256d sub_mul(__m256d c, __m256d a, __m256d b) {
  return _mm256_fnmadd_pd(a, b, c);
}
JAX_BATCHED_INLINE __m256 sqrt(__m256 a) { return _mm256_sqrt_ps(a); }
JAX_BATCHED_INLINE __m256d sqrt(__m256d a) { return _mm256_sqrt_pd(a); }
#elif defined(__aarch64__)
JAX_BATCHED_INLINE float32x4_t sub_mul(float32x4_t c, float32x4_t a, float32x4_t b) {
  return vfmsq_f32(c, a, b);
}
JAX_BATCHED_INLINE float64x2_t sub_mul(float64x2_t c, float64x2_t a, float64x2_t b) {
  return vfmsq_f64(c, a, b);
}
JAX_BATCHED_INLINE float32x4_t sqrt(float32x4_t a) { return vsqrtq_f32(a); }
JAX_BATCHED_INLINE float64x2_t sqrt(float64x2_t a) { return vsqrtq_f64(a); }
#else
template <class Vector>
JAX_BATCHED_INLINE Vector sub_mul(Vector c, Vector a, Vector b) {
  return c - a * b;
}
#if defined(__SSE2__)
JAX_BATCHED_INLINE __m128 sqrt(__m128 a) { return _mm_sqrt_ps(a); }
JAX_BATCHED_INLINE __m128d sqrt(__m128d a) { return _mm_sqrt_pd(a); }
#else
template <class Vector>
JAX_BATCHED_INLINE Vector sqrt(Vector a) {
  for (size_t lane = 0; lane < sizeof(a) / sizeof(a[0]); ++lane) a[lane] = std::sqrt(a[lane]);
  return a;
}
#endif
#endif
}  // namespace instruction

template <class R>
JAX_BATCHED_INLINE Simd<R> sub_mul(Simd<R> c, Simd<R> a, Simd<R> b) {
  return typename Simd<R>::Vector(instruction::sub_mul(c.v, a.v, b.v));
}
template <class R>
JAX_BATCHED_INLINE Simd<R> sqrt(Simd<R> a) {
  return typename Simd<R>::Vector(instruction::sqrt(a.v));
}

// True if any lane is.
template <class Mask>
JAX_BATCHED_INLINE bool any(Mask mask) {
  const auto words = VectorOf<double>::Mask(mask);
  int64_t all = 0;
  for (int i = 0; i < kLanes<double>; ++i) all |= words[i];
  return all != 0;
}

// mask ? a : b, lane by lane.
template <class R>
JAX_BATCHED_INLINE Simd<R> select(typename Simd<R>::Mask mask, Simd<R> a, Simd<R> b) {
  using Mask = typename Simd<R>::Mask;
  using Vector = typename Simd<R>::Vector;
  return Vector((mask & Mask(a.v)) | (~mask & Mask(b.v)));
}
template <class R>
JAX_BATCHED_INLINE Complex<Simd<R>> select(typename Simd<R>::Mask mask, Complex<Simd<R>> a,
                                           Complex<Simd<R>> b) {
  return {select(mask, a.re, b.re), select(mask, a.im, b.im)};
}

template <class R>
JAX_BATCHED_INLINE Simd<R> absolute(Simd<R> a) {
  using Mask = typename Simd<R>::Mask;
  constexpr auto kMagnitude = std::numeric_limits<typename VectorOf<R>::Bits>::max();
  return typename Simd<R>::Vector(Mask(a.v) & (Mask{} + kMagnitude));
}

template <class R>
JAX_BATCHED_INLINE Simd<R> divide(Simd<R> a, Simd<R> b) {
  return a.v / b.v;
}
// Smith's quotient as in scalar.h, its three cases by selection: with p the larger part of b and q
// the other one, r = q / p and d = p + r q.
template <class R>
JAX_BATCHED_INLINE Complex<Simd<R>> divide(Complex<Simd<R>> a, Complex<Simd<R>> b) {
  using Mask = typename Simd<R>::Mask;
  const Mask is_real = b.im.v == Simd<R>(R(0)).v;
  const Mask swapped = absolute(b.re).v < absolute(b.im).v;
  const Simd<R> p = select(swapped, b.im, b.re);
  const Simd<R> q = select(swapped, b.re, b.im);
  const Simd<R> s = select(swapped, a.im, a.re);
  const Simd<R> t = select(swapped, a.re, a.im);
  const Simd<R> r = q / p;
  const Simd<R> re = sub_mul(s, -r, t);
  const Simd<R> im = sub_mul(select(swapped, -t, t), select(swapped, -r, r), s);
  const Simd<R> d = select(is_real, b.re, sub_mul(p, -r, q));
  return {select(is_real, a.re, re) / d, select(is_real, a.im, im) / d};
}

// hermitian_mean() of entries whose sum does not overflow.
template <class T>
JAX_BATCHED_INLINE T half_sum(T a_ij, T a_ji) {
  return scale(a_ij + conj(a_ji), Real<T>(0.5));
}

// T in every lane of a register, split into real and imaginary parts.
template <class T>
struct LanesOf {
  using type = Simd<T>;
};
template <class R>
struct LanesOf<Complex<R>> {
  using type = Complex<Simd<R>>;
};
template <class T>
using Lanes = typename LanesOf<T>::type;

JAX_BATCHED_INLINE Simd<float> broadcast(float a) { return Simd<float>(a); }
JAX_BATCHED_INLINE Simd<double> broadcast(double a) { return Simd<double>(a); }
template <class R>
JAX_BATCHED_INLINE Complex<Simd<R>> broadcast(Complex<R> a) {
  return {Simd<R>(a.re), Simd<R>(a.im)};
}

// Lane l of the result is entry kIndex(l) of the 2 kSize lanes of a and b.
template <class R, class Index, size_t... kLane>
JAX_BATCHED_INLINE Simd<R> shuffle(Simd<R> a, Simd<R> b, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a.v, b.v, Index::of(kLane)...);
#else
  return __builtin_shuffle(a.v, b.v, typename Simd<R>::Mask{Index::of(kLane)...});
#endif
}

// Blocks of kUnit lanes, alternately of a and b: kHigh = 0 takes the even blocks of both (from
// {a0 a1}, {b0 b1}: a0 b0), kHigh = 1 the odd ones.
template <int kUnit, int kHigh, int kSize>
struct EvenOrOddBlocks {
  static constexpr int of(int lane) {
    const int block = lane / kUnit;
    return block % 2 * kSize + (block / 2 * 2 + kHigh) * kUnit + lane % kUnit;
  }
};
// The same inside each 128 bits, where instructions interleave the low (or high) half of a with
// that of b.
template <int kUnit, int kHigh, int kSize, int kQuad>
struct InterleavedHalves {
  static constexpr int of(int lane) {
    const int quad = lane / kQuad;
    const int block = lane % kQuad / kUnit;
    return block % 2 * kSize + quad * kQuad + kHigh * kQuad / 2 + block / 2 * kUnit + lane % kUnit;
  }
};

// 128 bits of a register, and a register made of them: piece(0) in the lowest lanes.
namespace instruction {
typedef float Piece __attribute__((vector_size(16)));
typedef float UnalignedPiece __attribute__((vector_size(16), aligned(4), may_alias));

template <class F>
JAX_BATCHED_INLINE auto joined(F piece) {
#if defined(__AVX512F__)
  const __m512 one = _mm512_castps128_ps512(piece(0));
  const __m512 two = _mm512_insertf32x4(one, piece(1), 1);
  return _mm512_insertf32x4(_mm512_insertf32x4(two, piece(2), 2), piece(3), 3);
#elif defined(__AVX__) && defined(__FMA__)
  return _mm256_insertf128_ps(_mm256_castps128_ps256(piece(0)), piece(1), 1);
#else
  return piece(0);
#endif
}
template <int kPiece, class Vector>
JAX_BATCHED_INLINE Piece piece_of(Vector v) {
#if defined(__AVX512F__)
  return _mm512_maskz_extractf32x4_ps(0xF, __m512(v), kPiece);  // as with sqrt() above
#elif defined(__AVX__) && defined(__FMA__)
  return _mm256_extractf128_ps(__m256(v), kPiece);
#else
  return Piece(v);
#endif
}
}  // namespace instruction

// kColumns registers of kSize numbers as a matrix, a whole number of pieces wide. It is transposed
// in two steps: pieces of 128 bits change places, and then the small squares inside of them are
// transposed. Plain vectors and constant indices: GCC keeps arrays of Simd in memory.
//
// The first step costs nothing on the way from or to memory. But then a line of the cache is
// visited once per piece of it, with as many other lines as the register has lanes in between, and
// matrices whose size is a power of two put all of these into one set of the first cache. Registers
// of a whole line would overflow it (16 lines, 12 places): they take and leave each line at once,
// and the pieces change places between registers.
template <class R, int kColumns = Simd<R>::kSize>
struct Square {
  using Vector = typename Simd<R>::Vector;
  static constexpr int kSize = Simd<R>::kSize;
  static constexpr int kPiece = 16 / sizeof(R);  // numbers of one
  static constexpr int kPieces = kSize / kPiece;
  static constexpr bool kByLines = kVectorBytes == kLineBytes && kColumns == kSize;

  Vector row[kColumns];

  // The transpose of the rows of kColumns numbers at line(0), ..., line(kSize - 1).
  template <class Line>
  JAX_BATCHED_INLINE void load_transposed(Line line) {
    if constexpr (kByLines) {
      unrolled<kSize>([&](auto l) JAX_BATCHED_INLINED { row[l] = Simd<R>::load(line(l)).v; });
      transpose();
    } else {
      using Pointer = const instruction::UnalignedPiece*;
      unrolled<kColumns>([&](auto i) JAX_BATCHED_INLINED {
        row[i] = Vector(instruction::joined([&](int p) JAX_BATCHED_INLINED {
          const R* from = line(p * kPiece + i % kPiece) + i / kPiece * kPiece;
          return instruction::Piece(*reinterpret_cast<Pointer>(from));
        }));
      });
      transpose_pieces();
    }
  }
  // Row l of the transpose goes to line(l). Spoils the square.
  template <class Line>
  JAX_BATCHED_INLINE void store_transposed(Line line) {
    if constexpr (kByLines) {
      transpose();
      unrolled<kSize>([&](auto l) JAX_BATCHED_INLINED { Simd<R>(row[l]).store(line(l)); });
    } else {
      using Pointer = instruction::UnalignedPiece*;
      transpose_pieces();
      unrolled<kColumns>([&](auto i) JAX_BATCHED_INLINED {
        unrolled<kPieces>([&](auto p) JAX_BATCHED_INLINED {
          R* to = line(p * kPiece + i % kPiece) + i / kPiece * kPiece;
          *reinterpret_cast<Pointer>(to) = instruction::piece_of<p>(row[i]);
        });
      });
    }
  }

  JAX_BATCHED_INLINE void transpose() {
    static_assert(kColumns == kSize);
    transpose_pieces();
    exchange_pieces<kSize / 2>();
  }

 private:
  template <class Index>
  static JAX_BATCHED_INLINE Vector shuffled(Vector a, Vector b) {
    return shuffle<R, Index>(Simd<R>(a), Simd<R>(b), std::make_index_sequence<kSize>{}).v;
  }
  // (row[i], row[j]) = their interleaved low and high halves, in units of kUnit numbers.
  template <int kUnit>
  JAX_BATCHED_INLINE void interleave(int i, int j) {
    const Vector a = row[i], b = row[j];
    row[i] = shuffled<InterleavedHalves<kUnit, 0, kSize, kPiece>>(a, b);
    row[j] = shuffled<InterleavedHalves<kUnit, 1, kSize, kPiece>>(a, b);
  }
  // The squares of kPiece x kPiece numbers inside the pieces of kPiece registers each. With rows a,
  // b, c, d of four: (a b)(c d) interleaved are a0 b0 a1 b1, a2 b2 a3 b3, c0 d0 c1 d1, ...
  JAX_BATCHED_INLINE void transpose_pieces() {
    unrolled<kColumns / kPiece>([&](auto piece) JAX_BATCHED_INLINED {
      constexpr int g = piece * kPiece;
      interleave<1>(g, g + 1);
      if constexpr (kPiece == 4) {
        interleave<1>(g + 2, g + 3);
        interleave<2>(g, g + 2);
        interleave<2>(g + 1, g + 3);
        std::swap(row[g + 1], row[g + 2]);
      }
    });
  }
  // Rows kDistance apart exchange blocks of as many lanes, down to single pieces.
  template <int kDistance>
  JAX_BATCHED_INLINE void exchange_pieces() {
    if constexpr (kDistance >= kPiece) {
      unrolled<kSize>([&](auto i) JAX_BATCHED_INLINED {
        if constexpr (i / kDistance % 2 == 0) {
          const Vector a = row[i], b = row[i + kDistance];
          row[i] = shuffled<EvenOrOddBlocks<kDistance, 0, kSize>>(a, b);
          row[i + kDistance] = shuffled<EvenOrOddBlocks<kDistance, 1, kSize>>(a, b);
        }
      });
      exchange_pieces<kDistance / 2>();
    }
  }
};

// The transpose of a square of kSize rows in memory, into rows elsewhere.
template <class R>
JAX_BATCHED_CALLED void transpose(const R* from, int64_t from_pitch, R* to, int64_t to_pitch) {
  Square<R> square;
  square.load_transposed([=](int l) JAX_BATCHED_INLINED { return from + l * from_pitch; });
  unrolled<Square<R>::kSize>(
      [&](auto l) JAX_BATCHED_INLINED { Simd<R>(square.row[l]).store(to + l * to_pitch); });
}

template <class R>
JAX_BATCHED_INLINE typename Simd<R>::Mask is_zero(Simd<R> a) {
  return a.v == Simd<R>(R(0)).v;
}
template <class R>
JAX_BATCHED_INLINE typename Simd<R>::Mask is_zero(Complex<Simd<R>> a) {
  return is_zero(a.re) & is_zero(a.im);
}
// Not of inf or NaN.
template <class R>
JAX_BATCHED_INLINE typename Simd<R>::Mask is_finite(Simd<R> a) {
  return is_zero(a - a);
}
template <class R>
JAX_BATCHED_INLINE typename Simd<R>::Mask is_finite(Complex<Simd<R>> a) {
  return is_finite(a.re) & is_finite(a.im);
}

// Of numbers, or of registers of them.
template <class R>
JAX_BATCHED_INLINE R product(R a, R b) {
  return a * b;
}
template <class R>
JAX_BATCHED_INLINE Complex<R> product(Complex<R> a, Complex<R> b) {
  return {sub_mul(a.re * b.re, a.im, b.im), sub_mul(a.re * b.im, -a.im, b.re)};
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
