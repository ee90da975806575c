// SPDX-License-Identifier: MIT
// recurrent_decode: a few tokens per sequence, K = 128. The state is read once, kept in registers, written once (and once
// per token where the call keeps every token's state).
//
// Grid: sequences x Hv x V panels of 128 bytes along V (K-first states) or as many channels (V-first). Block: 256 threads, no
// two of which touch the same 16 bytes of the state: 16 KB of it per block. A block's time is the memory's latencies, one
// after another, so the state's reads and the first tokens' are under way together and nothing waits before both are.
// K-first [K][V]: eight threads share a 128-byte row piece, the 32 groups take rows group + 32 i.
// V-first [V][K]: eight threads share a channel's 128 keys, the 32 groups take channels group + 32 i.
// Per token (docs/math.md), with S the state before it: a = S^T k, b = S^T q in one pass,
//   u = beta (v - e^g a),  o = scale (e^g b + (q . k) u),  S = e^g S + k u^T.
// Barriers: two per four tokens for their inputs; two per token more for K-first states, whose sums cross warps.
// Bytes per sequence and head: 2 x 128 x V x size of the state; FLOP: 6 x 128 x V.
#pragma once
#include "cuda/common/element.cuh"
#include "cuda/common/rule_math.cuh"
#include "cuda/common/slots.cuh"
#include "cuda/simt/decode_state.cuh"

namespace gdn::cuda::simt {

// An element's bits: the conversion, which waits for them, is left for later.
__device__ __forceinline__ uint32_t load_bits(const TensorRef& x, int64_t index) {
  return x.dtype == GDN_F32 ? static_cast<const uint32_t*>(x.data)[index]
                            : uint32_t{static_cast<const uint16_t*>(x.data)[index]};
}
__device__ __forceinline__ float float_of_bits(int32_t dtype, uint32_t bits) {
  return dtype == GDN_F32    ? __uint_as_float(bits)
         : dtype == GDN_BF16 ? __uint_as_float(bits << 16)
                             : __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
}

template <class Stored, bool kKFirst, bool kOneToken>
struct DecodeBlock {
  using State = DecodeState<Stored, kKFirst, kOneToken>;
  static constexpr int kPerVector = State::kPerVector, kPanel = State::kPanel, kGroups = State::kGroups;
  static constexpr int kVectors = State::kVectors, kKeyVectors = State::kKeyVectors;
  static constexpr int kWarps = kDecodeThreads / 32;
  static constexpr int kChannels = kKFirst ? kPerVector : kPanel / kGroups;  // per thread
  static constexpr int kTile = kOneToken ? 1 : kWarps / 2;                   // tokens staged at once, two warps each

  struct Inputs {
    alignas(16) float k[kDecodeKeys], q[kDecodeKeys];
    float v[kPanel];
    float both, decay, beta;  // q . k, and the token's gates
  };
  struct Shared {
    SequenceInfo seq;
    Inputs inputs[kTile];
    float u[kPanel];
    float2 partial[kWarps][kPanel];  // K-first: a and b of a warp's rows
  };

  const RuleParams& p;
  Shared& shared;
  const SequenceInfo& seq;  // in shared memory: registers are what blocks in flight are made of
  int32_t n, head, panel_begin;
  int thread = threadIdx.x, member = threadIdx.x & 7, group = threadIdx.x >> 3;
  State state;

