// SPDX-License-Identifier: MIT
// Validated, normalised descriptions of a call. Everything behind validation reads these and never gdn_*_args.
//
// Normalisation done by validate.cpp:
// - State views always have dims [slot, Hv, K, V] in shape/strides, whatever layout the caller named (the layout
// survives only
//   in the strides); snapshots are [N, S, Hv, K, V].
// - Defaults are filled in (scale, eps), index tensors are read (host metadata) and turned into Sequence entries.
#pragma once
#include <cstdint>
#include <vector>

#include "gdn/gdn.h"

namespace gdn {

// Used by the kernels of every instruction set, so never a symbol of its own: the copy that the linker keeps for the
// whole library could be one with AVX-512 in it (tools/check_isa_symbols.py). The same holds for View below.
[[gnu::always_inline]] inline int64_t dtype_bytes(int32_t dtype) {
  switch (dtype) {
    case GDN_F64:
    case GDN_I64:
      return 8;
    case GDN_F32:
    case GDN_I32:
      return 4;
    case GDN_BF16:
    case GDN_F16:
      return 2;
    default:
      return 1;
  }
}

// A tensor view; absent when ndim < 0 (a plan-only problem may be present with data == nullptr).
struct View {
  char* data = nullptr;
  int32_t dtype = 0;
  int32_t ndim = -1;
  int64_t shape[GDN_MAX_DIMS] = {};
  int64_t stride[GDN_MAX_DIMS] = {};  // elements

  [[gnu::always_inline]] bool present() const { return ndim >= 0; }
  [[gnu::always_inline]] int64_t offset_bytes(int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0,
                                              int64_t i4 = 0) const {
    return (i0 * stride[0] + i1 * stride[1] + i2 * stride[2] + i3 * stride[3] + i4 * stride[4]) * dtype_bytes(dtype);
  }
  [[gnu::always_inline]] char* at(int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0, int64_t i4 = 0) const {
    return data + offset_bytes(i0, i1, i2, i3, i4);
  }
};

struct Sequence {
  int64_t batch = 0;             // index into dim 0 of q, k, v, o
  int64_t begin = 0;             // first token in dim 1
  int64_t len = 0;               // tokens; may be 0
  int64_t read_slot = -1;        // row of initial_state; -1: start from zeros
  int64_t write_slot = -1;       // row of final_state; -1: final state not wanted
  int64_t checkpoint_begin = 0;  // first entry of checkpoint_slots
  bool is_null = false;          // o rows are zeroed, nothing else touched
};

// Where a call's tensors lie. On CUDA the metadata (cu_seqlens, slots, flags) lies on the device too and is never read on
// the host: it travels as views, and everything that is made of its values (seqs, token_slots, ...) stays empty.
struct Place {
  int32_t device_type = GDN_CPU;
  int32_t device_id = 0;
  void* stream = nullptr;  // cudaStream_t
  bool on_cuda() const { return device_type == GDN_CUDA; }
};

inline constexpr float kDefaultSplitThreshold = 10;

struct RuleProblem : Place {
  int32_t op = GDN_OP_CHUNK_FORWARD;
  int64_t B = 0, T = 0, N = 0, Hk = 0, Hv = 0, K = 0, V = 0;
  View q, k, v, g, beta, A_log, dt_bias, o;
  int32_t gate_form = 0, beta_form = 0, head_map = 0;
  bool qk_l2norm = false, round_qk = false, round_beta = false;
  float l2norm_eps = 1e-6f;
  double scale = 0;
  View initial_state, final_state;  // [slot, Hv, K, V]
  View snapshots;                   // [N, S, Hv, K, V]
  View checkpoints;                 // [slot, Hv, K, V]
  int64_t checkpoint_every = 0;
  std::vector<Sequence> seqs;             // N entries
  int64_t token_slot_columns = 0;         // S of token_state_indices; 0: absent
  std::vector<int64_t> token_slots;       // [N, S] rows of final_state; -1: not written
  std::vector<int64_t> checkpoint_slots;  // rows of checkpoints in order; -1: not written
  // CUDA only. final_indices is already initial_indices where that is its default.
  View cu_seqlens, initial_indices, final_indices, has_initial, token_indices, num_accepted, checkpoint_indices;
  int32_t null_slots = 0;
  int64_t max_seqlen = 0;   // CUDA only, for the plan: longest sequence, at most T; 0: unknown. May be wrong.
  bool zero_tail = false;   // rows of o past cu_seqlens[N] are zeroed; false without cu_seqlens or tokens
  int32_t num_threads = 0;  // as asked, 0: default
  bool batch_invariant = false;
  // Splitting of sequences. split is already GDN_SPLIT_OFF where batch_invariant or split_pairs asks for it, and where no
  // sequence can be longer than a segment.
  int32_t split = GDN_SPLIT_AUTO;
  int64_t split_tokens = 0;  // tokens per segment, a multiple of 64; 0: the plan chooses
  bool split_exact = false;  // no gate window
  float split_threshold = kDefaultSplitThreshold;
  void* workspace = nullptr;  // CUDA only
  int64_t workspace_bytes = 0;

  int64_t key_head(int64_t h) const { return head_map == GDN_HEADS_TILED ? h % Hk : h / (Hv / Hk); }
};

struct ConvProblem : Place {
  int64_t B = 0, D = 0, T = 0, N = 0, W = 0, L = 0;  // L = 0: no state
  View x, weight, bias, y;                           // [B, D, T], [D, W], [D], [B, D, T]
  View initial_state, final_state;                   // [slot, D, L]
  int32_t activation = 0;
  std::vector<Sequence> seqs;
  std::vector<int64_t> num_accepted;  // N entries, or empty
  // CUDA only, as in RuleProblem.
  View cu_seqlens, initial_indices, final_indices, has_initial, accepted;
  int32_t null_slots = 0;
  int32_t num_threads = 0;
};

struct GateProblem : Place {
  int64_t rows[3] = {1, 1, 1};  // leading dims, right-aligned and padded with 1
  int64_t H = 0;
  View a, b, A_log, dt_bias, g, beta;  // a, b, g, beta: rank 4 [rows.., H]
  int32_t gate_form = 0, beta_form = GDN_BETA_SIGMOID;
  int32_t num_threads = 0;
};

struct NormProblem : Place {
  int64_t rows[3] = {1, 1, 1};
  int64_t D = 0;
  View x, z, weight, out;  // x, z, out: rank 4 [rows.., D]
  float eps = 0;
  int32_t activation = 0;
  bool gate_first = false, zero_centered = false, round_before_weight = false;
  int32_t num_threads = 0;
  View residual, residual_out;  // both or neither; as x
  bool glu = false;             // no norm: out = x * act(z)
};

struct RopeProblem : Place {
  int64_t B = 0, T = 0, Hq = 0, Hkv = 0, D = 0, R = 0;
  View q, k, q_weight, k_weight, cos, sin, positions, q_out, k_out, gate_out;
  // cos, sin: [B, T, R] with batch stride 0 when broadcast; positions: [axes, B, T] (axes 1 or 3), batch stride 0
  // likewise
  float eps = 0;
  double theta = 0;
  int32_t mrope_section[3] = {0, 0, 0};
  bool q_has_gate = false, zero_centered = false;
  int32_t num_threads = 0;
};

}  // namespace gdn
