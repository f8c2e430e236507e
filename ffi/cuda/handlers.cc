// The FFI handlers of CUDA and the Python module `_cuda`: one line per operation below.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "ffi/common/parse.h"
#include "ffi/cuda/cho_solve.h"
#include "ffi/cuda/cholesky.h"
#include "ffi/cuda/cholesky_pullback.h"
#include "ffi/cuda/residual.h"
#include "ffi/cuda/solve_pos.h"
#include "ffi/cuda/substitution_tiers.h"
#include "ffi/cuda/tiers.h"
#include "ffi/cuda/triangular_solve.h"

namespace nb = nanobind;

namespace jax_batched::cuda {
namespace {

template <class T>
cudaError_t launch(cudaStream_t stream, const CholeskyProblem& p) {
  return cholesky<T>(stream, p);
}
template <class T>
cudaError_t launch(cudaStream_t stream, const TriangularSolveProblem& p) {
  return triangular_solve<T>(stream, p);
}
template <class T>
cudaError_t launch(cudaStream_t stream, const ChoSolveProblem& p) {
  return cho_solve<T>(stream, p);
}
template <class T>
cudaError_t launch(cudaStream_t stream, const SolvePosProblem& p) {
  return solve_pos<T>(stream, p);
}
template <class T>
cudaError_t launch(cudaStream_t stream, const ResidualProblem& p) {
  return residual<T>(stream, p);
}
template <class T>
cudaError_t launch(cudaStream_t stream, const CholeskyPullbackProblem& p) {
  return cholesky_pullback<T>(stream, p);
}

template <class Problem>
cudaError_t launch_any(cudaStream_t stream, const Problem& p) {
  return with_element_type(p.dtype, [&](auto t) { return launch<decltype(t)>(stream, p); });
}
cudaError_t launch_any(cudaStream_t stream, const CholeskyProblem& p) {
  return with_stored_type(p.dtype, [&](auto t) { return launch<decltype(t)>(stream, p); });
}
cudaError_t launch_any(cudaStream_t stream, const SolvePosProblem& p) {
  return with_stored_type(p.dtype, [&](auto t) { return launch<decltype(t)>(stream, p); });
}

template <class Problem>
ffi::Error run(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets results,
               ffi::Dictionary attributes) {
  CallReader call(args, results, attributes);
  const Problem problem = parse<Problem>(call);
  if (call.error().failure()) return call.error();
  if (problem.batch == 0) return ffi::Error::Success();
  const cudaError_t status = launch_any(stream, problem);
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_batched: CUDA launch failed: ") +
                              cudaGetErrorString(status));
}

template <class Problem>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  static auto* bound = ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs()
                           .To(run<Problem>, {ffi::Traits::kCmdBufferCompatible})
                           .release();
  return bound->Call(frame);
}

nb::capsule capsule(XLA_FFI_Handler* f) { return nb::capsule(reinterpret_cast<void*>(f)); }

// The compiled kernels and the choice among them, for the tuner and the tests.

constexpr std::pair<DType, std::string_view> kDTypeNames[] = {
    {DType::kFloat32, "float32"},     {DType::kFloat64, "float64"},
    {DType::kComplex64, "complex64"}, {DType::kComplex128, "complex128"},
    {DType::kFloat16, "float16"},     {DType::kBFloat16, "bfloat16"},
};

DType dtype_of(std::string_view wanted) {
  for (const auto& [dtype, name] : kDTypeNames) {
    if (name == wanted) return dtype;
  }
  throw std::invalid_argument("no such dtype: " + std::string(wanted));
}

std::string_view name_of(DType wanted) {
  for (const auto& [dtype, name] : kDTypeNames) {
    if (dtype == wanted) return name;
  }
  return "";
}

std::string name_of(const Tier& tier) {
  std::string name(tier.kernel);
  if (!tier.variant.empty()) name.append(".").append(tier.variant);
  return name;
}

template <size_t kRows>
void append_tiers(nb::list& rows, std::string_view operation, const Tier (&table)[kRows]) {
  for (const Tier& tier : table) {
    rows.append(nb::make_tuple(operation, name_of(tier.dtype), name_of(tier).c_str(), tier.min_n,
                               tier.max_n, tier.capability, tier.fast));
  }
}

void append_substitutions(nb::list& rows, std::string_view operation) {
  for (const auto& [dtype, name] : kDTypeNames) {
    if (is_storage_only(dtype)) continue;
    for (const std::string_view kernel : kSubstitutionKernels) {
      if (substitution_max_n(dtype, kernel) == 0) continue;
      rows.append(nb::make_tuple(operation, name, kernel, 1, substitution_max_n(dtype, kernel),
                                 substitution_capability(kernel), /*fast=*/false));
    }
  }
}

template <size_t kRows>
std::string chosen_tier(const Tier (&table)[kRows], const Call& call) {
  const int64_t row = find_tier(table, call, {});
  return row == kNoTier ? "" : name_of(table[row]);
}

std::string chosen(const Call& call) {
  if (call.operation == "cholesky") return chosen_tier(kCholeskyTiers, call);
  if (call.operation == "solve_pos") return chosen_tier(kSolvePosTiers, call);
  for (const int sweeps : {1, 2}) {
    if (call.operation != substitution_operation(sweeps)) continue;
    return std::string(substitution_kernel(call.dtype, call.n, call.nrhs, sweeps,
                                           /*transposed=*/false, call.capability));
  }
  throw std::invalid_argument("no such operation: " + std::string(call.operation));
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("handlers", [] {
    nb::dict d;
    d["cholesky"] = capsule(handler<CholeskyProblem>);
    d["triangular_solve"] = capsule(handler<TriangularSolveProblem>);
    d["cho_solve"] = capsule(handler<ChoSolveProblem>);
    d["solve_pos"] = capsule(handler<SolvePosProblem>);
    d["residual"] = capsule(handler<ResidualProblem>);
    d["cholesky_pullback"] = capsule(handler<CholeskyPullbackProblem>);
    return d;
  });
  // (operation, dtype (float16: either format of 16 bits), kernel, smallest n, largest n, compute
  // capability needed, for "fast" only)
  m.def("tiers", [] {
    nb::list rows;
    append_tiers(rows, "cholesky", kCholeskyTiers);
    append_tiers(rows, "solve_pos", kSolvePosTiers);
    append_substitutions(rows, substitution_operation(1));
    append_substitutions(rows, substitution_operation(2));
    return rows;
  });
  // The kernel that serves a call on a GPU of this compute capability (90 for sm_90).
  m.def("chosen_kernel", [](std::string_view operation, std::string_view dtype, int64_t n,
                            int64_t nrhs, bool fast, int capability) {
    const std::string name =
        chosen(Call{operation, table_dtype(dtype_of(dtype)), n, nrhs, fast, capability});
    return nb::str(name.c_str());
  });
}

}  // namespace jax_batched::cuda
