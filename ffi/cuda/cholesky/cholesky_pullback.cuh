// The cotangent of a Cholesky factor -> that of the matrix: L and the cotangent are read once, the
// result is written once; between them one triangle of it is in shared memory.
//
// S = L^-H (P + P^H) / 2 L^-1 with P = Phi(L^H G), G the conjugate of the cotangent, column by
// column from the last one (Murray, "Differentiation of the Cholesky decomposition", 2016, the
// reverse of the right-looking factorization). With Z = 2 S, T the columns after column c, l and g
// its parts below the diagonal in L and G:
//   Z_Tc = (g - Z_TT l) / l_cc,    Z_cc = (g_cc - Re(Z_Tc^H l)) / l_cc.
// Z_Tc may take the place of g. A column is needed by no later one save as part of Z, so L passes
// through in panels of 8 columns; the work, n^3 / 3 multiply-adds, is products of Z with panels: 8
// multiply-adds for an entry of Z of the thread's own and a row of the panel, which all threads
// share.
#pragma once

#include <cstdint>

#include "ffi/cuda/cholesky/policy.h"
#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/layout/view.cuh"
#include "ffi/cuda/runtime/launch.cuh"

namespace jax_batched::cuda {

// The lower triangle of a Hermitian matrix in blocks of kBlock rows (kOne: there is but one). A row
// ends with its diagonal block, which is there in full, and one entry of padding: pitches are odd,
// so that lanes meet no bank conflict along rows nor along columns.
template <class T, int kBlock, bool kOne>
struct BlockRows {
  T* entries;

  static __host__ __device__ __forceinline__ int block(int i) { return kOne ? 0 : i / kBlock; }
  static __host__ __device__ __forceinline__ int pitch(int block) {
    return kBlock * (block + 1) + 1;
  }
  // Where row r of a block begins: also, how many entries the rows before it have.
  static __host__ __device__ __forceinline__ int begin(int block, int r) {
    return kBlock * (kBlock * (block * (block + 1) / 2) + block) + r * pitch(block);
  }
  static __host__ __device__ __forceinline__ int begin(int i) {
    return begin(block(i), i - kBlock * block(i));
  }
  __device__ __forceinline__ T* row(int i) const { return entries + begin(i); }
  __device__ __forceinline__ T& operator()(int i, int j) const { return row(i)[j]; }
};

// A matrix of up to kLanes rows per group of kLanes lanes, or (kWide, kLanes = 32) one of any size
// per block of threads: a thread per row.
template <class T, int kLanes, bool kWide>
struct PullbackKernel {
  static constexpr int kPanel = 8;                             // columns
  static constexpr int kBlockWarps = sizeof(T) == 16 ? 1 : 4;  // of many matrices
  static constexpr int kMatrices = kWide ? 1 : 32 * kBlockWarps / kLanes;
  static constexpr int kSums = kPanel * (kPanel + 1) / 2;  // of each warp
  using Rows = BlockRows<T, kLanes, !kWide>;

  // For the register cap: what hides latency (and, kWide, what shared memory lets reside).
  static constexpr int kMaxThreads =
      kWide ? 32 * ceil_div(pullback_max_n(kDTypeOf<T>), 32) : 32 * kBlockWarps;
  static constexpr int kMinBlocks = sizeof(T) == 16 ? 1 : kWide ? 4 : sizeof(T) == 4 ? 7 : 5;

  static __host__ __device__ __forceinline__ int warps(int n) {
    return kWide ? ceil_div(n, kLanes) : 1;
  }
  static int threads(int n) { return 32 * (kWide ? warps(n) : kBlockWarps); }

  // Elements of shared memory of a matrix: two panels, what each warp adds to the diagonal block's
  // update, Z; whole vectors.
  static __host__ __device__ __forceinline__ int panel_begin(int n, int which) {
    return which * kPanel * (round_up(n, kPanel) - kPanel);
  }
  static __host__ __device__ __forceinline__ int sums_begin(int n) {
    return panel_begin(n, 1) + kPanel * round_up(n, kPanel);
  }
  static __host__ __device__ __forceinline__ int elements(int n) {
    return round_up(sums_begin(n) + warps(n) * kSums + Rows::begin(n), kVector<T>);
  }
  static size_t shared_bytes(int n) { return sizeof(T) * kMatrices * elements(n); }

  // Of the matrix that this thread works on.
  int n;
  bool upper;
  int member, members;  // this thread and all threads
  int lane, warp;
  T* panels;
  T* sums;
  Rows z;

