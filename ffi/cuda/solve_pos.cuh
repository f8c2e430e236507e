// Fused solve of A X = B, A Hermitian positive definite: factor, forward and backward substitution
// in one kernel; the factor never leaves registers and shared memory.
//
// An upper triangle is handled as in fragment.cuh: its factor is that of conj(A), so B is
// conjugated on the way in and X on the way out.
#pragma once

#include <cstdint>

#include "ffi/common/problem.h"
#include "ffi/cuda/tile/block.cuh"
#include "ffi/cuda/tile/fragment.cuh"
#include "ffi/cuda/tile/panel.cuh"
#include "ffi/cuda/tile/staging.cuh"
#include "ffi/cuda/tile/thread.cuh"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

template <class T>
struct SolvePosArguments {
  const T* a;
  const T* b;
  T* x;
  int32_t* info;
  int64_t batch;
  int64_t nrhs;
  int n;
  bool upper;  // which triangle of A is read
  BatchMap a_map;
  BatchMap b_map;
};

// Entry i of right-hand side `column`, as the factor of conj(A) wants it if upper.
template <class T>
__device__ __forceinline__ T conj_if(bool upper, T a) {
  return upper ? conj(a) : a;
}

// One thread per matrix of exactly kN rows, in registers; a warp moves its 32 matrices together.
template <class T, int kN>
__global__ void __launch_bounds__(32) solve_pos_thread_kernel(const SolvePosArguments<T> args) {
  using MatrixStage = RecordStage<T, kN * kN>;
  using VectorStage = RecordStage<T, kN>;
  T* stage = reinterpret_cast<T*>(dynamic_shared);
  const int lane = threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 32;
  const int records = static_cast<int>(min(int64_t{32}, args.batch - first));
  if (args.a_map.contiguous()) {
    MatrixStage::load(stage, args.a + first * (kN * kN), records, lane);
  } else {
    for (int record = 0; record < records; ++record) {
      const T* a = args.a + args.a_map(first + record) * (kN * kN);
      for (int e = lane; e < kN * kN; e += 32) stage[record * MatrixStage::kStride + e] = a[e];
    }
  }
  __syncwarp();
  Triangle<T, kN> l;
  Real<T> inverse[kN];
  int info = 0;
  if (lane < records) {
    load_triangle<T, kN>(l, stage + lane * MatrixStage::kStride, args.upper, false);
    info = factor_triangle<T, kN>(l, inverse);
    args.info[first + lane] = info;
  }
  const auto solve = [&](T* own, int stride) {
    T x[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) x[i] = conj_if(args.upper, own[i * stride]);
    solve_triangle<T, kN>(l, inverse, x);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      own[i * stride] = info ? failed_value<T>() : conj_if(args.upper, x[i]);
    }
  };
  __syncwarp();
  if (args.nrhs == 1 && args.b_map.contiguous()) {
    VectorStage::load(stage, args.b + first * kN, records, lane);
    __syncwarp();
    if (lane < records) solve(stage + lane * VectorStage::kStride, 1);
    __syncwarp();
    VectorStage::store(args.x + first * kN, stage, records, lane);
    return;
  }
  // Up to kN right-hand sides at a time: they fit where the matrices were.
  for (int64_t column = 0; column < args.nrhs; column += kN) {
    const int width = static_cast<int>(min(int64_t{kN}, args.nrhs - column));
    const int stride = make_odd(kN * width);
    const auto for_each_element = [&](auto&& move) {
      for (int e = lane; e < records * kN * width; e += 32) {
        const int record = e / (kN * width), rest = e % (kN * width);
        move(first + record, rest / width * args.nrhs + column + rest % width,
             stage[record * stride + rest]);
      }
    };
    for_each_element([&](int64_t entry, int64_t at, T& staged) {
      staged = args.b[args.b_map(entry) * kN * args.nrhs + at];
    });
    __syncwarp();
    if (lane < records) {
#pragma unroll 1
      for (int c = 0; c < width; ++c) solve(stage + lane * stride + c, width);
    }
    __syncwarp();
    for_each_element([&](int64_t entry, int64_t at, T& staged) {
      args.x[entry * kN * args.nrhs + at] = staged;
    });
    __syncwarp();
  }
}

template <class T, int kN>
constexpr size_t solve_pos_thread_shared_bytes() {
  return RecordStage<T, kN * kN>::kElements * sizeof(T);
}

