// SPDX-License-Identifier: MIT
// The recurrence, literally, one token after another: the last entry of the implementation list and, in fp64, the
// oracle of every test. Any dtype, any stride, every feature; no SIMD, no chunking, no cleverness.
//
// Work item: one sequence, one value head, kPanel columns of V (columns of S never meet, so a panel of them is a
// smaller instance of the same recurrence and the state fits the stack).
#include <algorithm>
#include <cmath>

#include "core/element.h"
#include "cpu/parallel.h"
#include "cpu/rule.h"

namespace gdn::cpu {
namespace {

constexpr int64_t kMaxK = 512;
constexpr int64_t kPanel = 16;
constexpr double kMinGate = -104;  // e^-104 is 0 in fp32 (docs/math.md)

int64_t panels(const RuleProblem& p) { return (p.V + kPanel - 1) / kPanel; }

template <class Real>
Real load(const char* p, int32_t dtype) {
  return static_cast<Real>(load_element(p, dtype));
}

template <class Real>
Real sigmoid(Real x) {
  return Real{1} / (Real{1} + std::exp(-x));
}

template <class Real>
Real softplus(Real x) {
  return x > Real{20} ? x : std::log1p(std::exp(x));
}

// exp(g_t) of one token and value head.
template <class Real>
Real decay(const RuleProblem& p, int64_t batch, int64_t token, int64_t head) {
  if (!p.g.present()) return Real{1};
  const Real x = load<Real>(p.g.at(batch, token, head), p.g.dtype);
  if (p.gate_form == GDN_GATE_LINEAR) return x;
  Real g = x;
  if (p.gate_form == GDN_GATE_RAW) {
    const Real a_log = load<Real>(p.A_log.at(head), p.A_log.dtype);
    const Real bias = p.dt_bias.present() ? load<Real>(p.dt_bias.at(head), p.dt_bias.dtype) : Real{0};
    g = -std::exp(a_log) * softplus(x + bias);
  }
  return std::exp(g < Real{kMinGate} ? Real{kMinGate} : g);  // a NaN stays NaN
}

template <class Real>
Real write_strength(const RuleProblem& p, int64_t batch, int64_t token, int64_t head) {
  if (!p.beta.present()) return Real{1};
  const Real b = load<Real>(p.beta.at(batch, token, head), p.beta.dtype);
  if (p.beta_form == GDN_BETA_VALUE) return b;
  const Real beta = (p.beta_form == GDN_BETA_SIGMOID2 ? Real{2} : Real{1}) * sigmoid(b);
  return p.round_beta ? static_cast<Real>(round_to(static_cast<double>(beta), p.beta.dtype)) : beta;
}

// One row of q or k, L2-normalised if asked for.
template <class Real>
void load_key_row(const RuleProblem& p, const View& x, int64_t batch, int64_t token, int64_t key_head, Real* row) {
  for (int64_t i = 0; i < p.K; ++i) row[i] = load<Real>(x.at(batch, token, key_head, i), x.dtype);
  if (!p.qk_l2norm) return;
  Real sum{0};
  for (int64_t i = 0; i < p.K; ++i) sum += row[i] * row[i];
  const Real factor = Real{1} / std::sqrt(sum + static_cast<Real>(p.l2norm_eps));
  for (int64_t i = 0; i < p.K; ++i) {
    row[i] *= factor;
    if (p.round_qk) row[i] = static_cast<Real>(round_to(static_cast<double>(row[i]), x.dtype));
  }
}

template <class Real>
struct Panel {
  const RuleProblem& p;
  int64_t head;
  int64_t v_begin;
  int64_t width;
  Real S[kMaxK][kPanel];

  void clear() {
    for (int64_t i = 0; i < p.K; ++i) std::fill_n(S[i], width, Real{0});
  }
  void load_state(const View& state, int64_t slot) {
    for (int64_t i = 0; i < p.K; ++i) {
      for (int64_t j = 0; j < width; ++j) S[i][j] = load<Real>(state.at(slot, head, i, v_begin + j), state.dtype);
    }
  }
  void store_state(const View& state, int64_t slot) const {
    for (int64_t i = 0; i < p.K; ++i) {
      for (int64_t j = 0; j < width; ++j) {
        store_element(static_cast<double>(S[i][j]), state.at(slot, head, i, v_begin + j), state.dtype);
      }
    }
  }
  void store_snapshot(const View& snapshots, int64_t seq, int64_t token) const {
    for (int64_t i = 0; i < p.K; ++i) {
      for (int64_t j = 0; j < width; ++j) {
        store_element(static_cast<double>(S[i][j]), snapshots.at(seq, token, head, i, v_begin + j), snapshots.dtype);
      }
    }
  }
  void store_output(int64_t batch, int64_t token, int64_t j, Real value) const {
    store_element(static_cast<double>(value), p.o.at(batch, token, head, v_begin + j), p.o.dtype);
  }

