// SPDX-License-Identifier: MIT
// Causal depthwise convolution. Channels are taken in blocks; per block the taps, the carried context and the bias are
// brought to fp32 rows on the stack, the new state is written, and then the tokens run: over channels (token-major
// data) or over time (channel-first data). Every path forms bias + w0 x0 + w1 x1 + .. in the same order with whole
// vectors, so a value does not depend on layout, on the split over threads or on where a sequence was cut.
#include "cpu/isa/activations-inl.h"
#include "cpu/isa/kernels.h"

namespace gdn::cpu::GDN_ISA_NS {
namespace {

constexpr int64_t kMaxW = 16;
constexpr int64_t kBlockC = 512;    // channels per block, widths up to 4; the taps and context then fit L1
constexpr int64_t kBlockWide = 64;  // channels per block, wider
constexpr int64_t kBlockT = 1024;   // tokens per block along time
constexpr int64_t kTile = 4;        // tokens a vector of channels takes at once: their lines must share L1's sets

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t round_up_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// -- matrices [n channels, columns] <-> rows of channels
// With 3 or 4 adjacent columns (weights; conv states as Transformers and SGLang keep them) whole vectors are
// interleaved.
template <int64_t kColumns>
int64_t load_interleaved(const char* p, int32_t dtype, int64_t n, float* const* rows) {
  const F32Tag d;
  int64_t i = 0;
  if (dtype == GDN_F32) {
    const float* f = reinterpret_cast<const float*>(p);
    for (; i + kLanes <= n; i += kLanes) {
      F32Vec a, b, c, e;
      if constexpr (kColumns == 3) {
        hn::LoadInterleaved3(d, f + 3 * i, a, b, c);
      } else {
        hn::LoadInterleaved4(d, f + 4 * i, a, b, c, e);
        hn::StoreU(e, d, rows[3] + i);
      }
      hn::StoreU(a, d, rows[0] + i);
      hn::StoreU(b, d, rows[1] + i);
      hn::StoreU(c, d, rows[2] + i);
    }
  }
  return i;
}
template <int64_t kColumns>
int64_t store_interleaved(const float* const* rows, char* p, int32_t dtype, int64_t n) {
  const F32Tag d;
  int64_t i = 0;
  if (dtype == GDN_F32) {
    float* f = reinterpret_cast<float*>(p);
    for (; i + kLanes <= n; i += kLanes) {
      const F32Vec a = hn::LoadU(d, rows[0] + i), b = hn::LoadU(d, rows[1] + i), c = hn::LoadU(d, rows[2] + i);
      if constexpr (kColumns == 3) {
        hn::StoreInterleaved3(a, b, c, d, f + 3 * i);
      } else {
        hn::StoreInterleaved4(a, b, c, hn::LoadU(d, rows[3] + i), d, f + 4 * i);
      }
    }
  }
  return i;
}

// Columns [first, first + count) of a view's matrix whose channel 0 is at p.
void load_columns(const char* p, int32_t dtype, int64_t channel_stride, int64_t column_stride, int64_t count, int64_t n,
                  float* const* rows) {
  int64_t done = 0;
  if (column_stride == 1 && channel_stride == count) {
    if (count == 3) done = load_interleaved<3>(p, dtype, n, rows);
    if (count == 4) done = load_interleaved<4>(p, dtype, n, rows);
  }
  const int64_t bytes = dtype_bytes(dtype);
  for (int64_t l = 0; l < count; ++l) {
    load_row(p + (l * column_stride + done * channel_stride) * bytes, dtype, channel_stride, n - done, rows[l] + done);
  }
}
void store_columns(const float* const* rows, char* p, int32_t dtype, int64_t channel_stride, int64_t column_stride,
                   int64_t count, int64_t n) {
  int64_t done = 0;
  if (column_stride == 1 && channel_stride == count) {
    if (count == 3) done = store_interleaved<3>(rows, p, dtype, n);
    if (count == 4) done = store_interleaved<4>(rows, p, dtype, n);
  }
  const int64_t bytes = dtype_bytes(dtype);
  for (int64_t l = 0; l < count; ++l) {
    store_row(rows[l] + done, p + (l * column_stride + done * channel_stride) * bytes, dtype, channel_stride, n - done);
  }
}

// What one call works on: a sequence, its tokens [t_begin, t_end), and channels [c, c + n) of it.
struct Job {
  const ConvProblem& p;
  const Sequence& s;
  int64_t seq;
  int64_t t_begin, t_end;
  int64_t c = 0, n = 0;

