// SPDX-License-Identifier: MIT
// Prefill of one work item: one sequence, value heads of one key head after another, a range of V columns.
//
// The sequence is cut into blocks of up to kBlock = 12 tokens. Per block and key head: rows k_i and q_i, turned to
// kq[K][k_0.. q_0..], and their products k_i.k_j, q_i.k_j. Per value head and panel of kPanel columns, with S0 the
// state before the block, G_i the gate summed from the block's start and Gamma_ij = exp(G_i - G_j):
//   P_i, R_i = S0^T k_i, S0^T q_i                                                         (one read of S0)
//   delta_i  = beta_i (v_i - e^{G_i} P_i - sum_{j<i} Gamma_ij (k_i.k_j) delta_j)          (forward substitution)
//   o_i      = scale (e^{G_i} R_i + sum_{j<=i} Gamma_ij (q_i.k_j) delta_j)
//   S        = e^{G_last} S0 + sum_i k_i (e^{G_last - G_i} delta_i)^T                     (one read and write of S)
// which is the recurrence with its sums reordered: 6 K V FLOP per token and value head in the two products with S, and
// (12 + 1) V of substitution on top. 12 balances that against scaling S once per block (K V / 12 per token).
//
// S stays in scratch as fp32 panels [panel][K][kPanel] for the whole sequence. Columns of V never meet and the shared
// products are computed the same way in every item, so no bit depends on how the work is split or on the batch.
//
// Register tiles: kTile rows x kVecs vectors of accumulators (6 x 2 of 16 registers, 12 x 2 or 6 x 4 of 32).
#include "cpu/isa/kernels.h"
#include "cpu/isa/rule-inl.h"

namespace gdn::cpu::GDN_ISA_NS {
namespace {

constexpr int64_t kBlock = 12;
constexpr int64_t kRows = 2 * kBlock;
constexpr int64_t kVecs = HWY_ARCH_ARM ? 4 : 2;
constexpr int64_t kPanel = kVecs * kLanes;
constexpr int64_t kTile = kLanes == 16 ? 12 : 6;
// Columns of the k.k and q.k products, rounded up to whole vectors.
constexpr int64_t kPairs = (kBlock + kLanes - 1) / kLanes * kLanes;
// Sequences this short are cheaper token by token: nothing to pack, and the state need not go through scratch.
constexpr int64_t kTokenLoop = 3;

static_assert(kBlock <= kMaxTokens && kPairs <= kRows);

// What one value head needs of a block, per token i (and j).
struct HeadBlock {
  float decay;                  // e^{G_last}
  float beta[kBlock];           //
  float decay_to[kBlock];       // e^{G_i}
  float scaled_to[kBlock];      // scale e^{G_i}
  float decay_from[kBlock];     // e^{G_last - G_i}
  float erase[kBlock][kBlock];  // Gamma_ij k_i.k_j, j < i
  float read[kBlock][kBlock];   // scale Gamma_ij q_i.k_j, j <= i
};

// Tokens of a block rounded up to a whole number of substitution groups; rows past the last token are zero.
HWY_INLINE int64_t padded_tokens(int64_t n) { return n <= 3 ? 3 : round_up(n, 6); }

HWY_INLINE int64_t tiled_rows(int64_t K) {
  int64_t rows = K / kTile * kTile;
  while ((K - rows) % 4 != 0) rows -= kTile;
  return rows;
}

// y[r][c] = sum_k kq[k][r] S[k][c] for R rows.
template <int R>
HWY_INLINE void read_state(const float* HWY_RESTRICT kq, const float* HWY_RESTRICT S, int64_t K,
                           float* HWY_RESTRICT y) {
  const F32Tag d;
  F32Vec acc[R][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) acc[r][c] = hn::Zero(d);
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < K; ++k) {
    F32Vec s[kVecs];
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) s[c] = hn::Load(d, S + k * kPanel + c * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto x = hn::Set(d, kq[k * kRows + r]);
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; ++c) acc[r][c] = hn::MulAdd(x, s[c], acc[r][c]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) hn::Store(acc[r][c], d, y + r * kPanel + c * kLanes);
  }
}

// S[k][c] = decay S[k][c] + sum_i kq[k][i] delta[i][c] for R rows of S.
template <int R>
HWY_INLINE void write_state(const float* HWY_RESTRICT kq, const float* HWY_RESTRICT delta, int64_t tokens, F32Vec decay,
                            float* HWY_RESTRICT S) {
  const F32Tag d;
  F32Vec acc[R][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) acc[r][c] = hn::Mul(decay, hn::Load(d, S + r * kPanel + c * kLanes));
  }
