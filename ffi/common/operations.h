// The operations of the library. Handlers, kernel tables and what Python learns of them are made
// from this list.
#pragma once

#include <type_traits>

#include "ffi/problems/cholesky.h"
#include "ffi/problems/eigh.h"
#include "ffi/problems/gemm.h"
#include "ffi/problems/lu.h"
#include "ffi/problems/qr.h"
#include "ffi/problems/residual.h"
#include "ffi/problems/sized.h"
#include "ffi/problems/solve_pos.h"
#include "ffi/problems/substitution.h"
#include "ffi/problems/svd.h"

namespace jax_batched {

template <class... Problems>
struct List {};

using Operations =
    List<CholeskyProblem, TriangularSolveProblem, ChoSolveProblem, SolvePosProblem,
         CholeskyPullbackProblem, ResidualProblem, LuProblem, SolveGenProblem, InvProblem,
         DetProblem, SlogdetProblem, QrProblem, HouseholderProductProblem, QrMultiplyProblem,
         GemmProblem, LuSubstitutionProblem, EighProblem, SvdProblem>;

// Those with calls whose matrices differ in size, and these calls; on the CPU only.
template <class... P>
using SizedList = List<Sized<P>...>;
using SizedOperations =
    SizedList<CholeskyProblem, TriangularSolveProblem, ChoSolveProblem, SolvePosProblem, LuProblem,
              SolveGenProblem, InvProblem, DetProblem, SlogdetProblem, EighProblem>;

// Those of a list that have kernels on the CPU.
template <class... Lists>
struct Joined;
template <class... P, class... Q, class... Others>
struct Joined<List<P...>, List<Q...>, Others...> : Joined<List<P..., Q...>, Others...> {};
template <class... P>
struct Joined<List<P...>> {
  using type = List<P...>;
};
template <class... P>
auto on_cpu(List<P...>) -> typename Joined<std::conditional_t<P::kOnCpu, List<P>, List<>>...>::type;
using CpuOperations = decltype(on_cpu(Operations{}));

// Calls f(std::type_identity<P>) for each operation.
template <class F, class... P>
constexpr void for_each_operation(F&& f, List<P...>) {
  (f(std::type_identity<P>{}), ...);
}
template <class F>
constexpr void for_each_operation(F&& f) {
  for_each_operation(f, Operations{});
}

}  // namespace jax_batched
