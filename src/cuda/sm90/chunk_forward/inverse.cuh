// SPDX-License-Identifier: MIT
// T = (I + L)^-1 diag(beta) of a chunk by the four warps of the inverse warpgroup, L strictly lower triangular, 64 x 64.
//
// The 16 x 16 diagonal blocks of I + L are inverted a warp each: their 8 x 8 diagonal blocks by fp32 substitution (a lane per
// column), what is below by X = -D_1 L_10 D_0. Then, block column by block column (a warp each),
//   X_jj = D_j,  X_ij = -D_i sum_{j <= k < i} L_ik X_kj
// with fp32 accumulation and transposed, so that X_kj stays in registers from one product to the next: an accumulator is an
// A operand, and L_ik^T, D_i^T are read from row-major storage as B operands.
//
// L and D are kept in fp16: 2^-11, range 65504, enough while beta |k|^2 <= 2, where the entries of the inverse are bounded
// (error about 1e-3 at cosine 0.9; bf16 would be 8e-3). InverseRole::invert_wide is for all other keys.
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldst.cuh"
#include "cuda/sm90/chunk_forward/config.h"

namespace gdn::cuda::sm90 {

// Forward substitution of the two 8 x 8 diagonal blocks of an fp32 block [16][kStride]: lanes 0-7 hold the columns of the
// first block's inverse, 8-15 the second's (16-31 the same again).
template <int kStride>
__device__ __forceinline__ void substitute_8x8(const float* block, int lane, float (&x)[8]) {
  const float* eight = block + (lane & 8) * (kStride + 1);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = (lane & 7) == i ? 1.f : 0.f;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 l = *reinterpret_cast<const float4*>(eight + i * kStride + j);
      x[i] -= l.x * x[j];
      if (j + 1 < i) x[i] -= l.y * x[j + 1];
      if (j + 2 < i) x[i] -= l.z * x[j + 2];
      if (j + 3 < i) x[i] -= l.w * x[j + 3];
    }
  }
}

// Stores the transpose of a 16 x 16 accumulator, rows times beta, as the block of sT at `target` (this lane's row).
template <class Mid>
__device__ __forceinline__ void store_inverse_block(uint32_t target, const float (&x)[2][4], const float (&beta)[2]) {
  ptx::stmatrix_x4_trans(target, ptx::pack2<Mid>(x[0][0] * beta[0], x[0][1] * beta[0]),
                         ptx::pack2<Mid>(x[0][2] * beta[1], x[0][3] * beta[1]),
                         ptx::pack2<Mid>(x[1][0] * beta[0], x[1][1] * beta[0]),
                         ptx::pack2<Mid>(x[1][2] * beta[1], x[1][3] * beta[1]));
}

struct BlockInverse {
  uint32_t sH;      // sH [64][64] fp16, swizzle 128B: L below the diagonal blocks, D on them
  float* diagonal;  // this warp's L_ww [16][kDiagonalStride], fp32
  int lane, warp;

  // D = (I + L_ww)^-1 into sH.
  __device__ __forceinline__ void invert_diagonal_block() const {
    float x[8];
    substitute_8x8<kDiagonalStride>(diagonal, lane, x);
    const int own = lane & 7, group = lane >> 2, t2 = 2 * (lane & 3);
    const uint32_t first = sH + 2048 * warp;  // of the diagonal block's rows
    const auto element = [&](int row, int column) {
      return first + swizzled(row, 2 * warp + (column >> 3)) + 2 * (column & 7);
    };
    __syncwarp();
    if (lane < 16) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = (lane & 8) + i;
        diagonal[row * kDiagonalStride + (lane & 8) + own] = x[i];
        ptx::store_shared_element<__half>(element(row, lane), x[i]);
      }
    }
    if (lane < 8) {
      const uint32_t zero[4] = {0, 0, 0, 0};
      ptx::store_shared_16(first + swizzled(lane, 2 * warp + 1), zero);
    }
    __syncwarp();
    // X_10^T = -(D_0^T L_10^T) D_1^T, in rows 0-7 of 16 x 8 products.
    const float* below = diagonal + (8 + group) * kDiagonalStride + t2;
    const float2 l10 = *reinterpret_cast<const float2*>(below), d1 = *reinterpret_cast<const float2*>(below + 8);
    const uint32_t d0 =
        ptx::pack2<__half>(diagonal[t2 * kDiagonalStride + group], diagonal[(t2 + 1) * kDiagonalStride + group]);
    float product[4] = {}, result[4] = {};
    ptx::mma_half_8(product, d0, ptx::pack2<__half>(l10.x, l10.y));
    ptx::mma_half_8(result, ptx::pack2<__half>(-product[0], -product[1]), ptx::pack2<__half>(d1.x, d1.y));
    ptx::store_shared_element<__half>(element(8 + t2, group), result[0]);
    ptx::store_shared_element<__half>(element(9 + t2, group), result[1]);
  }

  // Block column `warp` of the inverse, times diag(beta), into sT.
  template <class Mid>
  __device__ __forceinline__ void invert_block_column(uint32_t sT, const float* chunk_beta) const {
    const int group = lane >> 2;
    const float beta[2] = {chunk_beta[16 * warp + group], chunk_beta[16 * warp + group + 8]};
    // ldmatrix / stmatrix of 16 x 16 block (i, j): this lane's row 16 i + 8 (lane / 16) + lane % 8, piece 2 j + (lane / 8) % 2.
    const uint32_t row = 8 * (lane >> 4) + (lane & 7), flip = (((lane >> 3) & 1) ^ (row & 7)) << 4;
    const auto block = [&](uint32_t base, int i, int j) { return base + (2048 * i + 128 * row) + (flip ^ (32 * j)); };
    uint32_t a[4][4];  // a[d]: transpose of X_(warp + d, warp) as an A operand
    ptx::ldmatrix_x4_trans(a[0], block(sH, warp, warp));
    {
      float x[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = ptx::unpack2<__half>(a[0][i]);
        x[i >> 1][2 * (i & 1)] = two.x;
        x[i >> 1][2 * (i & 1) + 1] = two.y;
      }
      store_inverse_block<Mid>(block(sT, warp, warp), x, beta);
    }
#pragma unroll
    for (int d = 1; d < 4; ++d) {
      if (warp + d >= 4) return;  // not around the rest: a[d] would count as alive for the whole kernel
      float sum[2][4] = {}, x[2][4] = {};
      uint32_t b[4];
#pragma unroll
      for (int k = 0; k < d; ++k) {
        ptx::ldmatrix_x4(b, block(sH, warp + d, warp + k));
        ptx::mma_half(sum[0], a[k], b[0], b[1]);
        ptx::mma_half(sum[1], a[k], b[2], b[3]);
      }
      uint32_t negated[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        negated[i] = ptx::pack2<__half>(sum[i >> 1][2 * (i & 1)], sum[i >> 1][2 * (i & 1) + 1]) ^ 0x80008000u;
      }
      ptx::ldmatrix_x4(b, block(sH, warp + d, warp + d));
      ptx::mma_half(x[0], negated, b[0], b[1]);
      ptx::mma_half(x[1], negated, b[2], b[3]);
      store_inverse_block<Mid>(block(sT, warp + d, warp), x, beta);
      if (d < 3) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[d][i] = ptx::pack2<__half>(x[i >> 1][2 * (i & 1)], x[i >> 1][2 * (i & 1) + 1]);
      }
    }
  }
};

}  // namespace gdn::cuda::sm90
