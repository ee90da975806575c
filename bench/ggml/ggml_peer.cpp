// SPDX-License-Identifier: MIT
// ggml_gated_delta_net behind four C functions for ctypes: a graph is built once over the caller's memory and then only
// computed, with a persistent thread pool, as llama.cpp does.
#include <ggml-cpu.h>
#include <ggml.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct Peer {
  ggml_context* context = nullptr;
  ggml_cgraph* graph = nullptr;
  ggml_threadpool* pool = nullptr;
  ggml_cplan plan = {};
  std::vector<uint8_t> work;
};

ggml_tensor* view(ggml_context* context, void* data, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
  ggml_tensor* tensor = ggml_new_tensor_4d(context, GGML_TYPE_F32, n0, n1, n2, n3);
  tensor->data = data;
  return tensor;
}

}  // namespace

#define PEER_API extern "C" __attribute__((visibility("default")))

// One operation per layer, all in one graph. q, k [N, T, Hk, D]; v [N, T, Hv, D]; g, beta [N, T, Hv]; states[layer]
// [N, Hv, D(v), D(k)]; outs[layer] holds o [N, T, Hv, D] and then the new state. fp32, tiled head map, scale D^-0.5.
PEER_API void* ggml_peer_new(int32_t num_threads, int64_t n, int64_t t, int64_t hk, int64_t hv, int64_t d, void* q,
                             void* k, void* v, void* g, void* beta, void** states, void** outs, int32_t layers) {
  Peer* peer = new Peer;
  const size_t nodes = static_cast<size_t>(layers) * 8 + 64;
  peer->context = ggml_init({nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(nodes, false), nullptr, true});
  peer->graph = ggml_new_graph_custom(peer->context, nodes, false);
  ggml_tensor* tq = view(peer->context, q, d, hk, t, n);
  ggml_tensor* tk = view(peer->context, k, d, hk, t, n);
  ggml_tensor* tv = view(peer->context, v, d, hv, t, n);
  ggml_tensor* tg = view(peer->context, g, 1, hv, t, n);
  ggml_tensor* tb = view(peer->context, beta, 1, hv, t, n);
  for (int32_t layer = 0; layer < layers; ++layer) {
    ggml_tensor* state = view(peer->context, states[layer], d, d, hv, n);
    ggml_tensor* out = ggml_gated_delta_net(peer->context, tq, tk, tv, tg, tb, state, 1);
    out->data = outs[layer];
    ggml_build_forward_expand(peer->graph, out);
  }
  ggml_threadpool_params params = ggml_threadpool_params_default(num_threads);
  peer->pool = ggml_threadpool_new(&params);
  peer->plan = ggml_graph_plan(peer->graph, num_threads, peer->pool);
  peer->work.resize(peer->plan.work_size);
  peer->plan.work_data = peer->work.data();
  return peer;
}

// 0 on success.
PEER_API int32_t ggml_peer_run(void* handle) {
  Peer* peer = static_cast<Peer*>(handle);
  return ggml_graph_compute(peer->graph, &peer->plan) == GGML_STATUS_SUCCESS ? 0 : 1;
}

// Puts the pool's threads to sleep, so that they take no time from what is measured next; the next run wakes them.
PEER_API void ggml_peer_pause(void* handle) { ggml_threadpool_pause(static_cast<Peer*>(handle)->pool); }
PEER_API void ggml_peer_resume(void* handle) { ggml_threadpool_resume(static_cast<Peer*>(handle)->pool); }

PEER_API void ggml_peer_free(void* handle) {
  Peer* peer = static_cast<Peer*>(handle);
  ggml_threadpool_free(peer->pool);
  ggml_free(peer->context);
  delete peer;
}
