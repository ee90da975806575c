// SPDX-License-Identifier: MIT
// T = (I + L)^-1 diag(beta) for long keys: everything in fp32 and without tensor cores. A chunk takes about as long as token
// by token, but the code stays small and out of the registers of the usual way (inverse.cuh).
#pragma once
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldst.cuh"
#include "cuda/sm90/chunk_forward/config.h"

namespace gdn::cuda::sm90 {

// By an auxiliary warpgroup. L is made anew, packed by rows, in sL (8,064 bytes); column j of (I + L)^-1 by substitution,
// packed by columns, in sX (as many).
template <class T>
struct WideInverse {
  using Element = typename T::Element;
  using Mid = typename T::Mid;

  const float *gate, *beta, *column, *k_norm;  // of the chunk; k_norm null: no L2 norm
  uint32_t kq, sL, sX, sT;
  int barrier, lane, warp;

  // Entry (i, j), i > j, of a strictly lower triangle that is packed by rows.
  __device__ __forceinline__ static uint32_t packed(uint32_t i, uint32_t j) { return (i * (i - 1) / 2 + j) * 4; }

  __device__ __forceinline__ void run() const {
#pragma unroll 1
    for (int row = 16 * warp; row < 16 * warp + 16; ++row) {
#pragma unroll 1
      for (int other = lane; other < row; other += 32) {
        float sum = 0.f;
#pragma unroll 1
        for (int i = 0; i < T::kHalves * 8; ++i) {
          const uint32_t base = kq + (i >> 3) * T::kHalfBytes;
          uint32_t a[4], b[4];
          ptx::load_shared_16(a, base + swizzled(row, i & 7));
          ptx::load_shared_16(b, base + swizzled(other, i & 7));
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float2 x = ptx::unpack2<Element>(a[e]), y = ptx::unpack2<Element>(b[e]);
            sum += x.x * y.x;
            sum += x.y * y.y;
          }
        }
        float weight = ptx::exp2_fast(gate[row] - column[other]) * beta[row];
        if (k_norm != nullptr) weight *= k_norm[row];
        ptx::store_shared_float(sL + packed(row, other), sum * weight);
      }
    }
    ptx::named_barrier_sync(barrier, 128);
    const uint32_t own = 32 * warp + lane;
    if (own >= kChunk) return;
    const float own_beta = beta[own];
    const uint32_t own_x = sX + own * (2 * kChunk - 1 - own) / 2 * 4;  // of entry (own + 1, own)
#pragma unroll 1
    for (uint32_t i = own & ~15; i < kChunk; ++i) {
      float value = i == own ? 1.f : 0.f;
#pragma unroll 1
      for (uint32_t k = own; k < i; ++k) {
        const float x = k == own ? 1.f : ptx::load_shared_float(own_x + (k - own - 1) * 4);
        value -= ptx::load_shared_float(sL + packed(i, k)) * x;
      }
      if (i > own) ptx::store_shared_float(own_x + (i - own - 1) * 4, value);
      ptx::store_shared_element<Mid>(sT + swizzled(i, own >> 3) + 2 * (own & 7), value * own_beta);
    }
  }
};

}  // namespace gdn::cuda::sm90
