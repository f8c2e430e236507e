// Cholesky by one thread block, any n: left-looking over block columns.
//
// For each block column and each tile of kRows rows below its top:
//   acc = A - L(rows, left) L(columns, left)^H       in registers, kMicroRows x kMicroColumns each
//   8-wide panels: warp 0 factors the 8x8 diagonal block, a thread per row solves against it, and
//   acc -= L(rows, panel) L(columns, panel)^H        for the panels to the right.
// Left-looking, so that each entry of L is written once. The factor lives in shared memory
// (kResident: the fused solve) or in the output, from where `left` comes back through L2 in chunks
// of 64 bytes a row, two in flight.
#pragma once

#include <cuda_pipeline.h>

#include <cstdint>

#include "ffi/cuda/tile/math.cuh"
#include "ffi/cuda/tile/panel.cuh"

namespace jax_batched::cuda {

// Entry (r, c) of a triangular matrix, r >= c: an upper triangle is a transposed lower one.
template <class T>
struct TriangleView {
  T* data;
  int64_t row_stride, column_stride;
  __device__ __forceinline__ TriangleView(T* data, int n, bool upper)
      : data(data), row_stride(upper ? 1 : n), column_stride(upper ? n : 1) {}
  __device__ __forceinline__ T* at(int r, int c) const {
    return data + r * row_stride + c * column_stride;
  }
  __device__ __forceinline__ T* mirror(int r, int c) const { return at(c, r); }
};

template <class T, bool kResident>
struct BlockFactor {
  static constexpr int kThreads = 128;
  static constexpr int kColumnThreads = 8;
  static constexpr int kRowThreads = kThreads / kColumnThreads;
  static constexpr int kMicroRows = 4;
  static constexpr int kMicroColumns = sizeof(T) == 16 ? 4 : 8;
  static constexpr int kRows = kRowThreads * kMicroRows;           // of a tile: 64
  static constexpr int kColumns = kColumnThreads * kMicroColumns;  // of a block column: 64 or 32
  static constexpr int kDepth = static_cast<int>(64 / sizeof(T));  // columns of a chunk
  // Strides are odd multiples of 16 bytes: 8 rows read at once lie in different banks.
  static constexpr int kChunkRow = kVector<T> * make_odd(kDepth / kVector<T>);
  static constexpr int kTileRow = kVector<T> * make_odd(kColumns / kVector<T>);
  static constexpr int kChunkElements = (kRows + kColumns) * kChunkRow;
  static constexpr int kTileElements = kRows * kTileRow;
  static constexpr int kScratchElements =
      kTileElements > 2 * kChunkElements ? kTileElements : 2 * kChunkElements;

  static __host__ __device__ constexpr int resident_row(int n) {
    return kVector<T> * make_odd(ceil_div(round_up(n, 8), kVector<T>));
  }
  static __host__ __device__ constexpr int elements(int n) {
    return kResident ? n * resident_row(n) : kTileElements + kScratchElements;
  }
  static __host__ __device__ constexpr int inverses(int n) { return kResident ? n : kColumns; }
  static __host__ __device__ constexpr size_t shared_bytes(int n) {
    return elements(n) * sizeof(T) + inverses(n) * sizeof(Real<T>) + sizeof(int);
  }

  using Accumulator = T[kMicroRows][kMicroColumns];

  // Thread (row_thread, column_thread) holds rows row_thread + kRowThreads * i and columns
  // column_thread + kColumnThreads * j of a tile.
  static __device__ __forceinline__ int row_thread() { return threadIdx.x / kColumnThreads; }
  static __device__ __forceinline__ int column_thread() { return threadIdx.x % kColumnThreads; }

  // acc -= rows * columns^H over `depth` columns (a multiple of 16 bytes). Rows of either operand
  // from its limit on repeat the last one: what comes of them is never used.
  static __device__ __forceinline__ void subtract_product(Accumulator& acc, const T* rows,
                                                          int row_stride, int row_limit,
                                                          const T* columns, int column_stride,
                                                          int column_limit, int depth) {
    int row_at[kMicroRows], column_at[kMicroColumns];
#pragma unroll
    for (int i = 0; i < kMicroRows; ++i) {
      row_at[i] = min(row_thread() + kRowThreads * i, row_limit - 1) * row_stride;
    }
#pragma unroll
    for (int j = 0; j < kMicroColumns; ++j) {
      column_at[j] = min(column_thread() + kColumnThreads * j, column_limit - 1) * column_stride;
    }
#pragma unroll 1
    for (int k = 0; k < depth; k += kVector<T>) {
      Vector<T> row[kMicroRows];
#pragma unroll
      for (int i = 0; i < kMicroRows; ++i) {
        row[i] = *reinterpret_cast<const Vector<T>*>(rows + row_at[i] + k);
      }
#pragma unroll
      for (int j = 0; j < kMicroColumns; ++j) {
        const auto column = *reinterpret_cast<const Vector<T>*>(columns + column_at[j] + k);
#pragma unroll
        for (int z = 0; z < kVector<T>; ++z) {
#pragma unroll
          for (int i = 0; i < kMicroRows; ++i) {
            acc[i][j] = sub_mul_conj(acc[i][j], row[i].v[z], column.v[z]);
          }
        }
      }
    }
  }

