// SPDX-License-Identifier: MIT
// g = -exp(A_log) * softplus(a + dt_bias), or exp of it, and beta = sigmoid(b) or 2 sigmoid(b), in fp32.
//
// grid.x: blocks of rows (striding on), grid.y: blocks of heads. Block: `threads.x` threads along heads, kV adjacent heads
// each (kV = 4 with vectors of elements where every tensor's heads are adjacent and aligned, else 1), `threads.y` rows.
#include "cuda/common/launch.h"
#include "cuda/cuda.h"
#include "cuda/simt/op_host.h"
#include "cuda/simt/op_math.cuh"
#include "cuda/simt/ops.h"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kMaxFloat = 3.402823466e38f;

template <int kV>
__device__ __forceinline__ void load_heads(const TensorRef& t, int64_t offset, int64_t h, float* out) {
  if constexpr (kV == 1) {
    out[0] = load_element(t, offset + h * t.stride[3]);
  } else {
    load_floats<kV>(t.data, t.dtype, offset + h, out);
  }
}
template <int kV>
__device__ __forceinline__ void store_heads(const TensorRef& t, int64_t offset, int64_t h, const float* in) {
  if constexpr (kV == 1) {
    store_element(t, offset + h * t.stride[3], in[0]);
  } else {
    store_floats<kV>(in, t.data, t.dtype, offset + h);
  }
}

template <int kV>
__global__ void GDN_BOUNDS(kThreads, 5) gate_kernel(const __grid_constant__ GateParams p) {
  for (int64_t h = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kV; h < p.H;
       h += int64_t{gridDim.y} * blockDim.x * kV) {
    float rate[kV] = {}, dt_bias[kV] = {};
    if (p.a.data != nullptr) {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        // A finite rate: infinity times a softplus that underflowed to 0 would be NaN.
        const float r = expf(load_element(p.A_log, (h + v) * p.A_log.stride[0]));
        rate[v] = r > kMaxFloat ? -kMaxFloat : -r;
        if (p.dt_bias.data != nullptr) dt_bias[v] = load_element(p.dt_bias, (h + v) * p.dt_bias.stride[0]);
      }
    }
    const float factor = p.twice ? 2.0f : 1.0f;
    for (int64_t r = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; r < p.rows.count;
         r += int64_t{gridDim.x} * blockDim.y) {
      const RowIndex row = row_index(p.rows, r);
      float a[kV], b[kV];
      if (p.a.data != nullptr) load_heads<kV>(p.a, row_offset(p.a, row), h, a);
      if (p.b.data != nullptr) load_heads<kV>(p.b, row_offset(p.b, row), h, b);
      if (p.a.data != nullptr) {
#pragma unroll
        for (int v = 0; v < kV; ++v) {
          const float g = rate[v] * softplus(a[v] + dt_bias[v]);
          const float held = g < -kMaxFloat ? -kMaxFloat : g;
          a[v] = p.linear ? expf(held) : held;
        }
        store_heads<kV>(p.g, row_offset(p.g, row), h, a);
      }
      if (p.b.data != nullptr) {
#pragma unroll
        for (int v = 0; v < kV; ++v) b[v] = factor * sigmoid(b[v]);
        store_heads<kV>(p.beta, row_offset(p.beta, row), h, b);
      }
    }
  }
}

}  // namespace

cudaError_t launch_gate(GateParams p, const int64_t* rows, cudaStream_t stream) {
  constexpr int kVector = 4;
  p.rows = merge_rows(rows, {&p.a, &p.b, &p.g, &p.beta});
  if (p.rows.count == 0) return cudaSuccess;
  bool vectors = p.H % kVector == 0;
  for (const TensorRef* t : {&p.a, &p.b, &p.g, &p.beta}) {
    vectors = vectors && (t->data == nullptr || (t->stride[3] == 1 && aligned_to_16(*t, kVector, {0, 1, 2})));
  }
  const int64_t columns = vectors ? p.H / kVector : p.H;
  int64_t width = 1;
  while (width < columns && width < kThreads) width *= 2;
  const dim3 block(static_cast<unsigned>(width), static_cast<unsigned>(kThreads / width));
  const dim3 grid(grid_x(std::min(ceil_div(p.rows.count, block.y), kFullGrid)), grid_y(ceil_div(columns, width)));
  return launch(vectors ? gate_kernel<kVector> : gate_kernel<1>, grid, block, 0, stream, p);
}

Status run_gate(const GateProblem& problem) {
  GateParams p;
  p.a = tensor_ref(problem.a);
  p.b = tensor_ref(problem.b);
  p.A_log = tensor_ref(problem.A_log);
  p.dt_bias = tensor_ref(problem.dt_bias);
  p.g = tensor_ref(problem.g);
  p.beta = tensor_ref(problem.beta);
  p.H = problem.H;
  p.linear = problem.gate_form == GDN_GATE_LINEAR;
  p.twice = problem.beta_form == GDN_BETA_SIGMOID2;
  return launch_on(problem, "gate", [&](cudaStream_t stream) { return launch_gate(p, problem.rows, stream); });
}

}  // namespace gdn::cuda
