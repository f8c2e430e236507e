// What the problem structs of all operations (ffi/problems/) share. A problem is everything that a
// kernel needs, on either platform; CUDA kernels take it as it is.
#pragma once

#include <cstdint>
#include <string_view>

#include "ffi/common/dtype.h"
#include "ffi/common/view.h"

namespace jax_batched {

// Every operation has a struct that derives from this one and has
//   static constexpr std::string_view kName;   as in the FFI target
//   static constexpr bool kTakesStored;        float16 and bfloat16, too
//   static constexpr int64_t kMaxN;            the largest n; beyond it the operation is `lax`
//   static constexpr bool kOnCuda, kOnCpu;     false: that platform has no kernels
//   static P read(Call&);                      from the arrays and attributes of a call
//   (CallReader) Work work() const;
struct Problem {
  static constexpr bool kOnCuda = true;
  static constexpr bool kOnCpu = true;

  DType dtype;
  std::string_view kernel;  // names the kernel to use; empty: as the tables say
  int64_t batch;
};

// An operation that takes matrices of different sizes in one call (Sized, ffi/problems/sized.h) has
//   void resize(int n);          becomes a call with matrices of that size
//   void for_each_array(F&& f);  calls f.matrix(a, n), f.operand(b, rows, columns),
//                                f.result(x, rows, columns), f.real_result(w, count) and
//                                f.integers(pivots, count): operands first, with the sizes of each

// Of operations whose CUDA kernels skip matrices that are computed together if none of these is
// asked for. Others compute all: with one more argument their kernels spill registers.
struct MaskedProblem : Problem {
  MatrixView<Mapped> where;  // of each matrix, whether it is computed; without data: all are
};

// The results of a problem, to be cleared where its mask is false. Kernels may write there.
struct Results {
  struct Result {
    void* data;
    int64_t bytes;  // of each matrix
    bool is_info;   // becomes -1, else zero
  };
  static constexpr int kMax = 4;

  Result result[kMax]{};
  int count = 0;
};

// What one matrix costs, roughly.
struct Work {
  int64_t operations;  // multiplications, each with an addition
  int64_t elements;    // read or written
  int64_t times = 1;
  int64_t overhead = 15;  // in nanoseconds

  int64_t nanoseconds(DType dtype) const {  // on a CPU; never 0
    return with_element_type(dtype, [&](auto t) {
      using T = decltype(t);
      const int64_t size = sizeof(T);
      return times *
             (operations * size * (kIsComplex<T> ? 2 : 1) / 64 + elements * size / 12 + overhead);
    });
  }
};
constexpr int64_t factor_operations(int64_t n) { return n * n * n / 3; }

// Calls f(T{}) with the element type of a problem.
template <class P, class F>
decltype(auto) with_type_of(const P& p, F&& f) {
  if constexpr (P::kTakesStored) {
    return with_stored_type(p.dtype, f);
  } else {
    return with_element_type(p.dtype, f);
  }
}

}  // namespace jax_batched
