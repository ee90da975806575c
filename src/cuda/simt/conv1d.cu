// SPDX-License-Identifier: MIT
// Causal depthwise convolution: y = act(bias + w0 x0 + w1 x1 + ..), in this order with fused multiply-adds in every
// kernel, so a value does not depend on the layout, on the pieces or on where a sequence was cut.
//
// kernel           lanes run along  for
// conv_channels    channels, kV     token-major x and y of one dtype, W 2..4; x is read once (and W - 1 tokens per piece)
// conv_tokens      time, kV         channel-first x and y of one dtype, W 2..4
// conv_any_tokens  time             any dtypes, strides and W, sequences that fill a warp
// conv_any         channels         everything else
//
// grid.x: blocks of channels, grid.y: items (striding past 65535). No shared memory.
#include "cuda/common/launch.h"
#include "cuda/cuda.h"
#include "cuda/simt/conv1d.cuh"
#include "cuda/simt/op_host.h"
#include "cuda/simt/ops.h"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kUnroll = 4;
constexpr int kMaxW = 16;

template <int kW>
__device__ __forceinline__ float dot(float bias, const float* taps, const float* in) {
  float acc = bias;
#pragma unroll
  for (int k = 0; k < kW; ++k) acc = fmaf(taps[k], in[k], acc);
  return acc;
}

// ---- token-major. Thread: kV adjacent channels; 16-byte accesses with kV = 16 bytes of elements.
template <class T, int kW, int kV>
struct ChannelThread {
  float taps[kV][kW], bias[kV], context[kW - 1][kV];

  __device__ __forceinline__ void load_parameters(const ConvParams& p, int64_t c) {
    if (p.weight_is_packed) {
      load_floats<kV * kW>(p.weight.data, p.weight.dtype, c * kW, taps[0]);
    } else {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
#pragma unroll
        for (int k = 0; k < kW; ++k)
          taps[v][k] = load_element(p.weight, (c + v) * p.weight.stride[0] + k * p.weight.stride[1]);
      }
    }
#pragma unroll
    for (int v = 0; v < kV; ++v)
      bias[v] = p.bias.data == nullptr ? 0.0f : load_element(p.bias, (c + v) * p.bias.stride[0]);
  }
  __device__ __forceinline__ void load_context(const ConvParams& p, const ConvJob& job, int64_t c) {
#pragma unroll
    for (int k = 0; k < kW - 1; ++k) {
      const int64_t t = job.t_begin - (kW - 1) + k;
      if (t >= 0) {
        unpack(load_pack<T, kV>(static_cast<const T*>(p.x.data) + x_offset(p, job, c, t)), context[k]);
      } else {
#pragma unroll
        for (int v = 0; v < kV; ++v) context[k][v] = input(p, job, c + v, t);
      }
    }
  }
  __device__ __forceinline__ void step(const ConvParams& p, const Pack<T, kV>& pack, T* y) {
    float newest[kV], out[kV];
    unpack(pack, newest);
#pragma unroll
    for (int v = 0; v < kV; ++v) {
      float in[kW];
#pragma unroll
      for (int k = 0; k < kW - 1; ++k) in[k] = context[k][v];
      in[kW - 1] = newest[v];
      out[v] = dot<kW>(bias[v], taps[v], in);
      if (p.silu) out[v] = silu(out[v]);
#pragma unroll
      for (int k = 0; k < kW - 2; ++k) context[k][v] = context[k + 1][v];
      context[kW - 2][v] = newest[v];
    }
    store_pack(pack_floats<T, kV>(out), y);
  }
};

