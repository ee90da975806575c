// SPDX-License-Identifier: MIT
// gate, rmsnorm_gated and qk_rmsnorm_rope against their definitions in double.
#include <cstdio>

#include "ops_tensor.h"

namespace {
using namespace gdn_test;

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

const Layout kLayouts[] = {{}, {{}, 1, 5}, {{}, 2, 1}, {{2, 1, 0}, 1, 0}};

// |got - want| within the rounding of the dtype, a relative error and an absolute one (subnormal results).
::testing::AssertionResult close_to(double got, double want, int32_t dtype, double relative, double absolute = 1e-43) {
  const double allowed = rounding_error(want, dtype) + std::abs(want) * relative + absolute;
  if (std::abs(got - want) <= allowed) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << got << ", expected " << want << " +- " << allowed;
}

class Gate : public IsaTest {};

struct GateData {
  Tensor a, b, A_log, dt_bias, g, beta;
};
void run_gate(GateData* d, int32_t gate_form, int32_t beta_form, int32_t threads, bool bias = true) {
  gdn_gate_args args = GDN_INIT(gdn_gate_args);
  args.a = d->a.ptr();
  args.b = d->b.ptr();
  args.A_log = d->A_log.ptr();
  args.dt_bias = bias ? d->dt_bias.ptr() : nullptr;
  args.g = d->g.ptr();
  args.beta = d->beta.ptr();
  args.gate_form = gate_form;
  args.beta_form = beta_form;
  args.num_threads = threads;
  ASSERT_EQ(gdn_gate(&args), GDN_OK) << gdn_last_error();
  EXPECT_TRUE(d->g.guards_intact() && d->beta.guards_intact());
}

TEST_P(Gate, EveryDtypeFormAndLayout) {
  constexpr double kRelative = 1e-6;
  double worst_g = 0, worst_beta = 0;
  for (const int32_t in : kFloatDtypes)
    for (const int32_t param : kFloatDtypes)
      for (const int32_t out : kFloatDtypes)
        for (const Layout& layout : kLayouts)
          for (const int64_t H : {1, 6, 16, 37})
            for (const int form : {0, 1}) {
              GateData d{
                  Tensor(in, {2, 3, H}, layout),  Tensor(in, {2, 3, H}, layout), Tensor(param, {H}), Tensor(param, {H}),
                  Tensor(out, {2, 3, H}, layout), Tensor(out, {2, 3, H}, layout)};
              d.a.fill(1, -30, 30);
              d.b.fill(2, -30, 30);
              d.A_log.fill(3, -4, 2);
              d.dt_bias.fill(4, -3, 3);
              run_gate(&d, form == 0 ? GDN_GATE_LOG : GDN_GATE_LINEAR, form == 0 ? GDN_BETA_SIGMOID : GDN_BETA_SIGMOID2,
                       1);
              for (int64_t i = 0; i < d.a.size(); ++i) {
                const int64_t h = i % H;
                // The sum a + dt_bias is fp32: its rounding is part of the definition.
                const double dt = static_cast<double>(static_cast<float>(d.a.get(i) + d.dt_bias.get(h)));
                const double g = -std::exp(d.A_log.get(h)) * softplus(dt);
                const double want_g = form == 0 ? g : std::exp(g);
                const double want_beta = (form + 1) * sigmoid(d.b.get(i));
                // alpha = exp(g) inherits the absolute error of g.
                const double relative = form == 0 ? kRelative : kRelative * (1 + std::abs(g));
                ASSERT_TRUE(close_to(d.g.get(i), want_g, out, relative));
                ASSERT_TRUE(close_to(d.beta.get(i), want_beta, out, kRelative));
                if (out != GDN_F32) continue;
                if (form == 0) worst_g = std::max(worst_g, std::abs(d.g.get(i) - g) / std::abs(g));
                worst_beta = std::max(worst_beta, std::abs(d.beta.get(i) - want_beta) / want_beta);
              }
            }
  std::printf("gate %s: worst fp32 relative error g %.2e, beta %.2e\n", GetParam().c_str(), worst_g, worst_beta);
}

TEST_P(Gate, ExtremeLogitsAndRates) {
  for (const int64_t tokens : {1, 17, 1000})
    for (const double A_log : {-10.0, 0.0, 10.0, 50.0, 88.9, 200.0})
      for (const int form : {0, 1}) {
        constexpr int64_t kH = 10;
        GateData d{Tensor(GDN_F32, {tokens, kH}), Tensor(GDN_F32, {tokens, kH}), Tensor(GDN_F32, {kH}),
                   Tensor(GDN_F32, {kH}),         Tensor(GDN_F32, {tokens, kH}), Tensor(GDN_F32, {tokens, kH})};
        d.a.fill(1, -100, 100);
        d.b.fill(2, -100, 100);
        d.A_log.fill(3, A_log, A_log);
        d.dt_bias.fill(4, 0, 0);
        for (int64_t h = 0; h < kH; ++h) {
          const double edge[kH] = {-100, 100, -1e30, 1e30, 0, -104, -87.5, 20, 20.000002, -20};
          d.a.set(h, edge[h]);
          d.b.set(h, edge[h]);
        }
        run_gate(&d, form == 0 ? GDN_GATE_LOG : GDN_GATE_LINEAR, GDN_BETA_SIGMOID, 2);
        for (int64_t i = 0; i < d.a.size(); ++i) {
          const double g = d.g.get(i), beta = d.beta.get(i);
          ASSERT_TRUE(std::isfinite(g) && std::isfinite(beta));
          ASSERT_TRUE(form == 0 ? g <= 0 : (g >= 0 && g <= 1)) << g;
          ASSERT_TRUE(beta >= 0 && beta <= 1) << beta;
          ASSERT_TRUE(close_to(beta, sigmoid(d.b.get(i)), GDN_F32, 1e-6, 2e-45));
          const double want = -std::exp(A_log) * softplus(d.a.get(i));
          // Below the smallest normal softplus has absolute accuracy only; above the largest float g is the largest.
          if (form == 0 && d.a.get(i) > -87 && want > -3.4e38 && A_log < 88) {
            ASSERT_TRUE(close_to(g, want, GDN_F32, 1e-6)) << d.a.get(i);
          }
        }
      }
}

TEST_P(Gate, InterleavedAAndBAndOneOfBoth) {
  // a and b as slices of one projection [T, H, 2]: strides (2H, 2).
  Tensor ab(GDN_BF16, {9, 6, 2}), A_log(GDN_F32, {6}), g(GDN_F32, {9, 6}), beta(GDN_F32, {9, 6});
  ab.fill(1, -3, 3);
  A_log.fill(2);
  gdn_tensor a = *ab.ptr(), b = a;
  a.ndim = b.ndim = 2;
  b.data = static_cast<char*>(b.data) + 2;
  gdn_gate_args args = GDN_INIT(gdn_gate_args);
  args.a = &a;
  args.A_log = A_log.ptr();
  args.g = g.ptr();
  ASSERT_EQ(gdn_gate(&args), GDN_OK) << gdn_last_error();
  args = GDN_INIT(gdn_gate_args);
  args.b = &b;
  args.beta = beta.ptr();
  ASSERT_EQ(gdn_gate(&args), GDN_OK) << gdn_last_error();
  for (int64_t t = 0; t < 9; ++t)
    for (int64_t h = 0; h < 6; ++h) {
      EXPECT_TRUE(close_to(g.at({t, h}), -std::exp(A_log.get(h)) * softplus(ab.at({t, h, 0})), GDN_F32, 1e-6));
      EXPECT_TRUE(close_to(beta.at({t, h}), sigmoid(ab.at({t, h, 1})), GDN_F32, 1e-6));
    }
}

TEST_P(Gate, ThreadsDoNotChangeBits) {
  std::vector<double> g, beta;
  for (const int32_t threads : {1, 2, 5}) {
    GateData d{Tensor(GDN_F32, {5000, 33}), Tensor(GDN_F32, {5000, 33}), Tensor(GDN_F32, {33}),
               Tensor(GDN_F32, {33}),       Tensor(GDN_F32, {5000, 33}), Tensor(GDN_F32, {5000, 33})};
    d.a.fill(1, -9, 9);
    d.b.fill(2, -9, 9);
    d.A_log.fill(3);
    run_gate(&d, GDN_GATE_LOG, GDN_BETA_SIGMOID, threads, false);
    if (threads == 1) {
      g = d.g.values();
      beta = d.beta.values();
    }
    EXPECT_TRUE(d.g.values() == g && d.beta.values() == beta);
  }
}

class Norm : public IsaTest {};

struct NormCase {
  std::vector<int64_t> shape;
  int32_t x = GDN_F32, z = GDN_F32, w = GDN_F32, out = GDN_F32;
  int32_t activation = GDN_ACT_SILU;
  bool gate_first = false, zero_centered = false, round = false, weight = true, in_place = false;
  Layout layout;
  int32_t threads = 1;
  double size = 2;  // of x and z
};
// Returns the worst relative error.
double run_norm(const NormCase& c, std::vector<double>* result = nullptr) {
  const int64_t D = c.shape.back();
  Tensor x(c.x, c.shape, c.layout), z(c.z, c.shape, c.layout), w(c.w, {D}), out(c.out, c.shape, c.layout);
  x.fill(1, -c.size, c.size);
  z.fill(2, -c.size, c.size);
  w.fill(3);
  const std::vector<double> xs = x.values();
  Tensor& y = c.in_place ? x : out;
  gdn_rmsnorm_gated_args a = GDN_INIT(gdn_rmsnorm_gated_args);
  a.x = x.ptr();
  a.z = c.activation == GDN_ACT_NONE ? nullptr : z.ptr();
  a.weight = c.weight ? w.ptr() : nullptr;
  a.out = y.ptr();
  a.eps = 1e-5f;
  a.activation = c.activation;
  a.gate_first = c.gate_first;
  a.zero_centered = c.zero_centered;
  a.round_before_weight = c.round;
  a.num_threads = c.threads;
  EXPECT_EQ(gdn_rmsnorm_gated(&a), GDN_OK) << gdn_last_error();
  EXPECT_TRUE(y.guards_intact());
  if (result != nullptr) *result = y.values();
  double worst = 0;
  for (int64_t row = 0; row < x.size() / D; ++row) {
    std::vector<double> in(static_cast<size_t>(D)), act(static_cast<size_t>(D), 1.0);
    double sum = 0;
    for (int64_t i = 0; i < D; ++i) {
      const double zi = z.get(row * D + i);
      if (c.activation != GDN_ACT_NONE) act[size_t(i)] = sigmoid(zi) * (c.activation == GDN_ACT_SILU ? zi : 1);
      in[size_t(i)] = xs[size_t(row * D + i)] * (c.gate_first ? act[size_t(i)] : 1);
      sum += in[size_t(i)] * in[size_t(i)];
    }
    const double r = 1 / std::sqrt(sum / static_cast<double>(D) + static_cast<double>(1e-5f));
    for (int64_t i = 0; i < D; ++i) {
      const double exact = in[size_t(i)] * r;
      // A value next to a rounding boundary may fall to either side: then the neighbour counts too.
      const double weight = c.weight ? w.get(i) + (c.zero_centered ? 1 : 0) : 1;
      const double factor = weight * (c.gate_first ? 1 : act[size_t(i)]);
      const double got = y.get(row * D + i);
      bool found = false;
      double best = 1e300;
      for (const double nudge : {0.0, 4e-7, -4e-7}) {
        const double n = c.round && c.x != GDN_F32 ? round_dtype(exact * (1 + nudge), c.x) : exact;
        found = found || close_to(got, n * factor, c.out, 1e-6);
        best = std::min(best, std::abs(got - n * factor) / std::max(std::abs(n * factor), 1e-30));
        if (!c.round) break;
      }
      if (!found) {
        ADD_FAILURE() << "row " << row << " column " << i << ": " << got << ", expected " << exact * factor;
        return worst;
      }
      worst = std::max(worst, best);
    }
  }
  return worst;
}

TEST_P(Norm, EveryDtypeMixture) {
  double worst = 0;
  for (const int32_t x : kFloatDtypes)
    for (const int32_t z : kFloatDtypes)
      for (const int32_t w : kFloatDtypes)
        for (const int32_t out : kFloatDtypes)
          for (const Layout& layout : kLayouts) {
            SCOPED_TRACE(std::string(dtype_name(x)) + dtype_name(z) + dtype_name(w) + dtype_name(out));
            const double e = run_norm({.shape = {2, 3, 128}, .x = x, .z = z, .w = w, .out = out, .layout = layout});
            if (out == GDN_F32) worst = std::max(worst, e);
          }
  std::printf("norm %s: worst fp32 relative error %.2e\n", GetParam().c_str(), worst);
}
TEST_P(Norm, EverySwitch) {
  for (int bits = 0; bits < 64; ++bits)
    for (const int32_t activation : {GDN_ACT_NONE, GDN_ACT_SILU, GDN_ACT_SIGMOID})
      for (const int64_t D : {100, 700}) {
        SCOPED_TRACE("switches " + std::to_string(bits) + " D " + std::to_string(D));
        const int32_t dtype = (bits & 32) != 0 ? GDN_BF16 : GDN_F16;
        NormCase c{.shape = {3, D}, .x = dtype, .z = dtype, .out = (bits & 16) != 0 ? dtype : GDN_F32};
        c.activation = activation;
        c.gate_first = (bits & 1) != 0;
        c.zero_centered = (bits & 2) != 0;
        c.round = (bits & 4) != 0;
        c.weight = (bits & 8) == 0;
        run_norm(c);
        c.in_place = true;
        c.out = dtype;
        run_norm(c);
      }
}
TEST_P(Norm, TailsRanksAndLargeGates) {
  for (const int64_t D : {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 127, 511, 512, 513, 1025, 4096}) {
    run_norm({.shape = {D}});
    run_norm({.shape = {2, 1, 2, D}, .activation = GDN_ACT_SIGMOID, .size = 100});
    run_norm({.shape = {3, D}, .gate_first = true, .in_place = true});
  }
}
TEST_P(Norm, ThreadsDoNotChangeBits) {
  for (const int64_t D : {128, 600}) {
    std::vector<double> first, now;
    for (const int32_t threads : {1, 2, 5}) {
      run_norm({.shape = {70, 10, D}, .in_place = D == 600, .threads = threads}, threads == 1 ? &first : &now);
      EXPECT_TRUE(threads == 1 || now == first);
    }
  }
}

class Rope : public IsaTest {};

struct RopeCase {
  int64_t B = 2, T = 3, Hq = 4, Hkv = 2, D = 64, R = 32;
  int32_t q = GDN_F32, k = GDN_F32, w = GDN_F32, cos = GDN_F32, q_out = GDN_F32, k_out = GDN_F32;
  bool gate = true, zero_centered = true, weights = true;
  int positions = 0;  // 0: cos and sin, 1: positions, 3: mrope
  std::vector<int32_t> section;
  int64_t first_position = 0;
  bool broadcast = false;
  Layout layout;
  double theta = 1e7;
  int32_t threads = 1;
};
// Returns the worst error of q_out and k_out relative to the row's root mean square.
double run_rope(const RopeCase& c, std::vector<double>* result = nullptr) {
  const int64_t pb = c.broadcast ? 1 : c.B;
  Tensor q(c.q, {c.B, c.T, c.Hq, c.gate ? 2 * c.D : c.D}, c.layout), k(c.k, {c.B, c.T, c.Hkv, c.D}, c.layout);
  Tensor qw(c.w, {c.D}), kw(c.w, {c.D}), cos(c.cos, {pb, c.T, c.R}), sin(c.cos, {pb, c.T, c.R});
  Tensor q_out(c.q_out, {c.B, c.T, c.Hq, c.D}, c.layout), k_out(c.k_out, {c.B, c.T, c.Hkv, c.D}, c.layout);
  Tensor gate_out(c.k_out, {c.B, c.T, c.Hq, c.D}, c.layout);
  q.fill(1);
  k.fill(2);
  qw.fill(3, -0.5, 0.5);
  kw.fill(4, -0.5, 0.5);
  const int64_t axes = c.positions == 3 ? 3 : 1;
  std::vector<int64_t> pos(static_cast<size_t>(axes * pb * c.T));
  for (size_t i = 0; i < pos.size(); ++i) pos[i] = c.first_position + static_cast<int64_t>(7 * i % 1000);
  const auto angle = [&](int64_t b, int64_t t, int64_t i) {
    int64_t axis = 0;
    if (c.positions == 3 && i % 3 == 1 && i < 3 * c.section[1]) axis = 1;
    if (c.positions == 3 && i % 3 == 2 && i < 3 * c.section[2]) axis = 2;
    const double p = static_cast<double>(pos[size_t((axis * pb + (c.broadcast ? 0 : b)) * c.T + t)]);
    const long double turn =
        static_cast<long double>(p) * std::pow(static_cast<long double>(static_cast<float>(c.theta)),
                                               -2.0L * static_cast<long double>(i) / static_cast<long double>(c.R));
    return static_cast<double>(std::remainder(turn, 2 * 3.14159265358979323846264338328L));
  };
  cos.fill(5, -1, 1);  // given tables need not be a rotation, and their halves need not agree
  sin.fill(6, -1, 1);
  gdn_qk_rmsnorm_rope_args a = GDN_INIT(gdn_qk_rmsnorm_rope_args);
  a.q = q.ptr();
  a.k = k.ptr();
  a.q_weight = c.weights ? qw.ptr() : nullptr;
  a.k_weight = c.weights ? kw.ptr() : nullptr;
  gdn_tensor tpos;
  const std::vector<int64_t> pos_shape =
      c.positions == 3 ? std::vector<int64_t>{3, pb, c.T} : std::vector<int64_t>{pb, c.T};
  gdn_tensor_init(&tpos, pos.data(), GDN_I64, static_cast<int32_t>(pos_shape.size()), pos_shape.data());
  if (c.positions == 0) {
    a.cos = cos.ptr();
    a.sin = sin.ptr();
  } else {
    a.positions = &tpos;
    a.theta = static_cast<float>(c.theta);
    a.rotary_dim = static_cast<int32_t>(c.R);
    if (c.positions == 3) std::copy(c.section.begin(), c.section.end(), a.mrope_section);
  }
  a.q_out = q_out.ptr();
  a.k_out = k_out.ptr();
  a.gate_out = c.gate ? gate_out.ptr() : nullptr;
  a.eps = 1e-6f;
  a.q_has_gate = c.gate;
  a.zero_centered = c.zero_centered;
  a.num_threads = c.threads;
  EXPECT_EQ(gdn_qk_rmsnorm_rope(&a), GDN_OK) << gdn_last_error();
  EXPECT_TRUE(q_out.guards_intact() && k_out.guards_intact() && gate_out.guards_intact());
  if (result != nullptr) *result = q_out.values();

  double worst = 0;
  const auto check = [&](const Tensor& in, const Tensor& w, const Tensor& out, int64_t H) {
    for (int64_t b = 0; b < c.B; ++b)
      for (int64_t t = 0; t < c.T; ++t)
        for (int64_t h = 0; h < H; ++h) {
          double sum = 0;
          for (int64_t i = 0; i < c.D; ++i) sum += in.at({b, t, h, i}) * in.at({b, t, h, i});
          const double r = 1 / std::sqrt(sum / static_cast<double>(c.D) + static_cast<double>(1e-6f));
          const auto n = [&](int64_t i) {
            return in.at({b, t, h, i}) * r * (c.weights ? w.get(i) + (c.zero_centered ? 1 : 0) : 1);
          };
          // The normed value is rounded to the output's dtype; one next to a boundary may fall to either side, which
          // costs at most one more unit.
          const int32_t dtype = out.dtype();
          const double ulps = dtype == GDN_F32 ? 0 : 1;
          for (int64_t i = 0; i < c.D; ++i) {
            double want = round_dtype(n(i), dtype), allowed = rounding_error(want, dtype), size = std::abs(want);
            if (i < c.R) {
              const int64_t half = c.R / 2, j = i % half, other = i < half ? i + half : i - half;
              const double x = n(i), y = n(other);
              double co, si;
              if (c.positions == 0) {
                co = cos.at({c.broadcast ? 0 : b, t, i});
                si = sin.at({c.broadcast ? 0 : b, t, i});
              } else {
                co = std::cos(angle(b, t, j));
                si = std::sin(angle(b, t, j));
              }
              const double sign = i < half ? -1 : 1;
              want = round_dtype(x, dtype) * co + sign * round_dtype(y, dtype) * si;
              size = std::abs(x) + std::abs(y);
              const double boundary = [&](double v) {
                return round_dtype(v * (1 + 4e-7), dtype) != round_dtype(v * (1 - 4e-7), dtype) ? 1.0 : 0.0;
              }(x) + (round_dtype(y * (1 + 4e-7), dtype) != round_dtype(y * (1 - 4e-7), dtype) ? 1.0 : 0.0);
              allowed = rounding_error(want, dtype) + ulps * boundary * 2 * rounding_error(size, dtype);
            } else {
              allowed *= 1 + 2 * ulps;
            }
            const double error = std::abs(out.at({b, t, h, i}) - want);
            if (!(error <= allowed + 6e-7 * size)) {
              ADD_FAILURE() << "head " << h << " channel " << i << ": " << out.at({b, t, h, i}) << ", expected "
                            << want;
              return;
            }
            if (dtype == GDN_F32) worst = std::max(worst, error / size);
          }
        }
  };
  check(q, qw, q_out, c.Hq);
  check(k, kw, k_out, c.Hkv);
  for (int64_t b = 0; c.gate && b < c.B; ++b)
    for (int64_t t = 0; t < c.T; ++t)
      for (int64_t h = 0; h < c.Hq; ++h)
        for (int64_t i = 0; i < c.D; ++i) {
          const double want = round_dtype(q.at({b, t, h, c.D + i}), c.k_out);
          if (gate_out.at({b, t, h, i}) != want) {
            ADD_FAILURE() << "gate " << gate_out.at({b, t, h, i}) << ", expected " << want;
            return worst;
          }
        }
  return worst;
}

TEST_P(Rope, EveryDtypeMixture) {
  double worst = 0;
  for (const int32_t q : kFloatDtypes)
    for (const int32_t k : kFloatDtypes)
      for (const int32_t w : kFloatDtypes)
        for (const int32_t cos : kFloatDtypes)
          for (const int32_t out : kFloatDtypes) {
            SCOPED_TRACE(std::string(dtype_name(q)) + dtype_name(k) + dtype_name(w) + dtype_name(cos) +
                         dtype_name(out));
            RopeCase c{.q = q, .k = k, .w = w, .cos = cos, .q_out = out, .k_out = q};
            c.layout = kLayouts[(q + w + cos) % 3];
            worst = std::max(worst, run_rope(c));
          }
  std::printf("rope %s: worst fp32 error / size %.2e\n", GetParam().c_str(), worst);
}
TEST_P(Rope, HeadAndRotarySizes) {
  for (const int64_t D : {2, 6, 17, 64, 96, 128, 256, 511, 1024, 1025, 1300})
    for (const int64_t R : {int64_t{2}, D / 4 * 2, D / 2 * 2})
      for (const int positions : {0, 1}) {
        if (R < 2) continue;
        SCOPED_TRACE("D " + std::to_string(D) + " R " + std::to_string(R));
        run_rope({.D = D,
                  .R = R,
                  .gate = D % 2 == 0,
                  .zero_centered = D % 3 == 0,
                  .weights = D % 5 != 0,
                  .positions = positions,
                  .layout = kLayouts[D % 3]});
      }
}
TEST_P(Rope, PositionsAndMrope) {
  double worst = 0;
  for (const int64_t first : {int64_t{0}, int64_t{4096}, int64_t{262144}, int64_t{1000000}, int64_t{30000000}})
    for (const bool broadcast : {false, true})
      for (const double theta : {1e4, 1e7}) {
        RopeCase c{
            .T = 5, .D = 256, .R = 64, .positions = 1, .first_position = first, .broadcast = broadcast, .theta = theta};
        worst = std::max(worst, run_rope(c));
        c.positions = 3;
        c.section = {11, 11, 10};
        worst = std::max(worst, run_rope(c));
        c.section = {32, 0, 0};
        worst = std::max(worst, run_rope(c));
        c.section = {8, 12, 12};
        worst = std::max(worst, run_rope(c));
      }
  std::printf("rope from positions to 3e7 %s: worst fp32 error / size %.2e\n", GetParam().c_str(), worst);
}
TEST_P(Rope, ThreadsDoNotChangeBits) {
  std::vector<double> first, now;
  for (const int32_t threads : {1, 2, 5}) {
    run_rope({.T = 150, .D = 128, .R = 64, .positions = 1, .threads = threads}, threads == 1 ? &first : &now);
    EXPECT_TRUE(threads == 1 || now == first);
  }
}

TEST_P(Gate, EmptyWork) {
  Tensor x(GDN_F32, {0, 8}), out(GDN_F32, {0, 8});
  gdn_rmsnorm_gated_args n = GDN_INIT(gdn_rmsnorm_gated_args);
  n.x = x.ptr();
  n.out = out.ptr();
  EXPECT_EQ(gdn_rmsnorm_gated(&n), GDN_OK) << gdn_last_error();
  gdn_gate_args g = GDN_INIT(gdn_gate_args);
  g.b = x.ptr();
  g.beta = out.ptr();
  EXPECT_EQ(gdn_gate(&g), GDN_OK) << gdn_last_error();
  EXPECT_TRUE(out.guards_intact());
}

GDN_INSTANTIATE_ISAS(Gate);
GDN_INSTANTIATE_ISAS(Norm);
GDN_INSTANTIATE_ISAS(Rope);

}  // namespace
