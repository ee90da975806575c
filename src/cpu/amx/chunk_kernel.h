// SPDX-License-Identifier: MIT
// One work item of the AMX prefill kernel. Defined in chunk_amx.cpp, which is compiled for AVX-512 + AMX; everything
// else about the implementation (refusals, plan, splitting) is in rule_amx.cpp, compiled for any CPU.
#pragma once
#include <cstdint>

#include "core/problem.h"

namespace gdn::cpu::amx {

inline constexpr int64_t kChunk = 64;
inline constexpr int64_t kMaxDim = 256;  // of K and V
// Chunks at most this long are run token by token: below it the token loop is cheaper than a (32-row) chunk.
inline constexpr int64_t kTokenLoopRows = 4;

// Sequence `seq`, value heads j_begin .. j_end - 1 of those that share key head `key_head`, V columns v_begin .. v_end
// - 1 (multiples of 32).
struct Item {
  int64_t seq, key_head, j_begin, j_end, v_begin, v_end;
};

// `exact`: every operand but K and Q as a pair of bf16 (chunk_stages.h says what that buys).
int64_t item_scratch_bytes(int64_t K, int64_t panel_v, int64_t num_heads, bool exact);
// No output column's bits depend on the item's other columns or heads, so any split gives the same result.
void run_item(const RuleProblem& p, const Item& item, bool exact, void* scratch);

// Cycles by stage, summed over this thread's items; counted only in builds with GDN_AMX_STAGES.
enum Stage : int32_t {
  kStageKeys,    // pack q and k, norms, transposes
  kStageScores,  // K K^T, Q K^T
  kStageGates,   // gates, Gamma, L, P
  kStageRead,    // K S, Q S
  kStageSolve,   // R, (I + L)^-1, packing of U'
  kStageOutput,  // P U', packing of U''
  kStageUpdate,  // S += K^T U'', S to bf16, o
  kStageTokens,  // token loop
  kStageState,   // initial and final state, checkpoints
  kNumStages
};
inline constexpr const char* kStageNames[kNumStages] = {"keys",   "scores", "gates",  "read", "solve",
                                                        "output", "update", "tokens", "state"};
uint64_t* stage_cycles();  // kNumStages entries of this thread

}  // namespace gdn::cpu::amx
