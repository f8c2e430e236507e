// The CPU kernels as the handlers see them: one table per instruction set.
#pragma once

#include <string_view>
#include <vector>

#include "ffi/common/operations.h"

namespace jax_batched::cpu {

// Matrices that a kernel computes side by side in one go, 1 if none, and the least number of them
// for which that is faster than one by one.
struct Group {
  int64_t size;
  int64_t least;
};

template <class P>
struct Kernel {
  // Works on the matrices begin <= i < end of a problem. `scratch` is memory of scratch_bytes(p)
  // bytes, aligned to kScratchAlignment, that no other task uses.
  void (*run)(const P& p, int64_t begin, int64_t end, void* scratch);
  size_t (*scratch_bytes)(const P& p);
  Group (*group)(const P& p) = [](const P&) { return Group{1, 1}; };
};

// A kernel of each operation of a list.
template <class List>
struct KernelTable;
template <class... P>
struct KernelTable<List<P...>> : Kernel<P>... {
  int vector_bytes;  // of a register: matrices side by side, times the size of a real number

  template <class Q>
  const Kernel<Q>& of() const {
    return *this;
  }
};
using Kernels = KernelTable<CpuOperations>;

// The best table that this processor runs, chosen once; JAX_BATCHED_ISA names another of
// isas_here().
const Kernels& kernels();
// The plain kernels of reference/.
const Kernels& reference_kernels();
// Name of the instruction set behind kernels().
const char* isa_name();
// Names of the instruction sets that were compiled and that this processor runs, the best first.
std::vector<std::string_view> isas_here();

// Each operation's plain kernel, and its fast one for the instruction set at hand: defined beside
// the kernels.
namespace reference {
template <class P>
Kernel<P> kernel();
}
#if defined(JAX_BATCHED_ISA)
namespace JAX_BATCHED_ISA {
template <class P>
Kernel<P> kernel();
}
#endif

// The names that a problem's `kernel` can have; empty: what the tiers say.
inline constexpr std::string_view kReferenceKernel = "reference";
inline constexpr std::string_view kLanesKernel = "lanes";
inline constexpr std::string_view kBlockedKernel = "blocked";

inline constexpr size_t kScratchAlignment = 128;  // of a complex number in the widest registers

// Scratch for the largest register of any instruction set: a group of matrices with rows one entry
// longer, its right-hand sides; or one matrix with rows of whole registers, and
// its right-hand sides likewise.
inline constexpr int64_t kMaxVectorBytes = 64;

template <class T>
int64_t group_scratch_bytes(int64_t n, int64_t nrhs) {
  const int64_t entry = kIsComplex<T> ? 2 * kMaxVectorBytes : kMaxVectorBytes;
  return entry * n * (n + 1 + nrhs);
}
template <class T>
int64_t blocked_scratch_bytes(int64_t n, int64_t nrhs) {
  const int64_t parts = kIsComplex<T> ? 2 : 1;
  const auto row = [&](int64_t entries) {  // rounded up to whole registers, and one more
    return (entries * static_cast<int64_t>(sizeof(Real<T>)) + kMaxVectorBytes) * parts +
           kMaxVectorBytes;
  };
  const int64_t rows = n + 8;  // whole tiles
  return rows * row(rows) + (nrhs == 1 ? row(n) : n * row(nrhs));
}

}  // namespace jax_batched::cpu
