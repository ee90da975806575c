// SPDX-License-Identifier: MIT
// The Hopper chunk kernel on its own, without the library around it: errors against a naive fp64 token loop on the GPU, and times.
//   nvcc -O3 -std=c++20 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr -Isrc -Iinclude -cudart static
//        -Xptxas -v -o sm90_chunk_lab lab/sm90_chunk_lab.cu src/cuda/sm90/chunk_forward/schedule.cpp
//   sm90_chunk_lab           errors, then times        sm90_chunk_lab split        errors of split sequences
//   sm90_chunk_lab bench     times only                sm90_chunk_lab split_bench  their times
//   sm90_chunk_lab sweep COMMIT DATE   CSV: every schedule of 66 shapes, predicted and measured
//   sm90_chunk_lab one 1|2   one launch, for a profiler
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "cuda/sm90/chunk_forward/kernel.cuh"
#include "cuda/sm90/chunk_forward/schedule.h"
#include "cuda/sm90/chunk_forward/tensor_maps.h"

using namespace gdn::cuda;
using namespace gdn::cuda::sm90;
#define CHECK(x)                                                             \
  do {                                                                       \
    cudaError_t e_ = (x);                                                    \
    if (e_ != cudaSuccess) {                                                 \
      std::printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); \
      std::exit(1);                                                          \
    }                                                                        \
  } while (0)

// Block: (sequence, head); thread: value channel. fp64.
__global__ void reference(RuleParams p, double* o, double* state) {
  const int h = blockIdx.x % p.Hv, kh = h / (p.Hv / p.Hk), v = threadIdx.x;
  const int64_t n = blockIdx.x / p.Hv;
  SequenceInfo seq = sequence_info(p, n);
  double s[128];
  for (int k = 0; k < p.K; ++k)
    s[k] = seq.read_slot < 0
               ? 0.0
               : (double)load_float(p.initial_state.data, p.initial_state.dtype,
                                    seq.read_slot * p.initial_state.stride[0] + h * p.initial_state.stride[1] +
                                        k * p.initial_state.stride[2] + v * p.initial_state.stride[3]);
  for (int64_t t = seq.begin; t < seq.begin + seq.len; ++t) {
    auto at = [&](const TensorRef& x, int head, int d) {
      return (double)load_float(x.data, x.dtype, seq.batch * x.stride[0] + t * x.stride[1] + head * x.stride[2] + d);
    };
    double nq = 1, nk = 1;
    if (p.qk_l2norm) {
      nq = nk = 0;
      for (int k = 0; k < p.K; ++k) {
        nq += at(p.q, kh, k) * at(p.q, kh, k);
        nk += at(p.k, kh, k) * at(p.k, kh, k);
      }
      nq = rsqrt(nq + p.l2norm_eps);
      nk = rsqrt(nk + p.l2norm_eps);
    }
    double g = load_float(p.g.data, p.g.dtype, seq.batch * p.g.stride[0] + t * p.g.stride[1] + h),
           b = load_float(p.beta.data, p.beta.dtype, seq.batch * p.beta.stride[0] + t * p.beta.stride[1] + h);
    double e = exp(g), ks = 0;
    for (int k = 0; k < p.K; ++k) {
      s[k] *= e;
      ks += s[k] * at(p.k, kh, k) * nk;
    }
    double u = b * (at(p.v, h, v) - ks), out = 0;
    for (int k = 0; k < p.K; ++k) {
      s[k] += at(p.k, kh, k) * nk * u;
      out += s[k] * at(p.q, kh, k) * nq;
    }
    o[((seq.batch * p.T + t) * p.Hv + h) * p.V + v] = out * p.scale;
  }
  for (int k = 0; k < p.K; ++k) state[((n * p.Hv + h) * p.K + k) * p.V + v] = s[k];
}
__global__ void fill(float* f, __nv_bfloat16* x, int64_t n, uint32_t seed, float scale,
                     int kind) {  // kind 0: normal, 1: uniform [0,1)
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    float a = ((uint32_t)z >> 8) * (1.f / 16777216.f) + 1e-9f, b = (uint32_t)(z >> 40) * (1.f / 16777216.f);
    float r = (kind ? a : sqrtf(-2 * logf(a)) * cospif(2 * b)) * scale;
    if (f)
      f[i] = r;
    else
      x[i] = __float2bfloat16(r);
  }
}
// rows of D: mix = cosine-like correlation towards a fixed direction per head, then unit length (when unit)
float key_length = 1.f;
__global__ void shape_keys(__nv_bfloat16* x, int64_t rows, int D, int H, float mix, int unit, float length = 1.f) {
  for (int64_t r = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; r < rows; r += (int64_t)gridDim.x * blockDim.x) {
    float s = 0, v[128];
    for (int d = 0; d < D; ++d) {
      float base = ((d * 37 + (int)(r % H) * 11) % 17 - 8) / 5.f;
      v[d] = (1 - mix) * __bfloat162float(x[r * D + d]) + mix * base;
      s += v[d] * v[d];
    }
    float f = unit ? rsqrtf(s) * length : 1.f;
    for (int d = 0; d < D; ++d) x[r * D + d] = __float2bfloat16(v[d] * f);
  }
}
__global__ void gates(float* g, int64_t n, int H, float mul, int quarter) {
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    float z = g[i];
    g[i] = quarter && (i % H) % 4 == 1 ? 0.f : -log1pf(expf(-z)) * mul;
  }
}
__global__ void compare(const __nv_bfloat16* o, const double* ref, int64_t n, double* sums) {
  double a = 0, b = 0;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    double x = __bfloat162float(o[i]), r = ref[i];
    double d = x - r;
    if (!(d == d)) d = 1e30;
    a += d * d;
    b += r * r;
  }
  atomicAdd(sums, a);
  atomicAdd(sums + 1, b);
}
__global__ void compare_f(const float* o, const double* ref, int64_t n, double* sums) {
  double a = 0, b = 0;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    double d = o[i] - ref[i];
    if (!(d == d)) d = 1e30;
    a += d * d;
    b += ref[i] * ref[i];
  }
  atomicAdd(sums, a);
  atomicAdd(sums + 1, b);
}

