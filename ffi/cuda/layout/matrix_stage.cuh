// Whole small matrices on their way between global memory and the registers of one thread each.
#pragma once

#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/storage.cuh"
#include "ffi/cuda/layout/staging.cuh"
#include "ffi/cuda/layout/view.cuh"

namespace jax_batched::cuda {

// Lower triangle of an n x n matrix, l[i][j] with j <= i.
template <class T, int kN>
using Triangle = T[kN][kN];

// 32 matrices in one warp's shared memory, one per lane, on their way in and out.
//
// A matrix is a record of kN * kN elements. The warp moves all of them as 16-byte vectors; each
// lane reads and writes its own record in units of up to 16 bytes (the largest that divides a
// record). Records are padded to an odd number of units, which makes both free of bank conflicts; a
// padded record is a multiple of 16 bytes, so no vector straddles two.
template <class S, int kN>
struct MatrixStage {
  using T = Computed<S>;
  static constexpr int kLength = kN * kN;
  static constexpr int kUnit = kLength % kVector<S> == 0            ? kVector<S>
                               : kVector<S> > 4 && kLength % 4 == 0 ? 4
                                                                    : 1;
  static constexpr int kStride = kUnit * make_odd(kLength / kUnit);
  static constexpr int kElements = 32 * kStride;
  static constexpr int kVectors = 32 * kLength / kVector<S>;

  struct alignas(kUnit * sizeof(S)) Unit {
    S v[kUnit];
  };

  // Where element e of the 32 records lies.
  static __device__ __forceinline__ int position(int e) {
    return e + e / kLength * (kStride - kLength);
  }

  // Both need a barrier between the warp's moves and a lane's.
  static __device__ __forceinline__ void load(S* stage, const S* src, int records, int lane) {
    move_records<S, kLength>(
        records, lane, [=] { load_vectors(stage, src, kVectors, lane); },
        [=](int vectors) { load_vectors(stage, src, vectors, lane); },
        [=](int e) { stage[position(e)] = src[e]; });
  }
  static __device__ __forceinline__ void store(S* dst, const S* stage, int records, int lane) {
    move_records<S, kLength>(
        records, lane, [=] { store_vectors(dst, stage, kVectors, lane); },
        [=](int vectors) { store_vectors(dst, stage, vectors, lane); },
        [=](int e) { dst[e] = stage[position(e)]; });
  }

  // The triangle `part` of this lane's record.
  static __device__ __forceinline__ void take(Triangle<T, kN>& l, const S* own, Part part) {
    if (part.mean) {
      // Row by row: an entry above the diagonal waits where its mirror image will meet it.
      for_each_read(
          own, [](int i, int j) { return true; },
          [&](int i, int j, T a) {
            if (j > i) {
              l[j][i] = a;
            } else {
              const T above = j < i ? l[i][j] : a;
              l[i][j] = part.mean_of<S>(a, above);
            }
          });
    } else if (part.upper) {
      for_each_read(
          own, [](int i, int j) { return j >= i; }, [&](int i, int j, T a) { l[j][i] = a; });
    } else {
      for_each_read(
          own, [](int i, int j) { return j <= i; }, [&](int i, int j, T a) { l[i][j] = a; });
    }
  }

  // The factor and the zeros of the other triangle -> this lane's record.
  static __device__ __forceinline__ void put(S* own, const Triangle<T, kN>& l, bool upper) {
    if (upper) {
      write(own, [&](int i, int j) { return j >= i ? l[j][i] : T(0); });
    } else {
      write(own, [&](int i, int j) { return j <= i ? l[i][j] : T(0); });
    }
  }

  // Calls f(i, j, a_ij) for each entry of this lane's record that is wanted, row by row.
  template <class Wanted, class F>
  static __device__ __forceinline__ void for_each_read(const S* own, Wanted&& wanted, F&& f) {
#pragma unroll
    for (int u = 0; u < kLength / kUnit; ++u) {
      bool any = false;
#pragma unroll
      for (int z = 0; z < kUnit; ++z) {
        any = any || wanted((u * kUnit + z) / kN, (u * kUnit + z) % kN);
      }
      if (!any) continue;
      const Unit unit = reinterpret_cast<const Unit*>(own)[u];
#pragma unroll
      for (int z = 0; z < kUnit; ++z) {
        const int i = (u * kUnit + z) / kN, j = (u * kUnit + z) % kN;
        if (wanted(i, j)) f(i, j, widen(unit.v[z]));
      }
    }
  }

  // entry(i, j) -> this lane's record.
  template <class Entry>
  static __device__ __forceinline__ void write(S* own, Entry&& entry) {
#pragma unroll
    for (int u = 0; u < kLength / kUnit; ++u) {
      Unit unit;
#pragma unroll
      for (int z = 0; z < kUnit; ++z) {
        const int e = u * kUnit + z;
        unit.v[z] = narrow<S>(entry(e / kN, e % kN));
      }
      reinterpret_cast<Unit*>(own)[u] = unit;
    }
  }

 private:
  static __device__ __forceinline__ void load_vectors(S* stage, const S* src, int vectors,
                                                      int lane) {
    const auto* from = reinterpret_cast<const Vector<S>*>(src);
    const auto to = [=](int i) {
      return reinterpret_cast<Vector<S>*>(stage + position(i * kVector<S>));
    };
    constexpr int kRounds = ceil_div(kVectors, 32);
    if constexpr (kRounds <= 16) {
      Vector<S> v[kRounds];
#pragma unroll
      for (int u = 0; u < kRounds; ++u) {
        if (32 * u + lane < vectors) v[u] = from[32 * u + lane];
      }
#pragma unroll
      for (int u = 0; u < kRounds; ++u) {
        if (32 * u + lane < vectors) *to(32 * u + lane) = v[u];
      }
    } else {  // more than registers hold
#pragma unroll 8
      for (int i = lane; i < vectors; i += 32) copy_async(to(i), from + i);
      commit_copies();
      wait_for_copies<0>();
    }
  }

  static __device__ __forceinline__ void store_vectors(S* dst, const S* stage, int vectors,
                                                       int lane) {
#pragma unroll 8
    for (int i = lane; i < vectors; i += 32) {
      reinterpret_cast<Vector<S>*>(dst)[i] =
          *reinterpret_cast<const Vector<S>*>(stage + position(i * kVector<S>));
    }
  }
};

}  // namespace jax_batched::cuda
