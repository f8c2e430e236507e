// Substitution, "lanes_shared": kLanes lanes of a warp per matrix, the triangle in shared memory.
//
// A step of a substitution costs a warp the same instructions whether it serves one matrix or four,
// and at n <= 64 these instructions, with a warp for each matrix, take longer than the memory. So a
// warp takes 32 / kLanes matrices, and a lane several rows of one. The triangle comes by
// asynchronous copies of 16 bytes: few instructions, no registers.
//
// Stored triangles are seen as one: row s, counted from the end if it is the upper one, holds
// entries 0..s, counted from the end as well:
//   L(s, c) = a[s n + c]   (lower),   a[(n - 1 - s) n + n - 1 - c]   (upper).
// M is L where rows of M are contiguous. Where columns are, M is L^T with both indices reversed:
// a sweep of M is one with L^T from its last row up. So a sweep is
//   ascend    L y = c,     y_0 first      (M by rows; second of two sweeps: M by columns)
//   descend   L^T y = c,   y_{n-1} first  (the others)
// and a solve with a Cholesky factor is one of each, in either order.
#pragma once

#include "ffi/cuda/device/async_copy.cuh"
#include "ffi/cuda/device/quotient.cuh"
#include "ffi/cuda/substitution/substitution.cuh"

namespace jax_batched::cuda {

// Elements that `a` lies past a 16-byte boundary.
template <class T>
__device__ __forceinline__ int past_vector(const T* a) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(a) / sizeof(T) % kVector<T>);
}

// Starts the copy of the vector at a + element, or of what of it lies in a[0 .. count - 1].
template <class T>
__device__ __forceinline__ void copy_vector_inside(T* to, const T* a, int element, int count) {
  if (element >= 0 && element + kVector<T> <= count) {
    copy_async(reinterpret_cast<Vector<T>*>(to), reinterpret_cast<const Vector<T>*>(a + element));
  } else {
    for (int z = 0; z < kVector<T>; ++z) {
      if (element + z >= 0 && element + z < count) to[z] = a[element + z];
    }
  }
}

// Elements skipped before a row in shared memory. Rows an odd number of vectors apart that are not
// aligned are read by elements; they start at different places within a vector, so that the banks
// of 32 of them differ if after every 8 rows a vector is skipped.
template <class T, bool kSkips>
__host__ __device__ constexpr int skipped_before(int row) {
  return kSkips ? row / 8 * kVector<T> : 0;
}

// The triangle in shared memory, in whole 16-byte vectors of the stored matrix: only vectors that
// hold some of the triangle, some 32-byte sectors of it, are read.
//
// Line f holds row n - 1 - f from its start and row f up to its end; together they are of the same
// length for each f, so half the memory of a square serves, and the start of a row is a product.
// Lines are an odd number of vectors apart: lanes that read vectors of neighbouring rows meet no
// bank conflict.
template <class T>
struct FoldedTriangle {
  int n;
  bool aligned;  // rows are whole vectors at 16-byte addresses

  __host__ __device__ int lines() const { return (n + 1) / 2; }
  // Vectors that a row of this many entries may touch.
  template <bool kAligned>
  static __host__ __device__ int vectors(int entries) {
    return kAligned ? ceil_div(entries, kVector<T>) : (entries + kVector<T> - 2) / kVector<T> + 1;
  }
  // vectors(f + 1) + vectors(n - f) is at most this.
  __host__ __device__ int line_vectors() const {
    const int most = aligned ? n / kVector<T> + 1 : (n + 2 * kVector<T> - 3) / kVector<T> + 2;
    return make_odd(most);
  }
  __host__ __device__ int pitch() const { return line_vectors() * kVector<T>; }
  // Where the vectors of row s start.
  template <bool kAligned, bool kSkips>
  __device__ __forceinline__ int row_start(int s) const {
    const bool second = 2 * s + 1 < n;
    const int line = second ? s : n - 1 - s;
    return line * pitch() + skipped_before<T, kSkips>(line) +
           (second ? pitch() - vectors<kAligned>(s + 1) * kVector<T> : 0);
  }
};

