// SPDX-License-Identifier: MIT
// The arithmetic of one chunk on the scratch of an item (docs/math.md, "Chunked form"). TDPBF16PS counts are per head
// and chunk at K = V = 128.
//
//   scores  kk = K K^T, qk = Q K^T                                              96, shared by the heads of a key head
//   gates   -L = -beta_i kk Gamma, P = scale qk Gamma                           vector; both stored as hi + lo
//   read    ks = K s, qs = Q s with s = hi + lo                                 512
//   solve   R = beta (V - e^G sigma ks); U' = (I + L)^-1 R                       96 + fp32 substitution in the 16 x 16
//   diagonal blocks output  o = e^G sigma scale qs + P U' (hi hi + hi lo + lo hi)               144 update  s += K^T
//   (e^{G_C - G} U' / sigma'), then s to hi + lo               256
//
// Where bits are lost: K and Q are exact (an L2 norm or e^G scales fp32 rows afterwards, never bf16 operands), every
// other operand is hi + lo (2^-17), accumulation is fp32. So o is as good as its own dtype and the state is good to
// about 1e-5, where the all-bf16 form has 4e-3.
#pragma once
#include "cpu/amx/chunk_scratch.h"

namespace gdn::cpu::amx {

GDN_AMX_INLINE char* tile_at(char* tiles, int64_t i) { return tiles + i * kTileBytes; }
GDN_AMX_INLINE float* tile_at(float* tiles, int64_t i) { return tiles + i * kTileFloats; }

// Right-operand tiles of keys and left-operand tiles of K^T, both from ka. `pairs` = 32-token steps in use.
static inline void transpose_keys(const Scratch& s, int64_t pairs) {
  for (int64_t kappa = 0; kappa < s.kappas; ++kappa) {
    for (int64_t nt = 0; nt < 2 * pairs; ++nt) {
      const char* src = tile_at(s.ka, nt * s.kappas + kappa);
      char* dst = tile_at(s.kb, kappa * 4 + nt);
      VecU r[16];
      for (int i = 0; i < 16; ++i) r[i] = load_u(src + i * 64);
      transpose16(r);
      for (int i = 0; i < 16; ++i) store_u(dst + i * 64, r[i]);
    }
    for (int64_t step = 0; step < pairs; ++step) {
      const char* first = tile_at(s.kb, kappa * 4 + 2 * step);
      for (int64_t pair = 0; pair < 16; ++pair) {
        const VecU a = load_u(first + pair * 64), b = load_u(first + kTileBytes + pair * 64);
        char* dst = tile_at(s.kta, (2 * kappa + pair / 8) * 2 + step) + (2 * pair % 16) * 64;
        store_u(dst, (a & 0xffffu) | (b << 16));
        store_u(dst + 64, (a >> 16) | (b & 0xffff0000u));
      }
    }
  }
}

static inline void scores(const Scratch& s, int64_t pairs) {
  for (int64_t rt = 0; rt < 2 * pairs; ++rt) {
    for (int64_t ct = 0; ct <= rt; ct += 2) {
      block_zero();
      for (int64_t kappa = 0; kappa < s.kappas; ++kappa) {
        block_load_a(tile_at(s.ka, rt * s.kappas + kappa), tile_at(s.qa, rt * s.kappas + kappa));
        block_dp(tile_at(s.kb, kappa * 4 + ct), tile_at(s.kb, kappa * 4 + ct + 1));
      }
      block_store(tile_at(s.kk, rt * 4 + ct), tile_at(s.kk, rt * 4 + ct + 1), tile_at(s.qk, rt * 4 + ct),
                  tile_at(s.qk, rt * 4 + ct + 1));
    }
  }
}

// ks = K s and qs = Q s, one 32-wide step of K of one 2 x 2 block at a time, so that the gates' vector work can run
// between the steps: eight products keep the tile unit busy for about as long as a row of gate_scores takes, and the
// two share no registers.
class StateReader {
 public:
  StateReader(const Scratch& s, const HeadState& head, int64_t pairs) : s_(s), head_(head), row_tiles_(2 * pairs) {
    start();
  }
  GDN_AMX_INLINE_MEMBER void advance() {
    if (vt_ == s_.vt) return;
    if (kappa_ == 0) block_zero();
    const int64_t at = kappa_ * kTileBytes, a_row = s_.kappas * kTileBytes;
    block_load_a(a_ + at, a_ + a_row + at);
    block_dp(hi_ + at, hi_ + a_row + at);
    block_dp(lo_ + at, lo_ + a_row + at);
    if (++kappa_ < s_.kappas) return;
    float* out = tile_at(which_ == 0 ? s_.ks : s_.qs, rt_ * s_.vt + vt_);
    float* below = tile_at(out, s_.vt);
    block_store(out, tile_at(out, 1), below, tile_at(below, 1));
    kappa_ = 0;
    rt_ += 2;
    if (rt_ == row_tiles_) {
      rt_ = 0;
      which_ ^= 1;
      if (which_ == 0) vt_ += 2;
    }
    start();
  }
  void finish() {
    while (vt_ < s_.vt) advance();
  }

