#include "ffi/cuda/launch.h"
#include "ffi/cuda/runtime/dispatch.cuh"
#include "ffi/cuda/runtime/launch.cuh"
#include "ffi/cuda/svd/lanes.cuh"
#include "ffi/cuda/svd/policy.h"
#include "ffi/cuda/svd/thread.cuh"

namespace jax_batched::cuda {
namespace {

template <class T>
struct SvdThreadLauncher {
  cudaStream_t stream;
  const SvdProblem& p;

  template <int kN>
  cudaError_t run() const {
    return p.vectors ? launch_of<kN, true>() : launch_of<kN, false>();
  }
  template <int kN, bool kVectors>
  cudaError_t launch_of() const {
    constexpr int kThreads = 32 * kSvdThreadWarps<T, kN>;
    return launch_kernel<svd_thread_kernel<T, kN, kVectors>>(stream, p.batch, kThreads, kThreads,
                                                             svd_thread_bytes<T, kN>(), p);
  }
};

template <class T>
struct SvdLauncher {
  static constexpr const auto& kTable = kSvdTable;
  cudaStream_t stream;
  const SvdProblem& p;

  template <size_t kRow>
  cudaError_t row() const {
    constexpr auto kShape = kShapeOf<kTable, kRow>;
    return launch_shape<kTable[kRow].max_n, kShape>(kShape);
  }

 private:
  template <int kMaxN, SvdThreadShape kShape>
  cudaError_t launch_shape(SvdThreadShape) const {
    return with_size<kMaxN>(p.n, SvdThreadLauncher<T>{stream, p});
  }

  template <int kMaxN, SvdLanesShape kShape>
  cudaError_t launch_shape(SvdLanesShape) const {
    constexpr int kLanes = kShape.lanes, kRows = kShape.rows;
    constexpr bool kVInShared = kShape.v_in_shared;
    using Lanes = SvdLanes<T, kLanes, kRows, kVInShared>;
    return launch_kernel<svd_lanes_kernel<T, kLanes, kRows, kVInShared>>(
        stream, p.batch, Lanes::kMatrices, Lanes::kThreads, Lanes::bytes(p.n, p.vectors), p);
  }
};

}  // namespace

template <>
cudaError_t launch<JAX_BATCHED_SCALAR>(cudaStream_t stream, const SvdProblem& p) {
  const Call call{.operation = SvdProblem::kName, .dtype = kDTypeOf<JAX_BATCHED_SCALAR>, .n = p.n};
  return launch_row<JAX_BATCHED_SCALAR>(call, p.kernel, SvdLauncher<JAX_BATCHED_SCALAR>{stream, p});
}

}  // namespace jax_batched::cuda
