// Cholesky by one thread block, any n: left-looking over block columns.
//
// For each block column (kColumns wide) and each tile of kRows rows from its diagonal down:
//   acc = A(rows, columns) - L(rows, left) L(columns, left)^H
//   for each 8-wide panel p of the tile:
//     X_p = acc_p L_pp^-H,    acc_j -= X_p L_jp^H  for the panels j > p.
// Left-looking, so that each entry of L is written once; `left` comes back through L2, kDepth
// columns at a time, two such chunks in flight.
//
// A warp keeps 8 * kRowTiles rows of the tile in registers, as 8x8 fragments (fragment.cuh). The
// rows below the diagonal tile therefore need no barrier between panels: a warp goes through its
// own rows, with L_jp and L_pp^-1 of the block column in shared memory. In the diagonal tile the
// warp that holds the 8x8 block L_pp factors and inverts it, a long chain of dependent operations:
// as soon as its column is up to date, while the others finish the update of the panel before.
//
// Every product is the same step, c -= a b^H. Doubles run on the tensor cores, where float64 is
// IEEE FMAs; all other types are plain FMA with both operands in shared memory. kCompensated is
// float32 on the tensor cores, for accuracy="fast": each number split into two of TF32
// (tensor.cuh).
// - A product of 8 columns is summed from zero and then subtracted from acc, since the tensor cores
//   truncate where an addition rounds.
// - The low part of a tiny acc would be subnormal, of which TF32 keeps no more than multiples of
//   2^-136. So acc is multiplied by a power of 4 on its way into the panels, and L divided by its
//   root on its way out, both exactly. (A row of L is at least 2^-75 long, the root of the smallest
//   float: what is subnormal there is nothing to it.)
#pragma once

#include <cstdint>
#include <type_traits>

#include "ffi/cuda/cholesky/panel.cuh"
#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/tensor.cuh"
#include "ffi/cuda/layout/view.cuh"

namespace jax_batched::cuda {

// How a block reaches its matrices: a lower triangle by vectors of 16 bytes (n a multiple of their
// length), a lower triangle by elements, or an upper triangle, by elements, as the transpose of a
// lower one. A template argument, as the addresses of all three do not fit into the registers.
enum class Access { kVectors, kElements, kUpper };

template <class Function>
auto with_access(bool upper, bool vectors, const Function& f) {
  using A = Access;
  if (upper) return f(std::integral_constant<A, A::kUpper>{});
  return vectors ? f(std::integral_constant<A, A::kVectors>{})
                 : f(std::integral_constant<A, A::kElements>{});
}

// What a block factors: A, or its averages in the memory of L. In shared memory, as registers are
// scarce.
template <class T>
struct Source {
  const T* data;
  bool mean;  // of both triangles
  int info;

  __device__ __forceinline__ View<T> matrix(int n) const { return View<T>::square(data, n); }
};

// A warp's rows by default, in tiles of 8.
template <class T, bool kCompensated>
inline constexpr int kUsualRowTiles = sizeof(T) == 4 && !kCompensated ? 4 : 2;

template <class T, int kDepth, Access kAccess, bool kPrefetch, bool kCompensated = false,
          int kRowTiles = kUsualRowTiles<T, kCompensated>>
struct BlockFactor {
  static_assert(!kCompensated || std::is_same_v<T, float>);
  static constexpr bool kUpper = kAccess == Access::kUpper;
  // What an access to global memory moves along a row.
  using Piece = std::conditional_t<kAccess == Access::kVectors, Vector<T>, T>;
  static constexpr int kPiece = static_cast<int>(sizeof(Piece) / sizeof(T));
  static constexpr bool kTensor = kCompensated || std::is_same_v<T, double>;
  // Rows of L come back as the vectors that cover them, with a neighbour at one end or both, so
  // that every other row begins at the second place in shared memory. (Doubles of odd n; operands
  // are read as two numbers then.)
  static constexpr bool kShifted = kAccess == Access::kElements && std::is_same_v<T, double>;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kColumnTiles = sizeof(T) == 16 ? 4 : 8;  // of a block column
  static constexpr int kColumnGroup = sizeof(T) == 4 ? 4 : 2;   // that take part together
  static constexpr int kWarpRows = 8 * kRowTiles;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kColumns = 8 * kColumnTiles;
  static_assert(kRows >= kColumns, "one tile holds the diagonal block");

