#pragma once

#include "ffi/cpu/fixed_lanes.h"
#include "ffi/cpu/substitution_blocked.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class T>
void solve_pos_groups(const SolvePosProblem& p, int64_t begin, int64_t end, void* scratch) {
  const GroupMatrix<T> a{static_cast<Lanes<T>*>(scratch), p.n};
  Lanes<T>* y = right_hand_sides_after(a);
  const int64_t size = p.n * p.nrhs;
  const int64_t tiles = factor_tiles<T>(p.n);
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    pack(group_of<T>(p.a, p.a_map, p.n * p.n, m, end), p.lower ? Part::kLower : Part::kUpper, a);
    pack(group_of<T>(p.b, p.b_map, size, m, end), size * kParts<T>, numbers(y));
    BackgroundFetch background;
    if (p.a_map.contiguous()) {
      background = BackgroundFetch::beside_group<T>(p.a, nullptr, p.n * p.n, m, end, tiles);
    }
    const Simd<Real<T>> info = factor_group<T>(triangle_of(a, !p.lower), p.n, background);
    solve_group_with_factor(a, p.lower, y, p.nrhs);
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
    a.load(static_cast<const Real<T>*>(p.a) + m * (n * n));
    y.load(static_cast<const Real<T>*>(p.b) + m * n);
    const Simd<Real<T>> info = factor_fixed<!kLower, n>(a);
    solve_fixed_with_factor<kLower, n>(a, y);
    y.store(static_cast<Real<T>*>(p.x) + m * n);
    if (store_info(info, p.info, m, end)) solve_pos_groups<T>(p, m, m + kLanes<T>, scratch);
  }
}

template <class T>
void solve_pos_lanes(const SolvePosProblem& p, int64_t begin, int64_t end, void* scratch) {
  const int64_t whole = end - (end - begin) % kLanes<T>;
  const bool fixed = p.nrhs == 1 && p.a_map.contiguous() && p.b_map.contiguous() &&
                     with_fixed_size<T>(p.n, [&](auto n) JAX_BATCHED_INLINED {
                       with_flag(p.lower, [&](auto lower) JAX_BATCHED_INLINED {
                         solve_pos_fixed<n, lower, T>(p, begin, whole, scratch);
                       });
                     });
  solve_pos_groups<T>(p, fixed ? whole : begin, end, scratch);
}

// The factor stays in scratch.
template <class T>
void solve_pos_blocked(const SolvePosProblem& p, int64_t begin, int64_t end, void* scratch) {
  const SplitRows<T> u = upper_factor_in<T>(scratch, p.n);
  const SplitRows<T> y = right_hand_sides_in<T>(u.row(round_up(p.n, kTileRows)), p.n, p.nrhs);
  const LowerSystem first = lower_system(p.n, p.nrhs, true, true, false, false);
  const LowerSystem second = lower_system(p.n, p.nrhs, true, true, true, true);
  for (int64_t m = begin; m < end; ++m) {
    T* x = static_cast<T*>(p.x) + m * p.n * p.nrhs;
    load_upper(static_cast<const T*>(p.a) + p.a_map(m) * p.n * p.n, p.n, !p.lower, false, u);
    p.info[m] = factor_upper(u, p.n);
    if (p.info[m] != 0) {
      std::fill(x, x + p.n * p.nrhs, quiet_nan<T>());
      continue;
    }
    pack(first, p.n, p.nrhs, static_cast<const T*>(p.b) + p.b_map(m) * p.n * p.nrhs, y);
    substitute(in_scratch(u, p.n, true), p.n, p.nrhs, false, y);
    reverse(p.n, p.nrhs, y);
    substitute(in_scratch(u, p.n, false), p.n, p.nrhs, false, y);
    unpack(second, p.n, p.nrhs, y, x);
  }
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
