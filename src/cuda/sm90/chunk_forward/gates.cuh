// SPDX-License-Identifier: MIT
// The gate inputs of a chunk -> cumulative log2 decay and beta in shared memory, and the factors the state warpgroups use.
#pragma once
#include "cuda/common/sequence.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldst.cuh"
#include "cuda/sm90/chunk_forward/config.h"

namespace gdn::cuda::sm90 {

// By one warp: a lane's inputs are tokens 2 lane and 2 lane + 1.
template <class T>
struct GateMaker {
  static constexpr float kLog2e = 1.4426950408889634f;
  static constexpr float kMinLog2Decay = -104.f * kLog2e;  // e^-104 is 0 in fp32

  const KernelParams& p;
  const Work& work;
  uint32_t* words;  // in shared memory, 2 x 64, this warp's own: g, beta
  int lane;

  __device__ __forceinline__ const char* gate_address(const TensorRef& t, int chunk, int e) const {
    const int64_t token = work.first_token(chunk) + 2 * lane + e;
    const int64_t index = work.batch * t.stride[0] + token * t.stride[1] + work.head * t.stride[2];
    return static_cast<const char*>(t.data) + (t.dtype == GDN_F32 ? 4 : 2) * index;
  }
  __device__ __forceinline__ static float take_element(uint32_t word, const char* address, int32_t dtype) {
    if (dtype == GDN_F32) return __uint_as_float(word);
    const uint32_t bits = (reinterpret_cast<uintptr_t>(address) & 2) != 0 ? word >> 16 : word & 0xffff;
    return dtype == GDN_BF16 ? __uint_as_float(bits << 16)
                             : __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  }
  // The 4-byte words that hold the inputs go to shared memory, to be taken apart well after.
  __device__ __forceinline__ void fetch_gates(int chunk) const {
    const int tokens = work.tokens_in(chunk);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool inside = 2 * lane + e < tokens;
      if (p.rule.g.data != nullptr) ptx::copy_word(words + 2 * lane + e, gate_address(p.rule.g, chunk, e), inside);
      if (p.rule.beta.data != nullptr) {
        ptx::copy_word(words + kChunk + 2 * lane + e, gate_address(p.rule.beta, chunk, e), inside);
      }
    }
  }

  // A NaN stays one.
  __device__ __forceinline__ static float floor_decay(float d) { return d < kMinLog2Decay ? kMinLog2Decay : d; }
  __device__ __forceinline__ float log2_decay(float g) const {
    float d = g * kLog2e;
    if (p.rule.gate_form == GDN_GATE_RAW) {
      const TensorRef &A_log = p.rule.A_log, &dt_bias = p.rule.dt_bias;
      const float bias =
          dt_bias.data == nullptr ? 0.f : load_float(dt_bias.data, dt_bias.dtype, work.head * dt_bias.stride[0]);
      const float x = g + bias, rate = -kLog2e * expf(load_float(A_log.data, A_log.dtype, work.head * A_log.stride[0]));
      d = rate * (x > 20.f ? x : log1pf(__expf(x)));
    } else if (p.rule.gate_form == GDN_GATE_LINEAR) {
      d = __log2f(g);
    }
    return floor_decay(d);
  }
  __device__ __forceinline__ float beta_value(float b) const {
    if (p.rule.beta_form == GDN_BETA_VALUE) return b;
    float value = __fdividef(1.f, 1.f + __expf(-b));
    if (p.rule.beta_form == GDN_BETA_SIGMOID2) value *= 2.f;
    if (p.rule.round_beta) {
      if (p.rule.beta.dtype == GDN_BF16) value = __bfloat162float(__float2bfloat16(value));
      if (p.rule.beta.dtype == GDN_F16) value = __half2float(__float2half(value));
    }
    return value;
  }

  __device__ __forceinline__ bool is_plain() const {
    return p.rule.g.data != nullptr && p.rule.beta.data != nullptr && p.rule.g.dtype == GDN_F32 &&
           p.rule.beta.dtype == GDN_F32 && p.rule.gate_form == GDN_GATE_LOG && p.rule.beta_form == GDN_BETA_VALUE;
  }

