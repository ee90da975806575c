/* SPDX-License-Identifier: MIT
 *
 * libgdn - operators for Gated Delta Networks (GDN). C ABI, version 1.
 *
 * Recurrence (docs/math.md), per sequence and value head h, key head by `head_map`:
 *     S  <- exp(g_t) * S                    S is K x V
 *     u  =  beta_t * (v_t - S^T k_t)
 *     S  <- S + k_t u^T
 *     o_t = scale * S^T q_t                 o reads the state AFTER the update
 *
 * Conventions of every function here
 * - Returns a gdn_status; never aborts, never throws. On anything but GDN_OK, gdn_last_error() (thread-local)
 *   names the function, the argument, what was found and what was expected, and no output was written.
 * - Tensors are views: shape and strides in ELEMENTS, any strides the docs of the argument allow (any stride at all
 *   unless stated; negative strides are refused; outputs must not overlap themselves). 64-bit offsets throughout.
 *   A NULL tensor pointer means "absent".
 * - Argument structs start with struct_size: set it to sizeof(the struct) (GDN_INIT does). Fields are only ever
 *   appended; zero is the default of every field.
 * - Outputs must not overlap inputs or each other, except that final_state may be exactly the same view as
 *   initial_state, checkpoints exactly that of either (its rows are then slots that the call uses for nothing else), and
 *   a conv / norm output exactly that of its x. Overlap means a shared element: interleaved strided views (slices of a
 *   packed projection, pools that share a page) are fine. A call is refused when a shared element is proven.
 * - Empty work (no tokens, no sequences) returns GDN_OK at once; final states of empty sequences equal their initial
 *   states (zeros without one).
 * - Thread-safe. Work runs on a persistent pool (gdn_set_num_threads); results do not depend on the thread count.
 *
 * CUDA
 * - All tensors of a call, index tensors and cu_seqlens included, lie on one device: the CPU, or one CUDA device
 *   (device_type, device_id). A mixture is refused.
 * - A CUDA call is launched on args->stream and returns without waiting; it never synchronises, allocates nothing but
 *   scratch in stream order (see workspace in gdn_rule_args) and can be captured in a CUDA graph. Replay reads whatever
 *   cu_seqlens, indices and data then hold. The calling thread's current device may be any and stays as it is.
 * - Metadata on the device (cu_seqlens, slot indices, num_accepted, has_initial_state) is not read on the host. Entries out
 *   of range are treated as null (nothing is read or written for them) and set a flag of the device that gdn_info shows
 *   ("bad_metadata"). With GDN_CHECK=1 in the environment the metadata is copied to the host (the call then waits for its
 *   stream, and refuses to run in a capture) and checked as on the CPU, and a flag that an earlier call has set is
 *   reported.
 * - F64 tensors are for CPU calls only. num_threads is ignored.
 */
#ifndef GDN_GDN_H_
#define GDN_GDN_H_

#include <stddef.h>
#include <stdint.h>

#define GDN_VERSION_MAJOR 0
#define GDN_VERSION_MINOR 1
#define GDN_VERSION_PATCH 0
#define GDN_VERSION_STRING "0.1.0"
#define GDN_ABI_VERSION 1

#if defined(_WIN32)
#define GDN_API
#else
#define GDN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- status */
typedef int32_t gdn_status;
enum {
  GDN_OK = 0,
  GDN_INVALID_ARGUMENT = 1, /* the call contradicts this header */
  GDN_UNSUPPORTED = 2,      /* legal, but no implementation takes it; the message names what is missing */
  GDN_OUT_OF_MEMORY = 3,    /* scratch could not be allocated */
  GDN_INTERNAL = 4          /* a bug in libgdn */
};
/* Message of the last failed call on this thread ("" if none). Valid until the next libgdn call on this thread. */
GDN_API const char* gdn_last_error(void);
GDN_API const char* gdn_status_string(gdn_status status);
GDN_API const char* gdn_version(void);
GDN_API int32_t gdn_abi_version(void);

