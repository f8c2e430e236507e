// The FFI handlers of CUDA and the Python module `_cuda`: one line per operation below.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include "ffi/common/parse.h"
#include "ffi/cuda/cho_solve.h"
#include "ffi/cuda/cholesky.h"
#include "ffi/cuda/solve_pos.h"
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

template <class Problem>
cudaError_t launch_any(cudaStream_t stream, const Problem& p) {
  return with_element_type(p.dtype, [&](auto t) { return launch<decltype(t)>(stream, p); });
}
cudaError_t launch_any(cudaStream_t stream, const CholeskyProblem& p) {
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

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("handlers", [] {
    nb::dict d;
    d["cholesky"] = capsule(handler<CholeskyProblem>);
    d["triangular_solve"] = capsule(handler<TriangularSolveProblem>);
    d["cho_solve"] = capsule(handler<ChoSolveProblem>);
    d["solve_pos"] = capsule(handler<SolvePosProblem>);
    return d;
  });
}

}  // namespace jax_batched::cuda
