// From an XLA FFI call to a problem struct: shapes, dtypes and attributes, checked once for both
// platforms. Host code only; includes the XLA FFI header.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>

#include "ffi/common/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jax_batched {

namespace ffi = xla::ffi;

// Reads results, operands and attributes in words; the first fault is kept and ends the call.
// Operands and results come in their order, results first: the first one says what the batch and
// the element type are. A size that is 0 is taken from the array, another one has to be the
// array's. An empty matrix or right-hand side never reaches a handler (the Python side lowers those
// without a call); a batch may be empty.
class CallReader {
 public:
  CallReader(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes)
      : args_(args), results_(results), attributes_(attributes) {}

  // The whole problem; error() says whether it holds.
  template <class P>
  P read() {
    operation_ = P::kName;
    P p = P::read(*this);
    p.dtype = dtype_of(first_.dtype, P::kTakesStored);
    p.batch = first_.batch_count();
    p.kernel = attribute<std::string_view>("kernel");
    if (next_operand_ < args_.size()) {  // the mask, if there is one, comes last
      const Array where = next_operand("where", 0);
      check_dtype("where", where, ffi::DataType::PRED);
      where_ = view("where", where);
    }
    if constexpr (requires { p.where; }) p.where = where_;
    return p;
  }
  const ffi::Error& error() const { return error_; }
  const Results& results() const { return read_results_; }
  // Of each matrix, whether it is computed; without data: all are.
  const MatrixView<Mapped>& where() const { return where_; }

  template <class Rows, class Columns>
  MatrixView<Packed> result(const char* name, Rows& rows, Columns& columns) {
    const Array array = next_result(name, 2);
    if (next_result_ == 1) first_ = array;
    check_sizes(name, array, rows, columns);
    check_dtype(name, array, first_.dtype);
    return packed(view(name, array));
  }
  // A number of each matrix, of the first result's type, or a real one.
  MatrixView<Packed> scalar(const char* name) {
    const Array array = next_result(name, 0);
    if (next_result_ == 1) first_ = array;
    check_dtype(name, array, first_.dtype);
    return packed(view(name, array));
  }
  MatrixView<Packed> real_scalar_result(const char* name) {
    const Array array = next_result(name, 0);
    check_dtype(name, array, real_dtype());
    return packed(view(name, array));
  }
  // `size` numbers of each matrix, of the first result's type.
  MatrixView<Packed> vector_result(const char* name, int64_t size) {
    return packed(vector(name, next_result(name, 1), size));
  }
  // `size` real numbers of each matrix; a size that is 0 is taken from the array.
  MatrixView<Packed> real_vector_result(const char* name, int& size) {
    const Array array = next_result(name, 1);
    if (next_result_ == 1) {  // then the first operand says what the element type is
      first_ = array;
      const auto data = args_.get<ffi::AnyBuffer>(0);
      if (data.has_value()) first_.dtype = data->element_type();
    }
    if (size == 0) size = static_cast<int>(array.core(0));
    require(size > 0, "an empty result");
    check_size(name, array, size);
    check_dtype(name, array, real_dtype());
    return packed(view(name, array));
  }
  // An integer of each matrix, and `size` of them.
  int32_t* info() {
    const Array array = next_result("info", 0);
    if (error_.success()) read_results_.result[read_results_.count - 1].is_info = true;
    return integers("info", array);
  }
  int32_t* integers(const char* name, int64_t size) {
    const Array array = next_result(name, 1);
    check_size(name, array, size);
    return integers(name, array);
  }

