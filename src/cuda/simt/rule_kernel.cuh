// SPDX-License-Identifier: MIT
// The delta rule token by token, on any GPU: chunk_simt and recurrent_simt.
//
// Grid: one block per (sequence, value head, panel of 16 * kCols columns of V); blocks beyond the grid are strided over.
// Block: 4 warps, each with 4 * kCols columns and all K rows in registers (rule_state.cuh). Columns of S never meet, so
// panels and warps need nothing from each other but the tokens' q, k, v, which the block stages in shared memory as
// fp32, tile_tokens at a time:
//   stage:    k and q rows (L2-normed), v panel, exp(g), beta        one barrier before, one after
//   per token, per thread:
//     S  *= exp(g)
//     u   = beta * (v - sum over rows of S k)                        3 shuffles per column (8 row lanes)
//     S  += k u
//     o   = scale * sum over rows of S q                             3 shuffles per column
// Work per token and value head: 8 K V FLOPs. Memory: q, k, v, o once per panel; the state once in and once out, the most
// of it at T = 1. A column's bits depend on neither the panel, the tile nor the other sequences.
#pragma once
#include "cuda/common/rule_math.cuh"
#include "cuda/common/slots.cuh"
#include "cuda/simt/rule_state.cuh"

namespace gdn::cuda::simt {

struct LaunchParams {
  int64_t items = 0;   // blocks wanted
  int32_t panels = 1;  // of V
  int32_t tile_tokens = 1;
  Access initial = Access::kScalar, final = Access::kScalar, checkpoints = Access::kScalar, snapshots = Access::kScalar;
};

inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;

template <int kRows, int kCols>
struct Sizes {
  static constexpr int kPaddedK = 8 * kRows;
  static constexpr int kPanel = kWarps * 4 * kCols;
  static constexpr size_t smem_bytes(int tile_tokens) {
    return sizeof(float) * static_cast<size_t>(tile_tokens) * (2 * kPaddedK + kPanel + 2);
  }
};

// One q or k row into shared memory by one warp, padded with zeros.
template <int kPaddedK>
__device__ __forceinline__ void stage_row(const RuleParams& p, const TensorRef& x, int64_t base, int lane, float* out) {
  constexpr int kPerLane = kPaddedK / 32;
  float row[kPerLane];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int c = 32 * i + lane;
    row[i] = c < p.K ? load_float(x.data, x.dtype, base + c * x.stride[3]) : 0.0f;
    sum += row[i] * row[i];
  }
  if (p.qk_l2norm != 0) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const float factor = 1.0f / sqrtf(sum + p.l2norm_eps);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      row[i] *= factor;
      if (p.round_qk != 0) row[i] = round_to_dtype(row[i], x.dtype);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) out[32 * i + lane] = row[i];
}

