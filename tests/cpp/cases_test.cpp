// SPDX-License-Identifier: MIT
// The shared case list (python/gdn/data/cases.json, fields in tests/README.md) through the C ABI against a recurrence
// in double of this file. Buffers are one element off alignment, outputs NaN-filled, guards around every buffer.
// Layouts with gaps, and cases that take a plain double loop seconds, are left to tests/python, which runs the whole
// list.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>
#include <sstream>

#include "gdn/gdn.h"
#include "guarded_buffer.h"
#include "json_reader.h"
#include "worst_errors.h"

namespace {

using Buffer = gdn_test::GuardedBuffer;
using gdn_test::Json;

constexpr double kMaxState = 4e6;
constexpr double kMaxWork = 8e6;  // tokens x Hv x K x V

const Json& document() {
  static const Json value = [] {
    const char* elsewhere =
        std::getenv("GDN_CASES");  // for programs that run on another machine than they were built on
    std::ifstream file(elsewhere != nullptr ? elsewhere : GDN_CASES_JSON);
    std::stringstream text;
    text << file.rdbuf();
    return gdn_test::JsonReader(text.str()).read();
  }();
  return value;
}

struct Case {
  const Json* json;
  const Json& get(const std::string& name) const {
    const Json& own = json->at(name);
    return own.present() ? own : document().at("defaults").at(name);
  }
  std::string text(const std::string& name, const std::string& otherwise = "") const {
    return get(name).present() ? get(name).text : otherwise;
  }
  double number(const std::string& name) const { return get(name).number; }
  int64_t integer(const std::string& name) const { return static_cast<int64_t>(get(name).number); }
  bool has(const std::string& name) const { return get(name).present(); }
  std::string id() const { return text("id"); }
};

int32_t dtype_of(const std::string& name) {
  if (name == "f32") return GDN_F32;
  if (name == "bf16") return GDN_BF16;
  if (name == "f16") return GDN_F16;
  throw std::runtime_error("dtype " + name);
}

struct Expected {
  std::vector<double> value;
  std::vector<bool> written;
  explicit Expected(int64_t n = 0) : value(static_cast<size_t>(n)), written(static_cast<size_t>(n)) {}
};

double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// One case: inputs, the call, what must come out.
class Trial {
 public:
  Trial(const Case& c, int32_t op) : c_(c), op_(op), engine_(std::hash<std::string>()(c.id())) {
    sizes();
    draw_tokens();
    draw_states();
    scalars();
    predict();
  }

  // The buffers are as before afterwards. False when the named implementation refuses; gdn_last_error says why.
  bool check(const char* impl = nullptr) {
    args_.impl = impl;
    for (auto& [name, buffer] : buffers_) buffer->remember();
    const gdn_status status = op_ == GDN_OP_CHUNK_FORWARD ? gdn_chunk_forward(&args_) : gdn_recurrent(&args_);
    if (impl != nullptr && status == GDN_UNSUPPORTED) return false;
    EXPECT_EQ(status, GDN_OK) << gdn_last_error();
    if (status != GDN_OK) return true;
    for (auto& [name, buffer] : buffers_) {
      const auto expected = expected_.find(name);
      const int64_t stray = buffer->stray(expected == expected_.end() ? std::vector<bool>() : expected->second.written);
      EXPECT_LT(stray, 0) << name << ": byte " << stray << " changed that belongs to nobody";
    }
    for (const auto& [name, expected] : expected_) compare(name, expected);
    for (auto& [name, buffer] : buffers_) buffer->restore();
    return true;
  }
  const gdn_rule_args& args() const { return args_; }

 private:
  Buffer& add(const std::string& name, int32_t dtype, std::vector<int64_t> shape) {
    return *(buffers_[name] = std::make_unique<Buffer>(dtype, std::move(shape)));
  }
  double normal() { return normal_(engine_); }
  double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(engine_); }

  void sizes() {
    B_ = c_.integer("B"), T_ = c_.integer("T"), Hk_ = c_.integer("Hk"), Hv_ = c_.integer("Hv");
    K_ = c_.integer("K"), V_ = c_.integer("V");
    varlen_ = c_.has("lens") || c_.has("lens_random");
    if (c_.has("lens_random")) {
      const std::vector<int64_t> r = c_.get("lens_random").integers();
      for (int64_t n = 0; n < r[0]; ++n) lens_.push_back(std::uniform_int_distribution<int64_t>(r[1], r[2])(engine_));
      T_ = std::accumulate(lens_.begin(), lens_.end(), int64_t{0});
    } else {
      lens_ = varlen_ ? c_.get("lens").integers() : std::vector<int64_t>(static_cast<size_t>(B_), T_);
    }
    N_ = static_cast<int64_t>(lens_.size());
  }

