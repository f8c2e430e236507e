// A call whose matrices differ in size: each is the leading part of what holds it, n x n, the rest
// of which is not read. Right-hand sides have as many rows. Results are zero beyond the size, and
// pivots leave rows in their places there. Where a size is negative or larger than n, all results
// of that matrix are NaN.
#pragma once

#include <algorithm>
#include <array>

#include "ffi/common/problem.h"

namespace jax_batched {

inline constexpr std::string_view kSizedSuffix = "_sized";

template <class P>
struct Sized : P {
  static constexpr bool kOnCuda = false;
  static constexpr auto kText = [] {
    std::array<char, P::kName.size() + kSizedSuffix.size()> text{};
    std::copy(kSizedSuffix.begin(), kSizedSuffix.end(),
              std::copy(P::kName.begin(), P::kName.end(), text.begin()));
    return text;
  }();
  static constexpr std::string_view kName{kText.data(), kText.size()};

  BatchMap map;              // of a matrix that P takes as packed
  MatrixView<Mapped> sizes;  // an integer of each matrix

  template <class Call>
  static Sized read(Call& call) {
    Sized p{};
    p.map = call.with_map([&] { static_cast<P&>(p) = P::read(call); });
    p.sizes = call.integer("sizes");
    return p;
  }
  // The size of a matrix; -1 if it is out of range.
  int size_of(int64_t entry) const {
    const int32_t size = *sizes.at<const int32_t>(entry, 1);
    return 0 <= size && size <= this->n ? size : -1;
  }
};

}  // namespace jax_batched
