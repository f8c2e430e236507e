// How Python sets the tuned rows, in either module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "ffi/cuda/runtime/tuned.h"

namespace jax_batched::cuda {

// Of its name.
inline DType dtype_of(std::string_view wanted) {
  for (const auto& [dtype, name] : kDTypeNames) {
    if (name == wanted) return dtype;
  }
  throw std::invalid_argument("no such dtype: " + std::string(wanted));
}

// A number that None leaves open.
inline int64_t limit_of(nanobind::handle value) {
  return value.is_none() ? kAny : nanobind::cast<int64_t>(value);
}

// set_tuned(rows) puts rows (compute capability, operation, fast, dtype, largest nrhs or None,
// smallest n, largest n, kernel) in the place of those before.
inline void bind_tuned(nanobind::module_& m) {
  m.def("set_tuned", [](nanobind::list rows) {
    TunedRows found;
    for (const nanobind::handle item : rows) {
      const auto row = nanobind::cast<nanobind::tuple>(item);
      found.push_back({nanobind::cast<int>(row[0]), nanobind::cast<std::string_view>(row[1]),
                       nanobind::cast<bool>(row[2]),
                       table_dtype(dtype_of(nanobind::cast<std::string_view>(row[3]))),
                       limit_of(row[4]), nanobind::cast<int64_t>(row[5]),
                       nanobind::cast<int64_t>(row[6]), nanobind::cast<std::string_view>(row[7])});
    }
    set_tuned_rows(found);
  });
}

}  // namespace jax_batched::cuda
