// Cholesky factorization of one matrix, left-looking by rows of tiles.
//
// Scratch holds U = L^H. Then both operands of every product lie along rows: u_ij needs
// sum_k conj(u_ki) u_kj, broadcast u_ki times a vector of u_kj. The matrix is filled up to whole
// tile rows by an identity, so that no tile is ragged. What is computed left of the diagonal, in
// vectors that cross it, is never read.
#pragma once

#include "ffi/cpu/engine/blocked.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class T>
SplitRows<T> upper_factor_in(void* scratch, int64_t n) {
  const int64_t width = round_up(round_up(n, kTileRows), kLanes<T>);
  return {static_cast<Real<T>*>(scratch), width};
}

// Calls square(i, j) for the squares of kLanes rows and columns that touch the lower triangle and
// lie inside the n x n matrix, and entry(i, j) for the entries of the triangle that are left.
template <class T, class Square, class Entry>
void for_each_lower_square(int64_t n, Square square, Entry entry) {
  constexpr int64_t size = kLanes<T>;
  const int64_t whole = kIsComplex<T> ? 0 : n / size * size;
  for (int64_t i = 0; i < whole; i += size) {
    for (int64_t j = 0; j <= i; j += size) square(i, j);
  }
  for (int64_t i = whole; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) entry(i, j);
  }
}

// The triangle that `upper` names, or the mean of both, which on the diagonal is there already.
template <bool kSumsOverflow = false, class T>
void load_upper(const T* a, int64_t n, bool upper, bool symmetrize, const SplitRows<T>& u) {
  using R = Real<T>;
  const int64_t rows = round_up(n, kTileRows);
  if (!upper || symmetrize) {
    const auto square = [&](int64_t i, int64_t j) {
      if constexpr (!kIsComplex<T>) transpose(a + i * n + j, n, u.row(j) + i, u.pitch());
    };
    const auto entry = [&](int64_t i, int64_t j) { u.set(u.row(j), i, conj(a[i * n + j])); };
    for_each_lower_square<T>(n, square, entry);
  }
  for (int64_t k = 0; k < n; ++k) {
    R* row = u.row(k);
    if (symmetrize) {
      for (int64_t j = k + 1; j < n; ++j) {
        const T above = a[k * n + j], below = conj(u.get(row, j));
        u.set(row, j, kSumsOverflow ? hermitian_mean(above, below) : half_sum(above, below));
      }
    } else if (upper) {
      for (int64_t j = k; j < n; ++j) u.set(row, j, a[k * n + j]);
    }
    for (int64_t j = n; j < u.width; ++j) u.set(row, j, T(0));
  }
  for (int64_t k = n; k < rows; ++k) {
    std::fill(u.row(k), u.row(k) + u.width * kParts<T>, R(0));
    u.set(u.row(k), k, T(1));
  }
}

template <class T>
void store_factor(const SplitRows<T>& u, int64_t n, bool upper, T* out) {
  if (upper) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = i; j < n; ++j) out[i * n + j] = u.get(u.row(i), j);
    }
  } else {
    const auto square = [&](int64_t i, int64_t j) {
      if constexpr (!kIsComplex<T>) transpose(u.row(j) + i, u.pitch(), out + i * n + j, n);
    };
    const auto entry = [&](int64_t i, int64_t j) {  // a real number is not conjugated to -0 i
      const T u_ji = u.get(u.row(j), i);
      out[i * n + j] = i == j ? u_ji : conj(u_ji);
    };
    for_each_lower_square<T>(n, square, entry);
  }
  for (int64_t i = 0; i < n; ++i) {
    T* row = out + i * n;
    if (upper) {
      std::fill(row, row + i, T(0));
    } else {
      std::fill(row + i + 1, row + n, T(0));
    }
  }
}

// The diagonal block of a tile row, factored entry by entry.
template <class T>
struct DiagonalBlock {
  T u[kTileRows][kTileRows];   // its factor; conj(u_kr) is what row r subtracts of row k
  Real<T> inverse[kTileRows];  // 1 / u_kk
};

