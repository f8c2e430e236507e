// QR factorizations and products with Q of matrices of any size: a block of threads for each.
//
// A panel is kWidth columns in registers: a lane holds kColumns of them in every kStep-th row, up
// to kSlots rows. From the left to the right, the panels before it are applied to each, which are
// read again from where they were stored; then it is factored itself:
//   step k: the rows of x, column k below its pivot, go to the lanes of the other columns by
//           shuffles; sums x^H a_c over the rows of each lane are added up in shared memory; and
//           a_c -= w_c u,  w_c = phi u^H a_c.
// A panel's product of reflections is I - V T V^H. Applied to others,
//   W = V^H C,  Y = T W (of the adjoint T^H W),  C -= V Y,
// with V in shared memory, C in registers. Products with earlier columns of the panel, which step k
// has for nothing, are V^H V, of which T is made. Q is formed from the right to the left, as panels
// of it take the places of those of V that are not needed any more.
#pragma once

#include <climits>

#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/tensor.cuh"
#include "ffi/cuda/qr/product.cuh"
#include "ffi/cuda/qr/reflection.cuh"

namespace jax_batched::cuda {

extern __shared__ __align__(16) unsigned char dynamic_shared[];

template <class T, int kWarps, int kSlots, int kWidth, int kColumns>
struct BlockQr {
  using R = Real<T>;
  static constexpr int V = kVector<T>;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kGroups = kWidth / kColumns;  // of lanes with the same columns
  static constexpr int kRowLanes = 32 / kGroups;
  // Float64 has its products on the tensor cores: columns and rows of lanes are those of fragments.
  static constexpr bool kTensor = std::is_same_v<T, double> && kWidth == 16;
  static_assert(!kTensor || (kGroups == 8 && kSlots % 4 == 0));
  static constexpr int kStep = kWarps * kRowLanes;
  static constexpr int kRows = kStep * kSlots;
  static constexpr int kChunk = kSlots % 4 == 0 ? 4 : kSlots;  // of slots, left out together
  static constexpr int kChunkRows = kChunk * kStep;
  static constexpr int kPass = 128 / (kColumns * sizeof(T));  // reflections of W at a time
  static constexpr int kSums = kPass * kColumns;              // of a lane at a time
  static constexpr int kLaneSums = kSums > kRowLanes ? kSums / kRowLanes : 1;  // in the end
  static constexpr int kLastMask = 16 / kSums;  // from here on lanes have the same sum
  static constexpr int kStride = kWidth + V;    // of rows of V and T
  static constexpr int kTile = 4;               // rows of Y of a thread
  static constexpr int kExponentBias = sizeof(R) == 4 ? 127 : 1023;
  static constexpr int kSmallestExponent = 1 - kExponentBias;
  // A column of which too little is left is multiplied by 2^kRaise, so many times at most: then
  // nothing but zero is below kSmallestSquares.
  static constexpr int kRaise = sizeof(R) == 4 ? 40 : 500, kMostRaises = sizeof(R) == 4 ? 3 : 2;
  static_assert(kWidth % kPass == 0 && kColumns % V == 0);

  struct Fixed {
    alignas(16) T w[kWarps][kWidth][kWidth];  // of each warp, columns as lanes have them
    alignas(16) T y[kWidth][kWidth];          // and V^H V while a panel is factored
    alignas(16) T tails[2][kWarps][kWidth];   // of this step and the one before
    alignas(16) T tops[2][kWidth];
    T inverses[kWidth], taus[kWidth];
    R largest[kWarps][kWidth];
  };

  const int m;
  Fixed& fixed;
  T* v;         // rows of a panel's V, in chunks
  T* const ts;  // T of each panel
  const int thread, warp, lane, group, row_lane;
  T a[kSlots][kColumns];
  int exponents[kColumns];  // columns are multiplied by these powers of two on the way out
  int turn = 0;             // of the two buffers of sums

  // V is kept where Q will be, or below R. Of R alone of more rows than columns it stays in shared
  // memory.
  static __host__ __device__ bool has_place(const QrProblem& p) {
    return p.mode != QrProblem::kR || p.m <= p.n || p.n <= kWidth;
  }
  static __host__ __device__ constexpr int panels(int k) { return ceil_div(k, kWidth); }
  // With the V of so many panels at a time.
  static __host__ __device__ constexpr size_t bytes(int m, int k, int together) {
    const size_t rows = round_up(m, kChunkRows) * together + panels(k) * kWidth;
    return sizeof(Fixed) + sizeof(T) * kStride * rows;
  }

