// SPDX-License-Identifier: MIT
// Sixteen fp32 lanes as a compiler vector. One tile row is exactly one such vector, so the kernel is written once in
// terms of it: AVX-512 builds get one zmm register, any other build gets the same arithmetic from narrower registers,
// which is how the kernel is tested where AMX is missing.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace gdn::cpu::amx {

inline constexpr int64_t kTile = 16;  // rows of a tile, and fp32 lanes of a row

typedef float VecF __attribute__((vector_size(64)));
typedef uint32_t VecU __attribute__((vector_size(64)));
typedef int32_t VecI __attribute__((vector_size(64)));
typedef uint16_t HalfU __attribute__((vector_size(32)));

#define GDN_AMX_INLINE_MEMBER inline __attribute__((always_inline))
#define GDN_AMX_INLINE static GDN_AMX_INLINE_MEMBER

GDN_AMX_INLINE VecF load(const float* p) { return *reinterpret_cast<const VecF*>(p); }
GDN_AMX_INLINE void store(float* p, VecF v) { *reinterpret_cast<VecF*>(p) = v; }
GDN_AMX_INLINE VecU load_u(const void* p) { return *reinterpret_cast<const VecU*>(p); }
GDN_AMX_INLINE void store_u(void* p, VecU v) { *reinterpret_cast<VecU*>(p) = v; }
GDN_AMX_INLINE VecU loadu_u(const void* p) {
  VecU v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
GDN_AMX_INLINE void storeu(void* p, VecF v) { std::memcpy(p, &v, sizeof(v)); }
GDN_AMX_INLINE VecF splat(float x) { return x - VecF{}; }  // x - 0 keeps the sign of zero
GDN_AMX_INLINE VecU bits(VecF v) { return reinterpret_cast<VecU>(v); }
GDN_AMX_INLINE VecF from_bits(VecU v) { return reinterpret_cast<VecF>(v); }

GDN_AMX_INLINE float sum_lanes(VecF v) {
  v = v + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v = v + __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v = v + __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return v[0] + v[1];
}

GDN_AMX_INLINE VecF load_bf16x16(const void* p) {
  HalfU h;
  std::memcpy(&h, p, sizeof(h));
  return from_bits(__builtin_convertvector(h, VecU) << 16);
}

// fp32 to bf16, nearest even. Subnormals become zero in both forms (vcvtneps2bf16 does that).
GDN_AMX_INLINE void store_bf16x16(void* p, VecF v) {
#if defined(__AVX512BF16__)
  const __m256bh h = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
  std::memcpy(p, &h, sizeof(h));
#else
  const VecU u = bits(v);
  const VecU magnitude = u & 0x7fffffffu;
  VecU rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  rounded = magnitude > 0x7f800000u ? ((u >> 16) | 0x40u) : rounded;
  rounded = magnitude < 0x00800000u ? (u >> 16) & 0x8000u : rounded;
  const HalfU h = __builtin_convertvector(rounded, HalfU);
  std::memcpy(p, &h, sizeof(h));
#endif
}

// 32 values, `a` first.
GDN_AMX_INLINE void store_bf16x32(void* p, VecF a, VecF b) {
#if defined(__AVX512BF16__)
  const __m512bh h = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(a));
  std::memcpy(p, &h, sizeof(h));
#else
  store_bf16x16(p, a);
  store_bf16x16(static_cast<char*>(p) + 32, b);
#endif
}

// x = hi + lo with both exactly bf16 up to 2^-17 |x|. The words stay in the upper halves of the lanes.
struct Split {
  VecU hi, lo;
};
GDN_AMX_INLINE Split split_bf16(VecF x) {
  const VecU hi =
      (bits(x) + 0x8000u) & 0xffff0000u;  // nearest, ties away: one add cheaper than nearest even, and lo repairs it
  return {hi, bits(x - from_bits(hi)) + 0x8000u};
}
// Word 2n from `even`, word 2n + 1 from `odd` (both in the upper halves; low halves are ignored).
GDN_AMX_INLINE VecU interleave_high(VecU even, VecU odd) { return (even >> 16) | (odd & 0xffff0000u); }

