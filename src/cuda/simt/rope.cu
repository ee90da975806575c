// SPDX-License-Identifier: MIT
// RMSNorm of the heads of q and k, split of the output gate, NeoX rotary embedding: one pass over each head.
//
// Block: 8 warps, a token at a time (grid.x strides over the tokens); cos and sin of the token are made once, in shared
// memory; then each warp takes heads of q and k in turn (grid.y splits them where there are few tokens).
// rope_heads: all of q, k and the outputs of one dtype, channels adjacent and aligned, D <= 512: lane = 16 bytes of channels,
// kVectors times; the rotary channels are exchanged through shared memory. rope_any: every other call; a head is read twice,
// and partners of a rotation are read and normed once more (outputs never overlap inputs).
#include <cmath>

#include "cuda/common/launch.h"
#include "cuda/cuda.h"
#include "cuda/simt/op_host.h"
#include "cuda/simt/op_math.cuh"
#include "cuda/simt/ops.h"

namespace gdn::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kMaxVectorHead = 512;
constexpr int kMaxTable = 1024;  // rotary sizes whose angles are held in shared memory

// 4 / (2 pi) * theta^(-2i/R): a position times this is the angle in quarter turns.
__host__ __device__ inline double quarter_turns(double theta, int64_t i, int64_t R) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  return kTwoOverPi * pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(R));
}
__device__ __forceinline__ double turns_per_position(const RopeParams& p, int64_t i) {
  return p.R <= 2 * kHostAngles ? p.quarter_turns[i] : quarter_turns(p.theta, i, p.R);
}

__device__ __forceinline__ double position(const RopeParams& p, int64_t b, int64_t t, int64_t i) {
  int64_t axis = 0;
  if (p.axes == 3) {
    const int64_t third = i % 3;
    if (third == 1 && i < 3 * int64_t{p.mrope_section[1]}) axis = 1;
    if (third == 2 && i < 3 * int64_t{p.mrope_section[2]}) axis = 2;
  }
  const int64_t offset = axis * p.position_stride[0] + b * p.position_stride[1] + t * p.position_stride[2];
  if (p.position_dtype == GDN_I32) return static_cast<double>(static_cast<const int32_t*>(p.positions)[offset]);
  return static_cast<double>(static_cast<const int64_t*>(p.positions)[offset]);
}

// cos and sin of `turns` quarter turns. The reduction to [-1/2, 1/2] quarter turns is exact in double, so a position of
// 1e6 and more keeps full fp32 accuracy; the polynomials are minimax fits in the squared quarter turn.
__device__ __forceinline__ void cos_sin(double turns, float* c, float* s) {
  const double whole = rint(turns);
  const float f = static_cast<float>(turns - whole);
  const int quadrant = static_cast<int>(static_cast<long long>(whole) & 3);
  const float u = f * f;
  float sine = fmaf(u, 1.582058590e-4f, -4.681266090e-3f);
  sine = fmaf(u, sine, 7.969258271e-2f);
  sine = fmaf(u, sine, -6.459640961e-1f);
  sine = f * fmaf(u, sine, 1.570796327f);
  float cosine = fmaf(u, -2.485085889e-5f, 9.191616812e-4f);
  cosine = fmaf(u, cosine, -2.086346799e-2f);
  cosine = fmaf(u, cosine, 2.536695072e-1f);
  cosine = fmaf(u, cosine, -1.233700550f);
  cosine = fmaf(u, cosine, 1.0f);
  const float c0 = (quadrant & 1) != 0 ? sine : cosine, s0 = (quadrant & 1) != 0 ? cosine : sine;
  *c = quadrant == 1 || quadrant == 2 ? -c0 : c0;
  *s = quadrant >= 2 ? -s0 : s0;
}

// Rotary channel i of token (b, t).
__device__ __forceinline__ void angle(const RopeParams& p, int64_t b, int64_t t, int64_t i, float* c, float* s) {
  if (p.positions == nullptr) {
    *c = load_element(p.cos, b * p.cos.stride[0] + t * p.cos.stride[1] + i * p.cos.stride[2]);
    *s = load_element(p.sin, b * p.sin.stride[0] + t * p.sin.stride[1] + i * p.sin.stride[2]);
    return;
  }
  const int64_t half = p.R / 2, j = i < half ? i : i - half;
  cos_sin(position(p, b, t, j) * turns_per_position(p, j), c, s);
}

// The block's tables for one token: cos [R], sin [R]. Ends with a barrier.
__device__ __forceinline__ void load_angles(const RopeParams& p, int64_t b, int64_t t, float* s_cos, float* s_sin) {
  const int64_t half = p.R / 2;
  const int64_t count = p.positions == nullptr ? p.R : half;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    angle(p, b, t, i, &s_cos[i], &s_sin[i]);
    if (p.positions != nullptr) {
      s_cos[half + i] = s_cos[i];
      s_sin[half + i] = s_sin[i];
    }
  }
  __syncthreads();
}