  __device__ __forceinline__ explicit BlockQr(int m, int together = 1)
      : m(m),
        fixed(*reinterpret_cast<Fixed*>(kept(dynamic_shared))),
        v(reinterpret_cast<T*>(&fixed + 1)),
        ts(v + together * round_up(m, kChunkRows) * kStride),
        thread(threadIdx.x),
        warp(thread / 32),
        lane(thread % 32),
        group(kTensor ? lane / kRowLanes : lane % kGroups),
        row_lane(kTensor ? lane % kRowLanes : lane / kGroups) {}

  // Keeps an address in a register; the compiler would make it anew for each access.
  static __device__ __forceinline__ unsigned char* kept(unsigned char* shared) {
    auto address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("" : "+r"(address));
    return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
  }
  static __device__ __forceinline__ void sync() {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  static __device__ __forceinline__ bool any(bool mine) {
    if constexpr (kWarps == 1) {
      return __any_sync(kFullWarp, mine);
    } else {
      return __syncthreads_or(mine);
    }
  }

  // Rows from one slot to the next: of fragments, two slots have neighbours.
  static __device__ __forceinline__ int rows_to(int s) {
    return kTensor ? s / 2 * (2 * kStep) + s % 2 : s * kStep;
  }
  __device__ __forceinline__ int first_row() const {
    return (kTensor ? 2 : 1) * (warp * kRowLanes + row_lane);
  }
  __device__ __forceinline__ int row(int s) const { return first_row() + rows_to(s); }
  __device__ __forceinline__ int lane_of(int group) const {
    return kTensor ? group * kRowLanes + row_lane : row_lane * kGroups + group;
  }
  // Calls f(mask) for the exchanges that bring together all lanes of a group.
  template <class F>
  static __device__ __forceinline__ void for_row_masks(const F& f) {
#pragma unroll
    for (int mask = kRowLanes / 2; mask > 0; mask /= 2) f(kTensor ? mask : mask * kGroups);
  }
  // In its panel.
  __device__ __forceinline__ int column(int j) const { return group + kGroups * j; }
  __device__ __forceinline__ T* t(int panel) const { return ts + panel * kWidth * kStride; }

  // Calls f(first) for the first slots of the chunks that have rows from `begin` on.
  template <class F>
  __device__ __forceinline__ void for_chunks(int begin, const F& f) const {
#pragma unroll
    for (int first = 0; first < kSlots; first += kChunk) {
      if (first * kStep + kChunkRows > begin && first * kStep < m) f(first);
    }
  }
  // Calls f(s) for the slots of these.
  template <class F>
  __device__ __forceinline__ void for_slots(int begin, const F& f) const {
    for_chunks(begin, [&](int first) {
#pragma unroll
      for (int s = first; s < first + kChunk; ++s) f(s);
    });
  }
  // The same, but g(s) in chunks whose rows are all beyond `begin`.
  template <class F, class G>
  __device__ __forceinline__ void for_slots(int begin, const F& f, const G& g) const {
    for_chunks(begin, [&](int first) {
      if (first * kStep <= begin) {
#pragma unroll
        for (int s = first; s < first + kChunk; ++s) f(s);
      } else {
#pragma unroll
        for (int s = first; s < first + kChunk; ++s) g(s);
      }
    });
  }

  // Columns from `begin` on of a matrix in memory, or of the identity.
  __device__ __forceinline__ void load(const T* from, int columns, int begin) {
    const int here = from != nullptr ? columns - begin - group : 0;
    const int diagonal = from != nullptr ? INT_MIN : begin + group - first_row();
    const T* at = from + first_row() * columns + begin + group;
#pragma unroll
    for (int s = 0; s < kSlots; at += (rows_to(s + 1) - rows_to(s)) * columns, ++s) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        a[s][j] = T(R(rows_to(s) - kGroups * j == diagonal ? 1 : 0));
        if (row(s) < m && kGroups * j < here) a[s][j] = at[kGroups * j];
      }
    }
  }
  // Of column c, the rows from first(c) to before end(c).
  template <class First, class End>
  __device__ __forceinline__ void store(T* to, int columns, int begin, const First& first,
                                        const End& end) const {
    int from[kColumns], rows[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      from[j] = first(begin + column(j)) - first_row();
      rows[j] = begin + column(j) < columns ? end(begin + column(j)) - first_row() : 0;
    }
    T* at = to + first_row() * columns + begin + group;
#pragma unroll
    for (int s = 0; s < kSlots; at += (rows_to(s + 1) - rows_to(s)) * columns, ++s) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (rows_to(s) >= from[j] && rows_to(s) < rows[j]) at[kGroups * j] = a[s][j];
      }
    }
  }
  __device__ __forceinline__ void store(T* to, int columns, int begin) const {
    store(to, columns, begin, [](int) { return 0; }, [&](int) { return m; });
  }

  __device__ __forceinline__ void scale_columns() {
    R largest[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      largest[j] = R(0);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) largest[j] = fmax(largest[j], largest_part(a[s][j]));
      for_row_masks(
          [&](int mask) { largest[j] = fmax(largest[j], shuffle_xor(largest[j], mask)); });
      if (row_lane == 0) fixed.largest[warp][column(j)] = largest[j];
    }
    sync();
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      R most = R(0);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) most = fmax(most, fixed.largest[w][column(j)]);
      exponents[j] = min(max(exponent(most), kSmallestExponent), -kSmallestExponent);
      const R by = power(-exponents[j]);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) a[s][j] = scale_nonzero(a[s][j], by);
    }
  }

  // V of the panel from `begin` on, of which `from` has the part below the diagonal of `count`
  // columns, to shared memory.
  __device__ __forceinline__ void stage(const T* from, int ld, int begin, int count) {
    const int first = begin / kChunkRows * kChunkRows;
    const int rows = round_up(m, kChunkRows) - first;
#pragma unroll 4
    for (int e = thread; e < rows * kWidth; e += kThreads) {
      const int i = first + e / kWidth, l = e % kWidth;
      T* to = v + i * kStride + l;
      if (l < count && i > begin + l && i < m) {
        copy_async(to, from + i * ld + begin + l);
      } else {
        *to = T(R(l < count && i == begin + l ? 1 : 0));
      }
    }
    commit_copies();
    wait_for_copies<0>();
  }

  // Panel `panel`, whose V is staged, applied to this one: of the identity's columns that belong to
  // the panel, `is_own`, W is there. All wait for V and T before, and before V is overwritten.
  __device__ __forceinline__ void apply(int panel, bool adjoint, bool is_own) {
    if (is_own) {
      const T* top = v + panel * kWidth * kStride;
      for (int e = thread; e < kWidth * kWidth; e += kThreads) {
        const int l = e % kWidth, c = e / kWidth;
        fixed.w[0][l][c % kGroups * kColumns + c / kGroups] = conj(top[c * kStride + l]);
      }
      sync();
    } else {
      multiply_adjoint(panel * kWidth);
    }
    make_y(t(panel), adjoint);
    sync();
    subtract_product(panel * kWidth);
  }

  // Factors columns `begin`, ..., of which `steps` are reflected, and undoes their scaling in R.
  // The column of a step is the first of its lanes: after kGroups steps they go round.
  __device__ __forceinline__ void factor(int begin, int steps) {
    T inverse[kColumns], beta[kColumns];
    int columns[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      inverse[j] = beta[j] = T(R(0));
      columns[j] = column(j);
    }
#pragma unroll 1
    for (int first = 0; first < kWidth; first += kGroups) {
#pragma unroll 1
      for (int g = 0; g < kGroups; ++g) {
        const int k = first + g;
        if (k >= steps) break;
        const auto h = step(begin + k, k, g, columns);
        if (group == g) {
          inverse[0] = Reflection<T>::inverse(h.first);
          beta[0] = T(h.beta);
        }
        if (thread == 0) {
          fixed.inverses[k] = Reflection<T>::inverse(h.first);
          fixed.taus[k] = Reflection<T>::tau(h.first, h.factor);
        }
      }
#pragma unroll
      for (int s = 0; s < kSlots; ++s) go_round(a[s]);
      go_round(exponents);
      go_round(inverse);
      go_round(beta);
      go_round(columns);
    }
    bool is_raised = false;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int pivot = column(j) < steps ? begin + column(j) : INT_MAX;
      const int e = max(exponents[j], kSmallestExponent);
      is_raised = is_raised || e != exponents[j];
      const T by = T(power(e));
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const T r = row(s) == pivot ? beta[j] : a[s][j];
        a[s][j] = product(r, row(s) > pivot ? inverse[j] : by);
      }
    }
    if (__any_sync(kFullWarp, is_raised)) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int pivot = column(j) < steps ? begin + column(j) : INT_MAX;
        const R by = power(min(exponents[j] - kSmallestExponent, 0));
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          if (row(s) <= pivot) a[s][j] = scale(a[s][j], by);
        }
      }
    }
  }

  // V of the panel that was factored to shared memory.
  __device__ __forceinline__ void keep(int begin, int steps) const {
    for_slots(begin, [&](int s) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int c = column(j), pivot = begin + c;
        const T one = T(R(c < steps && row(s) == pivot ? 1 : 0));
        v[row(s) * kStride + c] = c < steps && row(s) > pivot ? a[s][j] : one;
      }
    });
  }

  // T, from z = V^H V (in `y`, of vectors that are not multiplied by their inverses yet): with
  // column k, t_kk = tau_k and t_ik = -tau_k sum_{i<=p<k} t_ip z_pk. Lane i has row i.
  __device__ __forceinline__ void make_t(int panel, int steps) {
    if (thread >= 32) return;
    const int i = min(lane, kWidth - 1);
    T sums[kWidth];  // of columns from `first` on
#pragma unroll
    for (int c = 0; c < kWidth; ++c) sums[c] = T(R(0));
    T* own = t(panel) + i * kStride;
#pragma unroll 1
    for (int first = 0; first < kWidth; first += kTile) {
#pragma unroll
      for (int q = 0; q < kTile; ++q) {
        const int k = first + q;
        const bool there = k < steps;
        const T tau = there ? fixed.taus[k] : T(R(0));
        const T inverse = there ? fixed.inverses[k] : T(R(0));
        T of = T(R(0));
        if (i == k) of = tau;
        if (i < k && there) of = product(product(-tau, inverse), sums[q]);
        if (lane < kWidth) own[k] = of;
        const T by = product(of, conj(inverse));
        // Beyond the last column there is something else, which nobody wants.
#pragma unroll
        for (int c = 0; c < kWidth; c += V) {
          if (c + V <= q + 1) continue;
          const auto z = *reinterpret_cast<const Vector<T>*>(&fixed.y[k][first + c]);
#pragma unroll
          for (int l = 0; l < V; ++l) sums[c + l] = add_mul(sums[c + l], by, z.v[l]);
        }
      }
#pragma unroll
      for (int c = kTile; c < kWidth; ++c) sums[c - kTile] = sums[c];
    }
  }

  // T of a panel whose V is staged, and of whose taus `count` are given.
  __device__ __forceinline__ void make_t_of_staged(int panel, const T* taus, int count) {
    const int begin = panel * kWidth;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) a[s][j] = T(R(0));
    }
    for_slots(begin, [&](int s) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) a[s][j] = v[row(s) * kStride + column(j)];
    });
    multiply_adjoint(begin);
    for (int e = thread; e < kWidth * kWidth; e += kThreads) {
      const int l = e / kWidth, c = e % kWidth;
      fixed.y[l][c] = fixed.w[0][l][c % kGroups * kColumns + c / kGroups];
    }
    if (thread < kWidth) {
      fixed.inverses[thread] = T(R(1));
      fixed.taus[thread] = thread < count ? taus[thread] : T(R(0));
    }
    sync();
    make_t(panel, count);
    sync();
  }

 private:
  static __device__ __forceinline__ Vector<T> vector(const T (&from)[kColumns], int c) {
    Vector<T> of;
#pragma unroll
    for (int z = 0; z < V; ++z) of.v[z] = from[c + z];
    return of;
  }
  // 2^e, a normal number; and the exponent of another number that is not negative.
  static __device__ __forceinline__ R power(int e) { return power_of_two(R(0), e + kExponentBias); }
  static __device__ __forceinline__ int exponent(float a) {
    return (__float_as_int(a) >> 23) - kExponentBias;
  }
  static __device__ __forceinline__ int exponent(double a) {
    return (__double2hiint(a) >> 20) - kExponentBias;
  }
  static __device__ __forceinline__ R largest_part(T a) {
    if constexpr (kIsComplex<T>) {
      return fmax(absolute(a.re), absolute(a.im));
    } else {
      return absolute(a);
    }
  }
  static __device__ __forceinline__ bool is_real(T a) {
    if constexpr (kIsComplex<T>) {
      return a.im == R(0);
    } else {
      return true;
    }
  }

  template <class N>
  static __device__ __forceinline__ void go_round(N (&of)[kColumns]) {
    const N first = of[0];
#pragma unroll
    for (int j = 1; j < kColumns; ++j) of[j - 1] = of[j];
    of[kColumns - 1] = first;
  }

  // Step k of a panel, whose pivot is in row `pivot`; group g has its column.
  __device__ __forceinline__ Reflection<T> step(int pivot, int k, int g,
                                                const int (&columns)[kColumns]) {
    Reflection<T> h;
    T x[kSlots], sums[kColumns], tops[kColumns];
#pragma unroll 1
    for (int raises = 0;; ++raises) {
      auto& tails = fixed.tails[turn];
      auto& top = fixed.tops[turn];
      turn ^= 1;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] = T(R(0));
      const auto add = [&](int s) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums[c] = add_conj_mul(sums[c], x[s], a[s][c]);
      };
      for_slots(
          pivot,
          [&](int s) {
            x[s] = shuffle(a[s][0], lane_of(g));
            if (row(s) == pivot) {
#pragma unroll
              for (int c = 0; c < kColumns; c += V) {
                *reinterpret_cast<Vector<T>*>(&top[group * kColumns + c]) = vector(a[s], c);
              }
            }
            if (row(s) <= pivot) x[s] = T(R(0));
            add(s);
          },
          [&](int s) {
            x[s] = shuffle(a[s][0], lane_of(g));
            add(s);
          });
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        for_row_masks([&](int mask) { sums[c] = sums[c] + shuffle_xor(sums[c], mask); });
      }
      if (row_lane == 0) {
#pragma unroll
        for (int c = 0; c < kColumns; c += V) {
          *reinterpret_cast<Vector<T>*>(&tails[warp][group * kColumns + c]) = vector(sums, c);
        }
      }
      sync();
      const int own = g * kColumns;
      R tail = real(tails[0][own]);
