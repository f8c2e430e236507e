// Tridiagonalisation of real matrices, in registers.
//
// kLanes lanes of a warp have a matrix's columns, kLanes apart, each with all its rows. In step k
// the lane of column k lays it in shared memory, everyone multiplies it with columns of its own,
// and the update of rank two follows:
//   x = A[k+1:, k], u = x + sign(x_0) ||x|| e_0, f = 1 / (||x||^2 + |x_0| ||x||), H = I - f u u^T,
//   p = f A u, w = p - f (u^T p) / 2 u, A -= u w^T + w u^T.
// A u is A x + sign(x_0) ||x|| A[:, k+1], so that the product need not wait for the norm; that is
// what column k itself has as its product. Register r of a column holds row k + r in step k: a row
// moves down by one with each update, so that the code of a step serves several of them.
//
// A matrix of fewer than kN rows is the last part of one of kN rows, whose first steps are left
// out.
#pragma once

#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/eigh/tridiagonal.cuh"
#include "ffi/cuda/layout/view.cuh"
#include "ffi/problems/eigh.h"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

template <class R, int kN, int kLanes>
struct EighColumns {
  static constexpr int kColumns = ceil_div(kN, kLanes);
  static constexpr int kSteps = kLanes < 8 ? kLanes : 8;  // that share code, and column's place
  // Of rows, an odd number of vectors: rows read as vectors and columns are in different banks.
  static constexpr int kStride = make_odd(kN / kVector<R> + 1) * kVector<R>;
  // And an odd number of them: so are the matrices of a warp.
  static constexpr int kElements = make_odd(kN * kStride / kVector<R>) * kVector<R>;
  static_assert(kN % 4 == 0 && kLanes % kSteps == 0);

  R* const shared;
  const int n;
  const int begin = kN - n;
  const int lane = threadIdx.x % kLanes;
  R a[kColumns][kN];
  R back;  // undoes the scaling
  bool failed;

  // Its number among those of kN.
  __device__ __forceinline__ int column(int c) const { return c * kLanes + lane; }

  // A scaled; zeros where `from` is null or a number is not finite.
  __device__ __forceinline__ void load(const R* from, bool upper, bool mean) {
    if (n == kN) {
      load<true>(from, upper, mean);
    } else {
      load<false>(from, upper, mean);
    }
  }

  // d, e and, last in e, `back`, which is NaN of a matrix that is not finite. With kVectors row k
  // of v, save for the last two of them, is to the right of the diagonal the k-th sqrt(f) u, so
  // that Q is the product of I - v v^T. Nothing where d is null.
  template <bool kVectors>
  __device__ __forceinline__ void tridiagonalize(R* d, R* e, R* v) {
    steps<kVectors, 0>(d, e, v);
  }

 private:
  // kWhole: n is kN.
  template <bool kWhole>
  __device__ __forceinline__ void load(const R* from, bool upper, bool mean) {
    copy<kWhole>(from);
    // (x + y) / 2, of numbers whose sum overflows x / 2 + y / 2.
    R before = R(1), after = R(0.5), largest = R(0);
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      R finite = R(0);
      largest = R(0);
      gather<kWhole>([&](int i, int j, R x, R y) {
        R value = after * multiply_add(before, x, before * y);
        if (!mean) value = (i >= j) != upper || i == j ? x : y;
        largest = fmax(largest, fabs(value));
        finite = multiply_add(value, R(0), finite);
        return value;
      });
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        largest = fmax(largest, shuffle_xor(largest, mask));
        finite += shuffle_xor(finite, mask);
      }
      failed = !(finite == R(0));
      if (!__any_sync(kFullWarp, failed && mean)) break;
      before = failed ? R(0.5) : R(1);
      after = failed ? R(1) : R(0.5);
    }
    ColumnSize<R> size;
    size.take(largest);
    const R by = size.factor();
    back = inverse_power(by);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < kN; ++i) a[c][i] = failed ? R(0) : a[c][i] * by;
    }
    __syncwarp();
  }

  // To shared memory as it lies.
  template <bool kWhole>
  __device__ __forceinline__ void copy(const R* from) const {
    using Part = Vector<R>;
    if (kWhole && from != nullptr) {
      constexpr int kParts = kN / kVector<R>;  // of a row
#pragma unroll
      for (int at = 0; at < kN * kParts; at += kLanes) {
        const int part = at + lane;
        if (kN * kParts % kLanes != 0 && part >= kN * kParts) break;
        copy_async(reinterpret_cast<Part*>(shared + part / kParts * kStride) + part % kParts,
                   reinterpret_cast<const Part*>(from) + part);
      }
    } else {
      for (int i = 0; i < n; ++i) {
        for (int j = lane; j < n; j += kLanes) {
          R* const to = shared + i * kStride + j;
          if (from == nullptr) {
            *to = R(0);
          } else {
            copy_async(to, from + i * n + j);
          }
        }
      }
    }
    commit_copies();
    wait_for_copies<0>();
    __syncwarp();
  }

  // a becomes f(i, j, a_ij, a_ji).
  template <bool kWhole, class F>
  __device__ __forceinline__ void gather(F&& f) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int j = column(c) - (kWhole ? 0 : begin);
      const bool is_column = j >= 0 && j < n;
      const R* const down = shared + (is_column ? j : 0);
      const R* const across = shared + (is_column ? j : 0) * kStride;
