// SPDX-License-Identifier: MIT
// Between the caller's tensors and an item's tiles: keys and queries, gates, values, outputs, states.
#pragma once
#include <algorithm>
#include <cmath>

#include "cpu/amx/chunk_stages.h"
#include "cpu/isa/simd-inl.h"

namespace gdn::cpu::amx {

using GDN_ISA_NS::load_row;
using GDN_ISA_NS::load_scalar;
using GDN_ISA_NS::round_scalar;
using GDN_ISA_NS::store_row;

// The tokens of one chunk: batch, first token (dim 1), count, how many of the sequence follow; `pairs` 32-row steps are
// computed.
struct Rows {
  int64_t batch, token, n, following;
  int64_t pairs() const { return (n + 31) / 32; }
};

// The rows of x that correspond to this chunk's rows [begin, end) `ahead` tokens later, as far as the sequence has
// them.
static inline RowPrefetcher::Range rows_to_prefetch(const View& x, const Rows& rows, int64_t head, int64_t first,
                                                    int64_t columns, int64_t begin, int64_t end, int64_t ahead) {
  const int64_t size = dtype_bytes(x.dtype), left = rows.n + rows.following - ahead;
  end = std::min(end, left);
  return {x.at(rows.batch, rows.token, head, first) + (begin + ahead) * x.stride[1] * size, x.stride[1] * size,
          end - begin, columns * size, false};
}

// bf16 nearest even in the upper halves.
GDN_AMX_INLINE VecU round_bf16(VecF x) {
  const VecU u = bits(x);
  return (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
}

// Packs one of q, k into left-operand tiles; norm2[i] = squared norm of the row as the recurrence sees it, factor[i] =
// what its fp32 products are still to be multiplied by. False if a row is not finite.
static inline bool load_rows(const RuleProblem& p, const View& x, const Rows& rows, int64_t head, int64_t kappas,
                             char* tiles, float* norm2, float* factor) {
  bool finite = true;
  const bool contiguous = x.stride[3] == 1;
  alignas(64) uint16_t gathered[32];
  for (int64_t i = 0; i < rows.pairs() * 32; ++i) {
    char* dst = tiles + (i / 16) * kappas * kTileBytes + (i % 16) * 64;
    factor[i] = 1;
    norm2[i] = 0;
    if (i >= rows.n) {
      for (int64_t kappa = 0; kappa < kappas; ++kappa) store_u(dst + kappa * kTileBytes, VecU{});
      continue;
    }
    const char* src = x.at(rows.batch, rows.token + i, head);
    VecF sum{};
    for (int64_t kappa = 0; kappa < kappas; ++kappa) {
      VecU words;
      if (contiguous) {
        words = loadu_u(src + kappa * 64);
      } else {
        for (int64_t c = 0; c < 32; ++c) std::memcpy(gathered + c, src + (kappa * 32 + c) * x.stride[3] * 2, 2);
        words = load_u(gathered);
      }
      store_u(dst + kappa * kTileBytes, words);
      const VecF even = from_bits(words << 16), odd = from_bits(words & 0xffff0000u);
      sum = sum + even * even;
      sum = sum + odd * odd;
    }
    norm2[i] = sum_lanes(sum);
    finite = finite && std::isfinite(norm2[i]);
    if (!p.qk_l2norm) continue;
    const float r = 1.0f / std::sqrt(norm2[i] + p.l2norm_eps);
    if (!p.round_qk) {
      factor[i] = r;
      norm2[i] *= r * r;
      continue;
    }
    sum = VecF{};
    for (int64_t kappa = 0; kappa < kappas; ++kappa) {
      const VecU words = load_u(dst + kappa * kTileBytes);
      const VecU even = round_bf16(from_bits(words << 16) * r), odd = round_bf16(from_bits(words & 0xffff0000u) * r);
      store_u(dst + kappa * kTileBytes, interleave_high(even, odd));
      sum = sum + from_bits(even) * from_bits(even);
      sum = sum + from_bits(odd) * from_bits(odd);
    }
    norm2[i] = sum_lanes(sum);
  }
  return finite;
}

// A packed row as fp32, with its norm factor.
static inline void unpack_row(const char* tiles, int64_t kappas, int64_t i, float factor, float* out) {
  const char* src = tiles + (i / 16) * kappas * kTileBytes + (i % 16) * 64;
  for (int64_t kappa = 0; kappa < kappas; ++kappa) {
    for (int64_t c = 0; c < 32; ++c) {
      uint16_t word;
      std::memcpy(&word, src + kappa * kTileBytes + c * 2, 2);
      out[kappa * 32 + c] = GDN_ISA_NS::bf16_to_f32(word) * factor;
    }
  }
}

// A column of the chunk's tokens for one head as fp32; rows past the end get 0.
static inline void load_column(const View& x, const Rows& rows, int64_t h, float* out) {
  const char* src = x.at(rows.batch, rows.token, h);
  const int64_t step = x.stride[1] * dtype_bytes(x.dtype);
  for (int64_t i = 0; i < rows.n; ++i) out[i] = load_scalar(src + i * step, x.dtype);
  for (int64_t i = rows.n; i < rows.pairs() * 32; ++i) out[i] = 0;
}

// g (log form, floored at -104) and beta of the chunk's tokens for one head; rows past the end get 0.
static inline void load_gates(const RuleProblem& p, const Rows& rows, int64_t h, const Scratch& s) {
  const int64_t n = rows.pairs() * 32;
  if (p.g.present()) {
    load_column(p.g, rows, h, s.g);
    float decay = 0, bias = 0;
    if (p.gate_form == GDN_GATE_RAW) {
      decay = -std::exp(load_scalar(p.A_log.at(h), p.A_log.dtype));
      if (p.dt_bias.present()) bias = load_scalar(p.dt_bias.at(h), p.dt_bias.dtype);
    }
    for (int64_t i = 0; i < n; i += 16) {
      VecF g = load(s.g + i);
      if (p.gate_form == GDN_GATE_LINEAR) g = log16(g);
      if (p.gate_form == GDN_GATE_RAW) g = softplus16(g + bias) * decay;
      store(s.g + i, g < -104.0f ? splat(-104.0f) : g);
    }
    for (int64_t i = rows.n; i < n; ++i) s.g[i] = 0;
  } else {
    std::memset(s.g, 0, static_cast<size_t>(n) * 4);
  }
  if (p.beta.present()) {
    load_column(p.beta, rows, h, s.beta);
    if (p.beta_form != GDN_BETA_VALUE) {
      const float factor = p.beta_form == GDN_BETA_SIGMOID2 ? 2.0f : 1.0f;
      for (int64_t i = 0; i < n; i += 16) store(s.beta + i, sigmoid16(load(s.beta + i)) * factor);
      for (int64_t i = 0; i < rows.n && p.round_beta; ++i) s.beta[i] = round_scalar(s.beta[i], p.beta.dtype);
    }
  } else {
    for (int64_t i = 0; i < rows.n; ++i) s.beta[i] = 1;
  }
  for (int64_t i = rows.n; i < n; ++i) s.beta[i] = 0;
}

// Cumulates the gates and says whether the chunk form may be used: everything finite, no decay difference that could
// overflow, and no token whose factor I - beta k k^T expands (1.02 leaves room for unit keys that were rounded to bf16,
// at beta = 2).
static inline bool prepare_gates(const Rows& rows, const Scratch& s) {
  double sum = 0, lowest = 0;
  bool fits = true;
  for (int64_t i = 0; i < rows.pairs() * 32; ++i) {
    sum += s.g[i];
    s.cum_g[i] = sum;
    s.gh[i] = static_cast<float>(sum);
    s.gl[i] = static_cast<float>(sum - static_cast<double>(s.gh[i]));
    fits = fits && sum - lowest <= 60.0 && std::fabs(1.0f - s.beta[i] * s.norm_k2[i]) <= 1.02f;
    lowest = std::min(lowest, sum);
  }
  return fits;
}

// Factors of the rows of K S, of Q S and of U' in the update, for a state sigma -> next_sigma.
static inline void row_factors(const Rows& rows, const Scratch& s, float scale, double sigma, double next_sigma) {
  const int64_t n = rows.pairs() * 32;
  const float last_h = s.gh[n - 1], last_l = s.gl[n - 1];
  const float f = static_cast<float>(sigma), inverse = static_cast<float>(1.0 / next_sigma);
  for (int64_t i = 0; i < n; i += 16) {
    const VecF gh = load(s.gh + i), gl = load(s.gl + i), rk = load(s.rk + i);
    const VecF decay = exp16(gh + gl) * f;
    store(s.fk + i, decay * rk);
    store(s.fo + i, decay * load(s.rq + i) * scale);
    store(s.fw + i, exp16((last_h - gh) + (last_l - gl)) * rk * inverse);
  }
}

// ks becomes R = beta (v - fk ks); rows past the end become 0.
static inline void residual(const RuleProblem& p, const Rows& rows, int64_t h, int64_t v_begin, const Scratch& s) {
  const bool contiguous = p.v.stride[3] == 1;
  for (int64_t i = 0; i < rows.pairs() * 32; ++i) {
    float* row = s.ks + (i / 16) * s.vt * kTileFloats + (i % 16) * 16;
    if (i >= rows.n) {
      for (int64_t vt = 0; vt < s.vt; ++vt) store(row + vt * kTileFloats, VecF{});
      continue;
    }
    const char* src = p.v.at(rows.batch, rows.token + i, h, v_begin);
    if (!contiguous) load_row(src, GDN_BF16, p.v.stride[3], s.vt * 16, s.io_row);
    const float beta = s.beta[i], decay = s.fk[i];
    for (int64_t vt = 0; vt < s.vt; ++vt) {
      const VecF v = contiguous ? load_bf16x16(src + vt * 32) : load(s.io_row + vt * 16);
      store(row + vt * kTileFloats, (v - load(row + vt * kTileFloats) * decay) * beta);
    }
  }
}

// o of rows [begin, end) of the chunk, two column tiles.
static inline void write_output(const RuleProblem& p, const Rows& rows, int64_t h, int64_t v_begin, const Scratch& s,
                                int64_t vt, int64_t begin, int64_t end) {
  const bool plain = p.o.stride[3] == 1 && p.o.dtype == GDN_BF16;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = ((i / 16) * s.vt + vt) * kTileFloats + (i % 16) * 16;
    char* dst = p.o.at(rows.batch, rows.token + i, h, v_begin + vt * 16);
    const float factor = s.fo[i];
    const VecF a = load(s.qs + at) * factor + load(s.pu + at);
    const VecF b = load(s.qs + at + kTileFloats) * factor + load(s.pu + at + kTileFloats);
    if (plain) {
      store_bf16x32(dst, a, b);
    } else {
      store(s.out_row, a);
      store(s.out_row + 16, b);
      store_row(s.out_row, dst, p.o.dtype, p.o.stride[3], 32);
    }
  }
}

static inline void zero_output(const RuleProblem& p, const Sequence& seq, int64_t h, int64_t v_begin,
                               const Scratch& s) {
  std::memset(s.out_row, 0, static_cast<size_t>(s.vt) * 64);
  for (int64_t t = 0; t < seq.len; ++t) {
    store_row(s.out_row, p.o.at(seq.batch, seq.begin + t, h, v_begin), p.o.dtype, p.o.stride[3], s.vt * 16);
  }
}

static inline void transpose_floats(float* tile) {
  VecU r[16];
  for (int i = 0; i < 16; ++i) r[i] = load_u(tile + i * 16);
  transpose16(r);
  for (int i = 0; i < 16; ++i) store_u(tile + i * 16, r[i]);
}

// Whole rows of the caller's state at a time (its hardware prefetch works on those), tiles on this side.
static inline void load_state(const View& state, int64_t slot, int64_t h, int64_t v_begin, const Scratch& s,
                              HeadState* head) {
  head->sigma = 1;
  head->packed = false;
  if (slot < 0) {
    std::memset(head->s, 0, static_cast<size_t>(s.kt * s.vt * kTileBytes));
    return;
  }
  const bool v_first = state.stride[2] == 1 && state.stride[3] != 1;
  const int64_t size = dtype_bytes(state.dtype), step = v_first ? 1 : state.stride[3];
  const int64_t num_outer = v_first ? s.vt : s.kt, num_inner = v_first ? s.kt : s.vt;
  for (int64_t outer = 0; outer < num_outer; ++outer) {
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t row = outer * 16 + i;
      const char* src = v_first ? state.at(slot, h, 0, v_begin + row) : state.at(slot, h, row, v_begin);
      for (int64_t inner = 0; inner < num_inner; ++inner) {
        float* dst = tile_at(head->s, v_first ? outer * s.kt + inner : inner * s.kt + outer) + i * 16;
        if (state.dtype == GDN_F32 && step == 1) {
          store_u(dst, loadu_u(src + inner * 64));
        } else {
          load_row(src + inner * 16 * step * size, state.dtype, step, 16, dst);
        }
      }
    }
    for (int64_t kt = 0; v_first && kt < s.kt; ++kt) transpose_floats(tile_at(head->s, outer * s.kt + kt));
  }
}

