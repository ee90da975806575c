// SPDX-License-Identifier: MIT
// Which CTAs a chunk_forward gets on Hopper: value channels per CTA, segments of split sequences, shares. Pure host code, and what
// the kernel has to know of it.
#pragma once
#include <cstdint>
#include <vector>

namespace gdn::cuda::sm90 {

// The wrap-around schedule (line.cuh), in chunks.
inline constexpr int kWorkChunks = 2;   // what a work's states cost
inline constexpr int kLeastPart = 3;    // of a cut sequence
inline constexpr int kSlackChunks = 3;  // shares may grow by so much where that avoids every cut

// What is known on the host. Lengths are on the device: `longest` may be 0 (unknown).
struct Workload {
  int64_t sequences = 1;
  int64_t tokens = 0;   // of all sequences
  int64_t longest = 0;  // tokens of the longest one
  int32_t heads = 1;    // value heads
  int32_t key_heads = 1;
  int32_t value_dim = 128;
  int32_t sms = 132;
  bool operator==(const Workload&) const = default;
};

struct Schedule {
  int32_t state_warpgroups = 2;  // 64 value channels each
  int64_t segment_chunks = 0;    // at most, per segment; 0: sequences stay whole
  int32_t line_ctas = 0;         // CTAs of the wrap-around schedule (line.cuh); 0: one per work
  int32_t together = 1;          // of them, that go through the same tokens
  double micros = 0;             // predicted: a quarter of the heads without a window
};

// What predictions are made of, in microseconds; schedule.cpp has the values. For pictures of a schedule.
struct CostModel {
  double chunk;              // of a CTA
  double local_chunk;        // of a CTA of the launch that makes segments' ends and transitions
  double start;              // of a CTA
  double restart;            // of a CTA that another one has to make room for
  double line_start;         // of a CTA of the wrap-around schedule
  double line_chunk;         // a chunk of it
  double fold;               // one transition
  double window;             // of a decaying head
  double no_transition;      // finding that a head needs none
  double split;              // the launch before
  double rounds_penalty;     // factor, of split calls with more CTAs than multiprocessors
  double usual_exact_share;  // heads without a window, where nothing is known
};
CostModel cost_model(int32_t state_warpgroups);

// Predicted time of a schedule. `exact_share`: heads whose gates do not decay within a segment.
double predict_micros(const Workload& work, const Schedule& schedule, double exact_share);

// The candidates that are weighed, best first: [0] is taken. Splitting must be allowed, and the shape one that can be split.
std::vector<Schedule> rank_schedules(const Workload& work, bool may_split);

// The wrap-around schedule with that many state warpgroups per CTA into `schedule`; false where it is not possible or a CTA per
// work leaves no multiprocessor a second one.
bool make_line(const Workload& work, int32_t state_warpgroups, Schedule* schedule);

// Segments there can be at most: what the grid and the workspace are made for.
int64_t segment_bound(const Workload& work, int64_t segment_chunks);

}  // namespace gdn::cuda::sm90
