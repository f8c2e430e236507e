// The FFI handlers of CUDA and the Python module `_cuda`, for the list of operations.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include <string>

#include "ffi/common/call_reader.h"
#include "ffi/common/operations.h"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/runtime/bindings.h"

namespace nb = nanobind;

namespace jax_batched::cuda {
namespace {

template <class P>
ffi::Error run(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets results,
               ffi::Dictionary attributes) {
  CallReader call(args, results, attributes);
  const P problem = call.read<P>();
  if (call.error().failure()) return call.error();
  if (problem.batch == 0) return ffi::Error::Success();
  cudaError_t status =
      with_type_of(problem, [&](auto t) { return launch<decltype(t)>(stream, problem); });
  if (status == cudaSuccess && call.where().data != nullptr) {
    status = launch_clear(stream, problem.batch, call.where(), call.results());
  }
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_batched: CUDA launch failed: ") +
                              cudaGetErrorString(status));
}

template <class P>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  static auto* bound = ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs()
                           .To(run<P>, {ffi::Traits::kCmdBufferCompatible})
                           .release();
  return bound->Call(frame);
}

nb::capsule capsule(XLA_FFI_Handler* f) { return nb::capsule(reinterpret_cast<void*>(f)); }

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("handlers", [] {
    nb::dict d;
    for_each_operation([&](auto operation) {
      using P = typename decltype(operation)::type;
      if constexpr (P::kOnCuda) d[nb::str(P::kName.data(), P::kName.size())] = capsule(handler<P>);
    });
    return d;
  });
  bind_tuned(m);
}

}  // namespace jax_batched::cuda
