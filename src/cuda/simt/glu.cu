// SPDX-License-Identifier: MIT
// out = x * act(z), in fp32, rounded once.
//
// glu_packs: tensors of one dtype with adjacent, aligned columns; a thread takes kInFlight packs of 16 bytes, a grid
// apart, so that their loads are in flight together. glu_any: every other call, element by element.
#include "cuda/common/launch.h"
#include "cuda/cuda.h"
#include "cuda/simt/op_host.h"
#include "cuda/simt/op_math.cuh"
#include "cuda/simt/ops.h"

namespace gdn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 2;

__device__ __forceinline__ float activation(const GluParams& p, float z) { return p.sigmoid ? sigmoid(z) : silu(z); }

struct Place {
  RowIndex row;
  int64_t column;
};
__device__ __forceinline__ Place place(const GluParams& p, int64_t item) {
  int64_t row = 0;
  if (p.rows.count * p.columns <= INT32_MAX) {
    row = fast_divide(static_cast<uint32_t>(item), p.by_columns);
  } else {
    row = item / p.columns;
  }
  return {row_index(p.rows, row), item - row * p.columns};
}

template <class T>
__global__ void __launch_bounds__(kThreads) glu_packs(const __grid_constant__ GluParams p) {
  constexpr int kV = 16 / static_cast<int>(sizeof(T));
  const int64_t items = p.rows.count * p.columns, step = int64_t{gridDim.x} * kThreads;
  for (int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x; first < items; first += kInFlight * step) {
    Pack<T, kV> x[kInFlight], z[kInFlight];
    T* out[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int64_t item = first + i * step;
      if (item >= items) continue;
      const Place at = place(p, item);
      x[i] = load_pack<T, kV>(static_cast<const T*>(p.x.data) + row_offset(p.x, at.row) + at.column * kV);
      z[i] = load_pack<T, kV>(static_cast<const T*>(p.z.data) + row_offset(p.z, at.row) + at.column * kV);
      out[i] = static_cast<T*>(p.out.data) + row_offset(p.out, at.row) + at.column * kV;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * step >= items) continue;
      float in[kV], gate[kV];
      unpack(x[i], in);
      unpack(z[i], gate);
#pragma unroll
      for (int v = 0; v < kV; ++v) in[v] *= activation(p, gate[v]);
      store_pack(pack_floats<T, kV>(in), out[i]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) glu_any(const __grid_constant__ GluParams p) {
  const int64_t items = p.rows.count * p.columns, step = int64_t{gridDim.x} * kThreads;
  for (int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x; item < items; item += step) {
    const Place at = place(p, item);
    const float x = load_element(p.x, row_offset(p.x, at.row) + at.column * p.x.stride[3]);
    const float z = load_element(p.z, row_offset(p.z, at.row) + at.column * p.z.stride[3]);
    store_element(p.out, row_offset(p.out, at.row) + at.column * p.out.stride[3], x * activation(p, z));
  }
}

}  // namespace

cudaError_t launch_glu(GluParams p, int64_t D, const int64_t* rows, cudaStream_t stream) {
  p.rows = merge_rows(rows, {&p.x, &p.z, &p.out});
  if (p.rows.count == 0) return cudaSuccess;
  const int64_t vector = p.x.dtype == GDN_F32 ? 4 : 8;
  bool vectors = D % vector == 0;
  for (const TensorRef* t : {&p.x, &p.z, &p.out}) {
    vectors = vectors && t->dtype == p.x.dtype && t->stride[3] == 1 && aligned_to_16(*t, vector, {0, 1, 2});
  }
  p.columns = vectors ? D / vector : D;
  p.by_columns = fast_divisor(p.columns);
  const int64_t per_block = kThreads * (vectors ? kInFlight : 1);
  const dim3 grid(grid_x(std::min(ceil_div(p.rows.count * p.columns, per_block), kFullGrid * 4)));
  if (!vectors) return launch(glu_any, grid, dim3(kThreads), 0, stream, p);
  if (p.x.dtype == GDN_F32) return launch(glu_packs<float>, grid, dim3(kThreads), 0, stream, p);
  if (p.x.dtype == GDN_BF16) return launch(glu_packs<__nv_bfloat16>, grid, dim3(kThreads), 0, stream, p);
  return launch(glu_packs<__half>, grid, dim3(kThreads), 0, stream, p);
}

Status run_glu(const NormProblem& problem) {
  GluParams p;
  p.x = tensor_ref(problem.x);
  p.z = tensor_ref(problem.z);
  p.out = tensor_ref(problem.out);
  p.sigmoid = problem.activation == GDN_ACT_SIGMOID;
  return launch_on(problem, "glu", [&](cudaStream_t stream) { return launch_glu(p, problem.D, problem.rows, stream); });
}

}  // namespace gdn::cuda
