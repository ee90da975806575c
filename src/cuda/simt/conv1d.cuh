// SPDX-License-Identifier: MIT
// What the convolution's kernels share: which sequence and tokens a block has, its inputs before the first token, and the
// state's columns. An item is a piece of one sequence's tokens; a sequence's first piece also writes its new state, after
// it has read the old one (they may be one view) and before any output (y may be x; then a sequence is one piece).
#pragma once
#include "cuda/simt/op_math.cuh"

namespace gdn::cuda {

struct ConvJob {
  int64_t batch = 0;
  int64_t begin = 0;               // the sequence's first token in dim 2 of x and y
  int64_t len = 0;                 // its tokens
  int64_t t_begin = 0, t_end = 0;  // this piece, counted from begin
  int64_t read_slot = -1, write_slot = -1;
  int64_t accepted = 0;  // 0: no speculative window
  bool is_null = false;
  bool first = false;  // the piece that writes the state; false with t_begin == t_end: nothing to do
};

// The last sequence n with (cu_seqlens[n] >> shift) + n <= item. These keys rise by at least one per sequence and by at
// least its number of pieces, so every piece has an item of its own and a few items are spare. All lanes of a warp.
__device__ __forceinline__ int64_t find_sequence(const ConvParams& p, int64_t item) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  int64_t low = 0, high = p.N;
  while (high - low > 1) {
    const int64_t step = (high - low + 31) >> 5;
    const int64_t probe = low + lane * step;
    const bool below = probe < high && (load_index(p.cu_seqlens, probe) >> p.piece_shift) + probe <= item;
    const uint32_t votes = __ballot_sync(0xffffffffu, below);
    const int last = votes == 0 ? 0 : 31 - __clz(static_cast<int>(votes));
    low += last * step;
    high = low + step < high ? low + step : high;
  }
  return low;
}

__device__ __forceinline__ void flag_conv(const ConvParams& p, uint32_t bit) {
  if (p.error_flags != nullptr) atomicOr(p.error_flags, bit);
}

// Row of a state that sequence n uses, or -1; *null is set for a null or bad entry.
__device__ __forceinline__ int64_t conv_slot(const ConvParams& p, const IndexRef& indices, int64_t n, int64_t slots,
                                             uint32_t bit, bool* null) {
  if (indices.data == nullptr) return n;
  const int64_t slot = load_index(indices, n);
  const bool is_null = p.null_slots == GDN_NULL_NON_POSITIVE ? slot <= 0 : slot < 0;
  if (!is_null && slot < slots) return slot;
  if (!is_null) flag_conv(p, bit);
  *null = true;
  return -1;
}

// All lanes of a warp.
__device__ __forceinline__ ConvJob conv_job(const ConvParams& p, int64_t item) {
  ConvJob job;
  int64_t n, piece;
  if (p.cu_seqlens.data == nullptr) {
    n = fast_divide(static_cast<uint32_t>(item), p.dense_pieces);
    piece = item - n * p.dense_pieces.divisor;
    job.batch = n;
    job.len = p.T;
  } else {
    if (item < p.N) {  // every pair of bounds is looked at by one item, whatever the search finds in a bad list
      const int64_t from = load_index(p.cu_seqlens, item), to = load_index(p.cu_seqlens, item + 1);
      if (from < 0 || from > to || to > p.T || (item == 0 && from != 0)) flag_conv(p, kBadCuSeqlens);
    }
    n = find_sequence(p, item);
    const int64_t from = load_index(p.cu_seqlens, n), to = load_index(p.cu_seqlens, n + 1);
    if (from < 0 || from > to || to > p.T) return job;
    piece = item - ((from >> p.piece_shift) + n);
    job.begin = from;
    job.len = to - from;
  }
  // A whole sequence's piece may not be shifted to its end: that would overflow.
  job.t_begin = piece <= 0 ? 0 : piece << p.piece_shift;
  if (piece < 0 || (piece > 0 && job.t_begin >= job.len)) {
    job.t_begin = 0;
    return job;
  }
  const int64_t left = job.len - job.t_begin, tokens = int64_t{1} << p.piece_shift;
  job.t_end = job.t_begin + (left < tokens ? left : tokens);
  job.first = piece == 0;

  if (p.reads_state) {
    job.read_slot = conv_slot(p, p.initial_indices, n, p.initial_slots, kBadInitialIndex, &job.is_null);
  }
  if (p.writes_state) {
    job.write_slot = conv_slot(p, p.final_indices, n, p.final_slots, kBadFinalIndex, &job.is_null);
  }
  if (p.num_accepted.data != nullptr && !job.is_null) {
    const int64_t window = p.L - p.W + 2;
    job.accepted = load_index(p.num_accepted, n);
    if (job.accepted < 1 || job.accepted > window || job.len > window) {
      flag_conv(p, job.len > window ? kBadLength : kBadNumAccepted);
      job.is_null = true;
    }
  }
  if (job.is_null) {
    job.read_slot = job.write_slot = -1;
  } else if (p.has_initial.data != nullptr && load_index(p.has_initial, n) == 0) {
    job.read_slot = -1;
  }
  return job;
}

