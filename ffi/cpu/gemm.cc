// X = op(A) op(B): tiles of X in registers, between packed rows of op(B) and columns of op(A).
#include "ffi/cpu/engine/blocked.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {
namespace {

// The columns of X are dealt out in panels that a tile covers; a panel of op(B) lies in k rows.
template <class T>
struct GemmScratch {
  static constexpr int64_t kWidth = kTileVectors<T> * kLanes<T>;

  T* a;  // kTileRows entries of each column of -op(A)
  Real<T>* panels;
  int64_t k;

  static int64_t panels_of(int64_t n) { return (n + kWidth - 1) / kWidth; }
  static int64_t a_bytes(int64_t k) { return round_up(k * kTileRows * sizeof(T), kVectorBytes); }
  static size_t bytes(int64_t n, int64_t k) {
    const int64_t row = SplitRows<T>{nullptr, kWidth}.pitch() * sizeof(Real<T>);
    return a_bytes(k) + panels_of(n) * k * row;
  }
  static GemmScratch in(void* memory, int64_t k) {
    auto* panels = reinterpret_cast<Real<T>*>(static_cast<char*>(memory) + a_bytes(k));
    return {static_cast<T*>(memory), panels, k};
  }
  SplitRows<T> panel(int64_t at) const {
    SplitRows<T> rows{panels, kWidth};
    rows.numbers += at * k * rows.pitch();
    return rows;
  }
};

// f(i, j, value) for entries of op(A), in the order in which they lie in memory.
template <class T, class F>
void for_each_entry(const GemmProblem::Operand& of, const T* data, int64_t lead, int64_t first_row,
                    int64_t end_row, int64_t columns, const F& f) {
  const auto value = [&](const T* at) { return of.conjugated ? conj(*at) : *at; };
  if (of.transposed) {
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t i = first_row; i < end_row; ++i) f(i, j, value(data + j * lead + i));
    }
  } else {
    for (int64_t i = first_row; i < end_row; ++i) {
      for (int64_t j = 0; j < columns; ++j) f(i, j, value(data + i * lead + j));
    }
  }
}

template <class T>
void pack_panels(const GemmProblem& p, const GemmProblem::Sizes& own, const T* b,
                 const GemmScratch<T>& scratch) {
  constexpr int64_t width = GemmScratch<T>::kWidth;
  for_each_entry(p.b, b, p.b.transposed ? p.k : p.n, 0, own.k, own.n,
                 [&](int64_t l, int64_t j, T value) {
                   const SplitRows<T> panel = scratch.panel(j / width);
                   panel.set(panel.row(l), j % width, value);
                 });
  const int64_t last = own.n / width;
  for (int64_t l = 0; own.n % width != 0 && l < own.k; ++l) {
    const SplitRows<T> panel = scratch.panel(last);
    for (int64_t j = own.n % width; j < width; ++j) panel.set(panel.row(l), j, T(0));
  }
}

template <class T>
void pack_rows(const GemmProblem& p, const GemmProblem::Sizes& own, const T* a, int64_t first,
               int64_t rows, T* to) {
  for_each_entry(p.a, a, p.a.transposed ? p.m : p.k, first, first + rows, own.k,
                 [&](int64_t i, int64_t l, T value) { to[l * kTileRows + i - first] = -value; });
  for (int64_t l = 0; rows < kTileRows && l < own.k; ++l) {
    for (int64_t r = rows; r < kTileRows; ++r) to[l * kTileRows + r] = T(0);
  }
}

// x = sum_l a_l b_l^T for kTileRows rows and a panel; a holds -op(A).
template <class T>
void multiply_tile(const T* a, const SplitRows<T>& b, int64_t k, const SplitRows<T>& x) {
  constexpr int vectors = kTileVectors<T>;
  Lanes<T> sum[kTileRows][vectors];
  unrolled<kTileRows>([&](auto r) JAX_BATCHED_INLINED {
    unrolled<vectors>([&](auto v) JAX_BATCHED_INLINED { sum[r][v] = broadcast(T(Real<T>(0))); });
  });
  for (int64_t l = 0; l < k; ++l) {
    Lanes<T> right[vectors];
    unrolled<vectors>([&](auto v)
                          JAX_BATCHED_INLINED { right[v] = b.load(b.row(l), v * kLanes<T>); });
    unrolled<kTileRows>([&](auto r) JAX_BATCHED_INLINED {
      const Lanes<T> left = broadcast(a[l * kTileRows + r]);
      unrolled<vectors>(
          [&](auto v) JAX_BATCHED_INLINED { sum[r][v] = sub_mul(sum[r][v], left, right[v]); });
    });
  }
  unrolled<kTileRows>([&](auto r) JAX_BATCHED_INLINED {
    unrolled<vectors>([&](auto v)
                          JAX_BATCHED_INLINED { x.store(x.row(r), v * kLanes<T>, sum[r][v]); });
  });
}

template <class T>
void gemm_of(const GemmProblem& p, int64_t index, void* memory) {
  constexpr int64_t width = GemmScratch<T>::kWidth;
  const GemmProblem::Sizes own = p.sizes_of(p.sizes.at<const int32_t>(index, 3));
  T* x = p.x.at<T>(index, p.m, p.n);
  std::fill(x, x + int64_t{p.m} * p.n, own.valid ? T(0) : quiet_nan<T>());
  if (!own.valid) return;
  const auto scratch = GemmScratch<T>::in(memory, own.k);
  pack_panels(p, own, p.b.view.at<const T>(index, p.k, p.n), scratch);
  const T* a = p.a.view.at<const T>(index, p.m, p.k);
  alignas(kVectorBytes) Real<T> numbers[kTileRows * (width * kParts<T> + 64)];
  const SplitRows<T> tile{numbers, width};
  for (int64_t i = 0; i < own.m; i += kTileRows) {
    const int64_t rows = std::min<int64_t>(kTileRows, own.m - i);
    pack_rows(p, own, a, i, rows, scratch.a);
    for (int64_t j = 0; j < own.n; j += width) {
      const int64_t columns = std::min<int64_t>(width, own.n - j);
      if (p.is_outside(i, i + rows, j, j + columns)) continue;
      multiply_tile(scratch.a, scratch.panel(j / width), own.k, tile);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          if (!p.is_outside(i + r, j + c)) x[(i + r) * p.n + j + c] = tile.get(tile.row(r), c);
        }
      }
    }
  }
}

}  // namespace

template <>
Kernel<GemmProblem> kernel() {
  const auto run = [](const GemmProblem& p, int64_t begin, int64_t end, void* scratch) {
    with_element_type(p.dtype, [&](auto t) {
      for (int64_t index = begin; index < end; ++index) gemm_of<decltype(t)>(p, index, scratch);
    });
  };
  const auto scratch_bytes = [](const GemmProblem& p) {
    return with_element_type(
        p.dtype, [&](auto t) -> size_t { return GemmScratch<decltype(t)>::bytes(p.n, p.k); });
  };
  return {run, scratch_bytes};
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
