// SPDX-License-Identifier: MIT
// A sequence's tokens and slots, read on the device. Entries out of range act as null ones and set a sticky flag.
#pragma once
#include "cuda/common/element.cuh"

namespace gdn::cuda {

struct SequenceInfo {
  int64_t batch = 0;        // dim 0 of q, k, v, o
  int64_t begin = 0;        // first token in dim 1
  int64_t len = 0;          // tokens
  int64_t read_slot = -1;   // row of initial_state; -1: start from zeros
  int64_t write_slot = -1;  // row of final_state; -1: not written
  bool is_null = false;     // o rows are zeroed, nothing else touched
};

__device__ __forceinline__ void flag_error(const RuleParams& p, uint32_t bit) {
  if (p.error_flags != nullptr) atomicOr(p.error_flags, bit);
}

__device__ __forceinline__ bool is_null_slot(const RuleParams& p, int64_t slot) {
  return p.null_slots == GDN_NULL_NON_POSITIVE ? slot <= 0 : slot < 0;
}

// Lengths only. Bounds that are not 0 <= begin <= end <= T make the sequence empty.
__device__ __forceinline__ void sequence_bounds(const RuleParams& p, int64_t n, SequenceInfo* seq) {
  if (p.cu_seqlens.data == nullptr) {
    seq->batch = n;
    seq->begin = 0;
    seq->len = p.T;
    return;
  }
  const int64_t begin = load_index(p.cu_seqlens, n), end = load_index(p.cu_seqlens, n + 1);
  const bool good = 0 <= begin && begin <= end && end <= p.T;
  if (!good) flag_error(p, kBadCuSeqlens);
  seq->batch = 0;
  seq->begin = good ? begin : 0;
  seq->len = good ? end - begin : 0;
}

// A slot of `indices` (row n itself without), or -1 for null; *null is set for a null or bad entry.
__device__ __forceinline__ int64_t read_slot(const RuleParams& p, const IndexRef& indices, int64_t n, int64_t slots,
                                             uint32_t error_bit, bool* null) {
  if (indices.data == nullptr) return n;
  const int64_t slot = load_index(indices, n);
  if (!is_null_slot(p, slot) && slot < slots) return slot;
  if (!is_null_slot(p, slot)) flag_error(p, error_bit);
  *null = true;
  return -1;
}

// Everything but token_indices (recurrent's verify reads those itself). The same rules as core/validate_util.cpp's
// build_slots: a null entry in either index tensor makes the sequence null.
__device__ __forceinline__ SequenceInfo sequence_info(const RuleParams& p, int64_t n) {
  SequenceInfo seq;
  sequence_bounds(p, n, &seq);
  if (p.token_indices.data != nullptr) return seq;
  if (p.initial_state.data != nullptr) {
    seq.read_slot = read_slot(p, p.initial_indices, n, p.initial_slots, kBadInitialIndex, &seq.is_null);
  }
  if (p.final_state.data != nullptr) {
    seq.write_slot = read_slot(p, p.final_indices, n, p.final_slots, kBadFinalIndex, &seq.is_null);
  }
  if (seq.is_null) {
    seq.read_slot = seq.write_slot = -1;
  } else if (p.has_initial.data != nullptr && load_index(p.has_initial, n) == 0) {
    seq.read_slot = -1;
  }
  return seq;
}

// Entry of `checkpoints` where sequence n's begin: those of all sequences before it, null ones included. Called by whole
// warps; every lane gets the result.
__device__ __forceinline__ int64_t checkpoint_begin(const RuleParams& p, int64_t n) {
  if (p.cu_seqlens.data == nullptr) return n * (p.T / p.checkpoint_every);
  int64_t count = 0;
  for (int64_t i = threadIdx.x % 32; i < n; i += 32) {
    SequenceInfo seq;
    sequence_bounds(p, i, &seq);
    count += seq.len / p.checkpoint_every;
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    count += static_cast<int64_t>(__shfl_xor_sync(0xffffffffu, static_cast<unsigned long long>(count), offset));
  }
  return count;
}

}  // namespace gdn::cuda