#pragma unroll
      for (int w = 1; w < kWarps; ++w) tail += real(tails[w][own]);
      const T alpha = top[own];
      bool has_tail = true;
      // Votes of lanes that agree tell the compiler that they do.
      if (__any_sync(kFullWarp, !(tail >= kSmallestSquares<R>))) {
        R sum = R(0);
        for_slots(pivot, [&](int s) { sum += magnitude(x[s]); });
        has_tail = pivot + 1 < m && any(sum != R(0));
        const bool is_small = add_square(tail, alpha) < kSmallestSquares<R>;
        if (__any_sync(kFullWarp, is_small && (has_tail || !is_real(alpha))) &&
            raises < kMostRaises) {
          if (group == g) {
#pragma unroll
            for (int s = 0; s < kSlots; ++s) {
              a[s][0] = scale(a[s][0], power(kRaise));
            }
            exponents[0] -= kRaise;
          }
          continue;
        }
      }
      const bool is_identity = !has_tail && is_real(alpha);
      h = is_identity ? Reflection<T>::identity(alpha) : Reflection<T>::of(alpha, tail);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        sums[c] = tails[0][group * kColumns + c];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) sums[c] = sums[c] + tails[w][group * kColumns + c];
        tops[c] = top[group * kColumns + c];
      }
      break;
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      sums[c] = add_conj_mul(sums[c], h.first, tops[c]);
      if (warp == 0 && row_lane == 0 && columns[c] < k) fixed.y[columns[c]][k] = conj(sums[c]);
      if (columns[c] <= k) sums[c] = T(R(0));
      sums[c] = product(h.factor, sums[c]);
    }
    const auto subtract = [&](int s, T u) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) a[s][c] = sub_mul(a[s][c], u, sums[c]);
    };
    for_slots(
        pivot, [&](int s) { subtract(s, row(s) == pivot ? h.first : x[s]); },
        [&](int s) { subtract(s, x[s]); });
    return h;
  }

  // Sums over the lanes' rows: of kCount values, each lane keeps 1 / kRowLanes, from `first` on.
  static __device__ __forceinline__ int add_up(T (&sums)[kSums], int lane) {
    int first = 0;
    int count = kSums / 2;
#pragma unroll
    for (int mask = 16; mask > kLastMask && mask >= kGroups; mask /= 2) {
      const bool upper = lane & mask;
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i) {
        if (i >= count) continue;
        const T keep = upper ? sums[i + count] : sums[i];
        const T pass = upper ? sums[i] : sums[i + count];
        sums[i] = keep + shuffle_xor(pass, mask);
      }
      first += upper ? count : 0;
      count /= 2;
    }
    // Fewer sums than lanes: several have the same one.
