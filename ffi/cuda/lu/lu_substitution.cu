// The CUDA launcher of lu_substitution for one element type, JAX_BATCHED_SCALAR.
#include "ffi/cuda/lu/lu_substitution.cuh"

#include "ffi/cuda/launch.h"
#include "ffi/cuda/lu/policy.h"
#include "ffi/cuda/runtime/dispatch.cuh"

namespace jax_batched::cuda {
namespace {

template <class T>
struct LuSubstitutionLauncher {
  static constexpr const auto& kTable = kLuSubstitutionTable;
  cudaStream_t stream;
  const LuSubstitutionProblem& p;

  template <size_t kRow>
  cudaError_t row() const {
    return p.nrhs == 1 ? launch_count<kRow, 1>() : launch_count<kRow, 4>();
  }

 private:
  template <size_t kRow, int kCount>
  cudaError_t launch_count() const {
    constexpr auto kShape = kShapeOf<kTable, kRow>;
    return launch_kernel<lu_substitution_lanes_kernel<T, kShape.lanes, kShape.rows, kShape.columns,
                                                      kCount, kShape.min_blocks>>(
        stream, p.batch, 32 / kShape.lanes, 32, 0, p);
  }
};

}  // namespace

template <>
cudaError_t launch<JAX_BATCHED_SCALAR>(cudaStream_t stream, const LuSubstitutionProblem& p) {
  using T = JAX_BATCHED_SCALAR;
  const Call call{.operation = LuSubstitutionProblem::kName,
                  .dtype = table_dtype(kDTypeOf<T>),
                  .n = p.n,
                  .nrhs = p.nrhs};
  return launch_row<T>(call, p.kernel, LuSubstitutionLauncher<T>{stream, p});
}

}  // namespace jax_batched::cuda