  const char* x(int64_t t) const { return p.x.at(s.batch, c, s.begin + t); }
  char* y(int64_t t) const { return p.y.at(s.batch, c, s.begin + t); }
  bool windowed() const { return !p.num_accepted.empty(); }
  // Column of the initial state that holds context column j, j in [0, W-1).
  int64_t context_column(int64_t j) const {
    return windowed() ? p.num_accepted[static_cast<size_t>(seq)] - 1 + j : p.L - (p.W - 1) + j;
  }
  const char* initial(int64_t l) const { return p.initial_state.at(s.read_slot, c, l); }
  char* final(int64_t l) const { return p.final_state.at(s.write_slot, c, l); }
  bool has_initial() const { return s.read_slot >= 0 && p.initial_state.present(); }
};

template <int64_t kRows, int64_t kChannels>
struct Buffers {
  alignas(64) float taps[kRows][kChannels];
  alignas(64) float context[kRows][kChannels];  // W - 1 rows, oldest first
  alignas(64) float bias[kChannels];
  alignas(64) float state[8][kChannels];  // at most 4 old columns and 4 inputs
};

inline void pad(float* row, int64_t n) {
  for (int64_t i = n; i < round_up_lanes(n); ++i) row[i] = 0.0f;
}

template <class B>
void load_parameters(const Job& j, B* b) {
  float* rows[kMaxW];
  for (int64_t w = 0; w < j.p.W; ++w) rows[w] = b->taps[w];
  load_columns(j.p.weight.at(j.c, 0), j.p.weight.dtype, j.p.weight.stride[0], j.p.weight.stride[1], j.p.W, j.n, rows);
  for (int64_t w = 0; w < j.p.W; ++w) pad(b->taps[w], j.n);
  if (j.p.bias.present()) {
    load_row(j.p.bias.at(j.c), j.p.bias.dtype, j.p.bias.stride[0], j.n, b->bias);
    pad(b->bias, j.n);
  } else {
    for (int64_t i = 0; i < round_up_lanes(j.n); ++i) b->bias[i] = 0.0f;
  }
}

// The W - 1 inputs before t_begin.
template <class B>
void load_context(const Job& j, B* b) {
  for (int64_t i = 0; i < j.p.W - 1; ++i) {
    const int64_t t = j.t_begin - (j.p.W - 1) + i;
    float* row = b->context[i];
    if (t >= 0) {
      load_row(j.x(t), j.p.x.dtype, j.p.x.stride[1], j.n, row);
      pad(row, j.n);
    } else if (j.has_initial()) {
      const int64_t l = j.context_column(i + j.t_begin);
      load_row(j.initial(l), j.p.initial_state.dtype, j.p.initial_state.stride[1], j.n, row);
      pad(row, j.n);
    } else {
      for (int64_t k = 0; k < round_up_lanes(j.n); ++k) row[k] = 0.0f;
    }
  }
}

// Columns [0, len + W - 2) become the context without its oldest column, then x.
template <class B>
void write_window(const Job& j, B* b) {
  const View& f = j.p.final_state;
  for (int64_t l = 0; l < j.p.W - 2; ++l) store_row(b->context[l + 1], j.final(l), f.dtype, f.stride[1], j.n);
  for (int64_t t = 0; t < j.s.len; ++t) {
    load_row(j.x(t), j.p.x.dtype, j.p.x.stride[1], j.n, b->state[0]);
    store_row(b->state[0], j.final(j.p.W - 2 + t), f.dtype, f.stride[1], j.n);
  }
}

// The last L columns of [old state, x]. Reads nothing that it has overwritten when both states are one view: column l
// takes l + len, and ascending order writes l first.
template <class B>
void write_last_columns(const Job& j, B* b) {
  const View& f = j.p.final_state;
  const View& old = j.p.initial_state;
  const int64_t L = j.p.L, kept = j.s.len < L ? L - j.s.len : 0;  // old columns that stay
  if (L <= 4) {
    float* rows[8];
    for (int64_t l = 0; l < 8; ++l) rows[l] = b->state[l];
    if (kept > 0) {
      if (j.has_initial()) {
        load_columns(j.initial(0), old.dtype, old.stride[1], old.stride[2], L, j.n, rows);
      } else {
        for (int64_t l = 0; l < L; ++l) {
          for (int64_t i = 0; i < j.n; ++i) rows[l][i] = 0.0f;
        }
      }
    }
    const float* fresh[4];
    for (int64_t l = 0; l < L; ++l) {
      if (l < kept) {
        fresh[l] = rows[l + j.s.len];
      } else {
        load_row(j.x(j.s.len - L + l), j.p.x.dtype, j.p.x.stride[1], j.n, rows[4 + l]);
        fresh[l] = rows[4 + l];
      }
    }
    return store_columns(fresh, j.final(0), f.dtype, f.stride[1], f.stride[2], L, j.n);
  }
  float* row = b->state[0];
  for (int64_t l = 0; l < L; ++l) {
    if (l >= kept) {
      load_row(j.x(j.s.len - L + l), j.p.x.dtype, j.p.x.stride[1], j.n, row);
    } else if (j.has_initial()) {
      load_row(j.initial(l + j.s.len), old.dtype, old.stride[1], j.n, row);
    } else {
      for (int64_t i = 0; i < j.n; ++i) row[i] = 0.0f;
    }
    store_row(row, j.final(l), f.dtype, f.stride[1], j.n);
  }
}

template <class B>
void write_state(const Job& j, B* b) {
  if (j.s.write_slot < 0 || !j.p.final_state.present()) return;
  if (j.windowed() && j.s.len > 0) return write_window(j, b);
  write_last_columns(j, b);
}

// -- token-major, channels adjacent, W known: kTile tokens of one vector of channels, the context in registers.
template <int64_t kW, int32_t kX, int32_t kY, bool kWhole>
HWY_INLINE void tile(const char* x, int64_t x_step, char* y, int64_t y_step, int64_t tokens, int64_t lanes_used,
                     const float* taps, const float* bias, float* context, bool silu) {
  const F32Tag d;
  F32Vec w[kW], in[kW];
  for (int64_t k = 0; k < kW; ++k) w[k] = hn::LoadU(d, taps + k * kBlockC);
  for (int64_t k = 0; k < kW - 1; ++k) in[k] = hn::LoadU(d, context + k * kBlockC);
  const F32Vec b = hn::LoadU(d, bias);
  for (int64_t t = 0; t < tokens; ++t) {
    if constexpr (kWhole) {
      in[kW - 1] = load_vec<kX>(x + t * x_step);
    } else {
      alignas(64) float part[kLanes] = {};
      load_row_t<kX>(x + t * x_step, 1, lanes_used, part);
      in[kW - 1] = hn::LoadU(d, part);
    }
    F32Vec acc = b;
    for (int64_t k = 0; k < kW; ++k) acc = hn::MulAdd(w[k], in[k], acc);
    if (silu) acc = silu_vec(acc);
    if constexpr (kWhole) {
      store_vec<kY>(acc, y + t * y_step);
    } else {
      alignas(64) float part[kLanes];
      hn::StoreU(acc, d, part);
      store_row_t<kY>(part, y + t * y_step, 1, lanes_used);
    }
    for (int64_t k = 0; k < kW - 1; ++k) in[k] = in[k + 1];
  }
  for (int64_t k = 0; k < kW - 1; ++k) hn::StoreU(in[k], d, context + k * kBlockC);
}

template <int64_t kW, int32_t kX, int32_t kY>
void token_major(const Job& j, Buffers<4, kBlockC>* b) {
  constexpr int64_t kXBytes = kX == GDN_F32 ? 4 : 2, kYBytes = kY == GDN_F32 ? 4 : 2;
  const int64_t x_step = j.p.x.stride[2] * kXBytes, y_step = j.p.y.stride[2] * kYBytes;
  const bool silu = j.p.activation == GDN_ACT_SILU;
  for (int64_t t = j.t_begin; t < j.t_end; t += kTile) {
    const int64_t tokens = min64(kTile, j.t_end - t);
    const char* x = j.x(t);
    char* y = j.y(t);
    int64_t i = 0;
    for (; i + kLanes <= j.n; i += kLanes) {
      // A constant count lets the compiler unroll and keep the context in registers.
      if (tokens == kTile) {
        tile<kW, kX, kY, true>(x + i * kXBytes, x_step, y + i * kYBytes, y_step, kTile, kLanes, b->taps[0] + i,
                               b->bias + i, b->context[0] + i, silu);
      } else {
        tile<kW, kX, kY, true>(x + i * kXBytes, x_step, y + i * kYBytes, y_step, tokens, kLanes, b->taps[0] + i,
                               b->bias + i, b->context[0] + i, silu);
      }
    }
    if (i < j.n) {
      tile<kW, kX, kY, false>(x + i * kXBytes, x_step, y + i * kYBytes, y_step, tokens, j.n - i, b->taps[0] + i,
                              b->bias + i, b->context[0] + i, silu);
    }
  }
}
template <int64_t kW, int32_t kX>
void token_major_y(const Job& j, Buffers<4, kBlockC>* b) {
  if (j.p.y.dtype == GDN_BF16) return token_major<kW, kX, GDN_BF16>(j, b);
  if (j.p.y.dtype == GDN_F16) return token_major<kW, kX, GDN_F16>(j, b);
  token_major<kW, kX, GDN_F32>(j, b);
}
template <int64_t kW>
void token_major_x(const Job& j, Buffers<4, kBlockC>* b) {
  if (j.p.x.dtype == GDN_BF16) return token_major_y<kW, GDN_BF16>(j, b);
  if (j.p.x.dtype == GDN_F16) return token_major_y<kW, GDN_F16>(j, b);
  token_major_y<kW, GDN_F32>(j, b);
}

// -- any stride, any W, token by token over rows of channels
template <class B>
void any_rows(const Job& j, B* b) {
  const F32Tag d;
  const int64_t W = j.p.W;
  const bool silu = j.p.activation == GDN_ACT_SILU;
  float* in[kMaxW];
  alignas(64) float newest[kBlockC];
  alignas(64) float out[kBlockC];
  for (int64_t k = 0; k < W - 1; ++k) in[k] = b->context[k];
  in[W - 1] = newest;
  for (int64_t t = j.t_begin; t < j.t_end; ++t) {
    load_row(j.x(t), j.p.x.dtype, j.p.x.stride[1], j.n, in[W - 1]);
    pad(in[W - 1], j.n);
    for (int64_t i = 0; i < j.n; i += kLanes) {
      F32Vec acc = hn::LoadU(d, b->bias + i);
      for (int64_t k = 0; k < W; ++k) acc = hn::MulAdd(hn::LoadU(d, b->taps[k] + i), hn::LoadU(d, in[k] + i), acc);
      hn::StoreU(silu ? silu_vec(acc) : acc, d, out + i);
    }
    store_row(out, j.y(t), j.p.y.dtype, j.p.y.stride[1], j.n);
    float* oldest = in[0];
    for (int64_t k = 0; k < W - 1; ++k) in[k] = in[k + 1];
    in[W - 1] = oldest;
  }
}

// -- along time, channel by channel; kW = 0: any width
template <int64_t kW>
void along_time(const float* taps, int64_t width, float bias, bool silu, const float* in, int64_t tokens, float* out) {
  const F32Tag d;
  const int64_t W = kW == 0 ? width : kW;
  F32Vec w[kW == 0 ? 1 : kW];
  if constexpr (kW != 0) {
    for (int64_t k = 0; k < kW; ++k) w[k] = hn::Set(d, taps[k]);
  }
  const F32Vec b = hn::Set(d, bias);
  for (int64_t t = 0; t < tokens; t += kLanes) {
    F32Vec acc = b;
    for (int64_t k = 0; k < W; ++k)
      acc = hn::MulAdd(kW == 0 ? hn::Set(d, taps[k]) : w[kW == 0 ? 0 : k], hn::LoadU(d, in + t + k), acc);
    hn::StoreU(silu ? silu_vec(acc) : acc, d, out + t);
  }
}

template <class B>
void time_major(const Job& j, B* b) {
  const int64_t W = j.p.W;
  const bool silu = j.p.activation == GDN_ACT_SILU;
  const int64_t x_bytes = dtype_bytes(j.p.x.dtype), y_bytes = dtype_bytes(j.p.y.dtype);
  alignas(64) float in[kBlockT + kMaxW + kLanes] = {};  // context, tokens, and what the last vector reads past them
  alignas(64) float out[kBlockT + kLanes];
  for (int64_t i = 0; i < j.n; ++i) {
    float taps[kMaxW];
    for (int64_t k = 0; k < W; ++k) taps[k] = b->taps[k][i];
    for (int64_t k = 0; k < W - 1; ++k) in[k] = b->context[k][i];
    for (int64_t t = j.t_begin; t < j.t_end; t += kBlockT) {
      const int64_t tokens = min64(kBlockT, j.t_end - t);
      load_row(j.x(t) + i * j.p.x.stride[1] * x_bytes, j.p.x.dtype, j.p.x.stride[2], tokens, in + W - 1);
      if (W == 4) {
        along_time<4>(taps, W, b->bias[i], silu, in, tokens, out);
      } else if (W == 3) {
        along_time<3>(taps, W, b->bias[i], silu, in, tokens, out);
      } else if (W == 2) {
        along_time<2>(taps, W, b->bias[i], silu, in, tokens, out);
      } else {
        along_time<0>(taps, W, b->bias[i], silu, in, tokens, out);
      }
      store_row(out, j.y(t) + i * j.p.y.stride[1] * y_bytes, j.p.y.dtype, j.p.y.stride[2], tokens);
      for (int64_t k = 0; k < W - 1; ++k) in[k] = in[tokens + k];
    }
  }
}

template <class B>
void convolve(const Job& j, B* b, bool channels_adjacent) {
  const int64_t tokens = j.t_end - j.t_begin;
  const bool time_adjacent = j.p.x.stride[2] == 1 || j.p.y.stride[2] == 1;
  if (!channels_adjacent && (time_adjacent ? tokens > 1 : tokens >= 2 * kLanes)) return time_major(j, b);
  any_rows(j, b);
}

void zero(const Job& j) {
  const View& y = j.p.y;
  const bool channels_inner = y.stride[1] <= y.stride[2];
  const int64_t step = y.stride[1] * dtype_bytes(y.dtype);
  if (channels_inner) {
    for (int64_t t = j.t_begin; t < j.t_end; ++t) {
      for (int64_t i = 0; i < j.n; ++i) store_scalar(0.0f, j.y(t) + i * step, y.dtype);
    }
    return;
  }
  for (int64_t i = 0; i < j.n; ++i) {
    for (int64_t t = j.t_begin; t < j.t_end; ++t) store_scalar(0.0f, j.y(t) + i * step, y.dtype);
  }
}

// The context of an empty range [len, len) is not needed: the call then only writes the state. (With a window the state
// takes the context of the sequence's start, so that is read first.)
template <class B>
void prepare(Job* j, B* b) {
  const bool whole = j->t_begin == 0 && j->t_end == j->s.len;
  const bool state_only = j->t_begin == j->t_end && j->t_end == j->s.len;
  if (whole || !state_only) load_context(*j, b);
  if (state_only && !whole && j->windowed()) {
    Job start = *j;
    start.t_begin = 0;
    load_context(start, b);
  }
  if (whole || state_only) write_state(*j, b);
}

}  // namespace

void conv1d_range(const ConvProblem& p, int64_t seq, int64_t c_begin, int64_t c_end, int64_t t_begin, int64_t t_end) {
  Job j{p, p.seqs[static_cast<size_t>(seq)], seq, t_begin, t_end};
  if (j.s.is_null) {
    j.c = c_begin;
    j.n = c_end - c_begin;
    return zero(j);
  }
  const bool channels_adjacent = p.x.stride[1] == 1 && p.y.stride[1] == 1;
  if (channels_adjacent && p.W >= 2 && p.W <= 4) {
    Buffers<4, kBlockC> b;
    for (j.c = c_begin; j.c < c_end; j.c += kBlockC) {
      j.n = min64(kBlockC, c_end - j.c);
      prepare(&j, &b);
      if (t_begin == t_end) continue;
      load_parameters(j, &b);
      if (p.W == 4) token_major_x<4>(j, &b);
      if (p.W == 3) token_major_x<3>(j, &b);
      if (p.W == 2) token_major_x<2>(j, &b);
    }
    return;
  }
  Buffers<kMaxW, kBlockWide> b;
  for (j.c = c_begin; j.c < c_end; j.c += kBlockWide) {
    j.n = min64(kBlockWide, c_end - j.c);
    prepare(&j, &b);
    if (t_begin == t_end) continue;
    load_parameters(j, &b);
    convolve(j, &b, channels_adjacent);
  }
}

}  // namespace gdn::cpu::GDN_ISA_NS
