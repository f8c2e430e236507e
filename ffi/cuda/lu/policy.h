// Which kernel serves an operation on LU: data. Sizes of rectangular matrices are the larger ones.
#pragma once

#include <array>
#include <iterator>
#include <type_traits>
#include <variant>

#include "ffi/cuda/runtime/table.h"
#include "ffi/problems/lu.h"

namespace jax_batched::cuda {

// One thread per matrix.
struct LuThreadShape {
  static constexpr std::string_view kName = "thread";
};
// `lanes` of a warp for each matrix of at most so many columns, with `rows` rows each. A loop goes
// over `roll` times four steps: code grows as it gets smaller, idle products as it gets larger.
struct LuLanesShape {
  static constexpr std::string_view kName = "lanes";
  int lanes, rows, columns;
  int min_blocks = 1;
  int roll = 1;
};
// A block per matrix, which is in shared memory; a panel of `width` columns is factored by so many
// warps.
struct LuBlockSharedShape {
  static constexpr std::string_view kName = "block_shared";
  int threads, panel_warps, width;
  int min_blocks = 1;
};
// A block per matrix, which stays where the result goes.
struct LuBlockShape {
  static constexpr std::string_view kName = "block";
  int threads, panel_warps, width;
  int min_blocks = 1;
};
// The same for many rows and few columns, a multiple of a vector: L is read from there, too.
struct LuTallShape : LuBlockShape {
  static constexpr std::string_view kName = "tall";
};

using LuShape =
    std::variant<LuThreadShape, LuLanesShape, LuBlockSharedShape, LuBlockShape, LuTallShape>;

inline constexpr Row<LuShape> kLuTable[] = {
    {DType::kFloat32, 1, 8, LuThreadShape{}},
    {DType::kFloat32, 1, 8, LuLanesShape{8, 1, 8}},
    {DType::kFloat32, 9, 12, LuLanesShape{8, 2, 12}},
    {DType::kFloat32, 13, 16, LuLanesShape{8, 2, 16}},
    {DType::kFloat32, 17, 24, LuLanesShape{32, 1, 24, 28}},
    {DType::kFloat32, 25, 32, LuLanesShape{32, 1, 32, 24}},
    {DType::kFloat32, 33, 40, LuLanesShape{32, 2, 40, 16, 4}},
    {DType::kFloat32, 41, 48, LuLanesShape{32, 2, 48, 12, 4}},
    {DType::kFloat32, 1, 64, LuBlockSharedShape{64, 2, 8, 10}},
    {DType::kFloat32, 65, 96, LuBlockSharedShape{96, 3, 8}},
    {DType::kFloat32, 97, 128, LuBlockSharedShape{128, 4, 8}},
    {DType::kFloat32, 129, 232, LuBlockSharedShape{256, 8, 8}},
    {DType::kFloat32, 1, 256, LuBlockShape{256, 8, 16, 2}},
    {DType::kFloat32, 257, 512, LuBlockShape{512, 16, 16}},
    {DType::kFloat32, 513, 1024, LuTallShape{{512, 16, 16}}},
    {DType::kFloat32, 1025, 2048, LuTallShape{{512, 16, 8}}},
    {DType::kFloat32, 2049, 4096, LuTallShape{{512, 16, 8}}},

    {DType::kFloat64, 1, 8, LuThreadShape{}},
    {DType::kFloat64, 1, 8, LuLanesShape{8, 1, 8}},
    {DType::kFloat64, 9, 12, LuLanesShape{8, 2, 12, 18}},
    {DType::kFloat64, 13, 16, LuLanesShape{8, 2, 16, 18}},
    {DType::kFloat64, 17, 24, LuLanesShape{32, 1, 24, 20}},
    {DType::kFloat64, 25, 32, LuLanesShape{32, 1, 32, 16}},
    {DType::kFloat64, 33, 40, LuLanesShape{32, 2, 40, 1, 4}},
    {DType::kFloat64, 41, 48, LuLanesShape{32, 2, 48, 1, 4}},
    {DType::kFloat64, 1, 64, LuBlockSharedShape{64, 2, 8}},
    {DType::kFloat64, 65, 96, LuBlockSharedShape{96, 3, 8}},
    {DType::kFloat64, 97, 128, LuBlockSharedShape{256, 4, 8}},
    {DType::kFloat64, 129, 160, LuBlockSharedShape{256, 5, 8}},
    {DType::kFloat64, 1, 256, LuBlockShape{256, 8, 8}},
    {DType::kFloat64, 257, 512, LuBlockShape{512, 16, 8}},
    {DType::kFloat64, 513, 1024, LuTallShape{{256, 8, 8}}},
    {DType::kFloat64, 1025, 2048, LuTallShape{{256, 8, 8}}},
    {DType::kFloat64, 2049, 4096, LuTallShape{{256, 8, 4}}},

    {DType::kComplex64, 1, 6, LuThreadShape{}},
    {DType::kComplex64, 1, 8, LuLanesShape{8, 1, 8}},
    {DType::kComplex64, 9, 16, LuLanesShape{8, 2, 16}},
    {DType::kComplex64, 17, 24, LuLanesShape{32, 1, 24, 1, 6}},
    {DType::kComplex64, 25, 32, LuLanesShape{32, 1, 32, 1, 8}},
    {DType::kComplex64, 1, 64, LuBlockSharedShape{64, 2, 8}},
    {DType::kComplex64, 65, 96, LuBlockSharedShape{96, 3, 8}},
    {DType::kComplex64, 97, 128, LuBlockSharedShape{128, 4, 8}},
    {DType::kComplex64, 1, 256, LuBlockShape{256, 8, 8}},
    {DType::kComplex64, 257, 512, LuBlockShape{256, 8, 8}},

    {DType::kComplex128, 1, 4, LuThreadShape{}},
    {DType::kComplex128, 1, 8, LuLanesShape{8, 1, 8}},
    {DType::kComplex128, 9, 16, LuLanesShape{16, 1, 16}},
    {DType::kComplex128, 17, 24, LuLanesShape{32, 1, 24, 1, 2}},
    {DType::kComplex128, 25, 32, LuLanesShape{32, 1, 32, 1, 4}},
    {DType::kComplex128, 1, 64, LuBlockSharedShape{64, 2, 4}},
    {DType::kComplex128, 65, 112, LuBlockSharedShape{128, 4, 4}},
    {DType::kComplex128, 1, 256, LuBlockShape{256, 8, 4}},
    {DType::kComplex128, 257, 512, LuBlockShape{256, 8, 4}},
};
static_assert(names_are_distinct(kLuTable), "give rows that overlap a variant");

// Of the other operations, which differ in the sizes to which one thread is faster, by dtype, to
// which registers hold two rows of float64 of a lane, and in the fewest blocks of a multiprocessor
// for 24 and 32 columns of float32.
struct LuSizes {
  struct {
    int float32, float64, complex64, complex128;
  } thread;
  int two_rows_float64;
  int min_blocks_24 = 1, min_blocks_32 = 1;
};
constexpr auto table_with(LuSizes to) {
  using LuRow = Row<LuShape>;
  return std::array{
      LuRow{DType::kFloat32, 1, to.thread.float32, LuThreadShape{}},
      LuRow{DType::kFloat32, 1, 8, LuLanesShape{8, 1, 8}},
      LuRow{DType::kFloat32, 9, 16, LuLanesShape{8, 2, 16}},
      LuRow{DType::kFloat32, 17, 24, LuLanesShape{32, 1, 24, to.min_blocks_24}},
      LuRow{DType::kFloat32, 25, 32, LuLanesShape{32, 1, 32, to.min_blocks_32}},
      LuRow{DType::kFloat32, 33, 48, LuLanesShape{32, 2, 48, 1, 4}},
      LuRow{DType::kFloat32, 49, 64, LuLanesShape{32, 2, 64, 1, 4}},
      LuRow{DType::kFloat32, 1, 64, LuBlockSharedShape{64, 2, 8}},
      LuRow{DType::kFloat32, 65, 96, LuBlockSharedShape{96, 3, 8}},
      LuRow{DType::kFloat32, 97, 128, LuBlockSharedShape{128, 4, 8}},

      LuRow{DType::kFloat64, 1, to.thread.float64, LuThreadShape{}},
      LuRow{DType::kFloat64, 1, 8, LuLanesShape{8, 1, 8}},
      LuRow{DType::kFloat64, 9, 16, LuLanesShape{8, 2, 16}},
      LuRow{DType::kFloat64, 17, 24, LuLanesShape{32, 1, 24}},
      LuRow{DType::kFloat64, 25, 32, LuLanesShape{32, 1, 32}},
      LuRow{DType::kFloat64, 33, 40, LuLanesShape{32, 2, 40, 1, 4}},
      LuRow{DType::kFloat64, 41, to.two_rows_float64,
            LuLanesShape{32, 2, to.two_rows_float64, 1, 4}},
      LuRow{DType::kFloat64, 1, 64, LuBlockSharedShape{64, 2, 8}},
      LuRow{DType::kFloat64, 65, 96, LuBlockSharedShape{96, 3, 8}},

      LuRow{DType::kComplex64, 1, to.thread.complex64, LuThreadShape{}},
      LuRow{DType::kComplex64, 1, 8, LuLanesShape{8, 1, 8}},
      LuRow{DType::kComplex64, 9, 16, LuLanesShape{8, 2, 16}},
      LuRow{DType::kComplex64, 17, 24, LuLanesShape{32, 1, 24, 1, 6}},
      LuRow{DType::kComplex64, 25, 32, LuLanesShape{32, 1, 32, 1, 2}},
      LuRow{DType::kComplex64, 1, 64, LuBlockSharedShape{64, 2, 8}},
      LuRow{DType::kComplex64, 65, 96, LuBlockSharedShape{96, 3, 8}},

      LuRow{DType::kComplex128, 1, to.thread.complex128, LuThreadShape{}},
      LuRow{DType::kComplex128, 1, 8, LuLanesShape{8, 1, 8}},
      LuRow{DType::kComplex128, 9, 16, LuLanesShape{16, 1, 16}},
      LuRow{DType::kComplex128, 17, 24, LuLanesShape{32, 1, 24, 1, 2}},
      LuRow{DType::kComplex128, 25, 32, LuLanesShape{32, 1, 32, 1, 4}},
      LuRow{DType::kComplex128, 1, 64, LuBlockSharedShape{64, 2, 4}},
  };
}
inline constexpr auto kSolveGenTable = table_with({{8, 6, 6, 4}, 40});
inline constexpr auto kInvTable = table_with({{8, 6, 4, 3}, 48, 32, 25});
inline constexpr auto kDeterminantTable = table_with({{8, 8, 6, 4}, 48});
static_assert(names_are_distinct(kInvTable), "give rows that overlap a variant");

// Where an operation is one kernel on every GPU: what 99 KB of shared memory hold, the least since
// sm_80; beyond, L and U are written and substituted with. So they are for many right-hand sides,
// which a row of them would make too long.
constexpr int lu_fused_n(DType dtype) {
  return dtype == DType::kFloat32 ? 128 : dtype == DType::kComplex128 ? 64 : 96;
}
inline constexpr int kMaxFusedRhs = 16;
inline constexpr int kManyRhsN = 32;  // up to which their number does not matter

template <const auto& kTable>
struct FusedLuPolicy : TablePolicy<kTable> {
  template <class F>
  static void for_each_limit(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) {
      if (!is_storage_only(dtype)) f(Limit{dtype, lu_fused_n(dtype)});
    }
  }
};

