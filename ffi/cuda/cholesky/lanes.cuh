// A Hermitian matrix held by 8 lanes of a warp, rows dealt out cyclically: lane g holds rows g,
// g + 8, g + 16, ... from the first column to the block of 8 columns that holds the diagonal. A
// warp works on four matrices side by side, one instruction for all.
//
// A lane owns its rows, so of a rank-1 update x_ij -= l_ik l_jk only column k travels: through
// shared memory, whose broadcast loads bring 16 bytes of each of the matrices at once. That is the
// least traffic of the layouts here, as long as the rows fit the registers: a load serves four
// matrices.
#pragma once

#include <utility>

#include "ffi/cuda/cholesky/careful.cuh"
#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/layout/view.cuh"

namespace jax_batched::cuda {

// Calls f(k) for k = 0 .. kCount - 1, each a constant of type std::integral_constant. Compilers
// give up on `#pragma unroll` for bodies as large as a column of a factorization.
template <class F, int... k>
__device__ __forceinline__ void for_constants(F&& f, std::integer_sequence<int, k...>) {
  (f(std::integral_constant<int, k>{}), ...);
}
template <int kCount, class F>
__device__ __forceinline__ void for_constants(F&& f) {
  for_constants(f, std::make_integer_sequence<int, kCount>{});
}

template <class T, int kSlots>
struct LanesFactor {
  static constexpr int kLanes = 8;
  static constexpr int kRows = kSlots * kLanes;
  static constexpr int kChunk = static_cast<int>(64 / sizeof(T));   // of a column, loaded together
  static constexpr int kMatrices = 32 / kLanes;                     // per warp
  static constexpr int kBanks = 128 / static_cast<int>(sizeof(T));  // elements per row of banks
  static constexpr int kShift = 8;                                  // of neighbouring matrices

  // Two columns, one being read while the next is written.
  static constexpr int kColumn = round_up(kRows, kVector<T>);
  static constexpr int kColumns = round_up(2 * kColumn, kBanks) + kShift;

  // Where the matrix arrives: rows of slot s at a stride that is an odd number of 16-byte units.
  static constexpr int kPad = kVector<T>;
  static_assert(kLanes / kVector<T> % 2 == 0, "strides without padding are even");
  static __host__ __device__ constexpr int stage_row(int s) { return kLanes * (s + 1) + kPad; }
  static __host__ __device__ constexpr int stage_slot(int s) {
    return kLanes * (kLanes * s * (s + 1) / 2 + kPad * s);
  }
  static constexpr int kStage = round_up(kRows * (kRows + kLanes + 2 * kPad) / 2, kBanks) + kShift;
  static constexpr int kElements = kStage > kColumns ? kStage : kColumns;  // shared, per matrix

  // Row kLanes * s + g is x[s][0 .. kLanes * (s + 1)), entries above the diagonal undefined.
  T x[kSlots][kRows];
  Real<T> inverse[kSlots];  // 1 / l_ii

  static __device__ __forceinline__ T* at(T* stage, int i, int j) {
    return stage + stage_slot(i / kLanes) + i % kLanes * stage_row(i / kLanes) + j;
  }

  // Starts the copy of the triangle `part`, which is no mean, by the lanes of this matrix.
  static __device__ __forceinline__ void start_copy(T* stage, const View<T>& a, Part part, int g) {
    if (!part.upper && a.ld % kVector<T> == 0) {
      for_constants<kSlots>([&](auto slot) {
        constexpr int s = decltype(slot)::value;
        copy_vectors<s, 0>(stage + stage_slot(s), a, g);
      });
    } else {
      // Element by element; neighbouring lanes take neighbours in memory.
      const int row = part.upper ? 1 : a.ld, column = part.upper ? a.ld : 1;
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const int width = kLanes * (s + 1);
#pragma unroll 4
        for (int first = 0; first < width; ++first) {
          const int r = part.upper ? g : first * kLanes / width;
          const int c = part.upper ? first : first * kLanes % width + g;
          const int i = kLanes * s + r;
          if (i < a.rows && c <= i) {
            copy_async(stage + stage_slot(s) + r * stage_row(s) + c, a.data + i * row + c * column);
          }
        }
      }
    }
  }

