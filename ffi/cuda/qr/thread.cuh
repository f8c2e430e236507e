// QR of square matrices of a few rows: one thread each, in registers.
#pragma once

#include "ffi/cuda/layout/matrix_stage.cuh"
#include "ffi/cuda/qr/reflection.cuh"
#include "ffi/problems/qr.h"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

template <class T, int kN>
struct ThreadQr {
  using R = Real<T>;
  T a[kN][kN];
  T first[kN], factor[kN];  // u_0 and phi of each reflection
  bool is_usual = true;     // no column was scaled
  bool failed = false;

  // Columns of unusual size become those of a usual one.
  __device__ __forceinline__ void scale_columns() {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      ColumnSize<R> size;
#pragma unroll
      for (int i = 0; i < kN; ++i) size.take(a[i][j]);
      is_usual &= size.is_usual();
    }
    if (is_usual) return;
    // Rare: columns go round, so that it is little code.
#pragma unroll 1
    for (int column = 0; column < kN; ++column) {
      ColumnSize<R> size;
#pragma unroll
      for (int i = 0; i < kN; ++i) size.take(a[i][0]);
      const R by = size.is_usual() ? R(1) : size.factor();
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const T scaled = scale_nonzero(a[i][0], by);
#pragma unroll
        for (int j = 1; j < kN; ++j) a[i][j - 1] = a[i][j];
        a[i][kN - 1] = scaled;
      }
    }
  }

  // R in the upper triangle, the u below it.
  __device__ __forceinline__ void factorize() {
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      R back = R(1);
      const auto h = reflection(k, back);
      first[k] = h.first;
      factor[k] = h.factor;
#pragma unroll
      for (int j = k + 1; j < kN; ++j) {
        T sum = product(conj(h.first), a[k][j]);
#pragma unroll
        for (int i = k + 1; i < kN; ++i) sum = add_conj_mul(sum, a[i][k], a[i][j]);
        const T w = product(h.factor, sum);
        a[k][j] = sub_mul(a[k][j], w, h.first);
#pragma unroll
        for (int i = k + 1; i < kN; ++i) a[i][j] = sub_mul(a[i][j], w, a[i][k]);
      }
      a[k][k] = T(h.beta * back);
      failed |= !is_finite(h.beta);
    }
  }

  // Q in place of R and the u: H_k is applied to the columns right of k, which have zeros in row k,
  // and to e_k.
  __device__ __forceinline__ void form() {
#pragma unroll
    for (int k = kN - 1; k >= 0; --k) {
      const T phi = conj(factor[k]);
#pragma unroll
      for (int j = k + 1; j < kN; ++j) {
        T sum = T(R(0));
#pragma unroll
        for (int i = k + 1; i < kN; ++i) sum = add_conj_mul(sum, a[i][k], a[i][j]);
        const T w = product(phi, sum);
        a[k][j] = product(-w, first[k]);
#pragma unroll
        for (int i = k + 1; i < kN; ++i) a[i][j] = sub_mul(a[i][j], w, a[i][k]);
      }
      const T w = product(phi, conj(first[k]));
      a[k][k] = sub_mul(T(R(1)), w, first[k]);
#pragma unroll
      for (int i = k + 1; i < kN; ++i) a[i][k] = product(-w, a[i][k]);
    }
  }

 private:
  __device__ __forceinline__ R tail_of(int k) const {
    R tail = R(0);
#pragma unroll
    for (int i = k + 1; i < kN; ++i) tail = add_square(tail, a[i][k]);
    return tail;
  }

  // Of column k. Where hardly anything is below its diagonal, that may be nothing; and where all of
  // it is small, it is scaled, which `back` undoes.
  __device__ __forceinline__ Reflection<T> reflection(int k, R& back) {
    if (!kIsComplex<T> && k == kN - 1) return Reflection<T>::identity(a[k][k]);
    R tail = tail_of(k);
    bool is_identity = false;
    if (!(tail >= kSmallestSquares<R>)) {
      bool none = true;
      ColumnSize<R> size;
      size.take(a[k][k]);
#pragma unroll
      for (int i = k + 1; i < kN; ++i) {
        none &= is_zero(a[i][k]);
        size.take(a[i][k]);
      }
      if constexpr (kIsComplex<T>) none &= a[k][k].im == R(0);
      is_identity = none;
      if (!none && add_square(tail, a[k][k]) < kSmallestSquares<R>) {
        const R by = size.factor();
        back = inverse_power(by);
#pragma unroll
        for (int i = k; i < kN; ++i) a[i][k] = scale(a[i][k], by);
        tail = tail_of(k);
      }
    }
    return is_identity ? Reflection<T>::identity(a[k][k]) : Reflection<T>::of(a[k][k], tail);
  }
};

