// Eigenvalues and eigenvectors of matrices of up to 64 rows, in shared memory.
//
// kLanes lanes of a warp work on one matrix, with two neighbouring columns each; a block has some
// matrices, and one more warp. Three steps:
//   1. The lanes make the matrix tridiagonal, column by column, and then form Q from the
//      reflections in its place, which they transpose: lane l has rows 2l and 2l + 1 of Q now.
//   2. The one more warp iterates on the tridiagonal matrices, a lane for each. It does two sweeps
//      at a time; meanwhile the lanes apply the rotations of the two sweeps before to their rows.
//      A row passes through registers once: rotation i of the first sweep is followed by rotation
//      i - 1 of the second one.
//   3. The lanes write the columns in the order of the eigenvalues.
#pragma once

#include "ffi/cuda/eigh/tridiagonal.cuh"
#include "ffi/cuda/layout/view.cuh"
#include "ffi/problems/eigh.h"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

// Two neighbours of a row.
template <class T>
struct alignas(sizeof(T) < 16 ? 2 * sizeof(T) : 16) Two {
  T v[2];
};

// Rotation i of a sweep, and rotation i - 1 of the next one.
template <class R>
struct alignas(16) TwoRotations {
  Rotation<R> of[2];
};

// What a row has of the update before, u and w, and of the next reflection.
template <class T>
struct alignas(16) RowOfUpdate {
  T u, w, next;
};

// Where a block's matrices lie in shared memory.
template <class T>
struct EighPlaces {
  using R = Real<T>;
  int n, matrices;

  // Of rows; even, and such that columns, too, are in different banks.
  static constexpr __host__ __device__ int stride_of(int n) {
    return round_up(n, 2) + (round_up(n, 2) % 8 == 0 ? 2 : 0);
  }
  // Neighbours begin in different banks.
  static constexpr __host__ __device__ int matrix_bytes(int n) {
    return round_up(n * stride_of(n) * static_cast<int>(sizeof(T)) + 64, 128) - 64;
  }
  // Rotations of two rounds; rows of an update before that.
  static constexpr __host__ __device__ int work_bytes(int n) {
    const int rotations = 2 * (n + 1) * static_cast<int>(sizeof(TwoRotations<R>));
    const int rows = round_up(n, 2) * static_cast<int>(sizeof(RowOfUpdate<T>));
    return rotations > rows ? rotations : rows;
  }
  static constexpr __host__ __device__ int bytes_of(int n) {
    return matrix_bytes(n) + work_bytes(n) + 2 * n * static_cast<int>(sizeof(R));
  }
  static constexpr size_t kMoreBytes = 16;
  __host__ __device__ size_t bytes() const {
    return static_cast<size_t>(matrices) * bytes_of(n) + kMoreBytes;
  }

  __device__ __forceinline__ T* matrix(int m) const {
    return reinterpret_cast<T*>(dynamic_shared + m * matrix_bytes(n));
  }
  __device__ __forceinline__ unsigned char* work() const {
    return dynamic_shared + matrices * matrix_bytes(n);
  }
  __device__ __forceinline__ RowOfUpdate<T>* rows(int m) const {
    return reinterpret_cast<RowOfUpdate<T>*>(work() + m * work_bytes(n));
  }
  // Those of one matrix are `matrices` apart, here and below.
  __device__ __forceinline__ TwoRotations<R>* rotations(int round) const {
    return reinterpret_cast<TwoRotations<R>*>(work()) + (round & 1) * ((n + 1) * matrices);
  }
  __device__ __forceinline__ R* diagonal() const {
    return reinterpret_cast<R*>(work() + matrices * work_bytes(n));
  }
  __device__ __forceinline__ R* off_diagonal() const { return diagonal() + n * matrices; }
  // How many rotations a round has.
  __device__ __forceinline__ int* counts() const {
    return reinterpret_cast<int*>(off_diagonal() + n * matrices);
  }
};

// One matrix, by kLanes neighbouring lanes. Row k is at k * stride; a lane's columns are `column`
// and the next one.
template <class T, int kLanes>
struct EighLanes {
  using R = Real<T>;
  T* const matrix;
  RowOfUpdate<T>* const rows;
  R* const d;
  R* const e;
  const int apart;  // of numbers in d and in e
  const int n, stride;
  const int lane = threadIdx.x % kLanes;
  const int column = 2 * lane;
  const bool active = column < n;
  R back;  // undoes the scaling
  bool failed;

