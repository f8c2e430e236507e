// The 8-wide panel step of a Cholesky factorization by one warp, for kGroup matrices at once.
//
// The panel (columns 8p..8p+7, rows from 8p on) goes from the fragments to shared memory (`rows`),
// is factored with one lane per row, and comes back (`columns`) in the order in which the update of
// the trailing tiles reads it: columns[k][g][i] is entry (8i + g, 8p + k), so one 16-byte load
// brings the operands of 4 float tiles. Shared memory limits that update, not arithmetic, so it is
// plain FMA.
#pragma once

#include <type_traits>

#include "ffi/cuda/cholesky/careful.cuh"
#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/tensor.cuh"
#include "ffi/cuda/layout/fragment.cuh"

namespace jax_batched::cuda {

// kDense keeps both orders in one place, without padding, for kernels that keep many panels: a
// barrier must come between reading one and writing the other. The vectors of each 8 elements
// change places with the line, against bank conflicts. Complex elements, of which a vector holds
// few, have one order, `rows`.
template <class T, int kTiles, int kGroup, bool kDense = false>
struct Panel {
  static constexpr bool kOneOrder = kDense && kIsComplex<T>;
  // Whether products of complex128 run on the tensor cores, fragments as operands. Of more tiles
  // the operands do not fit the registers.
  static constexpr bool kTensor = std::is_same_v<T, Complex<double>> && kTiles <= 5;
  static_assert(!kDense || kOneOrder || (kTiles <= 8 && kVector<T> == 4), "lines of two vectors");
  static constexpr int kLanes = 32 / kGroup;                   // lanes per matrix, one per row
  static constexpr int kSlots = ceil_div(8 * kTiles, kLanes);  // rows per lane
  static constexpr int kRow = 8 + kVector<T>;                  // stride of `rows`
  static constexpr int kTile = kVector<T> * make_odd(ceil_div(kTiles, kVector<T>));
  static constexpr int kRowsElements = kDense ? 0 : 8 * kTiles * kRow;
  static constexpr int kColumnsElements = kOneOrder ? 64 * kTiles : kDense ? 512 : 64 * kTile;
  static constexpr int kElements = kRowsElements + kColumnsElements;  // per matrix

  // Neighbours in `columns`: entries of this many tiles.
  static constexpr int kAlong = kOneOrder ? 1 : kVector<T>;
  struct alignas(kAlong * sizeof(T)) Entries {
    T v[kAlong];
  };

  static __device__ __forceinline__ T* columns(T* panel) { return panel + kRowsElements; }
  static __device__ __forceinline__ const T* columns(const T* panel) {
    return panel + kRowsElements;
  }

  // Where entry (i, j) of the panel lies in `rows`, and entry (8i + g, k) in `columns`; of dense
  // panels one after the other k counts on.
  static __device__ __forceinline__ int row_at(int i, int j) {
    return kDense ? 8 * i + (j ^ (i & (8 - kVector<T>))) : i * kRow + j;
  }
  static __device__ __forceinline__ int column_at(int k, int g, int i) {
    if (kOneOrder) return k / 8 * kElements + row_at(8 * i + g, k % 8);
    return kDense ? 64 * k + 8 * g + (i ^ (g & 4)) : (8 * k + g) * kTile + i;
  }

  // Entries (i, j) and (i, j + 1), j even, of `rows`.
  static __device__ __forceinline__ void put_pair(T* panel, int i, int j, const T (&pair)[2]) {
    if constexpr (kVector<T> > 1) {
      *reinterpret_cast<Pair<T>*>(panel + row_at(i, j)) = {pair[0], pair[1]};
    } else {
      panel[row_at(i, j)] = pair[0];
      panel[row_at(i, j + 1)] = pair[1];
    }
  }

  // Slot s of lane r holds row 8p + r + s * kLanes; this many of them hold rows of panel p.
  static __device__ __forceinline__ constexpr int slots(int p) {
    return ceil_div(8 * (kTiles - p), kLanes);
  }
  static __device__ __forceinline__ bool in_use(int p, int s) { return s < slots(p); }
  static __device__ __forceinline__ int row(int p, int s, int r) {
    return min(8 * p + r + s * kLanes, 8 * kTiles - 1);
  }

