// SPDX-License-Identifier: MIT
// Auxiliary warpgroup: everything of a chunk that does not need the state, for every second chunk, up to two chunks ahead of the
// state warpgroups: L = strict_lower(diag(beta) K K^T * Gamma), T = (I + L)^-1 diag(beta), P = tril(Q K^T) * Gamma * scale, gates,
// L2 norms, tails, the loads of K and Q.
#pragma once
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/chunk_forward/gates.cuh"
#include "cuda/sm90/chunk_forward/inverse.cuh"
#include "cuda/sm90/chunk_forward/line.cuh"
#include "cuda/sm90/chunk_forward/wide_inverse.cuh"

namespace gdn::cuda::sm90 {

// The K and Q tiles of a chunk into their slot; without outputs K and V. By one thread.
template <class T>
__device__ __forceinline__ void load_kq(const KernelParams& p, SmallShared<T>& small, const Work& work, uint32_t smem,
                                        int chunk) {
  const uint32_t stage = chunk % T::kKqStages;
  const uint32_t full = ptx::smem_address(&small.kq_full[stage]), tile = smem + stage * T::kKqBytes;
  if (!work.has_tiles()) {
    ptx::mbarrier_arrive(full);
    return;
  }
  const int32_t token = work.first_token(chunk), batch = work.batch, head = work.key_head;
  const bool with_v = !T::kIsForward && work.is_transition == 0;
  ptx::mbarrier_expect_tx(full, T::kKqBytes + (with_v ? T::kVBytes : 0));
#pragma unroll
  for (int half = 0; half < T::kHalves; ++half) {
    ptx::tma_load(tile + half * T::kHalfBytes, &p.k, full, 64 * half, head, token, batch);
    if constexpr (T::kIsForward) {
      ptx::tma_load(tile + half * T::kHalfBytes + kPanelBytes, &p.q, full, 64 * half, head, token, batch);
    }
  }
  if (with_v) {
#pragma unroll
    for (int wg = 0; wg < T::kStateWgs; ++wg) {
      ptx::tma_load(smem + T::kVOffset + stage * T::kVBytes + wg * kPanelBytes, &p.v, full, work.v_begin + 64 * wg,
                    work.head, token, batch);
    }
  }
}

template <class T>
struct AuxRole {
  using Element = typename T::Element;
  using Mid = typename T::Mid;
  // A chunk whose keys have a larger beta |k|^2 or |k|^2 takes the wide inverse.
  static constexpr float kMaxGain = 2.05f, kMaxSquare = 4096.f;

  const KernelParams& p;
  SmallShared<T>& small;
  int own;  // auxiliary warpgroup
  int lane = threadIdx.x & 31;
  int warp = (threadIdx.x >> 5) & 3;
  int chunk = own;
  int slot = 0;  // of the work that the chunk belongs to

