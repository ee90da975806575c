// SPDX-License-Identifier: MIT
// recurrent_decode: a few tokens per sequence, K = 128. The state is read once, kept in registers, written once.
//
// Grid: sequences x Hv x V panels of 128 bytes along V (K-first states) or as many channels (V-first). Block: 256 threads, no
// two of which touch the same 16 bytes of the state: 16 KB of it per block, all of its reads under way before anything waits.
// K-first [K][V]: eight threads share a 128-byte row piece, the 32 groups take rows group + 32 i.
// V-first [V][K]: eight threads share a channel's 128 keys, the 32 groups take channels group + 32 i.
// Per token (docs/math.md), with S the state before it: a = S^T k, b = S^T q in one pass,
//   u = beta (v - e^g a),  o = scale (e^g b + (q . k) u),  S = e^g S + k u^T.
// Bytes per sequence and head: 2 x 128 x V x size of the state; FLOP: 6 x 128 x V.
#pragma once
#include "cuda/common/element.cuh"
#include "cuda/common/rule_math.cuh"
#include "cuda/common/sequence.cuh"

namespace gdn::cuda::simt {

inline constexpr int kDecodeThreads = 256;
inline constexpr int kDecodeKeys = 128;

template <class Stored>
inline constexpr int kDecodePanel = 8 * 16 / static_cast<int>(sizeof(Stored));  // value channels per block

template <class Stored, bool kKFirst>
struct DecodeBlock {
  static constexpr int kPerVector = 16 / static_cast<int>(sizeof(Stored));
  static constexpr int kPanel = kDecodePanel<Stored>;
  static constexpr int kGroups = kDecodeThreads / 8, kWarps = kDecodeThreads / 32;
  static constexpr int kVectors = kDecodeKeys / kGroups;                     // of 16 bytes, per thread
  static constexpr int kChannels = kKFirst ? kPerVector : kPanel / kGroups;  // per thread
  static constexpr int kKeyVectors = kKFirst ? 1 : kVectors / kChannels;     // V-first: of a channel, per thread

  struct Shared {
    SequenceInfo seq;
    alignas(16) float k[kDecodeKeys], q[kDecodeKeys];
    float v[kPanel], u[kPanel];
    float both, decay, beta;         // q . k, and the token's gates
    float2 partial[kWarps][kPanel];  // K-first: a and b of a warp's rows
  };

  const RuleParams& p;
  Shared& shared;
  const SequenceInfo& seq;  // in shared memory: registers are what blocks in flight are made of
  int32_t head, panel_begin;
  int thread = threadIdx.x, member = threadIdx.x & 7, group = threadIdx.x >> 3;
  float s[kVectors][kPerVector];

