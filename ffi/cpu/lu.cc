#include "ffi/cpu/engine/logarithm.h"
#include "ffi/cpu/engine/lu_blocked.h"
#include "ffi/cpu/engine/lu_fixed.h"
#include "ffi/cpu/engine/tiers.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {
namespace {

int64_t rows(const LuProblem& p) { return p.m; }
template <class P>
int64_t rows(const P& p) {
  return p.n;
}

// The right-hand sides of a matrix: those of the problem, of an inverse the identity's columns.
int64_t columns(const SolveGenProblem& p) { return p.nrhs; }
int64_t columns(const InvProblem& p) { return p.n; }
template <class P>
int64_t columns(const P&) {
  return 0;
}

template <class T>
T right_hand_side(const SolveGenProblem& p, int64_t m, int64_t row, int64_t column) {
  return p.b.at<const T>(m, p.n, p.nrhs)[row * p.nrhs + column];
}
template <class T>
T right_hand_side(const InvProblem&, int64_t, int64_t row, int64_t column) {
  return T(Real<T>(row == column ? 1 : 0));
}

// Solves with the factors of a group, the right-hand sides in the order of the exchanges, and
// stores; NaN where the factorization failed.
template <class T, class P>
void finish_group(const P& p, const LuGroup<T>& g, Simd<Real<T>> info, int64_t m, int64_t end) {
  const int64_t n = p.n, nrhs = columns(p);
  const GroupMatrix<T> f{g.f, n};
  Lanes<T>* y = g.end();
  for (int l = 0; l < kLanes<T>; ++l) {
    const int64_t matrix = std::min(m + l, end - 1);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t r = 0; r < nrhs; ++r) {
        const T value = right_hand_side<T>(p, matrix, g.row_at[i][l], r);
        Real<T>* to = reinterpret_cast<Real<T>*>(y + i * nrhs + r) + l;
        if constexpr (kIsComplex<T>) {
          to[0] = value.re;
          to[kLanes<T>] = value.im;
        } else {
          *to = value;
        }
      }
    }
  }
  substitute_group(lower_system(n, nrhs, true, true, false, false), f, y, nrhs, true);
  substitute_group(lower_system(n, nrhs, true, false, false, false), f, y, nrhs, false);
  if (store_info(info, p.info, m, end)) {
    for (int64_t e = 0; e < n * nrhs; ++e) spoil_failed(info, &y[e]);
  }
  unpack(numbers(y), n * nrhs * kParts<T>, group_of<T>(p.x, n * nrhs, m, end));
}

// Integers of each lane to those of its own matrix; of 32 bits many at a time, as if they were
// numbers.
template <class T>
void store_indices(const typename LuGroup<T>::Indices* from, int64_t count, int32_t* to, int64_t m,
                   int64_t end) {
  using R = Real<T>;
  if constexpr (sizeof(R) == sizeof(int32_t)) {
    if (count >= kLanes<T>) {
      const auto lane = [&](int l) JAX_BATCHED_INLINED {
        return reinterpret_cast<R*>(to + std::min(m + l, end - 1) * count);
      };
      for_each_square<R>(0, count, count, [&](int64_t at) {
        Square<R> square;
        unrolled<kLanes<T>>([&](auto l) JAX_BATCHED_INLINED {
          square.row[l] = Simd<R>::load(reinterpret_cast<const R*>(from + at + l)).v;
        });
        square.store_transposed([&](int l) JAX_BATCHED_INLINED { return lane(l) + at; });
      });
      return;
    }
  }
  for (int64_t l = 0; l < kLanes<T> && m + l < end; ++l) {
    for (int64_t i = 0; i < count; ++i) {
      to[(m + l) * count + i] = static_cast<int32_t>(from[i][l]);
    }
  }
}

