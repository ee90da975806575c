// SPDX-License-Identifier: MIT
// gdn_*_args -> *Problem. Every check of the public contract is here; nothing behind it checks arguments again.
// `plan_only` accepts NULL data pointers (index tensors with NULL data are then taken as trivially valid).
// The problem is passed in so that its vectors keep their capacity from call to call (no allocation once warm).
#pragma once
#include "core/problem.h"
#include "core/status.h"

namespace gdn {

Status validate(int32_t op, const gdn_rule_args* args, bool plan_only, RuleProblem* out);
Status validate(const gdn_conv1d_args* args, ConvProblem* out);
Status validate(const gdn_gate_args* args, GateProblem* out);
Status validate(const gdn_rmsnorm_gated_args* args, NormProblem* out);
Status validate(const gdn_glu_args* args, NormProblem* out);
Status validate(const gdn_qk_rmsnorm_rope_args* args, RopeProblem* out);

}  // namespace gdn
