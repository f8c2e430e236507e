// The natural logarithm of a register of numbers.
#pragma once

#include "ffi/cpu/engine/simd.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

// log(x 2^exponent) for 1 <= x < 2 sqrt(2), within 1.5 units in the last place (2 without FMA);
// -inf of zero, and NaN of NaN.
//
// With y = x or x / 2 next to 1, f = y - 1, which is exact, and s = f / (2 + f),
//   log(y) = 2 artanh(s) = 2 s + s r = f - s (f - r),   r = 2 (s^2 / 3 + s^4 / 5 + ...),
// where s^2 < 0.0295, so that few terms are left: even and odd ones in two sums, as one would wait
// for each of its additions.
template <class R>
JAX_BATCHED_INLINE Simd<R> logarithm(Simd<R> x, typename VectorOf<R>::Mask exponent) {
  using Limits = std::numeric_limits<R>;
  using Mask = typename VectorOf<R>::Mask;
  using Vector = typename Simd<R>::Vector;
  constexpr int kTerms = Limits::digits == 24 ? 4 : 10;
  constexpr long double kLog2 = 0.693147180559945309417232121458176568L;
  constexpr R kLog2High = R(kLog2), kLog2Low = R(kLog2 - kLog2High);

  const Mask large = x.v > Simd<R>(R(1.41421356237309504880)).v;
  const Simd<R> one(R(1));
  const Simd<R> f = select(large, x * Simd<R>(R(0.5)), x) - one;
  const Simd<R> s = f / (f + Simd<R>(R(2)));
  const Simd<R> z = s * s, minus_w = -(z * z);
  const auto coefficient = [](int k) JAX_BATCHED_INLINED { return Simd<R>(R(2) / R(2 * k + 3)); };
  Simd<R> even = coefficient(kTerms - 2), odd = coefficient(kTerms - 1);
  unrolled<kTerms / 2 - 1>([&](auto t) JAX_BATCHED_INLINED {
    constexpr int k = kTerms - 4 - 2 * t;
    even = sub_mul(coefficient(k), minus_w, even);
    odd = sub_mul(coefficient(k + 1), minus_w, odd);
  });
  const Simd<R> r = z * sub_mul(even, -z, odd);
  const Simd<R> log_y = sub_mul(f, s, f - r);

  // Integers of fewer digits than a mantissa as numbers, by adding to the bits of one whose last
  // place is 1: AVX2 has no instruction for those of 64 bits.
  const Simd<R> shifted(R(3) * R(int64_t{1} << (Limits::digits - 2)));
  const Simd<R> minus_e = shifted - Simd<R>(Vector(Mask(shifted.v) + exponent - large));
  const Simd<R> log_x =
      sub_mul(sub_mul(log_y, minus_e, Simd<R>(kLog2Low)), minus_e, Simd<R>(kLog2High));
  return select(is_zero(x), Simd<R>(-kInfinity<R>), log_x);
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
