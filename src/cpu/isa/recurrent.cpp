// SPDX-License-Identifier: MIT
// Decode, multi-token verify, and the token loop for anything else: one work item is one sequence, value heads of one
// key head after another, a range of V columns.
//
// Per token, with S the state before it: P = S^T k, R = S^T q in one read of S, then
//   delta = beta (v - alpha P),  o = scale (alpha R + (k.q) delta),  S <- alpha S + k delta^T   (one write of S).
// S is taken kPanel columns at a time, so that the second use finds it in L1. Two forms: along V where that is
// contiguous (column form, K-first states) and along K where that is (row form, V-first states). The first token reads
// the caller's state in place and the last writes it in place where strides allow; in between, and wherever several
// states are kept, the panel lives in scratch as fp32, so the running state is never rounded to the state's dtype.
#include "cpu/isa/kernels.h"
#include "cpu/isa/rule-inl.h"

namespace gdn::cpu::GDN_ISA_NS {
namespace {

constexpr int64_t kVecs = 4;
constexpr int64_t kPanel = kVecs * kLanes;
// Rows of a V-first state in registers together: 8 accumulators.
constexpr int64_t kRowGroup = 4;
// Tokens whose q, k rows and gates are prepared together; up to this many, one panel at a time goes through scratch.
constexpr int64_t kTokens = kMaxTokens;

template <int32_t kDtype>
struct DtypeTag {
  static constexpr int32_t kValue = kDtype;
  static constexpr int64_t kBytes = kDtype == GDN_F32 ? 4 : 2;
};
template <class F>
HWY_INLINE void with_dtype(int32_t dtype, const F& f) {
  if (dtype == GDN_F32) return f(DtypeTag<GDN_F32>());
  if (dtype == GDN_BF16) return f(DtypeTag<GDN_BF16>());
  f(DtypeTag<GDN_F16>());
}

// One token's operands and results for a panel.
struct alignas(64) PanelToken {
  float P[kPanel], R[kPanel];
  float v[kPanel];
  float delta[kPanel], o[kPanel];
};

// -- column form: S[k][c], c contiguous, kPanel columns
template <class Src>
static inline void read_columns(const char* HWY_RESTRICT src, int64_t stride, int64_t K, const float* HWY_RESTRICT k,
                                const float* HWY_RESTRICT q, float* HWY_RESTRICT copy, PanelToken* HWY_RESTRICT t) {
  const F32Tag d;
  F32Vec P[kVecs], R[kVecs];
#pragma GCC unroll 4
  for (int c = 0; c < kVecs; ++c) P[c] = R[c] = hn::Zero(d);
  for (int64_t i = 0; i < K; ++i) {
    const auto ki = hn::Set(d, k[i]), qi = hn::Set(d, q[i]);
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) {
      const auto s = load_vec<Src::kValue>(src + (i * stride + c * kLanes) * Src::kBytes);
      if (copy != nullptr) hn::Store(s, d, copy + i * kPanel + c * kLanes);
      P[c] = hn::MulAdd(s, ki, P[c]);
      R[c] = hn::MulAdd(s, qi, R[c]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kVecs; ++c) {
    hn::Store(P[c], d, t->P + c * kLanes);
    hn::Store(R[c], d, t->R + c * kLanes);
  }
}
template <class Dst>
static inline void write_columns(const float* panel, int64_t K, const float* HWY_RESTRICT k, float alpha,
                                 const PanelToken* HWY_RESTRICT t, char* dst, int64_t stride) {
  const F32Tag d;
  const auto a = hn::Set(d, alpha);
  F32Vec delta[kVecs];
#pragma GCC unroll 4
  for (int c = 0; c < kVecs; ++c) delta[c] = hn::Load(d, t->delta + c * kLanes);
  for (int64_t i = 0; i < K; ++i) {
    const auto ki = hn::Set(d, k[i]);
    F32Vec s[kVecs];
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) {
      s[c] = hn::MulAdd(ki, delta[c], hn::Mul(a, hn::Load(d, panel + i * kPanel + c * kLanes)));
    }
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) store_vec<Dst::kValue>(s[c], dst + (i * stride + c * kLanes) * Dst::kBytes);
  }
}

// -- row form: S[c][k], k contiguous and `width` long (whole vectors), kRowGroup rows
// The four sums of four vectors' lanes.
HWY_INLINE void store_sums(F32Vec a, F32Vec b, F32Vec c, F32Vec e, float* HWY_RESTRICT dst) {
  const F32Tag d;
  const hn::FixedTag<float, 4> d4;
  HWY_ALIGN float lanes[4 * kLanes];
  hn::Store(a, d, lanes);
  hn::Store(b, d, lanes + kLanes);
  hn::Store(c, d, lanes + 2 * kLanes);
  hn::Store(e, d, lanes + 3 * kLanes);
  HWY_ALIGN float four[16];
  for (int r = 0; r < 4; ++r) {
    auto sum = hn::Load(d4, lanes + r * kLanes);
    for (int64_t i = 4; i < kLanes; i += 4) sum = hn::Add(sum, hn::Load(d4, lanes + r * kLanes + i));
    hn::Store(sum, d4, four + 4 * r);
  }
  HWY_ALIGN float turned[16];
  transpose(four, 4, 4, 4, turned, 4);
  hn::StoreU(hn::Add(hn::Add(hn::Load(d4, turned), hn::Load(d4, turned + 4)),
                     hn::Add(hn::Load(d4, turned + 8), hn::Load(d4, turned + 12))),
             d4, dst);
}
template <class Src>
static inline void read_rows(const char* HWY_RESTRICT src, int64_t stride, int64_t width, const float* HWY_RESTRICT k,
                             const float* HWY_RESTRICT q, float* HWY_RESTRICT P, float* HWY_RESTRICT R) {
  const F32Tag d;
  F32Vec p[kRowGroup], r[kRowGroup];
#pragma GCC unroll 4
  for (int c = 0; c < kRowGroup; ++c) p[c] = r[c] = hn::Zero(d);
  for (int64_t i = 0; i < width; i += kLanes) {
    const auto ki = hn::LoadU(d, k + i), qi = hn::LoadU(d, q + i);
#pragma GCC unroll 4
    for (int c = 0; c < kRowGroup; ++c) {
      const auto s = load_vec<Src::kValue>(src + (c * stride + i) * Src::kBytes);
      p[c] = hn::MulAdd(s, ki, p[c]);
      r[c] = hn::MulAdd(s, qi, r[c]);
    }
  }
  store_sums(p[0], p[1], p[2], p[3], P);
  store_sums(r[0], r[1], r[2], r[3], R);
}
// dst may be src (same place, dtype and stride), so no restrict.
template <class Src, class Dst>
static inline void write_rows(const char* src, int64_t src_stride, int64_t width, const float* HWY_RESTRICT k,
                              float alpha, const float* HWY_RESTRICT delta, char* dst, int64_t dst_stride) {
  const F32Tag d;
  const auto a = hn::Set(d, alpha);
  F32Vec u[kRowGroup];
#pragma GCC unroll 4
  for (int c = 0; c < kRowGroup; ++c) u[c] = hn::Set(d, delta[c]);
  for (int64_t i = 0; i < width; i += kLanes) {
    const auto ki = hn::LoadU(d, k + i);
    F32Vec s[kRowGroup];
#pragma GCC unroll 4
    for (int c = 0; c < kRowGroup; ++c) {
      s[c] = hn::MulAdd(ki, u[c], hn::Mul(a, load_vec<Src::kValue>(src + (c * src_stride + i) * Src::kBytes)));
    }
#pragma GCC unroll 4
    for (int c = 0; c < kRowGroup; ++c) store_vec<Dst::kValue>(s[c], dst + (c * dst_stride + i) * Dst::kBytes);
  }
}

// The layout that the kernel works in follows the first state tensor of the call.
HWY_INLINE bool row_form(const RuleProblem& p) {
  const auto along_k = [](int64_t stride_k, int64_t stride_v) { return stride_k == 1 && stride_v != 1; };
  if (present(p.initial_state)) return along_k(p.initial_state.stride[2], p.initial_state.stride[3]);
  if (present(p.final_state)) return along_k(p.final_state.stride[2], p.final_state.stride[3]);
  if (present(p.snapshots)) return along_k(p.snapshots.stride[3], p.snapshots.stride[4]);
  return present(p.checkpoints) && along_k(p.checkpoints.stride[2], p.checkpoints.stride[3]);
}

struct Layout {
  int64_t rows_k, row_width, panels, panel_size;
  bool all_panels;  // the state of the whole item lives in scratch
  int64_t rows, turn, carry, state, total;

