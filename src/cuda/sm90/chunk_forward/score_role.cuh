// SPDX-License-Identifier: MIT
// Score warpgroup: P = tril(Q K^T) * Gamma * scale, the gates of all roles, L2 norms and tails; ahead of the state warpgroups.
#pragma once
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/chunk_forward/gates.cuh"

namespace gdn::cuda::sm90 {

// A chunk's tiles into their slot. By one thread.
template <class T>
__device__ __forceinline__ void load_tiles(const KernelParams& p, const Work& work, SmallShared<T>& small,
                                           uint32_t smem, int chunk) {
  const uint32_t stage = chunk % T::kInputStages;
  const uint32_t full = ptx::smem_address(&small.input_full[stage]), tile = smem + stage * T::kInputBytes;
  const int32_t token = static_cast<int32_t>(work.seq.begin) + chunk * kChunk,
                batch = static_cast<int32_t>(work.seq.batch);
  ptx::mbarrier_expect_tx(full, T::kInputBytes);
#pragma unroll
  for (int half = 0; half < T::kHalves; ++half) {
    ptx::tma_load(tile + half * 2 * kPanelBytes, &p.k, full, 64 * half, work.key_head, token, batch);
    ptx::tma_load(tile + half * 2 * kPanelBytes + kPanelBytes, &p.q, full, 64 * half, work.key_head, token, batch);
  }
#pragma unroll
  for (int wg = 0; wg < T::kStateWgs; ++wg) {
    ptx::tma_load(tile + T::kKqBytes + wg * kPanelBytes, &p.v, full, work.v_begin + 64 * wg, work.head, token, batch);
  }
}

template <class T>
struct ScoreRole {
  using Element = typename T::Element;
  using Mid = typename T::Mid;

  const KernelParams& p;
  uint32_t smem;
  SmallShared<T>& small;

