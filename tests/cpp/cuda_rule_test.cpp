// SPDX-License-Identifier: MIT
// The delta rule on a GPU: the shared case list against the recurrence in double (cases_test.cpp) for every CUDA
// implementation that accepts, from aligned and from odd addresses; and streams, graphs, bad metadata, refusals.
// $GDN_REPORT names a JSON file for the GPU's name and the largest errors of a whole run.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "cuda_device_tensors.h"
#include "gdn/gdn.h"

namespace gdn_test {

inline gdn_status cuda_rule(gdn_status (*run)(const gdn_rule_args*), const gdn_rule_args* args) {
  gdn_rule_args a = *args;
  DeviceTensors t;
  for (const gdn_tensor** p :
       {&a.q, &a.k, &a.v, &a.g, &a.beta, &a.A_log, &a.dt_bias, &a.o, &a.cu_seqlens, &a.initial_state,
        &a.initial_state_indices, &a.has_initial_state, &a.final_state, &a.final_state_indices, &a.token_state_indices,
        &a.num_accepted, &a.snapshots, &a.checkpoints, &a.checkpoint_indices})
    *p = t.add(*p);
  a.stream = test_stream();
  return t.run([&] { return run(&a); });
}
inline gdn_status cuda_chunk_forward(const gdn_rule_args* args) { return cuda_rule(gdn_chunk_forward, args); }
inline gdn_status cuda_recurrent(const gdn_rule_args* args) { return cuda_rule(gdn_recurrent, args); }

}  // namespace gdn_test

#define GDN_TEST_ON_CUDA
#define gdn_chunk_forward gdn_test::cuda_chunk_forward
#define gdn_recurrent gdn_test::cuda_recurrent
#include "cases_test.cpp"  // NOLINT: its cases, run through the functions above
#undef gdn_chunk_forward
#undef gdn_recurrent