  // Strides for which no access below has a bank conflict: plain FMA reads 16 bytes of 8 rows
  // (2t + h, or g) at once, the tensor cores' operands are 16 bytes of 4 neighbours in 2 rows, or
  // of floats 8 bytes in 4 rows; shifted, 8 bytes of 4 neighbours in 4 rows.
  static constexpr int kChunkRow = kDepth + (kShifted ? 4 : kTensor ? 8 : kVector<T>);
  static constexpr int kTileRow = kTensor ? 8 : 8 + kVector<T>;
  static constexpr int kTile = 8 * kTileRow;

  // Of the finished columns of a tile, which share the memory of the chunks.
  static constexpr int kFinishedRow = kColumns + (kTensor ? 8 : kVector<T>);

  static constexpr int kChunkElements = (kRows + kColumns) * kChunkRow;
  static constexpr int kWorkElements =
      2 * kChunkElements > kRows* kFinishedRow ? 2 * kChunkElements : kRows * kFinishedRow;
  static constexpr int kLowerTiles = kColumnTiles * (kColumnTiles + 1) / 2;
  static constexpr int kElements = kWorkElements + (kLowerTiles + kColumnTiles) * kTile;
  static_assert(kElements * sizeof(T) % alignof(Source<T>) == 0);
  static constexpr size_t kSharedBytes = kElements * sizeof(T) + sizeof(Source<T>);

  // A column of 8x8 tiles of the warp's rows, and all of them: entries (r, c) and (r, c + 1) of
  // this lane in row tile i and column tile j are acc[j][i][0] and acc[j][i][1], where r = r0 +
  // warp_row() + 8 i, c = c0 + pair_column() + 8 j.
  using TileColumn = T[kRowTiles][2];
  using Accumulator = TileColumn[kColumnTiles];

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int warp_row() { return kWarpRows * warp() + lane() / 4; }
  static __device__ __forceinline__ int pair_column() { return 2 * (lane() % 4); }

  // Left operand of a product, kStep columns of the warp's rows: pairs for the tensor cores,
  // otherwise 16 bytes of rows g.
  static constexpr int kStep = kTensor ? 8 : kVector<T>;
  using TensorOperand = std::conditional_t<kCompensated, SplitPair, Pair<T>>;
  using Left = std::conditional_t<kTensor, TensorOperand[2], Vector<T>[kRowTiles]>;

  static __device__ __forceinline__ TensorOperand operand(Pair<T> pair) {
    if constexpr (kCompensated) {
      return split(pair);
    } else {
      return pair;
    }
  }
  // kWhole: the pair is aligned as one.
  template <bool kWhole = true>
  static __device__ __forceinline__ TensorOperand load_operand(const T* pair) {
    if constexpr (kWhole) {
      return operand(*reinterpret_cast<const Pair<T>*>(pair));
    } else {
      return operand({pair[0], pair[1]});
    }
  }

