// Correctly rounded division by a divisor that is known early.
//
// In a substitution the quotient y_k = b_k / d_k sits in the longest dependent chain, while d_k is
// known from the start. So 1/d is computed ahead, and a quotient takes five dependent FMAs where
// b / d takes some fifty (float) to a hundred (double) cycles. The result has the same bits.
#pragma once

#include "ffi/common/scalar.h"

namespace jax_batched::cuda {

// Divisors and numerators in [2^-60, 2^60] (double: [2^-480, 2^480]) keep every intermediate below
// normal and exact where it must be.
template <class R>
inline constexpr R kQuotientHigh = R(0x1p60f);
template <>
inline constexpr double kQuotientHigh<double> = 0x1p480;
template <class R>
inline constexpr R kQuotientLow = R(0x1p-60f);
template <>
inline constexpr double kQuotientLow<double> = 0x1p-480;

__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
  return fma(a, b, c);
}

template <class T>
struct Divisor {
  using R = T;
  R divisor;
  R reciprocal;  // correctly rounded
  R largest;     // the largest |b| of the fast path; -1 if the divisor rules it out

  static __device__ __forceinline__ Divisor of(R d) {
    const R size = fabs(d);
    const bool usual = size >= kQuotientLow<R> && size <= kQuotientHigh<R>;
    return {d, R(1) / d, usual ? kQuotientHigh<R> : R(-1)};
  }

  // b / divisor. With r = RN(1/d), two corrections q <- q + (b - q d) r of q = b r give the
  // correctly rounded quotient: the first brings q within one unit in the last place, and from
  // there the second is exact up to its one rounding (Markstein 1990).
  __device__ __forceinline__ R operator()(R b) const {
    const R q0 = b * reciprocal;
    const R q1 = multiply_add(multiply_add(-q0, divisor, b), reciprocal, q0);
    const R q2 = multiply_add(multiply_add(-q1, divisor, b), reciprocal, q1);
    const R size = fabs(b);
    R quotient = size == R(0) ? q0 : q2;  // of a zero, q0 has the right sign
    if (!(size <= largest && (size >= kQuotientLow<R> || size == R(0)))) quotient = b / divisor;
    return quotient;
  }
};

// The complex quotient of scalar.h with what depends on the divisor alone taken out: Smith's ratio
// r and the real denominator.
template <class R>
struct Divisor<Complex<R>> {
  enum Kind { kReal, kRealPart, kImaginaryPart };  // which part of the divisor is the larger
  Divisor<R> denominator;
  R ratio;
  Kind kind;

  static __device__ __forceinline__ Divisor of(Complex<R> d) {
    if (d.im == R(0)) return {Divisor<R>::of(d.re), R(0), kReal};
    if (fabs(d.re) >= fabs(d.im)) {
      const R r = d.im / d.re;
      return {Divisor<R>::of(sub_mul(d.re, -r, d.im)), r, kRealPart};
    }
    const R r = d.re / d.im;
    return {Divisor<R>::of(sub_mul(d.im, -r, d.re)), r, kImaginaryPart};
  }

  __device__ __forceinline__ Complex<R> operator()(Complex<R> b) const {
    Complex<R> numerator = b;
    if (kind == kRealPart) {
      numerator = {sub_mul(b.re, -ratio, b.im), sub_mul(b.im, ratio, b.re)};
    } else if (kind == kImaginaryPart) {
      numerator = {sub_mul(b.im, -ratio, b.re), sub_mul(-b.re, -ratio, b.im)};
    }
    return {denominator(numerator.re), denominator(numerator.im)};
  }
};

}  // namespace jax_batched::cuda
