// Which kernel serves a QR factorization or a product with Q: data. n counts columns, of Q where it
// has more than A.
#pragma once

#include <algorithm>
#include <variant>

#include "ffi/cuda/runtime/table.h"
#include "ffi/problems/qr.h"

namespace jax_batched::cuda {

// One thread per matrix.
struct QrThreadShape {
  static constexpr std::string_view kName = "thread";
};
// `lanes` of a warp for each matrix, which hold so many columns each.
struct QrLanesShape {
  static constexpr std::string_view kName = "lanes";
  int lanes, columns, rows;
  int min_blocks = 1;
};
// A block per matrix, with panels of `width` columns: a lane has some of them in every so many
// rows, `slots` rows in all.
struct QrBlockShape {
  static constexpr std::string_view kName = "block";
  int warps, slots, width, columns;
  int min_blocks = 1;

  constexpr int64_t rows() const { return warps * slots * (32 / (width / columns)); }
};

using QrShape = std::variant<QrThreadShape, QrLanesShape, QrBlockShape>;

constexpr Row<QrShape> of_rows(DType dtype, QrBlockShape shape, std::string_view variant = "") {
  return {dtype, 1, 512, shape, {.variant = variant, .rows = shape.rows()}};
}

// Where shared memory does not hold what a block of 32 or 16 columns needs, "block.narrow" serves.
inline constexpr Row<QrShape> kQrTable[] = {
    of_rows(DType::kFloat32, {1, 16, 32, 4, 8}),
    of_rows(DType::kFloat32, {2, 16, 32, 4, 5}),
    of_rows(DType::kFloat32, {4, 16, 32, 4, 2}),
    of_rows(DType::kFloat32, {8, 16, 32, 4, 1}),
    of_rows(DType::kFloat32, {8, 8, 16, 4, 1}, "narrow"),

    of_rows(DType::kFloat64, {1, 8, 16, 4, 8}),
    of_rows(DType::kFloat64, {2, 8, 16, 4, 5}),
    of_rows(DType::kFloat64, {4, 8, 16, 4, 2}),
    of_rows(DType::kFloat64, {8, 8, 16, 4, 1}),
    of_rows(DType::kFloat64, {4, 16, 8, 4, 1}, "narrow"),

    of_rows(DType::kComplex64, {4, 8, 16, 2, 3}),
    of_rows(DType::kComplex64, {8, 16, 16, 2, 1}),
    of_rows(DType::kComplex64, {8, 8, 8, 2, 1}, "narrow"),

    of_rows(DType::kComplex128, {4, 4, 8, 2, 3}),
    of_rows(DType::kComplex128, {8, 8, 8, 2, 1}),
};
static_assert(names_are_distinct(kQrTable), "give rows that overlap a variant");

// The largest matrices of which 99 KB of shared memory, the least since sm_80, hold what is needed.
template <const auto& kTable>
struct QrPolicy : TablePolicy<kTable> {
  template <class F>
  static void for_each_limit(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) {
      if (is_storage_only(dtype)) continue;
      f(Limit{dtype, dtype == DType::kComplex128 ? 256 : QrProblem::kMaxN});
    }
  }
};
template <>
struct Policy<QrProblem> : QrPolicy<kQrTable> {};
template <>
struct Policy<HouseholderProductProblem> : QrPolicy<kQrTable> {};
template <>
struct Policy<QrMultiplyProblem> : QrPolicy<kQrTable> {};

}  // namespace jax_batched::cuda