#pragma unroll
      for (int i = 0; i < kN; i += kVector<R>) {
        const Vector<R> part = *reinterpret_cast<const Vector<R>*>(across + i);
#pragma unroll
        for (int z = 0; z < kVector<R>; ++z) {
          const bool is_inside = (kWhole && kN % kLanes == 0) || (is_column && i + z < n);
          const R x = down[(i + z) * kStride];
          a[c][i + z] = is_inside ? f(i + z, j, x, part.v[z]) : R(0);
        }
      }
    }
  }

  template <bool kVectors, int kFirst>
  __device__ __forceinline__ void steps(R* d, R* e, R* v) {
    if constexpr (kFirst < kN) {
#pragma unroll 1
      for (int k = max(kFirst, begin); k < min(kFirst + kSteps, kN); ++k) {
        step<kVectors, kN - kFirst, kFirst / kLanes>(k, d, e, v);
      }
      steps<kVectors, kFirst + kSteps>(d, e, v);
    }
  }

  // Step k, of at most kRows rows; columns of that number lie kOwn-th in their lanes.
  template <bool kVectors, int kRows, int kOwn>
  __device__ __forceinline__ void step(int k, R* d, R* e, R* v) {
    using Part = Vector<R>;
    constexpr int kPart = kVector<R>;
    R* const x = shared + (k & 1) * kN;  // the former step's may still be read
    R* const w = shared + 2 * kN;
    const int owner = k - kOwn * kLanes;
    if (lane == owner) {
      if (d != nullptr) d[k - begin] = a[kOwn][0];
#pragma unroll
      for (int r = 0; r < kRows; r += kPart) {
        Part part;
#pragma unroll
        for (int z = 0; z < kPart; ++z) part.v[z] = a[kOwn][r + z];
        *reinterpret_cast<Part*>(x + r) = part;
      }
    }
    __syncwarp();
    R product[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) product[c] = R(0);
#pragma unroll
    for (int r = 0; r < kRows; r += kPart) {
      const Part part = *reinterpret_cast<const Part*>(x + r);
#pragma unroll
      for (int z = 0; z < kPart; ++z) {
        if (r + z == 0) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          product[c] = multiply_add(part.v[z], a[c][r + z], product[c]);
        }
      }
    }
    const R squares = shuffle(product[kOwn], owner, kLanes), first = x[1];
    const bool none = !(squares >= kSmallestSquares<R>);
    const R norm = none ? R(0) : pivot_root_in_range(squares).root;
    const R signed_norm = copysign(norm, first);
    const R f = none ? R(0) : quick_reciprocal(multiply_add(norm, fabs(first), squares));
    R u[kColumns], p[kColumns], half = R(0);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int j = column(c);
      u[c] = R(0);
      if (j > k && j < kN) u[c] = x[j - k] + (j == k + 1 ? signed_norm : R(0));
      p[c] = f * multiply_add(signed_norm, a[c][1], product[c]);
      half = multiply_add(u[c], p[c], half);
    }
    if (d != nullptr && lane == owner) {
      e[k - begin] = k < kN - 1 ? -signed_norm : failed ? kNaN<R> : back;
    }
    if (kVectors && d != nullptr && k < kN - 1) {
      const R root = none ? R(0) : f * inverse_root(f);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int j = column(c);
        // Whole rows where nothing else lies there.
        if (j < (k < kN - 2 ? begin : kN - 1) || j >= kN) continue;
        v[(k - begin) * n + j - begin] = root * u[c];
      }
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) half += shuffle_xor(half, mask);
    half = R(0.5) * f * half;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int j = column(c);
      p[c] = multiply_add(-half, u[c], p[c]);
      if (j < kN) w[j >= k ? j - k : j - k + kN] = j > k ? p[c] : R(0);
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; r += kPart) {
      const Part x_part = *reinterpret_cast<const Part*>(x + r);
      const Part w_part = *reinterpret_cast<const Part*>(w + r);
#pragma unroll
      for (int z = 0; z < kPart; ++z) {
        if (r + z == 0) continue;
        const R u_row = r + z == 1 ? x_part.v[z] + signed_norm : x_part.v[z];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          a[c][r + z - 1] =
              multiply_add(-w_part.v[z], u[c], multiply_add(-u_row, p[c], a[c][r + z]));
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) a[c][kRows - 1] = R(0);
  }
};

template <class R, int kN, int kLanes, int kThreads, int kBlocks, bool kVectors>
__global__ void __launch_bounds__(kThreads, kBlocks) eigh_columns_kernel(const EighProblem p) {
  using Columns = EighColumns<R, kN, kLanes>;
  constexpr int kMatrices = kThreads / kLanes;
  const int n = p.n, own = threadIdx.x / kLanes;
  const int64_t first = int64_t{blockIdx.x} * kMatrices, entry = first + own;
  if (skips(p, first, kMatrices)) return;
  const bool wanted = entry < p.batch && is_wanted(p, entry);
  Columns columns{reinterpret_cast<R*>(dynamic_shared) + own * Columns::kElements, n};
  columns.load(wanted ? matrix_at<const R>(p.a, entry, n, n) : nullptr, p.upper, p.symmetrize);
  const EighPlacesInResults<R> places{p, entry};
  columns.template tridiagonalize<kVectors>(wanted ? places.d() : nullptr, places.e(),
                                            kVectors ? p.v.at<R>(entry, n, n) : nullptr);
}

template <class R, int kN, int kLanes, int kThreads>
constexpr size_t eigh_columns_bytes() {
  return size_t{kThreads / kLanes} * EighColumns<R, kN, kLanes>::kElements * sizeof(R);
}

}  // namespace jax_batched::cuda
