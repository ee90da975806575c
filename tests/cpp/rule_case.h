// SPDX-License-Identifier: MIT
// A small valid call of the delta rule that tests change one thing of, and what a refusal must look like.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gdn/gdn.h"

namespace gdn_test {

inline constexpr float kUntouched = 7777.0f;

inline gdn_tensor make_tensor(void* data, int32_t dtype, const std::vector<int64_t>& shape) {
  gdn_tensor t;
  gdn_tensor_init(&t, data, dtype, static_cast<int32_t>(shape.size()), shape.data());
  return t;
}

inline std::vector<float> random_floats(size_t n, uint32_t seed, float low = -1, float high = 1) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> draw(low, high);
  std::vector<float> x(n);
  for (float& value : x) value = draw(engine);
  return x;
}

struct Sizes {
  int64_t B = 2, T = 5, Hk = 2, Hv = 4, K = 6, V = 3;
  int64_t sequences = -1;  // -1: B
};

// fp32 everywhere; q, k, v, g, beta, o and both states are set, final_state apart from initial_state.
struct RuleCase {
  explicit RuleCase(Sizes s = {}, uint32_t seed = 1) : n(s) {
    if (n.sequences < 0) n.sequences = n.B;
    const auto size = [](std::initializer_list<int64_t> dims) {
      int64_t product = 1;
      for (const int64_t d : dims) product *= d;
      return static_cast<size_t>(product);
    };
    q = random_floats(size({n.B, n.T, n.Hk, n.K}), seed);
    k = random_floats(size({n.B, n.T, n.Hk, n.K}), seed + 1, -0.5f, 0.5f);
    v = random_floats(size({n.B, n.T, n.Hv, n.V}), seed + 2);
    g = random_floats(size({n.B, n.T, n.Hv}), seed + 3, -1, 0);
    beta = random_floats(size({n.B, n.T, n.Hv}), seed + 4, 0, 1);
    initial = random_floats(size({n.sequences, n.Hv, n.K, n.V}), seed + 5);
    o.assign(v.size(), kUntouched);
    final.assign(initial.size(), kUntouched);
    tq = make_tensor(q.data(), GDN_F32, {n.B, n.T, n.Hk, n.K});
    tk = make_tensor(k.data(), GDN_F32, {n.B, n.T, n.Hk, n.K});
    tv = make_tensor(v.data(), GDN_F32, {n.B, n.T, n.Hv, n.V});
    tg = make_tensor(g.data(), GDN_F32, {n.B, n.T, n.Hv});
    tbeta = make_tensor(beta.data(), GDN_F32, {n.B, n.T, n.Hv});
    to = make_tensor(o.data(), GDN_F32, {n.B, n.T, n.Hv, n.V});
    tinitial = make_tensor(initial.data(), GDN_F32, {n.sequences, n.Hv, n.K, n.V});
    tfinal = make_tensor(final.data(), GDN_F32, {n.sequences, n.Hv, n.K, n.V});
    args.q = &tq;
    args.k = &tk;
    args.v = &tv;
    args.g = &tg;
    args.beta = &tbeta;
    args.o = &to;
    args.initial_state = &tinitial;
    args.final_state = &tfinal;
  }
  RuleCase(const RuleCase&) = delete;
  RuleCase& operator=(const RuleCase&) = delete;

  // Keeps an index tensor alive beside the case.
  const gdn_tensor* indices(std::vector<int64_t> values, const std::vector<int64_t>& shape = {}) {
    index_data.push_back(std::move(values));
    std::vector<int64_t>& data = index_data.back();
    index_tensors.push_back(
        make_tensor(data.data(), GDN_I64, shape.empty() ? std::vector<int64_t>{int64_t(data.size())} : shape));
    return &index_tensors.back();
  }

  bool outputs_untouched() const {
    for (const float x : o) {
      if (x != kUntouched) return false;
    }
    for (const float x : final) {
      if (x != kUntouched) return false;
    }
    return true;
  }

  Sizes n;
  std::vector<float> q, k, v, g, beta, initial, o, final;
  gdn_tensor tq, tk, tv, tg, tbeta, to, tinitial, tfinal;
  std::vector<std::vector<int64_t>> index_data = reserved<std::vector<int64_t>>();
  std::vector<gdn_tensor> index_tensors = reserved<gdn_tensor>();
  gdn_rule_args args = GDN_INIT(gdn_rule_args);

 private:
  // Pointers into these are handed out.
  template <class T>
  static std::vector<T> reserved() {
    std::vector<T> x;
    x.reserve(16);
    return x;
  }
};

// The last call failed with `code`, and the message has "<function>: argument '<argument>': found <found>..., expected
// ...<expected>...".
inline void expect_message(gdn_status status, gdn_status code, const std::string& function, const std::string& argument,
                           const std::string& found, const std::string& expected) {
  EXPECT_EQ(status, code) << gdn_last_error();
  const std::string message = gdn_last_error();
  const std::string start = function + ": argument '" + argument + "': found ";
  EXPECT_EQ(message.rfind(start, 0), 0u) << message;
  const size_t comma = message.find(", expected ");
  ASSERT_NE(comma, std::string::npos) << message;
  EXPECT_NE(message.substr(0, comma).find(found, start.size()), std::string::npos)
      << message << "\nlacks in 'found': " << found;
  EXPECT_NE(message.substr(comma).find(expected), std::string::npos)
      << message << "\nlacks in 'expected': " << expected;
}

}  // namespace gdn_test