#pragma unroll
    for (int mask = kLastMask; mask >= kGroups; mask /= 2) {
      sums[0] = sums[0] + shuffle_xor(sums[0], mask);
    }
    return first;
  }

  // W = V^H C, in w[0].
  __device__ __forceinline__ void multiply_adjoint(int begin) {
    if constexpr (kTensor) {
      // Fragments: W's have 8 reflections and 8 columns, V^H's 8 reflections and 8 rows, C's 8 rows
      // and 8 columns.
      T sums[kWidth / 8][kColumns][2] = {};
      for_slots(begin, [&](int s) {
        if (s % 2 != 0) return;
        const T* at = v + row(s) * kStride + group;
#pragma unroll
        for (int l = 0; l < kWidth; l += 16) {
          const Pair<T> of[2] = {{at[l], at[l + kStride]}, {at[l + 8], at[l + 8 + kStride]}};
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            T c[2][2] = {{sums[l / 8][j][0], sums[l / 8][j][1]},
                         {sums[l / 8 + 1][j][0], sums[l / 8 + 1][j][1]}};
            add_product(c, of, {a[s][j], a[s + 1][j]});
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              sums[l / 8][j][h] = c[0][h];
              sums[l / 8 + 1][j][h] = c[1][h];
            }
          }
        }
      });
