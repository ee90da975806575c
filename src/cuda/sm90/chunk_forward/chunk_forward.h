// SPDX-License-Identifier: MIT
// The Hopper tier's chunk_forward as the implementation list sees it.
#pragma once
#include <vector>

#include "core/impl_list.h"
#include "core/problem.h"
#include "core/status.h"

namespace gdn::cuda::sm90 {

const char* refuse_chunk(const RuleProblem& problem);
void plan_chunk(const RuleProblem& problem, Plan* plan);
std::vector<PlanOption> chunk_options(const RuleProblem& problem);
std::vector<ModelValue> chunk_model(const RuleProblem& problem, const Plan& plan);
Status run_chunk(const RuleProblem& problem, const Plan& plan);

}  // namespace gdn::cuda::sm90
