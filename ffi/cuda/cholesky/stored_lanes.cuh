// Matrices of 16-bit elements on their way into the rows that lanes hold (lanes.cuh), and out.
//
// The matrices of a warp are one run in memory, which moves through shared memory as it lies.
// Asynchronous copies take no fewer than 4 bytes, so nothing shorter than a row of 8 elements can
// be picked out of it; but a whole matrix of 16 bits is no more than a triangle of 32.
#pragma once

#include <cstdint>

#include "ffi/cuda/cholesky/lanes.cuh"
#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/storage.cuh"
#include "ffi/cuda/layout/view.cuh"

namespace jax_batched::cuda {

template <class S, int kSlots, bool kExact>
struct StoredLanes {
  using T = Computed<S>;
  using Matrix = LanesFactor<T, kSlots>;
  static constexpr int kLanes = Matrix::kLanes;
  static_assert(sizeof(S) == 2 && kVector<S> == 8);
  static constexpr int kRows = kLanes * kSlots;
  static constexpr int kUnits = kRows / 8;  // vectors of a row
  static constexpr int kMatrices = Matrix::kMatrices;
  // A run starts at a multiple of kMatrices matrices, hence of so many elements.
  struct alignas(kMatrices * sizeof(S)) Piece {
    S v[kMatrices];
  };
  // Exact sizes: rows are an odd number of vectors apart, so that 8 lanes reading the same vector
  // of their rows meet no bank conflict; nor do the lanes of different matrices reading a row.
  // Other sizes lie as in memory.
  static constexpr int kPaddedRow = 8 * make_odd(kUnits);
  static constexpr int kPaddedMatrix = round_up(kRows * kPaddedRow, 64) + kLanes;
  static constexpr int kRun = kMatrices * kPaddedMatrix;  // elements
  // Of shared memory for a warp, which serves as run, as columns of LanesFactor::factor, and as one
  // matrix in LanesFactor::repair.
  static constexpr int kRunBytes = kRun * static_cast<int>(sizeof(S));
  static constexpr int kBytes = kRunBytes > Matrix::kMatrices* Matrix::kColumns * 4
                                    ? kRunBytes
                                    : Matrix::kMatrices * Matrix::kColumns * 4;
  static_assert(kBytes >= Matrix::kElements * static_cast<int>(sizeof(T)));

  S* run;
  int n, stride;
  int lane;

  __device__ __forceinline__ StoredLanes(S* shared, int size, int lane)
      : run(shared), n(kExact ? kRows : size), stride(kExact ? kPaddedRow : size), lane(lane) {}

  // Matrix `index` of the run.
  __device__ __forceinline__ S* matrix(int index) const {
    return run + index * (kExact ? kPaddedMatrix : n * n);
  }

  // Starts the copy of `count` matrices that follow each other from `a` on. Of exact sizes, vectors
  // without an entry of the triangle stay behind.
  __device__ __forceinline__ void start_copy(const S* a, int count, Part part) const {
    if constexpr (kExact) {
      for_each_vector(count, [&](int vector, int position) {
        const int row = vector / kUnits % kRows, unit = vector % kUnits;
        const bool outside = part.upper ? 8 * unit + 7 < row : 8 * unit > row;
        if (part.mean || !outside) {
          copy_async(reinterpret_cast<Vector<S>*>(run + position),
                     reinterpret_cast<const Vector<S>*>(a) + vector);
        }
      });
    } else {
      for_each_piece(
          count,
          [&](int first) {
            copy_async(reinterpret_cast<Piece*>(run + first),
                       reinterpret_cast<const Piece*>(a + first));
          },
          [&](int element) { run[element] = a[element]; });
    }
  }

  // Copies one matrix, from anywhere in memory, to matrix `index` of the run.
  __device__ __forceinline__ void copy_matrix(const S* a, int index) const {
    S* to = matrix(index);
#pragma unroll 1
    for (int e = lane; e < n * n; e += 32) {
      to[kExact ? e / kRows * kPaddedRow + e % kRows : e] = a[e];
    }
  }

  // Matrix `index` of the run -> registers; rows from n on are those of the identity.
  __device__ __forceinline__ void load(Matrix& m, int index, Part part) const {
    const S* own = matrix(index);
    if (kExact && (part.mean || !part.upper)) {
      load_rows(m, own);
      if (part.mean) {
        for_each_entry_of_mine([&](auto slot, int i, int j) {
          T& below = m.x[decltype(slot)::value][j];
          below = stored_mean<S>(below, widen(own[j * kPaddedRow + i]));
        });
      }
    } else {
      with_entries(View<S>{own, stride, n, n}, part, [&](auto entry) {
        for_each_entry_of_mine([&](auto slot, int i, int j) {
          constexpr int s = decltype(slot)::value;
          const bool inside = s < kSlots - 1 || (i < n && j < n);
          m.x[s][j] = inside ? entry(i, j) : T(i == j);
        });
      });
    }
  }