#pragma unroll
      for (int l = 0; l < kWidth; l += 8) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            fixed.w[warp][l + group][(2 * row_lane + h) * kColumns + j] = sums[l / 8][j][h];
          }
        }
      }
    } else {
      multiply_adjoint_by_lanes(begin);
    }
    sync();
    if constexpr (kWarps > 1) {
      T* w = &fixed.w[0][0][0];
      for (int e = thread * V; e < kWidth * kWidth; e += kThreads * V) {
        Vector<T> sum = *reinterpret_cast<Vector<T>*>(w + e);
#pragma unroll
        for (int other = 1; other < kWarps; ++other) {
          const auto of = *reinterpret_cast<Vector<T>*>(w + other * kWidth * kWidth + e);
#pragma unroll
          for (int z = 0; z < V; ++z) sum.v[z] = sum.v[z] + of.v[z];
        }
        *reinterpret_cast<Vector<T>*>(w + e) = sum;
      }
      sync();
    }
  }
  __device__ __forceinline__ void multiply_adjoint_by_lanes(int begin) {
#pragma unroll 1
    for (int l = 0; l < kWidth; l += kPass) {
      T sums[kSums];
#pragma unroll
      for (int f = 0; f < kSums; ++f) sums[f] = T(R(0));
      for_slots(begin, [&](int s) {
        const T* at = v + row(s) * kStride + l;
#pragma unroll
        for (int q = 0; q < kPass; q += V) {
          const auto of = *reinterpret_cast<const Vector<T>*>(at + q);
#pragma unroll
          for (int z = 0; z < V; ++z) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
              T& sum = sums[(q + z) * kColumns + c];
              sum = add_conj_mul(sum, of.v[z], a[s][c]);
            }
          }
        }
      });
      const int first = add_up(sums, lane);
