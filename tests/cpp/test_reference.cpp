// SPDX-License-Identifier: MIT
// The reference implementations against hand-computed numbers and against a second, independent recurrence.
#include <cmath>
#include <cstring>

#include "rule_case.h"

namespace gdn_test {
namespace {

// The recurrence written from its matrix form S <- e^g (I - beta k k^T) S + beta k v^T (K-first), fp64, one head map.
// Everything contiguous; returns o [T, Hv, V] of one sequence and leaves the final state in S [Hv, K, V].
std::vector<double> matrix_recurrence(const RuleCase& c, int64_t batch, int64_t begin, int64_t len,
                                      std::vector<double>* S, double scale, bool tiled = false) {
  const Sizes& n = c.n;
  std::vector<double> o(static_cast<size_t>(len * n.Hv * n.V));
  for (int64_t h = 0; h < n.Hv; ++h) {
    const int64_t hk = tiled ? h % n.Hk : h / (n.Hv / n.Hk);
    double* s = S->data() + h * n.K * n.V;
    for (int64_t t = 0; t < len; ++t) {
      const int64_t row = batch * n.T + begin + t;
      const float* q = c.q.data() + (row * n.Hk + hk) * n.K;
      const float* k = c.k.data() + (row * n.Hk + hk) * n.K;
      const float* v = c.v.data() + (row * n.Hv + h) * n.V;
      const double g = std::exp(double(c.g[size_t(row * n.Hv + h)])), beta = double(c.beta[size_t(row * n.Hv + h)]);
      std::vector<double> next(size_t(n.K * n.V));
      for (int64_t i = 0; i < n.K; ++i) {
        for (int64_t j = 0; j < n.V; ++j) {
          double sum = beta * double(k[i]) * double(v[j]);
          for (int64_t l = 0; l < n.K; ++l) {
            sum += g * ((i == l ? 1.0 : 0.0) - beta * double(k[i]) * double(k[l])) * s[l * n.V + j];
          }
          next[size_t(i * n.V + j)] = sum;
        }
      }
      std::copy(next.begin(), next.end(), s);
      for (int64_t j = 0; j < n.V; ++j) {
        double sum = 0;
        for (int64_t i = 0; i < n.K; ++i) sum += double(q[i]) * s[i * n.V + j];
        o[size_t((t * n.Hv + h) * n.V + j)] = scale * sum;
      }
    }
  }
  return o;
}

using Op = gdn_status (*)(const gdn_rule_args*);
const Op kOps[] = {gdn_chunk_forward, gdn_recurrent};

TEST(Reference, HandComputedTwoTokens) {
  // K = 2, V = 1, one head, scale 1. S0 = [2, 4]^T.
  // Token 0: g = ln 1/2, beta = 1/2, k = [1, 0], v = 3: S = [1, 2], u = (3 - 1)/2 = 1, S = [2, 2], q = [1, 1]: o = 4.
  // Token 1: g = 0, beta = 1, k = [1, 2], v = 1: u = 1 - (2 + 4) = -5, S = [-3, -8], q = [2, -1]: o = -6 + 8 = 2.
  double q[] = {1, 1, 2, -1}, k[] = {1, 0, 1, 2}, v[] = {3, 1}, g[] = {std::log(0.5), 0}, beta[] = {0.5, 1};
  double o[2], initial[] = {2, 4}, final[2];
  gdn_tensor tq = make_tensor(q, GDN_F64, {1, 2, 1, 2}), tk = make_tensor(k, GDN_F64, {1, 2, 1, 2});
  gdn_tensor tv = make_tensor(v, GDN_F64, {1, 2, 1, 1}), to = make_tensor(o, GDN_F64, {1, 2, 1, 1});
  gdn_tensor tg = make_tensor(g, GDN_F64, {1, 2, 1}), tbeta = make_tensor(beta, GDN_F64, {1, 2, 1});
  gdn_tensor ts = make_tensor(initial, GDN_F64, {1, 1, 2, 1}), tf = make_tensor(final, GDN_F64, {1, 1, 2, 1});
  gdn_rule_args a = GDN_INIT(gdn_rule_args);
  a.q = &tq;
  a.k = &tk;
  a.v = &tv;
  a.g = &tg;
  a.beta = &tbeta;
  a.o = &to;
  a.initial_state = &ts;
  a.final_state = &tf;
  a.scale = 1;
  for (const Op op : kOps) {
    ASSERT_EQ(op(&a), GDN_OK) << gdn_last_error();
    EXPECT_NEAR(o[0], 4, 1e-15);
    EXPECT_NEAR(o[1], 2, 1e-14);
    EXPECT_NEAR(final[0], -3, 1e-14);
    EXPECT_NEAR(final[1], -8, 1e-14);
  }
}

TEST(Reference, MatchesTheMatrixForm) {
  for (const bool tiled : {false, true}) {
    for (const char* impl : {"reference_fp64", "reference_fp32"}) {
      RuleCase c;
      c.args.head_map = tiled ? GDN_HEADS_TILED : GDN_HEADS_GROUPED;
      c.args.impl = impl;
      for (const Op op : kOps) {
        ASSERT_EQ(op(&c.args), GDN_OK) << gdn_last_error();
        for (int64_t b = 0; b < c.n.B; ++b) {
          const int64_t state_size = c.n.Hv * c.n.K * c.n.V;
          std::vector<double> S(c.initial.begin() + b * state_size, c.initial.begin() + (b + 1) * state_size);
          const auto o = matrix_recurrence(c, b, 0, c.n.T, &S, 1 / std::sqrt(double(c.n.K)), tiled);
          for (size_t i = 0; i < o.size(); ++i) EXPECT_NEAR(double(c.o[size_t(b) * o.size() + i]), o[i], 2e-6);
          for (size_t i = 0; i < S.size(); ++i) EXPECT_NEAR(double(c.final[size_t(b) * S.size() + i]), S[i], 2e-6);
        }
      }
    }
  }
}

TEST(Reference, PanelsCoverWideV) {
  Sizes s;
  s.B = 1;
  s.T = 3;
  s.V = 37;  // two full panels and a rest
  RuleCase c(s);
  c.args.impl = "reference_fp64";
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
  std::vector<double> S(c.initial.begin(), c.initial.end());
  const auto o = matrix_recurrence(c, 0, 0, s.T, &S, 1 / std::sqrt(double(s.K)));
  for (size_t i = 0; i < o.size(); ++i) EXPECT_NEAR(double(c.o[i]), o[i], 1e-6);
  for (size_t i = 0; i < S.size(); ++i) EXPECT_NEAR(double(c.final[i]), S[i], 1e-6);
}

TEST(Reference, GateAndBetaForms) {
  RuleCase c;
  c.args.impl = "reference_fp32";
  // log gate and plain beta from raw inputs, computed here.
  const std::vector<float> raw_a = random_floats(c.g.size(), 11, -3, 25), raw_b = random_floats(c.g.size(), 12, -4, 4);
  std::vector<float> a_log = random_floats(size_t(c.n.Hv), 13, -2, 0), dt_bias = random_floats(size_t(c.n.Hv), 14);
  std::vector<float> alpha(c.g.size());
  for (size_t i = 0; i < c.g.size(); ++i) {
    const size_t h = i % size_t(c.n.Hv);
    const double x = double(raw_a[i]) + double(dt_bias[h]);
    const double softplus = x > 20 ? x : std::log1p(std::exp(x));
    c.g[i] = float(-std::exp(double(a_log[h])) * softplus);
    alpha[i] = std::exp(c.g[i]);
    c.beta[i] = float(2 / (1 + std::exp(-double(raw_b[i]))));
  }
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
  const std::vector<float> o = c.o, final = c.final;

  const gdn_tensor ta_log = make_tensor(a_log.data(), GDN_F32, {c.n.Hv});
  const gdn_tensor tdt = make_tensor(dt_bias.data(), GDN_F32, {c.n.Hv});
  std::vector<float> a_copy = raw_a, b_copy = raw_b;
  c.tg.data = alpha.data();
  c.args.gate_form = GDN_GATE_LINEAR;
  ASSERT_EQ(gdn_recurrent(&c.args), GDN_OK) << gdn_last_error();
  for (size_t i = 0; i < o.size(); ++i) EXPECT_NEAR(c.o[i], o[i], 2e-6f);

  c.tg.data = a_copy.data();
  c.tbeta.data = b_copy.data();
  c.args.gate_form = GDN_GATE_RAW;
  c.args.beta_form = GDN_BETA_SIGMOID2;
  c.args.A_log = &ta_log;
  c.args.dt_bias = &tdt;
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
  for (size_t i = 0; i < o.size(); ++i) EXPECT_NEAR(c.o[i], o[i], 5e-6f);
  for (size_t i = 0; i < final.size(); ++i) EXPECT_NEAR(c.final[i], final[i], 5e-6f);
}

TEST(Reference, AbsentGateAndBetaAreZeroAndOne) {
  RuleCase c;
  c.args.impl = "reference_fp64";
  std::fill(c.g.begin(), c.g.end(), 0.0f);
  std::fill(c.beta.begin(), c.beta.end(), 1.0f);
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK);
  const std::vector<float> o = c.o;
  c.args.g = c.args.beta = nullptr;
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK);
  EXPECT_EQ(c.o, o);
}

