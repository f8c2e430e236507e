// QR factorizations and products with Q of matrices of any size: a block of threads for each.
//
// A panel is kWidth columns in registers: a lane holds kColumns of them in every kStep-th row, up
// to kSlots rows. From the left to the right, the panels before it are applied to each, which are
// read again from where they were stored; then it is factored itself:
//   step k: the rows of x, column k below its pivot, go to the lanes of the other columns by
//           shuffles; sums x^H a_c over the rows of each lane are added up in shared memory; and
//           a_c -= w_c u,  w_c = phi u^H a_c.
// A panel's product of reflections is I - V T V^H. Applied to others,
//   W = V^H C,  Y = T W (of the adjoint T^H W),  C -= V Y,
// with V in shared memory, C in registers. Products with earlier columns of the panel, which step k
// has for nothing, are V^H V, of which T is made. Q is formed from the right to the left, as panels
// of it take the places of those of V that are not needed any more.
#pragma once

#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/layout/view.cuh"
#include "ffi/cuda/qr/reflection.cuh"
#include "ffi/problems/qr.h"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

template <class T, int kWarps, int kSlots, int kWidth, int kColumns>
struct BlockQr {
  using R = Real<T>;
  static constexpr int V = kVector<T>;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kGroups = kWidth / kColumns;  // of lanes with the same columns
  static constexpr int kRowLanes = 32 / kGroups;
  static constexpr int kStep = kWarps * kRowLanes;
  static constexpr int kRows = kStep * kSlots;
  static constexpr int kChunk = kSlots % 4 == 0 ? 4 : 1;  // of slots that are left out together
  static constexpr int kPass = 128 / (kColumns * sizeof(T));  // reflections of W at a time
  static constexpr int kSums = kPass * kColumns;              // of a lane at a time
  static constexpr int kLaneSums = kSums / kRowLanes;         // of them, in the end
  static constexpr int kStride = kWidth + V;                  // of rows of V and T
  static constexpr int kTile = 4;                             // rows of Y of a thread
  static_assert(kRowLanes <= kSums && kWidth % kPass == 0 && kColumns % V == 0);

  struct Fixed {
    alignas(16) T w[kWarps][kWidth][kWidth];  // of each warp, columns as lanes have them
    alignas(16) T y[kWidth][kWidth];          // and V^H V while a panel is factored
    alignas(16) T tails[2][kWarps][kWidth];   // of this step and the one before
    alignas(16) T tops[2][kWidth];
    T inverses[kWidth], taus[kWidth];
    R largest[kWarps][kWidth];
  };

  const int m;
  Fixed& fixed;
  T* const v;   // m rows of a panel
  T* const ts;  // T of each panel
  const int thread, warp, lane, group, row_lane;
  T a[kSlots][kColumns];
  int exponents[kColumns];  // by which columns are scaled
  bool finite = true;
  int turn = 0;  // of the two buffers of sums

  // Of R alone, V is kept below R: of more rows than columns one panel can do without.
  static bool has_place(const QrProblem& p) {
    return p.mode != QrProblem::kR || p.m <= p.n || p.n <= kWidth;
  }
  static __host__ __device__ constexpr int panels(int k) { return ceil_div(k, kWidth); }
  static __host__ __device__ constexpr size_t bytes(int m, int k) {
    return sizeof(Fixed) + sizeof(T) * kStride * (size_t(m) + size_t(panels(k)) * kWidth);
  }

  __device__ __forceinline__ explicit BlockQr(int m)
      : m(m),
        fixed(*reinterpret_cast<Fixed*>(dynamic_shared)),
        v(reinterpret_cast<T*>(dynamic_shared + sizeof(Fixed))),
        ts(v + m * kStride),
        thread(threadIdx.x),
        warp(thread / 32),
        lane(thread % 32),
        group(lane % kGroups),
        row_lane(lane / kGroups) {}

