// Prefill of two packed sequences in C++20, then what ran and why.
#include <gdn/gdn.hpp>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

int main() try {
  constexpr int64_t T = 300, Hk = 2, Hv = 4, K = 64, V = 64, N = 2;
  std::mt19937 rng(7);
  auto random = [&](int64_t n, float low, float high) {
    std::uniform_real_distribution<float> draw(low, high);
    std::vector<float> data(static_cast<size_t>(n));
    for (float& x : data) x = draw(rng);
    return data;
  };
  const auto q = random(T * Hk * K, -1, 1), k = random(T * Hk * K, -1, 1), v = random(T * Hv * V, -1, 1);
  const auto g = random(T * Hv, -0.1F, 0), beta = random(T * Hv, 0, 1);
  const std::vector<int32_t> lengths{0, 100, 300};  // cu_seqlens: sequences of 100 and 200 tokens
  std::vector<float> o(T * Hv * V, NAN), state(N * Hv * K * V, NAN);

  // clang-format off
  // README begin
  gdn::Tensor qt(q.data(), {1, T, Hk, K}), kt(k.data(), {1, T, Hk, K}), vt(v.data(), {1, T, Hv, V});
  gdn::Tensor gt(g.data(), {1, T, Hv}), bt(beta.data(), {1, T, Hv}), ot(o.data(), {1, T, Hv, V});
  gdn::Tensor cu(lengths.data(), {N + 1}), st(state.data(), {N, Hv, K, V});
  gdn::chunk_forward({.q = qt, .k = kt, .v = vt, .g = gt, .beta = bt, .o = ot, .qk_l2norm = true,
                      .cu_seqlens = cu, .final_state = st});
  // README end
  // clang-format on

  double sum = 0;
  for (float x : o) sum += std::abs(x);
  for (float x : state) sum += std::abs(x);
  std::printf("%s\n",
              gdn::explain(GDN_OP_CHUNK_FORWARD, {.q = qt, .k = kt, .v = vt, .g = gt, .beta = bt, .o = ot}).c_str());
  return std::isfinite(sum) && sum > 0 ? 0 : 1;
} catch (const gdn::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
