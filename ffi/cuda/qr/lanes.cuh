// QR of matrices of up to 64 rows, in registers: 4 to 32 lanes of a warp work on one, with a column
// each or several.
//
// Step k: the lane of column k writes it to shared memory. All lanes read it, x, and need nothing
// else of one another but x's own sum of squares:
//   w_c = phi u^H a_c,  a_c -= w_c u.
// Register r of a column is row k + r: what a step leaves moves up by one row, at no cost, and so a
// loop can go over kSteps steps. Row k of R is in register 0 then and leaves for global memory at
// once. In a loop the registers are as many, and from one to the next they are kSteps rows fewer.
//
// The u stay in shared memory. Q = H_0 H_1 ... is formed from the last step to the first one, in
// the same registers, where rows move down: row k enters as that of the identity.
#pragma once

#include "ffi/cuda/layout/view.cuh"
#include "ffi/cuda/qr/reflection.cuh"
#include "ffi/problems/qr.h"

namespace jax_batched::cuda {

// What lanes find out together about a column x of `rows` numbers with hardly anything below the
// first one.
template <class R>
struct CloserLook {
  bool is_identity;  // nothing is to be eliminated
  R by;              // the power of two by which x, if it is small, was multiplied, or 1
  R tail;            // then: the sum of the squares below the first number
};
template <int kLanes, class T>
__device__ __noinline__ CloserLook<Real<T>> look_closer(unsigned shared_x, int rows, bool small) {
  using R = Real<T>;
  T* const x = static_cast<T*>(__cvta_shared_to_generic(shared_x));
  const int first = threadIdx.x % kLanes;
  int nonzero = 0;
  R largest = R(0);
  __syncwarp();  // other lanes have read x
#pragma unroll 1
  for (int r = first; r < rows; r += kLanes) {
    R size = fabs(real(x[r]));
    nonzero |= r > 0 && !is_zero(x[r]);
    if constexpr (kIsComplex<T>) {
      nonzero |= r == 0 && x[r].im != R(0);
      size = fmax(size, fabs(x[r].im));
    }
    largest = fmax(largest, size);
  }
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    nonzero |= __shfl_xor_sync(kFullWarp, nonzero, mask);
    largest = fmax(largest, shuffle_xor(largest, mask));
  }
  R by = R(1), tail = R(0);
  if (small && nonzero != 0) {
    ColumnSize<R> size;
    size.take(largest);
    by = size.factor();
#pragma unroll 1
    for (int r = first; r < rows; r += kLanes) {
      x[r] = scale(x[r], by);
      if (r > 0) tail = add_square(tail, x[r]);
    }
  }
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) tail += shuffle_xor(tail, mask);
  __syncwarp();
  return {nonzero == 0, by, tail};
}

template <int kLanes, class T>
__device__ __noinline__ void fill_zeros(T* to, int count) {
#pragma unroll 1
  for (int e = threadIdx.x % kLanes; e < count; e += kLanes) to[e] = T(Real<T>(0));
}

// threadIdx.x, for which the compiler keeps no register meanwhile.
__device__ __forceinline__ unsigned thread_again() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// kColumns: of a lane; lane l has columns l, l + kLanes, ... kRows: of the matrix, at most. x is
// read once a step where no more than kHeld rows are left, else twice in parts. kKeeps: the u are
// kept, for Q or the raw result.
template <class T, int kLanes, int kColumns, int kRows, int kSteps, int kHeld, bool kKeeps>
struct LanesQr {
  using R = Real<T>;
  static constexpr int V = kVector<T>;
  static_assert(kLanes % kSteps == 0 && kRows % 4 == 0 && kSteps % V == 0);
  static constexpr int kMatrices = 32 / kLanes;  // of a warp
  static constexpr int kWidth = kLanes * kColumns;
  static constexpr int kReflections = kRows < kWidth ? kRows : kWidth;
  static constexpr int kLoops = ceil_div(kReflections, kSteps);

