// SPDX-License-Identifier: MIT
// The eight tile registers. Real back end: AMX instructions by inline assembly (the compiler's intrinsics have no
// memory operand, so it may move plain stores across tile loads; the "memory" clobbers here forbid that).
// GDN_AMX_EMULATE: the same semantics in software, for tests anywhere. Every tile is 16 rows of 64 bytes, contiguous: 1
// KiB.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/amx/vec16.h"

namespace gdn::cpu::amx {

inline constexpr int64_t kTileBytes = 1024;

#if defined(GDN_AMX_EMULATE)

inline thread_local VecU g_tiles[8][16];

GDN_AMX_INLINE void tile_config() {
  for (auto& tile : g_tiles) {
    for (auto& row : tile) row = VecU{};
  }
}
GDN_AMX_INLINE void tile_release() {}
template <int kReg>
GDN_AMX_INLINE void tile_zero() {
  for (auto& row : g_tiles[kReg]) row = VecU{};
}
template <int kReg>
GDN_AMX_INLINE void tile_load(const void* p) {
  std::memcpy(g_tiles[kReg], p, kTileBytes);
}
template <int kReg>
GDN_AMX_INLINE void tile_store(void* p) {
  std::memcpy(p, g_tiles[kReg], kTileBytes);
}
// Subnormal inputs and results are zero, as in TDPBF16PS.
GDN_AMX_INLINE VecF flush(VecF x) {
  const VecU u = bits(x);
  return from_bits((u & 0x7fffffffu) < 0x00800000u ? u & 0x80000000u : u);
}
// TDPBF16PS: even and odd products are accumulated apart over the whole row, added, then added to the destination.
template <int kDst, int kA, int kB>
inline void tile_dp() {
  VecF b_even[16], b_odd[16];
  for (int k = 0; k < 16; ++k) {
    b_even[k] = flush(from_bits(g_tiles[kB][k] << 16));
    b_odd[k] = flush(from_bits(g_tiles[kB][k] & 0xffff0000u));
  }
  for (int m = 0; m < 16; ++m) {
    const VecF a_even = flush(from_bits(g_tiles[kA][m] << 16)), a_odd = flush(from_bits(g_tiles[kA][m] & 0xffff0000u));
    VecF even{}, odd{};
    for (int k = 0; k < 16; ++k) {
      even = flush(b_even[k] * a_even[k] + even);
      odd = flush(b_odd[k] * a_odd[k] + odd);
    }
    g_tiles[kDst][m] = bits(flush(flush(from_bits(g_tiles[kDst][m])) + flush(even + odd)));
  }
}

#else

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t colsb[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

GDN_AMX_INLINE void tile_config() {
  const TileConfig config;
  __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
GDN_AMX_INLINE void tile_release() { __asm__ volatile("tilerelease" ::: "memory"); }
template <int kReg>
GDN_AMX_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(kReg));
}
template <int kReg>
GDN_AMX_INLINE void tile_load(const void* p) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(int64_t{64}), "i"(kReg) : "memory");
}
template <int kReg>
GDN_AMX_INLINE void tile_store(void* p) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(int64_t{64}), "i"(kReg) : "memory");
}
template <int kDst, int kA, int kB>
GDN_AMX_INLINE void tile_dp() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kDst), "i"(kA), "i"(kB));
}

#endif

// 2 x 2 blocks of accumulators in tiles 0..3: rows a (tiles 4, 5), columns b (tiles 6, 7).
GDN_AMX_INLINE void block_zero() {
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
}
GDN_AMX_INLINE void block_load_a(const void* a0, const void* a1) {
  tile_load<4>(a0);
  tile_load<5>(a1);
}
GDN_AMX_INLINE void block_dp(const void* b0, const void* b1) {
  tile_load<6>(b0);
  tile_load<7>(b1);
  tile_dp<0, 4, 6>();
  tile_dp<1, 4, 7>();
  tile_dp<2, 5, 6>();
  tile_dp<3, 5, 7>();
}
GDN_AMX_INLINE void block_load(const void* c00, const void* c01, const void* c10, const void* c11) {
  tile_load<0>(c00);
  tile_load<1>(c01);
  tile_load<2>(c10);
  tile_load<3>(c11);
}
GDN_AMX_INLINE void block_store(void* c00, void* c01, void* c10, void* c11) {
  tile_store<0>(c00);
  tile_store<1>(c01);
  tile_store<2>(c10);
  tile_store<3>(c11);
}

}  // namespace gdn::cpu::amx
