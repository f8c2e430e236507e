// LU factorizations of groups of the smallest matrices, unrolled: every entry is a variable. The
// operations on an entry and their order are those of lu_lanes.h, so the bits are the same.
#pragma once

#include "ffi/cpu/engine/fixed_lanes.h"
#include "ffi/cpu/engine/lu_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

// Larger ones gain less, and take long to compile; an inverse has n columns beside the matrix.
template <class T, class P>
inline constexpr int kMaxFixedLu = [] {
  if (kMaxFixedSize<T> == 0) return 0;
  if (std::is_same_v<P, InvProblem>) return 4;
  return std::is_same_v<P, LuProblem> || std::is_same_v<P, SolveGenProblem> ? 8 : 6;
}();

// [A | B] with kColumns columns of B: A becomes L and U, B becomes Y with L Y = P B.
template <int n, int kColumns, class R>
struct FixedLu {
  using Indices = typename LuGroup<R>::Indices;
  using Matrix = FixedEntries<R, n * n>;

  Matrix a;
  FixedEntries<R, n * kColumns + (kColumns == 0)> b;
  Indices pivots[n];
  Indices row_at[n];
  Simd<R> info = Simd<R>(R(0));

  JAX_BATCHED_INLINE Simd<R> at(int i, int j) const { return a.get(i * n + j); }
  JAX_BATCHED_INLINE Simd<R> rhs(int i, int c) const { return b.get(i * kColumns + c); }

  JAX_BATCHED_INLINE void factor() {
    using Bits = typename VectorOf<R>::Bits;
    unrolled<n>([&](auto i) JAX_BATCHED_INLINED { row_at[i] = Indices{} + Bits(i); });
    unrolled<n>([&](auto k) JAX_BATCHED_INLINED {
      Simd<R> largest(R(-1));
      Indices place = Indices{} + Bits(k);
      unrolled<n - k>([&](auto below) JAX_BATCHED_INLINED {
        constexpr int i = k + below;
        const Simd<R> candidate = absolute(at(i, k));
        const Indices better = candidate.v > largest.v;
        largest = select(better, candidate, largest);
        place = (better & (Indices{} + Bits(i))) | (~better & place);
      });
      pivots[k] = place;
      unrolled<n - k - 1>([&](auto below) JAX_BATCHED_INLINED {
        constexpr int i = k + 1 + below;
        exchange<k, i>(place == Bits(i));
      });
      const Simd<R> pivot = at(k, k);
      info = first_bad_pivot(info, pivot, k + 1);
      unrolled<n - k - 1>([&](auto below) JAX_BATCHED_INLINED {
        constexpr int i = k + 1 + below;
        const Simd<R> l = multiplier(at(i, k), pivot);
        a.set(i * n + k, l);
        unrolled<n - k - 1>([&](auto right) JAX_BATCHED_INLINED {
          constexpr int j = k + 1 + right;
          a.set(i * n + j, sub_mul(at(i, j), l, at(k, j)));
        });
        unrolled<kColumns>([&](auto c) JAX_BATCHED_INLINED {
          b.set(i * kColumns + c, sub_mul(rhs(i, c), l, rhs(k, c)));
        });
      });
    });
  }

  // B becomes X with U X = Y, NaN in the lanes that failed.
  JAX_BATCHED_INLINE void substitute() {
    unrolled<kColumns>([&](auto c) JAX_BATCHED_INLINED {
      unrolled<n>([&](auto above) JAX_BATCHED_INLINED {
        constexpr int i = n - 1 - above;
        Simd<R> sum = rhs(i, c);
        unrolled<above>([&](auto right) JAX_BATCHED_INLINED {
          constexpr int j = n - 1 - right;
          sum = sub_mul(sum, at(i, j), rhs(j, c));
        });
        b.set(i * kColumns + c, divide(sum, at(i, i)));
      });
    });
    if (any(~is_zero(info))) {
      unrolled<n * kColumns>([&](auto e) JAX_BATCHED_INLINED {
        Simd<R> entry = b.get(e);
        spoil_failed(info, &entry);
        b.set(e, entry);
      });
    }
  }

 private:
  template <int k, int i>
  JAX_BATCHED_INLINE void exchange(Indices chosen) {
    const auto swap = [&](auto& entries, int one, int other) JAX_BATCHED_INLINED {
      const Simd<R> x = entries.get(one), y = entries.get(other);
      entries.set(one, select(chosen, y, x));
      entries.set(other, select(chosen, x, y));
    };
    unrolled<n>([&](auto j) JAX_BATCHED_INLINED { swap(a, k * n + j, i * n + j); });
    unrolled<kColumns>([&](auto c)
                           JAX_BATCHED_INLINED { swap(b, k * kColumns + c, i * kColumns + c); });
    const Indices former = row_at[k];
    row_at[k] = (chosen & row_at[i]) | (~chosen & former);
    row_at[i] = (chosen & former) | (~chosen & row_at[i]);
  }
};

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