#pragma GCC unroll 2
  for (int64_t i = 0; i < tokens; ++i) {
    F32Vec u[kVecs];
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) u[c] = hn::Load(d, delta + i * kPanel + c * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto x = hn::Set(d, kq[r * kRows + i]);
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; ++c) acc[r][c] = hn::MulAdd(x, u[c], acc[r][c]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) hn::Store(acc[r][c], d, S + r * kPanel + c * kLanes);
  }
}

// Products of R key rows and the R query rows of the same tokens with the first C vectors of keys.
template <int R, int C>
HWY_INLINE void multiply_pairs(const float* HWY_RESTRICT kq, int64_t k_row, int64_t q_row, int64_t K,
                               float* HWY_RESTRICT pairs) {
  const F32Tag d;
  F32Vec acc[2 * R][C];
#pragma GCC unroll 12
  for (int r = 0; r < 2 * R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[r][c] = hn::Zero(d);
  }
  for (int64_t k = 0; k < K; ++k) {
    const float* HWY_RESTRICT row = kq + k * kRows;
    F32Vec s[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) s[c] = hn::LoadU(d, row + c * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < 2 * R; ++r) {
      const auto x = hn::Set(d, row[r < R ? k_row + r : q_row + r - R]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r][c] = hn::MulAdd(x, s[c], acc[r][c]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < 2 * R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      hn::StoreU(acc[r][c], d, pairs + (r < R ? k_row + r : q_row + r - R) * kPairs + c * kLanes);
    }
  }
}

// Delta of R tokens from `first` on: the earlier tokens' part as a product, then the triangle in registers.
template <int R>
HWY_INLINE void substitute(const HeadBlock& h, int64_t first, const float* HWY_RESTRICT v, const float* HWY_RESTRICT P,
                           float* HWY_RESTRICT delta) {
  const F32Tag d;
  F32Vec u[R][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const auto e = hn::Set(d, h.decay_to[first + r]);
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) {
      const int64_t at_rc = (first + r) * kPanel + c * kLanes;
      u[r][c] = hn::NegMulAdd(e, hn::Load(d, P + at_rc), hn::Load(d, v + at_rc));
    }
  }
  for (int64_t j = 0; j < first; ++j) {
    F32Vec x[kVecs];
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) x[c] = hn::Load(d, delta + j * kPanel + c * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto a = hn::Set(d, h.erase[first + r][j]);
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; ++c) u[r][c] = hn::NegMulAdd(a, x[c], u[r][c]);
    }
  }
#pragma GCC unroll 16
  for (int j = 0; j < R; ++j) {
    const auto b = hn::Set(d, h.beta[first + j]);
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) {
      u[j][c] = hn::Mul(b, u[j][c]);
      hn::Store(u[j][c], d, delta + (first + j) * kPanel + c * kLanes);
    }
#pragma GCC unroll 16
    for (int r = j + 1; r < R; ++r) {
      const auto a = hn::Set(d, h.erase[first + r][first + j]);
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; ++c) u[r][c] = hn::NegMulAdd(a, u[j][c], u[r][c]);
    }
  }
}

// o of R tokens from `first` on, in place of their rows of S0^T q.
template <int R>
HWY_INLINE void read_out(const HeadBlock& h, int64_t first, const float* HWY_RESTRICT delta, float* HWY_RESTRICT o) {
  const F32Tag d;
  F32Vec acc[R][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const auto e = hn::Set(d, h.scaled_to[first + r]);
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) acc[r][c] = hn::Mul(e, hn::Load(d, o + (first + r) * kPanel + c * kLanes));
  }
  for (int64_t j = 0; j < first; ++j) {
    F32Vec x[kVecs];
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) x[c] = hn::Load(d, delta + j * kPanel + c * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto a = hn::Set(d, h.read[first + r][j]);
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; ++c) acc[r][c] = hn::MulAdd(a, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 16
  for (int j = 0; j < R; ++j) {
    F32Vec x[kVecs];
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) x[c] = hn::Load(d, delta + (first + j) * kPanel + c * kLanes);
#pragma GCC unroll 16
    for (int r = j; r < R; ++r) {
      const auto a = hn::Set(d, h.read[first + r][first + j]);
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; ++c) acc[r][c] = hn::MulAdd(a, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; ++c) hn::Store(acc[r][c], d, o + (first + r) * kPanel + c * kLanes);
  }
}

