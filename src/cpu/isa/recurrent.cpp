// SPDX-License-Identifier: MIT
// Decode and multi-token verify: the recurrence token by token, with the state read once and written once per token.
//
//   P = S^T k, R = S^T q                       (pass 1, one read of S)
//   delta = beta (v - alpha P)
//   o = scale (alpha R + (k . q) delta)        (so q needs no second pass over the new state)
//   S = alpha S + k delta^T                    (pass 2; the panel is in L1 by then)
//
// A panel is a set of V columns: 4 vectors wide where V is the contiguous dimension (K-first), kColumns rows of K where
// K is (V-first); either is at most 16-32 KiB at K = 128. One token with one place to write goes straight from the
// caller's source slot to the destination slot, converting 16-bit states on the way. Anything else (several tokens,
// snapshots, unusual strides) runs on an fp32 copy of the panel, which is also what makes several tokens cost little
// more than one: the state is read from memory once.
#include "cpu/isa/kernels.h"
#include "cpu/isa/rule_inputs-inl.h"
#include "cpu/isa/simd-inl.h"

namespace gdn::cpu::GDN_ISA_NS {
namespace {

constexpr int64_t kVecs = 4;
constexpr int64_t kWide = kVecs * kLanes;  // columns of a K-first register tile
constexpr int64_t kColumns = 64;           // columns of a panel in scratch; a multiple of kWide on every ISA
static_assert(kColumns % kWide == 0);
constexpr int64_t kTokens = 16;  // tokens whose keys and gates are prepared together
constexpr int64_t kMaxK = 512;
constexpr int32_t kNoState = 0;  // destination dtype when the new state is not wanted

struct Token {
  float alpha, beta, kq;
};

struct Work {
  alignas(64) float k[kTokens][kMaxK];
  alignas(64) float q[kTokens][kMaxK];
  alignas(64) float row[kMaxK];
  alignas(64) float v[kColumns], p[kColumns], r[kColumns], delta[kColumns], out[kColumns];
  float kq[kTokens];
};

// A panel in memory: line i (K-first: key row i, V-first: column i) starts at data + i * pitch bytes and is contiguous.
struct Lines {
  char* data;
  int64_t pitch;
};

template <int32_t kDtype>
constexpr int64_t kElem = kDtype == GDN_F32 ? 4 : 2;

// delta and o from p = S^T k and r = S^T q.
HWY_INLINE void finish_columns(const Token& t, float scale, int64_t n, Work* w) {
  const F32Tag d;
  const F32Vec alpha = hn::Set(d, t.alpha), beta = hn::Set(d, t.beta), kq = hn::Set(d, t.kq), s = hn::Set(d, scale);
  for (int64_t j = 0; j < n; j += kLanes) {  // the arrays are whole vectors long
    const F32Vec delta = hn::Mul(beta, hn::NegMulAdd(alpha, hn::Load(d, w->p + j), hn::Load(d, w->v + j)));
    hn::Store(delta, d, w->delta + j);
    hn::Store(hn::Mul(s, hn::MulAdd(kq, delta, hn::Mul(alpha, hn::Load(d, w->r + j)))), d, w->out + j);
  }
}

template <int32_t kSrc, int kN>
HWY_INLINE void kfirst_read(const Lines& src, int64_t c, int64_t k_dim, const float* HWY_RESTRICT k,
                            const float* HWY_RESTRICT q, Work* w) {
  const F32Tag d;
  F32Vec p[kN], r[kN];
  for (int i = 0; i < kN; ++i) p[i] = r[i] = hn::Zero(d);
  const char* row = src.data + c * kElem<kSrc>;
  for (int64_t i = 0; i < k_dim; ++i, row += src.pitch) {
    const F32Vec ki = hn::Set(d, k[i]), qi = hn::Set(d, q[i]);
    for (int j = 0; j < kN; ++j) {
      const F32Vec s = load_vec<kSrc>(row + j * kLanes * kElem<kSrc>);
      p[j] = hn::MulAdd(s, ki, p[j]);
      r[j] = hn::MulAdd(s, qi, r[j]);
    }
  }
  for (int j = 0; j < kN; ++j) {
    hn::Store(p[j], d, w->p + c + j * kLanes);
    hn::Store(r[j], d, w->r + c + j * kLanes);
  }
}
template <int32_t kSrc, int32_t kDst, int kN>
HWY_INLINE void kfirst_write(const Lines& src, const Lines& dst, int64_t c, int64_t k_dim, const float* HWY_RESTRICT k,
                             float alpha_, int64_t prefetch, const Work* w) {
  const F32Tag d;
  const F32Vec alpha = hn::Set(d, alpha_);
  F32Vec delta[kN];
  for (int j = 0; j < kN; ++j) delta[j] = hn::Load(d, w->delta + c + j * kLanes);
  const char* from = src.data + c * kElem<kSrc>;
  char* to = dst.data + c * kElem<kDst>;
  for (int64_t i = 0; i < k_dim; ++i, from += src.pitch, to += dst.pitch) {
    const F32Vec ki = hn::Set(d, k[i]);
    // The next columns' lines: rows are too far apart for the hardware to see the pattern.
    for (int64_t b = 0; b < kN * kLanes * kElem<kSrc>; b += 64) __builtin_prefetch(from + prefetch + b);
    for (int j = 0; j < kN; ++j) {
      const F32Vec s = load_vec<kSrc>(from + j * kLanes * kElem<kSrc>);
      store_vec<kDst>(hn::MulAdd(ki, delta[j], hn::Mul(alpha, s)), to + j * kLanes * kElem<kDst>);
    }
  }
}

// One token on the K-first panel of `width` columns.
template <int32_t kSrc, int32_t kDst>
void kfirst_step(const Lines& src, const Lines& dst, int64_t k_dim, int64_t width, const float* k, const float* q,
                 const Token& t, float scale, Work* w) {
  const int64_t whole = width / kLanes * kLanes;
  for (int64_t c = 0; c < whole;) {
    const bool wide = c + kWide <= whole;
    if (wide) {
      kfirst_read<kSrc, kVecs>(src, c, k_dim, k, q, w);
    } else {
      kfirst_read<kSrc, 1>(src, c, k_dim, k, q, w);
    }
    c += wide ? kWide : kLanes;
  }
  for (int64_t j = whole; j < width; ++j) {
    float p = 0, r = 0;
    for (int64_t i = 0; i < k_dim; ++i) {
      const float s = load_scalar(src.data + i * src.pitch + j * kElem<kSrc>, kSrc);
      p += s * k[i];
      r += s * q[i];
    }
    w->p[j] = p;
    w->r[j] = r;
  }
  finish_columns(t, scale, width, w);
  if constexpr (kDst != kNoState) {
    for (int64_t c = 0; c < whole;) {
      const bool wide = c + kWide <= whole;
      if (wide) {
        kfirst_write<kSrc, kDst, kVecs>(src, dst, c, k_dim, k, t.alpha, kColumns * kElem<kSrc>, w);
      } else {
        kfirst_write<kSrc, kDst, 1>(src, dst, c, k_dim, k, t.alpha, kColumns * kElem<kSrc>, w);
      }
      c += wide ? kWide : kLanes;
    }
    for (int64_t j = whole; j < width; ++j) {
      for (int64_t i = 0; i < k_dim; ++i) {
        const float s = load_scalar(src.data + i * src.pitch + j * kElem<kSrc>, kSrc);
        store_scalar(t.alpha * s + k[i] * w->delta[j], dst.data + i * dst.pitch + j * kElem<kDst>, kDst);
      }
    }
  }
}

template <int32_t kSrc, int kN>
HWY_INLINE void vfirst_read(const char* line, int64_t pitch, int64_t k_dim, const float* HWY_RESTRICT k,
                            const float* HWY_RESTRICT q, float* HWY_RESTRICT p_out, float* HWY_RESTRICT r_out) {
  const F32Tag d;
  F32Vec p[kN], r[kN];
  for (int j = 0; j < kN; ++j) p[j] = r[j] = hn::Zero(d);
  int64_t i = 0;
  for (; i + kLanes <= k_dim; i += kLanes) {
    const F32Vec ki = hn::Load(d, k + i), qi = hn::Load(d, q + i);
    for (int j = 0; j < kN; ++j) {
      const F32Vec s = load_vec<kSrc>(line + j * pitch + i * kElem<kSrc>);
      p[j] = hn::MulAdd(s, ki, p[j]);
      r[j] = hn::MulAdd(s, qi, r[j]);
    }
  }
  for (int j = 0; j < kN; ++j) {
    p_out[j] = hn::GetLane(hn::SumOfLanes(d, p[j]));
    r_out[j] = hn::GetLane(hn::SumOfLanes(d, r[j]));
    for (int64_t e = i; e < k_dim; ++e) {
      const float s = load_scalar(line + j * pitch + e * kElem<kSrc>, kSrc);
      p_out[j] += s * k[e];
      r_out[j] += s * q[e];
    }
  }
}
template <int32_t kSrc, int32_t kDst>
HWY_INLINE void vfirst_write(const char* from, char* to, int64_t k_dim, const float* HWY_RESTRICT k, float alpha_,
                             float delta_) {
  const F32Tag d;
  const F32Vec alpha = hn::Set(d, alpha_), delta = hn::Set(d, delta_);
  int64_t i = 0;
  for (; i + kLanes <= k_dim; i += kLanes) {
    const F32Vec s = load_vec<kSrc>(from + i * kElem<kSrc>);
    store_vec<kDst>(hn::MulAdd(hn::Load(d, k + i), delta, hn::Mul(alpha, s)), to + i * kElem<kDst>);
  }
  for (; i < k_dim; ++i) {
    const float s = load_scalar(from + i * kElem<kSrc>, kSrc);
    store_scalar(alpha_ * s + k[i] * delta_, to + i * kElem<kDst>, kDst);
  }
}

// One token on the V-first panel of `width` columns (lines).
template <int32_t kSrc, int32_t kDst>
void vfirst_step(const Lines& src, const Lines& dst, int64_t k_dim, int64_t width, const float* k, const float* q,
                 const Token& t, float scale, Work* w) {
  int64_t j = 0;
  for (; j + 4 <= width; j += 4)
    vfirst_read<kSrc, 4>(src.data + j * src.pitch, src.pitch, k_dim, k, q, w->p + j, w->r + j);
  for (; j < width; ++j) vfirst_read<kSrc, 1>(src.data + j * src.pitch, src.pitch, k_dim, k, q, w->p + j, w->r + j);
  finish_columns(t, scale, width, w);
  if constexpr (kDst != kNoState) {
    for (j = 0; j < width; ++j) {
      vfirst_write<kSrc, kDst>(src.data + j * src.pitch, dst.data + j * dst.pitch, k_dim, k, t.alpha, w->delta[j]);
    }
  }
}

using StepFn = void (*)(const Lines&, const Lines&, int64_t, int64_t, const float*, const float*, const Token&, float,
                        Work*);

template <int32_t kSrc>
StepFn step_to(bool v_first, int32_t dst) {
  switch (dst) {
    case GDN_F32:
      return v_first ? vfirst_step<kSrc, GDN_F32> : kfirst_step<kSrc, GDN_F32>;
    case GDN_BF16:
      return v_first ? vfirst_step<kSrc, GDN_BF16> : kfirst_step<kSrc, GDN_BF16>;
    case GDN_F16:
      return v_first ? vfirst_step<kSrc, GDN_F16> : kfirst_step<kSrc, GDN_F16>;
    default:
      return v_first ? vfirst_step<kSrc, kNoState> : kfirst_step<kSrc, kNoState>;
  }
}
StepFn step_function(bool v_first, int32_t src, int32_t dst) {
  if (src == GDN_BF16) return step_to<GDN_BF16>(v_first, dst);
  if (src == GDN_F16) return step_to<GDN_F16>(v_first, dst);
  return step_to<GDN_F32>(v_first, dst);
}

bool is_v_first(const View& state) { return state.stride[2] == 1 && state.stride[3] != 1; }
// The kernels take the caller's memory as it is: lines contiguous along V (K-first) or K (V-first).
bool is_direct(const View& state, bool v_first) { return v_first ? state.stride[2] == 1 : state.stride[3] == 1; }
Lines lines_of(const View& state, int64_t slot, int64_t head, int64_t v, bool v_first) {
  return Lines{state.at(slot, head, 0, v), state.stride[v_first ? 3 : 2] * dtype_bytes(state.dtype)};
}

// Which of the two orders the fp32 panels (and so the kernels) use.
bool prefers_v_first(const RuleProblem& p) {
  if (p.initial_state.present()) return is_v_first(p.initial_state);
  if (p.final_state.present()) return is_v_first(p.final_state);
  return p.snapshots.present() && p.snapshots.stride[3] == 1 && p.snapshots.stride[4] != 1;
}

// One sequence's row of the snapshots as a state view whose slot is the token.
View snapshots_of(const RuleProblem& p, int64_t seq) {
  View s = p.snapshots;
  s.data = p.snapshots.at(seq);
  s.ndim = 4;
  for (int i = 0; i < 4; ++i) {
    s.shape[i] = p.snapshots.shape[i + 1];
    s.stride[i] = p.snapshots.stride[i + 1];
  }
  return s;
}

class Item {
 public:
  Item(const RuleProblem& p, const RuleItem& item, void* scratch)
      : p_(p),
        item_(item),
        seq_(p.seqs[static_cast<size_t>(item.seq)]),
        w_(static_cast<Work*>(scratch)),
        panels_(reinterpret_cast<float*>(static_cast<char*>(scratch) + sizeof(Work))),
        v_first_(prefers_v_first(p)) {}

