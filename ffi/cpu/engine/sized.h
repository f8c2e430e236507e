// Calls whose matrices differ in size: matrices of one size at a time are copied side by side,
// computed by the operation's own kernel as a call of that size, and copied back.
//
// So a matrix costs what its own size costs, registers are full, and the bits are those of a call
// without sizes. A window of the batch at a time is sorted by size.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "ffi/cpu/engine/batch_loop.h"
#include "ffi/cpu/engine/kernels.h"
#include "ffi/cpu/engine/mask.h"

namespace jax_batched::cpu {

// What the matrices of a chunk take up while they are side by side, if a group needs no more: part
// of a core's cache. Those of a window as well, if all sizes may be in it.
inline constexpr int64_t kSizedChunkBytes = 128 << 10;
inline constexpr int64_t kSizedWindowBytes = 256 << 10;

// Copies bytes, a multiple of 4; of a row of a small matrix faster than memcpy.
inline void copy_row(char* to, const char* from, int64_t bytes) {
  constexpr int64_t kUnit = 16;
  if (bytes >= kUnit) {
    for (int64_t at = 0; at + kUnit <= bytes; at += kUnit) std::memcpy(to + at, from + at, kUnit);
    std::memcpy(to + bytes - kUnit, from + bytes - kUnit, kUnit);
    return;
  }
  if (bytes & 8) std::memcpy(to, from, 8);
  if (bytes & 4) std::memcpy(to + (bytes & 8), from + (bytes & 8), 4);
}

// An array of a call, as bytes.
struct SizedArray {
  enum Kind { kMatrix, kOperand, kNumbers, kIntegers };  // two operands, two results

  Kind kind;
  char* data;
  BatchMap map;
  int64_t rows;
  int64_t pitch;  // of a row

  int64_t bytes() const { return rows * pitch; }
  char* at(int64_t entry) const { return data + map(entry) * bytes(); }
  bool is_operand() const { return kind == kMatrix || kind == kOperand; }

  // The leading part of a matrix, `own` says how large, to `to`, where its rows follow one another.
  void pack(int64_t entry, const SizedArray& own, char* to) const {
    const char* from = at(entry);
    if (own.pitch == pitch) return copy_row(to, from, own.bytes());
    for (int64_t i = 0; i < own.rows; ++i) {
      copy_row(to + i * own.pitch, from + i * pitch, own.pitch);
    }
  }
  // The way back, with zeros beyond that part.
  void unpack(int64_t entry, const SizedArray& own, const char* from) const {
    char* to = at(entry);
    if (own.pitch == pitch) {
      copy_row(to, from, own.bytes());
    } else {
      for (int64_t i = 0; i < own.rows; ++i) {
        copy_row(to + i * pitch, from + i * own.pitch, own.pitch);
        fill_bytes(to + i * pitch + own.pitch, 0, pitch - own.pitch);
      }
    }
    fill_bytes(to + own.rows * pitch, 0, (rows - own.rows) * pitch);
  }
  void fetch(int64_t entry, const SizedArray& own) const {
    constexpr int64_t kLine = 64, kMost = 32;
    const char* from = at(entry);
    const int64_t lines = std::min(kMost, (own.rows * pitch + kLine - 1) / kLine);
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(from + i * kLine);
  }
};

// The arrays of a problem, in its order.
struct SizedArrays {
  static constexpr int kMax = 6;

  SizedArray array[kMax]{};
  int count = 0;
  int64_t element;  // bytes of a number
  int64_t real_element;

  template <class P>
  explicit SizedArrays(P& p) {
    with_element_type(p.dtype, [&](auto t) {
      element = sizeof(t);
      real_element = sizeof(Real<decltype(t)>);
    });
    p.for_each_array(*this);
  }

  template <class Layout>
  void matrix(const MatrixView<Layout>& view, int64_t n) {
    add(SizedArray::kMatrix, view.data, map_of(view.layout), n, n * element);
  }
  template <class Layout>
  void operand(const MatrixView<Layout>& view, int64_t rows, int64_t columns) {
    add(SizedArray::kOperand, view.data, map_of(view.layout), rows, columns * element);
  }
  void result(const MatrixView<Packed>& view, int64_t rows, int64_t columns) {
    add(SizedArray::kNumbers, view.data, {}, rows, columns * element);
  }
  void real_result(const MatrixView<Packed>& view, int64_t count) {
    add(SizedArray::kNumbers, view.data, {}, count, real_element);
  }
  void integers(int32_t* data, int64_t count) {
    add(SizedArray::kIntegers, data, {}, count, sizeof(int32_t));
  }

  // Of what matrices take up side by side; each array begins on a boundary of its own.
  int64_t bytes(int64_t matrices) const {
    int64_t sum = 0;
    for (int i = 0; i < count; ++i) sum += bytes(i, matrices);
    return sum;
  }
  int64_t bytes(int i, int64_t matrices) const {
    constexpr int64_t kBoundary = kScratchAlignment;
    const int64_t used = matrices * array[i].bytes();
    return (used + kBoundary - 1) / kBoundary * kBoundary;
  }