/* ---------------------------------------------------------------- tensors */
enum { GDN_CPU = 1, GDN_CUDA = 2 }; /* DLPack's device numbers */
enum {                              /* dtype */
       GDN_F32 = 1,
       GDN_BF16 = 2,
       GDN_F16 = 3,
       GDN_F64 = 4, /* reference implementations only */
       GDN_I32 = 5,
       GDN_I64 = 6,
       GDN_U8 = 7 /* also bool */
};
#define GDN_MAX_DIMS 6

/* Frozen: never grows. */
typedef struct gdn_tensor {
  void* data;
  int32_t device_type; /* GDN_CPU or GDN_CUDA */
  int32_t device_id;
  int32_t dtype;
  int32_t ndim;
  int64_t shape[GDN_MAX_DIMS];
  int64_t strides[GDN_MAX_DIMS]; /* in elements */
} gdn_tensor;

/* Fills *t with a contiguous CPU view. ndim in 0..GDN_MAX_DIMS. */
static inline void gdn_tensor_init(gdn_tensor* t, void* data, int32_t dtype, int32_t ndim, const int64_t* shape) {
  int64_t stride = 1;
  int32_t i;
  t->data = data;
  t->device_type = GDN_CPU;
  t->device_id = 0;
  t->dtype = dtype;
  t->ndim = ndim;
  for (i = 0; i < GDN_MAX_DIMS; ++i) {
    t->shape[i] = 0;
    t->strides[i] = 0;
  }
  for (i = ndim - 1; i >= 0; --i) {
    t->shape[i] = shape[i];
    t->strides[i] = stride;
    stride *= shape[i];
  }
}

/* ---------------------------------------------------------------- enums */
enum { GDN_GATE_LOG = 0, GDN_GATE_LINEAR = 1, GDN_GATE_RAW = 2 }; /* g | alpha = exp(g) | a with A_log and dt_bias */
enum { GDN_BETA_VALUE = 0, GDN_BETA_SIGMOID = 1, GDN_BETA_SIGMOID2 = 2 }; /* beta | sigmoid(b) | 2 sigmoid(b) */
enum { GDN_HEADS_GROUPED = 0, GDN_HEADS_TILED = 1 };   /* key head of h: h / (Hv/Hk) | h % Hk (ggml) */
enum { GDN_STATE_K_FIRST = 0, GDN_STATE_V_FIRST = 1 }; /* [.., K, V] (FLA, Transformers) | [.., V, K] (vLLM, ggml) */
enum { GDN_NULL_NEGATIVE = 0, GDN_NULL_NON_POSITIVE = 1 }; /* slots < 0 are null (SGLang) | slots <= 0 (vLLM) */
enum { GDN_SPLIT_AUTO = 0, GDN_SPLIT_OFF = 1 };            /* the plan decides | sequences stay whole */
enum { GDN_ACT_NONE = 0, GDN_ACT_SILU = 1, GDN_ACT_SIGMOID = 2 };

/* ---------------------------------------------------------------- the delta rule
 * Shapes: B batch, T tokens, Hk key heads, Hv value heads (a multiple of Hk), K key dim, V value dim (1..512 each),
 * N sequences: B without cu_seqlens, cu_seqlens' length - 1 with it (B must be 1 then). "float" below is any of F32,
 * BF16, F16 (F64 too with an F64-capable implementation), chosen per tensor.
 *
 * State slots. Without indices a state tensor has exactly N rows and row n belongs to sequence n. With indices the tensor is a pool
 * [slots, ...] of which row indices[n] is used; a NULL slot (see null_slots) makes sequence n null: its o rows are set
 * to zero and none of its slots is touched. Writing one slot from two sequences, or reading a slot that another
 * sequence of the call writes, is undefined (GDN_CHECK=1 in the environment refuses duplicate write slots).
 */