namespace {

using gdn_test::DeviceTensor;
using gdn_test::test_stream;
using gdn_test::worst_errors;

// What docs/kernels/chunk_sm80.md promises to take.
bool portable_takes(const gdn_rule_args& a) {
  const int32_t dtype = a.q->dtype;
  const int64_t K = a.q->shape[3];
  return (dtype == GDN_BF16 || dtype == GDN_F16) && a.k->dtype == dtype && a.v->dtype == dtype && a.o->dtype == dtype &&
         (K == 64 || K == 96 || K == 128 || K == 192) && a.checkpoint_every % 64 == 0;
}

// What docs/kernels/chunk_sm90.md promises to take, of contiguous tensors at aligned addresses.
bool hopper_takes(const gdn_rule_args& a) {
  const int32_t dtype = a.q->dtype;
  const int64_t K = a.q->shape[3], V = a.v->shape[3];
  return (dtype == GDN_BF16 || dtype == GDN_F16) && a.k->dtype == dtype && a.v->dtype == dtype && a.o->dtype == dtype &&
         (K == 64 || K == 128) && V % 64 == 0 && a.checkpoint_every % 64 == 0;
}

// What docs/kernels/recurrent_decode.md promises to take, of contiguous tensors at aligned addresses.
bool decode_takes(const gdn_rule_args& a) {
  const gdn_tensor* state = a.initial_state != nullptr ? a.initial_state : a.final_state;
  if (state == nullptr || state->dtype == GDN_F64 || a.q->shape[3] != 128) return false;
  if (a.final_state != nullptr && a.final_state->dtype != state->dtype) return false;
  if (a.snapshots != nullptr && a.snapshots->dtype != state->dtype) return false;
  if (a.checkpoints != nullptr) return false;
  const int64_t sequences = a.cu_seqlens != nullptr ? a.cu_seqlens->shape[0] - 1 : a.q->shape[0];
  return a.v->shape[3] % (state->dtype == GDN_F32 ? 32 : 64) == 0 && a.q->shape[0] * a.q->shape[1] <= 16 * sequences;
}

class CudaCases : public testing::TestWithParam<std::tuple<Case, bool>> {
 protected:
  void SetUp() override {
    if (!gdn_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
    gdn_test::buffers_are_aligned = std::get<1>(GetParam());
  }
  void TearDown() override { gdn_test::buffers_are_aligned = false; }
};

TEST_P(CudaCases, AgreeWithTheRecurrence) {
  const auto& [each, aligned] = GetParam();
  for (const Json& op : each.get("ops").items) {
    SCOPED_TRACE(op.text);
    if (op.text == "recurrent") {
      Trial trial(each, GDN_OP_RECURRENT);
      {
        SCOPED_TRACE("recurrent_simt");
        EXPECT_TRUE(trial.check("recurrent_simt")) << gdn_last_error();
      }
      SCOPED_TRACE("recurrent_decode");
      const bool accepted = trial.check("recurrent_decode");
      if (aligned && decode_takes(trial.args())) {
        EXPECT_TRUE(accepted) << gdn_last_error();
      }
      continue;
    }
    Trial trial(each, GDN_OP_CHUNK_FORWARD);
    {
      SCOPED_TRACE("chunk_simt");
      EXPECT_TRUE(trial.check("chunk_simt")) << gdn_last_error();
    }
    if (gdn_test::capability() >= 80) {
      SCOPED_TRACE("chunk_sm80");
      const bool accepted = trial.check("chunk_sm80");
      if (portable_takes(trial.args())) {
        EXPECT_TRUE(accepted) << gdn_last_error();
      }
    }
    SCOPED_TRACE("chunk_sm90");
    const bool accepted = gdn_test::is_hopper() && trial.check("chunk_sm90");
    if (gdn_test::is_hopper() && aligned && hopper_takes(trial.args())) {
      EXPECT_TRUE(accepted) << gdn_last_error();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(List, CudaCases, testing::Combine(testing::ValuesIn(small_cases()), testing::Bool()),
                         [](const testing::TestParamInfo<std::tuple<Case, bool>>& each) {
                           return std::get<0>(each.param).id() + (std::get<1>(each.param) ? "_aligned" : "_odd");
                         });

TEST(CudaCaseList, HasCasesForEveryKernel) {
  int64_t taken = 0, decoded = 0, portable = 0;
  for (const Case& each : small_cases()) {
    for (const Json& op : each.get("ops").items) {
      if (op.text == "chunk_forward") taken += hopper_takes(Trial(each, GDN_OP_CHUNK_FORWARD).args()) ? 1 : 0;
      if (op.text == "chunk_forward") portable += portable_takes(Trial(each, GDN_OP_CHUNK_FORWARD).args()) ? 1 : 0;
      if (op.text == "recurrent") decoded += decode_takes(Trial(each, GDN_OP_RECURRENT).args()) ? 1 : 0;
    }
  }
  EXPECT_GE(taken, 20);
  EXPECT_GE(decoded, 8);
  EXPECT_GE(portable, 20);
}

// ---- calls whose tensors stay on the device

std::vector<uint16_t> bf16_of(const std::vector<float>& x) {
  std::vector<uint16_t> out;
  for (const float value : x) {
    const uint32_t bits = gdn_test::bits_of(value);
    out.push_back(static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16));
  }
  return out;
}

// Packed bf16 tokens, K = V = 64, a pool of fp32 states updated in place.
struct PackedRule {
  static constexpr int64_t kHk = 1, kHv = 2, kDim = 64, kState = kHv * kDim * kDim;
  const int64_t tokens, sequences, slots;
  DeviceTensor q, k, v, o, g, beta, pool, cu, indices;
  gdn_rule_args args = GDN_INIT(gdn_rule_args);

  PackedRule(int64_t t, int64_t n, int64_t pool_rows = 0)
      : tokens(t),
        sequences(n),
        slots(pool_rows > 0 ? pool_rows : n + 2),
        q(GDN_BF16, {1, t, kHk, kDim}),
        k(GDN_BF16, {1, t, kHk, kDim}),
        v(GDN_BF16, {1, t, kHv, kDim}),
        o(GDN_BF16, {1, t, kHv, kDim}),
        g(GDN_F32, {1, t, kHv}),
        beta(GDN_F32, {1, t, kHv}),
        pool(GDN_F32, {slots, kHv, kDim, kDim}),
        cu(GDN_I32, {n + 1}),
        indices(GDN_I64, {n}) {
    q.put(bf16_of(draw(t * kHk * kDim, 1, -1, 1)));
    k.put(bf16_of(draw(t * kHk * kDim, 2, -1, 1)));
    v.put(bf16_of(draw(t * kHv * kDim, 3, -1, 1)));
    g.put(draw(t * kHv, 4, -0.2f, 0));
    beta.put(draw(t * kHv, 5, 0, 1));
    start = draw(slots * kState, 6, -0.1f, 0.1f);
    args.q = q.ptr();
    args.k = k.ptr();
    args.v = v.ptr();
    args.o = o.ptr();
    args.g = g.ptr();
    args.beta = beta.ptr();
    args.initial_state = args.final_state = pool.ptr();
    args.cu_seqlens = cu.ptr();
    args.initial_state_indices = indices.ptr();
    args.qk_l2norm = 1;
    args.stream = test_stream();
  }
  static std::vector<float> draw(int64_t n, uint32_t seed, float low, float high) {
    std::mt19937 engine(seed);
    std::uniform_real_distribution<float> uniform(low, high);
    std::vector<float> x(static_cast<size_t>(n));
    for (float& value : x) value = uniform(engine);
    return x;
  }
  void set(const std::vector<int32_t>& bounds, const std::vector<int64_t>& rows) {
    cu.put(bounds);
    indices.put(rows);
    pool.put(start);
    o.put(std::vector<uint16_t>(static_cast<size_t>(tokens * kHv * kDim), kUntouched));
  }
  // Bits of o, then of the pool.
  std::vector<uint32_t> results() const {
    EXPECT_EQ(cudaStreamSynchronize(test_stream()), cudaSuccess);
    std::vector<uint32_t> all;
    for (const uint16_t x : o.get<uint16_t>()) all.push_back(x);
    for (const uint32_t x : pool.get<uint32_t>()) all.push_back(x);
    return all;
  }
  static constexpr uint16_t kUntouched = 0x4321;
  std::vector<float> start;
};

struct Runner {
  const char* impl;
  gdn_status (*run)(const gdn_rule_args*);
};

void PrintTo(const Runner& runner, std::ostream* out) { *out << runner.impl; }

class CudaRule : public testing::TestWithParam<Runner> {
 protected:
  void SetUp() override {
    if (!gdn_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
    if (std::string(GetParam().impl) == "chunk_sm80" && gdn_test::capability() < 80)
      GTEST_SKIP() << "not an Ampere GPU or later";
    if (std::string(GetParam().impl) == "chunk_sm90" && !gdn_test::is_hopper()) GTEST_SKIP() << "not a Hopper GPU";
  }
  gdn_status run(PackedRule* c) {
    c->args.impl = GetParam().impl;
    return GetParam().run(&c->args);
  }
  std::vector<uint32_t> run(PackedRule* c, const std::vector<int32_t>& bounds, const std::vector<int64_t>& rows) {
    c->set(bounds, rows);
    EXPECT_EQ(run(c), GDN_OK) << gdn_last_error();
    return c->results();
  }
};

INSTANTIATE_TEST_SUITE_P(Implementations, CudaRule,
                         testing::Values(Runner{"chunk_sm90", gdn_chunk_forward},
                                         Runner{"chunk_sm80", gdn_chunk_forward},
                                         Runner{"chunk_simt", gdn_chunk_forward},
                                         Runner{"recurrent_simt", gdn_recurrent}),
                         [](const testing::TestParamInfo<Runner>& each) { return std::string(each.param.impl); });

TEST_P(CudaRule, CapturedCallSeesNewSequencesAndSlots) {
  const std::vector<int32_t> bounds[] = {{0, 130, 130, 300, 400}, {0, 1, 70, 263, 390}};
  const std::vector<int64_t> rows[] = {{0, 1, 2, 3}, {5, 3, -1, 0}};
  PackedRule c(400, 4);
  std::vector<uint32_t> direct[2];
  for (int i = 0; i < 2; ++i) direct[i] = run(&c, bounds[i], rows[i]);
  ASSERT_NE(direct[0], direct[1]);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(test_stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_EQ(run(&c), GDN_OK) << gdn_last_error();
  ASSERT_EQ(cudaStreamEndCapture(test_stream(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (const int i : {1, 0, 1}) {
    c.set(bounds[i], rows[i]);
    ASSERT_EQ(cudaGraphLaunch(exec, test_stream()), cudaSuccess);
    EXPECT_EQ(c.results(), direct[i]);
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_P(CudaRule, RepeatsAreBitIdentical) {
  PackedRule c(400, 4);
  const std::vector<uint32_t> first = run(&c, {0, 3, 190, 191, 400}, {4, 0, 2, 1});
  for (int i = 1; i < 1000; ++i) ASSERT_EQ(run(&c, {0, 3, 190, 191, 400}, {4, 0, 2, 1}), first) << "repeat " << i;
}

TEST_P(CudaRule, MoreBlocksThanAGridHasRows) {
  constexpr int32_t kSequences = 40000;  // of one token, times two heads
  PackedRule c(kSequences, kSequences, 1);
  std::vector<int32_t> bounds(kSequences + 1);
  std::iota(bounds.begin(), bounds.end(), 0);
  c.cu.put(bounds);
  c.args.initial_state = c.args.final_state = c.args.initial_state_indices = nullptr;
  c.args.qk_l2norm = 0;
  ASSERT_EQ(run(&c), GDN_OK) << gdn_last_error();
  ASSERT_EQ(cudaStreamSynchronize(test_stream()), cudaSuccess);
  const auto values = [](const DeviceTensor& t) {
    std::vector<float> out;
    for (const uint16_t bits : t.get<uint16_t>()) {
      const uint32_t wide = uint32_t{bits} << 16;
      std::memcpy(&out.emplace_back(), &wide, 4);
    }
    return out;
  };
  // From zeros one token gives o = scale * beta * (q . k) * v.
  const std::vector<float> q = values(c.q), k = values(c.k), v = values(c.v), o = values(c.o),
                           beta = c.beta.get<float>();
  double error = 0, norm = 0;
  for (size_t n = 0; n < size_t{kSequences}; ++n) {
    double dot = 0, sequence_error = 0, sequence_norm = 0;
    for (size_t i = 0; i < 64; ++i) dot += double{q[n * 64 + i]} * k[n * 64 + i];
    for (size_t i = 0; i < 128; ++i) {
      const double want = dot / 8 * beta[n * 2 + i / 64] * v[n * 128 + i], difference = o[n * 128 + i] - want;
      sequence_error += difference * difference;
      sequence_norm += want * want;
    }
    // A sequence alone may have a small q . k; one that no block reached is off by all of it.
    ASSERT_LE(std::sqrt(sequence_error), 0.05 * std::sqrt(sequence_norm) + 0.02) << "sequence " << n;
    error += sequence_error;
    norm += sequence_norm;
  }
  EXPECT_LE(std::sqrt(error / norm), 5e-3);
}

TEST_P(CudaRule, RowsPastTheLastSequence) {
  PackedRule c(400, 4);
  const size_t written = 350 * PackedRule::kHv * PackedRule::kDim, all = 400 * PackedRule::kHv * PackedRule::kDim;
  std::vector<uint32_t> kept = run(&c, {0, 3, 190, 191, 350}, {4, 0, 2, 1});
  for (size_t i = written; i < all; ++i) ASSERT_EQ(kept[i], PackedRule::kUntouched) << i;
  c.args.zero_tail = 1;
  std::fill(kept.begin() + static_cast<int64_t>(written), kept.begin() + static_cast<int64_t>(all), 0u);
  EXPECT_EQ(run(&c, {0, 3, 190, 191, 350}, {4, 0, 2, 1}), kept);
}

TEST_P(CudaRule, LongestLengthChangesNoBits) {
  PackedRule c(400, 4);
  const std::vector<uint32_t> unknown = run(&c, {0, 3, 190, 191, 400}, {4, 0, 2, 1});
  for (const int64_t longest : {int64_t{209}, int64_t{400}, int64_t{1} << 40}) {
    c.args.max_seqlen = longest;
    EXPECT_EQ(run(&c, {0, 3, 190, 191, 400}, {4, 0, 2, 1}), unknown) << longest;
  }
}

std::string library_info() {
  std::vector<char> text(1 << 16);
  EXPECT_EQ(gdn_info(text.data(), text.size(), nullptr), GDN_OK);
  return text.data();
}

TEST_P(CudaRule, BadMetadataActsAsNullAndIsFlagged) {
  PackedRule c(400, 4);
  const std::vector<int32_t> good = {0, 50, 120, 260, 400};
  const std::vector<uint32_t> null = run(&c, good, {0, -1, 2, 3});
  EXPECT_EQ(run(&c, good, {0, 6, 2, 3}), null);
  EXPECT_EQ(run(&c, good, {0, int64_t{1} << 40, 2, 3}), null);
  EXPECT_NE(library_info().find("initial_state_indices"), std::string::npos) << library_info();
  // Bounds past T or falling leave the sequence out; its state keeps its value.
  EXPECT_EQ(run(&c, {0, 50, 120, 260, 2000000000}, {0, 1, 2, 3}), run(&c, {0, 50, 120, 260, 260}, {0, 1, 2, 3}));
  EXPECT_NE(library_info().find("cu_seqlens"), std::string::npos) << library_info();
  c.args.zero_tail = 1;
  run(&c, {0, 250, 60, -5, 100}, {0, 1, 2, 3});
  run(&c, {-100, -50, -60, 300, 401}, {0, 1, 2, 3});
  run(&c, {-100, -50, -60, -300, -400}, {0, 1, 2, 3});
}

TEST_P(CudaRule, CallersEarlierErrorIsNeitherReportedNorCleared) {
  PackedRule c(400, 4);
  c.set({0, 3, 190, 191, 400}, {4, 0, 2, 1});
  void* nothing = nullptr;
  ASSERT_NE(cudaMalloc(&nothing, size_t{1} << 60), cudaSuccess);
  const cudaError_t error = cudaPeekAtLastError();
  ASSERT_NE(error, cudaSuccess);
  EXPECT_EQ(run(&c), GDN_OK) << gdn_last_error();
  EXPECT_EQ(cudaGetLastError(), error);
  c.results();
}

TEST_P(CudaRule, MixedDevicesAndF64AreRefusedByName) {
  PackedRule c(400, 4);
  c.set({0, 3, 190, 191, 400}, {4, 0, 2, 1});
  std::vector<int32_t> bounds = {0, 3, 190, 191, 400};
  gdn_tensor host = c.cu.view();
  host.data = bounds.data();
  host.device_type = GDN_CPU;
  host.device_id = 0;
  c.args.cu_seqlens = &host;
  EXPECT_EQ(run(&c), GDN_INVALID_ARGUMENT);
  EXPECT_NE(std::string(gdn_last_error()).find("'cu_seqlens': found a tensor on the CPU"), std::string::npos)
      << gdn_last_error();
  c.args.cu_seqlens = c.cu.ptr();
  DeviceTensor f64(GDN_F64, {c.slots, PackedRule::kHv, PackedRule::kDim, PackedRule::kDim});
  c.args.initial_state = c.args.final_state = f64.ptr();
  EXPECT_EQ(run(&c), GDN_UNSUPPORTED);
  EXPECT_NE(std::string(gdn_last_error()).find("F64"), std::string::npos) << gdn_last_error();
}

TEST(CudaPlan, NamesWhatItCannotSeeWithoutAddresses) {
  if (!gdn_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  if (!gdn_test::is_hopper()) GTEST_SKIP() << "not a Hopper GPU";
  PackedRule c(400, 4);
  const auto plan = [&] {
    std::vector<char> json(1 << 16);
    EXPECT_EQ(gdn_explain(GDN_OP_CHUNK_FORWARD, &c.args, json.data(), json.size(), nullptr), GDN_OK);
    return std::string(json.data());
  };
  const std::string condition = "\"condition\": \"if q, k, v and o are 16-byte aligned\"";
  EXPECT_EQ(plan().find(condition), std::string::npos) << plan();
  gdn_tensor q = c.q.view();
  c.args.q = &q;
  q.data = nullptr;
  EXPECT_NE(plan().find(condition), std::string::npos) << plan();
  q.data = static_cast<char*>(c.q.view().data) + 2;
  EXPECT_EQ(plan().find("\"impl\": \"chunk_simt\""), plan().find("\"impl\": ")) << plan();
}

void write_report(const char* path) {
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) return;
  int driver = 0;
  cudaDriverGetVersion(&driver);
  std::ofstream file(path);
  const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  file << "{\"gpu\": \"" << properties.name << "\", \"cuda_driver\": " << driver
       << ", \"passed\": " << tests.successful_test_count() << ", \"failed\": " << tests.failed_test_count()
       << ", \"worst\": {";
  const char* comma = "";
  for (const auto& [name, error] : worst_errors) {
    if (name.find(".expanding.") != std::string::npos) continue;  // growing states: no absolute bound
    file << comma << "\"" << name << "\": " << error;
    comma = ", ";
  }
  file << "}}\n";
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  setenv("GDN_COUNT", "1", 0);  // read once
  const int result = RUN_ALL_TESTS();
  const char* report = std::getenv("GDN_REPORT");
  if (report != nullptr && report[0] != '\0' && !worst_errors.empty()) write_report(report);
  for (const auto& [name, error] : worst_errors) std::printf("worst %s %.2e\n", name.c_str(), error);
  return result;
}
