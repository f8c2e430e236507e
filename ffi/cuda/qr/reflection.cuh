// One Householder reflection: H^H (alpha, x) = (beta, 0) with beta = -sign(re alpha) ||(alpha,
// x)||, as LAPACK's larfg. With u = (alpha - beta, x),
//   H^H = I - phi u u^H,  phi = -1 / (beta (alpha - beta)),
// and of v = u / (alpha - beta) H = I - tau v v^H,  tau = (beta - alpha) / beta.
// H is I, and beta is alpha, if x and the imaginary part of alpha are zero.
//
// The largest entry of each column is brought to [1, 2) by a power of two: that changes no
// reflection, R's column by the same power, and sums of squares do not overflow.
#pragma once

#include "ffi/cuda/device/math.cuh"

namespace jax_batched::cuda {

// Sums of squares from kSmallest on lose nothing of what they need of small terms. A column below
// is multiplied by 2^kRaise, at most kMostRaises times: then nothing but zero is below.
template <class R>
struct SquareRange;
template <>
struct SquareRange<float> {
  static constexpr float kSmallest = 0x1p-60f;
  static constexpr int kRaise = 40, kMostRaises = 3;
};
template <>
struct SquareRange<double> {
  static constexpr double kSmallest = 0x1p-500;
  static constexpr int kRaise = 500, kMostRaises = 2;
};

// 2^e for a normal result.
template <class R>
__device__ __forceinline__ R power_of_two(int e) {
  if constexpr (sizeof(R) == 4) {
    return __int_as_float((e + 127) << 23);
  } else {
    return __hiloint2double((e + 1023) << 20, 0);
  }
}
// a 2^e for any e between twice the exponents of normal numbers.
template <class T>
__device__ __forceinline__ T times_power_of_two(T a, int e) {
  using R = Real<T>;
  return scale(scale(a, power_of_two<R>(e >> 1)), power_of_two<R>(e - (e >> 1)));
}

// The exponent of a column by its largest entry: 2^e and 2^-e are normal numbers.
__device__ __forceinline__ int column_exponent(float largest) {
  return max(min((__float_as_int(largest) >> 23) - 127, 126), -126);
}
__device__ __forceinline__ int column_exponent(double largest) {
  return max(min((__double2hiint(largest) >> 20) - 1023, 1022), -1022);
}

template <class R>
__device__ __forceinline__ R largest_part(R a) {
  return absolute(a);
}
template <class R>
__device__ __forceinline__ R largest_part(Complex<R> a) {
  return fmax(absolute(a.re), absolute(a.im));
}

__device__ __forceinline__ float square(float a) { return a * a; }
__device__ __forceinline__ double square(double a) { return a * a; }
template <class R>
__device__ __forceinline__ R square(Complex<R> a) {
  return fma(a.re, a.re, a.im * a.im);
}

// 1 / d, to an ulp, of a normal d whose reciprocal is normal.
__device__ __forceinline__ float reciprocal_in_range(float d) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d));
  return fmaf(y, fmaf(-d, y, 1.0f), y);
}
__device__ __forceinline__ double reciprocal_in_range(double d) {
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(d));
  const double e = fma(-d, y, 1.0);
  y = fma(y, fma(e, e, e), y);
  return fma(y, fma(-d, y, 1.0), y);
}
template <class R>
__device__ __forceinline__ Complex<R> reciprocal_in_range(Complex<R> d) {
  const R by = reciprocal_in_range(square(d));
  return {d.re * by, -d.im * by};
}

template <class T>
__device__ __forceinline__ bool is_real(T a) {
  if constexpr (kIsComplex<T>) {
    return a.im == 0;
  } else {
    return true;
  }
}

template <class T>
struct Reflection {
  T beta;     // real
  T first;    // alpha - beta, u's first entry
  T inverse;  // 1 / (alpha - beta); v = u times it
  T phi;
  T tau;
  bool finite;

  // tail: the sum of squares of x. has_tail: whether x is anything but zero.
  static __device__ __forceinline__ Reflection of(T alpha, Real<T> tail, bool has_tail) {
    using R = Real<T>;
    const R squares = square(alpha) + tail;
    if (!has_tail && is_real(alpha)) {
      return {alpha, T(R(1)), T(R(0)), T(R(0)), T(R(0)), squares < kInfinity<R>};
    }
    const PivotRoot<R> norm = pivot_root_in_range(squares);
    const R beta = copysign(norm.root, -real(alpha));
    const R inverse_beta = copysign(norm.inverse, beta);
    Reflection h;
    h.beta = T(beta);
    h.first = alpha - h.beta;
    h.inverse = reciprocal_in_range(h.first);
    h.phi = scale(h.inverse, -inverse_beta);
    h.tau = scale(h.first, -inverse_beta);
    h.finite = norm.root < kInfinity<R>;
    return h;
  }
};

}  // namespace jax_batched::cuda
