// SPDX-License-Identifier: MIT
// Scratch of one item. Everything is kept in 1 KiB tiles (16 rows of 64 bytes) in the order in which the products walk
// it. Sizes for K = V = 128 and two heads: 240 KiB + 2 * 96 KiB (exact: 2 * 128 KiB), resident in a 2 MiB L2.
#pragma once
#include "cpu/amx/chunk_kernel.h"
#include "cpu/amx/tile.h"

namespace gdn::cpu::amx {

inline constexpr int64_t kTileFloats = kTileBytes / 4;

// A head's running state: S = sigma * s, s fp32 [vt][kt][16 k][16 v]. Keeping e^G in sigma saves a pass over the state
// per chunk.
struct HeadState {
  float* s;
  char* hi;  // bf16 of s as the right operand of K S and Q S: [vt][kappa][16 pairs of k][16 v]
  char* lo;  // exact form only: s = hi + lo up to 2^-17
  double sigma;
  bool packed;  // hi (and lo) are those of s
};

struct Scratch {
  int64_t kt, kappas, vt;  // tiles of K, 32-wide steps of K, tiles of the V panel
  // Shared by the heads of one key head.
  char *ka, *qa;   // [4 row tiles][kappas]: left operand, rows are tokens
  char* kb;        // [kappas][4]: K^T as right operand (pairs of k, columns are tokens)
  char* kta;       // [kt][2]: K^T as left operand; column 2n of a 32-token step is token n, column 2n + 1 token 16 + n
  float *kk, *qk;  // [4][4] tiles of K K^T and Q K^T, lower block triangle
  float *norm_k2, *rk, *rq;  // [64] squared norms of the keys as used, factors of the L2 norm
  float *row_k, *row_q;      // [kMaxDim] token loop
  // Per head, reused.
  float *g, *beta, *gh, *gl;  // [64]; cumulated g as gh + gl
  float *fk, *fo, *fw;        // [64] factors of the rows of K S, Q S and of U' in the update
  float* out_row;             // [kMaxDim]
  double* cum_g;              // [64]
  float* ld;                  // [4] diagonal tiles of -L
  char *lh, *ll;              // -L below the diagonal as left operand, tiles (1,0) (2,0) (3,0) (3,1)
  char *ph, *pl;              // [4][2] P as left operand; pl in the exact form only
  float *ks, *qs, *pu;        // [4][vt] K S (then R, then U'), Q S, P U'
  char *uh, *ul, *wh, *wl;    // [2][vt] U' and e^{G_C - G} U' / sigma as right operands, pairs (token n, token 16 + n)
  float* io_row;              // [kMaxDim]
  HeadState* heads;
};

// Walks the layout; base == nullptr only measures.
struct ScratchCarver {
  char* base;
  int64_t used = 0;
  char* take(int64_t bytes) {
    char* p = base == nullptr ? nullptr : base + used;
    used += (bytes + 63) / 64 * 64;
    return p;
  }
  char* tiles(int64_t n) { return take(n * kTileBytes); }
  float* float_tiles(int64_t n) { return reinterpret_cast<float*>(tiles(n)); }
  float* floats(int64_t n) { return reinterpret_cast<float*>(take(n * 4)); }
};

static inline int64_t carve(char* base, int64_t K, int64_t panel_v, int64_t num_heads, bool exact, Scratch* s) {
  ScratchCarver c{base};
  s->kt = K / 16;
  s->kappas = K / 32;
  s->vt = panel_v / 16;
  s->ka = c.tiles(4 * s->kappas);
  s->qa = c.tiles(4 * s->kappas);
  s->kb = c.tiles(4 * s->kappas);
  s->kta = c.tiles(2 * s->kt);
  s->kk = c.float_tiles(16);
  s->qk = c.float_tiles(16);
  s->ld = c.float_tiles(4);
  s->lh = c.tiles(4);
  s->ll = c.tiles(4);
  s->ph = c.tiles(8);
  s->pl = c.tiles(exact ? 8 : 0);
  s->ks = c.float_tiles(4 * s->vt);
  s->qs = c.float_tiles(4 * s->vt);
  s->pu = c.float_tiles(4 * s->vt);
  s->uh = c.tiles(2 * s->vt);
  s->ul = c.tiles(2 * s->vt);
  s->wh = c.tiles(2 * s->vt);
  s->wl = c.tiles(2 * s->vt);
  for (float** p : {&s->norm_k2, &s->rk, &s->rq, &s->gh, &s->gl, &s->beta, &s->g, &s->fk, &s->fo, &s->fw})
    *p = c.floats(kChunk);
  for (float** p : {&s->row_k, &s->row_q, &s->out_row, &s->io_row}) *p = c.floats(kMaxDim);
  s->cum_g = reinterpret_cast<double*>(c.take(kChunk * 8));
  s->heads = reinterpret_cast<HeadState*>(c.take(num_heads * static_cast<int64_t>(sizeof(HeadState))));
  for (int64_t j = 0; j < num_heads; ++j) {
    HeadState head{};
    head.s = c.float_tiles(s->kt * s->vt);
    head.hi = c.tiles(s->kappas * s->vt);
    head.lo = c.tiles(exact ? s->kappas * s->vt : 0);
    if (base != nullptr) s->heads[j] = head;
  }
  return c.used;
}

}  // namespace gdn::cpu::amx
