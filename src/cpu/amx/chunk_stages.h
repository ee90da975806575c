// SPDX-License-Identifier: MIT
// The arithmetic of one chunk on the scratch of an item (docs/math.md, "Chunked form"). TDPBF16PS counts are per head
// and chunk at K = V = 128.
//
//   scores  kk = K K^T, qk = Q K^T                                              80, shared by the heads of a key head
//   gates   -L = -beta_i kk Gamma, P = scale qk Gamma                           vector
//   read    ks = K s, qs = Q s                                                 256; exact 512
//   solve   R = beta (V - e^G sigma ks); U' = (I + L)^-1 R                       96 + fp32 substitution in the 16 x 16
//           diagonal blocks
//   output  o = e^G sigma scale qs + P U'                                        96; exact 144
//   update  s += K^T (e^{G_C - G} U' / sigma'), then s to bf16                  256
//
// Where bits are lost. K and Q are exact (an L2 norm or e^G scales fp32 rows afterwards, never bf16 operands), L, U'
// and U'' are pairs hi + lo (2^-17), accumulation and the state itself are fp32. The default form rounds to bf16 what
// is read and not kept: s as operand of K s and Q s, and P. That costs o about what its own bf16 costs (together 2.4e-3
// against 1.65e-3) and the state up to 1.6e-3 without decay, 1e-4 with. The exact form keeps these as pairs too: o is
// as good as its own dtype, the state good to 1e-5.
#pragma once
#include "cpu/amx/chunk_scratch.h"

namespace gdn::cpu::amx {

GDN_AMX_INLINE char* tile_at(char* tiles, int64_t i) { return tiles + i * kTileBytes; }
GDN_AMX_INLINE float* tile_at(float* tiles, int64_t i) { return tiles + i * kTileFloats; }

// Asks for rows that later stages touch, a row at a time between other work: a head's row is a few lines in a page of
// its own, out of the hardware prefetchers' reach, and asking for a whole chunk at once fills the core's few miss
// buffers and stops it for microseconds.
class RowPrefetcher {
 public:
  struct Range {
    const char* row;
    int64_t stride, rows, bytes;
    bool write;
  };
  void add(const Range& range) {
    if (range.rows > 0) ranges_[count_++] = range;
  }
  GDN_AMX_INLINE_MEMBER void tick() {
    if (at_ == count_) return;
    Range& r = ranges_[at_];
    for (int64_t at = 0; at < r.bytes; at += 64) {
#if defined(__x86_64__)
      if (r.write) {
        __asm__ volatile("prefetchw %0" ::"m"(r.row[at]));
        continue;
      }
#endif
      __builtin_prefetch(r.row + at, 0, 2);
    }
    r.row += r.stride;
    if (--r.rows == 0) ++at_;
  }
  void ticks(int64_t n) {
    for (int64_t i = 0; i < n; ++i) tick();
  }

 private:
  Range ranges_[4] = {};
  int count_ = 0, at_ = 0;
};

// Right-operand tiles of keys (K^T) from ka. `pairs` = 32-token steps in use.
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
  }
}

