// The eigenvalues of tridiagonal matrices, a thread for each: they are what is wanted, or the
// shifts for the eigenvectors. And, where only they are wanted, how the lanes of "block" make
// matrices tridiagonal.
#pragma once

#include "ffi/cuda/eigh/block.cuh"

namespace jax_batched::cuda {

inline constexpr int kTridiagonalThreads = 32;

// Leaves the diagonal in w; in `workspace` what is beside it and, last, what undoes the scaling,
// which is NaN where the matrix is not finite.
template <class T, int kLanes>
__global__ void __launch_bounds__(kTridiagonalThreads)
    eigh_tridiagonal_kernel(const EighProblem p) {
  using R = Real<T>;
  constexpr int kMatrices = kTridiagonalThreads / kLanes;
  const int n = p.n;
  const int64_t first = int64_t{blockIdx.x} * kMatrices;
  if (skips(p, first, kMatrices)) return;
  const EighPlaces<T> places{n, kMatrices};
  const int own = threadIdx.x / kLanes;
  const int64_t entry = first + own;
  const bool wanted = entry < p.batch && is_wanted(p, entry);
  EighLanes<T, kLanes> lanes{places.matrix(own),          places.rows(own), places.diagonal() + own,
                             places.off_diagonal() + own, kMatrices,        n,
                             places.stride_of(n)};
  lanes.load(wanted ? matrix_at<const T>(p.a, entry, n, n) : nullptr, p.upper, p.symmetrize);
  lanes.tridiagonalize();
  if (lanes.lane == 0) lanes.e[(n - 1) * kMatrices] = lanes.failed ? kNaN<R> : lanes.back;
  __syncwarp();
  if (entry >= p.batch) return;
  const EighPlacesInResults<T> places_in_results{p, entry};
  R* const d = places_in_results.d();
  R* const e = places_in_results.e();
  for (int i = lanes.lane; i < n; i += kLanes) {
    d[i] = lanes.d[i * kMatrices];
    e[i] = lanes.e[i * kMatrices];
  }
}

template <class R>
constexpr size_t eigh_values_bytes(int n) {
  return 2 * 33 * n * sizeof(R);
}

// A warp has 32 matrices. With kShifts what eigh_rows_kernel wants of them, and no results.
template <class T, bool kShifts>
__global__ void __launch_bounds__(32) eigh_values_kernel(const EighProblem p) {
  using R = Real<T>;
  constexpr int kApart = 33;
  const int n = p.n, lane = threadIdx.x;
  const int64_t first = int64_t{blockIdx.x} * 32;
  if (skips(p, first, 32)) return;
  const int records = static_cast<int>(min(int64_t{32}, p.batch - first));
  R* const d = reinterpret_cast<R*>(dynamic_shared);
  R* const e = d + n * kApart;
  const auto for_each = [&](auto&& f) {  // matrix, number, and its place in shared memory
    int matrix = lane / n, i = lane % n;
    for (int at = lane; at < records * n; at += 32) {
      f(EighPlacesInResults<T>{p, first + matrix}, i, i * kApart + matrix);
      for (i += 32; i >= n; i -= n) ++matrix;
    }
  };
  for_each([&](const auto& places, int i, int place) {
    d[place] = places.d()[i];
    e[place] = places.e()[i];
  });
  __syncwarp();
  const bool idle = lane >= records || !is_wanted(p, first + lane);
  SharedTridiagonal<R> tridiagonal{d + lane, e + lane, kApart, n, idle};
  R* const last = e + (n - 1) * kApart + lane;
  const R back = *last;
  *last = R(0);
  tridiagonal.begin();
  for (int sweep = 0; sweep < eigh_max_sweeps(n); ++sweep) {
    const int count = tridiagonal.rotations();
    if (count == 0) break;
    tridiagonal.sweep(count, [](int, R, R) {});
  }
  if constexpr (kShifts) {
    __syncwarp();
    for_each([&](const auto& places, int i, int place) {
      if (i > 0 && is_wanted(p, places.entry)) places.shifts()[i - 1] = d[place];
    });
    return;
  }
  if (lane < records) {
    int remaining = 0;
    for (int i = 0; i < n; ++i) remaining += tridiagonal.e[i * kApart] != R(0);
    p.info[first + lane] = is_nan(back) ? n : remaining;
    for (int j = 0; j < n; ++j) {  // its rank
      const R own = tridiagonal.d[j * kApart];
      int rank = 0;
#pragma unroll 4
      for (int i = 0; i < n; ++i) {
        const R other = tridiagonal.d[i * kApart];
        rank += other < own || (other == own && i < j);
      }
      tridiagonal.e[rank * kApart] = without_sign_of_zero(own * back);
    }
  }
  __syncwarp();
  for_each([&](const auto& places, int i, int place) { places.d()[i] = e[place]; });
}

}  // namespace jax_batched::cuda