typedef struct gdn_rule_args {
  size_t struct_size;

  const gdn_tensor* q;       /* [B, T, Hk, K] float */
  const gdn_tensor* k;       /* [B, T, Hk, K] float */
  const gdn_tensor* v;       /* [B, T, Hv, V] float */
  const gdn_tensor* g;       /* [B, T, Hv] float, read as gate_form says; NULL: no decay (g = 0) */
  const gdn_tensor* beta;    /* [B, T, Hv] float, read as beta_form says; NULL: beta = 1 */
  const gdn_tensor* A_log;   /* [Hv] float, GDN_GATE_RAW only: g = -exp(A_log) * softplus(a + dt_bias) */
  const gdn_tensor* dt_bias; /* [Hv] float, GDN_GATE_RAW only; NULL: 0 */
  const gdn_tensor* o;       /* [B, T, Hv, V] float, OUTPUT. Rows past cu_seqlens[N] are left untouched, but see
                              zero_tail. */

  int32_t gate_form; /* GDN_GATE_* */
  int32_t beta_form; /* GDN_BETA_* */
  int32_t head_map;  /* GDN_HEADS_* */
  int32_t qk_l2norm; /* 1: q and k are replaced by x * rsqrt(sum x^2 + l2norm_eps), in fp32 */
  float l2norm_eps;  /* 0: 1e-6 */
  float scale;       /* 0: K^-0.5 */

  const gdn_tensor* cu_seqlens; /* [N+1] I32/I64, on the call's device like every other tensor: starts at 0,
                                   non-decreasing, last <= T. Sequences may be empty. */

  int32_t state_layout; /* GDN_STATE_*: of all state tensors below. Shapes are written K-first here; V-first swaps the
                           last two. State dtype: F32, BF16, F16, each tensor its own; the running state is fp32. */
  int32_t null_slots;   /* GDN_NULL_* */
  const gdn_tensor* initial_state;         /* [N or slots, Hv, K, V]; NULL: zeros */
  const gdn_tensor* initial_state_indices; /* [N] I32/I64; NULL: row n */
  const gdn_tensor* has_initial_state;     /* [N] U8/I32/I64; 0: sequence n starts from zeros; NULL: all have one */
  const gdn_tensor* final_state; /* OUTPUT [N or slots, Hv, K, V]; NULL: not wanted. May be exactly initial_state. */
  const gdn_tensor* final_state_indices; /* [N] I32/I64; NULL: initial_state_indices if final_state is the same view as
                                            initial_state, else row n */

  /* Multi-token verify; gdn_recurrent only. */
  const gdn_tensor* token_state_indices; /* [N, S] I32/I64, S >= longest sequence: the state after token t goes to slot
                                            [n][t] of final_state (null entries: not written), and sequence n starts
                                            from slot [n][num_accepted[n]-1] of initial_state (column 0 without
                                            num_accepted). Excludes *_state_indices. (vLLM's convention) */
  const gdn_tensor* num_accepted;        /* [N] I32/I64, 1..S; needs token_state_indices */
  const gdn_tensor* snapshots; /* OUTPUT [N, S, Hv, K, V], S >= longest sequence: the state after each token; rows past
                                  a sequence's end untouched. With final_state NULL the pool is not touched.
                                  (SGLang's convention) */

  /* Checkpoints; the state after every checkpoint_every tokens of each sequence, sequences in order:
     M = sum over n of floor(len_n / checkpoint_every) entries (none for null sequences' slots: they are skipped but
     counted). */
  const gdn_tensor* checkpoints;        /* OUTPUT [>= M or slots, Hv, K, V] */
  const gdn_tensor* checkpoint_indices; /* [>= M] I32/I64 rows of checkpoints (null: not written); NULL: row m */
  int64_t checkpoint_every;             /* >= 1 when checkpoints is given */

  int32_t num_threads;     /* 0: gdn_get_num_threads() */
  int32_t batch_invariant; /* 1: a sequence's bits do not depend on what else is in the call */
  const char* impl; /* NULL or "auto": first that accepts; else an implementation's name (gdn_explain lists them) */

  int32_t round_qk;   /* 1: L2-normed q and k are rounded to their input dtype, as Transformers does */
  int32_t round_beta; /* 1: beta from GDN_BETA_SIGMOID* is rounded to the dtype of the beta tensor */

  void* stream;       /* cudaStream_t of a CUDA call; NULL: the legacy default stream. Ignored on the CPU. */
  int64_t max_seqlen; /* CUDA: longest sequence of cu_seqlens, for the plan only; 0: unknown. A wrong value costs time,
                         no correctness (GDN_CHECK=1 refuses one that is too small). */
  int32_t zero_tail;  /* 1: rows of o past cu_seqlens[N] are set to zero */

  /* Splitting of long sequences over a GPU; gdn_chunk_forward only. A sequence is cut into segments that are computed
     side by side and joined: without the gate window exactly (within the accuracy contract), with it to below 1e-4.
     Accepted on the CPU and by implementations that do not split; the plan says what is done. */
  int32_t split;         /* GDN_SPLIT_* */
  int64_t split_tokens;  /* tokens per segment, a multiple of 64; 0: the plan chooses. Excludes GDN_SPLIT_OFF. */
  int32_t split_exact;   /* 1: no gate window */
  float split_threshold; /* the gate window: what a head's gates shrink by more than exp(-split_threshold) from one
                            segment into the next is not carried over. 0: 10 */
  void* workspace;       /* CUDA scratch of gdn_chunk_forward_workspace bytes at least, on the call's device, aligned
                            to 256 bytes, in use until the call has run on its stream; NULL: taken in stream order
                            from a pool of the library that keeps its memory (gdn_release_memory) */
  int64_t workspace_bytes;
} gdn_rule_args;