  // Unit vectors (times norm), with a common direction when cosine > 0.
  void fill_vectors(Buffer* out, bool is_key) {
    const std::string kind = c_.text("keys");
    const double cosine = kind == "cosine" ? c_.number("cosine") : 0;
    std::vector<std::vector<double>> base(static_cast<size_t>(Hk_), std::vector<double>(static_cast<size_t>(K_)));
    for (auto& b : base) {
      for (double& x : b) x = normal();
      normalise(&b, 1);
    }
    std::vector<double> x(static_cast<size_t>(K_));
    for (int64_t row = 0; row < B_ * T_ * Hk_; ++row) {
      const int64_t h = row % Hk_, t = row / Hk_ % T_;
      const std::vector<double>& b = base[static_cast<size_t>(h)];
      const bool burst = kind == "burst" && is_key && t >= 128 && t < 192;
      const double share = burst ? 0.9 : cosine;
      double norm = is_key ? c_.number("key_norm") : 1;
      for (double& e : x) e = kind == "positive" ? std::fabs(normal()) : normal();
      if (kind == "normal") norm = 0;
      if (kind == "tiny") norm = 1e-3;
      if (kind == "burst" && !burst) norm = 1;
      if (norm > 0) normalise(&x, 1);
      for (size_t i = 0; i < x.size(); ++i) {
        if (share > 0) x[i] = std::sqrt(share) * b[i] + std::sqrt(1 - share) * x[i];
        x[i] *= norm > 0 ? norm : c_.number("key_norm");
        if (kind == "one_hot") x[i] = static_cast<int64_t>(i) == h % K_;
        if (kind == "zero_rows" && t >= 1 && t < 4) x[i] = 0;
        out->set(row * K_ + static_cast<int64_t>(i), x[i]);
      }
    }
  }
  static void normalise(std::vector<double>* x, double norm) {
    double sum = 0;
    for (const double e : *x) sum += e * e;
    for (double& e : *x) e *= norm / std::sqrt(std::max(sum, 1e-60));
  }

  double draw_gate(int64_t t) {
    const std::string kind = c_.text("g");
    const double model = -std::log1p(std::exp(-normal())) / 16;
    if (kind == "zero") return 0;
    if (kind == "half_zero") return uniform(0, 1) < 0.5 ? 0 : model;
    if (kind == "const") return c_.number("g_lo");
    if (kind == "uniform") return uniform(c_.number("g_lo"), c_.number("g_hi"));
    if (kind == "strong_then_weak") return t % 64 < 10 ? -80 : -1e-3;
    if (kind == "very_negative") {
      const double r = uniform(0, 1);
      return r < 0.1 ? -1e4 : r < 0.2 ? -104 : r < 0.3 ? -88 : -1e-3;
    }
    return model;
  }

  void draw_tokens() {
    const std::string common = c_.text("dtype");
    const auto dtype = [&](const char* own) { return dtype_of(c_.text(own, common)); };
    fill_vectors(&add("q", dtype("q_dtype"), {B_, T_, Hk_, K_}), false);
    fill_vectors(&add("k", dtype("k_dtype"), {B_, T_, Hk_, K_}), true);
    Buffer& v = add("v", dtype("v_dtype"), {B_, T_, Hv_, V_});
    for (int64_t i = 0; i < v.count(); ++i) v.set(i, normal() * c_.number("v_scale"));
    add("o", dtype_of(c_.text("o_dtype", c_.text("q_dtype", common))), {B_, T_, Hv_, V_});
    const int32_t gates = dtype_of(c_.text("gate_dtype"));
    const std::string form = c_.text("gate_form");
    if (c_.text("g") != "absent" || form == "raw") {
      Buffer& g = add("g", gates, {B_, T_, Hv_});
      for (int64_t i = 0; i < g.count(); ++i) {
        const double log_gate = form == "raw" ? normal() * c_.number("a_scale") : draw_gate(i / Hv_ % T_);
        g.set(i, form == "linear" ? std::exp(log_gate) : log_gate);
      }
      args_.g = g.tensor();
    }
    if (form == "raw") {
      Buffer& a = add("A_log", GDN_F32, {Hv_});
      for (int64_t h = 0; h < Hv_; ++h) a.set(h, c_.number("A_log"));
      args_.A_log = a.tensor();
      if (c_.text("dt_bias") != "absent") {
        Buffer& bias = add("dt_bias", GDN_F32, {Hv_});
        for (int64_t h = 0; h < Hv_; ++h) bias.set(h, normal());
        args_.dt_bias = bias.tensor();
      }
    }
    if (c_.text("beta") != "absent") {
      Buffer& beta = add("beta", gates, {B_, T_, Hv_});
      const bool logits = c_.text("beta_form") != "value";
      for (int64_t i = 0; i < beta.count(); ++i) {
        beta.set(i, logits ? normal() * c_.number("a_scale") : uniform(c_.number("beta_lo"), c_.number("beta_hi")));
      }
      args_.beta = beta.tensor();
    }
    v_ = &v;
    args_.q = buffers_["q"]->tensor(), args_.k = buffers_["k"]->tensor();
    args_.v = v.tensor(), args_.o = buffers_["o"]->tensor();
    expected_["o"] = Expected(B_ * T_ * Hv_ * V_);
  }

