// SPDX-License-Identifier: MIT
// chunk_forward with mma.sync, sm_80 and later. One CTA of four warps per (sequence, value head, 64 value channels), 64
// tokens at a time. A warp holds X = S^T of 16 channels in fp32 accumulators, which are the A operand of both reads:
//   all warps, 16 rows each:  L, P;  then the inverse T (fp16 block products)
//   per warp:  R = V^T - (X K^T) diag(e^G);  U = R T^T;  O = scale (X Q^T) diag(e^G) + U P^T
//              X = e^G_C X + (U diag(e^(G_C - G))) K
#pragma once
#include "cuda/common/rule_math.cuh"
#include "cuda/common/slots.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/sm80/chunk_forward/config.h"

namespace gdn::cuda::sm80 {

// A 16-byte piece of a row: swizzled, so that eight rows' same pieces lie in different banks.
__device__ __forceinline__ int piece_at(int row, int piece, int pitch) {
  return row * pitch + ((piece & ~7) << 4) + (((piece ^ row) & 7) << 4);
}
__device__ __forceinline__ int element_at(int row, int column, int pitch) {
  return piece_at(row, column >> 3, pitch) + 2 * (column & 7);
}

template <class E, int kKeys>
struct Chunk {
  using S = Shared<kKeys>;
  static constexpr int kPitch = S::kPitch, kKeyTiles = kKeys / 8, kRow = 2 * kChunk;
  const RuleParams& p;
  const LaunchParams& l;
  S& s;
  int lane, warp;

  template <class F>
  __device__ __forceinline__ static F& at(char* base, int offset) {
    return *reinterpret_cast<F*>(base + offset);
  }
  __device__ __forceinline__ void load_tile(char* to, const TensorRef& x, bool fast, int32_t h, int token, int tokens,
                                            int columns, int first, int width, int pitch) const {
    const int pieces = columns / 8;
    const int64_t base = s.seq.batch * x.stride[0] + h * x.stride[2] + token * x.stride[1];
    const E* data = static_cast<const E*>(x.data);
    for (int i = threadIdx.x; i < kChunk * pieces; i += kThreads) {
      const int row = i / pieces, piece = i % pieces;
      char* target = to + piece_at(row, piece, pitch);
      const bool inside = row < tokens && first + 8 * piece < width;
      const int64_t index = base + row * x.stride[1] + (first + 8 * piece) * x.stride[3];
      if (fast) {
        ptx80::copy_16(target, inside ? data + index : data, inside);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          reinterpret_cast<E*>(target)[e] =
              inside && first + 8 * piece + e < width ? data[index + e * x.stride[3]] : E(0.f);
        }
      }
    }
  }

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

