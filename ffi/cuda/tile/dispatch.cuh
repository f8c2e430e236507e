// From a row of a tier table to the kernels it names: each row is a template argument, so a table
// of tiers.h decides which kernels are compiled.
#pragma once

#include <cuda_runtime.h>

#include <iterator>

#include "ffi/cuda/tiers.h"

namespace jax_batched::cuda {

// Calls launcher.run<n>() for the n in 1..kMax given at run time.
template <int kMax, class Launcher>
cudaError_t with_size(int n, const Launcher& launcher) {
  if constexpr (kMax >= 1) {
    if (n == kMax) return launcher.template run<kMax>();
    return with_size<kMax - 1>(n, launcher);
  } else {
    return cudaErrorInvalidValue;
  }
}

// Calls launcher.tier<row>() for a row of launcher.kTable of element type T.
template <class T, class Launcher, size_t kRow = 0>
cudaError_t with_tier(int64_t row, const Launcher& launcher) {
  if constexpr (kRow < std::size(Launcher::kTable)) {
    if constexpr (Launcher::kTable[kRow].dtype == kDTypeOf<T>) {
      if (row == static_cast<int64_t>(kRow)) return launcher.template tier<kRow>();
    }
    return with_tier<T, Launcher, kRow + 1>(row, launcher);
  } else {
    return cudaErrorInvalidValue;
  }
}

}  // namespace jax_batched::cuda