  std::vector<int64_t> state_shape(std::vector<int64_t> leading) const {
    leading.insert(leading.end(), {Hv_, v_first() ? V_ : K_, v_first() ? K_ : V_});
    return leading;
  }
  bool v_first() const { return c_.text("state_layout") == "v_first"; }
  int64_t state_size() const { return Hv_ * K_ * V_; }

  const gdn_tensor* index(const std::string& name, const std::vector<int64_t>& values,
                          std::vector<int64_t> shape = {}) {
    if (shape.empty()) shape = {static_cast<int64_t>(values.size())};
    Buffer& b = add(name, c_.text("index_dtype") == "i64" ? GDN_I64 : GDN_I32, shape);
    for (size_t i = 0; i < values.size(); ++i) b.set(static_cast<int64_t>(i), static_cast<double>(values[i]));
    return b.tensor();
  }

  void draw_states() {
    const int32_t dtype = dtype_of(c_.text("state_dtype"));
    const std::string final_kind = c_.text("final");
    slots_ = c_.has("slots") ? c_.integer("slots") : N_;
    if (c_.text("initial") == "random") {
      Buffer& s = add(final_kind == "in_place" ? "final" : "initial", dtype, state_shape({slots_}));
      for (int64_t i = 0; i < s.count(); ++i) s.set(i, normal() * 0.1 * c_.number("v_scale"));
      for (const int64_t slot : c_.get("poison").integers()) {
        for (int64_t i = 0; i < state_size(); ++i) s.set(slot * state_size() + i, NAN);
      }
      args_.initial_state = s.tensor();
      initial_ = &s;
      if (final_kind == "in_place") args_.final_state = s.tensor();
    }
    if (final_kind == "separate") {
      const int64_t rows = c_.has("write") ? slots_ : N_;
      args_.final_state =
          add("final", dtype_of(c_.text("final_dtype", c_.text("state_dtype"))), state_shape({rows})).tensor();
    }
    if (args_.final_state != nullptr) expected_["final"] = Expected(buffers_["final"]->count());
    if (varlen_) {
      std::vector<int64_t> cu = {0};
      for (const int64_t n : lens_) cu.push_back(cu.back() + n);
      args_.cu_seqlens = index("cu_seqlens", cu);
    }
    if (c_.has("read")) args_.initial_state_indices = index("read", c_.get("read").integers());
    if (c_.has("write")) args_.final_state_indices = index("write", c_.get("write").integers());
    if (c_.has("has_initial")) args_.has_initial_state = index("has_initial", c_.get("has_initial").integers());
    if (c_.has("num_accepted")) args_.num_accepted = index("num_accepted", c_.get("num_accepted").integers());
    if (c_.has("token_slots")) {
      std::vector<int64_t> flat;
      for (const Json& row : c_.get("token_slots").items) {
        for (const int64_t slot : row.integers()) flat.push_back(slot);
      }
      token_slots_ = flat;
      args_.token_state_indices = index("token_slots", flat, {N_, static_cast<int64_t>(flat.size()) / N_});
    }
    if (c_.has("snapshots")) {
      S_ = c_.integer("snapshots");
      Buffer& b = add("snapshots", dtype, state_shape({N_, S_}));
      args_.snapshots = b.tensor();
      expected_["snapshots"] = Expected(b.count());
    }
    if (c_.has("checkpoint_every")) {
      every_ = c_.integer("checkpoint_every");
      int64_t rows = 0;
      for (const int64_t n : lens_) rows += n / every_;
      if (c_.has("checkpoint_slots")) rows = c_.integer("checkpoint_slots");
      Buffer& b = add("checkpoints", dtype_of(c_.text("checkpoint_dtype", c_.text("state_dtype"))),
                      state_shape({std::max<int64_t>(rows, 1)}));
      args_.checkpoints = b.tensor();
      args_.checkpoint_every = every_;
      expected_["checkpoints"] = Expected(b.count());
      if (c_.has("checkpoint_rows"))
        args_.checkpoint_indices = index("checkpoint_rows", c_.get("checkpoint_rows").integers());
    }
  }

