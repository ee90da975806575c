// SPDX-License-Identifier: MIT
// exp, sigmoid, SiLU and softplus on fp32 vectors: within 1e-6 relative of the true value wherever that is a normal
// number, within a few units of the smallest subnormal below, NaN in NaN out, never a NaN from a number. The
// polynomials are minimax fits (relative error 3e-9 and 5e-9 before rounding).
#pragma once
#include "cpu/isa/simd-inl.h"

namespace gdn::cpu::GDN_ISA_NS {

using I32Tag = hn::Rebind<int32_t, F32Tag>;

// exp(x) = large * small: two factors, normal numbers both for x in [-104, 89], so that a result in the subnormals is
// rounded once. (x down to -125 is fine too: the product is then 0.)
struct ExpParts {
  F32Vec large, small;
};
HWY_INLINE ExpParts exp_parts(F32Vec x) {
  const F32Tag d;
  const I32Tag di;
  const auto n = hn::NearestInt(hn::Mul(x, hn::Set(d, 1.44269504f)));
  const F32Vec nf = hn::ConvertTo(d, n);
  // ln 2 in two parts; n times the first (ten bits) is exact without FMA too.
  F32Vec r = hn::NegMulAdd(nf, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(nf, hn::Set(d, -2.12194440e-4f), r);
  F32Vec p = hn::MulAdd(hn::Set(d, 1.381459848e-3f), r, hn::Set(d, 8.368717017e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.166838806e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.666652063e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.999999345e-1f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  const auto n1 = hn::ShiftRight<1>(n);
  const auto bias = hn::Set(di, 127);
  const F32Vec s1 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(n1, bias)));
  const F32Vec s2 = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(n, n1), bias)));
  return {hn::Mul(p, s1), s2};
}

// Comparisons rather than Min / Max: those lose a NaN on some targets.
HWY_INLINE F32Vec exp_vec(F32Vec x) {
  const F32Tag d;
  const F32Vec lo = hn::Set(d, -104.0f), hi = hn::Set(d, 89.0f);
  x = hn::IfThenElse(hn::Lt(x, lo), lo, x);
  x = hn::IfThenElse(hn::Gt(x, hi), hi, x);
  const ExpParts e = exp_parts(x);
  return hn::Mul(e.large, e.small);
}

// exp(-|x|), in [0, 1]; from |x| = 125 on nothing is left of it, even times x.
inline constexpr float kVanishingX = -125.0f;
HWY_INLINE ExpParts exp_neg_abs(F32Vec x) {
  const F32Tag d;
  const F32Vec lo = hn::Set(d, kVanishingX);
  const F32Vec m = hn::Or(x, hn::BitCast(d, hn::Set(hn::RebindToUnsigned<F32Tag>(), 0x80000000u)));
  return exp_parts(hn::IfThenElse(hn::Lt(m, lo), lo, m));
}

// sigmoid(x) * factor, factor = 1 or x: the subnormal-making factor of e comes last.
HWY_INLINE F32Vec sigmoid_times(F32Vec x, F32Vec factor) {
  const F32Tag d;
  const F32Vec one = hn::Set(d, 1.0f);
  const ExpParts e = exp_neg_abs(x);
  const auto negative = hn::Lt(x, hn::Zero(d));
  const F32Vec numerator = hn::Mul(factor, hn::IfThenElse(negative, e.large, one));
  const F32Vec quotient = hn::Div(numerator, hn::MulAdd(e.large, e.small, one));
  return hn::Mul(quotient, hn::IfThenElse(negative, e.small, one));
}
HWY_INLINE F32Vec sigmoid_vec(F32Vec x) { return sigmoid_times(x, hn::Set(F32Tag(), 1.0f)); }
// x / (1 + exp(-x)), the form with the fewest steps, where exp(-x) and its scale are normal numbers (a NaN comes
// through the numerator). Only lanes below take the other form, so that a value does not depend on its neighbours.
HWY_INLINE F32Vec silu_vec(F32Vec x) {
  const F32Tag d;
  const F32Vec one = hn::Set(d, 1.0f);
  const F32Vec m = hn::Min(hn::Set(d, 87.0f), x);
  const auto n = hn::NearestInt(hn::Mul(m, hn::Set(d, -1.44269504f)));
  const F32Vec nf = hn::ConvertTo(d, n);
  F32Vec r = hn::MulAdd(nf, hn::Set(d, 0.693359375f), m);  // exp(-x) = 2^n exp(-r)
  r = hn::MulAdd(nf, hn::Set(d, -2.12194440e-4f), r);
  F32Vec p = hn::MulAdd(hn::Set(d, 1.381459848e-3f), r, hn::Set(d, -8.368717017e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.166838806e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, -1.666652063e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.999999345e-1f));
  p = hn::MulAdd(p, hn::Mul(r, r), hn::Sub(one, r));
  const F32Vec e = hn::BitCast(d, hn::Add(hn::BitCast(I32Tag(), p), hn::ShiftLeft<23>(n)));
  const F32Vec y = hn::Div(x, hn::Add(one, e));
  const auto below = hn::Lt(x, hn::Set(d, -87.0f));
  if (HWY_LIKELY(hn::AllFalse(d, below))) return y;
  const F32Vec lo = hn::Set(d, kVanishingX);  // x itself must not outgrow exp(-|x|) as held there
  const F32Vec held = hn::IfThenElse(hn::Lt(x, lo), lo, x);
  return hn::IfThenElse(below, sigmoid_times(held, held), y);
}

// log(1 + exp(x)) = max(x, 0) + 2 atanh(e / (2 + e)), e = exp(-|x|): no cancellation for very negative x, and above the
// threshold of 20 the second term is below half an ulp of x.
HWY_INLINE F32Vec softplus_vec(F32Vec x) {
  const F32Tag d;
  const ExpParts parts = exp_neg_abs(x);
  const F32Vec e = hn::Mul(parts.large, parts.small);
  const F32Vec s = hn::Div(e, hn::Add(hn::Set(d, 2.0f), e));
  const F32Vec u = hn::Mul(s, s);
  F32Vec p = hn::MulAdd(hn::Set(d, 1.401564075e-1f), u, hn::Set(d, 1.399893109e-1f));
  p = hn::MulAdd(p, u, hn::Set(d, 2.001088500e-1f));
  p = hn::MulAdd(p, u, hn::Set(d, 3.333320602e-1f));
  const F32Vec half_log = hn::MulAdd(hn::Mul(p, u), s, s);
  const F32Vec log1p = hn::Add(half_log, half_log);
  return hn::IfThenElse(hn::Gt(x, hn::Zero(d)), hn::Add(x, log1p), log1p);
}

}  // namespace gdn::cpu::GDN_ISA_NS
