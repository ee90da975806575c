// SPDX-License-Identifier: MIT
// Status with a message; the only error channel inside the library (no exceptions cross a function that returns one).
#pragma once
#include <string>
#include <utility>

#include "gdn/gdn.h"

namespace gdn {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(gdn_status code, std::string message) : code_(code), message_(std::move(message)) {}
  bool ok() const { return code_ == GDN_OK; }
  gdn_status code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  gdn_status code_ = GDN_OK;
  std::string message_;
};

}  // namespace gdn
