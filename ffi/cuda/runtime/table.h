// The compiled kernels of an operation as data: a table of rows, one kernel each. A launcher
// compiles the kernels that its table names, no others: to try another shape, add or edit a row.
//
// Of the rows that can serve a call, the one that was measured to be the fastest serves (tuned.h);
// where nothing was measured, the first. Nothing here depends on the batch count: a matrix has the
// same result in any batch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

#include "ffi/common/dtype.h"
#include "ffi/cuda/runtime/tuned.h"

namespace jax_batched::cuda {

// What a family knows of an operation without CUDA: specialised in the policy.h of each family for
// its problems, with
//   for_each_kernel(f)   f(KernelRow) for the compiled kernels among which there is a choice
//   chosen(call)         the name of the one that serves a call
//   for_each_limit(f)    f(Limit): the sizes that one kernel serves on every GPU
template <class P>
struct Policy;

// A compiled kernel and the calls that it can serve.
struct KernelRow {
  DType dtype;
  std::string kernel;
  int64_t min_n;
  int64_t max_n;
  int capability = 0;
  bool fast = false;
};

struct Limit {
  DType dtype;
  int64_t max_n;
  int64_t max_nrhs = kAny;
};

// When a row serves.
struct Only {
  std::string_view variant = "";  // tells apart rows of one kernel whose ranges overlap
  int capability = 0;             // needs a GPU of this compute capability or a later one
  bool fast = false;              // accuracy="fast" alone
  int64_t rows = kAny;            // at most so many, of matrices that need not be square
};

// Shape: a std::variant of the shapes of an operation's kernels, each with the kernel's name as
// kName. Rows of dtype kFloat16 are of 16-bit elements in either format.
template <class Shape>
struct Row {
  DType dtype;
  int min_n;
  int max_n;
  Shape shape;
  Only only = {};

  constexpr std::string_view kernel() const {
    return std::visit([](const auto& of) { return of.kName; }, shape);
  }
  std::string name() const {
    std::string name(kernel());
    if (!only.variant.empty()) name.append(".").append(only.variant);
    return name;
  }
  // Whether `name` selects this row: "warp", or "warp.wide" for the variant "wide".
  constexpr bool has_name(std::string_view name) const {
    const std::string_view base = kernel(), variant = only.variant;
    if (variant.empty()) return name == base;
    return name.size() == base.size() + 1 + variant.size() && name.substr(0, base.size()) == base &&
           name[base.size()] == '.' && name.substr(base.size() + 1) == variant;
  }
  constexpr bool serves(const Call& call) const {
    return dtype == call.dtype && min_n <= call.n && call.n <= max_n &&
           only.capability <= call.capability && (call.fast || !only.fast) &&
           call.rows() <= only.rows;
  }
  // The largest square matrix.
  constexpr int64_t largest_n() const { return only.rows < max_n ? only.rows : max_n; }
};

inline constexpr int64_t kNoRow = -1;

// The first row that serves a call, of those with this name if it is not empty; else kNoRow.
template <class Table>
constexpr int64_t first_row(const Table& table, const Call& call, std::string_view name) {
  for (size_t row = 0; row < std::size(table); ++row) {
    if (table[row].serves(call) && (name.empty() || table[row].has_name(name))) {
      return static_cast<int64_t>(row);
    }
  }
  return kNoRow;
}

// The row that serves a call: with `name` not empty the one that it selects, else the tuned one or,
// where nothing was measured, as of rectangles, the first. kNoRow if there is none. "fast" is
// measured where a row serves it alone; elsewhere, and where it was not measured and no such row
// comes first, it is served as "ieee" is.
template <class Table, class Tuned>
constexpr int64_t find_row(const Table& table, const Tuned& tuned, const Call& call,
                           std::string_view name) {
  if (!name.empty()) return first_row(table, call, name);
  const std::string_view kernel = call.rows() == call.n ? tuned_kernel(tuned, call) : "";
  const int64_t row = kernel.empty() ? kNoRow : first_row(table, call, kernel);
  if (row != kNoRow) return row;
  const int64_t first = first_row(table, call, {});
  if (!call.fast || first == kNoRow || table[first].only.fast) return first;
  Call ieee = call;
  ieee.fast = false;
  return find_row(table, tuned, ieee, {});
}

// Whether a name selects at most one row for any call, or of two the one for fewer rows first.
template <class Table>
constexpr bool names_are_distinct(const Table& table) {
  for (size_t i = 0; i < std::size(table); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (table[i].dtype == table[j].dtype && table[i].kernel() == table[j].kernel() &&
          table[i].only.variant == table[j].only.variant && table[i].min_n <= table[j].max_n &&
          table[j].min_n <= table[i].max_n && table[i].only.rows <= table[j].only.rows) {
        return false;
      }
    }
  }
  return true;
}

// The largest n of the rows of a dtype that serve on every GPU.
template <class Table>
constexpr int64_t largest_n(const Table& table, DType dtype) {
  int64_t largest = 0;
  for (const auto& row : table) {
    if (row.dtype == table_dtype(dtype) && row.only.capability == 0 && row.max_n > largest) {
      largest = row.max_n;
    }
  }
  return largest;
}

// The part of a Policy that a table gives.
template <const auto& kTable>
struct TablePolicy {
  template <class F>
  static void for_each_kernel(F&& f) {
    for (const auto& row : kTable) {
      f(KernelRow{row.dtype, row.name(), row.min_n, row.largest_n(), row.only.capability,
                  row.only.fast});
    }
  }
  static std::string chosen(const Call& call) {
    const int64_t row = find_row(kTable, tuned_rows(), call, {});
    return row == kNoRow ? "" : kTable[row].name();
  }
};

// Of an operation whose launcher has no choice.
struct OneKernelPolicy {
  template <class F>
  static void for_each_kernel(F&&) {}
  static std::string chosen(const Call&) { return ""; }
};

}  // namespace jax_batched::cuda
