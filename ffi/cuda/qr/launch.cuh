// From a row of a table to a kernel of QR factorizations or products with Q.
#pragma once

#include <algorithm>

#include "ffi/cuda/launch.h"
#include "ffi/cuda/qr/block.cuh"
#include "ffi/cuda/qr/policy.h"
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

template <class P, class T, const auto& kRows>
struct QrLauncher {
  static constexpr const auto& kTable = kRows;
  static constexpr bool kFactors = std::is_same_v<P, QrProblem>;
  cudaStream_t stream;
  const P& p;

  template <size_t kRow>
  cudaError_t row() const {
    constexpr auto kShape = kShapeOf<kTable, kRow>;
    return launch_shape<kShape>(kShape);
  }

 private:
  template <QrBlockShape kShape>
  cudaError_t launch_shape(QrBlockShape) const {
    constexpr int kWarps = kShape.warps, kSlots = kShape.slots, kWidth = kShape.width;
    constexpr int kColumns = kShape.columns, kCap = kShape.min_blocks;
    using Qr = BlockQr<T, kWarps, kSlots, kWidth, kColumns>;
    const size_t bytes = Qr::bytes(p.m, reflections_of(p));
    if constexpr (kFactors) {
      if (!Qr::has_place(p)) return kDoesNotFit;
      return launch_kernel<qr_block_kernel<T, kWarps, kSlots, kWidth, kColumns, kCap>>(
          stream, p.batch, 1, Qr::kThreads, bytes, p);
    } else {
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
