// What Python sees of the kernels of CUDA, of which it learns without CUDA.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <string>
#include <string_view>

#include "ffi/common/operations.h"
#include "ffi/cuda/runtime/bindings.h"
#include "ffi/cuda/runtime/table.h"
#include "generated/cuda_policies.h"

namespace jax_batched::cuda {

inline nanobind::object limit_to_python(int64_t value) {
  if (value == kAny) return nanobind::none();
  return nanobind::int_(value);
}

// cuda_tiers() lists the kernels among which there is a choice: (operation, dtype (float16: either
// format of 16 bits), kernel, smallest n, largest n, compute capability needed, for "fast" only).
// cuda_chosen_kernel(...) names the one that serves a call on a GPU of this compute capability (90
// for sm_90).
inline void bind_tables(nanobind::module_& m) {
  m.def("cuda_tiers", [] {
    nanobind::list rows;
    for_each_operation([&](auto operation) {
      using P = typename decltype(operation)::type;
      if constexpr (P::kOnCuda) {
        Policy<P>::for_each_kernel([&](const KernelRow& row) {
          rows.append(nanobind::make_tuple(P::kName, name_of(row.dtype), row.kernel, row.min_n,
                                           row.max_n, row.capability, row.fast));
        });
      }
    });
    return rows;
  });
  m.def("cuda_chosen_kernel", [](std::string_view operation, std::string_view dtype, int64_t n,
                                 int64_t nrhs, bool fast, int capability) {
    const Call call{.operation = operation,
                    .dtype = table_dtype(dtype_of(dtype)),
                    .n = n,
                    .nrhs = nrhs,
                    .fast = fast,
                    .capability = capability};
    std::string name;
    for_each_operation([&](auto of) {
      using P = typename decltype(of)::type;
      if constexpr (P::kOnCuda) {
        if (P::kName == operation) name = Policy<P>::chosen(call);
      }
    });
    return name;
  });
}

}  // namespace jax_batched::cuda
