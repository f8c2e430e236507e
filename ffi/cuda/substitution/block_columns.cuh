// Substitution, "block_columns": a thread per column; any n and nrhs.
//
// A block takes one matrix and 32 columns per warp. Row block by row block (kBlock rows), a lane
// keeps the rows of its column in registers:
//   c_I <- c_I - M(I, J) y_J  for the blocks J < I,  then  y_I = M(I, I)^-1 c_I.
// The blocks M(I, J) pass through shared memory, two in flight, and are read by broadcast in
// 16-byte vectors of a column; y_J is read back from x, where its own warp wrote it. Where the
// columns of x are not neighbours in memory (x a = b) its rows are: they pass through a buffer in
// shared memory.
#pragma once

#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/quotient.cuh"
#include "ffi/cuda/substitution/substitution.cuh"

namespace jax_batched::cuda {

template <class T, int kBlock>
struct BlockColumnsSubstitutionShape {
  static constexpr int kMaxWarps = 4;
  static constexpr int kTilePitch = kBlock + kVector<T>;  // keeps columns 16-byte aligned
  static constexpr int kTile = kBlock * kTilePitch;
  static constexpr int kBufferPitch = 33;
  static constexpr int kBuffer = kBlock * kBufferPitch;
  static constexpr size_t kBuffersOffset =
      (2 * kTile * sizeof(T) + kBlock * sizeof(Divisor<T>) + 15) / 16 * 16;
  static constexpr size_t shared_bytes(int warps) {
    return kBuffersOffset + warps * kBuffer * sizeof(T);
  }
};

// Moves kBlock rows of 32 columns between global memory and a warp's shared buffer, row r of the
// buffer at r * 33, along the dimension that is contiguous in memory. Outside the matrix: zeros.
template <int kBlock, class T>
struct ColumnBuffer {
  static constexpr int kPitch = BlockColumnsSubstitutionShape<T, kBlock>::kBufferPitch;
  static constexpr int kFlight = 8;  // loads in flight

  static __device__ __forceinline__ void load(T* buffer, const T* matrix, const LowerSystem& system,
                                              int row, int n, int64_t column, int64_t nrhs) {
    const int lane = threadIdx.x % 32;
    const bool columns_fastest = system.x_col == 1;
#pragma unroll 1
    for (int first = 0; first < kBlock; first += kFlight) {
      T value[kFlight];
      int position[kFlight];
#pragma unroll
      for (int u = 0; u < kFlight; ++u) {
        const int e = (first + u) * 32 + lane;
        const int i = columns_fastest ? e / 32 : e % kBlock;
        const int c = columns_fastest ? e % 32 : e / kBlock;
        const bool inside = row + i < n && column + c < nrhs;
        value[u] = inside ? matrix[x_offset(system, row + i, column + c)] : T(0);
        position[u] = i * kPitch + c;
      }
#pragma unroll
      for (int u = 0; u < kFlight; ++u) buffer[position[u]] = value[u];
    }
  }