// u_kk = sqrt(a_kk), u_kj = a_kj / u_kk, then a_ij -= conj(u_ki) u_kj. Returns the 1-based row that
// fails, or 0.
template <class T>
int32_t factor_block(const SplitRows<T>& u, int64_t i, DiagonalBlock<T>& d) {
  for (int r = 0; r < kTileRows; ++r) {
    for (int c = r; c < kTileRows; ++c) d.u[r][c] = u.get(u.row(i + r), i + c);
  }
  for (int k = 0; k < kTileRows; ++k) {
    const Real<T> pivot = real(d.u[k][k]);
    if (!(pivot > Real<T>(0))) return k + 1;
    const Real<T> root = std::sqrt(pivot);
    d.inverse[k] = Real<T>(1) / root;
    d.u[k][k] = T(root);
    for (int c = k + 1; c < kTileRows; ++c) d.u[k][c] = scale(d.u[k][c], d.inverse[k]);
    for (int r = k + 1; r < kTileRows; ++r) {
      for (int c = r; c < kTileRows; ++c) {
        d.u[r][c] = sub_mul(d.u[r][c], conj(d.u[k][r]), d.u[k][c]);
      }
    }
  }
  return 0;
}

// The tile of rows i, ... and kVectors vectors of columns from j on: subtracts the first `above`
// rows of U, tile(r) -= sum_k conj(u_k,i+r) u_k, and then with `block` finishes the rows, tile(r) =
// (tile(r) - sum_{k<r} conj(u_kr) tile(k)) / u_rr.
template <int kVectors, class T>
JAX_BATCHED_INLINE void update_tile(const SplitRows<T>& u, int64_t i, int64_t j, int64_t above,
                                    const DiagonalBlock<T>* block) {
  using R = Real<T>;
  constexpr int size = kLanes<T>;
  Lanes<T> tile[kTileRows][kVectors];
  unrolled<kTileRows>([&](auto r) JAX_BATCHED_INLINED {
    unrolled<kVectors>(
        [&](auto v) JAX_BATCHED_INLINED { tile[r][v] = u.load(u.row(i + r), j + v * size); });
  });
  const int64_t pitch = u.pitch();
  const R* row = u.numbers;
  for (int64_t k = 0; k < above; ++k, row += pitch) {
    Lanes<T> top[kVectors];
    unrolled<kVectors>([&](auto v) JAX_BATCHED_INLINED { top[v] = u.load(row, j + v * size); });
    unrolled<kTileRows>([&](auto r) JAX_BATCHED_INLINED {
      const Lanes<T> left = broadcast(conj(u.get(row, i + r)));
      unrolled<kVectors>(
          [&](auto v) JAX_BATCHED_INLINED { tile[r][v] = sub_mul(tile[r][v], left, top[v]); });
    });
  }
  if (block != nullptr) {
    unrolled<kTileRows>([&](auto r) JAX_BATCHED_INLINED {
      unrolled<r>([&](auto k) JAX_BATCHED_INLINED {
        const Lanes<T> left = broadcast(conj(block->u[k][r]));
        unrolled<kVectors>([&](auto v) JAX_BATCHED_INLINED {
          tile[r][v] = sub_mul(tile[r][v], left, tile[k][v]);
        });
      });
      const Simd<R> inverse(block->inverse[r]);
      unrolled<kVectors>([&](auto v)
                             JAX_BATCHED_INLINED { tile[r][v] = scale(tile[r][v], inverse); });
    });
  }
  unrolled<kTileRows>([&](auto r) JAX_BATCHED_INLINED {
    unrolled<kVectors>(
        [&](auto v) JAX_BATCHED_INLINED { u.store(u.row(i + r), j + v * size, tile[r][v]); });
  });
}

// The tiles of a row of them that cover the columns begin <= j < end, both multiples of a vector.
template <class T>
void update_tiles(const SplitRows<T>& u, int64_t i, int64_t begin, int64_t end, int64_t above,
                  const DiagonalBlock<T>* block) {
  constexpr int size = kLanes<T>;
  constexpr int kVectors = kTileVectors<T>;
  int64_t j = begin;
  for (; j + kVectors * size <= end; j += kVectors * size) {
    update_tile<kVectors>(u, i, j, above, block);
  }
  for (; j < end; j += size) update_tile<1>(u, i, j, above, block);
}

// Returns info.
template <class T>
int32_t factor_upper(const SplitRows<T>& u, int64_t n) {
  for (int64_t i = 0; i < n; i += kTileRows) {
    const int64_t begin = i / kLanes<T> * kLanes<T>;
    const int64_t behind = round_up(i + kTileRows, kLanes<T>);  // the diagonal block
    DiagonalBlock<T> block;
    update_tiles(u, i, begin, behind, i, static_cast<const DiagonalBlock<T>*>(nullptr));
    const int32_t failed = factor_block(u, i, block);
    if (failed != 0) return static_cast<int32_t>(i) + failed;
    update_tiles(u, i, begin, behind, 0, &block);
    for (int k = 0; k < kTileRows; ++k) u.set(u.row(i + k), i + k, block.u[k][k]);
    update_tiles(u, i, behind, u.width, i, &block);
  }
  return 0;
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
