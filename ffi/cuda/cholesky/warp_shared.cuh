// A Cholesky factorization by one warp of a matrix that does not fit its registers, or of which
// more fit a multiprocessor this way, as 2x2 blocks of kHalf = 8 * kTiles rows:
//
//   L11 L11^H = A11,   X = A21 L11^-H,   L22 L22^H = A22 - X X^H.
//
// Each of the three fits the registers as tiles (fragment.cuh). What the next one needs of a
// finished block lies in shared memory, as panels of 8 columns in the order in which products read
// them (panel.cuh): L11 while X is computed, whose panels take the places of those of L11 one after
// the other, then X. The two factorizations are the same code, run twice: twice the code would
// overflow the instruction cache.
//
// Rows from n on are those of the identity.
#pragma once

#include <cstdint>

#include "ffi/cuda/cholesky/panel.cuh"
#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/with_constant.cuh"
#include "ffi/cuda/layout/fragment.cuh"

namespace jax_batched::cuda {

template <class T, int kTiles>
struct WarpSharedFactor {
  using R = Real<T>;
  using Step = Panel<T, kTiles, 1, true>;
  using Block = Fragment<T, kTiles>;
  static constexpr int kHalf = 8 * kTiles;
  static constexpr int kSlot = Step::kElements;
  // A slot more than panels: L11 keeps panel p in slot p + 1, X in slot p.
  static constexpr int kInversesAt = (kTiles + 1) * kSlot;
  static constexpr int kElements = kInversesAt + kHalf;
  // A solve has reciprocals of the whole diagonal, a right-hand side, and a tile and sums of the
  // backward substitution.
  static constexpr int kVectorAt = kInversesAt + 2 * kHalf;
  static constexpr int kTileAt = kVectorAt + 2 * kHalf;
  static constexpr int kSumsAt = kTileAt + 64;
  static constexpr int kSolveElements = kSumsAt + 8;

  T* shared;
  int n;
  int lane;

  __device__ __forceinline__ T* slot(int p) const { return shared + p * kSlot; }
  __device__ __forceinline__ R* inverses() const {
    return reinterpret_cast<R*>(shared + kInversesAt);
  }
  __device__ __forceinline__ T* vector() const { return shared + kVectorAt; }

  // Factors the block m. Panel p goes to slot(place + p * step); finished(Constant<p>) is called
  // when it is there and row p of tiles is that of L, done(p) later, with a barrier between. The
  // reciprocals of the diagonal go to `inverses`; with kSolve, rhs = L^-1 rhs on the way. Returns
  // the first failed column of the block, from 1; 0 if there is none.
  template <bool kSolve, class F, class G>
  __device__ __forceinline__ int factor(Block& m, int place, int step, R* inverses, T* rhs,
                                        F&& finished, G&& done) const {
    int info = 0;
    Step::publish(slot(place), m, 0, lane);
    __syncwarp();
#pragma unroll 1
    for (int p = 0; p < kTiles; ++p) {
      T* panel = slot(place + p * step);
      T x[Step::kSlots][8], b[Step::kSlots];
      R inverse = 1;
      Step::load_rows(x, panel, p, lane);
      if constexpr (kSolve) {
#pragma unroll
        for (int s = 0; s < Step::kSlots; ++s) b[s] = rhs[Step::row(p, s, lane)];
      }
      const R root = Step::template factor_any<kSolve>(x, b, p, lane, inverse);
      __syncwarp();  // every lane has read its rows
      Step::template repair<kSolve>(x, b, panel, rhs, p, 8, lane, root, inverse, info);
      Step::store_columns(panel, x, p, lane);
      if constexpr (kSolve) {
#pragma unroll
        for (int s = 0; s < Step::kSlots; ++s) {
          const int i = 8 * p + lane + 32 * s;
          if (i < kHalf) rhs[i] = b[s];
        }
      }
      if (lane < 8) inverses[8 * p + lane] = inverse;
      __syncwarp();
      with_constant<0, kTiles - 1>(p, [&](auto constant) {
        constexpr int kPanel = decltype(constant)::value;
        Step::read_back(m, panel, kPanel, kPanel, lane);
        finished(constant);
        Step::update(m, panel, kPanel, lane);
        if constexpr (kPanel + 1 < kTiles) {
          __syncwarp();  // the place of the next panel may be that of this one
          Step::publish(panel + step * kSlot, m, kPanel + 1, lane);
        }
      });
      __syncwarp();
      done(p);
    }
    return info;
  }

