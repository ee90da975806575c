// SPDX-License-Identifier: MIT
// Host: the tensor maps of q, k, v, o.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include "cuda/common/rule_params.h"
#include "gdn/gdn.h"

namespace gdn::cuda::sm90 {

// The driver's encoder, looked up once: the library does not link the driver. Null where there is none.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// What the copy engine asks of a [B, T, H, D] view of 16-bit elements; null: it can take it.
inline const char* refuse_tensor_map(const void* data, const int64_t* stride, const int64_t* shape) {
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return "the data is not 16-byte aligned";
  if (stride[3] != 1) return "the last dimension is not contiguous";
  for (int i = 0; i < 3; ++i) {
    if (shape[i] <= 1) continue;
    if (stride[i] % 8 != 0) return "a stride is not a multiple of 16 bytes";
    if (stride[i] <= 0 || stride[i] >= int64_t{1} << 39) return "a stride is not between 1 and 2^39";
  }
  return nullptr;
}

inline CUresult encode_tensor_map(CUtensorMap* map, const TensorRef& t, int64_t batch, int64_t tokens, int64_t heads,
                                  int64_t channels) {
  const cuuint64_t shape[4] = {static_cast<cuuint64_t>(channels), static_cast<cuuint64_t>(heads),
                               static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(batch)};
  // Strides of dimensions that are never stepped along may be anything: the map wants a multiple of 16.
  const auto bytes = [&](int dim, int64_t extent) {
    return static_cast<cuuint64_t>(extent > 1 ? t.stride[dim] * 2 : channels * 2);
  };
  const cuuint64_t strides[3] = {bytes(2, heads), bytes(1, tokens), bytes(0, batch)};
  const cuuint32_t box[4] = {64, 1, 64, 1}, steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      t.dtype == GDN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return tensor_map_encoder()(map, type, 4, t.data, shape, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                              CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace gdn::cuda::sm90
