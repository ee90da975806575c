// SPDX-License-Identifier: MIT
// The operators' tests (ops_test.cpp, ops_conv_test.cpp: definitions in double, guard bytes, NaN-filled outputs) with every
// tensor on a GPU, and what only a GPU can get wrong. With --bandwidth: the rates of 9B-shape calls instead.
#include <cuda_runtime.h>

#include "cuda_device_tensors.h"
#include "gdn/gdn.h"

namespace gdn_test {

inline gdn_status cuda_causal_conv1d(const gdn_conv1d_args* args) {
  gdn_conv1d_args a = *args;
  DeviceTensors t;
  for (const gdn_tensor** p :
       {&a.x, &a.weight, &a.bias, &a.y, &a.cu_seqlens, &a.initial_state, &a.initial_state_indices, &a.has_initial_state,
        &a.final_state, &a.final_state_indices, &a.num_accepted})
    *p = t.add(*p);
  a.stream = test_stream();
  return t.run([&] { return gdn_causal_conv1d(&a); });
}
inline gdn_status cuda_gate(const gdn_gate_args* args) {
  gdn_gate_args a = *args;
  DeviceTensors t;
  for (const gdn_tensor** p : {&a.a, &a.b, &a.A_log, &a.dt_bias, &a.g, &a.beta}) *p = t.add(*p);
  a.stream = test_stream();
  return t.run([&] { return gdn_gate(&a); });
}
inline gdn_status cuda_rmsnorm_gated(const gdn_rmsnorm_gated_args* args) {
  gdn_rmsnorm_gated_args a = *args;
  DeviceTensors t;
  for (const gdn_tensor** p : {&a.x, &a.z, &a.weight, &a.out, &a.residual, &a.residual_out}) *p = t.add(*p);
  a.stream = test_stream();
  return t.run([&] { return gdn_rmsnorm_gated(&a); });
}
inline gdn_status cuda_qk_rmsnorm_rope(const gdn_qk_rmsnorm_rope_args* args) {
  gdn_qk_rmsnorm_rope_args a = *args;
  DeviceTensors t;
  for (const gdn_tensor** p :
       {&a.q, &a.k, &a.q_weight, &a.k_weight, &a.cos, &a.sin, &a.positions, &a.q_out, &a.k_out, &a.gate_out})
    *p = t.add(*p);
  a.stream = test_stream();
  return t.run([&] { return gdn_qk_rmsnorm_rope(&a); });
}

}  // namespace gdn_test

#define GDN_TEST_ON_CUDA
#define gdn_causal_conv1d gdn_test::cuda_causal_conv1d
#define gdn_gate gdn_test::cuda_gate
#define gdn_rmsnorm_gated gdn_test::cuda_rmsnorm_gated
#define gdn_qk_rmsnorm_rope gdn_test::cuda_qk_rmsnorm_rope
#include "ops_conv_test.cpp"  // NOLINT: their cases, run through the functions above
#include "ops_test.cpp"       // NOLINT
#undef gdn_causal_conv1d
#undef gdn_gate
#undef gdn_rmsnorm_gated
#undef gdn_qk_rmsnorm_rope

namespace {

using gdn_test::DeviceTensor;

class CudaOps : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!gdn_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  }
};

std::vector<float> random_floats(int64_t n, uint32_t seed) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> draw(-2, 2);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = draw(engine);
  return v;
}

