// The choice among compiled kernels as measured: keyed by operation, accuracy, dtype, compute
// capability, n and number of right-hand sides. The data is tuned_tiers.h, written by
// `python -m jax_batched.tune`; the candidates are the rows of tiers.h and substitution_tiers.h.
//
// The batch count is not part of the key: a matrix has the same result in any batch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "ffi/common/problem.h"

namespace jax_batched::cuda {

// No limit on n or on the number of right-hand sides.
inline constexpr int64_t kAny = INT64_MAX;

// The dtype of the rows that serve elements of a dtype: the two formats of 16 bits share theirs.
constexpr DType table_dtype(DType dtype) {
  return dtype == DType::kBFloat16 ? DType::kFloat16 : dtype;
}

// What a choice depends on.
struct Call {
  std::string_view operation;
  DType dtype;  // table_dtype of the elements'
  int64_t n;
  int64_t nrhs;    // 1 for an operation without right-hand sides
  bool fast;       // accuracy="fast"
  int capability;  // of the GPU: 90 for sm_90
};

// One measured range: `kernel` names the candidate that serves it.
struct TunedTier {
  int capability;  // of the GPU that was measured
  std::string_view operation;
  bool fast;
  DType dtype;
  int64_t max_nrhs;
  int64_t min_n;
  int64_t max_n;
  std::string_view kernel;

  constexpr bool same_kind(const Call& call) const {
    return operation == call.operation && fast == call.fast && dtype == call.dtype;
  }
};

// The candidate that was fastest for a call on a GPU of its capability or, if none like it was
// measured, of the nearest lower one. Empty if there is no such measurement. The rows of one kind
// are sorted by max_nrhs: the first that covers the call serves.
template <size_t kRows>
constexpr std::string_view tuned_kernel(const std::array<TunedTier, kRows>& table,
                                        const Call& call) {
  int measured = 0;
  for (const TunedTier& tier : table) {
    if (tier.same_kind(call) && tier.capability <= call.capability && tier.capability > measured) {
      measured = tier.capability;
    }
  }
  for (const TunedTier& tier : table) {
    if (tier.capability == measured && tier.same_kind(call) && call.nrhs <= tier.max_nrhs &&
        tier.min_n <= call.n && call.n <= tier.max_n) {
      return tier.kernel;
    }
  }
  return {};
}

}  // namespace jax_batched::cuda