  // Fragments of block column p, tiles first .. kTiles - 1 -> rows.
  static __device__ __forceinline__ void publish(T* panel, const Fragment<T, kTiles>& m, int p,
                                                 int first, int lane) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i < first) continue;
      put_pair(panel, 8 * i + lane / 4, 2 * (lane % 4), m[i][p]);
    }
  }
  static __device__ __forceinline__ void publish(T* panel, const Fragment<T, kTiles>& m, int p,
                                                 int lane) {
    publish(panel, m, p, p, lane);
  }

  static __device__ __forceinline__ void load_rows(T (&x)[kSlots][8], const T* panel, int p,
                                                   int r) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (!in_use(p, s)) continue;
#pragma unroll
      for (int k = 0; k < 8; k += kVector<T>) {
        const auto v = *reinterpret_cast<const Vector<T>*>(panel + row_at(row(p, s, r), k));
#pragma unroll
        for (int z = 0; z < kVector<T>; ++z) x[s][k + z] = v.v[z];
      }
    }
  }

  static __device__ __forceinline__ void store_columns(T* panel, const T (&x)[kSlots][8], int p,
                                                       int r) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (!in_use(p, s)) continue;
      const int i = 8 * p + r + s * kLanes;
      if (i >= 8 * kTiles) continue;
#pragma unroll
      for (int k = 0; k < 8; ++k) columns(panel)[column_at(k, i % 8, i / 8)] = x[s][k];
    }
  }

  // columns -> fragments of block column p, tiles first .. kTiles - 1.
  static __device__ __forceinline__ void read_back(Fragment<T, kTiles>& m, const T* panel, int p,
                                                   int first, int lane) {
    const T* from = columns(panel);
    const int g = lane / 4, h = 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kTiles; i += kAlong) {
      if (i + kAlong <= first) continue;
      const auto v0 = *reinterpret_cast<const Entries*>(from + column_at(h, g, i));
      const auto v1 = *reinterpret_cast<const Entries*>(from + column_at(h + 1, g, i));
#pragma unroll
      for (int z = 0; z < kAlong; ++z) {
        if (i + z >= kTiles || i + z < first) continue;
        m[i + z][p][0] = v0.v[z];
        m[i + z][p][1] = v1.v[z];
      }
    }
  }

  // Factors the panel: for each column k, with d the pivot,
  //   x_k *= 1 / sqrt(d);  x_j -= x_k conj(l_jk) for j > k,
  // where l_jk (row 8p + j) comes from the lane of that row by shuffle. With kSolve the right-hand
  // side b is one more column of the matrix, which gives y = L^-1 b: y_k = b_k / l_kk,
  // b_i -= l_ik y_k. `steps` is the number of columns of the matrix in this panel. Returns the root
  // of this lane's own pivot (lanes 0..7 of a matrix), 1 elsewhere; inverse gets its reciprocal.
  // Where a root is not plain the panel must go through repair(); with kAnyPivot every pivot is
  // handled here.
  template <bool kSolve, bool kAnyPivot = false>
  static __device__ __forceinline__ Real<T> factor(T (&x)[kSlots][8], T (&b)[kSlots], int p,
                                                   int steps, int r, Real<T>& inverse) {
    return factor_slots<kSolve, kAnyPivot>(x, b, slots(p), steps, r, inverse);
  }
  // The same of the first `used` slots, for a panel known at run time.
  template <bool kSolve, bool kAnyPivot = false>
  static __device__ __forceinline__ Real<T> factor_slots(T (&x)[kSlots][8], T (&b)[kSlots],
                                                         int used, int steps, int r,
                                                         Real<T>& inverse) {
    Real<T> own_root = 1;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k >= steps) continue;
      const Real<T> d = shuffle(real(x[0][k]), k, kLanes);
      T y;
      if constexpr (kSolve) y = shuffle(b[0], k, kLanes);
      T column[8];