#pragma unroll
      for (int f = 0; f < kLaneSums; ++f) {
        const int at = first + f;
        fixed.w[warp][l + at / kColumns][group * kColumns + at % kColumns] = sums[f];
      }
    }
  }

  // Y = T W or T^H W.
  __device__ __forceinline__ void make_y(const T* t, bool adjoint) {
    const int down = adjoint ? 1 : kStride, right = adjoint ? kStride : 1;
    for (int task = thread; task < kWidth / kTile * kGroups; task += kThreads) {
      const int l = task / kGroups * kTile, c = task % kGroups * kColumns;
      T sums[kTile][kColumns];
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sums[i][j] = T(R(0));
      }
      // T is a triangle.
      const int first = adjoint ? 0 : l, end = adjoint ? l + kTile : kWidth;
#pragma unroll 4
      for (int p = first; p < end; ++p) {
        T w[kColumns];
#pragma unroll
        for (int j = 0; j < kColumns; j += V) {
          const auto of = *reinterpret_cast<const Vector<T>*>(&fixed.w[0][p][c + j]);
#pragma unroll
          for (int z = 0; z < V; ++z) w[j + z] = of.v[z];
        }
#pragma unroll
        for (int i = 0; i < kTile; ++i) {
          const T by = conj_if(adjoint, t[(l + i) * down + p * right]);
#pragma unroll
          for (int j = 0; j < kColumns; ++j) sums[i][j] = add_mul(sums[i][j], by, w[j]);
        }
      }
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; j += V) {
          *reinterpret_cast<Vector<T>*>(&fixed.y[l + i][c + j]) = vector(sums[i], j);
        }
      }
    }
  }

  // C -= V Y.
  __device__ __forceinline__ void subtract_product(int begin) {
    if constexpr (kTensor) {  // transposed, as C's rows are a lane's neighbours then
#pragma unroll 2
      for (int l = 0; l < kWidth; l += 8) {
        Pair<T> minus_y[2];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const T* at = &fixed.y[l + 2 * row_lane][group * kColumns + j];
          minus_y[j] = {-at[0], -at[kWidth]};
        }
        for_slots(begin, [&](int s) {
          if (s % 2 != 0) return;
          // Row `group` of the eight, where this lane has two others.
          const T* at = v + (row(s) - 2 * row_lane + group) * kStride + l + 2 * row_lane;
          const auto of = *reinterpret_cast<const Pair<T>*>(at);
          T c[2][2] = {{a[s][0], a[s + 1][0]}, {a[s][1], a[s + 1][1]}};
          add_product(c, minus_y, of);
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            a[s][j] = c[j][0];
            a[s + 1][j] = c[j][1];
          }
        });
      }
    } else {
      subtract_product_by_lanes(begin);
    }
  }
  __device__ __forceinline__ void subtract_product_by_lanes(int begin) {
#pragma unroll 1
    for (int l = 0; l < kWidth; l += V) {
      T y[V][kColumns];
#pragma unroll
      for (int z = 0; z < V; ++z) {
#pragma unroll
        for (int j = 0; j < kColumns; j += V) {
          const auto of =
              *reinterpret_cast<const Vector<T>*>(&fixed.y[l + z][group * kColumns + j]);
#pragma unroll
          for (int q = 0; q < V; ++q) y[z][j + q] = of.v[q];
        }
      }
      for_slots(begin, [&](int s) {
        const auto of = *reinterpret_cast<const Vector<T>*>(v + row(s) * kStride + l);
#pragma unroll
        for (int z = 0; z < V; ++z) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) a[s][c] = sub_mul(a[s][c], of.v[z], y[z][c]);
        }
      });
    }
  }
};

