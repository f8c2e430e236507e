// Which kernel serves singular values and vectors: data.
#pragma once

#include <variant>

#include "ffi/cuda/runtime/table.h"
#include "ffi/problems/svd.h"

namespace jax_batched::cuda {

// One thread per matrix.
struct SvdThreadShape {
  static constexpr std::string_view kName = "thread";
};
// So many lanes for each pair of columns, which have so many rows each. "lanes.outside" is for
// where shared memory does not hold V.
struct SvdLanesShape {
  static constexpr std::string_view kName = "lanes";
  int lanes, rows;
  bool v_in_shared = true;
};

using SvdShape = std::variant<SvdThreadShape, SvdLanesShape>;

constexpr Row<SvdShape> of_svd_thread(DType dtype, int max_n) {
  return {dtype, 1, max_n, SvdThreadShape{}};
}
constexpr Row<SvdShape> of_svd_lanes(DType dtype, int min_n, SvdLanesShape shape) {
  return {dtype,
          min_n,
          shape.lanes * shape.rows,
          shape,
          {.variant = shape.v_in_shared ? "" : "outside"}};
}

inline constexpr Row<SvdShape> kSvdTable[] = {
    of_svd_thread(DType::kFloat32, 8),
    of_svd_lanes(DType::kFloat32, 4, {2, 4}),
    of_svd_lanes(DType::kFloat32, 9, {2, 8}),
    of_svd_lanes(DType::kFloat32, 17, {2, 16}),
    of_svd_lanes(DType::kFloat32, 33, {4, 16}),

    of_svd_thread(DType::kFloat64, 6),
    of_svd_lanes(DType::kFloat64, 4, {2, 4}),
    of_svd_lanes(DType::kFloat64, 9, {2, 8}),
    of_svd_lanes(DType::kFloat64, 17, {2, 16}),
    of_svd_lanes(DType::kFloat64, 33, {4, 16}),

    of_svd_thread(DType::kComplex64, 5),
    of_svd_lanes(DType::kComplex64, 4, {2, 4}),
    of_svd_lanes(DType::kComplex64, 9, {2, 8}),
    of_svd_lanes(DType::kComplex64, 17, {2, 16}),
    of_svd_lanes(DType::kComplex64, 33, {4, 16}),

    of_svd_thread(DType::kComplex128, 3),
    of_svd_lanes(DType::kComplex128, 3, {2, 4}),
    of_svd_lanes(DType::kComplex128, 9, {2, 8}),
    of_svd_lanes(DType::kComplex128, 17, {4, 8}),
    of_svd_lanes(DType::kComplex128, 33, {8, 8}),
    of_svd_lanes(DType::kComplex128, 33, {8, 8, false}),
};
static_assert(names_are_distinct(kSvdTable), "give rows that overlap a variant");

template <>
struct Policy<SvdProblem> : TablePolicy<kSvdTable> {
  template <class F>
  static void for_each_limit(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) {
      if (!is_storage_only(dtype)) f(Limit{dtype, SvdProblem::kMaxN});
    }
  }
};

}  // namespace jax_batched::cuda
