// SPDX-License-Identifier: MIT
// torch.ops.gdn.*: the C ABI as PyTorch operators, through the stable ABI only (one binary for every Python and for
// torch 2.11 and later). Functional operators allocate their results; those ending in '_' update a state or pool in
// place, so that a decode step copies no state. Fake kernels are in gdn/_fake.py, the functions people call in
// gdn/torch.py.
#include "stable_args.h"

namespace gdn_torch {
namespace {

#define GDN_RULE_INPUTS \
  "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens"
// The dispatcher's cost grows with the number of arguments, so the enums and switches travel in one integer: bits 0-1
// gate_form, 2-3 beta_form, 4 head_map, 5 state_layout, 6 null_slots, 7 qk_l2norm, 8 batch_invariant, 9 round_qk,
// 10 round_beta, 11 split off, 12 split_exact (gdn/torch.py packs it).
#define GDN_RULE_OPTIONS "float scale, float l2norm_eps, int flags, str? impl"
#define GDN_CHUNK_OPTIONS ", int max_seqlen=0, int split_tokens=0, float split_threshold=0."

// The inputs that every form of the rule starts with.
struct RuleInputs {
  explicit RuleInputs(ArgReader* r)
      : q("q", r->tensor()),
        k("k", r->tensor()),
        v("v", r->tensor()),
        g("g", r->optional_tensor()),
        beta("beta", r->optional_tensor()),
        A_log("A_log", r->optional_tensor()),
        dt_bias("dt_bias", r->optional_tensor()),
        cu_seqlens("cu_seqlens", r->optional_tensor()) {}
  TensorArg q, k, v, g, beta, A_log, dt_bias, cu_seqlens;
};

struct RuleOptions {
  explicit RuleOptions(ArgReader* r) {
    args.scale = static_cast<float>(r->real());
    args.l2norm_eps = static_cast<float>(r->real());
    const int32_t flags = r->integer32();
    args.gate_form = flags & 3;
    args.beta_form = (flags >> 2) & 3;
    args.head_map = (flags >> 4) & 1;
    args.state_layout = (flags >> 5) & 1;
    args.null_slots = (flags >> 6) & 1;
    args.qk_l2norm = (flags >> 7) & 1;
    args.batch_invariant = (flags >> 8) & 1;
    args.round_qk = (flags >> 9) & 1;
    args.round_beta = (flags >> 10) & 1;
    args.split = (flags >> 11) & 1 ? GDN_SPLIT_OFF : GDN_SPLIT_AUTO;
    args.split_exact = (flags >> 12) & 1;
    impl = r->optional_string();
    if (impl) args.impl = impl->c_str();
  }
  void read_chunk_options(ArgReader* r) {
    args.max_seqlen = r->integer();
    args.split_tokens = r->integer();
    args.split_threshold = static_cast<float>(r->real());
  }
  RuleOptions(const RuleOptions&) = delete;
  RuleOptions& operator=(const RuleOptions&) = delete;
  gdn_rule_args args = GDN_INIT(gdn_rule_args);
  std::optional<std::string> impl;
};

void bind_inputs(const char* op, RuleInputs* in, gdn_rule_args* a) {
  a->q = in->q.read(op);
  a->k = in->k.read(op);
  a->v = in->v.read(op);
  a->g = in->g.read(op);
  a->beta = in->beta.read(op);
  a->A_log = in->A_log.read(op);
  a->dt_bias = in->dt_bias.read(op);
  a->cu_seqlens = in->cu_seqlens.read(op);
  a->stream = current_stream(*a->q);
  a->zero_tail = 1;  // a caller who gets a new tensor finds zeros past cu_seqlens[N]
}

// Outputs are allocated before libgdn validates, so shapes that have no meaning must not reach the allocation.
void need_rank(const char* op, const char* name, const gdn_tensor& t, int32_t rank, const char* expected) {
  if (t.ndim == rank) return;
  throw std::invalid_argument(std::string(op) + ": argument '" + name + "': found " + std::to_string(t.ndim) +
                              " dimensions, expected " + expected);
}

AtenTensorHandle new_output(const char* op, const gdn_rule_args& a) {
  need_rank(op, "q", *a.q, 4, "[B, T, Hk, K]");
  need_rank(op, "v", *a.v, 4, "[B, T, Hv, V]");
  return new_tensor(*a.v, 4, a.v->shape, nullptr, a.v->dtype);
}

AtenTensorHandle new_final_state(const gdn_rule_args& a, bool wanted) {
  if (!wanted) {
    const int64_t none[1] = {0};
    return new_tensor(*a.v, 1, none, nullptr, GDN_F32);
  }
  const bool packed = a.cu_seqlens != nullptr && a.cu_seqlens->ndim == 1 && a.cu_seqlens->shape[0] > 0;
  const int64_t n = packed ? a.cu_seqlens->shape[0] - 1 : a.q->shape[0];
  const int64_t k = a.q->shape[3], v = a.v->shape[3];
  const bool v_first = a.state_layout == GDN_STATE_V_FIRST;
  const int64_t shape[4] = {n, a.v->shape[2], v_first ? v : k, v_first ? k : v};
  // Null sequences (indices) have no final state: zeros.
  return new_tensor(*a.v, 4, shape, nullptr, a.v->dtype == GDN_F64 ? GDN_F64 : GDN_F32,
                    a.initial_state_indices != nullptr);
}

// Scratch of a CUDA call comes from PyTorch's allocator: what libgdn's own pool took, PyTorch could not use again. None
// for a sequence that has no room for two segments, and where the arguments are refused: the call says why.
AtenTensorHandle new_workspace(const gdn_rule_args& a) {
  int64_t bytes = 0;
  if (a.q->device_type != GDN_CUDA || a.q->shape[1] < 128) return nullptr;
  if (gdn_chunk_forward_workspace(&a, &bytes) != GDN_OK || bytes == 0) return nullptr;
  const int64_t floats = (bytes + 3) / 4;
  return new_tensor(*a.q, 1, &floats, nullptr, GDN_F32);
}

void bind_workspace(const char* op, TensorArg* workspace, gdn_rule_args* a) {
  const gdn_tensor* t = workspace->write(op);
  if (t == nullptr) return;
  a->workspace = t->data;
  a->workspace_bytes = t->shape[0] * 4;
}

template <gdn_status (*kRun)(const gdn_rule_args*), bool kChunk>
void rule_functional(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = kChunk ? "chunk_forward" : "recurrent";
  ArgReader r(stack);
  RuleInputs in(&r);
  TensorArg initial("initial_state", r.optional_tensor());
  TensorArg indices("initial_state_indices", r.optional_tensor());
  TensorArg has_initial("has_initial_state", r.optional_tensor());
  const bool want_state = r.boolean();
  RuleOptions options(&r);

  gdn_rule_args& a = options.args;
  if constexpr (kChunk) options.read_chunk_options(&r);
  bind_inputs(op, &in, &a);
  a.initial_state = initial.read(op);
  a.initial_state_indices = indices.read(op);
  a.has_initial_state = has_initial.read(op);
  TensorArg o("o", new_output(op, a));
  TensorArg final_state("final_state", new_final_state(a, want_state));
  a.o = o.write(op);
  if (want_state) a.final_state = final_state.write(op);
  TensorArg workspace("workspace", kChunk ? new_workspace(a) : nullptr);
  bind_workspace(op, &workspace, &a);
  check(kRun(&a));
  stack[0] = o.release();
  stack[1] = final_state.release();
}

void chunk_forward_inplace(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "chunk_forward";
  ArgReader r(stack);
  RuleInputs in(&r);
  TensorArg state("initial_state", r.tensor());
  TensorArg indices("initial_state_indices", r.optional_tensor());
  TensorArg final_indices("final_state_indices", r.optional_tensor());
  TensorArg has_initial("has_initial_state", r.optional_tensor());
  TensorArg checkpoints("checkpoints", r.optional_tensor());
  TensorArg checkpoint_indices("checkpoint_indices", r.optional_tensor());
  const int64_t checkpoint_every = r.integer();
  RuleOptions options(&r);

  gdn_rule_args& a = options.args;
  options.read_chunk_options(&r);
  bind_inputs(op, &in, &a);
  a.initial_state = a.final_state = state.write(op);
  a.initial_state_indices = indices.read(op);
  a.final_state_indices = final_indices.read(op);
  a.has_initial_state = has_initial.read(op);
  a.checkpoints = checkpoints.write(op);
  a.checkpoint_indices = checkpoint_indices.read(op);
  a.checkpoint_every = checkpoint_every;
  TensorArg o("o", new_output(op, a));
  a.o = o.write(op);
  TensorArg workspace("workspace", new_workspace(a));
  bind_workspace(op, &workspace, &a);
  check(gdn_chunk_forward(&a));
  stack[0] = o.release();
}

void recurrent_inplace(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "recurrent";
  ArgReader r(stack);
  RuleInputs in(&r);
  TensorArg state("initial_state", r.tensor());
  TensorArg indices("initial_state_indices", r.optional_tensor());
  TensorArg final_indices("final_state_indices", r.optional_tensor());
  TensorArg has_initial("has_initial_state", r.optional_tensor());
  TensorArg token_indices("token_state_indices", r.optional_tensor());
  TensorArg num_accepted("num_accepted", r.optional_tensor());
  TensorArg snapshots("snapshots", r.optional_tensor());
  const bool commit = r.boolean();
  RuleOptions options(&r);

  gdn_rule_args& a = options.args;
  bind_inputs(op, &in, &a);
  a.initial_state = state.write(op);
  if (commit) a.final_state = a.initial_state;
  a.initial_state_indices = indices.read(op);
  a.final_state_indices = final_indices.read(op);
  a.has_initial_state = has_initial.read(op);
  a.token_state_indices = token_indices.read(op);
  a.num_accepted = num_accepted.read(op);
  a.snapshots = snapshots.write(op);
  TensorArg o("o", new_output(op, a));
  a.o = o.write(op);
  check(gdn_recurrent(&a));
  stack[0] = o.release();
}

// ---- convolution

// y gets x's order of dimensions: token-major stays token-major, so that a split into heads needs no copy.
AtenTensorHandle new_conv_output(const char* op, const gdn_tensor& x, bool packed) {
  need_rank(op, "x", x, 3, "[B, D, T]");
  const int64_t d = x.shape[1], t = x.shape[2];
  const bool token_major = x.strides[1] < x.strides[2];
  const int64_t strides[3] = {d * t, token_major ? 1 : t, token_major ? d : 1};
  return new_tensor(x, 3, x.shape, strides, x.dtype, packed);
}

void conv1d_functional(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "causal_conv1d";
  ArgReader r(stack);
  TensorArg x("x", r.tensor()), weight("weight", r.tensor()), bias("bias", r.optional_tensor());
  TensorArg cu_seqlens("cu_seqlens", r.optional_tensor());
  TensorArg initial("initial_state", r.optional_tensor());
  TensorArg indices("initial_state_indices", r.optional_tensor());
  TensorArg has_initial("has_initial_state", r.optional_tensor());
  const int64_t state_len = r.integer();
  gdn_conv1d_args a = GDN_INIT(gdn_conv1d_args);
  a.activation = r.integer32();
  a.null_slots = r.integer32();

  a.x = x.read(op);
  a.stream = current_stream(*a.x);
  a.weight = weight.read(op);
  a.bias = bias.read(op);
  a.cu_seqlens = cu_seqlens.read(op);
  a.initial_state = initial.read(op);
  a.initial_state_indices = indices.read(op);
  a.has_initial_state = has_initial.read(op);
  TensorArg y("y", new_conv_output(op, *a.x, a.cu_seqlens != nullptr));
  a.y = y.write(op);
  const bool packed = a.cu_seqlens != nullptr && a.cu_seqlens->ndim == 1 && a.cu_seqlens->shape[0] > 0;
  const int64_t state_shape[3] = {packed ? a.cu_seqlens->shape[0] - 1 : a.x->shape[0], a.x->shape[1],
                                  state_len > 0 ? state_len : 0};
  const int64_t none[1] = {0};
  TensorArg final_state("final_state", state_len > 0 ? new_tensor(*a.x, 3, state_shape, nullptr, a.x->dtype)
                                                     : new_tensor(*a.x, 1, none, nullptr, a.x->dtype));
  if (state_len > 0) a.final_state = final_state.write(op);
  check(gdn_causal_conv1d(&a));
  stack[0] = y.release();
  stack[1] = final_state.release();
}

void conv1d_inplace(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "causal_conv1d";
  ArgReader r(stack);
  TensorArg x("x", r.tensor()), weight("weight", r.tensor()), bias("bias", r.optional_tensor());
  TensorArg cu_seqlens("cu_seqlens", r.optional_tensor());
  TensorArg state("initial_state", r.tensor());
  TensorArg indices("initial_state_indices", r.optional_tensor());
  TensorArg final_indices("final_state_indices", r.optional_tensor());
  TensorArg has_initial("has_initial_state", r.optional_tensor());
  TensorArg num_accepted("num_accepted", r.optional_tensor());
  gdn_conv1d_args a = GDN_INIT(gdn_conv1d_args);
  a.activation = r.integer32();
  a.null_slots = r.integer32();

  a.x = x.read(op);
  a.stream = current_stream(*a.x);
  a.weight = weight.read(op);
  a.bias = bias.read(op);
  a.cu_seqlens = cu_seqlens.read(op);
  a.initial_state = a.final_state = state.write(op);
  a.initial_state_indices = indices.read(op);
  a.final_state_indices = final_indices.read(op);
  a.has_initial_state = has_initial.read(op);
  a.num_accepted = num_accepted.read(op);
  TensorArg y("y", new_conv_output(op, *a.x, a.cu_seqlens != nullptr));
  a.y = y.write(op);
  check(gdn_causal_conv1d(&a));
  stack[0] = y.release();
}

// ---- gate, norms, rotary

void gate(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "gate";
  ArgReader r(stack);
  TensorArg a_in("a", r.tensor()), b_in("b", r.tensor()), A_log("A_log", r.tensor());
  TensorArg dt_bias("dt_bias", r.optional_tensor());
  gdn_gate_args a = GDN_INIT(gdn_gate_args);
  a.gate_form = r.integer32();
  a.beta_form = r.integer32();

  a.a = a_in.read(op);
  a.stream = current_stream(*a.a);
  a.b = b_in.read(op);
  a.A_log = A_log.read(op);
  a.dt_bias = dt_bias.read(op);
  TensorArg g("g", new_tensor(*a.a, a.a->ndim, a.a->shape, nullptr, GDN_F32));
  TensorArg beta("beta", new_tensor(*a.b, a.b->ndim, a.b->shape, nullptr, GDN_F32));
  a.g = g.write(op);
  a.beta = beta.write(op);
  check(gdn_gate(&a));
  stack[0] = g.release();
  stack[1] = beta.release();
}

void rmsnorm_gated(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "rmsnorm_gated";
  ArgReader r(stack);
  TensorArg x("x", r.tensor()), z("z", r.optional_tensor()), weight("weight", r.optional_tensor());
  gdn_rmsnorm_gated_args a = GDN_INIT(gdn_rmsnorm_gated_args);
  a.eps = static_cast<float>(r.real());
  a.activation = r.integer32();
  a.gate_first = r.boolean();
  a.zero_centered = r.boolean();
  a.round_before_weight = r.boolean();

  a.x = x.read(op);
  a.stream = current_stream(*a.x);
  a.z = z.read(op);
  a.weight = weight.read(op);
  TensorArg out("out", new_tensor(*a.x, a.x->ndim, a.x->shape, nullptr, a.x->dtype));
  a.out = out.write(op);
  check(gdn_rmsnorm_gated(&a));
  stack[0] = out.release();
}

void add_rmsnorm(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "rmsnorm_gated";
  ArgReader r(stack);
  TensorArg x("x", r.tensor()), residual("residual", r.tensor()), weight("weight", r.optional_tensor());
  gdn_rmsnorm_gated_args a = GDN_INIT(gdn_rmsnorm_gated_args);
  a.eps = static_cast<float>(r.real());
  a.zero_centered = r.boolean();

  a.x = x.read(op);
  a.stream = current_stream(*a.x);
  a.residual = residual.read(op);
  a.weight = weight.read(op);
  TensorArg out("out", new_tensor(*a.x, a.x->ndim, a.x->shape, nullptr, a.x->dtype));
  TensorArg sum("residual_out", new_tensor(*a.x, a.x->ndim, a.x->shape, nullptr, a.x->dtype));
  a.out = out.write(op);
  a.residual_out = sum.write(op);
  check(gdn_rmsnorm_gated(&a));
  stack[0] = out.release();
  stack[1] = sum.release();
}

void glu(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "glu";
  ArgReader r(stack);
  TensorArg x("x", r.tensor()), z("z", r.tensor());
  gdn_glu_args a = GDN_INIT(gdn_glu_args);
  a.activation = r.integer32();

  a.x = x.read(op);
  a.stream = current_stream(*a.x);
  a.z = z.read(op);
  TensorArg out("out", new_tensor(*a.x, a.x->ndim, a.x->shape, nullptr, a.x->dtype));
  a.out = out.write(op);
  check(gdn_glu(&a));
  stack[0] = out.release();
}

void qk_rmsnorm_rope(StableIValue* stack, uint64_t, uint64_t) {
  const char* op = "qk_rmsnorm_rope";
  ArgReader r(stack);
  TensorArg q("q", r.tensor()), k("k", r.tensor());
  TensorArg q_weight("q_weight", r.optional_tensor()), k_weight("k_weight", r.optional_tensor());
  TensorArg cos("cos", r.optional_tensor()), sin("sin", r.optional_tensor());
  TensorArg positions("positions", r.optional_tensor());
  gdn_qk_rmsnorm_rope_args a = GDN_INIT(gdn_qk_rmsnorm_rope_args);
  a.eps = static_cast<float>(r.real());
  a.theta = static_cast<float>(r.real());
  a.rotary_dim = r.integer32();
  for (int32_t& section : a.mrope_section) section = r.integer32();
  a.q_has_gate = r.boolean();
  a.zero_centered = r.boolean();

  a.q = q.read(op);
  a.stream = current_stream(*a.q);
  a.k = k.read(op);
  a.q_weight = q_weight.read(op);
  a.k_weight = k_weight.read(op);
  a.cos = cos.read(op);
  a.sin = sin.read(op);
  a.positions = positions.read(op);
  need_rank(op, "q", *a.q, 4, "[B, T, Hq, D]");
  need_rank(op, "k", *a.k, 4, "[B, T, Hkv, D]");
  const int64_t q_shape[4] = {a.q->shape[0], a.q->shape[1], a.q->shape[2], a.k->shape[3]};
  const int64_t none[1] = {0};
  TensorArg q_out("q_out", new_tensor(*a.q, 4, q_shape, nullptr, a.q->dtype));
  TensorArg k_out("k_out", new_tensor(*a.k, 4, a.k->shape, nullptr, a.k->dtype));
  TensorArg gate_out("gate_out", a.q_has_gate != 0 ? new_tensor(*a.q, 4, q_shape, nullptr, a.q->dtype)
                                                   : new_tensor(*a.q, 1, none, nullptr, a.q->dtype));
  a.q_out = q_out.write(op);
  a.k_out = k_out.write(op);
  if (a.q_has_gate != 0) a.gate_out = gate_out.write(op);
  check(gdn_qk_rmsnorm_rope(&a));
  stack[0] = q_out.release();
  stack[1] = k_out.release();
  stack[2] = gate_out.release();
}

}  // namespace

STABLE_TORCH_LIBRARY(gdn, m) {
#define GDN_FUNCTIONAL_STATE \
  ", Tensor? initial_state, Tensor? initial_state_indices, Tensor? has_initial_state, bool output_final_state, "
  m.def("chunk_forward(" GDN_RULE_INPUTS GDN_FUNCTIONAL_STATE GDN_RULE_OPTIONS GDN_CHUNK_OPTIONS
        ") -> (Tensor, Tensor)");
  m.def("recurrent(" GDN_RULE_INPUTS GDN_FUNCTIONAL_STATE GDN_RULE_OPTIONS ") -> (Tensor, Tensor)");
  m.def("chunk_forward_(" GDN_RULE_INPUTS
        ", Tensor(a!) state, Tensor? state_indices, Tensor? final_state_indices, Tensor? has_initial_state, "
        "Tensor(b!)? checkpoints, Tensor? checkpoint_indices, int checkpoint_every, " GDN_RULE_OPTIONS GDN_CHUNK_OPTIONS
        ") -> Tensor");
  m.def("recurrent_(" GDN_RULE_INPUTS
        ", Tensor(a!) state, Tensor? state_indices, Tensor? final_state_indices, Tensor? has_initial_state, "
        "Tensor? token_state_indices, Tensor? num_accepted, Tensor(b!)? snapshots, bool commit, " GDN_RULE_OPTIONS
        ") -> Tensor");
  m.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, Tensor? initial_state, "
      "Tensor? initial_state_indices, Tensor? has_initial_state, int final_state_len, int activation, int null_slots) "
      "-> (Tensor, Tensor)");
  m.def(
      "causal_conv1d_(Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, Tensor(a!) state, "
      "Tensor? state_indices, Tensor? final_state_indices, Tensor? has_initial_state, Tensor? num_accepted, "
      "int activation, int null_slots) -> Tensor");
  m.def("gate(Tensor a, Tensor b, Tensor A_log, Tensor? dt_bias, int gate_form, int beta_form) -> (Tensor, Tensor)");
  m.def(
      "rmsnorm_gated(Tensor x, Tensor? z, Tensor? weight, float eps, int activation, bool gate_first, "
      "bool zero_centered, bool round_before_weight) -> Tensor");
  m.def("add_rmsnorm(Tensor x, Tensor residual, Tensor? weight, float eps, bool zero_centered) -> (Tensor, Tensor)");
  m.def("glu(Tensor x, Tensor z, int activation) -> Tensor");
  m.def(
      "qk_rmsnorm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, "
      "Tensor? positions, float eps, float theta, int rotary_dim, int mrope_t, int mrope_h, int mrope_w, "
      "bool q_has_gate, bool zero_centered) -> (Tensor, Tensor, Tensor)");
}

// The same functions for both keys: libgdn looks at the tensors' device itself, and a build without its CUDA backend
// says so where the dispatcher's own message would list every backend of PyTorch.
#define GDN_REGISTER(key)                                               \
  STABLE_TORCH_LIBRARY_IMPL(gdn, key, m) {                              \
    m.impl("chunk_forward", &rule_functional<gdn_chunk_forward, true>); \
    m.impl("recurrent", &rule_functional<gdn_recurrent, false>);        \
    m.impl("chunk_forward_", &chunk_forward_inplace);                   \
    m.impl("recurrent_", &recurrent_inplace);                           \
    m.impl("causal_conv1d", &conv1d_functional);                        \
    m.impl("causal_conv1d_", &conv1d_inplace);                          \
    m.impl("gate", &gate);                                              \
    m.impl("rmsnorm_gated", &rmsnorm_gated);                            \
    m.impl("add_rmsnorm", &add_rmsnorm);                                \
    m.impl("glu", &glu);                                                \
    m.impl("qk_rmsnorm_rope", &qk_rmsnorm_rope);                        \
  }
GDN_REGISTER(CPU)
GDN_REGISTER(CUDA)

}  // namespace gdn_torch
