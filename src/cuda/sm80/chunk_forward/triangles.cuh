// SPDX-License-Identifier: MIT
// What of a chunk does not need the state: gates, norms, P = tril(scale Q K^T o Gamma), and
// T = (I + tril_-1(diag(beta) K K^T o Gamma))^-1 diag(beta).
#pragma once
#include "cuda/common/rule_math.cuh"
#include "cuda/sm80/chunk_forward/tiles.cuh"

namespace gdn::cuda::sm80 {

template <class E, int kKeys>
struct Triangles : Tiles<E, kKeys> {
  using Base = Tiles<E, kKeys>;
  using Base::kPitch, Base::kRow;
  using Base::l, Base::lane, Base::load_b, Base::p, Base::s, Base::warp;

  __device__ __forceinline__ float log2_decay(int token) const {
    constexpr float kLog2e = 1.4426950408889634f;
    if (p.g.data == nullptr) return 0.f;
    const float x =
        load_float(p.g.data, p.g.dtype, s.seq.batch * p.g.stride[0] + token * p.g.stride[1] + s.head * p.g.stride[2]);
    float d = x * kLog2e;
    if (p.gate_form == GDN_GATE_LINEAR) d = log2f(x);
    if (p.gate_form == GDN_GATE_RAW) {
      const float bias =
          p.dt_bias.data == nullptr ? 0.f : load_float(p.dt_bias.data, p.dt_bias.dtype, s.head * p.dt_bias.stride[0]);
      d = -kLog2e * expf(load_float(p.A_log.data, p.A_log.dtype, s.head * p.A_log.stride[0])) * softplus(x + bias);
    }
    return d < kMinGate * kLog2e ? kMinGate * kLog2e : d;
  }

  // 1 / norm of 16 rows of a tile per warp, 1 without L2 norm; with round_qk the rows themselves are normed. Marks long keys.
  __device__ __forceinline__ void norms(char* tile, float* norm, bool keys) const {
    for (int row = 16 * warp; row < 16 * warp + 16; ++row) {
      float sum = 0.f;
      for (int c = lane; c < kKeys; c += 32) {
        const float y = static_cast<float>(at<E>(tile, element_at(row, c, kPitch)));
        sum += y * y;
      }
      for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, o);
      float factor = p.qk_l2norm ? rsqrtf(sum + p.l2norm_eps) : 1.f;
      const float squared = sum * factor * factor;
      if (p.qk_l2norm && p.round_qk) {
        for (int c = lane; c < kKeys; c += 32) {
          E& y = at<E>(tile, element_at(row, c, kPitch));
          y = static_cast<E>(static_cast<float>(y) * factor);
        }
        factor = 1.f;
      }
      if (lane == 0) {
        norm[row] = factor;
        // Written by value only, so that lanes of several warps may do it at once. A NaN is not long.
        if (keys && (s.beta[row] * squared > 2.05f || sum > 4096.f)) s.long_keys = 1;
      }
    }
  }

  __device__ __forceinline__ void gates(int token, int tokens) const {  // warp 0
    float d[2], sum = 0.f;
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * lane + e;
      d[e] = i < tokens ? log2_decay(token + i) : 0.f;
      s.beta[i] = i < tokens ? token_beta(p, s.seq.batch, token + i, s.head) : 0.f;
      sum += d[e];
    }
    for (int o = 1; o < 32; o *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, sum, o);
      if (lane >= o) sum += other;
    }
    s.gate[2 * lane] = sum - d[1];
    s.gate[2 * lane + 1] = sum;
    if (lane == 0) s.long_keys = 0;
  }

  // 16 rows of A times all rows of K, tiles 0 .. 2 warp + 1 (the lower triangle). From tile: this warp's rows.
  __device__ __forceinline__ void scores(float (&acc)[8][4], char* a_tile) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.f;