  Layout(const RuleProblem& p, const RuleItem& item) {
    rows_k = round_up(p.K, 4);
    row_width = round_up(p.K, kLanes);
    panels = (item.v_end - item.v_begin + kPanel - 1) / kPanel;
    panel_size = kPanel * (row_width > rows_k ? row_width : rows_k);
    all_panels = p.seqs[static_cast<size_t>(item.seq)].len > kTokens;
    const int64_t heads = item.head_end - item.head_begin;
    int64_t n = 0;
    const auto take = [&n](int64_t floats) {
      const int64_t begin = n;
      n += round_up(floats, 16);
      return begin;
    };
    rows = take(2 * kTokens * row_width);
    turn = take(panel_size);
    carry = take(2 * heads);
    state = take((all_panels ? heads * panels : 1) * panel_size);
    total = n;
  }
};

class RecurrentItem {
 public:
  RecurrentItem(const RuleProblem& p, const RuleItem& item, float* scratch)
      : p_(p),
        item_(item),
        seq_(p.seqs[static_cast<size_t>(item.seq)]),
        layout_(p, item),
        rows_(row_form(p)),
        scale_(static_cast<float>(p.scale)),
        scratch_(scratch) {}

  void run() {
    const int64_t per_key_head = p_.Hv / p_.Hk;
    for (int64_t begin = item_.head_begin; begin < item_.head_end;) {
      int64_t end = (begin / per_key_head + 1) * per_key_head;
      if (end > item_.head_end) end = item_.head_end;
      run_key_head(begin, end);
      begin = end;
    }
  }

