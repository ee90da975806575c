// SPDX-License-Identifier: MIT
// Shared by the chunk and the recurrent kernel of one ISA: gates, rows of q and k, panels of the state.
#pragma once
#include <cmath>

#include "cpu/isa/simd-inl.h"

namespace gdn::cpu::GDN_ISA_NS {

// Subnormals are flushed while a kernel runs: under strong decay the whole state passes through them, at about a
// hundred cycles per operation. The caller's mode comes back at the end.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(saved_ | 0x8040u); }
  ~FlushSubnormals() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (uint64_t{1} << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  FlushSubnormals() {}
  ~FlushSubnormals() {}

 private:
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;
};

HWY_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// View::at without its symbol: an inline function of another namespace compiled with this ISA's flags could be the
// copy that the linker keeps for everyone.
HWY_INLINE int64_t element_bytes(const View& x) { return x.dtype == GDN_F32 ? 4 : 2; }
HWY_INLINE char* at(const View& x, int64_t i0, int64_t i1, int64_t i2, int64_t i3 = 0) {
  return x.data + (i0 * x.stride[0] + i1 * x.stride[1] + i2 * x.stride[2] + i3 * x.stride[3]) * element_bytes(x);
}
HWY_INLINE bool present(const View& x) { return x.ndim >= 0; }

// A RuleItem's heads are ordinals in key-head order, so that the value heads of one key head are adjacent whatever the
// head map: ordinal / r is the key head, r = Hv / Hk.
HWY_INLINE int64_t key_head_of(const RuleProblem& p, int64_t ordinal) { return ordinal / (p.Hv / p.Hk); }
HWY_INLINE int64_t value_head_of(const RuleProblem& p, int64_t ordinal) {
  const int64_t r = p.Hv / p.Hk;
  return p.head_map == GDN_HEADS_TILED ? ordinal % r * p.Hk + ordinal / r : ordinal;
}

// -- gates of up to kMaxTokens tokens of one value head
inline constexpr int64_t kMaxTokens = 16;
using F64Tag = hn::ScalableTag<double>;
using F64Vec = hn::Vec<F64Tag>;
inline constexpr int64_t kLanes64 = HWY_MAX_BYTES / 8;

// Highway's Exp and Log1p make a number of NaN: a bad gate must show in the result.
HWY_INLINE F64Vec keep_nan(F64Vec x, F64Vec y) { return hn::IfThenElse(hn::IsNaN(x), x, y); }
// e^g below this is 0 in fp32; without the clamp -inf would turn sums into NaN. A NaN stays NaN.
HWY_INLINE F64Vec clamped_exp(F64Vec g) {
  const F64Tag d;
  const auto low = hn::Set(d, -104.0);
  return keep_nan(g, hn::Exp(d, hn::IfThenElse(hn::Lt(g, low), low, g)));
}
HWY_INLINE F64Vec softplus(F64Vec x) {
  const F64Tag d;
  const auto threshold = hn::Set(d, 20.0);
  const auto big = hn::Gt(x, threshold);
  return keep_nan(x, hn::IfThenElse(big, x, hn::Log1p(d, hn::Exp(d, hn::IfThenElse(big, threshold, x)))));
}

// alpha in double: the kernels multiply several of them before they round.
static inline void load_gates(const RuleProblem& p, int64_t batch, int64_t token, int64_t n, int64_t head,
                              double* HWY_RESTRICT alpha, float* HWY_RESTRICT beta) {
  const F64Tag d;
  HWY_ALIGN double x[kMaxTokens] = {};
  if (!present(p.g)) {
    for (int64_t i = 0; i < n; ++i) alpha[i] = 1.0;
  } else {
    for (int64_t i = 0; i < n; ++i) {
      x[i] = static_cast<double>(load_scalar(at(p.g, batch, token + i, head), p.g.dtype));
    }
    if (p.gate_form == GDN_GATE_RAW) {
      const double a_log = static_cast<double>(load_scalar(at(p.A_log, head, 0, 0), p.A_log.dtype));
      const double bias =
          present(p.dt_bias) ? static_cast<double>(load_scalar(at(p.dt_bias, head, 0, 0), p.dt_bias.dtype)) : 0.0;
      const auto rate = hn::Set(d, -std::exp(a_log));
      for (int64_t i = 0; i < n; i += kLanes64) {
        hn::Store(hn::Mul(rate, softplus(hn::Add(hn::Load(d, x + i), hn::Set(d, bias)))), d, x + i);
      }
    }
    if (p.gate_form == GDN_GATE_LINEAR) {
      for (int64_t i = 0; i < n; ++i) alpha[i] = x[i];
    } else {
      for (int64_t i = 0; i < n; i += kLanes64) hn::Store(clamped_exp(hn::Load(d, x + i)), d, x + i);
      for (int64_t i = 0; i < n; ++i) alpha[i] = x[i];
    }
  }
  if (!present(p.beta)) {
    for (int64_t i = 0; i < n; ++i) beta[i] = 1.0f;
    return;
  }
  for (int64_t i = 0; i < n; ++i) beta[i] = load_scalar(at(p.beta, batch, token + i, head), p.beta.dtype);
  if (p.beta_form == GDN_BETA_VALUE) return;
  const auto top = hn::Set(d, p.beta_form == GDN_BETA_SIGMOID2 ? 2.0 : 1.0);
  for (int64_t i = 0; i < n; ++i) x[i] = static_cast<double>(beta[i]);
  for (int64_t i = 0; i < n; i += kLanes64) {
    const auto b = hn::Load(d, x + i);
    // exp of a non-positive number only, so that it cannot overflow.
    const auto e = hn::Exp(d, hn::Neg(hn::Abs(b)));
    const auto numerator = hn::IfThenElse(hn::Lt(b, hn::Zero(d)), e, hn::Set(d, 1.0));
    hn::Store(keep_nan(b, hn::Div(hn::Mul(top, numerator), hn::Add(hn::Set(d, 1.0), e))), d, x + i);
  }
  for (int64_t i = 0; i < n; ++i) {
    beta[i] = static_cast<float>(x[i]);
    if (p.round_beta) beta[i] = round_scalar(beta[i], p.beta.dtype);
  }
}

// A decay applied as fp32 factors, without drift: what rounding a factor lost is part of the next one. (A constant
// gate of -1e-3 would otherwise be off by the same 3e-8 every time, a thousand times over.)
HWY_INLINE float round_decay(double factor, double* HWY_RESTRICT carry) {
  const double wanted = factor * *carry;
  const float applied = static_cast<float>(wanted);
  const bool normal = applied > 1e-30f && applied < 1e30f;
  *carry = normal ? wanted / static_cast<double>(applied) : 1.0;
  return applied;
}

// -- rows of q and k: fp32, zero-padded to `padded` elements (a multiple of kLanes), L2-normalised if asked for
static inline void load_key_row(const RuleProblem& p, const View& x, int64_t batch, int64_t token, int64_t key_head,
                                int64_t padded, float* HWY_RESTRICT dst) {
  const F32Tag d;
  load_row(at(x, batch, token, key_head), x.dtype, x.stride[3], p.K, dst);
  for (int64_t i = p.K; i < padded; ++i) dst[i] = 0.0f;
  if (!p.qk_l2norm) return;
  auto sum = hn::Zero(d);
  for (int64_t i = 0; i < padded; i += kLanes) {
    const auto v = hn::LoadU(d, dst + i);
    sum = hn::MulAdd(v, v, sum);
  }
  const float factor = 1.0f / std::sqrt(hn::GetLane(hn::SumOfLanes(d, sum)) + p.l2norm_eps);
  const auto f = hn::Set(d, factor);
  for (int64_t i = 0; i < padded; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, dst + i), f), d, dst + i);
  if (p.round_qk && x.dtype != GDN_F32) {
    for (int64_t i = 0; i < p.K; ++i) dst[i] = round_scalar(dst[i], x.dtype);
  }
}