TEST(Reference, VeryNegativeGateResetsTheState) {
  RuleCase c;
  c.args.impl = "reference_fp64";
  std::fill(c.g.begin(), c.g.end(), -1e30f);
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK);
  for (const float x : c.o) EXPECT_TRUE(std::isfinite(x));
  // Only the last token survives: S = beta k v^T.
  const int64_t last = c.n.T - 1;
  EXPECT_NEAR(c.final[0],
              c.beta[size_t(last * c.n.Hv)] * c.k[size_t(last * c.n.Hk * c.n.K)] * c.v[size_t(last * c.n.Hv * c.n.V)],
              1e-6f);
}

TEST(Reference, L2Norm) {
  // sum k^2 = 1e-6 over 128 channels: the normalised length is 1/sqrt(2) because eps is added to the sum.
  Sizes s;
  s.B = s.T = s.Hk = s.Hv = s.V = 1;
  s.K = 128;
  RuleCase c(s);
  c.args.impl = "reference_fp64";
  c.args.qk_l2norm = 1;
  c.args.scale = 1;
  c.args.initial_state = nullptr;
  std::fill(c.k.begin(), c.k.end(), std::sqrt(1e-6f / 128));
  std::fill(c.q.begin(), c.q.end(), 1.0f);
  c.beta[0] = 1;
  c.v[0] = 1;
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK);
  double norm = 0;
  for (const float x : c.final) norm += double(x) * double(x);
  EXPECT_NEAR(std::sqrt(norm), std::sqrt(0.5), 1e-5);
  EXPECT_NEAR(c.o[0], float(std::sqrt(0.5)), 1e-5f);
}

