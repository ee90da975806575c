// SPDX-License-Identifier: MIT
// Every refusal of gdn_rule_args: status, function, argument, found, expected; and nothing written.
#include <cmath>
#include <functional>
#include <limits>

#include "rule_case.h"

namespace gdn_test {
namespace {

struct Refusal {
  const char* name;
  gdn_status code;
  const char* argument;
  const char* found;
  const char* expected;
  std::function<void(RuleCase&)> change;
};

// Refused by both operators.
const std::vector<Refusal>& refusals() {
  constexpr gdn_status kInvalid = GDN_INVALID_ARGUMENT, kUnsupported = GDN_UNSUPPORTED;
  static const float nan = std::numeric_limits<float>::quiet_NaN();
  static const float inf = std::numeric_limits<float>::infinity();
  static const std::vector<Refusal> list = {
      {"q null", kInvalid, "q", "NULL", "[B, T, Hk, K]", [](RuleCase& c) { c.args.q = nullptr; }},
      {"k null", kInvalid, "k", "NULL", "[B, T, Hk, K]", [](RuleCase& c) { c.args.k = nullptr; }},
      {"v null", kInvalid, "v", "NULL", "[B, T, Hv, V]", [](RuleCase& c) { c.args.v = nullptr; }},
      {"o null", kInvalid, "o", "NULL", "[B, T, Hv, V]", [](RuleCase& c) { c.args.o = nullptr; }},
      {"struct_size zero", kInvalid, "struct_size", "0", "at least", [](RuleCase& c) { c.args.struct_size = 0; }},
      {"struct_size garbage", kInvalid, "struct_size", "18446744073709551615", "at least",
       [](RuleCase& c) { c.args.struct_size = SIZE_MAX; }},
      {"q rank", kInvalid, "q", "shape [2, 5, 2]", "[B, T, Hk, K]", [](RuleCase& c) { c.tq.ndim = 3; }},
      {"q ndim negative", kInvalid, "q", "ndim -1", "[B, T, Hk, K]", [](RuleCase& c) { c.tq.ndim = -1; }},
      {"q ndim large", kInvalid, "q", "ndim 1000", "[B, T, Hk, K]", [](RuleCase& c) { c.tq.ndim = 1000; }},
      {"q negative size", kInvalid, "q", "shape [2, -5, 2, 6]", "", [](RuleCase& c) { c.tq.shape[1] = -5; }},
      {"q negative stride", kInvalid, "q", "strides [60, -12, 6, 1]", "strides >= 0",
       [](RuleCase& c) { c.tq.strides[1] = -12; }},
      {"q dtype int", kInvalid, "q", "dtype I32", "F32, BF16, F16, F64", [](RuleCase& c) { c.tq.dtype = GDN_I32; }},
      {"q dtype unknown", kInvalid, "q", "dtype number 99", "F32", [](RuleCase& c) { c.tq.dtype = 99; }},
      {"q dtype zero", kInvalid, "q", "dtype number 0", "F32", [](RuleCase& c) { c.tq.dtype = 0; }},
      {"k on CUDA", kInvalid, "k", "CUDA device 0", "the CPU, where 'q' lies",
       [](RuleCase& c) { c.tk.device_type = GDN_CUDA; }},
      {"q on no device", kInvalid, "q", "device_type 7", "GDN_CUDA", [](RuleCase& c) { c.tq.device_type = 7; }},
      {"q on nothing", kInvalid, "q", "device_type 0", "GDN_CPU", [](RuleCase& c) { c.tq.device_type = 0; }},
      {"q NULL data", kInvalid, "q", "NULL data", "data pointer", [](RuleCase& c) { c.tq.data = nullptr; }},
      {"q misaligned", kInvalid, "q", "data address", "alignment to the element size of 4",
       [](RuleCase& c) { c.tq.data = reinterpret_cast<char*>(c.q.data()) + 2; }},
      {"k of another shape", kInvalid, "k", "shape [2, 5, 3, 6]", "[B, T, Hk, K] with B = 2, T = 5, Hk = 2, K = 6",
       [](RuleCase& c) { c.tk.shape[2] = 3; }},
      {"v of another T", kInvalid, "v", "shape [2, 4, 4, 3]", "T = 5", [](RuleCase& c) { c.tv.shape[1] = 4; }},
      {"g shape", kInvalid, "g", "shape [2, 5, 2]", "[B, T, Hv] with B = 2, T = 5, Hv = 4",
       [](RuleCase& c) { c.tg.shape[2] = 2; }},
      {"beta rank", kInvalid, "beta", "shape [2, 5]", "[B, T, Hv]", [](RuleCase& c) { c.tbeta.ndim = 2; }},
      {"o shape", kInvalid, "o", "shape [2, 5, 4, 2]", "V = 3", [](RuleCase& c) { c.to.shape[3] = 2; }},
      {"Hk zero", kInvalid, "q", "Hk = 0", "Hk >= 1", [](RuleCase& c) { c.tq.shape[2] = c.tk.shape[2] = 0; }},
      {"K zero", kInvalid, "q", "K = 0", "K >= 1", [](RuleCase& c) { c.tq.shape[3] = c.tk.shape[3] = 0; }},
      {"Hv zero", kInvalid, "v", "Hv = 0", "Hv >= 1", [](RuleCase& c) { c.tv.shape[2] = 0; }},
      {"V zero", kInvalid, "v", "V = 0", "V >= 1", [](RuleCase& c) { c.tv.shape[3] = 0; }},
      {"K too large", kUnsupported, "q", "K = 513", "512",
       [](RuleCase& c) {
         c.tq.shape[3] = c.tk.shape[3] = 513;
         c.tq.strides[0] = c.tq.strides[1] = c.tq.strides[2] = c.tq.strides[3] = 0;
         c.tk.strides[0] = c.tk.strides[1] = c.tk.strides[2] = c.tk.strides[3] = 0;
       }},
      {"V too large", kUnsupported, "v", "V = 600", "512",
       [](RuleCase& c) {
         c.tv.shape[3] = 600;
         for (int64_t& s : c.tv.strides) s = 0;
       }},
      {"Hv not a multiple", kInvalid, "v", "Hv = 3", "multiple of Hk = 2", [](RuleCase& c) { c.tv.shape[2] = 3; }},
      {"q extent overflows", kInvalid, "q", "strides", "2^63",
       [](RuleCase& c) { c.tq.strides[0] = std::numeric_limits<int64_t>::max() / 2; }},
      {"q element count overflows", kInvalid, "q", "shape", "2^63",
       [](RuleCase& c) {
         c.tq.shape[0] = c.tq.shape[1] = int64_t{1} << 40;
         for (int64_t& s : c.tq.strides) s = 0;
       }},
      {"q end wraps", kInvalid, "q", "strides", "2^63",
       [](RuleCase& c) { c.tq.strides[0] = (std::numeric_limits<int64_t>::max() / 4) - 100; c.tq.data = reinterpret_cast<void*>(~uintptr_t{0} - 3); }},
      {"o broadcast", kInvalid, "o", "strides [60, 0, 3, 1]", "do not overlap",
       [](RuleCase& c) { c.to.strides[1] = 0; }},
      {"o overlaps itself", kInvalid, "o", "strides [60, 12, 2, 1]", "do not overlap",
       [](RuleCase& c) { c.to.strides[2] = 2; }},
      {"o is v", kInvalid, "o", "overlaps 'v'", "memory of its own", [](RuleCase& c) { c.to.data = c.v.data(); }},
      {"o in q's tail", kInvalid, "o", "overlaps 'q'", "memory of its own",
       [](RuleCase& c) { c.to.data = c.q.data() + c.q.size() - 1; }},
      {"gate_form", kInvalid, "gate_form", "3", "0..2", [](RuleCase& c) { c.args.gate_form = 3; }},
      {"beta_form", kInvalid, "beta_form", "-1", "0..2", [](RuleCase& c) { c.args.beta_form = -1; }},
      {"head_map", kInvalid, "head_map", "2", "0..1", [](RuleCase& c) { c.args.head_map = 2; }},
      {"state_layout", kInvalid, "state_layout", "7", "0..1", [](RuleCase& c) { c.args.state_layout = 7; }},
      {"null_slots", kInvalid, "null_slots", "2", "0..1", [](RuleCase& c) { c.args.null_slots = 2; }},
      {"qk_l2norm", kInvalid, "qk_l2norm", "2", "0..1", [](RuleCase& c) { c.args.qk_l2norm = 2; }},
      {"batch_invariant", kInvalid, "batch_invariant", "5", "0..1", [](RuleCase& c) { c.args.batch_invariant = 5; }},
      {"round_qk", kInvalid, "round_qk", "-1", "0..1", [](RuleCase& c) { c.args.round_qk = -1; }},
      {"round_beta", kInvalid, "round_beta", "3", "0..1", [](RuleCase& c) { c.args.round_beta = 3; }},
      {"max_seqlen", kInvalid, "max_seqlen", "-1", "0 for unknown", [](RuleCase& c) { c.args.max_seqlen = -1; }},
      {"zero_tail", kInvalid, "zero_tail", "2", "0..1", [](RuleCase& c) { c.args.zero_tail = 2; }},
      {"split", kInvalid, "split", "2", "0..1", [](RuleCase& c) { c.args.split = 2; }},
      {"split_exact", kInvalid, "split_exact", "-1", "0..1", [](RuleCase& c) { c.args.split_exact = -1; }},
      {"split_tokens odd", kInvalid, "split_tokens", "96", "a multiple of 64, or 0",
       [](RuleCase& c) { c.args.split_tokens = 96; }},
      {"split_tokens negative", kInvalid, "split_tokens", "-64", "a multiple of 64, or 0",
       [](RuleCase& c) { c.args.split_tokens = -64; }},
      {"split_tokens with off", kInvalid, "split_tokens", "128 with split GDN_SPLIT_OFF (1)", "expected 0",
       [](RuleCase& c) { c.args.split_tokens = 128; c.args.split = GDN_SPLIT_OFF; }},
      {"split_threshold nan", kInvalid, "split_threshold", "nan", "0 for 10", [](RuleCase& c) { c.args.split_threshold = nan; }},
      {"split_threshold negative", kInvalid, "split_threshold", "-1", "0 for 10",
       [](RuleCase& c) { c.args.split_threshold = -1; }},
      {"workspace without size", kInvalid, "workspace_bytes", "0", "the size of workspace",
       [](RuleCase& c) { c.args.workspace = reinterpret_cast<void*>(uintptr_t{256}); }},
      {"workspace size alone", kInvalid, "workspace_bytes", "64 with workspace NULL", "expected 0",
       [](RuleCase& c) { c.args.workspace_bytes = 64; }},
      {"workspace odd", kInvalid, "workspace", "not a multiple of 256", "aligned to 256 bytes",
       [](RuleCase& c) { c.args.workspace = reinterpret_cast<void*>(uintptr_t{128}); c.args.workspace_bytes = 64; }},
      {"num_threads", kInvalid, "num_threads", "-2", "0 (default)", [](RuleCase& c) { c.args.num_threads = -2; }},
      {"scale nan", kInvalid, "scale", "nan", "finite", [](RuleCase& c) { c.args.scale = nan; }},
      {"eps inf", kInvalid, "l2norm_eps", "inf", "finite", [](RuleCase& c) { c.args.l2norm_eps = inf; }},
      {"eps negative", kInvalid, "l2norm_eps", "-1", "finite", [](RuleCase& c) { c.args.l2norm_eps = -1; }},
      {"raw gate without g", kInvalid, "g", "NULL", "raw gate input",
       [](RuleCase& c) { c.args.gate_form = GDN_GATE_RAW; c.args.g = nullptr; }},
      {"raw gate without A_log", kInvalid, "A_log", "NULL", "[Hv]",
       [](RuleCase& c) { c.args.gate_form = GDN_GATE_RAW; }},
      {"A_log without raw gate", kInvalid, "A_log", "gate_form 0", "GDN_GATE_RAW",
       [](RuleCase& c) {
         static gdn_tensor a_log;
         a_log = make_tensor(c.g.data(), GDN_F32, {4});
         c.args.A_log = &a_log;
       }},
      {"initial_state in the other layout", kInvalid, "initial_state", "shape [2, 4, 6, 3]", "[N, Hv, V, K]",
       [](RuleCase& c) { c.args.state_layout = GDN_STATE_V_FIRST; }},
      {"initial_state rows", kInvalid, "initial_state", "shape [3, 4, 6, 3]", "N = 2",
       [](RuleCase& c) { c.tinitial.shape[0] = 3; }},
      {"final_state dtype", kInvalid, "final_state", "dtype I64", "F32", [](RuleCase& c) { c.tfinal.dtype = GDN_I64; }},
      {"final_state shifted in initial_state", kInvalid, "final_state", "overlaps 'initial_state'",
       "exactly the view of 'initial_state'", [](RuleCase& c) { c.tfinal.data = c.initial.data() + 1; }},
      {"final_state in o", kInvalid, "final_state", "overlaps 'o'", "memory of its own",
       [](RuleCase& c) { c.tfinal.data = c.o.data() + 60; }},
      {"cu_seqlens with a batch", kInvalid, "cu_seqlens", "B = 2", "B = 1",
       [](RuleCase& c) { c.args.cu_seqlens = c.indices({0, 2, 5}); }},
      {"index out of range", kInvalid, "initial_state_indices", "initial_state_indices[1] = 2", "below 2",
       [](RuleCase& c) { c.args.initial_state_indices = c.indices({0, 2}); }},
      {"final index out of range", kInvalid, "final_state_indices", "final_state_indices[0] = 9", "below 2",
       [](RuleCase& c) { c.args.final_state_indices = c.indices({9, 0}); }},
      {"index count", kInvalid, "initial_state_indices", "shape [3]", "N = 2",
       [](RuleCase& c) { c.args.initial_state_indices = c.indices({0, 1, 1}); }},
      {"index dtype", kInvalid, "final_state_indices", "dtype F32", "I32, I64",
       [](RuleCase& c) {
         static gdn_tensor t;
         t = make_tensor(c.g.data(), GDN_F32, {2});
         c.args.final_state_indices = &t;
       }},
      {"indices without a state", kInvalid, "initial_state_indices", "without initial_state", "NULL",
       [](RuleCase& c) { c.args.initial_state_indices = c.indices({0, 1}); c.args.initial_state = nullptr; }},
      {"has_initial_state without a state", kInvalid, "has_initial_state", "without initial_state", "NULL",
       [](RuleCase& c) { c.args.has_initial_state = c.indices({0, 1}); c.args.initial_state = nullptr; }},
      {"final indices without a state", kInvalid, "final_state_indices", "without final_state", "NULL",
       [](RuleCase& c) { c.args.final_state_indices = c.indices({0, 1}); c.args.final_state = nullptr; }},
      {"checkpoints without every", kInvalid, "checkpoint_every", "0", "at least 1",
       [](RuleCase& c) { c.args.checkpoints = &c.tinitial; }},
      {"every negative", kInvalid, "checkpoint_every", "-4", "0 without checkpoints",
       [](RuleCase& c) { c.args.checkpoint_every = -4; }},
      {"too few checkpoints", kInvalid, "checkpoints", "room for 2", "M = 4",
       [](RuleCase& c) {
         static std::vector<float> memory;
         static gdn_tensor t;
         memory.assign(c.initial.size(), 0);
         t = c.tinitial;
         t.data = memory.data();
         c.args.checkpoints = &t;
         c.args.checkpoint_every = 2;
       }},
      {"checkpoint index", kInvalid, "checkpoint_indices", "checkpoint_indices[1] = 5", "below 2",
       [](RuleCase& c) {
         static std::vector<float> memory;
         static gdn_tensor t;
         memory.assign(c.initial.size(), 0);
         t = c.tinitial;
         t.data = memory.data();
         c.args.checkpoints = &t;
         c.args.checkpoint_every = 4;
         c.args.checkpoint_indices = c.indices({0, 5});
       }},
      {"checkpoint_indices alone", kInvalid, "checkpoint_indices", "without checkpoints", "NULL",
       [](RuleCase& c) { c.args.checkpoint_indices = c.indices({0}); }},
      {"unknown impl", kInvalid, "impl", "'chunk_magic'", "reference_fp64",
       [](RuleCase& c) { c.args.impl = "chunk_magic"; }},
      {"impl that refuses", kUnsupported, "impl", "refuses", "F64",
       [](RuleCase& c) {
         static std::vector<double> q;
         q.assign(c.q.size(), 0);
         c.tq.data = q.data();
         c.tq.dtype = GDN_F64;
         c.args.impl = "reference_fp32";
       }},
  };
  return list;
}

TEST(ValidateRule, RefusesAndWritesNothing) {
  for (const Refusal& r : refusals()) {
    for (const bool recurrent : {false, true}) {
      SCOPED_TRACE(r.name);
      RuleCase c;
      r.change(c);
      const gdn_status status = recurrent ? gdn_recurrent(&c.args) : gdn_chunk_forward(&c.args);
      expect_message(status, r.code, recurrent ? "recurrent" : "chunk_forward", r.argument, r.found, r.expected);
      EXPECT_TRUE(c.outputs_untouched());
    }
  }
}

TEST(ValidateRule, NullArgs) {
  expect_message(gdn_chunk_forward(nullptr), GDN_INVALID_ARGUMENT, "chunk_forward", "args", "NULL", "argument struct");
  expect_message(gdn_recurrent(nullptr), GDN_INVALID_ARGUMENT, "recurrent", "args", "NULL", "argument struct");
}

TEST(ValidateRule, CuSeqlens) {
  struct Example {
    std::vector<int64_t> cu;
    const char* found;
    const char* expected;
  };
  const Example examples[] = {
      {{1, 3, 5}, "cu_seqlens[0] = 1", "0"},
      {{0, -1, 5}, "cu_seqlens[1] = -1 after 0", "non-decreasing"},
      {{0, 4, 3}, "cu_seqlens[2] = 3 after 4", "non-decreasing"},
      {{0, 4, 6}, "cu_seqlens[2] = 6", "T = 5"},
      {{0, 2, std::numeric_limits<int64_t>::max()}, "cu_seqlens[2] = 9223372036854775807", "T = 5"},
      {{-3, 2, 5}, "cu_seqlens[0] = -3", "0"},
      {{}, "shape [0]", "N >= 0"}};
  Sizes s;
  s.B = 1;
  s.sequences = 2;
  for (const Example& e : examples) {
    RuleCase c(s);
    int64_t none = 0;
    gdn_tensor empty = make_tensor(&none, GDN_I64, {0});
    c.args.cu_seqlens = e.cu.empty() ? &empty : c.indices(e.cu);
    expect_message(gdn_chunk_forward(&c.args), GDN_INVALID_ARGUMENT, "chunk_forward", "cu_seqlens", e.found,
                   e.expected);
    EXPECT_TRUE(c.outputs_untouched());
  }
  RuleCase c(s);
  int32_t cu32[] = {0, 2, 5};
  gdn_tensor t = make_tensor(cu32, GDN_I32, {3});
  c.args.cu_seqlens = &t;
  EXPECT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
}

TEST(ValidateRule, VerifyArgumentsBelongToRecurrent) {
  RuleCase c;
  c.args.token_state_indices = c.indices({0, 1}, {2, 1});
  expect_message(gdn_chunk_forward(&c.args), GDN_INVALID_ARGUMENT, "chunk_forward", "token_state_indices", "a tensor",
                 "gdn_recurrent");
  RuleCase d;
  d.args.snapshots = &d.tinitial;
  expect_message(gdn_chunk_forward(&d.args), GDN_INVALID_ARGUMENT, "chunk_forward", "snapshots", "a tensor",
                 "gdn_recurrent");
}

TEST(ValidateRule, TokenStateIndices) {
  Sizes s;
  s.T = 2;
  s.sequences = 6;
  const auto refuse = [&](const char* argument, const char* found, const char* expected,
                          const std::function<void(RuleCase&)>& change) {
    RuleCase c(s);
    c.args.final_state = &c.tinitial;
    c.args.token_state_indices = c.indices({0, 1, 2, 3}, {2, 2});
    change(c);
    const std::vector<float> before = c.initial;
    expect_message(gdn_recurrent(&c.args), GDN_INVALID_ARGUMENT, "recurrent", argument, found, expected);
    EXPECT_TRUE(c.outputs_untouched());
    EXPECT_EQ(c.initial, before);
  };
  refuse("token_state_indices", "S = 1", "longest sequence, 2", [](RuleCase& c) {
    c.args.token_state_indices = c.indices({0, 1}, {2, 1});
  });
  refuse("token_state_indices", "token_state_indices[1][1] = 6", "below 6", [](RuleCase& c) {
    c.args.token_state_indices = c.indices({0, 1, 2, 6}, {2, 2});
  });
  refuse("token_state_indices", "shape [3, 2]", "N = 2", [](RuleCase& c) {
    c.args.token_state_indices = c.indices({0, 1, 2, 3, 4, 5}, {3, 2});
  });
  refuse("num_accepted", "num_accepted[0] = 3", "1..2", [](RuleCase& c) { c.args.num_accepted = c.indices({3, 1}); });
  refuse("num_accepted", "num_accepted[1] = 0", "1..2", [](RuleCase& c) { c.args.num_accepted = c.indices({1, 0}); });
  refuse("num_accepted", "without token_state_indices", "NULL", [](RuleCase& c) {
    c.args.token_state_indices = nullptr;
    c.args.initial_state_indices = c.indices({0, 1});
    c.args.num_accepted = c.indices({1, 1});
  });
  refuse("initial_state_indices", "beside token_state_indices", "NULL", [](RuleCase& c) {
    c.args.initial_state_indices = c.indices({0, 1});
  });

  // A padded row: every slot null, the count is garbage.
  RuleCase c(s);
  c.args.impl = "reference_fp32";
  c.args.final_state = &c.tinitial;
  c.args.token_state_indices = c.indices({0, 1, -1, -1}, {2, 2});
  c.args.num_accepted = c.indices({2, 0});
  EXPECT_EQ(gdn_recurrent(&c.args), GDN_OK) << gdn_last_error();
  EXPECT_EQ(c.o.back(), 0.0f);
}

TEST(ValidateRule, Snapshots) {
  RuleCase c;
  std::vector<float> memory(size_t(2 * 4 * 4 * 6 * 3), kUntouched);
  gdn_tensor t = make_tensor(memory.data(), GDN_F32, {2, 4, 4, 6, 3});
  c.args.snapshots = &t;
  expect_message(gdn_recurrent(&c.args), GDN_INVALID_ARGUMENT, "recurrent", "snapshots", "S = 4",
                 "longest sequence, 5");
  t.shape[2] = 3;
  expect_message(gdn_recurrent(&c.args), GDN_INVALID_ARGUMENT, "recurrent", "snapshots", "shape [2, 4, 3, 6, 3]",
                 "Hv = 4");
  EXPECT_TRUE(c.outputs_untouched());
}

TEST(ValidateRule, EmptyWorkReturnsAndKeepsFinalStates) {
  for (const auto op : {gdn_chunk_forward, gdn_recurrent}) {
    Sizes s;
    s.T = 0;
    RuleCase c(s);
    ASSERT_EQ(op(&c.args), GDN_OK) << gdn_last_error();
    EXPECT_EQ(c.final, c.initial);
    c.args.initial_state = nullptr;
    ASSERT_EQ(op(&c.args), GDN_OK) << gdn_last_error();
    for (const float x : c.final) EXPECT_EQ(x, 0.0f);

    // No sequences: nothing happens, whatever else the shapes say.
    Sizes none;
    none.B = 0;
    RuleCase d(none);
    EXPECT_EQ(op(&d.args), GDN_OK) << gdn_last_error();
    Sizes one;
    one.B = 1;
    one.sequences = 0;
    RuleCase e(one);
    e.args.cu_seqlens = e.indices({0});
    EXPECT_EQ(op(&e.args), GDN_OK) << gdn_last_error();
    EXPECT_TRUE(e.outputs_untouched());
  }
}

TEST(ValidateRule, PackedProjectionsAreAccepted) {
  // q, k, v and o as slices of one buffer [T, q | k | v | o]: ranges interleave, elements do not.
  const int64_t T = 5, Hk = 2, Hv = 4, K = 6, V = 3, row = 2 * Hk * K + 2 * Hv * V;
  std::vector<float> packed = random_floats(size_t(T * row), 3);
  const auto slice = [&](int64_t offset, int64_t heads, int64_t dim) {
    gdn_tensor t = make_tensor(packed.data() + offset, GDN_F32, {1, T, heads, dim});
    t.strides[0] = T * row;
    t.strides[1] = row;
    return t;
  };
  gdn_tensor q = slice(0, Hk, K), k = slice(Hk * K, Hk, K), v = slice(2 * Hk * K, Hv, V);
  gdn_tensor o = slice(2 * Hk * K + Hv * V, Hv, V);
  gdn_rule_args a = GDN_INIT(gdn_rule_args);
  a.q = &q;
  a.k = &k;
  a.v = &v;
  a.o = &o;
  EXPECT_EQ(gdn_chunk_forward(&a), GDN_OK) << gdn_last_error();
  o.data = packed.data() + 2 * Hk * K + Hv * V - 1;  // one element into v
  expect_message(gdn_chunk_forward(&a), GDN_INVALID_ARGUMENT, "chunk_forward", "o", "overlaps 'v'",
                 "memory of its own");
}

TEST(ValidateRule, PoolsWithPaddedRowsAndInPlaceStates) {
  Sizes s;
  RuleCase c(s);
  c.args.final_state = &c.tinitial;
  EXPECT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
  // Slots with a gap, and a separate gdn_tensor that is the same view.
  const int64_t slot = s.Hv * s.K * s.V + 17;
  std::vector<float> pool(size_t(4 * slot), 0.5f);
  gdn_tensor t = make_tensor(pool.data(), GDN_F32, {4, s.Hv, s.K, s.V}), same = t;
  t.strides[0] = same.strides[0] = slot;
  c.args.initial_state = &t;
  c.args.final_state = &same;
  c.args.initial_state_indices = c.indices({2, 0});
  EXPECT_EQ(gdn_recurrent(&c.args), GDN_OK) << gdn_last_error();
  for (int64_t n = 0; n < 4; ++n) {
    for (int64_t i = slot - 17; i < slot; ++i) EXPECT_EQ(pool[size_t(n * slot + i)], 0.5f);
  }
}

TEST(ValidateRule, LargerStructFromTheFuture) {
  RuleCase c;
  struct Future {
    gdn_rule_args args;
    int64_t more[4];
  } future = {c.args, {0, 0, 0, 0}};
  future.args.struct_size = sizeof(future);
  EXPECT_EQ(gdn_chunk_forward(&future.args), GDN_OK) << gdn_last_error();
  RuleCase d;
  future.args = d.args;
  future.args.struct_size = sizeof(future);
  future.more[2] = 1;
  expect_message(gdn_chunk_forward(&future.args), GDN_UNSUPPORTED, "chunk_forward", "struct_size",
                 "field set past byte", "zero");
  EXPECT_TRUE(d.outputs_untouched());
}

}  // namespace
}  // namespace gdn_test