  void run() {
    if (seq_.len == 0) return copy_states();
    for (int64_t t = 0; t < seq_.len; t += kTokens) {
      const int64_t n = seq_.len - t < kTokens ? seq_.len - t : kTokens;
      const int64_t group = p_.Hv / p_.Hk;
      int64_t key_head = -1;
      for (int64_t h = item_.head_begin; h < item_.head_end; ++h) {
        if (h / group != key_head) load_keys(key_head = h / group, t, n);
        run_head(h, t, n);
      }
    }
  }

 private:
  void load_keys(int64_t key_head, int64_t begin, int64_t n) {
    const int64_t k_pad = (p_.K + 15) / 16 * 16;
    const F32Tag d;
    for (int64_t t = 0; t < n; ++t) {
      load_key_row(p_, p_.k, seq_.batch, seq_.begin + begin + t, key_head, k_pad, w_->k[t]);
      load_key_row(p_, p_.q, seq_.batch, seq_.begin + begin + t, key_head, k_pad, w_->q[t]);
      F32Vec sum = hn::Zero(d);
      for (int64_t i = 0; i < k_pad; i += kLanes)
        sum = hn::MulAdd(hn::Load(d, w_->k[t] + i), hn::Load(d, w_->q[t] + i), sum);
      w_->kq[t] = hn::GetLane(hn::SumOfLanes(d, sum));
    }
  }

