// SPDX-License-Identifier: MIT
// The overlap search against brute force over every element's bytes.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "core/validate_util.h"

namespace gdn::validation {
namespace {

void for_each_byte(const View& view, const auto& visit) {
  const int64_t n = element_count(view), bytes = dtype_bytes(view.dtype);
  for (int64_t e = 0; e < n; ++e) {
    int64_t rest = e, offset = 0;
    for (int32_t d = view.ndim - 1; d >= 0; --d) {
      offset += rest % view.shape[d] * view.stride[d];
      rest /= view.shape[d];
    }
    for (int64_t b = 0; b < bytes; ++b) visit(reinterpret_cast<uintptr_t>(view.data) + uintptr_t(offset * bytes + b));
  }
}

View random_view(std::mt19937* engine, char* memory) {
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(*engine);
  };
  constexpr int32_t kDtypes[] = {GDN_F32, GDN_BF16, GDN_F64, GDN_U8};
  View view;
  view.dtype = kDtypes[draw(0, 3)];
  view.ndim = int32_t(draw(1, 4));
  view.data = memory + draw(0, 12) * dtype_bytes(view.dtype);
  for (int32_t d = 0; d < view.ndim; ++d) {
    view.shape[d] = draw(0, 20) == 0 ? 0 : draw(1, 4);
    view.stride[d] = draw(0, 3) == 0 ? draw(0, 2) : draw(1, 14);
  }
  return view;
}

TEST(Overlap, PairsAgainstBruteForce) {
  std::mt19937 engine(7);
  alignas(64) static char memory[4096];
  int overlapping = 0, interleaved = 0;
  for (int i = 0; i < 30000; ++i) {
    const View a = random_view(&engine, memory), b = random_view(&engine, memory);
    std::set<uintptr_t> bytes;
    for_each_byte(a, [&](uintptr_t p) { bytes.insert(p); });
    bool expected = false;
    uintptr_t low = UINTPTR_MAX, high = 0;
    for_each_byte(b, [&](uintptr_t p) {
      expected = expected || bytes.count(p) != 0;
      low = std::min(low, p);
      high = std::max(high, p);
    });
    ASSERT_EQ(views_overlap(a, b), expected ? Overlap::kYes : Overlap::kNo) << "pair " << i;
    ASSERT_EQ(views_overlap(b, a), expected ? Overlap::kYes : Overlap::kNo) << "pair " << i;
    overlapping += expected ? 1 : 0;
    interleaved += !expected && !bytes.empty() && high > *bytes.begin() && low < *bytes.rbegin() ? 1 : 0;
  }
  EXPECT_GT(overlapping, 1000);
  EXPECT_GT(interleaved, 1000);
}

TEST(Overlap, SelfAgainstBruteForce) {
  std::mt19937 engine(8);
  alignas(64) static char memory[4096];
  int overlapping = 0, clean = 0;
  for (int i = 0; i < 30000; ++i) {
    const View a = random_view(&engine, memory);
    std::set<uintptr_t> bytes;
    int64_t visited = 0;
    for_each_byte(a, [&](uintptr_t p) {
      bytes.insert(p);
      ++visited;
    });
    if (visited == 0) continue;  // the caller asks only about non-empty views
    const bool expected = int64_t(bytes.size()) != visited;
    ASSERT_EQ(overlaps_itself(a), expected ? Overlap::kYes : Overlap::kNo) << "view " << i;
    (expected ? overlapping : clean) += 1;
  }
  EXPECT_GT(overlapping, 1000);
  EXPECT_GT(clean, 1000);
}

View make_view(char* data, int32_t dtype, std::initializer_list<int64_t> shape,
               std::initializer_list<int64_t> strides) {
  View view;
  view.data = data;
  view.dtype = dtype;
  view.ndim = int32_t(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape);
  std::copy(strides.begin(), strides.end(), view.stride);
  return view;
}

TEST(Overlap, RealLayouts) {
  char* base = reinterpret_cast<char*>(uintptr_t{1} << 40);  // never read
  // Packed q | k | v | z of a Qwen layer, 64K tokens: slices of one row.
  constexpr int64_t kT = 65536, kRow = 2048 + 2048 + 4096 + 4096;
  const View q = make_view(base, GDN_BF16, {1, kT, 16, 128}, {kT * kRow, kRow, 128, 1});
  const View v = make_view(base + 2 * 4096, GDN_BF16, {1, kT, 32, 128}, {kT * kRow, kRow, 128, 1});
  const View shifted = make_view(base + 2 * 4095, GDN_BF16, {1, kT, 32, 128}, {kT * kRow, kRow, 128, 1});
  const View k = make_view(base + 2 * 2048, GDN_BF16, {1, kT, 16, 128}, {kT * kRow, kRow, 128, 1});
  EXPECT_EQ(views_overlap(q, v), Overlap::kNo);
  EXPECT_EQ(views_overlap(q, k), Overlap::kNo);
  EXPECT_EQ(views_overlap(k, shifted), Overlap::kYes);
  // vLLM: the conv state (bf16) and the recurrent state (fp32) of a block share a page.
  constexpr int64_t kConvBytes = 3 * 8192 * 2, kPage = kConvBytes + 32 * 128 * 128 * 4;
  const View conv = make_view(base, GDN_BF16, {5000, 8192, 3}, {kPage / 2, 3, 1});
  const View ssm = make_view(base + kConvBytes, GDN_F32, {5000, 32, 128, 128}, {kPage / 4, 16384, 128, 1});
  const View too_early = make_view(base + kConvBytes - 4, GDN_F32, {5000, 32, 128, 128}, {kPage / 4, 16384, 128, 1});
  EXPECT_EQ(views_overlap(conv, ssm), Overlap::kNo);
  EXPECT_EQ(views_overlap(conv, too_early), Overlap::kYes);
  // A transposed state and a permuted output do not overlap themselves.
  EXPECT_EQ(overlaps_itself(make_view(base, GDN_F32, {2, 4, 128, 64}, {32768, 8192, 1, 128})), Overlap::kNo);
  EXPECT_EQ(overlaps_itself(make_view(base, GDN_F32, {2, 3}, {3, 2})), Overlap::kNo);
  EXPECT_EQ(overlaps_itself(make_view(base, GDN_F32, {2, 4}, {3, 1})), Overlap::kYes);
}

}  // namespace
}  // namespace gdn::validation