template <class T>
void finish_group(const LuProblem& p, const LuGroup<T>& g, Simd<Real<T>> info, int64_t m,
                  int64_t end) {
  store_info(info, p.info, m, end);
  store_indices<T>(g.pivots, std::min(p.m, p.n), p.pivots, m, end);
  store_indices<T>(g.row_at, p.m, p.permutation, m, end);
  const int64_t row_numbers = p.n * kParts<T>;
  const GroupPointers<Real<T>> out = group_of<T>(p.lu, int64_t{p.m} * p.n, m, end);
  for (int64_t i = 0; i < p.m; ++i) {
    GroupPointers<Real<T>> row = out;
    for (Real<T>*& lane : row.lane) lane += i * row_numbers;
    unpack(numbers(g.f + i * g.pitch), row_numbers, row);
  }
}

JAX_BATCHED_INLINE Simd<float> larger_part(Simd<float> x) { return absolute(x); }
JAX_BATCHED_INLINE Simd<double> larger_part(Simd<double> x) { return absolute(x); }
template <class R>
JAX_BATCHED_INLINE Simd<R> larger_part(Complex<Simd<R>> x) {
  const Simd<R> re = absolute(x.re), im = absolute(x.im);
  return select(re.v < im.v, im, re);
}

// A product as mantissa * 2^exponent, which neither overflows nor underflows on the way.
template <class T>
struct Product {
  using R = Real<T>;
  using Indices = typename LuGroup<T>::Indices;
  using Bits = typename VectorOf<R>::Bits;

  Lanes<T> mantissa = broadcast(T(R(1)));
  Indices exponent = {};

  void multiply(Lanes<T> factor) { mantissa = normalized(product(mantissa, normalized(factor))); }

 private:
  // x * 2^-e so that 1 <= |larger part| < 2, and e is added to the exponent; zero, inf and NaN
  // stay.
  Lanes<T> normalized(Lanes<T> x) {
    using Limits = std::numeric_limits<R>;
    constexpr int kDigits = Limits::digits - 1;
    constexpr Bits kOne = Bits(Limits::max_exponent - 1) << kDigits;  // those of 1.0
    // Numbers with a normal reciprocal power of two.
    const Simd<R> size = larger_part(x);
    const Indices tiny = size.v < Simd<R>(Limits::min()).v;
    const Indices huge = size.v > Simd<R>(Limits::max() / 2).v;
    const Simd<R> factor = select(tiny, Simd<R>(R(int64_t{1} << kDigits)),
                                  select(huge, Simd<R>(R(0.5)), Simd<R>(R(1))));
    const Lanes<T> y = scale(x, factor);
    const Indices bits = Indices((size * factor).v);
    const Indices power = ((bits >> kDigits) << kDigits) - kOne;
    const Indices usable = is_finite(size) & ~is_zero(size);
    exponent += usable & ((power >> kDigits) - (tiny & (Indices{} + kDigits)) + (huge & 1));
    const Simd<R> down = typename Simd<R>::Vector(kOne - power);
    return select(usable, scale(y, down), x);
  }
};

// Number l of each part of a register.
template <class R>
R lane_of(Simd<R> x, int l) {
  return x.v[l];
}
template <class R>
Complex<R> lane_of(Complex<Simd<R>> x, int l) {
  return {x.re.v[l], x.im.v[l]};
}

// x * 2^exponent, rounded once: the power in two halves, each of which is a normal number.
template <class R>
Simd<R> power_of_two(typename VectorOf<R>::Mask exponent) {
  using Limits = std::numeric_limits<R>;
  using Mask = typename VectorOf<R>::Mask;
  using Bits = typename VectorOf<R>::Bits;
  constexpr Bits kLargest = Limits::max_exponent - 1, kSmallest = Limits::min_exponent - 1;
  const Mask largest = Mask{} + kLargest, smallest = Mask{} + kSmallest;
  const Mask high = exponent > largest, low = exponent < smallest;
  const Mask e = (high & largest) | (low & smallest) | (~high & ~low & exponent);
  return typename Simd<R>::Vector((e + kLargest) << (Limits::digits - 1));
}