static inline void store_state(const View& state, int64_t slot, int64_t h, int64_t v_begin, const Scratch& s,
                               const HeadState& head) {
  alignas(64) float tiles[kMaxDim / 16 * kTileFloats];
  const float sigma = static_cast<float>(head.sigma);
  const bool v_first = state.stride[2] == 1 && state.stride[3] != 1;
  const int64_t size = dtype_bytes(state.dtype), step = v_first ? 1 : state.stride[3];
  const int64_t num_outer = v_first ? s.vt : s.kt, num_inner = v_first ? s.kt : s.vt;
  for (int64_t outer = 0; outer < num_outer; ++outer) {
    for (int64_t inner = 0; inner < num_inner; ++inner) {
      const float* src = tile_at(head.s, v_first ? outer * s.kt + inner : inner * s.kt + outer);
      float* dst = tile_at(tiles, inner);
      for (int64_t i = 0; i < kTileFloats; i += 16) store(dst + i, load(src + i) * sigma);
      if (v_first) transpose_floats(dst);
    }
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t row = outer * 16 + i;
      char* dst = v_first ? state.at(slot, h, 0, v_begin + row) : state.at(slot, h, row, v_begin);
      for (int64_t inner = 0; inner < num_inner; ++inner) {
        const float* src = tile_at(tiles, inner) + i * 16;
        if (state.dtype == GDN_F32 && step == 1) {
          storeu(reinterpret_cast<float*>(dst + inner * 64), load(src));
        } else {
          store_row(src, dst + inner * 16 * step * size, state.dtype, step, 16);
        }
      }
    }
  }
}

}  // namespace gdn::cpu::amx
