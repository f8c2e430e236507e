// Cholesky of doubles by several warps per matrix, L in shared memory: left-looking over 8-wide
// panels.
//
// For the 8x8 tile (i, j) let S(i, j) = sum_(k < j) L_ik L_jk^T - A_ij. For each panel p of columns
//   L_pp = cholesky(-S(p, p)),    L_ip = S(i, p) (-L_pp^-1)^T  for the row tiles i > p.
// L stays on chip, so that A is read once and L written once. The long chain of dependent
// operations in L_pp is one warp's, and all others keep out of its way: while it factors block
// p + 1, the workers compute the column p + 1 below that block and the sums of column p + 2.
//
// In step p, between two barriers, L_pp^-1, S(p + 1, p) and the columns of L before p are there.
//   chain:   X = S(p + 1, p) (-L_pp^-1)^T,  S(p + 1, p + 1) += X X^T,  factors that block.
//   workers: L_ip = S(i, p) (-L_pp^-1)^T,   S(i, p + 1) += L_ip X^T    (each computes X itself),
//            publish S(p + 2, p + 1), then S(i, p + 2) = sum_(j < p) L_ij L_(p+2)j^T - A_i(p+2).
// A worker owns pairs of row tiles, dealt out in turn, and keeps the S of its rows in registers.
// So there is one barrier per panel, and only the blocks' factors are on the critical path.
//
// Up to 8 right-hand sides are one more row tile of A, which gives Y = (L^-1 B)^T; or one more warp
// takes them along in registers, a step behind the factorization. The first needs no warp, the
// second less shared memory.
#pragma once

#include <cstdint>

#include "ffi/cuda/cholesky/panel.cuh"
#include "ffi/cuda/cholesky/pivot_block.cuh"
#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/tensor.cuh"
#include "ffi/cuda/layout/view.cuh"

namespace jax_batched::cuda {

// Where the right-hand sides of a solve are while the matrix is factored.
enum class RhsPlace { kNone, kRowTile, kWarp };

// kWorkers warps with two pairs of row tiles each, one for the chain, and with RhsPlace::kWarp one
// for the right-hand sides. In a solve -L_pp^-1 takes the place of L_pp.
template <int kWorkers, RhsPlace kRhsPlace>
struct BlockSharedFactor : PivotBlock {
  static constexpr bool kSolve = kRhsPlace != RhsPlace::kNone;
  static constexpr bool kRowTile = kRhsPlace == RhsPlace::kRowTile;
  static constexpr bool kRhsWarp = kRhsPlace == RhsPlace::kWarp;
  static constexpr int kPairs = 2;
  static constexpr int kWarps = kWorkers + (kRhsWarp ? 2 : 1);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMaxTiles = 2 * kWorkers * kPairs - (kRowTile ? 1 : 0);  // of A
  static constexpr int kMaxN = 8 * kMaxTiles;
  // After the tiles of L: S(p + 1, p), S(p + 1, p + 1) and, if not in place, -L_pp^-1, two of each
  // in turn.
  static constexpr int kExtraTiles = kSolve ? 4 : 6;

  static constexpr size_t shared_bytes(int n) {
    const int rows = ceil_div(n, 8) + (kRowTile ? 1 : 0);
    return (rows * (rows + 1) / 2 + kExtraTiles) * kTile * sizeof(double) + sizeof(int);
  }

  using RightHandSides = Values[kMaxTiles];

  double* shared;
  int n, tiles, rows;
  int worker;  // kWorkers: the chain; kWorkers + 1: right-hand sides

  __device__ __forceinline__ BlockSharedFactor(void* memory, int size)
      : shared(static_cast<double*>(memory)),
        n(size),
        tiles(ceil_div(size, 8)),
        rows(tiles + (kRowTile ? 1 : 0)) {
    // The chains of neighbouring blocks on different schedulers. The shuffle tells the compiler
    // that a warp has one role.
    const int turn = static_cast<int>(blockIdx.x * 0x9e3779b1u >> 16);
    worker = shuffle((static_cast<int>(threadIdx.x) / 32 + turn) % kWarps, 0);
  }

  __device__ __forceinline__ double* tile(int i, int j) const {
    return shared + (i * (i + 1) / 2 + j) * kTile;
  }
  __device__ __forceinline__ double* extra(int k) const { return tile(rows, k); }
  __device__ __forceinline__ double* next_column(int p) const { return extra(p % 2); }
  __device__ __forceinline__ double* next_diagonal(int p) const { return extra(2 + p % 2); }
  __device__ __forceinline__ double* minus_inverse(int p) const {
    return kSolve ? tile(p, p) : extra(4 + p % 2);
  }
  __device__ __forceinline__ int* info() const {
    return reinterpret_cast<int*>(extra(kExtraTiles));
  }

