// SPDX-License-Identifier: MIT
// Calls with lengths, gates and slots where segments could go wrong, and what the library's fp64 recurrence makes of them.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>

#include "cuda_device_tensors.h"
#include "gdn/gdn.h"
#include "worst_errors.h"

namespace gdn_test {

enum class Gate { kNone, kModel, kStrong, kBursts, kSlow, kHalf };

struct Shape {
  const char* name;
  std::vector<int64_t> lens;
  int64_t Hk, K, V;
  std::vector<Gate> heads;
  std::vector<int64_t> slots;  // of the sequences; -1: null
  int64_t checkpoint_every;
};

// Ragged lengths around a segment's and a chunk's; and sequences long enough that a plan wants segments.
inline const Shape kShapes[] = {
    {"ragged",
     {0, 1, 63, 64, 65, 700, 130, 1, 515, 0, 1000, 449},
     2,
     128,
     128,
     {Gate::kNone, Gate::kStrong, Gate::kModel, Gate::kBursts},
     {3, 0, 1, 2, 4, 12, 6, 7, 8, 9, 10, -1},
     128},
    {"long", {4113}, 1, 128, 128, {Gate::kNone, Gate::kSlow, Gate::kHalf}, {0}, 0},
    {"narrow", {2048, 100, 1999}, 1, 64, 64, {Gate::kNone, Gate::kModel}, {2, 1, 0}, 64},
    // More (sequence, head) pairs than a GPU has multiprocessors: the wrap-around schedule on Hopper.
    {"many",
     {0, 1, 64, 65, 300, 130, 200, 7, 0, 257, 100, 90},
     3,
     128,
     128,
     std::vector<Gate>(24, Gate::kModel),
     {3, 0, 1, 2, 4, 12, 6, 7, 8, -1, 10, 9},
     128},
    {"many_narrow",
     {1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 130, 2, 3, 1, 70, 64, 1, 1, 1, 1},
     2,
     64,
     128,
     std::vector<Gate>(20, Gate::kStrong),
     {23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, -1, 5, 4, 3, 2, 1, 0},
     64},
};
inline constexpr int kManyShapes[] = {3, 4};  // of kShapes

inline double draw_gate(Gate kind, int64_t t, int64_t len, std::mt19937* engine) {
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform(0, 1);
  switch (kind) {
    case Gate::kNone:
      return 0;
    case Gate::kModel:  // a real model's typical head: e^-10 within 3 to 4 chunks
      return -std::log1p(std::exp(-normal(*engine))) / 16;
    case Gate::kStrong:
      return -3 * uniform(*engine);
    case Gate::kBursts:
      return t % 256 < 3 ? -80 : -1e-3;
    case Gate::kSlow:  // e^-8 over the long sequence: never below the default threshold
      return -0.002;
    case Gate::kHalf:  // forgets nothing, then everything
      return t < len / 2 ? 0 : -0.3;
  }
  return 0;
}

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
inline float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline std::vector<uint16_t> to_bf16(const std::vector<float>& x) {
  std::vector<uint16_t> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = to_bf16(x[i]);
  return out;
}

inline gdn_tensor host(const void* data, int32_t dtype, const std::vector<int64_t>& shape) {
  gdn_tensor t;
  gdn_tensor_init(&t, const_cast<void*>(data), dtype, static_cast<int32_t>(shape.size()), shape.data());
  return t;
}

// Inputs of a shape, and what the fp64 recurrence makes of them.
struct Inputs {
  explicit Inputs(const Shape& s) : shape(s) {
    T = std::accumulate(s.lens.begin(), s.lens.end(), int64_t{0}) + 37;  // rows that belong to nobody
    N = static_cast<int64_t>(s.lens.size());
    Hv = static_cast<int64_t>(s.heads.size());
    slots = N + 1;
    std::mt19937 engine(7);
    const auto draw = [&](int64_t n, float low, float high) {
      std::uniform_real_distribution<float> uniform(low, high);
      std::vector<float> x(static_cast<size_t>(n));
      for (float& value : x) value = uniform(engine);
      return x;
    };
    q = draw(T * s.Hk * s.K, -1, 1), k = draw(T * s.Hk * s.K, -1, 1), v = draw(T * Hv * s.V, -1, 1);
    for (std::vector<float>* x : {&q, &k, &v}) {
      for (float& value : *x) value = from_bf16(to_bf16(value));
    }
    beta = draw(T * Hv, 0, 1);
    state = draw(slots * state_size(), -0.3f, 0.3f);
    g.assign(static_cast<size_t>(T * Hv), 0);
    cu = {0};
    for (size_t n = 0; n < s.lens.size(); ++n) {
      for (int64_t t = 0; t < s.lens[n]; ++t) {
        for (int64_t h = 0; h < Hv; ++h) {
          const double gate = draw_gate(s.heads[static_cast<size_t>(h)], t, s.lens[n], &engine);
          g[static_cast<size_t>((cu.back() + t) * Hv + h)] = static_cast<float>(gate);
        }
      }
      cu.push_back(static_cast<int32_t>(cu.back() + s.lens[n]));
      has_initial.push_back(n % 5 != 4);
      if (s.checkpoint_every > 0) checkpoints += s.lens[n] / s.checkpoint_every;
    }
    predict();
  }
  int64_t state_size() const { return Hv * shape.K * shape.V; }
  void predict() {
    const Shape& s = shape;
    want_o.assign(v.size(), 0);
    want_state.assign(state.begin(), state.end());
    want_checkpoints.assign(static_cast<size_t>(checkpoints * state_size()), kUntouched);
    const std::vector<int64_t> states = {slots, Hv, s.K, s.V};
    const gdn_tensor tq = host(q.data(), GDN_F32, {1, T, s.Hk, s.K}), tk = host(k.data(), GDN_F32, {1, T, s.Hk, s.K}),
                     tv = host(v.data(), GDN_F32, {1, T, Hv, s.V}), tg = host(g.data(), GDN_F32, {1, T, Hv}),
                     tbeta = host(beta.data(), GDN_F32, {1, T, Hv}), tcu = host(cu.data(), GDN_I32, {N + 1}),
                     to = host(want_o.data(), GDN_F64, {1, T, Hv, s.V}), tstate = host(state.data(), GDN_F32, states),
                     tfinal = host(want_state.data(), GDN_F64, states), tslots = host(s.slots.data(), GDN_I64, {N}),
                     thas = host(has_initial.data(), GDN_I32, {N}),
                     tcheck = host(want_checkpoints.data(), GDN_F64, {checkpoints, Hv, s.K, s.V});
    gdn_rule_args a = GDN_INIT(gdn_rule_args);
    a.q = &tq, a.k = &tk, a.v = &tv, a.g = &tg, a.beta = &tbeta, a.o = &to, a.cu_seqlens = &tcu;
    a.initial_state = &tstate, a.final_state = &tfinal;
    a.initial_state_indices = a.final_state_indices = &tslots;
    a.has_initial_state = &thas;
    a.qk_l2norm = 1;
    if (checkpoints > 0) a.checkpoints = &tcheck, a.checkpoint_every = s.checkpoint_every;
    a.impl = "reference_fp64";
    ASSERT_EQ(gdn_chunk_forward(&a), GDN_OK) << gdn_last_error();
  }

