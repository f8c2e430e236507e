// The product of the pivots, which neither overflows nor underflows on the way.
#pragma once

#include "ffi/cuda/lu/pivot.cuh"
#include "ffi/problems/lu.h"

namespace jax_batched::cuda {

__device__ __forceinline__ float times_power_of_two(float x, int e) { return scalbnf(x, e); }
__device__ __forceinline__ double times_power_of_two(double x, int e) { return scalbn(x, e); }
template <class R>
__device__ __forceinline__ Complex<R> times_power_of_two(Complex<R> x, int e) {
  return {times_power_of_two(x.re, e), times_power_of_two(x.im, e)};
}

// mantissa * 2^exponent, the parts of the mantissa below 1; NaN once a factor was not finite.
template <class T>
struct Determinant {
  T mantissa = T(Real<T>(1));
  int exponent = 0;

  __device__ __forceinline__ void multiply(T factor) {
    if (!is_finite(factor)) factor = quiet_nan<T>();
    multiply(Determinant{factor, 0}.normalized());
  }
  __device__ __forceinline__ void multiply(const Determinant& other) {
    mantissa = product(mantissa, other.mantissa);
    exponent += other.exponent;
    *this = normalized();
  }
  __device__ __forceinline__ void negate_if(bool odd) {
    if (odd) mantissa = -mantissa;
  }

  // That of segments of kLanes lanes, in the order of a tree.
  template <int kLanes>
  __device__ __forceinline__ void multiply_over_lanes() {
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) {
      multiply(Determinant{shuffle_xor(mantissa, mask), shuffle_xor(exponent, mask)});
    }
  }

  __device__ __forceinline__ void store(const DetProblem& p, int64_t matrix) const {
    *p.det.at<T>(matrix, 1) = times_power_of_two(mantissa, exponent);
  }
  __device__ __forceinline__ void store(const SlogdetProblem& p, int64_t matrix) const {
    using R = Real<T>;
    const R size = absolute(mantissa);
    *p.sign.at<T>(matrix, 1) = size == R(0) ? T(R(0)) : divide(mantissa, T(size));
    constexpr double kLog2 = 0.693147180559945309417;
    *p.logabsdet.at<R>(matrix, 1) =
        static_cast<R>(log(static_cast<double>(size)) + static_cast<double>(exponent) * kLog2);
  }

 private:
  static __device__ __forceinline__ float product(float a, float b) { return a * b; }
  static __device__ __forceinline__ double product(double a, double b) { return a * b; }
  template <class R>
  static __device__ __forceinline__ Complex<R> product(Complex<R> a, Complex<R> b) {
    return {sub_mul(a.re * b.re, a.im, b.im), sub_mul(a.re * b.im, -a.im, b.re)};
  }
  __device__ __forceinline__ Determinant normalized() const {
    Real<T> size;
    if constexpr (kIsComplex<T>) {
      size = fmax(absolute(mantissa.re), absolute(mantissa.im));
    } else {
      size = mantissa;
    }
    int e = 0;
    frexp(size, &e);
    if (size == Real<T>(0) || !is_finite(size)) e = 0;
    return {times_power_of_two(mantissa, -e), exponent + e};
  }
};

}  // namespace jax_batched::cuda
