// SPDX-License-Identifier: MIT
// Host side of chunk_sm80: what it takes, the launch.
#include <climits>

#include "cuda/common/launch.h"
#include "cuda/common/make_params.h"
#include "cuda/cuda.h"
#include "cuda/sm80/chunk_forward/chunk_forward.h"
#include "cuda/sm80/chunk_forward/kernel.cuh"

namespace gdn::cuda::sm80 {
namespace {

// 16 bytes at a time: rows contiguous, aligned, of whole pieces.
bool in_pieces(const View& x) {
  const int64_t per_piece = 8;
  bool good = x.data != nullptr && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride[3] == 1 &&
              x.shape[3] % per_piece == 0;
  for (int i = 0; i < 3; ++i) good = good && (x.shape[i] <= 1 || x.stride[i] % per_piece == 0);
  return good;
}

int64_t shared_bytes(int64_t K) {
  switch (K) {
    case 64:
      return sizeof(Shared<64>);
    case 128:
      return sizeof(Shared<128>);
    default:
      return sizeof(Shared<192>);
  }
}

template <class E, int kKeys>
cudaError_t launch_kernel(const RuleProblem& p, const Plan& plan, const LaunchParams& params, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared<kKeys>);
  const cudaError_t error = allow_shared_memory<chunk_kernel<E, kKeys>>(kBytes, p.device_id);
  if (error != cudaSuccess) return error;
  return launch(chunk_kernel<E, kKeys>, dim3(static_cast<unsigned>(plan.work_items)), dim3(kThreads), kBytes, stream,
                make_params(p), params);
}

template <class E>
cudaError_t launch_keys(const RuleProblem& p, const Plan& plan, const LaunchParams& params, cudaStream_t stream) {
  switch (p.K) {
    case 64:
      return launch_kernel<E, 64>(p, plan, params, stream);
    case 128:
      return launch_kernel<E, 128>(p, plan, params, stream);
    default:
      return launch_kernel<E, 192>(p, plan, params, stream);
  }
}

}  // namespace

const char* refuse_chunk(const RuleProblem& p) {
  const DeviceInfo& device = device_info(p.device_id);
  if (device.major < 8) return "needs a GPU of compute capability 8.0 or later";
  if (p.K != 64 && p.K != 128 && p.K != 192) return "takes K = 64, 128 or 192";
  if (p.q.dtype != GDN_BF16 && p.q.dtype != GDN_F16) return "takes bf16 or fp16 q, k, v and o";
  for (const View* t : {&p.k, &p.v, &p.o}) {
    if (t->dtype != p.q.dtype) return "takes q, k, v and o of one dtype";
  }
  if (p.checkpoint_every % kChunk != 0) return "takes checkpoint_every that is a multiple of 64";
  if (p.T > INT_MAX - kChunk) return "takes fewer than 2^31 tokens";
  if (p.N > INT_MAX / (p.Hv * ((p.V + kPanel - 1) / kPanel))) return "takes fewer than 2^31 blocks";
  if (shared_bytes(p.K) > device.smem_per_block) return "needs more shared memory than this GPU has, for this K";
  return nullptr;
}

void plan_chunk(const RuleProblem& p, Plan* plan) {
  plan->threads = 0;
  plan->panel_v = kPanel;
  plan->work_items = p.N * p.Hv * ((p.V + kPanel - 1) / kPanel);
  plan->block_tokens = kChunk;
  plan->scratch_bytes = 0;
}

Status run_chunk(const RuleProblem& p, const Plan& plan) {
  LaunchParams params;
  params.panels = static_cast<int32_t>((p.V + kPanel - 1) / kPanel);
  params.fast_q = in_pieces(p.q);
  params.fast_k = in_pieces(p.k);
  params.fast_v = in_pieces(p.v);
  params.fast_o = in_pieces(p.o);
  return launch_on(p, "chunk_forward", [&](cudaStream_t stream) {
    return p.q.dtype == GDN_BF16 ? launch_keys<__nv_bfloat16>(p, plan, params, stream)
                                 : launch_keys<__half>(p, plan, params, stream);
  });
}

}  // namespace gdn::cuda::sm80
