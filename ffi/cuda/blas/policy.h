// Which kernel serves a product: data.
#pragma once

#include <variant>

#include "ffi/cuda/runtime/table.h"
#include "ffi/problems/gemm.h"

namespace jax_batched::cuda {

// A tile of X per warp, for matrices of few tiles; and per block of four warps, which share what
// they read.
struct GemmWarpShape {
  static constexpr std::string_view kName = "warp";
  static constexpr int kSide = 1;
};
struct GemmBlockShape {
  static constexpr std::string_view kName = "block";
  static constexpr int kSide = 2;
};
using GemmShape = std::variant<GemmWarpShape, GemmBlockShape>;

inline constexpr Row<GemmShape> kGemmTable[] = {
    {DType::kFloat32, 1, 32, GemmWarpShape{}},
    {DType::kFloat32, 1, GemmProblem::kMaxN, GemmBlockShape{}},
    {DType::kFloat64, 1, 32, GemmWarpShape{}},
    {DType::kFloat64, 1, GemmProblem::kMaxN, GemmBlockShape{}},
    {DType::kComplex64, 1, 32, GemmWarpShape{}},
    {DType::kComplex64, 1, GemmProblem::kMaxN, GemmBlockShape{}},
    {DType::kComplex128, 1, 48, GemmWarpShape{}},
    {DType::kComplex128, 1, GemmProblem::kMaxN, GemmBlockShape{}},
};
static_assert(names_are_distinct(kGemmTable), "give rows that overlap a variant");

template <>
struct Policy<GemmProblem> : TablePolicy<kGemmTable> {
  template <class F>
  static void for_each_limit(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) {
      if (!is_storage_only(dtype)) f(Limit{dtype, GemmProblem::kMaxN});
    }
  }
};

}  // namespace jax_batched::cuda
