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
// `lanes` of a warp for each matrix, which hold so many columns each, of at most so many rows. A
// loop goes over `steps` steps; a reflection of at most `held` rows is read once in each.
struct QrLanesShape {
  static constexpr std::string_view kName = "lanes";
  int lanes, columns, rows, steps, held;
  int min_blocks = 1;
};
// Of products: so many lanes of a warp for each matrix, with as many rows each.
struct QrRowsShape {
  static constexpr std::string_view kName = "lanes";
  int lanes, rows;
};
// A block per matrix, with panels of `width` columns: a lane has some of them in every so many
// rows, `slots` rows in all.
struct QrBlockShape {
  static constexpr std::string_view kName = "block";
  int warps, slots, width, columns;
  int min_blocks = 1;

  constexpr int64_t rows() const { return warps * slots * (32 / (width / columns)); }
};

using QrShape = std::variant<QrThreadShape, QrLanesShape, QrRowsShape, QrBlockShape>;

constexpr Row<QrShape> of_thread(DType dtype, int max_n) {
  return {dtype, 1, max_n, QrThreadShape{}};
}
constexpr Row<QrShape> of_lanes(DType dtype, int min_n, QrLanesShape shape) {
  return {dtype, min_n, shape.lanes * shape.columns, shape, {.rows = shape.rows}};
}
constexpr Row<QrShape> of_block(DType dtype, QrBlockShape shape, std::string_view variant = "",
                                int max_n = 512) {
  return {dtype, 1, max_n, shape, {.variant = variant, .rows = shape.rows()}};
}

// Of the shapes that serve, the first one does: those for fewer rows come first. "block.narrow" is
// for where shared memory does not hold what wider panels need.
inline constexpr QrBlockShape kNarrowFloat32{4, 16, 16, 4, 3};
inline constexpr QrBlockShape kNarrowFloat64{4, 16, 8, 2, 3};
inline constexpr QrBlockShape kNarrowComplex64{8, 8, 8, 2, 2};
inline constexpr QrBlockShape kNarrowComplex128{8, 4, 4, 2, 2};

inline constexpr Row<QrShape> kQrTable[] = {
    of_thread(DType::kFloat32, 12),
    of_lanes(DType::kFloat32, 1, {8, 1, 8, 4, 64}),
    of_lanes(DType::kFloat32, 1, {8, 1, 32, 8, 64, 20}),
    of_lanes(DType::kFloat32, 1, {8, 1, 64, 8, 64, 12}),
    of_lanes(DType::kFloat32, 9, {8, 2, 12, 4, 64}),
    of_lanes(DType::kFloat32, 9, {8, 2, 16, 4, 64, 24}),
    of_lanes(DType::kFloat32, 9, {8, 2, 32, 8, 32, 12}),
    of_lanes(DType::kFloat32, 9, {8, 2, 64, 8, 64, 8}),
    of_lanes(DType::kFloat32, 17, {8, 3, 20, 4, 64, 16}),
    of_lanes(DType::kFloat32, 17, {8, 3, 24, 4, 64, 12}),
    of_lanes(DType::kFloat32, 17, {16, 2, 32, 8, 32, 16}),
    of_lanes(DType::kFloat32, 17, {16, 3, 40, 8, 24, 12}),
    of_lanes(DType::kFloat32, 17, {16, 3, 48, 8, 32, 8}),
    of_lanes(DType::kFloat32, 17, {32, 2, 64, 8, 32, 12}),
    of_block(DType::kFloat32, {1, 8, 16, 4, 16}),
    of_block(DType::kFloat32, {2, 16, 32, 4, 6}),
    of_block(DType::kFloat32, kNarrowFloat32, "few", 64),
    of_block(DType::kFloat32, {4, 16, 32, 4, 3}),
    of_block(DType::kFloat32, {8, 16, 32, 4, 1}),
    of_block(DType::kFloat32, kNarrowFloat32, "narrow"),

    of_thread(DType::kFloat64, 9),
    of_lanes(DType::kFloat64, 1, {8, 1, 8, 4, 64, 20}),
    of_lanes(DType::kFloat64, 1, {8, 1, 32, 8, 16, 12}),
    of_lanes(DType::kFloat64, 1, {8, 1, 64, 8, 0, 8}),
    of_lanes(DType::kFloat64, 9, {4, 3, 12, 4, 64, 12}),
    of_lanes(DType::kFloat64, 9, {8, 2, 16, 4, 8, 16}),
    of_lanes(DType::kFloat64, 9, {8, 2, 32, 8, 0, 8}),
    of_lanes(DType::kFloat64, 9, {16, 1, 64, 8, 0, 8}),
    of_lanes(DType::kFloat64, 17, {8, 3, 20, 4, 0, 12}),
    of_lanes(DType::kFloat64, 17, {8, 3, 24, 4, 0, 8}),
    of_lanes(DType::kFloat64, 17, {16, 2, 32, 8, 0, 12}),
    of_lanes(DType::kFloat64, 17, {32, 2, 48, 8, 0, 8}),
    of_block(DType::kFloat64, {2, 8, 16, 2, 8}),
    of_block(DType::kFloat64, {2, 16, 16, 2, 4}),
    of_block(DType::kFloat64, {4, 16, 16, 2, 2}),
    of_block(DType::kFloat64, {8, 16, 16, 2, 1}),
    of_block(DType::kFloat64, kNarrowFloat64, "narrow"),

    of_thread(DType::kComplex64, 8),
    of_lanes(DType::kComplex64, 1, {4, 2, 8, 4, 64, 20}),
    of_lanes(DType::kComplex64, 1, {8, 1, 32, 8, 16, 12}),
    of_lanes(DType::kComplex64, 9, {4, 3, 12, 4, 8, 12}),
    of_lanes(DType::kComplex64, 9, {8, 2, 16, 4, 16, 12}),
    of_lanes(DType::kComplex64, 9, {16, 1, 64, 8, 0, 8}),
    of_lanes(DType::kComplex64, 17, {8, 3, 20, 4, 0, 8}),
    of_lanes(DType::kComplex64, 17, {8, 3, 24, 8, 0, 8}),
    of_lanes(DType::kComplex64, 17, {16, 2, 32, 8, 0, 8}),
    of_block(DType::kComplex64, {2, 8, 16, 2, 6}),
    of_block(DType::kComplex64, {4, 8, 16, 2, 4}),
    of_block(DType::kComplex64, {8, 8, 16, 2, 2}),
    of_block(DType::kComplex64, {8, 16, 16, 2, 1}),
    of_block(DType::kComplex64, kNarrowComplex64, "narrow"),

    of_thread(DType::kComplex128, 6),
    of_lanes(DType::kComplex128, 1, {4, 2, 8, 4, 0, 12}),
    of_lanes(DType::kComplex128, 1, {8, 1, 32, 8, 0, 8}),
    of_lanes(DType::kComplex128, 9, {8, 2, 12, 4, 0, 8}),
    of_lanes(DType::kComplex128, 9, {8, 2, 16, 4, 0, 8}),
    of_lanes(DType::kComplex128, 17, {32, 1, 32, 8, 0, 8}),
    of_block(DType::kComplex128, {2, 4, 8, 2, 6}),
    of_block(DType::kComplex128, {4, 4, 8, 2, 3}),
    of_block(DType::kComplex128, {8, 4, 8, 2, 2}),
    of_block(DType::kComplex128, {8, 8, 8, 2, 1}),
    of_block(DType::kComplex128, kNarrowComplex128, "narrow"),
};
static_assert(names_are_distinct(kQrTable), "give rows that overlap a variant");

