#pragma once

#include "ffi/cpu/factor_blocked.h"
#include "ffi/cpu/fixed_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class T>
void cholesky_groups(const CholeskyProblem& p, int64_t begin, int64_t end, void* scratch) {
  const GroupMatrix<T> a{static_cast<Lanes<T>*>(scratch), p.n};
  const StridedGroup<Lanes<T>> l = triangle_of(a, p.upper);
  const Part part = p.upper ? Part::kUpper : Part::kLower;
  const int64_t tiles = factor_tiles<T>(p.n);
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    pack(group_of<T>(p.a, BatchMap{}, p.n * p.n, m, end), p.symmetrize ? Part::kAll : part, a);
    if (p.symmetrize) symmetrize(a, p.upper);
    const Simd<Real<T>> info = factor_group<T>(
        l, p.n, BackgroundFetch::beside_group<T>(p.a, p.l, p.n * p.n, m, end, tiles));
    if (store_info(info, p.info, m, end)) {
      for (int64_t i = 0; i < p.n; ++i) {
        for (int64_t j = 0; j <= i; ++j) spoil_failed(info, &l(i, j));
      }
    }
    unpack(a, part, group_of<T>(p.l, p.n * p.n, m, end));
  }
}

template <int n, bool kUpper, class T>
JAX_BATCHED_CALLED void cholesky_fixed(const CholeskyProblem& p, int64_t begin, int64_t end,
                                       void* scratch) {
  using Matrix = FixedEntries<T, n * n>;
  const auto* in = static_cast<const Real<T>*>(p.a);
  auto* out = static_cast<Real<T>*>(p.l);
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    Matrix a;
    a.load(in + m * (n * n));
    Matrix::fetch_ahead(out + m * (n * n));
    if (p.symmetrize) symmetrize_fixed<kUpper, n>(a);
    const Simd<Real<T>> info = factor_fixed<kUpper, n>(a);
    clear_fixed<!kUpper, n>(a);
    a.store(out + m * (n * n));
    if (store_info(info, p.info, m, end)) cholesky_groups<T>(p, m, m + kLanes<T>, scratch);
  }
}

template <class T>
void cholesky_lanes(const CholeskyProblem& p, int64_t begin, int64_t end, void* scratch) {
  const int64_t whole = end - (end - begin) % kLanes<T>;
  const bool fixed = with_fixed_size<T>(p.n, [&](auto n) JAX_BATCHED_INLINED {
    with_flag(p.upper, [&](auto upper) JAX_BATCHED_INLINED {
      cholesky_fixed<n, upper, T>(p, begin, whole, scratch);
    });
  });
  cholesky_groups<T>(p, fixed ? whole : begin, end, scratch);
}

template <class T>
void cholesky_blocked(const CholeskyProblem& p, int64_t begin, int64_t end, void* scratch) {
  const SplitRows<T> u = upper_factor_in<T>(scratch, p.n);
  for (int64_t m = begin; m < end; ++m) {
    T* out = static_cast<T*>(p.l) + m * p.n * p.n;
    load_upper(static_cast<const T*>(p.a) + m * p.n * p.n, p.n, p.upper, p.symmetrize, u);
    p.info[m] = factor_upper(u, p.n);
    if (p.info[m] != 0) {
      for (int64_t i = 0; i < p.n; ++i) std::fill(u.row(i), u.row(i) + u.pitch(), kNaN<Real<T>>);
    }
    store_factor(u, p.n, p.upper, out);
  }
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