  // Sum of squares of 16 rows of a tile per warp -> 1 / norm; with round_qk the rows themselves. Returns the squared
  // length after that.
  __device__ __forceinline__ void norms(char* tile, float* norm, const TensorRef& x, bool keys) const {
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
      ptx80::ldmatrix_x4(a, a_tile + piece_at(16 * warp + (lane & 15), 2 * kk + (lane >> 4), kPitch));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j > warp) continue;
        load_b(b, s.k, j, kk, kPitch);
        ptx80::mma<E>(acc[2 * j], a, b[0], b[1]);
        ptx80::mma<E>(acc[2 * j + 1], a, b[2], b[3]);
      }
    }
  }
  // B operands of rows 16 j .. + 15 (n) and columns 16 kk .. + 15 (k) of a row-major tile: b[0], b[1] for the first eight n.
  // Written so that a row's swizzle is the lane's alone: what j and kk add are constants.
  __device__ __forceinline__ void load_b(uint32_t (&b)[4], char* tile, int j, int kk, int pitch) const {
    ptx80::ldmatrix_x4(b, tile + (8 * (lane >> 4) + (lane & 7)) * pitch + j * 16 * pitch + 128 * (kk >> 2) +
                              (((2 * (kk & 3) + ((lane >> 3) & 1)) ^ (lane & 7)) << 4));
  }
  // The same of a tile whose rows are k and whose columns are n.
  __device__ __forceinline__ void load_b_trans(uint32_t (&b)[4], char* tile, int j, int kk, int pitch) const {
    ptx80::ldmatrix_x4_trans(b, tile + (lane & 15) * pitch + kk * 16 * pitch + 128 * (j >> 2) +
                                    (((2 * (j & 3) + (lane >> 4)) ^ (lane & 7)) << 4));
  }

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
        at<uint32_t>(s.p, element_at(row, c, kRow)) = ptx80::pack<E>(w[0], w[1]);
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
          at<uint32_t>(s.h, element_at(row, c, kRow)) = ptx80::pack<__half>(w[0], w[1]);
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
    ptx80::ldmatrix_x4_trans(
        a[0], s.h + piece_at(16 * warp + (lane & 7) + 8 * (lane >> 4), 2 * warp + ((lane >> 3) & 1), kRow));
    const auto store = [&](int i, const float(&x)[2][4]) {  // x: transpose of block (i, warp)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t y = ptx80::transpose_8x8(ptx80::pack<E>(x[n][2 * h] * beta[h], x[n][2 * h + 1] * beta[h]));
          at<uint32_t>(s.t, element_at(16 * i + 8 * n + group, 16 * warp + 8 * h + t2, kRow)) = y;
        }
      }
    };
    float x[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = ptx80::unpack<__half>(a[0][i]);
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
      ptx80::mma<__half>(sum[0], a[k], b[0], b[1]);
      ptx80::mma<__half>(sum[1], a[k], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      negated[i] = ptx80::pack<__half>(-sum[i >> 1][2 * (i & 1)], -sum[i >> 1][2 * (i & 1) + 1]);
    }
    load_b(b, s.h, warp + d, warp + d, kRow);
    ptx80::mma<__half>(y[0], negated, b[0], b[1]);
    ptx80::mma<__half>(y[1], negated, b[2], b[3]);
    store(warp + d, y);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[d][i] = ptx80::pack<__half>(y[i >> 1][2 * (i & 1)], y[i >> 1][2 * (i & 1) + 1]);
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
      const uint32_t a[4] = {ptx80::pack<E>(x[2 * kk][0], x[2 * kk][1]), ptx80::pack<E>(x[2 * kk][2], x[2 * kk][3]),
                             ptx80::pack<E>(x[2 * kk + 1][0], x[2 * kk + 1][1]),
                             ptx80::pack<E>(x[2 * kk + 1][2], x[2 * kk + 1][3])};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t b[4];
        load_b(b, s.k, j, kk, kPitch);
        ptx80::mma<E>(of_k[2 * j], a, b[0], b[1]);
        ptx80::mma<E>(of_k[2 * j + 1], a, b[2], b[3]);
        load_b(b, s.q, j, kk, kPitch);
        ptx80::mma<E>(of_q[2 * j], a, b[0], b[1]);
        ptx80::mma<E>(of_q[2 * j + 1], a, b[2], b[3]);
      }
    }
  }
  __device__ __forceinline__ static void as_operand(uint32_t (&a)[4][4], const float (&y)[8][4]) {
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[kk][i] = ptx80::pack<E>(y[2 * kk + (i >> 1)][2 * (i & 1)], y[2 * kk + (i >> 1)][2 * (i & 1) + 1]);
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
        ptx80::mma<E>(y[2 * j], a[kk], b[0], b[1]);
        ptx80::mma<E>(y[2 * j + 1], a[kk], b[2], b[3]);
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
      ptx80::ldmatrix_x4_trans(
          v, s.v + piece_at(16 * j + (lane & 7) + 8 * (lane >> 4), 2 * warp + ((lane >> 3) & 1), 2 * kPanel));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = ptx80::unpack<E>(v[i]);
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
            ptx80::transpose_8x8(ptx80::pack<E>(y[j][2 * h], y[j][2 * h + 1]));
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
        ptx80::mma<E>(x[2 * n], updates[kk], b[0], b[1]);
        ptx80::mma<E>(x[2 * n + 1], updates[kk], b[2], b[3]);
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
      ptx80::copy_commit();
      if (warp == 0) gates(token, tokens);
      ptx80::copy_wait<0>();
      __syncthreads();
      norms(s.k, s.k_norm, p.k, true);
      norms(s.q, s.q_norm, p.q, false);
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
  const Chunk<E, kKeys> chunk{p, l, s, static_cast<int>(threadIdx.x % 32), static_cast<int>(threadIdx.x / 32)};
  chunk.run(n);
}

}  // namespace gdn::cuda::sm80
