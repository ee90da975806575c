// SPDX-License-Identifier: MIT
// The ordered list of implementations of the delta rule: fastest first, reference last. Each accepts a problem or
// refuses it with a reason.
#pragma once
#include <string>
#include <vector>

#include "core/problem.h"
#include "core/status.h"

namespace gdn {

struct Plan {
  const char* impl = "";
  const char* isa = "";
  int32_t threads = 1;
  int64_t work_items = 0;       // units handed to the pool
  int64_t panel_v = 0;          // V columns per work item
  int64_t block_tokens = 0;     // tokens per block (1: token loop)
  int64_t scratch_bytes = 0;    // per thread; on CUDA: of device memory
  int64_t tile_tokens = 0;      // CUDA: tokens staged at a time
  int64_t split_tokens = 0;     // chunk_forward: tokens per segment; 0: sequences stay whole
  int64_t shares = 0;           // chunk_forward: blocks of the wrap-around schedule; 0: one block per work item
  int64_t together = 1;         // of them, that go through the same tokens
  const char* split_note = "";  // why, for explain; static
};

// A way of doing the problem that a plan weighed.
struct PlanOption {
  int64_t panel_v = 0, split_tokens = 0, shares = 0;
  double micros = 0;  // predicted time
};

// A number that the predicted times are made of: microseconds where the name ends in _us.
struct ModelValue {
  const char* name;
  double value;
};

struct Implementation {
  const char* name;                              // "chunk_avx2", "recurrent_avx2", "reference_fp32", ...
  int32_t op;                                    // GDN_OP_*
  int32_t device_type;                           // GDN_CPU or GDN_CUDA: where its tensors lie
  const char* isa;                               // "avx2", ..., "any"
  const char* (*refuses)(const RuleProblem&);    // of problems on its device. nullptr: accepts; else the reason
                                                 // (static or thread-local string)
  void (*make_plan)(const RuleProblem&, Plan*);  // fills the fields above; pure
  Status (*run)(const RuleProblem&, const Plan&);
  const char* without_addresses = nullptr;  // what `refuses` cannot see of tensors without data, for explain
  std::vector<PlanOption> (*options)(const RuleProblem&) = nullptr;             // best first, for explain
  std::vector<ModelValue> (*model)(const RuleProblem&, const Plan&) = nullptr;  // of this plan, for explain
};

const std::vector<Implementation>& implementations();
// Whether it is one for this operator and this place of the tensors.
inline bool is_candidate(const Implementation& impl, const RuleProblem& p) {
  return impl.op == p.op && impl.device_type == p.device_type;
}
// First candidate that accepts; `name` (may be null / "auto") restricts to one. On failure the status names every reason.
Status choose(const RuleProblem& problem, const char* name, const Implementation** impl, Plan* plan);

}  // namespace gdn
