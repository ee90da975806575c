// SPDX-License-Identifier: MIT
// What the chunk and the recurrent kernels share: reading gates, keys and states of a RuleProblem into fp32.
#pragma once
#include <cmath>

#include "cpu/isa/simd-inl.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "cpu/dispatch.h"

namespace gdn::cpu::GDN_ISA_NS {
namespace {

// Strong decay drives states through the subnormal range, where x86 cores multiply a hundred times slower: flushed to
// zero inside a kernel (below 1.2e-38, far under the accuracy contract), restored on return.
class FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (uint64_t{1} << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  FlushDenormals() = default;
#endif
 public:
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;
};

constexpr double kMinGate = -104;  // e^-104 is 0 in fp32; keeps -inf and huge gates from making NaN

// RuleItem counts value heads key head by key head, whatever the head map.
inline int64_t key_head_of(const RuleProblem& p, int64_t h) { return h / (p.Hv / p.Hk); }
inline int64_t head_of(const RuleProblem& p, int64_t h) {
  const int64_t group = p.Hv / p.Hk;
  return p.head_map == GDN_HEADS_TILED ? h % group * p.Hk + h / group : h;
}

// exp(g_t); double because cumulative products are taken of it.
inline double load_alpha(const RuleProblem& p, int64_t batch, int64_t token, int64_t head) {
  if (!p.g.present()) return 1;
  const float x = load_scalar(p.g.at(batch, token, head), p.g.dtype);
  if (p.gate_form == GDN_GATE_LINEAR) return static_cast<double>(x);
  double g = static_cast<double>(x);
  if (p.gate_form == GDN_GATE_RAW) {
    const double a_log = static_cast<double>(load_scalar(p.A_log.at(head), p.A_log.dtype));
    const double bias =
        p.dt_bias.present() ? static_cast<double>(load_scalar(p.dt_bias.at(head), p.dt_bias.dtype)) : 0.0;
    const double a = g + bias;
    g = -exp(a_log) * (a > 20 ? a : log1p(exp(a)));
  }
  return exp(g < kMinGate ? kMinGate : g);  // a NaN stays NaN
}

inline float load_beta(const RuleProblem& p, int64_t batch, int64_t token, int64_t head) {
  if (!p.beta.present()) return 1;
  const float b = load_scalar(p.beta.at(batch, token, head), p.beta.dtype);
  if (p.beta_form == GDN_BETA_VALUE) return b;
  const float beta = (p.beta_form == GDN_BETA_SIGMOID2 ? 2.0f : 1.0f) / (1.0f + expf(-b));
  return p.round_beta ? round_scalar(beta, p.beta.dtype) : beta;
}

// One row of q or k in fp32, L2-normalised if asked for, zero from K to k_pad. row: 64-byte aligned, k_pad a multiple
// of kLanes.
inline void load_key_row(const RuleProblem& p, const View& x, int64_t batch, int64_t token, int64_t key_head,
                         int64_t k_pad, float* HWY_RESTRICT row) {
  load_row(x.at(batch, token, key_head), x.dtype, x.stride[3], p.K, row);
  for (int64_t i = p.K; i < k_pad; ++i) row[i] = 0;
  if (!p.qk_l2norm) return;
  const F32Tag d;
  F32Vec sum = hn::Zero(d);
  for (int64_t i = 0; i < k_pad; i += kLanes) {
    const F32Vec v = hn::Load(d, row + i);
    sum = hn::MulAdd(v, v, sum);
  }
  const float factor = 1.0f / sqrtf(hn::GetLane(hn::SumOfLanes(d, sum)) + p.l2norm_eps);
  const F32Vec f = hn::Set(d, factor);
  for (int64_t i = 0; i < k_pad; i += kLanes) hn::Store(hn::Mul(f, hn::Load(d, row + i)), d, row + i);
  if (p.round_qk && x.dtype != GDN_F32) {
    for (int64_t i = 0; i < p.K; ++i) row[i] = round_scalar(row[i], x.dtype);
  }
}

inline void zero_output(const RuleProblem& p, const Sequence& seq, const RuleItem& item) {
  for (int64_t t = 0; t < seq.len; ++t) {
    for (int64_t h = item.head_begin; h < item.head_end; ++h) {
      const int64_t head = head_of(p, h);
      for (int64_t v = item.v_begin; v < item.v_end; ++v) {
        store_scalar(0.0f, p.o.at(seq.batch, seq.begin + t, head, v), p.o.dtype);
      }
    }
  }
}

constexpr int64_t state_row_scratch_bytes() { return 512 * 4; }

// Columns [v, v + width) of one head's state to or from s [K][pitch]. `row`: scratch of K floats.
inline void load_state(const View& state, int64_t slot, int64_t head, int64_t k, int64_t v, int64_t width,
                       int64_t pitch, float* HWY_RESTRICT s, float* HWY_RESTRICT row) {
  if (state.stride[2] == 1 && state.stride[3] != 1) {  // V-first: each column is contiguous
    for (int64_t c = 0; c < width; ++c) {
      load_row(state.at(slot, head, 0, v + c), state.dtype, 1, k, row);
      for (int64_t i = 0; i < k; ++i) s[i * pitch + c] = row[i];
    }
    return;
  }
  for (int64_t i = 0; i < k; ++i)
    load_row(state.at(slot, head, i, v), state.dtype, state.stride[3], width, s + i * pitch);
}
inline void store_state(const View& state, int64_t slot, int64_t head, int64_t k, int64_t v, int64_t width,
                        int64_t pitch, const float* HWY_RESTRICT s, float* HWY_RESTRICT row) {
  if (state.stride[2] == 1 && state.stride[3] != 1) {
    for (int64_t c = 0; c < width; ++c) {
      for (int64_t i = 0; i < k; ++i) row[i] = s[i * pitch + c];
      store_row(row, state.at(slot, head, 0, v + c), state.dtype, 1, k);
    }
    return;
  }
  for (int64_t i = 0; i < k; ++i)
    store_row(s + i * pitch, state.at(slot, head, i, v), state.dtype, state.stride[3], width);
}

}  // namespace
}  // namespace gdn::cpu::GDN_ISA_NS
