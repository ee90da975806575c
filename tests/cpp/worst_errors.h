// SPDX-License-Identifier: MIT
#pragma once
#include <algorithm>
#include <map>
#include <string>

namespace gdn_test {

// Largest relative L2 errors so far, by "implementation.contract.o" or ".state"; GPU runs record them.
inline std::map<std::string, double> worst_errors;

inline void remember_error(const std::string& name, double error) {
  double& known = worst_errors[name];
  known = std::max(known, error);
}

}  // namespace gdn_test