  // x = x L11^-H, panel by panel: X_p = x_p L_pp^-H by substitution, one row per lane, then
  // x_j -= X_p L_jp^H for j > p. L11 is in slots 1 .. kTiles, X goes to slots 0 .. kTiles - 1. With
  // kSolve, b -= X y of the right-hand side, whose first half is y = L11^-1 b.
  template <bool kSolve>
  __device__ __forceinline__ void solve_below(Block& x) const {
    T b[Step::kSlots];
    if constexpr (kSolve) {
#pragma unroll
      for (int s = 0; s < Step::kSlots; ++s) b[s] = vector()[kHalf + Step::row(0, s, lane)];
    }
    Step::publish(slot(0), x, 0, 0, lane);
    __syncwarp();
#pragma unroll 1
    for (int p = 0; p < kTiles; ++p) {
      T* panel = slot(p);
      const T* l = slot(p + 1);
      T y[Step::kSlots][8];
      R inverse[8];
      Step::load_rows(y, panel, 0, lane);
      load_vectors(inverse, inverses() + 8 * p, 8);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
#pragma unroll
        for (int s = 0; s < Step::kSlots; ++s) y[s][k] = scale(y[s][k], inverse[k]);
#pragma unroll
        for (int j = k + 1; j < 8; ++j) {
          const T l_jk = l[Step::column_at(k, j, p)];
#pragma unroll
          for (int s = 0; s < Step::kSlots; ++s) y[s][j] = sub_mul_conj(y[s][j], y[s][k], l_jk);
        }
      }
      if constexpr (kSolve) {
        T solved[8];
        load_vectors(solved, vector() + 8 * p, 8);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
#pragma unroll
          for (int s = 0; s < Step::kSlots; ++s) b[s] = sub_mul(b[s], y[s][k], solved[k]);
        }
      }
      __syncwarp();  // every lane has read its rows
      Step::store_columns(panel, y, 0, lane);
      __syncwarp();
      with_constant<0, kTiles - 1>(p, [&](auto constant) {
        constexpr int kPanel = decltype(constant)::value;
        if constexpr (!kSolve) Step::read_back(x, panel, kPanel, 0, lane);
        if constexpr (kPanel + 1 < kTiles) {
          Step::template subtract_products<1, true>(x, panel, l, kPanel + 1, 8, lane);
          __syncwarp();  // the place of the next panel is that of l
          Step::publish(panel + kSlot, x, kPanel + 1, 0, lane);
        }
      });
      __syncwarp();
    }
    if constexpr (kSolve) {
#pragma unroll
      for (int s = 0; s < Step::kSlots; ++s) {
        if (lane + 32 * s < kHalf) vector()[kHalf + lane + 32 * s] = b[s];
      }
      __syncwarp();
    }
  }

  // rhs = L^-H rhs for a factored block, from the last panel to the first:
  // x_p = L_pp^-H (rhs_p - sum over i > p of L_ip^H x_i). The sums are taken on the tiles; each
  // lane solves the block for itself.
  __device__ __forceinline__ void substitute_back(const Block& m, const R* inverses, T* rhs) const {
    T* tile = shared + kTileAt;
    T* sums = shared + kSumsAt;
    const int g = lane / 4, h = 2 * (lane % 4);
#pragma unroll 1
    for (int p = kTiles - 1; p >= 0; --p) {
      with_constant<0, kTiles - 1>(p, [&](auto constant) {
        constexpr int kPanel = decltype(constant)::value;
        T s0(0), s1(0);
#pragma unroll
        for (int i = kPanel + 1; i < kTiles; ++i) {
          const T x = rhs[8 * i + g];
          s0 = add_conj_mul(s0, m[i][kPanel][0], x);
          s1 = add_conj_mul(s1, m[i][kPanel][1], x);
        }
        store_column_sums(sums, s0, s1, lane);
        *reinterpret_cast<Pair<T>*>(tile + 8 * g + h) = {m[kPanel][kPanel][0],
                                                         m[kPanel][kPanel][1]};
      });
      __syncwarp();
      T z[8], row[8];
      R inverse[8];
      load_vectors(z, rhs + 8 * p, 8);
      load_vectors(row, sums, 8);
      load_vectors(inverse, inverses + 8 * p, 8);
#pragma unroll
      for (int k = 0; k < 8; ++k) z[k] = z[k] - row[k];
#pragma unroll
      for (int k = 7; k >= 0; --k) {
        load_vectors(row, tile + 8 * k, k);
        z[k] = scale(z[k], inverse[k]);
#pragma unroll
        for (int c = 0; c < k; ++c) z[c] = sub_mul_conj(z[c], z[k], row[c]);
      }
      T own = z[0];
#pragma unroll
      for (int k = 1; k < 8; ++k) {
        if (lane == k) own = z[k];
      }
      __syncwarp();  // every lane has read the right-hand side
      if (lane < 8) rhs[8 * p + lane] = own;
      __syncwarp();
    }
  }

  // y -= X^H x of the right-hand side, whose second half is x. Lane c sums column c of X and column
  // c + 32, in an order of its own, so that the lanes meet no bank conflict.
  __device__ __forceinline__ void subtract_transposed() const {
    constexpr int kColumns = ceil_div(kHalf, 32);
    T sum[kColumns];
#pragma unroll
    for (int s = 0; s < kColumns; ++s) sum[s] = vector()[min(lane + 32 * s, kHalf - 1)];
    if constexpr (Step::kOneOrder) {
#pragma unroll 4
      for (int step = 0; step < kHalf; ++step) {
        const int i = step ^ (lane / 8 & 1);
        const T x_i = vector()[kHalf + i];
#pragma unroll
        for (int s = 0; s < kColumns; ++s) {
          const int c = min(lane + 32 * s, kHalf - 1);
          sum[s] = sub_mul_conj(sum[s], x_i, slot(0)[Step::column_at(c, i % 8, i / 8)]);
        }
      }
    } else {
      T* x = shared + kTileAt;  // in the order of a line of `columns`
      for (int i = lane; i < kHalf; i += 32)
        x[Step::column_at(0, i % 8, i / 8)] = vector()[kHalf + i];
      __syncwarp();
#pragma unroll 8
      for (int step = 0; step < 64; ++step) {
        const int e = (lane + step) % 64;
        if (kTiles < 8 && (e % 8 ^ (e / 8 & 4)) >= kTiles) continue;
#pragma unroll
        for (int s = 0; s < kColumns; ++s) {
          sum[s] = sub_mul(sum[s], slot(0)[64 * min(lane + 32 * s, kHalf - 1) + e], x[e]);
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kColumns; ++s) {
      if (lane + 32 * s < kHalf) vector()[lane + 32 * s] = sum[s];
    }
    __syncwarp();
  }

  // m -= X X^H.
  __device__ __forceinline__ void subtract_square(Block& m) const {
    Step::template subtract_products<2, false>(m, slot(0), slot(0), 0, kHalf, lane);
    __syncwarp();
  }

  // Writes columns column .. column + columns - 1 (at most kHalf) of up to 8 rows of the result, to
  // l: where rows are whole vectors as vector(r, v), the v-th, else as single(r, c).
  template <class V, class F>
  __device__ __forceinline__ void store(T* l, int row, int column, int columns, V&& vector,
                                        F&& single) const {
    const int rows = min(8, n - row);
    T* to = l + row * n + column;
    if (n % kVector<T> == 0) {
      constexpr int kVectors = kHalf / kVector<T>, kAcross = kVectors > 16 ? 32 : 16;
#pragma unroll
      for (int r = lane / kAcross; r < 8; r += 32 / kAcross) {
#pragma unroll
        for (int v = lane % kAcross; v < round_up(kVectors, kAcross); v += kAcross) {
          if (r < rows && kVector<T> * v < columns) {
            *reinterpret_cast<Vector<T>*>(to + r * n + kVector<T> * v) = vector(r, v);
          }
        }
      }
    } else {
#pragma unroll 4
      for (int r = 0; r < 8; ++r) {
#pragma unroll
        for (int c = lane; c < round_up(kHalf, 32); c += 32) {
          // Before the branch: many reads on their way.
          const T value = single(r, kHalf % 32 == 0 ? c : min(c, kHalf - 1));
          if (r < rows && c < columns) to[r * n + c] = value;
        }
      }
    }
  }
  __device__ __forceinline__ void store_zeros(T* l, int row, int column, int columns) const {
    store(
        l, row, column, columns, [](int, int) { return Vector<T>{}; },
        [](int, int) { return T(0); });
  }

  // Where entry (r, c) of 8 rows of L lies on its way out, against bank conflicts: of floats, tile
  // j in column j ^ r of tiles, else as panels keep it.
  static __device__ __forceinline__ int staged_at(int r, int c) {
    return kIsComplex<T> ? Step::column_at(c % 8, r, c / 8) : 64 * r + 8 * (c / 8 ^ r) + c % 8;
  }
  // Row i of tiles of a block of L, tiles 0 .. last -> stage, one slot.
  __device__ __forceinline__ void put_tiles(T* stage, const Block& m, int i, int last) const {
    const int g = lane / 4, h = 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j > last) continue;
      if constexpr (kIsComplex<T>) {
        Step::put_pair(stage, 8 * j + g, h, m[i][j]);
      } else {
        *reinterpret_cast<Pair<T>*>(stage + staged_at(g, 8 * j + h)) = {m[i][j][0], m[i][j][1]};
      }
    }
  }
  // stage -> l, and zeros right of the last tile.
  __device__ __forceinline__ void store_tiles(T* l, int row, int column, int columns,
                                              const T* stage, int last) const {
    store(
        l, row, column, columns,
        [=](int r, int v) {
          const int c = kVector<T> * v;
          const auto staged = *reinterpret_cast<const Vector<T>*>(stage + staged_at(r, c));
          return c / 8 <= last ? staged : Vector<T>{};
        },
        [=](int r, int c) {
          const T staged = stage[staged_at(r, c)];
          return c / 8 <= last ? staged : T(0);
        });
  }

  // Panel `panel` of a block of L as rows of U = L^T, tiles first .. on, and zeros left of them.
  __device__ __forceinline__ void store_panel(T* u, int row, int column, int columns,
                                              const T* panel, int first) const {
    const auto single = [=](int k, int c) {
      const T entry = panel[Step::column_at(k, c % 8, c / 8)];
      return c / 8 >= first ? entry : T(0);
    };
    store(
        u, row, column, columns,
        [=](int k, int v) {
          Vector<T> entries;
#pragma unroll
          for (int z = 0; z < kVector<T>; ++z) entries.v[z] = single(k, kVector<T> * v + z);
          return entries;
        },
        single);
  }
};

}  // namespace jax_batched::cuda
