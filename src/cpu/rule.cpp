// SPDX-License-Identifier: MIT
// Splitting the delta rule into work items, and the SIMD entries of the implementation list.
//
// An item is one sequence, some value heads of one key head, some columns of V. Heads and columns never exchange
// anything and each column is computed by the same instructions in the same order wherever the cuts fall, so bits
// depend neither on the split nor on the thread count nor on the other sequences of the call: batch_invariant needs no
// mode of its own.
#include "cpu/rule.h"

#include <algorithm>
#include <atomic>

#include "cpu/parallel.h"

namespace gdn::cpu {
namespace {

// The state that an item keeps warm from block to block should leave room in a 512 KiB L2.
constexpr int64_t kMaxItemStateBytes = 256 * 1024;
// Below this many multiply-adds per thread (a few microseconds) waking another thread costs more than it saves.
constexpr int64_t kMinWorkPerThread = 150'000;
// Columns of V in the token loop's items: whole panels on every ISA.
constexpr int64_t kRecurrentColumns = 64;

struct Lengths {
  int64_t total = 0, longest = 0, longest_index = 0;
  bool equal = true;
  explicit Lengths(const RuleProblem& p) {
    for (size_t n = 0; n < p.seqs.size(); ++n) {
      // A sequence without tokens still passes its state on.
      const int64_t len = std::max<int64_t>(p.seqs[n].len, 1);
      if (n > 0 && len != longest) equal = false;
      total += len;
      if (len > longest) {
        longest = len;
        longest_index = static_cast<int64_t>(n);
      }
    }
  }
};

struct Split {
  int64_t heads;    // value heads per item
  int64_t columns;  // V columns per item
};

int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

int64_t items_per_sequence(const RuleProblem& p, const Split& s) {
  return p.Hk * parts(p.Hv / p.Hk, s.heads) * parts(p.V, s.columns);
}

// Multiply-adds per token of one item / K: 3 per state element, and what every item of a key head repeats (packing and
// the pair products) or every head does (gates, substitution), estimated relative to the former.
double item_cost(const Split& s, bool chunk) {
  const double heads = static_cast<double>(s.heads), columns = static_cast<double>(s.columns);
  return chunk ? 40.0 + heads * (10.0 + 3.3 * columns) : 4.0 + heads * (4.0 + 3.0 * columns);
}

double makespan(const RuleProblem& p, const Lengths& lengths, const Split& s, int32_t threads, bool chunk) {
  const double per_sequence = static_cast<double>(items_per_sequence(p, s)), cost = item_cost(s, chunk);
  const double longest = cost * static_cast<double>(lengths.longest);
  if (lengths.equal) {
    const int64_t items = items_per_sequence(p, s) * p.N;
    return longest * static_cast<double>(parts(items, threads));
  }
  // Items are handed out in order: at worst everybody waits for one long item that started last.
  const double share = cost * per_sequence * static_cast<double>(lengths.total) / threads;
  return std::max(longest, share + 0.5 * longest * (threads - 1) / threads);
}

// Halves heads, then columns; each step makes the same work finer.
bool refine(Split* s, int64_t panel) {
  if (s->heads > 1) {
    s->heads = parts(s->heads, 2);
    return true;
  }
  if (s->columns <= panel) return false;
  s->columns = parts(parts(s->columns, panel), 2) * panel;
  return true;
}

Split choose_split(const RuleProblem& p, const Lengths& lengths, int32_t threads, int64_t panel, bool chunk) {
  Split s{p.Hv / p.Hk, parts(p.V, panel) * panel};
  if (chunk) {
    while (s.heads * s.columns * p.K * 4 > kMaxItemStateBytes && refine(&s, panel)) {
    }
  }
  if (threads == 1) return s;
  Split best = s;
  double best_time = makespan(p, lengths, s, threads, chunk);
  while (refine(&s, panel)) {
    const double time = makespan(p, lengths, s, threads, chunk);
    if (time < 0.97 * best_time) {
      best = s;
      best_time = time;
    }
  }
  return best;
}

int32_t useful_threads(const RuleProblem& p, const Lengths& lengths) {
  const int32_t threads = effective_threads(p.num_threads);
  const int64_t work = 3 * p.K * p.V * p.Hv * lengths.total;
  return static_cast<int32_t>(std::clamp<int64_t>(work / kMinWorkPerThread, 1, threads));
}

void make_plan(const RuleProblem& p, const RuleKernels& kernels, bool chunk, Plan* plan) {
  const Lengths lengths(p);
  const int64_t panel = chunk ? kernels.panel_v : kRecurrentColumns;
  const int32_t threads = useful_threads(p, lengths);
  const Split s = choose_split(p, lengths, threads, panel, chunk);
  plan->work_items = p.N * items_per_sequence(p, s);
  plan->threads = static_cast<int32_t>(std::clamp<int64_t>(plan->work_items, 1, threads));
  plan->panel_v = std::min(s.columns, p.V);
  plan->block_tokens = chunk ? kernels.block_tokens : 1;
  plan->scratch_bytes = 0;
  if (p.N == 0) return;
  // The longest sequence's item is the largest: what scratch an item needs grows with its sequence, to a bound.
  const RuleItem item{lengths.longest_index, 0, s.heads, 0, std::min(s.columns, p.V)};
  plan->scratch_bytes = chunk ? kernels.chunk_scratch(p, item) : kernels.recurrent_scratch(p, item);
}

Status run(const RuleProblem& p, const Plan& plan, int64_t scratch_bytes, const char* function,
           void (*kernel)(const RuleProblem&, const RuleItem&, void*)) {
  if (plan.work_items == 0) return Status();
  const auto no_memory = [&] {
    return Status(GDN_OUT_OF_MEMORY, std::string(function) + ": argument 'num_threads': found no memory for " +
                                         std::to_string(scratch_bytes) +
                                         " bytes of scratch, expected that much per thread");
  };
  if (scratch(static_cast<size_t>(scratch_bytes)) == nullptr) return no_memory();
  const int64_t v_parts = parts(p.V, plan.panel_v);
  const int64_t head_parts = plan.work_items / (p.N * p.Hk * v_parts);
  const int64_t per_key_head = p.Hv / p.Hk, heads = parts(per_key_head, head_parts);
  std::atomic<bool> failed{false};
  auto work = [&](int64_t index, int32_t) {
    const int64_t v_part = index % v_parts;
    index /= v_parts;
    const int64_t head_part = index % head_parts;
    index /= head_parts;
    const int64_t first = head_part * heads, last = std::min(first + heads, per_key_head);
    if (first >= last) return;
    const int64_t key_head = index % p.Hk;
    RuleItem item;
    item.seq = index / p.Hk;
    // Ordinals in key-head order; the kernels map them to heads (see value_head_of in isa/rule-inl.h).
    item.head_begin = key_head * per_key_head + first;
    item.head_end = key_head * per_key_head + last;
    item.v_begin = v_part * plan.panel_v;
    item.v_end = std::min(item.v_begin + plan.panel_v, p.V);
    void* memory = scratch(static_cast<size_t>(scratch_bytes));
    if (memory == nullptr) {
      failed.store(true, std::memory_order_relaxed);
      return;
    }
    kernel(p, item, memory);
  };
  parallel_for(plan.work_items, plan.threads, work);
  return failed.load() ? no_memory() : Status();
}

}  // namespace

const char* refuse_simd(const RuleProblem& p) {
  for (const View* v : {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.A_log, &p.dt_bias, &p.o, &p.initial_state, &p.final_state,
                        &p.snapshots, &p.checkpoints}) {
    if (v->present() && v->dtype == GDN_F64) return "takes no F64 tensors";
  }
  return nullptr;
}

void plan_chunk(const RuleProblem& p, Isa isa, Plan* plan) { make_plan(p, *isa_table(isa).rule, true, plan); }
void plan_recurrent(const RuleProblem& p, Isa isa, Plan* plan) { make_plan(p, *isa_table(isa).rule, false, plan); }

Status run_chunk(const RuleProblem& p, Isa isa, const Plan& plan) {
  return run(p, plan, plan.scratch_bytes, "chunk_forward", isa_table(isa).rule->chunk);
}
Status run_recurrent(const RuleProblem& p, Isa isa, const Plan& plan) {
  return run(p, plan, plan.scratch_bytes, "recurrent", isa_table(isa).rule->recurrent);
}

}  // namespace gdn::cpu