  // Rows of the columns of a loop, and where its first one begins.
  static __host__ __device__ constexpr int rows_of(int loop) { return kRows - loop * kSteps; }
  static __host__ __device__ constexpr int begin_of(int loop) {
    return kSteps * (loop * kRows - kSteps * (loop * (loop - 1) / 2));
  }

  struct Head {
    T first, factor;  // u_0 and phi
  };
  struct Work {
    alignas(16) T columns[kKeeps ? begin_of(kLoops) : 2 * kRows];
    Head heads[kKeeps ? kReflections : 1];
    R back[kWidth];  // undoes a column's scaling, if some column of the warp is scaled
    bool failed;
  };
  // What a warp's matrices read at the same time lies in different banks.
  struct Matrix : Work {
    static constexpr int kOver = sizeof(Work) % 128;
    static constexpr int kApart = kMatrices == 1 ? kOver + 16 : 128 / kMatrices;
    unsigned char padding[(127 + kApart - kOver) % 128 + 1];
  };
  struct Shared {
    Matrix matrices[kMatrices];
  };

  Shared& all;
  Matrix& mine;  // of this lane
  int first;     // column of the matrix
  int m, n;
  T a[kColumns][kRows];
  bool is_scaled = false;
  R check = R(0);  // as long as R's diagonal is finite
  T corner = T(R(1));

  __device__ __forceinline__ LanesQr(Shared& shared, int m, int n)
      : all(shared),
        mine(shared.matrices[kMatrices == 1 ? 0 : threadIdx.x / kLanes]),
        first(threadIdx.x % kLanes),
        m(m),
        n(n) {}
  __device__ __forceinline__ int column(int c) const { return first + kLanes * c; }

  __device__ __forceinline__ void load(const T* from) {
    if (m == kRows && n == kWidth) {
      load_rows<true>(from + first, kRows, kWidth);
    } else {
      load_rows<false>(from + first, m, n);
    }
    scale_columns();
  }

  // R, save for row m - 1 if that is in it. Stores only columns before `end`.
  __device__ __forceinline__ void factorize(T* r, int end) { forward<0>(steps(), r + first, end); }

  // Row m - 1: nothing is below it, and a real alpha stays what it is.
  __device__ __forceinline__ void last_row(T* r, int end) {
    r += first;
    const int k = m - 1;
    T alpha = T(R(0));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const T of = shuffle(a[c][0], k % kLanes, kLanes);
      if (k / kLanes == c) alpha = of;
    }
    auto h = Reflection<T>::identity(alpha);
    if constexpr (kIsComplex<T>) {
      if (alpha.im != R(0)) {
        ColumnSize<R> size;
        size.take(alpha);
        const R by = add_square(R(0), alpha) >= kSmallestSquares<R> ? R(1) : size.factor();
        h = Reflection<T>::of(scale(alpha, by), R(0));
        h.beta *= inverse_power(by);
        corner = corner - Reflection<T>::tau(h.first, h.factor);
      }
    }
    if (kKeeps && first == 0) mine.heads[k] = {h.first, h.factor};
    T row[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const T w = product(h.factor, product(conj(h.first), a[c][0]));
      row[c] = sub_mul(a[c][0], w, h.first);
      row[c] = column(c) < k ? T(R(0)) : column(c) == k ? T(h.beta) : row[c];
    }
    scale_row(row);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (column(c) == k) check = multiply_add(real(row[c]), R(0), check);
      if (column(c) < end) r[kLanes * c] = row[c];
    }
  }

  // Before a barrier.
  __device__ __forceinline__ void find_failed() {
    const unsigned votes = __ballot_sync(kFullWarp, !(check == R(0)));
    const bool failed = (votes >> (threadIdx.x / kLanes * kLanes) & kAll) != 0;
    if (first == 0) mine.failed = failed;
  }
  __device__ __forceinline__ bool failed() const { return mine.failed; }

  // So many columns of Q. Where these are more than the steps, H is I in between, and the last row
  // begins as `corner`.
  __device__ __forceinline__ void form(int columns) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) a[c][r] = T(R(0));
      if (columns > steps() && column(c) == columns - 1) a[c][0] = corner;
    }
