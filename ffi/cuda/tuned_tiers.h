// Written by `python -m jax_batched.tune --write`; do not edit. tuning.h says what it means.
#pragma once

#include "ffi/cuda/tuning.h"

namespace jax_batched::cuda {

inline constexpr std::array<TunedTier, 0> kTunedTiers = {};

}  // namespace jax_batched::cuda