__device__ __forceinline__ float norm_weight(const RopeParams& p, const TensorRef& w, int64_t i) {
  if (w.data == nullptr) return 1.0f;
  return load_element(w, i * w.stride[0]) + (p.zero_centered ? 1.0f : 0.0f);
}
__device__ __forceinline__ int64_t head_offset(const TensorRef& t, int64_t b, int64_t token, int64_t h) {
  return b * t.stride[0] + token * t.stride[1] + h * t.stride[2];
}
__device__ __forceinline__ float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Shared memory: cos [R], sin [R], weights of q and k [2][D], normed rotary channels [kWarps][R].
template <class T, int kVectors>
__global__ void GDN_BOUNDS(kThreads, 2) rope_heads(const __grid_constant__ RopeParams p) {
  constexpr int kV = 16 / static_cast<int>(sizeof(T));
  extern __shared__ float4 shared[];
  const int D = static_cast<int>(p.D), R = static_cast<int>(p.R), half = R / 2;
  float* s_weights = reinterpret_cast<float*>(shared);  // [2][D], read 16 bytes at a time: D is a multiple of 4
  float* s_cos = s_weights + 2 * D;
  float* s_sin = s_cos + R;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  float* s_normed = s_sin + R + warp * R;
  for (int i = static_cast<int>(threadIdx.x); i < 2 * D; i += kThreads)
    s_weights[i] = i < D ? norm_weight(p, p.q_weight, i) : norm_weight(p, p.k_weight, i - D);

  const int64_t heads = p.Hq + p.Hkv;
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const int64_t b = token / p.T, t = token - b * p.T;
    __syncthreads();  // the token before has been rotated
    load_angles(p, b, t, s_cos, s_sin);
    for (int64_t h = int64_t{blockIdx.y} * kWarps + warp; h < heads; h += int64_t{gridDim.y} * kWarps) {
      const bool is_q = h < p.Hq;
      const TensorRef& in = is_q ? p.q : p.k;
      const TensorRef& out = is_q ? p.q_out : p.k_out;
      const int64_t head = is_q ? h : h - p.Hq;
      const T* x = static_cast<const T*>(in.data) + head_offset(in, b, t, head);
      T* y = static_cast<T*>(out.data) + head_offset(out, b, t, head);
      const float* weight = s_weights + (is_q ? 0 : D);
      const bool has_gate = is_q && p.gate_out.data != nullptr;
      Pack<T, kV> pack[kVectors], gate[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int c = (i * 32 + lane) * kV;
        pack[i] = gate[i] = Pack<T, kV>{};
        if (c < D) pack[i] = load_pack<T, kV>(x + c);
        if (c < D && has_gate) gate[i] = load_pack<T, kV>(x + D + c);
      }
      float n[kVectors][kV], sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        unpack(pack[i], n[i]);
#pragma unroll
        for (int v = 0; v < kV; ++v) sum = fmaf(n[i][v], n[i][v], sum);
      }
      const float scale = inverse_rms(warp_sum(sum), D, p.eps);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int c = (i * 32 + lane) * kV;
        const Pack<float, kV> w = c < D ? load_pack<float, kV>(weight + c) : Pack<float, kV>{};
#pragma unroll
        for (int v = 0; v < kV; ++v) {
          n[i][v] = round_to<T>(n[i][v] * scale * w.v[v]);
          if (c + v < R) s_normed[c + v] = n[i][v];
        }
      }
      __syncwarp();
      T* gate_out = has_gate ? static_cast<T*>(p.gate_out.data) + head_offset(p.gate_out, b, t, head) : nullptr;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int c = (i * 32 + lane) * kV;
        if (c >= D) continue;
#pragma unroll
        for (int v = 0; v < kV; ++v) {
          if (c + v >= R) continue;
          const bool first = c + v < half;
          const float other = s_normed[first ? c + v + half : c + v - half];
          n[i][v] = n[i][v] * s_cos[c + v] + (first ? -other : other) * s_sin[c + v];
        }
        store_pack(pack_floats<T, kV>(n[i]), y + c);
        if (has_gate) store_pack(gate[i], gate_out + c);
      }
      __syncwarp();  // before the next head's channels come into s_normed
    }
  }
}

