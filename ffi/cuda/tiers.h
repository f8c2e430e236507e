// Which kernel serves which (operation, dtype, n): one table per operation, as data.
//
// The first row of a table with the problem's dtype and min_n <= n <= max_n serves. A launcher
// compiles the kernels that its table names, no others: to try another shape, add or edit a row.
// Nothing here depends on the batch count: a matrix has the same result in any batch.
//
// Measured on an H100 (kernels of up to 100 bytes of spills are in use where the register cap
// pays).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "ffi/common/problem.h"

namespace jax_batched::cuda {

struct Tier {
  DType dtype;
  int min_n;
  int max_n;
  std::string_view kernel;  // "thread", "warp" or "block"
  int group;                // matrices per warp that share the panel phase ("warp")
  bool redundant;           // every lane factors the 8x8 diagonal block for itself ("warp")
  int warps;                // warps per block
  int min_blocks;           // resident blocks per multiprocessor the register cap is for; 0: no cap
};

inline constexpr int64_t kNoTier = -1;

// The row that serves (dtype, n), or with `kernel` not empty the first such row of that kernel;
// kNoTier if there is none.
template <size_t kRows>
constexpr int64_t find_tier(const Tier (&table)[kRows], DType dtype, int64_t n,
                            std::string_view kernel) {
  for (size_t row = 0; row < kRows; ++row) {
    const Tier& tier = table[row];
    if (tier.dtype == dtype && tier.min_n <= n && n <= tier.max_n &&
        (kernel.empty() || kernel == tier.kernel)) {
      return static_cast<int64_t>(row);
    }
  }
  return kNoTier;
}

template <size_t kRows>
constexpr int64_t max_n(const Tier (&table)[kRows], DType dtype) {
  int64_t n = 0;
  for (const Tier& tier : table) {
    if (tier.dtype == dtype && tier.max_n > n) n = tier.max_n;
  }
  return n;
}

// ---- cholesky ----

inline constexpr Tier kCholeskyTiers[] = {
    {DType::kFloat32, 1, 16, "thread", 32, false, 1, 0},
    {DType::kFloat32, 9, 16, "warp", 2, true, 4, 5},
    {DType::kFloat32, 17, 24, "warp", 2, true, 4, 6},
    {DType::kFloat32, 25, 32, "warp", 2, true, 4, 5},
    {DType::kFloat32, 33, 40, "warp", 1, false, 4, 6},
    {DType::kFloat32, 41, 48, "warp", 1, false, 1, 16},
    {DType::kFloat32, 49, 56, "warp", 1, false, 1, 16},
    {DType::kFloat32, 57, 64, "warp", 1, false, 1, 12},
    {DType::kFloat32, 65, 72, "warp", 1, false, 1, 0},
    {DType::kFloat32, 73, 80, "warp", 1, false, 1, 0},
    {DType::kFloat32, 81, 88, "warp", 1, false, 1, 0},
    {DType::kFloat32, 89, 96, "warp", 1, false, 1, 0},
    {DType::kFloat32, 1, 512, "block", 1, false, 4, 4},

    {DType::kFloat64, 1, 13, "thread", 32, false, 1, 0},
    {DType::kFloat64, 9, 16, "warp", 2, false, 4, 5},
    {DType::kFloat64, 17, 24, "warp", 1, false, 4, 5},
    {DType::kFloat64, 25, 32, "warp", 1, false, 4, 5},
    {DType::kFloat64, 33, 40, "warp", 1, false, 1, 0},
    {DType::kFloat64, 41, 48, "warp", 1, false, 1, 0},
    {DType::kFloat64, 49, 56, "warp", 1, false, 1, 0},
    {DType::kFloat64, 57, 64, "warp", 1, false, 1, 0},
    {DType::kFloat64, 1, 512, "block", 1, false, 4, 0},

    {DType::kComplex64, 1, 13, "thread", 32, false, 1, 0},
    {DType::kComplex64, 9, 16, "warp", 2, false, 4, 0},
    {DType::kComplex64, 17, 24, "warp", 2, false, 4, 0},
    {DType::kComplex64, 25, 32, "warp", 1, false, 1, 0},
    {DType::kComplex64, 33, 40, "warp", 1, false, 1, 0},
    {DType::kComplex64, 41, 48, "warp", 1, false, 1, 0},
    {DType::kComplex64, 49, 56, "warp", 1, false, 1, 0},
    {DType::kComplex64, 57, 64, "warp", 1, false, 1, 0},
    {DType::kComplex64, 1, 512, "block", 1, false, 4, 0},

    {DType::kComplex128, 1, 9, "thread", 32, false, 1, 0},
    {DType::kComplex128, 9, 16, "warp", 2, false, 4, 0},
    {DType::kComplex128, 17, 24, "warp", 2, false, 4, 0},
    {DType::kComplex128, 25, 32, "warp", 1, false, 1, 0},
    {DType::kComplex128, 33, 40, "warp", 1, false, 1, 0},
    {DType::kComplex128, 41, 48, "warp", 1, false, 1, 0},
    {DType::kComplex128, 1, 512, "block", 1, false, 4, 0},
};

template <class T>
inline constexpr int64_t kCholeskyMaxN = max_n(kCholeskyTiers, kDTypeOf<T>);

// ---- solve_pos ----

inline constexpr Tier kSolvePosTiers[] = {
    {DType::kFloat32, 1, 16, "thread", 32, false, 1, 0},
    {DType::kFloat32, 9, 16, "warp", 2, true, 4, 0},
    {DType::kFloat32, 17, 24, "warp", 2, false, 4, 5},
    {DType::kFloat32, 25, 32, "warp", 2, false, 4, 5},
    {DType::kFloat32, 33, 40, "warp", 1, false, 4, 0},
    {DType::kFloat32, 41, 48, "warp", 1, false, 1, 16},
    {DType::kFloat32, 49, 56, "warp", 1, false, 1, 16},
    {DType::kFloat32, 57, 64, "warp", 1, false, 1, 12},
    {DType::kFloat32, 65, 72, "warp", 1, false, 1, 0},
    {DType::kFloat32, 73, 80, "warp", 1, false, 1, 0},
    {DType::kFloat32, 81, 88, "warp", 1, false, 1, 0},
    {DType::kFloat32, 89, 96, "warp", 1, false, 1, 0},
    {DType::kFloat32, 1, 128, "block", 1, false, 4, 0},

    {DType::kFloat64, 1, 12, "thread", 32, false, 1, 0},
    {DType::kFloat64, 9, 16, "warp", 2, false, 1, 20},
    {DType::kFloat64, 17, 24, "warp", 2, false, 4, 0},
    {DType::kFloat64, 25, 32, "warp", 2, false, 1, 12},
    {DType::kFloat64, 33, 40, "warp", 1, false, 1, 0},
    {DType::kFloat64, 41, 48, "warp", 1, false, 1, 0},
    {DType::kFloat64, 49, 56, "warp", 1, false, 1, 0},
    {DType::kFloat64, 57, 64, "warp", 1, false, 1, 0},
    {DType::kFloat64, 1, 96, "block", 1, false, 4, 0},

    {DType::kComplex64, 1, 8, "thread", 32, false, 1, 0},
    {DType::kComplex64, 9, 16, "warp", 2, false, 4, 0},
    {DType::kComplex64, 17, 24, "warp", 1, false, 4, 0},
    {DType::kComplex64, 25, 32, "warp", 1, false, 1, 0},
    {DType::kComplex64, 33, 40, "warp", 1, false, 1, 0},
    {DType::kComplex64, 41, 48, "warp", 1, false, 1, 0},
    {DType::kComplex64, 49, 56, "warp", 1, false, 1, 0},
    {DType::kComplex64, 57, 64, "warp", 1, false, 1, 0},
    {DType::kComplex64, 1, 96, "block", 1, false, 4, 0},

    {DType::kComplex128, 1, 8, "thread", 32, false, 1, 0},
    {DType::kComplex128, 9, 16, "warp", 2, false, 4, 0},
    {DType::kComplex128, 17, 24, "warp", 1, false, 4, 0},
    {DType::kComplex128, 25, 32, "warp", 1, false, 1, 0},
    {DType::kComplex128, 33, 40, "warp", 1, false, 1, 0},
    {DType::kComplex128, 41, 48, "warp", 1, false, 1, 0},
    {DType::kComplex128, 1, 64, "block", 1, false, 4, 0},
};

template <class T>
inline constexpr int64_t kSolvePosMaxN = max_n(kSolvePosTiers, kDTypeOf<T>);

// triangular_solve and cho_solve: substitution_tiers.h

}  // namespace jax_batched::cuda
