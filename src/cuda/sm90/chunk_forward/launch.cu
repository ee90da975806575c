// SPDX-License-Identifier: MIT
// Host side of the Hopper chunk kernel: what it takes, which schedule, the launch.
#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <string>

#include "cuda/common/launch.h"
#include "cuda/common/make_params.h"
#include "cuda/cuda.h"
#include "cuda/sm90/chunk_forward/chunk_forward.h"
#include "cuda/sm90/chunk_forward/kernel.cuh"
#include "cuda/sm90/chunk_forward/tensor_maps.h"

namespace gdn::cuda::sm90 {
namespace {

// Microseconds per chunk of 64 tokens when every SM has a CTA, for CTAs of 128 and of 64 value channels (one H200,
// lab/sm90_chunk_lab, 2026-12-01), and per CTA for its start and its states. Only their ratios matter.
constexpr double kChunkMicros[2] = {2.9, 2.1};
constexpr double kStartMicros = 4.0;

// Value channels per CTA: 64 * state warpgroups.
int32_t state_warpgroups(const RuleProblem& p) {
  if (p.V % 128 != 0) return 1;
  const double sms = std::max(1, device_info(p.device_id).sms);
  const int64_t sequences = std::max<int64_t>(p.N, 1);
  const double tokens = static_cast<double>(p.cu_seqlens.present() ? p.T : p.T * p.B);
  const double mean = std::max(1.0, tokens / 64 / static_cast<double>(sequences));  // chunks per sequence
  double best = 0;
  int32_t choice = 2;
  for (int32_t wgs : {2, 1}) {
    const double ctas = static_cast<double>(sequences * p.Hv * (p.V / (64 * wgs)));
    const double rounds = std::ceil(ctas / sms);
    const double micros = rounds * (mean * kChunkMicros[2 - wgs] + kStartMicros);
    if (wgs == 2 || micros < best) {
      best = micros;
      choice = wgs;
    }
  }
  return choice;
}

const char* refuse_io(const RuleProblem& p) {
  const View* const tensors[] = {&p.q, &p.k, &p.v, &p.o};
  if (p.q.dtype != GDN_BF16 && p.q.dtype != GDN_F16) return "takes bf16 or fp16 q, k, v and o";
  for (const View* t : tensors) {
    if (t->dtype != p.q.dtype) return "takes q, k, v and o of one dtype";
    if (const char* reason = refuse_tensor_map(t->data, t->stride, t->shape)) return reason;
  }
  return nullptr;
}

template <class T>
cudaError_t launch(const KernelParams& params, int64_t ctas, int32_t device_id, cudaStream_t stream) {
  constexpr int32_t kMaxDevices = 64;
  static std::atomic<bool> prepared[kMaxDevices];
  const auto kernel = chunk_forward_kernel<T>;
  if (device_id >= kMaxDevices || !prepared[device_id].load(std::memory_order_acquire)) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes<T>);
    if (error != cudaSuccess) return error;
    if (device_id < kMaxDevices) prepared[device_id].store(true, std::memory_order_release);
  }
  return cuda::launch(kernel, dim3(static_cast<unsigned>(ctas)), dim3(T::kThreads), kSmemBytes<T>, stream, params);
}

template <class Element, int kKeyDim>
cudaError_t launch_wgs(const KernelParams& params, int32_t wgs, int64_t ctas, int32_t device_id, cudaStream_t stream) {
  return wgs == 2 ? launch<Traits<Element, kKeyDim, 2>>(params, ctas, device_id, stream)
                  : launch<Traits<Element, kKeyDim, 1>>(params, ctas, device_id, stream);
}

template <class Element>
cudaError_t launch_element(const KernelParams& params, int32_t wgs, int64_t ctas, int32_t device_id,
                           cudaStream_t stream) {
  return params.rule.K == 128 ? launch_wgs<Element, 128>(params, wgs, ctas, device_id, stream)
                              : launch_wgs<Element, 64>(params, wgs, ctas, device_id, stream);
}

}  // namespace

const char* refuse_chunk(const RuleProblem& p) {
  const DeviceInfo& device = device_info(p.device_id);
  if (device.major != 9 || device.minor != 0) return "needs a Hopper GPU (compute capability 9.0)";
  if (p.K != 64 && p.K != 128) return "takes K = 64 or 128";
  if (p.V % 64 != 0) return "takes V that is a multiple of 64";
  if (const char* reason = refuse_io(p)) return reason;
  if (p.checkpoint_every % kChunk != 0) return "takes checkpoint_every that is a multiple of 64";
  if (p.T > INT_MAX - kChunk || p.B > INT_MAX) return "takes fewer than 2^31 tokens and sequences";
  if (p.N > INT_MAX / (p.Hv * (p.V / 64))) return "takes fewer than 2^31 blocks of 64 value channels";
  if (tensor_map_encoder() == nullptr) return "the driver has no tensor maps (CUDA 12.0 or later needed)";
  return nullptr;
}

void plan_chunk(const RuleProblem& p, Plan* plan) {
  const int32_t wgs = state_warpgroups(p);
  plan->threads = 0;
  plan->panel_v = 64 * wgs;
  plan->work_items = p.N * p.Hv * (p.V / plan->panel_v);
  plan->block_tokens = kChunk;
  plan->scratch_bytes = 0;
}

Status run_chunk(const RuleProblem& p, const Plan& plan) {
  const DeviceGuard guard(p.device_id);
  if (guard.error() != cudaSuccess) return cuda_status("chunk_forward", "setting the device", guard.error());
  KernelParams params{};
  params.rule = make_params(p);
  const int32_t wgs = static_cast<int32_t>(plan.panel_v / 64);
  params.v_splits = static_cast<int32_t>(p.V / plan.panel_v);
  const RuleParams& rule = params.rule;
  if (p.T > 0) {  // an empty tensor has no map, and nothing reads one
    CUresult result = encode_tensor_map(&params.q, rule.q, p.B, p.T, p.Hk, p.K);
    if (result == CUDA_SUCCESS) result = encode_tensor_map(&params.k, rule.k, p.B, p.T, p.Hk, p.K);
    if (result == CUDA_SUCCESS) result = encode_tensor_map(&params.v, rule.v, p.B, p.T, p.Hv, p.V);
    if (result == CUDA_SUCCESS) result = encode_tensor_map(&params.o, rule.o, p.B, p.T, p.Hv, p.V);
    if (result != CUDA_SUCCESS) {
      return Status(GDN_INTERNAL, "chunk_forward: CUDA: found CUresult " + std::to_string(static_cast<int>(result)) +
                                      " from encoding the tensor maps of q, k, v and o, expected CUDA_SUCCESS (0)");
    }
  }
  const cudaStream_t stream = stream_of(p);
  const cudaError_t error = p.q.dtype == GDN_BF16
                                ? launch_element<__nv_bfloat16>(params, wgs, plan.work_items, p.device_id, stream)
                                : launch_element<__half>(params, wgs, plan.work_items, p.device_id, stream);
  if (error != cudaSuccess) cudaGetLastError();  // reported: nobody else is to find it
  return cuda_status("chunk_forward", "the launch", error);
}

}  // namespace gdn::cuda::sm90