  // Shared memory -> registers; rows from n on are those of the identity.
  __device__ __forceinline__ void load(const T* stage, int n, int g) {
    for_constants<kSlots>([&](auto slot) {
      constexpr int s = decltype(slot)::value;
#pragma unroll
      for (int c = 0; c < kLanes * (s + 1); c += kVector<T>) {
        const auto v =
            *reinterpret_cast<const Vector<T>*>(stage + stage_slot(s) + g * stage_row(s) + c);
#pragma unroll
        for (int z = 0; z < kVector<T>; ++z) x[s][c + z] = v.v[z];
      }
    });
    if (n < kRows) {
      const int i = kLanes * (kSlots - 1) + g;
#pragma unroll
      for (int c = 0; c < kRows; ++c) {
        if (i >= n) x[kSlots - 1][c] = T(i == c);
      }
    }
  }

  // Factors the matrix. For each column k, with d the pivot:
  //   l_ik = x_ik / sqrt(d);  x_ij -= l_ik conj(l_jk).
  // With kSolve it takes the right-hand side b (entries of this lane's rows) along, which becomes
  // y = L^-1 b, by y_k = b_k / sqrt(d), b_i -= l_ik y_k; the diagonal and what is above it end as
  // zeros, so that products with them need no test. Without, the diagonal is that of L, and what is
  // above it undefined. Where a pivot is tiny, infinite or not positive the matrix must go through
  // repair().
  template <bool kSolve>
  __device__ __forceinline__ void factor(T* columns, T (&b)[kSlots], int g) {
    for_constants<kRows>([&](auto constant) {
      constexpr int k = decltype(constant)::value, top = k / kLanes, owner = k % kLanes;
      const PivotRoot<Real<T>> pivot = pivot_root_in_range(shuffle(real(x[top][k]), owner, kLanes));
      T* column = columns + k % 2 * kColumn;
#pragma unroll
      for (int s = top; s < kSlots; ++s) x[s][k] = scale(x[s][k], pivot.inverse);
      if (g == owner) inverse[top] = pivot.inverse;
      if constexpr (kSolve) {
        if (g == owner) b[top] = scale(b[top], pivot.inverse);
        // y_k travels in the place of l_kk.
        column[kLanes * top + g] = g == owner ? b[top] : x[top][k];
        if (g <= owner) x[top][k] = T(0);
      } else {
        column[kLanes * top + g] = x[top][k];
        if (g == owner) x[top][k] = T(pivot.root);
      }
#pragma unroll
      for (int s = top + 1; s < kSlots; ++s) column[kLanes * s + g] = x[s][k];
      __syncwarp();
#pragma unroll
      for (int first = k / kVector<T> * kVector<T>; first < kRows; first += kVector<T>) {
        // Keeps the compiler from bringing more of the column than there are registers for.
        if (first % kChunk == 0) __syncwarp();
        const auto v = *reinterpret_cast<const Vector<T>*>(column + first);
#pragma unroll
        for (int z = 0; z < kVector<T>; ++z) {
          const int j = first + z;
          if (j < k) continue;
#pragma unroll
          for (int s = j / kLanes; s < kSlots; ++s) {
            if (j == k) {
              if constexpr (kSolve) b[s] = sub_mul(b[s], x[s][k], v.v[z]);
            } else {
              x[s][j] = sub_mul_conj(x[s][j], x[s][k], v.v[z]);
            }
          }
        }
      }
    });
  }

