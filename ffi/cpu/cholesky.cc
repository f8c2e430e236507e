#include "ffi/cpu/engine/factor_blocked.h"
#include "ffi/cpu/engine/fixed_lanes.h"
#include "ffi/cpu/engine/tiers.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {
namespace {

// Whether half_sum() overflows for some entry, so that its row's pivot fails for that alone.
template <class T>
bool sums_overflow(const T* a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      if (is_infinite(half_sum(a[i * n + j], a[j * n + i]))) return true;
    }
  }
  return false;
}

template <class T>
void cholesky_blocked(const CholeskyProblem& p, int64_t begin, int64_t end, void* scratch) {
  const SplitRows<T> u = upper_factor_in<T>(scratch, p.n);
  for (int64_t m = begin; m < end; ++m) {
    const T* a = p.a.at<const T>(m, p.n, p.n);
    load_upper(a, p.n, p.upper, p.symmetrize, u);
    p.info[m] = factor_upper(u, p.n);
    if (p.info[m] != 0 && p.symmetrize && sums_overflow(a, p.n)) {
      load_upper<true>(a, p.n, p.upper, p.symmetrize, u);
      p.info[m] = factor_upper(u, p.n);
    }
    if (p.info[m] != 0) {
      for (int64_t i = 0; i < p.n; ++i) std::fill(u.row(i), u.row(i) + u.pitch(), kNaN<Real<T>>);
    }
    store_factor(u, p.n, p.upper, p.l.at<T>(m, p.n, p.n));
  }
}

template <class T>
JAX_BATCHED_CALLED bool any_sums_overflow(const CholeskyProblem& p, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    if (p.info[m] != 0 && sums_overflow(p.a.at<const T>(m, p.n, p.n), p.n)) return true;
  }
  return false;
}

template <class T>
void cholesky_groups(const CholeskyProblem& p, int64_t begin, int64_t end, void* scratch) {
  const GroupMatrix<T> a{static_cast<Lanes<T>*>(scratch), p.n};
  const StridedGroup<Lanes<T>> l = triangle_of(a, p.upper);
  const Part part = p.upper ? Part::kUpper : Part::kLower;
  const int64_t tiles = factor_tiles<T>(p.n);
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    pack(group_of<T>(p.a.data, BatchMap{}, int64_t{p.n} * p.n, m, end),
         p.symmetrize ? Part::kAll : part, a);
    if (p.symmetrize) symmetrize(a, p.upper);
    const Simd<Real<T>> info = factor_group<T>(
        l, p.n,
        BackgroundFetch::beside_group<T>(p.a.data, p.l.data, int64_t{p.n} * p.n, m, end, tiles));
    if (store_info(info, p.info, m, end)) {
      const int64_t last = std::min(m + kLanes<T>, end);
      if (p.symmetrize && any_sums_overflow<T>(p, m, last)) {
        cholesky_blocked<T>(p, m, last, scratch);
        continue;
      }
      for (int64_t i = 0; i < p.n; ++i) {
        for (int64_t j = 0; j <= i; ++j) spoil_failed(info, &l(i, j));
      }
    }
    unpack(a, part, group_of<T>(p.l, int64_t{p.n} * p.n, m, end));
  }
}

template <int n, bool kUpper, class T>
JAX_BATCHED_CALLED void cholesky_fixed(const CholeskyProblem& p, int64_t begin, int64_t end,
                                       void* scratch) {
  using Matrix = FixedEntries<T, n * n>;
  const auto* in = p.a.as<const Real<T>>();
  auto* out = p.l.as<Real<T>>();
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    Matrix a;
    a.load(in + m * (n * n));
    Matrix::fetch_ahead(out + m * (n * n));
    if (p.symmetrize) symmetrize_fixed<kUpper, n>(a);
    const Simd<Real<T>> info = factor_fixed<kUpper, n>(a);
    clear_fixed<!kUpper, n>(a);
    if (store_info(info, p.info, m, end)) {
      cholesky_groups<T>(p, m, m + kLanes<T>, scratch);
    } else {
      a.store(out + m * (n * n));
    }
  }
}

struct CholeskyKernels {
  static constexpr Tiers kTiers = {
      {{7, 10}, {31, 30}, {63, 50}, {127, 75}, {320, 90}},
      {{7, 20}, {31, 40}, {63, 65}, {127, 85}, {320, 95}},
      {{11, 15}, {31, 35}, {63, 50}, {127, 68}, {256, 85}},
      {{11, 25}, {31, 50}, {63, 70}, {127, 80}, {256, 90}},
  };
  template <class T>
  static void lanes(const CholeskyProblem& p, int64_t begin, int64_t end, void* scratch) {
    const int64_t whole = end - (end - begin) % kLanes<T>;
    const bool fixed = with_fixed_size<T>(p.n, [&](auto n) JAX_BATCHED_INLINED {
      with_flag(p.upper, [&](auto upper) JAX_BATCHED_INLINED {
        cholesky_fixed<n, upper, T>(p, begin, whole, scratch);
      });
    });
    cholesky_groups<T>(p, fixed ? whole : begin, end, scratch);
  }

  template <class T>
  static void blocked(const CholeskyProblem& p, int64_t begin, int64_t end, void* scratch) {
    cholesky_blocked<T>(p, begin, end, scratch);
  }
};

}  // namespace

template <>
Kernel<CholeskyProblem> kernel() {
  return tiered_kernel<CholeskyProblem, CholeskyKernels>();
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
