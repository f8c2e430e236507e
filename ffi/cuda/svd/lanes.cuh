// Singular value decompositions of matrices of up to 64 rows by one-sided Jacobi, in shared memory.
//
// The columns of A V become orthogonal: their norms are the singular values then, and what is left
// of them is U. A round rotates n / 2 pairs of columns, which are all different; in n - 1 rounds
// (one more where n is odd) every column meets every other one. kLanes lanes work on a pair, in
// whose columns each has kRows rows of A and as many of V, as 16-byte vectors.
#pragma once

#include "ffi/cuda/layout/view.cuh"
#include "ffi/cuda/svd/rotation.cuh"
#include "ffi/problems/svd.h"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

// V is kept in shared memory, too, or where it goes.
template <class T, int kLanes, int kRows, bool kVInShared>
struct SvdLanes {
  using R = Real<T>;
  static constexpr int V = kVector<T>;
  static constexpr int kChunks = kRows / V;
  static constexpr int kMaxN = kLanes * kRows;
  static constexpr int kGroup = kMaxN / 2 * kLanes;  // threads of a matrix
  static constexpr int kThreads = kGroup < 32 ? 32 : kGroup;
  static constexpr int kMatrices = kThreads / kGroup;
  static constexpr int kWarps = kThreads / 32;
  static_assert(kRows % V == 0 && (kVInShared || (V == 1 && kMatrices == 1)));

  // Where V's rows begin in a column, behind A's.
  static constexpr __host__ __device__ int half(int n) { return round_up(n, kLanes * V); }
  // Columns begin in different banks.
  static constexpr __host__ __device__ int stride(int n, bool vectors) {
    constexpr int kUnit = kLanes * V;
    return kUnit * make_odd(half(n) / kUnit * (vectors && kVInShared ? 2 : 1));
  }
  // Columns, coefficients of a basis that is completed, norms, the order of the columns.
  static constexpr __host__ __device__ int bytes_of(int n, bool vectors) {
    const int numbers = n * stride(n, vectors) + round_up(n, V);
    return numbers * static_cast<int>(sizeof(T)) +
           round_up(n * static_cast<int>(sizeof(R) + sizeof(int)), 16);
  }
  static constexpr __host__ __device__ size_t bytes(int n, bool vectors) {
    return static_cast<size_t>(kMatrices) * bytes_of(n, vectors) + 16 * kWarps;
  }

  const int n;
  const bool vectors;
  const int apart = stride(n, vectors);
  const int thread = threadIdx.x % kGroup;
  const int lane = thread % kLanes, pair = thread / kLanes;
  T* const columns;
  T* const outside;  // V^H
  T* const coefficients = columns + n * apart;
  R* const norms = reinterpret_cast<R*>(coefficients + round_up(n, V));
  int* const order = reinterpret_cast<int*>(norms + n);
  R back;  // undoes the scaling
  bool failed;
  int info = 0;

