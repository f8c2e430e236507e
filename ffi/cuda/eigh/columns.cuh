// Tridiagonalisation, in registers.
//
// kLanes lanes of a warp have a matrix's columns, kLanes apart, each with all its rows. In step k
// the lane of column k lays it in shared memory, everyone multiplies it with columns of its own,
// and the update of rank two follows:
//   x = A[k+1:, k], u = x - beta e_0, H^H = I - phi u u^H (reflection.cuh), y = A u,
//   w = conj(phi) y - |phi|^2 (u^H y) / 2 u, A -= u w^H + w u^H.
// A u is A x - beta A[:, k+1], so that the product need not wait for the norm; that is what column
// k itself has as its product. Register r of a column holds row k + r in step k: a row moves down
// by one with each update, so that the code of a step serves several of them.
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

template <class T, int kN, int kLanes>
struct EighColumns {
  using R = Real<T>;
  static constexpr int kColumns = ceil_div(kN, kLanes);
  static constexpr int kSteps = kLanes < 8 ? kLanes : 8;  // that share code, and column's place
  // Of rows, an odd number of vectors: rows read as vectors and columns are in different banks.
  static constexpr int kStride = make_odd(kN / kVector<T> + 1) * kVector<T>;
  // And an odd number of them: so are the matrices of a warp.
  static constexpr int kElements = make_odd(kN * kStride / kVector<T>) * kVector<T>;
  static_assert(kN % 4 == 0 && kLanes % kSteps == 0);

  T* const shared;
  const int n;
  const int begin = kN - n;
  const int lane = threadIdx.x % kLanes;
  T a[kColumns][kN];
  R back;  // undoes the scaling
  bool failed;

  // Its number among those of kN.
  __device__ __forceinline__ int column(int c) const { return c * kLanes + lane; }

  // A scaled; zeros where `from` is null or a number is not finite.
  __device__ __forceinline__ void load(const T* from, bool upper, bool mean) {
    if (n == kN) {
      load<true>(from, upper, mean);
    } else {
      load<false>(from, upper, mean);
    }
  }

  // d, e and, last in e, `back`, which is NaN of a matrix that is not finite. With kVectors row k
  // of v is, to the right of the diagonal, the k-th sqrt(phi) u, so that Q is the product of
  // I - v v^T; of complex matrices u, with conj(phi) on the diagonal. Left of it real ones have
  // zeros, but for the last two rows, where other things lie. Nothing where d is null.
  template <bool kVectors>
  __device__ __forceinline__ void tridiagonalize(R* d, R* e, T* v) {
    steps<kVectors, 0>(d, e, v);
  }

