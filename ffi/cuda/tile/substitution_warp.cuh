// Substitution, "warp": a warp (n <= 16: half of one) per matrix, the triangle in shared memory.
//
// The triangle is packed, M(i, j) at i (i + 1) / 2 + j: half the memory of a square, and with it
// twice the matrices in flight, which is what hides the latency of the substitution. Lanes that
// read a column meet no bank conflict, because the first 32 triangular numbers are distinct modulo
// 32; lanes that read a row read neighbours.
#pragma once

#include "ffi/cuda/tile/quotient.cuh"
#include "ffi/cuda/tile/substitution.cuh"

namespace jax_batched::cuda {

__host__ __device__ constexpr int packed_row(int i) { return i * (i + 1) / 2; }

template <class T, int kRows, int kColumns>
struct WarpSubstitutionShape {
  static constexpr int kWarps = kRows == 1 ? 4 : 1;
  // Resident blocks that the register cap is for: many small triangles fit in shared memory.
  static constexpr int kMinBlocks = kRows == 1 ? (sizeof(T) == 4   ? 8
                                                  : sizeof(T) == 8 ? 6
                                                                   : 4)
                                               : (kRows == 2 && kColumns * sizeof(T) == 4 ? 20 : 1);
  static constexpr int kFlight = kRows == 1 ? 4 : 8;  // loads in flight
};

// Copies a lower triangle in runs of kRun elements, 1 or a vector (n a multiple of it, `a`
// aligned). Entries beyond the diagonal that share a run with it are dropped. Through registers:
// asynchronous copies of single elements took some 12 cycles per instruction of a warp.
//
// As stored, the triangle is lower or, upside down, upper: row s has entries 0..s, in s / kRun + 1
// runs. Rows kRun f, ... and their mirror images, kRun (n / kRun - 1 - f), ..., make passes of
// n / kRun + 1 runs. Stored rows are rows of M, or columns from the last one back.
template <int kLanes, int kRun, int kFlight, class T>
__device__ __forceinline__ void load_packed(T* packed, const T* a, const LowerSystem& system, int n,
                                            int lane) {
  struct alignas(kRun * sizeof(T)) Run {
    T v[kRun];
  };
  const bool by_rows = rows_contiguous(system);
  const bool upper = by_rows == (system.a_start != 0);
  const int blocks = n / kRun;
  const int pass = blocks + 1;
  const int items = (blocks + 1) / 2 * kRun * pass;
  const unsigned inverse_pass = 0xffffffffu / pass + 1;  // t / pass = (t * this) >> 32, t < 2^16
#pragma unroll 1
  for (int first = lane; first < items; first += kLanes * kFlight) {
    Run value[kFlight];
    int row[kFlight];
    int column[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      const int t = first + u * kLanes;
      const int turn = __umulhi(t, inverse_pass);
      const int position = t - turn * pass;
      const int f = turn / kRun;
      const bool mirrored = position > f;
      row[u] = (mirrored ? blocks - 1 - f : f) * kRun + turn % kRun;
      column[u] = (mirrored ? position - f - 1 : position) * kRun;
      if (t >= items || (mirrored && 2 * f == blocks - 1)) row[u] = -1;
      if (row[u] >= 0) {
        const int offset = row[u] * n + column[u];
        value[u] = *reinterpret_cast<const Run*>(a + (upper ? n * n - kRun - offset : offset));
      }
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      // In the order of memory: entries c, c + 1, ... of the row, or upside down c, c - 1, ...
      const int c = column[u] + (upper ? kRun - 1 : 0);
      const int i = n - 1 - c;  // by columns, the row of M
      int position = by_rows ? packed_row(row[u]) + c : packed_row(i) + n - 1 - row[u];
      int step = by_rows ? (upper ? -1 : 1) : (upper ? i + 1 : -i);
#pragma unroll
      for (int z = 0; z < kRun; ++z) {
        if ((upper ? c - z : c + z) <= row[u]) packed[position] = value[u].v[z];
        position += step;
        if (!by_rows) ++step;
      }
    }
  }
}

// The sweeps of one warp. Lane l holds rows l, l + kLanes, ... of kColumns right-hand sides. In a
// step of the forward sweep every lane divides its own entry, and lane k's quotient y_k goes to
// all:
//   c_i <- c_i - M(i, k) y_k   for the rows i > k.
// The steps take the quick quotient. Afterwards, once per entry, each lane looks whether it was
// valid; the functions return whether it always was. If not, the solve is done again, unquick.
template <class T, int kLanes, int kRows, int kColumns>
struct WarpSweep {
  const T* packed;
  int n;
  int lane;
  int row_start[kRows];  // of this lane's rows; past the end, of one that is read but not used
  Divisor<T> divisor[kRows];

  template <bool kQuick>
  static __device__ __forceinline__ T quotient(const Divisor<T>& d, T b) {
    if constexpr (kQuick) {
      return d.quick(b);
    } else {
      return d(b);
    }
  }

  // Turns the numerators of the rows lane + r * kLanes into quotients.
  template <bool kQuick>
  __device__ __forceinline__ bool finish(int r, T (&y)[kColumns]) const {
    bool valid = true;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if constexpr (kQuick) {
        valid = valid && (lane + r * kLanes >= n || divisor[r].covers(y[c]));
      }
      y[c] = quotient<kQuick>(divisor[r], y[c]);
    }
    return valid;
  }

