// SPDX-License-Identifier: MIT
// The delta rule's problem as kernels get it: plain data, passed by value as a kernel parameter. Host code fills it from
// a RuleProblem (common/rule_params.cpp); no metadata is read on the host, so that a captured launch can be replayed with
// changed cu_seqlens and indices.
#pragma once
#include <cstdint>

namespace gdn::cuda {

// data == nullptr: absent. Strides in elements.
struct TensorRef {
  void* data = nullptr;
  int64_t stride[5] = {};
  int32_t dtype = 0;  // GDN_F32, GDN_BF16, GDN_F16, GDN_F64
};

// Integers on the device (GDN_U8, GDN_I32, GDN_I64), rank 1 or 2.
struct IndexRef {
  const void* data = nullptr;
  int64_t stride[2] = {};
  int64_t size = 0;  // entries along dim 0
  int32_t dtype = 0;
};

struct RuleParams {
  TensorRef q, k, v;                        // [B, T, H, D]
  TensorRef g, beta;                        // [B, T, Hv]
  TensorRef A_log, dt_bias;                 // [Hv]
  TensorRef o;                              // [B, T, Hv, V]
  TensorRef initial_state, final_state;     // [slot, Hv, K, V]: K-first strides whatever the layout is
  TensorRef checkpoints;                    // [slot, Hv, K, V]
  TensorRef snapshots;                      // [N, S, Hv, K, V]
  IndexRef cu_seqlens;                      // [N + 1]; absent: N = B sequences of T tokens
  IndexRef initial_indices, final_indices;  // [N]; absent: row n
  IndexRef has_initial;                     // [N]; absent: all have one
  IndexRef token_indices, num_accepted;     // [N, S], [N] (recurrent only)
  IndexRef checkpoint_indices;              // [M]; absent: row m
  int64_t B = 0, T = 0, N = 0;
  int64_t initial_slots = 0, final_slots = 0, checkpoint_slots = 0;  // rows: an index outside is treated as null
  int64_t token_columns = 0;                                         // S of token_indices
  int64_t snapshot_columns = 0;                                      // S of snapshots
  int64_t checkpoint_every = 0;
  int32_t Hk = 0, Hv = 0, K = 0, V = 0;
  float scale = 0, l2norm_eps = 0;
  int8_t gate_form = 0, beta_form = 0, head_map = 0, null_slots = 0;
  int8_t qk_l2norm = 0, round_qk = 0, round_beta = 0;
  uint32_t* error_flags = nullptr;  // sticky, per device: kBad* bits of entries that were treated as null
};

// Bits of error_flags.
inline constexpr uint32_t kBadCuSeqlens = 1, kBadInitialIndex = 2, kBadFinalIndex = 4, kBadCheckpointIndex = 8,
                          kBadTokenIndex = 16, kBadNumAccepted = 32,
                          kBadLength =
                              64;  // a sequence with more tokens than token_state_indices or snapshots have columns

}  // namespace gdn::cuda