#pragma unroll 1
    for (int k = steps(); k < columns - 1; ++k) {
      T* const x = kept_column(k);
#pragma unroll 1
      for (int r = first; r < rows_of(k / kSteps); r += kLanes) x[r] = T(R(0));
      if (first == 0) mine.heads[k] = {T(R(1)), T(R(0))};
    }
    __syncwarp();
    backward<0>(max(steps(), columns - 1));
  }
  __device__ __forceinline__ void store(T* q, int columns) const {
    if (m == kRows && columns == kWidth) {
      store_rows<true>(q + first, kRows, kWidth);
    } else {
      store_rows<false>(q + first, m, columns);
    }
  }

  // The v and the taus of the raw result.
  __device__ __forceinline__ void store_raw(T* r, T* taus) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int k = column(c);
      if (k >= min(m, n)) continue;
      const Head head = mine.heads[k];
      taus[k] = Reflection<T>::tau(head.first, head.factor);
      const T by = Reflection<T>::inverse(head.first);
      const T* x = kept_column(k) - k;
#pragma unroll 1
      for (int i = 1; i < m; ++i) {
        if (i > k) r[i * n + k] = product(x[i], by);
      }
    }
  }

 private:
  // Of number `at` of this lane's columns, from what takes no register meanwhile.
  __device__ __forceinline__ unsigned address(int at) const {
    static_assert(offsetof(Work, columns) == 0);
    const unsigned matrix = kMatrices == 1 ? 0 : thread_again() / kLanes;
    return static_cast<unsigned>(__cvta_generic_to_shared(&all)) +
           static_cast<unsigned>(matrix * sizeof(Matrix) + at * sizeof(T));
  }

  // Of those with something below the diagonal.
  __device__ __forceinline__ int steps() const { return min(m - 1, n); }

  __device__ __forceinline__ T* kept_column(int k) const {
    const int loop = k / kSteps;
    return mine.columns + begin_of(loop) + k % kSteps * rows_of(loop);
  }

  static constexpr unsigned kAll = kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1;

  // From row 0 of the first column; kExact: of constant sizes.
  template <bool kExact>
  __device__ __forceinline__ void load_rows(const T* from, int rows, int columns) {
    int rows_of[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) rows_of[c] = kExact || column(c) < columns ? rows : 0;
    int row = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const T* const at = from + row;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        a[c][r] = r < rows_of[c] ? at[kLanes * c] : T(R(0));
      }
      go_on<kExact>(row, columns);
    }
  }
  template <bool kExact>
  __device__ __forceinline__ void store_rows(T* to, int rows, int columns) const {
    int rows_of[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) rows_of[c] = kExact || column(c) < columns ? rows : 0;
    int row = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      T* const at = to + row;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (r < rows_of[c]) at[kLanes * c] = a[c][r];
      }
      go_on<kExact>(row, columns);
    }
  }

  // In order: addresses of all rows at a time would take registers.
  template <bool kExact>
  static __device__ __forceinline__ void go_on(int& row, int columns) {
    row += columns;
    if (!kExact) asm volatile("" : "+r"(row));
  }

  __device__ __forceinline__ void scale_columns() {
    ColumnSize<R> sizes[kColumns];
    bool usual = true;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) sizes[c].take(a[c][r]);
      usual &= sizes[c].is_usual();
    }
    is_scaled = !__all_sync(kFullWarp, usual);
    if (!is_scaled) return;
    R by[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      by[c] = sizes[c].is_usual() ? R(1) : sizes[c].factor();
      mine.back[column(c)] = inverse_power(by[c]);
    }
    // Rare: rows go round, so that it is little code.
#pragma unroll 1
    for (int begin = 0; begin < kRows; begin += 4) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        T scaled[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) scaled[r] = scale_nonzero(a[c][r], by[c]);
#pragma unroll
        for (int r = 4; r < kRows; ++r) a[c][r - 4] = a[c][r];
