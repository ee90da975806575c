// SPDX-License-Identifier: MIT
// Sequences cut into segments on a GPU: every way to ask for it. Part of gdn_cuda_test.
#include <array>
#include <cstdio>

#include "cuda_split_case.h"

namespace {

using gdn_test::Comparison;
using gdn_test::DeviceTensor;
using gdn_test::Inputs;
using gdn_test::inputs_of;
using gdn_test::kManyShapes;
using gdn_test::kShapes;
using gdn_test::Results;
using gdn_test::SplitCall;
using gdn_test::test_stream;

class CudaSplit : public testing::Test {
 protected:
  void SetUp() override {
    if (!gdn_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  }
};

constexpr int64_t kOff = -1, kAuto = 0;
void set_split(gdn_rule_args* args, int64_t split) {
  args->split = split == kOff ? GDN_SPLIT_OFF : GDN_SPLIT_AUTO;
  args->split_tokens = split > 0 ? split : 0;
}
std::string split_name(int64_t split) {
  return split == kOff ? "off" : split == kAuto ? "auto" : "every_" + std::to_string(split);
}

// One capture of the call gives the bits of direct calls, whichever of the lengths and slots its tensors hold.
struct Batch {
  std::vector<int32_t> bounds;
  std::vector<int64_t> slots;
};
void expect_replays(SplitCall* call, const std::vector<Batch>& batches, std::initializer_list<size_t> order,
                    const std::string& what) {
  std::vector<Results> direct;
  for (const Batch& batch : batches) {
    call->reset(batch.bounds, batch.slots);
    ASSERT_EQ(gdn_chunk_forward(&call->args), GDN_OK) << gdn_last_error();
    direct.push_back(call->results());
  }
  ASSERT_FALSE(direct[0] == direct[1]);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(test_stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_EQ(gdn_chunk_forward(&call->args), GDN_OK) << gdn_last_error();
  ASSERT_EQ(cudaStreamEndCapture(test_stream(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (const size_t i : order) {
    call->reset(batches[i].bounds, batches[i].slots);
    ASSERT_EQ(cudaGraphLaunch(exec, test_stream()), cudaSuccess);
    EXPECT_TRUE(call->results() == direct[i]) << what << ", replay of " << i;
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

// Sequence n as the only one of the call has the bits that it has in `all`.
void expect_same_alone(SplitCall* call, const Inputs& in, const Results& all, size_t n, const std::string& what) {
  const Results alone = call->run_alone(n);
  const int64_t row = in.Hv * in.shape.V;
  const auto begin = static_cast<size_t>(in.cu[n] * row), bytes = static_cast<size_t>(in.shape.lens[n] * row) * 2;
  EXPECT_EQ(std::memcmp(alone.o.data() + begin, all.o.data() + begin, bytes), 0) << what << ", sequence " << n;
  const auto state = static_cast<size_t>(in.shape.slots[n] * in.state_size());
  const auto size = static_cast<size_t>(in.state_size()) * sizeof(float);
  EXPECT_EQ(std::memcmp(alone.state.data() + state, all.state.data() + state, size), 0) << what << ", state of " << n;
}

// The lengths from the last to the first.
std::vector<int32_t> reversed_bounds(const Inputs& in) {
  std::vector<int32_t> bounds = {0};
  for (size_t n = in.shape.lens.size(); n-- > 0;) {
    bounds.push_back(static_cast<int32_t>(bounds.back() + in.shape.lens[n]));
  }
  return bounds;
}

class CudaPortable : public CudaSplit, public testing::WithParamInterface<int> {};

TEST_P(CudaPortable, AgreesWithTheRecurrence) {
  if (gdn_test::capability() < 80) GTEST_SKIP() << "not an Ampere GPU or later";
  SplitCall call(inputs_of(GetParam()));
  call.args.impl = "chunk_sm80";
  const Results results = call.run();
  Comparison(inputs_of(GetParam()), "portable").check(results);
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(call.run() == results) << "repeat " << i;
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaPortable, testing::Range(0, static_cast<int>(std::size(kShapes))),
                         [](const testing::TestParamInfo<int>& each) { return std::string(kShapes[each.param].name); });

class CudaMany : public CudaSplit, public testing::WithParamInterface<int> {};

// Whatever shares the pairs are dealt out in, a sequence alone (which has a block per pair) gives the same bits.
TEST_P(CudaMany, SharesChangeNoBits) {
  const Inputs& in = inputs_of(GetParam());
  SplitCall call(in);
  call.args.checkpoints = nullptr;
  call.args.checkpoint_every = 0;
  const Results all = call.run();
  for (size_t n = 0; n < in.shape.lens.size(); ++n) {
    if (in.shape.slots[n] >= 0) expect_same_alone(&call, in, all, n, "shares");
  }
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(call.run() == all) << "repeat " << i;
}

TEST_P(CudaMany, CapturedCallSeesNewLengths) {
  const Inputs& in = inputs_of(GetParam());
  SplitCall call(in);
  call.args.checkpoints = nullptr;
  call.args.checkpoint_every = 0;
  std::vector<int32_t> one = {0};  // a sequence has everything
  for (size_t n = in.shape.lens.size(); n-- > 0;) one.push_back(n == 5 ? in.cu.back() : one.back());
  const std::vector<int64_t>& slots = in.shape.slots;
  expect_replays(&call, {{in.cu, slots}, {reversed_bounds(in), slots}, {one, slots}}, {1, 0, 2, 2, 1, 0}, "shares");
}

TEST_P(CudaMany, HopperDealsOutShares) {
  if (!gdn_test::is_hopper()) GTEST_SKIP() << "not a Hopper GPU";
  SplitCall call(inputs_of(GetParam()));
  std::vector<char> json(1 << 16);
  ASSERT_EQ(gdn_explain(GDN_OP_CHUNK_FORWARD, &call.args, json.data(), json.size(), nullptr), GDN_OK);
  const char* chosen = std::strstr(json.data(), "\"shares\": ");  // the first: the others are of `options`
  ASSERT_NE(chosen, nullptr);
  EXPECT_NE(std::strncmp(chosen, "\"shares\": 0,", 12), 0) << json.data();
  EXPECT_GT(call.workspace_bytes(), 0);
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaMany, testing::ValuesIn(kManyShapes),
                         [](const testing::TestParamInfo<int>& each) { return std::string(kShapes[each.param].name); });

class CudaSplits : public CudaSplit, public testing::WithParamInterface<std::tuple<int, int64_t, bool>> {};

TEST_P(CudaSplits, AgreeWithTheRecurrence) {
  const auto& [shape, split, exact] = GetParam();
  const Inputs& in = inputs_of(shape);
  SplitCall call(in);
  set_split(&call.args, split);
  call.args.split_exact = exact;
  const std::string mode = split_name(split) + (exact ? ".exact" : ".window");
  const Results results = call.run();
  Comparison(in, mode).check(results);
  if (HasFailure()) return;
  EXPECT_TRUE(call.run() == results) << "the same call, other bits";

  // In memory of the caller's, exactly as much as asked for.
  const int64_t bytes = call.workspace_bytes();
  DeviceTensor scratch(GDN_U8, {bytes + 1024});
  scratch.put(std::vector<uint8_t>(scratch.bytes(), 0xFF));  // NaN where it is read before it is written
  call.args.workspace = bytes > 0 ? scratch.view().data : nullptr;
  call.args.workspace_bytes = bytes;
  EXPECT_TRUE(call.run() == results) << "in a workspace of " << bytes << " bytes, other bits";
  const std::vector<uint8_t> after = scratch.get<uint8_t>();
  for (size_t i = static_cast<size_t>(bytes); i < after.size(); ++i) ASSERT_EQ(after[i], 0xFF) << "past the workspace";
  call.args.workspace = nullptr;
  call.args.workspace_bytes = 0;

  // A hint that is wrong may choose another plan, not another result.
  for (const int64_t longest : {int64_t{64}, *std::max_element(in.shape.lens.begin(), in.shape.lens.end())}) {
    call.args.max_seqlen = longest;
    Comparison(in, mode).check(call.run());
  }
}

INSTANTIATE_TEST_SUITE_P(Matrix, CudaSplits,
                         testing::Combine(testing::Range(0, static_cast<int>(std::size(kShapes))),
                                          testing::Values(kAuto, kOff, 64, 128, 512), testing::Bool()),
                         [](const testing::TestParamInfo<CudaSplits::ParamType>& each) {
                           return std::string(kShapes[std::get<0>(each.param)].name) + "_" +
                                  split_name(std::get<1>(each.param)) +
                                  (std::get<2>(each.param) ? "_exact" : "_window");
                         });

TEST_F(CudaSplit, NamedSegmentsAreBatchInvariant) {
  const Inputs& in = inputs_of(0);
  SplitCall call(in);
  call.args.batch_invariant = 1;
  call.args.checkpoints = nullptr;
  call.args.checkpoint_every = 0;
  for (const int64_t split : {kAuto, int64_t{128}}) {
    set_split(&call.args, split);
    const Results all = call.run();
    for (const size_t n : {size_t{4}, size_t{5}, size_t{10}}) expect_same_alone(&call, in, all, n, split_name(split));
  }
}

TEST_F(CudaSplit, CapturedCallSeesNewLengths) {
  const Inputs& in = inputs_of(0);
  SplitCall call(in);
  call.args.checkpoints = nullptr;
  call.args.checkpoint_every = 0;
  std::vector<int64_t> swapped = in.shape.slots;
  std::swap(swapped[1], swapped.back());
  for (const int64_t split : {kAuto, int64_t{128}}) {
    set_split(&call.args, split);
    expect_replays(&call, {{in.cu, in.shape.slots}, {reversed_bounds(in), swapped}}, {1, 0, 1}, split_name(split));
  }
}

TEST_F(CudaSplit, RepeatsAreBitIdentical) {
  SplitCall call(inputs_of(1));
  set_split(&call.args, 256);
  const Results first = call.run();
  for (int i = 1; i < 300; ++i) ASSERT_TRUE(call.run() == first) << "repeat " << i;
}

TEST_F(CudaSplit, PlanAndWorkspaceAgree) {
  SplitCall call(inputs_of(1));
  for (const int64_t split : {kAuto, kOff, int64_t{64}, int64_t{512}}) {
    set_split(&call.args, split);
    std::vector<char> json(1 << 16);
    ASSERT_EQ(gdn_explain(GDN_OP_CHUNK_FORWARD, &call.args, json.data(), json.size(), nullptr), GDN_OK);
    const char* chosen = std::strstr(json.data(), "\"split_tokens\": ");  // the first: the others are of `options`
    ASSERT_NE(chosen, nullptr);
    const bool whole = std::strncmp(chosen, "\"split_tokens\": 0,", 18) == 0;
    const int64_t bytes = call.workspace_bytes();
    EXPECT_EQ(bytes > 0, !whole) << json.data();
    if (split == kOff) {
      EXPECT_TRUE(whole) << json.data();
    }
    if (bytes == 0) continue;
    DeviceTensor scratch(GDN_U8, {bytes});
    call.args.workspace = scratch.view().data;
    call.args.workspace_bytes = bytes - 1;
    EXPECT_EQ(gdn_chunk_forward(&call.args), GDN_INVALID_ARGUMENT);
    const std::string expected = "'workspace_bytes': found " + std::to_string(bytes - 1) + ", expected at least " +
                                 std::to_string(bytes) + " (gdn_chunk_forward_workspace)";
    EXPECT_NE(std::string(gdn_last_error()).find(expected), std::string::npos) << gdn_last_error();
    call.args.workspace = nullptr;
    call.args.workspace_bytes = 0;
  }
  EXPECT_EQ(gdn_release_memory(), GDN_OK);
  Comparison(inputs_of(1), "after_release").check(call.run());
}

// GDN_COUNT is on in this program (main): heads 0 and 1 of "long" never forget and decay too slowly, head 2 forgets in its second half.
TEST_F(CudaSplit, CountsWhatWasTaken) {
  if (!gdn_test::is_hopper()) GTEST_SKIP() << "not a Hopper GPU";
  SplitCall call(inputs_of(1));
  set_split(&call.args, 1024);  // 4113 tokens: five segments, the last of 17 tokens less than the others' share
  const auto counted = [] {
    std::vector<char> json(1 << 16);
    EXPECT_EQ(gdn_info(json.data(), json.size(), nullptr), GDN_OK);
    const char* found = std::strstr(json.data(), "\"split_counters\": ");
    std::array<long, 4> values{-1, -1, -1, -1};
    if (found != nullptr) {
      std::sscanf(found,
                  "\"split_counters\": {\"windows\": %ld, \"window_chunks\": %ld, \"exact\": %ld, \"transitions\": %ld",
                  &values[0], &values[1], &values[2], &values[3]);
    }
    return values;
  };
  std::array<long, 4> before = counted();
  call.run();
  std::array<long, 4> after = counted();
  EXPECT_EQ(after[0] - before[0] + after[2] - before[2], 4 * 3) << "four segments of three heads";
  EXPECT_EQ(after[0] - before[0], 2) << "head 2, third and fourth segment";
  EXPECT_GE(after[1] - before[1], 2 * 1);
  EXPECT_LE(after[1] - before[1], 2 * 2) << "e^-10 at -0.3 per token takes 34 tokens";
  EXPECT_EQ(after[3] - before[3], 2 * 3 + 1) << "of the second to the fourth segment where there is no window";
  call.args.split_exact = 1;
  before = after;
  call.run();
  after = counted();
  EXPECT_EQ(after[0] - before[0], 0);
  EXPECT_EQ(after[2] - before[2], 4 * 3);
  EXPECT_EQ(after[3] - before[3], 3 * 3);
}

TEST_F(CudaSplit, WorkspaceMustNotOverlap) {
  SplitCall call(inputs_of(1));
  call.args.workspace = call.args.o->data;
  call.args.workspace_bytes = 512;
  EXPECT_EQ(gdn_chunk_forward(&call.args), GDN_INVALID_ARGUMENT);
  EXPECT_NE(std::string(gdn_last_error()).find("'workspace': found memory that overlaps 'o'"), std::string::npos)
      << gdn_last_error();
}

}  // namespace
