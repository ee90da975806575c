// SPDX-License-Identifier: MIT
#pragma once
#include <cstdint>

namespace gdn::cuda {

// Whether a GPU of this compute capability can run the code of this build.
bool architecture_runs_on(int32_t major, int32_t minor);

}  // namespace gdn::cuda
