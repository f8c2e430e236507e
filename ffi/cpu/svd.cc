#include "ffi/cpu/engine/svd_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {
namespace {

template <class T>
void run_group(const SvdProblem& p, SvdGroup<T>& g, int32_t* places, int64_t m, int64_t end) {
  using R = Real<T>;
  using S = Simd<R>;
  const int64_t n = g.n;
  pack<T>(group_of<T>(p.a, n * n, m, end), Part::kAll, GroupMatrix<T>{g.a, n});
  PowersOfTwo<R> scales;
  const auto finite = g.prepare(&scales);
  S info = p.vectors ? g.template decompose<true>() : g.template decompose<false>();
  const S zero(R(0)), nan(kNaN<R>);
  for (int64_t i = 0; i < n; ++i) {              // descending; a sign goes to V
    g.e[i] = copy_sign(S(R(1)), g.d[i] + zero);  // one more sweep may turn -0 into 0
    g.d[i] = -absolute(g.d[i]);
  }
  find_places(g.d, n, places);
  const auto values = group_of<R>(p.s, n, m, end);
  for (int64_t i = 0; i < n; ++i) {
    const S value = select(finite, zero - g.d[i] * scales.back, nan);
    scatter(value, places + i * kLanes<T>, 1, values.lane, 0);
  }
  if (p.vectors) {
    const auto left = group_of<T>(p.u, n * n, m, end), right = group_of<T>(p.vh, n * n, m, end);
    for (int64_t row = 0; row < g.rows_u.rows(); ++row) {
      const int64_t j = row / kParts<T>, part = row % kParts<T>;
      for (int64_t i = 0; i < n; ++i) {
        const int32_t* place = places + i * kLanes<T>;
        const S x = g.rows_u.at[row * g.rows_u.pitch() + i];
        const S y = g.rows_v.at[row * g.rows_v.pitch() + i] * (part == 0 ? g.e[i] : -g.e[i]);
        scatter(select(finite, x + zero, nan), place, kParts<T>, left.lane,
                j * n * kParts<T> + part);
        scatter(select(finite, y + zero, nan), place, n * kParts<T>, right.lane,
                j * kParts<T> + part);
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
Kernel<SvdProblem> kernel() {
  return kernel_of_groups<SvdProblem, SvdGroup>(
      [](const SvdProblem& p, auto& group, int32_t* places, int64_t m, int64_t end) {
        run_group(p, group, places, m, end);
      });
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
