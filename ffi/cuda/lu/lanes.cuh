// General matrices of up to 32 rows, in registers: 8, 16 or 32 lanes of a warp work on one, with a
// row each or several.
//
// Step k finds the pivot's row p among the lanes. It passes through shared memory to the others:
//   l_i = a_ik / a_pk,  a_ij -= l_i a_pj.
// A row that was a pivot's stays where it is. Rows meet their places in shared memory, on the way
// out or before a substitution. Several rows of a lane share what it reads of the pivot's row, and
// several matrices of a warp each access to shared memory. All of it is unrolled, so that no
// instruction is about the columns that are done; rolled, 32 columns take a fifth longer.
#pragma once

#include "ffi/cuda/layout/view.cuh"
#include "ffi/cuda/lu/determinant.cuh"
#include "ffi/cuda/lu/pivot.cuh"

namespace jax_batched::cuda {

// kRows: of a lane; lane l has rows l, l + kLanes, ... kColumns: of the matrix, at least; kExtra:
// right-hand sides beside them.
template <class T, int kLanes, int kRows, int kColumns, int kExtra = 0>
struct LanesLu {
  static_assert(kColumns <= kLanes * kRows && kColumns % 4 == 0);
  static constexpr int V = kVector<T>;
  static constexpr int kMatrices = 32 / kLanes;  // of a warp
  static constexpr int kWidth = kColumns + kExtra;
  static constexpr int kVectors = ceil_div(kWidth, V);
  static constexpr int kStride = V * make_odd(kVectors);  // of the rows of a stage

  struct Pivot {
    Vector<T> entries[kVectors];
    PivotDivisor<T> by;
    int place;
  };
  struct Shared {
    alignas(16) T stage[kMatrices][kLanes * kRows * kStride];
    Pivot pivot[kMatrices][2];  // of this step and the one before
    int places[kMatrices][kColumns];
  };

  T* stage;         // of this lane's matrix
  Pivot* pivots;    // likewise, as is the next
  int* places;      // of the pivots
  int lane, first;  // of the warp; of the matrix: its first row
  int m, n;
  T a[kRows][kVectors * V];
  int place[kRows];
  int info;

  __device__ __forceinline__ LanesLu(Shared& all, int m, int n)
      : lane(threadIdx.x % 32), first(lane % kLanes), m(m), n(n) {
    stage = all.stage[lane / kLanes];
    pivots = all.pivot[lane / kLanes];
    places = all.places[lane / kLanes];
  }
  __device__ __forceinline__ int row(int s) const { return first + kLanes * s; }
  __device__ __forceinline__ T* staged(int i) const { return stage + i * kStride; }

  // Calls f(s) for this lane's rows.
  template <class F>
  __device__ __forceinline__ void for_rows(const F& f) const {
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      if (row(s) < m) f(s);
    }
  }

