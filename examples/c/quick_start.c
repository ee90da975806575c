/* Prefill in C: one sequence, random data, the state afterwards. Exits non-zero on an error. */
#include <gdn/gdn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { T = 256, Hk = 2, Hv = 4, K = 64, V = 32 };

static float* random_floats(size_t n, float low, float high) {
  float* data = malloc(n * sizeof(float));
  size_t i;
  if (data == NULL) exit(1);
  for (i = 0; i < n; ++i) data[i] = low + (high - low) * (float)rand() / (float)RAND_MAX;
  return data;
}

int main(void) {
  float* q_data = random_floats(T * Hk * K, -1, 1);
  float* k_data = random_floats(T * Hk * K, -1, 1);
  float* v_data = random_floats(T * Hv * V, -1, 1);
  float* g_data = random_floats(T * Hv, -0.1f, 0); /* log decay */
  float* beta_data = random_floats(T * Hv, 0, 1);
  float* o_data = random_floats(T * Hv * V, 0, 0);
  float* state_data = random_floats(Hv * K * V, 0, 0);
  double sum = 0;
  size_t i;
  gdn_tensor q, k, v, g, beta, o, state;
  gdn_tensor_init(&q, q_data, GDN_F32, 4, (int64_t[]){1, T, Hk, K});
  gdn_tensor_init(&k, k_data, GDN_F32, 4, (int64_t[]){1, T, Hk, K});
  gdn_tensor_init(&v, v_data, GDN_F32, 4, (int64_t[]){1, T, Hv, V});
  gdn_tensor_init(&g, g_data, GDN_F32, 3, (int64_t[]){1, T, Hv});
  gdn_tensor_init(&beta, beta_data, GDN_F32, 3, (int64_t[]){1, T, Hv});
  gdn_tensor_init(&o, o_data, GDN_F32, 4, (int64_t[]){1, T, Hv, V});
  gdn_tensor_init(&state, state_data, GDN_F32, 4, (int64_t[]){1, Hv, K, V});
  {
    /* README begin */
    gdn_rule_args args = GDN_INIT(args);
    args.q = &q, args.k = &k, args.v = &v, args.g = &g, args.beta = &beta;
    args.o = &o, args.final_state = &state, args.qk_l2norm = 1;
    gdn_status status = gdn_chunk_forward(&args);
    if (status != GDN_OK) fprintf(stderr, "%s\n", gdn_last_error());
    /* README end */
    if (status != GDN_OK) return 1;
  }
  for (i = 0; i < (size_t)T * Hv * V; ++i) sum += fabs(o_data[i]);
  printf("libgdn %s: mean |o| = %.6f, state[0] = %.6f\n", gdn_version(), sum / (T * Hv * V), state_data[0]);
  free(q_data), free(k_data), free(v_data), free(g_data), free(beta_data), free(o_data), free(state_data);
  return isfinite(sum) && sum > 0 ? 0 : 1;
}
