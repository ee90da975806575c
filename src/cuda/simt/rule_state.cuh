// SPDX-License-Identifier: MIT
// A thread's tile of the state and its way to and from memory.
//
// A warp holds K rows x 4 * kCols columns: lane = 8 * column group + row lane. Row i of a thread is
// 32 * (i / 4) + 4 * row lane + i % 4, so that four rows are neighbours in memory when the state is V-first and the eight
// row lanes of a column read one line; its kCols columns are neighbours, one access when the state is K-first.
#pragma once
#include <type_traits>

#include "cuda/common/element.cuh"

namespace gdn::cuda::simt {

// How a state tensor is accessed, decided on the host for a whole launch.
enum class Access : int8_t { kScalar, kAlongK, kAlongV };

template <class Element>
__device__ __forceinline__ float to_float(Element x) {
  if constexpr (std::is_same_v<Element, float>) {
    return x;
  } else if constexpr (std::is_same_v<Element, __half>) {
    return __half2float(x);
  } else {
    return __bfloat162float(x);
  }
}
template <class Element>
__device__ __forceinline__ Element from_float(float x) {
  if constexpr (std::is_same_v<Element, float>) {
    return x;
  } else if constexpr (std::is_same_v<Element, __half>) {
    return __float2half(x);
  } else {
    return __float2bfloat16(x);
  }
}

template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Pack {
  Element x[kCount];
};

template <int kRows, int kCols>
struct StateTile {
  static constexpr int kRowLanes = 8;
  static constexpr int kWarpCols = 4 * kCols;
  float s[kRows][kCols];

  static __device__ __forceinline__ int row(int row_lane, int i) { return 32 * (i / 4) + 4 * row_lane + i % 4; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) s[i][j] = 0;
    }
  }

  // Calls visit(offset, i, j) for every element inside K x V; offset in elements from `base`.
  template <class Visit>
  static __device__ __forceinline__ void each(const TensorRef& t, int64_t base, int K, int V, int row_lane, int column,
                                              const Visit& visit) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int r = row(row_lane, i);
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
        if (r < K && column + j < V) visit(base + r * t.stride[2] + (column + j) * t.stride[3], i, j);
      }
    }
  }

  template <class Element>
  __device__ __forceinline__ void load_as(const TensorRef& t, Access access, int64_t base, int K, int V, int row_lane,
                                          int column) {
    // Not through the read-only cache: the same launch may write this memory later.
    const Element* data = static_cast<const Element*>(t.data);
    clear();
    if (access == Access::kAlongK) {
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const int r = row(row_lane, i);
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          if (r >= K || column + j >= V) continue;
          const auto pack = *reinterpret_cast<const Pack<Element, 4>*>(data + base + r + (column + j) * t.stride[3]);
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i + e][j] = to_float(pack.x[e]);
        }
      }
    } else if (access == Access::kAlongV) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int r = row(row_lane, i);
        if (r >= K || column >= V) continue;
        const auto pack = *reinterpret_cast<const Pack<Element, kCols>*>(data + base + r * t.stride[2] + column);
#pragma unroll
        for (int j = 0; j < kCols; ++j) s[i][j] = to_float(pack.x[j]);
      }
    } else {
      each(t, base, K, V, row_lane, column, [&](int64_t offset, int i, int j) { s[i][j] = to_float(data[offset]); });
    }
  }

  template <class Element>
  __device__ __forceinline__ void store_as(const TensorRef& t, Access access, int64_t base, int K, int V, int row_lane,
                                           int column) const {
    Element* data = static_cast<Element*>(t.data);
    if (access == Access::kAlongK) {
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const int r = row(row_lane, i);
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
          if (r >= K || column + j >= V) continue;
          Pack<Element, 4> pack;
#pragma unroll
          for (int e = 0; e < 4; ++e) pack.x[e] = from_float<Element>(s[i + e][j]);
          *reinterpret_cast<Pack<Element, 4>*>(data + base + r + (column + j) * t.stride[3]) = pack;
        }
      }
    } else if (access == Access::kAlongV) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int r = row(row_lane, i);
        if (r >= K || column >= V) continue;
        Pack<Element, kCols> pack;
#pragma unroll
        for (int j = 0; j < kCols; ++j) pack.x[j] = from_float<Element>(s[i][j]);
        *reinterpret_cast<Pack<Element, kCols>*>(data + base + r * t.stride[2] + column) = pack;
      }
    } else {
      each(t, base, K, V, row_lane, column,
           [&](int64_t offset, int i, int j) { data[offset] = from_float<Element>(s[i][j]); });
    }
  }

  __device__ __forceinline__ void load(const TensorRef& t, Access access, int64_t base, int K, int V, int row_lane,
                                       int column) {
    if (t.dtype == GDN_F32) {
      load_as<float>(t, access, base, K, V, row_lane, column);
    } else if (t.dtype == GDN_BF16) {
      load_as<__nv_bfloat16>(t, access, base, K, V, row_lane, column);
    } else {
      load_as<__half>(t, access, base, K, V, row_lane, column);
    }
  }

  __device__ __forceinline__ void store(const TensorRef& t, Access access, int64_t base, int K, int V, int row_lane,
                                        int column) const {
    // Opaque, or the compiler computes the addresses of every row before the token loop, and spills.
    asm volatile("" : "+r"(row_lane), "+r"(column));
    if (t.dtype == GDN_F32) {
      store_as<float>(t, access, base, K, V, row_lane, column);
    } else if (t.dtype == GDN_BF16) {
      store_as<__nv_bfloat16>(t, access, base, K, V, row_lane, column);
    } else {
      store_as<__half>(t, access, base, K, V, row_lane, column);
    }
  }
};

}  // namespace gdn::cuda::simt
