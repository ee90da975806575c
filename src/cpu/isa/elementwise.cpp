// SPDX-License-Identifier: MIT
// gate, rmsnorm_gated and glu. Rows are taken in blocks of kBlock fp32 values on the stack, whole vectors at a time with the
// tail padded, so a value does not depend on where it stands in a row or on how rows are split over threads.
#include <cmath>

#include "cpu/isa/activations-inl.h"
#include "cpu/isa/kernels.h"

namespace gdn::cpu::GDN_ISA_NS {
namespace {

constexpr int64_t kBlock = 512;  // a multiple of every vector length
constexpr float kMaxFloat = 3.402823466e38f;

// Walks the flattened rows of a rank-4 view.
struct RowIndex {
  int64_t i[3];
  const int64_t* rows;
  RowIndex(const int64_t* r, int64_t row) : rows(r) {
    i[2] = row % r[2];
    i[1] = row / r[2] % r[1];
    i[0] = row / r[2] / r[1];
  }
  void next() {
    if (++i[2] < rows[2]) return;
    i[2] = 0;
    if (++i[1] < rows[1]) return;
    i[1] = 0;
    ++i[0];
  }
  char* of(const View& v, int64_t column) const { return v.at(i[0], i[1], i[2], column); }
};

inline void load_block(const View& v, const char* p, int64_t n, float* dst) {
  load_row(p, v.dtype, v.stride[3], n, dst);
}
inline void store_block(const View& v, const float* src, char* p, int64_t n) {
  store_row(src, p, v.dtype, v.stride[3], n);
}

struct GateTerms {
  float rate[kBlock];  // -exp(A_log)
  float dt_bias[kBlock];
};

void gate_g(const GateProblem& p, int64_t row_begin, int64_t row_end, int64_t h0, int64_t n, const GateTerms& terms) {
  const F32Tag d;
  alignas(64) float buf[kBlock] = {};
  const F32Vec lowest = hn::Set(d, -kMaxFloat);
  RowIndex row(p.rows, row_begin);
  for (int64_t r = row_begin; r < row_end; ++r, row.next()) {
    load_block(p.a, row.of(p.a, h0), n, buf);
    for (int64_t i = 0; i < n; i += kLanes) {
      const F32Vec dt = hn::Add(hn::LoadU(d, buf + i), hn::LoadU(d, terms.dt_bias + i));
      F32Vec g = hn::Mul(hn::LoadU(d, terms.rate + i), softplus_vec(dt));
      g = hn::IfThenElse(hn::Lt(g, lowest), lowest, g);
      hn::StoreU(p.gate_form == GDN_GATE_LINEAR ? exp_vec(g) : g, d, buf + i);
    }
    store_block(p.g, buf, row.of(p.g, h0), n);
  }
}

void gate_beta(const GateProblem& p, int64_t row_begin, int64_t row_end, int64_t h0, int64_t n) {
  const F32Tag d;
  alignas(64) float buf[kBlock] = {};
  const F32Vec factor = hn::Set(d, p.beta_form == GDN_BETA_SIGMOID2 ? 2.0f : 1.0f);
  RowIndex row(p.rows, row_begin);
  for (int64_t r = row_begin; r < row_end; ++r, row.next()) {
    load_block(p.b, row.of(p.b, h0), n, buf);
    for (int64_t i = 0; i < n; i += kLanes) hn::StoreU(hn::Mul(factor, sigmoid_vec(hn::LoadU(d, buf + i))), d, buf + i);
    store_block(p.beta, buf, row.of(p.beta, h0), n);
  }
}

// One row of the gated norm, seen in blocks: x, or x * act(z) with gate_first.
class NormRow {
 public:
  NormRow(const NormProblem& p, const RowIndex& row) : p_(p), row_(row) {}

