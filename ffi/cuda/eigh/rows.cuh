// Eigenvectors of matrices that columns.cuh has made tridiagonal; Q's rows are in registers.
//
// A block has kMatrices matrices. kN / kRows threads work on one, with kRows rows of Q each, and
// kSweeps lanes of more warps on its tridiagonal matrix:
//   1. The threads form their rows from the reflections, q := q (I - v v^T) for one after the
//   other.
//   2. The lanes do kSweeps sweeps of the QR iteration at a time; meanwhile the threads apply the
//      rotations of the sweeps before to their rows.
//   3. The columns are written in the order of the eigenvalues.
// The eigenvalues are known: so the shifts of several sweeps need not wait for one another. Two
// sweeps with an eigenvalue split it off as a rule, where Wilkinson's shift, by which it was found,
// takes 1.9 (float32) to 2.4 sweeps, one after the other.
//
// Nothing of a row is indexed at run time: the code names all rotations, four at a time, of which
// those beyond a sweep are left out. As in columns.cuh, a matrix of fewer than kN rows is the last
// part of one of kN rows.
#pragma once

#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/eigh/tridiagonal.cuh"
#include "ffi/cuda/layout/view.cuh"
#include "ffi/problems/eigh.h"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

template <class T, int kN, int kRows, int kMatrices, int kSweeps>
struct EighRows {
  using R = Real<T>;
  static constexpr int kLanes = kN / kRows;
  static constexpr int kThreads = kLanes * kMatrices;
  static constexpr int kChains = ceil_div(kMatrices * kSweeps, 32);  // warps of sweeps
  static constexpr int kColumns = 32 * kChains / kSweeps;            // some may have no matrix
  using Sweeps = SweepsOfLanes<R, kN, kColumns, kSweeps>;
  static constexpr int kGroup = 4;  // rotations that are applied or left out together
  static constexpr int kSteps = 8;  // reflections that share code
  static_assert(kThreads % 32 == 0 && 32 % kSweeps == 0 && kSweeps > 1 && kN % kGroup == 0);

  // Eigenvectors on their way out; their rows are in different banks.
  static constexpr int kStride = kN + 1;
  static constexpr int kElements = ceil_div(kN * kStride, kVector<T>) * kVector<T>;
  struct Shared {
    union {
      T matrix[kMatrices][kElements];           // first the reflections, last the eigenvectors
      typename Sweeps::Rotations rotations[2];  // of two rounds
    };
    typename Sweeps::Numbers numbers;
    R shifts[kN][kMatrices];
    T factors[kIsComplex<T> ? kN : 1][kMatrices];  // conj(phi)
    int counts[2][kChains];                        // of a round's rotations

