// SPDX-License-Identifier: MIT
//
// libgdn for C++20: a thin, header-only layer over the C ABI (gdn.h has the meaning of every field). Tensors are views,
// errors are exceptions, and absent arguments are simply left out:
//
//   gdn::Tensor q(q_data, {1, T, Hk, K}), k(k_data, {1, T, Hk, K}), v(v_data, {1, T, Hv, V});
//   gdn::Tensor g(g_data, {1, T, Hv}), beta(beta_data, {1, T, Hv});
//   gdn::Tensor o(o_data, {1, T, Hv, V}), state(state_data, {1, Hv, K, V});
//   gdn::chunk_forward({.q = q, .k = k, .v = v, .g = g, .beta = beta, .o = o, .final_state = state});
//
// Nothing here owns tensor memory, and nothing is copied. Calls are thread-safe.
#ifndef GDN_GDN_HPP_
#define GDN_GDN_HPP_

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "gdn/gdn.h"

namespace gdn {

// A failed call: what() is gdn_last_error's message, which names function, argument, found and expected.
class Error : public std::runtime_error {
 public:
  Error(gdn_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  gdn_status status() const noexcept { return status_; }

 private:
  gdn_status status_;
};

inline void check(gdn_status status) {
  if (status == GDN_OK) return;
  const std::string message = gdn_last_error();
  throw Error(status, message.empty() ? gdn_status_string(status) : message);
}

// GDN_* dtype of an arithmetic type. 16-bit floats have no standard type in C++20: name their dtype, or specialise this
// for the type you use:  template <> inline constexpr int32_t gdn::kDtype<my::bfloat16> = GDN_BF16;
template <class T>
inline constexpr int32_t kDtype = 0;
template <>
inline constexpr int32_t kDtype<float> = GDN_F32;
template <>
inline constexpr int32_t kDtype<double> = GDN_F64;
template <>
inline constexpr int32_t kDtype<int32_t> = GDN_I32;
template <>
inline constexpr int32_t kDtype<int64_t> = GDN_I64;
template <>
inline constexpr int32_t kDtype<uint8_t> = GDN_U8;
template <>
inline constexpr int32_t kDtype<bool> = GDN_U8;

// A view of memory that someone else owns; contiguous unless strides (in elements) are given. Inputs may be const: the
// library writes only to the arguments documented as OUTPUT.
class Tensor {
 public:
  template <class T>
  requires(kDtype<std::remove_cv_t<T>> != 0)
      Tensor(T* data, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides = {})
      : Tensor(data, kDtype<std::remove_cv_t<T>>, to_span(shape), to_span(strides)) {}

  Tensor(const void* data, int32_t dtype, std::initializer_list<int64_t> shape,
         std::initializer_list<int64_t> strides = {})
      : Tensor(data, dtype, to_span(shape), to_span(strides)) {}

  Tensor(const void* data, int32_t dtype, std::span<const int64_t> shape, std::span<const int64_t> strides = {}) {
    if (shape.size() > GDN_MAX_DIMS || (!strides.empty() && strides.size() != shape.size())) {
      throw Error(GDN_INVALID_ARGUMENT, "Tensor: found " + std::to_string(shape.size()) + " sizes and " +
                                            std::to_string(strides.size()) + " strides, expected at most " +
                                            std::to_string(GDN_MAX_DIMS) + " sizes and as many strides, or none");
    }
    gdn_tensor_init(&tensor_, const_cast<void*>(data), dtype, static_cast<int32_t>(shape.size()), shape.data());
    for (size_t i = 0; i < strides.size(); ++i) tensor_.strides[i] = strides[i];
  }

  // The same view, of memory on a CUDA device.
  Tensor on_cuda(int32_t device_id = 0) const {
    Tensor t = *this;
    t.tensor_.device_type = GDN_CUDA;
    t.tensor_.device_id = device_id;
    return t;
  }

  const gdn_tensor* get() const noexcept { return &tensor_; }
  gdn_tensor* get() noexcept { return &tensor_; }

