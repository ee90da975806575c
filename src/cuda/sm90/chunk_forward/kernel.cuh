// SPDX-License-Identifier: MIT
// chunk_forward on Hopper: works of (sequence or segment, value head, 64 or 128 value channels), chunks of 64 tokens.
//
// Grid: sequences or segments x Hv x v_splits, a work each, longest sequences first (the hardware hands out blocks in order, which
// makes it the longest-first rule); or equal shares of all works, as many CTAs as multiprocessors (line.cuh). Block: kStateWgs state warpgroups and two auxiliary ones.
// | warpgroup         | registers | work                                                                              |
// | 0 .. kStateWgs-1  | 192       | X = S^T, 64 channels each: Y = X [K; Q]^T; R = V^T - Y_K e^G; U'^T = R T^T;        |
// |                   |           | X = e^G_last X + (U'^T e^(G_last - G)) K; O^T = scale e^G Y_Q + U'^T P^T; store O |
// | kStateWgs, and +1 | 64        | every second chunk each, up to two ahead: loads, gates, norms, tails, L, T, P      |
// Registers are those of two state warpgroups; with one: 216, 144.
// Per chunk and head (K = V = 128): 10.5 MFLOP on tensor cores, 48 KB in, 16 KB out.
#pragma once
#include "cuda/sm90/chunk_forward/aux_role.cuh"
#include "cuda/sm90/chunk_forward/line.cuh"
#include "cuda/sm90/chunk_forward/state_role.cuh"

namespace gdn::cuda::sm90 {

// The sequence of rank `rank` in falling order of length; ties by index. All threads.
template <class T>
__device__ __forceinline__ int64_t sorted_sequence(const RuleParams& rule, int64_t rank, int32_t* lengths,
                                                   SmallShared<T>& small) {
  const int count = static_cast<int>(rule.N);
  for (int i = threadIdx.x; i < count; i += T::kThreads) {
    SequenceInfo seq;
    sequence_bounds(rule, i, &seq);
    lengths[i] = static_cast<int32_t>(seq.len);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += T::kThreads) {
    const int32_t mine = lengths[i];
    int before = 0;
    for (int j = 0; j < count; ++j) before += lengths[j] > mine || (lengths[j] == mine && j < i);
    if (before == rank) small.sequence = i;
  }
  __syncthreads();
  return small.sequence;
}

// One work per CTA, in the order of the grid: a sequence or segment, a head and its value channels. All threads.
template <class T>
__device__ __forceinline__ void take_only_work(const KernelParams& p, SmallShared<T>& small, bool split,
                                               int32_t* scratch) {
  const RuleParams& rule = p.rule;
  const int32_t parts = p.v_splits + (T::kIsForward ? 0 : 1);
  const int64_t per_sequence = static_cast<int64_t>(rule.Hv) * parts;
  int64_t n = blockIdx.x / per_sequence;
  if (!split && p.longest_first && rule.cu_seqlens.data != nullptr && rule.N <= kMaxSorted) {
    n = sorted_sequence<T>(rule, n, scratch, small);
  }
  if (threadIdx.x >= 32) return;
  Work& work = small.works[0];
  const int32_t segment_index = static_cast<int32_t>(n);
  int32_t segment = 0, num_segments = 1;
  if (split) n = find_segment(rule, p.segments.chunks, n, &segment, &num_segments);
  const int64_t checkpoint = T::kIsForward && rule.checkpoint_every > 0 && n >= 0 ? checkpoint_begin(rule, n) : 0;
  if (threadIdx.x > 0) return;
  small.line.left = 0;  // no more works
  if (n < 0) {          // there is nothing to do
    work.segment = work.num_segments = 0;
    return;
  }
  take_sequence(rule, n, &work);
  take_head(p, static_cast<int32_t>(blockIdx.x % per_sequence), parts, T::kStateWgs, &work);
  work.segment = segment;
  work.num_segments = num_segments;
  work.segment_index = segment_index;
  work.first_checkpoint = static_cast<int32_t>(checkpoint);
  if (split) take_segment(&work);
  if (work.is_null) take_no_tokens(&work);
  work.origin = 0;
  work.end = (work.len + kChunk - 1) / kChunk;
  work.is_last = 1;
  work.hand_over = 0;
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) chunk_forward_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ uint8_t raw[];
  const uint32_t start = ptx::smem_address(raw);
  const uint32_t smem = (start + 1023) & ~1023u;  // the swizzle is anchored at multiples of 1024
  uint8_t* aligned = raw + (smem - start);
  SmallShared<T>& small = *reinterpret_cast<SmallShared<T>*>(aligned + T::kSmallOffset);
  const RuleParams& rule = p.rule;

  if (threadIdx.x == 0) {
    for (uint64_t& barrier : small.kq_full) ptx::mbarrier_init(ptx::smem_address(&barrier), 1);
    for (auto& barriers : small.v_full) {
      for (uint64_t& barrier : barriers) ptx::mbarrier_init(ptx::smem_address(&barrier), 1);
    }
    for (uint64_t& barrier : small.product_full) ptx::mbarrier_init(ptx::smem_address(&barrier), 4);
    for (uint64_t& barrier : small.product_empty) ptx::mbarrier_init(ptx::smem_address(&barrier), 4 * T::kStateWgs);
    for (uint64_t& barrier : small.fold_full) ptx::mbarrier_init(ptx::smem_address(&barrier), 1);
    ptx::fence_barrier_init();
    for (const CUtensorMap* map : {&p.q, &p.k, &p.v, &p.o}) ptx::tma_prefetch_descriptor(map);
  }

  int32_t* scratch = reinterpret_cast<int32_t*>(aligned + T::kHOffset);  // not a target of the copy engine
  const bool split = T::kKeyDim == 128 && (!T::kIsForward || p.segments.chunks > 0);
  if (T::kIsForward && p.line.ctas > 0) {
    if (!start_line<T>(p, small, scratch)) return;
  } else {
    take_only_work<T>(p, small, split, scratch);
  }
  __syncthreads();
  Work& work = small.works[0];
  if constexpr (!T::kIsForward) {
    if (threadIdx.x == 0 && work.num_segments > 1 && work.segment == 0 && work.v_begin == 0) {
      for (int i = 0; i < rule.V / 64; ++i) {
        ptx::store_release(
            p.segments.started + (static_cast<int64_t>(work.segment_index) * rule.Hv + work.head) * (rule.V / 64) + i,
            0);
      }
      __threadfence();  // before the forward launch can see anything of this one
    }
    __syncthreads();
    // The forward launch may take the multiprocessors that this one leaves; it waits for the results itself.
    ptx::allow_next_launch();
    if (work.num_segments == 0 || work.is_null) return;
    if (!take_window<T>(p, small, reinterpret_cast<float*>(scratch))) return;
  } else {
    if (work.num_segments == 0) return;
    if (work.is_null && p.line.ctas == 0) {
      clear_output<T>(rule, work, threadIdx.x, T::kThreads);
      return;
    }
  }
  const int warpgroup = threadIdx.x >> 7;
  if (warpgroup < T::kStateWgs) {
    ptx::registers_increase<T::kStateRegisters>();
    StateRole<T>{p, smem, small, warpgroup}.run();
  } else {
    ptx::registers_decrease<T::kAuxRegisters>();
    AuxRole<T>{p, small, warpgroup - T::kStateWgs}.run();
  }
}

}  // namespace gdn::cuda::sm90
