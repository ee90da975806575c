// SPDX-License-Identifier: MIT
// Do two strided views, or two elements of one view, share memory? Byte ranges decide the common case. Where ranges
// interleave (slices of a packed projection, pools that share a page) the question is whether a bounded linear
// equation has an integer solution; the search is exact up to a budget, and beyond it nothing is claimed.
#include <algorithm>
#include <numeric>

#include "core/validate_util.h"

namespace gdn::validation {
namespace {

__extension__ typedef __int128 Wide;
constexpr int64_t kSearchBudget = 1 << 14;
constexpr int kMaxTerms = 2 * GDN_MAX_DIMS + 1;

// coef * x with x in [low, high], coef > 0.
struct Term {
  Wide coef, low, high;
};

Wide floor_div(Wide a, Wide b) { return a / b - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0); }
Wide ceil_div(Wide a, Wide b) { return -floor_div(-a, b); }
Wide wide_gcd(Wide a, Wide b) { return b == 0 ? a : wide_gcd(b, a % b); }

// Is there x with sum coef_i x_i = target? With `nonzero_only` the solution x = 0 does not count.
class Equation {
 public:
  void add(Wide coef, Wide low, Wide high) {
    if (coef > 0 && (low != 0 || high != 0)) terms_[count_++] = Term{coef, low, high};
    if (coef == 0 && high > 0) has_zero_coef_ = true;
  }
  bool has_zero_coef() const { return has_zero_coef_; }

  // Joins terms without changing the set of values the sum can take.
  void merge() {
    sort();
    for (int i = count_ - 1; i > 0; --i) {
      Term& small = terms_[i];
      for (int j = i - 1; j >= 0; --j) {
        Term& large = terms_[j];
        const Wide ratio = large.coef / small.coef;
        if (large.coef % small.coef == 0 && small.high - small.low + 1 >= ratio) {
          small.low += ratio * large.low;
          small.high += ratio * large.high;
          std::copy(terms_ + j + 1, terms_ + count_, terms_ + j);
          --count_;
          return merge();
        }
      }
    }
  }

  Overlap solve(Wide target, bool nonzero_only) {
    sort();
    suffix_gcd_[count_] = suffix_low_[count_] = suffix_high_[count_] = 0;
    for (int i = count_ - 1; i >= 0; --i) {
      suffix_gcd_[i] = wide_gcd(terms_[i].coef, suffix_gcd_[i + 1]);
      suffix_low_[i] = suffix_low_[i + 1] + terms_[i].coef * terms_[i].low;
      suffix_high_[i] = suffix_high_[i + 1] + terms_[i].coef * terms_[i].high;
    }
    budget_ = kSearchBudget;
    if (search(0, target, nonzero_only)) return Overlap::kYes;
    return budget_ > 0 ? Overlap::kNo : Overlap::kUnknown;
  }

 private:
  void sort() {
    std::sort(terms_, terms_ + count_, [](const Term& a, const Term& b) { return a.coef > b.coef; });
  }

  bool search(int i, Wide target, bool nonzero_only) {
    if (i == count_) return target == 0 && !nonzero_only;
    if (target % suffix_gcd_[i] != 0) return false;
    const Term& t = terms_[i];
    const Wide low = std::max(t.low, ceil_div(target - suffix_high_[i + 1], t.coef));
    const Wide high = std::min(t.high, floor_div(target - suffix_low_[i + 1], t.coef));
    for (Wide x = low; x <= high; ++x) {
      if (--budget_ <= 0) return false;
      if (search(i + 1, target - t.coef * x, nonzero_only && x == 0)) return true;
    }
    return false;
  }

  Term terms_[kMaxTerms];
  int count_ = 0;
  bool has_zero_coef_ = false;
  Wide suffix_gcd_[kMaxTerms + 1], suffix_low_[kMaxTerms + 1], suffix_high_[kMaxTerms + 1];
  int64_t budget_ = 0;
};

}  // namespace

Overlap overlaps_itself(const View& view) {
  // Common case: sorted by stride, each dimension steps over everything below it. Insertion sort of at most six.
  int32_t order[GDN_MAX_DIMS];
  int32_t count = 0;
  for (int32_t i = 0; i < view.ndim; ++i) {
    if (view.shape[i] <= 1) continue;
    int32_t at = count++;
    for (; at > 0 && view.stride[order[at - 1]] > view.stride[i]; --at) order[at] = order[at - 1];
    order[at] = i;
  }
  bool nested = true;
  int64_t reach = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t d = order[i];
    nested = nested && view.stride[d] > reach;
    reach += (view.shape[d] - 1) * view.stride[d];
  }
  if (nested) return Overlap::kNo;

  Equation equation;
  for (int32_t i = 0; i < count; ++i) {
    const Wide last = view.shape[order[i]] - 1;
    equation.add(view.stride[order[i]], -last, last);
  }
  return equation.has_zero_coef() ? Overlap::kYes : equation.solve(0, true);
}

ByteRange byte_range(const View& view) {
  int64_t last = 0;
  for (int32_t i = 0; i < view.ndim; ++i) {
    if (view.shape[i] == 0) return ByteRange{};
    last += (view.shape[i] - 1) * view.stride[i];
  }
  const uintptr_t begin = reinterpret_cast<uintptr_t>(view.data);
  return ByteRange{begin, begin + static_cast<uintptr_t>((last + 1) * dtype_bytes(view.dtype))};
}

Overlap views_overlap(const View& a, const View& b) {
  if (!byte_range(a).meets(byte_range(b))) return Overlap::kNo;

  // In units of the smaller element; a larger element covers several.
  const int64_t a_bytes = dtype_bytes(a.dtype), b_bytes = dtype_bytes(b.dtype), unit = std::min(a_bytes, b_bytes);
  Equation equation;
  for (int32_t i = 0; i < a.ndim; ++i) equation.add(Wide{a.stride[i]} * (a_bytes / unit), 0, a.shape[i] - 1);
  for (int32_t i = 0; i < b.ndim; ++i) equation.add(Wide{b.stride[i]} * (b_bytes / unit), -(Wide{b.shape[i]} - 1), 0);
  if (a_bytes > unit) equation.add(1, 0, a_bytes / unit - 1);
  if (b_bytes > unit) equation.add(1, -(Wide{b_bytes / unit} - 1), 0);
  equation.merge();
  const Wide distance =
      static_cast<Wide>(reinterpret_cast<uintptr_t>(b.data)) - static_cast<Wide>(reinterpret_cast<uintptr_t>(a.data));
  return equation.solve(distance / unit, false);
}

}  // namespace gdn::validation