// What one warp keeps in shared memory per matrix, besides the panel: the factor's diagonal blocks,
// the reciprocals of its diagonal, and the right-hand side that turns into y and then into x.
template <class T, int kTiles, int kGroup>
struct SolveWorkspace {
  using Step = Panel<T, kTiles, kGroup>;
  static constexpr int kBlocks = Step::kElements;
  static constexpr int kInverses = kBlocks + 64 * kTiles;  // elements of T, used as Real<T>
  static constexpr int kRightHandSide = kInverses + 8 * kTiles;
  static constexpr int kSums = kRightHandSide + 8 * kTiles;
  static constexpr int kElements = kSums + 8;

  T* base;
  __device__ __forceinline__ T* panel() const { return base; }
  __device__ __forceinline__ T* block(int p) const { return base + kBlocks + 64 * p; }
  __device__ __forceinline__ Real<T>* inverse(int p) const {
    return reinterpret_cast<Real<T>*>(base + kInverses) + 8 * p;
  }
  __device__ __forceinline__ T* vector(int p) const { return base + kRightHandSide + 8 * p; }
  __device__ __forceinline__ T* sums() const { return base + kSums; }

  // Every lane solves with the 8x8 diagonal block for itself (z from shared memory, then
  // registers), and lanes 0..7 write the result to vector(p).
  __device__ __forceinline__ void put(const T (&z)[8], int p, int lane) const {
    T own = z[0];
#pragma unroll
    for (int k = 1; k < 8; ++k) {
      if (lane == k) own = z[k];
    }
    if (lane < 8) vector(p)[lane] = own;
  }

  // y_p = L_pp^-1 (b_p - sum over j < p of L_pj y_j), b in vector(p).
  __device__ __forceinline__ void forward(const Fragment<T, kTiles>& m, int p, int lane) const {
    T sum = T(0);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= p) continue;
      const auto y = *reinterpret_cast<const Pair<T>*>(vector(j) + 2 * (lane % 4));
      sum = add_mul(sum, m[p][j][0], y.a);
      sum = add_mul(sum, m[p][j][1], y.b);
    }
    if (p > 0) {
      sum = sum + shuffle_xor(sum, 1);
      sum = sum + shuffle_xor(sum, 2);
    }
    if (lane % 4 == 0) sums()[lane / 4] = sum;
    __syncwarp();
    T z[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) z[k] = vector(p)[k] - sums()[k];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      z[k] = scale(z[k], inverse(p)[k]);
#pragma unroll
      for (int c = k + 1; c < 8; ++c) z[c] = sub_mul(z[c], block(p)[8 * c + k], z[k]);
    }
    __syncwarp();
    put(z, p, lane);
    __syncwarp();
  }

  // x_p = L_pp^-H (y_p - sum over i > p of L_ip^H x_i), y in vector(p).
  __device__ __forceinline__ void backward(const Fragment<T, kTiles>& m, int p, int lane) const {
    T s0 = T(0), s1 = T(0);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if (i <= p) continue;
      const T x = vector(i)[lane / 4];
      s0 = add_conj_mul(s0, m[i][p][0], x);
      s1 = add_conj_mul(s1, m[i][p][1], x);
    }
    if (p < kTiles - 1) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) {
        s0 = s0 + shuffle_xor(s0, d);
        s1 = s1 + shuffle_xor(s1, d);
      }
    }
    if (lane < 4) *reinterpret_cast<Pair<T>*>(sums() + 2 * lane) = {s0, s1};
    __syncwarp();
    T z[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) z[k] = vector(p)[k] - sums()[k];
#pragma unroll
    for (int k = 7; k >= 0; --k) {
      z[k] = scale(z[k], inverse(p)[k]);
#pragma unroll
      for (int c = 0; c < k; ++c) z[c] = sub_mul_conj(z[c], z[k], block(p)[8 * k + c]);
    }
    __syncwarp();
    put(z, p, lane);
    __syncwarp();
  }
};

