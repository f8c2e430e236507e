// General matrices of any size: a block of threads for each, by panels of kWidth columns.
//
// The matrix is in shared memory ("block_shared"), or stays where L and U go ("block"; "tall" for
// many rows and few columns). For each panel:
//   its columns are factored in registers, whole rows in a thread, by as many warps as rows need;
//   its exchanges are made in the other columns, by a thread per column, which then solves
//     U_12 = L_11^-1 A_12;
//   A_22 -= L_21 U_12, by tiles in registers.
// Right-hand sides are further columns, and back substitution has the last two steps, from the last
// rows upwards.
#pragma once

#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/layout/view.cuh"
#include "ffi/cuda/lu/determinant.cuh"
#include "ffi/cuda/lu/pivot.cuh"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

enum class LuUse { kFactors, kSolve, kInverse, kDeterminant };

// The best row of a warp.
template <class T, int kVectors>
struct PivotCandidate {
  Vector<T> entries[kVectors];
  PivotDivisor<T> by;
  PivotKey<T> key;
  int place;
};

inline constexpr int kMaxTallColumns = 512;
enum class LuPlace { kShared, kFar, kTall };  // kTall: far, with L_21 too large to be kept near

// kWarps: those that factor a panel of kWidth columns; kSlots: rows of each of their threads.
template <class T, int kThreads, int kWarps, int kSlots, int kWidth, LuUse kUse, LuPlace kPlace>
struct BlockLu {
  static constexpr int kPanelThreads = 32 * kWarps;
  static constexpr int kMaxRows = kPanelThreads * kSlots;
  static constexpr bool kTall = kPlace == LuPlace::kTall;
  static constexpr int kMaxSteps = kTall ? kMaxTallColumns : kMaxRows;
  static constexpr bool kShared = kPlace == LuPlace::kShared;
  static_assert(kPanelThreads <= kThreads);
  static constexpr int kPanelVectors = kWidth / kVector<T>;
  static constexpr int kTileRows = 4;
  static constexpr int kTileVectors = sizeof(T) == 4 ? 1 : 2;
  static constexpr bool kInverse = kUse == LuUse::kInverse;
  // Whether L_11 and L_21 are kept beside the matrix: where it is far, or gets other entries there.
  static constexpr bool kKeepsLeft = kInverse || kPlace == LuPlace::kFar;
  static constexpr int kLeftStride = kVector<T> * make_odd(kPanelVectors);
  static_assert(kWidth % kVector<T> == 0 && kWidth % kTileRows == 0);

  struct Fixed {
    alignas(16) PivotCandidate<T, kPanelVectors> candidates[2][kWarps];  // this step, last step
    int source[kWidth];   // of the panel's pivots: where they were
    int target[kWidth];   // of the rows that were first in the panel: where they went
    int order[kMaxRows];  // the row of A at each place
    int pivots[kMaxSteps];
    int first_bad;  // step, from 1
  };

  const int m, n;
  const int rhs;      // the column where right-hand sides begin: n, on a vector's boundary
  const int columns;  // with them
  int ld;             // in shared memory: rows begin an odd number of vectors apart
  T* a;
  Fixed* fixed;
  PivotDivisor<T>* diagonal;  // of U
  T* left;                    // rows of L_11 and L_21
  T* top;                     // U_12, where the matrix is far
  int top_ld;
  int thread;
  int info;

  static __host__ __device__ constexpr int padded(int columns) {
    return kVector<T> * make_odd(ceil_div(columns, kVector<T>));
  }
  static __host__ __device__ constexpr int all_columns(int n, int nrhs) {
    return nrhs == 0 ? n : round_up(n, kVector<T>) + nrhs;
  }
  static __host__ __device__ constexpr size_t bytes(int m, int n, int nrhs) {
    const int row = padded(all_columns(n, nrhs));
    size_t elements = kWidth;  // the last panel may reach beyond the last row
    if (kShared) elements += static_cast<size_t>(round_up(m, kTileRows)) * row;
    if (kKeepsLeft) elements += static_cast<size_t>(round_up(m, kTileRows)) * kLeftStride;
    if (!kShared) elements += static_cast<size_t>(kWidth) * row;
    const size_t divisors =
        kShared ? round_up(n * static_cast<int>(sizeof(PivotDivisor<T>)), 16) : 0;
    return round_up(static_cast<int>(sizeof(Fixed)), 16) + divisors + elements * sizeof(T);
  }