template <class T, int kW, int kV>
__global__ void __launch_bounds__(kThreads, 3) conv_channels(const __grid_constant__ ConvParams p) {
  for (int64_t item = blockIdx.y; item < p.items; item += gridDim.y) {
    const ConvJob job = conv_job(p, item);
    for (int64_t c = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kV; c < p.D;
         c += int64_t{gridDim.x} * kThreads * kV) {
      T* y = static_cast<T*>(p.y.data) + y_offset(p, job, c, job.t_begin);
      if (job.is_null) {
        const float zeros[kV] = {};
        for (int64_t t = job.t_begin; t < job.t_end; ++t, y += p.y.stride[2]) store_pack(pack_floats<T, kV>(zeros), y);
        continue;
      }
      ChannelThread<T, kW, kV> thread;
      thread.load_context(p, job, c);
      if (job.first) {
#pragma unroll 1
        for (int v = 0; v < kV; ++v) write_state(p, job, c + v);
      }
      if (job.t_begin == job.t_end) continue;
      thread.load_parameters(p, c);
      const T* x = static_cast<const T*>(p.x.data) + x_offset(p, job, c, job.t_begin);
      const int64_t tokens = job.t_end - job.t_begin;
      int64_t t = 0;
      for (; t + kUnroll <= tokens; t += kUnroll) {
        Pack<T, kV> in[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) in[u] = load_pack<T, kV>(x + u * p.x.stride[2]);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) thread.step(p, in[u], y + u * p.y.stride[2]);
        x += kUnroll * p.x.stride[2];
        y += kUnroll * p.y.stride[2];
      }
      for (; t < tokens; ++t, x += p.x.stride[2], y += p.y.stride[2]) thread.step(p, load_pack<T, kV>(x), y);
    }
  }
}

// ---- channel-first. Warp: one channel of an item; lane: kV adjacent tokens, at addresses that are multiples of 16 bytes.
template <class T, int kW>
__global__ void __launch_bounds__(kThreads, 4) conv_tokens(const __grid_constant__ ConvParams p) {
  constexpr int kV = 16 / static_cast<int>(sizeof(T));
  const int lane = static_cast<int>(threadIdx.x & 31);
  for (int64_t item = blockIdx.y; item < p.items; item += gridDim.y) {
    const ConvJob job = conv_job(p, item);
    for (int64_t c = int64_t{blockIdx.x} * kWarps + (threadIdx.x >> 5); c < p.D; c += int64_t{gridDim.x} * kWarps) {
      const T* x = static_cast<const T*>(p.x.data) + x_offset(p, job, c, 0);
      T* y = static_cast<T*>(p.y.data) + y_offset(p, job, c, 0);
      if (job.is_null) {
        for (int64_t t = job.t_begin + lane; t < job.t_end; t += 32) y[t] = from_float<T>(0.0f);
        continue;
      }
      float context[kW - 1];
#pragma unroll
      for (int k = 0; k < kW - 1; ++k) context[k] = input(p, job, c, job.t_begin - (kW - 1) + k);
      __syncwarp();
      if (job.first) write_state_by_warp(p, job, c, lane);
      __syncwarp();
      if (job.t_begin == job.t_end) continue;
      float taps[kW];
#pragma unroll
      for (int k = 0; k < kW; ++k) taps[k] = load_element(p.weight, c * p.weight.stride[0] + k * p.weight.stride[1]);
      const float bias = p.bias.data == nullptr ? 0.0f : load_element(p.bias, c * p.bias.stride[0]);

      // Tokens before t_begin that share its 16 bytes; they are not written, and read as the context.
      const int before = static_cast<int>(reinterpret_cast<uintptr_t>(x + job.t_begin) % 16 / sizeof(T));
      const bool y_aligned = static_cast<int>(reinterpret_cast<uintptr_t>(y + job.t_begin) % 16 / sizeof(T)) == before;
      const auto of_context = [&](int64_t t) {
        float value = 0.0f;
#pragma unroll
        for (int k = 0; k < kW - 1; ++k) value = t == job.t_begin - (kW - 1) + k ? context[k] : value;
        return value;
      };
      const int64_t start = job.t_begin - before;
      float carry[kW - 1];  // the inputs before lane 0's
#pragma unroll
      for (int k = 0; k < kW - 1; ++k) carry[k] = of_context(start - (kW - 1) + k);
      for (int64_t t0 = start; t0 < job.t_end; t0 += 32 * kV) {
        const int64_t t = t0 + lane * kV;
        const bool whole = t >= job.t_begin && t + kV <= job.t_end;
        float own[kW - 1 + kV];  // W - 1 inputs of the lane before, then this lane's
        if (whole) {
          unpack(load_pack<T, kV>(x + t), own + kW - 1);
        } else {
#pragma unroll
          for (int i = 0; i < kV; ++i) {
            float value = 0.0f;
            if (t + i < job.t_begin) {
              value = of_context(t + i);
            } else if (t + i < job.t_end) {
              value = to_float(x[t + i]);
            }
            own[kW - 1 + i] = value;
          }
        }
        __syncwarp();
#pragma unroll
        for (int k = 0; k < kW - 1; ++k) {
          const float last = own[kV + k];
          const float left = __shfl_up_sync(0xffffffffu, last, 1);
          const float next = __shfl_sync(0xffffffffu, last, 31);
          own[k] = lane == 0 ? carry[k] : left;
          carry[k] = next;
        }
        float out[kV];
#pragma unroll
        for (int i = 0; i < kV; ++i) {
          out[i] = dot<kW>(bias, taps, own + i);
          if (p.silu) out[i] = silu(out[i]);
        }
        if (whole && y_aligned) {
          store_pack(pack_floats<T, kV>(out), y + t);
        } else {
#pragma unroll
          for (int i = 0; i < kV; ++i) {
            if (t + i >= job.t_begin && t + i < job.t_end) y[t + i] = from_float<T>(out[i]);
          }
        }
      }
    }
  }
}

