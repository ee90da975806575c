// SPDX-License-Identifier: MIT
// The Hopper kernel's choice of schedule: host code, no GPU needed. Its predictions are checked against measured sweeps in
// bench/; here is what must hold whatever the constants are.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "cuda/sm90/chunk_forward/schedule.h"

namespace {

using namespace gdn::cuda::sm90;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

TEST(Schedule, BoundHoldsForAnyLengths) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 2000; ++round) {
    Workload work;
    work.sequences = 1 + static_cast<int64_t>(random() % 40);
    const int64_t chunks = 1 + static_cast<int64_t>(random() % 20);
    const int64_t longest = 1 + static_cast<int64_t>(random() % 5000);
    int64_t segments = 0;
    for (int64_t n = 0; n < work.sequences; ++n) {
      const int64_t length = static_cast<int64_t>(random() % static_cast<uint64_t>(longest));
      work.tokens += length;
      segments += std::max<int64_t>(1, ceil_div(length, 64 * chunks));  // segments_of in segments.cuh
    }
    ASSERT_LE(segments, segment_bound(work, chunks)) << "sequences " << work.sequences << ", chunks " << chunks;
  }
}

// Equal parts of ceil(chunks / segments) leave no segment empty: take_segment counts on it.
TEST(Schedule, NoSegmentIsEmpty) {
  for (int64_t chunks = 1; chunks <= 600; ++chunks) {
    for (int64_t most = 1; most <= chunks + 1; ++most) {
      const int64_t segments = ceil_div(chunks, most), each = ceil_div(chunks, segments);
      ASSERT_LE(each, most);
      ASSERT_LT((segments - 1) * each, chunks) << "chunks " << chunks << ", at most " << most;
    }
  }
}

TEST(Schedule, SplitsLongSequencesWithFewHeads) {
  Workload work;
  work.tokens = work.longest = 32768;
  work.heads = 8;
  const std::vector<Schedule> ranked = rank_schedules(work, true);
  EXPECT_GT(ranked.front().segment_chunks, 0);
  EXPECT_LT(ranked.front().micros, 0.4 * predict_micros(work, {.state_warpgroups = 1}, 0.25));
  for (const Schedule& s : rank_schedules(work, false)) EXPECT_EQ(s.segment_chunks, 0);
}

TEST(Schedule, LeavesShortSequencesAndFullGpusWhole) {
  Workload work;
  work.heads = 8;
  for (int64_t tokens : {int64_t{1}, int64_t{64}, int64_t{511}}) {
    work.tokens = work.longest = tokens;
    EXPECT_EQ(rank_schedules(work, true).front().segment_chunks, 0) << tokens;
  }
  work.sequences = 32;
  work.heads = 32;
  work.tokens = 32 * 4096;
  work.longest = 4096;
  const Schedule full = rank_schedules(work, true).front();
  EXPECT_EQ(full.segment_chunks, 0);
  EXPECT_EQ(full.state_warpgroups, 2);
}

// 192 pairs of one length on 132 multiprocessors: two rounds, or 132 equal shares.
TEST(Schedule, DealsOutWhatDoesNotFillItsLastRound) {
  Workload work;
  work.sequences = 4;
  work.tokens = 4 * 8192;
  work.longest = 8192;
  work.heads = 48;
  work.key_heads = 16;
  const Schedule best = rank_schedules(work, false).front();
  EXPECT_EQ(best.line_ctas, 132);
  EXPECT_EQ(best.together, 3);
  EXPECT_LT(best.micros, 0.85 * predict_micros(work, {.state_warpgroups = 2}, 0.25));
  work.heads = 32;  // 128 pairs: a block each
  EXPECT_EQ(rank_schedules(work, false).front().line_ctas, 0);
}

TEST(Schedule, GroupsDivideSharesAndHeads) {
  for (int32_t sms : {1, 66, 114, 132}) {
    for (int32_t key_heads : {1, 2, 3, 16}) {
      for (int32_t ratio : {1, 2, 3, 4, 8, 12}) {
        for (int32_t warpgroups : {1, 2}) {
          Workload work;
          work.sms = sms;
          work.key_heads = key_heads;
          work.heads = key_heads * ratio;
          work.value_dim = 256;
          work.sequences = 100;
          work.tokens = 100000;
          Schedule line;
          if (!make_line(work, warpgroups, &line)) continue;
          const int32_t splits = 256 / (64 * warpgroups);
          EXPECT_EQ(line.line_ctas % line.together, 0);
          EXPECT_EQ(ratio * splits % line.together, 0);
          EXPECT_GE(100 * line.line_ctas, 97 * sms);
          EXPECT_LE(line.line_ctas, sms);
        }
      }
    }
  }
  Workload huge;
  huge.sequences = 4096;
  huge.tokens = int64_t{1} << 30;
  huge.heads = 512;
  Schedule line;
  EXPECT_FALSE(make_line(huge, 2, &line)) << "more chunks than 32 bits hold";
}

TEST(Schedule, SixtyFourChannelsNeedOneWarpgroup) {
  Workload work;
  work.tokens = work.longest = 65536;
  work.heads = 4;
  work.value_dim = 192;
  for (const Schedule& s : rank_schedules(work, true)) {
    EXPECT_EQ(s.state_warpgroups, 1);
    EXPECT_EQ(s.segment_chunks, 0);
  }
}

// Nothing known of the lengths, nothing in them: still an answer.
TEST(Schedule, AcceptsTheUnknown) {
  Workload work;
  work.sequences = 7;
  EXPECT_FALSE(rank_schedules(work, true).empty());
  work.tokens = 1000;
  EXPECT_FALSE(rank_schedules(work, true).empty());
  EXPECT_EQ(segment_bound(work, 0), 7);
}

}  // namespace