  template <class Rows, class Columns>
  MatrixView<Mapped> matrix(const char* name, Rows& rows, Columns& columns) {
    const Array array = next_operand(name, 2);
    check_sizes(name, array, rows, columns);
    check_dtype(name, array, first_.dtype);
    return view(name, array);
  }
  MatrixView<Mapped> square(const char* name, int& n) { return matrix(name, n, n); }
  // Numbers of each matrix; a size that is 0 is taken from the array.
  MatrixView<Mapped> vector(const char* name, int64_t& size) {
    const Array array = next_operand(name, 1);
    if (size == 0) size = array.core(0);
    return vector(name, array, size);
  }
  // A real number of each matrix.
  MatrixView<Mapped> real_scalar(const char* name) {
    const Array array = next_operand(name, 0);
    check_dtype(name, array, real_dtype());
    return view(name, array);
  }
  // An integer of each matrix.
  MatrixView<Mapped> integer(const char* name) {
    const Array array = next_operand(name, 0);
    check_dtype(name, array, ffi::DataType::S32);
    return view(name, array);
  }
  // `size` integers of each matrix.
  MatrixView<Mapped> integer_vector(const char* name, int64_t size) {
    const Array array = next_operand(name, 1);
    check_size(name, array, size);
    check_dtype(name, array, ffi::DataType::S32);
    return view(name, array);
  }
  // For kernels that take no broadcast operand, unless they have the call's map for the last one.
  MatrixView<Packed> packed(const MatrixView<Mapped>& view) {
    map_ = view.layout.map;
    require(takes_map_ || view.contiguous() || first_.batch_count() == 0, "a broadcast array");
    return {view.data, {}};
  }
  // What f() reads may be broadcast; returns how the last operand is that f() takes as packed.
  template <class F>
  BatchMap with_map(F&& f) {
    takes_map_ = true;
    f();
    takes_map_ = false;
    return map_;
  }

  bool flag(const char* name) { return attribute<bool>(name); }
  // Which of the allowed values an attribute has.
  int choice(const char* name, std::initializer_list<std::string_view> allowed) {
    const auto given = attribute<std::string_view>(name);
    const auto found = std::find(allowed.begin(), allowed.end(), given);
    if (found != allowed.end()) return static_cast<int>(found - allowed.begin());
    std::string what = std::string(name) + "='" + std::string(given) + "', allowed are";
    for (const std::string_view& value : allowed) {
      what += (&value == allowed.begin() ? " '" : ", '") + std::string(value) + "'";
    }
    fail(what);
    return 0;
  }

  void require(bool holds, const char* what) {
    if (!holds) fail(what);
  }

 private:
  // One operand or result: its buffer split into batch dimensions and `core_rank` trailing ones.
  struct Array {
    void* data = nullptr;
    ffi::DataType dtype = ffi::DataType::INVALID;
    ffi::AnyBuffer::Dimensions dims;
    size_t batch_rank = 0;

    int64_t core(size_t i) const { return batch_rank + i < dims.size() ? dims[batch_rank + i] : 0; }
    int64_t batch_count() const {
      int64_t count = 1;
      for (size_t d = 0; d < batch_rank; ++d) count *= dims[d];
      return count;
    }
  };

  void check_size(const char* name, const Array& array, int64_t size) {
    if (array.core(0) == size) return;
    fail(std::string(name) + ": " + std::to_string(array.core(0)) + " in place of " +
         std::to_string(size));
  }
  MatrixView<Mapped> vector(const char* name, const Array& array, int64_t size) {
    check_size(name, array, size);
    check_dtype(name, array, first_.dtype);
    return view(name, array);
  }
  int32_t* integers(const char* name, const Array& array) {
    check_dtype(name, array, ffi::DataType::S32);
    packed(view(name, array));
    return static_cast<int32_t*>(array.data);
  }
  ffi::DataType real_dtype() const {
    const bool wide = first_.dtype == ffi::DataType::F64 || first_.dtype == ffi::DataType::C128;
    return wide ? ffi::DataType::F64 : ffi::DataType::F32;
  }

  template <class T>
  T attribute(const char* name) {
    auto value = attributes_.get<T>(name);
    if (value.has_value()) return *value;
    fail("attribute '" + std::string(name) + "' is missing or of another type");
    return T{};
  }