// ---- any dtype, stride and width, lanes along time: lane = token, the W - 1 inputs before by shuffles.
__global__ void __launch_bounds__(kThreads, 4) conv_any_tokens(const __grid_constant__ ConvParams p) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int W = p.W;
  for (int64_t item = blockIdx.y; item < p.items; item += gridDim.y) {
    const ConvJob job = conv_job(p, item);
    for (int64_t c = int64_t{blockIdx.x} * kWarps + (threadIdx.x >> 5); c < p.D; c += int64_t{gridDim.x} * kWarps) {
      if (job.is_null) {
        for (int64_t t = job.t_begin + lane; t < job.t_end; t += 32) store_element(p.y, y_offset(p, job, c, t), 0.0f);
        continue;
      }
      // The 32 inputs before this step's; of the first ones only W - 1 are wanted (and need exist).
      float previous = 32 - lane <= W - 1 ? input(p, job, c, job.t_begin - 32 + lane) : 0.0f;
      __syncwarp();
      if (job.first) write_state_by_warp(p, job, c, lane);
      __syncwarp();
      if (job.t_begin == job.t_end) continue;
      const float tap = lane < W ? load_element(p.weight, c * p.weight.stride[0] + lane * p.weight.stride[1]) : 0.0f;
      const float bias = p.bias.data == nullptr ? 0.0f : load_element(p.bias, c * p.bias.stride[0]);
      for (int64_t t0 = job.t_begin; t0 < job.t_end; t0 += 32) {
        const bool mine = t0 + lane < job.t_end;
        const float own = mine ? load_element(p.x, x_offset(p, job, c, t0 + lane)) : 0.0f;
        float acc = bias;
        for (int k = 0; k < W; ++k) {
          const int source = lane - (W - 1) + k;
          const float here = __shfl_sync(0xffffffffu, own, source & 31);
          const float there = __shfl_sync(0xffffffffu, previous, source & 31);
          acc = fmaf(__shfl_sync(0xffffffffu, tap, k), source >= 0 ? here : there, acc);
        }
        if (p.silu) acc = silu(acc);
        if (mine) store_element(p.y, y_offset(p, job, c, t0 + lane), acc);
        previous = own;
      }
    }
  }
}

