// Which kernel serves a triangular solve or a solve with a Cholesky factor: data.
//
// The kernels (substitution.cuh) give the same bits, so these numbers are about speed alone.
#pragma once

#include <iterator>

#include "ffi/cuda/runtime/table.h"
#include "ffi/problems/substitution.h"

namespace jax_batched::cuda {

// The largest n of any kernel: offsets within a matrix are 32-bit.
inline constexpr int64_t kSubstitutionMaxN = 32768;

// "thread" is compiled for each n up to this.
constexpr int thread_substitution_max_n(DType dtype) { return dtype == DType::kFloat32 ? 15 : 8; }

// "lanes_shared": so many lanes take a matrix, and each so many of its rows. The first that fits
// serves. Few lanes save instructions where they bound the time: with several right-hand sides, or
// many small matrices. Many lanes leave each matrix less time in shared memory.
struct LanesSharedSubstitutionTier {
  int lanes;
  int rows;
  bool one_column = true;       // serves problems with one right-hand side
  bool several_columns = true;  // and with more
};
inline constexpr LanesSharedSubstitutionTier kLanesSharedSubstitutionTiers[] = {
    {.lanes = 8, .rows = 2},
    {.lanes = 8, .rows = 3},
    {.lanes = 16, .rows = 2, .several_columns = false},
    {.lanes = 8, .rows = 4, .one_column = false},
    {.lanes = 16, .rows = 3},
    {.lanes = 32, .rows = 2, .several_columns = false},
    {.lanes = 16, .rows = 4, .one_column = false},
    {.lanes = 32, .rows = 3},
    {.lanes = 32, .rows = 4},
};
// Beyond, another kernel is faster but for float32.
constexpr int lanes_shared_substitution_max_n(DType dtype) {
  return dtype == DType::kFloat32 ? 128 : 64;
}

// "block_rows": a warp takes so many rows, a lane so many columns, and so many lanes a matrix. The
// first serves that fits a multiprocessor's shared memory.
struct BlockRowsSubstitutionTier {
  DType dtype;
  int64_t max_nrhs = kAny;
  int64_t max_n;
  int rows;
  int columns;
  int lanes;
};
inline constexpr BlockRowsSubstitutionTier kBlockRowsSubstitutionTiers[] = {
    {.dtype = DType::kFloat32, .max_nrhs = 8, .max_n = 32, .rows = 8, .columns = 2, .lanes = 4},
    {.dtype = DType::kFloat32, .max_nrhs = 8, .max_n = 128, .rows = 8, .columns = 1, .lanes = 8},
    {.dtype = DType::kFloat32, .max_nrhs = 16, .max_n = 96, .rows = 8, .columns = 2, .lanes = 8},
    {.dtype = DType::kFloat32, .max_nrhs = 16, .max_n = 128, .rows = 8, .columns = 1, .lanes = 16},
    {.dtype = DType::kFloat32, .max_nrhs = 32, .max_n = 72, .rows = 8, .columns = 2, .lanes = 16},
    {.dtype = DType::kFloat32, .max_nrhs = 32, .max_n = 192, .rows = 16, .columns = 2, .lanes = 16},
    {.dtype = DType::kFloat32, .max_n = 48, .rows = 8, .columns = 2, .lanes = 8},
    {.dtype = DType::kFloat32, .max_n = 64, .rows = 8, .columns = 2, .lanes = 32},
    {.dtype = DType::kFloat32, .max_n = 192, .rows = 16, .columns = 2, .lanes = 32},

    {.dtype = DType::kFloat64, .max_nrhs = 8, .max_n = 16, .rows = 8, .columns = 1, .lanes = 8},
    {.dtype = DType::kFloat64, .max_nrhs = 16, .max_n = 16, .rows = 8, .columns = 1, .lanes = 16},
    {.dtype = DType::kFloat64, .max_nrhs = 32, .max_n = 16, .rows = 8, .columns = 1, .lanes = 32},
    {.dtype = DType::kFloat64, .max_n = 16, .rows = 8, .columns = 1, .lanes = 16},
};
// Compiled for the real dtypes.
constexpr int block_rows_substitution_max_n(DType dtype) {
  return dtype == DType::kFloat32 ? 192 : dtype == DType::kFloat64 ? 16 : 0;
}

// "block_tensor": a warp takes 8 columns in each of so many parts, in so many tiles of 8 rows; the
// registers are capped for so many blocks of 4 warps. The first that fits serves; the last is the
// largest.
struct BlockTensorSubstitutionTier {
  int64_t max_nrhs = kAny;
  int tiles;
  int parts;
  int min_blocks;
};
inline constexpr BlockTensorSubstitutionTier kBlockTensorSubstitutionTiers[] = {
    {.tiles = 3, .parts = 4, .min_blocks = 5},
    {.max_nrhs = 16, .tiles = 4, .parts = 2, .min_blocks = 5},
    {.tiles = 4, .parts = 4, .min_blocks = 4},
    {.max_nrhs = 16, .tiles = 6, .parts = 2, .min_blocks = 4},
    {.max_nrhs = 32, .tiles = 6, .parts = 4, .min_blocks = 3},
    {.tiles = 6, .parts = 2, .min_blocks = 4},
    {.tiles = 8, .parts = 2, .min_blocks = 4},
    {.tiles = 10, .parts = 2, .min_blocks = 3},
    {.tiles = 12, .parts = 2, .min_blocks = 3},
    {.tiles = 14, .parts = 2, .min_blocks = 3},
    {.tiles = 16, .parts = 2, .min_blocks = 2},
};
// Compiled for float64, whose tensor cores do IEEE FMAs.
constexpr int block_tensor_substitution_max_n(DType dtype) {
  return dtype == DType::kFloat64 ? 8 * std::end(kBlockTensorSubstitutionTiers)[-1].tiles : 0;
}

// The largest n that a kernel serves; 0 if it is not compiled for the dtype.
constexpr int64_t substitution_max_n(DType dtype, std::string_view kernel) {
  if (kernel == "thread") return thread_substitution_max_n(dtype);
  if (kernel == "lanes_shared") return lanes_shared_substitution_max_n(dtype);
  if (kernel == "block_rows") return block_rows_substitution_max_n(dtype);
  if (kernel == "block_tensor") return block_tensor_substitution_max_n(dtype);
  return kSubstitutionMaxN;
}

inline constexpr std::string_view kSubstitutionKernels[] = {
    "thread", "lanes_shared", "warp_streamed", "block_rows", "block_tensor", "block_columns"};

// The compute capability that a kernel needs: tensor cores for doubles.
constexpr int substitution_capability(std::string_view kernel) {
  return kernel == "block_tensor" ? 80 : 0;
}

// Right-hand sides that "lanes_shared" and "warp_streamed" take at a time.
constexpr int substitution_columns(int64_t nrhs, bool complex) {
  return nrhs == 1 ? 1 : nrhs == 2 && !complex ? 2 : 4;
}

// "warp_streamed": how many tiles are in shared memory or on their way. Two leave room for most
// matrices, of which many have to be in flight. More leave room for fewer, of which the second
// sweep finds more in L2.
struct WarpStreamedSubstitutionTier {
  DType dtype;
  int columns;
  int sweeps = 0;  // serves 1: triangular solves, 2: solves with a Cholesky factor, 0: either
  int64_t max_n = kAny;
  int stages;
};
inline constexpr WarpStreamedSubstitutionTier kWarpStreamedSubstitutionTiers[] = {
    {.dtype = DType::kFloat32, .columns = 1, .sweeps = 1, .stages = 2},
    {.dtype = DType::kFloat32, .columns = 1, .sweeps = 2, .max_n = 96, .stages = 2},
    {.dtype = DType::kFloat32, .columns = 1, .sweeps = 2, .max_n = 144, .stages = 3},
    {.dtype = DType::kFloat32, .columns = 1, .sweeps = 2, .max_n = 176, .stages = 4},
    {.dtype = DType::kFloat32, .columns = 1, .sweeps = 2, .max_n = 232, .stages = 5},
    {.dtype = DType::kFloat32, .columns = 1, .sweeps = 2, .max_n = 360, .stages = 6},
    {.dtype = DType::kFloat32, .columns = 1, .sweeps = 2, .stages = 5},
    {.dtype = DType::kFloat32, .columns = 2, .stages = 2},
    {.dtype = DType::kFloat32, .columns = 4, .max_n = 320, .stages = 2},
    {.dtype = DType::kFloat32, .columns = 4, .stages = 4},

    {.dtype = DType::kFloat64, .columns = 1, .sweeps = 1, .stages = 2},
    {.dtype = DType::kFloat64, .columns = 1, .sweeps = 2, .max_n = 176, .stages = 2},
    {.dtype = DType::kFloat64, .columns = 1, .sweeps = 2, .max_n = 320, .stages = 4},
    {.dtype = DType::kFloat64, .columns = 1, .sweeps = 2, .stages = 2},
    {.dtype = DType::kFloat64, .columns = 2, .stages = 2},
    {.dtype = DType::kFloat64, .columns = 4, .max_n = 320, .stages = 2},
    {.dtype = DType::kFloat64, .columns = 4, .stages = 4},

    {.dtype = DType::kComplex64, .columns = 1, .stages = 2},
    {.dtype = DType::kComplex64, .columns = 4, .stages = 2},
    {.dtype = DType::kComplex128, .columns = 1, .stages = 2},
    {.dtype = DType::kComplex128, .columns = 4, .stages = 2},
};

// "block_rows" moves transposed right-hand sides by elements, one to a line of memory, where they
// are no whole vectors, and is slower than others there (up to 2.7 times).
constexpr bool suits_layout(std::string_view kernel, const Call& call) {
  const int vector = call.dtype == DType::kFloat32 ? 4 : 2;
  return kernel != "block_rows" || !call.transposed || call.n % vector == 0;
}

// Where nothing was measured (runtime/tuned.h), the first row with the problem's dtype and sweeps,
// n <= max_n and nrhs <= max_nrhs serves whose kernel suits the layout and the GPU.
struct SubstitutionTier {
  DType dtype;
  int sweeps = 0;  // as above
  int64_t max_n = kAny;
  int64_t max_nrhs = kAny;
  std::string_view kernel;

