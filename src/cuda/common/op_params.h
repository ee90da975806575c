// SPDX-License-Identifier: MIT
// Convolution, gate, norm and rotary embedding as kernels get them: plain data, passed by value as a kernel parameter.
// simt/op_host.h fills the common parts from the validated problems.
#pragma once
#include <cstdint>

#include "cuda/common/rule_params.h"

namespace gdn::cuda {

// n / divisor for 0 <= n < 2^31 by one multiplication.
struct FastDivisor {
  uint32_t divisor = 1, multiplier = 0, shift = 0;
};

// The leading dimensions of a call, merged on the host as far as every tensor's strides allow: most calls have one left.
// Row r is (i0, i1, i2) with i2 the fastest.
struct RowMap {
  int64_t count = 0;
  int64_t size1 = 1, size2 = 1;
  int32_t dims = 1;  // dimensions in use, the last ones
  FastDivisor by1, by2;
};

struct ConvParams {
  TensorRef x, weight, bias, y;                                        // [B, D, T], [D, W], [D], [B, D, T]
  TensorRef initial_state, final_state;                                // [slot, D, L]
  IndexRef cu_seqlens;                                                 // [N + 1]; absent: N = B sequences of T tokens
  IndexRef initial_indices, final_indices, has_initial, num_accepted;  // [N]
  int64_t D = 0, T = 0, N = 0, L = 0;
  int64_t initial_slots = 0, final_slots = 0;
  int64_t items = 0;         // (sequence, piece of its tokens); below 2^31
  FastDivisor dense_pieces;  // pieces per sequence without cu_seqlens
  int32_t piece_shift = 0;   // log2 of the tokens of a piece; kWholeSequence: one piece
  int32_t W = 0;
  int8_t silu = 0, null_slots = 0;
  int8_t weight_is_packed = 0;               // [D, W] contiguous, aligned to 16 bytes
  int8_t reads_state = 0, writes_state = 0;  // present (a pool of no slots has no data)
  uint32_t* error_flags = nullptr;
};
inline constexpr int32_t kWholeSequence = 62;

struct GateParams {
  TensorRef a, b, A_log, dt_bias, g, beta;  // a, b, g, beta: strides of (i0, i1, i2, h)
  RowMap rows;
  int64_t H = 0;
  int8_t linear = 0, twice = 0;
};

struct NormParams {
  TensorRef x, z, weight, out;       // x, z, out: strides of (i0, i1, i2, column)
  TensorRef residual, residual_out;  // as x
  RowMap rows;
  int64_t D = 0;
  float eps = 0;
  int8_t sigmoid = 0, gate_first = 0, zero_centered = 0, round = 0;
};

// out = x * act(z). Item i of the call is item i % columns of row i / columns.
struct GluParams {
  TensorRef x, z, out;  // strides of (i0, i1, i2, column)
  RowMap rows;
  int64_t columns = 0;  // items of a row: 16-byte packs of adjacent elements, or elements
  FastDivisor by_columns;
  int8_t sigmoid = 0;
};

// Angles per position, in quarter turns, made on the host for rotary sizes up to 2 * kHostAngles.
inline constexpr int32_t kHostAngles = 128;
struct RopeParams {
  TensorRef q, k, q_weight, k_weight, cos, sin, q_out, k_out, gate_out;
  const void* positions = nullptr;  // [axes, B, T]
  int64_t position_stride[3] = {};
  int32_t position_dtype = 0, axes = 0;
  int64_t tokens = 0, T = 0, Hq = 0, Hkv = 0, D = 0, R = 0;
  float eps = 0;
  int8_t zero_centered = 0;
  int32_t mrope_section[3] = {};
  double theta = 0;
  double quarter_turns[kHostAngles] = {};
};

}  // namespace gdn::cuda
