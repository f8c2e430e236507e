// Products with Q of matrices of a few rows, and Q itself: 8, 16 or 32 lanes of a warp for each
// matrix, with rows of kColumns columns of C in their registers. Reflections are applied one by
// one, C -= v tau (v^H C): a product v^H C is a sum over lanes.
#pragma once

#include "ffi/cuda/qr/product.cuh"
#include "ffi/cuda/qr/reflection.cuh"

namespace jax_batched::cuda {

// Lane l has rows l, l + kLanes, ..., kRows of them.
template <class T, class P, int kLanes, int kRows, int kColumns>
__global__ void __launch_bounds__(32) qr_product_lanes_kernel(const P p) {
  using R = Real<T>;
  constexpr int kMatrices = 32 / kLanes;
  constexpr bool kForms = std::is_same_v<P, HouseholderProductProblem>;
  const int64_t first = int64_t{blockIdx.x} * kMatrices;
  if (skips(p, first, kMatrices)) return;
  // Lanes beyond the batch repeat its last matrix, and store nothing.
  const int64_t own = first + threadIdx.x / kLanes;
  const bool inside = own < p.batch;
  const int64_t entry = inside ? own : p.batch - 1;
  const int lane = threadIdx.x % kLanes;
  const int m = p.m, n = p.n, k = static_cast<int>(p.k);
  const T* a = matrix_at<const T>(p.a, entry, m, n);
  const T* taus = matrix_at<const T>(p.taus, entry, k);
  const auto [from, to, columns, adjoint] = product_of<T>(p, entry);
#pragma unroll 1
  for (int begin = 0; begin < columns; begin += kColumns) {
    T c[kRows][kColumns];
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      const int i = lane + kLanes * s;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        c[s][j] = T(R(kForms && i == begin + j ? 1 : 0));
        if (!kForms && i < m && begin + j < columns) c[s][j] = from[i * columns + begin + j];
      }
    }
    // Of the identity's columns, reflections after the last one change none.
    const int applied = kForms ? min(k, begin + kColumns) : k;
#pragma unroll 2
    for (int step = 0; step < applied; ++step) {
      const int l = adjoint ? step : applied - 1 - step;
      T v[kRows], w[kColumns];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) w[j] = T(R(0));
#pragma unroll
      for (int s = 0; s < kRows; ++s) {
        const int i = lane + kLanes * s;
        v[s] = T(R(i == l ? 1 : 0));
        if (i > l && i < m) v[s] = a[i * n + l];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) w[j] = add_conj_mul(w[j], v[s], c[s][j]);
      }
      const T tau = conj_if(adjoint, taus[l]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int mask = kLanes / 2; mask > 0; mask /= 2) w[j] = w[j] + shuffle_xor(w[j], mask);
        w[j] = product(tau, w[j]);
      }
#pragma unroll
      for (int s = 0; s < kRows; ++s) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) c[s][j] = sub_mul(c[s][j], v[s], w[j]);
      }
    }
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      const int i = lane + kLanes * s;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (inside && i < m && begin + j < columns) to[i * columns + begin + j] = c[s][j];
      }
    }
  }
}

}  // namespace jax_batched::cuda
