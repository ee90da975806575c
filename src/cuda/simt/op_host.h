// SPDX-License-Identifier: MIT
// From validated problems to kernel parameters, and launches: host code of the memory-bound operators.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "core/problem.h"
#include "cuda/common/launch.h"
#include "cuda/common/make_params.h"
#include "cuda/common/op_params.h"

namespace gdn::cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Unlike the delta rule's tensor_ref_of, a view without data is an absent tensor.
inline TensorRef tensor_ref(const View& view) {
  TensorRef ref;
  if (!view.present()) return ref;
  ref.data = view.data;
  ref.dtype = view.dtype;
  for (int32_t i = 0; i < view.ndim && i < 5; ++i) ref.stride[i] = view.stride[i];
  return ref;
}

inline bool aligned_to_16(const TensorRef& t, int64_t elements, std::initializer_list<int> dims) {
  bool aligned = reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  for (const int d : dims) aligned = aligned && t.stride[d] % elements == 0;
  return aligned;
}

// Exact for 0 <= n < 2^31: multiplier = ceil(2^(31 + log) / divisor), log = ceil(log2 divisor).
inline FastDivisor fast_divisor(int64_t divisor) {
  FastDivisor d;
  if (divisor <= 1 || divisor > INT32_MAX) return d;
  uint32_t log = 0;
  while ((int64_t{1} << log) < divisor) ++log;
  const uint64_t n = uint64_t{1} << (31 + log);
  d.divisor = static_cast<uint32_t>(divisor);
  d.multiplier = static_cast<uint32_t>((n + static_cast<uint64_t>(divisor) - 1) / static_cast<uint64_t>(divisor));
  d.shift = log - 1;
  return d;
}

// Merges dims 0..2 (sizes `rows`) of the tensors where each one's strides allow it, and drops those of size 1. The
// tensors' strides are rewritten to the new dims; the last dim (3) stays.
inline RowMap merge_rows(const int64_t* rows, std::initializer_list<TensorRef*> tensors) {
  RowMap map;
  map.count = rows[0] * rows[1] * rows[2];
  if (map.count == 0) return map;
  int64_t size[3] = {1, 1, 1};
  int32_t used = 0;  // dims so far, outermost first
  int64_t strides[8][3] = {};
  for (int32_t d = 0; d < 3; ++d) {
    if (rows[d] == 1) continue;
    bool merges = used > 0;
    size_t i = 0;
    for (const TensorRef* t : tensors) {
      merges = merges && (t->data == nullptr || strides[i][used - 1] == t->stride[d] * rows[d]);
      ++i;
    }
    const int32_t at = merges ? used - 1 : used++;
    size[at] = merges ? size[at] * rows[d] : rows[d];
    i = 0;
    for (const TensorRef* t : tensors) strides[i++][at] = t->stride[d];
  }
  if (used == 0) used = 1;
  map.dims = used;
  const int32_t pad = 3 - used;
  size_t i = 0;
  for (TensorRef* t : tensors) {
    for (int32_t d = 0; d < 3; ++d) t->stride[d] = d < pad ? 0 : strides[i][d - pad];
    ++i;
  }
  map.size2 = size[used - 1];
  map.size1 = used >= 2 ? size[used - 2] : 1;
  map.by1 = fast_divisor(map.size1);
  map.by2 = fast_divisor(map.size2);
  return map;
}

// Blocks along a grid dimension; kernels stride on over what is left.
inline uint32_t grid_x(int64_t blocks) { return static_cast<uint32_t>(std::clamp<int64_t>(blocks, 1, INT32_MAX)); }
inline uint32_t grid_y(int64_t blocks) { return static_cast<uint32_t>(std::clamp<int64_t>(blocks, 1, 65535)); }

// Blocks that fill a large GPU several times over: more are not worth their prologues.
inline constexpr int64_t kFullGrid = 132 * 16;

}  // namespace gdn::cuda
