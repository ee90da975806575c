// SPDX-License-Identifier: MIT
// Segments of split sequences: which one a CTA has, its window, and how its state is handed over (SegmentParams).
#pragma once
#include "cuda/common/sequence.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldst.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/chunk_forward/aux_role.cuh"
#include "cuda/sm90/chunk_forward/config.h"
#include "cuda/sm90/chunk_forward/gates.cuh"

namespace gdn::cuda::sm90 {

__device__ __forceinline__ int64_t segments_of(const RuleParams& rule, int32_t chunks_per_segment, int64_t n) {
  SequenceInfo seq;
  sequence_bounds(rule, n, &seq);
  const int64_t span = static_cast<int64_t>(chunks_per_segment) * kChunk;
  return seq.len > span ? (seq.len + span - 1) / span : 1;
}

// Sequence and segment number `index`; returns the sequence, or -1 past the last. By one warp.
__device__ __forceinline__ int64_t find_segment(const RuleParams& rule, int32_t chunks_per_segment, int64_t index,
                                                int32_t* segment, int32_t* num_segments) {
  const int lane = threadIdx.x & 31;
  if (rule.cu_seqlens.data == nullptr) {  // all alike
    const int64_t count = segments_of(rule, chunks_per_segment, 0);
    *num_segments = static_cast<int32_t>(count);
    *segment = static_cast<int32_t>(index % count);
    return index / count < rule.N ? index / count : -1;
  }
  for (int64_t first = 0; first < rule.N; first += 32) {
    const int64_t count = first + lane < rule.N ? segments_of(rule, chunks_per_segment, first + lane) : 0;
    int64_t until = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int64_t other = __shfl_up_sync(0xffffffffu, until, offset);
      if (lane >= offset) until += other;
    }
    const uint32_t after = __ballot_sync(0xffffffffu, index < until);
    if (after != 0) {
      const int owner = __ffs(after) - 1;
      *num_segments = static_cast<int32_t>(__shfl_sync(0xffffffffu, count, owner));
      *segment = static_cast<int32_t>(index - __shfl_sync(0xffffffffu, until - count, owner));
      return first + owner;
    }
    index -= __shfl_sync(0xffffffffu, until, 31);
  }
  return -1;
}

// Cuts the sequence down to its segment.
__device__ __forceinline__ void take_segment(Work* work) {
  const int32_t chunks = (work->len + kChunk - 1) / kChunk,
                each = (chunks + work->num_segments - 1) / work->num_segments;
  work->tokens_before = each * kChunk * work->segment;
  work->begin += work->tokens_before;
  work->len = min(work->len - work->tokens_before, each * kChunk);
  if (work->segment > 0) work->read_slot = -1;
  if (work->segment + 1 < work->num_segments) work->write_slot = -1;
}

// The fewest last chunks of the segment over which the gates decay by the threshold, or 0: there are none, or a key is so
// long that a step may grow the state (beta |k|^2 outside [0, 2]; docs/math.md). All threads; `sums` is shared memory for 64.
template <class T>
__device__ __forceinline__ int find_window(const KernelParams& p, const Work& work, float* sums) {
  if (p.segments.exact != 0 || p.rule.g.data == nullptr) return 0;
  const int thread = threadIdx.x, lane = thread & 31;
  const GateMaker<T> maker{p, work, nullptr, lane};
  constexpr int kBlock = 32;  // chunks at a time
  float before = 0.f;
  int window = 0;
  for (int end = work.end; end > 0 && window == 0; end -= kBlock) {
    const int64_t last = work.begin + static_cast<int64_t>(end) * kChunk;  // tokens are taken backwards
#pragma unroll
    for (int i = 0; i < kBlock * kChunk / T::kThreads; ++i) {
      const int back = i * T::kThreads + thread;
      const int64_t token = last - 1 - back;
      float decay = 0.f;
      if (token >= work.begin) decay = maker.token_log2_decay(token);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) decay += __shfl_xor_sync(0xffffffffu, decay, offset);
      if (lane == 0) sums[back / 32] = decay;
    }
    __syncthreads();
    float sum = sums[2 * lane] + sums[2 * lane + 1];  // of chunk end - 1 - lane
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += other;
    }
    const uint32_t enough = __ballot_sync(0xffffffffu, lane < end && before + sum <= -p.segments.threshold);
    if (enough != 0) window = work.end - end + __ffs(enough);
    before += __shfl_sync(0xffffffffu, sum, 31);
    __syncthreads();
  }
  if (window == 0) return 0;

  // Eight lanes per key.
  const RuleParams& rule = p.rule;
  bool grows = false;
  const int64_t first = work.begin + static_cast<int64_t>(work.end - window) * kChunk;
