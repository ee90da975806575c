// SPDX-License-Identifier: MIT
// chunk_forward with mma.sync, sm_80 and later. One CTA of four warps per (sequence, value head, 64 value channels), 64
// tokens at a time. A warp holds X = S^T of 16 channels in fp32 accumulators, which are the A operand of both reads:
//   all warps, 16 rows each:  L, P;  then the inverse T (fp16 block products)
//   per warp:  R = V^T - (X K^T) diag(e^G);  U = R T^T;  O = scale (X Q^T) diag(e^G) + U P^T
//              X = e^G_C X + (U diag(e^(G_C - G))) K
#pragma once
#include "cuda/sm80/chunk_forward/triangles.cuh"

namespace gdn::cuda::sm80 {

template <class E, int kKeys>
struct Chunk : Triangles<E, kKeys> {
  using Base = Triangles<E, kKeys>;
  using Base::gates, Base::invert_column, Base::invert_diagonal, Base::invert_wide, Base::kKeyTiles;
  using Base::kPitch, Base::kRow, Base::l, Base::lane, Base::load_b, Base::load_b_trans, Base::load_tile;
  using Base::make_scores, Base::norms, Base::p, Base::s, Base::warp;

  // X K^T and X Q^T: 16 channels x 64 tokens each.
  __device__ __forceinline__ void read_state(float (&of_k)[8][4], float (&of_q)[8][4],
                                             const float (&x)[kKeyTiles][4]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) of_k[j][i] = of_q[j][i] = 0.f;
    }
#pragma unroll
    for (int kk = 0; kk < kKeys / 16; ++kk) {
      const uint32_t a[4] = {ptx::pack2<E>(x[2 * kk][0], x[2 * kk][1]), ptx::pack2<E>(x[2 * kk][2], x[2 * kk][3]),
                             ptx::pack2<E>(x[2 * kk + 1][0], x[2 * kk + 1][1]),
                             ptx::pack2<E>(x[2 * kk + 1][2], x[2 * kk + 1][3])};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t b[4];
        load_b(b, s.k, j, kk, kPitch);
        ptx::mma<E>(of_k[2 * j], a, b[0], b[1]);
        ptx::mma<E>(of_k[2 * j + 1], a, b[2], b[3]);
        load_b(b, s.q, j, kk, kPitch);
        ptx::mma<E>(of_q[2 * j], a, b[0], b[1]);
        ptx::mma<E>(of_q[2 * j + 1], a, b[2], b[3]);
      }
    }
  }
  __device__ __forceinline__ static void as_operand(uint32_t (&a)[4][4], const float (&y)[8][4]) {
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[kk][i] = ptx::pack2<E>(y[2 * kk + (i >> 1)][2 * (i & 1)], y[2 * kk + (i >> 1)][2 * (i & 1) + 1]);
    }
  }
  // y += a tile^T over 64 tokens; tile is lower triangular: blocks (n, k) with k <= n.
  __device__ __forceinline__ void times_lower(float (&y)[8][4], const uint32_t (&a)[4][4], char* tile) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int kk = 0; kk <= j; ++kk) {
        uint32_t b[4];
        load_b(b, tile, j, kk, kRow);
        ptx::mma<E>(y[2 * j], a[kk], b[0], b[1]);
        ptx::mma<E>(y[2 * j + 1], a[kk], b[2], b[3]);
      }
    }
  }

  // Everything that the state takes part in. o's tile replaces v's, each warp its own 16 channels.
  __device__ __forceinline__ void advance(float (&x)[kKeyTiles][4]) const {
    const int group = lane >> 2, t2 = 2 * (lane & 3);
    float r[8][4], y[8][4];
    uint32_t a[4][4], updates[4][4];
    read_state(r, y, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t v[4];  // V^T: channels 0-7 and 8-15 of tokens 16 j .. + 7, then the same of + 8 .. + 15
      ptx::ldmatrix_x4_trans(v, ptx::smem_address(s.v + piece_at(16 * j + (lane & 7) + 8 * (lane >> 4),
                                                                 2 * warp + ((lane >> 3) & 1), 2 * kPanel)));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = ptx::unpack2<E>(v[i]);
        const int tile = 2 * j + (i >> 1), h = 2 * (i & 1), token = 8 * tile + t2;
        r[tile][h] = two.x - r[tile][h] * s.read_k[token];
        r[tile][h + 1] = two.y - r[tile][h + 1] * s.read_k[token + 1];
      }
    }
    as_operand(a, r);
    float u[8][4];
