// SPDX-License-Identifier: MIT
// One element of a float tensor to and from double, exactly rounded (to nearest even). For the references; kernels have
// vector versions of their own.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/problem.h"

namespace gdn {

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

inline float f16_to_float(uint16_t bits) {
  const bool negative = (bits & 0x8000u) != 0;
  const int32_t exponent = (bits >> 10) & 31;
  const int32_t mantissa = bits & 0x3ff;
  float magnitude;
  if (exponent == 31) {
    magnitude = mantissa != 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  }
  return negative ? -magnitude : magnitude;
}

// The float next to x that has an odd mantissa when x is no float: rounding that once more cannot round twice.
inline float to_odd_float(double x) {
  float f = static_cast<float>(x);
  if (std::isfinite(f) && static_cast<double>(f) != x && (std::bit_cast<uint32_t>(f) & 1u) == 0) {
    const float infinity = std::numeric_limits<float>::infinity();
    f = std::nextafter(f, x > static_cast<double>(f) ? infinity : -infinity);
  }
  return f;
}

inline uint16_t to_bf16(double x) {
  const uint32_t bits = std::bit_cast<uint32_t>(to_odd_float(x));
  if (std::isnan(x)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline uint16_t to_f16(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000u : 0u;
  const double magnitude = std::fabs(x);
  if (std::isnan(x)) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 65520.0) return static_cast<uint16_t>(sign | 0x7c00u);  // 65504 is the largest; half an ulp above
  if (magnitude < 0x1p-14) {
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24)));
  }
  int exponent;
  const double fraction = std::frexp(magnitude, &exponent);                          // in [0.5, 1)
  const int32_t mantissa = static_cast<int32_t>(std::nearbyint(fraction * 2048.0));  // in [1024, 2048]
  // A mantissa of 2048 carries into the exponent by itself.
  return static_cast<uint16_t>(sign | (((exponent + 13) << 10) + mantissa));
}

inline double load_element(const char* p, int32_t dtype) {
  switch (dtype) {
    case GDN_F64: {
      double x;
      std::memcpy(&x, p, sizeof(x));
      return x;
    }
    case GDN_F32: {
      float x;
      std::memcpy(&x, p, sizeof(x));
      return static_cast<double>(x);
    }
    default: {
      uint16_t bits;
      std::memcpy(&bits, p, sizeof(bits));
      return static_cast<double>(dtype == GDN_BF16 ? bf16_to_float(bits) : f16_to_float(bits));
    }
  }
}

inline void store_element(double x, char* p, int32_t dtype) {
  switch (dtype) {
    case GDN_F64:
      std::memcpy(p, &x, sizeof(x));
      return;
    case GDN_F32: {
      const float f = static_cast<float>(x);
      std::memcpy(p, &f, sizeof(f));
      return;
    }
    default: {
      const uint16_t bits = dtype == GDN_BF16 ? to_bf16(x) : to_f16(x);
      std::memcpy(p, &bits, sizeof(bits));
    }
  }
}

inline double round_to(double x, int32_t dtype) {
  char buffer[sizeof(double)];
  store_element(x, buffer, dtype);
  return load_element(buffer, dtype);
}

}  // namespace gdn