// Numbers of the lanes l < count to to[l].
template <class R>
void store_numbers(Simd<R> x, R* to, int64_t count) {
  if (count == Simd<R>::kSize) return x.store(to);
  for (int l = 0; l < count; ++l) to[l] = lane_of(x, l);
}
template <class R>
void store_numbers(Complex<Simd<R>> x, Complex<R>* to, int64_t count) {
  for (int l = 0; l < count; ++l) to[l] = lane_of(x, l);
}

// |x|, and x / |x| or 0.
template <class R>
Simd<R> sizes_of(Simd<R> x) {
  return absolute(x);
}
template <class R>
Simd<R> sizes_of(Complex<Simd<R>> x) {
  Simd<R> size;
  for (int l = 0; l < Simd<R>::kSize; ++l) size.v[l] = absolute(lane_of(x, l));
  return size;
}
template <class R>
JAX_BATCHED_INLINE Simd<R> signs_of(Simd<R> x, Simd<R>) {
  const Simd<R> zero(R(0)), one(R(1));
  return select(x.v > zero.v, one, select(x.v < zero.v, -one, x - x));
}
template <class R>
JAX_BATCHED_INLINE Complex<Simd<R>> signs_of(Complex<Simd<R>> x, Simd<R> size) {
  const Simd<R> zero(R(0));
  return {select(is_zero(size), zero, x.re / size), select(is_zero(size), zero, x.im / size)};
}

// Neither zero, subnormal, inf nor NaN: not all bits of the exponent are equal.
template <class R>
JAX_BATCHED_INLINE typename VectorOf<R>::Mask is_normal(Simd<R> x) {
  using Limits = std::numeric_limits<R>;
  using Mask = typename VectorOf<R>::Mask;
  using Bits = typename VectorOf<R>::Bits;
  constexpr Bits kField = (Bits(2) * Limits::max_exponent - 1) << (Limits::digits - 1);
  const Mask all = Mask{} + kField, field = Mask(x.v) & all;
  return (field != Mask{}) & (field != all);
}
// A normal number as a product, as Product::multiply() leaves it.
template <class R>
JAX_BATCHED_INLINE Product<R> product_of_normal(Simd<R> x) {
  using Limits = std::numeric_limits<R>;
  using Mask = typename VectorOf<R>::Mask;
  using Bits = typename VectorOf<R>::Bits;
  constexpr int kDigits = Limits::digits - 1;
  constexpr Bits kBias = Limits::max_exponent - 1, kField = (Bits(2) * kBias + 1) << kDigits;
  const Mask bits = Mask(x.v), field = bits & (Mask{} + kField);
  return {typename Simd<R>::Vector((bits ^ field) | (Mask{} + (kBias << kDigits))),
          (field >> kDigits) - kBias};
}

// The determinants of a group, or of one matrix, as numbers or as products.
template <class T>
JAX_BATCHED_INLINE void store_determinants(const DetProblem& p, Lanes<T> det, int64_t m,
                                           int64_t count) {
  store_numbers(det, p.det.at<T>(m, 1), count);
}
template <class T>
void store_determinants(const DetProblem& p, const Product<T>& det, int64_t m, int64_t count) {
  using R = Real<T>;
  const auto half = det.exponent >> 1;
  const Lanes<T> x =
      scale(scale(det.mantissa, power_of_two<R>(half)), power_of_two<R>(det.exponent - half));
  store_determinants<T>(p, x, m, count);
}
template <class T>
JAX_BATCHED_INLINE void store_determinants(const SlogdetProblem& p, const Product<T>& det,
                                           int64_t m, int64_t count) {
  const Simd<Real<T>> size = sizes_of(det.mantissa);
  store_numbers(signs_of(det.mantissa, size), p.sign.at<T>(m, 1), count);
  store_numbers(logarithm(size, det.exponent), p.logabsdet.at<Real<T>>(m, 1), count);
}
template <class T>
JAX_BATCHED_INLINE void store_determinants(const SlogdetProblem& p, Lanes<T> det, int64_t m,
                                           int64_t count) {
  store_determinants<T>(p, product_of_normal(det), m, count);
}

