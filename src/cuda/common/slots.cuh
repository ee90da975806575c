// SPDX-License-Identifier: MIT
// Slots of checkpoints and of multi-token verify, read on the device by the rules of core/validate.cpp.
#pragma once
#include "cuda/common/sequence.cuh"

namespace gdn::cuda {

// Row of `checkpoints` for an entry, or -1: not written.
__device__ __forceinline__ int64_t checkpoint_slot(const RuleParams& p, int64_t entry) {
  int64_t slot = entry;
  if (p.checkpoint_indices.data != nullptr) {
    if (entry >= p.checkpoint_indices.size) {
      flag_error(p, kBadCheckpointIndex);
      return -1;
    }
    slot = load_index(p.checkpoint_indices, entry);
    if (is_null_slot(p, slot)) return -1;
  }
  if (slot < p.checkpoint_slots) return slot;
  flag_error(p, kBadCheckpointIndex);
  return -1;
}

// token_indices: the slot that sequence n starts from into seq->read_slot, and whether it is null.
__device__ __forceinline__ void verify_start(const RuleParams& p, int64_t n, SequenceInfo* seq) {
  const int64_t columns = p.token_columns;
  int64_t start = 0;
  if (p.num_accepted.data != nullptr) {
    const int64_t accepted = load_index(p.num_accepted, n);
    if (accepted < 1 || accepted > columns) {
      // Padding of a batch has all slots null, and any count.
      for (int64_t t = 0; t < columns; ++t) {
        if (!is_null_slot(p, load_index(p.token_indices, n, t))) flag_error(p, kBadNumAccepted);
      }
      seq->is_null = true;
      return;
    }
    start = accepted - 1;
  }
  if (columns == 0) return;
  const int64_t slot = load_index(p.token_indices, n, start);
  const bool outside = p.initial_state.data != nullptr && slot >= p.initial_slots;
  if (is_null_slot(p, slot) || outside) {
    if (outside) flag_error(p, kBadTokenIndex);
    seq->is_null = true;
    return;
  }
  const bool has_initial = p.has_initial.data == nullptr || load_index(p.has_initial, n) != 0;
  if (p.initial_state.data != nullptr && has_initial) seq->read_slot = slot;
}

// Row of final_state for the state after token t, or -1: not written.
__device__ __forceinline__ int64_t verify_slot(const RuleParams& p, int64_t n, int64_t t) {
  if (t >= p.token_columns) {
    flag_error(p, kBadLength);
    return -1;
  }
  const int64_t slot = load_index(p.token_indices, n, t);
  if (is_null_slot(p, slot) || slot < p.final_slots) return is_null_slot(p, slot) ? -1 : slot;
  flag_error(p, kBadTokenIndex);
  return -1;
}

}  // namespace gdn::cuda
