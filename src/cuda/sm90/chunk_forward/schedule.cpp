// SPDX-License-Identifier: MIT
#include "cuda/sm90/chunk_forward/schedule.h"

#include <algorithm>
#include <cmath>

namespace gdn::cuda::sm90 {
namespace {

constexpr int64_t kChunk = 64;
// Microseconds on one H200 (lab/sm90_chunk_lab, 2026-12-01). Only their ratios matter.
constexpr double kChunkMicros[2] = {1.88, 2.6};  // a chunk of a CTA with one, two state warpgroups
constexpr double kLocalMicros = 1.9;             // a chunk of the launch that makes segments' ends, 128 channels
constexpr double kStartMicros = 5.0;             // a CTA's start, its states, its last output
constexpr double kRestartMicros = 13.0;          // of a CTA behind another one on its multiprocessor
constexpr double kLineFactor = 1.04;             // a chunk of the wrap-around schedule: CTAs share fewer tiles
constexpr double kLineStartMicros = 8.0;         // its start
constexpr double kFoldMicros = 2.5;              // one transition
constexpr double kSplitMicros = 10;              // the launch before and its first CTAs
constexpr double kWindowMicros = 20;             // the window of a decaying head: finding it, a few chunks
constexpr double kNoTransitionMicros = 6;        // finding that it needs no transition
constexpr double kRoundsPenalty = 1.1;           // of split calls with more CTAs than multiprocessors
constexpr int64_t kMinSegment = 4;               // chunks
constexpr int64_t kMinSplitTokens = 512;         // shorter sequences stay whole
constexpr double kUsualExactShare = 0.25;        // heads without a window
constexpr double kAllExactWeight = 0.2;          // of a call none of whose heads decays
constexpr int64_t kMaxLineSequences = 4096;      // every CTA reads all lengths
constexpr int32_t kLeastShare = 97;              // percent of the multiprocessors that a grouping must use

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Lengths {
  double mean, longest;  // chunks
};
Lengths lengths_of(const Workload& w) {
  const double sequences = static_cast<double>(std::max<int64_t>(w.sequences, 1));
  const double all = static_cast<double>(w.tokens) / kChunk;
  const double mean = std::max(1.0, std::ceil(all / sequences));
  // Unknown: as uneven as two to one.
  const double longest = w.longest > 0 ? std::ceil(static_cast<double>(w.longest) / kChunk) : std::min(all, 2 * mean);
  return {mean, std::max(mean, longest)};
}

// CTAs in the order of the grid, longest first, on `sms` multiprocessors: at least the longest one, at least their share, and
// whole rounds where all are alike.
double makespan(double ctas, double mean, double longest, double sms) {
  const double rounds = std::ceil(ctas / sms) * mean, share = ctas / sms * mean;
  const double uneven = std::min(1.0, (longest / mean - 1) * 2);  // long ones first fill the gaps of the last round
  return std::max(longest, rounds + (share - rounds) * uneven);
}

}  // namespace

CostModel cost_model(int32_t state_warpgroups) {
  return {kChunkMicros[state_warpgroups - 1],
          kLocalMicros,
          kStartMicros,
          kRestartMicros,
          kLineStartMicros,
          kChunkMicros[state_warpgroups - 1] * kLineFactor,
          kFoldMicros,
          kWindowMicros,
          kNoTransitionMicros,
          kSplitMicros,
          kRoundsPenalty,
          kUsualExactShare};
}

int64_t segment_bound(const Workload& w, int64_t segment_chunks) {
  if (segment_chunks <= 0) return w.sequences;
  return w.sequences + w.tokens / (kChunk * segment_chunks);
}

bool make_line(const Workload& w, int32_t state_warpgroups, Schedule* schedule) {
  const int64_t splits = w.value_dim / (64 * state_warpgroups), per_sequence = w.heads * splits;
  if (w.value_dim % (64 * state_warpgroups) != 0 || w.heads % w.key_heads != 0) return false;
  if (w.sequences > kMaxLineSequences || w.sequences * per_sequence <= w.sms) return false;
  // Everything in the line's 32-bit numbers.
  const int64_t chunks = w.tokens / kChunk + w.sequences * (1 + kWorkChunks);
  if (chunks > INT32_MAX / 2 / per_sequence) return false;
  const auto group = static_cast<int32_t>(w.heads / w.key_heads * splits);
  for (int32_t together = group; together >= 1; --together) {
    if (group % together != 0) continue;
    const int32_t ctas = w.sms / together * together;
    if (100 * ctas < kLeastShare * w.sms) continue;
    schedule->state_warpgroups = state_warpgroups;
    schedule->segment_chunks = 0;
    schedule->line_ctas = ctas;
    schedule->together = together;
    return true;
  }
  return false;
}

double predict_micros(const Workload& w, const Schedule& schedule, double exact_share) {
  const Lengths lengths = lengths_of(w);
  const int32_t state_warpgroups = schedule.state_warpgroups;
  const double sms = std::max(1, w.sms), per_chunk = kChunkMicros[state_warpgroups - 1];
  const double splits = static_cast<double>(w.value_dim / (64 * state_warpgroups));
  const double pairs = static_cast<double>(w.heads) * static_cast<double>(std::max<int64_t>(w.sequences, 1));
  if (schedule.line_ctas > 0) {
    const double more = kWorkChunks, longest = lengths.longest + more, each = lengths.mean + more;
    double share = std::max(longest, pairs * splits * each / schedule.line_ctas);
    if (lengths.longest == lengths.mean) {  // alike: start_line cuts none where that costs little
      const double whole = std::ceil(pairs * splits / schedule.line_ctas) * each;
      if (whole <= share + kSlackChunks) share = whole;
    }
    return kLineStartMicros + per_chunk * kLineFactor * share;
  }
  if (schedule.segment_chunks <= 0) {
    const double start = kRestartMicros / per_chunk;  // in chunks
    return kStartMicros - kRestartMicros +
           per_chunk * makespan(pairs * splits, lengths.mean + start, lengths.longest + start, sms);
  }
  // Segments of a sequence are alike.
  const double cut = static_cast<double>(schedule.segment_chunks);
  const double segments = std::ceil(lengths.longest / cut), each = std::ceil(lengths.longest / segments);
  const double all = std::max(segments, static_cast<double>(w.tokens) / kChunk / each) * w.heads;
  const double rounds = std::ceil(all * splits / sms), forward = rounds * (each * per_chunk + kStartMicros);
  // Before: the ends of all but the last segments, and transitions of all but the first and the last.
  const double parts = static_cast<double>(w.value_dim / 128);
  const double ends = all * (segments - 1) / segments * parts,
               transitions = all * std::max(0.0, segments - 2) / segments;
  const double window = std::min(kWindowMicros, each * kLocalMicros + kStartMicros);
  const double work = exact_share * (ends + transitions) * each * kLocalMicros +
                      (1 - exact_share) * (ends * window + transitions * kNoTransitionMicros);
  const double before = std::max(exact_share > 0 ? each * kLocalMicros : window, work / sms);
  const double folds = exact_share > 0 ? std::max(0.0, segments - 2) * kFoldMicros : 0;
  return kSplitMicros + folds + (before + forward) * (rounds > 1 ? kRoundsPenalty : 1);
}

std::vector<Schedule> rank_schedules(const Workload& w, bool may_split) {
  std::vector<Schedule> found;
  std::vector<double> cost;
  const auto consider = [&](Schedule schedule) {
    if (w.value_dim % (64 * schedule.state_warpgroups) != 0) return;
    schedule.micros = predict_micros(w, schedule, kUsualExactShare);
    found.push_back(schedule);
  };
  for (int32_t warpgroups : {2, 1}) {
    consider({.state_warpgroups = warpgroups});
    Schedule line;
    if (make_line(w, warpgroups, &line)) consider(line);
  }
  const int64_t longest = static_cast<int64_t>(lengths_of(w).longest);
  if (may_split && w.value_dim % 128 == 0 && longest * kChunk >= kMinSplitTokens) {
    // Finer and finer until the GPU is full several times over; every candidate costs host time of the call.
    const int64_t most = 3 * static_cast<int64_t>(w.sms) / std::max(1, w.heads) + 2;
    int64_t last = 0;
    for (int64_t segments = 2; segments <= std::min(longest / kMinSegment, most); segments += 1 + segments / 8) {
      const int64_t chunks = ceil_div(longest, segments);
      if (chunks == last) continue;
      last = chunks;
      for (int32_t warpgroups : {2, 1}) consider({.state_warpgroups = warpgroups, .segment_chunks = chunks});
    }
  }
  // Heads are not known: splits are weighed by the usual mixture, and a little by no decay at all.
  const auto weight = [&](const Schedule& s) {
    if (s.segment_chunks == 0) return s.micros;
    return (1 - kAllExactWeight) * s.micros + kAllExactWeight * predict_micros(w, s, 1.0);
  };
  std::vector<size_t> order(found.size());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
    cost.push_back(weight(found[i]));
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return cost[a] < cost[b]; });
  std::vector<Schedule> ranked;
  for (size_t i : order) ranked.push_back(found[i]);
  return ranked;
}

}  // namespace gdn::cuda::sm90
