// SPDX-License-Identifier: MIT
// q/k RMSNorm, split of the output gate and NeoX rotary embedding, one pass over each head. cos and sin are made once
// per token. Heads of up to kMaxHead channels are held in fp32 on the stack; longer ones take the scalar path.
#include <cmath>

#include "cpu/isa/kernels.h"
#include "cpu/isa/simd-inl.h"

namespace gdn::cpu::GDN_ISA_NS {
namespace {

constexpr int64_t kMaxHead = 1024;

// 4 / (2 pi) * theta^(-2i/R): a position times this is the angle in quarter turns.
double quarter_turns(const RopeProblem& p, int64_t i) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  return kTwoOverPi * ::pow(p.theta, -2.0 * static_cast<double>(i) / static_cast<double>(p.R));
}

int64_t mrope_axis(const RopeProblem& p, int64_t i) {
  if (p.positions.shape[0] < 3) return 0;
  if (i % 3 == 1 && i < 3 * static_cast<int64_t>(p.mrope_section[1])) return 1;
  if (i % 3 == 2 && i < 3 * static_cast<int64_t>(p.mrope_section[2])) return 2;
  return 0;
}

double load_position(const RopeProblem& p, int64_t axis, int64_t b, int64_t t) {
  const char* at = p.positions.at(axis, b, t);
  if (p.positions.dtype == GDN_I32) {
    int32_t v;
    std::memcpy(&v, at, 4);
    return static_cast<double>(v);
  }
  int64_t v;
  std::memcpy(&v, at, 8);
  return static_cast<double>(v);
}

// cos and sin of `turns` quarter turns. The reduction to [-1/2, 1/2] quarter turns is exact in double, so a position of
// 1e6 and more keeps full fp32 accuracy; the polynomials are minimax fits in the squared quarter turn.
inline void cos_sin(double turns, float* c, float* s) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  double whole = turns;
  if (whole < 1e15 && whole > -1e15) {
    volatile double rounded = turns + kRound;  // volatile: no compiler flag may fold the rounding away
    whole = rounded - kRound;
  }
  const float f = static_cast<float>(turns - whole);
  const int64_t quadrant = static_cast<int64_t>(whole) & 3;
  const float u = f * f;
  const float sine =
      f *
      (1.570796327f + u * (-6.459640961e-1f + u * (7.969258271e-2f + u * (-4.681266090e-3f + u * 1.582058590e-4f))));
  const float cosine =
      1.0f + u * (-1.233700550f +
                  u * (2.536695072e-1f + u * (-2.086346799e-2f + u * (9.191616812e-4f + u * -2.485085889e-5f))));
  const bool swap = (quadrant & 1) != 0;
  const float c0 = swap ? sine : cosine, s0 = swap ? cosine : sine;
  *c = (quadrant == 1 || quadrant == 2) ? -c0 : c0;
  *s = quadrant >= 2 ? -s0 : s0;
}

float norm_weight(const RopeProblem& p, const View& w, int64_t i) {
  if (!w.present()) return 1.0f;
  return load_scalar(w.at(i), w.dtype) + (p.zero_centered ? 1.0f : 0.0f);
}

float inverse_rms(double sum, int64_t n, float eps) {
  return static_cast<float>(1.0 / ::sqrt(sum / static_cast<double>(n) + static_cast<double>(eps)));
}

struct Tables {
  float q_weight[kMaxHead], k_weight[kMaxHead];
  double turns[kMaxHead / 2];
  int64_t axis[kMaxHead / 2];
  float cos[kMaxHead], sin[kMaxHead];  // R each; this token's
};

void load_angles(const RopeProblem& p, int64_t b, int64_t t, Tables* tables) {
  if (p.cos.present()) {
    load_row(p.cos.at(b, t), p.cos.dtype, p.cos.stride[2], p.R, tables->cos);
    load_row(p.sin.at(b, t), p.sin.dtype, p.sin.stride[2], p.R, tables->sin);
    return;
  }
  if (!p.positions.present()) return;
  const int64_t half = p.R / 2;
  double position[3];
  for (int64_t a = 0; a < p.positions.shape[0] && a < 3; ++a) position[a] = load_position(p, a, b, t);
  for (int64_t i = 0; i < half; ++i) {
    cos_sin(position[tables->axis[i]] * tables->turns[i], &tables->cos[i], &tables->sin[i]);
    tables->cos[half + i] = tables->cos[i];
    tables->sin[half + i] = tables->sin[i];
  }
}

void rotate(const float* HWY_RESTRICT x, const Tables& tables, int64_t half, float* HWY_RESTRICT out) {
  const F32Tag d;
  const float* cos = tables.cos;
  const float* sin = tables.sin;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F32Vec x1 = hn::LoadU(d, x + i), x2 = hn::LoadU(d, x + half + i);
    hn::StoreU(hn::NegMulAdd(x2, hn::LoadU(d, sin + i), hn::Mul(x1, hn::LoadU(d, cos + i))), d, out + i);
    hn::StoreU(hn::MulAdd(x1, hn::LoadU(d, sin + half + i), hn::Mul(x2, hn::LoadU(d, cos + half + i))), d,
               out + half + i);
  }
  for (; i < half; ++i) {
    const float x1 = x[i], x2 = x[half + i];
    out[i] = x1 * cos[i] - x2 * sin[i];
    out[half + i] = x2 * cos[half + i] + x1 * sin[half + i];
  }
}