#pragma unroll
    for (int j = 0; j < 8; ++j) u[j][0] = u[j][1] = u[j][2] = u[j][3] = 0.f;
    times_lower(u, a, s.t);
    as_operand(a, u);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) u[j][i] *= s.update[8 * j + t2 + (i & 1)];
    }
    as_operand(updates, u);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[j][i] *= s.read_q[8 * j + t2 + (i & 1)];
    }
    times_lower(y, a, s.p);
    __syncwarp();  // every lane has read v
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        at<uint32_t>(s.v, element_at(8 * j + group, 16 * warp + 8 * h + t2, 2 * kPanel)) =
            ptx::transpose_8x8(ptx::pack2<E>(y[j][2 * h], y[j][2 * h + 1]));
      }
    }
    const float decay = exp2f(s.gate[kChunk - 1]);
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] *= decay;
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles / 2; ++n) {
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        uint32_t b[4];
        load_b_trans(b, s.k, n, kk, kPitch);
        ptx::mma<E>(x[2 * n], updates[kk], b[0], b[1]);
        ptx::mma<E>(x[2 * n + 1], updates[kk], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void store_output(int token, int tokens) const {
    E* o = static_cast<E*>(p.o.data);
    const int64_t base = s.seq.batch * p.o.stride[0] + s.head * p.o.stride[2] + token * p.o.stride[1];
    for (int i = threadIdx.x; i < tokens * (kPanel / 8); i += kThreads) {
      const int row = i / 8, piece = i % 8, c = s.first_channel + 8 * piece;
      if (c >= p.V) continue;
      const char* from = s.v + piece_at(row, piece, 2 * kPanel);
      const int64_t index = base + row * p.o.stride[1] + c * p.o.stride[3];
      if (l.fast_o) {
        *reinterpret_cast<uint4*>(o + index) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int e = 0; e < 8 && c + e < p.V; ++e) o[index + e * p.o.stride[3]] = reinterpret_cast<const E*>(from)[e];
      }
    }
  }

  // f(register, element) over this lane's part of a state. Steps, not products: 64 addresses at once do not fit the registers.
  template <class Stored, class F>
  __device__ __forceinline__ void each_as(float (&x)[kKeyTiles][4], const TensorRef& t, int64_t slot,
                                          const F& f) const {
    const int v = s.first_channel + 16 * warp + (lane >> 2);
    Stored* at_low = static_cast<Stored*>(t.data) + slot * t.stride[0] + s.head * t.stride[1] +
                     2 * (lane & 3) * t.stride[2] + v * t.stride[3];
    const int64_t step_k = t.stride[2], step_v = 8 * t.stride[3];
    const bool low = v < p.V, high = v + 8 < p.V;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      if (low) f(x[n][0], at_low);
      if (low) f(x[n][1], at_low + step_k);
      if (high) f(x[n][2], at_low + step_v);
      if (high) f(x[n][3], at_low + step_k + step_v);
      at_low += 8 * step_k;
    }
  }
  __device__ __forceinline__ void load_state(float (&x)[kKeyTiles][4], const TensorRef& t, int64_t slot) const {
    if (t.dtype == GDN_F32) {
      each_as<const float>(x, t, slot, [](float& value, const float* at) { value = *at; });
    } else if (t.dtype == GDN_BF16) {
      each_as<const __nv_bfloat16>(x, t, slot,
                                   [](float& value, const __nv_bfloat16* at) { value = __bfloat162float(*at); });
    } else {
      each_as<const __half>(x, t, slot, [](float& value, const __half* at) { value = __half2float(*at); });
    }
  }
  __device__ __forceinline__ void store_state(float (&x)[kKeyTiles][4], const TensorRef& t, int64_t slot) const {
    if (t.dtype == GDN_F32) {
      each_as<float>(x, t, slot, [](float value, float* at) { *at = value; });
    } else if (t.dtype == GDN_BF16) {
      each_as<__nv_bfloat16>(x, t, slot, [](float value, __nv_bfloat16* at) { *at = __float2bfloat16(value); });
    } else {
      each_as<__half>(x, t, slot, [](float value, __half* at) { *at = __float2half(value); });
    }
  }

  __device__ __forceinline__ void run(int64_t n) const {
    if (s.seq.is_null) {
      const int c = threadIdx.x % 64 + s.first_channel;
      for (int64_t t = threadIdx.x / 64; c < p.V && t < s.seq.len; t += kThreads / 64) {
        store_float(p.o.data, p.o.dtype,
                    s.seq.batch * p.o.stride[0] + (s.seq.begin + t) * p.o.stride[1] + s.head * p.o.stride[2] +
                        c * p.o.stride[3],
                    0.f);
      }
      return;
    }
    const bool checkpoints = p.checkpoints.data != nullptr && p.checkpoint_every > 0;
    if (checkpoints) {
      const int64_t entry = checkpoint_begin(p, n);  // by whole warps
      if (threadIdx.x == 0) s.first_checkpoint = entry;
    }
    float x[kKeyTiles][4];
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) x[t][0] = x[t][1] = x[t][2] = x[t][3] = 0.f;
    if (s.seq.read_slot >= 0) {
      load_state(x, p.initial_state, s.seq.read_slot);
    }
    const int len = static_cast<int>(s.seq.len);  // the host sees to fewer than 2^31 tokens
