/* Causal depthwise convolution with a carried state: 6 tokens at once equal 4 tokens and then 2. */
#include <gdn/gdn.h>
#include <stdio.h>

enum { D = 2, T = 6, W = 4, Cut = 4 };

static int conv(const float* x, float* y, int64_t first, int64_t tokens, const float* w, float* state, int carry) {
  gdn_tensor xt, yt, wt, st;
  gdn_conv1d_args args = GDN_INIT(args);
  gdn_tensor_init(&xt, (float*)x + first, GDN_F32, 3, (int64_t[]){1, D, tokens});
  gdn_tensor_init(&yt, y + first, GDN_F32, 3, (int64_t[]){1, D, tokens});
  xt.strides[1] = yt.strides[1] = T; /* a window of a channel-first array of T tokens */
  gdn_tensor_init(&wt, (float*)w, GDN_F32, 2, (int64_t[]){D, W});
  gdn_tensor_init(&st, state, GDN_F32, 3, (int64_t[]){1, D, W - 1});
  args.x = &xt, args.y = &yt, args.weight = &wt, args.activation = GDN_ACT_SILU, args.final_state = &st;
  if (carry) args.initial_state = &st;
  if (gdn_causal_conv1d(&args) == GDN_OK) return 0;
  fprintf(stderr, "%s\n", gdn_last_error());
  return 1;
}

int main(void) {
  const float x[D * T] = {1, 2, 3, 4, 5, 6, -1, 0.5f, 2, -3, 1, 4};
  const float w[D * W] = {0.1f, -0.2f, 0.3f, 0.4f, 1, 0, -1, 0.5f};
  float whole[D * T], pieces[D * T], state[D * (W - 1)];
  int i;
  if (conv(x, whole, 0, T, w, state, 0)) return 1;
  if (conv(x, pieces, 0, Cut, w, state, 0) || conv(x, pieces, Cut, T - Cut, w, state, 1)) return 1;
  for (i = 0; i < D * T; ++i) {
    const float difference = whole[i] - pieces[i];
    if (!(difference < 1e-6f && difference > -1e-6f)) return 1;
  }
  printf("libgdn %s: 4 + 2 tokens equal 6\n", gdn_version());
  return 0;
}