// Sum over the eight row lanes; every lane gets it, in an order of its own that is the same on every run.
__device__ __forceinline__ float sum_row_lanes(float x) {
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

template <int kRows, int kCols>
struct Block {
  using Tile = StateTile<kRows, kCols>;
  static constexpr int kPaddedK = Sizes<kRows, kCols>::kPaddedK;
  static constexpr int kPanel = Sizes<kRows, kCols>::kPanel;

  const RuleParams& p;
  const LaunchParams& launch;
  float* sK;         // [tile_tokens][kPaddedK]
  float* sQ;         // [tile_tokens][kPaddedK]
  float* sV;         // [tile_tokens][kPanel]
  float* sDecay;     // [tile_tokens]
  float* sBeta;      // [tile_tokens]
  const int64_t& n;  // this, seq and checkpoint_entry in shared memory: registers are short
  int32_t head;
  int32_t panel_begin;
  const SequenceInfo& seq;
  const int64_t& checkpoint_entry;

  __device__ __forceinline__ int64_t state_base(const TensorRef& t, int64_t slot) const {
    return slot * t.stride[0] + head * t.stride[1];
  }

  __device__ __forceinline__ void zero_output() const {
    const int64_t base = seq.batch * p.o.stride[0] + head * p.o.stride[2];
    for (int64_t t = threadIdx.x / 32; t < seq.len; t += kWarps) {
      for (int j = threadIdx.x % 32; j < kPanel && panel_begin + j < p.V; j += 32) {
        store_float(p.o.data, p.o.dtype, base + (seq.begin + t) * p.o.stride[1] + (panel_begin + j) * p.o.stride[3],
                    0.0f);
      }
    }
  }

  __device__ __forceinline__ void stage(int64_t first, int count) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int32_t key_head = key_head_of(p, head);
    const int64_t q_base = seq.batch * p.q.stride[0] + key_head * p.q.stride[2];
    const int64_t k_base = seq.batch * p.k.stride[0] + key_head * p.k.stride[2];
    const int64_t v_base = seq.batch * p.v.stride[0] + head * p.v.stride[2];
    for (int t = warp; t < count; t += kWarps) {
      const int64_t token = seq.begin + first + t;
      stage_row<kPaddedK>(p, p.k, k_base + token * p.k.stride[1], lane, sK + t * kPaddedK);
      stage_row<kPaddedK>(p, p.q, q_base + token * p.q.stride[1], lane, sQ + t * kPaddedK);
#pragma unroll
      for (int j = lane; j < kPanel; j += 32) {
        const int column = panel_begin + j;
        sV[t * kPanel + j] =
            column < p.V ? load_float(p.v.data, p.v.dtype, v_base + token * p.v.stride[1] + column * p.v.stride[3])
                         : 0.0f;
      }
    }
    if (static_cast<int>(threadIdx.x) < count) {
      const int64_t token = seq.begin + first + threadIdx.x;
      sDecay[threadIdx.x] = token_decay(p, seq.batch, token, head);
      sBeta[threadIdx.x] = token_beta(p, seq.batch, token, head);
    }
  }

  // What is kept of the state after token t, beside the final state.
  __device__ __forceinline__ void keep(const Tile& tile, int64_t t, int row_lane, int column) const {
    if (p.token_indices.data != nullptr && p.final_state.data != nullptr) {
      const int64_t slot = verify_slot(p, n, t);
      if (slot >= 0) {
        tile.store(p.final_state, launch.final, state_base(p.final_state, slot), p.K, p.V, row_lane, column);
      }
    }
    if (p.snapshots.data != nullptr) {
      if (t >= p.snapshot_columns) {
        flag_error(p, kBadLength);
      } else {
        TensorRef rows = p.snapshots;  // [N, S, Hv, K, V] -> [Hv, K, V] of one token
        rows.stride[2] = p.snapshots.stride[3];
        rows.stride[3] = p.snapshots.stride[4];
        const int64_t base = n * p.snapshots.stride[0] + t * p.snapshots.stride[1] + head * p.snapshots.stride[2];
        tile.store(rows, launch.snapshots, base, p.K, p.V, row_lane, column);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row_lane = lane % 8;
    const int panel_column = warp * Tile::kWarpCols + lane / 8 * kCols;
    const int column = panel_begin + panel_column;
    if (seq.is_null) {
      zero_output();
      return;
    }
    Tile tile;
    if (seq.read_slot >= 0) {
      tile.load(p.initial_state, launch.initial, state_base(p.initial_state, seq.read_slot), p.K, p.V, row_lane,
                column);
    } else {
      tile.clear();
    }
    const bool keeps =
        (p.token_indices.data != nullptr && p.final_state.data != nullptr) || p.snapshots.data != nullptr;
    const int64_t o_base = seq.batch * p.o.stride[0] + head * p.o.stride[2];
    int64_t next_checkpoint = p.checkpoints.data != nullptr ? p.checkpoint_every : -1;
    for (int64_t first = 0; first < seq.len; first += launch.tile_tokens) {
      const int64_t left = seq.len - first;
      const int count = left < launch.tile_tokens ? static_cast<int>(left) : launch.tile_tokens;
      __syncthreads();  // everybody is done with the tile before
      stage(first, count);
      __syncthreads();
      for (int t = 0; t < count; ++t) {
        const float out = step(&tile, t, row_lane, panel_column);
        if (row_lane < kCols && column + row_lane < p.V) {
          const int64_t token = seq.begin + first + t;
          store_float(p.o.data, p.o.dtype, o_base + token * p.o.stride[1] + (column + row_lane) * p.o.stride[3], out);
        }
        if (keeps) keep(tile, first + t, row_lane, column);
        if (first + t + 1 == next_checkpoint) {
          const int64_t slot = checkpoint_slot(p, checkpoint_entry + next_checkpoint / p.checkpoint_every - 1);
          next_checkpoint += p.checkpoint_every;
          if (slot >= 0) {
            tile.store(p.checkpoints, launch.checkpoints, state_base(p.checkpoints, slot), p.K, p.V, row_lane, column);
          }
        }
      }
    }
    if (seq.write_slot >= 0) {
      tile.store(p.final_state, launch.final, state_base(p.final_state, seq.write_slot), p.K, p.V, row_lane, column);
    }
  }

  // One token of the recurrence; returns o of column row_lane (of this thread's kCols).
  __device__ __forceinline__ float step(Tile* tile, int t, int row_lane, int panel_column) const {
    const float decay = sDecay[t], beta = sBeta[t];
    float value[kRows];
    load_rows(sK + t * kPaddedK, row_lane, value);
    float u[kCols];
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      float read = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        tile->s[i][j] *= decay;
        read += tile->s[i][j] * value[i];
      }
      u[j] = beta * (sV[t * kPanel + panel_column + j] - sum_row_lanes(read));
    }
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) tile->s[i][j] += value[i] * u[j];
    }
    load_rows(sQ + t * kPaddedK, row_lane, value);
    float out = 0;
