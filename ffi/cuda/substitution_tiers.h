// Which kernel serves a triangular solve or a solve with a Cholesky factor: data.
//
// The kernels (tile/substitution.cuh) give the same bits, so these numbers are about speed alone.
#pragma once

#include <cstdint>
#include <string_view>

#include "ffi/common/problem.h"

namespace jax_batched::cuda {

// The largest n of any kernel: offsets within a matrix are 32-bit.
inline constexpr int64_t kSubstitutionMaxN = 32768;

// "thread" is compiled for each n up to this.
constexpr int thread_substitution_max_n(DType dtype) { return dtype == DType::kFloat32 ? 16 : 8; }

// "warp": so many lanes take a matrix, and each so many of its rows. The first that fits serves.
struct WarpSubstitutionTier {
  int lanes;
  int rows;
};
inline constexpr WarpSubstitutionTier kWarpSubstitutionTiers[] = {
    {8, 2}, {8, 3}, {16, 2}, {16, 3}, {32, 2}, {32, 3}, {32, 4}};
// The last of them, in complex arithmetic: 64 rows.
constexpr int warp_substitution_max_n(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 ? 128 : 64;
}

// Right-hand sides that "warp", "stream" and "block" take at a time.
constexpr int substitution_columns(int64_t nrhs, bool complex) {
  return nrhs == 1 ? 1 : nrhs == 2 && !complex ? 2 : 4;
}

inline constexpr int64_t kAny = INT64_MAX;

// "stream": how many tiles are in shared memory or on their way. More of them leave room for fewer
// matrices in flight, of which the second sweep then finds more in L2.
struct StreamSubstitutionTier {
  DType dtype;
  int columns;
  int sweeps;  // 0: either
  int64_t max_n;
  int stages;
};
inline constexpr StreamSubstitutionTier kStreamSubstitutionTiers[] = {
    {DType::kFloat32, 1, 1, kAny, 4},    {DType::kFloat32, 1, 2, 144, 4},
    {DType::kFloat32, 1, 2, 224, 6},     {DType::kFloat32, 1, 2, kAny, 8},
    {DType::kFloat32, 2, 0, kAny, 4},    {DType::kFloat32, 4, 0, kAny, 4},
    {DType::kFloat64, 1, 1, kAny, 3},    {DType::kFloat64, 1, 2, 112, 3},
    {DType::kFloat64, 1, 2, 224, 6},     {DType::kFloat64, 1, 2, kAny, 8},
    {DType::kFloat64, 2, 0, kAny, 4},    {DType::kFloat64, 4, 0, kAny, 3},
    {DType::kComplex64, 1, 0, kAny, 3},  {DType::kComplex64, 4, 0, kAny, 3},
    {DType::kComplex128, 1, 0, kAny, 2}, {DType::kComplex128, 4, 0, kAny, 2},
};

// From this n on, "block" takes tiles of 128 rows instead of 64, with `columns` right-hand sides at
// a time.
constexpr int64_t substitution_tall_tile_min_n(DType dtype, int columns) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kComplex64:
      return columns == 1 ? 225 : kAny;
    case DType::kFloat64:
      return 225;
    default:
      return kAny;
  }
}

// The first row with the problem's dtype and sweeps, n <= max_n and nrhs <= max_nrhs serves.
struct SubstitutionTier {
  DType dtype;
  int sweeps;  // 1: triangular solve, 2: solve with a Cholesky factor, 0: either
  int64_t max_n;
  int64_t max_nrhs;
  std::string_view kernel;
};

// As measured on an H100, 512 MiB of matrices, n = 4..512, nrhs = 1..32 and n.
inline constexpr SubstitutionTier kSubstitutionTiers[] = {
    {DType::kFloat32, 0, 8, 64, "thread"},       {DType::kFloat32, 1, 15, 1, "thread"},
    {DType::kFloat32, 2, 16, 1, "thread"},       {DType::kFloat32, 0, 96, 1, "warp"},
    {DType::kFloat32, 0, 4096, 1, "stream"},     {DType::kFloat32, 0, 64, 16, "warp"},
    {DType::kFloat32, 0, 320, 16, "stream"},     {DType::kFloat32, 0, 320, kAny, "columns"},
    {DType::kFloat32, 0, 4096, 32, "stream"},    {DType::kFloat32, 0, kAny, kAny, "columns"},

    {DType::kFloat64, 0, 8, 64, "thread"},       {DType::kFloat64, 0, 64, 1, "warp"},
    {DType::kFloat64, 0, 2048, 1, "stream"},     {DType::kFloat64, 0, 64, 8, "warp"},
    {DType::kFloat64, 0, 320, 8, "stream"},      {DType::kFloat64, 0, 320, kAny, "columns"},
    {DType::kFloat64, 0, 2048, 32, "stream"},    {DType::kFloat64, 0, kAny, kAny, "columns"},

    {DType::kComplex64, 0, 8, 64, "thread"},     {DType::kComplex64, 0, 64, 8, "warp"},
    {DType::kComplex64, 0, 160, 8, "stream"},    {DType::kComplex64, 0, 160, kAny, "columns"},
    {DType::kComplex64, 0, 2048, 16, "stream"},  {DType::kComplex64, 0, kAny, kAny, "columns"},

    {DType::kComplex128, 0, 8, 64, "thread"},    {DType::kComplex128, 0, 64, 8, "warp"},
    {DType::kComplex128, 0, 160, 8, "stream"},   {DType::kComplex128, 0, 160, kAny, "columns"},
    {DType::kComplex128, 0, 1024, 16, "stream"}, {DType::kComplex128, 0, kAny, kAny, "columns"},
};

constexpr std::string_view substitution_kernel(DType dtype, int64_t n, int64_t nrhs, int sweeps) {
  for (const SubstitutionTier& tier : kSubstitutionTiers) {
    const bool same_operation = tier.sweeps == 0 || tier.sweeps == sweeps;
    if (tier.dtype == dtype && same_operation && n <= tier.max_n && nrhs <= tier.max_nrhs) {
      return tier.kernel;
    }
  }
  return "columns";
}

}  // namespace jax_batched::cuda