/* Prefill: chunked evaluation of whole sequences. token_state_indices, num_accepted, snapshots must be NULL. */
GDN_API gdn_status gdn_chunk_forward(const gdn_rule_args* args);
/* *bytes: the workspace that gdn_chunk_forward uses for these arguments (0: none; always 0 for CPU tensors). Depends on
 * no value in a tensor; a tensor's address may be NULL, but a plan for known addresses needs them. */
GDN_API gdn_status gdn_chunk_forward_workspace(const gdn_rule_args* args, int64_t* bytes);
/* Decode (T = 1) and multi-token verify: token by token, state read once and written once per token that is kept. */
GDN_API gdn_status gdn_recurrent(const gdn_rule_args* args);

/* ---------------------------------------------------------------- causal depthwise convolution
 * y[c, t] = act(bias[c] + sum_{j<W} weight[c, j] * ctx[c, t - (W-1) + j]), ctx = carried state (zeros without) then x.
 * One call serves prefill and update (decode): they differ only in lengths. x is logically channel-first; token-major
 * data is the same view with other strides.
 * State: column L-1 is the newest input. Without num_accepted the context is the last W-1 columns and the new state
 * is the last L columns of [state, x]. With num_accepted (speculative window, vLLM): a = num_accepted[n], the
 * context is columns a-1 .. a+W-3, and columns 0 .. W-3+T of the new state become [context without its oldest column,
 * x]; needs L >= W-2+T. Null slots as above: the sequence's y is zero, nothing else written.
 */
typedef struct gdn_conv1d_args {
  size_t struct_size;
  const gdn_tensor* x;                     /* [B, D, T] float */
  const gdn_tensor* weight;                /* [D, W] float, W in 1..16 */
  const gdn_tensor* bias;                  /* [D] float or NULL */
  const gdn_tensor* y;                     /* OUTPUT [B, D, T] float; may be exactly x */
  const gdn_tensor* cu_seqlens;            /* [N+1] I32/I64 over T; B must be 1 */
  const gdn_tensor* initial_state;         /* [N or slots, D, L] float, L >= W-1; NULL: zeros */
  const gdn_tensor* initial_state_indices; /* [N] I32/I64 */
  const gdn_tensor* has_initial_state;     /* [N] U8/I32/I64 */
  const gdn_tensor* final_state;           /* OUTPUT [N or slots, D, L]; may be exactly initial_state */
  const gdn_tensor* final_state_indices;   /* [N] I32/I64; default as in gdn_rule_args */
  const gdn_tensor* num_accepted;          /* [N] I32/I64, 1..L-W+2 */
  int32_t activation;                      /* GDN_ACT_NONE or GDN_ACT_SILU */
  int32_t null_slots;                      /* GDN_NULL_* */
  int32_t num_threads;
  void* stream; /* as in gdn_rule_args */
} gdn_conv1d_args;
GDN_API gdn_status gdn_causal_conv1d(const gdn_conv1d_args* args);

/* ---------------------------------------------------------------- gate
 * g = -exp(A_log) * softplus(a + dt_bias) (softplus threshold 20), beta = sigmoid(b) or 2 sigmoid(b); computed in fp32.
 */
