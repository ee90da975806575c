// SPDX-License-Identifier: MIT
// Strided tensors of any float dtype with guard bytes, for the tests of the elementwise operators and the convolution.
#pragma once
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gdn/gdn.h"

namespace gdn_test {

inline double bf16_value(uint16_t b) { return static_cast<double>(std::bit_cast<float>(uint32_t{b} << 16)); }
inline double f16_value(uint16_t h) {
  const int exp = (h >> 10) & 31, man = h & 0x3ff;
  double v = 0;
  if (exp == 31) {
    v = man != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else {
    v = exp == 0 ? std::ldexp(man, -24) : std::ldexp(man + 1024, exp - 25);
  }
  return (h & 0x8000) != 0 ? -v : v;
}
// Nearest value with `bits` of significand and the smallest exponent step `min_step` (log2), ties to even.
inline double round_to(double x, int bits, int min_step) {
  if (x == 0 || !std::isfinite(x)) return x;
  int e = 0;
  std::frexp(x, &e);
  const int step = std::max(e - bits, min_step);
  return std::ldexp(std::nearbyint(std::ldexp(x, -step)), step);
}
inline double round_dtype(double x, int32_t dtype) {
  if (dtype == GDN_BF16) return round_to(x, 8, -133);
  if (dtype == GDN_F16) return round_to(x, 11, -24);
  return static_cast<double>(static_cast<float>(x));
}
// Half a unit in the last place, relative, plus the same of the subnormals.
inline double rounding_error(double x, int32_t dtype) {
  if (dtype == GDN_BF16) return std::abs(x) * 0x1p-8;
  if (dtype == GDN_F16) return std::abs(x) * 0x1p-11 + 0x1p-25;
  return std::abs(x) * 0x1p-24;
}
inline uint32_t encode(double x, int32_t dtype) {
  const double r = round_dtype(x, dtype);
  const uint32_t f = std::bit_cast<uint32_t>(static_cast<float>(r));
  if (dtype == GDN_F32) return f;
  if (dtype == GDN_BF16) return std::isnan(x) ? 0x7fc0 : f >> 16;
  if (std::isnan(x)) return 0x7e00;
  const uint32_t sign = std::signbit(x) ? 0x8000 : 0;
  const double a = std::abs(r);
  if (a == 0) return sign;
  int e = 0;
  std::frexp(a, &e);
  if (e < -13) return sign | static_cast<uint32_t>(std::ldexp(a, 24));
  return sign | static_cast<uint32_t>((e + 14) << 10) | (static_cast<uint32_t>(std::ldexp(a, 11 - e)) & 0x3ff);
}

// How a tensor lies in memory: the order of its dims from outer to inner, the inner stride, spare elements per row.
struct Layout {
  std::vector<int> order;  // empty: as they are
  int64_t inner_stride = 1;
  int64_t padding = 0;
};

class Tensor {
 public:
  Tensor() = default;
  Tensor(int32_t dtype, std::vector<int64_t> shape, const Layout& layout = {}) : shape_(std::move(shape)) {
    const int rank = static_cast<int>(shape_.size());
    std::vector<int> order = layout.order;
    if (order.empty()) {
      order.resize(shape_.size());
      std::iota(order.begin(), order.end(), 0);
    }
    view_ = {};
    view_.device_type = GDN_CPU;
    view_.dtype = dtype;
    view_.ndim = rank;
    int64_t stride = layout.inner_stride;
    for (int i = rank - 1; i >= 0; --i) {
      const int dim = order[static_cast<size_t>(i)];
      view_.shape[dim] = shape_[static_cast<size_t>(dim)];
      view_.strides[dim] = stride;
      stride *= std::max<int64_t>(view_.shape[dim], 1);
      if (i == rank - 1) stride += layout.padding;
    }
    bytes_ = dtype == GDN_F32 ? 4 : 2;
    memory_.assign(static_cast<size_t>(stride * bytes_) + 2 * kGuard, 0xa5);
    used_.assign(memory_.size(), false);
    for (int64_t i = 0; i < size(); ++i) {
      std::fill_n(used_.begin() + static_cast<int64_t>(offset(i)), bytes_, true);
      set(i, std::numeric_limits<double>::quiet_NaN());
    }
  }

  int64_t size() const {
    int64_t n = 1;
    for (const int64_t d : shape_) n *= d;
    return n;
  }
  int32_t dtype() const { return view_.dtype; }
  const std::vector<int64_t>& shape() const { return shape_; }
  const gdn_tensor* ptr() {
    view_.data = memory_.data() + kGuard;
    return &view_;
  }
  // i counts in row-major order of the shape.
  double get(int64_t i) const {
    const unsigned char* p = memory_.data() + offset(i);
    if (bytes_ == 4) {
      float f = 0;
      std::memcpy(&f, p, 4);
      return static_cast<double>(f);
    }
    uint16_t h = 0;
    std::memcpy(&h, p, 2);
    return dtype() == GDN_BF16 ? bf16_value(h) : f16_value(h);
  }
  void set(int64_t i, double x) {
    const uint32_t bits = encode(x, dtype());
    std::memcpy(memory_.data() + offset(i), &bits, static_cast<size_t>(bytes_));  // little endian
  }
  double at(std::initializer_list<int64_t> index) const { return get(flat(index)); }
  void set_at(std::initializer_list<int64_t> index, double x) { set(flat(index), x); }
  void fill(uint32_t seed, double low = -2, double high = 2) {
    std::mt19937 engine(seed);
    std::uniform_real_distribution<double> draw(low, high);
    for (int64_t i = 0; i < size(); ++i) set(i, draw(engine));
  }
  std::vector<double> values() const {
    std::vector<double> v;
    for (int64_t i = 0; i < size(); ++i) v.push_back(get(i));
    return v;
  }
  // Bytes between and around the elements are as they were.
  bool guards_intact() const {
    for (size_t i = 0; i < memory_.size(); ++i) {
      if (!used_[i] && memory_[i] != 0xa5) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 256;
  int64_t flat(std::initializer_list<int64_t> index) const {
    int64_t i = 0;
    size_t dim = 0;
    for (const int64_t v : index) i = i * shape_[dim++] + v;
    return i;
  }
  size_t offset(int64_t i) const {
    int64_t o = 0;
    for (int dim = view_.ndim - 1; dim >= 0; --dim) {
      o += i % shape_[static_cast<size_t>(dim)] * view_.strides[dim];
      i /= shape_[static_cast<size_t>(dim)];
    }
    return kGuard + static_cast<size_t>(o * bytes_);
  }
  std::vector<int64_t> shape_;
  gdn_tensor view_ = {};
  int64_t bytes_ = 4;
  std::vector<unsigned char> memory_;
  std::vector<bool> used_;
};

// The ISAs of this build that this CPU can run; "cuda" where the tests run on a GPU (cuda_ops_test.cpp).
inline std::vector<std::string> usable_isas() {
  std::vector<std::string> isas;
#ifdef GDN_TEST_ON_CUDA
  isas.emplace_back("cuda");
#else
  for (const char* name : {"baseline", "neon", "avx2", "avx512"}) {
    if (gdn_set_isa(name) == GDN_OK) isas.emplace_back(name);
  }
  EXPECT_EQ(gdn_set_isa("auto"), GDN_OK);
#endif
  return isas;
}
class IsaTest : public ::testing::TestWithParam<std::string> {
 protected:
#ifdef GDN_TEST_ON_CUDA
  void SetUp() override {
    if (!has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  }
#else
  void SetUp() override { ASSERT_EQ(gdn_set_isa(GetParam().c_str()), GDN_OK) << gdn_last_error(); }
  void TearDown() override { ASSERT_EQ(gdn_set_isa("auto"), GDN_OK); }
#endif
};
#define GDN_INSTANTIATE_ISAS(suite)                                                  \
  INSTANTIATE_TEST_SUITE_P(Isa, suite, ::testing::ValuesIn(gdn_test::usable_isas()), \
                           [](const auto& param_info) { return param_info.param; })

inline constexpr int32_t kFloatDtypes[] = {GDN_F32, GDN_BF16, GDN_F16};
inline const char* dtype_name(int32_t d) { return d == GDN_F32 ? "f32" : d == GDN_BF16 ? "bf16" : "f16"; }

}  // namespace gdn_test