#pragma unroll 2
    for (int kk = 0; kk < kKeys / 16; ++kk) {
      uint32_t a[4], b[4];
      ptx::ldmatrix_x4(a, ptx::smem_address(a_tile + piece_at(16 * warp + (lane & 15), 2 * kk + (lane >> 4), kPitch)));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j > warp) continue;
        load_b(b, s.k, j, kk, kPitch);
        ptx::mma<E>(acc[2 * j], a, b[0], b[1]);
        ptx::mma<E>(acc[2 * j + 1], a, b[2], b[3]);
      }
    }
  }

  // P, and L: its diagonal blocks in fp32, what is left of them in fp16.
  __device__ __forceinline__ void make_scores() const {
    const int group = lane >> 2, t2 = 2 * (lane & 3);
    float acc[8][4];
    scores(acc, s.q);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * warp + group + 8 * h, c = 8 * j + t2;
        float w[2];
        for (int e = 0; e < 2; ++e) {
          w[e] = c + e <= row ? acc[j][2 * h + e] * exp2f(s.gate[row] - s.gate[c + e]) * s.q_norm[row] *
                                    s.k_norm[c + e] * p.scale
                              : 0.f;
        }
        at<uint32_t>(s.p, element_at(row, c, kRow)) = ptx::pack2<E>(w[0], w[1]);
      }
    }
    scores(acc, s.k);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * warp + group + 8 * h, c = 8 * j + t2;
        float w[2];
        for (int e = 0; e < 2; ++e) {
          w[e] = c + e < row ? acc[j][2 * h + e] * exp2f(s.gate[row] - s.gate[c + e]) * s.k_norm[row] *
                                   s.k_norm[c + e] * s.beta[row]
                             : 0.f;
        }
        if (j >> 1 == warp) {
          for (int e = 0; e < 2; ++e) s.diagonal[warp][(group + 8 * h) * kDiagonalStride + (c & 15) + e] = w[e];
        } else if (j >> 1 < warp) {
          at<uint32_t>(s.h, element_at(row, c, kRow)) = ptx::pack2<__half>(w[0], w[1]);
        }
      }
    }
  }

  // D = (I + L_ww)^-1 of 16 x 16, fp32 throughout, a lane per column.
  __device__ __forceinline__ void invert_diagonal() const {
    __syncwarp();
    if (lane < 16) {
      const float* d = s.diagonal[warp];
      float x[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        x[i] = i == lane ? 1.f : 0.f;
#pragma unroll
        for (int k = 0; k < i; ++k) x[i] -= d[i * kDiagonalStride + k] * x[k];
        at<__half>(s.h, element_at(16 * warp + i, 16 * warp + lane, kRow)) = __float2half(x[i]);
      }
    }
  }

  // Block column `warp`: X_ij = -D_i sum_k L_ik X_kj, transposed so that X^T stays in registers as A operands.
  __device__ __forceinline__ void invert_column() const {
    const int group = lane >> 2, t2 = 2 * (lane & 3);
    const float beta[2] = {s.beta[16 * warp + group], s.beta[16 * warp + group + 8]};
    uint32_t a[4][4];
    ptx::ldmatrix_x4_trans(a[0], ptx::smem_address(s.h + piece_at(16 * warp + (lane & 7) + 8 * (lane >> 4),
                                                                  2 * warp + ((lane >> 3) & 1), kRow)));
    const auto store = [&](int i, const float(&x)[2][4]) {  // x: transpose of block (i, warp)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t y = ptx::transpose_8x8(ptx::pack2<E>(x[n][2 * h] * beta[h], x[n][2 * h + 1] * beta[h]));
          at<uint32_t>(s.t, element_at(16 * i + 8 * n + group, 16 * warp + 8 * h + t2, kRow)) = y;
        }
      }
    };
    float x[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = ptx::unpack2<__half>(a[0][i]);
      x[i >> 1][2 * (i & 1)] = two.x;
      x[i >> 1][2 * (i & 1) + 1] = two.y;
    }
    store(warp, x);
    for (int i = 0; i < warp; ++i) {  // above the diagonal
      const float zero[2][4] = {};
      store(i, zero);
    }
    column_step<1>(a, store);
    column_step<2>(a, store);
    column_step<3>(a, store);
  }
  // Block (warp + d, warp) from those above it.
  template <int d, class F>
  __device__ __forceinline__ void column_step(uint32_t (&a)[4][4], const F& store) const {
    if (warp + d >= 4) return;
    float sum[2][4] = {}, y[2][4] = {};
    uint32_t b[4], negated[4];
#pragma unroll
    for (int k = 0; k < d; ++k) {
      load_b(b, s.h, warp + d, warp + k, kRow);
      ptx::mma<__half>(sum[0], a[k], b[0], b[1]);
      ptx::mma<__half>(sum[1], a[k], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      negated[i] = ptx::pack2<__half>(-sum[i >> 1][2 * (i & 1)], -sum[i >> 1][2 * (i & 1) + 1]);
    }
    load_b(b, s.h, warp + d, warp + d, kRow);
    ptx::mma<__half>(y[0], negated, b[0], b[1]);
    ptx::mma<__half>(y[1], negated, b[2], b[3]);
    store(warp + d, y);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[d][i] = ptx::pack2<__half>(y[i >> 1][2 * (i & 1)], y[i >> 1][2 * (i & 1) + 1]);
  }

  // Long keys: all in fp32, packed triangles in h and wide.
  __device__ __forceinline__ void invert_wide() const {
    float *L = reinterpret_cast<float*>(s.h), *X = reinterpret_cast<float*>(s.wide);
    for (int i = threadIdx.x; i < kChunk * kChunk; i += kThreads) {
      const int row = i / kChunk, c = i % kChunk;
      if (c >= row) continue;
      float sum = 0.f;
#pragma unroll 1
      for (int k = 0; k < kKeys; ++k) {
        sum += static_cast<float>(at<E>(s.k, element_at(row, k, kPitch))) *
               static_cast<float>(at<E>(s.k, element_at(c, k, kPitch)));
      }
      L[row * (row - 1) / 2 + c] = sum * exp2f(s.gate[row] - s.gate[c]) * s.k_norm[row] * s.k_norm[c] * s.beta[row];
    }
    __syncthreads();
    const int j = threadIdx.x;
    if (j >= kChunk) return;
#pragma unroll 1
    for (int i = 0; i < kChunk; ++i) {
      float x = i == j ? 1.f : 0.f;
#pragma unroll 1
      for (int k = j; k < i; ++k) x -= L[i * (i - 1) / 2 + k] * (k == j ? 1.f : X[k * (k - 1) / 2 + j]);
      if (i > j) X[i * (i - 1) / 2 + j] = x;
      at<E>(s.t, element_at(i, j, kRow)) = static_cast<E>(x * s.beta[j]);
    }
  }
};

}  // namespace gdn::cuda::sm80
