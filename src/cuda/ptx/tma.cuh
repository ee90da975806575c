// SPDX-License-Identifier: MIT
// The bulk tensor copy engine: tiles of a rank-4 tensor [batch, token, head, channel] (innermost last).
#pragma once
#include <cuda.h>

#include <cstdint>

namespace gdn::cuda::ptx {

__device__ __forceinline__ void tma_prefetch_descriptor(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t smem, const CUtensorMap* map, uint32_t barrier, int32_t channel,
                                         int32_t head, int32_t token, int32_t batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(channel), "r"(head), "r"(token), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t smem, int32_t channel, int32_t head,
                                          int32_t token, int32_t batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(smem), "r"(channel), "r"(head), "r"(token), "r"(batch)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Plain bytes, multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t smem, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* target, uint32_t smem, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(smem), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Plain bytes into the L2 cache, without waiting.
__device__ __forceinline__ void bulk_prefetch(const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes));
}
// The shared memory of this thread's stores may be written again.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace gdn::cuda::ptx
