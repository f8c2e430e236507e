// Code that needs a constant, for a value known at run time.
//
// A kernel that holds a matrix in registers can only index it with constants. Unrolled as a whole,
// a loop over its panels overflows the instruction cache; so the loop stays a loop, and only the
// part that touches these registers is compiled once per panel.
#pragma once

namespace jax_batched::cuda {

// std::integral_constant has no device code.
template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls f(Constant<value>) for a value in kFirst .. kLast.
template <int kFirst, int kLast, class F>
__device__ __forceinline__ void with_constant(int value, F&& f) {
  if constexpr (kFirst == kLast) {
    f(Constant<kFirst>{});
  } else {
    constexpr int kMiddle = (kFirst + kLast) / 2;
    if (value <= kMiddle) {
      with_constant<kFirst, kMiddle>(value, f);
    } else {
      with_constant<kMiddle + 1, kLast>(value, f);
    }
  }
}

}  // namespace jax_batched::cuda
