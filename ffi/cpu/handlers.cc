// The FFI handlers of the CPU and the Python module `_cpu`: one line per operation below.
#include <nanobind/nanobind.h>

#include "ffi/common/parse.h"
#include "ffi/cpu/batch_loop.h"
#include "ffi/cpu/kernels.h"

namespace nb = nanobind;

namespace jax_batched::cpu {
namespace {

// Floating-point operations of one matrix and the bytes it moves, roughly; never 0.
int64_t work(int64_t n, int64_t nrhs, bool factors) {
  return (factors ? n * n * n / 3 : 0) + 2 * n * n * nrhs + 8 * n * (n + nrhs) + 64;
}
int64_t work(const CholeskyProblem& p) { return work(p.n, 0, true); }
int64_t work(const TriangularSolveProblem& p) { return work(p.n, p.nrhs, false); }
int64_t work(const ChoSolveProblem& p) { return 2 * work(p.n, p.nrhs, false); }
int64_t work(const SolvePosProblem& p) { return work(p.n, p.nrhs, true); }
int64_t work(const ResidualProblem& p) { return 2 * p.m * p.n * p.nrhs + 8 * p.m * p.n + 64; }

size_t element_size(DType dtype) {
  return with_element_type(dtype, [](auto t) { return sizeof(t); });
}

ffi::Future failed(ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

template <class Problem, Kernel<Problem> Kernels::* kernel>
ffi::Future run(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results,
                ffi::Dictionary attributes) {
  CallReader call(args, results, attributes);
  Problem problem = parse<Problem>(call);
  call.require(!is_storage_only(problem.dtype), "the CPU has no kernels for 16-bit elements");
  if (call.error().failure()) return failed(call.error());
  const bool reference = problem.kernel == "reference";
  if (!reference && !problem.kernel.empty()) {
    return failed(ffi::Error::InvalidArgument("jax_batched: the CPU has no kernel '" +
                                              std::string(problem.kernel) +
                                              "', only 'reference' and '' (the fast one)"));
  }
  problem.kernel = {};  // its text does not outlive this call
  const Kernel<Problem> f = (reference ? reference_kernels() : kernels()).*kernel;
  return for_each_matrix(
      pool, problem.batch, work(problem), scratch_elements(problem) * element_size(problem.dtype),
      [=](int64_t begin, int64_t end, void* scratch) { f(problem, begin, end, scratch); });
}

template <class Problem, Kernel<Problem> Kernels::* kernel>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  static auto* bound = ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs()
                           .To(run<Problem, kernel>)
                           .release();
  return bound->Call(frame);
}

nb::capsule capsule(XLA_FFI_Handler* f) { return nb::capsule(reinterpret_cast<void*>(f)); }

}  // namespace

NB_MODULE(_cpu, m) {
  m.def("handlers", [] {
    nb::dict d;
    d["cholesky"] = capsule(handler<CholeskyProblem, &Kernels::cholesky>);
    d["triangular_solve"] = capsule(handler<TriangularSolveProblem, &Kernels::triangular_solve>);
    d["cho_solve"] = capsule(handler<ChoSolveProblem, &Kernels::cho_solve>);
    d["solve_pos"] = capsule(handler<SolvePosProblem, &Kernels::solve_pos>);
    d["residual"] = capsule(handler<ResidualProblem, &Kernels::residual>);
    return d;
  });
  m.def("isa", [] { return isa_name(); });
}

}  // namespace jax_batched::cpu
