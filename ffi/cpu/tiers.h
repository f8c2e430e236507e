// Which kernel serves on the CPU, as data.
//
// "lanes" computes a group of matrices at once, one per lane of a vector register; "blocked" one
// matrix at a time. Both take the terms of every sum in the same order, so the bits of a result do
// not say which it was; only the time does. A group costs as much for one matrix as for a full
// register, so the few matrices that a whole number of groups leaves over can be faster one by one.
#pragma once

#include "ffi/common/problem.h"

namespace jax_batched::cpu {

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

// Measured on an AMD EPYC (Zen 4, 1 MiB of L2), with AVX2 and AVX-512: the largest n with two cores
// and matrices from memory, where a group's prefetches count, `group_percent` with one core and
// matrices in the cache, as the few of a small batch are.
inline constexpr Tiers kCholeskyTiers = {
    {{7, 10}, {31, 30}, {63, 50}, {127, 75}, {320, 90}},
    {{7, 20}, {31, 40}, {63, 65}, {127, 85}, {320, 95}},
    {{11, 15}, {31, 35}, {63, 50}, {127, 68}, {256, 85}},
    {{11, 25}, {31, 50}, {63, 70}, {127, 80}, {256, 90}},
};
inline constexpr Tiers kSolvePosTiers = {
    {{7, 10}, {31, 20}, {63, 30}, {127, 50}, {320, 75}},
    {{15, 25}, {31, 30}, {63, 45}, {127, 65}, {300, 85}},
    {{11, 15}, {31, 25}, {63, 40}, {127, 60}, {256, 75}},
    {{11, 25}, {31, 40}, {63, 60}, {127, 72}, {256, 88}},
};
inline constexpr Tiers kChoSolveTiers = {
    {{31, 25}, {63, 35}, {127, 55}, {256, 75}},
    {{31, 40}, {63, 50}, {127, 80}, {180, 100}},
    {{31, 25}, {63, 35}, {256, 60}},
    {{31, 45}, {63, 65}, {150, 90}},
};
inline constexpr Tiers kTriangularSolveTiers = {
    {{63, 50}, {127, 70}, {200, 90}},
    {{31, 60}, {63, 75}, {127, 100}},
    {{63, 42}, {127, 65}, {220, 80}},
    {{23, 60}, {63, 80}, {127, 100}},
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

inline const Tiers& tiers_of(const CholeskyProblem&) { return kCholeskyTiers; }
inline const Tiers& tiers_of(const TriangularSolveProblem&) { return kTriangularSolveTiers; }
inline const Tiers& tiers_of(const ChoSolveProblem&) { return kChoSolveTiers; }
inline const Tiers& tiers_of(const SolvePosProblem&) { return kSolvePosTiers; }

inline int64_t right_hand_sides(const CholeskyProblem&) { return 0; }
template <class Problem>
int64_t right_hand_sides(const Problem& p) {
  return p.nrhs;
}

}  // namespace jax_batched::cpu