#pragma unroll
        for (int r = 0; r < 4; ++r) a[c][kRows - 4 + r] = scaled[r];
      }
    }
  }

  // A column x in shared memory, in registers as a whole or kChunk rows at a time.
  template <int kLive>
  struct Column {
    static constexpr bool kHolds = kLive <= kHeld;
    static constexpr int kChunk = kHolds ? kLive : 4 * V;
    static constexpr int kVectors = kChunk / V, kChunks = ceil_div(kLive, kChunk);
    using Chunk = Vector<T>[kVectors];

    const T* columns;
    int begin;
    Chunk held;

    // The whole one; and before a second pass, that it reads again: the compiler must not know that
    // it reads the same.
    __device__ __forceinline__ void read() {
      if (kHolds) read(held, 0);
    }
    __device__ __forceinline__ void forget() {
      if (!kHolds) asm volatile("" : "+r"(begin));
    }
    __device__ __forceinline__ T first() const { return kHolds ? held[0].v[0] : columns[begin]; }
    // Calls f(r, x_r) for r > 0, upwards or downwards.
    template <bool kDown, class F>
    __device__ __forceinline__ void for_tail(const F& f) {
      if (kHolds) return for_chunk<kDown>(held, 0, f);
      Chunk next;
      read(next, kDown ? kChunks - 1 : 0);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int chunk = kDown ? kChunks - 1 - i : i;
        Chunk now;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) now[v] = next[v];
        if (i + 1 < kChunks) read(next, kDown ? chunk - 1 : chunk + 1);
        __syncwarp();  // keeps the compiler from reading more than that ahead
        for_chunk<kDown>(now, chunk, f);
      }
    }

   private:
    __device__ __forceinline__ void read(Chunk& to, int chunk) const {
      const auto* from = reinterpret_cast<const Vector<T>*>(columns + begin) + chunk * kVectors;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (chunk * kChunk + v * V < kLive) to[v] = from[v];
      }
    }
    template <bool kDown, class F>
    static __device__ __forceinline__ void for_chunk(const Chunk& x, int chunk, const F& f) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const int z = kDown ? kChunk - 1 - i : i, r = chunk * kChunk + z;
        if (r > 0 && r < kLive) f(r, x[z / V].v[z % V]);
      }
    }
  };

  // sums[c] = sum of conj(x_r) a(c, r), r > 0, for columns from slot kOwn on. Two sums of one
  // column do not wait for one another.
  template <int kOwn, int kLive, class Entry>
  static __device__ __forceinline__ void multiply(Column<kLive>& x, T (&sums)[kColumns],
                                                  const Entry& entry) {
    constexpr int kParts = kColumns - kOwn == 1 ? 2 : 1;
    T parts[kColumns][kParts];
#pragma unroll
    for (int c = kOwn; c < kColumns; ++c) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) parts[c][part] = T(R(0));
    }
    x.template for_tail<false>([&](int r, T of) {
#pragma unroll
      for (int c = kOwn; c < kColumns; ++c) {
        T& part = parts[c][r % kParts];
        part = add_conj_mul(part, of, entry(c, r));
      }
    });