TEST(Reference, VarlenEmptySequencesAndTail) {
  Sizes s;
  s.B = 1;
  s.T = 9;
  s.sequences = 4;
  RuleCase c(s);
  c.args.impl = "reference_fp64";
  c.args.cu_seqlens = c.indices({0, 0, 3, 3, 7});  // lengths 0, 3, 0, 4; tokens 7 and 8 belong to nobody
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
  const int64_t state_size = s.Hv * s.K * s.V, row = s.Hv * s.V;
  for (int64_t n = 0; n < 4; ++n) {
    const int64_t begin = n == 0 ? 0 : c.index_data[0][size_t(n)], len = c.index_data[0][size_t(n + 1)] - begin;
    std::vector<double> S(c.initial.begin() + n * state_size, c.initial.begin() + (n + 1) * state_size);
    const auto o = matrix_recurrence(c, 0, begin, len, &S, 1 / std::sqrt(double(s.K)));
    for (size_t i = 0; i < o.size(); ++i) EXPECT_NEAR(double(c.o[size_t(begin * row) + i]), o[i], 1e-6);
    for (size_t i = 0; i < S.size(); ++i) EXPECT_NEAR(double(c.final[size_t(n * state_size) + i]), S[i], 1e-6);
  }
  for (int64_t i = 7 * row; i < 9 * row; ++i) EXPECT_EQ(c.o[size_t(i)], kUntouched);
}