  // Is the state after token t (of the whole sequence) kept anywhere but in the final state?
  bool kept(int64_t t) const {
    if (p_.snapshots.present()) return true;
    if (token_slot(t) >= 0) return true;
    return p_.checkpoint_every > 0 && (t + 1) % p_.checkpoint_every == 0;
  }
  int64_t token_slot(int64_t t) const {
    if (p_.token_slot_columns == 0 || !p_.final_state.present()) return -1;
    return p_.token_slots[static_cast<size_t>(item_.seq * p_.token_slot_columns + t)];
  }

  void run_head(int64_t h, int64_t begin, int64_t n) {
    Token tokens[kTokens];
    const int64_t head = head_of(p_, h);
    for (int64_t t = 0; t < n; ++t) {
      const int64_t token = seq_.begin + begin + t;
      tokens[t] = {static_cast<float>(load_alpha(p_, seq_.batch, token, head)), load_beta(p_, seq_.batch, token, head),
                   w_->kq[t]};
    }
    const int64_t panels = (item_.v_end - item_.v_begin + kColumns - 1) / kColumns;
    for (int64_t c = 0; c < panels; ++c) {
      const int64_t v = item_.v_begin + c * kColumns;
      const int64_t width = v + kColumns <= item_.v_end ? kColumns : item_.v_end - v;
      if (seq_.len == 1 && run_direct(head, v, width, tokens[0])) continue;
      // With one block of tokens every panel is done when it is left, so they share the space of one.
      const int64_t slot = seq_.len <= kTokens ? 0 : (h - item_.head_begin) * panels + c;
      run_panel(head, v, width, tokens, begin, n, panels_ + slot * kColumns * p_.K);
    }
  }