  // c += a b^T by one instruction, half of whose result nobody needs: less latency than two.
  static __device__ __forceinline__ void multiply_add_padded(Values& c, const Values& a,
                                                             const Values& b) {
    const Values zero = {0, 0};
    Values both[2] = {{c[0], c[1]}, {0, 0}};
    multiply_add(both, a, zero, b);
    assign(c, both[0]);
  }

  // First row tile of pair k of this worker.
  __device__ __forceinline__ int top(int k) const { return 2 * (worker + kWorkers * k); }
  // Whether that pair has rows from row tile i on.
  __device__ __forceinline__ bool reaches(int k, int i) const {
    return top(k) + 1 >= i && top(k) < rows;
  }

  // Entry e = 0, 1 of a tile that this lane moves from or to global memory: 4 rows of 8 at a time,
  // or, of an upper triangle, 8 rows of 4, a sector each.
  static __device__ __forceinline__ int moved_row(bool upper, int e) {
    return (upper ? lane() % 4 : lane() / 4 % 4) + 4 * e;
  }
  static __device__ __forceinline__ int moved_column(bool upper) {
    return (upper ? lane() / 4 % 4 : lane() % 4) * 2 + lane() / 16;
  }

  // Starts the copy of columns of tiles first .. last - 1 of row tile i of A; of the identity from
  // n on.
  __device__ __forceinline__ void start_copy(const View<double>& a, bool upper, int i, int first,
                                             int last) const {
    const int row = moved_row(upper, 0), column = moved_column(upper);
    const int row_step = upper ? 1 : a.ld, column_step = upper ? a.ld : 1;
    const double* from = a.data + (8 * i + row) * row_step + column * column_step;
    double* to = tile(i, 0) + at(row, column);
    last = min(last, i + 1);
    const auto copy = [&](int j, int step) {
      copy_async(to + j * kTile, from + 8 * j * step);
      copy_async(to + j * kTile + 16, from + 8 * j * step + 4 * row_step);
    };
    if (8 * i + 8 <= n && !upper) {
#pragma unroll 8
      for (int j = first; j < last; ++j) copy(j, 1);
    } else if (8 * i + 8 <= n) {
#pragma unroll 4
      for (int j = first; j < last; ++j) copy(j, column_step);
    } else {
#pragma unroll 1
      for (int j = first; j < last; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int r = 8 * i + row + 4 * e, c = 8 * j + column;
          double* own = to + j * kTile + 16 * e;
          if (r < n && c < n) {
            copy_async(own, from + 8 * j * column_step + 4 * e * row_step);
          } else {
            *own = r == c;
          }
        }
      }
    }
  }

