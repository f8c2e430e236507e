// General matrices of a few rows: one thread each, in registers. Rows are exchanged by selects, as
// registers can only be indexed by constants.
#pragma once

#include "ffi/cuda/layout/matrix_stage.cuh"
#include "ffi/cuda/lu/determinant.cuh"
#include "ffi/cuda/lu/pivot.cuh"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

template <class T, int kN>
struct ThreadLu {
  T a[kN][kN];
  int pivots[kN];
  int row_at[kN];  // the row of A at each place
  int info = 0;

  // A = P^T L U, both in `a`. With kInverse the inverse (Gauss and Jordan): rows above the pivot
  // are changed like those below, column k becomes what the pivot's row contributed to them, and
  // the rows are divided by their pivots at the end. Column j is column row_at[j] of the inverse.
  template <bool kInverse>
  __device__ __forceinline__ void factor() {
    T diagonal[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) row_at[i] = i;
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      auto largest = pivot_key(magnitude(a[k][k]));
      int place = k;
#pragma unroll
      for (int i = k + 1; i < kN; ++i) {
        const auto key = pivot_key(magnitude(a[i][k]));
        if (key > largest) {
          largest = key;
          place = i;
        }
      }
      pivots[k] = place;
#pragma unroll
      for (int i = k + 1; i < kN; ++i) {
        const bool chosen = place == i;
#pragma unroll
        for (int j = 0; j < kN; ++j) exchange(chosen, a[k][j], a[i][j]);
        exchange(chosen, row_at[k], row_at[i]);
      }
      diagonal[k] = a[k][k];
      if (info == 0 && is_bad(diagonal[k])) info = k + 1;
      if (kInverse) a[k][k] = T(Real<T>(1));
      if (!kInverse && k == kN - 1) break;
      const auto by = PivotDivisor<T>::of(diagonal[k]);
#pragma unroll
      for (int i = kInverse ? 0 : k + 1; i < kN; ++i) {
        if (i == k) continue;
        const T l = i < k ? by(a[i][k]) : by.of_smaller(a[i][k]);
        a[i][k] = kInverse ? -l : l;
#pragma unroll
        for (int j = kInverse ? 0 : k + 1; j < kN; ++j) {
          if (j != k) a[i][j] = sub_mul(a[i][j], l, a[k][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; kInverse && i < kN; ++i) {
      const auto by = PivotDivisor<T>::of(diagonal[i]);
#pragma unroll
      for (int j = 0; j < kN; ++j) a[i][j] = by(a[i][j]);
    }
  }

  // y = (L U)^-1 y.
  __device__ __forceinline__ void solve(T (&y)[kN]) const {
#pragma unroll
    for (int k = 0; k < kN; ++k) {
#pragma unroll
      for (int i = k + 1; i < kN; ++i) y[i] = sub_mul(y[i], a[i][k], y[k]);
    }
#pragma unroll
    for (int k = kN - 1; k >= 0; --k) {
      y[k] = divide(y[k], a[k][k]);
#pragma unroll
      for (int i = 0; i < k; ++i) y[i] = sub_mul(y[i], a[i][k], y[k]);
    }
  }

  __device__ __forceinline__ Determinant<T> determinant() const {
    Determinant<T> product;
    bool odd = false;
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      product.multiply(a[k][k]);
      odd ^= pivots[k] != k;
    }
    product.negate_if(odd);
    return product;
  }

 private:
  template <class X>
  static __device__ __forceinline__ void exchange(bool chosen, X& x, X& y) {
    const X former = x;
    x = chosen ? y : x;
    y = chosen ? former : y;
  }
};

// What a warp's threads do with their matrices once they are in registers.
template <class T, int kN>
struct ThreadTask {
  using Matrices = MatrixStage<T, kN>;
  using Vectors = RecordStage<T, kN>;
  using Indices = RecordStage<int32_t, kN>;
  using Lu = ThreadLu<T, kN>;

  T* stage;
  int64_t first;
  int records, lane;

  __device__ __forceinline__ bool has_matrix() const { return lane < records; }
  __device__ __forceinline__ T* own() const { return stage + lane * Matrices::kStride; }
  __device__ __forceinline__ int64_t matrix() const { return first + lane; }

  __device__ __forceinline__ void store_matrices(const MatrixView<Packed>& to) const {
    __syncwarp();
    Matrices::store(to.at<T>(first, kN * kN), stage, records, lane);
  }
  __device__ __forceinline__ void store_indices(int32_t* to, const int (&indices)[kN]) const {
    __syncwarp();
    int32_t* staged = reinterpret_cast<int32_t*>(stage);
#pragma unroll
    for (int i = 0; i < kN; ++i) staged[lane * Indices::kStride + i] = indices[i];
    __syncwarp();
    Indices::store(to + first * kN, staged, records, lane);
  }

  __device__ __forceinline__ void finish(const LuProblem& p, Lu& f) const {
    f.template factor<false>();
    if (has_matrix()) {
      Matrices::write(own(), [&](int i, int j) { return f.a[i][j]; });
      p.info[matrix()] = f.info;
    }
    store_matrices(p.lu);
    store_indices(p.pivots, f.pivots);
    store_indices(p.permutation, f.row_at);
  }

  __device__ __forceinline__ void finish(const SolveGenProblem& p, Lu& f) const {
    f.template factor<false>();
    if (has_matrix()) p.info[matrix()] = f.info;
    const auto solve = [&](const T* b, T* x, int64_t stride) {
      T y[kN];
#pragma unroll
      for (int i = 0; i < kN; ++i) y[i] = b[f.row_at[i] * stride];
      f.solve(y);
#pragma unroll
      for (int i = 0; i < kN; ++i) x[i * stride] = f.info == 0 ? y[i] : quiet_nan<T>();
    };
    if (p.nrhs == 1 && p.b.contiguous()) {
      __syncwarp();
      Vectors::load(stage, p.b.as<const T>() + first * kN, records, lane);
      __syncwarp();
      T* y = stage + lane * Vectors::kStride;
      if (has_matrix()) solve(y, y, 1);
      __syncwarp();
      Vectors::store(p.x.at<T>(first, kN), stage, records, lane);
    } else if (has_matrix()) {
      const T* b = matrix_at<const T>(p.b, matrix(), kN, p.nrhs);
      T* x = p.x.at<T>(matrix(), kN, p.nrhs);
      for (int64_t c = 0; c < p.nrhs; ++c) solve(b + c, x + c, p.nrhs);
    }
  }

  __device__ __forceinline__ void finish(const InvProblem& p, Lu& f) const {
    f.template factor<true>();
    if (has_matrix()) {
      p.info[matrix()] = f.info;
#pragma unroll
      for (int i = 0; i < kN; ++i) {
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          own()[i * kN + f.row_at[j]] = f.info == 0 ? f.a[i][j] : quiet_nan<T>();
        }
      }
    }
    store_matrices(p.x);
  }

  template <class P>  // det and slogdet
  __device__ __forceinline__ void finish(const P& p, Lu& f) const {
    f.template factor<false>();
    if (has_matrix()) f.determinant().store(p, matrix());
  }
};

// One thread per matrix of exactly kN rows; a warp moves its 32 matrices together.
template <class P, class T, int kN>
__global__ void __launch_bounds__(32) lu_thread_kernel(const P p) {
  using Stage = MatrixStage<T, kN>;
  const int lane = threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 32;
  if (skips(p, first, 32)) return;
  const int records = static_cast<int>(min(int64_t{32}, p.batch - first));
  const ThreadTask<T, kN> task{reinterpret_cast<T*>(dynamic_shared), first, records, lane};
  if (p.a.contiguous()) {
    Stage::load(task.stage, p.a.template as<const T>() + first * (kN * kN), records, lane);
  } else {
    for (int record = 0; record < records; ++record) {
      const T* a = matrix_at<const T>(p.a, first + record, kN, kN);
      for (int e = lane; e < kN * kN; e += 32) task.stage[record * Stage::kStride + e] = a[e];
    }
  }
  __syncwarp();
  ThreadLu<T, kN> f;
  Stage::for_each_read(
      task.own(), [](int, int) { return true; }, [&](int i, int j, T a) { f.a[i][j] = a; });
  task.finish(p, f);
}

template <class T, int kN>
constexpr size_t lu_thread_bytes() {
  using Stage = MatrixStage<T, kN>;
  using Indices = RecordStage<int32_t, kN>;
  constexpr size_t kMatrices = Stage::kElements * sizeof(T);
  constexpr size_t kIndices = Indices::kElements * sizeof(int32_t);
  return kMatrices > kIndices ? kMatrices : kIndices;
}

}  // namespace jax_batched::cuda
