// SPDX-License-Identifier: MIT
// The Hopper chunk kernel's shapes, shared-memory plan and kernel parameters. See kernel.cuh for the roles.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/common/sequence.cuh"

namespace gdn::cuda::sm90 {

inline constexpr int kChunk = 64;             // tokens per chunk
inline constexpr int kPanelBytes = 64 * 128;  // 64 rows of 64 16-bit elements, 128-byte swizzle
inline constexpr int kDiagonalStride = 20;    // floats: a multiple of 4, so that rows can be read 16 bytes at a time
inline constexpr int kAuxWgs = 2;             // auxiliary warpgroups: chunk c is made by number c % 2
inline constexpr int kMaxSorted = 128;        // sequences up to here are taken longest first

// Byte offset of 16-byte piece `piece` (8 elements) of a row in a 128-byte-swizzled panel.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t piece) {
  return row * 128 + ((piece ^ (row & 7)) << 4);
}

// Splitting of sequences into segments (docs/kernels/chunk_sm90.md). Segment s of a sequence starts from
//   S_s = M_(s-1) S_(s-1) + L_(s-1):
// L ("local") is where segment s - 1 ends when it starts from zero (its true start for s = 1), M its transition. Both come from
// a launch of their own before (Traits::kIsForward false). Where a head's gates decay by e^-threshold within the last chunks of
// segment s - 1, M is nothing and those chunks alone make L: its "window".
struct SegmentParams {
  int32_t chunks = 0;   // at most, per segment; 0: sequences stay whole
  int32_t exact = 0;    // 1: no windows
  float threshold = 0;  // of the sum of -log2 decay
  int32_t* window;      // [segment, Hv]: chunks of the window, 0: the whole segment and its transition
  int32_t* started;     // [segment, Hv, V / 64]: 1 once a sequence's first segment has read the initial state
  float4* local;        // [segment, Hv, V / 64, 16, 128 threads]: the state warpgroups' registers
  uint32_t* counters;   // nullptr, or four (cuda.h: SplitCounters)
  uint8_t* transition;  // [segment, Hv, 2 halves, 128 rows, 64] fp16, as in shared memory
};
inline constexpr int kTransitionBytes = 2 * 128 * 128;  // of one segment and head
inline constexpr int kLocalBytes = 4 * 64 * 128;        // of one segment, head and 64 value channels

// What a CTA does one after another: one (sequence or segment, head, value channels) or a part of it. Chunks are numbered over all that
// a CTA does; everything is uniform over it. In shared memory: registers are short in every role.
struct Work {
  int32_t batch, begin, len;      // tokens of the sequence or segment; null sequences: len 0
  int32_t read_slot, write_slot;  // of initial_state, final_state; -1: none
  int32_t head, key_head;
  int32_t v_begin;           // first value channel
  int32_t origin;            // number of the chunk that begin lies in: below 0 where an earlier part is another CTA's
  int32_t end;               // number of the chunk behind the last one
  int32_t first_checkpoint;  // entry of checkpoints
  int32_t tokens_before;     // of the sequence, in earlier segments; null sequences: rows of o to be cleared
  int32_t segment, num_segments;  // of the sequence
  int32_t segment_index;          // over all sequences; in a line: state_offset
  uint8_t is_last;                // of the CTA
  uint8_t is_transition;          // makes M
  uint8_t is_null;
  uint8_t hand_over;  // bits: kTakesOver, kHandsOver

  __device__ __forceinline__ int tokens_in(int chunk) const {
    return len == 0 ? 0 : min(len - (chunk - origin) * kChunk, kChunk);
  }
  __device__ __forceinline__ int first_token(int chunk) const { return begin + (chunk - origin) * kChunk; }
  // Without any token a chunk has no tiles, but passes through all roles like others.
  __device__ __forceinline__ bool has_tiles() const { return len > 0; }
  // Rows past the sequence's end in the chunk's tiles: past the end of the tensor the copy engine itself fills in zeros.
  __device__ __forceinline__ bool has_foreign_rows(const RuleParams& rule, int chunk) const {
    return tokens_in(chunk) < kChunk && (begin + len < rule.T || !has_tiles());
  }
};
inline constexpr uint8_t kTakesOver = 1, kHandsOver = 2;
inline constexpr int kWorks = 9;  // in shared memory at a time (line.cuh)
__device__ __forceinline__ int next_work(int slot) { return slot + 1 == kWorks ? 0 : slot + 1; }

// Sequences and heads laid out in a line of chunks and cut into equal shares (line.cuh).
struct LineParams {
  int32_t ctas = 0;      // 0: one work per CTA
  int32_t together = 1;  // divides ctas, and heads times CTAs per head
  // Memory that may hold anything before. A flag is up when it equals `tag`, which no other memory holds: 64 bits at random, not those
  // of another launch; it is taken down again, so that a captured launch can be repeated.
  uint64_t tag;
  uint64_t* flags;  // [cta, V / 64 of a CTA]: the state it takes over is there
  Work* works;      // [(sequence, head, value channels) + cta]: those that do not fit the ring at first
  float4* states;   // [cta, V / 64 of a CTA, K / 8, 128 threads]: what a CTA takes over, as in registers
};