TEST(Reference, VFirstStateIsTheTranspose) {
  RuleCase c;
  c.args.impl = "reference_fp64";
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK);
  const std::vector<float> o = c.o, final = c.final;
  const auto transpose = [&](const std::vector<float>& x, bool back) {
    std::vector<float> y(x.size());
    const int64_t K = c.n.K, V = c.n.V;
    for (int64_t m = 0; m < c.n.B * c.n.Hv; ++m) {
      for (int64_t i = 0; i < K; ++i) {
        for (int64_t j = 0; j < V; ++j) {
          const size_t k_first = size_t((m * K + i) * V + j), v_first = size_t((m * V + j) * K + i);
          y[back ? k_first : v_first] = x[back ? v_first : k_first];
        }
      }
    }
    return y;
  };
  std::vector<float> initial = transpose(c.initial, false);
  c.tinitial = make_tensor(initial.data(), GDN_F32, {c.n.B, c.n.Hv, c.n.V, c.n.K});
  c.tfinal = make_tensor(c.final.data(), GDN_F32, {c.n.B, c.n.Hv, c.n.V, c.n.K});
  c.args.state_layout = GDN_STATE_V_FIRST;
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
  EXPECT_EQ(c.o, o);
  EXPECT_EQ(transpose(c.final, true), final);
}

TEST(Reference, NullSlotsZeroOutputsAndTouchNothing) {
  Sizes s;
  s.B = 4;
  s.sequences = 8;  // the pool
  RuleCase c(s);
  c.args.impl = "reference_fp64";
  c.args.initial_state_indices = c.indices({3, -1, 7, -1});
  c.args.final_state = &c.tinitial;  // in place: final_state_indices default to initial_state_indices
  const std::vector<float> before = c.initial;
  ASSERT_EQ(gdn_recurrent(&c.args), GDN_OK) << gdn_last_error();
  const size_t row = size_t(s.T * s.Hv * s.V), slot = size_t(s.Hv * s.K * s.V);
  for (size_t i = 0; i < row; ++i) {
    EXPECT_EQ(c.o[row + i], 0.0f);
    EXPECT_EQ(c.o[3 * row + i], 0.0f);
  }
  for (size_t i = 0; i < 8; ++i) {
    const bool same = std::memcmp(&before[i * slot], &c.initial[i * slot], slot * sizeof(float)) == 0;
    EXPECT_EQ(same, i != 3 && i != 7) << "slot " << i;
  }
  // The other rule: slot 0 is null too.
  c.args.initial_state_indices = c.indices({0, 1, 2, 3});
  c.args.null_slots = GDN_NULL_NON_POSITIVE;
  const std::vector<float> again = c.initial;
  ASSERT_EQ(gdn_recurrent(&c.args), GDN_OK);
  for (size_t i = 0; i < row; ++i) EXPECT_EQ(c.o[i], 0.0f);
  EXPECT_EQ(std::memcmp(again.data(), c.initial.data(), slot * sizeof(float)), 0);
}

TEST(Reference, HasInitialStateStartsFromZeros) {
  RuleCase c;
  c.args.impl = "reference_fp64";
  c.args.has_initial_state = c.indices({1, 0});
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK);
  const std::vector<float> o = c.o;
  c.args.has_initial_state = nullptr;
  std::fill(c.initial.begin() + int64_t(c.initial.size() / 2), c.initial.end(), 0.0f);
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK);
  EXPECT_EQ(c.o, o);
}

