// The choice among compiled kernels as measured: keyed by operation, accuracy, dtype, compute
// capability, n and number of right-hand sides. The data is jax_batched/data/tuned.json or a user's
// file, written by `python -m jax_batched.tune`; the candidates are the rows of the policy.h files.
//
// The batch count is not part of the key: a matrix has the same result in any batch.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "ffi/common/dtype.h"

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
  int64_t nrhs = 1;    // 1 for an operation without right-hand sides
  bool fast = false;   // accuracy="fast"
  int capability = 0;  // of the GPU: 90 for sm_90
  bool transposed =
      false;      // the rows of b and x are the right-hand sides, of which there are several
  int64_t m = 0;  // rows of matrices that need not be square; 0: n

  constexpr int64_t rows() const { return m == 0 ? n : m; }
};

// One measured range: `kernel` names the candidate that serves it.
struct TunedRow {
  int capability;  // of the GPU that was measured
  std::string_view operation;
  bool fast;
  DType dtype;
  int64_t max_nrhs;
  int64_t min_n;
  int64_t max_n;
  std::string_view kernel;

  constexpr bool same_kind(const Call& call) const {
    return dtype == call.dtype && fast == call.fast && operation == call.operation;
  }
};
using TunedRows = std::vector<TunedRow>;

// The rows that are in use: those of the last set_tuned_rows(). They and the text that they refer
// to are never freed, so that a call may hold on to them while others are set.
const TunedRows& tuned_rows();
void set_tuned_rows(const TunedRows& rows);

// The candidate that was fastest for a call on a GPU of its capability or, if none like it was
// measured, of the nearest lower one. Empty if there is no such measurement. The rows of one kind
// are sorted by max_nrhs: the first that covers the call serves.
template <class Rows>
constexpr std::string_view tuned_kernel(const Rows& rows, const Call& call) {
  int measured = 0;
  for (const TunedRow& row : rows) {
    if (row.same_kind(call) && row.capability <= call.capability && row.capability > measured) {
      measured = row.capability;
    }
  }
  for (const TunedRow& row : rows) {
    if (row.capability == measured && row.same_kind(call) && call.nrhs <= row.max_nrhs &&
        row.min_n <= call.n && call.n <= row.max_n) {
      return row.kernel;
    }
  }
  return {};
}

}  // namespace jax_batched::cuda
