// Singular value decompositions of matrices of a few rows: one thread each, in registers.
#pragma once

#include "ffi/cuda/layout/matrix_stage.cuh"
#include "ffi/cuda/svd/rotation.cuh"
#include "ffi/problems/svd.h"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

// One-sided Jacobi: the columns of A V become orthogonal.
template <class T, int kN, bool kVectors>
struct ThreadSvd {
  using R = Real<T>;
  T a[kN][kN];
  T v[kN][kN];
  R s[kN];
  R back;  // undoes the scaling
  bool failed;
  int info = 0;
  int zeros = 0;

  __device__ __forceinline__ void scale_by_power() {
    R largest = R(0), finite = R(0);
    const auto take = [&](R x) {
      largest = fmax(largest, fabs(x));
      finite = multiply_add(x, R(0), finite);
    };
    for_each([&](int i, int j) {
      take(real(a[i][j]));
      if constexpr (kIsComplex<T>) take(a[i][j].im);
    });
    failed = !(finite == R(0));
    ColumnSize<R> size;
    size.take(largest);
    const R by = size.factor();
    back = inverse_power(by);
    for_each([&](int i, int j) {
      a[i][j] = failed ? T(R(0)) : scale(a[i][j], by);
      v[i][j] = T(R(i == j));
    });
  }

  // Until no pair of columns of any matrix of the warp is rotated.
  __device__ __forceinline__ void orthogonalize() {
#pragma unroll 1
    for (int sweep = 0;; ++sweep) {
      int rotations = 0;
#pragma unroll
      for (int i = 0; i < kN - 1; ++i) {
#pragma unroll
        for (int j = i + 1; j < kN; ++j) rotations += rotate_pair(i, j);
      }
      if (!__any_sync(kFullWarp, rotations != 0)) break;
      if (sweep == kMaxSvdSweeps) {
        info = rotations;
        break;
      }
    }
  }

  // rank[j] becomes the place of column j, whose norm is 1 then, among all.
  __device__ __forceinline__ void normalize(int (&rank)[kN]) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      R squares = R(0);
#pragma unroll
      for (int k = 0; k < kN; ++k) squares = add_square(squares, a[k][j]);
      const bool is_none = !(squares > kSmallestColumn<R>);
      const R inverse = is_none ? R(0) : inverse_root(squares);
      zeros += is_none;
      s[j] = squares * inverse;
#pragma unroll
      for (int k = 0; k < kN; ++k) a[k][j] = scale(a[k][j], inverse);
      rank[j] = 0;
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int j = i + 1; j < kN; ++j) {
        const bool swapped = s[j] > s[i];
        rank[i] += swapped;
        rank[j] += !swapped;
      }
    }
  }

 private:
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int j = 0; j < kN; ++j) f(i, j);
    }
  }
  __device__ __forceinline__ bool rotate_pair(int i, int j) {
    R xx = R(0), yy = R(0);
    T xy = T(R(0));
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      xx = add_square(xx, a[k][i]);
      yy = add_square(yy, a[k][j]);
      xy = add_conj_mul(xy, a[k][i], a[k][j]);
    }
    ColumnRotation<T> rotation(xx, yy, xy);
    if (!rotation.is_needed) {
      rotation.s = T(R(0));
      rotation.r = T(R(0));
    }
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      rotation.apply(a[k][i], a[k][j]);
      if constexpr (kVectors) rotation.apply(v[k][i], v[k][j]);
    }
    return rotation.is_needed;
  }
};

// The last `zeros` columns of a thread's U: each is the unit vector that the columns before it have
// the least of, less what they have of it.
template <int kN, class T>
__device__ __noinline__ void complete_thread(T* u, int zeros) {
  using R = Real<T>;
#pragma unroll 1
  for (int k = kN - zeros; k < kN; ++k) {
    int best = 0;
    R least = R(2);
#pragma unroll 1
    for (int i = 0; i < kN; ++i) {
      R squares = R(0);
      for (int j = 0; j < k; ++j) squares = add_square(squares, u[i * kN + j]);
      if (squares < least) best = i;
      least = fmin(least, squares);
    }
    for (int i = 0; i < kN; ++i) u[i * kN + k] = T(R(i == best));
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
      for (int j = 0; j < k; ++j) {
        T sum = T(R(0));
        for (int i = 0; i < kN; ++i) sum = add_conj_mul(sum, u[i * kN + j], u[i * kN + k]);
        for (int i = 0; i < kN; ++i) u[i * kN + k] = sub_mul(u[i * kN + k], sum, u[i * kN + j]);
      }
      R squares = R(0);
      for (int i = 0; i < kN; ++i) squares = add_square(squares, u[i * kN + k]);
      const R inverse = inverse_root(squares);
      for (int i = 0; i < kN; ++i) u[i * kN + k] = scale(u[i * kN + k], inverse);
    }
  }
}

