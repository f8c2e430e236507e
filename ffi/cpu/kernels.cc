// The fast kernels, compiled once per instruction set with JAX_BATCHED_ISA naming it. All templates
// live in a namespace of that name, so that the linker cannot mix code of two instruction sets.
#include "ffi/cpu/cho_solve.h"
#include "ffi/cpu/cholesky.h"
#include "ffi/cpu/cholesky_pullback.h"
#include "ffi/cpu/residual.h"
#include "ffi/cpu/solve_pos.h"
#include "ffi/cpu/tiers.h"
#include "ffi/cpu/triangular_solve.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {
namespace {

// The first matrix of the range that goes to "blocked"; those before it go to "lanes". With more
// right-hand sides than lanes these are better spread over the right-hand sides.
template <class T, class Problem>
int64_t lanes_end(const Problem& p, int64_t begin, int64_t end) {
  if (p.kernel == kLanesKernel) return end;
  if (p.kernel == kBlockedKernel || right_hand_sides(p) > kLanes<T>) return begin;
  const Tier* tiers = tiers_of(p).of(p.dtype);
  for (int i = 0; i < kMaxTiers; ++i) {
    if (p.n > tiers[i].max_n) continue;
    const int64_t rest = (end - begin) % kLanes<T>;
    return 100 * rest > tiers[i].group_percent * kLanes<T> ? end : end - rest;
  }
  return begin;
}

template <class T, class Problem>
void run(Kernel<Problem> lanes, Kernel<Problem> blocked, const Problem& p, int64_t begin,
         int64_t end, void* scratch) {
  const int64_t middle = lanes_end<T>(p, begin, end);
  if (begin < middle) lanes(p, begin, middle, scratch);
  if (middle < end) blocked(p, middle, end, scratch);
}

}  // namespace

extern const Kernels table;
const Kernels table = {
    kVectorBytes,
    [](const CholeskyProblem& p, int64_t begin, int64_t end, void* scratch) {
      with_element_type(p.dtype, [&](auto t) {
        using T = decltype(t);
        run<T>(cholesky_lanes<T>, cholesky_blocked<T>, p, begin, end, scratch);
      });
    },
    [](const TriangularSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
      with_element_type(p.dtype, [&](auto t) {
        using T = decltype(t);
        run<T>(triangular_solve_lanes<T>, triangular_solve_blocked<T>, p, begin, end, scratch);
      });
    },
    [](const ChoSolveProblem& p, int64_t begin, int64_t end, void* scratch) {
      with_element_type(p.dtype, [&](auto t) {
        using T = decltype(t);
        run<T>(cho_solve_lanes<T>, cho_solve_blocked<T>, p, begin, end, scratch);
      });
    },
    [](const SolvePosProblem& p, int64_t begin, int64_t end, void* scratch) {
      with_element_type(p.dtype, [&](auto t) {
        using T = decltype(t);
        run<T>(solve_pos_lanes<T>, solve_pos_blocked<T>, p, begin, end, scratch);
      });
    },
    [](const ResidualProblem& p, int64_t begin, int64_t end, void* scratch) {
      with_element_type(p.dtype, [&](auto t) { residual<decltype(t)>(p, begin, end, scratch); });
    },
    [](const CholeskyPullbackProblem& p, int64_t begin, int64_t end, void* scratch) {
      with_element_type(p.dtype,
                        [&](auto t) { cholesky_pullback<decltype(t)>(p, begin, end, scratch); });
    },
};

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