  static __device__ __forceinline__ void sync() {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ int row(int s) const {
    return s * kStep + warp * kRowLanes + row_lane;
  }
  // In its panel.
  __device__ __forceinline__ int column(int j) const { return group + kGroups * j; }
  __device__ __forceinline__ T* t(int panel) const { return ts + panel * kWidth * kStride; }

  // Calls f(s) for the slots that have rows from `begin` on, and maybe a few others.
  template <class F>
  __device__ __forceinline__ void for_slots(int begin, const F& f) const {
#pragma unroll
    for (int first = 0; first < kSlots; first += kChunk) {
      if ((first + kChunk) * kStep <= begin || first * kStep >= m) continue;
#pragma unroll
      for (int s = first; s < first + kChunk; ++s) f(s);
    }
  }

  // a = entry(row, column of the panel), for rows of the matrix.
  template <class Entry>
  __device__ __forceinline__ void fill(const Entry& entry) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        a[s][j] = row(s) < m ? entry(row(s), column(j)) : T(R(0));
      }
    }
  }
  // Of `columns` from `begin` on, those that a matrix in memory has.
  __device__ __forceinline__ void load(const T* from, int ld, int begin, int columns) {
    fill([&](int i, int c) {
      return begin + c < columns ? from[i * ld + begin + c] : T(R(0));
    });
  }
  // f(row, column of the panel, entry), for rows of the matrix.
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (row(s) >= m) continue;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) f(row(s), j, a[s][j]);
    }
  }
  __device__ __forceinline__ void store(T* to, int ld, int begin, int columns) const {
    each([&](int i, int j, T x) {
      if (begin + column(j) < columns) to[i * ld + begin + column(j)] = x;
    });
  }

  __device__ __forceinline__ void scale_columns() {
    R largest[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      largest[j] = R(0);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) largest[j] = fmax(largest[j], largest_part(a[s][j]));
#pragma unroll
      for (int mask = 16; mask >= kGroups; mask /= 2) {
        largest[j] = fmax(largest[j], shuffle_xor(largest[j], mask));
      }
      if (row_lane == 0) fixed.largest[warp][column(j)] = largest[j];
    }
    sync();
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      R most = R(0);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) most = fmax(most, fixed.largest[w][column(j)]);
      exponents[j] = column_exponent(most);
      const R by = power_of_two<R>(-exponents[j]);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) a[s][j] = scale(a[s][j], by);
    }
  }
  // What is in the panel at column j, of R.
  __device__ __forceinline__ T unscaled(T x, int j) const {
    return times_power_of_two(x, exponents[j]);
  }

  // The rows of V from `begin` on, of which `from` has the part below the diagonal, to shared
  // memory; `count` of its columns are there.
  __device__ __forceinline__ void stage(const T* from, int ld, int begin, int count) {
    const T* panel = from + begin;
#pragma unroll 4
    for (int e = thread; e < (m - begin) * kWidth; e += kThreads) {
      const int i = begin + e / kWidth, l = e % kWidth;
      T* to = v + i * kStride + l;
      if (l < count && i > begin + l) {
        copy_async(to, panel + i * ld + l);
      } else {
        *to = T(R(l < count && i == begin + l ? 1 : 0));
      }
    }
    commit_copies();
    wait_for_copies<0>();
  }

  // Panel `panel`, whose V is staged, applied to this one. All wait for V and T before, and before
  // V is overwritten.
  template <bool kAdjoint>
  __device__ __forceinline__ void apply(int panel) {
    multiply_adjoint(panel * kWidth);
    make_y<kAdjoint>(t(panel));
    sync();
    subtract_product(panel * kWidth);
  }

  // Factors columns `begin`, ..., of which `steps` are reflected.
  __device__ __forceinline__ void factor(int begin, int steps) {
    T inverse[kColumns], beta[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      inverse[j] = beta[j] = T(R(0));
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g) {
        const int k = j * kGroups + g;
        if (k >= steps) break;
        const auto h = step(begin, j, g);
        finite = finite && h.finite;
        if (group == g) {
          inverse[j] = h.inverse;
          beta[j] = h.beta;
        }
        if (thread == 0) {
          fixed.inverses[k] = h.inverse;
          fixed.taus[k] = h.tau;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int pivot = begin + column(j);
      if (column(j) >= steps) continue;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (row(s) > pivot) a[s][j] = product(a[s][j], inverse[j]);
        if (row(s) == pivot) a[s][j] = beta[j];
      }
    }
  }

  // V of the panel that was factored to shared memory.
  __device__ __forceinline__ void keep(int begin, int steps) const {
    each([&](int i, int j, T x) {
      const int c = column(j);
      if (i < begin) return;
      const bool below = c < steps && i > begin + c;
      v[i * kStride + c] = below ? x : T(R(c < steps && i == begin + c ? 1 : 0));
    });
  }

  // T, from z = V^H V (in `y`, of vectors that are not multiplied by their inverses yet): with
  // column k, t_kk = tau_k and t_ik = -tau_k sum_{i<=p<k} t_ip z_pk. Lane i has row i.
  __device__ __forceinline__ void make_t(int panel, int steps) {
    if (thread >= 32) return;
    const int i = min(lane, kWidth - 1);
    T sums[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[k] = T(R(0));
    T* own = t(panel) + i * kStride;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const bool there = k < steps;
      const T tau = there ? fixed.taus[k] : T(R(0));
      const T inverse = there ? fixed.inverses[k] : T(R(0));
      T of = T(R(0));
      if (i == k) of = tau;
      if (i < k && there) of = product(product(-tau, inverse), sums[k]);
      if (lane < kWidth) own[k] = of;
      if (k + 1 == kWidth) break;
      const T by = product(of, conj(inverse));
#pragma unroll
      for (int c = k + 1; c < kWidth; ++c) {
        sums[c] = add_mul(sums[c], by, c < steps ? fixed.y[k][c] : T(R(0)));
      }
    }
  }

  // T of a panel whose V is staged, and of whose taus `count` are given.
  __device__ __forceinline__ void make_t_of_staged(int panel, const T* taus, int count) {
    const int begin = panel * kWidth;
    fill([&](int i, int c) { return i < begin ? T(R(0)) : v[i * kStride + c]; });
    multiply_adjoint(begin);
    for (int e = thread; e < kWidth * kWidth; e += kThreads) {
      const int l = e / kWidth, c = e % kWidth;
      fixed.y[l][c] = fixed.w[0][l][c % kGroups * kColumns + c / kGroups];
    }
    if (thread < kWidth) {
      fixed.inverses[thread] = T(R(1));
      fixed.taus[thread] = thread < count ? taus[thread] : T(R(0));
    }
    sync();
    make_t(panel, count);
    sync();
  }

 private:
  static __device__ __forceinline__ T product(T a, T b) { return add_mul(T(R(0)), a, b); }

  __device__ __forceinline__ Reflection<T> step(int begin, int j, int g) {
    const int k = j * kGroups + g, pivot = begin + k;
    Reflection<T> h;
    T x[kSlots], sums[kColumns], tops[kColumns];
#pragma unroll 1
    for (int raises = 0;; ++raises) {
      auto& tails = fixed.tails[turn];
      auto& top = fixed.tops[turn];
      turn ^= 1;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] = T(R(0));
      for_slots(pivot, [&](int s) {
        x[s] = shuffle(a[s][j], row_lane * kGroups + g);
        if (row(s) == pivot) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) top[group * kColumns + c] = a[s][c];
        }
        if (row(s) <= pivot) x[s] = T(R(0));
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums[c] = add_conj_mul(sums[c], x[s], a[s][c]);
      });
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int mask = 16; mask >= kGroups; mask /= 2) {
          sums[c] = sums[c] + shuffle_xor(sums[c], mask);
        }
        if (row_lane == 0) tails[warp][group * kColumns + c] = sums[c];
      }
      sync();
      const int own = g * kColumns + j;
      R tail = real(tails[0][own]);
