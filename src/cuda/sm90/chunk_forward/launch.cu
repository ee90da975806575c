// SPDX-License-Identifier: MIT
// Host side of the Hopper chunk kernel: what it takes, which schedule, the launch.
#include <algorithm>
#include <atomic>
#include <climits>
#include <random>
#include <string>

#include "cuda/common/launch.h"
#include "cuda/common/make_params.h"
#include "cuda/cuda.h"
#include "cuda/sm90/chunk_forward/chunk_forward.h"
#include "cuda/sm90/chunk_forward/kernel.cuh"
#include "cuda/sm90/chunk_forward/schedule.h"
#include "cuda/sm90/chunk_forward/tensor_maps.h"
#include "cuda/workspace.h"

namespace gdn::cuda::sm90 {
namespace {

Workload workload_of(const RuleProblem& p) {
  Workload w;
  w.sequences = std::max<int64_t>(p.N, 1);
  w.tokens = p.cu_seqlens.present() ? p.T : p.T * p.B;
  w.longest = p.N <= 1 ? w.tokens : p.max_seqlen;
  w.heads = static_cast<int32_t>(p.Hv);
  w.key_heads = static_cast<int32_t>(p.Hk);
  w.value_dim = static_cast<int32_t>(p.V);
  w.sms = std::max(1, device_info(p.device_id).sms);
  return w;
}

// Engines call with the same shapes again and again, layer after layer.
Schedule best_schedule(const Workload& work, bool may_split) {
  thread_local Workload last_work;
  thread_local bool last_split = false, known = false;
  thread_local Schedule last;
  if (!known || last_split != may_split || !(last_work == work)) {
    last = rank_schedules(work, may_split).front();
    last_work = work;
    last_split = may_split;
    known = true;
  }
  return last;
}

bool can_split(const RuleProblem& p) { return p.K == 128 && p.V % 128 == 0; }

// What a split call keeps in device memory, for the segments that there can be.
struct WorkspaceLayout {
  int64_t transition = 0, local, window, started, bytes;
  WorkspaceLayout(const RuleProblem& p, int64_t segments) {
    const int64_t pairs = segments * p.Hv, panels = p.V / 64;
    local = pairs * kTransitionBytes;
    window = local + pairs * panels * kLocalBytes;
    started = window + pairs * 4;
    bytes = started + pairs * panels * 4;
  }
};

// What the wrap-around schedule keeps there.
struct LineLayout {
  int64_t states = 0, flags, works, bytes;
  LineLayout(const RuleProblem& p, const Plan& plan) {
    const int64_t panels = plan.shares * (plan.panel_v / 64);
    flags = panels * kLocalBytes * p.K / 128;
    works = flags + (panels * 8 + 15) / 16 * 16;
    bytes = works + (plan.work_items + plan.shares) * static_cast<int64_t>(sizeof(Work));
  }
};

// Marks flags of one launch: no memory holds it by chance, and no two launches of this process have the same.
uint64_t new_tag() {
  static const uint64_t seed = [] {
    std::random_device random;
    return static_cast<uint64_t>(random()) << 32 | random();
  }();
  static std::atomic<uint64_t> count{0};
  uint64_t z = seed + count.fetch_add(1, std::memory_order_relaxed) * 0x9E3779B97F4A7C15ull;  // SplitMix64
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
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

bool starts_longest_first(int64_t sequences, int64_t ctas, int32_t sms) {
  return sequences > 1 && ctas > std::max(1, sms);
}

template <class T>
cudaError_t launch(const KernelParams& params, int64_t ctas, int32_t device_id, cudaStream_t stream) {
  const cudaError_t error = allow_shared_memory<chunk_forward_kernel<T>>(kSmemBytes<T>, device_id);
  if (error != cudaSuccess) return error;
  // In segments: CTAs come up, and make what needs no state, while the launch before runs out.
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(ctas);
  config.blockDim = T::kThreads;
  config.dynamicSmemBytes = kSmemBytes<T>;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = T::kIsForward && params.segments.chunks > 0 ? 1 : 0;
  return cudaLaunchKernelEx(&config, chunk_forward_kernel<T>, params);
}

template <class Element>
cudaError_t launch_all(KernelParams& params, int64_t segments, int32_t wgs, int32_t device_id, cudaStream_t stream) {
  const RuleParams& rule = params.rule;
  const int64_t pairs = segments * rule.Hv;
  if (params.segments.chunks > 0) {
    params.v_splits = rule.V / 128;
    const cudaError_t error =
        launch<Traits<Element, 128, 2, false>>(params, pairs * (params.v_splits + 1), device_id, stream);
    if (error != cudaSuccess) return error;
  }
  params.v_splits = rule.V / (64 * wgs);
  const int64_t ctas = params.line.ctas > 0 ? params.line.ctas : pairs * params.v_splits;
  params.longest_first = starts_longest_first(rule.N, ctas, device_info(device_id).sms) ? 1 : 0;
  if (rule.K == 128) {
    return wgs == 2 ? launch<Traits<Element, 128, 2>>(params, ctas, device_id, stream)
                    : launch<Traits<Element, 128, 1>>(params, ctas, device_id, stream);
  }
  return wgs == 2 ? launch<Traits<Element, 64, 2>>(params, ctas, device_id, stream)
                  : launch<Traits<Element, 64, 1>>(params, ctas, device_id, stream);
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
  for (const View* state : {&p.initial_state, &p.final_state}) {
    if (state->present() && state->shape[0] > INT_MAX) return "takes fewer than 2^31 state slots";
  }
  if (tensor_map_encoder() == nullptr) return "the driver has no tensor maps (CUDA 12.0 or later needed)";
  return nullptr;
}

void plan_chunk(const RuleProblem& p, Plan* plan) {
  const Workload work = workload_of(p);
  const bool may_split = can_split(p) && p.split != GDN_SPLIT_OFF;
  Schedule schedule = best_schedule(work, may_split && p.split_tokens == 0);
  if (may_split && p.split_tokens > 0) {
    const double usual = cost_model(2).usual_exact_share;
    Schedule one{.state_warpgroups = 1, .segment_chunks = p.split_tokens / kChunk}, two = one;
    two.state_warpgroups = 2;
    schedule = predict_micros(work, one, usual) < predict_micros(work, two, usual) ? one : two;
  }
  if (segment_bound(work, schedule.segment_chunks) > INT_MAX / (p.Hv * (p.V / 64 + 1))) schedule.segment_chunks = 0;
  const int64_t segments = segment_bound(work, schedule.segment_chunks);
  plan->threads = 0;
  plan->panel_v = 64 * schedule.state_warpgroups;
  plan->work_items = segments * p.Hv * (p.V / plan->panel_v);
  plan->block_tokens = kChunk;
  plan->split_tokens = schedule.segment_chunks * kChunk;
  plan->split_note = schedule.segment_chunks > 0 ? "predicted to be faster than whole sequences"
                     : !can_split(p)             ? "off: chunk_sm90 splits K = 128 and V a multiple of 128 only"
                                                 : "off: whole sequences are predicted to be faster";
  plan->shares = schedule.segment_chunks > 0 ? 0 : schedule.line_ctas;
  plan->together = schedule.together;
  plan->scratch_bytes = schedule.segment_chunks > 0 ? WorkspaceLayout(p, segments).bytes
                        : plan->shares > 0          ? LineLayout(p, *plan).bytes
                                                    : 0;
}

std::vector<PlanOption> chunk_options(const RuleProblem& p) {
  std::vector<PlanOption> options;
  for (const Schedule& s : rank_schedules(workload_of(p), can_split(p) && p.split != GDN_SPLIT_OFF)) {
    options.push_back({64 * s.state_warpgroups, s.segment_chunks * kChunk, s.line_ctas, s.micros});
  }
  return options;
}

std::vector<ModelValue> chunk_model(const RuleProblem& p, const Plan& plan) {
  const Workload work = workload_of(p);
  const int32_t wgs = static_cast<int32_t>(plan.panel_v / 64);
  const CostModel cost = cost_model(wgs);
  const double exact = p.split_exact || !p.g.present() ? 1 : cost.usual_exact_share;
  const bool sorted = p.cu_seqlens.present() && starts_longest_first(p.N, plan.work_items, work.sms) &&
                      plan.split_tokens == 0 && plan.shares == 0 && p.N <= kMaxSorted;
  Schedule schedule{.state_warpgroups = wgs, .segment_chunks = plan.split_tokens / kChunk};
  schedule.line_ctas = static_cast<int32_t>(plan.shares);
  schedule.together = static_cast<int32_t>(plan.together);
  return {{"sms", static_cast<double>(work.sms)},
          {"longest_first", sorted ? 1.0 : 0.0},
          {"chunk_us", cost.chunk},
          {"local_chunk_us", cost.local_chunk},
          {"start_us", cost.start},
          {"restart_us", cost.restart},
          {"line_start_us", cost.line_start},
          {"line_chunk_us", cost.line_chunk},
          {"line_work_chunks", kWorkChunks},
          {"line_least_part", kLeastPart},
          {"line_slack_chunks", kSlackChunks},
          {"fold_us", cost.fold},
          {"window_us", cost.window},
          {"no_transition_us", cost.no_transition},
          {"split_us", cost.split},
          {"rounds_penalty", cost.rounds_penalty},
          {"exact_share", exact},
          {"predicted_us", predict_micros(work, schedule, exact)}};
}

Status run_chunk(const RuleProblem& p, const Plan& plan) {
  const DeviceGuard guard(p.device_id);
  if (guard.error() != cudaSuccess) return cuda_status("chunk_forward", "setting the device", guard.error());
  KernelParams params{};
  params.rule = make_params(p);
  const int32_t wgs = static_cast<int32_t>(plan.panel_v / 64);
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
  const Workspace workspace(p, plan.scratch_bytes, stream);
  if (!workspace.status().ok()) return workspace.status();
  const int64_t segments = plan.work_items / (p.Hv * (p.V / plan.panel_v));  // or sequences
  if (plan.split_tokens > 0) {
    const WorkspaceLayout layout(p, segments);
    uint8_t* memory = static_cast<uint8_t*>(workspace.data());
    params.segments.chunks = static_cast<int32_t>(plan.split_tokens / kChunk);
    params.segments.exact = p.split_exact ? 1 : 0;
    params.segments.threshold = p.split_threshold * 1.4426950408889634f;
    uint32_t* const words = params.rule.error_flags;
    params.segments.counters = counts_splits() && words != nullptr ? words + 1 : nullptr;
    params.segments.transition = memory + layout.transition;
    params.segments.local = reinterpret_cast<float4*>(memory + layout.local);
    params.segments.window = reinterpret_cast<int32_t*>(memory + layout.window);
    params.segments.started = reinterpret_cast<int32_t*>(memory + layout.started);
  }
  if (plan.shares > 0) {
    const LineLayout layout(p, plan);
    uint8_t* memory = static_cast<uint8_t*>(workspace.data());
    params.line.ctas = static_cast<int32_t>(plan.shares);
    params.line.together = static_cast<int32_t>(plan.together);
    params.line.tag = new_tag();
    params.line.states = reinterpret_cast<float4*>(memory);
    params.line.flags = reinterpret_cast<uint64_t*>(memory + layout.flags);
    params.line.works = reinterpret_cast<Work*>(memory + layout.works);
  }
  const cudaError_t error = p.q.dtype == GDN_BF16
                                ? launch_all<__nv_bfloat16>(params, segments, wgs, p.device_id, stream)
                                : launch_all<__half>(params, segments, wgs, p.device_id, stream);
  if (error != cudaSuccess) cudaGetLastError();  // reported: nobody else is to find it
  return cuda_status("chunk_forward", "the launch", error);
}

}  // namespace gdn::cuda::sm90