 private:
  struct Block {
    int64_t first, n;  // tokens of the sequence
    float kq[kTokens];
    float alpha[kTokens], beta[kTokens];  // of the current value head
  };

  double* carry(int64_t ordinal) {
    return reinterpret_cast<double*>(scratch_ + layout_.carry) + (ordinal - item_.head_begin);
  }
  float* state(int64_t ordinal, int64_t panel) {
    const int64_t index = layout_.all_panels ? (ordinal - item_.head_begin) * layout_.panels + panel : 0;
    return scratch_ + layout_.state + index * layout_.panel_size;
  }
  float* k_row(int64_t i) { return scratch_ + layout_.rows + 2 * i * layout_.row_width; }
  float* q_row(int64_t i) { return k_row(i) + layout_.row_width; }
  int64_t columns(int64_t panel) const {
    const int64_t left = item_.v_end - item_.v_begin - panel * kPanel;
    return left < kPanel ? left : kPanel;
  }

  void run_key_head(int64_t begin, int64_t end) {
    for (int64_t ordinal = begin; ordinal < end; ++ordinal) *carry(ordinal) = 1.0;
    Block block;
    block.first = 0;
    do {  // once for an empty sequence: its state is passed on
      block.n = seq_.len - block.first < kTokens ? seq_.len - block.first : kTokens;
      load_rows(key_head_of(p_, begin), &block);
      for (int64_t ordinal = begin; ordinal < end; ++ordinal) {
        double alpha[kTokens];
        load_gates(p_, seq_.batch, seq_.begin + block.first, block.n, value_head_of(p_, ordinal), alpha, block.beta);
        for (int64_t i = 0; i < block.n; ++i) block.alpha[i] = round_decay(alpha[i], carry(ordinal));
        for (int64_t panel = 0; panel < layout_.panels; ++panel) run_panel(ordinal, panel, block);
      }
      block.first += block.n;
    } while (block.first < seq_.len);
  }

  void load_rows(int64_t key_head, Block* block) {
    const F32Tag d;
    for (int64_t i = 0; i < block->n; ++i) {
      const int64_t token = seq_.begin + block->first + i, width = layout_.row_width;
      float *k = k_row(i), *q = q_row(i);
      load_key_row(p_, p_.k, seq_.batch, token, key_head, width, k);
      load_key_row(p_, p_.q, seq_.batch, token, key_head, width, q);
      auto sum = hn::Zero(d);
      for (int64_t j = 0; j < width; j += kLanes) sum = hn::MulAdd(hn::LoadU(d, k + j), hn::LoadU(d, q + j), sum);
      block->kq[i] = hn::GetLane(hn::SumOfLanes(d, sum));
    }
  }

