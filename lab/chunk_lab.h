// SPDX-License-Identifier: MIT
// Problems for chunk_lab: padded buffers with guard bytes, and the recurrence in double.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/element.h"
#include "core/problem.h"

namespace lab {

// Storage of a view with `pad` unused elements after each row; unused bytes are 0xff (NaN in every dtype).
struct Buffer {
  std::vector<char> bytes;
  gdn::View view;

  // order: dimensions from outermost to innermost in memory.
  void make(int32_t dtype, const std::vector<int64_t>& shape, const std::vector<int>& order, int64_t pad) {
    view = gdn::View();
    view.dtype = dtype;
    view.ndim = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (size_t i = 0; i < shape.size(); ++i) view.shape[i] = shape[i];
    for (size_t i = order.size(); i-- > 0;) {
      view.stride[order[i]] = stride;
      stride *= shape[static_cast<size_t>(order[i])];
      if (i + 1 == order.size()) stride += pad;
    }
    bytes.assign(static_cast<size_t>((stride + 16) * gdn::dtype_bytes(dtype)), static_cast<char>(0xff));
    view.data = bytes.data() + 8 * gdn::dtype_bytes(dtype);
  }
  template <class F>
  void each(const F& f) {  // f(offset in elements)
    int64_t index[6] = {};
    int64_t total = 1;
    for (int i = 0; i < view.ndim; ++i) total *= view.shape[i];
    for (int64_t n = 0; n < total; ++n) {
      int64_t offset = 0;
      for (int i = 0; i < view.ndim; ++i) offset += index[i] * view.stride[i];
      f(offset);
      for (int i = view.ndim - 1; i >= 0; --i) {
        if (++index[i] < view.shape[i]) break;
        index[i] = 0;
      }
    }
  }
  double get(int64_t offset) const {
    return gdn::load_element(view.data + offset * gdn::dtype_bytes(view.dtype), view.dtype);
  }
  void set(int64_t offset, double x) {
    gdn::store_element(x, view.data + offset * gdn::dtype_bytes(view.dtype), view.dtype);
  }
  // Bytes outside the view are still 0xff.
  bool guards_intact() {
    std::vector<char> copy = bytes;
    const size_t size = static_cast<size_t>(gdn::dtype_bytes(view.dtype));
    each([&](int64_t offset) { std::memset(copy.data() + (8 + offset) * static_cast<int64_t>(size), 0xff, size); });
    for (const char c : copy) {
      if (c != static_cast<char>(0xff)) return false;
    }
    return true;
  }
};

struct Case {
  std::string name;
  std::vector<int64_t> lengths = {37};
  int64_t Hk = 2, Hv = 4, K = 128, V = 128;
  int32_t io = GDN_F32, gate_dtype = GDN_F32, state = GDN_F32;
  bool v_first = false, recurrent = false, tiled = false, l2norm = false, round_qk = false;
  int32_t gate_form = GDN_GATE_LOG, beta_form = GDN_BETA_VALUE;
  double g_low = -1, g_high = 0, beta_low = 0, beta_high = 1, cosine = 0, key_norm = 1;
  int64_t checkpoint_every = 0;
  bool initial = true, final = true, in_place = false, snapshots = false, token_slots = false;
  int64_t pad = 3;
  double limit = 5e-6;
};

struct Instance {
  gdn::RuleProblem p;
  Buffer q, k, v, g, beta, A_log, dt_bias, o, initial, final, snapshots, checkpoints;
  std::vector<double> o_ref, final_ref, snapshots_ref, checkpoints_ref;  // dense, by the view's order of indices
  std::vector<char> initial_before;
};

inline void build(const Case& c, Instance* x, uint32_t seed = 7) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal;
  const auto uniform = [&](double a, double b) { return std::uniform_real_distribution<double>(a, b)(rng); };
  gdn::RuleProblem& p = x->p;
  int64_t T = 0, checkpoints = 0, longest = 1;
  const int64_t N = static_cast<int64_t>(c.lengths.size());
  for (int64_t n = 0; n < N; ++n) {
    gdn::Sequence s;
    s.begin = T;
    s.len = c.lengths[static_cast<size_t>(n)];
    s.read_slot = c.initial ? n : -1;
    s.write_slot = c.final && !c.token_slots ? n : -1;
    s.checkpoint_begin = checkpoints;
    if (c.checkpoint_every > 0) checkpoints += s.len / c.checkpoint_every;
    p.seqs.push_back(s);
    T += s.len;
    longest = std::max(longest, s.len);
  }
  p.op = c.recurrent ? GDN_OP_RECURRENT : GDN_OP_CHUNK_FORWARD;
  p.B = 1;
  p.T = T;
  p.N = N;
  p.Hk = c.Hk;
  p.Hv = c.Hv;
  p.K = c.K;
  p.V = c.V;
  p.gate_form = c.gate_form;
  p.beta_form = c.beta_form;
  p.head_map = c.tiled ? GDN_HEADS_TILED : GDN_HEADS_GROUPED;
  p.qk_l2norm = c.l2norm;
  p.round_qk = c.round_qk;
  p.scale = 1 / std::sqrt(static_cast<double>(c.K));
  const std::vector<int> dense4 = {0, 1, 2, 3};
  x->q.make(c.io, {1, T, c.Hk, c.K}, dense4, c.pad);
  x->k.make(c.io, {1, T, c.Hk, c.K}, dense4, c.pad);
  x->v.make(c.io, {1, T, c.Hv, c.V}, dense4, c.pad);
  x->o.make(c.io, {1, T, c.Hv, c.V}, dense4, c.pad);
  x->g.make(c.gate_dtype, {1, T, c.Hv}, {0, 1, 2}, c.pad);
  x->beta.make(c.gate_dtype, {1, T, c.Hv}, {0, 1, 2}, c.pad);
  x->A_log.make(GDN_F32, {c.Hv}, {0}, 0);
  x->dt_bias.make(GDN_F32, {c.Hv}, {0}, 0);
  x->A_log.each([&](int64_t i) { x->A_log.set(i, uniform(-1, 2)); });
  x->dt_bias.each([&](int64_t i) { x->dt_bias.set(i, uniform(-1, 1)); });
  // Keys share a direction so that two of them have the wanted cosine.
  std::vector<double> common(static_cast<size_t>(c.K)), row(static_cast<size_t>(c.K));
  const auto unit = [&](std::vector<double>* r) {
    double sum = 0;
    for (double& e : *r) {
      e = normal(rng);
      sum += e * e;
    }
    for (double& e : *r) e /= std::sqrt(sum);
  };
  unit(&common);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t h = 0; h < c.Hk; ++h) {
      unit(&row);
      for (int64_t i = 0; i < c.K; ++i) {
        const size_t e = static_cast<size_t>(i);
        const double k = std::sqrt(c.cosine) * common[e] + std::sqrt(1 - c.cosine) * row[e];
        x->k.set(t * x->k.view.stride[1] + h * x->k.view.stride[2] + i, c.key_norm * k);
      }
      unit(&row);
      for (int64_t i = 0; i < c.K; ++i) {
        x->q.set(t * x->q.view.stride[1] + h * x->q.view.stride[2] + i, c.key_norm * row[static_cast<size_t>(i)]);
      }
    }
  }
  x->v.each([&](int64_t i) { x->v.set(i, normal(rng)); });
  x->g.each([&](int64_t i) {
    const double g = uniform(c.g_low, c.g_high);
    x->g.set(i, c.gate_form == GDN_GATE_LINEAR ? std::exp(g) : c.gate_form == GDN_GATE_RAW ? 3 * normal(rng) : g);
  });
  x->beta.each([&](int64_t i) {
    x->beta.set(i, c.beta_form == GDN_BETA_VALUE ? uniform(c.beta_low, c.beta_high) : 2 * normal(rng));
  });
  const std::vector<int> state_order = c.v_first ? std::vector<int>{0, 1, 3, 2} : dense4;
  x->initial.make(c.state, {N, c.Hv, c.K, c.V}, state_order, c.pad);
  x->initial.each([&](int64_t i) { x->initial.set(i, normal(rng)); });
  x->initial_before = x->initial.bytes;
  const int64_t slots = c.token_slots ? N * longest : N;
  x->final.make(c.state, {slots, c.Hv, c.K, c.V}, state_order, c.pad);
  x->snapshots.make(c.state, {N, c.snapshots ? longest : 0, c.Hv, c.K, c.V},
                    c.v_first ? std::vector<int>{0, 1, 2, 4, 3} : std::vector<int>{0, 1, 2, 3, 4}, c.pad);
  x->checkpoints.make(c.state, {std::max<int64_t>(checkpoints, 1), c.Hv, c.K, c.V}, state_order, c.pad);
  p.q = x->q.view;
  p.k = x->k.view;
  p.v = x->v.view;
  p.o = x->o.view;
  p.g = x->g.view;
  p.beta = x->beta.view;
  if (c.gate_form == GDN_GATE_RAW) {
    p.A_log = x->A_log.view;
    p.dt_bias = x->dt_bias.view;
  }
  if (c.initial) p.initial_state = x->initial.view;
  if (c.final) p.final_state = c.in_place ? x->initial.view : x->final.view;
  if (c.snapshots) p.snapshots = x->snapshots.view;
  if (c.checkpoint_every > 0) {
    p.checkpoints = x->checkpoints.view;
    p.checkpoint_every = c.checkpoint_every;
    for (int64_t i = 0; i < checkpoints; ++i) p.checkpoint_slots.push_back(i);
  }
  if (c.token_slots) {
    p.token_slot_columns = longest;
    for (int64_t i = 0; i < N * longest; ++i) p.token_slots.push_back(N * longest - 1 - i);
  }
}

