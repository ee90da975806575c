// SPDX-License-Identifier: MIT
#include "core/validate_util.h"

#include <algorithm>
#include <cstring>

#include "cuda/cuda.h"

namespace gdn::validation {
namespace {

constexpr int64_t kLargestUnusedStride = int64_t{1} << 40;

constexpr size_t kMaxStructSize = 65536;  // beyond: struct_size was never set

std::string number(int64_t value) { return std::to_string(value); }

std::string dims_text(std::initializer_list<Dim> dims) {
  std::string names = "[", values;
  for (const Dim& d : dims) {
    if (names.size() > 1) names += ", ";
    names += d.name;
    if (d.size == kAnySize || (d.name[0] >= '0' && d.name[0] <= '9')) continue;
    const std::string item = std::string(d.name) + " = " + number(d.size);
    if (values.find(item) == std::string::npos) values += (values.empty() ? " with " : ", ") + item;
  }
  return names + "]" + values;
}

std::string dtypes_text(uint32_t dtypes) {
  std::string text;
  for (int32_t d = GDN_F32; d <= GDN_U8; ++d) {
    if ((dtypes & dtype_bit(d)) != 0) text += (text.empty() ? "" : ", ") + std::string(dtype_text(d));
  }
  return text;
}

}  // namespace

std::string shape_text(const int64_t* shape, int32_t ndim) {
  std::string text = "[";
  for (int32_t i = 0; i < ndim; ++i) text += (i > 0 ? ", " : "") + number(shape[i]);
  return text + "]";
}

const char* dtype_text(int32_t dtype) {
  switch (dtype) {
    case GDN_F32:
      return "F32";
    case GDN_BF16:
      return "BF16";
    case GDN_F16:
      return "F16";
    case GDN_F64:
      return "F64";
    case GDN_I32:
      return "I32";
    case GDN_I64:
      return "I64";
    case GDN_U8:
      return "U8";
    default:
      return "unknown";
  }
}

int64_t element_count(const View& view) {
  int64_t n = 1;
  for (int32_t i = 0; i < view.ndim; ++i) n *= view.shape[i];
  return n;
}

int64_t read_index(const View& view, int64_t i0, int64_t i1) {
  const char* p = view.at(i0, i1);
  switch (view.dtype) {
    case GDN_I32: {
      int32_t v;
      std::memcpy(&v, p, sizeof(v));
      return v;
    }
    case GDN_U8:
      return static_cast<unsigned char>(*p);
    default: {
      int64_t v;
      std::memcpy(&v, p, sizeof(v));
      return v;
    }
  }
}

bool same_view(const View& a, const View& b) {
  if (!a.present() || !b.present() || a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) return false;
  for (int32_t i = 0; i < a.ndim; ++i) {
    if (a.shape[i] != b.shape[i] || (a.shape[i] > 1 && a.stride[i] != b.stride[i])) return false;
  }
  return true;
}

bool Checker::fail(gdn_status code, const char* argument, const std::string& found, const std::string& expected) {
  if (status_.ok()) {
    status_ = Status(
        code, std::string(function_) + ": argument '" + argument + "': found " + found + ", expected " + expected);
  }
  return false;
}

bool Checker::read_struct(const void* args, size_t first_published_size, size_t known_size, void* out) {
  if (args == nullptr) return invalid("args", "NULL", "a pointer to the argument struct");
  size_t size = 0;
  std::memcpy(&size, args, sizeof(size));  // struct_size is the first field of every argument struct
  if (size < first_published_size || size > kMaxStructSize) {
    return invalid("struct_size", std::to_string(size),
                   "sizeof the argument struct, at least " + std::to_string(first_published_size));
  }
  const char* bytes = static_cast<const char*>(args);
  for (size_t i = known_size; i < size; ++i) {
    if (bytes[i] != 0) {
      return fail(GDN_UNSUPPORTED, "struct_size",
                  std::to_string(size) + " with a field set past byte " + std::to_string(known_size),
                  "fields this version (" GDN_VERSION_STRING ") knows, or zero");
    }
  }
  std::memset(out, 0, known_size);
  std::memcpy(out, args, std::min(size, known_size));
  return true;
}

bool Checker::shape_is(const char* argument, const gdn_tensor* t, std::initializer_list<Dim> dims) {
  bool ok = t->ndim == static_cast<int32_t>(dims.size());
  if (ok) {
    int32_t i = 0;
    for (const Dim& d : dims) {
      ok = ok && t->shape[i] >= 0 && (d.size == kAnySize || d.size == t->shape[i]);
      ++i;
    }
  }
  if (ok) return true;
  if (t->ndim < 0 || t->ndim > GDN_MAX_DIMS) return invalid(argument, "ndim " + number(t->ndim), dims_text(dims));
  return invalid(argument, "shape " + shape_text(t->shape, t->ndim), dims_text(dims));
}

bool Checker::device_is(const char* argument, const gdn_tensor* t) {
  const auto text = [](int32_t type, int32_t id) {
    return type == GDN_CUDA ? "CUDA device " + number(id) : std::string("the CPU");
  };
  if (t->device_type != GDN_CPU && t->device_type != GDN_CUDA) {
    return invalid(argument, "device_type " + number(t->device_type), "GDN_CPU (1) or GDN_CUDA (2)");
  }
  const bool cuda = t->device_type == GDN_CUDA;
  if (placed_by_ != nullptr) {
    if (t->device_type == place_.device_type && (!cuda || t->device_id == place_.device_id)) return true;
    return invalid(argument, "a tensor on " + text(t->device_type, t->device_id),
                   "one on " + text(place_.device_type, place_.device_id) + ", where '" + placed_by_ + "' lies");
  }
  placed_by_ = argument;
  if (!cuda) return true;
  if (!cuda::kBuilt) {
    return unsupported(argument, "a CUDA tensor", "a CPU tensor: this build has no CUDA backend");
  }
  const int32_t count = cuda::device_count();
  if (count == 0) {
    return unsupported(argument, "a CUDA tensor", std::string("a CPU tensor: ") + cuda::no_device_reason());
  }
  if (t->device_id < 0 || t->device_id >= count) {
    return invalid(argument, "a tensor on CUDA device " + number(t->device_id), "a device in 0.." + number(count - 1));
  }
  const cuda::DeviceInfo info = cuda::device_info(t->device_id);
  if (!info.has_code) {
    return unsupported(argument,
                       "a tensor on CUDA device " + number(t->device_id) + " (" + info.name + ", compute capability " +
                           number(info.major) + "." + number(info.minor) + ")",
                       std::string("a GPU that this build has code for: ") + cuda::architectures());
  }
  place_.device_type = GDN_CUDA;
  place_.device_id = t->device_id;
  return true;
}

bool Checker::host_metadata(const View& view, View* host) {
  *host = view;
  if (failed()) return false;
  if (!on_cuda() || !view.present() || view.data == nullptr) return true;
  host->data = nullptr;
  const ByteRange range = byte_range(view);
  if (plan_only_ || !debug_checks() || range.begin == range.end) return true;
  std::vector<char>& copy = copies_.emplace_back(static_cast<size_t>(range.end - range.begin));
  Status status = cuda::copy_to_host(place_, view.data, copy.size(), copy.data());
  if (!status.ok()) {
    status_ = Status(status.code(), std::string(function_) + ": " + status.message());
    return false;
  }
  host->data = copy.data();
  return true;
}

bool Checker::earlier_errors() {
  if (failed()) return false;
  if (!on_cuda() || plan_only_ || !debug_checks()) return true;
  const uint32_t flags = cuda::take_error_flags(place_.device_id);
  return flags == 0 || invalid("stream",
                               "an earlier call on CUDA device " + number(place_.device_id) +
                                   " with entries out of range in " + cuda::error_flags_text(flags),
                               "valid metadata (GDN_CHECK; the flag is cleared now)");
}

bool Checker::metadata(const char* argument, const gdn_tensor* t, uint32_t dtypes, bool output, View* view) {
  if (t->dtype < GDN_F32 || t->dtype > GDN_U8) {
    return invalid(argument, "dtype number " + number(t->dtype), dtypes_text(dtypes));
  }
  if ((dtypes & dtype_bit(t->dtype)) == 0) {
    if (t->dtype == GDN_F64 && (dtypes & kFloats) == kFloats) {
      return unsupported(argument, "dtype F64", dtypes_text(dtypes) + " (only the delta rule has an F64 reference)");
    }
    return invalid(argument, std::string("dtype ") + dtype_text(t->dtype), dtypes_text(dtypes));
  }
  if (!device_is(argument, t)) return false;

  const int64_t bytes = dtype_bytes(t->dtype);
  bool empty = false;
  for (int32_t i = 0; i < t->ndim; ++i) {
    if (t->shape[i] < 0) return invalid(argument, "shape " + shape_text(t->shape, t->ndim), "sizes >= 0");
    if (t->strides[i] < 0) return invalid(argument, "strides " + shape_text(t->strides, t->ndim), "strides >= 0");
    empty = empty || t->shape[i] == 0;
  }
  // Offsets and element counts must fit 64 bits, and the last byte the address space.
  int64_t count = 1, last = 0;
  bool overflow = false;
  for (int32_t i = 0; i < t->ndim && !empty; ++i) {
    int64_t reach = 0;
    overflow = overflow || __builtin_mul_overflow(count, t->shape[i], &count) ||
               __builtin_mul_overflow(t->shape[i] - 1, t->strides[i], &reach) ||
               __builtin_add_overflow(last, reach, &last);
  }
  int64_t extent = 0, count_bytes = 0;
  overflow = overflow || __builtin_add_overflow(last, int64_t{1}, &extent) ||
             __builtin_mul_overflow(extent, bytes, &extent) || __builtin_mul_overflow(count, bytes, &count_bytes);
  const uintptr_t address = reinterpret_cast<uintptr_t>(t->data);
  uintptr_t end = 0;
  overflow = overflow || __builtin_add_overflow(address, static_cast<uintptr_t>(extent), &end);
  if (overflow) {
    return invalid(argument,
                   "shape " + shape_text(t->shape, t->ndim) + " with strides " + shape_text(t->strides, t->ndim),
                   "a size and extent below 2^63 bytes");
  }
  if (t->data == nullptr && !empty && !plan_only_) {
    return invalid(argument, "NULL data with shape " + shape_text(t->shape, t->ndim), "a data pointer");
  }
  if ((address & static_cast<uintptr_t>(bytes - 1)) != 0) {
    return invalid(argument, "data address " + std::to_string(address),
                   "alignment to the element size of " + number(bytes) + " bytes (" + dtype_text(t->dtype) + ")");
  }

  view->data = static_cast<char*>(t->data);
  view->dtype = t->dtype;
  view->ndim = t->ndim;
  for (int32_t i = 0; i < t->ndim; ++i) {
    view->shape[i] = t->shape[i];
    // The stride of a dimension that is never stepped along may be any number: kernels multiply it before they know.
    const bool unused = (empty || t->shape[i] <= 1) && t->strides[i] > kLargestUnusedStride;
    view->stride[i] = unused ? 0 : t->strides[i];
  }
  if (output && !empty && overlaps_itself(*view) == Overlap::kYes) {
    return invalid(argument,
                   "shape " + shape_text(t->shape, t->ndim) + " with strides " + shape_text(t->strides, t->ndim),
                   "an output whose elements do not overlap each other");
  }
  return true;
}

bool Checker::optional(const char* argument, const gdn_tensor* t, uint32_t dtypes, std::initializer_list<Dim> dims,
                       View* view, bool output) {
  if (failed()) return false;
  if (t == nullptr) {
    view->ndim = -1;
    return true;
  }
  return shape_is(argument, t, dims) && metadata(argument, t, dtypes, output, view);
}

bool Checker::required(const char* argument, const gdn_tensor* t, uint32_t dtypes, std::initializer_list<Dim> dims,
                       View* view, bool output) {
  if (failed()) return false;
  if (t == nullptr) return invalid(argument, "NULL", "a tensor " + dims_text(dims));
  return optional(argument, t, dtypes, dims, view, output);
}

bool Checker::any_rank(const char* argument, const gdn_tensor* t, uint32_t dtypes, int32_t min_dims, int32_t max_dims,
                       View* view, bool output) {
  if (failed()) return false;
  if (t == nullptr) {
    view->ndim = -1;
    return true;
  }
  if (t->ndim < min_dims || t->ndim > max_dims) {
    return invalid(argument, "ndim " + number(t->ndim), "a rank of " + number(min_dims) + " to " + number(max_dims));
  }
  return metadata(argument, t, dtypes, output, view);
}

bool Checker::in_range(const char* argument, int64_t value, int64_t low, int64_t high) {
  if (failed()) return false;
  if (value >= low && value <= high) return true;
  return invalid(argument, number(value), "a value in " + number(low) + ".." + number(high));
}

bool Checker::positive_dim(const char* argument, const char* name, int64_t size) {
  if (failed()) return false;
  return size > 0 || invalid(argument, std::string(name) + " = " + number(size), std::string(name) + " >= 1");
}

bool Checker::threads(int32_t num_threads) {
  if (failed()) return false;
  return num_threads >= 0 || invalid("num_threads", number(num_threads), "0 (default) or a positive number");
}

bool Checker::disjoint(const char* output_name, const View& output, const char* other_name, const View& other,
                       bool may_be_same) {
  if (failed()) return false;
  if (!output.present() || !other.present() || output.data == nullptr || other.data == nullptr) return true;
  if (may_be_same && same_view(output, other)) return true;
  if (views_overlap(output, other) != Overlap::kYes) return true;
  return invalid(output_name, std::string("memory that overlaps '") + other_name + "'",
                 may_be_same ? std::string("memory of its own, or exactly the view of '") + other_name + "'"
                             : std::string("memory of its own"));
}

bool Checker::all_disjoint(std::initializer_list<Named> outputs, std::initializer_list<Named> inputs,
                           std::initializer_list<Pair> may_be_same) {
  if (failed()) return false;
  constexpr size_t kMaxTensors = 24;
  ByteRange ranges[kMaxTensors];  // of the outputs, then of the inputs
  const Named* tensors[kMaxTensors];
  size_t count = 0;
  const auto add = [&](const Named& t) {
    if (!t.view->present() || t.view->data == nullptr) return;
    ranges[count] = byte_range(*t.view);
    tensors[count++] = &t;
  };
  for (const Named& t : outputs) add(t);
  const size_t num_outputs = count;
  for (const Named& t : inputs) add(t);
  for (size_t i = 0; i < num_outputs; ++i) {
    for (size_t j = i + 1; j < count; ++j) {
      if (!ranges[i].meets(ranges[j])) continue;
      bool same = false;
      for (const Pair& p : may_be_same) same = same || (p.output == tensors[i]->view && p.other == tensors[j]->view);
      if (!disjoint(tensors[i]->name, *tensors[i]->view, tensors[j]->name, *tensors[j]->view, same)) return false;
    }
  }
  return true;
}

}  // namespace gdn::validation