    __device__ __forceinline__ bool done(int round) const {
      int all = 0;
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) all |= counts[round & 1][chain];
      return all == 0;
    }
  };

  Shared& shared;
  const int n;
  const int begin = kN - n;
  const int own = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  T q[kRows][kN];

  // v as columns.cuh left it, which is null where nothing is to be done.
  __device__ __forceinline__ void load(const T* v, const EighPlacesInResults<T>& places) {
    T* const to = shared.matrix[own];
    if (!kIsComplex<T> && v != nullptr && begin == 0) {  // rows are whole vectors
      for (int at = lane; at < (n - 2) * n / kVector<T>; at += kLanes) {
        copy_async(reinterpret_cast<Vector<T>*>(to) + at,
                   reinterpret_cast<const Vector<T>*>(v) + at);
      }
    } else {
      for (int i = 0; i < n - 2; ++i) {  // from where the code of a reflection begins
        for (int j = lane - begin % kSteps; j < n; j += kLanes) {
          T* const place = to + (begin + i) * kN + begin + j;
          if (j > i && v != nullptr) {
            copy_async(place, v + i * n + j);
          } else {
            *place = T(R(0));
          }
        }
      }
    }
    commit_copies();
    for (int j = lane; j < kN; j += kLanes) {
      to[(kN - 2) * kN + j] = j == kN - 1 && v != nullptr ? v[(n - 2) * n + n - 1] : T(R(0));
      if constexpr (kIsComplex<T>) {
        const int i = j - begin;
        if (i >= 0) shared.factors[j][own] = v == nullptr ? T(R(0)) : v[i * n + i];
      }
    }
    for (int i = lane; i < n; i += kLanes) {
      d(i) = v == nullptr ? R(0) : places.d()[i];
      e(i) = v == nullptr ? R(0) : places.e()[i];
      if (i > 0) shared.shifts[i][own] = v == nullptr ? R(0) : places.shifts()[i - 1];
    }
    wait_for_copies<0>();
  }

  __device__ __forceinline__ R& d(int i) const {
    return shared.numbers.d[0][Sweeps::kBefore + i][own];
  }
  __device__ __forceinline__ R& e(int i) const {
    return shared.numbers.e[0][Sweeps::kBefore + i][own];
  }

  __device__ __forceinline__ void form() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kN; ++i) q[r][i] = T(R(i == begin + row(r)));
    }
    reflect<0>();
  }

  // `count` rotations of a sweep, of columns begin, begin + 1, ...
  __device__ __forceinline__ void apply(const typename Sweeps::Rotations& rotations, int sweep,
                                        int count) {
    const Rotation<R>* const by = &rotations.of[sweep][Sweeps::kBefore][own];
#pragma unroll
    for (int i = 0; i < kN; i += kGroup) {
      if (i + kGroup <= begin || i >= begin + count) continue;
#pragma unroll
      for (int j = i; j < min(i + kGroup, kN - 1); ++j) {
        const Rotation<R> rotation = by[j * kColumns];
#pragma unroll
        for (int r = 0; r < kRows; ++r) rotate(q[r][j], q[r][j + 1], rotation.c, rotation.s);
      }
    }
  }

  // The columns in the order of the eigenvalues, which are d; e is what has not converged and,
  // last, what undoes the scaling. Nothing where v is null.
  __device__ __forceinline__ void store(T* v, R* w, int32_t* info) {
    T* const to = shared.matrix[own];
    int (*const rank)[kColumns] = reinterpret_cast<int (*)[kColumns]>(shared.numbers.d[1]);
    const R back = e(n - 1);
    const bool failed = is_nan(back);
    for (int j = lane; j < n; j += kLanes) {
      const R value = d(j);
      int smaller = 0;
#pragma unroll 4
      for (int i = 0; i < n; ++i) {
        const R other = d(i);
        smaller += other < value || (other == value && i < j);
      }
      rank[j][own] = smaller;
      if (w != nullptr) w[smaller] = failed ? kNaN<R> : without_sign_of_zero(value * back);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      if (i < begin) continue;
      const int column = rank[i - begin][own];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        to[row(r) * kStride + column] = failed ? quiet_nan<T>() : without_sign_of_zero(q[r][i]);
      }
    }
    __syncthreads();
    if (v == nullptr) return;
    if (lane == 0) {
      int remaining = 0;
      for (int i = 0; i < n - 1; ++i) remaining += e(i) != R(0);
      *info = failed ? n : remaining;
    }
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int j = row(r);
        if (j < n) v[i * n + j] = to[i * kStride + j];
      }
    }
  }

 private:
  __device__ __forceinline__ int row(int r) const { return r * kLanes + lane; }

  template <int kFirst>
  __device__ __forceinline__ void reflect() {
    if constexpr (kFirst < kN - 1) {
#pragma unroll 1
      for (int k = max(kFirst, begin); k < min(kFirst + kSteps, kN - 1); ++k) {
        const Vector<T>* const v = reinterpret_cast<const Vector<T>*>(shared.matrix[own] + k * kN);
        T sum[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r] = T(R(0));
#pragma unroll
        for (int i = kFirst; i < kN; i += kVector<T>) {
          const Vector<T> part = v[i / kVector<T>];
#pragma unroll
          for (int z = 0; z < kVector<T>; ++z) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              sum[r] = add_mul(sum[r], part.v[z], q[r][i + z]);
            }
          }
        }
        if constexpr (kIsComplex<T>) {
          const T factor = shared.factors[k][own];
#pragma unroll
          for (int r = 0; r < kRows; ++r) sum[r] = product(factor, sum[r]);
        }
#pragma unroll
        for (int i = kFirst; i < kN; i += kVector<T>) {
          const Vector<T> part = v[i / kVector<T>];
#pragma unroll
          for (int z = 0; z < kVector<T>; ++z) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              q[r][i + z] = sub_mul_conj(q[r][i + z], sum[r], part.v[z]);
            }
          }
        }
      }
      reflect<kFirst + kSteps>();
    }
  }
};

