// SPDX-License-Identifier: MIT
// AMX prefill, one work item: a sequence, the value heads of one key head (or some of them), a panel of V columns.
// Chunks of 64 tokens in the WY form (chunk_stages.h); a chunk that form does not serve exactly enough (see
// prepare_gates) runs token by token in fp32 on the same resident state.
#ifndef GDN_ISA_NS
#define GDN_ISA_NS n_amx
#endif
#ifndef HWY_COMPILE_ONLY_STATIC
#define HWY_COMPILE_ONLY_STATIC
#endif
#include "cpu/amx/chunk_kernel.h"

#include "cpu/amx/chunk_io.h"
#include "cpu/amx/chunk_scratch.h"
#include "cpu/amx/chunk_stages.h"

#if defined(GDN_AMX_STAGES)
#include <x86intrin.h>
#endif

namespace gdn::cpu::amx {
namespace {

#if defined(GDN_AMX_STAGES)
thread_local uint64_t t_stages[kNumStages];
class StageClock {
 public:
  void charge(Stage stage) {
    const uint64_t now = __rdtsc();
    t_stages[stage] += now - last_;
    last_ = now;
  }

 private:
  uint64_t last_ = __rdtsc();
};
#else
struct StageClock {
  void charge(Stage) {}
};
#endif

// The recurrence itself on the resident state, whose sigma is 1. Sums over k in four interleaved chains of fixed order.
void token_loop(const RuleProblem& p, const Rows& rows, int64_t h, int64_t v_begin, float scale, const Scratch& s,
                const HeadState& head) {
  const int64_t K = s.kt * 16;
  for (int64_t t = 0; t < rows.n; ++t) {
    unpack_row(s.ka, s.kappas, t, s.rk[t], s.row_k);
    unpack_row(s.qa, s.kappas, t, s.rq[t], s.row_q);
    load_row(p.v.at(rows.batch, rows.token + t, h, v_begin), GDN_BF16, p.v.stride[3], s.vt * 16, s.io_row);
    VecF qk{};
    for (int64_t k = 0; k < K; k += 16) qk = qk + load(s.row_q + k) * load(s.row_k + k);
    const float q_dot_k = sum_lanes(qk);
    const float alpha = std::exp(s.g[t]), beta = s.beta[t];
    for (int64_t vt = 0; vt < s.vt; ++vt) {
      float* col = tile_at(head.s, vt * s.kt);
      VecF sk[4] = {}, sq[4] = {};
      for (int64_t k = 0; k < K; k += 4) {
        for (int64_t c = 0; c < 4; ++c) {
          const VecF x = load(col + (k + c) * 16);
          sk[c] = sk[c] + x * s.row_k[k + c];
          sq[c] = sq[c] + x * s.row_q[k + c];
        }
      }
      const VecF u = (load(s.io_row + vt * 16) - ((sk[0] + sk[1]) + (sk[2] + sk[3])) * alpha) * beta;
      store(s.out_row + vt * 16, (((sq[0] + sq[1]) + (sq[2] + sq[3])) * alpha + u * q_dot_k) * scale);
      for (int64_t k = 0; k < K; ++k) store(col + k * 16, load(col + k * 16) * alpha + u * s.row_k[k]);
    }
    store_row(s.out_row, p.o.at(rows.batch, rows.token + t, h, v_begin), p.o.dtype, p.o.stride[3], s.vt * 16);
  }
}

// Rows that the stages of one head are to ask for: o of this chunk; v of the next; the head's share of the next q and
// k.
RowPrefetcher head_prefetch(const RuleProblem& p, const Rows& rows, const Item& item, int64_t j, int64_t h) {
  RowPrefetcher prefetch;
  const int64_t panel = item.v_end - item.v_begin, num_heads = item.j_end - item.j_begin;
  RowPrefetcher::Range o = rows_to_prefetch(p.o, rows, h, item.v_begin, panel, 0, rows.n, 0);
  o.write = true;
  prefetch.add(o);
  prefetch.add(rows_to_prefetch(p.v, rows, h, item.v_begin, panel, 0, kChunk, kChunk));
  const int64_t begin = kChunk * j / num_heads, end = kChunk * (j + 1) / num_heads;
  prefetch.add(rows_to_prefetch(p.k, rows, item.key_head, 0, p.K, begin, end, kChunk));
  prefetch.add(rows_to_prefetch(p.q, rows, item.key_head, 0, p.K, begin, end, kChunk));
  return prefetch;
}

// Chunk form for one head; false (with nothing written) if a value turned out not to be finite.
template <bool kExact>
bool chunk_head(const RuleProblem& p, const Rows& rows, int64_t h, int64_t v_begin, float scale, const Scratch& s,
                HeadState* head, RowPrefetcher prefetch, StageClock* clock) {
  const int64_t pairs = rows.pairs();
  // sigma must stay far from the ends of fp32: 2^-40 of head room on either side of what the state itself needs.
  double next_sigma = head->sigma * std::exp(s.cum_g[pairs * 32 - 1]);
  double rescale = 1;
  if (!(next_sigma >= 0x1p-40 && next_sigma <= 0x1p40)) {
    rescale = next_sigma;
    next_sigma = 1;
  }
  row_factors(rows, s, scale, head->sigma, next_sigma);
  if (!head->packed) pack_state<kExact>(s, head);
  StateReader<kExact> reader(s, *head, pairs);
  gate_scores<kExact>(s, pairs, scale, &reader, &prefetch);
  clock->charge(kStageGates);
  reader.finish();
  clock->charge(kStageRead);
  residual(p, rows, h, v_begin, s);
  const bool finite = solve(s, pairs, &prefetch);
  clock->charge(kStageSolve);
  if (!finite) return false;
  rescale_state(s, head, rescale);
  // The vector work of either side runs between the other's tile blocks: packing of the update's operand inside P U',
  // stores of o inside the update.
  const int64_t rows_per_block = (rows.n + s.kappas - 1) / s.kappas;
  for (int64_t vt = 0; vt < s.vt; vt += 2) {
    local_output<kExact>(s, pairs, vt, [&](int64_t step) { pack_update(s, step, vt, vt + 2); });
    clock->charge(kStageOutput);
    update_state<kExact>(s, *head, pairs, vt, [&](int64_t block) {
      prefetch.ticks(4);
      write_output(p, rows, h, v_begin, s, vt, block * rows_per_block, std::min(rows.n, (block + 1) * rows_per_block));
    });
    clock->charge(kStageUpdate);
  }
  finish_update<kExact>(s, head);
  head->sigma = next_sigma;
  clock->charge(kStageUpdate);
  return true;
}

}  // namespace

uint64_t* stage_cycles() {
#if defined(GDN_AMX_STAGES)
  return t_stages;
#else
  static thread_local uint64_t none[kNumStages];
  return none;
#endif
}

int64_t item_scratch_bytes(int64_t K, int64_t panel_v, int64_t num_heads, bool exact) {
  Scratch s{};
  return carve(nullptr, K, panel_v, num_heads, exact, &s);
}

void run_item(const RuleProblem& p, const Item& item, bool exact, void* scratch) {
  const int64_t num_heads = item.j_end - item.j_begin, per_key = p.Hv / p.Hk;
  Scratch s{};
  carve(static_cast<char*>(scratch), p.K, item.v_end - item.v_begin, num_heads, exact, &s);
  const auto value_head = [&](int64_t j) {
    return p.head_map == GDN_HEADS_TILED ? (item.j_begin + j) * p.Hk + item.key_head
                                         : item.key_head * per_key + item.j_begin + j;
  };
  const Sequence seq = p.seqs[static_cast<size_t>(item.seq)];
  if (seq.is_null) {
    for (int64_t j = 0; j < num_heads; ++j) zero_output(p, seq, value_head(j), item.v_begin, s);
    return;
  }
  StageClock clock;
  tile_config();
  for (int64_t j = 0; j < num_heads; ++j) {
    load_state(p.initial_state, p.initial_state.present() ? seq.read_slot : -1, value_head(j), item.v_begin, s,
               &s.heads[j]);
  }
  clock.charge(kStageState);

  const float scale = static_cast<float>(p.scale);
  const int64_t every = p.checkpoints.present() ? p.checkpoint_every : seq.len + 1;
  for (int64_t t = 0; t < seq.len;) {
    const int64_t n = std::min({kChunk, seq.len - t, every - t % every});
    const Rows rows{seq.batch, seq.begin + t, n, seq.len - t - n};
    const bool tokens_only = rows.n <= kTokenLoopRows;
    bool keys_fit = load_rows(p, p.k, rows, item.key_head, s.kappas, s.ka, s.norm_k2, s.rk);
    keys_fit = load_rows(p, p.q, rows, item.key_head, s.kappas, s.qa, s.fo, s.rq) &&
               keys_fit;  // fo: the norms of q are not needed
    if (!tokens_only) transpose_keys(s, rows.pairs());
    clock.charge(kStageKeys);
    if (!tokens_only) scores(s, rows.pairs());
    clock.charge(kStageScores);
    for (int64_t j = 0; j < num_heads; ++j) {
      HeadState* head = &s.heads[j];
      const int64_t h = value_head(j);
      load_gates(p, rows, h, s);
      const bool fits = prepare_gates(rows, s) && keys_fit && !tokens_only;
      const auto chunk = exact ? chunk_head<true> : chunk_head<false>;
      if (!fits || !chunk(p, rows, h, item.v_begin, scale, s, head, head_prefetch(p, rows, item, j, h), &clock)) {
        rescale_state(s, head, head->sigma);
        token_loop(p, rows, h, item.v_begin, scale, s, *head);
        head->packed = false;
        clock.charge(kStageTokens);
      }
    }
    t += rows.n;
    if (p.checkpoints.present() && t % every == 0) {
      const int64_t slot = p.checkpoint_slots[static_cast<size_t>(seq.checkpoint_begin + t / every - 1)];
      for (int64_t j = 0; j < num_heads && slot >= 0; ++j) {
        store_state(p.checkpoints, slot, value_head(j), item.v_begin, s, s.heads[j]);
      }
      clock.charge(kStageState);
    }
  }
  if (p.final_state.present() && seq.write_slot >= 0) {
    for (int64_t j = 0; j < num_heads; ++j)
      store_state(p.final_state, seq.write_slot, value_head(j), item.v_begin, s, s.heads[j]);
  }
  tile_release();
  clock.charge(kStageState);
}

}  // namespace gdn::cpu::amx
