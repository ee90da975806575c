// SPDX-License-Identifier: MIT
// chunk_simt and recurrent_simt: plan and launch of rule_kernel.cuh. Every NVIDIA GPU, every shape and dtype but F64.
#include <algorithm>
#include <climits>

#include "cuda/common/launch.h"
#include "cuda/common/make_params.h"
#include "cuda/cuda.h"
#include "cuda/simt/rule_kernel.cuh"

namespace gdn::cuda {
namespace {

using simt::Access;
using simt::LaunchParams;

constexpr int64_t kTileTokens = 16;

struct Variant {
  int32_t rows, cols;
  int32_t panel() const { return simt::kWarps * 4 * cols; }
};

// Rows per thread for K, and the columns that then fit the registers. A call too small for the GPU takes narrow panels,
// which changes no bits.
Variant choose_variant(const RuleProblem& p) {
  const int32_t rows = p.K <= 32 ? 4 : p.K <= 64 ? 8 : p.K <= 128 ? 16 : p.K <= 256 ? 32 : 64;
  int32_t cols = rows <= 16 ? 4 : rows == 32 ? 2 : 1;
  const int64_t wide = p.N * p.Hv * ((p.V + 63) / 64);
  if (rows == 16 && wide < 2 * int64_t{device_info(p.device_id).sms}) cols = 2;
  return {rows, cols};
}

// Four rows, or a thread's columns, in one access: the last dim contiguous, everything else a multiple of it.
Access state_access(const View& state, int32_t cols) {
  if (!state.present() || state.data == nullptr) return Access::kScalar;
  const int32_t k = state.ndim - 2, v = state.ndim - 1;
  const auto fits = [&](int32_t along, int64_t count) {
    bool good = (state.stride[along] == 1 || count == 1) && state.shape[along] % count == 0 &&
                reinterpret_cast<uintptr_t>(state.data) % static_cast<uintptr_t>(count * dtype_bytes(state.dtype)) == 0;
    for (int32_t i = 0; i < state.ndim; ++i) {
      good = good && (i == along || state.shape[i] <= 1 || state.stride[i] % count == 0);
    }
    return good;
  };
  if (fits(k, 4)) return Access::kAlongK;
  if (cols > 1 && fits(v, cols)) return Access::kAlongV;
  return Access::kScalar;
}

template <int kRows, int kCols>
cudaError_t launch_variant(const RuleParams& params, LaunchParams items, cudaStream_t stream) {
  const size_t smem_bytes = simt::Sizes<kRows, kCols>::smem_bytes(items.tile_tokens);
  const int64_t grid = std::min<int64_t>(items.items, INT_MAX);
  return launch(simt::rule_kernel<kRows, kCols>, dim3(static_cast<unsigned>(grid)), dim3(simt::kThreads), smem_bytes,
                stream, params, items);
}

cudaError_t launch_rule(const RuleProblem& p, const Plan& plan, cudaStream_t stream) {
  const Variant variant = choose_variant(p);
  LaunchParams launch;
  launch.panels = static_cast<int32_t>((p.V + variant.panel() - 1) / variant.panel());
  launch.items = plan.work_items;
  launch.tile_tokens = static_cast<int32_t>(plan.tile_tokens);
  launch.initial = state_access(p.initial_state, variant.cols);
  launch.final = state_access(p.final_state, variant.cols);
  launch.checkpoints = state_access(p.checkpoints, variant.cols);
  launch.snapshots = state_access(p.snapshots, variant.cols);
  const RuleParams params = make_params(p);
  switch (variant.rows) {
    case 4:
      return launch_variant<4, 4>(params, launch, stream);
    case 8:
      return launch_variant<8, 4>(params, launch, stream);
    case 16:
      return variant.cols == 4 ? launch_variant<16, 4>(params, launch, stream)
                               : launch_variant<16, 2>(params, launch, stream);
    case 32:
      return launch_variant<32, 2>(params, launch, stream);
    default:
      return launch_variant<64, 1>(params, launch, stream);
  }
}

}  // namespace

const char* refuse_simt(const RuleProblem& p) {
  constexpr int64_t kMaxHeads = int64_t{1} << 30;
  return p.Hv > kMaxHeads ? "takes at most 2^30 value heads" : nullptr;
}

void plan_simt(const RuleProblem& p, Plan* plan) {
  const Variant variant = choose_variant(p);
  plan->threads = 0;
  plan->panel_v = variant.panel();
  plan->work_items = p.N * p.Hv * ((p.V + variant.panel() - 1) / variant.panel());
  plan->block_tokens = 1;
  // 512 x 2 floats a token: 8 of them stay below the 48 KiB that every GPU gives without asking.
  plan->tile_tokens = std::clamp<int64_t>(p.T, 1, variant.rows > 32 ? kTileTokens / 2 : kTileTokens);
  plan->scratch_bytes = 0;
}

Status run_simt(const RuleProblem& p, const Plan& plan) {
  const char* function = p.op == GDN_OP_RECURRENT ? "recurrent" : "chunk_forward";
  return launch_on(p, function, [&](cudaStream_t stream) { return launch_rule(p, plan, stream); });
}

}  // namespace gdn::cuda
