// Rotations that make two columns orthogonal.
#pragma once

#include "ffi/cuda/eigh/iteration.cuh"

namespace jax_batched::cuda {

// A column with no more squares than this is zero. (The largest number of a matrix is 1 to 2.)
template <class R>
inline constexpr R kSmallestColumn = R(1e-30);
template <>
inline constexpr double kSmallestColumn<double> = 1e-250;

// Six to eight are usual.
inline constexpr int kMaxSvdSweeps = 30;

// From x^H x, y^H y and x^H y. With cos = x^H y / (||x|| ||y||) and delta = (||y|| / ||x|| -
// ||x|| / ||y||) / 2 the angle's tangent is sign(delta) |cos| / (|delta| + sqrt(delta^2 +
// |cos|^2)), and 2 cos^2 of the angle is 1 + |delta| / sqrt(delta^2 + |cos|^2).
template <class T>
struct ColumnRotation {
  using R = Real<T>;
  bool is_needed;
  T s;
  T r;  // s / (1 + c)

  __device__ __forceinline__ ColumnRotation(R xx, R yy, T xy) {
    constexpr R kSmallestCosine = 4 * kRoundoff<R>;
    const R both = inverse_root(xx) * inverse_root(yy);
    const T cosine = scale(xy, both);
    const R squares = add_square(R(0), cosine);
    is_needed = xx > kSmallestColumn<R> && yy > kSmallestColumn<R> &&
                squares > kSmallestCosine * kSmallestCosine;
    const R delta = R(0.5) * (yy - xx) * both;
    const R inverse = inverse_root(multiply_add(delta, delta, squares));
    const R twice = quick_reciprocal(multiply_add(fabs(delta), inverse, R(1)));
    // |cosine| / (|delta| + ...) with the phase of the cosine, which is x^H y's.
    const T tangent = scale(cosine, copysign(inverse * twice, delta));
    const R c = inverse_root(add_square(R(1), tangent));
    s = scale(tangent, c);
    r = scale(s, quick_reciprocal(R(1) + c));
  }
  // (x, y) -> (c x - conj(s) y, c y + s x). Of a small angle c is 1, rounded, which would change
  // norms the same way in every rotation: c = 1 - s conj(r).
  __device__ __forceinline__ void apply(T& x, T& y) const {
    const T before = x;
    x = sub_mul(x, conj(s), add_mul(y, r, x));
    y = add_mul(y, s, sub_mul(before, conj(r), y));
  }
};

}  // namespace jax_batched::cuda