  void load_v(int64_t head, int64_t v, int64_t width, int64_t token) {
    load_row(p_.v.at(seq_.batch, token, head, v), p_.v.dtype, p_.v.stride[3], width, w_->v);
  }
  void store_out(int64_t head, int64_t v, int64_t width, int64_t token) {
    store_row(w_->out, p_.o.at(seq_.batch, token, head, v), p_.o.dtype, p_.o.stride[3], width);
  }

  // One token, one source, at most one destination, all in place.
  bool run_direct(int64_t head, int64_t v, int64_t width, const Token& token) {
    if (seq_.read_slot < 0 || p_.snapshots.present() || p_.checkpoint_every > 0) return false;
    const int64_t slot = p_.token_slot_columns > 0 ? token_slot(0) : seq_.write_slot;
    if (!is_direct(p_.initial_state, v_first_) || (slot >= 0 && !is_direct(p_.final_state, v_first_))) return false;
    const Lines src = lines_of(p_.initial_state, seq_.read_slot, head, v, v_first_);
    const Lines dst = slot >= 0 ? lines_of(p_.final_state, slot, head, v, v_first_) : src;
    load_v(head, v, width, seq_.begin);
    step_function(v_first_, p_.initial_state.dtype, slot >= 0 ? p_.final_state.dtype : kNoState)(
        src, dst, p_.K, width, w_->k[0], w_->q[0], token, static_cast<float>(p_.scale), w_);
    store_out(head, v, width, seq_.begin);
    return true;
  }

