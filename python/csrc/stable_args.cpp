// SPDX-License-Identifier: MIT
#include "stable_args.h"

#include <dlfcn.h>

namespace gdn_torch {
namespace {

struct DtypeMap {
  int32_t f32 = aoti_torch_dtype_float32();
  int32_t bf16 = aoti_torch_dtype_bfloat16();
  int32_t f16 = aoti_torch_dtype_float16();
  int32_t f64 = aoti_torch_dtype_float64();
  int32_t i32 = aoti_torch_dtype_int32();
  int32_t i64 = aoti_torch_dtype_int64();
  int32_t u8 = aoti_torch_dtype_uint8();
  int32_t boolean = aoti_torch_dtype_bool();
  int32_t cpu = aoti_torch_device_type_cpu();
  int32_t cuda = aoti_torch_device_type_cuda();
};

const DtypeMap& shim() {
  static const DtypeMap map;
  return map;
}

// 0 when libgdn has no such dtype.
int32_t gdn_dtype(int32_t dtype) {
  const DtypeMap& map = shim();
  if (dtype == map.f32) return GDN_F32;
  if (dtype == map.bf16) return GDN_BF16;
  if (dtype == map.f16) return GDN_F16;
  if (dtype == map.f64) return GDN_F64;
  if (dtype == map.i32) return GDN_I32;
  if (dtype == map.i64) return GDN_I64;
  if (dtype == map.u8 || dtype == map.boolean) return GDN_U8;
  return 0;
}

// For messages about dtypes that libgdn has not.
std::string dtype_name(int32_t dtype) {
  if (dtype == aoti_torch_dtype_int8()) return "int8";
  if (dtype == aoti_torch_dtype_int16()) return "int16";
  if (dtype == aoti_torch_dtype_complex64()) return "complex64";
  if (dtype == aoti_torch_dtype_complex128()) return "complex128";
  return "number " + std::to_string(dtype);
}

[[noreturn]] void invalid(const char* op, const char* name, const std::string& found, const char* expected) {
  throw std::invalid_argument(std::string(op) + ": argument '" + name + "': found " + found + ", expected " + expected);
}

// The shim that returns a stream lives in libtorch_cuda, which a CPU-only PyTorch does not have: linking against it
// would take one binary per kind of PyTorch. Where CUDA tensors exist it is loaded, but outside the global scope.
using CurrentStream = AOTITorchError (*)(int32_t device_index, void** stream);

CurrentStream find_current_stream() {
  constexpr const char* kName = "aoti_torch_get_current_cuda_stream";
  if (void* symbol = dlsym(RTLD_DEFAULT, kName)) return reinterpret_cast<CurrentStream>(symbol);
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : reinterpret_cast<CurrentStream>(dlsym(library, kName));
}

}  // namespace

const gdn_tensor* TensorArg::fill(const char* op, bool output) {
  if (handle_ == nullptr) return nullptr;
  int32_t device = 0, dtype = 0;
  int64_t ndim = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle_, &device));
  if (device != shim().cpu && device != shim().cuda) {
    invalid(op, name_, "a tensor on device type " + std::to_string(device), "a CPU tensor or a CUDA tensor");
  }
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle_, &dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle_, &ndim));
  view_.dtype = gdn_dtype(dtype);
  if (view_.dtype == 0) {
    invalid(op, name_, "torch dtype " + dtype_name(dtype),
            "float32, bfloat16, float16, float64, int32, int64, uint8 or bool");
  }
  if (ndim > GDN_MAX_DIMS) invalid(op, name_, std::to_string(ndim) + " dimensions", "at most 6 dimensions");
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle_, &sizes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle_, &strides));
  view_.device_type = device == shim().cuda ? GDN_CUDA : GDN_CPU;
  if (view_.device_type == GDN_CUDA) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle_, &view_.device_id));
  }
  view_.ndim = static_cast<int32_t>(ndim);
  for (int64_t i = 0; i < ndim; ++i) {
    view_.shape[i] = sizes[i];
    view_.strides[i] = strides[i];
  }
  if (output) {
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(handle_, &view_.data));
  } else {
    const void* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle_, &data));
    view_.data = const_cast<void*>(data);
  }
  return &view_;
}

// detail::to<std::string> of these headers leaks its copy, so the handle is read here.
std::optional<std::string> ArgReader::optional_string() {
  const std::optional<StringHandle> handle = torch::stable::detail::to<std::optional<StringHandle>>(*next_++);
  if (!handle) return std::nullopt;
  size_t length = 0;
  const char* data = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(*handle, &length));
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(*handle, &data));
  std::string text(data, length);
  STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(*handle));
  return text;
}

int32_t shim_dtype(int32_t dtype) {
  switch (dtype) {
    case GDN_BF16:
      return shim().bf16;
    case GDN_F16:
      return shim().f16;
    case GDN_F64:
      return shim().f64;
    default:
      return shim().f32;
  }
}

AtenTensorHandle new_tensor(const gdn_tensor& like, int32_t ndim, const int64_t* shape, const int64_t* strides,
                            int32_t dtype, bool zero) {
  int64_t contiguous[GDN_MAX_DIMS] = {};
  if (strides == nullptr) {
    int64_t stride = 1;
    for (int32_t i = ndim - 1; i >= 0; --i) {
      contiguous[i] = stride;
      stride *= shape[i] > 0 ? shape[i] : 1;
    }
    strides = contiguous;
  }
  AtenTensorHandle handle = nullptr;
  const int32_t device = like.device_type == GDN_CUDA ? shim().cuda : shim().cpu;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(ndim, shape, strides, shim_dtype(dtype), device, like.device_id, &handle));
  if (zero) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(handle));
  return handle;
}

void* current_stream(const gdn_tensor& t) {
  if (t.device_type != GDN_CUDA) return nullptr;
  static const CurrentStream current = find_current_stream();
  if (current == nullptr) {
    throw std::runtime_error(
        "unsupported: gdn: found a CUDA tensor, but no libtorch_cuda.so with "
        "aoti_torch_get_current_cuda_stream in this process");
  }
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(current(t.device_id, &stream));
  return stream;
}

void check(gdn_status status) {
  switch (status) {
    case GDN_OK:
      return;
    case GDN_INVALID_ARGUMENT:
      throw std::invalid_argument(gdn_last_error());
    case GDN_OUT_OF_MEMORY:
      throw std::bad_alloc();
    case GDN_UNSUPPORTED:
      throw std::runtime_error(std::string("unsupported: ") + gdn_last_error());
    default:
      throw std::runtime_error(std::string("internal: ") + gdn_last_error());
  }
}

}  // namespace gdn_torch