  Array next_operand(const char* name, size_t core_rank) {
    auto buffer = args_.get<ffi::AnyBuffer>(next_operand_++);
    if (buffer.has_value()) return split(name, *buffer, core_rank);
    fail(std::string(name) + ": operand is missing");
    return {};
  }
  Array next_result(const char* name, size_t core_rank) {
    auto buffer = results_.get<ffi::AnyBuffer>(next_result_++);
    if (buffer.has_value() && read_results_.count < Results::kMax) {
      const Array array = split(name, **buffer, core_rank);
      const int64_t matrices = std::max<int64_t>(1, array.batch_count());
      const int64_t bytes = static_cast<int64_t>((*buffer)->size_bytes()) / matrices;
      read_results_.result[read_results_.count++] = {array.data, bytes, /*is_info=*/false};
      return array;
    }
    fail(std::string(name) + ": result is missing, or there are more than are known of");
    return {};
  }
  Array split(const char* name, const ffi::AnyBuffer& buffer, size_t core_rank) {
    const size_t rank = buffer.dimensions().size();
    if (rank >= core_rank) {
      return {buffer.untyped_data(), buffer.element_type(), buffer.dimensions(), rank - core_rank};
    }
    fail(std::string(name) + ": too few dimensions");
    return {};
  }

  template <class Rows, class Columns>
  void check_sizes(const char* name, const Array& array, Rows& rows, Columns& columns) {
    const int64_t r = array.core(0), c = array.core(1);
    if (rows == 0) rows = static_cast<Rows>(r);
    if (columns == 0) columns = static_cast<Columns>(c);
    if (r == rows && c == columns) {
      if (r == 0 || c == 0) fail(std::string(name) + ": empty");
      return;
    }
    fail(std::string(name) + ": " + std::to_string(r) + " x " + std::to_string(c) +
         " in place of " + std::to_string(rows) + " x " + std::to_string(columns));
  }

  void check_dtype(const char* name, const Array& array, ffi::DataType expected) {
    if (array.dtype != expected) fail(std::string(name) + ": unexpected element type");
  }
  DType dtype_of(ffi::DataType dtype, bool stored_too) {
    switch (dtype) {
      case ffi::DataType::F32:
        return DType::kFloat32;
      case ffi::DataType::F64:
        return DType::kFloat64;
      case ffi::DataType::C64:
        return DType::kComplex64;
      case ffi::DataType::C128:
        return DType::kComplex128;
      case ffi::DataType::F16:
        if (stored_too) return DType::kFloat16;
        break;
      case ffi::DataType::BF16:
        if (stored_too) return DType::kBFloat16;
        break;
      default:
        break;
    }
    fail("unsupported element type");
    return DType::kFloat32;
  }

  // How an operand's batch dimensions broadcast to the first result's.
  MatrixView<Mapped> view(const char* name, const Array& array) {
    BatchMap map;
    map.count = 0;
    if (array.batch_rank != first_.batch_rank) {
      fail(std::string(name) + ": another number of batch dimensions than the result");
      return {};
    }
    int64_t matrices = 1;
    for (size_t d = first_.batch_rank; d-- > 0;) {
      const int64_t size = first_.dims[d];
      if (array.dims[d] != size && array.dims[d] != 1) {
        fail(std::string(name) + ": batch dimensions do not broadcast to the result's");
        return {};
      }
      if (size == 1) continue;
      const int64_t stride = array.dims[d] == 1 ? 0 : matrices;
      matrices *= array.dims[d];
      const bool merges = map.count > 0 && (stride == 0) == (map.stride[map.count - 1] == 0);
      if (merges) {
        map.size[map.count - 1] *= size;
      } else if (map.count == BatchMap::kMaxDims) {
        fail(std::string(name) +
             ": more than 8 alternations of broadcast and full batch dimensions");
        return {};
      } else {
        map.size[map.count] = size;
        map.stride[map.count++] = stride;
      }
    }
    if (map.count == 0) map = BatchMap{};
    return {array.data, {map}};
  }

  void fail(std::string what) {
    if (error_.success()) {
      error_ = ffi::Error::InvalidArgument("jax_batched." + std::string(operation_) + ": " +
                                           std::move(what));
    }
  }

  std::string_view operation_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets results_;
  ffi::Dictionary attributes_;
  size_t next_operand_ = 0, next_result_ = 0;
  Results read_results_;
  MatrixView<Mapped> where_{};
  bool takes_map_ = false;
  BatchMap map_;
  Array first_;  // the first result
  ffi::Error error_;
};

}  // namespace jax_batched
