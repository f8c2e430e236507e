// General matrices of up to 64 rows, in registers: 8, 16 or 32 lanes of a warp work on one, with a
// row each or several.
//
// Step k finds the pivot's row p among the lanes. It passes through shared memory to the others:
//   l_i = a_ik / a_pk,  a_ij -= l_i a_pj.
// Row i of A has row i of a stage. A pivot's row goes there once, for the other lanes to read and
// as a row of U that is done; the entries of L follow in vectors. So the registers of a row that
// was a pivot's hold nothing that is wanted, and rows meet their places on the way out.
//
// Register j of a row is column k + j at the first of four steps. The last of the four leaves its
// results four registers lower, at no cost, and so a loop can go over kRoll times four steps. In it
// the registers stay as many, and from the loop to the next they are fewer.
#pragma once

#include "ffi/cuda/layout/view.cuh"
#include "ffi/cuda/lu/determinant.cuh"
#include "ffi/cuda/lu/pivot.cuh"

namespace jax_batched::cuda {

// kRows: of a lane; lane l has rows l, l + kLanes, ... kColumns: of the matrix, at least; kExtra:
// right-hand sides beside them.
template <class T, int kLanes, int kRows, int kColumns, int kRoll, int kExtra = 0>
struct LanesLu {
  static_assert(kColumns <= kLanes * kRows && kColumns % 4 == 0);
  static constexpr int V = kVector<T>;
  static constexpr int kMatrices = 32 / kLanes;  // of a warp
  static constexpr int kWidth = kColumns + kExtra;
  static constexpr int kVectors = ceil_div(kWidth, V);
  static constexpr int kFourVectors = 4 / V;  // of four columns
  static constexpr bool kVotes = kLanes == 32 && kRows == 1;
  static constexpr int kStride = V * make_odd(kVectors);  // of the rows of a stage

  // The pivot of a step: its reciprocal, and where its row is.
  struct alignas(16) Pivot {
    PivotDivisor<T> by;
    uint32_t place_and_row;  // in 16 bits each

    __device__ __forceinline__ int place() const { return place_and_row & 0xffff; }
    __device__ __forceinline__ int row() const { return place_and_row >> 16; }
  };
  struct Work {
    alignas(16) T stage[kColumns * kStride];
    Pivot pivots[2];            // of this step and the one before
    int places[kColumns];       // of the pivots
    int order[kLanes * kRows];  // the row of A at each place
  };
  // What a warp's matrices read at the same time lies in different banks.
  struct Matrix : Work {
    static constexpr int kOver = sizeof(Work) % 128;
    static constexpr int kApart = kMatrices == 1 ? kOver + 16 : 128 / kMatrices;
    unsigned char padding[(127 + kApart - kOver) % 128 + 1];
  };
  struct Shared {
    Matrix matrices[kMatrices];
  };

  Matrix& mine;     // of this lane
  int lane, first;  // of the warp; of the matrix: its first row
  int m, n;
  T a[kRows][kVectors * V];
  int place[kRows];
  int info;

  __device__ __forceinline__ LanesLu(Shared& shared, int m, int n)
      : mine(kept(shared.matrices[kMatrices == 1 ? 0 : threadIdx.x / kLanes])),
        lane(threadIdx.x % 32),
        first(threadIdx.x % kLanes),
        m(m),
        n(n) {}
  __device__ __forceinline__ int row(int s) const { return first + kLanes * s; }
  __device__ __forceinline__ T* staged(int i) const { return mine.stage + i * kStride; }

  // Calls f(s) for this lane's rows.
  template <class F>
  __device__ __forceinline__ void for_rows(const F& f) const {
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      if (row(s) < m) f(s);
    }
  }

