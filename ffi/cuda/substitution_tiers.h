// Which kernel serves a triangular solve or a solve with a Cholesky factor: data.
//
// The kernels (tile/substitution.cuh) give the same bits, so these numbers are about speed alone.
#pragma once

#include <cstdint>
#include <string_view>

#include "ffi/common/problem.h"
#include "ffi/cuda/tuned_tiers.h"

namespace jax_batched::cuda {

// The largest n of any kernel: offsets within a matrix are 32-bit.
inline constexpr int64_t kSubstitutionMaxN = 32768;

// "thread" is compiled for each n up to this.
inline constexpr int kThreadSubstitutionMaxN = 8;

// "warp" is compiled for n up to this, a multiple of 32.
template <class T>
inline constexpr int kWarpSubstitutionMaxN = 64;
template <>
inline constexpr int kWarpSubstitutionMaxN<float> = 128;
template <>
inline constexpr int kWarpSubstitutionMaxN<double> = 96;

// The largest n that a kernel serves.
inline int64_t substitution_max_n(DType dtype, std::string_view kernel) {
  if (kernel == "thread") return kThreadSubstitutionMaxN;
  if (kernel != "warp") return kSubstitutionMaxN;
  return with_element_type(dtype, [](auto t) { return kWarpSubstitutionMaxN<decltype(t)>; });
}

inline constexpr std::string_view kSubstitutionKernels[] = {"thread", "warp", "block", "columns"};

// Right-hand sides that "warp" and "block" take at a time, if there are more than one.
inline constexpr int kSubstitutionColumns = 4;

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

// Where nothing was measured (tuned_tiers.h), the first row with the problem's dtype and sweeps,
// n <= max_n and nrhs <= max_nrhs serves.
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
    {DType::kFloat32, 1, 80, 1, "warp"},
    {DType::kFloat32, 2, 112, 1, "warp"},
    {DType::kFloat32, 0, 4096, 1, "block"},
    {DType::kFloat32, 1, 96, 16, "warp"},
    {DType::kFloat32, 2, 128, 16, "warp"},
    {DType::kFloat32, 0, 320, 16, "block"},
    {DType::kFloat32, 0, 320, kAny, "columns"},
    {DType::kFloat32, 0, 4096, 32, "block"},
    {DType::kFloat32, 0, kAny, kAny, "columns"},

    {DType::kFloat64, 0, 8, 64, "thread"},
    {DType::kFloat64, 1, 40, 1, "warp"},
    {DType::kFloat64, 2, 80, 1, "warp"},
    {DType::kFloat64, 0, 2048, 1, "block"},
    {DType::kFloat64, 1, 64, 8, "warp"},
    {DType::kFloat64, 2, 96, 16, "warp"},
    {DType::kFloat64, 0, 320, 8, "block"},
    {DType::kFloat64, 0, 320, kAny, "columns"},
    {DType::kFloat64, 0, 2048, 32, "block"},
    {DType::kFloat64, 0, kAny, kAny, "columns"},

    {DType::kComplex64, 0, 8, 64, "thread"},
    {DType::kComplex64, 0, 64, 8, "warp"},
    {DType::kComplex64, 0, 160, 8, "block"},
    {DType::kComplex64, 0, 160, kAny, "columns"},
    {DType::kComplex64, 0, 2048, 16, "block"},
    {DType::kComplex64, 0, kAny, kAny, "columns"},

    {DType::kComplex128, 0, 8, 64, "thread"},
    {DType::kComplex128, 1, 40, 1, "warp"},
    {DType::kComplex128, 2, 64, 1, "warp"},
    {DType::kComplex128, 0, 1024, 1, "block"},
    {DType::kComplex128, 0, 64, 8, "warp"},
    {DType::kComplex128, 0, 160, 8, "block"},
    {DType::kComplex128, 0, 160, kAny, "columns"},
    {DType::kComplex128, 0, 1024, 16, "block"},
    {DType::kComplex128, 0, kAny, kAny, "columns"},
};

constexpr std::string_view substitution_operation(int sweeps) {
  return sweeps == 1 ? "triangular_solve" : "cho_solve";
}

inline std::string_view substitution_kernel(DType dtype, int64_t n, int64_t nrhs, int sweeps,
                                            int capability) {
  const Call call{substitution_operation(sweeps), dtype, n, nrhs, /*fast=*/false, capability};
  const std::string_view tuned = tuned_kernel(kTunedTiers, call);
  if (!tuned.empty() && n <= substitution_max_n(dtype, tuned)) return tuned;
  for (const SubstitutionTier& tier : kSubstitutionTiers) {
    const bool same_operation = tier.sweeps == 0 || tier.sweeps == sweeps;
    if (tier.dtype == dtype && same_operation && n <= tier.max_n && nrhs <= tier.max_nrhs) {
      return tier.kernel;
    }
  }
  return "columns";
}

}  // namespace jax_batched::cuda
