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
    {8, 1}, {8, 2}, {8, 3}, {8, 4}, {16, 3}, {16, 4}, {32, 3}, {32, 4}};
// The last of them, in complex arithmetic: 64 rows.
constexpr int warp_substitution_max_n(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 ? 128 : 64;
}

// Right-hand sides that "warp", "stream" and "block" take at a time, if there are more than one.
inline constexpr int kSubstitutionColumns = 4;

// Tiles of "stream" in shared memory: more of them leave room for fewer matrices in flight.
constexpr int stream_substitution_stages(DType dtype, int columns) {
  if (columns > 1) return dtype == DType::kFloat32 ? 4 : 3;
  return dtype == DType::kFloat32 ? 6 : 3;
}

inline constexpr int64_t kAny = INT64_MAX;

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
    {DType::kFloat32, 0, 8, 64, "thread"},
    {DType::kFloat32, 0, 16, 1, "thread"},
    {DType::kFloat32, 0, 96, 1, "warp"},
    {DType::kFloat32, 0, 4096, 1, "stream"},
    {DType::kFloat32, 0, 64, 16, "warp"},
    {DType::kFloat32, 0, 320, 16, "stream"},
    {DType::kFloat32, 0, 320, kAny, "columns"},
    {DType::kFloat32, 0, 4096, 32, "block"},
    {DType::kFloat32, 0, kAny, kAny, "columns"},

    {DType::kFloat64, 0, 8, 64, "thread"},
    {DType::kFloat64, 0, 64, 1, "warp"},
    {DType::kFloat64, 0, 2048, 1, "stream"},
    {DType::kFloat64, 0, 64, 8, "warp"},
    {DType::kFloat64, 0, 320, 8, "stream"},
    {DType::kFloat64, 0, 320, kAny, "columns"},
    {DType::kFloat64, 0, 2048, 32, "block"},
    {DType::kFloat64, 0, kAny, kAny, "columns"},

    {DType::kComplex64, 0, 8, 64, "thread"},
    {DType::kComplex64, 0, 64, 8, "warp"},
    {DType::kComplex64, 0, 160, 8, "stream"},
    {DType::kComplex64, 0, 160, kAny, "columns"},
    {DType::kComplex64, 0, 2048, 16, "block"},
    {DType::kComplex64, 0, kAny, kAny, "columns"},

    {DType::kComplex128, 0, 8, 64, "thread"},
    {DType::kComplex128, 0, 64, 8, "warp"},
    {DType::kComplex128, 0, 160, 8, "stream"},
    {DType::kComplex128, 0, 160, kAny, "columns"},
    {DType::kComplex128, 0, 1024, 16, "block"},
    {DType::kComplex128, 0, kAny, kAny, "columns"},
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