// The determinant of L U, from the diagonal of U and the exchanges: (step) -> pivot, (step) ->
// mask. NaN if a pivot is not finite. Calls store(x) with a product, or with normal numbers.
template <class T, class Pivot, class Exchanged, class Store>
JAX_BATCHED_INLINE void determinant(int64_t n, Pivot pivot, Exchanged exchanged, Store store) {
  using Indices = typename LuGroup<T>::Indices;
  Indices odd = {};
  for (int64_t i = 0; i < n; ++i) odd ^= exchanged(i);
  if constexpr (!kIsComplex<T>) {
    // As long as all is normal, powers of two change no bits of a product.
    Lanes<T> plain(T(1));
    Indices normal = ~Indices{};
    for (int64_t i = 0; i < n; ++i) {
      plain = plain * pivot(i);
      normal &= is_normal(plain);
    }
    if (!any(~normal)) return store(select(odd, -plain, plain));
  }
  Product<T> product;
  Indices finite = ~Indices{};
  for (int64_t i = 0; i < n; ++i) {
    product.multiply(pivot(i));
    finite &= is_finite(pivot(i));
  }
  product.mantissa = select(odd, -product.mantissa, product.mantissa);
  product.mantissa = select(finite, product.mantissa, broadcast(quiet_nan<T>()));
  store(product);
}

template <class T, class P>
void finish_determinants(const P& p, const LuGroup<T>& g, int64_t m, int64_t end) {
  determinant<T>(
      p.n, [&](int64_t i) { return g.f[i * g.pitch + i]; },
      [&](int64_t i) { return g.pivots[i] != static_cast<typename VectorOf<Real<T>>::Bits>(i); },
      [&](const auto& det) {
        store_determinants<T>(p, det, m, std::min<int64_t>(kLanes<T>, end - m));
      });
}
template <class T>
void finish_group(const DetProblem& p, const LuGroup<T>& g, Simd<Real<T>>, int64_t m, int64_t end) {
  finish_determinants(p, g, m, end);
}
template <class T>
void finish_group(const SlogdetProblem& p, const LuGroup<T>& g, Simd<Real<T>>, int64_t m,
                  int64_t end) {
  finish_determinants(p, g, m, end);
}

// The same of one matrix.
template <class T>
void finish(const LuProblem& p, const LuMatrix<T>& g, int32_t info, int64_t m) {
  const int64_t steps = std::min(p.m, p.n);
  p.info[m] = info;
  std::copy(g.pivots, g.pivots + steps, p.pivots + m * steps);
  std::copy(g.row_at, g.row_at + p.m, p.permutation + m * p.m);
  g.store(p.lu.at<T>(m, p.m, p.n));
}
template <class T, class P>
void finish(const P& p, const LuMatrix<T>& g, int32_t info, int64_t m) {
  const int64_t n = p.n, nrhs = columns(p);
  T* x = p.x.template at<T>(m, n, nrhs);
  p.info[m] = info;
  if (info != 0) {
    std::fill(x, x + n * nrhs, quiet_nan<T>());
    return;
  }
  const SplitRows<T> y = right_hand_sides_in<T>(g.end(), n, nrhs);
  const auto row = [&](int64_t i) { return nrhs == 1 ? y.numbers : y.row(i); };
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t r = 0; r < nrhs; ++r) {
      y.set(row(i), nrhs == 1 ? i : r, right_hand_side<T>(p, m, g.row_at[i], r));
    }
    for (int64_t r = nrhs; nrhs > 1 && r < y.width; ++r) y.set(row(i), r, T(0));
  }
  const int64_t pitch = g.a.pitch();
  substitute(StridedLower<T>{g.a.numbers, pitch, 1, g.a.width, false}, n, nrhs, true, y);
  reverse(n, nrhs, y);
  substitute(StridedLower<T>{g.a.numbers + (n - 1) * (pitch + 1), -pitch, -1, g.a.width, false}, n,
             nrhs, false, y);
  unpack(lower_system(n, nrhs, true, false, false, false), n, nrhs, y, x);
}
template <class T, class P>
void finish_determinant(const P& p, const LuMatrix<T>& g, int64_t m) {
  using Indices = typename LuGroup<T>::Indices;
  determinant<T>(
      p.n, [&](int64_t i) { return broadcast(g.a.get(g.a.row(i), i)); },
      [&](int64_t i) { return g.pivots[i] != i ? ~Indices{} : Indices{}; },
      [&](const auto& det) { store_determinants<T>(p, det, m, 1); });
}
template <class T>
void finish(const DetProblem& p, const LuMatrix<T>& g, int32_t, int64_t m) {
  finish_determinant(p, g, m);
}
template <class T>
void finish(const SlogdetProblem& p, const LuMatrix<T>& g, int32_t, int64_t m) {
  finish_determinant(p, g, m);
}

