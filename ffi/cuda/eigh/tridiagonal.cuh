// The QR iteration on tridiagonal matrices in shared memory: a lane for each, or one for each of
// several sweeps. And where these matrices lie between two kernels.
#pragma once

#include "ffi/cuda/eigh/iteration.cuh"
#include "ffi/problems/eigh.h"

namespace jax_batched::cuda {

// Where tridiagonal matrices lie between two kernels: in results that are not written yet.
template <class T>
struct EighPlacesInResults {
  using R = Real<T>;
  const EighProblem& p;
  const int64_t entry;

  __device__ __forceinline__ R* d() const { return p.w.at<R>(entry, p.n); }
  // Last, after n - 1 of them, what undoes the scaling.
  __device__ __forceinline__ R* e() const {
    return p.vectors ? row_of_v(p.n - 1) : p.workspace.at<R>(entry, p.n);
  }
  // Eigenvalues 1, 2, ... in the order in which the QR iteration leaves them.
  __device__ __forceinline__ R* shifts() const { return row_of_v(p.n - 2); }

 private:
  __device__ __forceinline__ R* row_of_v(int i) const {
    return reinterpret_cast<R*>(p.v.at<T>(entry, p.n, p.n) + i * p.n);
  }
};

template <class R>
struct alignas(2 * sizeof(R)) Rotation {
  R c, s;
};

// One tridiagonal matrix, by one lane; all lanes of a warp go together.
template <class R>
struct SharedTridiagonal {
  R* const d;
  R* const e;
  const int apart;
  const int n;
  const bool idle;
  R tolerance = R(0);
  int last = 0;

  // All lanes of a warp at once; of those with one matrix one clears.
  __device__ __forceinline__ void begin(bool clears = true) {
    for (int i = 0; i < n && !idle; ++i) {
      tolerance = fmax(tolerance, fabs(d[i * apart]) + fabs(e[i * apart]));
    }
    tolerance = tolerance * kRoundoff<R>;
    __syncwarp();
    for (int i = 0; i < n && !idle && clears; ++i) {
      if (fabs(e[i * apart]) <= tolerance) e[i * apart] = R(0);
    }
    __syncwarp();
    last = idle ? 0 : n - 1;
  }
  // Rotations of the next sweep, 0 if all matrices are done.
  __device__ __forceinline__ int rotations() {
    while (last > 0 && e[(last - 1) * apart] == R(0)) --last;
    return warp_max(last);
  }
  __device__ __forceinline__ R shift() const {
    if (last == 0) return R(0);
    const int above = (last - 1) * apart;
    return wilkinson_shift(d[above], d[above + apart], e[above]);
  }
  // A sweep of `count` rotations (c_i, s_i), for each of which put(i, c_i, s_i) is called.
  template <class Put>
  __device__ __forceinline__ void sweep(int count, Put&& put) {
    if (idle) return;
    while (last > 0 && e[(last - 1) * apart] == R(0)) --last;
    R d_i = d[0], e_i = e[0];
    Sweep<R> sweep(shift(), tolerance, d_i);
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const int next = (i + 1) * apart;
      const R d_next = d[next], e_next = e[next];
      R e_before;
      sweep.rotate(d_i, e_before, e_i, d_next);
      put(i, sweep.c, sweep.s);
      d[next - apart] = d_i;
      if (i > 0) e[next - 2 * apart] = e_before;
      if (i + 1 < count) sweep.restart(d_next);
      d_i = d_next;
      e_i = e_next;
    }
    R e_before;
    sweep.finish(d_i, e_before);
    d[count * apart] = d_i;
    e[(count - 1) * apart] = e_before;
  }
};

// kSweeps sweeps at a time on a tridiagonal matrix, by as many neighbouring lanes of a warp. Lane s
// does the s-th of them, on row t - kLag s in step t, on numbers that the lane before it has left.
// Before and behind the rows there is e = 0, where a sweep starts and ends by itself: so every step
// is the same, for all lanes.
template <class R, int kRows, int kColumns, int kSweeps>
struct SweepsOfLanes {
  static constexpr int kLag = 3;  // so that numbers are loaded a step ahead
  static constexpr int kBefore = kLag * (kSweeps - 1);
  // Odd together with a lag: the lanes of a matrix are in different banks.
  static constexpr int kAll = round_up(kRows + 2 * kBefore + 2, 2);

  // d and e of kColumns matrices, before each sweep.
  struct Numbers {
    R d[kSweeps][kAll][kColumns], e[kSweeps][kAll][kColumns];
  };
  // The rotations of sweeps.
  struct Rotations {
    Rotation<R> of[kSweeps][kRows + 2 * kBefore][kColumns];
  };

  // This lane's sweep, `count` rotations from row `begin` of `to` on.
  static __device__ __forceinline__ void run(Numbers& numbers, Rotations& to, int column, int begin,
                                             int count, R shift, R tolerance) {
    const int sweep = threadIdx.x % kSweeps, next = (sweep + 1) % kSweeps;
    const int first = kBefore - kLag * sweep;
    const R* d = &numbers.d[sweep][first][column];
    const R* e = &numbers.e[sweep][first][column];
    R* d_done = &numbers.d[next][first][column];
    R* e_done = &numbers.e[next][first][column] - kColumns;  // of the row before
    Rotation<R>* rotation = &to.of[sweep][begin + first][column];
    R row = d[0], d_next = d[kColumns], e_row = e[0];
    Sweep<R> own(shift, tolerance, row);
#pragma unroll 2
    for (int t = 0; t <= count + kBefore; ++t) {
      d += kColumns;
      e += kColumns;
      const R d_ahead = d[kColumns], e_ahead = e[0];
      R e_before;
      own.rotate(row, e_before, e_row, d_next);
      *rotation = {own.c, own.s};
      own.restart(d_next);
      *d_done = row;
      if (t > 0) *e_done = e_before;
      d_done += kColumns;
      e_done += kColumns;
      rotation += kColumns;
      row = d_next;
      d_next = d_ahead;
      e_row = e_ahead;
      __syncwarp();
    }
  }
};

}  // namespace jax_batched::cuda