#pragma unroll
      for (int j = k + 1; j < 8; ++j) column[j] = shuffle(x[0][k], j, kLanes);
      const PivotRoot<Real<T>> pivot = kAnyPivot ? pivot_root(d) : pivot_root_in_range(d);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (s < used) x[s][k] = scale(x[s][k], pivot.inverse);
      }
#pragma unroll
      for (int j = k + 1; j < 8; ++j) {
        column[j] = scale(column[j], pivot.inverse);
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          if (s < used) x[s][j] = sub_mul_conj(x[s][j], x[s][k], column[j]);
        }
      }
      if constexpr (kSolve) {
        y = scale(y, pivot.inverse);
        if (r == k) b[0] = y;
        if (r > k) b[0] = sub_mul(b[0], x[0][k], y);
#pragma unroll
        for (int s = 1; s < kSlots; ++s) {
          if (s < used) b[s] = sub_mul(b[s], x[s][k], y);
        }
      }
      if (r == k) {
        x[0][k] = T(pivot.root);
        own_root = pivot.root;
        inverse = pivot.inverse;
      }
      if (r < k) x[0][k] = T(0);
    }
    return own_root;
  }

  // factor() of a panel known at run time: code for every number of slots.
  template <bool kSolve, int kUsed = kSlots>
  static __device__ __forceinline__ Real<T> factor_any(T (&x)[kSlots][8], T (&b)[kSlots], int p,
                                                       int r, Real<T>& inverse) {
    if constexpr (kUsed > 1) {
      if (slots(p) < kUsed) return factor_any<kSolve, kUsed - 1>(x, b, p, r, inverse);
    }
    return factor_slots<kSolve>(x, b, kUsed, 8, r, inverse);
  }

  // Factors the panel again, from `rows`, if a pivot of this lane's matrix was tiny, infinite or
  // not positive, and counts a failure (careful.cuh); matrices of the warp without such a pivot
  // keep what they have.
  template <bool kSolve>
  static __device__ __forceinline__ void repair(T (&x)[kSlots][8], T (&b)[kSlots], T* panel, T* rhs,
                                                int p, int steps, int lane, Real<T> root,
                                                Real<T>& inverse, int& info) {
    const unsigned odd = __ballot_sync(kFullWarp, !plain_root(root));
    if (odd == 0) return;
    const int r = lane % kLanes;
    const bool mine = (odd >> (lane - r) & 0xffu) != 0;
    T* rows = panel + row_at(8 * p, 0);  // multiples of 8 rows lie alike
    const int failed = factor_carefully<T>(
        mine, min(steps, 8), 8 * (kTiles - p), r, kLanes,
        [=](int i, int j) -> T& { return rows[row_at(i, j)]; }, kSolve ? rhs + 8 * p : nullptr,
        [&](int k, const PivotRoot<Real<T>>& pivot) {
          if (r == k) inverse = pivot.inverse;
        });
    if (mine) {
      if (info == 0 && failed != 0) info = 8 * p + failed;
      load_rows(x, panel, p, r);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (r < k) x[0][k] = T(0);
      }
      if constexpr (kSolve) {
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          if (in_use(p, s)) b[s] = rhs[row(p, s, r)];
        }
      }
    }
    __syncwarp();
  }

  // Trailing update, tiles (i, j) with i >= j > p: m_ij -= l_ip conj(l_jp)^T. Doubles run on the
  // tensor cores, with block column p of the fragments as both operands (tensor.cuh).
  static __device__ __forceinline__ void update(Fragment<T, kTiles>& m, const T* panel, int p,
                                                int lane) {
#if __CUDA_ARCH__ >= 800
    if constexpr (std::is_same_v<T, double>) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          if (i <= p) continue;
          const double a = -m[i][p][h];
#pragma unroll
          for (int j = 0; j <= i; ++j) {
            if (j > p) multiply_add(m[i][j], a, m[j][p][h]);
          }
        }
      }
      return;
    }
    if constexpr (kTensor) {
      T left[kTiles][2];
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) left[i][h] = m[i][p][h];
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if (j > p) subtract_column<false>(m, j, left, left[j]);
      }
      return;
    }
