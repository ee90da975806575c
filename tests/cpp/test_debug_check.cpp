// SPDX-License-Identifier: MIT
// GDN_CHECK=1 (set by CTest for this program): slots that would be written twice are refused.
#include <cstdlib>

#include "rule_case.h"

namespace gdn_test {
namespace {

class DebugCheck : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* text = std::getenv("GDN_CHECK");
    ASSERT_TRUE(text != nullptr && std::string(text) == "1") << "run with GDN_CHECK=1 (ctest does)";
  }
};

TEST_F(DebugCheck, FinalStateIndices) {
  Sizes s;
  s.sequences = 4;
  RuleCase c(s);
  c.args.initial_state = nullptr;
  c.args.final_state_indices = c.indices({3, 3});
  expect_message(gdn_chunk_forward(&c.args), GDN_INVALID_ARGUMENT, "chunk_forward", "final_state_indices",
                 "slot 3 written by two sequences", "distinct");
  EXPECT_TRUE(c.outputs_untouched());
  c.args.final_state_indices = c.indices({-1, -1});  // null slots are no slots
  EXPECT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
}

TEST_F(DebugCheck, SharedPool) {
  Sizes s;
  s.sequences = 4;
  RuleCase c(s);
  c.args.final_state = &c.tinitial;
  c.args.initial_state_indices = c.indices({2, 2});
  expect_message(gdn_recurrent(&c.args), GDN_INVALID_ARGUMENT, "recurrent", "initial_state_indices",
                 "slot 2 written by two sequences", "distinct");
}

TEST_F(DebugCheck, TokenSlots) {
  Sizes s;
  s.T = 2;
  s.sequences = 4;
  RuleCase c(s);
  c.args.final_state = &c.tinitial;
  c.args.token_state_indices = c.indices({0, 1, 2, 1}, {2, 2});
  expect_message(gdn_recurrent(&c.args), GDN_INVALID_ARGUMENT, "recurrent", "token_state_indices",
                 "slot 1 written twice", "distinct");
  c.args.token_state_indices = c.indices({0, 1, 2, 3}, {2, 2});
  EXPECT_EQ(gdn_recurrent(&c.args), GDN_OK) << gdn_last_error();
}

TEST_F(DebugCheck, CheckpointsInTheStatePool) {
  Sizes s;
  s.T = 4;
  s.sequences = 8;
  RuleCase c(s);
  c.args.final_state = &c.tinitial;
  c.args.initial_state_indices = c.indices({0, 1});
  c.args.checkpoints = &c.tinitial;
  c.args.checkpoint_every = 2;
  c.args.checkpoint_indices = c.indices({2, 3, 4, 1});
  expect_message(gdn_chunk_forward(&c.args), GDN_INVALID_ARGUMENT, "chunk_forward", "checkpoint_indices",
                 "slot 1 used twice", "distinct");
  c.args.checkpoint_indices = c.indices({2, 3, 4, 5});
  EXPECT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
}

}  // namespace
}  // namespace gdn_test
