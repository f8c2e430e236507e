// Averages of both triangles of A in two instructions each, where six (mean() in scalar.h) would
// overflow the instruction cache or the registers.
//
// They may overflow only where 2 a_ii does for some i. No entry of a positive definite matrix
// exceeds its largest diagonal entry: so if none of these overflows and the sum of other entries
// does, the matrix is not one, and the infinite average fails it in the row that the finite one
// would. Kernels look at the diagonal first. Where it is large, averages with care go to the memory
// of L, and one triangle of these is factored.
#pragma once

#include "ffi/cuda/layout/view.cuh"

namespace jax_batched::cuda {

// The diagonal, read ahead of the question.
template <class T, int kThreads, int kMaxN>
struct Diagonal {
  Real<T> entries[ceil_div(kMaxN, kThreads)];  // of this thread

  __device__ __forceinline__ Diagonal(const T* a, int n) {
    int i = threadIdx.x % kThreads;
#pragma unroll
    for (auto& entry : entries) {
      entry = i < n ? real(a[i * (n + 1)]) : Real<T>(0);
      i += kThreads;
    }
  }
  __device__ __forceinline__ bool is_large() const {
    bool large = false;
#pragma unroll
    for (const auto entry : entries) large |= is_infinite(Real<T>(2) * entry);
    return large;
  }
};

// The averages of `a` -> l, by kThreads threads.
template <int kThreads, class T>
__device__ __noinline__ void store_averages(const T* a, T* l, int n) {
  for (int i = 0; i < n; ++i) {
    for (int j = threadIdx.x % kThreads; j <= i; j += kThreads) {
      const T average = hermitian_mean(a[i * n + j], a[j * n + i]);
      l[j * n + i] = conj(average);
      l[i * n + j] = average;
    }
  }
}

}  // namespace jax_batched::cuda
