// Cholesky factorization of a group of matrices, one per lane: left-looking by square tiles.
#pragma once

#include "ffi/cpu/engine/lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

// Rows and columns of a tile: it stays in registers, beside a row and an entry of its operands.
template <class T>
inline constexpr int kGroupTile =
    kIsComplex<T> ? (kVectorRegisters == 32 ? 3 : 2) : (kVectorRegisters == 32 ? 4 : 3);

// tile(r, c) = a(i + r, j + c) - sum_{k<j} l(i + r, k) conj(l(j + c, k)); of a tile on the diagonal
// (i = j) only c <= r.
template <int kRows, int kCols, bool kDiagonal, class P>
JAX_BATCHED_INLINE void load_updated_tile(const StridedGroup<P>& l, int64_t i, int64_t j,
                                          P (&tile)[kRows][kCols]) {
  const auto each_entry = [](auto f) JAX_BATCHED_INLINED {
    unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
      unrolled<kCols>([&](auto c) JAX_BATCHED_INLINED {
        if constexpr (!kDiagonal || c <= r) f(r, c);
      });
    });
  };
  each_entry([&](auto r, auto c) JAX_BATCHED_INLINED { tile[r][c] = l(i + r, j + c); });
  const P* left = &l(i, 0);
  const P* top = &l(j, 0);
  for (int64_t k = 0; k < j; ++k, left += l.col, top += l.col) {
    P column[kRows], row[kCols];
    unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED { column[r] = left[r * l.row]; });
    unrolled<kCols>([&](auto c) JAX_BATCHED_INLINED { row[c] = conj(top[c * l.row]); });
    each_entry([&](auto r, auto c)
                   JAX_BATCHED_INLINED { tile[r][c] = sub_mul(tile[r][c], row[c], column[r]); });
  }
}

// info of each lane, as a number, after one more pivot, that of the 1-based column `column`.
template <class R>
JAX_BATCHED_INLINE Simd<R> first_failure(Simd<R> info, Simd<R> pivot, int64_t column) {
  const Simd<R> zero(R(0));
  const auto fails_first = ~(pivot.v > zero.v) & (info.v == zero.v);
  return select(fails_first, Simd<R>(R(column)), info);
}

// l_jj = sqrt(pivot), l_ij = (a_ij - sum_{k<j} l_ik conj(l_jk)) / l_jj, tile column by tile column.
// A lane whose pivot is not > 0 goes on with whatever comes out. Returns info of each lane.
template <class T>
Simd<Real<T>> factor_group(const StridedGroup<Lanes<T>>& l, int64_t n,
                           BackgroundFetch background = {}) {
  using R = Real<T>;
  using P = Lanes<T>;
  constexpr int kTile = kGroupTile<T>;
  Simd<R> info(R(0));
  for (int64_t j = 0; j < n; j += kTile) {
    Simd<R> inverse[kTile] = {};
    background.step();
    with_constant<kTile>(n - j, [&](auto size) JAX_BATCHED_INLINED {
      constexpr int kSize = decltype(size)::value;
      P tile[kSize][kSize];
      load_updated_tile<kSize, kSize, true>(l, j, j, tile);
      unrolled<kSize>([&](auto k) JAX_BATCHED_INLINED {
        const Simd<R> pivot = real(tile[k][k]);
        info = first_failure(info, pivot, j + k + 1);
        const Simd<R> root = sqrt(pivot);
        inverse[k] = Simd<R>(R(1)) / root;
        tile[k][k] = P(root);
        l(j + k, j + k) = tile[k][k];
        unrolled<kSize>([&](auto r) JAX_BATCHED_INLINED {
          if constexpr (r > k) {
            tile[r][k] = scale(tile[r][k], inverse[k]);
            l(j + r, j + k) = tile[r][k];
            unrolled<r + 1>([&](auto c) JAX_BATCHED_INLINED {
              if constexpr (c > k) {
                tile[r][c] = sub_mul(tile[r][c], conj(tile[c][k]), tile[r][k]);
              }
            });
          }
        });
      });
    });
    for (int64_t i = j + kTile; i < n; i += kTile) {
      background.step();
      with_constant<kTile>(n - i, [&](auto rows) JAX_BATCHED_INLINED {
        constexpr int kRows = decltype(rows)::value;
        P tile[kRows][kTile];
        load_updated_tile<kRows, kTile, false>(l, i, j, tile);
        unrolled<kTile>([&](auto c) JAX_BATCHED_INLINED {
          unrolled<c>([&](auto k) JAX_BATCHED_INLINED {
            const P entry = conj(l(j + c, j + k));
            unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
              tile[r][c] = sub_mul(tile[r][c], entry, tile[r][k]);
            });
          });
          unrolled<kRows>([&](auto r) JAX_BATCHED_INLINED {
            tile[r][c] = scale(tile[r][c], inverse[c]);
            l(i + r, j + c) = tile[r][c];
          });
        });
      });
    }
  }
  return info;
}

// The tiles of a factorization, each of which is a step of what happens in the background.
template <class T>
int64_t factor_tiles(int64_t n) {
  const int64_t columns = (n + kGroupTile<T> - 1) / kGroupTile<T>;
  return columns * (columns + 1) / 2;
}

// Both triangles are there; the one that `upper` names becomes the mean of both. On the diagonal it
// is that already.
template <class T>
void symmetrize(const GroupMatrix<T>& a, bool upper) {
  const int64_t pitch = a.pitch();
  for (int64_t i = 0; i < a.n; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      Lanes<T>& lower_entry = a.entries[i * pitch + j];
      Lanes<T>& upper_entry = a.entries[j * pitch + i];
      Lanes<T>& kept = upper ? upper_entry : lower_entry;
      kept = half_sum(kept, upper ? lower_entry : upper_entry);
    }
  }
}

// Of an upper triangle, the transpose: A = U^H U is conj(A) = U^T (U^T)^H.
template <class T>
StridedGroup<Lanes<T>> triangle_of(const GroupMatrix<T>& a, bool upper) {
  const int64_t pitch = a.pitch();
  return {a.entries, upper ? 1 : pitch, upper ? pitch : 1};
}

// Stores info; true if any lane failed.
template <class R>
bool store_info(Simd<R> info, int32_t* out, int64_t begin, int64_t end) {
  using Counts = typename VectorOf<R>::Counts;
  const Counts all = __builtin_convertvector(info.v, Counts);
  if (begin + Simd<R>::kSize <= end) {
    *reinterpret_cast<Counts*>(out + begin) = all;
  } else {
    for (int lane = 0; begin + lane < end; ++lane) out[begin + lane] = all[lane];
  }
  return any(info.v != Simd<R>(R(0)).v);
}

// NaN in the lanes that failed.
template <class P, class R>
JAX_BATCHED_INLINE void spoil_failed(Simd<R> info, P* entry) {
  const Simd<R> nan(kNaN<R>);
  const auto failed = info.v != Simd<R>(R(0)).v;
  if constexpr (kIsComplex<P>) {
    *entry = select(failed, P(nan, nan), *entry);
  } else {
    *entry = select(failed, nan, *entry);
  }
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
