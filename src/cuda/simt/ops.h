// SPDX-License-Identifier: MIT
// Launches of the memory-bound operators. Strides of the parameters are as the problem's; `rows` are the leading
// dimensions (right-aligned, padded with 1) and are merged here.
#pragma once
#include <cuda_runtime.h>

#include "cuda/common/op_params.h"

namespace gdn::cuda {

cudaError_t launch_conv1d(ConvParams params, int64_t batch, bool in_place, cudaStream_t stream);
cudaError_t launch_gate(GateParams params, const int64_t* rows, cudaStream_t stream);
cudaError_t launch_glu(GluParams params, int64_t D, const int64_t* rows, cudaStream_t stream);
cudaError_t launch_norm(NormParams params, const int64_t* rows, cudaStream_t stream);
cudaError_t launch_rope(RopeParams params, cudaStream_t stream);

}  // namespace gdn::cuda
