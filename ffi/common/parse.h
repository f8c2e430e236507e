// From an XLA FFI call to a problem struct: shapes, dtypes and attributes, checked once for both
// platforms. Host code only; includes the XLA FFI header.
#pragma once

#include <string>
#include <utility>

#include "ffi/common/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jax_batched {

namespace ffi = xla::ffi;

// Reads operands, results and attributes; the first fault is kept and ends the call.
class CallReader {
 public:
  CallReader(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes)
      : args_(args), results_(results), attributes_(attributes) {}

  const ffi::Error& error() const { return error_; }

  template <class T>
  T attribute(std::string_view name) {
    auto value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    fail("attribute '" + std::string(name) + "' is missing or of another type");
    return T{};
  }

  // One operand or result: its buffer split into batch dimensions and `core_rank` trailing ones.
  struct Array {
    void* data = nullptr;
    ffi::DataType dtype = ffi::DataType::INVALID;
    ffi::AnyBuffer::Dimensions dims;
    size_t batch_rank = 0;

    int64_t core(size_t i) const { return dims[batch_rank + i]; }
    int64_t batch_count() const {
      int64_t count = 1;
      for (size_t d = 0; d < batch_rank; ++d) count *= dims[d];
      return count;
    }
  };

  Array operand(size_t index, size_t core_rank) {
    auto buffer = args_.get<ffi::AnyBuffer>(index);
    if (!buffer.has_value()) return fail("operand " + std::to_string(index) + " is missing");
    return split(*buffer, core_rank);
  }

  Array result(size_t index, size_t core_rank) {
    auto buffer = results_.get<ffi::AnyBuffer>(index);
    if (!buffer.has_value()) return fail("result " + std::to_string(index) + " is missing");
    return split(**buffer, core_rank);
  }

  DType dtype(const Array& array) {
    switch (array.dtype) {
      case ffi::DataType::F32:
        return DType::kFloat32;
      case ffi::DataType::F64:
        return DType::kFloat64;
      case ffi::DataType::C64:
        return DType::kComplex64;
      case ffi::DataType::C128:
        return DType::kComplex128;
      default:
        fail("unsupported element type");
        return DType::kFloat32;
    }
  }

  // The same with the storage formats.
  DType stored_dtype(const Array& array) {
    switch (array.dtype) {
      case ffi::DataType::F16:
        return DType::kFloat16;
      case ffi::DataType::BF16:
        return DType::kBFloat16;
      default:
        return dtype(array);
    }
  }

  void require(bool holds, const char* what) {
    if (!holds) fail(what);
  }

  BatchMap batch_map(const Array& operand, const Array& result) {
    BatchMap map;
    map.count = 0;
    if (operand.batch_rank != result.batch_rank) {
      fail("operand and result have different numbers of batch dimensions");
      return BatchMap{};
    }
    int64_t matrices = 1;
    for (size_t d = result.batch_rank; d-- > 0;) {
      const int64_t size = result.dims[d];
      if (operand.dims[d] != size && operand.dims[d] != 1) {
        fail("batch dimensions of operand and result do not broadcast");
        return BatchMap{};
      }
      if (size == 1) continue;
      const int64_t stride = operand.dims[d] == 1 ? 0 : matrices;
      matrices *= operand.dims[d];
      const bool merges = map.count > 0 && (stride == 0) == (map.stride[map.count - 1] == 0);
      if (merges) {
        map.size[map.count - 1] *= size;
      } else if (map.count == BatchMap::kMaxDims) {
        fail("more than 8 alternations of broadcast and full batch dimensions");
        return BatchMap{};
      } else {
        map.size[map.count] = size;
        map.stride[map.count++] = stride;
      }
    }
    if (map.count == 0) return BatchMap{};
    return map;
  }

 private:
  Array split(const ffi::AnyBuffer& buffer, size_t core_rank) {
    if (buffer.dimensions().size() < core_rank) return fail("an array has too few dimensions");
    return {buffer.untyped_data(), buffer.element_type(), buffer.dimensions(),
            buffer.dimensions().size() - core_rank};
  }