// Left-operand tiles of K^T of one 32-wide step of K.
static inline void pack_transposed_keys(const Scratch& s, int64_t pairs, int64_t kappa) {
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

// kk and qk, lower block triangle; the packing of K^T runs beside the products.
static inline void scores(const Scratch& s, int64_t pairs) {
  int64_t packed = 0;
  for (int64_t rt = 0; rt < 2 * pairs; ++rt) {
    for (int64_t ct = 0; ct <= rt; ct += 2) {
      block_zero();
      for (int64_t kappa = 0; kappa < s.kappas; ++kappa) {
        block_load_a(tile_at(s.ka, rt * s.kappas + kappa), tile_at(s.qa, rt * s.kappas + kappa));
        if (ct < rt) {
          block_dp(tile_at(s.kb, kappa * 4 + ct), tile_at(s.kb, kappa * 4 + ct + 1));
        } else {  // the tile right of the diagonal is never read
          tile_load<6>(tile_at(s.kb, kappa * 4 + ct));
          tile_dp<0, 4, 6>();
          tile_dp<2, 5, 6>();
        }
      }
      if (packed < s.kappas) pack_transposed_keys(s, pairs, packed++);
      tile_store<0>(tile_at(s.kk, rt * 4 + ct));
      tile_store<2>(tile_at(s.qk, rt * 4 + ct));
      if (ct < rt) {
        tile_store<1>(tile_at(s.kk, rt * 4 + ct + 1));
        tile_store<3>(tile_at(s.qk, rt * 4 + ct + 1));
      }
    }
  }
  while (packed < s.kappas) pack_transposed_keys(s, pairs, packed++);
}

// ks = K s and qs = Q s, one 32-wide step of K of one 2 x 2 block at a time, so that the gates' vector work can run
// between the steps: the two share no registers. All of K s first, so that K (16 KiB) stays in L1 while s passes.
template <bool kExact>
class StateReader {
 public:
  StateReader(const Scratch& s, const HeadState& head, int64_t pairs) : s_(s), head_(head), row_tiles_(2 * pairs) {
    start();
  }
  GDN_AMX_INLINE_MEMBER void advance() {
    if (which_ == 2) return;
    if (kappa_ == 0) block_zero();
    const int64_t at = kappa_ * kTileBytes, a_row = s_.kappas * kTileBytes;
    block_load_a(a_ + at, a_ + a_row + at);
    block_dp(hi_ + at, hi_ + a_row + at);
    if constexpr (kExact) block_dp(lo_ + at, lo_ + a_row + at);
    if (++kappa_ < s_.kappas) return;
    float* out = tile_at(which_ == 0 ? s_.ks : s_.qs, rt_ * s_.vt + vt_);
    float* below = tile_at(out, s_.vt);
    block_store(out, tile_at(out, 1), below, tile_at(below, 1));
    kappa_ = 0;
    rt_ += 2;
    if (rt_ == row_tiles_) {
      rt_ = 0;
      vt_ += 2;
      if (vt_ == s_.vt) {
        vt_ = 0;
        ++which_;
      }
    }
    start();
  }
  int64_t steps() const { return s_.vt / 2 * row_tiles_ * s_.kappas; }
  void finish() {
    while (which_ < 2) advance();
  }

 private:
  void start() {
    a_ = tile_at(which_ == 0 ? s_.ka : s_.qa, rt_ * s_.kappas);
    hi_ = tile_at(head_.hi, vt_ * s_.kappas);
    if constexpr (kExact) lo_ = tile_at(head_.lo, vt_ * s_.kappas);
  }
  const Scratch& s_;
  const HeadState& head_;
  int64_t row_tiles_, vt_ = 0, which_ = 0, rt_ = 0, kappa_ = 0;
  const char *a_ = nullptr, *hi_ = nullptr, *lo_ = nullptr;
};

// A row of a right or P operand: words of `even` and `odd` interleaved, in hi and, if kept, lo.
template <bool kLo>
GDN_AMX_INLINE void store_pair(char* hi, char* lo, VecF even, VecF odd) {
  if constexpr (kLo) {
    const Split e = split_bf16(even), o = split_bf16(odd);
    store_u(hi, interleave_high(e.hi, o.hi));
    store_u(lo, interleave_high(e.lo, o.lo));
  } else {
    store_u(hi, interleave_high(bits(even) + 0x8000u, bits(odd) + 0x8000u));
  }
}

// -L and P of one head. Gamma is e^(G_i - G_j) of differences only, masked before the exponential; columns carry the
// keys' norm factor, rows beta and the scale. Spreads the steps of `reader` evenly over its rows.
template <bool kExact>
static inline void gate_scores(const Scratch& s, int64_t pairs, float scale, StateReader<kExact>* reader,
                               RowPrefetcher* prefetch) {
  const int64_t num_rows = 16 * pairs * (pairs + 1), num_steps = reader->steps();
  int64_t credit = 0;
  const VecI column = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const VecU none{};
  for (int64_t rt = 0; rt < 2 * pairs; ++rt) {
    for (int64_t step = 0; step <= rt / 2; ++step) {
      const int64_t p_tile = (rt * 2 + step) * kTileBytes;
      const int64_t l_tile = (rt == 0 ? 0 : rt + step - 1) * kTileBytes;  // row tile 0 has nothing below the diagonal
      const bool has_lower = 2 * step < rt;
      for (int64_t i = 0; i < 16; ++i) {
        for (credit += num_steps; credit >= num_rows; credit -= num_rows) reader->advance();
        prefetch->tick();
        const int64_t row = rt * 16 + i;
        const float row_gh = s.gh[row], row_gl = s.gl[row];
        const float row_l = -s.beta[row] * s.rk[row], row_p = scale * s.rq[row];
        Split l[2] = {{none, none}, {none, none}};
        VecF pr[2] = {};
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
          pr[odd] = load(s.qk + at) * gamma * row_p;
          const VecF lower = load(s.kk + at) * gamma * row_l;
          if (ct == rt) {
            store(tile_at(s.ld, rt) + i * 16, lower);  // only columns < i are read
          } else {
            l[odd] = split_bf16(lower);
          }
        }
        store_pair<kExact>(s.ph + p_tile + i * 64, kExact ? s.pl + p_tile + i * 64 : nullptr, pr[0], pr[1]);
        if (has_lower) {
          store_u(s.lh + l_tile + i * 64, interleave_high(l[0].hi, l[1].hi));
          store_u(s.ll + l_tile + i * 64, interleave_high(l[0].lo, l[1].lo));
        }
      }
    }
  }
}

