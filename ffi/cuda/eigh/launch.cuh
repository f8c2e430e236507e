// From a row of a table to the kernels of an eigendecomposition.
#pragma once

#include <algorithm>

#include "ffi/cuda/eigh/block.cuh"
#include "ffi/cuda/eigh/columns.cuh"
#include "ffi/cuda/eigh/policy.h"
#include "ffi/cuda/eigh/rows.cuh"
#include "ffi/cuda/eigh/thread.cuh"
#include "ffi/cuda/eigh/values.cuh"
#include "ffi/cuda/launch.h"
#include "ffi/cuda/runtime/dispatch.cuh"
#include "ffi/cuda/runtime/launch.cuh"

namespace jax_batched::cuda {

template <class T>
struct EighThreadLauncher {
  cudaStream_t stream;
  const EighProblem& p;

  template <int kN>
  cudaError_t run() const {
    return p.vectors ? launch_of<kN, true>() : launch_of<kN, false>();
  }
  template <int kN, bool kVectors>
  cudaError_t launch_of() const {
    constexpr int kWarps = kEighThreadWarps<T, kN>;
    return launch_kernel<eigh_thread_kernel<T, kN, kVectors>>(
        stream, p.batch, 32 * kWarps, 32 * kWarps, eigh_thread_bytes<T, kN>(), p);
  }
};

// Matrices of a block: as many as make a multiprocessor hold the most, but no more than there are
// for each multiprocessor. A matrix's result does not depend on it.
template <class T>
cudaError_t matrices_of_block(const EighProblem& p, int lanes, int* matrices) {
  int processors = 0, shared = 0, opt_in = 0;
  cudaError_t error = device_attribute<cudaDevAttrMultiProcessorCount>(&processors);
  if (error == cudaSuccess) {
    error = device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(&shared);
  }
  if (error == cudaSuccess) {
    error = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&opt_in);
  }
  if (error != cudaSuccess) return error;
  const int each = EighPlaces<T>::bytes_of(p.n), unit = std::max(1, 32 / lanes);
  const int most = std::min(32, (kEighMaxThreads - 32) / lanes);
  int best = 0, best_held = 0;
  for (int blocks = 1; blocks <= 8; ++blocks) {
    const int bytes = std::min(shared / blocks - 1024, opt_in);
    const int fit = std::min(most, (bytes - static_cast<int>(EighPlaces<T>::kMoreBytes)) / each);
    const int whole = fit / unit * unit;
    if (whole == 0 || blocks * whole < best_held) continue;
    best = whole;
    best_held = blocks * whole;
  }
  if (best == 0) return kDoesNotFit;
  const int64_t share = (p.batch + processors - 1) / processors;
  *matrices = static_cast<int>(std::min<int64_t>(best, (share + unit - 1) / unit * unit));
  return cudaSuccess;
}

template <class T>
struct EighLauncher {
  static constexpr const auto& kTable = kEighTable;
  cudaStream_t stream;
  const EighProblem& p;

  template <size_t kRow>
  cudaError_t row() const {
    constexpr auto kShape = kShapeOf<kTable, kRow>;
    return launch_shape<kTable[kRow].max_n, kShape>(kShape);
  }

 private:
  template <int kMaxN, EighThreadShape kShape>
  cudaError_t launch_shape(EighThreadShape) const {
    return with_size<kMaxN>(p.n, EighThreadLauncher<T>{stream, p});
  }

  template <int kMaxN, EighLanesShape kShape>
  cudaError_t launch_shape(EighLanesShape) const {
    return p.vectors ? launch_lanes<kMaxN, kShape, true>() : launch_lanes<kMaxN, kShape, false>();
  }
  template <int kMaxN, EighLanesShape kShape, bool kVectors>
  cudaError_t launch_lanes() const {
    constexpr int kLanes = kShape.column_lanes, kThreads = kShape.column_threads;
    constexpr auto kColumns =
        eigh_columns_kernel<T, kMaxN, kLanes, kThreads, kShape.column_blocks, kVectors>;
    using Rows = EighRows<T, kMaxN, kShape.rows, kShape.matrices, kShape.sweeps>;
    constexpr auto kRows =
        eigh_rows_kernel<T, kMaxN, kShape.rows, kShape.matrices, kShape.sweeps, kShape.blocks>;
    cudaError_t error = cudaSuccess;
    // Where the last kernel does not fit, none is launched.
    if (kVectors) error = raise_shared_memory<kRows>(sizeof(typename Rows::Shared));
    if (error == cudaSuccess) {
      error = launch_kernel<kColumns>(stream, p.batch, kThreads / kLanes, kThreads,
                                      eigh_columns_bytes<T, kMaxN, kLanes, kThreads>(), p);
    }
    if (error == cudaSuccess) error = values<kVectors>();
    if (error != cudaSuccess || !kVectors) return error;
    return launch_kernel<kRows>(stream, p.batch, kShape.matrices,
                                Rows::kThreads + 32 * Rows::kChains, sizeof(typename Rows::Shared),
                                p);
  }
  template <bool kShifts>
  cudaError_t values() const {
    return launch_kernel<eigh_values_kernel<T, kShifts>>(stream, p.batch, 32, 32,
                                                         eigh_values_bytes<Real<T>>(p.n), p);
  }

  template <int kMaxN, EighBlockShape kShape>
  cudaError_t launch_shape(EighBlockShape) const {
    constexpr int kLanes = kShape.lanes;
    int matrices = 0;
    cudaError_t error = cudaSuccess;
    if (p.vectors) {
      error = matrices_of_block<T>(p, kLanes, &matrices);
      if (error != cudaSuccess) return error;
      return launch_kernel<eigh_block_kernel<T, kLanes>>(
          stream, p.batch, matrices, matrices * kLanes + 32, EighPlaces<T>{p.n, matrices}.bytes(),
          p, matrices);
    }
    constexpr int kMatrices = kTridiagonalThreads / kLanes;
    error = launch_kernel<eigh_tridiagonal_kernel<T, kLanes>>(
        stream, p.batch, kMatrices, kTridiagonalThreads, EighPlaces<T>{p.n, kMatrices}.bytes(), p);
    if (error != cudaSuccess) return error;
    return values<false>();
  }
};

}  // namespace jax_batched::cuda
