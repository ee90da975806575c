// SPDX-License-Identifier: MIT
// Cases of the AMX prefill kernel, an oracle of their own (the recurrence in double), and a runner. Used by
// amx_test.cpp (tile emulation, any CPU) and by lab/amx_lab.cpp (the same checks on a CPU with AMX).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/rule.h"

namespace gdn::amx_cases {

enum class Gates { kTypical, kNone, kZero, kStrong, kMixed, kPositive, kAlphaZero };
enum class Keys { kRandom, kCorrelated, kSame, kUnnormalised };

struct Case {
  std::string name;
  int64_t Hk = 1, Hv = 1, K = 128, V = 128;
  std::vector<int64_t> lens = {192};
  bool varlen = false;  // lens packed in one row with cu_seqlens; else lens.size() must be 1 or all are equal (batch)
  Gates gates = Gates::kTypical;
  Keys keys = Keys::kRandom;
  float beta_low = 0, beta_high = 1;
  int32_t gate_form = GDN_GATE_LOG, beta_form = GDN_BETA_VALUE, head_map = GDN_HEADS_GROUPED;
  bool l2norm = false, round_qk = false, round_beta = false;
  bool v_first = false, strided = false;
  int32_t state_dtype = GDN_F32, o_dtype = GDN_BF16, gate_dtype = GDN_F32;
  bool initial = true;
  int64_t checkpoint_every = 0;
  float v_size = 1;
  // Relative L2. Rounding o to bf16 alone costs 1.65e-3. The default form reads the state as bf16 and rounds P for o,
  // each worth another 1.65e-3 of a part of the result; the exact form does neither. All far inside the contract
  // (o 5e-3, state 4.5e-3; 2e-2 for correlated keys) and below what GPU kernels have (4.0e-3, 3.8e-3).
  struct Limits {
    double o, state;
  };
  Limits limits = {2.8e-3, 1.5e-3}, exact_limits = {2e-3, 1e-5};
};

inline float from_bf16(uint16_t b) {
  const uint32_t u = static_cast<uint32_t>(b) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint16_t to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
inline double read(const char* p, int32_t dtype) {
  if (dtype == GDN_BF16) {
    uint16_t b;
    std::memcpy(&b, p, 2);
    return from_bf16(b);
  }
  if (dtype == GDN_F16) {
    uint16_t b;
    std::memcpy(&b, p, 2);
    const int exponent = (b >> 10) & 31, mantissa = b & 1023;
    const double magnitude = exponent == 31  ? (mantissa != 0 ? NAN : INFINITY)
                             : exponent == 0 ? std::ldexp(mantissa, -24)
                                             : std::ldexp(1024 + mantissa, exponent - 25);
    return (b & 0x8000) != 0 ? -magnitude : magnitude;
  }
  float f;
  std::memcpy(&f, p, 4);
  return f;
}
// bf16 and fp32 only: inputs of the cases.
inline void write(char* p, int32_t dtype, float value) {
  if (dtype == GDN_BF16) {
    const uint16_t b = to_bf16(value);
    std::memcpy(p, &b, 2);
  } else {
    std::memcpy(p, &value, 4);
  }
}

// A tensor with its memory. Bytes start as 0xff (NaN in every float dtype), so whatever is left unwritten shows.
struct Tensor {
  std::vector<char> memory;
  View view;
  // `step` > 1 spreads the innermost dimension; `swap_last` stores the last two dimensions transposed.
  Tensor(int32_t dtype, std::vector<int64_t> shape, int64_t step = 1, bool swap_last = false) {
    view.dtype = dtype;
    view.ndim = static_cast<int32_t>(shape.size());
    int64_t stride = step;
    for (int i = view.ndim - 1; i >= 0; --i) {
      view.shape[i] = shape[static_cast<size_t>(i)];
      view.stride[i] = stride;
      stride *= view.shape[i];
    }
    if (swap_last) {
      const int n = view.ndim;
      view.stride[n - 1] = view.shape[n - 2] * step;
      view.stride[n - 2] = step;
    }
    memory.assign(static_cast<size_t>(stride * dtype_bytes(dtype)) + 64, static_cast<char>(0xff));
    view.data = memory.data();
  }
};

struct Problem {
  RuleProblem p;
  std::vector<std::unique_ptr<Tensor>> tensors;
  int64_t used = 0, rows = 0;  // tokens of dim 1 in use and allocated
};

inline View add(Problem* out, int32_t dtype, std::vector<int64_t> shape, int64_t step = 1, bool swap_last = false) {
  out->tensors.push_back(std::make_unique<Tensor>(dtype, std::move(shape), step, swap_last));
  return out->tensors.back()->view;
}

inline std::unique_ptr<Problem> make_problem(const Case& c) {
  auto out = std::make_unique<Problem>();
  RuleProblem& p = out->p;
  std::mt19937 rng(1234);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(0, 1);
  const int64_t num_seqs = static_cast<int64_t>(c.lens.size());
  int64_t total = 0;
  for (const int64_t n : c.lens) total += n;
  p.op = GDN_OP_CHUNK_FORWARD;
  p.N = num_seqs;
  p.B = c.varlen ? 1 : num_seqs;
  p.T = c.varlen ? total + 3 : c.lens[0];  // three rows past the end that must stay untouched
  p.Hk = c.Hk;
  p.Hv = c.Hv;
  p.K = c.K;
  p.V = c.V;
  p.gate_form = c.gate_form;
  p.beta_form = c.beta_form;
  p.head_map = c.head_map;
  p.qk_l2norm = c.l2norm;
  p.round_qk = c.round_qk;
  p.round_beta = c.round_beta;
  p.scale = 1.0 / std::sqrt(static_cast<double>(c.K));
  const int64_t step = c.strided ? 3 : 1;
  p.q = add(out.get(), GDN_BF16, {p.B, p.T, p.Hk, p.K}, step);
  p.k = add(out.get(), GDN_BF16, {p.B, p.T, p.Hk, p.K}, step);
  p.v = add(out.get(), GDN_BF16, {p.B, p.T, p.Hv, p.V}, step);
  p.o = add(out.get(), c.o_dtype, {p.B, p.T, p.Hv, p.V}, step);
  if (c.gates != Gates::kNone) p.g = add(out.get(), c.gate_dtype, {p.B, p.T, p.Hv}, step);
  p.beta = add(out.get(), c.gate_dtype, {p.B, p.T, p.Hv}, step);
  if (c.gate_form == GDN_GATE_RAW) {
    p.A_log = add(out.get(), GDN_F32, {p.Hv});
    p.dt_bias = add(out.get(), GDN_BF16, {p.Hv});
    for (int64_t h = 0; h < p.Hv; ++h) {
      write(p.A_log.at(h), GDN_F32, std::log(0.1f + uniform(rng)));
      write(p.dt_bias.at(h), GDN_BF16, normal(rng) - 2);
    }
  }
  std::vector<float> base(static_cast<size_t>(c.K)), x(base.size());
  const auto unit = [&](std::vector<float>& y) {
    double sum = 0;
    for (auto& e : y) {
      e = normal(rng);
      sum += static_cast<double>(e) * e;
    }
    for (auto& e : y) e = static_cast<float>(e / std::sqrt(sum));
  };
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t h = 0; h < p.Hk; ++h) {
      unit(base);
      for (int64_t t = 0; t < p.T; ++t) {
        for (int which = 0; which < 2; ++which) {
          unit(x);
          float size = 1;
          if (which == 1 && c.keys == Keys::kCorrelated) {
            double sum = 0;
            for (size_t i = 0; i < x.size(); ++i) {
              x[i] = std::sqrt(0.9f) * base[i] + std::sqrt(0.1f) * x[i];
              sum += static_cast<double>(x[i]) * x[i];
            }
            size = static_cast<float>(1 / std::sqrt(sum));
          }
          if (which == 1 && c.keys == Keys::kSame) x = base;
          if (c.keys == Keys::kUnnormalised) size = 1.6f;
          if (c.l2norm) size *= 0.2f + 5 * uniform(rng);
          const View& view = which == 0 ? p.q : p.k;
          for (int64_t i = 0; i < c.K; ++i) write(view.at(b, t, h, i), GDN_BF16, x[static_cast<size_t>(i)] * size);
        }
      }
    }
    for (int64_t t = 0; t < p.T; ++t) {
      for (int64_t h = 0; h < p.Hv; ++h) {
        for (int64_t i = 0; i < c.V; ++i) write(p.v.at(b, t, h, i), GDN_BF16, normal(rng) * c.v_size);
        const float beta =
            c.beta_form == GDN_BETA_VALUE ? c.beta_low + (c.beta_high - c.beta_low) * uniform(rng) : normal(rng) * 2;
        write(p.beta.at(b, t, h), c.gate_dtype, beta);
        if (!p.g.present()) continue;
        float g = 0;
        const float r = uniform(rng);
        if (c.gates == Gates::kTypical) g = -0.1f * r;
        if (c.gates == Gates::kStrong) g = -30 * r;
        if (c.gates == Gates::kMixed) g = r < 0.1f ? -150.0f : -0.02f * r;
        if (c.gates == Gates::kPositive) g = 0.08f * (r - 0.45f);
        if (c.gate_form == GDN_GATE_RAW) g = normal(rng) * 3;
        if (c.gate_form == GDN_GATE_LINEAR) g = c.gates == Gates::kAlphaZero && r < 0.05f ? 0.0f : std::exp(g);
        write(p.g.at(b, t, h), c.gate_dtype, g);
      }
    }
  }
  if (c.initial) {
    p.initial_state = add(out.get(), c.state_dtype, {num_seqs, p.Hv, p.K, p.V}, 1, c.v_first);
    for (int64_t n = 0; n < num_seqs; ++n) {
      for (int64_t i = 0; i < p.Hv * p.K * p.V; ++i) {
        write(p.initial_state.at(n, i / (p.K * p.V), i / p.V % p.K, i % p.V), c.state_dtype,
              normal(rng) * 0.3f * c.v_size);
      }
    }
  }
  p.final_state = add(out.get(), c.state_dtype, {num_seqs, p.Hv, p.K, p.V}, 1, c.v_first);
  int64_t begin = 0, checkpoints = 0;
  for (int64_t n = 0; n < num_seqs; ++n) {
    Sequence seq;
    seq.batch = c.varlen ? 0 : n;
    seq.begin = c.varlen ? begin : 0;
    seq.len = c.lens[static_cast<size_t>(n)];
    seq.read_slot = c.initial ? n : -1;
    seq.write_slot = n;
    seq.checkpoint_begin = checkpoints;
    if (c.checkpoint_every > 0) checkpoints += seq.len / c.checkpoint_every;
    begin += seq.len;
    p.seqs.push_back(seq);
  }
  if (c.checkpoint_every > 0) {
    p.checkpoint_every = c.checkpoint_every;
    p.checkpoints = add(out.get(), GDN_F32, {checkpoints, p.Hv, p.K, p.V}, 1, c.v_first);
    for (int64_t m = 0; m < checkpoints; ++m) p.checkpoint_slots.push_back(m % 3 == 2 ? -1 : m);
  }
  out->rows = p.T;
  out->used = c.varlen ? total : p.T;
  return out;
}