struct KernelParams {
  CUtensorMap q, k, v, o;  // [batch, token, head, channel], boxes of 64 tokens x 64 channels
  RuleParams rule;
  SegmentParams segments;
  LineParams line;
  int32_t longest_first;  // packed sequences start in falling order of length: for more CTAs than multiprocessors
  int32_t v_splits;       // CTAs per (sequence or segment, head); before a forward in segments there is one more, for M
};

// kIsForward: outputs too; otherwise what SegmentParams names, from K and V alone.
template <class ElementType, int kKeyDimension, int kStateWarpgroups, bool kOutputs = true>
struct Traits {
  using Element = ElementType;
  static constexpr int kKeyDim = kKeyDimension;       // 64 or 128
  static constexpr int kStateWgs = kStateWarpgroups;  // each holds 64 value channels of the state
  static constexpr bool kIsForward = kOutputs;
  static constexpr int kThreads = 128 * (kStateWgs + kAuxWgs);
  using Mid = __nv_bfloat16;  // T, P, R and U' in P U': their range is that of v, which fp16 does not cover
  static constexpr int kHalves = kKeyDim / 64;
  static constexpr int kKqStages = 4;  // one in the state warpgroups' hands, one in each auxiliary's, one on its way
  static constexpr int kVStages = kIsForward ? 2 : kKqStages;  // without outputs V comes with K
  static constexpr int kProductStages = kAuxWgs;
  // Registers per thread; the sum over the warpgroups is at most 512. At entry every thread has 65536 / kThreads.
  static constexpr int kStateRegisters = kStateWgs == 2 ? 192 : 216;
  static constexpr int kAuxRegisters = kStateWgs == 2 ? 64 : 144;

  // sKQ [halves][K 64 rows | Q 64 rows][64] (without outputs no Q) and sV [wg][64 rows][64] per stage, sT, sP [64][64] per auxiliary warpgroup: all
  // 16-bit, 128-byte swizzle. The output tile takes the place of the V tile. Then the inverse's own, per auxiliary
  // warpgroup: sH [64][64] fp16 and four [16][20] fp32 (inverse.cuh).
  static constexpr int kHalfBytes = (kIsForward ? 2 : 1) * kPanelBytes;
  static constexpr int kKqBytes = kHalves * kHalfBytes;
  static constexpr int kVBytes = kStateWgs * kPanelBytes;
  static constexpr int kVOffset = kKqStages * kKqBytes;
  static constexpr int kTOffset = kVOffset + kVStages * kVBytes;
  static constexpr int kPOffset = kTOffset + kProductStages * kPanelBytes;
  static constexpr int kHOffset = kPOffset + kProductStages * kPanelBytes;
  static constexpr int kInverseBytes = kPanelBytes + 4 * 16 * kDiagonalStride * 4;
  static constexpr int kSmallOffset = kHOffset + kAuxWgs * kInverseBytes;
};

// What the state warpgroups multiply rows and columns of a chunk with.
struct Factors {
  float read_k[kChunk];  // e^G_i * |k_i|^-1: of K S
  float read_q[kChunk];  // scale * e^G_i * |q_i|^-1: of Q S
  float update[kChunk];  // e^(G_last - G_j) * |k_j|^-1: of U'
  float decay;           // e^G_last
  float pad[3];
};

// Of one auxiliary warpgroup.
struct AuxShared {
  Factors factors;
  float gate[2][kChunk], beta[2][kChunk];  // cumulative log2 decay and beta of this chunk and of its next
  float k_norm[kChunk], q_norm[kChunk];    // reciprocal L2 norms
  float column[kChunk];                    // cumulative log2 decay - log2 k_norm: what Gamma's columns subtract
  float below[4][kChunk];                  // per warp: Gamma's column factors left of its diagonal block
};

// Which of a CTA's works come into the ring next (line.cuh).
struct LinePosition {
  int32_t cta;         // share * together + place in the group
  int32_t slot;        // of the next one
  int32_t next, left;  // its place in global memory; how many there are
};

template <class T>
struct SmallShared {
  Work works[kWorks];
  LinePosition line;
  AuxShared aux[kAuxWgs];
  uint64_t kq_full[T::kKqStages], v_full[T::kStateWgs][2];
  uint64_t product_full[T::kProductStages], product_empty[T::kProductStages];  // empty: the K and Q tiles are free, too
  uint64_t fold_full[2];
  int32_t sequence;
};

template <class T>
inline constexpr int kSmemBytes = T::kSmallOffset + static_cast<int>(sizeof(SmallShared<T>)) + 1024;  // 1024: alignment

enum NamedBarrier : int {
  kAuxBarrier0 = 1,
  kAuxBarrier1 = 2,
  kStateBarrier0 = 3,
  kStateBarrier1 = 4,
  kTurnBarrier0 = 5,
  kTurnBarrier1 = 6
};

// A position in a ring of kStages slots, and the parity of its current round.
template <int kStages>
struct RingPosition {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace gdn::cuda::sm90