template <class T, int kLanes, int kRows, int kColumns, bool kAligned>
struct LanesSharedSubstitutionShape {
  static constexpr bool kSkips = !kAligned && kLanes == 32;
  static constexpr int kMatrices = 32 / kLanes;  // of a warp
  static constexpr int kWarps = kLanes * kRows <= 32 ? 4 : 1;
  // Resident blocks that the register cap is for: many small triangles fit in shared memory.
  static constexpr int kMinBlocks = kWarps == 1 || kColumns > 1 ? 1
                                    : sizeof(T) == 4            ? (kRows <= 2 ? 8 : 6)
                                    : sizeof(T) == 8            ? (kRows <= 2 ? 6 : 5)
                                                                : 3;
  // Entries beyond a row's end are read, though not used, up to this far outside a triangle.
  static constexpr int kMargin = kLanes + 8;

  // Elements from one matrix of a warp to the next: lanes of all matrices that read neighbouring
  // entries of a row use different banks.
  static __host__ __device__ int matrix_pitch(const FoldedTriangle<T>& folded) {
    constexpr int kWords = sizeof(T) / 4;
    const int elements =
        folded.lines() * folded.pitch() + skipped_before<T, kSkips>(folded.lines() - 1);
    const int bank = elements * kWords % 32;
    return elements + (32 + kLanes * kWords % 32 - bank) % 32 / kWords;
  }
  static __host__ __device__ int warp_elements(const FoldedTriangle<T>& folded) {
    return kMatrices * matrix_pitch(folded) + 2 * kMargin;
  }
};

// Starts the copies of a warp's triangles, that of a[m] to folded + m * pitch, all lanes on one
// matrix at a time. kInside: copies nothing outside the matrices.
template <bool kAligned, bool kSkips, bool kInside, int kMatrices, class T>
__device__ __forceinline__ void copy_triangles(T* folded, int pitch, const T* const (&a)[kMatrices],
                                               const FoldedTriangle<T>& shape, bool upper,
                                               int lane) {
  constexpr int kV = kVector<T>;
  const int n = shape.n;
  const int line_vectors = shape.line_vectors();
  const unsigned reciprocal = 0xffffffffu / line_vectors + 1;  // t / line_vectors, t < 2^16
  const int total = shape.lines() * line_vectors;
#pragma unroll kInside ? 1 : 2
  for (int t = lane; t < total; t += 32) {
    const int line = __umulhi(t, reciprocal);
    const int position = t - line * line_vectors;
    const int from_end = position - (line_vectors - shape.template vectors<kAligned>(line + 1));
    const bool second = from_end >= 0 && 2 * line + 1 < n;
    const int s = second ? line : n - 1 - line;
    const int row = upper ? (n - 1 - s) * (n + 1) : s * n;  // its first entry in memory
    const int vector = second ? from_end : position;        // of the row
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
      T* const to = folded + m * pitch + t * kV + skipped_before<T, kSkips>(line);
      // Counted from the boundary.
      const int first = row + (kAligned ? 0 : past_vector(a[m]));
      const int element = first / kV * kV + vector * kV;
      if (element <= first + s) {
        const int shift = first - row;
        if constexpr (kInside) {
          copy_vector_inside(to, a[m], element - shift, n * n);
        } else {
          copy_async(reinterpret_cast<Vector<T>*>(to),
                     reinterpret_cast<const Vector<T>*>(a[m] - shift + element));
        }
      }
    }
  }
}

// The sweeps of kLanes lanes. Lane l holds entries l, l + kLanes, ... of kColumns right-hand sides.
// In a step every lane divides its own entry, and the quotient y_k of lane k goes to all:
//   c_i <- c_i - L(i, k) y_k   for the rows i > k,   descending: c_i - L(k, i) y_k,  i < k.
// The steps take the quick quotient. Afterwards, once per entry, each lane looks whether it was
// valid; the functions return whether it always was. If not, the solve is done again, unquick.
//
// The steps are one dependent chain (quotient, shuffle, product: some 50 cycles), so nothing else
// may be in it: the steps of a group have no branch, and load what they need of L at its start.
template <class T, int kLanes, int kRows, int kColumns, bool kAligned>
struct LanesSweep {
  static constexpr int kGroup = sizeof(T) <= 8 ? 4 : 2;

