// The CUDA launcher of gemm for one element type, JAX_BATCHED_SCALAR.
#include "ffi/cuda/blas/gemm.cuh"

#include <algorithm>

#include "ffi/cuda/blas/policy.h"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/runtime/dispatch.cuh"

namespace jax_batched::cuda {
namespace {

// A grid has fewer blocks than 2^31; each has several tiles then.
inline constexpr int64_t kMostBlocks = int64_t{1} << 30;

template <class T>
struct GemmLauncher {
  static constexpr const auto& kTable = kGemmTable;
  cudaStream_t stream;
  const GemmProblem& p;

  template <size_t kRow>
  cudaError_t row() const {
    constexpr int kSide = kShapeOf<kTable, kRow>.kSide;
    if (p.a.transposed) {
      return p.b.transposed ? launch_tiles<kSide, true, true>()
                            : launch_tiles<kSide, true, false>();
    }
    return p.b.transposed ? launch_tiles<kSide, false, true>()
                          : launch_tiles<kSide, false, false>();
  }

 private:
  template <int kSide, bool kTransposedA, bool kTransposedB>
  cudaError_t launch_tiles() const {
    using Tile = Gemm<T, kSide, kTransposedA, kTransposedB>;
    return launch_kernel<gemm<T, kSide, kTransposedA, kTransposedB>>(
        stream, std::min(Tile::tiles(p) * p.batch, kMostBlocks), 1, Tile::kThreads,
        Tile::kSharedBytes, p);
  }
};

}  // namespace

template <>
cudaError_t launch<JAX_BATCHED_SCALAR>(cudaStream_t stream, const GemmProblem& p) {
  using T = JAX_BATCHED_SCALAR;
  const Call call{
      .operation = GemmProblem::kName, .dtype = table_dtype(kDTypeOf<T>), .n = p.n, .m = p.m};
  return launch_row<T>(call, p.kernel, GemmLauncher<T>{stream, p});
}

}  // namespace jax_batched::cuda
