#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "ffi/cpu/kernels.h"
#include "ffi/cpu/reference.h"

namespace jax_batched::cpu {

namespace baseline {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}

namespace {

struct Isa {
  const char* name;
  const Kernels* table;
  bool runs_here;
};

constexpr const char* kSelectionVariable = "JAX_BATCHED_ISA";
constexpr const char* kCacheVariable = "JAX_BATCHED_CACHE_BYTES";

// The best first.
const std::vector<Isa>& compiled_isas() {
  static const std::vector<Isa> isas = {
#if defined(JAX_BATCHED_HAS_avx512)
      {"avx512", &avx512::table,
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")},
#endif
#if defined(JAX_BATCHED_HAS_avx2)
      {"avx2", &avx2::table, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
      {"baseline", &baseline::table, true},
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

int64_t last_level_cache_bytes() {
  static const int64_t size = []() -> long long {
    constexpr int64_t kUnknown = 32 << 20;
    if (const char* wanted = std::getenv(kCacheVariable)) return std::atoll(wanted);
    // What a processor shares between some of its cores; the C library tells that of all together.
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
    int64_t kibibytes = 0;
    return file >> kibibytes && kibibytes > 0 ? kibibytes << 10 : kUnknown;
  }();
  return size;
}

const Kernels& kernels() { return *selected_isa().table; }
const char* isa_name() { return selected_isa().name; }

const Kernels& reference_kernels() {
  static const Kernels table = {
      sizeof(double),
      [](const CholeskyProblem& p, int64_t begin, int64_t end, void*) {
        with_element_type(p.dtype, [&](auto t) {
          for (int64_t m = begin; m < end; ++m) reference::cholesky<decltype(t)>(p, m);
        });
      },
      [](const TriangularSolveProblem& p, int64_t begin, int64_t end, void*) {
        with_element_type(p.dtype, [&](auto t) {
          for (int64_t m = begin; m < end; ++m) reference::triangular_solve<decltype(t)>(p, m);
        });
      },
      [](const ChoSolveProblem& p, int64_t begin, int64_t end, void*) {
        with_element_type(p.dtype, [&](auto t) {
          for (int64_t m = begin; m < end; ++m) reference::cho_solve<decltype(t)>(p, m);
        });
      },
      [](const SolvePosProblem& p, int64_t begin, int64_t end, void*) {
        with_element_type(p.dtype, [&](auto t) {
          for (int64_t m = begin; m < end; ++m) reference::solve_pos<decltype(t)>(p, m);
        });
      },
      [](const ResidualProblem& p, int64_t begin, int64_t end, void*) {
        with_element_type(p.dtype, [&](auto t) {
          for (int64_t m = begin; m < end; ++m) reference::residual<decltype(t)>(p, m);
        });
      },
  };
  return table;
}

}  // namespace jax_batched::cpu