TEST(Reference, VerifyThenContinueEqualsSerialDecode) {
  // Two sequences of 4 drafted tokens; slots of every token's state; accept 3 and 1; the next token starts from there.
  Sizes s;
  s.T = 4;
  s.sequences = 9;
  RuleCase verify(s);
  verify.args.impl = "reference_fp64";
  std::vector<float> pool = verify.initial, snapshots(size_t(2 * 4 * s.Hv * s.K * s.V), kUntouched);
  verify.tinitial.data = pool.data();
  verify.args.final_state = &verify.tinitial;
  verify.args.token_state_indices = verify.indices({1, 2, 3, 4, 5, 6, 7, 8}, {2, 4});
  gdn_tensor tsnap = make_tensor(snapshots.data(), GDN_F32, {2, 4, s.Hv, s.K, s.V});
  verify.args.snapshots = &tsnap;
  ASSERT_EQ(gdn_recurrent(&verify.args), GDN_OK) << gdn_last_error();

  const size_t slot = size_t(s.Hv * s.K * s.V);
  for (int64_t b = 0; b < 2; ++b) {
    std::vector<double> S(verify.initial.begin() + int64_t(slot) * (b == 0 ? 1 : 5),
                          verify.initial.begin() + int64_t(slot) * (b == 0 ? 2 : 6));
    for (int64_t t = 0; t < 4; ++t) {
      matrix_recurrence(verify, b, t, 1, &S, 1);
      for (size_t i = 0; i < slot; ++i) {
        EXPECT_NEAR(double(pool[size_t(b * 4 + t + 1) * slot + i]), S[i], 1e-6);
        EXPECT_EQ(snapshots[size_t(b * 4 + t) * slot + i], pool[size_t(b * 4 + t + 1) * slot + i]);
      }
    }
  }

  const std::vector<float> committed = pool;
  RuleCase next(s, 50);
  next.args.impl = "reference_fp64";
  next.tinitial.data = pool.data();
  next.args.final_state = &next.tinitial;
  next.args.token_state_indices = next.indices({1, 2, 3, 4, 5, 6, 7, 8}, {2, 4});
  next.args.num_accepted = next.indices({3, 1});
  ASSERT_EQ(gdn_recurrent(&next.args), GDN_OK) << gdn_last_error();
  for (int64_t b = 0; b < 2; ++b) {
    const int64_t from = b == 0 ? 3 : 5;
    std::vector<double> S(committed.begin() + int64_t(slot) * from, committed.begin() + int64_t(slot) * (from + 1));
    const auto o = matrix_recurrence(next, b, 0, 4, &S, 1 / std::sqrt(double(s.K)));
    for (size_t i = 0; i < o.size(); ++i) EXPECT_NEAR(double(next.o[size_t(b) * o.size() + i]), o[i], 1e-6);
  }
}

TEST(Reference, CheckpointsAreStatesOfPrefixes) {
  Sizes s;
  s.B = 1;
  s.T = 12;
  s.sequences = 3;
  RuleCase c(s);
  c.args.impl = "reference_fp64";
  c.args.cu_seqlens = c.indices({0, 5, 6, 12});  // checkpoints every 2: 2 + 0 + 3
  std::vector<float> checkpoints(size_t(6 * s.Hv * s.K * s.V), kUntouched);
  gdn_tensor tc = make_tensor(checkpoints.data(), GDN_F32, {6, s.Hv, s.K, s.V});
  c.args.checkpoints = &tc;
  c.args.checkpoint_indices = c.indices({5, 0, -1, 3, 1});
  c.args.checkpoint_every = 2;
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
  const size_t slot = size_t(s.Hv * s.K * s.V);
  const auto expect_state = [&](int64_t row, int64_t seq, int64_t begin, int64_t len) {
    std::vector<double> S(c.initial.begin() + seq * int64_t(slot), c.initial.begin() + (seq + 1) * int64_t(slot));
    matrix_recurrence(c, 0, begin, len, &S, 1);
    for (size_t i = 0; i < slot; ++i) EXPECT_NEAR(double(checkpoints[size_t(row) * slot + i]), S[i], 1e-6);
  };
  expect_state(5, 0, 0, 2);
  expect_state(0, 0, 0, 4);
  expect_state(3, 2, 6, 4);
  expect_state(1, 2, 6, 6);
  for (const size_t row : {size_t{2}, size_t{4}}) {
    for (size_t i = 0; i < slot; ++i) EXPECT_EQ(checkpoints[row * slot + i], kUntouched);
  }
}

