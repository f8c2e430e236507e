// Launching a kernel: the grid, the shared-memory attribute, the error.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace jax_batched::cuda {

inline constexpr size_t kDefaultSharedBytes = 48 * 1024;
inline constexpr int kMaxDevices = 64;

// What a launch returns that asks for more (shared memory, most often) than the device has.
inline constexpr cudaError_t kDoesNotFit = cudaErrorLaunchOutOfResources;

// An attribute of the current device; the driver is asked once per device.
template <cudaDeviceAttr kAttribute>
cudaError_t device_attribute(int* value) {
  static std::atomic<int64_t> known[kMaxDevices];  // value + 1; 0 if not known
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const int64_t cached = device < kMaxDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (cached != 0) {
    *value = static_cast<int>(cached - 1);
    return cudaSuccess;
  }
  error = cudaDeviceGetAttribute(value, kAttribute, device);
  if (error == cudaSuccess && device < kMaxDevices) {
    known[device].store(int64_t{*value} + 1, std::memory_order_relaxed);
  }
  return error;
}

// Shared memory a block may have on the current device, after raising the kernel's attribute.
inline cudaError_t shared_memory_limit(size_t* bytes) {
  int limit = 0;
  const cudaError_t error = device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(&limit);
  *bytes = static_cast<size_t>(limit);
  return error;
}

// Compute capability of the current device: 90 for sm_90.
inline cudaError_t compute_capability(int* capability) {
  int major = 0;
  int minor = 0;
  cudaError_t error = device_attribute<cudaDevAttrComputeCapabilityMajor>(&major);
  if (error == cudaSuccess) error = device_attribute<cudaDevAttrComputeCapabilityMinor>(&minor);
  *capability = 10 * major + minor;
  return error;
}

// Raises the dynamic shared memory limit of kKernel to `bytes` on the current device, once.
template <auto kKernel>
cudaError_t raise_shared_memory(size_t bytes) {
  if (bytes <= kDefaultSharedBytes) return cudaSuccess;
  static std::atomic<size_t> raised[kMaxDevices];
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < kMaxDevices && raised[device].load(std::memory_order_relaxed) >= bytes) {
    return cudaSuccess;
  }
  size_t limit = 0;
  error = shared_memory_limit(&limit);
  if (error != cudaSuccess) return error;
  if (bytes > limit) return kDoesNotFit;
  // Always the device's whole limit, so that two threads with different needs cannot undo each
  // other; what a launch gets is what it asks for.
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(limit));
  if (error == cudaSuccess && device < kMaxDevices) {
    raised[device].store(limit, std::memory_order_relaxed);
  }
  return error;
}

// Launches kKernel on ceil(items / items_per_block) blocks of grid x.
template <auto kKernel, class... Args>
cudaError_t launch_kernel(cudaStream_t stream, int64_t items, int64_t items_per_block, int threads,
                          size_t shared_bytes, const Args&... args) {
  const int64_t blocks = (items + items_per_block - 1) / items_per_block;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;  // more than any memory holds
  const cudaError_t error = raise_shared_memory<kKernel>(shared_bytes);
  if (error != cudaSuccess) return error;
  kKernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(args...);
  return cudaGetLastError();
}

}  // namespace jax_batched::cuda
