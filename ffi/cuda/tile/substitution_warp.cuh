// Substitution, "warp": a warp (n <= 16: half of one) per matrix, the triangle in shared memory.
//
// The triangle is packed, M(i, j) at i (i + 1) / 2 + j: half the memory of a square, and with it
// twice the matrices in flight, which is what hides the latency of the substitution. Lanes that
// read a column meet no bank conflict, because the first 32 triangular numbers are distinct modulo
// 32; lanes that read a row read neighbours.
#pragma once

#include "ffi/cuda/tile/async_copy.cuh"
#include "ffi/cuda/tile/quotient.cuh"
#include "ffi/cuda/tile/substitution.cuh"

namespace jax_batched::cuda {

__host__ __device__ constexpr int packed_row(int i) { return i * (i + 1) / 2; }

// Copies a lower triangle (of a unit triangular matrix without its diagonal). Two short rows, or
// columns, make one pass of n elements.
template <int kLanes, class T>
__device__ __forceinline__ void load_packed(T* packed, const T* a, const LowerSystem& system, int n,
                                            bool unit_diagonal, int lane) {
  a += system.a_start;
  const bool by_rows = rows_contiguous(system);
  // By rows: row p and row n-2-p, the last row alone (p = -1). By columns: column p and column n-p,
  // the first alone.
  const int passes_start = by_rows ? -1 : 0;
  for (int p = passes_start; 2 * p <= (by_rows ? n - 2 : n) && p < n; ++p) {
    const int partner = by_rows ? n - 2 - p : n - p;
    const int length = by_rows ? p + 1 : n - p;
    const int end = partner == p ? length : n;
#pragma unroll 2
    for (int e = lane; e < end; e += kLanes) {
      int i, j;
      if (by_rows) {
        i = e < length ? p : partner;
        j = e < length ? e : e - length;
      } else {
        i = e < length ? p + e : e;
        j = e < length ? p : partner;
      }
      if (unit_diagonal && i == j) continue;
      copy_async(packed + packed_row(i) + j, a + a_offset(system, i, j));
    }
  }
}

// Lane l holds rows l, l + kLanes, ... of kColumns right-hand sides at a time. A step of the forward
// sweep: every lane divides its own entry, lane k's quotient y_k goes to all, and
//   c_i <- c_i - M(i, k) y_k   for the rows i > k.
template <class T, int kLanes, int kRows, int kColumns, int kSweeps>
__global__ void __launch_bounds__(128) warp_substitution(const Substitution<T> s) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int n = s.n;
  const int lane = threadIdx.x % kLanes;
  const int group = threadIdx.x / kLanes;
  const int groups = blockDim.x / kLanes;
  T* const packed = reinterpret_cast<T*>(shared) + group * packed_row(n);
  const LowerSystem& system = s.first;

  // Where this lane's rows begin; past the end, a row that is read but not used.
  int row_start[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) row_start[r] = packed_row(min(lane + r * kLanes, n - 1));

  // The bound is the same for both halves of a warp, so that its lanes stay together.
  const int64_t warp_first = int64_t{blockIdx.x} * groups + (threadIdx.x / 32) * (32 / kLanes);
  for (int64_t base = warp_first; base < s.batch; base += int64_t{gridDim.x} * groups) {
    const int64_t entry = min(base + group % (32 / kLanes), s.batch - 1);
    const bool stores = base + group % (32 / kLanes) < s.batch;
    const T* const b = s.b_of(entry);
    T* const x = s.x_of(entry);
    load_packed<kLanes>(packed, s.a_of(entry), system, n, s.unit_diagonal, lane);
    commit_copies();

    Divisor<T> divisor[kRows];
    for (int64_t column = 0; column < s.nrhs; column += kColumns) {
      T y[kRows][kColumns];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int i = lane + r * kLanes;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const bool inside = i < n && column + c < s.nrhs;
          y[r][c] = inside ? b[x_offset(system, i, column + c)] : T(0);
          y[r][c] = conj_if(system.conjugate, y[r][c]);
        }
      }
      if (column == 0) {
        wait_for_copies<0>();
        __syncwarp();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int i = lane + r * kLanes;
          const bool one = s.unit_diagonal || i >= n;
          divisor[r] = Divisor<T>::of(one ? T(1) : packed[row_start[r] + i]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int steps = min(kLanes, n - r * kLanes);
#pragma unroll 4
        for (int k = 0; k < steps; ++k) {
          const int pivot = r * kLanes + k;
          T m[kRows];
#pragma unroll
          for (int q = r; q < kRows; ++q) m[q] = packed[row_start[q] + pivot];
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const T own = divisor[r](y[r][c]);
            const T y_pivot = shuffle(own, k, kLanes);
            const T updated = sub_mul(y[r][c], m[r], y_pivot);
            if (lane > k) y[r][c] = updated;
            if (lane == k) y[r][c] = own;
#pragma unroll
            for (int q = r + 1; q < kRows; ++q) y[q][c] = sub_mul(y[q][c], m[q], y_pivot);
          }
        }
      }
      if constexpr (kSweeps == 2) {
        // The same from the last row up, with column `pivot` of M^H: row `pivot` of M, conjugated.
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) y[r][c] = conj(y[r][c]);
        }
#pragma unroll
        for (int r = kRows - 1; r >= 0; --r) {
          const int steps = min(kLanes, n - r * kLanes);
#pragma unroll 4
          for (int k = steps - 1; k >= 0; --k) {
            const T* const pivot_row = packed + packed_row(r * kLanes + k);
            T m[kRows];
#pragma unroll
            for (int q = 0; q <= r; ++q) {
              m[q] = pivot_row[q < r || lane < k ? lane + q * kLanes : 0];
            }
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
              const T own = divisor[r](y[r][c]);
              const T y_pivot = shuffle(own, k, kLanes);
              const T updated = sub_mul(y[r][c], m[r], y_pivot);
              if (lane < k) y[r][c] = updated;
              if (lane == k) y[r][c] = own;
#pragma unroll
              for (int q = 0; q < r; ++q) y[q][c] = sub_mul(y[q][c], m[q], y_pivot);
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int i = lane + r * kLanes;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (stores && i < n && column + c < s.nrhs) {
            x[x_offset(system, i, column + c)] =
                conj_if(system.conjugate != (kSweeps == 2), y[r][c]);
          }
        }
      }
    }
    __syncwarp();  // the triangle is overwritten next
  }
}

}  // namespace jax_batched::cuda