typedef struct gdn_gate_args {
  size_t struct_size;
  const gdn_tensor* a;       /* [.., Hv] float, rank 1..4; NULL: no g */
  const gdn_tensor* b;       /* [.., Hv] float, same shape as a; NULL: no beta */
  const gdn_tensor* A_log;   /* [Hv] float; needed with a */
  const gdn_tensor* dt_bias; /* [Hv] float or NULL */
  const gdn_tensor* g;       /* OUTPUT, a's shape, float; needed with a */
  const gdn_tensor* beta;    /* OUTPUT, b's shape, float; needed with b */
  int32_t gate_form;         /* of the g output: GDN_GATE_LOG or GDN_GATE_LINEAR */
  int32_t beta_form;         /* GDN_BETA_SIGMOID (0 is read as this) or GDN_BETA_SIGMOID2 */
  int32_t num_threads;
  void* stream; /* as in gdn_rule_args */
} gdn_gate_args;
GDN_API gdn_status gdn_gate(const gdn_gate_args* args);

/* ---------------------------------------------------------------- RMSNorm with an optional gate
 * n = x * rsqrt(mean x^2 + eps); out = n * w * act(z)  (norm first, then gate: Qwen), or with gate_first the norm is
 * taken of x * act(z). w = weight, or 1 + weight with zero_centered. Statistics in fp32. With residual, x + residual
 * (added in fp32, rounded to residual_out's dtype) takes the place of x everywhere above and is also written to
 * residual_out. */
typedef struct gdn_rmsnorm_gated_args {
  size_t struct_size;
  const gdn_tensor* x;      /* [.., D] float, rank 1..4 */
  const gdn_tensor* z;      /* x's shape, float; NULL: no gate */
  const gdn_tensor* weight; /* [D] float; NULL: 1 */
  const gdn_tensor* out;    /* OUTPUT, x's shape, float; may be exactly x */
  float eps;                /* used as given; must be >= 0 and finite */
  int32_t activation;       /* GDN_ACT_SILU or GDN_ACT_SIGMOID; must be GDN_ACT_NONE without z */
  int32_t gate_first;
  int32_t zero_centered;
  int32_t round_before_weight; /* 1: n is rounded to x's dtype before the weight (Transformers' Qwen3Next norm) */
  int32_t num_threads;
  void* stream;                   /* as in gdn_rule_args */
  const gdn_tensor* residual;     /* x's shape, float; NULL: none */
  const gdn_tensor* residual_out; /* OUTPUT, x's shape, float; with residual only; may be exactly residual, or x where
                                     out is not */
} gdn_rmsnorm_gated_args;
GDN_API gdn_status gdn_rmsnorm_gated(const gdn_rmsnorm_gated_args* args);

/* ---------------------------------------------------------------- gated linear unit
 * out = x * act(z), computed in fp32 and rounded once: SwiGLU with GDN_ACT_SILU (x = up, z = gate), an attention layer's
 * output gate with GDN_ACT_SIGMOID. */
typedef struct gdn_glu_args {
  size_t struct_size;
  const gdn_tensor* x;   /* [.., D] float, rank 1..4 */
  const gdn_tensor* z;   /* x's shape, float */
  const gdn_tensor* out; /* OUTPUT, x's shape, float; may be exactly x */
  int32_t activation;    /* GDN_ACT_SILU or GDN_ACT_SIGMOID */
  int32_t num_threads;
  void* stream; /* as in gdn_rule_args */
} gdn_glu_args;
GDN_API gdn_status gdn_glu(const gdn_glu_args* args);

/* ---------------------------------------------------------------- q/k RMSNorm + split + RoPE of the attention layers
 * Per head: n = x * rsqrt(mean x^2 + eps) * (w or 1 + w), rounded to the output dtype; then the first R channels are
 * rotated NeoX-style (x1 = [0, R/2), x2 = [R/2, R)): [x1 cos - x2 sin, x2 cos + x1 sin]; channels past R pass through.
 * With q_has_gate a head of q is [q D | gate D] and the gate is copied to gate_out. Angles: either cos and sin (R =
 * their last dim; both halves are given, as Transformers makes them), or positions with theta: angle_i = pos *
 * theta^(-2i/R); with mrope_section (t, h, w), sum = R/2, and positions [3, B, T]: interleaved as Qwen3.5 does (index i
 * takes axis h if i % 3 == 1 and i < 3*section[1], axis w if i % 3 == 2 and i < 3*section[2], else t). */
