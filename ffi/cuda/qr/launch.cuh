// From a row of a table to a kernel of QR factorizations or products with Q.
#pragma once

#include <algorithm>

#include "ffi/cuda/launch.h"
#include "ffi/cuda/qr/block.cuh"
#include "ffi/cuda/qr/lanes.cuh"
#include "ffi/cuda/qr/policy.h"
#include "ffi/cuda/qr/product_lanes.cuh"
#include "ffi/cuda/qr/thread.cuh"
#include "ffi/cuda/runtime/dispatch.cuh"
#include "ffi/cuda/runtime/launch.cuh"

namespace jax_batched::cuda {

inline int reflections_of(const QrProblem& p) { return p.reflections(); }
template <class P>
int reflections_of(const P& p) {
  return static_cast<int>(p.k);
}
inline int columns_of(const QrProblem& p) { return std::max(p.n, p.q_columns()); }
template <class P>
int columns_of(const P& p) {
  return p.n;
}

template <class T>
struct QrThreadLauncher {
  cudaStream_t stream;
  const QrProblem& p;

  template <int kN>
  cudaError_t run() const {
    constexpr int kWarps = kQrThreadWarps<T, kN>;
    return launch_kernel<qr_thread_kernel<T, kN>>(stream, p.batch, 32 * kWarps, 32 * kWarps,
                                                  qr_thread_bytes<T, kN>(), p);
  }
};

template <class P, class T, const auto& kRows>
struct QrLauncher {
  static constexpr const auto& kTable = kRows;
  static constexpr bool kFactors = std::is_same_v<P, QrProblem>;
  cudaStream_t stream;
  const P& p;

  template <size_t kRow>
  cudaError_t row() const {
    constexpr auto kShape = kShapeOf<kTable, kRow>;
    return launch_shape<kTable[kRow].max_n, kShape>(kShape);
  }

 private:
  template <int kMaxN, QrThreadShape kShape>
  cudaError_t launch_shape(QrThreadShape) const {
    if (p.m != p.n) return kDoesNotFit;
    return with_size<kMaxN>(p.n, QrThreadLauncher<T>{stream, p});
  }

  template <int kMaxN, QrLanesShape kShape>
  cudaError_t launch_shape(QrLanesShape) const {
    return p.mode == QrProblem::kR ? launch_lanes<kShape, false>() : launch_lanes<kShape, true>();
  }
  template <QrLanesShape kShape, bool kKeeps>
  cudaError_t launch_lanes() const {
    constexpr int kLanes = kShape.lanes;
    return launch_kernel<qr_lanes_kernel<T, kLanes, kShape.columns, kShape.rows, kShape.steps,
                                         kShape.held, kKeeps, kShape.min_blocks>>(
        stream, p.batch, 32 / kLanes, 32, 0, p);
  }

  template <int kMaxN, QrRowsShape kShape>
  cudaError_t launch_shape(QrRowsShape) const {
    constexpr int kLanes = kShape.lanes, kEach = kShape.rows, kMatrices = 32 / kLanes;
    if constexpr (std::is_same_v<P, QrMultiplyProblem>) {
      if (p.nrhs == 1) {
        return launch_kernel<qr_product_lanes_kernel<T, P, kLanes, kEach, 1>>(stream, p.batch,
                                                                              kMatrices, 32, 0, p);
      }
      // Many columns are products of matrices.
      if (kLanes == 32 && p.nrhs > 8 && p.kernel.empty()) return kDoesNotFit;
    }
    return launch_kernel<qr_product_lanes_kernel<T, P, kLanes, kEach, 4>>(stream, p.batch,
                                                                          kMatrices, 32, 0, p);
  }

  template <int kMaxN, QrBlockShape kShape>
  cudaError_t launch_shape(QrBlockShape) const {
    constexpr int kWarps = kShape.warps, kSlots = kShape.slots, kWidth = kShape.width;
    constexpr int kColumns = kShape.columns, kCap = kShape.min_blocks;
    using Qr = BlockQr<T, kWarps, kSlots, kWidth, kColumns>;
    const int k = reflections_of(p);
    if constexpr (kFactors) {
      const size_t bytes = Qr::bytes(p.m, k, Qr::has_place(p) ? 1 : Qr::panels(k));
      return launch_kernel<qr_block_kernel<T, kWarps, kSlots, kWidth, kColumns, kCap>>(
          stream, p.batch, 1, Qr::kThreads, bytes, p);
    } else {
      const size_t bytes = Qr::bytes(p.m, k, 1);
      return launch_kernel<qr_product_block_kernel<T, P, kWarps, kSlots, kWidth, kColumns, kCap>>(
          stream, p.batch, 1, Qr::kThreads, bytes, p);
    }
  }
};

template <class T, const auto& kTable, class P>
cudaError_t launch_qr(cudaStream_t stream, const P& p) {
  const Call call{
      .operation = P::kName, .dtype = kDTypeOf<T>, .n = columns_of(p), .m = std::max(p.m, 1)};
  return launch_row<T>(call, p.kernel, QrLauncher<P, T, kTable>{stream, p});
}

}  // namespace jax_batched::cuda
