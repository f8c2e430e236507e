// Substitution, "block_tensor": columns in a warp's registers as tensor-core fragments; float64,
// many columns.
//
// A warp takes 8 kParts columns of a matrix with all their rows, from b to x: transposed, in tiles
// of 8 rows, each an accumulator of the tensor cores, whose products of doubles are FMAs in order.
// For each tile J of rows in turn
//   y_J = M(J, J)^-1 c_J    by way of shared memory, where a lane takes a whole column,
//   c_I <- c_I - M(I, J) y_J  for the tiles I that follow; y_J as it comes back is an operand.
// No warp waits for another, and an entry of M that is read serves 8 kParts columns; so more
// columns take less time for each than in "block_rows", whose lanes hold few of them. The second
// sweep (M^H) goes through the tiles from the last to the first, rows of a tile in reverse.
#pragma once

#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/quotient.cuh"
#include "ffi/cuda/device/tensor.cuh"
#include "ffi/cuda/device/with_constant.cuh"
#include "ffi/cuda/substitution/substitution.cuh"

namespace jax_batched::cuda {

// Shared memory: the triangle of M as a triangle of 8x8 tiles, in the order of rows; a pair
// (divisor, reciprocal) for each row; for each warp, a tile of its columns.
template <int kTiles, int kParts>
struct BlockTensorSubstitutionShape {
  static constexpr int kMaxWarps = 4;
  static constexpr int kColumns = 8 * kParts;
  static_assert(kColumns == 16 || kColumns == 32);  // so many lanes solve
  static constexpr int kPitch = kColumns + 4;       // a column of fragments in different banks
  static constexpr int kTile = 64;

  static __host__ __device__ constexpr int tile(int row, int column) {
    return (row * (row + 1) / 2 + column) * kTile;
  }
  static constexpr int kDivisors = tile(kTiles, 0);
  static __host__ __device__ constexpr int columns(int warp) {
    return kDivisors + 2 * 8 * kTiles + warp * 8 * kPitch;
  }
  static constexpr size_t shared_bytes(int warps) { return sizeof(double) * columns(warps); }

  // Entry (i, k) of a tile: neighbours are (i, k) and (i, k + 4), which a lane reads at once in the
  // first sweep; no read of either sweep has bank conflicts.
  static __host__ __device__ constexpr int at(int i, int k) {
    return 16 * (i % 4) + 2 * ((4 * (i / 4) + k % 4) ^ (2 * (i % 4))) + k / 4;
  }
};

template <int kTiles, int kParts>
struct FragmentColumns {
  using Shape = BlockTensorSubstitutionShape<kTiles, kParts>;
  // Of 8 columns (lane p = lane / 4) and 8 rows, a lane holds rows q = lane % 4 and q + 4.
  using Tile = double[kParts][2];

  Tile c[kTiles];
  int p, q;
  bool usual;  // every divisor allows quick quotients