  static __device__ __forceinline__ void store(T* matrix, const T* buffer,
                                               const LowerSystem& system, int row, int n,
                                               int64_t column, int64_t nrhs) {
    const int lane = threadIdx.x % 32;
    const bool columns_fastest = system.x_col == 1;
#pragma unroll 4
    for (int step = 0; step < kBlock; ++step) {
      const int e = step * 32 + lane;
      const int i = columns_fastest ? e / 32 : e % kBlock;
      const int c = columns_fastest ? e % 32 : e / kBlock;
      if (row + i < n && column + c < nrhs) {
        matrix[x_offset(system, row + i, column + c)] = buffer[i * kPitch + c];
      }
    }
  }
};

// Starts the copy of block (row_block, column_block) of M, transposed: M(i, k) at k * pitch + i.
// Entries outside the triangle are set to zero.
template <int kBlock, class T>
__device__ __forceinline__ void load_block(T* tile, const T* a, const LowerSystem& system, int n,
                                           bool unit_diagonal, int row_block, int column_block) {
  constexpr int kPitch = BlockColumnsSubstitutionShape<T, kBlock>::kTilePitch;
  const bool by_rows = rows_contiguous(system);
  a += system.a_start;
  for (int e = threadIdx.x; e < kBlock * kBlock; e += blockDim.x) {
    // By rows, a warp takes 8 columns of 4 rows: whole sectors, and no bank conflict.
    const int strip = e / 32;
    const int k = by_rows ? strip % (kBlock / 8) * 8 + e % 8 : e / kBlock;
    const int i = by_rows ? strip / (kBlock / 8) * 4 + e / 8 % 4 : e % kBlock;
    const int global_i = row_block * kBlock + i;
    const int global_k = column_block * kBlock + k;
    if (global_i < n && global_k + (unit_diagonal ? 1 : 0) <= global_i) {
      copy_async(tile + k * kPitch + i, a + a_offset(system, global_i, global_k));
    } else {
      tile[k * kPitch + i] = T(0);
    }
  }
}

// One sweep of a block's columns, from c to x, which may be the same.
template <int kBlock, class T>
__device__ __forceinline__ void sweep_columns(T* tiles, Divisor<T>* divisors, T* buffer, const T* a,
                                              const T* c, T* x, const LowerSystem& system, int n,
                                              int64_t column, int64_t nrhs, bool unit_diagonal) {
  using Shape = BlockColumnsSubstitutionShape<T, kBlock>;
  using Buffer = ColumnBuffer<kBlock, T>;
  const int lane = threadIdx.x % 32;
  const int blocks = ceil_div(n, kBlock);
  const bool direct = !kIsComplex<T> && system.x_col == 1;
  const int64_t own_column = column + lane;
  const bool in_range = own_column < nrhs;
  int stage = 0;
  load_block<kBlock>(tiles, a, system, n, unit_diagonal, 0, 0);
  commit_copies();
  for (int row_block = 0; row_block < blocks; ++row_block) {
    T y[kBlock];
    const int row = row_block * kBlock;
    if (direct) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        const bool inside = row + i < n && in_range;
        y[i] = inside ? c[x_offset(system, row + i, own_column)] : T(0);
      }
    } else {
      Buffer::load(buffer, c, system, row, n, column, nrhs);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kBlock; ++i) y[i] = buffer[i * Shape::kBufferPitch + lane];
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) y[i] = conj_if(system.conjugate, y[i]);
    for (int column_block = 0; column_block <= row_block; ++column_block) {
      wait_for_copies<0>();
      __syncthreads();  // the block is there, and the one before it is done with
      const T* const tile = tiles + stage * Shape::kTile;
      stage ^= 1;
      const bool diagonal = column_block == row_block;
      const int next_row = diagonal ? row_block + 1 : row_block;
      if (next_row < blocks) {
        load_block<kBlock>(tiles + stage * Shape::kTile, a, system, n, unit_diagonal, next_row,
                           diagonal ? 0 : column_block + 1);
      }
      commit_copies();
      if (!diagonal) {
        constexpr int kFlight = 8;  // entries of y_J loaded at a time
        if (!direct) {
          Buffer::load(buffer, x, system, column_block * kBlock, n, column, nrhs);
          __syncwarp();
        }
        const T* const x_block = x + x_offset(system, column_block * kBlock, own_column);
#pragma unroll 1
        for (int first = 0; first < kBlock; first += kFlight) {
          T y_k[kFlight];
#pragma unroll
          for (int u = 0; u < kFlight; ++u) {
            if (direct) {
              y_k[u] = in_range ? x_block[(first + u) * system.x_row] : T(0);
            } else {
              y_k[u] = buffer[(first + u) * Shape::kBufferPitch + lane];
            }
            y_k[u] = conj_if(system.conjugate, y_k[u]);
          }
#pragma unroll
          for (int u = 0; u < kFlight; ++u) {
            const Vector<T>* const m =
                reinterpret_cast<const Vector<T>*>(tile + (first + u) * Shape::kTilePitch);
#pragma unroll
            for (int v = 0; v < kBlock / kVector<T>; ++v) {
              const Vector<T> entries = m[v];
#pragma unroll
              for (int z = 0; z < kVector<T>; ++z) {
                y[v * kVector<T> + z] = sub_mul(y[v * kVector<T> + z], entries.v[z], y_k[u]);
              }
            }
          }
        }
        __syncwarp();
      } else {
        if (threadIdx.x < kBlock) {
          const int k = threadIdx.x;
          const bool one = unit_diagonal || row_block * kBlock + k >= n;
          divisors[k] = Divisor<T>::of(one ? T(1) : tile[k * Shape::kTilePitch + k]);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kBlock; ++k) {
          y[k] = divisors[k](y[k]);
#pragma unroll
          for (int i = k + 1; i < kBlock; ++i) {
            y[i] = sub_mul(y[i], tile[k * Shape::kTilePitch + i], y[k]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBlock; ++i) y[i] = conj_if(system.conjugate, y[i]);
    if (direct) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        if (row + i < n && in_range) x[x_offset(system, row + i, own_column)] = y[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) buffer[i * Shape::kBufferPitch + lane] = y[i];
      __syncwarp();
      Buffer::store(x, buffer, system, row, n, column, nrhs);
    }
    __syncwarp();  // other lanes of this warp read x next
  }
}

// Work item: (matrix, 32 columns per warp), the columns running fastest.
template <class T, int kBlock, int kSweeps>
__global__ void __launch_bounds__(32 * BlockColumnsSubstitutionShape<T, kBlock>::kMaxWarps)
    block_columns_substitution(const Substitution<T> s, const int64_t column_groups) {
  using Shape = BlockColumnsSubstitutionShape<T, kBlock>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const tiles = reinterpret_cast<T*>(shared);
  Divisor<T>* const divisors = reinterpret_cast<Divisor<T>*>(tiles + 2 * Shape::kTile);
  const int warp = threadIdx.x / 32;
  T* const buffer = reinterpret_cast<T*>(shared + Shape::kBuffersOffset) + warp * Shape::kBuffer;

  for (int64_t item = blockIdx.x; item < s.batch * column_groups; item += gridDim.x) {
    const int64_t entry = item / column_groups;
    const int64_t column = (item - entry * column_groups) * blockDim.x + warp * 32;
    const T* const a = s.a_of(entry);
    T* const x = s.x_of(entry);
    sweep_columns<kBlock>(tiles, divisors, buffer, a, s.b_of(entry), x, s.first, s.n, column,
                          s.nrhs, s.unit_diagonal);
    __syncthreads();  // the blocks are overwritten next
    if constexpr (kSweeps == 2) {
      sweep_columns<kBlock>(tiles, divisors, buffer, a, static_cast<const T*>(x), x, s.second, s.n,
                            column, s.nrhs, false);
      __syncthreads();
    }
  }
}

}  // namespace jax_batched::cuda
