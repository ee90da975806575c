// SPDX-License-Identifier: MIT
// gdn_measure_peak: the ceilings that benchmarks divide by, measured in the same process and with the same threads.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "c_abi/last_error.h"
#include "cpu/dispatch.h"
#include "cpu/parallel.h"
#include "gdn/gdn.h"

namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Best of several rounds; every worker runs its own item for the whole round.
template <class F>
double best_round_seconds(int32_t threads, int rounds, F& item) {
  double best = 1e30;
  for (int r = 0; r < rounds; ++r) {
    const Clock::time_point begin = Clock::now();
    gdn::cpu::parallel_for(threads, threads, item);
    best = std::min(best, seconds_since(begin));
  }
  return best;
}

}  // namespace

extern "C" gdn_status gdn_measure_peak(int32_t num_threads, double* fma_gflops, double* copy_gb_per_s) {
  if (num_threads < 0) {
    return gdn::set_last_error(GDN_INVALID_ARGUMENT,
                               "measure_peak: argument 'num_threads': found a negative number, expected >= 0");
  }
  const int32_t threads = gdn::cpu::effective_threads(num_threads);
  if (fma_gflops != nullptr) {
    const gdn::cpu::IsaTable& table = gdn::cpu::isa_table(gdn::cpu::active_isa());
    constexpr int64_t kIterations = 4'000'000;
    std::atomic<double> sink{0};  // keeps the loops alive
    auto item = [&](int64_t i, int32_t) { sink.store(table.fma_loop(kIterations, 1e-3f * static_cast<float>(i + 1))); };
    const double best = best_round_seconds(threads, 7, item);
    *fma_gflops = 1e-9 * static_cast<double>(table.fma_loop_flop()) * kIterations * threads / best;
  }
  if (copy_gb_per_s != nullptr) {
    constexpr size_t kBytes = size_t{64} << 20;  // per thread and side: past every cache
    char* buffer = static_cast<char*>(std::malloc(2 * kBytes * static_cast<size_t>(threads)));
    if (buffer == nullptr) {
      return gdn::set_last_error(GDN_OUT_OF_MEMORY, "measure_peak: 128 MiB per thread could not be allocated");
    }
    std::memset(buffer, 1, 2 * kBytes * static_cast<size_t>(threads));
    auto item = [&](int64_t i, int32_t) {
      char* base = buffer + 2 * kBytes * static_cast<size_t>(i);
      std::memcpy(base, base + kBytes, kBytes);
    };
    const double best = best_round_seconds(threads, 5, item);
    *copy_gb_per_s = 2e-9 * static_cast<double>(kBytes) * threads / best;
    std::free(buffer);
  }
  return GDN_OK;
}