// NaN in what a thread's matrix has of `count` numbers, but for zeros below the diagonal of a
// triangle of kN columns.
template <int kN, class T>
__device__ __noinline__ void fill_failed_thread(T* to, int count, bool is_triangle) {
#pragma unroll 1
  for (int e = 0; e < count; ++e) {
    to[e] = is_triangle && e / kN > e % kN ? T(Real<T>(0)) : quiet_nan<T>();
  }
}

// Warps of a block: a warp of the smallest matrices has less to do than a block takes to start.
template <class T, int kN>
inline constexpr int kQrThreadWarps = sizeof(T) * kN * kN < 32 ? 8 : 1;

// What a warp has of shared memory.
template <class T, int kN>
inline constexpr int kQrStageElements =
    MatrixStage<T, kN>::kElements > RecordStage<T, kN>::kElements ? MatrixStage<T, kN>::kElements
                                                                  : RecordStage<T, kN>::kElements;

// One thread per matrix of exactly kN rows and columns; a warp moves its 32 matrices together.
template <class T, int kN>
__global__ void __launch_bounds__(32 * kQrThreadWarps<T, kN>) qr_thread_kernel(const QrProblem p) {
  using Stage = MatrixStage<T, kN>;
  using Taus = RecordStage<T, kN>;
  using R = Real<T>;
  constexpr int kWarps = kQrThreadWarps<T, kN>;
  const int lane = threadIdx.x % 32, warp = kWarps == 1 ? 0 : threadIdx.x / 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * 32;
  if (first >= p.batch || skips(p, first, 32)) return;
  const int records = static_cast<int>(min(int64_t{32}, p.batch - first));
  T* const stage = reinterpret_cast<T*>(dynamic_shared) + warp * kQrStageElements<T, kN>;
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
  ThreadQr<T, kN> f;
  Stage::for_each_read(
      own, [](int, int) { return true; }, [&](int i, int j, T a) { f.a[i][j] = a; });
  f.scale_columns();
  f.factorize();

  R back[kN];  // A is in the stage still
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    back[j] = R(1);
    if (!f.is_usual) {
      ColumnSize<R> size;
#pragma unroll 1
      for (int i = 0; i < kN; ++i) size.take(own[i * kN + j]);
      if (!size.is_usual()) back[j] = inverse_power(size.factor());
      f.failed |= !is_finite(real(f.a[j][j]) * back[j]);
    }
  }
  const bool raw = p.mode == QrProblem::kRaw;
  T by[kN];
#pragma unroll
  for (int j = 0; j < kN; ++j) by[j] = raw ? Reflection<T>::inverse(f.first[j]) : T(R(0));
  Stage::write(own, [&](int i, int j) {
    return j >= i ? scale(f.a[i][j], back[j]) : raw ? product(f.a[i][j], by[j]) : T(R(0));
  });
  __syncwarp();
  T* const r = p.r.at<T>(first, kN * kN);
  Stage::store(r, stage, records, lane);
  T* more = nullptr;  // Q or the taus
  int count = 0;      // of a matrix
  if (p.mode == QrProblem::kReduced || p.mode == QrProblem::kComplete) {
    f.form();
    __syncwarp();
    Stage::write(own, [&](int i, int j) { return f.a[i][j]; });
    __syncwarp();
    more = p.q.at<T>(first, kN * kN);
    count = kN * kN;
    Stage::store(more, stage, records, lane);
  } else if (raw) {
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      stage[lane * Taus::kStride + k] = Reflection<T>::tau(f.first[k], f.factor[k]);
    }
    __syncwarp();
    more = p.taus.at<T>(first, kN);
    count = kN;
    Taus::store(more, stage, records, lane);
  }
  __syncwarp();
  if (f.failed && lane < records) {
    fill_failed_thread<kN>(r + lane * (kN * kN), kN * kN, !raw);
    fill_failed_thread<kN>(more + lane * count, count, false);
  }
}

template <class T, int kN>
constexpr size_t qr_thread_bytes() {
  return kQrThreadWarps<T, kN> * kQrStageElements<T, kN> * sizeof(T);
}

}  // namespace jax_batched::cuda