  static __device__ __forceinline__ void sync() {
    if constexpr (kWide) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  __device__ __forceinline__ PullbackKernel(const CholeskyPullbackProblem& p, T* shared)
      : n(p.n),
        upper(p.upper),
        member(kWide ? threadIdx.x : threadIdx.x % kLanes),
        members(kWide ? blockDim.x : kLanes),
        lane(threadIdx.x % kLanes),
        warp(kWide ? threadIdx.x / 32 : 0) {
    if constexpr (!kWide) shared += threadIdx.x / kLanes * elements(n);
    panels = shared;
    sums = shared + sums_begin(n);
    z.entries = sums + warps(n) * kSums;
  }

  // Columns k, ..., k + 7 of L as the kernel sees it, a lower triangle; row i at 8 i. Panels take
  // turns in two places; the second one never has the first 8 rows.
  __device__ __forceinline__ T* panel(int k) const {
    return panels + panel_begin(n, k / kPanel % 2);
  }

  __device__ __forceinline__ int blocks() const { return Rows::block(n - 1) + 1; }

  // Calls f(a - b, z, x_ab) for the entries (a, b) of a row-major matrix x that are in tile (block,
  // column), z being entry (a, b) of Z, or if `transposed` (b, a).
  template <class X, class F>
  __device__ __forceinline__ void for_each_entry(int block, int column, bool transposed, X* x,
                                                 F&& f) const {
    const int all = members / kLanes;  // warps
    const int first = kLanes * block + warp, b = kLanes * column + lane;
    T* at =
        z.entries + (transposed ? Rows::begin(column, lane) + first : Rows::begin(block, warp) + b);
    const int step = all * (transposed ? 1 : Rows::pitch(block));
    const int end = b < n ? min(kLanes * (block + 1), n) : 0;
    x += first * n + b;
#pragma unroll 4
    for (int a = first; a < end; a += all, at += step, x += all * n) f(a - b, *at, *x);
  }

  // The cotangent's triangle, where Z will be. An upper one is the transpose of a lower one, as is
  // the factor: A = U^H U is conj(A) = U^T (U^T)^H.
  __device__ __forceinline__ void load_cotangent(const T* cotangent) const {
    for (int block = 0; block < blocks(); ++block) {
      for_each_entry(block, block, upper, cotangent, [&](int below, T& to, const T& from) {
        if (upper ? below <= 0 : below >= 0) copy_async(&to, &from);
      });
      const int begin = upper ? block + 1 : 0, end = upper ? blocks() : block;
      for (int column = begin; column < end; ++column) {
        for_each_entry(block, column, upper, cotangent,
                       [](int, T& to, const T& from) { copy_async(&to, &from); });
      }
    }
  }

  // Columns k, ..., k + 7 of L. A thread stays in a column; of a warp, lanes are neighbours in
  // global or in shared memory whichever triangle it is. What comes along above the diagonal is not
  // read.
  __device__ __forceinline__ void load_panel(const T* factor, int k) const {
    const bool fours = upper && members >= 32;
    const int c = fours ? member / 4 % kPanel : member % kPanel;
    const int first = fours ? member % 4 + member / 32 * 4 : member / kPanel;
    const int row = upper ? 1 : n, column = upper ? n : 1;
    const int step = members / kPanel;
    const T* from = factor + (k + first) * row + (k + c) * column;
    T* to = panel(k) + kPanel * (k + first) + c;
    const int end = k + c < n ? n : 0;
#pragma unroll 4
    for (int i = k + first; i < end; i += step, from += step * row, to += step * kPanel) {
      copy_async(to, from);
    }
  }

  // Zeros below the last panel, which may have fewer than 8 rows.
  __device__ __forceinline__ void pad_panel(int k) const {
    T* behind = panel(k) + kPanel * n;
    for (int e = member; e < kPanel * (round_up(n, kPanel) - n); e += members) behind[e] = T(0);
  }

  // 1 / l_cc of the panel's columns; whole warps.
  __device__ __forceinline__ void invert_diagonal(Real<T> (&inverse)[kPanel], int k,
                                                  const T* panel) const {
    const int r = lane % kPanel;
    const Real<T> own = Real<T>(1) / real(panel[kPanel * (k + r) + r]);
#pragma unroll
    for (int c = 0; c < kPanel; ++c) inverse[c] = shuffle(own, c, kPanel);
  }

  // sum(c) -= sum over `count` p of z_p l_pc, z_p (conjugated if kConjugate) `step` apart.
  template <bool kConjugate>
  static __device__ __forceinline__ void subtract_product(T (&sum)[kPanel], const T* from, int step,
                                                          const T* l, int count) {
#pragma unroll 4
    for (int p = 0; p < count; ++p) {
      const T own = kConjugate ? conj(from[p * step]) : from[p * step];
      T v[kPanel];
      load_vectors(v, l + kPanel * p, kPanel);
#pragma unroll
      for (int c = 0; c < kPanel; ++c) sum[c] = sub_mul(sum[c], own, v[c]);
    }
  }

  // A row of Z below the panel's diagonal block, all columns of the panel:
  //   Z_i = (g_i - Z_iT L_T) D^-1, D the diagonal block, T the rows after it.
  __device__ __forceinline__ void finish_row(int k, const T* panel) const {
    const int row = warp * kLanes + lane;
    const bool active = k + kPanel <= row && row < n;
    const int i = min(max(row, k + kPanel), n - 1);  // a lane without a row repeats another's
    const int own = Rows::block(i);
    T x[kPanel];
#pragma unroll
    for (int c = 0; c < kPanel; ++c) x[c] = conj(z(i, k + c));
#pragma unroll 1
    for (int q = Rows::block(k + kPanel); q < blocks(); ++q) {
      const int begin = max(k + kPanel, q * kLanes), count = min(n, (q + 1) * kLanes) - begin;
      const T* l = panel + kPanel * begin;
      if (q <= own) {
        subtract_product<false>(x, z.row(i) + begin, 1, l, count);
      } else {
        const T* from = z.entries + Rows::begin(q, begin - q * kLanes) + i;
        subtract_product<true>(x, from, Rows::pitch(q), l, count);
      }
    }
    Real<T> inverse[kPanel];
    invert_diagonal(inverse, k, panel);
#pragma unroll
    for (int c = kPanel - 1; c >= 0; --c) {
#pragma unroll
      for (int s = c + 1; s < kPanel; ++s) x[c] = sub_mul(x[c], x[s], panel[kPanel * (k + s) + c]);
      x[c] = scale(x[c], inverse[c]);
    }
    __syncwarp();
    if (!active) return;
#pragma unroll
    for (int c = 0; c < kPanel; ++c) {
      z(i, k + c) = x[c];
      if (own == Rows::block(k)) z(k + c, i) = conj(x[c]);
    }
  }

  // What this warp's rows subtract of entry (r, c) of the diagonal block, r >= c:
  //   sum_i conj(Z_i,k+r) L_i,k+c.
  static __device__ __forceinline__ int sum_place(int r, int c) { return r * (r + 1) / 2 + c; }
  __device__ __forceinline__ void sum_rows(int k, const T* panel) const {
    constexpr int kOwn = kPanel * kPanel / kLanes, kApart = kLanes / kPanel;
    const int r = lane / kPanel, c = lane % kPanel;
    T sum[kOwn];
#pragma unroll
    for (int x = 0; x < kOwn; ++x) sum[x] = T(0);
    const int begin = max(k + kPanel, warp * kLanes), end = min(n, (warp + 1) * kLanes);
    const int pitch = Rows::pitch(warp);
    const T* own = z.row(begin) + k + r;
    const T* l = panel + kPanel * begin + c;
#pragma unroll 4
    for (int i = begin; i < end; ++i, own += pitch, l += kPanel) {
#pragma unroll
      for (int x = 0; x < kOwn; ++x) sum[x] = add_conj_mul(sum[x], own[x * kApart], *l);
    }
#pragma unroll
    for (int x = 0; x < kOwn; ++x) {
      if (c <= r + x * kApart) sums[warp * kSums + sum_place(r + x * kApart, c)] = sum[x];
    }
  }

  // The diagonal block of Z, a row per lane of 8 (all groups of 8 lanes do the same).
  __device__ __forceinline__ void finish_block(int k, const T* panel) const {
    Real<T> inverse[kPanel];
    invert_diagonal(inverse, k, panel);
    const int r = lane % kPanel;
    const bool inside = k + r < n;
    T g[kPanel], row[kPanel];
#pragma unroll
    for (int c = 0; c < kPanel; ++c) g[c] = inside && c <= r ? conj(z(k + r, k + c)) : T(0);
    for (int w = Rows::block(k + kPanel); k + kPanel < n && w < warps(n); ++w) {
#pragma unroll
      for (int c = 0; c < kPanel; ++c) {
        if (c <= r) g[c] = g[c] - sums[w * kSums + sum_place(r, c)];
      }
    }
#pragma unroll
    for (int c = kPanel - 1; c >= 0; --c) {
      row[c] = T(0);
      if (k + c >= n) continue;
      T l[kPanel];
#pragma unroll
      for (int s = c + 1; s < kPanel; ++s) l[s] = panel[kPanel * (k + s) + c];
      const auto finished = [&] {
        T x = g[c];
#pragma unroll
        for (int s = c + 1; s < kPanel; ++s) x = sub_mul(x, row[s], l[s]);
        return scale(x, inverse[c]);
      };
      row[c] = finished();  // of the rows below
#pragma unroll
      for (int s = c + 1; s < kPanel; ++s) {
        const T below = shuffle(row[c], s, kPanel);
        if (r == c) row[s] = conj(below);
      }
      if (r == c) row[c] = T(real(finished()));
    }
    __syncwarp();
    if (lane < kPanel && inside) {
#pragma unroll
      for (int c = 0; c < kPanel; ++c) z(k + r, k + c) = row[c];
    }
  }

  // Z in place of the cotangent. The panel before is under way while one is worked on.
  __device__ __forceinline__ void sweep(const T* factor) const {
#pragma unroll 1
    for (int k = (n - 1) / kPanel * kPanel; k >= 0; k -= kPanel) {
      const T* current = panel(k);
      if (k > 0) load_panel(factor, k - kPanel);
      commit_copies();
      if (k + kPanel < n && (warp + 1) * kLanes > k + kPanel) {
        finish_row(k, current);
        __syncwarp();
        sum_rows(k, current);
      }
      sync();
      if (warp == 0) finish_block(k, current);
      wait_for_copies<0>();
      sync();
    }
  }

  // Whether Z, or a sum on the way to it, overflowed: what is not finite in a row of Z makes all
  // that follows in the row so, and at last the first entry. (But for a factor of NaN.)
  __device__ __forceinline__ bool overflowed(const T* factor) const {
    return !(absolute(real(z(0, 0))) < kInfinity<Real<T>>) && real(*factor) > Real<T>(0);
  }

  __device__ __forceinline__ void multiply_cotangent(Real<T> unit) const {
    for (int e = member; e < Rows::begin(n); e += members) {
      z.entries[e] = scale(z.entries[e], unit);
    }
  }

  // S = half Z. Entries of the triangle that was read stand for both: off the diagonal, twice S.
  __device__ __forceinline__ void store(T* result, bool symmetrize, Real<T> half) const {
    const Real<T> off_diagonal = symmetrize ? half : half + half;
    for (int block = 0; block < blocks(); ++block) {
      for_each_entry(block, block, false, result, [&](int below, const T& from, T& to) {
        const T value = upper ? from : conj(from);
        const bool data = symmetrize || (upper ? below <= 0 : below >= 0);
        to = data ? scale(value, below == 0 ? half : off_diagonal) : T(0);
      });
      for (int column = 0; column < blocks(); ++column) {
        if (column == block) continue;
        const bool above = column > block, data = symmetrize || above == upper;
        for_each_entry(block, column, above, result, [&](int, const T& from, T& to) {
          to = data ? scale(above == upper ? conj(from) : from, off_diagonal) : T(0);
        });
      }
    }
  }
};

template <class T, int kLanes, bool kWide>
__global__ void __launch_bounds__((PullbackKernel<T, kLanes, kWide>::kMaxThreads),
                                  (PullbackKernel<T, kLanes, kWide>::kMinBlocks))
    cholesky_pullback_kernel(const CholeskyPullbackProblem p) {
  using Kernel = PullbackKernel<T, kLanes, kWide>;
  if (skips(p, blockIdx.x * int64_t{Kernel::kMatrices}, Kernel::kMatrices)) return;
  extern __shared__ __align__(16) unsigned char shared[];
  Kernel kernel(p, reinterpret_cast<T*>(shared));
  const int64_t slot = kWide ? 0 : threadIdx.x / kLanes;
  const int64_t place = blockIdx.x * int64_t{Kernel::kMatrices} + slot;
  const int64_t matrix = min(place, p.batch - 1);
  const int64_t size = int64_t{p.n} * p.n;
  const T* factor = p.factor.at<const T>(matrix, size);
  Real<T> half(0.5);
#pragma unroll 1
  for (bool again = false;; again = true) {
    // What depends on n is computed here, not kept in registers for another time.
    asm volatile("" : "+r"(kernel.n));
    kernel.load_cotangent(p.cotangent.at<const T>(matrix, size));
    const int last = (p.n - 1) / Kernel::kPanel * Kernel::kPanel;
    kernel.load_panel(factor, last);
    kernel.pad_panel(last);
    commit_copies();
    wait_for_copies<0>();
    Kernel::sync();
    if (again) {
      kernel.multiply_cotangent(Real<T>(0.5) / half);
      Kernel::sync();
    }
    kernel.sweep(factor);
    const bool overflowed = kernel.overflowed(factor);
    if (again || !__any_sync(kFullWarp, overflowed)) break;
    if (overflowed) half = Real<T>(0.5 / p.kSmallCotangent);
    Kernel::sync();
  }
  if (place == matrix) kernel.store(p.result.at<T>(matrix, size), p.symmetrize, half);
}

}  // namespace jax_batched::cuda