  static __device__ __forceinline__ void sync() {
    if constexpr (kGroup > 32) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }
  static __device__ __forceinline__ bool any(bool holds) {
    if constexpr (kGroup > 32) {
      return __syncthreads_or(holds);
    } else {
      return __any_sync(kFullWarp, holds);
    }
  }
  template <class N>
  static __device__ __forceinline__ N sum_of_lanes(N a) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) a = a + shuffle_xor(a, mask);
    return a;
  }
  __device__ __forceinline__ T* column(int c) const { return columns + c * apart; }
  __device__ __forceinline__ T* v_column(int c) const {
    return kVInShared ? column(c) + half(n) : outside + c * n;
  }
  // This lane's part of a column, or of V's.
  __device__ __forceinline__ Vector<T>& chunk(T* column, int c) const {
    return *reinterpret_cast<Vector<T>*>(column + V * (lane + kLanes * c));
  }
  __device__ __forceinline__ bool has_chunk(int c) const { return kLanes * V * c < n; }

  // Calls f(i, j) for this thread's elements: neighbours have neighbouring j.
  template <class F>
  __device__ __forceinline__ void for_each_element(F&& f) const {
    constexpr int kWide = kGroup < 32 ? kGroup : 32;
    for (int i = thread / kWide; i < n; i += kGroup / kWide) {
#pragma unroll 2
      for (int j = thread % kWide; j < n; j += kWide) f(i, j);
    }
  }

  // A scaled by a power of two and V = I; zeros where `from` is null or a number is not finite.
  __device__ __forceinline__ void load(const T* from, R* of_warps) {
    R largest = R(0), finite = R(0);
    const auto take = [&](R x) {
      largest = fmax(largest, fabs(x));
      finite = multiply_add(x, R(0), finite);
    };
    for (int c = 0; c < n; ++c) {
      for (int r = thread; r < apart; r += kGroup) column(c)[r] = T(R(r == half(n) + c));
      if constexpr (!kVInShared) {
        for (int r = thread; r < n && vectors; r += kGroup) v_column(c)[r] = T(R(r == c));
      }
    }
    sync();
    if (from != nullptr) {
      for_each_element([&](int i, int j) {
        const T a = from[i * n + j];
        take(real(a));
        if constexpr (kIsComplex<T>) take(a.im);
        column(j)[i] = a;
      });
    }
    constexpr int kWidth = kGroup < 32 ? kGroup : 32;
#pragma unroll
    for (int mask = kWidth / 2; mask > 0; mask /= 2) {
      largest = fmax(largest, shuffle_xor(largest, mask));
      finite += shuffle_xor(finite, mask);
    }
    if constexpr (kGroup > 32) {
      if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = finite == R(0) ? largest : kNaN<R>;
      __syncthreads();
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        largest = fmax(largest, of_warps[w]);
        finite = multiply_add(of_warps[w], R(0), finite);
      }
    } else {
      __syncwarp();
    }
    failed = !(finite == R(0));
    ColumnSize<R> size;
    size.take(largest);
    const R by = size.factor();
    back = inverse_power(by);
    for (int c = 0; c < n; ++c) {
      for (int r = thread; r < n; r += kGroup) {
        column(c)[r] = failed ? T(R(0)) : scale(column(c)[r], by);
      }
    }
    sync();
  }

  __device__ __forceinline__ void orthogonalize() {
    const int last = (n - 1) | 1;  // there is a column of this number only if n is even
    for (int sweep = 0;; ++sweep) {
      int rotations = 0;
#pragma unroll 1
      for (int round = 0; round < last; ++round) {
        // All stand in a circle of `last`, which turns by one; the last one stands in its centre.
        int i = round + pair, j = round - pair;
        if (i >= last) i -= last;
        if (j < 0) j += last;
        if (pair == 0) j = last;
        const bool active = pair <= last / 2 && i < n && j < n;
        rotations += rotate_pair(active ? i : 0, active ? j : 0, active);
        sync();
      }
      if (!any(rotations != 0)) break;
      if (sweep == kMaxSvdSweeps) {
        info = rotations;
        break;
      }
    }
  }

  // Norms of the columns, which are of norm 1 then, and their order.
  __device__ __forceinline__ void normalize() {
#pragma unroll 1
    for (int z = 0; z < 2; ++z) {
      const int c = 2 * pair + z;
      R squares = R(0);
      if (c < n) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          if (!has_chunk(k)) continue;
          const Vector<T> x = chunk(column(c), k);
#pragma unroll
          for (int i = 0; i < V; ++i) squares = add_square(squares, x.v[i]);
        }
      }
      squares = sum_of_lanes(squares);
      const bool is_none = !(squares > kSmallestColumn<R>);
      const R inverse = is_none ? R(0) : inverse_root(squares);
      if (c < n) {
        norms[c] = squares * inverse;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          if (!has_chunk(k)) continue;
          Vector<T>& x = chunk(column(c), k);
#pragma unroll
          for (int i = 0; i < V; ++i) x.v[i] = scale(x.v[i], inverse);
        }
      }
    }
    sync();
    for (int c = thread; c < n; c += kGroup) {
      const R own = norms[c];
      int rank = 0;
#pragma unroll 4
      for (int j = 0; j < n; ++j) rank += norms[j] > own || (norms[j] == own && j < c);
      order[rank] = c;
    }
    sync();
  }

  __device__ __forceinline__ void store(T* u, R* s, T* vh) const {
    for (int k = thread; k < n; k += kGroup) s[k] = failed ? kNaN<R> : norms[order[k]] * back;
    if (!vectors) return;
    for_each_element([&](int i, int j) {
      u[i * n + j] = failed ? quiet_nan<T>() : without_sign_of_zero(column(order[j])[i]);
    });
    if constexpr (!kVInShared) {
      sync();
      for_each_element([&](int i, int j) { column(i)[j] = v_column(i)[j]; });
      sync();
    }
    for_each_element([&](int i, int j) {
      const T v = kVInShared ? v_column(order[i])[j] : column(order[i])[j];
      vh[i * n + j] = failed ? quiet_nan<T>() : without_sign_of_zero(conj(v));
    });
  }

 private:
  // Whether there is something to rotate.
  __device__ __forceinline__ bool rotate_pair(int x, int y, bool active) const {
    Vector<T> a[kChunks], b[kChunks];
    R xx = R(0), yy = R(0);
    T xy = T(R(0));
    if (active) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        if (!has_chunk(k)) continue;
        a[k] = chunk(column(x), k);
        b[k] = chunk(column(y), k);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          xx = add_square(xx, a[k].v[i]);
          yy = add_square(yy, b[k].v[i]);
          xy = add_conj_mul(xy, a[k].v[i], b[k].v[i]);
        }
      }
    }
    const ColumnRotation<T> rotation(sum_of_lanes(xx), sum_of_lanes(yy), sum_of_lanes(xy));
    if (!rotation.is_needed) return false;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (!has_chunk(k)) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) rotation.apply(a[k].v[i], b[k].v[i]);
      chunk(column(x), k) = a[k];
      chunk(column(y), k) = b[k];
    }
    if (!vectors) return true;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (!has_chunk(k)) continue;
      if (!kVInShared && lane + kLanes * k >= n) continue;
      Vector<T> v = chunk(v_column(x), k), w = chunk(v_column(y), k);
