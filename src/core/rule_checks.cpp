// SPDX-License-Identifier: MIT
#include "core/rule_checks.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace gdn::validation {
namespace {

constexpr uintptr_t kWorkspaceAlignment = 256;

bool check_split(Checker* c, const gdn_rule_args& a, RuleProblem* p) {
  if (!c->in_range("split", a.split, GDN_SPLIT_AUTO, GDN_SPLIT_OFF) || !c->flag("split_exact", a.split_exact)) {
    return false;
  }
  if (a.split_tokens < 0 || a.split_tokens % 64 != 0) {
    return c->invalid("split_tokens", std::to_string(a.split_tokens), "a multiple of 64, or 0: the plan chooses");
  }
  if (a.split == GDN_SPLIT_OFF && a.split_tokens != 0) {
    return c->invalid("split_tokens", std::to_string(a.split_tokens) + " with split GDN_SPLIT_OFF (1)", "0");
  }
  if (!std::isfinite(a.split_threshold) || a.split_threshold < 0) {
    return c->invalid("split_threshold", std::to_string(a.split_threshold), "a finite number > 0, or 0 for 10");
  }
  if (a.workspace_bytes < 0 || (a.workspace == nullptr) != (a.workspace_bytes == 0)) {
    return c->invalid("workspace_bytes",
                      std::to_string(a.workspace_bytes) + (a.workspace == nullptr ? " with workspace NULL" : ""),
                      a.workspace == nullptr ? "0" : "the size of workspace");
  }
  if (reinterpret_cast<uintptr_t>(a.workspace) % kWorkspaceAlignment != 0) {
    return c->invalid("workspace", "an address that is not a multiple of 256", "memory aligned to 256 bytes");
  }
  p->split = a.split;
  p->split_tokens = a.split_tokens;
  p->split_exact = a.split_exact != 0;
  if (a.split_threshold > 0) p->split_threshold = a.split_threshold;
  return true;
}

}  // namespace

bool check_scalars(Checker* c, const gdn_rule_args& a, RuleProblem* p) {
  if (!(c->in_range("gate_form", a.gate_form, GDN_GATE_LOG, GDN_GATE_RAW) &&
        c->in_range("beta_form", a.beta_form, GDN_BETA_VALUE, GDN_BETA_SIGMOID2) &&
        c->in_range("head_map", a.head_map, GDN_HEADS_GROUPED, GDN_HEADS_TILED) &&
        c->in_range("state_layout", a.state_layout, GDN_STATE_K_FIRST, GDN_STATE_V_FIRST) &&
        c->in_range("null_slots", a.null_slots, GDN_NULL_NEGATIVE, GDN_NULL_NON_POSITIVE) &&
        c->flag("qk_l2norm", a.qk_l2norm) && c->flag("batch_invariant", a.batch_invariant) &&
        c->flag("round_qk", a.round_qk) && c->flag("round_beta", a.round_beta) && c->threads(a.num_threads) &&
        c->flag("zero_tail", a.zero_tail) && check_split(c, a, p))) {
    return false;
  }
  if (a.max_seqlen < 0) {
    return c->invalid("max_seqlen", std::to_string(a.max_seqlen), "a length, or 0 for unknown");
  }
  if (!std::isfinite(a.scale)) {
    return c->invalid("scale", std::to_string(a.scale), "a finite number, or 0 for K^-0.5");
  }
  if (!std::isfinite(a.l2norm_eps) || a.l2norm_eps < 0) {
    return c->invalid("l2norm_eps", std::to_string(a.l2norm_eps), "a finite number > 0, or 0 for 1e-6");
  }
  p->gate_form = a.gate_form;
  p->beta_form = a.beta_form;
  p->head_map = a.head_map;
  p->qk_l2norm = a.qk_l2norm != 0;
  p->round_qk = a.round_qk != 0;
  p->round_beta = a.round_beta != 0;
  p->batch_invariant = a.batch_invariant != 0;
  p->num_threads = a.num_threads;
  if (a.l2norm_eps > 0) p->l2norm_eps = a.l2norm_eps;
  return true;
}

bool check_duplicates(Checker* c, const RuleProblem& p) {
  std::vector<int64_t> slots = p.token_slots;
  int64_t twice = duplicate_slot(&slots);
  if (twice >= 0) {
    return c->invalid("token_state_indices", "slot " + std::to_string(twice) + " written twice",
                      "distinct slots (GDN_CHECK)");
  }
  slots.clear();
  for (const Sequence& seq : p.seqs) {
    if (seq.is_null || p.checkpoint_every == 0) continue;
    for (int64_t i = 0; i < seq.len / p.checkpoint_every; ++i) {
      slots.push_back(p.checkpoint_slots[static_cast<size_t>(seq.checkpoint_begin + i)]);
    }
  }
  twice = duplicate_slot(&slots);
  if (twice < 0) {
    const auto add_states = [&](const View& state, bool reads) {
      if (!same_view(p.checkpoints, state)) return;
      std::vector<int64_t> used = slots;
      std::vector<int64_t> states;
      for (const Sequence& seq : p.seqs) states.push_back(reads ? seq.read_slot : seq.write_slot);
      if (!reads) states.insert(states.end(), p.token_slots.begin(), p.token_slots.end());
      std::sort(states.begin(), states.end());
      states.erase(std::unique(states.begin(), states.end()), states.end());
      used.insert(used.end(), states.begin(), states.end());
      twice = std::max(twice, duplicate_slot(&used));
    };
    add_states(p.initial_state, true);
    add_states(p.final_state, false);
  }
  return twice < 0 || c->invalid("checkpoint_indices", "slot " + std::to_string(twice) + " used twice",
                                 "distinct slots (GDN_CHECK)");
}

bool check_overlaps(Checker* c, const RuleProblem& p) {
  View workspace;
  if (p.workspace != nullptr) {
    workspace.data = static_cast<char*>(p.workspace);
    workspace.dtype = GDN_U8;
    workspace.ndim = 1;
    workspace.shape[0] = p.workspace_bytes;
    workspace.stride[0] = 1;
  }
  // The latest written first: a message names the output that a caller would have to move.
  return c->all_disjoint(
      {{"workspace", &workspace},
       {"checkpoints", &p.checkpoints},
       {"snapshots", &p.snapshots},
       {"final_state", &p.final_state},
       {"o", &p.o}},
      {{"q", &p.q},
       {"k", &p.k},
       {"v", &p.v},
       {"g", &p.g},
       {"beta", &p.beta},
       {"A_log", &p.A_log},
       {"dt_bias", &p.dt_bias},
       {"initial_state", &p.initial_state},
       {"cu_seqlens", &p.cu_seqlens},
       {"initial_state_indices", &p.initial_indices},
       {"has_initial_state", &p.has_initial},
       {"final_state_indices", &p.final_indices},
       {"token_state_indices", &p.token_indices},
       {"num_accepted", &p.num_accepted},
       {"checkpoint_indices", &p.checkpoint_indices}},
      // The pool that states are read from may be the one they are written to.
      {{&p.final_state, &p.initial_state}, {&p.checkpoints, &p.initial_state}, {&p.checkpoints, &p.final_state}});
}

}  // namespace gdn::validation