// One right-operand tile of the state (32 rows of k).
template <bool kExact>
static inline void pack_state_tile(const Scratch& s, const HeadState& head, int64_t vt, int64_t kappa) {
  const float* src = tile_at(head.s, vt * s.kt + 2 * kappa);
  const int64_t at = (vt * s.kappas + kappa) * kTileBytes;
  for (int i = 0; i < 16; ++i) {
    store_pair<kExact>(head.hi + at + i * 64, kExact ? head.lo + at + i * 64 : nullptr, load(src + i * 32),
                       load(src + i * 32 + 16));
  }
}

template <bool kExact>
static inline void pack_state(const Scratch& s, HeadState* head) {
  for (int64_t vt = 0; vt < s.vt; ++vt) {
    for (int64_t kappa = 0; kappa < s.kappas; ++kappa) pack_state_tile<kExact>(s, *head, vt, kappa);
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

// U' of one tile in place of R: forward substitution with the unit lower triangle in ld; then its half of the pair of
// right-operand tiles uh, ul (an even row tile leaves the odd half zero until that is solved). Returns u * 0 summed:
// NaN if anything is not finite.
static __attribute__((noinline)) VecF substitute(const Scratch& s, int64_t rt, int64_t vt) {
  const float* l = tile_at(s.ld, rt);
  float* tile = tile_at(s.ks, rt * s.vt + vt);
  char* hi = tile_at(s.uh, rt / 2 * s.vt + vt);
  char* lo = tile_at(s.ul, rt / 2 * s.vt + vt);
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
  VecF bad[2] = {};
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    bad[i % 2] = bad[i % 2] + u[i] * 0.0f;
    store(tile + i * 16, u[i]);
  }
  if (rt % 2 == 0) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const Split x = split_bf16(u[i]);
      store_u(hi + i * 64, x.hi >> 16);
      store_u(lo + i * 64, x.lo >> 16);
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const Split x = split_bf16(u[i]);
      store_u(hi + i * 64, load_u(hi + i * 64) | x.hi);
      store_u(lo + i * 64, load_u(lo + i * 64) | (x.lo & 0xffff0000u));
    }
  }
  return bad[0] + bad[1];
}

// The update's right operand: rows of U' times fw (decay to the chunk's end, norm factor, 1 / sigma').
static inline void pack_update(const Scratch& s, int64_t step, int64_t vt_begin, int64_t vt_end) {
  for (int64_t vt = vt_begin; vt < vt_end; ++vt) {
    const float* even_tile = tile_at(s.ks, 2 * step * s.vt + vt);
    const float* odd_tile = tile_at(s.ks, (2 * step + 1) * s.vt + vt);
    char* hi = tile_at(s.wh, step * s.vt + vt);
    char* lo = tile_at(s.wl, step * s.vt + vt);
    for (int i = 0; i < 16; ++i) {
      store_pair<true>(hi + i * 64, lo + i * 64, load(even_tile + i * 16) * s.fw[step * 32 + i],
                       load(odd_tile + i * 16) * s.fw[step * 32 + 16 + i]);
    }
  }
}