  // The mean of both triangles instead.
  __device__ __forceinline__ void load_mean(const View<double>& a, int i) const {
    const int r = 8 * i + lane() / 4;
#pragma unroll 4
    for (int j = 0; j <= i; ++j) {
      Values v;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int c = 8 * j + lane() % 4 * 2 + h;
        const int row = min(r, n - 1), column = min(c, n - 1);
        const double mean = hermitian_mean(*a.at(row, column), *a.at(column, row));
        v[h] = r < n && c < n ? mean : r == c;
      }
      store(tile(i, j), v);
    }
  }

  // Right-hand sides 0 .. 7 as the last row tile.
  __device__ __forceinline__ void copy_rhs(const double* b, int64_t nrhs) const {
#pragma unroll 1
    for (int c = 0; c < min(int64_t{8}, nrhs); ++c) {
      for (int r = lane(); r < 8 * tiles; r += 32) {
        double* to = tile(tiles, r / 8) + at(c, r % 8);
        if (r < n) {
          copy_async(to, b + r * nrhs + c);
        } else {
          *to = 0;
        }
      }
    }
  }

  // A call: inline, it would take registers of every warp.
  static __device__ __noinline__ int factor_careful(double* a, double* minus_inverse) {
    return PivotBlock::factor_careful(a, minus_inverse);
  }

  // Factors block p + 1 in step p. `w`: -L_pp^-1, then that of the block. Returns as
  // factor_careful.
  __device__ __forceinline__ int chain_step(int p, Values& w) const {
    Values d;
    load(d, next_diagonal(p + 1));
    if (p >= 0) {
      Values s, x = {0, 0};
      load(s, next_column(p + 1));
      multiply_add_padded(x, s, w);
      multiply_add_padded(d, x, x);
    }
    d[0] = -d[0];
    d[1] = -d[1];
    Values l = {d[0], d[1]};
    int failed = 0;
    double* inverse = minus_inverse(p + 1);
    if (factor_plain(l, w)) {
      store(inverse, w);
    } else {
      double* scratch = next_diagonal(p + 1);
      __syncwarp();
      store(scratch, d);
      __syncwarp();
      failed = factor_careful(scratch, inverse);
      load(l, scratch);
      load(w, inverse);
    }
    if (!kSolve) store(tile(p + 1, p + 1), l);
    return failed;
  }

  // Registers of a worker: S of columns p and p + 1, and where its row tiles begin.
  struct State {
    Values current[kPairs][2], next[kPairs][2];
    const double* row[kPairs][2];
  };

  // next += sum_(j < count) L_ij L_cj^T for the pairs kFirst .. kLast - 1; row tile c of L is
  // `across`.
  template <int kFirst, int kLast>
  static __device__ __forceinline__ void sum_products(State& s, const double* across, int count) {
#pragma unroll 2
    for (int j = 0; j < count; ++j) {
      Values b;
      load(b, across + j * kTile);
#pragma unroll
      for (int k = kFirst; k < kLast; ++k) {
        Values a0, a1;
        load(a0, s.row[k][0] + j * kTile);
        load(a1, s.row[k][1] + j * kTile);
        multiply_add(s.next[k], a0, a1, b);
      }
    }
  }

  // In step p: column p of L, and what is left of S in column p + 1.
  __device__ __forceinline__ void finish_column(State& s, int p) const {
    if (p >= 1 && p + 1 < tiles) {
      Values b;
      load(b, tile(p + 1, p - 1));
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        if (!reaches(k, p + 2)) continue;
        Values a0, a1;
        load(a0, s.row[k][0] + (p - 1) * kTile);
        load(a1, s.row[k][1] + (p - 1) * kTile);
        multiply_add(s.next[k], a0, a1, b);
      }
    }
    Values inverse, x = {0, 0};
    load(inverse, minus_inverse(p));
    if (p + 1 < tiles) {
      Values above;
      load(above, next_column(p + 1));
      multiply_add_padded(x, above, inverse);
    }
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (!reaches(k, p + 1)) continue;
      Values l[2] = {{0, 0}, {0, 0}};
      multiply_add(l, s.current[k][0], s.current[k][1], inverse);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = top(k) + h;
        if (i > p && i < rows) store(tile(i, p), l[h]);
      }
      if (p + 1 < tiles) multiply_add(s.next[k], l[0], l[1], x);
    }
  }

  // In step p: S of column c = p + 2 without its last two terms, and with all but the last where
  // row c is this worker's own: S(c, c), for the chain.
  __device__ __forceinline__ void start_column(State& s, int p) const {
    const int c = p + 2;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if (!reaches(k, c)) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = min(top(k) + h, rows - 1);
        Values entries = {0, 0};
        if (i >= c) load(entries, tile(i, c));
        s.next[k][h][0] = -entries[0];
        s.next[k][h][1] = -entries[1];
      }
    }
    const double* across = tile(c, 0);
    const bool first = reaches(0, c), second = reaches(1, c);
    if (first && second) {
      sum_products<0, kPairs>(s, across, p);
    } else if (first) {
      sum_products<0, 1>(s, across, p);
    } else if (second) {
      sum_products<1, kPairs>(s, across, p);
    }
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (top(k) + h != c) continue;
        Values d = {s.next[k][h][0], s.next[k][h][1]};
        if (p >= 0) {
          Values l;
          load(l, tile(c, p));
          multiply_add_padded(d, l, l);
        }
        store(next_diagonal(c), d);
      }
    }
  }

  // Factors the matrix at `a`; kSolve: with right-hand sides at `b`. Calls flush(p) in each warp
  // when row tile p and block column p of L are complete. Returns info, in every thread; in `y`
  // the last warp, number kWarps - 1, finds Y of the first 8 right-hand sides.
  template <class Flush>
  __device__ __forceinline__ int factor(const View<double>& a, Part part, const double* b,
                                        int64_t nrhs, RightHandSides& y, Flush&& flush) const {
    const int early = ceil_div(tiles, 4);  // columns of tiles that are waited for first
    int failed = 0;
    if (worker == kWorkers) {
      Values w;
      __syncthreads();
#pragma unroll 1
      for (int p = -1; p < tiles; ++p) {
        if (p + 1 < tiles) {
          const int pivot = chain_step(p, w);
          if (pivot != 0 && failed == 0) failed = 8 * (p + 1) + pivot;
        } else if (lane() == 0) {
          *info() = failed;
        }
        if (p >= 1) flush(p - 1);
        __syncthreads();
      }
      flush(tiles - 1);
      if (kRowTile) {
#pragma unroll
        for (int p = 0; p < kMaxTiles; ++p) {
          if (p < tiles) load(y[p], tile(tiles, p));
        }
      }
      return *info();
    }
    if (kRhsWarp && worker == kWorkers + 1) {
      load_rhs(y, b, n, nrhs, 0);
      __syncthreads();
      solve_forward(y, [] { __syncthreads(); });
      __syncthreads();
      return *info();
    }
#pragma unroll 1
    for (int group = 0; group < 2; ++group) {
#pragma unroll 1
      for (int k = 0; k < 2 * kPairs; ++k) {
        const int i = top(k / 2) + k % 2;
        if (i < tiles && !part.mean) {
          start_copy(a, part.upper, i, group == 0 ? 0 : early, group == 0 ? early : tiles);
        } else if (i < tiles && group == 0) {
          load_mean(a, i);
        } else if (kRowTile && i == tiles && group == 0) {
          copy_rhs(b, nrhs);
        }
      }
      commit_copies();
    }
    State s;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
#pragma unroll
      for (int h = 0; h < 2; ++h) s.row[k][h] = tile(min(top(k) + h, rows - 1), 0);
    }
    wait_for_copies<1>();
    __syncwarp();
