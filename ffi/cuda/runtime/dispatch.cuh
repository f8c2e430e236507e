// From a row of a table to the kernels it names: each row is a template argument, so a table
// decides which kernels are compiled.
#pragma once

#include <cuda_runtime.h>

#include <iterator>

#include "ffi/cuda/runtime/launch.cuh"
#include "ffi/cuda/runtime/table.h"

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

// Calls launcher.row<row>() for a row of launcher.kTable that serves elements of type S.
template <class S, class Launcher, size_t kRow = 0>
cudaError_t with_row(int64_t row, const Launcher& launcher) {
  if constexpr (kRow < std::size(Launcher::kTable)) {
    if constexpr (Launcher::kTable[kRow].dtype == table_dtype(kDTypeOf<S>)) {
      if (row == static_cast<int64_t>(kRow)) return launcher.template row<kRow>();
    }
    return with_row<S, Launcher, kRow + 1>(row, launcher);
  } else {
    return cudaErrorInvalidValue;
  }
}

// The shape in a row.
template <const auto& kTable, size_t kRow>
inline constexpr auto kShapeOf = std::get<kTable[kRow].shape.index()>(kTable[kRow].shape);

// Launches the kernel that serves a call on the current device, whose capability is filled in here:
// the one named, else the one that the tables choose. If that one needs more shared memory than the
// device has, the first of the others that fits.
template <class S, class Launcher>
cudaError_t launch_row(Call call, std::string_view name, const Launcher& launcher) {
  cudaError_t error = compute_capability(&call.capability);
  if (error != cudaSuccess) return error;
  const int64_t chosen = find_row(Launcher::kTable, tuned_rows(), call, name);
  error = with_row<S>(chosen, launcher);
  if (error != kDoesNotFit || !name.empty()) return error;
  for (size_t row = 0; row < std::size(Launcher::kTable); ++row) {
    if (static_cast<int64_t>(row) == chosen || !Launcher::kTable[row].serves(call)) continue;
    error = with_row<S>(static_cast<int64_t>(row), launcher);
    if (error != kDoesNotFit) return error;
  }
  return error;
}

}  // namespace jax_batched::cuda