// Scratch of one item, in floats; every part starts on a cache line.
struct Layout {
  int64_t rows_k;     // K padded to 4: rows of a panel and of kq
  int64_t row_width;  // K padded to vectors (and 4): one row of q or k
  int64_t panels;     // per head
  int64_t kq, rows, pairs, v, y, delta, turn, carry, state, total;

  Layout(const RuleProblem& p, const RuleItem& item) {
    rows_k = round_up(p.K, 4);
    row_width = round_up(p.K, kLanes > 4 ? kLanes : 4);
    panels = (item.v_end - item.v_begin + kPanel - 1) / kPanel;
    int64_t n = 0;
    const auto take = [&n](int64_t floats) {
      const int64_t begin = n;
      n += round_up(floats, 16);
      return begin;
    };
    kq = take(rows_k * kRows);
    rows = take(kRows * row_width);
    pairs = take(kRows * kPairs);
    v = take(kBlock * kPanel);
    y = take(kRows * kPanel);
    delta = take(kBlock * kPanel);
    turn = take(kPanel * rows_k);
    carry = take(2 * (item.head_end - item.head_begin));
    state = take((item.head_end - item.head_begin) * panels * rows_k * kPanel);
    total = n;
  }
};

class ChunkItem {
 public:
  ChunkItem(const RuleProblem& p, const RuleItem& item, float* scratch)
      : p_(p), item_(item), seq_(p.seqs[static_cast<size_t>(item.seq)]), layout_(p, item), scratch_(scratch) {}

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
  float* part(int64_t offset) { return scratch_ + offset; }
  float* state(int64_t ordinal, int64_t panel) {
    return scratch_ + layout_.state + ((ordinal - item_.head_begin) * layout_.panels + panel) * layout_.rows_k * kPanel;
  }
  double* carry(int64_t ordinal) {
    return reinterpret_cast<double*>(scratch_ + layout_.carry) + (ordinal - item_.head_begin);
  }
  int64_t columns(int64_t panel) const {
    const int64_t left = item_.v_end - item_.v_begin - panel * kPanel;
    return left < kPanel ? left : kPanel;
  }

  void run_key_head(int64_t begin, int64_t end) {
    for (int64_t ordinal = begin; ordinal < end; ++ordinal) load_state(ordinal);
    for (int64_t t = 0; t < seq_.len;) {
      int64_t n = seq_.len - t < kBlock ? seq_.len - t : kBlock;
      if (p_.checkpoint_every > 0) {
        const int64_t to_checkpoint = p_.checkpoint_every - t % p_.checkpoint_every;
        if (to_checkpoint < n) n = to_checkpoint;
      }
      pack_block(seq_.begin + t, n, key_head_of(p_, begin));
      for (int64_t ordinal = begin; ordinal < end; ++ordinal) {
        run_block(ordinal, seq_.begin + t, n, (ordinal - begin) * layout_.panels, (end - begin) * layout_.panels);
      }
      t += n;
      const int64_t slot = checkpoint_slot(p_, seq_, t - 1);
      if (slot >= 0) {
        for (int64_t ordinal = begin; ordinal < end; ++ordinal) store_state(p_.checkpoints, slot, ordinal);
      }
    }
    if (seq_.write_slot < 0) return;
    for (int64_t ordinal = begin; ordinal < end; ++ordinal) store_state(p_.final_state, seq_.write_slot, ordinal);
  }

  void load_state(int64_t ordinal) {
    *carry(ordinal) = 1.0;
    for (int64_t panel = 0; panel < layout_.panels; ++panel) {
      float* S = state(ordinal, panel);
      if (seq_.read_slot < 0) {
        std::memset(S, 0, static_cast<size_t>(layout_.rows_k * kPanel) * sizeof(float));
      } else {
        load_columns(
            state_ref(p_.initial_state, seq_.read_slot, value_head_of(p_, ordinal), item_.v_begin + panel * kPanel),
            p_.K, columns(panel), S, layout_.rows_k, kPanel, part(layout_.turn));
      }
    }
  }
  void store_state(const View& view, int64_t slot, int64_t ordinal) {
    for (int64_t panel = 0; panel < layout_.panels; ++panel) {
      store_columns(state_ref(view, slot, value_head_of(p_, ordinal), item_.v_begin + panel * kPanel), p_.K,
                    columns(panel), state(ordinal, panel), layout_.rows_k, kPanel, part(layout_.turn));
    }
  }