#pragma unroll
    for (int j = 0; j < kCols; ++j) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) sum += tile->s[i][j] * value[i];
      sum = sum_row_lanes(sum);
      if (row_lane == j) out = sum;
    }
    return p.scale * out;
  }

  static __device__ __forceinline__ void load_rows(const float* row, int row_lane, float (&out)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(row + Tile::row(row_lane, i));
      out[i] = four.x;
      out[i + 1] = four.y;
      out[i + 2] = four.z;
      out[i + 3] = four.w;
    }
  }
};

template <int kRows, int kCols>
__global__ void __launch_bounds__(kThreads, 1)
    rule_kernel(const __grid_constant__ RuleParams p, const __grid_constant__ LaunchParams launch) {
  extern __shared__ float4 smem[];
  constexpr int kPaddedK = Sizes<kRows, kCols>::kPaddedK;
  constexpr int kPanel = Sizes<kRows, kCols>::kPanel;
  float* sK = reinterpret_cast<float*>(smem);
  float* sQ = sK + launch.tile_tokens * kPaddedK;
  float* sV = sQ + launch.tile_tokens * kPaddedK;
  float* sDecay = sV + launch.tile_tokens * kPanel;
  float* sBeta = sDecay + launch.tile_tokens;
  for (int64_t item = blockIdx.x; item < launch.items; item += gridDim.x) {
    const int64_t pair = item / launch.panels;
    const int32_t panel = static_cast<int32_t>(item - pair * launch.panels);
    const int64_t n = pair / p.Hv;
    const int32_t head = static_cast<int32_t>(pair - n * p.Hv);
    __shared__ SequenceInfo shared_seq;
    __shared__ int64_t shared_entry, shared_n;
    __syncthreads();         // the item before is done with it
    if (threadIdx.x < 32) {  // checkpoint_begin wants a whole warp
      const int64_t entry = p.checkpoints.data != nullptr ? checkpoint_begin(p, n) : 0;
      if (threadIdx.x == 0) {
        SequenceInfo seq = sequence_info(p, n);
        if (p.token_indices.data != nullptr) verify_start(p, n, &seq);
        shared_seq = seq;
        shared_n = n;
        shared_entry = entry;
      }
    }
    __syncthreads();
    Block<kRows, kCols> block{p,    launch,         sK,         sQ,          sV, sDecay, sBeta, shared_n,
                              head, panel * kPanel, shared_seq, shared_entry};
    block.run();
  }
}

}  // namespace gdn::cuda::simt
