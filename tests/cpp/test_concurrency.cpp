// SPDX-License-Identifier: MIT
// Calls from many threads at once: every one gets its own right answer, and its own error message.
#include <atomic>
#include <thread>

#include "rule_case.h"

namespace gdn_test {
namespace {

constexpr int kThreads = 8;
constexpr int kRounds = 40;

template <class F>
void on_all_threads(const F& body) {
  std::vector<std::thread> threads;
  std::atomic<int> ready{0};
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      ready.fetch_add(1);
      while (ready.load() < kThreads) std::this_thread::yield();
      body(i);
    });
  }
  for (std::thread& t : threads) t.join();
}

TEST(Concurrency, EightThreadsGetTheSerialAnswers) {
  struct Answer {
    std::vector<float> o, final;
  };
  const auto make_case = [](int i) {
    Sizes s;
    s.B = 1 + i % 3;
    s.T = 3 + 17 * i;
    s.K = 8 + i;
    return s;
  };
  std::vector<Answer> serial(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    RuleCase c(make_case(i), uint32_t(100 + i));
    ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
    serial[size_t(i)] = {c.o, c.final};
  }
  std::atomic<int> wrong{0};
  on_all_threads([&](int i) {
    RuleCase c(make_case(i), uint32_t(100 + i));
    for (int r = 0; r < kRounds; ++r) {
      std::fill(c.o.begin(), c.o.end(), kUntouched);
      std::fill(c.final.begin(), c.final.end(), kUntouched);
      if (gdn_chunk_forward(&c.args) != GDN_OK || c.o != serial[size_t(i)].o || c.final != serial[size_t(i)].final) {
        wrong.fetch_add(1);
      }
    }
  });
  EXPECT_EQ(wrong.load(), 0);
}

TEST(Concurrency, ErrorMessagesAreThreadLocal) {
  std::atomic<int> wrong{0};
  on_all_threads([&](int i) {
    RuleCase c;
    c.args.gate_form = 100 + i;
    for (int r = 0; r < kRounds; ++r) {
      if (gdn_recurrent(&c.args) != GDN_INVALID_ARGUMENT) wrong.fetch_add(1);
      if (std::string(gdn_last_error()).find("found " + std::to_string(100 + i) + ",") == std::string::npos) {
        wrong.fetch_add(1);
      }
    }
  });
  EXPECT_EQ(wrong.load(), 0);
}

TEST(Concurrency, ResultsDoNotDependOnTheThreadCount) {
  Sizes s;
  s.T = 150;
  s.K = 32;
  s.V = 40;
  RuleCase c(s);
  c.args.num_threads = 1;
  ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK) << gdn_last_error();
  const std::vector<float> o = c.o, final = c.final;
  for (const int32_t threads : {2, 3, 16}) {
    c.args.num_threads = threads;
    for (int r = 0; r < 5; ++r) {
      std::fill(c.o.begin(), c.o.end(), kUntouched);
      ASSERT_EQ(gdn_chunk_forward(&c.args), GDN_OK);
      EXPECT_EQ(c.o, o) << threads;
      EXPECT_EQ(c.final, final) << threads;
    }
  }
}

}  // namespace
}  // namespace gdn_test
