// The parallel loop over a batch on a pool of threads, to run under the thread sanitizer:
//   g++ -std=c++20 -g -O1 -fsanitize=thread -pthread -I. -I$JAXLIB/include
//       tests/batch_loop_race.cc ffi/cpu/reference/cholesky.cc
// Checks that every matrix is computed once, in scratch of its own, before the future is ready.
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "ffi/cpu/engine/batch_loop.h"
#include "ffi/cpu/engine/kernels.h"

namespace {

using namespace jax_batched;

// The part of ffi::ThreadPool that the loop uses.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  void schedule(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }
  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }

 private:
  void work() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

struct PoolHandle {
  Pool* pool;
  template <class F>
  void Schedule(F f) {
    pool->schedule(std::move(f));
  }
  int64_t num_threads() const { return pool->num_threads(); }
};

// Number of matrices whose factor is not that of 4 I.
int64_t wrong_factors(Pool& pool, int64_t batch, int64_t n, int64_t work_per_matrix,
                      int64_t lanes) {
  std::vector<double> a(batch * n * n, 0), l(batch * n * n, -1);
  std::vector<int32_t> info(batch, -1);
  for (int64_t m = 0; m < batch; ++m) {
    for (int64_t i = 0; i < n; ++i) a[(m * n + i) * n + i] = 4;
  }
  CholeskyProblem p{};
  p.dtype = DType::kFloat64;
  p.batch = batch;
  p.n = n;
  p.a.data = a.data();
  p.l.data = l.data();
  p.info = info.data();
  const auto kernel = cpu::reference::kernel<CholeskyProblem>();
  const size_t bytes = n * n * sizeof(double);
  std::promise<void> ready;
  cpu::for_each_matrix(PoolHandle{&pool}, batch, work_per_matrix, lanes, bytes,
                       [=](int64_t begin, int64_t end, void* scratch) {
                         for (int64_t m = begin; m < end; ++m) {
                           std::memset(scratch, static_cast<int>(m & 127), bytes);
                           kernel.run(p, m, m + 1, nullptr);
                         }
                       })
      .OnReady([&](const std::optional<xla::ffi::Error>&) { ready.set_value(); });
  ready.get_future().wait();
  int64_t wrong = 0;
  for (int64_t m = 0; m < batch; ++m) {
    bool right = info[m] == 0;
    for (int64_t i = 0; i < n * n; ++i) right &= l[m * n * n + i] == (i % (n + 1) == 0 ? 2 : 0);
    wrong += !right;
  }
  return wrong;
}

}  // namespace

int main() {
  int64_t wrong = 0;
  for (const int threads : {1, 4}) {
    Pool pool(threads);
    for (const int64_t batch : {0, 1, 7, 16, 33, 500}) {
      for (const int64_t work : {50, 5'000, 60'000, 1'000'000}) {
        for (const int64_t lanes : {1, 4, 16}) wrong += wrong_factors(pool, batch, 5, work, lanes);
      }
    }
  }
  std::printf("%lld wrong\n", static_cast<long long>(wrong));
  return wrong != 0;
}