// Groups of the smallest matrices; false where they have no kernel. m .. end are whole groups.
template <class T, class P, class F>
bool each_fixed_group(const P& p, int64_t begin, int64_t end, F one_group) {
  if constexpr (kMaxFixedLu<T, P> > 0) {
    if (rows(p) != p.n || p.n < 1 || p.n > kMaxFixedLu<T, P> || !p.a.contiguous()) return false;
    with_constant<kMaxFixedLu<T, P>>(p.n, [&](auto n) {
      for (int64_t m = begin; m < end; m += kLanes<T>) one_group(n, m);
    });
    return true;
  }
  return false;
}

// store_indices() of a whole group.
template <class T, int n>
void store_fixed_indices(const typename LuGroup<T>::Indices* from, int32_t* to, int64_t m,
                         int64_t end) {
  if constexpr (sizeof(T) == sizeof(int32_t)) {
    FixedEntries<T, n> numbers;
    unrolled<n>([&](auto i)
                    JAX_BATCHED_INLINED { numbers.entry[i] = typename Simd<T>::Vector(from[i]); });
    numbers.store(reinterpret_cast<T*>(to) + m * n);
  } else {
    store_indices<T>(from, n, to, m, end);
  }
}
template <class T>
bool fixed_groups(const LuProblem& p, int64_t begin, int64_t end) {
  return each_fixed_group<T>(p, begin, end, [&](auto n, int64_t m) {
    constexpr int kSize = n * n;
    FixedLu<n, 0, T> g;
    g.a.load(p.a.template as<const T>() + m * kSize);
    g.factor();
    g.a.store(p.lu.template as<T>() + m * kSize);
    store_info(g.info, p.info, m, end);
    store_fixed_indices<T, n>(g.pivots, p.pivots, m, end);
    store_fixed_indices<T, n>(g.row_at, p.permutation, m, end);
  });
}
template <class T>
bool fixed_groups(const SolveGenProblem& p, int64_t begin, int64_t end) {
  if (p.nrhs != 1 || !p.b.contiguous()) return false;
  return each_fixed_group<T>(p, begin, end, [&](auto n, int64_t m) {
    FixedLu<n, 1, T> g;
    g.a.load(p.a.template as<const T>() + m * n * n);
    g.b.load(p.b.template as<const T>() + m * n);
    g.factor();
    g.substitute();
    g.b.store(p.x.template as<T>() + m * n);
    store_info(g.info, p.info, m, end);
  });
}
template <class T>
bool fixed_groups(const InvProblem& p, int64_t begin, int64_t end) {
  return each_fixed_group<T>(p, begin, end, [&](auto n, int64_t m) {
    constexpr int kSize = n * n;
    FixedLu<n, n, T> g;
    g.a.load(p.a.template as<const T>() + m * kSize);
    unrolled<kSize>([&](auto e)
                        JAX_BATCHED_INLINED { g.b.set(e, Simd<T>(T(e % (n + 1) == 0 ? 1 : 0))); });
    g.factor();
    g.substitute();
    g.b.store(p.x.template as<T>() + m * kSize);
    store_info(g.info, p.info, m, end);
  });
}
template <class T, class P>
bool fixed_determinants(const P& p, int64_t begin, int64_t end) {
  return each_fixed_group<T>(p, begin, end, [&](auto n, int64_t m) {
    FixedLu<n, 0, T> g;
    g.a = decltype(g.a)::loaded(p.a.template as<const T>() + m * n * n);
    g.factor();
    determinant<T>(
        n, [&](int64_t i) JAX_BATCHED_INLINED { return g.a.get(i * (n + 1)); },
        [&](int64_t i) JAX_BATCHED_INLINED {
          return g.pivots[i] != static_cast<typename VectorOf<Real<T>>::Bits>(i);
        },
        [&](const auto& det) JAX_BATCHED_INLINED { store_determinants<T>(p, det, m, kLanes<T>); });
  });
}
template <class T>
bool fixed_groups(const DetProblem& p, int64_t begin, int64_t end) {
  return fixed_determinants<T>(p, begin, end);
}
template <class T>
bool fixed_groups(const SlogdetProblem& p, int64_t begin, int64_t end) {
  return fixed_determinants<T>(p, begin, end);
}

