// The table of the fast kernels. This file and those of the kernels are compiled once per
// instruction set, with JAX_BATCHED_ISA naming it. All templates live in a namespace of that name,
// so that the linker cannot mix code of two instruction sets.
#include "ffi/cpu/engine/kernels.h"

#include "ffi/cpu/engine/simd.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {

template <class... P>
Kernels table_of(List<P...>) {
  return {kernel<P>()..., kVectorBytes};
}

const Kernels& table() {
  static const Kernels kernels = table_of(CpuOperations{});
  return kernels;
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
