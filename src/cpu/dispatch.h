// SPDX-License-Identifier: MIT
// Run-time choice of the instruction set. Each ISA's kernels are compiled in translation units of their own
// (src/cpu/isa/*.cpp, once per ISA with that ISA's flags) inside namespace gdn::cpu::GDN_ISA_NS and reached only
// through this table, so no instruction of an ISA the CPU lacks can run.
#pragma once
#include <cstdint>

#include "core/problem.h"

namespace gdn::cpu {

enum class Isa : int32_t {
  kBaseline = 0,
  kNeon = 1,
  kAvx2 = 2,
  kAvx512 = 3,
  kAmx = 4
};  // kAmx: avx512 table + the AMX chunk kernel

// One unit of the delta rule: sequence `seq`, key-head group / heads [head_begin, head_end), V columns [v_begin,
// v_end).
struct RuleItem {
  int64_t seq;
  int64_t head_begin, head_end;  // value heads that share one key head are adjacent in an item where the map allows
  int64_t v_begin, v_end;
};

struct RuleKernels {
  int64_t lanes;         // fp32 lanes of a vector
  int64_t panel_v;       // V columns that a chunk kernel keeps together; v_begin of a RuleItem is a multiple of it
  int64_t block_tokens;  // tokens per block of the chunk kernel
  // Scratch bytes one item needs.
  int64_t (*chunk_scratch)(const RuleProblem&, const RuleItem&);
  void (*chunk)(const RuleProblem&, const RuleItem&, void* scratch);
  int64_t (*recurrent_scratch)(const RuleProblem&, const RuleItem&);
  void (*recurrent)(const RuleProblem&, const RuleItem&, void* scratch);
};

// Elementwise and convolution kernels work on ranges so that the caller splits them over threads.
struct OpKernels {
  // conv1d: sequence `seq`, channels [c_begin, c_end), tokens [t_begin, t_end) of that sequence (relative). [0, len)
  // does everything for these channels: y, which may be x, and the final state, which may be the initial state. A part
  // of the tokens (y apart from x only) gives y alone, and [len, len) then the state alone; t_begin is 0 or >= W - 1.
  void (*conv1d)(const ConvProblem&, int64_t seq, int64_t c_begin, int64_t c_end, int64_t t_begin, int64_t t_end);
  void (*gate)(const GateProblem&, int64_t row_begin, int64_t row_end);  // flattened rows[0]*rows[1]*rows[2]
  void (*norm)(const NormProblem&, int64_t row_begin, int64_t row_end);
  void (*rope)(const RopeProblem&, int64_t token_begin, int64_t token_end);  // flattened B*T
};

struct IsaTable {
  const char* name;  // "avx2"
  const RuleKernels* rule;
  const OpKernels* ops;
  double (*fma_loop)(int64_t iterations, float seed);  // see isa/peak.cpp
  int64_t (*fma_loop_flop)();
};

bool isa_compiled(Isa isa);
bool isa_usable(Isa isa);                                  // compiled, and the CPU and OS have it
Isa active_isa();                                          // best usable under the cap
bool set_isa_cap(const char* name, const char** why_not);  // "auto" lifts it
const char* isa_name(Isa isa);
const IsaTable& isa_table(Isa isa);  // kAmx gives the avx512 table

}  // namespace gdn::cpu
