// The cotangent of a Cholesky factor -> that of the matrix, for a group of matrices, one per lane.
#include "ffi/cpu/engine/factor_lanes.h"

namespace jax_batched::cpu::JAX_BATCHED_ISA {
namespace {

// Rows of a column that are summed side by side.
inline constexpr int kPullbackRows = 4;

// With G the conjugate of the cotangent, which z holds, and T the rows after c, from the last
// column c to the first (Murray, "Differentiation of the Cholesky decomposition", 2016):
//   Z_Tc = (G_Tc - Z_TT L_Tc) / l_cc,    Z_cc = (G_cc - Re(Z_Tc^H L_Tc)) / l_cc,
// which is twice the Hermitian matrix S that comes out; it takes the place of both triangles of G.
template <class T>
void pullback_group(const StridedGroup<Lanes<T>>& l, const StridedGroup<Lanes<T>>& z, int64_t n) {
  using P = Lanes<T>;
  using R = Simd<Real<T>>;
  for (int64_t c = n - 1; c >= 0; --c) {
    const R inverse = R(Real<T>(1)) / real(l(c, c));
    for (int64_t i = c + 1; i < n; i += kPullbackRows) {
      with_constant<kPullbackRows>(n - i, [&](auto rows) JAX_BATCHED_INLINED {
        P sum[rows];
        unrolled<rows>([&](auto r) JAX_BATCHED_INLINED { sum[r] = conj(z(i + r, c)); });
        for (int64_t p = c + 1; p < n; ++p) {
          const P entry = l(p, c);
          unrolled<rows>([&](auto r) JAX_BATCHED_INLINED {
            sum[r] = sub_mul(sum[r], conj(z(p, i + r)), entry);
          });
        }
        unrolled<rows>([&](auto r) JAX_BATCHED_INLINED {
          const P value = scale(sum[r], inverse);
          z(i + r, c) = value;
          z(c, i + r) = conj(value);
        });
      });
    }
    P sum = conj(z(c, c));
    for (int64_t p = c + 1; p < n; ++p) sum = sub_mul(sum, conj(z(p, c)), l(p, c));
    z(c, c) = P(real(sum) * inverse);
  }
}

// Lanes where Z, or a sum on the way to it, overflowed: what is not finite in a row of Z makes all
// that follows in the row so, and at last the first entry. (But for lanes whose factor is NaN.)
template <class R>
typename Simd<R>::Mask overflowed(Simd<R> l_first, Simd<R> z_first) {
  const Simd<R> zero(R(0)), rest = z_first - z_first;
  return (l_first.v > zero.v) & (rest.v != zero.v);
}

template <class T>
void cholesky_pullback(const CholeskyPullbackProblem& p, int64_t begin, int64_t end,
                       void* scratch) {
  using R = Simd<Real<T>>;
  const int64_t n = p.n;
  const GroupMatrix<T> factor{static_cast<Lanes<T>*>(scratch), n};
  const GroupMatrix<T> result{factor.entries + n * factor.pitch(), n};
  const StridedGroup<Lanes<T>> l = triangle_of(factor, p.upper);
  const StridedGroup<Lanes<T>> z = triangle_of(result, p.upper);
  const Part part = p.upper ? Part::kUpper : Part::kLower;
  for (int64_t m = begin; m < end; m += kLanes<T>) {
    pack(group_of<T>(p.factor, n * n, m, end), part, factor);
    const auto cotangent = group_of<T>(p.cotangent, n * n, m, end);
    pack(cotangent, part, result);
    pullback_group<T>(l, z, n);
    R half(Real<T>(0.5));
    if (const auto lanes = overflowed(real(l(0, 0)), real(z(0, 0))); any(lanes)) {
      const R unit = select(lanes, R(Real<T>(p.kSmallCotangent)), R(Real<T>(1)));
      pack(cotangent, part, result);
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j <= i; ++j) z(i, j) = scale(z(i, j), unit);
      }
      pullback_group<T>(l, z, n);
      half = half / unit;
    }
    const R off_diagonal = p.symmetrize ? half : half + half;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        z(j, i) = scale(z(i, j), off_diagonal);
        z(i, j) = conj(z(j, i));
      }
      z(i, i) = scale(z(i, i), half);
    }
    unpack(result, p.symmetrize ? Part::kAll : part, group_of<T>(p.result, n * n, m, end));
  }
}

}  // namespace

template <>
Kernel<CholeskyPullbackProblem> kernel() {
  const auto run = [](const CholeskyPullbackProblem& p, int64_t begin, int64_t end, void* scratch) {
    with_element_type(p.dtype,
                      [&](auto t) { cholesky_pullback<decltype(t)>(p, begin, end, scratch); });
  };
  const auto scratch_bytes = [](const CholeskyPullbackProblem& p) {
    return with_element_type(p.dtype, [&](auto t) -> size_t {  // the factor and the result
      return group_scratch_bytes<decltype(t)>(p.n, p.n + 1);
    });
  };
  const auto group = [](const CholeskyPullbackProblem& p) {
    return with_element_type(p.dtype, [](auto t) { return Group{kLanes<decltype(t)>, 1}; });
  };
  return {run, scratch_bytes, group};
}

}  // namespace jax_batched::cpu::JAX_BATCHED_ISA
