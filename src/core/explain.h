// SPDX-License-Identifier: MIT
// The JSON behind gdn_explain and gdn_info.
#pragma once
#include <string>

#include "core/status.h"

namespace gdn {

Status explain(int32_t op, const gdn_rule_args* args, std::string* json);
void describe_library(std::string* json);

}  // namespace gdn
