// SPDX-License-Identifier: MIT
// Ceilings of this machine, independent of libgdn: fp32 multiply-add rate per instruction set and memory copy rate.
// fma_peak <threads>: one line "<what> <value> <unit>" each. One static binary; unusable instruction sets are left out.
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr long kIterations = 20'000'000;
constexpr int kChains = 10;  // 4-5 cycles of latency times 2 per cycle
volatile float g_sink;

__attribute__((target("avx2,fma"))) void avx2_loop() {
  __m256 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm256_set1_ps(static_cast<float>(i));
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(1e-3f);
  for (long n = 0; n < kIterations; ++n) {
#pragma GCC unroll 10
    for (int i = 0; i < kChains; ++i) acc[i] = _mm256_fmadd_ps(acc[i], a, b);
  }
  for (int i = 1; i < kChains; ++i) acc[0] = _mm256_add_ps(acc[0], acc[i]);
  g_sink = _mm256_cvtss_f32(acc[0]);
}

__attribute__((target("avx512f"))) void avx512_loop() {
  __m512 acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = _mm512_set1_ps(static_cast<float>(i));
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(1e-3f);
  for (long n = 0; n < kIterations; ++n) {
#pragma GCC unroll 10
    for (int i = 0; i < kChains; ++i) acc[i] = _mm512_fmadd_ps(acc[i], a, b);
  }
  for (int i = 1; i < kChains; ++i) acc[0] = _mm512_add_ps(acc[0], acc[i]);
  g_sink = _mm512_cvtss_f32(acc[0]);
}

// Seconds from the moment all threads stand ready until the last one is done.
template <class F>
double together(int threads, F body) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> pool;
  for (int i = 0; i < threads; ++i) {
    pool.emplace_back([&, i] {
      ready.fetch_add(1);
      while (!go.load()) std::this_thread::yield();
      body(i);
    });
  }
  while (ready.load() < threads) std::this_thread::yield();
  const auto begin = std::chrono::steady_clock::now();
  go.store(true);
  for (std::thread& t : pool) t.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void report_fma(const char* name, int lanes, int threads, void (*loop)()) {
  double best = 1e30;
  for (int round = 0; round < 5; ++round) best = std::min(best, together(threads, [&](int) { loop(); }));
  std::printf("%s %.1f GFLOP/s\n", name, 2e-9 * lanes * kChains * static_cast<double>(kIterations) * threads / best);
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) report_fma("fma_avx2", 8, threads, avx2_loop);
  if (__builtin_cpu_supports("avx512f")) report_fma("fma_avx512", 16, threads, avx512_loop);
  constexpr size_t kBytes = size_t{256} << 20;  // per thread, past every cache
  std::vector<char*> from(static_cast<size_t>(threads)), to(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    from[static_cast<size_t>(i)] = static_cast<char*>(std::malloc(kBytes));
    to[static_cast<size_t>(i)] = static_cast<char*>(std::malloc(kBytes));
    if (!from[static_cast<size_t>(i)] || !to[static_cast<size_t>(i)]) return 1;
    std::memset(from[static_cast<size_t>(i)], 1, kBytes);
    std::memset(to[static_cast<size_t>(i)], 2, kBytes);
  }
  double best = 1e30;
  for (int round = 0; round < 5; ++round) {
    best = std::min(best, together(threads, [&](int i) {
                      std::memcpy(to[static_cast<size_t>(i)], from[static_cast<size_t>(i)], kBytes);
                    }));
  }
  std::printf("copy %.2f GB/s\n", 2e-9 * static_cast<double>(kBytes) * threads / best);
  return 0;
}
