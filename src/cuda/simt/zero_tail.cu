// SPDX-License-Identifier: MIT
// Zeros in the rows of o past cu_seqlens[N]. Where the tail begins only the device knows, so a fixed grid strides over
// what it finds: nothing for most calls, instead of a memset of the whole output before each.
#include "cuda/common/launch.h"
#include "cuda/common/make_params.h"
#include "cuda/common/sequence.cuh"
#include "cuda/cuda.h"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 256;

struct TailParams {
  TensorRef o;  // [1, T, Hv, V]
  IndexRef cu_seqlens;
  int64_t T = 0;
  int32_t Hv = 0, V = 0;
};

// A last entry out of range (the sequences' kernel flags it) names no tail: the sequences before it may own any row.
__global__ void __launch_bounds__(kThreads) zero_tail_kernel(const __grid_constant__ TailParams p) {
  const int64_t end = load_index(p.cu_seqlens, p.cu_seqlens.size - 1);
  if (end < 0) return;
  for (int64_t t = end + blockIdx.x; t < p.T; t += gridDim.x) {
    for (int32_t h = 0; h < p.Hv; ++h) {
      const int64_t base = t * p.o.stride[1] + h * p.o.stride[2];
      for (int32_t j = threadIdx.x; j < p.V; j += kThreads) {
        store_float(p.o.data, p.o.dtype, base + j * p.o.stride[3], 0.0f);
      }
    }
  }
}

}  // namespace

Status run_zero_tail(const RuleProblem& p) {
  TailParams params;
  params.o = tensor_ref_of(p.o);
  params.cu_seqlens = index_ref_of(p.cu_seqlens);
  params.T = p.T;
  params.Hv = static_cast<int32_t>(p.Hv);
  params.V = static_cast<int32_t>(p.V);
  const int64_t grid = p.T < 2048 ? p.T : 2048;
  return launch_on(p, p.op == GDN_OP_RECURRENT ? "recurrent" : "chunk_forward", [&](cudaStream_t stream) {
    return launch(zero_tail_kernel, dim3(static_cast<unsigned>(grid)), dim3(kThreads), 0, stream, params);
  });
}

}  // namespace gdn::cuda