template <class T, int kWarps, int kSlots, int kWidth, int kColumns, int kCap>
__global__ void __launch_bounds__(32 * kWarps, kCap) qr_block_kernel(const QrProblem p) {
  using Qr = BlockQr<T, kWarps, kSlots, kWidth, kColumns>;
  const int64_t entry = blockIdx.x;
  if (skips(p, entry)) return;
  const int m = p.m, n = p.n, k = p.reflections();
  const int q_columns = p.q_columns(), r_rows = p.r_rows();
  const bool is_raw = p.mode == QrProblem::kRaw;
  T* r = p.r.at<T>(entry, r_rows, n);
  T* q = p.has_q() ? p.q.at<T>(entry, m, q_columns) : nullptr;
  // V is kept where Q will be, or below R.
  T* const home = q != nullptr ? q : r;
  const int ld = q != nullptr ? q_columns : n, home_rows = q != nullptr ? m : r_rows;
  const int reflected = ceil_div(k, kWidth), of_a = ceil_div(n, kWidth);
  const int panels = of_a + ceil_div(q_columns, kWidth);

  const bool has_place = Qr::has_place(p);
  Qr qr(m, has_place ? 1 : reflected);
  T* const all = qr.v;
  const auto v_of = [&](int panel) {
    return has_place ? all : all + panel * round_up(m, Qr::kChunkRows) * Qr::kStride;
  };
  int staged = -1;
#pragma unroll 1
  for (int job = 0; job < panels; ++job) {  // of A from the left, then of Q from the right
    const bool factors = job < of_a;
    const int own = factors ? job : panels - 1 - job;
    const int begin = own * kWidth;
    qr.load(factors ? matrix_at<const T>(p.a, entry, m, n) : nullptr, n, begin);
    if (factors) qr.scale_columns();
    const int before = factors ? min(own, reflected) : min(own + 1, reflected);
#pragma unroll 1
    for (int i = 0; i < before; ++i) {
      const int panel = factors ? i : before - 1 - i;
      Qr::sync();
      qr.v = v_of(panel);
      if (staged != panel && has_place) {
        qr.stage(home, ld, panel * kWidth, min(kWidth, k - panel * kWidth));
        staged = panel;
        Qr::sync();
      }
      qr.apply(panel, factors, !factors && panel == own);
    }
    Qr::sync();
    const int steps = factors ? max(min(kWidth, k - begin), 0) : 0;
    const bool keeps = steps > 0 && (q != nullptr || n > kWidth);
    if (factors) {
      qr.factor(begin, steps);
      qr.store(
          r, n, begin, [](int) { return 0; },
          [&](int c) { return c < k ? min(c + 1, r_rows) : r_rows; });
    }
    if (keeps) {
      qr.v = v_of(own);
      qr.keep(begin, steps);
      staged = own;
    }
    if ((keeps && has_place) || is_raw || !factors) {
      qr.store(
          home, ld, begin, [&](int c) { return !factors ? 0
                                               : c < k  ? c + 1
                                                        : home_rows; },
          [&](int) { return home_rows; });
    }
    if (!factors) continue;
    Qr::sync();
    if (is_raw && qr.thread < steps) {
      p.taus.at<T>(entry, k)[begin + qr.thread] = qr.fixed.taus[qr.thread];
    }
    if (keeps) qr.make_t(own, steps);
  }
  Qr::sync();
#pragma unroll 1
  for (int i = qr.warp; !is_raw && i < r_rows; i += kWarps) {
#pragma unroll 2
    for (int j = qr.lane; j < min(i, n); j += 32) r[i * n + j] = T(Real<T>(0));
  }
  bool failed = false;  // from memory: while panels are factored, registers are scarce
#pragma unroll 1
  for (int i = qr.thread; i < k; i += Qr::kThreads) failed |= !is_finite(r[i * n + i]);
  if (Qr::any(failed)) {
    fill_failed<Qr::kThreads>(r, r_rows, n, !is_raw);
    if (q != nullptr) fill_failed<Qr::kThreads>(q, m, q_columns, false);
    if (is_raw) fill_failed<Qr::kThreads>(p.taus.at<T>(entry, k), 1, k, false);
  }
}