  // q and k of a token, normalised as the call asks, and their product: by one warp, four elements a lane.
  __device__ __forceinline__ void stage_keys(Inputs& in, int64_t token) const {
    const int lane = thread & 31;
    const int32_t key_head = key_head_of(p, head);
    const int64_t k_base = seq.batch * p.k.stride[0] + token * p.k.stride[1] + key_head * p.k.stride[2];
    const int64_t q_base = seq.batch * p.q.stride[0] + token * p.q.stride[1] + key_head * p.q.stride[2];
    uint32_t k_bits[4], q_bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) k_bits[i] = load_bits(p.k, k_base + (4 * lane + i) * p.k.stride[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) q_bits[i] = load_bits(p.q, q_base + (4 * lane + i) * p.q.stride[3]);
    float k[4], q[4];
    float kk = 0.f, qq = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      k[i] = float_of_bits(p.k.dtype, k_bits[i]);
      q[i] = float_of_bits(p.q.dtype, q_bits[i]);
      kk += k[i] * k[i];
      qq += q[i] * q[i];
    }
    if (p.qk_l2norm != 0) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        kk += __shfl_xor_sync(0xffffffffu, kk, offset);
        qq += __shfl_xor_sync(0xffffffffu, qq, offset);
      }
      const float k_factor = 1.0f / sqrtf(kk + p.l2norm_eps), q_factor = 1.0f / sqrtf(qq + p.l2norm_eps);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        k[i] *= k_factor;
        q[i] *= q_factor;
        if (p.round_qk != 0) {
          k[i] = round_to_dtype(k[i], p.k.dtype);
          q[i] = round_to_dtype(q[i], p.q.dtype);
        }
      }
    }
    float both = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) both += q[i] * k[i];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) both += __shfl_xor_sync(0xffffffffu, both, offset);
    *reinterpret_cast<float4*>(in.k + 4 * lane) = make_float4(k[0], k[1], k[2], k[3]);
    *reinterpret_cast<float4*>(in.q + 4 * lane) = make_float4(q[0], q[1], q[2], q[3]);
    if (lane == 0) in.both = both;
  }

  // v and the gates of a token, by one warp: every read is under way before one is waited for.
  __device__ __forceinline__ void stage_values(Inputs& in, int64_t token) const {
    const int lane = thread & 31;
    const int64_t base = seq.batch * p.v.stride[0] + token * p.v.stride[1] + head * p.v.stride[2];
    uint32_t v_bits[kPanel / 32];
#pragma unroll
    for (int i = 0; i < kPanel / 32; ++i) {
      v_bits[i] = load_bits(p.v, base + (panel_begin + 32 * i + lane) * p.v.stride[3]);
    }
    if (lane == 0) in.decay = token_decay(p, seq.batch, token, head);
    if (lane == 1) in.beta = token_beta(p, seq.batch, token, head);
#pragma unroll
    for (int i = 0; i < kPanel / 32; ++i) in.v[32 * i + lane] = float_of_bits(p.v.dtype, v_bits[i]);
  }

  __device__ __forceinline__ void stage(int64_t first, int count) const {
    const int warp = thread >> 5, t = warp / 2;
    if (t >= count) return;
    if (warp % 2 == 0) {
      stage_keys(shared.inputs[t], first + t);
    } else {
      stage_values(shared.inputs[t], first + t);
    }
  }

  // u of a channel of the panel, from its sums over the keys, and o where this thread is the one to write it.
  __device__ __forceinline__ float finish_channel(const Inputs& in, int64_t token, int channel, float a, float b,
                                                  bool writes) const {
    const float u = in.beta * (in.v[channel] - in.decay * a);
    if (writes) {
      store_float(p.o.data, p.o.dtype,
                  seq.batch * p.o.stride[0] + token * p.o.stride[1] + head * p.o.stride[2] +
                      (panel_begin + channel) * p.o.stride[3],
                  p.scale * (in.decay * b + in.both * u));
    }
    return u;
  }

  __device__ __forceinline__ void step(const Inputs& in, int64_t token) {
    float a[kChannels] = {}, b[kChannels] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) {
        const int c = kKFirst ? e : i / kKeyVectors, key = state.key_of(group, member, i, e);
        const float s = state.get(i, e);
        a[c] += in.k[key] * s;
        b[c] += in.q[key] * s;
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
    float u[kChannels];
    if constexpr (kKFirst) {
      if ((thread & 31) < 8) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          shared.partial[thread >> 5][kPerVector * member + c] = make_float2(a[c], b[c]);
        }
      }
      __syncthreads();  // the warps' sums are there, and the token before is done with u
      if (thread < kPanel) {
        float2 sum = shared.partial[0][thread];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
          const float2 part = shared.partial[w][thread];
          sum.x += part.x;
          sum.y += part.y;
        }
        shared.u[thread] = finish_channel(in, token, thread, sum.x, sum.y, true);
      }
      __syncthreads();  // u is there, and the sums are read