  // The normed input of block [c, c + n) to x_; z's activation to z_ when there is a gate.
  void load(int64_t c, int64_t n) {
    const F32Tag d;
    load_input(c, n);
    if (!p_.z.present()) return;
    load_block(p_.z, row_.of(p_.z, c), n, z_);
    for (int64_t i = n; i % kLanes != 0; ++i) z_[i] = 0.0f;
    for (int64_t i = 0; i < n; i += kLanes) {
      const F32Vec z = hn::LoadU(d, z_ + i);
      const F32Vec act = p_.activation == GDN_ACT_SIGMOID ? sigmoid_vec(z) : silu_vec(z);
      if (p_.gate_first) {
        hn::StoreU(hn::Mul(hn::LoadU(d, x_ + i), act), d, x_ + i);
      } else {
        hn::StoreU(act, d, z_ + i);
      }
    }
  }
  // Without the gate's activation: the first pass over a long row needs only the sum.
  void load_for_sum(int64_t c, int64_t n) {
    if (p_.gate_first && p_.z.present()) return load(c, n);
    load_input(c, n);
  }
  // From now on to the next row the sums are read back: residual_out may have been written over x or residual.
  void sums_are_stored(bool stored) { stored_ = stored; }
  double sum_of_squares(int64_t n) const {
    const F32Tag d;
    F32Vec s0 = hn::Zero(d), s1 = hn::Zero(d);
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
      const F32Vec a = hn::LoadU(d, x_ + i), b = hn::LoadU(d, x_ + i + kLanes);
      s0 = hn::MulAdd(a, a, s0);
      s1 = hn::MulAdd(b, b, s1);
    }
    for (; i < n; i += kLanes) {
      const F32Vec a = hn::LoadU(d, x_ + i);
      s0 = hn::MulAdd(a, a, s0);
    }
    return static_cast<double>(hn::GetLane(hn::SumOfLanes(d, hn::Add(s0, s1))));
  }
  void finish(int64_t c, int64_t n, float rms_inverse, const float* weight) {
    const F32Tag d;
    const F32Vec r = hn::Set(d, rms_inverse);
    for (int64_t i = 0; i < n; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, x_ + i), r), d, x_ + i);
    if (p_.round_before_weight && p_.x.dtype != GDN_F32) {
      for (int64_t i = 0; i < n; ++i) x_[i] = round_scalar(x_[i], p_.x.dtype);
    }
    if (weight != nullptr) {
      for (int64_t i = 0; i < n; i += kLanes)
        hn::StoreU(hn::Mul(hn::LoadU(d, x_ + i), hn::LoadU(d, weight + i)), d, x_ + i);
    }
    if (p_.z.present() && !p_.gate_first) {
      for (int64_t i = 0; i < n; i += kLanes)
        hn::StoreU(hn::Mul(hn::LoadU(d, x_ + i), hn::LoadU(d, z_ + i)), d, x_ + i);
    }
    store_block(p_.out, x_, row_.of(p_.out, c), n);
  }

 private:
  // x, or x + residual, which is stored as well, to x_.
  void load_input(int64_t c, int64_t n) {
    const F32Tag d;
    const bool sum = p_.residual.present();
    const View& from = sum && stored_ ? p_.residual_out : p_.x;
    load_block(from, row_.of(from, c), n, x_);
    if (sum && !stored_) {
      load_block(p_.residual, row_.of(p_.residual, c), n, z_);
      for (int64_t i = n; i % kLanes != 0; ++i) x_[i] = z_[i] = 0.0f;
      for (int64_t i = 0; i < n; i += kLanes)
        hn::StoreU(hn::Add(hn::LoadU(d, x_ + i), hn::LoadU(d, z_ + i)), d, x_ + i);
      store_block(p_.residual_out, x_, row_.of(p_.residual_out, c), n);
      if (p_.residual_out.dtype != GDN_F32) load_block(p_.residual_out, row_.of(p_.residual_out, c), n, x_);
    }
    for (int64_t i = n; i % kLanes != 0; ++i) x_[i] = 0.0f;
  }

  const NormProblem& p_;
  const RowIndex& row_;
  bool stored_ = false;
  alignas(64) float x_[kBlock];
  alignas(64) float z_[kBlock];
};

