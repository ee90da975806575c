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
    ptx::fence_barrier_init();
    for (const CUtensorMap* map : {&p.q, &p.k, &p.v, &p.o}) ptx::tma_prefetch_descriptor(map);
  }

  const int64_t per_sequence = static_cast<int64_t>(rule.Hv) * p.v_splits;
  int64_t n = blockIdx.x / per_sequence;
  if (rule.cu_seqlens.data != nullptr && rule.N > 1 && rule.N <= kMaxSorted) {
    n = sorted_sequence<T>(rule, n, reinterpret_cast<int32_t*>(aligned), small);  // before any tile is there
  }
  // Kept in shared memory: registers are short in every role.
  Work& work = small.work;
  if (threadIdx.x == 0) {
    const int32_t rest = static_cast<int32_t>(blockIdx.x % per_sequence);
    work.head = rest / p.v_splits;
    work.key_head = rule.head_map == GDN_HEADS_TILED ? work.head % rule.Hk : work.head / (rule.Hv / rule.Hk);
    work.v_begin = (rest % p.v_splits) * 64 * T::kStateWgs;
    work.seq = sequence_info(rule, n);
    work.num_chunks = static_cast<int32_t>((work.seq.len + kChunk - 1) / kChunk);
    work.first_checkpoint = rule.checkpoint_every > 0 ? checkpoints_before(rule, n) : 0;
    if (!work.seq.is_null) {
      for (int i = 0; i < T::kKqStages && i < work.num_chunks; ++i) load_kq(p, small, smem, i);
      for (int i = 0; i < T::kVStages && i < work.num_chunks; ++i) {
        for (int wg = 0; wg < T::kStateWgs; ++wg) load_v(p, small, smem, wg, i);
      }
    }
  }
  __syncthreads();
  if (work.seq.is_null) {
    clear_output<T>(rule, work);
    return;
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