// ---- anything, lanes along channels. The inputs stand at the end of a window of kMaxW; what is before them is skipped.
__global__ void __launch_bounds__(kThreads, 2) conv_any(const __grid_constant__ ConvParams p) {
  const int W = p.W;
  for (int64_t item = blockIdx.y; item < p.items; item += gridDim.y) {
    const ConvJob job = conv_job(p, item);
    for (int64_t c = int64_t{blockIdx.x} * kThreads + threadIdx.x; c < p.D; c += int64_t{gridDim.x} * kThreads) {
      if (job.is_null) {
        for (int64_t t = job.t_begin; t < job.t_end; ++t) store_element(p.y, y_offset(p, job, c, t), 0.0f);
        continue;
      }
      float taps[kMaxW], in[kMaxW];
#pragma unroll
      for (int k = 0; k < kMaxW; ++k) {
        const int j = k - (kMaxW - W);
        in[k] = j >= 0 && j < W - 1 ? input(p, job, c, job.t_begin - (W - 1) + j) : 0.0f;
      }
      if (job.first) write_state(p, job, c);
      if (job.t_begin == job.t_end) continue;
#pragma unroll
      for (int k = 0; k < kMaxW; ++k) {
        const int j = k - (kMaxW - W);
        taps[k] = j >= 0 ? load_element(p.weight, c * p.weight.stride[0] + j * p.weight.stride[1]) : 0.0f;
      }
      const float bias = p.bias.data == nullptr ? 0.0f : load_element(p.bias, c * p.bias.stride[0]);
      for (int64_t t = job.t_begin; t < job.t_end; ++t) {
        in[kMaxW - 1] = load_element(p.x, x_offset(p, job, c, t));
        float acc = bias;
#pragma unroll
        for (int k = 0; k < kMaxW; ++k) {
          if (k >= kMaxW - W) acc = fmaf(taps[k], in[k], acc);
        }
        if (p.silu) acc = silu(acc);
        store_element(p.y, y_offset(p, job, c, t), acc);
#pragma unroll
        for (int k = 0; k < kMaxW - 1; ++k) in[k] = in[k + 1];
      }
    }
  }
}

// ---- host

using ConvKernel = void (*)(ConvParams);

enum class Path { kChannelVectors, kChannels, kTokens, kAnyTokens, kAny };

struct ConvPlan {
  Path path = Path::kAny;
  int64_t channels_per_block = kThreads;
};

// Chooses the kernel and the pieces of time: as long as possible (a piece reads W - 1 tokens twice) while they give
// enough threads for every SM of a large GPU.
ConvPlan plan_conv(int64_t tokens, bool in_place, ConvParams* p) {
  constexpr int64_t kEnoughThreads = 400000, kFewThreads = 32768;
  constexpr int64_t kShort = 8;  // tokens per sequence below which states and taps cost more than the tokens
  const bool one_dtype = p->x.dtype == p->y.dtype && p->W >= 2 && p->W <= 4;
  const bool channels_adjacent = p->x.stride[1] == 1 && p->y.stride[1] == 1 && p->D > 1;
  const bool time_adjacent = p->x.stride[2] == 1 && p->y.stride[2] == 1;
  const bool time_inner = p->x.stride[2] == 1 || p->y.stride[2] == 1;
  const int64_t average = tokens / p->N;
  const int64_t vector = p->x.dtype == GDN_F32 ? 4 : 8;
  ConvPlan plan;
  int64_t threads = p->D;  // of one piece
  int32_t shift = 7, least_shift = 4;
  if (!channels_adjacent && average >= (time_inner ? kShort : 16)) {
    plan.path = one_dtype && time_adjacent ? Path::kTokens : Path::kAnyTokens;
    plan.channels_per_block = kWarps;
    threads = p->D * 32;
    shift = 11;
    least_shift = 8;
  } else if (one_dtype && channels_adjacent) {
    const int64_t pieces = in_place ? p->N : p->N + (tokens >> least_shift);
    const bool vectors = p->D % vector == 0 && aligned_to_16(p->x, vector, {0, 2}) &&
                         aligned_to_16(p->y, vector, {0, 2}) && average > kShort &&
                         pieces * (p->D / vector) >= kFewThreads;
    plan.path = vectors ? Path::kChannelVectors : Path::kChannels;
    if (vectors) {
      plan.channels_per_block = kThreads * vector;
      threads = p->D / vector;
    }
  }
  if (in_place) {  // a piece's first inputs would be gone once the piece before it ran
    p->piece_shift = kWholeSequence;
  } else {
    while (shift > least_shift && ((tokens >> shift) + p->N) * threads < kEnoughThreads) --shift;
    p->piece_shift = shift;
  }
  while ((tokens >> p->piece_shift) + p->N > INT32_MAX) ++p->piece_shift;  // N is below 2^31 / 2: kMaxSequences
  const int64_t dense_pieces = std::max<int64_t>(1, ((p->T - 1) >> p->piece_shift) + 1);
  p->dense_pieces = fast_divisor(dense_pieces);
  p->items = p->cu_seqlens.data != nullptr ? (p->T >> p->piece_shift) + p->N : p->N * dense_pieces;
  return plan;
}