  constexpr bool serves(const Call& call, int number_of_sweeps) const {
    return dtype == call.dtype && (sweeps == 0 || sweeps == number_of_sweeps) && call.n <= max_n &&
           call.nrhs <= max_nrhs && suits_layout(kernel, call) &&
           substitution_capability(kernel) <= call.capability;
  }
};

// As measured on an H100, 512 MiB of matrices, n = 4..512, nrhs = 1..32 and n; "block_rows" and
// what it replaces with 256 MiB, n = 8..256, nrhs = 2..64 and n. The rows of one and two right-hand
// sides between "lanes_shared" and "warp_streamed", "warp_streamed" to 8 of them at 105..128, and
// "block_tensor" on an H200.
inline constexpr SubstitutionTier kSubstitutionTiers[] = {
    {.dtype = DType::kFloat32, .max_n = 7, .max_nrhs = 64, .kernel = "thread"},
    {.dtype = DType::kFloat32, .max_n = 8, .max_nrhs = 4, .kernel = "thread"},
    {.dtype = DType::kFloat32, .max_n = 8, .kernel = "block_rows"},
    {.dtype = DType::kFloat32, .max_n = 15, .max_nrhs = 64, .kernel = "thread"},
    {.dtype = DType::kFloat32, .sweeps = 1, .max_n = 67, .max_nrhs = 1, .kernel = "lanes_shared"},
    {.dtype = DType::kFloat32, .sweeps = 2, .max_n = 81, .max_nrhs = 1, .kernel = "lanes_shared"},
    {.dtype = DType::kFloat32, .max_n = 4096, .max_nrhs = 1, .kernel = "warp_streamed"},
    {.dtype = DType::kFloat32, .max_n = 84, .max_nrhs = 2, .kernel = "lanes_shared"},
    {.dtype = DType::kFloat32, .max_n = 96, .max_nrhs = 2, .kernel = "warp_streamed"},
    {.dtype = DType::kFloat32, .max_n = 96, .max_nrhs = 4, .kernel = "lanes_shared"},
    {.dtype = DType::kFloat32, .max_n = 128, .max_nrhs = 4, .kernel = "warp_streamed"},
    {.dtype = DType::kFloat32, .max_n = 104, .kernel = "block_rows"},
    {.dtype = DType::kFloat32,
     .max_n = 96,
     .max_nrhs = 16,
     .kernel = "lanes_shared"},  // transposed, not in whole vectors
    {.dtype = DType::kFloat32, .max_n = 128, .max_nrhs = 8, .kernel = "warp_streamed"},
    {.dtype = DType::kFloat32, .max_n = 128, .kernel = "block_rows"},
    {.dtype = DType::kFloat32,
     .max_n = 128,
     .max_nrhs = 16,
     .kernel = "lanes_shared"},  // transposed, not in whole vectors
    {.dtype = DType::kFloat32, .max_n = 320, .max_nrhs = 16, .kernel = "warp_streamed"},
    {.dtype = DType::kFloat32, .max_n = 192, .kernel = "block_rows"},
    {.dtype = DType::kFloat32, .max_n = 320, .kernel = "block_columns"},
    {.dtype = DType::kFloat32, .max_n = 4096, .max_nrhs = 32, .kernel = "warp_streamed"},
    {.dtype = DType::kFloat32, .kernel = "block_columns"},

    {.dtype = DType::kFloat64, .max_n = 7, .max_nrhs = 64, .kernel = "thread"},
    {.dtype = DType::kFloat64, .max_n = 8, .max_nrhs = 4, .kernel = "thread"},
    {.dtype = DType::kFloat64, .sweeps = 1, .max_n = 56, .max_nrhs = 1, .kernel = "lanes_shared"},
    {.dtype = DType::kFloat64, .sweeps = 2, .max_n = 61, .max_nrhs = 1, .kernel = "lanes_shared"},
    {.dtype = DType::kFloat64, .max_n = 2048, .max_nrhs = 1, .kernel = "warp_streamed"},
    {.dtype = DType::kFloat64, .max_n = 64, .max_nrhs = 4, .kernel = "lanes_shared"},
    {.dtype = DType::kFloat64, .max_n = 128, .max_nrhs = 4, .kernel = "warp_streamed"},
    {.dtype = DType::kFloat64, .max_n = 16, .kernel = "block_rows"},
    {.dtype = DType::kFloat64,
     .max_n = 16,
     .max_nrhs = 16,
     .kernel = "lanes_shared"},  // transposed, not in whole vectors
    {.dtype = DType::kFloat64, .max_n = 96, .kernel = "block_tensor"},
    {.dtype = DType::kFloat64, .max_n = 128, .max_nrhs = 8, .kernel = "warp_streamed"},
    {.dtype = DType::kFloat64, .max_n = 128, .kernel = "block_tensor"},
    {.dtype = DType::kFloat64, .max_n = 320, .max_nrhs = 8, .kernel = "warp_streamed"},
    {.dtype = DType::kFloat64,
     .sweeps = 2,
     .max_n = 320,
     .max_nrhs = 16,
     .kernel = "warp_streamed"},
    {.dtype = DType::kFloat64, .max_n = 320, .kernel = "block_columns"},
    {.dtype = DType::kFloat64, .max_n = 2048, .max_nrhs = 32, .kernel = "warp_streamed"},
    {.dtype = DType::kFloat64, .kernel = "block_columns"},

    {.dtype = DType::kComplex64, .max_n = 8, .max_nrhs = 64, .kernel = "thread"},
    {.dtype = DType::kComplex64, .max_n = 16, .max_nrhs = 16, .kernel = "lanes_shared"},
    {.dtype = DType::kComplex64, .sweeps = 1, .max_n = 56, .max_nrhs = 1, .kernel = "lanes_shared"},
    {.dtype = DType::kComplex64, .sweeps = 2, .max_n = 62, .max_nrhs = 1, .kernel = "lanes_shared"},
    {.dtype = DType::kComplex64, .max_n = 2048, .max_nrhs = 1, .kernel = "warp_streamed"},
    {.dtype = DType::kComplex64, .sweeps = 1, .max_n = 64, .max_nrhs = 8, .kernel = "lanes_shared"},
    {.dtype = DType::kComplex64,
     .sweeps = 2,
     .max_n = 64,
     .max_nrhs = 16,
     .kernel = "lanes_shared"},
    {.dtype = DType::kComplex64, .max_n = 160, .max_nrhs = 8, .kernel = "warp_streamed"},
    {.dtype = DType::kComplex64, .max_n = 160, .kernel = "block_columns"},
    {.dtype = DType::kComplex64, .max_n = 2048, .max_nrhs = 16, .kernel = "warp_streamed"},
    {.dtype = DType::kComplex64, .kernel = "block_columns"},

    {.dtype = DType::kComplex128, .max_n = 8, .max_nrhs = 64, .kernel = "thread"},
    {.dtype = DType::kComplex128, .max_n = 16, .max_nrhs = 16, .kernel = "lanes_shared"},
    {.dtype = DType::kComplex128,
     .sweeps = 1,
     .max_n = 58,
     .max_nrhs = 1,
     .kernel = "lanes_shared"},
    {.dtype = DType::kComplex128,
     .sweeps = 2,
     .max_n = 62,
     .max_nrhs = 1,
     .kernel = "lanes_shared"},
    {.dtype = DType::kComplex128, .max_n = 1024, .max_nrhs = 1, .kernel = "warp_streamed"},
    {.dtype = DType::kComplex128, .max_n = 64, .max_nrhs = 8, .kernel = "lanes_shared"},
    {.dtype = DType::kComplex128, .max_n = 160, .max_nrhs = 8, .kernel = "warp_streamed"},
    {.dtype = DType::kComplex128, .max_n = 160, .kernel = "block_columns"},
    {.dtype = DType::kComplex128, .max_n = 1024, .max_nrhs = 16, .kernel = "warp_streamed"},
    {.dtype = DType::kComplex128, .kernel = "block_columns"},
};

// The kernel that serves a call on a GPU: the tuned one, else as the rows say.
inline std::string_view substitution_kernel(const Call& call, int sweeps) {
  const std::string_view tuned = tuned_kernel(tuned_rows(), call);
  if (!tuned.empty() && call.n <= substitution_max_n(call.dtype, tuned) &&
      suits_layout(tuned, call)) {
    return tuned;
  }
  for (const SubstitutionTier& tier : kSubstitutionTiers) {
    if (tier.serves(call, sweeps)) return tier.kernel;
  }
  return "block_columns";
}

template <class P>
struct SubstitutionPolicy {
  template <class F>
  static void for_each_kernel(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) {
      if (is_storage_only(dtype)) continue;
      for (const std::string_view kernel : kSubstitutionKernels) {
        const int64_t max_n = substitution_max_n(dtype, kernel);
        if (max_n == 0) continue;
        f(KernelRow{dtype, std::string(kernel), 1, max_n, substitution_capability(kernel)});
      }
    }
  }
  static std::string chosen(const Call& call) {
    return std::string(substitution_kernel(call, P::kSweeps));
  }
  template <class F>
  static void for_each_limit(F&& f) {
    for (const auto& [dtype, name] : kDTypeNames) {
      if (!is_storage_only(dtype)) f(Limit{dtype, kSubstitutionMaxN});
    }
  }
};
template <>
struct Policy<TriangularSolveProblem> : SubstitutionPolicy<TriangularSolveProblem> {};
template <>
struct Policy<ChoSolveProblem> : SubstitutionPolicy<ChoSolveProblem> {};

}  // namespace jax_batched::cuda