  __device__ __forceinline__ void load(const T* from) {
    copy_rows(stage, kStride, from, m, n, first, kLanes);
    commit_copies();
    wait_for_copies<0>();
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      take_row(s);
      place[s] = row(s) < m ? row(s) : kNoPlace;
    }
  }

  // Rows of L and U to their places in the stage, place[s] of this lane's; and info.
  __device__ __forceinline__ void factor() {
    const int steps = min(m, n);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      if (k < steps) step(k);
    }
    __syncwarp();
    for_rows([&](int s) {
      place[s] = last_place(place[s]);
      stage_row(s, place[s]);
    });
    __syncwarp();
    check_pivots([&](int s, int& step) {
      step = row(s);
      return step >= steps || !is_bad(diagonal(s));
    });
  }

  // The inverse, by Gauss and Jordan: all rows but the pivot's are changed, column k becomes what
  // its row contributed to them, and the rows are divided by their pivots at the end. Rows are at
  // their places in the stage; column j is that of the row at place j.
  __device__ __forceinline__ void invert() {
    static_assert(kExtra == 0);
    T diagonals[kRows];
    // Registers go round by four columns, so that the loop stays a loop.
#pragma unroll 1
    for (int begin = 0; begin < kColumns; begin += 4) {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if (begin + q < n) {
          jordan_step(begin + q, q, diagonals);
        } else if (q == 3) {
          go_round([&](int s, int j) { return a[s][j]; });
        }
      }
    }
    check_pivots([&](int s, int& step) {
      step = last_place(place[s]);
      return !is_bad(diagonals[s]);
    });
    __syncwarp();
    for_rows([&](int s) {
      place[s] = last_place(place[s]);
      const auto by = PivotDivisor<T>::of(diagonals[s]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) a[s][j] = by(a[s][j]);
      stage_row(s, place[s]);
    });
    __syncwarp();
  }

  // Each lane gets the rows at the places of its own numbers.
  __device__ __forceinline__ void to_places() {
#pragma unroll
    for (int s = 0; s < kRows; ++s) take_row(s);
  }
  // Of U, in row(s).
  __device__ __forceinline__ T diagonal(int s) const { return staged(row(s))[row(s)]; }

  // y = U^-1 y, or for kLower L^-1 y, after to_places(); kCount columns, rows of them in each lane.
  template <bool kLower, int kCount>
  __device__ __forceinline__ void substitute(T (&y)[kRows][kCount],
                                             const T (&diagonals)[kRows]) const {
    PivotDivisor<T> by[kRows];
#pragma unroll
    for (int s = 0; !kLower && s < kRows; ++s) by[s] = PivotDivisor<T>::of(diagonals[s]);
#pragma unroll
    for (int step = 0; step < kColumns; ++step) {
      const int k = kLower ? step : kColumns - 1 - step, own = k / kLanes;
      if (k >= n) continue;
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        const T mine = kLower ? y[own][c] : by[own](y[own][c]);
        const T x = shuffle(mine, k % kLanes, kLanes);
#pragma unroll
        for (int s = 0; s < kRows; ++s) {
          if (!kLower && s == own && row(s) == k) y[s][c] = x;
          if (kLower ? s >= own && row(s) > k : s <= own && row(s) < k) {
            y[s][c] = sub_mul(y[s][c], a[s][k], x);
          }
        }
      }
    }
  }

  // Whether the number of exchanges is odd.
  __device__ __forceinline__ bool is_odd() const {
    unsigned exchanges = 0;
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      exchanges ^= __ballot_sync(kFullWarp, row(s) < n && places[row(s)] != row(s));
    }
    const unsigned mine = kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1;
    return __popc(exchanges >> (lane - first) & mine) % 2 != 0;
  }

 private:
  // The pivot of step k, column `column` of the registers, whose row the others find in pivots[].
  // Columns from `from` on are passed.
  __device__ __forceinline__ Pivot& find(int k, int column, int from) {
    Best<T> best = best_of<T>(place, [&](int s) { return a[s][column]; });
    const auto own = PivotDivisor<T>::of(best.value);
    const bool is_pivot = PivotSearch<kLanes>{lane}(best.key, best.place);
    Pivot& found = pivots[k % 2];
    if (is_pivot) {
      found.by = own;
      found.place = best.place;
      places[k] = best.place;
    }
    bool of_slot[kRows];
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      of_slot[s] = is_pivot && (kRows == 1 || best.slot == s);
      if (!of_slot[s]) continue;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if ((v + 1) * V > from) found.entries[v] = vector(s, v);
      }
    }
    __syncwarp();
    const int chosen = found.place;
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      place[s] = next_place(place[s], of_slot[s], chosen, k);
    }
    return found;
  }

  __device__ __forceinline__ void step(int k) {
    const Pivot& p = find(k, k, k);
    T l[kRows];
    bool below[kRows];
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      below[s] = place[s] >= 0;
      l[s] = p.by.of_smaller(a[s][k]);
      if (below[s]) a[s][k] = l[s];
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if ((v + 1) * V <= k + 1) continue;
      const Vector<T> u = p.entries[v];
#pragma unroll
      for (int z = 0; z < V; ++z) {
        const int j = v * V + z;
        if (j <= k || j >= kWidth) continue;
#pragma unroll
        for (int s = 0; s < kRows; ++s) {
          if (below[s]) a[s][j] = sub_mul(a[s][j], l[s], u.v[z]);
        }
      }
    }
  }

  // Register j is column k - q + j, going round; after the last of four steps, k + 1 + j.
  __device__ __forceinline__ void jordan_step(int k, int q, T (&diagonals)[kRows]) {
    const Pivot& p = find(k, q, 0);
    T l[kRows];
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      l[s] = p.by(a[s][q]);
      if (place[s] == ~k) {
        diagonals[s] = a[s][q];
        l[s] = T(Real<T>(0));
      }
    }
    const auto changed = [&](int s, int j) {
      const T one = T(Real<T>(place[s] == ~k ? 1 : 0));
      return sub_mul(j == q ? one : a[s][j], l[s],
                     j == q ? T(Real<T>(1)) : p.entries[j / V].v[j % V]);
    };
    if (q == 3) {
      go_round(changed);
    } else {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int s = 0; s < kRows; ++s) a[s][j] = changed(s, j);
      }
    }
  }
  // a_sj = value(s, j + 4), going round.
  template <class Value>
  __device__ __forceinline__ void go_round(const Value& value) {
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      T first_four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) first_four[j] = value(s, j);
#pragma unroll
      for (int j = 4; j < kColumns; ++j) a[s][j - 4] = value(s, j);
