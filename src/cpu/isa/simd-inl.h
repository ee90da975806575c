// SPDX-License-Identifier: MIT
// Shared by the kernels of one ISA: Highway's static target, dtype conversion of rows, and the transcendental
// functions. Included once per translation unit of src/cpu/isa; everything sits in gdn::cpu::GDN_ISA_NS.
#pragma once
#include <cstdint>
#include <cstring>

#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>

#include "core/problem.h"

namespace gdn::cpu::GDN_ISA_NS {

namespace hn = hwy::HWY_NAMESPACE;
using F32Tag = hn::ScalableTag<float>;
using F32Vec = hn::Vec<F32Tag>;
inline constexpr int64_t kLanes = HWY_MAX_BYTES / 4;
static_assert(HWY_TARGET != HWY_SCALAR, "the kernels need a vector ISA of Highway: see the flags in CMakeLists.txt");

// -- scalar conversions (any stride); bf16 rounds to nearest even, NaN stays NaN.
static inline float bf16_to_f32(uint16_t b) {
  uint32_t u = static_cast<uint32_t>(b) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
static inline uint16_t f32_to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  uint32_t exp = (h >> 10) & 31u, man = h & 0x3ffu, u;
  if (exp == 31) {
    u = sign | 0x7f800000u | (man << 13);
  } else if (exp != 0) {
    u = sign | ((exp + 112) << 23) | (man << 13);
  } else if (man == 0) {
    u = sign;
  } else {
    exp = 113;
    while ((man & 0x400u) == 0) {
      man <<= 1;
      --exp;
    }
    u = sign | (exp << 23) | ((man & 0x3ffu) << 13);
  }
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
static inline uint16_t f32_to_f16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u >= 0x7f800000u)
    return static_cast<uint16_t>(sign | 0x7c00u | (u > 0x7f800000u ? 0x200u | ((u >> 13) & 0x3ffu) : 0u));
  if (u >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to infinity
  if (u < 0x38800000u) {                                               // subnormal: let the FPU round
    float mag;
    std::memcpy(&mag, &u, 4);
    mag += 0.5f;
    std::memcpy(&u, &mag, 4);
    return static_cast<uint16_t>(sign | (u - 0x3f000000u));
  }
  u += 0xfffu + ((u >> 13) & 1u) - (112u << 23);
  return static_cast<uint16_t>(sign | (u >> 13));
}
static inline float load_scalar(const char* p, int32_t dtype) {
  switch (dtype) {
    case GDN_BF16: {
      uint16_t b;
      std::memcpy(&b, p, 2);
      return bf16_to_f32(b);
    }
    case GDN_F16: {
      uint16_t b;
      std::memcpy(&b, p, 2);
      return f16_to_f32(b);
    }
    default: {
      float f;
      std::memcpy(&f, p, 4);
      return f;
    }
  }
}
static inline void store_scalar(float f, char* p, int32_t dtype) {
  switch (dtype) {
    case GDN_BF16: {
      const uint16_t b = f32_to_bf16(f);
      std::memcpy(p, &b, 2);
      return;
    }
    case GDN_F16: {
      const uint16_t b = f32_to_f16(f);
      std::memcpy(p, &b, 2);
      return;
    }
    default:
      std::memcpy(p, &f, 4);
  }
}
// x rounded to dtype and back.
static inline float round_scalar(float f, int32_t dtype) {
  if (dtype == GDN_BF16) return bf16_to_f32(f32_to_bf16(f));
  if (dtype == GDN_F16) return f16_to_f32(f32_to_f16(f));
  return f;
}

// -- vector loads and stores of kLanes contiguous elements (unaligned)
HWY_INLINE F32Vec load_bf16(const void* p) {
  const hn::Rebind<uint16_t, F32Tag> d16;
  const hn::RebindToUnsigned<F32Tag> d32;
  return hn::BitCast(F32Tag(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, static_cast<const uint16_t*>(p)))));
}
HWY_INLINE F32Vec load_f16(const void* p) {
  const hn::Rebind<hwy::float16_t, F32Tag> d16;
  return hn::PromoteTo(F32Tag(), hn::LoadU(d16, static_cast<const hwy::float16_t*>(p)));
}
HWY_INLINE void store_bf16(F32Vec v, void* p) {
  const hn::Rebind<uint16_t, F32Tag> d16;
  const hn::RebindToUnsigned<F32Tag> d32;
  const auto u = hn::BitCast(d32, v);
  const auto lsb = hn::And(hn::ShiftRight<16>(u), hn::Set(d32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(u, hn::Add(lsb, hn::Set(d32, 0x7fff))));
  const auto quiet = hn::ShiftRight<16>(hn::Or(u, hn::Set(d32, 0x400000)));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(v));
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(hn::RebindToSigned<F32Tag>(), hn::IfThenElse(is_nan, quiet, rounded))), d16,
             static_cast<uint16_t*>(p));
}
HWY_INLINE void store_f16(F32Vec v, void* p) {
#if HWY_ARCH_X86 && !defined(__F16C__)
  // Highway's conversion in software truncates.
  HWY_ALIGN float lanes[kLanes];
  hn::Store(v, F32Tag(), lanes);
  uint16_t halves[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) halves[i] = f32_to_f16(lanes[i]);
  std::memcpy(p, halves, sizeof(halves));
#else
  const hn::Rebind<hwy::float16_t, F32Tag> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, static_cast<hwy::float16_t*>(p));