  Array fail(std::string what) {
    if (error_.success()) error_ = ffi::Error::InvalidArgument("jax_batched: " + std::move(what));
    return {};
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets results_;
  ffi::Dictionary attributes_;
  ffi::Error error_;
};

// parse<Problem>(call) fills a problem; call.error() says whether it holds. An empty matrix or
// right-hand side never reaches a handler (the Python side lowers those without a call); a batch
// may be empty.
template <class Problem>
Problem parse(CallReader& call);

template <>
inline CholeskyProblem parse<CholeskyProblem>(CallReader& call) {
  const auto a = call.operand(0, 2);
  const auto l = call.result(0, 2);
  const auto info = call.result(1, 0);
  CholeskyProblem p{};
  if (call.error().failure()) return p;
  p.dtype = call.stored_dtype(a);
  p.batch = l.batch_count();
  p.n = a.core(0);
  p.upper = call.attribute<bool>("upper");
  p.symmetrize = call.attribute<bool>("symmetrize");
  p.fast = call.attribute<std::string_view>("accuracy") == "fast";
  p.kernel = call.attribute<std::string_view>("kernel");
  p.a = a.data;
  p.l = l.data;
  p.info = static_cast<int32_t*>(info.data);
  call.require(p.n > 0, "empty matrices");
  call.require(a.core(1) == p.n && l.core(0) == p.n && l.core(1) == p.n, "matrices not square");
  call.require(a.batch_count() == p.batch && info.batch_count() == p.batch, "batch sizes differ");
  call.require(l.dtype == a.dtype && info.dtype == ffi::DataType::S32, "unexpected result types");
  return p;
}

template <>
inline TriangularSolveProblem parse<TriangularSolveProblem>(CallReader& call) {
  const auto a = call.operand(0, 2);
  const auto b = call.operand(1, 2);
  const auto x = call.result(0, 2);
  TriangularSolveProblem p{};
  if (call.error().failure()) return p;
  p.dtype = call.dtype(a);
  p.left_side = call.attribute<bool>("left_side");
  p.lower = call.attribute<bool>("lower");
  p.transpose = call.attribute<bool>("transpose_a");
  p.conjugate = call.attribute<bool>("conjugate_a");
  p.unit_diagonal = call.attribute<bool>("unit_diagonal");
  p.kernel = call.attribute<std::string_view>("kernel");
  p.batch = x.batch_count();
  p.n = a.core(0);
  p.nrhs = x.core(p.left_side ? 1 : 0);
  p.a = a.data;
  p.b = b.data;
  p.x = x.data;
  p.a_map = call.batch_map(a, x);
  p.b_map = call.batch_map(b, x);
  call.require(p.n > 0 && p.nrhs > 0, "empty matrices or right-hand sides");
  call.require(a.core(1) == p.n && x.core(p.left_side ? 0 : 1) == p.n, "sizes of A and X differ");
  call.require(b.core(0) == x.core(0) && b.core(1) == x.core(1), "sizes of B and X differ");
  call.require(b.dtype == a.dtype && x.dtype == a.dtype, "element types differ");
  return p;
}

template <>
inline ChoSolveProblem parse<ChoSolveProblem>(CallReader& call) {
  const auto c = call.operand(0, 2);
  const auto b = call.operand(1, 2);
  const auto x = call.result(0, 2);
  ChoSolveProblem p{};
  if (call.error().failure()) return p;
  p.dtype = call.dtype(c);
  p.lower = call.attribute<bool>("lower");
  p.kernel = call.attribute<std::string_view>("kernel");
  p.batch = x.batch_count();
  p.n = c.core(0);
  p.nrhs = x.core(1);
  p.c = c.data;
  p.b = b.data;
  p.x = x.data;
  p.c_map = call.batch_map(c, x);
  p.b_map = call.batch_map(b, x);
  call.require(p.n > 0 && p.nrhs > 0, "empty matrices or right-hand sides");
  call.require(c.core(1) == p.n && x.core(0) == p.n, "sizes of the factor and X differ");
  call.require(b.core(0) == x.core(0) && b.core(1) == x.core(1), "sizes of B and X differ");
  call.require(b.dtype == c.dtype && x.dtype == c.dtype, "element types differ");
  return p;
}

template <>
inline SolvePosProblem parse<SolvePosProblem>(CallReader& call) {
  const auto a = call.operand(0, 2);
  const auto b = call.operand(1, 2);
  const auto x = call.result(0, 2);
  const auto info = call.result(1, 0);
  SolvePosProblem p{};
  if (call.error().failure()) return p;
  p.dtype = call.stored_dtype(a);
  p.lower = call.attribute<bool>("lower");
  p.fast = call.attribute<std::string_view>("accuracy") == "fast";
  p.kernel = call.attribute<std::string_view>("kernel");
  p.batch = x.batch_count();
  p.n = a.core(0);
  p.nrhs = x.core(1);
  p.a = a.data;
  p.b = b.data;
  p.x = x.data;
  p.info = static_cast<int32_t*>(info.data);
  p.a_map = call.batch_map(a, x);
  p.b_map = call.batch_map(b, x);
  call.require(p.n > 0 && p.nrhs > 0, "empty matrices or right-hand sides");
  call.require(a.core(1) == p.n && x.core(0) == p.n, "sizes of A and X differ");
  call.require(b.core(0) == x.core(0) && b.core(1) == x.core(1), "sizes of B and X differ");
  call.require(b.dtype == a.dtype && x.dtype == a.dtype && info.dtype == ffi::DataType::S32,
               "element types differ");
  call.require(info.batch_count() == p.batch, "batch sizes differ");
  return p;
}

template <>
inline ResidualProblem parse<ResidualProblem>(CallReader& call) {
  const auto a = call.operand(0, 2);
  const auto scale = call.operand(1, 0);
  const auto x = call.operand(2, 2);
  const auto b = call.operand(3, 2);
  const auto r = call.result(0, 2);
  ResidualProblem p{};
  if (call.error().failure()) return p;
  p.dtype = call.dtype(a);
  const auto triangle = call.attribute<std::string_view>("triangle");
  p.triangle = triangle == "lower"   ? ResidualProblem::Triangle::kLower
               : triangle == "upper" ? ResidualProblem::Triangle::kUpper
                                     : ResidualProblem::Triangle::kNone;
  p.absolute = call.attribute<bool>("absolute");
  p.kernel = call.attribute<std::string_view>("kernel");
  p.batch = r.batch_count();
  p.m = a.core(0);
  p.n = a.core(1);
  p.nrhs = r.core(1);
  p.a = a.data;
  p.scale = scale.data;
  p.x = x.data;
  p.b = b.data;
  p.r = r.data;
  p.a_map = call.batch_map(a, r);
  p.scale_map = call.batch_map(scale, r);
  p.x_map = call.batch_map(x, r);
  p.b_map = call.batch_map(b, r);
  const bool wide = p.dtype == DType::kFloat64 || p.dtype == DType::kComplex128;
  call.require(p.m > 0 && p.n > 0 && p.nrhs > 0, "empty matrices or right-hand sides");
  call.require(triangle.empty() || p.triangle != ResidualProblem::Triangle::kNone,
               "triangle is not 'lower', 'upper' or empty");
  call.require(triangle.empty() || p.m == p.n, "Hermitian matrices that are not square");
  call.require(x.core(0) == p.n && x.core(1) == p.nrhs, "sizes of A and X differ");
  call.require(b.core(0) == p.m && b.core(1) == p.nrhs && r.core(0) == p.m,
               "sizes of A and B differ");
  call.require(x.dtype == a.dtype && b.dtype == a.dtype && r.dtype == a.dtype &&
                   scale.dtype == (wide ? ffi::DataType::F64 : ffi::DataType::F32),
               "unexpected element types");
  return p;
}

template <>
inline CholeskyPullbackProblem parse<CholeskyPullbackProblem>(CallReader& call) {
  const auto factor = call.operand(0, 2);
  const auto cotangent = call.operand(1, 2);
  const auto result = call.result(0, 2);
  CholeskyPullbackProblem p{};
  if (call.error().failure()) return p;
  p.dtype = call.dtype(factor);
  p.upper = call.attribute<bool>("upper");
  p.symmetrize = call.attribute<bool>("symmetrize");
  p.kernel = call.attribute<std::string_view>("kernel");
  p.batch = result.batch_count();
  p.n = factor.core(0);
  p.factor = factor.data;
  p.cotangent = cotangent.data;
  p.result = result.data;
  p.factor_map = call.batch_map(factor, result);
  p.cotangent_map = call.batch_map(cotangent, result);
  call.require(p.n > 0, "empty matrices");
  for (const auto& array : {factor, cotangent, result}) {
    call.require(array.core(0) == p.n && array.core(1) == p.n, "sizes differ");
    call.require(array.dtype == factor.dtype, "element types differ");
  }
  return p;
}

}  // namespace jax_batched
