// SPDX-License-Identifier: MIT
// A chunk's tiles in shared memory: how they come there, and how matrix operands are read from them.
#pragma once
#include "cuda/common/slots.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/sm80/chunk_forward/config.h"

namespace gdn::cuda::sm80 {

// A 16-byte piece of a row: swizzled, so that eight rows' same pieces lie in different banks.
__device__ __forceinline__ int piece_at(int row, int piece, int pitch) {
  return row * pitch + ((piece & ~7) << 4) + (((piece ^ row) & 7) << 4);
}
__device__ __forceinline__ int element_at(int row, int column, int pitch) {
  return piece_at(row, column >> 3, pitch) + 2 * (column & 7);
}

template <class F>
__device__ __forceinline__ F& at(char* base, int offset) {
  return *reinterpret_cast<F*>(base + offset);
}

template <class E, int kKeys>
struct Tiles {
  using S = Shared<kKeys>;
  static constexpr int kPitch = S::kPitch, kKeyTiles = kKeys / 8, kRow = 2 * kChunk;
  const RuleParams& p;
  const LaunchParams& l;
  S& s;
  int lane, warp;

  __device__ __forceinline__ void load_tile(char* to, const TensorRef& x, bool fast, int32_t h, int token, int tokens,
                                            int columns, int first, int width, int pitch) const {
    const int pieces = columns / 8;
    const int64_t base = s.seq.batch * x.stride[0] + h * x.stride[2] + token * x.stride[1];
    const E* data = static_cast<const E*>(x.data);
    for (int i = threadIdx.x; i < kChunk * pieces; i += kThreads) {
      const int row = i / pieces, piece = i % pieces;
      char* target = to + piece_at(row, piece, pitch);
      const bool inside = row < tokens && first + 8 * piece < width;
      const int64_t index = base + row * x.stride[1] + (first + 8 * piece) * x.stride[3];
      if (fast) {
        ptx::copy_16(target, inside ? data + index : data, inside);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          reinterpret_cast<E*>(target)[e] =
              inside && first + 8 * piece + e < width ? data[index + e * x.stride[3]] : E(0.f);
        }
      }
    }
  }

  // B operands of rows 16 j .. + 15 (n) and columns 16 kk .. + 15 (k) of a row-major tile: b[0], b[1] for the first eight n.
  // Written so that a row's swizzle is the lane's alone: what j and kk add are constants.
  __device__ __forceinline__ void load_b(uint32_t (&b)[4], char* tile, int j, int kk, int pitch) const {
    ptx::ldmatrix_x4(b, ptx::smem_address(tile + (8 * (lane >> 4) + (lane & 7)) * pitch + j * 16 * pitch +
                                          128 * (kk >> 2) + (((2 * (kk & 3) + ((lane >> 3) & 1)) ^ (lane & 7)) << 4)));
  }
  // The same of a tile whose rows are k and whose columns are n.
  __device__ __forceinline__ void load_b_trans(uint32_t (&b)[4], char* tile, int j, int kk, int pitch) const {
    ptx::ldmatrix_x4_trans(b, ptx::smem_address(tile + (lane & 15) * pitch + kk * 16 * pitch + 128 * (j >> 2) +
                                                (((2 * (j & 3) + (lane >> 4)) ^ (lane & 7)) << 4)));
  }
};

}  // namespace gdn::cuda::sm80