// Solves with factors: `rows` and `columns` as in the factorization's lanes.
inline constexpr Row<std::variant<LuLanesShape>> kLuSubstitutionTable[] = {
    {DType::kFloat32, 1, 8, LuLanesShape{8, 1, 8}},
    {DType::kFloat32, 9, 16, LuLanesShape{16, 1, 16}},
    {DType::kFloat32, 17, 32, LuLanesShape{32, 1, 32}},
    {DType::kFloat32, 33, 64, LuLanesShape{32, 2, 64}},
    {DType::kFloat64, 1, 8, LuLanesShape{8, 1, 8}},
    {DType::kFloat64, 9, 16, LuLanesShape{16, 1, 16}},
    {DType::kFloat64, 17, 32, LuLanesShape{32, 1, 32}},
    {DType::kFloat64, 33, 64, LuLanesShape{32, 2, 64}},
    {DType::kComplex64, 1, 8, LuLanesShape{8, 1, 8}},
    {DType::kComplex64, 9, 16, LuLanesShape{16, 1, 16}},
    {DType::kComplex64, 17, 32, LuLanesShape{32, 1, 32}},
    {DType::kComplex64, 33, 64, LuLanesShape{32, 2, 64}},
    {DType::kComplex128, 1, 8, LuLanesShape{8, 1, 8}},
    {DType::kComplex128, 9, 16, LuLanesShape{16, 1, 16}},
    {DType::kComplex128, 17, 32, LuLanesShape{32, 1, 32}},
    {DType::kComplex128, 33, 48, LuLanesShape{32, 2, 48}},
};
template <>
struct Policy<LuSubstitutionProblem> : TablePolicy<kLuSubstitutionTable> {
  template <class F>
  static void for_each_limit(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) {
      if (is_storage_only(dtype)) continue;
      f(Limit{dtype, largest_n(kLuSubstitutionTable, dtype), kMaxFusedRhs});
    }
  }
};

template <>
struct Policy<LuProblem> : TablePolicy<kLuTable> {
  template <class F>
  static void for_each_limit(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) {
      if (!is_storage_only(dtype)) f(Limit{dtype, LuProblem::kMaxN});
    }
  }
};
template <>
struct Policy<InvProblem> : FusedLuPolicy<kInvTable> {};
template <>
struct Policy<DetProblem> : FusedLuPolicy<kDeterminantTable> {};
template <>
struct Policy<SlogdetProblem> : FusedLuPolicy<kDeterminantTable> {};
template <>
struct Policy<SolveGenProblem> : TablePolicy<kSolveGenTable> {
  template <class F>
  static void for_each_limit(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) {
      if (is_storage_only(dtype)) continue;
      f(Limit{dtype, dtype == DType::kComplex128 ? kManyRhsN / 2 : kManyRhsN});
      f(Limit{dtype, lu_fused_n(dtype), kMaxFusedRhs});
    }
  }
};

}  // namespace jax_batched::cuda