template <class Problem>
struct LuKernels {
  static constexpr Tiers kTiers = std::is_same_v<Problem, InvProblem> ? Tiers{
      {{16, 60}, {40, 85}},
      {{16, 70}, {40, 90}},
      {{4, 40}, {12, 85}},
      {{4, 60}, {8, 97}},
  } : Tiers{
      {{16, 48}, {32, 55}, {64, 82}, {96, 90}},
      {{16, 60}, {32, 66}, {48, 95}},
      {{4, 45}, {12, 98}},
      {{4, 80}, {8, 100}},
  };
  template <class T>
  static size_t group_bytes(const Problem& p) {
    const int64_t right_hand_sides = int64_t{p.n} * columns(p) * sizeof(Lanes<T>);
    return LuGroup<T>::bytes(rows(p), p.n) + right_hand_sides;
  }
  template <class T>
  static size_t blocked_bytes(const Problem& p) {
    const SplitRows<T> y = right_hand_sides_in<T>(nullptr, p.n, columns(p));
    return LuMatrix<T>::bytes(rows(p), p.n) + p.n * y.pitch() * sizeof(Real<T>);
  }

  template <class T>
  static void lanes(const Problem& p, int64_t begin, int64_t end, void* scratch) {
    const int64_t whole = end - (end - begin) % kLanes<T>;
    if (fixed_groups<T>(p, begin, whole)) begin = whole;
    const LuGroup<T> g = LuGroup<T>::in(scratch, rows(p), p.n);
    for (int64_t m = begin; m < end; m += kLanes<T>) {
      pack(group_of<T>(p.a, g.m * g.n, m, end), g.m * g.n * kParts<T>, numbers(g.a));
      finish_group(p, g, factor_lu_group(g), m, end);
    }
  }
  template <class T>
  static void blocked(const Problem& p, int64_t begin, int64_t end, void* scratch) {
    const LuMatrix<T> g = LuMatrix<T>::in(scratch, rows(p), p.n);
    for (int64_t m = begin; m < end; ++m) {
      g.load(p.a.template at<const T>(m, rows(p), p.n));
      finish(p, g, factor_lu(g), m);
    }
  }
};

}  // namespace

template <>
Kernel<LuProblem> kernel() {
  return tiered_kernel<LuProblem, LuKernels<LuProblem>>();
}
template <>
Kernel<SolveGenProblem> kernel() {
  return tiered_kernel<SolveGenProblem, LuKernels<SolveGenProblem>>();
}
template <>
Kernel<InvProblem> kernel() {
  return tiered_kernel<InvProblem, LuKernels<InvProblem>>();
}
template <>
Kernel<DetProblem> kernel() {
  return tiered_kernel<DetProblem, LuKernels<DetProblem>>();
}
template <>
Kernel<SlogdetProblem> kernel() {
  return tiered_kernel<SlogdetProblem, LuKernels<SlogdetProblem>>();
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
