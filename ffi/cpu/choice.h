// Which kernel each part of a range of matrices goes to.
#pragma once

#include "ffi/cpu/kernels.h"
#include "ffi/cpu/simd.h"
#include "ffi/cpu/tiers.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

// The first matrix of the range that goes to "blocked"; those before it go to "lanes". With more
// right-hand sides than lanes these are better spread over the right-hand sides.
template <class T, class Problem>
int64_t lanes_end(const Problem& p, int64_t begin, int64_t end) {
  if (p.kernel == kLanesKernel) return end;
  if (p.kernel == kBlockedKernel || right_hand_sides(p) > kLanes<T>) return begin;
  const Tier* tiers = tiers_of(p).of(p.dtype);
  for (int i = 0; i < kMaxTiers; ++i) {
    if (p.n > tiers[i].max_n) continue;
    const int64_t rest = (end - begin) % kLanes<T>;
    return rest > tiers[i].alone ? end : end - rest;
  }
  return begin;
}

template <class T, class Problem>
void run(Kernel<Problem> lanes, Kernel<Problem> blocked, const Problem& p, int64_t begin,
         int64_t end, void* scratch) {
  const int64_t middle = lanes_end<T>(p, begin, end);
  if (begin < middle) lanes(p, begin, middle, scratch);
  if (middle < end) blocked(p, middle, end, scratch);
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
