// SPDX-License-Identifier: MIT
// Boxed operator arguments of PyTorch's stable ABI as gdn_tensor views.
//
// torch::stable::Tensor costs a shared_ptr allocation per argument; a decode step passes a dozen of them, so the
// handles are read and released here directly. Read every argument before anything that may throw: a StableIValue that
// is never read is never freed.
#pragma once
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "gdn/gdn.h"

namespace gdn_torch {

// Owns one tensor argument (or an output until it is returned); absent when handle is null.
class TensorArg {
 public:
  TensorArg(const char* name, AtenTensorHandle handle) : name_(name), handle_(handle) {}
  TensorArg(const TensorArg&) = delete;
  TensorArg& operator=(const TensorArg&) = delete;
  ~TensorArg() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }

  bool present() const { return handle_ != nullptr; }
  // nullptr when absent. Throws std::invalid_argument for what libgdn could not even describe.
  const gdn_tensor* read(const char* op) { return fill(op, false); }
  const gdn_tensor* write(const char* op) { return fill(op, true); }
  const gdn_tensor& view() const { return view_; }
  // Gives the handle away as an operator's result.
  StableIValue release() {
    AtenTensorHandle handle = handle_;
    handle_ = nullptr;
    return torch::stable::detail::from(handle);
  }

 private:
  const gdn_tensor* fill(const char* op, bool output);

  const char* name_;
  AtenTensorHandle handle_;
  gdn_tensor view_{};
};

// Reads a boxed call's arguments in schema order.
class ArgReader {
 public:
  explicit ArgReader(StableIValue* stack) : next_(stack) {}
  AtenTensorHandle tensor() { return torch::stable::detail::to<AtenTensorHandle>(*next_++); }
  AtenTensorHandle optional_tensor() {
    return torch::stable::detail::to<std::optional<AtenTensorHandle>>(*next_++).value_or(nullptr);
  }
  double real() { return torch::stable::detail::to<double>(*next_++); }
  int64_t integer() { return torch::stable::detail::to<int64_t>(*next_++); }
  int32_t integer32() { return static_cast<int32_t>(integer()); }
  bool boolean() { return torch::stable::detail::to<bool>(*next_++); }
  std::optional<std::string> optional_string();

 private:
  StableIValue* next_;
};

int32_t shim_dtype(int32_t gdn_dtype);

// A new tensor on the device of `like`; strides NULL: contiguous.
AtenTensorHandle new_tensor(const gdn_tensor& like, int32_t ndim, const int64_t* shape, const int64_t* strides,
                            int32_t gdn_dtype, bool zero = false);

// PyTorch's current stream of the tensor's device; nullptr for a CPU tensor.
void* current_stream(const gdn_tensor& t);

// GDN_INVALID_ARGUMENT: std::invalid_argument (ValueError in Python); GDN_OUT_OF_MEMORY: std::bad_alloc (MemoryError);
// the others: std::runtime_error with a prefix that gdn.torch turns into its own exceptions.
void check(gdn_status status);

}  // namespace gdn_torch