#pragma unroll
      for (int j = 0; j < 4; ++j) a[s][kColumns - 4 + j] = first_four[j];
    }
  }

  // good(s, step): whether the pivot of this lane's slot is good, and its step.
  template <class Good>
  __device__ __forceinline__ void check_pivots(const Good& good) {
    int failed = INT32_MIN;
    for_rows([&](int s) {
      int step = 0;
      if (!good(s, step)) failed = max(failed, -(step + 1));
    });
    failed = largest_of<kLanes>(failed, lane);
    info = failed == INT32_MIN ? 0 : -failed;
  }

  __device__ __forceinline__ void take_row(int s) {
    const auto* from = reinterpret_cast<const Vector<T>*>(staged(row(s)));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Vector<T> of = from[v];
#pragma unroll
      for (int z = 0; z < V; ++z) a[s][v * V + z] = of.v[z];
    }
  }
  __device__ __forceinline__ void stage_row(int s, int at) const {
    auto* to = reinterpret_cast<Vector<T>*>(staged(at));
#pragma unroll
    for (int v = 0; v < kVectors; ++v) to[v] = vector(s, v);
  }
  __device__ __forceinline__ Vector<T> vector(int s, int v) const {
    Vector<T> of;
#pragma unroll
    for (int z = 0; z < V; ++z) of.v[z] = a[s][v * V + z];
    return of;
  }
};

// Which matrix a lane works on; lanes beyond the batch repeat its last one, and store nothing.
struct LanesMatrix {
  int64_t index;
  bool inside;
  bool skipped;  // all of the warp's

  template <class P>
  __device__ __forceinline__ LanesMatrix(const P& p, int lanes) {
    const int64_t first = blockIdx.x * int64_t{32 / lanes}, at = first + threadIdx.x / lanes;
    inside = at < p.batch;
    index = inside ? at : p.batch - 1;
    skipped = skips(p, first, 32 / lanes);
  }
};

template <class T, int kLanes, int kRows, int kColumns, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks) lu_lanes_kernel(const LuProblem p) {
  using Lu = LanesLu<T, kLanes, kRows, kColumns>;
  __shared__ typename Lu::Shared shared;
  const LanesMatrix matrix(p, kLanes);
  if (matrix.skipped) return;
  Lu f(shared, p.m, p.n);
  f.load(matrix_at<const T>(p.a, matrix.index, p.m, p.n));
  f.factor();
  if (!matrix.inside) return;
  store_rows(p.lu.at<T>(matrix.index, p.m, p.n), f.stage, Lu::kStride, p.m, p.n, f.first, kLanes);
  const int steps = min(p.m, p.n);
  f.for_rows([&](int s) {
    if (f.row(s) < steps) p.pivots[matrix.index * steps + f.row(s)] = f.places[f.row(s)];
    p.permutation[matrix.index * p.m + f.place[s]] = f.row(s);
  });
  if (f.first == 0) p.info[matrix.index] = f.info;
}

