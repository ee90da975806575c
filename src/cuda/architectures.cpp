// SPDX-License-Identifier: MIT
// Which GPUs this build has code for: GDN_CUDA_ARCHS is the CMake list, "75-real 90a-real 120".
#include <cstdlib>
#include <sstream>
#include <string>

#include "cuda/common/architectures.h"
#include "cuda/cuda.h"

namespace gdn::cuda {

const char* architectures() { return GDN_CUDA_ARCHS; }

bool architecture_runs_on(int32_t major, int32_t minor) {
  std::istringstream list(GDN_CUDA_ARCHS);
  for (std::string item; list >> item;) {
    char* end = nullptr;
    const int32_t number = static_cast<int32_t>(std::strtol(item.c_str(), &end, 10));
    const std::string rest = end;
    const bool real = rest.find("-virtual") == std::string::npos, exact = rest.rfind("a", 0) == 0;
    const bool ptx = rest.find("-real") == std::string::npos;
    const int32_t device = major * 10 + minor;
    if (exact ? number == device : real && number / 10 == major && number % 10 <= minor) return true;
    if (!exact && ptx && device >= number) return true;
  }
  return false;
}

}  // namespace gdn::cuda