  // fp32 panels: [K][kColumns] K-first, [kColumns][K] V-first.
  Lines panel_lines(float* s) const { return Lines{reinterpret_cast<char*>(s), (v_first_ ? p_.K : kColumns) * 4}; }
  void load_panel(const View& state, int64_t slot, int64_t head, int64_t v, int64_t width, float* s) {
    if (v_first_) {
      for (int64_t c = 0; c < width; ++c)
        load_row(state.at(slot, head, 0, v + c), state.dtype, state.stride[2], p_.K, s + c * p_.K);
    } else {
      load_state(state, slot, head, p_.K, v, width, kColumns, s, w_->row);
    }
  }
  void store_panel(const View& state, int64_t slot, int64_t head, int64_t v, int64_t width, const float* s) {
    if (v_first_) {
      for (int64_t c = 0; c < width; ++c)
        store_row(s + c * p_.K, state.at(slot, head, 0, v + c), state.dtype, state.stride[2], p_.K);
    } else {
      store_state(state, slot, head, p_.K, v, width, kColumns, s, w_->row);
    }
  }
  void start_panel(int64_t head, int64_t v, int64_t width, float* s) {
    if (seq_.read_slot >= 0) {
      load_panel(p_.initial_state, seq_.read_slot, head, v, width, s);
    } else {
      std::memset(s, 0, static_cast<size_t>(kColumns * p_.K) * 4);
    }
  }

  void run_panel(int64_t head, int64_t v, int64_t width, const Token* tokens, int64_t begin, int64_t n, float* s) {
    if (begin == 0) start_panel(head, v, width, s);
    const Lines lines = panel_lines(s);
    const StepFn step = step_function(v_first_, GDN_F32, GDN_F32);
    for (int64_t t = 0; t < n; ++t) {
      const int64_t token = seq_.begin + begin + t;
      load_v(head, v, width, token);
      step(lines, lines, p_.K, width, w_->k[t], w_->q[t], tokens[t], static_cast<float>(p_.scale), w_);
      store_out(head, v, width, token);
      if (kept(begin + t)) keep(begin + t, head, v, width, s);
    }
    if (begin + n == seq_.len && seq_.write_slot >= 0) store_panel(p_.final_state, seq_.write_slot, head, v, width, s);
  }

  void keep(int64_t t, int64_t head, int64_t v, int64_t width, const float* s) {
    if (const int64_t slot = token_slot(t); slot >= 0) store_panel(p_.final_state, slot, head, v, width, s);
    if (p_.snapshots.present()) store_panel(snapshots_of(p_, item_.seq), t, head, v, width, s);
    if (p_.checkpoint_every > 0 && (t + 1) % p_.checkpoint_every == 0) {
      const int64_t entry = seq_.checkpoint_begin + (t + 1) / p_.checkpoint_every - 1;
      const int64_t slot = p_.checkpoint_slots[static_cast<size_t>(entry)];
      if (slot >= 0) store_panel(p_.checkpoints, slot, head, v, width, s);
    }
  }

  // An empty sequence: its final state is its initial state.
  void copy_states() {
    if (seq_.write_slot < 0) return;
    for (int64_t h = item_.head_begin; h < item_.head_end; ++h) {
      for (int64_t v = item_.v_begin; v < item_.v_end; v += kColumns) {
        const int64_t width = v + kColumns <= item_.v_end ? kColumns : item_.v_end - v;
        start_panel(head_of(p_, h), v, width, panels_);
        store_panel(p_.final_state, seq_.write_slot, head_of(p_, h), v, width, panels_);
      }
    }
  }

  const RuleProblem& p_;
  const RuleItem& item_;
  const Sequence& seq_;
  Work* const w_;
  float* const panels_;
  const bool v_first_;
};

}  // namespace

int64_t recurrent_scratch(const RuleProblem& p, const RuleItem& item) {
  const int64_t panels =
      p.seqs[static_cast<size_t>(item.seq)].len <= kTokens
          ? 1
          : (item.head_end - item.head_begin) * ((item.v_end - item.v_begin + kColumns - 1) / kColumns);
  return static_cast<int64_t>(sizeof(Work)) + panels * kColumns * p.K * 4;
}

void recurrent_item(const RuleProblem& p, const RuleItem& item, void* scratch) {
  const Sequence& seq = p.seqs[static_cast<size_t>(item.seq)];
  if (seq.is_null) return zero_output(p, seq, item);
  const FlushDenormals flush;
  Item(p, item, scratch).run();
}

}  // namespace gdn::cpu::GDN_ISA_NS
