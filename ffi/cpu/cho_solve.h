#pragma once

#include "ffi/cpu/fixed_lanes.h"
#include "ffi/cpu/substitution_blocked.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class T>
void cho_solve_groups(const ChoSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
  const GroupMatrix<T> c{static_cast<Lanes<T>*>(scratch), p.n};
  Lanes<T>* y = right_hand_sides_after(c);
  const int64_t size = p.n * p.nrhs;
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    pack(group_of<T>(p.c, p.c_map, p.n * p.n, m, end), p.lower ? Part::kLower : Part::kUpper, c);
    pack(group_of<T>(p.b, p.b_map, size, m, end), size * kParts<T>, numbers(y));
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
    c.load(static_cast<const Real<T>*>(p.c) + m * (n * n));
    y.load(static_cast<const Real<T>*>(p.b) + m * n);
    solve_fixed_with_factor<kLower, n>(c, y);
    y.store(static_cast<Real<T>*>(p.x) + m * n);
  }
}

template <class T>
void cho_solve_lanes(const ChoSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
  const int64_t whole = end - (end - begin) % kLanes<T>;
  const bool fixed = p.nrhs == 1 && p.c_map.contiguous() && p.b_map.contiguous() &&
                     with_fixed_size<T>(p.n, [&](auto n) JAX_BATCHED_INLINED {
                       with_flag(p.lower, [&](auto lower) JAX_BATCHED_INLINED {
                         cho_solve_fixed<n, lower, T>(p, begin, whole);
                       });
                     });
  cho_solve_groups<T>(p, fixed ? whole : begin, end, scratch);
}

template <class T>
void cho_solve_blocked(const ChoSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
  const LowerSystem first = lower_system(p.n, p.nrhs, true, p.lower, !p.lower, !p.lower);
  const LowerSystem second = lower_system(p.n, p.nrhs, true, p.lower, p.lower, p.lower);
  const SplitRows<T> y = right_hand_sides_in<T>(scratch, p.n, p.nrhs);
  for (int64_t m = begin; m < end; ++m) {
    const T* c = static_cast<const T*>(p.c) + p.c_map(m) * p.n * p.n;
    pack(first, p.n, p.nrhs, static_cast<const T*>(p.b) + p.b_map(m) * p.n * p.nrhs, y);
    substitute(in_memory(first, c), p.n, p.nrhs, false, y);
    reverse(p.n, p.nrhs, y);
    substitute(in_memory(second, c), p.n, p.nrhs, false, y);
    unpack(second, p.n, p.nrhs, y, static_cast<T*>(p.x) + m * p.n * p.nrhs);
  }
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
