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

// A matrix in registers: `column_lanes` lanes of a warp have its columns, then threads of a block
// with `matrices` of them have `rows` rows each of its eigenvectors. Registers are for so many
// blocks.
struct EighLanesShape {
  static constexpr std::string_view kName = "lanes";
  int column_lanes, column_threads, column_blocks;
  int rows, matrices, sweeps, blocks;
};

using EighShape = std::variant<EighThreadShape, EighLanesShape, EighBlockShape>;

constexpr Row<EighShape> of_eigh_thread(DType dtype, int max_n) {
  return {dtype, 1, max_n, EighThreadShape{}};
}
constexpr Row<EighShape> of_eigh_block(DType dtype, int lanes) {
  return {dtype, lanes + 1, 2 * lanes, EighBlockShape{lanes}};
}

// "block" takes less shared memory: it serves where GPUs have too little for "lanes".
inline constexpr Row<EighShape> kEighTable[] = {
    of_eigh_thread(DType::kFloat32, 8),
    {DType::kFloat32, 9, 12, EighLanesShape{4, 128, 4, 2, 32, 2, 4}},
    {DType::kFloat32, 13, 16, EighLanesShape{8, 128, 5, 2, 16, 2, 5}},
    {DType::kFloat32, 17, 24, EighLanesShape{8, 128, 4, 3, 16, 2, 3}},
    {DType::kFloat32, 25, 32, EighLanesShape{16, 128, 4, 4, 8, 4, 4}},
    {DType::kFloat32, 33, 48, EighLanesShape{32, 128, 3, 4, 16, 4, 1}},
    {DType::kFloat32, 49, 64, EighLanesShape{32, 128, 2, 2, 7, 4, 1}},
    of_eigh_block(DType::kFloat32, 32),

    of_eigh_thread(DType::kFloat64, 8),
    {DType::kFloat64, 9, 12, EighLanesShape{4, 128, 4, 2, 16, 2, 4}},
    {DType::kFloat64, 13, 16, EighLanesShape{8, 128, 4, 2, 16, 2, 3}},
    {DType::kFloat64, 17, 24, EighLanesShape{8, 128, 2, 2, 8, 4, 3}},
    {DType::kFloat64, 25, 32, EighLanesShape{16, 128, 2, 2, 12, 4, 1}},
    {DType::kFloat64, 33, 48, EighLanesShape{32, 128, 2, 1, 4, 8, 1}},
    {DType::kFloat64, 49, 64, EighLanesShape{32, 64, 4, 1, 3, 8, 1}},
    of_eigh_block(DType::kFloat64, 16),
    of_eigh_block(DType::kFloat64, 32),

    of_eigh_thread(DType::kComplex64, 6),
    {DType::kComplex64, 9, 12, EighLanesShape{4, 128, 4, 2, 16, 2, 4}},
    {DType::kComplex64, 13, 16, EighLanesShape{8, 128, 4, 2, 16, 2, 3}},
    {DType::kComplex64, 17, 24, EighLanesShape{8, 128, 2, 2, 8, 4, 3}},
    {DType::kComplex64, 25, 32, EighLanesShape{16, 128, 2, 2, 12, 4, 1}},
    {DType::kComplex64, 33, 48, EighLanesShape{32, 128, 2, 1, 4, 8, 1}},
    of_eigh_block(DType::kComplex64, 4),
    of_eigh_block(DType::kComplex64, 8),
    of_eigh_block(DType::kComplex64, 16),
    of_eigh_block(DType::kComplex64, 32),

    of_eigh_thread(DType::kComplex128, 4),
    {DType::kComplex128, 5, 8, EighLanesShape{8, 128, 4, 1, 16, 2, 4}},
    {DType::kComplex128, 9, 12, EighLanesShape{8, 128, 3, 1, 8, 4, 4}},
    {DType::kComplex128, 13, 16, EighLanesShape{8, 128, 2, 1, 8, 4, 2}},
    {DType::kComplex128, 17, 24, EighLanesShape{16, 128, 2, 1, 4, 8, 2}},
    {DType::kComplex128, 25, 32, EighLanesShape{32, 128, 2, 1, 7, 4, 1}},
    of_eigh_block(DType::kComplex128, 4),
    of_eigh_block(DType::kComplex128, 8),
    of_eigh_block(DType::kComplex128, 16),
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