struct Errors {
  double o = 0, state = 0, checkpoint = 0;  // relative L2 over the whole tensor
};

struct Norms {
  double difference = 0, reference = 0;
  void compare(double found, double expected) {
    difference += (found - expected) * (found - expected);
    reference += expected * expected;
  }
  double relative() const { return reference == 0 ? std::sqrt(difference) : std::sqrt(difference / reference); }
};

// The recurrence in double on the problem's own inputs, compared with the outputs it holds.
inline Errors errors(const RuleProblem& p) {
  Norms o, state, checkpoint;
  const size_t K = static_cast<size_t>(p.K), V = static_cast<size_t>(p.V);
  std::vector<double> S(K * V), k(K), q(K), u(V);
  for (size_t n = 0; n < p.seqs.size(); ++n) {
    const Sequence& seq = p.seqs[n];
    for (int64_t h = 0; h < p.Hv; ++h) {
      for (size_t i = 0; i < S.size(); ++i) {
        const int64_t row = static_cast<int64_t>(i / V), col = static_cast<int64_t>(i % V);
        S[i] = seq.read_slot < 0 ? 0 : read(p.initial_state.at(seq.read_slot, h, row, col), p.initial_state.dtype);
      }
      for (int64_t t = 0; t < seq.len; ++t) {
        const int64_t at = seq.begin + t, hk = p.key_head(h);
        for (int which = 0; which < 2; ++which) {
          std::vector<double>& x = which == 0 ? q : k;
          const View& view = which == 0 ? p.q : p.k;
          double sum = 0;
          for (size_t i = 0; i < K; ++i) {
            x[i] = read(view.at(seq.batch, at, hk, static_cast<int64_t>(i)), view.dtype);
            sum += x[i] * x[i];
          }
          if (!p.qk_l2norm) continue;
          for (auto& e : x) {
            e /= std::sqrt(sum + static_cast<double>(p.l2norm_eps));
            if (p.round_qk) e = from_bf16(to_bf16(static_cast<float>(e)));
          }
        }
        double g = p.g.present() ? read(p.g.at(seq.batch, at, h), p.g.dtype) : 0;
        if (p.gate_form == GDN_GATE_LINEAR && p.g.present()) g = std::log(g);
        if (p.gate_form == GDN_GATE_RAW) {
          const double x = g + read(p.dt_bias.at(h), p.dt_bias.dtype);
          g = -std::exp(read(p.A_log.at(h), p.A_log.dtype)) * (x > 20 ? x : std::log1p(std::exp(x)));
        }
        double beta = read(p.beta.at(seq.batch, at, h), p.beta.dtype);
        if (p.beta_form != GDN_BETA_VALUE) beta = 1 / (1 + std::exp(-beta));
        if (p.beta_form == GDN_BETA_SIGMOID2) beta *= 2;
        if (p.round_beta && p.beta.dtype == GDN_BF16) beta = from_bf16(to_bf16(static_cast<float>(beta)));
        const double alpha = std::exp(g);
        for (auto& e : S) e *= alpha;
        for (size_t j = 0; j < V; ++j) u[j] = read(p.v.at(seq.batch, at, h, static_cast<int64_t>(j)), p.v.dtype);
        for (size_t i = 0; i < K; ++i) {
          for (size_t j = 0; j < V; ++j) u[j] -= S[i * V + j] * k[i];
        }
        for (size_t i = 0; i < K; ++i) {
          for (size_t j = 0; j < V; ++j) S[i * V + j] += k[i] * beta * u[j];
        }
        for (size_t j = 0; j < V; ++j) {
          double sum = 0;
          for (size_t i = 0; i < K; ++i) sum += S[i * V + j] * q[i];
          o.compare(read(p.o.at(seq.batch, at, h, static_cast<int64_t>(j)), p.o.dtype), sum * p.scale);
        }
        if (p.checkpoints.present() && (t + 1) % p.checkpoint_every == 0) {
          const int64_t slot =
              p.checkpoint_slots[static_cast<size_t>(seq.checkpoint_begin + (t + 1) / p.checkpoint_every - 1)];
          for (size_t i = 0; i < S.size() && slot >= 0; ++i) {
            checkpoint.compare(
                read(p.checkpoints.at(slot, h, static_cast<int64_t>(i / V), static_cast<int64_t>(i % V)), GDN_F32),
                S[i]);
          }
        }
      }
      for (size_t i = 0; i < S.size(); ++i) {
        const int64_t row = static_cast<int64_t>(i / V), col = static_cast<int64_t>(i % V);
        state.compare(read(p.final_state.at(seq.write_slot, h, row, col), p.final_state.dtype), S[i]);
      }
    }
  }
  return {o.relative(), state.relative(), checkpoint.relative()};
}

