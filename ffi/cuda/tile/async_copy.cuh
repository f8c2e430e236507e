// Asynchronous copies of single elements from global to shared memory.
//
// An element at a time, because a triangle seen through strides has no better common alignment, and
// because nothing but the triangle may be read. The lanes of a warp copy neighbouring elements, so
// the accesses are coalesced all the same.
#pragma once

#include <cuda_runtime.h>

namespace jax_batched::cuda {

// Starts a copy; `wait_for_copies` and then a barrier make it visible. Before sm_80, which has no
// such instruction, the copy is done when this returns.
template <class T>
__device__ __forceinline__ void copy_async(T* shared, const T* global) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  const unsigned destination = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
               :
               : "r"(destination), "l"(global), "n"(sizeof(T))
               : "memory");
#else
  *shared = *global;
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