#pragma unroll 4
  for (int row = thread / 8; row < window * kChunk; row += T::kThreads / 8) {
    const int64_t token = first + row;
    float square = 1.f;
    if (!rule.qk_l2norm) {
      const char* k = static_cast<const char*>(rule.k.data) +
                      2 * (work.batch * rule.k.stride[0] + token * rule.k.stride[1] + work.key_head * rule.k.stride[2] +
                           (thread & 7) * (T::kKeyDim / 8));
      square = 0.f;
#pragma unroll
      for (int i = 0; i < T::kHalves; ++i) {
        const uint4 words = *reinterpret_cast<const uint4*>(k + 16 * i);
        for (uint32_t word : {words.x, words.y, words.z, words.w}) {
          const float2 two = ptx::unpack2<typename T::Element>(word);
          square += two.x * two.x;
          square += two.y * two.y;
        }
      }
#pragma unroll
      for (int offset = 1; offset < 8; offset *= 2) square += __shfl_xor_sync(0xffffffffu, square, offset);
    }
    const float gain = maker.token_beta(token) * square;
    grows |= !(gain >= 0.f && gain <= 2.02f);  // 1 % for the rounding of unit keys
  }
  return __syncthreads_or(grows) ? 0 : window;
}

__device__ __forceinline__ void count_segment(uint32_t* counters, const Work& work, int window) {
  if (work.is_transition) {
    if (window == 0) atomicAdd(counters + 3, 1u);
  } else if (work.v_begin == 0) {
    atomicAdd(counters + (window > 0 ? 0 : 2), 1u);
    if (window > 0) atomicAdd(counters + 1, static_cast<uint32_t>(window));
  }
}

// Without outputs: whether there is anything to make, and only of the window where there is one. All threads.
template <class T>
__device__ __forceinline__ bool take_window(const KernelParams& p, SmallShared<T>& small, float* scratch) {
  Work& work = small.works[0];
  if (work.segment + 1 >= work.num_segments || (work.is_transition && work.segment == 0)) return false;
  const int window = find_window<T>(p, work, scratch);
  if (threadIdx.x == 0 && p.segments.counters != nullptr) count_segment(p.segments.counters, work, window);
  if (window > 0 && work.is_transition) return false;
  __syncthreads();  // every thread has read what changes now
  if (threadIdx.x == 0) {
    if (work.v_begin == 0 && !work.is_transition) {
      p.segments.window[static_cast<int64_t>(work.segment_index) * p.rule.Hv + work.head] = window;
    }
    if (window > 0) {
      work.begin += (work.end - window) * kChunk;
      work.len = window * kChunk;
      work.read_slot = -1;
      work.end = window;
    }
  }
  __syncthreads();
  return true;
}

// State warpgroups, forward: X at the start of a segment, from what the launch before left.
template <class T>
struct SegmentState {
  static constexpr int kRegisters = 64;  // K is 128 wherever sequences are split

  const KernelParams& p;
  uint32_t smem;
  SmallShared<T>& small;
  int wg;

  __device__ __forceinline__ int64_t entry(int back) const {
    return static_cast<int64_t>(small.works[0].segment_index - back) * p.rule.Hv + small.works[0].head;
  }
  __device__ __forceinline__ float4* local(int back) const {
    return p.segments.local +
           (entry(back) * (p.rule.V / 64) + small.works[0].v_begin / 64 + wg) * (kLocalBytes / sizeof(float4)) +
           (threadIdx.x & 127);
  }
  __device__ __forceinline__ void load_local(int back, float (&x)[kRegisters]) const {
    const float4* source = local(back);
#pragma unroll
    for (int i = 0; i < kRegisters / 4; ++i) {
      const float4 four = source[128 * i];
      x[4 * i] = four.x;
      x[4 * i + 1] = four.y;
      x[4 * i + 2] = four.z;
      x[4 * i + 3] = four.w;
    }
  }

  // How many transitions lie between this segment's start and the nearest state known before it. By each warp for itself.
  __device__ __forceinline__ int count_folds() const {
    const int lane = threadIdx.x & 31, segment = small.works[0].segment;
    for (int first = 1; first < segment; first += 32) {
      const int back = first + lane;  // the end of the sequence's first segment is always known
      const bool known = back >= segment || p.segments.window[entry(back)] != 0;
      const uint32_t any = __ballot_sync(0xffffffffu, known);
      if (any != 0) return first + __ffs(any) - 2;
    }
    return segment - 1;
  }

  // M of `back` segments ago into one of the last two K/Q slots, which are not in use yet. By one thread.
  __device__ __forceinline__ void fetch_transition(int back, int buffer) const {
    const uint32_t full = ptx::smem_address(&small.fold_full[buffer]);
    ptx::mbarrier_expect_tx(full, kTransitionBytes);
    ptx::bulk_load(smem + (2 + buffer) * T::kKqBytes, p.segments.transition + entry(back) * kTransitionBytes,
                   kTransitionBytes, full);
  }

  // The power of two that brings a row of X to at most 2^13, and its inverse; 1 for rows next to 0.
  __device__ __forceinline__ static void row_scale(float largest, float* scale, float* inverse) {
    constexpr uint32_t kOne = 127u << 23, kTop = 12u << 23;
    const uint32_t exponent = __float_as_uint(largest) & 0x7f800000u;
    const bool tiny = exponent <= 2 * kTop;
    *scale = tiny ? 1.f : __uint_as_float(2 * kOne + kTop - exponent);
    *inverse = tiny ? 1.f : __uint_as_float(exponent - kTop);
  }

