// SPDX-License-Identifier: MIT
// wgmma (sm_90a): D[64 x N] (+)= A[64 x 16] B[16 x N], fp32 accumulators. "rs": A in registers, "ss": A in shared memory.
// Element is __nv_bfloat16 or __half, for A and B alike. (PTX ISA 8.x, "Asynchronous Warpgroup Level Matrix Instructions")
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace gdn::cuda::ptx {

// Matrix descriptor of a tile with the 128-byte swizzle. leading: bytes between 64-element blocks of the contiguous
// dimension (transposed operands only); stride: bytes between groups of 8 rows.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | (static_cast<uint64_t>(leading >> 4) << 16) |
         (static_cast<uint64_t>(stride >> 4) << 32) | (1ull << 62);
}

// The same tile further on. Never carries into the upper half: tiles lie in shared memory.
__device__ __forceinline__ uint64_t descriptor_advance(uint64_t descriptor, int bytes) {
  const uint32_t low = static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes >> 4);
  return (descriptor & 0xffffffff00000000ull) | low;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accumulators across the instructions above.
template <int kCount>
__device__ __forceinline__ void wgmma_touch(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
#define GDN_ACC8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define GDN_ACC32(d) GDN_ACC8(d, 0), GDN_ACC8(d, 8), GDN_ACC8(d, 16), GDN_ACC8(d, 24)
#define GDN_ACC64(d) GDN_ACC32(d), GDN_ACC8(d, 32), GDN_ACC8(d, 40), GDN_ACC8(d, 48), GDN_ACC8(d, 56)

#define GDN_LIST32 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define GDN_LIST64 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
// clang-format on

template <class Element>
__device__ __forceinline__ void wgmma_m64n128_rs(float (&d)[64], const uint32_t* a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " GDN_LIST64
        ", {%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
        : GDN_ACC64(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " GDN_LIST64
        ", {%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
        : GDN_ACC64(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
  }
}

template <class Element>
__device__ __forceinline__ void wgmma_m64n128_rs_trans(float (&d)[64], const uint32_t* a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " GDN_LIST64
        ", {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
        : GDN_ACC64(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " GDN_LIST64
        ", {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
        : GDN_ACC64(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
  }
}

template <class Element>
__device__ __forceinline__ void wgmma_m64n64_rs(float (&d)[32], const uint32_t* a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " GDN_LIST32
        ", {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
        : GDN_ACC32(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
  } else {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " GDN_LIST32
                 ", {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                 : GDN_ACC32(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
  }
}

template <class Element>
__device__ __forceinline__ void wgmma_m64n64_rs_trans(float (&d)[32], const uint32_t* a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " GDN_LIST32
        ", {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
        : GDN_ACC32(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
  } else {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " GDN_LIST32
                 ", {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
                 : GDN_ACC32(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
  }
}

template <class Element>
__device__ __forceinline__ void wgmma_m64n64_ss(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " GDN_LIST32
        ", %32, %33, p, 1, 1, 0, 0; }"
        : GDN_ACC32(d)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  } else {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " GDN_LIST32
                 ", %32, %33, p, 1, 1, 0, 0; }"
                 : GDN_ACC32(d)
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
}

#undef GDN_LIST64
#undef GDN_LIST32
#undef GDN_ACC64
#undef GDN_ACC32
#undef GDN_ACC8

}  // namespace gdn::cuda::ptx
