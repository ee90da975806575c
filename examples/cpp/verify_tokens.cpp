// Speculative decoding in C++20: four draft tokens are verified in one call that leaves the pool untouched and gives
// the state after each of them; the engine keeps the snapshot of the last accepted token. Same result as serial decode.
#include <gdn/gdn.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

int main() try {
  constexpr int64_t T = 4, Hk = 1, Hv = 2, K = 64, V = 64, accepted = 3, state_size = Hv * K * V;
  std::mt19937 rng(7);
  auto random = [&](int64_t n, float low, float high) {
    std::uniform_real_distribution<float> draw(low, high);
    std::vector<float> data(static_cast<size_t>(n));
    for (float& x : data) x = draw(rng);
    return data;
  };
  auto q = random(T * Hk * K, -1, 1), k = random(T * Hk * K, -1, 1), v = random(T * Hv * V, -1, 1);
  auto g = random(T * Hv, -0.1F, 0), beta = random(T * Hv, 0, 1), start = random(state_size, -1, 1);
  std::vector<float> o(T * Hv * V), snapshots(T * state_size);

  gdn::Tensor initial(start.data(), {1, Hv, K, V}), all(snapshots.data(), {1, T, Hv, K, V});
  gdn::recurrent({.q = gdn::Tensor(q.data(), {1, T, Hk, K}),
                  .k = gdn::Tensor(k.data(), {1, T, Hk, K}),
                  .v = gdn::Tensor(v.data(), {1, T, Hv, V}),
                  .g = gdn::Tensor(g.data(), {1, T, Hv}),
                  .beta = gdn::Tensor(beta.data(), {1, T, Hv}),
                  .o = gdn::Tensor(o.data(), {1, T, Hv, V}),
                  .qk_l2norm = true,
                  .initial_state = initial,
                  .snapshots = all});

  // The same tokens one by one, the state updated in place.
  std::vector<float> serial = start, o_serial(Hv * V);
  float worst = 0;
  for (int64_t t = 0; t < accepted; ++t) {
    gdn::Tensor state(serial.data(), {1, Hv, K, V});
    gdn::recurrent({.q = gdn::Tensor(q.data() + t * Hk * K, {1, 1, Hk, K}),
                    .k = gdn::Tensor(k.data() + t * Hk * K, {1, 1, Hk, K}),
                    .v = gdn::Tensor(v.data() + t * Hv * V, {1, 1, Hv, V}),
                    .g = gdn::Tensor(g.data() + t * Hv, {1, 1, Hv}),
                    .beta = gdn::Tensor(beta.data() + t * Hv, {1, 1, Hv}),
                    .o = gdn::Tensor(o_serial.data(), {1, 1, Hv, V}),
                    .qk_l2norm = true,
                    .initial_state = state,
                    .final_state = state});
  }
  for (int64_t i = 0; i < state_size; ++i) {
    worst = std::max(worst, std::abs(serial[i] - snapshots[(accepted - 1) * state_size + i]));
  }
  std::printf("largest difference to serial decode after %d accepted tokens: %g\n", static_cast<int>(accepted), worst);
  return worst < 1e-5F ? 0 : 1;
} catch (const gdn::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
