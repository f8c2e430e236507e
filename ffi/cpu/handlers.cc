// The FFI handlers of the CPU and the Python module `_cpu`: one line per operation below.
#include <nanobind/nanobind.h>

#include "ffi/common/parse.h"
#include "ffi/cpu/batch_loop.h"
#include "ffi/cpu/kernels.h"
#include "ffi/cpu/tiers.h"

namespace nb = nanobind;

namespace jax_batched::cpu {
namespace {

// Nanoseconds of one matrix, roughly; never 0: 16 operations each in float32, and its bytes.
int64_t work(DType dtype, int64_t n, int64_t nrhs, bool factors) {
  return with_element_type(dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t size = sizeof(T);
    const int64_t operations = (factors ? n * n * n / 3 : 0) + 2 * n * n * nrhs;
    return operations * size * (kIsComplex<T> ? 2 : 1) / 64 + (n + nrhs) * n * size / 12 + 15;
  });
}
int64_t work(const CholeskyProblem& p) { return work(p.dtype, p.n, 0, true); }
int64_t work(const TriangularSolveProblem& p) { return work(p.dtype, p.n, p.nrhs, false); }
int64_t work(const ChoSolveProblem& p) { return work(p.dtype, p.n, 2 * p.nrhs, false); }
int64_t work(const SolvePosProblem& p) { return work(p.dtype, p.n, 2 * p.nrhs, true); }
int64_t work(const ResidualProblem& p) { return work(p.dtype, (p.m + p.n) / 2, p.nrhs, false); }
int64_t work(const CholeskyPullbackProblem& p) { return 2 * work(p.dtype, p.n, 0, true); }

// Matrices that a register holds side by side.
int64_t lanes(const Kernels& kernels, DType dtype) {
  return with_element_type(dtype, [&](auto t) {
    return kernels.vector_bytes / static_cast<int64_t>(sizeof(Real<decltype(t)>));
  });
}

size_t scratch_bytes(const ResidualProblem& p) {
  return with_element_type(p.dtype,
                           [&](auto t) { return residual_scratch_bytes<decltype(t)>(p.m, p.n); });
}
size_t scratch_bytes(const CholeskyPullbackProblem& p) {  // the factor and the result
  return with_element_type(p.dtype,
                           [&](auto t) { return group_scratch_bytes<decltype(t)>(p.n, p.n + 1); });
}
template <class Problem>
size_t scratch_bytes(const Problem& p) {
  const int64_t nrhs = right_hand_sides(p);
  const bool group = p.kernel == kLanesKernel || (p.kernel != kBlockedKernel &&
                                                  lanes_may_serve(tiers_of(p), p.dtype, p.n, nrhs));
  return with_element_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t blocked = blocked_scratch_bytes<T>(p.n, nrhs);
    return group ? std::max(group_scratch_bytes<T>(p.n, nrhs), blocked) : blocked;
  });
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
  const std::string_view named = problem.kernel;
  problem.kernel = {};  // its text does not outlive this call
  for (const std::string_view known : {kReferenceKernel, kLanesKernel, kBlockedKernel}) {
    if (named == known) problem.kernel = known;
  }
  if (problem.kernel != named) {
    return failed(ffi::Error::InvalidArgument(
        "jax_batched: the CPU has no kernel '" + std::string(named) +
        "', only 'reference', 'lanes', 'blocked' and '' (the table's choice)"));
  }
  const Kernels& table = named == kReferenceKernel ? reference_kernels() : kernels();
  const Kernel<Problem> f = table.*kernel;
  return for_each_matrix(
      pool, problem.batch, work(problem), lanes(table, problem.dtype), scratch_bytes(problem),
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
  try {
    kernels();  // an instruction set that cannot be had fails here, not in a task
  } catch (const std::exception& error) {
    throw nb::import_error(error.what());
  }
  m.def("handlers", [] {
    nb::dict d;
    d["cholesky"] = capsule(handler<CholeskyProblem, &Kernels::cholesky>);
    d["triangular_solve"] = capsule(handler<TriangularSolveProblem, &Kernels::triangular_solve>);
    d["cho_solve"] = capsule(handler<ChoSolveProblem, &Kernels::cho_solve>);
    d["solve_pos"] = capsule(handler<SolvePosProblem, &Kernels::solve_pos>);
    d["residual"] = capsule(handler<ResidualProblem, &Kernels::residual>);
    d["cholesky_pullback"] = capsule(handler<CholeskyPullbackProblem, &Kernels::cholesky_pullback>);
    return d;
  });
  m.def("isa", [] { return isa_name(); });
  m.def("isas_here", [] {
    nb::list names;
    for (const std::string_view name : isas_here()) names.append(nb::str(name.data(), name.size()));
    return names;
  });
}

}  // namespace jax_batched::cpu