 private:
  static BatchMap map_of(const Packed&) { return {}; }
  static BatchMap map_of(const Mapped& layout) { return layout.map; }
  void add(SizedArray::Kind kind, void* data, const BatchMap& map, int64_t rows, int64_t pitch) {
    array[count++] = {kind, static_cast<char*>(data), map, rows, pitch};
  }
};

// Makes the arrays of a problem those that lie side by side.
struct SetSizedArrays {
  char* const* at;

  template <class Layout>
  void matrix(MatrixView<Layout>& view, int64_t) {
    view = {*at++, {}};
  }
  template <class Layout>
  void operand(MatrixView<Layout>& view, int64_t, int64_t) {
    view = {*at++, {}};
  }
  void result(MatrixView<Packed>& view, int64_t, int64_t) { view = {*at++, {}}; }
  void real_result(MatrixView<Packed>& view, int64_t) { view = {*at++, {}}; }
  void integers(int32_t*& data, int64_t) { data = reinterpret_cast<int32_t*>(*at++); }
};

// A call, divided into tasks.
template <class P>
class SizedBatch {
 public:
  SizedBatch(const Sized<P>& problem, const Kernel<P>& kernel, const MatrixView<Mapped>& where,
             const Results& results, int64_t lanes)
      : problem_(problem), kernel_(kernel), where_{where}, results_(results), whole_(problem_) {
    if constexpr (std::is_same_v<decltype(P::a), MatrixView<Packed>>) {
      whole_.array[0].map = problem.map;
    }
    if constexpr (requires { problem_.where; }) problem_.where = {};
    // In the cache; of larger matrices enough to fill registers with those of one size.
    window_ = std::clamp<int64_t>(
        std::max(kSizedWindowBytes / whole_.array[0].bytes(), kGroupsOfSize * lanes * problem_.n),
        1, kMaxWindow);
    order_.resize(problem.batch);
    for (int64_t begin = 0; begin < problem.batch; begin += window_) {
      sort_window(begin, std::min(problem.batch, begin + window_));
    }
  }

  int64_t tasks() const { return static_cast<int64_t>(tasks_.size()); }
  int64_t work() const { return work_; }  // in nanoseconds, as estimated
  size_t scratch_bytes() const { return scratch_bytes_; }

  void run(int64_t task, void* scratch) const {
    const size_t end = task + 1 < tasks() ? tasks_[task + 1] : runs_.size();
    for (size_t i = tasks_[task]; i < end; ++i) compute(runs_[i], static_cast<char*>(scratch));
  }

 private:
  // Entries of a window are numbers of 16 bits.
  static constexpr int64_t kMaxWindow = 1 << 16;
  static constexpr int64_t kGroupsOfSize = 4;
  static constexpr int64_t kAhead = 8;  // entries that are fetched ahead
  // In place of sizes, in the order of classes before size 0.
  static constexpr int kUnwanted = -2, kWrong = -1;

  // Matrices of one size.
  struct Run {
    int64_t begin, end;  // places in the order
    int size;
  };
  // A kernel's problem of one size: of no rows that of the identity of one, of wrong sizes that of
  // NaN of n, which fails as that does.
  struct OfSize {
    P problem;
    SizedArrays own;       // what of the arrays is the matrices'
    SizedArrays computed;  // the kernel's

    OfSize(const P& p, int size)
        : problem(resized(p, size == kWrong ? p.n : std::max(size, 1))),
          own(problem),
          computed(problem) {
      if (size != 0) return;
      P twice = resized(p, 2);
      const SizedArrays two(twice);
      for (int i = 0; i < own.count; ++i) {
        own.array[i].rows = 2 * own.array[i].rows - two.array[i].rows;
        own.array[i].pitch = 2 * own.array[i].pitch - two.array[i].pitch;
      }
    }
    static P resized(P p, int size) {
      p.resize(size);
      return p;
    }
  };

  int64_t entry_of(int64_t place) const { return place / window_ * window_ + order_[place]; }

  int class_of(int64_t entry) const {
    if (where_.where.data != nullptr && !where_(entry)) return 0;
    return problem_.size_of(entry) - kUnwanted;
  }

  void sort_window(int64_t begin, int64_t end) {
    std::vector<int64_t> first(problem_.n - kUnwanted + 2);
    for (int64_t entry = begin; entry < end; ++entry) ++first[class_of(entry) + 1];
    for (size_t i = 1; i < first.size(); ++i) first[i] += first[i - 1];
    int64_t open = kTaskWork;  // of the last task: a window begins another
    for (int size = problem_.n; size >= kUnwanted; --size) {
      const int64_t* of_class = &first[size - kUnwanted];
      add_runs(size, begin + of_class[0], begin + of_class[1], open);
    }
    for (int64_t entry = begin; entry < end; ++entry) {
      order_[begin + first[class_of(entry)]++] = static_cast<uint16_t>(entry - begin);
    }
  }