__device__ __forceinline__ int64_t x_offset(const ConvParams& p, const ConvJob& job, int64_t c, int64_t t) {
  return job.batch * p.x.stride[0] + c * p.x.stride[1] + (job.begin + t) * p.x.stride[2];
}
__device__ __forceinline__ int64_t y_offset(const ConvParams& p, const ConvJob& job, int64_t c, int64_t t) {
  return job.batch * p.y.stride[0] + c * p.y.stride[1] + (job.begin + t) * p.y.stride[2];
}
__device__ __forceinline__ float old_column(const ConvParams& p, const ConvJob& job, int64_t c, int64_t l) {
  if (job.read_slot < 0) return 0.0f;
  const TensorRef& s = p.initial_state;
  return load_element(s, job.read_slot * s.stride[0] + c * s.stride[1] + l * s.stride[2]);
}
// The input at token t, t >= -(W - 1): from before the sequence it comes out of the state.
__device__ __forceinline__ float input(const ConvParams& p, const ConvJob& job, int64_t c, int64_t t) {
  if (t >= 0) return load_element(p.x, x_offset(p, job, c, t));
  const int64_t first = job.accepted > 0 ? job.accepted - 1 : p.L - (p.W - 1);  // column of the oldest input
  return old_column(p, job, c, first + t + p.W - 1);
}

// The new state's columns [0, columns): `kept` of them move over from the old state, the others are inputs.
struct StateColumns {
  int64_t columns = 0, kept = 0, shift = 0, first_input = 0;
};
__device__ __forceinline__ StateColumns state_columns(const ConvParams& p, const ConvJob& job) {
  if (job.write_slot < 0) return {};
  if (job.accepted > 0 && job.len > 0) return {p.W - 2 + job.len, p.W - 2, job.accepted, 0};
  const int64_t kept = job.len < p.L ? p.L - job.len : 0;
  return {p.L, kept, job.len, job.len < p.L ? 0 : job.len - p.L};
}
__device__ __forceinline__ float new_column(const ConvParams& p, const ConvJob& job, const StateColumns& s, int64_t c,
                                            int64_t l) {
  if (l < s.kept) return old_column(p, job, c, l + s.shift);
  return load_element(p.x, x_offset(p, job, c, s.first_input + l - s.kept));
}
__device__ __forceinline__ void store_column(const ConvParams& p, const ConvJob& job, int64_t c, int64_t l,
                                             float value) {
  const TensorRef& s = p.final_state;
  store_element(s, job.write_slot * s.stride[0] + c * s.stride[1] + l * s.stride[2], value);
}
// One channel by one thread. Column l takes column l + shift, shift >= 0: in rising order nothing is read after it was
// overwritten when both states are one view; kBatch columns are read at once so that their latencies overlap.
__device__ __forceinline__ void write_state(const ConvParams& p, const ConvJob& job, int64_t c) {
  constexpr int kBatch = 4;
  const StateColumns s = state_columns(p, job);
  for (int64_t l = 0; l < s.columns; l += kBatch) {
    float value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) value[i] = l + i < s.columns ? new_column(p, job, s, c, l + i) : 0.0f;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (l + i < s.columns) store_column(p, job, c, l + i, value[i]);
    }
  }
}
// One channel by a warp, under the same rule.
__device__ __forceinline__ void write_state_by_warp(const ConvParams& p, const ConvJob& job, int64_t c, int lane) {
  const StateColumns s = state_columns(p, job);
  for (int64_t l = 0; l < s.columns; l += 32) {
    const bool mine = l + lane < s.columns;
    const float value = mine ? new_column(p, job, s, c, l + lane) : 0.0f;
    __syncwarp();
    if (mine) store_column(p, job, c, l + lane, value);
  }
}

}  // namespace gdn::cuda
