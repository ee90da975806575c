// SPDX-License-Identifier: MIT
// A tensor in guarded memory with 16-bit conversions of its own, for tests that compare with doubles.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "gdn/gdn.h"

namespace gdn_test {

inline constexpr size_t kGuard = 256;
inline constexpr unsigned char kGuardByte = 0xA5;

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// Smallest difference from x over the 16-bit format: sign, e exponent bits, m mantissa bits, round to nearest even.
inline double round_f16(double x) {
  if (!std::isfinite(x) || x == 0) return x;
  const int exponent = std::max(std::ilogb(x), -14);
  const double unit = std::ldexp(1.0, exponent - 10);
  const double rounded = std::nearbyint(x / unit) * unit;
  return std::fabs(rounded) > 65504 ? std::copysign(INFINITY, x) : rounded;
}
inline uint16_t f16_bits(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7E00;
  const double a = std::fabs(round_f16(x));
  if (std::isinf(a)) return sign | 0x7C00;
  if (a < std::ldexp(1.0, -14)) return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::ldexp(a, 24)));
  const int exponent = std::ilogb(a);
  const auto mantissa = static_cast<uint16_t>(std::ldexp(a, 10 - exponent) - 1024);
  return static_cast<uint16_t>(sign | ((exponent + 15) << 10) | mantissa);
}
inline double f16_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const double a = exponent == 0    ? std::ldexp(mantissa, -24)
                   : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                    : std::ldexp(1024 + mantissa, exponent - 25);
  return bits & 0x8000 ? -a : a;
}

// Where tensors begin: one element past a 64-byte boundary, or on it.
inline bool buffers_are_aligned = false;

// A contiguous tensor between guards.
class GuardedBuffer {
 public:
  GuardedBuffer(int32_t dtype, std::vector<int64_t> shape) : dtype_(dtype), shape_(std::move(shape)) {
    size_ = dtype == GDN_F32 || dtype == GDN_I32 ? 4 : dtype == GDN_I64 ? 8 : dtype == GDN_U8 ? 1 : 2;
    count_ = std::accumulate(shape_.begin(), shape_.end(), int64_t{1}, std::multiplies<>());
    raw_.assign(2 * kGuard + static_cast<size_t>(count_ + 1) * size_ + 64, kGuardByte);
    const auto address = reinterpret_cast<uintptr_t>(raw_.data()) + kGuard;
    begin_ = kGuard + (64 - address % 64) % 64 + (buffers_are_aligned ? 0 : size_);
    std::memset(data(), 0xFF, static_cast<size_t>(count_) * size_);
    gdn_tensor_init(&tensor_, data(), dtype, static_cast<int32_t>(shape_.size()), shape_.data());
  }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  unsigned char* data() { return raw_.data() + begin_; }
  int64_t count() const { return count_; }
  const gdn_tensor* tensor() const { return &tensor_; }
  int32_t dtype() const { return dtype_; }

  void set(int64_t i, double x) {
    unsigned char* at = data() + static_cast<size_t>(i) * size_;
    if (dtype_ == GDN_F32) {
      const float f = static_cast<float>(x);
      std::memcpy(at, &f, 4);
    } else if (dtype_ == GDN_BF16) {
      const uint32_t bits = bits_of(static_cast<float>(x));
      const auto half = static_cast<uint16_t>(std::isnan(x) ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
      std::memcpy(at, &half, 2);
    } else if (dtype_ == GDN_F16) {
      const uint16_t half = f16_bits(x);
      std::memcpy(at, &half, 2);
    } else if (dtype_ == GDN_I32) {
      const auto n = static_cast<int32_t>(x);
      std::memcpy(at, &n, 4);
    } else if (dtype_ == GDN_I64) {
      const auto n = static_cast<int64_t>(x);
      std::memcpy(at, &n, 8);
    } else {
      *at = static_cast<unsigned char>(x);
    }
  }
  double get(int64_t i) {
    const unsigned char* at = data() + static_cast<size_t>(i) * size_;
    if (dtype_ == GDN_F32) {
      float f;
      std::memcpy(&f, at, 4);
      return f;
    }
    uint16_t half;
    std::memcpy(&half, at, 2);
    if (dtype_ == GDN_F16) return f16_value(half);
    const uint32_t bits = uint32_t{half} << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  void remember() { before_ = raw_; }
  void restore() { raw_ = before_; }
  // First byte changed outside elements that `written` allows, or -1.
  int64_t stray(const std::vector<bool>& written) const {
    for (size_t i = 0; i < raw_.size(); ++i) {
      if (raw_[i] == before_[i]) continue;
      const bool inside = i >= begin_ && i < begin_ + static_cast<size_t>(count_) * size_;
      if (!inside || written.empty() || !written[(i - begin_) / size_]) return static_cast<int64_t>(i);
    }
    return -1;
  }

 private:
  int32_t dtype_;
  std::vector<int64_t> shape_;
  size_t size_ = 0, begin_ = 0;
  int64_t count_ = 0;
  std::vector<unsigned char> raw_, before_;
  gdn_tensor tensor_ = {};
};

}  // namespace gdn_test
