// One token, one head, by hand: S = beta * k v^T, o = scale * S^T q.
#include <gdn/gdn.hpp>

#include <cmath>
#include <cstdio>

int main() try {
  const float q[2] = {0.5F, 2}, k[2] = {1, -1}, v[3] = {1, 2, 3}, beta[1] = {0.5F};
  float o[3] = {}, state[6] = {};
  gdn::Tensor qt(q, {1, 1, 1, 2}), kt(k, {1, 1, 1, 2}), vt(v, {1, 1, 1, 3}), bt(beta, {1, 1, 1});
  gdn::Tensor ot(o, {1, 1, 1, 3}), st(state, {1, 1, 2, 3});
  gdn::chunk_forward({.q = qt, .k = kt, .v = vt, .beta = bt, .o = ot, .scale = 1, .final_state = st});
  for (int j = 0; j < 3; ++j) {
    const float expected = 0.5F * v[j] * (k[0] * q[0] + k[1] * q[1]);
    if (std::abs(o[j] - expected) > 1e-6F || std::abs(state[j] - 0.5F * v[j]) > 1e-6F) return 1;
  }
  std::printf("libgdn %s on %s: o = [%g, %g, %g]\n", gdn::version().c_str(), gdn::get_isa().c_str(), o[0], o[1], o[2]);
  return 0;
} catch (const gdn::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
