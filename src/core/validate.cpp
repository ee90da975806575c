// SPDX-License-Identifier: MIT
// The delta rule's arguments: gdn_rule_args -> RuleProblem.
#include "core/validate.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "core/rule_checks.h"
#include "core/validate_util.h"

namespace gdn {
namespace {

using validation::check_duplicates;
using validation::check_overlaps;
using validation::check_scalars;
using validation::Checker;
using validation::kAnySize;
using validation::read_index;

constexpr int64_t kMaxHeadDim = 512;

// End of the first published struct: what a caller of ABI version 1 at least knows.
constexpr size_t kFirstSize = offsetof(gdn_rule_args, round_beta) + sizeof(int32_t);

// Metadata as validation reads it, on the host; the views in RuleProblem are the tensors themselves.
struct Metadata {
  View cu_seqlens, initial_indices, has_initial, final_indices, token_indices, num_accepted, checkpoint_indices;
  bool readable = true;  // false: device tensors whose values nobody looks at here
};

// Keeps the vectors' capacity, resets everything else.
void reset(RuleProblem* p) {
  static const RuleProblem kEmpty;
  std::vector<Sequence> seqs = std::move(p->seqs);
  std::vector<int64_t> token_slots = std::move(p->token_slots);
  std::vector<int64_t> checkpoint_slots = std::move(p->checkpoint_slots);
  *p = kEmpty;
  p->seqs = std::move(seqs);
  p->token_slots = std::move(token_slots);
  p->seqs.clear();
  p->token_slots.clear();
  p->checkpoint_slots = std::move(checkpoint_slots);
  p->checkpoint_slots.clear();
}

bool check_tensors(Checker* c, const gdn_rule_args& a, RuleProblem* p) {
  constexpr uint32_t kTypes = validation::kFloatsAndF64;
  if (!c->required("q", a.q, kTypes, {{"B", kAnySize}, {"T", kAnySize}, {"Hk", kAnySize}, {"K", kAnySize}}, &p->q)) {
    return false;
  }
  p->B = p->q.shape[0];
  p->T = p->q.shape[1];
  p->Hk = p->q.shape[2];
  p->K = p->q.shape[3];
  const validation::Dim dim_b{"B", p->B}, dim_t{"T", p->T};
  if (!c->required("k", a.k, kTypes, {dim_b, dim_t, {"Hk", p->Hk}, {"K", p->K}}, &p->k) ||
      !c->required("v", a.v, kTypes, {dim_b, dim_t, {"Hv", kAnySize}, {"V", kAnySize}}, &p->v)) {
    return false;
  }
  p->Hv = p->v.shape[2];
  p->V = p->v.shape[3];
  if (!(c->positive_dim("q", "Hk", p->Hk) && c->positive_dim("q", "K", p->K) && c->positive_dim("v", "Hv", p->Hv) &&
        c->positive_dim("v", "V", p->V))) {
    return false;
  }
  if (p->K > kMaxHeadDim) return c->unsupported("q", "K = " + std::to_string(p->K), "K of at most 512");
  if (p->V > kMaxHeadDim) return c->unsupported("v", "V = " + std::to_string(p->V), "V of at most 512");
  if (p->Hv % p->Hk != 0) {
    return c->invalid("v", "Hv = " + std::to_string(p->Hv), "a multiple of Hk = " + std::to_string(p->Hk));
  }
  const validation::Dim dim_h{"Hv", p->Hv};
  if (!(c->optional("g", a.g, kTypes, {dim_b, dim_t, dim_h}, &p->g) &&
        c->optional("beta", a.beta, kTypes, {dim_b, dim_t, dim_h}, &p->beta) &&
        c->optional("A_log", a.A_log, kTypes, {dim_h}, &p->A_log) &&
        c->optional("dt_bias", a.dt_bias, kTypes, {dim_h}, &p->dt_bias) &&
        c->required("o", a.o, kTypes, {dim_b, dim_t, dim_h, {"V", p->V}}, &p->o, true))) {
    return false;
  }
  if (p->gate_form == GDN_GATE_RAW) {
    if (!p->g.present()) return c->invalid("g", "NULL with gate_form GDN_GATE_RAW", "the raw gate input a [B, T, Hv]");
    if (!p->A_log.present()) return c->invalid("A_log", "NULL with gate_form GDN_GATE_RAW", "a tensor [Hv]");
  } else if (p->A_log.present() || p->dt_bias.present()) {
    return c->invalid(p->A_log.present() ? "A_log" : "dt_bias",
                      "a tensor with gate_form " + std::to_string(a.gate_form), "NULL, or gate_form GDN_GATE_RAW (2)");
  }
  p->scale = a.scale != 0 ? static_cast<double>(a.scale) : 1.0 / std::sqrt(static_cast<double>(p->K));
  return true;
}

// State tensors arrive in the named layout and leave K-first.
bool read_state(Checker* c, const char* name, const gdn_tensor* t, const gdn_rule_args& a, const RuleProblem& p,
                validation::Dim rows, bool output, View* view) {
  const validation::Dim dim_k{"K", p.K}, dim_v{"V", p.V};
  const bool v_first = a.state_layout == GDN_STATE_V_FIRST;
  if (!c->optional(name, t, validation::kFloatsAndF64,
                   {rows, {"Hv", p.Hv}, v_first ? dim_v : dim_k, v_first ? dim_k : dim_v}, view, output)) {
    return false;
  }
  if (v_first && view->present()) {
    std::swap(view->shape[2], view->shape[3]);
    std::swap(view->stride[2], view->stride[3]);
  }
  return true;
}

bool check_states(Checker* c, const gdn_rule_args& a, RuleProblem* p, Metadata* m) {
  const bool tokens = a.token_state_indices != nullptr;
  const bool shared = a.initial_state != nullptr && a.final_state != nullptr && a.final_state_indices == nullptr &&
                      a.initial_state->data == a.final_state->data;
  const validation::Dim row_per_seq{"N", p->N}, slots{"slots", kAnySize};
  const bool initial_pool = a.initial_state_indices != nullptr || tokens;
  // Whether the default of final_state_indices applies is settled by same_view below; here only the row count matters.
  const bool final_pool = a.final_state_indices != nullptr || tokens || (shared && initial_pool);
  if (!(read_state(c, "initial_state", a.initial_state, a, *p, initial_pool ? slots : row_per_seq, false,
                   &p->initial_state) &&
        read_state(c, "final_state", a.final_state, a, *p, final_pool ? slots : row_per_seq, true, &p->final_state) &&
        c->optional("initial_state_indices", a.initial_state_indices, validation::kIndices, {row_per_seq},
                    &p->initial_indices) &&
        c->optional("has_initial_state", a.has_initial_state, validation::kFlags, {row_per_seq}, &p->has_initial) &&
        c->optional("final_state_indices", a.final_state_indices, validation::kIndices, {row_per_seq},
                    &p->final_indices) &&
        c->host_metadata(p->initial_indices, &m->initial_indices) &&
        c->host_metadata(p->has_initial, &m->has_initial) && c->host_metadata(p->final_indices, &m->final_indices))) {
    return false;
  }
  if (tokens && (m->initial_indices.present() || m->final_indices.present())) {
    return c->invalid(m->initial_indices.present() ? "initial_state_indices" : "final_state_indices",
                      "a tensor beside token_state_indices", "NULL");
  }
  if (!p->initial_state.present() && (m->initial_indices.present() || m->has_initial.present())) {
    return c->invalid(m->initial_indices.present() ? "initial_state_indices" : "has_initial_state",
                      "a tensor without initial_state", "NULL, or initial_state beside it");
  }
  if (!p->final_state.present() && m->final_indices.present()) {
    return c->invalid("final_state_indices", "a tensor without final_state", "NULL, or final_state beside it");
  }
  return true;
}

// Without the pool's size (no state tensor) only null slots are told apart.
int64_t slot_limit(const RuleProblem& p, bool for_read) {
  const View& state = for_read ? p.initial_state : p.final_state;
  return state.present() ? state.shape[0] : INT64_MAX;
}

bool check_token_row(Checker* c, const gdn_rule_args& a, RuleProblem* p, const Metadata& m, int64_t n) {
  const int64_t columns = p->token_slot_columns;
  Sequence& seq = p->seqs[static_cast<size_t>(n)];
  int64_t* row = p->token_slots.data() + n * columns;
  const auto entry = [&](int64_t t) { return read_index(m.token_indices, n, t); };
  const auto where = [&](int64_t t) {
    return "token_state_indices[" + std::to_string(n) + "][" + std::to_string(t) + "] = " + std::to_string(entry(t));
  };
  int64_t start = 0;
  if (m.num_accepted.present() && m.num_accepted.data != nullptr) {
    const int64_t accepted = read_index(m.num_accepted, n);
    if (accepted < 1 || accepted > columns) {
      // Padding of a batch: all slots null, the count is whatever the engine left there.
      for (int64_t t = 0; t < columns; ++t) {
        if (!validation::is_null_slot(entry(t), a.null_slots)) {
          return c->invalid("num_accepted", "num_accepted[" + std::to_string(n) + "] = " + std::to_string(accepted),
                            "1.." + std::to_string(columns) + " (the columns of token_state_indices)");
        }
      }
      seq.is_null = true;
      return true;
    }
    start = accepted - 1;
  }
  if (columns == 0) return true;  // no tokens and no slots
  const int64_t read = entry(start);
  if (validation::is_null_slot(read, a.null_slots)) {
    seq.is_null = true;
    return true;
  }
  if (read >= slot_limit(*p, true)) {
    return c->invalid("token_state_indices", where(start),
                      "a slot below " + std::to_string(slot_limit(*p, true)) + " (initial_state), or a null slot");
  }
  const bool has_initial =
      !m.has_initial.present() || m.has_initial.data == nullptr || read_index(m.has_initial, n) != 0;
  seq.read_slot = p->initial_state.present() && has_initial ? read : -1;
  for (int64_t t = 0; t < seq.len; ++t) {
    const int64_t slot = entry(t);
    if (validation::is_null_slot(slot, a.null_slots)) continue;
    if (slot >= slot_limit(*p, false)) {
      return c->invalid("token_state_indices", where(t),
                        "a slot below " + std::to_string(slot_limit(*p, false)) + " (final_state), or a null slot");
    }
    if (p->final_state.present()) row[t] = slot;
  }
  return true;
}

bool check_token_slots(Checker* c, const gdn_rule_args& a, RuleProblem* p, Metadata* m, int64_t longest) {
  if (!c->optional("token_state_indices", a.token_state_indices, validation::kIndices, {{"N", p->N}, {"S", kAnySize}},
                   &p->token_indices) ||
      !c->optional("num_accepted", a.num_accepted, validation::kIndices, {{"N", p->N}}, &p->num_accepted) ||
      !c->host_metadata(p->token_indices, &m->token_indices) || !c->host_metadata(p->num_accepted, &m->num_accepted)) {
    return false;
  }
  if (!m->token_indices.present()) {
    return !m->num_accepted.present() ||
           c->invalid("num_accepted", "a tensor without token_state_indices", "NULL, or token_state_indices beside it");
  }
  const int64_t columns = m->token_indices.shape[1];
  if (columns < longest) {
    return c->invalid("token_state_indices", "S = " + std::to_string(columns),
                      "S of at least the longest sequence, " + std::to_string(longest));
  }
  if (columns > 0 && p->N > validation::kMaxIndexEntries / columns) {
    return c->unsupported("token_state_indices", std::to_string(p->N) + " x " + std::to_string(columns) + " entries",
                          "at most " + std::to_string(validation::kMaxIndexEntries));
  }
  p->token_slot_columns = columns;
  if (!m->readable) return true;
  p->token_slots.assign(static_cast<size_t>(p->N * columns), -1);
  if (m->token_indices.data == nullptr) return true;  // plan only
  for (int64_t n = 0; n < p->N; ++n) {
    if (!check_token_row(c, a, p, *m, n)) return false;
  }
  return true;
}

bool check_checkpoints(Checker* c, const gdn_rule_args& a, RuleProblem* p, Metadata* m) {
  if (a.checkpoints == nullptr) {
    if (a.checkpoint_indices != nullptr) {
      return c->invalid("checkpoint_indices", "a tensor without checkpoints", "NULL, or checkpoints beside it");
    }
    return a.checkpoint_every >= 0 ||
           c->invalid("checkpoint_every", std::to_string(a.checkpoint_every), "0 without checkpoints");
  }
  if (a.checkpoint_every < 1) {
    return c->invalid("checkpoint_every", std::to_string(a.checkpoint_every), "at least 1 with checkpoints");
  }
  if (!read_state(c, "checkpoints", a.checkpoints, a, *p, {"slots", kAnySize}, true, &p->checkpoints) ||
      !c->optional("checkpoint_indices", a.checkpoint_indices, validation::kIndices, {{"M", kAnySize}},
                   &p->checkpoint_indices) ||
      !c->host_metadata(p->checkpoint_indices, &m->checkpoint_indices)) {
    return false;
  }
  int64_t count = 0;  // cannot overflow: at most the number of tokens of all sequences
  if (!m->readable && !p->cu_seqlens.present()) count = p->N * (p->T / a.checkpoint_every);
  for (Sequence& seq : p->seqs) {
    seq.checkpoint_begin = count;
    count += seq.len / a.checkpoint_every;
  }
  const View& indices = m->checkpoint_indices;
  const int64_t room = indices.present() ? indices.shape[0] : p->checkpoints.shape[0];
  if (room < count) {
    return c->invalid(indices.present() ? "checkpoint_indices" : "checkpoints",
                      "room for " + std::to_string(room) + " states",
                      "at least M = " + std::to_string(count) + " (one per " + std::to_string(a.checkpoint_every) +
                          " tokens of every sequence)");
  }
  if (count > validation::kMaxIndexEntries) {
    return c->unsupported("checkpoint_every", std::to_string(count) + " checkpoints",
                          "at most " + std::to_string(validation::kMaxIndexEntries));
  }
  p->checkpoint_every = a.checkpoint_every;
  if (!m->readable) return true;
  p->checkpoint_slots.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    int64_t slot = i;
    if (indices.present()) slot = indices.data != nullptr ? read_index(indices, i) : -1;
    if (indices.present() && validation::is_null_slot(slot, a.null_slots)) slot = -1;
    if (slot >= p->checkpoints.shape[0]) {
      return c->invalid("checkpoint_indices", "checkpoint_indices[" + std::to_string(i) + "] = " + std::to_string(slot),
                        "a row below " + std::to_string(p->checkpoints.shape[0]) + ", or a null slot");
    }
    p->checkpoint_slots[static_cast<size_t>(i)] = slot;
  }
  return true;
}

bool run(Checker* c, int32_t op, const gdn_rule_args* args, RuleProblem* p) {
  gdn_rule_args a;
  Metadata m;
  if (!c->read_struct(args, kFirstSize, sizeof(a), &a)) return false;
  p->op = op;
  c->set_stream(a.stream);
  if (!check_scalars(c, a, p) || !check_tensors(c, a, p) ||
      !c->optional("cu_seqlens", a.cu_seqlens, validation::kIndices, {{"N + 1", kAnySize}}, &p->cu_seqlens) ||
      !c->host_metadata(p->cu_seqlens, &m.cu_seqlens) || !c->earlier_errors()) {
    return false;
  }
  static_cast<Place&>(*p) = c->place();
  p->zero_tail = a.zero_tail != 0 && p->cu_seqlens.present() && p->T > 0;
  m.readable = !c->on_cuda() || (validation::debug_checks() && !c->plan_only());
  int64_t longest = 0;
  if (m.readable) {
    if (!validation::build_sequences(c, m.cu_seqlens, p->B, p->T, &p->seqs)) return false;
    p->N = static_cast<int64_t>(p->seqs.size());
    for (const Sequence& seq : p->seqs) longest = std::max(longest, seq.len);
    if (c->on_cuda() && p->cu_seqlens.present() && a.max_seqlen != 0 && a.max_seqlen < longest) {
      return c->invalid("max_seqlen", std::to_string(a.max_seqlen),
                        "at least the longest sequence, " + std::to_string(longest) + ", or 0 (GDN_CHECK)");
    }
  } else {
    // What is known without a look at the device: the lengths of a batch, not those of cu_seqlens.
    if (!validation::count_sequences(c, p->cu_seqlens, p->B, &p->N)) return false;
    if (!p->cu_seqlens.present()) longest = p->N > 0 ? p->T : 0;
  }

  if (op == GDN_OP_CHUNK_FORWARD) {
    const char* named = a.token_state_indices != nullptr ? "token_state_indices"
                        : a.num_accepted != nullptr      ? "num_accepted"
                        : a.snapshots != nullptr         ? "snapshots"
                                                         : nullptr;
    if (named != nullptr) return c->invalid(named, "a tensor", "NULL: multi-token verify is gdn_recurrent's");
  }
  if (!check_states(c, a, p, &m) || !check_token_slots(c, a, p, &m, longest)) return false;
  if (!m.token_indices.present() && m.readable) {
    const validation::SlotArguments slots{&p->initial_state, &p->final_state, &m.initial_indices,
                                          &m.final_indices,  &m.has_initial,  a.null_slots};
    if (!validation::build_slots(c, slots, &p->seqs)) return false;
  }
  if (a.snapshots != nullptr) {
    const validation::Dim dim_k{"K", p->K}, dim_v{"V", p->V};
    const bool v_first = a.state_layout == GDN_STATE_V_FIRST;
    if (!c->optional("snapshots", a.snapshots, validation::kFloatsAndF64,
                     {{"N", p->N}, {"S", kAnySize}, {"Hv", p->Hv}, v_first ? dim_v : dim_k, v_first ? dim_k : dim_v},
                     &p->snapshots, true)) {
      return false;
    }
    if (v_first) {
      std::swap(p->snapshots.shape[3], p->snapshots.shape[4]);
      std::swap(p->snapshots.stride[3], p->snapshots.stride[4]);
    }
    if (p->snapshots.shape[1] < longest) {
      return c->invalid("snapshots", "S = " + std::to_string(p->snapshots.shape[1]),
                        "S of at least the longest sequence, " + std::to_string(longest));
    }
  }
  // A sequence's bits may depend on its own length and on the length of segments that the caller names, on no plan.
  const bool few = p->Hv == 0 || p->N <= validation::split_pairs() / p->Hv;
  if (p->split_tokens == 0 ? p->batch_invariant || !few : p->split_tokens >= p->T) p->split = GDN_SPLIT_OFF;
  if (c->on_cuda()) {
    p->workspace = a.workspace;
    p->workspace_bytes = a.workspace_bytes;
  }
  if (!check_checkpoints(c, a, p, &m) || !check_overlaps(c, *p)) return false;
  if (validation::debug_checks() && m.readable && !check_duplicates(c, *p)) return false;
  if (!c->on_cuda()) return true;
  // Kernels read the device's values, which a graph's replay may have changed by then.
  p->seqs.clear();
  p->token_slots.clear();
  p->checkpoint_slots.clear();
  p->null_slots = a.null_slots;
  p->max_seqlen = p->cu_seqlens.present() ? std::min(a.max_seqlen, p->T) : p->T;
  if (!p->final_indices.present() && validation::same_view(p->initial_state, p->final_state)) {
    p->final_indices = p->initial_indices;
  }
  return true;
}

}  // namespace

Status validate(int32_t op, const gdn_rule_args* args, bool plan_only, RuleProblem* out) {
  reset(out);
  Checker checker(op == GDN_OP_RECURRENT ? "recurrent" : "chunk_forward", plan_only);
  run(&checker, op, args, out);
  return checker.take();
}

}  // namespace gdn
