// Eigenvalues and eigenvectors of matrices of a few rows: one thread each, in registers.
#pragma once

#include "ffi/cuda/eigh/iteration.cuh"
#include "ffi/cuda/layout/matrix_stage.cuh"
#include "ffi/problems/eigh.h"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

template <class T, int kN, bool kVectors>
struct ThreadEigh {
  using R = Real<T>;
  // Rotations of the matrix itself take fewer steps than a tridiagonal matrix needs.
  static constexpr bool kJacobi = !kIsComplex<T> && kN <= 3;

  T a[kN][kN];  // the lower triangle
  T v[kN][kN];
  R d[kN];
  R e[kN];
  R back;  // undoes the scaling
  bool failed;
  int info = 0;

  __device__ __forceinline__ void scale_by_power() {
    R largest = R(0), finite = R(0);
    const auto take = [&](R x) {
      largest = fmax(largest, fabs(x));
      finite = multiply_add(x, R(0), finite);
    };
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        take(real(a[i][j]));
        if constexpr (kIsComplex<T>) {
          if (j < i) take(a[i][j].im);
        }
      }
    }
    failed = !(finite == R(0));
    ColumnSize<R> size;
    size.take(largest);
    const R by = size.factor();
    back = inverse_power(by);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int j = 0; j < i; ++j) a[i][j] = failed ? T(R(0)) : scale(a[i][j], by);
      a[i][i] = failed ? T(R(0)) : T(real(a[i][i]) * by);
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int j = 0; j < kN; ++j) v[i][j] = T(R(i == j));
    }
  }

  __device__ __forceinline__ void decompose() {
    if constexpr (kJacobi) {
      diagonalize();
    } else {
      tridiagonalize();
      iterate();
    }
  }

  // of[i] becomes the place of d[i] among all.
  __device__ __forceinline__ void rank(int (&of)[kN]) const {
#pragma unroll
    for (int i = 0; i < kN; ++i) of[i] = 0;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int j = i + 1; j < kN; ++j) {
        const bool swapped = d[j] < d[i];
        of[i] += swapped;
        of[j] += !swapped;
      }
    }
  }

 private:
  // Cyclic Jacobi, until no element of any matrix of the warp is rotated. With y = a_ij and
  // delta = (a_jj - a_ii) / 2, 2 cos^2 = 1 + |delta| / sqrt(delta^2 + y^2): no division.
  __device__ __forceinline__ void diagonalize() {
    constexpr R kNegligible = R(0.5) * kRoundoff<R>;
    constexpr int kMaxSweeps = 15;
#pragma unroll 1
    for (int sweep = 0;; ++sweep) {
      info = 0;
#pragma unroll
      for (int j = 1; j < kN; ++j) {
#pragma unroll
        for (int i = 0; i < j; ++i) info += fabs(a[j][i]) > kNegligible;
      }
      if (sweep == kMaxSweeps || !__any_sync(kFullWarp, info != 0)) break;
#pragma unroll
      for (int i = 0; i < kN - 1; ++i) {
#pragma unroll
        for (int j = i + 1; j < kN; ++j) annihilate(i, j, kNegligible);
      }
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) d[i] = a[i][i];
  }
  __device__ __forceinline__ void annihilate(int i, int j, R negligible) {
    const R y = a[j][i], delta = R(0.5) * (a[j][j] - a[i][i]);
    const bool none = !(fabs(y) > negligible);
    const R inverse = inverse_root(multiply_add(delta, delta, rounded_product(y, y)));
    const R cosine2 = multiply_add(R(0.5) * fabs(delta), inverse, R(0.5));
    const R inverse_c = inverse_root(cosine2);
    const R c = none ? R(1) : rounded_product(cosine2, inverse_c);
    const R sine = copysign(R(0.5) * y * rounded_product(inverse, inverse_c), delta * y);
    const R s = none ? R(0) : sine, tangent = none ? R(0) : rounded_product(sine, inverse_c);
    a[i][i] = multiply_add(-tangent, y, a[i][i]);
    a[j][j] = multiply_add(tangent, y, a[j][j]);
    a[j][i] = none ? y : R(0);
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      if (k == i || k == j) continue;
      rotate(k > i ? a[k][i] : a[i][k], k > j ? a[k][j] : a[j][k], c, -s);
    }
    if constexpr (kVectors) {
#pragma unroll
      for (int k = 0; k < kN; ++k) rotate(v[k][i], v[k][j], c, -s);
    }
  }

  // H^H A H with H^H = I - phi u u^H for one column after the other:
  //   y = A u, w = conj(phi) y - |phi|^2 (u^H y) / 2 u, A -= u w^H + w u^H.
  // V becomes the product of the H.
  __device__ __forceinline__ void tridiagonalize() {
#pragma unroll
    for (int k = 0; k < kN - 1; ++k) {
      d[k] = real(a[k][k]);
      if constexpr (!kIsComplex<T>) {
        if (k == kN - 2) {
          e[k] = real(a[k + 1][k]);
          continue;
        }
      }
      R tail = R(0), rest = R(0);
#pragma unroll
      for (int i = k + 2; i < kN; ++i) tail = add_square(tail, a[i][k]);
      rest = tail;
      if constexpr (kIsComplex<T>) rest = multiply_add(a[k + 1][k].im, a[k + 1][k].im, rest);
      Reflection<T> h = Reflection<T>::of(a[k + 1][k], tail);
      if (!(rest >= kSmallestSquares<R>)) h = Reflection<T>::identity(a[k + 1][k]);
      e[k] = h.beta;
      T u[kN], w[kN];
      u[k + 1] = h.first;
#pragma unroll
      for (int i = k + 2; i < kN; ++i) u[i] = a[i][k];
      R quadratic = R(0);
#pragma unroll
      for (int i = k + 1; i < kN; ++i) {
        T y = T(R(0));
#pragma unroll
        for (int j = k + 1; j < kN; ++j)
          y = j <= i ? add_mul(y, a[i][j], u[j]) : add_conj_mul(y, a[j][i], u[j]);
        quadratic = add_real_product(quadratic, u[i], y);
        w[i] = product(conj(h.factor), y);
      }
      // |phi|^2 alone may overflow.
      const R half = R(0.5) * add_real_product(R(0), h.factor, scale(h.factor, quadratic));
#pragma unroll
      for (int i = k + 1; i < kN; ++i) w[i] = sub_mul(w[i], T(half), u[i]);
#pragma unroll
      for (int i = k + 1; i < kN; ++i) {
#pragma unroll
        for (int j = k + 1; j <= i; ++j) {
          a[i][j] = sub_mul_conj(sub_mul_conj(a[i][j], u[i], w[j]), w[i], u[j]);
        }
        a[i][i] = T(real(a[i][i]));
      }
      if constexpr (kVectors) {
#pragma unroll
        for (int r = 0; r < kN; ++r) {
          T sum = T(R(0));
#pragma unroll
          for (int j = k + 1; j < kN; ++j) sum = add_mul(sum, v[r][j], u[j]);
          const T t = product(conj(h.factor), sum);
#pragma unroll
          for (int j = k + 1; j < kN; ++j) v[r][j] = sub_mul_conj(v[r][j], t, u[j]);
        }
      }
    }
    d[kN - 1] = real(a[kN - 1][kN - 1]);
    e[kN - 1] = R(0);
  }

  __device__ __forceinline__ void iterate() {
    R tolerance = R(0);
#pragma unroll
    for (int i = 0; i < kN; ++i) tolerance = fmax(tolerance, fabs(d[i]) + fabs(e[i]));
    tolerance = tolerance * kRoundoff<R>;
#pragma unroll
    for (int i = 0; i < kN; ++i) e[i] = fabs(e[i]) <= tolerance ? R(0) : e[i];
#pragma unroll 1
    for (int sweeps = 0; sweeps < eigh_max_sweeps(kN); ++sweeps) {
      int last = 0;
      R d_last = R(0), d_above = R(0), e_above = R(0);
#pragma unroll
      for (int i = 1; i < kN; ++i) {
        if (e[i - 1] != R(0)) {
          last = i;
          d_last = d[i];
          d_above = d[i - 1];
          e_above = e[i - 1];
        }
      }
      const int rotations = warp_max(last);
      if (rotations == 0) break;
      Sweep<R> sweep(wilkinson_shift(d_above, d_last, e_above), tolerance, d[0]);
#pragma unroll
      for (int i = 0; i < kN - 1; ++i) {
        if (i >= rotations) continue;
        R nothing;
        sweep.rotate(d[i], i > 0 ? e[i - 1] : nothing, e[i], d[i + 1]);
        if constexpr (kVectors) {
#pragma unroll
          for (int r = 0; r < kN; ++r) rotate(v[r][i], v[r][i + 1], sweep.c, sweep.s);
        }
        if (i + 1 == rotations) {
          sweep.finish(d[i + 1], e[i]);
        } else {
          sweep.restart(d[i + 1]);
        }
      }
    }
    info = 0;
#pragma unroll
    for (int i = 0; i < kN - 1; ++i) info += e[i] != R(0);
  }
};

