// Scalar device arithmetic: the root of a pivot, sizes, shuffles, conjugates, 16-byte vectors.
#pragma once

#include "ffi/common/scalar.h"

namespace jax_batched::cuda {

inline constexpr unsigned kFullWarp = 0xffffffffu;

// sqrt(d) and 1 / sqrt(d) of a pivot.
template <class R>
struct PivotRoot {
  R root;
  R inverse;
};

// Estimates of 1 / sqrt(d), good to about 22 bits, for normal d.
__device__ __forceinline__ float rsqrt_estimate(float d) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d));
  return y;
}
__device__ __forceinline__ double rsqrt_estimate(double d) {
  double y;
  asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(d));
  return y;
}

// An estimate of 1 / d for a normal d: about 22 bits.
__device__ __forceinline__ float reciprocal_estimate(float d) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d));
  return y;
}
__device__ __forceinline__ double reciprocal_estimate(double d) {
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(d));
  return y;
}

// Pivots whose root is at least this (and not infinite) need no scaling in pivot_root_in_range.
template <class R>
inline constexpr R kSmallestPlainRoot = R(0);
template <>
inline constexpr float kSmallestPlainRoot<float> = 0x1p-30f;
template <>
inline constexpr double kSmallestPlainRoot<double> = 0x1p-250;

// The correctly rounded root r = sqrt(d) and the reciprocal of r, for a d of normal magnitude;
// otherwise a root for which plain_root() is false: NaN, or one too small.
//
// Straight-line code, on purpose: CUDA's __fsqrt_rn and __frcp_rn branch to slow paths, and these
// branches sit in the longest dependent chain of a factorization.
//   y ~ 1/sqrt(d);  r0 = d y;  r = r0 + (d - r0^2) y/2;  1/r = y + y (1 - r y)  (Markstein)
// All positive floats were compared with __fsqrt_rn and __frcp_rn: the root always agrees, the
// reciprocal save for 509 of 2^31, where it is the neighbour of the nearest. No difference was
// found in 2^28 doubles.
__device__ __forceinline__ PivotRoot<float> pivot_root_in_range(float d) {
  const float y = rsqrt_estimate(d);
  const float r0 = d * y, half = 0.5f * y;
  const float y1 = fmaf(half, fmaf(-r0, y, 1.0f), y);
  const float r = fmaf(fmaf(-r0, r0, d), half, r0);
  return {r, fmaf(y1, fmaf(-r, y1, 1.0f), y1)};
}
__device__ __forceinline__ PivotRoot<double> pivot_root_in_range(double d) {
  const double y0 = rsqrt_estimate(d);
  const double e = fma(-(d * y0), y0, 1.0);
  const double y = fma(y0 * e, fma(0.375, e, 0.5), y0);
  const double r0 = d * y;
  const double r = fma(fma(-r0, r0, d), 0.5 * y, r0);
  return {r, fma(y, fma(-r, y, 1.0), y)};
}
template <class R>
__device__ __forceinline__ bool plain_root(R root) {
  return root >= kSmallestPlainRoot<R> && root < kInfinity<R>;
}

// The same for every d: both are NaN if not d > 0, so a pivot has failed if and only if its root is
// NaN. Tiny pivots (subnormal ones above all) are scaled by an even power of two, exactly, so that
// no intermediate underflows.
template <class R>
__device__ __forceinline__ PivotRoot<R> pivot_root(R d) {
  constexpr bool kFloat = sizeof(R) == 4;
  const bool tiny = d < R(kFloat ? 0x1p-60 : 0x1p-500);
  const PivotRoot<R> p = pivot_root_in_range(tiny ? d * R(kFloat ? 0x1p64 : 0x1p600) : d);
  const bool infinite = d == kInfinity<R>;
  return {infinite ? d : p.root * (tiny ? R(kFloat ? 0x1p-32 : 0x1p-300) : R(1)),
          infinite ? R(0) : p.inverse * (tiny ? R(kFloat ? 0x1p32 : 0x1p300) : R(1))};
}

template <class R>
__device__ __forceinline__ bool is_nan(R a) {
  return !(a == a);
}

__device__ __forceinline__ float magnitude(float a) { return absolute(a); }
__device__ __forceinline__ double magnitude(double a) { return absolute(a); }
template <class R>
__device__ __forceinline__ R magnitude(Complex<R> a) {
  return absolute(a.re) + absolute(a.im);
}

template <class T>
__device__ __forceinline__ bool is_zero(T a) {
  return magnitude(a) == Real<T>(0);
}
// Not of inf or NaN.
template <class T>
__device__ __forceinline__ bool is_finite(T a) {
  const T none = a - a;
  return is_zero(none);
}

// The value of `a` in lane `source` of each segment of `width` lanes.
template <class R>
__device__ __forceinline__ R shuffle(R a, int source, int width = 32) {
  return __shfl_sync(kFullWarp, a, source, width);
}
template <class R>
__device__ __forceinline__ Complex<R> shuffle(Complex<R> a, int source, int width = 32) {
  return {__shfl_sync(kFullWarp, a.re, source, width), __shfl_sync(kFullWarp, a.im, source, width)};
}
template <class R>
__device__ __forceinline__ R shuffle_xor(R a, int mask) {
  return __shfl_xor_sync(kFullWarp, a, mask);
}
template <class R>
__device__ __forceinline__ Complex<R> shuffle_xor(Complex<R> a, int mask) {
  return {__shfl_xor_sync(kFullWarp, a.re, mask), __shfl_xor_sync(kFullWarp, a.im, mask)};
}

// conj(a) if `conjugate`, else a.
template <class T>
__device__ __forceinline__ T conj_if(bool conjugate, T a) {
  if constexpr (kIsComplex<T>) {
    return conjugate ? conj(a) : a;
  } else {
    return a;
  }
}

// c + a * b and c + conj(a) * b.
template <class T>
__device__ __forceinline__ T add_mul(T c, T a, T b) {
  return sub_mul(c, -a, b);
}
template <class T>
__device__ __forceinline__ T add_conj_mul(T c, T a, T b) {
  return sub_mul_conj(c, -b, a);
}

// 16 bytes of elements: the widest load and store.
template <class T>
inline constexpr int kVector = 16 / sizeof(T);
template <class T>
struct alignas(16) Vector {
  T v[kVector<T>];
};
// The first `count` of 8 elements (a few more, up to whole vectors) at a 16-byte aligned address.
template <class T>
__device__ __forceinline__ void load_vectors(T (&to)[8], const T* from, int count) {
#pragma unroll
  for (int k = 0; k < 8; k += kVector<T>) {
    if (k >= count) continue;
    const auto v = *reinterpret_cast<const Vector<T>*>(from + k);
#pragma unroll
    for (int z = 0; z < kVector<T>; ++z) to[k + z] = v.v[z];
  }
}
// Two neighbouring elements: what a lane holds of an 8x8 tile.
template <class T>
struct alignas(sizeof(T) < 16 ? 2 * sizeof(T) : 16) Pair {
  T a, b;
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
__host__ __device__ constexpr int make_odd(int a) { return a | 1; }

}  // namespace jax_batched::cuda