// Of products with Q.
constexpr Row<QrShape> of_rows(DType dtype, QrRowsShape shape) {
  return {dtype, 1, 512, shape, {.rows = shape.lanes * shape.rows}};
}
inline constexpr Row<QrShape> kQrProductTable[] = {
    of_rows(DType::kFloat32, {8, 2}),
    of_rows(DType::kFloat32, {16, 2}),
    of_rows(DType::kFloat32, {32, 2}),
    of_block(DType::kFloat32, {2, 16, 32, 4, 6}),
    of_block(DType::kFloat32, kNarrowFloat32),

    of_rows(DType::kFloat64, {8, 2}),
    of_rows(DType::kFloat64, {16, 2}),
    of_rows(DType::kFloat64, {32, 2}),
    of_block(DType::kFloat64, {2, 16, 16, 2, 4}),
    of_block(DType::kFloat64, {8, 16, 16, 2, 1}),
    of_block(DType::kFloat64, kNarrowFloat64, "narrow"),

    of_rows(DType::kComplex64, {8, 2}),
    of_rows(DType::kComplex64, {16, 2}),
    of_rows(DType::kComplex64, {32, 2}),
    of_block(DType::kComplex64, {4, 8, 16, 2, 4}),
    of_block(DType::kComplex64, kNarrowComplex64),

    of_rows(DType::kComplex128, {8, 2}),
    of_rows(DType::kComplex128, {16, 2}),
    of_rows(DType::kComplex128, {32, 2}),
    of_block(DType::kComplex128, {4, 4, 8, 2, 3}),
    of_block(DType::kComplex128, {8, 8, 8, 2, 1}),
    of_block(DType::kComplex128, kNarrowComplex128, "narrow"),
};
static_assert(names_are_distinct(kQrProductTable), "give rows that overlap a variant");

// Every size is one kernel on every GPU: what "block.narrow" needs is below 99 KB, the least that a
// block has of shared memory since sm_80.
template <const auto& kTable>
struct QrPolicy : TablePolicy<kTable> {
  template <class F>
  static void for_each_limit(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) {
      if (!is_storage_only(dtype)) f(Limit{dtype, QrProblem::kMaxN});
    }
  }
};
template <>
struct Policy<QrProblem> : QrPolicy<kQrTable> {};
template <>
struct Policy<HouseholderProductProblem> : QrPolicy<kQrProductTable> {};
template <>
struct Policy<QrMultiplyProblem> : QrPolicy<kQrProductTable> {};

}  // namespace jax_batched::cuda