  // Opaque from phase to phase, so that the many addresses made of these are made anew: kept, they do not fit the registers.
  __device__ __forceinline__ void renew() {
    asm volatile("" : "+r"(lane), "+r"(warp), "+r"(own), "+r"(chunk), "+r"(slot));
  }
  // Of all tiles; from `small`, so that it is one address less to keep.
  __device__ __forceinline__ uint32_t base() const { return ptx::smem_address(&small) - T::kSmallOffset; }
  // Of this warpgroup's chunks; made anew where it is needed, like much else: registers.
  __device__ __forceinline__ uint32_t parity() const { return (chunk >> 1) & 1; }
  __device__ __forceinline__ uint32_t thread() const { return 32 * warp + lane; }
  __device__ __forceinline__ AuxShared& aux() const { return small.aux[own]; }
  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(kAuxBarrier0 + own, 128); }
  // This warp's [16][kDiagonalStride] behind sH. Reckoned from `small`: one pointer less to keep.
  __device__ __forceinline__ float* diagonal() const {
    return reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(&small) - T::kSmallOffset + T::kHOffset + kPanelBytes +
                                    own * T::kInverseBytes) +
           16 * kDiagonalStride * warp;
  }
  __device__ __forceinline__ uint32_t tile_of(int offset) const { return base() + offset + own * kPanelBytes; }
  // Without outputs there is one work only.
  __device__ __forceinline__ const Work& work(int of_slot) const { return small.works[T::kIsForward ? of_slot : 0]; }
  // Moves on to the work that a chunk belongs to. False: there is none.
  __device__ __forceinline__ bool seek(int& at, int of_chunk) const {
    if constexpr (T::kIsForward) {
#pragma unroll 1
      while (of_chunk >= work(at).end) {
        if (work(at).is_last) return false;
        at = next_work(at);
      }
      return true;
    } else {
      return of_chunk < work(0).end;
    }
  }
  // The gates' inputs lie where the diagonal block does at other times.
  __device__ __forceinline__ GateMaker<T> gate_maker(int of_slot) const {
    return {p, work(of_slot), reinterpret_cast<uint32_t*>(diagonal()), lane};
  }

  __device__ __forceinline__ void clear(uint32_t tile) const {
    const uint32_t zero[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (uint32_t i = thread(); i < kPanelBytes / 16; i += 128) ptx::store_shared_16(tile + 16 * i, zero);
  }

  // Rows past the sequence's end belong to the next one (or to nobody): zero, so that they do nothing.
  __device__ __forceinline__ void clear_tail(uint32_t kq, int valid) const {
    const uint32_t zero[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int panel = 0; panel < T::kKqBytes / kPanelBytes; ++panel) {
#pragma unroll 1
      for (int i = valid * 8 + static_cast<int>(thread()); i < kChunk * 8; i += 128) {
        ptx::store_shared_16(kq + panel * kPanelBytes + swizzled(i >> 3, i & 7), zero);
      }
    }
    ptx::fence_async_proxy();
  }

  // One thread per row of K (64) and Q (64): reciprocal norms, or the rows themselves normalised and rounded (round_qk).
  __device__ __forceinline__ void normalize(uint32_t kq, const float* gate) const {
    const uint32_t row = thread() & 63;
    if (!T::kIsForward && thread() >= 64) return;  // no Q
    const uint32_t tile = kq + (thread() >> 6) * kPanelBytes;
    float sum = 0.f;
#pragma unroll 2
    for (int i = 0; i < T::kHalves * 8; ++i) {
      uint32_t r[4];
      ptx::load_shared_16(r, tile + (i >> 3) * T::kHalfBytes + swizzled(row, i & 7));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = ptx::unpack2<Element>(r[j]);
        sum += x.x * x.x;
        sum += x.y * x.y;
      }
    }
    const float factor = rsqrtf(sum + p.rule.l2norm_eps), norm = p.rule.round_qk ? 1.f : factor;
    if (thread() < 64) {
      aux().k_norm[row] = norm;
      aux().column[row] = gate[row] - __log2f(norm);  // the columns' norms ride on their gates
    } else {
      aux().q_norm[row] = norm;
    }
    if (!p.rule.round_qk) return;
#pragma unroll 1
    for (int i = 0; i < T::kHalves * 8; ++i) {
      const uint32_t address = tile + (i >> 3) * T::kHalfBytes + swizzled(row, i & 7);
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

  // The weighed K K^T: its diagonal blocks, inverted, and what is left of them into sH. Whether this thread saw long keys.
  __device__ __forceinline__ bool make_lower(const float (&l)[32], const TileWeights& weights, const float* beta,
                                             bool l2norm, const BlockInverse& blocks) const {
    const int group = lane >> 2, t2 = 2 * (lane & 3), row = 16 * warp + group;  // and row + 8
    const float* k_norm = aux().k_norm;
    float row_factor[2] = {beta[row], beta[row + 8]};
    if (l2norm) {
      row_factor[0] *= k_norm[row];
      row_factor[1] *= k_norm[row + 8];
    }
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
    store_left<__half>(blocks.sH, l, weights, row_factor);
    __syncwarp();
    blocks.invert_diagonal_block();
    return wide;
  }

  // The tiles left of the diagonal blocks, weighed.
  template <class Packed>
  __device__ __forceinline__ void store_left(uint32_t target, const float (&tiles)[32], const TileWeights& weights,
                                             const float (&row_factor)[2]) const {
    // stmatrix of two tiles: this lane's row of 16 and its piece of the two.
    const uint32_t tile_row = 8 * ((lane >> 3) & 1) + (lane & 7), tile_piece = lane >> 4;
#pragma unroll
    for (int j = 0; j < 6; j += 2) {
      if (j < 2 * warp) {
        uint32_t packed[4];
        weights.template pack_left<Packed>(packed, tiles + 4 * j, j, row_factor);
        ptx::stmatrix_x4(target + 2048 * warp + swizzled(tile_row, j + tile_piece), packed[0], packed[1], packed[2],
                         packed[3]);
      }
    }
  }

  // P of the chunk.
  __device__ __forceinline__ void store_scores(uint32_t scores, const float (&s)[32], const TileWeights& weights,
                                               bool l2norm) const {
    float row_factor[2] = {p.rule.scale, p.rule.scale};
    if (l2norm) {
      row_factor[0] *= aux().q_norm[16 * warp + (lane >> 2)];
      row_factor[1] *= aux().q_norm[16 * warp + (lane >> 2) + 8];
    }
    const uint32_t tile_row = 8 * ((lane >> 3) & 1) + (lane & 7), tile_piece = lane >> 4;
    float d[8];
    weights.take_diagonal(d, s);
    weights.weigh_diagonal(d, 1, row_factor);
    ptx::stmatrix_x4(scores + 2048 * warp + swizzled(tile_row, 2 * warp + tile_piece), ptx::pack2<Mid>(d[0], d[1]),
                     ptx::pack2<Mid>(d[2], d[3]), ptx::pack2<Mid>(d[4], d[5]), ptx::pack2<Mid>(d[6], d[7]));
    store_left<Mid>(scores, s, weights, row_factor);
  }

  __device__ __forceinline__ void run() {
    if (seek(slot, own)) {
      // The first tile of each only: at its start every CTA wants its state as well.
      if (warp == 1 && lane == 0) load_kq<T>(p, small, work(slot), base(), own);
      if (warp == 3) gate_maker(slot).fetch_gates(own);
    }
    clear(tile_of(T::kTOffset));  // above the block diagonal nothing is written below
    clear(tile_of(T::kPOffset));
    ptx::fence_async_proxy();
    if (warp == 3 && seek(slot, own)) gate_maker(slot).make_gates(own, aux().gate[0], aux().beta[0]);
    sync();

#pragma unroll 1
    for (; seek(slot, chunk); chunk += kAuxWgs) {
      renew();
      const bool l2norm = p.rule.qk_l2norm != 0;
      receive(l2norm);
      renew();
      bool wide = lower(l2norm);
      renew();
      wide = ptx::named_barrier_any(kAuxBarrier0 + own, 128, wide);  // also: L and D are there
      // The state warpgroups have left chunk - 2: its T, P, factors, and K and Q, whose slot the next chunk's take.
      if (chunk >= kAuxWgs) ptx::mbarrier_wait(ptx::smem_address(&small.product_empty[own]), parity() ^ 1);
      if (wide) {
        invert_wide(l2norm);
        renew();
      }
      scores(l2norm);
      renew();
      if (!wide) {
        BlockInverse{inverse_of(), diagonal(), lane, warp}.template invert_block_column<Mid>(tile_of(T::kTOffset),
                                                                                             aux().beta[parity()]);
      }
      ptx::fence_async_proxy();
      __syncwarp();
      renew();
      if (lane == 0) ptx::mbarrier_arrive(ptx::smem_address(&small.product_full[own]));
      if (int next = slot; warp == 3 && seek(next, chunk + kAuxWgs)) {
        gate_maker(next).make_gates(chunk + kAuxWgs, aux().gate[parity() ^ 1], aux().beta[parity() ^ 1]);
      }
    }
  }

  __device__ __forceinline__ uint32_t inverse_of() const { return base() + T::kHOffset + own * T::kInverseBytes; }
  __device__ __forceinline__ uint32_t kq_of() const { return base() + chunk % T::kKqStages * T::kKqBytes; }

  // The chunk's K and Q are there, without foreign rows, and their norms.
  __device__ __forceinline__ void receive(bool l2norm) const {
    ptx::mbarrier_wait(ptx::smem_address(&small.kq_full[chunk % T::kKqStages]),
                       (chunk / T::kKqStages) & 1);  // by the copy engine
    const bool tail = chunk + 1 == work(slot).end && work(slot).has_foreign_rows(p.rule, chunk);
    if (tail || l2norm) {
      if (tail) clear_tail(kq_of(), work(slot).tokens_in(chunk));
      sync();  // the gates and the cleared rows are there
      if (l2norm) normalize(kq_of(), aux().gate[parity()]);
      sync();
    }
  }

  // L. Whether this thread saw long keys.
  __device__ __forceinline__ bool lower(bool l2norm) {
    float l[32];
    const uint64_t descriptor = ptx::wgmma_descriptor(kq_of(), 16, 1024);
    ptx::wgmma_fence();
#pragma unroll
    for (int kb = 0; kb < T::kKeyDim / 16; ++kb) {
      const uint64_t k = ptx::descriptor_advance(descriptor, (kb >> 2) * T::kHalfBytes + (kb & 3) * 32);
      ptx::wgmma_m64n64_ss<Element>(l, k, k, kb > 0);
    }
    ptx::wgmma_commit();
    sync();  // while it runs: every warp is done with the chunk before; the gates are there
    TileWeights(aux(), parity(), l2norm, lane, warp).write_below(aux().below[warp]);
    ptx::wgmma_wait<0>();
    ptx::wgmma_touch(l);
    renew();
    const TileWeights weights(aux(), parity(), l2norm, lane, warp);
    return make_lower(l, weights, aux().beta[parity()], l2norm, BlockInverse{inverse_of(), diagonal(), lane, warp});
  }

  __device__ __forceinline__ void invert_wide(bool l2norm) const {
    WideInverse<T>{aux().gate[parity()],
                   aux().beta[parity()],
                   l2norm ? aux().column : aux().gate[parity()],
                   l2norm ? aux().k_norm : nullptr,
                   kq_of(),
                   inverse_of(),
                   tile_of(T::kPOffset),
                   tile_of(T::kTOffset),
                   kAuxBarrier0 + own,
                   lane,
                   warp}
        .run();
    sync();
    clear(tile_of(T::kPOffset));
    sync();
  }

  // P; the factors; what the chunk after next needs.
  __device__ __forceinline__ void scores(bool l2norm) {
    if constexpr (T::kIsForward) {
      float s[32];
      const uint64_t descriptor = ptx::wgmma_descriptor(kq_of(), 16, 1024);
      ptx::wgmma_fence();
#pragma unroll
      for (int kb = 0; kb < T::kKeyDim / 16; ++kb) {
        const uint64_t k = ptx::descriptor_advance(descriptor, (kb >> 2) * T::kHalfBytes + (kb & 3) * 32);
        ptx::wgmma_m64n64_ss<Element>(s, ptx::descriptor_advance(k, kPanelBytes), k, kb > 0);
      }
      ptx::wgmma_commit();
      prepare();
      ptx::wgmma_wait<0>();
      ptx::wgmma_touch(s);
      renew();
      const TileWeights weights(aux(), parity(), l2norm, lane, warp);
      store_scores(tile_of(T::kPOffset), s, weights, l2norm);
    } else {
      prepare();
    }
  }
  __device__ __forceinline__ void prepare() const {
    if (warp == 0) {
      gate_maker(slot).write_factors(aux().factors, aux().gate[parity()], aux().k_norm, aux().q_norm);
    } else if (warp == 3) {
      if (int next = slot; seek(next, chunk + kAuxWgs)) gate_maker(next).fetch_gates(chunk + kAuxWgs);
    } else if (warp == 2) {
      if (T::kIsForward && own == 0) {
        if (small.line.left > 0) refill_works(p, small, chunk, lane);
        // A work begins within the next two chunks.
        if (lane == 0 && chunk + kAuxWgs >= work(slot).end && work(slot).is_last == 0) {
          prefetch_state<T>(p.rule.initial_state, work(next_work(slot)));
        }
      }
    } else if (lane == 0) {
      // Behind a segment's start M takes the place of the third and fourth tile first (SegmentState::load).
      const bool in_use = T::kIsForward && work(slot).segment > 0 && chunk < kAuxWgs;
      int next = slot;
      if (!in_use && seek(next, chunk + kAuxWgs)) load_kq<T>(p, small, work(next), base(), chunk + kAuxWgs);
    }
    __syncwarp();
  }
};

}  // namespace gdn::cuda::sm90
