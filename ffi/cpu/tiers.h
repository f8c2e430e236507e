// Which kernel serves on the CPU, as data.
//
// "lanes" computes a group of matrices at once, one per lane of a vector register; "blocked" one
// matrix at a time. Both take the terms of every sum in the same order, so the bits of a result do
// not say which it was; only the time does. A group costs as much for one matrix as for a full
// register, so the few matrices that a whole number of groups leaves over can be faster one by one.
#pragma once

#include "ffi/common/problem.h"

namespace jax_batched::cpu {

// For n up to max_n: whole groups go to "lanes", and so does a rest of more than `alone` matrices.
// Beyond the last row everything goes to "blocked".
struct Tier {
  int64_t max_n;
  int64_t alone;
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

// Measured on an AMD EPYC with AVX2 (32-byte registers, 512 KiB of L2), one core, matrices from
// memory: `alone` is the time of a group over that of one matrix, rounded down.
inline constexpr Tiers kCholeskyTiers = {
    {{7, 0}, {31, 1}, {63, 2}, {127, 3}, {256, 4}},
    {{15, 0}, {63, 1}, {256, 2}},
    {{11, 0}, {31, 1}, {63, 2}, {127, 4}, {180, 5}},
    {{11, 0}, {31, 1}, {180, 2}},
};
inline constexpr Tiers kSolvePosTiers = {
    {{7, 0}, {47, 1}, {95, 2}, {256, 4}},
    {{15, 0}, {63, 1}, {256, 2}},
    {{11, 0}, {31, 1}, {63, 2}, {127, 3}, {180, 4}},
    {{11, 0}, {63, 1}, {180, 2}},
};
inline constexpr Tiers kChoSolveTiers = {
    {{31, 1}, {95, 2}, {180, 4}},
    {{63, 1}, {127, 2}},
    {{31, 1}, {180, 2}},
    {{63, 1}, {127, 2}},
};
inline constexpr Tiers kTriangularSolveTiers = {
    {{63, 2}, {127, 4}},
    {{31, 1}, {63, 2}, {127, 3}},
    {{127, 2}},
    {{23, 1}, {127, 2}},
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