 private:
  static std::span<const int64_t> to_span(std::initializer_list<int64_t> list) { return {list.begin(), list.size()}; }

  gdn_tensor tensor_;
};

// What an argument struct holds: a pointer to a Tensor or gdn_tensor that outlives the call, or nothing.
class TensorRef {
 public:
  TensorRef() = default;
  TensorRef(std::nullptr_t) {}                                // NOLINT(google-explicit-constructor)
  TensorRef(const Tensor& tensor) : tensor_(tensor.get()) {}  // NOLINT(google-explicit-constructor)
  TensorRef(const Tensor* tensor) : tensor_(tensor != nullptr ? tensor->get() : nullptr) {}  // NOLINT
  TensorRef(const gdn_tensor* tensor) : tensor_(tensor) {}  // NOLINT(google-explicit-constructor)
  const gdn_tensor* get() const noexcept { return tensor_; }

 private:
  const gdn_tensor* tensor_ = nullptr;
};

// Fields in the order and with the meaning of gdn_rule_args.
struct RuleArgs {
  TensorRef q = {}, k = {}, v = {}, g = {}, beta = {}, A_log = {}, dt_bias = {};
  TensorRef o = {};
  int32_t gate_form = GDN_GATE_LOG;
  int32_t beta_form = GDN_BETA_VALUE;
  int32_t head_map = GDN_HEADS_GROUPED;
  bool qk_l2norm = false;
  float l2norm_eps = 0;
  float scale = 0;
  TensorRef cu_seqlens = {};
  int32_t state_layout = GDN_STATE_K_FIRST;
  int32_t null_slots = GDN_NULL_NEGATIVE;
  TensorRef initial_state = {}, initial_state_indices = {}, has_initial_state = {};
  TensorRef final_state = {}, final_state_indices = {};
  TensorRef token_state_indices = {}, num_accepted = {}, snapshots = {};
  TensorRef checkpoints = {}, checkpoint_indices = {};
  int64_t checkpoint_every = 0;
  int32_t num_threads = 0;
  bool batch_invariant = false;
  const char* impl = nullptr;
  bool round_qk = false, round_beta = false;
  void* stream = nullptr;  // cudaStream_t of CUDA tensors
  int64_t max_seqlen = 0;
  bool zero_tail = false;
  int32_t split = GDN_SPLIT_AUTO;
  int64_t split_tokens = 0;
  bool split_exact = false;
  float split_threshold = 0;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;