// dst[c][r] = src[r][c] for r < rows, c < cols, both rounded up to 4 by the caller's padding.
static inline void transpose(const float* HWY_RESTRICT src, int64_t src_stride, int64_t rows, int64_t cols,
                             float* HWY_RESTRICT dst, int64_t dst_stride) {
  const hn::FixedTag<float, 4> d;
  const hn::Repartition<double, decltype(d)> d64;
  for (int64_t r = 0; r < rows; r += 4) {
    const float* HWY_RESTRICT s = src + r * src_stride;
    for (int64_t c = 0; c < cols; c += 4) {
      const auto a0 = hn::LoadU(d, s + c), a1 = hn::LoadU(d, s + src_stride + c);
      const auto a2 = hn::LoadU(d, s + 2 * src_stride + c), a3 = hn::LoadU(d, s + 3 * src_stride + c);
      const auto b0 = hn::BitCast(d64, hn::InterleaveLower(d, a0, a1));  // 00 10 01 11
      const auto b1 = hn::BitCast(d64, hn::InterleaveLower(d, a2, a3));
      const auto b2 = hn::BitCast(d64, hn::InterleaveUpper(d, a0, a1));
      const auto b3 = hn::BitCast(d64, hn::InterleaveUpper(d, a2, a3));
      float* HWY_RESTRICT t = dst + c * dst_stride + r;
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, b0, b1)), d, t);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, b0, b1)), d, t + dst_stride);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, b2, b3)), d, t + 2 * dst_stride);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, b2, b3)), d, t + 3 * dst_stride);
    }
  }
}

// -- panels of one head's state. `base` points at S[0][first column], strides in elements.
struct StateRef {
  char* base;
  int32_t dtype;
  int64_t stride_k, stride_v;
};
HWY_INLINE StateRef state_ref(const View& s, int64_t slot, int64_t head, int64_t v_begin) {
  return {at(s, slot, head, 0, v_begin), s.dtype, s.stride[2], s.stride[3]};
}
HWY_INLINE StateRef snapshot_ref(const View& s, int64_t seq, int64_t token, int64_t head, int64_t v_begin) {
  return {at(s, seq, token, head) + v_begin * s.stride[4] * element_bytes(s), s.dtype, s.stride[3], s.stride[4]};
}

