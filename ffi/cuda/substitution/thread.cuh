// Substitution, "thread": a thread per column of matrices of exact size kN.
#pragma once

#include "ffi/cuda/layout/staging.cuh"
#include "ffi/cuda/substitution/substitution.cuh"

namespace jax_batched::cuda {

template <class T, int kN>
struct ThreadSubstitutionShape {
  using Matrices = RecordStage<T, kN * kN>;
  using Vectors = RecordStage<T, kN>;
  static constexpr size_t kWarpBytes = (Matrices::kElements + Vectors::kElements) * sizeof(T);
  static constexpr int kWarps = kWarpBytes <= 12 * 1024 ? 4 : 1;
};

// Both sweeps on one column. m(i, j) reads the triangle.
template <int kSweeps, class T, int kN, class Element>
__device__ __forceinline__ void substitute_column(const Substitution<T>& s, T (&y)[kN],
                                                  const Element& m) {
#pragma unroll
  for (int i = 0; i < kN; ++i) y[i] = conj_if(s.first.conjugate, y[i]);
#pragma unroll
  for (int i = 0; i < kN; ++i) {
#pragma unroll
    for (int j = 0; j < i; ++j) y[i] = sub_mul(y[i], m(i, j), y[j]);
    if (!s.unit_diagonal) y[i] = divide(y[i], m(i, i));
  }
  if constexpr (kSweeps == 2) {
#pragma unroll
    for (int i = 0; i < kN; ++i) y[i] = conj(y[i]);
#pragma unroll
    for (int i = kN - 1; i >= 0; --i) {
#pragma unroll
      for (int k = kN - 1; k > i; --k) y[i] = sub_mul(y[i], m(k, i), y[k]);
      y[i] = divide(y[i], m(i, i));
    }
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) y[i] = conj_if(s.first.conjugate != (kSweeps == 2), y[i]);
}

// A warp stages 32 matrices, then its lanes take the 32 * nrhs columns in turn. Columns that are
// contiguous in memory (one per matrix, or x a = b) are staged as well.
template <class T, int kN, int kSweeps>
__global__ void __launch_bounds__(32 * ThreadSubstitutionShape<T, kN>::kWarps)
    thread_substitution(const Substitution<T> s) {
  using Shape = ThreadSubstitutionShape<T, kN>;
  using Matrices = typename Shape::Matrices;
  using Vectors = typename Shape::Vectors;
  extern __shared__ __align__(16) unsigned char shared[];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  T* const matrices = reinterpret_cast<T*>(shared + warp * Shape::kWarpBytes);
  T* const vectors = matrices + Matrices::kElements;
  const LowerSystem& system = s.first;
  const int a_start = static_cast<int>(system.a_start);
  const bool columns_contiguous = s.nrhs == 1 || system.x_row == 1 || system.x_row == -1;

  const int64_t stride = int64_t{32} * Shape::kWarps * gridDim.x;
  for (int64_t first = (int64_t{blockIdx.x} * Shape::kWarps + warp) * 32; first < s.batch;
       first += stride) {
    const int records = static_cast<int>(min(int64_t{32}, s.batch - first));
    if (s.a.contiguous()) {
      Matrices::load(matrices, s.a_of(first), records, lane);
    } else {
      for (int m = 0; m < records; ++m) {
        const T* a = s.a_of(first + m);
        for (int e = lane; e < kN * kN; e += 32) matrices[m * Matrices::kStride + e] = a[e];
      }
    }
    __syncwarp();
    const int64_t columns = records * s.nrhs;
    for (int64_t done = 0; done < columns; done += 32) {
      const int64_t column = done + lane;
      const bool active = column < columns;
      const int m = static_cast<int>(s.nrhs == 1 ? column : column / s.nrhs);
      const int64_t r = column - m * s.nrhs;
      const bool staged = columns_contiguous && s.b.contiguous();
      const int count = static_cast<int>(min(int64_t{32}, columns - done));
      const int64_t staged_start = first * kN * s.nrhs + done * kN;
      if (staged) {
        Vectors::load(vectors, s.b.template as<const T>() + staged_start, count, lane);
        __syncwarp();
      }
      if (active) {
        T y[kN];
        T* const staged_y = vectors + lane * Vectors::kStride + system.x_start;
        if (staged) {
#pragma unroll
          for (int i = 0; i < kN; ++i) y[i] = staged_y[i * static_cast<int>(system.x_row)];
        } else {
          const T* const b = s.b_of(first + m);
#pragma unroll
          for (int i = 0; i < kN; ++i) y[i] = b[x_offset(system, i, r)];
        }
        const T* const a = matrices + m * Matrices::kStride + a_start;
        substitute_column<kSweeps>(s, y, [&](int i, int j) { return a[a_offset(system, i, j)]; });
        if (staged) {
#pragma unroll
          for (int i = 0; i < kN; ++i) staged_y[i * static_cast<int>(system.x_row)] = y[i];
        } else {
          T* const x = s.x_of(first + m);
#pragma unroll
          for (int i = 0; i < kN; ++i) x[x_offset(system, i, r)] = y[i];
        }
      }
      __syncwarp();
      if (staged) {
        Vectors::store(s.x.template as<T>() + staged_start, vectors, count, lane);
        __syncwarp();
      }
    }
  }
}

}  // namespace jax_batched::cuda