// e^x for x <= 88, relative error 2e-7 (Cephes' polynomial); below -87.3 the result is 0.
GDN_AMX_INLINE VecF exp16(VecF x) {
  const VecF magic = splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
  const VecI alive = x > -87.3f;
  x = from_bits(bits(x) & reinterpret_cast<VecU>(alive));
  const VecF shifted = x * 1.44269504f + magic;
  const VecF n = shifted - magic;
  VecF r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  VecF y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + (r + 1.0f);
  const VecU exponent = (bits(shifted) - bits(magic)) << 23;
  return from_bits((bits(y) + exponent) & reinterpret_cast<VecU>(alive));
}

// log(1 + y) for y in [0, 1], relative error 1e-7: 2 atanh(y / (2 + y)).
GDN_AMX_INLINE VecF log1p16(VecF y) {
  const VecF z = y / (y + 2.0f);
  const VecF z2 = z * z;
  VecF r = z2 * (2.0f / 17) + 2.0f / 15;
  r = r * z2 + 2.0f / 13;
  r = r * z2 + 2.0f / 11;
  r = r * z2 + 2.0f / 9;
  r = r * z2 + 2.0f / 7;
  r = r * z2 + 2.0f / 5;
  r = r * z2 + 2.0f / 3;
  return r * (z2 * z) + z * 2.0f;
}

// Natural logarithm, relative error 2e-7. Zero and subnormals give -inf; negative values and NaN give NaN.
GDN_AMX_INLINE VecF log16(VecF x) {
  const VecU shifted = bits(x) - 0x3f3504f3u;  // sqrt(1/2): the mantissa m lands in [sqrt(1/2), sqrt(2))
  const VecI exponent = reinterpret_cast<VecI>(shifted) >> 23;
  const VecF m = from_bits((shifted & 0x007fffffu) + 0x3f3504f3u);
  const VecF z = (m - 1.0f) / (m + 1.0f);
  const VecF z2 = z * z;
  VecF r = z2 * (2.0f / 11) + 2.0f / 9;
  r = r * z2 + 2.0f / 7;
  r = r * z2 + 2.0f / 5;
  r = r * z2 + 2.0f / 3;
  r = r * (z2 * z) + z * 2.0f;
  const VecF e = __builtin_convertvector(exponent, VecF);
  r = e * 0.693359375f + (e * -2.12194440e-4f + r);
  const VecF infinity = splat(__builtin_inff()), nan = splat(__builtin_nanf(""));
  r = x < 1.17549435e-38f ? -infinity : r;
  r = x < 0.0f ? nan : r;
  return x < infinity ? r : x;  // +inf and NaN pass through
}

GDN_AMX_INLINE VecF abs16(VecF x) { return from_bits(bits(x) & 0x7fffffffu); }

// log(1 + e^x); past 20 it is x in fp32, so the threshold of the definition needs no branch.
GDN_AMX_INLINE VecF softplus16(VecF x) {
  const VecF r = (x > 0.0f ? x : VecF{}) + log1p16(exp16(-abs16(x)));
  return x == x ? r : x;
}

GDN_AMX_INLINE VecF sigmoid16(VecF x) {
  const VecF e = exp16(-abs16(x));
  const VecF r = (x < 0.0f ? e : splat(1.0f)) / (e + 1.0f);
  return x == x ? r : x;
}

// In-place transpose of a 16 x 16 block of 32-bit words held in 16 vectors.
GDN_AMX_INLINE void transpose16(VecU r[16]) {
  VecU t[16];
  for (int i = 0; i < 16; i += 2) {  // 1 x 1 words inside 128-bit groups
    t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 16; i += 4) {  // 2 x 2 words; r[i + j] then has column 4 * group + j of rows i .. i + 3
    r[i] = __builtin_shufflevector(t[i], t[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    r[i + 1] = __builtin_shufflevector(t[i], t[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    r[i + 2] = __builtin_shufflevector(t[i + 1], t[i + 3], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    r[i + 3] = __builtin_shufflevector(t[i + 1], t[i + 3], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  for (int j = 0; j < 4; ++j) {  // 128-bit groups
    const VecU a = __builtin_shufflevector(r[j], r[4 + j], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const VecU b = __builtin_shufflevector(r[j], r[4 + j], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    const VecU c =
        __builtin_shufflevector(r[8 + j], r[12 + j], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const VecU d =
        __builtin_shufflevector(r[8 + j], r[12 + j], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    t[j] = __builtin_shufflevector(a, c, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    t[8 + j] = __builtin_shufflevector(a, c, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    t[4 + j] = __builtin_shufflevector(b, d, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    t[12 + j] = __builtin_shufflevector(b, d, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

}  // namespace gdn::cpu::amx
