// Products of doubles on the tensor cores, where float64 is IEEE FMAs. Operands are fragments
// (fragment.cuh): an accumulator is an operand of the next product if its 8 columns count as 2t for
// one half of the products and as 2t + 1 for the other, in both operands.
#pragma once

#include "ffi/cuda/tile/math.cuh"

namespace jax_batched::cuda {

#if __CUDA_ARCH__ >= 800
// c += a b^T, 8x8x4. From sm_80 on.
__device__ __forceinline__ void multiply_add(double (&c)[2], double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(c[0]), "+d"(c[1])
      : "d"(a), "d"(b));
}
#endif

// c (two fragments, one above the other) += a b^T, a 16x8, b 8x8: a[i] is this lane's pair of row
// tile i, b its pair of b. GPUs without such tensor cores fetch whole rows of a and b by shuffles.
__device__ __forceinline__ void add_product(double (&c)[2][2], const Pair<double> (&a)[2],
                                            Pair<double> b) {
#if __CUDA_ARCH__ >= 900
  // Twice the rate of m8n8k4.
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(c[0][0]), "+d"(c[0][1]), "+d"(c[1][0]), "+d"(c[1][1])
      : "d"(a[0].a), "d"(a[1].a), "d"(a[0].b), "d"(a[1].b), "d"(b.a), "d"(b.b));
#elif __CUDA_ARCH__ >= 800
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    multiply_add(c[i], a[i].a, b.a);
    multiply_add(c[i], a[i].b, b.b);
  }
#else
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1  // short code: the kernels hold hundreds of products
  for (int k = 0; k < 4; ++k) {  // columns 2k and 2k + 1
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 4 * (2 * t + h) + k;
      const Pair<double> right{shuffle(b.a, row), shuffle(b.b, row)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        c[i][h] = add_mul(c[i][h], shuffle(a[i].a, 4 * g + k), right.a);
        c[i][h] = add_mul(c[i][h], shuffle(a[i].b, 4 * g + k), right.b);
      }
    }
  }
#endif
}

// The same for one fragment, 8x8x8.
__device__ __forceinline__ void add_product(double (&c)[2], Pair<double> a, Pair<double> b) {
#if __CUDA_ARCH__ >= 800
  multiply_add(c, a.a, b.a);
  multiply_add(c, a.b, b.b);
#else
  double both[2][2] = {{c[0], c[1]}, {0, 0}};
  add_product(both, {a, {0, 0}}, b);
  c[0] = both[0][0];
  c[1] = both[0][1];
#endif
}

// c -= a b^T.
__device__ __forceinline__ void subtract_product(double (&c)[2][2], const Pair<double> (&a)[2],
                                                 Pair<double> b) {
  add_product(c, {{-a[0].a, -a[0].b}, {-a[1].a, -a[1].b}}, b);
}

}  // namespace jax_batched::cuda
