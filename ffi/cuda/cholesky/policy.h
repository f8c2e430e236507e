// Which kernel serves a factorization or a solve with a positive definite matrix: data.
//
// The order of rows is as measured on an H100, of later rows on an H200 (kernels of up to 100 bytes
// of spills are in use where the register cap pays).
#pragma once

#include "ffi/cuda/runtime/table.h"
#include "ffi/problems/cholesky.h"
#include "ffi/problems/solve_pos.h"

namespace jax_batched::cuda {

// ---- The shapes of the kernels ----
//
// min_blocks: resident blocks per multiprocessor that the register cap is for; 0: no cap. A solve
// whose kernel takes one right-hand side (`several` is false) leaves more to the kernel of
// WarpShape.

// A thread per matrix of exact size.
struct ThreadShape {
  static constexpr std::string_view kName = "thread";
};

// 8 lanes of a warp per matrix, rows dealt out to them.
struct LanesShape {
  static constexpr std::string_view kName = "lanes";
  int min_blocks = 0;
  bool several = true;
};

// A warp per matrix or two, in registers.
struct WarpShape {
  static constexpr std::string_view kName = "warp";
  int group = 1;       // matrices of a warp, side by side
  int warps = 1;       // per block
  int min_blocks = 0;  // of more than 64 rows: in the rolled kernels
};

// 8 lanes of a warp per matrix, in shared memory.
struct LanesSharedShape {
  static constexpr std::string_view kName = "lanes_shared";
  int min_blocks = 0;  // of the kernel for several right-hand sides
};

// A warp per matrix of doubles, in registers; products on the tensor cores.
struct WarpTensorShape {
  static constexpr std::string_view kName = "warp_tensor";
};

// A warp per matrix, which is taken as 2x2 blocks.
struct WarpSharedShape {
  static constexpr std::string_view kName = "warp_shared";
  int min_blocks = 0;
  bool several = true;
};

// A block per matrix of doubles, in shared memory; products on the tensor cores.
struct BlockSharedShape {
  static constexpr std::string_view kName = "block_shared";
  int warps;
  int min_blocks = 0;
  bool rhs_warp = false;  // one of the warps holds right-hand sides
  bool products = true;   // one right-hand side goes back as products, too
};

// A block per matrix of any size.
struct BlockShape {
  static constexpr std::string_view kName = "block";
  int depth;  // columns of L that come back at a time
  int min_blocks = 0;
  int ragged_blocks = 0;  // min_blocks where rows are no whole vectors; 0: the same
  int row_tiles = 0;      // of a warp; 0: what suits most sizes
  bool prefetch = false;  // ask the L2 cache for the next tile while one is factored
};

// ---- cholesky ----

using CholeskyShape =
    std::variant<ThreadShape, LanesShape, WarpShape, WarpSharedShape, BlockSharedShape, BlockShape>;
inline constexpr Row<CholeskyShape> kCholeskyTable[] = {
    {DType::kFloat32, 1, 16, ThreadShape{}},
    {DType::kFloat32, 9, 16, WarpShape{.group = 2, .warps = 4, .min_blocks = 5}},
    {DType::kFloat32, 17, 24, WarpShape{.group = 2, .warps = 4, .min_blocks = 6}},
    {DType::kFloat32, 25, 32, WarpShape{.group = 2, .warps = 2, .min_blocks = 10}},
    {DType::kFloat32, 33, 40, WarpShape{.warps = 4, .min_blocks = 6}},
    {DType::kFloat32, 41, 48, WarpShape{.min_blocks = 16}},
    {DType::kFloat32, 49, 56, WarpShape{.min_blocks = 16}},
    {DType::kFloat32, 57, 64, WarpShape{.min_blocks = 12}},
    {DType::kFloat32, 65, 72, WarpShape{.min_blocks = 12}},
    {DType::kFloat32, 73, 80, WarpShape{.min_blocks = 12}},
    {DType::kFloat32, 81, 88, WarpShape{}},
    {DType::kFloat32, 89, 96, WarpShape{}},
    {DType::kFloat32, 97, 104, WarpShape{}},
    {DType::kFloat32, 105, 112, WarpSharedShape{.min_blocks = 8}},
    {DType::kFloat32, 113, 128, WarpSharedShape{.min_blocks = 8}},
    {DType::kFloat32,
     129,
     512,
     BlockShape{.depth = 32, .min_blocks = 4},
     {.variant = "tensor", .capability = 80, .fast = true}},
    {DType::kFloat32, 1, 128, BlockShape{.depth = 16, .min_blocks = 4, .ragged_blocks = 3}},
    {DType::kFloat32, 129, 224, BlockShape{.depth = 16, .min_blocks = 5, .row_tiles = 2}},
    {DType::kFloat32, 225, 512, BlockShape{.depth = 16, .min_blocks = 4, .ragged_blocks = 3}},

    {DType::kFloat64, 1, 13, ThreadShape{}},
    {DType::kFloat64, 9, 16, WarpShape{.group = 2, .min_blocks = 20}},
    {DType::kFloat64, 17, 24, WarpShape{.min_blocks = 20}},
    {DType::kFloat64, 25, 32, WarpShape{.warps = 2, .min_blocks = 10}},
    {DType::kFloat64, 33, 40, WarpShape{}},
    {DType::kFloat64, 41, 48, WarpShape{}},
    {DType::kFloat64, 49, 56, WarpShape{}},
    {DType::kFloat64, 57, 64, WarpShape{}},
    {DType::kFloat64, 65, 96, BlockSharedShape{.warps = 4, .min_blocks = 4}},
    {DType::kFloat64, 97, 128, BlockSharedShape{.warps = 5, .min_blocks = 4}},
    {DType::kFloat64, 129, 160, BlockSharedShape{.warps = 6, .min_blocks = 2}},
    {DType::kFloat64, 1, 160, BlockShape{.depth = 16, .min_blocks = 3}},
    {DType::kFloat64, 161, 512, BlockShape{.depth = 32, .min_blocks = 2, .prefetch = true}},

    {DType::kComplex64, 1, 13, ThreadShape{}},
    {DType::kComplex64, 9, 16, WarpShape{.group = 2, .warps = 4}},
    {DType::kComplex64, 17, 24, WarpShape{.group = 2, .warps = 4}},
    {DType::kComplex64, 25, 32, WarpShape{}},
    {DType::kComplex64, 33, 40, WarpShape{}},
    {DType::kComplex64, 41, 48, WarpShape{}},
    {DType::kComplex64, 49, 56, WarpShape{}},
    {DType::kComplex64, 57, 63, WarpSharedShape{}},
    {DType::kComplex64, 64, 64, WarpShape{}},
    {DType::kComplex64, 65, 80, WarpSharedShape{.min_blocks = 8}},
    {DType::kComplex64, 81, 96, WarpSharedShape{.min_blocks = 8}},
    {DType::kComplex64, 1, 512, BlockShape{.depth = 16, .min_blocks = 3, .prefetch = true}},

    {DType::kComplex128, 1, 9, ThreadShape{}},
    {DType::kComplex128, 9, 16, WarpShape{.group = 2, .warps = 4}},
    {DType::kComplex128, 17, 24, WarpShape{.group = 2, .warps = 4}},
    {DType::kComplex128, 25, 32, WarpSharedShape{.min_blocks = 16}},
    {DType::kComplex128, 33, 40, WarpShape{}},
    {DType::kComplex128, 41, 48, WarpShape{}},
    {DType::kComplex128, 49, 64, WarpSharedShape{.min_blocks = 8}},
    {DType::kComplex128, 1, 160, BlockShape{.depth = 8, .min_blocks = 3, .prefetch = true}},
    {DType::kComplex128, 161, 512, BlockShape{.depth = 8, .min_blocks = 2}},

    // Beyond 96, casts to float32 and back take over.
    {DType::kFloat16, 1, 16, ThreadShape{}},
    {DType::kFloat16, 17, 24, LanesShape{.min_blocks = 20}},
    {DType::kFloat16, 25, 32, LanesShape{.min_blocks = 16}},
    {DType::kFloat16, 33, 40, LanesShape{.min_blocks = 12}},
    {DType::kFloat16, 41, 48, LanesShape{}},
    {DType::kFloat16, 49, 56, WarpShape{.min_blocks = 16}},
    {DType::kFloat16, 57, 64, WarpShape{.min_blocks = 12}},
    {DType::kFloat16, 65, 72, WarpShape{}},
    {DType::kFloat16, 73, 80, WarpShape{}},
    {DType::kFloat16, 81, 88, WarpShape{}},
    {DType::kFloat16, 89, 96, WarpShape{}},
};
static_assert(names_are_distinct(kCholeskyTable), "give rows that overlap a variant");

// Whether "warp" keeps its loop over panels a loop. Unrolled, the panels of many tiles overflow the
// instruction cache: of 9 tiles where rows need their bounds checked, of 13 also where they do not.
constexpr bool is_rolled(DType dtype, int tiles, bool exact) {
  return dtype == DType::kFloat32 && (tiles > 12 || (tiles > 8 && !exact));
}

// Whether "warp" has a kernel of its own for n = 8 * tiles. Large kernels of 16-bit elements are
// not limited by loads and stores: one for all sizes of a row.
constexpr bool has_exact_kernel(DType dtype, int tiles) {
  return !is_storage_only(dtype) || tiles <= 8;
}

template <>
struct Policy<CholeskyProblem> : TablePolicy<kCholeskyTable> {
  template <class F>
  static void for_each_limit(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) f(Limit{dtype, largest_n(kCholeskyTable, dtype)});
  }
};