  // kq and the products of its rows.
  void pack_block(int64_t token, int64_t n, int64_t key_head) {
    const int64_t tokens = padded_tokens(n), width = layout_.row_width, K = layout_.rows_k;
    float* HWY_RESTRICT rows = part(layout_.rows);
    for (int64_t i = 0; i < n; ++i) {
      load_key_row(p_, p_.k, seq_.batch, token + i, key_head, width, rows + i * width);
      load_key_row(p_, p_.q, seq_.batch, token + i, key_head, width, rows + (tokens + i) * width);
    }
    const size_t pad_bytes = static_cast<size_t>((tokens - n) * width) * sizeof(float);
    std::memset(rows + n * width, 0, pad_bytes);
    std::memset(rows + (tokens + n) * width, 0, pad_bytes);
    float* HWY_RESTRICT kq = part(layout_.kq);
    transpose(rows, width, 2 * tokens, K, kq, kRows);
    multiply_all_pairs(kq, tokens, K);
  }
  void multiply_all_pairs(const float* HWY_RESTRICT kq, int64_t tokens, int64_t K) {
    float* HWY_RESTRICT pairs = part(layout_.pairs);
    for (int64_t i = 0; i < tokens;) {
      if (i + 6 <= tokens && i + 6 <= kLanes) {
        multiply_pairs<6, 1>(kq, i, tokens + i, K, pairs);
        i += 6;
        continue;
      }
      const int64_t vecs = (i + 3 + kLanes - 1) / kLanes;
      if (vecs == 1) {
        multiply_pairs<3, 1>(kq, i, tokens + i, K, pairs);
      } else if (vecs == 2) {
        multiply_pairs<3, 2>(kq, i, tokens + i, K, pairs);
      } else {
        multiply_pairs<3, 3>(kq, i, tokens + i, K, pairs);
      }
      i += 3;
    }
  }

  void fill_head_block(int64_t token, int64_t n, int64_t ordinal, HeadBlock* h) {
    const int64_t tokens = padded_tokens(n);
    HWY_ALIGN double alpha[kMaxTokens];
    load_gates(p_, seq_.batch, token, n, value_head_of(p_, ordinal), alpha, h->beta);
    const float* HWY_RESTRICT pairs = part(layout_.pairs);
    // Row i of Gamma from row i - 1: products of gates, never a quotient or a difference of exponentials.
    HWY_ALIGN double gamma[kBlock] = {};
    double decay = 1.0;
    for (int64_t i = 0; i < n; ++i) {
      decay *= alpha[i];
      for (int64_t j = 0; j < i; ++j) gamma[j] *= alpha[i];
      gamma[i] = 1.0;
      h->decay_to[i] = static_cast<float>(decay);
      h->scaled_to[i] = static_cast<float>(p_.scale * decay);
      const float* HWY_RESTRICT kk = pairs + i * kPairs;
      const float* HWY_RESTRICT qk = pairs + (tokens + i) * kPairs;
      for (int64_t j = 0; j <= i; ++j) {
        h->erase[i][j] = static_cast<float>(gamma[j]) * kk[j];
        h->read[i][j] = static_cast<float>(p_.scale * gamma[j]) * qk[j];
      }
    }
    for (int64_t i = 0; i < n; ++i) h->decay_from[i] = static_cast<float>(gamma[i]);
    for (int64_t i = n; i < tokens; ++i) {
      h->beta[i] = h->decay_to[i] = h->scaled_to[i] = h->decay_from[i] = 0.0f;
      for (int64_t j = 0; j <= i; ++j) h->erase[i][j] = h->read[i][j] = 0.0f;
    }
    h->decay = round_decay(decay, carry(ordinal));
  }

  // The rows that the next block reads and writes lie a whole token apart, which no hardware prefetcher follows. Each
  // panel of this block fetches its own columns of v and o of the next one, and its share of the rows of q and k: 3-5 %
  // of the time at T = 512 to 4096 in one quiet comparison (Zen 3), nothing under load.
  void prefetch(int64_t head, int64_t v_begin, int64_t token, int64_t panel, int64_t panels) {
    const int64_t left = seq_.begin + seq_.len - token, n = left < kBlock ? left : kBlock;
    for (int64_t i = 0; i < n; ++i) {
      __builtin_prefetch(at(p_.v, seq_.batch, token + i, head, v_begin), 0, 2);
      __builtin_prefetch(at(p_.o, seq_.batch, token + i, head, v_begin), 1, 3);
    }
    for (int64_t row = panel; row < 2 * n; row += panels) {
      const View& x = row < n ? p_.k : p_.q;
      const char* line = at(x, seq_.batch, token + row % n, key_head_of(p_, item_.head_begin));
      for (int64_t byte = 0; byte < p_.K * element_bytes(x); byte += 64) __builtin_prefetch(line + byte, 0, 2);
    }
  }

