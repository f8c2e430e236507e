// Which kernel serves on the CPU, as data.
//
// "lanes" computes a group of matrices at once, one per lane of a vector register; "blocked" one
// matrix at a time. Both take the terms of every sum in the same order, so the bits of a result do
// not say which it was; only the time does. A group costs as much for one matrix as for a full
// register, so the few matrices that a whole number of groups leaves over can be faster one by one.
//
// The numbers stand beside the kernels, as measured on an AMD EPYC (Zen 4, 1 MiB of L2), with AVX2
// and AVX-512: the largest n with two cores and matrices from memory, where a group's prefetches
// count, `group_percent` with one core and matrices in the cache, as the few of a small batch are.
#pragma once

#include <algorithm>

#include "ffi/cpu/engine/kernels.h"
#include "ffi/cpu/engine/simd.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

// For n up to max_n: whole groups go to "lanes", and so does a rest that a group is faster for.
// Beyond the last row everything goes to "blocked".
struct Tier {
  int64_t max_n;
  int64_t group_percent;  // the time of a group over that of as many matrices one by one
};
inline constexpr int kMaxTiers = 6;

struct Tiers {
  Tier single[kMaxTiers];  // real and complex, by the size of a real number
  Tier wide[kMaxTiers];
  Tier complex_single[kMaxTiers];
  Tier complex_wide[kMaxTiers];

  constexpr const Tier* of(DType dtype) const {
    switch (dtype) {
      case DType::kFloat32:
        return single;
      case DType::kFloat64:
        return wide;
      case DType::kComplex64:
        return complex_single;
      default:
        return complex_wide;
    }
  }
};

// Whether "lanes" may serve a part of the batch: the largest n, and with more right-hand sides than
// any register has lanes they are spread over the lanes instead.
inline constexpr int64_t kMaxLanes = 16;

inline bool lanes_may_serve(const Tiers& tiers, DType dtype, int64_t n, int64_t nrhs) {
  int64_t max_n = 0;
  for (int i = 0; i < kMaxTiers; ++i) {
    if (tiers.of(dtype)[i].max_n > max_n) max_n = tiers.of(dtype)[i].max_n;
  }
  return n <= max_n && nrhs <= kMaxLanes;
}

template <class P>
int64_t right_hand_sides(const P& p) {
  if constexpr (requires { p.nrhs; }) {
    return p.nrhs;
  } else {
    return 0;
  }
}

// The n by which the tiers choose: the family's, where it is not the problem's.
template <class Family, class P>
int64_t tier_size(const P& p) {
  if constexpr (requires { Family::tier_size(p); }) {
    return Family::tier_size(p);
  } else {
    return p.n;
  }
}

// The first matrix of the range that goes to "blocked"; those before it go to "lanes". With more
// right-hand sides than lanes these are better spread over the right-hand sides.
template <class T, class Family, class P>
int64_t lanes_end(const P& p, int64_t begin, int64_t end) {
  if (p.kernel == kLanesKernel) return end;
  if (p.kernel == kBlockedKernel || right_hand_sides(p) > kLanes<T>) return begin;
  const Tier* tier = Family::kTiers.of(p.dtype);
  const int64_t n = tier_size<Family>(p);
  for (int i = 0; i < kMaxTiers; ++i) {
    if (n > tier[i].max_n) continue;
    const int64_t rest = (end - begin) % kLanes<T>;
    return 100 * rest > tier[i].group_percent * kLanes<T> ? end : end - rest;
  }
  return begin;
}

// The kernel of an operation that has both: Family::lanes<T>, Family::blocked<T> and, which serves
// where, Family::kTiers.
template <class P, class Family>
Kernel<P> tiered_kernel() {
  const auto run = [](const P& p, int64_t begin, int64_t end, void* scratch) {
    with_element_type(p.dtype, [&](auto t) {
      using T = decltype(t);
      const int64_t middle = lanes_end<T, Family>(p, begin, end);
      if (begin < middle) Family::template lanes<T>(p, begin, middle, scratch);
      if (middle < end) Family::template blocked<T>(p, middle, end, scratch);
    });
  };
  const auto scratch_bytes = [](const P& p) {
    const int64_t nrhs = right_hand_sides(p);
    const bool group = p.kernel == kLanesKernel ||
                       (p.kernel != kBlockedKernel &&
                        lanes_may_serve(Family::kTiers, p.dtype, tier_size<Family>(p), nrhs));
    return with_element_type(p.dtype, [&](auto t) -> size_t {
      using T = decltype(t);
      size_t blocked, groups;
      if constexpr (requires { Family::template blocked_bytes<T>(p); }) {
        blocked = Family::template blocked_bytes<T>(p);
        groups = Family::template group_bytes<T>(p);
      } else {
        blocked = blocked_scratch_bytes<T>(p.n, nrhs);
        groups = group_scratch_bytes<T>(p.n, nrhs);
      }
      return group ? std::max(groups, blocked) : blocked;
    });
  };
  const auto group = [](const P& p) {
    return with_element_type(p.dtype, [&](auto t) {
      constexpr int64_t kAll = kLanes<decltype(t)>;
      int64_t least = 1;
      while (least <= kAll && lanes_end<decltype(t), Family>(p, 0, least) == 0) ++least;
      return least <= kAll ? Group{kAll, least} : Group{1, 1};
    });
  };
  return {run, scratch_bytes, group};
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