  void scalars() {
    const auto choice = [&](const char* name, std::initializer_list<const char*> names) {
      const std::string value = c_.text(name);
      return static_cast<int32_t>(std::find(names.begin(), names.end(), value) - names.begin());
    };
    args_.gate_form = choice("gate_form", {"log", "linear", "raw"});
    args_.beta_form = choice("beta_form", {"value", "sigmoid", "sigmoid2"});
    args_.head_map = choice("head_map", {"grouped", "tiled"});
    args_.state_layout = choice("state_layout", {"k_first", "v_first"});
    args_.null_slots = choice("null_slots", {"negative", "non_positive"});
    args_.qk_l2norm = c_.number("qk_l2norm") != 0;
    args_.round_qk = c_.number("round_qk") != 0;
    args_.round_beta = c_.number("round_beta") != 0;
    args_.batch_invariant = c_.number("batch_invariant") != 0;
    args_.scale = static_cast<float>(c_.number("scale"));
  }

  // Rounded to the dtype of `like`.
  double rounded(double x, Buffer* like) {
    Buffer one(like->dtype(), {1});
    one.set(0, x);
    return one.get(0);
  }

  void predict() {
    std::vector<double> q(static_cast<size_t>(B_ * T_ * Hk_ * K_)), k(q.size());
    for (auto& [name, out] : {std::pair<const char*, std::vector<double>*>{"q", &q}, {"k", &k}}) {
      Buffer* in = buffers_[name].get();
      for (size_t i = 0; i < out->size(); ++i) (*out)[i] = in->get(static_cast<int64_t>(i));
      if (!args_.qk_l2norm) continue;
      for (size_t row = 0; row < out->size(); row += static_cast<size_t>(K_)) {
        double sum = 1e-6;
        for (size_t i = row; i < row + static_cast<size_t>(K_); ++i) sum += (*out)[i] * (*out)[i];
        for (size_t i = row; i < row + static_cast<size_t>(K_); ++i) {
          (*out)[i] /= std::sqrt(sum);
          if (args_.round_qk) (*out)[i] = rounded((*out)[i], in);
        }
      }
    }
    if (c_.text("final") == "in_place") {
      for (int64_t i = 0; i < initial_->count(); ++i)
        expected_["final"].value[static_cast<size_t>(i)] = initial_->get(i);
    }
    int64_t begin = 0, checkpoint = 0;
    for (int64_t n = 0; n < N_; ++n) {
      const int64_t first_row = varlen_ ? begin : n * T_;
      sequence(n, first_row, checkpoint, q, k);
      begin += lens_[static_cast<size_t>(n)];
      if (every_ > 0) checkpoint += lens_[static_cast<size_t>(n)] / every_;
    }
  }