#pragma unroll
    for (int c = kOwn; c < kColumns; ++c) {
      sums[c] = parts[c][0];
      if constexpr (kParts == 2) sums[c] = sums[c] + parts[c][1];
    }
  }

  template <int kLoop>
  __device__ __forceinline__ void forward(int steps, T* r, int end) {
    if constexpr (kLoop < kLoops) {
      constexpr int kFrom = kLoop * kSteps;
      const int to = min(steps, kFrom + kSteps);
#pragma unroll 1
      for (int k = kFrom; k < to; ++k) {
        step<kLoop>(k, r, end);
        r += n;
      }
      if (to == kFrom + kSteps) forward<kLoop + 1>(steps, r, end);
    }
  }

  template <int kLoop>
  static __device__ __forceinline__ int place(int k) {
    return kKeeps ? begin_of(kLoop) + (k - kLoop * kSteps) * rows_of(kLoop) : k % 2 * kRows;
  }

  template <int kLoop>
  __device__ __forceinline__ void step(int k, T* r, int end) {
    constexpr int kLive = rows_of(kLoop), kOwn = kLoop * kSteps / kLanes;
    const int owner = k - kOwn * kLanes;
    const bool is_owner = first == owner;
    Column<kLive> x;
    x.columns = mine.columns;
    x.begin = place<kLoop>(k);
    if (is_owner) {
      auto* to = reinterpret_cast<Vector<T>*>(mine.columns + x.begin);
#pragma unroll
      for (int v = 0; v < kLive / V; ++v) {
        Vector<T> of;
#pragma unroll
        for (int z = 0; z < V; ++z) of.v[z] = a[kOwn][v * V + z];
        to[v] = of;
      }
    }
    __syncwarp();
    x.read();
    T w[kColumns];

    multiply<kOwn>(x, w, [&](int c, int r) { return a[c][r]; });
    R tail = shuffle(real(w[kOwn]), owner, kLanes);
    T alpha = x.first();
    auto h = Reflection<T>::of(alpha, tail);
    if (__any_sync(kFullWarp, !(tail >= kSmallestSquares<R>))) {
      const bool small = add_square(tail, alpha) < kSmallestSquares<R>;
      const auto look = look_closer<kLanes, T>(address(x.begin), m - k, small);
      x.forget();
      x.read();
      multiply<kOwn>(x, w, [&](int c, int r) { return a[c][r]; });
      tail = look.by == R(1) ? tail : look.tail;
      alpha = x.first();
      h = look.is_identity ? Reflection<T>::identity(alpha) : Reflection<T>::of(alpha, tail);
      h.beta *= inverse_power(look.by);
    }
    x.forget();
    if (kKeeps && is_owner) mine.heads[k] = {h.first, h.factor};

    T row[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      row[c] = T(R(0));
      if (c < kOwn) continue;
      w[c] = product(h.factor, add_conj_mul(w[c], h.first, a[c][0]));
      row[c] = sub_mul(a[c][0], w[c], h.first);
      if (c == kOwn) row[c] = first < owner ? T(R(0)) : is_owner ? T(h.beta) : row[c];
    }
    scale_row(row);
    if (is_owner) check = multiply_add(real(row[kOwn]), R(0), check);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (column(c) < end) r[kLanes * c] = row[c];
    }
    x.template for_tail<false>([&](int r, T of) {
#pragma unroll
      for (int c = kOwn; c < kColumns; ++c) a[c][r - 1] = sub_mul(a[c][r], w[c], of);
    });
#pragma unroll
    for (int c = kOwn; c < kColumns; ++c) a[c][kLive - 1] = T(R(0));
  }

  // A row of R as it is of unscaled columns.
  __device__ __forceinline__ void scale_row(T (&row)[kColumns]) const {
    if (!is_scaled) return;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) row[c] = scale(row[c], mine.back[column(c)]);
  }

  template <int kLoop>
  __device__ __forceinline__ void backward(int steps) {
    if constexpr (kLoop < kLoops) {
      constexpr int kFrom = kLoop * kSteps;
      if (steps <= kFrom) return;
      backward<kLoop + 1>(steps);
#pragma unroll 1
      for (int k = min(steps, kFrom + kSteps) - 1; k >= kFrom; --k) step_back<kLoop>(k);
    }
  }

  template <int kLoop>
  __device__ __forceinline__ void step_back(int k) {
    constexpr int kLive = rows_of(kLoop), kOwn = kLoop * kSteps / kLanes;
    const bool is_owner = first == k - kOwn * kLanes;
    const Head head = mine.heads[k];
    Column<kLive> x;
    x.columns = mine.columns;
    x.begin = place<kLoop>(k);
    x.read();
    T w[kColumns];
    multiply<kOwn>(x, w, [&](int c, int r) { return a[c][r - 1]; });
    x.forget();
#pragma unroll
    for (int c = kOwn; c < kColumns; ++c) {
      if (c == kOwn && is_owner) w[c] = w[c] + conj(head.first);
      w[c] = product(conj(head.factor), w[c]);
    }
    // Row r needs row r - 1 as it was.
    x.template for_tail<true>([&](int r, T of) {
#pragma unroll
      for (int c = kOwn; c < kColumns; ++c) a[c][r] = sub_mul(a[c][r - 1], w[c], of);
    });
#pragma unroll
    for (int c = kOwn; c < kColumns; ++c) {
      a[c][0] = sub_mul(T(R(c == kOwn && is_owner)), w[c], head.first);
    }
  }
};