#pragma unroll
      for (int c = 0; c < kChannels; ++c) u[c] = shared.u[kPerVector * member + c];
    } else {
      // Every member has the sums: nothing crosses the group.
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        u[c] = finish_channel(in, token, group + kGroups * c, a[c], b[c], member == c);
      }
    }
    const float decay = in.decay;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float next[kPerVector];
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) {
        next[e] = decay * state.get(i, e) + in.k[state.key_of(group, member, i, e)] * u[kKFirst ? e : i / kKeyVectors];
      }
      state.set(i, next);
    }
  }

  __device__ __forceinline__ void store_row(const TensorRef& rows, int64_t base, int key_dim) const {
    state.store(static_cast<Stored*>(rows.data) + base, rows.stride[key_dim], rows.stride[key_dim + 1], panel_begin,
                group, member);
  }

  // What is kept of the state after token t of the sequence, beside the final state.
  __device__ __forceinline__ void keep(int64_t t) const {
    if (p.token_indices.data != nullptr && p.final_state.data != nullptr) {
      const int64_t slot = verify_slot(p, n, t);
      if (slot >= 0) store_row(p.final_state, slot * p.final_state.stride[0] + head * p.final_state.stride[1], 2);
    }
    if (p.snapshots.data != nullptr) {
      if (t >= p.snapshot_columns) {
        flag_error(p, kBadLength);
      } else {
        store_row(p.snapshots, n * p.snapshots.stride[0] + t * p.snapshots.stride[1] + head * p.snapshots.stride[2], 3);
      }
    }
  }

  __device__ __forceinline__ void zero_output() const {
    for (int64_t i = thread; i < seq.len * kPanel; i += kDecodeThreads) {
      store_float(p.o.data, p.o.dtype,
                  seq.batch * p.o.stride[0] + (seq.begin + i / kPanel) * p.o.stride[1] + head * p.o.stride[2] +
                      (panel_begin + i % kPanel) * p.o.stride[3],
                  0.f);
    }
  }

  __device__ __forceinline__ void run() {
    if (seq.is_null) {
      zero_output();
      return;
    }
    if (seq.read_slot < 0) {
      state.clear();
    } else {
      const TensorRef& from = p.initial_state;
      state.load(static_cast<const Stored*>(from.data) + seq.read_slot * from.stride[0] + head * from.stride[1],
                 from.stride[2], from.stride[3], panel_begin, group, member);
    }
    if constexpr (kOneToken) {  // seq.len is 1
      stage(seq.begin, 1);
      __syncthreads();
      step(shared.inputs[0], seq.begin);
      keep(0);
    } else {
      const int len = static_cast<int>(seq.len);
#pragma unroll 1
      for (int first = 0; first < len; first += kTile) {
        const int count = len - first < kTile ? len - first : kTile;
        if (first > 0) __syncthreads();  // everybody is done with the tokens before
        stage(seq.begin + first, count);
        __syncthreads();
        if (first == 0) state.widen();  // the first to wait for the state
#pragma unroll 1
        for (int t = 0; t < count; ++t) {
          step(shared.inputs[t], seq.begin + first + t);
          keep(first + t);
        }
      }
      if (len == 0) state.widen();
    }
    if (seq.write_slot >= 0) {
      store_row(p.final_state, seq.write_slot * p.final_state.stride[0] + head * p.final_state.stride[1], 2);
    }
  }
};

// Per SM, the most that spill no registers (ptxas 13.0); an SM of sm_75 holds four.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 1000
inline constexpr int kMoreBlocks = 1;
#else
inline constexpr int kMoreBlocks = 0;
#endif
template <class Stored, bool kOneToken>
inline constexpr int kDecodeBlocks = sizeof(Stored) == 4 ? 4 + (kOneToken ? kMoreBlocks : 0)
                                     : kOneToken         ? 3 + kMoreBlocks
                                                         : 2;

// The host sees to fewer than 2^31 blocks: no 64-bit division before the first read.
template <class Stored, bool kKFirst, bool kOneToken>
__global__ void __launch_bounds__(kDecodeThreads, kDecodeBlocks<Stored, kOneToken>)
    decode_kernel(const __grid_constant__ RuleParams p) {
  using Block = DecodeBlock<Stored, kKFirst, kOneToken>;
  __shared__ typename Block::Shared shared;
  const uint32_t panels = static_cast<uint32_t>(p.V) / Block::kPanel;
  const uint32_t pair = blockIdx.x / panels, panel = blockIdx.x - pair * panels;
  const uint32_t n = pair / static_cast<uint32_t>(p.Hv), head = pair - n * static_cast<uint32_t>(p.Hv);
  if (threadIdx.x == 0) {
    SequenceInfo seq = sequence_info(p, n);
    if (p.token_indices.data != nullptr) verify_start(p, n, &seq);
    shared.seq = seq;
  }
  __syncthreads();
  Block{p,
        shared,
        shared.seq,
        static_cast<int32_t>(n),
        static_cast<int32_t>(head),
        static_cast<int32_t>(panel) * Block::kPanel}
      .run();
}

}  // namespace gdn::cuda::simt