// One warp for kGroup matrices, held in registers as tiles. The first right-hand side rides along
// as one more column of the panels; the others are substituted on the fragments.
template <class T, int kTiles, int kGroup, bool kExact, int kWarps, int kMinBlocks>
__global__ void __launch_bounds__(32 * kWarps, kMinBlocks)
    solve_pos_warp_kernel(const SolvePosArguments<T> args) {
  using Workspace = SolveWorkspace<T, kTiles, kGroup>;
  using Step = Panel<T, kTiles, kGroup>;
  constexpr bool kRedundant = sizeof(T) == 4 && kGroup > 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + warp) * kGroup;
  if (first >= args.batch) return;  // a whole warp; there are no block-wide barriers
  const int n = kExact ? 8 * kTiles : args.n;
  const int64_t nrhs = args.nrhs;
  T* shared =
      reinterpret_cast<T*>(dynamic_shared) + warp * (kGroup * Workspace::kElements);

  // Entry m of the batch, clamped: a group that is not full computes its last matrix again.
  const auto entry = [&](int q) { return min(first + q, args.batch - 1); };
  const auto load_rhs = [&](const Workspace& work, int q, int64_t column) {
    const T* b = args.b + args.b_map(entry(q)) * n * nrhs + column;
#pragma unroll
    for (int i = lane; i < 8 * kTiles; i += 32) {
      work.vector(0)[i] = kExact || i < n ? conj_if(args.upper, b[i * nrhs]) : T(0);
    }
  };

  Fragment<T, kTiles> m[kGroup];
#pragma unroll
  for (int q = 0; q < kGroup; ++q) {
    load_fragment<kExact, T, kTiles>(m[q], args.a + args.a_map(entry(q)) * n * n, n, args.upper,
                                     false, lane);
    load_rhs(Workspace{shared + q * Workspace::kElements}, q, 0);
  }
  // In the panel phase this lane works on row r of matrix `mine`.
  const int mine = lane / Step::kLanes, r = lane % Step::kLanes;
  const Workspace own{shared + mine * Workspace::kElements};
  int info = 0;
#pragma unroll
  for (int p = 0; p < kTiles; ++p) {
#pragma unroll
    for (int q = 0; q < kGroup; ++q) {
      Step::publish(shared + q * Workspace::kElements, m[q], p, lane);
    }
    __syncwarp();
    T x[Step::kSlots][8], b[Step::kSlots];
    Step::load_rows(x, own.panel(), p, r);
#pragma unroll
    for (int s = 0; s < Step::kSlots; ++s) {
      if (Step::in_use(p, s)) b[s] = own.vector(0)[Step::row(p, s, r)];
    }
    const int steps = kExact || p < kTiles - 1 ? 8 : n - 8 * p;
    Real<T> inverse = 1, root;
    if constexpr (kRedundant) {
      root = Step::template factor_redundant<true>(x, b, own.panel(), own.vector(0), p, steps, r,
                                                   inverse);
    } else {
      root = Step::template factor<true>(x, b, p, steps, r, inverse);
    }
    __syncwarp();  // every lane has read the right-hand side
    info = first_failure<Step::kLanes>(info, root, p, lane);
    Step::store_columns(own.panel(), x, p, r);
#pragma unroll
    for (int s = 0; s < Step::kSlots; ++s) {
      if (Step::in_use(p, s) && 8 * p + r + s * Step::kLanes < 8 * kTiles) {
        own.vector(0)[8 * p + r + s * Step::kLanes] = b[s];
      }
    }
    if (r < 8) {
      own.inverse(p)[r] = inverse;
#pragma unroll
      for (int k = 0; k < 8; k += kVector<T>) {
        Vector<T> v;
#pragma unroll
        for (int z = 0; z < kVector<T>; ++z) v.v[z] = x[0][k + z];
        *reinterpret_cast<Vector<T>*>(own.block(p) + 8 * r + k) = v;
      }
    }
    __syncwarp();
#pragma unroll
    for (int q = 0; q < kGroup; ++q) {
      T* panel = shared + q * Workspace::kElements;
      if (p + 1 < kTiles) Step::read_back(m[q], panel, p, p + 1, lane);
      Step::template update<1>(m[q], panel, p, lane);
    }
    __syncwarp();
  }
  int failed[kGroup];
#pragma unroll
  for (int q = 0; q < kGroup; ++q) {
    failed[q] = __shfl_sync(kFullWarp, info, q * Step::kLanes);
    if (lane == 0 && first + q < args.batch) args.info[first + q] = failed[q];
  }
