// SPDX-License-Identifier: MIT
// The rest of the C ABI and gdn.hpp: versions, status, plans and why, ISA choice, threads.
#include <cmath>
#include <cstring>
#include <set>

#include "c_header.h"
#include "gdn/gdn.hpp"
#include "rule_case.h"

namespace gdn_test {
namespace {

std::string explain(int32_t op, const gdn_rule_args& args) {
  size_t needed = 0;
  EXPECT_EQ(gdn_explain(op, &args, nullptr, 0, &needed), GDN_OK) << gdn_last_error();
  std::string json(needed, '\0');
  EXPECT_EQ(gdn_explain(op, &args, json.data(), json.size(), nullptr), GDN_OK);
  json.resize(needed - 1);
  EXPECT_EQ(std::strlen(json.c_str()), json.size());
  return json;
}

// Value of "key": "text" (first occurrence).
std::string text_of(const std::string& json, const std::string& key) {
  const std::string start = "\"" + key + "\": \"";
  const size_t at = json.find(start);
  if (at == std::string::npos) return "";
  return json.substr(at + start.size(), json.find('"', at + start.size()) - at - start.size());
}

std::vector<std::string> candidates(const std::string& json) {
  std::vector<std::string> names;
  size_t at = json.find("\"candidates\"");
  while ((at = json.find("\"impl\": \"", at)) != std::string::npos) {
    at += 9;
    names.push_back(json.substr(at, json.find('"', at) - at));
  }
  return names;
}

// Restores the automatic ISA and thread count whatever a test did.
struct Restore {
  ~Restore() {
    gdn_set_isa("auto");
    gdn_set_num_threads(0);
  }
};

TEST(Api, VersionsAndStatus) {
  EXPECT_STREQ(gdn_version(), GDN_VERSION_STRING);
  EXPECT_EQ(gdn_abi_version(), GDN_ABI_VERSION);
  std::set<std::string> texts;
  for (gdn_status s = GDN_OK; s <= GDN_INTERNAL; ++s) texts.insert(gdn_status_string(s));
  EXPECT_EQ(texts.size(), 5u);
  EXPECT_STREQ(gdn_status_string(77), "unknown status");
}

TEST(Api, StructSizesOfVersionOne) {
  // Fields are only appended: these offsets are what compiled callers rely on.
  EXPECT_EQ(sizeof(gdn_tensor), 24u + 16u * GDN_MAX_DIMS);
  EXPECT_EQ(offsetof(gdn_rule_args, struct_size), 0u);
  EXPECT_EQ(offsetof(gdn_rule_args, q), 8u);
  EXPECT_EQ(offsetof(gdn_rule_args, round_beta), 220u);
  EXPECT_EQ(offsetof(gdn_rule_args, stream), 224u);
  EXPECT_EQ(offsetof(gdn_rule_args, max_seqlen), 232u);
  EXPECT_EQ(offsetof(gdn_rule_args, zero_tail), 240u);
  EXPECT_EQ(offsetof(gdn_rule_args, split), 244u);
  EXPECT_EQ(offsetof(gdn_rule_args, split_tokens), 248u);
  EXPECT_EQ(offsetof(gdn_rule_args, workspace), 264u);
  EXPECT_EQ(sizeof(gdn_rule_args), 280u);  // no padding that a later field could fall into
  EXPECT_EQ(offsetof(gdn_conv1d_args, num_threads), 104u);
  EXPECT_EQ(offsetof(gdn_gate_args, num_threads), 64u);
  EXPECT_EQ(offsetof(gdn_rmsnorm_gated_args, num_threads), 60u);
  EXPECT_EQ(offsetof(gdn_rmsnorm_gated_args, residual), 72u);
  EXPECT_EQ(offsetof(gdn_glu_args, stream), 40u);
  EXPECT_EQ(offsetof(gdn_qk_rmsnorm_rope_args, num_threads), 120u);
}

TEST(Api, CalledFromC) {
  float o[3] = {0, 0, 0}, state[6] = {9, 9, 9, 9, 9, 9};
  ASSERT_EQ(gdn_test_call_from_c(o, state), GDN_OK) << gdn_last_error();
  const float expected[] = {1, 2, 3, 0, 0, 0};
  for (int i = 0; i < 3; ++i) EXPECT_FLOAT_EQ(o[i], expected[i]);
  for (int i = 0; i < 6; ++i) EXPECT_FLOAT_EQ(state[i], expected[i]);
}

TEST(Plan, ListsReferencesLast) {
  RuleCase c;
  for (const int32_t op : {GDN_OP_CHUNK_FORWARD, GDN_OP_RECURRENT}) {
    const std::string json = explain(op, c.args);
    const std::vector<std::string> names = candidates(json);
    ASSERT_GE(names.size(), 3u) << json;
    EXPECT_EQ(names[names.size() - 2], "reference_fp32");
    EXPECT_EQ(names.back(), "reference_fp64");
    EXPECT_EQ(names.front().rfind(op == GDN_OP_RECURRENT ? "recurrent_" : "chunk_", 0), 0u) << json;
    EXPECT_EQ(text_of(json, "op"), op == GDN_OP_RECURRENT ? "recurrent" : "chunk_forward");
  }
}

TEST(Plan, PureAndWithoutData) {
  RuleCase c;
  const std::string json = explain(GDN_OP_CHUNK_FORWARD, c.args);
  EXPECT_TRUE(c.outputs_untouched());
  for (gdn_tensor* t : {&c.tq, &c.tk, &c.tv, &c.tg, &c.tbeta, &c.to, &c.tinitial, &c.tfinal}) t->data = nullptr;
  EXPECT_EQ(explain(GDN_OP_CHUNK_FORWARD, c.args), json);
  // A model's shape that nobody has the memory for.
  Sizes s;
  s.B = 1;
  s.sequences = 3;
  RuleCase big(s);
  for (gdn_tensor* t : {&big.tq, &big.tk, &big.tv, &big.tg, &big.tbeta, &big.to}) {
    t->shape[1] = 1 << 20;
    t->data = nullptr;
  }
  big.tinitial.data = big.tfinal.data = nullptr;
  const int64_t cu_shape = 4;
  gdn_tensor cu;
  gdn_tensor_init(&cu, nullptr, GDN_I32, 1, &cu_shape);
  big.args.cu_seqlens = &cu;
  EXPECT_NE(explain(GDN_OP_CHUNK_FORWARD, big.args).find("\"tokens\": 1048576"), std::string::npos);
}

TEST(Plan, F64IsOnlyTheFp64References) {
  RuleCase c;
  std::vector<double> v(c.v.begin(), c.v.end());
  c.tv.data = v.data();
  c.tv.dtype = GDN_F64;
  const std::string json = explain(GDN_OP_CHUNK_FORWARD, c.args);
  EXPECT_EQ(text_of(json, "impl"), "reference_fp64") << json;
  EXPECT_NE(json.find("takes no F64 tensors"), std::string::npos) << json;
  EXPECT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
}

TEST(Plan, NamedImplementation) {
  RuleCase c;
  c.args.impl = "reference_fp64";
  EXPECT_EQ(text_of(explain(GDN_OP_RECURRENT, c.args), "impl"), "reference_fp64");
  c.args.impl = "nonsense";
  size_t needed = 0;
  expect_message(gdn_explain(GDN_OP_CHUNK_FORWARD, &c.args, nullptr, 0, &needed), GDN_INVALID_ARGUMENT, "chunk_forward",
                 "impl", "'nonsense'", "auto, ");
  c.args.impl = "recurrent_baseline";  // the other operator's
  expect_message(gdn_chunk_forward(&c.args), GDN_INVALID_ARGUMENT, "chunk_forward", "impl", "'recurrent_baseline'",
                 "reference_fp64");
}

TEST(Plan, EveryAcceptedCandidateRunsAndAgrees) {
  for (const int32_t op : {GDN_OP_CHUNK_FORWARD, GDN_OP_RECURRENT}) {
    Sizes s;
    s.T = 70;
    s.K = 24;
    s.V = 17;
    RuleCase c(s);
    c.args.qk_l2norm = 1;
    const auto run = op == GDN_OP_RECURRENT ? gdn_recurrent : gdn_chunk_forward;
    c.args.impl = "reference_fp64";
    ASSERT_EQ(run(&c.args), GDN_OK);
    const std::vector<float> o = c.o, final = c.final;
    for (const std::string& name : candidates(explain(op, c.args))) {
      c.args.impl = name.c_str();
      std::fill(c.o.begin(), c.o.end(), kUntouched);
      const gdn_status status = run(&c.args);
      if (status == GDN_UNSUPPORTED) continue;
      SCOPED_TRACE(name);
      ASSERT_EQ(status, GDN_OK) << gdn_last_error();
      double error = 0, size = 0;
      for (size_t i = 0; i < o.size(); ++i) {
        error += std::pow(double(c.o[i]) - double(o[i]), 2);
        size += std::pow(double(o[i]), 2);
      }
      EXPECT_LT(std::sqrt(error / size), 5e-6);
      error = size = 0;
      for (size_t i = 0; i < final.size(); ++i) {
        error += std::pow(double(c.final[i]) - double(final[i]), 2);
        size += std::pow(double(final[i]), 2);
      }
      EXPECT_LT(std::sqrt(error / size), 5e-6);
    }
  }
}

TEST(Plan, SplittingIsAcceptedAndExplainedOnTheCpu) {
  const auto split_of = [](const RuleCase& c) { return text_of(explain(GDN_OP_CHUNK_FORWARD, c.args), "split"); };
  Sizes s;
  s.T = 200;
  RuleCase c(s);
  const std::string impl = text_of(explain(GDN_OP_CHUNK_FORWARD, c.args), "impl");
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
  const std::vector<float> whole = c.o;
  EXPECT_EQ(split_of(c), "off: " + impl + " does not split");
  c.args.split_tokens = 64;
  c.args.split_exact = 1;
  c.args.split_threshold = 7.5f;
  EXPECT_EQ(split_of(c), "off: " + impl + " does not split");
  const std::string json = explain(GDN_OP_CHUNK_FORWARD, c.args);
  EXPECT_NE(json.find("\"split_tokens\": 0,"), std::string::npos) << json;
  EXPECT_NE(json.find("\"split_exact\": true, \"split_threshold\": 7.5}"), std::string::npos) << json;
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
  EXPECT_EQ(c.o, whole);
  c.args.batch_invariant = 1;  // a length that the caller names is the same for every batch
  EXPECT_EQ(split_of(c), "off: " + impl + " does not split");
  c.args.split_tokens = int64_t{1} << 40;
  EXPECT_EQ(split_of(c), "off: no sequence is longer than a segment");
  c.args.split_tokens = 0;
  EXPECT_EQ(split_of(c), "off: asked, or batch_invariant without split_tokens");
  c.args.batch_invariant = 0;
  c.args.split = GDN_SPLIT_OFF;
  EXPECT_EQ(split_of(c), "off");

  Sizes many;
  many.B = 17;  // times 4 heads: past the default of GDN_SPLIT_PAIRS
  many.T = 70;
  RuleCase d(many);
  EXPECT_EQ(split_of(d), "off: more than 64 pairs of sequence and head");
  d.args.split_tokens = 64;
  EXPECT_EQ(split_of(d), "off: " + impl + " does not split");
}

TEST(Plan, WorkspaceOfCpuTensors) {
  RuleCase c;
  int64_t bytes = -1;
  EXPECT_EQ(gdn_chunk_forward_workspace(&c.args, &bytes), GDN_OK) << gdn_last_error();
  EXPECT_EQ(bytes, 0);
  EXPECT_TRUE(c.outputs_untouched());
  expect_message(gdn_chunk_forward_workspace(&c.args, nullptr), GDN_INVALID_ARGUMENT, "chunk_forward_workspace",
                 "bytes", "NULL", "a place");
  c.args.split_tokens = 65;
  bytes = -1;
  expect_message(gdn_chunk_forward_workspace(&c.args, &bytes), GDN_INVALID_ARGUMENT, "chunk_forward", "split_tokens",
                 "65", "a multiple of 64");
  EXPECT_EQ(bytes, -1);
}

TEST(Plan, JsonIsTruncatedSafely) {
  RuleCase c;
  char small[10];
  std::memset(small, 'x', sizeof(small));
  size_t needed = 0;
  ASSERT_EQ(gdn_explain(GDN_OP_CHUNK_FORWARD, &c.args, small, 8, &needed), GDN_OK);
  EXPECT_GT(needed, 8u);
  EXPECT_EQ(small[7], '\0');
  EXPECT_EQ(small[8], 'x');
  EXPECT_EQ(gdn_explain(GDN_OP_CHUNK_FORWARD, &c.args, nullptr, 8, &needed), GDN_INVALID_ARGUMENT);
  EXPECT_EQ(gdn_explain(2, &c.args, small, 8, &needed), GDN_INVALID_ARGUMENT);
  EXPECT_NE(std::string(gdn_last_error()).find("argument 'op': found 2"), std::string::npos);
}

TEST(Isa, CapAndUncap) {
  const Restore restore;
  const std::string best = gdn_get_isa();
  EXPECT_EQ(gdn_set_isa(nullptr), GDN_INVALID_ARGUMENT);
  EXPECT_EQ(gdn_set_isa("sse9"), GDN_INVALID_ARGUMENT);
  EXPECT_NE(std::string(gdn_last_error()).find("'sse9'"), std::string::npos);
  const std::string info = gdn::info();
  const std::string usable = info.substr(info.find("\"usable\""), info.find("\"active\"") - info.find("\"usable\""));
  for (const char* name : {"baseline", "neon", "avx2", "avx512", "amx"}) {
    const bool can = usable.find(std::string("\"") + name + "\"") != std::string::npos;
    EXPECT_EQ(gdn_set_isa(name), can ? GDN_OK : GDN_UNSUPPORTED) << name;
    if (!can) continue;
    EXPECT_STREQ(gdn_get_isa(), name);
    RuleCase c;
    const std::string json = explain(GDN_OP_CHUNK_FORWARD, c.args);
    EXPECT_EQ(json.find("capped by GDN_ISA") != std::string::npos, best != name) << json;
    EXPECT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
  }
  EXPECT_EQ(gdn_set_isa("auto"), GDN_OK);
  EXPECT_EQ(gdn_get_isa(), best);
}

TEST(Threads, SetAndGet) {
  const Restore restore;
  EXPECT_EQ(gdn_set_num_threads(3), GDN_OK);
  EXPECT_EQ(gdn_get_num_threads(), 3);
  EXPECT_EQ(gdn_set_num_threads(-1), GDN_INVALID_ARGUMENT);
  EXPECT_EQ(gdn_get_num_threads(), 3);
  EXPECT_EQ(gdn_set_num_threads(0), GDN_OK);
  EXPECT_GE(gdn_get_num_threads(), 1);
  EXPECT_EQ(gdn_release_memory(), GDN_OK);
  EXPECT_EQ(gdn_measure_peak(-1, nullptr, nullptr), GDN_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(gdn_last_error()).rfind("measure_peak: argument", 0), 0u);
}

TEST(Hpp, PrefillInFiveLines) {
  const RuleCase c;
  const auto [B, T, Hk, Hv, K, V, N] = c.n;
  std::vector<float> o_data(c.o.size()), state_data(c.final.size());
  gdn::Tensor q(c.q.data(), {B, T, Hk, K}), k(c.k.data(), {B, T, Hk, K}), v(c.v.data(), {B, T, Hv, V});
  gdn::Tensor g(c.g.data(), {B, T, Hv}), beta(c.beta.data(), {B, T, Hv});
  gdn::Tensor o(o_data.data(), {B, T, Hv, V}), state(state_data.data(), {B, Hv, K, V});
  gdn::chunk_forward({.q = q, .k = k, .v = v, .g = g, .beta = beta, .o = o, .final_state = state});

  RuleCase same;
  same.args.initial_state = nullptr;
  ASSERT_EQ(gdn_chunk_forward(&same.args), GDN_OK);
  EXPECT_EQ(o_data, same.o);
  EXPECT_EQ(state_data, same.final);
}

TEST(Hpp, ErrorsAreExceptions) {
  std::vector<float> x(8);
  try {
    gdn::recurrent({.q = gdn::Tensor(x.data(), {1, 1, 2, 4})});
    FAIL() << "accepted a call without k";
  } catch (const gdn::Error& error) {
    EXPECT_EQ(error.status(), GDN_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error.what()).find("recurrent: argument 'k': found NULL"), std::string::npos);
  }
  EXPECT_THROW(gdn::Tensor(x.data(), {1, 2}, {1}), gdn::Error);
  EXPECT_THROW(gdn::set_isa("none"), gdn::Error);
}

TEST(Hpp, TensorsKeepStridesAndDtypes) {
  const std::vector<int64_t> numbers(6);
  const gdn::Tensor t(numbers.data(), {2, 2}, {3, 1});
  EXPECT_EQ(t.get()->dtype, GDN_I64);
  EXPECT_EQ(t.get()->strides[0], 3);
  const uint16_t half[4] = {};
  const gdn::Tensor h(half, GDN_BF16, {4});
  EXPECT_EQ(h.get()->dtype, GDN_BF16);
  EXPECT_EQ(h.get()->ndim, 1);
}

}  // namespace
}  // namespace gdn_test
