// R = B - s A X: a pass over A at the speed of memory, for few right-hand sides.
//
// General A: a group of lanes per row. Hermitian A: only one triangle is read, half the bytes; a
// group of lanes or several warps per matrix, each lane with columns of its own. Sums are in an
// order that depends on the matrix's size alone.
#pragma once

#include <cstdint>

#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/layout/view.cuh"
#include "ffi/cuda/residual/policy.h"
#include "ffi/cuda/runtime/launch.cuh"

namespace jax_batched::cuda {

// An entry of s A, or of its absolute value.
template <class T>
__device__ __forceinline__ T scaled_entry(const ResidualProblem& p, T stored, Real<T> s) {
  const T v = scale(stored, s);
  return p.absolute ? T(absolute(v)) : v;
}

// Entries at, at + 1, ... of a row; zeros from `end` on.
template <class T>
__device__ __forceinline__ void load_entries(T (&to)[kVector<T>], const T* row, int at, int end,
                                             bool whole_vectors) {
  if (whole_vectors) {
    const auto v = at < end ? *reinterpret_cast<const Vector<T>*>(row + at) : Vector<T>{};
#pragma unroll
    for (int z = 0; z < kVector<T>; ++z) to[z] = v.v[z];
  } else {
#pragma unroll
    for (int z = 0; z < kVector<T>; ++z) to[z] = at + z < end ? row[at + z] : T(0);
  }
}

inline constexpr int kResidualThreads = 256;

// r_ic = b_ic - sum_j s a_ij x_jc: a row per kLanes lanes; x comes through the L1 cache.
template <class T, int kLanes>
__global__ void __launch_bounds__(kResidualThreads) residual_rows(const ResidualProblem p) {
  const int64_t rows = p.batch * p.m;
  const int64_t thread = blockIdx.x * int64_t{kResidualThreads} + threadIdx.x;
  const int lane = threadIdx.x % kLanes;
  const bool inside = thread / kLanes < rows;
  const int64_t row = inside ? thread / kLanes : rows - 1;
  const int64_t matrix =
      rows <= UINT32_MAX ? static_cast<uint32_t>(row) / static_cast<uint32_t>(p.m) : row / p.m;
  if (!__any_sync(kFullWarp, is_wanted(p, matrix))) return;
  const int i = static_cast<int>(row - matrix * p.m);
  const T* a = p.a.as<const T>() + (p.a.layout.map(matrix) * p.m + i) * p.n;
  const T* x = p.x.at<const T>(matrix, p.n, p.nrhs);
  const T* b = p.b.as<const T>() + (p.b.layout.map(matrix) * p.m + i) * p.nrhs;
  const Real<T> s = *p.scale.at<const Real<T>>(matrix, 1);
  const bool whole_vectors = p.n % kVector<T> == 0;
  for (int64_t c = 0; c < p.nrhs; ++c) {
    T sum(0);
#pragma unroll 4
    for (int j = kVector<T> * lane; j < p.n; j += kVector<T> * kLanes) {
      T v[kVector<T>];
      load_entries(v, a, j, p.n, whole_vectors);
#pragma unroll
      for (int z = 0; z < kVector<T>; ++z) {
        if (j + z < p.n) sum = add_mul(sum, scaled_entry(p, v[z], s), x[(j + z) * p.nrhs + c]);
      }
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) sum = sum + shuffle_xor(sum, mask);
    if (inside && lane == 0) p.r.as<T>()[row * p.nrhs + c] = b[c] - sum;
  }
}

// Sums each of 8 values over kLanes lanes, halving what a lane holds as long as it can: lane l ends
// with the sums of values l * 8 / kLanes, ... in v[0], ... (kLanes < 8) or of value l % 8.
template <class T, int kLanes>
__device__ __forceinline__ void sum_over_lanes(T (&v)[8], int lane) {
  int held = 8;
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) {
    if (held > 1) {
      // The lane with this bit set keeps the odd ones.
      const bool odd = lane & mask;
      held /= 2;
#pragma unroll
      for (int z = 0; z < 4; ++z) {
        if (z < held) {
          const T mine = odd ? v[2 * z + 1] : v[2 * z], other = odd ? v[2 * z] : v[2 * z + 1];
          v[z] = mine + shuffle_xor(other, mask);
        }
      }
    } else {
      v[0] = v[0] + shuffle_xor(v[0], mask);
    }
  }
}