// One head; x and out point at its first channel.
void head(const RopeProblem& p, const View& in, const char* x, const float* weight, const Tables& tables,
          const View& out, char* y) {
  const F32Tag d;
  alignas(64) float n[kMaxHead];
  alignas(64) float rotated[kMaxHead];
  load_row(x, in.dtype, in.stride[3], p.D, n);
  const int64_t padded = (p.D + kLanes - 1) / kLanes * kLanes;  // kMaxHead is a multiple of kLanes
  for (int64_t i = p.D; i < padded; ++i) n[i] = 0.0f;
  F32Vec s0 = hn::Zero(d), s1 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 2 * kLanes <= padded; i += 2 * kLanes) {
    const F32Vec a = hn::LoadU(d, n + i), b = hn::LoadU(d, n + i + kLanes);
    s0 = hn::MulAdd(a, a, s0);
    s1 = hn::MulAdd(b, b, s1);
  }
  if (i < padded) {
    const F32Vec a = hn::LoadU(d, n + i);
    s0 = hn::MulAdd(a, a, s0);
  }
  const double sum = static_cast<double>(hn::GetLane(hn::SumOfLanes(d, hn::Add(s0, s1))));
  const F32Vec r = hn::Set(d, inverse_rms(sum, p.D, p.eps));
  for (i = 0; i < padded; i += kLanes)
    hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, n + i), r), hn::LoadU(d, weight + i)), d, n + i);
  if (p.R == 0) return store_row(n, y, out.dtype, out.stride[3], p.D);
  if (out.dtype == GDN_BF16) {
    // Rounded through memory with the same stores that the output takes.
    uint16_t h[kMaxHead];
    store_row(n, reinterpret_cast<char*>(h), GDN_BF16, 1, p.R);
    load_row(reinterpret_cast<const char*>(h), GDN_BF16, 1, p.R, n);
  } else if (out.dtype == GDN_F16) {
    uint16_t h[kMaxHead];
    store_row(n, reinterpret_cast<char*>(h), GDN_F16, 1, p.R);
    load_row(reinterpret_cast<const char*>(h), GDN_F16, 1, p.R, n);
  }
  rotate(n, tables, p.R / 2, rotated);
  store_row(rotated, y, out.dtype, out.stride[3], p.R);
  store_row(n + p.R, y + p.R * out.stride[3] * dtype_bytes(out.dtype), out.dtype, out.stride[3], p.D - p.R);
}

void copy_gate(const RopeProblem& p, int64_t b, int64_t t, int64_t h) {
  alignas(64) float buf[kMaxHead];
  for (int64_t c = 0; c < p.D; c += kMaxHead) {
    const int64_t n = p.D - c < kMaxHead ? p.D - c : kMaxHead;
    load_row(p.q.at(b, t, h, p.D + c), p.q.dtype, p.q.stride[3], n, buf);
    store_row(buf, p.gate_out.at(b, t, h, c), p.gate_out.dtype, p.gate_out.stride[3], n);
  }
}

// Heads longer than kMaxHead: element by element.
void long_head(const RopeProblem& p, const View& in, int64_t b, int64_t t, int64_t h, const View& w, const View& out) {
  double sum = 0.0;
  for (int64_t i = 0; i < p.D; ++i) {
    const double x = load_scalar(in.at(b, t, h, i), in.dtype);
    sum += x * x;
  }
  const float r = inverse_rms(sum, p.D, p.eps);
  const auto normed = [&](int64_t i) {
    return round_scalar(load_scalar(in.at(b, t, h, i), in.dtype) * r * norm_weight(p, w, i), out.dtype);
  };
  const auto angle = [&](int64_t i, float* c, float* s) {
    if (p.cos.present()) {
      *c = load_scalar(p.cos.at(b, t, i), p.cos.dtype);
      *s = load_scalar(p.sin.at(b, t, i), p.sin.dtype);
    } else {
      const int64_t j = i % (p.R / 2);
      cos_sin(load_position(p, mrope_axis(p, j), b, t) * quarter_turns(p, j), c, s);
    }
  };
  const int64_t half = p.R / 2;
  for (int64_t i = 0; i < p.D; ++i) {
    float value = normed(i);
    if (i < p.R) {
      float c, s;
      angle(i, &c, &s);
      value = i < half ? value * c - normed(i + half) * s : value * c + normed(i - half) * s;
    }
    store_scalar(value, out.at(b, t, h, i), out.dtype);
  }
}

}  // namespace

void rope_range(const RopeProblem& p, int64_t token_begin, int64_t token_end) {
  alignas(64) Tables tables;
  const bool fits = p.D <= kMaxHead;
  if (fits) {
    const int64_t padded = (p.D + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = 0; i < padded; ++i) {
      tables.q_weight[i] = i < p.D ? norm_weight(p, p.q_weight, i) : 0.0f;
      tables.k_weight[i] = i < p.D ? norm_weight(p, p.k_weight, i) : 0.0f;
    }
    for (int64_t i = 0; p.positions.present() && i < p.R / 2; ++i) {
      tables.turns[i] = quarter_turns(p, i);
      tables.axis[i] = mrope_axis(p, i);
    }
  }
  for (int64_t token = token_begin; token < token_end; ++token) {
    const int64_t b = token / p.T, t = token % p.T;
    if (fits) load_angles(p, b, t, &tables);
    for (int64_t h = 0; h < p.Hq; ++h) {
      if (fits) {
        head(p, p.q, p.q.at(b, t, h), tables.q_weight, tables, p.q_out, p.q_out.at(b, t, h));
      } else {
        long_head(p, p.q, b, t, h, p.q_weight, p.q_out);
      }
      if (p.gate_out.present()) copy_gate(p, b, t, h);
    }
    for (int64_t h = 0; h < p.Hkv; ++h) {
      if (fits) {
        head(p, p.k, p.k.at(b, t, h), tables.k_weight, tables, p.k_out, p.k_out.at(b, t, h));
      } else {
        long_head(p, p.k, b, t, h, p.k_weight, p.k_out);
      }
    }
  }
}

}  // namespace gdn::cpu::GDN_ISA_NS
