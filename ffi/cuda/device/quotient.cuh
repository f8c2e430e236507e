// Correctly rounded division by a divisor that is known early.
//
// In a substitution the quotient y_k = b_k / d_k sits in the longest dependent chain, while d_k is
// known from the start. So 1/d is computed ahead, and a quotient takes three dependent FMAs where
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

  // b / divisor if covers(b). With r = RN(1/d), one correction of q = RN(b r) by its exact
  // residual, q + (b - q d) r, gives the correctly rounded quotient (Markstein 1990; Brisebarre,
  // Muller, Raina 2004). The sign is q's also where the correction loses it, for b = -0.
  __device__ __forceinline__ R quick(R b) const {
    const R q = b * reciprocal;
    return copysign(multiply_add(multiply_add(-q, divisor, b), reciprocal, q), q);
  }

  __device__ __forceinline__ bool covers(R b) const {
    const R size = fabs(b);
    return size <= largest && (size >= kQuotientLow<R> || size == R(0));
  }

  __device__ __forceinline__ R operator()(R b) const { return covers(b) ? quick(b) : b / divisor; }
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

  __device__ __forceinline__ Complex<R> numerator(Complex<R> b) const {
    if (kind == kRealPart) return {sub_mul(b.re, -ratio, b.im), sub_mul(b.im, ratio, b.re)};
    if (kind == kImaginaryPart) {
      return {sub_mul(b.im, -ratio, b.re), sub_mul(-b.re, -ratio, b.im)};
    }
    return b;
  }
  __device__ __forceinline__ Complex<R> quick(Complex<R> b) const {
    const Complex<R> p = numerator(b);
    return {denominator.quick(p.re), denominator.quick(p.im)};
  }
  __device__ __forceinline__ bool covers(Complex<R> b) const {
    const Complex<R> p = numerator(b);
    return denominator.covers(p.re) && denominator.covers(p.im);
  }
  __device__ __forceinline__ Complex<R> operator()(Complex<R> b) const {
    const Complex<R> p = numerator(b);
    return {denominator(p.re), denominator(p.im)};
  }
};

}  // namespace jax_batched::cuda