  // Where the state after token t goes.
  int64_t destinations(int64_t t, int64_t head, int64_t v_begin, StateRef* refs) {
    int64_t n = 0;
    if (p_.token_slot_columns > 0 && present(p_.final_state)) {
      const int64_t slot = p_.token_slots[static_cast<size_t>(item_.seq * p_.token_slot_columns + t)];
      if (slot >= 0) refs[n++] = state_ref(p_.final_state, slot, head, v_begin);
    }
    if (present(p_.snapshots)) refs[n++] = snapshot_ref(p_.snapshots, item_.seq, t, head, v_begin);
    const int64_t slot = checkpoint_slot(p_, seq_, t);
    if (slot >= 0) refs[n++] = state_ref(p_.checkpoints, slot, head, v_begin);
    if (t + 1 == seq_.len && seq_.write_slot >= 0)
      refs[n++] = state_ref(p_.final_state, seq_.write_slot, head, v_begin);
    return n;
  }

  // The caller's memory can be worked on directly: contiguous along the vectors, nothing to pad.
  bool direct(const StateRef& s, int64_t width) const {
    if (rows_) return s.stride_k == 1 && p_.K % kLanes == 0 && width % kRowGroup == 0;
    return s.stride_v == 1 && width == kPanel;
  }
  void load_panel(const StateRef& s, int64_t width, float* panel) {
    if (rows_) {
      load_block(s, s.stride_v, s.stride_k, width, p_.K, panel, kPanel, layout_.row_width);
    } else {
      load_columns(s, p_.K, width, panel, layout_.rows_k, kPanel, scratch_ + layout_.turn);
    }
  }
  void store_panel(const StateRef& s, int64_t width, const float* panel) {
    if (rows_) {
      store_block(s, s.stride_v, s.stride_k, width, p_.K, panel, layout_.row_width);
    } else {
      store_columns(s, p_.K, width, panel, layout_.rows_k, kPanel, scratch_ + layout_.turn);
    }
  }
  StateRef in_scratch(float* panel) const {
    char* base = reinterpret_cast<char*>(panel);
    return rows_ ? StateRef{base, GDN_F32, 1, layout_.row_width} : StateRef{base, GDN_F32, kPanel, 1};
  }

  void run_panel(int64_t ordinal, int64_t panel, const Block& block) {
    const int64_t head = value_head_of(p_, ordinal), v_begin = item_.v_begin + panel * kPanel, width = columns(panel);
    float* S = state(ordinal, panel);
    const StateRef scratch = in_scratch(S);
    StateRef src = scratch;
    if (block.first == 0) {
      if (seq_.read_slot < 0) {
        std::memset(S, 0, static_cast<size_t>(layout_.panel_size) * sizeof(float));
      } else {
        src = state_ref(p_.initial_state, seq_.read_slot, head, v_begin);
        if (block.n == 0 || !direct(src, width)) {
          load_panel(src, width, S);
          src = scratch;
        }
      }
      if (block.n == 0 && seq_.write_slot >= 0) {
        store_panel(state_ref(p_.final_state, seq_.write_slot, head, v_begin), width, S);
      }
    }
    PanelToken token = {};
    for (int64_t i = 0; i < block.n; ++i) {
      const int64_t t = block.first + i, row = seq_.begin + t;
      load_row(at(p_.v, seq_.batch, row, head, v_begin), p_.v.dtype, p_.v.stride[3], width, token.v);
      for (int64_t c = width; c < kPanel; ++c) token.v[c] = 0.0f;
      StateRef refs[4];
      const int64_t kept = destinations(t, head, v_begin, refs);
      const bool in_place = kept == 1 && t + 1 == seq_.len && direct(refs[0], width);
      const StateRef& dst = in_place ? refs[0] : scratch;
      if (rows_) {
        step_rows(src, dst, width, i, block, &token);
      } else {
        step_columns(src, dst, S, i, block, &token);
      }
      src = scratch;
      store_row(token.o, at(p_.o, seq_.batch, row, head, v_begin), p_.o.dtype, p_.o.stride[3], width);
      if (in_place) continue;
      for (int64_t r = 0; r < kept; ++r) store_panel(refs[r], width, S);
    }
  }

