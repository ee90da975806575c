// SPDX-License-Identifier: MIT
// Devices, contexts, errors. cudart is linked statically and loads the driver itself, so this library loads and works
// (without CUDA) where there is none; driver functions come through cudaGetDriverEntryPoint for the same reason.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>

#include "cuda/common/architectures.h"
#include "cuda/common/launch.h"
#include "cuda/common/rule_params.h"
#include "cuda/cuda.h"

namespace gdn::cuda {
namespace {

constexpr int32_t kMaxDevices = 256;

struct Driver {
  CUresult(CUDAAPI* get_current)(CUcontext*) = nullptr;
  CUresult(CUDAAPI* set_current)(CUcontext) = nullptr;
  CUresult(CUDAAPI* get_device)(CUdevice*) = nullptr;
};

template <class Function>
bool entry_point(const char* name, Function* function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kCudaVersion = 12000;  // the oldest driver that the static runtime of CUDA 12 takes
  if (cudaGetDriverEntryPointByVersion(name, &address, kCudaVersion, cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    return false;
  }
  *function = reinterpret_cast<Function>(address);
  return true;
}

struct System {
  int32_t count = 0;
  std::string reason;
  std::deque<DeviceInfo> devices;
  Driver driver;
};

DeviceInfo query(int32_t id) {
  DeviceInfo info;
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, id) != cudaSuccess) return info;
  info.name = properties.name;
  info.major = properties.major;
  info.minor = properties.minor;
  info.sms = properties.multiProcessorCount;
  cudaDeviceGetAttribute(&info.clock_khz, cudaDevAttrClockRate, id);
  info.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  info.l2_bytes = properties.l2CacheSize;
  info.smem_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  info.has_code = architecture_runs_on(info.major, info.minor);
  return info;
}

const System& system() {
  static const System found = [] {
    System s;
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
      s.reason = error == cudaSuccess ? "no CUDA device"
                                      : std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ")";
      cudaGetLastError();
      return s;
    }
    if (!entry_point("cuCtxGetCurrent", &s.driver.get_current) ||
        !entry_point("cuCtxSetCurrent", &s.driver.set_current) ||
        !entry_point("cuCtxGetDevice", &s.driver.get_device)) {
      s.reason = "the driver lacks cuCtxGetCurrent, cuCtxSetCurrent or cuCtxGetDevice";
      cudaGetLastError();
      return s;
    }
    s.count = count < kMaxDevices ? count : kMaxDevices;
    for (int32_t id = 0; id < s.count; ++id) s.devices.push_back(query(id));
    cudaGetLastError();
    return s;
  }();
  return found;
}

std::array<std::atomic<uint32_t*>, kMaxDevices> error_words{};

}  // namespace

int32_t device_count() { return system().count; }
const char* no_device_reason() { return system().reason.c_str(); }
const DeviceInfo& device_info(int32_t device_id) { return system().devices[static_cast<size_t>(device_id)]; }

DeviceGuard::DeviceGuard(int32_t device_id) {
  const Driver& driver = system().driver;
  CUcontext current = nullptr;
  CUdevice device = -1;
  driver.get_current(&current);
  if (current != nullptr && driver.get_device(&device) == CUDA_SUCCESS && device == device_id) return;
  previous_ = current;
  restore_ = true;
  error_ = cudaSetDevice(device_id);
}

DeviceGuard::~DeviceGuard() {
  if (restore_) system().driver.set_current(static_cast<CUcontext>(previous_));
}

Status cuda_status(const char* function, const char* doing, cudaError_t error) {
  if (error == cudaSuccess) return Status();
  const gdn_status code = error == cudaErrorMemoryAllocation ? GDN_OUT_OF_MEMORY : GDN_INTERNAL;
  return Status(code, std::string(function) + ": CUDA: found " + cudaGetErrorName(error) + " (" +
                          cudaGetErrorString(error) + ") from " + doing + ", expected cudaSuccess");
}

Status copy_to_host(const Place& from, const void* source, size_t bytes, void* destination) {
  const DeviceGuard guard(from.device_id);
  if (guard.error() != cudaSuccess) return cuda_status("GDN_CHECK", "setting the device", guard.error());
  const cudaStream_t stream = stream_of(from);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (error == cudaSuccess && capture != cudaStreamCaptureStatusNone) {
    return Status(GDN_UNSUPPORTED,
                  "GDN_CHECK: argument 'stream': found a stream in a graph capture, expected one that the check of "
                  "device metadata may wait for");
  }
  if (error == cudaSuccess) error = cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDeviceToHost, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) cudaGetLastError();
  return cuda_status("GDN_CHECK", "copying metadata to the host", error);
}

// In pinned host memory, so that reading it needs no synchronisation. Kernels reach it only when something is wrong.
uint32_t* device_error_word(int32_t device_id) {
  std::atomic<uint32_t*>& word = error_words[static_cast<size_t>(device_id)];
  if (uint32_t* made = word.load(std::memory_order_acquire)) return made;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (uint32_t* made = word.load(std::memory_order_acquire)) return made;
  // Allocation is forbidden while any stream of the thread captures in the default mode, and harmless all the same.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  void* memory = nullptr;
  constexpr size_t kBytes = sizeof(uint32_t) * (1 + kSplitCounters);
  const cudaError_t error = cudaHostAlloc(&memory, kBytes, cudaHostAllocMapped | cudaHostAllocPortable);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  uint32_t* made = static_cast<uint32_t*>(memory);
  std::memset(made, 0, kBytes);
  word.store(made, std::memory_order_release);
  return made;
}

uint32_t error_flags(int32_t device_id) {
  uint32_t* word = error_words[static_cast<size_t>(device_id)].load(std::memory_order_acquire);
  return word != nullptr ? std::atomic_ref<uint32_t>(*word).load() : 0;
}

uint32_t take_error_flags(int32_t device_id) {
  uint32_t* word = error_words[static_cast<size_t>(device_id)].load(std::memory_order_acquire);
  return word != nullptr ? std::atomic_ref<uint32_t>(*word).exchange(0) : 0;
}

bool counts_splits() {
  static const bool on = [] {
    const char* text = std::getenv("GDN_COUNT");
    return text != nullptr && std::strcmp(text, "0") != 0 && text[0] != '\0';
  }();
  return on;
}

SplitCounters split_counters(int32_t device_id) {
  uint32_t* words = error_words[static_cast<size_t>(device_id)].load(std::memory_order_acquire);
  SplitCounters counters;
  if (words == nullptr) return counters;
  uint32_t* const fields[kSplitCounters] = {&counters.windows, &counters.window_chunks, &counters.exact,
                                            &counters.transitions};
  for (size_t i = 0; i < kSplitCounters; ++i) *fields[i] = std::atomic_ref<uint32_t>(words[1 + i]).load();
  return counters;
}

std::string error_flags_text(uint32_t flags) {
  constexpr struct {
    uint32_t bit;
    const char* name;
  } kNames[] = {{kBadCuSeqlens, "cu_seqlens"},
                {kBadInitialIndex, "initial_state_indices"},
                {kBadFinalIndex, "final_state_indices"},
                {kBadCheckpointIndex, "checkpoint_indices"},
                {kBadTokenIndex, "token_state_indices"},
                {kBadNumAccepted, "num_accepted"},
                {kBadLength, "cu_seqlens (a sequence longer than a tensor's rows for its tokens)"}};
  std::string text;
  for (const auto& name : kNames) {
    if ((flags & name.bit) != 0) text += (text.empty() ? "" : ", ") + std::string(name.name);
  }
  return text;
}

}  // namespace gdn::cuda
