// SPDX-License-Identifier: MIT
// causal_conv1d against its definition in double.
#include <cstdio>

#include "ops_tensor.h"

namespace {
using namespace gdn_test;

struct ConvCase {
  int64_t B = 1, D = 1, T = 1, W = 4, L = 0;
  int32_t x = GDN_F32, w = GDN_F32, y = GDN_F32, state = GDN_F32;
  Layout x_layout, y_layout, state_layout;
  bool bias = true, silu = true, in_place = false, state_in_place = false, initial = true, final = true;
  std::vector<int32_t> cu;
  std::vector<int64_t> read, write;  // slots
  std::vector<uint8_t> has;
  std::vector<int32_t> accepted;
  int64_t slots = 0;
  int32_t threads = 1;
};

const Layout kTokenMajor{{0, 2, 1}, 1, 0};
const Layout kTokenMajorPadded{{0, 2, 1}, 1, 7};
const Layout kTokenMajorStride2{{0, 2, 1}, 2, 3};
const Layout kTimeStride2{{}, 2, 5};
const Layout kTimePadded{{}, 1, 3};
const Layout kOddPermutation{{2, 0, 1}, 1, 2};

struct ConvRun {
  Tensor x, w, bias, y, initial, final;
  double worst = 0;  // error in units of the allowance's scale, see expect_close
  double worst_relative = 0;
};

gdn_tensor index_tensor(void* data, int32_t dtype, int64_t n) {
  gdn_tensor t;
  gdn_tensor_init(&t, data, dtype, 1, &n);
  return t;
}

// Runs the case and checks everything that the header promises about it.
ConvRun run_conv(const ConvCase& c, uint32_t seed = 1) {
  ConvRun r;
  const int64_t N = c.cu.empty() ? c.B : static_cast<int64_t>(c.cu.size()) - 1;
  const int64_t rows = c.slots > 0 ? c.slots : N;
  r.x = Tensor(c.x, {c.B, c.D, c.T}, c.x_layout);
  r.w = Tensor(c.w, {c.D, c.W});
  r.bias = Tensor(c.w, {c.D});
  r.y = Tensor(c.y, {c.B, c.D, c.T}, c.y_layout);
  r.x.fill(seed);
  r.w.fill(seed + 1, -1, 1);
  r.bias.fill(seed + 2, -1, 1);
  if (c.L > 0) {
    r.initial = Tensor(c.state, {rows, c.D, c.L}, c.state_layout);
    r.final = Tensor(c.state, {rows, c.D, c.L}, c.state_layout);
    r.initial.fill(seed + 3);
  }
  const std::vector<double> x = r.x.values(), s0 = c.L > 0 ? r.initial.values() : std::vector<double>();
  std::vector<double> want_state = c.L > 0 ? (c.state_in_place ? s0 : r.final.values()) : std::vector<double>();
  Tensor& y = c.in_place ? r.x : r.y;
  Tensor& fin = c.state_in_place ? r.initial : r.final;

  gdn_conv1d_args a = GDN_INIT(gdn_conv1d_args);
  std::vector<int32_t> cu = c.cu, accepted = c.accepted;
  std::vector<int64_t> read = c.read, write = c.write;
  std::vector<uint8_t> has = c.has;
  gdn_tensor tcu = index_tensor(cu.data(), GDN_I32, int64_t(cu.size()));
  gdn_tensor tread = index_tensor(read.data(), GDN_I64, N), twrite = index_tensor(write.data(), GDN_I64, N);
  gdn_tensor thas = index_tensor(has.data(), GDN_U8, N), tacc = index_tensor(accepted.data(), GDN_I32, N);
  a.x = r.x.ptr();
  a.weight = r.w.ptr();
  a.bias = c.bias ? r.bias.ptr() : nullptr;
  a.y = y.ptr();
  if (!cu.empty()) a.cu_seqlens = &tcu;
  if (c.L > 0 && c.initial) {
    a.initial_state = r.initial.ptr();
    if (!read.empty()) a.initial_state_indices = &tread;
    if (!has.empty()) a.has_initial_state = &thas;
    if (!accepted.empty()) a.num_accepted = &tacc;
  }
  if (c.L > 0 && c.final) {
    a.final_state = fin.ptr();
    if (!write.empty()) a.final_state_indices = &twrite;
  }
  a.activation = c.silu ? GDN_ACT_SILU : GDN_ACT_NONE;
  a.num_threads = c.threads;
  EXPECT_EQ(gdn_causal_conv1d(&a), GDN_OK) << gdn_last_error();

  const std::vector<double> got = y.values();
  std::vector<bool> covered(got.size(), false);
  for (int64_t n = 0; n < N; ++n) {
    const int64_t b = c.cu.empty() ? n : 0, begin = c.cu.empty() ? 0 : cu[size_t(n)];
    const int64_t len = c.cu.empty() ? c.T : cu[size_t(n) + 1] - begin;
    const int64_t rslot = read.empty() ? n : read[size_t(n)];
    const int64_t wslot = !write.empty() ? write[size_t(n)] : (c.state_in_place && !read.empty() ? rslot : n);
    const bool null = (c.initial && rslot < 0) || (c.final && wslot < 0);
    const bool start = c.L > 0 && c.initial && !null && (has.empty() || has[size_t(n)] != 0);
    for (int64_t d = 0; d < c.D; ++d) {
      const auto state = [&](int64_t l) { return start ? s0[size_t((rslot * c.D + d) * c.L + l)] : 0.0; };
      const auto input = [&](int64_t t) -> double {  // t >= -(W-1)
        if (t >= 0) return x[size_t((b * c.D + d) * c.T + begin + t)];
        if (c.L == 0) return 0;
        return state(accepted.empty() ? c.L + t : accepted[size_t(n)] - 1 + (c.W - 1) + t);
      };
      for (int64_t t = 0; t < len; ++t) {
        double sum = c.bias ? r.bias.get(d) : 0, size = std::abs(sum);
        for (int64_t j = 0; j < c.W; ++j) {
          const double term = r.w.at({d, j}) * input(t - (c.W - 1) + j);
          sum += term;
          size += std::abs(term);
        }
        const double want = null ? 0 : (c.silu ? sum / (1 + std::exp(-sum)) : sum);
        const size_t at = size_t((b * c.D + d) * c.T + begin + t);
        covered[at] = true;
        const double error = std::abs(got[at] - want);
        const double allowed = rounding_error(want, c.y) + 4e-7 * size;
        if (!(error <= allowed)) {
          ADD_FAILURE() << "y[" << b << ", " << d << ", " << begin + t << "] = " << got[at] << ", expected " << want;
          return r;
        }
        r.worst = std::max(r.worst, error / size);
      }
      if (c.L == 0 || !c.final || null) continue;
      double* out = &want_state[size_t((wslot * c.D + d) * c.L)];
      if (accepted.empty() || len == 0) {
        for (int64_t l = 0; l < c.L; ++l)
          out[l] = round_dtype(l + len < c.L ? state(l + len) : input(l + len - c.L), c.state);
      } else {
        for (int64_t l = 0; l < c.W - 2 + len; ++l) out[l] = round_dtype(input(l - (c.W - 2)), c.state);
      }
    }
  }
  for (size_t i = 0; i < got.size(); ++i) {
    if (covered[i]) continue;
    EXPECT_TRUE(c.in_place ? got[i] == x[i] : std::isnan(got[i])) << "a row past cu_seqlens was written";
  }
  if (c.L > 0) {
    const std::vector<double> state = fin.values();
    for (size_t i = 0; i < state.size(); ++i) {
      if (state[i] == want_state[i] || (std::isnan(state[i]) && std::isnan(want_state[i]))) continue;
      ADD_FAILURE() << "state element " << i << " is " << state[i] << ", expected " << want_state[i];
      break;
    }
    EXPECT_TRUE(fin.guards_intact());
    EXPECT_TRUE(c.state_in_place || r.initial.values() == s0) << "the initial state was written";
  }
  EXPECT_TRUE(y.guards_intact());
  return r;
}

class Conv1d : public IsaTest {};

TEST_P(Conv1d, EveryDtypeMixture) {
  double worst = 0;
  for (const int32_t x : kFloatDtypes)
    for (const int32_t w : kFloatDtypes)
      for (const int32_t y : kFloatDtypes)
        for (const int32_t s : kFloatDtypes)
          for (const Layout& layout : {kTokenMajor, Layout{}}) {
            SCOPED_TRACE(std::string(dtype_name(x)) + dtype_name(w) + dtype_name(y) + dtype_name(s));
            ConvCase c{.B = 2, .D = 37, .T = 19, .W = 4, .L = 3, .x = x, .w = w, .y = y, .state = s};
            c.x_layout = c.y_layout = layout;
            const double e = run_conv(c).worst;
            if (y == GDN_F32) worst = std::max(worst, e);
          }
  std::printf("conv1d %s: worst fp32 error / sum of term sizes %.2e\n", GetParam().c_str(), worst);
}

TEST_P(Conv1d, EveryWidthAndLayout) {
  const Layout layouts[] = {kTokenMajor, kTokenMajorPadded, kTokenMajorStride2, {},
                            kTimePadded, kTimeStride2,      kOddPermutation};
  for (int64_t W = 1; W <= 16; ++W)
    for (const Layout& xl : layouts)
      for (const Layout& yl : layouts) {
        SCOPED_TRACE("W " + std::to_string(W));
        ConvCase c{.B = 2, .D = 21, .T = 35, .W = W, .L = W + W % 3, .x = GDN_BF16, .silu = W % 2 == 0};
        c.bias = W % 3 != 0;
        c.x_layout = xl;
        c.y_layout = yl;
        run_conv(c, static_cast<uint32_t>(W));
      }
}

TEST_P(Conv1d, TailsOfChannelsAndTokens) {
  for (const int64_t D : {1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 33, 64, 65, 513, 1030})
    for (const int64_t T : {1, 2, 3, 4, 5, 7, 8, 9})
      for (const Layout& layout : {kTokenMajor, Layout{}})
        for (const int64_t W : {2, 3, 4, 5}) {
          ConvCase c{.D = D, .T = T, .W = W, .L = 4};
          c.x_layout = c.y_layout = layout;
          run_conv(c);
        }
}

TEST_P(Conv1d, LongRowsAlongTime) {
  for (const int64_t T : {1023, 1024, 1025, 3000}) {
    ConvCase c{.D = 2, .T = T, .W = 4, .L = 3};
    run_conv(c);
    c.W = 6;
    c.L = 5;
    run_conv(c);
    c.in_place = true;
    run_conv(c);
  }
}

TEST_P(Conv1d, SequencesSlotsAndNulls) {
  for (const Layout& layout : {kTokenMajor, Layout{}})
    for (const bool state_in_place : {false, true})
      for (const bool in_place : {false, true})
        for (const int32_t threads : {1, 2, 5}) {
          ConvCase c{.D = 130, .T = 120, .W = 4, .L = 6};
          c.x_layout = c.y_layout = layout;
          c.cu = {0, 0, 64, 65, 100, 100, 107};  // two empty, one of one token, 13 rows past the end
          c.slots = 9;
          c.read = {3, 8, -1, 0, 5, 2};
          c.has = {1, 1, 1, 0, 1, 1};
          if (!state_in_place) c.write = {0, 7, 1, 2, -1, 4};
          c.state_in_place = state_in_place;
          c.in_place = in_place;
          c.threads = threads;
          run_conv(c);
        }
}

TEST_P(Conv1d, WithoutStates) {
  for (const int mode : {0, 1, 2}) {
    ConvCase c{.B = 3, .D = 40, .T = 9, .W = 4, .L = mode == 0 ? 0 : 5};
    c.initial = mode == 2;
    c.final = mode == 1;
    c.x_layout = c.y_layout = kTokenMajor;
    run_conv(c);
    c.T = 2;  // fewer tokens than columns: zeros are shifted in
    run_conv(c);
  }
}

TEST_P(Conv1d, SplitOverThreadsIsBitIdentical) {
  struct Shape {
    int64_t B, D, T;
    Layout layout;
    bool in_place;
  };
  for (const Shape& s :
       {Shape{1, 3, 40000, {}, false}, Shape{1, 24, 9000, kTokenMajor, false}, Shape{1, 700, 300, kTokenMajor, true},
        Shape{2, 700, 300, kTokenMajor, false}, Shape{1, 5, 40000, {}, true}, Shape{300, 200, 1, kTokenMajor, false}}) {
    std::vector<double> y, state;
    for (const int32_t threads : {1, 2, 5}) {
      ConvCase c{.B = s.B, .D = s.D, .T = s.T, .W = 4, .L = 3};
      c.x_layout = c.y_layout = s.layout;
      c.in_place = s.in_place;
      c.state_in_place = true;
      c.threads = threads;
      ConvRun r = run_conv(c);
      const std::vector<double> got = s.in_place ? r.x.values() : r.y.values();
      if (threads == 1) {
        y = got;
        state = r.initial.values();
      }
      EXPECT_TRUE(got == y);
      EXPECT_TRUE(r.initial.values() == state);
    }
  }
}

// Steps over [t, t + n) of one stream with a state in place.
void stream_step(Tensor* x, Tensor* w, Tensor* y, Tensor* state, int64_t t, int64_t n, std::vector<int32_t>* accepted) {
  gdn_tensor tx = *x->ptr(), ty = *y->ptr();
  const int64_t bytes = x->dtype() == GDN_F32 ? 4 : 2;
  tx.shape[2] = ty.shape[2] = n;
  tx.data = static_cast<char*>(tx.data) + t * tx.strides[2] * bytes;
  ty.data = static_cast<char*>(ty.data) + t * ty.strides[2] * bytes;
  gdn_conv1d_args a = GDN_INIT(gdn_conv1d_args);
  a.x = &tx;
  a.weight = w->ptr();
  a.y = &ty;
  a.initial_state = a.final_state = state->ptr();
  a.activation = GDN_ACT_SILU;
  gdn_tensor tacc;
  if (accepted != nullptr) {
    tacc = index_tensor(accepted->data(), GDN_I32, int64_t(accepted->size()));
    a.num_accepted = &tacc;
  }
  ASSERT_EQ(gdn_causal_conv1d(&a), GDN_OK) << gdn_last_error();
}

TEST_P(Conv1d, PrefillThenUpdatesEqualOnePrefill) {
  for (const Layout& layout : {kTokenMajor, Layout{}})
    for (const int64_t L : {3, 4, 7})
      for (const int64_t prefill : {0, 1, 2, 9}) {
        Tensor x(GDN_F32, {2, 70, prefill + 8}, layout), w(GDN_F32, {70, 4}), y(GDN_F32, {2, 70, prefill + 8}, layout),
            whole = y, state(GDN_F32, {2, 70, L}), state2;
        x.fill(1);
        w.fill(2);
        state.fill(3);
        state2 = state;
        stream_step(&x, &w, &whole, &state2, 0, prefill + 8, nullptr);
        if (prefill > 0) stream_step(&x, &w, &y, &state, 0, prefill, nullptr);
        for (int64_t t = 0; t < 8; ++t) stream_step(&x, &w, &y, &state, prefill + t, 1, nullptr);
        EXPECT_EQ(y.values(), whole.values());
        EXPECT_EQ(state.values(), state2.values());
      }
}

// Verify windows of S drafts, of which 1..S are accepted, against serial one-token updates of the accepted tokens.
TEST_P(Conv1d, SpeculativeWindowsEqualSerialUpdates) {
  constexpr int64_t kD = 50, kS = 4, kW = 4, kRounds = 12;
  for (const Layout& layout : {kTokenMajor, Layout{}}) {
    Tensor w(GDN_F32, {kD, kW}), window(GDN_F32, {2, kD, kW - 2 + kS}), serial(GDN_F32, {2, kD, kW - 1});
    w.fill(1);
    window.fill(2);
    // The window's first W - 1 columns are the context when one token is accepted.
    for (int64_t b = 0; b < 2; ++b)
      for (int64_t d = 0; d < kD; ++d)
        for (int64_t l = 0; l < kW - 1; ++l) serial.set_at({b, d, l}, window.at({b, d, l}));
    std::vector<int32_t> accepted = {1, 1};
    std::mt19937 engine(5);
    for (int64_t round = 0; round < kRounds; ++round) {
      Tensor x(GDN_F32, {2, kD, kS}, layout), y(GDN_F32, {2, kD, kS}, layout);
      x.fill(static_cast<uint32_t>(10 + round));
      stream_step(&x, &w, &y, &window, 0, kS, &accepted);
      for (auto& n : accepted) n = static_cast<int32_t>(1 + engine() % kS);
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t t = 0; t < accepted[size_t(b)]; ++t) {
          Tensor one(GDN_F32, {2, kD, 1}), out(GDN_F32, {2, kD, 1}), keep = serial;
          for (int64_t i = 0; i < one.size(); ++i) one.set(i, 0);
          for (int64_t d = 0; d < kD; ++d) one.set_at({b, d, 0}, x.at({b, d, t}));
          stream_step(&one, &w, &out, &serial, 0, 1, nullptr);
          for (int64_t d = 0; d < kD; ++d) {
            EXPECT_EQ(out.at({b, d, 0}), y.at({b, d, t}));
            for (int64_t l = 0; l < kW - 1; ++l) serial.set_at({1 - b, d, l}, keep.at({1 - b, d, l}));
          }
        }
      }
    }
  }
}

