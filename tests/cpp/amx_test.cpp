// SPDX-License-Identifier: MIT
// The AMX prefill kernel with software tiles (GDN_AMX_EMULATE), so on any CPU: the arithmetic is TDPBF16PS's, the
// source is the product's.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "amx_cases.h"
#include "core/impl_list.h"
#include "cpu/amx/chunk_kernel.h"
#include "cpu/amx/tile.h"

namespace gdn {
namespace {

using amx_cases::Case;
using amx_cases::make_problem;

void run(const RuleProblem& p, int32_t threads, bool exact = false) {
  Plan plan;
  (exact ? cpu::plan_amx_exact : cpu::plan_amx)(p, &plan);
  plan.threads = threads;
  const Status status = (exact ? cpu::run_amx_exact : cpu::run_amx)(p, plan);
  ASSERT_TRUE(status.ok()) << status.message();
}

bool all_bytes(const char* p, int64_t n, unsigned char value) {
  return std::all_of(p, p + n, [=](char c) { return static_cast<unsigned char>(c) == value; });
}

class AmxCases : public testing::TestWithParam<Case> {};

void matches_the_recurrence(const Case& c, bool exact) {
  const auto problem = make_problem(c);
  const RuleProblem& p = problem->p;
  ASSERT_EQ(cpu::refuse_amx(p), nullptr);
  run(p, 2, exact);
  const amx_cases::Errors e = amx_cases::errors(p);
  const Case::Limits limit = exact ? c.exact_limits : c.limits;
  EXPECT_LE(e.o, limit.o);
  EXPECT_LE(e.state, limit.state);
  EXPECT_LE(e.checkpoint, limit.state);
  if (c.varlen) {
    const int64_t bytes = 3 * p.o.stride[1] * dtype_bytes(p.o.dtype);
    EXPECT_TRUE(all_bytes(p.o.at(0, problem->used), bytes, 0xff)) << "rows past cu_seqlens[N] were written";
  }
  for (size_t m = 0; m < p.checkpoint_slots.size(); ++m) {
    if (p.checkpoint_slots[m] >= 0) continue;
    EXPECT_TRUE(all_bytes(p.checkpoints.at(static_cast<int64_t>(m)), p.Hv * p.K * p.V * 4, 0xff))
        << "null checkpoint " << m << " was written";
  }
}

TEST_P(AmxCases, MatchesTheRecurrence) { matches_the_recurrence(GetParam(), false); }
TEST_P(AmxCases, ExactFormMatchesTheRecurrence) { matches_the_recurrence(GetParam(), true); }

TEST_P(AmxCases, BitsDoNotDependOnTheSplit) {
  for (const bool exact : {false, true}) {
    const auto expected = make_problem(GetParam()), found = make_problem(GetParam());
    run(expected->p, 1, exact);
    run(found->p, 64, exact);
    for (size_t i = 0; i < found->tensors.size(); ++i) {
      EXPECT_EQ(found->tensors[i]->memory, expected->tensors[i]->memory)
          << "tensor " << i << ", split for 64 threads, exact " << exact;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, AmxCases, testing::ValuesIn(amx_cases::all_cases()), [](const auto& param) {
  std::string name = param.param.name;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
});

Case small() {
  Case c;
  c.Hk = 2;
  c.Hv = 4;
  c.lens = {150};
  return c;
}

TEST(Amx, SplitsOneHeadOverThreads) {
  Case c = small();
  c.Hk = c.Hv = 1;
  c.lens = {4096};
  const auto problem = make_problem(c);
  problem->p.num_threads = 2;
  Plan plan;
  cpu::plan_amx(problem->p, &plan);
  EXPECT_EQ(plan.work_items, 2);
  EXPECT_EQ(plan.panel_v, 64);
  EXPECT_EQ(plan.block_tokens, 64);
  EXPECT_GT(plan.scratch_bytes, 64 * 128 * 4);
}

// A non-finite value may not reach the outputs of earlier tokens of its chunk, as 0 * NaN inside a product would.
TEST(Amx, NonFiniteInputsStayCausal) {
  for (const char* which : {"v", "k", "q", "g", "beta"}) {
    const auto expected = make_problem(small());
    run(expected->p, 1);
    const auto found = make_problem(small());
    RuleProblem& p = found->p;
    const int64_t token = 101;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const auto poison = [&](const View& view, int64_t last) {
      char* at = view.at(0, token, 0, last);
      if (view.dtype == GDN_BF16) {
        const uint16_t infinity = 0x7f80;
        std::memcpy(at, &infinity, 2);
      } else {
        std::memcpy(at, &nan, 4);
      }
    };
    const std::string name = which;
    poison(name == "v"   ? p.v
           : name == "k" ? p.k
           : name == "q" ? p.q
           : name == "g" ? p.g
                         : p.beta,
           name.size() == 1 && name != "g" ? 5 : 0);
    run(p, 1);
    for (int64_t t = 0; t < token; ++t) {
      for (int64_t i = 0; i < p.V; ++i) {
        const double a = amx_cases::read(p.o.at(0, t, 0, i), GDN_BF16),
                     b = amx_cases::read(expected->p.o.at(0, t, 0, i), GDN_BF16);
        ASSERT_NEAR(a, b, 0.02 * std::fabs(b) + 0.02) << which << ": token " << t << ", column " << i;
      }
    }
    EXPECT_FALSE(std::isfinite(amx_cases::read(p.o.at(0, token, 0, 5), GDN_BF16))) << which;
  }
}

TEST(Amx, NullSequenceZeroesItsRowsOnly) {
  Case c = small();
  c.varlen = true;
  c.lens = {70, 40, 80};
  const auto problem = make_problem(c);
  problem->p.seqs[1].is_null = true;
  problem->p.seqs[1].read_slot = problem->p.seqs[1].write_slot = -1;
  run(problem->p, 2);
  const RuleProblem& p = problem->p;
  EXPECT_TRUE(all_bytes(p.o.at(0, 70), 40 * p.Hv * p.V * 2, 0));
  EXPECT_TRUE(all_bytes(p.final_state.at(1), p.Hv * p.K * p.V * 4, 0xff));
  EXPECT_FALSE(all_bytes(p.o.at(0, 110), p.V * 2, 0));
}

TEST(Amx, StateInPlace) {
  const auto expected = make_problem(small());
  run(expected->p, 1);
  const auto found = make_problem(small());
  found->p.final_state = found->p.initial_state;
  run(found->p, 2);
  const size_t bytes = static_cast<size_t>(found->p.Hv * found->p.K * found->p.V * 4);
  EXPECT_EQ(std::memcmp(found->p.final_state.data, expected->p.final_state.data, bytes), 0);
}

TEST(Amx, RefusesByName) {
  const auto reason_after = [](auto change) {
    const auto problem = make_problem(small());
    change(&problem->p);
    const char* reason = cpu::refuse_amx(problem->p);
    return std::string(reason == nullptr ? "accepted" : reason);
  };
  const auto expect_says = [](const std::string& reason, const char* part) {
    EXPECT_NE(reason.find(part), std::string::npos) << reason;
  };
  expect_says(reason_after([](RuleProblem* p) { p->op = GDN_OP_RECURRENT; }), "chunk_forward only");
  expect_says(reason_after([](RuleProblem* p) { p->q.dtype = GDN_F16; }), "found f16");
  expect_says(reason_after([](RuleProblem* p) { p->v.dtype = GDN_F32; }), "found f32");
  expect_says(reason_after([](RuleProblem* p) { p->K = 100; }), "K = 100");
  expect_says(reason_after([](RuleProblem* p) { p->V = 512; }), "V = 512");
  expect_says(reason_after([](RuleProblem* p) { p->o.dtype = GDN_F64; }), "'o' is f64");
  expect_says(reason_after([](RuleProblem* p) { p->seqs[0].len = 9; }), "9 tokens");
  EXPECT_EQ(reason_after([](RuleProblem* p) {
              p->seqs[0].len = 9;
              p->batch_invariant = true;
            }),
            "accepted");
}

TEST(AmxVec, TransposeIsATranspose) {
  cpu::amx::VecU r[16];
  for (uint32_t i = 0; i < 16; ++i) {
    for (uint32_t j = 0; j < 16; ++j) r[i][j] = i * 16 + j;
  }
  cpu::amx::transpose16(r);
  for (uint32_t i = 0; i < 16; ++i) {
    for (uint32_t j = 0; j < 16; ++j) EXPECT_EQ(r[i][j], j * 16 + i);
  }
}

TEST(AmxVec, ExpMatchesDouble) {
  double worst = 0;
  for (float x = -87.2f; x < 60; x += 0.0173f) {
    const double expected = std::exp(static_cast<double>(x));
    worst =
        std::max(worst, std::fabs(static_cast<double>(cpu::amx::exp16(cpu::amx::splat(x))[3]) - expected) / expected);
  }
  EXPECT_LT(worst, 3e-7);
  EXPECT_EQ(cpu::amx::exp16(cpu::amx::splat(0.0f))[0], 1.0f);
  EXPECT_EQ(cpu::amx::exp16(cpu::amx::splat(-104.0f))[0], 0.0f);
  EXPECT_EQ(cpu::amx::exp16(cpu::amx::splat(-6000.0f))[0], 0.0f);
}

TEST(AmxVec, GateFunctionsMatchDouble) {
  namespace amx = cpu::amx;
  double worst_log = 0, worst_softplus = 0, worst_sigmoid = 0;
  const auto relative = [](double found, double expected) { return std::fabs(found - expected) / std::fabs(expected); };
  for (float x = -80; x < 80; x += 0.0131f) {
    const double wide = x;
    const float e = std::exp(x);
    if (e != 1)
      worst_log = std::max(worst_log, relative(amx::log16(amx::splat(e))[2], std::log(static_cast<double>(e))));
    worst_softplus = std::max(worst_softplus, relative(amx::softplus16(amx::splat(x))[2],
                                                       std::max(wide, 0.0) + std::log1p(std::exp(-std::fabs(wide)))));
    worst_sigmoid = std::max(worst_sigmoid, relative(amx::sigmoid16(amx::splat(x))[2], 1 / (1 + std::exp(-wide))));
  }
  for (float x = 0.98f; x < 1.02f; x += 1e-5f) {
    if (x != 1)
      worst_log = std::max(worst_log, relative(amx::log16(amx::splat(x))[2], std::log(static_cast<double>(x))));
  }
  EXPECT_LT(worst_log, 4e-7);
  EXPECT_LT(worst_softplus, 5e-7);
  EXPECT_LT(worst_sigmoid, 5e-7);
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(amx::log16(amx::splat(0.0f))[0], -infinity);
  EXPECT_EQ(amx::log16(amx::splat(infinity))[0], infinity);
  EXPECT_TRUE(std::isnan(amx::log16(amx::splat(-1.0f))[0]));
  EXPECT_TRUE(std::isnan(amx::log16(amx::splat(nan))[0]));
  EXPECT_TRUE(std::isnan(amx::softplus16(amx::splat(nan))[0]));
  EXPECT_TRUE(std::isnan(amx::sigmoid16(amx::splat(nan))[0]));
  EXPECT_EQ(amx::softplus16(amx::splat(infinity))[0], infinity);
  EXPECT_EQ(amx::sigmoid16(amx::splat(infinity))[0], 1.0f);
  EXPECT_EQ(amx::sigmoid16(amx::splat(-infinity))[0], 0.0f);
}

TEST(AmxVec, SplitAndRounding) {
  std::mt19937 rng(7);
  for (int i = 0; i < 2000; ++i) {
    const float x = std::ldexp(static_cast<float>(rng()) / 4294967296.0f + 1, static_cast<int>(rng() % 60) - 30) *
                    (rng() % 2 == 0 ? 1.0f : -1.0f);
    const cpu::amx::Split s = cpu::amx::split_bf16(cpu::amx::splat(x));
    const float sum = amx_cases::from_bf16(static_cast<uint16_t>(s.hi[0] >> 16)) +
                      amx_cases::from_bf16(static_cast<uint16_t>(s.lo[0] >> 16));
    EXPECT_NEAR(sum, x, std::fabs(x) * 0x1p-17f);
    uint16_t stored[16];
    cpu::amx::store_bf16x16(stored, cpu::amx::splat(x));
    EXPECT_EQ(stored[9], amx_cases::to_bf16(x));
  }
}

TEST(AmxTile, ProductMatchesDouble) {
  namespace amx = cpu::amx;
  alignas(64) uint16_t a[16][32], b[16][32];
  alignas(64) float c[16][16];
  std::mt19937 rng(11);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 32; ++j) {
      a[i][j] = amx_cases::to_bf16(normal(rng));
      b[i][j] = amx_cases::to_bf16(normal(rng));
    }
    for (int j = 0; j < 16; ++j) c[i][j] = normal(rng);
  }
  amx::tile_config();
  amx::tile_load<0>(c);
  amx::tile_load<4>(a);
  amx::tile_load<6>(b);
  amx::tile_dp<0, 4, 6>();
  alignas(64) float found[16][16];
  amx::tile_store<0>(found);
  amx::tile_release();
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      double expected = c[m][n];
      for (int k = 0; k < 32; ++k) {
        expected += static_cast<double>(amx_cases::from_bf16(a[m][k])) * amx_cases::from_bf16(b[k / 2][2 * n + k % 2]);
      }
      EXPECT_NEAR(found[m][n], expected, 1e-5);
    }
  }
}

}  // namespace
}  // namespace gdn
