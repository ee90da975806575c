// SPDX-License-Identifier: MIT
// Device scratch of one call, in stream order.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.h"
#include "core/status.h"

namespace gdn::cuda {

// The caller's memory (gdn_rule_args::workspace) when there is some, else memory from a pool that the library has per
// device: taken and, by the destructor, given back in stream order, so nothing waits. In a capture both become nodes
// of the graph. Needs the problem's device to be current from the beginning to the end (launch.h: DeviceGuard).
class Workspace {
 public:
  // No bytes: data() is nullptr and nothing is asked of CUDA.
  Workspace(const RuleProblem& problem, int64_t bytes, cudaStream_t stream);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  const Status& status() const { return status_; }
  // Aligned to 256 bytes; nullptr unless status().ok().
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  cudaStream_t stream_ = nullptr;
  bool owned_ = false;
  Status status_;
};

}  // namespace gdn::cuda