// A matrix per kLanes lanes (kWarps = 1), or per block of kWarps warps. A lane has the columns of
// kChunks vectors; the rows of the triangle pass in groups of 8, dealt out to the warps:
//   row sums     u_i = sum_j a_ij x_j over the triangle, summed over the lanes;
//   column sums  w_j += conj(a_ij) x_i over its strict part, in the registers of j's lane;
//   r = b - (u + w).
// Groups of 8 rows, so that 8 loads are under way and the sums over the lanes take 7 shuffles more
// than one row's.
template <class T, int kLanes, int kChunks, int kWarps>
struct HermitianResidual {
  static constexpr int kBlockWarps = kWarps > 1 ? kWarps : 4;
  static constexpr int kThreads = 32 * kBlockWarps;
  static constexpr int kMatrices = kWarps > 1 ? 1 : kThreads / kLanes;  // of a block
  static constexpr int kWidth = kLanes * kChunks * kVector<T>;
  static constexpr int kRowSums = kWidth;                  // x before them
  static constexpr int kColumnSums = 2 * kWidth;           // of each warp
  static constexpr int kElements = (2 + kWarps) * kWidth;  // of shared memory, per matrix
  static constexpr size_t kSharedBytes = sizeof(T) * kElements * kMatrices;

  static __device__ __forceinline__ void sync() {
    if constexpr (kWarps > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  static __device__ __forceinline__ void run(const ResidualProblem& p, T* shared) {
    if (skips(p, blockIdx.x * int64_t{kMatrices}, kMatrices)) return;
    constexpr int V = kVector<T>;
    const int lane = threadIdx.x % kLanes;
    const int warp = kWarps > 1 ? threadIdx.x / 32 : 0;
    const int member = warp * 32 + lane;  // of those that work on the matrix
    constexpr int kMembers = kWarps > 1 ? kThreads : kLanes;
    const int slot = kWarps > 1 ? 0 : threadIdx.x / kLanes;
    const int64_t place = blockIdx.x * int64_t{kMatrices} + slot;
    const bool inside = place < p.batch;
    const int64_t matrix = inside ? place : p.batch - 1;
    const T* a = p.a.at<const T>(matrix, p.n, p.n);
    const T* x = p.x.at<const T>(matrix, p.n, p.nrhs);
    const T* b = p.b.at<const T>(matrix, p.n, p.nrhs);
    const Real<T> s = *p.scale.at<const Real<T>>(matrix, 1);
    const bool whole_vectors = p.n % kVector<T> == 0;
    T* all_x = shared + slot * kElements;
    T* row_sums = all_x + kRowSums;
    T* column_sums = all_x + kColumnSums;

    for (int64_t c = 0; c < p.nrhs; ++c) {
      for (int j = member; j < kWidth; j += kMembers) {
        all_x[j] = j < p.n ? x[j * p.nrhs + c] : T(0);
      }
      sync();
      T own_x[kChunks][V], w[kChunks][V];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int z = 0; z < V; ++z) {
          own_x[chunk][z] = all_x[(chunk * kLanes + lane) * V + z];
          w[chunk][z] = T(0);
        }
      }
#pragma unroll 1
      for (int first = 8 * warp; first < p.n; first += 8 * kWarps) {
        T u[8], row_x[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          u[k] = T(0);
          row_x[k] = all_x[first + k];
        }
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          const int begin = chunk * kLanes * V;
          if (p.upper ? begin + kLanes * V <= first : begin > first + 7) continue;
          const int column = begin + lane * V;
          T v[8][V];
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            const int i = first + k;
            const bool read = i < p.n && (p.upper ? column + V > i : column <= i);
            load_entries(v[k], a + int64_t{i} * p.n, column, read ? p.n : 0, whole_vectors);
          }
#pragma unroll
          for (int k = 0; k < 8; ++k) {
#pragma unroll
            for (int z = 0; z < V; ++z) {
              const int i = first + k, j = column + z;
              const bool strict = p.upper ? j > i : j < i;
              const T stored = strict ? v[k][z] : j == i ? T(real(v[k][z])) : T(0);
              const T value = scaled_entry(p, stored, s);
              u[k] = add_mul(u[k], value, own_x[chunk][z]);
              if (strict) w[chunk][z] = add_conj_mul(w[chunk][z], value, row_x[k]);
            }
          }
        }
        sum_over_lanes<T, kLanes>(u, lane);
        if (kLanes <= 8 || lane < 8) row_sums[first + lane] = u[0];
      }
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int z = 0; z < V; ++z) {
          column_sums[warp * kWidth + (chunk * kLanes + lane) * V + z] = w[chunk][z];
        }
      }
      sync();
      for (int i = member; i < p.n; i += kMembers) {
        T sum = row_sums[i];
#pragma unroll
        for (int other = 0; other < kWarps; ++other) sum = sum + column_sums[other * kWidth + i];
        if (inside) p.r.as<T>()[(matrix * p.n + i) * p.nrhs + c] = b[i * p.nrhs + c] - sum;
      }
      sync();
    }
  }
};

template <class T, int kLanes, int kChunks, int kWarps>
__global__ void __launch_bounds__((HermitianResidual<T, kLanes, kChunks, kWarps>::kThreads))
    residual_hermitian(const ResidualProblem p) {
  extern __shared__ __align__(16) unsigned char shared[];
  HermitianResidual<T, kLanes, kChunks, kWarps>::run(p, reinterpret_cast<T*>(shared));
}

}  // namespace jax_batched::cuda
