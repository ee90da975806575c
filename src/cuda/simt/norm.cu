// SPDX-License-Identifier: MIT
// out = x * rsqrt(mean x^2 + eps) [rounded] * weight * act(z), or with gate_first the norm of x * act(z). Sums in fp32.
//
// norm_rows: x, z and out of one dtype with adjacent columns, D a multiple of 16 bytes of elements and at most 1024. A row
// is held in registers by `lanes` lanes (8, 16 or 32: whole warps serve short rows too), kVectors 16-byte vectors each, the
// weight beside it for all rows that the lanes come to. norm_wide: the same for a block per row, without a gate: rows of
// up to 8192 elements, and rows of any such length with a residual. norm_any: every other call, one block of a warp or
// more per row; the row is read twice, by the same threads, so out may be x.
#include "cuda/common/launch.h"
#include "cuda/cuda.h"
#include "cuda/simt/op_host.h"
#include "cuda/simt/op_math.cuh"
#include "cuda/simt/ops.h"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float activation(const NormParams& p, float z) { return p.sigmoid ? sigmoid(z) : silu(z); }
__device__ __forceinline__ float weight_at(const NormParams& p, int64_t column) {
  if (p.weight.data == nullptr) return 1.0f;
  return load_element(p.weight, column * p.weight.stride[0]) + (p.zero_centered ? 1.0f : 0.0f);
}

template <class T, int kVectors>
__global__ void __launch_bounds__(kThreads) norm_rows(const __grid_constant__ NormParams p, int lanes) {
  constexpr int kV = 16 / static_cast<int>(sizeof(T));
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int vectors = static_cast<int>(p.D) / kV;  // of a row
  float weight[kVectors][kV];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = i * lanes + lane;
#pragma unroll
    for (int v = 0; v < kV; ++v) weight[i][v] = vector < vectors ? weight_at(p, vector * kV + v) : 0.0f;
  }
  const bool has_gate = p.z.data != nullptr;
  const int64_t rows_per_block = kThreads / lanes;
  const int64_t first = int64_t{blockIdx.x} * rows_per_block + static_cast<int>(threadIdx.x) / lanes;
  // Lanes past the last row stay: the shuffles are of whole warps.
  for (int64_t base = int64_t{blockIdx.x} * rows_per_block, r = first; base < p.rows.count;
       base += int64_t{gridDim.x} * rows_per_block, r += int64_t{gridDim.x} * rows_per_block) {
    const bool valid = r < p.rows.count;
    const RowIndex row = row_index(p.rows, valid ? r : 0);
    const T* x = static_cast<const T*>(p.x.data) + row_offset(p.x, row);
    const T* z = static_cast<const T*>(p.z.data) + row_offset(p.z, row);
    Pack<T, kV> x_pack[kVectors], z_pack[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = i * lanes + lane;
      const bool mine = valid && vector < vectors;
      x_pack[i] = z_pack[i] = Pack<T, kV>{};
      if (mine) x_pack[i] = load_pack<T, kV>(x + vector * kV);
      if (mine && has_gate) z_pack[i] = load_pack<T, kV>(z + vector * kV);
    }
    float in[kVectors][kV], act[kVectors][kV], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      unpack(x_pack[i], in[i]);
      unpack(z_pack[i], act[i]);
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        act[i][v] = has_gate ? activation(p, act[i][v]) : 1.0f;
        if (p.gate_first) {
          in[i][v] *= act[i][v];
          act[i][v] = 1.0f;
        }
        sum = fmaf(in[i][v], in[i][v], sum);
      }
    }
    for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float scale = inverse_rms(sum, p.D, p.eps);
    T* out = static_cast<T*>(p.out.data) + row_offset(p.out, row);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = i * lanes + lane;
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        float n = in[i][v] * scale;
        if (p.round) n = round_to<T>(n);
        in[i][v] = n * weight[i][v] * act[i][v];
      }
      if (valid && vector < vectors) store_pack(pack_floats<T, kV>(in[i]), out + vector * kV);
    }
  }
}

// Sum over the block; every thread gets it. `partial` is not read after the next call's barrier: two of them in turn.
template <int kWarps>
__device__ __forceinline__ float block_sum(float sum, float* partial) {
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += partial[w];
  return total;
}