  static constexpr float kUntouched = 4242;
  const Shape& shape;
  int64_t T = 0, N = 0, Hv = 0, slots = 0, checkpoints = 0;
  std::vector<float> q, k, v, g, beta, state;
  std::vector<int32_t> cu, has_initial;
  std::vector<double> want_o, want_state, want_checkpoints;
};

inline const Inputs& inputs_of(int shape) {
  static std::unique_ptr<Inputs> made[std::size(kShapes)];
  std::unique_ptr<Inputs>& inputs = made[static_cast<size_t>(shape)];
  if (inputs == nullptr) inputs = std::make_unique<Inputs>(kShapes[shape]);
  return *inputs;
}

// Everything that a call wrote.
struct Results {
  std::vector<uint16_t> o;
  std::vector<float> state, checkpoints;
  bool operator==(const Results& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return o == other.o && same(state, other.state) && same(checkpoints, other.checkpoints);
  }
};

class SplitCall {
 public:
  explicit SplitCall(const Inputs& in)
      : in_(in),
        q_(GDN_BF16, {1, in.T, in.shape.Hk, in.shape.K}),
        k_(GDN_BF16, {1, in.T, in.shape.Hk, in.shape.K}),
        v_(GDN_BF16, {1, in.T, in.Hv, in.shape.V}),
        o_(GDN_BF16, {1, in.T, in.Hv, in.shape.V}),
        g_(GDN_F32, {1, in.T, in.Hv}),
        beta_(GDN_F32, {1, in.T, in.Hv}),
        state_(GDN_F32, {in.slots, in.Hv, in.shape.K, in.shape.V}),
        checkpoints_(GDN_F32, {in.checkpoints, in.Hv, in.shape.K, in.shape.V}),
        cu_(GDN_I32, {in.N + 1}),
        slots_(GDN_I64, {in.N}),
        has_initial_(GDN_I32, {in.N}) {
    q_.put(to_bf16(in.q)), k_.put(to_bf16(in.k)), v_.put(to_bf16(in.v));
    g_.put(in.g), beta_.put(in.beta), has_initial_.put(in.has_initial);
    args.q = q_.ptr(), args.k = k_.ptr(), args.v = v_.ptr(), args.o = o_.ptr();
    args.g = g_.ptr(), args.beta = beta_.ptr(), args.cu_seqlens = cu_.ptr();
    args.initial_state = args.final_state = state_.ptr();
    args.initial_state_indices = slots_.ptr();
    args.has_initial_state = has_initial_.ptr();
    if (in.checkpoints > 0) args.checkpoints = checkpoints_.ptr(), args.checkpoint_every = in.shape.checkpoint_every;
    args.qk_l2norm = 1;
    args.zero_tail = 1;
    args.stream = test_stream();
    reset(in.cu, in.shape.slots);
  }
  void reset(const std::vector<int32_t>& cu, const std::vector<int64_t>& slots) {
    cu_.put(cu), slots_.put(slots), state_.put(in_.state);
    o_.put(std::vector<uint16_t>(in_.v.size(), 0x7FC1));  // NaN
    checkpoints_.put(std::vector<float>(in_.want_checkpoints.size(), Inputs::kUntouched));
  }
  Results run() {
    reset(in_.cu, in_.shape.slots);
    EXPECT_EQ(gdn_chunk_forward(&args), GDN_OK) << gdn_last_error();
    return results();
  }
  // Sequence n as the only one of the call, where it lies in the batch.
  Results run_alone(size_t n) {
    reset({0, static_cast<int32_t>(in_.shape.lens[n])}, {in_.shape.slots[n]});
    gdn_rule_args a = args;
    gdn_tensor q = part(q_, n), k = part(k_, n), v = part(v_, n), o = part(o_, n), g = part(g_, n),
               beta = part(beta_, n);
    gdn_tensor cu = cu_.view(), slots = slots_.view(), has_initial = has_initial_.view();
    a.q = &q, a.k = &k, a.v = &v, a.o = &o, a.g = &g, a.beta = &beta, a.cu_seqlens = &cu;
    a.initial_state_indices = &slots, a.has_initial_state = &has_initial;
    cu.shape[0] = 2;
    slots.shape[0] = has_initial.shape[0] = 1;
    has_initial.data = static_cast<int32_t*>(has_initial.data) + n;
    EXPECT_EQ(gdn_chunk_forward(&a), GDN_OK) << gdn_last_error();
    return results();
  }
  Results results() const {
    EXPECT_EQ(cudaStreamSynchronize(test_stream()), cudaSuccess);
    return {o_.get<uint16_t>(), state_.get<float>(), checkpoints_.get<float>()};
  }
  int64_t workspace_bytes() const {
    int64_t bytes = -1;
    EXPECT_EQ(gdn_chunk_forward_workspace(&args, &bytes), GDN_OK) << gdn_last_error();
    return bytes;
  }
  gdn_rule_args args = GDN_INIT(gdn_rule_args);