struct Problem {
  RuleParams p;
  std::vector<int> lens;
  bool dense;
  __nv_bfloat16 *q, *k, *v, *o;
  float *g, *b, *h0, *ht;
  int* cu;
};
template <class X>
X* alloc(int64_t n) {
  X* p;
  CHECK(cudaMalloc(&p, n * sizeof(X) + 4096));
  CHECK(cudaMemset(p, 0xff, n * sizeof(X) + 4096));
  return p;
}
Problem make(std::vector<int> lens, int hk, int hv, float gmul, float mix, float beta_scale, bool dense, bool l2) {
  Problem P;
  P.lens = lens;
  P.dense = dense;
  RuleParams& p = P.p;
  int64_t T = 0;
  for (int l : lens) T += l;
  p.Hk = hk;
  p.Hv = hv;
  p.K = p.V = 128;
  p.N = lens.size();
  p.B = dense ? lens.size() : 1;
  p.T = dense ? lens[0] : T;
  p.scale = 0.08838834764831845f;
  p.l2norm_eps = 1e-6f;
  p.qk_l2norm = l2;
  P.q = alloc<__nv_bfloat16>(T * hk * 128);
  P.k = alloc<__nv_bfloat16>(T * hk * 128);
  P.v = alloc<__nv_bfloat16>(T * hv * 128);
  P.o = alloc<__nv_bfloat16>(T * hv * 128);
  P.g = alloc<float>(T * hv);
  P.b = alloc<float>(T * hv);
  P.h0 = alloc<float>(p.N * hv * 16384);
  P.ht = alloc<float>(p.N * hv * 16384);
  P.cu = alloc<int>(p.N + 1);
  fill<<<512, 256>>>(nullptr, P.q, T * hk * 128, 1, 1, 0);
  fill<<<512, 256>>>(nullptr, P.k, T * hk * 128, 2, 1, 0);
  fill<<<512, 256>>>(nullptr, P.v, T * hv * 128, 3, 1, 0);
  shape_keys<<<512, 128>>>(P.q, T * hk, 128, hk, 0, !l2);
  shape_keys<<<512, 128>>>(P.k, T * hk, 128, hk, mix, !l2, key_length);
  fill<<<512, 256>>>(P.g, nullptr, T * hv, 4, 1, 0);
  gates<<<512, 256>>>(P.g, T * hv, hv, gmul, 1);
  fill<<<512, 256>>>(P.b, nullptr, T * hv, 5, beta_scale, 1);
  fill<<<512, 256>>>(P.h0, nullptr, p.N * hv * 16384, 6, 1, 0);
  std::vector<int> cu(1, 0);
  for (int l : lens) cu.push_back(cu.back() + l);
  CHECK(cudaMemcpy(P.cu, cu.data(), cu.size() * 4, cudaMemcpyHostToDevice));
  auto t4 = [&](void* d, int h, int dt) {
    TensorRef r;
    r.data = d;
    r.dtype = dt;
    r.stride[0] = p.T * h * 128;
    r.stride[1] = h * 128;
    r.stride[2] = 128;
    r.stride[3] = 1;
    return r;
  };
  p.q = t4(P.q, hk, GDN_BF16);
  p.k = t4(P.k, hk, GDN_BF16);
  p.v = t4(P.v, hv, GDN_BF16);
  p.o = t4(P.o, hv, GDN_BF16);
  p.g = t4(P.g, hv, GDN_F32);
  p.g.stride[0] = p.T * hv;
  p.g.stride[1] = hv;
  p.g.stride[2] = 1;
  p.beta = p.g;
  p.beta.data = P.b;
  p.initial_state = t4(P.h0, hv, GDN_F32);
  p.initial_state.stride[0] = hv * 16384;
  p.initial_state.stride[1] = 16384;
  p.initial_state.stride[2] = 128;
  p.initial_state.stride[3] = 1;
  p.final_state = p.initial_state;
  p.final_state.data = P.ht;
  p.initial_slots = p.final_slots = p.N;
  if (!dense) {
    p.cu_seqlens.data = P.cu;
    p.cu_seqlens.dtype = GDN_I32;
    p.cu_seqlens.stride[0] = 1;
    p.cu_seqlens.size = p.N + 1;
  }
  CHECK(cudaDeviceSynchronize());
  return P;
}
void release(Problem& P) {
  for (void* x :
       {(void*)P.q, (void*)P.k, (void*)P.v, (void*)P.o, (void*)P.g, (void*)P.b, (void*)P.h0, (void*)P.ht, (void*)P.cu})
    cudaFree(x);
}
int segment_chunks = 0, segment_exact = 0;  // splitting; 0: none
int line_ctas = 0;                          // shares of the wrap-around schedule; 0: a CTA per work
template <class T>
void launch_t(const KernelParams& kp, int64_t ctas, cudaStream_t s, bool after_segments = false) {
  auto k = chunk_forward_kernel<T>;
  static bool once = false;
  if (!once) {
    CHECK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes<T>));
    once = true;
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = (unsigned)ctas;
  config.blockDim = T::kThreads;
  config.dynamicSmemBytes = kSmemBytes<T>;
  config.stream = s;
  config.attrs = &overlap;
  config.numAttrs = after_segments;
  CHECK(cudaLaunchKernelEx(&config, k, kp));
}
void launch(const Problem& P, int splits, cudaStream_t s = 0) {
  static KernelParams kp;
  kp.rule = P.p;
  kp.v_splits = splits;
  const RuleParams& p = P.p;
  if (encode_tensor_map(&kp.q, p.q, p.B, p.T, p.Hk, 128) | encode_tensor_map(&kp.k, p.k, p.B, p.T, p.Hk, 128) |
      encode_tensor_map(&kp.v, p.v, p.B, p.T, p.Hv, 128) | encode_tensor_map(&kp.o, p.o, p.B, p.T, p.Hv, 128)) {
    std::printf("encode failed\n");
    std::exit(1);
  }
  int64_t segments = p.N;
  kp.segments.chunks = segment_chunks;
  if (segment_chunks > 0) {
    static char* memory = nullptr;
    static int64_t held = 0;
    segments = p.N + p.T * p.B / (64 * segment_chunks);
    const int64_t items = segments * p.Hv, need = items * (kLocalBytes * 2 + kTransitionBytes + 4 + 8);
    if (need > held) {
      cudaFree(memory);
      CHECK(cudaMalloc(&memory, need));
      CHECK(cudaMemset(memory, 0xff, need));
      held = need;
    }
    kp.segments.counters = nullptr;
    kp.segments.exact = segment_exact;
    kp.segments.threshold = 10 * 1.4426950408889634f;
    kp.segments.transition = (uint8_t*)memory;
    kp.segments.local = (float4*)(memory + items * kTransitionBytes);
    kp.segments.window = (int32_t*)(memory + items * (kTransitionBytes + kLocalBytes * 2));
    kp.segments.started = kp.segments.window + items;
    kp.v_splits = 1;
    launch_t<Traits<__nv_bfloat16, 128, 2, false>>(kp, segments * p.Hv * 2, s);
    kp.v_splits = splits;
  }
  kp.line.ctas = segment_chunks > 0 ? 0 : line_ctas;
  if (kp.line.ctas > 0) {
    static char* memory = nullptr;
    if (memory == nullptr) CHECK(cudaMalloc(&memory, 4096 + 512 * kLocalBytes * 2 + (8 << 20)));
    const int group = p.Hv / p.Hk * splits;  // a divisor of it that costs no more than 3 % of the multiprocessors
    for (int d = group; d >= 1; --d) {
      if (group % d == 0 && line_ctas / d * d * 100 >= 97 * line_ctas) {
        kp.line.together = d;
        break;
      }
    }
    kp.line.ctas = line_ctas / kp.line.together * kp.line.together;
    kp.line.tag = 0x9E3779B97F4A7C15ull;
    kp.line.flags = (uint64_t*)memory;
    kp.line.states = (float4*)(memory + 4096);
    kp.line.works = (Work*)(memory + 4096 + 512 * kLocalBytes * 2);
  }
  const int64_t ctas = kp.line.ctas > 0 ? kp.line.ctas : segments * p.Hv * splits;
  kp.longest_first = p.N > 1 && segments * p.Hv * splits > 132;
  if (splits == 1)
    launch_t<Traits<__nv_bfloat16, 128, 2>>(kp, ctas, s, segment_chunks > 0);
  else
    launch_t<Traits<__nv_bfloat16, 128, 1>>(kp, ctas, s, segment_chunks > 0);
}
void check(const char* name, std::vector<int> lens, int hk, int hv, float gmul, float mix, float beta, bool dense,
           bool l2, int repeats = 0) {
  Problem P = make(lens, hk, hv, gmul, mix, beta, dense, l2);
  int64_t T = 0;
  for (int l : lens) T += l;
  const int64_t no = T * hv * 128, ns = P.p.N * hv * 16384;
  double *ro = alloc<double>(no), *rs = alloc<double>(ns), *sums = alloc<double>(4);
  reference<<<(unsigned)(P.p.N * hv), 128>>>(P.p, ro, rs);
  CHECK(cudaDeviceSynchronize());
  for (int splits : {1, 2}) {
    CHECK(cudaMemset(P.o, 0xff, no * 2));
    CHECK(cudaMemset(P.ht, 0xff, ns * 4));
    CHECK(cudaMemset(sums, 0, 32));
    launch(P, splits);
    cudaError_t e = cudaDeviceSynchronize();
    if (e != cudaSuccess) {
      std::printf("%-28s splits %d: %s\n", name, splits, cudaGetErrorString(e));
      std::exit(1);
    }
    compare<<<256, 256>>>(P.o, ro, no, sums);
    compare_f<<<256, 256>>>(P.ht, rs, ns, sums + 2);
    double h[4];
    CHECK(cudaMemcpy(h, sums, 32, cudaMemcpyDeviceToHost));
    int differs = 0;
    if (repeats) {
      std::vector<uint16_t> a(no), b(no);
      cudaMemcpy(a.data(), P.o, no * 2, cudaMemcpyDeviceToHost);
      for (int r = 0; r < repeats; ++r) {
        launch(P, splits);
        cudaMemcpy(b.data(), P.o, no * 2, cudaMemcpyDeviceToHost);
        differs += a != b;
      }
    }
    std::printf("%-28s splits %d: o %.3e state %.3e%s\n", name, splits, std::sqrt(h[0] / h[1]), std::sqrt(h[2] / h[3]),
                repeats ? (differs ? "  DIFFERS between runs" : "  same bits") : "");
  }
  release(P);
  cudaFree(ro);
  cudaFree(rs);
  cudaFree(sums);
}
// Median of back-to-back launches, in microseconds.
float median_micros(const Problem& P, int splits, int rounds, float* least = nullptr) {
  static cudaStream_t s = nullptr;
  static cudaEvent_t a, b;
  if (s == nullptr) {
    cudaStreamCreate(&s);
    cudaEventCreate(&a);
    cudaEventCreate(&b);
  }
  std::vector<float> t;
  for (int r = 0; r < rounds; ++r) {
    launch(P, splits, s);
    cudaEventRecord(a, s);
    for (int i = 0; i < 3; ++i) launch(P, splits, s);
    cudaEventRecord(b, s);
    CHECK(cudaStreamSynchronize(s));
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    t.push_back(ms / 3 * 1e3f);
  }
  std::sort(t.begin(), t.end());
  if (least != nullptr) *least = t[0];
  return t[t.size() / 2];
}
void bench(const char* name, std::vector<int> lens, int hk, int hv) {
  Problem P = make(lens, hk, hv, 1 / 16.f, 0, 1, false, false);
  int64_t chunks = 0;
  for (int l : lens) chunks += (l + 63) / 64;
  chunks *= hv;
  for (int splits : {1, 2}) {
    float least;
    const float micros = median_micros(P, splits, 9, &least);
    std::printf("%-22s Hk %d Hv %d splits %d segments of %3d%s shares %d: %8.1f us (min %.1f), %.2f TFLOP/s\n", name,
                hk, hv, splits, segment_chunks, segment_exact ? " exact" : "", line_ctas, micros, least,
                chunks * 10.5e6 / micros / 1e6);
  }
  release(P);
}
// What the plan predicts and what it takes, for every schedule that it weighs; `rank` 0 is the one it chooses.
void sweep(const char* commit, const char* date) {
  const std::vector<std::vector<int>> patterns = {{32768},      {16384},       {8192},         {4096},
                                                  {2048},       {28672, 4096}, {16384, 16384}, {12288, 4096},
                                                  {6144, 2048}, {4096, 4096},  {1024, 7168}};
  std::printf("seqlens,h_v,rank,v_columns,segment_chunks,shares,predicted_us,median_us,exact_us,commit,date\n");
  for (int hv : {8, 16, 24, 32, 48, 64}) {
    for (const auto& lens : patterns) {
      Problem P = make(lens, 8, hv, 1 / 16.f, 0, 1, false, false);
      Workload work;
      work.sequences = static_cast<int64_t>(lens.size());
      work.longest = *std::max_element(lens.begin(), lens.end());
      for (int l : lens) work.tokens += l;
      work.heads = hv;
      work.key_heads = 8;
      std::string name;
      for (int l : lens) name += (name.empty() ? "" : "+") + std::to_string(l);
      const auto ranked = rank_schedules(work, static_cast<int64_t>(hv) * work.sequences <= 64);
      for (size_t i = 0; i < ranked.size(); ++i) {
        segment_chunks = static_cast<int>(ranked[i].segment_chunks);
        line_ctas = ranked[i].line_ctas;
        float micros[2];
        for (int exact : {0, 1}) {
          segment_exact = exact;
          micros[exact] =
              exact && segment_chunks == 0 ? micros[0] : median_micros(P, 3 - ranked[i].state_warpgroups, 3);
        }
        std::printf("%s,%d,%zu,%d,%d,%d,%.1f,%.1f,%.1f,%s,%s\n", name.c_str(), hv, i, 64 * ranked[i].state_warpgroups,
                    segment_chunks, line_ctas, ranked[i].micros, micros[0], micros[1], commit, date);
      }
      release(P);
    }
  }
}
int main(int argc, char** argv) {
  setvbuf(stdout, 0, _IONBF, 0);
  const std::string mode = argc > 1 ? argv[1] : "";
  if (argc > 2 && mode == "one") {
    Problem P = make({4096, 4096, 4096, 4096}, 16, 32, 1 / 16.f, 0, 1, false, false);
    launch(P, std::atoi(argv[2]));
    CHECK(cudaDeviceSynchronize());
    return 0;
  }
  if (mode == "split") {
    for (int exact : {0, 1}) {
      for (int chunks : {1, 3, 8, 16}) {
        segment_chunks = chunks;
        segment_exact = exact;
        std::printf("segments of %d chunks%s\n", chunks, exact ? ", exact" : "");
        check("4096", {4096}, 2, 4, 1 / 16.f, 0, 1, false, false, 3);
        check("4096 g = 0", {4096}, 2, 4, 0, 0, 1, false, false);
        check("4096 strong decay", {4096}, 2, 4, 10, 0, 1, false, false);
        check("correlated", {2048}, 2, 4, 0, 0.75f, 1, false, false);
        check("ragged", {1, 63, 64, 65, 0, 100, 3000, 7, 640}, 2, 4, 1 / 16.f, 0, 1, false, false, 3);
        check("ragged l2norm", {1, 63, 64, 65, 0, 100, 300, 7, 1025}, 2, 4, 1 / 4.f, 0, 1, false, true);
        check("dense", {1100, 1100}, 2, 4, 1 / 16.f, 0, 1, true, false);
        check("beta to 1.9", {1024}, 2, 4, 1 / 16.f, 0.3f, 1.9f, false, false);
        key_length = 1.3f;
        check("long keys (wide inverse)", {300}, 2, 4, 1 / 16.f, 0, 1.9f, false, false);
        key_length = 1.f;
      }
    }
    return 0;
  }
  if (mode == "split_bench") {
    for (int hv : {8, 16, 32, 64}) {
      for (int chunks : {0, 16, 32, 64, 128, 256}) {
        for (int exact : {0, 1}) {
          segment_chunks = chunks;
          segment_exact = exact;
          if (chunks > 0 || exact == 0) bench("32768", {32768}, hv / 4, hv);
        }
      }
    }
    segment_exact = 0;
    for (int chunks : {0, 4, 8, 16}) {
      segment_chunks = chunks;
      bench("2048", {2048}, 2, 8);
      bench("8192", {8192}, 2, 8);
      bench("28672+4096", {28672, 4096}, 4, 16);
    }
    return 0;
  }
  if (mode == "sweep") {
    sweep(argc > 2 ? argv[2] : "unknown", argc > 3 ? argv[3] : "unknown");
    return 0;
  }
  const bool quick = mode == "bench";
  for (int ctas : quick ? std::vector<int>{} : std::vector<int>{0, 1, 6, 7, 132}) {
    line_ctas = ctas;
    std::printf("shares: %d\n", ctas);
    check("one chunk", {64}, 1, 1, 1 / 16.f, 0, 1, true, false);
    check("two chunks", {128}, 1, 2, 1 / 16.f, 0, 1, true, false);
    check("512 dense B 2", {512, 512}, 2, 4, 1 / 16.f, 0, 1, true, false, 3);
    check("1024", {1024}, 2, 4, 1 / 16.f, 0, 1, false, false, 3);
    check("1024 g = 0", {1024}, 2, 4, 0, 0, 1, false, false);
    check("1024 strong decay", {1024}, 2, 4, 10, 0, 1, false, false);
    check("1024 g -100", {1024}, 2, 4, 300, 0, 1, false, false);
    check("correlated", {1024}, 2, 4, 0, 0.75f, 1, false, false);
    check("ragged", {1, 63, 64, 65, 0, 100, 300, 7}, 2, 4, 1 / 16.f, 0, 1, false, false, 20);
    check("ragged l2norm", {1, 63, 64, 65, 0, 100, 300, 7}, 2, 4, 1 / 16.f, 0, 1, false, true, 20);
    check("tail dense", {100, 100}, 2, 4, 1 / 16.f, 0, 1, true, false);
    check("beta to 1.9", {1024}, 2, 4, 1 / 16.f, 0.3f, 1.9f, false, false);
    key_length = 1.3f;
    check("long keys (wide inverse)", {300}, 2, 4, 1 / 16.f, 0, 1.9f, false, false, 3);
    key_length = 1.f;
    check("long keys, l2norm", {300}, 2, 4, 1 / 16.f, 0, 1.9f, false, true);
    check("many", std::vector<int>(64, 200), 4, 16, 1 / 16.f, 0, 1, false, true, 100);
    check("4096", {4096}, 2, 4, 1 / 16.f, 0, 1, false, false, 20);
  }
  for (int ctas : {0, 132}) {
    line_ctas = ctas;
    bench("8192x4", {8192, 8192, 8192, 8192}, 16, 32);
    bench("8192x4", {8192, 8192, 8192, 8192}, 16, 64);
    bench("8192x4", {8192, 8192, 8192, 8192}, 16, 48);
    bench("32768", {32768}, 16, 64);
    bench("1024x8", std::vector<int>(8, 1024), 2, 8);
    bench("1024x8", std::vector<int>(8, 1024), 16, 64);
    bench("2048", {2048}, 2, 8);
    bench("28672+4096", {28672, 4096}, 16, 64);
    bench("512..2560", {512, 1024, 1536, 2048, 2560, 512, 1024, 1536}, 16, 64);
    bench("200x64", std::vector<int>(64, 200), 16, 32);
  }
}
