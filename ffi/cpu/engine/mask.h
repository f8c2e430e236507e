// Calls that ask for some of their matrices only.
#pragma once

#include <algorithm>
#include <cstring>

#include "ffi/cpu/engine/kernels.h"

namespace jax_batched::cpu {

// Matrices between two groups that cost less than this, in nanoseconds as estimated, are computed,
// too: that is faster than another call.
inline constexpr int64_t kGapWork = 300;

// Which entries of a batch are asked for.
struct Wanted {
  MatrixView<Mapped> where;
  const bool* flags = where.contiguous() ? where.as<const bool>() : nullptr;

  bool operator()(int64_t entry) const {
    return flags != nullptr ? flags[entry] : *where.at<const bool>(entry, 1);
  }
  // The first entry from `entry` on that is, or is not, asked for; `end` if none.
  int64_t next(bool wanted, int64_t entry, int64_t end) const {
    while (entry < end && (*this)(entry) != wanted) ++entry;
    return entry;
  }
};

// Calls body(first, last) for ranges of begin <= i < end that hold all wanted matrices: of a group
// with enough of them the whole, or else each alone. Up to `gap` others do not end a range of
// groups, nor make it worth while to leave a group: so single ones, which are computed where a gap
// is less than a group, are never in a range.
template <class Body>
void for_each_wanted(const Wanted& wanted, Group group, int64_t gap, int64_t begin, int64_t end,
                     Body&& body) {
  int64_t first = begin, last = begin;  // of the range of whole groups that is to be computed
  const auto close = [&] {
    if (first < last) body(first, last);
  };
  int64_t entry = wanted.next(true, begin, end);
  while (entry < end) {
    const int64_t start = entry - (entry - begin) % group.size;
    const int64_t stop = std::min(start + group.size, end);
    int64_t count = 0;
    for (int64_t i = entry; i < stop; ++i) count += wanted(i);
    if (count >= group.least || gap >= group.size) {
      if (start > last + gap) {
        close();
        first = start;
      } else if (first == last) {
        first = start;
      }
      last = stop;
    } else {
      for (; entry < stop; entry = wanted.next(true, entry + 1, stop)) body(entry, entry + 1);
    }
    entry = wanted.next(true, stop, end);
  }
  close();
}

// memset, without a call where these are a few words of 4 bytes.
inline void fill_bytes(char* at, unsigned char value, int64_t bytes) {
  if (bytes > 64 || bytes % 4 != 0) {
    std::memset(at, value, bytes);
    return;
  }
  for (int64_t i = 0; i < bytes; i += 4) std::memset(at + i, value, 4);
}

inline void clear_unwanted(const Wanted& wanted, const Results& results, int64_t begin,
                           int64_t end) {
  int64_t first = wanted.next(false, begin, end);
  while (first < end) {
    const int64_t last = wanted.next(true, first, end);
    for (int i = 0; i < results.count; ++i) {
      const Results::Result& result = results.result[i];
      fill_bytes(static_cast<char*>(result.data) + first * result.bytes, result.is_info ? 0xff : 0,
                 (last - first) * result.bytes);
    }
    first = wanted.next(false, last, end);
  }
}

}  // namespace jax_batched::cpu