  // X = L at first, then X = X M^T + L, segment by segment. M and X, its rows scaled, in fp16 (2^-12 of them), fp32 sums:
  // a tenth of what a chunk rounds away.
  __device__ __forceinline__ void load(float (&x)[kRegisters]) const {
    ptx::wait_for_launch_before();
    const int folds = count_folds();
    load_local(folds + 1, x);
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2 && i < folds; ++i) fetch_transition(folds - i, i);
    }
#pragma unroll 1
    for (int done = 0; done < folds; ++done) {
      float largest[2] = {};
#pragma unroll
      for (int i = 0; i < kRegisters; ++i) largest[(i >> 1) & 1] = fmaxf(largest[(i >> 1) & 1], fabsf(x[i]));
      float scale[2], inverse[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 1));
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(0xffffffffu, largest[h], 2));
        row_scale(largest[h], &scale[h], &inverse[h]);
      }
      uint32_t xb[kRegisters / 2];
#pragma unroll
      for (int i = 0; i < kRegisters / 2; ++i) {
        xb[i] = ptx::pack2<__half>(x[2 * i] * scale[i & 1], x[2 * i + 1] * scale[i & 1]);
      }
      load_local(folds - done, x);  // while M moves what was there
      ptx::mbarrier_wait(ptx::smem_address(&small.fold_full[done & 1]), (done >> 1) & 1);  // by the copy engine
      const uint64_t transition = ptx::wgmma_descriptor(smem + (2 + (done & 1)) * T::kKqBytes, 16, 1024);
#pragma unroll
      for (int part = 0; part < 2; ++part) {  // 64 key columns at a time: registers
        float moved[32];
        ptx::wgmma_fence();
#pragma unroll
        for (int kb = 0; kb < 8; ++kb) {
          ptx::wgmma_m64n64_rs<__half>(
              moved, xb + 4 * kb,
              ptx::descriptor_advance(transition, (2 * (kb >> 2) + part) * kPanelBytes + (kb & 3) * 32), kb > 0);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_touch(moved);
#pragma unroll
        for (int i = 0; i < 32; ++i) x[32 * part + i] += moved[i] * inverse[(i >> 1) & 1];
      }
      ptx::named_barrier_sync(kStateBarrier0, 128 * T::kStateWgs);  // M may be overwritten
      if (threadIdx.x == 0 && done + 2 < folds) fetch_transition(folds - done - 2, done & 1);
    }
    if (threadIdx.x == 0) {  // M was, or could have been, where these tiles belong
      for (int i = 2; i < T::kKqStages && i < small.works[0].end; ++i) load_kq(p, small, small.works[0], smem, i);
    }
  }

  // The final state may be the initial one in place: the last segment stores it when the first one has read it. Never a
  // deadlock: the first segment's CTA comes earlier in the grid.
  __device__ __forceinline__ int32_t* started() const {
    return p.segments.started + entry(small.works[0].segment) * (p.rule.V / 64) + small.works[0].v_begin / 64 + wg;
  }
  __device__ __forceinline__ void announce_start() const {
    ptx::named_barrier_sync(kStateBarrier0 + wg, 128);
    if ((threadIdx.x & 127) == 0) ptx::store_release(started(), 1);
  }
  __device__ __forceinline__ void await_start() const {
    if ((threadIdx.x & 127) == 0) {
      while (ptx::load_acquire(started()) == 0) {
      }
    }
    ptx::named_barrier_sync(kStateBarrier0 + wg, 128);
  }

  __device__ __forceinline__ void store_local(const float (&x)[kRegisters]) const {
    float4* target = local(0);
#pragma unroll
    for (int i = 0; i < kRegisters / 4; ++i) {
      target[128 * i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
  }

  // X[c][k'] = M[k'][c]: rows k' of 128 columns, half `wg` of them from this warpgroup. By way of the K tiles, which nobody
  // needs any more once both warpgroups are here.
  __device__ __forceinline__ void store_transition(const float (&x)[kRegisters]) const {
    const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
    ptx::named_barrier_sync(kStateBarrier0, 128 * T::kStateWgs);
    const uint32_t tile = smem + wg * 2 * kPanelBytes;
    const uint32_t offset = swizzled(8 * (lane >> 4) + (lane & 7),
                                     2 * warp + ((lane >> 3) & 1));  // as StateRole's tiles, 16 rows at a time
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      ptx::stmatrix_x4_trans(tile + offset + 2048 * j, ptx::pack2<__half>(x[8 * j], x[8 * j + 1]),
                             ptx::pack2<__half>(x[8 * j + 2], x[8 * j + 3]),
                             ptx::pack2<__half>(x[8 * j + 4], x[8 * j + 5]),
                             ptx::pack2<__half>(x[8 * j + 6], x[8 * j + 7]));
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(kStateBarrier0 + wg, 128);
    if ((threadIdx.x & 127) == 0) {
      ptx::bulk_store(p.segments.transition + entry(0) * kTransitionBytes + wg * 2 * kPanelBytes, tile,
                      2 * kPanelBytes);
      ptx::tma_store_wait();
    }
  }
};

}  // namespace gdn::cuda::sm90
