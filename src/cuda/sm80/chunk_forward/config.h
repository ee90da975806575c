// SPDX-License-Identifier: MIT
// chunk_sm80's shapes and shared memory.
#pragma once
#include <cstdint>

#include "cuda/common/sequence.cuh"

namespace gdn::cuda::sm80 {

inline constexpr int kChunk = 64, kPanel = 64, kWarps = 4, kThreads = 32 * kWarps;
inline constexpr int kDiagonalStride = 20;  // floats; 80 bytes: rows stay 16-byte aligned

template <int kKeys>
struct Shared {
  static constexpr int kPitch = (kKeys + 63) / 64 * 128;  // bytes of a K or Q row: whole groups of 8 pieces of 16 bytes
  alignas(128) char k[kChunk * kPitch];
  char q[kChunk * kPitch];
  char v[kChunk * 2 * kPanel];     // then o
  char h[kChunk * 2 * kChunk];     // fp16: L below the diagonal blocks, their inverses on them
  char t[kChunk * 2 * kChunk];     // (I + L)^-1 diag(beta)
  char p[kChunk * 2 * kChunk];     // tril(scale Q K^T o Gamma)
  char wide[kChunk * 2 * kChunk];  // inverse of a chunk with long keys
  float diagonal[kWarps][16 * kDiagonalStride];
  float gate[kChunk], beta[kChunk];      // cumulative log2 decay
  float k_norm[kChunk], q_norm[kChunk];  // 1 / norm, or 1
  float read_k[kChunk], read_q[kChunk], update[kChunk];
  int long_keys;
  SequenceInfo seq;
  int32_t head, key_head, first_channel;
  int64_t first_checkpoint;  // entry
};

struct LaunchParams {
  int32_t panels = 1;
  bool fast_q = false, fast_k = false, fast_v = false, fast_o = false;  // 16-byte pieces are aligned
};

}  // namespace gdn::cuda::sm80
