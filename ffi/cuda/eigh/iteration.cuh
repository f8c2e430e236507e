// The QR iteration for eigenvalues of a real symmetric tridiagonal matrix, with Wilkinson's shift.
//
// A sweep chases the bulge down from the first row to the last that is not done, in all matrices of
// a warp together. Where an off-diagonal element is zero the rotation is exactly the identity, and
// the next block starts: so matrices that split, that are done or that are diagonal need no branch,
// and what a matrix becomes does not depend on its neighbours.
//
// Every matrix is scaled by a power of two first, its largest number is in [1, 2): squares cannot
// overflow, and what underflows is harmless.
#pragma once

#include "ffi/cuda/qr/reflection.cuh"

namespace jax_batched::cuda {

// 1 / sqrt(d) within an ulp or so, for d that is normal.
__device__ __forceinline__ float inverse_root(float d) {
  const float y = rsqrt_estimate(d);
  return fmaf(0.5f * y, fmaf(-(d * y), y, 1.0f), y);
}
__device__ __forceinline__ double inverse_root(double d) {
  const double y = rsqrt_estimate(d);
  const double e = fma(-(d * y), y, 1.0);
  return fma(fma(0.375, e, 0.5), y * e, y);
}

// a * b which is no part of an FMA: where code for the same number stands twice, both round it.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

__device__ __forceinline__ int warp_max(int a) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kFullWarp, a);
#else
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) a = max(a, __shfl_xor_sync(kFullWarp, a, mask));
  return a;
#endif
}

template <class R>
inline constexpr R kRoundoff = std::numeric_limits<R>::epsilon();
// A rotation by less than this is none. Its square is a normal number.
template <class R>
inline constexpr R kSmallestRotation = R(1e-18);
template <>
inline constexpr double kSmallestRotation<double> = 1e-150;

// c + re(conj(a) b).
template <class R>
__device__ __forceinline__ R add_real_product(R c, R a, R b) {
  return multiply_add(a, b, c);
}
template <class R>
__device__ __forceinline__ R add_real_product(R c, Complex<R> a, Complex<R> b) {
  return multiply_add(a.im, b.im, multiply_add(a.re, b.re, c));
}

// -0 becomes 0. Rotations that are the identity may do that, and their number is not the matrix's.
template <class R>
__device__ __forceinline__ R without_sign_of_zero(R a) {
  return a + R(0);
}
template <class R>
__device__ __forceinline__ Complex<R> without_sign_of_zero(Complex<R> a) {
  return {a.re + R(0), a.im + R(0)};
}

// Sweeps after which a matrix of order n is given up. Two for each eigenvalue are usual.
__host__ __device__ constexpr int eigh_max_sweeps(int n) { return 6 * n + 30; }

// The eigenvalue of ((above, off), (off, last)) that is nearer to `last`, roughly.
template <class R>
__device__ __forceinline__ R wilkinson_shift(R above, R last, R off) {
  const R half = R(0.5) * (above - last);
  const R squares = multiply_add(half, half, off * off);
  const bool small = !(squares > kSmallestRotation<R> * kSmallestRotation<R>);
  const R size = fabs(half) + (small ? fabs(off) : squares * rsqrt_estimate(squares));
  const R correction = rounded_product(off * off, reciprocal_estimate(size));
  return size > kSmallestRotation<R> ? last - copysign(correction, half) : last;
}

// A sweep between two rotations of neighbouring rows and columns.
template <class R>
struct Sweep {
  R shift, tolerance;
  R g;                   // d_i - shift as the rotations so far leave it
  R c = R(1), s = R(1);  // of the last rotation
  R p = R(0);            // what it takes from d_i
  bool starts = true;    // no rotation reaches row i from above

  __device__ __forceinline__ Sweep(R shift, R tolerance, R first)
      : shift(shift), tolerance(tolerance), g(first - shift) {}

  // An element off the diagonal, zero where it is negligible.
  __device__ __forceinline__ R kept(R e) const { return starts || fabs(e) <= tolerance ? R(0) : e; }

  // Rotates rows and columns i and i + 1, given e_i and d_(i+1): d_i is final, e_before is e_(i-1).
  __device__ __forceinline__ void rotate(R& d, R& e_before, R e, R d_next) {
    const R f = s * e, b = c * e;
    const R h = multiply_add(f, f, rounded_product(g, g));
    const bool none = !(fabs(f) >= kSmallestRotation<R>);
    const R inverse = inverse_root(h);
    const R r = none ? g : rounded_product(h, inverse);
    c = none ? R(1) : rounded_product(g, inverse);
    s = none ? R(0) : rounded_product(f, inverse);
    e_before = kept(r);
    const R q = d - p;
    const R twist = multiply_add(d_next - q, s, rounded_product(R(2) * c, b));
    p = rounded_product(s, twist);
    d = q + p;
    g = multiply_add(c, twist, -b);
    starts = e == R(0);
  }
  // Before row i + 1: after a zero e_i, c is 1 and p is 0.
  __device__ __forceinline__ void restart(R d_next) {
    s = starts ? R(1) : s;
    g = starts ? d_next - shift : g;
  }
  // The sweep's last row.
  __device__ __forceinline__ void finish(R& d, R& e_before) {
    d = d - p;
    e_before = kept(g);
  }
};

// (x, y) -> (c x + s y, c y - s x).
template <class R>
__device__ __forceinline__ void rotate(R& x, R& y, R c, R s) {
  const R before = x;
  x = multiply_add(c, before, rounded_product(s, y));
  y = multiply_add(-s, before, rounded_product(c, y));
}
template <class R>
__device__ __forceinline__ void rotate(Complex<R>& x, Complex<R>& y, R c, R s) {
  rotate(x.re, y.re, c, s);
  rotate(x.im, y.im, c, s);
}

}  // namespace jax_batched::cuda