// NaN in a thread's record.
template <int kCount, class T>
__device__ __noinline__ void fill_record(T* to) {
#pragma unroll 1
  for (int e = 0; e < kCount; ++e) to[e] = quiet_nan<T>();
}

template <class T, int kN>
inline constexpr int kSvdThreadWarps = sizeof(T) * kN * kN <= 36 ? 4 : 1;

// One thread per matrix of exactly kN rows and columns; a warp moves its 32 matrices together.
template <class T, int kN, bool kVectors>
__global__ void __launch_bounds__(32 * kSvdThreadWarps<T, kN>)
    svd_thread_kernel(const SvdProblem p) {
  using R = Real<T>;
  using Stage = MatrixStage<T, kN>;
  using Values = RecordStage<R, kN>;
  constexpr int kWarps = kSvdThreadWarps<T, kN>;
  const int lane = threadIdx.x % 32, warp = kWarps == 1 ? 0 : threadIdx.x / 32;
  const int64_t first = (int64_t{blockIdx.x} * kWarps + warp) * 32;
  if (first >= p.batch || skips(p, first, 32)) return;
  const int records = static_cast<int>(min(int64_t{32}, p.batch - first));
  T* const stage = reinterpret_cast<T*>(dynamic_shared) + warp * Stage::kElements;
  T* const own = stage + lane * Stage::kStride;
  if (p.a.contiguous()) {
    Stage::load(stage, p.a.as<const T>() + first * (kN * kN), records, lane);
  } else {
    for (int record = 0; record < records; ++record) {
      const T* a = matrix_at<const T>(p.a, first + record, kN, kN);
      for (int e = lane; e < kN * kN; e += 32) stage[record * Stage::kStride + e] = a[e];
    }
  }
  __syncwarp();
  ThreadSvd<T, kN, kVectors> f;
  Stage::for_each_read(
      own, [](int, int) { return true; }, [&](int i, int j, T a) { f.a[i][j] = a; });
  f.scale_by_power();
  f.orthogonalize();
  int rank[kN];
  f.normalize(rank);
  if constexpr (kVectors) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int i = 0; i < kN; ++i) own[i * kN + rank[j]] = without_sign_of_zero(f.a[i][j]);
    }
    if (f.zeros > 0) complete_thread<kN>(own, f.zeros);
    if (f.failed) fill_record<kN * kN>(own);
    __syncwarp();
    Stage::store(p.u.at<T>(first, kN * kN), stage, records, lane);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int i = 0; i < kN; ++i) own[rank[j] * kN + i] = without_sign_of_zero(conj(f.v[i][j]));
    }
    if (f.failed) fill_record<kN * kN>(own);
    __syncwarp();
    Stage::store(p.vh.at<T>(first, kN * kN), stage, records, lane);
  }
  __syncwarp();
  R* const values = reinterpret_cast<R*>(stage) + lane * Values::kStride;
#pragma unroll
  for (int j = 0; j < kN; ++j) values[rank[j]] = f.s[j] * f.back;
  if (f.failed) fill_record<kN>(values);
  __syncwarp();
  Values::store(p.s.at<R>(first, kN), reinterpret_cast<R*>(stage), records, lane);
  if (lane < records) p.info[first + lane] = f.failed ? kN : f.info;
}

template <class T, int kN>
constexpr size_t svd_thread_bytes() {
  return kSvdThreadWarps<T, kN> * MatrixStage<T, kN>::kElements * sizeof(T);
}

}  // namespace jax_batched::cuda
