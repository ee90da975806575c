// SPDX-License-Identifier: MIT
// Refusals of the convolution, the gate, the norm and the rotary embedding; and calls that must be accepted.
#include <functional>
#include <limits>

#include "rule_case.h"

namespace gdn_test {
namespace {

constexpr gdn_status kInvalid = GDN_INVALID_ARGUMENT;
constexpr gdn_status kUnsupported = GDN_UNSUPPORTED;

// Named tensors of one call; outputs are those the test lists.
struct Slot {
  std::vector<float> data;
  gdn_tensor tensor;
  void set(const std::vector<int64_t>& shape, float fill) {
    size_t n = 1;
    for (const int64_t d : shape) n *= size_t(d);
    data.assign(n, fill);
    tensor = make_tensor(data.data(), GDN_F32, shape);
  }
  bool untouched() const {
    for (const float x : data) {
      if (x != kUntouched) return false;
    }
    return true;
  }
};

template <class Case>
struct OpRefusal {
  const char* name;
  gdn_status code;
  const char* argument;
  const char* found;
  const char* expected;
  std::function<void(Case&)> change;
};

template <class Case>
void expect_refusals(const char* function, const std::vector<OpRefusal<Case>>& list) {
  for (const OpRefusal<Case>& r : list) {
    SCOPED_TRACE(r.name);
    Case c;
    r.change(c);
    expect_message(c.run(), r.code, function, r.argument, r.found, r.expected);
    EXPECT_TRUE(c.untouched());
  }
}

struct ConvCase {
  Slot x, weight, bias, y, initial, final;
  std::vector<int64_t> numbers;
  gdn_tensor index;
  gdn_conv1d_args args = GDN_INIT(gdn_conv1d_args);
  ConvCase() {  // B = 2, D = 3, T = 5, W = 4, L = 6
    x.set({2, 3, 5}, 1);
    weight.set({3, 4}, 1);
    bias.set({3}, 1);
    y.set({2, 3, 5}, kUntouched);
    initial.set({2, 3, 6}, 1);
    final.set({2, 3, 6}, kUntouched);
    args.x = &x.tensor;
    args.weight = &weight.tensor;
    args.bias = &bias.tensor;
    args.y = &y.tensor;
    args.initial_state = &initial.tensor;
    args.final_state = &final.tensor;
  }
  ConvCase(const ConvCase&) = delete;
  ConvCase& operator=(const ConvCase&) = delete;
  const gdn_tensor* indices(std::vector<int64_t> values) {
    numbers = std::move(values);
    index = make_tensor(numbers.data(), GDN_I64, {int64_t(numbers.size())});
    return &index;
  }
  gdn_status run() { return gdn_causal_conv1d(&args); }
  bool untouched() const { return y.untouched() && final.untouched(); }
};

TEST(ValidateConv, Refusals) {
  expect_refusals<ConvCase>(
      "causal_conv1d",
      {{"x null", kInvalid, "x", "NULL", "[B, D, T]", [](ConvCase& c) { c.args.x = nullptr; }},
       {"weight null", kInvalid, "weight", "NULL", "[D, W] with D = 3", [](ConvCase& c) { c.args.weight = nullptr; }},
       {"y null", kInvalid, "y", "NULL", "[B, D, T]", [](ConvCase& c) { c.args.y = nullptr; }},
       {"struct_size", kInvalid, "struct_size", "4", "at least", [](ConvCase& c) { c.args.struct_size = 4; }},
       {"x F64", kUnsupported, "x", "dtype F64", "F32, BF16, F16", [](ConvCase& c) { c.x.tensor.dtype = GDN_F64; }},
       {"weight on CUDA", kInvalid, "weight", "CUDA device 0", "the CPU, where 'x' lies",
        [](ConvCase& c) { c.weight.tensor.device_type = GDN_CUDA; }},
       {"D zero", kInvalid, "x", "D = 0", "D >= 1", [](ConvCase& c) { c.x.tensor.shape[1] = 0; }},
       {"weight D", kInvalid, "weight", "shape [2, 4]", "D = 3", [](ConvCase& c) { c.weight.tensor.shape[0] = 2; }},
       {"W zero", kInvalid, "weight", "W = 0", "1..16", [](ConvCase& c) { c.weight.tensor.shape[1] = 0; }},
       {"W 17", kUnsupported, "weight", "W = 17", "1..16",
        [](ConvCase& c) {
          c.weight.tensor.shape[1] = 17;
          c.weight.tensor.strides[0] = c.weight.tensor.strides[1] = 0;
        }},
       {"bias", kInvalid, "bias", "shape [2]", "D = 3", [](ConvCase& c) { c.bias.tensor.shape[0] = 2; }},
       {"y shape", kInvalid, "y", "shape [2, 3, 4]", "T = 5", [](ConvCase& c) { c.y.tensor.shape[2] = 4; }},
       {"y broadcast", kInvalid, "y", "strides", "do not overlap", [](ConvCase& c) { c.y.tensor.strides[0] = 0; }},
       {"L short", kInvalid, "initial_state", "L = 2", "W - 1 = 3",
        [](ConvCase& c) { c.initial.tensor.shape[2] = c.final.tensor.shape[2] = 2; }},
       {"L differs", kInvalid, "final_state", "L = 5", "6", [](ConvCase& c) { c.final.tensor.shape[2] = 5; }},
       {"activation", kInvalid, "activation", "2", "0..1", [](ConvCase& c) { c.args.activation = GDN_ACT_SIGMOID; }},
       {"null_slots", kInvalid, "null_slots", "9", "0..1", [](ConvCase& c) { c.args.null_slots = 9; }},
       {"threads", kInvalid, "num_threads", "-1", "0 (default)", [](ConvCase& c) { c.args.num_threads = -1; }},
       {"index", kInvalid, "initial_state_indices", "initial_state_indices[1] = 4", "below 2",
        [](ConvCase& c) {
          c.args.initial_state_indices = c.indices({0, 4});
        }},
       {"accepted", kInvalid, "num_accepted", "num_accepted[0] = 5", "1..4",
        [](ConvCase& c) {
          c.args.num_accepted = c.indices({5, 1});
        }},
       {"window", kInvalid, "initial_state", "L = 6", "W - 2 + T = 7",
        [](ConvCase& c) {
          c.args.num_accepted = c.indices({1, 1});
        }},
       {"accepted without state", kInvalid, "num_accepted", "without initial_state", "NULL",
        [](ConvCase& c) {
          c.args.num_accepted = c.indices({1, 1});
          c.args.initial_state = nullptr;
        }},
       {"cu_seqlens and batch", kInvalid, "cu_seqlens", "B = 2", "B = 1",
        [](ConvCase& c) {
          c.args.cu_seqlens = c.indices({0, 2, 5});
        }},
       {"y shifted in x", kInvalid, "y", "overlaps 'x'", "exactly the view of 'x'",
        [](ConvCase& c) { c.y.tensor.data = c.x.data.data() + 1; }},
       {"y is the state", kInvalid, "y", "overlaps 'initial_state'", "memory of its own",
        [](ConvCase& c) { c.y.tensor.data = c.initial.data.data(); }},
       {"final in x", kInvalid, "final_state", "overlaps 'x'", "memory of its own", [](ConvCase& c) {
          c.x.data.resize(100, 1.0f);  // room for both
          c.x.tensor.data = c.x.data.data();
          c.final.tensor.data = c.x.data.data() + 29;
        }}});
  expect_message(gdn_causal_conv1d(nullptr), kInvalid, "causal_conv1d", "args", "NULL", "argument struct");
}

TEST(ValidateConv, InPlaceAndTokenMajorAreAccepted) {
  ConvCase c;
  c.args.y = &c.x.tensor;
  c.args.final_state = &c.initial.tensor;
  EXPECT_EQ(c.run(), GDN_OK) << gdn_last_error();
  ConvCase d;  // token-major x and y in one packed buffer [B, T, 2 D]
  std::vector<float> packed(2 * 5 * 6, 1.0f);
  for (Slot* s : {&d.x, &d.y}) {
    s->tensor.data = packed.data() + (s == &d.y ? 3 : 0);
    s->tensor.strides[0] = 30;
    s->tensor.strides[1] = 1;
    s->tensor.strides[2] = 6;
  }
  EXPECT_EQ(d.run(), GDN_OK) << gdn_last_error();
}

struct GateCase {
  Slot a, b, a_log, dt_bias, g, beta;
  gdn_gate_args args = GDN_INIT(gdn_gate_args);
  GateCase() {
    a.set({2, 5, 4}, 1);
    b.set({2, 5, 4}, 1);
    a_log.set({4}, 0);
    dt_bias.set({4}, 0);
    g.set({2, 5, 4}, kUntouched);
    beta.set({2, 5, 4}, kUntouched);
    args.a = &a.tensor;
    args.b = &b.tensor;
    args.A_log = &a_log.tensor;
    args.dt_bias = &dt_bias.tensor;
    args.g = &g.tensor;
    args.beta = &beta.tensor;
  }
  GateCase(const GateCase&) = delete;
  GateCase& operator=(const GateCase&) = delete;
  gdn_status run() { return gdn_gate(&args); }
  bool untouched() const { return g.untouched() && beta.untouched(); }
};

TEST(ValidateGate, Refusals) {
  expect_refusals<GateCase>(
      "gate",
      {{"nothing", kInvalid, "a", "NULL", "a or b",
        [](GateCase& c) { c.args.a = c.args.b = c.args.g = c.args.beta = nullptr; }},
       {"g missing", kInvalid, "g", "NULL beside a", "g exactly", [](GateCase& c) { c.args.g = nullptr; }},
       {"a missing", kInvalid, "g", "without a", "g exactly", [](GateCase& c) { c.args.a = nullptr; }},
       {"beta missing", kInvalid, "beta", "NULL beside b", "beta exactly", [](GateCase& c) { c.args.beta = nullptr; }},
       {"A_log missing", kInvalid, "A_log", "NULL", "[Hv]", [](GateCase& c) { c.args.A_log = nullptr; }},
       {"b shape", kInvalid, "b", "shape [2, 4, 4]", "[2, 5, 4]", [](GateCase& c) { c.b.tensor.shape[1] = 4; }},
       {"g shape", kInvalid, "g", "shape [2, 5, 3]", "[2, 5, 4]", [](GateCase& c) { c.g.tensor.shape[2] = 3; }},
       {"rank", kInvalid, "a", "ndim 5", "1 to 4", [](GateCase& c) { c.a.tensor.ndim = 5; }},
       {"rank 0", kInvalid, "a", "ndim 0", "1 to 4", [](GateCase& c) { c.a.tensor.ndim = 0; }},
       {"Hv zero", kInvalid, "a", "Hv = 0", "Hv >= 1",
        [](GateCase& c) {
          for (Slot* s : {&c.a, &c.b, &c.g, &c.beta}) s->tensor.shape[2] = 0;
        }},
       {"A_log shape", kInvalid, "A_log", "shape [3]", "Hv = 4", [](GateCase& c) { c.a_log.tensor.shape[0] = 3; }},
       {"F64", kUnsupported, "b", "dtype F64", "F32", [](GateCase& c) { c.b.tensor.dtype = GDN_F64; }},
       {"gate_form raw", kInvalid, "gate_form", "2", "0..1", [](GateCase& c) { c.args.gate_form = GDN_GATE_RAW; }},
       {"beta_form", kInvalid, "beta_form", "3", "0..2", [](GateCase& c) { c.args.beta_form = 3; }},
       {"g is a", kInvalid, "g", "overlaps 'a'", "memory of its own",
        [](GateCase& c) { c.g.tensor.data = c.a.data.data(); }},
       {"beta is g", kInvalid, "beta", "overlaps 'g'", "memory of its own",
        [](GateCase& c) { c.beta.tensor.data = c.g.data.data(); }}});
}

TEST(ValidateGate, InterleavedStridesAreAccepted) {
  GateCase c;  // a and b as views with strides (2 H, 2)
  std::vector<float> ba(2 * 5 * 8, 0.5f);
  for (Slot* s : {&c.a, &c.b}) {
    s->tensor.data = ba.data() + (s == &c.a ? 1 : 0);
    s->tensor.strides[0] = 40;
    s->tensor.strides[1] = 8;
    s->tensor.strides[2] = 2;
  }
  std::vector<float> out(2 * 5 * 8, kUntouched);
  for (Slot* s : {&c.g, &c.beta}) {
    s->tensor.data = out.data() + (s == &c.g ? 1 : 0);
    s->tensor.strides[0] = 40;
    s->tensor.strides[1] = 8;
    s->tensor.strides[2] = 2;
  }
  EXPECT_EQ(c.run(), GDN_OK) << gdn_last_error();
}

struct NormCase {
  Slot x, z, weight, out, residual, residual_out;
  gdn_rmsnorm_gated_args args = GDN_INIT(gdn_rmsnorm_gated_args);
  NormCase() {
    x.set({2, 5, 8}, 1);
    z.set({2, 5, 8}, 1);
    weight.set({8}, 1);
    out.set({2, 5, 8}, kUntouched);
    residual.set({2, 5, 8}, 1);
    residual_out.set({2, 5, 8}, kUntouched);
    args.x = &x.tensor;
    args.z = &z.tensor;
    args.weight = &weight.tensor;
    args.out = &out.tensor;
    args.residual = &residual.tensor;
    args.residual_out = &residual_out.tensor;
    args.eps = 1e-6f;
    args.activation = GDN_ACT_SILU;
  }
  NormCase(const NormCase&) = delete;
  NormCase& operator=(const NormCase&) = delete;
  gdn_status run() { return gdn_rmsnorm_gated(&args); }
  bool untouched() const { return out.untouched() && residual_out.untouched(); }
};

TEST(ValidateNorm, Refusals) {
  expect_refusals<NormCase>(
      "rmsnorm_gated",
      {{"x null", kInvalid, "x", "NULL", "[.., D]", [](NormCase& c) { c.args.x = nullptr; }},
       {"out null", kInvalid, "out", "NULL", "x's shape", [](NormCase& c) { c.args.out = nullptr; }},
       {"z shape", kInvalid, "z", "shape [2, 4, 8]", "[2, 5, 8]", [](NormCase& c) { c.z.tensor.shape[1] = 4; }},
       {"out rank", kInvalid, "out", "shape [2, 5]", "[2, 5, 8]", [](NormCase& c) { c.out.tensor.ndim = 2; }},
       {"weight", kInvalid, "weight", "shape [7]", "D = 8", [](NormCase& c) { c.weight.tensor.shape[0] = 7; }},
       {"eps", kInvalid, "eps", "-", "finite", [](NormCase& c) { c.args.eps = -1e-3f; }},
       {"eps nan", kInvalid, "eps", "nan", "finite",
        [](NormCase& c) { c.args.eps = std::numeric_limits<float>::quiet_NaN(); }},
       {"no activation", kInvalid, "activation", "0 with z", "GDN_ACT_SILU",
        [](NormCase& c) { c.args.activation = GDN_ACT_NONE; }},
       {"activation alone", kInvalid, "activation", "1 without z", "GDN_ACT_NONE",
        [](NormCase& c) { c.args.z = nullptr; }},
       {"activation range", kInvalid, "activation", "3", "0..2", [](NormCase& c) { c.args.activation = 3; }},
       {"F64", kUnsupported, "x", "dtype F64", "F32", [](NormCase& c) { c.x.tensor.dtype = GDN_F64; }},
       {"flag", kInvalid, "gate_first", "2", "0..1", [](NormCase& c) { c.args.gate_first = 2; }},
       {"out is z", kInvalid, "out", "overlaps 'z'", "memory of its own",
        [](NormCase& c) { c.out.tensor.data = c.z.data.data(); }},
       {"residual shape", kInvalid, "residual", "shape [2, 4, 8]", "[2, 5, 8]",
        [](NormCase& c) { c.residual.tensor.shape[1] = 4; }},
       {"no sum", kInvalid, "residual_out", "NULL with residual", "neither",
        [](NormCase& c) { c.args.residual_out = nullptr; }},
       {"sum alone", kInvalid, "residual_out", "without residual", "neither",
        [](NormCase& c) { c.args.residual = nullptr; }},
       {"out is the residual", kInvalid, "out", "overlaps 'residual'", "memory of its own",
        [](NormCase& c) { c.out.tensor.data = c.residual.data.data(); }},
       {"one result", kInvalid, "out", "overlaps 'residual_out'", "memory of its own",
        [](NormCase& c) { c.args.residual_out = &c.out.tensor; }}});
}

TEST(ValidateNorm, InPlaceIsAccepted) {
  NormCase c;
  c.args.out = &c.x.tensor;
  c.args.residual_out = &c.residual.tensor;
  EXPECT_EQ(c.run(), GDN_OK) << gdn_last_error();
  NormCase sum_over_x;
  sum_over_x.args.residual_out = &sum_over_x.x.tensor;
  EXPECT_EQ(sum_over_x.run(), GDN_OK) << gdn_last_error();
}

// The struct as callers of the first release know it.
TEST(ValidateNorm, WithoutResidualFields) {
  NormCase c;
  c.args.struct_size = offsetof(gdn_rmsnorm_gated_args, residual);
  EXPECT_EQ(c.run(), GDN_OK) << gdn_last_error();
  EXPECT_TRUE(c.residual_out.untouched());
}

struct GluCase {
  Slot x, z, out;
  gdn_glu_args args = GDN_INIT(gdn_glu_args);
  GluCase() {
    x.set({2, 5, 8}, 1);
    z.set({2, 5, 8}, 1);
    out.set({2, 5, 8}, kUntouched);
    args.x = &x.tensor;
    args.z = &z.tensor;
    args.out = &out.tensor;
    args.activation = GDN_ACT_SILU;
  }
  GluCase(const GluCase&) = delete;
  GluCase& operator=(const GluCase&) = delete;
  gdn_status run() { return gdn_glu(&args); }
  bool untouched() const { return out.untouched(); }
};

TEST(ValidateGlu, Refusals) {
  expect_refusals<GluCase>(
      "glu", {{"x null", kInvalid, "x", "NULL", "[.., D]", [](GluCase& c) { c.args.x = nullptr; }},
              {"z null", kInvalid, "z", "NULL", "x's shape", [](GluCase& c) { c.args.z = nullptr; }},
              {"out null", kInvalid, "out", "NULL", "x's shape", [](GluCase& c) { c.args.out = nullptr; }},
              {"z shape", kInvalid, "z", "shape [2, 4, 8]", "[2, 5, 8]", [](GluCase& c) { c.z.tensor.shape[1] = 4; }},
              {"no activation", kInvalid, "activation", "0", "1..2", [](GluCase& c) { c.args.activation = 0; }},
              {"F64", kUnsupported, "x", "dtype F64", "F32", [](GluCase& c) { c.x.tensor.dtype = GDN_F64; }},
              {"out is z", kInvalid, "out", "overlaps 'z'", "memory of its own",
               [](GluCase& c) { c.out.tensor.data = c.z.data.data(); }}});
}

TEST(ValidateGlu, InPlaceIsAccepted) {
  GluCase c;
  c.args.out = &c.x.tensor;
  EXPECT_EQ(c.run(), GDN_OK) << gdn_last_error();
}

struct RopeCase {
  Slot q, k, q_weight, k_weight, cos, sin, q_out, k_out, gate_out;
  std::vector<int64_t> numbers;
  gdn_tensor positions;
  gdn_qk_rmsnorm_rope_args args = GDN_INIT(gdn_qk_rmsnorm_rope_args);
  RopeCase() {  // B = 2, T = 3, Hq = 4, Hkv = 2, D = 8, R = 4
    q.set({2, 3, 4, 16}, 1);
    k.set({2, 3, 2, 8}, 1);
    q_weight.set({8}, 1);
    k_weight.set({8}, 1);
    cos.set({1, 3, 4}, 1);
    sin.set({1, 3, 4}, 0);
    q_out.set({2, 3, 4, 8}, kUntouched);
    k_out.set({2, 3, 2, 8}, kUntouched);
    gate_out.set({2, 3, 4, 8}, kUntouched);
    args.q = &q.tensor;
    args.k = &k.tensor;
    args.q_weight = &q_weight.tensor;
    args.k_weight = &k_weight.tensor;
    args.cos = &cos.tensor;
    args.sin = &sin.tensor;
    args.q_out = &q_out.tensor;
    args.k_out = &k_out.tensor;
    args.gate_out = &gate_out.tensor;
    args.q_has_gate = 1;
    args.eps = 1e-6f;
  }
  RopeCase(const RopeCase&) = delete;
  RopeCase& operator=(const RopeCase&) = delete;
  void use_positions(const std::vector<int64_t>& shape) {
    numbers.assign(64, 1);
    positions = make_tensor(numbers.data(), GDN_I64, shape);
    args.positions = &positions;
    args.cos = args.sin = nullptr;
    args.theta = 1e7f;
    args.rotary_dim = 4;
  }
  gdn_status run() { return gdn_qk_rmsnorm_rope(&args); }
  bool untouched() const { return q_out.untouched() && k_out.untouched() && gate_out.untouched(); }
};

TEST(ValidateRope, Refusals) {
  expect_refusals<RopeCase>(
      "qk_rmsnorm_rope",
      {{"q null", kInvalid, "q", "NULL", "[B, T, Hq, 2D]", [](RopeCase& c) { c.args.q = nullptr; }},
       {"k null", kInvalid, "k", "NULL", "[B, T, Hkv, D]", [](RopeCase& c) { c.args.k = nullptr; }},
       {"q without gate", kInvalid, "q", "shape [2, 3, 4, 16]", "D = 8", [](RopeCase& c) { c.args.q_has_gate = 0; }},
       {"gate_out alone", kInvalid, "gate_out", "without q_has_gate", "NULL",
        [](RopeCase& c) {
          c.args.q_has_gate = 0;
          c.q.tensor.shape[3] = 8;
        }},
       {"k_out null", kInvalid, "k_out", "NULL", "[B, T, Hkv, D]", [](RopeCase& c) { c.args.k_out = nullptr; }},
       {"sin missing", kInvalid, "sin", "NULL", "cos and sin", [](RopeCase& c) { c.args.sin = nullptr; }},
       {"no angles", kInvalid, "cos", "NULL", "positions", [](RopeCase& c) { c.args.cos = c.args.sin = nullptr; }},
       {"R odd", kInvalid, "cos", "R = 3", "even R",
        [](RopeCase& c) { c.cos.tensor.shape[2] = c.sin.tensor.shape[2] = 3; }},
       {"cos batch", kInvalid, "cos", "shape [3, 3, 4]", "B = 2",
        [](RopeCase& c) {
          c.cos.tensor.shape[0] = 3;
          c.cos.tensor.strides[0] = 0;
        }},
       {"sin R", kInvalid, "sin", "R = 2", "the R of cos, 4", [](RopeCase& c) { c.sin.tensor.shape[2] = 2; }},
       {"rotary_dim beside cos", kInvalid, "rotary_dim", "6", "0 or the R of cos, 4",
        [](RopeCase& c) { c.args.rotary_dim = 6; }},
       {"positions beside cos", kInvalid, "positions", "beside cos or sin", "either positions",
        [](RopeCase& c) {
          c.use_positions({1, 3});
          c.args.cos = &c.cos.tensor;
        }},
       {"theta", kInvalid, "theta", "0", "> 0",
        [](RopeCase& c) {
          c.use_positions({1, 3});
          c.args.theta = 0;
        }},
       {"rotary_dim", kInvalid, "rotary_dim", "10", "2..8",
        [](RopeCase& c) {
          c.use_positions({1, 3});
          c.args.rotary_dim = 10;
        }},
       {"mrope sum", kInvalid, "mrope_section", "[1, 1, 1]", "R / 2 = 2",
        [](RopeCase& c) {
          c.use_positions({3, 2, 3});
          for (int32_t& s : c.args.mrope_section) s = 1;
        }},
       {"mrope positions", kInvalid, "positions", "shape [2, 3]", "[3, B, T]",
        [](RopeCase& c) {
          c.use_positions({2, 3});
          c.args.mrope_section[0] = 2;
        }},
       {"positions T", kInvalid, "positions", "shape [1, 4]", "T = 3",
        [](RopeCase& c) {
          c.use_positions({1, 4});
        }},
       {"positions float", kInvalid, "positions", "dtype F32", "I32, I64",
        [](RopeCase& c) {
          c.use_positions({1, 3});
          c.positions.dtype = GDN_F32;
        }},
       {"q_out in q", kInvalid, "q_out", "overlaps 'q'", "memory of its own",
        [](RopeCase& c) { c.q_out.tensor.data = c.q.data.data(); }},
       {"k_out is gate_out", kInvalid, "gate_out", "overlaps 'k_out'", "memory of its own", [](RopeCase& c) {
          c.gate_out.tensor.data = c.k_out.data.data();
          c.k_out.tensor.data = c.k_out.data.data();
        }}});
}

TEST(ValidateRope, PositionsAreAccepted) {
  RopeCase c;
  c.use_positions({1, 3});
  EXPECT_EQ(c.run(), GDN_OK) << gdn_last_error();
  RopeCase d;
  d.use_positions({3, 1, 3});
  d.args.mrope_section[0] = d.args.mrope_section[1] = 1;
  EXPECT_EQ(d.run(), GDN_OK) << gdn_last_error();
}

TEST(ValidateOps, EmptyWorkReturns) {
  ConvCase conv;
  conv.x.tensor.shape[2] = conv.y.tensor.shape[2] = 0;
  conv.args.final_state = nullptr;
  EXPECT_EQ(conv.run(), GDN_OK) << gdn_last_error();
  GateCase gate;
  for (Slot* s : {&gate.a, &gate.b, &gate.g, &gate.beta}) {
    s->tensor.shape[1] = 0;
    s->tensor.data = nullptr;
  }
  EXPECT_EQ(gate.run(), GDN_OK) << gdn_last_error();
  NormCase norm;
  for (Slot* s : {&norm.x, &norm.z, &norm.out}) s->tensor.shape[0] = 0;
  norm.residual.tensor.shape[0] = norm.residual_out.tensor.shape[0] = 0;
  EXPECT_EQ(norm.run(), GDN_OK) << gdn_last_error();
  RopeCase rope;
  for (Slot* s : {&rope.q, &rope.k, &rope.q_out, &rope.k_out, &rope.gate_out, &rope.cos, &rope.sin}) {
    s->tensor.shape[1] = 0;
  }
  EXPECT_EQ(rope.run(), GDN_OK) << gdn_last_error();
}

}  // namespace
}  // namespace gdn_test
