// SPDX-License-Identifier: MIT
// Checks and times the chunk and recurrent kernels of one ISA on one core, outside the library: no pool, no dispatch,
// no validation. Link it with chunk.cpp, recurrent.cpp and peak.cpp of that ISA, e.g. for carrying to another machine
//   I="-std=c++20 -O3 -Iinclude -Isrc -DGDN_ISA_NS=n_avx512 -DHWY_COMPILE_ONLY_STATIC"
//   for f in chunk recurrent peak; do g++ $I <ISA flags of CMakeLists.txt> -c src/cpu/isa/$f.cpp -o $f.o; done
//   g++ $I -static lab/chunk_lab.cpp chunk.o recurrent.o peak.o -o chunk_lab
// Usage: chunk_lab [check|time|all] [part of a timing's name]. Exit status 1 if a check fails.
#include "chunk_lab.h"

#include <ctime>

#include <algorithm>
#include <cstdlib>

#include "cpu/isa/kernels.h"

namespace {

namespace isa = gdn::cpu::GDN_ISA_NS;

double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Scratch {
  void* data = nullptr;
  int64_t bytes = 0;
  ~Scratch() { std::free(data); }
  void* get(int64_t n) {
    if (n > bytes) {
      std::free(data);
      data = std::aligned_alloc(4096, static_cast<size_t>((n + 4095) / 4096 * 4096));
      bytes = n;
    }
    return data;
  }
} scratch;

// heads and columns per item: 0 for all of a key head's.
void run(const gdn::RuleProblem& p, bool recurrent, int64_t heads = 0, int64_t columns = 0) {
  const int64_t per_key_head = p.Hv / p.Hk;
  if (heads == 0) heads = per_key_head;
  if (columns == 0) columns = p.V;
  for (int64_t n = 0; n < p.N; ++n) {
    for (int64_t key_head = 0; key_head < p.Hk; ++key_head) {
      for (int64_t h = 0; h < per_key_head; h += heads) {
        for (int64_t v = 0; v < p.V; v += columns) {
          const int64_t first = key_head * per_key_head;
          const gdn::cpu::RuleItem item{n, first + h, first + std::min(h + heads, per_key_head), v,
                                        std::min(v + columns, p.V)};
          if (recurrent) {
            isa::recurrent_item(p, item, scratch.get(isa::recurrent_scratch(p, item)));
          } else {
            isa::chunk_item(p, item, scratch.get(isa::chunk_scratch(p, item)));
          }
        }
      }
    }
  }
}

bool check(const lab::Case& c) {
  lab::Instance x;
  lab::build(c, &x);
  lab::reference(c, &x);
  run(x.p, c.recurrent);
  double worst_o = lab::error(&x.o, x.o_ref), worst_state = 0;
  if (c.final) worst_state = std::max(worst_state, lab::error(c.in_place ? &x.initial : &x.final, x.final_ref));
  if (c.snapshots) worst_state = std::max(worst_state, lab::error(&x.snapshots, x.snapshots_ref));
  if (c.checkpoint_every > 0) worst_state = std::max(worst_state, lab::error(&x.checkpoints, x.checkpoints_ref));
  // The finest split gives the same bits.
  lab::Instance y;
  lab::build(c, &y);
  run(y.p, c.recurrent, 1, 64);
  const bool same = x.o.bytes == y.o.bytes && x.final.bytes == y.final.bytes && x.initial.bytes == y.initial.bytes;
  const bool ok = worst_o <= c.limit && worst_state <= c.limit && same;
  std::printf("%-9s %-44s o %.2e  state %.2e  limit %.0e%s\n", ok ? "ok" : "FAILED", c.name.c_str(), worst_o,
              worst_state, c.limit, same ? "" : "  bits depend on the split");
  return ok;
}

lab::Case make(const std::string& name, void (*change)(lab::Case*)) {
  lab::Case c;
  c.name = name;
  change(&c);
  return c;
}

std::vector<lab::Case> cases() {
  using C = lab::Case;
  std::vector<C> list;
  list.push_back(make("plain", [](C*) {}));
  list.push_back(make("lengths 0 to 40", [](C* c) {
    c->lengths.clear();
    for (int64_t n = 0; n <= 40; ++n) c->lengths.push_back(n);
    c->Hk = c->Hv = 1;
  }));
  list.push_back(make("long, weak gate", [](C* c) {
    c->lengths = {2048};
    c->g_low = -0.01;
    c->Hk = c->Hv = 1;
  }));
  list.push_back(make("constant gate -5e-4", [](C* c) {
    c->lengths = {8192};
    c->g_low = c->g_high = -5e-4;
    c->Hk = c->Hv = 1;
    c->V = 32;
  }));
  list.push_back(make("no gate", [](C* c) { c->g_low = c->g_high = 0; }));
  list.push_back(make("gate -27.6 and below", [](C* c) {
    c->g_low = -120;
    c->lengths = {64, 200};
  }));
  list.push_back(make("positive gate", [](C* c) {
    c->g_low = 0;
    c->g_high = 0.3;
    c->lengths = {64};
  }));
  list.push_back(make("linear gate", [](C* c) { c->gate_form = GDN_GATE_LINEAR; }));
  list.push_back(make("raw gate, sigmoid", [](C* c) {
    c->gate_form = GDN_GATE_RAW;
    c->beta_form = GDN_BETA_SIGMOID;
  }));
  list.push_back(make("raw gate, 2 sigmoid, correlated", [](C* c) {
    c->gate_form = GDN_GATE_RAW;
    c->beta_form = GDN_BETA_SIGMOID2;
    c->cosine = 0.9;
    c->limit = 5e-5;
  }));
  list.push_back(make("cosine 0.9, beta 0.9 to 1, g = 0", [](C* c) {
    c->cosine = 0.9;
    c->beta_low = 0.9;
    c->g_low = 0;
    c->lengths = {1024};
  }));
  list.push_back(make("cosine 0.9, beta 1.9 to 2, g = 0", [](C* c) {
    c->cosine = 0.9;
    c->beta_low = 1.9;
    c->beta_high = 2;
    c->g_low = 0;
    c->lengths = {1024};
    c->limit = 5e-5;
  }));
  list.push_back(make("key norm 3, g near -2.2", [](C* c) {
    c->key_norm = 3;
    c->g_low = -2.3;
    c->g_high = -2.1;
    c->lengths = {64};
    c->limit = 5e-5;
  }));
  list.push_back(make("L2 norm", [](C* c) {
    c->l2norm = true;
    c->key_norm = 7;
  }));
  list.push_back(make("tiled heads, Hv = 3 Hk", [](C* c) {
    c->tiled = true;
    c->Hv = 6;
  }));
  list.push_back(make("grouped, Hv = 3 Hk, checkpoints of 5", [](C* c) {
    c->Hv = 6;
    c->checkpoint_every = 5;
  }));
  list.push_back(make("checkpoints of 64", [](C* c) {
    c->checkpoint_every = 64;
    c->lengths = {200, 63, 64, 0, 1};
  }));
  list.push_back(make("in place, V-first", [](C* c) { c->in_place = c->v_first = true; }));
  list.push_back(make("no initial state", [](C* c) { c->initial = false; }));
  list.push_back(make("no final state", [](C* c) { c->final = false; }));
  for (const auto& [K, V] : {std::pair<int64_t, int64_t>{1, 1},
                             {3, 5},
                             {100, 36},
                             {64, 192},
                             {192, 100},
                             {512, 17},
                             {97, 512},
                             {256, 256}}) {
    C c;
    c.K = K;
    c.V = V;
    c.Hk = 1;
    c.Hv = 2;
    c.v_first = K % 2 == 1;
    c.lengths = {29, 2};
    c.name = "K " + std::to_string(K) + " V " + std::to_string(V) + (c.v_first ? " V-first" : "");
    list.push_back(c);
  }
  for (const int32_t dtype : {GDN_BF16, GDN_F16}) {
    C c;
    c.io = dtype;
    c.limit = dtype == GDN_BF16 ? 3e-3 : 4e-4;
    c.name = dtype == GDN_BF16 ? "bf16 q k v o" : "f16 q k v o";
    list.push_back(c);
    c.state = c.gate_dtype = dtype;
    c.name += ", state, gates";
    list.push_back(c);
    c.v_first = true;
    c.l2norm = true;
    c.in_place = true;
    c.name += ", V-first, L2, in place";
    list.push_back(c);
  }
  // The same through the token loop, and what only it has.
  const size_t chunked = list.size();
  for (size_t i = 0; i < chunked; ++i) {
    C c = list[i];
    c.recurrent = true;
    c.name = "recurrent: " + c.name;
    list.push_back(c);
  }
  for (int variant = 0; variant < 12; ++variant) {
    C c;
    c.recurrent = true;
    c.v_first = variant % 2 == 1;
    c.state = variant / 2 % 3 == 0 ? GDN_F32 : variant / 2 % 3 == 1 ? GDN_BF16 : GDN_F16;
    c.limit = c.state == GDN_F32 ? 5e-6 : c.state == GDN_BF16 ? 3e-3 : 4e-4;
    const std::string suffix = std::string(c.v_first ? ", V-first" : "") + ", state dtype " + std::to_string(c.state);
    if (variant < 6) {
      c.lengths = {1, 1, 1};
      c.in_place = variant % 3 == 0;
      c.name = "recurrent: decode" + suffix;
    } else {
      c.lengths = {4, 0, 5};
      c.token_slots = true;
      c.snapshots = variant % 2 == 0;
      c.name = "recurrent: verify" + suffix;
    }
    list.push_back(c);
  }
  return list;
}

// -- timing
double fma_peak() {
  double best = 0;
  for (int round = 0; round < 5; ++round) {
    constexpr int64_t kIterations = 3'000'000;
    const double begin = cpu_seconds();
    volatile double sink = isa::fma_loop(kIterations, 0.0f);
    (void)sink;
    const double seconds = cpu_seconds() - begin;
    best = std::max(best, static_cast<double>(kIterations * isa::fma_loop_flop()) / seconds);
  }
  return best;
}

std::string only;  // time cases whose name has this

void time_case(const char* name, const lab::Case& c, double peak, int rounds) {
  if (std::string(name).find(only) == std::string::npos) return;
  lab::Instance x;
  lab::build(c, &x);
  run(x.p, c.recurrent);
  double best = HUGE_VAL;
  for (int round = 0; round < rounds; ++round) {
    const double begin = cpu_seconds();
    run(x.p, c.recurrent);
    best = std::min(best, cpu_seconds() - begin);
  }
  const double units = static_cast<double>(x.p.T * x.p.Hv);
  const double flop = 6.0 * static_cast<double>(x.p.K * x.p.V) * units;
  const double bytes = 2.0 * static_cast<double>(x.p.N * x.p.Hv * x.p.K * x.p.V * gdn::dtype_bytes(c.state));
  std::printf("%-44s %8.3f us per token and head  %7.1f GFLOP/s  %5.1f %% of peak  state %6.1f GB/s\n", name,
              1e6 * best / units, 1e-9 * flop / best, 100 * flop / best / peak, 1e-9 * bytes / best);
}

void time_all() {
  const double peak = fma_peak();
  std::printf("fp32 FMA peak, one core: %.1f GFLOP/s\n", 1e-9 * peak);
  for (const int32_t io : {GDN_F32, GDN_BF16, GDN_F16}) {
    lab::Case c;
    c.Hk = 2;
    c.Hv = 4;
    c.pad = 0;
    c.io = io;
    const std::string dtype = io == GDN_F32 ? "fp32" : io == GDN_BF16 ? "bf16" : "fp16";
    c.lengths = {4096};
    time_case(("chunk T 4096, r 2, " + dtype).c_str(), c, peak, 15);
    c.lengths = {512};
    time_case(("chunk T 512, r 2, " + dtype).c_str(), c, peak, 200);
    if (io == GDN_F16) break;
    c.lengths = {4096};
    c.Hv = 2;
    time_case(("chunk T 4096, r 1, " + dtype).c_str(), c, peak, 5);
    c.Hv = 4;
    c.l2norm = true;
    c.gate_form = GDN_GATE_RAW;
    c.beta_form = GDN_BETA_SIGMOID;
    time_case(("chunk T 4096, r 2, raw gate, L2, " + dtype).c_str(), c, peak, 5);
    c = lab::Case();
    c.io = io;
    c.pad = 0;
    for (const int64_t T : {64, 16, 8, 4, 3, 2, 1}) {
      c.lengths.assign(16, T);
      time_case(("chunk 16 x T " + std::to_string(T) + ", r 2, " + dtype).c_str(), c, peak, 20);
    }
    c.recurrent = true;
    c.lengths = {512};
    time_case(("recurrent T 512, " + dtype).c_str(), c, peak, 5);
    for (const bool v_first : {false, true}) {
      c.v_first = v_first;
      const std::string layout = v_first ? ", V-first, " : ", K-first, ";
      c.state = GDN_F32;
      c.in_place = true;
      c.Hk = 16;
      c.Hv = 32;
      c.lengths = {1};
      time_case(("decode N 1, Hv 32" + layout + dtype).c_str(), c, peak, 200);
      c.lengths.assign(32, 1);
      time_case(("decode N 32, Hv 32" + layout + dtype).c_str(), c, peak, 20);
      c.state = GDN_BF16;
      time_case(("decode N 32, Hv 32, bf16 state" + layout + dtype).c_str(), c, peak, 20);
      c.state = GDN_F32;
      c.in_place = false;
      c.snapshots = true;
      c.lengths = {4, 4, 4, 4};
      time_case(("verify 4 tokens, snapshots" + layout + dtype).c_str(), c, peak, 20);
      c.snapshots = false;
    }
  }
  lab::Case decay;
  decay.Hk = 1;
  decay.Hv = 2;
  decay.pad = 0;
  decay.lengths = {4096};
  decay.g_low = decay.g_high = -1;
  decay.beta_low = decay.beta_high = 0;
  time_case("chunk, decay into subnormals", decay, peak, 5);
  decay.recurrent = true;
  time_case("recurrent, decay into subnormals", decay, peak, 3);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  if (argc > 2) only = argv[2];
  bool ok = true;
  if (what != "time") {
    for (const lab::Case& c : cases()) ok = check(c) && ok;
    std::printf("%s\n", ok ? "all checks passed" : "CHECKS FAILED");
  }
  if (what != "check") time_all();
  return ok ? 0 : 1;
}
