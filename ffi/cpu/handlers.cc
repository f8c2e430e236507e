// The FFI handlers of the CPU and the Python module `_cpu`, for the list of operations.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <memory>
#include <string>

#include "ffi/common/call_reader.h"
#include "ffi/common/operations.h"
#include "ffi/cpu/engine/batch_loop.h"
#include "ffi/cpu/engine/kernels.h"
#include "ffi/cpu/engine/mask.h"
#include "ffi/cpu/engine/memory.h"
#include "ffi/cpu/engine/sized.h"
#include "ffi/cuda/runtime/export.h"

namespace nb = nanobind;

namespace jax_batched::cpu {
namespace {

// Matrices that a register holds side by side.
int64_t lanes(const Kernels& kernels, DType dtype) {
  return with_element_type(dtype, [&](auto t) {
    return kernels.vector_bytes / static_cast<int64_t>(sizeof(Real<decltype(t)>));
  });
}

ffi::Future failed(ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

template <class P>
ffi::Future compute(ffi::ThreadPool pool, const CallReader& call, const Kernels& table,
                    const P& problem) {
  const Kernel<P> kernel = table.of<P>();
  const auto range = [=](int64_t begin, int64_t end, void* scratch) {
    kernel.run(problem, begin, end, scratch);
  };
  const auto over_batch = [&](auto body) {
    return for_each_matrix(pool, problem.batch, problem.work().nanoseconds(problem.dtype),
                           lanes(table, problem.dtype), kernel.scratch_bytes(problem), body);
  };
  if (call.where().data == nullptr) return over_batch(range);
  const int64_t gap = kGapWork / problem.work().nanoseconds(problem.dtype);
  return over_batch([range, gap, wanted = Wanted{call.where()}, group = kernel.group(problem),
                     results = call.results()](int64_t begin, int64_t end, void* scratch) {
    for_each_wanted(wanted, group, gap, begin, end,
                    [&](int64_t first, int64_t last) { range(first, last, scratch); });
    clear_unwanted(wanted, results, begin, end);
  });
}

template <class P>
ffi::Future compute(ffi::ThreadPool pool, const CallReader& call, const Kernels& table,
                    const Sized<P>& problem) {
  const auto batch = std::make_shared<const SizedBatch<P>>(
      problem, table.of<P>(), call.where(), call.results(), lanes(table, problem.dtype));
  const bool here = batch->work() <= kInlineWork || pool.num_threads() <= 1;
  return for_each_task(pool, batch->tasks(), here, batch->scratch_bytes(),
                       [batch](int64_t task, void* scratch) { batch->run(task, scratch); });
}

template <class P>
ffi::Future run(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results,
                ffi::Dictionary attributes) {
  CallReader call(args, results, attributes);
  P problem = call.read<P>();
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
  for (size_t i = 0; i < results.size(); ++i) {
    if (auto result = results.get<ffi::AnyBuffer>(i); result.has_value()) {
      prefer_huge_pages((*result)->untyped_data(), (*result)->size_bytes());
    }
  }
  return compute(pool, call, named == kReferenceKernel ? reference_kernels() : kernels(), problem);
}

template <class P>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  static auto* bound = ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs()
                           .To(run<P>)
                           .release();
  return bound->Call(frame);
}

// The largest n that one kernel serves.
template <class P>
int64_t max_n(DType dtype) {
  if constexpr (requires { P::cpu_max_n(dtype); }) {
    return P::cpu_max_n(dtype);
  } else {
    return P::kMaxN;
  }
}

// Calls f(std::type_identity<P>) for each operation, and for each whose matrices differ in size.
template <class F>
void for_each_call(F&& f) {
  for_each_operation(f);
  for_each_operation(f, SizedOperations{});
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
    for_each_call([&](auto operation) {
      using P = typename decltype(operation)::type;
      if constexpr (P::kOnCpu) d[nb::str(P::kName.data(), P::kName.size())] = capsule(handler<P>);
    });
    return d;
  });
  // Of each operation: (name, largest n, the dtypes that it takes). Beyond that n it is `lax`.
  m.def("operations", [] {
    nb::list rows;
    for_each_call([&](auto operation) {
      using P = typename decltype(operation)::type;
      nb::list dtypes;
      for (const auto& [dtype, name] : kDTypeNames) {
        if (P::kTakesStored || !is_storage_only(dtype)) dtypes.append(name);
      }
      rows.append(nb::make_tuple(P::kName, P::kMaxN, dtypes));
    });
    return rows;
  });
  m.attr("SIZED_SUFFIX") = nb::str(kSizedSuffix.data(), kSizedSuffix.size());
  // The sizes that one kernel serves, rather than others after one another: (platform, operation,
  // dtype, largest n, largest number of right-hand sides or None).
  m.def("limits", [] {
    nb::list rows;
    for_each_call([&](auto operation) {
      using P = typename decltype(operation)::type;
      const auto append = [&](const char* platform, const cuda::Limit& limit) {
        rows.append(nb::make_tuple(platform, P::kName, name_of(limit.dtype),
                                   std::min<int64_t>(limit.max_n, P::kMaxN),
                                   cuda::limit_to_python(limit.max_nrhs)));
      };
      for (const auto& [dtype, name] : kDTypeNames) {
        if (P::kOnCpu && !is_storage_only(dtype)) append("cpu", {dtype, max_n<P>(dtype)});
      }
      if constexpr (P::kOnCuda) {
        cuda::Policy<P>::for_each_limit([&](const cuda::Limit& limit) { append("cuda", limit); });
      }
    });
    return rows;
  });
  cuda::bind_tables(m);
  cuda::bind_tuned(m);
  m.def("isa", [] { return isa_name(); });
  m.def("isas_here", [] {
    nb::list names;
    for (const std::string_view name : isas_here()) names.append(nb::str(name.data(), name.size()));
    return names;
  });
}

}  // namespace jax_batched::cpu