// One right-hand side is a column of the matrix while it is factored. Several follow the factors,
// kCount at a time.
template <class T, int kLanes, int kRows, int kColumns, int kCount, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks) solve_gen_lanes_kernel(const SolveGenProblem p) {
  constexpr bool kOne = kCount == 1;
  using Lu = LanesLu<T, kLanes, kRows, kColumns, kOne>;
  __shared__ typename Lu::Shared shared;
  const LanesMatrix matrix(p, kLanes);
  if (matrix.skipped) return;
  Lu f(shared, p.n, p.n);
  const T* b = matrix_at<const T>(p.b, matrix.index, p.n, p.nrhs);
  T* x = p.x.at<T>(matrix.index, p.n, p.nrhs);
  T y[kRows][kCount] = {};
  if constexpr (kOne) f.for_rows([&](int s) { y[s][0] = b[f.row(s)]; });
  f.load(matrix_at<const T>(p.a, matrix.index, p.n, p.n));
#pragma unroll
  for (int s = 0; kOne && s < kRows; ++s) f.a[s][kColumns] = y[s][0];
  f.factor();
  f.to_places();
  T diagonals[kRows];
#pragma unroll
  for (int s = 0; s < kRows; ++s) {
    diagonals[s] = f.row(s) < p.n ? f.diagonal(s) : T(Real<T>(1));
  }
  if (matrix.inside && f.first == 0) p.info[matrix.index] = f.info;
  const auto put = [&](int64_t at, T value) {
    if (matrix.inside) x[at] = f.info == 0 ? value : quiet_nan<T>();
  };
  if constexpr (kOne) {
#pragma unroll
    for (int s = 0; s < kRows; ++s) y[s][0] = f.a[s][kColumns];
    f.template substitute<false>(y, diagonals);
    f.for_rows([&](int s) { put(f.row(s), y[s][0]); });
  } else {
    // The rows of B whose places this lane has.
    __syncwarp();
    int* rows = reinterpret_cast<int*>(f.stage);
    f.for_rows([&](int s) { rows[f.place[s]] = f.row(s); });
    __syncwarp();
    int64_t source[kRows];
    f.for_rows([&](int s) { source[s] = rows[f.row(s)]; });
    for (int64_t c = 0; c < p.nrhs; c += kCount) {
      f.for_rows([&](int s) {
#pragma unroll
        for (int q = 0; q < kCount; ++q) {
          y[s][q] = c + q < p.nrhs ? b[source[s] * p.nrhs + c + q] : T(Real<T>(0));
        }
      });
      f.template substitute<true>(y, diagonals);
      f.template substitute<false>(y, diagonals);
      f.for_rows([&](int s) {
#pragma unroll
        for (int q = 0; q < kCount; ++q) {
          if (c + q < p.nrhs) put(f.row(s) * p.nrhs + c + q, y[s][q]);
        }
      });
    }
  }
}

template <class T, int kLanes, int kRows, int kColumns, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks) inv_lanes_kernel(const InvProblem p) {
  using Lu = LanesLu<T, kLanes, kRows, kColumns>;
  __shared__ typename Lu::Shared shared;
  const LanesMatrix matrix(p, kLanes);
  if (matrix.skipped) return;
  Lu f(shared, p.n, p.n);
  f.load(matrix_at<const T>(p.a, matrix.index, p.n, p.n));
  f.invert();
  if (!matrix.inside) return;
  T* x = p.x.at<T>(matrix.index, p.n, p.n);
#pragma unroll 4
  for (int i = 0; i < p.n; ++i) {
    f.for_rows([&](int s) {
      x[i * p.n + f.row(s)] = f.info == 0 ? f.staged(i)[f.place[s]] : quiet_nan<T>();
    });
  }
  if (f.first == 0) p.info[matrix.index] = f.info;
}

template <class P, class T, int kLanes, int kRows, int kColumns, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks) determinant_lanes_kernel(const P p) {
  using Lu = LanesLu<T, kLanes, kRows, kColumns>;
  __shared__ typename Lu::Shared shared;
  const LanesMatrix matrix(p, kLanes);
  if (matrix.skipped) return;
  Lu f(shared, p.n, p.n);
  f.load(matrix_at<const T>(p.a, matrix.index, p.n, p.n));
  f.factor();
  Determinant<T> product;
  f.for_rows([&](int s) { product.multiply(f.diagonal(s)); });
  product.template multiply_over_lanes<kLanes>();
  product.negate_if(f.is_odd());
  if (matrix.inside && f.first == 0) product.store(p, matrix.index);
}

}  // namespace jax_batched::cuda
