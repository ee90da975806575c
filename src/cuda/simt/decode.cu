// SPDX-License-Identifier: MIT
// recurrent_decode: what decode_kernel.cuh takes, and its launch.
#include <climits>

#include "cuda/common/launch.h"
#include "cuda/common/make_params.h"
#include "cuda/cuda.h"
#include "cuda/simt/decode_kernel.cuh"

namespace gdn::cuda {
namespace {

constexpr int64_t kManyTokens = 16;  // per sequence: beyond, rows of q, k and v want to be staged (recurrent_simt)

int64_t panel_of(int32_t state_dtype) { return state_dtype == GDN_F32 ? 32 : 64; }

// [slot, Hv, K, V] strides whatever the layout is: which dim is contiguous, or -1 where 16-byte vectors do not fit.
int contiguous_dim(const View& state) {
  const int32_t last = state.ndim - 1;
  const int64_t per_vector = 16 / dtype_bytes(state.dtype);
  if (reinterpret_cast<uintptr_t>(state.data) % 16 != 0) return -1;
  const int32_t along = state.stride[last] == 1 ? last : state.stride[last - 1] == 1 ? last - 1 : -1;
  if (along < 0) return -1;
  for (int32_t i = 0; i < state.ndim; ++i) {
    if (i != along && state.shape[i] > 1 && state.stride[i] % per_vector != 0) return -1;
  }
  return along == last ? 1 : 0;
}

const View& any_state(const RuleProblem& p) { return p.initial_state.present() ? p.initial_state : p.final_state; }

template <class Stored>
cudaError_t launch_decode(const RuleProblem& p, bool k_first, int64_t blocks, cudaStream_t stream) {
  const bool one_token = !p.cu_seqlens.present() && p.T == 1;
  const auto one = k_first ? simt::decode_kernel<Stored, true, true> : simt::decode_kernel<Stored, false, true>;
  const auto more = k_first ? simt::decode_kernel<Stored, true, false> : simt::decode_kernel<Stored, false, false>;
  return launch(one_token ? one : more, dim3(static_cast<unsigned>(blocks)), dim3(simt::kDecodeThreads), 0, stream,
                make_params(p));
}

}  // namespace

const char* refuse_decode(const RuleProblem& p) {
  if (p.K != 128) return "takes K = 128";
  if (p.checkpoints.present()) return "takes no checkpoints";
  if (!p.initial_state.present() && !p.final_state.present()) return "takes calls with a state";
  const View& state = any_state(p);
  for (const View* each : {&p.initial_state, &p.final_state, &p.snapshots}) {
    if (!each->present()) continue;
    if (each->dtype != state.dtype) return "takes states of one dtype";
    const int along = contiguous_dim(*each);
    if (along < 0) return "takes states of 16-byte aligned rows";
    if (along != contiguous_dim(state)) return "takes states of one layout";
  }
  if (p.V % panel_of(state.dtype) != 0) return "takes V a multiple of 32 (fp32 states) or 64";
  const int64_t tokens = p.cu_seqlens.present() ? p.T : p.T * p.B;
  if (tokens > kManyTokens * p.N) return "takes at most 16 tokens per sequence on average";
  if (p.T > INT_MAX) return "takes fewer than 2^31 tokens";
  if (p.N > INT_MAX / (p.Hv * (p.V / panel_of(state.dtype)))) return "takes fewer than 2^31 blocks";
  return nullptr;
}

void plan_decode(const RuleProblem& p, Plan* plan) {
  plan->threads = 0;
  plan->panel_v = panel_of(any_state(p).dtype);
  plan->work_items = p.N * p.Hv * (p.V / plan->panel_v);
  plan->block_tokens = 1;
  plan->scratch_bytes = 0;
}

Status run_decode(const RuleProblem& p, const Plan& plan) {
  return launch_on(p, "recurrent", [&](cudaStream_t stream) {
    const View& state = any_state(p);
    const bool k_first = contiguous_dim(state) == 1;
    switch (state.dtype) {
      case GDN_F32:
        return launch_decode<float>(p, k_first, plan.work_items, stream);
      case GDN_BF16:
        return launch_decode<__nv_bfloat16>(p, k_first, plan.work_items, stream);
      default:
        return launch_decode<__half>(p, k_first, plan.work_items, stream);
    }
  });
}

}  // namespace gdn::cuda
