// SPDX-License-Identifier: MIT
#include "cuda/common/launch.h"
#include "cuda/common/make_params.h"

namespace gdn::cuda {
namespace {

// A tensor without elements (a pool of no slots) may have no data, but it is not absent: its indices still count.
alignas(16) char no_elements[16];
void* const kNoElements = no_elements;

}  // namespace

TensorRef tensor_ref_of(const View& view) {
  TensorRef ref;
  if (!view.present()) return ref;
  ref.data = view.data != nullptr ? static_cast<void*>(view.data) : kNoElements;
  ref.dtype = view.dtype;
  for (int32_t i = 0; i < view.ndim && i < 5; ++i) ref.stride[i] = view.stride[i];
  return ref;
}

IndexRef index_ref_of(const View& view) {
  IndexRef ref;
  if (!view.present()) return ref;
  ref.data = view.data;
  ref.dtype = view.dtype;
  ref.size = view.shape[0];
  for (int32_t i = 0; i < view.ndim && i < 2; ++i) ref.stride[i] = view.stride[i];
  return ref;
}

RuleParams make_params(const RuleProblem& problem) {
  RuleParams p;
  const auto rows = [](const View& view) { return view.present() ? view.shape[0] : int64_t{0}; };
  p.q = tensor_ref_of(problem.q);
  p.k = tensor_ref_of(problem.k);
  p.v = tensor_ref_of(problem.v);
  p.g = tensor_ref_of(problem.g);
  p.beta = tensor_ref_of(problem.beta);
  p.A_log = tensor_ref_of(problem.A_log);
  p.dt_bias = tensor_ref_of(problem.dt_bias);
  p.o = tensor_ref_of(problem.o);
  p.initial_state = tensor_ref_of(problem.initial_state);
  p.final_state = tensor_ref_of(problem.final_state);
  p.checkpoints = tensor_ref_of(problem.checkpoints);
  p.snapshots = tensor_ref_of(problem.snapshots);
  p.cu_seqlens = index_ref_of(problem.cu_seqlens);
  p.initial_indices = index_ref_of(problem.initial_indices);
  p.final_indices = index_ref_of(problem.final_indices);
  p.has_initial = index_ref_of(problem.has_initial);
  p.token_indices = index_ref_of(problem.token_indices);
  p.num_accepted = index_ref_of(problem.num_accepted);
  p.checkpoint_indices = index_ref_of(problem.checkpoint_indices);
  p.B = problem.B;
  p.T = problem.T;
  p.N = problem.N;
  p.initial_slots = rows(problem.initial_state);
  p.final_slots = rows(problem.final_state);
  p.checkpoint_slots = rows(problem.checkpoints);
  p.token_columns = problem.token_slot_columns;
  p.snapshot_columns = problem.snapshots.present() ? problem.snapshots.shape[1] : 0;
  p.checkpoint_every = problem.checkpoint_every;
  p.Hk = static_cast<int32_t>(problem.Hk);
  p.Hv = static_cast<int32_t>(problem.Hv);
  p.K = static_cast<int32_t>(problem.K);
  p.V = static_cast<int32_t>(problem.V);
  p.scale = static_cast<float>(problem.scale);
  p.l2norm_eps = problem.l2norm_eps;
  p.gate_form = static_cast<int8_t>(problem.gate_form);
  p.beta_form = static_cast<int8_t>(problem.beta_form);
  p.head_map = static_cast<int8_t>(problem.head_map);
  p.null_slots = static_cast<int8_t>(problem.null_slots);
  p.qk_l2norm = problem.qk_l2norm;
  p.round_qk = problem.round_qk;
  p.round_beta = problem.round_beta;
  p.error_flags = device_error_word(problem.device_id);
  return p;
}

}  // namespace gdn::cuda