  // Entries of A in a tile at (r0, c0); zeros outside the lower triangle.
  static __device__ __forceinline__ void load_tile(Accumulator& acc, const TriangleView<const T>& a,
                                                   int n, int r0, int c0, bool upper,
                                                   bool symmetrize) {
#pragma unroll
    for (int i = 0; i < kMicroRows; ++i) {
      const int r = r0 + row_thread() + kRowThreads * i;
#pragma unroll
      for (int j = 0; j < kMicroColumns; ++j) {
        const int c = c0 + column_thread() + kColumnThreads * j;
        T v = T(0);
        if (r < n && c <= r) {
          v = *a.at(r, c);
          if (symmetrize) v = hermitian_mean(v, *a.mirror(r, c));
        }
        acc[i][j] = v;
      }
    }
  }

  // Starts the copy of columns k0 .. k0 + kDepth - 1 of rows r0 .. r0 + count - 1 of L. Rows from n
  // on become zeros.
  static __device__ __forceinline__ void start_copy(T* chunk, const TriangleView<T>& l, int n,
                                                    int r0, int count, int k0, bool upper) {
    if (!upper && n % kVector<T> == 0) {
      constexpr int kRowVectors = kDepth / kVector<T>;
      for (int e = threadIdx.x; e < count * kRowVectors; e += kThreads) {
        const int r = e / kRowVectors, k = e % kRowVectors * kVector<T>;
        T* to = chunk + r * kChunkRow + k;
        if (r0 + r < n) {
          __pipeline_memcpy_async(to, l.at(r0 + r, k0 + k), 16);
        } else {
          *reinterpret_cast<Vector<T>*>(to) = Vector<T>{};
        }
      }
    } else {
      for (int e = threadIdx.x; e < count * kDepth; e += kThreads) {
        const int r = upper ? e % count : e / kDepth, k = upper ? e / count : e % kDepth;
        T* to = chunk + r * kChunkRow + k;
        if (r0 + r < n) {
          __pipeline_memcpy_async(to, l.at(r0 + r, k0 + k), sizeof(T));
        } else {
          *to = T(0);
        }
      }
    }
  }

  // acc -= L(rows, left) L(columns, left)^H, the factor coming from global memory.
  static __device__ __forceinline__ void subtract_left(Accumulator& acc, T* scratch,
                                                       const TriangleView<T>& l, int n, int r0,
                                                       int c0, bool upper) {
    const bool diagonal = r0 == c0;
    const auto start = [&](int k0) {
      T* chunk = scratch + k0 / kDepth % 2 * kChunkElements;
      start_copy(chunk, l, n, r0, kRows, k0, upper);
      if (!diagonal) start_copy(chunk + kRows * kChunkRow, l, n, c0, kColumns, k0, upper);
      __pipeline_commit();
    };
    start(0);
#pragma unroll 1
    for (int k0 = 0; k0 < c0; k0 += kDepth) {
      if (k0 + kDepth < c0) {
        start(k0 + kDepth);
        __pipeline_wait_prior(1);
      } else {
        __pipeline_wait_prior(0);
      }
      __syncthreads();
      const T* rows = scratch + k0 / kDepth % 2 * kChunkElements;
      const T* columns = diagonal ? rows : rows + kRows * kChunkRow;
      subtract_product(acc, rows, kChunkRow, kRows, columns, kChunkRow, kColumns, kDepth);
      __syncthreads();
    }
  }

  // Writes a finished tile, and zeros in the triangle that carries no data.
  static __device__ __forceinline__ void store_tile(T* l, const T* tile, int n, int r0, int c0,
                                                    bool upper) {
    const int rows = min(kRows, n - r0), columns = min(kColumns, n - c0);
    if (!upper) {
      for (int e = threadIdx.x; e < rows * kColumns; e += kThreads) {
        const int r = e / kColumns, c = e % kColumns;
        if (c >= columns) continue;
        l[static_cast<int64_t>(r0 + r) * n + c0 + c] =
            c0 + c <= r0 + r ? tile[r * kTileRow + c] : T(0);
      }
      if (r0 == c0) {
        for (int r = c0; r < c0 + columns; ++r) {
          for (int c = c0 + columns + threadIdx.x; c < n; c += kThreads) {
            l[static_cast<int64_t>(r) * n + c] = T(0);
          }
        }
      }
    } else {
      for (int e = threadIdx.x; e < kRows * columns; e += kThreads) {
        const int r = e % kRows, c = e / kRows;
        if (r >= rows) continue;
        l[static_cast<int64_t>(c0 + c) * n + r0 + r] =
            c0 + c <= r0 + r ? tile[r * kTileRow + c] : T(0);
      }
      if (r0 == c0) {
        for (int r = c0; r < c0 + columns; ++r) {
          for (int c = threadIdx.x; c < c0; c += kThreads) {
            l[static_cast<int64_t>(r) * n + c] = T(0);
          }
        }
      }
    }
  }

