#include "ffi/cpu/engine/fixed_lanes.h"
#include "ffi/cpu/engine/substitution_blocked.h"
#include "ffi/cpu/engine/tiers.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {
namespace {

template <class T>
void cho_solve_groups(const ChoSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
  const GroupMatrix<T> c{static_cast<Lanes<T>*>(scratch), p.n};
  Lanes<T>* y = right_hand_sides_after(c);
  const int64_t size = p.n * p.nrhs;
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    pack(group_of<T>(p.a, int64_t{p.n} * p.n, m, end), p.lower ? Part::kLower : Part::kUpper, c);
    pack(group_of<T>(p.b, size, m, end), size * kParts<T>, numbers(y));
    solve_group_with_factor(c, p.lower, y, p.nrhs);
    unpack(numbers(y), size * kParts<T>, group_of<T>(p.x, size, m, end));
  }
}

template <int n, bool kLower, class T>
JAX_BATCHED_CALLED void cho_solve_fixed(const ChoSolveProblem& p, int64_t begin, int64_t end) {
  using Matrix = FixedEntries<T, n * n>;
  using Column = FixedEntries<T, n>;
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    Matrix c;
    Column y;
    c.load(p.a.as<const Real<T>>() + m * (n * n));
    y.load(p.b.as<const Real<T>>() + m * n);
    solve_fixed_with_factor<kLower, n>(c, y);
    y.store(p.x.as<Real<T>>() + m * n);
  }
}

struct ChoSolveKernels {
  static constexpr Tiers kTiers = {
      {{31, 25}, {63, 35}, {127, 55}, {256, 75}},
      {{31, 40}, {63, 50}, {127, 80}, {180, 100}},
      {{31, 25}, {63, 35}, {256, 60}},
      {{31, 45}, {63, 65}, {150, 90}},
  };
  template <class T>
  static void lanes(const ChoSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
    const int64_t whole = end - (end - begin) % kLanes<T>;
    const bool fixed = p.nrhs == 1 && p.a.contiguous() && p.b.contiguous() &&
                       with_fixed_size<T>(p.n, [&](auto n) JAX_BATCHED_INLINED {
                         with_flag(p.lower, [&](auto lower) JAX_BATCHED_INLINED {
                           cho_solve_fixed<n, lower, T>(p, begin, whole);
                         });
                       });
    cho_solve_groups<T>(p, fixed ? whole : begin, end, scratch);
  }

  template <class T>
  static void blocked(const ChoSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
    const SplitRows<T> y = right_hand_sides_in<T>(scratch, p.n, p.nrhs);
    for (int64_t m = begin; m < end; ++m) {
      const T* c = p.a.at<const T>(m, p.n, p.n);
      pack(p.first, p.n, p.nrhs, p.b.at<const T>(m, p.n, p.nrhs), y);
      substitute(in_memory(p.first, c), p.n, p.nrhs, false, y);
      reverse(p.n, p.nrhs, y);
      substitute(in_memory(p.second, c), p.n, p.nrhs, false, y);
      unpack(p.second, p.n, p.nrhs, y, p.x.at<T>(m, p.n, p.nrhs));
    }
  }
};

}  // namespace

template <>
Kernel<ChoSolveProblem> kernel() {
  return tiered_kernel<ChoSolveProblem, ChoSolveKernels>();
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
