// SPDX-License-Identifier: MIT
#include "cpu/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace gdn::cpu {
namespace {

constexpr int32_t kMaxThreads = 1024;
// A worker that finds no work spins this often before it sleeps: about 20-50 us, longer than the gap between two
// operators of a decode step, so that a chain of small calls does not pay a wake-up each.
constexpr int32_t kSpins = 2000;

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Arena {
  void* data = nullptr;
  size_t bytes = 0;
  void release() {
    std::free(data);
    data = nullptr;
    bytes = 0;
  }
  ~Arena() { release(); }
};
thread_local Arena tl_arena;
thread_local bool tl_in_parallel = false;

int32_t hardware_threads() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

int32_t environment_threads() {
  const char* text = std::getenv("GDN_NUM_THREADS");
  if (text == nullptr) return 0;
  char* end = nullptr;
  const long n = std::strtol(text, &end, 10);
  if (end != text && *end == '\0' && n >= 1) return static_cast<int32_t>(std::min<long>(n, kMaxThreads));
  std::fprintf(stderr,
               "libgdn: environment variable GDN_NUM_THREADS: found '%s', expected a number >= 1; using all CPUs\n",
               text);
  return 0;
}

struct Pool {
  std::mutex caller;  // held by the one call that owns the pool
  // (job number << 16) | places still open for workers. A worker joins by taking one place; the caller closes the job
  // by taking all that are left, so it never waits for a worker that is still asleep.
  std::atomic<uint64_t> state{0};
  std::atomic<uint32_t> epoch{0};     // bumped per job; what idle workers sleep on
  std::atomic<int32_t> finished{0};   // workers that left the current job
  std::atomic<int64_t> next_item{0};  // of the current job
  int64_t num_items = 0;
  int64_t grain = 1;
  const WorkRef* work = nullptr;
  int32_t num_workers = 0;
  std::vector<Arena*> arenas;  // of the workers; written under arenas_mutex
  std::mutex arenas_mutex;

  void drain(int32_t worker) {
    const WorkRef run = *work;
    for (;;) {
      const int64_t begin = next_item.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= num_items) return;
      const int64_t end = std::min(begin + grain, num_items);
      for (int64_t item = begin; item < end; ++item) run(item, worker);
    }
  }

  void worker_loop() {
    tl_in_parallel = true;
    {
      const std::lock_guard<std::mutex> lock(arenas_mutex);
      arenas.push_back(&tl_arena);
    }
    for (;;) {
      const uint32_t seen = epoch.load(std::memory_order_acquire);
      uint64_t s = state.load(std::memory_order_acquire);
      bool joined = false;
      while ((s & 0xffffu) != 0) {
        if (state.compare_exchange_weak(s, s - 1, std::memory_order_acq_rel)) {
          joined = true;
          break;
        }
      }
      if (joined) {
        drain(static_cast<int32_t>(s & 0xffffu));
        finished.fetch_add(1, std::memory_order_acq_rel);
        finished.notify_one();
        continue;
      }
      int32_t spins = 0;
      while (epoch.load(std::memory_order_acquire) == seen && spins < kSpins) {
        cpu_pause();
        ++spins;
      }
      if (spins == kSpins) epoch.wait(seen, std::memory_order_acquire);
    }
  }

  // Called with `caller` held.
  void grow(int32_t workers) {
    while (num_workers < workers) {
      try {
        std::thread([this] { worker_loop(); }).detach();
      } catch (const std::system_error&) {
        return;  // the machine gives no more threads: the ones there are do the work
      }
      ++num_workers;
    }
  }

  void run(int64_t items, int32_t threads, int64_t item_grain, const WorkRef& job) {
    grow(threads - 1);
    const int32_t places = std::min(threads - 1, num_workers);
    work = &job;
    num_items = items;
    grain = item_grain;
    next_item.store(0, std::memory_order_relaxed);
    finished.store(0, std::memory_order_relaxed);
    const uint64_t number = (state.load(std::memory_order_relaxed) >> 16) + 1;
    state.store((number << 16) | static_cast<uint64_t>(places), std::memory_order_release);
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
    drain(0);
    const uint64_t left = state.exchange(number << 16, std::memory_order_acq_rel) & 0xffffu;
    const int32_t joined = places - static_cast<int32_t>(left);
    int32_t spins = 0;
    for (int32_t done = finished.load(std::memory_order_acquire); done != joined;
         done = finished.load(std::memory_order_acquire)) {
      if (++spins < kSpins) {
        cpu_pause();
      } else {
        finished.wait(done, std::memory_order_acquire);
      }
    }
  }
};

// Never destroyed: detached workers may outlive static destruction.
Pool* g_pool = nullptr;
std::once_flag g_pool_once;
std::atomic<int32_t> g_default_threads{0};

// Only the forking thread lives on in a child: the child starts with a pool of its own (the old one, whose locks may be
// held, is leaked).
void reset_pool_in_child() { g_pool = new Pool; }

Pool& pool() {
  std::call_once(g_pool_once, [] {
    g_pool = new Pool;
    pthread_atfork(nullptr, nullptr, reset_pool_in_child);
  });
  return *g_pool;
}

}  // namespace

void set_default_threads(int32_t n) { g_default_threads.store(std::min(n, kMaxThreads), std::memory_order_relaxed); }

int32_t effective_threads(int32_t threads) {
  if (threads > 0) return std::min(threads, kMaxThreads);
  int32_t n = g_default_threads.load(std::memory_order_relaxed);
  if (n == 0) {
    static const int32_t detected = [] {
      const int32_t from_environment = environment_threads();
      return from_environment > 0 ? from_environment : hardware_threads();
    }();
    n = detected;
  }
  return n;
}

void parallel_for(int64_t num_items, int32_t threads, WorkRef work, int64_t grain) {
  if (num_items <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t pieces = (num_items + grain - 1) / grain;
  const int32_t use = static_cast<int32_t>(std::min<int64_t>(effective_threads(threads), pieces));
  if (use > 1 && !tl_in_parallel) {
    Pool& p = pool();
    const std::unique_lock<std::mutex> lock(p.caller, std::try_to_lock);
    if (lock.owns_lock()) {
      tl_in_parallel = true;
      p.run(num_items, use, grain, work);
      tl_in_parallel = false;
      return;
    }
  }
  for (int64_t item = 0; item < num_items; ++item) work(item, 0);
}

void* scratch(size_t bytes) {
  Arena& arena = tl_arena;
  if (arena.bytes < bytes) {
    arena.release();
    const size_t rounded = (bytes + 4095) & ~size_t{4095};
    if (rounded < bytes) return nullptr;
    arena.data = std::aligned_alloc(4096, rounded);
    arena.bytes = arena.data == nullptr ? 0 : rounded;
  }
  return arena.data;
}

void release_scratch() {
  tl_arena.release();
  Pool& p = pool();
  // With the caller's lock held no job runs, and workers touch their arenas only inside jobs.
  const std::unique_lock<std::mutex> lock(p.caller, std::try_to_lock);
  if (!lock.owns_lock()) return;
  const std::lock_guard<std::mutex> arenas_lock(p.arenas_mutex);
  for (Arena* arena : p.arenas) arena->release();
}

}  // namespace gdn::cpu