#pragma unroll 1
    for (int p = -2; p < tiles; ++p) {
      if (p >= -1) {
        __syncthreads();
        if (p >= 0) finish_column(s, p);
#pragma unroll
        for (int k = 0; k < kPairs; ++k) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            s.current[k][h][0] = s.next[k][h][0];
            s.current[k][h][1] = s.next[k][h][1];
            if (top(k) + h == p + 2 && p + 2 < tiles) store(next_column(p + 2), s.next[k][h]);
          }
        }
      }
      if (p + 2 < tiles) {
        if (p + 2 == early) wait_for_copies<0>();
        __syncwarp();
        start_column(s, p);
      }
      if (p >= 1) flush(p - 1);
    }
    __syncthreads();
    flush(tiles - 1);
    return *info();
  }

  // Writes row tile p of L, zeros right of it, or rows 8p .. of U = L^T, zeros left of them; by all
  // warps.
  __device__ __forceinline__ void store_rows(double* l, bool upper, int p) const {
    if (!upper && n % 2 == 0) {
      // Two tiles at a time: 128 bytes of 4 rows, then of the other 4.
      const int pair = lane() % 4, right = lane() / 4 % 2;
      const int row = lane() / 8 % 2 + 2 * (lane() / 16 ^ right);
      int j = 2 * worker + right, c = 8 * j + 2 * pair;
      const double* from = tile(p, j) + at(row, 2 * pair);
      double* to = l + (8 * p + row) * n + c;
#pragma unroll 1
      for (; c < n; c += 16 * kWarps, j += 2 * kWarps) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          Pair<double> v{0, 0};
          if (j <= p) v = {from[16 * e], from[16 * e + 32]};
          if (8 * p + row + 4 * e < n) *reinterpret_cast<Pair<double>*>(to + 4 * e * n) = v;
        }
        from += 2 * kWarps * kTile;
        to += 16 * kWarps;
      }
      return;
    }
    if (!upper) {
      // The same, but pairs begin at the odd columns of every other row. A loop of its own: shared
      // code takes registers that even n need.
      const int pair = lane() % 4, right = lane() / 4 % 2;
      const int row = lane() / 8 % 2 + 2 * (lane() / 16 ^ right), r = 8 * p + row;
      double* const to = l + r * n;
      int c = 16 * worker + 8 * right + 2 * pair;
      c -= reinterpret_cast<uintptr_t>(to) / sizeof(double) % 2;
      const double* first = tile(p, 0) + (c >> 3) * kTile + at(row, c & 7);
      const double* second = tile(p, 0) + ((c + 1) >> 3) * kTile + at(row, (c + 1) & 7);
#pragma unroll 1
      for (; c < n; c += 16 * kWarps) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = r + 4 * e;
          if (i >= n) continue;
          Pair<double> v{0, 0};
          if (c >= 0 && c <= i) v.a = first[16 * e];
          if (c + 1 <= i) v.b = second[16 * e];
          double* const entry = to + 4 * e * n + c;
          if (c >= 0 && c + 1 < n) {
            *reinterpret_cast<Pair<double>*>(entry) = v;
          } else if (c >= 0) {
            entry[0] = v.a;
          } else {
            entry[1] = v.b;
          }
        }
        first += 2 * kWarps * kTile;
        second += 2 * kWarps * kTile;
      }
      return;
    }
    const int column = moved_column(true);