template <class T, int kN, int kRows, int kMatrices, int kSweeps>
inline constexpr int kEighRowsThreads = EighRows<T, kN, kRows, kMatrices, kSweeps>::kThreads +
                                        32 * EighRows<T, kN, kRows, kMatrices, kSweeps>::kChains;

template <class T, int kN, int kRows, int kMatrices, int kSweeps, int kBlocks>
__global__ void __launch_bounds__(kEighRowsThreads<T, kN, kRows, kMatrices, kSweeps>, kBlocks)
    eigh_rows_kernel(const EighProblem p) {
  using R = Real<T>;
  using Rows = EighRows<T, kN, kRows, kMatrices, kSweeps>;
  const int n = p.n, begin = kN - n;
  const int64_t first = int64_t{blockIdx.x} * kMatrices;
  if (skips(p, first, kMatrices)) return;
  auto& shared = *reinterpret_cast<typename Rows::Shared*>(dynamic_shared);
  if (threadIdx.x >= Rows::kThreads) {
    using Sweeps = typename Rows::Sweeps;
    const int lane = threadIdx.x - Rows::kThreads, column = lane / kSweeps, sweep = lane % kSweeps;
    auto& numbers = shared.numbers;
    for (int i = 0; i < Sweeps::kAll; ++i) {
      const bool is_row = i >= Sweeps::kBefore && i < Sweeps::kBefore + n;
      if (sweep > 0 || column >= kMatrices || !is_row) {
        numbers.d[sweep][i][column] = numbers.e[sweep][i][column] = R(0);
      }
    }
    __syncthreads();
    SharedTridiagonal<R> tridiagonal{&numbers.d[0][Sweeps::kBefore][column],
                                     &numbers.e[0][Sweeps::kBefore][column], Rows::kColumns, n,
                                     false};
    R& last = tridiagonal.e[(n - 1) * Rows::kColumns];
    const R back = last;
    __syncwarp();
    if (sweep == 0) last = R(0);
    __syncwarp();
    tridiagonal.begin(sweep == 0);
    __syncthreads();  // rows are formed
    for (int i = begin / Rows::kGroup * Rows::kGroup; i < begin; ++i) {
      for (auto& rotations : shared.rotations) {  // in a group with the first one
        rotations.of[sweep][Sweeps::kBefore + i][column] = {R(1), R(0)};
      }
    }
    int before = 0, tries = 0;
    for (int round = 0;; ++round) {
      int count = tridiagonal.rotations();
      if (kSweeps * round >= eigh_max_sweeps(n)) count = 0;
      if (count > 0) {
        count = min(round_up(begin + count, Rows::kGroup), kN - 1) - begin;  // whole groups
        tries = tridiagonal.last == before ? tries + 1 : 0;
        before = tridiagonal.last;
        const bool is_known = tries < 2 && column < kMatrices;
        const R shift =
            is_known ? shared.shifts[max(before - sweep / 2, 1)][column] : tridiagonal.shift();
        __syncwarp();
        Sweeps::run(numbers, shared.rotations[round & 1], column, begin, count, shift,
                    tridiagonal.tolerance);
      } else if (sweep == 0) {
        last = back;
      }
      if (lane % 32 == 0) shared.counts[round & 1][lane / 32] = count;
      __syncthreads();
      if (shared.done(round)) break;
    }
    __syncthreads();  // that of `store`
    __syncthreads();
    return;
  }
  Rows rows{shared, n};
  const int64_t entry = first + rows.own;
  const bool wanted = entry < p.batch && is_wanted(p, entry);
  T* const v = wanted ? p.v.at<T>(entry, n, n) : nullptr;
  R* const w = wanted ? p.w.at<R>(entry, n) : nullptr;
  rows.load(v, {p, entry});
  __syncthreads();
  rows.form();
  __syncthreads();
  for (int round = 0;; ++round) {
    __syncthreads();
    if (shared.done(round)) break;
    const int count = shared.counts[round & 1][rows.own * kSweeps / 32];
#pragma unroll 1
    for (int sweep = 0; sweep < (count == 0 ? 0 : kSweeps); ++sweep) {
      rows.apply(shared.rotations[round & 1], sweep, count);
    }
  }
  rows.store(v, w, wanted ? p.info + entry : nullptr);
}

}  // namespace jax_batched::cuda