// NaN in `count` numbers of a thread's matrix.
template <class T>
__device__ __noinline__ void fill_nan(T* to, int count) {
#pragma unroll 1
  for (int e = 0; e < count; ++e) to[e] = quiet_nan<T>();
}

template <class T, int kN>
inline constexpr int kEighThreadWarps = kN <= 4 ? 4 : 1;

// One thread per matrix of exactly kN rows; a warp moves its 32 matrices together.
template <class T, int kN, bool kVectors>
__global__ void __launch_bounds__(32 * kEighThreadWarps<T, kN>)
    eigh_thread_kernel(const EighProblem p) {
  using R = Real<T>;
  using Stage = MatrixStage<T, kN>;
  using Values = RecordStage<R, kN>;
  constexpr int kWarps = kEighThreadWarps<T, kN>;
  const int lane = threadIdx.x % 32, warp = kWarps == 1 ? 0 : threadIdx.x / 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * 32;
  if (first >= p.batch || skips(p, first, 32)) return;
  const int records = static_cast<int>(min(int64_t{32}, p.batch - first));
  T* const stage = reinterpret_cast<T*>(dynamic_shared) + warp * Stage::kElements;
  T* const own = stage + lane * Stage::kStride;
  if (p.a.contiguous()) {
    Stage::load(stage, p.a.as<const T>() + first * (kN * kN), records, lane);
  } else {
    for (int record = 0; record < records; ++record) {
      const T* a = matrix_at<const T>(p.a, first + record, kN, kN);
      for (int e = lane; e < kN * kN; e += 32) stage[record * Stage::kStride + e] = a[e];
    }
  }
  __syncwarp();
  ThreadEigh<T, kN, kVectors> f;
  Stage::take(f.a, own, Part{p.upper && !p.symmetrize, p.symmetrize});
  if (kIsComplex<T> && p.upper && !p.symmetrize) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int j = 0; j <= i; ++j) f.a[i][j] = conj(f.a[i][j]);
    }
  }
  f.scale_by_power();
  f.decompose();
  int rank[kN];
  f.rank(rank);
  __syncwarp();
  T* const v = kVectors ? p.v.at<T>(first, kN * kN) : nullptr;
  if constexpr (kVectors) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