#endif
    // Two steps at a time where registers allow. Straight-line code would overflow the
    // instruction cache.
    constexpr int kUnroll = sizeof(T) == 4 && kGroup == 1 && kTiles > 5 && kTiles <= 8 ? 2 : 1;
    if (p + 1 < kTiles) subtract_products<kUnroll, false>(m, panel, panel, p + 1, 8, lane);
  }

 private:
  // m_ij -= a_i b^H, for i >= j unless kSquare, two tiles at a time.
  template <bool kSquare>
  static __device__ __forceinline__ void subtract_column(Fragment<T, kTiles>& m, int j,
                                                         const T (&a)[kTiles][2], const T (&b)[2]) {
#pragma unroll
    for (int i = 0; i < kTiles; i += 2) {
      const bool upper = kSquare || i >= j, lower = i + 1 < kTiles && (kSquare || i + 1 >= j);
      if (upper && lower) {
        subtract_product(m[i][j], m[i + 1][j], a[i], a[i + 1], b);
      } else if (upper) {
        subtract_product(m[i][j], a[i], b);
      } else if (lower) {
        subtract_product(m[i + 1][j], a[i + 1], b);
      }
    }
  }

 public:
  // m_ij -= sum over k < count of a_ik conj(b_jk) for tiles j >= first, and i >= j unless kSquare;
  // a and b are panels as `columns`, of 8 columns each, one after the other.
  template <int kUnroll, bool kSquare>
  static __device__ __forceinline__ void subtract_products(Fragment<T, kTiles>& m, const T* a,
                                                           const T* b, int first, int count,
                                                           int lane) {
    const T* own = columns(a);
    const T* across = columns(b);
    const int g = lane / 4, h = 2 * (lane % 4);
#if __CUDA_ARCH__ >= 800
    constexpr bool kFragments = kTensor && kOneOrder;
#else
    constexpr bool kFragments = false;
#endif
    if constexpr (kFragments) {
      const auto load = [=](T(&tile)[2], const T* panel, int i) {
        tile[0] = panel[row_at(8 * i + g, h)];
        tile[1] = panel[row_at(8 * i + g, h + 1)];
      };
#pragma unroll 1
      for (int k = 0; k < count; k += 8, own += kElements, across += kElements) {
        T left[kTiles][2];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          if (kSquare || i >= first) load(left[i], own, i);
        }
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          if (j < first) continue;
          T right[2];
          load(right, across, j);
          subtract_column<kSquare>(m, j, left, right);
        }
      }
    } else {
#pragma unroll kUnroll
      for (int k = 0; k < count; ++k) {
        T row[kTiles];
#pragma unroll
        for (int i = 0; i < kTiles; i += kAlong) {
          if (!kSquare && i + kAlong <= first) continue;
          const auto v = *reinterpret_cast<const Entries*>(own + column_at(k, g, i));
#pragma unroll
          for (int z = 0; z < kAlong; ++z) {
            if (i + z < kTiles) row[i + z] = v.v[z];
          }
        }
#pragma unroll
        for (int j = 0; j < kTiles; j += kAlong) {
          if (j + kAlong <= first) continue;
          const auto v0 = *reinterpret_cast<const Entries*>(across + column_at(k, h, j));
          const auto v1 = *reinterpret_cast<const Entries*>(across + column_at(k, h + 1, j));
#pragma unroll
          for (int z = 0; z < kAlong; ++z) {
            if (j + z < first || j + z >= kTiles) continue;
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
              if (!kSquare && i < j + z) continue;
              m[i][j + z][0] = sub_mul_conj(m[i][j + z][0], row[i], v0.v[z]);
              m[i][j + z][1] = sub_mul_conj(m[i][j + z][1], row[i], v1.v[z]);
            }
          }
        }
      }
    }
  }
};

}  // namespace jax_batched::cuda