  // `out`: the result, for a matrix that is not in shared memory.
  __device__ __forceinline__ BlockLu(int m, int n, int nrhs, T* out)
      : m(m),
        n(n),
        rhs(round_up(n, kVector<T>)),
        columns(all_columns(n, nrhs)),
        thread(threadIdx.x) {
    unsigned char* at = dynamic_shared;
    fixed = reinterpret_cast<Fixed*>(at);
    at += round_up(static_cast<int>(sizeof(Fixed)), 16);
    diagonal = reinterpret_cast<PivotDivisor<T>*>(at);
    if (kShared) at += round_up(n * static_cast<int>(sizeof(PivotDivisor<T>)), 16);
    T* rest = reinterpret_cast<T*>(at);
    left = rest;
    if (kKeepsLeft) rest += round_up(m, kTileRows) * kLeftStride;
    const int row = padded(columns);
    if constexpr (kShared) {
      a = rest;
      ld = row;
    } else {
      top = rest;
      top_ld = row;
      a = out;
      ld = n;
    }
  }

  static __device__ __forceinline__ void sync() {
    if constexpr (kThreads == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ bool whole_vectors() const { return n % kVector<T> == 0; }

  // A, in its order; loaded() waits for it.
  __device__ __forceinline__ void load(const T* from) const {
    for (int i = thread; i < m; i += kThreads) fixed->order[i] = i;
    if (thread == 0) fixed->first_bad = INT32_MAX;
    if constexpr (kShared) {
      copy_rows(a, ld, from, m, n, thread, kThreads);
    } else if (from != a) {
      store_rows(a, from, n, m, n, thread, kThreads, [](int i) { return i; });
    }
  }
  __device__ __forceinline__ void loaded() const {
    if constexpr (kShared) {
      commit_copies();
      wait_for_copies<0>();
    }
    sync();
  }

  __device__ __forceinline__ void factor() {
    const int steps = min(m, n);
#pragma unroll 1
    for (int j = 0; j < steps; j += kWidth) {
      const int rows = min(kWidth, steps - j);
      if (thread < kPanelThreads) factor_panel(j, rows);
      sync();
      const int right = j + kWidth < n ? j + kWidth : rhs;
      // Columns of L are exchanged where they are wanted.
      const int left_columns = kUse == LuUse::kFactors ? j : 0;
      for_columns(0, left_columns + max(columns - right, 0), [&](int i) {
        const bool is_left = i < left_columns;
        const int c = is_left ? i : i - left_columns + right;
        exchange_rows(j, rows, c, [&](T(&y)[kWidth]) {
          if (is_left) return;
          solve_lower(rows, j, y);
          for_rows(rows, [&](int r) {
            if (!kShared) top[r * top_ld + c] = y[r];
          });
        });
      });
      sync();
      const T* u = kShared ? a + j * ld : top;
      subtract_product(j + rows, m, right, columns, panel(j), u, kShared ? ld : top_ld, kWidth);
      sync();
    }
    for (int i = thread; i < steps; i += kThreads) {
      if (is_bad(entry_of_u(i))) atomicMin(&fixed->first_bad, i + 1);
    }
    sync();
    take_info();
  }

  // The inverse, by Gauss and Jordan: with the panel's rows Y = L_11^-1 A_1 and X = U_11^-1 Y,
  //   A_2 -= L_21 Y below, A_0 -= A_01 X above, A_1 = X,
  // where the panel's own columns begin as those of the identity. Column j is that of the row at
  // place j.
  __device__ __forceinline__ void invert() {
#pragma unroll 1
    for (int j = 0; j < n; j += kWidth) {
      const int rows = min(kWidth, n - j);
      if (thread < kPanelThreads) factor_panel(j, rows);
      for (int i = thread; i < j; i += kThreads) {
        for_rows(rows, [&](int k) { left[i * kLeftStride + k] = a[i * ld + j + k]; });
      }
      sync();
      for (int i = thread; i < n; i += kThreads) {
        for_rows(rows, [&](int k) { a[i * ld + j + k] = T(Real<T>(i == j + k ? 1 : 0)); });
      }
      for (int i = thread; i < rows; i += kThreads) {
        const T u = left[(j + i) * kLeftStride + i];
        diagonal[j + i] = PivotDivisor<T>::of(u);
        if (is_bad(u)) atomicMin(&fixed->first_bad, j + i + 1);
      }
      sync();
      for_columns(0, n, [&](int c) {
        if (c >= j && c < j + rows) {
          T y[kWidth];
          for_rows(rows, [&](int i) { y[i] = a[(j + i) * ld + c]; });
          solve_lower(rows, j, y);
          for_rows(rows, [&](int i) { a[(j + i) * ld + c] = y[i]; });
        } else {
          exchange_rows(j, rows, c, [&](T(&y)[kWidth]) { solve_lower(rows, j, y); });
        }
      });
      sync();
      subtract_product(j + rows, n, 0, n, left, a + j * ld, ld, rows);
      sync();
      for_columns(0, n,
                  [&](int c) { solve_upper(rows, j, left + j * kLeftStride, kLeftStride, c); });
      sync();
      subtract_product(0, j, 0, n, left, a + j * ld, ld, rows);
      sync();
    }
    take_info();
  }

  // U X = Y in the columns of the right-hand sides.
  __device__ __forceinline__ void substitute() {
    for (int i = thread; i < n; i += kThreads) diagonal[i] = PivotDivisor<T>::of(entry_of_u(i));
    sync();
#pragma unroll 1
    for (int j = (n - 1) / kWidth * kWidth; j >= 0; j -= kWidth) {
      const int rows = min(kWidth, n - j);
      for_columns(rhs, columns, [&](int c) { solve_upper(rows, j, a + j * ld + j, ld, c); });
      sync();
      subtract_product(0, j, rhs, columns, a + j, a + j * ld, ld, rows);
      sync();
    }
  }

  __device__ __forceinline__ T entry_of_u(int i) const { return a[i * ld + i]; }

  // Whether the number of exchanges is odd, for the first warp.
  __device__ __forceinline__ bool is_odd() const {
    unsigned odd = 0;
    for (int i = thread; i < round_up(n, 32); i += 32) {
      odd ^= __popc(__ballot_sync(kFullWarp, i < n && fixed->pivots[i] != i)) % 2;
    }
    return odd != 0;
  }

 private:
  __device__ __forceinline__ void take_info() {
    info = fixed->first_bad == INT32_MAX ? 0 : fixed->first_bad;
  }

  // Calls f(c) for columns begin, ..., end - 1, dealt out to the threads.
  template <class F>
  __device__ __forceinline__ void for_columns(int begin, int end, const F& f) const {
#pragma unroll 1
    for (int c = begin + thread; c < end; c += kThreads) f(c);
  }
  // Calls f(i) for i < rows, at most kWidth, with constants.
  template <class F>
  static __device__ __forceinline__ void for_rows(int rows, const F& f) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (i < rows) f(i);
    }
  }