  void add_runs(int size, int64_t begin, int64_t end, int64_t& open) {
    if (begin == end) return;
    int64_t nanoseconds = 1 + whole_.bytes(1) / 16, group = 1;
    if (size != kUnwanted) {
      const OfSize of(problem_, size);
      nanoseconds += of.problem.work().nanoseconds(problem_.dtype);
      group = kernel_.group(of.problem).size;
      const size_t needed = kernel_scratch(of) + of.computed.bytes(chunk(of));
      scratch_bytes_ = std::max(scratch_bytes_, needed);
    }
    const int64_t longest = std::max(group, kTaskWork / nanoseconds / group * group);
    for (int64_t at = begin; at < end; at += longest) {
      if (open >= kTaskWork) {
        tasks_.push_back(runs_.size());
        open = 0;
      }
      runs_.push_back({at, std::min(end, at + longest), size});
      open += (runs_.back().end - at) * nanoseconds;
    }
    work_ += (end - begin) * nanoseconds;
  }

  size_t kernel_scratch(const OfSize& of) const {
    const size_t bytes = kernel_.scratch_bytes(of.problem);
    return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
  }
  // Matrices side by side.
  int64_t chunk(const OfSize& of) const {
    const int64_t group = kernel_.group(of.problem).size;
    return std::max(group, kSizedChunkBytes / of.computed.bytes(1) / group * group);
  }

  void compute(const Run& run, char* scratch) const {
    if (run.size == kUnwanted) {
      for (int64_t i = run.begin; i < run.end; ++i) {
        const int64_t entry = entry_of(i);
        clear_unwanted(where_, results_, entry, entry + 1);
      }
      return;
    }
    OfSize of(problem_, run.size);
    const int64_t most = chunk(of);
    char* at[SizedArrays::kMax];
    char* free = scratch + kernel_scratch(of);
    for (int i = 0; i < of.computed.count; ++i) {
      at[i] = free;
      free += of.computed.bytes(i, most);
    }
    of.problem.for_each_array(SetSizedArrays{at});
    for (int64_t begin = run.begin; begin < run.end; begin += most) {
      const int64_t count = std::min(most, run.end - begin);
      for (int i = 0; i < whole_.count; ++i) {
        if (whole_.array[i].is_operand()) pack(of, i, at[i], run, begin, count);
      }
      of.problem.batch = count;
      kernel_.run(of.problem, 0, count, scratch);
      for (int i = 0; i < whole_.count; ++i) {
        if (!whole_.array[i].is_operand()) unpack(of, i, at[i], begin, count);
      }
    }
  }

  void pack(const OfSize& of, int i, char* to, const Run& run, int64_t begin, int64_t count) const {
    const SizedArray& whole = whole_.array[i];
    const SizedArray own = of.own.array[i];
    const int64_t bytes = of.computed.array[i].bytes();
    if (run.size > 0) {
      for (int64_t k = 0; k < count; ++k) {
        whole.fetch(entry_of(std::min(begin + k + kAhead, run.end - 1)), own);
        whole.pack(entry_of(begin + k), own, to + k * bytes);
      }
    } else if (run.size == kWrong) {
      std::memset(to, 0xff, count * bytes);  // NaN
    } else {
      std::memset(to, 0, count * bytes);
      if (whole.kind == SizedArray::kMatrix) {
        for (int64_t k = 0; k < count; ++k) set_one(to + k * bytes);
      }
    }
  }

  void unpack(const OfSize& of, int i, const char* from, int64_t begin, int64_t count) const {
    const SizedArray& whole = whole_.array[i];
    const SizedArray own = of.own.array[i];
    const int64_t bytes = of.computed.array[i].bytes();
    for (int64_t k = 0; k < count; ++k) {
      const int64_t entry = entry_of(begin + k);
      whole.unpack(entry, own, from + k * bytes);
      if (whole.kind == SizedArray::kIntegers) leave_in_place(whole, own.rows, entry);
    }
  }

  // Pivots from `first` on exchange no rows.
  static void leave_in_place(const SizedArray& array, int64_t first, int64_t entry) {
    auto* integers = reinterpret_cast<int32_t*>(array.at(entry));
    for (int64_t i = first; i < array.rows; ++i) integers[i] = static_cast<int32_t>(i);
  }

  void set_one(char* to) const {
    with_element_type(problem_.dtype, [&](auto t) {
      using T = decltype(t);
      const T one = T(Real<T>(1));
      std::memcpy(to, &one, sizeof(one));
    });
  }

  Sized<P> problem_;
  Kernel<P> kernel_;
  Wanted where_;
  Results results_;
  SizedArrays whole_;
  int64_t window_;
  std::vector<uint16_t> order_;  // of the entries of each window, by size
  std::vector<Run> runs_;
  std::vector<size_t> tasks_;  // where the runs of each begin
  int64_t work_ = 0;
  size_t scratch_bytes_ = 0;
};

}  // namespace jax_batched::cpu