  __device__ __forceinline__ void put(const Tile& tile, double* columns) const {
#pragma unroll
    for (int b = 0; b < kParts; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) columns[(q + 4 * h) * Shape::kPitch + 8 * b + p] = tile[b][h];
    }
  }
  __device__ __forceinline__ void get(Tile& tile, const double* columns) const {
#pragma unroll
    for (int b = 0; b < kParts; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) tile[b][h] = columns[(q + 4 * h) * Shape::kPitch + 8 * b + p];
    }
  }

  // c_I <- c_I - M(I, J) y, with the tile of M, or, kDescending, c_I <- c_I - M(J, I)^T y, rows and
  // columns of the tile in reverse.
  template <bool kDescending>
  __device__ __forceinline__ void subtract(Tile& to, const double* tile, const Tile& y) const {
    // Row p of this operand becomes column p = 2 q + h of the accumulator, where a lane wants row
    // q + 4 h of its tile. In k the order is the hardware's own, q and then q + 4, which adds the
    // products in the order of rows: not that of tensor.cuh, whose sums may take any.
    const int i = p / 2 + 4 * (p % 2);
    Pair<double> m;
    if constexpr (kDescending) {
      m = {tile[Shape::at(7 - q, 7 - i)], tile[Shape::at(3 - q, 7 - i)]};
    } else {
      m = *reinterpret_cast<const Pair<double>*>(tile + Shape::at(i, q));
    }
#pragma unroll
    for (int b = 0; b < kParts; b += 2) {
      double pair[2][2] = {{to[b][0], to[b][1]}, {to[b + 1][0], to[b + 1][1]}};
      subtract_product(pair, {{y[b][0], y[b][1]}, {y[b + 1][0], y[b + 1][1]}}, m);
#pragma unroll
      for (int h = 0; h < 2; ++h) to[b][h] = pair[0][h], to[b + 1][h] = pair[1][h];
    }
  }

  // The columns of a tile of rows <- the solution with a diagonal tile of M, a lane for each. The
  // quick quotients are taken unless one of the column's was not valid.
  template <bool kDescending>
  __device__ __forceinline__ void solve(const double* tile, const Pair<double>* divisors,
                                        double* columns) const {
    if (threadIdx.x % 32 >= Shape::kColumns) return;
    constexpr int kPitch = Shape::kPitch;
    const auto m = [&](int i, int k) {
      return tile[kDescending ? Shape::at(7 - k, 7 - i) : Shape::at(i, k)];
    };
    double* const own = columns + threadIdx.x % 32;
    double y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = own[i * kPitch];
    bool valid = usual;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const Pair<double> d = divisors[kDescending ? 7 - k : k];
      const Divisor<double> divisor{d.a, d.b, kQuotientHigh<double>};
      valid = valid && divisor.covers(y[k]);
      y[k] = divisor.quick(y[k]);
#pragma unroll
      for (int i = k + 1; i < 8; ++i) y[i] = sub_mul(y[i], m(i, k), y[k]);
    }
    if (valid) {
#pragma unroll
      for (int i = 0; i < 8; ++i) own[i * kPitch] = y[i];
    } else {
#pragma unroll 1
      for (int k = 0; k < 8; ++k) {
        const double y_k = own[k * kPitch] / divisors[kDescending ? 7 - k : k].a;
        own[k * kPitch] = y_k;
#pragma unroll 1
        for (int i = k + 1; i < 8; ++i) {
          own[i * kPitch] = sub_mul(own[i * kPitch], m(i, k), y_k);
        }
      }
    }
  }

  template <bool kDescending>
  __device__ __forceinline__ void sweep(const double* m, const Pair<double>* divisors,
                                        double* columns) {
    put(c[kDescending ? kTiles - 1 : 0], columns);
#pragma unroll 1
    for (int step = 0; step < kTiles; ++step) {
      const int j = kDescending ? kTiles - 1 - step : step;
      __syncwarp();
      solve<kDescending>(m + Shape::tile(j, j), divisors + 8 * j, columns);
      __syncwarp();
      Tile y;
      get(y, columns);
      __syncwarp();
      const double* const row = m + Shape::tile(j, 0);    // M(j, 0)
      const double* const column = m + j * Shape::kTile;  // M(I, j) from tile(I, 0) on
      with_constant<0, kTiles - 1>(j, [&](auto constant) {
        constexpr int kJ = constant.value;
#pragma unroll
        for (int b = 0; b < kParts; ++b) {
#pragma unroll
          for (int h = 0; h < 2; ++h) c[kJ][b][h] = y[b][h];
        }
        if constexpr (kDescending) {
#pragma unroll
          for (int i = kJ - 1; i >= 0; --i) {
            subtract<true>(c[i], row + i * Shape::kTile, y);
            if (i == kJ - 1) put(c[i], columns);
          }
        } else {
#pragma unroll
          for (int i = kJ + 1; i < kTiles; ++i) {
            subtract<false>(c[i], column + Shape::tile(i, 0), y);
            if (i == kJ + 1) put(c[i], columns);
          }
        }
      });
    }
  }

  // The rows of each tile in reverse, those from n on zero again: they may have become NaN.
  __device__ __forceinline__ void reverse(int n) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int b = 0; b < kParts; ++b) {
        const double first = shuffle_xor(c[t][b][1], 3), second = shuffle_xor(c[t][b][0], 3);
        c[t][b][0] = 8 * t + 7 - q < n ? first : 0;
        c[t][b][1] = 8 * t + 3 - q < n ? second : 0;
      }
    }
  }

  // Calls visit(c, inside, offset) for each element of the columns from `column` + p on, its place
  // in b and x and whether it is one of theirs.
  template <class Visit>
  __device__ __forceinline__ void for_each_element(const Substitution<double>& s, int64_t column,
                                                   bool reversed, const Visit& visit) {
    const LowerSystem& system = s.first;
    const int first = reversed ? 7 - q : q, half = reversed ? -4 : 4;
    int64_t offset = x_offset(system, first, column + p);
    const int64_t left = s.nrhs - column - p;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool row = 8 * t + first + h * half < s.n;
#pragma unroll
        for (int b = 0; b < kParts; ++b) {
          visit(c[t][b][h], row && 8 * b < left,
                offset + h * half * system.x_row + 8 * b * system.x_col);
        }
      }
      offset += 8 * system.x_row;
    }
  }
};

