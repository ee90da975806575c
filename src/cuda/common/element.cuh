// SPDX-License-Identifier: MIT
// Elements of any dtype, read and written as float. dtype is uniform over the grid, so the switches do not diverge.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/common/rule_params.h"
#include "gdn/gdn.h"

namespace gdn::cuda {

__device__ __forceinline__ float load_float(const void* data, int32_t dtype, int64_t index) {
  switch (dtype) {
    case GDN_F32:
      // Not __ldg: a kernel may write the tensor that it reads (a state in place).
      return static_cast<const float*>(data)[index];
    case GDN_BF16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case GDN_F16:
      return __half2float(static_cast<const __half*>(data)[index]);
    default:
      return static_cast<float>(static_cast<const double*>(data)[index]);
  }
}

__device__ __forceinline__ void store_float(void* data, int32_t dtype, int64_t index, float value) {
  switch (dtype) {
    case GDN_F32:
      static_cast<float*>(data)[index] = value;
      break;
    case GDN_BF16:
      static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16(value);
      break;
    case GDN_F16:
      static_cast<__half*>(data)[index] = __float2half(value);
      break;
    default:
      static_cast<double*>(data)[index] = static_cast<double>(value);
  }
}

__device__ __forceinline__ int64_t load_index(const IndexRef& ref, int64_t i0, int64_t i1 = 0) {
  const int64_t offset = i0 * ref.stride[0] + i1 * ref.stride[1];
  switch (ref.dtype) {
    case GDN_I32:
      return static_cast<const int32_t*>(ref.data)[offset];
    case GDN_I64:
      return static_cast<const int64_t*>(ref.data)[offset];
    default:
      return static_cast<const uint8_t*>(ref.data)[offset];
  }
}

}  // namespace gdn::cuda
