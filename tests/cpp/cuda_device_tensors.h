// SPDX-License-Identifier: MIT
// Runs a call whose tensors lie on the host on the GPU instead: each stretch of host memory that the tensors cover is
// mirrored, gaps between strided elements included, at the same distance from a 256-byte boundary and between guard bytes;
// afterwards everything is copied back. So tests written for the CPU see what the GPU wrote and what it left alone.
#pragma once
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "gdn/gdn.h"

namespace gdn_test {

inline bool has_cuda_device() {
  static const bool found = [] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  }();
  return found;
}
// Compute capability of device 0: 90 for 9.0.
inline int capability() {
  int major = 0, minor = 0;
  const bool known = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) == cudaSuccess;
  return known ? 10 * major + minor : 0;
}
inline bool is_hopper() { return capability() == 90; }

// The stream that the calls run on: none of them may rely on the default stream's order.
inline cudaStream_t test_stream() {
  static const cudaStream_t stream = [] {
    cudaStream_t s = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), cudaSuccess);
    return s;
  }();
  return stream;
}

class DeviceTensors {
 public:
  // The mirror of *t; nullptr stays so. All tensors are added before run().
  const gdn_tensor* add(const gdn_tensor* t) {
    if (t == nullptr) return nullptr;
    tensors_.push_back(*t);
    return &tensors_.back();
  }

  // call() with the tensors on the device; false (and a test failure) when CUDA or the guard bytes fail.
  template <class Call>
  gdn_status run(const Call& call) {
    find_ranges();
    place();
    for (const Range& r : ranges_) {
      std::vector<unsigned char> bytes(static_cast<size_t>(r.size()) + 2 * kDeviceGuard, kDeviceGuardByte);
      std::memcpy(bytes.data() + kDeviceGuard, reinterpret_cast<const void*>(r.begin), static_cast<size_t>(r.size()));
      check(cudaMemcpy(r.device - kDeviceGuard, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    }
    const gdn_status status = call();
    check(cudaDeviceSynchronize());
    for (const Range& r : ranges_) {
      std::vector<unsigned char> bytes(static_cast<size_t>(r.size()) + 2 * kDeviceGuard);
      check(cudaMemcpy(bytes.data(), r.device - kDeviceGuard, bytes.size(), cudaMemcpyDeviceToHost));
      std::memcpy(reinterpret_cast<void*>(r.begin), bytes.data() + kDeviceGuard, static_cast<size_t>(r.size()));
      bool intact = true;
      for (size_t i = 0; i < kDeviceGuard; ++i)
        intact = intact && bytes[i] == kDeviceGuardByte && bytes[bytes.size() - 1 - i] == kDeviceGuardByte;
      EXPECT_TRUE(intact) << "guard bytes around a tensor were written";
    }
    return status;
  }

 private:
  static constexpr size_t kDeviceGuard = 1024;
  static constexpr unsigned char kDeviceGuardByte = 0x5a;
  struct Range {
    uintptr_t begin = 0, end = 0;
    unsigned char* device = nullptr;
    size_t offset = 0;  // in the arena
    int64_t size() const { return static_cast<int64_t>(end - begin); }
  };

  static int64_t bytes_of(int32_t dtype) {
    if (dtype == GDN_I64 || dtype == GDN_F64) return 8;
    return dtype == GDN_F32 || dtype == GDN_I32 ? 4 : dtype == GDN_U8 ? 1 : 2;
  }
  static void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

  void find_ranges() {
    std::vector<Range> all;
    for (const gdn_tensor& t : tensors_) {
      int64_t last = 0;
      bool empty = t.data == nullptr;
      for (int32_t i = 0; i < t.ndim; ++i) {
        empty = empty || t.shape[i] == 0;
        last += (t.shape[i] - 1) * t.strides[i];
      }
      const uintptr_t begin = reinterpret_cast<uintptr_t>(t.data);
      if (!empty) {
        Range r;
        r.begin = begin;
        r.end = begin + static_cast<uintptr_t>((last + 1) * bytes_of(t.dtype));
        all.push_back(r);
      }
    }
    std::sort(all.begin(), all.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    for (const Range& r : all) {
      if (!ranges_.empty() && r.begin < ranges_.back().end) {
        ranges_.back().end = std::max(ranges_.back().end, r.end);
      } else {
        ranges_.push_back(r);
      }
    }
  }
  void place() {
    size_t needed = 0;
    for (Range& r : ranges_) {
      r.offset = needed + kDeviceGuard + r.begin % 256;
      needed = (r.offset + static_cast<size_t>(r.size()) + kDeviceGuard + 255) / 256 * 256;
    }
    unsigned char* base = arena(needed);
    for (Range& r : ranges_) r.device = base + r.offset;
    int device = 0;
    check(cudaGetDevice(&device));
    for (gdn_tensor& t : tensors_) {
      t.device_type = GDN_CUDA;
      t.device_id = device;
      const uintptr_t at = reinterpret_cast<uintptr_t>(t.data);
      for (const Range& r : ranges_) {
        if (at >= r.begin && at < r.end) t.data = r.device + (at - r.begin);
      }
    }
  }
  // Grows, is never freed: thousands of calls share it.
  static unsigned char* arena(size_t bytes) {
    static unsigned char* memory = nullptr;
    static size_t size = 0;
    if (bytes > size) {
      check(cudaFree(memory));
      size = std::max(bytes, size_t{64} << 20);
      check(cudaMalloc(reinterpret_cast<void**>(&memory), size));
    }
    return memory;
  }

  std::deque<gdn_tensor> tensors_;  // addresses stay
  std::vector<Range> ranges_;
};

// Device memory of a test's own, with a tensor's view of it.
class DeviceTensor {
 public:
  DeviceTensor(int32_t dtype, std::vector<int64_t> shape) {
    gdn_tensor_init(&view_, nullptr, dtype, static_cast<int32_t>(shape.size()), shape.data());
    bytes_ = dtype == GDN_I64 ? 8 : dtype == GDN_F32 || dtype == GDN_I32 ? 4 : dtype == GDN_U8 ? 1 : 2;
    for (const int64_t d : shape) bytes_ *= static_cast<size_t>(d);
    EXPECT_EQ(cudaMalloc(&view_.data, std::max<size_t>(bytes_, 256)), cudaSuccess);
    EXPECT_EQ(cudaMemset(view_.data, 0, bytes_), cudaSuccess);
    view_.device_type = GDN_CUDA;
    EXPECT_EQ(cudaGetDevice(&view_.device_id), cudaSuccess);
  }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;
  ~DeviceTensor() { cudaFree(view_.data); }
  const gdn_tensor* ptr() const { return &view_; }
  gdn_tensor view() const { return view_; }
  size_t bytes() const { return bytes_; }
  template <class T>
  void put(const std::vector<T>& values) {
    ASSERT_LE(values.size() * sizeof(T), bytes_);
    ASSERT_EQ(cudaMemcpy(view_.data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  template <class T>
  std::vector<T> get() const {
    std::vector<T> values(bytes_ / sizeof(T));
    EXPECT_EQ(cudaMemcpy(values.data(), view_.data, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }

 private:
  gdn_tensor view_ = {};
  size_t bytes_ = 0;
};

}  // namespace gdn_test
