// SPDX-License-Identifier: MIT
// recurrent_decode's share of a state: four vectors of 16 bytes per thread, on their way, in registers, and back.
//
// 16-bit states of one token stay as they are stored (16 registers, not 32: more blocks per SM); with more tokens they are
// widened to fp32 once, so that they are rounded once.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace gdn::cuda::simt {

inline constexpr int kDecodeThreads = 256;
inline constexpr int kDecodeKeys = 128;

template <class Stored>
inline constexpr int kDecodePanel = 8 * 16 / static_cast<int>(sizeof(Stored));  // value channels per block

template <class Stored, bool kKFirst, bool kOneToken>
struct DecodeState {
  static constexpr int kPerVector = 16 / static_cast<int>(sizeof(Stored));
  static constexpr int kPanel = kDecodePanel<Stored>;
  static constexpr int kGroups = kDecodeThreads / 8;
  static constexpr int kVectors = kDecodeKeys / kGroups;
  static constexpr int kKeyVectors = kKFirst ? 1 : kVectors / (kPanel / kGroups);  // V-first: of a channel, per thread
  static constexpr bool kPacked = sizeof(Stored) == 4 || kOneToken;

  uint32_t words[kVectors][4];
  float wide[kPacked ? 1 : kVectors][kPacked ? 1 : kPerVector];

  static __device__ __forceinline__ float widen_word(uint32_t word, int e) {
    if constexpr (sizeof(Stored) == 4) {
      return __uint_as_float(word);
    } else if constexpr (std::is_same_v<Stored, __nv_bfloat16>) {
      return __uint_as_float(e % 2 == 0 ? word << 16 : word & 0xffff0000u);
    } else {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(e % 2 == 0 ? word : word >> 16)));
    }
  }
  static __device__ __forceinline__ uint32_t narrow2(float low, float high) {
    if constexpr (std::is_same_v<Stored, __nv_bfloat16>) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&two);
    } else {
      const __half2 two = __floats2half2_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&two);
    }
  }
  static __device__ __forceinline__ void pack(const float (&x)[kPerVector], uint32_t (&out)[4]) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(Stored) == 4) {
        out[w] = __float_as_uint(x[w]);
      } else {
        out[w] = narrow2(x[2 * w], x[2 * w + 1]);
      }
    }
  }

  // Key of element e of vector i.
  static __device__ __forceinline__ int key_of(int group, int member, int i, int e) {
    return kKFirst ? group + kGroups * i : kPerVector * (member + 8 * (i % kKeyVectors)) + e;
  }
  static __device__ __forceinline__ int64_t offset_of(int64_t key_stride, int64_t channel_stride, int panel_begin,
                                                      int group, int member, int i) {
    if constexpr (kKFirst) return (group + kGroups * i) * key_stride + panel_begin + kPerVector * member;
    const int channel = panel_begin + group + kGroups * (i / kKeyVectors);
    return channel * channel_stride + kPerVector * (member + 8 * (i % kKeyVectors));
  }

  __device__ __forceinline__ float get(int i, int e) const {
    if constexpr (kPacked) {
      return widen_word(words[i][e * static_cast<int>(sizeof(Stored)) / 4], e);
    } else {
      return wide[i][e];
    }
  }
  __device__ __forceinline__ void set(int i, const float (&x)[kPerVector]) {
    if constexpr (kPacked) {
      pack(x, words[i]);
    } else {
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) wide[i][e] = x[e];
    }
  }
  __device__ __forceinline__ void widen() {
    if constexpr (!kPacked) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int e = 0; e < kPerVector; ++e) wide[i][e] = widen_word(words[i][e / 2], e);
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int w = 0; w < 4; ++w) words[i][w] = 0;
    }
  }
  // Streamed: each byte is used once per call. Nothing waits for the words here.
  __device__ __forceinline__ void load(const Stored* data, int64_t key_stride, int64_t channel_stride, int panel_begin,
                                       int group, int member) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint4 four = __ldcs(
          reinterpret_cast<const uint4*>(data + offset_of(key_stride, channel_stride, panel_begin, group, member, i)));
      words[i][0] = four.x;
      words[i][1] = four.y;
      words[i][2] = four.z;
      words[i][3] = four.w;
    }
  }
  __device__ __forceinline__ void store(Stored* data, int64_t key_stride, int64_t channel_stride, int panel_begin,
                                        int group, int member) const {
    // Opaque, or the compiler keeps the addresses from before the tokens, and spills.
    asm volatile("" : "+r"(group), "+r"(member));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      uint32_t out[4];
      if constexpr (kPacked) {
#pragma unroll
        for (int w = 0; w < 4; ++w) out[w] = words[i][w];
      } else {
        pack(wide[i], out);
      }
      __stcs(reinterpret_cast<uint4*>(data + offset_of(key_stride, channel_stride, panel_begin, group, member, i)),
             make_uint4(out[0], out[1], out[2], out[3]));
    }
  }
};

}  // namespace gdn::cuda::simt