// Token-major vectors of channels and many pieces of time are for calls of at least 2^22 elements (2^21 in fp32).
class ConvSizes : public IsaTest {};
#define gdn_causal_conv1d gdn_test::cuda_causal_conv1d
TEST_P(ConvSizes, VectorsAndPieces) {
  for (const int32_t dtype : kFloatDtypes)
    for (const Layout& layout : {kTokenMajor, Layout{}, kTimePadded}) {
      SCOPED_TRACE(dtype_name(dtype));
      ConvCase c{.B = 1, .D = 64, .T = 5003, .W = 4, .L = 3};
      if (!layout.order.empty()) c.T = dtype == GDN_F32 ? 33001 : 66001;
      c.x = c.y = c.w = c.state = dtype;
      c.x_layout = c.y_layout = layout;
      c.state_in_place = true;
      run_conv(c);
    }
}
TEST_P(ConvSizes, PackedSequencesOfEveryLength) {
  for (const Layout& layout : {kTokenMajor, Layout{}})
    for (const int64_t W : {2, 3, 4, 7}) {
      ConvCase c{.B = 1, .D = 64, .W = W, .L = W + 2, .x = GDN_BF16, .y = GDN_BF16, .state = GDN_BF16};
      const int32_t tokens = W == 4 && !layout.order.empty() ? 66000 : 5000;
      c.cu = {0};
      for (int32_t n = 0; c.cu.back() < tokens; ++n) c.cu.push_back(c.cu.back() + n * 37 % 301);
      if (c.cu.size() % 5 == 1) c.cu.push_back(c.cu.back());  // N must not be a multiple of 5, see `read`
      c.T = c.cu.back() + 5;
      const int64_t N = static_cast<int64_t>(c.cu.size()) - 1;
      c.slots = N + 3;
      for (int64_t n = 0; n < N; ++n) {
        c.read.push_back(n % 29 == 7 ? -1 : (n * 5 + 1) % N);
        c.has.push_back(n % 3 != 0);
      }
      c.state_in_place = true;
      c.x_layout = c.y_layout = layout;
      run_conv(c);
    }
}
TEST_P(ConvSizes, MoreSequencesThanAGridHasRows) {
  for (const bool packed : {false, true}) {
    ConvCase c{.D = 8, .T = 1, .W = 4, .L = 3, .x = GDN_BF16, .y = GDN_BF16};
    c.x_layout = c.y_layout = kTokenMajor;
    c.state_in_place = true;
    c.B = packed ? 1 : 70000;
    if (packed) {
      c.T = 70000;
      for (int32_t n = 0; n <= 70000; ++n) c.cu.push_back(n);
    }
    run_conv(c);
  }
}
#undef gdn_causal_conv1d
GDN_INSTANTIATE_ISAS(ConvSizes);

// One conv call over packed tokens with a pool of states, all on the device.
struct PackedConv {
  static constexpr int64_t kD = 48, kT = 200, kN = 4, kSlots = 6, kL = 3;
  DeviceTensor x{GDN_F32, {kT, kD}}, w{GDN_F32, {kD, 4}}, y{GDN_F32, {kT, kD}}, pool{GDN_F32, {kSlots, kD, kL}};
  DeviceTensor cu{GDN_I32, {kN + 1}}, slots{GDN_I64, {kN}}, accepted{GDN_I32, {kN}};
  gdn_tensor x_view = x.view(), y_view = y.view();
  gdn_conv1d_args args = GDN_INIT(gdn_conv1d_args);

  PackedConv() {
    x.put(random_floats(kT * kD, 1));
    w.put(random_floats(kD * 4, 2));
    for (gdn_tensor* t : {&x_view, &y_view}) {  // [1, D, T] over token-major memory
      t->ndim = 3;
      t->shape[0] = 1;
      t->shape[1] = kD;
      t->shape[2] = kT;
      t->strides[0] = kT * kD;
      t->strides[1] = 1;
      t->strides[2] = kD;
    }
    args.x = &x_view;
    args.weight = w.ptr();
    args.y = &y_view;
    args.cu_seqlens = cu.ptr();
    args.initial_state = args.final_state = pool.ptr();
    args.initial_state_indices = slots.ptr();
    args.activation = GDN_ACT_SILU;
    args.stream = gdn_test::test_stream();
  }
  void set(const std::vector<int32_t>& bounds, const std::vector<int64_t>& indices) {
    cu.put(bounds);
    slots.put(indices);
    pool.put(random_floats(kSlots * kD * kL, 3));
    y.put(std::vector<float>(kT * kD, -77.0f));
  }
  void synchronize() { ASSERT_EQ(cudaStreamSynchronize(gdn_test::test_stream()), cudaSuccess); }
  std::vector<float> results() const {
    std::vector<float> all = y.get<float>(), states = pool.get<float>();
    all.insert(all.end(), states.begin(), states.end());
    return all;
  }
};

