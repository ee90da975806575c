// SPDX-License-Identifier: MIT
// Splitting a delta-rule problem into items for the pool, and the SIMD entries of the implementation list.
#include "cpu/rule.h"

#include <algorithm>
#include <atomic>

#include "cpu/parallel.h"

namespace gdn::cpu {
namespace {

// Every (sequence, key head) is cut into `head_parts` x `panel_parts` items. Bits do not depend on it: heads and V
// columns never meet.
struct Split {
  int64_t head_parts = 1, panel_parts = 1;
  int64_t heads = 0, columns = 0;  // per item, rounded up
  int64_t items_per_key_head() const { return head_parts * panel_parts; }
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `shared`: cost, in units of one panel, of what every item of a key head repeats (rows of q and k and their products).
Split choose_split(const RuleProblem& p, int64_t panel, int64_t threads, double shared) {
  const int64_t group = p.Hv / p.Hk, panels = ceil_div(p.V, panel), base = p.N * p.Hk;
  Split best;
  double best_time = 0;
  for (int64_t parts = 1; parts <= group * panels; ++parts) {
    Split s;
    s.head_parts = std::min(parts, group);
    s.panel_parts = std::min(ceil_div(parts, group), panels);
    s.heads = ceil_div(group, s.head_parts);
    s.columns = ceil_div(panels, s.panel_parts) * panel;
    s.head_parts = ceil_div(group, s.heads);
    s.panel_parts = ceil_div(p.V, s.columns);
    const double rounds = static_cast<double>(ceil_div(base * s.items_per_key_head(), threads));
    const double time = rounds * (shared + static_cast<double>(s.heads * s.columns / panel));
    if (parts == 1 || time < best_time * 0.999) {
      best = s;
      best_time = time;
    }
  }
  return best;
}

RuleItem item_of(const RuleProblem& p, const Split& s, int64_t index) {
  const int64_t group = p.Hv / p.Hk;
  const int64_t panel_part = index % s.panel_parts;
  index /= s.panel_parts;
  const int64_t head_part = index % s.head_parts;
  index /= s.head_parts;
  const int64_t key_head = index % p.Hk;
  RuleItem item;
  item.seq = index / p.Hk;
  item.head_begin = key_head * group + head_part * s.heads;
  item.head_end = std::min(item.head_begin + s.heads, (key_head + 1) * group);
  item.v_begin = panel_part * s.columns;
  item.v_end = std::min(item.v_begin + s.columns, p.V);
  return item;
}

constexpr int64_t kRecurrentPanel = 64;

Split split_of(const RuleProblem& p, Isa isa, bool chunk, int64_t threads) {
  return chunk ? choose_split(p, isa_table(isa).rule->panel_v, threads, 0.5)
               : choose_split(p, kRecurrentPanel, threads, 0.05);
}

void plan(const RuleProblem& p, Isa isa, bool chunk, Plan* out) {
  const RuleKernels& kernels = *isa_table(isa).rule;
  const int64_t threads = effective_threads(p.num_threads);
  const Split s = split_of(p, isa, chunk, threads);
  out->work_items = p.N * p.Hk * s.items_per_key_head();
  out->threads = static_cast<int32_t>(std::clamp<int64_t>(out->work_items, 1, threads));
  out->panel_v = s.columns;
  out->block_tokens = chunk ? kernels.block_tokens : 1;
  out->scratch_bytes = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    RuleItem item = item_of(p, s, 0);
    item.seq = n;
    out->scratch_bytes =
        std::max(out->scratch_bytes, chunk ? kernels.chunk_scratch(p, item) : kernels.recurrent_scratch(p, item));
  }
}

Status run(const RuleProblem& p, Isa isa, bool chunk, const Plan& made) {
  const RuleKernels& kernels = *isa_table(isa).rule;
  const Split s = split_of(p, isa, chunk, effective_threads(p.num_threads));
  std::atomic<bool> short_of_memory{false};
  auto work = [&](int64_t index, int32_t) {
    const RuleItem item = item_of(p, s, index);
    void* memory = scratch(static_cast<size_t>(made.scratch_bytes));
    if (memory == nullptr) {
      short_of_memory.store(true, std::memory_order_relaxed);
      return;
    }
    (chunk ? kernels.chunk : kernels.recurrent)(p, item, memory);
  };
  parallel_for(made.work_items, made.threads, work);
  if (short_of_memory.load()) {
    return Status(GDN_OUT_OF_MEMORY, std::string(chunk ? "chunk_forward" : "recurrent") + ": scratch of " +
                                         std::to_string(made.scratch_bytes) +
                                         " bytes per thread could not be allocated");
  }
  return Status();
}

}  // namespace

const char* refuse_simd(const RuleProblem&) { return nullptr; }  // F64 is refused by the list

void plan_chunk(const RuleProblem& p, Isa isa, Plan* out) { plan(p, isa, true, out); }
Status run_chunk(const RuleProblem& p, Isa isa, const Plan& made) { return run(p, isa, true, made); }
void plan_recurrent(const RuleProblem& p, Isa isa, Plan* out) { plan(p, isa, false, out); }
Status run_recurrent(const RuleProblem& p, Isa isa, const Plan& made) { return run(p, isa, false, made); }

}  // namespace gdn::cpu
