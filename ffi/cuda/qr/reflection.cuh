// Householder reflections as kernels apply them: H^H = I - phi u u^H with u = x - beta e_0 takes a
// column x, whose first number is alpha, to beta e_0, where
//   beta = -sign(re alpha) ||x||,  phi = 1 / (beta (beta - alpha)).
// u is x save for u_0, so that nothing is divided before the results are written. LAPACK's v and
// tau are u / u_0 and conj(phi) |u_0|^2.
//
// Columns of unusual size are scaled by powers of two before the first step. That leaves Q as it
// is, and R's column gets its size back on the way out. So squares cannot overflow, and they only
// get small where little is left of a column: there a kernel looks closer.
#pragma once

#include <cstdint>

#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/quotient.cuh"

namespace jax_batched::cuda {

__device__ __forceinline__ float power_of_two(float, int biased) {
  return __int_as_float(biased << 23);
}
__device__ __forceinline__ double power_of_two(double, int biased) {
  return __hiloint2double(biased << 20, 0);
}
// 1 / p of a power of two from 2^-126 (2^-1022) to 2^126 (2^1022).
__device__ __forceinline__ float inverse_power(float p) {
  return __int_as_float(0x7f000000 - __float_as_int(p));
}
__device__ __forceinline__ double inverse_power(double p) {
  return __hiloint2double(0x7fe00000 - __double2hiint(p), 0);
}

// The largest number of a column, as far as a power of two to scale it by depends on it.
template <class R>
class ColumnSize;
template <>
class ColumnSize<float> {
 public:
  __device__ __forceinline__ void take(float a) { largest_ = fmaxf(largest_, fabsf(a)); }
  __device__ __forceinline__ void take(Complex<float> a) {
    take(a.re);
    take(a.im);
  }
  __device__ __forceinline__ bool is_usual() const {
    return (largest_ >= 0x1p-20f && largest_ <= 0x1p20f) || largest_ == 0;
  }
  // Brings the largest number to [1, 2), as far as this and its inverse are normal numbers.
  __device__ __forceinline__ float factor() const {
    return power_of_two(0.0f, min(max(254 - (__float_as_int(largest_) >> 23), 1), 253));
  }

 private:
  float largest_ = 0;
};
template <>
class ColumnSize<double> {  // comparisons of integers, which are the faster ones
 public:
  __device__ __forceinline__ void take(double a) {
    largest_ = max(largest_, __double2hiint(a) & 0x7fffffff);
    low_ |= __double2loint(a);
  }
  __device__ __forceinline__ void take(Complex<double> a) {
    take(a.re);
    take(a.im);
  }
  __device__ __forceinline__ bool is_usual() const {
    return (largest_ >= kOne - (20 << 20) && largest_ < kOne + (20 << 20)) ||
           (largest_ == 0 && low_ == 0);
  }
  __device__ __forceinline__ double factor() const {
    return power_of_two(0.0, min(max(2046 - (largest_ >> 20), 1), 2045));
  }

 private:
  static constexpr int kOne = 0x3ff00000;
  int largest_ = 0;
  int low_ = 0;  // of all numbers, so that the largest one is zero only if all are
};

// a * by, which is not zero unless a is: whether there is something to eliminate does not change.
__device__ __forceinline__ float scale_nonzero(float a, float by) {
  const float b = a * by;
  return b == 0 && a != 0 ? copysignf(0x1p-149f, a) : b;
}
__device__ __forceinline__ double scale_nonzero(double a, double by) {
  const double b = a * by;
  return b == 0 && a != 0 ? copysign(0x1p-1074, a) : b;
}
template <class R>
__device__ __forceinline__ Complex<R> scale_nonzero(Complex<R> a, R by) {
  return {scale_nonzero(a.re, by), scale_nonzero(a.im, by)};
}

template <class T>
__device__ __forceinline__ T product(T a, T b) {
  if constexpr (kIsComplex<T>) {
    return {sub_mul(a.re * b.re, a.im, b.im), sub_mul(a.re * b.im, -a.im, b.re)};
  } else {
    return a * b;
  }
}
// |a|^2 + c.
template <class R>
__device__ __forceinline__ R add_square(R c, R a) {
  return multiply_add(a, a, c);
}
template <class R>
__device__ __forceinline__ R add_square(R c, Complex<R> a) {
  return multiply_add(a.im, a.im, multiply_add(a.re, a.re, c));
}

// 1 / d within an ulp or two, for d and 1 / d that are normal.
__device__ __forceinline__ float quick_reciprocal(float d) {
  const float r = reciprocal_estimate(d);
  return fmaf(r, fmaf(-d, r, 1.0f), r);
}
__device__ __forceinline__ double quick_reciprocal(double d) {
  const double r = reciprocal_estimate(d);
  const double e = fma(-d, r, 1.0);
  return fma(r, fma(e, e, e), r);
}

// From here on the sum of a column's squares is good for everything below.
template <class R>
inline constexpr R kSmallestSquares = R(0x1p-80);
template <>
inline constexpr double kSmallestSquares<double> = 0x1p-600;

template <class T>
struct Reflection {
  using R = Real<T>;
  R beta;
  T first;   // u_0
  T factor;  // phi

  // `tail` is the sum of the squares below alpha.
  static __device__ __forceinline__ Reflection of(T alpha, R tail) {
    return of_squares(alpha, add_square(tail, alpha));
  }
  // `squares` is that of the whole column.
  static __device__ __forceinline__ Reflection of_squares(T alpha, R squares) {
    const R norm = pivot_root_in_range(squares).root;
    const R size = fabs(real(alpha)), sum = norm + size;
    Reflection h;
    h.beta = copysign(norm, -real(alpha));
    if constexpr (kIsComplex<T>) {
      // phi = (norm + |re alpha| - i sign(re alpha) im alpha) / (norm |u_0|^2)
      const R q = quick_reciprocal(norm * multiply_add(alpha.im, alpha.im, sum * sum));
      h.first = {copysign(sum, alpha.re), alpha.im};
      h.factor = {sum * q, copysign(q, -alpha.re) * alpha.im};
    } else {
      h.first = copysign(sum, alpha);
      h.factor = quick_reciprocal(multiply_add(norm, size, squares));
    }
    return h;
  }
  // H = I.
  static __device__ __forceinline__ Reflection identity(T alpha) {
    return {real(alpha), T(R(1)), T(R(0))};
  }

  // 1 / u_0: v = u / u_0.
  static __device__ __forceinline__ T inverse(T first) {
    if constexpr (kIsComplex<T>) {
      return scale(conj(first), quick_reciprocal(add_square(R(0), first)));
    } else {
      return quick_reciprocal(first);
    }
  }
  static __device__ __forceinline__ T tau(T first, T factor) {
    return scale(conj(factor), add_square(R(0), first));
  }
};

// Results of a matrix that are all NaN, but for the zeros below R's diagonal; by kLanes neighbours.
template <int kLanes, class T>
__device__ __noinline__ void fill_failed(T* to, int rows, int columns, bool is_triangle) {
#pragma unroll 1
  for (int i = 0; i < rows; ++i) {
#pragma unroll 1
    for (int j = threadIdx.x % kLanes; j < columns; j += kLanes) {
      to[i * columns + j] = is_triangle && i > j ? T(Real<T>(0)) : quiet_nan<T>();
    }
  }
}

}  // namespace jax_batched::cuda
