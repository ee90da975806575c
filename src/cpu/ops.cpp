// SPDX-License-Identifier: MIT
// Convolution, gate, norm and rotary embedding: splitting a call over threads. Every kernel's result is independent of
// the split, so the grain is a matter of speed only: a call below one grain runs on the calling thread.
#include <algorithm>

#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "cpu/rule.h"

namespace gdn::cpu {
namespace {

// Elements per piece of work: 5 to 20 us, what a hand-off to a sleeping thread costs.
constexpr int64_t kGrain = 32768;

const OpKernels& kernels() { return *isa_table(active_isa()).ops; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// range(begin, end) over [0, count) items of `elements` elements each.
template <class Range>
void split_range(int64_t count, int64_t elements, int32_t threads, const Range& range) {
  const int64_t block = std::max<int64_t>(1, kGrain / std::max<int64_t>(elements, 1));
  if (count <= block) {
    if (count > 0) range(int64_t{0}, count);
    return;
  }
  auto work = [&](int64_t item, int32_t) { range(item * block, std::min(count, (item + 1) * block)); };
  parallel_for(ceil_div(count, block), threads, work);
}

struct ConvSplit {
  int64_t channels = 0;       // per item
  int64_t channel_items = 1;  // items over D
  int64_t tokens = 0;         // per item
  int64_t time_items = 1;     // items over the longest sequence
};

constexpr int64_t kChannelUnit = 64;  // whole cache lines of a 16-bit row: threads share none
constexpr int64_t kMinTokens = 64;    // above W - 1, so that only a sequence's first piece reads its state

ConvSplit split_conv(const ConvProblem& p, int64_t longest, int32_t threads) {
  const int64_t wanted = 4 * int64_t{threads};
  ConvSplit split;
  const int64_t over_channels = std::max<int64_t>(1, ceil_div(wanted, p.N));
  split.channels = ceil_div(ceil_div(p.D, over_channels), kChannelUnit) * kChannelUnit;
  split.channel_items = ceil_div(p.D, split.channels);
  split.tokens = longest;
  // In place, a token's inputs are gone once the piece before it ran: the whole sequence must then be one item.
  const bool in_place = p.x.data == p.y.data;
  const int64_t items = p.N * split.channel_items;
  if (in_place || items >= wanted) return split;
  const int64_t width = std::min(split.channels, p.D);
  split.tokens = std::max({ceil_div(longest, ceil_div(wanted, items)), kGrain / width, kMinTokens});
  split.time_items = std::max<int64_t>(1, ceil_div(longest, split.tokens));
  return split;
}

}  // namespace

Status run_conv1d(const ConvProblem& p) {
  const OpKernels& k = kernels();
  const int32_t threads = effective_threads(p.num_threads);
  int64_t tokens = 0, longest = 0;
  for (const Sequence& s : p.seqs) {
    tokens += s.len;
    longest = std::max(longest, s.len);
  }
  // A sequence costs its tokens, and its state and taps once.
  const int64_t cost_tokens = tokens + p.N * (p.L + p.W);
  if (threads == 1 || p.N == 0 || cost_tokens <= kGrain / p.D) {
    for (int64_t n = 0; n < p.N; ++n) k.conv1d(p, n, 0, p.D, 0, p.seqs[static_cast<size_t>(n)].len);
    return Status();
  }
  const ConvSplit split = split_conv(p, longest, threads);
  const int64_t per_seq = split.channel_items * split.time_items;
  auto work = [&](int64_t item, int32_t) {
    const int64_t n = item / per_seq, c = item % per_seq / split.time_items * split.channels;
    const int64_t piece = item % split.time_items;
    const int64_t len = p.seqs[static_cast<size_t>(n)].len;
    const int64_t t_begin = piece * split.tokens;
    if (piece > 0 && t_begin >= len) return;
    k.conv1d(p, n, c, std::min(p.D, c + split.channels), t_begin, std::min(len, t_begin + split.tokens));
  };
  const int64_t items = p.N * per_seq;
  const int64_t item_cost = std::max<int64_t>(1, cost_tokens * p.D / items);
  parallel_for(items, threads, work, std::clamp<int64_t>(kGrain / item_cost, 1, ceil_div(items, threads)));
  if (split.time_items > 1) {
    // Only now has every piece read the initial state, which the final state may overwrite.
    for (int64_t n = 0; n < p.N; ++n) {
      const int64_t len = p.seqs[static_cast<size_t>(n)].len;
      if (len > split.tokens && !p.seqs[static_cast<size_t>(n)].is_null) k.conv1d(p, n, 0, p.D, len, len);
    }
  }
  return Status();
}

Status run_gate(const GateProblem& p) {
  const OpKernels& k = kernels();
  split_range(p.rows[0] * p.rows[1] * p.rows[2], p.H, p.num_threads,
              [&](int64_t begin, int64_t end) { k.gate(p, begin, end); });
  return Status();
}

Status run_norm(const NormProblem& p) {
  const OpKernels& k = kernels();
  split_range(p.rows[0] * p.rows[1] * p.rows[2], p.D, p.num_threads,
              [&](int64_t begin, int64_t end) { k.norm(p, begin, end); });
  return Status();
}

Status run_rope(const RopeProblem& p) {
  const OpKernels& k = kernels();
  const int64_t per_token = (p.Hq * (p.gate_out.present() ? 2 : 1) + p.Hkv) * p.D;
  split_range(p.B * p.T, per_token, p.num_threads, [&](int64_t begin, int64_t end) { k.rope(p, begin, end); });
  return Status();
}

}  // namespace gdn::cpu