#pragma unroll 1
  for (int64_t column = 0; column < nrhs; ++column) {
    if (column > 0) {
#pragma unroll
      for (int q = 0; q < kGroup; ++q) {
        load_rhs(Workspace{shared + q * Workspace::kElements}, q, column);
      }
      __syncwarp();
#pragma unroll
      for (int p = 0; p < kTiles; ++p) {
#pragma unroll
        for (int q = 0; q < kGroup; ++q) {
          Workspace{shared + q * Workspace::kElements}.forward(m[q], p, lane);
        }
      }
    }
#pragma unroll
    for (int p = kTiles - 1; p >= 0; --p) {
#pragma unroll
      for (int q = 0; q < kGroup; ++q) {
        Workspace{shared + q * Workspace::kElements}.backward(m[q], p, lane);
      }
    }
#pragma unroll
    for (int q = 0; q < kGroup; ++q) {
      if (first + q >= args.batch) continue;
      const Workspace work{shared + q * Workspace::kElements};
      T* to = args.x + (first + q) * n * nrhs + column;
      for (int i = lane; i < n; i += 32) {
        to[i * nrhs] = failed[q] ? failed_value<T>() : conj_if(args.upper, work.vector(0)[i]);
      }
    }
    __syncwarp();
  }
}

template <class T, int kTiles, int kGroup, int kWarps>
constexpr size_t solve_pos_warp_shared_bytes() {
  return size_t{kWarps} * kGroup * SolveWorkspace<T, kTiles, kGroup>::kElements * sizeof(T);
}

// One block per matrix, the factor in shared memory; then one warp per right-hand side, whose
// entries lie in the lanes' registers: entry i in lane i % 32.
template <class T, int kMaxN, int kMinBlocks>
__global__ void __launch_bounds__((BlockFactor<T, true>::kThreads), kMinBlocks)
    solve_pos_block_kernel(const SolvePosArguments<T> args) {
  using Factor = BlockFactor<T, true>;
  constexpr int kSlots = ceil_div(kMaxN, 32);
  const int n = args.n;
  const int64_t entry = blockIdx.x;
  T* l = reinterpret_cast<T*>(dynamic_shared);
  Real<T>* inverse = reinterpret_cast<Real<T>*>(l + Factor::elements(n));
  int* shared_info = reinterpret_cast<int*>(inverse + Factor::inverses(n));
  const int info = Factor::factor(args.a + args.a_map(entry) * n * n, nullptr, l, inverse,
                                  shared_info, n, args.upper, false);
  if (threadIdx.x == 0) args.info[entry] = info;
  const int stride = Factor::resident_row(n);
  const int lane = threadIdx.x % 32;
  const T* b = args.b + args.b_map(entry) * n * args.nrhs;
  T* x = args.x + entry * n * args.nrhs;
  for (int64_t column = threadIdx.x / 32; column < args.nrhs; column += Factor::kThreads / 32) {
    T v[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int i = 32 * s + lane;
      v[s] = i < n ? conj_if(args.upper, b[i * args.nrhs + column]) : T(0);
    }
    // Forward: v_k *= 1 / l_kk; v_i -= l_ik v_k for i > k.
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll 2
      for (int k = 32 * slot; k < min(n, 32 * slot + 32); ++k) {
        const T y = scale(shuffle(v[slot], k % 32), inverse[k]);
#pragma unroll
        for (int s = slot; s < kSlots; ++s) {
          const int i = 32 * s + lane;
          if (i > k && i < n) v[s] = sub_mul(v[s], l[i * stride + k], y);
        }
        if (lane == k % 32) v[slot] = y;
      }
    }
    // Backward: v_k *= 1 / l_kk; v_i -= conj(l_ki) v_k for i < k.
#pragma unroll
    for (int slot = kSlots - 1; slot >= 0; --slot) {
#pragma unroll 2
      for (int k = min(n, 32 * slot + 32) - 1; k >= 32 * slot; --k) {
        const T y = scale(shuffle(v[slot], k % 32), inverse[k]);
#pragma unroll
        for (int s = 0; s <= slot; ++s) {
          const int i = 32 * s + lane;
          if (i < k) v[s] = sub_mul_conj(v[s], y, l[k * stride + i]);
        }
        if (lane == k % 32) v[slot] = y;
      }
    }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int i = 32 * s + lane;
      if (i < n) x[i * args.nrhs + column] = info ? failed_value<T>() : conj_if(args.upper, v[s]);
    }
  }
}

}  // namespace jax_batched::cuda