 private:
  void start() {
    a_ = tile_at(which_ == 0 ? s_.ka : s_.qa, rt_ * s_.kappas);
    hi_ = tile_at(head_.hi, vt_ * s_.kappas);
    lo_ = tile_at(head_.lo, vt_ * s_.kappas);
  }
  const Scratch& s_;
  const HeadState& head_;
  int64_t row_tiles_, vt_ = 0, which_ = 0, rt_ = 0, kappa_ = 0;
  const char *a_ = nullptr, *hi_ = nullptr, *lo_ = nullptr;
};

// -L and P of one head. Gamma is e^(G_i - G_j) of differences only, masked before the exponential; columns carry the
// keys' norm factor, rows beta and the scale. Advances `reader` once per row.
static inline void gate_scores(const Scratch& s, int64_t pairs, float scale, StateReader* reader) {
  const VecI column = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const VecU none{};
  for (int64_t rt = 0; rt < 2 * pairs; ++rt) {
    for (int64_t step = 0; step <= rt / 2; ++step) {
      const int64_t p_tile = (rt * 2 + step) * kTileBytes;
      const int64_t l_tile = (rt == 0 ? 0 : rt + step - 1) * kTileBytes;  // row tile 0 has nothing below the diagonal
      const bool has_lower = 2 * step < rt;
      for (int64_t i = 0; i < 16; ++i) {
        reader->advance();
        const int64_t row = rt * 16 + i;
        const float row_gh = s.gh[row], row_gl = s.gl[row];
        const float row_l = -s.beta[row] * s.rk[row], row_p = scale * s.rq[row];
        Split l[2] = {{none, none}, {none, none}}, pr[2] = {{none, none}, {none, none}};
        for (int64_t odd = 0; odd < 2; ++odd) {
          const int64_t ct = 2 * step + odd;
          if (ct > rt) break;
          const int64_t at = (rt * 4 + ct) * kTileFloats + i * 16;
          VecF diff = (row_gh - load(s.gh + ct * 16)) + (row_gl - load(s.gl + ct * 16));
          VecF gamma;
          if (ct == rt) {
            const VecI keep = column <= static_cast<int32_t>(i);
            diff = from_bits(bits(diff) & reinterpret_cast<VecU>(keep));
            gamma = from_bits(bits(exp16(diff)) & reinterpret_cast<VecU>(keep));
          } else {
            gamma = exp16(diff);
          }
          gamma = gamma * load(s.rk + ct * 16);
          pr[odd] = split_bf16(load(s.qk + at) * gamma * row_p);
          const VecF lower = load(s.kk + at) * gamma * row_l;
          if (ct == rt) {
            store(tile_at(s.ld, rt) + i * 16, lower);  // only columns < i are read
          } else {
            l[odd] = split_bf16(lower);
          }
        }
        store_u(s.ph + p_tile + i * 64, interleave_high(pr[0].hi, pr[1].hi));
        store_u(s.pl + p_tile + i * 64, interleave_high(pr[0].lo, pr[1].lo));
        if (has_lower) {
          store_u(s.lh + l_tile + i * 64, interleave_high(l[0].hi, l[1].hi));
          store_u(s.ll + l_tile + i * 64, interleave_high(l[0].lo, l[1].lo));
        }
      }
    }
  }
}

// hi and lo of one right-operand tile of the state (32 rows of k).
static inline void pack_state_tile(const Scratch& s, const HeadState& head, int64_t vt, int64_t kappa) {
  const float* src = tile_at(head.s, vt * s.kt + 2 * kappa);
  char* hi = tile_at(head.hi, vt * s.kappas + kappa);
  char* lo = tile_at(head.lo, vt * s.kappas + kappa);
  for (int i = 0; i < 16; ++i) {
    const Split even = split_bf16(load(src + i * 32)), odd = split_bf16(load(src + i * 32 + 16));
    store_u(hi + i * 64, interleave_high(even.hi, odd.hi));
    store_u(lo + i * 64, interleave_high(even.lo, odd.lo));
  }
}

static inline void pack_state(const Scratch& s, HeadState* head) {
  for (int64_t vt = 0; vt < s.vt; ++vt) {
    for (int64_t kappa = 0; kappa < s.kappas; ++kappa) pack_state_tile(s, *head, vt, kappa);
  }
  head->packed = true;
}

// S = sigma s with sigma = 1 from here on, after multiplying by `factor`.
static inline void rescale_state(const Scratch& s, HeadState* head, double factor) {
  head->sigma = 1;
  if (factor == 1) return;
  const float f = static_cast<float>(factor);
  for (int64_t i = 0; i < s.kt * s.vt * kTileFloats; i += 16) store(head->s + i, load(head->s + i) * f);
  head->packed = false;
}

// U' of row tile rt in place of R: forward substitution with the unit lower triangle in ld. Returns u * 0 summed: NaN
// if anything is not finite.
static inline VecF substitute(const Scratch& s, int64_t rt) {
  const float* l = tile_at(s.ld, rt);
  VecF bad[4] = {};  // four chains: one would take as long as the substitution
  for (int64_t vt = 0; vt < s.vt; ++vt) {
    float* tile = tile_at(s.ks, rt * s.vt + vt);
    VecF u[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) u[i] = load(tile + i * 16);
#pragma GCC unroll 16
    for (int j = 0; j < 15; ++j) {
#pragma GCC unroll 16
      for (int i = 1; i < 16; ++i) {
        if (i > j) u[i] = u[i] + l[i * 16 + j] * u[j];
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      bad[i % 4] = bad[i % 4] + u[i] * 0.0f;
      store(tile + i * 16, u[i]);
    }
  }
  return (bad[0] + bad[1]) + (bad[2] + bad[3]);
}

// Right-operand tiles of U' (hi, lo) of one 32-token step. Before the odd row tile is solved its half is zero.
static inline void pack_solution(const Scratch& s, int64_t step, bool both) {
  const VecU none{};
  for (int64_t vt = 0; vt < s.vt; ++vt) {
    const float* even_tile = tile_at(s.ks, 2 * step * s.vt + vt);
    const float* odd_tile = tile_at(s.ks, (2 * step + 1) * s.vt + vt);
    char* hi = tile_at(s.uh, step * s.vt + vt);
    char* lo = tile_at(s.ul, step * s.vt + vt);
    for (int i = 0; i < 16; ++i) {
      const Split even = split_bf16(load(even_tile + i * 16));
      const Split odd = both ? split_bf16(load(odd_tile + i * 16)) : Split{none, none};
      store_u(hi + i * 64, interleave_high(even.hi, odd.hi));
      store_u(lo + i * 64, interleave_high(even.lo, odd.lo));
    }
  }
}

// The update's right operand: rows of U' times fw (decay to the chunk's end, norm factor, 1 / sigma').
static inline void pack_update(const Scratch& s, int64_t step, int64_t vt_begin, int64_t vt_end) {
  for (int64_t vt = vt_begin; vt < vt_end; ++vt) {
    const float* even_tile = tile_at(s.ks, 2 * step * s.vt + vt);
    const float* odd_tile = tile_at(s.ks, (2 * step + 1) * s.vt + vt);
    char* hi = tile_at(s.wh, step * s.vt + vt);
    char* lo = tile_at(s.wl, step * s.vt + vt);
    for (int i = 0; i < 16; ++i) {
      const Split even = split_bf16(load(even_tile + i * 16) * s.fw[step * 32 + i]);
      const Split odd = split_bf16(load(odd_tile + i * 16) * s.fw[step * 32 + 16 + i]);
      store_u(hi + i * 64, interleave_high(even.hi, odd.hi));
      store_u(lo + i * 64, interleave_high(even.lo, odd.lo));
    }
  }
}

// R of row tile rt minus L times the U' above it, for the panel's columns; -L is stored, so this is a plain
// accumulation.
static inline void subtract_solved(const Scratch& s, int64_t rt) {
  const int64_t steps = (rt + 1) / 2;
  for (int64_t vt = 0; vt < s.vt; vt += 2) {
    float* c0 = tile_at(s.ks, rt * s.vt + vt);
    float* c1 = tile_at(s.ks, rt * s.vt + vt + 1);
    tile_load<0>(c0);
    tile_load<1>(c1);
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t b0 = step * s.vt + vt;
      tile_load<4>(tile_at(s.lh, rt - 1 + step));
      tile_load<5>(tile_at(s.ll, rt - 1 + step));
      tile_load<6>(tile_at(s.uh, b0));
      tile_load<7>(tile_at(s.uh, b0 + 1));
      tile_dp<0, 4, 6>();
      tile_dp<1, 4, 7>();
      tile_dp<0, 5, 6>();
      tile_dp<1, 5, 7>();
      tile_load<6>(tile_at(s.ul, b0));
      tile_load<7>(tile_at(s.ul, b0 + 1));
      tile_dp<0, 4, 6>();
      tile_dp<1, 4, 7>();
    }
    tile_store<0>(c0);
    tile_store<1>(c1);
  }
}

// R (in ks) to U' (in ks, uh, ul). False if a value is not finite.
static inline bool solve(const Scratch& s, int64_t pairs) {
  VecF bad = substitute(s, 0);
  for (int64_t step = 0; step < pairs; ++step) {
    if (step > 0) {
      subtract_solved(s, 2 * step);
      bad = bad + substitute(s, 2 * step);
    }
    pack_solution(s, step, false);
    subtract_solved(s, 2 * step + 1);
    bad = bad + substitute(s, 2 * step + 1);
    pack_solution(s, step, true);
  }
  return sum_lanes(bad) == 0.0f;
}

// pu = P U'. between(b) does a share of the vector work while block b is in the tile unit.
template <class Between>
static inline void local_output(const Scratch& s, int64_t pairs, Between between) {
  for (int64_t rt = 0; rt < 2 * pairs; rt += 2) {
    for (int64_t vt = 0; vt < s.vt; vt += 2) {
      block_zero();
      for (int64_t step = 0; step <= rt / 2; ++step) {
        const int64_t a0 = rt * 2 + step, a1 = a0 + 2, b0 = step * s.vt + vt;
        block_load_a(tile_at(s.ph, a0), tile_at(s.ph, a1));
        block_dp(tile_at(s.ul, b0), tile_at(s.ul, b0 + 1));
        block_dp(tile_at(s.uh, b0), tile_at(s.uh, b0 + 1));
        tile_load<4>(tile_at(s.pl, a0));
        tile_load<5>(tile_at(s.pl, a1));
        tile_dp<0, 4, 6>();
        tile_dp<1, 4, 7>();
        tile_dp<2, 5, 6>();
        tile_dp<3, 5, 7>();
      }
      between((rt / 2) * (s.vt / 2) + vt / 2);
      block_store(tile_at(s.pu, rt * s.vt + vt), tile_at(s.pu, rt * s.vt + vt + 1), tile_at(s.pu, (rt + 1) * s.vt + vt),
                  tile_at(s.pu, (rt + 1) * s.vt + vt + 1));
    }
  }
}

// s += K^T U''; each block is packed for the next chunk one block later, so that the loads do not wait for the tile
// stores and the vector work runs beside the next block's products.
template <class Between>
static inline void update_state(const Scratch& s, HeadState* head, int64_t pairs, Between between) {
  for (int64_t vt = 0; vt < s.vt; vt += 2) {
    for (int64_t kappa = 0; kappa < s.kappas; ++kappa) {
      float* c0 = tile_at(head->s, vt * s.kt + 2 * kappa);
      float* c1 = tile_at(head->s, (vt + 1) * s.kt + 2 * kappa);
      block_load(c0, c1, c0 + kTileFloats, c1 + kTileFloats);
      for (int64_t step = 0; step < pairs; ++step) {
        const int64_t b0 = step * s.vt + vt;
        block_load_a(tile_at(s.kta, 2 * kappa * 2 + step), tile_at(s.kta, (2 * kappa + 1) * 2 + step));
        block_dp(tile_at(s.wh, b0), tile_at(s.wh, b0 + 1));
        block_dp(tile_at(s.wl, b0), tile_at(s.wl, b0 + 1));
      }
      if (kappa > 0) {
        pack_state_tile(s, *head, vt, kappa - 1);
        pack_state_tile(s, *head, vt + 1, kappa - 1);
      } else if (vt > 0) {
        pack_state_tile(s, *head, vt - 2, s.kappas - 1);
        pack_state_tile(s, *head, vt - 1, s.kappas - 1);
      }
      between((vt / 2) * s.kappas + kappa);
      block_store(c0, c1, c0 + kTileFloats, c1 + kTileFloats);
    }
  }
  pack_state_tile(s, *head, s.vt - 2, s.kappas - 1);
  pack_state_tile(s, *head, s.vt - 1, s.kappas - 1);
  head->packed = true;
}

}  // namespace gdn::cpu::amx
