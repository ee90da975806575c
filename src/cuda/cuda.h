// SPDX-License-Identifier: MIT
// The CUDA backend as core sees it: no CUDA header, and in a build without CUDA inline answers that say so.
#pragma once
#include <cstdint>
#include <string>

#include "core/impl_list.h"
#include "core/problem.h"
#include "core/status.h"

namespace gdn::cuda {

struct DeviceInfo {
  std::string name;
  int32_t major = 0, minor = 0;  // compute capability
  int32_t sms = 0;
  int32_t clock_khz = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
  int64_t smem_per_block = 0;  // with opt-in
  bool has_code = false;       // this build's kernels run on it
};

// What split calls did on a device since the process began, for every segment but a sequence's last, and head; modulo 2^32.
struct SplitCounters {
  uint32_t windows = 0;        // whose end was made from its last chunks alone,
  uint32_t window_chunks = 0;  // so many in all
  uint32_t exact = 0;          // whose end was made in full
  uint32_t transitions = 0;    // that were made
};

#if defined(GDN_HAVE_CUDA)

// GPUs that this process can use; 0 without a driver (no_device_reason then says why). Counted once.
int32_t device_count();
const char* no_device_reason();
const DeviceInfo& device_info(int32_t device_id);  // 0 <= device_id < device_count()
const char* architectures();                       // of the code in this build: "75 80 86 89 90a 100 120+PTX"

// Waits for the stream. A capturing stream is refused.
Status copy_to_host(const Place& from, const void* source, size_t bytes, void* destination);

// Gives the driver what the scratch pools hold and no call in flight uses.
void release_memory();

// Bits (rule_params.h) set by calls whose device metadata held entries out of range; 0 on devices never used.
uint32_t error_flags(int32_t device_id);
// The same, and forgets them.
uint32_t take_error_flags(int32_t device_id);
std::string error_flags_text(uint32_t flags);

// GDN_COUNT=1 in the environment, read once: split calls count what they do.
bool counts_splits();
SplitCounters split_counters(int32_t device_id);

const char* refuse_simt(const RuleProblem&);
void plan_simt(const RuleProblem&, Plan*);
Status run_simt(const RuleProblem&, const Plan&);
const char* refuse_decode(const RuleProblem&);
void plan_decode(const RuleProblem&, Plan*);
Status run_decode(const RuleProblem&, const Plan&);
// Zeros in the rows of o past cu_seqlens[N], which stays on the device.
Status run_zero_tail(const RuleProblem&);

Status run_conv1d(const ConvProblem&);
Status run_gate(const GateProblem&);
Status run_norm(const NormProblem&);  // and run_glu of a problem with `glu`
Status run_glu(const NormProblem&);
Status run_rope(const RopeProblem&);

inline constexpr bool kBuilt = true;

#else

inline constexpr bool kBuilt = false;
inline int32_t device_count() { return 0; }
inline const char* no_device_reason() { return "this build has no CUDA backend"; }
inline DeviceInfo device_info(int32_t) { return {}; }
inline const char* architectures() { return ""; }
inline Status copy_to_host(const Place&, const void*, size_t, void*) {
  return Status(GDN_INTERNAL, "no CUDA backend");  // never reached: validation refuses CUDA tensors first
}
inline Status run_zero_tail(const RuleProblem&) { return Status(GDN_INTERNAL, "no CUDA backend"); }
inline void release_memory() {}
inline uint32_t error_flags(int32_t) { return 0; }
inline uint32_t take_error_flags(int32_t) { return 0; }
inline std::string error_flags_text(uint32_t) { return {}; }
inline bool counts_splits() { return false; }
inline SplitCounters split_counters(int32_t) { return {}; }

#endif

}  // namespace gdn::cuda