#pragma unroll
      for (int w = 1; w < kWarps; ++w) tail += real(tails[w][own]);
      const T alpha = top[own];
      bool has_tail = true;
      if (!(tail >= SquareRange<R>::kSmallest)) {
        bool nonzero = false;
        for_slots(pivot, [&](int s) { nonzero = nonzero || !is_zero(x[s]); });
        has_tail = pivot + 1 < m && any(nonzero);
        if (tail + square(alpha) < SquareRange<R>::kSmallest &&
            raises < SquareRange<R>::kMostRaises && (has_tail || !is_real(alpha))) {
          if (group == g) {
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
              a[s][j] = scale(a[s][j], power_of_two<R>(SquareRange<R>::kRaise));
            }
            exponents[j] -= SquareRange<R>::kRaise;
          }
          continue;
        }
      }
      h = Reflection<T>::of(alpha, tail, has_tail);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        sums[c] = tails[0][group * kColumns + c];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) sums[c] = sums[c] + tails[w][group * kColumns + c];
        tops[c] = top[group * kColumns + c];
      }
      break;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      sums[c] = add_conj_mul(sums[c], h.first, tops[c]);
      if (warp == 0 && row_lane == 0 && column(c) < k) {
        fixed.y[column(c)][k] = conj(sums[c]);
      }
      if (column(c) <= k) sums[c] = T(R(0));
      sums[c] = product(h.phi, sums[c]);
    }
    for_slots(pivot, [&](int s) {
      const T u = row(s) == pivot ? h.first : x[s];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) a[s][c] = sub_mul(a[s][c], u, sums[c]);
    });
    return h;
  }

  static __device__ __forceinline__ bool any(bool mine) {
    if constexpr (kWarps == 1) {
      return __any_sync(kFullWarp, mine);
    } else {
      return __syncthreads_or(mine);
    }
  }

  // Sums over the lanes' rows: of kCount values, each lane keeps 1 / kRowLanes, from `first` on.
  static __device__ __forceinline__ int add_up(T (&sums)[kSums], int lane) {
    int first = 0;
    int count = kSums / 2;
#pragma unroll
    for (int mask = 16; mask >= kGroups; mask /= 2) {
      const bool upper = lane & mask;
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i) {
        if (i >= count) continue;
        const T keep = upper ? sums[i + count] : sums[i];
        const T pass = upper ? sums[i] : sums[i + count];
        sums[i] = keep + shuffle_xor(pass, mask);
      }
      first += upper ? count : 0;
      count /= 2;
    }
    return first;
  }

  // W = V^H C, in w[0].
  __device__ __forceinline__ void multiply_adjoint(int begin) {
#pragma unroll 1
    for (int l = 0; l < kWidth; l += kPass) {
      T sums[kSums];
#pragma unroll
      for (int f = 0; f < kSums; ++f) sums[f] = T(R(0));
      for_slots(begin, [&](int s) {
        const T* at = v + row(s) * kStride + l;
        const bool inside = row(s) >= begin && row(s) < m;
#pragma unroll
        for (int q = 0; q < kPass; q += V) {
          const Vector<T> of = inside ? *reinterpret_cast<const Vector<T>*>(at + q) : Vector<T>{};
#pragma unroll
          for (int z = 0; z < V; ++z) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
              T& sum = sums[(q + z) * kColumns + c];
              sum = add_conj_mul(sum, of.v[z], a[s][c]);
            }
          }
        }
      });
      const int first = add_up(sums, lane);