#pragma unroll
      for (int i = 0; i < kN; ++i) own[i * kN + rank[j]] = without_sign_of_zero(f.v[i][j]);
    }
    __syncwarp();
    Stage::store(v, stage, records, lane);
    __syncwarp();
  }
  R* const values = reinterpret_cast<R*>(stage);
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    values[lane * Values::kStride + rank[j]] = without_sign_of_zero(f.d[j] * f.back);
  }
  __syncwarp();
  R* const w = p.w.at<R>(first, kN);
  Values::store(w, values, records, lane);
  if (lane < records) p.info[first + lane] = f.failed ? kN : f.info;
  if constexpr (!kVectors) {  // nobody reads it, but jax.debug_nans would
    R* const workspace = p.workspace.at<R>(first, kN);
    for (int at = lane; at < records * kN; at += 32) workspace[at] = R(0);
  }
  __syncwarp();
  if (f.failed && lane < records) {
    if constexpr (kVectors) fill_nan(v + lane * (kN * kN), kN * kN);
    fill_nan(w + lane * kN, kN);
  }
}

template <class T, int kN>
constexpr size_t eigh_thread_bytes() {
  return kEighThreadWarps<T, kN> * MatrixStage<T, kN>::kElements * sizeof(T);
}

}  // namespace jax_batched::cuda