inline std::vector<Case> all_cases() {
  std::vector<Case> list;
  const auto with = [&](std::string name, auto change) {
    Case c;
    c.name = std::move(name);
    change(&c);
    list.push_back(c);
  };
  const double bf16_state = 2.2e-3;
  with("typical", [](Case* c) {
    c->lens = {1024};
    c->Hv = 2;
  });
  with("o in fp32", [](Case* c) {
    c->lens = {512};
    c->o_dtype = GDN_F32;
    c->limits.o = 2e-3;
    c->exact_limits.o = 2e-5;
  });
  with("o in fp16", [](Case* c) {
    c->o_dtype = GDN_F16;
    c->limits.o = 2e-3;
    c->exact_limits.o = 4e-4;
  });
  with("no gate", [](Case* c) {
    c->lens = {512};
    c->gates = Gates::kNone;
  });
  with("g = 0", [](Case* c) {
    c->lens = {512};
    c->gates = Gates::kZero;
  });
  with("strong gates", [](Case* c) { c->gates = Gates::kStrong; });
  with("rare gates of -150", [](Case* c) {
    c->lens = {512};
    c->gates = Gates::kMixed;
  });
  with("positive gates", [](Case* c) {
    c->lens = {512};
    c->gates = Gates::kPositive;
    c->limits.state = 2e-3;  // grows with the state: 1.61e-3
  });
  with("cosine 0.9, beta 0.9..1", [](Case* c) {
    c->lens = {1024};
    c->keys = Keys::kCorrelated;
    c->gates = Gates::kZero;
    c->beta_low = 0.9f;
    c->limits.o = 3.5e-3;  // the sums over 64 nearly equal keys cancel: 2.8e-3
    c->exact_limits.state = 5e-5;
  });
  with("cosine 0.9, beta 1..1.9", [](Case* c) {
    c->lens = {512};
    c->keys = Keys::kCorrelated;
    c->gates = Gates::kZero;
    c->beta_low = 1;
    c->beta_high = 1.9f;
    c->limits.o = 4e-3;  // solutions up to twice as large as the inputs: bf16 rounding of S and P weighs more
    c->exact_limits.state = 2e-4;
  });
  with("same key, beta 1", [](Case* c) {
    c->lens = {512};
    c->keys = Keys::kSame;
    c->gates = Gates::kZero;
    c->beta_low = 1;
  });
  with("same key, beta 1.98", [](Case* c) {
    c->lens = {512};
    c->keys = Keys::kSame;
    c->gates = Gates::kZero;
    c->beta_low = c->beta_high = 1.98f;
    c->limits.o = 4e-3;  // solutions up to twice as large as the inputs: bf16 rounding of S and P weighs more
    c->exact_limits.state = 2e-4;
  });
  with("norm 1.6 keys, token loop", [](Case* c) {
    c->lens = {96};
    c->keys = Keys::kUnnormalised;
    c->beta_low = 0.5f;
  });
  with("K 64 V 96", [](Case* c) {
    c->K = 64;
    c->V = 96;
    c->Hk = 2;
    c->Hv = 6;
  });
  with("K 96 V 64", [](Case* c) {
    c->K = 96;
    c->V = 64;
    c->v_first = true;
  });
  with("K 256 V 32", [](Case* c) {
    c->K = 256;
    c->V = 32;
  });
  with("K 32 V 256", [](Case* c) {
    c->K = 32;
    c->V = 256;
  });
  with("V-first state", [](Case* c) {
    c->v_first = true;
    c->Hv = 2;
  });
  with("bf16 state", [=](Case* c) {
    c->state_dtype = GDN_BF16;
    c->limits.state = 2.5e-3;
    c->exact_limits.state = bf16_state;
  });
  with("bf16 V-first state", [=](Case* c) {
    c->state_dtype = GDN_BF16;
    c->v_first = true;
    c->limits.state = 2.5e-3;
    c->exact_limits.state = bf16_state;
  });
  with("tails", [](Case* c) {
    c->varlen = true;
    c->lens = {0, 1, 3, 65, 0, 31, 33, 16, 17, 100, 64, 63};
  });
  with("no initial state", [](Case* c) {
    c->varlen = true;
    c->initial = false;
    c->lens = {70, 1, 0, 128};
  });
  with("batch of three", [](Case* c) {
    c->lens = {80, 80, 80};
    c->Hk = 2;
    c->Hv = 4;
  });
  with("tiled heads", [](Case* c) {
    c->Hk = 2;
    c->Hv = 4;
    c->head_map = GDN_HEADS_TILED;
  });
  with("strided", [](Case* c) {
    c->strided = true;
    c->Hv = 2;
  });
  with("L2 norm", [](Case* c) {
    c->l2norm = true;
    c->lens = {512};
  });
  with("L2 norm rounded", [](Case* c) {
    c->l2norm = c->round_qk = true;
    c->lens = {512};
    c->exact_limits.state = 2e-4;
  });
  with("raw gates, sigmoid", [](Case* c) {
    c->gate_form = GDN_GATE_RAW;
    c->beta_form = GDN_BETA_SIGMOID;
    c->gate_dtype = GDN_BF16;
  });
  with("raw gates, 2 sigmoid rounded", [](Case* c) {
    c->gate_form = GDN_GATE_RAW;
    c->beta_form = GDN_BETA_SIGMOID2;
    c->gate_dtype = GDN_BF16;
    c->round_beta = true;
  });
  with("linear gates", [](Case* c) { c->gate_form = GDN_GATE_LINEAR; });
  with("linear gates with zeros", [](Case* c) {
    c->gate_form = GDN_GATE_LINEAR;
    c->gates = Gates::kAlphaZero;
  });
  with("checkpoints every 64", [](Case* c) {
    c->varlen = true;
    c->lens = {200, 128, 30};
    c->checkpoint_every = 64;
  });
  with("checkpoints every 50", [](Case* c) {
    c->varlen = true;
    c->lens = {200, 128, 30};
    c->checkpoint_every = 50;
    c->v_first = true;
  });
  with("v of 1e8", [](Case* c) { c->v_size = 1e8f; });
  with("v of 1e-8", [](Case* c) { c->v_size = 1e-8f; });
  return list;
}

}  // namespace gdn::amx_cases
