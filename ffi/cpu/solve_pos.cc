#include "ffi/cpu/engine/fixed_lanes.h"
#include "ffi/cpu/engine/substitution_blocked.h"
#include "ffi/cpu/engine/tiers.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {
namespace {

template <class T>
void solve_pos_groups(const SolvePosProblem& p, int64_t begin, int64_t end, void* scratch) {
  const GroupMatrix<T> a{static_cast<Lanes<T>*>(scratch), p.n};
  Lanes<T>* y = right_hand_sides_after(a);
  const int64_t size = p.n * p.nrhs;
  const int64_t tiles = factor_tiles<T>(p.n);
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    pack(group_of<T>(p.a, int64_t{p.n} * p.n, m, end), p.upper ? Part::kUpper : Part::kLower, a);
    pack(group_of<T>(p.b, size, m, end), size * kParts<T>, numbers(y));
    BackgroundFetch background;
    if (p.a.contiguous()) {
      background =
          BackgroundFetch::beside_group<T>(p.a.data, nullptr, int64_t{p.n} * p.n, m, end, tiles);
    }
    const Simd<Real<T>> info = factor_group<T>(triangle_of(a, p.upper), p.n, background);
    solve_group_with_factor(a, !p.upper, y, p.nrhs);
    if (store_info(info, p.info, m, end)) {
      for (int64_t e = 0; e < size; ++e) spoil_failed(info, &y[e]);
    }
    unpack(numbers(y), size * kParts<T>, group_of<T>(p.x, size, m, end));
  }
}

template <int n, bool kLower, class T>
JAX_BATCHED_CALLED void solve_pos_fixed(const SolvePosProblem& p, int64_t begin, int64_t end,
                                        void* scratch) {
  using Matrix = FixedEntries<T, n * n>;
  using Column = FixedEntries<T, n>;
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    Matrix a;
    Column y;
    a.load(p.a.as<const Real<T>>() + m * (n * n));
    y.load(p.b.as<const Real<T>>() + m * n);
    const Simd<Real<T>> info = factor_fixed<!kLower, n>(a);
    solve_fixed_with_factor<kLower, n>(a, y);
    if (store_info(info, p.info, m, end)) {
      solve_pos_groups<T>(p, m, m + kLanes<T>, scratch);
    } else {
      y.store(p.x.as<Real<T>>() + m * n);
    }
  }
}

struct SolvePosKernels {
  static constexpr Tiers kTiers = {
      {{7, 10}, {31, 20}, {63, 30}, {127, 50}, {320, 75}},
      {{15, 25}, {31, 30}, {63, 45}, {127, 65}, {300, 85}},
      {{11, 15}, {31, 25}, {63, 40}, {127, 60}, {256, 75}},
      {{11, 25}, {31, 40}, {63, 60}, {127, 72}, {256, 88}},
  };
  template <class T>
  static void lanes(const SolvePosProblem& p, int64_t begin, int64_t end, void* scratch) {
    const int64_t whole = end - (end - begin) % kLanes<T>;
    const bool fixed = p.nrhs == 1 && p.a.contiguous() && p.b.contiguous() &&
                       with_fixed_size<T>(p.n, [&](auto n) JAX_BATCHED_INLINED {
                         with_flag(!p.upper, [&](auto lower) JAX_BATCHED_INLINED {
                           solve_pos_fixed<n, lower, T>(p, begin, whole, scratch);
                         });
                       });
    solve_pos_groups<T>(p, fixed ? whole : begin, end, scratch);
  }

  // The factor stays in scratch.
  template <class T>
  static void blocked(const SolvePosProblem& p, int64_t begin, int64_t end, void* scratch) {
    const SplitRows<T> u = upper_factor_in<T>(scratch, p.n);
    const SplitRows<T> y = right_hand_sides_in<T>(u.row(round_up(p.n, kTileRows)), p.n, p.nrhs);
    const LowerSystem first = lower_system(p.n, p.nrhs, true, true, false, false);
    const LowerSystem second = lower_system(p.n, p.nrhs, true, true, true, true);
    for (int64_t m = begin; m < end; ++m) {
      T* x = p.x.at<T>(m, p.n, p.nrhs);
      load_upper(p.a.at<const T>(m, p.n, p.n), p.n, p.upper, false, u);
      p.info[m] = factor_upper(u, p.n);
      if (p.info[m] != 0) {
        std::fill(x, x + p.n * p.nrhs, quiet_nan<T>());
        continue;
      }
      pack(first, p.n, p.nrhs, p.b.at<const T>(m, p.n, p.nrhs), y);
      substitute(in_scratch(u, p.n, true), p.n, p.nrhs, false, y);
      reverse(p.n, p.nrhs, y);
      substitute(in_scratch(u, p.n, false), p.n, p.nrhs, false, y);
      unpack(second, p.n, p.nrhs, y, x);
    }
  }
};

}  // namespace

template <>
Kernel<SolvePosProblem> kernel() {
  return tiered_kernel<SolvePosProblem, SolvePosKernels>();
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