// Starts the copy of M, warp by warp a tile in turn; zeros in rows from n on.
template <class Shape, int kTiles>
__device__ __forceinline__ void start_tile_copies(double* m, const Substitution<double>& s,
                                                  const double* a) {
  const LowerSystem& system = s.first;
  const int lane = threadIdx.x % 32;
  const bool by_rows = rows_contiguous(system);
  // Entries e and e + 32 of a tile in the order of memory.
  const int i = by_rows ? lane / 8 : lane % 8, k = by_rows ? lane % 8 : lane / 8;
  const int next_i = by_rows ? i + 4 : i, next_k = by_rows ? k : k + 4;
  const double* const from = a + a_offset(system, i, k);
  const int next = a_offset(system, next_i - i, next_k - k);
  for_each_tile(kTiles, threadIdx.x / 32, blockDim.x / 32, [&](int row, int column) {
    double* const tile = m + Shape::tile(row, column);
    const double* const corner = from + a_offset(system, 8 * row, 8 * column);
    const auto copy = [&](int i, int k, const double* entry) {
      if (row == column && k > i) return;
      if (8 * row + i < s.n) {
        copy_async(tile + Shape::at(i, k), entry);
      } else {
        tile[Shape::at(i, k)] = 0;
      }
    };
    copy(i, k, corner);
    copy(next_i, next_k, corner + next);
  });
}

// Work item: (matrix, columns of a block), the columns running fastest.
template <int kTiles, int kParts, int kMinBlocks>
__global__ void __launch_bounds__(32 * BlockTensorSubstitutionShape<kTiles, kParts>::kMaxWarps,
                                  kMinBlocks)
    block_tensor_substitution(const Substitution<double> s, const int sweeps,
                              const int64_t column_groups) {
  using Shape = BlockTensorSubstitutionShape<kTiles, kParts>;
  extern __shared__ __align__(16) unsigned char shared[];
  double* const m = reinterpret_cast<double*>(shared);
  Pair<double>* const divisors = reinterpret_cast<Pair<double>*>(m + Shape::kDivisors);
  const int warp = threadIdx.x / 32;
  double* const columns = m + Shape::columns(warp);
  const int64_t item = blockIdx.x;
  const int64_t entry = item / column_groups;
  const LowerSystem& system = s.first;
  start_tile_copies<Shape, kTiles>(m, s, s.a_of(entry) + system.a_start);
  commit_copies();

  FragmentColumns<kTiles, kParts> y;
  y.p = threadIdx.x % 32 / 4;
  y.q = threadIdx.x % 4;
  const int64_t column =
      ((item - entry * column_groups) * (blockDim.x / 32) + warp) * Shape::kColumns;
  const double* const b = s.b_of(entry);
  y.for_each_element(s, column, false, [&](double& value, bool inside, int64_t offset) {
    value = inside ? b[offset] : 0;
  });
  wait_for_copies<0>();
  __syncthreads();
  bool usual = true;
  for (int i = threadIdx.x; i < 8 * kTiles; i += blockDim.x) {
    const bool one = s.unit_diagonal || i >= s.n;
    const auto divisor =
        Divisor<double>::of(one ? 1.0 : m[Shape::tile(i / 8, i / 8) + Shape::at(i % 8, i % 8)]);
    divisors[i] = {divisor.divisor, divisor.reciprocal};
    usual = usual && divisor.largest > 0;
  }
  y.usual = __syncthreads_and(usual);

  y.template sweep<false>(m, divisors, columns);
  const bool twice = sweeps == 2;
  if (twice) {
    y.reverse(s.n);
    y.template sweep<true>(m, divisors, columns);
  }
  double* const x = s.x_of(entry);
  y.for_each_element(s, column, twice, [&](double value, bool inside, int64_t offset) {
    if (inside) x[offset] = value;
  });
}

}  // namespace jax_batched::cuda