  template <bool kWhole = true>
  static __device__ __forceinline__ void load_left(Left& a, const T* rows, int stride) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const T* from = rows + (8 * i + lane() / 4) * stride;
      if constexpr (kTensor) {
        a[i] = load_operand<kWhole>(from + pair_column());
      } else {
        a[i] = *reinterpret_cast<const Vector<T>*>(from);
      }
    }
  }

  // to = from - a b^H, b the 8 rows at `rows`.
  template <bool kWhole = true>
  static __device__ __forceinline__ void subtract(TileColumn& to, const TileColumn& from,
                                                  const Left& a, const T* rows, int stride) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      to[i][0] = from[i][0];
      to[i][1] = from[i][1];
    }
    if constexpr (kTensor) {
      subtract_product(to, a, load_operand<kWhole>(rows + lane() / 4 * stride + pair_column()));
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto b = *reinterpret_cast<const Vector<T>*>(rows + (pair_column() + h) * stride);
#pragma unroll
        for (int z = 0; z < kVector<T>; ++z) {
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            to[i][h] = sub_mul_conj(to[i][h], a[i].v[z], b.v[z]);
          }
        }
      }
    }
  }

  // Calls f(a, k) for the columns k .. k + kStep - 1 of a column of tiles as left operands; `rows`
  // is its place in shared memory. The tensor cores take what the registers hold.
  template <class F>
  static __device__ __forceinline__ void for_each_left(const TileColumn& m, const T* rows, F&& f) {
    Left a;
#pragma unroll
    for (int k = 0; k < 8; k += kStep) {
      if constexpr (kTensor) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) a[i] = operand({m[i][0], m[i][1]});
      } else {
        load_left(a, rows + k, kFinishedRow);
      }
      f(a, k);
    }
  }

  // Stores this lane's pairs of a column of tiles (kCompensated: times 2^-scale).
  static __device__ __forceinline__ void store_pairs(T* rows, const TileColumn& m, int scale = 0) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      T* to = rows + (8 * i + lane() / 4) * kFinishedRow + pair_column();
      if constexpr (kCompensated) {
        const T out = power_of_two(-scale);
        store_pair(to, {out * m[i][0], out * m[i][1]});
      } else {
        store_pair(to, m[i]);
      }
    }
  }
  static __device__ __forceinline__ void store_pair(T* to, const T (&pair)[2]) {
    *reinterpret_cast<Pair<T>*>(to) = {pair[0], pair[1]};
  }
  // Where this lane's pair lies in an 8x8 tile in shared memory.
  static __device__ __forceinline__ int tile_pair() {
    return lane() / 4 * kTileRow + pair_column();
  }

  // The k of a block column: acc is multiplied by 4^k on its way in, L by 2^-k on its way out. The
  // largest diagonal entry of the column comes to 1 or more, and no other entry becomes infinite by
  // that, as a_ij^2 < a_ii a_jj. Nothing is made smaller, since it could underflow, but for entries
  // so large that rounding to TF32 could give infinity.
  static __device__ __forceinline__ int find_scale(const View<T>& a, int c0) {
    if constexpr (kCompensated) {
      static_assert(kColumns == 64);
      const auto diagonal = [&](int i) { return a.data[min(i, a.rows - 1) * (a.ld + 1)]; };
      float largest = fmaxf(diagonal(c0 + lane()), diagonal(c0 + 32 + lane()));  // no NaN if it can
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
      const int exponent = static_cast<int>(__float_as_uint(fmaxf(largest, 0.0f)) >> 23) - 127;
      return exponent == 127 ? -1 : min((max(-exponent, 0) + 1) / 2, 63);
    } else {
      return 0;
    }
  }
  static __device__ __forceinline__ T power_of_two(int exponent) {
    return __uint_as_float((127 + exponent) << 23);
  }

  // By how much row r of L is shifted in a chunk.
  static __device__ __forceinline__ int shift_of(const T* l, int r) {
    return kShifted ? (reinterpret_cast<uintptr_t>(l) / sizeof(T) + r) % 2 : 0;
  }

  // acc -= a b^H for the column tiles j < last (and a few more): a is a chunk of the warp's rows, b
  // one of the columns.
  static __device__ __forceinline__ void subtract_chunk(Accumulator& acc, const T* rows,
                                                        const T* columns, int last) {
#pragma unroll(kTensor ? 2 : 1)
    for (int k = 0; k < kDepth; k += kStep) {
      Left left;
      load_left<!kShifted>(left, rows + k, kChunkRow);
#pragma unroll
      for (int first = 0; first < kColumnTiles; first += kColumnGroup) {
        if (first >= last) continue;
#pragma unroll
        for (int j = first; j < first + kColumnGroup; ++j) {
          subtract<!kShifted>(acc[j], acc[j], left, columns + 8 * j * kChunkRow + k, kChunkRow);
        }
      }
    }
  }

  // All panels of a tile below the diagonal one, unrolled: the products of a panel with different
  // columns overlap then.
  static __device__ __forceinline__ void solve_below(Accumulator& acc, const T* column,
                                                     const T* inverses, T* finished, int scale) {
#pragma unroll
    for (int p = 0; p < kColumnTiles; ++p) {
      TileColumn x = {};
      for_each_left(acc[p], finished + 8 * p, [&](const Left& left, int k) {
        subtract(x, x, left, inverses + p * kTile + k, kTileRow);
      });
      store_pairs(finished + 8 * p, x, scale);
      for_each_left(x, finished + 8 * p, [&](const Left& left, int k) {
#pragma unroll
        for (int j = p + 1; j < kColumnTiles; ++j) {
          subtract(acc[j], acc[j], left, column + (j - p) * kTile + k, kTileRow);
        }
      });
      column += (kColumnTiles - p) * kTile;
    }
  }

  // Starts the copy of columns k0 .. k0 + kDepth - 1 of rows r0 .. r0 + count - 1 of L. Rows from n
  // on become zeros.
  static __device__ __forceinline__ void start_copy(T* chunk, const T* l, int n, int r0, int count,
                                                    int k0) {
    constexpr int kRowPieces = kDepth / kPiece, kRowStep = kThreads / kRowPieces;
    const int thread = threadIdx.x;
    if constexpr (kUpper) {
#pragma unroll 1
      for (int e = thread; e < count * kDepth; e += kThreads) {
        const int r = e % count, k = e / count;
        T* to = chunk + r * kChunkRow + k;
        if (r0 + r < n) {
          copy_async(to, l + (k0 + k) * n + r0 + r);
        } else {
          *to = T(0);
        }
      }
    } else if constexpr (kShifted) {
      using V = Vector<T>;
      constexpr int kVectors = kDepth / kVector<T>, kVectorRows = kThreads / kVectors;
      const auto copy = [&](int r, int v) {
        V* to = reinterpret_cast<V*>(chunk + r * kChunkRow) + v;
        if (r0 + r < n) {
          const T* from = l + (r0 + r) * n + k0 - shift_of(l, r);
          copy_async(to, reinterpret_cast<const V*>(from) + v);
        } else {
          *to = V{};
        }
      };
#pragma unroll 4
      for (int r = thread / kVectors; r < count; r += kVectorRows) copy(r, thread % kVectors);
      static_assert(kRows <= kThreads);
      if (thread < count && shift_of(l, thread)) copy(thread, kVectors);
    } else {
      int r = thread / kRowPieces;
      const int k = thread % kRowPieces * kPiece;
      const T* from = l + (r0 + r) * n + k0 + k;
      T* to = chunk + r * kChunkRow + k;
#pragma unroll 4
      for (; r < count; r += kRowStep, from += kRowStep * n, to += kRowStep * kChunkRow) {
        if (r0 + r < n) {
          copy_async(reinterpret_cast<Piece*>(to), reinterpret_cast<const Piece*>(from));
        } else {
          *reinterpret_cast<Piece*>(to) = Piece{};
        }
      }
    }
  }

  // What the factorization reads of A in a tile; rows from n on are those of the identity. Above
  // the diagonal acc may hold anything: nothing comes of it. Addresses are clamped, as a branch per
  // load would wait for one load after the other.
  static __device__ __forceinline__ void load_tile(Accumulator& acc, const View<T>& a, int r0,
                                                   int c0, bool mean) {
    const int n = a.rows, row_step = kUpper ? 1 : a.ld, column_step = kUpper ? a.ld : 1;
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const int c = c0 + pair_column() + 8 * j;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        const int r = r0 + warp_row() + 8 * i;
        if (is_above(r0, c0, i, j)) continue;
        const T* from = a.data + min(r, n - 1) * row_step;
        if constexpr (kAccess == Access::kVectors && kVector<T> > 1) {
          const auto pair = *reinterpret_cast<const Pair<T>*>(from + min(c, n - 2));
          acc[j][i][0] = pair.a;
          acc[j][i][1] = pair.b;
        } else {
          acc[j][i][0] = from[min(c, n - 1) * column_step];
          acc[j][i][1] = from[min(c + 1, n - 1) * column_step];
        }
      }
    }
    if (mean) {
      const Part part{.upper = false, .mean = true, .checked = true};
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        const int c = c0 + pair_column() + 8 * j;
        if (is_above(r0, c0, kRowTiles - 1, j)) continue;
        TileColumn mirror;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          const T* from = a.data + min(r0 + warp_row() + 8 * i, n - 1) * column_step;
          mirror[i][0] = from[min(c, n - 1) * row_step];
          mirror[i][1] = from[min(c + 1, n - 1) * row_step];
        }
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          acc[j][i][0] = part.mean_of<T>(acc[j][i][0], mirror[i][0]);
          acc[j][i][1] = part.mean_of<T>(acc[j][i][1], mirror[i][1]);
        }
      }
    }
    if (r0 + kWarpRows * (warp() + 1) <= n) return;
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const int c = c0 + pair_column() + 8 * j;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        const int r = r0 + warp_row() + 8 * i;
        if (r < n) continue;
        acc[j][i][0] = T(r == c);
        acc[j][i][1] = T(r == c + 1);
      }
    }
  }

  static __device__ __forceinline__ void multiply(Accumulator& acc, T scale) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        acc[j][i][0] *= scale;
        acc[j][i][1] *= scale;
      }
    }
  }

  // Asks the L2 cache for what load_tile will read of a tile.
  static __device__ __forceinline__ void prefetch_tile(const View<T>& a, int r0, int c0) {
    constexpr int kLine = static_cast<int>(128 / sizeof(T)), kLines = kColumns / kLine;
    static_assert(kRows * kLines % kThreads == 0);
#pragma unroll
    for (int e = threadIdx.x; e < kRows * kLines; e += kThreads) {
      const int r = r0 + e / kLines, c = c0 + e % kLines * kLine;
      if (r < a.rows && c <= r) asm volatile("prefetch.global.L2 [%0];" : : "l"(a.at(r, c)));
    }
  }

  // True if column tile j lies above the diagonal at row tile i of this warp.
  static __device__ __forceinline__ bool is_above(int r0, int c0, int i, int j) {
    return r0 == c0 && j > kRowTiles * warp() + i;
  }

  // Writes the warp's rows of a finished tile, from shared memory; zeros above the diagonal.
  static __device__ __forceinline__ void store_tile(T* l, const T* finished, int n, int r0,
                                                    int c0) {
    const int columns = min(kColumns, n - c0), top = r0 + kWarpRows * warp();
    const int rows = min(kWarpRows, n - top), below = top - c0;  // c > r + below: above it
    if constexpr (kUpper) {
#pragma unroll 1
      for (int e = lane(); e < kWarpRows * columns; e += 32) {
        const int r = e % kWarpRows, c = e / kWarpRows;
        if (r < rows) {
          l[(c0 + c) * n + top + r] = c > r + below ? T(0) : finished[r * kFinishedRow + c];
        }
      }
    } else {
      constexpr int kLanes = kColumns / kPiece < 32 ? kColumns / kPiece : 32;  // of a row
#pragma unroll
      for (int first = 0; first < kColumns; first += kLanes * kPiece) {
        const int c = first + lane() % kLanes * kPiece;
        if (c >= columns) continue;
        int r = lane() / kLanes;
        T* to = l + (top + r) * n + c0 + c;
        const T* from = finished + r * kFinishedRow + c;
        constexpr int kRowStep = 32 / kLanes;
#pragma unroll 4
        for (; r < rows; r += kRowStep, to += kRowStep * n, from += kRowStep * kFinishedRow) {
          Piece piece = *reinterpret_cast<const Piece*>(from);
          if (r0 == c0) {
#pragma unroll
            for (int z = 0; z < kPiece; ++z) {
              if (c + z > r + below) reinterpret_cast<T*>(&piece)[z] = T(0);
            }
          }
          *reinterpret_cast<Piece*>(to) = piece;
        }
      }
    }
  }

  // Zeros right of the diagonal block at c0 (in U: left of it, in the same rows).
  static __device__ __forceinline__ void clear_beside(T* l, int n, int c0) {
    const int first = kUpper ? 0 : c0 + kColumns, width = kUpper ? c0 : n - first;
#pragma unroll 1
    for (int r = c0 + warp(); r < min(n, c0 + kColumns); r += kWarps) {
      for (int c = lane() * kPiece; c < width; c += 32 * kPiece) {
        *reinterpret_cast<Piece*>(l + r * n + first + c) = Piece{};
      }
    }
  }

  // Factors the 8x8 block in `tile` in place, by one warp: lanes 0..7 hold its rows, and lanes
  // 8..15 rows of the identity below it, which the same steps turn into those of L_pp^-H.
  // minus_inverse gets -L_pp^-1. Returns the number of the first failed pivot, 1..8, or 0.
  static __device__ __forceinline__ int factor_diagonal(T* tile, T* minus_inverse) {
    using Block = Panel<T, 1, 1>;
    const int r = lane();
    const auto load = [&](T(&x)[1][8]) {
#pragma unroll
      for (int k = 0; k < 8; ++k) x[0][k] = r < 8 ? tile[r * kTileRow + k] : T(r - 8 == k);
    };
    T x[1][8], none[1];
    Real<T> inverse;
    load(x);
    Real<T> root = Block::template factor<false>(x, none, 0, 8, r, inverse);
    // The careful path (careful.cuh) from registers: there are none for addresses in shared memory.
    if (__any_sync(kFullWarp, !plain_root(root))) {
      load(x);
      root = Block::template factor<false, true>(x, none, 0, 8, r, inverse);
    }
    __syncwarp();
    if (r < 8) {
#pragma unroll
      for (int k = 0; k < 8; ++k) tile[r * kTileRow + k] = x[0][k];
    } else if (r < 16) {
#pragma unroll
      for (int k = 0; k < 8; ++k) minus_inverse[k * kTileRow + r - 8] = -conj(x[0][k]);
    }
    return __ffs(__ballot_sync(kFullWarp, is_nan(root)));
  }

  static __device__ __forceinline__ Source<T>& source(T* shared) {
    return *reinterpret_cast<Source<T>*>(shared + kElements);
  }
  // Factors the source into `l`; kAccess says which triangle. Returns info, in every thread.
  static __device__ __forceinline__ int factor(int n, T* l, T* shared) {
    Source<T>& source = BlockFactor::source(shared);
    T* const lower = shared + kWorkElements;          // tiles L_pp, L_(p+1)p, ... of each panel p
    T* const inverses = lower + kLowerTiles * kTile;  // -L_pp^-1
    int* const info = &source.info;
    const int top_tile = kRowTiles * warp();  // of this warp, counted from the tile's top
    T* const finished = shared + kWarpRows * warp() * kFinishedRow;

#pragma unroll 1
    for (int c0 = 0; c0 < n; c0 += kColumns) {
      const int panels = ceil_div(min(kColumns, n - c0), 8);
      const int scale = find_scale(source.matrix(n), c0);
#pragma unroll 1
      for (int r0 = c0; r0 < n; r0 += kRows) {
        const bool diagonal = r0 == c0;
        const bool active = r0 + kWarpRows * warp() < n;
        // Column tiles that this warp's rows reach.
        const int last = !active ? 0 : diagonal ? min(panels, top_tile + kRowTiles) : panels;
        const auto start = [&](int k0) {
          T* chunk = shared + k0 / kDepth % 2 * kChunkElements;
          start_copy(chunk, l, n, r0, min(kRows, round_up(n - r0, kWarpRows)), k0);
          if (!diagonal) start_copy(chunk + kRows * kChunkRow, l, n, c0, kColumns, k0);
          commit_copies();
        };
        const auto finish = [&] {
          __syncwarp();
          if (active) store_tile(l, finished, n, r0, c0);
          __syncthreads();
        };
        if (c0 > 0) start(0);
        Accumulator acc;
        if (active) load_tile(acc, source.matrix(n), r0, c0, source.mean);
#pragma unroll 1
        for (int k0 = 0; k0 < c0; k0 += kDepth) {
          wait_for_copies<0>();
          __syncthreads();
          if (k0 + kDepth < c0) start(k0 + kDepth);
          if (!active) continue;
          const T* chunk = shared + k0 / kDepth % 2 * kChunkElements + shift_of(l, lane() / 4);
          const T* columns = diagonal ? chunk : chunk + kRows * kChunkRow;
          subtract_chunk(acc, chunk + kWarpRows * warp() * kChunkRow, columns, last);
        }
        if constexpr (kCompensated) {
          if (active) multiply(acc, power_of_two(2 * scale));
        }
        if (c0 > 0) __syncthreads();  // `finished` is where the chunks were
        if constexpr (kPrefetch && !kUpper) {
          const bool more = r0 + kRows < n;
          prefetch_tile(source.matrix(n), more ? r0 + kRows : c0 + kColumns,
                        more ? c0 : c0 + kColumns);
        }
        if constexpr (kTensor) {
          if (!diagonal && panels == kColumnTiles) {
            if (active) solve_below(acc, lower, inverses, finished, scale);
            finish();
            continue;
          }
        }
        T* column = lower;  // the tiles of panel p
#pragma unroll 1
        for (int p = -1;; ++p) {
          // acc[j] is column tile p + j: panel p is always the first.
          const int row_tile = p - top_tile;  // of this warp, that of L_pp in the diagonal tile
          TileColumn x;
          if (p >= 0) {
            if (diagonal) __syncthreads();
            if (p < last) {
              if constexpr (!kTensor) {
                store_pairs(finished + 8 * p, acc[0]);
                __syncwarp();
              }
#pragma unroll
              for (int i = 0; i < kRowTiles; ++i) x[i][0] = x[i][1] = T(0);
              for_each_left(acc[0], finished + 8 * p, [&](const Left& left, int k) {
                subtract(x, x, left, inverses + p * kTile + k, kTileRow);
              });
              if (diagonal) {
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) {
                  if (i == row_tile) {
                    const auto pair = *reinterpret_cast<const Pair<T>*>(column + tile_pair());
                    x[i][0] = pair.a;
                    x[i][1] = pair.b;
                  } else if (i > row_tile && top_tile + i < panels) {
                    store_pair(column + (i - row_tile) * kTile + tile_pair(), x[i]);
                  }
                }
              }
              __syncwarp();
              store_pairs(finished + 8 * p, x, scale);
            }
            if (p + 1 == panels) break;
            if (diagonal) {
              __syncthreads();
            } else {
              __syncwarp();
            }
            if (p + 1 < last) {
              for_each_left(x, finished + 8 * p, [&](const Left& left, int k) {
                subtract(acc[0], acc[k == 0 ? 1 : 0], left, column + kTile + k, kTileRow);
              });
            }
          }
          T* const next = p < 0 ? lower : column + (kColumnTiles - p) * kTile;
          if (diagonal && row_tile + 1 >= 0 && row_tile + 1 < kRowTiles) {
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
              if (i == row_tile + 1) store_pair(next + tile_pair(), acc[0][i]);
            }
            __syncwarp();
            const int failed = factor_diagonal(next, inverses + (p + 1) * kTile);
            if (failed != 0 && lane() == 0 && *info == 0) *info = c0 + 8 * (p + 1) + failed;
          }
          if (p >= 0 && p + 2 < last) {
            for_each_left(x, finished + 8 * p, [&](const Left& left, int k) {
#pragma unroll
              for (int j = 2; j < kColumnTiles; ++j) {
                if (p + j < last) {
                  subtract(acc[j - 1], acc[k == 0 ? j : j - 1], left, column + j * kTile + k,
                           kTileRow);
                }
              }
            });
          }
          column = next;
        }
        finish();
      }
      clear_beside(l, n, c0);
    }
    return *info;
  }
};

}  // namespace jax_batched::cuda
