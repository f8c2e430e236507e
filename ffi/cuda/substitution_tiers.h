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
inline constexpr int kThreadSubstitutionMaxN = 8;

// "warp" is compiled for n up to this: its packed triangle takes at most 74 KB.
template <class T>
inline constexpr int kWarpSubstitutionMaxN = 128;
template <>
inline constexpr int kWarpSubstitutionMaxN<float> = 192;
template <>
inline constexpr int kWarpSubstitutionMaxN<Complex<double>> = 96;

// Right-hand sides that "warp" and "block" take at a time, if there are more than one.
inline constexpr int kSubstitutionColumns = 4;

// The first row with the problem's dtype, n <= max_n and nrhs <= max_nrhs serves.
struct SubstitutionTier {
  DType dtype;
  int64_t max_n;
  int64_t max_nrhs;
  std::string_view kernel;
};

inline constexpr int64_t kAny = INT64_MAX;

inline constexpr SubstitutionTier kSubstitutionTiers[] = {
    {DType::kFloat32, 8, 64, "thread"},     {DType::kFloat32, 192, 8, "warp"},
    {DType::kFloat32, 4096, 4, "block"},    {DType::kFloat32, kAny, kAny, "columns"},

    {DType::kFloat64, 8, 64, "thread"},     {DType::kFloat64, 128, 8, "warp"},
    {DType::kFloat64, 2048, 4, "block"},    {DType::kFloat64, kAny, kAny, "columns"},

    {DType::kComplex64, 8, 64, "thread"},   {DType::kComplex64, 128, 8, "warp"},
    {DType::kComplex64, 2048, 4, "block"},  {DType::kComplex64, kAny, kAny, "columns"},

    {DType::kComplex128, 8, 64, "thread"},  {DType::kComplex128, 96, 8, "warp"},
    {DType::kComplex128, 1024, 4, "block"}, {DType::kComplex128, kAny, kAny, "columns"},
};

// sweeps: 1 for a triangular solve, 2 for a solve with a Cholesky factor.
constexpr std::string_view substitution_kernel(DType dtype, int64_t n, int64_t nrhs,
                                               int /*sweeps*/) {
  for (const SubstitutionTier& tier : kSubstitutionTiers) {
    if (tier.dtype == dtype && n <= tier.max_n && nrhs <= tier.max_nrhs) return tier.kernel;
  }
  return "columns";
}

}  // namespace jax_batched::cuda
