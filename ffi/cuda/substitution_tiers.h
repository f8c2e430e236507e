// Which kernel serves a triangular solve or a solve with a Cholesky factor: data.
//
// The kernels (tile/substitution.cuh) give the same bits, so these numbers are about speed alone.
#pragma once

#include <cstdint>
#include <iterator>
#include <string_view>

#include "ffi/common/problem.h"
#include "ffi/cuda/tuned_tiers.h"

namespace jax_batched::cuda {

// The largest n of any kernel: offsets within a matrix are 32-bit.
inline constexpr int64_t kSubstitutionMaxN = 32768;

// "thread" is compiled for each n up to this.
constexpr int thread_substitution_max_n(DType dtype) { return dtype == DType::kFloat32 ? 15 : 8; }

// "warp": so many lanes take a matrix, and each so many of its rows. The first that fits serves.
// Few lanes save instructions where they bound the time: with several right-hand sides, or many
// small matrices. Many lanes leave each matrix less time in shared memory.
struct WarpSubstitutionTier {
  int lanes;
  int rows;
  bool one_column;       // serves problems with one right-hand side
  bool several_columns;  // and with more
};
inline constexpr WarpSubstitutionTier kWarpSubstitutionTiers[] = {
    {8, 2, true, true},   {8, 3, true, true},  {16, 2, true, false},
    {8, 4, false, true},  {16, 3, true, true}, {32, 2, true, false},
    {16, 4, false, true}, {32, 3, true, true}, {32, 4, true, true},
};
// Beyond, another kernel is faster but for float32.
constexpr int warp_substitution_max_n(DType dtype) { return dtype == DType::kFloat32 ? 128 : 64; }

// "panels": a warp takes so many rows, a lane so many columns, and so many lanes a matrix. The
// first serves that fits a multiprocessor's shared memory.
struct PanelsSubstitutionTier {
  DType dtype;
  int64_t max_nrhs;
  int64_t max_n;
  int rows;
  int columns;
  int lanes;
};
inline constexpr PanelsSubstitutionTier kPanelsSubstitutionTiers[] = {
    {DType::kFloat32, 8, 32, 8, 2, 4},       {DType::kFloat32, 8, 128, 8, 1, 8},
    {DType::kFloat32, 16, 96, 8, 2, 8},      {DType::kFloat32, 16, 128, 8, 1, 16},
    {DType::kFloat32, 32, 72, 8, 2, 16},     {DType::kFloat32, 32, 192, 16, 2, 16},
    {DType::kFloat32, kAny, 48, 8, 2, 8},    {DType::kFloat32, kAny, 64, 8, 2, 32},
    {DType::kFloat32, kAny, 192, 16, 2, 32},

    {DType::kFloat64, 8, 16, 8, 1, 8},       {DType::kFloat64, 16, 16, 8, 1, 16},
    {DType::kFloat64, 32, 16, 8, 1, 32},     {DType::kFloat64, kAny, 16, 8, 1, 16},
};
// Compiled for the real dtypes.
constexpr int panels_substitution_max_n(DType dtype) {
  return dtype == DType::kFloat32 ? 192 : dtype == DType::kFloat64 ? 16 : 0;
}

// "resident": a warp takes 8 columns in each of so many parts, in so many tiles of 8 rows; the
// registers are capped for so many blocks of 4 warps. The first that fits serves; the last is the
// largest.
struct ResidentSubstitutionTier {
  int64_t max_nrhs;
  int tiles;
  int parts;
  int min_blocks;
};
inline constexpr ResidentSubstitutionTier kResidentSubstitutionTiers[] = {
    {kAny, 3, 4, 5},  {16, 4, 2, 5},    {kAny, 4, 4, 4},  {16, 6, 2, 4},
    {32, 6, 4, 3},    {kAny, 6, 2, 4},  {kAny, 8, 2, 4},  {kAny, 10, 2, 3},
    {kAny, 12, 2, 3}, {kAny, 14, 2, 3}, {kAny, 16, 2, 2},
};
// Compiled for float64, whose tensor cores do IEEE FMAs.
constexpr int resident_substitution_max_n(DType dtype) {
  return dtype == DType::kFloat64 ? 8 * std::end(kResidentSubstitutionTiers)[-1].tiles : 0;
}

// The largest n that a kernel serves; 0 if it is not compiled for the dtype.
constexpr int64_t substitution_max_n(DType dtype, std::string_view kernel) {
  if (kernel == "thread") return thread_substitution_max_n(dtype);
  if (kernel == "warp") return warp_substitution_max_n(dtype);
  if (kernel == "panels") return panels_substitution_max_n(dtype);
  if (kernel == "resident") return resident_substitution_max_n(dtype);
  return kSubstitutionMaxN;
}

inline constexpr std::string_view kSubstitutionKernels[] = {"thread", "warp",     "stream",
                                                            "panels", "resident", "columns"};

// The compute capability that a kernel needs: tensor cores for doubles.
constexpr int substitution_capability(std::string_view kernel) {
  return kernel == "resident" ? 80 : 0;
}

// Right-hand sides that "warp" and "stream" take at a time.
constexpr int substitution_columns(int64_t nrhs) { return nrhs == 1 ? 1 : 4; }

// "stream": how many tiles are in shared memory or on their way. Two leave room for most matrices,
// of which many have to be in flight. More leave room for fewer, of which the second sweep finds
// more in L2.
struct StreamSubstitutionTier {
  DType dtype;
  int columns;
  int sweeps;  // serves 1: triangular solves, 2: solves with a Cholesky factor, 0: either
  int64_t max_n;
  int stages;
};
inline constexpr StreamSubstitutionTier kStreamSubstitutionTiers[] = {
    {DType::kFloat32, 1, 1, kAny, 2},    {DType::kFloat32, 1, 2, 96, 2},
    {DType::kFloat32, 1, 2, 144, 3},     {DType::kFloat32, 1, 2, 176, 4},
    {DType::kFloat32, 1, 2, 232, 5},     {DType::kFloat32, 1, 2, 360, 6},
    {DType::kFloat32, 1, 2, kAny, 5},    {DType::kFloat32, 4, 0, 320, 2},
    {DType::kFloat32, 4, 0, kAny, 4},

    {DType::kFloat64, 1, 1, kAny, 2},    {DType::kFloat64, 1, 2, 176, 2},
    {DType::kFloat64, 1, 2, 320, 4},     {DType::kFloat64, 1, 2, kAny, 2},
    {DType::kFloat64, 4, 0, 320, 2},     {DType::kFloat64, 4, 0, kAny, 4},

    {DType::kComplex64, 1, 0, kAny, 2},  {DType::kComplex64, 4, 0, kAny, 2},
    {DType::kComplex128, 1, 0, kAny, 2}, {DType::kComplex128, 4, 0, kAny, 2},
};

// Transposed: the rows of b and x are the right-hand sides (x a = b), of which there are several.
// "panels" moves them by elements, one to a line of memory, where they are no whole vectors, and is
// slower than others there (up to 2.7 times).
constexpr bool suits_layout(std::string_view kernel, DType dtype, int64_t n, bool transposed) {
  const int vector = dtype == DType::kFloat32 ? 4 : 2;
  return kernel != "panels" || !transposed || n % vector == 0;
}

// Where nothing was measured (tuned_tiers.h), the first row with the problem's dtype and sweeps,
// n <= max_n and nrhs <= max_nrhs serves whose kernel suits the layout and the GPU.
struct SubstitutionTier {
  DType dtype;
  int sweeps;  // as above
  int64_t max_n;
  int64_t max_nrhs;
  std::string_view kernel;