  __device__ __forceinline__ void load(const T* from) {
    if (m == kColumns && n == kColumns) {  // with constants, as in store()
      copy_rows(mine.stage, kStride, from, kColumns, kColumns, first, kLanes);
    } else {
      copy_rows(mine.stage, kStride, from, m, n, first, kLanes);
    }
    commit_copies();
    wait_for_copies<0>();
    __syncwarp();
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      place[s] = row(s) < m ? row(s) : kNoPlace;
      const auto* row_of = reinterpret_cast<const Vector<T>*>(staged(row(s)));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const Vector<T> of = place[s] >= 0 ? row_of[v] : Vector<T>{};
#pragma unroll
        for (int z = 0; z < V; ++z) a[s][v * V + z] = of.v[z];
      }
    }
  }

  // L and U to the stage, as they are stored.
  __device__ __forceinline__ void load_factors(const T* from, bool conjugate) {
    copy_rows(mine.stage, kStride, from, n, n, first, kLanes);
    commit_copies();
    wait_for_copies<0>();
    __syncwarp();
    if (!kIsComplex<T> || !conjugate) return;
    for_rows([&](int s) {
      for (int j = 0; j < n; ++j) staged(row(s))[j] = conj_if(true, staged(row(s))[j]);
    });
    __syncwarp();
  }

  // Rows of L and U to their places.
  __device__ __forceinline__ void store(T* to) const {
    const auto row_of = [&](int i) { return mine.order[i]; };
    if (m == kColumns && n == kColumns) {
      store_rows(to, mine.stage, kStride, kColumns, kColumns, first, kLanes, row_of);
    } else {
      store_rows(to, mine.stage, kStride, m, n, first, kLanes, row_of);
    }
  }

  // Rows of L and U in the stage, their places in place[s] and order; and info.
  __device__ __forceinline__ void factor() {
    const int steps = min(m, n);
    factor_from<0>(kept(steps));
    for_rows([&](int s) {
      place[s] = last_place(place[s]);
      mine.order[place[s]] = row(s);
    });
    __syncwarp();
    check_pivots([&](int s) { return place[s] >= steps || !is_bad(staged(row(s))[place[s]]); });
  }

  // The inverse, by Gauss and Jordan: all rows but the pivot's are changed, column k becomes what
  // its row contributed to them, and the rows are divided by their pivots at the end. Column j is
  // that of the row at place j; rows are at their places in the stage.
  __device__ __forceinline__ void invert() {
    static_assert(kExtra == 0);
    T diagonals[kRows];
    __syncwarp();  // the stage has been read
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
#pragma unroll
    for (int s = 0; s < kRows; ++s) place[s] = last_place(place[s]);
    check_pivots([&](int s) { return !is_bad(diagonals[s]); });
    __syncwarp();
    for_rows([&](int s) {
      const auto by = PivotDivisor<T>::of(diagonals[s]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) a[s][j] = by(a[s][j]);
      auto* to = reinterpret_cast<Vector<T>*>(staged(place[s]));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) to[v] = vector(s, v);
    });
    __syncwarp();
  }

  // The row of L and U at place row(s).
  __device__ __forceinline__ const T* final_row(int s) const { return staged(mine.order[row(s)]); }
  // Of U, in row(s).
  __device__ __forceinline__ T diagonal(int s) const { return final_row(s)[row(s)]; }

  // y = U^-1 y, or for kLower L^-1 y, in places; kCount columns, rows of them in each lane.
  template <bool kLower, int kCount>
  __device__ __forceinline__ void substitute(T (&y)[kRows][kCount],
                                             const PivotDivisor<T> (&by)[kRows]) const {
    const T* rows[kRows];
#pragma unroll
    for (int s = 0; s < kRows; ++s) rows[s] = row(s) < n ? final_row(s) : mine.stage;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      substitute_slot<kLower>(y, by, rows, kLower ? i : kRows - 1 - i);
    }
  }

  // Whether the number of exchanges is odd.
  __device__ __forceinline__ bool is_odd() const {
    unsigned exchanges = 0;
#pragma unroll
    for (int begin = 0; begin < kColumns; begin += kLanes) {
      const int i = begin + lane % kLanes;
      exchanges ^= __ballot_sync(kFullWarp, i < n && mine.places[i] != i);
    }
    const unsigned mine = kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1;
    return __popc(exchanges >> lane / kLanes * kLanes & mine) % 2 != 0;
  }

 private:
  // Keep an address or a number in a register; the compiler would make it anew for each step.
  static __device__ __forceinline__ Matrix& kept(Matrix& shared) {
    auto address = static_cast<unsigned>(__cvta_generic_to_shared(&shared));
    asm volatile("" : "+r"(address));
    return *static_cast<Matrix*>(__cvta_shared_to_generic(address));
  }
  static __device__ __forceinline__ int kept(int number) {
    asm volatile("" : "+r"(number));
    return number;
  }

  // Steps from kBegin on.
  template <int kBegin>
  __device__ __forceinline__ void factor_from(int steps) {
    constexpr int kLeft = (kColumns - kBegin) / 4, kTrips = kRoll < kLeft ? kRoll : kLeft;
#pragma unroll 1
    for (int trip = 0; trip < kTrips; ++trip) {
      const int k = kBegin + 4 * trip;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if (k + q >= steps) {  // nobody wants the registers any more
#pragma unroll
          for (int v = 0; q > 0 && m > n && v < kFourVectors; ++v) put_left(k, v);
          return;
        }
        step<kBegin, kTrips>(k, q, trip);
      }
    }
    if constexpr (kBegin + 4 * kTrips < kColumns) factor_from<kBegin + 4 * kTrips>(steps);
  }

  // Whether vector v of the registers is in the matrix, in one of kTrips trips that begin with
  // column kBegin: in the last ones some are not.
  template <int kBegin, int kTrips>
  static __device__ __forceinline__ bool is_inside(int v, int trip) {
    constexpr int kHere = kVectors - kBegin / V;
    return v + (kTrips - 1) * kFourVectors < kHere || v + trip * kFourVectors < kHere;
  }

  // The pivot of a step, column q of the registers, whose row the others find in row `at_row` of
  // the stage.
  // Registers from vector `from` on are passed, to column `at` of the row's own in the stage or,
  // not kOwnRows, of one of the first two in turn.
  template <bool kOwnRows, int kBegin, int kTrips>
  __device__ __forceinline__ const Pivot& find(int step, int q, int from, int at, int trip,
                                               int& at_row) {
    Best<T> best = best_of<T>(place, [&](int s) { return a[s][q]; });
    const auto own = PivotDivisor<T>::of(best.value);
    const bool is_best = PivotSearch<kLanes, true>{lane}(best.key, best.place);
    Pivot& found = mine.pivots[step % 2];
    if (is_best) {
      const int passed = kOwnRows && !kVotes ? row(best.slot) << 16 : 0;
      found = {own, static_cast<uint32_t>(passed | best.place)};
      mine.places[step] = best.place;
    }
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      if (!is_best || (kRows > 1 && best.slot != s)) continue;
      auto* to = reinterpret_cast<Vector<T>*>(staged(kOwnRows ? row(s) : step % 2) + at);
#pragma unroll
      for (int v = from; v < kVectors - kBegin / V; ++v) {
        if (is_inside<kBegin, kTrips>(v, trip)) to[v] = vector(s, v);
      }
    }
    // A vote is known sooner than what passes through shared memory.
    const unsigned votes = kOwnRows && kVotes ? __ballot_sync(kFullWarp, is_best) : 0;
    __syncwarp();
    const int chosen = found.place();
    at_row = !kOwnRows ? step % 2 : kVotes ? 31 - __clz(static_cast<int>(votes)) : found.row();
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      place[s] = next_place(place[s], place[s] == chosen, chosen, step);
    }
    return found;
  }

  // L in vector v of the registers, for rows that were no pivot yet.
  __device__ __forceinline__ void put_left(int at, int v) const {
#pragma unroll
    for (int s = 0; s < kRows; ++s) {
      if (place[s] >= 0) reinterpret_cast<Vector<T>*>(staged(row(s)) + at)[v] = vector(s, v);
    }
  }

  template <int kBegin, int kTrips>
  __device__ __forceinline__ void step(int k, int q, int trip) {
    int at_row;
    const Pivot& p = find<true, kBegin, kTrips>(k + q, q, q / V, k, trip, at_row);
    const auto* u = reinterpret_cast<const Vector<T>*>(staged(at_row) + k);
    T l[kRows];
#pragma unroll
    for (int s = 0; s < kRows; ++s) a[s][q] = l[s] = p.by.of_smaller(a[s][q]);
    if (q % V == V - 1) put_left(k, q / V);
    const int lower = q == 3 ? 4 : 0;
#pragma unroll
    for (int v = 0; v < kVectors - kBegin / V; ++v) {
      if ((v + 1) * V <= q + 1 || !is_inside<kBegin, kTrips>(v, trip)) continue;
      const Vector<T> of = u[v];
#pragma unroll
      for (int z = 0; z < V; ++z) {
        const int j = v * V + z;
        if (j <= q || kBegin + j >= kWidth) continue;
#pragma unroll
        for (int s = 0; s < kRows; ++s) a[s][j - lower] = sub_mul(a[s][j], l[s], of.v[z]);
      }
    }
  }

  // Register j is column k - q + j, going round; after the last of four steps, k + 1 + j.
  __device__ __forceinline__ void jordan_step(int k, int q, T (&diagonals)[kRows]) {
    int at_row;
    const Pivot& p = find<false, 0, 1>(k, q, 0, 0, 0, at_row);
    const auto* u = reinterpret_cast<const Vector<T>*>(staged(at_row));
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
      return sub_mul(j == q ? one : a[s][j], l[s], j == q ? T(Real<T>(1)) : u[j / V].v[j % V]);
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

  // good(s): whether the pivot of this lane's slot is good, if it is one.
  template <class Good>
  __device__ __forceinline__ void check_pivots(const Good& good) {
    int failed = INT32_MIN;
    for_rows([&](int s) {
      if (!good(s)) failed = max(failed, -(place[s] + 1));
    });
    failed = largest_of<kLanes>(failed, lane);
    info = failed == INT32_MIN ? 0 : -failed;
  }

  // Solves for the unknowns in slot `own`, and takes them out of the others.
  template <bool kLower, int kCount>
  __device__ __forceinline__ void substitute_slot(T (&y)[kRows][kCount],
                                                  const PivotDivisor<T> (&by)[kRows],
                                                  const T* const (&rows)[kRows], int own) const {
    constexpr int kUnroll = kRoll == 1 ? kLanes / 4 : 1;
#pragma unroll(kUnroll)
    for (int g = 0; g < kLanes / 4; ++g) {
      const int group = kLower ? g : kLanes / 4 - 1 - g;
      const int at = own * kLanes + 4 * group;
      if (at >= n) continue;
      T part[kRows][4];
#pragma unroll
      for (int s = 0; s < kRows; ++s) {
        if (kLower ? s < own : s > own) continue;
#pragma unroll
        for (int v = 0; v < kFourVectors; ++v) {
          const Vector<T> of = reinterpret_cast<const Vector<T>*>(rows[s] + at)[v];
#pragma unroll
          for (int z = 0; z < V; ++z) part[s][v * V + z] = of.v[z];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int q = kLower ? i : 3 - i, k = at + q;
        if (k >= n) continue;
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          const T mine = kLower ? y[own][c] : by[own](y[own][c]);
          const T x = shuffle(mine, 4 * group + q, kLanes);
#pragma unroll
          for (int s = 0; s < kRows; ++s) {
            if (!kLower && s == own && row(s) == k) y[s][c] = x;
            if (kLower ? s >= own && row(s) > k : s <= own && row(s) < k) {
              y[s][c] = sub_mul(y[s][c], part[s][q], x);
            }
          }
        }
      }
    }
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

template <class T, int kLanes, int kRows, int kColumns, int kRoll, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks) lu_lanes_kernel(const LuProblem p) {
  using Lu = LanesLu<T, kLanes, kRows, kColumns, kRoll>;
  __shared__ typename Lu::Shared shared;
  const LanesMatrix matrix(p, kLanes);
  if (matrix.skipped) return;
  Lu f(shared, p.m, p.n);
  f.load(matrix_at<const T>(p.a, matrix.index, p.m, p.n));
  f.factor();
  if (!matrix.inside) return;
  f.store(p.lu.at<T>(matrix.index, p.m, p.n));
  const int steps = min(p.m, p.n);
  f.for_rows([&](int s) {
    if (f.row(s) < steps) p.pivots[matrix.index * steps + f.row(s)] = f.mine.places[f.row(s)];
    p.permutation[matrix.index * p.m + f.row(s)] = f.mine.order[f.row(s)];
  });
  if (f.first == 0) p.info[matrix.index] = f.info;
}

// One right-hand side is a column of the matrix while it is factored. Several follow the factors,
// kCount at a time.
template <class T, int kLanes, int kRows, int kColumns, int kRoll, int kCount, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks) solve_gen_lanes_kernel(const SolveGenProblem p) {
  constexpr bool kOne = kCount == 1;
  using Lu = LanesLu<T, kLanes, kRows, kColumns, kRoll, kOne>;
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
  PivotDivisor<T> by[kRows];
#pragma unroll
  for (int s = 0; s < kRows; ++s) {
    by[s] = PivotDivisor<T>::of(f.row(s) < p.n ? f.diagonal(s) : T(Real<T>(1)));
  }
  if (matrix.inside && f.first == 0) p.info[matrix.index] = f.info;
  const auto put = [&](int64_t at, T value) {
    if (matrix.inside) x[at] = f.info == 0 ? value : quiet_nan<T>();
  };
  if constexpr (kOne) {
    f.for_rows([&](int s) { y[s][0] = f.final_row(s)[kColumns]; });
    f.template substitute<false>(y, by);
    f.for_rows([&](int s) { put(f.row(s), y[s][0]); });
  } else {
    for (int64_t c = 0; c < p.nrhs; c += kCount) {
      f.for_rows([&](int s) {
        const T* source = b + f.mine.order[f.row(s)] * p.nrhs;
#pragma unroll
        for (int q = 0; q < kCount; ++q) {
          y[s][q] = c + q < p.nrhs ? source[c + q] : T(Real<T>(0));
        }
      });
      f.template substitute<true>(y, by);
      f.template substitute<false>(y, by);
      f.for_rows([&](int s) {
#pragma unroll
        for (int q = 0; q < kCount; ++q) {
          if (c + q < p.nrhs) put(f.row(s) * p.nrhs + c + q, y[s][q]);
        }
      });
    }
  }
}

template <class T, int kLanes, int kRows, int kColumns, int kRoll, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks) inv_lanes_kernel(const InvProblem p) {
  using Lu = LanesLu<T, kLanes, kRows, kColumns, kRoll>;
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

template <class P, class T, int kLanes, int kRows, int kColumns, int kRoll, int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks) determinant_lanes_kernel(const P p) {
  using Lu = LanesLu<T, kLanes, kRows, kColumns, kRoll>;
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