// The first columns of Q, or products with it.
template <class T, class P, int kWarps, int kSlots, int kWidth, int kColumns, int kCap>
__global__ void __launch_bounds__(32 * kWarps, kCap) qr_product_block_kernel(const P p) {
  using Qr = BlockQr<T, kWarps, kSlots, kWidth, kColumns>;
  constexpr bool kForms = std::is_same_v<P, HouseholderProductProblem>;
  const int64_t entry = blockIdx.x;
  if (skips(p, entry)) return;
  const int m = p.m, n = p.n, k = static_cast<int>(p.k);
  const T* a = matrix_at<const T>(p.a, entry, m, n);
  const T* taus = matrix_at<const T>(p.taus, entry, k);
  const int panels = ceil_div(k, kWidth);
  const auto [from, to, columns, adjoint] = product_of<T>(p, entry);
  Qr qr(m);
  int staged = -1;
  const auto stage = [&](int panel) {
    Qr::sync();
    if (staged != panel) {
      qr.stage(a, n, panel * kWidth, min(kWidth, k - panel * kWidth));
      staged = panel;
      Qr::sync();
    }
  };
  // Before column 0 come the panels of V, of which T is made.
#pragma unroll 1
  for (int begin = -panels * kWidth; begin < columns; begin += kWidth) {
    if (begin < 0) {
      const int panel = begin / kWidth + panels;
      stage(panel);
      qr.make_t_of_staged(panel, taus + panel * kWidth, min(kWidth, k - panel * kWidth));
      continue;
    }
    qr.load(from, columns, begin);
    const int applied = kForms ? min(begin / kWidth + 1, panels) : panels;
#pragma unroll 1
    for (int i = 0; i < applied; ++i) {
      const int panel = adjoint ? i : applied - 1 - i;
      stage(panel);
      qr.apply(panel, adjoint, kForms && panel * kWidth == begin);
    }
    qr.store(to, columns, begin);
  }
}

}  // namespace jax_batched::cuda