  // Where L_11 and L_21 of the panel lie, from its first column on.
  __device__ __forceinline__ T* panel(int j) const { return kKeepsLeft ? left : a + j; }
  __device__ __forceinline__ int panel_ld() const { return kKeepsLeft ? kLeftStride : ld; }

  // Columns j, ..., of which `rows` have a pivot.
  __device__ __forceinline__ void factor_panel(int j, int rows) {
    const int width = min(kWidth, n - j);
    T v[kSlots][kWidth];
    int place[kSlots], origin[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int row = j + thread + s * kPanelThreads;
      place[s] = kNoPlace;
      if (row < m) {
        place[s] = row;
        load_panel_row(v[s], a + row * ld + j, width);
        if (!kTall) origin[s] = fixed->order[row];
      }
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (k < rows) step(j, k, v, place);
    }
    if constexpr (kTall) {  // registers are short in the steps
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const int row = j + thread + s * kPanelThreads;
        if (row < m) origin[s] = fixed->order[row];
      }
    }
    panel_sync();
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int row = j + thread + s * kPanelThreads;
      if (row >= m) continue;
      const int at = last_place(place[s]);
      fixed->order[at] = origin[s];
      if (at < j + rows) fixed->source[at - j] = row;
      if (row < j + rows) fixed->target[row - j] = at;
      if constexpr (kKeepsLeft) {
#pragma unroll
        for (int q = 0; q < kPanelVectors; ++q) {
          reinterpret_cast<Vector<T>*>(left + at * kLeftStride)[q] = vector(v[s], q);
        }
      }
      if constexpr (!kInverse) store_panel_row(v[s], a + at * ld + j, width);
    }
  }
  static __device__ __forceinline__ void panel_sync() {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      asm volatile("bar.sync 1, %0;" : : "n"(kPanelThreads) : "memory");
    }
  }

  __device__ __forceinline__ void step(int j, int k, T (&v)[kSlots][kWidth], int (&place)[kSlots]) {
    constexpr int V = kVector<T>;
    Best<T> best = best_of<T>(place, [&](int s) { return v[s][k]; });
    const auto own = PivotDivisor<T>::of(best.value);
    const bool is_best = PivotSearch<32, false>{thread % 32}(best.key, best.place);
    auto& candidates = fixed->candidates[k % 2];
    auto& ours = candidates[thread / 32];
    if (is_best) {
      ours.by = own;
      ours.place = best.place;
      ours.key = best.key;
    }
    if (kWarps > 1 && best.key < 0) ours.key = best.key;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (!is_best || (kSlots > 1 && best.slot != s)) continue;
#pragma unroll
      for (int q = 0; q < kPanelVectors; ++q) {
        if ((q + 1) * V > k) ours.entries[q] = vector(v[s], q);
      }
    }
    panel_sync();
    int winner = 0;
    int chosen = candidates[0].place;
    if constexpr (kWarps > 1) {
      PivotKey<T> largest = candidates[0].key;
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        const PivotKey<T> key = candidates[w].key;
        const int other = candidates[w].place;
        if (key > largest || (key == largest && other < chosen)) {
          largest = key;
          chosen = other;
          winner = w;
        }
      }
    }
    const auto& row = candidates[winner];
    const PivotDivisor<T> by = row.by;
    if (thread == 0) fixed->pivots[j + k] = chosen;
    T l[kSlots];
    bool below[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      place[s] = next_place(place[s], place[s] == chosen, chosen, j + k);
      below[s] = place[s] >= 0;
      l[s] = by.of_smaller(v[s][k]);
      if (below[s]) v[s][k] = l[s];
    }
