// SPDX-License-Identifier: MIT
#include "cuda/workspace.h"

#include <array>
#include <atomic>
#include <mutex>
#include <string>

#include "cuda/common/launch.h"
#include "cuda/cuda.h"

namespace gdn::cuda {
namespace {

constexpr int32_t kMaxDevices = 256;  // as many as device_count() can name
std::array<std::atomic<cudaMemPool_t>, kMaxDevices> pools{};

cudaError_t make_pool(int32_t device_id, cudaMemPool_t* pool) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device_id;
  cudaError_t error = cudaMemPoolCreate(pool, &properties);
  if (error != cudaSuccess) return error;
  uint64_t keep = UINT64_MAX;  // or every synchronisation of the caller would return the memory to the driver
  int waits = 0;               // a call must not be made to wait for another stream's because both want memory
  error = cudaMemPoolSetAttribute(*pool, cudaMemPoolAttrReleaseThreshold, &keep);
  if (error == cudaSuccess) error = cudaMemPoolSetAttribute(*pool, cudaMemPoolReuseAllowInternalDependencies, &waits);
  if (error != cudaSuccess) cudaMemPoolDestroy(*pool);
  return error;
}

// Made at first use. Never destroyed: the driver may be gone by the time that static destructors run.
cudaError_t pool_of(int32_t device_id, cudaMemPool_t* pool) {
  std::atomic<cudaMemPool_t>& slot = pools[static_cast<size_t>(device_id)];
  *pool = slot.load(std::memory_order_acquire);
  if (*pool != nullptr) return cudaSuccess;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  *pool = slot.load(std::memory_order_acquire);
  if (*pool != nullptr) return cudaSuccess;
  // As in device_error_word: harmless while a stream of the thread captures.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t error = make_pool(device_id, pool);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (error == cudaSuccess) slot.store(*pool, std::memory_order_release);
  return error;
}

}  // namespace

Workspace::Workspace(const RuleProblem& problem, int64_t bytes, cudaStream_t stream) : stream_(stream) {
  if (bytes <= 0) return;
  if (problem.workspace != nullptr) {
    if (problem.workspace_bytes < bytes) {
      status_ = Status(GDN_INVALID_ARGUMENT, "chunk_forward: argument 'workspace_bytes': found " +
                                                 std::to_string(problem.workspace_bytes) + ", expected at least " +
                                                 std::to_string(bytes) + " (gdn_chunk_forward_workspace)");
      return;
    }
    data_ = problem.workspace;
    return;
  }
  int pooled = 0;
  cudaError_t error = cudaDeviceGetAttribute(&pooled, cudaDevAttrMemoryPoolsSupported, problem.device_id);
  if (error == cudaSuccess && pooled == 0) {
    status_ = Status(GDN_UNSUPPORTED,
                     "chunk_forward: argument 'workspace': found NULL on a device without memory pools, "
                     "expected " +
                         std::to_string(bytes) + " bytes (gdn_chunk_forward_workspace)");
    return;
  }
  cudaMemPool_t pool = nullptr;
  if (error == cudaSuccess) error = pool_of(problem.device_id, &pool);
  if (error == cudaSuccess) error = cudaMallocFromPoolAsync(&data_, static_cast<size_t>(bytes), pool, stream);
  if (error != cudaSuccess) {
    data_ = nullptr;
    cudaGetLastError();  // reported: nobody else is to find it
    const std::string doing = "taking " + std::to_string(bytes) + " bytes of scratch";
    status_ = cuda_status("chunk_forward", doing.c_str(), error);
    return;
  }
  owned_ = true;
}

Workspace::~Workspace() {
  if (owned_ && cudaFreeAsync(data_, stream_) != cudaSuccess) cudaGetLastError();
}

void release_memory() {
  for (std::atomic<cudaMemPool_t>& slot : pools) {
    const cudaMemPool_t pool = slot.load(std::memory_order_acquire);
    if (pool != nullptr && cudaMemPoolTrimTo(pool, 0) != cudaSuccess) cudaGetLastError();
  }
}

}  // namespace gdn::cuda