  const T* folded;
  int n;
  int lane;
  int direction;      // from one entry of a row to the next: 1, -1 if upper
  int origin[kRows];  // of this lane's rows: L(s, c) lies at origin + direction * c
  Divisor<T> divisor[kRows];

  template <bool kQuick>
  static __device__ __forceinline__ T quotient(const Divisor<T>& d, T b) {
    if constexpr (kQuick) {
      return d.quick(b);
    } else {
      return d(b);
    }
  }

  // Turns the numerators of the rows lane + r * kLanes into quotients.
  template <bool kQuick>
  __device__ __forceinline__ bool finish(int r, T (&y)[kColumns]) const {
    bool valid = true;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if constexpr (kQuick) {
        valid = valid && (lane + r * kLanes >= n || divisor[r].covers(y[c]));
      }
      y[c] = quotient<kQuick>(divisor[r], y[c]);
    }
    return valid;
  }

  // Entries c, c + 1, ... of this lane's row r; c is a multiple of kCount.
  template <int kCount>
  __device__ __forceinline__ void row_entries(int r, int c, T (&m)[kCount]) const {
    constexpr int kV = kVector<T>;
    const T* const first = folded + origin[r] + direction * c;
    if constexpr (kAligned && kCount % kV == 0) {
#pragma unroll
      for (int k = 0; k < kCount; k += kV) {
        const T* const from = direction > 0 ? first + k : first - k - (kV - 1);
        const Vector<T> v = *reinterpret_cast<const Vector<T>*>(from);
#pragma unroll
        for (int z = 0; z < kV; ++z) m[k + z] = direction > 0 ? v.v[z] : v.v[kV - 1 - z];
      }
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) m[k] = first[direction * k];
    }
  }

  // Entry of row r * kLanes + k of L in this lane's columns, for k = first, first + 1, ....
  template <int kCount>
  __device__ __forceinline__ void column_entries(int r, int first, T (&m)[kRows][kCount]) const {
    const T* const own = folded + direction * lane;
#pragma unroll
    for (int z = 0; z < kCount; ++z) {
      const int row = __shfl_sync(kFullWarp, origin[r], first + z, kLanes);
#pragma unroll
      for (int q = 0; q < r; ++q) m[q][z] = own[row + direction * q * kLanes];
      m[r][z] = folded[row + direction * (r * kLanes + min(lane, first + z))];
    }
  }

  // Steps first, first + 1, ... of the row block r, in this order (ascending) or from the last on.
  template <bool kQuick, bool kAscending, int kCount>
  __device__ __forceinline__ void steps(int r, int first, T (&y)[kRows][kColumns]) const {
    T m[kRows][kCount];
    if constexpr (kAscending) {
#pragma unroll
      for (int q = r; q < kRows; ++q) row_entries(q, r * kLanes + first, m[q]);
    } else {
      column_entries(r, first, m);
    }
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
      const int z = kAscending ? step : kCount - 1 - step;
      const int k = first + z;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const T y_k = shuffle(quotient<kQuick>(divisor[r], y[r][c]), k, kLanes);
        if (kAscending ? lane > k : lane < k) y[r][c] = sub_mul(y[r][c], m[r][z], y_k);
#pragma unroll
        for (int q = 0; q < kRows; ++q) {
          if (kAscending ? q > r : q < r) y[q][c] = sub_mul(y[q][c], m[q][z], y_k);
        }
      }
    }
  }

  // Rows from n on are not real: their steps change only rows that are not either.
  template <bool kQuick>
  __device__ __forceinline__ bool ascend(T (&y)[kRows][kColumns]) const {
    constexpr int kCount = kQuick ? kGroup : 1;
    bool valid = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll 1
      for (int first = 0; first < min(kLanes, n - r * kLanes); first += kCount) {
        steps<kQuick, true, kCount>(r, first, y);
      }
      valid = finish<kQuick>(r, y[r]) && valid;
    }
    return valid;
  }

  template <bool kQuick>
  __device__ __forceinline__ bool descend(T (&y)[kRows][kColumns]) const {
    constexpr int kCount = kQuick ? kGroup : 1;
    bool valid = true;
#pragma unroll
    for (int r = kRows - 1; r >= 0; --r) {
      int left = max(min(kLanes, n - r * kLanes), 0);
#pragma unroll 1
      for (; left % kCount != 0; --left) steps<kQuick, false, 1>(r, left - 1, y);
#pragma unroll 1
      for (; left > 0; left -= kCount) steps<kQuick, false, kCount>(r, left - kCount, y);
      valid = finish<kQuick>(r, y[r]) && valid;
    }
    return valid;
  }

  template <bool kQuick>
  __device__ __forceinline__ bool solve(T (&y)[kRows][kColumns], int sweeps, bool ascending) const {
    bool valid = true;
#pragma unroll 1
    for (int pass = 0; pass < sweeps; ++pass) {
      if (pass > 0) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) y[r][c] = conj(y[r][c]);
        }
      }
      valid = (ascending == (pass == 0) ? ascend<kQuick>(y) : descend<kQuick>(y)) && valid;
    }
    return valid;
  }
};