// ---- solve_pos ----

using SolvePosShape = std::variant<ThreadShape, LanesShape, WarpShape, LanesSharedShape,
                                   WarpTensorShape, WarpSharedShape, BlockSharedShape>;
inline constexpr Row<SolvePosShape> kSolvePosTable[] = {
    {DType::kFloat32, 1, 15, ThreadShape{}},
    {DType::kFloat32, 9, 16, LanesShape{.min_blocks = 32}},
    {DType::kFloat32, 17, 24, LanesShape{.min_blocks = 20}},
    {DType::kFloat32, 25, 32, LanesShape{.min_blocks = 16}},
    {DType::kFloat32, 33, 40, LanesShape{.min_blocks = 12}},
    {DType::kFloat32, 41, 48, LanesShape{}},
    {DType::kFloat32, 49, 56, LanesSharedShape{.min_blocks = 16}},
    {DType::kFloat32, 57, 64, LanesSharedShape{.min_blocks = 12}},
    {DType::kFloat32, 65, 72, WarpShape{.min_blocks = 12}},
    {DType::kFloat32, 73, 80, WarpShape{.min_blocks = 12}},
    {DType::kFloat32, 81, 88, WarpShape{}},
    {DType::kFloat32, 89, 96, WarpShape{}},
    {DType::kFloat32, 97, 104, WarpShape{}},
    {DType::kFloat32, 105, 112, WarpSharedShape{.min_blocks = 8}},
    {DType::kFloat32, 113, 128, WarpSharedShape{.min_blocks = 8}},

    {DType::kFloat64, 1, 12, ThreadShape{}},
    {DType::kFloat64, 9, 16, LanesShape{.min_blocks = 20}},
    {DType::kFloat64, 17, 24, LanesShape{.min_blocks = 12}},
    {DType::kFloat64, 25, 32, LanesShape{}},
    {DType::kFloat64, 33, 40, WarpTensorShape{}},
    {DType::kFloat64, 41, 48, WarpTensorShape{}},
    {DType::kFloat64, 49, 56, WarpTensorShape{}},
    {DType::kFloat64, 57, 64, WarpTensorShape{}},
    {DType::kFloat64, 65, 72, WarpTensorShape{}},
    {DType::kFloat64, 73, 88, BlockSharedShape{.warps = 4, .min_blocks = 5}},
    {DType::kFloat64, 89, 96, BlockSharedShape{.warps = 5, .min_blocks = 4, .rhs_warp = true}},
    {DType::kFloat64, 97, 120, BlockSharedShape{.warps = 5, .min_blocks = 4, .products = false}},
    {DType::kFloat64, 121, 128, BlockSharedShape{.warps = 6, .min_blocks = 3, .rhs_warp = true}},
    {DType::kFloat64, 129, 144, BlockSharedShape{.warps = 6, .min_blocks = 2, .products = false}},

    {DType::kComplex64, 1, 8, ThreadShape{}},
    {DType::kComplex64, 9, 16, LanesShape{.min_blocks = 20}},
    {DType::kComplex64, 17, 24, LanesShape{.min_blocks = 12}},
    {DType::kComplex64, 25, 32, LanesShape{.several = false}},
    {DType::kComplex64, 33, 40, WarpShape{}},
    {DType::kComplex64, 41, 48, WarpSharedShape{.min_blocks = 16, .several = false}},
    {DType::kComplex64, 49, 56, WarpSharedShape{.min_blocks = 12, .several = false}},
    {DType::kComplex64, 57, 64, WarpSharedShape{.min_blocks = 12, .several = false}},
    {DType::kComplex64, 65, 80, WarpSharedShape{.min_blocks = 8}},
    {DType::kComplex64, 81, 96, WarpSharedShape{.min_blocks = 8}},

    {DType::kComplex128, 1, 8, ThreadShape{}},
    {DType::kComplex128, 9, 16, LanesShape{.min_blocks = 12}},
    {DType::kComplex128, 17, 24, LanesShape{.several = false}},
    {DType::kComplex128, 25, 32, WarpShape{}},
    {DType::kComplex128, 33, 40, WarpShape{}},
    {DType::kComplex128, 41, 48, WarpSharedShape{.min_blocks = 8, .several = false}},
    {DType::kComplex128, 49, 64, WarpSharedShape{.min_blocks = 8}},

    // One right-hand side; casts take over for more, and beyond 48.
    {DType::kFloat16, 1, 15, ThreadShape{}},
    {DType::kFloat16, 9, 16, LanesShape{.min_blocks = 32}},
    {DType::kFloat16, 17, 24, LanesShape{.min_blocks = 20}},
    {DType::kFloat16, 25, 32, LanesShape{.min_blocks = 16}},
    {DType::kFloat16, 33, 40, LanesShape{.min_blocks = 12}},
    {DType::kFloat16, 41, 48, LanesShape{}},
};
static_assert(names_are_distinct(kSolvePosTable), "give rows that overlap a variant");

