/* Serving-style decode in C: a pool of state slots, four requests of which one is padding (slot -1), state updated in
 * place. A second call with a wrong shape shows what an error looks like. */
#include <gdn/gdn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { B = 4, Hk = 2, Hv = 4, K = 64, V = 64, Slots = 8 };

static float q_data[B * Hk * K], k_data[B * Hk * K], v_data[B * Hv * V], o_data[B * Hv * V];
static float a_data[B * Hv], b_data[B * Hv], A_log_data[Hv], dt_bias_data[Hv];
static float pool_data[Slots * Hv * K * V];

static void fill(float* data, size_t n) {
  size_t i;
  for (i = 0; i < n; ++i) data[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

int main(void) {
  int32_t slots_data[B] = {3, 0, -1, 7};
  gdn_tensor q, k, v, o, a, b, A_log, dt_bias, pool, slots;
  gdn_rule_args args = GDN_INIT(args);
  size_t i, padded = 2;
  int step;
  fill(q_data, B * Hk * K), fill(k_data, B * Hk * K), fill(v_data, B * Hv * V);
  fill(a_data, B * Hv), fill(b_data, B * Hv), fill(A_log_data, Hv), fill(dt_bias_data, Hv);
  gdn_tensor_init(&q, q_data, GDN_F32, 4, (int64_t[]){B, 1, Hk, K});
  gdn_tensor_init(&k, k_data, GDN_F32, 4, (int64_t[]){B, 1, Hk, K});
  gdn_tensor_init(&v, v_data, GDN_F32, 4, (int64_t[]){B, 1, Hv, V});
  gdn_tensor_init(&o, o_data, GDN_F32, 4, (int64_t[]){B, 1, Hv, V});
  gdn_tensor_init(&a, a_data, GDN_F32, 3, (int64_t[]){B, 1, Hv});
  gdn_tensor_init(&b, b_data, GDN_F32, 3, (int64_t[]){B, 1, Hv});
  gdn_tensor_init(&A_log, A_log_data, GDN_F32, 1, (int64_t[]){Hv});
  gdn_tensor_init(&dt_bias, dt_bias_data, GDN_F32, 1, (int64_t[]){Hv});
  gdn_tensor_init(&pool, pool_data, GDN_F32, 4, (int64_t[]){Slots, Hv, V, K});
  gdn_tensor_init(&slots, slots_data, GDN_I32, 1, (int64_t[]){B});

  args.q = &q, args.k = &k, args.v = &v, args.o = &o;
  args.g = &a, args.gate_form = GDN_GATE_RAW, args.A_log = &A_log, args.dt_bias = &dt_bias;
  args.beta = &b, args.beta_form = GDN_BETA_SIGMOID, args.qk_l2norm = 1;
  args.state_layout = GDN_STATE_V_FIRST;
  args.initial_state = &pool, args.final_state = &pool, args.initial_state_indices = &slots;

  for (step = 0; step < 3; ++step) {
    memset(o_data, 0xff, sizeof(o_data)); /* NaN: every row must be written */
    if (gdn_recurrent(&args) != GDN_OK) {
      fprintf(stderr, "%s\n", gdn_last_error());
      return 1;
    }
  }
  for (i = 0; i < B * Hv * V; ++i) {
    const int is_padding = i / (Hv * V) == padded;
    if (o_data[i] != o_data[i] || (is_padding && o_data[i] != 0)) return 1;
  }
  for (i = 0; i < Hv * K * V; ++i) {
    if (pool_data[1 * Hv * K * V + i] != 0) return 1; /* a slot that no request names */
  }

  v.shape[2] = 3; /* 3 value heads are no multiple of 2 key heads */
  if (gdn_recurrent(&args) != GDN_INVALID_ARGUMENT) return 1;
  printf("three steps of four requests done; a wrong shape is refused with:\n  %s\n", gdn_last_error());
  return 0;
}