  __device__ __forceinline__ int64_t vector_offset(const TensorRef& state, int64_t slot, int i) const {
    const int64_t base = slot * state.stride[0] + head * state.stride[1];
    if constexpr (kKFirst) return base + (group + kGroups * i) * state.stride[2] + panel_begin + kPerVector * member;
    const int channel = panel_begin + group + kGroups * (i / kKeyVectors);
    return base + channel * state.stride[3] + kPerVector * (member + 8 * (i % kKeyVectors));
  }
  // Key of element e of vector i.
  __device__ __forceinline__ int key_of(int i, int e) const {
    return kKFirst ? group + kGroups * i : kPerVector * (member + 8 * (i % kKeyVectors)) + e;
  }
  __device__ __forceinline__ static float widen(const uint4& words, int e) {
    const uint32_t word = e * sizeof(Stored) / 4 == 0   ? words.x
                          : e * sizeof(Stored) / 4 == 1 ? words.y
                          : e * sizeof(Stored) / 4 == 2 ? words.z
                                                        : words.w;
    if constexpr (sizeof(Stored) == 4) {
      return __uint_as_float(word);
    } else if constexpr (std::is_same_v<Stored, __nv_bfloat16>) {
      return __uint_as_float(e % 2 == 0 ? word << 16 : word & 0xffff0000u);
    } else {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(e % 2 == 0 ? word : word >> 16)));
    }
  }
  __device__ __forceinline__ static uint32_t narrow2(float low, float high) {
    if constexpr (std::is_same_v<Stored, __nv_bfloat16>) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&two);
    } else {
      const __half2 two = __floats2half2_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&two);
    }
  }

  // Streamed: each byte is used once per call.
  __device__ __forceinline__ void load() {
    if (seq.read_slot < 0) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int e = 0; e < kPerVector; ++e) s[i][e] = 0.f;
      }
      return;
    }
    uint4 words[kVectors];
    const Stored* data = static_cast<const Stored*>(p.initial_state.data);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      words[i] = __ldcs(reinterpret_cast<const uint4*>(data + vector_offset(p.initial_state, seq.read_slot, i)));
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) s[i][e] = widen(words[i], e);
    }
  }
  __device__ __forceinline__ void store() const {
    Stored* data = static_cast<Stored*>(p.final_state.data);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      uint4 words;
      if constexpr (sizeof(Stored) == 4) {
        words = make_uint4(__float_as_uint(s[i][0]), __float_as_uint(s[i][1]), __float_as_uint(s[i][2]),
                           __float_as_uint(s[i][3]));
      } else {
        words = make_uint4(narrow2(s[i][0], s[i][1]), narrow2(s[i][2], s[i][3]), narrow2(s[i][4], s[i][5]),
                           narrow2(s[i][6], s[i][7]));
      }
      __stcs(reinterpret_cast<uint4*>(data + vector_offset(p.final_state, seq.write_slot, i)), words);
    }
  }

  // Four elements of a q or k row per lane, normalised as the call asks.
  __device__ __forceinline__ void read_key(const TensorRef& x, int64_t token, int32_t key_head, float (&row)[4]) const {
    const int lane = thread & 31;
    const int64_t base = seq.batch * x.stride[0] + token * x.stride[1] + key_head * x.stride[2];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      row[i] = load_float(x.data, x.dtype, base + (4 * lane + i) * x.stride[3]);
      sum += row[i] * row[i];
    }
    if (p.qk_l2norm == 0) return;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const float factor = 1.0f / sqrtf(sum + p.l2norm_eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      row[i] *= factor;
      if (p.round_qk != 0) row[i] = round_to_dtype(row[i], x.dtype);
    }
  }

  // The token's inputs into shared memory, by one warp each: the other warps have nothing to issue but the state's reads.
  __device__ __forceinline__ void stage(int64_t token) {
    const int lane = thread & 31, warp = thread >> 5;
    if (warp == 0) {
      const int32_t key_head = key_head_of(p, head);
      float k[4], q[4];
      read_key(p.k, token, key_head, k);
      read_key(p.q, token, key_head, q);
      float both = 0.f;
#pragma unroll
      for (int i = 0; i < 4; ++i) both += q[i] * k[i];
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) both += __shfl_xor_sync(0xffffffffu, both, offset);
      *reinterpret_cast<float4*>(shared.k + 4 * lane) = make_float4(k[0], k[1], k[2], k[3]);
      *reinterpret_cast<float4*>(shared.q + 4 * lane) = make_float4(q[0], q[1], q[2], q[3]);
      if (lane == 0) shared.both = both;
    } else if (warp == 1) {
      const int64_t base = seq.batch * p.v.stride[0] + token * p.v.stride[1] + head * p.v.stride[2];
      for (int i = lane; i < kPanel; i += 32) {
        shared.v[i] = load_float(p.v.data, p.v.dtype, base + (panel_begin + i) * p.v.stride[3]);
      }
    } else if (warp == 2 && lane == 0) {
      shared.decay = token_decay(p, seq.batch, token, head);
    } else if (warp == 3 && lane == 0) {
      shared.beta = token_beta(p, seq.batch, token, head);
    }
  }

  // u and o of a channel of the panel, from its sums over the keys.
  __device__ __forceinline__ void finish_channel(int64_t token, int channel, float a, float b) {
    const float u = shared.beta * (shared.v[channel] - shared.decay * a);
    shared.u[channel] = u;
    store_float(p.o.data, p.o.dtype,
                seq.batch * p.o.stride[0] + token * p.o.stride[1] + head * p.o.stride[2] +
                    (panel_begin + channel) * p.o.stride[3],
                p.scale * (shared.decay * b + shared.both * u));
  }

  __device__ __forceinline__ void step(int64_t token) {
    __syncthreads();  // the token before is done with what is staged
    stage(token);
    __syncthreads();
    float a[kChannels] = {}, b[kChannels] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) {
        const int c = kKFirst ? e : i / kKeyVectors, key = key_of(i, e);
        a[c] += shared.k[key] * s[i][e];
        b[c] += shared.q[key] * s[i][e];
      }
    }
    constexpr int kFirst = kKFirst ? 8 : 1, kLast = kKFirst ? 16 : 4;  // groups of the warp, or members of the group
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
#pragma unroll
      for (int offset = kFirst; offset <= kLast; offset *= 2) {
        a[c] += __shfl_xor_sync(0xffffffffu, a[c], offset);
        b[c] += __shfl_xor_sync(0xffffffffu, b[c], offset);
      }
    }
    if constexpr (kKFirst) {
      if ((thread & 31) < 8) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          shared.partial[thread >> 5][kPerVector * member + c] = make_float2(a[c], b[c]);
        }
      }
      __syncthreads();
      if (thread < kPanel) {
        float2 sum = shared.partial[0][thread];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
          const float2 part = shared.partial[w][thread];
          sum.x += part.x;
          sum.y += part.y;
        }
        finish_channel(token, thread, sum.x, sum.y);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if (member == c) finish_channel(token, group + kGroups * c, a[c], b[c]);
      }
    }
    __syncthreads();
    const float decay = shared.decay;
    float u[kChannels];