  void sequence(int64_t n, int64_t first_row, int64_t checkpoint, const std::vector<double>& q,
                const std::vector<double>& k) {
    const int64_t length = lens_[static_cast<size_t>(n)], floor = args_.null_slots == GDN_NULL_NON_POSITIVE ? 1 : 0;
    const auto entry = [&](const char* name, int64_t otherwise) {
      return c_.has(name) ? static_cast<int64_t>(c_.get(name).items[static_cast<size_t>(n)].number) : otherwise;
    };
    const int64_t columns = static_cast<int64_t>(token_slots_.size()) / std::max<int64_t>(N_, 1);
    int64_t read = entry("read", n), write = entry("write", c_.text("final") == "in_place" ? read : n);
    bool null = c_.has("read") && read < floor;
    if (args_.final_state != nullptr && c_.has("write")) null = null || write < floor;
    if (columns > 0) {
      read = token_slots_[static_cast<size_t>(n * columns + entry("num_accepted", 1) - 1)];
      null = read < floor;
      write = -1;
    }
    Expected& o = expected_["o"];
    if (null) {
      for (int64_t i = first_row * Hv_ * V_; i < (first_row + length) * Hv_ * V_; ++i)
        o.written[static_cast<size_t>(i)] = true;
      return;
    }
    const bool carried = initial_ != nullptr && entry("has_initial", 1) != 0;
    const double scale = args_.scale != 0 ? args_.scale : 1 / std::sqrt(static_cast<double>(K_));
    std::vector<double> s(static_cast<size_t>(K_ * V_)), u(static_cast<size_t>(V_));
    for (int64_t h = 0; h < Hv_; ++h) {
      const auto put = [&](const char* name, int64_t row) {
        Expected& e = expected_[name];
        for (int64_t i = 0; i < K_; ++i) {
          for (int64_t j = 0; j < V_; ++j) {
            const auto at = static_cast<size_t>(state_at(row, h, i, j));
            e.value[at] = s[static_cast<size_t>(i * V_ + j)];
            e.written[at] = true;
          }
        }
      };
      for (int64_t i = 0; i < K_; ++i) {
        for (int64_t j = 0; j < V_; ++j) {
          s[static_cast<size_t>(i * V_ + j)] = carried ? initial_->get(state_at(read, h, i, j)) : 0;
        }
      }
      const int64_t kh = args_.head_map == GDN_HEADS_TILED ? h % Hk_ : h / (Hv_ / Hk_);
      for (int64_t t = 0; t < length; ++t) {
        const int64_t row = first_row + t, gate_at = row * Hv_ + h;
        const double* kt = &k[static_cast<size_t>((row * Hk_ + kh) * K_)];
        const double* qt = &q[static_cast<size_t>((row * Hk_ + kh) * K_)];
        step(kt, qt, gate(gate_at, h), beta(gate_at), gate_at * V_, scale, &s, &u, &o);
        if (S_ > 0) put("snapshots", n * S_ + t);
        if (columns > 0 && token_slots_[static_cast<size_t>(n * columns + t)] >= floor) {
          put("final", token_slots_[static_cast<size_t>(n * columns + t)]);
        }
        if (every_ > 0 && (t + 1) % every_ == 0) {
          const int64_t m = checkpoint + t / every_;
          const int64_t to =
              c_.has("checkpoint_rows") ? c_.get("checkpoint_rows").integers()[static_cast<size_t>(m)] : m;
          if (to >= floor || !c_.has("checkpoint_rows")) put("checkpoints", to);
        }
      }
      if (args_.final_state != nullptr && columns == 0) put("final", write);
    }
  }

  int64_t state_at(int64_t row, int64_t h, int64_t i, int64_t j) const {
    return (row * Hv_ + h) * K_ * V_ + (v_first() ? j * K_ + i : i * V_ + j);
  }
  double gate(int64_t at, int64_t h) {
    if (args_.g == nullptr) return 1;
    const double g = buffers_["g"]->get(at);
    if (args_.gate_form == GDN_GATE_LINEAR) return g;
    if (args_.gate_form == GDN_GATE_LOG) return std::exp(g);
    const double bias = args_.dt_bias != nullptr ? buffers_["dt_bias"]->get(h) : 0;
    return std::exp(-std::exp(buffers_["A_log"]->get(h)) * softplus(g + bias));
  }
  double beta(int64_t at) {
    if (args_.beta == nullptr) return 1;
    Buffer* b = buffers_["beta"].get();
    if (args_.beta_form == GDN_BETA_VALUE) return b->get(at);
    const double value = sigmoid(b->get(at)) * (args_.beta_form == GDN_BETA_SIGMOID2 ? 2 : 1);
    return args_.round_beta ? rounded(value, b) : value;
  }

