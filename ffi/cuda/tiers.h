// The compiled kernels of each operation: one table per operation, as data. A launcher compiles the
// kernels that its table names, no others: to try another shape, add or edit a row.
//
// Of the rows that can serve a call, the one that tuned_tiers.h names serves; where nothing was
// measured, the first. Nothing here depends on the batch count: a matrix has the same result in any
// batch.
//
// The order is as measured on an H100, of later rows on an H200 (kernels of up to 100 bytes of
// spills are in use where the register cap pays).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "ffi/common/problem.h"
#include "ffi/cuda/tuned_tiers.h"

namespace jax_batched::cuda {

struct Tier {
  DType dtype;
  int min_n;
  int max_n;
  // "thread", "rows", "tiles" and complex "halves" (where they do not take several right-hand
  // sides: "warp"), "warp", "resident", "halves", "left" or "block". Those of dtype kFloat16 are of
  // 16-bit elements in either format.
  std::string_view kernel;
  int group;              // matrices of a warp, side by side ("rows", "warp")
  bool redundant;         // every lane factors the 8x8 diagonal block for itself ("warp")
  int warps;              // warps per block
  int min_blocks;         // resident blocks per multiprocessor the register cap is for; 0: no cap
                          // ("warp" of more than 64 rows: in its rolled kernels)
  int depth = 0;          // columns of L that come back at a time ("block")
  bool prefetch = false;  // ask the L2 cache for the next tile while one is factored ("block")
  std::string_view variant = "";  // tells apart rows of one kernel whose ranges overlap
  int capability = 0;             // needs a GPU of this compute capability or a later one
  bool fast = false;              // serves only accuracy="fast" ("block": compensated products)
  int row_tiles = 0;              // of a warp ("block"); 0: what suits most sizes
  int ragged_blocks = 0;  // min_blocks where rows are no whole vectors ("block"); 0: the same
  bool rhs_warp = false;  // one of the warps holds right-hand sides ("left")

  // Whether `name` selects this row: "warp", or "warp.wide" for the variant "wide".
  constexpr bool has_name(std::string_view name) const {
    if (variant.empty()) return name == kernel;
    return name.size() == kernel.size() + 1 + variant.size() &&
           name.substr(0, kernel.size()) == kernel && name[kernel.size()] == '.' &&
           name.substr(kernel.size() + 1) == variant;
  }

  constexpr bool serves(const Call& call) const {
    return dtype == call.dtype && min_n <= call.n && call.n <= max_n &&
           capability <= call.capability && (call.fast || !fast);
  }
};

inline constexpr int64_t kNoTier = -1;

// The first row that serves a call, of those with this name if it is not empty; else kNoTier.
template <size_t kRows>
constexpr int64_t first_tier(const Tier (&table)[kRows], const Call& call, std::string_view name) {
  for (size_t row = 0; row < kRows; ++row) {
    if (table[row].serves(call) && (name.empty() || table[row].has_name(name))) {
      return static_cast<int64_t>(row);
    }
  }
  return kNoTier;
}

// The row that serves a call: with `name` not empty the one that it selects, else the tuned one or,
// where nothing was measured, the first. kNoTier if there is none. accuracy="fast" is measured
// where a row serves it alone; elsewhere, and where it was not measured and no such row comes
// first, it is served as "ieee" is.
template <size_t kRows, size_t kTuned>
constexpr int64_t find_tier(const Tier (&table)[kRows], const std::array<TunedTier, kTuned>& tuned,
                            const Call& call, std::string_view name) {
  if (!name.empty()) return first_tier(table, call, name);
  const std::string_view kernel = tuned_kernel(tuned, call);
  const int64_t row = kernel.empty() ? kNoTier : first_tier(table, call, kernel);
  if (row != kNoTier) return row;
  const int64_t first = first_tier(table, call, {});
  if (!call.fast || first == kNoTier || table[first].fast) return first;
  Call ieee = call;
  ieee.fast = false;
  return find_tier(table, tuned, ieee, {});
}
template <size_t kRows>
constexpr int64_t find_tier(const Tier (&table)[kRows], const Call& call, std::string_view name) {
  return find_tier(table, kTunedTiers, call, name);
}

// Whether a name selects at most one row for any call.
template <size_t kRows>
constexpr bool names_are_distinct(const Tier (&table)[kRows]) {
  for (size_t i = 0; i < kRows; ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (table[i].dtype == table[j].dtype && table[i].kernel == table[j].kernel &&
          table[i].variant == table[j].variant && table[i].min_n <= table[j].max_n &&
          table[j].min_n <= table[i].max_n) {
        return false;
      }
    }
  }
  return true;
}

// ---- cholesky ----

