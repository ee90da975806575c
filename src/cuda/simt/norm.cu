// SPDX-License-Identifier: MIT
// out = x * rsqrt(mean x^2 + eps) [rounded] * weight * act(z), or with gate_first the norm of x * act(z). Sums in fp32.
//
// norm_rows: x, z and out of one dtype with adjacent columns, D a multiple of 16 bytes of elements and at most 1024. A row
// is held in registers by `lanes` lanes (8, 16 or 32: whole warps serve short rows too), kVectors 16-byte vectors each, the
// weight beside it for all rows that the lanes come to. norm_any: every other call, one block of a warp or more per row;
// the row is read twice, by the same threads, so out may be x.
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

__global__ void norm_any(const __grid_constant__ NormParams p) {
  __shared__ float partial[32];
  const bool has_gate = p.z.data != nullptr;
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int64_t r = blockIdx.x; r < p.rows.count; r += gridDim.x) {
    const RowIndex row = row_index(p.rows, r);
    const int64_t x = row_offset(p.x, row), z = row_offset(p.z, row), out = row_offset(p.out, row);
    const auto normed_input = [&](int64_t i, float act) {
      const float value = load_element(p.x, x + i * p.x.stride[3]);
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

}  // namespace

cudaError_t launch_norm(NormParams p, const int64_t* rows, cudaStream_t stream) {
  constexpr int64_t kLongestRow = 1024;
  p.rows = merge_rows(rows, {&p.x, &p.z, &p.out});
  if (p.rows.count == 0) return cudaSuccess;
  const int64_t vector = p.x.dtype == GDN_F32 ? 4 : 8;
  bool vectors = p.D <= kLongestRow && p.D % vector == 0;
  for (const TensorRef* t : {&p.x, &p.z, &p.out}) {
    vectors = vectors && (t->data == nullptr ||
                          (t->dtype == p.x.dtype && t->stride[3] == 1 && aligned_to_16(*t, vector, {0, 1, 2})));
  }
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
  NormParams p;
  p.x = tensor_ref(problem.x);
  p.z = tensor_ref(problem.z);
  p.weight = tensor_ref(problem.weight);
  p.out = tensor_ref(problem.out);
  p.D = problem.D;
  p.eps = problem.eps;
  p.sigmoid = problem.activation == GDN_ACT_SIGMOID;
  p.gate_first = problem.gate_first;
  p.zero_centered = problem.zero_centered;
  p.round = problem.round_before_weight;
  return launch_on(problem, "rmsnorm_gated", [&](cudaStream_t stream) { return launch_norm(p, problem.rows, stream); });
}

}  // namespace gdn::cuda
