// SPDX-License-Identifier: MIT
// chunk_forward on Hopper: one CTA per (sequence, value head, 64 or 128 value channels), chunks of 64 tokens.
//
// Grid: sequences x Hv x v_splits, longest sequences first (the hardware hands out blocks in order, which makes it the
// longest-first rule). Block: kStateWgs state warpgroups and two auxiliary ones.
// | warpgroup         | registers | work                                                                              |
// | 0 .. kStateWgs-1  | 192       | X = S^T, 64 channels each: Y = X [K; Q]^T; R = V^T - Y_K e^G; U'^T = R T^T;        |
// |                   |           | X = e^G_last X + (U'^T e^(G_last - G)) K; O^T = scale e^G Y_Q + U'^T P^T; store O |
// | kStateWgs, and +1 | 64        | every second chunk each, up to two ahead: loads, gates, norms, tails, L, T, P      |
// Registers are those of two state warpgroups; with one: 216, 144.
// Per chunk and head (K = V = 128): 10.5 MFLOP on tensor cores, 48 KB in, 16 KB out.
#pragma once
#include "cuda/sm90/chunk_forward/aux_role.cuh"
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

// Everything of `work` but its place among the segments and checkpoints. n < 0: there is nothing to do.
template <class T>
__device__ __forceinline__ void fill_work(const KernelParams& p, int64_t n, int32_t rest, int32_t parts, Work* work) {
  const RuleParams& rule = p.rule;
  if (n < 0) {
    work->num_segments = 0;
    return;
  }
  work->head = rest / parts;
  work->key_head = rule.head_map == GDN_HEADS_TILED ? work->head % rule.Hk : work->head / (rule.Hv / rule.Hk);
  work->is_transition = rest % parts == p.v_splits;
  work->v_begin = work->is_transition ? 0 : (rest % parts) * 64 * T::kStateWgs;
  work->seq = sequence_info(rule, n);
  take_segment(work);
  work->num_chunks = static_cast<int32_t>((work->seq.len + kChunk - 1) / kChunk);
}

template <class T>
__device__ __forceinline__ void clear_output(const RuleParams& rule, const Work& work) {
  const TensorRef& o = rule.o;
  char* base = static_cast<char*>(o.data) + 2 * (work.seq.batch * o.stride[0] + work.seq.begin * o.stride[1] +
                                                 work.head * o.stride[2] + work.v_begin);
  constexpr int kPieces = T::kStateWgs * 8;
  for (int64_t i = threadIdx.x; i < work.seq.len * kPieces; i += T::kThreads) {
    *reinterpret_cast<uint4*>(base + (i / kPieces) * 2 * o.stride[1] + (i % kPieces) * 16) = make_uint4(0, 0, 0, 0);
  }
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

  // Kept in shared memory: registers are short in every role.
  Work& work = small.work;
  float* scratch = reinterpret_cast<float*>(aligned + T::kHOffset);  // not a target of the copy engine
  const bool split = T::kKeyDim == 128 && (!T::kIsForward || p.segments.chunks > 0);
  const int32_t parts = p.v_splits + (T::kIsForward ? 0 : 1);
  const int64_t per_sequence = static_cast<int64_t>(rule.Hv) * parts;
  int64_t n = blockIdx.x / per_sequence;
  if (!split && p.longest_first && rule.cu_seqlens.data != nullptr && rule.N <= kMaxSorted) {
    n = sorted_sequence<T>(rule, n, reinterpret_cast<int32_t*>(scratch), small);
  }
  if (threadIdx.x < 32) {
    const int32_t segment_index = static_cast<int32_t>(n);
    if (split) n = find_segment(rule, p.segments.chunks, n, &work);
    const int64_t checkpoint = T::kIsForward && rule.checkpoint_every > 0 && n >= 0 ? checkpoint_begin(rule, n) : 0;
    if (threadIdx.x == 0) {
      if (!split) {
        work.segment = 0;
        work.num_segments = 1;
      }
      work.segment_index = segment_index;
      work.first_checkpoint = checkpoint;
      fill_work<T>(p, n, static_cast<int32_t>(blockIdx.x % per_sequence), parts, &work);
    }
  }
  __syncthreads();
  if constexpr (!T::kIsForward) {
    if (threadIdx.x == 0 && work.num_segments > 1 && work.segment == 0 && work.v_begin == 0) {
      for (int i = 0; i < rule.V / 64; ++i) {
        ptx::store_release(
            p.segments.started + (static_cast<int64_t>(work.segment_index) * rule.Hv + work.head) * (rule.V / 64) + i,
            0);
      }
    }
    __syncthreads();
    // The forward launch may take the multiprocessors that this one leaves; it waits for the results itself.
    ptx::allow_next_launch();
  }
  if (work.num_segments == 0) return;
  if (work.seq.is_null) {
    if constexpr (T::kIsForward) clear_output<T>(rule, work);
    return;
  }
  if constexpr (!T::kIsForward) {
    if (work.segment + 1 == work.num_segments || (work.is_transition && work.segment == 0)) return;
    const int window = find_window<T>(p, work, scratch);
    if (window > 0 && work.is_transition) return;
    __syncthreads();  // every thread has read what changes now
    if (threadIdx.x == 0) {
      if (work.v_begin == 0 && !work.is_transition) {
        p.segments.window[static_cast<int64_t>(work.segment_index) * rule.Hv + work.head] = window;
      }
      if (window > 0) {
        work.seq.begin += static_cast<int64_t>(work.num_chunks - window) * kChunk;
        work.seq.len = static_cast<int64_t>(window) * kChunk;
        work.seq.read_slot = -1;
        work.num_chunks = window;
      }
    }
    __syncthreads();
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
