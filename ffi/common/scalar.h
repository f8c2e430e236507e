// Element types and the arithmetic the kernels are written in, the same on the CPU and on CUDA.
//
// A kernel is a template over T, one of float, double, Complex<float>, Complex<double>. The names
// below are all it uses besides +, - and *, so that one source serves the four dtypes.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#if defined(__CUDACC__)
#define JAX_BATCHED_HD __host__ __device__ __forceinline__
#else
#define JAX_BATCHED_HD inline __attribute__((always_inline))
#endif

namespace jax_batched {

// (re, im), laid out as XLA's complex64 and complex128. Not std::complex: its product has a NaN
// recovery branch, and nvcc cannot call it on a device.
template <class R>
struct alignas(2 * sizeof(R)) Complex {
  R re;
  R im;
  Complex() = default;
  JAX_BATCHED_HD Complex(R real) : re(real), im(R(0)) {}
  JAX_BATCHED_HD Complex(R real, R imag) : re(real), im(imag) {}
};

template <class T>
struct RealOf {
  using type = T;
};
template <class R>
struct RealOf<Complex<R>> {
  using type = R;
};
template <class T>
using Real = typename RealOf<T>::type;
template <class T>
inline constexpr bool kIsComplex = !std::is_same_v<T, Real<T>>;

// IEEE binary16 and bfloat16, storage formats only: a kernel that takes them computes in float32.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
template <class S>
struct ComputedOf {
  using type = S;
};
template <>
struct ComputedOf<Float16> {
  using type = float;
};
template <>
struct ComputedOf<BFloat16> {
  using type = float;
};
template <class S>
using Computed = typename ComputedOf<S>::type;

template <class R>
JAX_BATCHED_HD Complex<R> operator+(Complex<R> a, Complex<R> b) {
  return {a.re + b.re, a.im + b.im};
}
template <class R>
JAX_BATCHED_HD Complex<R> operator-(Complex<R> a, Complex<R> b) {
  return {a.re - b.re, a.im - b.im};
}
template <class R>
JAX_BATCHED_HD Complex<R> operator-(Complex<R> a) {
  return {-a.re, -a.im};
}

JAX_BATCHED_HD float real(float a) { return a; }
JAX_BATCHED_HD double real(double a) { return a; }
template <class R>
JAX_BATCHED_HD R real(Complex<R> a) {
  return a.re;
}

JAX_BATCHED_HD float conj(float a) { return a; }
JAX_BATCHED_HD double conj(double a) { return a; }
template <class R>
JAX_BATCHED_HD Complex<R> conj(Complex<R> a) {
  return {a.re, -a.im};
}

JAX_BATCHED_HD float absolute(float a) { return fabsf(a); }
JAX_BATCHED_HD double absolute(double a) { return fabs(a); }
template <class R>
JAX_BATCHED_HD R absolute(Complex<R> a) {
  return hypot(a.re, a.im);
}

// a * s with a real s.
JAX_BATCHED_HD float scale(float a, float s) { return a * s; }
JAX_BATCHED_HD double scale(double a, double s) { return a * s; }
template <class R>
JAX_BATCHED_HD Complex<R> scale(Complex<R> a, R s) {
  return {a.re * s, a.im * s};
}

// c - a * b, and c - a * conj(b): one FMA per real product, in this order. A processor without FMA
// instructions rounds twice instead (its fma() would be a call into software).
#if defined(__CUDA_ARCH__) || defined(__FMA__) || defined(__aarch64__)
JAX_BATCHED_HD float sub_mul(float c, float a, float b) { return fmaf(-a, b, c); }
JAX_BATCHED_HD double sub_mul(double c, double a, double b) { return fma(-a, b, c); }
#else
JAX_BATCHED_HD float sub_mul(float c, float a, float b) { return c - a * b; }
JAX_BATCHED_HD double sub_mul(double c, double a, double b) { return c - a * b; }
#endif
template <class R>
JAX_BATCHED_HD Complex<R> sub_mul(Complex<R> c, Complex<R> a, Complex<R> b) {
  return {sub_mul(sub_mul(c.re, a.re, b.re), -a.im, b.im),
          sub_mul(sub_mul(c.im, a.re, b.im), a.im, b.re)};
}
JAX_BATCHED_HD float sub_mul_conj(float c, float a, float b) { return sub_mul(c, a, b); }
JAX_BATCHED_HD double sub_mul_conj(double c, double a, double b) { return sub_mul(c, a, b); }
template <class R>
JAX_BATCHED_HD Complex<R> sub_mul_conj(Complex<R> c, Complex<R> a, Complex<R> b) {
  return sub_mul(c, a, conj(b));
}

// a / b. The complex quotient is Smith's (1962): no overflow or underflow in |b|^2.
JAX_BATCHED_HD float divide(float a, float b) { return a / b; }
JAX_BATCHED_HD double divide(double a, double b) { return a / b; }
template <class R>
JAX_BATCHED_HD Complex<R> divide(Complex<R> a, Complex<R> b) {
  if (b.im == R(0)) return {a.re / b.re, a.im / b.re};
  if (fabs(b.re) >= fabs(b.im)) {
    const R r = b.im / b.re;
    const R d = sub_mul(b.re, -r, b.im);
    return {sub_mul(a.re, -r, a.im) / d, sub_mul(a.im, r, a.re) / d};
  }
  const R r = b.re / b.im;
  const R d = sub_mul(b.im, -r, b.re);
  return {sub_mul(a.im, -r, a.re) / d, sub_mul(-a.re, -r, a.im) / d};
}

// Variables, since device code may read a constant but not call numeric_limits.
template <class R>
inline constexpr R kNaN = std::numeric_limits<R>::quiet_NaN();
template <class R>
inline constexpr R kInfinity = std::numeric_limits<R>::infinity();

// NaN in every part: the entries of a failed result.
template <class T>
JAX_BATCHED_HD T quiet_nan() {
  if constexpr (kIsComplex<T>) {
    return T(kNaN<Real<T>>, kNaN<Real<T>>);
  } else {
    return kNaN<T>;
  }
}

JAX_BATCHED_HD bool is_infinite(float a) { return absolute(a) == kInfinity<float>; }
JAX_BATCHED_HD bool is_infinite(double a) { return absolute(a) == kInfinity<double>; }
template <class R>
JAX_BATCHED_HD bool is_infinite(Complex<R> a) {
  return is_infinite(a.re) || is_infinite(a.im);
}

// (a + b) / 2, finite where a and b are. Two forms with the same bits, as kernels of either
// precision have registers for: beside a large a both are halved before the sum (what halving takes
// from a subnormal b is then nothing), or both are where the sum overflowed.
template <class R>
JAX_BATCHED_HD R mean(R a, R b) {
  if constexpr (sizeof(R) == sizeof(float)) {
    const bool large = absolute(a) > R(1);
    const R before = large ? R(0.5) : R(1), after = large ? R(1) : R(0.5);
    return after * sub_mul(b * before, -before, a);
  } else {
    const R sum = a + b;
    R result = R(0.5) * sum;
    if (is_infinite(sum)) result = sub_mul(R(0.5) * b, R(-0.5), a);
    return result;
  }
}

// The symmetrised entry (a_ij + conj(a_ji)) / 2.
template <class T>
JAX_BATCHED_HD T hermitian_mean(T a_ij, T a_ji) {
  if constexpr (kIsComplex<T>) {
    return {mean(a_ij.re, a_ji.re), mean(a_ij.im, -a_ji.im)};
  } else {
    return mean(a_ij, a_ji);
  }
}

}  // namespace jax_batched
