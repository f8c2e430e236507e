// Spreads the matrices of a batch over XLA's thread pool.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

#include "ffi/cpu/kernels.h"
#include "ffi/cpu/subnormals.h"
#include "xla/ffi/api/ffi.h"

namespace jax_batched::cpu {

namespace ffi = xla::ffi;

// Work of one task, in floating-point operations or bytes moved: about 100 microseconds.
inline constexpr int64_t kTaskWork = 400'000;
// Below this the whole call runs on the calling thread: handing it over would cost more.
inline constexpr int64_t kInlineWork = 200'000;

struct AlignedDelete {
  void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
using Scratch = std::unique_ptr<std::byte[], AlignedDelete>;

inline Scratch allocate_scratch(size_t bytes) {
  return Scratch(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t(64))));
}

// Runs body(begin, end, scratch) over 0 <= i < batch in tasks of neighbouring matrices. All tasks
// are scheduled before this returns and none waits, so no pool thread is ever blocked. The split is
// a function of the problem, and each matrix is computed alone, so results do not depend on it.
template <class Body>
ffi::Future for_each_matrix(ffi::ThreadPool pool, int64_t batch, int64_t work_per_matrix,
                            size_t scratch_bytes, Body body) {
  const auto run = [body, scratch_bytes](int64_t begin, int64_t end) {
    const KeepSubnormals keep_subnormals;
    const Scratch scratch = allocate_scratch(scratch_bytes);
    body(begin, end, static_cast<void*>(scratch.get()));
  };
  const int64_t per_task = std::max<int64_t>(1, kTaskWork / work_per_matrix);
  if (batch <= std::max<int64_t>(1, kInlineWork / work_per_matrix) || pool.num_threads() <= 1) {
    ffi::Promise promise;
    ffi::Future future(promise);
    run(0, batch);
    promise.SetAvailable();
    return future;
  }
  const int64_t tasks = (batch + per_task - 1) / per_task;
  ffi::CountDownPromise promise(tasks);
  ffi::Future future(promise);
  for (int64_t task = 0; task < tasks; ++task) {
    pool.Schedule([=]() mutable {
      run(task * per_task, std::min(batch, (task + 1) * per_task));
      promise.CountDown(1);
    });
  }
  return future;
}

}  // namespace jax_batched::cpu