#pragma unroll
      for (int f = 0; f < kLaneSums; ++f) {
        const int at = first + f;
        fixed.w[warp][l + at / kColumns][group * kColumns + at % kColumns] = sums[f];
      }
    }
    sync();
    if constexpr (kWarps > 1) {
      T* w = &fixed.w[0][0][0];
      for (int e = thread * V; e < kWidth * kWidth; e += kThreads * V) {
        Vector<T> sum = *reinterpret_cast<Vector<T>*>(w + e);
#pragma unroll
        for (int other = 1; other < kWarps; ++other) {
          const auto of = *reinterpret_cast<Vector<T>*>(w + other * kWidth * kWidth + e);
#pragma unroll
          for (int z = 0; z < V; ++z) sum.v[z] = sum.v[z] + of.v[z];
        }
        *reinterpret_cast<Vector<T>*>(w + e) = sum;
      }
      sync();
    }
  }

  template <bool kAdjoint>
  __device__ __forceinline__ void make_y(const T* t) {
    for (int task = thread; task < kWidth / kTile * kGroups; task += kThreads) {
      const int l = task / kGroups * kTile, c = task % kGroups * kColumns;
      T sums[kTile][kColumns];
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sums[i][j] = T(R(0));
      }
#pragma unroll 4
      for (int p = 0; p < kWidth; ++p) {
        T w[kColumns];
#pragma unroll
        for (int j = 0; j < kColumns; j += V) {
          const auto of = *reinterpret_cast<const Vector<T>*>(&fixed.w[0][p][c + j]);
#pragma unroll
          for (int z = 0; z < V; ++z) w[j + z] = of.v[z];
        }
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
          const T by = kAdjoint ? conj(t[p * kStride + l + i]) : t[(l + i) * kStride + p];
#pragma unroll
          for (int j = 0; j < kColumns; ++j) sums[i][j] = add_mul(sums[i][j], by, w[j]);
        }
      }
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) fixed.y[l + i][c + j] = sums[i][j];
      }
    }
  }

  // C -= V Y.
  __device__ __forceinline__ void subtract_product(int begin) {
#pragma unroll 1
    for (int l = 0; l < kWidth; l += V) {
      T y[V][kColumns];
#pragma unroll
      for (int z = 0; z < V; ++z) {
#pragma unroll
        for (int j = 0; j < kColumns; j += V) {
          const auto of =
              *reinterpret_cast<const Vector<T>*>(&fixed.y[l + z][group * kColumns + j]);
#pragma unroll
          for (int q = 0; q < V; ++q) y[z][j + q] = of.v[q];
        }
      }
      for_slots(begin, [&](int s) {
        const bool inside = row(s) >= begin && row(s) < m;
        const T* at = v + row(s) * kStride + l;
        const Vector<T> of = inside ? *reinterpret_cast<const Vector<T>*>(at) : Vector<T>{};
#pragma unroll
        for (int z = 0; z < V; ++z) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) a[s][c] = sub_mul(a[s][c], of.v[z], y[z][c]);
        }
      });
    }
  }
};