template <class T, int kVectors>
__global__ void __launch_bounds__(kThreads) norm_wide(const __grid_constant__ NormParams p) {
  constexpr int kV = 16 / static_cast<int>(sizeof(T));
  constexpr int kWarps = kThreads / 32;
  __shared__ float partial[2][kWarps];
  const int vectors = static_cast<int>(p.D) / kV;
  const bool adds = p.residual.data != nullptr;
  int turn = 0;
  for (int64_t r = blockIdx.x; r < p.rows.count; r += gridDim.x, turn ^= 1) {
    const RowIndex row = row_index(p.rows, r);
    const T* x = static_cast<const T*>(p.x.data) + row_offset(p.x, row);
    const T* residual = static_cast<const T*>(p.residual.data) + row_offset(p.residual, row);
    Pack<T, kV> pack[kVectors], other[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = i * kThreads + static_cast<int>(threadIdx.x);
      pack[i] = other[i] = Pack<T, kV>{};
      if (vector < vectors) pack[i] = load_pack<T, kV>(x + vector * kV);
      if (vector < vectors && adds) other[i] = load_pack<T, kV>(residual + vector * kV);
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float in[kV], add[kV];
      unpack(pack[i], in);
      if (adds) {
        const int vector = i * kThreads + static_cast<int>(threadIdx.x);
        unpack(other[i], add);
#pragma unroll
        for (int v = 0; v < kV; ++v) in[v] += add[v];
        pack[i] = pack_floats<T, kV>(in);
        unpack(pack[i], in);  // the norm is of the sum as it is stored
        if (vector < vectors) {
          store_pack(pack[i], static_cast<T*>(p.residual_out.data) + row_offset(p.residual_out, row) + vector * kV);
        }
      }
#pragma unroll
      for (int v = 0; v < kV; ++v) sum = fmaf(in[v], in[v], sum);
    }
    const float scale = inverse_rms(block_sum<kWarps>(sum, partial[turn]), p.D, p.eps);
    T* out = static_cast<T*>(p.out.data) + row_offset(p.out, row);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = i * kThreads + static_cast<int>(threadIdx.x);
      if (vector >= vectors) continue;
      float in[kV], weight[kV];
      unpack(pack[i], in);
      if (p.weight.data == nullptr) {
#pragma unroll
        for (int v = 0; v < kV; ++v) weight[v] = 1.0f;
      } else {
        load_floats<kV>(p.weight.data, p.weight.dtype, static_cast<int64_t>(vector) * kV, weight);
#pragma unroll
        for (int v = 0; v < kV; ++v) weight[v] += p.zero_centered ? 1.0f : 0.0f;
      }
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        float n = in[v] * scale;
        if (p.round) n = round_to<T>(n);
        in[v] = n * weight[v];
      }
      store_pack(pack_floats<T, kV>(in), out + vector * kV);
    }
  }
}

__global__ void norm_any(const __grid_constant__ NormParams p) {
  __shared__ float partial[32];
  const bool has_gate = p.z.data != nullptr;
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int64_t r = blockIdx.x; r < p.rows.count; r += gridDim.x) {
    const RowIndex row = row_index(p.rows, r);
    const int64_t x = row_offset(p.x, row), z = row_offset(p.z, row), out = row_offset(p.out, row);
    const int64_t added = row_offset(p.residual, row), sums = row_offset(p.residual_out, row);
    const bool adds = p.residual.data != nullptr;
    if (adds) {
      for (int64_t i = threadIdx.x; i < p.D; i += blockDim.x) {
        const float value =
            load_element(p.x, x + i * p.x.stride[3]) + load_element(p.residual, added + i * p.residual.stride[3]);
        store_element(p.residual_out, sums + i * p.residual_out.stride[3], value);
      }
    }
    const auto normed_input = [&](int64_t i, float act) {
      // A sum is read back by the thread that stored it.
      const float value = adds ? load_element(p.residual_out, sums + i * p.residual_out.stride[3])
                               : load_element(p.x, x + i * p.x.stride[3]);
      return p.gate_first ? value * act : value;
    };
    const auto gate = [&](int64_t i) {
      return has_gate ? activation(p, load_element(p.z, z + i * p.z.stride[3])) : 1.0f;
    };
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < p.D; i += blockDim.x) {
      const float value = normed_input(i, p.gate_first ? gate(i) : 1.0f);
      sum = fmaf(value, value, sum);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (warps > 1) {
      __syncthreads();  // the row before has read `partial`
      if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
      __syncthreads();
      sum = 0.0f;
      for (int w = 0; w < warps; ++w) sum += partial[w];
    }
    const float scale = inverse_rms(sum, p.D, p.eps);
    for (int64_t i = threadIdx.x; i < p.D; i += blockDim.x) {
      const float act = gate(i);
      float n = normed_input(i, act) * scale;
      if (p.round) n = round_dtype(n, p.x.dtype);
      store_element(p.out, out + i * p.out.stride[3], n * weight_at(p, i) * (p.gate_first ? 1.0f : act));
    }
  }
}

