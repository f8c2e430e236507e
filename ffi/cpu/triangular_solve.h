#pragma once

#include "ffi/cpu/substitution_blocked.h"
#include "ffi/cpu/substitution_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class T>
void triangular_solve_lanes(const TriangularSolveProblem& p, int64_t begin, int64_t end,
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