  // One thread per row of K (64) and Q (64): reciprocal norms, or the rows themselves normalised and rounded (round_qk).
  __device__ __forceinline__ void normalize(uint32_t kq, float* k_norm, float* q_norm) const {
    const uint32_t thread = threadIdx.x & 127, row = thread & 63;
    const uint32_t base = kq + (thread >> 6) * kPanelBytes;
    float sum = 0.f;
#pragma unroll 2
    for (int i = 0; i < T::kHalves * 8; ++i) {
      uint32_t r[4];
      ptx::load_shared_16(r, base + (i >> 3) * 2 * kPanelBytes + swizzled(row, i & 7));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = ptx::unpack2<Element>(r[j]);
        sum += x.x * x.x;
        sum += x.y * x.y;
      }
    }
    const float factor = rsqrtf(sum + p.rule.l2norm_eps);
    (thread < 64 ? k_norm : q_norm)[row] = p.rule.round_qk ? 1.f : factor;
    if (!p.rule.round_qk) return;
#pragma unroll 1
    for (int i = 0; i < T::kHalves * 8; ++i) {
      const uint32_t address = base + (i >> 3) * 2 * kPanelBytes + swizzled(row, i & 7);
      uint32_t r[4];
      ptx::load_shared_16(r, address);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = ptx::unpack2<Element>(r[j]);
        r[j] = ptx::pack2<Element>(x.x * factor, x.y * factor);
      }
      ptx::store_shared_16(address, r);
    }
    ptx::fence_async_proxy();
  }

  // Rows past the sequence's end belong to the next one (or to nobody): zero, so that they do nothing.
  __device__ __forceinline__ void clear_tail(uint32_t tile, int valid) const {
    const uint32_t zero[4] = {0, 0, 0, 0};
    constexpr int kPanels = T::kHalves * 2 + T::kStateWgs;
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll 1
      for (int i = valid * 8 + (threadIdx.x & 127); i < kChunk * 8; i += 128) {
        ptx::store_shared_16(tile + panel * kPanelBytes + swizzled(i >> 3, i & 7), zero);
      }
    }
    ptx::fence_async_proxy();
  }

  __device__ __forceinline__ void run() {
    int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    {
      const GateMaker<T> gates{p, small, lane, warp};
      if (warp < small.work.num_chunks) {
        gates.fetch_gates(warp);
        gates.make_gates(warp);
      }
    }
    // Above the block diagonal nothing is written below.
    for (uint32_t i = threadIdx.x & 127; i < T::kProductStages * kPanelBytes / 16; i += 128) {
      const uint32_t zero[4] = {0, 0, 0, 0};
      ptx::store_shared_16(smem + T::kPOffset + 16 * i, zero);
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kAuxBarrier, 256);  // the first gates

    const bool l2norm = p.rule.qk_l2norm != 0;
    const int num_chunks = small.work.num_chunks;
    RingPosition<T::kInputStages> in;
    RingPosition<T::kProductStages> product;
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      // Opaque, so that the many addresses made of them are made anew: kept across chunks they do not fit the registers.
      asm volatile("" : "+r"(lane), "+r"(warp));
      const GateMaker<T> gates{p, small, lane, warp};
      const uint32_t kq = smem + in.stage * T::kInputBytes;
      ptx::mbarrier_wait(ptx::smem_address(&small.input_full[in.stage]), in.parity);  // by the copy engine
      const bool tail = small.work.has_foreign_rows(p.rule, chunk);
      if (tail) {
        clear_tail(kq, small.work.tokens_in(chunk));
        ptx::named_barrier_sync(kScoreBarrier, 128);
      }
      if (l2norm) normalize(kq, small.k_norm[product.stage], small.q_norm[product.stage]);
      if (tail || l2norm) ptx::named_barrier_sync(kAuxBarrier, 256);  // the inverse warpgroup may use the tile, too

      if ((chunk & 3) == 0 && chunk + 4 + warp < small.work.num_chunks) gates.fetch_gates(chunk + 4 + warp);
      float s[32];
      const uint64_t k_descriptor = ptx::wgmma_descriptor(kq, 16, 1024);
      const uint64_t q_descriptor = ptx::descriptor_advance(k_descriptor, kPanelBytes);
      ptx::wgmma_fence();
#pragma unroll
      for (int kb = 0; kb < T::kKeyDim / 16; ++kb) {
        const int offset = (kb >> 2) * 2 * kPanelBytes + (kb & 3) * 32;
        ptx::wgmma_m64n64_ss<Element>(s, ptx::descriptor_advance(q_descriptor, offset),
                                      ptx::descriptor_advance(k_descriptor, offset), kb > 0);
      }
      ptx::wgmma_commit();

      // Three tiles are on their way before the loop; the next slot is free when the state warpgroups have stored chunk - 2.
      if (chunk >= 2 && chunk + 1 < small.work.num_chunks && (threadIdx.x & 127) == 96) {
        const uint32_t slot = (chunk + 1) % T::kInputStages;
        ptx::mbarrier_wait(ptx::smem_address(&small.input_empty[slot]), ((chunk + 1) / T::kInputStages + 1) & 1);
        load_tiles(p, small.work, small, smem, chunk + 1);
      }
      __syncwarp();
      const float* k_norm = l2norm ? small.k_norm[product.stage] : nullptr;
      const float* q_norm = small.q_norm[product.stage];
      const float* gate = small.gate[chunk % kGateRing];
      const TileWeights<T> weights(gate, k_norm, small.column[4 + warp], small.below[4 + warp], lane, warp);
      float row_factor[2] = {p.rule.scale, p.rule.scale};
      if (l2norm) {
        row_factor[0] *= q_norm[16 * warp + (lane >> 2)];
        row_factor[1] *= q_norm[16 * warp + (lane >> 2) + 8];
      }
      if (chunk >= T::kProductStages) {
        ptx::mbarrier_wait(ptx::smem_address(&small.product_empty[product.stage]),
                           product.parity ^ 1);  // by the state warps
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(s);

      // stmatrix of two tiles: this lane's row of 16 and its piece of the two.
      const uint32_t scores = smem + T::kPOffset + product.stage * kPanelBytes + 2048 * warp;
      const uint32_t tile_row = 8 * ((lane >> 3) & 1) + (lane & 7), tile_piece = lane >> 4;
      {
        float d[8];
        weights.take_diagonal(d, s);
        weights.weigh_diagonal(d, 1, row_factor);
        ptx::stmatrix_x4(scores + swizzled(tile_row, 2 * warp + tile_piece), ptx::pack2<Mid>(d[0], d[1]),
                         ptx::pack2<Mid>(d[2], d[3]), ptx::pack2<Mid>(d[4], d[5]), ptx::pack2<Mid>(d[6], d[7]));
      }
#pragma unroll
      for (int j = 0; j < 6; j += 2) {
        if (j < 2 * warp) {
          uint32_t packed[4];
          weights.template pack_left<Mid>(packed, s + 4 * j, j, row_factor);
          ptx::stmatrix_x4(scores + swizzled(tile_row, j + tile_piece), packed[0], packed[1], packed[2], packed[3]);
        }
      }
      if (warp == 0) gates.write_factors(small.factors[product.stage], gate, small.k_norm[product.stage], q_norm);
      // Three chunks ahead: before the inverse warpgroup takes chunk + 3 up, it has seen the state warps leave this one.
      if ((chunk & 3) == 1 && chunk + 3 + warp < small.work.num_chunks) gates.make_gates(chunk + 3 + warp);
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&small.product_full[product.stage]));
      in.advance();
      product.advance();
    }
  }
};

}  // namespace gdn::cuda::sm90