template <class T>
cudaError_t launch_rows(const NormParams& p, cudaStream_t stream) {
  const int64_t vectors = p.D * static_cast<int64_t>(sizeof(T)) / 16;
  int lanes = 8;
  while (lanes < vectors && lanes < 32) lanes *= 2;
  const int64_t per_lane = ceil_div(vectors, lanes);
  auto kernel = per_lane == 1 ? norm_rows<T, 1> : per_lane == 2 ? norm_rows<T, 2> : norm_rows<T, 4>;
  if constexpr (sizeof(T) == 4) {
    if (per_lane > 4) kernel = norm_rows<T, 8>;
  }
  const dim3 grid(grid_x(std::min(ceil_div(p.rows.count, kThreads / lanes), kFullGrid)));
  return launch(kernel, grid, dim3(kThreads), 0, stream, p, lanes);
}

template <class T>
cudaError_t launch_wide(const NormParams& p, cudaStream_t stream) {
  const int64_t per_thread = ceil_div(p.D * static_cast<int64_t>(sizeof(T)) / 16, kThreads);
  auto kernel = per_thread == 1 ? norm_wide<T, 1> : per_thread == 2 ? norm_wide<T, 2> : norm_wide<T, 4>;
  if constexpr (sizeof(T) == 4) {
    if (per_thread > 4) kernel = norm_wide<T, 8>;
  }
  return launch(kernel, dim3(grid_x(std::min(p.rows.count, kFullGrid))), dim3(kThreads), 0, stream, p);
}

// Whole rows of 16-byte vectors in registers.
bool takes_vectors(const NormParams& p, int64_t vector, int64_t longest) {
  bool vectors = p.D <= longest && p.D % vector == 0;
  for (const TensorRef* t : {&p.x, &p.z, &p.out, &p.residual, &p.residual_out}) {
    vectors = vectors && (t->data == nullptr ||
                          (t->dtype == p.x.dtype && t->stride[3] == 1 && aligned_to_16(*t, vector, {0, 1, 2})));
  }
  return vectors;
}

}  // namespace

cudaError_t launch_norm(NormParams p, const int64_t* rows, cudaStream_t stream) {
  constexpr int64_t kLongestRow = 1024, kLongestWideRow = 8192;
  p.rows = merge_rows(rows, {&p.x, &p.z, &p.out, &p.residual, &p.residual_out});
  if (p.rows.count == 0) return cudaSuccess;
  const int64_t vector = p.x.dtype == GDN_F32 ? 4 : 8;
  const bool wide_weight = p.weight.data == nullptr || (p.weight.stride[0] == 1 && aligned_to_16(p.weight, 1, {}));
  if (p.z.data == nullptr && wide_weight && (p.residual.data != nullptr || p.D > kLongestRow) &&
      takes_vectors(p, vector, kLongestWideRow)) {
    if (p.x.dtype == GDN_F32) return launch_wide<float>(p, stream);
    if (p.x.dtype == GDN_BF16) return launch_wide<__nv_bfloat16>(p, stream);
    return launch_wide<__half>(p, stream);
  }
  const bool vectors = p.residual.data == nullptr && takes_vectors(p, vector, kLongestRow);
  if (!vectors) {
    const int64_t threads = std::clamp<int64_t>(ceil_div(p.D, 256) * 32, 32, 512);
    return launch(norm_any, dim3(grid_x(std::min<int64_t>(p.rows.count, int64_t{1} << 20))),
                  dim3(static_cast<unsigned>(threads)), 0, stream, p);
  }
  if (p.x.dtype == GDN_F32) return launch_rows<float>(p, stream);
  if (p.x.dtype == GDN_BF16) return launch_rows<__nv_bfloat16>(p, stream);
  return launch_rows<__half>(p, stream);
}

Status run_norm(const NormProblem& problem) {
  if (problem.glu) return run_glu(problem);
  NormParams p;
  p.x = tensor_ref(problem.x);
  p.z = tensor_ref(problem.z);
  p.weight = tensor_ref(problem.weight);
  p.out = tensor_ref(problem.out);
  p.residual = tensor_ref(problem.residual);
  p.residual_out = tensor_ref(problem.residual_out);
  p.D = problem.D;
  p.eps = problem.eps;
  p.sigmoid = problem.activation == GDN_ACT_SIGMOID;
  p.gate_first = problem.gate_first;
  p.zero_centered = problem.zero_centered;
  p.round = problem.round_before_weight;
  return launch_on(problem, "rmsnorm_gated", [&](cudaStream_t stream) { return launch_norm(p, problem.rows, stream); });
}

}  // namespace gdn::cuda
