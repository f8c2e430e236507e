// Products on the tensor cores: of doubles, where float64 is IEEE FMAs, and of floats, compensated.
// Operands are fragments (fragment.cuh): an accumulator is an operand of the next product if its 8
// columns count as 2t for one half of the products and as 2t + 1 for the other, in both operands.
#pragma once

#include "ffi/cuda/device/math.cuh"

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
// tile i, b its pair of b. For GPUs without such tensor cores: by FMAs, whole rows of a and b
// fetched by shuffles.
template <class T>
__device__ __forceinline__ void add_product_by_shuffles(T (&c)[2][2], const Pair<T> (&a)[2],
                                                        Pair<T> b) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1                 // short code: the kernels hold hundreds of products
  for (int k = 0; k < 4; ++k) {  // columns 2k and 2k + 1
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 4 * (2 * t + h) + k;
      const Pair<T> right{shuffle(b.a, row), shuffle(b.b, row)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        c[i][h] = add_mul(c[i][h], shuffle(a[i].a, 4 * g + k), right.a);
        c[i][h] = add_mul(c[i][h], shuffle(a[i].b, 4 * g + k), right.b);
      }
    }
  }
}

// The same by the tensor cores, where they are.
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
  add_product_by_shuffles(c, a, b);
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

// c -= a b^H of complex fragments, 8x8x8, and of two of them, one above the other.
__device__ __forceinline__ void subtract_product(Complex<double> (&c)[2],
                                                 const Complex<double> (&a)[2],
                                                 const Complex<double> (&b)[2]) {
  double re[2] = {c[0].re, c[1].re}, im[2] = {c[0].im, c[1].im};
  const Pair<double> minus_re{-a[0].re, -a[1].re}, minus_im{-a[0].im, -a[1].im};
  add_product(re, minus_re, {b[0].re, b[1].re});
  add_product(im, minus_im, {b[0].re, b[1].re});
  add_product(re, minus_im, {b[0].im, b[1].im});
  add_product(im, minus_re, {-b[0].im, -b[1].im});
#pragma unroll
  for (int h = 0; h < 2; ++h) c[h] = {re[h], im[h]};
}
__device__ __forceinline__ void subtract_product(Complex<double> (&c0)[2], Complex<double> (&c1)[2],
                                                 const Complex<double> (&a0)[2],
                                                 const Complex<double> (&a1)[2],
                                                 const Complex<double> (&b)[2]) {
  double re[2][2] = {{c0[0].re, c0[1].re}, {c1[0].re, c1[1].re}};
  double im[2][2] = {{c0[0].im, c0[1].im}, {c1[0].im, c1[1].im}};
  const Pair<double> minus_re[2] = {{-a0[0].re, -a0[1].re}, {-a1[0].re, -a1[1].re}};
  const Pair<double> minus_im[2] = {{-a0[0].im, -a0[1].im}, {-a1[0].im, -a1[1].im}};
  add_product(re, minus_re, {b[0].re, b[1].re});
  add_product(im, minus_im, {b[0].re, b[1].re});
  add_product(re, minus_im, {b[0].im, b[1].im});
  add_product(im, minus_re, {-b[0].im, -b[1].im});
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    c0[h] = {re[0][h], im[0][h]};
    c1[h] = {re[1][h], im[1][h]};
  }
}

// A pair of floats as an operand of a compensated product: x = high + low exactly, high being x
// rounded to the 11 bits of TF32. The tensor cores drop what low has beyond 11 bits, at most the
// last bit of x.
struct SplitPair {
  Pair<float> high, low;
};

__device__ __forceinline__ float round_to_tf32(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
}
__device__ __forceinline__ SplitPair split(Pair<float> x) {
  const Pair<float> high{round_to_tf32(x.a), round_to_tf32(x.b)};
  return {high, {x.a - high.a, x.b - high.b}};
}

#if __CUDA_ARCH__ >= 800
// c += a b^T in TF32: exact products, summed to about 24 bits and truncated.
__device__ __forceinline__ void multiply_add_tf32(float (&c)[2][2], const Pair<float>& above,
                                                  const Pair<float>& below, Pair<float> b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[1][0]), "+f"(c[1][1])
      : "r"(__float_as_uint(above.a)), "r"(__float_as_uint(below.a)), "r"(__float_as_uint(above.b)),
        "r"(__float_as_uint(below.b)), "r"(__float_as_uint(b.a)), "r"(__float_as_uint(b.b)));
}
#endif

// c += a b^T to nearly the accuracy of float32: the three products of which at most one factor is a
// low part, small ones first. As the tensor cores truncate sums, c should be short-lived: start it
// at zero and add it to a longer sum by an addition of its own, which rounds.
__device__ __forceinline__ void add_product(float (&c)[2][2], const SplitPair (&a)[2],
                                            const SplitPair& b) {
#if __CUDA_ARCH__ >= 800
  multiply_add_tf32(c, a[0].low, a[1].low, b.high);
  multiply_add_tf32(c, a[0].high, a[1].high, b.low);
  multiply_add_tf32(c, a[0].high, a[1].high, b.high);
#else
  const auto join = [](const SplitPair& x) {
    return Pair<float>{x.high.a + x.low.a, x.high.b + x.low.b};
  };
  add_product_by_shuffles(c, {join(a[0]), join(a[1])}, join(b));
#endif
}

// c -= a b^T.
__device__ __forceinline__ void subtract_product(float (&c)[2][2], const SplitPair (&a)[2],
                                                 const SplitPair& b) {
  float product[2][2] = {};
  add_product(product, a, b);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) c[i][h] -= product[i][h];
  }
}

}  // namespace jax_batched::cuda