  template <bool kQuick>
  __device__ __forceinline__ bool forward(T (&y)[kRows][kColumns]) const {
    bool valid = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int steps = min(kLanes, n - r * kLanes);
#pragma unroll(kQuick ? 4 : 1)
      for (int k = 0; k < steps; ++k) {
        const int pivot = r * kLanes + k;
        T m[kRows];
#pragma unroll
        for (int q = r; q < kRows; ++q) m[q] = packed[row_start[q] + pivot];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const T y_pivot = shuffle(quotient<kQuick>(divisor[r], y[r][c]), k, kLanes);
          if (lane > k) y[r][c] = sub_mul(y[r][c], m[r], y_pivot);
#pragma unroll
          for (int q = r + 1; q < kRows; ++q) y[q][c] = sub_mul(y[q][c], m[q], y_pivot);
        }
      }
      valid = finish<kQuick>(r, y[r]) && valid;
    }
    return valid;
  }

  // The same from the last row up, with column `pivot` of M^T: row `pivot` of M.
  template <bool kQuick>
  __device__ __forceinline__ bool backward(T (&y)[kRows][kColumns]) const {
    bool valid = true;
#pragma unroll
    for (int r = kRows - 1; r >= 0; --r) {
#pragma unroll(kQuick ? 4 : 1)
      for (int k = min(kLanes, n - r * kLanes) - 1; k >= 0; --k) {
        const T* const pivot_row = packed + packed_row(r * kLanes + k);
        T m[kRows];
#pragma unroll
        for (int q = 0; q <= r; ++q)
          m[q] = pivot_row[q < r ? lane + q * kLanes : min(lane, k) + r * kLanes];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const T y_pivot = shuffle(quotient<kQuick>(divisor[r], y[r][c]), k, kLanes);
          if (lane < k) y[r][c] = sub_mul(y[r][c], m[r], y_pivot);
#pragma unroll
          for (int q = 0; q < r; ++q) y[q][c] = sub_mul(y[q][c], m[q], y_pivot);
        }
      }
      valid = finish<kQuick>(r, y[r]) && valid;
    }
    return valid;
  }

  // Loads kColumns right-hand sides from `column` on, and solves.
  template <bool kQuick, int kSweeps>
  __device__ __forceinline__ bool solve(T (&y)[kRows][kColumns], const T* b,
                                        const LowerSystem& system, int64_t column,
                                        int64_t nrhs) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int i = lane + r * kLanes;
        const bool inside = i < n && column + c < nrhs;
        const T value = inside ? b[x_offset(system, i, column + c)] : T(0);
        y[r][c] = conj_if(system.conjugate, value);
      }
    }
    bool valid = forward<kQuick>(y);
    if constexpr (kSweeps == 2) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) y[r][c] = conj(y[r][c]);
      }
      valid = backward<kQuick>(y) && valid;
    }
    return valid;
  }
};

template <class T, int kLanes, int kRows, int kColumns, int kSweeps>
__global__ void __launch_bounds__(32 * WarpSubstitutionShape<T, kRows, kColumns>::kWarps,
                                  WarpSubstitutionShape<T, kRows, kColumns>::kMinBlocks)
    warp_substitution(const Substitution<T> s) {
  using Shape = WarpSubstitutionShape<T, kRows, kColumns>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int n = s.n;
  const int lane = threadIdx.x % kLanes;
  const int group = threadIdx.x / kLanes;
  const int groups = blockDim.x / kLanes;
  T* const packed = reinterpret_cast<T*>(shared) + group * packed_row(n);
  const LowerSystem& system = s.first;

  const bool vectors = n % kVector<T> == 0 && reinterpret_cast<uintptr_t>(s.a) % 16 == 0;

  WarpSweep<T, kLanes, kRows, kColumns> sweep;
  sweep.packed = packed;
  sweep.n = n;
  sweep.lane = lane;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    sweep.row_start[r] = packed_row(min(lane + r * kLanes, n - 1));
  }

  // The bound is the same for both halves of a warp, so that its lanes stay together.
  const int64_t warp_first = int64_t{blockIdx.x} * groups + (threadIdx.x / 32) * (32 / kLanes);
  for (int64_t base = warp_first; base < s.batch; base += int64_t{gridDim.x} * groups) {
    const int64_t entry = min(base + group % (32 / kLanes), s.batch - 1);
    const bool stores = base + group % (32 / kLanes) < s.batch;
    const T* const b = s.b_of(entry);
    T* const x = s.x_of(entry);
    if (vectors) {
      load_packed<kLanes, kVector<T>, Shape::kFlight>(packed, s.a_of(entry), system, n, lane);
    } else {
      load_packed<kLanes, 1, Shape::kFlight>(packed, s.a_of(entry), system, n, lane);
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = lane + r * kLanes;
      const bool one = s.unit_diagonal || i >= n;
      sweep.divisor[r] = Divisor<T>::of(one ? T(1) : packed[sweep.row_start[r] + i]);
    }
    for (int64_t column = 0; column < s.nrhs; column += kColumns) {
      T y[kRows][kColumns];
      const bool valid = sweep.template solve<true, kSweeps>(y, b, system, column, s.nrhs);
      if (!__all_sync(kFullWarp, valid)) {
        sweep.template solve<false, kSweeps>(y, b, system, column, s.nrhs);
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
