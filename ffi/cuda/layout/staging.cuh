// Coalesced moves between global memory and one warp's shared memory.
#pragma once

#include <cstdint>

#include "ffi/cuda/device/math.cuh"
#include "ffi/cuda/device/storage.cuh"

namespace jax_batched::cuda {

// Moves a warp's records: move_all() those of a full warp; of the last warp of a batch
// move_vectors(count) the whole vectors of their elements and move_element(e) what is left.
template <class T, int kLength, class A, class V, class E>
__device__ __forceinline__ void move_records(int records, int lane, A&& move_all, V&& move_vectors,
                                             E&& move_element) {
  if (records == 32) {
    move_all();
  } else {
    const int vectors = records * kLength / kVector<T>;
    move_vectors(vectors);
    const int rest = vectors * kVector<T> + lane;
    if (rest < records * kLength) move_element(rest);
  }
}

// 32 records of kLength elements, one per lane, staged at stride kStride (odd, so that lanes that
// read the same element of their own records meet no bank conflict).
//
// Records that lie one after the other move as 16-byte vectors: neighbouring lanes read
// neighbouring memory. `src` and `dst` are 16-byte aligned, as 32 * kLength elements are a multiple
// of 16 bytes.
template <class T, int kLength>
struct RecordStage {
  static constexpr int kStride = make_odd(kLength);
  static constexpr int kElements = 32 * kStride;
  static constexpr int kVectors = 32 * kLength / kVector<T>;

  // Where element e of the 32 records lies.
  static __device__ __forceinline__ int position(int e) {
    return e + e / kLength * (kStride - kLength);
  }

  static __device__ __forceinline__ void load(T* stage, const T* src, int records, int lane) {
    const auto* const from = reinterpret_cast<const Vector<T>*>(src);
    const auto put = [=](int i, const Vector<T>& v) {
#pragma unroll
      for (int z = 0; z < kVector<T>; ++z) stage[position(i * kVector<T> + z)] = v.v[z];
    };
    move_records<T, kLength>(
        records, lane,
        [=] {
          constexpr int kRounds = ceil_div(kVectors, 32);
          constexpr int kFlight = kRounds < 16 ? kRounds : 16;  // loads in flight
#pragma unroll 1
          for (int first = 0; first < kRounds; first += kFlight) {
            Vector<T> v[kFlight];
#pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              const int i = (first + u) * 32 + lane;
              if (i < kVectors) v[u] = from[i];
            }
#pragma unroll
            for (int u = 0; u < kFlight; ++u) {
              const int i = (first + u) * 32 + lane;
              if (i < kVectors) put(i, v[u]);
            }
          }
        },
        // Fewer in flight: their number is not known, and registers are those of every warp.
        [=](int vectors) {
#pragma unroll 4
          for (int i = lane; i < vectors; i += 32) put(i, from[i]);
        },
        [=](int e) { stage[position(e)] = src[e]; });
  }
  static __device__ __forceinline__ void store(T* dst, const T* stage, int records, int lane) {
    move_records<T, kLength>(
        records, lane, [=] { store_vectors<8>(dst, stage, kVectors, lane); },
        [=](int vectors) { store_vectors<4>(dst, stage, vectors, lane); },
        [=](int e) { dst[e] = stage[position(e)]; });
  }

 private:
  template <int kUnroll>
  static __device__ __forceinline__ void store_vectors(T* dst, const T* stage, int vectors,
                                                       int lane) {
#pragma unroll kUnroll
    for (int i = lane; i < vectors; i += 32) {
      Vector<T> v;
#pragma unroll
      for (int z = 0; z < kVector<T>; ++z) v.v[z] = stage[position(i * kVector<T> + z)];
      reinterpret_cast<Vector<T>*>(dst)[i] = v;
    }
  }
};

// How far a loop over vectors, 32 a round, is unrolled: kernels of large matrices are close to what
// the instruction cache holds.
template <int kVectors>
inline constexpr int kVectorUnroll = kVectors <= 128 ? ceil_div(kVectors, 32) : 1;

// Stores `count` neighbouring elements (shift + count <= kMaxCount) by one warp, as 16-byte vectors
// save at the two ends. `shift` is how many elements past a 16-byte boundary dst lies; the elements
// are at stage + shift, so that global and shared vectors line up.
template <int kMaxCount, class T>
__device__ __forceinline__ void store_run(T* dst, int shift, int count, const T* stage, int lane) {
  T* aligned = dst - shift;
  const int end = shift + count;
  const int first = shift != 0 ? 1 : 0;
  const int last = end / kVector<T>;
  constexpr int kUnroll = kVectorUnroll<kMaxCount / kVector<T>>;
#pragma unroll kUnroll
  for (int round = 0; round < ceil_div(kMaxCount / kVector<T>, 32); ++round) {
    const int v = 32 * round + lane;
    if (v >= first && v < last) {
      reinterpret_cast<Vector<T>*>(aligned)[v] = reinterpret_cast<const Vector<T>*>(stage)[v];
    }
  }
  if (kVector<T> > 1 && (first != 0 || end % kVector<T> != 0)) {
    const int head = shift + lane, tail = max(last, first) * kVector<T> + lane;
    if (first != 0 && head < min(kVector<T>, end)) aligned[head] = stage[head];
    if (tail < end) aligned[tail] = stage[tail];
  }
}

// A failed matrix: NaN in the triangle that carries data, zeros in the other.
template <class S>
__device__ __noinline__ void fill_failed(S* l, int n, bool upper, int thread, int threads) {
  using T = Computed<S>;
  for (int r = 0; r < n; ++r) {
    for (int c = thread; c < n; c += threads) {
      l[static_cast<int64_t>(r) * n + c] =
          narrow<S>((upper ? r <= c : c <= r) ? quiet_nan<T>() : T(0));
    }
  }
}

}  // namespace jax_batched::cuda