#pragma unroll
    for (int c = 0; c < kChannels; ++c) u[c] = shared.u[kKFirst ? kPerVector * member + c : group + kGroups * c];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) {
        s[i][e] = decay * s[i][e] + shared.k[key_of(i, e)] * u[kKFirst ? e : i / kKeyVectors];
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (seq.is_null) {
      for (int64_t i = thread; i < seq.len * kPanel; i += kDecodeThreads) {
        store_float(p.o.data, p.o.dtype,
                    seq.batch * p.o.stride[0] + (seq.begin + i / kPanel) * p.o.stride[1] + head * p.o.stride[2] +
                        (panel_begin + i % kPanel) * p.o.stride[3],
                    0.f);
      }
      return;
    }
    load();
    for (int64_t t = 0; t < seq.len; ++t) step(seq.begin + t);
    if (seq.write_slot >= 0) store();
  }
};

template <class Stored, bool kKFirst>
__global__ void __launch_bounds__(kDecodeThreads, sizeof(Stored) == 4 ? 4 : 3)
    decode_kernel(const __grid_constant__ RuleParams p) {
  using Block = DecodeBlock<Stored, kKFirst>;
  __shared__ typename Block::Shared shared;
  const int32_t panels = p.V / Block::kPanel;
  const int64_t pair = blockIdx.x / panels;
  const int64_t n = pair / p.Hv;
  const int32_t head = static_cast<int32_t>(pair - n * p.Hv), panel = static_cast<int32_t>(blockIdx.x - pair * panels);
  if (threadIdx.x == 0) shared.seq = sequence_info(p, n);
  __syncthreads();
  Block{p, shared, shared.seq, head, panel * Block::kPanel}.run();
}

}  // namespace gdn::cuda::simt