// A lane's entries of kColumns right-hand sides, in global memory: entry (r, c) at
// start + r * row_step + c * column_step.
template <int kLanes, int kRows, int kColumns>
struct LaneColumns {
  int64_t start, row_step, column_step;
  int rows;  // of this lane
  bool vectors;

  template <class T>
  static __device__ __forceinline__ LaneColumns of(const Substitution<T>& s, bool by_rows,
                                                   int lane) {
    const LowerSystem& system = s.first;
    const int64_t step = by_rows ? system.x_row : -system.x_row;
    const int64_t start = system.x_start + (by_rows ? 0 : (s.n - 1) * system.x_row);
    const auto addresses =
        reinterpret_cast<uintptr_t>(s.b.data) | reinterpret_cast<uintptr_t>(s.x.data);
    return {start + lane * step, kLanes * step, system.x_col, (s.n - lane + kLanes - 1) / kLanes,
            kColumns % kVector<T> == 0 && system.x_col == 1 && s.nrhs % kColumns == 0 &&
                addresses % 16 == 0};
  }

  template <class T>
  __device__ __forceinline__ void load(T (&y)[kRows][kColumns], const T* b, int64_t column,
                                       int64_t nrhs, bool conjugate) const {
    const T* from = b + start + column * column_step;
#pragma unroll
    for (int r = 0; r < kRows; ++r, from += row_step) {
      if constexpr (kColumns % kVector<T> == 0 && kColumns > 1) {
        if (vectors) {
#pragma unroll
          for (int c = 0; c < kColumns; c += kVector<T>) {
            Vector<T> v{};
            if (r < rows) v = *reinterpret_cast<const Vector<T>*>(from + c);
#pragma unroll
            for (int z = 0; z < kVector<T>; ++z) y[r][c + z] = conj_if(conjugate, v.v[z]);
          }
          continue;
        }
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const bool inside = r < rows && column + c < nrhs;
        y[r][c] = conj_if(conjugate, inside ? from[c * column_step] : T(0));
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void store(T* x, const T (&y)[kRows][kColumns], int64_t column,
                                        int64_t nrhs, bool conjugate) const {
    T* to = x + start + column * column_step;
#pragma unroll
    for (int r = 0; r < kRows; ++r, to += row_step) {
      if (r >= rows) continue;
      if constexpr (kColumns % kVector<T> == 0 && kColumns > 1) {
        if (vectors) {
#pragma unroll
          for (int c = 0; c < kColumns; c += kVector<T>) {
            Vector<T> v;
#pragma unroll
            for (int z = 0; z < kVector<T>; ++z) v.v[z] = conj_if(conjugate, y[r][c + z]);
            *reinterpret_cast<Vector<T>*>(to + c) = v;
          }
          continue;
        }
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (column + c < nrhs) to[c * column_step] = conj_if(conjugate, y[r][c]);
      }
    }
  }
};

template <class T, int kLanes, int kRows, int kColumns, bool kAligned>
__global__ void __launch_bounds__(
    32 * LanesSharedSubstitutionShape<T, kLanes, kRows, kColumns, kAligned>::kWarps,
    LanesSharedSubstitutionShape<T, kLanes, kRows, kColumns, kAligned>::kMinBlocks)
    lanes_shared_substitution(const Substitution<T> s, const int sweeps,
                              const FoldedTriangle<T> shape) {
  using Shape = LanesSharedSubstitutionShape<T, kLanes, kRows, kColumns, kAligned>;
  constexpr int kMatrices = Shape::kMatrices;
  extern __shared__ __align__(16) unsigned char shared[];
  const int n = s.n;
  const int lane = threadIdx.x % kLanes;
  const int matrix = threadIdx.x % 32 / kLanes;
  // The shuffle tells the compiler that all lanes have the same.
  const int warp = Shape::kWarps == 1 ? 0 : __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  const int pitch = Shape::matrix_pitch(shape);
  T* const triangles =
      reinterpret_cast<T*>(shared) + warp * Shape::warp_elements(shape) + Shape::kMargin;
  const T* const folded = triangles + matrix * pitch;
  const LowerSystem& system = s.first;
  const bool by_rows = rows_contiguous(system);
  const bool upper = upper_stored(system);
  const auto columns = LaneColumns<kLanes, kRows, kColumns>::of(s, by_rows, lane);

  const int64_t step = int64_t{gridDim.x} * Shape::kWarps * kMatrices;
  for (int64_t base = (int64_t{blockIdx.x} * Shape::kWarps + warp) * kMatrices; base < s.batch;
       base += step) {
    const int64_t entry = min(base + matrix, s.batch - 1);
    const bool stores = base + matrix < s.batch;
    const T* const own = s.a_of(entry);
    const T* a[kMatrices];
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
      const auto address = reinterpret_cast<unsigned long long>(own);
      a[m] = reinterpret_cast<const T*>(__shfl_sync(kFullWarp, address, m * kLanes));
    }
    // Vectors beyond the ends of the others are memory of their neighbours.
    const bool outermost = !s.a.contiguous() || base == 0 || base + kMatrices >= s.batch || n == 1;
    if (!kAligned && outermost) {
      copy_triangles<kAligned, Shape::kSkips, true>(triangles, pitch, a, shape, upper,
                                                    threadIdx.x % 32);
    } else {
      copy_triangles<kAligned, Shape::kSkips, false>(triangles, pitch, a, shape, upper,
                                                     threadIdx.x % 32);
    }
    commit_copies();
    const T* const b = s.b_of(entry);
    T* const x = s.x_of(entry);
    T y[kRows][kColumns];
    columns.load(y, b, 0, s.nrhs, system.conjugate);
    wait_for_copies<0>();
    __syncwarp();

    LanesSweep<T, kLanes, kRows, kColumns, kAligned> sweep;
    sweep.folded = folded;
    sweep.n = n;
    sweep.lane = lane;
    sweep.direction = upper ? -1 : 1;
    const int shift = kAligned ? 0 : past_vector(own);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = min(lane + r * kLanes, n - 1);
      const int first = shift + (upper ? (n - 1 - i) * (n + 1) : i * n);
      sweep.origin[r] = shape.template row_start<kAligned, Shape::kSkips>(i) + first % kVector<T> +
                        (upper ? i : 0);
      const bool one = s.unit_diagonal || lane + r * kLanes >= n;
      sweep.divisor[r] = Divisor<T>::of(one ? T(1) : folded[sweep.origin[r] + sweep.direction * i]);
    }
    for (int64_t column = 0;;) {
      if (!__all_sync(kFullWarp, sweep.template solve<true>(y, sweeps, by_rows))) {
        columns.load(y, b, column, s.nrhs, system.conjugate);
        sweep.template solve<false>(y, sweeps, by_rows);
      }
      if (stores) columns.store(x, y, column, s.nrhs, system.conjugate != (sweeps == 2));
      column += kColumns;
      if (column >= s.nrhs) break;
      columns.load(y, b, column, s.nrhs, system.conjugate);
    }
    __syncwarp();  // the triangles are overwritten next
  }
}

}  // namespace jax_batched::cuda