// outer x inner elements to a zero-padded fp32 block of outer_padded x inner_padded.
template <int32_t kDtype>
static inline void load_block_t(const StateRef& s, int64_t outer_stride, int64_t inner_stride, int64_t outer,
                                int64_t inner, float* HWY_RESTRICT dst, int64_t inner_padded) {
  constexpr int64_t kBytes = kDtype == GDN_F32 ? 4 : 2;
  for (int64_t i = 0; i < outer; ++i) {
    float* HWY_RESTRICT row = dst + i * inner_padded;
    load_row_t<kDtype>(s.base + i * outer_stride * kBytes, inner_stride, inner, row);
    for (int64_t j = inner; j < inner_padded; ++j) row[j] = 0.0f;
  }
}
static inline void load_block(const StateRef& s, int64_t outer_stride, int64_t inner_stride, int64_t outer,
                              int64_t inner, float* HWY_RESTRICT dst, int64_t outer_padded, int64_t inner_padded) {
  if (s.dtype == GDN_F32) {
    load_block_t<GDN_F32>(s, outer_stride, inner_stride, outer, inner, dst, inner_padded);
  } else if (s.dtype == GDN_BF16) {
    load_block_t<GDN_BF16>(s, outer_stride, inner_stride, outer, inner, dst, inner_padded);
  } else {
    load_block_t<GDN_F16>(s, outer_stride, inner_stride, outer, inner, dst, inner_padded);
  }
  for (int64_t i = outer * inner_padded; i < outer_padded * inner_padded; ++i) dst[i] = 0.0f;
}
template <int32_t kDtype>
static inline void store_block_t(const StateRef& s, int64_t outer_stride, int64_t inner_stride, int64_t outer,
                                 int64_t inner, const float* HWY_RESTRICT src, int64_t inner_padded) {
  constexpr int64_t kBytes = kDtype == GDN_F32 ? 4 : 2;
  for (int64_t i = 0; i < outer; ++i) {
    store_row_t<kDtype>(src + i * inner_padded, s.base + i * outer_stride * kBytes, inner_stride, inner);
  }
}
static inline void store_block(const StateRef& s, int64_t outer_stride, int64_t inner_stride, int64_t outer,
                               int64_t inner, const float* HWY_RESTRICT src, int64_t inner_padded) {
  if (s.dtype == GDN_F32) {
    store_block_t<GDN_F32>(s, outer_stride, inner_stride, outer, inner, src, inner_padded);
  } else if (s.dtype == GDN_BF16) {
    store_block_t<GDN_BF16>(s, outer_stride, inner_stride, outer, inner, src, inner_padded);
  } else {
    store_block_t<GDN_F16>(s, outer_stride, inner_stride, outer, inner, src, inner_padded);
  }
}

// Column form: panel[k][c], `columns` of them padded to `width`, K padded to `rows` (both multiples of 4).
// turn: width * rows floats, used where the state is contiguous along K.
static inline void load_columns(const StateRef& s, int64_t K, int64_t columns, float* HWY_RESTRICT panel, int64_t rows,
                                int64_t width, float* HWY_RESTRICT turn) {
  if (s.stride_k == 1 && s.stride_v != 1) {
    load_block(s, s.stride_v, s.stride_k, columns, K, turn, width, rows);
    transpose(turn, rows, width, rows, panel, width);
  } else {
    load_block(s, s.stride_k, s.stride_v, K, columns, panel, rows, width);
  }
}
static inline void store_columns(const StateRef& s, int64_t K, int64_t columns, const float* HWY_RESTRICT panel,
                                 int64_t rows, int64_t width, float* HWY_RESTRICT turn) {
  if (s.stride_k == 1 && s.stride_v != 1) {
    transpose(panel, width, rows, width, turn, rows);
    store_block(s, s.stride_v, s.stride_k, columns, K, turn, rows);
  } else {
    store_block(s, s.stride_k, s.stride_v, K, columns, panel, width);
  }
}

// The slot that the state after token t (0-based, relative) of a sequence is checkpointed in, or -1.
HWY_INLINE int64_t checkpoint_slot(const RuleProblem& p, const Sequence& seq, int64_t t) {
  if (p.checkpoint_every == 0 || (t + 1) % p.checkpoint_every != 0) return -1;
  return p.checkpoint_slots[static_cast<size_t>(seq.checkpoint_begin + (t + 1) / p.checkpoint_every - 1)];
}

// o of a null sequence.
static inline void zero_output(const RuleProblem& p, const Sequence& seq, int64_t head, int64_t v_begin,
                               int64_t v_end) {
  for (int64_t t = 0; t < seq.len; ++t) {
    for (int64_t j = v_begin; j < v_end; ++j) {
      std::memset(at(p.o, seq.batch, seq.begin + t, head, j), 0, static_cast<size_t>(element_bytes(p.o)));
    }
  }
}

}  // namespace gdn::cpu::GDN_ISA_NS
