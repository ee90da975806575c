// SPDX-License-Identifier: MIT
// Checks of the delta rule's arguments that need nothing of how validate.cpp reads them.
#pragma once
#include "core/problem.h"
#include "core/validate_util.h"

namespace gdn::validation {

// Options that are no tensors; into *p.
bool check_scalars(Checker* c, const gdn_rule_args& a, RuleProblem* p);

// GDN_CHECK: every slot of token_state_indices and of checkpoint_indices is written once, and with checkpoints in the
// state pool itself no checkpoint lands in a slot that the call also reads or writes as a state.
bool check_duplicates(Checker* c, const RuleProblem& p);

// Of every output and the workspace with everything else.
bool check_overlaps(Checker* c, const RuleProblem& p);

}  // namespace gdn::validation
