// SPDX-License-Identifier: MIT
// The function table of one ISA (compiled once per ISA).
#include "cpu/isa/kernels.h"

namespace gdn::cpu::GDN_ISA_NS {

const RuleKernels kRule = {lanes(),    chunk_panel_v(),   chunk_block_tokens(), chunk_scratch,
                           chunk_item, recurrent_scratch, recurrent_item};
const OpKernels kOps = {conv1d_range, gate_range, norm_range, rope_range};
extern const IsaTable kTable;
const IsaTable kTable = {GDN_ISA_NAME, &kRule, &kOps, fma_loop, fma_loop_flop};

}  // namespace gdn::cpu::GDN_ISA_NS
