// SPDX-License-Identifier: MIT
// Inverse warpgroup: L = strict_lower(diag(beta) K K^T * Gamma) and T = (I + L)^-1 diag(beta), ahead of the state warpgroups.
#pragma once
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/chunk_forward/gates.cuh"
#include "cuda/sm90/chunk_forward/inverse.cuh"

namespace gdn::cuda::sm90 {

template <class T>
struct InverseRole {
  using Element = typename T::Element;
  using Mid = typename T::Mid;
  // A chunk whose keys have a larger beta |k|^2 or |k|^2 takes the wide inverse.
  static constexpr float kMaxGain = 2.05f, kMaxSquare = 4096.f;

  const KernelParams& p;
  uint32_t smem;
  SmallShared<T>& small;
  float* sL;
  int lane = threadIdx.x & 31;
  int warp = (threadIdx.x >> 5) & 3;

  __device__ __forceinline__ void run() {
    // Above the block diagonal nothing is written below.
    for (uint32_t i = threadIdx.x & 127; i < T::kProductStages * kPanelBytes / 16; i += 128) {
      const uint32_t zero[4] = {0, 0, 0, 0};
      ptx::store_shared_16(smem + T::kTOffset + 16 * i, zero);
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kAuxBarrier, 256);  // the first gates

    const bool l2norm = p.rule.qk_l2norm != 0;
    RingPosition<T::kInputStages> in;
    RingPosition<T::kProductStages> product;
#pragma unroll 1
    for (int chunk = 0; chunk < small.work.num_chunks; ++chunk) {
      // Opaque, so that the many addresses made of them are made anew: kept across chunks they do not fit the registers.
      asm volatile("" : "+r"(lane), "+r"(warp));
      const int group = lane >> 2, t2 = 2 * (lane & 3);
      const uint32_t kq = smem + in.stage * T::kInputBytes;
      ptx::mbarrier_wait(ptx::smem_address(&small.input_full[in.stage]), in.parity);  // by the copy engine
      if (l2norm || small.work.has_foreign_rows(p.rule, chunk))
        ptx::named_barrier_sync(kAuxBarrier, 256);  // ScoreRole: norms, tail
      float l[32];
      const uint64_t descriptor = ptx::wgmma_descriptor(kq, 16, 1024);
      ptx::wgmma_fence();
#pragma unroll
      for (int kb = 0; kb < T::kKeyDim / 16; ++kb) {
        const uint64_t k = ptx::descriptor_advance(descriptor, (kb >> 2) * 2 * kPanelBytes + (kb & 3) * 32);
        ptx::wgmma_m64n64_ss<Element>(l, k, k, kb > 0);
      }
      ptx::wgmma_commit();
      // While it runs: every warp is done with the inverse of the chunk before.
      ptx::named_barrier_sync(kInverseBarrier, 128);

      const float* k_norm = l2norm ? small.k_norm[product.stage] : nullptr;
      const float *gate = small.gate[chunk % kGateRing], *beta = small.beta[chunk % kGateRing];
      const TileWeights<T> weights(gate, k_norm, small.column[warp], small.below[warp], lane, warp);
      const int row = 16 * warp + group;  // and row + 8
      float row_factor[2] = {beta[row], beta[row + 8]};
      if (l2norm) {
        row_factor[0] *= k_norm[row];
        row_factor[1] *= k_norm[row + 8];
      }
      const uint32_t sH = smem + T::kLOffset;
      const BlockInverse blocks{sH, sL + kPanelBytes / 4 + 16 * kDiagonalStride * warp, lane, warp};
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(l);
      bool wide = false;
      {
        float d[8];
        weights.take_diagonal(d, l);
        // |k|^2 of row group + 8 h stands in the lane whose columns hold the diagonal.
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float square = group & 1 ? d[6 * h + 1] : d[6 * h];
          float gain = square * row_factor[h];
          if (l2norm) {
            gain *= k_norm[row + 8 * h];
            square *= k_norm[row + 8 * h] * k_norm[row + 8 * h];
          }
          wide |= (lane & 3) == group >> 1 && !(fabsf(gain) <= kMaxGain && square <= kMaxSquare);
        }
        weights.weigh_diagonal(d, 0, row_factor);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          *reinterpret_cast<float2*>(blocks.diagonal + (group + 8 * (i & 1)) * kDiagonalStride + 8 * (i >> 1) + t2) =
              make_float2(d[2 * i], d[2 * i + 1]);
        }
      }
      // stmatrix of two tiles: this lane's row of 16 and its piece of the two.
      const uint32_t tile_row = 8 * ((lane >> 3) & 1) + (lane & 7), tile_piece = lane >> 4;
#pragma unroll
      for (int j = 0; j < 6; j += 2) {
        if (j < 2 * warp) {
          uint32_t packed[4];
          weights.template pack_left<__half>(packed, l + 4 * j, j, row_factor);
          ptx::stmatrix_x4(sH + 2048 * warp + swizzled(tile_row, j + tile_piece), packed[0], packed[1], packed[2],
                           packed[3]);
        }
      }
      __syncwarp();
      blocks.invert_diagonal_block();
      if (chunk >= T::kProductStages) {
        ptx::mbarrier_wait(ptx::smem_address(&small.product_empty[product.stage]),
                           product.parity ^ 1);  // by the state warps
      }
      wide = ptx::named_barrier_any(kInverseBarrier, 128, wide);  // also: L and D are there
      const uint32_t inverse = smem + T::kTOffset + product.stage * kPanelBytes;
      if (!wide) {
        blocks.template invert_block_column<Mid>(inverse, beta);
      } else {
        invert_wide(inverse, kq, chunk, product.stage);
      }
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&small.product_full[product.stage]));
      in.advance();
      product.advance();
    }
  }

  // For long keys: everything in fp32 and without tensor cores. L is made anew into the lower triangle of sL, and column j of
  // (I + L)^-1 by substitution into row j of the upper one. A chunk takes about as long as token by token, but the code
  // stays small and out of the registers of the usual way.
  __device__ __forceinline__ void invert_wide(uint32_t inverse, uint32_t kq, int chunk, int stage) const {
    asm volatile("" : "+r"(chunk), "+r"(stage));  // so that no address of the usual way is kept for this one
    const float *gate = small.gate[chunk % kGateRing], *column = small.column[warp];
#pragma unroll 1
    for (int row = 16 * warp; row < 16 * warp + 16; ++row) {
#pragma unroll 1
      for (int other = lane; other < row; other += 32) {
        float sum = 0.f;
#pragma unroll 1
        for (int i = 0; i < T::kHalves * 8; ++i) {
          const uint32_t base = kq + (i >> 3) * 2 * kPanelBytes;
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
        float weight = ptx::exp2_fast(gate[row] - column[other]) * small.beta[chunk % kGateRing][row];
        if (p.rule.qk_l2norm) weight *= small.k_norm[stage][row];
        ptx::store_shared_float(smem + T::kLOffset + (row * kLStride + other) * 4, sum * weight);
      }
    }
    ptx::named_barrier_sync(kInverseBarrier, 128);
    const uint32_t own = 32 * warp + lane, matrix = smem + T::kLOffset;
    if (own >= kChunk) return;
    const float own_beta = small.beta[chunk % kGateRing][own];
#pragma unroll 1
    for (uint32_t i = own & ~15; i < kChunk; ++i) {
      float value = i == own ? 1.f : 0.f;
#pragma unroll 1
      for (uint32_t k = own; k < i; ++k) {
        const float x = k == own ? 1.f : ptx::load_shared_float(matrix + (own * kLStride + k) * 4);
        value -= ptx::load_shared_float(matrix + (i * kLStride + k) * 4) * x;
      }
      if (i > own) ptx::store_shared_float(matrix + (own * kLStride + i) * 4, value);
      ptx::store_shared_element<Mid>(inverse + swizzled(i, own >> 3) + 2 * (own & 7), value * own_beta);
    }
  }
};

}  // namespace gdn::cuda::sm90
