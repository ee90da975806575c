// SPDX-License-Identifier: MIT
// One run on a CPU with AMX tells everything about the AMX prefill kernel: errors of every case of
// tests/cpp/amx_cases.h on real tiles, bits against thread counts, the tile and FMA ceilings of a core, time per token
// and head, and cycles by stage. Exits non-zero if a case fails. Arguments: "quick" (a small problem once), "time" (no
// error cases), "head" (the first timings only).
//
//   g++ -std=c++20 -O3 -Iinclude -Isrc -DGDN_AMX_STAGES -fno-math-errno -Wno-psabi -mavx512f -mavx512bw -mavx512dq
//   -mavx512vl -mavx512cd
//       -mavx512bf16 -mavx512vnni -mavx2 -mfma -mf16c -mbmi -mbmi2 -mlzcnt -mpclmul -maes -mamx-tile -mamx-bf16
//       -mprefer-vector-width=512 -static lab/amx_lab.cpp src/cpu/amx/chunk_amx.cpp
//       src/cpu/amx/rule_amx.cpp src/cpu/parallel.cpp -lpthread -o amx_lab
//
// With -DGDN_AMX_EMULATE and AVX2 flags it runs anywhere (software tiles: only the errors mean anything).
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "../tests/cpp/amx_cases.h"
#include "cpu/amx/chunk_kernel.h"
#include "cpu/amx/tile.h"
#include "cpu/parallel.h"

using namespace gdn;
using gdn::amx_cases::Case;