  void finish(float alpha, float beta, float kq, int64_t begin, int64_t end, PanelToken* t) const {
    const F32Tag d;
    const auto a = hn::Set(d, alpha), b = hn::Set(d, beta), x = hn::Set(d, kq), f = hn::Set(d, scale_);
    for (int64_t c = begin; c < end; c += kLanes) {
      const auto delta = hn::Mul(b, hn::NegMulAdd(a, hn::Load(d, t->P + c), hn::Load(d, t->v + c)));
      hn::Store(delta, d, t->delta + c);
      hn::Store(hn::Mul(f, hn::MulAdd(x, delta, hn::Mul(a, hn::Load(d, t->R + c)))), d, t->o + c);
    }
  }

  void step_columns(const StateRef& src, const StateRef& dst, float* S, int64_t i, const Block& block, PanelToken* t) {
    const float *k = k_row(i), *q = q_row(i);
    float* copy = src.base == reinterpret_cast<char*>(S) ? nullptr : S;
    with_dtype(src.dtype, [&](auto tag) { read_columns<decltype(tag)>(src.base, src.stride_k, p_.K, k, q, copy, t); });
    finish(block.alpha[i], block.beta[i], block.kq[i], 0, kPanel, t);
    with_dtype(dst.dtype,
               [&](auto tag) { write_columns<decltype(tag)>(S, p_.K, k, block.alpha[i], t, dst.base, dst.stride_k); });
  }

  void step_rows(const StateRef& src, const StateRef& dst, int64_t width, int64_t i, const Block& block,
                 PanelToken* t) {
    const float *k = k_row(i), *q = q_row(i);
    const int64_t groups = (width + kRowGroup - 1) / kRowGroup;
    constexpr int64_t kStep = kLanes > kRowGroup ? kLanes : kRowGroup;
    with_dtype(src.dtype, [&](auto src_tag) {
      with_dtype(dst.dtype, [&](auto dst_tag) {
        using Src = decltype(src_tag);
        using Dst = decltype(dst_tag);
        // A vector's worth of rows at a time: read twice while they are near.
        for (int64_t c0 = 0; c0 < groups * kRowGroup; c0 += kStep) {
          const int64_t c1 = c0 + kStep < groups * kRowGroup ? c0 + kStep : groups * kRowGroup;
          for (int64_t c = c0; c < c1; c += kRowGroup) {
            read_rows<Src>(src.base + c * src.stride_v * Src::kBytes, src.stride_v, layout_.row_width, k, q, t->P + c,
                           t->R + c);
          }
          finish(block.alpha[i], block.beta[i], block.kq[i], c0, c0 + kStep, t);
          for (int64_t c = c0; c < c1; c += kRowGroup) {
            write_rows<Src, Dst>(src.base + c * src.stride_v * Src::kBytes, src.stride_v, layout_.row_width, k,
                                 block.alpha[i], t->delta + c, dst.base + c * dst.stride_v * Dst::kBytes, dst.stride_v);
          }
        }
      });
    });
  }

  const RuleProblem& p_;
  const RuleItem& item_;
  const Sequence& seq_;
  const Layout layout_;
  const bool rows_;
  const float scale_;
  float* scratch_;
};

}  // namespace

int64_t recurrent_scratch(const RuleProblem& p, const RuleItem& item) {
  return Layout(p, item).total * static_cast<int64_t>(sizeof(float));
}

void recurrent_item(const RuleProblem& p, const RuleItem& item, void* scratch) {
  const Sequence& seq = p.seqs[static_cast<size_t>(item.seq)];
  if (seq.is_null) {
    for (int64_t ordinal = item.head_begin; ordinal < item.head_end; ++ordinal) {
      zero_output(p, seq, value_head_of(p, ordinal), item.v_begin, item.v_end);
    }
    return;
  }
  const FlushSubnormals flush;
  RecurrentItem(p, item, static_cast<float*>(scratch)).run();
}

}  // namespace gdn::cpu::GDN_ISA_NS
