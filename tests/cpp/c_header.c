/* SPDX-License-Identifier: MIT
 * gdn.h is C: this file is compiled as C and called from test_api.cpp. */
#include "c_header.h"

#include "gdn/gdn.h"

gdn_status gdn_test_call_from_c(float* o, float* state) {
  float q[2] = {1, 0}, k[2] = {1, 0}, v[3] = {1, 2, 3};
  const int64_t qk_shape[4] = {1, 1, 1, 2}, v_shape[4] = {1, 1, 1, 3}, state_shape[4] = {1, 1, 2, 3};
  gdn_tensor tq, tk, tv, to, ts;
  gdn_rule_args args = GDN_INIT(gdn_rule_args);
  gdn_tensor_init(&tq, q, GDN_F32, 4, qk_shape);
  gdn_tensor_init(&tk, k, GDN_F32, 4, qk_shape);
  gdn_tensor_init(&tv, v, GDN_F32, 4, v_shape);
  gdn_tensor_init(&to, o, GDN_F32, 4, v_shape);
  gdn_tensor_init(&ts, state, GDN_F32, 4, state_shape);
  args.q = &tq;
  args.k = &tk;
  args.v = &tv;
  args.o = &to;
  args.final_state = &ts;
  args.scale = 1.0f;
  return gdn_chunk_forward(&args);
}