#pragma unroll 1
    for (int j = worker; j < tiles; j += kWarps) {
      const double* from = tile(j, p) + at(0, column);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int r = moved_row(true, e);
        const int i = 8 * p + column, k = 8 * j + r;
        if (i >= n || k >= n) continue;
        l[i * n + k] = j < p ? 0 : from[4 * r];
      }
    }
  }

  // 8 right-hand sides in the registers of one warp, as in warp_tensor.cuh: S, then Y, then -X.
  // S -> Y by  Y_p = S_p V^T,  S_i += Y_p L_ip^T,  with V = -L_pp^-1. enter() is called before step
  // p, which reads columns before p of L and V of block p.
  template <class Enter>
  __device__ __forceinline__ void solve_forward(RightHandSides& y, Enter&& enter) const {
#pragma unroll
    for (int p = 0; p < kMaxTiles; ++p) {
      if (p >= tiles) continue;
      enter();
#pragma unroll
      for (int i = p; i < kMaxTiles; ++i) {
        if (p == 0 || i >= tiles) continue;
        Values l;
        load(l, tile(i, p - 1));
        multiply_add(y[i], y[p - 1], l);
      }
      Values v, own = {0, 0};
      load(v, minus_inverse(p));
      multiply_add(own, y[p], v);
      assign(y[p], own);
    }
  }
  // Y -> -X by  X_p = -Z_p V,  Z_j -= X_p L_pj,  Z = Y at first.
  __device__ __forceinline__ void solve_backward(RightHandSides& y) const {
#pragma unroll
    for (int p = kMaxTiles - 1; p >= 0; --p) {
      if (p >= tiles) continue;
      Values v, own = {0, 0};
      load_transposed(v, minus_inverse(p));
      multiply_add(own, y[p], v);
      assign(y[p], own);
#pragma unroll
      for (int j = p - 1; j >= 0; --j) {
        Values l;
        load_transposed(l, tile(p, j));
        multiply_add(y[j], y[p], l);
      }
    }
  }

  // z = L^-T z of one right-hand side, by one warp: entry 32 s + lane is z[s]. Each block is solved
  // with its inverse, and taken out of the entries that follow. For 12 row tiles and more: products
  // compute 8 right-hand sides.
  static constexpr int kSlots = ceil_div(kMaxN, 32);
  __device__ __forceinline__ void substitute_back(double (&z)[kSlots]) const {
    const int part = lane() / 8, r = lane() % 8;
    // Lanes take the 8 terms of a sum in different orders, against bank conflicts.
    const int turn = part % 2 * 2 + r % 2;
    int offset[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) offset[k] = at(k ^ turn, r);
#pragma unroll
    for (int s = kSlots - 1; s >= 0; --s) {
#pragma unroll 1
      for (int q = 3; q >= 0; --q) {
        const int i = 4 * s + q;
        if (i >= tiles) continue;
        const double* inverse = minus_inverse(i);
        double y[8], sums[2] = {0, 0};
#pragma unroll
        for (int k = 0; k < 8; ++k) y[k] = shuffle(z[s], 8 * q + (k ^ turn));
#pragma unroll
        for (int k = 0; k < 8; ++k) sums[k % 2] = fma(-inverse[offset[k]], y[k], sums[k % 2]);
        const double own = sums[0] + sums[1];
        if (part == q) z[s] = own;
#pragma unroll
        for (int k = 0; k < 8; ++k) y[k] = shuffle(own, k ^ turn);
#pragma unroll
        for (int other = 0; other <= s; ++other) {
          const int j = 4 * other + part;
          if (j >= i) continue;
          const double* block = tile(i, j);
#pragma unroll
          for (int k = 0; k < 8; ++k) z[other] = fma(-block[offset[k]], y[k], z[other]);
        }
      }
    }
  }
};

}  // namespace jax_batched::cuda
