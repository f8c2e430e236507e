// Which kernel serves eigenvalues and eigenvectors: data.
#pragma once

#include <variant>

#include "ffi/cuda/runtime/table.h"
#include "ffi/problems/eigh.h"

namespace jax_batched::cuda {

// One thread per matrix.
struct EighThreadShape {
  static constexpr std::string_view kName = "thread";
};
// So many lanes of a warp for each matrix, with two columns each.
struct EighBlockShape {
  static constexpr std::string_view kName = "block";
  int lanes;
};

using EighShape = std::variant<EighThreadShape, EighBlockShape>;

constexpr Row<EighShape> of_eigh_thread(DType dtype, int max_n) {
  return {dtype, 1, max_n, EighThreadShape{}};
}
constexpr Row<EighShape> of_eigh_block(DType dtype, int lanes) {
  return {dtype, lanes + 1, 2 * lanes, EighBlockShape{lanes}};
}

inline constexpr Row<EighShape> kEighTable[] = {
    of_eigh_thread(DType::kFloat32, 8),    of_eigh_block(DType::kFloat32, 8),
    of_eigh_block(DType::kFloat32, 16),    of_eigh_block(DType::kFloat32, 32),

    of_eigh_thread(DType::kFloat64, 8),    of_eigh_block(DType::kFloat64, 8),
    of_eigh_block(DType::kFloat64, 16),    of_eigh_block(DType::kFloat64, 32),

    of_eigh_thread(DType::kComplex64, 6),  of_eigh_block(DType::kComplex64, 4),
    of_eigh_block(DType::kComplex64, 8),   of_eigh_block(DType::kComplex64, 16),
    of_eigh_block(DType::kComplex64, 32),

    of_eigh_thread(DType::kComplex128, 4), of_eigh_block(DType::kComplex128, 4),
    of_eigh_block(DType::kComplex128, 8),  of_eigh_block(DType::kComplex128, 16),
    of_eigh_block(DType::kComplex128, 32),
};
static_assert(names_are_distinct(kEighTable), "give rows that overlap a variant");

template <>
struct Policy<EighProblem> : TablePolicy<kEighTable> {
  template <class F>
  static void for_each_limit(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) {
      if (!is_storage_only(dtype)) f(Limit{dtype, EighProblem::kMaxN});
    }
  }
};

}  // namespace jax_batched::cuda
