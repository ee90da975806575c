// SPDX-License-Identifier: MIT
// A torch operator of one's own on top of an installed libgdn: the gate of a GDN layer and one decode step, with the
// state updated in place. Plain ATen types, the C header, no source of libgdn.
#include <torch/library.h>

#include <ATen/ATen.h>
#include <gdn/gdn.h>

#include <stdexcept>
#include <vector>

namespace {

int32_t gdn_dtype(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return GDN_F32;
    case at::kBFloat16:
      return GDN_BF16;
    case at::kHalf:
      return GDN_F16;
    default:
      throw std::invalid_argument("my_gdn.step: tensors must be float32, bfloat16 or float16");
  }
}

// A gdn_tensor is a view: pointer, shape and strides in elements. Nothing is copied.
gdn_tensor view(const at::Tensor& t) {
  gdn_tensor v{};
  v.data = t.data_ptr();
  v.device_type = GDN_CPU;
  v.dtype = gdn_dtype(t);
  v.ndim = static_cast<int32_t>(t.dim());
  for (int64_t i = 0; i < t.dim(); ++i) {
    v.shape[i] = t.size(i);
    v.strides[i] = t.stride(i);
  }
  return v;
}

void check(gdn_status status) {
  if (status != GDN_OK) throw std::runtime_error(gdn_last_error());
}

// q, k [B, 1, Hk, K]; v [B, 1, Hv, V]; a, b [B, 1, Hv] raw gate inputs; A_log, dt_bias [Hv]; state [B, Hv, K, V].
at::Tensor step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& a, const at::Tensor& b,
                const at::Tensor& A_log, const at::Tensor& dt_bias, const at::Tensor& state) {
  at::Tensor o = at::empty_like(v, at::MemoryFormat::Contiguous);
  const gdn_tensor q_view = view(q), k_view = view(k), v_view = view(v), a_view = view(a), b_view = view(b);
  const gdn_tensor A_view = view(A_log), bias_view = view(dt_bias), state_view = view(state), o_view = view(o);
  gdn_rule_args args = GDN_INIT(gdn_rule_args);
  args.q = &q_view;
  args.k = &k_view;
  args.v = &v_view;
  args.g = &a_view;
  args.beta = &b_view;
  args.A_log = &A_view;
  args.dt_bias = &bias_view;
  args.gate_form = GDN_GATE_RAW;
  args.beta_form = GDN_BETA_SIGMOID;
  args.qk_l2norm = 1;
  args.initial_state = &state_view;
  args.final_state = &state_view;  // the same view: in place
  args.o = &o_view;
  check(gdn_recurrent(&args));
  return o;
}

}  // namespace

TORCH_LIBRARY(my_gdn, m) {
  m.def(
      "step(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(a!) state) "
      "-> Tensor");
}
TORCH_LIBRARY_IMPL(my_gdn, CPU, m) { m.impl("step", &step); }