// R of row tile rt, two column tiles, minus L times the U' above it; -L is stored, so this is a plain accumulation.
static inline void subtract_solved(const Scratch& s, int64_t rt, int64_t vt) {
  float* c0 = tile_at(s.ks, rt * s.vt + vt);
  float* c1 = tile_at(s.ks, rt * s.vt + vt + 1);
  tile_load<0>(c0);
  tile_load<1>(c1);
  for (int64_t step = 0; step < (rt + 1) / 2; ++step) {
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

// R (in ks) to U' (in ks, uh, ul). False if a value is not finite. The products of a pair of column tiles run beside
// the substitution of the pair before it.
static inline bool solve(const Scratch& s, int64_t pairs, RowPrefetcher* prefetch) {
  VecF bad[2] = {};
  for (int64_t rt = 0; rt < 2 * pairs; ++rt) {
    if (rt > 0) subtract_solved(s, rt, 0);
    for (int64_t vt = 0; vt < s.vt; vt += 2) {
      if (rt > 0 && vt + 2 < s.vt) subtract_solved(s, rt, vt + 2);
      bad[0] = bad[0] + substitute(s, rt, vt);
      prefetch->ticks(3);
      bad[1] = bad[1] + substitute(s, rt, vt + 1);
      prefetch->ticks(3);
    }
  }
  return sum_lanes(bad[0] + bad[1]) == 0.0f;
}

// pu = P U' of two column tiles. between(step) does a share of the vector work while a block is in the tile unit.
template <bool kExact, class Between>
static inline void local_output(const Scratch& s, int64_t pairs, int64_t vt, Between between) {
  for (int64_t rt = 0; rt < 2 * pairs; rt += 2) {
    block_zero();
    for (int64_t step = 0; step <= rt / 2; ++step) {
      const int64_t a0 = rt * 2 + step, a1 = a0 + 2, b0 = step * s.vt + vt;
      block_load_a(tile_at(s.ph, a0), tile_at(s.ph, a1));
      block_dp(tile_at(s.ul, b0), tile_at(s.ul, b0 + 1));
      block_dp(tile_at(s.uh, b0), tile_at(s.uh, b0 + 1));
      if constexpr (kExact) {
        tile_load<4>(tile_at(s.pl, a0));
        tile_load<5>(tile_at(s.pl, a1));
        tile_dp<0, 4, 6>();
        tile_dp<1, 4, 7>();
        tile_dp<2, 5, 6>();
        tile_dp<3, 5, 7>();
      }
    }
    between(rt / 2);
    block_store(tile_at(s.pu, rt * s.vt + vt), tile_at(s.pu, rt * s.vt + vt + 1), tile_at(s.pu, (rt + 1) * s.vt + vt),
                tile_at(s.pu, (rt + 1) * s.vt + vt + 1));
  }
}

// s += K^T U'' of two column tiles. Each block is packed for the next chunk one block later, so that the loads do not
// wait for the tile stores and the vector work runs beside the next block's products; the last one is left to the next
// call (finish_update after the last).
template <bool kExact, class Between>
static inline void update_state(const Scratch& s, const HeadState& head, int64_t pairs, int64_t vt, Between between) {
  for (int64_t kappa = 0; kappa < s.kappas; ++kappa) {
    float* c0 = tile_at(head.s, vt * s.kt + 2 * kappa);
    float* c1 = tile_at(head.s, (vt + 1) * s.kt + 2 * kappa);
    block_load(c0, c1, c0 + kTileFloats, c1 + kTileFloats);
    for (int64_t step = 0; step < pairs; ++step) {
      const int64_t b0 = step * s.vt + vt;
      block_load_a(tile_at(s.kta, 2 * kappa * 2 + step), tile_at(s.kta, (2 * kappa + 1) * 2 + step));
      block_dp(tile_at(s.wh, b0), tile_at(s.wh, b0 + 1));
      block_dp(tile_at(s.wl, b0), tile_at(s.wl, b0 + 1));
    }
    if (kappa > 0) {
      pack_state_tile<kExact>(s, head, vt, kappa - 1);
      pack_state_tile<kExact>(s, head, vt + 1, kappa - 1);
    } else if (vt > 0) {
      pack_state_tile<kExact>(s, head, vt - 2, s.kappas - 1);
      pack_state_tile<kExact>(s, head, vt - 1, s.kappas - 1);
    }
    between(kappa);
    block_store(c0, c1, c0 + kTileFloats, c1 + kTileFloats);
  }
}

template <bool kExact>
static inline void finish_update(const Scratch& s, HeadState* head) {
  pack_state_tile<kExact>(s, *head, s.vt - 2, s.kappas - 1);
  pack_state_tile<kExact>(s, *head, s.vt - 1, s.kappas - 1);
  head->packed = true;
}

}  // namespace gdn::cpu::amx