typedef struct gdn_qk_rmsnorm_rope_args {
  size_t struct_size;
  const gdn_tensor* q;         /* [B, T, Hq, D or 2D] float */
  const gdn_tensor* k;         /* [B, T, Hkv, D] float */
  const gdn_tensor* q_weight;  /* [D] float; NULL: 1 (0 when zero_centered) */
  const gdn_tensor* k_weight;  /* [D] float; NULL: likewise */
  const gdn_tensor* cos;       /* [B or 1, T, R] float, R even, R <= D */
  const gdn_tensor* sin;       /* as cos */
  const gdn_tensor* positions; /* [B or 1, T] or [3, B or 1, T] I32/I64; excludes cos and sin */
  const gdn_tensor* q_out;     /* OUTPUT [B, T, Hq, D] float */
  const gdn_tensor* k_out;     /* OUTPUT [B, T, Hkv, D] float */
  const gdn_tensor* gate_out;  /* OUTPUT [B, T, Hq, D] float, only with q_has_gate; NULL: gate not wanted */
  float eps;
  float theta;              /* with positions: > 0 (no default: models differ; Qwen3.5 has 1e7) */
  int32_t rotary_dim;       /* R, with positions */
  int32_t mrope_section[3]; /* all 0: plain RoPE */
  int32_t q_has_gate;
  int32_t zero_centered;
  int32_t num_threads;
  void* stream; /* as in gdn_rule_args */
} gdn_qk_rmsnorm_rope_args;
GDN_API gdn_status gdn_qk_rmsnorm_rope(const gdn_qk_rmsnorm_rope_args* args);

/* ---------------------------------------------------------------- plans, and why
 * The plan is a pure function of the arguments' shapes, dtypes and host metadata; data pointers may be NULL here. */
enum { GDN_OP_CHUNK_FORWARD = 0, GDN_OP_RECURRENT = 1 };
/* Writes a JSON object {op, impl, isa, threads, work_items, panel_v, block_tokens, scratch_bytes, ...,
 * options: [{panel_v, split_tokens, shares, predicted_us}] where the plan weighed several (best first),
 * candidates: [{impl, accepted, reason}]} as a NUL-terminated string, truncated to size; *needed (if not NULL) gets the
 * full size with the NUL. */
GDN_API gdn_status gdn_explain(int32_t op, const gdn_rule_args* args, char* json, size_t size, size_t* needed);
/* JSON: version, ABI, build (compiler, git), CPU name, cores, ISAs compiled / usable / active, threads, CUDA
 * architectures compiled, CUDA devices (with GDN_COUNT=1 in the environment also what split calls did on each). */
GDN_API gdn_status gdn_info(char* json, size_t size, size_t* needed);

/* Threads of the pool: n >= 1, or 0 for the default (GDN_NUM_THREADS, else the CPUs this process may use). */
GDN_API gdn_status gdn_set_num_threads(int32_t n);
GDN_API int32_t gdn_get_num_threads(void);
/* Caps the ISA for the whole process: "auto", "amx", "avx512", "avx2", "neon", "baseline"; refused if the CPU lacks it.
 * GDN_ISA in the environment does the same at load. */
GDN_API gdn_status gdn_set_isa(const char* name);
GDN_API const char* gdn_get_isa(void);
/* Measures, now and with num_threads threads (0: default), the fp32 multiply-add peak of the active ISA in GFLOP/s and
 * the memory copy rate in GB/s (bytes read + bytes written). NULL: not wanted. Takes about 0.2 s each. */
GDN_API gdn_status gdn_measure_peak(int32_t num_threads, double* fma_gflops, double* copy_gb_per_s);
/* Frees the pool threads' scratch memory (it grows on demand and is otherwise kept), and what the library's pools on
 * CUDA devices hold and no call in flight uses. */
GDN_API gdn_status gdn_release_memory(void);

#ifdef __cplusplus
#define GDN_INIT(args_struct) \
  { sizeof(args_struct) }
#else
#define GDN_INIT(args_struct) \
  { .struct_size = sizeof(args_struct) }
#endif

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* GDN_GDN_H_ */
