// SPDX-License-Identifier: MIT
// The arguments of the convolution, the gate, the norms and the rotary embedding.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "core/validate.h"
#include "core/validate_util.h"

namespace gdn {
namespace {

using validation::Checker;
using validation::kAnySize;
using validation::kFloats;
using validation::read_index;

constexpr int64_t kMaxConvWidth = 16;

// [.., D] of rank 1..4 as rank 4, padded with leading ones.
void pad_to_rank_4(View* view) {
  if (!view->present()) return;
  const int32_t pad = 4 - view->ndim;
  View wide = *view;
  wide.ndim = 4;
  for (int32_t i = 0; i < 4; ++i) {
    wide.shape[i] = i < pad ? 1 : view->shape[i - pad];
    wide.stride[i] = i < pad ? 0 : view->stride[i - pad];
  }
  *view = wide;
}

bool same_shape(Checker* c, const char* name, const View& view, const char* other_name, const View& other) {
  bool same = view.ndim == other.ndim;
  for (int32_t i = 0; same && i < view.ndim; ++i) same = view.shape[i] == other.shape[i];
  return same || c->invalid(name, "shape " + validation::shape_text(view.shape, view.ndim),
                            std::string("the shape of '") + other_name + "', " +
                                validation::shape_text(other.shape, other.ndim));
}

// ---- causal_conv1d

// As validation reads it, on the host; the views in ConvProblem are the tensors themselves.
struct ConvMetadata {
  View cu_seqlens, initial_indices, has_initial, final_indices, num_accepted;
  bool readable = true;  // false: device tensors whose values nobody looks at here
};

bool check_accepted(Checker* c, const ConvMetadata& m, ConvProblem* p) {
  if (!m.num_accepted.present()) return true;
  if (!p->initial_state.present()) {
    return c->invalid("num_accepted", "a tensor without initial_state", "NULL, or initial_state beside it");
  }
  if (p->W < 2) return c->invalid("num_accepted", "a tensor with W = 1", "NULL (there is no context)");
  const int64_t window = p->L - p->W + 2;
  if (!m.readable) {
    const bool dense = !p->cu_seqlens.present();
    return !dense || p->N == 0 || p->T <= window ||
           c->invalid("initial_state", "L = " + std::to_string(p->L),
                      "L >= W - 2 + T = " + std::to_string(p->W - 2 + p->T) + " with num_accepted");
  }
  p->num_accepted.assign(static_cast<size_t>(p->N), 1);
  for (int64_t n = 0; n < p->N; ++n) {
    const Sequence& seq = p->seqs[static_cast<size_t>(n)];
    if (seq.is_null) continue;
    const int64_t accepted = m.num_accepted.data != nullptr ? read_index(m.num_accepted, n) : 1;
    if (accepted < 1 || accepted > window) {
      return c->invalid("num_accepted", "num_accepted[" + std::to_string(n) + "] = " + std::to_string(accepted),
                        "1.." + std::to_string(window) + " (L - W + 2)");
    }
    if (seq.len > window) {
      return c->invalid("initial_state", "L = " + std::to_string(p->L),
                        "L >= W - 2 + T = " + std::to_string(p->W - 2 + seq.len) + " with num_accepted");
    }
    p->num_accepted[static_cast<size_t>(n)] = accepted;
  }
  return true;
}

bool conv_states(Checker* c, const gdn_conv1d_args& a, ConvProblem* p, ConvMetadata* m) {
  const validation::Dim per_seq{"N", p->N}, slots{"slots", kAnySize}, dim_d{"D", p->D}, dim_l{"L", kAnySize};
  const bool initial_pool = a.initial_state_indices != nullptr;
  const bool shared =
      a.initial_state != nullptr && a.final_state != nullptr && a.initial_state->data == a.final_state->data;
  const bool final_pool = a.final_state_indices != nullptr || (shared && initial_pool);
  if (!(c->optional("initial_state", a.initial_state, kFloats, {initial_pool ? slots : per_seq, dim_d, dim_l},
                    &p->initial_state) &&
        c->optional("final_state", a.final_state, kFloats, {final_pool ? slots : per_seq, dim_d, dim_l},
                    &p->final_state, true) &&
        c->optional("initial_state_indices", a.initial_state_indices, validation::kIndices, {per_seq},
                    &p->initial_indices) &&
        c->optional("has_initial_state", a.has_initial_state, validation::kFlags, {per_seq}, &p->has_initial) &&
        c->optional("final_state_indices", a.final_state_indices, validation::kIndices, {per_seq}, &p->final_indices) &&
        c->optional("num_accepted", a.num_accepted, validation::kIndices, {per_seq}, &p->accepted) &&
        c->host_metadata(p->initial_indices, &m->initial_indices) &&
        c->host_metadata(p->has_initial, &m->has_initial) && c->host_metadata(p->final_indices, &m->final_indices) &&
        c->host_metadata(p->accepted, &m->num_accepted))) {
    return false;
  }
  if (!p->initial_state.present() && (m->initial_indices.present() || m->has_initial.present())) {
    return c->invalid(m->initial_indices.present() ? "initial_state_indices" : "has_initial_state",
                      "a tensor without initial_state", "NULL, or initial_state beside it");
  }
  if (!p->final_state.present() && m->final_indices.present()) {
    return c->invalid("final_state_indices", "a tensor without final_state", "NULL, or final_state beside it");
  }
  const bool has_state = p->initial_state.present() || p->final_state.present();
  if (has_state) p->L = p->initial_state.present() ? p->initial_state.shape[2] : p->final_state.shape[2];
  if (p->initial_state.present() && p->final_state.present() && p->final_state.shape[2] != p->L) {
    return c->invalid("final_state", "L = " + std::to_string(p->final_state.shape[2]),
                      "the L of initial_state, " + std::to_string(p->L));
  }
  if (has_state && p->L < p->W - 1) {
    return c->invalid(p->initial_state.present() ? "initial_state" : "final_state", "L = " + std::to_string(p->L),
                      "L >= W - 1 = " + std::to_string(p->W - 1));
  }
  const validation::SlotArguments args{&p->initial_state, &p->final_state, &m->initial_indices,
                                       &m->final_indices, &m->has_initial, a.null_slots};
  return (!m->readable || validation::build_slots(c, args, &p->seqs)) && check_accepted(c, *m, p);
}

bool run_checks(Checker* c, const gdn_conv1d_args* args, ConvProblem* p) {
  gdn_conv1d_args a;
  ConvMetadata m;
  constexpr size_t kFirstSize = offsetof(gdn_conv1d_args, num_threads) + sizeof(int32_t);
  if (!c->read_struct(args, kFirstSize, sizeof(a), &a) || !c->threads(a.num_threads) ||
      !c->in_range("activation", a.activation, GDN_ACT_NONE, GDN_ACT_SILU) ||
      !c->in_range("null_slots", a.null_slots, GDN_NULL_NEGATIVE, GDN_NULL_NON_POSITIVE)) {
    return false;
  }
  p->activation = a.activation;
  p->num_threads = a.num_threads;
  c->set_stream(a.stream);
  if (!c->required("x", a.x, kFloats, {{"B", kAnySize}, {"D", kAnySize}, {"T", kAnySize}}, &p->x)) return false;
  p->B = p->x.shape[0];
  p->D = p->x.shape[1];
  p->T = p->x.shape[2];
  if (!c->positive_dim("x", "D", p->D) ||
      !c->required("weight", a.weight, kFloats, {{"D", p->D}, {"W", kAnySize}}, &p->weight)) {
    return false;
  }
  p->W = p->weight.shape[1];
  if (p->W < 1) return c->invalid("weight", "W = " + std::to_string(p->W), "W in 1..16");
  if (p->W > kMaxConvWidth) return c->unsupported("weight", "W = " + std::to_string(p->W), "W in 1..16");
  if (!(c->optional("bias", a.bias, kFloats, {{"D", p->D}}, &p->bias) &&
        c->required("y", a.y, kFloats, {{"B", p->B}, {"D", p->D}, {"T", p->T}}, &p->y, true) &&
        c->optional("cu_seqlens", a.cu_seqlens, validation::kIndices, {{"N + 1", kAnySize}}, &p->cu_seqlens) &&
        c->host_metadata(p->cu_seqlens, &m.cu_seqlens) && c->earlier_errors())) {
    return false;
  }
  m.readable = !c->on_cuda() || validation::debug_checks();
  if (m.readable) {
    if (!validation::build_sequences(c, m.cu_seqlens, p->B, p->T, &p->seqs)) return false;
    p->N = static_cast<int64_t>(p->seqs.size());
  } else if (!validation::count_sequences(c, p->cu_seqlens, p->B, &p->N)) {
    return false;
  }
  if (!conv_states(c, a, p, &m)) return false;

  if (!c->all_disjoint({{"final_state", &p->final_state}, {"y", &p->y}},
                       {{"x", &p->x},
                        {"weight", &p->weight},
                        {"bias", &p->bias},
                        {"initial_state", &p->initial_state},
                        {"cu_seqlens", &p->cu_seqlens},
                        {"initial_state_indices", &p->initial_indices},
                        {"has_initial_state", &p->has_initial},
                        {"final_state_indices", &p->final_indices},
                        {"num_accepted", &p->accepted}},
                       {{&p->y, &p->x}, {&p->final_state, &p->initial_state}})) {
    return false;
  }
  if (p->L == 0) p->initial_state = p->final_state = View();
  static_cast<Place&>(*p) = c->place();
  if (!c->on_cuda()) return true;
  p->seqs.clear();
  p->num_accepted.clear();
  p->null_slots = a.null_slots;
  if (!p->final_indices.present() && validation::same_view(p->initial_state, p->final_state)) {
    p->final_indices = p->initial_indices;
  }
  return true;
}

// ---- gate

bool run_checks(Checker* c, const gdn_gate_args* args, GateProblem* p) {
  gdn_gate_args a;
  constexpr size_t kFirstSize = offsetof(gdn_gate_args, num_threads) + sizeof(int32_t);
  if (!c->read_struct(args, kFirstSize, sizeof(a), &a) || !c->threads(a.num_threads) ||
      !c->in_range("gate_form", a.gate_form, GDN_GATE_LOG, GDN_GATE_LINEAR) ||
      !c->in_range("beta_form", a.beta_form, GDN_BETA_VALUE, GDN_BETA_SIGMOID2)) {
    return false;
  }
  p->gate_form = a.gate_form;
  p->beta_form = a.beta_form == GDN_BETA_SIGMOID2 ? GDN_BETA_SIGMOID2 : GDN_BETA_SIGMOID;
  p->num_threads = a.num_threads;
  if (!(c->any_rank("a", a.a, kFloats, 1, 4, &p->a) && c->any_rank("b", a.b, kFloats, 1, 4, &p->b) &&
        c->any_rank("g", a.g, kFloats, 1, 4, &p->g, true) &&
        c->any_rank("beta", a.beta, kFloats, 1, 4, &p->beta, true))) {
    return false;
  }
  if (!p->a.present() && !p->b.present()) return c->invalid("a", "NULL, with b NULL too", "a or b");
  if (p->a.present() != p->g.present()) {
    return c->invalid("g", p->a.present() ? "NULL beside a" : "a tensor without a", "g exactly when a is given");
  }
  if (p->b.present() != p->beta.present()) {
    return c->invalid("beta", p->b.present() ? "NULL beside b" : "a tensor without b", "beta exactly when b is given");
  }
  if (p->a.present() && p->b.present() && !same_shape(c, "b", p->b, "a", p->a)) return false;
  if (p->a.present() && !same_shape(c, "g", p->g, "a", p->a)) return false;
  if (p->b.present() && !same_shape(c, "beta", p->beta, "b", p->b)) return false;
  const View& shape_source = p->a.present() ? p->a : p->b;
  p->H = shape_source.shape[shape_source.ndim - 1];
  if (!c->positive_dim(p->a.present() ? "a" : "b", "Hv", p->H) ||
      !c->optional("A_log", a.A_log, kFloats, {{"Hv", p->H}}, &p->A_log) ||
      !c->optional("dt_bias", a.dt_bias, kFloats, {{"Hv", p->H}}, &p->dt_bias)) {
    return false;
  }
  if (p->a.present() && !p->A_log.present()) return c->invalid("A_log", "NULL beside a", "a tensor [Hv]");
  if (!p->a.present() && (p->A_log.present() || p->dt_bias.present())) {
    return c->invalid(p->A_log.present() ? "A_log" : "dt_bias", "a tensor without a", "NULL, or a beside it");
  }
  if (!c->all_disjoint({{"beta", &p->beta}, {"g", &p->g}},
                       {{"a", &p->a}, {"b", &p->b}, {"A_log", &p->A_log}, {"dt_bias", &p->dt_bias}}, {})) {
    return false;
  }
  for (View* view : {&p->a, &p->b, &p->g, &p->beta}) pad_to_rank_4(view);
  const View& padded = p->a.present() ? p->a : p->b;
  std::copy(padded.shape, padded.shape + 3, p->rows);
  c->set_stream(a.stream);
  static_cast<Place&>(*p) = c->place();
  return true;
}

// ---- rmsnorm_gated

bool check_eps(Checker* c, float eps) {
  if (c->failed()) return false;
  return (std::isfinite(eps) && eps >= 0) || c->invalid("eps", std::to_string(eps), "a finite number >= 0");
}

bool norm_residual(Checker* c, const gdn_rmsnorm_gated_args& a, NormProblem* p) {
  if (!c->any_rank("residual", a.residual, kFloats, 1, 4, &p->residual) ||
      !c->any_rank("residual_out", a.residual_out, kFloats, 1, 4, &p->residual_out, true)) {
    return false;
  }
  if (p->residual.present() != p->residual_out.present()) {
    return c->invalid("residual_out", p->residual.present() ? "NULL with residual" : "a tensor without residual",
                      "both residual and residual_out, or neither");
  }
  return !p->residual.present() || (same_shape(c, "residual", p->residual, "x", p->x) &&
                                    same_shape(c, "residual_out", p->residual_out, "x", p->x));
}

bool run_checks(Checker* c, const gdn_rmsnorm_gated_args* args, NormProblem* p) {
  gdn_rmsnorm_gated_args a;
  constexpr size_t kFirstSize = offsetof(gdn_rmsnorm_gated_args, num_threads) + sizeof(int32_t);
  if (!c->read_struct(args, kFirstSize, sizeof(a), &a) || !c->threads(a.num_threads) || !check_eps(c, a.eps) ||
      !c->in_range("activation", a.activation, GDN_ACT_NONE, GDN_ACT_SIGMOID) || !c->flag("gate_first", a.gate_first) ||
      !c->flag("zero_centered", a.zero_centered) || !c->flag("round_before_weight", a.round_before_weight)) {
    return false;
  }
  p->eps = a.eps;
  p->activation = a.activation;
  p->gate_first = a.gate_first != 0;
  p->zero_centered = a.zero_centered != 0;
  p->round_before_weight = a.round_before_weight != 0;
  p->num_threads = a.num_threads;
  if (a.x == nullptr) return c->invalid("x", "NULL", "a tensor [.., D]");
  if (a.out == nullptr) return c->invalid("out", "NULL", "a tensor of x's shape");
  if (!c->any_rank("x", a.x, kFloats, 1, 4, &p->x)) return false;
  p->D = p->x.shape[p->x.ndim - 1];
  if (!(c->positive_dim("x", "D", p->D) && c->any_rank("z", a.z, kFloats, 1, 4, &p->z) &&
        c->any_rank("out", a.out, kFloats, 1, 4, &p->out, true) &&
        c->optional("weight", a.weight, kFloats, {{"D", p->D}}, &p->weight))) {
    return false;
  }
  if (!same_shape(c, "out", p->out, "x", p->x)) return false;
  if (p->z.present() && !same_shape(c, "z", p->z, "x", p->x)) return false;
  if (p->z.present() == (p->activation == GDN_ACT_NONE)) {
    return c->invalid("activation", std::to_string(p->activation) + (p->z.present() ? " with z" : " without z"),
                      p->z.present() ? "GDN_ACT_SILU (1) or GDN_ACT_SIGMOID (2)" : "GDN_ACT_NONE (0)");
  }
  if (!norm_residual(c, a, p) ||
      !c->all_disjoint({{"out", &p->out}, {"residual_out", &p->residual_out}},
                       {{"x", &p->x}, {"z", &p->z}, {"weight", &p->weight}, {"residual", &p->residual}},
                       {{&p->out, &p->x}, {&p->residual_out, &p->residual}, {&p->residual_out, &p->x}})) {
    return false;
  }
  for (View* view : {&p->x, &p->z, &p->out, &p->residual, &p->residual_out}) pad_to_rank_4(view);
  std::copy(p->x.shape, p->x.shape + 3, p->rows);
  c->set_stream(a.stream);
  static_cast<Place&>(*p) = c->place();
  return true;
}

bool run_checks(Checker* c, const gdn_glu_args* args, NormProblem* p) {
  gdn_glu_args a;
  constexpr size_t kFirstSize = offsetof(gdn_glu_args, stream) + sizeof(void*);
  if (!c->read_struct(args, kFirstSize, sizeof(a), &a) || !c->threads(a.num_threads) ||
      !c->in_range("activation", a.activation, GDN_ACT_SILU, GDN_ACT_SIGMOID)) {
    return false;
  }
  p->glu = true;
  p->activation = a.activation;
  p->num_threads = a.num_threads;
  if (a.x == nullptr) return c->invalid("x", "NULL", "a tensor [.., D]");
  if (a.z == nullptr) return c->invalid("z", "NULL", "a tensor of x's shape");
  if (a.out == nullptr) return c->invalid("out", "NULL", "a tensor of x's shape");
  if (!c->any_rank("x", a.x, kFloats, 1, 4, &p->x)) return false;
  p->D = p->x.shape[p->x.ndim - 1];
  if (!(c->positive_dim("x", "D", p->D) && c->any_rank("z", a.z, kFloats, 1, 4, &p->z) &&
        c->any_rank("out", a.out, kFloats, 1, 4, &p->out, true)) ||
      !same_shape(c, "out", p->out, "x", p->x) || !same_shape(c, "z", p->z, "x", p->x) ||
      !c->all_disjoint({{"out", &p->out}}, {{"x", &p->x}, {"z", &p->z}}, {{&p->out, &p->x}})) {
    return false;
  }
  for (View* view : {&p->x, &p->z, &p->out}) pad_to_rank_4(view);
  std::copy(p->x.shape, p->x.shape + 3, p->rows);
  c->set_stream(a.stream);
  static_cast<Place&>(*p) = c->place();
  return true;
}

// ---- qk_rmsnorm_rope

// A batch dimension of size 1 is broadcast over B.
bool broadcast_batch(Checker* c, const char* name, int32_t dim, int64_t batch, View* view) {
  if (view->shape[dim] == batch) return true;
  if (view->shape[dim] != 1) {
    return c->invalid(name, "shape " + validation::shape_text(view->shape, view->ndim),
                      "a batch size of 1 or B = " + std::to_string(batch));
  }
  view->shape[dim] = batch;
  view->stride[dim] = 0;
  return true;
}

bool check_mrope(Checker* c, const gdn_qk_rmsnorm_rope_args& a, RopeProblem* p) {
  const int32_t* section = a.mrope_section;
  const bool mrope = section[0] != 0 || section[1] != 0 || section[2] != 0;
  const int64_t sum = int64_t{section[0]} + section[1] + section[2];
  if (mrope && (section[0] < 0 || section[1] < 0 || section[2] < 0 || sum != p->R / 2)) {
    return c->invalid(
        "mrope_section",
        "[" + std::to_string(section[0]) + ", " + std::to_string(section[1]) + ", " + std::to_string(section[2]) + "]",
        "three sizes >= 0 with the sum R / 2 = " + std::to_string(p->R / 2));
  }
  const bool three_axes = p->positions.ndim == 3;
  if (mrope != three_axes) {
    return c->invalid("positions", "shape " + validation::shape_text(p->positions.shape, p->positions.ndim),
                      mrope ? "[3, B, T] with mrope_section" : "[B, T] without mrope_section");
  }
  std::copy(section, section + 3, p->mrope_section);
  return true;
}

bool check_positions(Checker* c, const gdn_qk_rmsnorm_rope_args& a, RopeProblem* p) {
  if (p->cos.present() || p->sin.present()) {
    return c->invalid("positions", "a tensor beside cos or sin", "either positions, or cos and sin");
  }
  if (!std::isfinite(a.theta) || !(a.theta > 0)) {
    return c->invalid("theta", std::to_string(a.theta), "a finite number > 0 with positions");
  }
  if (a.rotary_dim < 2 || a.rotary_dim % 2 != 0 || a.rotary_dim > p->D) {
    return c->invalid("rotary_dim", std::to_string(a.rotary_dim), "an even number in 2.." + std::to_string(p->D));
  }
  p->theta = static_cast<double>(a.theta);
  p->R = a.rotary_dim;
  if (!check_mrope(c, a, p)) return false;
  View& pos = p->positions;
  const int32_t batch_dim = pos.ndim - 2;
  if (pos.shape[pos.ndim - 1] != p->T || (pos.ndim == 3 && pos.shape[0] != 3)) {
    return c->invalid("positions", "shape " + validation::shape_text(pos.shape, pos.ndim),
                      "[B or 1, T] or [3, B or 1, T] with T = " + std::to_string(p->T));
  }
  if (!broadcast_batch(c, "positions", batch_dim, p->B, &pos)) return false;
  if (pos.ndim == 2) {
    std::copy_backward(pos.shape, pos.shape + 2, pos.shape + 3);
    std::copy_backward(pos.stride, pos.stride + 2, pos.stride + 3);
    pos.shape[0] = 1;
    pos.stride[0] = 0;
    pos.ndim = 3;
  }
  return true;
}

bool check_angles(Checker* c, const gdn_qk_rmsnorm_rope_args& a, RopeProblem* p) {
  const validation::Dim batch{"B or 1", kAnySize}, dim_t{"T", p->T};
  if (!(c->optional("cos", a.cos, kFloats, {batch, dim_t, {"R", kAnySize}}, &p->cos) &&
        c->optional("sin", a.sin, kFloats, {batch, dim_t, {"R", kAnySize}}, &p->sin) &&
        c->any_rank("positions", a.positions, validation::kIndices, 2, 3, &p->positions))) {
    return false;
  }
  if (p->positions.present()) return check_positions(c, a, p);
  if (!p->cos.present() || !p->sin.present()) {
    return c->invalid(p->cos.present() ? "sin" : "cos", "NULL, without positions",
                      "cos and sin [B or 1, T, R], or positions with theta and rotary_dim");
  }
  p->R = p->cos.shape[2];
  if (p->R < 2 || p->R % 2 != 0 || p->R > p->D) {
    return c->invalid("cos", "R = " + std::to_string(p->R), "an even R in 2.." + std::to_string(p->D));
  }
  if (p->sin.shape[2] != p->R) {
    return c->invalid("sin", "R = " + std::to_string(p->sin.shape[2]), "the R of cos, " + std::to_string(p->R));
  }
  if (a.rotary_dim != 0 && a.rotary_dim != p->R) {
    return c->invalid("rotary_dim", std::to_string(a.rotary_dim), "0 or the R of cos, " + std::to_string(p->R));
  }
  if (a.mrope_section[0] != 0 || a.mrope_section[1] != 0 || a.mrope_section[2] != 0) {
    return c->invalid("mrope_section", "sections beside cos and sin", "zeros, or positions instead of cos and sin");
  }
  return broadcast_batch(c, "cos", 0, p->B, &p->cos) && broadcast_batch(c, "sin", 0, p->B, &p->sin);
}

bool run_checks(Checker* c, const gdn_qk_rmsnorm_rope_args* args, RopeProblem* p) {
  gdn_qk_rmsnorm_rope_args a;
  constexpr size_t kFirstSize = offsetof(gdn_qk_rmsnorm_rope_args, num_threads) + sizeof(int32_t);
  if (!c->read_struct(args, kFirstSize, sizeof(a), &a) || !c->threads(a.num_threads) || !check_eps(c, a.eps) ||
      !c->flag("q_has_gate", a.q_has_gate) || !c->flag("zero_centered", a.zero_centered)) {
    return false;
  }
  p->eps = a.eps;
  p->q_has_gate = a.q_has_gate != 0;
  p->zero_centered = a.zero_centered != 0;
  p->num_threads = a.num_threads;
  if (!c->required("k", a.k, kFloats, {{"B", kAnySize}, {"T", kAnySize}, {"Hkv", kAnySize}, {"D", kAnySize}}, &p->k)) {
    return false;
  }
  p->B = p->k.shape[0];
  p->T = p->k.shape[1];
  p->Hkv = p->k.shape[2];
  p->D = p->k.shape[3];
  if (!c->positive_dim("k", "Hkv", p->Hkv) || !c->positive_dim("k", "D", p->D)) return false;
  if (p->D > INT64_MAX / 2) return c->invalid("k", "D = " + std::to_string(p->D), "a smaller D");
  const validation::Dim dim_b{"B", p->B}, dim_t{"T", p->T}, dim_d{"D", p->D};
  const validation::Dim q_dim = p->q_has_gate ? validation::Dim{"2D", 2 * p->D} : dim_d;
  if (!c->required("q", a.q, kFloats, {dim_b, dim_t, {"Hq", kAnySize}, q_dim}, &p->q)) return false;
  p->Hq = p->q.shape[2];
  if (!(c->positive_dim("q", "Hq", p->Hq) &&
        c->required("q_out", a.q_out, kFloats, {dim_b, dim_t, {"Hq", p->Hq}, dim_d}, &p->q_out, true) &&
        c->required("k_out", a.k_out, kFloats, {dim_b, dim_t, {"Hkv", p->Hkv}, dim_d}, &p->k_out, true) &&
        c->optional("gate_out", a.gate_out, kFloats, {dim_b, dim_t, {"Hq", p->Hq}, dim_d}, &p->gate_out, true) &&
        c->optional("q_weight", a.q_weight, kFloats, {dim_d}, &p->q_weight) &&
        c->optional("k_weight", a.k_weight, kFloats, {dim_d}, &p->k_weight))) {
    return false;
  }
  if (p->gate_out.present() && !p->q_has_gate) {
    return c->invalid("gate_out", "a tensor without q_has_gate", "NULL, or q_has_gate = 1");
  }
  if (!check_angles(c, a, p)) return false;
  c->set_stream(a.stream);
  static_cast<Place&>(*p) = c->place();

  return c->all_disjoint({{"gate_out", &p->gate_out}, {"k_out", &p->k_out}, {"q_out", &p->q_out}},
                         {{"q", &p->q},
                          {"k", &p->k},
                          {"q_weight", &p->q_weight},
                          {"k_weight", &p->k_weight},
                          {"cos", &p->cos},
                          {"sin", &p->sin},
                          {"positions", &p->positions}},
                         {});
}

}  // namespace

Status validate(const gdn_conv1d_args* args, ConvProblem* out) {
  std::vector<Sequence> seqs = std::move(out->seqs);
  std::vector<int64_t> accepted = std::move(out->num_accepted);
  *out = ConvProblem();
  seqs.clear();
  accepted.clear();
  out->seqs = std::move(seqs);
  out->num_accepted = std::move(accepted);
  Checker checker("causal_conv1d", false);
  run_checks(&checker, args, out);
  return checker.take();
}

Status validate(const gdn_gate_args* args, GateProblem* out) {
  *out = GateProblem();
  Checker checker("gate", false);
  run_checks(&checker, args, out);
  return checker.take();
}

Status validate(const gdn_rmsnorm_gated_args* args, NormProblem* out) {
  *out = NormProblem();
  Checker checker("rmsnorm_gated", false);
  run_checks(&checker, args, out);
  return checker.take();
}

Status validate(const gdn_glu_args* args, NormProblem* out) {
  *out = NormProblem();
  Checker checker("glu", false);
  run_checks(&checker, args, out);
  return checker.take();
}

Status validate(const gdn_qk_rmsnorm_rope_args* args, RopeProblem* out) {
  *out = RopeProblem();
  Checker checker("qk_rmsnorm_rope", false);
  run_checks(&checker, args, out);
  return checker.take();
}

}  // namespace gdn
