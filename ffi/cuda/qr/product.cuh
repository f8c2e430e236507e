// What a product with Q of one matrix reads and writes.
#pragma once

#include "ffi/cuda/layout/view.cuh"
#include "ffi/problems/qr.h"

namespace jax_batched::cuda {

template <class T>
struct ProductWithQ {
  const T* from;  // null: the identity
  T* to;
  int columns;
  bool adjoint;
};
template <class T>
__device__ __forceinline__ ProductWithQ<T> product_of(const HouseholderProductProblem& p,
                                                      int64_t entry) {
  return {nullptr, p.q.at<T>(entry, p.m, p.n), p.n, false};
}
template <class T>
__device__ __forceinline__ ProductWithQ<T> product_of(const QrMultiplyProblem& p, int64_t entry) {
  const int columns = static_cast<int>(p.nrhs);
  return {matrix_at<const T>(p.c, entry, p.m, columns), p.x.at<T>(entry, p.m, columns), columns,
          p.adjoint};
}

}  // namespace jax_batched::cuda
