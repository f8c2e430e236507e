#pragma once

#include "ffi/cuda/runtime/table.h"
#include "ffi/problems/residual.h"

namespace jax_batched::cuda {

inline constexpr int kResidualMaxN = 512;

template <>
struct Policy<ResidualProblem> : OneKernelPolicy {
  template <class F>
  static void for_each_limit(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) {
      if (!is_storage_only(dtype)) f(Limit{dtype, kResidualMaxN});
    }
  }
};

}  // namespace jax_batched::cuda
