// The element types of arrays, at run time and at compile time.
#pragma once

#include <string_view>
#include <utility>

#include "ffi/common/scalar.h"

namespace jax_batched {

// The last two are storage formats, of matrices that are computed in float32.
enum class DType { kFloat32, kFloat64, kComplex64, kComplex128, kFloat16, kBFloat16 };

// As JAX spells them.
inline constexpr std::pair<DType, std::string_view> kDTypeNames[] = {
    {DType::kFloat32, "float32"},     {DType::kFloat64, "float64"},
    {DType::kComplex64, "complex64"}, {DType::kComplex128, "complex128"},
    {DType::kFloat16, "float16"},     {DType::kBFloat16, "bfloat16"},
};
constexpr std::string_view name_of(DType wanted) {
  for (const auto& [dtype, name] : kDTypeNames) {
    if (dtype == wanted) return name;
  }
  return {};
}

constexpr bool is_storage_only(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}
constexpr bool is_double(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kComplex128;
}

template <class S>
inline constexpr DType kDTypeOf = DType::kFloat32;
template <>
inline constexpr DType kDTypeOf<double> = DType::kFloat64;
template <>
inline constexpr DType kDTypeOf<Complex<float>> = DType::kComplex64;
template <>
inline constexpr DType kDTypeOf<Complex<double>> = DType::kComplex128;
template <>
inline constexpr DType kDTypeOf<Float16> = DType::kFloat16;
template <>
inline constexpr DType kDTypeOf<BFloat16> = DType::kBFloat16;

// Calls f(T{}) with the element type of a dtype that is computed in: the one switch of every
// operation.
template <class F>
decltype(auto) with_element_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat64:
      return f(double{});
    case DType::kComplex64:
      return f(Complex<float>{});
    default:
      return f(Complex<double>{});
  }
}

// The same with the storage formats, for the operations that have kernels for them.
template <class F>
decltype(auto) with_stored_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(Float16{});
    case DType::kBFloat16:
      return f(BFloat16{});
    default:
      return with_element_type(dtype, f);
  }
}

}  // namespace jax_batched
