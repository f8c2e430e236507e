// Fresh memory: the pages of a large result are mapped one by one as they are first written.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace jax_batched::cpu {

// Below this the pages that are mapped one by one cost less than asking for others.
inline constexpr size_t kMinHugeBytes = size_t{4} << 20;

// Asks for huge pages where whole ones fit: mapping 4 KiB at a time takes longer than factoring the
// matrices in them. Never more memory than the array's own, and no effect where the system has
// no huge pages, or the memory has been written before.
inline void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  if (bytes < kMinHugeBytes) return;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (begin + bytes) / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace jax_batched::cpu
