// XLA's CPU threads run with flush-to-zero and denormals-are-zero set. The kernels keep subnormals:
// a task clears both for its lifetime.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jax_batched::cpu {

class KeepSubnormals {
 public:
  KeepSubnormals() : saved_(get()) { set(saved_ & ~kFlushBits); }
  ~KeepSubnormals() { set(saved_); }
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kFlushBits = 0x8040;  // MXCSR: FTZ (bit 15), DAZ (bit 6)
  static uint64_t get() { return _mm_getcsr(); }
  static void set(uint64_t state) { _mm_setcsr(static_cast<unsigned>(state)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kFlushBits = uint64_t{1} << 24;  // FPCR: FZ
  static uint64_t get() {
    uint64_t state;
    asm volatile("mrs %0, fpcr" : "=r"(state));
    return state;
  }
  static void set(uint64_t state) { asm volatile("msr fpcr, %0" : : "r"(state)); }
#else
  static constexpr uint64_t kFlushBits = 0;
  static uint64_t get() { return 0; }
  static void set(uint64_t) {}
#endif

  uint64_t saved_;
};

}  // namespace jax_batched::cpu