// weight, or 1 + weight, of columns [c, c + n), padded to whole vectors.
const float* load_weight(const NormProblem& p, int64_t c, int64_t n, float* buf) {
  if (!p.weight.present()) return nullptr;
  load_row(p.weight.at(c), p.weight.dtype, p.weight.stride[0], n, buf);
  if (p.zero_centered) {
    for (int64_t i = 0; i < n; ++i) buf[i] += 1.0f;
  }
  for (int64_t i = n; i % kLanes != 0; ++i) buf[i] = 0.0f;
  return buf;
}

float inverse_rms(double sum, int64_t n, float eps) {
  return static_cast<float>(1.0 / ::sqrt(sum / static_cast<double>(n) + static_cast<double>(eps)));
}

}  // namespace

void gate_range(const GateProblem& p, int64_t row_begin, int64_t row_end) {
  const F32Tag d;
  for (int64_t h0 = 0; h0 < p.H; h0 += kBlock) {
    const int64_t n = p.H - h0 < kBlock ? p.H - h0 : kBlock;
    if (p.a.present()) {
      alignas(64) GateTerms terms = {};
      load_row(p.A_log.at(h0), p.A_log.dtype, p.A_log.stride[0], n, terms.rate);
      if (p.dt_bias.present()) load_row(p.dt_bias.at(h0), p.dt_bias.dtype, p.dt_bias.stride[0], n, terms.dt_bias);
      const F32Vec largest = hn::Set(d, kMaxFloat);
      for (int64_t i = 0; i < n; i += kLanes) {
        // A finite rate: infinity times a softplus that underflowed to 0 would be NaN.
        const F32Vec rate = exp_vec(hn::LoadU(d, terms.rate + i));
        hn::StoreU(hn::Neg(hn::IfThenElse(hn::Gt(rate, largest), largest, rate)), d, terms.rate + i);
      }
      gate_g(p, row_begin, row_end, h0, n, terms);
    }
    if (p.b.present()) gate_beta(p, row_begin, row_end, h0, n);
  }
}

void norm_range(const NormProblem& p, int64_t row_begin, int64_t row_end) {
  alignas(64) float weight_buf[kBlock];
  RowIndex index(p.rows, row_begin);
  NormRow row(p, index);
  if (p.D <= kBlock) {
    const float* weight = load_weight(p, 0, p.D, weight_buf);
    for (int64_t r = row_begin; r < row_end; ++r, index.next()) {
      row.load(0, p.D);
      row.finish(0, p.D, p.glu ? 1.0f : inverse_rms(row.sum_of_squares(p.D), p.D, p.eps), weight);
    }
    return;
  }
  for (int64_t r = row_begin; r < row_end; ++r, index.next()) {
    double sum = 0.0;
    if (p.glu) {
      for (int64_t c = 0; c < p.D; c += kBlock) {
        const int64_t n = p.D - c < kBlock ? p.D - c : kBlock;
        row.load(c, n);
        row.finish(c, n, 1.0f, nullptr);
      }
      continue;
    }
    row.sums_are_stored(false);
    for (int64_t c = 0; c < p.D; c += kBlock) {
      const int64_t n = p.D - c < kBlock ? p.D - c : kBlock;
      row.load_for_sum(c, n);
      sum += row.sum_of_squares(n);
    }
    const float rms_inverse = inverse_rms(sum, p.D, p.eps);
    row.sums_are_stored(p.residual.present());
    for (int64_t c = 0; c < p.D; c += kBlock) {
      const int64_t n = p.D - c < kBlock ? p.D - c : kBlock;
      row.load(c, n);
      row.finish(c, n, rms_inverse, load_weight(p, c, n, weight_buf));
    }
  }
}

}  // namespace gdn::cpu::GDN_ISA_NS
