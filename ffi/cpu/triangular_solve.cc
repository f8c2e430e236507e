#include "ffi/cpu/engine/fixed_lanes.h"
#include "ffi/cpu/engine/substitution_blocked.h"
#include "ffi/cpu/engine/tiers.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {
namespace {

template <class T>
void triangular_solve_groups(const TriangularSolveProblem& p, int64_t begin, int64_t end,
                             void* scratch) {
  const LowerSystem& s = p.first;
  const GroupMatrix<T> a{static_cast<Lanes<T>*>(scratch), p.n};
  Lanes<T>* y = right_hand_sides_after(a);
  const int64_t size = p.n * p.nrhs;
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    pack(group_of<T>(p.a, int64_t{p.n} * p.n, m, end), p.lower ? Part::kLower : Part::kUpper, a);
    pack(group_of<T>(p.b, size, m, end), size * kParts<T>, numbers(y));
    substitute_group(s, a, y, p.nrhs, p.unit_diagonal);
    unpack(numbers(y), size * kParts<T>, group_of<T>(p.x, size, m, end));
  }
}

template <int n, bool kSwapped, bool kReversed, class T>
JAX_BATCHED_CALLED void triangular_solve_fixed(const TriangularSolveProblem& p, int64_t begin,
                                               int64_t end) {
  using Matrix = FixedEntries<T, n * n>;
  using Column = FixedEntries<T, n>;
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    Matrix a;
    Column y;
    a.load(p.a.as<const Real<T>>() + m * (n * n));
    y.load(p.b.as<const Real<T>>() + m * n);
    substitute_fixed<kSwapped, kReversed, n>(a, p.unit_diagonal, y);
    y.store(p.x.as<Real<T>>() + m * n);
  }
}

struct TriangularSolveKernels {
  static constexpr Tiers kTiers = {
      {{63, 50}, {127, 70}, {200, 90}},
      {{31, 60}, {63, 75}, {127, 100}},
      {{63, 42}, {127, 65}, {220, 80}},
      {{23, 60}, {63, 80}, {127, 100}},
  };
  template <class T>
  static void lanes(const TriangularSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
    const LowerSystem& s = p.first;
    const int64_t whole = end - (end - begin) % kLanes<T>;
    const bool fixed = p.nrhs == 1 && p.a.contiguous() && p.b.contiguous() &&
                       with_fixed_size<T>(p.n, [&](auto n) JAX_BATCHED_INLINED {
                         with_flag(std::abs(s.a_row) == 1, [&](auto swapped) JAX_BATCHED_INLINED {
                           with_flag(s.a_row < 0, [&](auto reversed) JAX_BATCHED_INLINED {
                             triangular_solve_fixed<n, swapped, reversed, T>(p, begin, whole);
                           });
                         });
                       });
    triangular_solve_groups<T>(p, fixed ? whole : begin, end, scratch);
  }

  template <class T>
  static void blocked(const TriangularSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
    const LowerSystem& s = p.first;
    const SplitRows<T> y = right_hand_sides_in<T>(scratch, p.n, p.nrhs);
    for (int64_t m = begin; m < end; ++m) {
      pack(s, p.n, p.nrhs, p.b.at<const T>(m, p.n, p.nrhs), y);
      substitute(in_memory(s, p.a.at<const T>(m, p.n, p.n)), p.n, p.nrhs, p.unit_diagonal, y);
      unpack(s, p.n, p.nrhs, y, p.x.at<T>(m, p.n, p.nrhs));
    }
  }
};

}  // namespace

template <>
Kernel<TriangularSolveProblem> kernel() {
  return tiered_kernel<TriangularSolveProblem, TriangularSolveKernels>();
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
