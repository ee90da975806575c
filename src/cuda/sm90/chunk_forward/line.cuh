// SPDX-License-Identifier: MIT
// More sequences and heads than multiprocessors: McNaughton's wrap-around rule. All (sequence, head, value channels) lie one after
// another in a line of chunks that is cut into equal shares, one per CTA. Where a cut falls inside one, its LAST chunks are the end
// of the share before the cut and its FIRST chunks the beginning of the share behind it: the latter begin at once and hand their
// state over long before the former, at the end of their share, need it. No share is shorter than the longest sequence, so nothing
// is cut twice, and a sequence's parts never overlap in time. Results do not depend on the cuts: the state goes on in fp32.
//
// The value heads of a key head, and their channels, go side by side through the same tokens, each in a CTA of its own
// (LineParams::together of them): K and Q come from memory once. What the line consists of then are such groups.
//
// Shares are weighed: a work costs some chunks more, for its states. CTA 0 takes the line's last share, so that a CTA waits only for
// one that comes earlier in the grid: no deadlock, however few are resident at a time.
//
// Shared memory holds a ring of a CTA's works. More of them wait in global memory, from where a warp of auxiliary warpgroup 0
// refills the ring (in its iteration of chunk c, every second one). Everybody who reads one is ordered behind that by barriers it waits
// for anyway: at chunk c and c + 1 the state warpgroups have waited for chunk c's products and look at c + 2 at most; auxiliary
// warpgroup 1 at c + 1, looking at c + 3, has waited for the state warpgroups to be through with c - 1, thus for the products of
// c - 2. So at c works up to c + 5 must be there. Those of c - 3 on are still read: nine chunks.
#pragma once
#include "cuda/common/rule_math.cuh"
#include "cuda/common/sequence.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/ldst.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/chunk_forward/config.h"
#include "cuda/sm90/chunk_forward/schedule.h"

namespace gdn::cuda::sm90 {

// Sequence n without its place in the line.
__device__ __forceinline__ void take_sequence(const RuleParams& rule, int64_t n, Work* work) {
  const SequenceInfo seq = sequence_info(rule, n);
  work->batch = static_cast<int32_t>(seq.batch);
  work->begin = static_cast<int32_t>(seq.begin);
  work->len = static_cast<int32_t>(seq.len);
  work->read_slot = static_cast<int32_t>(seq.read_slot);
  work->write_slot = static_cast<int32_t>(seq.write_slot);
  work->is_null = seq.is_null;
  work->tokens_before = 0;
  work->segment = 0;
  work->num_segments = 1;
}
__device__ __forceinline__ void take_no_tokens(Work* work) {
  work->tokens_before = work->len;
  work->len = 0;
}

// Head and value channels (64 * wgs): number `rest` of a sequence's, `parts` of them per head.
__device__ __forceinline__ void take_head(const KernelParams& p, int32_t rest, int32_t parts, int32_t wgs, Work* work) {
  work->head = rest / parts;
  work->key_head = key_head_of(p.rule, work->head);
  work->is_transition = rest % parts == p.v_splits;
  work->v_begin = work->is_transition ? 0 : (rest % parts) * 64 * wgs;
}

// Where its initial state lies, in kStateUnit bytes behind initial_state.data, if it can be fetched in one piece; else -1.
inline constexpr int kStateUnit = 256;
__device__ __forceinline__ int32_t state_offset(const TensorRef& state, int32_t wgs, const Work& work) {
  const bool dense = state.dtype == GDN_F32 && state.stride[2] * state.stride[3] == 64 * wgs &&
                     reinterpret_cast<uintptr_t>(state.data) % 16 == 0;  // of the prefetch
  if (!dense || work.read_slot < 0 || (work.hand_over & kTakesOver) != 0) return -1;
  const int64_t at = 4 * (work.read_slot * state.stride[0] + work.head * state.stride[1]);
  return at % kStateUnit == 0 && at / kStateUnit <= INT32_MAX ? static_cast<int32_t>(at / kStateUnit) : -1;
}

// Sums of the values of the CTA's threads before this one; *all: of all. `scratch` is shared memory for 32.
template <int kThreads>
__device__ __forceinline__ int32_t sum_before(int32_t value, int32_t* scratch, int32_t* all) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int32_t until = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, until, offset);
    if (lane >= offset) until += other;
  }
  if (lane == 31) scratch[warp] = until;
  __syncthreads();
  int32_t before = until - value, sum = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    const int32_t of_warp = scratch[w];
    if (w < warp) before += of_warp;
    sum += of_warp;
  }
  *all = sum;
  return before;
}