  // True in the lanes of a matrix with a tiny or infinite pivot, or one that is not positive.
  __device__ __forceinline__ bool needs_repair(int lane) const {
    bool plain = true;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) plain = plain && inverse[s] <= 1 / kSmallestPlainRoot<Real<T>>;
    return among_mine(!plain, lane) != 0;
  }

  // Factors the matrix again if `mine`, from its fresh copy in `stage`, whatever its pivots are.
  // Rare, so compact rather than fast; other matrices of the warp keep what they have, and their
  // lanes touch no shared memory.
  template <bool kSolve>
  __device__ __forceinline__ void repair(T* stage, bool mine, int n, int g) {
    factor_carefully<T>(
        mine, n, n, g, kLanes, [=](int i, int j) -> T& { return *at(stage, i, j); }, nullptr,
        [&](int k, const PivotRoot<Real<T>>& pivot) {
#pragma unroll
          for (int s = 0; s < kSlots; ++s) {
            if (k == kLanes * s + g) inverse[s] = pivot.inverse;
          }
        });
    if (!mine) return;
    load(stage, n, g);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int i = kLanes * s + g;
      if (i >= n) inverse[s] = 1;
      if constexpr (kSolve) {
#pragma unroll
        for (int j = kLanes * s; j < kLanes * (s + 1); ++j) {
          if (j >= i) x[s][j] = T(0);
        }
      }
    }
  }

  // 1-based index of the first pivot that was not positive, 0 if all were.
  __device__ __forceinline__ int info(int lane) const {
    int first = 0;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const unsigned failed = among_mine(is_nan(inverse[s]), lane);
      if (first == 0 && failed != 0) first = kLanes * s + __ffs(failed);
    }
    return first;
  }

  // y = L^-1 b for kCount right-hand sides: y_k = b_k / l_kk; b_i -= l_ik y_k.
  template <int kCount>
  __device__ __forceinline__ void solve_forward(T (&b)[kCount][kSlots], int g) const {
    for_constants<kRows>([&](auto constant) {
      constexpr int k = decltype(constant)::value, top = k / kLanes, owner = k % kLanes;
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        if (g == owner) b[c][top] = scale(b[c][top], inverse[top]);
        const T y = shuffle(b[c][top], owner, kLanes);
#pragma unroll
        for (int s = top; s < kSlots; ++s) b[c][s] = sub_mul(b[c][s], x[s][k], y);
      }
    });
  }

  // x = L^-H y, in place of y: x_k = (y_k - sum over i > k of conj(l_ik) x_i) / l_kk, the sum over
  // the rows of all lanes.
  template <int kCount>
  __device__ __forceinline__ void solve_backward(T (&y)[kCount][kSlots], int g) const {
    T v[kCount][kSlots];  // x where it is known, 0 elsewhere
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) v[c][s] = T(0);
    }
    for_constants<kRows>([&](auto constant) {
      constexpr int k = kRows - 1 - decltype(constant)::value, top = k / kLanes, owner = k % kLanes;
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        T sum = T(0);
#pragma unroll
        for (int s = top; s < kSlots; ++s) sum = add_conj_mul(sum, x[s][k], v[c][s]);
#pragma unroll
        for (int mask = kLanes / 2; mask > 0; mask /= 2) sum = sum + shuffle_xor(sum, mask);
        if (g == owner) v[c][top] = scale(y[c][top] - sum, inverse[top]);
      }
    });
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) y[c][s] = v[c][s];
    }
  }

 private:
  // Bit g is the predicate of lane g of this matrix.
  static __device__ __forceinline__ unsigned among_mine(bool predicate, int lane) {
    return __ballot_sync(kFullWarp, predicate) >> (lane - lane % kLanes) & (1u << kLanes) - 1;
  }

  // Starts the copy of 16-byte units kFirst and up of the rows of slot s, in pieces of 2, 4 or 8
  // units a row, so that a lane's place in a piece needs no division.
  template <int s, int kFirst>
  static __device__ __forceinline__ void copy_vectors(T* stage, const View<T>& a, int g) {
    constexpr int kLeft = kLanes * (s + 1) / kVector<T> - kFirst;
    if constexpr (kLeft > 0) {
      constexpr int kWidth = kLeft >= kLanes ? kLanes : kLeft & -kLeft;
      const int r0 = g / kWidth, c = (kFirst + g % kWidth) * kVector<T>;
#pragma unroll
      for (int first = 0; first < kLanes; first += kLanes / kWidth) {
        const int r = first + r0;
        if (s < kSlots - 1 || (kLanes * s + r < a.rows && c < a.columns)) {
          copy_async(reinterpret_cast<Vector<T>*>(stage + r * stage_row(s) + c),
                     reinterpret_cast<const Vector<T>*>(a.at(kLanes * s, 0) + r * a.ld + c));
        }
      }
      copy_vectors<s, kFirst + kWidth>(stage, a, g);
    }
  }
};

}  // namespace jax_batched::cuda