// The matrix of a lane. It is found out anew wherever it is asked for: in between, registers are
// for other things. Lanes beyond the batch repeat its last matrix, and store nothing.
template <int kLanes>
struct QrLanesMatrix {
  int64_t index;
  bool inside;
  int m, n, least, r_rows;

  explicit __device__ __forceinline__ QrLanesMatrix(const QrProblem& p) : m(p.m), n(p.n) {
    unsigned block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    asm volatile("" : "+r"(m), "+r"(n));
    least = min(m, n);
    r_rows = p.mode == QrProblem::kReduced || p.mode == QrProblem::kR ? least : m;
    const int64_t at = block * int64_t{32 / kLanes} + thread_again() / kLanes;
    inside = at < p.batch;
    index = inside ? at : p.batch - 1;
  }
};

template <class T, int kLanes, int kColumns, int kRows, int kSteps, int kHeld, bool kKeeps,
          int kMinBlocks>
__global__ void __launch_bounds__(32, kMinBlocks) qr_lanes_kernel(const QrProblem p) {
  using Qr = LanesQr<T, kLanes, kColumns, kRows, kSteps, kHeld, kKeeps>;
  using Place = QrLanesMatrix<kLanes>;
  constexpr int kMatrices = 32 / kLanes;
  __shared__ typename Qr::Shared shared;
  if (skips(p, blockIdx.x * int64_t{kMatrices}, kMatrices)) return;
  const bool raw = kKeeps && p.mode == QrProblem::kRaw;
  Qr f(shared, p.m, p.n);
  f.load(matrix_at<const T>(p.a, Place(p).index, p.m, p.n));
  {
    const Place at(p);
    f.factorize(p.r.at<T>(at.index, at.r_rows, at.n), at.inside ? at.n : 0);
  }
  if (p.m <= p.n) {
    const Place at(p);
    T* const r = p.r.at<T>(at.index, at.r_rows, at.n);
    f.last_row(r + (at.m - 1) * at.n, at.inside ? at.n : 0);
  }
  f.find_failed();
  __syncwarp();  // what the steps wrote to shared memory, and to a row that fails
  if constexpr (kKeeps) {
    if (raw) {
      const Place at(p);
      T* const taus = p.taus.at<T>(at.index, at.least);
      if (at.inside) f.store_raw(p.r.at<T>(at.index, at.r_rows, at.n), taus);
      __syncwarp();
      if (f.failed() && at.inside) fill_failed<kLanes>(taus, 1, at.least, false);
    } else {
      f.form(p.mode == QrProblem::kComplete ? p.m : min(p.m, p.n));
      const Place at(p);
      const int columns = p.mode == QrProblem::kComplete ? at.m : at.least;
      T* const q = p.q.at<T>(at.index, at.m, columns);
      if (at.inside && !f.failed()) f.store(q, columns);
      if (at.inside && f.failed()) fill_failed<kLanes>(q, at.m, columns, false);
    }
  }
  const Place at(p);
  const bool zeros = !raw && at.least < at.r_rows;
  if (!at.inside || (!zeros && !f.failed())) return;
  T* const r = p.r.at<T>(at.index, at.r_rows, at.n);
  if (zeros) fill_zeros<kLanes>(r + at.least * at.n, (at.r_rows - at.least) * at.n);
  if (f.failed()) fill_failed<kLanes>(r, at.r_rows, at.n, !raw);
}

}  // namespace jax_batched::cuda