  // The recurrence of docs/math.md for token `token` of batch row `batch`.
  void step(int64_t batch, int64_t token) {
    Real q[kMaxK], k[kMaxK];
    load_key_row(p, p.q, batch, token, p.key_head(head), q);
    load_key_row(p, p.k, batch, token, p.key_head(head), k);
    const Real alpha = decay<Real>(p, batch, token, head);
    const Real beta = write_strength<Real>(p, batch, token, head);
    const Real scale = static_cast<Real>(p.scale);
    for (int64_t j = 0; j < width; ++j) {
      for (int64_t i = 0; i < p.K; ++i) S[i][j] *= alpha;
      Real read{0};
      for (int64_t i = 0; i < p.K; ++i) read += S[i][j] * k[i];
      const Real v = load<Real>(p.v.at(batch, token, head, v_begin + j), p.v.dtype);
      const Real u = beta * (v - read);
      for (int64_t i = 0; i < p.K; ++i) S[i][j] += k[i] * u;
      Real out{0};
      for (int64_t i = 0; i < p.K; ++i) out += S[i][j] * q[i];
      store_output(batch, token, j, scale * out);
    }
  }
};

template <class Real>
void run_item(const RuleProblem& p, int64_t n, int64_t head, int64_t v_begin) {
  const Sequence& seq = p.seqs[static_cast<size_t>(n)];
  Panel<Real> panel{p, head, v_begin, std::min(kPanel, p.V - v_begin), {}};
  if (seq.is_null) {
    for (int64_t t = 0; t < seq.len; ++t) {
      for (int64_t j = 0; j < panel.width; ++j) panel.store_output(seq.batch, seq.begin + t, j, Real{0});
    }
    return;
  }
  if (seq.read_slot >= 0) {
    panel.load_state(p.initial_state, seq.read_slot);
  } else {
    panel.clear();
  }
  for (int64_t t = 0; t < seq.len; ++t) {
    panel.step(seq.batch, seq.begin + t);
    if (p.token_slot_columns > 0 && p.final_state.present()) {
      const int64_t slot = p.token_slots[static_cast<size_t>(n * p.token_slot_columns + t)];
      if (slot >= 0) panel.store_state(p.final_state, slot);
    }
    if (p.snapshots.present()) panel.store_snapshot(p.snapshots, n, t);
    if (p.checkpoint_every > 0 && (t + 1) % p.checkpoint_every == 0) {
      const int64_t entry = seq.checkpoint_begin + (t + 1) / p.checkpoint_every - 1;
      const int64_t slot = p.checkpoint_slots[static_cast<size_t>(entry)];
      if (slot >= 0) panel.store_state(p.checkpoints, slot);
    }
  }
  if (seq.write_slot >= 0) panel.store_state(p.final_state, seq.write_slot);
}

template <class Real>
Status run_reference(const RuleProblem& p, const Plan& plan) {
  const int64_t per_head = panels(p), per_seq = p.Hv * per_head;
  auto work = [&](int64_t item, int32_t) {
    run_item<Real>(p, item / per_seq, item % per_seq / per_head, item % per_head * kPanel);
  };
  parallel_for(p.N * per_seq, plan.threads, work);
  return Status();
}

}  // namespace

const char* refuse_reference(const RuleProblem&) { return nullptr; }

void plan_reference(const RuleProblem& p, Plan* plan) {
  plan->work_items = p.N * p.Hv * panels(p);
  plan->threads = static_cast<int32_t>(std::clamp<int64_t>(plan->work_items, 1, effective_threads(p.num_threads)));
  plan->panel_v = kPanel;
  plan->block_tokens = 1;
  plan->scratch_bytes = 0;
}

Status run_reference_fp32(const RuleProblem& p, const Plan& plan) { return run_reference<float>(p, plan); }
Status run_reference_fp64(const RuleProblem& p, const Plan& plan) { return run_reference<double>(p, plan); }

}  // namespace gdn::cpu