// Shared memory: cos [R], sin [R] where R <= kMaxTable.
__global__ void __launch_bounds__(kThreads) rope_any(const __grid_constant__ RopeParams p) {
  extern __shared__ float4 shared[];
  const bool tables = p.R <= kMaxTable;
  float* s_cos = reinterpret_cast<float*>(shared);
  float* s_sin = s_cos + p.R;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t heads = p.Hq + p.Hkv, half = p.R / 2;
  for (int64_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const int64_t b = token / p.T, t = token - b * p.T;
    __syncthreads();
    if (tables) load_angles(p, b, t, s_cos, s_sin);
    for (int64_t h = int64_t{blockIdx.y} * kWarps + warp; h < heads; h += int64_t{gridDim.y} * kWarps) {
      const bool is_q = h < p.Hq;
      const TensorRef& in = is_q ? p.q : p.k;
      const TensorRef& out = is_q ? p.q_out : p.k_out;
      const TensorRef& weight = is_q ? p.q_weight : p.k_weight;
      const int64_t head = is_q ? h : h - p.Hq;
      const int64_t x = head_offset(in, b, t, head), y = head_offset(out, b, t, head);
      float sum = 0.0f;
      for (int64_t i = lane; i < p.D; i += 32) {
        const float value = load_element(in, x + i * in.stride[3]);
        sum = fmaf(value, value, sum);
      }
      const float scale = inverse_rms(warp_sum(sum), p.D, p.eps);
      const auto normed = [&](int64_t i) {
        const float value = load_element(in, x + i * in.stride[3]);
        return round_dtype(value * scale * norm_weight(p, weight, i), out.dtype);
      };
      for (int64_t i = lane; i < p.D; i += 32) {
        float value = normed(i);
        if (i < p.R) {
          float c, s;
          if (tables) {
            c = s_cos[i];
            s = s_sin[i];
          } else {
            angle(p, b, t, i, &c, &s);
          }
          value = i < half ? value * c - normed(i + half) * s : value * c + normed(i - half) * s;
        }
        store_element(out, y + i * out.stride[3], value);
      }
      if (!is_q || p.gate_out.data == nullptr) continue;
      const int64_t gate = head_offset(p.gate_out, b, t, head);
      for (int64_t i = lane; i < p.D; i += 32)
        store_element(p.gate_out, gate + i * p.gate_out.stride[3], load_element(in, x + (p.D + i) * in.stride[3]));
    }
  }
}

template <class T>
auto heads_kernel(int64_t vectors) {
  if constexpr (sizeof(T) == 4) {
    if (vectors > 2) return rope_heads<T, 4>;
  }
  return vectors == 1 ? rope_heads<T, 1> : rope_heads<T, 2>;
}

}  // namespace

cudaError_t launch_rope(RopeParams p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  for (int64_t i = 0; p.positions != nullptr && p.R <= 2 * kHostAngles && i < p.R / 2; ++i)
    p.quarter_turns[i] = quarter_turns(p.theta, i, p.R);
  const int64_t vector = p.q.dtype == GDN_F32 ? 4 : 8;
  bool vectors = p.D <= kMaxVectorHead && p.D % vector == 0;
  for (TensorRef* t : {&p.q, &p.k, &p.q_out, &p.k_out, &p.gate_out}) {
    if (p.tokens == p.T) t->stride[0] = 0;  // one batch: any stride
    vectors = vectors && (t->data == nullptr ||
                          (t->dtype == p.q.dtype && t->stride[3] == 1 && aligned_to_16(*t, vector, {0, 1, 2})));
  }
  const int64_t head_blocks = ceil_div(p.Hq + p.Hkv, kWarps);
  const dim3 grid(grid_x(std::min(p.tokens, kFullGrid)), p.tokens < kFullGrid / 4 ? grid_y(head_blocks) : 1);
  const dim3 block(kThreads);
  if (!vectors) {
    const int64_t smem_bytes = p.R <= kMaxTable ? 2 * p.R * 4 : 0;
    return launch(rope_any, grid, block, static_cast<size_t>(smem_bytes), stream, p);
  }
  const size_t smem_bytes = static_cast<size_t>((2 * p.D + (2 + kWarps) * p.R) * 4);
  const int64_t per_lane = ceil_div(p.D / vector, 32);
  if (p.q.dtype == GDN_F32) return launch(heads_kernel<float>(per_lane), grid, block, smem_bytes, stream, p);
  if (p.q.dtype == GDN_BF16) return launch(heads_kernel<__nv_bfloat16>(per_lane), grid, block, smem_bytes, stream, p);
  return launch(heads_kernel<__half>(per_lane), grid, block, smem_bytes, stream, p);
}

Status run_rope(const RopeProblem& problem) {
  RopeParams p;
  p.q = tensor_ref(problem.q);
  p.k = tensor_ref(problem.k);
  p.q_weight = tensor_ref(problem.q_weight);
  p.k_weight = tensor_ref(problem.k_weight);
  p.cos = tensor_ref(problem.cos);
  p.sin = tensor_ref(problem.sin);
  p.q_out = tensor_ref(problem.q_out);
  p.k_out = tensor_ref(problem.k_out);
  p.gate_out = tensor_ref(problem.gate_out);
  if (problem.positions.present()) {
    p.positions = problem.positions.data;
    p.position_dtype = problem.positions.dtype;
    p.axes = static_cast<int32_t>(problem.positions.shape[0]);
    std::copy(problem.positions.stride, problem.positions.stride + 3, p.position_stride);
  }
  p.tokens = problem.B * problem.T;
  p.T = problem.T;
  p.Hq = problem.Hq;
  p.Hkv = problem.Hkv;
  p.D = problem.D;
  p.R = problem.R;
  p.eps = problem.eps;
  p.zero_centered = problem.zero_centered;
  p.theta = problem.theta;
  std::copy(problem.mrope_section, problem.mrope_section + 3, p.mrope_section);
  return launch_on(problem, "qk_rmsnorm_rope", [&](cudaStream_t stream) { return launch_rope(p, stream); });
}

}  // namespace gdn::cuda