  // Of one token of the sequence's tensors, read here and now.
  __device__ __forceinline__ float token_log2_decay(int64_t token) const {
    const TensorRef& g = p.rule.g;
    return log2_decay(
        load_float(g.data, g.dtype, work.batch * g.stride[0] + token * g.stride[1] + work.head * g.stride[2]));
  }
  __device__ __forceinline__ float token_beta(int64_t token) const {
    const TensorRef& beta = p.rule.beta;
    if (beta.data == nullptr) return 1.f;
    return beta_value(load_float(beta.data, beta.dtype,
                                 work.batch * beta.stride[0] + token * beta.stride[1] + work.head * beta.stride[2]));
  }

  // Cumulative log2 decay and beta of a chunk, from the words fetched before.
  __device__ __forceinline__ void make_gates(int chunk, float* gate, float* beta) const {
    ptx::async_copy_wait();
    const uint2 g_words = *reinterpret_cast<const uint2*>(words + 2 * lane);
    const uint2 beta_words = *reinterpret_cast<const uint2*>(words + kChunk + 2 * lane);
    float d[2], b[2];
    if (is_plain()) {  // fp32 g and beta as they are; tokens past the end were fetched as 0
      d[0] = floor_decay(__uint_as_float(g_words.x) * kLog2e);
      d[1] = floor_decay(__uint_as_float(g_words.y) * kLog2e);
      b[0] = __uint_as_float(beta_words.x);
      b[1] = __uint_as_float(beta_words.y);
    } else {
      make_other_gates(chunk, g_words, beta_words, d, b);
    }
    float sum = d[0] + d[1];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += other;
    }
    *reinterpret_cast<float2*>(gate + 2 * lane) = make_float2(sum - d[1], sum);
    *reinterpret_cast<float2*>(beta + 2 * lane) = make_float2(b[0], b[1]);
  }

  __device__ __forceinline__ void make_other_gates(int chunk, uint2 g_words, uint2 beta_words, float (&d)[2],
                                                   float (&b)[2]) const {
    const int tokens = work.tokens_in(chunk);
#pragma unroll 1
    for (int e = 0; e < 2; ++e) {
      // Selected, not indexed: this loop stays one (it holds every gate form).
      const uint32_t g_bits = e == 0 ? g_words.x : g_words.y, beta_bits = e == 0 ? beta_words.x : beta_words.y;
      float decay = 0.f, beta = 0.f;
      if (2 * lane + e < tokens) {
        const TensorRef& g = p.rule.g;
        if (g.data != nullptr) decay = log2_decay(take_element(g_bits, gate_address(g, chunk, e), g.dtype));
        beta = 1.f;
        if (p.rule.beta.data != nullptr) {
          beta = beta_value(take_element(beta_bits, gate_address(p.rule.beta, chunk, e), p.rule.beta.dtype));
        }
      }
      if (e == 0) {
        d[0] = decay;
        b[0] = beta;
      } else {
        d[1] = decay;
        b[1] = beta;
      }
    }
  }

  // By one warp: tokens 2 lane and 2 lane + 1.
  __device__ __forceinline__ void write_factors(Factors& factors, const float* gate, const float* k_norms,
                                                const float* q_norms) const {
    const float last = gate[kChunk - 1];
    const float2 cumulative = *reinterpret_cast<const float2*>(gate + 2 * lane);
    float2 k_norm = make_float2(1.f, 1.f), q_norm = k_norm;
    if (p.rule.qk_l2norm) {
      k_norm = *reinterpret_cast<const float2*>(k_norms + 2 * lane);
      q_norm = *reinterpret_cast<const float2*>(q_norms + 2 * lane);
    }
    const float2 grown = make_float2(ptx::exp2_fast(cumulative.x), ptx::exp2_fast(cumulative.y));
    *reinterpret_cast<float2*>(factors.read_k + 2 * lane) = make_float2(grown.x * k_norm.x, grown.y * k_norm.y);
    *reinterpret_cast<float2*>(factors.read_q + 2 * lane) =
        make_float2(grown.x * q_norm.x * p.rule.scale, grown.y * q_norm.y * p.rule.scale);
    *reinterpret_cast<float2*>(factors.update + 2 * lane) =
        make_float2(ptx::exp2_fast(last - cumulative.x) * k_norm.x, ptx::exp2_fast(last - cumulative.y) * k_norm.y);
    if (lane == 0) factors.decay = ptx::exp2_fast(last);
  }
};