  constexpr bool serves(DType of, int64_t n, int64_t nrhs, int number_of_sweeps, bool transposed,
                        int capability) const {
    return dtype == of && (sweeps == 0 || sweeps == number_of_sweeps) && n <= max_n &&
           nrhs <= max_nrhs && suits_layout(kernel, dtype, n, transposed) &&
           substitution_capability(kernel) <= capability;
  }
};

// As measured on an H100, 512 MiB of matrices, n = 4..512, nrhs = 1..32 and n; "panels" and what it
// replaces with 256 MiB, n = 8..256, nrhs = 2..64 and n. The rows of one and two right-hand sides
// between "warp" and "stream", "stream" to 8 of them at 105..128, and "resident" on an H200.
inline constexpr SubstitutionTier kSubstitutionTiers[] = {
    {DType::kFloat32, 0, 7, 64, "thread"},
    {DType::kFloat32, 0, 8, 4, "thread"},
    {DType::kFloat32, 0, 8, kAny, "panels"},
    {DType::kFloat32, 0, 15, 64, "thread"},
    {DType::kFloat32, 1, 67, 1, "warp"},
    {DType::kFloat32, 2, 81, 1, "warp"},
    {DType::kFloat32, 0, 4096, 1, "stream"},
    {DType::kFloat32, 0, 96, 4, "warp"},
    {DType::kFloat32, 0, 128, 4, "stream"},
    {DType::kFloat32, 0, 104, kAny, "panels"},
    {DType::kFloat32, 0, 96, 16, "warp"},  // transposed, not in whole vectors
    {DType::kFloat32, 0, 128, 8, "stream"},
    {DType::kFloat32, 0, 128, kAny, "panels"},
    {DType::kFloat32, 0, 128, 16, "warp"},  // transposed, not in whole vectors
    {DType::kFloat32, 0, 320, 16, "stream"},
    {DType::kFloat32, 0, 192, kAny, "panels"},
    {DType::kFloat32, 0, 320, kAny, "columns"},
    {DType::kFloat32, 0, 4096, 32, "stream"},
    {DType::kFloat32, 0, kAny, kAny, "columns"},

    {DType::kFloat64, 0, 7, 64, "thread"},
    {DType::kFloat64, 0, 8, 4, "thread"},
    {DType::kFloat64, 1, 56, 1, "warp"},
    {DType::kFloat64, 2, 61, 1, "warp"},
    {DType::kFloat64, 0, 2048, 1, "stream"},
    {DType::kFloat64, 0, 64, 4, "warp"},
    {DType::kFloat64, 0, 128, 4, "stream"},
    {DType::kFloat64, 0, 16, kAny, "panels"},
    {DType::kFloat64, 0, 16, 16, "warp"},  // transposed, not in whole vectors
    {DType::kFloat64, 0, 96, kAny, "resident"},
    {DType::kFloat64, 0, 128, 8, "stream"},
    {DType::kFloat64, 0, 112, kAny, "resident"},
    {DType::kFloat64, 0, 128, kAny, "resident"},
    {DType::kFloat64, 0, 320, 8, "stream"},
    {DType::kFloat64, 2, 320, 16, "stream"},
    {DType::kFloat64, 0, 320, kAny, "columns"},
    {DType::kFloat64, 0, 2048, 32, "stream"},
    {DType::kFloat64, 0, kAny, kAny, "columns"},

    {DType::kComplex64, 0, 8, 64, "thread"},
    {DType::kComplex64, 0, 16, 16, "warp"},
    {DType::kComplex64, 1, 56, 1, "warp"},
    {DType::kComplex64, 2, 62, 1, "warp"},
    {DType::kComplex64, 0, 2048, 1, "stream"},
    {DType::kComplex64, 1, 64, 8, "warp"},
    {DType::kComplex64, 2, 64, 16, "warp"},
    {DType::kComplex64, 0, 160, 8, "stream"},
    {DType::kComplex64, 0, 160, kAny, "columns"},
    {DType::kComplex64, 0, 2048, 16, "stream"},
    {DType::kComplex64, 0, kAny, kAny, "columns"},

    {DType::kComplex128, 0, 8, 64, "thread"},
    {DType::kComplex128, 0, 16, 16, "warp"},
    {DType::kComplex128, 1, 58, 1, "warp"},
    {DType::kComplex128, 2, 62, 1, "warp"},
    {DType::kComplex128, 0, 1024, 1, "stream"},
    {DType::kComplex128, 0, 64, 8, "warp"},
    {DType::kComplex128, 0, 160, 8, "stream"},
    {DType::kComplex128, 0, 160, kAny, "columns"},
    {DType::kComplex128, 0, 1024, 16, "stream"},
    {DType::kComplex128, 0, kAny, kAny, "columns"},
};

constexpr std::string_view substitution_operation(int sweeps) {
  return sweeps == 1 ? "triangular_solve" : "cho_solve";
}

inline std::string_view substitution_kernel(DType dtype, int64_t n, int64_t nrhs, int sweeps,
                                            bool transposed, int capability) {
  const Call call{substitution_operation(sweeps), dtype, n, nrhs, /*fast=*/false, capability};
  const std::string_view tuned = tuned_kernel(kTunedTiers, call);
  if (!tuned.empty() && n <= substitution_max_n(dtype, tuned) &&
      suits_layout(tuned, dtype, n, transposed)) {
    return tuned;
  }
  for (const SubstitutionTier& tier : kSubstitutionTiers) {
    if (tier.serves(dtype, n, nrhs, sweeps, transposed, capability)) return tier.kernel;
  }
  return "columns";
}

}  // namespace jax_batched::cuda