  // `slot` of `slots`: this head's first panel among all panels of the block.
  void run_block(int64_t ordinal, int64_t token, int64_t n, int64_t slot, int64_t slots) {
    const int64_t tokens = padded_tokens(n), head = value_head_of(p_, ordinal);
    HeadBlock h;
    fill_head_block(token, n, ordinal, &h);
    for (int64_t panel = 0; panel < layout_.panels; ++panel) {
      const int64_t v_begin = item_.v_begin + panel * kPanel, width = columns(panel);
      prefetch(head, v_begin, token + n, slot + panel, slots);
      float* HWY_RESTRICT v = part(layout_.v);
      for (int64_t i = 0; i < n; ++i) {
        load_row(at(p_.v, seq_.batch, token + i, head, v_begin), p_.v.dtype, p_.v.stride[3], width, v + i * kPanel);
        for (int64_t c = width; c < kPanel; ++c) v[i * kPanel + c] = 0.0f;
      }
      std::memset(v + n * kPanel, 0, static_cast<size_t>((tokens - n) * kPanel) * sizeof(float));
      run_panel(h, n, v, state(ordinal, panel));
      const float* HWY_RESTRICT o = part(layout_.y) + tokens * kPanel;
      for (int64_t i = 0; i < n; ++i) {
        store_row(o + i * kPanel, at(p_.o, seq_.batch, token + i, head, v_begin), p_.o.dtype, p_.o.stride[3], width);
      }
    }
  }

  // Leaves o in the second half of y.
  void run_panel(const HeadBlock& h, int64_t n, const float* HWY_RESTRICT v, float* HWY_RESTRICT S) {
    const F32Tag d;
    const int64_t tokens = padded_tokens(n), K = layout_.rows_k;
    const float* HWY_RESTRICT kq = part(layout_.kq);
    float* HWY_RESTRICT y = part(layout_.y);
    float* HWY_RESTRICT delta = part(layout_.delta);
    int64_t r = 0;
    for (; r + kTile <= 2 * tokens; r += kTile) read_state<kTile>(kq + r, S, K, y + r * kPanel);
    for (; r < 2 * tokens; r += 6) read_state<6>(kq + r, S, K, y + r * kPanel);

    float* HWY_RESTRICT o = y + tokens * kPanel;
    if (tokens == 3) {
      substitute<3>(h, 0, v, y, delta);
      read_out<3>(h, 0, delta, o);
    } else {
      for (int64_t i = 0; i < tokens; i += 6) {
        substitute<6>(h, i, v, y, delta);
        read_out<6>(h, i, delta, o);
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      const auto f = hn::Set(d, h.decay_from[i]);
      for (int64_t c = 0; c < kPanel; c += kLanes) {
        hn::Store(hn::Mul(f, hn::Load(d, delta + i * kPanel + c)), d, delta + i * kPanel + c);
      }
    }

    const auto decay = hn::Set(d, h.decay);
    // K is a multiple of 4: as many whole tiles as leave a rest that fours can fill.
    int64_t k = 0;
    for (const int64_t end = tiled_rows(K); k < end; k += kTile) {
      write_state<kTile>(kq + k * kRows, delta, n, decay, S + k * kPanel);
    }
    for (; k < K; k += 4) write_state<4>(kq + k * kRows, delta, n, decay, S + k * kPanel);
  }

  const RuleProblem& p_;
  const RuleItem& item_;
  const Sequence& seq_;
  const Layout layout_;
  float* HWY_RESTRICT scratch_;
};

}  // namespace

int64_t lanes() { return kLanes; }
int64_t chunk_panel_v() { return kPanel; }
int64_t chunk_block_tokens() { return kBlock; }

int64_t chunk_scratch(const RuleProblem& p, const RuleItem& item) {
  const int64_t chunk = Layout(p, item).total * static_cast<int64_t>(sizeof(float));
  const int64_t token_loop = recurrent_scratch(p, item);
  return chunk > token_loop ? chunk : token_loop;
}

void chunk_item(const RuleProblem& p, const RuleItem& item, void* scratch) {
  const Sequence& seq = p.seqs[static_cast<size_t>(item.seq)];
  if (seq.is_null || seq.len <= kTokenLoop) {
    recurrent_item(p, item, scratch);
    return;
  }
  const FlushSubnormals flush;
  ChunkItem(p, item, static_cast<float*>(scratch)).run();
}

}  // namespace gdn::cpu::GDN_ISA_NS
