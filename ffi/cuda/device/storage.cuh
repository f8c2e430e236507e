// 16-bit floating point as a storage format: read, computed in float32, rounded once on the way
// out. Every other element type is stored as it is computed.
#pragma once

#include "ffi/common/scalar.h"
#include "ffi/cuda/device/math.cuh"

namespace jax_batched::cuda {

// From storage, exactly.
template <class T>
__device__ __forceinline__ T widen(T a) {
  return a;
}
__device__ __forceinline__ float widen(Float16 a) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(a.bits));
  return wide;
}
__device__ __forceinline__ float widen(BFloat16 a) {
  return __uint_as_float(static_cast<unsigned>(a.bits) << 16);
}

// hermitian_mean() of widened elements: sums of float16 do not overflow, and half of a bfloat16 is
// exact.
template <class S>
__device__ __forceinline__ Computed<S> stored_mean(Computed<S> a_ij, Computed<S> a_ji) {
  if constexpr (std::is_same_v<S, Float16>) {
    return 0.5f * (a_ij + a_ji);
  } else if constexpr (std::is_same_v<S, BFloat16>) {
    return fmaf(0.5f, a_ij, 0.5f * a_ji);
  } else {
    return hermitian_mean(a_ij, a_ji);
  }
}

// To storage, rounded to the nearest, ties to even.
template <class S>
__device__ __forceinline__ S narrow(Computed<S> a) {
  return a;
}
template <>
__device__ __forceinline__ Float16 narrow<Float16>(float a) {
  Float16 stored;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored.bits) : "f"(a));
  return stored;
}
template <>
__device__ __forceinline__ BFloat16 narrow<BFloat16>(float a) {
  BFloat16 stored;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(stored.bits) : "f"(a));
#else
  const unsigned bits = __float_as_uint(a);
  stored.bits = is_nan(a) ? 0x7fff : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
#endif
  return stored;
}

}  // namespace jax_batched::cuda
