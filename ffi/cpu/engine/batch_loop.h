// Spreads the matrices of a batch over XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>

#include "ffi/cpu/engine/kernels.h"
#include "ffi/cpu/engine/memory.h"
#include "ffi/cpu/engine/subnormals.h"
#include "xla/ffi/api/ffi.h"

namespace jax_batched::cpu {

namespace ffi = xla::ffi;

// Work of one task, in nanoseconds as estimated.
inline constexpr int64_t kTaskWork = 25'000;
// Below this the whole call runs on the calling thread: handing it over would cost more.
inline constexpr int64_t kInlineWork = 50'000;
// More than this is given back after each call.
inline constexpr size_t kMaxKeptScratch = 8 << 20;

struct AlignedDelete {
  void operator()(std::byte* p) const {
    ::operator delete[](p, std::align_val_t(kScratchAlignment));
  }
};

// Memory that a thread keeps from task to task: fresh pages would cost as much as a small task.
class Scratch {
 public:
  static Scratch& of_this_thread() {
    static thread_local Scratch scratch;
    return scratch;
  }
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      memory_.reset(
          static_cast<std::byte*>(::operator new[](bytes, std::align_val_t(kScratchAlignment))));
      size_ = bytes;
      prefer_huge_pages(memory_.get(), bytes);
    }
    return memory_.get();
  }
  void trim() {
    if (size_ <= kMaxKeptScratch) return;
    memory_.reset();
    size_ = 0;
  }

 private:
  std::unique_ptr<std::byte[], AlignedDelete> memory_;
  size_t size_ = 0;
};

// Matrices of a task: about kTaskWork, in whole groups of `lanes` unless that leaves threads idle.
inline int64_t matrices_per_task(int64_t batch, int64_t work_per_matrix, int64_t lanes,
                                 int64_t threads) {
  const int64_t wanted = std::max<int64_t>(1, kTaskWork / work_per_matrix);
  if (wanted >= lanes) return wanted / lanes * lanes;
  if (batch >= lanes * threads) return lanes;
  return std::max(wanted, (batch + threads - 1) / threads);
}

// Runs body(task, scratch) for 0 <= task < tasks, all of them on this thread if `here`. This thread
// takes its share of the tasks, as the pool's others may be slow to wake. None waits for another,
// so no pool thread is ever blocked.
template <class Pool, class Body>
ffi::Future for_each_task(Pool pool, int64_t tasks, bool here, size_t scratch_bytes, Body body) {
  const auto run = [body, scratch_bytes](int64_t task) {
    const KeepSubnormals keep_subnormals;
    body(task, Scratch::of_this_thread().reserve(scratch_bytes));
  };
  if (here) {
    ffi::Promise promise;
    ffi::Future future(promise);
    for (int64_t task = 0; task < tasks; ++task) run(task);
    Scratch::of_this_thread().trim();
    promise.SetAvailable();
    return future;
  }
  ffi::CountDownPromise promise(tasks);
  ffi::Future future(promise);
  const auto next = std::make_shared<std::atomic<int64_t>>(0);
  auto take_tasks = [=]() mutable {
    for (int64_t task; (task = next->fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      run(task);
      promise.CountDown(1);
    }
    Scratch::of_this_thread().trim();
  };
  for (int64_t other = 1; other < std::min<int64_t>(tasks, pool.num_threads()); ++other) {
    auto same_tasks = take_tasks;
    pool.Schedule(std::move(same_tasks));
  }
  take_tasks();
  return future;
}

// Runs body(begin, end, scratch) over 0 <= i < batch in tasks of neighbouring matrices. Each matrix
// is computed by the same operations in the same order whatever task it is in, so results do not
// depend on the split.
template <class Pool, class Body>
ffi::Future for_each_matrix(Pool pool, int64_t batch, int64_t work_per_matrix, int64_t lanes,
                            size_t scratch_bytes, Body body) {
  const int64_t threads = pool.num_threads();
  const bool here = batch <= std::max<int64_t>(1, kInlineWork / work_per_matrix) || threads <= 1;
  const int64_t per_task = here ? batch : matrices_per_task(batch, work_per_matrix, lanes, threads);
  const int64_t tasks = batch == 0 ? 0 : (batch + per_task - 1) / per_task;
  return for_each_task(pool, tasks, here, scratch_bytes, [=](int64_t task, void* scratch) {
    body(task * per_task, std::min(batch, (task + 1) * per_task), scratch);
  });
}

}  // namespace jax_batched::cpu
