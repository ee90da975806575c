// SPDX-License-Identifier: MIT
// From validated problems to kernel parameters.
#pragma once
#include "core/problem.h"
#include "cuda/common/rule_params.h"

namespace gdn::cuda {

// data is nullptr exactly for an absent tensor.
TensorRef tensor_ref_of(const View& view);
IndexRef index_ref_of(const View& view);

// Needs the problem's device to be current (launch.h: launch_on).
RuleParams make_params(const RuleProblem& problem);

}  // namespace gdn::cuda