inline constexpr Tier kCholeskyTiers[] = {
    {DType::kFloat32, 1, 16, "thread", 32, false, 1, 0},
    {DType::kFloat32, 9, 16, "warp", 2, false, 4, 5},
    {DType::kFloat32, 17, 24, "warp", 2, false, 4, 6},
    {DType::kFloat32, 25, 32, "warp", 2, false, 2, 10},
    {DType::kFloat32, 33, 40, "warp", 1, false, 4, 6},
    {DType::kFloat32, 41, 48, "warp", 1, false, 1, 16},
    {DType::kFloat32, 49, 56, "warp", 1, false, 1, 16},
    {DType::kFloat32, 57, 64, "warp", 1, false, 1, 12},
    {DType::kFloat32, 65, 72, "warp", 1, false, 1, 12},
    {DType::kFloat32, 73, 80, "warp", 1, false, 1, 12},
    {DType::kFloat32, 81, 88, "warp", 1, false, 1, 0},
    {DType::kFloat32, 89, 96, "warp", 1, false, 1, 0},
    {DType::kFloat32, 97, 104, "warp", 1, false, 1, 0},
    {DType::kFloat32, 105, 112, "halves", 1, false, 1, 8},
    {DType::kFloat32, 113, 128, "halves", 1, false, 1, 8},
    {DType::kFloat32, 129, 512, "block", 1, false, 4, 4, 32, false, "tensor", 80, /*fast=*/true},
    {DType::kFloat32, 1, 128, "block", 1, false, 4, 4, 16, false, "", 0, false, 0, 3},
    {DType::kFloat32, 129, 224, "block", 1, false, 4, 5, 16, false, "", 0, false, 2},
    {DType::kFloat32, 225, 512, "block", 1, false, 4, 4, 16, false, "", 0, false, 0, 3},

    {DType::kFloat64, 1, 13, "thread", 32, false, 1, 0},
    {DType::kFloat64, 9, 16, "warp", 2, false, 1, 20},
    {DType::kFloat64, 17, 24, "warp", 1, false, 1, 20},
    {DType::kFloat64, 25, 32, "warp", 1, false, 2, 10},
    {DType::kFloat64, 33, 40, "warp", 1, false, 1, 0},
    {DType::kFloat64, 41, 48, "warp", 1, false, 1, 0},
    {DType::kFloat64, 49, 56, "warp", 1, false, 1, 0},
    {DType::kFloat64, 57, 64, "warp", 1, false, 1, 0},
    {DType::kFloat64, 65, 96, "left", 1, false, 4, 4},
    {DType::kFloat64, 97, 128, "left", 1, false, 5, 4},
    {DType::kFloat64, 129, 160, "left", 1, false, 6, 2},
    {DType::kFloat64, 1, 160, "block", 1, false, 4, 3, 16},
    {DType::kFloat64, 161, 512, "block", 1, false, 4, 2, 32, true},

    {DType::kComplex64, 1, 13, "thread", 32, false, 1, 0},
    {DType::kComplex64, 9, 16, "warp", 2, false, 4, 0},
    {DType::kComplex64, 17, 24, "warp", 2, false, 4, 0},
    {DType::kComplex64, 25, 32, "warp", 1, false, 1, 0},
    {DType::kComplex64, 33, 40, "warp", 1, false, 1, 0},
    {DType::kComplex64, 41, 48, "warp", 1, false, 1, 0},
    {DType::kComplex64, 49, 56, "warp", 1, false, 1, 0},
    {DType::kComplex64, 57, 63, "halves", 1, false, 1, 0},
    {DType::kComplex64, 64, 64, "warp", 1, false, 1, 0},
    {DType::kComplex64, 65, 80, "halves", 1, false, 1, 8},
    {DType::kComplex64, 81, 96, "halves", 1, false, 1, 8},
    {DType::kComplex64, 1, 512, "block", 1, false, 4, 3, 16, true},

    {DType::kComplex128, 1, 9, "thread", 32, false, 1, 0},
    {DType::kComplex128, 9, 16, "warp", 2, false, 4, 0},
    {DType::kComplex128, 17, 24, "warp", 2, false, 4, 0},
    {DType::kComplex128, 25, 32, "halves", 1, false, 1, 16},
    {DType::kComplex128, 33, 40, "warp", 1, false, 1, 0},
    {DType::kComplex128, 41, 48, "warp", 1, false, 1, 0},
    {DType::kComplex128, 49, 64, "halves", 1, false, 1, 8},
    {DType::kComplex128, 1, 160, "block", 1, false, 4, 3, 8, true},
    {DType::kComplex128, 161, 512, "block", 1, false, 4, 2, 8},

    // Beyond 96, casts to float32 and back take over (_ffi.py).
    {DType::kFloat16, 1, 16, "thread", 32, false, 1, 0},
    {DType::kFloat16, 17, 24, "rows", 4, false, 1, 20},
    {DType::kFloat16, 25, 32, "rows", 4, false, 1, 16},
    {DType::kFloat16, 33, 40, "rows", 4, false, 1, 12},
    {DType::kFloat16, 41, 48, "rows", 4, false, 1, 0},
    {DType::kFloat16, 49, 56, "warp", 1, false, 1, 16},
    {DType::kFloat16, 57, 64, "warp", 1, false, 1, 12},
    {DType::kFloat16, 65, 72, "warp", 1, false, 1, 0},
    {DType::kFloat16, 73, 80, "warp", 1, false, 1, 0},
    {DType::kFloat16, 81, 88, "warp", 1, false, 1, 0},
    {DType::kFloat16, 89, 96, "warp", 1, false, 1, 0},
};