// Entries of a matrix of which only zeros below the diagonal are kept, or none.
template <class T>
__device__ __forceinline__ void spoil(T* to, int rows, int columns, bool keeps_zeros, int thread,
                                      int threads) {
  for (int i = 0; i < rows; ++i) {
    for (int j = (keeps_zeros ? i : 0) + thread; j < columns; j += threads) {
      to[i * columns + j] = quiet_nan<T>();
    }
  }
}

template <class T, int kWarps, int kSlots, int kWidth, int kColumns, int kCap>
__global__ void __launch_bounds__(32 * kWarps, kCap) qr_block_kernel(const QrProblem p) {
  using Qr = BlockQr<T, kWarps, kSlots, kWidth, kColumns>;
  const int64_t entry = blockIdx.x;
  if (skips(p, entry)) return;
  const int m = p.m, n = p.n, k = p.reflections();
  const int q_columns = p.q_columns(), r_rows = p.r_rows();
  const bool is_raw = p.mode == QrProblem::kRaw;
  const T* from = matrix_at<const T>(p.a, entry, m, n);
  T* r = p.r.at<T>(entry, r_rows, n);
  T* q = p.has_q() ? p.q.at<T>(entry, m, q_columns) : nullptr;
  // Where V is kept: rows of it where Q or the reflections will be, or else below R.
  T* const home = q != nullptr ? q : r;
  const int ld = q != nullptr ? q_columns : n;

  Qr qr(m);
  for (int begin = 0; begin < n; begin += kWidth) {
    qr.load(from, n, begin, n);
    qr.scale_columns();
    for (int before = 0; before < min(begin, k); before += kWidth) {
      Qr::sync();
      qr.stage(home, ld, before, min(kWidth, k - before));
      Qr::sync();
      qr.template apply<true>(before / kWidth);
    }
    const int steps = max(min(kWidth, k - begin), 0);
    Qr::sync();
    if (steps > 0) qr.factor(begin, steps);
    const bool keeps = steps > 0 && (q != nullptr || n > kWidth);
    if (keeps) qr.keep(begin, steps);
    qr.each([&](int i, int j, T x) {
      const int c = begin + qr.column(j);
      if (c >= n) return;
      if (i <= c || c >= k) {
        if (i < r_rows) r[i * n + c] = qr.unscaled(x, j);
      } else if (i < (q != nullptr ? m : r_rows)) {
        home[i * ld + c] = x;
        if (q != nullptr && i < r_rows) r[i * n + c] = T(Real<T>(0));
      }
    });
    Qr::sync();
    if (is_raw && qr.thread < steps) {
      p.taus.at<T>(entry, k)[begin + qr.thread] = qr.fixed.taus[qr.thread];
    }
    if (keeps) qr.make_t(begin / kWidth, steps);
  }
  if (q != nullptr) {
    int staged = (k - 1) / kWidth * kWidth;  // the last panel's V is still there if it was the last
    if (staged + kWidth < n) staged = -1;
    for (int begin = (q_columns - 1) / kWidth * kWidth; begin >= 0; begin -= kWidth) {
      qr.fill([&](int i, int c) { return T(Real<T>(i == begin + c ? 1 : 0)); });
      for (int panel = min(begin, (k - 1) / kWidth * kWidth); panel >= 0; panel -= kWidth) {
        Qr::sync();
        if (staged != panel) {
          qr.stage(q, ld, panel, min(kWidth, k - panel));
          staged = panel;
          Qr::sync();
        }
        qr.template apply<false>(panel / kWidth);
      }
      qr.store(q, ld, begin, q_columns);
    }
  } else if (!is_raw) {
    Qr::sync();
    for (int i = 1; i < r_rows; ++i) {
      for (int j = qr.thread; j < min(i, n); j += Qr::kThreads) r[i * n + j] = T(Real<T>(0));
    }
  }
  if (!qr.finite) {
    Qr::sync();
    spoil(r, r_rows, n, !is_raw, qr.thread, Qr::kThreads);
    if (q != nullptr) spoil(q, m, q_columns, false, qr.thread, Qr::kThreads);
    if (is_raw) spoil(p.taus.at<T>(entry, k), 1, k, false, qr.thread, Qr::kThreads);
  }
}