#endif
}
template <int32_t kDtype>
HWY_INLINE F32Vec load_vec(const char* p) {
  if constexpr (kDtype == GDN_BF16) return load_bf16(p);
  if constexpr (kDtype == GDN_F16) return load_f16(p);
  return hn::LoadU(F32Tag(), reinterpret_cast<const float*>(p));
}
template <int32_t kDtype>
HWY_INLINE void store_vec(F32Vec v, char* p) {
  if constexpr (kDtype == GDN_BF16) return store_bf16(v, p);
  if constexpr (kDtype == GDN_F16) return store_f16(v, p);
  hn::StoreU(v, F32Tag(), reinterpret_cast<float*>(p));
}

// -- rows of n elements with any stride (elements) to and from fp32
template <int32_t kDtype>
static inline void load_row_t(const char* p, int64_t stride, int64_t n, float* HWY_RESTRICT dst) {
  constexpr int64_t kBytes = kDtype == GDN_F32 ? 4 : 2;
  int64_t i = 0;
  if (stride == 1) {
    for (; i + kLanes <= n; i += kLanes) hn::StoreU(load_vec<kDtype>(p + i * kBytes), F32Tag(), dst + i);
  }
  for (; i < n; ++i) dst[i] = load_scalar(p + i * stride * kBytes, kDtype);
}
static inline void load_row(const char* p, int32_t dtype, int64_t stride, int64_t n, float* HWY_RESTRICT dst) {
  if (dtype == GDN_BF16) return load_row_t<GDN_BF16>(p, stride, n, dst);
  if (dtype == GDN_F16) return load_row_t<GDN_F16>(p, stride, n, dst);
  load_row_t<GDN_F32>(p, stride, n, dst);
}
template <int32_t kDtype>
static inline void store_row_t(const float* HWY_RESTRICT src, char* p, int64_t stride, int64_t n) {
  constexpr int64_t kBytes = kDtype == GDN_F32 ? 4 : 2;
  int64_t i = 0;
  if (stride == 1) {
    for (; i + kLanes <= n; i += kLanes) store_vec<kDtype>(hn::LoadU(F32Tag(), src + i), p + i * kBytes);
  }
  for (; i < n; ++i) store_scalar(src[i], p + i * stride * kBytes, kDtype);
}
static inline void store_row(const float* HWY_RESTRICT src, char* p, int32_t dtype, int64_t stride, int64_t n) {
  if (dtype == GDN_BF16) return store_row_t<GDN_BF16>(src, p, stride, n);
  if (dtype == GDN_F16) return store_row_t<GDN_F16>(src, p, stride, n);
  store_row_t<GDN_F32>(src, p, stride, n);
}

}  // namespace gdn::cpu::GDN_ISA_NS
