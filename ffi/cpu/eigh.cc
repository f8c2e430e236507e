#include "ffi/cpu/engine/eigh_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {
namespace {

template <class T>
void run_group(const EighProblem& p, EighGroup<T>& g, int32_t* places, int64_t m, int64_t end) {
  using R = Real<T>;
  using S = Simd<R>;
  const int64_t n = g.n;
  const auto part = p.symmetrize ? Part::kAll : p.upper ? Part::kUpper : Part::kLower;
  pack<T>(group_of<T>(p.a, n * n, m, end), part, GroupMatrix<T>{g.a, n});
  PowersOfTwo<R> scales;
  const auto finite = g.prepare(p.upper, p.symmetrize, &scales);
  S info = p.vectors ? g.template decompose<true>() : g.template decompose<false>();
  find_places(g.d, n, places);
  const S zero(R(0)), nan(kNaN<R>);
  const auto values = group_of<R>(p.w, n, m, end);
  for (int64_t i = 0; i < n; ++i) {
    const S value = select(finite, g.d[i] * scales.back + zero, nan);
    scatter(value, places + i * kLanes<T>, 1, values.lane, 0);
  }
  if (!p.vectors) {  // nobody reads it, but jax.debug_nans would
    std::fill(p.workspace.at<R>(m, n), p.workspace.at<R>(std::min<int64_t>(m + kLanes<T>, end), n),
              R(0));
  }
  if (p.vectors) {
    const auto vectors = group_of<T>(p.v, n * n, m, end);
    for (int64_t row = 0; row < g.q.rows(); ++row) {
      const int64_t offset = row / kParts<T> * n * kParts<T> + row % kParts<T>;
      for (int64_t i = 0; i < n; ++i) {
        const S x = select(finite, g.q.at[row * g.q.pitch() + i] + zero, nan);
        scatter(x, places + i * kLanes<T>, kParts<T>, vectors.lane, offset);
      }
    }
  }
  info = select(finite, info, S(static_cast<R>(n)));
  for (int lane = 0; lane < std::min<int64_t>(kLanes<T>, end - m); ++lane) {
    p.info[m + lane] = static_cast<int32_t>(info.v[lane]);
  }
}

}  // namespace

template <>
Kernel<EighProblem> kernel() {
  return kernel_of_groups<EighProblem, EighGroup>(
      [](const EighProblem& p, auto& group, int32_t* places, int64_t m, int64_t end) {
        run_group(p, group, places, m, end);
      });
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