// The first columns of Q, or products with it.
template <class T, class P, int kWarps, int kSlots, int kWidth, int kColumns, int kCap>
__global__ void __launch_bounds__(32 * kWarps, kCap) qr_product_block_kernel(const P p) {
  using Qr = BlockQr<T, kWarps, kSlots, kWidth, kColumns>;
  constexpr bool kForms = std::is_same_v<P, HouseholderProductProblem>;
  const int64_t entry = blockIdx.x;
  if (skips(p, entry)) return;
  const int m = p.m, n = p.n, k = static_cast<int>(p.k);
  const T* a = matrix_at<const T>(p.a, entry, m, n);
  const T* taus = matrix_at<const T>(p.taus, entry, k);
  Qr qr(m);
  for (int panel = 0; panel < k; panel += kWidth) {
    const int count = min(kWidth, k - panel);
    Qr::sync();
    qr.stage(a, n, panel, count);
    Qr::sync();
    qr.make_t_of_staged(panel / kWidth, taus + panel, count);
  }
  int columns = n;
  if constexpr (!kForms) columns = static_cast<int>(p.nrhs);
  const int last = (k - 1) / kWidth * kWidth;
  int staged = last;
  const auto apply = [&](int panel, auto adjoint) {
    Qr::sync();
    if (staged != panel) {
      qr.stage(a, n, panel, min(kWidth, k - panel));
      staged = panel;
      Qr::sync();
    }
    qr.template apply<decltype(adjoint)::value>(panel / kWidth);
  };
  for (int begin = 0; begin < columns; begin += kWidth) {
    if constexpr (kForms) {
      qr.fill([&](int i, int c) { return T(Real<T>(i == begin + c ? 1 : 0)); });
      for (int panel = min(begin, last); k > 0 && panel >= 0; panel -= kWidth) {
        apply(panel, std::false_type{});
      }
      qr.store(p.q.template at<T>(entry, m, n), n, begin, n);
    } else {
      qr.load(matrix_at<const T>(p.c, entry, m, columns), columns, begin, columns);
      if (p.adjoint) {
        for (int panel = 0; panel < k; panel += kWidth) apply(panel, std::true_type{});
      } else {
        for (int panel = last; k > 0 && panel >= 0; panel -= kWidth) {
          apply(panel, std::false_type{});
        }
      }
      qr.store(p.x.template at<T>(entry, m, columns), columns, begin, columns);
    }
  }
}

}  // namespace jax_batched::cuda