// What the products K K^T and Q K^T of a warp's 16 rows are multiplied with: Gamma, a factor per row, the columns' norms.
struct TileWeights {
  const float *gate, *column, *below;  // of the chunk; column: gate, or with the norms in it
  float gate_row[2], grown[2];
  int lane, warp;

  __device__ __forceinline__ TileWeights(const AuxShared& aux, int buffer, bool l2norm, int own_lane, int own_warp)
      : gate(aux.gate[buffer]),
        column(l2norm ? aux.column : aux.gate[buffer]),
        below(aux.below[own_warp]),
        lane(own_lane),
        warp(own_warp) {
    const int row = 16 * warp + (lane >> 2);  // and row + 8
    gate_row[0] = gate[row];
    gate_row[1] = gate[row + 8];
    // Left of the diagonal block Gamma_ij = e^(G_i - R) e^(R - G_j) with R of the token before this warp's rows: two
    // differences that are not positive when no gate is.
    grown[0] = ptx::exp2_fast(gate_row[0] - reference());
    grown[1] = ptx::exp2_fast(gate_row[1] - reference());
  }
  __device__ __forceinline__ float reference() const { return warp > 0 ? gate[16 * warp - 1] : 0.f; }
  // Once per chunk, by every warp for itself.
  __device__ __forceinline__ void write_below(float* own_below) const {
    const float2 mine = *reinterpret_cast<const float2*>(column + 2 * lane);
    *reinterpret_cast<float2*>(own_below + 2 * lane) =
        make_float2(ptx::exp2_fast(reference() - mine.x), ptx::exp2_fast(reference() - mine.y));
    __syncwarp();
  }

  // Tiles j and j + 1 (8 columns each), left of the diagonal block, as 16-bit elements for stmatrix_x4.
  template <class Packed>
  __device__ __forceinline__ void pack_left(uint32_t (&packed)[4], const float* tiles, int j,
                                            const float (&row_factor)[2]) const {
    const float factor[2] = {grown[0] * row_factor[0], grown[1] * row_factor[1]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 f = *reinterpret_cast<const float2*>(below + 8 * (j + i) + 2 * (lane & 3));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        packed[2 * i + h] =
            ptx::pack2<Packed>(tiles[4 * i + 2 * h] * (f.x * factor[h]), tiles[4 * i + 2 * h + 1] * (f.y * factor[h]));
      }
    }
  }
  // The two tiles of the diagonal block; element (i, h, e) is column 8 i + 2 (lane % 4) + e, row lane / 4 + 8 h of it.
  __device__ __forceinline__ void take_diagonal(float (&d)[8], const float (&tiles)[32]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float low = warp & 1 ? tiles[8 + i] : tiles[i];
      const float high = warp & 1 ? tiles[24 + i] : tiles[16 + i];
      d[i] = warp & 2 ? high : low;
    }
  }
  // 0 from `from` columns right of the diagonal on.
  __device__ __forceinline__ void weigh_diagonal(float (&d)[8], int from, const float (&row_factor)[2]) const {
    const int right = 2 * (lane & 3) - (lane >> 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 gate_column = *reinterpret_cast<const float2*>(column + 16 * warp + 8 * i + 2 * (lane & 3));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float weight[2] = {ptx::exp2_fast(gate_row[h] - gate_column.x) * row_factor[h],
                                 ptx::exp2_fast(gate_row[h] - gate_column.y) * row_factor[h]};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& value = d[4 * i + 2 * h + e];
          value = right >= from - e + 8 * h - 8 * i ? 0.f : value * weight[e];
        }
      }
    }
  }
};

}  // namespace gdn::cuda::sm90