#pragma unroll 1
    for (int done = 0; done < len; done += kChunk) {
      const int token = static_cast<int>(s.seq.begin) + done, tokens = min(len - done, kChunk);
      load_tile(s.k, p.k, l.fast_k, s.key_head, token, tokens, kKeys, 0, kKeys, kPitch);
      load_tile(s.q, p.q, l.fast_q, s.key_head, token, tokens, kKeys, 0, kKeys, kPitch);
      load_tile(s.v, p.v, l.fast_v, s.head, token, tokens, kPanel, s.first_channel, p.V, 2 * kPanel);
      ptx::async_copy_commit();
      if (warp == 0) gates(token, tokens);
      ptx::async_copy_wait_group<0>();
      __syncthreads();
      norms(s.k, s.k_norm, true);
      norms(s.q, s.q_norm, false);
      __syncthreads();
      const bool wide = s.long_keys != 0;
      make_scores();
      if (threadIdx.x < kChunk) {
        const int i = threadIdx.x;
        const float grown = exp2f(s.gate[i]);
        s.read_k[i] = grown * s.k_norm[i];
        s.read_q[i] = grown * s.q_norm[i] * p.scale;
        s.update[i] = exp2f(s.gate[kChunk - 1] - s.gate[i]) * s.k_norm[i];
      }
      if (wide) {
        __syncthreads();
        invert_wide();
      } else {
        invert_diagonal();
        __syncthreads();
        invert_column();
      }
      __syncthreads();
      advance(x);
      __syncthreads();
      store_output(token, tokens);
      const int end = done + tokens;
      if (checkpoints && end % p.checkpoint_every == 0) {
        const int64_t slot = checkpoint_slot(p, s.first_checkpoint + end / p.checkpoint_every - 1);
        if (slot >= 0) store_state(x, p.checkpoints, slot);
      }
      __syncthreads();
    }
    if (s.seq.write_slot >= 0) store_state(x, p.final_state, s.seq.write_slot);
  }
};

// checkpoint_every must be a multiple of 64. Grid: sequences x Hv x panels.
template <class E, int kKeys>
__global__ void __launch_bounds__(kThreads)
    chunk_kernel(const __grid_constant__ RuleParams p, const __grid_constant__ LaunchParams l) {
  extern __shared__ __align__(128) char smem[];
  auto& s = *reinterpret_cast<Shared<kKeys>*>(smem);
  const uint32_t panels = static_cast<uint32_t>(l.panels), pair = blockIdx.x / panels;
  const uint32_t n = pair / static_cast<uint32_t>(p.Hv);
  if (threadIdx.x == 0) {
    s.seq = sequence_info(p, n);
    s.head = static_cast<int32_t>(pair - n * static_cast<uint32_t>(p.Hv));
    s.key_head = key_head_of(p, s.head);
    s.first_channel = kPanel * static_cast<int32_t>(blockIdx.x - pair * panels);
  }
  __syncthreads();
  const Chunk<E, kKeys> chunk{{{p, l, s, static_cast<int>(threadIdx.x % 32), static_cast<int>(threadIdx.x / 32)}}};
  chunk.run(n);
}

}  // namespace gdn::cuda::sm80
