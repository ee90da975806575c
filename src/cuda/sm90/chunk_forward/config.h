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
inline constexpr int kLStride = 72;           // floats, of the fp32 matrix of invert_wide
inline constexpr int kDiagonalStride = 20;    // floats: a multiple of 4, so that rows can be read 16 bytes at a time
inline constexpr int kInverseBytes = 64 * kLStride * 4;
inline constexpr int kGateRing = 8;     // chunks whose gates are kept
inline constexpr int kMaxSorted = 128;  // sequences up to here are taken longest first

// Byte offset of 16-byte piece `piece` (8 elements) of a row in a 128-byte-swizzled panel.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t piece) {
  return row * 128 + ((piece ^ (row & 7)) << 4);
}

struct KernelParams {
  CUtensorMap q, k, v, o;  // [batch, token, head, channel], boxes of 64 tokens x 64 channels
  RuleParams rule;
  int32_t v_splits;  // CTAs per (sequence, head)
};

// One (sequence, head): everything uniform over the CTA.
struct Work {
  SequenceInfo seq;
  int32_t head, key_head;
  int32_t v_begin;  // first value channel of this CTA
  int32_t num_chunks;
  int64_t first_checkpoint;  // entry of checkpoints

  __device__ __forceinline__ int tokens_in(int chunk) const {
    return min(static_cast<int>(seq.len) - chunk * kChunk, kChunk);
  }
  // Rows past the sequence's end in the chunk's tiles: past the end of the tensor the copy engine itself fills in zeros.
  __device__ __forceinline__ bool has_foreign_rows(const RuleParams& rule, int chunk) const {
    return tokens_in(chunk) < kChunk && seq.begin + seq.len < rule.T;
  }
};

template <class ElementType, int kKeyDimension, int kStateWarpgroups>
struct Traits {
  using Element = ElementType;
  static constexpr int kKeyDim = kKeyDimension;       // 64 or 128
  static constexpr int kStateWgs = kStateWarpgroups;  // each holds 64 value channels of the state
  static constexpr int kThreads = 128 * (kStateWgs + 2);
  using Mid = __nv_bfloat16;  // T, P, R and U' in P U': their range is that of v, which fp16 does not cover
  static constexpr int kHalves = kKeyDim / 64;
  static constexpr int kInputStages = 3;
  static constexpr int kProductStages = 2;
  // Registers per thread; the sum over the warpgroups is at most 512. At entry every thread has 65536 / kThreads.
  static constexpr int kStateRegisters = kStateWgs == 2 ? 192 : 216;
  static constexpr int kInverseRegisters = kStateWgs == 2 ? 64 : 144;
  static constexpr int kScoreRegisters = kStateWgs == 2 ? 64 : 144;

  // sKQ [halves][K 64 rows | Q 64 rows][64], sV [wg][64 rows][64] per input stage; sT, sP [64][64] per product stage;
  // all 16-bit, 128-byte swizzle. The output tile takes the place of the V tile. The inverse's own (inverse.cuh):
  // sH [64][64] fp16 and four [16][20] fp32, or sL [64][72] fp32.
  static constexpr int kKqBytes = kHalves * 2 * kPanelBytes;
  static constexpr int kVBytes = kStateWgs * kPanelBytes;
  static constexpr int kInputBytes = kKqBytes + kVBytes;
  static constexpr int kTOffset = kInputStages * kInputBytes;
  static constexpr int kPOffset = kTOffset + kProductStages * kPanelBytes;
  static constexpr int kLOffset = kPOffset + kProductStages * kPanelBytes;
  static constexpr int kSmallOffset = kLOffset + kInverseBytes;
};

// Per product stage: what the state warpgroups multiply rows and columns with.
struct Factors {
  float read_k[kChunk];  // e^G_i * |k_i|^-1: of K S
  float read_q[kChunk];  // scale * e^G_i * |q_i|^-1: of Q S
  float update[kChunk];  // e^(G_last - G_j) * |k_j|^-1: of U'
  float decay;           // e^G_last
  float pad[3];
};

template <class T>
struct SmallShared {
  Work work;
  Factors factors[T::kProductStages];
  float gate[kGateRing][kChunk], beta[kGateRing][kChunk];  // cumulative log2 decay and beta, made four chunks at a time
  uint32_t g_words[4][kChunk], beta_words[4][kChunk];      // their inputs, a chunk per score warp
  // Per auxiliary warp: cumulative log2 decay - log2 k_norm (what Gamma's columns subtract), and Gamma's column factors
  // left of its diagonal block.
  float column[8][kChunk], below[8][kChunk];
  // Reciprocal L2 norms; two, as a warp may still read a chunk's while another writes the next one's.
  float k_norm[T::kProductStages][kChunk], q_norm[T::kProductStages][kChunk];
  uint64_t input_full[T::kInputStages], input_empty[T::kInputStages];
  uint64_t product_full[T::kProductStages], product_empty[T::kProductStages];
  int32_t lengths[kMaxSorted];
  int32_t sequence;
};

template <class T>
inline constexpr int kSmemBytes = T::kSmallOffset + static_cast<int>(sizeof(SmallShared<T>)) + 1024;  // 1024: alignment

enum NamedBarrier : int {
  kAuxBarrier = 1,
  kInverseBarrier = 2,
  kScoreBarrier = 3,
  kStateBarrier0 = 4,
  kStateBarrier1 = 5
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