 private:
  gdn_tensor part(const DeviceTensor& whole, size_t n) const {
    gdn_tensor t = whole.view();
    const int64_t size = t.dtype == GDN_F32 ? 4 : 2;
    t.data = static_cast<char*>(t.data) + in_.cu[n] * t.strides[1] * size;
    t.shape[1] = in_.shape.lens[n];
    return t;
  }
  const Inputs& in_;
  DeviceTensor q_, k_, v_, o_, g_, beta_, state_, checkpoints_, cu_, slots_, has_initial_;
};

// The contract of docs/precision.md for every head, and twice as much for a head of one sequence, which is a small sample.
class Comparison {
 public:
  Comparison(const Inputs& in, std::string mode) : in_(in), mode_(std::move(mode)) {}
  void check(const Results& got) {
    const Shape& s = in_.shape;
    for (int64_t h = 0; h < in_.Hv; ++h) {
      total_ = {};
      for (int64_t n = 0; n < in_.N; ++n) {
        Sums one;
        for (int64_t t = in_.cu[static_cast<size_t>(n)]; t < in_.cu[static_cast<size_t>(n) + 1]; ++t) {
          for (int64_t j = 0; j < s.V; ++j) {
            const auto at = static_cast<size_t>((t * in_.Hv + h) * s.V + j);
            one.add(static_cast<double>(from_bf16(got.o[at])), in_.want_o[at]);
          }
        }
        finish("o", 5e-3, h, n, one);
      }
      judge("o", 5e-3, h, total_);
      rows("state", got.state, in_.want_state, in_.slots, h);
      rows("checkpoints", got.checkpoints, in_.want_checkpoints, in_.checkpoints, h);
    }
    for (size_t i = static_cast<size_t>(in_.cu.back() * in_.Hv * s.V); i < got.o.size(); ++i)
      ASSERT_EQ(got.o[i], 0) << i;
  }