  void step(const double* kt, const double* qt, double alpha, double beta_t, int64_t at, double scale,
            std::vector<double>* state, std::vector<double>* scratch, Expected* o) {
    double *s = state->data(), *u = scratch->data();
    std::fill(scratch->begin(), scratch->end(), 0.0);
    for (int64_t i = 0; i < K_; ++i) {
      for (int64_t j = 0; j < V_; ++j) {
        s[i * V_ + j] *= alpha;
        u[j] += s[i * V_ + j] * kt[i];
      }
    }
    for (int64_t j = 0; j < V_; ++j) u[j] = beta_t * (v_->get(at + j) - u[j]);
    double* out = &o->value[static_cast<size_t>(at)];
    for (int64_t i = 0; i < K_; ++i) {
      for (int64_t j = 0; j < V_; ++j) {
        s[i * V_ + j] += kt[i] * u[j];
        out[j] += scale * qt[i] * s[i * V_ + j];
      }
    }
    for (int64_t j = 0; j < V_; ++j) o->written[static_cast<size_t>(at + j)] = true;
  }

  void compare(const std::string& name, const Expected& expected) {
    const Json& contract = document().at("contracts").at(c_.text("contract"));
    Buffer& got = *buffers_[name];
    const bool is_o = name == "o";
    double bound = contract.at(is_o ? "o" : "state").number;
    // The expanding cases' bound is relative to an fp32 loop (tests/python); here: close to the recurrence at all.
    if (contract.at("loop_ratio").present()) bound = 1e-4;
    if (op_ == GDN_OP_RECURRENT && contract.at("recurrent").present()) bound = contract.at("recurrent").number;
    if (got.dtype() != GDN_F32) bound = std::max(bound, is_o ? 5e-3 : 4.5e-3);
    double error = 0, norm = 0, worst = -1;
    int64_t worst_at = 0;
    for (int64_t i = 0; i < got.count(); ++i) {
      if (!expected.written[static_cast<size_t>(i)]) continue;
      const double want = expected.value[static_cast<size_t>(i)], difference = std::fabs(got.get(i) - want);
      const double size = std::isnan(difference) ? INFINITY : difference;
      if (size > worst) worst = size, worst_at = i;
      error += size * size;
      norm += want * want;
    }
    if (norm > 0) {
      gdn_test::remember_error(std::string(args_.impl != nullptr ? args_.impl : "auto") + "." + c_.text("contract") +
                                   "." + (is_o ? "o" : "state"),
                               std::sqrt(error / norm));
    }
    EXPECT_LE(std::sqrt(error), bound * std::sqrt(norm))
        << name << ": relative L2 error " << std::sqrt(error / norm) << ", bound " << bound << "; worst at " << worst_at
        << ": found " << got.get(worst_at) << ", expected " << expected.value[static_cast<size_t>(worst_at)];
  }

  Case c_;
  int32_t op_;
  std::mt19937_64 engine_;
  std::normal_distribution<double> normal_;
  int64_t B_ = 0, T_ = 0, Hk_ = 0, Hv_ = 0, K_ = 0, V_ = 0, N_ = 0, S_ = 0, every_ = 0, slots_ = 0;
  bool varlen_ = false;
  std::vector<int64_t> lens_, token_slots_;
  std::map<std::string, std::unique_ptr<Buffer>> buffers_;
  std::map<std::string, Expected> expected_;
  Buffer *initial_ = nullptr, *v_ = nullptr;
  gdn_rule_args args_ = GDN_INIT(gdn_rule_args);
};

std::vector<Case> small_cases() {
  std::vector<Case> out;
  for (const Json& json : document().at("cases").items) {
    const Case c{&json};
    if (c.has("lens_random") || c.number("slow") != 0) continue;
    const double state = c.number("Hv") * c.number("K") * c.number("V");
    const double rows = std::max(c.number("B"), c.has("slots") ? c.number("slots") : 0.0);
    if (c.number("B") * c.number("T") * state <= kMaxWork && rows * state <= kMaxState) out.push_back(c);
  }
  return out;
}

#if !defined(GDN_TEST_ON_CUDA)  // cuda_rule_test.cpp has its own runs of the list
class Cases : public testing::TestWithParam<Case> {};

TEST_P(Cases, AgreeWithTheRecurrence) {
  for (const Json& op : GetParam().get("ops").items) {
    SCOPED_TRACE(op.text);
    Trial(GetParam(), op.text == "recurrent" ? GDN_OP_RECURRENT : GDN_OP_CHUNK_FORWARD).check();
  }
}

INSTANTIATE_TEST_SUITE_P(List, Cases, testing::ValuesIn(small_cases()),
                         [](const testing::TestParamInfo<Case>& each) { return each.param.id(); });
#endif

TEST(CaseList, MostCasesAreSmall) { EXPECT_GE(small_cases().size(), 150u); }

}  // namespace