// "warp" takes one right-hand side at a time, with a loop over panels that stays a loop, beyond so
// many tiles: of one, and of several.
inline constexpr int kMaxUnrolledTiles = 8;
inline constexpr int kMaxSeveralTiles = 12;

// Where solve_pos is one kernel on every GPU, for factor and solve are not faster. float32 beyond
// 96, complex64 beyond 64 and complex128 beyond 48: more right-hand sides are so many
// factorizations. float64 beyond 64: the factor is in shared memory, of which 144 rows fill the 99
// KB that every GPU since sm_80 has.
inline constexpr Limit kFusedSolvePos[] = {
    {.dtype = DType::kFloat32, .max_n = 96},
    {.dtype = DType::kFloat32, .max_n = 128, .max_nrhs = 1},
    {.dtype = DType::kFloat64, .max_n = 64},
    {.dtype = DType::kFloat64, .max_n = 144, .max_nrhs = 16},
    {.dtype = DType::kComplex64, .max_n = 64},
    {.dtype = DType::kComplex64, .max_n = 96, .max_nrhs = 1},
    {.dtype = DType::kComplex128, .max_n = 48},
    {.dtype = DType::kComplex128, .max_n = 64, .max_nrhs = 1},
    {.dtype = DType::kFloat16, .max_n = 48, .max_nrhs = 1},
    {.dtype = DType::kBFloat16, .max_n = 48, .max_nrhs = 1},
};
constexpr bool are_covered(const Limit (&limits)[std::size(kFusedSolvePos)]) {
  for (const Limit& limit : limits) {
    if (limit.max_n > largest_n(kSolvePosTable, limit.dtype)) return false;
  }
  return true;
}
static_assert(are_covered(kFusedSolvePos), "no row serves the largest n");

template <>
struct Policy<SolvePosProblem> : TablePolicy<kSolvePosTable> {
  template <class F>
  static void for_each_limit(F&& f) {
    for (const Limit& limit : kFusedSolvePos) f(limit);
  }
};

// ---- cholesky_pullback ----

// What 99 KB of shared memory hold, the least since sm_80; beyond, a product and two solves.
constexpr int pullback_max_n(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 192;
    case DType::kComplex128:
      return 80;
    default:
      return 128;
  }
}

template <>
struct Policy<CholeskyPullbackProblem> : OneKernelPolicy {
  template <class F>
  static void for_each_limit(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) {
      if (!is_storage_only(dtype)) f(Limit{dtype, pullback_max_n(dtype)});
    }
  }
};

}  // namespace jax_batched::cuda
