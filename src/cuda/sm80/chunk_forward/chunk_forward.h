// SPDX-License-Identifier: MIT
// chunk_sm80 as core sees it.
#pragma once
#include "core/impl_list.h"
#include "core/problem.h"
#include "core/status.h"

namespace gdn::cuda::sm80 {

const char* refuse_chunk(const RuleProblem&);
void plan_chunk(const RuleProblem&, Plan*);
Status run_chunk(const RuleProblem&, const Plan&);

}  // namespace gdn::cuda::sm80
