// SPDX-License-Identifier: MIT
// Vectors of elements, activations and row indices for the memory-bound operators.
#pragma once
#include "cuda/common/element.cuh"
#include "cuda/common/op_params.h"

// Of compute capability 10 and later ptxas left to itself holds on to an occupancy at which these kernels spill; before,
// the bound would only cost occupancy.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define GDN_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#else
#define GDN_BOUNDS(threads, blocks) __launch_bounds__(threads)
#endif

namespace gdn::cuda {

// ---- dtypes at compile time
template <class T>
struct DtypeOf;
template <>
struct DtypeOf<float> {
  static constexpr int32_t kValue = GDN_F32;
};
template <>
struct DtypeOf<__nv_bfloat16> {
  static constexpr int32_t kValue = GDN_BF16;
};
template <>
struct DtypeOf<__half> {
  static constexpr int32_t kValue = GDN_F16;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (DtypeOf<T>::kValue == GDN_BF16) {
    return __float2bfloat16(x);
  } else {
    return __float2half(x);
  }
}
template <class T>
__device__ __forceinline__ float round_to(float x) {
  return to_float(from_float<T>(x));
}
__device__ __forceinline__ float round_dtype(float x, int32_t dtype) {
  if (dtype == GDN_BF16) return round_to<__nv_bfloat16>(x);
  if (dtype == GDN_F16) return round_to<__half>(x);
  return x;
}

// ---- kN adjacent elements. The address must be a multiple of kChunk bytes.
template <class T, int kN>
struct Pack {
  static constexpr int kBytes = kN * static_cast<int>(sizeof(T));
  static constexpr int kChunk = kBytes % 16 == 0 ? 16 : kBytes % 8 == 0 ? 8 : kBytes % 4 == 0 ? 4 : 2;
  alignas(kChunk) T v[kN];
};
template <int kBytes>
struct ChunkOf;
template <>
struct ChunkOf<16> {
  using Type = uint4;
};
template <>
struct ChunkOf<8> {
  using Type = uint2;
};
template <>
struct ChunkOf<4> {
  using Type = uint32_t;
};
template <>
struct ChunkOf<2> {
  using Type = uint16_t;
};

template <class T, int kN>
__device__ __forceinline__ Pack<T, kN> load_pack(const T* p) {
  using Chunk = typename ChunkOf<Pack<T, kN>::kChunk>::Type;
  Pack<T, kN> pack;
#pragma unroll
  for (int i = 0; i < Pack<T, kN>::kBytes / static_cast<int>(sizeof(Chunk)); ++i) {
    reinterpret_cast<Chunk*>(&pack)[i] = reinterpret_cast<const Chunk*>(p)[i];
  }
  return pack;
}
template <class T, int kN>
__device__ __forceinline__ void store_pack(const Pack<T, kN>& pack, T* p) {
  using Chunk = typename ChunkOf<Pack<T, kN>::kChunk>::Type;
#pragma unroll
  for (int i = 0; i < Pack<T, kN>::kBytes / static_cast<int>(sizeof(Chunk)); ++i) {
    reinterpret_cast<Chunk*>(p)[i] = reinterpret_cast<const Chunk*>(&pack)[i];
  }
}
template <class T, int kN>
__device__ __forceinline__ void unpack(const Pack<T, kN>& pack, float* out) {
#pragma unroll
  for (int i = 0; i < kN; ++i) out[i] = to_float(pack.v[i]);
}
template <class T, int kN>
__device__ __forceinline__ Pack<T, kN> pack_floats(const float* in) {
  Pack<T, kN> pack;
#pragma unroll
  for (int i = 0; i < kN; ++i) pack.v[i] = from_float<T>(in[i]);
  return pack;
}
// The same with the dtype at run time.
template <int kN>
__device__ __forceinline__ void load_floats(const void* data, int32_t dtype, int64_t index, float* out) {
  if (dtype == GDN_F32) {
    unpack(load_pack<float, kN>(static_cast<const float*>(data) + index), out);
  } else if (dtype == GDN_BF16) {
    unpack(load_pack<__nv_bfloat16, kN>(static_cast<const __nv_bfloat16*>(data) + index), out);
  } else {
    unpack(load_pack<__half, kN>(static_cast<const __half*>(data) + index), out);
  }
}
template <int kN>
__device__ __forceinline__ void store_floats(const float* in, void* data, int32_t dtype, int64_t index) {
  if (dtype == GDN_F32) {
    store_pack(pack_floats<float, kN>(in), static_cast<float*>(data) + index);
  } else if (dtype == GDN_BF16) {
    store_pack(pack_floats<__nv_bfloat16, kN>(in), static_cast<__nv_bfloat16*>(data) + index);
  } else {
    store_pack(pack_floats<__half, kN>(in), static_cast<__half*>(data) + index);
  }
}
// Not through the read-only path (__ldg), and no F64: the memory may be an output of the same kernel, and the compiler may
// move a read-only load past the store that ends the value.
__device__ __forceinline__ float load_element(const TensorRef& t, int64_t offset) {
  if (t.dtype == GDN_F32) return static_cast<const float*>(t.data)[offset];
  if (t.dtype == GDN_BF16) return to_float(static_cast<const __nv_bfloat16*>(t.data)[offset]);
  return to_float(static_cast<const __half*>(t.data)[offset]);
}
__device__ __forceinline__ void store_element(const TensorRef& t, int64_t offset, float value) {
  if (t.dtype == GDN_F32) {
    static_cast<float*>(t.data)[offset] = value;
  } else if (t.dtype == GDN_BF16) {
    static_cast<__nv_bfloat16*>(t.data)[offset] = from_float<__nv_bfloat16>(value);
  } else {
    static_cast<__half*>(t.data)[offset] = from_float<__half>(value);
  }
}

// ---- activations: within 1e-6 relative wherever the value is a normal number, within a unit of the smallest subnormal
// below, NaN in NaN out, never a NaN from a number. The fast forms hold for x >= kFastLowest.
inline constexpr float kFastLowest = -87.0f;

__device__ __forceinline__ float approximate_exp2(float x) {  // |x| <= 1
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}
__device__ __forceinline__ float approximate_reciprocal(float x) {  // 1 <= x < 2^126
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}
// exp(-m), |m| <= 87. The argument of ex2 is reduced to half a turn of the binary exponent in two parts: the plain product
// m * log2(e) would lose |m| / 2 ulps.
__device__ __forceinline__ float exp_of_minus(float m) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kLog2eHigh = 1.44269502f, kLog2eLow = 1.92596299e-8f;
  const float shifted = fmaf(m, -kLog2eHigh, kShift);
  const float n = shifted - kShift;
  const float r = fmaf(m, -kLog2eLow, fmaf(m, -kLog2eHigh, -n));
  return __int_as_float(__float_as_int(approximate_exp2(r)) + static_cast<int32_t>(__float_as_uint(shifted) << 23));
}
// numerator / (1 + exp(-x))
__device__ __forceinline__ float over_one_plus_exp(float numerator, float x) {
  return numerator * approximate_reciprocal(1.0f + exp_of_minus(fminf(x, 87.0f)));
}
// exp(x) * factor for x < kFastLowest: two factors that are normal numbers, so a subnormal result is rounded once.
__device__ __forceinline__ float exp_times(float x, float factor) {
  const float half = exp_of_minus(-0.5f * fmaxf(x, -125.0f));
  return factor * half * half;
}
__device__ __forceinline__ float sigmoid(float x) {
  if (x < kFastLowest) return exp_times(x, 1.0f);
  return over_one_plus_exp(x != x ? x : 1.0f, x);
}
__device__ __forceinline__ float silu(float x) {
  if (x < kFastLowest) return exp_times(x, fmaxf(x, -125.0f));
  return over_one_plus_exp(x, x);
}
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// ---- rows
__device__ __forceinline__ uint32_t fast_divide(uint32_t n, const FastDivisor& d) {
  return d.divisor == 1 ? n : __umulhi(n, d.multiplier) >> d.shift;
}
struct RowIndex {
  int64_t i0, i1, i2;
};
__device__ __forceinline__ RowIndex row_index(const RowMap& map, int64_t row) {
  if (map.dims == 1) return {0, 0, row};
  if (map.count <= INT32_MAX) {
    const uint32_t q = fast_divide(static_cast<uint32_t>(row), map.by2);
    const int64_t i2 = row - static_cast<int64_t>(q) * map.size2;
    if (map.dims == 2) return {0, q, i2};
    const uint32_t i0 = fast_divide(q, map.by1);
    return {i0, q - static_cast<int64_t>(i0) * map.size1, i2};
  }
  const int64_t q = row / map.size2, i0 = q / map.size1;
  return {i0, q - i0 * map.size1, row - q * map.size2};
}
__device__ __forceinline__ int64_t row_offset(const TensorRef& t, const RowIndex& i) {
  return i.i0 * t.stride[0] + i.i1 * t.stride[1] + i.i2 * t.stride[2];
}

__device__ __forceinline__ float inverse_rms(float sum, int64_t n, float eps) {
  return __frsqrt_rn(__fdiv_rn(sum, static_cast<float>(n)) + eps);
}

}  // namespace gdn::cuda
