#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "ffi/cpu/engine/kernels.h"

namespace jax_batched::cpu {

namespace baseline {
const Kernels& table();
}
namespace avx2 {
const Kernels& table();
}
namespace avx512 {
const Kernels& table();
}

namespace {

struct Isa {
  const char* name;
  const Kernels& (*table)();
  bool runs_here;
};

constexpr const char* kSelectionVariable = "JAX_BATCHED_ISA";

// The best first.
const std::vector<Isa>& compiled_isas() {
  static const std::vector<Isa> isas = {
#if defined(JAX_BATCHED_HAS_avx512)
      {"avx512", avx512::table,
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")},
#endif
#if defined(JAX_BATCHED_HAS_avx2)
      {"avx2", avx2::table, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
      {"baseline", baseline::table, true},
  };
  return isas;
}

const Isa& selected_isa() {
  static const Isa selected = [] {
    const char* wanted = std::getenv(kSelectionVariable);
    for (const Isa& isa : compiled_isas()) {
      if (isa.runs_here && (wanted == nullptr || std::string_view(wanted) == isa.name)) return isa;
    }
    std::string names;
    for (const std::string_view name : isas_here()) names += " " + std::string(name);
    throw std::runtime_error(std::string(kSelectionVariable) + "=" + wanted +
                             ": not an instruction set that this processor runs, which are" +
                             names);
  }();
  return selected;
}

}  // namespace

std::vector<std::string_view> isas_here() {
  std::vector<std::string_view> names;
  for (const Isa& isa : compiled_isas()) {
    if (isa.runs_here) names.push_back(isa.name);
  }
  return names;
}

const Kernels& kernels() { return selected_isa().table(); }
const char* isa_name() { return selected_isa().name; }

namespace reference {
template <class... P>
Kernels table_of(List<P...>) {
  return {kernel<P>()..., sizeof(double)};
}
}  // namespace reference

const Kernels& reference_kernels() {
  static const Kernels table = reference::table_of(CpuOperations{});
  return table;
}

}  // namespace jax_batched::cpu