#pragma unroll
      for (int i = 0; i < V; ++i) rotation.apply(v.v[i], w.v[i]);
      chunk(v_column(x), k) = v;
      chunk(v_column(y), k) = w;
    }
    return true;
  }
};

// Unit vectors in the place of columns that are zero, each orthogonal to all before it: numbers
// that look random, less what the others have of them, more than once.
template <class Lanes>
__device__ __noinline__ void complete_basis(const Lanes lanes) {
  using T = std::remove_reference_t<decltype(*lanes.columns)>;
  using R = Real<T>;
  const int n = lanes.n, thread = lanes.thread;
  const auto column = [&](int k) { return lanes.column(lanes.order[k]); };
#pragma unroll 1
  for (int k = 0; k < n; ++k) {
    const bool is_zero = lanes.norms[lanes.order[k]] == R(0);
    if (!Lanes::any(is_zero)) continue;
    T* const x = column(k);
    if (is_zero) {
      for (int r = thread; r < n; r += Lanes::kGroup) {
        const unsigned hash = (r * 64u + k + 1u) * 2654435761u;
        x[r] = T(R(static_cast<int>(hash ^ hash << 13)) * R(0x1p-31));
      }
    }
    Lanes::sync();
#pragma unroll 1
    for (int pass = 0; pass < 3; ++pass) {
      if (is_zero) {
        for (int c = thread; c < k; c += Lanes::kGroup) {
          const T* const other = column(c);
          T sum = T(R(0));
          for (int r = 0; r < n; ++r) sum = add_conj_mul(sum, other[r], x[r]);
          lanes.coefficients[c] = sum;
        }
      }
      Lanes::sync();
      if (is_zero) {
        for (int r = thread; r < n; r += Lanes::kGroup) {
          T rest = x[r];
          for (int c = 0; c < k; ++c) rest = sub_mul(rest, lanes.coefficients[c], column(c)[r]);
          x[r] = rest;
        }
      }
      Lanes::sync();
      R squares = R(0);
      for (int r = 0; r < n; ++r) squares = add_square(squares, x[r]);
      const R inverse = inverse_root(squares);
      Lanes::sync();
      if (is_zero) {
        for (int r = thread; r < n; r += Lanes::kGroup) x[r] = scale(x[r], inverse);
      }
      Lanes::sync();
    }
  }
}

template <class T, int kLanes, int kRows, bool kVInShared>
__global__ void __launch_bounds__(SvdLanes<T, kLanes, kRows, kVInShared>::kThreads)
    svd_lanes_kernel(const SvdProblem p) {
  using Lanes = SvdLanes<T, kLanes, kRows, kVInShared>;
  using R = Real<T>;
  const int n = p.n;
  const int64_t first = int64_t{blockIdx.x} * Lanes::kMatrices;
  if (skips(p, first, Lanes::kMatrices)) return;
  const int own = threadIdx.x / Lanes::kGroup, bytes = Lanes::bytes_of(n, p.vectors);
  const int64_t entry = first + own;
  const bool wanted = entry < p.batch && is_wanted(p, entry);
  Lanes lanes{.n = n,
              .vectors = p.vectors,
              .columns = reinterpret_cast<T*>(dynamic_shared + own * bytes),
              .outside = !kVInShared && p.vectors ? p.vh.at<T>(entry, n, n) : nullptr};
  lanes.load(wanted ? matrix_at<const T>(p.a, entry, n, n) : nullptr,
             reinterpret_cast<R*>(dynamic_shared + Lanes::kMatrices * bytes));
  lanes.orthogonalize();
  lanes.normalize();
  if (p.vectors && Lanes::any(lanes.norms[lanes.order[n - 1]] == R(0))) complete_basis(lanes);
  int info = lanes.info;
  if constexpr (Lanes::kGroup > 32) {
    info = __syncthreads_or(info != 0);
  } else {
#pragma unroll
    for (int mask = Lanes::kGroup / 2; mask > 0; mask /= 2) {
      info += __shfl_xor_sync(kFullWarp, info, mask);
    }
  }
  if (!wanted) return;
  lanes.store(p.vectors ? p.u.at<T>(entry, n, n) : nullptr, p.s.at<R>(entry, n),
              p.vectors ? p.vh.at<T>(entry, n, n) : nullptr);
  if (lanes.thread == 0) p.info[entry] = lanes.failed ? n : info;
}

}  // namespace jax_batched::cuda
