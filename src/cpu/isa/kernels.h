// SPDX-License-Identifier: MIT
// The kernels every ISA defines (chunk.cpp, recurrent.cpp, conv1d.cpp, elementwise.cpp, rope.cpp); collected by
// table.cpp.
#pragma once
#include "cpu/dispatch.h"

namespace gdn::cpu::GDN_ISA_NS {

int64_t lanes();
int64_t chunk_panel_v();
int64_t chunk_block_tokens();
int64_t chunk_scratch(const RuleProblem& p, const RuleItem& item);
void chunk_item(const RuleProblem& p, const RuleItem& item, void* scratch);
int64_t recurrent_scratch(const RuleProblem& p, const RuleItem& item);
void recurrent_item(const RuleProblem& p, const RuleItem& item, void* scratch);

void conv1d_range(const ConvProblem& p, int64_t seq, int64_t c_begin, int64_t c_end, int64_t t_begin, int64_t t_end);
void gate_range(const GateProblem& p, int64_t row_begin, int64_t row_end);
void norm_range(const NormProblem& p, int64_t row_begin, int64_t row_end);
void rope_range(const RopeProblem& p, int64_t token_begin, int64_t token_end);

// peak.cpp: `iterations` rounds of fma_loop_flop() FLOP each; the result only keeps the loop alive.
double fma_loop(int64_t iterations, float seed);
int64_t fma_loop_flop();

}  // namespace gdn::cpu::GDN_ISA_NS
