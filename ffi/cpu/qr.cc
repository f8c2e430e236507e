#include "ffi/cpu/engine/qr_blocked.h"
#include "ffi/cpu/engine/tiers.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {
namespace {

int64_t reflections(const QrProblem& p) { return p.reflections(); }
template <class P>
int64_t reflections(const P& p) {
  return p.k;
}

// Columns of what is multiplied with Q, or formed.
int64_t columns(const QrProblem& p) { return p.q_columns(); }
int64_t columns(const HouseholderProductProblem& p) { return p.n; }
int64_t columns(const QrMultiplyProblem& p) { return p.nrhs; }

// Whether groups are computed as such at all: of more reflections than a panel has they are not.
template <class P>
bool is_group(const P& p) {
  return reflections(p) <= kQrPanel;
}

// Matrices of a group, to and from scratch with rows `pitch` entries apart.
template <class T>
void load_group(const MatrixView<Mapped>& from, int64_t rows, int64_t columns, int64_t m,
                int64_t end, Lanes<T>* to, int64_t pitch) {
  auto group = group_of<T>(from, rows * columns, m, end);
  if (pitch == columns) return pack(group, rows * columns * kParts<T>, numbers(to));
  for (int64_t i = 0; i < rows; ++i) {
    pack(group, columns * kParts<T>, numbers(to + i * pitch));
    for (const Real<T>*& lane : group.lane) lane += columns * kParts<T>;
  }
}
template <class T>
void store_group(Lanes<T>* from, int64_t pitch, const MatrixView<Packed>& to, int64_t rows,
                 int64_t columns, int64_t m, int64_t end) {
  auto group = group_of<T>(to, rows * columns, m, end);
  if (pitch == columns) return unpack(numbers(from), rows * columns * kParts<T>, group);
  for (int64_t i = 0; i < rows; ++i) {
    unpack(numbers(from + i * pitch), columns * kParts<T>, group);
    for (Real<T>*& lane : group.lane) lane += columns * kParts<T>;
  }
}
template <class T, class P>
void load_reflections(const P& p, const QrGroup<T>& g, int64_t m, int64_t end) {
  load_group<T>(p.a, g.m, g.n, m, end, g.a, g.pitch);
  load_group<T>(p.taus, 1, g.k, m, end, g.taus, g.k);
}

template <class T>
void run_group(const QrProblem& p, const QrGroup<T>& g, int64_t m, int64_t end) {
  load_group<T>(p.a, g.m, g.n, m, end, g.a, g.pitch);
  const auto finite = g.factor();
  const bool spoilt = any(~finite);
  if (p.has_q()) {
    g.form();
    if (spoilt) spoil<T>(finite, g.c, g.m * g.pitch_c);
    store_group<T>(g.c, g.pitch_c, p.q, g.m, g.columns, m, end);
  }
  if (p.mode == QrProblem::kRaw) {
    if (spoilt) {
      spoil<T>(finite, g.a, g.m * g.pitch);
      spoil<T>(finite, g.taus, g.k);
    }
    store_group<T>(g.taus, g.k, p.taus, 1, g.k, m, end);
  } else {
    for (int64_t i = 0; i < p.r_rows(); ++i) {
      Lanes<T>* row = g.a + i * g.pitch;
      const int64_t zeros = std::min(i, g.n);
      std::fill(row, row + zeros, broadcast(T(Real<T>(0))));
      if (spoilt) spoil<T>(finite, row + zeros, g.n - zeros);
    }
  }
  store_group<T>(g.a, g.pitch, p.r, p.r_rows(), g.n, m, end);
}
template <class T>
void run_group(const HouseholderProductProblem& p, const QrGroup<T>& g, int64_t m, int64_t end) {
  load_reflections(p, g, m, end);
  g.form();
  store_group<T>(g.c, g.pitch_c, p.q, g.m, g.columns, m, end);
}
template <class T>
void run_group(const QrMultiplyProblem& p, const QrGroup<T>& g, int64_t m, int64_t end) {
  load_reflections(p, g, m, end);
  load_group<T>(p.c, g.m, g.columns, m, end, g.c, g.pitch_c);
  g.multiply(p.adjoint);
  store_group<T>(g.c, g.pitch_c, p.x, g.m, g.columns, m, end);
}

// The same of one matrix.
template <class T>
void run_one(const QrProblem& p, const QrMatrix<T>& g, int64_t index) {
  load(p.a.at<const T>(index, g.m, g.n), g.m, g.n, g.a);
  const bool finite = g.factor();
  T* r = p.r.at<T>(index, p.r_rows(), g.n);
  T* q = p.has_q() ? p.q.at<T>(index, g.m, g.columns) : nullptr;
  if (q != nullptr && finite) {
    g.form();
    store(g.c, g.m, g.columns, q);
  } else if (q != nullptr) {
    std::fill(q, q + g.m * g.columns, quiet_nan<T>());
  }
  store(g.a, p.r_rows(), g.n, r);
  if (!finite) std::fill(r, r + p.r_rows() * g.n, quiet_nan<T>());
  if (p.mode == QrProblem::kRaw) {
    T* taus = p.taus.at<T>(index, g.k);
    store(g.taus, 1, g.k, taus);
    if (!finite) std::fill(taus, taus + g.k, quiet_nan<T>());
    return;
  }
  for (int64_t i = 1; i < p.r_rows(); ++i) {
    std::fill(r + i * g.n, r + i * g.n + std::min(i, g.n), T(Real<T>(0)));
  }
}
template <class T>
void run_one(const HouseholderProductProblem& p, const QrMatrix<T>& g, int64_t index) {
  load(p.a.at<const T>(index, g.m, g.n), g.m, g.n, g.a);
  load(p.taus.at<const T>(index, g.k), 1, g.k, g.taus);
  g.form();
  store(g.c, g.m, g.columns, p.q.at<T>(index, g.m, g.columns));
}
template <class T>
void run_one(const QrMultiplyProblem& p, const QrMatrix<T>& g, int64_t index) {
  load(p.a.at<const T>(index, g.m, g.n), g.m, g.n, g.a);
  load(p.taus.at<const T>(index, g.k), 1, g.k, g.taus);
  load(p.c.at<const T>(index, g.m, g.columns), g.m, g.columns, g.c);
  g.multiply(p.adjoint);
  store(g.c, g.m, g.columns, p.x.at<T>(index, g.m, g.columns));
}

template <class P>
struct QrKernels {
  static constexpr Tiers kTiers{
      {{16, 45}, {96, 77}},
      {{16, 55}, {64, 75}},
      {{16, 75}, {28, 85}},
      {{12, 85}, {20, 95}},
  };
  // By which the tiers choose: of what lies in a group's scratch.
  static int64_t tier_size(const P& p) {
    const int64_t wide = std::max<int64_t>(p.n, columns(p));
    return is_group(p) ? static_cast<int64_t>(std::sqrt(double(p.m) * double(wide))) : P::kMaxN;
  }
  template <class T>
  static size_t group_bytes(const P& p) {
    return is_group(p) ? QrGroup<T>::bytes(p.m, p.n, reflections(p), columns(p)) : 0;
  }
  template <class T>
  static size_t blocked_bytes(const P& p) {
    return QrMatrix<T>::bytes(p.m, p.n, reflections(p), columns(p));
  }

  template <class T>
  static void lanes(const P& p, int64_t begin, int64_t end, void* scratch) {
    if (!is_group(p)) return blocked<T>(p, begin, end, scratch);
    const auto g = QrGroup<T>::in(scratch, p.m, p.n, reflections(p), columns(p));
    for (int64_t m = begin; m < end; m += kLanes<T>) run_group(p, g, m, end);
  }
  template <class T>
  static void blocked(const P& p, int64_t begin, int64_t end, void* scratch) {
    const auto g = QrMatrix<T>::in(scratch, p.m, p.n, reflections(p), columns(p));
    for (int64_t m = begin; m < end; ++m) run_one(p, g, m);
  }
};

}  // namespace

template <>
Kernel<QrProblem> kernel() {
  return tiered_kernel<QrProblem, QrKernels<QrProblem>>();
}
template <>
Kernel<HouseholderProductProblem> kernel() {
  return tiered_kernel<HouseholderProductProblem, QrKernels<HouseholderProductProblem>>();
}
template <>
Kernel<QrMultiplyProblem> kernel() {
  return tiered_kernel<QrMultiplyProblem, QrKernels<QrMultiplyProblem>>();
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