static_assert(names_are_distinct(kCholeskyTiers), "give rows that overlap a variant");

// ---- solve_pos ----

inline constexpr Tier kSolvePosTiers[] = {
    {DType::kFloat32, 1, 15, "thread", 32, false, 1, 0},
    {DType::kFloat32, 9, 16, "rows", 4, false, 1, 32},
    {DType::kFloat32, 17, 24, "rows", 4, false, 1, 20},
    {DType::kFloat32, 25, 32, "rows", 4, false, 1, 16},
    {DType::kFloat32, 33, 40, "rows", 4, false, 1, 12},
    {DType::kFloat32, 41, 48, "rows", 4, false, 1, 0},
    {DType::kFloat32, 49, 56, "tiles", 1, false, 1, 16},
    {DType::kFloat32, 57, 64, "tiles", 1, false, 1, 12},
    {DType::kFloat32, 65, 72, "warp", 1, false, 1, 12},
    {DType::kFloat32, 73, 80, "warp", 1, false, 1, 12},
    {DType::kFloat32, 81, 88, "warp", 1, false, 1, 0},
    {DType::kFloat32, 89, 96, "warp", 1, false, 1, 0},
    {DType::kFloat32, 97, 104, "warp", 1, false, 1, 0},
    {DType::kFloat32, 105, 112, "halves", 1, false, 1, 8},
    {DType::kFloat32, 113, 128, "halves", 1, false, 1, 8},

    {DType::kFloat64, 1, 12, "thread", 32, false, 1, 0},
    {DType::kFloat64, 9, 16, "rows", 4, false, 1, 20},
    {DType::kFloat64, 17, 24, "rows", 4, false, 1, 12},
    {DType::kFloat64, 25, 32, "rows", 4, false, 1, 0},
    {DType::kFloat64, 33, 40, "resident", 1, false, 1, 0},
    {DType::kFloat64, 41, 48, "resident", 1, false, 1, 0},
    {DType::kFloat64, 49, 56, "resident", 1, false, 1, 0},
    {DType::kFloat64, 57, 64, "resident", 1, false, 1, 0},
    {DType::kFloat64, 65, 72, "resident", 1, false, 1, 0},
    {DType::kFloat64, 73, 88, "left", 1, false, 4, 5},
    {DType::kFloat64, 89, 96, "left", 1, false, 5, 4, 0, false, "", 0, false, 0, 0, true},
    {DType::kFloat64, 97, 120, "left", 1, false, 5, 4},
    {DType::kFloat64, 121, 128, "left", 1, false, 6, 3, 0, false, "", 0, false, 0, 0, true},
    {DType::kFloat64, 129, 144, "left", 1, false, 6, 2},

    {DType::kComplex64, 1, 8, "thread", 32, false, 1, 0},
    {DType::kComplex64, 9, 16, "rows", 4, false, 1, 20},
    {DType::kComplex64, 17, 24, "rows", 4, false, 1, 12},
    {DType::kComplex64, 25, 32, "rows", 4, false, 1, 0},
    {DType::kComplex64, 33, 40, "warp", 1, false, 1, 0},
    {DType::kComplex64, 41, 48, "halves", 1, false, 1, 16},
    {DType::kComplex64, 49, 56, "halves", 1, false, 1, 12},
    {DType::kComplex64, 57, 64, "halves", 1, false, 1, 12},
    {DType::kComplex64, 65, 80, "halves", 1, false, 1, 8},
    {DType::kComplex64, 81, 96, "halves", 1, false, 1, 8},

    {DType::kComplex128, 1, 8, "thread", 32, false, 1, 0},
    {DType::kComplex128, 9, 16, "rows", 4, false, 1, 12},
    {DType::kComplex128, 17, 24, "rows", 4, false, 1, 0},
    {DType::kComplex128, 25, 32, "warp", 1, false, 1, 0},
    {DType::kComplex128, 33, 40, "warp", 1, false, 1, 0},
    {DType::kComplex128, 41, 48, "halves", 1, false, 1, 8},
    {DType::kComplex128, 49, 64, "halves", 1, false, 1, 8},

    // One right-hand side; casts take over for more, and beyond 48.
    {DType::kFloat16, 1, 15, "thread", 32, false, 1, 0},
    {DType::kFloat16, 9, 16, "rows", 4, false, 1, 32},
    {DType::kFloat16, 17, 24, "rows", 4, false, 1, 20},
    {DType::kFloat16, 25, 32, "rows", 4, false, 1, 16},
    {DType::kFloat16, 33, 40, "rows", 4, false, 1, 12},
    {DType::kFloat16, 41, 48, "rows", 4, false, 1, 0},
};

static_assert(names_are_distinct(kSolvePosTiers), "give rows that overlap a variant");

// triangular_solve and cho_solve: substitution_tiers.h

}  // namespace jax_batched::cuda