 private:
  struct Sums {
    double error = 0, norm = 0;
    void add(double found, double want) {
      const double difference = std::isnan(found) ? INFINITY : found - want;
      error += difference * difference;
      norm += want * want;
    }
  };
  void rows(const char* name, const std::vector<float>& got, const std::vector<double>& want, int64_t count,
            int64_t h) {
    const int64_t size = in_.shape.K * in_.shape.V;
    total_ = {};
    for (int64_t row = 0; row < count; ++row) {
      if (want[static_cast<size_t>(row * in_.Hv * size)] == double{Inputs::kUntouched}) {  // of a null sequence
        for (int64_t i = 0; i < size; ++i) {
          ASSERT_EQ(got[static_cast<size_t>((row * in_.Hv + h) * size + i)], Inputs::kUntouched) << name << " " << row;
        }
        continue;
      }
      Sums one;
      for (int64_t i = 0; i < size; ++i) {
        const auto at = static_cast<size_t>((row * in_.Hv + h) * size + i);
        one.add(static_cast<double>(got[at]), want[at]);
      }
      finish(name, 4.5e-3, h, row, one);
    }
    judge(name, 4.5e-3, h, total_);
  }
  void finish(const char* name, double bound, int64_t h, int64_t row, const Sums& one) {
    EXPECT_LE(std::sqrt(one.error), 2 * bound * std::sqrt(one.norm))
        << mode_ << ": " << name << " of head " << h << ", row " << row << ": relative error "
        << std::sqrt(one.error / one.norm);
    total_.error += one.error;
    total_.norm += one.norm;
  }
  void judge(const char* name, double bound, int64_t h, const Sums& sums) {
    if (sums.norm == 0) return;
    const double error = std::sqrt(sums.error / sums.norm);
    EXPECT_LE(error, bound) << mode_ << ": " << name << " of head " << h;
    remember_error("split." + mode_ + "." + name, error);
  }
  const Inputs& in_;
  std::string mode_;
  Sums total_;
};

}  // namespace gdn_test