  __device__ __forceinline__ Two<T>& two(int row) const {
    return *reinterpret_cast<Two<T>*>(matrix + row * stride + column);
  }
  __device__ __forceinline__ T& at(int i, int j) const { return matrix[i * stride + j]; }

  // Of the lane that has column k.
  static __device__ __forceinline__ T from_column(const Two<T>& own, int k) {
    return shuffle(k & 1 ? own.v[1] : own.v[0], k / 2, kLanes);
  }
  static __device__ __forceinline__ R sum_of_lanes(R a) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) a += shuffle_xor(a, mask);
    return a;
  }

  // A scaled, in both triangles; zeros where `from` is null or a number is not finite.
  __device__ __forceinline__ void load(const T* from, bool upper, bool mean) {
    R largest = R(0), finite = R(0);
    const auto take = [&](R x) {
      largest = fmax(largest, fabs(x));
      finite = multiply_add(x, R(0), finite);
    };
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
#pragma unroll
      for (int z = 0; z < 2; ++z) {
        const int j = lane + z * kLanes;
        T a = T(R(0));
        if (from != nullptr && j < n) a = from[i * n + j];
        if (mean || (upper ? j >= i : j <= i)) {
          take(real(a));
          if constexpr (kIsComplex<T>) {
            if (i != j) take(a.im);
          }
        }
        if (j < n + (n & 1)) at(i, j) = a;
      }
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      largest = fmax(largest, shuffle_xor(largest, mask));
    }
    failed = !(sum_of_lanes(finite) == R(0));
    ColumnSize<R> size;
    size.take(largest);
    const R by = size.factor();
    back = inverse_power(by);
    __syncwarp();