template <class T, int kW>
ConvKernel typed_kernel(Path path) {
  if (path == Path::kTokens) return conv_tokens<T, kW>;
  if (path == Path::kChannels) return conv_channels<T, kW, 1>;
  return conv_channels<T, kW, 16 / static_cast<int>(sizeof(T))>;
}
template <class T>
ConvKernel kernel_of_width(Path path, int32_t W) {
  if (W == 4) return typed_kernel<T, 4>(path);
  if (W == 3) return typed_kernel<T, 3>(path);
  return typed_kernel<T, 2>(path);
}
ConvKernel kernel_of(Path path, int32_t W, int32_t dtype) {
  if (path == Path::kAny) return conv_any;
  if (path == Path::kAnyTokens) return conv_any_tokens;
  if (dtype == GDN_F32) return kernel_of_width<float>(path, W);
  if (dtype == GDN_BF16) return kernel_of_width<__nv_bfloat16>(path, W);
  return kernel_of_width<__half>(path, W);
}

}  // namespace

cudaError_t launch_conv1d(ConvParams p, int64_t batch, bool in_place, cudaStream_t stream) {
  if (p.N == 0) return cudaSuccess;
  // The stride of a dimension of one element is any number; as 0 it spoils no alignment.
  for (TensorRef* t : {&p.x, &p.y}) {
    if (batch == 1) t->stride[0] = 0;
    if (p.T == 1) t->stride[2] = 0;
  }
  p.weight_is_packed =
      p.weight.stride[0] == p.W && (p.weight.stride[1] == 1 || p.W == 1) && aligned_to_16(p.weight, 1, {});
  const ConvPlan plan = plan_conv(batch * p.T, in_place, &p);
  const dim3 grid(grid_x(ceil_div(p.D, plan.channels_per_block)), grid_y(p.items));
  return launch(kernel_of(plan.path, p.W, p.x.dtype), grid, dim3(kThreads), 0, stream, p);
}

Status run_conv1d(const ConvProblem& problem) {
  ConvParams p;
  p.x = tensor_ref(problem.x);
  p.weight = tensor_ref(problem.weight);
  p.bias = tensor_ref(problem.bias);
  p.y = tensor_ref(problem.y);
  p.initial_state = tensor_ref(problem.initial_state);
  p.final_state = tensor_ref(problem.final_state);
  p.cu_seqlens = index_ref_of(problem.cu_seqlens);
  p.initial_indices = index_ref_of(problem.initial_indices);
  p.final_indices = index_ref_of(problem.final_indices);
  p.has_initial = index_ref_of(problem.has_initial);
  p.num_accepted = index_ref_of(problem.accepted);
  p.D = problem.D;
  p.T = problem.T;
  p.N = problem.N;
  p.L = problem.L;
  p.W = static_cast<int32_t>(problem.W);
  // States of no columns (W = 1) are dropped by validation; their indices still make sequences null.
  p.reads_state = problem.initial_state.present() || problem.initial_indices.present();
  p.writes_state = problem.final_state.present() || problem.final_indices.present();
  p.initial_slots = problem.initial_state.present() ? problem.initial_state.shape[0] : INT64_MAX;
  p.final_slots = problem.final_state.present() ? problem.final_state.shape[0] : INT64_MAX;
  p.silu = problem.activation == GDN_ACT_SILU;
  p.null_slots = static_cast<int8_t>(problem.null_slots);
  return launch_on(problem, "causal_conv1d", [&](cudaStream_t stream) {
    p.error_flags = device_error_word(problem.device_id);
    return launch_conv1d(p, problem.B, problem.x.data == problem.y.data, stream);
  });
}

}  // namespace gdn::cuda