TEST_F(CudaOps, CapturedConvSeesNewSequencesAndSlots) {
  const std::vector<int32_t> bounds[] = {{0, 50, 50, 120, 200}, {0, 1, 130, 131, 190}};
  const std::vector<int64_t> indices[] = {{0, 1, 2, 3}, {5, 3, -1, 0}};
  PackedConv c;
  std::vector<float> direct[2];
  for (int i = 0; i < 2; ++i) {
    c.set(bounds[i], indices[i]);
    ASSERT_EQ(gdn_causal_conv1d(&c.args), GDN_OK) << gdn_last_error();
    c.synchronize();
    direct[i] = c.results();
  }
  ASSERT_NE(direct[0], direct[1]);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(gdn_test::test_stream(), cudaStreamCaptureModeGlobal), cudaSuccess);
  ASSERT_EQ(gdn_causal_conv1d(&c.args), GDN_OK) << gdn_last_error();
  ASSERT_EQ(cudaStreamEndCapture(gdn_test::test_stream(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (const int i : {1, 0, 1}) {
    c.set(bounds[i], indices[i]);
    ASSERT_EQ(cudaGraphLaunch(exec, gdn_test::test_stream()), cudaSuccess);
    c.synchronize();
    EXPECT_EQ(c.results(), direct[i]);
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(CudaOps, ConvRepeatsAreBitIdentical) {
  PackedConv c;
  std::vector<float> first;
  for (int i = 0; i < 100; ++i) {
    c.set({0, 3, 90, 91, 200}, {4, 0, 2, 1});
    ASSERT_EQ(gdn_causal_conv1d(&c.args), GDN_OK) << gdn_last_error();
    c.synchronize();
    if (i == 0) first = c.results();
    ASSERT_EQ(c.results(), first);
  }
}

TEST_F(CudaOps, BadMetadataActsAsNull) {
  PackedConv c;
  const auto run = [&](const std::vector<int32_t>& bounds, const std::vector<int64_t>& indices) {
    c.set(bounds, indices);
    EXPECT_EQ(gdn_causal_conv1d(&c.args), GDN_OK) << gdn_last_error();
    c.synchronize();
    return c.results();
  };
  // A slot past the pool: zeros in y like a null slot's, no state touched.
  EXPECT_EQ(run({0, 50, 60, 120, 200}, {0, 6, 2, 3}), run({0, 50, 60, 120, 200}, {0, -1, 2, 3}));
  EXPECT_EQ(run({0, 50, 60, 120, 200}, {0, int64_t{1} << 40, 2, 3}), run({0, 50, 60, 120, 200}, {0, -1, 2, 3}));
  // Bounds past T or falling: the sequence is left out; nothing outside of the tensors is touched.
  const std::vector<float> bad = run({0, 50, 60, 120, 2000000000}, {0, 1, 2, 3});
  const std::vector<float> good = run({0, 50, 60, 120, 120}, {0, 1, 2, -1});
  EXPECT_EQ(bad, good);
  run({0, 150, 60, -5, 100}, {0, 1, 2, 3});
  run({-100, -50, -60, 300, 400}, {0, 1, 2, 3});
}

TEST_F(CudaOps, SplitsOfTimeAndKernelsGiveTheSameBits) {
  // Token-major vectors, token-major scalars (odd strides), channel-first vectors and the general kernel: one formula.
  constexpr int64_t kD = 64, kT = 40000;
  const std::vector<float> x = random_floats(kD * kT, 5);
  DeviceTensor w(GDN_F32, {kD, 4}), bias(GDN_F32, {kD});
  w.put(random_floats(kD * 4, 6));
  bias.put(random_floats(kD, 7));
  struct Strides {
    int64_t d, t;
  };
  std::vector<float> first;
  for (const Strides& s :
       {Strides{1, kD}, Strides{1, kD + 1}, Strides{kT, 1}, Strides{kT + 3, 1}, Strides{2 * kT, 2}}) {
    const int64_t span = (kD - 1) * s.d + (kT - 1) * s.t + 1;
    DeviceTensor in(GDN_F32, {span}), out(GDN_F32, {span});
    std::vector<float> memory(static_cast<size_t>(span), 0.0f);
    for (int64_t d = 0; d < kD; ++d)
      for (int64_t t = 0; t < kT; ++t) memory[size_t(d * s.d + t * s.t)] = x[size_t(d * kT + t)];
    in.put(memory);
    gdn_tensor in_view = in.view(), out_view = out.view();
    for (gdn_tensor* v : {&in_view, &out_view}) {
      v->ndim = 3;
      v->shape[0] = 1;
      v->shape[1] = kD;
      v->shape[2] = kT;
      v->strides[0] = span;
      v->strides[1] = s.d;
      v->strides[2] = s.t;
    }
    gdn_conv1d_args a = GDN_INIT(gdn_conv1d_args);
    a.x = &in_view;
    a.weight = w.ptr();
    a.bias = bias.ptr();
    a.y = &out_view;
    a.activation = GDN_ACT_SILU;
    a.stream = gdn_test::test_stream();
    ASSERT_EQ(gdn_causal_conv1d(&a), GDN_OK) << gdn_last_error();
    ASSERT_EQ(cudaStreamSynchronize(gdn_test::test_stream()), cudaSuccess);
    const std::vector<float> got = out.get<float>();
    std::vector<float> y(static_cast<size_t>(kD * kT));
    for (int64_t d = 0; d < kD; ++d)
      for (int64_t t = 0; t < kT; ++t) y[size_t(d * kT + t)] = got[size_t(d * s.d + t * s.t)];
    if (first.empty()) first = y;
    EXPECT_EQ(y, first) << "strides " << s.d << ", " << s.t;
  }
}

TEST_F(CudaOps, F64AndMixedDevicesAreRefusedByName) {
  DeviceTensor x(GDN_F32, {4, 8}), out(GDN_F32, {4, 8}), wide(GDN_I64, {4, 8});
  gdn_tensor f64 = wide.view();
  f64.dtype = GDN_F64;
  gdn_rmsnorm_gated_args a = GDN_INIT(gdn_rmsnorm_gated_args);
  a.x = &f64;
  a.out = out.ptr();
  EXPECT_EQ(gdn_rmsnorm_gated(&a), GDN_UNSUPPORTED);
  EXPECT_NE(std::string(gdn_last_error()).find("'x': found dtype F64"), std::string::npos) << gdn_last_error();
  Tensor host(GDN_F32, {8});
  a.x = x.ptr();
  a.weight = host.ptr();
  EXPECT_NE(gdn_rmsnorm_gated(&a), GDN_OK);
  EXPECT_NE(std::string(gdn_last_error()).find("'weight'"), std::string::npos) << gdn_last_error();
}

// ---- rates

// Median of graph replays of `call`, in microseconds; the buffers of a call are larger than the L2 cache.
template <class Call>
double median_us(const Call& call) {
  const cudaStream_t stream = gdn_test::test_stream();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  if (call() != GDN_OK || cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) != cudaSuccess) return -1;
  if (call() != GDN_OK || cudaStreamEndCapture(stream, &graph) != cudaSuccess) return -1;
  if (cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess) return -1;
  cudaEvent_t start = nullptr, stop = nullptr;
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  std::vector<float> times;
  for (int i = 0; i < 25; ++i) {
    float ms = 0;
    cudaEventRecord(start, stream);
    cudaGraphLaunch(exec, stream);
    cudaEventRecord(stop, stream);
    cudaEventSynchronize(stop);
    cudaEventElapsedTime(&ms, start, stop);
    if (i >= 5) times.push_back(ms * 1000);
  }
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  std::sort(times.begin(), times.end());
  return static_cast<double>(times[times.size() / 2]);
}
void report(const char* name, double us, size_t bytes) {
  if (us < 0) {
    std::printf("%-44s failed: %s\n", name, gdn_last_error());
  } else {
    std::printf("%-44s %9.1f us %8.0f GB/s\n", name, us, static_cast<double>(bytes) / us * 1e-3);
  }
}

void conv_rate(const char* name, int64_t B, int64_t D, int64_t T, bool token_major, bool states) {
  DeviceTensor x(GDN_BF16, {B, T, D}), y(GDN_BF16, {B, T, D}), w(GDN_BF16, {D, 4}), state(GDN_BF16, {B, D, 3});
  gdn_tensor xv = x.view(), yv = y.view();
  for (gdn_tensor* v : {&xv, &yv}) {
    v->shape[1] = D;
    v->shape[2] = T;
    v->strides[1] = token_major ? 1 : T;
    v->strides[2] = token_major ? D : 1;
  }
  gdn_conv1d_args a = GDN_INIT(gdn_conv1d_args);
  a.x = &xv;
  a.weight = w.ptr();
  a.y = &yv;
  if (states) a.initial_state = a.final_state = state.ptr();
  a.activation = GDN_ACT_SILU;
  a.stream = gdn_test::test_stream();
  report(name, median_us([&] { return gdn_causal_conv1d(&a); }),
         x.bytes() + y.bytes() + (states ? 2 * state.bytes() : 0));
}
void norm_rate(const char* name, int64_t rows, int64_t D, bool gate) {
  DeviceTensor x(GDN_BF16, {rows, D}), z(GDN_BF16, {rows, D}), out(GDN_BF16, {rows, D}), w(GDN_F32, {D});
  gdn_rmsnorm_gated_args a = GDN_INIT(gdn_rmsnorm_gated_args);
  a.x = x.ptr();
  a.z = gate ? z.ptr() : nullptr;
  a.weight = w.ptr();
  a.out = out.ptr();
  a.eps = 1e-6f;
  a.activation = gate ? GDN_ACT_SILU : GDN_ACT_NONE;
  a.stream = gdn_test::test_stream();
  report(name, median_us([&] { return gdn_rmsnorm_gated(&a); }), x.bytes() * (gate ? 3 : 2));
}
void gate_rate(const char* name, int64_t T, int64_t H) {
  DeviceTensor x(GDN_BF16, {T, H}), b(GDN_BF16, {T, H}), p(GDN_F32, {H}), g(GDN_F32, {T, H}), beta(GDN_F32, {T, H});
  gdn_gate_args a = GDN_INIT(gdn_gate_args);
  a.a = x.ptr();
  a.b = b.ptr();
  a.A_log = a.dt_bias = p.ptr();
  a.g = g.ptr();
  a.beta = beta.ptr();
  a.stream = gdn_test::test_stream();
  report(name, median_us([&] { return gdn_gate(&a); }), 2 * x.bytes() + 2 * g.bytes());
}
void rope_rate(const char* name, int64_t B, int64_t T) {
  constexpr int64_t kHq = 16, kHkv = 4, kD = 256;
  DeviceTensor q(GDN_BF16, {B, T, kHq, 2 * kD}), k(GDN_BF16, {B, T, kHkv, kD}), w(GDN_BF16, {kD});
  DeviceTensor positions(GDN_I64, {B, T}), q_out(GDN_BF16, {B, T, kHq, kD}), k_out(GDN_BF16, {B, T, kHkv, kD});
  DeviceTensor gate(GDN_BF16, {B, T, kHq, kD});
  gdn_qk_rmsnorm_rope_args a = GDN_INIT(gdn_qk_rmsnorm_rope_args);
  a.q = q.ptr();
  a.k = k.ptr();
  a.q_weight = a.k_weight = w.ptr();
  a.positions = positions.ptr();
  a.q_out = q_out.ptr();
  a.k_out = k_out.ptr();
  a.gate_out = gate.ptr();
  a.eps = 1e-6f;
  a.theta = 1e7f;
  a.rotary_dim = 64;
  a.q_has_gate = a.zero_centered = 1;
  a.stream = gdn_test::test_stream();
  report(name, median_us([&] { return gdn_qk_rmsnorm_rope(&a); }), 2 * (q.bytes() + k.bytes()));
}

int print_rates() {
  if (!gdn_test::has_cuda_device()) {
    std::printf("no CUDA device\n");
    return 0;
  }
  conv_rate("conv1d token-major T 32768 D 8192", 1, 8192, 32768, true, false);
  conv_rate("conv1d token-major T 32768 D 8192 state", 1, 8192, 32768, true, true);
  conv_rate("conv1d token-major 8 x 4096 D 8192", 8, 8192, 4096, true, true);
  conv_rate("conv1d channel-first T 32768 D 8192", 1, 8192, 32768, false, true);
  conv_rate("conv1d token-major T 2048 D 8192", 1, 8192, 2048, true, true);
  conv_rate("conv1d update B 1 D 8192", 1, 8192, 1, true, true);
  conv_rate("conv1d update B 256 D 8192", 256, 8192, 1, true, true);
  norm_rate("rmsnorm_gated 32768*32 x 128", 32768 * 32, 128, true);
  norm_rate("rmsnorm 32768 x 4096", 32768, 4096, false);
  norm_rate("rmsnorm_gated 32 x 128", 32, 128, true);
  gate_rate("gate 32768 x 32", 32768, 32);
  gate_rate("gate 1 x 32", 1, 32);
  rope_rate("qk_rmsnorm_rope T 32768 Hq 16 Hkv 4 D 256", 1, 32768);
  rope_rate("qk_rmsnorm_rope B 1 T 1", 1, 1);
  rope_rate("qk_rmsnorm_rope B 256 T 1", 256, 1);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--bandwidth") return print_rates();
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