#pragma unroll 2
    for (int i = 0; i < n; ++i) {
#pragma unroll
      for (int z = 0; z < 2; ++z) {
        const int j = lane + z * kLanes;
        if (j > i) continue;
        const T below = scale(at(i, j), by), above = scale(at(j, i), by);
        T a = mean ? hermitian_mean(below, above) : upper ? conj(above) : below;
        if (i == j) a = T(real(a));
        if (failed) a = T(R(0));
        at(i, j) = a;
        at(j, i) = conj(a);
      }
    }
    __syncwarp();
  }

  // H^H A H with H^H = I - phi u u^H for one column after the other:
  //   y = A u, w = conj(phi) y - |phi|^2 (u^H y) / 2 u, A -= u w^H + w u^H.
  // An update waits until A is read for the next product. Row k holds phi and u in the end.
  __device__ __forceinline__ void tridiagonalize() {
    Two<T> u{{T(R(0)), T(R(0))}}, w = u;  // rows `column` and the next one
#pragma unroll 1
    for (int k = 0;; ++k) {
      const T u_k = from_column(u, k), w_k = from_column(w, k);
      Two<T> x{{T(R(0)), T(R(0))}};
      R tail = R(0);
      if (active) {
        const Two<T> row = two(k);
#pragma unroll
        for (int z = 0; z < 2; ++z) {
          const T a = sub_mul_conj(sub_mul_conj(row.v[z], u_k, w.v[z]), w_k, u.v[z]);
          if (column + z == k) d[k * apart] = real(a);
          if (column + z > k) x.v[z] = conj(a);
          if (column + z > k + 1) tail = add_square(tail, a);
        }
      }
      if (k == n - 1) break;
      tail = sum_of_lanes(tail);
      const T alpha = from_column(x, k + 1);
      R rest = tail;
      if constexpr (kIsComplex<T>) rest = multiply_add(alpha.im, alpha.im, rest);
      Reflection<T> h = Reflection<T>::of(alpha, tail);
      if (!(rest >= kSmallestSquares<R>)) h = Reflection<T>::identity(alpha);
      if (lane == 0) e[k * apart] = h.beta;
      Two<T> kept;
#pragma unroll
      for (int z = 0; z < 2; ++z) {
        if (column + z == k + 1) x.v[z] = h.first;
        kept.v[z] = column + z == k ? h.factor : x.v[z];
        if (active) rows[column + z] = {u.v[z], w.v[z], x.v[z]};
      }
      if (active) two(k) = kept;
      __syncwarp();
      Two<T> y{{T(R(0)), T(R(0))}};
      if (active && column + 1 > k) {
#pragma unroll 4
        for (int r = k + 1; r < n; ++r) {
          const RowOfUpdate<T> row = rows[r];
          Two<T> a = two(r);
#pragma unroll
          for (int z = 0; z < 2; ++z) {
            a.v[z] = sub_mul_conj(sub_mul_conj(a.v[z], row.u, w.v[z]), row.w, u.v[z]);
            y.v[z] = add_conj_mul(y.v[z], a.v[z], row.next);
          }
          two(r) = a;
        }
      }
      R quadratic = R(0);
#pragma unroll
      for (int z = 0; z < 2; ++z) quadratic = add_real_product(quadratic, x.v[z], y.v[z]);
      quadratic = sum_of_lanes(quadratic);
      // |phi|^2 alone may overflow.
      const R half = R(0.5) * add_real_product(R(0), h.factor, scale(h.factor, quadratic));
#pragma unroll
      for (int z = 0; z < 2; ++z) {
        const T full = sub_mul(product(conj(h.factor), y.v[z]), T(half), x.v[z]);
        w.v[z] = column + z > k ? full : T(R(0));
      }
      u = x;
      __syncwarp();
    }
    if (lane == 0) e[(n - 1) * apart] = R(0);
  }

  // Q = H_0 H_1 ..., from the last one to the first, in the place of the u: before step k, rows and
  // columns from k + 2 are those of the product of the H behind it. Then Q's transpose.
  __device__ __forceinline__ void form() {
    __syncwarp();
    if (active) {  // row and column n - 1 are those of the identity
      for (int z = 0; z < 2; ++z) {
        if (column + z < n) at(n - 1, column + z) = T(R(column + z == n - 1));
      }
    }
#pragma unroll 1
    for (int k = n - 2; k >= 0; --k) {
      const T phi = conj(at(k, k)), first = at(k, k + 1);
      for (int r = k + 2 + lane; r < n; r += kLanes) at(r, k + 1) = T(R(0));
      __syncwarp();
      if (active && column + 1 > k) {
        Two<T> sum{{T(R(0)), T(R(0))}};
#pragma unroll 4
        for (int r = k + 2; r < n; ++r) {
          const T u = at(k, r);
          const Two<T> q = two(r);
#pragma unroll
          for (int z = 0; z < 2; ++z) sum.v[z] = add_conj_mul(sum.v[z], u, q.v[z]);
        }
        Two<T> top;
#pragma unroll
        for (int z = 0; z < 2; ++z) {
          const bool is_new = column + z == k + 1;
          if (is_new) sum.v[z] = conj(first);
          sum.v[z] = product(phi, sum.v[z]);
          top.v[z] = sub_mul(T(R(is_new)), first, sum.v[z]);
        }
        two(k + 1) = top;
#pragma unroll 4
        for (int r = k + 2; r < n; ++r) {
          const T u = at(k, r);
          Two<T> q = two(r);
#pragma unroll
          for (int z = 0; z < 2; ++z) q.v[z] = sub_mul(q.v[z], u, sum.v[z]);
          two(r) = q;
        }
      }
      __syncwarp();
    }
    for (int i = lane; i < n; i += kLanes) {
      at(0, i) = T(R(i == 0));
      at(i, 0) = T(R(i == 0));
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 1; i < n; ++i) {
      for (int j = lane; j < i; j += kLanes) {
        const T below = at(i, j);
        at(i, j) = at(j, i);
        at(j, i) = below;
      }
    }
    __syncwarp();
  }

  // Two sweeps of `count` rotations, on this lane's two rows.
  __device__ __forceinline__ void apply(const TwoRotations<R>* rotations, int count) const {
    if (!active) return;
    const auto rotate_rows = [](Two<T>& x, Two<T>& y, Rotation<R> by) {
#pragma unroll
      for (int z = 0; z < 2; ++z) rotate(x.v[z], y.v[z], by.c, by.s);
    };
    Two<T> x = two(0), y = two(1);
    rotate_rows(x, y, rotations->of[0]);
    Two<T> z = two(count > 1 ? 2 : 1);
#pragma unroll 4
    for (int i = 1; i < count; ++i) {
      const TwoRotations<R> by = rotations[i * apart];
      Two<T> next = z;
      z = two(i + 2 <= count ? i + 2 : count);
      rotate_rows(y, next, by.of[0]);
      rotate_rows(x, y, by.of[1]);
      two(i - 1) = x;
      x = y;
      y = next;
    }
    const TwoRotations<R> by = rotations[count * apart];
    rotate_rows(x, y, by.of[1]);
    two(count - 1) = x;
    two(count) = y;
  }

  // Which eigenvalue comes k-th, in the place of e_k.
  __device__ __forceinline__ int& order(int k) const {
    return *reinterpret_cast<int*>(e + k * apart);
  }

  // The columns in the order of the eigenvalues; nothing where w is null.
  __device__ __forceinline__ void store(T* v, R* w, int32_t* info) const {
    int remaining = 0;
    for (int j = lane; j < n; j += kLanes) remaining += e[j * apart] != R(0);
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      remaining += __shfl_xor_sync(kFullWarp, remaining, mask);
    }
    __syncwarp();
    for (int j = lane; j < n; j += kLanes) {
      const R own = d[j * apart];
      int rank = 0;
#pragma unroll 4
      for (int i = 0; i < n; ++i) {
        const R other = d[i * apart];
        rank += other < own || (other == own && i < j);
      }
      order(rank) = j;
      if (w != nullptr) w[rank] = failed ? kNaN<R> : without_sign_of_zero(own * back);
    }
    __syncwarp();
    if (w == nullptr) return;
    if (lane == 0) *info = failed ? n : remaining;
    for (int j = lane; j < n; j += kLanes) {
      const T* const from = matrix + order(j) * stride;
#pragma unroll 4
      for (int i = 0; i < n; ++i) {
        v[i * n + j] = failed ? quiet_nan<T>() : without_sign_of_zero(from[i]);
      }
    }
  }
};