// Fills the references of x (dense arrays in the order of the views' indices).
inline void reference(const Case& c, Instance* x) {
  const gdn::RuleProblem& p = x->p;
  const int64_t head_size = p.K * p.V;
  const auto get = [](const gdn::View& s, int64_t a, int64_t b, int64_t h, int64_t i) {
    return gdn::load_element(s.at(a, b, h, i), s.dtype);
  };
  x->o_ref.assign(static_cast<size_t>(p.T * p.Hv * p.V), 0);
  x->final_ref.assign(static_cast<size_t>(x->final.view.shape[0] * p.Hv * head_size), 0);
  x->snapshots_ref.assign(static_cast<size_t>(p.N * x->snapshots.view.shape[1] * p.Hv * head_size), 0);
  x->checkpoints_ref.assign(static_cast<size_t>(x->checkpoints.view.shape[0] * p.Hv * head_size), 0);
  std::vector<double> S(static_cast<size_t>(head_size)), k(static_cast<size_t>(p.K)), q(static_cast<size_t>(p.K));
  for (int64_t n = 0; n < p.N; ++n) {
    const gdn::Sequence& seq = p.seqs[static_cast<size_t>(n)];
    for (int64_t h = 0; h < p.Hv; ++h) {
      const auto save = [&](std::vector<double>* dst, int64_t slot) {
        std::copy(S.begin(), S.end(), dst->begin() + (slot * p.Hv + h) * head_size);
      };
      for (int64_t i = 0; i < head_size; ++i) {
        S[static_cast<size_t>(i)] = c.initial
                                        ? gdn::load_element(x->initial_before.data() + 8 * gdn::dtype_bytes(c.state) +
                                                                x->initial.view.offset_bytes(n, h, i / p.V, i % p.V),
                                                            c.state)
                                        : 0;
      }
      for (int64_t t = 0; t < seq.len; ++t) {
        const int64_t row = seq.begin + t;
        const auto load_key = [&](const gdn::View& s, std::vector<double>* dst) {
          double sum = 0;
          for (int64_t i = 0; i < p.K; ++i) {
            const double e = get(s, 0, row, p.key_head(h), i);
            (*dst)[static_cast<size_t>(i)] = e;
            sum += e * e;
          }
          if (!p.qk_l2norm) return;
          for (double& e : *dst) {
            e /= std::sqrt(sum + static_cast<double>(p.l2norm_eps));
            if (p.round_qk) e = gdn::round_to(e, s.dtype);
          }
        };
        load_key(p.k, &k);
        load_key(p.q, &q);
        double g = get(p.g, 0, row, h, 0), alpha, beta = get(p.beta, 0, row, h, 0);
        if (p.gate_form == GDN_GATE_RAW) {
          const double s = g + gdn::load_element(p.dt_bias.at(h), GDN_F32);
          g = -std::exp(gdn::load_element(p.A_log.at(h), GDN_F32)) * (s > 20 ? s : std::log1p(std::exp(s)));
        }
        alpha = p.gate_form == GDN_GATE_LINEAR ? g : std::exp(std::max(g, -104.0));
        if (p.beta_form != GDN_BETA_VALUE) beta = (p.beta_form == GDN_BETA_SIGMOID2 ? 2 : 1) / (1 + std::exp(-beta));
        std::vector<double> u(static_cast<size_t>(p.V), 0), o(static_cast<size_t>(p.V), 0);
        for (int64_t i = 0; i < p.K; ++i) {
          for (int64_t j = 0; j < p.V; ++j) {
            double& s = S[static_cast<size_t>(i * p.V + j)];
            s *= alpha;
            u[static_cast<size_t>(j)] += s * k[static_cast<size_t>(i)];
          }
        }
        for (int64_t j = 0; j < p.V; ++j)
          u[static_cast<size_t>(j)] = beta * (get(p.v, 0, row, h, j) - u[static_cast<size_t>(j)]);
        for (int64_t i = 0; i < p.K; ++i) {
          for (int64_t j = 0; j < p.V; ++j) {
            double& s = S[static_cast<size_t>(i * p.V + j)];
            s += k[static_cast<size_t>(i)] * u[static_cast<size_t>(j)];
            o[static_cast<size_t>(j)] += s * q[static_cast<size_t>(i)];
          }
        }
        for (int64_t j = 0; j < p.V; ++j) {
          x->o_ref[static_cast<size_t>((row * p.Hv + h) * p.V + j)] = p.scale * o[static_cast<size_t>(j)];
        }
        if (c.snapshots) save(&x->snapshots_ref, n * x->snapshots.view.shape[1] + t);
        if (c.token_slots) save(&x->final_ref, p.token_slots[static_cast<size_t>(n * p.token_slot_columns + t)]);
        if (c.checkpoint_every > 0 && (t + 1) % c.checkpoint_every == 0) {
          save(&x->checkpoints_ref, seq.checkpoint_begin + (t + 1) / c.checkpoint_every - 1);
        }
      }
      if (seq.write_slot >= 0) save(&x->final_ref, seq.write_slot);
    }
  }
}

// Relative L2 error over the elements that the reference has (NaN left where nothing is to be written counts only if
// the reference is not zero there); NaN or a touched guard gives infinity.
inline double error(Buffer* x, const std::vector<double>& ref) {
  double diff = 0, norm = 0;
  size_t n = 0;
  x->each([&](int64_t offset) {
    const double e = x->get(offset), r = ref[n++];
    if (std::isnan(e) && r == 0) return;
    diff += (e - r) * (e - r);
    norm += r * r;
  });
  if (!std::isfinite(diff) || !x->guards_intact()) return HUGE_VAL;
  return norm > 0 ? std::sqrt(diff / norm) : std::sqrt(diff);
}

}  // namespace lab
