// SPDX-License-Identifier: MIT
#pragma once
#include "gdn/gdn.h"

namespace gdn {

// Keeps the message for gdn_last_error of this thread (cut to a fixed size: storing it cannot fail) and returns code.
gdn_status set_last_error(gdn_status code, const char* message) noexcept;

}  // namespace gdn
