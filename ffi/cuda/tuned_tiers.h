// Written by `python -m jax_batched.tune --write`; do not edit. tuning.h says what it means.
#pragma once

#include "ffi/cuda/tuning.h"

namespace jax_batched::cuda {

inline constexpr std::array<TunedTier, 15> kTunedTiers = {{
    // sm_90 cholesky complex128: NVIDIA H200, 2026-11-28, 512 (n >= 192: 4096) MiB
    {90, "cholesky", false, DType::kComplex128, kAny, 1, 9, "thread"},
    {90, "cholesky", false, DType::kComplex128, kAny, 10, 24, "warp"},
    {90, "cholesky", false, DType::kComplex128, kAny, 33, 48, "warp"},
    // sm_90 cholesky complex64: NVIDIA H200, 2026-11-28, 512 (n >= 192: 4096) MiB
    {90, "cholesky", false, DType::kComplex64, kAny, 1, 13, "thread"},
    {90, "cholesky", false, DType::kComplex64, kAny, 14, 56, "warp"},
    {90, "cholesky", false, DType::kComplex64, kAny, 64, 64, "warp"},
    // sm_90 cholesky float32: NVIDIA H200, 2026-11-28, 512 (n >= 192: 4096) MiB
    {90, "cholesky", false, DType::kFloat32, kAny, 1, 16, "thread"},
    {90, "cholesky", false, DType::kFloat32, kAny, 17, 104, "warp"},
    {90, "cholesky", false, DType::kFloat32, kAny, 105, 128, "halves"},
    // sm_90 cholesky float64: NVIDIA H200, 2026-11-28, 512 (n >= 192: 4096) MiB
    {90, "cholesky", false, DType::kFloat64, kAny, 1, 13, "thread"},
    {90, "cholesky", false, DType::kFloat64, kAny, 14, 64, "warp"},
    {90, "cholesky", false, DType::kFloat64, kAny, 65, 160, "left"},
    // sm_90 cholesky float32 accuracy="fast": NVIDIA H200, 2026-11-28, 512 (n >= 192: 4096) MiB
    {90, "cholesky", true, DType::kFloat32, kAny, 136, 512, "block.tensor"},
    // sm_90 solve_pos float32: NVIDIA H200, 2026-11-28, 512 (n >= 192: 4096) MiB
    {90, "solve_pos", false, DType::kFloat32, kAny, 9, 15, "thread"},
    // sm_90 solve_pos float64: NVIDIA H200, 2026-11-29, 512 (n >= 185: 4096) MiB
    {90, "solve_pos", false, DType::kFloat64, kAny, 9, 12, "thread"},
}};

}  // namespace jax_batched::cuda