 private:
  // kWhole: n is kN.
  template <bool kWhole>
  __device__ __forceinline__ void load(const T* from, bool upper, bool mean) {
    copy<kWhole>(from);
    // (x + y) / 2 or, of a matrix in which that overflows, x / 2 + y / 2.
    R before = R(1), after = R(0.5), largest = R(0);
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      R finite = R(0);
      largest = R(0);
      gather<kWhole>([&](int i, int j, T x, T y) {
        const auto part = [&](R of_x, R of_y) {
          R value = after * multiply_add(before, of_x, before * of_y);
          if (!mean) value = (i >= j) != upper || i == j ? of_x : of_y;
          largest = fmax(largest, fabs(value));
          finite = multiply_add(value, R(0), finite);
          return value;
        };
        if constexpr (kIsComplex<T>) {
          return T{part(x.re, y.re), i == j ? R(0) : part(x.im, -y.im)};
        } else {
          return part(x, y);
        }
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
      for (int i = 0; i < kN; ++i) a[c][i] = failed ? T(R(0)) : scale(a[c][i], by);
    }
    __syncwarp();
  }

  // To shared memory as it lies.
  template <bool kWhole>
  __device__ __forceinline__ void copy(const T* from) const {
    using Part = Vector<T>;
    if (kWhole && from != nullptr) {
      constexpr int kParts = kN / kVector<T>;  // of a row
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
          T* const to = shared + i * kStride + j;
          if (from == nullptr) {
            *to = T(R(0));
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
      const T* const down = shared + (is_column ? j : 0);
      const T* const across = shared + (is_column ? j : 0) * kStride;
#pragma unroll
      for (int i = 0; i < kN; i += kVector<T>) {
        const Vector<T> part = *reinterpret_cast<const Vector<T>*>(across + i);
#pragma unroll
        for (int z = 0; z < kVector<T>; ++z) {
          const bool is_inside = (kWhole && kN % kLanes == 0) || (is_column && i + z < n);
          const T x = down[(i + z) * kStride];
          a[c][i + z] = is_inside ? f(i + z, j, x, part.v[z]) : T(R(0));
        }
      }
    }
  }

  template <bool kVectors, int kFirst>
  __device__ __forceinline__ void steps(R* d, R* e, T* v) {
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
  __device__ __forceinline__ void step(int k, R* d, R* e, T* v) {
    using Part = Vector<T>;
    constexpr int kPart = kVector<T>;
    T* const x = shared + (k & 1) * kN;  // the former step's may still be read
    T* const w = shared + 2 * kN;
    const int owner = k - kOwn * kLanes;
    if (lane == owner) {
      if (d != nullptr) d[k - begin] = real(a[kOwn][0]);
#pragma unroll
      for (int r = 0; r < kRows; r += kPart) {
        Part part;
#pragma unroll
        for (int z = 0; z < kPart; ++z) part.v[z] = a[kOwn][r + z];
        *reinterpret_cast<Part*>(x + r) = part;
      }
    }
    __syncwarp();
    T y[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) y[c] = T(R(0));
#pragma unroll
    for (int r = 0; r < kRows; r += kPart) {
      const Part part = *reinterpret_cast<const Part*>(x + r);
#pragma unroll
      for (int z = 0; z < kPart; ++z) {
        if (r + z == 0) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) y[c] = add_conj_mul(y[c], a[c][r + z], part.v[z]);
      }
    }
    const R squares = shuffle(real(y[kOwn]), owner, kLanes);
    const bool none = !(squares >= kSmallestSquares<R>);
    const auto h = Reflection<T>::of_squares(x[1], squares);
    const R beta = none ? R(0) : h.beta;
    const T phi = none ? T(R(0)) : h.factor;
    T u[kColumns];
    R quadratic = R(0);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int j = column(c);
      u[c] = T(R(0));
      if (j > k && j < kN) u[c] = j == k + 1 ? x[1] - T(beta) : x[j - k];
      y[c] = sub_mul(y[c], T(beta), conj(a[c][1]));
      quadratic = add_real_product(quadratic, u[c], y[c]);
    }
    if (d != nullptr && lane == owner) {
      e[k - begin] = k < kN - 1 ? beta : failed ? kNaN<R> : back;
    }
    if (kVectors && d != nullptr && k < kN - 1) store(k, u, phi, v);
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) quadratic += shuffle_xor(quadratic, mask);
    // |phi|^2 alone may overflow.
    const R half = R(0.5) * add_real_product(R(0), phi, scale(phi, quadratic));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int j = column(c);
      y[c] = sub_mul(product(conj(phi), y[c]), T(half), u[c]);
      if (j < kN) w[j >= k ? j - k : j - k + kN] = j > k ? y[c] : T(R(0));
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < kRows; r += kPart) {
      const Part x_part = *reinterpret_cast<const Part*>(x + r);
      const Part w_part = *reinterpret_cast<const Part*>(w + r);
#pragma unroll
      for (int z = 0; z < kPart; ++z) {
        if (r + z == 0) continue;
        const T u_row = r + z == 1 ? x_part.v[z] - T(beta) : x_part.v[z];
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          a[c][r + z - 1] = sub_mul_conj(sub_mul_conj(a[c][r + z], u_row, y[c]), w_part.v[z], u[c]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) a[c][kRows - 1] = T(R(0));
  }

  // Row k of v.
  __device__ __forceinline__ void store(int k, const T (&u)[kColumns], T phi, T* v) const {
    T* const row = v + (k - begin) * n - begin;
    if constexpr (kIsComplex<T>) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int j = column(c);
        if (j >= k && j < kN) row[j] = j == k ? conj(phi) : u[c];
      }
    } else {
      const R root = phi == R(0) ? R(0) : phi * inverse_root(phi);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int j = column(c);
        // Whole rows, as they are written at once, where nothing else lies there.
        if (j < (k < kN - 2 ? begin : kN - 1) || j >= kN) continue;
        row[j] = root * u[c];
      }
    }
  }
};

template <class T, int kN, int kLanes, int kThreads, int kBlocks, bool kVectors>
__global__ void __launch_bounds__(kThreads, kBlocks) eigh_columns_kernel(const EighProblem p) {
  using Columns = EighColumns<T, kN, kLanes>;
  constexpr int kMatrices = kThreads / kLanes;
  const int n = p.n, own = threadIdx.x / kLanes;
  const int64_t first = int64_t{blockIdx.x} * kMatrices, entry = first + own;
  if (skips(p, first, kMatrices)) return;
  const bool wanted = entry < p.batch && is_wanted(p, entry);
  Columns columns{reinterpret_cast<T*>(dynamic_shared) + own * Columns::kElements, n};
  columns.load(wanted ? matrix_at<const T>(p.a, entry, n, n) : nullptr, p.upper, p.symmetrize);
  const EighPlacesInResults<T> places{p, entry};
  columns.template tridiagonalize<kVectors>(wanted ? places.d() : nullptr, places.e(),
                                            kVectors ? p.v.at<T>(entry, n, n) : nullptr);
}

template <class T, int kN, int kLanes, int kThreads>
constexpr size_t eigh_columns_bytes() {
  return size_t{kThreads / kLanes} * EighColumns<T, kN, kLanes>::kElements * sizeof(T);
}

}  // namespace jax_batched::cuda