#pragma unroll
    for (int q = 0; q < kPanelVectors; ++q) {
      if ((q + 1) * V <= k + 1) continue;
      const Vector<T> u = row.entries[q];
#pragma unroll
      for (int z = 0; z < V; ++z) {
        const int c = q * V + z;
        if (c <= k) continue;
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          if (below[s]) v[s][c] = sub_mul(v[s][c], l[s], u.v[z]);
        }
      }
    }
  }

  // A row of the panel: columns beyond the matrix are not touched.
  __device__ __forceinline__ void load_panel_row(T (&v)[kWidth], const T* from, int width) const {
    if (kShared || (width == kWidth && whole_vectors())) {
#pragma unroll
      for (int q = 0; q < kPanelVectors; ++q) {
        load_part(v + q * kVector<T>, from + q * kVector<T>, true, kVector<T>, true);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kWidth; ++c) v[c] = c < width ? from[c] : T(Real<T>(0));
    }
  }
  __device__ __forceinline__ void store_panel_row(const T (&v)[kWidth], T* to, int width) const {
    if (width == kWidth && (kShared || whole_vectors())) {
#pragma unroll
      for (int q = 0; q < kPanelVectors; ++q) reinterpret_cast<Vector<T>*>(to)[q] = vector(v, q);
    } else {
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        if (c < width) to[c] = v[c];
      }
    }
  }
  static __device__ __forceinline__ Vector<T> vector(const T (&v)[kWidth], int q) {
    Vector<T> of;
#pragma unroll
    for (int z = 0; z < kVector<T>; ++z) of.v[z] = v[q * kVector<T> + z];
    return of;
  }

  // The panel's exchanges in column c; f(y) changes the first rows on the way.
  template <class F>
  __device__ __forceinline__ void exchange_rows(int j, int rows, int c, const F& f) const {
    T y[kWidth], former[kWidth];
    for_rows(rows, [&](int i) {
      y[i] = a[fixed->source[i] * ld + c];
      former[i] = a[(j + i) * ld + c];
    });
    f(y);
    for_rows(rows, [&](int i) {
      a[(j + i) * ld + c] = y[i];
      const int target = fixed->target[i];
      if (target >= j + rows) a[target * ld + c] = former[i];
    });
  }
  // y = L_11^-1 y.
  __device__ __forceinline__ void solve_lower(int rows, int j, T (&y)[kWidth]) const {
    const T* l = panel(j) + j * panel_ld();
    for_rows(rows, [&](int i) {
#pragma unroll
      for (int q = 0; q * kVector<T> < i; ++q) {
        T part[kVector<T>];
        load_part(part, l + i * panel_ld() + q * kVector<T>, true, kVector<T>, true);
#pragma unroll
        for (int e = 0; e < kVector<T>; ++e) {
          const int k = q * kVector<T> + e;
          if (k < i) y[i] = sub_mul(y[i], part[e], y[k]);
        }
      }
    });
  }
  // Column c of rows j, ... becomes U_11^-1 times it.
  __device__ __forceinline__ void solve_upper(int rows, int j, const T* u, int u_ld, int c) const {
    T y[kWidth];
    for_rows(rows, [&](int i) { y[i] = a[(j + i) * ld + c]; });
#pragma unroll
    for (int k = kWidth - 1; k >= 0; --k) {
      if (k >= rows) continue;
      y[k] = diagonal[j + k](y[k]);
#pragma unroll
      for (int i = 0; i < k; ++i) y[i] = sub_mul(y[i], u[i * u_ld + k], y[k]);
    }
    for_rows(rows, [&](int i) { a[(j + i) * ld + c] = y[i]; });
  }

  // a_rc -= sum_k<depth left_rk top_kc, for rows and columns from the first to before the second.
  __device__ __forceinline__ void subtract_product(int row_begin, int row_end, int begin, int end,
                                                   const T* left_of, const T* top_of, int u_ld,
                                                   int depth) const {
    const int left_ld = panel_ld();
    constexpr int V = kVector<T>, kColumns = kTileVectors * V;
    if (row_begin >= row_end || begin >= end) return;
    const unsigned across = ceil_div(end - begin, kColumns);
    const unsigned tiles = across * ceil_div(row_end - row_begin, kTileRows);
    const unsigned reciprocal = across == 1 ? 0 : UINT32_MAX / across + 1;
    const bool whole = kShared || whole_vectors();
    for (unsigned t = thread; t < tiles; t += kThreads) {
      const unsigned down = across == 1 ? t : __umulhi(t, reciprocal);
      const int r = row_begin + kTileRows * down, c = begin + kColumns * (t - down * across);
      const T* l = left_of + r * left_ld;
      const T* u = top_of + c;
      T* to = a + r * ld + c;
      T sum[kTileRows][kColumns];
#pragma unroll
      for (int i = 0; i < kTileRows; ++i) {
#pragma unroll
        for (int q = 0; q < kTileVectors; ++q) {
          load_part(&sum[i][q * V], to + i * ld + q * V, kShared || r + i < row_end,
                    end - (c + q * V), whole);
        }
      }
#pragma unroll
      for (int k = 0; k < kWidth; k += V) {
        if (k >= depth) break;
        Vector<T> of_left[kTileRows];
#pragma unroll
        for (int i = 0; i < kTileRows; ++i) {
          // Where L is in place, nothing lies below the last row.
          const int row = kKeepsLeft || kShared ? i : min(i, row_end - 1 - r);
          of_left[i] = *reinterpret_cast<const Vector<T>*>(l + row * left_ld + k);
        }
#pragma unroll
        for (int z = 0; z < V; ++z) {
          if (k + z >= depth) break;
          Vector<T> of_top[kTileVectors];
#pragma unroll
          for (int q = 0; q < kTileVectors; ++q) {
            if (c + q * V < end) {
              of_top[q] = *reinterpret_cast<const Vector<T>*>(u + (k + z) * u_ld + q * V);
            }
          }
#pragma unroll
          for (int i = 0; i < kTileRows; ++i) {
#pragma unroll
            for (int e = 0; e < kColumns; ++e) {
              sum[i][e] = sub_mul(sum[i][e], of_left[i].v[z], of_top[e / V].v[e % V]);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kTileRows; ++i) {
#pragma unroll
        for (int q = 0; q < kTileVectors; ++q) {
          store_part(&sum[i][q * V], to + i * ld + q * V, kShared || r + i < row_end,
                     end - (c + q * V), whole);
        }
      }
    }
  }
  // A vector of a row, `left` columns before the end.
  static __device__ __forceinline__ void load_part(T* to, const T* from, bool inside, int left,
                                                   bool whole) {
    if (!inside || left <= 0) return;
    if (whole) {
      const Vector<T> of = *reinterpret_cast<const Vector<T>*>(from);
#pragma unroll
      for (int z = 0; z < kVector<T>; ++z) to[z] = of.v[z];
    } else {
#pragma unroll
      for (int z = 0; z < kVector<T>; ++z) {
        if (z < left) to[z] = from[z];
      }
    }
  }
  static __device__ __forceinline__ void store_part(const T* from, T* to, bool inside, int left,
                                                    bool whole) {
    if (!inside || left <= 0) return;
    if (whole) {
      Vector<T> of;
#pragma unroll
      for (int z = 0; z < kVector<T>; ++z) of.v[z] = from[z];
      *reinterpret_cast<Vector<T>*>(to) = of;
    } else {
#pragma unroll
      for (int z = 0; z < kVector<T>; ++z) {
        if (z < left) to[z] = from[z];
      }
    }
  }
};

template <class T, int kThreads, int kWarps, int kSlots, int kWidth, int kMinBlocks, LuPlace kPlace>
__global__ void __launch_bounds__(kThreads, kMinBlocks) lu_block_kernel(const LuProblem p) {
  using Lu = BlockLu<T, kThreads, kWarps, kSlots, kWidth, LuUse::kFactors, kPlace>;
  const int64_t matrix = blockIdx.x;
  if (skips(p, matrix)) return;
  const int steps = min(p.m, p.n);
  T* out = p.lu.at<T>(matrix, p.m, p.n);
  Lu f(p.m, p.n, 0, out);
  f.load(matrix_at<const T>(p.a, matrix, p.m, p.n));
  f.loaded();
  f.factor();
  if constexpr (kPlace == LuPlace::kShared) {
    store_rows(out, f.a, f.ld, p.m, p.n, f.thread, kThreads, [](int i) { return i; });
  }
  for (int i = f.thread; i < p.m; i += kThreads) {
    p.permutation[matrix * p.m + i] = f.fixed->order[i];
    if (i < steps) p.pivots[matrix * steps + i] = f.fixed->pivots[i];
  }
  if (f.thread == 0) p.info[matrix] = f.info;
}

template <class T, int kThreads, int kWarps, int kSlots, int kWidth, int kMinBlocks>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    solve_gen_block_kernel(const SolveGenProblem p) {
  using Lu = BlockLu<T, kThreads, kWarps, kSlots, kWidth, LuUse::kSolve, LuPlace::kShared>;
  const int64_t matrix = blockIdx.x;
  if (skips(p, matrix)) return;
  const int nrhs = static_cast<int>(p.nrhs);
  Lu f(p.n, p.n, nrhs, nullptr);
  f.load(matrix_at<const T>(p.a, matrix, p.n, p.n));
  const T* b = matrix_at<const T>(p.b, matrix, p.n, p.nrhs);
  for_each_unit(p.n, nrhs, f.thread, kThreads,
                [&](int i, int c) { copy_async(f.a + i * f.ld + f.rhs + c, b + i * nrhs + c); });
  f.loaded();
  f.factor();
  f.substitute();
  T* x = p.x.at<T>(matrix, p.n, p.nrhs);
  for_each_unit(p.n, nrhs, f.thread, kThreads, [&](int i, int c) {
    x[i * nrhs + c] = f.info == 0 ? f.a[i * f.ld + f.rhs + c] : quiet_nan<T>();
  });
  if (f.thread == 0) p.info[matrix] = f.info;
}

template <class T, int kThreads, int kWarps, int kSlots, int kWidth, int kMinBlocks>
__global__ void __launch_bounds__(kThreads, kMinBlocks) inv_block_kernel(const InvProblem p) {
  using Lu = BlockLu<T, kThreads, kWarps, kSlots, kWidth, LuUse::kInverse, LuPlace::kShared>;
  const int64_t matrix = blockIdx.x;
  if (skips(p, matrix)) return;
  Lu f(p.n, p.n, 0, nullptr);
  f.load(matrix_at<const T>(p.a, matrix, p.n, p.n));
  f.loaded();
  f.invert();
  // Column j of what the rows hold belongs to the row of A at place j.
  int* place_of = f.fixed->pivots;
  for (int i = f.thread; i < p.n; i += kThreads) place_of[f.fixed->order[i]] = i;
  f.sync();
  T* x = p.x.at<T>(matrix, p.n, p.n);
  for_each_unit(p.n, p.n, f.thread, kThreads, [&](int i, int j) {
    x[i * p.n + j] = f.info == 0 ? f.a[i * f.ld + place_of[j]] : quiet_nan<T>();
  });
  if (f.thread == 0) p.info[matrix] = f.info;
}

template <class P, class T, int kThreads, int kWarps, int kSlots, int kWidth, int kMinBlocks>
__global__ void __launch_bounds__(kThreads, kMinBlocks) determinant_block_kernel(const P p) {
  using Lu = BlockLu<T, kThreads, kWarps, kSlots, kWidth, LuUse::kDeterminant, LuPlace::kShared>;
  const int64_t matrix = blockIdx.x;
  if (skips(p, matrix)) return;
  Lu f(p.n, p.n, 0, nullptr);
  f.load(matrix_at<const T>(p.a, matrix, p.n, p.n));
  f.loaded();
  f.factor();
  if (f.thread >= 32) return;
  Determinant<T> product;
  for (int i = f.thread; i < p.n; i += 32) product.multiply(f.entry_of_u(i));
  product.template multiply_over_lanes<32>();
  product.negate_if(f.is_odd());
  if (f.thread == 0) product.store(p, matrix);
}

}  // namespace jax_batched::cuda