  // Factors the n x n matrix at `a`; `l` is the output (kResident: unused, the factor stays in
  // `shared` at stride resident_row(n), and inverse[k] = 1 / l_kk). Returns info, in every thread.
  static __device__ __forceinline__ int factor(const T* a, T* l, T* shared, Real<T>* inverse,
                                               int* shared_info, int n, bool upper,
                                               bool symmetrize) {
    const TriangleView<const T> input(a, n, upper);
    const TriangleView<T> output(l, n, upper);
    const int lane = threadIdx.x % 32;
    const int stride = kResident ? resident_row(n) : kTileRow;
    T* scratch = shared + kTileElements;
    int info = 0;  // kept by warp 0
#pragma unroll 1
    for (int c0 = 0; c0 < n; c0 += kColumns) {
      Real<T>* inverse_here = kResident ? inverse + c0 : inverse;
      const int panels = ceil_div(min(kColumns, n - c0), 8);
#pragma unroll 1
      for (int r0 = c0; r0 < n; r0 += kRows) {
        const bool diagonal = r0 == c0;
        const int rows = min(kRows, n - r0);
        Accumulator acc;
        load_tile(acc, input, n, r0, c0, upper, symmetrize);
        T* tile;
        const T* top;  // of the block column: its diagonal tile
        if constexpr (kResident) {
          tile = shared + r0 * stride + c0;
          top = shared + c0 * stride + c0;
          if (c0 > 0) {
            subtract_product(acc, shared + r0 * stride, stride, rows, shared + c0 * stride, stride,
                             n - c0, c0);
          }
        } else {
          tile = diagonal ? shared : scratch;
          top = shared;
          if (c0 > 0) subtract_left(acc, scratch, output, n, r0, c0, upper);
        }
#pragma unroll 1
        for (int p = 0; p < panels; ++p) {
          // Panel p of acc -> tile.
#pragma unroll
          for (int j = 0; j < kMicroColumns; ++j) {
            if (j != p) continue;
#pragma unroll
            for (int i = 0; i < kMicroRows; ++i) {
              const int r = row_thread() + kRowThreads * i;
              if (!kResident || r < rows) tile[r * stride + 8 * p + column_thread()] = acc[i][j];
            }
          }
          __syncthreads();
          if (diagonal) {
            if (threadIdx.x < 32) {
              using Block = Panel<T, 1, 1>;
              T x[1][8], none[1];
              T* own = tile + min(8 * p + lane % 8, rows - 1) * stride + 8 * p;
#pragma unroll
              for (int k = 0; k < 8; ++k) x[0][k] = own[k];
              __syncwarp();
              Real<T> own_inverse = 1;
              const Real<T> root = Block::template factor<false, true>(x, none, 0, n - c0 - 8 * p,
                                                                       lane, own_inverse);
              const unsigned failed = __ballot_sync(kFullWarp, is_nan(root));
              if (info == 0 && failed != 0) info = c0 + 8 * p + __ffs(failed);
              if (lane < 8 && 8 * p + lane < rows) {
#pragma unroll
                for (int k = 0; k < 8; ++k) own[k] = x[0][k];
                if (c0 + 8 * p + lane < n) inverse_here[8 * p + lane] = own_inverse;
              }
            }
            __syncthreads();
          }
          // x L_pp^H = row, a thread per row: x_k /= l_kk; x_j -= x_k conj(l_jk).
          const int r = threadIdx.x;
          if (r < rows && (!diagonal || r >= 8 * p + 8)) {
            T x[8];
            T* own = tile + r * stride + 8 * p;
#pragma unroll
            for (int k = 0; k < 8; ++k) x[k] = own[k];
            const T* block = top + 8 * p * stride + 8 * p;
            const int steps = n - c0 - 8 * p;
#pragma unroll
            for (int k = 0; k < 8; ++k) {
              if (k >= steps) continue;
              x[k] = scale(x[k], inverse_here[8 * p + k]);
#pragma unroll
              for (int j = k + 1; j < 8; ++j) {
                if (j < steps) x[j] = sub_mul_conj(x[j], x[k], block[j * stride + k]);
              }
            }
#pragma unroll
            for (int k = 0; k < 8; ++k) own[k] = x[k];
          }
          __syncthreads();
          if (p + 1 < panels) {
            subtract_product(acc, tile + 8 * p, stride, rows, top + 8 * p, stride,
                             min(kColumns, n - c0), 8);
          }
        }
        if constexpr (!kResident) {
          store_tile(l, tile, n, r0, c0, upper);
          __syncthreads();
        }
      }
    }
    if (threadIdx.x == 0) *shared_info = info;
    __syncthreads();
    return *shared_info;
  }
};

}  // namespace jax_batched::cuda
