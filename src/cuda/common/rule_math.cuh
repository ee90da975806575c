// SPDX-License-Identifier: MIT
// Gate and write strength of one token and value head, in fp32 as docs/math.md says.
#pragma once
#include "cuda/common/element.cuh"

namespace gdn::cuda {

inline constexpr float kMinGate = -104;  // e^-104 is 0 in fp32 (docs/math.md)

__device__ __forceinline__ float round_to_dtype(float x, int32_t dtype) {
  switch (dtype) {
    case GDN_BF16:
      return __bfloat162float(__float2bfloat16(x));
    case GDN_F16:
      return __half2float(__float2half(x));
    default:
      return x;
  }
}

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// exp(g); a NaN stays NaN.
__device__ __forceinline__ float token_decay(const RuleParams& p, int64_t batch, int64_t token, int32_t head) {
  if (p.g.data == nullptr) return 1.0f;
  const float x = load_float(p.g.data, p.g.dtype, batch * p.g.stride[0] + token * p.g.stride[1] + head * p.g.stride[2]);
  if (p.gate_form == GDN_GATE_LINEAR) return x;
  float g = x;
  if (p.gate_form == GDN_GATE_RAW) {
    const float a_log = load_float(p.A_log.data, p.A_log.dtype, head * p.A_log.stride[0]);
    const float bias =
        p.dt_bias.data != nullptr ? load_float(p.dt_bias.data, p.dt_bias.dtype, head * p.dt_bias.stride[0]) : 0.0f;
    g = -expf(a_log) * softplus(x + bias);
  }
  return expf(g < kMinGate ? kMinGate : g);
}

__device__ __forceinline__ float token_beta(const RuleParams& p, int64_t batch, int64_t token, int32_t head) {
  if (p.beta.data == nullptr) return 1.0f;
  const float b = load_float(p.beta.data, p.beta.dtype,
                             batch * p.beta.stride[0] + token * p.beta.stride[1] + head * p.beta.stride[2]);
  if (p.beta_form == GDN_BETA_VALUE) return b;
  const float beta = (p.beta_form == GDN_BETA_SIGMOID2 ? 2.0f : 1.0f) * sigmoid(b);
  return p.round_beta != 0 ? round_to_dtype(beta, p.beta.dtype) : beta;
}

__device__ __forceinline__ int32_t key_head_of(const RuleParams& p, int32_t head) {
  return p.head_map == GDN_HEADS_TILED ? head % p.Hk : head / (p.Hv / p.Hk);
}

}  // namespace gdn::cuda