namespace {

double now_us() {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool request_tiles() {
#if defined(GDN_AMX_EMULATE)
  return true;
#else
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
}

void run(const RuleProblem& p, int32_t threads, bool exact) {
  Plan plan;
  (exact ? cpu::plan_amx_exact : cpu::plan_amx)(p, &plan);
  plan.threads = threads;
  const Status status = (exact ? cpu::run_amx_exact : cpu::run_amx)(p, plan);
  if (!status.ok()) std::printf("FAILED: %s\n", status.message().c_str());
}

// Best of `repeats`, in us.
template <class F>
double best_us(int repeats, F f) {
  double best = 1e30;
  for (int i = 0; i < repeats; ++i) {
    const double start = now_us();
    f();
    best = std::min(best, now_us() - start);
  }
  return best;
}

int check_cases(bool exact) {
  int failures = 0;
  std::printf("%-34s %10s %10s %10s %9s %9s  bits\n", exact ? "case (exact form, relative L2)" : "case (relative L2)",
              "o", "state", "checkpts", "o limit", "state l.");
  for (const Case& c : amx_cases::all_cases()) {
    const auto first = amx_cases::make_problem(c), second = amx_cases::make_problem(c);
    if (const char* why = cpu::refuse_amx(first->p)) {
      std::printf("%-34s REFUSED: %s\n", c.name.c_str(), why);
      ++failures;
      continue;
    }
    run(first->p, 1, exact);
    run(second->p, 16, exact);
    bool same = true;
    for (size_t i = 0; i < first->tensors.size(); ++i)
      same = same && first->tensors[i]->memory == second->tensors[i]->memory;
    const amx_cases::Errors e = amx_cases::errors(first->p);
    const Case::Limits limit = exact ? c.exact_limits : c.limits;
    const bool good = same && e.o <= limit.o && e.state <= limit.state && e.checkpoint <= limit.state;
    failures += good ? 0 : 1;
    std::printf("%-34s %10.2e %10.2e %10.2e %9.1e %9.1e  %s%s\n", c.name.c_str(), e.o, e.state, e.checkpoint, limit.o,
                limit.state, same ? "equal" : "DIFFER", good ? "" : "  FAIL");
    std::fflush(stdout);
  }
  return failures;
}

alignas(64) char g_tiles[16][1024];

// CPU model, CPUs, and which of them share a core (two threads on one core share its tile unit).
void print_machine() {
  char line[512];
  if (FILE* f = std::fopen("/proc/cpuinfo", "r")) {
    while (std::fgets(line, sizeof(line), f) != nullptr) {
      if (std::strncmp(line, "model name", 10) == 0) {
        std::printf("%s", line);
        break;
      }
    }
    std::fclose(f);
  }
  if (FILE* f = std::fopen("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "r")) {
    if (std::fgets(line, sizeof(line), f) != nullptr) std::printf("siblings of CPU 0: %s", line);
    std::fclose(f);
  }
  std::printf("CPUs online: %ld\n", sysconf(_SC_NPROCESSORS_ONLN));
}

// Ceilings of one core: tile products alone, with their loads from L1 (the 2 x 2 block of the kernel), and fp32 FMA.
void measure_ceilings() {
  namespace amx = cpu::amx;
  constexpr int kLoops = 100000;
  std::memset(g_tiles, 0, sizeof(g_tiles));
  amx::tile_config();
  const double products = best_us(5, [] {
    amx::block_zero();
    amx::block_load_a(g_tiles[0], g_tiles[1]);
    amx::tile_load<6>(g_tiles[2]);
    amx::tile_load<7>(g_tiles[3]);
    for (int i = 0; i < kLoops; ++i) {
      amx::tile_dp<0, 4, 6>();
      amx::tile_dp<1, 4, 7>();
      amx::tile_dp<2, 5, 6>();
      amx::tile_dp<3, 5, 7>();
    }
  });
  const double blocks = best_us(5, [] {
    amx::block_zero();
    for (int i = 0; i < kLoops; ++i) {
      amx::block_load_a(g_tiles[i % 4], g_tiles[i % 4 + 1]);
      amx::block_dp(g_tiles[8 + i % 4], g_tiles[8 + i % 4 + 1]);
    }
  });
  const double stored = best_us(5, [] {
    for (int i = 0; i < kLoops / 4; ++i) {
      amx::block_load(g_tiles[0], g_tiles[1], g_tiles[2], g_tiles[3]);
      for (int step = 0; step < 4; ++step) {
        amx::block_load_a(g_tiles[4], g_tiles[5]);
        amx::block_dp(g_tiles[8], g_tiles[9]);
      }
      amx::block_store(g_tiles[0], g_tiles[1], g_tiles[2], g_tiles[3]);
    }
  });
  amx::tile_release();
  amx::VecF acc[12];
  for (auto& a : acc) a = amx::splat(1.0f);
  const double fma = best_us(5, [&] {
    amx::VecF x = amx::splat(0.999f), y = amx::splat(1e-3f);
    amx::VecF a[12];
    for (int j = 0; j < 12; ++j) a[j] = acc[j];
    for (int i = 0; i < kLoops; ++i) {
#pragma GCC unroll 12
      for (int j = 0; j < 12; ++j) a[j] = a[j] * x + y;
    }
    for (int j = 0; j < 12; ++j) acc[j] = a[j];
  });
  float sink = 0;
  for (auto& a : acc) sink += a[0];
  const double flop = 4.0 * kLoops * 16384;
  std::printf(
      "one core: tiles alone %.0f GFLOP/s, with L1 loads %.0f, K = 128 blocks loaded and stored %.0f, fp32 FMA %.0f "
      "GFLOP/s (%.1f)\n",
      flop / products * 1e-3, flop / blocks * 1e-3, flop / stored * 1e-3, 12.0 * kLoops * 32 / fma * 1e-3,
      static_cast<double>(sink));
  const double start = now_us();
  const uint64_t cycles = __rdtsc();
  while (now_us() - start < 20000) {
  }
  std::printf("time stamp counter %.2f GHz\n", static_cast<double>(__rdtsc() - cycles) / (now_us() - start) * 1e-3);
}

void time_case(const char* label, const Case& c, std::initializer_list<int32_t> thread_counts, int repeats,
               bool exact = false) {
  const auto problem = amx_cases::make_problem(c);
  RuleProblem& p = problem->p;
  double tokens = 0;
  for (const int64_t n : c.lens) tokens += static_cast<double>(n);
  double one = 0;
  for (const int32_t threads : thread_counts) {
    p.num_threads = threads;
    Plan plan;
    cpu::plan_amx(p, &plan);
    run(p, threads, exact);
    const double us = best_us(repeats, [&] { run(p, threads, exact); });
    const double unit = us / (tokens * static_cast<double>(p.Hv));
    if (one == 0) one = us;
    std::printf(
        "%-40s threads %2d: %10.0f us, %.3f us per token and head, x threads %.3f, speed-up %.2f (items %lld, panel "
        "%lld)\n",
        label, threads, us, unit, unit * threads, one / us, static_cast<long long>(plan.work_items),
        static_cast<long long>(plan.panel_v));
    if (threads == 1) {
      uint64_t* stages = cpu::amx::stage_cycles();
      std::fill(stages, stages + cpu::amx::kNumStages, uint64_t{0});
      run(p, 1, exact);
      std::printf("    TSC cycles per chunk and head:");
      for (int i = 0; i < cpu::amx::kNumStages; ++i) {
        std::printf(" %s %.0f", cpu::amx::kStageNames[i],
                    static_cast<double>(stages[i]) / (tokens / 64 * static_cast<double>(p.Hv)));
      }
      std::printf("\n");
    }
    std::fflush(stdout);
  }
}

void measure_kernel(bool quick, bool head) {
  Case c;
  c.Hk = quick ? 1 : 16;
  c.Hv = 2 * c.Hk;
  const int64_t T = quick ? 256 : 4096;
  const int repeats = quick ? 1 : 7;
  c.initial = false;
  c.lens = {T};
  time_case("Hk 16 Hv 32 K 128 V 128 T 4096", c, {1, 2, 16}, repeats);
  Case single = c;
  single.Hk = single.Hv = 1;
  time_case("  one head", single, {1, 2, 4}, repeats);
  if (head) return;
  time_case("  exact form", c, {1, 2}, repeats, true);
  Case l2 = c;
  l2.l2norm = true;
  time_case("  L2 norm inside", l2, {1, 2}, repeats);
  Case raw = c;
  raw.gate_form = GDN_GATE_RAW;
  raw.beta_form = GDN_BETA_SIGMOID;
  raw.gate_dtype = GDN_BF16;
  time_case("  raw gates, sigmoid", raw, {1, 2}, repeats);
  Case eight = c;
  eight.Hk = std::max<int64_t>(1, c.Hk / 4);
  time_case("  Hk 4, eight value heads per key head", eight, {1, 2}, repeats);
  Case wide = c;
  wide.Hv = c.Hk;
  time_case("  Hv 16, one value head per key head", wide, {1, 2}, repeats);
  Case short_prompt = c;
  short_prompt.lens = {T / 8};
  time_case("  T 512", short_prompt, {1, 2}, repeats);
  Case ragged = c;
  ragged.varlen = true;
  ragged.initial = true;
  ragged.lens.assign(static_cast<size_t>(T / 128), 100);
  time_case("  sequences of 100, with states", ragged, {1, 2}, repeats);
  Case long_keys = c;
  long_keys.keys = amx_cases::Keys::kUnnormalised;
  long_keys.lens = {T / 16};
  time_case("  un-normalised keys (token loop), T 256", long_keys, {1, 2}, repeats);
}

}  // namespace

int main(int argc, char** argv) {
  if (!request_tiles()) {
    std::printf("no AMX: the kernel did not grant the tile state\n");
    return 2;
  }
  const std::string mode = argc > 1 ? argv[1] : "";
  print_machine();
  if (mode != "quick") measure_ceilings();
  measure_kernel(mode == "quick", mode == "head");
  if (mode == "time" || mode == "head") return 0;
  const int failures = check_cases(false) + check_cases(true);
  std::printf(failures == 0 ? "all cases passed\n" : "%d cases FAILED\n", failures);
  return failures == 0 ? 0 : 1;
}