TEST(Reference, RoundingSwitches) {
  RuleCase c;
  c.args.impl = "reference_fp32";
  c.args.qk_l2norm = 1;
  // bf16 copies of q, k and beta.
  const auto to_bf16 = [](const std::vector<float>& x) {
    std::vector<uint16_t> y(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      uint32_t u;
      std::memcpy(&u, &x[i], 4);
      y[i] = uint16_t(u >> 16);
    }
    return y;
  };
  std::vector<uint16_t> q = to_bf16(c.q), k = to_bf16(c.k), beta = to_bf16(c.beta);
  c.tq = make_tensor(q.data(), GDN_BF16, {c.n.B, c.n.T, c.n.Hk, c.n.K});
  c.tk = make_tensor(k.data(), GDN_BF16, {c.n.B, c.n.T, c.n.Hk, c.n.K});
  c.tbeta = make_tensor(beta.data(), GDN_BF16, {c.n.B, c.n.T, c.n.Hv});
  c.args.beta_form = GDN_BETA_SIGMOID;
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
  const std::vector<float> exact = c.o;
  const auto largest_change = [&] {
    float worst = 0;
    for (size_t i = 0; i < exact.size(); ++i) worst = std::max(worst, std::fabs(c.o[i] - exact[i]));
    return worst;
  };
  c.args.round_qk = 1;
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK);
  EXPECT_GT(largest_change(), 1e-4f);
  EXPECT_LT(largest_change(), 3e-2f);
  c.args.round_qk = 0;
  c.args.round_beta = 1;
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK);
  EXPECT_GT(largest_change(), 1e-5f);
  EXPECT_LT(largest_change(), 3e-2f);
}

TEST(Reference, ZeroTailTouchesOnlyRowsPastTheLastSequence) {
  for (const bool empty : {false, true}) {  // no sequence at all: every row is past the last one
    for (const int32_t zero_tail : {0, 1}) {
      gdn_test::Sizes sizes{1, 9, 2, 4, 6, 3, empty ? 0 : 2};
      gdn_test::RuleCase c(sizes);
      c.args.cu_seqlens = c.indices(empty ? std::vector<int64_t>{0} : std::vector<int64_t>{0, 2, 5});
      c.args.max_seqlen = 3;
      c.args.zero_tail = zero_tail;
      ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
      const size_t written = empty ? 0 : 5 * 4 * 3;
      for (size_t i = 0; i < c.o.size(); ++i) {
        if (i < written) {
          EXPECT_NE(c.o[i], gdn_test::kUntouched) << i;
        } else {
          EXPECT_EQ(c.o[i], zero_tail == 1 ? 0 : gdn_test::kUntouched) << i;
        }
      }
    }
  }
}

TEST(Reference, StoresRoundToNearestEven) {
  // o = v exactly (k = q = 1, beta = 1, scale = 1): what is stored is v rounded.
  struct Example {
    double value;
    uint16_t bf16, f16;
  };
  const Example examples[] = {
      {1.0, 0x3f80, 0x3c00},
      {1.00390625, 0x3f80, 0x3c04},             // bf16: half way, to even
      {1.01171875, 0x3f82, 0x3c0c},             // bf16: half way, to even (up)
      {1.00390625 + 1e-12, 0x3f81, 0x3c04},     // just above half way: must not round twice
      {1.00048828125 + 1e-12, 0x3f80, 0x3c01},  // likewise for fp16
      {65519.0, 0x4780, 0x7bff},
      {65520.0, 0x4780, 0x7c00},
      {6.0e-8, 0x3381, 0x0001},
      {-2.0, 0xc000, 0xc000},
  };
  for (const Example& e : examples) {
    double one = 1, v = e.value;
    uint16_t out = 0;
    gdn_tensor tk = make_tensor(&one, GDN_F64, {1, 1, 1, 1}), tv = make_tensor(&v, GDN_F64, {1, 1, 1, 1});
    gdn_tensor to = make_tensor(&out, GDN_BF16, {1, 1, 1, 1});
    gdn_rule_args a = GDN_INIT(gdn_rule_args);
    a.q = a.k = &tk;
    a.v = &tv;
    a.o = &to;
    a.scale = 1;
    ASSERT_EQ(gdn_recurrent(&a), GDN_OK) << gdn_last_error();
    EXPECT_EQ(out, e.bf16) << e.value;
    to.dtype = GDN_F16;
    ASSERT_EQ(gdn_recurrent(&a), GDN_OK) << gdn_last_error();
    EXPECT_EQ(out, e.f16) << e.value;
  }
}

}  // namespace
}  // namespace gdn_test