inline constexpr int kEighMaxThreads = 416;
// Registers are for as many, or for the threads of more blocks of fewer matrices.
template <class T>
inline constexpr int kEighMinBlocks = sizeof(T) == 4   ? 3
                                      : sizeof(T) == 8 ? 2
                                                       : 1;

// `matrices` of a block fill whole warps.
template <class T, int kLanes>
__global__ void __launch_bounds__(kEighMaxThreads, kEighMinBlocks<T>)
    eigh_block_kernel(const EighProblem p, const int matrices) {
  using R = Real<T>;
  const int n = p.n;
  const int64_t first = int64_t{blockIdx.x} * matrices;
  if (skips(p, first, matrices)) return;
  const EighPlaces<T> places{n, matrices};
  int* const counts = places.counts();
  const int own = threadIdx.x / kLanes;
  if (own >= matrices) {
    const int lane = threadIdx.x % 32, column = min(lane, matrices - 1);
    __syncthreads();
    SharedTridiagonal<R> tridiagonal{places.diagonal() + column, places.off_diagonal() + column,
                                     matrices, n, lane >= matrices};
    tridiagonal.begin();
    for (int round = 0;; ++round) {
      const int found = tridiagonal.rotations();
      const int count = 2 * round < eigh_max_sweeps(n) ? found : 0;
      TwoRotations<R>* const to = places.rotations(round) + column;
      for (int second = 0; second < 2 && count > 0; ++second) {
        tridiagonal.sweep(
            count, [&](int i, R c, R s) { to[(i + second) * matrices].of[second] = {c, s}; });
      }
      if (lane == 0) counts[round & 1] = count;
      __syncthreads();
      if (count == 0) return;
    }
  }
  const int64_t entry = first + own;
  const bool wanted = entry < p.batch && is_wanted(p, entry);
  EighLanes<T, kLanes> lanes{places.matrix(own),          places.rows(own), places.diagonal() + own,
                             places.off_diagonal() + own, matrices,         n,
                             places.stride_of(n)};
  lanes.load(wanted ? matrix_at<const T>(p.a, entry, n, n) : nullptr, p.upper, p.symmetrize);
  lanes.tridiagonalize();
  lanes.form();
  __syncthreads();
  for (int round = 0;; ++round) {
    __syncthreads();
    const int count = counts[round & 1];
    if (count == 0) break;
    lanes.apply(places.rotations(round) + own, count);
  }
  __syncwarp();
  lanes.store(wanted ? p.v.at<T>(entry, n, n) : nullptr, wanted ? p.w.at<R>(entry, n) : nullptr,
              wanted ? p.info + entry : nullptr);
}

}  // namespace jax_batched::cuda