// This CTA's works. False: there are none. All threads; `scratch` is shared memory for 4 x 32 + 4 integers. The host sees to it
// that nothing here exceeds 2^31.
template <class T>
__device__ __forceinline__ bool start_line(const KernelParams& p, SmallShared<T>& small, int32_t* scratch) {
  const RuleParams& rule = p.rule;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int32_t together = p.line.together, shares = p.line.ctas / together, parts = rule.Hv * p.v_splits / together;
  const int32_t cta = p.line.ctas - 1 - static_cast<int32_t>(blockIdx.x), number = cta / together,
                member = cta % together;

  // Every thread takes some sequences in a row. One without tokens is a chunk without tiles.
  const int32_t sequences = static_cast<int32_t>(rule.N), each = (sequences + T::kThreads - 1) / T::kThreads;
  const int32_t first = min(thread * each, sequences), behind = min(first + each, sequences);
  const int32_t every = static_cast<int32_t>(rule.checkpoint_every);
  int32_t chunks = 0, entries = 0, longest = 0, shortest = INT32_MAX;  // entries: of checkpoints
  for (int32_t n = first; n < behind; ++n) {
    SequenceInfo seq;
    sequence_bounds(rule, n, &seq);
    const int32_t len = static_cast<int32_t>(seq.len), count = max(1, (len + kChunk - 1) / kChunk);
    chunks += count;
    longest = max(longest, count);
    shortest = min(shortest, count);
    if (every > 0) entries += len / every;
  }
  longest = __reduce_max_sync(0xffffffffu, longest);
  shortest = __reduce_min_sync(0xffffffffu, shortest);
  if (lane == 0) {
    scratch[64 + warp] = longest;
    scratch[96 + warp] = shortest;
  }
  int32_t all, all_entries;
  int32_t before = sum_before<T::kThreads>(chunks, scratch, &all);
  int32_t entry = every > 0 ? sum_before<T::kThreads>(entries, scratch + 32, &all_entries) : 0;
#pragma unroll
  for (int w = 0; w < T::kThreads / 32; ++w) {
    longest = max(longest, scratch[64 + w]);
    shortest = min(shortest, scratch[96 + w]);
  }

  // In the line a work counts its chunks and kWorkChunks.
  const int32_t total = (all + kWorkChunks * sequences) * parts;
  int32_t share = max(longest + kWorkChunks, (total + shares - 1) / shares);
  if (longest == shortest) {
    const int32_t whole = (sequences * parts + shares - 1) / shares * (longest + kWorkChunks);
    if (whole <= share + kSlackChunks) share = whole;
  }
  // Where this share and the next begin, in chunks, and the first work's place in the line.
  int32_t* const cuts = scratch + 128;
  if (thread < 2 && (number + thread) * share >= total) cuts[thread] = all * parts;
  int32_t at = before;
  for (int32_t n = first; n < behind; ++n) {
    SequenceInfo seq;
    sequence_bounds(rule, n, &seq);
    const int32_t count = max(1, (static_cast<int32_t>(seq.len) + kChunk - 1) / kChunk), length = count + kWorkChunks;
    const int32_t begin = (at + kWorkChunks * n) * parts;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t inside = (number + i) * share - begin;
      if (inside < 0 || inside >= parts * length) continue;
      int32_t earlier = inside % length - kWorkChunks;  // chunks before the cut
      if (earlier < kLeastPart) {
        earlier = 0;
      } else if (count - earlier < kLeastPart) {
        earlier = count;
      }
      cuts[i] = at * parts + inside / length * count + earlier;
      if (i == 0) cuts[2] = n * parts + inside / length + (earlier == count ? 1 : 0);
    }
    at += count;
  }
  __syncthreads();
  const int32_t from = cuts[0], to = cuts[1], first_place = cuts[2];
  if (from == to) return false;

  const int32_t list = member * (sequences * parts + shares) + number;
  for (int32_t n = first; n < behind && before * parts < to; ++n) {
    Work work;
    take_sequence(rule, n, &work);
    const int32_t count = max(1, (work.len + kChunk - 1) / kChunk);
    work.first_checkpoint = entry;
    if (every > 0) entry += work.len / every;
    if (work.is_null) take_no_tokens(&work);
    const int32_t line = before * parts;
    before += count;
    if (before * parts <= from) continue;
    int32_t part = line >= from ? 0 : (from - line) / count;
    int32_t begin = line + part * count;
#pragma unroll 1
    for (; part < parts && begin < to; ++part, begin += count) {
      const int32_t here_begin = max(begin, from), here_end = min(begin + count, to);
      work.hand_over = begin < from ? kHandsOver : here_end < begin + count ? kTakesOver : 0;
      work.origin = here_begin - from - (begin < from ? 0 : count - (here_end - here_begin));
      work.end = here_end - from;
      work.is_last = here_end == to;
      take_head(p, part * together + member, p.v_splits, T::kStateWgs, &work);
      work.segment_index = state_offset(rule.initial_state, T::kStateWgs, work);
      const int32_t place = n * parts + part, own = place - first_place;
      if (own < kWorks) {
        small.works[own] = work;
      } else {
        p.line.works[list + place] = work;
      }
      if (work.is_last) {
        small.line.left = max(0, own + 1 - kWorks);
        small.line.next = list + first_place + kWorks;
        small.line.slot = 0;
        small.line.cta = cta;
      }
    }
  }
  return true;
}

// The ring's slots that no chunk from `chunk` - 3 on needs get the next works. By a warp, once every second chunk.
template <class T>
__device__ __forceinline__ void refill_works(const KernelParams& p, SmallShared<T>& small, int chunk, int lane) {
  LinePosition& at = small.line;
#pragma unroll 1
  for (int i = 0; i < 2 && at.left > 0 && small.works[at.slot].end <= chunk - 3; ++i) {
    if (lane < 4) {
      reinterpret_cast<int4*>(&small.works[at.slot])[lane] =
          reinterpret_cast<const int4*>(p.line.works + at.next)[lane];
    }
    __syncwarp();
    if (lane == 0) {
      at.slot = next_work(at.slot);
      ++at.next;
      --at.left;
    }
    __syncwarp();
  }
}

// The initial state of a work that begins soon, on its way into the L2 cache. By one thread.
template <class T>
__device__ __forceinline__ void prefetch_state(const TensorRef& state, const Work& work) {
  if (work.segment_index < 0) return;
  ptx::bulk_prefetch(static_cast<const char*>(state.data) + static_cast<int64_t>(work.segment_index) * kStateUnit,
                     4 * T::kKeyDim * 64 * T::kStateWgs);
}

}  // namespace gdn::cuda::sm90
