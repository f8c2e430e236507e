// Asynchronous copies from global to shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace jax_batched::cuda {

// Starts a copy of one T of 4, 8 or 16 bytes, aligned to its size. `wait_for_copies` and then a
// barrier make it visible. Before sm_80, which has no such instruction, the copy is done when this
// returns.
template <class T>
__device__ __forceinline__ void copy_async(T* shared, const T* global) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const unsigned destination = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (sizeof(T) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"(destination), "l"(global)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                 :
                 : "r"(destination), "l"(global), "n"(sizeof(T))
                 : "memory");
  }
#else
  *shared = *global;
#endif
}

// The same for kBytes, of which the first `count` are copied and the others zero.
template <int kBytes>
__device__ __forceinline__ void copy_async_or_zero(void* shared, const void* global, int count) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const unsigned destination = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(destination), "l"(global), "r"(count)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(destination), "l"(global), "n"(kBytes), "r"(count)
                 : "memory");
  }
#else
  for (int at = 0; at < kBytes; at += 4) {
    static_cast<uint32_t*>(shared)[at / 4] =
        at < count ? static_cast<const uint32_t*>(global)[at / 4] : 0;
  }
#endif
}

// The same for 16 bytes that will hardly be read again: they are the first to leave the L2 cache.
template <class T>
__device__ __forceinline__ void copy_async_last(T* shared, const T* global) {
  static_assert(sizeof(T) == 16);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const unsigned destination = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
               :
               : "r"(destination), "l"(global), "l"(policy)
               : "memory");
#else
  copy_async(shared, global);
#endif
}

// Closes a group of copies.
__device__ __forceinline__ void commit_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

// Waits until at most kPending of this thread's groups are not complete.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
#endif
}

}  // namespace jax_batched::cuda
