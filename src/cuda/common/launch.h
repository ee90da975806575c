// SPDX-License-Identifier: MIT
// Host side of a launch: the right device for its duration, CUDA's errors as Status.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "core/problem.h"
#include "core/status.h"

namespace gdn::cuda {

// Makes a context of `device_id` current and gives the caller's back at the end of the scope, whichever kind it was: a
// thread that had none has none again. Nothing happens when one of that device is current already.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device_id);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t error() const { return error_; }

 private:
  void* previous_ = nullptr;  // CUcontext
  bool restore_ = false;
  cudaError_t error_ = cudaSuccess;
};

// "chunk_forward: argument 'stream': found cudaErrorInvalidValue (invalid argument) from the launch, expected success".
Status cuda_status(const char* function, const char* doing, cudaError_t error);

inline cudaStream_t stream_of(const Place& place) { return static_cast<cudaStream_t>(place.stream); }

// A launch whose own error is returned: cudaGetLastError may hold an older one of the caller's, which is not ours to report
// or to clear.
template <class... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes, cudaStream_t stream,
                   std::type_identity_t<Params>... params) {
  void* args[] = {&params...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, args, smem_bytes, stream);
}

// Lets a kernel have more than 48 KiB of dynamic shared memory: asked once per device.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes, int32_t device_id) {
  constexpr int32_t kMaxDevices = 64;
  static std::atomic<bool> allowed[kMaxDevices];
  const bool remembered = device_id < kMaxDevices;
  if (remembered && allowed[device_id].load(std::memory_order_acquire)) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && remembered) allowed[device_id].store(true, std::memory_order_release);
  return error;
}

// Guard, then run(stream), which returns its launch's error.
template <class Run>
Status launch_on(const Place& place, const char* function, const Run& run) {
  const DeviceGuard guard(place.device_id);
  if (guard.error() != cudaSuccess) return cuda_status(function, "setting the device", guard.error());
  const cudaError_t error = run(stream_of(place));
  if (error != cudaSuccess) cudaGetLastError();  // reported: nobody else is to find it
  return cuda_status(function, "the launch", error);
}

// The device's sticky word for kernels (RuleParams::error_flags), made at first use; nullptr when that fails. Needs a
// current context of the device.
uint32_t* device_error_word(int32_t device_id);

// Behind it, for the kernels of split calls (SegmentParams::counters): as in SplitCounters (cuda.h).
inline constexpr size_t kSplitCounters = 4;

}  // namespace gdn::cuda
