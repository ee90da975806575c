// SPDX-License-Identifier: MIT
// The AMX prefill implementation's entry in the list: what it refuses, how a problem is split, the run. Compiled for
// any CPU.
#include <algorithm>
#include <atomic>
#include <cstdio>

#include "cpu/amx/chunk_kernel.h"
#include "cpu/parallel.h"
#include "cpu/rule.h"

namespace gdn::cpu {
namespace {

// Shorter prompts are cheaper token by token with the SIMD kernels than as one padded chunk.
constexpr int64_t kMinTokens = 16;

bool is_float(const View& x) { return x.dtype == GDN_F32 || x.dtype == GDN_BF16 || x.dtype == GDN_F16; }

const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case GDN_F32:
      return "f32";
    case GDN_BF16:
      return "bf16";
    case GDN_F16:
      return "f16";
    case GDN_F64:
      return "f64";
    default:
      return "an integer dtype";
  }
}

template <class... Args>
const char* reason(const char* format, Args... args) {
  static thread_local char text[160];
  std::snprintf(text, sizeof(text), format, args...);
  return text;
}

struct Split {
  int64_t heads, panel_v;  // of an item
  int64_t items;
};

// Relative costs of a chunk in units of one head's 32 V columns: what is shared by an item's heads, what each head
// repeats per panel.
constexpr double kSharedCost = 0.8, kHeadCost = 0.8, kColumnsCost = 1.0;

Split choose_split(const RuleProblem& p, int32_t threads) {
  const int64_t per_key = p.Hv / p.Hk, sequences = static_cast<int64_t>(p.seqs.size());
  int64_t longest = 0, total = 0;
  for (const Sequence& seq : p.seqs) {
    longest = std::max(longest, seq.len);
    total += seq.len;
  }
  Split best{per_key, p.V, 0};
  double best_cost = 0;
  for (const int64_t heads : {per_key, int64_t{1}}) {
    for (int64_t parts = 1; parts <= p.V / 32; ++parts) {
      if (p.V % (32 * parts) != 0) continue;
      const Split split{heads, p.V / parts, sequences * p.Hk * (per_key / heads) * parts};
      const double chunk = kSharedCost + static_cast<double>(heads) *
                                             (kHeadCost + kColumnsCost * static_cast<double>(split.panel_v) / 32);
      const double per_sequence = static_cast<double>(p.Hk * (per_key / heads) * parts);
      // One sequence: whole waves of equal items. Several: the pool evens them out down to the longest item.
      const double waves =
          sequences == 1 ? static_cast<double>((split.items + threads - 1) / threads) : per_sequence / threads;
      const double cost =
          chunk * std::max(static_cast<double>(sequences == 1 ? longest : total) * waves, static_cast<double>(longest));
      if (best.items == 0 || cost < 0.97 * best_cost) {
        best = split;
        best_cost = cost;
      }
    }
  }
  return best;
}

}  // namespace

const char* refuse_amx(const RuleProblem& p) {
  if (p.op != GDN_OP_CHUNK_FORWARD) return "serves chunk_forward only";
  for (const View* x : {&p.q, &p.k, &p.v}) {
    if (x->dtype != GDN_BF16) return reason("AMX tiles need bf16 q, k and v; found %s", dtype_name(x->dtype));
  }
  const struct {
    const View* view;
    const char* name;
  } floats[] = {{&p.g, "g"},
                {&p.beta, "beta"},
                {&p.A_log, "A_log"},
                {&p.dt_bias, "dt_bias"},
                {&p.o, "o"},
                {&p.initial_state, "initial_state"},
                {&p.final_state, "final_state"},
                {&p.checkpoints, "checkpoints"}};
  for (const auto& f : floats) {
    if (f.view->present() && !is_float(*f.view))
      return reason("argument '%s' is %s; f32, bf16 or f16 is needed", f.name, dtype_name(f.view->dtype));
  }
  if (p.K % 32 != 0 || p.V % 32 != 0 || p.K > amx::kMaxDim || p.V > amx::kMaxDim) {
    return reason("K and V must be multiples of 32 up to %d; found K = %lld, V = %lld", static_cast<int>(amx::kMaxDim),
                  static_cast<long long>(p.K), static_cast<long long>(p.V));
  }
  if (p.checkpoints.present() && p.checkpoint_every < kMinTokens) {
    return reason("checkpoints every %lld tokens leave chunks shorter than %lld",
                  static_cast<long long>(p.checkpoint_every), static_cast<long long>(kMinTokens));
  }
  if (p.batch_invariant) return nullptr;  // the choice must not depend on the other sequences' lengths
  int64_t longest = 0;
  for (const Sequence& seq : p.seqs) longest = std::max(longest, seq.len);
  if (longest < kMinTokens) {
    return reason("the longest sequence has %lld tokens; fewer than %lld are faster token by token",
                  static_cast<long long>(longest), static_cast<long long>(kMinTokens));
  }
  return nullptr;
}

namespace {

void make_plan(const RuleProblem& p, bool exact, Plan* plan) {
  plan->threads = effective_threads(p.num_threads);
  const Split split = choose_split(p, plan->threads);
  plan->work_items = split.items;
  plan->panel_v = split.panel_v;
  plan->block_tokens = amx::kChunk;
  plan->scratch_bytes = amx::item_scratch_bytes(p.K, split.panel_v, split.heads, exact);
}

Status run(const RuleProblem& p, bool exact, const Plan& plan) {
  const Split split = choose_split(p, plan.threads);
  const int64_t per_key = p.Hv / p.Hk, head_parts = per_key / split.heads, panels = p.V / split.panel_v;
  const size_t scratch_bytes = static_cast<size_t>(amx::item_scratch_bytes(p.K, split.panel_v, split.heads, exact));
  const auto memory_short = [&] {
    return Status(GDN_OUT_OF_MEMORY, "chunk_forward: could not allocate " + std::to_string(scratch_bytes) +
                                         " bytes of scratch per thread");
  };
  if (scratch(scratch_bytes) == nullptr) return memory_short();
  std::atomic<bool> failed{false};
  auto work = [&](int64_t index, int32_t) {
    void* memory = scratch(scratch_bytes);
    if (memory == nullptr) {
      failed.store(true, std::memory_order_relaxed);
      return;
    }
    amx::Item item{};
    const int64_t panel = index % panels;
    index /= panels;
    item.j_begin = index % head_parts * split.heads;
    index /= head_parts;
    item.key_head = index % p.Hk;
    item.seq = index / p.Hk;
    item.j_end = item.j_begin + split.heads;
    item.v_begin = panel * split.panel_v;
    item.v_end = item.v_begin + split.panel_v;
    amx::run_item(p, item, exact, memory);
  };
  parallel_for(split.items, plan.threads, work);
  return failed.load() ? memory_short() : Status();
}

}  // namespace

void plan_amx(const RuleProblem& p, Plan* plan) { make_plan(p, false, plan); }
Status run_amx(const RuleProblem& p, const Plan& plan) { return run(p, false, plan); }
void plan_amx_exact(const RuleProblem& p, Plan* plan) { make_plan(p, true, plan); }
Status run_amx_exact(const RuleProblem& p, const Plan& plan) { return run(p, true, plan); }

}  // namespace gdn::cpu