  // The factor of a matrix, NaN if it failed, and the zeros of the other triangle -> the run. All
  // lanes of the warp together.
  __device__ __forceinline__ void put(const Matrix& m, int index, bool failed, bool upper) const {
    S* own = matrix(index);
    const int g = lane % kLanes;
    const auto value = [&](int s, int j) { return narrow<S>(failed ? quiet_nan<T>() : m.x[s][j]); };
    const S zero = narrow<S>(T(0));
    if (kExact && !upper) {
      for_constants<kSlots>([&](auto slot) {
        constexpr int s = decltype(slot)::value;
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          Vector<S> v;
#pragma unroll
          for (int z = 0; z < 8; ++z) {
            const int j = 8 * u + z;
            const bool inside = j < kLanes * (s + 1) && (j < kLanes * s || j <= kLanes * s + g);
            v.v[z] = inside ? value(s, j) : zero;
          }
          *reinterpret_cast<Vector<S>*>(own + (kLanes * s + g) * kPaddedRow + 8 * u) = v;
        }
      });
    } else {
#pragma unroll 1
      for (int v = lane; v < kRun / kVector<S>; v += 32) {
        reinterpret_cast<uint4*>(run)[v] = uint4{0, 0, 0, 0};
      }
      __syncwarp();
      for_each_entry_of_mine([&](auto slot, int i, int j) {
        if (j <= i && i < n)
          own[upper ? j * stride + i : i * stride + j] = value(decltype(slot)::value, j);
      });
    }
  }

  // Stores `count` matrices of the run.
  __device__ __forceinline__ void store(S* l, int count) const {
    if constexpr (kExact) {
      for_each_vector(count, [&](int vector, int position) {
        reinterpret_cast<Vector<S>*>(l)[vector] =
            *reinterpret_cast<const Vector<S>*>(run + position);
      });
    } else {
      for_each_piece(
          count,
          [&](int first) {
            *reinterpret_cast<Piece*>(l + first) = *reinterpret_cast<const Piece*>(run + first);
          },
          [&](int element) { l[element] = run[element]; });
    }
  }

  // Factors the matrices of the lanes with `mine` again, whatever their pivots are: one after the
  // other, from memory, in the shared memory of all. matrix_of(index) is where one lies.
  template <bool kSolve, class F>
  __device__ __forceinline__ void repair(Matrix& m, bool mine, F&& matrix_of, Part part) const {
    T* shared = reinterpret_cast<T*>(run);
    const int g = lane % kLanes;
#pragma unroll 1
    for (int index = 0; index < kMatrices; ++index) {
      const bool now = mine && lane / kLanes == index;
      if (!__any_sync(kFullWarp, now)) continue;
      const S* a = matrix_of(index);
      with_entries(View<S>::square(a, n), part, [&](auto entry) {
#pragma unroll 1
        for (int i = 0; i < n; ++i) {
#pragma unroll 1
          for (int j = lane; j <= i; j += 32) *Matrix::at(shared, i, j) = entry(i, j);
        }
      });
      __syncwarp();
      m.template repair<kSolve>(shared, now, n, g);
      __syncwarp();
    }
  }

 private:
  // Calls f(slot, i, j) for the entries (i, j) that this lane holds as x[slot][j].
  template <class F>
  __device__ __forceinline__ void for_each_entry_of_mine(F&& f) const {
    for_constants<kSlots>([&](auto slot) {
      constexpr int s = decltype(slot)::value;
#pragma unroll
      for (int j = 0; j < kLanes * (s + 1); ++j) f(slot, kLanes * s + lane % kLanes, j);
    });
  }

  __device__ __forceinline__ void load_rows(Matrix& m, const S* own) const {
    for_constants<kSlots>([&](auto slot) {
      constexpr int s = decltype(slot)::value;
#pragma unroll
      for (int j = 0; j < kLanes * (s + 1); j += 8) {
        const auto v = *reinterpret_cast<const Vector<S>*>(
            own + (kLanes * s + lane % kLanes) * kPaddedRow + j);
#pragma unroll
        for (int z = 0; z < 8; ++z) m.x[s][j + z] = widen(v.v[z]);
      }
    });
  }

  // Calls f(vector, position) for this lane's vectors of a run of exact sizes.
  template <class F>
  __device__ __forceinline__ void for_each_vector(int count, F&& f) const {
    constexpr int kRounds = ceil_div(kMatrices * kRows * kUnits, 32);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int vector = 32 * round + lane;
      if (vector < count * kRows * kUnits) {
        const int row = vector / kUnits, unit = vector % kUnits;
        f(vector, row / kRows * kPaddedMatrix + row % kRows * kPaddedRow + 8 * unit);
      }
    }
  }

  // Calls piece(first) for this lane's pieces of `count` matrices, and rest(e) for the elements
  // that are left where there are fewer than kMatrices.
  template <class F, class Rest>
  __device__ __forceinline__ void for_each_piece(int count, F&& piece, Rest&& rest) const {
    const int elements = count * n * n;
#pragma unroll 4
    for (int first = kMatrices * lane; first + kMatrices <= elements; first += 32 * kMatrices) {
      piece(first);
    }
    if (lane < elements % kMatrices) rest(elements - 1 - lane);
  }
};

}  // namespace jax_batched::cuda