TEST_P(Conv1d, WindowStateColumns) {
  for (const int64_t W : {2, 3, 4, 6})
    for (const int64_t T : {1, 3, 5})
      for (const bool in_place : {false, true}) {
        ConvCase c{.B = 3, .D = 18, .T = T, .W = W, .L = W - 2 + 6, .state_in_place = in_place};
        c.accepted = {1, 6, 3};
        c.x_layout = c.y_layout = kTokenMajor;
        run_conv(c);
        c.state_layout = Layout{{0, 2, 1}, 1, 0};  // (state_len, dim), vLLM's other layout
        run_conv(c);
      }
}

TEST_P(Conv1d, StateLayouts) {
  for (const Layout& layout : {Layout{}, Layout{{0, 2, 1}, 1, 0}, kTimeStride2, kTimePadded})
    for (const int64_t L : {3, 4, 5})
      for (const int64_t T : {1, 2, 3, 6}) {
        ConvCase c{.B = 2, .D = 77, .T = T, .W = 3, .L = L, .state_in_place = true};
        c.x_layout = c.y_layout = kTokenMajor;
        c.state_layout = layout;
        run_conv(c);
      }
}

TEST_P(Conv1d, SiluOfLargeInputsIsFinite) {
  for (const Layout& layout : {kTokenMajor, Layout{}}) {
    Tensor x(GDN_F32, {1, 8, 200}, layout), w(GDN_F32, {8, 2}), y(GDN_F32, {1, 8, 200}, layout);
    for (int64_t d = 0; d < 8; ++d) {
      w.set_at({d, 0}, 0);
      w.set_at({d, 1}, 1);
      for (int64_t t = 0; t < 200; ++t)
        x.set_at({0, d, t}, static_cast<double>(t - 100) + 0.1 * static_cast<double>(d));
    }
    x.set_at({0, 0, 0}, 1e30);
    x.set_at({0, 1, 0}, -1e30);
    gdn_conv1d_args a = GDN_INIT(gdn_conv1d_args);
    a.x = x.ptr();
    a.weight = w.ptr();
    a.y = y.ptr();
    a.activation = GDN_ACT_SILU;
    ASSERT_EQ(gdn_causal_conv1d(&a), GDN_OK);
    for (int64_t i = 0; i < x.size(); ++i) {
      const double v = x.get(i), want = v / (1 + std::exp(-v));
      // 1e30 and -1e30 reach columns 0 only (the tap of the older input is 0).
      EXPECT_NEAR(y.get(i), want, std::abs(want) * 2e-6 + 1e-43) << v;
    }
  }
}

GDN_INSTANTIATE_ISAS(Conv1d);

}  // namespace