  // The C struct; valid while the tensors are.
  gdn_rule_args c_args() const noexcept {
    gdn_rule_args a{};
    a.struct_size = sizeof(a);
    a.q = q.get();
    a.k = k.get();
    a.v = v.get();
    a.g = g.get();
    a.beta = beta.get();
    a.A_log = A_log.get();
    a.dt_bias = dt_bias.get();
    a.o = o.get();
    a.gate_form = gate_form;
    a.beta_form = beta_form;
    a.head_map = head_map;
    a.qk_l2norm = qk_l2norm;
    a.l2norm_eps = l2norm_eps;
    a.scale = scale;
    a.cu_seqlens = cu_seqlens.get();
    a.state_layout = state_layout;
    a.null_slots = null_slots;
    a.initial_state = initial_state.get();
    a.initial_state_indices = initial_state_indices.get();
    a.has_initial_state = has_initial_state.get();
    a.final_state = final_state.get();
    a.final_state_indices = final_state_indices.get();
    a.token_state_indices = token_state_indices.get();
    a.num_accepted = num_accepted.get();
    a.snapshots = snapshots.get();
    a.checkpoints = checkpoints.get();
    a.checkpoint_indices = checkpoint_indices.get();
    a.checkpoint_every = checkpoint_every;
    a.num_threads = num_threads;
    a.batch_invariant = batch_invariant;
    a.impl = impl;
    a.round_qk = round_qk;
    a.round_beta = round_beta;
    a.stream = stream;
    a.max_seqlen = max_seqlen;
    a.zero_tail = zero_tail;
    a.split = split;
    a.split_tokens = split_tokens;
    a.split_exact = split_exact;
    a.split_threshold = split_threshold;
    a.workspace = workspace;
    a.workspace_bytes = workspace_bytes;
    return a;
  }
};

// Prefill: whole sequences, chunk by chunk.
inline void chunk_forward(const RuleArgs& args) {
  const gdn_rule_args a = args.c_args();
  check(gdn_chunk_forward(&a));
}

// Bytes of `workspace` that chunk_forward uses for these arguments.
inline int64_t chunk_forward_workspace(const RuleArgs& args) {
  const gdn_rule_args a = args.c_args();
  int64_t bytes = 0;
  check(gdn_chunk_forward_workspace(&a, &bytes));
  return bytes;
}

// Decode and multi-token verify: token by token.
inline void recurrent(const RuleArgs& args) {
  const gdn_rule_args a = args.c_args();
  check(gdn_recurrent(&a));
}

struct Conv1dArgs {
  TensorRef x = {}, weight = {}, bias = {};
  TensorRef y = {};
  TensorRef cu_seqlens = {};
  TensorRef initial_state = {}, initial_state_indices = {}, has_initial_state = {};
  TensorRef final_state = {}, final_state_indices = {};
  TensorRef num_accepted = {};
  int32_t activation = GDN_ACT_NONE;
  int32_t null_slots = GDN_NULL_NEGATIVE;
  int32_t num_threads = 0;
  void* stream = nullptr;
};

// Causal depthwise convolution: prefill and update.
inline void causal_conv1d(const Conv1dArgs& args) {
  gdn_conv1d_args a{};
  a.struct_size = sizeof(a);
  a.x = args.x.get();
  a.weight = args.weight.get();
  a.bias = args.bias.get();
  a.y = args.y.get();
  a.cu_seqlens = args.cu_seqlens.get();
  a.initial_state = args.initial_state.get();
  a.initial_state_indices = args.initial_state_indices.get();
  a.has_initial_state = args.has_initial_state.get();
  a.final_state = args.final_state.get();
  a.final_state_indices = args.final_state_indices.get();
  a.num_accepted = args.num_accepted.get();
  a.activation = args.activation;
  a.null_slots = args.null_slots;
  a.num_threads = args.num_threads;
  a.stream = args.stream;
  check(gdn_causal_conv1d(&a));
}

struct GateArgs {
  TensorRef a = {}, b = {}, A_log = {}, dt_bias = {};
  TensorRef g = {}, beta = {};
  int32_t gate_form = GDN_GATE_LOG;
  int32_t beta_form = GDN_BETA_SIGMOID;
  int32_t num_threads = 0;
  void* stream = nullptr;
};

// g and beta from the raw projections a and b.
inline void gate(const GateArgs& args) {
  gdn_gate_args a{};
  a.struct_size = sizeof(a);
  a.a = args.a.get();
  a.b = args.b.get();
  a.A_log = args.A_log.get();
  a.dt_bias = args.dt_bias.get();
  a.g = args.g.get();
  a.beta = args.beta.get();
  a.gate_form = args.gate_form;
  a.beta_form = args.beta_form;
  a.num_threads = args.num_threads;
  a.stream = args.stream;
  check(gdn_gate(&a));
}

struct RmsnormGatedArgs {
  TensorRef x = {}, z = {}, weight = {};
  TensorRef out = {};
  float eps = 0;
  int32_t activation = GDN_ACT_NONE;
  bool gate_first = false, zero_centered = false, round_before_weight = false;
  int32_t num_threads = 0;
  void* stream = nullptr;
  TensorRef residual = {}, residual_out = {};
};

// RMSNorm with an optional gate, of x + residual where there is one.
inline void rmsnorm_gated(const RmsnormGatedArgs& args) {
  gdn_rmsnorm_gated_args a{};
  a.struct_size = sizeof(a);
  a.x = args.x.get();
  a.z = args.z.get();
  a.weight = args.weight.get();
  a.out = args.out.get();
  a.eps = args.eps;
  a.activation = args.activation;
  a.gate_first = args.gate_first;
  a.zero_centered = args.zero_centered;
  a.round_before_weight = args.round_before_weight;
  a.num_threads = args.num_threads;
  a.stream = args.stream;
  a.residual = args.residual.get();
  a.residual_out = args.residual_out.get();
  check(gdn_rmsnorm_gated(&a));
}

struct GluArgs {
  TensorRef x = {}, z = {};
  TensorRef out = {};
  int32_t activation = GDN_ACT_SILU;
  int32_t num_threads = 0;
  void* stream = nullptr;
};

// out = x * act(z): SwiGLU, and an attention layer's output gate.
inline void glu(const GluArgs& args) {
  gdn_glu_args a{};
  a.struct_size = sizeof(a);
  a.x = args.x.get();
  a.z = args.z.get();
  a.out = args.out.get();
  a.activation = args.activation;
  a.num_threads = args.num_threads;
  a.stream = args.stream;
  check(gdn_glu(&a));
}

struct QkRmsnormRopeArgs {
  TensorRef q = {}, k = {}, q_weight = {}, k_weight = {}, cos = {}, sin = {}, positions = {};
  TensorRef q_out = {}, k_out = {}, gate_out = {};
  float eps = 0;
  float theta = 0;
  int32_t rotary_dim = 0;
  int32_t mrope_section[3] = {0, 0, 0};
  bool q_has_gate = false, zero_centered = false;
  int32_t num_threads = 0;
  void* stream = nullptr;
};

// Split, RMSNorm and rotary embedding of an attention layer's q and k.
inline void qk_rmsnorm_rope(const QkRmsnormRopeArgs& args) {
  gdn_qk_rmsnorm_rope_args a{};
  a.struct_size = sizeof(a);
  a.q = args.q.get();
  a.k = args.k.get();
  a.q_weight = args.q_weight.get();
  a.k_weight = args.k_weight.get();
  a.cos = args.cos.get();
  a.sin = args.sin.get();
  a.positions = args.positions.get();
  a.q_out = args.q_out.get();
  a.k_out = args.k_out.get();
  a.gate_out = args.gate_out.get();
  a.eps = args.eps;
  a.theta = args.theta;
  a.rotary_dim = args.rotary_dim;
  for (int i = 0; i < 3; ++i) a.mrope_section[i] = args.mrope_section[i];
  a.q_has_gate = args.q_has_gate;
  a.zero_centered = args.zero_centered;
  a.num_threads = args.num_threads;
  a.stream = args.stream;
  check(gdn_qk_rmsnorm_rope(&a));
}

// JSON: what would run for `args`, and why not something else. Data pointers may be null.
inline std::string explain(int32_t op, const RuleArgs& args) {
  const gdn_rule_args a = args.c_args();
  size_t needed = 0;
  check(gdn_explain(op, &a, nullptr, 0, &needed));
  std::string json(needed, '\0');
  check(gdn_explain(op, &a, json.data(), json.size(), &needed));
  json.resize(needed - 1);
  return json;
}

// JSON: version, build, CPU, ISAs, threads.
inline std::string info() {
  size_t needed = 0;
  check(gdn_info(nullptr, 0, &needed));
  std::string json(needed, '\0');
  check(gdn_info(json.data(), json.size(), &needed));
  json.resize(needed - 1);
  return json;
}

inline std::string version() { return gdn_version(); }
inline void set_num_threads(int32_t n) { check(gdn_set_num_threads(n)); }
inline int32_t get_num_threads() { return gdn_get_num_threads(); }
inline void set_isa(const std::string& name) { check(gdn_set_isa(name.c_str())); }
inline std::string get_isa() { return gdn_get_isa(); }
inline void release_memory() { check(gdn_release_memory()); }

}  // namespace gdn
#endif  // GDN_GDN_HPP_
