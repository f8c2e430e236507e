#pragma once

#include "ffi/cpu/fixed_lanes.h"
#include "ffi/cpu/substitution_blocked.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class T>
void triangular_solve_groups(const TriangularSolveProblem& p, int64_t begin, int64_t end,
                             void* scratch) {
  const LowerSystem s = lower_system(p.n, p.nrhs, p.left_side, p.lower, p.transpose, p.conjugate);
  const GroupMatrix<T> a{static_cast<Lanes<T>*>(scratch), p.n};
  Lanes<T>* y = right_hand_sides_after(a);
  const int64_t size = p.n * p.nrhs;
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    pack(group_of<T>(p.a, p.a_map, p.n * p.n, m, end), p.lower ? Part::kLower : Part::kUpper, a);
    pack(group_of<T>(p.b, p.b_map, size, m, end), size * kParts<T>, numbers(y));
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
    a.load(static_cast<const Real<T>*>(p.a) + m * (n * n));
    y.load(static_cast<const Real<T>*>(p.b) + m * n);
    substitute_fixed<kSwapped, kReversed, n>(a, p.unit_diagonal, y);
    y.store(static_cast<Real<T>*>(p.x) + m * n);
  }
}

template <class T>
void triangular_solve_lanes(const TriangularSolveProblem& p, int64_t begin, int64_t end,
                            void* scratch) {
  const LowerSystem s = lower_system(p.n, p.nrhs, p.left_side, p.lower, p.transpose, p.conjugate);
  const int64_t whole = end - (end - begin) % kLanes<T>;
  const bool fixed = p.nrhs == 1 && p.a_map.contiguous() && p.b_map.contiguous() &&
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
void triangular_solve_blocked(const TriangularSolveProblem& p, int64_t begin, int64_t end,
                              void* scratch) {
  const LowerSystem s = lower_system(p.n, p.nrhs, p.left_side, p.lower, p.transpose, p.conjugate);
  const SplitRows<T> y = right_hand_sides_in<T>(scratch, p.n, p.nrhs);
  for (int64_t m = begin; m < end; ++m) {
    pack(s, p.n, p.nrhs, static_cast<const T*>(p.b) + p.b_map(m) * p.n * p.nrhs, y);
    substitute(in_memory(s, static_cast<const T*>(p.a) + p.a_map(m) * p.n * p.n), p.n, p.nrhs,
               p.unit_diagonal, y);
    unpack(s, p.n, p.nrhs, y, static_cast<T*>(p.x) + m * p.n * p.nrhs);
  }
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
